"""The parity campaign itself: what its seeds stand for, a few of them played, and that what is wrong is found.

The long part is `scripts/parity_campaign`; docs/trainer.md says what it has found.
"""

import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from trainer_testing import seeds, spoiled_worker, strategy_worker
from trainer_testing.bucket import BUCKET
from trainer_testing.families import FAMILIES

from parity import campaign
from parity.campaign import Played, play, table
from parity.draws import CHUNKS, OPTIMIZERS, Drawn, Layout, draw
from parity.others import draw_other, is_of_others
from parity.pictures import draw_pictures, is_of_pictures, whole_pictures
from parity.whole_jobs import (
    SPIKE,
    WholeJob,
    data_in_place,
    odds,
    other_bits,
    was_gone_on_with,
    whole_job,
    worst_difference,
    worst_tensor,
)

SEEDS = range(1, 151)


@pytest.fixture(scope="module")
def drawn() -> list[Drawn]:
    return [draw(seed) for seed in SEEDS]


def test_a_seed_is_always_the_same_job() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_seeds_are_of_everything(drawn: list[Drawn]) -> None:
    layouts = [layout for one in drawn for layout in (one.first, one.second)]
    for axis in ("data_replicate", "data_shard", "tensor", "pipeline", "context", "expert"):
        assert any(getattr(layout.spec, axis) > 1 for layout in layouts), axis
    assert {layout.spec.zero_stage for layout in layouts if layout.spec.engine == "deepspeed"} == {0, 1, 2, 3}
    assert {layout.recompute for layout in layouts} == {"none", "selective", "full"}
    assert {layout.spec.world_size for layout in layouts} == {1, 2, 3, 4, 6, 8}
    cut = [layout.spec.pipeline_schedule for layout in layouts if layout.spec.pipeline > 1]
    assert set(cut) == {"gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"}
    assert {one.training["optimizer"]["kind"] for one in drawn} == set(OPTIMIZERS)
    assert {one.adapter["kind"] if one.adapter else None for one in drawn} == {None, "lora", "qlora"}
    assert {one.precision for one in drawn} == {"fp64", "fp32", "bf16", "fp16"}
    assert {one.is_packed for one in drawn} == {True, False}
    assert len({one.family for one in drawn}) > 20
    assert any(one.first.spec != one.second.spec for one in drawn)
    assert {layout.chunk_tokens for layout in layouts} == set(CHUNKS)
    assert {one.attention for one in drawn} == {"auto", "eager"}
    bases = [one.base for one in drawn if one.base is not None]
    assert len({(base.dtype, base.max_shard_size) for base in bases}) == 4
    assert any(one.base is not None and one.adapter is None for one in drawn)
    assert any(one.is_noisy for one in drawn) and any(one.growth_steps for one in drawn)
    assert any(one.adapter and "lm_head" in one.adapter["targets"] for one in drawn)
    narrow = [one for one in drawn if one.is_narrow]
    assert narrow and {(one.precision, one.training["sequence_length"]) for one in narrow} == {("bf16", 24)}


def test_compiled_blocks_are_drawn_under_every_axis(drawn: list[Drawn]) -> None:
    compiled = [layout for one in drawn for layout in (one.first, one.second) if layout.is_compiled]
    for axis in ("data_replicate", "data_shard", "tensor", "pipeline", "context"):
        assert any(getattr(layout.spec, axis) > 1 for layout in compiled), axis
    one = next(one for one in drawn if one.first.is_compiled)
    request = one.ranks(one.first, Path(), Path())
    assert request.job["compile"] and request.constants["trainer.strategies.compiled.BACKEND"] == "aot_eager"
    assert not one.alone(Path(), Path()).job["compile"]


def test_a_loss_of_several_chunks_is_drawn_under_every_kind_of_layout(drawn: list[Drawn]) -> None:
    kinds = Counter[str]()
    for one in drawn:
        for layout in (one.first, one.second):
            positions = layout.micro_batch_size * 24 // layout.spec.context
            if layout.loss != "logits" and layout.chunk_tokens is not None and positions > layout.chunk_tokens:
                kinds[re.split(r"\d", layout.strategy)[0]] += 1
                assert one.ranks(layout, Path(), Path()).constants["trainer.losses.linear.CHUNK_TOKENS"] < positions
    assert {"single", "ddp", "fsdp", "hsdp", "zero", "tensor", "pipeline", "context"} <= set(kinds)


