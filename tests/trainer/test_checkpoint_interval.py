"""checkpoint.every_steps: auto, from the formula to a run; and the best steps, saved when they are seen."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from trainer.checkpoint import Interval, best_interval_seconds
from trainer.session import Session
from trainer.strategies import check_supported
from trainer_testing.distributed import finish
from trainer_testing.text_job import read_until, run_trainer, start_trainer, write_job

from trainyard.errors import InputError
from trainyard.launch import checkpoints
from trainyard.planner.resolve import resolve
from trainyard.spec.job import CheckpointSpec, load_job
from trainyard.spec.retention import BestSpec, Retention


def expected_seconds_per_useful_second(interval: float, stall: float, between: float) -> float:
    """Daly's exact model (2006, eq. 20, no restart cost): failures come at random, also while a save is written."""
    return between / interval * (math.exp((interval + stall) / between) - 1)


@pytest.mark.parametrize(("stall", "between"), [(0.5, 3600.0), (10.0, 3600.0), (60.0, 7200.0), (300.0, 3600.0)])
def test_no_other_interval_is_cheaper(stall: float, between: float) -> None:
    best = best_interval_seconds(save_seconds=0, stall_seconds=stall, seconds_between_failures=between)
    cost = expected_seconds_per_useful_second(best, stall, between)
    others = [expected_seconds_per_useful_second(best * 1.05**power, stall, between) for power in range(-60, 60)]
    assert cost < min(others) * 1.0005
    young = math.sqrt(2 * stall * between)
    assert best == pytest.approx(young, rel=math.sqrt(stall / between) + 0.01)


def test_limits() -> None:
    assert best_interval_seconds(save_seconds=900, stall_seconds=0.1, seconds_between_failures=3600) == 900
    assert best_interval_seconds(save_seconds=1, stall_seconds=99, seconds_between_failures=10) == 10


def test_the_choice_is_bounded_by_the_minutes_and_told_when_it_changes() -> None:
    interval = Interval(CheckpointSpec(every_steps="auto", every_minutes=2.0), hours_between_failures=10.0)
    assert interval.seconds == 0.0, "the first save, at once, measures"
    interval.began()
    assert interval.seconds == 60.0
    assert interval.measured(save_seconds=1.0, stall_seconds=0.01) == (
        "checkpoint interval_seconds=26.8: a save stalls training for 0.010 s, takes 1.000 s, and a failure comes every"
        " 10.0 h"
    )
    assert interval.measured(save_seconds=1.0, stall_seconds=0.011) is None
    told = interval.measured(save_seconds=1.0, stall_seconds=2.0)
    assert told is not None and told.startswith("checkpoint interval_seconds=120.0 (no longer than every_minutes): ")
    assert interval.seconds == 120.0
    free = Interval(CheckpointSpec(every_minutes="auto"), hours_between_failures=10.0)
    free.measured(save_seconds=1.0, stall_seconds=2.0)
    assert free.seconds is not None and free.seconds > 120.0


def test_without_auto_the_minutes_are_the_interval() -> None:
    stated = Interval(CheckpointSpec(every_minutes=3.0), hours_between_failures=1.0)
    assert stated.measured(save_seconds=9.0, stall_seconds=9.0) is None and stated.seconds == 180.0
    assert Interval(CheckpointSpec(every_steps=5, every_minutes=None), hours_between_failures=None).seconds is None


def test_a_save_that_begins_changes_no_interval_that_is_measured_or_stated() -> None:
    measured = Interval(CheckpointSpec(every_steps="auto", every_minutes=None), hours_between_failures=10.0)
    measured.began()
    measured.measured(save_seconds=1.0, stall_seconds=2.0)
    best = measured.seconds
    assert best is not None and best > 120.0
    by_steps = Interval(CheckpointSpec(every_steps=5, every_minutes=None), hours_between_failures=10.0)
    by_minutes = Interval(CheckpointSpec(every_minutes=3.0), hours_between_failures=10.0)
    for interval, seconds in ((measured, best), (by_steps, None), (by_minutes, 180.0)):
        interval.began()
        assert interval.seconds == seconds


def test_auto_measures_with_the_first_save_and_then_waits(tmp_path: Path) -> None:
    job = write_job(tmp_path, "single", steps=8)
    settings = ("--set", "checkpoint.every_steps=auto", "--set", "checkpoint.every_minutes=600")
    settings += ("--set", "checkpoint.asynchronous=false")  # else the commit may come after the last row
    output, rows = run_trainer(1, job, tmp_path / "out", *settings, "--set", "checkpoint.keep_last=9")
    committed = [line.split()[1] for line in output.splitlines() if line.startswith("checkpoint step=")]
    assert committed == ["step=1", "step=8"], output
    assert output.count("checkpoint interval_seconds=") == 1, output
    (figures,) = [row["checkpoint"] for row in rows if "save_seconds" in row.get("checkpoint", {})]
    assert figures["committed_step"] == 1 and 0 < figures["interval_seconds"] <= 36_000


