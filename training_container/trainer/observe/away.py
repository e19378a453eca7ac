"""For how long a job was waited for: from its launch to its first step, and from one start's last step to the next's
first. What a start knows of this it is told by its environment, and by the account that the start before left.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

_STAMP = re.compile(r"-(\d{14})-[0-9a-f]{4}$")
"""How a job's id ends (trainyard.launch.names): the UTC second of its launch, then what tells it from others."""
_RESUMED = re.compile(r"-r(\d+)$")


@dataclass(frozen=True)
class Launch:
    """Of what submission this process is; by the clock of the machine that launched it."""

    at: float | None = None
    """When the job was launched, epoch seconds; None where nobody says."""
    attempt: int | None = None
    """Which submission of it this is: 1 for the launch, one more for each resume; None where nobody says. Restarts in
    place, reclaims and requeues belong to the same one."""
    asked: int | None = None
    """The newest submission, up to this one, that a person asked for; those after it the tenant's resumer made."""

    @property
    def is_asked_once(self) -> bool:
        """Whether nobody asked for anything but the launch: all that was waited for since is a wait for the launch."""
        return self.asked == 1


UNKNOWN = Launch()
"""Of a trainer that was started by hand."""


def launch_of(environment: Mapping[str, str]) -> Launch:
    """As TRAINYARD_JOB_ID and TRAINYARD_ATTEMPT say it, or SageMaker's TRAINING_JOB_NAME in place of the latter; and
    TRAINYARD_ASKED_ATTEMPT, without which a person is taken to have asked for this submission."""
    job_id = environment.get("TRAINYARD_JOB_ID", "")
    at = None
    if stamp := _STAMP.search(job_id):
        try:
            at = datetime.strptime(stamp[1], "%Y%m%d%H%M%S").replace(tzinfo=UTC).timestamp()
        except ValueError:
            at = None  # fourteen digits that are no date
    attempt = _attempt_of(environment, job_id)
    asked = environment.get("TRAINYARD_ASKED_ATTEMPT", "")
    return Launch(at, attempt, int(asked) if asked.isdigit() and attempt is not None else attempt)


def _attempt_of(environment: Mapping[str, str], job_id: str) -> int | None:
    number = environment.get("TRAINYARD_ATTEMPT", "")
    if number.isdigit():
        return int(number)
    name = environment.get("TRAINING_JOB_NAME", "")
    if not job_id or not name.startswith(job_id):
        return None
    resumed = _RESUMED.fullmatch(name.removeprefix(job_id))
    return int(resumed[1]) if resumed else 1


def gone_since(rows: Sequence[Mapping[str, Any]], *, launch: Launch, written_at: float | None) -> float | None:
    """When the job made the last step that anybody knows of (epoch); None for a first start, and for one before which a
    person was waited for, whose absence is no recovery.

    `rows`: goodput.jsonl as the starts before left it. `launch`: of this start. `written_at`: when a step was last
    written down on this machine; without one the newest checkpoint's time counts, and with it the work that was lost.
    """
    starts = [index for index, row in enumerate(rows) if "start" in row]
    if not starts:
        return None
    before, since = rows[starts[-1]]["start"], rows[starts[-1] + 1 :]
    submission = before.get("submission")
    if submission != launch.attempt:
        # The limits of restarts that a job states hold within a submission: only who made this one knows who asked.
        if launch.asked is None or not isinstance(submission, int) or launch.asked > submission:
            return None
    elif launch.attempt is None and any("ended" in row for row in since):
        return None  # nobody says which submission either was: it may have been started anew by hand
    if not any("first_step" in row for row in since):
        return _number(before.get("gone_since"))  # it made no step: the job is away since the start before it
    saved = [_number(row["totals"].get("at")) for row in since if "totals" in row]
    return max((at for at in (*saved, written_at) if at is not None), default=None)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
