"""A candidate against its baseline: judged by the figures, by real jobs of this machine, and never kept if worse."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from launch_testing import job_content
from runbook_testing import record_of, rows_of

from trainyard.cli.app import run
from trainyard.errors import AwsRefusedError, InputError, JobFailedError
from trainyard.operate import canary
from trainyard.operate.canary import Limits, Ran, Release, Verdict, judge, tried
from trainyard.spec.base import parse
from trainyard.spec.job import ComputeSpec, JobSpec, load_job

HERE = [
    *("--set", "compute.instance_type=null", "--set", "compute.spot=false", "--set", "compute.instance_count=1"),
    *("--set", "compute.max_wait_hours=null"),
]
GOOD = Ran("old", "Completed", "", rows_of(40))


def verdict_of(rows: Sequence[dict[str, Any]], **more: str) -> Verdict:
    return judge(Ran("new", more.get("state", "Completed"), more.get("failure", ""), rows), GOOD, Limits())


def test_the_same_again_is_as_good_and_so_is_a_better_one() -> None:
    verdict = verdict_of(rows_of(40))
    assert verdict.failed == () and verdict.why == "" and len(verdict.lines()) == 8
    assert verdict_of(rows_of(40, loss=1.5, seconds=0.5)).failed == ()
    assert verdict_of(rows_of(40, seconds=1.05, loss=2.03)).failed == (), "within the limits"


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (rows_of(40, seconds=1.3), ["speed"]),
        (rows_of(40, loss=2.2), [f"loss at step {step}" for step in (10, 20, 30, 40)]),
        ([*rows_of(20), *rows_of(20, first_step=21, loss=2.2)], ["loss at step 30", "loss at step 40"]),
        ([*rows_of(39), {**rows_of(40)[-1], "loss": None}], ["divergence", "loss at step 40"]),
        ([*rows_of(39), {**rows_of(40)[-1], "anomaly": "spike", "skipped": True}], ["anomalies"]),
        ([], ["loss", "speed"]),
    ],
    ids=["slower", "worse", "worse later", "diverged", "anomaly", "no step"],
)
def test_what_is_worse_fails_by_its_own_check(rows: list[dict[str, Any]], names: list[str]) -> None:
    verdict = verdict_of(rows)
    assert [check.name for check in verdict.failed] == names, verdict.lines()
    assert all(check.name in verdict.why for check in verdict.failed)


def test_one_that_failed_or_validates_worse_fails() -> None:
    assert "Failed: rank 3 was lost" in verdict_of(rows_of(40), state="Failed", failure="rank 3 was lost").why
    validated = [*rows_of(39), {**rows_of(40)[-1], "validation_loss": 3.0}]
    baseline = Ran("old", "Completed", "", [*rows_of(39), {**rows_of(40)[-1], "validation_loss": 2.9}])
    failed = judge(Ran("new", "Completed", "", validated), baseline, Limits()).failed
    assert [check.name for check in failed] == ["validation_loss at step 40"]
    assert judge(Ran("new", "Completed", "", validated), baseline, Limits(loss_tolerance=0.1)).failed == ()


def test_what_differs_between_the_two_is_told() -> None:
    old = record_of()
    training = old.resolved.spec.training.model_copy(update={"learning_rate": 0.5})
    spec = old.resolved.spec.model_copy(update={"training": training, "name": "other"})
    new = old.model_copy(update={"resolved": old.resolved.model_copy(update={"spec": spec}), "image": "r@sha256:2"})
    told = judge(Ran("n", "Completed", "", [], new), Ran("o", "Completed", "", [], old), Limits()).differs_in
    assert told == ("training.learning_rate: 0.001 -> 0.5", f"image: {old.image} -> r@sha256:2")


def test_a_candidate_that_ran_another_image_is_not_as_good() -> None:
    """Else an image that never ran would be kept for every tenant."""
    record = record_of()
    digest = (record.image or "").partition("@")[2]
    ran = Ran("new", "Completed", "", rows_of(40), record)
    assert digest and judge(ran, GOOD, Limits(), digest).failed == ()
    for other in (replace(ran, record=None), replace(ran, record=record.model_copy(update={"image": None}))):
        assert [check.name for check in judge(other, GOOD, Limits(), digest).failed] == ["image"]
    assert [check.name for check in judge(ran, GOOD, Limits(), "sha256:other").failed] == ["image"]


@pytest.mark.parametrize(
    ("compute", "told"),
    [
        ({"backend": "local"}, "run in no image"),
        ({"backend": "slurm", "slurm": {"container_image": "/images/x.sqsh"}}, "compute.slurm.container_image"),
        ({"backend": "kubernetes", "kubernetes": {"image": "r/x@sha256:" + "0" * 64}}, "compute.kubernetes.image"),
    ],
)
def test_an_image_is_not_tried_by_jobs_that_run_another(compute: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        canary.check_runs_released(SimpleNamespace(compute=parse(ComputeSpec, compute, "job")))  # type: ignore[arg-type]
    canary.check_runs_released(parse(JobSpec, job_content(), "job"))


@dataclass
class Parameter:
    """What new jobs run."""

    now: str = "old"
    seen: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def make(self, digest: str) -> None:
        self.now = digest
        self.seen.append(digest)

    @property
    def release(self) -> Release:
        return Release(lambda: self.now, self.make, lambda _: None, self.said.append)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def heard() -> Iterator[None]:
    """Whoever runs the tests under nohup, or in a shell's background, has signals ignored, and so would a canary."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("heard")
