"""The words of `compute.backend`: where a job runs. Imports nothing, so that the command line knows them at once."""

from typing import Literal

BackendName = Literal["sagemaker", "slurm", "kubernetes", "ray", "local"]
