"""Where computing stands still for other ranks: every wait for a collective, told to whoever listens.

torch gives no figure for it, but two places see every wait that Python asks for: `Work.wait`, in which synchronous
collectives, FSDP2, pipelines and DeepSpeed end, and `wait_tensor` of the functional collectives, in which DTensor's
end. On a GPU both only make the current stream wait, and so does `Stream.wait_event`, by which FSDP2 and DeepSpeed
wait for their communication streams. DDP waits in C++ alone; its own log has the figure (`ddp_wait_seconds`).

Not seen: collectives inside of a graph that torch.compile made.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.nn.parallel import DistributedDataParallel


class Listener(Protocol):
    """Who is told of waits (`trainer.observe.step_clock.StepClock`)."""

    def waiting(self) -> AbstractContextManager[None]:
        """Around one wait."""

    def waited(self, seconds: float) -> None:
        """A wait that lies in the past, inside of the backward pass."""


_listener: Listener | None = None
_compute_stream: Any = None


def listen(listener: Listener | None) -> None:
    """From now on `listener` is told of this process's waits; None: nobody is."""
    global _listener, _compute_stream  # noqa: PLW0603  # one process computes one thing
    _listener = listener
    if listener is None:
        return
    _watch(dist.distributed_c10d.Work, "wait")
    _watch(_functional_collectives, "wait_tensor")
    if torch.cuda.is_available():
        _compute_stream = torch.cuda.current_stream()
        _watch(torch.cuda.Stream, "wait_event", is_ours=lambda stream, *_: stream == _compute_stream)


def _watch(owner: Any, name: str, is_ours: Callable[..., bool] = lambda *_: True) -> None:
    """Replaces a function by one that tells of its calls; once, however often it is asked for."""
    original = getattr(owner, name)
    if hasattr(original, "_is_watched"):
        return

    @functools.wraps(original)
    def watched(*arguments: Any, **options: Any) -> Any:
        listener = _listener
        if listener is None or not _computes() or not is_ours(*arguments):
            return original(*arguments, **options)
        with listener.waiting():
            return original(*arguments, **options)

    watched._is_watched = True  # type: ignore[attr-defined]  # our own mark
    setattr(owner, name, watched)


def _computes() -> bool:
    """Whether this thread trains: the main one, or autograd's, which Python did not start; no checkpoint writer."""
    return isinstance(threading.current_thread(), (threading._MainThread, threading._DummyThread))  # type: ignore[attr-defined]  # typeshed has only one


def log_every_step(model: DistributedDataParallel) -> None:
    """Makes DDP time each of its steps; its default is the first ten and every hundredth."""
    model._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def tell_ddp_wait(model: DistributedDataParallel) -> None:
    """After a backward pass that synchronized: how long DDP waited when all gradients were there.

    Its log has when the last gradient was ready and when the last bucket was reduced (on a GPU by events).
    """
    if _listener is None:
        return
    model.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]  # else only the next forward pass would
    data = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    exposed = data.get("backward_comm_time", 0) - data.get("backward_compute_comm_overlap_time", 0)
    _listener.waited(max(0.0, exposed / 1e9))
