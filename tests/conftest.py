"""Which tests may run side by side."""

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling


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
