"""Conversations -> text by a tokenizer's own chat template (Jinja), with the stretches that the assistant wrote.

Which characters are the assistant's is said by the template's `{% generation %}` markers where it has them. Where it
has none, it is the difference of two renderings: up to the turn with the generation prompt (what a model is given when
it is asked to answer), and up to and with the turn. Both must be what the whole conversation begins with; a template
that renders a turn otherwise once others follow (many leave out old reasoning) gives no exact mask, so such a record is
refused with that reason.
"""

import datetime
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainer.data.bad_records import BadRecordError
from trainer.data.tokenizer import settings_beside, token_text
from trainyard.errors import InputError

RENDERED_ON = datetime.datetime(2024, 7, 26)
"""The day that `strftime_now` tells. Some templates write today's date into the system turn; training text must not
depend on when it was tokenized. It is what Llama 3.1's template falls back to."""

_FORMAT_VERSION = 5
"""Also of what is refused and learnt: units that were made before content in parts, arguments and tools in strings,
weights of turns, messages that are left out and nulls that are written were looked for are made again."""
_BEGIN, _END = "\x00\x01generation\x02", "\x00\x03generation\x02"
"""Stand in the rendered text where a generation block begins and ends; control characters that no text has."""
_SIGN = "7203185946"
"""Stands at the end of a message of which its template may write nothing: digits, which no filter alters."""
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_EVALUATION_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

Span = tuple[int, int]
"""First character, and the one after the last."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    text: str
    learnt: tuple[Span, ...]
    """The assistant's stretches, in order; of what `render` gives, none is empty."""


class ChatTemplate:
    """A template, compiled once. It runs in Jinja's sandbox: a model's files are somebody else's code."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], where: str) -> None:
        """`special_tokens`: bos_token and such, as the template's variables; `where` names it in messages."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=RENDERED_ON.strftime)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InputError(f"{where}: is not a Jinja template ({_one_line(error)})") from None
        self._special_tokens = dict(special_tokens)
        self._has_markers = _MARKER.search(source) is not None
        self.digest = hashlib.sha256(
            json.dumps([_FORMAT_VERSION, source, sorted(self._special_tokens.items())]).encode()
        ).hexdigest()
        """Changes when a conversation would be rendered otherwise."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> Rendered:
        """The whole conversation; BadRecordError with the reason where the template refuses it or no mask is exact."""
        marked = self._whole(messages, tools)
        counts = _turns_that_count(messages)
        if self._has_markers:
            return _counted(_without_marks(marked), counts)
        spans = []
        for turn, message in enumerate(messages):
            if message.get("role") == "assistant":
                before = self._render(messages[:turn], tools, add_generation_prompt=True)
                after = self._render(messages[: turn + 1], tools)
                if not (after.startswith(before) and marked.startswith(after)):
                    raise BadRecordError(
                        f"the chat template renders turn {turn + 1} differently when it is asked to answer and in the"
                        " whole conversation, so which tokens are the assistant's can't be told; give the template"
                        " {% generation %} markers (data.chat_template), or set learn: all"
                    )
                spans.append((len(before), len(after)))
        return _counted(Rendered(marked, tuple(spans)), counts)

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
        """The whole conversation where no mask is wanted."""
        return self._whole(messages, tools).replace(_BEGIN, "").replace(_END, "")

    def _whole(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
        text = self._render(messages, tools)
        self._check_nulls(messages, tools, text)
        self._check_all_written(messages, tools, text)
        return text

    def _check_nulls(self, messages: Sequence[Mapping[str, Any]], tools: Any, text: str) -> None:
        """BadRecordError for content that is null, as chat services write turns that only call tools, where the
        template writes it out: a model would learn to say None."""
        nulls = [number for number, message in enumerate(messages) if message.get("content", "") is None]
        if not nulls or "None" not in text:
            return
        filled = [{**message, "content": ""} if number in nulls else message for number, message in enumerate(messages)]
        other = self._rendered_if_taken(filled, tools)
        if other is not None and other.count("None") < text.count("None"):
            role = messages[nulls[0]].get("role")
            raise BadRecordError(
                f"message {nulls[0] + 1} ({role}) has null for content, which the chat template writes as None; give an"
                " empty string, or a template that knows such turns (data.chat_template)"
            )

    def _check_all_written(self, messages: Sequence[Mapping[str, Any]], tools: Any, text: str) -> None:
        """BadRecordError for a message that the template passes over, as many do with roles that they don't know: the
        text is the same without it. Looked at where its words are not found as they stand."""
        changed = [
            number
            for number, message in enumerate(messages)
            if isinstance(message.get("content"), str) and message["content"].strip() not in text
        ]
        for number in self._not_signed(changed, messages, tools) if len(changed) > 1 else changed:
            if self._rendered_if_taken([*messages[:number], *messages[number + 1 :]], tools) == text:
                raise BadRecordError(
                    f"the chat template leaves out message {number + 1} ({messages[number].get('role')}): nothing of it"
                    " would be read; give it a role that the template writes, or another template (data.chat_template)"
                )

    def _not_signed(self, numbers: Sequence[int], messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]:
        """Of messages those of which no end can be seen when all are rendered once with a sign at it: a template that
        escapes, or cuts earlier thoughts, changes the words of all, and to leave out each of them takes the square."""
        signs = {number: f"{_SIGN}{number:06d}" for number in numbers}
        signed = [
            {**message, "content": message["content"] + signs[number]} if number in signs else message
            for number, message in enumerate(messages)
        ]
        text = self._rendered_if_taken(signed, tools) or ""
        return [number for number, sign in signs.items() if sign not in text]

    def _rendered_if_taken(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> str | None:
        """None where the template refuses them."""
        try:
            return self._render(messages, tools)
        except BadRecordError:
            return None

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, add_generation_prompt: bool = False) -> str:
        try:
            text = self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except _EVALUATION_ERRORS as error:
            raise BadRecordError(f"the chat template refuses it ({_one_line(error)})") from None
        _check_parts(messages, text)
        _check_arguments(messages, text)
        _check_tools(tools, text)
        return text


def _check_parts(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """BadRecordError for content in parts that a template, made for plain text, wrote out in Python's notation: a model
    would learn `[{'type': 'text', ...`.

    Other lists are data, such as a tool's answer, which may read alike in JSON, as `tojson` writes it. What names its
    type doesn't: JSON has other quotes.
    """
    for number, message in enumerate(messages, start=1):
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        is_in_parts = any(isinstance(part, Mapping) and "type" in part for part in parts)
        if is_in_parts and str(content) in text:
            raise BadRecordError(
                f"message {number} ({message.get('role')}) has its content in parts, and the chat template takes plain"
                f" text: it wrote {str(content)[:40]!r}; give content as a string, or a template that knows parts"
                " (data.chat_template)"
            )


def _check_arguments(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """BadRecordError for a tool call's arguments that are JSON in a string, as chat services export them, where the
    template writes them as JSON once more: a model would learn to call with `"{\\"city\\": ...`.
    """
    for number, message in enumerate(messages, start=1):
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            called = call.get("function", call) if isinstance(call, Mapping) else None
            arguments = called.get("arguments") if isinstance(called, Mapping) else None
            if isinstance(arguments, str) and '"' in arguments and _to_json(arguments) in text:
                raise BadRecordError(
                    f"message {number} ({message.get('role')}) calls a tool with arguments in a string, which the chat"
                    f" template writes as JSON once more: {_to_json(arguments)[:40]}; give the arguments as an object"
                )


def _check_tools(tools: Any, text: str) -> None:
    """BadRecordError for tools that are JSON in a string, as a column of text holds them, all or each: a template would
    write the letters one by one, or each tool quoted once more."""
    if tools and not isinstance(tools, list):
        raise BadRecordError(
            f"field 'tools' must be a list of objects, is {type(tools).__name__}; give no JSON in a string"
        )
    for tool in tools or ():
        if not isinstance(tool, Mapping | str):
            raise BadRecordError(f"field 'tools' must be a list of objects, one is {type(tool).__name__}")
        if isinstance(tool, str) and '"' in tool and _to_json(tool) in text:
            raise BadRecordError(
                "field 'tools' has one in a string, which the chat template writes as JSON once more:"
                f" {_to_json(tool)[:40]}; give it as an object"
            )


def _turns_that_count(messages: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Of the assistant's turns, which are learnt: all but those of `weight` 0 (OpenAI's fine-tuning files)."""
    weights = [message.get("weight") for message in messages if message.get("role") == "assistant"]
    for weight in weights:
        if weight not in (None, 0, 1):
            raise BadRecordError(f"a message's weight must be 0 (not learnt) or 1, is {str(weight)[:40]!r}")
    return [weight != 0 for weight in weights]


