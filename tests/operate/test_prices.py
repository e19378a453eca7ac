"""Prices from AWS: recorded answers, checked by botocore's stubber, and the verb over the wire to the emulator."""

import datetime
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber
from moto import mock_aws

from trainyard import emulator
from trainyard.cli.app import run
from trainyard.emulator import EmulatorInfo
from trainyard.errors import AwsRefusedError, InputError
from trainyard.hardware import PriceBook, instance, instance_types
from trainyard.hardware.prices import read_refreshed
from trainyard.launch.launcher import planned
from trainyard.launch.session import price_file
from trainyard.operate import prices
from trainyard.spec.job import JobSpec

DAY = datetime.date(2026, 11, 22)
REGION = "us-east-1"
NOW = datetime.datetime(2026, 11, 22, tzinfo=datetime.UTC)


def product(usd: str, attributes: dict[str, str], *, unit: str = "Hrs") -> str:
    """A product of the Price List (aws_v1): terms and dimensions are keyed by codes."""
    term = {
        "offerTermCode": "JRTCKXETXF",
        "priceDimensions": {"X.JRTCKXETXF.6YS6EN2CT7": {"unit": unit, "pricePerUnit": {"USD": usd}}},
    }
    return json.dumps({"product": {"attributes": attributes}, "terms": {"OnDemand": {"X.JRTCKXETXF": term}}})


def training(name: str, usd: str, usage: str = "") -> str:
    attributes = {"instanceName": name, "component": "Training", "usagetype": usage or f"USE1-Train:{name}"}
    return product(usd, attributes)


class Recorded:
    """Clients that answer as AWS does, one list of answers a service, in order."""

    def __init__(self) -> None:
        self.stubbers: dict[str, Stubber] = {}

    def of(self, service: str) -> Stubber:
        if service not in self.stubbers:
            keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
            self.stubbers[service] = Stubber(boto3.client(service, region_name=REGION, **keys))
        return self.stubbers[service]

    def __call__(self, service: str, region: str) -> Any:
        stubber = self.of(service)
        stubber.activate()
        return stubber.client


@pytest.fixture
def recorded() -> Recorded:
    """AWS's answers for one p5.48xlarge: each service once."""
    found = Recorded()
    ec2_terms = [ANY] * 7
    pricing = found.of("pricing")
    asked = {"ServiceCode": "AmazonEC2", "Filters": ec2_terms, "FormatVersion": "aws_v1"}
    pricing.add_response("get_products", {"PriceList": [product("55.0400000000", {})]}, asked)
    own = {"ServiceCode": "AmazonSageMaker", "Filters": [ANY] * 2, "FormatVersion": "aws_v1"}
    first = [training("ml.p5.48xlarge", "63.2960"), training("ml.p4d.24xlarge", "25.25")]
    second = [training("ml.p5.48xlarge", "20.0", usage="USE1-Cluster:ml.p5.48xlarge")]
    pricing.add_response("get_products", {"PriceList": first, "NextToken": "more"}, own)
    pricing.add_response("get_products", {"PriceList": second}, {**own, "NextToken": "more"})
    history = [
        {"InstanceType": "p5.48xlarge", "AvailabilityZone": zone, "SpotPrice": usd, "Timestamp": NOW - age}
        for zone, usd, age in (
            ("us-east-1a", "19.2500", datetime.timedelta(hours=1)),
            ("us-east-1a", "99.0000", datetime.timedelta(hours=9)),
            ("us-east-1b", "25.7500", datetime.timedelta(hours=2)),
        )
    ]
    ec2 = found.of("ec2")
    ec2.add_response("describe_spot_price_history", {"SpotPriceHistory": history})
    block = {"InstanceType": "p5.48xlarge", "InstanceCount": 1, "CapacityBlockDurationHours": 24, "CurrencyCode": "USD"}
    offers = [{**block, "UpfrontFee": fee} for fee in ("955.2", "960.0", "1000.8")]
    ec2.add_response("describe_capacity_block_offerings", {"CapacityBlockOfferings": offers[:1], "NextToken": "more"})
    ec2.add_response("describe_capacity_block_offerings", {"CapacityBlockOfferings": offers[1:]})
    plan = {
        "TrainingPlanOfferingId": "tpo-1",
        "TargetResources": ["training-job"],
        "DurationHours": 24,
        "UpfrontFee": "1032.0",
        "CurrencyCode": "USD",
        "ReservedCapacityOfferings": [
            {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 1, "DurationHours": 24, "DurationMinutes": 0}
        ],
    }
    found.of("sagemaker").add_response("search_training_plan_offerings", {"TrainingPlanOfferings": [plan]})
    return found


