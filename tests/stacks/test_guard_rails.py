"""What a launcher or a broker may start, decided by an independent evaluator over the synthesized policies."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.functions.training_request import keep_alive_seconds, stopping_condition
from trainyard.hardware.instances import instance_types
from trainyard.spec.base import parse

STACK = "trainyard-local-acme-foundation"
JOB = "arn:aws:sagemaker:us-east-1:123456789012:training-job/acme-llama-20260101000000-0a1b"
EVERYTHING = {"Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}


def _proper(account: Any, tenant: str) -> dict[str, Any]:
    stack = f"trainyard-local-{tenant}-foundation"
    subnet = account.identifier(stack, account.only(stack, "AWS::EC2::Subnet", "Training"))
    group = account.identifier(stack, account.only(stack, "AWS::EC2::SecurityGroup", "TrainingGroup"))
    return {
        "sagemaker:VpcSubnets": [subnet],
        "sagemaker:VpcSecurityGroupIds": [f"{group}.GroupId"],
        "sagemaker:InstanceTypes": ["ml.p5.4xlarge"],
        "sagemaker:OutputKmsKeyArn": account.arn(stack, account.only(stack, "AWS::KMS::Key", "KeysCheckpoints")),
        "sagemaker:MaxRuntimeInSeconds": "86400",
        "sagemaker:EnableRemoteDebug": "false",
        "aws:RequestTag/trainyard:tenant": tenant,
    }


@pytest.fixture(scope="module")
def proper_job(account: Any) -> dict[str, Any]:
    """The condition keys of a job that follows every rule: of acme, whose launcher submits."""
    return _proper(account, "acme")


@pytest.fixture(scope="module")
def brokered_job(account: Any) -> dict[str, Any]:
    """The same of globex, whose broker submits."""
    return _proper(account, "globex")


def test_a_job_that_follows_the_rules_starts(
    proper_job: dict[str, Any], brokered_job: dict[str, Any], decide: Callable[..., str]
) -> None:
    assert decide("acme", "Launcher", "sagemaker:CreateTrainingJob", JOB, keys=proper_job) == "Allow"
    job = JOB.replace("acme", "globex")
    assert decide("globex", "Broker", "sagemaker:CreateTrainingJob", job, keys=brokered_job) == "Allow"


@pytest.mark.parametrize("role", ["Launcher", "Operator", "Job", "Guard"])
def test_nobody_but_the_broker_starts_one_whatever_else_is_attached(
    role: str, brokered_job: dict[str, Any], decide: Callable[..., str]
) -> None:
    action, job = "sagemaker:CreateTrainingJob", JOB.replace("acme", "globex")
    assert decide("globex", role, action, job, keys=brokered_job, extra_policy=EVERYTHING) == "Deny"
    for tenant, expected in (("globex", "Allow"), ("acme", "Deny")):
        function = f"arn:aws:lambda:us-east-1:123456789012:function:trainyard-local-{tenant}-broker"
        assert decide("globex", role, "lambda:InvokeFunction", function, extra_policy=EVERYTHING) == expected


CHANGES = {
    "no VPC": {"sagemaker:VpcSubnets": None},
    "a second, foreign subnet": {"sagemaker:VpcSubnets": ["own", "subnet-foreign"]},
    "no security group": {"sagemaker:VpcSecurityGroupIds": None},
    "a foreign security group": {"sagemaker:VpcSecurityGroupIds": ["sg-foreign"]},
    "no instance type": {"sagemaker:InstanceTypes": None},
    "a type of no queue": {"sagemaker:InstanceTypes": ["ml.p5.48xlarge"]},
    "an allowed type and another": {"sagemaker:InstanceTypes": ["ml.p5.4xlarge", "ml.p5.48xlarge"]},
    "no output key": {"sagemaker:OutputKmsKeyArn": None},
    "another tenant's output key": {"sagemaker:OutputKmsKeyArn": "arn:aws:kms:us-east-1:123456789012:key/other"},
    "another tenant's volume key": {"sagemaker:VolumeKmsKeyArn": "arn:aws:kms:us-east-1:123456789012:key/other"},
    "no running time": {"sagemaker:MaxRuntimeInSeconds": None},
    "too long": {"sagemaker:MaxRuntimeInSeconds": "86401"},
    "no tag": {"aws:RequestTag/trainyard:tenant": None},
    "another tenant's tag": {"aws:RequestTag/trainyard:tenant": "globex"},
    "a shell": {"sagemaker:EnableRemoteDebug": "true"},
    "machines kept warm": {"sagemaker:KeepAlivePeriod": "1"},
}


@pytest.mark.parametrize("attached", [None, EVERYTHING], ids=["own policies", "plus an administrator's"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_job_that_breaks_one_rule_is_denied_whatever_else_is_attached(
    change: str, attached: Any, proper_job: dict[str, Any], decide: Callable[..., str]
) -> None:
    subnet = proper_job["sagemaker:VpcSubnets"][0]
    altered = {**proper_job, **CHANGES[change]}
    keys = {key: value for key, value in altered.items() if value is not None}
    keys["sagemaker:VpcSubnets"] = [subnet if s == "own" else s for s in keys.get("sagemaker:VpcSubnets", [])]
    if not keys["sagemaker:VpcSubnets"]:
        del keys["sagemaker:VpcSubnets"]
    action = "sagemaker:CreateTrainingJob"
    assert decide("acme", "Launcher", action, JOB, keys=keys, extra_policy=attached) == "Deny"


def test_a_gpu_job_needs_no_volume_key_and_a_type_without_nvme_does(synthesize: Any, environments: Any) -> None:
    """A volume key is refused by types with local NVMe: a rule that demands it of all would forbid GPU training."""
    local = environments["local"].model_dump(mode="json")
    ebs_only = {"instance_types": ["ml.p5.4xlarge", "ml.inf2.24xlarge"], "max_instances": 1, "multi_node": False}
    local["max_instances"]["ml.inf2.24xlarge"] = 1
    local["tenants"] = {"acme": {**local["tenants"]["acme"], "queues": {"gpu": ebs_only}}}
    statements = _boundary(synthesize(type(environments["local"]).model_validate(local))[STACK])
    condition = next(s["Condition"] for s in statements if s["Sid"] == "JobsSayVolumeKey")
    assert condition == {
        "Null": {"sagemaker:VolumeKmsKeyArn": "true"},
        "ForAnyValue:StringEquals": {"sagemaker:InstanceTypes": ["ml.inf2.24xlarge"]},
    }


def test_no_rule_on_volume_keys_where_every_type_has_nvme(foundation: dict[str, Any]) -> None:
    assert "JobsSayVolumeKey" not in {s["Sid"] for s in _boundary(foundation)}


def _boundary(template: dict[str, Any]) -> list[dict[str, Any]]:
    (policy,) = [item for item in template["Resources"].values() if item["Type"] == "AWS::IAM::ManagedPolicy"]
    statements: list[dict[str, Any]] = policy["Properties"]["PolicyDocument"]["Statement"]
    return statements


@pytest.mark.parametrize("role", ["Job", "Launcher", "Auditor"])
@pytest.mark.parametrize(
    ("action", "resource"),
    [
        ("batch:SubmitServiceJob", "arn:aws:batch:us-east-1:123456789012:job-queue/any"),
        ("sts:AssumeRole", "arn:aws:iam::123456789012:role/trainyard/local/globex/any"),
        ("iam:PassRole", "arn:aws:iam::123456789012:role/trainyard/local/globex/any"),
        ("iam:PassRole", "arn:aws:iam::123456789012:role/Admin"),
        ("iam:PutRolePolicy", "arn:aws:iam::123456789012:role/trainyard/local/acme/any"),
        ("kms:PutKeyPolicy", "arn:aws:kms:us-east-1:123456789012:key/any"),
        ("s3:PutBucketPolicy", "arn:aws:s3:::any"),
        ("sagemaker:CreateProcessingJob", "arn:aws:sagemaker:us-east-1:123456789012:processing-job/acme-x"),
        ("sagemaker:UpdateTrainingJob", JOB),
        ("ssm:PutParameter", "arn:aws:ssm:us-east-1:123456789012:parameter/trainyard/local/image"),
    ],
)
def test_an_administrators_policy_on_a_tenants_role_opens_no_way_round(
    role: str, action: str, resource: str, decide: Callable[..., str]
) -> None:
    assert decide("acme", role, action, resource, extra_policy=EVERYTHING) in {"Deny", "ImplicitDeny"}


def test_the_unchecked_queue_is_denied_by_name(decide: Callable[..., str]) -> None:
    """Not only absent from the boundary's list: a wildcard that somebody adds to the list must not let it in."""
    queue = "arn:aws:batch:us-east-1:123456789012:job-queue/any"
    assert decide("acme", "Launcher", "batch:SubmitServiceJob", queue, extra_policy=EVERYTHING) == "Deny"


