"""The training stack: queues, budget, alarms, and a contract that the launcher can read."""

import json
import re
from pathlib import Path
from typing import Any

from trainyard.spec.base import parse
from trainyard.spec.meters import BURNS, METERS, NAMESPACE, OBJECTIVES
from trainyard.spec.objectives import ObjectivesSpec
from trainyard.spec.platform import parse_contract

ROOT = Path(__file__).parents[2]

STACK = "trainyard-local-acme-training"
FOUNDATION = "trainyard-local-acme-foundation"


def _contract(account: Any, tenant: str = "acme") -> Any:
    (parameter,) = account.resources(f"trainyard-local-{tenant}-training", "AWS::SSM::Parameter").values()
    assert parameter["Name"] == f"/trainyard/local/{tenant}/contract"
    assert parameter["Tier"] == "Advanced"
    return parse_contract(parameter["Value"], parameter["Name"])


def test_contract_names_the_deployed_things(account: Any) -> None:
    contract = _contract(account)

    def physical(type_name: str, part: str) -> str:
        return str(account.identifier(FOUNDATION, account.only(FOUNDATION, f"AWS::{type_name}", part)))

    def arn(type_name: str, part: str) -> str:
        return str(account.arn(FOUNDATION, account.only(FOUNDATION, f"AWS::{type_name}", part)))

    assert contract.subnet_ids == (physical("EC2::Subnet", "Training"),)
    assert contract.security_group_ids == (physical("EC2::SecurityGroup", "TrainingGroup") + ".GroupId",)
    assert contract.buckets.data == physical("S3::Bucket", "BucketsData")
    assert contract.buckets.checkpoints == physical("S3::Bucket", "BucketsCheckpoints")
    assert contract.buckets.artifacts == physical("S3::Bucket", "BucketsArtifacts")
    assert contract.keys.data == arn("KMS::Key", "KeysData")
    assert contract.keys.checkpoints == arn("KMS::Key", "KeysCheckpoints")
    assert contract.keys.logs == arn("KMS::Key", "KeysLogs")
    assert contract.roles.job == arn("IAM::Role", "RolesJob")
    assert contract.roles.launcher == arn("IAM::Role", "RolesLauncher")
    assert contract.roles.auditor == arn("IAM::Role", "RolesAuditor")
    assert contract.file_system.id == physical("FSx::FileSystem", "FileSystem")
    assert contract.file_system.mount_name == contract.file_system.id + ".LustreMountName"
    assert contract.log_group == physical("Logs::LogGroup", "Group")


def test_contract_says_what_the_environment_file_says(account: Any, environments: dict[str, Any]) -> None:
    contract, tenant = _contract(account), environments["local"].tenant("acme")
    assert (contract.environment, contract.tenant, contract.account) == ("local", "acme", "123456789012")
    assert (contract.availability_zone, contract.emulated) == ("us-east-1a", True)
    assert contract.image_parameter == "/trainyard/local/image"
    assert (contract.cost_center, contract.max_job_hours) == (tenant.cost_center, tenant.max_job_hours)
    assert contract.monthly_usd == tenant.budget.monthly_usd
    queue = contract.queues["gpu"]
    assert (queue.instance_types, queue.max_instances, queue.multi_node) == (("ml.p5.4xlarge",), 4, True)


def test_contracts_of_two_tenants_share_nothing_but_the_place(account: Any) -> None:
    def leaves(value: Any) -> set[str]:
        if isinstance(value, dict):
            return {leaf for item in value.values() for leaf in leaves(item)}
        if isinstance(value, list):
            return {leaf for item in value for leaf in leaves(item)}
        return {str(value)}

    acme, globex = (leaves(_contract(account, tenant).model_dump(mode="json")) for tenant in ("acme", "globex"))
    place = {"123456789012", "us-east-1", "us-east-1a", "local", "/trainyard/local/image"}
    settings = {"", "3", "None", "True", "False", "0.0", "24.0", "80.0", "finish", "ml.p5.4xlarge"}
    assert acme & globex == place | settings


