"""Which products of a block that is computed again are taken from what its first pass kept, not computed."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

_is_replay: ContextVar[bool] = ContextVar("is_replay", default=False)
_is_last_product: ContextVar[bool] = ContextVar("is_last_product", default=False)


@contextmanager
def _inside(variable: ContextVar[bool]) -> Iterator[None]:
    token = variable.set(True)
    try:
        yield
    finally:
        variable.reset(token)


def replay() -> AbstractContextManager[None]:
    """Inside, a block is computed again whose products were kept."""
    return _inside(_is_replay)


def last_product() -> AbstractContextManager[None]:
    """Inside, a block's last product is computed, which is not kept."""
    return _inside(_is_last_product)


def in_last_product() -> bool:
    """Whether that is being computed."""
    return _is_last_product.get()


def has_result() -> bool:
    """Whether a product that is computed now was kept, and gives its result whatever its factors are."""
    return _is_replay.get() and not _is_last_product.get()
