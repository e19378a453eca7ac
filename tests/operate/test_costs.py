"""What jobs have cost, by day, tenant, job and cost centre, with a forecast: exact, dated, refused where too old."""

import csv
import datetime
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launch_testing import JOB_ID

from trainyard.cli.app import run
from trainyard.errors import InputError
from trainyard.functions import budget_meter
from trainyard.functions.broker_queue import training_job_prefix
from trainyard.hardware import PriceBook
from trainyard.launch import place
from trainyard.launch.place import TenantAccess
from trainyard.launch.record import JobRecord
from trainyard.launch.session import Account
from trainyard.operate import costs
from trainyard.operate.costs import Charge, Meter
from trainyard.spec.platform import EnvironmentSpec, TenantContract

NOW = datetime.datetime(2026, 3, 20, 6, tzinfo=datetime.UTC)
SINCE, UNTIL = costs.months(None, NOW)
KIND = "ml.p5.4xlarge"
ROW = {"instance": "p5.4xlarge", "region": "us-east-1", "zone": "", "source": "a test", "as_of": "2026-03-01"}
PRICES = [
    {**ROW, "purchase": "on-demand", "price": "6.88"},
    {**ROW, "purchase": "spot", "price": "2.5", "zone": "us-east-1a"},
]


class Jobs:
    """SageMaker's list and descriptions."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}

    def add(self, name: str, began: datetime.datetime, hours: float, *, count: int = 2, **more: Any) -> None:
        self.jobs[name] = {
            "TrainingJobName": name,
            "TrainingJobStatus": "Completed",
            "ResourceConfig": {"InstanceType": KIND, "InstanceCount": count},
            "TrainingStartTime": began,
            "TrainingEndTime": began + datetime.timedelta(hours=hours),
            "TrainingTimeInSeconds": round(hours * 3600),
            "BillableTimeInSeconds": round(hours * 3600),
            **more,
        }

    def describe_training_job(self, TrainingJobName: str) -> dict[str, Any]:
        return self.jobs[TrainingJobName]

    def get_paginator(self, _: str) -> "Jobs":
        return self

    def paginate(self, *, NameContains: str, **_: Any) -> Iterator[dict[str, Any]]:
        yield {"TrainingJobSummaries": [job for name, job in self.jobs.items() if NameContains in name]}


@pytest.fixture
def sagemaker() -> Jobs:
    return Jobs()


@pytest.fixture
def access(deployed: Account, contract: TenantContract, environment: EnvironmentSpec, sagemaker: Jobs) -> TenantAccess:
    """Tenant acme, opened in an account where SageMaker is ours."""
    launcher: Any = SimpleNamespace(client=lambda name: sagemaker if name == "sagemaker" else deployed.client(name))
    return TenantAccess(environment, contract, deployed, launcher)


def charged(access: TenantAccess, rows: list[dict[str, str]] | None = None) -> list[Charge]:
    book = PriceBook(PRICES if rows is None else rows, today=NOW.date())
    return Meter(book, since=SINCE, until=UNTIL, now=NOW).charges(access)


def day(number: int, hour: int = 0) -> datetime.datetime:
    return datetime.datetime(2026, 3, number, hour, tzinfo=datetime.UTC)


def test_charges_are_split_by_the_day_and_add_up_to_the_cent_and_below(access: TenantAccess, sagemaker: Jobs) -> None:
    sagemaker.add(JOB_ID, day(10, 20), 7.125)
    sagemaker.add(f"{JOB_ID}-r2", day(11, 12), 1)
    found = charged(access)
    assert [(charge.day.day, charge.job_id, charge.training_job) for charge in found] == [
        (10, JOB_ID, JOB_ID),
        (11, JOB_ID, JOB_ID),
        (11, JOB_ID, f"{JOB_ID}-r2"),
    ]
    assert found[0].usd == 4 * 2 * Decimal("6.88")
    whole = (Decimal(round(7.125 * 3600)) * 2 * Decimal("6.88") / 3600).quantize(Decimal("0.000001"))
    assert found[0].usd + (found[1].usd or 0) == whole
    for by in ("day", "tenant", "job", "cost-centre"):
        groups = costs.grouped(found, by)  # type: ignore[arg-type]  # the words of By
        assert sum(group.usd for group in groups) == costs.summed("total", found).usd == whole + Decimal("13.76")
    assert [group.key for group in costs.grouped(found, "day")] == ["2026-03-10", "2026-03-11"]
    assert costs.grouped(found, "cost-centre")[0].key == "research-100"
    assert costs.grouped(found, "job")[0].num_jobs == 1, "a resume is the same job"


def test_a_month_of_more_jobs_than_the_meter_looks_at_at_once_is_shown_whole(
    access: TenantAccess, sagemaker: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person's command has no limit of a function's time; of what it has no time for it could say nothing."""
    monkeypatch.setattr(budget_meter, "PATIENCE_SECONDS", -1.0)
    for number in range(3):
        sagemaker.add(f"acme-x-2026031000000{number}-0000", day(10), 1)
    assert len(charged(access)) == 3


