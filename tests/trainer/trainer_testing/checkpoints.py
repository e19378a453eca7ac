"""A committed checkpoint of given tensors, for what reads checkpoints."""

from pathlib import Path
from typing import Any

import torch
from trainer.checkpoint import Checkpointer


def save_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], extra: dict[str, Any] | None = None) -> None:
    """A committed checkpoint of step 3."""
    checkpointer = Checkpointer(
        str(folder), rank=0, world_size=1, local_dir=folder.parent / "local", keep_last=1, asynchronous=False
    )
    checkpointer.save(3, tensors, extra or {}, attachments={})
    checkpointer.close()
