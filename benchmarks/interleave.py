"""Training loops that take turns in one process, a few steps at a time.

A machine's speed drifts by more than the differences that are looked for here, so contenders do not run one after the
other: each runs a block of steps and stands still while the others run theirs, many times over. What the neighbours of
this machine do then falls on all of them alike.
"""

import threading
import time
from collections.abc import Callable

import torch

Body = Callable[[Callable[[], None]], None]
"""A training loop that calls its argument right after every optimizer step."""


class Paused:
    """A training loop in a thread of its own that runs as many steps as it is told to, and then stands still."""

    def __init__(self, name: str, body: Body, *, num_threads: int) -> None:
        """`num_threads`: intra-op threads, which torch counts for each Python thread anew."""
        self.name = name
        self.step_seconds: list[float] = []
        """Of each step since the last `forget`, from the end of one optimizer step to the end of the next."""
        self.cpu_seconds: list[float] = []
        """The same in processor time of the whole process: what a neighbour's load doesn't change much."""
        self._body = body
        self._num_threads = num_threads
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._steps_left = 0
        self._mark = self._cpu_mark = 0.0
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def advance(self, num_steps: int) -> None:
        """Runs the next steps; the first call also runs what comes before the first step."""
        self._steps_left = num_steps
        self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error

    def forget(self) -> None:
        """Drops what was measured so far: warm-up."""
        self.step_seconds.clear()
        self.cpu_seconds.clear()

    def _run(self) -> None:
        self._go.acquire()
        self._begin()
        torch.set_num_threads(self._num_threads)
        try:
            self._body(self._finished_step)
            raise RuntimeError(f"{self.name}: the loop ended before it was told to stop")
        except BaseException as error:
            self._error = error
            self._stopped.release()

    def _begin(self) -> None:
        self._mark, self._cpu_mark = time.perf_counter(), time.process_time()

    def _finished_step(self) -> None:
        now, cpu_now = time.perf_counter(), time.process_time()
        self.step_seconds.append(now - self._mark)
        self.cpu_seconds.append(cpu_now - self._cpu_mark)
        self._mark, self._cpu_mark = now, cpu_now
        self._steps_left -= 1
        if self._steps_left == 0:
            self._stopped.release()
            self._go.acquire()
            self._begin()
