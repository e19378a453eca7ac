"""A job in MLflow: what is told of it, what not twice, and from a real server enough to run it again."""

import base64
import http.server
import io
import json
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError
from launch_testing import JOB_ID
from operate_mlflow import NoMlflowError, python, server

from trainyard.cli.app import run
from trainyard.errors import AwsRefusedError, InputError, JobFailedError
from trainyard.launch.record import FolderRecordStore, JobRecord
from trainyard.operate.tracking import (
    RefusedError,
    Server,
    check_no_secret,
    metrics_of,
    metrics_version,
    params_of,
    tags_of,
    track,
)
from trainyard.spec.job import load_job

ROWS = [
    {"step": step, "attempt": 1 if step < 3 else 2, "loss": 5.0 - step, "step_seconds": 2.0, "breakdown": {"data": 0.5}}
    for step in (1, 2, 3)
]


def write_rows(record: JobRecord, num: int) -> None:
    folder = Path(record.checkpoint_destination)
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:num]))
    starts = [{"start": {"attempt": number, "at": 1000.0 * number, "load_seconds": 5.0}} for number in (1, 2)]
    (folder / "goodput.jsonl").write_text("".join(json.dumps(row) + "\n" for row in starts))


@pytest.fixture
def kept(record: JobRecord, tmp_path: Path) -> JobRecord:
    """A job whose files are in a folder."""
    return record.model_copy(update={"checkpoint_destination": str(tmp_path / "job"), "plan": {"steps": 20}})


def test_settings_are_told_by_the_names_that_set_takes(kept: JobRecord) -> None:
    told = params_of(kept)
    assert told["training.learning_rate"] == "0.001" and told["compute.instance_type"] == "ml.p5.4xlarge"
    assert told["compute.spot"] == "true" and told["model.config.hidden_size"] == "64"
    assert not [name for name, value in told.items() if value in ("null", "None") or len(value) > 500]
    assert tags_of(kept)["trainyard.tenant"] == "acme" and "mlflow.user" not in tags_of(kept), "nobody was named"


def test_metrics_have_the_meters_names_and_the_steps_own_time() -> None:
    told = list(metrics_of(ROWS, {1: 1005.0, 2: 2005.0}))
    losses = [item for item in told if item["key"] == "loss"]
    assert [(item["step"], item["value"], item["timestamp"]) for item in losses] == [
        (1, 4.0, 1_007_000),
        (2, 3.0, 1_009_000),
        (3, 2.0, 2_007_000),
    ]
    assert {item["key"] for item in told} == {"loss", "step_seconds", "data_seconds"}


