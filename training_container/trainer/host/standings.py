"""Which collective the ranks of a job that hangs stand in, and which rank the others wait for. No torch.

The host asks by a file among the ranks' reports; a thread of each rank answers with torch's flight recorder
(`trainer.observe.flight_recorder`), also while the rank waits inside of a collective. Collectives of a process group
are numbered alike on all of its ranks: so the lowest one that a rank waits in, compared with what the others have
called, tells who is missing, or who called another one.
"""

import contextlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ASK_FILE = "tell_collectives"
"""Among the reports: every rank is to tell its collectives, once."""
ANSWER_SECONDS = 3.0
_LOOK_SECONDS = 0.02
_MOST_NAMED = 8
"""Ranks of a group that a line names."""

Standing = dict[str, Any]
"""Of one rank, as JSON: process group -> `ranks` (its members), `last` (number of the newest collective that this rank
called), `calls` (the newest numbers -> what was called, in words), `open` (numbers of those that have not ended), and
`messages` (true where a message to or from one rank of the group has not ended; else left out)."""


def answer_file(folder: Path, rank: int) -> Path:
    """A rank's answer among the reports: `{"standing": ..., "record": ...}`, there as a whole or not at all."""
    return folder / f"collectives-{rank}.json"


def asked(folder: Path, ranks: Collection[int], *, answer_seconds: float = ANSWER_SECONDS) -> dict[int, dict[str, Any]]:
    """The answers of those ranks that give one in time."""
    with contextlib.suppress(OSError):  # a full disk: then nobody answers
        (folder / ASK_FILE).touch()
    waited_for = set(ranks)
    deadline = time.monotonic() + answer_seconds
    while waited_for and time.monotonic() < deadline:
        waited_for = {rank for rank in waited_for if not answer_file(folder, rank).exists()}
        time.sleep(_LOOK_SECONDS)
    return {rank: answer for rank in ranks if (answer := _read(answer_file(folder, rank))) is not None}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        answer = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


@dataclass(frozen=True)
class Mismatch:
    """What keeps a job's ranks from going on."""

    words: str
    """One phrase."""
    rank: int | None
    """The one that the others wait for; None where that can't be told."""


def mismatch(standings: Mapping[int, Standing]) -> Mismatch | None:
    """Compares where the ranks stand; None where no rank waits in a collective, or none has answered.

    A rank that is behind in one group may itself wait in another: the one that waits for nobody is the cause.
    """
    waiting = {
        rank
        for rank, standing in standings.items()
        if any(group["open"] or group.get("messages") for group in standing.values())
    }
    names = sorted({name for standing in standings.values() for name in standing})
    found = [one for name in names if (one := _in_group(name, standings, waiting)) is not None]
    return min(found, key=lambda one: (one.rank is None, one.rank in waiting), default=None)


def _in_group(name: str, standings: Mapping[int, Standing], waiting_anywhere: Collection[int]) -> Mismatch | None:
    here = {rank: standing[name] for rank, standing in standings.items() if name in standing}
    first = {rank: min(group["open"]) for rank, group in here.items() if group["open"]}
    if not first:
        return None
    number = min(first.values())
    waiting = sorted(rank for rank, own in first.items() if own == number)
    members = sorted(here[waiting[0]]["ranks"])
    call = here[waiting[0]]["calls"].get(str(number), "a collective")
    what = f"{call}, number {number} of {_named(members)}"
    late = [rank for rank in members if rank in standings and here.get(rank, {"last": -1})["last"] < number]
    if late:
        words = f"{_named(late)} {_has(late)} not called {what}, in which {_named(waiting)} {_wait(waiting)}"
        return Mismatch(words, next((rank for rank in late if rank not in waiting_anywhere), late[0]))
    calls = {rank: here[rank]["calls"].get(str(number), call) for rank in members if rank in here}
    if len(set(calls.values())) > 1:
        return Mismatch(f"collective {number} of {_named(members)} is {_differing(calls)}", _odd_one(calls))
    silent = [rank for rank in members if rank not in standings]
    if silent:
        return Mismatch(f"{_named(waiting)} {_wait(waiting)} in {what}; no answer from {_named(silent)}", silent[0])
    return Mismatch(f"all of {_named(members)} have called {what}: the network or a device stands still", None)


def _differing(calls: Mapping[int, str]) -> str:
    by_call: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        by_call.setdefault(call, []).append(rank)
    return " and ".join(f"{call} on {_named(ranks)}" for call, ranks in by_call.items())


def _odd_one(calls: Mapping[int, str]) -> int | None:
    """The one rank that differs from all others, where there are at least two others."""
    by_call = [[rank for rank, call in calls.items() if call == one] for one in set(calls.values())]
    alone = [ranks[0] for ranks in by_call if len(ranks) == 1]
    return alone[0] if len(by_call) == 2 and len(alone) == 1 else None


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _MOST_NAMED:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[: _MOST_NAMED - 1]))} ... {ranks[-1]})"
    return f"ranks {', '.join(map(str, ranks))}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
