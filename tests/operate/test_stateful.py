"""What a deployment may not lose: every property that replaces is known, every loss is refused in one line."""

import gzip
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.launch.session import Account, checkout_root
from trainyard.operate import deploy as deployment
from trainyard.operate.stateful import (
    REPLACED_BY,
    deployed_first,
    deployed_stacks,
    deployed_templates,
    left_behind,
    losses,
    refuse_dropped_exports,
    refuse_losses,
    refuse_namesakes,
)

STACK = "trainyard-test-acme-foundation"
LUSTRE = {"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 250}
SAMPLE: dict[str, Any] = {
    "Resources": {
        "Data": {"Type": "AWS::S3::Bucket", "Properties": {"Tags": [{"Key": "a", "Value": "b"}]}},
        "Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.64.0.0/20", "EnableDnsSupport": True}},
        "Lustre": {
            "Type": "AWS::FSx::FileSystem",
            "Properties": {
                "StorageCapacity": 2400,
                "KmsKeyId": {"Fn::GetAtt": ["Key", "Arn"]},
                "LustreConfiguration": LUSTRE,
            },
        },
        "Topic": {"Type": "AWS::SNS::Topic", "Properties": {"TopicName": "old"}},
    }
}


def changed(logical_id: str, **properties: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(SAMPLE))
    copy["Resources"][logical_id]["Properties"].update(properties)
    return copy


def test_the_table_holds_every_property_that_the_registry_calls_create_only() -> None:
    from cfnlint.schema.manager import PROVIDER_SCHEMA_MANAGER

    for kind, known in REPLACED_BY.items():
        schema = PROVIDER_SCHEMA_MANAGER.get_resource_schema("us-east-1", kind).schema
        registered = schema.get("createOnlyProperties", []) + schema.get("conditionalCreateOnlyProperties", [])
        tops = {path.removeprefix("/properties/").split("/")[0] for path in registered}
        ours = {path.split(".")[0] for path in known if not path.startswith("LustreConfiguration.")}
        # What the schemas leave out, and the template reference or the CDK's database says.
        said_elsewhere = {"FileSystemTypeVersion", "KeySpec", "KeyUsage", "MultiRegion", "StorageType"}
        assert ours - tops <= said_elsewhere and tops <= ours, (kind, tops, ours)


def test_the_table_holds_every_property_of_a_file_system_that_the_cdk_knows_to_replace() -> None:
    """Nested ones too, of which the registry's schema says nothing."""
    database = checkout_root() / "node_modules" / "aws-cdk" / "db.json.gz"
    if not database.is_file():
        pytest.skip("the CDK command isn't installed (npm ci)")
    schema = json.loads(gzip.decompress(database.read_bytes()))["schema"]
    resources, types = schema["resource"]["entities"], schema["typeDefinition"]["entities"]
    (file_system,) = (item for item in resources if item["cloudFormationType"] == "AWS::FSx::FileSystem")
    (lustre,) = (
        item for item in types if item["name"] == "LustreConfiguration" and "CopyTagsToBackups" in item["properties"]
    )
    for prefix, known in (("", file_system), ("LustreConfiguration.", lustre)):
        replacing = {
            prefix + key for key, item in known["properties"].items() if item.get("causesReplacement") == "yes"
        }
        assert replacing and replacing <= set(REPLACED_BY["AWS::FSx::FileSystem"])


def test_every_loss_is_named_as_the_option_that_accepts_it() -> None:
    wanted: dict[str, Any] = {STACK: {"Resources": {}}}
    with pytest.raises(InputError) as refused:
        refuse_losses({STACK: SAMPLE}, wanted)
    options = str(refused.value).partition("repeat with ")[2].split("--accept-loss ")[1:]
    assert [option.strip() for option in options] == [f"{STACK}/{name}" for name in ("Data", "Vpc", "Lustre")]


def test_the_emulator_agrees_on_what_replaces() -> None:
    from trainyard.emulator.cloudformation.catalogue import RESOURCE_TYPES

    for kind, known in REPLACED_BY.items():
        emulated = RESOURCE_TYPES.get(kind)
        if emulated is not None and emulated.update is not None:
            assert set(emulated.replaced_by) == set(known), kind


