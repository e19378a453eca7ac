"""One quickstart for the whole folder: the other tests use the platform that it deployed."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainyard import emulator
from trainyard.operate.quickstart.training import JOBS_FILE

sys.path.insert(0, str(Path(__file__).resolve().parent))  # an installed package is called `tests` already

from deployed_site import Site, processes_of, start_quickstart  # after the path is set


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The platform after a quickstart that was killed while its job ran, and simply started again."""
    state_dir = tmp_path_factory.mktemp("state")
    killed = start_quickstart(state_dir)
    launched = state_dir / "quickstart" / JOBS_FILE
    try:
        # As soon as there is a job: on a fast machine, or with the second one late, it would be done before.
        while not launched.exists():
            if killed.poll() is not None:
                pytest.fail(f"the first quickstart ended before it trained:\n{killed.communicate()[0]}")
            time.sleep(0.2)
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
