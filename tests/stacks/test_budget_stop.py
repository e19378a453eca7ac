"""The back-stop of a budget: what AWS Budgets may attach to whom, and that it can do nothing else."""

import json
from typing import Any

from ministack.core import iam_evaluator as iam

PLATFORM, TRAINING = "trainyard-production-platform", "trainyard-production-language-training"
HERE = "arn:aws:iam::777788889999"


def _of(template: dict[str, Any], kind: str, containing: str = "") -> dict[str, Any]:
    (found,) = [
        item["Properties"]
        for name, item in template["Resources"].items()
        if item["Type"] == kind and containing in name
    ]
    return dict(found)


def test_the_action_denies_jobs_to_whoever_submits_them(templates: dict[str, Any]) -> None:
    training = templates["production"][TRAINING]
    action = _of(training, "AWS::Budgets::BudgetsAction")
    assert (action["ActionType"], action["ApprovalModel"]) == ("APPLY_IAM_POLICY", "AUTOMATIC")
    assert action["ActionThreshold"] == {"Type": "PERCENTAGE", "Value": 100}
    applied = action["Definition"]["IamActionDefinition"]
    assert "RolesBroker" in json.dumps(applied["Roles"])
    assert "BudgetStopPolicy" in json.dumps(applied["PolicyArn"])
    policy = _of(training, "AWS::IAM::ManagedPolicy", "BudgetStop")
    assert policy["Path"] == "/trainyard/production/language/stop/"
    (statement,) = policy["PolicyDocument"]["Statement"]
    assert (statement["Effect"], statement["Resource"]) == ("Deny", "*")
    assert {"sagemaker:CreateTrainingJob", "batch:SubmitServiceJob"} == set(statement["Action"])


def test_the_actor_moves_stop_policies_and_nothing_else(templates: dict[str, Any]) -> None:
    role = _of(templates["production"][PLATFORM], "AWS::IAM::Role", "BudgetActor")
    trusted = role["AssumeRolePolicyDocument"]["Statement"][0]
    assert trusted["Principal"] == {"Service": "budgets.amazonaws.com"}
    assert trusted["Condition"]["StringEquals"] == {"aws:SourceAccount": "777788889999"}
    (own,) = role["Policies"]
    documents = [iam.parse_policy_document(own["PolicyDocument"])]

    def decide(action: str, role_name: str, policy_arn: str) -> str:
        context = iam.EvalContext(
            principal_arn=f"{HERE}:role/actor",
            principal_type="AssumedRole",
            principal_account="777788889999",
            action=action,
            resource_arn=f"{HERE}:role{role_name}",
            region="us-east-1",
            secure_transport=True,
            service_context={"iam:policyarn": policy_arn},
        )
        return str(iam.evaluate(context, documents).decision)

    stop, broker = f"{HERE}:policy/trainyard/production/language/stop/s", "/trainyard/production/language/broker/b"
    assert decide("iam:AttachRolePolicy", broker, stop) == "Allow"
    assert decide("iam:DetachRolePolicy", broker, stop) == "Allow"
    for action, to, what in (
        ("iam:AttachRolePolicy", broker, "arn:aws:iam::aws:policy/AdministratorAccess"),
        ("iam:AttachRolePolicy", broker, f"{HERE}:policy/trainyard/production/language/boundary"),
        ("iam:DetachRolePolicy", broker, f"{HERE}:policy/trainyard/production/language/other"),
        ("iam:AttachRolePolicy", "/Admin", stop),
        ("iam:AttachRolePolicy", "/trainyard/staging/a/broker/b", stop),
        ("iam:PutRolePolicy", broker, stop),
        ("iam:DeleteRolePermissionsBoundary", broker, stop),
    ):
        assert decide(action, to, what) == "ImplicitDeny", (action, to, what)


def test_without_a_percentage_nothing_is_stopped(templates: dict[str, Any]) -> None:
    for environment, stacks in templates.items():
        for stack, template in stacks.items():
            found = [name for name in template["Resources"] if name.startswith("BudgetStop")]
            assert bool(found) == (stack == TRAINING), (environment, stack, found)