def test_objects_go_to_no_other_account(decide: Callable[..., str]) -> None:
    """The evaluator takes aws:ResourceAccount from the ARN, and of S3's only access points carry an account."""
    arguments = ("acme", "Job", "s3:PutObject")
    access_point = "arn:aws:s3:us-east-1:{}:accesspoint/shared/object/jobs/x"
    assert decide(*arguments, access_point.format("123456789012"), extra_policy=EVERYTHING) == "Allow"
    assert decide(*arguments, access_point.format("999900001111"), extra_policy=EVERYTHING) == "Deny"


def test_every_role_of_a_tenant_is_under_the_boundary(templates: dict[str, Any]) -> None:
    """Whatever stack it is in, the flow logs' writer included."""
    for stacks in templates.values():
        for stack, template in stacks.items():
            if stack.endswith("-platform"):
                continue
            for name, item in template["Resources"].items():
                if item["Type"] in {"AWS::IAM::Role", "AWS::IAM::User"}:
                    limit = json.dumps(item["Properties"].get("PermissionsBoundary", ""))
                    assert "BoundaryPolicy" in limit, f"{stack} {name}"


def test_only_job_roles_lie_where_roles_may_be_passed_from(account: Any) -> None:
    roles = account.resources(STACK, "AWS::IAM::Role")
    passable = {name for name, role in roles.items() if role["Path"].startswith("/trainyard/local/acme/jobs/")}
    assert passable == {account.only(STACK, "AWS::IAM::Role", "RolesJob")}


