"""A tenant's cluster: none unless asked for, every network card wired, closed to everybody but the tenant."""

import base64
import json
from typing import Any

import pytest

from stacks.preflight import check_environment
from trainyard.errors import InputError
from trainyard.hardware.base_prices import base_cost
from trainyard.isolation.proof import prove, resolve_templates
from trainyard.isolation.templates import Deployment
from trainyard.operate.stateful import losses
from trainyard.spec.base import parse
from trainyard.spec.platform import EnvironmentSpec

FOUNDATION, STACK = "trainyard-local-acme-foundation", "trainyard-local-acme-training"
GROUPS: dict[str, dict[str, Any]] = {
    "block": {
        "instance_type": "p5.48xlarge",
        "max_instances": 2,
        "purchase": "capacity_block",
        "reservation": "cr-0123456789abcdef0",
    },
    "reserved": {
        "instance_type": "p6-b300.48xlarge",
        "min_instances": 1,
        "max_instances": 2,
        "reservation": "cr-0fedcba9876543210",
    },
    "spare": {"instance_type": "g6e.12xlarge", "max_instances": 2, "purchase": "spot", "placement_group": False},
}
CLUSTER: dict[str, Any] = {
    "slurm_version": "25.05",
    "ami": "ami-0123456789abcdef0",
    "root_device": "/dev/xvda",
    "node_groups": GROUPS,
    "queues": {"large": ["block", "reserved"], "try-out": ["spare"]},
    "login": {"instance_type": "m6i.xlarge", "ami": "ssm:/platform/login"},
}


