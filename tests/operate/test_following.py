"""Jobs are told to their trackers without anybody asking: begun by the launch, once, until the end, whatever fails."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from launch_testing import JOB_ID, job_content
from operate_mlflow import NoMlflowError, python, server

from trainyard.cli.app import run
from trainyard.errors import InputError, JobFailedError
from trainyard.launch import watch
from trainyard.launch.backends import ByRecord
from trainyard.launch.endpoint import EndpointSession
from trainyard.launch.local_backend import LocalBackend
from trainyard.launch.place import Place
from trainyard.launch.record import FolderRecordStore, JobRecord
from trainyard.launch.session import Account
from trainyard.operate import following, wandb_tracking
from trainyard.operate.following import MOST_FAILURES, check_tracking, follow, is_wanted, trackers_of
from trainyard.operate.tracking import Server, Tracked
from trainyard.operate.wandb_tracking import VERSION, WandbTracker
from trainyard.spec.base import apply_overrides, parse
from trainyard.spec.job import JobSpec
from trainyard.spec.tracking import WandbSpec

OWN = "arn:aws:sagemaker:us-east-1:123456789012:mlflow-tracking-server/trainyard-test-acme"


def spec_of(*overrides: str) -> JobSpec:
    return parse(JobSpec, apply_overrides(job_content(), overrides), "job")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """This machine's, with its state in a folder."""
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))
    folder = tmp_path / "state" / "jobs"
    return Place(FolderRecordStore(folder), ByRecord({"local": LocalBackend(folder)}))


@pytest.fixture
def kept(record: JobRecord, place: Place, tmp_path: Path) -> Callable[..., JobRecord]:
    """A job of this machine, in a state, with settings."""

    def keep(state: str, *overrides: str) -> JobRecord:
        changes = {"backend": "local", "spec": spec_of(*overrides), "checkpoint_destination": str(tmp_path / "job")}
        made = record.model_copy(update=changes).with_state(state)
        place.store.create(made)
        return made

    return keep


def test_a_job_is_followed_where_its_file_or_its_tenant_names_a_tracker(record: JobRecord, place: Place) -> None:
    account = Account(EndpointSession(endpoint_url=None, region_name="us-east-1"))
    with_own = replace(place, account=account, tracking_server=OWN)
    emulated = replace(with_own, account=Account(EndpointSession(endpoint_url="http://127.0.0.1:1", region_name="x")))

    def wanted(where: Place, *overrides: str) -> bool:
        return is_wanted(record.model_copy(update={"spec": spec_of(*overrides)}), where)

    address = "tracking.mlflow=http://127.0.0.1:5000"
    assert not wanted(place) and wanted(with_own) and not wanted(emulated), "nobody answers on an emulated account"
    assert wanted(place, address) and wanted(emulated, address)
    assert not wanted(with_own, "tracking.automatic=false")
    made = trackers_of(record.model_copy(update={"spec": spec_of(address)}), with_own)
    assert [type(one) for one in made] == [following.MlflowTracker]
    assert made[0]._server.uri == "http://127.0.0.1:5000", "the job's goes before the tenant's"  # type: ignore[attr-defined]


