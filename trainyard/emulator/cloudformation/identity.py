"""IAM and KMS: what the authorizer judges by, so every property must really arrive."""

import json
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from trainyard.emulator.cloudformation.model import (
    Created,
    Properties,
    ResourceType,
    Site,
    as_bool,
    as_list,
    changed_tags,
    fit_name,
    found,
    ignore_missing,
    tags_of,
    to_api,
)


def _document(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _create_role(site: Site, properties: Properties, generated: str) -> Created:
    iam = site.client("iam")
    name = properties.get("RoleName") or fit_name(generated, 64)
    handled = ("Policies", "ManagedPolicyArns", "Tags", "RoleName")
    parameters = to_api("iam", "CreateRole", properties, without=handled)
    tags = {"Tags": tags_of(properties)} if tags_of(properties) else {}
    role = iam.create_role(RoleName=name, **parameters, **tags)["Role"]
    _set_role_policies(site, name, {}, properties)
    return Created(name, {"Arn": role["Arn"], "RoleId": role["RoleId"]})


def _set_role_policies(site: Site, name: str, old: Properties, new: Properties) -> None:
    iam = site.client("iam")
    inline = {policy["PolicyName"]: policy["PolicyDocument"] for policy in new.get("Policies") or []}
    for policy in old.get("Policies") or []:
        if policy["PolicyName"] not in inline:
            iam.delete_role_policy(RoleName=name, PolicyName=policy["PolicyName"])
    for policy_name, document in inline.items():
        iam.put_role_policy(RoleName=name, PolicyName=policy_name, PolicyDocument=_document(document))
    before, after = set(old.get("ManagedPolicyArns") or []), set(new.get("ManagedPolicyArns") or [])
    for arn in sorted(before - after):
        iam.detach_role_policy(RoleName=name, PolicyArn=arn)
    for arn in sorted(after - before):
        iam.attach_role_policy(RoleName=name, PolicyArn=arn)


def _update_role(site: Site, name: str, old: Properties, new: Properties) -> None:
    iam = site.client("iam")
    iam.update_assume_role_policy(RoleName=name, PolicyDocument=_document(new["AssumeRolePolicyDocument"]))
    _set_role_policies(site, name, old, new)
    if new.get("PermissionsBoundary"):
        iam.put_role_permissions_boundary(RoleName=name, PermissionsBoundary=new["PermissionsBoundary"])
    elif old.get("PermissionsBoundary"):
        iam.delete_role_permissions_boundary(RoleName=name)
    iam.update_role(
        RoleName=name,
        Description=new.get("Description", ""),
        MaxSessionDuration=int(new.get("MaxSessionDuration", 3600)),
    )
    gone = {tag["Key"] for tag in tags_of(old)} - {tag["Key"] for tag in tags_of(new)}
    if gone:
        iam.untag_role(RoleName=name, TagKeys=sorted(gone))
    if tags_of(new):
        iam.tag_role(RoleName=name, Tags=tags_of(new))


def _delete_role(site: Site, name: str, properties: Properties) -> None:
    iam = site.client("iam")
    if not _role_exists(site, name):
        return
    # As CloudFormation: what somebody else put on the role is left there, and IAM deletes no role that holds a policy.
    for policy in properties.get("Policies") or []:
        ignore_missing(partial(iam.delete_role_policy, RoleName=name, PolicyName=policy["PolicyName"]))
    for arn in properties.get("ManagedPolicyArns") or []:
        ignore_missing(partial(iam.detach_role_policy, RoleName=name, PolicyArn=arn))
    iam.delete_role(RoleName=name)


def _role_exists(site: Site, name: str) -> bool:
    return found(lambda: site.client("iam").get_role(RoleName=name))


# Ref of an inline policy is its name; the roles that hold it are needed to find it again.
def _policy_id(properties: Properties) -> str:
    return "|".join([properties["PolicyName"], *sorted(as_list(properties.get("Roles")))])


def _put_inline_policy(site: Site, properties: Properties, generated: str) -> Created:
    if properties.get("Users") or properties.get("Groups"):
        raise ValueError("the emulator attaches inline policies to Roles only, not to Users or Groups")
    for role in as_list(properties.get("Roles")):
        site.client("iam").put_role_policy(
            RoleName=role, PolicyName=properties["PolicyName"], PolicyDocument=_document(properties["PolicyDocument"])
        )
    return Created(_policy_id(properties), {"Id": properties["PolicyName"]})


def _update_inline_policy(site: Site, physical_id: str, old: Properties, new: Properties) -> Created:
    updated = _put_inline_policy(site, new, "")
    for role in sorted(set(as_list(old.get("Roles"))) - set(as_list(new.get("Roles")))):
        ignore_missing(partial(site.client("iam").delete_role_policy, RoleName=role, PolicyName=new["PolicyName"]))
    return updated


def _inline_policy_exists(site: Site, physical_id: str) -> bool:
    name, *roles = physical_id.split("|")
    iam = site.client("iam")
    return all(found(partial(iam.get_role_policy, RoleName=role, PolicyName=name)) for role in roles)


def _delete_inline_policy(site: Site, physical_id: str, properties: Properties) -> None:
    name, *roles = physical_id.split("|")
    for role in roles:
        ignore_missing(partial(site.client("iam").delete_role_policy, RoleName=role, PolicyName=name))


def _create_managed_policy(site: Site, properties: Properties, generated: str) -> Created:
    iam = site.client("iam")
    if properties.get("Users") or properties.get("Groups"):
        raise ValueError("the emulator attaches managed policies to Roles only, not to Users or Groups")
    parameters = to_api("iam", "CreatePolicy", properties, without=("ManagedPolicyName", "Roles", "Tags"))
    tags = {"Tags": tags_of(properties)} if tags_of(properties) else {}
    policy = iam.create_policy(
        PolicyName=properties.get("ManagedPolicyName") or fit_name(generated, 128), **parameters, **tags
    )["Policy"]
    for role in as_list(properties.get("Roles")):
        iam.attach_role_policy(RoleName=role, PolicyArn=policy["Arn"])
    return Created(policy["Arn"], {"PolicyArn": policy["Arn"], "PolicyId": policy["PolicyId"]})


def _update_managed_policy(site: Site, arn: str, old: Properties, new: Properties) -> None:
    iam = site.client("iam")
    if old["PolicyDocument"] != new["PolicyDocument"]:
        versions = iam.list_policy_versions(PolicyArn=arn)["Versions"]
        for version in [item for item in versions if not item["IsDefaultVersion"]]:
            iam.delete_policy_version(PolicyArn=arn, VersionId=version["VersionId"])  # at most five may exist
        iam.create_policy_version(PolicyArn=arn, PolicyDocument=_document(new["PolicyDocument"]), SetAsDefault=True)
    before, after = set(as_list(old.get("Roles"))), set(as_list(new.get("Roles")))
    for role in sorted(before - after):
        iam.detach_role_policy(RoleName=role, PolicyArn=arn)
    for role in sorted(after - before):
        iam.attach_role_policy(RoleName=role, PolicyArn=arn)


def _delete_managed_policy(site: Site, arn: str, properties: Properties) -> None:
    iam = site.client("iam")
    if not found(lambda: iam.get_policy(PolicyArn=arn)):
        return
    # moto looks for the policy's roles among the account's first hundred alone, and says that there are no more.
    listed = {role["RoleName"] for role in iam.list_entities_for_policy(PolicyArn=arn)["PolicyRoles"]}
    for role in sorted(listed | set(as_list(properties.get("Roles")))):
        ignore_missing(partial(iam.detach_role_policy, RoleName=role, PolicyArn=arn))
    for version in iam.list_policy_versions(PolicyArn=arn)["Versions"]:
        if not version["IsDefaultVersion"]:
            iam.delete_policy_version(PolicyArn=arn, VersionId=version["VersionId"])
    iam.delete_policy(PolicyArn=arn)


def _create_instance_profile(site: Site, properties: Properties, generated: str) -> Created:
    iam = site.client("iam")
    name = properties.get("InstanceProfileName") or fit_name(generated, 128)
    profile = iam.create_instance_profile(InstanceProfileName=name, Path=properties.get("Path", "/"))["InstanceProfile"]
    for role in properties["Roles"]:
        iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=role)
    return Created(name, {"Arn": profile["Arn"]})


