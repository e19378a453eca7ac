"""Whether a deployment would replace or drop something that holds data: asked before CloudFormation is.

CloudFormation replaces a resource in silence when a property of the wrong kind changes: a new, empty one is made and
the old one deleted, or left to nobody. So the synthesized templates are compared with the deployed ones first.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.errors import InputError
from trainyard.launch.aws import aws_errors, error_code
from trainyard.launch.session import Account

Template = Mapping[str, Any]

REPLACED_BY: Mapping[str, tuple[str, ...]] = {
    "AWS::CloudTrail::Trail": ("TrailName",),
    "AWS::EC2::SecurityGroup": ("GroupDescription", "GroupName", "VpcId"),
    "AWS::EC2::Subnet": (
        "AvailabilityZone",
        "AvailabilityZoneId",
        "CidrBlock",
        "Ipv4IpamPoolId",
        "Ipv4NetmaskLength",
        "Ipv6CidrBlock",
        "Ipv6IpamPoolId",
        "Ipv6Native",
        "Ipv6NetmaskLength",
        "OutpostArn",
        "VpcId",
    ),
    "AWS::EC2::VPC": ("CidrBlock", "InstanceTenancy", "Ipv4IpamPoolId", "Ipv4NetmaskLength", "VpcEncryptionControl"),
    "AWS::ECR::Repository": ("EncryptionConfiguration", "RepositoryName"),
    "AWS::EFS::FileSystem": ("AvailabilityZoneName", "Encrypted", "KmsKeyId", "PerformanceMode"),
    "AWS::FSx::DataRepositoryAssociation": (
        "BatchImportMetaDataOnCreate",
        "DataRepositoryPath",
        "FileSystemId",
        "FileSystemPath",
    ),
    "AWS::FSx::FileSystem": (
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
    "AWS::IAM::Role": ("Path", "RoleName"),
    "AWS::KMS::Key": ("KeySpec", "KeyUsage", "MultiRegion"),
    "AWS::Logs::LogGroup": ("LogGroupName",),
    "AWS::PCS::Cluster": ("Name", "Networking", "Size"),
    "AWS::SageMaker::Cluster": ("ClusterName", "Orchestrator.Eks", "VpcConfig"),
    "AWS::SageMaker::MlflowTrackingServer": ("MlflowVersion", "RoleArn", "TrackingServerName"),
    "AWS::S3::Bucket": ("BucketName", "BucketNamePrefix", "BucketNamespace"),
}
"""Types that hold data, or that what holds data stands on, and the properties whose change replaces them: the
createOnlyProperties of the CloudFormation registry's schemas (a test compares), and of FSx, whose schema says nothing
of its LustreConfiguration, what the template reference marks "Update requires: Replacement" or the CDK command's own
database marks as causing it (a test compares that too; where the two differ, the safe side is taken). Of a key those
that AWS refuses to change. A cluster counts for its accounting; a group or subnet, because its replacement replaces the
file system that stands in it."""


HYPERPOD = "AWS::SageMaker::Cluster"


@dataclass(frozen=True)
class Loss:
    """One stateful resource that the deployment would replace or drop."""

    stack: str
    logical_id: str
    kind: str
    """Its CloudFormation type."""
    why: str

    @property
    def name(self) -> str:
        """What `--accept-loss` takes."""
        return f"{self.stack}/{self.logical_id}"

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}): {self.why}"


def losses(deployed: Mapping[str, Template], wanted: Mapping[str, Template]) -> list[Loss]:
    """What going from the deployed templates to the wanted ones would replace or drop; both by stack name.

    A stack that only one side has is no loss: a new one holds nothing yet, and a deployment leaves alone what it
    doesn't know.
    """
    return [
        Loss(stack, logical_id, old["Type"], why)
        for stack in sorted(set(deployed) & set(wanted))
        for logical_id, old in deployed[stack].get("Resources", {}).items()
        if old["Type"] in REPLACED_BY and (why := _why(old, wanted[stack].get("Resources", {}).get(logical_id)))
    ]


def refuse_losses(
    deployed: Mapping[str, Template], wanted: Mapping[str, Template], accepted: Collection[str] = ()
) -> None:
    """InputError, in one line, where the deployment would replace or drop a stateful resource that nobody gave up."""
    found = losses(deployed, wanted)
    unknown = sorted(set(accepted) - {loss.name for loss in found})
    if unknown:
        raise InputError(f"--accept-loss {unknown[0]}: this deployment would replace or drop no such resource")
    refused = [loss for loss in found if loss.name not in accepted]
    if refused:
        raise InputError(
            f"refused: this deployment would lose {'; '.join(map(str, refused))}; undo the change in the environment "
            f"file, or save what it holds and repeat with {' '.join(f'--accept-loss {loss.name}' for loss in refused)}"
        )


def deployed_first(deployed: Mapping[str, Template], wanted: Mapping[str, Template]) -> list[str]:
    """Stacks that must be deployed before those that they depend on: their HyperPod cluster goes, whose machines act as
    roles of the foundation and need them until they are gone."""
    return [
        name
        for name in sorted(set(deployed) & set(wanted))
        if _of_type(deployed[name], HYPERPOD) - _of_type(wanted[name], HYPERPOD)
    ]


def refuse_dropped_exports(
    deployed: Mapping[str, Template], wanted: Mapping[str, Template], first: Collection[str] = ()
) -> None:
    """InputError, in one line, where a stack would export no longer what a deployed one still imports: CloudFormation
    refuses it half-way. The stacks in `first` are as wanted by then."""
    for name in sorted(set(deployed) & set(wanted)):
        dropped = _exports(deployed[name]) - _exports(wanted[name])
        for other, template in sorted({**deployed, **{item: wanted[item] for item in first}}.items()):
            if other == name or not (used := sorted(dropped & _imports(template))):
                continue
            files = any("SmallFiles" in item for item in used)
            way = (
                "deploy `small_files: {mounted: false}` in the cluster first, then take it away"
                if files
                else "undo the change in the environment file, and make it in two deployments: first what uses this"
            )
            raise InputError(
                f"refused: stack {name} would no longer export {used[0].partition(':')[2] or used[0]}"
                f"{f' (and {len(used) - 1} more)' if used[1:] else ''}, which stack {other} as deployed still imports; "
                f"{way}"
            )


def deployed_stacks(account: Account) -> list[str]:
    """Names of all of this project's stacks that exist in the account and region, of whatever environment."""
    return list(_statuses(account))