def test_a_queue_holds_back_what_its_share_does_not_fit(account: Any) -> None:
    (capacity,) = account.resources(STACK, "AWS::Batch::ServiceEnvironment").values()
    assert capacity["ServiceEnvironmentType"] == "SAGEMAKER_TRAINING"
    assert capacity["CapacityLimits"] == [{"CapacityUnit": "NUM_INSTANCES", "MaxCapacity": 4}]
    (queue,) = account.resources(STACK, "AWS::Batch::JobQueue").values()
    assert queue["JobQueueType"] == "SAGEMAKER_TRAINING"
    assert len(queue["ServiceEnvironmentOrder"]) == 1


def test_queues_follow_the_environment_file(templates: dict[str, Any], environments: dict[str, Any]) -> None:
    for name, environment in environments.items():
        for tenant, spec in environment.tenants.items():
            resources = templates[name][f"trainyard-{name}-{tenant}-training"]["Resources"].values()
            own = [item for item in resources if item["Type"] == "AWS::Batch::JobQueue"]
            shares = [item for item in resources if item["Type"] == "AWS::Batch::QuotaShare"]
            kinds = {kind for queue in spec.queues.values() for kind in queue.instance_types}
            queued = environment.queued(tenant)
            assert (len(own), len(shares)) == ((0, len(kinds)) if queued else (len(spec.queues), 0))


def test_budget_counts_the_tenants_tag_and_warns_before_and_at_the_limit(account: Any) -> None:
    (budget,) = account.resources(STACK, "AWS::Budgets::Budget").values()
    assert budget["Budget"]["CostFilters"] == {"TagKeyValue": ["user:trainyard:tenant$acme"]}
    assert budget["Budget"]["BudgetLimit"] == {"Amount": 5000, "Unit": "USD"}
    notifications = [item["Notification"] for item in budget["NotificationsWithSubscribers"]]
    found = {(item["NotificationType"], item["Threshold"]) for item in notifications}
    assert found == {("ACTUAL", 80), ("ACTUAL", 100), ("FORECASTED", 100)}
    mail = [{"SubscriptionType": "EMAIL", "Address": "acme-leads@example.com"}]
    assert all(item["Subscribers"] == mail for item in budget["NotificationsWithSubscribers"])


def test_every_alarm_reaches_the_people_of_the_environment_file(account: Any) -> None:
    topic = account.arn(STACK, account.only(STACK, "AWS::SNS::Topic"))
    alarms = account.resources(STACK, "AWS::CloudWatch::Alarm")
    assert len(alarms) == 10 + len(OBJECTIVES) * len(BURNS)
    assert all(alarm["AlarmActions"] == [topic] for alarm in alarms.values())
    (subscription,) = account.resources(STACK, "AWS::SNS::Subscription").values()
    assert (subscription["TopicArn"], subscription["Endpoint"]) == (topic, "acme-leads@example.com")
    rules = account.resources(STACK, "AWS::Events::Rule")
    (rule,) = (item for name, item in rules.items() if name.startswith("AlarmsFailedJobs"))
    assert rule["EventPattern"]["detail"]["TrainingJobName"] == [{"prefix": "acme-"}]
    assert [target["Arn"] for target in rule["Targets"]] == [topic]


def test_every_alarm_is_in_the_runbooks_index(account: Any) -> None:
    """At three in the morning an alarm's name must lead somewhere."""
    index = (ROOT / "docs/runbooks/README.md").read_text()
    rows = index.partition("| the alarm |")[2].partition("| you want to |")[0]
    known = {name for row in rows.splitlines() for name in re.findall(r"[A-Za-z]+", row.split(" | ")[0])}
    for logical_id in account.resources(STACK, "AWS::CloudWatch::Alarm"):
        name = re.sub(r"[0-9A-F]{8}$", "", logical_id)
        short = re.sub(r"^(Alarms|Objectives|JobGuard|BudgetMeter|Broker|Resumer)|(Fast|Slow)$", "", name)
        assert short in known, f"docs/runbooks/README.md has no row for {name}"


def test_rejected_traffic_is_counted_by_the_thirteenth_field_of_the_default_flow_log_format(account: Any) -> None:
    (metric,) = account.resources(STACK, "AWS::Logs::MetricFilter").values()
    fields = metric["FilterPattern"].strip("[]").split(", ")
    assert len(fields) == 14
    assert fields[12] == 'action="REJECT"'