def _update_instance_profile(site: Site, name: str, old: Properties, new: Properties) -> None:
    iam = site.client("iam")
    for role in old["Roles"]:  # a profile holds one
        ignore_missing(partial(iam.remove_role_from_instance_profile, InstanceProfileName=name, RoleName=role))
    for role in new["Roles"]:
        iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=role)


def _delete_instance_profile(site: Site, name: str, properties: Properties) -> None:
    iam = site.client("iam")
    for role in properties["Roles"]:
        ignore_missing(partial(iam.remove_role_from_instance_profile, InstanceProfileName=name, RoleName=role))
    ignore_missing(partial(iam.delete_instance_profile, InstanceProfileName=name))


def _create_service_linked_role(site: Site, properties: Properties, generated: str) -> Created:
    parameters = to_api("iam", "CreateServiceLinkedRole", properties)
    try:
        name = site.client("iam").create_service_linked_role(**parameters)["Role"]["RoleName"]
    except ClientError as error:
        raise ValueError(f"service-linked role of {properties['AWSServiceName']}: {error}") from None
    return Created(name, {"RoleName": name})


def _key_tags(properties: Properties) -> list[dict[str, str]]:
    return [{"TagKey": tag["Key"], "TagValue": tag["Value"]} for tag in tags_of(properties)]