def test_the_old_image_comes_back_whatever_came_in_between() -> None:
    parameter = Parameter()
    verdict = tried(parameter.release, "old", "new", lambda: verdict_of(rows_of(40)))
    assert verdict.failed == () and verdict.image_now == "new" and parameter.seen == ["new"]

    def end(kind: type[BaseException] | signal.Signals) -> Verdict:
        if isinstance(kind, signal.Signals):
            signal.raise_signal(kind)
            pytest.fail("it went on")
        raise kind

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    for ending in (InputError, KeyboardInterrupt, signal.SIGTERM, signal.SIGHUP):
        parameter = Parameter()
        with pytest.raises(KeyboardInterrupt if isinstance(ending, signal.Signals) else ending):
            tried(parameter.release, "old", "new", lambda kind=ending: end(kind))  # type: ignore[misc]
        assert parameter.seen == ["new", "old"]
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("second", SIGNALS)
@pytest.mark.parametrize("first", [*SIGNALS, None])
def test_no_second_signal_leaves_an_untried_image_released(
    first: signal.Signals | None, second: signal.Signals
) -> None:
    """Nor a first one that comes while a worse image is taken back."""
    parameter = Parameter()
    taken_back: list[str] = []

    def make(digest: str) -> None:
        if digest == "old":
            signal.raise_signal(second)
            taken_back.append(digest)
        parameter.make(digest)

    def try_it() -> Verdict:
        if first is not None:
            signal.raise_signal(first)
            pytest.fail("it went on")
        return verdict_of(rows_of(40, seconds=2.0))

    handlers = [signal.getsignal(number) for number in SIGNALS]
    release = replace(parameter.release, make=make)
    if first is None:
        assert tried(release, "old", "new", try_it).image_now == "old"
    else:
        with pytest.raises(KeyboardInterrupt):
            tried(release, "old", "new", try_it)
    assert (parameter.seen, taken_back) == (["new", "old"], ["old"])
    assert handlers == [signal.getsignal(number) for number in SIGNALS]


