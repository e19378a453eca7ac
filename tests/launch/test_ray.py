"""Jobs for Ray without a cluster: the request, what is refused, what a job server and a driver say, read.

The server here answers in the form of Ray 2.60's; the real one, with the trainer, is test_ray_cluster.py.
"""

import base64
import gzip
import json
import signal
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from launch_testing import JOB_ID, job_content
from trainer import ray as driver
from trainer import ray_host

from trainyard.errors import InputError
from trainyard.launch import ray, watch
from trainyard.launch.backend import AwayError, LogCursor, Observation, say_nothing
from trainyard.launch.launcher import new_record, submit_attempt, with_destination
from trainyard.launch.ray_backend import EVENT, GPUS_VARIABLE, JOB_VARIABLE, Look, RayBackend, read_events, submission
from trainyard.launch.ray_jobs import HttpJobServer
from trainyard.launch.record import FolderRecordStore, JobRecord, RecordedChannel
from trainyard.launch.session import Account
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec, RecoverySpec, ResolvedJob
from trainyard.spec.platform import TenantContract

INPUT = RecordedChannel(
    name="train-0", kind="s3", location="s3://acme-data/sets/train/", uri="s3://acme-data/sets/train"
)


def ray_job(address: str = "http://ray.acme:8265", **compute: Any) -> JobSpec:
    content = job_content()
    content["compute"] = {"backend": "ray", "instance_type": "p5.48xlarge", "instance_count": 2, "max_hours": 2}
    content["compute"] |= {"ray": {"address": address}} | compute
    content["training"]["global_batch_size"] = 32
    content["parallelism"] = {"data_shard": 8 * content["compute"]["instance_count"]}
    return parse(JobSpec, content, "job")


def record_of(job: JobSpec) -> JobRecord:
    return new_record(
        job,
        with_destination(job, f"s3://acme-checkpoints/jobs/{JOB_ID}/"),
        job_id=JOB_ID,
        backend="ray",
        environment="test",
        plan={},
        image=None,
        channels=(INPUT,),
        forced=(),
        launched_by="",
    )


class Server(ThreadingHTTPServer):
    """A job server that holds what it is given, and runs nothing."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.stopped: list[str] = []
        self.refusal: tuple[int, str] | None = None
        """What a proxy before it says of whoever asks for an actor's log."""
        self.session: str | None = "session_2026-01-31_12-00-00_000000_1"
        self.address = f"http://127.0.0.1:{self.server_port}"

    def submitted(self) -> dict[str, Any]:
        """The newest job's request."""
        return list(self.jobs.values())[-1]


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        parts = path.strip("/").split("/")
        if parts[:3] == ["api", "v0", "logs"]:
            actor = query.split("actor_id=")[1].split("&")[0]
            known = (200, self.server.logs[actor]) if actor in self.server.logs else (500, "Node is gone")
            self._answer(*(self.server.refusal or known))
        elif path == "/api/version" and self.server.session is not None:
            self._answer(200, json.dumps({"version": "4", "session_name": self.server.session}))
        elif path == "/api/version":
            self._answer(200, json.dumps({"version": "3"}))
        elif path == "/api/jobs/":
            self._answer(200, json.dumps(list(self.server.jobs.values())))
        elif parts[2] not in self.server.jobs:
            self._answer(404, f"Job {parts[2]} does not exist")
        elif parts[3:] == ["logs"]:
            self._answer(200, json.dumps({"logs": self.server.logs.get(parts[2], "")}))
        else:
            self._answer(200, json.dumps(self.server.jobs[parts[2]]))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = self.path.strip("/").split("/")
        if parts[3:] == ["stop"]:
            self.server.stopped.append(parts[2])
            self._answer(200, json.dumps({"stopped": True}))
            return
        request = json.loads(body)
        if request["entrypoint"].startswith("/bad"):
            self._answer(500, "Traceback (most recent call last):\n  File x\nValueError: no such environment\n")
            return
        self.server.jobs[request["submission_id"]] = request | {"status": "PENDING", "message": "Job has not started"}
        self._answer(200, json.dumps({"submission_id": request["submission_id"]}))

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def backend_of(contract: TenantContract) -> RayBackend:
    return ray.tenant_backend(Account(None), contract)  # type: ignore[arg-type]