def test_only_the_month_counts_and_only_the_tenants_jobs(access: TenantAccess, sagemaker: Jobs) -> None:
    sagemaker.add("acme-over-20260228200000-0000", day(1) - datetime.timedelta(hours=4), 6, count=1)
    sagemaker.add("acme-before-20260101000000-0000", day(1) - datetime.timedelta(days=9), 1)
    sagemaker.add("globex-acme-20260310000000-0000", day(10), 9)
    sagemaker.add("acme-waits-20260310000000-0000", day(10), 9, TrainingStartTime=None)
    assert [(charge.day.day, charge.usd) for charge in charged(access)] == [(1, Decimal("13.76"))]


def test_a_job_over_the_months_end_is_in_both_months_and_in_neither_twice(
    access: TenantAccess, sagemaker: Jobs
) -> None:
    sagemaker.add(JOB_ID, day(1) - datetime.timedelta(hours=3), 30)
    found = []
    for month in ("2026-02", "2026-03"):
        since, until = costs.months(month, NOW)
        meter = Meter(PriceBook(PRICES, today=NOW.date()), since=since, until=until, now=NOW)
        found.append([(charge.day, charge.instance_hours) for charge in meter.charges(access)])
    february, march = found
    assert february == [(datetime.date(2026, 2, 28), 6)]
    assert march == [(datetime.date(2026, 3, 1), 48), (datetime.date(2026, 3, 2), 6)]


def test_what_runs_counts_up_to_now_and_spot_at_its_own_price(access: TenantAccess, sagemaker: Jobs) -> None:
    sagemaker.add("acme-a-20260320000000-0000", day(20, 4), 99, TrainingJobStatus="InProgress")
    spot = {"TrainingJobStatus": "InProgress", "EnableManagedSpotTraining": True}
    sagemaker.add("acme-b-20260320000000-0000", day(20, 4), 99, **spot)
    first, second = charged(access)
    assert (first.usd, second.usd) == (4 * Decimal("6.88"), 4 * Decimal("2.5"))
    assert second.price is not None and second.price.basis.startswith("EC2 spot")
    second = charged(access, PRICES[:1])[1]
    assert second.usd == first.usd, "without a spot price at its most"


def test_batchs_jobs_are_their_records(access: TenantAccess, sagemaker: Jobs, record: JobRecord) -> None:
    name = f"{training_job_prefix('acme', JOB_ID)}{'a' * 32}"
    sagemaker.add(name, day(10), 1)
    sagemaker.add("AWSBatchacme-unknown", day(10), 1)
    assert {charge.job_id for charge in charged(access)} == {JOB_ID, "AWSBatchacme-unknown"}


def test_an_odd_job_is_shown_under_its_own_name_and_hides_no_other(access: TenantAccess, sagemaker: Jobs) -> None:
    odd: dict[str, Any] = {"ResourceConfig": {"InstanceType": "ml.m5.xlarge", "InstanceCount": 3}}
    sagemaker.add(JOB_ID, day(10), 1)
    sagemaker.add("acme-By_Hand.1", day(10), 1)
    sagemaker.add("acme-cpu", day(10), 1, **odd)
    sagemaker.add("acme-serverless", day(10), 1, ResourceConfig=None)
    found = {charge.job_id: charge for charge in charged(access)}
    assert found[JOB_ID].usd == found["acme-By_Hand.1"].usd == 2 * Decimal("6.88")
    cpu = found["acme-cpu"]
    assert (cpu.usd, cpu.gpu_hours, cpu.instance_hours, cpu.row()["gpu_hours"]) == (None, None, 3, "")
    total = costs.summed("total", list(found.values()))
    assert total.unpriced == total.uncounted == ("ml.m5.xlarge", costs.UNNAMED)
    assert (total.gpu_hours, total.usd) == (4, 4 * Decimal("6.88"))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{not json", "is not JSON"),
        (b"[]", "is no job's record"),
        (b'{"version": "two"}', "is no job's record"),
        (b"{}", "job_id"),
    ],
)
def test_a_spoiled_record_is_named_and_hides_no_other(
    access: TenantAccess, sagemaker: Jobs, record: JobRecord, deployed: Account, body: bytes, told: str
) -> None:
    spoiled = "acme-bad-20260301000000-0000"
    key, bucket = f"jobs/{spoiled}/record.json", access.contract.buckets.data
    deployed.client("s3").put_object(Bucket=bucket, Key=key, Body=body)
    for job_id in (JOB_ID, spoiled):
        sagemaker.add(f"{training_job_prefix('acme', job_id)}{'a' * 32}", day(10), 1)
    meter = Meter(PriceBook(PRICES, today=NOW.date()), since=SINCE, until=UNTIL, now=NOW)
    assert {charge.job_id for charge in meter.charges(access)} == {
        JOB_ID,
        f"{training_job_prefix('acme', spoiled)}{'a' * 32}",
    }
    (why,) = meter.unread
    assert f"s3://{bucket}/{key}" in why and told in why


