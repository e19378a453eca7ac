"""Lambda's Invoke in moto, answered by real runs."""

import base64
from typing import Any
from urllib.parse import unquote

from moto.awslambda.models import LambdaFunction
from moto.awslambda.responses import LambdaResponse

from trainyard.emulator.functions.runs import Functions, UnknownFunctionError

_LOG_TAIL_BYTES = 4096


def install(functions: Functions) -> None:
    """Put `functions` in place of moto's invocations, which need Docker; keep the log group that a function names."""
    _keep_log_group()

    def invoke(self: Any) -> tuple[int, dict[str, Any], bytes]:
        name = unquote(self.path.rsplit("/", 2)[-2])
        kind = self.headers.get("X-Amz-Invocation-Type") or "RequestResponse"
        body = self.body if isinstance(self.body, bytes) else str(self.body or "").encode()
        event = body or b"{}"
        try:
            if kind == "DryRun":
                functions.find(name)
                return 204, {"status": 204}, b""
            if kind == "Event":
                functions.invoke_later(name, event)
                return 202, {"status": 202}, b""
            run = functions.invoke(name, event)
        except UnknownFunctionError as error:
            return _missing(str(error))
        headers: dict[str, Any] = {"status": 200, "content-type": "application/json"}
        if run.error:
            headers["x-amz-function-error"] = run.error
        if self.headers.get("X-Amz-Log-Type") == "Tail":
            headers["x-amz-log-result"] = base64.b64encode(run.log.encode()[-_LOG_TAIL_BYTES:]).decode()
        return 200, headers, run.payload

    response: Any = LambdaResponse
    response.invoke = invoke


def _missing(message: str) -> tuple[int, dict[str, Any], bytes]:
    import json

    headers = {"status": 404, "x-amzn-errortype": "ResourceNotFoundException", "content-type": "application/json"}
    return 404, headers, json.dumps({"Type": "User", "Message": message}).encode()


def _keep_log_group() -> None:
    """moto forgets LoggingConfig, and writes to /aws/lambda/NAME."""
    model: Any = LambdaFunction
    first, update = model.__init__, model.update_configuration

    def initialized(self: Any, account_id: str, spec: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        first(self, account_id, spec, *args, **kwargs)
        self.chosen_log_group = (spec.get("LoggingConfig") or {}).get("LogGroup", "")

    def updated(self: Any, config_updates: dict[str, Any]) -> dict[str, Any]:
        if "LoggingConfig" in config_updates:
            self.chosen_log_group = (config_updates["LoggingConfig"] or {}).get("LogGroup", "")
        answer: dict[str, Any] = update(self, config_updates)
        return answer

    model.__init__, model.update_configuration = initialized, updated