def test_a_boundary_too_long_for_iam_is_refused_before_a_deployment(
    synthesize: Callable[..., Any], environments: dict[str, Any]
) -> None:
    """A tenant that queues has a queue and a share there for each type; nothing is synthesized."""
    kinds = [f"ml.{kind}" for kind in sorted(instance_types())]
    local = environments["local"].model_dump(mode="json")
    local["max_instances"] = dict.fromkeys(kinds, 1)
    queue = {"instance_types": kinds, "max_instances": 1, "multi_node": False}
    local["tenants"] = {"acme": {**local["tenants"]["acme"], "submission": "queue", "queues": {"gpu": queue}}}
    with pytest.raises(
        InputError, match=r"tenants\.acme: with \d+ instance types and 0 training plans .* IAM takes 6,144"
    ) as caught:
        synthesize(type(environments["local"]).model_validate(local))
    assert "\n" not in str(caught.value)


def test_policies_fit_into_iam(templates: dict[str, Any]) -> None:
    """IAM counts no white space: 6,144 characters a managed policy, 10,240 all inline policies of a role."""
    references = {"Ref": "x" * 40, "Fn::GetAtt": "x" * 75, "Fn::ImportValue": "x" * 75}

    def length(document: Any) -> int:
        def flat(value: Any) -> Any:
            if isinstance(value, dict):
                if len(value) == 1 and (found := references.get(next(iter(value)))):
                    return found
                if "Fn::Join" in value:
                    return "".join(flat(part) for part in value["Fn::Join"][1])
                return {key: flat(item) for key, item in value.items()}
            return [flat(item) for item in value] if isinstance(value, list) else value

        return len(json.dumps(flat(document), separators=(",", ":")))

    for stacks in templates.values():
        for template in stacks.values():
            inline: dict[str, int] = {}
            for item in template["Resources"].values():
                if item["Type"] == "AWS::IAM::ManagedPolicy":
                    assert length(item["Properties"]["PolicyDocument"]) <= 6144
                if item["Type"] == "AWS::IAM::Policy":
                    (role,) = item["Properties"]["Roles"]
                    inline[role["Ref"]] = inline.get(role["Ref"], 0) + length(item["Properties"]["PolicyDocument"])
            assert max(inline.values(), default=0) <= 10240, inline


