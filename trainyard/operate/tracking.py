"""A job's record in MLflow: its file, plan, settings, metrics and report, to be compared and repeated from there.

By MLflow's REST API, without its client: nothing to install beside trainyard, and nothing in the training image. What
was told before is not told again, so that it may be repeated while a job runs, and after. SageMaker's managed servers
speak the same API, to requests that are signed.
"""

import base64
import hashlib
import http.client
import io
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from trainyard.errors import InputError, JobFailedError
from trainyard.launch.aws import aws_errors, is_missing
from trainyard.launch.checkpoint_files import open_files
from trainyard.launch.compare import METRICS_FILE, metrics_rows
from trainyard.launch.goodput import GOODPUT_FILE, jsonl_rows
from trainyard.launch.record import JobRecord
from trainyard.launch.session import Account
from trainyard.operate.job_report import report_of
from trainyard.spec.meters import METERS

API = "/api/2.0/mlflow"
ARTIFACTS = "mlflow-artifacts:"
"""Of an artifact URI that the server takes files for itself."""
MOST_METRICS = 1000
MOST_PARAMS = 100
"""Of one log-batch request, as of MLflow's REST reference."""
MOST_CHARACTERS = 500
"""Of a parameter's value: what every MLflow since 1.28 takes."""
SECONDS = 60.0
_SECRETS = ("USERNAME", "PASSWORD", "TOKEN")
"""Of the environment, after MLFLOW_TRACKING_: as MLflow's client reads them, a user's name before a token."""
JOB_TAG, STEP_TAG, FILES_TAG = "trainyard.job_id", "trainyard.last_step", "trainyard.files"
STATUSES = {"Completed": "FINISHED", "Failed": "FAILED", "Stopped": "KILLED"}


