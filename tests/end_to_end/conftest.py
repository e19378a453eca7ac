"""One quickstart for the whole folder: the other tests use the platform that it deployed."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainyard import emulator

sys.path.insert(0, str(Path(__file__).resolve().parent))  # an installed package is called `tests` already

from deployed_site import Site, processes_of, start_quickstart  # after the path is set


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The platform after a quickstart that was killed in mid-training and simply started again."""
    state_dir = tmp_path_factory.mktemp("state")
    killed = start_quickstart(state_dir)
    assert killed.stdout is not None
    try:
        for line in killed.stdout:
            if "processes starting" in line or ", loss " in line:
                break
        else:
            pytest.fail("the first quickstart ended before it trained")
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        again = start_quickstart(state_dir)
        output, _ = again.communicate(timeout=1500)
        assert again.returncode == 0, output[-4000:]
        report = json.loads((state_dir / "quickstart/report.json").read_text())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRAINYARD_STATE_DIR", str(state_dir))
            yield Site(state_dir, report, output)
    finally:
        emulator.stop(state_dir / "emulator")
        assert processes_of(state_dir) == []