ALONE = {
    "queued": ({"submission": "queue", "warm_pool_minutes": 5}, "submission: queue AWS Batch counts the machines"),
    "isolated": ({"submission": "broker", "job_isolation": "role", "warm_pool_minutes": 5}, "each has its own"),
    "direct": ({"submission": "direct", "job_isolation": "role"}, "the broker makes the jobs' roles"),
    "no such type": (
        {"training_plans": {"spring": {"instance_type": "ml.p5.48xlarge", "max_instances": 1}}},
        "training_plans.spring: no queue of the tenant offers ml.p5.48xlarge",
    ),
    "no name": ({"training_plans": {"a_b": {"instance_type": "ml.p5.4xlarge", "max_instances": 1}}}, "is no training"),
}


@pytest.mark.parametrize("case", ALONE)
def test_settings_that_exclude_each_other_are_refused_in_one_line(case: str, environments: dict[str, Any]) -> None:
    changes, words = ALONE[case]
    content = environments["local"].model_dump(mode="json")
    content["tenants"]["acme"] |= changes
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        parse(type(environments["local"]), content, "environment.yaml")
    assert "\n" not in str(caught.value)


def test_a_training_plan_is_one_tenants_and_its_jobs_may_run_on_it(
    synthesize: Callable[..., Any], environments: dict[str, Any]
) -> None:
    content = environments["local"].model_dump(mode="json")
    plan = {"spring": {"instance_type": "ml.p5.4xlarge", "max_instances": 1}}
    content["tenants"]["acme"]["training_plans"] = plan
    template = synthesize(type(environments["local"]).model_validate(content))[STACK]
    arn = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/spring"
    assert arn in next(s for s in _boundary(template) if s["Sid"] == "OwnThings")["NotResource"]
    launcher = next(item for name, item in template["Resources"].items() if name.startswith("PermissionsLauncher"))
    create = next(s for s in launcher["Properties"]["PolicyDocument"]["Statement"] if s["Sid"] == "CreateJobs")
    assert arn in create["Resource"]
    content["tenants"]["globex"]["training_plans"] = plan
    with pytest.raises(InputError, match="acme and globex's; a plan is one tenant's"):
        parse(type(environments["local"]), content, "environment.yaml")


@pytest.mark.parametrize("engine", ["pcs", "hyperpod"])
def test_a_tenant_that_asks_for_everything_has_a_boundary_that_iam_takes(
    engine: str, environments: dict[str, Any]
) -> None:
    """With a name as long as can be, five types, three plans, tracking, a cluster and roles of single jobs."""
    from aws_cdk import App, Stack

    from stacks.constructs.guard_rails import TenantBoundary
    from stacks.constructs.network import TenantNetwork
    from stacks.naming import TenantScope

    kinds = ["ml.p5.48xlarge", "ml.p5en.48xlarge", "ml.p4d.24xlarge", "ml.g6e.12xlarge", "ml.inf2.24xlarge"]
    machine, login = {"instance_type": "p5.48xlarge", "max_instances": 2}, {"instance_type": "m6i.xlarge"}
    cluster: dict[str, Any] = {"engine": engine, "node_groups": {"train": machine}, "login": login}
    cluster |= (
        {"slurm_version": "25.05", "ami": "ami-0123456789abcdef0", "root_device": "/dev/xvda", "small_files": {}}
        if engine == "pcs"
        else {"controller": login}
    )
    content = environments["production"].model_dump(mode="json")
    tenant = {
        **content["tenants"]["adapters"],
        "submission": "broker",
        "job_isolation": "key",
        "share": {},
        "tracking": {},
        "cluster": cluster,
        "queues": {"all": {"instance_types": kinds, "max_instances": 1, "multi_node": False}},
        "training_plans": {f"spring-{n}": {"instance_type": kinds[0], "max_instances": 1} for n in range(3)},
    }
    content |= {"tenants": {"a" * 20: tenant}, "max_instances": dict.fromkeys(kinds, 1)}
    scope = TenantScope(type(environments["local"]).model_validate(content), "a" * 20)
    context = {"@aws-cdk/aws-iam:minimizePolicies": True}
    stack = Stack(App(analytics_reporting=False, context=context), "Stack")
    TenantBoundary(stack, "Boundary", tenant=scope, network=TenantNetwork(stack, "Network", tenant=scope))


