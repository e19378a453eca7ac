"""`canary`: a short job with another image, model or setting against the old one's figures; kept, or rolled back."""

import contextlib
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainyard.cli.jobs import BackendOption, ProcessesOption, load_for_backend
from trainyard.cli.options import DEFAULT_ENVIRONMENT, EnvironmentOption, JobFile, JsonOption, SetOption, TenantOption
from trainyard.cli.output import console, print_json
from trainyard.errors import InputError, JobFailedError

if TYPE_CHECKING:
    from rich.table import Table

    from trainyard.operate.canary import Verdict

ImageOption = Annotated[
    str | None, typer.Option("--image", metavar="sha256:...", help="Of an image in the platform's repository.")
]
AgainstOption = Annotated[
    str | None, typer.Option("--against", metavar="JOB", help="A job with the old; default: it is run first.")
]
ToleranceOption = Annotated[
    float | None, typer.Option("--loss-tolerance", min=0, help="Share a loss may be higher by; default: 0.02.")
]
SpeedOption = Annotated[
    float | None, typer.Option("--min-speed", min=0, help="Share of the old speed to reach; default: 0.9.")
]
PromoteOption = Annotated[
    bool, typer.Option("--promote", help="Export and register the candidate's model where it is as good.")
]
GateOption = Annotated[
    list[str] | None, typer.Option("--gate", metavar="METRIC<=VALUE", help="With --promote: as `promote` has it.")
]
EvidenceOption = Annotated[Path | None, typer.Option("--evidence", metavar="FOLDER", help="Keep what was seen there.")]


def register(app: typer.Typer) -> None:
    """Put the verb of this file into the command line."""
    app.command()(canary)


def canary(
    job: JobFile,
    image: ImageOption = None,
    overrides: SetOption = None,
    against: AgainstOption = None,
    loss_tolerance: ToleranceOption = None,
    min_speed: SpeedOption = None,
    promote: PromoteOption = False,
    gate: GateOption = None,
    evidence: EvidenceOption = None,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    backend: BackendOption = None,
    processes: ProcessesOption = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a short job with a new image or other settings, and hold it against the old: end, losses, anomalies, speed.

    Exit code 1 where it is worse. A new image is released for the canary, and the old one again where that is worse.

    Example: trainyard canary jobs/tiny.yaml --set training.optimizer.kind=adafactor --backend local
    """
    from trainyard.launch.names import job_id_of
    from trainyard.operate.canary import Canary, Limits
    from trainyard.operate.runbooks.framework import evidence_folder

    if image is None and not overrides:
        raise InputError("canary: nothing is to be tried; give --image sha256:... or --set SECTION.KEY=VALUE")
    # What is wrong is said before anything is released or launched.
    spec = load_for_backend(job, overrides or [], backend)
    _check_promotion(promote, gate or [], spec.compute.backend)
    given = {"loss_tolerance": loss_tolerance, "least_speed": min_speed}
    trial = Canary(
        job=job,
        environment=environment,
        folder=evidence_folder("canary", evidence),
        against=None if against is None else job_id_of(against),
        image=image,
        overrides=tuple(overrides or []),
        backend=backend,
        processes=processes,
        tenant=tenant,
        limits=Limits(**{name: value for name, value in given.items() if value is not None}),
    )
    out = console(stderr=True)
    verdict = trial.make(lambda words: out.print(words, markup=False))
    if not as_json:
        console().print(_table(verdict))
        print(f"evidence: {trial.folder}")
    document = verdict.document() | {"evidence": str(trial.folder)}
    try:
        if promote and not verdict.failed:
            document |= _promoted(verdict.candidate, gate, environment, tenant, as_json=as_json)
    finally:
        if as_json:
            print_json(document)  # one of both; of the canary alone where its model was refused
    if verdict.failed:
        now = f"; new jobs run {verdict.image_now}" if image is not None else ""
        raise JobFailedError(f"the candidate is worse: {verdict.why}{now}")
    if not as_json and not promote:
        _say_what_next(verdict, image)


def _check_promotion(promote: bool, gates: list[str], backend: str) -> None:
    """InputError for what `promote` would refuse when both jobs are paid."""
    from trainyard.launch.local_backend import check_trainer
    from trainyard.launch.registry import parse_gate

    if gates and not promote:
        raise InputError("--gate: is for --promote; give that too, or leave it out")
    if not promote:
        return
    if not gates:
        raise InputError("--promote: needs --gate, what the model must reach, e.g. --gate 'validation_loss<=2.5'")
    for text in gates:
        parse_gate(text)
    if backend == "local":
        raise InputError(
            "--promote: jobs of this machine have no registry; leave it out, `trainyard export` writes one"
        )
    check_trainer()


def _promoted(
    job_id: str, gate: list[str] | None, environment: str, tenant: str | None, *, as_json: bool
) -> dict[str, Any]:
    """Export and register the model; with `as_json` what `promote --json` says, else it is printed."""
    from trainyard.cli.exporting import promote as promote_model

    if not as_json:
        promote_model(job_id, gate=gate, environment=environment, tenant=tenant)
        return {}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        promote_model(job_id, gate=gate, environment=environment, tenant=tenant, as_json=True)
    return {"promoted": json.loads(said.getvalue() or "null")}


def _say_what_next(verdict: "Verdict", image: str | None) -> None:
    if image is not None:
        print(f"{image} is kept: new jobs run it")
    else:
        print(f"as good; trainyard promote {verdict.candidate} registers its model")


def _table(verdict: "Verdict") -> "Table":
    from rich.table import Table
    from rich.text import Text

    title = f"{verdict.candidate or 'candidate'} against {verdict.baseline or 'baseline'}"
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False, header_style="bold")
    for heading in ("", "candidate", "baseline", "limit", ""):
        table.add_column(heading, overflow="fold")
    for check in verdict.checks:
        word = Text("ok", style="green") if check.is_good else Text("FAIL", style="red")
        table.add_row(check.name, check.candidate, check.baseline, check.limit, word)
    for line in verdict.differs_in:
        table.add_row("differs in", line, style="dim")
    return table
