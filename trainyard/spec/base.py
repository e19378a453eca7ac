"""The base of every model here, YAML loading, and validation messages that a person can act on."""

import contextlib
import datetime
import difflib
import json
import math
import re
import shlex
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from trainyard.errors import InputError


class SpecModel(BaseModel):
    """Frozen, and an unknown key is an error: a misspelt setting must never be ignored."""

    # Not `use_attribute_docstrings`: it parses each class's source anew, a seventh of the time of `trainyard plan`.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _numbers_where_they_belong(cls, content: Any) -> Any:
        """YAML reads yes, on and true as a truth value, which pydantic takes for 1: `steps: yes` would be one step. And
        it reads 1e-5 as text, which a model's configuration, or a whole number, would have as it is."""
        if not isinstance(content, dict):
            return content
        places = _places(cls)
        return {key: _as_meant(value, places.get(key), (key,)) for key, value in content.items()}


@dataclass(frozen=True)
class _Place:
    """What may stand in a field, or in the lists, tuples and mappings that it takes."""

    is_number: bool
    """A number and no truth value."""
    is_text: bool
    is_anything: bool
    """Somebody else's settings, such as a model's configuration, and what stands in them."""
    inside: "_Place | None"


class Exponent(str):
    """A number as JSON may write it, 1e-5 or 1E9, which stood in YAML without quotes: where text is expected it is text
    (a job may be called 1e9), and a number elsewhere."""

    __slots__ = ()


