"""What a campaign can do to a job, where, and what must follow."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Effect = Literal["restarts", "goes_on", "stops"]
"""The ranks are started again; or nothing at all happens to them; or they save, and the job is resumed by somebody."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    name: str
    sites: tuple[str, ...]
    """Of `SITES`."""
    effect: Effect = "restarts"
    moments: tuple[str, ...] = ("step",)
    is_outside: bool = False
    """Whoever watches does it, when a rank says that its moment has come."""
    is_damage: bool = False
    """To the newest checkpoint; then a rank is killed."""
    is_punctual: bool = False
    """It happens to the thread that trains, not at any moment of it."""
    after: str = ""
    """Only right after a fault of that kind; empty: after any."""
    hold_seconds: float = 0.1
    """How much longer each step takes while it goes on, so that few other faults come meanwhile, nor the job's end: who
    is told to stop in the last step is done."""


SITES = ("one_host", "two_hosts", "cloud", "desk", "slurm")
"""One host or two of this machine, the emulator's SageMaker and S3, `trainyard launch --backend local`, and a real
Slurm with two machines."""
_HOSTS = ("one_host", "two_hosts")
_SLURM = ("slurm",)
_ALL = SITES
_ANY_TIME = ("step", "save", "restore")

KINDS = (
    Kind("kill", _ALL, moments=_ANY_TIME),
    Kind("freeze", _ALL, moments=_ANY_TIME),
    Kind("raise", _ALL, is_punctual=True),
    Kind("out_of_host_memory", _HOSTS, is_punctual=True),
    Kind("out_of_device_memory", _HOSTS, is_punctual=True),
    Kind("terminate_rank", (*_HOSTS, "slurm"), "stops", moments=("step", "save")),
    Kind("slow_rank", (*_HOSTS, "cloud"), "goes_on", is_punctual=True),
    Kind("clock_jump", _HOSTS, "goes_on", is_punctual=True),
    Kind("kill_host", (*_HOSTS, "cloud", "slurm"), moments=_ANY_TIME, is_outside=True),
    Kind("freeze_host", ("two_hosts", "slurm"), is_outside=True),
    Kind("partition", ("two_hosts",), is_outside=True),
    Kind(
        "disk_full", (*_HOSTS, "desk", "slurm"), "goes_on", moments=("step", "save"), is_outside=True, hold_seconds=0.5
    ),
    *(
        Kind(name, (*_HOSTS, "cloud", "slurm"), is_outside=True, is_damage=True, is_punctual=True)
        for name in ("shard_deleted", "shard_truncated", "shard_flipped", "marker_corrupted", "manifest_missing")
    ),
    Kind("reclaim", ("cloud",), moments=_ANY_TIME, is_outside=True),
    Kind("reclaim_again", ("cloud",), moments=("restore",), is_outside=True, after="reclaim"),
    Kind("s3_503", ("cloud",), "goes_on", moments=("step", "save"), is_outside=True),
    Kind("s3_slow_down", ("cloud",), "goes_on", moments=("step", "save"), is_outside=True),
    Kind("s3_timeout", ("cloud",), "goes_on", moments=("save",), is_outside=True),
    Kind("s3_partial_write", ("cloud",), "goes_on", moments=("save",), is_outside=True),
    Kind("s3_wrong_etag", ("cloud",), "goes_on", moments=("save",), is_outside=True),
    Kind("expired_credential", ("cloud",), "goes_on", moments=("save",), is_outside=True),
    # The launcher: at the desk the supervisor, on Slurm the batch script.
    Kind("kill_launcher", ("desk", "slurm"), moments=_ANY_TIME, is_outside=True),
    Kind("two_launchers", ("desk", "slurm"), is_outside=True),
    # A host while the shared disk is full; a machine with its daemon; what an administrator, an urgent job and people
    # with `scancel` do; the time limit.
    Kind("kill_host_disk_full", _SLURM, is_outside=True),
    Kind("node_lost", _SLURM, moments=_ANY_TIME, is_outside=True),
    Kind("requeue", _SLURM, "stops", moments=("step", "save"), is_outside=True, hold_seconds=2.0),
    Kind("preempted", _SLURM, "stops", moments=("step", "save"), is_outside=True, hold_seconds=2.0),
    Kind("time_limit", _SLURM, "stops", moments=("step", "save"), is_outside=True, hold_seconds=5.0),
    Kind("scancel_signal", _SLURM, "stops", moments=("step", "save"), is_outside=True, hold_seconds=2.0),
    Kind("scancel", _SLURM, "stops", moments=("step", "save"), is_outside=True, hold_seconds=2.0),
    Kind("controller_lost", _SLURM, "goes_on", moments=("step", "save"), is_outside=True),
)
_NAMES_IN_RANKS = {
    "freeze": "stop",
    "terminate_rank": "terminate",
    "out_of_host_memory": "oom_host",
    "out_of_device_memory": "oom_device",
    "slow_rank": "slow",
    "clock_jump": "clock",
}
_STEPS_APART = 4
_FAULTS_UNTIL_ANOTHER = 2
"""After so many more there is a second good checkpoint again."""
_FIRST_STEP = 5
"""The first checkpoint is of step 3."""
_STEPS_AFTER = 7
_FIRST_DAMAGED_STEP = 7
"""There are two checkpoints, of steps 3 and 6: one to spoil and one to go back to."""


@dataclass(frozen=True)
class Fault:
    """One that is to happen: the kind, the moment, and what the ranks are told of it."""

    kind: Kind
    moment: str
    order: dict[str, Any]

    @property
    def name(self) -> str:
        """`kind`, or `kind@moment` where it isn't a step."""
        return self.kind.name if self.moment == "step" else f"{self.kind.name}@{self.moment}"