def event(state: str, at: str = "2026-01-31T12:05:00+00:00", **more: Any) -> str:
    return EVENT + json.dumps({"state": state, "at": at, "note": "", **more})


def test_a_submission_carries_the_job_and_gives_it_time_to_save(contract: TenantContract) -> None:
    record = record_of(ray_job())
    request = submission(record, ray.tenant_places(contract)(record))
    assert request["submission_id"] == JOB_ID
    assert request["entrypoint"] == f"/opt/trainyard/bin/python -u -m trainer.ray /tmp/trainyard/{JOB_ID}"
    assert request["runtime_env"]["py_executable"] == "/opt/trainyard/bin/python"
    variables = request["runtime_env"]["env_vars"]
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) > 130 and "TRAINYARD_SKIP_EFA_CHECK" not in variables
    assert variables["AWS_REGION"] == "us-east-1"
    assert request["metadata"]["trainyard:tenant"] == "acme"
    # What the driver reads of it is what was sent.
    files = driver._files(variables[JOB_VARIABLE])
    assert parse(ResolvedJob, json.loads(files["resolved_job.json"]), "job") == record.resolved
    assert json.loads(files["inputs.json"]) == [{"name": "train-0", "kind": "s3", "location": INPUT.location}]
    assert variables[GPUS_VARIABLE] == "8"
    assert (driver.EVENT, driver.JOB_VARIABLE, driver.GPUS_VARIABLE) == (EVENT, JOB_VARIABLE, GPUS_VARIABLE)


def test_a_job_is_followed_from_its_submission_to_its_end(contract: TenantContract, server: Server) -> None:
    backend, record = backend_of(contract), record_of(ray_job(server.address))
    assert backend.observe(record) is None and backend.read_logs(record, LogCursor()) == []
    backend.submit(record, lambda _: None)
    first = server.submitted()
    backend.submit(record, lambda _: None)
    assert server.submitted() is first, "one that it has already is left alone"

    def seen(status: str, *lines: str, **job: Any) -> Observation:
        server.jobs[JOB_ID] |= {"status": status, "message": "", **job}
        server.logs[JOB_ID] = "".join(f"{line}\n" for line in lines)
        found = backend.observe(record)
        assert found is not None
        return found

    assert seen("PENDING", message="waits for its environment").note == "waits for its environment"
    assert seen("RUNNING").state == "Starting"
    assert seen("RUNNING", event("Queued", note="waits for machines")).state == "Queued"
    start = event("Training", note="10.0.0.1, 10.0.0.2, start 1", logs={"node-0": "aa", "node-1": "bb"}, pids=[1, 2])
    found = seen("RUNNING", event("Queued"), start)
    assert (found.state, found.note, found.reclaims) == ("Training", "10.0.0.1, 10.0.0.2, start 1", 0)
    lost = event("Interrupted", "2026-01-31T12:30:00+00:00", note="host node-1 is gone: Ray: x")
    again = event("Training", "2026-01-31T12:31:00+00:00", logs={"node-0": "cc", "node-1": "dd"})
    found = seen("RUNNING", start, lost, event("Queued"), again)
    assert [change.state for change in found.transitions] == ["Training", "Interrupted", "Training"]
    assert (found.state, found.reclaims) == ("Training", 1)
    assert backend.states([record]) == {JOB_ID: "Training"}
    seen("FAILED", start, event("Stopped", note="its time limit came; saved"), end_time=1)
    assert backend.states([record]) == {JOB_ID: "Stopped"}, "as status has it"
    found = seen("SUCCEEDED", start, lost, again, event("Completed", "2026-01-31T13:05:00+00:00"), end_time=1)
    assert (found.state, found.running_seconds, found.finished) == ("Completed", 3600, True)


