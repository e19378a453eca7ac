"""What an account is told of prices: by the rates that were stated, page by page, and refused where it isn't known."""

import datetime
import json
from collections.abc import Iterator
from typing import Any

import pytest
from emulator_testing import Caller, Site, allow, refusal

from trainyard import emulator
from trainyard.emulator.pricing.capacity import capacity_blocks, spot_history, training_plans, zone_name
from trainyard.emulator.pricing.offers import PAGE_ITEMS, Offers, RefusedError
from trainyard.errors import InputError
from trainyard.hardware import PriceBook

NOW = datetime.datetime(2026, 11, 22, 12, 0, tzinfo=datetime.UTC)
REGION = "us-east-1"


def row(purchase: str, price: float, zone: str = "", name: str = "p5.48xlarge") -> dict[str, str]:
    place = {"instance": name, "region": REGION, "zone": zone}
    return {**place, "purchase": purchase, "price": str(price), "as_of": "2026-11-01"}


def offers(*rows: dict[str, str]) -> Offers:
    made = Offers()
    made.replace({"rows": list(rows)})
    return made


def history(made: Offers, **request: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        answer = spot_history(made, request, REGION, {"use1-az2": "us-east-1c"}, NOW)
        found += answer["SpotPriceHistory"]
        if not answer["NextToken"]:
            return found
        request["NextToken"] = answer["NextToken"]


@pytest.fixture
def billed(site: Site) -> Iterator[Site]:
    """The shared emulator, with the shipped prices again afterwards."""
    yield site
    emulator.set_prices(site.info, None)


def test_spot_prices_are_the_same_whoever_asks_and_stray_little() -> None:
    made = offers(row("spot", 20, "use1-az2"), row("spot", 30, "a"), row("on-demand", 31))
    found = history(made)
    assert found == history(made) and len(found) > 2 * PAGE_ITEMS
    moments = [item["Timestamp"] for item in found]
    assert moments == sorted(moments, reverse=True) and max(moments) <= NOW
    by_zone = {
        zone: [float(i["SpotPrice"]) for i in found if i["AvailabilityZone"] == zone] for zone in ("us-east-1c",)
    }
    assert all(18 <= usd <= 22 for usd in by_zone["us-east-1c"]) and len(set(by_zone["us-east-1c"])) > 10
    dear = [float(item["SpotPrice"]) for item in found if item["AvailabilityZone"] == "us-east-1a"]
    assert max(dear) == 31, "never above the price on demand"


def test_asked_from_now_on_spot_says_what_holds_now() -> None:
    made = offers(row("spot", 20, "use1-az2"), row("spot", 30, "a"))
    newest = {item["AvailabilityZone"]: item for item in reversed(history(made))}
    assert {item["AvailabilityZone"]: item for item in history(made, StartTime=NOW)} == newest
    week = history(made, StartTime=NOW - datetime.timedelta(days=7), AvailabilityZone="us-east-1a")
    assert len(week) == 8, "a change a day, and the one that held at the start"
    past = NOW - datetime.timedelta(days=30)
    assert all(item["Timestamp"] <= past for item in history(made, StartTime=past, EndTime=past))


def test_blocks_and_plans_cost_the_stated_rate() -> None:
    made = offers(row("capacity block", 40), row("training plan", 43))
    asked = {"InstanceType": "p5.48xlarge", "InstanceCount": 4, "CapacityDurationHours": 48}
    found = capacity_blocks(made, asked, REGION, NOW)["CapacityBlockOfferings"]
    assert {float(item["UpfrontFee"]) for item in found} == {40.0 * 4 * 48}
    late = NOW + datetime.timedelta(days=5)
    assert len(capacity_blocks(made, {**asked, "StartDateRange": late}, REGION, NOW)["CapacityBlockOfferings"]) == 1
    assert capacity_blocks(made, asked, "eu-west-1", NOW)["CapacityBlockOfferings"] == []
    plan = {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 2, "DurationHours": 24}
    (first, *_) = training_plans(made, plan, REGION, NOW)["TrainingPlanOfferings"]
    assert float(first["UpfrontFee"]) == 43.0 * 2 * 24


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        ({"InstanceType": "g5.48xlarge", "CapacityDurationHours": 24}, "no capacity blocks are sold of g5.48xlarge"),
        ({"InstanceType": "p5.48xlarge", "CapacityDurationHours": 25}, "CapacityDurationHours 25 must be"),
        ({"InstanceType": "p5.48xlarge", "CapacityDurationHours": 360}, "CapacityDurationHours 360 must be"),
        ({"InstanceType": "p5.48xlarge", "InstanceCount": 3, "CapacityDurationHours": 24}, "InstanceCount 3 must be"),
        ({"InstanceType": "p5.47xlarge", "CapacityDurationHours": 24}, "unknown instance type 'p5.47xlarge'"),
        ({"CapacityDurationHours": 24}, "of an InstanceType"),
        ({"UltraserverType": "u", "CapacityDurationHours": 24}, "doesn't know UltraserverType"),
        ({"InstanceType": "p5.48xlarge", "CapacityDurationHours": 24, "MaxResults": 0}, "MaxResults 0 must be"),
    ],
)
def test_blocks_that_nobody_sells_are_refused(request_: dict[str, Any], told: str) -> None:
    with pytest.raises(RefusedError, match=told):
        capacity_blocks(Offers(), request_, REGION, NOW)


