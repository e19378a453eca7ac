"""The denial of the other tenant is the deployed policies' decision: grant what they withhold, and it flips."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from deployed_site import CHECKOUT, Site

from trainyard.launch.contract import read_contract
from trainyard.launch.session import Account, assume, open_account
from trainyard.operate.isolation_probe import DENIED_CODES
from trainyard.spec.platform import EnvironmentSpec, TenantContract, load_environment

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def environment() -> EnvironmentSpec:
    return load_environment(CHECKOUT / "environments/local.yaml")


@pytest.fixture
def admin(site: Site, environment: EnvironmentSpec) -> Account:
    return open_account(environment)


@pytest.fixture
def contracts(admin: Account, environment: EnvironmentSpec) -> dict[str, TenantContract]:
    return {tenant: read_contract(admin, environment, tenant) for tenant in environment.tenants}


@pytest.fixture
def grants(admin: Account, contracts: dict[str, TenantContract]) -> Iterator["Grants"]:
    given = Grants(admin, contracts["acme"], contracts["globex"])
    yield given
    given.take_back()


class Grants:
    """What an attacker with the account's keys, or a careless change, would add to globex's launcher."""

    def __init__(self, admin: Account, target: TenantContract, receiver: TenantContract) -> None:
        self._iam, self._kms = admin.client("iam"), admin.client("kms")
        self._target = target
        self._role_arn = receiver.roles.launcher
        self._role = self._role_arn.rsplit("/", 1)[-1]
        self._key_policy = self._kms.get_key_policy(KeyId=target.keys.checkpoints, PolicyName="default")["Policy"]
        self._boundary = self._iam.get_role(RoleName=self._role)["Role"]["PermissionsBoundary"][
            "PermissionsBoundaryArn"
        ]

    def s3_read(self) -> None:
        resource = f"arn:aws:s3:::{self._target.buckets.checkpoints}/*"
        self._put("test-s3", {"Effect": "Allow", "Action": "s3:GetObject", "Resource": resource})

    def kms_decrypt(self) -> None:
        key = self._target.keys.checkpoints
        statement = {"Effect": "Allow", "Action": "kms:Decrypt", "Resource": key}
        self._put("test-kms", statement)
        policy = json.loads(self._key_policy)
        policy["Statement"].append({**statement, "Resource": "*", "Principal": {"AWS": self._role_arn}})
        self._kms.put_key_policy(KeyId=key, PolicyName="default", Policy=json.dumps(policy))

    def no_boundary(self) -> None:
        self._iam.delete_role_permissions_boundary(RoleName=self._role)

    def take_back(self) -> None:
        for name in self._iam.list_role_policies(RoleName=self._role)["PolicyNames"]:
            if name.startswith("test-"):
                self._iam.delete_role_policy(RoleName=self._role, PolicyName=name)
        self._kms.put_key_policy(KeyId=self._target.keys.checkpoints, PolicyName="default", Policy=self._key_policy)
        self._iam.put_role_permissions_boundary(RoleName=self._role, PermissionsBoundary=self._boundary)

    def _put(self, name: str, statement: dict[str, Any]) -> None:
        policy = {"Version": "2012-10-17", "Statement": [statement]}
        self._iam.put_role_policy(RoleName=self._role, PolicyName=name, PolicyDocument=json.dumps(policy))


def answer(call: Callable[[], Any]) -> str:
    try:
        call()
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return "allowed"


def test_reading_a_checkpoint_needs_s3_and_kms_and_flips_only_with_both(
    site: Site, admin: Account, contracts: dict[str, TenantContract], grants: Grants
) -> None:
    uri = next(item for item in site.report["artifacts"] if "/checkpoints/" in item)
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    s3 = assume(admin, contracts["globex"].roles.launcher, session_name="end-to-end").client("s3")

    def read() -> Any:
        return s3.get_object(Bucket=bucket, Key=f"{prefix}manifest.json")["Body"].read()

    assert answer(read) == "AccessDenied"
    grants.no_boundary()
    assert answer(read) == "AccessDenied"
    grants.s3_read()
    assert answer(read) == "AccessDenied", "the object is encrypted under a key that globex may not use"
    grants.kms_decrypt()
    assert answer(read) == "allowed"
    grants.take_back()
    assert answer(read) == "AccessDenied"


def test_a_stranger_with_made_up_keys_gets_nothing(site: Site, contracts: dict[str, TenantContract]) -> None:
    stranger = boto3.Session(
        aws_access_key_id="AKIAIOSFODNN7EXAMPLE", aws_secret_access_key="x", region_name="us-east-1"
    )
    s3 = stranger.client("s3", endpoint_url=site.info.endpoint)
    code = answer(lambda: s3.list_objects_v2(Bucket=contracts["acme"].buckets.checkpoints))
    assert code in {"InvalidAccessKeyId", "AccessDenied"}


def test_an_action_that_nobody_mapped_is_denied(admin: Account, contracts: dict[str, TenantContract]) -> None:
    launcher = assume(admin, contracts["acme"].roles.launcher, session_name="end-to-end")
    assert answer(lambda: launcher.client("polly").describe_voices()) in DENIED_CODES
