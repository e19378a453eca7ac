"""Records -> token ids of whole documents, and which of them are learnt: plain text, prompts with answers, chats."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trainer.data.bad_records import BadRecordError
from trainer.data.chat import ChatTemplate, check_all_count
from trainer.data.readers import Record
from trainer.data.tokenizer import Anchors, TextTokenizer, TokenIds
from trainyard.errors import InputError
from trainyard.spec.job import DataSource

Item = TypeVar("Item")
_GROUP_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document's tokens, or a part of them."""

    ids: TokenIds
    learnt: npt.NDArray[np.bool_] | None = None
    """Same length; None: all of them."""
    ends: bool = True
    """Whether its document ends with it."""


class DocumentEncoder(Protocol):
    """How a source's records become tokens."""

    facts: list[Any]
    """JSON values that change when any record would be encoded otherwise."""

    def encode(self, records: Sequence[Record]) -> list[Encoded | BadRecordError | None]:
        """Each record's tokens, or what is wrong with it; None for an empty document, which is left out."""


def encoder_of(source: DataSource, tokenizer: TextTokenizer, template: ChatTemplate | None) -> DocumentEncoder:
    """The encoder for a source; InputError where a conversation has no template to be rendered by."""
    if source.messages_field is not None:
        if template is None:
            raise InputError(
                f"data path {source.path}: messages_field needs a chat template, and none is beside the tokenizer; set"
                " data.chat_template to a Jinja file"
            )
        return _Chats(source, tokenizer, template)
    if source.prompt_field is not None:
        return _Prompts(source, tokenizer)
    return _Texts(source, tokenizer)


class _Texts:
    """A text between the tokenizer's prefix and end."""

    def __init__(self, source: DataSource, tokenizer: TextTokenizer) -> None:
        self._field = source.text_field
        self._tokenizer = tokenizer
        self._prefix, self._suffix = _frame(tokenizer)
        self.facts = ["text", tokenizer.digest, self._field]

    def encode(self, records: Sequence[Record]) -> list[Encoded | BadRecordError | None]:
        """See DocumentEncoder."""
        texts = [_attempt(self._text, record.value) for record in records]
        ids = iter(self._tokenizer.encode_batch([text for text in texts if isinstance(text, str)]))
        return [
            text if isinstance(text, BadRecordError) else self._framed(record, text, next(ids))
            for record, text in zip(records, texts, strict=True)
        ]

    def _text(self, value: Any) -> str:
        return value if isinstance(value, str) else _string(value, self._field, "text_field")

    def _framed(self, record: Record, text: str, ids: TokenIds) -> Encoded | None:
        if not text:
            return None
        parts = [*([self._prefix] if record.begins else []), ids, *([self._suffix] if record.ends else [])]
        return Encoded(np.concatenate(parts), ends=record.ends)


class _Prompts:
    """A prompt and its answer, tokenized one by one: when the model is used, it is given the prompt's own tokens."""

    def __init__(self, source: DataSource, tokenizer: TextTokenizer) -> None:
        assert source.prompt_field is not None
        self._prompt_field, self._answer_field = source.prompt_field, source.text_field
        self._learns_all = source.learn == "all"
        self._tokenizer = tokenizer
        self._prefix, self._suffix = _frame(tokenizer)
        self.facts = ["prompt", tokenizer.digest, self._prompt_field, self._answer_field, source.learn]

    def encode(self, records: Sequence[Record]) -> list[Encoded | BadRecordError | None]:
        """See DocumentEncoder."""
        pairs = [_attempt(self._pair, record.value) for record in records]
        texts = [text for pair in pairs if not isinstance(pair, BadRecordError) for text in pair]
        ids = iter(self._tokenizer.encode_batch(texts))
        return [pair if isinstance(pair, BadRecordError) else self._document(next(ids), next(ids)) for pair in pairs]

    def _pair(self, value: Any) -> tuple[str, str]:
        prompt = _string(value, self._prompt_field, "prompt_field")
        answer = _string(value, self._answer_field, "text_field")
        if not answer:
            raise BadRecordError(f"field {self._answer_field!r}, the answer, is empty: there is nothing to learn")
        return prompt, answer

    def _document(self, prompt: TokenIds, answer: TokenIds) -> Encoded:
        ids = np.concatenate([self._prefix, prompt, answer, self._suffix])
        if self._learns_all:
            return Encoded(ids)
        return Encoded(ids, np.arange(len(ids)) >= len(self._prefix) + len(prompt))


