"""Today's prices from AWS itself: Price List (EC2's and SageMaker's own rates), spot history, blocks and plans.

Each answer becomes rows as in trainyard/hardware/aws_prices.csv, dated today, in a file that plans read beside the
shipped table. What one service refuses or doesn't know is named and leaves the others' rows alone.
"""

import datetime
import difflib
import fcntl
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainyard.errors import AwsRefusedError, InputError
from trainyard.hardware import instance, instance_types
from trainyard.hardware.prices import NOT_AWS, REFRESHED_FIELDS, SAGEMAKER, read_refreshed
from trainyard.kept_room import write_whole
from trainyard.launch.aws import DENIED_CODES, aws_errors, error_code

Client = Callable[[str, str], Any]
"""(service, region) -> a boto3 client."""

PRICE_LIST_REGION = "us-east-1"
"""Where the Price List answers for all regions."""

BLOCK_HOURS = 24
"""Of the blocks and plans that are asked for: the shortest that is sold."""

LEAST_USD = 0.01
"""An instance-hour below this is no price: no machine with a GPU ever cost so little."""

Row = dict[str, str]


@dataclass(frozen=True)
class Refreshed:
    """What was read."""

    rows: tuple[Row, ...]
    problems: tuple[str, ...]
    """What wasn't, each in one line."""


def refresh(client: Client, region: str, types: Sequence[str], *, today: datetime.date) -> Refreshed:
    """Prices of `types` (without `ml.`) in a region; AwsRefusedError where AWS refuses everything.

    InputError for a region that botocore doesn't know: its services would be names that nobody answers to.
    """
    _require_known(region)
    rows: list[Row] = []
    problems: list[str] = []
    refused: list[AwsRefusedError] = []
    for ask, is_by_type in _WAYS:
        for named in [[name] for name in types] if is_by_type else [list(types)]:
            try:
                for found in ask(client, region, named):
                    if float(found["price"]) < LEAST_USD:
                        problems.append(f"{found['instance']}: {found['purchase']} price {found['price']} is none")
                        continue
                    rows.append({**found, "region": region, "as_of": today.isoformat()})
            except AwsRefusedError as error:
                refused.append(error)
                problems.append(f"{named[0]}: {error}" if is_by_type else str(error))
                # Who may not ask, or reaches nobody, is told so once; another type may be known to the service.
                if error_code(error.__cause__ or error) in {"", *DENIED_CODES}:
                    break
    if not rows and refused:
        raise refused[0]
    problems += sorted({f"{row['source']}: plans will say so" for row in rows if NOT_AWS in row["source"]})
    priced = {row["instance"] for row in rows}
    problems += [f"{name}: no price found in {region}" for name in types if name not in priced]
    return Refreshed(tuple(rows), tuple(problems))


def gpu_types(asked: Sequence[str]) -> list[str]:
    """The types to ask for, without `ml.`: those named, or all that have GPUs; InputError for one that isn't known."""
    named = [instance(name.strip()).type for name in asked if name.strip()]
    return named or [name for name in instance_types() if instance(name).gpu is not None]


def keep(path: Path, found: Refreshed) -> int:
    """Writes the rows over those of the same machine, region and way to buy, and returns how many there are now.

    One at a time: of two refreshes that end together neither loses the other's rows.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            older = read_refreshed(path) if path.exists() else []
        except InputError:
            # Whoever meets a broken file is told to refresh: it is written anew.
            older = []
        kinds = {_kind(row) for row in found.rows}
        rows = [*found.rows, *(row for row in older if _kind(row) not in kinds)]
        document = {"prices": [{field: row[field] for field in REFRESHED_FIELDS} for row in rows]}
        write_whole(path, json.dumps(document, indent=1) + "\n")
    return len(rows)


def _kind(row: Mapping[str, str]) -> tuple[str, str, str]:
    return row["instance"], row["region"], row["purchase"]


def _row(name: str, purchase: str, usd: float, source: str, zone: str = "") -> Row:
    return {"instance": name, "zone": zone, "purchase": purchase, "price": f"{usd:.12g}", "source": source}


def _source(service: str, client: Any) -> str:
    """The service, and who answered in its name where that was no endpoint of AWS's."""
    url = str(client.meta.endpoint_url)
    host = urlsplit(url).hostname or ""
    is_aws = host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws", ".amazonaws.eu"))
    return service if is_aws else f"{service}, asked at {url}, {NOT_AWS}"