def usd_of(found: prices.Refreshed) -> dict[str, list[float]]:
    by_kind: dict[str, list[float]] = {}
    for row in found.rows:
        by_kind.setdefault(row["purchase"], []).append(float(row["price"]))
    return by_kind


def test_every_way_to_buy_is_read(recorded: Recorded) -> None:
    found = prices.refresh(recorded, REGION, ["p5.48xlarge"], today=DAY)
    assert usd_of(found) == {
        "on-demand": [55.04],
        "sagemaker on-demand": [63.296],
        "spot": [19.25, 25.75],
        "capacity block": [40.0],
        "training plan": [43.0],
    }
    assert found.problems == ()
    assert {row["as_of"] for row in found.rows} == {"2026-11-22"}
    for stubber in recorded.stubbers.values():
        stubber.assert_no_pending_responses()


def test_what_is_read_is_what_plans_use(recorded: Recorded, tmp_path: Path) -> None:
    file = tmp_path / "state" / "prices.json"
    found = prices.refresh(recorded, REGION, ["p5.48xlarge"], today=DAY)
    assert prices.keep(file, found) == 6
    book = PriceBook.opened(file, today=DAY)
    assert book.price("ml.p5.48xlarge").usd_per_hour == 63.296
    assert book.price("ml.p5.48xlarge", purchase="capacity_block").usd_per_hour == 40.0
    assert book.price("ml.p5.48xlarge", purchase="training_plan").usd_per_hour == 43.0
    assert book.price("ml.p5.48xlarge", purchase="spot").usd_per_hour == 22.5
    newer = prices.Refreshed(
        ({**found.rows[0], "price": "50", "as_of": "2026-12-01"},),
        (),
    )
    assert prices.keep(file, newer) == 6, "the same machine, region and way to buy: in place of the older one"
    later = datetime.date(2026, 12, 1)
    assert PriceBook.opened(file, today=later).price("p5.48xlarge").usd_per_hour == 50.0


def test_refreshes_that_end_together_lose_none_of_each_others_prices(tmp_path: Path) -> None:
    file, regions = tmp_path / ".trainyard" / "prices.json", [f"us-east-{number}" for number in range(1, 9)]
    row = {"instance": "p5.48xlarge", "zone": "", "purchase": "on-demand", "price": "50", "source": "x"}
    found = [prices.Refreshed(({**row, "region": region, "as_of": "2026-11-22"},), ()) for region in regions]
    with ThreadPoolExecutor(len(found)) as pool:
        for _ in range(5):
            list(pool.map(lambda one: prices.keep(file, one), found))
            assert {kept["region"] for kept in read_refreshed(file)} == set(regions)
            file.unlink()


def test_what_one_service_refuses_is_named_and_the_rest_is_kept(recorded: Recorded) -> None:
    broken = Recorded()
    broken.stubbers = {name: stub for name, stub in recorded.stubbers.items() if name != "sagemaker"}
    broken.of("sagemaker").add_client_error("search_training_plan_offerings", "AccessDeniedException", "no")
    found = prices.refresh(broken, REGION, ["p5.48xlarge"], today=DAY)
    assert "training plan" not in usd_of(found) and len(found.rows) == 5
    assert any("asking for training plans of p5.48xlarge: AWS refused: AccessDenied" in item for item in found.problems)


def test_a_type_that_a_service_refuses_leaves_the_others_prices(recorded: Recorded) -> None:
    some = Recorded()
    pricing, ec2, sagemaker = some.of("pricing"), some.of("ec2"), some.of("sagemaker")
    for _ in range(3):
        pricing.add_response("get_products", {"PriceList": []})
    ec2.add_response("describe_spot_price_history", {"SpotPriceHistory": []})
    ec2.add_client_error("describe_capacity_block_offerings", "InvalidParameterValue", "not sold here")
    block = {"InstanceCount": 1, "CapacityBlockDurationHours": 24, "CurrencyCode": "USD", "UpfrontFee": "960.0"}
    ec2.add_response("describe_capacity_block_offerings", {"CapacityBlockOfferings": [block]})
    sagemaker.add_client_error("search_training_plan_offerings", "AccessDeniedException", "asked once")
    found = prices.refresh(some, REGION, ["p4d.24xlarge", "p5.48xlarge"], today=DAY)
    assert [(row["instance"], row["price"]) for row in found.rows] == [("p5.48xlarge", "40")]
    assert [item.split(":")[0] for item in found.problems] == ["p4d.24xlarge"] * 3
    assert "not sold here" in found.problems[0] and "asked once" in found.problems[1]


