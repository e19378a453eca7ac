"""The doctor's questions to an account: each answer, good and bad, of the shape that botocore's models know."""

from collections.abc import Callable, Iterable
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError
from botocore.stub import Stubber
from launch_testing import IMAGE

from trainyard.errors import AwsRefusedError
from trainyard.launch.aws import aws_errors
from trainyard.operate import account_checks
from trainyard.operate.account_checks import ENDPOINT_SERVICES, Check
from trainyard.spec.platform import EnvironmentSpec, TenantContract

Answer = dict[str, Any] | str


class Stubbed:
    """An account whose services give prepared answers, in turn; a text is an error's code."""

    def __init__(self) -> None:
        self._clients: dict[str, Any] = {}
        self._stubs: dict[str, Stubber] = {}

    def client(self, service: str) -> Any:
        if service not in self._clients:
            keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
            self._clients[service] = boto3.client(service, region_name="us-east-1", **keys)
            self._stubs[service] = Stubber(self._clients[service])
            self._stubs[service].activate()
        return self._clients[service]

    def says(self, service: str, operation: str, *answers: Answer) -> "Stubbed":
        self.client(service)
        for answer in answers:
            if isinstance(answer, str):
                self._stubs[service].add_client_error(operation, answer, "no")
            else:
                self._stubs[service].add_response(operation, answer)
        return self


@pytest.fixture
def account() -> Any:
    return Stubbed()


def one(found: Iterable[Check] | Check) -> tuple[str, str, str]:
    check = found if isinstance(found, Check) else next(iter(found))
    return check.level, check.finding, check.mend


def test_bootstrap(account: Any, environment: EnvironmentSpec) -> None:
    account.says("ssm", "get_parameter", {"Parameter": {"Value": "30"}}, {"Parameter": {"Value": "5"}})
    account.says("ssm", "get_parameter", "ParameterNotFound")
    assert one(account_checks.bootstrap(account, environment)) == ("pass", "version 30", "")
    assert one(account_checks.bootstrap(account, environment))[0] == "fail"
    level, finding, mend = one(account_checks.bootstrap(account, environment))
    assert level == "fail" and "not bootstrapped" in finding
    # Without the file's name app.py ends the CLI's synthesis, and nothing is bootstrapped.
    assert mend == "cdk bootstrap aws://123456789012/us-east-1 -c environment=environments/test.yaml"
    account.says("ssm", "get_parameter", "ParameterNotFound")
    emulated = environment.model_copy(update={"emulated": True})
    assert one(account_checks.bootstrap(account, emulated))[2] == "deploy the stacks: trainyard deploy ENV.yaml"


def test_zones(account: Any, environment: EnvironmentSpec) -> None:
    def there(*names: str) -> dict[str, Any]:
        return {"AvailabilityZones": [{"ZoneName": name, "State": "available"} for name in names]}

    account.says("ec2", "describe_availability_zones", there("us-east-1a", "us-east-1b"), there("us-east-1c"))
    assert one(account_checks.zones(account, environment))[0] == "pass"
    level, finding, mend = one(account_checks.zones(account, environment))
    assert (level, finding) == ("fail", "not available: us-east-1a (none), us-east-1b (none)") and "us-east-1c" in mend


