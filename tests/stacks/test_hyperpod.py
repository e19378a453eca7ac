"""The same cluster by another engine: SageMaker HyperPod, held by the same rules, reached by its own kind of target."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.hardware.base_prices import base_cost
from trainyard.isolation.crossings import Crossings
from trainyard.isolation.evaluator import decide
from trainyard.isolation.mutants import OWN_ONLY, REFUSES_MORE
from trainyard.isolation.proof import prove, resolve_templates
from trainyard.isolation.questions import Scope
from trainyard.isolation.templates import Deployment
from trainyard.operate.stateful import deployed_first, losses, refuse_dropped_exports
from trainyard.spec.base import parse
from trainyard.spec.platform import EnvironmentSpec, parse_contract

FOUNDATION, STACK = "trainyard-local-acme-foundation", "trainyard-local-acme-training"
GROUPS: dict[str, Any] = {
    "h100": {"instance_type": "p5.48xlarge", "max_instances": 2, "training_plan": "spring"},
    "spare": {"instance_type": "g6e.12xlarge", "max_instances": 2, "min_instances": 1},
}
CLUSTER: dict[str, Any] = {
    "engine": "hyperpod",
    "controller": {"instance_type": "m5.xlarge"},
    "node_groups": GROUPS,
    "queues": {"train": ["h100"], "try-out": ["spare"]},
    "login": {"instance_type": "m5.large"},
    "start_script": "start.sh",
}


def with_cluster(environment: Any, **changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = environment.model_dump(mode="json")
    for tenant in content["tenants"].values():
        tenant["cluster"] = {**CLUSTER, **changes}
    content["tenants"]["globex"]["submission"] = "direct"
    return content


@pytest.fixture(scope="module")
def environment(environments: dict[str, Any]) -> EnvironmentSpec:
    return EnvironmentSpec.model_validate(with_cluster(environments["local"]))


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hyperpod")


@pytest.fixture(scope="module")
def made(assembly: Path, environment: EnvironmentSpec, synthesize_checked: Any) -> dict[str, Any]:
    """Both tenants on HyperPod; made with the checks on."""
    return dict(synthesize_checked(assembly, environment))


@pytest.fixture(scope="module")
def cluster(made: dict[str, Any]) -> dict[str, Any]:
    return only(made, "SageMaker::Cluster")


def only(made: dict[str, Any], kind: str, stack: str = STACK) -> dict[str, Any]:
    deployment = Deployment(made, "123456789012", "us-east-1")
    (found,) = (item for item in made[stack]["Resources"].values() if item["Type"] == f"AWS::{kind}")
    return dict(deployment.resolve(found["Properties"], stack))


def test_every_check_passes(made: dict[str, Any], assembly: Path) -> None:
    from cfnlint.api import lint
    from cfnlint.config import ManualArgs

    from stacks.checks import findings

    assert made and ("" if not (assembly / "refused").exists() else findings(assembly)) == ""
    matches = lint(json.dumps(made[STACK]), config=ManualArgs(regions=["us-east-1"]))
    assert [str(match) for match in matches if match.rule.id.startswith("E")] == []


def test_it_stands_in_the_tenants_network_with_controller_login_node_and_partitions(
    made: dict[str, Any], cluster: dict[str, Any]
) -> None:
    contract = parse_contract(only(made, "SSM::Parameter")["Value"], "contract")
    assert cluster["VpcConfig"] == {
        "Subnets": list(contract.subnet_ids),
        "SecurityGroupIds": list(contract.security_group_ids),
    }
    assert cluster["Orchestrator"] == {"Slurm": {"SlurmConfigStrategy": "Managed"}}
    groups = {group["InstanceGroupName"]: group for group in cluster["InstanceGroups"]}
    assert {name: (group["InstanceType"], group["InstanceCount"]) for name, group in groups.items()} == {
        "controller": ("ml.m5.xlarge", 1),
        "login": ("ml.m5.large", 1),
        "h100": ("ml.p5.48xlarge", 2),
        "spare": ("ml.g6e.12xlarge", 2),
    }
    assert {name: group["SlurmConfig"] for name, group in groups.items()} == {
        "controller": {"NodeType": "Controller"},
        "login": {"NodeType": "Login"},
        "h100": {"NodeType": "Compute", "PartitionNames": ["train"]},
        "spare": {"NodeType": "Compute", "PartitionNames": ["try-out"]},
    }
    assert (
        groups["h100"]["TrainingPlanArn"].endswith("training-plan/spring") and "TrainingPlanArn" not in groups["spare"]
    )
    assert groups["h100"]["NetworkInterface"] == {"InterfaceType": "efa"}


def test_its_name_is_stated_for_its_logs_and_its_logical_id_pinned(
    made: dict[str, Any], cluster: dict[str, Any]
) -> None:
    assert cluster["ClusterName"] == "trainyard-local-acme", "policies name its log groups by it"
    (name,) = (name for name, item in made[STACK]["Resources"].items() if item["Type"] == "AWS::SageMaker::Cluster")
    assert name == "Cluster3DA9CCBA", "a new logical id is a new cluster"


def test_disks_are_under_the_tenants_key_and_lustre_is_mounted(made: dict[str, Any], cluster: dict[str, Any]) -> None:
    contract = parse_contract(only(made, "SSM::Parameter")["Value"], "contract")
    base = "arn:aws:iam::123456789012:role/trainyard/local/acme/trainyard-local-acme-"
    for group in cluster["InstanceGroups"]:
        root, more, lustre = group["InstanceStorageConfigs"]
        assert root["EbsVolumeConfig"] == {"RootVolume": True, "VolumeKmsKeyId": contract.keys.checkpoints}
        assert more["EbsVolumeConfig"]["VolumeKmsKeyId"] == contract.keys.checkpoints
        assert lustre["FsxLustreConfig"]["MountName"] == contract.file_system.mount_name
        assert lustre["FsxLustreConfig"]["MountPath"] == "/fsx"
        kind = "nodes" if group["InstanceGroupName"] in GROUPS else "login"
        assert group["ExecutionRole"] == f"{base}{kind}"
        scripts = {"SourceS3Uri": f"s3://{contract.buckets.data}/cluster/", "OnInitComplete": "start.sh"}
        assert group["LifeCycleConfig"] == scripts


def test_the_roles_are_there_by_the_names_that_it_states(made: dict[str, Any], cluster: dict[str, Any]) -> None:
    deployment = Deployment(made, "123456789012", "us-east-1")
    roles = [name for name, item in made[FOUNDATION]["Resources"].items() if item["Type"] == "AWS::IAM::Role"]
    stated = {group["ExecutionRole"] for group in cluster["InstanceGroups"]}
    assert stated <= {deployment.arn(FOUNDATION, name) for name in roles}
    for name in roles:
        if deployment.arn(FOUNDATION, name) in stated:
            properties = made[FOUNDATION]["Resources"][name]["Properties"]
            assert "PermissionsBoundary" in properties and "ManagedPolicyArns" not in properties


def test_isolation_holds(made: dict[str, Any], environment: EnvironmentSpec) -> None:
    proof = prove(resolve_templates(made, environment))
    found = (proof.allowed_cross_tenant, proof.denied_own, proof.open_guard_rails, proof.unknown_keys)
    assert found == ((), (), (), ())


def test_shells_and_tags_are_held_by_the_boundary_whatever_is_attached(
    made: dict[str, Any], environment: EnvironmentSpec, railed: Any
) -> None:
    assert railed(made, environment, {"ShellOwnMachine", "TagOnlyNew"}) == 7


BOUNDARY, WIDENED = "still refused by the permissions boundary", "action widened to *"
CONDITION, ANY = "still refused by a condition of the Allow", "resource widened to *"
SURVIVORS = {
    **{(sid, WIDENED): BOUNDARY for sid in ("FindScript", "FetchScript", "LeaveInterfaces")},
    ("ShellOwnMachine", "removed"): CONDITION,
    ("ShellOwnMachine", ANY): REFUSES_MORE,
    ("TagOnlyNew", "removed"): CONDITION,
    # The tenant's own data bucket: more of its listing, never an object.
    ("FindScript", "condition dropped: StringLike s3:prefix"): OWN_ONLY,
    ("TagInterfaces", "condition dropped: StringEquals ec2:CreateAction"): BOUNDARY,
    # Held by its condition on the VPC, as LeaveNetwork is.
    ("LeaveInterfaces", ANY): OWN_ONLY,
    # Held by its condition: whatever has a VPC isn't meant.
    ("LeaveMachines", ANY): OWN_ONLY,
    # Held by the condition on the cluster's tag.
    ("FindMachines", ANY): OWN_ONLY,
    ("FindMachines", WIDENED): BOUNDARY,
    ("OpenMachineShell", WIDENED): BOUNDARY,
    ("OpenMachineShell", "condition dropped: StringEquals aws:ResourceTag/trainyard:tenant"): BOUNDARY,
    # Other documents than the shell's are closed by name, in the boundary and by the launcher's own policy.
    ("OpenMachineShell", "condition dropped: BoolIfExists ssm:SessionDocumentAccessCheck"): OWN_ONLY,
    ("OpenMachineShell", "all conditions dropped"): BOUNDARY,
    ("ShellDocument", WIDENED): BOUNDARY,
    # An endpoint allows nothing that the caller's policies don't.
    ("TakeSessions", WIDENED): OWN_ONLY,
    ("MachineLogs", WIDENED): f"{OWN_ONLY}; {BOUNDARY}",
}
"""What a break of a statement for HyperPod doesn't open, and the guard that still refuses."""