class Server:
    """An MLflow tracking server."""

    def __init__(self, uri: str) -> None:
        """InputError for what is no http(s) address, or holds a secret."""
        check_no_secret(uri, "--mlflow")
        if not _is_address(uri):
            raise InputError(f"--mlflow {uri}: must be the address of a tracking server, e.g. http://localhost:5000")
        self.uri = uri.rstrip("/")

    def ask(self, path: str, content: Mapping[str, Any] | None = None, **query: str) -> dict[str, Any]:
        """GET, or POST of `content`, and the answer; JobFailedError in a line where there is none."""
        # A space as %20: AWS takes a plus for one when it checks what is signed.
        words = urllib.parse.urlencode(query, quote_via=urllib.parse.quote)
        address = f"{self.uri}{API}/{path}" + (f"?{words}" if query else "")
        body = None if content is None else json.dumps(content).encode()
        answer = self._send(address, body, "GET" if content is None else "POST", "application/json")
        try:
            found = json.loads(answer or b"{}")
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise JobFailedError(f"{self.uri}: answers {path} with no JSON; is it an MLflow tracking server?")
        return found

    def put(self, artifact_uri: str, name: str, content: bytes) -> None:
        """A file beside a run; JobFailedError where the server keeps none itself."""
        if not artifact_uri.startswith(ARTIFACTS):
            raise JobFailedError(
                f"{self.uri}: keeps artifacts at {artifact_uri}, not itself; start it with --serve-artifacts"
            )
        folder = urllib.parse.urlsplit(artifact_uri).path.strip("/")
        address = f"{self.uri}/api/2.0/mlflow-artifacts/artifacts/{urllib.parse.quote(f'{folder}/{name}')}"
        self._send(address, content, "PUT", "application/octet-stream")

    def _send(self, address: str, body: bytes | None, method: str, kind: str) -> bytes:
        headers = self._headers(method, address, body, {"Content-Type": kind})
        secret = headers.pop("Authorization", None)
        request = urllib.request.Request(address, body, headers, method=method)
        if secret is not None:  # wherever an answer leads on to, nobody else is told it
            request.add_unredirected_header("Authorization", secret)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            raise RefusedError(
                f"{self.uri}: {method} {address[len(self.uri) :]}: {_told(error.code, text)}", text
            ) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise JobFailedError(f"{self.uri}: no MLflow answers ({reason}); start it, or check the address") from None

    def _headers(self, method: str, address: str, body: bytes | None, headers: dict[str, str]) -> dict[str, str]:
        """Of a request: with the user's word, where the environment has one as MLflow's own client takes it."""
        # A file that Windows wrote begins with a byte order mark, which no header takes and no shell drops.
        given = (os.environ.get(f"MLFLOW_TRACKING_{name}", "") for name in _SECRETS)
        user, password, token = (one.removeprefix("\ufeff") for one in given)
        if user and password:
            return {**headers, "Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}
        # A line's end that came with a token from a file would be told as what is wrong, with the token.
        return {**headers, "Authorization": f"Bearer {''.join(token.split())}"} if token.strip() else headers

    def page(self, experiment_id: str, run_id: str) -> str:
        """Where a person looks at a run."""
        return f"{self.uri}/#/experiments/{experiment_id}/runs/{run_id}"


class ManagedServer(Server):
    """A tenant's own server, run by SageMaker: requests are signed as the tenant's launcher, and files go to the bucket
    that the server shows them from, as it takes none itself."""

    def __init__(self, arn: str, account: Account, *, endpoint: str = "") -> None:
        """InputError for what is no server's ARN. `endpoint`: its address where it isn't AWS's."""
        found = re.fullmatch(r"arn:aws:sagemaker:([a-z0-9-]+):\d{12}:mlflow-tracking-server/([A-Za-z0-9-]+)", arn)
        if found is None:
            raise InputError(
                f"--mlflow {arn}: is the ARN of no managed MLflow server; it ends with mlflow-tracking-server/NAME "
                "(`aws sagemaker list-mlflow-tracking-servers`)"
            )
        self._region, self._name = found.groups()
        super().__init__(endpoint or f"https://{self._region}.experiments.sagemaker.aws")
        self._arn, self._account = arn, account

    def put(self, artifact_uri: str, name: str, content: bytes) -> None:
        """A file beside a run, in its bucket."""
        parts = urllib.parse.urlsplit(artifact_uri)
        if parts.scheme != "s3":
            raise JobFailedError(f"{self._arn}: keeps artifacts at {artifact_uri}, which is no bucket")
        key = f"{parts.path.strip('/')}/{name}"
        with aws_errors("writing", f"s3://{parts.netloc}/{key}"):
            self._account.client("s3").put_object(Bucket=parts.netloc, Key=key, Body=content)

    def _headers(self, method: str, address: str, body: bytes | None, headers: dict[str, str]) -> dict[str, str]:
        from botocore.auth import SigV4Auth
        from botocore.awsrequest import AWSRequest

        told = {
            **headers,
            "x-mlflow-sm-tracking-server-arn": self._arn,
            "X-Amz-Content-SHA256": hashlib.sha256(body or b"").hexdigest(),
        }
        request = AWSRequest(method=method, url=address, data=body, headers=told)
        SigV4Auth(self._account.session.get_credentials(), "sagemaker-mlflow", self._region).add_auth(request)
        return dict(request.headers.items())

    def page(self, experiment_id: str, run_id: str) -> str:
        """A link that opens MLflow's page, good for five minutes; its address can't lead to the run itself."""
        sagemaker = self._account.client("sagemaker")
        with aws_errors("asking for a link to", self._arn):
            answer = sagemaker.create_presigned_mlflow_tracking_server_url(TrackingServerName=self._name)
        return str(answer["AuthorizedUrl"])


def server_at(where: str, account: Account | None, tenants_own: str) -> Server:
    """The server at an address or ARN; the tenant's own where none is given. InputError where there is none."""
    found = where or tenants_own
    if not found:
        raise InputError(
            "--mlflow: is not given, and the tenant has no server of its own; give an address, e.g. "
            "http://localhost:5000, or have the platform team add `tracking:` (docs/tenants.md)"
        )
    if not found.startswith("arn:"):
        return Server(found)
    if account is None:
        raise InputError(
            f"--mlflow {found}: this job is on this machine, and acts as no tenant of AWS; give an address"
        )
    return ManagedServer(found, account)


def check_no_secret(uri: str, setting: str) -> None:
    """InputError for an address with a user or password, which is not repeated: the job's record and its logs are read
    by more people than know it, and urllib takes it for a part of the host's name."""
    try:
        has_one = "@" in urllib.parse.urlsplit(uri).netloc
    except ValueError:
        has_one = False
    if has_one or ("@" in uri and not _is_address(uri)):  # one with a / in it ends what is read as the host
        raise InputError(
            f"{setting}: the address holds a user or a password; leave them out (http://HOST:PORT), and set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, where jobs are launched"
        )


def _is_address(uri: str) -> bool:
    """http(s), a host, and a port that is a number where there is one."""
    try:
        parts = urllib.parse.urlsplit(uri)
        parts.port  # noqa: B018 -- urllib reads the port only when it is asked for
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and len(uri.split()) == 1


class RefusedError(JobFailedError):
    """A server's refusal, with its own words for other programs."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


def _told(code: int, text: str) -> str:
    try:
        words = json.loads(text).get("message", "")
    except (ValueError, AttributeError):
        words = text
    return f"HTTP {code}: {' '.join(str(words).split())[:300]}"


@dataclass(frozen=True)
class Tracked:
    """What was told."""

    run_id: str
    url: str
    num_steps: int
    """New ones."""


def track(server: Server, record: JobRecord, s3: Any, *, experiment: str, with_page: bool = True) -> Tracked:
    """Bring the job's run up to date: made where there is none, its status, new steps, settings; files where one of
    these is new. `with_page`: ask for its page's address, which on a managed server is a login, and no matter for logs.
    """
    s3 = None if s3 is None else ReadOnce(s3)
    rows = metrics_rows(record, s3)
    run = _run_of(server, record, experiment)
    info, data = run["info"], run.get("data") or {}
    tags = {item["key"]: item["value"] for item in data.get("tags", [])}
    known = {item["key"] for item in data.get("params", [])}
    params = [{"key": key, "value": value} for key, value in params_of(record).items() if key not in known]
    for start in range(0, len(params), MOST_PARAMS):
        server.ask("runs/log-batch", {"run_id": info["run_id"], "params": params[start : start + MOST_PARAMS]})
    last = int(tags.get(STEP_TAG, 0))
    fresh = [row for row in rows if row.get("step", 0) > last]
    metrics = list(metrics_of(rows, start_times(record, s3), after=last))
    for start in range(0, len(metrics), MOST_METRICS):
        server.ask("runs/log-batch", {"run_id": info["run_id"], "metrics": metrics[start : start + MOST_METRICS]})
    told = {**tags_of(record), STEP_TAG: str(fresh[-1]["step"] if fresh else last)}
    changed = [{"key": key, "value": value} for key, value in told.items() if tags.get(key) != value]
    if changed:
        server.ask("runs/log-batch", {"run_id": info["run_id"], "tags": changed})
    status: dict[str, Any] = {"run_id": info["run_id"], "status": STATUSES.get(record.state, "RUNNING")}
    if record.finished:
        status["end_time"] = _milliseconds(record.states[-1].at)
    # Before the files: a server that takes none would else never hear of the end.
    server.ask("runs/update", status)
    of_files = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
    if tags.get(FILES_TAG) != of_files:
        for name, content in files_of(record, s3).items():
            server.put(info["artifact_uri"], name, content)
        # Said when all are there: where one was refused, the next time puts them again.
        done = [{"key": FILES_TAG, "value": of_files}]
        server.ask("runs/log-batch", {"run_id": info["run_id"], "tags": done})
    page = server.page(info["experiment_id"], info["run_id"]) if with_page else f"{server.uri}, run {info['run_id']}"
    return Tracked(info["run_id"], page, len(fresh))


class ReadOnce:
    """A client for S3 that gets each object once: metrics, report and files of one telling need the same two."""

    def __init__(self, s3: Any) -> None:
        self._s3 = s3
        self._bodies: dict[tuple[str, str], bytes] = {}

    def get_object(self, *, Bucket: str, Key: str) -> dict[str, Any]:
        """As boto3's, of what was got first."""
        if (Bucket, Key) not in self._bodies:
            self._bodies[Bucket, Key] = self._s3.get_object(Bucket=Bucket, Key=Key)["Body"].read()
        return {"Body": io.BytesIO(self._bodies[Bucket, Key])}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._s3, name)


