"""WebDataset shards of generated pictures that a tiny model can tell apart, and the jobs that read them."""

import io
import json
import random
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

COLOURS = ("red", "green", "blue", "grey")
_VALUES = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200), "grey": (120, 120, 120)}
SIZE = 16

RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
    "num_labels": len(COLOURS),
}
VIT = {
    "model_type": "vit",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": SIZE,
    "patch_size": 8,
    "num_labels": len(COLOURS),
}
CONVNEXT = {"model_type": "convnext", "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 4}


def picture(colour: str, draw: random.Random, *, kind: str = "PNG") -> bytes:
    """A noisy patch of one colour, of no fixed size."""
    width, height = draw.randint(18, 30), draw.randint(18, 30)
    noise = bytes(
        max(0, min(255, value + draw.randint(-30, 30))) for _ in range(width * height) for value in _VALUES[colour]
    )
    target = io.BytesIO()
    Image.frombytes("RGB", (width, height), noise).save(target, format=kind)
    return target.getvalue()


def classified(count: int, *, seed: int, names: bool = False) -> Iterator[dict[str, bytes]]:
    """Pictures with their colour's number (or name) as class."""
    draw = random.Random(seed)
    for _ in range(count):
        label = draw.randrange(len(COLOURS))
        yield {
            "png": picture(COLOURS[label], draw),
            "cls": (COLOURS[label] if names else str(label)).encode(),
        }


def captioned(count: int, *, seed: int) -> Iterator[dict[str, bytes]]:
    """Pictures with a question about their colour, or a caption that names it."""
    draw = random.Random(seed)
    for number in range(count):
        colour = draw.choice(COLOURS)
        text: dict[str, Any] = {"question": "which colour?", "answer": colour}
        if number % 3 == 0:
            text = {"caption": f"a {colour} patch"}
        yield {"jpg": picture(colour, draw, kind="JPEG"), "json": json.dumps(text).encode()}


def write_shards(folder: Path, samples: Iterator[dict[str, bytes]], *, shard_size: int = 24) -> Path:
    """Plain tar files of `shard_size` samples each."""
    folder.mkdir(parents=True, exist_ok=True)
    chunk: list[dict[str, bytes]] = []
    number = 0
    for sample in samples:
        chunk.append(sample)
        if len(chunk) == shard_size:
            _write_shard(folder / f"{number:04d}.tar", chunk)
            number, chunk = number + 1, []
    if chunk:
        _write_shard(folder / f"{number:04d}.tar", chunk)
    return folder


def _write_shard(path: Path, samples: Sequence[dict[str, bytes]]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, members in enumerate(samples):
            for extension, content in members.items():
                entry = tarfile.TarInfo(f"{path.stem}-{number:05d}.{extension}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


def image_job(folder: Path, **sections: Any) -> dict[str, Any]:
    """A job spec over `folder`/train and `folder`/validation; `sections` replace or, as mappings, add to its own."""
    job: dict[str, Any] = {
        "name": "pictures",
        "task": "image_classification",
        "model": {"config": RESNET},
        "data": {
            "train": [{"path": str(folder / "train"), "format": "webdataset"}],
            "validation": [{"path": str(folder / "validation"), "format": "webdataset"}],
        },
        "images": {"size": SIZE, "decode_threads": 2},
        "training": {
            "steps": 6,
            "global_batch_size": 16,
            "micro_batch_size": 4,
            "learning_rate": 0.05,
            "optimizer": {"kind": "sgd", "weight_decay": 1e-4},
            "schedule": {"kind": "cosine", "warmup_steps": 2},
            "gradient_clip": None,
            "precision": "fp32",
            "seed": 5,
            "validation_batches": 3,
        },
        "parallelism": {},
        "checkpoint": {"every_steps": 4, "keep_last": 2},
    }
    for name, value in sections.items():
        is_added_to = name != "model" and isinstance(value, dict) and isinstance(job.get(name), dict)
        job[name] = job[name] | value if is_added_to else value
    return job