def check_all_count(messages: Sequence[Mapping[str, Any]]) -> None:
    """BadRecordError where all of a conversation is to be learnt, and a turn of it says that it is not."""
    if not all(_turns_that_count(messages)):
        raise BadRecordError(
            "a turn of the assistant has weight 0 (not learnt), and learn: all learns it; leave one out"
        )


def _counted(rendered: Rendered, counts: Sequence[bool]) -> Rendered:
    """With the stretches of the turns that count, of stretches that may be empty."""
    spans = rendered.learnt
    if not all(counts):
        if len(spans) != len(counts):
            raise BadRecordError(
                f"the chat template has {len(spans)} generation blocks for {len(counts)} turns of the assistant, so"
                " which of them a weight of 0 means can't be told; leave weight out"
            )
        spans = tuple(span for span, is_learnt in zip(spans, counts, strict=True) if is_learnt)
    return Rendered(rendered.text, tuple(span for span in spans if span[0] < span[1]))


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}`: what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own way)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _without_marks(marked: str) -> Rendered:
    parts, spans, length = [], [], 0
    for number, stretch in enumerate(marked.split(_BEGIN)):
        learnt, end, rest = stretch.partition(_END)
        if bool(end) != bool(number) or _END in rest:
            raise BadRecordError("the chat template's generation blocks lie inside each other")
        if number:
            spans.append((length, length + len(learnt)))
        parts += [learnt, rest]
        length += len(learnt) + len(rest)
    return Rendered("".join(parts), tuple(spans))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def chat_template_of(stated: str | None, tokenizer_file: Path | None) -> ChatTemplate | None:
    """The template that `data.chat_template` names, else the one beside the tokenizer; None where there is none.

    Beside it: `chat_template.jinja`, else the `chat_template` of tokenizer_config.json (its "default" one of several).
    """
    config = {} if tokenizer_file is None else settings_beside(tokenizer_file)
    tokens = {name: token for name in _SPECIAL_TOKENS if (token := token_text(config.get(name))) is not None}
    if stated is not None:
        return ChatTemplate(
            _read_template(Path(stated), "data.chat_template "),
            special_tokens=tokens,
            where=f"data.chat_template {stated}",
        )
    if tokenizer_file is None:
        return None
    beside = tokenizer_file.with_name("chat_template.jinja")
    if beside.is_file():
        return ChatTemplate(_read_template(beside, ""), special_tokens=tokens, where=str(beside))
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    where = f"{tokenizer_file.with_name('tokenizer_config.json')}: chat_template"
    return ChatTemplate(source, special_tokens=tokens, where=where)


def _read_template(path: Path, field: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InputError(f"{field}{path}: can't be read: {reason}; give a local Jinja file") from None
