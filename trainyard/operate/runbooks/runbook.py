"""What a runbook is to the command line: its name, its options, and what it does."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trainyard.errors import InputError
from trainyard.launch.names import job_id_of
from trainyard.launch.place import Place, TenantAccess, environment_file, open_tenant, place_of
from trainyard.launch.session import Account, open_account
from trainyard.operate.runbooks.diagnosis import Diagnose
from trainyard.operate.runbooks.evidence import Evidence, gather
from trainyard.operate.runbooks.framework import Report, Say, Step, perform
from trainyard.spec.platform import EnvironmentSpec, load_environment

EXAMPLE_JOB = "acme-llama-20260131120000-1a2b"


@dataclass
class Context:
    """One call of a runbook."""

    options: argparse.Namespace
    report: Report
    say: Say

    @property
    def dry_run(self) -> bool:
        """Whether nothing is to be changed."""
        return not getattr(self.options, "yes", False)

    @property
    def environment(self) -> EnvironmentSpec:
        """The environment that was named."""
        return load_environment(self.environment_path)

    @property
    def environment_path(self) -> Path:
        """Its file, by all its folders: steps name it to commands that run in the checkout's folder."""
        return environment_file(self.options.environment).absolute()

    @property
    def environment_words(self) -> str:
        """The environment as it was named, a path by all its folders: what a step's command is told."""
        given: str = self.options.environment
        return str(self.environment_path) if environment_file(given) == Path(given) else given

    def account(self) -> Account:
        """The caller's own credentials, in the environment's account."""
        return open_account(self.environment)

    def tenant(self, name: str) -> TenantAccess:
        """The tenant, as its launcher."""
        return open_tenant(self.environment, name, "--tenant")

    def place(self, job_id: str) -> Place:
        """Where a job lives."""
        return place_of(job_id, self.options.environment, self.options.tenant)

    def where(self, place: Place) -> tuple[str, ...]:
        """Options that lead a `trainyard` verb to the same place; none on this machine."""
        if place.s3 is None:
            return ()
        tenant = ("--tenant", self.options.tenant) if self.options.tenant else ()
        return ("--environment", self.environment_words, *tenant)

    def perform(self, steps: list[Step]) -> None:
        """Make the steps, or print them."""
        perform(self.report, steps, dry_run=self.dry_run, say=self.say)

    def gather(self) -> Evidence:
        """The job that was named, or the files of lines alone; InputError where neither is given."""
        given: list[Path] = self.options.log or []
        if self.options.job is None and not given:
            raise InputError("JOB: missing; give a job's id (`trainyard jobs` lists them), or --log FILE")
        job_id = None if self.options.job is None else job_id_of(self.options.job)
        place = None if job_id is None else self.place(job_id)
        self.say("gathering")
        where = () if place is None else self.where(place)
        # Jobs of this machine are nobody's; and no environment need be there for them.
        tenants = self.environment.tenants if place is not None and place.s3 is not None else None
        return gather(place, job_id or "", given, self.report.folder, where=where, tenants=tenants)


def count(text: str) -> int:
    """An option's whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 1 on")
    return int(text)


def _no_more(_: argparse.ArgumentParser) -> None:
    """For runbooks without options of their own."""


@dataclass(frozen=True)
class Runbook:
    """One of the catalog."""

    name: str
    summary: str
    run: Callable[[Context], None] = field(repr=False)
    """Fills the report."""
    more_options: Callable[[argparse.ArgumentParser], None] = field(default=_no_more, repr=False)
    diagnose: Diagnose | None = field(default=None, repr=False)
    """Of one that looks at a job: what it says of the evidence. Pure."""
    changes: bool = True
    """Whether it has steps that change something, and so `--yes`."""
    subject: str = "job"
    """Its argument: job, tenant, or environment."""
    example: str = ""
    """What follows its name in an example; empty: the subject alone."""

    @property
    def example_words(self) -> str:
        """What somebody would type."""
        alone = {"job": f"{EXAMPLE_JOB} --environment production", "tenant": "--tenant acme --environment production"}
        return f"scripts/runbooks/{self.name} {self.example or alone[self.subject]}"


def diagnosing(name: str, summary: str, diagnose: Diagnose) -> Runbook:
    """A runbook that looks at a job and changes nothing."""

    def run(context: Context) -> None:
        context.report.findings += diagnose(context.gather())

    return Runbook(name, summary, run, diagnose=diagnose, changes=False)
