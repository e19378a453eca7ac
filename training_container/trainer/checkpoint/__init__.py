"""Checkpoints: committed or not there, readable at any layout, written while training goes on.

`Checkpointer(destination, ...)` has `save(step, tensors, extra, attachments=)`, `wait`, `latest` and `load(info, ...)`.
`latest(tensors)` reads no more of a checkpoint than these tensors need, and believes no byte before it was hashed;
where the caller can make them anew, it reads straight into them.
Every method is called by all ranks alike. A save blocks for the copy to host memory alone; writing, hashing and
uploading happen behind. Whatever goes wrong there is one line on stdout and in `last_error`, and never stops a step.

Layout under the destination (a folder or an s3:// prefix):

    metrics.jsonl                         attachments, as of the last commit
    checkpoints/run                       the run's name, where hosts' own disks are used
    checkpoints/step-00000010/__0_0.distcp, ...   shards, one per rank (torch.distributed.checkpoint)
                              __0_0.distcp.blocks where in it tensors lie, and hashes of their blocks
                              .metadata           its index
                              manifest.json       sizes and SHA-256 of all files, step, and `extra`
                              COMMITTED           written last, removed first; holds the manifest's SHA-256

`Interval` says how often to save where the job leaves that open.

Inside: `destination` (where bytes go), `manifest` (what is promised), `host_copy` (plan and staging), `writing` (shards
hashed as they are written), `restore` (which one is good), `blocks` (hashes of parts of files), `needs` (which of them
tensors need, and where in these they go), `index` (DCP's `.metadata`), `ranges` (who reads what), `reading` (the
reading itself), `disk` (files of this host, through the page cache or past it), `delivery` (the way to the destination,
and what stays there), `saving` (one save's way from host memory to its commit), `behind` (the thread that goes it),
`checkpointer` (when, and the load).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.checkpoint.checkpointer import Checkpointer
    from trainer.checkpoint.interval import Interval, best_interval_seconds
    from trainer.checkpoint.restore import CheckpointInfo, SpoiledError

__all__ = ["CheckpointInfo", "Checkpointer", "Interval", "SpoiledError", "best_interval_seconds"]

_MODULES = {
    "CheckpointInfo": "restore",
    "Checkpointer": "checkpointer",
    "Interval": "interval",
    "SpoiledError": "restore",
    "best_interval_seconds": "interval",
}


def __getattr__(name: str) -> Any:
    """These bring torch; the entrypoint, which must tell of a broken one, has `destination` without it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
