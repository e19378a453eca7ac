"""What an instance-hour costs, where that was read, and when. No price is ever guessed, and no old one is quoted.

The shipped table is `aws_prices.csv`; `trainyard prices refresh` writes a file of further rows. The youngest is quoted,
of one day that of the file; one of a day still to come behind all others. A book that is opened for a day refuses what
is older than `MAX_AGE_DAYS`; one without quotes any age (a template must not change overnight).
"""

import datetime
import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainyard.errors import InputError
from trainyard.hardware.instances import instance
from trainyard.hardware.tables import rows
from trainyard.spec.words import counted

DEFAULT_REGION = "us-east-1"

Purchase = Literal["on_demand", "spot", "capacity_block", "training_plan"]

PURCHASES: dict[Purchase, str] = {
    "on_demand": "on-demand",
    "spot": "spot",
    "capacity_block": "capacity block",
    "training_plan": "training plan",
}
"""Way to buy -> its word in messages."""

MAX_AGE_DAYS: dict[str, int] = {
    "on_demand": 540,
    "spot": 30,
    "capacity_block": 365,
    "training_plan": 365,
    "storage": 5 * 365,
}
"""List prices of GPUs last moved in June 2025, those of blocks once or twice a year, spot prices within hours; S3's
standard rate has stood for ten years."""

SAGEMAKER = "sagemaker on-demand"
"""Rows of SageMaker's own `ml.` rate, which only a refresh brings."""

NOT_AWS = "which is not AWS"
"""In the source of a row that a refresh was told by another endpoint, an emulator's say."""

EVERYWHERE = "most regions"
"""What a source says of a price instead of a region."""

_KINDS: dict[str, Purchase] = {
    "on-demand": "on_demand",
    SAGEMAKER: "on_demand",
    "spot snapshot": "spot",
    "spot": "spot",
    "capacity block": "capacity_block",
    "capacity block after Jan 2026": "capacity_block",
    "training plan": "training_plan",
}
"""A row's `purchase` -> way to buy; others ("capacity block before Jan 2026") are history."""


@dataclass(frozen=True)
class Price:
    """USD for one instance and one hour."""

    instance_type: str
    region: str
    usd_per_hour: float
    basis: str
    """What kind of price it is, and how the bill may differ from it."""
    as_of: datetime.date
    """The day it was read or last confirmed; for an undated source, the earliest that its contents allow."""
    source: str


@dataclass(frozen=True)
class StoragePrice:
    """USD for a decimal GB kept for a month."""

    usd_per_gb_month: float
    as_of: datetime.date
    source: str


class PriceBook:
    """Prices as of a day."""

    def __init__(self, found: Iterable[Mapping[str, str]], *, today: datetime.date | None) -> None:
        """`found`: rows as in aws_prices.csv; of rows of one day, the first counts. `today` None: any age is quoted."""
        self._rows = [row for row in found if row["purchase"] in _KINDS]
        self._today = today

    @classmethod
    def opened(cls, refreshed: Path | None = None, *, today: datetime.date | None) -> "PriceBook":
        """The shipped table, behind the rows of a file that `prices refresh` wrote, where there is one.

        InputError for a file that can't be read: quoting the older price in silence would be worse.
        """
        newer = read_refreshed(refreshed) if refreshed is not None and refreshed.exists() else []
        return cls([*newer, *rows("aws_prices")], today=today)

    @property
    def rows(self) -> list[Mapping[str, str]]:
        """Every row, newest source first."""
        return list(self._rows)

    def price(self, instance_type: str, region: str = DEFAULT_REGION, purchase: Purchase = "on_demand") -> Price:
        """The hourly price of a type in a region; InputError where there is none, or none that is young enough.

        On demand, SageMaker's own rate for an `ml.` type where a refresh brought it, else EC2's with the difference
        said. Spot is the median over the region's zones at one instant.
        """
        machine = instance(instance_type)
        offers = [row for row in self._rows if row["instance"] == machine.type]
        matching = [row for row in offers if _KINDS[row["purchase"]] == purchase and row["price"] != "none"]
        if not instance_type.startswith("ml."):
            matching = [row for row in matching if row["purchase"] != SAGEMAKER]
        here = [row for row in matching if row["region"] in (region, EVERYWHERE)]
        if not here:
            raise InputError(_refusal(instance_type, region, purchase, offers, matching))
        young = [row for row in here if self._is_young(purchase, datetime.date.fromisoformat(row["as_of"]))]
        # A day that is still to come is a wrong clock's, here or where the row was written.
        past = [row for row in young if not self._is_ahead(datetime.date.fromisoformat(row["as_of"]))]
        chosen = _of_one_source(past or young or here)
        as_of = datetime.date.fromisoformat(chosen[0]["as_of"])
        self._require_young(purchase, as_of, f"{PURCHASES[purchase]} price of {instance_type} in {region}")
        values = [float(row["price"]) for row in chosen]
        return Price(
            instance_type=instance_type,
            region=region,
            usd_per_hour=statistics.median(values),
            basis=_basis(purchase, instance_type, chosen, values)
            + _doubt(chosen[0]["source"])
            + self._clock_doubt(as_of),
            as_of=as_of,
            source=chosen[0]["source"],
        )

    def storage(self, item: str, region: str = DEFAULT_REGION) -> StoragePrice:
        """The price of keeping data ("s3-standard"); InputError where there is none, or none that is young enough."""
        here = [row for row in rows("aws_base_prices") if (row["item"], row["region"]) == (item, region)]
        if not here:
            raise InputError(f"no price known for {item} in {region}")
        as_of = datetime.date.fromisoformat(here[0]["as_of"])
        self._require_young("storage", as_of, f"price of {item} in {region}")
        return StoragePrice(float(here[0]["price"]), as_of, here[0]["source"])

    def _is_young(self, kind: str, as_of: datetime.date) -> bool:
        return self._today is None or (self._today - as_of).days <= MAX_AGE_DAYS[kind]

    def _is_ahead(self, as_of: datetime.date) -> bool:
        """Of a day later than tomorrow, which somewhere it is already."""
        return self._today is not None and (as_of - self._today).days > 1

    def _clock_doubt(self, as_of: datetime.date) -> str:
        return f"; dated later than this machine's clock, {self._today}" if self._is_ahead(as_of) else ""

    def _require_young(self, kind: str, as_of: datetime.date, what: str) -> None:
        if self._today is not None and not self._is_young(kind, as_of):
            age = (self._today - as_of).days
            raise InputError(
                f"the {what} is of {as_of}, {counted(age, 'day')} old, and is not quoted after {MAX_AGE_DAYS[kind]}; "
                "get today's: trainyard prices refresh"
            )


