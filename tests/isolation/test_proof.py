"""The proof on the real templates, and on templates in which somebody has made one mistake."""

from collections.abc import Callable
from typing import Any

import pytest

from trainyard.errors import JobFailedError
from trainyard.isolation import Proof, Site, prove

Alter = Callable[[Callable[[Any], None]], Site]

FOUNDATION = "trainyard-local-acme-foundation"
TRAINING = "trainyard-local-acme-training"
ROLE = "arn:aws:iam::123456789012:role/trainyard/local/globex/"


def resource(templates: Any, kind: str, beginning: str, stack: str = FOUNDATION) -> Any:
    found = [
        item
        for name, item in templates[stack]["Resources"].items()
        if item["Type"] == kind and name.startswith(beginning)
    ]
    assert len(found) == 1, f"{len(found)} of {kind} {beginning}"
    return found[0]["Properties"]


def statement(templates: Any, kind: str, beginning: str, sid: str, document: str = "PolicyDocument") -> Any:
    found = [item for item in resource(templates, kind, beginning)[document]["Statement"] if item.get("Sid") == sid]
    assert len(found) == 1, f"{len(found)} statements {sid} in {beginning}"
    return found[0]


def test_the_site_is_isolated_and_can_work(site: Site) -> None:
    proof = prove(site)
    assert (proof.allowed_cross_tenant, proof.denied_own, proof.open_guard_rails) == ((), (), ())
    assert proof.unknown_keys == ()
    assert proof.holds
    assert proof.pairs == 2
    assert proof.requests > 10_000


def test_every_kind_of_thing_is_asked_about(site: Site) -> None:
    from trainyard.isolation.crossings import Crossings

    kinds = {thing.kind for thing in site.account.things_of("globex")}
    assert {"bucket", "object", "key", "file system", "role", "queue", "parameter", "log group", "log stream"} <= kinds
    assert {"training job", "network", "network interface", "topic", "managed policy", "stack"} <= kinds
    own = {thing.kind for thing in site.account.things_of("acme")}
    assert {"cluster", "machine", "launch template", "instance profile"} <= own
    asked = {
        (question.principal, question.thing) for question in Crossings(site.account).all() if question.tenant == "acme"
    }
    for thing in site.account.things_of("globex"):
        for role in site.account.roles_of("acme"):
            assert (role.label, thing.name) in asked


def test_what_iam_cannot_hide_is_said(site: Site) -> None:
    shown = prove(site).unscopable
    (listing,) = [item for item in shown if item.startswith("sagemaker:ListTrainingJobs ")]
    assert {"auditor", "broker", "launcher", "operator"} <= set(listing.partition("(")[2].rstrip(")").split(", "))
    roles = "iam:ListRoles (broker)"  # which looks for the roles of jobs that are over
    assert [item for item in shown if item.startswith(("kms:", "s3:", "iam:", "logs:"))] == [roles]


def wide_data(templates: Any) -> None:
    statement(templates, "AWS::IAM::Policy", "PermissionsJob", "ReadData")["Resource"] = "*"


def one_folder(templates: Any) -> None:
    """No example of ours lies in that folder: the pattern itself must lead there."""
    statement(templates, "AWS::IAM::Policy", "PermissionsJob", "ReadData")["Resource"] = "arn:aws:s3:::*/secret-??/x*"


def all_jobs(templates: Any) -> None:
    found = statement(templates, "AWS::IAM::Policy", "PermissionsLauncher", "FollowJobs")
    found["Resource"] = "arn:aws:sagemaker:us-east-1:123456789012:training-job/*"


def all_logs(templates: Any) -> None:
    found = statement(templates, "AWS::IAM::Policy", "PermissionsAuditor", "ReadJobLogs")
    found["Resource"] = "arn:aws:logs:us-east-1:123456789012:log-group:/aws/sagemaker/TrainingJobs:log-stream:*"


def all_contracts(templates: Any) -> None:
    found = statement(templates, "AWS::IAM::Policy", "PermissionsLauncher", "ReadContract")
    found["Resource"] = "arn:aws:ssm:us-east-1:123456789012:parameter/trainyard/local/*"


def all_metrics(templates: Any) -> None:
    found = statement(templates, "AWS::IAM::Policy", "PermissionsJob", "WriteMetrics")
    found["Condition"]["StringLike"]["cloudwatch:namespace"] = "trainyard/*"


