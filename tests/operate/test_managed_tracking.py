"""A job in SageMaker's managed MLflow: every request signed for the tenant's server, files in the tenant's bucket."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from trainyard.cli.app import run
from trainyard.errors import InputError, JobFailedError
from trainyard.launch.record import JobRecord
from trainyard.operate.tracking import ManagedServer, Server, server_at, track

ARN = "arn:aws:sagemaker:eu-west-1:123456789012:mlflow-tracking-server/trainyard-prod-acme"
KEYS = Credentials("AKIDEXAMPLE", "a-secret-key", "a-token")
EXPERIMENT = "trainyard/acme/x y"


class FakeAccount:
    """The launcher's credentials, and S3 and SageMaker as far as they are asked."""

    def __init__(self) -> None:
        self.session = SimpleNamespace(get_credentials=lambda: KEYS)
        self.files: dict[str, bytes] = {}

    def client(self, service: str) -> Any:
        return self

    def put_object(self, *, Bucket: str, Key: str, Body: bytes) -> None:
        self.files[f"s3://{Bucket}/{Key}"] = Body

    def create_presigned_mlflow_tracking_server_url(self, *, TrackingServerName: str) -> dict[str, str]:
        return {"AuthorizedUrl": f"https://page.example/{TrackingServerName}"}


def signature_of(method: str, url: str, headers: Any, body: bytes) -> str:
    """What AWS would compute from the request as it came. A plus is one to it, and no space: it would write %2B."""
    url = url.replace("+", "%2B")
    names = headers["Authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
    request = AWSRequest(method, url, data=body, headers={name: headers[name] for name in names if name != "host"})
    request.context["timestamp"] = headers["X-Amz-Date"]
    auth = SigV4Auth(KEYS, "sagemaker-mlflow", "eu-west-1")
    auth.timestamp = headers["X-Amz-Date"]
    return str(auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request))


@pytest.fixture
def managed() -> Iterator[tuple[str, list[str]]]:
    """A server that answers signed requests alone, and what it was asked."""
    asked: list[str] = []
    answers: dict[str, Any] = {
        "experiments/get-by-name": {"experiment": {"experiment_id": "7"}},
        "runs/search": {},
        "runs/create": {
            "run": {
                "info": {"run_id": "r1", "experiment_id": "7", "artifact_uri": "s3://files/tracking/7/r1/artifacts"}
            }
        },
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = f"http://{self.headers['Host']}{self.path}"
            given = str(self.headers["Authorization"]).rpartition("Signature=")[2]
            signed = self.headers["x-mlflow-sm-tracking-server-arn"] == ARN
            signed = signed and "x-mlflow-sm-tracking-server-arn" in self.headers["Authorization"]
            if not signed or given != signature_of(self.command, url, self.headers, body):
                self.send_response(403)
                content = {"message": "the signature doesn't match"}
            else:
                path = self.path.partition("/mlflow/")[2].partition("?")[0]
                asked.append(path)
                self.send_response(200)
                content = answers.get(path, {})
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        do_GET = do_POST = _answer

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    server.server_close()


@pytest.fixture
def kept(record: JobRecord, tmp_path: Path) -> JobRecord:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 4.0, "step_seconds": 2.0}) + "\n")
    return record.model_copy(update={"checkpoint_destination": str(folder), "plan": {"steps": 20}})


def test_a_job_is_told_by_signed_requests_and_its_files_go_to_the_bucket(
    kept: JobRecord, managed: tuple[str, list[str]]
) -> None:
    address, asked = managed
    account = FakeAccount()
    server = ManagedServer(ARN, account, endpoint=address)  # type: ignore[arg-type]
    told = track(server, kept, None, experiment=EXPERIMENT)
    assert (told.run_id, told.num_steps) == ("r1", 1)
    assert told.url == "https://page.example/trainyard-prod-acme"
    assert {"experiments/get-by-name", "runs/create", "runs/log-batch", "runs/update"} <= set(asked)
    assert "s3://files/tracking/7/r1/artifacts/job.yaml" in account.files
    assert account.files["s3://files/tracking/7/r1/artifacts/metrics.jsonl"]
    quiet = track(server, kept, None, experiment=EXPERIMENT, with_page=False)
    assert quiet.url == f"{address}, run r1", "a login is for a person, not for a log"


def test_an_unsigned_request_is_refused_by_the_same_server(kept: JobRecord, managed: tuple[str, list[str]]) -> None:
    with pytest.raises(JobFailedError, match="HTTP 403: the signature doesn't match"):
        track(Server(managed[0]), kept, None, experiment=EXPERIMENT)


def test_the_tenants_own_server_is_the_default_and_asks_at_its_region() -> None:
    account: Any = FakeAccount()
    assert server_at("", account, ARN).uri == "https://eu-west-1.experiments.sagemaker.aws"
    assert server_at("http://localhost:5000/", account, ARN).uri == "http://localhost:5000"


@pytest.mark.parametrize(
    ("where", "account", "own", "words"),
    [
        ("", FakeAccount(), "", "the tenant has no server of its own"),
        (ARN, None, "", "acts as no tenant of AWS"),
        (ARN.replace("mlflow-tracking-server", "mlflow-app"), FakeAccount(), "", "is the ARN of no managed MLflow"),
    ],
)
def test_what_is_no_server_is_said_in_a_line(where: str, account: Any, own: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        server_at(where, account, own)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_job_on_this_machine_has_no_server_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["track", "nobody-x-20260101000000-0a1b", "--environment", "local"]) != 0
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
