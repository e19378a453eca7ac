"""From a function's name to a process that has run its handler."""

import contextlib
import datetime
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from trainyard.emulator.authorization.principals import Principals, Session
from trainyard.emulator.info import EmulatorInfo

BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
RUNTIME_PACKAGES = ("boto3", "botocore", "s3transfer", "jmespath", "dateutil", "urllib3", "six")
"""What Lambda's Python runtimes bring: boto3 and what it needs, nothing else."""
LEAST_SECONDS = 120.0
"""A function's own time limit is Lambda's speed, not this machine's: no run is killed before this."""


@dataclass(frozen=True)
class Run:
    """How an invocation ended."""

    payload: bytes
    """JSON: what the handler returned, or `errorMessage` and `errorType`."""
    error: str = ""
    """`Unhandled` where the handler raised, ended or took too long; empty where it returned."""
    log: str = ""
    """What it printed."""
    log_error: str = ""
    """Why its log could not be written to CloudWatch, which Lambda too keeps to itself."""


class UnknownFunctionError(Exception):
    """No function has that name or ARN."""


class Functions:
    """The account's functions, run here. Thread-safe; `invoke` returns when the handler has."""

    def __init__(self, info: EmulatorInfo, root: Path, principals: Principals) -> None:
        self._info, self._root, self._principals = info, root, principals
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        self._runtime = _runtime(root / "runtime")

    def invoke(self, name_or_arn: str, event: bytes) -> Run:
        """Run the function's handler on `event` (JSON) and wait. UnknownFunctionError where there is none."""
        function = self.find(name_or_arn)
        session = self._principals.assume_for_service(
            function.role,
            "lambda.amazonaws.com",
            source_arn=function.function_arn,
            session_name=function.function_name,
            region=self._info.region,
        )
        if session is None:
            return _failed("AccessDeniedException", "The role defined for the function cannot be assumed by Lambda.")
        request_id = str(uuid.uuid4())
        stream = f"{datetime.datetime.now(datetime.UTC):%Y/%m/%d}/[$LATEST]{request_id.replace('-', '')}"
        variables = self._environment(function, session, request_id, stream)
        run = self._run(function, event, variables, self._root / "runs" / request_id)
        refused = self._write_log(function, session, stream, run.log)
        return Run(run.payload, run.error, run.log, refused)

    def invoke_later(self, name_or_arn: str, event: bytes) -> None:
        """Like `invoke`, in the background: nobody waits for the answer. A failure is not tried again."""
        self.find(name_or_arn)
        threading.Thread(target=self.invoke, args=(name_or_arn, event), daemon=True, name=name_or_arn).start()

    def permits(self, name_or_arn: str, service: str, source_arn: str) -> bool:
        """Whether the function's own policy (AWS::Lambda::Permission) lets `service` call it for `source_arn`."""
        from ministack.core.iam_evaluator import fnmatch_iam

        for statement in self.find(name_or_arn).policy.statements:
            conditions = statement.get("Condition") or {}
            arns = [value for test in conditions.values() for key, value in test.items() if key.lower().endswith("arn")]
            accounts = [
                value for test in conditions.values() for key, value in test.items() if key.lower().endswith("account")
            ]
            if (
                statement.get("Principal") == {"Service": service}
                and statement.get("Action") in ("lambda:InvokeFunction", "lambda:*")
                and all(fnmatch_iam(source_arn, pattern) for pattern in arns)
                and all(account == self._info.account for account in accounts)
            ):
                return True
        return False

    def find(self, name_or_arn: str) -> Any:
        """moto's function of that name or ARN (without version or alias)."""
        from moto.awslambda.models import lambda_backends

        backend = lambda_backends[self._info.account][self._info.region]
        name = name_or_arn.rpartition(":function:")[2]
        for function in backend.list_functions("$LATEST"):
            if function.function_name == name:
                return function
        raise UnknownFunctionError(f"Function not found: {name_or_arn}")

    def shut_down(self) -> None:
        """Kill what runs, and start nothing more."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for process in running:
            _kill(process)
        shutil.rmtree(self._root, ignore_errors=True)

    def _environment(self, function: Any, session: Session, request_id: str, stream: str) -> dict[str, str]:
        """What Lambda sets and the function's own variables; of this machine only where Python is."""
        return {
            **{str(name): str(value) for name, value in (function.environment_vars or {}).items()},
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "en_US.UTF-8",
            "TZ": ":UTC",
            "AWS_EXECUTION_ENV": f"AWS_Lambda_{function.run_time}",
            "AWS_LAMBDA_FUNCTION_NAME": function.function_name,
            "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(function.memory_size),
            "AWS_LAMBDA_LOG_GROUP_NAME": _log_group(function),
            "AWS_LAMBDA_LOG_STREAM_NAME": stream,
            "TRAINYARD_FUNCTION_ARN": function.function_arn,
            "TRAINYARD_REQUEST_ID": request_id,
            "AWS_REGION": self._info.region,
            "AWS_DEFAULT_REGION": self._info.region,
            "AWS_ENDPOINT_URL": self._info.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ACCESS_KEY_ID": session.access_key_id,
            "AWS_SECRET_ACCESS_KEY": session.secret_access_key,
            "AWS_SESSION_TOKEN": session.session_token,
        }

    def _run(self, function: Any, event: bytes, variables: Mapping[str, str], scratch: Path) -> Run:
        code = self._code(function)
        scratch.mkdir(parents=True)
        answer = scratch / "answer.json"
        command = [sys.executable, "-I", "-S", "-B", str(BOOTSTRAP), str(code), str(function.handler)]
        command += [str(self._runtime), str(answer)]
        try:
            with self._lock:
                if self._closed:
                    return _failed("ServiceException", "the emulator is stopping")
                process = subprocess.Popen(
                    command,
                    cwd=code,
                    env={**variables, "LAMBDA_TASK_ROOT": str(code), "HOME": str(scratch), "TMPDIR": str(scratch)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._running.add(process)
            log, late = _communicate(process, event, max(float(function.timeout), LEAST_SECONDS))
            if late:
                return _failed("Sandbox.Timedout", f"Task timed out after {function.timeout} seconds", log)
            if not answer.exists():
                return _failed("Runtime.ExitError", f"Runtime exited with status {process.returncode}", log)
            return Run(answer.read_bytes(), "Unhandled" if process.returncode else "", log)
        finally:
            with self._lock:
                self._running = {other for other in self._running if other.poll() is None}
            shutil.rmtree(scratch, ignore_errors=True)

    def _code(self, function: Any) -> Path:
        """The unpacked package: one folder for each content that the function has had."""
        folder: Path = self._root / "code" / function.function_name / str(function.code_digest)[:32]
        with self._lock:
            if not folder.exists():
                fresh = folder.with_name(folder.name + ".new")
                shutil.rmtree(fresh, ignore_errors=True)
                with zipfile.ZipFile(io.BytesIO(function.code_bytes)) as package:
                    package.extractall(fresh)
                fresh.rename(folder)
        return folder

    def _write_log(self, function: Any, session: Session, stream: str, text: str) -> str:
        """To CloudWatch as the function's own role; why not, where that is refused."""
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            return ""
        now = int(datetime.datetime.now(datetime.UTC).timestamp() * 1000)
        group, events = _log_group(function), [{"timestamp": now, "message": line} for line in lines]
        try:
            logs = boto3.session.Session(
                session.access_key_id,
                session.secret_access_key,
                session.session_token,
                region_name=self._info.region,
            ).client("logs", endpoint_url=self._info.endpoint, config=Config(retries={"max_attempts": 2}))
            logs.create_log_stream(logGroupName=group, logStreamName=stream)
            logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)
        except (ClientError, BotoCoreError) as error:
            return str(error)
        return ""


def _log_group(function: Any) -> str:
    return str(getattr(function, "chosen_log_group", "") or function.logs_group_name)


def _communicate(process: "subprocess.Popen[bytes]", event: bytes, seconds: float) -> tuple[str, bool]:
    try:
        output, _ = process.communicate(event, timeout=seconds)
        return output.decode("utf-8", "replace"), False
    except subprocess.TimeoutExpired:
        _kill(process)
        output, _ = process.communicate()
        return output.decode("utf-8", "replace"), True


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _failed(kind: str, message: str, log: str = "") -> Run:
    return Run(json.dumps({"errorMessage": message, "errorType": kind}).encode(), "Unhandled", log)


def _runtime(folder: Path) -> Path:
    """A folder with boto3 and its own dependencies, and nothing else of this environment."""
    folder.mkdir()
    for name in RUNTIME_PACKAGES:
        found = importlib.util.find_spec(name)
        assert found is not None and found.origin is not None, f"{name} is one of boto3's dependencies"
        source = Path(found.origin)
        source = source.parent if source.name == "__init__.py" else source
        (folder / source.name).symlink_to(source)
    return folder