def foreign_subnets(templates: Any) -> None:
    found = resource(templates, "AWS::IAM::ManagedPolicy", "BoundaryPolicy")["PolicyDocument"]["Statement"]
    found[:] = [item for item in found if item["Sid"] != "JobsOwnSubnets"]


def foreign_files(templates: Any) -> None:
    found = resource(templates, "AWS::IAM::Policy", "PermissionsGuardRails")["PolicyDocument"]["Statement"]
    found[:] = [item for item in found if item["Sid"] != "OwnFileSystem"]


def any_broker(templates: Any) -> None:
    """The launcher may call every function, and nothing in the boundary is in the way."""
    statement(templates, "AWS::IAM::Policy", "PermissionsLauncher", "AskBroker")["Resource"] = "*"
    found = resource(templates, "AWS::IAM::ManagedPolicy", "BoundaryPolicy")["PolicyDocument"]["Statement"]
    own = next(item for item in found if item["Sid"] == "OwnThings")["NotResource"]
    own[:] = [arn if ":function:" not in str(arn) else "arn:aws:lambda:*:*:function:*" for arn in own]


def unlisted_action(templates: Any) -> None:
    """An action that the catalogue has never heard of, past a boundary that lets it."""
    found = statement(templates, "AWS::IAM::Policy", "PermissionsJob", "ReadData")
    found |= {"Action": ["s3:GetObject", "s3:ReadMinds"], "Resource": "*"}
    statement(templates, "AWS::IAM::ManagedPolicy", "BoundaryPolicy", "Services")["Action"].append("s3:ReadMinds")


OPENINGS = [
    (wide_data, "s3:GetObject", "acme's job", "PermissionsJob", "ReadData"),
    (one_folder, "s3:GetObject", "acme's job", "PermissionsJob", "ReadData"),
    (unlisted_action, "s3:ReadMinds", "acme's job", "PermissionsJob", "ReadData"),
    (all_jobs, "sagemaker:DescribeTrainingJob", "acme's launcher", "PermissionsLauncher", "FollowJobs"),
    (all_logs, "logs:GetLogEvents", "acme's auditor", "PermissionsAuditor", "ReadJobLogs"),
    (all_contracts, "ssm:GetParameter", "acme's launcher", "PermissionsLauncher", "ReadContract"),
    (all_metrics, "cloudwatch:PutMetricData", "acme's job", "PermissionsJob", "WriteMetrics"),
    (foreign_subnets, "sagemaker:CreateTrainingJob", "acme's broker", "PermissionsBroker", "CreateJobs"),
    (foreign_files, "sagemaker:CreateTrainingJob", "acme's broker", "PermissionsBroker", "CreateJobs"),
    (any_broker, "lambda:InvokeFunction", "acme's launcher", "PermissionsLauncher", "AskBroker"),
]


@pytest.mark.parametrize(("mistake", "action", "who", "policy", "sid"), OPENINGS)
def test_a_mistake_is_found_and_named(
    altered: Alter, mistake: Callable[[Any], None], action: str, who: str, policy: str, sid: str
) -> None:
    proof = prove(altered(mistake))
    assert not proof.holds
    found = [str(item) for item in proof.allowed_cross_tenant if item.action == action and item.target == "globex"]
    assert found
    assert all(text.startswith(f"{who}: {action} on ") for text in found)
    assert all(f"{FOUNDATION}/{policy}" in text and text.endswith(f"statement {sid}") for text in found)


def test_another_tenants_role_in_a_key_policy_is_found(altered: Alter) -> None:
    def edit(templates: Any) -> None:
        # Globex's key names acme's job role.
        other = "trainyard-local-globex-foundation"
        output = next(
            item["Export"]["Name"]
            for name, item in templates[FOUNDATION]["Outputs"].items()
            if "RolesJob" in name and "Arn" in name
        )
        key = resource(templates, "AWS::KMS::Key", "KeysData", other)
        readers = next(item for item in key["KeyPolicy"]["Statement"] if item["Sid"] == "Readers")
        readers["Principal"]["AWS"].append({"Fn::ImportValue": output})

    found = prove(altered(edit)).allowed_cross_tenant
    assert {(item.tenant, item.principal, item.target) for item in found} == {("acme", "job", "globex")}
    assert {item.action for item in found} == {"kms:Decrypt", "kms:DescribeKey"}
    assert all(item.decided_by[0].endswith("KeyPolicy statement Readers") for item in found)