@pytest.mark.parametrize(
    ("logical_id", "properties", "told"),
    [
        ("Vpc", {"CidrBlock": "10.64.16.0/20"}, "CidrBlock would change from 10.64.0.0/20 to 10.64.16.0/20"),
        ("Data", {"BucketName": "mine"}, "BucketName would change from None to mine"),
        ("Lustre", {"KmsKeyId": "other"}, "KmsKeyId would change"),
        ("Lustre", {"StorageCapacity": 1200}, "StorageCapacity would shrink from 2400 to 1200 GiB"),
        ("Lustre", {"LustreConfiguration": {"DeploymentType": "SCRATCH_2"}}, "DeploymentType would change"),
        (
            "Lustre",
            {"LustreConfiguration": {"DeploymentType": "PERSISTENT_2", "CopyTagsToBackups": True}},
            "CopyTagsToBackups would change",
        ),
    ],
)
def test_a_replacement_is_refused_in_one_line(logical_id: str, properties: dict[str, Any], told: str) -> None:
    wanted = {STACK: changed(logical_id, **properties)}
    with pytest.raises(InputError) as refused:
        refuse_losses({STACK: SAMPLE}, wanted)
    assert told in str(refused.value) and "\n" not in str(refused.value)
    assert f"--accept-loss {STACK}/{logical_id}" in str(refused.value)
    refuse_losses({STACK: SAMPLE}, wanted, [f"{STACK}/{logical_id}"])


def test_what_disappears_or_becomes_something_else_is_refused() -> None:
    gone: dict[str, Any] = json.loads(json.dumps(SAMPLE))
    del gone["Resources"]["Data"]
    gone["Resources"]["Vpc"]["Type"] = "AWS::EC2::Subnet"
    del gone["Resources"]["Topic"]
    assert [(loss.logical_id, loss.why) for loss in losses({STACK: SAMPLE}, {STACK: gone})] == [
        ("Data", "is no longer in the template"),
        ("Vpc", "would become a AWS::EC2::Subnet"),
    ]


def test_what_changes_in_place_or_holds_nothing_passes() -> None:
    for logical_id, properties in (
        ("Data", {"Tags": []}),
        ("Lustre", {"StorageCapacity": 4800}),
        ("Lustre", {"LustreConfiguration": {**LUSTRE, "DataCompressionType": "LZ4"}}),
        ("Vpc", {"EnableDnsSupport": "true"}),
        ("Topic", {"TopicName": "new"}),
    ):
        assert losses({STACK: SAMPLE}, {STACK: changed(logical_id, **properties)}) == []
    assert losses({}, {STACK: SAMPLE}) == losses({STACK: SAMPLE}, {}) == []


TRAINING = "trainyard-test-acme-training"


def pair(*exports: str, uses: tuple[str, ...] = (), **resources: str) -> dict[str, Any]:
    """A foundation that exports, and a training stack that imports some of it and holds resources of a type each."""
    outputs = {f"Out{index}": {"Export": {"Name": f"{STACK}:{name}"}} for index, name in enumerate(exports)}
    held: dict[str, Any] = {name: {"Type": kind} for name, kind in resources.items()}
    for name in uses:
        held[f"Uses{name}"] = {"Type": "AWS::SNS::Topic", "Properties": {"X": [{"Fn::ImportValue": f"{STACK}:{name}"}]}}
    return {STACK: {"Resources": {}, "Outputs": outputs}, TRAINING: {"Resources": held}}


def test_an_export_that_a_deployed_stack_still_imports_is_kept_until_it_does_not() -> None:
    mounted = pair("Files", "SmallFilesRef", uses=("Files", "SmallFilesRef"))
    unmounted, without = pair("Files", "SmallFilesRef", uses=("Files",)), pair("Files", uses=("Files",))
    with pytest.raises(InputError) as refused:
        refuse_dropped_exports(mounted, without)
    told = str(refused.value)
    assert "\n" not in told and "mounted: false" in told and f"{TRAINING} as deployed still imports" in told
    assert "no longer export SmallFilesRef," in told
    with pytest.raises(InputError, match="in two deployments"):
        refuse_dropped_exports(mounted, pair("SmallFilesRef"))
    for old, new in ((mounted, unmounted), (unmounted, without), (without, mounted), ({}, without)):
        refuse_dropped_exports(old, new)
    refuse_dropped_exports(mounted, without, first=[TRAINING])


