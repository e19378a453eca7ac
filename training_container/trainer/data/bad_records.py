"""Broken records: counted, named with their place, left out up to a limit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainyard.errors import InputError

NUM_NAMED = 5
"""How many are named: enough to see what is wrong."""


class BadRecordError(Exception):
    """This record can't be learnt from: the reason, without its place."""


@dataclass
class BadRecords:
    """What was left out of one data set; `add` raises InputError beyond `limit`."""

    limit: int
    where: str
    """The data set, for the message: data.train."""
    count: int = 0
    named: list[str] = field(default_factory=list)
    """`place: reason` of the first few."""

    def add(self, place: Callable[[], str], reason: str) -> None:
        """One more, unless the limit is reached. Its place is asked for if it is named: it may cost a reading."""
        self.extend(1, [f"{place()}: {reason}"] if len(self.named) < NUM_NAMED else [])

    def extend(self, count: int, named: Sequence[str]) -> None:
        """Those that another part of the data set has counted."""
        self.count += count
        self.named += named[: NUM_NAMED - len(self.named)]
        if self.count > self.limit:
            if not self.limit:
                raise InputError(f"{self.where}: {self.named[0]}; mend it, or allow some with data.max_bad_records")
            more = f" (the first of {self.count} so far)" if self.count > len(self.named) else ""
            raise InputError(
                f"{self.where}: more bad records than data.max_bad_records ({self.limit}) allows: "
                f"{'; '.join(self.named)}{more}; mend them, or raise the limit to leave them out"
            )