_KEY_HANDLED = ("KeyPolicy", "Tags", "EnableKeyRotation", "PendingWindowInDays", "Enabled", "RotationPeriodInDays")


def _create_key(site: Site, properties: Properties, generated: str) -> Created:
    kms = site.client("kms")
    parameters = to_api("kms", "CreateKey", properties, without=_KEY_HANDLED)
    key = kms.create_key(Policy=_document(properties["KeyPolicy"]), Tags=_key_tags(properties), **parameters)[
        "KeyMetadata"
    ]
    _set_key_state(site, key["KeyId"], properties)
    return Created(key["KeyId"], {"Arn": key["Arn"], "KeyId": key["KeyId"]})


def _set_key_state(site: Site, key_id: str, properties: Properties) -> None:
    kms = site.client("kms")
    if as_bool(properties.get("EnableKeyRotation", False)):
        period = (
            {"RotationPeriodInDays": int(properties["RotationPeriodInDays"])}
            if "RotationPeriodInDays" in properties
            else {}
        )
        kms.enable_key_rotation(KeyId=key_id, **period)
    else:
        kms.disable_key_rotation(KeyId=key_id)
    enable = kms.enable_key if as_bool(properties.get("Enabled", True)) else kms.disable_key
    enable(KeyId=key_id)


def _update_key(site: Site, key_id: str, old: Properties, new: Properties) -> None:
    kms = site.client("kms")
    kms.put_key_policy(KeyId=key_id, PolicyName="default", Policy=_document(new["KeyPolicy"]))
    kms.update_key_description(KeyId=key_id, Description=new.get("Description", ""))
    _set_key_state(site, key_id, new)
    gone, _ = changed_tags(old, new)
    if gone:
        kms.untag_resource(KeyId=key_id, TagKeys=gone)
    if _key_tags(new):
        kms.tag_resource(KeyId=key_id, Tags=_key_tags(new))


def _key_exists(site: Site, key_id: str) -> bool:
    def look() -> bool:
        return bool(site.client("kms").describe_key(KeyId=key_id)["KeyMetadata"]["KeyState"] != "PendingDeletion")

    return found(look)


def _delete_key(site: Site, key_id: str, properties: Properties) -> None:
    if _key_exists(site, key_id):
        site.client("kms").schedule_key_deletion(
            KeyId=key_id, PendingWindowInDays=int(properties.get("PendingWindowInDays", 30))
        )


def _create_alias(site: Site, properties: Properties, generated: str) -> Created:
    site.client("kms").create_alias(AliasName=properties["AliasName"], TargetKeyId=properties["TargetKeyId"])
    return Created(properties["AliasName"])


def _update_alias(site: Site, name: str, old: Properties, new: Properties) -> None:
    site.client("kms").update_alias(AliasName=name, TargetKeyId=new["TargetKeyId"])


def _alias_exists(site: Site, name: str) -> bool:
    pages = site.client("kms").get_paginator("list_aliases").paginate()
    return any(alias["AliasName"] == name for page in pages for alias in page["Aliases"])


TYPES = (
    ResourceType(
        "AWS::IAM::Role", _create_role, _role_exists, _delete_role, _update_role, ("RoleName", "Path"), "RoleName"
    ),
    ResourceType(
        "AWS::IAM::Policy",
        _put_inline_policy,
        _inline_policy_exists,
        _delete_inline_policy,
        _update_inline_policy,
        ("PolicyName",),
        "PolicyName",
    ),
    ResourceType(
        "AWS::IAM::ManagedPolicy",
        _create_managed_policy,
        lambda site, arn: found(lambda: site.client("iam").get_policy(PolicyArn=arn)),
        _delete_managed_policy,
        _update_managed_policy,
        ("ManagedPolicyName", "Path", "Description"),
        "ManagedPolicyName",
    ),
    ResourceType(
        "AWS::IAM::InstanceProfile",
        _create_instance_profile,
        lambda site, name: found(lambda: site.client("iam").get_instance_profile(InstanceProfileName=name)),
        _delete_instance_profile,
        _update_instance_profile,
        ("InstanceProfileName", "Path"),
        "InstanceProfileName",
    ),
    ResourceType(
        "AWS::IAM::ServiceLinkedRole", _create_service_linked_role, _role_exists, lambda site, name, properties: None
    ),
    ResourceType(
        "AWS::KMS::Key", _create_key, _key_exists, _delete_key, _update_key, ("KeySpec", "KeyUsage", "MultiRegion")
    ),
    ResourceType(
        "AWS::KMS::Alias",
        _create_alias,
        _alias_exists,
        lambda site, name, properties: ignore_missing(lambda: site.client("kms").delete_alias(AliasName=name)),
        _update_alias,
        ("AliasName",),
        "AliasName",
    ),
)
