"""What a campaign looks at: the job's own words, the samples it read, and its checkpoints at every moment."""

import contextlib
import itertools
import json
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

from sites import Site

from trainyard.errors import TrainyardError
from trainyard.launch.checkpoints import Checkpoint, list_checkpoints, verified

_COMMITTED = re.compile(r"checkpoint step=(\d+) committed")
_RESUMED = re.compile(r"resumed step=(\d+)")
_STEP = re.compile(r"step=(\d+) loss=")
_PATIENCE_SECONDS = 4.0
"""How long a look that finds no good checkpoint is repeated, once at least: retention may remove what was listed."""
DAMAGE_SECONDS = 5.0
"""How long damage waits for two good checkpoints: less than a campaign's jobs may stand still."""


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Its whole lines; none where there is no such file."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def samples(folder: Path) -> dict[int, list[str]]:
    """Which sequences each step was made of, over all ranks: of the last time that the step was made."""
    found: dict[int, list[str]] = {}
    for path in sorted(folder.glob("samples-*.jsonl")):
        last = {row["step"]: row["ids"] for row in read_jsonl(path)}
        for step, ids in last.items():
            found[step] = sorted({*found.get(step, []), *ids})
    return found


class Story:
    """The job's events in their order: what was committed, resumed and finished when."""

    def __init__(self, folder: Path) -> None:
        self._events = read_jsonl(folder / "events.jsonl")

    def restarts_after(self, at: float) -> list[dict[str, Any]]:
        """Starts of the ranks after a moment: `at`, `resumed` (0: anew), `last_step` and `commits` before it."""
        starts: list[dict[str, Any]] = []
        last_step, commits = 0, set()
        voided: dict[int, int] = {}
        """Step to the starts before it was spoiled: what is told of in the same start was there before."""
        for event in self._events:
            if "start" in event:
                known = commits - set(voided)
                starts.append({"at": event["at"], "resumed": 0, "last_step": last_step, "commits": known})
                starts[-1]["has_begun"] = False
            elif "damaged" in event:
                voided[event["damaged"]] = len(starts)
            elif match := _COMMITTED.match(event["line"]):
                step = int(match[1])
                commits.add(step)
                if voided.get(step, len(starts)) < len(starts):
                    del voided[step]
            elif (match := _RESUMED.match(event["line"])) and starts:
                # What the start before lost is lost once, also where this one makes no step.
                starts[-1]["resumed"] = last_step = int(match[1])
                starts[-1]["has_begun"] = True
            elif match := _STEP.match(event["line"]):
                last_step = int(match[1])
                if starts:
                    starts[-1]["has_begun"] = True
        return [start for start in starts if start["at"] > at]

    def next_step_after(self, at: float) -> float | None:
        """When the next step was finished."""
        return next(
            (event["at"] for event in self._events if event["at"] > at and _STEP.match(event.get("line", ""))), None
        )

    def lost_commits(self) -> list[str]:
        """Starts that went on from before the newest checkpoint that had been told and was whole."""
        problems = []
        for start in self.restarts_after(0.0):
            newest = max(start["commits"], default=0)
            if start["has_begun"] and start["resumed"] < newest:
                problems.append(f"step {newest} was committed, and step {start['resumed']} was resumed")
        return problems


def newest_good(destination: str, s3: Any) -> Checkpoint | None:
    """The newest checkpoint of which every byte is as promised."""
    for checkpoint in reversed(list_checkpoints(destination, s3)):
        if checkpoint.is_good and (whole := verified(destination, s3, checkpoint)).is_good:
            return whole
    return None


class Guard:
    """Looks again and again whether a good checkpoint is there, from the first one on.

    What is gone between two looks, or comes back within `_PATIENCE_SECONDS`, it does not see.
    """

    def __init__(self, site: Site, *, pause_seconds: float) -> None:
        self._site = site
        self._pause_seconds = pause_seconds
        self._stop = threading.Event()
        self.num_looks = 0
        self.problems: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        is_there = False
        while not self._stop.wait(self._pause_seconds):
            found = self._look()
            if found is not None:
                is_there = True
                self.num_looks += 1
            elif is_there:
                self.problems.append("for a moment there was no good checkpoint")
                return

    def _look(self) -> Checkpoint | None:
        until = time.monotonic() + _PATIENCE_SECONDS
        for number in itertools.count(1):
            with contextlib.suppress(TrainyardError, OSError):
                if (found := newest_good(self._site.destination, self._site.s3)) is not None:
                    return found
            if number > 1 and time.monotonic() > until:  # one look may take longer than that on a busy machine
                break
            time.sleep(0.2)
        return None

    def close(self) -> None:
        """The last look has been taken."""
        self._stop.set()
        self._thread.join(timeout=30)


def damage(kind: str, destination: str, s3: Any, draw: random.Random, told: Path) -> bool:
    """Spoil the newest committed checkpoint, once a save that is on its way has ended; `told`: what gets to know.

    Whether it did: the only good one stays, since a job that loses it has nothing to prove.
    """
    until = time.monotonic() + DAMAGE_SECONDS
    while True:
        found = list_checkpoints(destination, s3)
        good = [checkpoint for checkpoint in found if checkpoint.is_good]
        if (len(good) > 1 and found[-1].is_good) or time.monotonic() > until:
            break
        time.sleep(0.1)
    if len(good) < 2:
        return False
    newest = good[-1]
    name = {"marker_corrupted": "COMMITTED", "manifest_missing": "manifest.json"}.get(kind)
    name = name or draw.choice([shard for shard, size, _ in newest.shards if size])
    content = _read(newest.uri, name, s3)
    if kind in ("shard_deleted", "manifest_missing"):
        _write(newest.uri, name, s3, None)
    elif kind == "shard_truncated":
        _write(newest.uri, name, s3, content[: draw.randrange(len(content))])
    else:
        place = draw.randrange(len(content))
        _write(newest.uri, name, s3, content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :])
    with told.open("a") as file:
        file.write(json.dumps({"at": time.time(), "damaged": newest.step}) + "\n")
    return True


def _read(uri: str, name: str, s3: Any) -> bytes:
    if s3 is None:
        return (Path(uri) / name).read_bytes()
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    content: bytes = s3.get_object(Bucket=bucket, Key=f"{prefix}{name}")["Body"].read()
    return content


def _write(uri: str, name: str, s3: Any, content: bytes | None) -> None:
    if s3 is None:
        path = Path(uri) / name
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        return
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    if content is None:
        s3.delete_object(Bucket=bucket, Key=f"{prefix}{name}")
    else:
        s3.put_object(Bucket=bucket, Key=f"{prefix}{name}", Body=content)
