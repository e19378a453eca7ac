"""What a running job measures of itself for others: one list, from which the trainer's exposition, CloudWatch's alarms
and dashboards, Prometheus' rules and Grafana's dashboard are all made, so that nothing is drawn that nobody emits.

A meter is read from the row that the trainer writes to metrics.jsonl after a step (`Meter.path`), or from what only the
trainer knows at that moment (`LIVE`, put beside the row under that key).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

NAMESPACE = "trainyard/jobs"
"""Of the metrics in CloudWatch. Tenants are told apart by a dimension that a job states itself, and could state wrongly
(docs/meters.md). No tenant is called `jobs`: its own namespace would be this one."""

LIVE = "live"
"""Key of a row's figures that are not in metrics.jsonl, because they grow old: ages and shares up to now."""

Unit = Literal["Seconds", "Bytes", "Bytes/Second", "Count", "Count/Second", "None"]
"""Names of CloudWatch's units that are used here."""


@dataclass(frozen=True)
class Meter:
    """One figure of a job."""

    name: str
    """In snake case, with its unit where it has one; Prometheus has `trainyard_` before it."""
    help: str
    unit: Unit
    path: tuple[str, ...]
    """Keys from the row down to the number. A row that lacks it leaves the meter as it was."""
    per_tenant: bool = False
    """Also published for the tenant as a whole, for alarms, which can't search among jobs."""
    is_share: bool = False
    """Of something whole, which is 1: drawn in percent."""
    is_event: bool = False
    """Of something that happened once: CloudWatch gets it once, and Prometheus has it for no longer than a period, so
    that one bad one is one bad period and not all that follow."""

    @property
    def prometheus_name(self) -> str:
        """As Prometheus has it."""
        return f"trainyard_{self.name}"

    @property
    def cloudwatch_name(self) -> str:
        """As CloudWatch has it: StepSeconds."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    def read(self, row: Mapping[str, Any]) -> float | None:
        """The figure in a row; None where the row has none, or one that is no number."""
        found: Any = row
        for key in self.path:
            found = found.get(key) if isinstance(found, Mapping) else None
        if isinstance(found, list):
            return float(len(found))
        return None if isinstance(found, bool) or not isinstance(found, int | float) else float(found)


def _observed(*path: str) -> tuple[str, ...]:
    return ("observed", *path)


METERS = (
    Meter("step", "Last finished optimizer step", "Count", ("step",)),
    Meter("steps_planned", "Optimizer steps of the whole job", "Count", (LIVE, "steps_planned")),
    Meter("attempt", "Starts of the job so far; restarts are one less", "Count", ("attempt",)),
    Meter("loss", "Mean loss over the tokens of the last global batch, nats", "None", ("loss",)),
    Meter("grad_norm", "Global 2-norm of the gradient before clipping", "None", ("grad_norm",)),
    Meter("learning_rate", "Learning rate of the last step", "None", ("learning_rate",)),
    Meter("validation_loss", "Mean loss over the validation sets, nats", "None", ("validation_loss",)),
    Meter("validation_perplexity", "exp of the validation loss", "None", ("validation_perplexity",)),
    Meter("step_seconds", "Time of the last optimizer step", "Seconds", ("step_seconds",)),
    Meter("data_seconds", "Of it, waiting for data", "Seconds", ("breakdown", "data")),
    Meter("forward_seconds", "Of it, forward passes", "Seconds", ("breakdown", "forward")),
    Meter("backward_seconds", "Of it, backward passes", "Seconds", ("breakdown", "backward")),
    Meter(
        "communication_seconds",
        "Of it, waiting for other ranks' data (exposed communication)",
        "Seconds",
        ("breakdown", "communication"),
    ),
    Meter("optimizer_seconds", "Of it, the optimizer", "Seconds", ("breakdown", "optimizer")),
    Meter("checkpoint_seconds", "Of it, blocked by a checkpoint", "Seconds", ("breakdown", "checkpoint")),
    Meter(
        "tokens_per_second",
        "Units of the task (tokens; images for image classification) a second, all ranks, last step",
        "Count/Second",
        (LIVE, "tokens_per_second"),
    ),
    Meter(
        "throughput_of_plan",
        "Speed of the last observed window over the plan's: 1 is as planned; absent where there is no plan (CPU)",
        "None",
        _observed("throughput", "of_plan"),
        per_tenant=True,
        is_share=True,
    ),
    Meter(
        "mfu",
        "Model FLOPs over the devices' peak, causal attention",
        "None",
        _observed("throughput", "mfu_causal"),
        is_share=True,
    ),
    Meter(
        "peak_device_bytes",
        "Peak memory of the worst rank's device",
        "Bytes",
        _observed("peak_bytes", "allocated_peak"),
    ),
    Meter(
        "gpu_utilization",
        "Share of the time in which a kernel ran, mean of the GPUs; a full GPU may still compute little: see mfu",
        "None",
        _observed("gpu", "utilization"),
        is_share=True,
    ),
    Meter(
        "gpu_held_back",
        "Share of the time in which heat, the power brake or the hardware kept clocks down, worst GPU",
        "None",
        _observed("gpu", "held_back"),
        is_share=True,
    ),
    Meter(
        "gpu_memory_share",
        "Most of a GPU's memory that was taken, by whomever, over what it has, fullest GPU",
        "None",
        _observed("gpu", "memory_peak"),
        is_share=True,
    ),
    Meter("peak_host_bytes", "Peak resident memory of the worst rank", "Bytes", _observed("peak_bytes", "host_peak")),
    Meter(
        "network_sent_bytes_per_second",
        "Sent by a host, all its network cards, mean of the hosts",
        "Bytes/Second",
        _observed("network", "sent_bytes_per_second"),
    ),
    Meter(
        "network_received_bytes_per_second",
        "Received by a host, all its network cards, mean of the hosts",
        "Bytes/Second",
        _observed("network", "received_bytes_per_second"),
    ),
    Meter("stragglers", "Ranks slower than their like in the last observed window", "Count", _observed("stragglers")),
    Meter("leaks", "Memories that grew like a leak in the last observed window", "Count", _observed("leaks")),
    Meter(
        "checkpoint_age_seconds",
        "Time since the step of the newest committed checkpoint, or since the start",
        "Seconds",
        (LIVE, "checkpoint_age_seconds"),
        per_tenant=True,
    ),
    Meter(
        "checkpoint_save_seconds",
        "The last save, from its step to its commit, most of it beside training",
        "Seconds",
        ("checkpoint", "save_seconds"),
    ),
    Meter(
        "goodput",
        "Time of steps that were kept over wall time since the job's first start",
        "None",
        (LIVE, "goodput"),
        per_tenant=True,
        is_share=True,
    ),
    Meter(
        "start_seconds",
        "From the newest start of the job's processes to the end of its first step: rendezvous, model, checkpoint",
        "Seconds",
        (LIVE, "start_seconds"),
        per_tenant=True,
        is_event=True,
    ),
    Meter(
        "queue_seconds",
        "From the launch to the start of the job's processes: quota, machines, image, inputs",
        "Seconds",
        (LIVE, "queue_seconds"),
        per_tenant=True,
        is_event=True,
    ),
    Meter(
        "launch_seconds",
        "From the launch to the end of the job's first step",
        "Seconds",
        (LIVE, "launch_seconds"),
        per_tenant=True,
        is_event=True,
    ),
    Meter(
        "recovery_seconds",
        "From the last step known before a failure or a reclaim to the end of the first step after it",
        "Seconds",
        (LIVE, "recovery_seconds"),
        per_tenant=True,
        is_event=True,
    ),
)
"""Everything that is emitted. Other counters of GPUs and cards (power, temperatures, NVLink) are the hosts' own
exporters' affair."""

