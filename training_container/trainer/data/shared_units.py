"""Tokenized units beside the job's checkpoints, so that hosts share the work and new machines needn't do it again.

A unit's description goes up last, so that what is found is whole. Sharing never fails a job: a unit that can't be
fetched is tokenized here, one that can't be put is said and kept on this host alone.
"""

import json
import os
from pathlib import Path

from trainer.checkpoint.destination import (
    Destination,
    DestinationError,
    MissingFileError,
    open_destination,
    with_retries,
)
from trainer.data.token_units import KINDS, UnitTokens, open_unit
from trainer.speech import say

_FOLDER = "tokens"
_DELAYS_SECONDS = (0.5, 2.0)


class SharedUnits:
    """Units under `tokens/` of a checkpoint destination."""

    def __init__(self, uri: str) -> None:
        self._destination: Destination = open_destination(uri)

    @staticmethod
    def first_of(num_units: int) -> int:
        """Where this host begins: each at another place, so that two rarely are at the same unit."""
        rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return rank // ranks_per_host * ranks_per_host * num_units // num_ranks

    def fetch(self, folder: Path, key: str) -> UnitTokens | None:
        """The unit, copied into `folder`; None if nobody has put it there."""
        try:
            if not self._destination.has(f"{_FOLDER}/{key}.json"):
                return None
            description = self._destination.get_bytes(f"{_FOLDER}/{key}.json")
            for kind in _kinds_of(description):
                self._destination.get_file(f"{_FOLDER}/{key}.{kind}", folder / f"{key}.{kind}")
        except MissingFileError:
            return None
        except DestinationError as error:
            say(f"tokens of {key} not fetched, so they are made here: {error}")
            return None
        partial = folder / f"{key}.{os.getpid()}.json.partial"
        partial.write_bytes(description)
        partial.replace(folder / f"{key}.json")
        return open_unit(folder, key)

    def put(self, folder: Path, unit: UnitTokens) -> None:
        """Copies a unit there."""
        try:
            for kind in KINDS:
                path = folder / f"{unit.key}.{kind}"
                if kind != "learnt" or not unit.all_learnt:
                    with_retries(
                        lambda path=path: self._destination.put_file(f"{_FOLDER}/{path.name}", path),  # type: ignore[misc]
                        what=f"of {path.name}",
                        report=say,
                        delays_seconds=_DELAYS_SECONDS,
                    )
        except DestinationError as error:
            say(f"tokens of {unit.key} stay on this host: {error}")


def _kinds_of(description: bytes) -> list[str]:
    """The unit's other files: one that isn't there must not be asked for (`Destination.has`)."""
    try:
        all_learnt = bool(json.loads(description)["all_learnt"])
    except (ValueError, KeyError, TypeError):
        raise MissingFileError("no unit's description") from None
    return [kind for kind in KINDS[:-1] if kind != "learnt" or not all_learnt]
