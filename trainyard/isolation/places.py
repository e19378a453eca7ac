"""A resource of a template as the proof looks at it, and what it calls a connection that should not be there."""

import binascii
import json
from base64 import b64decode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.errors import JobFailedError

EVERYBODY = "every tenant"
"""Whom a finding hurts where it is not one tenant."""


@dataclass(frozen=True)
class Wire:
    """A connection that leads out of its tenant, or lets somebody in."""

    tenant: str
    resource: str
    """Stack and logical id."""
    where: str
    """The property."""
    reaches: str
    """What it names."""
    target: str
    """Whose that is: a tenant, the platform, or everybody's."""
    why: str

    def __str__(self) -> str:
        return f"{self.tenant}'s {self.resource} {self.where}: {self.reaches} of {self.target}: {self.why}"


@dataclass(frozen=True)
class Place:
    """A resource of a tenant, resolved."""

    tenant: str
    stack: str
    logical_id: str
    kind: str
    properties: Mapping[str, Any]

    def wire(self, where: str, reaches: object, target: str, why: str) -> Wire:
        return Wire(self.tenant, f"{self.stack}/{self.logical_id}", where, str(reaches), target, why)


def strings(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a property, with its place; the texts in a list stand where the list does."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from strings(item, f"{where}.{name}" if where else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from strings(item, where)


def settings_of(text: object) -> Mapping[str, Any]:
    """Settings that are written as JSON; nothing where they aren't."""
    try:
        content = json.loads(str(text))
    except json.JSONDecodeError:
        return {}
    return content if isinstance(content, dict) else {}


def in_clear(value: Any, where: str) -> Any:
    """The same with what machines run as root in plain text, which EC2 takes in base64."""
    if isinstance(value, list):
        return [in_clear(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    clear = {name: in_clear(item, where) for name, item in value.items()}
    if isinstance(clear.get("UserData"), str):
        try:
            clear["UserData"] = b64decode(clear["UserData"], validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise JobFailedError(
                f"{where}: UserData is no text in base64, so that the isolation proof can't read what machines run; "
                "write it with Fn::Base64"
            ) from None
    return clear
