"""torch.distributed.checkpoint's index of a checkpoint, `.metadata`: a pickle, of which nothing but an index is made.

Whoever opens a checkpoint may have wider rights than who wrote it (an export does): so no name in the pickle is looked
up but those that an index is made of.
"""

import io
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as parts

from trainer.checkpoint.manifest import ManifestError

INDEX = ".metadata"


def _member(kind: type, name: str) -> Any:
    """A member of the one enumeration that an index has: Python 3.11 asks for it by `getattr`."""
    if kind is not parts._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it asks {kind!r} for {name!r}, which no index does")
    return parts._MEM_FORMAT_ENCODING[name]


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("builtins", "getattr"): _member,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    **{
        (parts.__name__, kind.__name__): kind
        for kind in (
            parts._MEM_FORMAT_ENCODING,
            parts.BytesStorageMetadata,
            parts.ChunkStorageMetadata,
            parts.Metadata,
            parts.MetadataIndex,
            parts.StorageMeta,
            parts.TensorProperties,
            parts.TensorStorageMetadata,
        )
    },
    # Where it was saved, under the names that Python's versions gave it.
    **{(module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, of which no index is made")


def parse_index(content: bytes) -> parts.Metadata:
    """The index in `content`; ManifestError."""
    try:
        index = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # of a class that this torch doesn't know: pickle raises what it likes
        raise ManifestError(f"{INDEX} can't be read ({type(error).__name__}: {error})") from None
    if not isinstance(index, parts.Metadata):
        raise ManifestError(f"{INDEX} can't be read (it holds a {type(index).__name__})")
    return index