def test_an_old_price_is_refused_and_an_unknown_one_is_said(access: TenantAccess, sagemaker: Jobs) -> None:
    sagemaker.add(JOB_ID, day(10), 1)
    old = [{**PRICES[0], "as_of": "2024-01-01"}]
    with pytest.raises(InputError, match=r"price of ml.p5.4xlarge in us-east-1 is of 2024-01-01, .* refresh$"):
        charged(access, old)
    (charge,) = charged(access, [])
    assert charge.usd is None and charge.row()["usd"] == "" and charge.gpu_hours == 2
    assert costs.summed("total", [charge]).unpriced == (KIND,)


def charge_of(day_of_march: int, usd: str) -> Charge:
    hours = Decimal(1)
    on = datetime.date(2026, 3, day_of_march)
    return Charge(on, "acme", "r", "j", "j", KIND, 1, "on_demand", hours, hours, Decimal(usd), None)


def test_the_forecast_goes_on_at_the_last_weeks_pace() -> None:
    early = [charge_of(2, "700")]  # long ago: spent, and no pace
    week = [charge_of(number, usd) for number, usd in zip(range(13, 20), ["8", "12"] * 3 + ["10"], strict=True)]
    found = costs.forecast([*early, *week, charge_of(20, "2.5")], since=SINCE, until=UNTIL, now=NOW)
    left = Decimal("11.75")
    assert (found.spent_usd, found.pace_usd_per_day, found.num_days) == (Decimal("772.5"), 10, 7)
    assert found.expected_usd == Decimal("772.5") + 10 * left
    assert found.low_usd is not None and found.high_usd is not None
    assert found.spent_usd < found.low_usd < found.expected_usd < found.high_usd
    assert found.high_usd - found.expected_usd == pytest.approx(Decimal("8.786"), abs=Decimal("0.001"))
    sudden = costs.forecast([charge_of(20, "29")], since=SINCE, until=UNTIL, now=NOW)
    assert sudden.pace_usd_per_day == 4, "today counts too: 29 USD in 7.25 days"
    assert sudden.low_usd is None, "days without cost say nothing of how days differ"
    begun = costs.forecast([charge_of(1, "6")], since=SINCE, until=UNTIL, now=day(1, 6))
    days = [charge_of(number, "9") for number in (17, 18, 19)]
    three = costs.forecast(days, since=SINCE, until=UNTIL, now=NOW)
    assert three.low_usd is not None, "three days are enough to differ"
    assert costs.forecast(days[1:], since=SINCE, until=UNTIL, now=NOW).low_usd is None, "two aren't"
    unpriced = replace(charge_of(19, "1"), usd=None)
    assert costs.forecast([*days, unpriced], since=SINCE, until=UNTIL, now=NOW) == three, "what has no price adds none"
    assert (begun.num_days, begun.pace_usd_per_day, begun.low_usd) == (0, 24, None)
    with pytest.raises(InputError, match="month 2026-03 is over"):
        costs.forecast([], since=SINCE, until=UNTIL, now=UNTIL)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--month", "2026-13"], "--month 2026-13: must look like 20"),
        (["--month", "2099-01"], "--month 2099-01: is still to come"),
        (["--by", "person"], "'person'"),
        (["--csv", "--json"], "leave --json and --forecast out"),
        (["--month", "2026-01", "--forecast"], "month 2026-01 is over"),
        (["--tenant", "initech"], "'initech' is not in environment test"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], told: str, deployed: Account, environment_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [] if "--tenant" in arguments else ["--tenant", "acme"]
    assert run(["cost", "-e", str(environment_path), *arguments, *more]) == 2
    out = capsys.readouterr()
    assert out.out == "" and told in out.err and out.err.count("\n") == 1


