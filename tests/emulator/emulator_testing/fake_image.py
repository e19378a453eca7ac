"""Stands in for the training container: its hyperparameters say what to do. Needs nothing but Python."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(os.environ["TRAINYARD_OPT_ML"])
CONFIG = ROOT / "input" / "config"


def main() -> int:
    """Show what the host was given, make some artifacts, and end as asked."""
    asked = json.loads((CONFIG / "hyperparameters.json").read_text())
    resources = json.loads((CONFIG / "resourceconfig.json").read_text())
    shown = {
        "host": resources["current_host"],
        "hosts": resources["hosts"],
        "cwd": str(Path.cwd()),
        "environment": sorted(os.environ),
        "channels": json.loads((CONFIG / "inputdataconfig.json").read_text()),
        "files": sorted(str(path.relative_to(ROOT)) for path in (ROOT / "input" / "data").rglob("*") if path.is_file()),
        "addresses": json.loads(os.environ["TRAINYARD_HOST_ADDRESSES"]),
        "port": os.environ["TRAINYARD_RENDEZVOUS_PORT"],
    }
    print("shown " + json.dumps(shown), flush=True)
    (ROOT / "model" / f"weights-{shown['host']}.bin").write_bytes(b"weights")
    (ROOT / "output" / "data" / "result.json").write_text("{}")
    if asked.get("mode") == "fail":
        (ROOT / "output" / "failure").write_text("the loss is not a number\nsecond line")
        return 3
    if asked.get("mode") == "fail_on_two" and shown["host"] == "algo-2":
        return 7
    if "steps" in asked:
        # The first attempt alone is held: what ends it is the test's doing, however slow the machine is.
        held = int(asked.get("hold_at", 0)) if ROOT.parent.name == "attempt-1" else 0
        return run_steps(int(asked["steps"]), stubborn=asked.get("mode") == "stubborn", held=held)
    return 0


def run_steps(num_steps: int, *, stubborn: bool, held: int) -> int:
    """A step every 100 ms, and ten minutes after the one that is `held`; a child in a session of its own, as torchrun's
    ranks are; SIGTERM means save and leave."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)

    def save(signum: int, frame: object) -> None:
        print("saved on SIGTERM", flush=True)
        if not stubborn:
            os._exit(75)

    signal.signal(signal.SIGTERM, save)
    for step in range(1, num_steps + 1):
        print(f"step={step} loss={1 / step:.4f}", flush=True)
        time.sleep(600 if step == held else 0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
