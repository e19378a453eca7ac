"""S3 buckets and their policies, FSx for Lustre, ECR."""

import json
import re
from collections.abc import Mapping
from typing import Any

from trainyard.emulator.cloudformation.model import (
    Created,
    Properties,
    ResourceType,
    Site,
    UnsupportedPropertyError,
    as_bool,
    changed_tags,
    fit_name,
    found,
    ignore_missing,
    tags_of,
    to_api,
)

_MAX_BUCKET_NAME = 63


def _create_bucket(site: Site, properties: Properties, generated: str) -> Created:
    s3 = site.client("s3")
    name = str(properties.get("BucketName") or fit_name(generated.lower(), _MAX_BUCKET_NAME))
    location = {} if site.region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": site.region}}
    locked = {"ObjectLockEnabledForBucket": True} if properties.get("ObjectLockEnabled") else {}
    s3.create_bucket(Bucket=name, **location, **locked)
    _configure_bucket(site, name, {}, properties)
    domain = f"{name}.s3.amazonaws.com"
    attributes = {
        "Arn": f"arn:aws:s3:::{name}",
        "DomainName": domain,
        "RegionalDomainName": f"{name}.s3.{site.region}.amazonaws.com",
        "DualStackDomainName": f"{name}.s3.dualstack.{site.region}.amazonaws.com",
        "WebsiteURL": f"http://{name}.s3-website-{site.region}.amazonaws.com",
    }
    return Created(name, attributes)


def _configure_bucket(site: Site, name: str, old: Properties, new: Properties) -> None:
    s3 = site.client("s3")
    for property_name, value in new.items():
        if old.get(property_name) == value or property_name in ("BucketName", "Tags"):
            continue
        if property_name == "ObjectLockEnabled" and not old:
            continue  # given when the bucket was made
        setter = _BUCKET_SETTERS.get(property_name)
        if setter is None:
            raise UnsupportedPropertyError(f"property {property_name} is not known to the emulator")
        operation, parameters = setter(name, value)
        getattr(s3, operation)(**parameters)
    for property_name in set(old) - set(new) - {"BucketName", "Tags"}:
        if property_name not in _BUCKET_REMOVERS:
            raise UnsupportedPropertyError(f"the emulator can't take {property_name} away again")
        getattr(s3, _BUCKET_REMOVERS[property_name])(Bucket=name)
    if tags_of(new) != tags_of(old):
        s3.put_bucket_tagging(Bucket=name, Tagging={"TagSet": tags_of(new)})


def _encryption(name: str, value: Any) -> tuple[str, dict[str, Any]]:
    rules = [
        {
            "ApplyServerSideEncryptionByDefault": rule["ServerSideEncryptionByDefault"],
            "BucketKeyEnabled": bool(rule.get("BucketKeyEnabled", False)),
        }
        for rule in value["ServerSideEncryptionConfiguration"]
    ]
    return "put_bucket_encryption", {"Bucket": name, "ServerSideEncryptionConfiguration": {"Rules": rules}}


def _versioning(name: str, value: Any) -> tuple[str, dict[str, Any]]:
    return "put_bucket_versioning", {"Bucket": name, "VersioningConfiguration": value}


def _public_access(name: str, value: Any) -> tuple[str, dict[str, Any]]:
    configuration = {key: str(item).lower() == "true" for key, item in value.items()}
    return "put_public_access_block", {"Bucket": name, "PublicAccessBlockConfiguration": configuration}


def _ownership(name: str, value: Any) -> tuple[str, dict[str, Any]]:
    return "put_bucket_ownership_controls", {"Bucket": name, "OwnershipControls": value}


def _logging(name: str, value: Any) -> tuple[str, dict[str, Any]]:
    target = {"TargetBucket": value.get("DestinationBucketName", name), "TargetPrefix": value.get("LogFilePrefix", "")}
    return "put_bucket_logging", {"Bucket": name, "BucketLoggingStatus": {"LoggingEnabled": target}}


