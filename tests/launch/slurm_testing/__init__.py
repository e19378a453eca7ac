"""A real Slurm for tests, and who launches jobs on it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_testing.desk import Desk
from slurm_testing.machines import SlurmCluster
from slurm_testing.programs import NoSlurm, programs


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Two machines; skipped where Slurm is to be had neither from this machine nor from Debian's archive."""
    try:
        found = programs()
    except NoSlurm as why:
        pytest.skip(f"no Slurm here: {why}")
    # A short path: munge's socket has a name of 107 characters at most.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    with SlurmCluster(found, folder / "c") as running:
        yield running
    shutil.rmtree(folder)
    assert running.left == [], f"its jobs left running: {running.left}"


@pytest.fixture
def desk(cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("PATH", f"{cluster.bin}:{os.environ['PATH']}")
    return Desk(cluster, tmp_path)
