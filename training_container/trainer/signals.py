"""SIGTERM and SIGUSR1, heard by any rank, agreed on by all: SIGTERM saves and exits, SIGUSR1 saves and goes on."""

import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from trainer.early_save import take_early_save
from trainer.heartbeat import beat

Decision = Literal["none", "save", "save_and_exit"]

_DECISIONS: tuple[Decision, ...] = ("none", "save", "save_and_exit")
"""By rank of urgency."""

NUM_VOTES = 1 + len(_DECISIONS)
"""Numbers that a rank says once a step: that it is there, its step, and one for each wish but `none`."""


def urgency(decision: Decision) -> int:
    """The more urgent, the larger."""
    return _DECISIONS.index(decision)


class StopFlag:
    """What this process was told by signals, shared with all ranks once a step.

    A handler only notes the signal: nothing is saved in the middle of a step, and all ranks save the same one.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        """`process_group`: a CPU (gloo) group of all ranks; None: this process is alone."""
        self._process_group = process_group
        self._wanted = self._told = 0
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> Self:
        """Listen from now on (main thread only); a save that was asked for before is the first step's."""
        for number, wanted in ((signal.SIGTERM, 2), (signal.SIGUSR1, 1)):
            self._previous[number] = signal.signal(number, self._handler(wanted))
        if take_early_save():
            self.request("save")
        return self

    def uninstall(self) -> None:
        """Put back the handlers that were there before."""
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)

    def __enter__(self) -> Self:
        return self.install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()

    def request(self, decision: Decision) -> None:
        """Ask for it as a signal would."""
        self._wanted = max(self._wanted, _DECISIONS.index(decision))

    def agreed(self, step: int) -> Decision:
        """The most urgent wish of any rank, the same on every rank; all ranks call it once after each step.

        "save" is given once for each time it was asked for; "save_and_exit" stays.
        """
        votes = torch.tensor(self.votes(step), dtype=torch.float64)
        self.beat(step)
        if self._process_group is not None:
            dist.all_reduce(votes, group=self._process_group)
        return self.decision(step, votes.tolist())

    def must_exit(self) -> bool:
        """Whether any rank was told to stop, the same on every rank; all ask together. Forgets nothing."""
        told = torch.tensor(float(_DECISIONS[self._wanted] == "save_and_exit"))
        if self._process_group is not None:
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._process_group)
        return bool(told.item())

    def votes(self, step: int) -> list[float]:
        """NUM_VOTES numbers that, summed over all ranks, say what all of them want; `decision` reads the sums."""
        self._told = self._wanted
        return [1.0, float(step), *(float(self._told == wish) for wish in range(1, len(_DECISIONS)))]

    def beat(self, step: int) -> None:
        """Before the others' votes are waited for: who waits has beaten for this step, who is waited for has not."""
        beat(step)

    def decision(self, step: int, totals: Sequence[float]) -> Decision:
        """See `agreed`; `totals`: the sums of what every rank's `votes(step)` gave."""
        num_ranks, steps, *wishes = totals
        # Of ranks that disagree at least two are not at the mean, and fail here.
        assert steps == num_ranks * step, f"ranks disagree on the step: this one is at {step}, their sum is {steps:.0f}"
        # A signal that came after the votes were given is for the next step.
        if self._told == 1 and self._wanted == 1:
            self._wanted = 0
        return max(
            (_DECISIONS[wish] for wish, votes in enumerate(wishes, start=1) if votes), key=urgency, default="none"
        )

    def _handler(self, wanted: int) -> Any:
        def note(_: int, __: FrameType | None) -> None:
            self._wanted = max(self._wanted, wanted)

        return note
