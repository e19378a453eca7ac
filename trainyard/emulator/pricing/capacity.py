"""Machines that aren't bought on demand: EC2's spot history and capacity blocks, SageMaker's training plans."""

import datetime
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainyard.emulator.pricing.offers import Offers, Rate, RefusedError, known_type, only, page_of

ZoneNames = Mapping[str, str]
"""Zone id ("use1-az2") -> the account's name of it ("us-east-1c")."""

_INVALID = "InvalidParameterValue"
_HISTORY_DAYS = 90
_SWING = 0.1
"""How far a spot price strays from the table's one, either way."""
_LINUX = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")
_BLOCK_TYPES = ("p4", "p5", "p6", "trn")
_BLOCK_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_BLOCK_START = datetime.time(11, 30, tzinfo=datetime.UTC)
"""All capacity blocks begin and end at that time of a day."""
_BLOCK_DAYS = (1, 3, 7)
"""In how many days the blocks and plans on offer begin."""
_PLAN_TARGETS = ("training-job", "hyperpod-cluster", "endpoint")


def spot_history(
    offers: Offers, request: Mapping[str, Any], region: str, zones: ZoneNames, now: datetime.datetime
) -> dict[str, Any]:
    """DescribeSpotPriceHistory: changes in the time asked for and the last one before it, newest first."""
    names = ("InstanceTypes", "ProductDescriptions", "StartTime", "EndTime", "AvailabilityZone")
    only(request, "DescribeSpotPriceHistory", *names, "MaxResults", "NextToken", "DryRun")
    unpriced = [item for item in request.get("ProductDescriptions") or () if item not in _LINUX]
    if unpriced:
        raise RefusedError(_INVALID, f"the emulator has spot prices of {_LINUX[0]} alone, not of {unpriced[0]}")
    types = {known_type(name) for name in request.get("InstanceTypes") or ()}
    start = request.get("StartTime") or now - datetime.timedelta(days=_HISTORY_DAYS)
    end = min(request.get("EndTime") or now, now)
    found = []
    for place, rate in offers.spot(region):
        zone = zone_name(place, region, zones)
        if (not types or rate.instance_type in types) and request.get("AvailabilityZone") in (None, zone):
            limit = offers.rate(rate.instance_type, region, "on_demand")
            changes = list(_changes(rate, zone, limit, now))
            at_start = [at for at, _ in changes if at <= start]
            since = max(at_start, default=start)
            found += [
                {
                    "AvailabilityZone": zone,
                    "InstanceType": rate.instance_type,
                    "ProductDescription": _LINUX[0],
                    "SpotPrice": f"{usd:.6f}",
                    "Timestamp": at,
                }
                for at, usd in changes
                if since <= at <= end
            ]
    found.sort(key=lambda item: (item["Timestamp"], item["AvailabilityZone"]), reverse=True)
    items, token = page_of(found, request, most=1000)
    return {"SpotPriceHistory": items, "NextToken": token or ""}


def zone_name(place: str, region: str, zones: ZoneNames) -> str:
    """The zone's name: of "a", of an id, of a local zone ("atl2"), or of what is a name already; RefusedError."""
    if place.startswith(region):
        return place
    if len(place) == 1:
        return region + place
    if place in zones:
        return zones[place]
    local = re.fullmatch(r"([a-z]{3})(\d)", place)
    if local is None:
        raise RefusedError("InternalError", f"the emulator's price table names a zone {place} that {region} hasn't")
    return f"{region}-{local[1]}-{local[2]}a"


def _changes(
    rate: Rate, zone: str, limit: Rate | None, now: datetime.datetime
) -> Iterator[tuple[datetime.datetime, float]]:
    """A change a day, each zone at its own second, about the table's price and never above the one on demand."""
    second = _draw(rate.instance_type, zone) % 86400
    for back in range(_HISTORY_DAYS + 1):
        day = now.date() - datetime.timedelta(days=back)
        at = datetime.datetime.combine(day, datetime.time(), datetime.UTC) + datetime.timedelta(seconds=second)
        if at > now:
            continue
        share = _draw(rate.instance_type, zone, day.isoformat()) % 2001 / 1000 - 1
        usd = rate.usd_per_hour * (1 + _SWING * share)
        yield at, min(usd, limit.usd_per_hour) if limit else usd


def _draw(*words: str) -> int:
    return int.from_bytes(hashlib.sha256("/".join(words).encode()).digest()[:8])


