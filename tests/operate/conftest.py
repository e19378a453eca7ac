"""The fixtures of launch_testing, and image_testing beside this file, for the tests of the runbooks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))
sys.path.insert(0, str(Path(__file__).parent))

from launch_testing import (  # noqa: F401
    aws,
    channels,
    contract,
    deployed,
    environment,
    environment_path,
    job,
    record,
    resolved,
)