def test_a_zone_has_one_name() -> None:
    zones = {"use1-az2": "us-east-1c"}
    assert [zone_name(place, REGION, zones) for place in ("b", "use1-az2", "atl2", "us-east-1d")] == [
        "us-east-1b",
        "us-east-1c",
        "us-east-1-atl-2a",
        "us-east-1d",
    ]
    with pytest.raises(RefusedError, match="names a zone use1-az9"):
        zone_name("use1-az9", REGION, zones)


def test_every_zone_of_the_shipped_table_has_a_name(site: Site) -> None:
    for region in ("us-east-1", "us-west-2"):
        ec2 = site.session.client("ec2", region_name=region, endpoint_url=site.info.endpoint)
        pages = ec2.get_paginator("describe_spot_price_history").paginate(StartTime=datetime.datetime.now(datetime.UTC))
        found = {
            (item["InstanceType"], item["AvailabilityZone"]) for page in pages for item in page["SpotPriceHistory"]
        }
        assert len(found) == len(Offers().spot(region)), "no two rows of a type are of one zone"
        assert all(zone.startswith(region) for _, zone in found)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"rows": 1},
        {"rows": [{"instance": "p5.48xlarge"}]},
        {"rows": [row("by the hour", 1)]},
        {"rows": [row("spot", -1)]},
        {"rows": [{**row("spot", 1), "as_of": "today"}]},
        {"rows": [row("spot", 1, name="p5.47xlarge")]},
    ],
)
def test_rates_that_are_none_are_refused_and_change_nothing(body: dict[str, Any]) -> None:
    made = Offers()
    with pytest.raises((ValueError, InputError)):
        made.replace(body)
    assert len(made.sagemaker()) == 0 and made.on_demand() == Offers().on_demand()


def terms(**filters: str) -> list[dict[str, str]]:
    return [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in filters.items()]


def test_the_price_list_comes_in_pages_and_by_its_attributes(billed: Site) -> None:
    pages = (
        billed("pricing")
        .get_paginator("get_products")
        .paginate(ServiceCode="AmazonEC2", Filters=terms(regionCode="us-west-2"))
    )
    found = [[json.loads(text) for text in page["PriceList"]] for page in pages]
    assert {len(page) for page in found[:-1]} == {PAGE_ITEMS} and len(found) > 2
    products = [item for page in found for item in page]
    assert len({item["product"]["sku"] for item in products}) == len(products), "each once"
    used = [item for item in products if item["product"]["attributes"]["capacitystatus"] == "Used"]
    assert {item["product"]["attributes"]["instanceType"] for item in used} == {
        item["instance"]
        for item in PriceBook.opened(today=None).rows
        if item["purchase"] == "on-demand" and item["region"] == "us-west-2"
    }
    emulator.set_prices(billed.info, [row("sagemaker on-demand", 63.5)])
    (own,) = billed("pricing").get_products(ServiceCode="AmazonSageMaker", Filters=terms(component="training"))[
        "PriceList"
    ]
    assert json.loads(own)["product"]["attributes"]["usagetype"] == "USE1-Train:ml.p5.48xlarge"
    assert billed("pricing").get_products(ServiceCode="AmazonEC2")["PriceList"] == []