def test_what_is_ignored_stays_ignored() -> None:
    """A canary of hours under nohup goes on where its terminal goes away."""
    parameter = Parameter()

    def hung_up() -> Verdict:
        signal.raise_signal(signal.SIGHUP)
        return verdict_of(rows_of(40))

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert tried(parameter.release, "old", "new", hung_up).image_now == "new"
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("ending", [None, AwsRefusedError("no"), InputError("no"), KeyboardInterrupt()])
def test_an_image_that_could_not_be_taken_back_is_named(ending: BaseException | None) -> None:
    """Credentials that end during a canary of hours must not leave everybody with it in silence."""
    parameter = Parameter()

    def make(digest: str) -> None:
        if digest == "old":
            raise AwsRefusedError("writing SSM parameter /x: AWS refused: ExpiredToken; sign in again")
        parameter.make(digest)

    def try_it() -> Verdict:
        if ending is not None:
            raise ending
        return verdict_of(rows_of(40, seconds=2.0))

    with pytest.raises(JobFailedError) as failed:
        tried(replace(parameter.release, make=make), "old", "new", try_it)
    told = str(failed.value)
    assert "new was tried and is not kept, but may still be what new jobs run" in told and "ExpiredToken" in told
    assert told.endswith("bring it back: scripts/publish_image ENV --digest old")


def test_what_somebody_else_released_meanwhile_stays() -> None:
    parameter = Parameter()

    def worse() -> Verdict:
        parameter.now = "hotfix"
        return verdict_of(rows_of(40, seconds=2.0))

    verdict = tried(parameter.release, "old", "new", worse)
    assert (
        verdict.failed and verdict.image_now == parameter.now == "hotfix" and "hotfix was released" in parameter.said[0]
    )


