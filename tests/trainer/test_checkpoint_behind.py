"""The thread behind that saves are written in: one for all of them, idle where nothing is asked for."""

import gc
import os
import sys
import threading
import time
import weakref

import pytest
from trainer.checkpoint.behind import Behind

PATIENCE_SECONDS = 30.0


def test_who_starts_an_action_goes_on_at_once() -> None:
    behind, may_end = Behind("test"), threading.Event()
    behind.start(lambda: assert_true(may_end.wait(PATIENCE_SECONDS)))
    assert behind.is_busy and not behind.wait(0.01)
    may_end.set()
    assert behind.wait(PATIENCE_SECONDS) and not behind.is_busy
    behind.close()


def assert_true(value: bool) -> None:
    """What a lambda can call."""
    assert value


def test_one_thread_serves_all_actions_and_ends_when_closed() -> None:
    behind, threads = Behind("test"), []
    for _ in range(3):
        behind.start(lambda: threads.append(threading.current_thread()))
        assert behind.wait(PATIENCE_SECONDS)
    assert len(threads) == 3 and len(set(threads)) == 1 and threads[0].daemon
    behind.close()
    assert not threads[0].is_alive()
    behind.start(lambda: threads.append(threading.current_thread()))
    assert behind.wait(PATIENCE_SECONDS) and threads[3] is not threads[0]
    behind.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_training_goes_first() -> None:
    """The thread and those that it starts yield the cores; who asked keeps its own priority."""
    found: list[int] = []

    def ask() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def ask_twice() -> None:
        ask()
        started = threading.Thread(target=ask)
        started.start()
        started.join()

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    behind = Behind("test")
    behind.start(ask_twice)
    assert behind.wait(PATIENCE_SECONDS)
    behind.close()
    assert found == [max(own, 10)] * 2
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_an_idle_thread_keeps_nothing_of_what_it_did() -> None:
    class Held:
        def act(self) -> None:
            """Nothing."""

    behind, held = Behind("test"), Held()
    gone = weakref.ref(held)
    behind.start(held.act)
    assert behind.wait(PATIENCE_SECONDS)
    del held
    deadline = time.monotonic() + PATIENCE_SECONDS
    while gone() is not None:  # the thread says that it is done before it lets go
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.01)
    behind.close()


def test_an_action_that_raises_is_told_and_holds_up_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda raised: told.append(raised.exc_type))
    behind, done = Behind("test"), threading.Event()

    def fail() -> None:
        raise OSError("stdout is closed")

    behind.start(fail)
    assert behind.wait(PATIENCE_SECONDS) and told == [OSError]
    behind.start(done.set)
    assert behind.wait(PATIENCE_SECONDS) and done.is_set()
    behind.close()


def test_where_no_thread_is_to_be_had_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    behind, done = Behind("test"), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            behind.start(done.set)
    assert not behind.is_busy and behind.wait(0.0)
    behind.start(done.set)
    assert behind.wait(PATIENCE_SECONDS) and done.is_set()
    behind.close()


def test_without_an_action_there_is_no_thread() -> None:
    before = threading.active_count()
    behind = Behind("test")
    assert not behind.is_busy and behind.wait(0.0)
    behind.close()
    assert threading.active_count() == before