def test_endpoints_are_offered_in_the_zones_that_get_them(account: Any, environment: EnvironmentSpec) -> None:
    names = [f"com.amazonaws.us-east-1.{name}" for name in ENDPOINT_SERVICES if name != "s3"]

    def offered(zones: dict[str, list[str]]) -> dict[str, Any]:
        both = ["us-east-1a", "us-east-1b"]
        return {"ServiceDetails": [{"ServiceName": name, "AvailabilityZones": zones.get(name, both)} for name in zones]}

    whole = {name: ["us-east-1a", "us-east-1b", "us-east-1c"] for name in names}
    local = environment.model_copy(update={"availability_zones": ("us-east-1a", "us-east-1-dfw-2a", "us-east-1b")})
    for _ in range(2):
        account.says("ec2", "describe_vpc_endpoint_services", offered(whole))
    assert one(account_checks.endpoint_services(account, environment)) == ("pass", "8 in us-east-1a, us-east-1b", "")
    assert one(account_checks.endpoint_services(account, local))[0] == "pass", "a Local Zone gets none"
    account.says("ec2", "describe_vpc_endpoint_services", offered(whole | {names[0]: ["us-east-1a"]}))
    level, finding, mend = one(account_checks.endpoint_services(account, environment))
    assert (level, finding) == ("fail", f"not offered: {names[0]} in us-east-1b") and "availability_zones" in mend
    account.says("ec2", "describe_vpc_endpoint_services", offered({name: whole[name] for name in names[1:]}))
    level, finding, _ = one(account_checks.endpoint_services(account, environment))
    assert (level, finding) == ("warn", f"EC2 names none such: {names[0]}")


def test_offerings_of_the_zone_where_training_runs(account: Any, environment: EnvironmentSpec) -> None:
    def offered(zone: str) -> dict[str, Any]:
        return {"InstanceTypeOfferings": [{"InstanceType": "p5.4xlarge", "Location": zone}]}

    account.says("ec2", "describe_instance_type_offerings", offered("us-east-1a"), offered("us-east-1f"))
    assert one(account_checks.offerings(account, environment)) == ("pass", "p5.4xlarge in us-east-1a", "")
    level, _, mend = one(account_checks.offerings(account, environment))
    assert level == "warn" and mend == "offered in us-east-1f: put such a zone first in availability_zones"


def test_quotas_against_what_tenants_may_hold(account: Any, environment: EnvironmentSpec) -> None:
    def quota(value: float, name: str = "ml.p5.4xlarge for training job usage") -> dict[str, Any]:
        return {"Quotas": [{"QuotaName": name, "QuotaCode": "L-1", "Value": value}]}

    answers = (quota(4), quota(3), quota(9, "ml.p5.4xlarge for spot training job usage"), "AccessDeniedException")
    account.says("service-quotas", "list_service_quotas", *answers)
    found = [one(account_checks.quotas(account, environment)) for _ in answers]
    assert [level for level, *_ in found] == ["pass", "fail", "warn", "warn"]
    assert "3, and tenants may hold 4 together" in found[1][1]
    assert "--quota-code L-1 --desired-value 4 --region us-east-1, or lower" in found[1][2]
    assert found[3][1].startswith("not known: ") and "servicequotas:ListServiceQuotas" in found[3][2]


def test_quotas_of_spot_and_of_warm_pools(account: Any, environment: EnvironmentSpec) -> None:
    def checks(**values: float) -> dict[str, Check]:
        names = {"all": "training job usage", "spot": "spot training job usage", "warm": "training warm pool usage"}
        quotas = [
            {"QuotaName": f"ml.p5.4xlarge for {names[key]}", "QuotaCode": f"L-{key}", "Value": value}
            for key, value in values.items()
        ]
        account.says("service-quotas", "list_service_quotas", {"Quotas": quotas})
        return {check.name: check for check in account_checks.quotas(account, spec)}

    spec = environment
    none = checks(all=4, spot=0, warm=0)
    assert (
        none["spot quota ml.p5.4xlarge"].level == "warn"
        and "--quota-code L-spot" in none["spot quota ml.p5.4xlarge"].mend
    )
    assert "warm pool quota ml.p5.4xlarge" not in none, "nobody may keep machines"
    acme = environment.tenants["acme"].model_copy(update={"warm_pool_minutes": 30.0})
    spec = environment.model_copy(update={"tenants": {**environment.tenants, "acme": acme}})
    wanted = environment.most("acme")["ml.p5.4xlarge"]
    low, enough = checks(all=4, spot=4, warm=wanted - 1), checks(all=4, spot=4, warm=wanted)
    assert low["warm pool quota ml.p5.4xlarge"].level == "warn"
    assert f"--quota-code L-warm --desired-value {wanted}" in low["warm pool quota ml.p5.4xlarge"].mend
    assert {check.level for check in enough.values()} == {"pass"} and len(enough) == 3