def _run_of(server: Server, record: JobRecord, experiment: str) -> dict[str, Any]:
    """The job's run, found by its tag or made."""
    found = _experiment(server, experiment)
    asked = {"experiment_ids": [found], "filter": f"tags.`{JOB_TAG}` = '{record.job_id}'", "max_results": 1}
    runs = server.ask("runs/search", asked).get("runs") or []
    if runs:
        return dict(runs[0])
    tags = [{"key": JOB_TAG, "value": record.job_id}]
    started = _milliseconds(record.attempts[0].created_at)
    made = {"experiment_id": found, "run_name": record.job_id, "start_time": started, "tags": tags}
    return dict(server.ask("runs/create", made)["run"])


def _experiment(server: Server, name: str) -> str:
    """The experiment of that name, found or made: by us, or by another job's teller meanwhile."""
    try:
        return _experiment_there(server, name)
    except RefusedError as error:
        if "RESOURCE_DOES_NOT_EXIST" not in error.text:
            raise
    try:
        return str(server.ask("experiments/create", {"name": name})["experiment_id"])
    except RefusedError as error:
        if "RESOURCE_ALREADY_EXISTS" not in error.text:
            raise
    return _experiment_there(server, name)


def _experiment_there(server: Server, name: str) -> str:
    try:
        return str(server.ask("experiments/get-by-name", experiment_name=name)["experiment"]["experiment_id"])
    except KeyError:
        raise JobFailedError(f"{server.uri}: tells no experiment {name}; is it an MLflow tracking server?") from None


