"""Batches that a job never learns from, because the first time it did its loss went wrong (`on_anomaly: rollback`).

left_out_batches.jsonl, beside the checkpoints too, has a row for each: from its first line on, every start of the job
passes over the same sequences, so that the job is bit for bit one that never had them.
"""

import json
import time
from pathlib import Path
from typing import Any

from trainer.checkpoint.group import Group
from trainer.data.stream import BatchStream
from trainer.observe.metrics import replace_all
from trainer.runtime import Runtime
from trainer.speech import say
from trainyard.errors import InputError, JobFailedError
from trainyard.spec.words import counted

LEFT_OUT_FILE = "left_out_batches.jsonl"


class LeftOutBatches:
    """The record; the same on every rank."""

    def __init__(self, output_dir: Path, runtime: Runtime) -> None:
        self.path = output_dir / LEFT_OUT_FILE
        self._runtime = runtime
        self._group = Group(runtime.control_group, runtime.rank, runtime.world_size)
        self._rows: list[dict[str, Any]] = []

    def read(self) -> None:
        """Take over what is in the first rank's file; all ranks together."""
        self._rows = self._group.from_first(lambda: _rows_of(self.path))

    def check(self, position: int, batch_size: int) -> None:
        """InputError where the stream, from this position on, comes to no batch that is one that is left out: in steps
        of another size such a batch would be learnt from, or good ones would be left out with it."""
        for row in self._rows:
            first, number = row["first_sequence"], row.get("num_sequences", batch_size)  # the first trainers' have none
            if first + number > position and (number != batch_size or (first - position) % batch_size):
                raise InputError(
                    f"{self.path}: leaves out {counted(number, 'sequence')}, from {first} on, which are no "
                    "batch of a job that"
                    f" goes on at sequence {position} with training.global_batch_size {batch_size}: set it to what it"
                    " was, or remove the file here and beside the checkpoints to learn from all of them"
                )

    def add(self, *, step: int, anomaly: str, data: dict[str, Any], checkpoint_step: int, num_sequences: int) -> None:
        """The batch that lies at position `data` of the training stream, of a step that went wrong (all ranks).

        A second word on the batch that was added last replaces the first.
        """
        if self._is_last(data):
            self._rows.pop()
        row = {
            "step": step,
            "anomaly": anomaly,
            "first_sequence": data["sequences_consumed"],
            "num_sequences": num_sequences,
            "rolled_back_to": checkpoint_step,
            "at": time.time(),
        }
        self._rows.append(row)
        content = "".join(json.dumps(one) + "\n" for one in self._rows)
        is_written = self._group.from_first(lambda: replace_all(self.path, content))
        if self._runtime.is_first and not is_written:
            # This start passes over it all the same; a later one would learn from it, and come back here.
            say(f"{self.path}: not written, its disk is full")

    def _is_last(self, data: dict[str, Any]) -> bool:
        return bool(self._rows) and self._rows[-1]["first_sequence"] == data["sequences_consumed"]

    def num_since(self, checkpoint_step: int, data: dict[str, Any]) -> int:
        """Batches in a row, before that at `data`, that cost a way back to one and the same checkpoint."""
        number = 0
        for row in reversed(self._rows[:-1] if self._is_last(data) else self._rows):
            if row["rolled_back_to"] != checkpoint_step:
                break
            number += 1
        return number

    def pass_over(self, stream: BatchStream) -> None:
        """Read on, as long as the stream stands before a batch that is left out."""
        positions = {row["first_sequence"] for row in self._rows}
        while positions and stream.state_dict()["sequences_consumed"] in positions:
            stream.next_step()


def _rows_of(path: Path) -> list[dict[str, Any]]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert all(isinstance(row[key], int) for row in rows for key in ("first_sequence", "rolled_back_to"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise JobFailedError(f"{path}: can't be read: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AssertionError):
        raise JobFailedError(
            f"{path}: is not what this trainer wrote, and says which batches are left out: restore the file, or remove"
            " it here and beside the checkpoints to learn from all of them"
        ) from None
    return rows
