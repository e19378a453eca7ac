"""The rates that all answers are made of, and what answers have in common: refusals and pages."""

import base64
import binascii
import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trainyard.errors import InputError
from trainyard.hardware import PriceBook, instance
from trainyard.hardware.prices import PURCHASES, SAGEMAKER, Purchase

PAGE_ITEMS = 5
"""The most that one answer holds."""

_FIELDS = ("instance", "region", "zone", "purchase", "price", "as_of")
_STATED_KINDS = (*PURCHASES.values(), SAGEMAKER)
_SPOT_KINDS = ("spot", "spot snapshot")

Item = TypeVar("Item")


class RefusedError(Exception):
    """The service says no: its own error code, and why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Rate:
    """USD for an hour of one instance, since `as_of`."""

    instance_type: str
    """Without `ml.`."""
    region: str
    usd_per_hour: float
    as_of: datetime.date


class Offers:
    """All rates of the account, as rows of trainyard/hardware/aws_prices.csv."""

    def __init__(self) -> None:
        self._book = PriceBook.opened(today=None)

    def replace(self, request: Mapping[str, Any]) -> dict[str, int]:
        """The rows of `{"rows": [...]}` in place of all that were; ValueError or InputError. null: the shipped ones."""
        given = request.get("rows")
        if set(request) != {"rows"} or not isinstance(given, list | None):
            raise ValueError('the body must be {"rows": [...]}, or {"rows": null} for the shipped table')
        book = PriceBook.opened(today=None) if given is None else PriceBook(map(_checked, given), today=None)
        self._book = book
        return {"rows": len(book.rows)}

    def rate(self, instance_type: str, region: str, purchase: Purchase) -> Rate | None:
        """What one is sold at; None where it isn't. On demand: EC2's rate."""
        try:
            found = self._book.price(instance_type, region, purchase)
        except InputError:
            return None
        return Rate(instance_type, region, found.usd_per_hour, found.as_of)

    def on_demand(self) -> list[Rate]:
        """EC2's rates on demand, everywhere."""
        places = {(row["instance"], row["region"]) for row in self._book.rows if row["purchase"] == "on-demand"}
        found = [self.rate(*place, "on_demand") for place in sorted(places)]
        return [rate for rate in found if rate is not None]

    def sagemaker(self) -> list[Rate]:
        """SageMaker's own rates of training instances, everywhere: the shipped table has none."""
        return [_rate(row) for row in self._book.rows if row["purchase"] == SAGEMAKER]

    def spot(self, region: str) -> list[tuple[str, Rate]]:
        """The zones of a region as the table names them, and their rates."""
        here = [row for row in self._book.rows if row["purchase"] in _SPOT_KINDS and row["region"] == region]
        return [(row["zone"], _rate(row)) for row in here]


def known_type(instance_type: str) -> str:
    """The type itself, without `ml.`; RefusedError for one that the emulator doesn't know."""
    try:
        return instance(instance_type).type
    except InputError as error:
        raise RefusedError("InvalidParameterValue", f"Invalid instance type: {error}") from None


def only(request: Mapping[str, Any], operation: str, *names: str) -> None:
    """RefusedError for a parameter that is left out of account here: an answer without it would be wrong."""
    odd = sorted(set(request) - set(names))
    if odd:
        raise RefusedError("InvalidParameter", f"the emulator doesn't know {odd[0]} of {operation}")


def page_of(
    items: Sequence[Item], request: Mapping[str, Any], *, most: int, code: str = "InvalidParameterValue"
) -> tuple[list[Item], str | None]:
    """The items of one answer and the token of the next one; RefusedError(code) for a token of another question."""
    wanted = request.get("MaxResults", most)
    if not 1 <= int(wanted) <= most:
        raise RefusedError(code, f"MaxResults {wanted} must be between 1 and {most}")
    question = {key: value for key, value in request.items() if key not in ("NextToken", "MaxResults")}
    mark = hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode()).hexdigest()[:16]
    start = 0
    if request.get("NextToken"):
        try:
            asked, _, at = base64.urlsafe_b64decode(str(request["NextToken"])).decode().partition(":")
            start = int(at) if asked == mark else -1
        except (binascii.Error, ValueError):
            start = -1
        if start < 0:
            raise RefusedError(code, "the NextToken is none of this question's")
    end = start + min(int(wanted), PAGE_ITEMS)
    more = base64.urlsafe_b64encode(f"{mark}:{end}".encode()).decode() if end < len(items) else None
    return list(items[start:end]), more


def _rate(row: Mapping[str, str]) -> Rate:
    return Rate(row["instance"], row["region"], float(row["price"]), datetime.date.fromisoformat(row["as_of"]))


def _checked(row: Any) -> dict[str, str]:
    if not isinstance(row, dict) or set(row) != set(_FIELDS):
        raise ValueError(f"a row must have {', '.join(_FIELDS)}, not {row}")
    stated = {name: str(value) for name, value in row.items()}
    if stated["purchase"] not in _STATED_KINDS:
        raise ValueError(f"purchase {stated['purchase']} must be one of {', '.join(_STATED_KINDS)}")
    datetime.date.fromisoformat(stated["as_of"])
    if instance(stated["instance"]).type != stated["instance"] or float(stated["price"]) < 0:
        raise ValueError(f"instance {stated['instance']} must have no ml., and price {stated['price']} be 0 or more")
    return {**stated, "source": "stated for the emulator"}