def params_of(record: JobRecord) -> dict[str, str]:
    """Every setting that runs (`auto` resolved), by its dotted name as --set takes it; what is null is left out."""

    def flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                yield from flat(item, f"{name}.{key}" if name else str(key))
        elif value is not None and value != {}:
            text = value if isinstance(value, str) else json.dumps(value)
            yield name, text[:MOST_CHARACTERS]

    return dict(flat(record.resolved.spec.model_dump(mode="json"), ""))


def tags_of(record: JobRecord) -> dict[str, str]:
    """Who, where and what of; and how it went."""
    told = {
        "mlflow.source.name": "trainyard",
        "mlflow.source.type": "JOB",
        "mlflow.user": record.launched_by,
        "trainyard.tenant": record.tenant,
        "trainyard.environment": record.environment,
        "trainyard.backend": record.backend,
        "trainyard.image": record.image,
        "trainyard.state": record.state,
        "trainyard.attempts": str(len(record.attempts)),
        "trainyard.reclaims": str(sum(attempt.reclaims for attempt in record.attempts)),
        "trainyard.checkpoints": record.checkpoint_destination,
    }
    return {key: value for key, value in told.items() if value}


def metrics_version(record: JobRecord, s3: Any) -> str:
    """What changes when metrics.jsonl does, without reading it; empty where there is none."""
    root = record.checkpoint_destination.rstrip("/")
    if not root.startswith("s3://"):
        try:
            found = (Path(root) / METRICS_FILE).stat()
        except OSError:
            return ""
        return f"{found.st_size} {found.st_mtime_ns}"
    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    with aws_errors("looking at", f"{root}/{METRICS_FILE}"):
        try:
            return str(s3.head_object(Bucket=bucket, Key=f"{prefix}/{METRICS_FILE}".lstrip("/"))["ETag"])
        except s3.exceptions.ClientError as error:
            if is_missing(error):
                return ""
            raise


def start_times(record: JobRecord, s3: Any) -> dict[int, float]:
    """Attempt (of the trainer's own count) to when its first step began, epoch; from goodput.jsonl."""
    content = open_files(record.checkpoint_destination.rstrip("/"), s3).read(GOODPUT_FILE)
    starts = [row["start"] for row in jsonl_rows(content or b"") if "start" in row]
    parts = ("process_seconds", "rendezvous_seconds", "build_seconds", "load_seconds")
    return {int(start["attempt"]): start["at"] + sum(start.get(part) or 0.0 for part in parts) for start in starts}


def metrics_of(
    rows: Sequence[Mapping[str, Any]], starts: Mapping[int, float], *, after: int = 0
) -> Iterator[dict[str, Any]]:
    """MLflow's metrics of the steps `after` one: every meter that a row has, under the meter's name, at the step's end.

    `rows`: all of the job, as a step ends after the seconds of every step before it in its attempt.
    """
    at: dict[int, float] = {}
    for row in rows:
        attempt = int(row.get("attempt", 1))
        at[attempt] = at.get(attempt, starts.get(attempt, 0.0)) + float(row.get("step_seconds") or 0.0)
        if row.get("step", 0) <= after:
            continue
        for meter in METERS:
            value = meter.read(row)
            if value is not None and meter.name not in ("step", "attempt"):
                yield {"key": meter.name, "value": value, "timestamp": int(1000 * at[attempt]), "step": row["step"]}


def files_of(record: JobRecord, s3: Any) -> dict[str, bytes]:
    """What a run is repeated and judged by: the file that a person wrote, what it became, the plan, the course."""
    spec = record.spec.model_dump(mode="json", exclude_unset=True)
    found = {
        "job.yaml": yaml.safe_dump(spec, sort_keys=False, allow_unicode=True).encode(),
        "resolved_job.json": record.resolved.model_dump_json(indent=1).encode(),
        "plan.json": json.dumps(record.plan, indent=1).encode(),
        "record.json": record.model_dump_json(indent=1).encode(),
        "report.html": report_of(record, s3).encode(),
    }
    content = open_files(record.checkpoint_destination.rstrip("/"), s3).read(METRICS_FILE)
    return found | ({METRICS_FILE: content} if content else {})


def _milliseconds(moment: str) -> int:
    return int(1000 * datetime.fromisoformat(moment).timestamp())
