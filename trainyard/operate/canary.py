"""A short job with another image, model or setting, held against the same job with the old one: kept, or rolled back.

The baseline is a job that ran, or is run first. A new image is released before the candidate, because a tenant's broker
takes released images alone; whatever then keeps it from being found as good brings the old one back.
"""

import json
import math
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainyard.errors import AwsRefusedError, InputError, JobFailedError, TrainyardError
from trainyard.launch.aws import aws_errors
from trainyard.launch.backend import Say
from trainyard.launch.place import environment_file, place_of
from trainyard.launch.record import JobRecord
from trainyard.launch.session import Account, open_account
from trainyard.launch.watch import record_now
from trainyard.operate.course import LOSS, Row, curve, dumped, newest_rows, units_per_second, value_at
from trainyard.operate.image import publish
from trainyard.operate.runbooks.figures import diverged
from trainyard.operate.runbooks.framework import keep, trainyard_command
from trainyard.operate.tracking import params_of
from trainyard.spec.base import apply_overrides, as_override_value, read_yaml
from trainyard.spec.checkpoint_names import place_for
from trainyard.spec.job import JobSpec, load_job
from trainyard.spec.platform import EnvironmentSpec, load_environment

POINTS = 4
"""Places of the losses' course that are compared, evenly spaced: a quarter, a half, three quarters, the end."""
NOT_A_SETTING = ("name", "checkpoint.destination")
"""What differs between any two jobs."""
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command."""
LOCAL = "--image: jobs of this machine run in no image; try it on another compute.backend"


@dataclass(frozen=True)
class Limits:
    """What a candidate may be worse by."""

    loss_tolerance: float = 0.02
    """Share by which a loss may be above the baseline's at the same step. Both read the same data with the same seed:
    an image alone moves it by rounding."""
    least_speed: float = 0.9
    """Share of the baseline's speed; runs of one image differ by a few percent."""


@dataclass(frozen=True)
class Check:
    """One thing that was compared."""

    name: str
    candidate: str
    baseline: str
    limit: str
    is_good: bool


@dataclass(frozen=True)
class Verdict:
    """Whether the candidate is as good."""

    checks: tuple[Check, ...]
    candidate: str = ""
    """Its job."""
    baseline: str = ""
    differs_in: tuple[str, ...] = ()
    """Settings in which the two jobs differ, with both values."""
    image_now: str = ""
    """Digest that new jobs run after this; empty where no image was tried."""

    @property
    def failed(self) -> tuple[Check, ...]:
        """What speaks against it."""
        return tuple(check for check in self.checks if not check.is_good)

    @property
    def why(self) -> str:
        """In a line; empty where it is as good."""
        return "; ".join(
            f"{check.name}: {check.candidate}" + (f", baseline {check.baseline}" if check.baseline != "-" else "")
            for check in self.failed
        )

    def lines(self) -> tuple[str, ...]:
        """Every check in a line."""
        return tuple(
            f"{'ok  ' if check.is_good else 'FAIL'} {check.name}: {check.candidate}"
            f" (baseline {check.baseline}; {check.limit})"
            for check in self.checks
        )

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "is_good": not self.failed, "why": self.why}


@dataclass(frozen=True)
class Ran:
    """A job that was followed to its end."""

    job_id: str
    state: str
    failure: str
    rows: Sequence[Row]
    record: JobRecord | None = None


def judge(candidate: Ran, baseline: Ran, limits: Limits, digest: str | None = None) -> Verdict:
    """Completed, no new anomaly, losses and speed within the limits, and by the image of `digest` where one is tried.
    Pure."""
    end = candidate.state if not candidate.failure else f"{candidate.state}: {candidate.failure}"
    checks = [Check("end", end, baseline.state, "Completed", candidate.state == "Completed")]
    if digest is not None:
        ran, before = (_digest(one.record) for one in (candidate, baseline))
        checks.append(Check("image", ran or "none", before or "none", digest, ran == digest))
    broken, before = diverged(candidate.rows), diverged(baseline.rows)
    checks.append(Check("divergence", broken or "none", before or "none", "none", not broken))
    now, old = (sum("anomaly" in row for row in ran.rows) for ran in (candidate, baseline))
    checks.append(Check("anomalies", str(now), str(old), f"at most {old}", now <= old))
    checks += _losses(candidate.rows, baseline.rows, limits)
    checks.append(_speed(candidate.rows, baseline.rows, limits))
    differs = _differences(candidate.record, baseline.record)
    return Verdict(tuple(checks), candidate.job_id, baseline.job_id, differs)


