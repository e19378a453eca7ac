"""The faults of the campaign are the trainer tests' own."""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(_TESTS / "trainer"), str(_TESTS / "launch")]