def test_endpoints(account: Any, contract: TenantContract) -> None:
    def there(services: Iterable[str], state: str = "available") -> dict[str, Any]:
        prefix = "com.amazonaws.us-east-1."
        return {"VpcEndpoints": [{"ServiceName": f"{prefix}{name}", "State": state} for name in services]}

    account.says(
        "ec2",
        "describe_vpc_endpoints",
        there(ENDPOINT_SERVICES),
        there(ENDPOINT_SERVICES[1:]),
        there(["kms"], "pending"),
    )
    assert one(account_checks.endpoints(account, contract))[0] == "pass"
    level, finding, mend = one(account_checks.endpoints(account, contract))
    assert (level, finding) == ("fail", "in vpc-1 not available: ecr.api (none)") and "test-acme-foundation" in mend
    assert "kms (pending)" in one(account_checks.endpoints(account, contract))[1]


def test_the_endpoints_asked_for_are_those_of_the_stacks() -> None:
    from stacks.constructs.network import INTERFACE_ENDPOINTS

    services = {item.short_name for item in INTERFACE_ENDPOINTS.values()} | {"s3"}
    assert set(ENDPOINT_SERVICES) == services


def test_file_system(account: Any, contract: TenantContract) -> None:
    def system(**told: Any) -> dict[str, Any]:
        return {"FileSystems": [{"FileSystemId": "fs-0123456789abcdef0", "StorageCapacity": 1200, **told}]}

    failed = system(Lifecycle="FAILED", FailureDetails={"Message": "no addresses"})
    account.says("fsx", "describe_file_systems", system(Lifecycle="AVAILABLE"), failed, system())
    found = [one(account_checks.file_system(account, contract)) for _ in range(3)]
    assert [level for level, *_ in found] == ["pass", "fail", "warn"]
    assert "is FAILED: no addresses" in found[1][1] and found[2][1].startswith("not known: ")


def test_the_images_digest_is_in_its_repository(account: Any, contract: TenantContract) -> None:
    account.says("ecr", "describe_images", {"imageDetails": [{"imageDigest": "sha256:ab"}]}, "ImageNotFoundException")
    assert one(account_checks.published(account, contract, IMAGE))[0] == "pass"
    level, finding, mend = one(account_checks.published(account, contract, IMAGE))
    assert level == "fail" and "is not in repository trainyard" in finding
    assert mend == "publish one: scripts/publish_image environments/test.yaml"
    none = IMAGE.partition("@")[0] + "@sha256:" + "0" * 64
    assert one(account_checks.published(account, contract, none))[0] == "warn", "the emulator's"


def test_roles_are_simulated_both_ways(account: Any, contract: TenantContract) -> None:
    other = contract.model_copy(update={"tenant": "globex"})
    decisions = ["allowed", "allowed", "implicitDeny", "explicitDeny", "implicitDeny", "allowed", "implicitDeny"]
    answers = [{"EvaluationResults": [{"EvalActionName": "s3:x", "EvalDecision": item}]} for item in decisions]
    account.says("iam", "simulate_principal_policy", *answers)
    found = list(account_checks.simulated(account, contract, other))
    assert [check.level for check in found] == ["pass"] * 5 + ["fail", "pass"]
    assert found[5].name == "acme: job role may not s3:GetObject" and found[5].mend


ALLOWED = {"EvalActionName": "s3:x", "EvalDecision": "allowed"}


