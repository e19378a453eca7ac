"""Text -> token ids: a `tokenizer.json`, or plain bytes where a job names no tokenizer."""

import copy
import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainyard.errors import InputError
from trainyard.spec.data_files import tokenizer_file_of
from trainyard.spec.job import JobSpec

BYTE_VOCAB_SIZE = 257
"""256 byte values and the end-of-document id, 256."""

_COMMON_EOS_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""Asked in this order where no tokenizer_config.json says which token ends a document."""

_ANCHOR_CHARACTERS = 256

TokenIds = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Anchors:
    """Places of a text to begin at: what lies between one and a later border gives, alone, the ids that it gives in the
    text up to that border. Ascending; the text's beginning needs no naming."""

    characters: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    """How many ids lie before each."""
    ends: tuple[int, ...] = ()
    """The first border that each is good for."""

    def before(self, border: int) -> tuple[int, int]:
        """(character, token) of the last one that is good for a border."""
        place = bisect_right(self.ends, border) - 1
        return (self.characters[place], self.tokens[place]) if place >= 0 else (0, 0)


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

    def encode_anchored(self, texts: Sequence[str]) -> list[tuple[TokenIds, Anchors]]:
        """The same, with places to begin at when a part of a text is looked at."""
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

    def encode_anchored(self, texts: Sequence[str]) -> list[tuple[TokenIds, Anchors]]:
        """See TextTokenizer: any character would do."""
        return list(zip(self.encode_batch(texts), map(self._anchors, texts), strict=True))

    @staticmethod
    def _anchors(text: str) -> Anchors:
        characters = tuple(range(0, len(text), _ANCHOR_CHARACTERS))
        sizes = [len(text[begin : begin + _ANCHOR_CHARACTERS].encode("utf-8", "surrogatepass")) for begin in characters]
        return Anchors(characters, (0, *accumulate(sizes[:-1])) if sizes else (), characters)


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
        self._dividers = _dividers(self._tokenizer.get_added_tokens_decoder())
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not self.vocab_size:
            raise InputError(f"tokenizer {path}: has an empty vocabulary")
        settings = settings_beside(path)
        _check_added_tokens(path, settings, vocabulary)
        self.eos_id = vocabulary.get(_eos_token(settings, vocabulary) or "")
        self.prefix_ids = self._begin()
        self.digest = hashlib.sha256(content + repr((self.prefix_ids, self.eos_id)).encode()).hexdigest()

    def _begin(self) -> tuple[int, ...]:
        """What the tokenizer's own template puts before a text: of an empty one nobody could tell it from what comes
        after, where one token is both (OPT's </s>). The text is another vocabulary's: there is none that each can
        write, and what this one can't would leave an empty one."""
        from tokenizers import Tokenizer, models

        text = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode("a")
        framed = self._tokenizer.post_process(text, add_special_tokens=True)
        own = next((place for place, part in enumerate(framed.sequence_ids) if part is not None), 0)
        return tuple(framed.ids[:own])

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Ids of each text; the library encodes a batch on all cores."""
        encodings: list[Any] = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_anchored(self, texts: Sequence[str]) -> list[tuple[TokenIds, Anchors]]:
        """See TextTokenizer. An added token that the library looks for in the text as it is divides it: what lies on
        both sides is normalized, cut and merged by itself (`AddedVocabulary::extract_and_normalize`)."""
        encodings: list[Any] = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ids = [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]
        return [
            (own, self._anchors(text, own, encoding)) for text, own, encoding in zip(texts, ids, encodings, strict=True)
        ]

    def with_token(self, text: str) -> "JsonTokenizer":
        """One for which `text` is a token wherever it stands: what lies on both sides is cut and merged by itself. A
        text that the vocabulary lacks gets an id behind it, which `vocab_size` doesn't count."""
        from tokenizers import AddedToken, Tokenizer

        if text in self._dividers.values():
            return self
        changed = copy.copy(self)
        changed._tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        changed._tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        known = self._tokenizer.get_vocab(with_added_tokens=True)
        if text not in known and changed._tokenizer.token_to_id(text) in known.values():
            return self  # the library counts tokens where their numbers have gaps: it is another one's
        changed._dividers = _dividers(changed._tokenizer.get_added_tokens_decoder())
        return changed

    def _anchors(self, text: str, ids: TokenIds, encoding: Any) -> Anchors:
        found = []
        for token in np.flatnonzero(np.isin(ids, list(self._dividers))).tolist():
            begin, end = encoding.token_to_chars(token)
            if text[begin:end] == self._dividers[int(ids[token])]:  # it may take the white space beside it along
                found.append((begin, token, end))
        return Anchors(*zip(*found, strict=True)) if found else Anchors()


def _dividers(added: dict[int, Any]) -> dict[int, str]:
    """Added tokens, by id, that are found wherever they stand in a text, before it is normalized.

    None where some of those are whole words alone: the library looks for no other where it has refused one of them.
    """
    plain = {number: token for number, token in added.items() if not token.normalized}
    if any(token.single_word for token in plain.values()):
        return {}
    return {number: token.content for number, token in plain.items()}


def settings_beside(tokenizer_file: Path) -> dict[str, Any]:
    """tokenizer_config.json; one that doesn't list its added tokens is an older one, whose special tokens are in
    special_tokens_map.json: so transformers reads them."""
    settings = json_object(tokenizer_file.with_name("tokenizer_config.json"))
    if "added_tokens_decoder" in settings:
        return settings
    return settings | json_object(tokenizer_file.with_name("special_tokens_map.json"))


def json_object(path: Path) -> dict[str, Any]:
    """What a file beside a model says; {} where there is none, or no object in it. InputError: it is no JSON."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read as JSON ({error})") from None
    return content if isinstance(content, dict) else {}


def token_text(stated: Any) -> str | None:
    """A special token as a configuration states it: its text, or an object that has it."""
    text = stated.get("content") if isinstance(stated, dict) else stated
    return text if isinstance(text, str) else None


def _check_added_tokens(path: Path, settings: dict[str, Any], vocabulary: dict[str, int]) -> None:
    """InputError for tokens that transformers would add when it loads the tokenizer: here they would be cut up as
    text, and another token end the documents."""
    added = settings.get("added_tokens_decoder")
    stated = [token_text(token) for token in added.values()] if isinstance(added, dict) else []
    stated.append(token_text(settings.get("eos_token")))
    # Older converted models write "" for none, which no library adds.
    if lacking := [token for token in stated if token and token not in vocabulary]:
        raise InputError(
            f"tokenizer {path}: has no token {lacking[0]!r}, which a configuration beside it states; let"
            " transformers load the tokenizer and save it anew (save_pretrained), or correct the configuration"
        )


def _eos_token(settings: dict[str, Any], vocabulary: dict[str, int]) -> str | None:
    stated = token_text(settings.get("eos_token"))
    return stated or next((token for token in _COMMON_EOS_TOKENS if token in vocabulary), None)


def tokenizer_of(job: JobSpec) -> TextTokenizer:
    """The job's tokenizer: `data.tokenizer`, else the one beside a local `model.source`, else bytes."""
    file = tokenizer_file_of(job)
    return ByteTokenizer() if file is None else JsonTokenizer(file)