def test_a_broken_statement_is_seen_or_explained(
    made: dict[str, Any], environment: EnvironmentSpec, survivors: Any
) -> None:
    machines = {"FindScript", "FetchScript", "DecryptScript", "TagInterfaces", "LeaveInterfaces", "LeaveMachines"}
    machines |= {"MachineLogs", "MachineMetrics", "TakeSessions", "TagOnlyNew"}
    people = {"FindMachines", "OpenMachineShell", "ShellDocument", "UseOwnSessions", "ShellOwnMachine"}
    assert survivors(made, environment, machines | people) == SURVIVORS


def test_a_shell_on_anothers_cluster_is_found(made: dict[str, Any], environment: EnvironmentSpec) -> None:
    """Somebody drops the condition on the tag from the launcher, and the boundary's rule behind it."""

    def crossing() -> set[tuple[str, str]]:
        account = resolve_templates(made, environment).account
        asked = Crossings(account, Scope(actions=frozenset({"ssm:StartSession"}))).all()
        return {(item.tenant, item.target) for item in asked if decide(item.request).allowed}

    assert crossing() == set()
    kept = json.dumps(made)
    for item in made[FOUNDATION]["Resources"].values():
        if item["Type"] in {"AWS::IAM::Policy", "AWS::IAM::ManagedPolicy"}:
            statements = item["Properties"]["PolicyDocument"]["Statement"]
            statements[:] = [one for one in statements if one.get("Sid") != "ShellOwnMachine"]
            for one in statements:
                if one.get("Sid") == "OpenMachineShell":
                    del one["Condition"]
    found = crossing()
    made.clear()
    made.update(json.loads(kept))
    assert ("acme", "globex") in found