def capacity_blocks(offers: Offers, request: Mapping[str, Any], region: str, now: datetime.datetime) -> dict[str, Any]:
    """DescribeCapacityBlockOfferings: at the table's rate, where the region has the type; empty elsewhere."""
    names = ("InstanceType", "InstanceCount", "CapacityDurationHours", "StartDateRange", "EndDateRange")
    only(request, "DescribeCapacityBlockOfferings", *names, "MaxResults", "NextToken", "DryRun")
    name, count, hours = _asked_block(request)
    rate = offers.rate(name, region, "capacity_block")
    first, last = request.get("StartDateRange"), request.get("EndDateRange")
    found = [
        {
            "CapacityBlockOfferingId": f"cbr-{_draw(name, region, start.isoformat(), str(hours), str(count)):017x}",
            "InstanceType": name,
            "AvailabilityZone": f"{region}a",
            "InstanceCount": count,
            "StartDate": start,
            "EndDate": end,
            "CapacityBlockDurationHours": hours,
            "UpfrontFee": f"{rate.usd_per_hour * count * hours:.2f}",
            "CurrencyCode": "USD",
            "Tenancy": "default",
        }
        for start, end in _spans(hours, now)
        if rate and (first is None or start >= first) and (last is None or end <= last)
    ]
    items, token = page_of(found, request, most=1000)
    return {"CapacityBlockOfferings": items, "NextToken": token or ""}


def _asked_block(request: Mapping[str, Any]) -> tuple[str, int, int]:
    name, count, hours = request.get("InstanceType"), request.get("InstanceCount", 1), request["CapacityDurationHours"]
    if not name:
        raise RefusedError("MissingParameter", "the emulator's capacity blocks are of an InstanceType")
    if not known_type(name).startswith(_BLOCK_TYPES):
        raise RefusedError(_INVALID, f"no capacity blocks are sold of {name}")
    if count not in _BLOCK_COUNTS:
        raise RefusedError(_INVALID, f"InstanceCount {count} must be one of {', '.join(map(str, _BLOCK_COUNTS))}")
    # Whole days up to two weeks, then whole weeks up to half a year.
    if not (hours > 0 and hours % 24 == 0 and (hours <= 336 or (hours % 168 == 0 and hours <= 4368))):
        raise RefusedError(_INVALID, f"CapacityDurationHours {hours} must be 1 to 14 days, or whole weeks up to 26")
    return str(name), int(count), int(hours)


def _spans(hours: int, now: datetime.datetime) -> Iterator[tuple[datetime.datetime, datetime.datetime]]:
    for days in _BLOCK_DAYS:
        start = datetime.datetime.combine(now.date() + datetime.timedelta(days=days), _BLOCK_START)
        yield start, start + datetime.timedelta(hours=hours)


def training_plans(offers: Offers, request: Mapping[str, Any], region: str, now: datetime.datetime) -> dict[str, Any]:
    """SearchTrainingPlanOfferings: at the rates that were stated; the shipped table has none, so none are offered."""
    names = ("InstanceType", "InstanceCount", "DurationHours", "TargetResources", "StartTimeAfter", "EndTimeBefore")
    only(request, "SearchTrainingPlanOfferings", *names)
    given, count, hours = (
        str(request.get("InstanceType", "")),
        request.get("InstanceCount", 1),
        request["DurationHours"],
    )
    if not given.startswith(tuple(f"ml.{kind}" for kind in _BLOCK_TYPES)):
        raise RefusedError("ValidationException", f"no training plans are sold of {given or 'no InstanceType'}")
    targets = request.get("TargetResources") or ["training-job"]
    odd = [item for item in targets if item not in _PLAN_TARGETS]
    if odd:
        raise RefusedError("ValidationException", f"target {odd[0]} must be one of {', '.join(_PLAN_TARGETS)}")
    rate = offers.rate(known_type(given), region, "training_plan")
    first, last = request.get("StartTimeAfter"), request.get("EndTimeBefore")
    found = [
        {
            "TrainingPlanOfferingId": f"tpo-{_draw(given, region, start.isoformat(), str(hours), str(count)):x}",
            "TargetResources": targets,
            "DurationHours": hours,
            "DurationMinutes": 0,
            "UpfrontFee": f"{rate.usd_per_hour * count * hours:.2f}",
            "CurrencyCode": "USD",
            "ReservedCapacityOfferings": [
                {
                    "InstanceType": given,
                    "InstanceCount": count,
                    "AvailabilityZone": f"{region}a",
                    "DurationHours": hours,
                    "DurationMinutes": 0,
                    "StartTime": start,
                    "EndTime": end,
                }
            ],
        }
        for start, end in _spans(hours, now)
        if rate and (first is None or start >= first) and (last is None or end <= last)
    ]
    return {"TrainingPlanOfferings": found}
