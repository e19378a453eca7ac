"""Prices from AWS: recorded answers in the services' own format, checked by botocore's stubber; spot also on moto."""

import datetime
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import boto3
import pytest
from botocore.stub import ANY, Stubber
from moto import mock_aws

from trainyard.cli.app import run
from trainyard.errors import AwsRefusedError, InputError
from trainyard.hardware import PriceBook
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
    ec2_terms = [ANY] * 6
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
    ec2.add_response("describe_capacity_block_offerings", {"CapacityBlockOfferings": offers})
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
    assert PriceBook.opened(file, today=DAY).price("p5.48xlarge").usd_per_hour == 50.0


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


EC2 = '<{0}Response xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>r</requestId>{1}</{0}Response>'
SPOT = (
    "<item><instanceType>p5.48xlarge</instanceType><productDescription>Linux/UNIX</productDescription>"
    "<spotPrice>{usd}</spotPrice><timestamp>2026-11-22T0{hour}:00:00.000Z</timestamp>"
    "<availabilityZone>us-east-1{zone}</availabilityZone></item>"
)
BLOCK = (
    "<item><capacityBlockOfferingId>cbr-{fee}</capacityBlockOfferingId><instanceType>p5.48xlarge</instanceType>"
    "<availabilityZone>us-east-1a</availabilityZone><instanceCount>1</instanceCount>"
    "<startDate>2026-11-23T11:30:00.000Z</startDate><endDate>2026-11-24T11:30:00.000Z</endDate>"
    "<capacityBlockDurationHours>24</capacityBlockDurationHours><upfrontFee>{fee}</upfrontFee>"
    "<currencyCode>USD</currencyCode><tenancy>default</tenancy></item>"
)


class Wire(BaseHTTPRequestHandler):
    """The services' answers as they come over the wire: EC2's XML in pages, the others' JSON 1.1."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        target = self.headers.get("X-Amz-Target", "")
        answer = self._json(target, json.loads(body)) if target else self._xml(parse_qs(body))
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def _json(self, target: str, asked: dict[str, Any]) -> str:
        if target == "AWSPriceListService.GetProducts":
            filters = {item["Field"]: item["Value"] for item in asked["Filters"]}
            if asked["ServiceCode"] == "AmazonEC2":
                assert filters["instanceType"] == "p5.48xlarge" and filters["operatingSystem"] == "Linux"
                return json.dumps({"FormatVersion": "aws_v1", "PriceList": [product("55.0400000000", {})]})
            assert filters == {"regionCode": REGION, "component": "Training"}
            return json.dumps({"FormatVersion": "aws_v1", "PriceList": [training("ml.p5.48xlarge", "63.2960")]})
        assert target == "SageMaker.SearchTrainingPlanOfferings" and asked["InstanceType"] == "ml.p5.48xlarge"
        offer = {"TrainingPlanOfferingId": "tpo-1", "TargetResources": ["training-job"], "DurationHours": 24}
        return json.dumps({"TrainingPlanOfferings": [{**offer, "UpfrontFee": "1032.0", "CurrencyCode": "USD"}]})

    def _xml(self, asked: dict[str, list[str]]) -> str:
        (action,) = asked["Action"]
        if action == "DescribeCapacityBlockOfferings":
            items = "".join(BLOCK.format(fee=fee) for fee in ("955.2", "960.0", "1000.8"))
            return EC2.format(action, f"<capacityBlockOfferingSet>{items}</capacityBlockOfferingSet>")
        assert action == "DescribeSpotPriceHistory" and asked["InstanceType.1"] == ["p5.48xlarge"]
        first = SPOT.format(usd="19.2500", hour=9, zone="a") + SPOT.format(usd="99.0000", hour=1, zone="a")
        items, more = (SPOT.format(usd="25.7500", hour=8, zone="b"), "") if "NextToken" in asked else (first, "2")
        return EC2.format(action, f"<spotPriceHistorySet>{items}</spotPriceHistorySet><nextToken>{more}</nextToken>")

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def wire() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Wire)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_verb_reads_every_service_over_the_wire(
    wire: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {
        "TRAINYARD_STATE_DIR": str(tmp_path),
        "AWS_ENDPOINT_URL": wire,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_MAX_ATTEMPTS": "1",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert run(["prices", "refresh", "--instances", "p5.48xlarge", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["read"] == told["kept"] == 6 and told["problems"] == []
    rows = [(row["purchase"], float(row["price"])) for row in json.loads(price_file().read_text())["prices"]]
    assert rows == [
        ("on-demand", 55.04),
        ("sagemaker on-demand", 63.296),
        ("spot", 19.25),
        ("spot", 25.75),
        ("capacity block", 40.0),
        ("training plan", 43.0),
    ]