class _Chats:
    """A conversation as the chat template renders it: special tokens are the template's business, none are added."""

    def __init__(self, source: DataSource, tokenizer: TextTokenizer, template: ChatTemplate) -> None:
        assert source.messages_field is not None
        self._field = source.messages_field
        self._learns_all = source.learn == "all"
        self._tokenizer = tokenizer
        self._template = template
        self.facts = ["chat", tokenizer.digest, template.digest, self._field, source.learn]

    def encode(self, records: Sequence[Record]) -> list[Encoded | BadRecordError | None]:
        """See DocumentEncoder."""
        rendered = [_attempt(self._rendered, record.value) for record in records]
        chats = [one for one in rendered if not isinstance(one, BadRecordError)]
        encoded = iter(self._whole(chats) if self._learns_all else self._masked(chats))
        return [one if isinstance(one, BadRecordError) else next(encoded) for one in rendered]

    def _whole(self, chats: Sequence["_Chat"]) -> list[Encoded]:
        return [Encoded(ids) for ids in self._tokenizer.encode_batch([chat.text for chat in chats])]

    def _masked(self, chats: Sequence["_Chat"]) -> Iterator[Encoded | BadRecordError]:
        """A mask is exact where the text up to each border is tokenized, alone, to what the whole begins with."""
        wholes = self._tokenizer.encode_anchored([chat.text for chat in chats])
        sizes = self._sizes(head for chat, whole in zip(chats, wholes, strict=True) for head in chat.heads(*whole))
        for chat, (ids, _) in zip(chats, wholes, strict=True):
            yield chat.encoded(ids, [next(sizes) for _ in chat.borders])

    def _sizes(self, heads: Iterable["_Head"]) -> Iterator[int | None]:
        """Tokens up to each border; None where it is inside of one. Without anchors, heads are all that lies before a
        border: they are tokenized a few at a time, since a long conversation's take many times its own memory."""
        for group in by_characters(heads, lambda head: len(head.text), _GROUP_CHARACTERS):
            for head, ids in zip(group, self._tokenizer.encode_batch([head.text for head in group]), strict=True):
                size = head.token + len(ids)
                yield size if np.array_equal(head.whole[head.token : size], ids) else None

    def _rendered(self, value: Any) -> "_Chat":
        messages = _messages(value, self._field)
        if self._learns_all:
            check_all_count(messages)
            text = self._template.text(messages, value.get("tools"))
            if not text:
                raise BadRecordError("the chat template renders it to nothing")
            return _Chat(self._encodable(text), [])
        rendered = self._template.render(messages, value.get("tools"))
        if not rendered.learnt:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise BadRecordError(
                f"field {self._field!r} has no turn of the assistant to be learnt (its roles: {roles[:80]}; the one"
                " that counts is assistant); leave it out, or set learn: all"
            )
        borders = [border for span in rendered.learnt for border in span]
        # What lies before the end is the whole: no need to tokenize it again.
        return _Chat(self._encodable(rendered.text), borders[:-1] if borders[-1] == len(rendered.text) else borders)

    def _encodable(self, text: str) -> str:
        if not is_unicode(text):
            raise BadRecordError(f"field {self._field!r} is no valid Unicode: it has half of a surrogate pair")
        return text


@dataclass(frozen=True)
class _Chat:
    """A conversation on its way to tokens."""

    text: str
    borders: list[int]
    """Characters at which learnt stretches begin and end, in turn; none where all is learnt."""

    def heads(self, ids: TokenIds, anchors: Anchors) -> Iterator["_Head"]:
        """What is to be tokenized to see whether each border lies between tokens."""
        for border in self.borders:
            character, token = anchors.before(border)
            yield _Head(self.text[character:border], token, ids)

    def encoded(self, ids: TokenIds, sizes: Sequence[int | None]) -> Encoded | BadRecordError:
        """The document, of its tokens and how many of them lie before each border."""
        learnt = np.zeros(len(ids), dtype=bool)
        for border, size in zip(self.borders, sizes, strict=True):
            if size is None:
                around = f"{self.text[max(0, border - 12) : border]!r} | {self.text[border : border + 12]!r}"
                return BadRecordError(
                    f"the tokenizer joins what lies on both sides of a border of the assistant's turn ({around}), so no"
                    " mask of whole tokens is exact; trim the content, or set learn: all"
                )
            learnt[size:] ^= True
        return Encoded(ids, learnt)


@dataclass(frozen=True, slots=True)
class _Head:
    """A stretch that ends at a border."""

    text: str
    token: int
    """Where its tokens begin in those of the whole."""
    whole: TokenIds


def by_characters(items: Iterable[Item], num_characters: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Groups of items, in order, each ended by the one that brings it to `most` characters, or by the last."""
    group: list[Item] = []
    characters = 0
    for item in items:
        group.append(item)
        characters += num_characters(item)
        if characters >= most:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _attempt(read: Any, value: Any) -> Any:
    """`read(value)`, or the BadRecordError that it raises or that the value already is."""
    if isinstance(value, BadRecordError):
        return value
    try:
        return read(value)
    except BadRecordError as error:
        return error


def _string(row: dict[str, Any], field: str, setting: str) -> str:
    if field not in row:
        present = ", ".join(sorted(map(str, row))[:8])
        raise BadRecordError(f"has no field {field!r} (it has: {present}); set {setting} to the one that is meant")
    text = row[field]
    if not isinstance(text, str):
        raise BadRecordError(f"field {field!r} must be a string, is {type(text).__name__}")
    if not is_unicode(text):
        raise BadRecordError(f"field {field!r} is no valid Unicode: it has half of a surrogate pair")
    return text


def is_unicode(text: str) -> bool:
    """Whether it can be encoded: JSON's \\ud83d alone can't, and tokenizers end in a traceback over it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _messages(row: Any, field: str) -> list[dict[str, Any]]:
    if field not in row:
        present = ", ".join(sorted(map(str, row))[:8])
        raise BadRecordError(f"has no field {field!r} (it has: {present}); set messages_field to the one that is meant")
    messages = row[field]
    if not isinstance(messages, list) or not messages:
        raise BadRecordError(f"field {field!r} must be a list of messages with at least one, is {_shape(messages)}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRecordError(f"field {field!r}: message {number} must be an object with role and content")
        calls = message.get("tool_calls")
        if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            raise BadRecordError(
                f"field {field!r}: message {number} ({message['role']}): tool_calls must be a list of objects; give no"
                " JSON in a string"
            )
        if message.get("content") is None and not message.get("tool_calls"):
            raise BadRecordError(f"field {field!r}: message {number} ({message['role']}) has no content")
    return messages


def _shape(value: Any) -> str:
    return "empty" if isinstance(value, list) else type(value).__name__


def _frame(tokenizer: TextTokenizer) -> tuple[TokenIds, TokenIds]:
    suffix = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return np.asarray(tokenizer.prefix_ids, dtype=np.uint32), np.asarray(suffix, dtype=np.uint32)