def with_cluster(environment: Any, **changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = environment.model_dump(mode="json")
    content["tenants"]["acme"]["cluster"] = {**CLUSTER, **changes}
    return content


@pytest.fixture(scope="module")
def made(synthesize: Any, environments: dict[str, Any]) -> dict[str, Any]:
    return dict(synthesize(EnvironmentSpec.model_validate(with_cluster(environments["local"]))))


@pytest.fixture(scope="module")
def resources(made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The training stack's, resolved, by logical id."""
    deployment = Deployment(made, "123456789012", "us-east-1")
    return {
        name: {"kind": item["Type"], **deployment.resolve(item.get("Properties", {}), STACK)}
        for name, item in made[STACK]["Resources"].items()
    }


def of(resources: dict[str, dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in resources.values() if item["kind"] == f"AWS::{kind}"]


def template(resources: dict[str, dict[str, Any]], group: str) -> dict[str, Any]:
    name = next(name for name in resources if name.startswith(f"Cluster{group}Template"))
    data: dict[str, Any] = resources[name]["LaunchTemplateData"]
    return data


def group(resources: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    return next(item for item in of(resources, "PCS::ComputeNodeGroup") if item["Name"] == name)


def test_the_controller_keeps_accounts_in_the_tenants_subnet_and_group(
    made: dict[str, Any], resources: dict[str, dict[str, Any]]
) -> None:
    (cluster,) = of(resources, "PCS::Cluster")
    foundation = Deployment(made, "123456789012", "us-east-1")
    ids = {
        what: foundation.physical_id(FOUNDATION, name)
        for what in ("NetworkTrainingSubnet", "NetworkTrainingGroup")
        for name, item in made[FOUNDATION]["Resources"].items()
        if name.startswith(what) and item["Type"] in {"AWS::EC2::Subnet", "AWS::EC2::SecurityGroup"}
    }
    assert cluster["Networking"] == {
        "SubnetIds": [ids["NetworkTrainingSubnet"]],
        "SecurityGroupIds": [ids["NetworkTrainingGroup"]],
    }
    assert cluster["Scheduler"] == {"Type": "SLURM", "Version": "25.05"}
    assert cluster["SlurmConfiguration"]["Accounting"]["Mode"] == "STANDARD"
    assert cluster["SlurmConfiguration"]["ScaleDownIdleTimeInSeconds"] == 600
    # Slurm's ports are within what the training group admits from itself; no rule admits anything else.
    rules = [
        item for item in made[FOUNDATION]["Resources"].values() if item["Type"] == "AWS::EC2::SecurityGroupIngress"
    ]
    assert all("CidrIp" not in rule["Properties"] for rule in rules)


@pytest.mark.parametrize(("name", "efa", "cards"), [("block", 32, 32), ("reserved", 16, 17), ("spare", 1, 1)])
def test_every_network_card_is_wired_in_the_tenants_group(
    name: str, efa: int, cards: int, resources: dict[str, dict[str, Any]]
) -> None:
    interfaces = template(resources, name)["NetworkInterfaces"]
    assert [item["NetworkCardIndex"] for item in interfaces] == list(range(cards))
    assert sum(item["InterfaceType"] == "efa" for item in interfaces) == efa
    assert not any(item["InterfaceType"] == "efa-only" for item in interfaces), "which PCS doesn't take"
    assert len({(item["SubnetId"], *item["Groups"]) for item in interfaces}) == 1
    assert not any("AssociatePublicIpAddress" in item for item in interfaces)


def test_a_file_system_with_efa_that_nobody_would_use_is_refused(environments: dict[str, Any]) -> None:
    content = environments["local"].model_dump(mode="json")
    files = {"storage_gib": 9600, "throughput_mb_per_s_per_tib": 1000, "efa": True}
    content["tenants"]["acme"]["file_system"] = files
    with pytest.raises(InputError, match=r"tenants\.acme\.file_system\.efa: no machine of the tenant would use it"):
        check_environment(EnvironmentSpec.model_validate(content))


def test_a_block_has_no_placement_group_and_a_targeted_reservation_no_market(
    resources: dict[str, dict[str, Any]],
) -> None:
    block, reserved, spare = (template(resources, name) for name in ("block", "reserved", "spare"))
    assert "Placement" not in block
    assert block["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    assert block["InstanceType"] == "p5.48xlarge"
    assert "GroupName" in reserved["Placement"]
    assert "InstanceMarketOptions" not in reserved and "InstanceMarketOptions" not in spare
    for name, data in (("block", block), ("reserved", reserved)):
        target = data["CapacityReservationSpecification"]["CapacityReservationTarget"]
        assert target == {"CapacityReservationId": GROUPS[name]["reservation"]}
    assert "Placement" not in spare and "CapacityReservationSpecification" not in spare
    assert {name: group(resources, name)["PurchaseOption"] for name in GROUPS} == {
        "block": "CAPACITY_BLOCK",
        "reserved": "ONDEMAND",
        "spare": "SPOT",
    }
    assert len(of(resources, "EC2::PlacementGroup")) == 1


def test_machines_scale_between_floor_and_ceiling_and_queues_start_them_whole(
    resources: dict[str, dict[str, Any]],
) -> None:
    bounds = {item["Name"]: item["ScalingConfiguration"] for item in of(resources, "PCS::ComputeNodeGroup")}
    assert bounds == {
        "block": {"MinInstanceCount": 0, "MaxInstanceCount": 2},
        "reserved": {"MinInstanceCount": 1, "MaxInstanceCount": 2},
        "spare": {"MinInstanceCount": 0, "MaxInstanceCount": 2},
        "login": {"MinInstanceCount": 1, "MaxInstanceCount": 1},
    }
    queues = {item["Name"]: item for item in of(resources, "PCS::Queue")}
    assert {name: len(item["ComputeNodeGroupConfigurations"]) for name, item in queues.items()} == {
        "large": 2,
        "try-out": 1,
    }
    settings = {
        name: {
            item["ParameterName"]: item["ParameterValue"] for item in queue["SlurmConfiguration"]["SlurmCustomSettings"]
        }
        for name, queue in queues.items()
    }
    assert settings == {
        "large": {"OverSubscribe": "EXCLUSIVE", "Default": "YES"},
        "try-out": {"OverSubscribe": "EXCLUSIVE"},
    }


def test_machines_are_closed_encrypted_and_say_whose_they_are(
    made: dict[str, Any], resources: dict[str, dict[str, Any]]
) -> None:
    key = Deployment(made, "123456789012", "us-east-1").arn(
        FOUNDATION, next(name for name in made[FOUNDATION]["Resources"] if name.startswith("KeysCheckpoints"))
    )
    for name in (*GROUPS, "login"):
        data = template(resources, name)
        assert data["MetadataOptions"]["HttpTokens"] == "required"
        assert data["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
        (root,) = data["BlockDeviceMappings"]
        assert root["DeviceName"] == "/dev/xvda"
        assert root["Ebs"]["Encrypted"] is True and root["Ebs"]["KmsKeyId"] == key
        assert "KeyName" not in data
        kinds = {
            item["ResourceType"]: {tag["Key"]: tag["Value"] for tag in item["Tags"]}
            for item in data["TagSpecifications"]
        }
        assert set(kinds) == {"instance", "volume", "network-interface"}
        node = "login" if name == "login" else "compute"
        assert all(tags["trainyard:tenant"] == "acme" and tags["trainyard:node"] == node for tags in kinds.values())
    profiles = {item["Name"]: item["IamInstanceProfileArn"] for item in of(resources, "PCS::ComputeNodeGroup")}
    base = "arn:aws:iam::123456789012:instance-profile/trainyard/local/acme/AWSPCS-local-acme-"
    assert profiles == {**dict.fromkeys(GROUPS, f"{base}nodes"), "login": f"{base}login"}
    assert group(resources, "login")["AmiId"] == "{{resolve:ssm:/platform/login}}"
    assert group(resources, "block")["AmiId"] == "ami-0123456789abcdef0"


def test_user_data_is_mime_and_mounts_the_tenants_files(
    made: dict[str, Any], resources: dict[str, dict[str, Any]]
) -> None:
    encoded = template(resources, "block")["UserData"]
    text = base64.b64decode(encoded).decode()
    assert text.startswith("MIME-Version: 1.0\nContent-Type: multipart/mixed;")
    files = next(name for name, item in made[FOUNDATION]["Resources"].items() if item["Type"] == "AWS::FSx::FileSystem")
    identifier = Deployment(made, "123456789012", "us-east-1").physical_id(FOUNDATION, files)
    assert f"{identifier}.DNSName@tcp:/{identifier}.LustreMountName /fsx" in text
    assert len(encoded) < 16384, "EC2 takes no more"


def test_isolation_holds_and_a_cluster_changes_no_other_stack(
    made: dict[str, Any], environments: dict[str, Any], templates: dict[str, dict[str, Any]]
) -> None:
    environment = EnvironmentSpec.model_validate(with_cluster(environments["local"]))
    proof = prove(resolve_templates(made, environment))
    assert (proof.allowed_cross_tenant, proof.denied_own, proof.open_guard_rails, proof.unknown_keys) == (
        (),
        (),
        (),
        (),
    )
    before = templates["local"]
    assert {name for name in before if before[name] != made[name]} == {FOUNDATION, STACK}


def test_the_boundary_has_room_left(made: dict[str, Any]) -> None:
    deployment = Deployment(made, "123456789012", "us-east-1")
    (boundary,) = (
        item["Properties"]["PolicyDocument"]
        for item in made[FOUNDATION]["Resources"].values()
        if item["Type"] == "AWS::IAM::ManagedPolicy"
    )
    text = json.dumps(deployment.resolve(boundary, FOUNDATION), separators=(",", ":"))
    assert len(text) < 6144, "IAM takes no more in a managed policy"


def imports(value: Any) -> set[str]:
    if isinstance(value, dict):
        here = {value["Fn::ImportValue"]} if "Fn::ImportValue" in value else set()
        return here.union(*map(imports, value.values()))
    return set().union(*map(imports, value)) if isinstance(value, list) else set()


def test_a_cluster_comes_and_goes_in_place_and_its_loss_is_asked_about(
    made: dict[str, Any], templates: dict[str, dict[str, Any]]
) -> None:
    """The foundation is deployed first: what it drops while the deployed training stack imports it, is refused."""
    for old, new in ((templates["local"], made), (made, templates["local"])):
        exports = {out["Export"]["Name"] for item in new.values() for out in item.get("Outputs", {}).values()}
        assert imports(old[STACK]) <= exports
    assert losses(templates["local"], made) == []
    kinds = {loss.kind for loss in losses(made, templates["local"])}
    assert kinds == {"AWS::PCS::Cluster", "AWS::IAM::Role"}


def test_the_contract_says_how_to_reach_it(resources: dict[str, dict[str, Any]]) -> None:
    (contract,) = (json.loads(item["Value"]) for item in of(resources, "SSM::Parameter"))
    cluster = contract["cluster"]
    assert cluster["queues"] == {"large": ["p5.48xlarge", "p6-b300.48xlarge"], "try-out": ["g6e.12xlarge"]}
    assert (cluster["engine"], cluster["login_tag"]) == ("pcs", "login")


def test_what_it_costs_a_month_is_priced_or_named(made: dict[str, Any], templates: dict[str, dict[str, Any]]) -> None:
    with_it = base_cost([made[FOUNDATION], made[STACK]], "us-east-1")
    without = base_cost([templates["local"][FOUNDATION], templates["local"][STACK]], "us-east-1")
    added = set(with_it.unknown) - set(without.unknown)
    assert added == {"pcs-controller-small", "pcs-accounting-small", "ec2-m6i.xlarge", "ec2-p6-b300.48xlarge"}
    zones = 2
    amounts = [
        next(line.quantity for line in cost.lines if line.item == "interface-endpoint") for cost in (without, with_it)
    ]
    assert amounts[1] - amounts[0] == 2 * zones * 730, "two endpoints more"


def refused(content: dict[str, Any]) -> str:
    from aws_cdk import App

    from stacks.environment import deploy_environment

    with pytest.raises(InputError) as error:
        deploy_environment(App(), parse(EnvironmentSpec, content, "environment.yaml"))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"node_groups": {"a-b": {"instance_type": "ml.p5.48xlarge", "max_instances": 1}}, "queues": {}},
            "p5.48xlarge",
        ),
        (
            {"node_groups": {"abc": {**GROUPS["block"], "placement_group": True}}, "queues": {}},
            "placement_group: true with purchase: capacity_block",
        ),
        (
            {"node_groups": {"abc": {**GROUPS["block"], "reservation": None}}, "queues": {}},
            "needs reservation: the block's id",
        ),
        (
            {"node_groups": {"abc": {**GROUPS["reserved"], "purchase": "spot"}}, "queues": {}},
            "spot machines run in no reservation",
        ),
        (
            {"node_groups": {"abc": {**GROUPS["reserved"], "min_instances": 3}}, "queues": {}},
            "min_instances 3 is above max_instances 2",
        ),
        ({"node_groups": {"login": GROUPS["spare"]}, "queues": {}}, "`login` and `pcs-...` are taken"),
        ({"queues": {"large": ["blok"]}}, "queues.large: names blok; there are block, reserved, spare"),
        (
            {"node_groups": {"abc": {"instance_type": "p4d.24xlarge", "max_instances": 32}}, "queues": {}},
            "size small manages 32 machines",
        ),
        (
            {"node_groups": {"abc": {"instance_type": "g5.xlarge", "max_instances": 2}}, "queues": {}},
            "g5.xlarge has no EFA",
        ),
        (
            {"node_groups": {"abc": {"instance_type": "p5.49xlarge", "max_instances": 2}}, "queues": {}},
            "unknown instance type 'p5.49xlarge'; close to it: ",
        ),
        (
            {
                "size": "large",
                "node_groups": {"abc": {"instance_type": "p5.48xlarge", "max_instances": 64}},
                "queues": {},
            },
            "one for each network card, and the tenant's training subnet has 2023",
        ),
        ({"ami": "latest"}, "ami"),
        ({"slurm_version": "23.11"}, "slurm_version"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    changes: dict[str, Any], words: str, environments: dict[str, Any]
) -> None:
    assert words in refused(with_cluster(environments["local"], **changes))


def test_a_reservation_is_one_tenants(environments: dict[str, Any]) -> None:
    content = with_cluster(environments["local"])
    content["tenants"]["globex"]["cluster"] = CLUSTER
    assert "reservation cr-0123456789abcdef0 is " in refused(content)


def test_a_capacity_block_and_a_placement_group_never_meet_by_default() -> None:
    from trainyard.spec.cluster import NodeGroupSpec

    assert not NodeGroupSpec(**GROUPS["block"]).grouped
    assert NodeGroupSpec(instance_type="p5.48xlarge", max_instances=1).grouped


def test_the_emulator_records_a_cluster_and_says_so(resources: dict[str, dict[str, Any]]) -> None:
    from trainyard.emulator.cloudformation.catalogue import describe_types

    known = describe_types()
    assert {item["kind"] for item in resources.values()} <= set(known)
    assert {name for name in known if "::PCS::" in name and known[name] == "recorded-only"} == {
        f"AWS::PCS::{name}" for name in ("Cluster", "ComputeNodeGroup", "Queue")
    }
