"""Sweeps: what is tried, who is stopped, what it may cost; on a played backend, and through the ordinary launch."""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from launch_testing import job_content

from trainyard.cli.app import run
from trainyard.errors import AwsAwayError, AwsRefusedError, InputError, TrainyardError
from trainyard.launch import watch
from trainyard.launch.backend import LogCursor, LogLine, Observation, Say, SilentError
from trainyard.launch.launcher import new_record, record_and_submit, with_destination
from trainyard.launch.names import is_of_job, new_job_id
from trainyard.launch.place import Place
from trainyard.launch.record import FolderRecordStore, JobRecord, StateChange
from trainyard.launch.spending import Spent
from trainyard.operate.course import Course, curve, row_of_line, units_per_second
from trainyard.operate.sweep import record as sweep_records
from trainyard.operate.sweep import runner as runner_module
from trainyard.operate.sweep.record import LAUNCHING, SweepRecord, SweepStore, Trial, trial_name
from trainyard.operate.sweep.runner import Runner, check_budget, first_trials
from trainyard.operate.sweep.search import MOST_TRIALS, Told, search_of
from trainyard.operate.sweep.space import grid, parse_axes, parse_axis, text_of
from trainyard.operate.sweep.standings import standings
from trainyard.operate.sweep.stopping import halving, losers, median, rungs
from trainyard.spec.base import apply_overrides, parse
from trainyard.spec.job import JobSpec

NOON = datetime(2026, 3, 20, 12, tzinfo=UTC)


def test_values_stay_as_they_were_written_and_a_grid_has_them_all() -> None:
    axes = parse_axes(["training.learning_rate=1e-4,2.0e-4", "training.optimizer.betas=[0.9, 0.95],[0.8, 0.9]"])
    assert list(grid(axes)) == [
        (f"training.learning_rate={rate}", f"training.optimizer.betas={betas}")
        for rate in ("1e-4", "2.0e-4")
        for betas in ("[0.9, 0.95]", "[0.8, 0.9]")
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("training.learning_rate", "must look like"),
        ("=1,2", "must look like"),
        ("a.b=1,[2", "must look like"),
        ("a.b=1],[2", "must look like"),
        ("a.b=log:1e-3", "must look like"),
        ("a.b=log:0..1", "needs 0 < low < high"),
        ("a.b=linear:2..1", "needs low < high"),
        ("a.b=int:1..2.5", "whole numbers"),
        ("a.b=1,,2", "must look like"),
        ("a.b=3,3", "stands twice"),
    ],
)
def test_what_is_no_axis_is_refused(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        parse_axis(text)


def test_a_grid_of_many_axes_is_refused_before_it_is_made() -> None:
    axes = parse_axes([f"a.b{number}={','.join(map(str, range(99)))}" for number in range(9)])
    with pytest.raises(InputError, match="makes 913517247483640899 trials, more than 1000"):
        search_of("grid", axes, num_trials=None, seed=0)
    assert search_of("grid", axes, num_trials=100, seed=0).propose(99, [])[-2:] == ("a.b7=1", "a.b8=0")


def test_an_axis_is_given_once_and_a_grid_has_no_ranges() -> None:
    with pytest.raises(InputError, match=r"a\.b: is given twice"):
        parse_axes(["a.b=1,2", "a.b=3"])
    with pytest.raises(InputError, match="a grid has no ranges"):
        grid(parse_axes(["a.b=log:1..2"]))


@pytest.mark.parametrize("value", [1e-5, 0.00123456789, 3.0, 123456.0, 1.5e20])
def test_a_number_that_was_drawn_is_a_number_in_the_job_file(value: float) -> None:
    read = apply_overrides({}, [f"a.b={text_of(value)}"])["a"]["b"]
    assert isinstance(read, int | float) and math.isclose(read, value, rel_tol=1e-5)


def test_a_random_search_is_the_same_for_whoever_goes_on_with_it() -> None:
    axes = parse_axes(["a.rate=log:1e-5..1e-2", "a.size=int:2..8", "a.drop=linear:0..0.5", "a.kind=x,y"])
    search = search_of("random", axes, num_trials=40, seed=3)
    drawn = [search.propose(number, []) for number in range(40)]
    assert drawn == [search_of("random", axes, num_trials=40, seed=3).propose(number, []) for number in range(40)]
    rates = sorted(float(one[0].split("=")[1]) for one in drawn)
    assert 1e-5 <= rates[0] < 1e-4 and 1e-3 < rates[-1] <= 1e-2, "as many in each decade"
    assert {one[1] for one in drawn} <= {f"a.size={size}" for size in range(2, 9)}
    assert len(set(drawn)) > 30
    with pytest.raises(InputError, match="needs --trials N"):
        search_of("random", axes, num_trials=None, seed=0)
    with pytest.raises(InputError, match=f"more than {MOST_TRIALS}"):
        search_of("random", axes, num_trials=MOST_TRIALS + 1, seed=0)


def test_without_optuna_its_search_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InputError, match="pip install 'optuna=="):
        search_of("optuna", parse_axes(["a.b=log:1e-5..1e-2"]), num_trials=3, seed=0)


def line(start: float, by_step: float, num: int) -> dict[int, float]:
    return {step: start + by_step * step for step in range(1, num + 1)}


