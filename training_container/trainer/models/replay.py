"""Which products of a block that is computed again are taken from what its first pass kept, not computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_replay: ContextVar[bool] = ContextVar("is_replay", default=False)
_is_last_product: ContextVar[bool] = ContextVar("is_last_product", default=False)


@contextmanager
def replay() -> Iterator[None]:
    """Inside, a block is computed again whose products were kept."""
    token = _is_replay.set(True)
    try:
        yield
    finally:
        _is_replay.reset(token)


@contextmanager
def last_product() -> Iterator[None]:
    """Inside, a block's last product is computed, which is not kept."""
    token = _is_last_product.set(True)
    try:
        yield
    finally:
        _is_last_product.reset(token)


def in_last_product() -> bool:
    """Whether that is being computed."""
    return _is_last_product.get()


def has_result() -> bool:
    """Whether a product that is asked for now was kept, so that nobody reads its factors."""
    return _is_replay.get() and not _is_last_product.get()
