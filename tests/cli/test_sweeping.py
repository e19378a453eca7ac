"""`sweep` as a person types it: trials go the ordinary way of a launch, and what is wrong is one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_testing import job_content

from trainyard.cli import sweeping
from trainyard.cli.app import run
from trainyard.errors import InputError
from trainyard.launch.doors import DOORS
from trainyard.launch.place import local_jobs_folder
from trainyard.launch.record import JobRecord
from trainyard.launch.session import Account
from trainyard.operate.sweep.record import SweepRecord, SweepStore
from trainyard.spec.backends import BackendName
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec


@pytest.fixture
def job_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_content()), encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_trials_go_to_sagemaker_as_any_job_does(
    job_path: str,
    environment_path: Path,
    deployed: Account,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweeping, "POLL_SECONDS", 0.01)
    over = ["--over", "training.learning_rate=1e-3,2e-3", "--name", "rates"]
    verb = ["sweep", job_path, *over, "-e", str(environment_path), "--json"]
    assert run([*verb, "--max-cost-usd", "0.01", "--set", "training.steps=1000000"]) == 2
    assert "2 trials are planned at" in capsys.readouterr().err
    assert run([*verb, "--max-cost-usd", "1000"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["state"] for one in document["trials"]] == ["Completed"] * 2
    names = [one["job_id"] for one in document["trials"]]
    jobs = deployed.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]
    assert sorted(one["TrainingJobName"] for one in jobs) == sorted(names), "the ordinary requests, once each"
    assert run(["sweep", "--resume", "rates", "--json"]) == 0
    assert len(deployed.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]) == 2
    store = SweepStore("rates")
    with store.held():
        capsys.readouterr()
        assert run(["sweep", "--show", "rates", "--json"]) == 0, "while another process runs it"
        assert len(json.loads(capsys.readouterr().out)["trials"]) == 2
    for ignored in (["--stop-losers", "none"], ["--trials", "3"], ["--set", "training.seed=1"], ["-e", "test"]):
        assert run(["sweep", "--resume", "rates", *ignored]) == 2
        assert "is not for --resume" in capsys.readouterr().err
    assert run(["sweep", "--show", "rates", "--parallel", "3"]) == 2
    store.write(store.read().model_copy(update={"directory": job_path + ".gone"}))
    assert run(["sweep", "--resume", "rates"]) == 2 and "which is gone" in capsys.readouterr().err
    assert run(verb) == 2
    assert "sweep rates: exists already; `trainyard sweep --resume rates` goes on" in capsys.readouterr().err


def test_a_sweep_that_nobody_answers_ends_at_once_and_is_not_begun(
    job_path: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Not after the minutes for which a sweep under way tries a launch again."""
    assert run(["sweep", job_path, "--over", "training.learning_rate=1e-3,2e-3", "-e", "local"]) == 3
    said = capsys.readouterr().err
    assert "no emulator is running" in said and said.count("\n") == 1
    assert run(["sweep", job_path, "--over", "training.seed=1,2", "-e", "local", "--set", "tenant=initech"]) == 2
    assert "tenant 'initech' is not in environment local" in capsys.readouterr().err
    assert not list((tmp_path / "state").glob("sweeps/*/sweep.json"))


@pytest.mark.parametrize("backend", sorted(DOORS))
def test_trials_for_a_cluster_of_this_machine_ask_no_account(
    job_path: str, backend: BackendName, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a launch goes there from an emulated environment, which has no machines."""
    asked: list[str] = []

    def refuse(job: JobSpec, folder: Path, **_: Any) -> JobRecord:
        asked.append(f"{job.training.seed} {folder}")
        raise InputError("the cluster is tried elsewhere")

    monkeypatch.setitem(DOORS, backend, replace(DOORS[backend], launch_from_here=refuse))
    verb = ["sweep", job_path, "--over", "training.seed=1,2", "-e", "local", "--name", "seeds", "--backend", backend]
    assert run([*verb, "--stop-losers", "none", "--set", "compute.spot=false"]) == 1
    assert "emulator" not in capsys.readouterr().err
    assert sorted(asked) == [f"{seed} {local_jobs_folder()}" for seed in (1, 2)]
    launcher = sweeping.VerbLauncher(SweepStore("seeds").read(), Path(job_path))
    assert launcher.find(launcher.load("", ())) is None, "a resume looks for trials on this machine alone"


def test_trials_are_told_to_one_experiment(job_path: str) -> None:
    given = {"over": ("training.seed=1,2",), "search": "grid", "num_trials": None, "seed": 0, "parallel": 1}
    given |= {"stop_rule": "none", "metric": "loss", "environment": "test", "backend": None, "started_at": "now"}
    record = parse(SweepRecord, given | {"name": "rates", "token": "abc123", "directory": "/"}, "sweep")
    launcher = sweeping.VerbLauncher(record, Path(job_path))
    assert {launcher.load(f"t-{number}", ()).tracking.experiment for number in (1, 2)} == {"trainyard/acme/rates"}
    own = launcher.load("t-1", ("tracking.experiment=mine",))
    assert (own.tracking.experiment, own.name) == ("mine", "t-1")


@pytest.mark.parametrize("stated", ["saved", "s3://acme-data/runs/"])
def test_no_trial_goes_on_from_what_another_saved(job_path: str, stated: str) -> None:
    """At one stated destination the second found the first one's last checkpoint, trained nothing, and was as good."""
    given = {"over": ("training.seed=1,2",), "search": "grid", "num_trials": None, "seed": 0, "parallel": 1}
    given |= {"stop_rule": "none", "metric": "loss", "environment": "test", "backend": None, "started_at": "now"}
    given |= {"overrides": (f"checkpoint.destination={stated}",)}
    record = parse(SweepRecord, given | {"name": "rates", "token": "abc123", "directory": "/"}, "sweep")
    launcher = sweeping.VerbLauncher(record, Path(job_path))
    places = [launcher.load(f"t-{number}", ()).checkpoint.destination for number in (1, 2)]
    assert places == [f"{stated.rstrip('/')}/t-1", f"{stated.rstrip('/')}/t-2"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "needs JOB.yaml and --over"),
        (["JOB"], "needs JOB.yaml and --over"),
        (["JOB", "--over", "training.learning_rate=0,1"], "learning_rate: input should be greater than 0"),
        (["JOB", "--over", "training.learning_rat=0.1"], "did you mean 'learning_rate'?"),
        (["--resume", "nowhere"], "sweep nowhere: there is none"),
        (["JOB", "--resume", "x"], "take the sweep's name alone"),
        (
            ["JOB", "--over", "training.learning_rate=1,2", "--max-cost-usd", "5", "--backend", "local"],
            "knows no price",
        ),
        (["JOB", "--over", "training.learning_rate=log:1e-3..1e-2"], "a grid has no ranges"),
        (
            ["JOB", "--over", "training.seed=1,2", "--set", "training.steps=null", "--set", "training.epochs=2"],
            "use median",
        ),
    ],
)
def test_wrong_input_is_one_line_and_launches_nothing(
    job_path: str, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["sweep", *[job_path if word == "JOB" else word for word in arguments]]) == 2
    (said,) = [found for found in capsys.readouterr().err.splitlines() if found.startswith("trainyard: ")]
    assert told in said
    assert not list((tmp_path / "state").glob("jobs/*")) and not list((tmp_path / "state").glob("sweeps/*/sweep.json"))