@pytest.mark.parametrize(
    ("status", "message", "lines", "expected"),
    [
        (
            "FAILED",
            "x",
            [event("Failed", failure="rank 0 on node-0: ValueError: no")],
            ("Failed", "", "rank 0 on node-0: ValueError: no"),
        ),
        ("STOPPED", "", [event("Training"), event("Stopped")], ("Stopped", "", "")),
        (
            "STOPPED",
            "",
            [event("Training"), event("Stopping")],
            ("Stopped", "killed before it had told how it ended", ""),
        ),
        ("STOPPED", "", [], ("Stopped", "before it was started", "")),
        (
            "FAILED",
            "",
            [event("Stopped", note="its time limit came; saved")],
            ("Stopped", "its time limit came; saved", ""),
        ),
        ("FAILED", "last available logs:\nNo module named trainer\n", [], ("Failed", "", "No module named trainer")),
        ("FAILED", "", [event("Training"), event("Training")[:40]], ("Failed", "", "its driver was killed")),
        ("RUNNING", "", [event("Completed")], ("Completed", "", "")),
    ],
)
def test_how_a_job_ended(status: str, message: str, lines: list[str], expected: tuple[str, str, str]) -> None:
    job = {"status": status, "message": message, "end_time": 1769864700000}
    seen = Look(job, read_events("\n".join(lines))).observation(1)
    assert (seen.state, seen.note, seen.failure) == expected
    assert seen.finished and seen.transitions[-1].state == seen.state


def test_logs_are_every_hosts_and_the_drivers_own_words(contract: TenantContract, server: Server) -> None:
    backend, record = backend_of(contract), record_of(ray_job(server.address))
    backend.submit(record, lambda _: None)
    start = event("Training", logs={"node-0": "aa", "node-1": "gone"})
    server.logs |= {JOB_ID: f"INFO connected\n{start}\n", "aa": ":actor_name:Host\nstep=1\nste"}
    cursor = LogCursor()
    lines = backend.read_logs(record, cursor)
    (gone,) = (line for line in lines if line.host == "node-1")
    assert gone.text.startswith("(Ray gives no log of this start here: Node is gone (HTTP 500); is its machine")
    seen = [(line.host, line.text) for line in lines if line is not gone]
    assert seen == [("node-0", "step=1"), ("driver", "INFO connected")]
    assert {line.at_ms for line in lines} == {None}, "logs have no times: when they are read is none of them"
    alone = backend.read_logs(record, LogCursor(first_host_alone=True))
    assert {line.host for line in alone} == {"node-0", "driver"}, "a call a host"
    server.logs["aa"] += "p=2\n"
    assert [line.text for line in backend.read_logs(record, cursor)] == ["step=2"]
    server.logs["gone"] = "its agent is back\n"
    assert [line.text for line in backend.read_logs(record, cursor)] == ["its agent is back"]
    del server.logs["aa"]
    (lost,) = backend.read_logs(record, cursor)
    assert lost.host == "node-0" and lost.text.startswith("(Ray gives no further log of this start here: Node is gone")
    assert backend.read_logs(record, cursor) == [], "said once"
    again = record.with_next_attempt()
    backend.submit(again, lambda _: None)
    server.logs[again.attempt.training_job_name] = "INFO connected\n"
    assert [line.text for line in backend.read_logs(again, cursor)] == ["INFO connected"], "its own driver's"
    server.refusal = 403, "<html>\n<h1>403</h1>\n</html>"
    (refused,) = backend.read_logs(record, cursor)
    assert refused.host == "node-1" and "here: Forbidden (HTTP 403); is its machine" in refused.text


