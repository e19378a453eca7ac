"""Whether hosts are lost again and again before the next checkpoint: lost_hosts.jsonl, beside these. No torch.

Training queues, Slurm, Kubernetes and Ray start a job again that lost a host, and count starts alone; whether it gets
any further they can't tell. So the hosts that are left say it themselves: at the third loss in a row from the same
checkpoint they give, in place of the words by which these start a job again, a diagnosis.
"""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from trainer.host.hosts import LOST_HOST
from trainer.host.recovery import Ending
from trainer.speech import say

LOSSES_FILE = "lost_hosts.jsonl"
MOST_LOSSES = 3
"""As of failures at one step in place: the third is not for want of luck."""
_SECONDS = 8.0
"""For all that is asked of the destination: a host that SageMaker has told to stop is killed soon."""
_COMMITTED = re.compile(r"checkpoints/step-(\d+)/COMMITTED$")


class LostHosts:
    """A host's look at the losses of the job's starts."""

    def __init__(self, destination: str, *, index: int, settings: Mapping[str, str]) -> None:
        """`index`: this host's among the job's. `settings`: the environment, which tells who asked for this start."""
        self._destination = destination
        self._index = index
        self._asked = settings.get("TRAINYARD_ASKED_ATTEMPT") or settings.get("TRAINYARD_ATTEMPT", "")
        self._began_at = time.time()

    def judged(self, ending: Ending) -> Ending:
        """The ending; of a host that is lost for the third time in a row from one checkpoint, with a diagnosis."""
        if not LOST_HOST.match(ending.reason):
            return ending
        found: list[tuple[int, int]] = []

        def look() -> None:
            try:
                found.append(self._noted(ending))
            except Exception as error:  # of S3, of a disk: the job has ended, and says why all the same
                say(f"entrypoint: {LOSSES_FILE} can't be kept at {self._destination}: {' '.join(str(error).split())}")

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(timeout=_SECONDS)
        count, step = found[0] if found else (0, 0)
        return replace(ending, reason=_diagnosis(ending.reason, count, step)) if count >= MOST_LOSSES else ending

    def _noted(self, ending: Ending) -> tuple[int, int]:
        """Losses in a row from the newest checkpoint, this one included, and that checkpoint's step; 0: there is none.

        One host notes it: the first, or the second where it is the first that is gone. All count.
        """
        place = _S3Place(self._destination) if self._destination.startswith("s3://") else _Folder(self._destination)
        step = max((int(found[1]) for name in place.names() if (found := _COMMITTED.search(name))), default=0)
        rows = [row for line in place.read().splitlines() if (row := _row(line))]
        if self._index == int(ending.reason.startswith("the first host")):
            rows_now = [*rows, {"at": time.time(), "asked": self._asked, "step": step, "reason": ending.reason}]
            place.write("".join(json.dumps(row) + "\n" for row in rows_now))
        # Not what another host has just noted of this very loss; and who resumed the job has mended what was wrong.
        before = [row for row in rows if row.get("at", 0) < self._began_at and row.get("asked") == self._asked]
        return 1 + _in_a_row(before, step), step


def _in_a_row(rows: Sequence[Mapping[str, Any]], step: int) -> int:
    count = 0
    for row in reversed(rows):
        if row.get("step") != step:
            break
        count += 1
    return count


def _diagnosis(reason: str, count: int, step: int) -> str:
    where = f"since step {step} was saved" if step else "before the first checkpoint"
    return (
        f"{count} times in a row {where} a host was lost, so another start may not help: see why (memory, a bad"
        f" machine, saves that are too rare), then `trainyard resume`; the last time: {reason}"
    )


def _row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


class _Place(Protocol):
    def names(self) -> Sequence[str]:
        """Of files of checkpoints."""

    def read(self) -> str:
        """The losses so far."""

    def write(self, text: str) -> None:
        """In their place."""


class _Folder:
    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def names(self) -> Sequence[str]:
        return [path.as_posix() for path in self._path.glob("checkpoints/step-*/COMMITTED")]

    def read(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self._path / LOSSES_FILE).read_text(encoding="utf-8")
        return ""

    def write(self, text: str) -> None:
        partial = self._path / f"{LOSSES_FILE}.new"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._path / LOSSES_FILE)


class _S3Place:
    def __init__(self, uri: str) -> None:
        import boto3
        from botocore.config import Config

        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        self._bucket, self._prefix = bucket, f"{prefix.strip('/')}/".lstrip("/")
        # A private endpoint's bucket host names (bucket.localhost) resolve nowhere.
        private = "AWS_ENDPOINT_URL" in os.environ or "AWS_ENDPOINT_URL_S3" in os.environ
        style = {"addressing_style": "path" if private else "auto"}
        config = Config(connect_timeout=2, read_timeout=4, retries={"total_max_attempts": 2}, s3=style)
        self._s3 = boto3.client("s3", config=config)

    def names(self) -> Sequence[str]:
        pages = self._s3.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=f"{self._prefix}checkpoints/step-"
        )
        return [item["Key"] for page in pages for item in page.get("Contents", [])]

    def read(self) -> str:
        try:
            answer = self._s3.get_object(Bucket=self._bucket, Key=self._prefix + LOSSES_FILE)
        except self._s3.exceptions.NoSuchKey:
            return ""
        return str(answer["Body"].read().decode("utf-8"))

    def write(self, text: str) -> None:
        self._s3.put_object(Bucket=self._bucket, Key=self._prefix + LOSSES_FILE, Body=text.encode())