def _ec2_rates(client: Client, region: str, types: Sequence[str]) -> Iterator[Row]:
    """EC2 on demand: Linux, shared tenancy, nothing pre-installed, and used (no reservation's rate, no block's)."""
    pricing = client("pricing", PRICE_LIST_REGION)
    for name in types:
        filters = {
            "instanceType": name,
            "regionCode": region,
            "operatingSystem": "Linux",
            "preInstalledSw": "NA",
            "tenancy": "Shared",
            "capacitystatus": "Used",
            "marketoption": "OnDemand",
        }
        rates = {usd for product in _products(pricing, "AmazonEC2", filters) for usd in _on_demand_usd(product)}
        # Two different rates for one question would mean that the question isn't what it was.
        if len(rates) == 1:
            yield _row(name, "on-demand", rates.pop(), _source("AWS Price List, AmazonEC2", pricing))


def _sagemaker_rates(client: Client, region: str, types: Sequence[str]) -> Iterator[Row]:
    """SageMaker's own rates of training instances."""
    found: dict[str, set[float]] = {}
    pricing = client("pricing", PRICE_LIST_REGION)
    for product in _products(pricing, "AmazonSageMaker", {"regionCode": region, "component": "Training"}):
        attributes = product.get("product", {}).get("attributes", {})
        name = str(attributes.get("instanceName") or attributes.get("instanceType") or "").removesuffix("-Training")
        usage = str(attributes.get("usagetype", ""))
        # "USE1-Train:ml.p5.48xlarge"; what is reserved or of a cluster has other words there.
        if name.startswith("ml.") and (not usage or usage.endswith(f"Train:{name}")):
            found.setdefault(name.removeprefix("ml."), set()).update(_on_demand_usd(product))
    for name in types:
        rates = found.get(name, set())
        if len(rates) == 1:
            yield _row(name, SAGEMAKER, rates.pop(), _source("AWS Price List, AmazonSageMaker", pricing))


def _products(pricing: Any, service: str, filters: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    terms = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in filters.items()]
    token: str | None = None
    while True:
        more = {"NextToken": token} if token else {}
        with aws_errors("reading the price list of", service, "it needs pricing:GetProducts"):
            page = pricing.get_products(ServiceCode=service, Filters=terms, FormatVersion="aws_v1", **more)
        for text in page.get("PriceList", []):
            product = json.loads(text)
            if isinstance(product, dict):
                yield product
        token = page.get("NextToken")
        if not token:
            return


def _on_demand_usd(product: Mapping[str, Any]) -> Iterator[float]:
    """USD an hour of a product's on-demand terms; what is free or of another unit is none."""
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term.get("priceDimensions", {}).values():
            usd = float(dimension.get("pricePerUnit", {}).get("USD", 0) or 0)
            if usd > 0 and str(dimension.get("unit", "Hrs")).lower() in ("hrs", "hours", "hour", "second", "seconds"):
                yield usd * (3600 if str(dimension.get("unit", "")).lower().startswith("second") else 1)


def _spot_prices(client: Client, region: str, types: Sequence[str]) -> Iterator[Row]:
    """Each zone's present spot price."""
    now = datetime.datetime.now(datetime.UTC)
    with aws_errors("reading the spot prices of", region, "it needs ec2:DescribeSpotPriceHistory"):
        ec2 = client("ec2", region)
        pages = ec2.get_paginator("describe_spot_price_history")
        history = [
            entry
            for page in pages.paginate(InstanceTypes=list(types), ProductDescriptions=["Linux/UNIX"], StartTime=now)
            for entry in page["SpotPriceHistory"]
        ]
    newest: dict[tuple[str, str], Any] = {}
    for entry in history:
        place = (str(entry["InstanceType"]), str(entry["AvailabilityZone"]))
        if place not in newest or entry["Timestamp"] > newest[place]["Timestamp"]:
            newest[place] = entry
    for (name, zone), entry in sorted(newest.items()):
        yield _row(name, "spot", float(entry["SpotPrice"]), _source("EC2 spot price history", ec2), zone)


