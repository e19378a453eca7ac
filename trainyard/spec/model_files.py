"""Whether `model.source` is a model, and its files are whole, before hours are spent on the data: of the weights the
headers alone are read. One rule for the trainer, and for who looks before a process starts, here or in a bucket.

The format: eight bytes of the header's length, the header in JSON, the tensors (github.com/huggingface/safetensors).
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from trainyard.errors import InputError

_NAME = "model.safetensors"
_INDEX = f"{_NAME}.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000
"""What safetensors itself takes."""
_POINTER = b"version https://git-lfs"
"""How a file begins that Git LFS has not fetched."""
_MEND = "copy or download it again"
_NUM_AT_ONCE = 8
"""Files looked at at a time: a 405B model has 191, each some round trips away in a bucket."""


class Files(Protocol):
    """The files of one folder, wherever it is; safe for several threads."""

    def is_there(self, name: str) -> bool:
        """Whether the folder lists it, be it a link to nothing."""
        ...

    def size(self, name: str) -> int:
        """Bytes. OSError where it can't be looked at, FileNotFoundError where it isn't there."""
        ...

    def read(self, name: str, offset: int = 0, num_bytes: int = -1) -> bytes:
        """So many bytes from there, or less where it ends; -1: to its end. OSError as `size`."""
        ...


class LocalFiles:
    """`Files` of a folder on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def is_there(self, name: str) -> bool:
        return os.path.lexists(self._folder / name)

    def size(self, name: str) -> int:
        return (self._folder / name).stat().st_size

    def read(self, name: str, offset: int = 0, num_bytes: int = -1) -> bytes:
        with (self._folder / name).open("rb") as file:
            file.seek(offset)
            return file.read(num_bytes)


def folder_of(source: str) -> Path:
    """The folder that `model.source` names; InputError unless a model's configuration is in it.

    Nothing is looked up in the Hugging Face Hub: a training host has no internet, and would wait for it.
    """
    folder = Path(source)
    if (folder / "config.json").is_file():
        return folder
    if "://" in source:
        wrong, mend = "the trainer reads local folders", "launch the job, or copy the model here first"
    elif folder.is_dir():
        raise no_config(source)
    else:
        wrong = "no such folder; the trainer reads local folders, and asks the Hugging Face Hub for nothing"
        mend = "correct the path" if source.startswith(("/", ".", "~")) else f"hf download {source} --local-dir FOLDER"
        mend += ", and give FOLDER" if mend.startswith("hf") else ""
    raise InputError(f"model.source: {source}: {wrong}; {mend}")


def no_config(source: str) -> InputError:
    """The error for a folder, here or in a bucket, that is no model's."""
    return InputError(f"model.source: {source}: no config.json there; give a Hugging Face model directory")


def not_a_folder(source: str) -> InputError:
    """The error for a file where a model's folder is wanted."""
    return InputError(f"model.source: {source}: is a file; name the folder that holds it and config.json")


def check_weight_files(source: str, files: Files | None = None) -> None:
    """InputError for a file of weights that isn't there, is cut off or is none, of a source in safetensors.

    `files`: of a source that is no folder of this machine. That the weights are the model's is said where it is built.
    """
    files = files or LocalFiles(Path(source))
    names = _names_of(files, source)
    with ThreadPoolExecutor(_NUM_AT_ONCE, thread_name_prefix="weights") as pool:
        for name, wrong in zip(names, pool.map(lambda name: _wrong_with(files, name), names), strict=True):
            if wrong:
                pool.shutdown(cancel_futures=True)
                raise InputError(f"model.source: {source}: {name}: {wrong}")


def _names_of(files: Files, source: str) -> list[str]:
    """As transformers looks for them: one file, else those of the index, else what torch pickled, of which nothing is
    said here."""
    if files.is_there(_NAME):
        return [_NAME]
    if _leads_nowhere(files, _INDEX):
        if any(map(files.is_there, _PICKLED)):
            return []
        raise InputError(
            f"model.source: {source}: has no weights, neither {_NAME} nor {_INDEX} nor {_PICKLED[0]}; {_MEND}, or"
            " state model.config for a model that is trained from nothing"
        )
    try:
        index: Any = json.loads(files.read(_INDEX).decode())
        return sorted(set(map(str, index["weight_map"].values())))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"model.source: {source}: {_INDEX}: can't be read ({words}); {_MEND}") from None


def _leads_nowhere(files: Files, name: str) -> bool:
    """Whether it isn't there, or a link to nothing."""
    try:
        files.size(name)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _wrong_with(files: Files, name: str) -> str:
    """What is wrong with a file, and how to mend it; empty where nothing is."""
    try:
        size = files.size(name)
        expected = _size_by_header(files, name, size)
    except FileNotFoundError:
        return f"is not there, which {'a link' if name == _NAME else _INDEX} names; {_MEND}"
    except OSError as error:
        return f"can't be read ({error.strerror}); {_MEND}"
    except _CutHeaderError as error:
        return f"has {size:,} bytes, and its header alone {error.args[0]:,}; {_MEND}"
    except _PointerError:
        return "is a pointer of Git LFS, not the file: git lfs pull, or hf download"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return f"is no safetensors file; {_MEND}"
    return f"has {size:,} bytes, not {expected:,}; {_MEND}" if size != expected else ""


class _CutHeaderError(Exception):
    """A file that ends in its header, and how many bytes that takes: of the tensors nothing is known."""


class _PointerError(Exception):
    """What is there instead of a file that Git LFS has not fetched."""


def is_pointer(begin: bytes) -> bool:
    """Whether a file that begins so is what Git LFS puts in the place of one that it has not fetched."""
    return begin.startswith(_POINTER)


def _size_by_header(files: Files, name: str, size: int) -> int:
    """Bytes that a file of `size` must have. OSError, `_CutHeaderError`, `_PointerError`, and what Python raises of no
    header."""
    begin = files.read(name, 0, len(_POINTER))
    if is_pointer(begin):
        raise _PointerError
    length = int.from_bytes(begin[:_LENGTH_BYTES], "little")
    if len(begin) < _LENGTH_BYTES or length > _MOST_HEADER_BYTES:
        raise ValueError
    if _LENGTH_BYTES + length > size:
        raise _CutHeaderError(_LENGTH_BYTES + length)
    tensors: dict[str, Any] = json.loads(files.read(name, _LENGTH_BYTES, length))
    ends = [tensor["data_offsets"][1] for key, tensor in tensors.items() if key != "__metadata__"]
    return _LENGTH_BYTES + length + max(ends, default=0)
