"""torch.distributed.checkpoint's index of a checkpoint, `.metadata`: a pickle, of which nothing but an index is made.

Whoever opens a checkpoint may have wider rights than who wrote it (an export does): so no name in the pickle is looked
up but those that an index is made of, and none is given a class or a function of the process, which it could change.
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


_KINDS = (
    parts.BytesStorageMetadata,
    parts.ChunkStorageMetadata,
    parts.Metadata,
    parts.MetadataIndex,
    parts.StorageMeta,
    parts.TensorProperties,
    parts.TensorStorageMetadata,
)


class _Format:
    """What a member of the one enumeration that an index has is compared with; not the member, which all share."""

    def __init__(self, member: Any) -> None:
        self._member = member

    def __eq__(self, other: object) -> bool:
        return other is self._member

    def __hash__(self) -> int:
        return hash(self._member)


def _maker(make: Callable[..., Any]) -> type:
    """A class of this parse alone, which makes what `make` does: a pickle may change what it is given."""

    def new(_: type, *arguments: Any) -> Any:
        return make(*arguments)

    return type("Maker", (), {"__new__": new})


def _of_kind(kind: type) -> type:
    return type("Maker", (), {"__new__": lambda _, *arguments: kind.__new__(kind, *arguments)})


def _known() -> dict[tuple[str, str], Any]:
    """All that an index is made of. What has no attributes that could be set is torch's and Python's own."""
    formats = parts._MEM_FORMAT_ENCODING
    format_maker = _maker(lambda value: _Format(formats(value)))

    def member(kind: object, name: str) -> _Format:
        """Python 3.11 asks for it by `getattr`."""
        if kind is not format_maker:
            raise pickle.UnpicklingError(f"it asks {kind!r} for {name!r}, which no index does")
        return _Format(formats[name])

    path = _maker(pathlib.PurePosixPath)
    return {
        ("builtins", "getattr"): member,
        ("collections", "OrderedDict"): OrderedDict,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _maker(torch.serialization._get_layout),
        (filesystem.__name__, "_StorageInfo"): _of_kind(filesystem._StorageInfo),
        (parts.__name__, formats.__name__): format_maker,
        **{(parts.__name__, kind.__name__): _of_kind(kind) for kind in _KINDS},
        # Where it was saved, under the names that Python's versions gave it.
        **{(module, "PosixPath"): path for module in ("pathlib", "pathlib._local")},
    }


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._known = _known()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, of which no index is made")


def parse_index(content: bytes) -> parts.Metadata:
    """The index in `content`; ManifestError."""
    try:
        index = _Unpickler(content).load()
    except Exception as error:  # of a class that this torch doesn't know: pickle raises what it likes
        raise ManifestError(f"{INDEX} can't be read ({type(error).__name__}: {error})") from None
    if not isinstance(index, parts.Metadata):
        raise ManifestError(f"{INDEX} can't be read (it holds a {type(index).__name__})")
    return index