def test_halving_keeps_the_best_third_of_those_that_have_come_to_a_rung() -> None:
    assert rungs(90) == [10, 30] and rungs(2) == []
    curves = {number: line(5.0 + number / 10, -0.01, 12) for number in range(1, 7)}
    assert sorted(halving(range(1, 7), curves, 90)) == [3, 4, 5, 6], "two of six go on"
    assert halving([4], {4: curves[4]}, 90) == {}, "the first to come goes on"
    assert halving([1, 2], {1: line(5, 0, 9), 2: line(6, 0, 9)}, 90) == {}, "nobody has come to a rung"
    late = {1: line(5, 0, 12), 2: line(6, 0, 31)}
    assert halving([1, 2], late, 90) == {}, "each is judged at the highest rung that it has reached"
    begins_late = {1: line(5, 0, 12), 2: line(4, 0, 12), 3: {11: 9.0, 12: 9.0}}
    assert list(halving([1, 2, 3], begins_late, 90)) == [1], "who has nothing at the rung is not judged, and none fails"


def test_the_median_rule_stops_what_is_worse_than_the_others_were() -> None:
    curves = {1: line(5, -0.1, 20), 2: line(5, -0.09, 20), 3: line(5, 0.0, 12), 4: line(5, -0.2, 9)}
    assert list(median([1, 2, 3, 4], curves, 90)) == [3]
    assert median([3], {1: curves[1], 3: curves[3]}, 90) == {}, "one other is no median"
    assert median([3], curves, 1000) == {}, "within the first tenth nobody is judged"
    assert median([3], curves, 0) == {}, "nor where nobody knows what a tenth is"


def test_a_trial_that_diverged_loses_to_every_other() -> None:
    rows = [{"step": step, "loss": None if step > 5 else 2.0} for step in range(1, 13)]
    curves = {1: curve(rows, "loss"), 2: line(50, 0, 12)}
    assert list(losers("halving", [1, 2], curves, 90)) == [1]
    assert losers("none", [1, 2], curves, 90) == {}


def test_a_line_is_a_row_as_the_file_has_it() -> None:
    said = "step=7 loss=2.5 learning_rate=0.001 grad_norm=nan tokens=128 tokens_per_second=64.0 step_seconds=2.0"
    row = row_of_line(said)
    assert row == {
        "step": 7,
        "loss": 2.5,
        "learning_rate": 0.001,
        "grad_norm": None,
        "tokens": 128.0,
        "step_seconds": 2.0,
    }
    assert units_per_second([row or {}]) == 64.0
    assert row_of_line("validation step=7 loss=2.25 perplexity=inf") == {
        "step": 7,
        "validation_loss": 2.25,
        "validation_perplexity": None,
    }
    for other in (
        "validation step=7 set=code loss=1.0",
        "checkpoint step=7 committed",
        "a step=1",
        "step=x",
        "step=nan",
        "step=inf",
    ):
        assert row_of_line(other) is None


def test_a_training_loss_is_the_mean_of_its_last_steps() -> None:
    rows = [{"step": step, "loss": float(step % 2)} for step in range(1, 11)]
    assert curve(rows, "loss")[10] == pytest.approx(0.4) and curve(rows, "loss")[1] == 1.0
    validated = [*rows, {"step": 11, "validation_loss": 3.0}]
    assert curve(validated, "validation_loss") == {11: 3.0}


def trial(number: int, **more: Any) -> Trial:
    return Trial(number=number, name=f"t-{number}", overrides=(f"a.b={number}",), **more)


def sweep_record(*trials: Trial, **more: Any) -> SweepRecord:
    given = {"over": ("training.learning_rate=1e-3,2e-3,3e-3",), "search": "grid", "num_trials": None, "seed": 0}
    given |= {"parallel": 2, "stop_rule": "halving", "metric": "loss", "environment": "test", "backend": None}
    return parse(
        SweepRecord,
        {"name": "s", "token": "abc123", "directory": "/", "started_at": NOON.isoformat(), "trials": trials}
        | given
        | more,
        "sweep",
    )


def test_the_best_is_a_completed_one_at_a_step_that_all_of_them_made() -> None:
    record = sweep_record(
        trial(1, state="Completed", job_id="a", usd=1.25),
        trial(2, state="Completed", job_id="b", usd=2.5),
        trial(3, state="Stopped", job_id="c", why="loser: x"),
        trial(4),
    )
    found = standings(record, {1: line(5, -0.1, 20), 2: line(5, -0.09, 30), 3: line(1, 0, 5)}, {1: 100.0})
    assert (found.equal_step, found.usd) == (5, 3.75)
    assert found.best is not None and found.best.number == 1, "at step 20; that 2 went further does not make it better"
    assert found.lines[3].value is None and found.lines[2].value_at_equal_step == 1
    document = json.loads(json.dumps(found.document(), allow_nan=False))
    assert document["best"] == {"trial": 1, "job_id": "a", "settings": {"a.b": "1"}}
    diverged = standings(record, {1: {1: math.inf}}, {}).document()
    assert diverged["best"] is None and diverged["trials"][0]["diverged"]