FAILED_CREATION = ("ROLLBACK_COMPLETE", "ROLLBACK_FAILED")


def failed_creations(account: Account, names: Collection[str]) -> list[str]:
    """Those of the stacks whose first deployment failed: the next deletes them and makes them anew. Nothing of
    theirs was ever used; what couldn't be deleted is still in those in ROLLBACK_FAILED."""
    return [name for name, status in _statuses(account).items() if name in names and status in FAILED_CREATION]


def release(account: Account, names: Collection[str], say: Callable[[str], None] = lambda _: None) -> None:
    """Let the CLI delete stacks whose first deployment failed, as it does to make them anew: it protects a stack before
    it makes it, and its own deletion is then refused. `say` gets a line for each, with what is still in it."""
    cloudformation = account.client("cloudformation")
    for name in names:
        with aws_errors("unprotecting", f"stack {name}, whose first deployment failed"):
            pages = cloudformation.get_paginator("list_stack_resources").paginate(StackName=name)
            left = [
                f"{item['LogicalResourceId']} ({item['ResourceType']})"
                for page in pages
                for item in page["StackResourceSummaries"]
                if item["ResourceStatus"] not in ("DELETE_COMPLETE", "DELETE_SKIPPED")
            ]
            still = f", with what its rollback couldn't delete: {', '.join(left)}" if left else ""
            say(f"stack {name}: its first deployment failed; it is unprotected, deleted and made anew{still}")
            cloudformation.update_termination_protection(StackName=name, EnableTerminationProtection=False)


def _statuses(account: Account) -> dict[str, str]:
    with aws_errors("listing", "the account's stacks"):
        pages = account.client("cloudformation").get_paginator("list_stacks").paginate()
        found = [item for page in pages for item in page["StackSummaries"]]
    return {
        item["StackName"]: item["StackStatus"]
        for item in found
        if item["StackName"].startswith("trainyard-") and item["StackStatus"] != "DELETE_COMPLETE"
    }