def test_the_youngest_price_is_quoted_though_an_older_file_comes_first() -> None:
    row = {"instance": "p5.48xlarge", "region": REGION, "zone": "", "purchase": "on-demand"}
    old = {**row, "price": "98.32", "source": "refreshed", "as_of": "2025-06-01"}
    shipped = {**row, "price": "55.04", "source": "table", "as_of": "2026-11-09"}
    for rows in ([old, shipped], [shipped, old]):
        assert PriceBook(rows, today=DAY).price("p5.48xlarge").usd_per_hour == 55.04
    same_day = {**old, "as_of": "2026-11-09"}
    assert PriceBook([same_day, shipped], today=DAY).price("p5.48xlarge").usd_per_hour == 98.32


def test_where_everything_is_refused_it_is_aws_refusing() -> None:
    closed = Recorded()
    closed.of("pricing").add_client_error("get_products", "AccessDeniedException", "no")
    closed.of("pricing").add_client_error("get_products", "AccessDeniedException", "no")
    closed.of("ec2").add_client_error("describe_spot_price_history", "UnauthorizedOperation", "no")
    closed.of("ec2").add_client_error("describe_capacity_block_offerings", "UnauthorizedOperation", "no")
    closed.of("sagemaker").add_client_error("search_training_plan_offerings", "AccessDeniedException", "no")
    with pytest.raises(AwsRefusedError, match="reading the price list of AmazonEC2"):
        prices.refresh(closed, REGION, ["p5.48xlarge"], today=DAY)


def test_two_rates_for_one_question_are_none() -> None:
    found = Recorded()
    pricing = found.of("pricing")
    pricing.add_response("get_products", {"PriceList": [product("1.5", {}), product("2.5", {})]})
    pricing.add_response("get_products", {"PriceList": [training("ml.g5.xlarge", "0.0")]})
    found.of("ec2").add_response("describe_spot_price_history", {"SpotPriceHistory": []})
    read = prices.refresh(found, REGION, ["g5.xlarge"], today=DAY)
    assert read.rows == () and read.problems == ("g5.xlarge: no price found in us-east-1",)


@mock_aws
def test_motos_spot_price_is_read_by_the_real_call_and_is_no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    history = list(prices._spot_prices(boto3.client, REGION, ["p5.48xlarge"]))
    assert history and {row["purchase"] for row in history} == {"spot"}
    empty = Recorded()
    for _ in range(2):
        empty.of("pricing").add_response("get_products", {"PriceList": []})
    empty.of("ec2").add_response("describe_capacity_block_offerings", {"CapacityBlockOfferings": []})
    empty.of("sagemaker").add_response("search_training_plan_offerings", {"TrainingPlanOfferings": []})

    class Both:
        def __call__(self, service: str, region: str) -> Any:
            real = boto3.client("ec2", region)
            if service != "ec2":
                return empty(service, region)
            stub = empty("ec2", region)
            real.describe_capacity_block_offerings = stub.describe_capacity_block_offerings
            return real

    found = prices.refresh(Both(), REGION, ["p5.48xlarge"], today=DAY)
    assert found.rows == ()
    assert any("spot price 1e-05 is none" in item for item in found.problems)


def test_show_and_refresh_as_a_person_runs_them(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path))
    monkeypatch.setattr("trainyard.cli.prices._client", lambda: recorded)
    assert run(["prices", "refresh", "--instances", "p5.48xlarge"]) == 0
    assert f"6 prices read, 6 in {price_file()}" in capsys.readouterr().out
    assert run(["prices", "show", "--instances", "ml.p5.48xlarge,p4d.24xlarge", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    by_kind = {(row["instance_type"], row["purchase"]): row for row in shown}
    assert by_kind["p5.48xlarge", "on_demand"]["usd_per_hour"] == 63.296
    assert by_kind["p5.48xlarge", "on_demand"]["refused"] == ""
    assert by_kind["p4d.24xlarge", "on_demand"]["source"].startswith("SkyPilot")
    assert run(["prices", "show", "--instances", "p5.48xlarge"]) == 0
    assert "SageMaker training, on demand" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["show", "--region", "moon"], "--region moon: is no AWS region"),
        (["show", "--instances", "p5.47xlarge"], "unknown instance type 'p5.47xlarge'"),
        (["show", "--instances", ","], "--instances ',': names no type"),
        (["refresh", "--instances", ""], "--instances '': names no type"),
        (["show", "--region", "eu-west-9", "--instances", "p4d.24xlarge"], "is known in eu-west-9"),
    ],
)
def test_wrong_questions_are_one_line_and_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["prices", *arguments]) == InputError.exit_code
    printed = capsys.readouterr()
    assert told in printed.err and printed.err.count("\n") == 1