def _notification(name: str, value: Any) -> tuple[str, dict[str, Any]]:
    if value.get("EventBridgeConfiguration") is None or len(value) > 1:
        raise UnsupportedPropertyError("of NotificationConfiguration the emulator knows EventBridgeConfiguration only")
    return "put_bucket_notification_configuration", {
        "Bucket": name,
        "NotificationConfiguration": {"EventBridgeConfiguration": {}},
    }


def _lifecycle(name: str, value: Any) -> tuple[str, dict[str, Any]]:
    rules = [_lifecycle_rule(rule) for rule in value["Rules"]]
    return "put_bucket_lifecycle_configuration", {"Bucket": name, "LifecycleConfiguration": {"Rules": rules}}


def _lifecycle_rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    """CloudFormation's flat lifecycle rule as S3's nested one."""
    known = {"Id", "Status", "Prefix", "ExpirationInDays", "Transitions", "NoncurrentVersionExpiration"}
    known |= {
        "NoncurrentVersionTransitions",
        "AbortIncompleteMultipartUpload",
        "ExpiredObjectDeleteMarker",
        "TagFilters",
    }
    unknown = set(rule) - known
    if unknown:
        raise UnsupportedPropertyError(f"lifecycle rule property {sorted(unknown)[0]} is not known to the emulator")
    result: dict[str, Any] = {"Status": rule["Status"]}
    if "Id" in rule:
        result["ID"] = rule["Id"]
    tags, prefix = rule.get("TagFilters") or [], rule.get("Prefix", "")
    if len(tags) + bool(prefix) > 1:
        result["Filter"] = {"And": {"Tags": tags, **({"Prefix": prefix} if prefix else {})}}
    else:
        result["Filter"] = {"Tag": tags[0]} if tags else {"Prefix": prefix}
    if "ExpirationInDays" in rule:
        result["Expiration"] = {"Days": int(rule["ExpirationInDays"])}
    elif "ExpiredObjectDeleteMarker" in rule:
        result["Expiration"] = {"ExpiredObjectDeleteMarker": bool(rule["ExpiredObjectDeleteMarker"])}
    if "Transitions" in rule:
        result["Transitions"] = [
            {"Days": int(item["TransitionInDays"]), "StorageClass": item["StorageClass"]}
            for item in rule["Transitions"]
        ]
    if "NoncurrentVersionTransitions" in rule:
        result["NoncurrentVersionTransitions"] = [
            {"NoncurrentDays": int(item["TransitionInDays"]), "StorageClass": item["StorageClass"]}
            for item in rule["NoncurrentVersionTransitions"]
        ]
    for key in ("NoncurrentVersionExpiration", "AbortIncompleteMultipartUpload"):
        if key in rule:
            result[key] = {inner: int(item) for inner, item in rule[key].items()}
    return result


def _object_lock(name: str, value: Any) -> tuple[str, dict[str, Any]]:
    retention = value["Rule"]["DefaultRetention"]
    whole = {key: int(item) if key in ("Days", "Years") else item for key, item in retention.items()}
    configuration = {"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": whole}}
    return "put_object_lock_configuration", {"Bucket": name, "ObjectLockConfiguration": configuration}


def _acl(name: str, value: Any) -> tuple[str, dict[str, Any]]:
    # CloudFormation spells canned ACLs in Pascal case: LogDeliveryWrite is log-delivery-write.
    canned = re.sub(r"(?<!^)(?=[A-Z])", "-", value).lower()
    return "put_bucket_acl", {"Bucket": name, "ACL": canned}


_BUCKET_SETTERS = {
    "AccessControl": _acl,
    "BucketEncryption": _encryption,
    "VersioningConfiguration": _versioning,
    "PublicAccessBlockConfiguration": _public_access,
    "OwnershipControls": _ownership,
    "LoggingConfiguration": _logging,
    "NotificationConfiguration": _notification,
    "LifecycleConfiguration": _lifecycle,
    "ObjectLockConfiguration": _object_lock,
}
_BUCKET_REMOVERS = {
    "BucketEncryption": "delete_bucket_encryption",
    "PublicAccessBlockConfiguration": "delete_public_access_block",
    "OwnershipControls": "delete_bucket_ownership_controls",
    "LifecycleConfiguration": "delete_bucket_lifecycle",
}


