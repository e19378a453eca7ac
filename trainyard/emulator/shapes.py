"""What a service refuses of a request by its shape alone.

botocore knows the limits and leaves maxima, patterns and enumerations to the service, so that a request that AWS would
refuse gets past it. Its shapes say less than the service where they have no limit at all; those checks stand beside.
"""

import functools
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

import botocore.session

_CLASSES = {r"\p{L}": "a-zA-Z", r"\p{Z}": " ", r"\p{N}": "0-9", r"\p{Alnum}": "a-zA-Z0-9"}
"""Of Java's patterns, which `re` lacks; `_plain` brings a text to these characters."""
_SHOWN_CHARACTERS = 200


class WrongTypeError(Exception):
    """The request is of another form than the operation's: nothing in it can be judged."""


def violations(service: str, operation: str, request: Any) -> list[str]:
    """Everything that breaks a limit of the operation's, worded as AWS words it; WrongTypeError names its place."""
    return list(_walk(_shape(service, operation), request, ""))


def oversized(service: str, operation: str, part: Any) -> list[str]:
    """Sizes and choices in a part of a request that break a limit: not what it lacks, which others add, nor patterns,
    some of which CloudFormation's own properties don't keep to."""
    return list(_walk(_shape(service, operation), part, "", is_part=True))


def detected(found: list[str]) -> str:
    """The message of AWS's ValidationException."""
    return f"{len(found)} validation error{'s' * (len(found) > 1)} detected: {'; '.join(found)}"


@functools.cache
def _shape(service: str, operation: str) -> Any:
    model = botocore.session.get_session().get_service_model(service)
    return model.operation_model(operation).input_shape


_TYPES: dict[str, tuple[type, ...]] = {
    "structure": (Mapping,),
    "map": (Mapping,),
    "list": (list,),
    "string": (str,),
    "integer": (int,),
    "long": (int,),
    "boolean": (bool,),
    "float": (int, float),
    "double": (int, float),
}


def _walk(shape: Any, value: Any, path: str, *, is_part: bool = False) -> Iterator[str]:
    wanted = _TYPES.get(shape.type_name)
    if wanted is not None and (not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted)):
        raise WrongTypeError(f"{path or 'the request'} must be of type {shape.type_name}")
    yield from _own(shape, value, path, has_pattern=not is_part)
    if shape.type_name == "structure":
        for name in () if is_part else shape.required_members:
            if value.get(name) is None:
                yield f"Value at '{_join(path, name)}' failed to satisfy constraint: Member must not be null"
        for name, member in shape.members.items():
            if value.get(name) is not None:
                yield from _walk(member, value[name], _join(path, name), is_part=is_part)
    elif shape.type_name == "map":
        for key, item in value.items():
            yield from _walk(shape.key, key, f"{path}.key", is_part=is_part)
            yield from _walk(shape.value, item, f"{path}.{key}", is_part=is_part)
    elif shape.type_name == "list":
        for number, item in enumerate(value, 1):
            yield from _walk(shape.member, item, f"{path}.{number}.member", is_part=is_part)


def _join(path: str, name: str) -> str:
    name = name[0].lower() + name[1:]
    return f"{path}.{name}" if path else name


def _own(shape: Any, value: Any, path: str, *, has_pattern: bool) -> Iterator[str]:
    """What is wrong with this value, and not with what it holds."""
    limits = shape.metadata
    is_number = shape.type_name in ("integer", "long", "float", "double")
    if shape.type_name == "structure" or (not is_number and not hasattr(value, "__len__")):
        return
    size, what = (value, "value") if is_number else (len(value), "length")
    wrong = []
    if "max" in limits and size > limits["max"]:
        wrong.append(f"Member must have {what} less than or equal to {limits['max']}")
    if "min" in limits and size < limits["min"]:
        wrong.append(f"Member must have {what} greater than or equal to {limits['min']}")
    if has_pattern and "pattern" in limits and not _fits(limits["pattern"], value):
        wrong.append(f"Member must satisfy regular expression pattern: {limits['pattern']}")
    if getattr(shape, "enum", None) and value not in shape.enum:
        wrong.append(f"Member must satisfy enum value set: [{', '.join(shape.enum)}]")
    for reason in wrong:
        yield f"Value '{str(value)[:_SHOWN_CHARACTERS]}' at '{path}' failed to satisfy constraint: {reason}"


def _fits(pattern: str, value: str) -> bool:
    if r"\p{" in pattern:
        value = "".join(map(_plain, value))
    return _compiled(pattern).fullmatch(value) is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    for java, python in _CLASSES.items():
        pattern = pattern.replace(java, python)
    return re.compile(pattern, re.ASCII)


def _plain(character: str) -> str:
    """An ASCII letter, digit or space for any of Unicode's."""
    kind = unicodedata.category(character)[0] if not character.isascii() else ""
    return {"L": "a", "N": "0", "Z": " "}.get(kind, character)