BY_NAME = {meter.name: meter for meter in METERS}


PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Is it on its way?", ("step", "steps_planned", "attempt", "goodput", "throughput_of_plan")),
    ("Was it waited for?", ("queue_seconds", "launch_seconds", "start_seconds", "recovery_seconds")),
    ("Does it learn?", ("loss", "validation_loss", "validation_perplexity", "grad_norm", "learning_rate")),
    ("Is it fast?", ("tokens_per_second", "mfu", "gpu_utilization", "gpu_held_back", "step_seconds", "stragglers")),
    (
        "Where does a step's time go?",
        (
            "data_seconds",
            "forward_seconds",
            "backward_seconds",
            "communication_seconds",
            "optimizer_seconds",
            "checkpoint_seconds",
        ),
    ),
    (
        "Memory and network",
        (
            "peak_device_bytes",
            "gpu_memory_share",
            "peak_host_bytes",
            "leaks",
            "network_sent_bytes_per_second",
            "network_received_bytes_per_second",
        ),
    ),
    ("Could it come back?", ("checkpoint_age_seconds", "checkpoint_save_seconds")),
)
"""Panels by the question that they answer; every meter has its place in one of them."""

PERIOD_MINUTES = 5
"""A sample of each so often decides whether the period was good."""


@dataclass(frozen=True)
class Objective:
    """A service level: in so many of all periods a meter of every job stays on the good side of a limit."""

    name: str
    meter: Meter
    limit: float
    is_upper: bool
    """Whether values above the limit are bad (a time), or those below it (a speed)."""
    target: float
    """Share of periods that must be good."""
    told: str
    """What went wrong, with `{limit}` in it, and what whoever is woken does first."""

    @property
    def advice(self) -> str:
        """`told`, with the limit in words."""
        return self.told.format(limit=_in_words(self.limit) if self.is_upper else f"{100 * self.limit:.12g} %")

    def advice_at(self, environment: str) -> str:
        """`advice`, with its commands as they are typed for a job of that environment."""
        return self.advice.replace(" JOB", f" JOB --environment {environment}")

    @property
    def budget(self) -> float:
        """Share of periods that may be bad."""
        return 1.0 - self.target

    def is_bad(self, value: float) -> bool:
        """Whether a period's value breaks the objective."""
        return value > self.limit if self.is_upper else value < self.limit