def test_a_past_month_says_that_removed_tenants_are_not_in_it(
    access: TenantAccess, environment_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard.launch.place.open_tenant", lambda *_: access)
    said = "of the tenants that test has now; one that was removed since is in no line"

    def told(*more: str) -> str:
        assert run(["cost", "-e", str(environment_path), *more]) == 0
        out = capsys.readouterr()
        return out.out + out.err

    assert said in told("--month", "2026-01") and said in told("--month", "2026-01", "--csv")
    assert said in told("--month", "2026-01", "--json")
    assert said not in told() + told("--month", "2026-01", "-t", "acme")


def test_a_tenant_that_is_not_deployed_hides_no_others_cost(
    deployed: Account,
    access: TenantAccess,
    environment_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = "tenant globex is not counted: SSM parameter /trainyard/test/globex/contract doesn't exist"
    opened = place.open_tenant
    monkeypatch.setattr(
        "trainyard.launch.place.open_tenant",
        lambda spec, name, where: access if name == "acme" else opened(spec, name, where),
    )
    assert run(["cost", "-e", str(environment_path)]) == 0
    assert absent in capsys.readouterr().out
    assert run(["cost", "-e", str(environment_path), "--json"]) == 0
    out = capsys.readouterr()
    assert list(json.loads(out.out)["budgets"]) == ["acme"] and absent in out.err
    assert run(["cost", "-e", str(environment_path), "-t", "globex"]) == 3, "who asks for it alone gets no zero"
    assert "globex/contract doesn't exist" in capsys.readouterr().err
    monkeypatch.setattr("trainyard.launch.place.open_tenant", opened)
    deployed.client("ssm").delete_parameter(Name="/trainyard/test/acme/contract")
    assert run(["cost", "-e", str(environment_path)]) == 3
    assert "acme/contract doesn't exist" in capsys.readouterr().err


def test_a_plan_is_held_against_what_has_completed_alone() -> None:
    from trainyard.cli.costing import _against_plan

    group = costs.summed("j", [charge_of(3, "10")])
    assert _against_plan(group, Decimal(12), "Completed") == ["12.00", "20% too high"]
    assert _against_plan(group, Decimal(12), "Stopped") == ["12.00", "of a job that is Stopped"]
    assert _against_plan(group, None, "Completed") == ["-", "-"]


def test_the_verb_prints_a_table_json_and_csv(
    access: TenantAccess,
    sagemaker: Jobs,
    record: JobRecord,
    environment_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("trainyard.launch.place.open_tenant", lambda *_: access)
    now = datetime.datetime.now(datetime.UTC)
    sagemaker.add(JOB_ID, now - datetime.timedelta(minutes=90), 1)
    month = ["--month", f"{now - datetime.timedelta(minutes=90):%Y-%m}"]
    verb = ["cost", "-e", str(environment_path), "-t", "acme"]

    def told(*more: str) -> str:
        assert run([*verb, *more]) == 0
        return capsys.readouterr().out

    whole = json.loads(told("--json", "--by", "job", *month))
    usd = Decimal(whole["total"]["usd"])
    priced = Decimal(whole["charges"][0]["usd_per_hour"])
    assert usd == sum(Decimal(row["usd"]) for row in whole["charges"])
    if month and (now - datetime.timedelta(minutes=90)).month == (now - datetime.timedelta(minutes=30)).month:
        assert usd == 2 * priced, "two machines for an hour"
    (group,) = whole["groups"]
    assert (group["key"], group["planned_usd"], group["state"]) == (JOB_ID, None, "Completed")
    rows = list(csv.DictReader(io.StringIO(told("--csv", *month))))
    assert sum(Decimal(row["usd"]) for row in rows) == usd
    assert {(row["cost_center"], row["job_id"], row["purchase"]) for row in rows} == {
        ("research-100", JOB_ID, "on_demand")
    }
    odd = {"ResourceConfig": {"InstanceType": "ml.m5.xlarge", "InstanceCount": 3}}
    sagemaker.add("acme-By_Hand", now - datetime.timedelta(minutes=90), 1, **odd)
    assert run([*verb, "--csv", *month]) == 0
    out = capsys.readouterr()
    assert ",ml.m5.xlarge,3," in out.out and out.err.count("warning: ") == 2, "bill.csv alone says nothing of it"
    assert "without a known price, and in no dollar above: ml.m5.xlarge" in out.err
    table = told(*month)
    assert "at least " in table and "in no GPU-hour above: ml.m5.xlarge" in table
    del sagemaker.jobs["acme-By_Hand"]
    table = told(*month)
    assert f"{float(usd) / 5000:.1%} of 5,000" in table and f"{usd:,.2f}" in table
    assert f"price: {KIND} {float(priced):g} USD/h in us-east-1, EC2 on demand" in table and "as of 20" in table
    assert "forecast: " in told("--forecast")
    assert JOB_ID in told("--by", "job", *month)
