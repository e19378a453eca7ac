"""Which checkpoints stay: one rule for the trainer and for `checkpoints prune`."""

import math
import random

import pytest

from trainyard.errors import InputError
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec
from trainyard.spec.retention import BestSpec, Retention, flat_metrics

SAVED = {10: 3.0, 20: 1.0, 25: None, 30: 1.0, 40: math.nan, 50: 2.0}


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (Retention(1), {50}),
        (Retention(2), {40, 50}),
        (Retention(9), set(SAVED)),
        (Retention(1, keep_every_steps=20), {20, 40, 50}),
        (Retention(1, keep_best=BestSpec()), {20, 50}),
        (Retention(1, keep_best=BestSpec(num=2)), {20, 30, 50}),
        (Retention(1, keep_best=BestSpec(mode="max")), {10, 50}),
        (Retention(1, keep_best=BestSpec(num=9)), {10, 20, 30, 50}),
        (Retention(1, 25, BestSpec()), {20, 25, 50}),
    ],
)
def test_the_union_of_the_rules_stays(rules: Retention, kept: set[int]) -> None:
    assert rules.kept(SAVED) == kept


def test_values_over_other_samples_say_nothing_of_each_other() -> None:
    rules, values = Retention(1, keep_best=BestSpec()), {1: 0.1, 2: 0.2, 3: 0.9, 4: 0.8, 5: 0.7, 6: 0.95}
    samples: dict[int, str | None] = {1: "few", 2: "few", 3: "many", 4: "many", 5: "many", 6: "many"}
    assert rules.kept(values, samples) == {1, 5, 6}
    assert rules.kept(values, samples | {5: None}) == {1, 5, 6}, "5 may be of those of 4, and is better"
    assert rules.kept(values, dict.fromkeys(values)) == rules.kept(values) == {1, 6}


@pytest.mark.parametrize("at", range(1, 6))
def test_what_is_no_number_takes_no_place_of_the_best(at: int) -> None:
    """Wherever it stands: a sort has no order with it, and ended with it first."""
    saved = dict(enumerate([0.9, 0.5, 0.8, 0.7, 0.6], start=1)) | {at: math.nan}
    best = sorted((value, step) for step, value in saved.items() if step != at)
    for num in (1, 2, 3):
        assert Retention(1, keep_best=BestSpec(num=num)).kept(saved) == {5, *(step for _, step in best[:num])}


def test_the_newest_always_stays_and_what_went_is_never_missed() -> None:
    """Removing after each save keeps what removing once at the end would."""
    numbers = random.Random(0)
    for _ in range(200):
        rules = Retention(numbers.randint(1, 3), numbers.choice([None, 3]), numbers.choice([None, BestSpec(num=2)]))
        saved: dict[int, float | None] = {step: numbers.choice([None, numbers.random()]) for step in range(1, 20)}
        left: dict[int, float | None] = {}
        for step, value in saved.items():
            left[step] = value
            kept = rules.kept(left)
            assert step in kept
            left = {one: left[one] for one in kept}
        assert set(left) == rules.kept(saved)


def test_values_come_from_what_was_saved() -> None:
    row = {"loss": 2.0, "validation_loss": None, "validation_sets": {"code": {"loss": 1.5, "perplexity": math.inf}}}
    assert flat_metrics(row) == {"loss": 2.0, "validation_sets.code.loss": 1.5}
    rules = Retention(1, keep_best=BestSpec(metric="validation_sets.code.loss"))
    assert rules.value_of({"metrics": flat_metrics(row)}) == 1.5
    assert rules.samples_of({"validated_on": {"": "4 of a", "code": "8 of b"}}) == "8 of b"
    assert Retention(1, keep_best=BestSpec(metric="loss")).samples_of({"validated_on": {"": "4 of a"}}) is None
    assert rules.samples_of({}) is None and rules.samples_of({"validated_on": ["odd"]}) is None
    assert rules.value_of({}) is None and Retention(1).value_of({"metrics": {"loss": 1}}) is None


def test_a_metric_that_nothing_measures_is_refused() -> None:
    job = {
        "name": "a",
        "model": {"config": {"model_type": "llama"}},
        "data": {"train": [{"path": "x.txt", "format": "text"}], "tokenizer": "t", "sequence_length": 8},
        "training": {"steps": 1, "global_batch_size": 1, "learning_rate": 0.1},
    }
    for metric, told in (
        ("validation_loss", "needs a source without a name in data.validation"),
        ("validation_sets.code.loss", "needs a source named code in data.validation"),
        ("accuracy", r"keep_best\.metric: must be loss, validation_loss or .* has them \(given: 'accuracy'\)$"),
    ):
        with pytest.raises(InputError, match=told):
            parse(JobSpec, {**job, "checkpoint": {"keep_best": {"metric": metric}}}, "job.yaml")