def test_a_managed_policy_of_aws_may_allow_anything(altered: Alter) -> None:
    def edit(templates: Any) -> None:
        role = resource(templates, "AWS::IAM::Role", "RolesJob")
        role["ManagedPolicyArns"] = ["arn:aws:iam::aws:policy/AmazonSageMakerFullAccess"]

    found = prove(altered(edit)).allowed_cross_tenant
    assert any(item.action == "s3:GetObject" and "AmazonSageMakerFullAccess" in item.decided_by[0] for item in found)


def test_a_deny_all_is_no_proof(altered: Alter) -> None:
    def edit(templates: Any) -> None:
        policy = resource(templates, "AWS::IAM::ManagedPolicy", "BoundaryPolicy")
        policy["PolicyDocument"]["Statement"] = [{"Sid": "Shut", "Effect": "Deny", "Action": "*", "Resource": "*"}]

    proof = prove(altered(edit))
    assert proof.allowed_cross_tenant == ()
    assert not proof.holds
    assert {item.principal for item in proof.denied_own} == {
        "job",
        "launcher",
        "auditor",
        "operator",
        "broker",
        "each job",
        "RolesGuard",
        "RolesResumer",
        "RolesNodes",
        "RolesLogin",
    }
    assert all("statement Shut" in item.decided_by[0] for item in proof.denied_own)


def test_machines_that_cannot_do_a_jobs_work_are_seen(altered: Alter) -> None:
    """They may join the cluster and nothing else: the job role's rights are no answer for theirs."""

    def edit(templates: Any) -> None:
        policy = resource(templates, "AWS::IAM::Policy", "PermissionsNodes")["PolicyDocument"]
        policy["Statement"] = [item for item in policy["Statement"] if item["Sid"] == "JoinCluster"]

    denied = prove(altered(edit)).denied_own
    assert {item.principal for item in denied} == {"RolesNodes"}
    assert {"read its inputs", "write checkpoints", "write logs"} <= {item.stated for item in denied}


def test_a_misspelt_condition_key_is_said(altered: Alter) -> None:
    def edit(templates: Any) -> None:
        found = statement(templates, "AWS::IAM::ManagedPolicy", "BoundaryPolicy", "JobsNoShell")
        found["Condition"] = {"Bool": {"sagemaker:EnableRemoteDebugging": "true"}}

    proof = prove(altered(edit))
    assert proof.unknown_keys == ("sagemaker:enableremotedebugging",)
    assert any(item.stated == "sagemaker:enableremotedebug = true" for item in proof.open_guard_rails)
    assert not proof.holds


def test_a_policy_that_the_proof_would_not_read_stops_it(altered: Alter) -> None:
    def edit(templates: Any) -> None:
        everybody = {"Effect": "Allow", "Principal": "*", "Action": "*", "Resource": "*"}
        document = {"Version": "2012-10-17", "Statement": [everybody]}
        templates[TRAINING]["Resources"]["Vault"] = {
            "Type": "AWS::Backup::BackupVault",
            "Properties": {"AccessPolicy": document},
        }

    with pytest.raises(JobFailedError, match=r"AWS::Backup::BackupVault Vault has a policy in AccessPolicy"):
        altered(edit)


def test_an_intrinsic_without_a_value_stops_it(altered: Alter) -> None:
    def edit(templates: Any) -> None:
        found = statement(templates, "AWS::IAM::Policy", "PermissionsJob", "ReadData")
        found["Resource"] = {"Fn::FindInMap": ["A", "B", "C"]}

    with pytest.raises(JobFailedError, match=r"Fn::FindInMap has no value before deployment"):
        altered(edit)


def test_single_tenant_environments_have_no_pairs_and_still_needs(site: Site) -> None:
    from dataclasses import replace

    environment = site.account.environment
    alone = environment.model_copy(update={"tenants": {"acme": environment.tenant("acme")}})
    proof: Proof = prove(Site(replace(site.account, environment=alone), {}))
    assert (proof.pairs, proof.holds) == (0, True)
    assert proof.requests > 1000
