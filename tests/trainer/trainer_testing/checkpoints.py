"""A committed checkpoint of given tensors, for what reads checkpoints."""

from pathlib import Path
from typing import Any

import torch
from trainer.checkpoint import Checkpointer
from trainer.checkpoint.blocks import BLOCKS_SUFFIX, parse_blocks


def save_checkpoint(
    folder: Path, tensors: dict[str, torch.Tensor], extra: dict[str, Any] | None = None, *, step: int = 3
) -> None:
    """A committed checkpoint, the only one that is kept."""
    checkpointer = Checkpointer(
        str(folder), rank=0, world_size=1, local_dir=folder.parent / "local", keep_last=1, asynchronous=False
    )
    checkpointer.save(step, tensors, extra or {}, attachments={})
    checkpointer.close()


def unchanged_bytes(older: Path, newer: Path) -> tuple[int, int]:
    """Bytes of the blocks that one step's checkpoint has in common with an earlier one's, and of all its blocks."""
    same = total = 0
    for path in newer.glob(f"*{BLOCKS_SUFFIX}"):
        before, now = (parse_blocks((folder / path.name).read_bytes()) for folder in (older, newer))
        for box, earlier in zip(now.boxes.values(), before.boxes.values(), strict=True):
            total += box.num_bytes
            for number in range(box.num_blocks):
                start, end = now.place(box.first_block + number)
                if now.digest(box.first_block + number) == before.digest(earlier.first_block + number):
                    same += end - start
    assert total, "no blocks to compare"
    return same, total
