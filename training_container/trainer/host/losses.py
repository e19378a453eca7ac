"""Whether hosts are lost again and again before the next checkpoint: lost_hosts.jsonl, beside these. No torch.

Training queues, Slurm, Kubernetes and Ray start a job again that lost a host, and count starts alone; whether it gets
any further they can't tell. So the hosts that are left say it themselves: at the third loss in a row from the same
checkpoint they give, in place of the words by which these start a job again, a diagnosis.
"""

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.host.hosts import LOST_HOST
from trainer.host.recovery import Ending, row_of
from trainer.speech import say

if TYPE_CHECKING:
    from trainer.checkpoint.destination import Destination

LOSSES_FILE = "lost_hosts.jsonl"
MOST_LOSSES = 3
"""As of failures at one step in place: the third is not for want of luck."""
_SECONDS = 8.0
"""For all that is asked of the destination: a host that SageMaker has told to stop is killed soon."""
_CHECKPOINTS = "checkpoints"
_COMMITTED = re.compile(r"step-(\d+)/COMMITTED$")


class LostHosts:
    """A host's look at the losses of the job's starts."""

    def __init__(self, destination: str, *, index: int, settings: Mapping[str, str]) -> None:
        """`index`: this host's among the job's. `settings`: the environment, which tells whose start this is and who
        asked for it."""
        self._destination = destination
        self._index = index
        self._job = settings.get("TRAINYARD_JOB_ID", "")
        self._asked = settings.get("TRAINYARD_ASKED_ATTEMPT") or settings.get("TRAINYARD_ATTEMPT", "")
        self._began_at = time.time()

    def judged(self, ending: Ending, *, start: str = "") -> Ending:
        """The ending; of a host that is lost for the third time in a row from one checkpoint, with a diagnosis.

        `start`: the hosts' common name for this start of the job (Hosts.start).
        """
        if not LOST_HOST.match(ending.reason):
            return ending
        found: list[tuple[int, int]] = []

        def look() -> None:
            try:
                found.append(self._noted(ending, start))
            except Exception as error:  # of S3, of a disk: the job has ended, and says why all the same
                say(f"entrypoint: {LOSSES_FILE} can't be kept at {self._destination}: {' '.join(str(error).split())}")

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(timeout=_SECONDS)
        count, step = found[0] if found else (0, 0)
        return replace(ending, reason=_diagnosis(ending.reason, count, step)) if count >= MOST_LOSSES else ending

    def _noted(self, ending: Ending, start: str) -> tuple[int, int]:
        """Losses in a row from the newest checkpoint, this one included, and that checkpoint's step; 0: there is none.

        One host notes it: the first, or the second where it is the first that is gone. All count.
        """
        # Here, since it brings numpy: who is to tell of what can't be imported needs nothing that comes with torch.
        from trainer.checkpoint.destination import open_destination

        place = open_destination(self._destination, in_haste=True)
        step = _newest_step(place)
        text = place.get_bytes(LOSSES_FILE).decode(errors="replace") if place.has(LOSSES_FILE) else ""
        rows = [row for line in text.splitlines() if (row := row_of(line))]
        if self._index == int(ending.reason.startswith("the first host")):
            row = {"at": time.time(), "job": self._job, "asked": self._asked, "start": start, "step": step}
            lines = [json.dumps(one) + "\n" for one in [*rows, {**row, "reason": ending.reason}]]
            place.put_bytes(LOSSES_FILE, "".join(lines).encode())
        # Not of a job that was here before (a destination that its user names may serve again); and who resumed the
        # job has mended what was wrong.
        own = {"job": self._job, "asked": self._asked}
        before = [row for row in rows if own.items() <= row.items() and not self._is_of_this_start(row, start)]
        return 1 + _in_a_row(before, step), step

    def _is_of_this_start(self, row: Mapping[str, Any], start: str) -> bool:
        """Whether another host has just noted this very loss. By its start's name: clocks are set back, and differ."""
        return bool(row.get("start") == start if start else row.get("at", 0) >= self._began_at)


def _newest_step(place: "Destination") -> int:
    """The newest committed step; 0: there is none."""
    folder = place.folder(_CHECKPOINTS)
    if folder is None:
        names = [*place.sizes(_CHECKPOINTS)]
    else:  # a look at every shard would take a shared file system too long
        names = [path.as_posix() for path in folder.glob("step-*/COMMITTED")]
    return max((int(found[1]) for name in names if (found := _COMMITTED.search(name))), default=0)


def _in_a_row(rows: Sequence[Mapping[str, Any]], step: int) -> int:
    count = 0
    for row in reversed(rows):
        if row.get("step") != step:
            break
        count += 1
    return count


def _diagnosis(reason: str, count: int, step: int) -> str:
    where = f"since step {step} was saved" if step else "before the first checkpoint"
    return (
        f"{count} times in a row {where} a host was lost, so another start may not help: see why (memory, a bad"
        f" machine, saves that are too rare), then `trainyard resume`; the last time: {reason}"
    )