def test_where_the_loss_hangs_on_micro_batches_all_layouts_have_the_same(drawn: list[Drawn]) -> None:
    balanced = [one for one in drawn if one.model.get("output_router_logits")]
    assert balanced
    for one in balanced:
        layouts = (one.whole_batch, one.parts, one.first, one.second)
        assert {layout.micro_batch_size for layout in layouts} == {one.micro_batch_size}


def test_what_is_not_compared_is_what_is_rounded_or_noisy(drawn: list[Drawn]) -> None:
    for one in drawn:
        rounded = one.precision in ("bf16", "fp16") or one.training["optimizer"]["kind"] == "adamw_8bit"
        assert one.is_exact == (not rounded and not one.is_noisy)
        assert (one.proof == "bits") == (not one.is_exact)
        assert one.proof in ("bits", one.precision) or one.model["model_type"].startswith("deepseek")
    assert Counter(one.is_exact for one in drawn)[True] > 60


def test_families_that_no_table_names_have_every_layout_too() -> None:
    found = [draw_other(seed) for seed in (*range(1, 31), 88)]  # HSDP is one in sixty
    kinds = {re.split(r"\d", layout.strategy)[0] for one in found for layout in (one.first, one.second)}
    assert {"single", "ddp", "fsdp", "hsdp", "zero", "tensor", "pipeline", "context", "expert"} == kinds
    assert len({one.family for one in found}) > 15 and not {one.family for one in found} & set(FAMILIES)
    assert 0 < sum(is_of_others(seed) for seed in SEEDS) < len(SEEDS) / 4


def test_what_is_refused_is_told_with_its_reason(drawn: list[Drawn]) -> None:
    refused: Counter[str] = Counter()
    for one in drawn:
        refused.update(one.refused)
    assert any(reason.startswith("parallelism.tensor: N does not divide the model's num_key") for reason in refused)
    assert not any("\n" in reason for reason in refused)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [60, 63])
def test_a_seed_equals_one_process_and_goes_on_in_another_layout(seed: int, tmp_path: Path) -> None:
    told = play(draw(seed), tmp_path)
    assert told.problems == []
    assert all(error < 1e-11 for name, error in told.errors.items() if name.endswith(("numbers", "whole")))
    assert len(told.errors) == 10


@pytest.fixture
def ddp(tmp_path: Path) -> Drawn:
    """A small job under data parallelism, then in one process."""
    training: dict[str, Any] = {
        "optimizer": {"kind": "adamw"},
        "precision": "fp64",
        "global_batch_size": 8,
        "learning_rate": 3e-3,
        "sequence_length": 24,
    }
    model = FAMILIES["Qwen2"]
    two = Layout({"data_replicate": 2}, 2, "none")
    return Drawn(0, "Qwen2", model, None, training, False, 3, two, Layout({"data_shard": 2}, 4, "none"))


MIXTURE = FAMILIES["Mixtral"] | {"output_router_logits": True, "router_aux_loss_coef": 0.5}
TWO = Layout({"data_replicate": 2}, 2, "none", "chunked", chunk_tokens=16)


