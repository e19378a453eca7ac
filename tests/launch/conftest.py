"""The fixtures of launch_testing, for every test of this room."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from kubernetes_testing import kubectl  # noqa: F401
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
from ray_testing import ray_cluster  # noqa: F401
from slurm_testing import cluster, desk  # noqa: F401
