"""How a process imports what is large: without looking for garbage meanwhile. Imports no torch."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """What is imported inside is never looked through for garbage: not while it comes in, and not later.

    torch, DeepSpeed and transformers make about a million objects that stay until the process ends. The collector looks
    through them again and again while they come in, a fifth of a rank's time to its first step on CPU, and afterwards
    would stop a rank in the middle of a step to do so once more, and every other rank that waits for it. SageMaker's
    SDK costs two thirds of its CPU time so, moto with all its services nearly three quarters.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
