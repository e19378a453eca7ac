"""The fixtures of launch_testing, for the tests of the command line."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

from launch_testing import (  # noqa: F401
    aws,
    channels,
    contract,
    deployed,
    environment,
    environment_path,
    job,
    resolved,
)