def _as_meant(value: Any, place: _Place | None, names: tuple[Any, ...]) -> Any:
    """`value`, with truth values as text wherever a number is expected (pydantic then refuses them), and numbers with
    an exponent as numbers. `names`: where it stands in the model."""
    if place is None:
        return value
    if isinstance(value, bool):
        return str(value).lower() if place.is_number else value
    if isinstance(value, Exponent):
        return _number(value, place, names)
    inside = place if place.is_anything else place.inside
    if isinstance(value, dict):
        return {key: _as_meant(item, inside, (*names, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_meant(item, inside, (*names, number)) for number, item in enumerate(value)]
    return value


def _number(value: Exponent, place: _Place, names: tuple[Any, ...]) -> float | str:
    is_meant = place.is_anything or (place.is_number and not place.is_text)
    if is_meant and math.isfinite(float(value)):
        return float(value)
    if place.is_anything:  # where nobody else would refuse the text
        words = f"number is too large: at most 1.79e308; write it in quotes if it is a text (given: {value})"
        raise PydanticCustomError("too_large", words, {"inside": names})
    return str(value)


@cache
def _places(model: type[BaseModel]) -> dict[str, _Place]:
    """By field, those that have a number somewhere, or anything."""
    found = {name: _place((field.annotation,)) for name, field in model.model_fields.items()}
    return {name: place for name, place in found.items() if place is not None}


def _place(annotations: Iterable[Any]) -> _Place | None:
    kinds = {kind for annotation in annotations for kind in _branches(annotation)}
    inside = _place(argument for kind in kinds for argument in _contents(kind)) if kinds else None
    is_number, is_anything = bool(kinds & {int, float}) and bool not in kinds, Any in kinds
    if not (is_number or is_anything or inside is not None):
        return None
    return _Place(is_number=is_number, is_text=str in kinds, is_anything=is_anything, inside=inside)


def _contents(kind: Any) -> Sequence[Any]:
    """What a list, tuple, set or mapping holds; of a mapping its values."""
    origin = get_origin(kind)
    if not (isinstance(origin, type) and issubclass(origin, Collection)):
        return ()
    arguments = get_args(kind)[1:] if issubclass(origin, Mapping) else get_args(kind)
    return [argument for argument in arguments if argument is not Ellipsis]


def _branches(annotation: Any) -> Iterator[Any]:
    """What a field's type allows: the branches of a union, each without what it is annotated with."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _branches(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for branch in get_args(annotation):
            yield from _branches(branch)
    else:
        yield annotation


_IN_WORDS: dict[str, str] = {}


def worded(pattern: str, words: str) -> str:
    """`pattern`, which messages then give in words: few people read a regular expression."""
    _IN_WORDS[pattern] = words
    return pattern


_NAME = worded(
    r"^[a-z][a-z0-9-]{0,18}[a-z0-9]$", "2 to 20 small letters, digits and dashes, a letter first and no dash last"
)
Name = Annotated[str, Field(pattern=_NAME)]
"""Lower-case letters, digits and dashes, 2 to 20: it goes into ARNs, bucket prefixes and tags."""

Spec = TypeVar("Spec", bound=SpecModel)


def on_change(effect: Literal["none", "update", "replace"]) -> dict[str, Any]:
    """What changing a field does to a deployed tenant, kept in the field's JSON schema."""
    return {"on_change": effect}


class _Loader(yaml.SafeLoader):
    """YAML without three traps: the last of two equal keys wins in silence, 1e-5 is a text (of numbers with exponents
    PyYAML knows only 1.0e-5), and 2:30 is 150, in base 60, as which it would be so many hours."""


def _mapping_without_duplicates(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, Hashable):
            raise InputError(f"line {key_node.start_mark.line + 1}: a key is {_kind(key)}; it must be a setting's name")
        if key in seen:
            raise InputError(f"line {key_node.start_mark.line + 1}: the key {key!r} stands twice; keep one")
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)


def _exponent(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Exponent:
    return Exponent(loader.construct_scalar(node))


_Loader.add_implicit_resolver(
    "tag:trainyard,2026:exponent",
    re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+\Z"),
    list("-+.0123456789"),
)
_Loader.add_constructor("tag:trainyard,2026:exponent", _exponent)


def _in_base_ten(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    if ":" in node.value:
        return node.value
    if node.tag.endswith(":int"):
        return loader.construct_yaml_int(node)
    value = loader.construct_yaml_float(node)
    # 2.0e+400 is no .inf, which is a number that some models' configurations have.
    is_too_large = math.isinf(value) and any(map(str.isdecimal, node.value))
    return Exponent(node.value.replace("_", "")) if is_too_large else value


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _Loader.add_constructor(_tag, _in_base_ten)


_YAML_KINDS: dict[type, str] = {
    **{list: "a list", str: "a text", int: "a number", float: "a number", dict: "a mapping"},
    **{bool: "a truth value", datetime.date: "a date", datetime.datetime: "a date"},
}


def _kind(value: object) -> str:
    return _YAML_KINDS.get(type(value), type(value).__name__)


def _parsed(text: str) -> Any:
    """What the YAML says; yaml.YAMLError where it isn't any, also where PyYAML lets an error of Python's through."""
    try:
        return yaml.load(text, Loader=_Loader)
    except InputError:
        raise
    except RecursionError:
        raise yaml.YAMLError("lists or mappings stand too deep in each other") from None
    except ValueError as error:  # 2026-13-45, which looks like a date; a number of thousands of digits
        raise yaml.YAMLError(f"holds a date or number that is none: {error}") from None
    except (KeyError, IndexError, AttributeError, TypeError):  # !!bool foo, !!int '', !!timestamp foo
        raise yaml.YAMLError("holds a value that is not of the type (!!bool, !!int, ...) stated before it") from None


def _comment_in(text: str) -> str:
    """What the YAML has behind its value; yaml.YAMLError where it isn't any."""
    ends = [token.end_mark.index for token in yaml.scan(text, Loader=_Loader) if token.start_mark != token.end_mark]
    return text[max(ends, default=0) :].strip()


def as_override_value(text: str) -> str:
    """A text as `--set section.key=` takes it: in quotes where YAML would make something else of it."""
    # Last with escapes: YAML folds some ends of lines, as U+2028, and takes no control characters.
    for written in (text, json.dumps(text, ensure_ascii=False)):
        with contextlib.suppress(InputError, yaml.YAMLError):
            if _parsed(written) == text:
                return written
    return json.dumps(text)


def _problem(error: InputError | yaml.YAMLError) -> str:
    """In one line, without PyYAML's picture of the place."""
    return getattr(error, "problem", None) or " ".join(str(error).split())


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; InputError names the file, and the line where the YAML is broken."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is no text: its byte {error.start + 1} is not UTF-8; save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror}") from None
    try:
        content = _parsed(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise InputError(f"{path}:{where} is not valid YAML: {_problem(error)}") from None
    if not isinstance(content, dict):
        holds = "is empty" if content is None else f"holds {_kind(content)}"
        raise InputError(f"{path}: must hold a mapping of settings (name: value), {holds}")
    return content


def apply_overrides(content: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`content` with each `section.key=value` set; values are read as YAML, so 20 is a number and [a, b] a list. An
    entry of a list is named by its place, `data.train.0.path=text`, as messages name it."""
    changed: dict[str, Any] = _deep_copy(content)
    for override in overrides:
        dotted, separator, value = override.partition("=")
        if not separator or not dotted:
            raise InputError(f"--set {override}: must look like section.key=value, e.g. training.steps=20")
        try:
            read, left_out = _parsed(value), _comment_in(value)
        except (InputError, yaml.YAMLError) as error:
            raise InputError(f"--set {override}: {value!r} is not a valid YAML value: {_problem(error)}") from None
        if left_out and "\n" not in value:  # whoever writes several lines writes YAML
            quoted = shlex.quote(f"{dotted}={json.dumps(value, ensure_ascii=False)}")
            raise InputError(
                f"--set {override}: YAML takes {left_out!r} for a comment, and would leave it out; leave it out, or put"
                f" the value in quotes: --set {quoted}"
            )
        *parents, key = dotted.split(".")
        target: Any = changed
        for number, parent in enumerate(parents):
            place = _place_in(target, parent, ".".join(parents[:number]), override)
            child = target[place] if isinstance(target, list) else target.get(place)
            if not isinstance(child, dict | list):
                child = target[place] = {}
            target = child
        target[_place_in(target, key, ".".join(parents), override)] = read
    return changed


def _place_in(target: dict[str, Any] | list[Any], part: str, where: str, override: str) -> Any:
    """`part` of a dotted name as the key, or the index, of what stands there."""
    if isinstance(target, dict):
        return part
    # One name for each: no 00, and no digits of another script.
    if re.fullmatch("0|[1-9][0-9]{0,8}", part) and int(part) < len(target):
        return int(part)
    count = len(target)
    entries = f"entries 0 to {count - 1}" if count > 1 else "one entry, 0" if count else "no entry"
    name = f"name one, {_with_index(target, part, where, override)}, or " if target else ""
    raise InputError(f"--set {override}: {where} is a list and has {entries}; {name}give the whole list, {where}=[...]")


def _with_index(target: list[Any], part: str, where: str, override: str) -> str:
    """The name that `override` sets, with the first entry's index in it."""
    rest = override.partition("=")[0].removeprefix(f"{where}.").split(".")
    if part.lstrip("-").isdecimal():
        rest = rest[1:]
    return ".".join([where, "0", *(rest if isinstance(target[0], dict | list) else [])])


def _deep_copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _deep_copy(item) for key, item in value.items()}
    return [_deep_copy(item) for item in value] if isinstance(value, list) else value


def parse(model: type[Spec], content: Mapping[str, Any], where: str) -> Spec:
    """`content` as `model`; InputError is one line with every problem: file, field, value given, what is allowed."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        told = [problem for problem in error.errors() if not _is_consequence(problem)]
        autos = {_field(problem) for problem in told if problem["loc"][-1:] == _AUTO}
        problems = [_describe(model, problem, autos) for problem in _without_union_noise(told)]
        raise InputError(f"{where}: " + "; ".join(dict.fromkeys(problems))) from None


def unknown_keys(model: type[SpecModel], content: Mapping[str, Any]) -> list[str]:
    """The keys of `content` that `model` doesn't know, by their dotted names: of what programs write, a newer one's."""
    try:
        model.model_validate(content)
    except ValidationError as error:
        return [_field(problem) for problem in error.errors() if problem["type"] == "extra_forbidden"]
    return []


def _is_consequence(problem: Any) -> bool:
    """A list is too short for pydantic once its wrong items are taken out; each of those is told already."""
    given = problem.get("input")
    return problem["type"] == "too_short" and isinstance(given, list) and len(given) >= problem["ctx"]["min_length"]


_AUTO = ("literal['auto']",)
"""Where pydantic says that a value is not that word."""


def _without_union_noise(problems: list[Any]) -> list[Any]:
    """`X | "auto"` fails twice; the branch that the person meant is the one whose problem is worth a line."""
    meant = [problem for problem in problems if problem["loc"][-1:] != _AUTO]
    fields = {_field(problem) for problem in meant}
    return [
        problem
        for problem in problems
        if problem in meant or not any(field.startswith(_field(problem)) for field in fields)
    ]


def _field(problem: Any) -> str:
    return ".".join(str(part) for part in problem["loc"] if not (isinstance(part, str) and _is_union_branch(part)))


def _describe(model: type[BaseModel], problem: Any, autos: Collection[str] = ()) -> str:
    """One problem in a line; `autos`: fields that take the word auto as well."""
    given, raw = problem.get("input"), problem["loc"]
    if raw[-1:] == ("[key]",):  # pydantic's way to say that the name is meant, not what stands under it
        raw = (*raw[:-2], "[key]")
    location = [part for part in raw if not (isinstance(part, str) and _is_union_branch(part))]
    location += problem.get("ctx", {}).get("inside", ())
    field = ".".join(map(str, location)).replace(".[key]", ": the name") or "(whole file)"
    if problem["type"] == "extra_forbidden":
        allowed = _fields_at(model, location[:-1])
        close = difflib.get_close_matches(str(location[-1]), allowed, n=1)
        hint = f"did you mean '{close[0]}'?" if close else "remove it"
        return (
            f"{field}: unknown key, {hint} (allowed: {', '.join(allowed)})"
            if allowed
            else f"{field}: unknown key, {hint}"
        )
    if problem["type"] == "missing":
        return f"{field}: is missing and has no default"
    message = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = message[:1].lower() + message[1:] if message[:1].isupper() and not message[1:2].isupper() else message
    message = _in_words(problem, message)
    if field in autos:
        message = re.sub(r"be (a valid (?:integer|number)|a mapping)", r"be auto or \1", message, count=1)
    if not location:
        return message
    between = " " if location[-1] == "[key]" and message.startswith("must ") else ": "
    return f"{field}{between}{message}" + (
        f" (given: {given!r})" if isinstance(given, str | int | float | bool) else ""
    )


def _in_words(problem: Any, message: str) -> str:
    """pydantic's message in the words of YAML, and what to do where people often write the same wrong thing."""
    given, kind = problem.get("input"), problem["type"]
    pattern = str(problem.get("ctx", {}).get("pattern", ""))
    if kind == "string_pattern_mismatch" and pattern in _IN_WORDS:
        return f"must be {_IN_WORDS[pattern]}"
    message = re.sub(r"a valid dictionary(?: or instance of \w+)?", "a mapping of settings (name: value)", message)
    message = re.sub(r"^dictionary should", "mapping should", message)
    message = re.sub(r"^(?:tuple|frozenset|set) should", "list should", message)
    message = message.replace(" after validation, not 0", ", has none").replace(" after validation", "")
    if kind in {"tuple_type", "list_type"}:
        return "input should be a list" + (f", e.g. [{given}]" if isinstance(given, str) else "")
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if number and (kind == "string_type" or (kind == "literal_error" and f"'{given}'" in message)):
        message += "; write it in quotes"
    if isinstance(given, bool) and kind == "string_type":
        message += "; write it in quotes: YAML takes no, off, yes and on for false and true"
    return message


def _is_union_branch(part: str) -> bool:
    # pydantic puts the branch of a union into the location: a class name, "literal['auto']", "int", ...
    return (
        part.startswith(("literal[", "constrained-", "function-"))
        or part in {"int", "str", "float", "bool"}
        or part[:1].isupper()
    )


def _fields_at(model: type[BaseModel], location: Sequence[Any]) -> list[str]:
    current: Any = model
    for part in location:
        if isinstance(part, int):
            continue
        field = current.model_fields.get(part) if isinstance(current, type) and issubclass(current, BaseModel) else None
        if field is None:
            current = _model_in(current) if current is not None else None
            continue
        current = _model_in(field.annotation)
    return sorted(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_in(argument)
        if found is not None:
            return found
    return None
