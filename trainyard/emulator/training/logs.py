"""A host's output to CloudWatch Logs, in batches, with the job role's rights."""

import contextlib
import threading
import time
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from trainyard.spec.platform import TRAINING_LOG_GROUP

_FLUSH_SECONDS = 1.0
_MAX_BATCH_EVENTS = 5_000
_MAX_BATCH_BYTES = 900_000
"""PutLogEvents takes at most 10,000 events and 1 MiB, 26 bytes an event included."""
_MAX_LINE_BYTES = 200_000


class LogShipper:
    """Collects lines of several streams and sends what is new about every second."""

    def __init__(self, logs: Any) -> None:
        self._logs = logs
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._pending: dict[str, list[dict[str, Any]]] = {}
        self._created: set[str] = set()
        self._stop = threading.Event()
        self.error = ""
        """Why lines are lost, when they are: a role that may not write logs doesn't stop the job on AWS either."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="log-shipper")
        self._thread.start()

    def add(self, stream: str, line: str) -> None:
        """One line, now."""
        event = {"timestamp": int(time.time() * 1000), "message": line[:_MAX_LINE_BYTES] or " "}
        with self._lock:
            self._pending.setdefault(stream, []).append(event)

    def close(self) -> None:
        """Send the rest and end."""
        self._stop.set()
        self._thread.join(timeout=10)
        self.flush()

    def _run(self) -> None:
        while not self._stop.wait(_FLUSH_SECONDS):
            self.flush()

    def flush(self) -> None:
        """Send what has come since the last time."""
        with self._send_lock:
            with self._lock:
                pending, self._pending = self._pending, {}
            for stream, events in pending.items():
                try:
                    self._ensure(stream)
                    for batch in _batches(events):
                        self._logs.put_log_events(
                            logGroupName=TRAINING_LOG_GROUP, logStreamName=stream, logEvents=batch
                        )
                except (ClientError, BotoCoreError) as error:
                    self.error = str(error)

    def _ensure(self, stream: str) -> None:
        if stream in self._created:
            return
        try:
            self._create_stream(stream)
        except ClientError as error:
            if error.response["Error"]["Code"] != "ResourceNotFoundException":
                raise
            with contextlib.suppress(self._logs.exceptions.ResourceAlreadyExistsException):
                self._logs.create_log_group(logGroupName=TRAINING_LOG_GROUP)
            self._create_stream(stream)
        self._created.add(stream)

    def _create_stream(self, stream: str) -> None:
        with contextlib.suppress(self._logs.exceptions.ResourceAlreadyExistsException):
            self._logs.create_log_stream(logGroupName=TRAINING_LOG_GROUP, logStreamName=stream)


def _batches(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    batches: list[list[dict[str, Any]]] = [[]]
    size = 0
    for event in events:
        cost = len(event["message"].encode()) + 26
        if len(batches[-1]) >= _MAX_BATCH_EVENTS or size + cost > _MAX_BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(event)
        size += cost
    return [batch for batch in batches if batch]
