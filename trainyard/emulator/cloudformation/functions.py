"""AWS Lambda: functions, which run (`trainyard.emulator.functions`), and who may call them."""

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

from trainyard.emulator.cloudformation.model import (
    Created,
    Properties,
    ResourceType,
    Site,
    UnsupportedPropertyError,
    changed_tags,
    fit_name,
    found,
    ignore_missing,
    tags_of,
    to_api,
)

_MAX_NAME = 64
_NOT_PLAYED = ("VpcConfig", "Layers", "FileSystemConfigs", "DeadLetterConfig", "ImageConfig", "SnapStart")
_CONFIGURATION = ("Description", "Environment", "Handler", "LoggingConfig", "MemorySize", "Role", "Runtime", "Timeout")
_PYTHON = "python3."


def _code(properties: Properties) -> dict[str, Any]:
    """The package: of an asset its place in S3; text in the template becomes index.py, as CloudFormation makes it."""
    code = properties["Code"]
    if "ZipFile" not in code:
        return {"S3Bucket": code["S3Bucket"], "S3Key": code["S3Key"]}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as package:
        package.writestr("index.py", code["ZipFile"])
    return {"ZipFile": packed.getvalue()}


def _require_played(properties: Properties) -> None:
    odd = [name for name in _NOT_PLAYED if properties.get(name)]
    if odd:
        raise UnsupportedPropertyError(f"property {odd[0]} of a function is not known to the emulator")
    if not str(properties.get("Runtime", "")).startswith(_PYTHON):
        raise UnsupportedPropertyError(f"runtime {properties.get('Runtime')}: the emulator runs Python functions only")


def _attributes(site: Site, name: str) -> dict[str, str]:
    return {"Arn": f"arn:aws:lambda:{site.region}:{site.account}:function:{name}"}


def _create(site: Site, properties: Properties, generated: str) -> Created:
    _require_played(properties)
    name = str(properties.get("FunctionName") or fit_name(generated, _MAX_NAME))
    parameters = to_api("lambda", "CreateFunction", properties, without=("FunctionName", "Code", "Tags"))
    tags = {tag["Key"]: tag["Value"] for tag in tags_of(properties)}
    site.client("lambda").create_function(
        FunctionName=name, Code=_code(properties), **parameters, **({"Tags": tags} if tags else {})
    )
    return Created(name, _attributes(site, name))


def _update(site: Site, name: str, old: Properties, new: Properties) -> Mapping[str, Any]:
    _require_played(new)
    client = site.client("lambda")
    changed = {"Environment": {"Variables": {}}, **{key: new[key] for key in _CONFIGURATION if key in new}}
    client.update_function_configuration(FunctionName=name, **to_api("lambda", "UpdateFunctionConfiguration", changed))
    if old["Code"] != new["Code"]:
        client.update_function_code(FunctionName=name, **_code(new))
    gone, kept = changed_tags(old, new)
    if gone:
        client.untag_resource(Resource=_attributes(site, name)["Arn"], TagKeys=gone)
    if kept:
        tags = {tag["Key"]: tag["Value"] for tag in kept}
        client.tag_resource(Resource=_attributes(site, name)["Arn"], Tags=tags)
    return _attributes(site, name)


def _exists(site: Site, name: str) -> bool:
    return found(lambda: site.client("lambda").get_function(FunctionName=name)["Configuration"])


def _delete(site: Site, name: str, properties: Properties) -> None:
    ignore_missing(lambda: site.client("lambda").delete_function(FunctionName=name))


# A permission is a statement in its function's policy: known by both names, of which Ref gives neither.
def _permit(site: Site, properties: Properties, generated: str) -> Created:
    name = str(properties["FunctionName"]).rpartition(":function:")[2]
    statement = fit_name(generated, 100)
    parameters = to_api("lambda", "AddPermission", properties, without=("FunctionName",))
    site.client("lambda").add_permission(FunctionName=name, StatementId=statement, **parameters)
    return Created(f"{name}|{statement}", {"Id": statement})


def _is_permitted(site: Site, physical_id: str) -> bool:
    name, _, statement = physical_id.partition("|")

    def look() -> bool:
        policy = json.loads(site.client("lambda").get_policy(FunctionName=name)["Policy"])
        return any(item["Sid"] == statement for item in policy["Statement"])

    return found(look)


def _forbid(site: Site, physical_id: str, properties: Properties) -> None:
    name, _, statement = physical_id.partition("|")
    ignore_missing(lambda: site.client("lambda").remove_permission(FunctionName=name, StatementId=statement))


TYPES = (
    ResourceType(
        "AWS::Lambda::Function",
        _create,
        _exists,
        _delete,
        _update,
        ("DurableConfig", "FunctionName", "PackageType", "TenancyConfig"),
        "FunctionName",
    ),
    ResourceType("AWS::Lambda::Permission", _permit, _is_permitted, _forbid),
)
