"""Which tests may run side by side."""

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A room's tests share emulators and deployments, a file's tests its fixtures: one worker has them all."""
    for item in items:
        room, *rest = item.path.relative_to(TESTS).parts
        group = "/".join([room, *rest]) if room == "trainer" else room
        item.add_marker(pytest.mark.xdist_group(group))