def test_a_validated_step_that_is_the_best_so_far_is_saved_and_stays(tmp_path: Path) -> None:
    job = write_job(tmp_path, "single", steps=8, validation_every_steps=2)
    settings = ["checkpoint.every_steps=null", "checkpoint.every_minutes=null", "checkpoint.keep_last=1"]
    settings += ["checkpoint.keep_best.metric=validation_loss", "checkpoint.keep_best.mode=max"]
    output, rows = run_trainer(1, job, tmp_path / "out", *(word for value in settings for word in ("--set", value)))
    losses = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    assert sorted(losses) == [2, 4, 6, 8]
    rising = [step for step in losses if losses[step] == max(losses[one] for one in losses if one <= step)]
    committed = [line.split()[1] for line in output.splitlines() if line.startswith("checkpoint step=")]
    assert committed == [f"step={step}" for step in sorted({*rising, 8})], output
    left = {path.name for path in (tmp_path / "out/checkpoints").iterdir()}
    assert left == {f"step-{step:08d}" for step in {rising[-1], 8}}


def measuring(metric: str, *, failed_elsewhere: set[int], mode: Literal["min", "max"] = "min") -> Session:
    """A session that measures; saves of `failed_elsewhere` fail on another rank."""
    session: Any = Session.__new__(Session)
    checkpoint = CheckpointSpec(keep_best=BestSpec(metric=metric, mode=mode))
    session._validation = SimpleNamespace(samples={"": "4 of a", "code": "8 of b"})
    session._job = SimpleNamespace(spec=SimpleNamespace(checkpoint=checkpoint))
    session._bests = []

    def is_anywhere(flag: bool) -> bool:
        return flag or session._bests[-1][0] in failed_elsewhere

    session._checkpointer = SimpleNamespace(failed_steps=set(), is_anywhere=is_anywhere)
    return session  # type: ignore[no-any-return]


def test_a_best_step_whose_save_failed_is_made_up_for_by_the_next_best() -> None:
    session = measuring("validation_loss", failed_elsewhere={4})

    def is_saved(step: int, loss: float) -> bool:
        session.step = step
        session._measure({"loss": 1.0, "validation_loss": loss})
        return session._is_best

    assert is_saved(1, 3.0) and is_saved(2, 1.0) and not is_saved(3, 2.0)
    session._checkpointer.failed_steps.add(2)
    assert is_saved(4, 2.0), "the best that there is has 3.0"
    assert is_saved(5, 2.5), "its save failed too, on another rank"
    assert not is_saved(6, 2.6) and session._best == 2.5
    session._measure({"loss": 1.0})
    assert not session._is_best, "only what was validated"


def test_a_save_that_is_tried_again_says_the_best_that_it_brings() -> None:
    session = measuring("validation_loss", failed_elsewhere=set())
    for session.step, loss in ((1, 3.0), (2, 1.0)):
        session._measure({"loss": 1.0, "validation_loss": loss})
    session._checkpointer.failed_steps.add(2)
    session._forget_lost_bests(saved_now=2)
    assert session._best == 1.0
    session._forget_lost_bests(saved_now=3)
    assert session._best == 3.0


def test_a_last_save_that_came_at_the_second_try_says_that_it_is_the_best(tmp_path: Path) -> None:
    job, there = write_job(tmp_path, "single", steps=2, validation_every_steps=2), tmp_path / "shared"
    (there / "checkpoints").mkdir(parents=True)
    (there / "checkpoints/step-00000002").touch()  # no step can be saved there
    settings = [f"checkpoint.destination={there}", "checkpoint.keep_best.metric=validation_loss"]
    (rank,) = start_trainer(1, job, tmp_path / "out", *(word for value in settings for word in ("--set", value)))
    read_until(rank, "checkpoint step=2 not committed")
    (there / "checkpoints/step-00000002").unlink()
    ((code, output),) = finish([rank], timeout_seconds=600)
    assert code == 0, output
    extra = json.loads((there / "checkpoints/step-00000002/manifest.json").read_text())["extra"]
    assert extra["best"] == extra["metrics"]["validation_loss"]


@pytest.mark.parametrize(
    ("metric", "mode", "says", "best"),
    [
        ("validation_loss", "min", ["validation_loss", "min"], 1.0),
        ("validation_loss", "min", "nothing", 1.0),
        ("validation_perplexity", "min", ["validation_loss", "min"], 20.0),
        ("validation_loss", "max", ["validation_loss", "min"], 3.0),
        ("validation_top1_accuracy", "max", ["validation_loss", "min"], None),
        ("validation_loss", "min", None, 3.0),
    ],
)
def test_a_resume_for_another_metric_is_not_held_against_the_best_of_the_one_before(
    metric: str, mode: Any, says: Any, best: float | None
) -> None:
    """A perplexity is never as low as a loss: no step would be the best again, and none of them saved."""
    session = measuring(metric, failed_elsewhere=set(), mode=mode)
    session._measured = {"loss": 2.0, "validation_loss": 3.0, "validation_perplexity": 20.0}
    extra = {"best": 1.0 if says else None} | ({} if says == "nothing" else {"best_of": says})
    assert session._bests_of(extra, 8) == ([] if best is None else [(8, best)])