def _capacity_blocks(client: Client, region: str, types: Sequence[str]) -> Iterator[Row]:
    """The median of the blocks of one machine and a day that EC2 offers now."""
    ec2 = client("ec2", region)
    for name in _sold_in_blocks(types):
        with aws_errors("asking for capacity blocks of", name, "it needs ec2:DescribeCapacityBlockOfferings"):
            pages = ec2.get_paginator("describe_capacity_block_offerings").paginate(
                InstanceType=name, InstanceCount=1, CapacityDurationHours=BLOCK_HOURS
            )
            offers = [offer for page in pages for offer in page.get("CapacityBlockOfferings", [])]
        rates = [
            float(offer["UpfrontFee"]) / (offer["InstanceCount"] * offer["CapacityBlockDurationHours"])
            for offer in offers
            if offer.get("CurrencyCode") == "USD"
        ]
        if rates:
            yield _row(name, "capacity block", statistics.median(rates), _source("EC2 capacity block offerings", ec2))


def _training_plans(client: Client, region: str, types: Sequence[str]) -> Iterator[Row]:
    """The median of the training plans of one machine and a day that SageMaker offers now."""
    sagemaker = client("sagemaker", region)
    for name in _sold_in_blocks(types):
        with aws_errors("asking for training plans of", name, "it needs sagemaker:SearchTrainingPlanOfferings"):
            answer = sagemaker.search_training_plan_offerings(
                InstanceType=f"ml.{name}", InstanceCount=1, DurationHours=BLOCK_HOURS, TargetResources=["training-job"]
            )
        rates = [
            float(offer["UpfrontFee"]) / _plan_hours(offer)
            for offer in answer.get("TrainingPlanOfferings", [])
            if offer.get("CurrencyCode") == "USD" and _plan_hours(offer) > 0
        ]
        if rates:
            yield _row(
                name, "training plan", statistics.median(rates), _source("SageMaker training plan offerings", sagemaker)
            )


def _plan_hours(offer: Mapping[str, Any]) -> float:
    """Instance-hours of a plan: of its parts, or of one machine over its length."""
    parts = [
        part["InstanceCount"] * (part.get("DurationHours", 0) + part.get("DurationMinutes", 0) / 60)
        for part in offer.get("ReservedCapacityOfferings", [])
    ]
    return float(sum(parts)) or float(offer.get("DurationHours", 0)) + float(offer.get("DurationMinutes", 0)) / 60


def _sold_in_blocks(types: Sequence[str]) -> list[str]:
    """Blocks and plans are sold of the p family from p4d on; asking for others is an error."""
    return [name for name in types if name.startswith(("p4", "p5", "p6"))]


def check_region(region: str) -> str:
    """The region itself, if it looks like one; InputError."""
    import re

    if not re.fullmatch(r"[a-z]{2}(-[a-z]+)+-\d", region):
        raise InputError(f"--region {region}: is no AWS region, e.g. us-east-1")
    return region


def _require_known(region: str) -> None:
    import botocore.session

    session = botocore.session.get_session()
    known = [name for part in session.get_available_partitions() for name in session.get_available_regions("ec2", part)]
    if region not in known:
        near = ", ".join(difflib.get_close_matches(region, known, n=3, cutoff=0.5) or sorted(known)[:3])
        raise InputError(
            f"--region {region}: botocore {botocore.__version__} knows no such region; close to it: {near}; "
            "of a region that is newer, with a newer boto3"
        )


_WAYS = (
    (_ec2_rates, True),
    (_sagemaker_rates, False),
    (_spot_prices, False),
    (_capacity_blocks, True),
    (_training_plans, True),
)
"""What is asked, and whether for each type by itself: one that a service doesn't sell leaves the others' prices."""
