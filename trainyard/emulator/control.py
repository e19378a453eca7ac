"""The emulator's own endpoints under /trainyard-emulator/: no AWS call looks like them.

Looking needs no key; what changes something (POST) needs the account's root secret in a header, and JSON by its
content type, which no page in a browser sends to another origin without asking first.
"""

import hmac
import json
from collections.abc import Callable, Mapping
from typing import Any

from trainyard.emulator.cloudformation.catalogue import describe_types
from trainyard.emulator.info import ADMIN_HEADER, CONTROL_PREFIX, EmulatorInfo
from trainyard.errors import TrainyardError

_MAX_BODY = 1024 * 1024

Action = Callable[[dict[str, Any]], Any]


class ControlEndpoints:
    """WSGI: answers its own paths as JSON, passes everything else to the application."""

    def __init__(self, application: Any, info: EmulatorInfo, jobs: Any, bus: Any, more: Mapping[str, Action]) -> None:
        """`more`: what is changed by further paths, each by a function of the body."""
        self._application = application
        self._info = info
        self._jobs = jobs
        self._bus = bus
        self._more = more

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        path = environ.get("PATH_INFO", "")
        if not path.startswith(CONTROL_PREFIX):
            return self._application(environ, start_response)
        status, content = self._answer(environ, path.removeprefix(CONTROL_PREFIX))
        body = json.dumps(content, indent=2, default=str).encode()
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    def _answer(self, environ: dict[str, Any], path: str) -> tuple[str, Any]:
        method = environ["REQUEST_METHOD"]
        looks: dict[str, Callable[[], Any]] = {
            "health": lambda: {"instance_id": self._info.instance_id, "pid": self._info.pid},
            "types": describe_types,
            "deliveries": lambda: {"deliveries": list(self._bus.deliveries)},
        }
        if method == "GET" and path in looks:
            return "200 OK", looks[path]()
        if method == "GET" and path.startswith("jobs/"):
            job = self._jobs.describe(path.removeprefix("jobs/"))
            return (
                ("200 OK", job)
                if job
                else ("404 Not Found", {"error": f"no training job {path.removeprefix('jobs/')}"})
            )
        actions: dict[str, Action] = {
            "reclaim-plan": self._plan_reclaim,
            "reclaim": self._reclaim,
            "failure-plan": self._plan_failure,
            "quota": self._jobs.set_quota,
            **self._more,
        }
        if method == "POST" and path in actions:
            refusal = self._refusal(environ)
            if refusal is not None:
                return refusal
            return self._act(environ, actions[path])
        return "404 Not Found", {
            "error": f"{method} {CONTROL_PREFIX}{path}: no such endpoint; there are GET {', '.join(looks)}, jobs/NAME, "
            f"and POST {', '.join(actions)}"
        }

    def _refusal(self, environ: dict[str, Any]) -> tuple[str, Any] | None:
        given = environ.get("HTTP_" + ADMIN_HEADER.upper().replace("-", "_"), "")
        if not hmac.compare_digest(given.encode(), self._info.admin_secret_access_key.encode()):
            return "403 Forbidden", {"error": f"the header {ADMIN_HEADER} must hold the root's secret access key"}
        if environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower() != "application/json":
            return "415 Unsupported Media Type", {"error": "the content type must be application/json"}
        return None

    def _act(self, environ: dict[str, Any], action: Action) -> tuple[str, Any]:
        try:
            length = min(int(environ.get("CONTENT_LENGTH") or 0), _MAX_BODY)
            request = json.loads(environ["wsgi.input"].read(length) or b"{}")
            if not isinstance(request, dict):
                raise ValueError("the body must be a JSON object")
            return "200 OK", action(request)
        except (TrainyardError, ValueError) as error:
            return "400 Bad Request", {"error": str(error)}

    def _plan_reclaim(self, request: dict[str, Any]) -> Any:
        _only(request, "training_job_name_prefix", "after_log_pattern", "notice")
        return self._jobs.plan_reclaim(
            request["training_job_name_prefix"], request["after_log_pattern"], notice=bool(request.get("notice", False))
        )

    def _plan_failure(self, request: dict[str, Any]) -> Any:
        _only(request, "training_job_name_prefix", "reason", "after_log_pattern")
        return self._jobs.plan_failure(
            request["training_job_name_prefix"], request["reason"], request["after_log_pattern"]
        )

    def _reclaim(self, request: dict[str, Any]) -> Any:
        _only(request, "training_job_name", "notice")
        return self._jobs.reclaim(request["training_job_name"], notice=bool(request.get("notice", False)))


def _only(request: dict[str, Any], *names: str) -> None:
    unknown = sorted(set(request) - set(names))
    missing = [name for name in names if name not in request and name != "notice"]
    if unknown or missing:
        raise ValueError(
            f"the body takes {', '.join(names)}; "
            f"unknown: {', '.join(unknown) or 'none'}, missing: {', '.join(missing) or 'none'}"
        )
