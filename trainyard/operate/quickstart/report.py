"""What a quickstart found: the report file (with its published schema), the closing table, the picture."""

import json
import shlex
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainyard.kept_room import write_whole
from trainyard.operate.quickstart.options import Options
from trainyard.spec.base import SpecModel
from trainyard.spec.words import counted


class _Reported(SpecModel):
    """Part of the report: its fields' texts are the published schema's descriptions."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class JobReport(_Reported):
    """The training job."""

    name: str
    """Its id: the SageMaker training job's name."""
    status: str
    steps: int
    hosts: int
    strategy: str
    tokens_per_second: float
    """Median over steps."""


class LossReport(_Reported):
    """Losses, in nats per token."""

    first: float
    last: float
    validation_last: float
    """On modules that training never saw."""
    unigram_entropy: float
    """Of the tokenized validation text: what a model without context could reach at best."""
    list: tuple[float, ...]
    """One per optimizer step."""


class ReclaimReport(_Reported):
    """The spot reclaim and the way back."""

    step: int
    """The last step completed before the reclaim."""
    resumed_step: int
    """The first step executed after it."""
    bitwise_equal: bool
    """Whether every loss and gradient norm equals the uninterrupted run's, bit for bit."""
    seconds_to_next_step: float
    """From the reclaim to the end of the first step after it."""


class IsolationReport(_Reported):
    """What the other tenant tried."""

    attempts: int
    denied: int
    controls_allowed: int
    """The same calls by the owner, which must succeed: a deny-all proves nothing."""
    details: tuple[str, ...]
    """One line an attempt."""


class CostReport(_Reported):
    """What the job would have cost on the planned instances."""

    planned_usd: float | None
    """By the plan, before launch; null where no price is known that is young enough."""
    price_basis: str
    """Which price, from where, of which day."""
    run_usd: float | None
    """The seconds that the job really held its hosts here, at the on-demand price."""


class QuickstartReport(_Reported):
    """`.trainyard/quickstart/report.json`."""

    schema_version: Literal[1] = 1
    passed: bool
    """Every claim of the quickstart held."""
    seconds: dict[str, float]
    """Phase to wall-clock seconds, and `total`."""
    tenants: tuple[str, ...]
    job: JobReport
    loss: LossReport
    reclaim: ReclaimReport
    isolation: IsolationReport
    cost: CostReport
    artifacts: tuple[str, ...] = Field(min_length=1)
    """URIs: checkpoints, metrics, result, picture."""
    machine: str


def write_report(report: QuickstartReport, folder: Path) -> Path:
    """report.json and its JSON schema in `folder`, each written whole or not at all."""
    for name, content in (
        ("report.schema.json", json.dumps(QuickstartReport.model_json_schema(), indent=2)),
        ("report.json", report.model_dump_json(indent=2)),
    ):
        write_whole(folder / name, content + "\n")
    return folder / "report.json"


def draw_loss(report: QuickstartReport, reference: tuple[float, ...], path: Path) -> None:
    """The loss curve as PNG: the interrupted run over the uninterrupted one, the reclaim, the unigram entropy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = range(1, len(report.loss.list) + 1)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(range(1, len(reference) + 1), reference, color="#b8c4d6", linewidth=5, label="uninterrupted run")
    axes.plot(steps, report.loss.list, color="#1f4e9c", linewidth=1.5, label="this job, reclaimed and resumed")
    axes.axhline(report.loss.unigram_entropy, color="#999999", linestyle="--", linewidth=1, label="unigram entropy")
    axes.axvline(
        report.reclaim.step, color="#c0392b", linewidth=1, label=f"spot reclaim after step {report.reclaim.step}"
    )
    axes.axvline(
        report.reclaim.resumed_step,
        color="#27803b",
        linestyle=":",
        linewidth=1.5,
        label=f"resumed at step {report.reclaim.resumed_step}",
    )
    axes.plot(
        [len(report.loss.list)],
        [report.loss.validation_last],
        "o",
        color="#d98200",
        label=f"validation {report.loss.validation_last:.2f}",
    )
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title=f"{report.job.name}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def usd(amount: float | None) -> str:
    """Dollars for people: cents, or four decimals below a dollar."""
    if amount is None:
        return "no price known"
    return f"${amount:,.2f}" if amount >= 1 else f"${amount:.4f}"


def sparkline(values: tuple[float, ...], width: int = 40) -> str:
    """`values` as one line of block characters, for a terminal."""
    blocks = "▁▂▃▄▅▆▇█"
    stride = max(1, -(-len(values) // width))
    sampled = values[::stride]
    low, high = min(sampled), max(sampled)
    return "".join(blocks[round((value - low) / ((high - low) or 1.0) * (len(blocks) - 1))] for value in sampled)


def print_summary(console: Console, report: QuickstartReport, options: Options) -> None:
    """The closing table: what happened, what it would have cost, where the time went, where to look next."""
    job, reclaim, cost = report.job, report.reclaim, report.cost
    yes = {True: "[green]yes[/]", False: "[red]NO[/]"}
    table = Table(title="What happened", show_header=False, title_justify="left", pad_edge=False)
    table.add_row(
        "job",
        f"{job.name}: {job.status}, {counted(job.steps, 'step')} on {counted(job.hosts, 'host')} ({job.strategy})",
    )
    table.add_row("loss", f"{report.loss.first:.3f} → {report.loss.last:.3f}  {sparkline(report.loss.list)}")
    table.add_row(
        "validation",
        f"{report.loss.validation_last:.3f}, below the unigram entropy of {report.loss.unigram_entropy:.3f}: "
        + yes[report.loss.validation_last < report.loss.unigram_entropy],
    )
    table.add_row("speed", f"{report.job.tokens_per_second:,.0f} tokens/s on this machine")
    table.add_row(
        "spot reclaim",
        f"after step {reclaim.step}; resumed at step {reclaim.resumed_step} in "
        f"{reclaim.seconds_to_next_step:.1f} s; bitwise equal to the uninterrupted run: {yes[reclaim.bitwise_equal]}",
    )
    table.add_row(
        "isolation",
        f"{report.isolation.denied} of {counted(report.isolation.attempts, 'attempt')} of the other tenant denied; "
        f"{report.isolation.controls_allowed} of the owner's own calls allowed",
    )
    table.add_row(
        "cost",
        f"planned {usd(cost.planned_usd)}; these seconds there {usd(cost.run_usd)} ({cost.price_basis})",
    )
    times = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in report.seconds.items() if phase != "total")
    table.add_row("time", f"{report.seconds['total']:.0f} s: {times}")
    table.add_row("look next", Text("\n").join(map(Text, _look_next(job.name, options))))
    console.print(table, highlight=False)


def _look_next(job_id: str, options: Options) -> tuple[str, ...]:
    """Files and commands."""
    usual = options.checkout / "environments/local.yaml"
    where = "" if options.environment == usual else f" --environment {shlex.quote(str(options.environment))}"
    return (
        str(options.output_dir / "report.json"),
        str(options.output_dir / "loss.png"),
        f".venv/bin/trainyard status {job_id}{where}",
        f".venv/bin/trainyard logs {job_id}{where}",
    )