@pytest.mark.parametrize(
    ("metric", "before", "is_known"),
    [
        ("validation_loss", {"": "4 of a", "code": "9 of b"}, True),
        ("validation_loss", {"": "5 of a"}, False),
        ("validation_perplexity", {"": "5 of a"}, False),
        ("validation_sets.code.loss", {"": "4 of a", "code": "9 of b"}, False),
        ("validation_sets.code.loss", {"": "5 of a", "code": "8 of b"}, True),
        ("loss", {"": "5 of a"}, True),
        ("validation_loss", None, True),
    ],
)
def test_a_resume_that_validates_on_other_samples_is_not_held_against_the_best_over_those_before(
    metric: str, before: dict[str, str] | None, is_known: bool
) -> None:
    session = measuring(metric, failed_elsewhere=set())
    session._measured = {"validation_loss": 3.0}
    said = {} if before is None else {"validated_on": before}
    extra = {"best": 1.0, "best_of": [metric, "min"]} | said
    assert session._bests_of(extra, 8) == ([(8, 1.0)] if is_known else [])


def test_a_resume_that_validates_on_more_keeps_the_best_over_these_and_over_those(tmp_path: Path) -> None:
    """Over the harder samples no loss is as low as over the few before: no step would be the best again."""
    settings = ["checkpoint.every_steps=null", "checkpoint.every_minutes=null", "checkpoint.keep_last=1"]
    settings.append("checkpoint.keep_best.metric=validation_loss")

    def run(steps: int, batches: int) -> tuple[list[str], list[str], dict[str, Any]]:
        job = write_job(tmp_path, "single", steps=steps, validation_every_steps=2, validation_batches=batches)
        easy = (tmp_path / "train.txt").read_text()[:1000]
        (tmp_path / "validation.txt").write_text(easy + "".join(chr(33 + 7 * at % 90) for at in range(6000)))
        output, _ = run_trainer(1, job, tmp_path / "out", *(word for value in settings for word in ("--set", value)))
        saved = re.findall(r"^checkpoint step=(\d+) committed", output, re.MULTILINE)
        left = sorted((tmp_path / "out/checkpoints").glob("step-*"))
        extra = json.loads((left[-1] / "manifest.json").read_text())["extra"]
        return saved, [str(int(path.name[5:])) for path in left], extra

    _, _, few = run(8, 1)
    saved, left, many = run(14, 64)
    assert few["best"] < many["best"], "as the test means it"
    assert few["validated_on"][""].split()[0] == "8" and few["validated_on"][""] != many["validated_on"][""]
    assert saved[0] == "10" and {"8", "14"} <= set(left)
    assert (
        checkpoints.prune(str(tmp_path / "out"), None, rules=Retention(1, None, BestSpec()), dry_run=True).removed == ()
    )


def test_a_resume_for_another_metric_saves_its_best_steps(tmp_path: Path) -> None:
    settings = ["checkpoint.every_steps=null", "checkpoint.every_minutes=null", "checkpoint.keep_last=9"]

    def run(steps: int, metric: str) -> list[str]:
        job = write_job(tmp_path, "single", steps=steps, validation_every_steps=2)
        more = [*settings, f"checkpoint.keep_best.metric={metric}"]
        output, _ = run_trainer(1, job, tmp_path / "out", *(word for value in more for word in ("--set", value)))
        return re.findall(r"^checkpoint (step=\d+) committed", output, re.MULTILINE)

    run(2, "validation_loss")
    assert run(6, "validation_perplexity") == ["step=4", "step=6"]
    extra = json.loads((tmp_path / "out/checkpoints/step-00000006/manifest.json").read_text())["extra"]
    assert extra["best"] == extra["metrics"]["validation_perplexity"]


def test_of_every_steps_loss_the_best_alone_is_remembered() -> None:
    session = measuring("loss", failed_elsewhere={1, 2, 3})
    for step in range(1, 9):
        session.step = step
        session._measure({"loss": 1.0 / step})
        assert not session._is_best
    assert session._best == 1 / 8 and len(session._bests) <= 2


def test_a_metric_that_this_job_does_not_measure_is_refused_before_data_is_read(tmp_path: Path) -> None:
    path, settings = write_job(tmp_path, "single"), ["checkpoint.keep_best.metric=validation_top1_accuracy"]
    wrong = load_job(path, settings)
    refusal = "measures validation_loss, validation_perplexity"
    with pytest.raises(InputError, match=refusal):
        resolve(wrong, world_size=1)
    # The trainer asks for itself: a resolved job may come from elsewhere.
    job = resolve(load_job(path), world_size=1).model_copy(update={"spec": wrong})
    with pytest.raises(InputError, match=refusal):
        check_supported(job, device_type="cpu")