def test_policies_that_iam_would_not_take_together_are_refused_before_deployment(
    environments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one role all together: acme's launcher has its own and the rails, of which neither alone is too long here."""
    from aws_cdk import App

    from stacks.constructs import permissions
    from stacks.environment import deploy_environment

    monkeypatch.setattr(permissions, "MAX_INLINE_CHARACTERS", 7_000)
    with pytest.raises(InputError, match=r"tenants\.acme: .* launcher role would have 7,\d{3} characters"):
        deploy_environment(App(analytics_reporting=False), environments["local"], ["acme"])


def test_references_are_counted_as_long_as_what_they_refer_to(environments: dict[str, Any]) -> None:
    from stacks.constructs.guard_rails import policy_characters
    from stacks.naming import TenantScope

    scope = TenantScope(environments["local"], "acme")
    place = "us-east-1:123456789012"
    name = f"{STACK}-LogsGroupC0AB86A9-a1b2c3d4e5f6g"
    deployed: dict[str, tuple[dict[str, Any], str]] = {
        "log group": ({"Ref": "LogsGroupC0AB86A9"}, name),
        "log group's ARN": ({"Fn::GetAtt": ["LogsGroupC0AB86A9", "Arn"]}, f"arn:aws:logs:{place}:log-group:{name}:*"),
        "key": ({"Fn::GetAtt": ["KeysData1", "Arn"]}, f"arn:aws:kms:{place}:key/" + "k" * 36),
        "bucket": ({"Fn::GetAtt": ["StorageData1", "Arn"]}, "arn:aws:s3:::" + "b" * 63),
        "repository": ({"Fn::ImportValue": "x"}, f"arn:aws:ecr:{place}:repository/trainyard-local"),
        "file system": ({"Ref": "FileSystem8A8E25C0"}, "fs-0123456789abcdef0"),
        "role": ({"Fn::GetAtt": ["RolesJob1", "Arn"]}, "arn:aws:iam::123456789012:role/" + "r" * 64),
    }
    for what, (reference, text) in deployed.items():
        counted = policy_characters({"Resource": {"Fn::Join": ["", [reference, "/*"]]}}, scope)
        assert 0 <= counted - len(json.dumps({"Resource": f"{text}/*"}, separators=(",", ":"))) < 40, what


def test_rails_and_requests_round_a_time_alike(environments: dict[str, Any]) -> None:
    """A job of exactly the tenant's most is no job over it: 8.2 h are 29,519.999... s in floating point."""
    environment = environments["local"]
    tenant = environment.tenant("acme").model_copy(update={"max_job_hours": 8.2, "warm_pool_minutes": 8.2})
    environment = environment.model_copy(update={"tenants": {**environment.tenants, "acme": tenant}})
    from stacks.naming import TenantScope

    scope, compute = TenantScope(environment, "acme"), {"spot": False, "max_hours": 8.2, "keep_alive_minutes": 8.2}
    assert scope.max_runtime_seconds == stopping_condition(compute)["MaxRuntimeInSeconds"] == 29_520
    assert scope.warm_pool_seconds == keep_alive_seconds(compute) == 492
