"""Whether `model.source` is a model, and its files are whole, before hours are spent on the data: of the weights the
headers alone are read. One rule for the trainer, and for who looks before a process starts.

The format: eight bytes of the header's length, the header in JSON, the tensors (github.com/huggingface/safetensors).
"""

import json
import os
from pathlib import Path
from typing import Any

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
        wrong, mend = "no config.json there", "give a Hugging Face model directory"
    else:
        wrong = "no such folder; the trainer reads local folders, and asks the Hugging Face Hub for nothing"
        mend = "correct the path" if source.startswith(("/", ".", "~")) else f"hf download {source} --local-dir FOLDER"
        mend += ", and give FOLDER" if mend.startswith("hf") else ""
    raise InputError(f"model.source: {source}: {wrong}; {mend}")


def check_weight_files(source: str) -> None:
    """InputError for a file of weights that isn't there, is cut off or is none, of a source in safetensors.

    That the weights are the model's is said where it is built.
    """
    folder = Path(source)
    for name in _files_of(folder, source):
        wrong = _wrong_with(folder / name)
        if wrong:
            raise InputError(f"model.source: {source}: {name}: {wrong}")


def _files_of(folder: Path, source: str) -> list[str]:
    """As transformers looks for them: one file, else those of the index, else what torch pickled, of which nothing is
    said here."""
    if os.path.lexists(folder / _NAME):
        return [_NAME]
    if not (folder / _INDEX).exists():
        if any(os.path.lexists(folder / name) for name in _PICKLED):
            return []
        raise InputError(
            f"model.source: {source}: has no weights, neither {_NAME} nor {_INDEX} nor {_PICKLED[0]}; {_MEND}, or"
            " state model.config for a model that is trained from nothing"
        )
    try:
        index: Any = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        return sorted(set(map(str, index["weight_map"].values())))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"model.source: {source}: {_INDEX}: can't be read ({words}); {_MEND}") from None


def _wrong_with(path: Path) -> str:
    """What is wrong with a file, and how to mend it; empty where nothing is."""
    try:
        size = path.stat().st_size
        expected = _size_by_header(path)
    except FileNotFoundError:
        return f"is not there, which {'a link' if path.name == _NAME else _INDEX} names; {_MEND}"
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


def _size_by_header(path: Path) -> int:
    """Bytes that a file must have. OSError, `_CutHeaderError`, `_PointerError`, and what Python raises of no header."""
    with path.open("rb") as file:
        begin = file.read(len(_POINTER))
        if begin == _POINTER:
            raise _PointerError
        length = int.from_bytes(begin[:_LENGTH_BYTES], "little")
        if len(begin) < _LENGTH_BYTES or length > _MOST_HEADER_BYTES:
            raise ValueError
        file.seek(_LENGTH_BYTES)
        header = file.read(length)
    if len(header) < length:
        raise _CutHeaderError(_LENGTH_BYTES + length)
    tensors: dict[str, Any] = json.loads(header)
    ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
    return _LENGTH_BYTES + length + max(ends, default=0)
