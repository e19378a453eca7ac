"""GetProducts of the Price List: products as the service lists them, chosen by their attributes."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from trainyard.emulator.authorization.requests import AwsRequest
from trainyard.emulator.pricing.offers import Offers, Rate, RefusedError, only, page_of
from trainyard.hardware import instance

ENDPOINT_REGIONS = ("us-east-1", "eu-central-1", "ap-south-1")
"""Where the Price List answers, for all regions."""

_INVALID = "InvalidParameterException"
_MAX_RESULTS = 100
_ON_DEMAND_TERM, _HOURLY_RATE = "JRTCKXETXF", "6YS6EN2CT7"
"""The codes of the on-demand term and of its hourly dimension, the same for every product."""

_Product = dict[str, Any]


class PriceListService:
    """Answers requests of the service `pricing`."""

    def __init__(self, offers: Offers) -> None:
        self._offers = offers

    def __call__(self, request: AwsRequest) -> tuple[int, dict[str, Any]]:
        """Status and JSON body."""
        try:
            if request.operation != "GetProducts":
                raise RefusedError("UnknownOperationException", f"the emulator doesn't know {request.operation}")
            if request.region not in ENDPOINT_REGIONS:
                regions = ", ".join(ENDPOINT_REGIONS)
                raise RefusedError(
                    "InvalidSignatureException", f"the Price List answers in {regions}, not in {request.region}"
                )
            return 200, get_products(self._offers, request.parameters)
        except RefusedError as error:
            return 400, {"__type": error.code, "Message": str(error)}


def get_products(offers: Offers, request: Mapping[str, Any]) -> dict[str, Any]:
    """One page of the products that match every filter; RefusedError."""
    only(request, "GetProducts", "ServiceCode", "Filters", "FormatVersion", "MaxResults", "NextToken")
    if request.get("FormatVersion", "aws_v1") != "aws_v1":
        raise RefusedError(_INVALID, f"FormatVersion {request['FormatVersion']} must be aws_v1")
    found = [product for product in _listed(offers, request.get("ServiceCode")) if _matches(product, request)]
    items, token = page_of(found, request, most=_MAX_RESULTS, code="InvalidNextTokenException")
    answer = {"FormatVersion": "aws_v1", "PriceList": [json.dumps(item) for item in items]}
    return {**answer, "NextToken": token} if token else answer


def _listed(offers: Offers, service: Any) -> list[_Product]:
    services: dict[str, Callable[[], list[_Product]]] = {
        "AmazonEC2": lambda: [item for rate in offers.on_demand() for item in _machine(rate)],
        "AmazonSageMaker": lambda: [_training(rate) for rate in offers.sagemaker()],
    }
    if service not in services:
        raise RefusedError(_INVALID, f"the emulator has no prices of {service}; it has those of {', '.join(services)}")
    return sorted(services[service](), key=lambda item: str(item["product"]["sku"]))


_FILTERED = """
    capacitystatus component gpu instanceName instanceType licenseModel locationType marketoption memory operatingSystem
    operation preInstalledSw regionCode servicecode tenancy usagetype vcpu
"""
"""The attributes that products have here, and filters may name."""


def _matches(product: _Product, request: Mapping[str, Any]) -> bool:
    for item in request.get("Filters") or []:
        field, kind = item.get("Field"), item.get("Type")
        if kind != "TERM_MATCH" or field not in _FILTERED.split():
            raise RefusedError(_INVALID, f"the emulator doesn't know the filter {kind} on {field}")
        if product["product"]["attributes"].get(field, "").lower() != str(item.get("Value", "")).lower():
            return False
    return True


def _machine(rate: Rate) -> list[_Product]:
    """A machine of EC2 stands in the list three times: used, reserved and idle, and in a reservation that is paid."""
    machine = instance(rate.instance_type)
    common = {
        "servicecode": "AmazonEC2",
        "instanceType": rate.instance_type,
        "regionCode": rate.region,
        "locationType": "AWS Region",
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "licenseModel": "No License required",
        "tenancy": "Shared",
        "marketoption": "OnDemand",
        "operation": "RunInstances",
        "vcpu": str(machine.vcpus),
        "memory": f"{machine.memory_gib:g} GiB",
        "gpu": str(machine.num_gpus),
    }
    prefix = "" if rate.region == "us-east-1" else f"{_usage_prefix(rate.region)}-"
    kinds = (
        ("Used", "BoxUsage", "On Demand", rate.usd_per_hour),
        ("UnusedCapacityReservation", "UnusedBox", "Unused Reservation", rate.usd_per_hour),
        ("AllocatedCapacityReservation", "Reservation", "Reservation", 0.0),
    )
    return [
        _product(
            "Compute Instance",
            {**common, "capacitystatus": status, "usagetype": f"{prefix}{usage}:{rate.instance_type}"},
            usd,
            f"{words} Linux {rate.instance_type} Instance Hour",
            rate,
        )
        for status, usage, words, usd in kinds
    ]


def _training(rate: Rate) -> _Product:
    name = f"ml.{rate.instance_type}"
    attributes = {
        "servicecode": "AmazonSageMaker",
        "instanceName": name,
        "instanceType": f"{name}-Training",
        "regionCode": rate.region,
        "locationType": "AWS Region",
        "component": "Training",
        "operation": "RunInstance",
        "usagetype": f"{_usage_prefix(rate.region)}-Train:{name}",
    }
    return _product("ML Instance", attributes, rate.usd_per_hour, f"hour for Training:{name}", rate)


def _product(family: str, attributes: Mapping[str, str], usd: float, words: str, rate: Rate) -> _Product:
    sku = hashlib.sha256(json.dumps(attributes, sort_keys=True).encode()).hexdigest()[:16].upper()
    since = f"{rate.as_of.isoformat()}T00:00:00Z"
    term = f"{sku}.{_ON_DEMAND_TERM}"
    dimension = {
        "unit": "Hrs",
        "beginRange": "0",
        "endRange": "Inf",
        "description": f"${usd:g} per {words}",
        "appliesTo": [],
        "rateCode": f"{term}.{_HOURLY_RATE}",
        "pricePerUnit": {"USD": f"{usd:.10f}"},
    }
    terms = {
        "priceDimensions": {f"{term}.{_HOURLY_RATE}": dimension},
        "sku": sku,
        "effectiveDate": since,
        "offerTermCode": _ON_DEMAND_TERM,
        "termAttributes": {},
    }
    return {
        "product": {"productFamily": family, "attributes": dict(attributes), "sku": sku},
        "serviceCode": attributes["servicecode"],
        "terms": {"OnDemand": {term: terms}},
        "version": rate.as_of.strftime("%Y%m%d000000"),
        "publicationDate": since,
    }


def _usage_prefix(region: str) -> str:
    """USE1 of us-east-1; AWS has exceptions (EU of eu-west-1), which nobody here reads."""
    area, *direction, number = region.split("-")
    return f"{area}{''.join(direction)[:1]}{number}".upper()