def test_a_hyperpod_cluster_goes_before_the_roles_that_its_machines_act_as(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CloudFormation deploys the foundation first, and would take the roles from under machines that run."""
    old, new = pair("Role", Cluster="AWS::SageMaker::Cluster"), pair("Role")
    assert deployed_first(old, new) == [TRAINING]
    assert deployed_first(new, old) == deployed_first(old, old) == []
    asked: list[list[str]] = []
    monkeypatch.setattr(deployment, "cdk", lambda _, arguments, *rest: asked.append(arguments[:4]))
    monkeypatch.setattr(deployment, "prepare", lambda *_: new)
    monkeypatch.setattr(deployment, "open_account", lambda _: None)
    monkeypatch.setattr(deployment, "deployed_stacks", lambda _: [])
    monkeypatch.setattr(deployment, "failed_creations", lambda *_: [])
    monkeypatch.setattr(deployment, "release", lambda *_: None)
    monkeypatch.setattr(deployment, "deployed_templates", lambda *_: old)
    spec: Any = SimpleNamespace(emulated=False)

    def deploy() -> None:
        accepted = [loss.name for loss in losses(old, new)]
        deployment.deploy(
            tmp_path, tmp_path, spec, {}, work=tmp_path, progress=lambda _: None, accepted_losses=accepted
        )

    deploy()
    assert asked == [
        ["deploy", TRAINING, "--exclusively", "--app"],
        ["deploy", "--all", "--app", str(tmp_path / "cdk.out")],
    ]
    asked.clear()
    monkeypatch.setattr(deployment, "deployed_templates", lambda *_: new)
    old = new
    deploy()
    assert [arguments[1] for arguments in asked] == ["--all"]


NAMESAKE = "trainyard-dev-acme-foundation"
CHANGED_VPC = {STACK: changed("Vpc", CidrBlock="10.64.16.0/20")}


@pytest.mark.parametrize(
    ("there", "old", "new", "accepted", "told"),
    [
        ([STACK], {STACK: SAMPLE}, CHANGED_VPC, [], rf"would lose .*--accept-loss {STACK}/Vpc"),
        ([STACK], {STACK: SAMPLE}, CHANGED_VPC, [f"{STACK}/Data"], r"would replace or drop no such resource"),
        ([STACK, TRAINING], pair("Files", uses=("Files",)), pair(), [], r"in two deployments"),
        ([NAMESAKE], {}, {STACK: SAMPLE}, [], rf"refused: tenant acme .*{NAMESAKE}"),
        ([STACK], {STACK: SAMPLE}, CHANGED_VPC, [f"{STACK}/Vpc"], None),
    ],
)
def test_what_is_refused_is_refused_before_anything_is_deployed(
    there: list[str],
    old: dict[str, Any],
    new: dict[str, Any],
    accepted: list[str],
    told: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(deployment, "cdk", lambda _, arguments, *rest: asked.append(arguments[0]))
    monkeypatch.setattr(deployment, "prepare", lambda *_: new)
    monkeypatch.setattr(deployment, "open_account", lambda _: None)
    monkeypatch.setattr(deployment, "deployed_stacks", lambda _: there)
    monkeypatch.setattr(deployment, "failed_creations", lambda *_: [])
    monkeypatch.setattr(deployment, "release", lambda *_: None)
    monkeypatch.setattr(deployment, "deployed_templates", lambda *_: old)
    spec: Any = SimpleNamespace(emulated=False)
    account: Any = None

    def deploy() -> None:
        deployment.deploy(
            tmp_path, tmp_path, spec, {}, work=tmp_path, progress=lambda _: None, accepted_losses=accepted
        )

    if told is None:
        deploy()
        assert asked == ["deploy"]
        return
    for attempt in (deploy, lambda: deployment.check(tmp_path, tmp_path, account, [], accepted)):
        with pytest.raises(InputError, match=told):
            attempt()
    assert asked == []


def test_nobody_takes_the_assembly_from_a_deployment_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CLI reads templates as it comes to them. A question that deploys nothing waits for no deployment."""
    monkeypatch.setattr(deployment, "open_account", lambda _: None)
    monkeypatch.setattr(deployment, "check_losses", lambda *_: [])
    monkeypatch.setattr(deployment, "failed_creations", lambda *_: [])
    monkeypatch.setattr(deployment, "release", lambda *_: None)
    monkeypatch.setattr(deployment, "synthesize_into", lambda *_: {})
    deploys, may_end, seen = threading.Event(), threading.Event(), []

    def cdk(_: Path, arguments: list[str], *__: Any) -> None:
        (tmp_path / "cdk.out" / "read.1.lock").touch()
        deploys.set()
        assert may_end.wait(60)
        seen.append((tmp_path / "cdk.out" / "read.1.lock").exists())

    monkeypatch.setattr(deployment, "cdk", cdk)
    spec: Any = SimpleNamespace(emulated=False)
    account: Any = None
    said: list[str] = []

    def deploy() -> None:
        deployment.deploy(tmp_path, tmp_path, spec, {}, work=tmp_path, progress=lambda _: None, say=waits)

    def waits(words: str) -> None:
        said.append(words)
        may_end.set()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(deploy)
        assert deploys.wait(60)
        deployment.check(tmp_path, tmp_path, account, [], [])
        assert (tmp_path / "cdk.out" / "read.1.lock").exists() and said == []
        second = pool.submit(deploy)
        for one in (first, second):
            one.result(60)
    assert seen == [True, True]
    assert len(said) == 1 and said[0].startswith("warning: another deployment of this environment goes on")


@pytest.mark.parametrize(
    ("deployed", "meet"),
    [
        ("trainyard-dev-acme-foundation", True),  # another environment's tenant of the same name
        ("trainyard-dev-acme-labs-foundation", True),  # acme's policies (acme-*) match its jobs
        ("trainyard-test-acme-labs-foundation", True),  # taken out of this environment's file by hand
        ("trainyard-dev-acmelabs-foundation", False),
        ("trainyard-dev-acme-training", False),
        ("trainyard-dev-platform", False),
        ("trainyard-test-acme-foundation", False),  # itself
    ],
)
def test_tenants_that_would_take_each_others_jobs_for_their_own_are_not_deployed_side_by_side(
    deployed: str, meet: bool
) -> None:
    wanted = ["trainyard-test-platform", "trainyard-test-acme-foundation", "trainyard-test-acme-training"]
    if not meet:
        refuse_namesakes([deployed], wanted)
        return
    with pytest.raises(InputError, match=rf"refused: .*{deployed}.*\(acme-\*\)") as refused:
        refuse_namesakes([deployed], wanted)
    assert "\n" not in str(refused.value)


def test_a_tenant_whose_jobs_one_that_is_there_would_take_for_its_own_is_not_deployed() -> None:
    there, wanted = "trainyard-dev-acme-foundation", ["trainyard-test-acme-labs-foundation"]
    with pytest.raises(InputError, match=rf"refused: tenant acme of .*{there}.*\(acme-\*\)"):
        refuse_namesakes([there], wanted)


def test_tenants_that_have_met_already_can_still_be_deployed() -> None:
    """What is mended in either of them must get through; they are told of it each time."""
    wanted = [f"trainyard-test-{name}" for name in ("platform", "acme-foundation", "acme-training", "beta-foundation")]
    both = ["trainyard-test-acme-foundation", "trainyard-dev-acme-foundation"]
    (warning,) = refuse_namesakes(both, wanted)
    assert "trainyard-dev-acme-foundation" in warning and "do take each other's jobs" in warning
    assert "\n" not in warning
    for chosen in (["trainyard-test-platform"], ["trainyard-test-beta-foundation"]):
        assert refuse_namesakes(both[1:], wanted, chosen) == [], "acme is not deployed with these"
    for chosen in (["trainyard-test-acme-foundation"], ["trainyard-test-acme-training"]):
        with pytest.raises(InputError, match="would take each other's jobs"):
            refuse_namesakes(both[1:], wanted, chosen)


def test_a_tenant_that_left_the_file_is_told_of_and_no_other_environments() -> None:
    """As after a rename: the old one's roles, data and bill stay, and nothing of the new one's deployment shows it."""
    wanted = ["trainyard-test-platform", "trainyard-test-acme-foundation", "trainyard-test-acme-training"]
    gone = ["trainyard-test-beta-b-foundation", "trainyard-test-beta-b-training", "trainyard-dev-other-foundation"]
    (warning,) = left_behind([*wanted, *gone], wanted)
    assert warning.startswith("tenant beta-b is deployed (trainyard-test-beta-b-foundation) and not in the file")
    assert "trainyard tenant remove FILE beta-b" in warning and "\n" not in warning
    assert left_behind(wanted, wanted) == []


def test_accepting_a_loss_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match=r"--accept-loss x/Y: .* no such resource"):
        refuse_losses({STACK: SAMPLE}, {STACK: SAMPLE}, ["x/Y"])


def test_the_deployed_templates_are_read_and_a_stack_that_is_missing_is_none(aws: Account, tmp_path: Path) -> None:
    template = {"Resources": {"Data": {"Type": "AWS::S3::Bucket", "Properties": {}}}}
    aws.client("cloudformation").create_stack(StackName=STACK, TemplateBody=json.dumps(template))
    found = deployed_templates(aws, [STACK, "trainyard-test-gone-foundation"])
    assert found == {STACK: template}
    aws.client("cloudformation").create_stack(StackName="somebody-elses", TemplateBody=json.dumps(template))
    assert deployed_stacks(aws) == [STACK]