def test_new_steps_have_the_times_that_they_would_have_had_with_all(
    kept: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []

    def ask(_: Server, path: str, content: dict[str, Any] | None = None, **__: str) -> dict[str, Any]:
        """A server that knows the run, told up to step 1."""
        told.extend((content or {}).get("metrics", []))
        run = {"info": {"run_id": "r", "experiment_id": "0", "artifact_uri": "mlflow-artifacts:/0/r"}}
        tags = [{"key": "trainyard.last_step", "value": "1"}]
        return {"experiment": {"experiment_id": "0"}, "runs": [{**run, "data": {"tags": tags}}]}

    monkeypatch.setattr(Server, "ask", ask)
    monkeypatch.setattr(Server, "put", lambda *_: None)
    write_rows(kept, 3)
    assert track(Server("http://localhost:5000"), kept, None, experiment="x").num_steps == 2
    assert [(item["step"], item["timestamp"]) for item in told if item["key"] == "loss"] == [
        (2, 1_009_000),
        (3, 2_007_000),
    ]


class Head:
    """S3 as far as a file's version is asked."""

    exceptions = SimpleNamespace(ClientError=ClientError)

    def __init__(self, code: str = "") -> None:
        self._code = code

    def head_object(self, *, Bucket: str, Key: str) -> dict[str, str]:
        assert (Bucket, Key) == ("acme-checkpoints", "job/metrics.jsonl")
        if self._code:
            raise ClientError({"Error": {"Code": self._code}}, "HeadObject")
        return {"ETag": "e1"}


def test_whether_there_are_new_figures_is_known_without_reading_them(kept: JobRecord) -> None:
    on_s3 = kept.model_copy(update={"checkpoint_destination": "s3://acme-checkpoints/job/"})
    assert metrics_version(on_s3, Head()) == "e1" and metrics_version(on_s3, Head("404")) == ""
    with pytest.raises(AwsRefusedError):
        metrics_version(on_s3, Head("AccessDenied"))
    assert metrics_version(kept, None) == ""
    seen = set()
    for num in (1, 2, 3):
        write_rows(kept, num)
        seen.add(metrics_version(kept, None))
    assert len(seen) == 3


def test_files_are_put_again_only_where_something_is_new(kept: JobRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    tags: dict[str, str] = {}
    put: list[str] = []
    is_away = True

    def ask(_: Server, path: str, content: dict[str, Any] | None = None, **__: str) -> dict[str, Any]:
        """A server that keeps tags."""
        tags.update({item["key"]: item["value"] for item in (content or {}).get("tags", [])})
        run = {"info": {"run_id": "r", "experiment_id": "0", "artifact_uri": "mlflow-artifacts:/0/r"}}
        kept_tags = [{"key": key, "value": value} for key, value in tags.items()]
        return {"experiment": {"experiment_id": "0"}, "runs": [{**run, "data": {"tags": kept_tags}}]}

    def put_one(_: Server, __: str, name: str, ___: bytes) -> None:
        if is_away and name == "plan.json":
            raise JobFailedError("no place for artifacts")
        put.append(name)

    monkeypatch.setattr(Server, "ask", ask)
    monkeypatch.setattr(Server, "put", put_one)
    write_rows(kept, 2)

    def told(record: JobRecord = kept) -> int:
        put.clear()
        track(Server("http://localhost:5000"), record, None, experiment="x")
        return len(put)

    with pytest.raises(JobFailedError):
        told()
    is_away = False
    assert told() == 6, "what was refused is put the next time"
    assert told() == 0
    write_rows(kept, 3)
    assert told() == 6 and told() == 0
    assert told(kept.with_state("Failed")) == 6


def test_a_jobs_end_is_told_to_a_server_that_takes_no_files(kept: JobRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that keeps its artifacts in a bucket of its own refuses them each time."""
    statuses: list[str] = []

    def ask(_: Server, path: str, content: dict[str, Any] | None = None, **__: str) -> dict[str, Any]:
        if path == "runs/update":
            statuses.append((content or {})["status"])
        run = {"info": {"run_id": "r", "experiment_id": "0", "artifact_uri": "s3://somewhere/0/r"}}
        return {"experiment": {"experiment_id": "0"}, "runs": [run]}

    monkeypatch.setattr(Server, "ask", ask)
    write_rows(kept, 2)
    with pytest.raises(JobFailedError, match="start it with --serve-artifacts"):
        track(Server("http://localhost:5000"), kept.with_state("Failed"), None, experiment="x")
    assert statuses == ["FAILED"]


def test_an_experiment_that_somebody_makes_at_the_same_time_is_taken(
    kept: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trials of a sweep are told at once."""
    asked: list[str] = []

    def send(_: Server, address: str, *__: Any) -> bytes:
        asked.append(address.partition("/mlflow/")[2].partition("?")[0])
        if asked == ["experiments/get-by-name"]:
            raise RefusedError("HTTP 404: no experiment", '{"error_code": "RESOURCE_DOES_NOT_EXIST"}')
        if asked[-1] == "experiments/create":
            raise RefusedError("HTTP 400: exists", f'{{"error_code": "{why}"}}')
        run = {"info": {"run_id": "r", "experiment_id": "0", "artifact_uri": "mlflow-artifacts:/0/r"}}
        return json.dumps({"experiment": {"experiment_id": "0"}, "runs": [run]}).encode()

    monkeypatch.setattr(Server, "_send", send)
    write_rows(kept, 2)
    why = "RESOURCE_ALREADY_EXISTS"
    assert track(Server("http://localhost:5000"), kept, None, experiment="x").num_steps == 2
    asked.clear()
    why = "PERMISSION_DENIED"
    with pytest.raises(RefusedError, match="exists"):
        track(Server("http://localhost:5000"), kept, None, experiment="x")


def test_one_telling_reads_each_file_of_a_bucket_once(kept: JobRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(kept, 2)
    folder = Path(kept.checkpoint_destination)
    got: list[str] = []

    class Bucket:
        def get_object(self, *, Bucket: str, Key: str) -> dict[str, Any]:
            got.append(Key.removeprefix("job/"))
            return {"Body": io.BytesIO((folder / got[-1]).read_bytes())}

    put: dict[str, bytes] = {}
    run = {"info": {"run_id": "r", "experiment_id": "0", "artifact_uri": "mlflow-artifacts:/0/r"}}
    monkeypatch.setattr(Server, "ask", lambda *_, **__: {"experiment": {"experiment_id": "0"}, "runs": [run]})
    monkeypatch.setattr(Server, "put", lambda _, __, name, content: put.update({name: content}))
    on_s3 = kept.model_copy(update={"checkpoint_destination": "s3://acme-checkpoints/job/"})
    for _ in range(2):
        got.clear()
        track(Server("http://localhost:5000"), on_s3, Bucket(), experiment="x")
        assert sorted(got) == ["goodput.jsonl", "metrics.jsonl"], "and again the next time"
    assert put["metrics.jsonl"] == (folder / "metrics.jsonl").read_bytes() and b"<svg" in put["report.html"]


@pytest.mark.parametrize(
    "address",
    [
        *("localhost:5000", "file:///tmp/mlruns", "http://", ""),
        *("http://[::1", "http://localhost:abc", "http://localhost:99999", "http://local host:5"),
    ],
)
def test_what_is_no_servers_address_is_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["track", JOB_ID, "--mlflow", address]) == 2
    assert "must be the address of a tracking server, e.g. http://localhost:5000" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address",
    [
        *("http://bob:s3cret@localhost:5000", "https://s3cret@host", "http://bob:s3/cret@host:5000"),
        *("http://bob:s3:cret@host", "http://bob:s3[cret@host", "bob:s3cret@host"),
    ],
)
def test_a_password_in_an_address_is_refused_and_not_repeated(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["track", JOB_ID, "--mlflow", address]) == 2
    said = capsys.readouterr()
    assert "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in said.err
    assert "cret" not in said.out + said.err and "bob" not in said.out + said.err
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    assert run(["track", JOB_ID]) == 2 and "cret" not in capsys.readouterr().err
    check_no_secret("http://localhost:5000/of@us", "x")


@pytest.fixture
def asked() -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """A server that leads from /api on to another host name of its own; the paths and passwords that it was told."""
    told: list[tuple[str, str | None]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told.append((self.path, self.headers["Authorization"]))
            is_first = self.path.startswith("/api")
            self.send_response(302 if is_first else 200)
            if is_first:
                self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/elsewhere")
            self.end_headers()
            if not is_first:
                self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_address[1]}", told
    listening.shutdown()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, None),
        ({"USERNAME": "bob"}, None),
        ({"USERNAME": "bob", "PASSWORD": "s3:crét"}, f"Basic {base64.b64encode('bob:s3:crét'.encode()).decode()}"),
        ({"TOKEN": "abc\n"}, "Bearer abc"),
        ({"TOKEN": "\ufeffabc\r\n"}, "Bearer abc"),
        ({"USERNAME": "bob", "PASSWORD": "x", "TOKEN": "abc"}, f"Basic {base64.b64encode(b'bob:x').decode()}"),
    ],
)
def test_the_server_is_told_who_asks_as_mlflows_client_tells_it_and_nobody_else_is(
    asked: tuple[str, list[tuple[str, str | None]]],
    words: dict[str, str],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, told = asked
    for name in ("USERNAME", "PASSWORD", "TOKEN"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    for name, value in words.items():
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", value)
    assert Server(address).ask("runs/get") == {}
    assert told == [("/api/2.0/mlflow/runs/get", expected), ("/elsewhere", None)]


def test_an_answer_that_is_no_http_is_said_in_a_line(kept: JobRecord) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with listening.accept()[0] as connection:
                connection.recv(65_536)
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        speaking = threading.Thread(target=answer, daemon=True)
        speaking.start()
        with pytest.raises(JobFailedError, match=r"no MLflow answers .*SSH"):
            track(Server(f"http://127.0.0.1:{listening.getsockname()[1]}"), kept, None, experiment="x")
        speaking.join()


@pytest.fixture
def stranger() -> Iterator[str]:
    """A server that is no MLflow."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_address[1]}"
    listening.shutdown()
    listening.server_close()


def test_a_server_that_is_none_is_said_in_a_line(kept: JobRecord, stranger: str) -> None:
    with pytest.raises(JobFailedError, match="with no JSON; is it an MLflow tracking server"):
        track(Server(stranger), kept, None, experiment="x")
    with pytest.raises(JobFailedError, match=r"no MLflow answers .*refused"):
        track(Server("http://127.0.0.1:9"), kept, None, experiment="x")
    with pytest.raises(JobFailedError, match="start it with --serve-artifacts"):
        Server(stranger).put("s3://bucket/x", "job.yaml", b"")
    with pytest.raises(InputError):
        Server("ftp://host")


@pytest.mark.full
def test_a_real_server_has_what_a_run_is_repeated_from(
    kept: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        python()
    except NoMlflowError as reason:
        pytest.skip(str(reason))
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))
    store = FolderRecordStore(tmp_path / "state" / "jobs")
    stored = store.create(kept.model_copy(update={"backend": "local", "states": kept.states}))
    (tmp_path / "mlflow").mkdir()
    with server(tmp_path / "mlflow") as address:
        verb = ["track", JOB_ID, "--mlflow", address, "--json"]

        def told(num_rows: int) -> dict[str, Any]:
            write_rows(kept, num_rows)
            assert run(verb) == 0
            return dict(json.loads(capsys.readouterr().out))

        first, again, more = told(2), told(2), told(3)
        assert [item["num_steps"] for item in (first, again, more)] == [2, 0, 1]
        assert first["run_id"] == again["run_id"] == more["run_id"], "one run a job"
        store.replace(stored, stored.record.with_state("Failed"))
        told(3)
        _check(Server(address), first["run_id"], kept, tmp_path)


def _check(mlflow: Server, run_id: str, kept: JobRecord, folder: Path) -> None:
    found = mlflow.ask("runs/get", run_id=run_id)["run"]
    params = {item["key"]: item["value"] for item in found["data"]["params"]}
    tags = {item["key"]: item["value"] for item in found["data"]["tags"]}
    assert params["training.global_batch_size"] == "8" and len(params) > 50
    assert (found["info"]["status"], tags["trainyard.state"], tags["trainyard.job_id"]) == ("FAILED", "Failed", JOB_ID)
    history = mlflow.ask("metrics/get-history", run_id=run_id, metric_key="loss")["metrics"]
    assert [(item["step"], item["value"]) for item in history] == [(1, 4.0), (2, 3.0), (3, 2.0)], "each step once"
    listed = {item["path"] for item in mlflow.ask("artifacts/list", run_id=run_id)["files"]}
    assert listed == {"job.yaml", "resolved_job.json", "plan.json", "record.json", "report.html", "metrics.jsonl"}
    with urllib.request.urlopen(f"{mlflow.uri}/get-artifact?run_id={run_id}&path=job.yaml", timeout=60) as answer:
        (folder / "again.yaml").write_bytes(answer.read())
    assert load_job(folder / "again.yaml", []) == kept.spec, "the very job"
