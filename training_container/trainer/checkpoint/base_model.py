"""Which frozen weights a job trains upon: where files hold them, checkpoints don't, and are nothing upon others."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from trainyard.errors import InputError
from trainyard.spec.job import ResolvedJob

_HEADER_BYTES = 1 << 20
"""Read of each file's beginning: names, types and shapes are there."""
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 64 << 10

_WEIGHTS = ("*.safetensors", "*.bin")

FROZEN = "frozen."
"""Begins the names, in a checkpoint, of weights that are not trained and that no file has: see `keeps_frozen`."""
FREEZABLE = "vision_tower."
"""In the names of what a job may freeze of a model that it trains whole."""


def base_model_digest(job: ResolvedJob) -> str | None:
    """What tells one frozen model from another, hex; None where nothing is frozen, or the source has no weights."""
    model = job.spec.model
    # A tower's last layers lie behind the output that is taken, and are never trained.
    is_frozen = model.adapter is not None or job.spec.task == "vision_language"
    return weights_digest(Path(model.source)) if is_frozen and model.source is not None else None


def keeps_frozen(job: ResolvedJob) -> bool:
    """Whether checkpoints hold what is frozen too: of a model made from a configuration, whose frozen weights began as
    random numbers. The seed makes the same ones again only as long as the library initializes as it does today."""
    return job.spec.model.source is None


def weights_digest(folder: Path) -> str | None:
    """What tells the weights in a folder from others, hex; None where it holds none.

    Names and sizes of its files of weights, each one's first MiB and 64 blocks of 64 KiB spread over it.
    That is no hash of every byte, which would cost a large model minutes at each start: any training changes nearly
    all values, so another model is told; a single flipped bit is not.
    """
    paths = sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)})
    if not paths:
        return None
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        for block in _sampled(path, size):
            digest.update(block)
    return digest.hexdigest()


def _sampled(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield file.read(_HEADER_BYTES)
        for number in range(_NUM_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)


def check_same_base(saved: str | None, own: str | None, *, uri: str, source: str | None) -> None:
    """InputError when a checkpoint was trained upon other frozen weights than the job's."""
    if saved is None or own is None or saved == own:
        return
    raise InputError(
        f"checkpoint {uri}: was trained upon other frozen weights than those of model.source: {source}"
        f" (fingerprint {saved[:12]}, the job's is {own[:12]});"
        " give the source that it was trained upon, or another checkpoint.destination to start anew"
    )