@pytest.fixture
def job_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_content()), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "nothing is to be tried; give --image sha256:... or --set"),
        (["--set", "training.learning_rat=1"], "did you mean 'learning_rate'?"),
        (["--image", "sha256:12", "--backend", "local"], "run in no image"),
        (["--set", "training.seed=1", "--gate", "loss<=1"], "--gate: is for --promote"),
        (["--set", "training.seed=1", "--promote"], "--promote: needs --gate"),
        (["--set", "training.seed=1", "--promote", "--gate", "loss!1"], "'loss!1': is no condition"),
        (["--image", "sha256:12", "--set", "compute.backend=local", *HERE], "run in no image"),
        (["--set", "training.seed=1", "--against", "Not_A_Job"], "must look like"),
    ],
)
def test_wrong_input_is_one_line_and_runs_nothing(
    job_path: str,
    arguments: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(canary, "run_job", lambda *_: pytest.fail("it was run"))
    assert run(["canary", job_path, *arguments]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trainyard: ")]
    assert told in said


def test_a_baseline_that_has_made_no_step_yet_is_nothing_to_judge_by(
    job_path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before the candidate takes its hours."""
    monkeypatch.setattr(canary, "seen", lambda job_id, *_: Ran(job_id, "Training", "", []))
    monkeypatch.setattr(canary, "run_job", lambda *_: pytest.fail("it was run"))
    baseline = "acme-tiny-20260131120000-1a2b"
    assert run(["canary", job_path, "--set", "training.seed=1", "--against", baseline, "-e", "test"]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trainyard: ")]
    assert f"--against {baseline}: has no metrics yet; name a job that made steps" in said


def test_the_verb_tells_all_checks_keeps_them_and_promotes_only_what_is_as_good(
    job_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    promoted: list[str] = []

    def promote(job: str, *, gate: list[str], as_json: bool, **_: Any) -> None:
        assert gate == ["loss<=9"] and as_json
        promoted.append(job)
        print(json.dumps({"model_package": "arn"}))

    monkeypatch.setattr("trainyard.cli.exporting.promote", promote)
    seconds = {"baseline": 1.0, "candidate": 1.5}

    def run_job(_: Path, options: Sequence[str], folder: Path, name: str, *__: Any) -> Ran:
        assert ("training.seed=2" in options) == (name == "candidate"), "the baseline runs as the file has it"
        return Ran(f"{name}-1", "Completed", "", rows_of(40, seconds=seconds[name]))

    monkeypatch.setattr(canary, "run_job", run_job)
    verb = ["canary", job_path, "--set", "training.seed=2", "--promote", "--gate", "loss<=9"]
    verb += ["--evidence", str(tmp_path / "seen"), "--json"]
    assert run(verb) == 1
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert not document["is_good"] and "the candidate is worse: speed" in printed.err and promoted == []
    assert {path.name for path in (tmp_path / "seen").iterdir()} == {
        *("before.json", "verdict.json", "baseline-metrics.jsonl", "candidate-metrics.jsonl")
    }
    seconds["candidate"] = 1.0
    capsys.readouterr()
    assert run(verb) == 0 and promoted == ["candidate-1"]
    assert json.loads(capsys.readouterr().out)["promoted"] == {"model_package": "arn"}, "one document"


def test_neither_of_the_two_goes_on_from_what_the_other_saved(
    job_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one stated destination the candidate found the last checkpoint of the baseline, and trained nothing."""
    places: list[str | None] = []

    def run_job(path: Path, options: Sequence[str], *given: Any) -> Ran:
        overrides = [option for before, option in pairwise(options) if before == "--set"]
        places.append(load_job(path, overrides).checkpoint.destination)
        return Ran(f"{given[1]}-1", "Completed", "", rows_of(40))

    monkeypatch.setattr(canary, "run_job", run_job)
    verb = ["canary", job_path, "--set", "training.seed=2", "--evidence", str(tmp_path / "seen")]
    assert run(verb) == 0 and places == [None, None], "each has its own by itself"
    content = job_content()
    content["checkpoint"] = {**content.get("checkpoint", {}), "destination": "/saved: #1"}
    Path(job_path).write_text(yaml.safe_dump(content), encoding="utf-8")
    assert run(verb) == 0 and run(verb) == 0
    stated = places[2:]
    assert len(set(stated)) == 4 and all(re.fullmatch(r"/saved: #1/canary-\w+-\w{6}", str(one)) for one in stated)


def test_the_real_promote_takes_what_the_canary_gives_it(
    job_path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as AWS, which refuses here: the verdict is told all the same."""
    asked: list[tuple[Any, ...]] = []

    def refuse(*arguments: Any, **_: Any) -> None:
        asked.append(arguments)
        raise AwsRefusedError("opening acme: AWS refused")

    monkeypatch.setattr("trainyard.cli.exporting._promotion", refuse)
    monkeypatch.setattr(canary, "run_job", lambda *given: Ran(f"{given[3]}-1", "Completed", "", rows_of(40)))
    verb = ["canary", job_path, "--set", "training.seed=2", "--promote", "--gate", "validation_loss<=2.5", "-e", "test"]
    assert run([*verb, "--json"]) == 3
    assert asked == [("candidate-1", "test", None)] and json.loads(capsys.readouterr().out)["is_good"]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_real_candidates_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same again is as good; a wrong learning rate and a deeper model are each found by their check."""
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))
    short = yaml.safe_load((root / "jobs/tiny.yaml").read_text())
    short["training"]["steps"] = 60
    job = tmp_path / "short.yaml"
    job.write_text(yaml.safe_dump(short), encoding="utf-8")

    def verb(*more: str) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-m", "trainyard", "canary", str(job), "--backend", "local", "--processes", "1"]
        # Other work on this machine changes a speed by more than half.
        done = subprocess.run([*command, *more, "--json"], cwd=root, capture_output=True, text=True)
        assert done.returncode in (0, 1), done.stderr
        return done.returncode, json.loads(done.stdout)

    code, same = verb("--set", "training.observe_every_steps=20", "--min-speed", "0.2")
    assert (code, same["is_good"]) == (0, True), same
    assert same["differs_in"] == ["training.observe_every_steps: 50 -> 20"]
    losses = [check for check in same["checks"] if check["name"].startswith("loss")]
    assert all(check["candidate"] == check["baseline"] for check in losses), "the same bits"
    against = ("--against", same["baseline"], "--min-speed")
    code, worse = verb("--set", "training.learning_rate=1.0e-5", *against, "0.2")
    assert code == 1 and "loss at step 60" in worse["why"] and "speed" not in worse["why"]
    code, slower = verb("--set", "model.config.num_hidden_layers=24", "--set", "training.steps=15", *against, "0.9")
    assert code == 1 and "speed" in slower["why"]
