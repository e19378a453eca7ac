"""Which tests may run side by side, and in which order."""

import gc
import itertools
import os
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from xdist.scheduler import LoadScopeScheduling

# Before torch is imported: two workers on two cores, with two threads each, would wait for each other's.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_STARTERS = (
    *("trainer_testing.pool", "_worker", "trainer_testing.text_job", "trainer_testing.host"),
    *("trainer_testing.support_table", "subprocess"),
)
"""Words of trainer tests that start processes."""


# Each of a worker's hundreds of sessions would read the services' descriptions anew, and some library keeps them: after
# the command line's tests these were two million objects, which the garbage collector goes through again and again.
botocore.session.create_loader = cache(botocore.session.create_loader)


class RoomScheduling(LoadScopeScheduling):
    """A room's tests share emulators and deployments, a trainer file's its fixtures: one worker has them all.

    (xdist's own groups, by mark, have no effect under pytest 9.2, whose tests have their ids elsewhere.)
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", maxsplit=1)[0]
        _, room, *_ = file.split("/")
        return file if room == "trainer" else room


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """In the order in which they are found: the rooms that take longest come early."""
    config.option.loadscopereorder = False
    return RoomScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What a worker imports to find its tests, torch and moto among it, stays: it is never looked through for garbage.

    As a rank does it (`trainyard.importing`): the collector would go through a million objects again and again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@cache
def _starts_processes(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return any(word in text for word in _STARTERS)


def is_turn(test: str, day: int) -> bool:
    """Whether that slow test, of these halves of about the same size, is one of this day's."""
    return (zlib.crc32(test.encode()) + day) % 2 == 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of slow tests those of the day alone, which `scripts/test --ci` tells all workers, also at midnight. Among the
    trainer's files those that start processes come first: no worker ends with a long one, alone."""
    day = os.environ.get("TRAINYARD_TEST_DAY")
    if day is not None:
        kept = [not item.get_closest_marker("slow") or is_turn(item.nodeid, int(day)) for item in items]
        config.hook.pytest_deselected(items=[item for item, stays in zip(items, kept, strict=True) if not stays])
        items[:] = itertools.compress(items, kept)
    items.sort(key=lambda item: item.path.parts[-2] == "trainer" and not _starts_processes(item.path))