def test_a_type_without_a_price_is_warned_of_by_name(assemblies: Path, templates: Any) -> None:
    assert templates
    words = "tenant platform-team: no price of ml.g6e.12xlarge, ml.g6e.xlarge in us-east-1 is known"
    assert [path.name for path in (assemblies / "dev").glob("*.json") if words in path.read_text()]
    assert not [path.name for path in (assemblies / "local").glob("*.json") if "no price of" in path.read_text()]


def test_objectives_are_alarmed_about_by_the_tenants_own_meters(account: Any) -> None:
    alarms = account.resources(STACK, "AWS::CloudWatch::Alarm").values()
    ours = {item["MetricName"]: item for item in alarms if item.get("Namespace") == NAMESPACE}
    # What a job publishes for its tenant, and only that, can be alarmed about.
    assert set(ours) == {meter.cloudwatch_name for meter in METERS if meter.per_tenant}
    assert all(item["Dimensions"] == [{"Name": "Tenant", "Value": "acme"}] for item in ours.values())
    assert ours["CheckpointAgeSeconds"]["Statistic"] == "Maximum" and ours["Goodput"]["Statistic"] == "Minimum"
    assert all(item["EvaluationPeriods"] * item["Period"] <= 86400 for item in ours.values()), "CloudWatch's limit"
    assert all(len(item["AlarmDescription"]) <= 1024 for item in ours.values())


def test_a_tenants_own_limits_are_in_its_alarms_and_dashboard_and_in_no_other_tenants(
    environments: dict[str, Any], templates: Any, synthesize: Any
) -> None:
    local = environments["local"]
    own = parse(ObjectivesSpec, {"queue": {"most_seconds": 14400}, "throughput": {"least": 0.7, "target": 0.994}}, "x")
    acme = local.tenants["acme"].model_copy(update={"objectives": own})
    changed = synthesize(local.model_copy(update={"tenants": {**local.tenants, "acme": acme}}))
    for name, template in changed.items():
        assert (template == templates["local"][name]) is (name != STACK), name

    def parts(template: Any, kind: str) -> dict[str, Any]:
        found = template["Resources"].items()
        return {name: item["Properties"] for name, item in found if item["Type"] == f"AWS::CloudWatch::{kind}"}

    before, after = parts(templates["local"][STACK], "Alarm"), parts(changed[STACK], "Alarm")
    assert before.keys() == after.keys()
    told = {name: item for name, item in after.items() if item != before[name]}
    limits = {(item["MetricName"], item["Threshold"]) for item in told.values()}
    waits = "LongestWaitSeconds-local"
    assert limits == {("QueueSeconds", 14400), ("LaunchSeconds", 15000), ("ThroughputOfPlan", 0.7), (waits, 14400)}
    for item in told.values():
        words = {"QueueSeconds": "over 4 hours", "LaunchSeconds": "over 250 minutes", waits: "over 240 minutes"}
        assert words.get(item["MetricName"], "below 70 % of its plan's") in item["AlarmDescription"]
        if item["MetricName"] == "ThroughputOfPlan":
            assert item["DatapointsToAlarm"] in (2, 3) and "what 99.4% of a month allows" in item["AlarmDescription"]
    (dashboard,) = parts(changed[STACK], "Dashboard").values()
    drawn = {
        widget["properties"]["title"]: [line["value"] for line in lines["horizontal"]]
        for widget in json.loads(dashboard["DashboardBody"])["widgets"]
        if (lines := widget["properties"].get("annotations"))
    }
    assert drawn == {"queue seconds": [14400], "launch seconds": [15000], "throughput of plan": [0.7]}


def test_the_dashboard_draws_what_jobs_publish(account: Any) -> None:
    (dashboard,) = account.resources(STACK, "AWS::CloudWatch::Dashboard").values()
    widgets = json.loads(dashboard["DashboardBody"])["widgets"]
    graphs = [item["properties"]["metrics"][0][0]["expression"] for item in widgets if item["type"] == "metric"]
    assert len(graphs) == len(METERS)
    for meter in METERS:
        (graph,) = (text for text in graphs if f'MetricName="{meter.cloudwatch_name}"' in text)
        assert f"{{{NAMESPACE},Tenant,Job}}" in graph and 'Tenant="acme"' in graph
    assert all(item["x"] + item["width"] <= 24 for item in widgets)