def test_a_broken_file_is_refused_by_a_launch_and_mended_by_a_refresh(
    job: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path))
    price_file().write_text("{")
    with pytest.raises(InputError, match=r"is no file of prices.*trainyard prices refresh"):
        planned(job)
    row = {"instance": "p5.48xlarge", "region": REGION, "zone": "", "purchase": "on-demand"}
    found = prices.Refreshed(({**row, "price": "55.04", "source": "x", "as_of": "2026-11-22"},), ())
    assert prices.keep(price_file(), found) == 1
    assert "unplanned" not in planned(job)[0]


KINDS = {"on-demand", "sagemaker on-demand", "spot", "capacity block", "training plan"}


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatorInfo]:
    """An emulator of our own: its prices are changed here."""
    state = tmp_path_factory.mktemp("emulator")
    yield emulator.start(state)
    emulator.stop(state)


@pytest.fixture
def here(account: EmulatorInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatorInfo]:
    """The emulator as what this process' SDK talks to, with the shipped prices and no limit before and after."""
    for name, value in {**account.environment(), "TRAINYARD_STATE_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    yield account
    emulator.set_prices(account, None)
    for action in ("pricing:GetProducts", "ec2:DescribeSpotPriceHistory"):
        emulator.throttle(account, action, 0)


def refreshed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """What the verb tells, and the rows of its file by the way to buy."""
    assert run(["prices", "refresh", "--json", *arguments]) == 0, capsys.readouterr().err
    rows: dict[str, list[Any]] = {}
    for row in json.loads(price_file().read_text())["prices"]:
        rows.setdefault(row["purchase"], []).append(row)
    return json.loads(capsys.readouterr().out), rows


def stated(purchase: str, price: float, name: str = "p5.48xlarge", zone: str = "") -> dict[str, str]:
    place = {"instance": name, "region": REGION, "zone": zone}
    return {**place, "purchase": purchase, "price": str(price), "as_of": "2026-11-01"}


def test_the_verb_reads_the_shipped_prices_back_from_the_emulator(
    here: EmulatorInfo, capsys: pytest.CaptureFixture[str]
) -> None:
    told, rows = refreshed(capsys, "--instances", "p5.48xlarge,p4d.24xlarge")
    shipped = PriceBook.opened(today=None)
    on_demand = {row["instance"]: float(row["price"]) for row in rows["on-demand"]}
    assert on_demand == {name: shipped.price(name).usd_per_hour for name in ("p5.48xlarge", "p4d.24xlarge")}
    (block,) = rows["capacity block"]
    assert float(block["price"]) == shipped.price("p5.48xlarge", purchase="capacity_block").usd_per_hour
    assert set(rows) == {"on-demand", "capacity block", "spot"}, "of SageMaker's own rates the table has none"
    zones = [row for row in shipped.rows if row["region"] == REGION and row["purchase"] == "spot snapshot"]
    wanted = [row["instance"] for row in zones if row["instance"] in on_demand]
    assert sorted(row["instance"] for row in rows["spot"]) == sorted(wanted), "each zone once, over all pages"
    assert told["read"] == told["kept"] == len(wanted) + 3
    spot = PriceBook.opened(price_file(), today=datetime.date.today()).price("p5.48xlarge", purchase="spot")
    of_table = shipped.price("p5.48xlarge", purchase="spot")
    assert spot.usd_per_hour == pytest.approx(of_table.usd_per_hour, rel=0.1) and "over 7 zones" in spot.basis


def test_prices_that_are_not_awss_own_say_so_wherever_they_are_used(
    here: EmulatorInfo, capsys: pytest.CaptureFixture[str]
) -> None:
    told, rows = refreshed(capsys, "--instances", "p5.48xlarge")
    assert {
        here.endpoint in row["source"] and "not AWS" in row["source"] for kind in rows.values() for row in kind
    } == {True}
    assert sum("which is not AWS: plans will say so" in item for item in told["problems"]) == len(rows)
    book = PriceBook.opened(price_file(), today=datetime.date.today())
    assert book.price("p5.48xlarge").basis.endswith("no real price: it was asked of an endpoint which is not AWS")
    assert "not AWS" not in PriceBook.opened(today=None).price("p5.48xlarge").basis


@pytest.mark.slow
def test_every_way_to_buy_is_read_over_the_wire_and_over_pages(
    here: EmulatorInfo, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [name for name in instance_types() if instance(name).gpu is not None][:12]
    own = [stated("sagemaker on-demand", 10 + place, name) for place, name in enumerate(names)]
    others = [stated("on-demand", 50), stated("spot", 20, zone="a"), stated("capacity block", 30)]
    emulator.set_prices(here, [*own, *others, stated("training plan", 40)])
    _, rows = refreshed(capsys, "--instances", ",".join({*names, "p5.48xlarge"}))
    assert set(rows) == KINDS
    found = {row["instance"]: float(row["price"]) for row in rows["sagemaker on-demand"]}
    assert found == {row["instance"]: float(row["price"]) for row in own}
    prices_of = {kind: float(row["price"]) for kind, (row, *_) in rows.items()}
    assert (prices_of["on-demand"], prices_of["capacity block"], prices_of["training plan"]) == (50, 30, 40)
    assert rows["spot"][0]["zone"] == "us-east-1a" and prices_of["spot"] == pytest.approx(20, rel=0.1)


def test_an_empty_answer_is_no_price(here: EmulatorInfo, capsys: pytest.CaptureFixture[str]) -> None:
    emulator.set_prices(here, [])
    told, rows = refreshed(capsys, "--instances", "p5.48xlarge,g5.xlarge")
    assert rows == {} and told["read"] == 0
    assert told["problems"] == [f"{name}: no price found in us-east-1" for name in ("p5.48xlarge", "g5.xlarge")]
    told, _ = refreshed(capsys, "--region", "eu-north-1", "--instances", "g5.xlarge")
    assert told["problems"] == ["g5.xlarge: no price found in eu-north-1"]


@pytest.mark.slow
def test_throttling_is_waited_for_and_then_named(here: EmulatorInfo, capsys: pytest.CaptureFixture[str]) -> None:
    emulator.throttle(here, "pricing:GetProducts", 2)
    told, rows = refreshed(capsys, "--instances", "p5.48xlarge")
    assert "on-demand" in rows and not any("Throttling" in item for item in told["problems"])
    emulator.throttle(here, "ec2:DescribeSpotPriceHistory", 20)
    price_file().unlink()
    told, rows = refreshed(capsys, "--instances", "p5.48xlarge")
    assert set(rows) == {"on-demand", "capacity block"}
    assert any("RequestLimitExceeded" in item and "wait a moment" in item for item in told["problems"]), told


def document(statement: dict[str, Any]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def test_what_a_role_may_not_ask_is_named_and_the_rest_is_kept(
    here: EmulatorInfo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    iam, sts = boto3.client("iam"), boto3.client("sts")
    anybody = {"Effect": "Allow", "Principal": {"AWS": f"arn:aws:iam::{here.account}:root"}, "Action": "sts:AssumeRole"}
    role = iam.create_role(RoleName="prices", AssumeRolePolicyDocument=document(anybody))["Role"]
    keys = sts.assume_role(RoleArn=role["Arn"], RoleSessionName="test")["Credentials"]
    names = {"AWS_ACCESS_KEY_ID": "AccessKeyId", "AWS_SECRET_ACCESS_KEY": "SecretAccessKey"}
    for variable, key in {**names, "AWS_SESSION_TOKEN": "SessionToken"}.items():
        monkeypatch.setenv(variable, keys[key])
    assert run(["prices", "refresh", "--instances", "p5.48xlarge"]) == AwsRefusedError.exit_code
    refused = capsys.readouterr().err
    assert "AccessDeniedException" in refused and "pricing:GetProducts" in refused and refused.count("\n") == 1
    allowed = {"Effect": "Allow", "Action": ["pricing:GetProducts"], "Resource": "*"}
    iam.put_role_policy(RoleName="prices", PolicyName="p", PolicyDocument=document(allowed))
    told, rows = refreshed(capsys, "--instances", "p5.48xlarge")
    assert set(rows) == {"on-demand"}
    denied = ("ec2:DescribeSpotPriceHistory", "ec2:DescribeCapacityBlockOfferings", "sagemaker:SearchTrainingPlanOffe")
    assert all(any(f"perform: {action}" in item for item in told["problems"]) for action in denied), told


@pytest.mark.parametrize(
    ("region", "told"), [("eu-west-9", "knows no such region; close to it: eu-west-"), ("us-eats-1", "us-east-1")]
)
def test_a_region_that_nobody_knows_is_one_line(region: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prices", "refresh", "--region", region, "--instances", "p5.48xlarge"]) == InputError.exit_code
    refused = capsys.readouterr().err
    assert told in refused and refused.count("\n") == 1
