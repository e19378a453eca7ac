"""ZeRO-3 with optimizer state, and weights between their uses, in files on a local NVMe disk.

DeepSpeed writes them with an operation of its own (async_io), compiled against libaio on its first use, or when the
image was built. Its files are named by rank and parameter; here they get a folder of the job, which goes when it ends.
"""

import shutil
from pathlib import Path

import torch.distributed as dist

from trainyard.errors import InputError
from trainyard.spec.job import ResolvedJob

STATE_BYTES = 16
"""A trained element's float32 weight, its two moments, and its gradient between the backward pass and the step."""

WEIGHT_BYTES = 4
"""At most, of a weight that lies on disk between its uses."""

LEAST_BYTES = 2**20
"""What is smaller, of a rank's part, DeepSpeed 0.19.8 leaves in memory (its MIN_AIO_BYTES)."""


def check() -> None:
    """InputError, in one line, where DeepSpeed's operation for NVMe can't be had."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise InputError(
            "parallelism.offload: nvme needs DeepSpeed's async_io operation, which can't be built here: libaio's"
            " library and headers were not found (Debian, Ubuntu: apt-get install libaio-dev); use cpu"
        )


def folder_of(job: ResolvedJob, num_elements: int, num_trained: int) -> Path | None:
    """Makes the folder for the job's files; None for a job that has none.

    num_elements, num_trained: of the whole model; this host's share must fit on the disk, else InputError.
    """
    layout = job.parallelism
    if "nvme" not in (layout.offload, layout.zero.offload_parameters):
        return None
    folder = path_of(job)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"parallelism.zero.nvme_path: {folder} can't be made: {error.strerror}") from None
    needed = STATE_BYTES * num_trained if layout.offload == "nvme" else 0
    needed += WEIGHT_BYTES * num_elements if layout.zero.offload_parameters == "nvme" else 0
    needed = needed // job.num_hosts
    left_by_an_attempt = sum(path.stat().st_size for path in folder.rglob("*.swp"))
    free = shutil.disk_usage(folder).free + left_by_an_attempt
    if free < needed:
        raise InputError(
            f"parallelism.zero.nvme_path: {folder} has {free / 2**30:.1f} GiB free; this host's share needs"
            f" {needed / 2**30:.1f}: take a larger disk, more hosts, or offload: cpu"
        )
    return folder


def path_of(job: ResolvedJob) -> Path:
    """The folder of this job's files: two jobs on one host don't meet."""
    assert job.parallelism.zero.nvme_path is not None, "the spec's rule"
    return Path(job.parallelism.zero.nvme_path) / f"trainyard-offload-{job.spec.name}"


def clean(folder: Path | None) -> None:
    """Removes this rank's files, and the folder after the last of them. What a killed rank leaves is overwritten by
    the job's next attempt."""
    if folder is None:
        return
    for own in folder.glob(f"*/*/rank{dist.get_rank()}"):
        shutil.rmtree(own, ignore_errors=True)
    for parent in (*folder.glob("*/*"), *folder.glob("*"), folder):
        try:
            parent.rmdir()
        except OSError:  # another rank's files are still there
            return
