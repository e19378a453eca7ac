"""A resource of a template as the proof looks at it, and what it calls a connection that should not be there."""

import binascii
import json
from base64 import b64decode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.errors import JobFailedError
from trainyard.isolation.account import COST_TAG
from trainyard.spec.platform import EnvironmentSpec

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


@dataclass(frozen=True)
class OwnWords:
    """What people wrote into the environment file as they liked, of one tenant: an address or a cost center may hold
    another thing's id, or look like a name of ours, and connects nothing. Each only where it is put to its use."""

    kind: str
    cost_center: str | None = None
    addresses: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    @classmethod
    def of(cls, environment: EnvironmentSpec, place: Place) -> "OwnWords":
        """The tenant's, at one of its things; none where it is the platform's."""
        spec = environment.tenants.get(place.tenant)
        if spec is None:
            return cls(place.kind)
        egress = spec.network.egress
        return cls(
            place.kind, spec.cost_center, spec.budget.notify, egress.allowed_domains if egress is not None else ()
        )

    def without_cost_center(self, value: Any) -> Any:
        """The same without the tag, in either form, and without what the contract says of it."""
        if isinstance(value, list):
            return [self.without_cost_center(item) for item in value]
        if isinstance(value, dict):
            if value.get("Key") == COST_TAG and value.get("Value") == self.cost_center:
                return {}
            kept = {name: item for name, item in value.items() if (name, item) != (COST_TAG, self.cost_center)}
            return {name: self.without_cost_center(item) for name, item in kept.items()}
        said = settings_of(value) if self.kind == "AWS::SSM::Parameter" else {}
        if "cost_center" in said and said["cost_center"] == self.cost_center:
            return json.dumps({name: item for name, item in said.items() if name != "cost_center"})
        return value

    def rest(self, where: str, text: str) -> str:
        """The text less what is the file's own; empty where it is all of it."""
        if self.kind == "AWS::FSx::DataRepositoryAssociation":
            if where == "FileSystemPath":  # a folder of the file system that FileSystemId names
                return ""
            if where == "DataRepositoryPath":  # whose bucket it is, counts
                return "/".join(text.split("/")[:3]) if text.startswith("s3://") else text
        last = where.rpartition(".")[2].lower()
        is_address = last in {"address", "endpoint", "subscribers"} and text in self.addresses
        is_host = self.kind == "AWS::NetworkFirewall::RuleGroup" and last == "targets" and text in self.hosts
        return "" if is_address or is_host else text


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
