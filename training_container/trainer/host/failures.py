"""Which of a host's ranks failed first, and with which words: by their reports and by torchrun's. Imports no torch.

A cause comes before its consequences, and the loss of another rank is always one. What torchrun found dead, without a
word, has a time in whole seconds, that of its look.
"""

import re
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from trainer.host.rank import RESUME_EXIT_CODE, RankReport

_TORCHRUN_FAILURE = re.compile(
    r"(?:time\s+:\s+(?P<time>\S+)\s+host\s+:\s+\S+\s+)?"
    r"rank\s+:\s+(?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s+:\s+(?P<code>-?\d+)"
)
_TIME = "%Y-%m-%d_%H:%M:%S"
_LOOK_SECONDS = 1.0
"""torchrun's time is a look's, cut to whole seconds: so far from a report's it says nothing of who was first."""
_OFTEN_FOLLOWS = ("SIGABRT", "SIGTERM")
"""Libraries abort a process whose neighbour is gone, and torchrun ends one so."""
_PEER_LOSS = re.compile(
    r"^(torch\.distributed\.)?Dist(Network|Store)Error\b"
    # The same words of anything else (S3, a data set, a tracker) are no rank's loss.
    r"|^(RuntimeError|DistBackendError): (?=.*(gloo/|NCCL|by peer \[))"
    r".*(connection (was )?(closed|reset|refused)|broken pipe|time(d )?out|remote process|communicator was aborted)",
    re.IGNORECASE,
)
"""What torch's stores, gloo and NCCL say when another rank is gone: a consequence, not the cause."""
_PEER_MISSED = re.compile(r"did not arrive within|can't reach the first host|could not connect to each other")
"""The same, in the words of `trainer.rendezvous`."""


@dataclass(frozen=True)
class Failure:
    """How one rank failed."""

    rank: int
    words: str
    """Why, in one line; empty where that is not known."""
    at: float
    """Seconds since the epoch, to be compared with other failures' of this host."""
    report: RankReport | None
    """Its own; None where it died without a word."""
    lost_a_peer: bool = False
    """It failed because another rank was gone, or never came."""


def failures(
    reports: Mapping[int, RankReport], tail: Sequence[str], *, killed: Collection[int], has_peers: bool
) -> list[Failure]:
    """The first cause first. `tail`: what torchrun wrote last; `killed`: ranks whose death is no cause.

    `has_peers`: whether the job has more than one rank, which could be lost.
    """
    found = [*_silent(reports, tail, killed), *_spoken(reports, has_peers=has_peers)]
    return sorted(found, key=lambda one: (one.lost_a_peer, not one.words, one.at))


def _silent(reports: Mapping[int, RankReport], tail: Sequence[str], killed: Collection[int]) -> Iterator[Failure]:
    for found in _TORCHRUN_FAILURE.finditer("\n".join(tail)):
        rank, code = int(found["rank"]), int(found["code"])
        # Another rank's end told it to stop, and a second time as it wrote its word: it left none, and caused nothing.
        if rank not in reports or reports[rank].exit_code is not None or code == RESUME_EXIT_CODE or rank in killed:
            continue
        at = datetime.strptime(found["time"], _TIME).timestamp() if found["time"] else 0.0
        # In doubt a killed rank is the cause, and an aborted one the consequence, of what another one says.
        late = _LOOK_SECONDS if _signal_name(code) in _OFTEN_FOLLOWS else -_LOOK_SECONDS
        yield Failure(rank, death(code), at + late, None)


def _spoken(reports: Mapping[int, RankReport], *, has_peers: bool) -> Iterator[Failure]:
    for report in reports.values():
        if report.exit_code not in (None, 0, RESUME_EXIT_CODE):
            words = _words(report)
            lost = has_peers and (lost_a_peer(report.error) or bool(_PEER_MISSED.search(words)))
            yield Failure(report.rank, words, report.ended_at or 0.0, report, lost)


def lost_a_peer(error: str) -> bool:
    """Whether torch's error, in one line, tells of another rank that is gone."""
    return bool(_PEER_LOSS.search(error))


def _words(report: RankReport) -> str:
    """Why a rank failed, in one line: its exception, else the last thing it wrote to stderr."""
    last_line = report.stderr_tail[-1].strip() if report.stderr_tail else ""
    return report.error or last_line.removeprefix("trainyard: ")


def death(exit_code: int) -> str:
    """How a rank ended that left no word."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code} and no word"
    name = _signal_name(exit_code)
    return f"was killed by {name}" + (
        ": out of memory on the host, or killed from outside" if name == "SIGKILL" else ""
    )


def _signal_name(exit_code: int) -> str:
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal has none
        return f"signal {-exit_code}"


def broken_torch(tail: Sequence[str]) -> str | None:
    """What Python said when `import torch` failed, if it did."""
    errors = ("ImportError", "ModuleNotFoundError", "OSError")
    is_import = any("torch" in line for line in tail)
    return next((line for line in reversed(tail) if line.startswith(errors)), None) if is_import else None
