"""A tenant's entry goes into and out of an environment file without touching another character; what it costs."""

import dataclasses
import datetime
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard.cli import tenants
from trainyard.cli.app import run
from trainyard.errors import AwsRefusedError, InputError
from trainyard.hardware import base_cost
from trainyard.launch import session
from trainyard.launch.session import checkout_root
from trainyard.operate.tenants import entry, leftovers, preview, removal, revocations, storage, survey
from trainyard.operate.tenants.entry import with_tenant, without_tenant
from trainyard.operate.tenants.unfinished import Unfinished
from trainyard.spec.platform import load_environment

LINK = "AWS::FSx::DataRepositoryAssociation"
NOW = datetime.datetime.now(datetime.UTC)
ENTRY = {"network_index": 9, "queues": {"gpu": {"instance_types": ["ml.p5.4xlarge"], "max_instances": 1}}}
ENVIRONMENTS = ("local", "dev", "staging", "production")


def text_of(name: str) -> str:
    return (checkout_root() / "environments" / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_is_added_can_be_taken_out_and_nothing_else_moved(name: str) -> None:
    before = text_of(name)
    after = with_tenant(before, "newcomer", ENTRY, name)
    kept = iter(after.splitlines())
    assert all(line in kept for line in before.splitlines()), "every old line is there, in its order"
    assert yaml.safe_load(after)["tenants"]["newcomer"] == ENTRY
    assert without_tenant(after, "newcomer", name) == before


@pytest.mark.parametrize("name", ["local", "production"])
def test_any_tenant_can_be_taken_out_with_its_comments(name: str) -> None:
    before = text_of(name)
    for tenant in yaml.safe_load(before)["tenants"]:
        after = without_tenant(before, tenant, name)
        left = yaml.safe_load(after)
        expected = yaml.safe_load(before)
        del expected["tenants"][tenant]
        assert left == expected
        assert "\n\n\n" not in after


def test_a_comment_goes_with_the_tenant_that_it_stands_over_and_line_ends_stay() -> None:
    head, first = "name: x\r\ntenants:\r\n", "  # first\r\n  aa: {n: 1}\r\n    # of aa\r\n"
    second, tail = "  # second\r\n  bb:\r\n    n: 2\r\n", "last: 1\r\n"
    text = head + first + "\r\n" + second + tail
    assert without_tenant(text, "bb", "f") == head + first + tail
    assert without_tenant(text, "aa", "f") == head + "\r\n" + second + tail
    assert with_tenant(text, "cc", {"n": 3.0}, "f") == text.replace(tail, "\r\n  cc: {n: 3}\r\n" + tail)


def test_a_file_without_a_last_line_end_gets_one() -> None:
    assert (
        with_tenant("tenants:\n  aa:\n    n: 1", "bb", {"n": 2}, "f") == "tenants:\n  aa:\n    n: 1\n\n  bb: {n: 2}\n"
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tenants: {aa: {n: 1}, bb: {n: 2}}", "stands in braces"),
        ("tenants:\n  aa: &a\n    n: 1\n  bb: *a\n", "can't be edited"),
        ("tenants:\n  bb: {n: 1}\n", "the only tenant"),
    ],
)
def test_what_the_edit_can_not_follow_is_refused(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        without_tenant(text, "aa" if "aa" in text else "bb", "env.yaml")


def test_a_budget_that_acts_costs_by_its_days_and_a_trail_by_its_events() -> None:
    """Two actions of one budget are one budget, wherever it is."""
    action = {"Type": "AWS::Budgets::BudgetsAction", "Properties": {"BudgetName": "acme-local"}}
    other = {**action, "Properties": {"BudgetName": {"Ref": "Budget"}}}
    trail = {"Type": "AWS::CloudTrail::Trail", "Properties": {}}
    template = {"Resources": {"A": action, "B": action, "C": other, "Trail": trail}}
    for region in ("us-east-1", "eu-central-1"):
        cost = base_cost([template], region)
        assert [(line.quantity, line.unit, line.usd_per_month) for line in cost.lines] == [(61, "days", 6.1)]
        assert cost.by_use == ("AWS::CloudTrail::Trail",)
        assert "first 62 budget-days a month are free" in cost.lines[0].source


def test_base_cost_sums_what_has_a_price_and_names_what_has_none() -> None:
    endpoint = {"VpcEndpointType": "Interface", "SubnetIds": ["a", "b"]}
    lustre = {
        "StorageCapacity": 2400,
        "StorageType": "SSD",
        "LustreConfiguration": {"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 125},
    }
    items = {
        "Endpoint": ("EC2::VPCEndpoint", endpoint),
        "Gateway": ("EC2::VPCEndpoint", {"VpcEndpointType": "Gateway"}),
        "Key": ("KMS::Key", {}),
        "Lustre": ("FSx::FileSystem", lustre),
        "Alarm": ("CloudWatch::Alarm", {}),
        "Firewall": ("NetworkFirewall::Firewall", {"SubnetMappings": [{}]}),
        "Bucket": ("S3::Bucket", {}),
        "Role": ("IAM::Role", {}),
    }
    template = {"Resources": {name: {"Type": f"AWS::{kind}", "Properties": p} for name, (kind, p) in items.items()}}
    cost = base_cost([template], "us-east-1")
    assert cost.known_usd_per_month == pytest.approx(2 * 730 * 0.01 + 1 + 2400 * 0.145 + 0.1)
    assert (cost.unknown, cost.by_use) == (("network-firewall-endpoint",), ("AWS::S3::Bucket",))
    assert all(line.source and line.as_of for line in cost.lines if line.usd_per_month is not None)
    elsewhere = base_cost([template], "eu-central-1")
    assert elsewhere.known_usd_per_month == 0 and len(elsewhere.unknown) == 5
    json.dumps(cost.document())


@pytest.mark.parametrize(
    ("tier", "region", "told"),
    [
        (125, "us-east-1", "174.00 USD, as of 2025-11-01: c3x.dev aws_fsx_lustre_file_system cost page"),
        (250, "us-west-2", "252.00 USD, as of 2026-06-01: AWS Price List effective 2026-06-01"),
        (250, "us-east-1", "no price known; in us-west-2 0.21 USD/GB-month as of 2026-06-01\n"),
        (500, "us-east-1", "no price known\n"),
    ],
)
def test_a_file_system_is_priced_by_a_named_and_dated_row_or_said_to_be_left_out(
    tier: int, region: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is most of what an idle tenant costs: the sum was read as if it were in it."""
    lustre = {"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": tier}
    system = {"StorageCapacity": 1200, "StorageType": "SSD", "LustreConfiguration": lustre}
    resources = {"Lustre": ("AWS::FSx::FileSystem", system), "Topic": ("AWS::SNS::Topic", {})}
    template = {"Resources": {name: {"Type": kind, "Properties": p} for name, (kind, p) in resources.items()}}
    cost = base_cost([template], region)
    tenants._print_cost(cost)
    first, line, _ = capsys.readouterr().out.splitlines(keepends=True)
    name, amount = f"fsx-lustre-persistent-2-ssd-{tier}", f"{cost.known_usd_per_month:,.2f} USD a month in {region}"
    assert line.startswith(f"  {name}: 1,200 GB-months: {told}")
    is_left_out = told.startswith("no price known")
    words = f"at least 0.00 USD a month in {region}, without {name}: no price known there\n" if is_left_out else amount
    assert first.startswith(f"base cost while nothing runs: {words}")
    json.dumps(cost.document())


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the local environment, and templates made without the CDK: a key per tenant."""
    path = tmp_path / "mine.yaml"
    path.write_text(text_of("local"))

    def synthesize(environment: Path, checkout: Path) -> dict[str, Any]:
        assert (checkout / "app.py").is_file()
        spec = load_environment(environment)
        return {
            f"trainyard-{spec.name}-{tenant}-{part}": {"Resources": {"Key": {"Type": "AWS::KMS::Key"}}}
            for tenant in spec.tenants
            for part in ("foundation", "training")
        }

    monkeypatch.setattr(preview, "synthesize", synthesize)
    yield path
    assert sorted(item.name for item in tmp_path.iterdir()) == ["mine.yaml"], "no temporary file stays"


def test_add_writes_the_entry_and_says_what_it_makes(local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--queue", "gpu=ml.p5.4xlarge,ml.p5.48xlarge:2", "--monthly-usd", "900", "--notify", "v@example.com"]
    assert run(["tenant", "add", str(local), "vision", *arguments, "--dry-run"]) == 0
    assert local.read_text() == text_of("local")
    capsys.readouterr()
    assert run(["tenant", "add", str(local), "vision", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "new stack trainyard-local-vision-foundation: 1 resource" in printed
    assert "no other stack changes" in printed and "2.00 USD a month" in printed
    added = load_environment(local).tenant("vision")
    assert (added.network_index, added.budget.monthly_usd) == (2, 900)
    assert added.queues["gpu"].instance_types == ("ml.p5.4xlarge", "ml.p5.48xlarge")
    assert "# stated, so that adding or removing a tenant moves nobody's addresses" in local.read_text()


PRINTED = re.compile(r"(?:tenant add environments/dev.yaml|onboard --tenant) vision((?:\s+--[a-z-]+\s+[^\s#]+)+)")


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize("page", ["docs/tenants.md", "docs/runbooks/onboard.md", "trainyard/cli/tenants.py"])
def test_the_commands_that_pages_print_add_a_tenant(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    text = (root / page).read_text().replace("\\\n", " ").replace("--environment environments/dev.yaml", "")
    commands = [arguments.split() for arguments in PRINTED.findall(text)]
    assert commands and all("--queue" in words or "--like" in words for words in commands)
    for words in commands:
        assert run(["tenant", "add", str(root / "environments/dev.yaml"), "vision", *words, "--dry-run"]) == 0
        assert "new stack trainyard-dev-vision-foundation" in capsys.readouterr().out


def test_like_copies_what_is_not_given(local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tenant", "add", str(local), "vision", "--like", "acme", "--cost-center", "v-1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["written"] and told["preview"]["changed"] == {} and told["preview"]["lost"] == []
    environment = load_environment(local)
    added, model = environment.tenant("vision"), environment.tenant("acme")
    assert (added.queues, added.budget, added.cost_center) == (model.queues, model.budget, "v-1")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["acme", "--like", "globex"], "tenant acme is there already"),
        (["vision"], "--monthly-usd, --notify, --queue: missing"),
        (["vision", "--like", "acme", "--monthly-usd", "nan"], "--monthly-usd nan: must be dollars a month, above 0"),
        (["vision", "--like", "nobody"], "--like: tenant 'nobody' is not in environment local"),
        (["vision", "--like", "acme", "--queue", "gpu"], "--queue gpu: must look like NAME=TYPE[,TYPE]:MAX"),
        (["vision", "--like", "acme", "--queue", "gpu=ml.p5.4xlarge:9"], "max_instances 9 exceeds"),
        (["vision", "--like", "acme", "--guarantee", "two"], "--guarantee two: must look like TYPE:COUNT"),
        (["vision", "--like", "acme", "--guarantee", "ml.p5.4xlarge:1"], "share: is for submission: queue"),
        (["acme-labs", "--like", "acme"], "tenants acme and acme-labs"),
        (["Vision", "--like", "acme"], "'Vision'"),
    ],
)
def test_a_wrong_tenant_is_one_line_and_nothing_is_written(
    local: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tenant", "add", str(local), *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert local.read_text() == text_of("local")


def test_remove_keeps_what_others_wrote_into_the_file_meanwhile(
    local: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: object) -> removal.Report:
        local.write_text(local.read_text() + "# of this morning\n")
        return removal.Report("local", "globex", "1", "r", "shred", "now")

    monkeypatch.setattr(session, "open_account", lambda *_: None)
    monkeypatch.setattr(removal, "plan", lambda *_: None)
    monkeypatch.setattr(removal, "remove", slow)
    monkeypatch.setattr(removal, "write_report", lambda *_: "kept.json")
    before = without_tenant(text_of("local"), "globex", "local")
    assert run(["tenant", "remove", str(local), "globex", "--confirm", "globex"]) == 0
    assert local.read_text() == before + "# of this morning\n"

    def refused(*_: object) -> removal.Report:
        raise AwsRefusedError("its bucket is still there")

    monkeypatch.setattr(removal, "remove", refused)
    local.write_text(text_of("local"))
    assert run(["tenant", "remove", str(local), "globex", "--confirm", "globex"]) == 3
    assert local.read_text() == text_of("local"), "the entry stays until all is done"
    assert "its bucket is still there" in capsys.readouterr().err


def test_a_removal_whose_report_cannot_be_kept_is_told_as_done(
    local: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """What is shredded can't be asked about again: not by a command that ends as if nothing had happened."""
    state = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(state))
    (state / "offboarding").write_text("")  # what was a folder when the removal began
    done = removal.Report("local", "globex", "1", "r", "shred", "now", stacks_deleted=["globex-training"])
    monkeypatch.setattr(session, "open_account", lambda *_: None)
    monkeypatch.setattr(removal, "plan", lambda *_: None)
    monkeypatch.setattr(removal, "remove", lambda *_: done)
    for as_json in ([], ["--json"]):
        local.write_text(text_of("local"))
        assert run(["tenant", "remove", str(local), "globex", "--confirm", "globex", *as_json]) == 1
        said = capsys.readouterr()
        assert "tenant globex is removed, but the report can't be kept" in said.err and "globex-training" in said.out
        assert local.read_text() == without_tenant(text_of("local"), "globex", "local")
    assert json.loads(said.out)["report"] is None


def without_the_entry(path: Path) -> None:
    path.write_text(without_tenant(path.read_text(), "globex", "mine"))


BROKEN = {
    "taken out meanwhile": (without_the_entry, 0, ""),
    "gone": (Path.unlink, 1, "its entry is still in the file"),
    "no YAML": (lambda path: path.write_text("tenants: [\n"), 1, "its entry is still in the file"),
    "no environment": (lambda path: path.write_text("name: x\n"), 1, "its entry is still in the file"),
    "read-only": (None, 1, "can't be written"),
}


@pytest.mark.parametrize("as_json", [[], ["--json"]])
@pytest.mark.parametrize("how", BROKEN)
def test_a_removal_is_told_whatever_became_of_the_file(
    tmp_path: Path, how: str, as_json: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journal is gone, so nobody could tell later what was shredded."""
    path, state = tmp_path / "mine.yaml", tmp_path / "state"
    path.write_text(text_of("local"))
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(state))
    meanwhile, code, told = BROKEN[how]
    done = removal.Report("local", "globex", "1", "r", "shred", "now", "then", stacks_deleted=["globex-training"])

    def remove(*_: object) -> removal.Report:
        if meanwhile is not None:
            meanwhile(path)
        return done

    monkeypatch.setattr(session, "open_account", lambda *_: None)
    monkeypatch.setattr(removal, "plan", lambda *_: None)
    monkeypatch.setattr(removal, "remove", remove)
    if how == "read-only":  # for root there is none

        def refuse(where: Path, _: str) -> None:
            raise InputError(f"{where}: can't be written (Read-only file system); make it writable")

        monkeypatch.setattr(entry, "replace_file", refuse)
    assert run(["tenant", "remove", str(path), "globex", "--confirm", "globex", *as_json]) == code
    said = capsys.readouterr()
    assert "globex-training" in said.out and told in said.err and said.err.count("\n") == code
    assert [one.suffix for one in sorted((state / "offboarding").iterdir())] == [".json", ".txt"]
    assert ("is taken out" in said.out) == (code == 0 and not as_json)


@pytest.mark.parametrize("emulated", [False, True])
def test_what_was_never_made_is_not_held_and_a_link_is(emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    link = {"LogicalResourceId": "Link", "ResourceType": LINK, "PhysicalResourceId": "dra-1"}
    failed = {"LogicalResourceId": "Failed", "ResourceType": "AWS::S3::Bucket"}
    summaries = [{**item, "ResourceStatus": "CREATE_FAILED"} for item in (link, failed)]
    paginator = types.SimpleNamespace(paginate=lambda **_: [{"StackResourceSummaries": summaries}])
    account: Any = types.SimpleNamespace(client=lambda _: types.SimpleNamespace(get_paginator=lambda _: paginator))
    monkeypatch.setattr(survey, "deployed_templates", lambda *_: {"stack": {"Resources": {}}})
    environment = load_environment(checkout_root() / "environments" / "local.yaml")
    found = list(survey.held(account, environment.model_copy(update={"emulated": emulated}), "acme"))
    assert [thing.physical_id for thing in found] == ([] if emulated else ["dra-1"])


def test_a_link_goes_before_its_file_system() -> None:
    """Requests and errors are held against botocore's model."""
    import boto3
    from botocore.stub import Stubber

    fsx = boto3.client("fsx", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    account: Any = types.SimpleNamespace(client=lambda _: fsx)
    link = survey.Held(LINK, "stack", "Link", "dra-0123456789abcdef0", retained=True)
    files = survey.Held("AWS::FSx::FileSystem", "stack", "Files", "fs-1", retained=True)
    assert leftovers.in_deletion_order([files, link]) == [link, files]
    there = {"Associations": [{"AssociationId": link.physical_id}]}
    with Stubber(fsx) as stub:
        stub.add_response("describe_data_repository_associations", there, {"AssociationIds": [link.physical_id]})
        assert leftovers.condition(account, link) == leftovers.EXISTS
        stub.add_response("delete_data_repository_association", {}, {"AssociationId": link.physical_id})
        stub.add_client_error("describe_data_repository_associations", "DataRepositoryAssociationNotFound")
        leftovers.delete(account, link)
        stub.assert_no_pending_responses()
    assert set(leftovers._LOOK) | {"AWS::KMS::Key"} == set(leftovers._DELETE) == set(leftovers._DELETION_ORDER)
    assert set(leftovers._DELETE) == survey.HELD_TYPES


@pytest.mark.parametrize("status", ["DELETE_IN_PROGRESS", "UPDATE_COMPLETE", ""])
def test_a_stack_that_is_being_deleted_already_is_waited_for(status: str) -> None:
    """A removal that was interrupted is finished by the same command. In that state CloudFormation lets nobody change
    a stack's protection, and one that is gone since the plan was made it doesn't know at all."""
    import boto3
    from botocore.stub import Stubber

    client = boto3.client("cloudformation", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    account: Any = types.SimpleNamespace(client=lambda _: client)

    def told(state: str) -> dict[str, Any]:
        return {"Stacks": [{"StackName": "s", "StackId": "arn:s", "StackStatus": state, "CreationTime": NOW}]}

    with Stubber(client) as stub:
        if not status:
            stub.add_client_error("describe_stacks", "ValidationError", "Stack with id s does not exist")
        else:
            stub.add_response("describe_stacks", told(status), {"StackName": "s"})
            if status != "DELETE_IN_PROGRESS":
                options = {"StackName": "s", "EnableTerminationProtection": False}
                stub.add_response("update_termination_protection", {}, options)
                stub.add_response("delete_stack", {}, {"StackName": "s"})
            stub.add_response("describe_stacks", told("DELETE_COMPLETE"), {"StackName": "arn:s"})
        removal._delete_stack(account, "s", lambda _: None)
        stub.assert_no_pending_responses()


def test_a_role_that_the_broker_removes_at_the_same_time_ends_no_removal() -> None:
    """Its own sweep goes on until its stack goes."""
    import boto3
    from botocore.stub import Stubber

    iam = boto3.client("iam", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    account: Any = types.SimpleNamespace(client=lambda _: iam)
    role = {"Path": "/p/", "RoleId": "AROA0123456789012345", "Arn": "arn:aws:iam::123456789012:role/x"}
    roles = [{**role, "RoleName": f"acme-{number}", "CreateDate": NOW} for number in (1, 2, 3)]
    with Stubber(iam) as stub:
        stub.add_response("list_roles", {"Roles": roles})
        stub.add_client_error("list_role_policies", "NoSuchEntity")
        stub.add_response("list_role_policies", {"PolicyNames": ["own"]}, {"RoleName": "acme-2"})
        stub.add_client_error("delete_role_policy", "NoSuchEntity")
        stub.add_response("delete_role", {}, {"RoleName": "acme-2"})
        stub.add_response("list_role_policies", {"PolicyNames": []}, {"RoleName": "acme-3"})
        stub.add_client_error("delete_role", "NoSuchEntity")
        assert leftovers.delete_job_roles(account, "local", "acme") == ["acme-2"]
        stub.assert_no_pending_responses()


def test_the_log_groups_that_hyperpod_made_go_with_their_tenant_and_no_others() -> None:
    """By the name that the policies let the machines write to."""
    import boto3
    from botocore.stub import Stubber

    from stacks.naming import TenantScope
    from trainyard.operate.tenants.removal import Report, _account_for

    environment = load_environment(checkout_root() / "environments" / "local.yaml")
    own = f"/aws/sagemaker/Clusters/{TenantScope(environment, 'acme').cluster_name}/"
    logs = boto3.client("logs", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    account: Any = types.SimpleNamespace(client=lambda _: logs)
    asked, there = {"logGroupNamePrefix": own}, {"logGroups": [{"logGroupName": f"{own}a1b2"}]}
    planned: Any = types.SimpleNamespace(environment=environment, tenant="acme", held=())
    report = Report("local", "acme", "123456789012", "us-east-1", "shred", "")
    with Stubber(logs) as stub:
        stub.add_response("describe_log_groups", there, asked)
        found = leftovers.machine_log_groups(account, environment.name, "acme")
        assert found == [f"{own}a1b2"]
        stub.add_response("delete_log_group", {}, {"logGroupName": f"{own}a1b2"})
        leftovers.delete_log_groups(account, found)
        for _ in ("of jobs", "of jobs that Batch named"):
            stub.add_response("describe_log_streams", {"logStreams": []})
        stub.add_response("describe_log_groups", there, asked)
        assert [item.identifier for item in _account_for(account, planned, report, {})] == found
        stub.assert_no_pending_responses()


@pytest.mark.parametrize(("policy", "fate"), [("shred", "deleted"), ("retain", "stays")])
def test_the_plan_tells_what_no_stack_owns(policy: Any, fate: str) -> None:
    """A plan that lists less than the removal deletes would be agreed to for the wrong reason."""
    environment = load_environment(checkout_root() / "environments" / "local.yaml")
    group = "/aws/sagemaker/Clusters/trainyard-local-acme/a1b2"
    stacks = {"trainyard-local-acme-foundation": "CREATE_COMPLETE"}
    planned = removal.Plan(environment, "acme", policy, None, stacks, (), {}, Unfinished(), 3, ("acme-job",), (group,))
    assert planned.lines()[2:] == [
        f"  3 log streams of its jobs in /aws/sagemaker/TrainingJobs: {fate}",
        f"  Logs::LogGroup {group}: {fate}",
        "  1 role of its jobs: deleted",
    ]


def test_what_a_removal_on_this_machine_wrote_down_is_known_though_all_of_it_is_gone() -> None:
    environment = load_environment(checkout_root() / "environments" / "local.yaml")
    stacks = {"trainyard-local-acme-foundation": removal.NOT_DEPLOYED}
    blind = removal.Plan(environment, "acme", "shred", None, stacks, (), {}, Unfinished())
    assert blind.is_blind and any("no unfinished removal" in line for line in blind.lines())
    known = dataclasses.replace(blind, is_remembered=True)
    assert not known.is_blind and not any("not known here" in line for line in known.lines())


@pytest.mark.parametrize("moment", ["2026-01-31T12:00:00", "2026-01-31T12:00:00Z", "2026-01-31T13:00:00+01:00"])
def test_sessions_that_were_closed_by_hand_at_a_moment_without_a_zone_are_closed_in_utc(moment: str) -> None:
    condition = {"DateLessThan": {"aws:TokenIssueTime": moment}}
    document = {"Statement": [{"Effect": "Deny", "Action": "*", "Resource": "*", "Condition": condition}]}
    iam = types.SimpleNamespace(
        get_role_policy=lambda **_: {"PolicyDocument": document},
        get_role=lambda **_: {"Role": {"MaxSessionDuration": 4 * 3600}},
        exceptions=types.SimpleNamespace(NoSuchEntityException=KeyError),
    )
    found = revocations._on(iam, "Auditor-1")
    assert found is not None and found.needed_until == datetime.datetime(2026, 1, 31, 16, tzinfo=datetime.UTC)
    revocations.refuse_needed("acme", [found])


def test_an_export_that_arrives_short_is_told_in_a_line() -> None:
    """An object that was overwritten since it was listed is measured by what was read."""
    stored = {"ContentLength": 5}
    page = {"Contents": [{"Key": "a", "Size": 3, "ETag": "e"}]}
    s3 = types.SimpleNamespace(
        get_paginator=lambda _: types.SimpleNamespace(paginate=lambda **_: [page]),
        get_object=lambda **_: {"Body": None, "ContentLength": 5, "ETag": "e"},
        upload_fileobj=lambda *_, **__: None,
        head_object=lambda **_: stored,
    )
    account: Any = types.SimpleNamespace(client=lambda _: s3)
    assert storage.export(account, account, "from", "s3://to", lambda _: None) == (1, 5, 1, 5)
    stored["ContentLength"] = 4
    with pytest.raises(AwsRefusedError, match="s3://to/from/a holds 4 bytes instead of 5; nothing was deleted"):
        storage.export(account, account, "from", "s3://to", lambda _: None)


@pytest.mark.parametrize("size_gib", [0, 0.001, 77, 79, 1024, 45 * 1024])
def test_no_object_has_more_parts_than_s3_takes(size_gib: float) -> None:
    """A stream tells no size, so boto3 chooses no parts for it; and each of them waits in memory."""
    size_bytes, seen = int(size_gib * 2**30), []
    page = {"Contents": [{"Key": "a", "Size": size_bytes, "ETag": "e"}]}
    s3 = types.SimpleNamespace(
        get_paginator=lambda _: types.SimpleNamespace(paginate=lambda **_: [page]),
        get_object=lambda **_: {"Body": None, "ContentLength": size_bytes, "ETag": "e"},
        upload_fileobj=lambda *_, Config, **__: seen.append(Config),
        head_object=lambda **_: {"ContentLength": size_bytes},
    )
    account: Any = types.SimpleNamespace(client=lambda _: s3)
    assert storage.export(account, account, "from", "s3://to", lambda _: None)[:2] == (1, size_bytes)
    (config,) = seen
    part_bytes = config.multipart_chunksize
    assert 5 * 2**20 <= part_bytes <= 5 * 2**30 and size_bytes / part_bytes < 9_500, "S3 takes 10,000 of 5 MiB to 5 GiB"
    waiting = config.max_in_memory_upload_chunks
    assert waiting >= 1 and (waiting == 1 or waiting * part_bytes <= 2**30)
    if size_gib < 70:
        assert (part_bytes, waiting) == (8 * 2**20, 10), "as boto3 has it"


def test_locks_are_looked_for_version_by_version() -> None:
    """A rule of today says nothing of what came under another one; a marker has no lock."""
    import boto3
    from moto import mock_aws

    def lock(key: str, **given: Any) -> str:
        s3.put_object(Bucket="locks", Key=key, Body=b"x", **given)
        return str(storage.locked(account, "locks"))

    with mock_aws():
        s3 = boto3.client("s3", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
        account: Any = types.SimpleNamespace(client=lambda _: s3)
        s3.create_bucket(Bucket="plain")
        s3.put_object(Bucket="plain", Key="a", Body=b"x")
        s3.create_bucket(Bucket="locks", ObjectLockEnabledForBucket=True)
        s3.put_object(Bucket="locks", Key="gone", Body=b"x")
        s3.delete_object(Bucket="locks", Key="gone")
        until = NOW + datetime.timedelta(days=9)
        past = {"ObjectLockMode": "GOVERNANCE", "ObjectLockRetainUntilDate": NOW - datetime.timedelta(days=1)}
        assert lock("a", **past) == "None" and storage.locked(account, "plain") is None
        assert lock("b", ObjectLockLegalHoldStatus="ON") == "b: under a legal hold"
        s3.put_object_legal_hold(Bucket="locks", Key="b", LegalHold={"Status": "OFF"})
        future = {"ObjectLockMode": "COMPLIANCE", "ObjectLockRetainUntilDate": until}
        assert lock("c", **future) == f"c: locked until {until:%Y-%m-%d}"
        assert lock("c", **past) == f"c: locked until {until:%Y-%m-%d}", "an old version's"


def test_an_emptying_that_is_interrupted_brings_no_old_version_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is current then is copied by the repetition: it must be what was current, or gone."""
    import boto3
    from moto import mock_aws

    monkeypatch.setattr(storage, "BATCH", 1)
    with mock_aws():
        s3 = boto3.client("s3", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
        account: Any = types.SimpleNamespace(client=lambda _: s3)
        s3.create_bucket(Bucket="source")
        s3.put_bucket_versioning(Bucket="source", VersioningConfiguration={"Status": "Enabled"})
        for body in (b"1", b"22", b"333"):
            for key in ("a", "b", "deleted"):
                s3.put_object(Bucket="source", Key=key, Body=body)
        s3.delete_object(Bucket="source", Key="deleted")

        def interrupt(_: str) -> None:
            raise KeyboardInterrupt

        for left in range(10, 1, -1):
            with pytest.raises(KeyboardInterrupt):
                storage.empty(account, "source", interrupt)
            found = s3.list_object_versions(Bucket="source")
            assert len([*found.get("Versions", []), *found.get("DeleteMarkers", [])]) == left - 1
            current = {item["Key"]: item["Size"] for item in s3.list_objects_v2(Bucket="source").get("Contents", [])}
            assert set(current) <= {"a", "b"} and set(current.values()) <= {3}, left
        assert storage.empty(account, "source", lambda _: None) == (1, [])


def test_a_stream_is_uploaded_in_parts_of_that_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """By boto3 itself: 25 MiB in at most 3 parts are parts of more than 8 MiB."""
    import boto3
    from moto import mock_aws

    monkeypatch.setattr(storage, "MOST_PARTS", 3)
    with mock_aws():
        s3 = boto3.client("s3", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
        for bucket in ("source", "target"):
            s3.create_bucket(Bucket=bucket)
        s3.put_object(Bucket="source", Key="a", Body=b"x" * (25 * 2**20))
        account: Any = types.SimpleNamespace(client=lambda _: s3)
        assert storage.export(account, account, "source", "s3://target", lambda _: None)[:2] == (1, 25 * 2**20)
        # An object of parts is told by its ETag, which ends with their number.
        assert s3.head_object(Bucket="target", Key="source/a")["ETag"].strip('"').endswith("-3")


def test_show_and_remove_without_an_account(
    local: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(local.parent / "none"))
    assert run(["tenant", "show", str(local), "globex"]) == 0
    printed = capsys.readouterr().out
    assert "network: 10.64.16.0/20" in printed and "state: unknown: " in printed
    assert run(["tenant", "show", str(local), "globex", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data_on_removal"] == "shred"
    assert run(["tenant", "remove", str(local), "globex", "--confirm", "acme"]) == 2
    assert "is not the tenant's name, globex; nothing was changed" in capsys.readouterr().err
    assert run(["tenant", "remove", str(local), "globex"]) == 3


def test_a_tenant_shows_where_data_goes_and_who_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    contract = types.SimpleNamespace(
        version=3,
        log_group="logs",
        buckets=types.SimpleNamespace(data="acme-data"),
        roles=types.SimpleNamespace(launcher="arn:aws:iam::123456789012:role/launcher"),
    )
    monkeypatch.setattr(survey, "stack_status", lambda *_: "CREATE_COMPLETE")
    monkeypatch.setattr(survey, "read_contract", lambda *_: contract)
    monkeypatch.setattr(survey, "deployed_templates", lambda *_: {})
    account: Any = None
    told = survey.state(account, load_environment(checkout_root() / "environments/local.yaml"), "acme").contract
    assert "data bucket: acme-data" in told and contract.roles.launcher in told