@pytest.mark.parametrize(
    ("spoil", "changes", "said"),
    [
        ("drop the last chunk", {"first": TWO}, "first: numbers are"),
        pytest.param(
            "balance the first rank alone",
            {"model": MIXTURE, "micro_batch_size": 2},
            "first: numbers are",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "forget the loss scale",
            {"training": {"precision": "fp16"}, "growth_steps": 1},
            "resumed at its own layout, engine is",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "forget random numbers",
            {"model": {"attention_dropout": 0.1}, "is_noisy": True},
            "resumed at its own layout, loss is",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_wrong_edit_is_found(
    spoil: str, changes: dict[str, Any], said: str, ddp: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing without it."""
    whole = {name: getattr(ddp, name) | changes.get(name, {}) for name in ("model", "training")}
    drawn = replace(ddp, **(changes | whole), second=replace(ddp.second, micro_batch_size=2))
    monkeypatch.setattr(campaign, "run_whole", lambda *_: ({"own": 0.0, "job": 0.0, "export": 0.0}, []))
    for name in ("good", "spoiled"):
        (tmp_path / name).mkdir()
    assert play(drawn, tmp_path / "good").problems == []
    monkeypatch.setenv(spoiled_worker.VARIABLE, spoil)
    monkeypatch.setattr(campaign, "run", partial(strategy_worker.run, worker="trainer_testing.spoiled_worker"))
    told = play(drawn, tmp_path / "spoiled")
    assert any(problem.startswith(said) for problem in told.problems), told.problems


@pytest.mark.parametrize(
    ("number", "key", "said"),
    [
        (1, "loss", "first: numbers are"),
        (1, "weights_error", "first: weights are"),
        (2, "grad_norm", "resumed at its own layout, grad_norm is"),
        (3, "validation", "second: numbers are"),
        (2, "weights_error", "resumed at its own layout, its weights are off"),
        (3, "weights_error", "second: weights are"),
    ],
)
def test_what_is_off_is_found(
    number: int, key: str, said: str, ddp: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run by run, with one of its figures moved by a little more than is allowed."""
    real: list[Any] = []

    def spoiled(*arguments: Any) -> list[strategy_worker.Result]:
        results = _recorded(*arguments)
        if len(real) == number + 1:
            value = results[0][key]
            results[0][key] = 2e-7 if key == "weights_error" else [*value[:-1], value[-1] * (1 + 2e-7)]
        return results

    def _recorded(*arguments: Any) -> list[strategy_worker.Result]:
        real.append(arguments)
        return _results(len(real) - 1, ddp.saved_at)

    monkeypatch.setattr(campaign, "run", spoiled)
    monkeypatch.setattr(campaign, "run_whole", lambda *_: ({"own": 0.0, "job": 0.0, "export": 0.0}, []))
    told = play(ddp, tmp_path)
    assert len(real) == 4, "one process, the first layout, its resume, the second layout"
    assert told.problems[0].startswith(said)
    assert len(told.problems) == (2 if number == 1 else 1), "its own resume is off a spoiled run, too"


def _results(number: int, saved_at: int) -> list[strategy_worker.Result]:
    """What each of a seed's four runs gives, where all is well."""
    begin = saved_at if number > 1 else 0
    losses, norms = ([start - 0.1 * step for step in range(6)][begin:] for start in (4.0, 2.0))
    whole = {"loss": losses, "grad_norm": norms, "validation": [3.25], "applied": [True] * len(losses), "engine": {}}
    result = whole | {"weights_error": 1e-15}
    return [whole, result] if number == 0 else [result]


ROW = {"step": 1, "tokens": 48, "loss": 4.0, "grad_norm": 2.0, "learning_rate": 1e-3, "seconds": 0.1, "attempt": 1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": 47}, "tokens: [47, 48], one process [48, 48]"),
        ({"step": 2}, "step: [2, 2], one process [1, 2]"),
        ({"validation_loss": 1.0}, "figures: "),
        ({"validation_sets": {"more": {"loss": 1.0}}}, "figures: "),
        ({"skipped": True}, "figures: "),
        ({"seconds": 5.0, "attempt": 2}, None),
    ],
)
def test_a_whole_jobs_steps_and_tokens_are_exactly_those_of_one_process(
    changes: dict[str, Any], said: str | None
) -> None:
    wanted = [ROW, ROW | {"step": 2}]
    found = odds([ROW | changes, ROW | {"step": 2}], wanted)
    assert [line for line in found if said is None or not line.startswith(f"whole job: {said}")] == []
    assert (said is not None) == bool(found)


@pytest.mark.parametrize(
    ("attempts", "is_so"), [((1, 1, 2), True), ((1, 1), False), ((2, 2), False), ((1, 2, 1), False), ((1, 2, 3), False)]
)
def test_a_job_that_began_anew_was_not_gone_on_with(attempts: tuple[int, ...], is_so: bool) -> None:
    rows = [ROW | {"attempt": attempt} for attempt in attempts]
    assert was_gone_on_with(rows) == is_so
    assert was_gone_on_with(rows, 3) == (attempts == (1, 2, 3))


@pytest.mark.parametrize("is_spike", [True, False])
def test_what_goes_wrong_in_a_batch_is_alike_under_every_layout(is_spike: bool, ddp: Drawn) -> None:
    """A spike on all ranks is so many times the loss of one process; no number on one rank is none of all."""
    job = WholeJob(ddp, {}, "stop", 3, (), {}, is_spike=is_spike)
    four, one = Layout({"data_replicate": 4}, 1, "none"), Layout({}, 1, "none")
    assert len(job.ends(four)) == (4 if is_spike else 1) and len(job.ends(one)) == 1
    assert {(fault["first_sequence"], fault.get("factor")) for fault in job.ends(four)} == {
        (2 * 8, SPIKE if is_spike else None)
    }


def test_no_number_is_on_a_rank_that_tells_its_loss(ddp: Drawn) -> None:
    """The first of its tensor group: another's would reach the gradients alone, which fp16 takes for an overflow."""
    job = WholeJob(replace(ddp, seed=7), {}, "stop", 3, (), {})
    layout = Layout({"data_shard": 2, "tensor": 2}, 1, "none")
    assert [fault["rank"] for fault in job.ends(layout)] == [2]


def test_data_are_in_the_bucket_while_a_job_is_played(ddp: Drawn, tmp_path: Path) -> None:
    (tmp_path / "text" / "below").mkdir(parents=True)
    (tmp_path / "text" / "below" / "a.txt").write_text("a text")
    (tmp_path / "ids.npy").write_bytes(b"ids")
    sources = [{"path": str(tmp_path / "text"), "format": "text"}, {"path": f"{tmp_path}/ids.npy", "format": "tokens"}]
    job = WholeJob(ddp, {"data": {"train": sources, "validation": sources[1:]}}, "kill", 3, (), {}, is_streamed=True)
    with data_in_place(job, tmp_path) as placed:
        paths = [[source["path"] for source in placed.content["data"][part]] for part in ("train", "validation")]
        listed = boto3.client("s3").list_objects_v2(Bucket=BUCKET, Prefix="0/")
    assert paths == [["s3://acme-data/0/train-0", sources[1]["path"]], [sources[1]["path"]]], "tokens alone, or none"
    assert {each["Key"] for each in listed["Contents"]} == {"0/train-0/below/a.txt"}
    assert sources[0]["path"] == str(tmp_path / "text")


@pytest.mark.parametrize(
    ("error", "own", "is_good"),
    [(9e-8, 0.0, True), (2e-7, 0.0, False), (2e-7, 1e-8, True), (4e-7, 1e-8, False), (2e-5, 1e-3, False)],
)
@pytest.mark.parametrize("what", ["job", "export"])
def test_a_whole_job_may_be_as_far_off_as_roundings_take_it(
    what: str, error: float, own: float, is_good: bool, ddp: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty times what one process differs from itself, and never more than 1e-5; of its weights thirty times that."""
    calls: list[Any] = []

    def recorded(*arguments: Any) -> list[strategy_worker.Result]:
        calls.append(arguments)
        return _results(len(calls) - 1, ddp.saved_at)

    own /= campaign.EXPORTED if what == "export" else 1.0
    monkeypatch.setattr(campaign, "run", recorded)
    monkeypatch.setattr(campaign, "run_whole", lambda *_: ({"own": own, "job": 0.0, "export": 0.0} | {what: error}, []))
    assert (play(ddp, tmp_path).problems == []) == is_good


def test_what_does_not_learn_proves_nothing(ddp: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    still: dict[str, Any] = {"loss": [4.0] * 6, "grad_norm": [2.0] * 6, "applied": [True] * 6}
    resumed = {name: value[ddp.saved_at :] for name, value in still.items()}
    still, resumed = (one | {"validation": [3.0], "weights_error": 0.0, "engine": {}} for one in (still, resumed))
    runs = iter([[still, still], [still], [resumed], [resumed]])
    monkeypatch.setattr(campaign, "run", lambda *_: next(runs))
    monkeypatch.setattr(campaign, "run_whole", lambda *_: ({"own": 0.0, "job": 0.0, "export": 0.0}, []))
    (problem,) = play(ddp, tmp_path).problems
    assert problem.startswith("one process: what doesn't learn proves nothing")


def test_one_process_rounds_as_three_ranks_do_where_its_loss_is_in_their_scale(ddp: Drawn, tmp_path: Path) -> None:
    """In fp64, by norms that round to fp32: what they differ by from the whole batch is the same."""
    job = replace(ddp, training=ddp.training | {"global_batch_size": 12})
    three, parts = Layout({"data_replicate": 3}, 1, "none"), job.parts
    weights = tmp_path / "weights.pt"
    (_, scaled) = strategy_worker.run(
        1, [job.alone(tmp_path, weights), job.ranks(parts, tmp_path, weights, loss_scale=campaign.OTHER_SCALE)]
    )
    (ranks,) = strategy_worker.run(3, [job.ranks(three, tmp_path, weights)])
    assert scaled["weights_error"] == pytest.approx(ranks["weights_error"], rel=1e-3) and ranks["weights_error"] > 1e-12
    assert campaign._scale(job) == 1.0
    assert campaign._scale(replace(job, second=three)) == campaign.OTHER_SCALE


def test_where_no_step_is_made_nothing_is_proved(ddp: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([_results(number, ddp.saved_at) for number in range(4)])

    def skipping(*_: Any) -> list[strategy_worker.Result]:
        return [result | {"applied": [False] * len(result["loss"])} for result in next(runs)]

    monkeypatch.setattr(campaign, "run", skipping)
    monkeypatch.setattr(campaign, "run_whole", lambda *_: ({"own": 0.0, "job": 0.0, "export": 0.0}, []))
    assert play(ddp, tmp_path).problems == ["first: no step was made, of which nothing is proved"]


def test_what_is_no_number_is_worst_of_all() -> None:
    spoiled = [ROW | {"loss": math.nan}]
    assert worst_difference(spoiled, [ROW]) == math.inf
    assert worst_tensor({"w": torch.ones(2)}, {"w": torch.full((2,), math.nan)}) == math.inf
    assert worst_tensor({"w": torch.ones(2)}, {"w": torch.tensor([1.0, 1.5])}) == pytest.approx(0.5 / 2**0.5)
    for name in ("encoder.attention.key.bias", "vision_tower.layers.0.self_attn.k_proj.bias"):
        assert worst_tensor({name: torch.ones(2)}, {name: torch.zeros(2)}) == 0.0, "no gradient reaches it"
    assert worst_tensor({"model.k_proj.bias": torch.ones(2)}, {"model.k_proj.bias": torch.zeros(2)}) == 1.0
    figures = {"loss": [4.0, math.nan], "grad_norm": [1.0, 1.0], "validation": [2.0]}
    assert strategy_worker.worst_relative_error(figures, figures | {"loss": [4.0, 3.0]}) == math.inf


def test_the_worst_figure_of_a_whole_job_is_found() -> None:
    wanted = [ROW | {"validation_sets": {"more": {"loss": 2.0}}}, ROW]
    rows = [ROW | {"validation_sets": {"more": {"loss": 2.5}}}, ROW | {"grad_norm": 2.2}]
    assert worst_difference(rows, wanted) == 0.25
    assert worst_difference(rows[1:], wanted[1:]) == pytest.approx(0.1)
    assert worst_difference(wanted, wanted) == 0.0


def test_a_whole_job_that_is_not_compared_goes_on_bit_for_bit() -> None:
    assert other_bits([ROW], [dict(ROW)], 0.0) == []
    (found,) = other_bits([ROW], [ROW | {"loss": math.nextafter(4.0, 5.0)}], 0.0)
    assert found.startswith("whole job: resumed at its own layout, figures are 2.2e-16 off")
    (found,) = other_bits([ROW], [ROW], 1e-16)
    assert found.startswith("whole job: resumed at its own layout, its export is 1.0e-16 off")


def test_whole_jobs_are_of_every_kind(drawn: list[Drawn], tmp_path: Path) -> None:
    jobs = []
    for one in drawn:
        (tmp_path / str(one.seed)).mkdir()
        jobs.append(whole_job(one, tmp_path / str(one.seed), tmp_path / "base"))
    contents = [job.content for job in jobs]
    sources = [source for content in contents for source in content["data"]["train"]]
    assert {source["format"] for source in sources} == {"text", "jsonl", "parquet", "tokens"}
    assert {"prompt_field", "messages_field", "text_field"} <= {name for source in sources for name in source}
    assert {content["data"]["packing"] for content in contents} == {True, False}
    assert {content["data"]["document_masks"] for content in contents} == {True, False}
    assert {len(content["data"]["validation"]) for content in contents} == {0, 1, 2}
    assert any("max_bad_records" in content["data"] for content in contents)
    paths = [source["path"] for source in sources]
    assert {".gz", ".npy", ".bin", ".parquet", ".jsonl", ""} == {Path(path).suffix for path in paths}
    assert {"tokenizer", "chat_template"} <= {name for content in contents for name in content["data"]}
    lengths = {name for content in contents for name in ("steps", "tokens", "epochs") if name in content["training"]}
    assert lengths == {"steps", "tokens", "epochs"}
    poisoned = {content["training"].get("on_anomaly") for content in contents}
    assert poisoned == {None, "skip", "rollback"}
    assert {job.poisoned is None for job in jobs} == {True, False}
    assert {job.end for job in jobs} == {"terminate", "kill", "stop"}
    assert {job.is_spike for job in jobs if job.end == "stop"} == {True, False}
    assert {job.is_spike for job in jobs if job.poisoned is not None} == {True, False}
    assert {len(job.starts()) for job in jobs} == {2, 3}
    assert {(job.is_streamed, job.is_saved_there) for job in jobs} == {(False, False), (True, False), (True, True)}
    assert len({content["training"]["schedule"].get("decay_fraction") for content in contents}) == 4
    saves = {name for content in contents for name in content["checkpoint"]}
    assert {"keep_best", "keep_every_steps", "local_directory", "destination"} <= saves


def test_some_seeds_have_pictures_of_every_kind(tmp_path: Path) -> None:
    numbers = [seed for seed in range(1, 400) if is_of_pictures(seed)]
    assert 0.1 < len(numbers) / 400 < 0.2
    pictures = [draw_pictures(seed) for seed in numbers]
    assert {one.precision for one in pictures} == {"fp64", "fp32", "bf16"}
    assert {one.training["optimizer"]["kind"] for one in pictures} == {"adamw", "sgd"}
    assert {"single", "ddp", "fsdp", "hsdp", "zero0", "zero1", "zero2", "zero3"} == {
        layout.strategy for one in pictures for layout in (one.first, one.second)
    }
    for one in pictures:
        for layout in (one.first, one.second):
            together = layout.micro_batch_size * layout.spec.data_parallel_size
            assert one.micro_batch_size in (None, together) and one.training["global_batch_size"] % together == 0
    jobs = []
    for one in pictures[:30]:
        (tmp_path / str(one.seed)).mkdir()
        jobs.append(whole_pictures(one, tmp_path / str(one.seed)).content)
    assert {content["task"] for content in jobs} == {"image_classification", "vision_language"}
    assert {content["images"].get("freeze_vision") for content in jobs} == {None, True, False}
    assert {"source", "config", "adapter"} == {name for content in jobs for name in content["model"]}


@pytest.mark.slow
def test_a_seed_with_pictures_equals_one_process() -> None:
    number = next(seed for seed in range(1, 99) if is_of_pictures(seed) and draw_pictures(seed).precision == "fp64")
    told = campaign.play_seed(number)
    assert told.problems == []
    assert told.errors["whole job whole"] < 1e-12


def test_a_run_that_fails_is_a_problem_and_the_next_seed_is_played(ddp: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> list[strategy_worker.Result]:
        raise AssertionError("rank 1 exited 1: out of tune")

    monkeypatch.setattr(campaign, "run", failing)
    monkeypatch.setattr(campaign, "draw", lambda seed: replace(ddp, seed=seed))
    monkeypatch.setattr(campaign, "is_of_pictures", lambda _: False)
    monkeypatch.setattr(campaign, "is_of_others", lambda _: False)
    said: list[Played] = []
    played = seeds.campaign([1, 2], campaign.play_seed, minutes=None, say=said.append)
    assert [row.problems for row in played] == [["rank 1 exited 1: out of tune"]] * 2
    assert said == played


def test_results_are_kept_and_told(tmp_path: Path) -> None:
    rows = [
        Played(1, "fp64", "Llama: {}", "ddp: {}", "fsdp: {}", 3, {"first numbers": 1e-12}, refused={"tensor: N": 2}),
        Played(
            2, "fp32", "Llama: {}", "ddp: {}", "fsdp: {}", 3, problems=["rank 0 exited 1"], refused={"tensor: N": 1}
        ),
    ]
    seeds.write(tmp_path / "results.json", rows)
    assert seeds.read(tmp_path / "results.json", Played) == rows
    said = table(rows)
    assert said.startswith("1 of 2 jobs")
    assert "refused 3: tensor: N" in said
    assert "PROBLEM seed 2: rank 0 exited 1" in said
    assert seeds.read(tmp_path / "none.json", Played) == []