def test_every_verb_that_looks_begins_it_and_a_told_end_is_not_told_again(
    kept: Callable[..., JobRecord], place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[list[str]] = []
    monkeypatch.setattr(following.subprocess, "Popen", lambda command, **_: begun.append(command))
    kept("Failed", "tracking.mlflow=http://127.0.0.1:9")
    assert run(["status", JOB_ID, "--json"]) == 0
    assert [command[1:] for command in begun] == [["-m", "trainyard.operate.following", JOB_ID, "local", "acme"]]
    monkeypatch.setattr(following, "trackers_of", lambda *_: [])
    assert following.main([JOB_ID, "local", "acme"]) == 0
    begun.clear()
    assert run(["status", JOB_ID, "--json"]) == 0 and begun == []
    # A resumed job has another end to tell.
    stored = place.store.read(JOB_ID)
    place.store.replace(stored, stored.record.with_next_attempt())
    assert run(["status", JOB_ID, "--json"]) == 0 and len(begun) == 1


def test_a_job_whose_trackers_cannot_be_told_from_here_is_looked_at_all_the_same(
    kept: Callable[..., JobRecord], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept("Failed", "tracking.mlflow=http://127.0.0.1:9")
    (tmp_path / "state" / "tracking" / f"{JOB_ID}.log").mkdir(parents=True)
    assert run(["status", JOB_ID, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["state"] == "Failed"
    assert said.err.startswith(f"warning: job {JOB_ID} is Failed, but its trackers aren't told of it from here")


@dataclass
class Played:
    """A tracker that fails the first times."""

    failures: int = 0
    told: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    def tell(self, record: JobRecord, s3: Any) -> Tracked:
        if self.failures:
            self.failures -= 1
            raise JobFailedError("no MLflow answers")
        self.told.append(record.state)
        return Tracked("r", "u", 1)

    def close(self, record: JobRecord) -> None:
        self.closed.append(record.state)


@pytest.mark.parametrize(("failures", "is_told"), [(0, True), (3, True), (MOST_FAILURES, False)])
def test_it_goes_on_to_the_end_though_a_tracker_is_away_for_a_while(
    kept: Callable[..., JobRecord], place: Place, monkeypatch: pytest.MonkeyPatch, failures: int, is_told: bool
) -> None:
    made = kept("Training")
    tracker, other = Played(failures), Played()
    monkeypatch.setattr(following, "trackers_of", lambda *_: [tracker, other])
    play(monkeypatch, made, [("Training", True)] * 5 + [("Completed", False)])
    said: list[str] = []
    assert follow(place, JOB_ID, said.append, lambda _: None) is is_told
    assert tracker.told == ["Training"] * max(0, 5 - failures) + ["Completed"] * is_told
    assert other.told == ["Training"] * 5 + ["Completed"], "who is there is told, whoever is away"
    assert len(tracker.closed) == 1 and len([line for line in said if line.startswith("not told")]) == failures


def play(monkeypatch: pytest.MonkeyPatch, record: JobRecord, looks: list[tuple[str, bool]]) -> None:
    """What each look finds: the job's state, and whether a step was made since; the last one again and again."""
    course = iter(looks)
    metrics = Path(record.checkpoint_destination) / "metrics.jsonl"
    metrics.parent.mkdir()

    def status(store: FolderRecordStore, backend: Any, job_id: str) -> watch.Status:
        state, has_step = next(course, (looks[-1][0], False))
        with metrics.open("a") as file:
            file.write('{"step": 1}\n' * has_step)
        return watch.Status(store.read(job_id).record.with_state(state, at="2026-01-01T00:00:00+00:00"), None)

    monkeypatch.setattr(watch, "status", status)


def test_who_knows_all_is_asked_nothing(
    kept: Callable[..., JobRecord], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tracker = kept("Training"), Played()
    monkeypatch.setattr(following, "trackers_of", lambda *_: [tracker])
    play(
        monkeypatch,
        made,
        [("Training", False)] * 9 + [("Training", True)] + [("Training", False)] * 9 + [("Stopped", False)],
    )
    assert follow(place, JOB_ID, lambda _: None, lambda _: None)
    assert tracker.told == ["Training", "Training", "Stopped"]


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_job_that_the_resumer_starts_again_is_followed_on(
    kept: Callable[..., JobRecord], place: Place, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    made, tracker = kept("Training"), Played()
    monkeypatch.setattr(following, "trackers_of", lambda *_: [tracker])
    monkeypatch.setattr(watch, "may_be_resumed", lambda record: record.state == "Failed")
    again = [("Training", True), ("Completed", False)] if comes_back else []
    play(monkeypatch, made, [("Training", True), *[("Failed", False)] * 3, *again])
    assert follow(replace(place, has_resumer=True), JOB_ID, lambda _: None, lambda _: None)
    assert tracker.told == ["Training", "Failed", *(state for state, _ in again)]


def test_one_process_follows_a_job(kept: Callable[..., JobRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    kept("Training")
    monkeypatch.setattr(following, "follow", lambda *_: pytest.fail("a second one"))
    with following._alone(JOB_ID) as is_alone:
        assert is_alone and following.main([JOB_ID, "local", ""]) == 0


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["tracking.mlflow=localhost:5000"], "tracking.mlflow"),
        (["tracking.mlflow=arn:aws:s3:::bucket"], "tracking.mlflow"),
        (["tracking.wandb={project: ../x}"], "tracking.wandb.project"),
        (["tracking.wandb={mode: offline}"], "tracking.wandb.project: is missing"),
        (["tracking.wandb={project: x, mode: loud}"], "tracking.wandb.mode"),
    ],
)
def test_what_is_no_tracker_is_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        spec_of(*overrides)


def test_a_tracker_that_cant_be_had_refuses_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_content()), encoding="utf-8")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert run(["launch", str(path), "--backend", "local", "--set", "tracking.wandb.project=x"]) == 2
    assert f"pip install 'wandb=={VERSION}'" in capsys.readouterr().err
    secret = "tracking.mlflow=http://bob:s3cret@127.0.0.1:5999"
    assert run(["launch", str(path), "--backend", "local", "--set", secret]) == 2
    said = capsys.readouterr()
    assert "tracking.mlflow: the address holds a user or a password" in said.err and "s3cret" not in said.err + said.out
    assert not list((tmp_path / "state").glob("jobs/*")), "nothing keeps it"
    with pytest.raises(InputError, match="acts as no tenant of AWS"):
        check_tracking(spec_of("compute={backend: local}", f"tracking.mlflow={OWN}"))


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_launched_job_is_in_a_real_mlflow_though_nobody_called_a_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        python()
    except NoMlflowError as reason:
        pytest.skip(str(reason))
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(root)
    (tmp_path / "mlflow").mkdir()
    with server(tmp_path / "mlflow") as address:
        verb = [sys.executable, "-m", "trainyard", "launch", "jobs/tiny.yaml", "--backend", "local", "--processes", "1"]
        tracked = ["--set", f"tracking.mlflow={address}", "--set", "tracking.experiment=tried", "--json"]
        done = subprocess.run([*verb, *tracked], capture_output=True, text=True, check=True)
        job_id = json.loads(done.stdout)["job_id"]
        told = tmp_path / "state" / "tracking" / f"{job_id}.told"
        deadline = time.monotonic() + 600
        while not told.exists():
            log = told.with_suffix(".log")
            assert time.monotonic() < deadline, log.read_text() if log.exists() else "nobody follows it"
            time.sleep(0.5)
        mlflow = Server(address)
        experiment = mlflow.ask("experiments/get-by-name", experiment_name="tried")["experiment"]["experiment_id"]
        (found,) = mlflow.ask("runs/search", {"experiment_ids": [experiment]})["runs"]
    assert found["info"]["status"] == "FINISHED" and found["info"]["run_name"] == job_id
    assert {item["key"]: item["value"] for item in found["data"]["metrics"]}["step_seconds"] > 0
    assert {item["key"]: item["value"] for item in found["data"]["params"]}["training.steps"] == "40"


WANDB = """
import sys
from trainyard.operate.following import follow
from trainyard.launch.place import place_of
place = place_of(sys.argv[1], "local", None)
print(follow(place, sys.argv[1], print, lambda _: None))
"""


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_real_wandb_keeps_a_job_offline(kept: Callable[..., JobRecord], tmp_path: Path) -> None:
    packages = Path(tempfile.gettempdir()) / f"trainyard-wandb-{VERSION}-{os.getuid()}"
    if not (packages / "wandb").exists():
        install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(packages), f"wandb=={VERSION}"]
        done = subprocess.run(install, capture_output=True, text=True, timeout=900)
        if done.returncode:
            pytest.skip(f"wandb {VERSION} can't be installed: {done.stderr.strip()[-300:]}")
    made = kept("Failed", "tracking.wandb={project: trainyard, mode: offline}")
    folder = Path(made.checkpoint_destination)
    folder.mkdir()
    rows = [{"step": step, "attempt": 1, "loss": 5.0 - step, "step_seconds": 2.0} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Before what is installed for the tests: wandb has its own needs.
    paths = [str(Path(__file__).resolve().parents[2]), str(packages)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HOME": str(tmp_path)}

    def told() -> str:
        command = [sys.executable, "-c", WANDB, JOB_ID]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert done.returncode == 0 and done.stdout.rstrip().endswith("True"), done.stdout + done.stderr
        return done.stdout

    assert "Failed: 3 new steps told" in told()
    kept_runs = tmp_path / "state" / "tracking" / "wandb" / "wandb"
    (log,) = kept_runs.glob(f"offline-run-*-{JOB_ID}/run-{JOB_ID}.wandb")
    content = log.read_bytes()
    for words in (b"training.learning_rate", b"step_seconds", b"trainyard.checkpoints", f"job-{JOB_ID}".encode()):
        assert words in content, words
    assert "Failed: 0 new steps told" in told(), "what was told is not told again"


def test_wandbs_own_errors_are_a_line(kept: Callable[..., JobRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    tracker = WandbTracker(WandbSpec(project="x"))

    def refuse(*_: Any) -> None:
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(tracker, "_opened", refuse)
    with pytest.raises(JobFailedError, match="project x: api_key not configured"):
        tracker.tell(kept("Training"), None)


class PlayedRun:
    """A run of W&B's client, whose server has the rows before `step`."""

    url = "https://wandb.example/run"

    def __init__(self, step: int) -> None:
        self.step = step
        self.summary: dict[str, str] = {}
        self.told: list[int] = []

    def log(self, row: dict[str, float], *, step: int) -> None:
        self.told.append(step)
        self.step = step

    def finish(self, exit_code: int) -> None:
        """Nothing is left to send."""


@pytest.mark.parametrize(("mode", "again"), [("online", [3, 4]), ("offline", [4])])
def test_what_never_reached_wandbs_server_is_told_again(
    kept: Callable[..., JobRecord],
    monkeypatch: pytest.MonkeyPatch,
    mode: Literal["online", "offline"],
    again: list[int],
) -> None:
    """Its client sends behind: a machine that went away had told the client of steps that nobody else knows."""
    made = kept("Training")
    folder = Path(made.checkpoint_destination)
    folder.mkdir()

    def write(num: int) -> None:
        rows = [{"step": step, "attempt": 1, "loss": 5.0, "step_seconds": 2.0} for step in range(1, num + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def tracker(run: PlayedRun) -> WandbTracker:
        found = WandbTracker(WandbSpec(project="x", mode=mode))
        monkeypatch.setattr(found, "_opened", lambda *_: run)
        monkeypatch.setattr(found, "_put_files", lambda *_: None)
        return found

    monkeypatch.setattr(wandb_tracking, "check_wandb", lambda _: None)
    first = PlayedRun(step=0)
    teller = tracker(first)
    for num in (2, 3, 3):
        write(num)
        teller.tell(made, None)
    assert first.told == [1, 2, 3], "each once"
    write(4)
    # Of these three the server has two; offline a new run knows of none.
    second = PlayedRun(step=3 if mode == "online" else 0)
    assert tracker(second).tell(made, None).num_steps == len(again)
    assert second.told == again