def test_a_job_without_a_tenant_is_launched_stopped_and_resumed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"{server.address}/")
    (tmp_path / "train.jsonl").write_text("{}\n")
    content = ray_job(instance_type=None, instance_count=2, ray={}).model_dump(mode="json")
    content |= {"tenant": None, "parallelism": {"data_replicate": 2}}
    content["data"] = {"train": [{"path": str(tmp_path / "train.jsonl"), "format": "jsonl"}], "sequence_length": 64}
    job, folder = parse(JobSpec, content, "job"), tmp_path / "jobs"
    record = ray.launch_on_ray_here(job, folder, force=True)
    assert record.resolved.spec.compute.ray.address == server.address, "where it is looked for from now on"
    assert record.checkpoint_destination == str(folder / record.job_id)
    assert "PYTHONPATH" in server.submitted()["runtime_env"]["env_vars"]
    assert server.submitted()["runtime_env"]["env_vars"]["TRAINYARD_SKIP_EFA_CHECK"] == "1"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    store, backend = FolderRecordStore(folder), ray.here_backend(folder)
    watch.stop(store, backend, record.job_id)
    assert server.stopped == [record.job_id]
    server.jobs[record.job_id] |= {"status": "STOPPED", "end_time": 1769864700000}
    assert watch.status(store, backend, record.job_id).state == "Stopped"
    watch.resume(store, backend, record.job_id)
    assert server.submitted()["submission_id"] == f"{record.job_id}-r2"


def test_a_tunnel_to_another_cluster_starts_no_second_attempt(
    server: Server, contract: TenantContract, tmp_path: Path
) -> None:
    store, backend = FolderRecordStore(tmp_path), backend_of(contract)
    store.create(record_of(ray_job(server.address)))
    own = str(server.session)
    assert submit_attempt(store, backend, store.read(JOB_ID).record, say_nothing).attempt.cluster == own
    known, server.jobs, server.session = server.jobs, {}, "session_of_another"
    told = rf"the Ray cluster of {own} has it, and session_of_another answers at {server.address}"
    for look in (watch.status, watch.resume, watch.stop):
        with pytest.raises(AwayError, match=told):
            look(store, backend, JOB_ID)
    assert server.jobs == {} and server.stopped == []
    server.jobs, server.session = known, own
    assert watch.status(store, backend, JOB_ID).state == "Queued", "its own again"
    server.jobs, server.session = {}, "session_of_another"
    watch.resume(store, backend, JOB_ID, force=True)
    assert list(server.jobs) == [f"{JOB_ID}-r2"]
    assert store.read(JOB_ID).record.attempt.cluster == "session_of_another"
    # Its own cluster has forgotten it: nobody else can have it.
    server.jobs.clear()
    watch.resume(store, backend, JOB_ID)
    assert list(server.jobs) == [f"{JOB_ID}-r3"]


def test_a_job_that_has_ended_needs_no_cluster_that_knows_it(
    server: Server, contract: TenantContract, tmp_path: Path
) -> None:
    """Its cluster may have been started anew, or the tunnel lead elsewhere: the record has how it ended."""
    store, backend = FolderRecordStore(tmp_path), backend_of(contract)
    store.create(record_of(ray_job(server.address)))
    submit_attempt(store, backend, store.read(JOB_ID).record, say_nothing)
    server.jobs[JOB_ID] |= {"status": "STOPPED", "end_time": 1769864700000}
    assert watch.status(store, backend, JOB_ID).finished
    server.jobs, server.session = {}, "session_of_another"
    assert watch.status(store, backend, JOB_ID).state == "Stopped"
    with pytest.raises(InputError, match="there is nothing to stop"):
        watch.stop(store, backend, JOB_ID)
    watch.resume(store, backend, JOB_ID)
    assert list(server.jobs) == [f"{JOB_ID}-r2"]
    assert store.read(JOB_ID).record.attempt.cluster == "session_of_another"


def test_a_cluster_that_tells_no_session_is_known_by_its_address_alone(
    server: Server, contract: TenantContract, tmp_path: Path
) -> None:
    server.session = None  # Ray's protocol before version 4
    store, backend = FolderRecordStore(tmp_path), backend_of(contract)
    store.create(record_of(ray_job(server.address)))
    submit_attempt(store, backend, store.read(JOB_ID).record, say_nothing)
    server.jobs.clear()
    with pytest.raises(
        InputError, match=r"does not know its attempt 1, which had not ended; is that tunnel to another"
    ):
        watch.resume(store, backend, JOB_ID)
    assert server.jobs == {}
    watch.resume(store, backend, JOB_ID, force=True)
    assert list(server.jobs) == [f"{JOB_ID}-r2"]


