"""What the emulator's tests share: a site, callers, templates and a fake image."""

import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from trainyard.emulator import EmulatorInfo

FAKE_IMAGE = Path(__file__).with_name("fake_image.py")
ACCOUNT = "123456789012"
TRUST_ROOT = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Principal": {"AWS": f"arn:aws:iam::{ACCOUNT}:root"}, "Action": "sts:AssumeRole"}
    ],
}
TRUST_SAGEMAKER = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}],
}


def policy(*statements: Mapping[str, Any]) -> str:
    """A policy document of these statements."""
    return json.dumps({"Version": "2012-10-17", "Statement": list(statements)})


def allow(actions: str | list[str], resources: str | list[str] = "*", **more: Any) -> dict[str, Any]:
    """An Allow statement."""
    return {"Effect": "Allow", "Action": actions, "Resource": resources, **more}


def deny(actions: str | list[str], resources: str | list[str] = "*", **more: Any) -> dict[str, Any]:
    """A Deny statement."""
    return {"Effect": "Deny", "Action": actions, "Resource": resources, **more}


def refusal(call: Callable[[], Any]) -> str:
    """Code and message with which AWS refuses `call`; an empty text when it doesn't."""
    try:
        call()
    except ClientError as error:
        return f"{error.response['Error']['Code']}: {error.response['Error'].get('Message', '')}"
    return ""


@dataclass
class Caller:
    """A role, a session of it, and what it owns."""

    site: "Site"
    role: str
    role_arn: str
    bucket: str
    key_arn: str
    session: Any

    @functools.cached_property
    def s3(self) -> Any:
        """S3 as this role."""
        return self.client("s3")

    def client(self, service: str) -> Any:
        """A client as this role."""
        return self.site.make_client(self.session, service)

    def grant(self, policy_name: str, *statements: Mapping[str, Any]) -> None:
        """Put an inline policy on the role."""
        self.site("iam").put_role_policy(RoleName=self.role, PolicyName=policy_name, PolicyDocument=policy(*statements))


class Site:
    """The emulator, as its root; calling it gives a client."""

    def __init__(self, info: EmulatorInfo) -> None:
        self.info = info
        self.session = boto3.session.Session(
            info.admin_access_key_id, info.admin_secret_access_key, region_name=info.region
        )
        self._clients: dict[str, Any] = {}

    def __call__(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = self.make_client(self.session, service)
        return self._clients[service]

    def make_client(self, session: Any, service: str) -> Any:
        """A client that doesn't retry: a refusal is an answer."""
        return session.client(service, endpoint_url=self.info.endpoint, config=Config(retries={"max_attempts": 0}))

    def assume(self, role_arn: str, **more: Any) -> Any:
        """A session of a role, assumed by the root."""
        answer = self("sts").assume_role(RoleArn=role_arn, RoleSessionName="test", **more)["Credentials"]
        return boto3.session.Session(
            answer["AccessKeyId"],
            answer["SecretAccessKey"],
            answer["SessionToken"],
            region_name=self.info.region,
        )

    def role(self, role_name: str, trust: Mapping[str, Any] = TRUST_ROOT, **more: Any) -> str:
        """A new role's ARN."""
        document = json.dumps(trust)
        created = self("iam").create_role(RoleName=role_name, AssumeRolePolicyDocument=document, **more)
        return str(created["Role"]["Arn"])

    def tenant(self, name: str) -> Caller:
        """A role with a path, its key (which trusts that role alone) and its bucket, encrypted by default."""
        role_arn = self.role(name, Path=f"/tests/{name}/")
        administer = {
            "Effect": "Allow",
            "Principal": {"AWS": f"arn:aws:iam::{ACCOUNT}:root"},
            "Action": ["kms:DescribeKey", "kms:PutKeyPolicy"],
            "Resource": "*",
        }
        use = {"Effect": "Allow", "Principal": {"AWS": role_arn}, "Action": "kms:*", "Resource": "*"}
        key = self("kms").create_key(Policy=policy(administer, use))["KeyMetadata"]["Arn"]
        bucket = f"bucket-{name}"
        self("s3").create_bucket(Bucket=bucket)
        default = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key}
        rule = {"ApplyServerSideEncryptionByDefault": default, "BucketKeyEnabled": True}
        self("s3").put_bucket_encryption(Bucket=bucket, ServerSideEncryptionConfiguration={"Rules": [rule]})
        caller = Caller(self, name, role_arn, bucket, key, self.assume(role_arn))
        own = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
        caller.grant("own", allow("s3:*", own), allow(["kms:Decrypt", "kms:GenerateDataKey"], key))
        return caller

    def stack_status(self, stack_name: str) -> str:
        """The stack's status."""
        return str(self("cloudformation").describe_stacks(StackName=stack_name)["Stacks"][0]["StackStatus"])

    def deploy(self, stack_name: str, template: Mapping[str, Any]) -> str:
        """Create a stack; its status."""
        self("cloudformation").create_stack(StackName=stack_name, TemplateBody=json.dumps(template))
        return self.stack_status(stack_name)

    def failures(self, stack_name: str) -> str:
        """The reasons of the stack's failed events."""
        events = self("cloudformation").describe_stack_events(StackName=stack_name)["StackEvents"]
        failed = [event for event in events if event["ResourceStatus"].endswith("FAILED")]
        return "; ".join(f"{event['LogicalResourceId']}: {event.get('ResourceStatusReason', '')}" for event in failed)

    def output(self, stack_name: str, key: str) -> str:
        """An output of a stack."""
        outputs = self("cloudformation").describe_stacks(StackName=stack_name)["Stacks"][0].get("Outputs", [])
        return str(next(item["OutputValue"] for item in outputs if item["OutputKey"] == key))


def wait_for(condition: Callable[[], Any], seconds: float = 180.0) -> Any:
    """The first true value of `condition`; AssertionError when it stays false."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"still not so after {seconds} s")
