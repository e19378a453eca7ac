"""What a resource type is, and how CloudFormation's properties become an API's parameters."""

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import botocore.session
from botocore.exceptions import ClientError
from botocore.model import Shape

from trainyard.emulator import shapes

Properties = Mapping[str, Any]
Clients = Callable[[str], Any]
"""Service name to boto3 client: inside the daemon as root, in `verify_deployment` over loopback."""


@dataclass(frozen=True)
class Site:
    """Where a resource lives."""

    account: str
    region: str
    client: Clients


@dataclass(frozen=True)
class Created:
    """A resource as its API made it: the physical id (what Ref gives) and the attributes (what GetAtt gives)."""

    physical_id: str
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ResourceType:
    """One CloudFormation type. A change without `update` replaces the resource."""

    name: str
    create: Callable[[Site, Properties, str], Created]
    """(site, properties, generated name) -> what was made."""
    exists: Callable[[Site, str], bool]
    """(site, physical id): asked of the real API, so that it sees what was removed behind CloudFormation's back."""
    delete: Callable[[Site, str, Properties], None]
    update: Callable[[Site, str, Properties, Properties], "Mapping[str, Any] | Created | None"] | None = None
    """(site, physical id, old properties, new properties) -> attributes that changed, if any; `Created` where the
    physical id changes too."""
    replaced_by: tuple[str, ...] = ()
    """Properties whose change replaces the resource although there is an `update`: the createOnlyProperties of the
    CloudFormation registry's schema (a test compares). A dot leads into a property's own."""
    name_property: str = ""
    recorded: bool = False
    """No API stands behind it: CloudFormation's own record is all there is."""


class UnsupportedPropertyError(ValueError):
    """A property that the API call would drop: the deploy must fail rather than forget it."""


@functools.cache
def _session() -> botocore.session.Session:
    return botocore.session.get_session()


@functools.cache
def _input_shape(service: str, operation: str) -> Shape:
    shape = _session().get_service_model(service).operation_model(operation).input_shape
    assert shape is not None
    return shape


def to_api(service: str, operation: str, properties: Properties, *, without: Iterable[str] = ()) -> dict[str, Any]:
    """`properties` as the parameters of `operation`, matched by the botocore model without regard to case, and within
    its limits.

    `without` names top-level properties that the caller handles itself. Any other property that the operation
    doesn't have raises UnsupportedPropertyError.
    """
    left_out = set(without)
    passed = {name: value for name, value in properties.items() if name not in left_out and value is not None}
    converted = _convert(_input_shape(service, operation), passed, "")
    assert isinstance(converted, dict)
    broken = shapes.oversized(service, operation, converted)
    if broken:
        raise ValueError(shapes.detected(broken))
    return converted


def _convert(shape: Any, value: Any, path: str) -> Any:
    kind = shape.type_name
    if kind == "structure":
        members = {member.lower(): member for member in shape.members}
        result = {}
        for name, item in value.items():
            member = members.get(name.lower())
            if member is None:
                raise UnsupportedPropertyError(f"property {path}{name} is not known to the emulator")
            if item is not None:
                result[member] = _convert(shape.members[member], item, f"{path}{name}.")
        return result
    if kind == "list":
        return [_convert(shape.member, item, path) for item in (value if isinstance(value, list) else [value])]
    if kind == "map":
        pairs = value if isinstance(value, dict) else {item["Key"]: item["Value"] for item in value}
        return {name: _convert(shape.value, item, path) for name, item in pairs.items()}
    return _convert_scalar(kind, value)


def _convert_scalar(kind: str, value: Any) -> Any:
    if kind in ("integer", "long"):
        return int(value)
    if kind in ("double", "float"):
        return float(value)
    if kind == "boolean":
        return as_bool(value)
    if kind == "string":
        return json.dumps(value) if isinstance(value, dict | list) else as_text(value)
    return value


def as_bool(value: Any) -> bool:
    """A CloudFormation boolean: true, "true" or "True"."""
    return value if isinstance(value, bool) else str(value).lower() == "true"


def as_text(value: Any) -> str:
    """A scalar as CloudFormation writes it into a string: true, not True."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_list(value: Any) -> list[Any]:
    """`value` as a list: itself, alone, or nothing."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def fit_name(generated: str, limit: int) -> str:
    """A generated name within `limit` characters: the front is cut, as CloudFormation does; the random end stays."""
    if len(generated) <= limit:
        return generated
    front, _, end = generated.rpartition("-")
    return f"{front[: limit - len(end) - 1].rstrip('-')}-{end}"


def tags_of(properties: Properties) -> list[dict[str, str]]:
    """The Tags property as a list of Key and Value, whichever of its two forms it has."""
    tags = properties.get("Tags") or []
    pairs = tags.items() if isinstance(tags, Mapping) else ((tag["Key"], tag["Value"]) for tag in tags)
    return [{"Key": str(key), "Value": as_text(value)} for key, value in pairs]


def changed_tags(old: Properties, new: Properties) -> tuple[list[str], list[dict[str, str]]]:
    """Keys of tags to take away, and tags to set."""
    before, after = tags_of(old), tags_of(new)
    kept = {tag["Key"] for tag in after}
    return sorted({tag["Key"] for tag in before} - kept), [tag for tag in after if tag not in before]


def found(call: Callable[[], Any]) -> bool:
    """Whether `call` finds what it asks for: a client error of any "not found" kind, or an empty answer, is no."""
    try:
        return bool(call())
    except ClientError as error:
        if is_missing(error):
            return False
        raise


_MISSING = ("NotFound", "NoSuch", "DoesNotExist", "ResourceNotFound", "NonExistent", "ParameterNotFound", "404")


def is_missing(error: ClientError) -> bool:
    """Whether a client error says that the thing asked for doesn't exist."""
    code = str(error.response["Error"].get("Code", ""))
    message = str(error.response["Error"].get("Message", ""))
    return any(mark in code for mark in _MISSING) or "does not exist" in message


def ignore_missing(call: Callable[[], Any]) -> None:
    """Run a delete; what is gone already is fine, as CloudFormation finds."""
    try:
        call()
    except ClientError as error:
        if not is_missing(error):
            raise


def put_type(
    name: str,
    service: str,
    operation: str,
    *,
    name_property: str,
    attributes: Callable[[Site, str, Any], Mapping[str, Any]] | None = None,
    exists: Callable[[Site, str], bool],
    delete: Callable[[Site, str], Any],
    without: tuple[str, ...] = (),
) -> ResourceType:
    """A type whose API has one idempotent Put operation for create and update, keyed by a name."""
    method = python_name(operation)

    def put(site: Site, properties: Properties, physical_id: str) -> Mapping[str, Any]:
        parameters = to_api(service, operation, {**properties, name_property: physical_id}, without=without)
        answer = getattr(site.client(service), method)(**parameters)
        return attributes(site, physical_id, answer) if attributes else {}

    def create(site: Site, properties: Properties, generated: str) -> Created:
        physical_id = str(properties.get(name_property) or generated)
        return Created(physical_id, put(site, properties, physical_id))

    return ResourceType(
        name=name,
        create=create,
        update=lambda site, physical_id, old, new: put(site, new, physical_id),
        exists=exists,
        delete=lambda site, physical_id, properties: ignore_missing(lambda: delete(site, physical_id)),
        name_property=name_property,
        replaced_by=(name_property,),
    )


def python_name(operation: str) -> str:
    """The boto3 method of an operation: PutMetricAlarm -> put_metric_alarm."""
    from botocore import xform_name

    return str(xform_name(operation))