def test_it_comes_and_goes_in_place_and_its_loss_is_asked_about(
    made: dict[str, Any], templates: dict[str, dict[str, Any]]
) -> None:
    assert losses(templates["local"], made) == []
    assert "AWS::SageMaker::Cluster" in {loss.kind for loss in losses(made, templates["local"])}
    first = deployed_first(made, templates["local"])
    assert STACK in first
    refuse_dropped_exports(made, templates["local"], first)
    text = json.dumps(made[STACK])
    for name in ("RolesNodes", "RolesLogin"):
        assert f"ExportsOutputFnGetAtt{name}" not in text, "an import that would keep it from being taken away"


def test_the_contract_and_the_price_say_what_it_is(made: dict[str, Any]) -> None:
    contract = parse_contract(only(made, "SSM::Parameter")["Value"], "contract")
    assert contract.version == 4 and contract.cluster is not None
    assert (contract.cluster.engine, contract.cluster.login_tag) == ("hyperpod", "login")
    assert contract.cluster.id.startswith("arn:aws:sagemaker:us-east-1:123456789012:cluster/")
    assert contract.cluster.queues == {"train": ("p5.48xlarge",), "try-out": ("g6e.12xlarge",)}
    cost = base_cost([made[STACK]], "us-east-1")
    hours = {line.item: line.quantity for line in cost.lines if line.item.startswith("hyperpod-")}
    assert hours["hyperpod-ml.p5.48xlarge"] == 2 * 730, "machines run all the time"
    assert set(hours) <= set(cost.unknown), "no dated price is known"


def test_the_emulator_records_it_and_says_so() -> None:
    from trainyard.emulator.cloudformation.catalogue import describe_types

    assert describe_types()["AWS::SageMaker::Cluster"] == "recorded-only"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"controller": None}, "controller: engine hyperpod needs it"),
        ({"engine": "pcs"}, "slurm_version: engine pcs needs it"),
        ({"ami": "ami-0123456789abcdef0"}, "ami: engine hyperpod has no such setting"),
        ({"small_files": {}}, "small_files: engine hyperpod has no such setting"),
        (
            {
                "node_groups": {"abc": {"instance_type": "g6e.12xlarge", "max_instances": 1, "purchase": "spot"}},
                "queues": {},
            },
            "node_groups.abc: engine hyperpod places and buys its machines itself",
        ),
        ({"queues": {"train": ["h100"], "all": ["h100", "spare"]}}, "queues train and all: both name h100"),
        (
            {"node_groups": {"controller": {"instance_type": "g6e.12xlarge", "max_instances": 1}}, "queues": {}},
            "node_groups.controller: is the controller's own",
        ),
        ({"start_script": "../start.sh"}, "start_script"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    changes: dict[str, Any], words: str, environments: dict[str, Any]
) -> None:
    with pytest.raises(InputError) as error:
        parse(EnvironmentSpec, with_cluster(environments["local"], **changes), "environment.yaml")
    assert words in str(error.value) and "\n" not in str(error.value)
