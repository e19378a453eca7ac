"""Makes `trainer_testing` importable (another package on the path already is called `tests`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
