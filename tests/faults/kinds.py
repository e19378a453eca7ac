"""What a campaign can do to a job, where, and what must follow."""

import random
from collections import Counter
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


SITES = ("one_host", "two_hosts", "cloud", "desk")
"""One host or two of this machine, the emulator's SageMaker and S3, `trainyard launch --backend local`."""
_HOSTS = ("one_host", "two_hosts")
_ALL = SITES
_ANY_TIME = ("step", "save", "restore")

KINDS = (
    Kind("kill", _ALL, moments=_ANY_TIME),
    Kind("freeze", _ALL, moments=("step", "save")),
    Kind("raise", _ALL, is_punctual=True),
    Kind("out_of_host_memory", _HOSTS, is_punctual=True),
    Kind("out_of_device_memory", _HOSTS, is_punctual=True),
    Kind("terminate_rank", _HOSTS, "stops", moments=("step", "save")),
    Kind("slow_rank", (*_HOSTS, "cloud"), "goes_on", is_punctual=True),
    Kind("clock_jump", _HOSTS, "goes_on", is_punctual=True),
    Kind("kill_host", (*_HOSTS, "cloud"), moments=_ANY_TIME, is_outside=True),
    Kind("freeze_host", ("two_hosts",), is_outside=True),
    Kind("partition", ("two_hosts",), is_outside=True),
    Kind("disk_full", _HOSTS, "goes_on", moments=("step", "save"), is_outside=True),
    Kind("shard_deleted", (*_HOSTS, "cloud"), is_outside=True, is_damage=True, is_punctual=True),
    Kind("shard_truncated", (*_HOSTS, "cloud"), is_outside=True, is_damage=True, is_punctual=True),
    Kind("shard_flipped", (*_HOSTS, "cloud"), is_outside=True, is_damage=True, is_punctual=True),
    Kind("marker_corrupted", (*_HOSTS, "cloud"), is_outside=True, is_damage=True, is_punctual=True),
    Kind("manifest_missing", (*_HOSTS, "cloud"), is_outside=True, is_damage=True, is_punctual=True),
    Kind("reclaim", ("cloud",), moments=_ANY_TIME, is_outside=True),
    Kind("s3_503", ("cloud",), "goes_on", moments=("step", "save"), is_outside=True),
    Kind("s3_slow_down", ("cloud",), "goes_on", moments=("step", "save"), is_outside=True),
    Kind("s3_timeout", ("cloud",), "goes_on", moments=("save",), is_outside=True),
    Kind("s3_partial_write", ("cloud",), "goes_on", moments=("save",), is_outside=True),
    Kind("s3_wrong_etag", ("cloud",), "goes_on", moments=("save",), is_outside=True),
    Kind("expired_credential", ("cloud",), "goes_on", moments=("save",), is_outside=True),
    Kind("kill_launcher", ("desk",), moments=_ANY_TIME, is_outside=True),
    Kind("two_launchers", ("desk",), is_outside=True),
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
_FIRST_STEP = 5
"""The first checkpoint is of step 3."""
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


class Deck:
    """Deals kinds so that each is had about as often as every other, with every engine."""

    def __init__(self, sites: tuple[str, ...] = SITES) -> None:
        """`sites`: those that this machine and campaign have."""
        self._sites = sites
        self._num_dealt: Counter[tuple[str, ...]] = Counter()

    def site(self, seed: int) -> str:
        """Where the episode of that seed takes place: every engine comes to every site."""
        return self._sites[(seed - 1 + (seed - 1) // 4) % len(self._sites)]

    def deal(self, draw: random.Random, *, engine: str, site: str, number: int) -> list[Fault]:
        """An episode's faults, in order."""
        faults: list[Fault] = []
        for index in range(number):
            is_after_restart = bool(faults) and faults[-1].kind.effect == "restarts"
            choices = [
                (kind, moment)
                for kind in KINDS
                if site in kind.sites
                for moment in kind.moments
                # A restore is what follows a fault, and two of them in a row are enough.
                if moment != "restore" or (is_after_restart and faults[-1].moment != "restore")
            ]
            draw.shuffle(choices)
            kind, moment = min(choices, key=lambda choice: self._cost(engine, *choice))
            for key in ((kind.name,), (kind.name, moment), (kind.name, engine)):
                self._num_dealt[key] += 1
            faults.append(Fault(kind, moment, _order(draw, kind, moment, _FIRST_STEP + _STEPS_APART * index)))
        return faults

    def _cost(self, engine: str, kind: Kind, moment: str) -> float:
        name = kind.name
        return self._num_dealt[name,] + self._num_dealt[name, engine] + 0.5 * self._num_dealt[name, moment]


def num_steps(num_faults: int) -> int:
    """Of a job in which so many faults happen."""
    return _FIRST_STEP + _STEPS_APART * num_faults + 3


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
        order["holds"] = True
    return order
