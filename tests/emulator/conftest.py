"""One emulator for the folder, its container's place taken by fake_image.py."""

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainyard import emulator

sys.path.insert(0, str(Path(__file__).resolve().parent))  # an installed package is called `tests` already

from emulator_testing import FAKE_IMAGE, Caller, Site  # after the path is set


@pytest.fixture(scope="session")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the shared emulator lives."""
    return tmp_path_factory.mktemp("emulator")


@pytest.fixture(scope="session")
def info(state_dir: Path) -> Iterator[emulator.EmulatorInfo]:
    """The shared emulator."""
    started = emulator.start(state_dir, training_argv=[sys.executable, str(FAKE_IMAGE)])
    yield started
    emulator.stop(state_dir)
    from trainyard.emulator.processes import processes_under

    assert processes_under(state_dir / "jobs") == set()


@pytest.fixture(scope="session")
def site(info: emulator.EmulatorInfo) -> Site:
    """The shared emulator, as its root."""
    return Site(info)


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"t{uuid.uuid4().hex[:10]}"


@pytest.fixture
def tenants(site: Site, name: str) -> tuple[Caller, Caller]:
    """Two callers, each with a role, a KMS key and an encrypted bucket of its own, and nothing else."""
    return site.tenant(f"{name}a"), site.tenant(f"{name}b")