def test_the_simulator_is_told_whose_the_resource_is_and_who_asks(account: Any, contract: TenantContract) -> None:
    told: list[dict[str, Any]] = []
    account.client("iam").meta.events.register(
        "provide-client-params.iam.SimulatePrincipalPolicy", lambda params, **_: told.append(params)
    )
    other = contract.model_copy(update={"tenant": "globex", "account": "999999999999"})
    account.says("iam", "simulate_principal_policy", *[{"EvaluationResults": [ALLOWED]}] * 7)
    list(account_checks.simulated(account, contract, other))
    stated = [{item["ContextKeyName"]: item["ContextKeyValues"] for item in ask["ContextEntries"]} for ask in told]
    assert [keys["aws:ResourceAccount"] for keys in stated] == [[contract.account]] * 5 + [["999999999999"]] * 2
    assert [keys["aws:PrincipalArn"] for keys in stated] == [[ask["PolicySourceArn"]] for ask in told]


@pytest.mark.parametrize("decision", ["allowed", "implicitDeny"])
def test_a_decision_without_every_key_that_the_policies_read_is_not_known(
    account: Any, contract: TenantContract, decision: str
) -> None:
    base = {**ALLOWED, "EvalDecision": decision}
    part = {"EvalResourceName": "x", "EvalResourceDecision": decision, "MissingContextValues": ["aws:PrincipalTag/a"]}
    answers = [{**base, "ResourceSpecificResults": [part]}, {**base, "MissingContextValues": ["s3:prefix"]}]
    account.says(
        "iam", "simulate_principal_policy", *[{"EvaluationResults": [item]} for item in [*answers, *[base] * 3]]
    )
    found = list(account_checks.simulated(account, contract, None))
    assert [check.level for check in found[:2]] == ["warn", "warn"]
    assert found[0].finding.startswith(f"not known: {decision} on ") and "aws:PrincipalTag/a" in found[0].finding
    assert found[1].finding.endswith("also read s3:prefix")
    assert len(found) == 5 and "warn" not in [check.level for check in found[2:]], "the rest is asked all the same"


@pytest.mark.parametrize("code", ["AccessDenied", "InternalFailure", "NotImplemented"])
def test_what_is_not_answered_is_said_and_never_passed(
    account: Any, contract: TenantContract, environment: EnvironmentSpec, code: str
) -> None:
    for service, operation in (
        *(("ssm", "get_parameter"), ("service-quotas", "list_service_quotas"), ("fsx", "describe_file_systems")),
        *(("ecr", "describe_images"), ("iam", "simulate_principal_policy")),
    ):
        account.says(service, operation, code)
    for operation in (
        *("describe_availability_zones", "describe_vpc_endpoint_services", "describe_instance_type_offerings"),
        "describe_vpc_endpoints",
    ):
        account.says("ec2", operation, code)
    asked: list[Callable[[], Iterable[Check]]] = [
        lambda: account_checks.of_environment(account, environment),
        lambda: account_checks.of_tenant(account, contract, None, IMAGE),
    ]
    found = [check for question in asked for check in question()]
    assert len(found) == 9
    for check in found:
        assert check.level == "warn" and check.finding.startswith("not known: ") and check.mend, check


def test_an_error_page_for_an_answer_is_not_known_either(contract: TenantContract) -> None:
    page = "<!doctype html> <html lang=en> <title>500 Internal Server Error</title>"
    errors = (
        ResponseParserError(f"invalid XML received: {page}"),
        ClientError({"Error": {"Code": "500", "Message": page}}, "SimulatePrincipalPolicy"),
    )
    for error in errors:

        def ask(error: Exception = error) -> Check:
            raise error

        check = account_checks.asked("x", ask, "iam:SimulatePrincipalPolicy")
        assert (check.level, check.finding) == (
            "warn",
            "not known: no answer but an error page to iam:SimulatePrincipalPolicy",
        )
        # Outside of the doctor it is one line too, and no traceback.
        words = r"^reading the trail: .*no answer but an error page[^<]*$"
        with pytest.raises(AwsRefusedError, match=words), aws_errors("reading", "the trail"):
            raise error