def test_names_of_trials_are_a_jobs_names_and_found_again() -> None:
    name = trial_name("a" * 40, "abc123", 117)
    assert len(name) == 40 and name.endswith("-abc123-117")
    job_id = new_job_id("acme", name)
    assert is_of_job(job_id, "acme", name) and not is_of_job(job_id, "acme", "b" + name[1:])


@dataclass
class Machines:
    """A backend that plays jobs of 90 steps: `tick` lets each make ten; who is stopped ends at the next."""

    folder: Path
    losses: Callable[[JobSpec], float]
    quota: int = 99
    running: dict[str, int] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    launched: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    fail_at: dict[str, int] = field(default_factory=dict)
    """Name -> step at which that job fails, once."""

    def check(self, record: JobRecord) -> None:
        """Takes all."""

    def submit(self, record: JobRecord, say: Say) -> None:
        if record.job_id in self.running:
            return
        if len([one for one in self.running if one not in self.ended]) >= self.quota:
            raise InputError("over the quota of tenant acme")
        self.launched.append(record.spec.name)
        self.running[record.job_id] = 0

    def observe(self, record: JobRecord) -> Observation | None:
        if record.job_id not in self.running:
            return None
        state = self.ended.get(record.job_id, "Training")
        failure = "InternalServerError: a machine was lost" if state == "Failed" else ""
        transitions = (StateChange(state="Training", at=NOON.isoformat(), attempt=record.attempt.number),)
        return Observation(state, transitions=transitions, failure=failure)

    def spent(self, record: JobRecord) -> Spent:
        """As if the whole job took two machines of 6 dollars an hour."""
        hours = Decimal(self.running.get(record.job_id, 0)) / 90
        return Spent(2 * 6 * hours, 2 * hours, Decimal(6), "b", "d", None)

    def stop(self, record: JobRecord) -> None:
        self.stopped.append(record.job_id)
        self.ended[record.job_id] = "Stopped"

    def read_logs(self, record: JobRecord, cursor: LogCursor) -> list[LogLine]:
        start = self.losses(record.spec)
        told = int(cursor.positions.get("at", "0"))
        cursor.positions["at"] = str(self.running[record.job_id])
        return [
            LogLine("h", f"step={step} loss={start - step / 100} tokens=10 step_seconds=0.5", 0)
            for step in range(told + 1, self.running[record.job_id] + 1)
        ]

    def states(self, records: Sequence[JobRecord]) -> dict[str, str]:
        return {}

    def tick(self) -> None:
        for job_id in self.running:
            if job_id not in self.ended:
                self.running[job_id] += 10
                if self.running[job_id] == self.fail_at.get(job_id):
                    self.ended[job_id] = "Failed"
                if self.running[job_id] >= 90:
                    self.ended[job_id] = "Completed"


class PlayedLauncher:
    """Launches on Machines, with a record in a folder."""

    def __init__(self, machines: Machines, planned_usd: float | None = 12.0) -> None:
        self.machines, self.planned_usd = machines, planned_usd
        self.place_of_all = Place(FolderRecordStore(machines.folder), machines)

    def load(self, name: str, overrides: Sequence[str]) -> JobSpec:
        return parse(JobSpec, apply_overrides(job_content(), [*overrides, f"name={name or 'tiny'}"]), "job")

    def plan_usd(self, spec: JobSpec) -> float | None:
        return self.planned_usd

    def launch(self, spec: JobSpec) -> tuple[Place, JobRecord]:
        job_id = new_job_id("acme", spec.name)
        record = new_record(
            spec,
            with_destination(spec, str(self.machines.folder / job_id)),
            job_id=job_id,
            backend="sagemaker",
            environment="test",
            plan={},
            image=None,
            channels=(),
            forced=(),
            launched_by="",
        )
        made = record_and_submit(record, self.place_of_all.store, self.machines, lambda _: None)
        return self.place_of_all, made

    def find(self, spec: JobSpec) -> tuple[Place, JobRecord] | None:
        store = self.place_of_all.store
        for job_id in store.job_ids():
            record = store.read(job_id).record
            if record.spec.name == spec.name:
                return self.place_of_all, record
        return None

    def place(self, job_id: str) -> Place:
        return self.place_of_all


def rate_of(spec: JobSpec) -> float:
    """The lower the rate, the lower the loss."""
    return 5.0 + 100 * spec.training.learning_rate


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Runner, Machines]]]:
    """A sweep on played machines; `held` as the verb does it."""
    store = SweepStore("s", tmp_path / "sweeps")

    def begin(*, quota: int = 99, planned_usd: float | None = 12.0, **more: Any) -> tuple[Runner, Machines]:
        machines = Machines(tmp_path / "jobs", rate_of, quota)
        monkeypatch.setattr(runner_module, "spent", machines.spent)
        launcher = PlayedLauncher(machines, planned_usd)
        record = sweep_record(**more)
        search = search_of(record.search, parse_axes(record.over), num_trials=record.num_trials, seed=0)
        trials = first_trials(search, launcher, record.token, "tiny")
        check_budget(trials, search.num_trials, record.max_cost_usd, force=record.force)
        record = record.model_copy(update={"trials": trials})
        store.create(record, "name: x\n")
        return Runner(store, record, search, launcher, "tiny", lambda _: None), machines

    with store.held():
        yield begin


