"""The real trainer, in which ranks die, raise or freeze where a file says so: what the entrypoint runs in tests.

TRAINYARD_TEST_FAULTS names a folder with `faults.json`: a list of faults, each `{"rank", "kind", "step"}` and perhaps
- `moment`: "step" (its beginning, the default), "save" (of that step or a later one) or "restore" (the first in a start
  after the fault before this one in the list: when the first bytes are read; the others wait until it has happened);
- `after_seconds`: so long after it, from another thread, whatever the rank is at by then;
- `first_sequence`, of kind "poison", instead of `step`: the place of the batch whose loss is no number on this rank, or
  `factor` times what it is: such a spike is looked for from the step after `SEEN_BEFORE_SPIKES` on;
- `always`: in every start, not once in all of them; `until`: not after that time (epoch seconds);
- `holds`: it takes a while, in which each step takes so many seconds longer, and the job must not end before `over-N`
  says that it is over; `held-N`: nothing but the last step is left to do.

`kind` is one of `KINDS`, which happen to this process, or else something that whoever watches the folder does when
`done-N` appears; with `then_kill` the rank waits for `over-N` and dies. N is the fault's place in the list. Of kind
"await_stop": the rank begins that step once any was told to stop, so a job that every rank awaits it in can't be done
before its stop has come, however quick its steps are.

The folder also gets what campaigns compare: `events.jsonl` (rank 0's lines, with the true time) and, per rank,
`samples-R.jsonl` (which sequences each step read).
"""

import hashlib
import json
import math
import os
import resource
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from trainer import heartbeat
from trainer.checkpoint import Checkpointer
from trainer.checkpoint.ranges import Range
from trainer.checkpoint.reading import Transfer
from trainer.observe import anomalies
from trainer.session import GlobalBatch, Session
from trainer.signals import StopFlag
from trainer.strategies.parallel import ProductStrategy
from trainer.strategies.pipelined import PipelineStrategy
from trainer.tasks.causal_lm import CausalLM

from trainer_testing import shifted_clock
from trainer_testing.faulty_entrypoint import FOLDER_VARIABLE, S3_SECONDS_VARIABLE

SLOW_STEPS, SLOW_SECONDS = 4, 0.4
_LONGEST_HOLD_SECONDS = 120.0
SEEN_BEFORE_SPIKES = 2
_STEPS_LEFT_TO_MEET = 5
"""Before the last step one of them saves, as every third does."""
_LONGEST_RESTORE_SECONDS = 10.0