def _put_bucket_policy(site: Site, properties: Properties) -> None:
    site.client("s3").put_bucket_policy(Bucket=properties["Bucket"], Policy=json.dumps(properties["PolicyDocument"]))


def _create_bucket_policy(site: Site, properties: Properties, generated: str) -> Created:
    _put_bucket_policy(site, properties)
    return Created(properties["Bucket"])


def lustre_mount_name(file_system_id: str, deployment_type: str) -> str:
    """ "fsx" for SCRATCH_1; every other deployment type has a name of eight characters of its own (FSx user guide)."""
    return "fsx" if deployment_type == "SCRATCH_1" else file_system_id.removeprefix("fs-")[:8]


def _create_file_system(site: Site, properties: Properties, generated: str) -> Created:
    parameters = to_api("fsx", "CreateFileSystem", properties, without=("Tags",))
    tags = {"Tags": tags_of(properties)} if tags_of(properties) else {}
    system = site.client("fsx").create_file_system(**parameters, **tags)["FileSystem"]
    lustre = properties.get("LustreConfiguration") or {}
    mount = lustre_mount_name(system["FileSystemId"], lustre.get("DeploymentType", "SCRATCH_1"))
    attributes = {
        "DNSName": system["DNSName"],
        "ResourceARN": system["ResourceARN"],
        "LustreMountName": mount,
        "RootVolumeId": "",
    }
    return Created(system["FileSystemId"], attributes)


def _update_file_system(site: Site, system_id: str, old: Properties, new: Properties) -> None:
    fsx, before, after = site.client("fsx"), old.get("LustreConfiguration") or {}, new.get("LustreConfiguration") or {}
    wanted: dict[str, Any] = {
        "LustreConfiguration": {key: after[key] for key in after if after[key] != before.get(key)}
    }
    if int(old.get("StorageCapacity", 0)) != int(new.get("StorageCapacity", 0)):
        wanted["StorageCapacity"] = new["StorageCapacity"]
    changes = {key: value for key, value in wanted.items() if value}
    if changes:
        fsx.update_file_system(**to_api("fsx", "UpdateFileSystem", {"FileSystemId": system_id, **changes}))
    arn = fsx.describe_file_systems(FileSystemIds=[system_id])["FileSystems"][0]["ResourceARN"]
    gone, kept = changed_tags(old, new)
    if gone:
        fsx.untag_resource(ResourceARN=arn, TagKeys=gone)
    if kept:
        fsx.tag_resource(ResourceARN=arn, Tags=kept)


def _file_system_exists(site: Site, file_system_id: str) -> bool:
    return found(lambda: site.client("fsx").describe_file_systems(FileSystemIds=[file_system_id])["FileSystems"])


def _create_repository(site: Site, properties: Properties, generated: str) -> Created:
    ecr = site.client("ecr")
    name = properties.get("RepositoryName") or generated.lower()
    handled = ("RepositoryName", "LifecyclePolicy", "RepositoryPolicyText", "EmptyOnDelete", "Tags")
    parameters = to_api("ecr", "CreateRepository", properties, without=handled)
    repository = ecr.create_repository(repositoryName=name, tags=tags_of(properties), **parameters)["repository"]
    _set_repository_policies(site, name, {}, properties)
    return Created(name, {"Arn": repository["repositoryArn"], "RepositoryUri": repository["repositoryUri"]})