def test_losers_are_stopped_by_the_ordinary_way_and_the_rest_completes(begun: Any) -> None:
    runner, machines = begun(parallel=3)
    found = runner.run(machines.tick)
    assert [one.state for one in found.lines] == ["Completed", "Stopped", "Stopped"]
    assert found.best is not None and found.best.settings == {"training.learning_rate": "1e-3"}
    assert len(machines.stopped) == 2 and "place 2 of 3" in found.lines[1].why
    assert found.equal_step == 10 and found.lines[0].step == 90
    assert found.lines[0].units_per_second == 20.0 and found.lines[0].value is not None
    assert SweepStore("s", runner.store.folder.parent).read() == runner.record, "all of it is kept"


@pytest.mark.parametrize(
    ("rule", "parallel", "second", "last"),
    [
        ("median", 3, "Completed", "Completed"),
        ("median", 1, "Completed", "Stopped"),
        ("halving", 1, "Stopped", "Stopped"),  # at its rungs, which are shares of all the steps
    ],
)
def test_a_job_in_epochs_is_judged_once_a_trial_has_shown_how_many_steps_they_are(
    begun: Any, rule: str, parallel: int, second: str, last: str
) -> None:
    over = ("training.learning_rate=1e-3,2e-3,3e-3", "training.steps=null", "training.epochs=1")
    runner, machines = begun(parallel=parallel, stop_rule=rule, over=over)
    assert [one.state for one in runner.run(machines.tick).lines] == ["Completed", second, last]


def test_no_more_run_at_once_than_asked_for(begun: Any) -> None:
    runner, machines = begun(parallel=1, stop_rule="none")
    most = 0

    def tick() -> None:
        nonlocal most
        most = max(most, len(machines.running) - len(machines.ended))
        machines.tick()

    runner.run(tick)
    assert (most, len(machines.launched)) == (1, 3)


def test_a_full_quota_is_waited_for_and_launches_nothing_twice(begun: Any) -> None:
    runner, machines = begun(parallel=3, quota=1, stop_rule="none")
    found = runner.run(machines.tick)
    assert [one.state for one in found.lines] == ["Completed"] * 3
    assert sorted(machines.launched) == [one.name for one in runner.record.trials], "each once"
    assert len(list(machines.folder.glob("*/record.json"))) == 3, "a refusal left one record"


