"""A thread that does one thing after the other while training goes on, and yields the cores to it."""

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable

Action = Callable[[], None]

_NICENESS = 10
"""Some tenth of a core where training wants all of it, the whole core where it is idle: ranks that had no core to spare
kept two thirds of their speed beside a save, and keep nine tenths of it (`benchmarks/checkpoint.py --ranks 2`)."""


class Behind:
    """Starts its thread with the first action and keeps it: to make one takes longer, while training waits.

    A daemon: it holds no process that ends.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._asked: queue.SimpleQueue[tuple[Action, threading.Event] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._done.set()

    @property
    def is_busy(self) -> bool:
        """Whether an action is on its way."""
        return not self._done.is_set()

    def start(self, action: Action) -> None:
        """Returns at once; the action before it has to be done. What it raises is told as a thread's end would be.

        RuntimeError where no thread is to be had.
        """
        assert not self.is_busy
        if self._thread is None:
            thread = threading.Thread(target=_work, args=(self._asked,), name=self._name, daemon=True)
            thread.start()  # before anything is asked for: where there is none, nobody waits for it
            self._thread = thread
        self._done = threading.Event()
        self._asked.put((action, self._done))

    def wait(self, timeout_seconds: float) -> bool:
        """Whether it is idle, at the latest after so long."""
        return self._done.wait(timeout_seconds)

    def close(self) -> None:
        """Ends the thread once it is idle; a later action starts another."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()
            self._thread = None


def _yield_cores() -> None:
    """Of this thread, and of those that it will start."""
    if sys.platform == "linux":  # elsewhere the number of a thread may be another process's
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def _work(asked: "queue.SimpleQueue[tuple[Action, threading.Event] | None]") -> None:
    _yield_cores()
    while (one := asked.get()) is not None:
        action, done = one
        try:
            action()
        except BaseException as error:  # the thread lives on: who asked next would wait for ever
            told = (type(error), error, error.__traceback__, threading.current_thread())
            threading.excepthook(threading.ExceptHookArgs(told))
            del error, told
        finally:
            done.set()
        del one, action  # what it holds (a save's plan, its caller) may go while nothing is asked for