@pytest.mark.parametrize("headers", ["Bearer s3cret", "[]", '{"a": 1}'])
def test_headers_that_are_none_are_named(headers: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_HEADERS", headers)
    with pytest.raises(InputError, match=r"^RAY_JOB_HEADERS: is no JSON object") as error:
        HttpJobServer().jobs(server.address)
    assert "s3cret" not in str(error.value)


def test_a_token_follows_no_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy's sign-in is one, on any host that it names: urllib would take the headers along."""
    heard: list[tuple[str, str | None]] = []

    class Redirects(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append((self.path, self.headers["Authorization"]))
            is_sign_in = self.path == "/sign-in"
            self.send_response(200 if is_sign_in else 302)
            if not is_sign_in:
                self.send_header("Location", f"http://localhost:{self.server.server_port}/sign-in")  # type: ignore[attr-defined]
            self.end_headers()
            self.wfile.write(b"<html>Sign in")

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("RAY_JOB_HEADERS", '{"Authorization": "Bearer s3cret"}')
    with ThreadingHTTPServer(("127.0.0.1", 0), Redirects) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        with pytest.raises(InputError, match=r"is no Ray job server .it says '<html>Sign in'"):
            HttpJobServer().jobs(f"http://127.0.0.1:{proxy.server_port}")
        proxy.shutdown()
    assert heard == [("/api/jobs/", "Bearer s3cret"), ("/sign-in", None)]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n<html><body>Sign in", "is no Ray job server .it says '<html><body>Sign in'"),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", "is no Ray job server"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "no Ray job server answers .BadStatusLine"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\n[", "no Ray job server answers .IncompleteRead"),
    ],
)
def test_what_is_no_job_server_is_said_in_a_line(answer: bytes, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(InputError, match=words) as error:
            HttpJobServer().jobs(f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert "\n" not in str(error.value)


def test_a_host_that_is_told_before_it_listens_has_saved_nothing_and_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = ray_host.Host(str(tmp_path), 0)

    class Killed:
        """A process that SIGTERM ends while Python itself begins."""

        def __init__(self, *_: Any, **__: Any) -> None:
            """Nothing is started."""

        def terminate(self) -> None:
            """It is told."""

        def wait(self) -> int:
            host.stop()
            return -signal.SIGTERM

    monkeypatch.setattr(ray_host.subprocess, "Popen", Killed)
    content = {"resolved_job.json": json.dumps({"spec": {"compute": {"instance_type": None}}})}
    code, reason = host.run({**content, "inputs.json": "[]"}, ray_host.Hosts(["node-0"], ["127.0.0.1"], 12000))
    assert (code, reason) == (75, "stopped before the ranks started; resume me")


def test_a_host_listens_before_the_entrypoint_does(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    monkeypatch.setattr(ray_host.sys, "platform", "other")  # this process is not to die with its parent
    monkeypatch.setattr(ray_host.entrypoint, "main", lambda: signal.raise_signal(signal.SIGTERM))
    try:
        with pytest.raises(SystemExit) as error:
            ray_host.main(1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert error.value.code == 75


class RayTaskError(Exception):
    """As Ray names what an actor's own code raised."""


@pytest.mark.parametrize(
    ("error", "words", "is_lost"),
    [
        (OSError("The actor is dead"), "host node-3 is gone: Ray: The actor is dead", True),
        (RayTaskError("ray::Host.run()\n File x\nKeyError: 'y'"), "node-3 on Ray: KeyError: 'y'", False),
        (OSError("an error raised in its creation task\nImportError: z"), "node-3 on Ray: ImportError: z", False),
    ],
)
def test_whose_fault_an_actors_silence_is(error: Exception, words: str, is_lost: bool) -> None:
    assert driver._why_not(3, error) == words
    assert bool(driver._why_again([(1, words)])) == is_lost


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        ({"queue": "gpu"}, "compute.queue gpu: Ray has no queues"),
        ({"spot": True}, "compute.spot: whether a Ray cluster's machines are spot ones"),
        ({"ray": {"address": "http://127.0.0.1:9"}}, "address http://127.0.0.1:9: no Ray job server answers"),
    ],
)
def test_what_ray_has_not_is_refused(
    compute: dict[str, Any], words: str, deployed: Account, contract: TenantContract
) -> None:
    with pytest.raises(InputError, match=words) as error:
        ray.launch_on_tenants_ray(ray_job(**compute), contract, account=deployed, launcher=deployed, force=True)
    assert "\n" not in str(error.value)


def test_what_the_server_refuses_is_its_own_last_line(server: Server, contract: TenantContract) -> None:
    record = record_of(ray_job(ray={"address": server.address, "python": "/bad/python"}))
    with pytest.raises(InputError, match=r"ValueError: no such environment \(HTTP 500\)$"):
        backend_of(contract).submit(record, lambda _: None)


def test_the_tenants_hours_hold_here_too(server: Server, contract: TenantContract) -> None:
    with pytest.raises(InputError, match="over the 24 hours that tenant acme's jobs may run"):
        backend_of(contract).check(record_of(ray_job(server.address, max_hours=100)))
    assert HttpJobServer().jobs(server.address) == []


LOST, GONE = "host node-1 is gone: Ray: killed", "host node-1 is gone: its entrypoint was killed, or the network parted"


@pytest.mark.parametrize(
    ("endings", "again", "cause"),
    [
        ([(0, ""), (0, "")], "", ""),
        ([(1, GONE), (1, LOST)], LOST, LOST),
        ([(1, "rank 0 on node-0: ValueError"), (1, LOST)], "", "rank 0 on node-0: ValueError"),
        ([(75, "saved"), (75, "saved")], "a host was told to stop; saved", ""),
        ([(2, "wrong"), (75, "")], "", "wrong"),
    ],
)
def test_which_endings_another_start_goes_on_from(endings: list[tuple[int, str]], again: str, cause: str) -> None:
    assert driver._why_again(endings) == again
    assert driver._cause(endings) == cause


# Without a time of their own: both of pytest's workers have to find the same tests.
@pytest.mark.parametrize("packed", ["", "!", base64.b64encode(gzip.compress(b"{}", mtime=0)).decode()])
def test_a_driver_without_a_job_says_so(packed: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv(JOB_VARIABLE, packed)
    assert driver.main(["/tmp/x"]) == 2
    (told,) = read_events(capsys.readouterr().out)
    assert told.state == "Failed" and told.failure.startswith(f"{JOB_VARIABLE}: holds no job")


@pytest.mark.parametrize(("num_losses", "ended"), [(0, "Completed"), (2, "Stopped")])
def test_the_time_limit_counts_what_runs_and_not_what_waits(
    num_losses: int, ended: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two hours of running, an hour each start: a day of waiting before each is nobody's running."""
    clock = [0.0]
    monkeypatch.setattr("trainer.ray.time.monotonic", lambda: clock[0])

    class Start:
        def __init__(self, *_: Any) -> None:
            self.losses = num_losses

        def wait_for_machines(self, told: driver.Told) -> bool:
            clock[0] += 24 * 3600
            return not told.why

        def run(self, _: Any, told: driver.Told, number: int) -> list[tuple[int, str]]:
            clock[0] += 3599
            assert bool(told.why) is (number > 2), "and the starts of one attempt count together"
            if told.why:
                return [(75, "")]
            return [(1, "host node-0 is gone: Ray: its machine is lost")] if number <= num_losses else [(0, "")]

        def close(self) -> None:
            clock[0] += 2

    monkeypatch.setattr(driver, "Start", Start)
    job = record_of(ray_job(max_hours=3 * 3598 / 3600 if num_losses else 2)).resolved
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"recovery": RecoverySpec(max_resumes=5)})})
    driver._run(None, job, {}, driver.Told(job.spec.compute.max_hours), "")
    assert read_events(capsys.readouterr().out)[-1].state == ended