def test_a_trial_that_nobody_would_take_is_told_and_others_go_on(begun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, machines = begun(parallel=1, stop_rule="none")
    launch = runner.launcher.launch

    def refuse_one(spec: JobSpec) -> Any:
        if spec.training.learning_rate == 2e-3:
            raise InputError("refused before anything was spent: it does not fit")
        return launch(spec)

    monkeypatch.setattr(runner.launcher, "launch", refuse_one)
    found = runner.run(machines.tick)
    assert [one.state for one in found.lines] == ["Completed", "Refused", "Completed"]
    assert "it does not fit" in found.lines[1].why


def test_the_plans_of_all_trials_are_held_against_the_budget_first(begun: Any) -> None:
    with pytest.raises(InputError, match=r"3 trials are planned at 36\.00 USD"):
        begun(max_cost_usd=20.0)
    with pytest.raises(InputError, match="knows no price"):
        begun(max_cost_usd=20.0, planned_usd=None)


def test_with_force_trials_start_as_long_as_their_plans_fit(begun: Any) -> None:
    runner, machines = begun(max_cost_usd=25.0, force=True, parallel=3, stop_rule="none")
    found = runner.run(machines.tick)
    # Twelve dollars are promised to each of the first two, and spent; the third would pass the budget by its plan.
    assert [one.state for one in found.lines] == ["Completed", "Completed", "Waiting"], found
    assert found.lines[2].why.startswith("budget: ")
    assert found.usd is not None and 23.9 < found.usd < 25.0 and "planned at 12.00 USD" in found.lines[2].why


def test_at_the_budget_what_runs_is_saved_and_stopped(begun: Any) -> None:
    # A plan that knew no better: 1 dollar, while two machines at 6 dollars take 12 in an hour.
    runner, machines = begun(max_cost_usd=8.0, planned_usd=1.0, parallel=2, stop_rule="none")
    found = runner.run(machines.tick)
    assert [one.state for one in found.lines] == ["Stopped", "Stopped", "Waiting"]
    assert all(one.why.startswith("budget: ") for one in found.lines) and len(machines.stopped) == 2
    assert found.usd is not None and 8.0 <= found.usd < 8.0 + 2 * 12 * 10 / 90 + 0.1, "within one look"


def test_a_budget_is_held_though_the_first_look_of_who_goes_on_failed(
    begun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on with a sweep knows of no job's place yet: it is asked for again, and the job stopped, later."""
    runner, machines = begun(parallel=1, stop_rule="none")
    runner._start()
    machines.tick()
    runner.look()
    again, away = go_on(runner, max_cost_usd=0.5), [2]
    known = runner.launcher.place

    def place(job_id: str) -> Place:
        if away[0]:
            away[0] -= 1
            raise AwsRefusedError("the network is away")
        there: Place = known(job_id)
        return there

    monkeypatch.setattr(again.launcher, "place", place)
    found = again.run(machines.tick)
    assert found.lines[0].state == "Stopped" and found.lines[0].why.startswith("budget: ")
    assert machines.stopped == [found.lines[0].job_id] and away == [0], "the look and the stop both failed"


class GoneError(Exception):
    """The launcher dies."""


@pytest.mark.parametrize("at", ["before the launch", "after the record", "after the launch", "before a stop"])
def test_whoever_goes_on_launches_no_trial_twice(begun: Any, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    runner, machines = begun(parallel=3)

    def die(*_: Any, **__: Any) -> None:
        raise GoneError

    with monkeypatch.context() as patch:
        place = {
            "before the launch": (PlayedLauncher, "launch"),
            "after the record": (Machines, "submit"),
            "after the launch": (Runner, "_adopt"),
            "before a stop": (watch, "stop"),
        }[at]
        patch.setattr(*place, die)
        with pytest.raises(GoneError):
            runner.run(machines.tick)
    kept = runner.store.read()
    if at != "before a stop":
        assert kept.trials[0].state == LAUNCHING and kept.trials[0].job_id is None
    again = Runner(runner.store, kept, runner.search, runner.launcher, "tiny", lambda _: None)
    found = again.run(machines.tick)
    assert [one.state for one in found.lines] == ["Completed", "Stopped", "Stopped"], found
    assert len(machines.launched) == len(set(machines.launched)) == 3
    assert len(list(machines.folder.glob("*/record.json"))) == 3


def test_a_job_that_was_launched_is_taken_up_though_there_is_no_money_for_another(
    begun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, machines = begun(parallel=1, stop_rule="none")

    def die(*_: Any) -> None:
        raise GoneError

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_adopt", die)
        with pytest.raises(GoneError):
            runner.run(machines.tick)
    less = runner.store.read().model_copy(update={"max_cost_usd": 0.5})
    found = Runner(runner.store, less, runner.search, runner.launcher, "tiny", lambda _: None).run(machines.tick)
    assert found.lines[0].state == "Stopped" and machines.stopped == [found.lines[0].job_id], "not unseen"
    assert [one.state for one in found.lines[1:]] == ["Waiting", "Waiting"]


def test_a_loser_that_somebody_resumed_is_let_run(begun: Any) -> None:
    runner, machines = begun(parallel=3, stop_rule="none")
    for _ in range(2):
        runner._start()
        machines.tick()
        runner.look()
    first = runner.record.trials[0]
    runner._stop(first, "loser: x")
    runner.look()
    store = runner.launcher.place_of_all.store
    del machines.ended[first.job_id]
    stored = store.read(first.job_id)
    store.replace(stored, stored.record.with_next_attempt().with_attempt(submitted_at="now").with_state("Training"))
    found = Runner(runner.store, runner.store.read(), runner.search, runner.launcher, "tiny", lambda _: None).run(
        machines.tick
    )
    assert [one.state for one in found.lines] == ["Completed"] * 3 and found.lines[0].why == ""


def go_on(runner: Runner, **changes: Any) -> Runner:
    """Another process, which goes on with the sweep or only looks."""
    read_only = changes.pop("read_only", False)
    kept = runner.store.read().model_copy(update=changes)
    return Runner(runner.store, kept, runner.search, runner.launcher, "tiny", lambda _: None, read_only)


def resumed(runner: Runner, machines: Machines, job_id: str) -> None:
    """As `trainyard resume` and a tenant's resumer do it."""
    store = runner.launcher.place_of_all.store  # type: ignore[attr-defined]
    del machines.ended[job_id]
    stored = store.read(job_id)
    store.replace(stored, stored.record.with_next_attempt().with_attempt(submitted_at="now").with_state("Training"))


def begin_and_fail(runner: Runner, machines: Machines) -> str:
    """The first trial fails after ten steps."""
    runner._start()
    job_id = runner.record.trials[0].job_id
    assert job_id is not None
    machines.fail_at[job_id] = 10
    machines.tick()
    runner.look()
    assert runner.record.trials[0].state == "Failed" and "a machine was lost" in runner.record.trials[0].why
    return job_id


def test_a_failed_trial_that_somebody_resumed_is_let_run(begun: Any) -> None:
    runner, machines = begun(parallel=3, stop_rule="none")
    resumed(runner, machines, begin_and_fail(runner, machines))
    found = go_on(runner).run(machines.tick)
    assert machines.stopped == [] and [one.state for one in found.lines] == ["Completed"] * 3
    assert found.lines[0].why == ""


@pytest.mark.parametrize("comes_back", [True, False])
def test_what_the_resumer_starts_again_is_seen_and_counted(begun: Any, comes_back: bool) -> None:
    runner, machines = begun(parallel=1, stop_rule="none", max_cost_usd=37.0, num_trials=1)
    place = runner.launcher.place_of_all
    runner.launcher.place_of_all = replace(place, has_resumer=True)
    load = runner.launcher.load
    runner.launcher.load = lambda name, overrides: load(name, [*overrides, "recovery.max_resumes=2"])
    job_id = begin_and_fail(runner, machines)
    record = place.store.read(job_id)
    assert watch.may_be_resumed(record.record), "a job that the resumer takes"
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 2 and comes_back:
            resumed(runner, machines, job_id)
        machines.tick()

    found = runner.run(tick)
    assert found.lines[0].state == ("Completed" if comes_back else "Failed")
    assert found.usd == pytest.approx(12.0 if comes_back else 12 * 10 / 90)
    assert ticks < 2 * runner_module.LATE_LOOKS, "one that does not come back is not waited for for ever"


def test_a_failed_trial_that_no_resumer_starts_again_is_over_at_once(begun: Any) -> None:
    runner, machines = begun(parallel=1, stop_rule="none", num_trials=1)
    load, ticks = runner.launcher.load, 0
    runner.launcher.load = lambda name, overrides: load(name, [*overrides, "recovery.max_resumes=2"])
    job_id = begin_and_fail(runner, machines)
    assert watch.may_be_resumed(runner.launcher.place_of_all.store.read(job_id).record), "were there a resumer"

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        machines.tick()

    assert runner.run(tick).lines[0].state == "Failed"
    assert ticks < 3, "nobody is waited for"


def test_who_only_looks_stops_and_writes_nothing(begun: Any) -> None:
    runner, machines = begun(parallel=3, stop_rule="none")
    runner._start()
    first = runner.record.trials[0]
    runner._keep(first.model_copy(update={"why": "loser: x", "stopped_attempt": 1}))
    machines.tick()
    before = (runner.store.folder / "sweep.json").read_bytes()
    looking = go_on(runner, read_only=True)
    looking.look(everything=True)
    assert looking.standings().lines[0].step == 10 and machines.stopped == []
    assert (runner.store.folder / "sweep.json").read_bytes() == before
    go_on(runner).look(everything=True)
    assert machines.stopped == [first.job_id]


def test_a_budget_that_comes_with_resume_is_planned_and_held(begun: Any) -> None:
    runner, machines = begun(parallel=1, stop_rule="none")
    runner._keep(runner.record.trials[0])
    unplanned = tuple(one.model_copy(update={"planned_usd": None}) for one in runner.record.trials)
    runner.store.write(runner.record.model_copy(update={"trials": unplanned}))
    runner.launcher.planned_usd = None
    with pytest.raises(InputError, match="knows no price"):
        go_on(runner, max_cost_usd=25.0).run(machines.tick)
    runner.launcher.planned_usd = 12.0
    found = go_on(runner, max_cost_usd=25.0).run(machines.tick)
    assert [one.state for one in found.lines] == ["Completed", "Completed", "Waiting"], found


class Learning:
    """A search that proposes by what it was told, here a rate for each trial that did not fail."""

    is_fixed = False

    def __init__(self, *rates: str) -> None:
        self._rates, self.num_trials = rates, len(rates)
        self.told: list[list[float | None]] = []

    def propose(self, number: int, told: Sequence[Told]) -> tuple[str, ...]:
        self.told.append([one.value for one in told])
        return (f"training.learning_rate={self._rates[number]}",)


def learning(runner: Runner, *rates: str) -> Learning:
    search = Learning(*rates)
    runner.search = search
    runner.record = runner.record.model_copy(update={"trials": runner.record.trials[:1]})
    runner.store.write(runner.record)
    return search


def test_a_proposal_that_is_no_job_is_refused_and_told_and_the_search_goes_on(begun: Any) -> None:
    runner, machines = begun(parallel=1, stop_rule="none")
    search = learning(runner, "1e-3", "-1", "2e-3")
    found = runner.run(machines.tick)
    assert [one.state for one in found.lines] == ["Completed", "Refused", "Completed"]
    assert "learning_rate" in found.lines[1].why and search.told[-1][1] == math.inf
    assert [one.state for one in go_on(runner).run(machines.tick).lines] == ["Completed", "Refused", "Completed"]


def test_a_search_that_learns_is_told_of_no_trial_before_its_end(begun: Any) -> None:
    """A loss of the tenth step would stand beside others' last ones, as a bad setting's."""
    runner, machines = begun(parallel=2, stop_rule="none")
    search = learning(runner, "1e-3", "2e-3", "3e-3")

    def tick() -> None:
        machines.tick()
        if len(machines.running) == 2:
            machines.ended[next(iter(machines.running))] = "Stopped"

    assert [one.state for one in runner.run(tick).lines] == ["Stopped", "Completed", "Completed"]
    first, second = search.told[-1]
    assert first is not None and second is None, "the first had ended, the second ran"


def test_more_money_lets_a_search_that_learns_go_on(begun: Any) -> None:
    runner, machines = begun(parallel=1, stop_rule="none", max_cost_usd=6.0, planned_usd=1.0)
    learning(runner, "1e-3", "2e-3", "3e-3")
    assert [one.state for one in runner.run(machines.tick).lines] == ["Stopped"]
    found = go_on(runner, max_cost_usd=100.0).run(machines.tick)
    assert [one.state for one in found.lines] == ["Stopped", "Completed", "Completed"]


def test_what_aws_refuses_for_a_while_ends_no_sweep(begun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, machines = begun(parallel=3)
    launch, stop, away = runner.launcher.launch, watch.stop, {"launch": 3, "stop": 2}

    def first(name: str, then: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if away[name]:
                away[name] -= 1
                raise AwsRefusedError(f"{name}: AWS could not be reached")
            return then(*arguments)

        return call

    monkeypatch.setattr(runner.launcher, "launch", first("launch", launch))
    monkeypatch.setattr(watch, "stop", first("stop", stop))
    found = runner.run(machines.tick)
    assert [one.state for one in found.lines] == ["Completed", "Stopped", "Stopped"] and not any(away.values())
    assert len(machines.launched) == 3


@pytest.mark.parametrize("is_taken", [True, False])
@pytest.mark.parametrize("error", [AwsAwayError, SilentError])
def test_a_trial_whose_submission_gets_no_answer_is_looked_for_and_not_launched_again(
    begun: Any, monkeypatch: pytest.MonkeyPatch, error: type[TrainyardError], is_taken: bool
) -> None:
    runner, machines = begun(parallel=1)
    submit, lost = machines.submit, [True]

    def lose(record: JobRecord, say: Say) -> None:
        if not lost or is_taken:
            submit(record, say)
        if lost:
            lost.clear()
            raise error("no answer")

    monkeypatch.setattr(machines, "submit", lose)
    found = runner.run(machines.tick)
    assert [one.state for one in found.lines] == ["Completed", "Stopped", "Stopped"] and not lost
    assert sorted(machines.launched) == sorted({*machines.launched}) and len(machines.launched) == 3


@pytest.mark.parametrize("is_taken", [True, False])
@pytest.mark.parametrize("error", [AwsAwayError, SilentError])
def test_a_trial_of_which_nobody_says_a_word_is_no_refusal_and_is_taken_up_again(
    begun: Any, monkeypatch: pytest.MonkeyPatch, error: type[TrainyardError], is_taken: bool
) -> None:
    """A search that learns took it for a setting that diverges, though its job may run."""
    runner, machines = begun(parallel=1, stop_rule="none")
    search = learning(runner, "1e-3", "2e-3", "3e-3")
    find, submit, is_away = runner.launcher.find, machines.submit, [True]

    def silent(call: Callable[..., Any], is_before: bool) -> Callable[..., Any]:
        def asked(*given: Any) -> Any:
            answer = None if is_away and is_before else call(*given)
            if is_away:
                raise error("no answer")
            return answer

        return asked

    def of_the_second(record: JobRecord, say: Say) -> Any:
        is_second = record.spec.training.learning_rate == 2e-3
        return (silent(submit, not is_taken) if is_second else submit)(record, say)

    monkeypatch.setattr(machines, "submit", of_the_second)
    monkeypatch.setattr(runner.launcher, "find", silent(find, True))
    found = runner.run(machines.tick)
    assert [one.state for one in found.lines] == ["Completed", "Unanswered", "Completed"]
    assert found.lines[1].why == "no answer" and search.told[-1][1] is None
    again = go_on(runner)
    assert go_on(runner).run(machines.tick).lines[1].state == "Unanswered", "still nobody does"
    is_away.clear()
    assert [one.state for one in again.run(machines.tick).lines] == ["Completed"] * 3
    assert len(list(machines.folder.glob("*/record.json"))) == len(machines.launched) == 3, "none twice"


def test_a_launch_without_an_answer_is_in_doubt_until_somebody_says_whether_there_is_a_job(
    begun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job was taken; that looks for it are refused afterwards says nothing of it."""
    runner, machines = begun(parallel=1, stop_rule="none")
    search = learning(runner, "1e-3", "2e-3", "3e-3")
    find, submit, is_away = runner.launcher.find, machines.submit, [True]

    def taken(record: JobRecord, say: Say) -> None:
        submit(record, say)
        if is_away and record.spec.training.learning_rate == 2e-3:
            raise AwsAwayError("no answer")

    def expired(spec: JobSpec) -> Any:
        if is_away:
            raise AwsRefusedError("ExpiredToken")
        return find(spec)

    monkeypatch.setattr(machines, "submit", taken)
    monkeypatch.setattr(runner.launcher, "find", expired)
    found = runner.run(machines.tick)
    assert [one.state for one in found.lines] == ["Completed", "Unanswered", "Completed"]
    assert found.lines[1].why == "ExpiredToken" and search.told[-1][1] is None
    again = go_on(runner)
    is_away.clear()
    assert [one.state for one in again.run(machines.tick).lines] == ["Completed"] * 3
    assert len(machines.launched) == 3, "none twice"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": 99}, "sweep version 99 is newer than this trainyard reads; upgrade it"),
        ({"version": "two"}, "is no sweep's record; bring a copy of it back"),
        ({"colour": "red"}, r"a newer trainyard wrote it \(it has colour\); upgrade this one"),
        ({"parallel": 0}, "parallel"),
    ],
)
def test_a_sweep_that_this_trainyard_cannot_read_is_one_line(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    store = SweepStore("s", tmp_path)
    store.folder.mkdir()
    store.create(sweep_record(), "")
    path = store.folder / "sweep.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))
    with pytest.raises(InputError, match=told) as error:
        store.read()
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_a_sweep_of_before_is_read_and_becomes_of_this_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SweepStore("s", tmp_path)
    store.folder.mkdir()
    store.create(sweep_record(), "")
    monkeypatch.setattr(sweep_records, "SWEEP_VERSION", 2)
    assert store.read().version == 2
    path = store.folder / "sweep.json"
    content = json.loads(path.read_text())
    del content["version"]
    path.write_text(json.dumps(content))
    assert store.read().version == 2


def test_each_field_that_a_sweeps_record_gets_is_a_version_of_its_own() -> None:
    fields = [f"{model.__name__}.{name}" for model in (SweepRecord, Trial) for name in model.model_fields]
    told = f"a field came or went: raise SWEEP_VERSION; now: {fields}"
    assert (len(fields), sweep_records.SWEEP_VERSION) == (31, 1), told


def test_one_process_runs_a_sweep(tmp_path: Path) -> None:
    store = SweepStore("s", tmp_path)
    with store.held(), pytest.raises(InputError, match="is run by another process"), store.held():
        pass
    with pytest.raises(InputError, match=r"sweep s: there is none in .* \(there: none\)"):
        store.read()
    with pytest.raises(InputError, match="lower-case letters"):
        SweepStore("../x")


def test_rows_take_the_place_of_lines_and_of_steps_that_are_made_again(tmp_path: Path) -> None:
    course = Course()
    course._take([{"step": 1, "loss": 9.0}, {"step": 2, "loss": 9.0}, {"step": 3, "loss": 3.0}], replace=False)
    course._take([{"step": 1, "loss": 1.0, "tokens": 5}, {"step": 2, "loss": 2.0}], replace=True)
    course._take([{"step": 3, "validation_loss": 4.0}], replace=False)
    assert curve(course.ordered(), "loss") == {1: 1.0, 2: 1.5, 3: 2.0}
    assert course.ordered()[2] == {"step": 3, "loss": 3.0, "validation_loss": 4.0}


@pytest.mark.full
def test_optunas_search_learns_and_goes_on_from_the_record_alone(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="pip install optuna==5.0.0, which nothing else here needs")
    axes = parse_axes(["a.rate=log:1e-5..1e-1", "a.kind=x,y", "a.size=int:1..9"])
    search = search_of("optuna", axes, num_trials=40, seed=1)
    told: list[Told] = []
    for number in range(40):
        overrides = search.propose(number, told)
        given = apply_overrides({}, list(overrides))["a"]
        assert 1e-5 <= given["rate"] <= 1e-1 and given["kind"] in ("x", "y") and 1 <= given["size"] <= 9
        told.append(Told(overrides, (math.log10(given["rate"]) + 3) ** 2 + (given["kind"] == "y")))
    assert search_of("optuna", axes, num_trials=40, seed=1).propose(20, told[:20]) == told[20].overrides
    drawn = search_of("random", axes, num_trials=40, seed=1)
    late = sum(one.value or 0.0 for one in told[20:])
    guessed = [apply_overrides({}, list(drawn.propose(number, [])))["a"] for number in range(20)]
    assert late < 0.6 * sum((math.log10(one["rate"]) + 3) ** 2 + (one["kind"] == "y") for one in guessed)


@pytest.mark.full
def test_optunas_search_keeps_away_from_where_trials_diverge() -> None:
    """Of 30 after its ten random ones, 25 diverged where they were told as failed, and TPE took no notice."""
    pytest.importorskip("optuna", reason="pip install optuna==5.0.0, which nothing else here needs")
    search = search_of("optuna", parse_axes(["a.rate=log:1e-5..1"]), num_trials=40, seed=1)
    told: list[Told] = []
    for number in range(40):
        overrides = search.propose(number, told)
        rate = apply_overrides({}, list(overrides))["a"]["rate"]
        told.append(Told(overrides, math.inf if rate > 3e-3 else abs(math.log10(rate) + 2.6)))
    assert sum(one.value == math.inf for one in told[10:]) < 20
    lost = [Told(one.overrides, math.inf) for one in told[:15]]
    assert search.propose(15, lost), "nor does it stumble where every one did"


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_real_trials_of_this_machine_are_compared_though_their_launcher_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three small models, two at once; the one that hardly learns is saved and stopped, and could be resumed."""
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(root)
    over = ["--over", "training.learning_rate=5e-3,1e-6,2e-3", "--name", "rates", "--backend", "local"]
    steps = ["--set", "training.steps=600", "--set", "checkpoint.every_steps=100", "--processes", "1"]
    command = [sys.executable, "-m", "trainyard", "sweep", "jobs/tiny.yaml", *over, *steps]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=root)
    assert launcher.stderr is not None
    said: list[str] = []
    while not any(text.startswith("trial 2 of 3") for text in said):
        said.append(launcher.stderr.readline())
        assert said[-1], f"it ended: {said}"
    launcher.kill()
    launcher.wait()
    # From anywhere: the record knows where the job's relative paths begin.
    monkeypatch.chdir(tmp_path)
    assert run(["sweep", "--resume", "rates", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    lines = document["trials"]
    assert lines[1]["state"] == "Stopped" and "loser: loss" in lines[1]["why"] and lines[1]["step"] < 600, lines
    best = lines[document["best"]["trial"] - 1]
    assert best["state"] == "Completed" and best["step"] == 600 and best["value"] < lines[1]["value_at_equal_step"]
    jobs = tmp_path / "state" / "jobs"
    assert len(list(jobs.glob("*/record.json"))) == 3, "none was launched twice"
    assert list((jobs / lines[1]["job_id"]).glob("checkpoints/*/COMMITTED")), "the loser was saved"