def test_what_the_price_list_does_not_know_is_refused(site: Site) -> None:
    def get(**request: Any) -> str:
        return refusal(lambda: site("pricing").get_products(**{"ServiceCode": "AmazonEC2", **request}))

    assert get(ServiceCode="AmazonRDS").startswith("InvalidParameterException: the emulator has no prices of AmazonRDS")
    assert "filter TERM_MATCH on colour" in get(Filters=terms(colour="red"))
    assert "filter ANY_OF on vcpu" in get(Filters=[{"Type": "ANY_OF", "Field": "vcpu", "Value": "1,2"}])
    assert "aws_v2 must be aws_v1" in get(FormatVersion="aws_v2")
    assert get(NextToken="x").startswith("InvalidNextTokenException")
    token = site("pricing").get_products(ServiceCode="AmazonEC2")["NextToken"]
    assert "none of this question's" in get(NextToken=token, Filters=terms(gpu="8"))
    assert get(NextToken=token) == ""
    assert refusal(lambda: site("pricing").describe_services()).startswith("UnknownOperationException")
    west = site.session.client("pricing", region_name="us-west-2", endpoint_url=site.info.endpoint)
    assert "not in us-west-2" in refusal(lambda: west.get_products(ServiceCode="AmazonEC2"))


def test_prices_need_their_actions(tenants: tuple[Caller, Caller]) -> None:
    acme, _ = tenants
    calls = {
        "pricing:GetProducts": lambda: acme.client("pricing").get_products(ServiceCode="AmazonEC2"),
        "ec2:DescribeSpotPriceHistory": lambda: acme.client("ec2").describe_spot_price_history(),
        "ec2:DescribeCapacityBlockOfferings": lambda: acme.client("ec2").describe_capacity_block_offerings(
            InstanceType="p5.48xlarge", CapacityDurationHours=24
        ),
        "sagemaker:SearchTrainingPlanOfferings": lambda: acme.client("sagemaker").search_training_plan_offerings(
            InstanceType="ml.p5.48xlarge", DurationHours=24, TargetResources=["training-job"]
        ),
    }
    for action, call in calls.items():
        assert f"is not authorized to perform: {action}" in refusal(call)
        acme.grant("prices", allow(action))
        assert refusal(call) == "", action
        acme.grant("prices", allow("s3:ListAllMyBuckets"))


def test_a_dry_run_and_a_wrong_region_are_answered_as_ec2_answers(site: Site) -> None:
    dry = refusal(
        lambda: site("ec2").describe_capacity_block_offerings(
            InstanceType="p5.48xlarge", CapacityDurationHours=24, DryRun=True
        )
    )
    assert dry.startswith("DryRunOperation")
    for service, code in (("ec2", "AuthFailure"), ("sagemaker", "InvalidSignatureException"), ("sts", "SignatureDoes")):
        nowhere = site.session.client(service, region_name="eu-west-9", endpoint_url=site.info.endpoint)
        calls = {"ec2": "describe_regions", "sagemaker": "list_training_jobs", "sts": "get_caller_identity"}
        refused = refusal(getattr(nowhere, calls[service]))
        assert refused.startswith(code) and "eu-west-9" in refused


def test_throttled_calls_are_counted_and_named_as_each_service_does(site: Site) -> None:
    calls: dict[str, Any] = {
        "ec2:DescribeSpotPriceHistory": (lambda: site("ec2").describe_spot_price_history(), "RequestLimitExceeded"),
        "pricing:GetProducts": (lambda: site("pricing").get_products(ServiceCode="AmazonEC2"), "ThrottlingException"),
        "iam:ListRoles": (lambda: site("iam").list_roles(), "Throttling"),
    }
    for action, (call, code) in calls.items():
        emulator.throttle(site.info, action, 2)
        assert [refusal(call).partition(":")[0] for _ in range(3)] == [code, code, ""]
    for wrong in (("pricing", 1), ("pricing:GetProducts", -1)):
        with pytest.raises(InputError, match="throttle"):
            emulator.throttle(site.info, *wrong)