def _losses(candidate: Sequence[Row], baseline: Sequence[Row], limits: Limits) -> list[Check]:
    limit = f"at most {limits.loss_tolerance:.0%} above it"
    mine, others = curve(candidate, LOSS), curve(baseline, LOSS)
    common = min(max(mine, default=0), max(others, default=0))
    if not common:
        return [Check(LOSS, "no step" if not mine else "-", "no step" if not others else "-", limit, False)]
    checks = []
    for step in sorted({max(1, common * number // POINTS) for number in range(1, POINTS + 1)}):
        now, old = value_at(mine, step), value_at(others, step)
        if now is not None and old is not None:
            checks.append(_loss_check(f"{LOSS} at step {step}", now, old, limits, limit))
    told = [curve(rows, "validation_loss") for rows in (candidate, baseline)]
    both = sorted(set(told[0]) & set(told[1]))
    if both:
        name = f"validation_loss at step {both[-1]}"
        checks.append(_loss_check(name, told[0][both[-1]], told[1][both[-1]], limits, limit))
    return checks


def _loss_check(name: str, now: float, old: float, limits: Limits, limit: str) -> Check:
    is_good = math.isfinite(now) and now <= old + limits.loss_tolerance * abs(old)
    return Check(name, f"{now:.5g}", f"{old:.5g}", limit, is_good)


def _speed(candidate: Sequence[Row], baseline: Sequence[Row], limits: Limits) -> Check:
    now, old = units_per_second(candidate), units_per_second(baseline)
    limit = f"at least {limits.least_speed:.0%} of it"
    is_good = now is not None and old is not None and now >= limits.least_speed * old
    return Check("speed", _told(now), _told(old), limit, is_good)


def _digest(record: JobRecord | None) -> str:
    """Of the image that a job ran; empty where it ran in none, or in one that is not named by its digest."""
    return "" if record is None else (record.image or "").partition("@")[2]


def _told(speed: float | None) -> str:
    return "-" if speed is None else f"{speed:,.4g} a second"


def _differences(candidate: JobRecord | None, baseline: JobRecord | None) -> tuple[str, ...]:
    if candidate is None or baseline is None:
        return ()
    now, old = ({**params_of(record), "image": record.image or ""} for record in (candidate, baseline))
    keys = [key for key in dict.fromkeys([*old, *now]) if old.get(key) != now.get(key) and key not in NOT_A_SETTING]
    return tuple(f"{key}: {old.get(key) or '-'} -> {now.get(key) or '-'}" for key in keys)


@dataclass(frozen=True)
class Canary:
    """What is tried, and against what."""

    job: Path
    environment: str
    folder: Path
    """Keeps what was seen."""
    against: str | None = None
    """A job that ran; None: the job as its file has it, with the image in use, is run first."""
    image: str | None = None
    """Digest of the candidate's image; None: the one in use."""
    overrides: tuple[str, ...] = ()
    """The candidate's, on the job file's."""
    backend: str | None = None
    processes: int | None = None
    tenant: str | None = None
    """Whose the baseline is, where its name doesn't tell."""
    limits: Limits = Limits()

    @property
    def words(self) -> str:
        """As somebody would type it."""
        options: list[str] = []
        for name, value in (("--image", self.image), ("--against", self.against), ("--backend", self.backend)):
            options += [name, value] if value is not None else []
        options += [word for one in self.overrides for word in ("--set", one)]
        options += ["--processes", str(self.processes)] if self.processes is not None else []
        options += ["--tenant", self.tenant] if self.tenant is not None else []
        return shlex.join(
            ("trainyard", "canary", str(self.job), *options, *self._where, "--evidence", str(self.folder))
        )

    @property
    def _where(self) -> tuple[str, ...]:
        return ("--environment", self.environment)

    def make(self, say: Say) -> Verdict:
        """Run it and judge; a new image stays released only where the candidate is as good.

        InputError or AwsRefusedError where nothing could be tried; what was released by then is taken back.
        """
        release = None if self.image is None else self._release(self.image, say)
        baseline = self._baseline()
        keep(self.folder, "baseline-metrics.jsonl", dumped(baseline.rows))
        # Read now: the baseline may have taken hours, in which others release images.
        old = release.current() if release else None
        keep(self.folder, "before.json", {"digest": old, "baseline": baseline.job_id})
        if release is None or old is None:
            verdict = self._candidate(baseline)
        else:
            assert self.image is not None
            verdict = tried(release, old, self.image, lambda: self._candidate(baseline))
        keep(self.folder, "verdict.json", verdict.document())
        return verdict

    def check(self, say: Say) -> None:
        """InputError or AwsRefusedError where nothing could be tried, as `make` would say: nothing is changed."""
        if self.image is not None:
            self._release(self.image, say)
        if self.against is not None:
            self._baseline()

    def _release(self, digest: str, say: Say) -> "Release":
        """InputError or AwsRefusedError where that image can't be released, or where the job would not run it."""
        if self.backend == "local":
            raise InputError(LOCAL)
        moved = [] if self.backend is None else [f"compute.backend={self.backend}"]
        check_runs_released(load_job(self.job, [*self.overrides, *moved]))
        release = Release.of(load_environment(environment_file(self.environment)), say)
        release.check(digest)
        return release

    def _baseline(self) -> Ran:
        if self.against is None:
            options = self._launch_options((), "baseline")
            ran = run_job(self.job, options, self.folder, "baseline", self.environment, self.tenant)
            if ran.state != "Completed":
                raise JobFailedError(f"the baseline, job {ran.job_id}: {ran.state}: {ran.failure or 'see its logs'}")
            return ran
        ran = seen(self.against, self.environment, self.tenant)
        if not ran.rows:
            raise InputError(f"--against {self.against}: has no metrics yet; name a job that made steps")
        return ran

    def _candidate(self, baseline: Ran) -> Verdict:
        options = self._launch_options(self.overrides, "candidate")
        ran = run_job(self.job, options, self.folder, "candidate", self.environment, self.tenant)
        keep(self.folder, "candidate-metrics.jsonl", dumped(ran.rows))
        return judge(ran, baseline, self.limits, self.image)

    def _launch_options(self, overrides: Sequence[str], name: str) -> tuple[str, ...]:
        checkpoint = apply_overrides(read_yaml(self.job), overrides).get("checkpoint")
        stated = checkpoint.get("destination") if isinstance(checkpoint, dict) else None
        # Where the other saved it would go on, and train nothing that could be compared.
        if (own := place_for(f"canary-{name}-{secrets.token_hex(3)}", stated)) is not None:
            overrides = [*overrides, f"checkpoint.destination={as_override_value(own)}"]
        options = [word for one in overrides for word in ("--set", one)]
        options += ["--backend", self.backend] if self.backend is not None else []
        options += ["--processes", str(self.processes)] if self.processes is not None else []
        return (*options, *self._where)


def check_runs_released(spec: JobSpec) -> None:
    """InputError for a job that runs another image than the released one, or none: nothing would be tried."""
    compute = spec.compute
    if compute.backend == "local":
        raise InputError(LOCAL)
    own = {"slurm": "compute.slurm.container_image", "kubernetes": "compute.kubernetes.image"}.get(compute.backend)
    if compute.backend == "slurm" or (compute.backend == "kubernetes" and compute.kubernetes.image is not None):
        raise InputError(
            f"--image: this job runs what {own} says, not the released image; give --set {own}=... instead"
        )


@dataclass(frozen=True)
class Release:
    """The image that new jobs of an environment run."""

    current: Callable[[], str]
    """Digest in use now."""
    make: Callable[[str], object]
    """Releases a digest."""
    check: Callable[[str], object]
    """InputError or AwsRefusedError for a digest that can't be released."""
    say: Say

    @classmethod
    def of(cls, environment: EnvironmentSpec, say: Say, account: Account | None = None) -> "Release":
        """Of a deployed environment, by the caller's own credentials; AwsRefusedError where it isn't deployed."""
        account = account or open_account(environment)
        repository = publish.find_repository(account, environment)

        def current() -> str:
            with aws_errors("reading", f"SSM parameter {environment.image_parameter}"):
                answer = account.client("ssm").get_parameter(Name=environment.image_parameter)
            return str(answer["Parameter"]["Value"]).partition("@")[2]

        def check(digest: str) -> None:
            if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
                raise InputError(f"--image {digest}: must be sha256:<64 hex digits>")
            if not publish.is_there(account, repository, digest):
                raise AwsRefusedError(
                    f"--image {digest}: {repository.name} has none; publish it first "
                    "(scripts/publish_image ENV --push-only)"
                )

        return cls(current, lambda digest: publish.release(account, environment, repository, digest, say), check, say)


def tried(release: Release, old: str, digest: str, try_it: Callable[[], Verdict]) -> Verdict:
    """Release an image, try it, and take it back where it is not as good or anything came in between."""
    with _signals(_end):
        try:
            release.make(digest)
            try:
                verdict = try_it()
            except (JobFailedError, AwsRefusedError) as error:
                verdict = Verdict((Check("end", str(error), "-", "Completed", False),))
        except BaseException:
            _take_back(release, old, digest)  # nobody is left to decide: the old one stays in use
            raise
        if verdict.failed:
            _take_back(release, old, digest)
    return replace(verdict, image_now=release.current())


def _take_back(release: Release, old: str, digest: str) -> None:
    """The old image again, unless somebody has released another one since; nobody's signal cuts that short.
    JobFailedError where it can't be had: all new jobs then run what was tried."""
    with _signals(signal.SIG_IGN):
        try:
            now = release.current()
            if now == digest:
                release.make(old)
            elif now != old:
                release.say(f"{now} was released meanwhile, by somebody else: it stays, and {old} is not brought back")
        except TrainyardError as error:
            raise JobFailedError(
                f"{digest} was tried and is not kept, but may still be what new jobs run: {old} could not be brought "
                f"back ({error}); mend that, and bring it back: scripts/publish_image ENV --digest {old}"
            ) from error


def _end(*_: object) -> None:
    """The first signal's way out; a second one does not cut it short."""
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def _signals(handler: Callable[..., object] | signal.Handlers) -> Iterator[None]:
    """What ends a command goes to `handler`: Ctrl-C, SIGTERM and a terminal that goes away take the same way. One that
    is ignored (nohup's, a shell's background's) stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets nobody else hear signals
        return
    heard = [number for number in ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def run_job(job: Path, options: Sequence[str], folder: Path, name: str, environment: str, tenant: str | None) -> Ran:
    """Launch a job and follow it to its end; JobFailedError where it was not launched."""
    arguments = ("launch", str(job), *options, "--wait", "--json")
    done = subprocess.run(trainyard_command(*arguments), stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
    keep(folder, f"{name}.json", done.stdout)
    try:
        job_id = str(json.loads(done.stdout)["job_id"])
    except (ValueError, KeyError):
        raise JobFailedError(f"the {name} was not launched (trainyard {shlex.join(arguments)})") from None
    return seen(job_id, environment, tenant)


def seen(job_id: str, environment: str, tenant: str | None) -> Ran:
    """A job as it is now."""
    place = place_of(job_id, environment, tenant)
    record = record_now(place.store, place.backend, job_id)
    return Ran(job_id, record.state, record.attempt.failure, newest_rows(place, record), record)