def refuse_namesakes(deployed: Collection[str], wanted: Collection[str], stacks: Collection[str] = ()) -> list[str]:
    """InputError, in one line, where a tenant that is to be deployed for the first time and one that is deployed in the
    same account and region, in another environment or out of this one's file, would take each other's jobs for their
    own: SageMaker knows a job by its name, and policies a tenant's jobs by `<tenant>-*`.

    `deployed`: the account's stacks; `wanted`: the environment's; `stacks`: those of them to deploy, all by default.
    Where both tenants are there already a line of warning each instead: what mends either of them must get through.
    """
    warnings = []
    for own in filter(None, map(_OF_TENANT.fullmatch, sorted(wanted))):
        if stacks and not {own[0], own[0].removesuffix("foundation") + "training"} & set(stacks):
            continue
        tenant = own["tenant"]
        for there in filter(None, map(_OF_TENANT.fullmatch, sorted(set(deployed) - set(wanted)))):
            other = there["tenant"]
            if not (other == tenant or other.startswith(f"{tenant}-") or tenant.startswith(f"{other}-")):
                continue
            told = (
                f"tenant {other} of environment {there['environment']} is deployed in this account and region too "
                f"({there[0]}), and policies of {tenant} of {own['environment']} and of it {{}} take each other's jobs "
                f"for their own ({min(tenant, other, key=len)}-*); rename one, remove the other (trainyard tenant "
                "remove), or give each environment an account of its own"
            )
            if own[0] not in deployed:
                raise InputError(f"refused: {told.format('would')}")
            warnings.append(told.format("do"))
    return warnings


def left_behind(deployed: Collection[str], wanted: Collection[str]) -> list[str]:
    """A line for each tenant of the environment that is deployed and not among `wanted`: nothing takes it away."""
    found = [match for name in sorted(set(deployed) - set(wanted)) if (match := _OF_TENANT.fullmatch(name))]
    environments = {name.split("-")[1] for name in wanted}
    return [
        f"tenant {own['tenant']} is deployed ({own[0]}) and not in the file: its rights, data and costs stay, and the "
        "proof of isolation asks nothing about it (a tenant is never renamed: another name is a new, empty one); put "
        f"its entry back, and where it is to go, trainyard tenant remove FILE {own['tenant']}"
        for own in found
        if own["environment"] in environments
    ]


_OF_TENANT = re.compile(r"trainyard-(?P<environment>[a-z0-9]+)-(?P<tenant>[a-z0-9-]+)-foundation")
"""An environment's name has no dash, so that no stack's name can be read in two ways."""


def _of_type(template: Template, kind: str) -> set[str]:
    return {name for name, item in template.get("Resources", {}).items() if item["Type"] == kind}


def _exports(template: Template) -> set[str]:
    outputs = template.get("Outputs", {}).values()
    return {str(item["Export"]["Name"]) for item in outputs if "Export" in item}


def _imports(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        here = {str(value["Fn::ImportValue"])} if "Fn::ImportValue" in value else set()
        return here.union(*map(_imports, value.values()))
    return set().union(*map(_imports, value)) if isinstance(value, list) else set()


def deployed_templates(account: Account, names: Sequence[str]) -> dict[str, Template]:
    """The templates of those stacks that exist, as they were deployed."""
    from botocore.exceptions import ClientError

    cloudformation = account.client("cloudformation")
    found: dict[str, Template] = {}
    for name in names:
        with aws_errors("reading the template of", f"stack {name}"):
            try:
                body = cloudformation.get_template(StackName=name, TemplateStage="Original")["TemplateBody"]
            except ClientError as error:
                if error_code(error) != "ValidationError":  # CloudFormation's word for "no such stack"
                    raise
                continue
        if isinstance(body, Mapping):  # a text is YAML, which this project never deploys
            found[name] = body
    return found


def _why(old: Mapping[str, Any], new: Mapping[str, Any] | None) -> str:
    """Why `old` would not survive; "" where it would."""
    if new is None:
        return "is no longer in the template"
    if new["Type"] != old["Type"]:
        return f"would become a {new['Type']}"
    before, after = old.get("Properties", {}), new.get("Properties", {})
    for path in REPLACED_BY[old["Type"]]:
        was, will = _at(before, path), _at(after, path)
        if was != will:
            return f"{path} would change from {was!s:.120} to {will!s:.120}, which replaces it"
    if old["Type"] == "AWS::FSx::FileSystem":
        was, will = _at(before, "StorageCapacity"), _at(after, "StorageCapacity")
        if isinstance(was, int) and isinstance(will, int) and will < was:
            return f"StorageCapacity would shrink from {was} to {will} GiB, which FSx can't do in place"
    return ""


def _at(properties: Any, path: str) -> Any:
    for key in path.split("."):
        properties = properties.get(key) if isinstance(properties, Mapping) else None
    return _plain(properties)


def _plain(value: Any) -> Any:
    """Without the differences that CloudFormation doesn't see: "true" and true, 5 and "5"."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bool):
        return str(value).lower()
    return value