def _set_repository_policies(site: Site, name: str, old: Properties, new: Properties) -> None:
    ecr = site.client("ecr")
    lifecycle = (new.get("LifecyclePolicy") or {}).get("LifecyclePolicyText")
    if lifecycle:
        ecr.put_lifecycle_policy(repositoryName=name, lifecyclePolicyText=lifecycle)
    elif old.get("LifecyclePolicy"):
        ecr.delete_lifecycle_policy(repositoryName=name)
    if new.get("RepositoryPolicyText"):
        ecr.set_repository_policy(repositoryName=name, policyText=json.dumps(new["RepositoryPolicyText"]))
    elif old.get("RepositoryPolicyText"):
        ecr.delete_repository_policy(repositoryName=name)


def _update_repository(site: Site, name: str, old: Properties, new: Properties) -> None:
    ecr = site.client("ecr")
    if old.get("ImageTagMutability") != new.get("ImageTagMutability"):
        ecr.put_image_tag_mutability(repositoryName=name, imageTagMutability=new.get("ImageTagMutability", "MUTABLE"))
    if old.get("ImageScanningConfiguration") != new.get("ImageScanningConfiguration"):
        scanning = to_api(
            "ecr",
            "PutImageScanningConfiguration",
            {"imageScanningConfiguration": new.get("ImageScanningConfiguration") or {}},
        )
        ecr.put_image_scanning_configuration(repositoryName=name, **scanning)
    _set_repository_policies(site, name, old, new)
    arn = ecr.describe_repositories(repositoryNames=[name])["repositories"][0]["repositoryArn"]
    gone, kept = changed_tags(old, new)
    if gone:
        ecr.untag_resource(resourceArn=arn, tagKeys=gone)
    if kept:
        ecr.tag_resource(resourceArn=arn, tags=kept)


def _repository_exists(site: Site, name: str) -> bool:
    return found(lambda: site.client("ecr").describe_repositories(repositoryNames=[name])["repositories"])


TYPES = (
    ResourceType(
        "AWS::S3::Bucket",
        _create_bucket,
        lambda site, name: found(lambda: site.client("s3").head_bucket(Bucket=name)),
        lambda site, name, properties: ignore_missing(lambda: site.client("s3").delete_bucket(Bucket=name)),
        _configure_bucket,
        ("BucketName", "BucketNamePrefix", "BucketNamespace"),
        "BucketName",
    ),
    ResourceType(
        "AWS::S3::BucketPolicy",
        _create_bucket_policy,
        lambda site, bucket: found(lambda: site.client("s3").get_bucket_policy(Bucket=bucket)["Policy"]),
        lambda site, bucket, properties: ignore_missing(lambda: site.client("s3").delete_bucket_policy(Bucket=bucket)),
        lambda site, bucket, old, new: _put_bucket_policy(site, new),
        ("Bucket",),
    ),
    ResourceType(
        "AWS::FSx::FileSystem",
        _create_file_system,
        _file_system_exists,
        lambda site, system_id, properties: ignore_missing(
            lambda: site.client("fsx").delete_file_system(FileSystemId=system_id)
        ),
        _update_file_system,
        (
            "BackupId",
            "FileSystemType",
            "FileSystemTypeVersion",
            "KmsKeyId",
            "LustreConfiguration.CopyTagsToBackups",
            "LustreConfiguration.DeploymentType",
            "LustreConfiguration.DriveCacheType",
            "LustreConfiguration.EfaEnabled",
            "LustreConfiguration.ExportPath",
            "LustreConfiguration.ImportPath",
            "LustreConfiguration.ImportedFileChunkSize",
            "LustreConfiguration.PerUnitStorageThroughput",
            "SecurityGroupIds",
            "StorageType",
            "SubnetIds",
        ),
    ),
    ResourceType(
        "AWS::ECR::Repository",
        _create_repository,
        _repository_exists,
        lambda site, name, properties: ignore_missing(
            lambda: site.client("ecr").delete_repository(
                repositoryName=name, force=as_bool(properties.get("EmptyOnDelete", False))
            )
        ),
        _update_repository,
        ("RepositoryName", "EncryptionConfiguration"),
        "RepositoryName",
    ),
)
