"""ZeRO-3 with optimizer state, and weights between their uses, in files on a local NVMe disk.

DeepSpeed writes them with an operation of its own (async_io), compiled against libaio on its first use, or when the
image was built. Each rank has a folder of its own for them, locked while it runs, which goes when the job ends well.
"""

import fcntl
import shutil
from pathlib import Path
from typing import Any

from trainer.strategies.deepspeed_import import load_deepspeed
from trainyard.errors import InputError
from trainyard.spec.job import ResolvedJob

STATE_BYTES = 16
"""A trained element's float32 weight, its two moments, and its gradient between the backward pass and the step."""

WEIGHT_BYTES = 4
"""At most, of a weight that lies on disk between its uses."""

LEAST_BYTES = 2**20
"""What is smaller, of a rank's part, DeepSpeed 0.19.8 leaves in memory (its MIN_AIO_BYTES)."""

_GIB = 2**30


def check() -> None:
    """InputError, in one line, where DeepSpeed's operation for NVMe can't be had."""
    load_deepspeed()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise InputError(
            "parallelism.offload: nvme needs DeepSpeed's async_io operation, which can't be built here: libaio's"
            " library and headers were not found (Debian, Ubuntu: apt-get install libaio-dev); use cpu"
        )


def path_of(job: ResolvedJob) -> Path:
    """The folder of this job's files on a host."""
    assert job.parallelism.zero.nvme_path is not None, "the spec's rule"
    return Path(job.parallelism.zero.nvme_path) / f"trainyard-offload-{job.spec.name}"


class RankFolder:
    """One rank's files on the disk. What a killed rank left is overwritten by the job's next attempt."""

    def __init__(self, job: ResolvedJob, rank: int, *, num_elements: int, num_trained: int) -> None:
        """Makes and locks it. InputError where it can't be made, another run has it, or it does not fit on the disk.

        num_elements, num_trained: parameters of the whole model, and those that are trained.
        """
        self.path = path_of(job) / f"rank{rank}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("w")
        except OSError as error:
            raise InputError(f"parallelism.zero.nvme_path: {self.path} can't be made: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise InputError(
                f"parallelism.zero.nvme_path: another run of job {job.spec.name} has its files in {self.path}; let it"
                " end, or give one of them another name or path"
            ) from None
        self._check_room(job, num_elements, num_trained)

    def _check_room(self, job: ResolvedJob, num_elements: int, num_trained: int) -> None:
        layout = job.parallelism
        needed = STATE_BYTES * num_trained if layout.offload == "nvme" else 0
        needed += WEIGHT_BYTES * num_elements if layout.zero.offload_parameters == "nvme" else 0
        disk = shutil.disk_usage(self.path)
        # Other ranks of the host may have begun to write: of what is free only the own part can be asked.
        left = sum(path.stat().st_size for path in self.path.rglob("*.swp"))
        for what, has, needs in (
            ("free", disk.free + left, needed // layout.world_size),
            ("in all", disk.total, needed // job.num_hosts),
        ):
            if has < needs:
                owner = "this rank" if what == "free" else "this host"
                raise InputError(
                    f"parallelism.zero.nvme_path: the disk of {self.path} has {has / _GIB:.1f} GiB {what}, and {owner}"
                    f" needs {needs / _GIB:.1f}: take a larger disk, more hosts, or offload: cpu"
                )

    def use(self, config: dict[str, Any]) -> None:
        """Tells DeepSpeed's configuration of it."""
        for section in ("offload_optimizer", "offload_param"):
            offload = config["zero_optimization"].get(section, {})
            if offload.get("device") == "nvme":
                offload["nvme_path"] = str(self.path)

    def remove(self) -> None:
        """The files, the lock, and the job's folder after its last rank's."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        try:
            self.path.parent.rmdir()
        except OSError:  # another rank's files are still there
            return