class Faults:
    """This rank's share of the faults, and what it tells of itself."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._faults: list[dict[str, Any]] = json.loads((folder / "faults.json").read_text())
        self._slow_steps = 0
        self._poison = 1.0
        """What the loss is multiplied by."""
        self._begun: set[int] = set()
        self._done_before = {number for number in range(len(self._faults)) if self._is_done(number)}
        """Before this process began: a restore meets what follows on a fault that an earlier start met."""
        self._first_range = threading.Lock()
        self._has_read = False
        self._stop_flag: StopFlag | None = None

    def install(self) -> None:
        """Into the trainer's classes."""
        honest_batch, honest_save = Session.next_batch, Session.save
        honest_bring, honest_load = Transfer._bring_whole, Checkpointer.load

        def next_batch(session: Session) -> GlobalBatch:
            self._stop_flag = session.stop_flag
            self._hold(num_left=session.num_steps - session.step)
            self._await_checkpoint(session)
            self._at("step", session.step + 1)
            if self._slow_steps:
                self._slow_steps -= 1
                time.sleep(SLOW_SECONDS)
            batch = honest_batch(session)
            self._poison = self._poison_of(session.anomalies.data["sequences_consumed"])
            self._note_samples(session.step + 1, batch)
            return batch

        def save(session: Session) -> None:
            self._at("save", session.step)
            honest_save(session)

        def bring(transfer: Transfer, one: Range) -> None:
            with self._first_range:
                if not self._has_read:
                    self._has_read = True
                    self._at("restore", 0)
                    honest_bring(transfer, one)
                    self._let_restore_be_met()
                    return
            honest_bring(transfer, one)

        def load(checkpointer: Checkpointer, *arguments: Any, **options: Any) -> dict[str, Any]:
            if not self._has_read:  # what this rank needs was read by others
                self._has_read = True
                self._at("restore", 0)
            return honest_load(checkpointer, *arguments, **options)

        Session.next_batch, Session.save, Checkpointer.load = next_batch, save, load  # type: ignore[method-assign]
        Transfer._bring_whole = bring  # type: ignore[method-assign]
        self._install_poison()
        if self._rank == 0:
            self._tell({"start": True})
            sys.stdout = _Tee(sys.stdout, lambda line: self._tell({"line": line}))

    def _install_poison(self) -> None:
        """Wherever an engine makes a loss: some ask the task, layouts that cut sequences or layers do it themselves."""
        honest_loss, honest_cut = CausalLM.loss_sum, ProductStrategy._loss_sum
        honest_scaled = PipelineStrategy._scaled_loss

        if any("factor" in fault for fault in self._faults):
            anomalies.LEAST_STEPS = SEEN_BEFORE_SPIKES

        def poisoned(loss: torch.Tensor) -> torch.Tensor:
            return loss * self._poison if self._poison != 1.0 and torch.is_grad_enabled() else loss

        def loss_sum(task: CausalLM, *arguments: Any) -> torch.Tensor:
            return poisoned(honest_loss(task, *arguments))

        def cut_loss_sum(strategy: ProductStrategy, batch: Any) -> torch.Tensor:
            return poisoned(honest_cut(strategy, batch))

        def scaled_loss(strategy: PipelineStrategy, *arguments: torch.Tensor) -> torch.Tensor:
            before = strategy._loss_total.clone()
            loss = honest_scaled(strategy, *arguments)
            if self._poison != 1.0 and torch.is_grad_enabled():
                strategy._loss_total.copy_(before + (strategy._loss_total - before) * self._poison)
            return poisoned(loss)

        CausalLM.loss_sum = loss_sum  # type: ignore[method-assign]
        ProductStrategy._loss_sum = cut_loss_sum  # type: ignore[method-assign]
        PipelineStrategy._scaled_loss = scaled_loss  # type: ignore[method-assign]

    def _await_checkpoint(self, session: Session) -> None:
        """Before a fault whose restore meets the next one: quick steps come there before the first commit."""
        follows = any(
            fault["rank"] == self._rank and fault.get("step") == session.step + 1 and after.get("moment") == "restore"
            for fault, after in pairwise(self._faults)
        )
        until = time.monotonic() + _LONGEST_HOLD_SECONDS
        while follows and session._checkpointer.last_committed_step is None and time.monotonic() < until:
            heartbeat.beat()
            time.sleep(0.02)

    def _at(self, moment: str, step: int) -> None:
        for number, fault in enumerate(self._faults):
            if fault["rank"] != self._rank or fault.get("moment", "step") != moment or self._is_done(number):
                continue
            if fault["kind"] == "poison":
                continue
            is_now = {
                "step": fault["step"] == step,
                "save": step >= fault["step"],
                "restore": number - 1 in self._done_before,
            }[moment]
            if is_now and shifted_clock.true_time() <= fault.get("until", math.inf):
                self._begin(number, fault)

    def _begin(self, number: int, fault: dict[str, Any]) -> None:
        self._begun.add(number)

        def happen() -> None:
            if not fault.get("always"):
                partial = self._folder / f".done-{number}"
                partial.write_text(str(shifted_clock.true_time()))
                partial.rename(self._folder / f"done-{number}")
            self._happen(number, fault)

        if "after_seconds" in fault:
            threading.Timer(fault["after_seconds"], happen).start()
        else:
            happen()

    def _happen(self, number: int, fault: dict[str, Any]) -> None:
        kind = fault["kind"]
        if kind == "slow":
            self._slow_steps = SLOW_STEPS
        elif kind == "clock":
            (self._folder / shifted_clock.FILE).write_text(str(fault["seconds"]))
        elif kind == "await_stop":
            self._await_stop(self._folder / "told")
        elif kind in KINDS:
            KINDS[kind]()
        if fault.get("then_kill"):
            while not (self._folder / f"over-{number}").exists():
                time.sleep(0.01)
            _signal(signal.SIGKILL)

    def _await_stop(self, told: Path) -> None:
        """Until this rank was told, or another one, which tells it at the step's end."""
        assert self._stop_flag is not None, "it is of a step"
        while not self._stop_flag._wanted and not told.exists():
            heartbeat.beat()
            time.sleep(0.02)
        told.touch()

    def _hold(self, *, num_left: int) -> None:
        """Slow steps while a fault that takes a while goes on; no last step before all that has begun is over.

        Nor the last few before it has come: on a busy machine that may be many quick steps late, and then no save is
        left for it to meet.
        """
        is_last = num_left == 1
        coming = [number for number in self._begun if not self._faults[number].get("always")]
        while num_left <= _STEPS_LEFT_TO_MEET and not all(map(self._is_done, coming)):
            time.sleep(0.01)
        for number, fault in enumerate(self._faults):
            if not fault.get("holds"):
                continue
            until = time.monotonic() + (_LONGEST_HOLD_SECONDS if is_last else fault["holds"])
            while self._is_done(number) and not (self._folder / f"over-{number}").exists():
                if is_last:
                    (self._folder / f"held-{number}").touch()
                heartbeat.beat()
                time.sleep(0.02)
                if time.monotonic() > until:
                    break

    def _let_restore_be_met(self) -> None:
        """Keep the other bytes waiting until the fault that has begun is there: a tiny checkpoint is read at once."""
        until = time.monotonic() + _LONGEST_RESTORE_SECONDS
        for number in self._begun:
            ends = "over" if self._faults[number].get("holds") else "done"
            while not (self._folder / f"{ends}-{number}").exists() and time.monotonic() < until:
                time.sleep(0.01)

    def _poison_of(self, first_sequence: int) -> float:
        for fault in self._faults:
            is_here = fault["kind"] == "poison" and fault["rank"] == self._rank
            if is_here and fault["first_sequence"] == first_sequence:
                return float(fault.get("factor", math.nan))
        return 1.0

    def _is_done(self, number: int) -> bool:
        return (self._folder / f"done-{number}").exists()

    def _note_samples(self, step: int, batch: GlobalBatch) -> None:
        rows = [row for part in batch.local for row in getattr(part, "input_ids", torch.empty(0, 0))]
        ids = [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in rows]
        _append(self._folder / f"samples-{self._rank}.jsonl", {"step": step, "ids": ids})

    def _tell(self, event: dict[str, Any]) -> None:
        _append(self._folder / "events.jsonl", {"at": shifted_clock.true_time(), **event})


