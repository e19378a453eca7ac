"""Start, find, stop; a killed daemon, a taken port, two starters at once."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import boto3
import botocore.session
import pytest
from emulator_testing import FAKE_IMAGE, Site, wait_for

from trainyard import emulator
from trainyard.emulator import daemon, server
from trainyard.emulator.info import ADMIN_HEADER, CONTROL_PREFIX, INFO_FILE, write_info
from trainyard.emulator.processes import processes_under
from trainyard.errors import AwsRefusedError, InputError
from trainyard.launch.endpoint import EndpointSession
from trainyard.launch.session import Account

CHECKOUT = Path(emulator.__file__).resolve().parents[2]


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which its parent has not asked after, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_second_start_finds_the_first_and_stop_leaves_nothing(tmp_path: Path) -> None:
    first = emulator.start(tmp_path)
    try:
        second = emulator.start(tmp_path)
        assert first.started_now
        assert not second.started_now
        assert (second.pid, second.port, second.instance_id) == (first.pid, first.port, first.instance_id)
        assert (tmp_path / INFO_FILE).stat().st_mode & 0o077 == 0
        found = emulator.find(tmp_path)
        assert found is not None
        assert found.endpoint == f"http://localhost:{first.port}"
        assert os.getsid(first.pid) == first.pid != os.getsid(0)
        with pytest.raises(InputError, match=f"runs on port {first.port}"):
            emulator.start(tmp_path, port=first.port + 1 if first.port < 65535 else first.port - 1)
    finally:
        assert emulator.stop(tmp_path)
    wait_for(lambda: not alive(first.pid))  # its lock went a moment before it
    assert emulator.find(tmp_path) is None
    assert not emulator.stop(tmp_path)


def test_two_starters_at_once_get_one_daemon(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        infos = list(pool.map(lambda _: emulator.start(tmp_path), range(2)))
    try:
        assert len({info.pid for info in infos}) == 1
        assert sorted(info.started_now for info in infos) == [False, True]
    finally:
        emulator.stop(tmp_path)


def test_after_a_kill_its_jobs_are_ended_and_it_starts_again_at_once(tmp_path: Path) -> None:
    first = emulator.start(tmp_path, training_argv=[sys.executable, str(FAKE_IMAGE)])
    start_job(Site(first), "orphaned")
    orphans = wait_for(lambda: len(found := processes_under(tmp_path / "jobs")) >= 2 and found)
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: not alive(first.pid))
    assert (tmp_path / INFO_FILE).exists()
    assert emulator.find(tmp_path) is None
    again = emulator.start(tmp_path)
    try:
        assert again.started_now
        assert again.instance_id != first.instance_id
        wait_for(lambda: not any(alive(pid) for pid in orphans))  # killed already; the kernel may still be at it
    finally:
        emulator.stop(tmp_path)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A state directory whose daemon lives and doesn't answer, and a process of a job of its."""
    descriptor = daemon.hold_daemon_lock(tmp_path)
    info = emulator.EmulatorInfo("http://localhost:1", 1, 2**30, "123456789012", "us-east-1", "AKIA", "secret", "one")
    write_info(tmp_path, info)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    job = subprocess.Popen(command, env={"TRAINYARD_OPT_ML": str(tmp_path / "jobs" / "one" / "algo-1")})
    yield tmp_path, job
    job.kill()
    job.wait()
    os.close(descriptor)


def test_a_daemon_that_does_not_answer_keeps_its_jobs(held: tuple[Path, subprocess.Popen[bytes]]) -> None:
    state_dir, job = held
    with pytest.raises(AwsRefusedError, match=r"runs here and doesn't answer.*stop --state-dir"):
        emulator.start(state_dir)
    assert job.poll() is None
    assert (state_dir / INFO_FILE).exists()


