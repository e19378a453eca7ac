"""What of a tenant still exists, asked of each service, and how one thing that its stack left behind is deleted."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainyard.errors import AwsRefusedError
from trainyard.functions.job_roles import job_role_path
from trainyard.launch.aws import aws_errors
from trainyard.launch.session import Account
from trainyard.operate.tenants import unfinished
from trainyard.operate.tenants.survey import Held
from trainyard.operate.tenants.unfinished import Unfinished
from trainyard.spec.platform import TRAINING_LOG_GROUP, EnvironmentSpec
from trainyard.spec.shares import BATCH_PREFIX

KEY_DELETION_DAYS = 30
"""KMS's longest waiting time: the key serves nobody from the first day on, and can still be brought back until the
last one."""

FILE_SYSTEM_SECONDS = 1800.0
"""FSx takes minutes to delete a file system, EFS less; its network can't go before it."""

EXISTS = "exists"

_GONE = {
    "404",
    "DataRepositoryAssociationNotFound",
    "FileSystemNotFound",
    "InvalidGroup.NotFound",
    "InvalidSubnetID.NotFound",
    "InvalidVpcID.NotFound",
    "NoSuchBucket",
    "NotFoundException",
    "ResourceNotFoundException",
}
_DELETION_ORDER = (
    "AWS::FSx::DataRepositoryAssociation",  # before its file system: then nothing more is exported to the bucket
    "AWS::FSx::FileSystem",
    "AWS::EFS::FileSystem",  # its mount target went with the stack
    "AWS::S3::Bucket",
    "AWS::Logs::LogGroup",
    "AWS::EC2::Subnet",
    "AWS::EC2::SecurityGroup",
    "AWS::EC2::VPC",
    "AWS::KMS::Key",  # last: what is under a key must be gone, or be meant to become unreadable
)


@dataclass(frozen=True)
class Left:
    """One thing that outlives the tenant."""

    what: str
    identifier: str
    why: str

    def __str__(self) -> str:
        return f"{self.what} {self.identifier}: {self.why}"


def in_deletion_order(things: list[Held]) -> list[Held]:
    """File system before network, everything before the keys."""
    return sorted(things, key=lambda item: _DELETION_ORDER.index(item.kind))


def condition(account: Account, thing: Held) -> str | None:
    """None where it is gone; else in what state it is."""
    from botocore.exceptions import ClientError

    with aws_errors("looking for", str(thing)):
        try:
            return _condition(account, thing)
        except ClientError as error:
            if str(error.response["Error"].get("Code")) in _GONE:
                return None
            raise


def _condition(account: Account, thing: Held) -> str | None:
    client: Any = account.client(_service(thing))
    if thing.kind == "AWS::KMS::Key":
        until = client.describe_key(KeyId=thing.physical_id)["KeyMetadata"].get("DeletionDate")
        return f"can't be used any more, deleted for good on {until:%Y-%m-%d}" if until else EXISTS
    return EXISTS if _LOOK[thing.kind](client, thing.physical_id) else None


def _service(thing: Held) -> str:
    """boto3's name of the service: the middle of AWS::FSx::FileSystem, in small letters."""
    return thing.kind.split("::")[1].lower()


_LOOK: Mapping[str, Callable[[Any, str], Any]] = {
    "AWS::S3::Bucket": lambda s3, name: s3.head_bucket(Bucket=name),
    "AWS::FSx::DataRepositoryAssociation": lambda fsx, name: fsx.describe_data_repository_associations(
        AssociationIds=[name]
    )["Associations"],
    "AWS::FSx::FileSystem": lambda fsx, name: fsx.describe_file_systems(FileSystemIds=[name])["FileSystems"],
    "AWS::EFS::FileSystem": lambda efs, name: efs.describe_file_systems(FileSystemId=name)["FileSystems"],
    "AWS::Logs::LogGroup": lambda logs, name: [
        group
        for group in logs.describe_log_groups(logGroupNamePrefix=name)["logGroups"]
        if group["logGroupName"] == name
    ],
    "AWS::EC2::Subnet": lambda ec2, name: ec2.describe_subnets(SubnetIds=[name])["Subnets"],
    "AWS::EC2::SecurityGroup": lambda ec2, name: ec2.describe_security_groups(GroupIds=[name])["SecurityGroups"],
    "AWS::EC2::VPC": lambda ec2, name: ec2.describe_vpcs(VpcIds=[name])["Vpcs"],
}
"""Something where the resource exists; a missing one is an empty answer or one of `_GONE`'s errors."""

_DELETE: Mapping[str, Callable[[Any, str], Any]] = {
    "AWS::S3::Bucket": lambda s3, name: s3.delete_bucket(Bucket=name),
    "AWS::FSx::DataRepositoryAssociation": lambda fsx, name: fsx.delete_data_repository_association(AssociationId=name),
    "AWS::FSx::FileSystem": lambda fsx, name: fsx.delete_file_system(FileSystemId=name),
    "AWS::EFS::FileSystem": lambda efs, name: efs.delete_file_system(FileSystemId=name),
    "AWS::Logs::LogGroup": lambda logs, name: logs.delete_log_group(logGroupName=name),
    "AWS::EC2::Subnet": lambda ec2, name: ec2.delete_subnet(SubnetId=name),
    "AWS::EC2::SecurityGroup": lambda ec2, name: ec2.delete_security_group(GroupId=name),
    "AWS::EC2::VPC": lambda ec2, name: ec2.delete_vpc(VpcId=name),
    "AWS::KMS::Key": lambda kms, name: kms.schedule_key_deletion(KeyId=name, PendingWindowInDays=KEY_DELETION_DAYS),
}