def _append(path: Path, content: dict[str, Any]) -> None:
    """A line, in one write: a kill leaves all of it or nothing."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(descriptor, (json.dumps(content) + "\n").encode())
    os.close(descriptor)


class _Tee:
    """A stream whose lines are also told to somebody. The trainer writes whole lines."""

    def __init__(self, stream: Any, tell: Callable[[str], None]) -> None:
        self._stream = stream
        self._tell = tell

    def write(self, text: str) -> int:
        for line in text.splitlines():
            self._tell(line)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _signal(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def _raise() -> None:
    raise ValueError("injected")


def _run_out_of_host_memory() -> None:
    """As where the container's limit is reached: the next large allocation is refused."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20), hard))
    torch.ones(1 << 28)


def _run_out_of_device_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (simulated)")


KINDS: dict[str, Callable[[], None]] = {
    "kill": lambda: _signal(signal.SIGKILL),
    "stop": lambda: _signal(signal.SIGSTOP),
    "terminate": lambda: _signal(signal.SIGTERM),
    "save": lambda: _signal(signal.SIGUSR1),
    "sleep": lambda: time.sleep(3600),
    "raise": _raise,
    "oom_host": _run_out_of_host_memory,
    "oom_device": _run_out_of_device_memory,
}


def _hurry_s3(seconds: float) -> None:
    """The SDK waits so long for an answer: a campaign's S3 falls silent, and a minute is long."""
    from botocore.httpsession import URLLib3Session

    honest = URLLib3Session.__init__

    def hurried(session: Any, *arguments: Any, **options: Any) -> None:
        honest(session, *arguments, **{**options, "timeout": seconds})

    URLLib3Session.__init__ = hurried


def main() -> None:
    """This rank's faults, then the trainer. `--faults FOLDER` before the trainer's own arguments names it too."""
    if sys.argv[1:2] == ["--faults"]:
        os.environ[FOLDER_VARIABLE] = sys.argv[2]
        del sys.argv[1:3]
    folder = Path(os.environ[FOLDER_VARIABLE])
    if S3_SECONDS_VARIABLE in os.environ:
        _hurry_s3(float(os.environ[S3_SECONDS_VARIABLE]))
    shifted_clock.install(folder)
    Faults(folder, int(os.environ["RANK"])).install()
    sys.argv[0] = "trainer"
    runpy.run_module("trainer", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
