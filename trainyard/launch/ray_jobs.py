"""Ray's job server over HTTP, one call at a time: what Ray's own client asks, without a ray of its version here."""

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Protocol, TypeVar

from trainyard.errors import InputError
from trainyard.launch.backend import AwayError

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
"""Ray's own."""
HEADERS_VARIABLE = "RAY_JOB_HEADERS"
"""Ray's own."""
CALL_SECONDS = 30.0
_MOST_WORDS = 300
_Kind = TypeVar("_Kind", dict[str, Any], list[dict[str, Any]])


class JobServer(Protocol):
    """A Ray cluster's job server; InputError says in one line what it refuses, or that it does not answer."""

    def session(self, address: str) -> str:
        """Name of the cluster's session, another one whenever a cluster is started; empty where it doesn't say."""

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
        """All that an actor has printed; RefusedError where the server gives none, whatever the reason: its machine or
        Ray's agent there is gone or not up yet, or a proxy lets nobody in."""


class HttpJobServer:
    """See JobServer; `RAY_JOB_HEADERS` (JSON) goes with each call, as with Ray's own client: for a proxy that asks who
    one is, and for the token of a cluster that has one (RAY_AUTH_MODE)."""

    def session(self, address: str) -> str:
        """See JobServer."""
        answer = self._call(address, "/api/version", missing_is_none=True)
        return "" if answer is None else str(_json(address, answer, dict).get("session_name") or "")

    def submit(self, address: str, request: dict[str, Any]) -> None:
        """See JobServer."""
        self._call(address, "/api/jobs/", json.dumps(request).encode())

    def job(self, address: str, submission_id: str) -> dict[str, Any] | None:
        """See JobServer."""
        answer = self._call(address, f"/api/jobs/{submission_id}", missing_is_none=True)
        return None if answer is None else _json(address, answer, dict)

    def jobs(self, address: str) -> list[dict[str, Any]]:
        """See JobServer."""
        return _json(address, self._call(address, "/api/jobs/") or b"[]", list)

    def stop(self, address: str, submission_id: str) -> None:
        """See JobServer."""
        self._call(address, f"/api/jobs/{submission_id}/stop", b"")

    def driver_log(self, address: str, submission_id: str) -> str:
        """See JobServer."""
        answer = self._call(address, f"/api/jobs/{submission_id}/logs", missing_is_none=True)
        return "" if answer is None else str(_json(address, answer, dict).get("logs") or "")

    def actor_log(self, address: str, actor_id: str) -> bytes:
        """See JobServer."""
        query = urllib.parse.urlencode({"actor_id": actor_id, "suffix": "out", "lines": -1})
        return self._call(address, f"/api/v0/logs/file?{query}") or b""

    def _call(
        self, address: str, path: str, body: bytes | None = None, *, missing_is_none: bool = False
    ) -> bytes | None:
        request = urllib.request.Request(f"{address.rstrip('/')}{path}", body, {"Content-Type": "application/json"})
        for (
            name,
            value,
        ) in _headers().items():  # a token among them: wherever an answer leads on to, nobody else is told
            request.add_unredirected_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            if error.code == 404 and missing_is_none:
                return None
            raise RefusedError(f"compute.ray.address {address}", _words(error)) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or f"{type(error).__name__}: {str(error).strip()}"
            raise AwayError(
                f"compute.ray.address {address}: no Ray job server answers ({reason}); is the cluster up, its "
                "dashboard (ray[default]) on and its port 8265 reachable? kubectl port-forward, or an SSH tunnel, "
                "brings it here"
            ) from None


def _headers() -> dict[str, str]:
    given = os.environ.get(HEADERS_VARIABLE) or "{}"
    try:
        headers = json.loads(given)
    except ValueError:
        headers = None
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        # Not what it holds: that may be a token.
        raise InputError(
            f'{HEADERS_VARIABLE}: is no JSON object of names and texts, as {{"Authorization": "Bearer X"}}'
        )
    return headers


def _json(address: str, answer: bytes, kind: type[_Kind]) -> _Kind:
    """What the server says; InputError where it is no job server that answers, but a proxy's page, say."""
    try:
        content = json.loads(answer)
    except ValueError:
        content = None
    if not isinstance(content, kind):
        begins = answer[:40].decode("utf-8", "replace").strip().partition("\n")[0]
        raise InputError(
            f"compute.ray.address {address}: what answers is no Ray job server (it says {begins!r}); is a proxy before "
            f"it that asks who you are? {HEADERS_VARIABLE} goes along"
        )
    return content


class RefusedError(InputError):
    """The server answers, and says no."""

    def __init__(self, where: str, words: str) -> None:
        super().__init__(f"{where}: {words}")
        self.words = words
        """The server's own."""


def _words(error: urllib.error.HTTPError) -> str:
    """The last line of what the server says: of a traceback, its error; of a proxy's page in HTML, nothing."""
    lines = [line.strip() for line in error.read().decode("utf-8", "replace").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("<")]
    return f"{lines[-1][:_MOST_WORDS] if lines else error.reason} (HTTP {error.code})"


def is_tunnel(address: str) -> bool:
    """Whether it is this machine's own, behind which (a tunnel, a port-forward) another cluster may answer tomorrow."""
    return urllib.parse.urlsplit(address).hostname in ("localhost", "127.0.0.1", "::1")


def address_of(given: str | None) -> str:
    """Of the job server: as the job says, else as Ray's own client finds it."""
    return (given or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS).rstrip("/")
