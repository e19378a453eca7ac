"""Text -> token ids: a `tokenizer.json`, or plain bytes where a job names no tokenizer."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainyard.errors import InputError
from trainyard.spec.job import JobSpec

BYTE_VOCAB_SIZE = 257
"""256 byte values and the end-of-document id, 256."""

_COMMON_EOS_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""Asked in this order where no tokenizer_config.json says which token ends a document."""

TokenIds = npt.NDArray[np.uint32]


class TextTokenizer(Protocol):
    """What the token cache needs of a tokenizer."""

    vocab_size: int
    """One more than the largest id."""
    prefix_ids: tuple[int, ...]
    """Ids that begin each document (a BOS where the tokenizer's own template has one)."""
    eos_id: int | None
    """Id that ends each document."""
    digest: str
    """Changes when any text would be tokenized otherwise."""

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Ids of each text, without prefix and end."""
        ...


class ByteTokenizer:
    """Every UTF-8 byte is a token: needs no file, fits any text."""

    vocab_size = BYTE_VOCAB_SIZE
    prefix_ids: tuple[int, ...] = ()
    eos_id: int | None = 256
    digest = "bytes-1"

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """The bytes of each text as ids."""
        return [
            np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.uint32) for text in texts
        ]


class JsonTokenizer:
    """A `tokenizer.json` of the tokenizers library (Hugging Face's fast tokenizers)."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        try:
            content = path.read_bytes()
            self._tokenizer = Tokenizer.from_buffer(content)
        except OSError as error:
            raise InputError(f"tokenizer {path}: can't be read: {error}") from None
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise InputError(f"tokenizer {path}: is not a tokenizer.json ({str(error)[:200]})") from None
        # A tokenizer.json may carry its model's truncation and padding: both would lose or invent training text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not self.vocab_size:
            raise InputError(f"tokenizer {path}: has an empty vocabulary")
        self.eos_id = vocabulary.get(_eos_token(path, vocabulary) or "")
        template = self._tokenizer.encode("", add_special_tokens=True).ids
        self.prefix_ids = tuple(template[:-1] if template and template[-1] == self.eos_id else template)
        self.digest = hashlib.sha256(content + repr((self.prefix_ids, self.eos_id)).encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Ids of each text; the library encodes a batch on all cores."""
        encodings: list[Any] = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]


def _eos_token(path: Path, vocabulary: dict[str, int]) -> str | None:
    config = path.with_name("tokenizer_config.json")
    if config.is_file():
        try:
            stated = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        except (json.JSONDecodeError, UnicodeDecodeError, OSError, AttributeError) as error:
            raise InputError(f"{config}: can't be read as JSON ({error})") from None
        stated = stated.get("content") if isinstance(stated, dict) else stated
        if isinstance(stated, str) and stated in vocabulary:
            return stated
    return next((token for token in _COMMON_EOS_TOKENS if token in vocabulary), None)


def tokenizer_of(job: JobSpec) -> TextTokenizer:
    """The job's tokenizer: `data.tokenizer`, else the one beside a local `model.source`, else bytes."""
    file = tokenizer_file_of(job)
    return ByteTokenizer() if file is None else JsonTokenizer(file)


def tokenizer_file_of(job: JobSpec) -> Path | None:
    """The tokenizer.json that `tokenizer_of` reads; None for bytes."""
    if job.data.tokenizer is not None:
        return _tokenizer_file(job.data.tokenizer, "data.tokenizer")
    return None if job.model.source is None else _tokenizer_file(job.model.source, "model.source")


def _tokenizer_file(location: str, field: str) -> Path:
    path = Path(location)
    if "://" in location or not path.exists():
        raise InputError(f"{field} {location}: the tokenizer must be a local tokenizer.json or a folder that holds one")
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"{field} {location}: holds no tokenizer.json; save the tokenizer in its fast form, or set data.tokenizer"
        )
    return file
