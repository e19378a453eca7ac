"""Validation sets: which sources make one, when each is due, what is told of it."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_data import build, corpus, resolved, source
from trainer import heartbeat
from trainer.data import MicroBatch
from trainer.rendezvous import Patience
from trainer.tasks.causal_lm import CausalLM
from trainer.validation import Validation

from trainyard.errors import JobFailedError
from trainyard.spec.job import DataSpec, RecoverySpec, ResolvedJob

PATIENCE = Patience(RecoverySpec())


class _Alone:
    """A runtime of one rank, as far as validation asks for it."""

    is_first = True
    world_size = 1

    def sum_over_ranks(self, *values: float) -> list[float]:
        return list(values)


class _Constant:
    """A strategy whose model finds every target `loss` nats hard."""

    def __init__(self, loss: float) -> None:
        self._loss = loss

    def evaluate(self, batches: list[MicroBatch]) -> torch.Tensor:
        return torch.tensor([self._loss * sum(batch.num_target_tokens for batch in batches)], dtype=torch.float64)


def job_with_sets(tmp_path: Path) -> ResolvedJob:
    """The job's own set of two sources, and two named ones, one of which has its own schedule and size."""
    path = corpus(tmp_path)
    validation = [
        source(path),
        source(path, name="code", every_steps=3, batches=2),
        source(path),
        source(path, name="web"),
    ]
    return resolved(
        {"train": [source(path)], "validation": validation}, validation_every_steps=4, validation_batches=50
    )


def validation_of(tmp_path: Path) -> Validation:
    job = job_with_sets(tmp_path)
    return Validation(job, CausalLM(), build(job, tmp_path), _Alone(), PATIENCE)  # type: ignore[arg-type]


def test_sources_of_one_name_are_one_set_and_each_has_its_size(tmp_path: Path) -> None:
    data = build(job_with_sets(tmp_path), tmp_path)
    assert data.validation is not None
    code, web = data.named_validation
    assert (code.name, code.every_steps, code.stream.num_steps) == ("code", 3, 2)
    assert (web.name, web.every_steps) == ("web", None)
    # The own set has the file twice: up to the padding of the last batch, twice as many batches.
    assert data.validation.num_steps in (2 * web.stream.num_steps - 1, 2 * web.stream.num_steps)


def test_each_set_is_due_at_its_own_steps_and_all_after_the_last(tmp_path: Path) -> None:
    validation = validation_of(tmp_path)
    due = {step: [one.name for one in validation.due(step, num_steps=11)] for step in range(1, 12)}
    assert due == {
        **{step: [] for step in (1, 2, 5, 7, 10)},
        **{step: ["code"] for step in (3, 6, 9)},
        **{step: [None, "web"] for step in (4, 8)},
        11: [None, "code", "web"],
    }


def test_rows_lines_and_the_result_tell_loss_and_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validation = validation_of(tmp_path)
    strategy: Any = _Constant(2.0)
    assert validation.run(strategy, validation.due(1, 11), 1) == {}
    early = validation.run(strategy, validation.due(3, 11), 3)
    assert early == {"validation_sets": {"code": {"loss": pytest.approx(2), "perplexity": pytest.approx(math.exp(2))}}}
    late = validation.run(_Constant(800.0), validation.due(8, 11), 8)  # type: ignore[arg-type]
    assert late["validation_loss"] == pytest.approx(800) and late["validation_perplexity"] is None
    json.dumps(late, allow_nan=False)
    assert capsys.readouterr().out.splitlines() == [
        "validation step=3 set=code loss=2.000000 perplexity=7.389056",
        "validation step=8 loss=800.000000 perplexity=inf",
        "validation step=8 set=web loss=800.000000 perplexity=inf",
    ]
    summary = validation.summary([{"step": 1}, early, late])
    assert summary["validation_sets"] == early["validation_sets"] | late["validation_sets"]
    assert summary["validation_loss"] == late["validation_loss"]
    assert validation.summary([])["validation_sets"] == {"code": None, "web": None}
    broken = validation.run(_Constant(math.nan), validation.due(3, 11), 3)  # type: ignore[arg-type]
    assert broken == {"validation_sets": {"code": {"loss": None, "perplexity": None}}}
    assert capsys.readouterr().out == "validation step=3 set=code loss=nan perplexity=nan\n"


def test_a_stop_breaks_a_validation_off_between_two_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validation = validation_of(tmp_path)
    due = validation.due(11, 11)
    num_first = due[0].stream.num_steps
    answers = iter([False] * (num_first + 1) + [True])
    row = validation.run(_Constant(1.0), due, 11, lambda: next(answers))  # type: ignore[arg-type]
    assert row.keys() == {"validation_loss", "validation_perplexity"}, "the sets that were done"
    assert next(answers, "asked once a batch") == "asked once a batch"
    assert "validation step=11 broken off: told to stop" in capsys.readouterr().out


@pytest.mark.parametrize("is_compiled", [True, False])
def test_what_a_set_runs_first_may_be_compiled_for_as_long_as_the_first_step(
    is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heart = tmp_path / "heart"
    monkeypatch.setenv(heartbeat.FILE_VARIABLE, str(heart))
    monkeypatch.setattr(heartbeat, "_heart", functools.cache(heartbeat._Heart))
    job = job_with_sets(tmp_path)
    training = job.spec.training.model_copy(update={"compile": is_compiled})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"training": training})})
    validation = Validation(job, CausalLM(), build(job, tmp_path), _Alone(), PATIENCE)  # type: ignore[arg-type]

    def patience_at(step: int) -> set[bool]:
        found = set()

        class Looking(_Constant):
            def evaluate(self, batches: list[MicroBatch]) -> torch.Tensor:
                beat = heartbeat.read_beat(heart)
                assert beat is not None
                found.add(beat.is_patient)
                return super().evaluate(batches)

        validation.run(Looking(1.0), validation.due(step, 11), step)  # type: ignore[arg-type]
        beat = heartbeat.read_beat(heart)
        assert beat is not None and not beat.is_patient, "what follows is a step as any"
        return found

    assert patience_at(3) == {is_compiled}
    assert patience_at(6) == {False}
    assert patience_at(8) == {is_compiled}, "other sets may be of other shapes"
    assert patience_at(11) == {False}


def test_a_set_without_a_token_to_learn_is_refused_by_name(tmp_path: Path) -> None:
    job = job_with_sets(tmp_path)
    data = build(job, tmp_path)
    data.named_validation[0].stream.num_steps = 0
    validation = Validation(job, CausalLM(), data, _Alone(), PATIENCE)  # type: ignore[arg-type]
    with pytest.raises(JobFailedError, match=r"data.validation, set code: not a single token to learn"):
        validation.run(_Constant(1.0), validation.due(3, 11), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        ([{"every_steps": 5}], "every_steps needs a name"),
        ([{"name": "a1", "batches": 2}, {"name": "a1"}], "validation set a1: its sources disagree"),
        ([{"name": "Not A Name"}], "pattern"),
    ],
)
def test_a_wrong_schedule_is_refused_in_the_spec(validation: list[dict[str, Any]], message: str) -> None:
    one = {"path": "x", "format": "text"}
    with pytest.raises(ValueError, match=message):
        DataSpec.model_validate({"train": [one], "validation": [one | more for more in validation]})
