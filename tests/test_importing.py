"""What a process imports is not looked through for garbage."""

import gc
from collections.abc import Iterator

import pytest

from trainyard.importing import importing


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    """This process's own objects, afterwards, are garbage again where they are."""
    yield
    gc.enable()
    gc.unfreeze()


def test_what_comes_in_is_left_alone_then_and_later() -> None:
    gc.unfreeze()
    with importing():
        assert not gc.isenabled()
        kept: list[list[int]] = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(kept)


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError("no torch")
    assert gc.isenabled()


def test_who_has_turned_the_collector_off_keeps_it_off() -> None:
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()