def parsed(name: str) -> tuple[Kind, str]:
    """Kind and moment of a `Fault.name`; ValueError where there is no such fault."""
    word, _, moment = name.partition("@")
    kind = next((kind for kind in KINDS if kind.name == word), None)
    if kind is None:
        raise ValueError(f"{name}: no such kind; there are {', '.join(kind.name for kind in KINDS)}")
    moment = moment or "step"
    if moment not in kind.moments and name != word:
        raise ValueError(f"{name}: {word} happens at {', '.join(kind.moments)}")
    return kind, moment if moment in kind.moments else kind.moments[0]


class Deck:
    """Deals what was played least: the engine, the site that has most of it, and there kind, moment and engine."""

    def __init__(self, sites: tuple[str, ...] = SITES, *, left_out: Iterable[str] = ()) -> None:
        """`sites`: those that this machine and campaign have. `left_out`: kinds that it can't show."""
        self._sites = sites
        self._kinds = [kind for kind in KINDS if kind.name not in set(left_out)]
        self._num_played: Counter[tuple[str, ...]] = Counter()

    def note(self, name: str, engine: str) -> None:
        """A fault that was played (`Fault.name`): here, or by an earlier campaign."""
        kind, _, moment = name.partition("@")
        for key in ((kind,), (kind, moment or "step"), (kind, engine), ("engine", engine)):
            self._num_played[key] += 1

    def place(self, engines: Sequence[str], number: int) -> tuple[str, str]:
        """Engine and site of the next episode, with `number` faults: the first of those that were had least."""
        engine = min(engines, key=lambda engine: self._num_played["engine", engine])
        return engine, min(self._sites, key=lambda site: self._need(engine, site, number))

    def _need(self, engine: str, site: str, number: int) -> int:
        """How often a hand's kinds were played already: less where there is more to be made up for."""
        costs = [
            self._num_played[kind.name,] + 2 * self._num_played[kind.name, engine]
            for kind in self._kinds
            if site in kind.sites
        ]
        total = 0
        for _ in range(number):
            least = costs.index(min(costs))
            total += costs[least]
            costs[least] += 3
        return total

    def deal(self, draw: random.Random, *, engine: str, site: str, number: int) -> list[Fault]:
        """An episode's faults, in order."""
        faults: list[Fault] = []
        for index in range(number):
            before = faults[-1] if faults else None
            choices = [
                (kind, moment)
                for kind in self._kinds
                if site in kind.sites and (not kind.after or (before is not None and before.kind.name == kind.after))
                for moment in kind.moments
                if moment != "restore" or _may_be_met_restoring(before, kind)
                if not (kind.is_damage and _has_left_one_checkpoint(faults))
            ]
            draw.shuffle(choices)
            kind, moment = min(choices, key=lambda choice: self._cost(engine, *choice))
            fault = Fault(kind, moment, _order(draw, kind, moment, _FIRST_STEP + _STEPS_APART * index))
            self.note(fault.name, engine)
            faults.append(fault)
        return faults

    def named(self, draw: random.Random, names: Sequence[str], *, engine: str) -> list[Fault]:
        """These faults (`Fault.name`), in this order, at moments that are drawn anew."""
        faults = []
        for index, name in enumerate(names):
            kind, moment = parsed(name)
            faults.append(Fault(kind, moment, _order(draw, kind, moment, _FIRST_STEP + _STEPS_APART * index)))
            self.note(faults[-1].name, engine)
        return faults

    def _cost(self, engine: str, kind: Kind, moment: str) -> float:
        name = kind.name
        return self._num_played[name,] + self._num_played[name, engine] + 0.5 * self._num_played[name, moment]


def _has_left_one_checkpoint(before: Sequence[Fault]) -> bool:
    """A full disk refused saves, and had older ones removed for the last: there is nothing to spoil for a while."""
    return any("disk_full" in fault.kind.name for fault in before[-_FAULTS_UNTIL_ANOTHER:])


def _may_be_met_restoring(before: Fault | None, kind: Kind) -> bool:
    """A restore is what follows a fault; two of them in a row are enough."""
    if before is None or before.kind.effect != "restarts":
        return False
    return before.moment != "restore" or bool(kind.after)


def num_steps(num_faults: int) -> int:
    """Of a job in which so many faults happen.

    A fault that comes some moments after the last step of its turn, in which a quick job does four steps, still has a
    save before it that isn't the one of the job's last step: that one waits until nobody acts any more.
    """
    return _FIRST_STEP + _STEPS_APART * num_faults + _STEPS_AFTER


def _order(draw: random.Random, kind: Kind, moment: str, first_step: int) -> dict[str, Any]:
    order: dict[str, Any] = {
        "rank": draw.randrange(2),
        "kind": _NAMES_IN_RANKS.get(kind.name, kind.name),
        "step": first_step + draw.randrange(_STEPS_APART - 1),
        "moment": moment,
    }
    if not kind.is_punctual:
        order["after_seconds"] = draw.uniform(0, 0.15 if moment != "step" else 0.06)
    if kind.name == "clock_jump":
        order["seconds"] = draw.choice((-7200.0, -60.0, 60.0, 7200.0))
    if kind.is_damage:
        order["then_kill"] = True
        order["step"] = max(order["step"], _FIRST_DAMAGED_STEP)
    if kind.is_outside and not kind.is_damage:
        # Nobody gets to the next fault, or to the job's end, while this one goes on.
        order["holds"] = kind.hold_seconds
    return order
