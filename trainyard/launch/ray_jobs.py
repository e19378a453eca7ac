"""Ray's job server over HTTP, one call at a time: what Ray's own client asks, without a ray of its version here."""

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Protocol

from trainyard.errors import InputError

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
"""Ray's own."""
CALL_SECONDS = 30.0
_MOST_WORDS = 300


class JobServer(Protocol):
    """A Ray cluster's job server; InputError says in one line what it refuses, or that it does not answer."""

    def submit(self, address: str, request: dict[str, Any]) -> None:
        """Start a job; the request as Ray's REST API has it."""

    def job(self, address: str, submission_id: str) -> dict[str, Any] | None:
        """What it says of a job; None where it knows none of that id."""

    def jobs(self, address: str) -> list[dict[str, Any]]:
        """All of its jobs."""

    def stop(self, address: str, submission_id: str) -> None:
        """Signal a job's driver."""

    def driver_log(self, address: str, submission_id: str) -> str:
        """All that the driver has printed."""

    def actor_log(self, address: str, actor_id: str) -> bytes:
        """All that an actor has printed; empty where its machine is gone."""


class HttpJobServer:
    """See JobServer; `RAY_JOB_HEADERS` (JSON) goes with each call, as with Ray's own client: for a proxy that asks who
    one is. The server itself does not."""

    def submit(self, address: str, request: dict[str, Any]) -> None:
        """See JobServer."""
        self._call(address, "/api/jobs/", json.dumps(request).encode())

    def job(self, address: str, submission_id: str) -> dict[str, Any] | None:
        """See JobServer."""
        answer = self._call(address, f"/api/jobs/{submission_id}", missing_is_none=True)
        return None if answer is None else dict(json.loads(answer))

    def jobs(self, address: str) -> list[dict[str, Any]]:
        """See JobServer."""
        return list(json.loads(self._call(address, "/api/jobs/") or b"[]"))

    def stop(self, address: str, submission_id: str) -> None:
        """See JobServer."""
        self._call(address, f"/api/jobs/{submission_id}/stop", b"")

    def driver_log(self, address: str, submission_id: str) -> str:
        """See JobServer."""
        answer = self._call(address, f"/api/jobs/{submission_id}/logs", missing_is_none=True)
        return "" if answer is None else str(json.loads(answer).get("logs") or "")

    def actor_log(self, address: str, actor_id: str) -> bytes:
        """See JobServer."""
        query = urllib.parse.urlencode({"actor_id": actor_id, "suffix": "out", "lines": -1})
        try:
            return self._call(address, f"/api/v0/logs/file?{query}") or b""
        except _Refused:
            return b""

    def _call(
        self, address: str, path: str, body: bytes | None = None, *, missing_is_none: bool = False
    ) -> bytes | None:
        headers = {"Content-Type": "application/json", **json.loads(os.environ.get("RAY_JOB_HEADERS") or "{}")}
        request = urllib.request.Request(f"{address.rstrip('/')}{path}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            if error.code == 404 and missing_is_none:
                return None
            raise _Refused(f"compute.ray.address {address}: {_words(error)}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise InputError(
                f"compute.ray.address {address}: no Ray job server answers ({reason}); is the cluster up, its "
                "dashboard (ray[default]) on and its port 8265 reachable? kubectl port-forward, or an SSH tunnel, "
                "brings it here"
            ) from None


class _Refused(InputError):
    """The server answers, and says no."""


def _words(error: urllib.error.HTTPError) -> str:
    """The last line of what the server says: of a traceback, its error."""
    lines = [line.strip() for line in error.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return f"{lines[-1][:_MOST_WORDS] if lines else error.reason} (HTTP {error.code})"


def address_of(given: str | None) -> str:
    """Of the job server: as the job says, else as Ray's own client finds it."""
    return (given or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS).rstrip("/")