def price(instance_type: str, region: str = DEFAULT_REGION, *, spot: bool = False) -> Price:
    """The shipped table's price, whatever its age; InputError where it has none."""
    return PriceBook.opened(today=None).price(instance_type, region, "spot" if spot else "on_demand")


REFRESHED_FIELDS = ("instance", "region", "zone", "purchase", "price", "source", "as_of")


def read_refreshed(path: Path) -> list[dict[str, str]]:
    """The rows of a refreshed file; InputError for one that isn't as `prices refresh` writes it."""
    mend = "write it anew: trainyard prices refresh"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["prices"]
        checked = [{field: str(row[field]) for field in REFRESHED_FIELDS} for row in found]
        for row in checked:
            datetime.date.fromisoformat(row["as_of"])
            if not 0 < float(row["price"]) < 1e6 or row["purchase"] not in _KINDS:
                raise ValueError(f"no price: {row}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: is no file of prices ({type(error).__name__}: {error}); {mend}") from None
    return checked


def _of_one_source(here: list[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """One source's rows of one kind: SageMaker's own rate before EC2's, then the youngest, then a refreshed file's."""
    own = [row for row in here if row["purchase"] == SAGEMAKER]
    first = max(own or here, key=lambda row: datetime.date.fromisoformat(row["as_of"]))  # of equals the first
    return [row for row in here if all(row[name] == first[name] for name in ("purchase", "source", "as_of"))]


def _doubt(source: str) -> str:
    return f"; no real price: it was asked of an endpoint {NOT_AWS}" if NOT_AWS in source else ""


def _basis(purchase: Purchase, instance_type: str, chosen: list[Mapping[str, str]], values: list[float]) -> str:
    spread = f"{min(values):.2f} to {max(values):.2f} over {len(values)} zones" if len(values) > 1 else "one zone"
    if purchase == "spot":
        moment = "median of one undated snapshot" if chosen[0]["purchase"] == "spot snapshot" else "median of that day"
        return f"EC2 spot, {moment} ({spread}); not a forecast"
    if purchase == "capacity_block":
        where = " (said of most regions)" if chosen[0]["region"] == EVERYWHERE else ""
        return f"EC2 capacity block, paid up front{where}; SageMaker's training plans have their own"
    if purchase == "training_plan":
        return "SageMaker training plan, paid up front"
    if chosen[0]["purchase"] == SAGEMAKER:
        return "SageMaker training, on demand"
    if instance_type.startswith("ml."):
        return "EC2 on demand; SageMaker's own ml. rate is not in the table and is usually higher"
    return "EC2 on demand"


def _refusal(
    instance_type: str,
    region: str,
    purchase: Purchase,
    offers: list[Mapping[str, str]],
    matching: list[Mapping[str, str]],
) -> str:
    message = f"no {PURCHASES[purchase]} price known for {instance_type} in {region}"
    if matching:
        return f"{message}; known in {', '.join(sorted({row['region'] for row in matching}))}"
    other = sorted({row["purchase"] for row in offers if row["price"] != "none"})
    return f"{message}; known for it: {', '.join(other)}" if other else f"{message} or anywhere else"