def delete(account: Account, thing: Held) -> None:
    """Delete one thing that is still there; a bucket must be empty. AwsRefusedError where AWS won't."""
    with aws_errors("deleting", str(thing)):
        _DELETE[thing.kind](account.client(_service(thing)), thing.physical_id)
    if thing.kind.startswith(("AWS::EFS::", "AWS::FSx::")):
        _wait_until_gone(account, thing)


def _wait_until_gone(account: Account, thing: Held) -> None:
    end = time.monotonic() + FILE_SYSTEM_SECONDS
    while condition(account, thing) is not None and time.monotonic() < end:
        time.sleep(10.0)


def _job_prefixes(tenant: str) -> tuple[str, str]:
    """How names of the tenant's training jobs begin: its own, and those that Batch gave them."""
    return f"{tenant}-", f"{BATCH_PREFIX}{tenant}-"


def job_streams(account: Account, tenant: str) -> list[str]:
    """The tenant's streams in the log group that SageMaker shares among all: no stack owns them."""
    from botocore.exceptions import ClientError

    with aws_errors("listing", f"log streams of {tenant} in {TRAINING_LOG_GROUP}"):
        try:
            listing = account.client("logs").get_paginator("describe_log_streams")
            return [
                stream["logStreamName"]
                for prefix in _job_prefixes(tenant)
                for page in listing.paginate(logGroupName=TRAINING_LOG_GROUP, logStreamNamePrefix=prefix)
                for stream in page["logStreams"]
            ]
        except ClientError as error:
            if str(error.response["Error"].get("Code")) in _GONE:
                return []
            raise


def delete_job_streams(account: Account, streams: list[str]) -> None:
    """Delete streams of SageMaker's shared log group."""
    logs = account.client("logs")
    with aws_errors("deleting", f"{len(streams)} log streams in {TRAINING_LOG_GROUP}"):
        for stream in streams:
            logs.delete_log_stream(logGroupName=TRAINING_LOG_GROUP, logStreamName=stream)


def machine_log_groups(account: Account, environment: str, tenant: str) -> list[str]:
    """Log groups of the machines of the tenant's HyperPod clusters, earlier ones too: HyperPod makes them, and no stack
    owns them."""
    prefix = f"/aws/sagemaker/Clusters/trainyard-{environment}-{tenant}/"
    with aws_errors("listing", f"log groups {prefix}*"):
        pages = account.client("logs").get_paginator("describe_log_groups").paginate(logGroupNamePrefix=prefix)
        return [group["logGroupName"] for page in pages for group in page["logGroups"]]


def delete_log_groups(account: Account, names: list[str]) -> None:
    """Delete log groups with all that is in them."""
    logs = account.client("logs")
    for name in names:
        with aws_errors("deleting", f"log group {name}"):
            logs.delete_log_group(logGroupName=name)


def job_roles(account: Account, environment: str, tenant: str) -> list[str]:
    """Names of the roles of single jobs that the tenant's broker made and hasn't removed yet."""
    path = job_role_path({"environment": environment, "tenant": tenant})
    with aws_errors("listing", f"roles of {tenant}'s jobs in {path}"):
        pages = account.client("iam").get_paginator("list_roles").paginate(PathPrefix=path)
        return [role["RoleName"] for page in pages for role in page["Roles"]]


def delete_job_roles(account: Account, environment: str, tenant: str) -> list[str]:
    """Delete the roles of single jobs that are left; their names. They hold the tenant's boundary: its stack can't go
    before them. The tenant's broker still looks for such roles by itself: what it has removed is none of these."""
    iam, names = account.client("iam"), job_roles(account, environment, tenant)
    with aws_errors("deleting", f"roles of {tenant}'s jobs"):
        return [name for name in names if _delete_role(iam, name)]


def _delete_role(iam: Any, name: str) -> bool:
    """False where somebody else has."""
    missing = iam.exceptions.NoSuchEntityException
    try:
        for policy in iam.list_role_policies(RoleName=name)["PolicyNames"]:
            with contextlib.suppress(missing):
                iam.delete_role_policy(RoleName=name, PolicyName=policy)
        iam.delete_role(RoleName=name)
    except missing:
        return False
    return True


def running_jobs(account: Account, environment: EnvironmentSpec, tenant: str) -> Unfinished:
    """Names of the tenant's jobs that have not ended: on SageMaker, in its training queues, on a cluster of its own and
    on other machines. Where AWS refuses to tell of the latter, the rest is told, and why."""
    training = _training_jobs(account, tenant)
    contract = unfinished.deployed_contract(account, environment, tenant)
    if contract is None:
        return Unfinished(tuple(training))
    queued = unfinished.queued(account, contract)
    if queued:  # among them is what Batch started, which SageMaker lists by another name
        training = [name for name in training if not name.startswith(BATCH_PREFIX)]
    try:
        others = unfinished.elsewhere(account, contract)
    except AwsRefusedError as error:
        others = Unfinished(untold=str(error))
    return replace(others, jobs=tuple(dict.fromkeys([*training, *queued, *others.jobs])))


def _training_jobs(account: Account, tenant: str) -> list[str]:
    sagemaker = account.client("sagemaker")
    with aws_errors("listing", f"training jobs of {tenant}"):
        return [
            job["TrainingJobName"]
            for status in ("InProgress", "Stopping")
            for page in sagemaker.get_paginator("list_training_jobs").paginate(
                NameContains=f"{tenant}-", StatusEquals=status, PaginationConfig={"PageSize": 100}
            )
            for job in page["TrainingJobSummaries"]
            if job["TrainingJobName"].startswith(_job_prefixes(tenant))
        ]
