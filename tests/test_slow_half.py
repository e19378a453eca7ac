"""Which slow tests `scripts/test --ci` runs on a day."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("tests/isolation/test_mutants.py", "tests/stacks/test_templates.py", "tests/operate/test_prices.py")


def _collected(day: int | None, marked: str = "") -> set[str]:
    """Of files with quick tests and slow ones; without a day all of them."""
    changed = ("TRAINYARD_TEST_DAY", "PYTEST_ADDOPTS")  # the day, and how much is printed
    environment = {name: value for name, value in os.environ.items() if name not in changed}
    if day is not None:
        environment["TRAINYARD_TEST_DAY"] = str(day)
    command = [sys.executable, "-m", "pytest", "-m", marked, "--collect-only", "-q", "-n0", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *FILES], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line for line in done.stdout.splitlines() if "::" in line}


def test_a_slow_test_runs_on_every_other_day_and_a_quick_one_on_all() -> None:
    every, slow = _collected(None), _collected(None, "slow")
    even, odd = _collected(20_000), _collected(20_001)
    assert even | odd == every
    assert even & odd == every - slow
    assert slow & even and slow & odd
