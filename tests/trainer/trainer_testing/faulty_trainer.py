"""The real trainer, in which ranks die, raise or freeze where a file says so: what the entrypoint runs in tests.

TRAINYARD_TEST_FAULTS names a folder with `faults.json`: [{"rank", "step", "kind", "always", "after_seconds", "until"}].
`kind` is kill, stop, terminate, raise or sleep: at the beginning of the step, or so long after it from another thread,
whatever the rank is at by then. Each happens once in all starts of the job, unless `always`; none after `until` (epoch
seconds).
"""

import json
import math
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trainer.session import GlobalBatch, Session

FOLDER_VARIABLE = "TRAINYARD_TEST_FAULTS"


def happen(kind: str) -> None:
    """The fault, to this process."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "sleep":
        time.sleep(3600)
    else:
        raise ValueError("injected")


def install(folder: Path, rank: int) -> None:
    """Faults before the batch of a step is read."""
    faults: list[dict[str, Any]] = json.loads((folder / "faults.json").read_text())
    original = Session.next_batch

    def next_batch(self: Session) -> GlobalBatch:
        for number, fault in enumerate(faults):
            done = folder / f"done-{number}"
            if (fault["rank"], fault["step"]) == (rank, self.step + 1) and not done.exists():
                if time.time() > fault.get("until", math.inf):
                    continue
                if not fault.get("always"):
                    done.write_text(str(time.time()))
                if "after_seconds" in fault:
                    threading.Timer(fault["after_seconds"], happen, (fault["kind"],)).start()
                else:
                    happen(fault["kind"])
        return original(self)

    Session.next_batch = next_batch  # type: ignore[method-assign]


if __name__ == "__main__":
    install(Path(os.environ[FOLDER_VARIABLE]), int(os.environ["RANK"]))
    sys.argv[0] = "trainer"
    runpy.run_module("trainer", run_name="__main__", alter_sys=True)
