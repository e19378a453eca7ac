"""A plan up to a loss: steps read off a curve, dollars those of so many steps, no guess beyond the curve's end."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from trainyard.errors import InputError
from trainyard.hardware import PriceBook
from trainyard.planner import plan, resolve
from trainyard.planner.target import until_loss
from trainyard.spec.job import JobSpec, load_job

JOBS = Path(__file__).resolve().parents[2] / "jobs"
CURVE = "tokens,loss\n1e9,4.0\n1e10,3.0\n1e11,2.5\n"


@pytest.fixture(name="curve")
def a_curve(tmp_path: Path) -> Path:
    file = tmp_path / "curve.csv"
    file.write_text(CURVE)
    return file


@pytest.mark.parametrize(("target", "tokens"), [(4.0, 1e9), (3.0, 1e10), (3.5, math.sqrt(1e9 * 1e10)), (2.5, 1e11)])
def test_steps_are_read_off_the_curve(job: Callable[..., JobSpec], curve: Path, target: float, tokens: float) -> None:
    moved, note = until_loss(job(), curve, target)
    assert moved.training.steps == math.ceil(tokens / (512 * 4096) * (1 - 1e-12))
    assert f"to a loss of {target:g}" in note and f"{moved.training.steps:,} steps" in note


def test_a_point_of_noise_decides_nothing(job: Callable[..., JobSpec], curve: Path) -> None:
    """The loss has come to the target where it stays: not at a lucky point before, nor at a plateau's end."""
    curve.write_text("samples,loss\n100,4.0\n200,2.9\n1000,3.5\n4000,3.0\n8000,3.0\n9000,2.8\n")
    assert "4,000 samples" in until_loss(job(), curve, 3.0)[1]
    curve.write_text("samples,loss\n100,4.0\n200,2.9\n1000,3.5\n")
    with pytest.raises(InputError, match=r"ends at 3\.5"):
        until_loss(job(), curve, 3.0)


def test_a_spreadsheets_byte_order_mark_is_no_part_of_the_header(job: Callable[..., JobSpec], curve: Path) -> None:
    curve.write_text(CURVE, encoding="utf-8-sig")
    assert "1e+10 tokens" in until_loss(job(), curve, 3.0)[1]


def test_a_lower_loss_costs_what_its_steps_cost(job: Callable[..., JobSpec], curve: Path) -> None:
    costs = [plan(until_loss(job(), curve, loss)[0], book=PriceBook.opened(today=None)).cost for loss in (3.0, 2.5)]
    assert costs[0] is not None and costs[1] is not None
    assert costs[0].usd_on_demand and costs[1].usd_on_demand
    assert costs[1].usd_on_demand / costs[0].usd_on_demand == pytest.approx(10, rel=0.02)


@pytest.mark.parametrize("num_instances", [16, 8])
def test_an_adapted_batch_reads_what_the_curve_says(
    job: Callable[..., JobSpec], curve: Path, num_instances: int
) -> None:
    """Half the batch on half the instances is twice the steps, and not a token more."""
    elastic = {"min_instances": 8, "max_instances": 16, "batch": "adapt"}
    moved, note = until_loss(
        job(tenant="acme", compute={"instance_count": num_instances}, recovery={"elastic": elastic}), curve, 2.5
    )
    steps = resolve(moved).steps
    assert steps is not None and moved.global_batch_size == 512 * num_instances // 16
    assert 1e11 <= steps * moved.global_batch_size * 4096 < 1e11 + 512 * 4096
    assert f"{steps:,} steps" in note


def test_images_have_samples_and_no_tokens(curve: Path) -> None:
    job = load_job(JOBS / "resnet50-imagenet.yaml")
    with pytest.raises(InputError, match="counts tokens, and this job reads images; give samples,loss"):
        until_loss(job, curve, 3.0)
    curve.write_text(CURVE.replace("tokens", "samples"))
    assert until_loss(job, curve, 3.0)[0].training.steps == math.ceil(1e10 / job.training.global_batch_size)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (4.5, "--target-loss 4.5: .* begins at 4, and nothing is known of what came before; give 4 or less"),
        (math.nan, r"--target-loss: must be a finite number above 0 \(given: nan\)"),
        (math.inf, r"--target-loss: must be a finite number above 0 \(given: inf\)"),
        (-math.inf, "--target-loss: must be a finite number above 0"),
        (0.0, r"--target-loss: must be a finite number above 0 \(given: 0\)"),
        (-1.0, r"--target-loss: must be a finite number above 0 \(given: -1\)"),
    ],
)
def test_a_target_that_no_curve_can_answer_is_one_line(
    job: Callable[..., JobSpec], curve: Path, target: float, words: str
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        until_loss(job(), curve, target)
    assert "\n" not in str(caught.value)


def test_a_curve_that_can_not_be_read_is_told_in_words(job: Callable[..., JobSpec], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--loss-curve \S+: can't be read \(Is a directory\)$"):
        until_loss(job(), tmp_path, 2.0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (CURVE, "--target-loss 2: .* ends at 2.5, and beyond it nothing is known"),
        ("step,loss\n1,2\n", "must begin with a line tokens,loss or samples,loss"),
        ("tokens,loss\n", "has no points"),
        ("tokens,loss\n1e9,much\n", "line 2: must be two numbers"),
        ("tokens,loss\n1e9," + "9" * 200_000 + "\n", r"can't be read \(field larger than field limit"),
        ("tokens,loss\n2,4\n1,3\n", "line 3: tokens must be above 0 and grow"),
        ("tokens,loss\n1,4\n2,-3\n", r"line 3: loss must be a finite number above 0 \(given: -3\)"),
        ("tokens,loss\n1,nan\n", "line 2: loss must be a finite number above 0"),
    ],
)
def test_what_a_curve_can_not_tell_is_one_line(
    job: Callable[..., JobSpec], tmp_path: Path, content: str, words: str
) -> None:
    file = tmp_path / "curve.csv"
    file.write_text(content)
    with pytest.raises(InputError, match=words) as caught:
        until_loss(job(), file, 2.0)
    assert "\n" not in str(caught.value)