def test_what_cannot_be_ended_is_not_called_stopped(
    held: tuple[Path, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    state_dir, job = held
    monkeypatch.setattr(daemon, "_STOP_SECONDS", 0.1)
    with pytest.raises(AwsRefusedError, match=f"does not end; end process {2**30} yourself"):
        emulator.stop(state_dir)
    assert job.poll() is None


def test_stop_ends_a_daemon_that_has_not_written_its_file_yet(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainyard.emulator", "serve", "--state-dir", str(tmp_path)]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as served:
        try:
            wait_for(lambda: daemon.daemon_alive(tmp_path))
            assert not (tmp_path / INFO_FILE).exists()
            assert emulator.stop(tmp_path)
            assert served.wait(60) == 0
        finally:
            served.kill()


def test_a_proxy_is_no_way_to_it(info: emulator.EmulatorInfo, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    found = emulator.start(state_dir)
    assert (found.pid, found.started_now) == (info.pid, False)
    emulator.set_quota(info, {"ml.p5.48xlarge": 64})
    keys = {"aws_access_key_id": info.admin_access_key_id, "aws_secret_access_key": info.admin_secret_access_key}
    account = Account(EndpointSession(endpoint_url=info.endpoint, region_name=info.region, **keys))
    assert account.client("sts").get_caller_identity()["Account"] == info.account
    monkeypatch.setenv("no_proxy", "intranet")
    assert info.environment()["NO_PROXY"] == info.environment()["no_proxy"] == "intranet,localhost,127.0.0.1"
    assert account.variables()["no_proxy"] == "intranet,localhost,127.0.0.1"
    for key, value in info.environment().items():
        monkeypatch.setenv(key, value)
    assert boto3.session.Session().client("sts").get_caller_identity()["Account"] == info.account


def test_stop_kills_running_jobs_in_whatever_session_they_are(tmp_path: Path) -> None:
    info = emulator.start(tmp_path, training_argv=[sys.executable, str(FAKE_IMAGE)])
    start_job(Site(info), "running")
    pids = wait_for(lambda: len(found := processes_under(tmp_path / "jobs")) >= 2 and found)
    assert emulator.stop(tmp_path)
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert processes_under(tmp_path / "jobs") == set()


def start_job(site: Site, name: str) -> None:
    """A job that runs for minutes if nobody ends it."""
    from emulator_testing import TRUST_SAGEMAKER

    role = site.role(name, TRUST_SAGEMAKER)
    site("sagemaker").create_training_job(
        TrainingJobName=name,
        RoleArn=role,
        HyperParameters={"steps": "5000", "mode": "stubborn"},
        AlgorithmSpecification={"TrainingImage": "image", "TrainingInputMode": "File"},
        ResourceConfig={"InstanceType": "ml.p5.4xlarge", "InstanceCount": 1, "VolumeSizeInGB": 10},
        StoppingCondition={"MaxRuntimeInSeconds": 600},
        OutputDataConfig={"S3OutputPath": "s3://nowhere/out"},
    )


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} ") as caught:
            emulator.start(tmp_path, port=port)
        assert "\n" not in str(caught.value)
        command = [
            sys.executable,
            "-m",
            "trainyard.emulator",
            "serve",
            "--port",
            str(port),
            "--state-dir",
            str(tmp_path),
        ]
        served = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=300)
    assert served.returncode == 2
    assert served.stderr.strip().splitlines()[-1].startswith(f"trainyard: port {port} ")
    assert "Traceback" not in served.stderr


@pytest.mark.parametrize(("free", "told"), [(0, "is full; make room there"), (1 << 20, "it said nothing")])
def test_a_daemon_that_a_full_disk_silences_is_spoken_for(
    free: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "emulator.log").touch()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    assert told in daemon._last_line(tmp_path / "emulator.log")


def test_it_ends_itself_when_idle(tmp_path: Path) -> None:
    info = emulator.start(tmp_path, idle_exit_seconds=3)
    wait_for(lambda: not alive(info.pid))
    assert emulator.find(tmp_path) is None


def test_the_environment_is_for_sdks_and_holds_no_profile(
    info: emulator.EmulatorInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    for key, value in info.environment().items():
        monkeypatch.setenv(key, value)
    assert "AWS_PROFILE" not in info.environment()
    identity = boto3.session.Session().client("sts").get_caller_identity()
    assert (identity["Account"], identity["Arn"]) == (info.account, f"arn:aws:iam::{info.account}:root")


def test_the_daemon_listens_on_loopback_alone(info: emulator.EmulatorInfo) -> None:
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    hexadecimal = f"{info.port:04X}"
    addresses = {row[1].split(":")[0] for row in listening if row[3] == "0A" and row[1].endswith(hexadecimal)}
    assert addresses == {"0100007F"}


def test_moto_is_imported_by_the_daemon_alone() -> None:
    code = "import sys, trainyard.emulator; print('moto' in sys.modules, 'boto3' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["False", "False"]


def test_the_command_line(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trainyard.emulator", *arguments]
        return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=300)

    where = ("--state-dir", str(tmp_path))
    assert run("status", *where).returncode == 1
    started = run("start", *where)
    try:
        assert json.loads(started.stdout)["started_now"] is True
        status = run("status", *where)
        assert json.loads(status.stdout)["started_now"] is False
        found = emulator.find(tmp_path)
        assert found is not None
        for shown in (started.stdout + started.stderr, status.stdout + status.stderr):
            assert found.admin_secret_access_key not in shown
            assert found.admin_access_key_id not in shown
    finally:
        assert run("stop", *where).stdout == "stopped\n"
    types = run("types").stdout
    assert "api-backed     AWS::FSx::FileSystem" in types
    assert "recorded-only  AWS::EC2::PlacementGroup" in types
    wrong = run("start", *where, "--training-argv", "python job.py")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


def control(
    info: emulator.EmulatorInfo, path: str, body: object = None, **headers: str | None
) -> tuple[int, dict[str, object]]:
    """Status and content of a control endpoint; a header of None is left out."""
    data = None if body is None else json.dumps(body).encode()
    given: dict[str, str | None] = {ADMIN_HEADER: info.admin_secret_access_key, "Content-Type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {name: value for name, value in given.items() if value is not None}
    request = urllib.request.Request(info.endpoint + CONTROL_PREFIX + path, data=data, headers=sent)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_control_endpoints_say_what_they_take(info: emulator.EmulatorInfo) -> None:
    assert control(info, "types")[1]["AWS::KMS::Key"] == "api-backed"
    assert control(info, "jobs/nobody")[0] == 404
    assert control(info, "nothing")[0] == 404
    plan = {"training_job_name_prefix": "x", "after_log_pattern": "(", "notice": False}
    wrong = control(info, "reclaim-plan", plan)
    assert wrong[0] == 400
    assert "not a regular expression" in str(wrong[1]["error"])
    assert control(info, "reclaim-plan", {"prefix": "x"})[0] == 400
    assert control(info, "reclaim", {"training_job_name": "nobody"})[0] == 400
    assert control(info, "quota", {"ml.p5.4xlarge": -1})[0] == 400


def test_what_changes_something_needs_the_roots_secret_and_json(info: emulator.EmulatorInfo) -> None:
    limit = {"ml.p5.48xlarge": 64}
    bodies = {
        "quota": limit,
        "reclaim": {"training_job_name": "nobody"},
        "reclaim-plan": {"training_job_name_prefix": "nobody-at-all", "after_log_pattern": "x"},
    }
    for path, body in bodies.items():
        for secret in (None, "", "guess", info.admin_access_key_id):
            assert control(info, path, body, **{ADMIN_HEADER: secret})[0] == 403, path
        assert control(info, path, body, Content_Type="text/plain")[0] == 415
        assert control(info, path, body, Content_Type="application/x-www-form-urlencoded")[0] == 415
    assert control(info, "quota", limit)[0] == 200
    assert control(info, "types", **{ADMIN_HEADER: None})[0] == 200


def test_a_plan_for_the_same_prefix_replaces_the_one_that_waits(info: emulator.EmulatorInfo) -> None:
    def plan(prefix: str) -> object:
        return control(info, "reclaim-plan", {"training_job_name_prefix": prefix, "after_log_pattern": "x"})[1]

    first = plan("never-launched")
    assert plan("never-launched") == first
    assert plan("never-launched-2") != first


def test_services_descriptions_are_read_once_however_many_sessions_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(botocore.session, "create_loader", botocore.session.create_loader)  # put back afterwards
    server._read_descriptions_once()
    sessions = [boto3.Session(region_name="us-east-1") for _ in range(5)]
    loaders = [each._session.get_component("data_loader") for each in sessions]
    assert all(each is loaders[0] for each in loaders)
    assert len(set(loaders[0].search_paths)) == len(loaders[0].search_paths)
    assert "ec2" in sessions[-1].get_available_services() and "ec2" in sessions[-1].get_available_resources()
