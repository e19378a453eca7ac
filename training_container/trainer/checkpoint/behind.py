"""A thread that does one thing after the other while training goes on."""

import queue
import threading
from collections.abc import Callable

Action = Callable[[], None]


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
        """Returns at once. `action` may not raise; the one before it has to be done."""
        assert not self.is_busy
        self._done = threading.Event()
        self._asked.put((action, self._done))
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._asked,), name=self._name, daemon=True)
            self._thread.start()

    def wait(self, timeout_seconds: float) -> bool:
        """Whether it is idle, at the latest after so long."""
        return self._done.wait(timeout_seconds)

    def close(self) -> None:
        """Ends the thread once it is idle; a later action starts another."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()
            self._thread = None


def _work(asked: "queue.SimpleQueue[tuple[Action, threading.Event] | None]") -> None:
    while (one := asked.get()) is not None:
        action, done = one
        try:
            action()
        finally:
            done.set()
        del one, action  # what it holds (a save's plan, its caller) may go while nothing is asked for