def _in_words(seconds: float) -> str:
    """In the largest unit of which it is a whole number: an hour, 70 minutes, 1.5 seconds."""
    for length, one, many in ((3600, "an hour", "hours"), (60, "a minute", "minutes"), (1, "a second", "seconds")):
        if seconds >= length and seconds % length == 0:
            return one if seconds == length else f"{seconds / length:.15g} {many}"
    return f"{seconds:.15g} seconds"


LEAST_BAD_PERIODS = 2
"""One late sample is no trend."""


@dataclass(frozen=True)
class Burn:
    """An alarm on how fast the error budget goes: so many times the rate that would just use it up in 30 days."""

    name: str
    rate: float
    window_minutes: int

    def bad_periods(self, objective: Objective) -> tuple[int, int]:
        """(bad periods that alarm, periods in the window)."""
        num_periods = self.window_minutes // PERIOD_MINUTES
        return max(LEAST_BAD_PERIODS, round(self.rate * objective.budget * num_periods)), num_periods

    def rate_at_alarm(self, objective: Objective) -> float:
        """How many times too fast the budget goes at so many bad periods: near `rate`, as these are whole and two at
        least."""
        bad, num_periods = self.bad_periods(objective)
        return bad / num_periods / objective.budget


BURNS = (Burn("fast", 14.4, 60), Burn("slow", 6.0, 360))
"""The two usual pairs of the Google SRE workbook, chapter 5: 2 % of a month's budget in an hour, 5 % in six."""

OBJECTIVES = (
    Objective(
        "throughput",
        BY_NAME["throughput_of_plan"],
        0.85,
        is_upper=False,
        target=0.99,
        told="a job runs below {limit} of its plan's speed: scripts/runbooks/job_slow JOB, docs/runbooks/job_slow.md",
    ),
    Objective(
        "checkpoint-age",
        BY_NAME["checkpoint_age_seconds"],
        1200.0,
        is_upper=True,
        target=0.99,
        told="a job's newest checkpoint is older than {limit}: scripts/runbooks/checkpoint_stale_or_corrupt JOB,"
        " docs/runbooks/checkpoint_stale_or_corrupt.md; one that makes no steps: scripts/runbooks/job_hung JOB",
    ),
    Objective(
        "start",
        BY_NAME["start_seconds"],
        300.0,
        is_upper=True,
        target=0.99,
        told="a start took over {limit} to its first step: trainyard status JOB says where the time went",
    ),
    Objective(
        "queue",
        BY_NAME["queue_seconds"],
        3600.0,
        is_upper=True,
        target=0.99,
        told="a job waited over {limit} for its machines: scripts/runbooks/capacity_or_quota_short JOB,"
        " docs/runbooks/capacity_or_quota_short.md",
    ),
    Objective(
        "launch",
        BY_NAME["launch_seconds"],
        4200.0,
        is_upper=True,
        target=0.99,
        told="a job made its first step over {limit} after its launch: trainyard status JOB says what it waited for",
    ),
    Objective(
        "recovery",
        BY_NAME["recovery_seconds"],
        300.0,
        is_upper=True,
        target=0.99,
        told="a job was away for over {limit} after a failure or a reclaim: trainyard status JOB, docs/recovery.md",
    ),
    Objective(
        "goodput",
        BY_NAME["goodput"],
        0.8,
        is_upper=False,
        target=0.95,
        told="under {limit} of a job's time makes steps that it keeps: trainyard status JOB says where the rest goes",
    ),
)
"""What a tenant is promised, and alarmed about, where it states no other limits (`spec.objectives`). A job tells of a
wait once it is over: of one that still waits the budget meter tells; one that failed for good rings by SageMaker's own
event (stacks/constructs/alarms.py)."""
