"""What engines do besides plain fp32: lower precision and recomputation; and what is refused up front."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer.models.build import build_model, outline_model, transformer_blocks
from trainer.runtime import distributed_runtime
from trainer.strategies import build_strategy, check_supported
from trainer_testing.strategy_worker import Result, RunRequest, no_clock, run, worst_relative_error
from trainer_testing.tiny import GLOBAL_BATCH, MODEL, VOCAB_SIZE, global_targets, rank_batches, tiny_job

from trainyard.errors import InputError
from trainyard.planner.reading import required_shape
from trainyard.spec.job import JobSpec, ParallelismSpec, ResolvedJob
from trainyard.spec.support import ModelFacts, pipeline_obstacle

STEPS = 6
HALF = 4

UNCHANGED = [
    *((name, {"activation_checkpointing": mode}) for mode in ("full", "selective") for name in ("fsdp", "zero3")),
    ("ddp", {"activation_checkpointing": "selective"}),
    ("zero2", {"activation_checkpointing": "full"}),
]
"""Strategy and setting that must not change a number."""

LOW_PRECISION = [
    *((name, "bf16") for name in ("ddp", "fsdp", "zero0", "zero1", "zero2", "zero3")),
    ("ddp", "fp16"),
    ("fsdp", "fp16"),
]


@pytest.fixture(scope="module")
def one_rank() -> Result:
    """The plain tiny job."""
    (result,) = run(1, [RunRequest(strategy="single", last_step=STEPS)])
    return result


def saved_at(folder: Path, name: str, precision: str) -> str:
    return str(folder / f"{name}-{precision}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("low_precision")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> dict[tuple[str, str], Result]:
    """All cases on two ranks, in one launch."""
    cases: dict[tuple[str, str], RunRequest] = {}
    for name, changes in UNCHANGED:
        cases[name, str(changes)] = RunRequest(strategy=name, last_step=STEPS, job=changes)
    for name, precision in LOW_PRECISION:
        path = saved_at(folder, name, precision)
        job = {"precision": precision}
        cases[name, precision] = RunRequest(name, last_step=STEPS, save=path, save_after_step=HALF, job=job)
    return dict(zip(cases, run(2, list(cases.values())), strict=True))


def test_recomputation_changes_no_number(one_rank: Result, two_ranks: dict[tuple[str, str], Result]) -> None:
    for name, changes in UNCHANGED:
        error = worst_relative_error(two_ranks[name, str(changes)], one_rank)
        assert error < 1e-5, (name, changes)


def test_bf16_and_fp16_follow_fp32_and_resume_bit_for_bit(
    one_rank: Result, two_ranks: dict[tuple[str, str], Result], folder: Path
) -> None:
    """On CPU alone: the types' arithmetic is the same on a GPU, the speed is not."""
    requests = [
        RunRequest(name, HALF + 1, STEPS, load=saved_at(folder, name, precision), job={"precision": precision})
        for name, precision in LOW_PRECISION
    ]
    for case, resumed in zip(LOW_PRECISION, run(2, requests), strict=True):
        whole = two_ranks[case]
        assert all(whole["applied"]), case
        assert 0 < worst_relative_error(whole, one_rank) < 0.02, case
        assert [value.hex() for value in resumed["loss"]] == [value.hex() for value in whole["loss"][HALF:]], case


def test_an_fp16_step_that_overflows_is_skipped_and_changes_no_weight() -> None:
    job = tiny_job("single", 1, precision="fp16")
    with distributed_runtime(cpu_threads=1) as runtime:
        strategy = build_strategy(job, model=build_model(job, vocab_size=VOCAB_SIZE), runtime=runtime)
        strategy.load_engine_state({"loss_scaler": {"scale": 2.0**40, "num_good_steps": 5}})
        before = {name: tensor.clone() for name, tensor in strategy.state_tensors().items()}
        strategy.forward_backward(rank_batches(job, 1, 0), global_targets(1), no_clock)
        update = strategy.optimizer_step(1e-3)
        assert not update.was_applied
        assert math.isinf(update.grad_norm)
        after = strategy.state_tensors()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert strategy.engine_state() == {"loss_scaler": {"scale": 2.0**39, "num_good_steps": 0}}


def test_the_split_into_micro_batches_changes_nothing() -> None:
    losses = []
    with distributed_runtime(cpu_threads=1) as runtime:
        for size in (1, 4, GLOBAL_BATCH):
            job = tiny_job("single", 1, micro_batch_size=size)
            strategy = build_strategy(job, model=build_model(job, vocab_size=VOCAB_SIZE), runtime=runtime)
            for step in (1, 2, 3):
                loss = strategy.forward_backward(rank_batches(job, step, 0), global_targets(step), no_clock)
                norm = strategy.optimizer_step(1e-3).grad_norm
            losses.append((loss.item(), norm))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)


def test_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (
        build_model(tiny_job("single", 1, seed=seed), vocab_size=VOCAB_SIZE).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_a_model_without_a_vocabulary_size_gets_the_tokenizers() -> None:
    config = {key: value for key, value in MODEL.items() if key != "vocab_size"}
    model = build_model(tiny_job("single", 1, model=config), vocab_size=257)
    assert model.get_input_embeddings().weight.shape[0] == 257
    assert len(transformer_blocks(model)) == MODEL["num_hidden_layers"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MODEL | {"vocab_size": 50}, r"vocab_size is 50, but the data's ids go up to 95"),
        (MODEL | {"max_position_embeddings": 8}, r"sequence_length is 24, but the model has 8 positions"),
        (MODEL | {"model_type": "llamma"}, r"model\.config: .*llamma"),
        (MODEL | {"hidden_size": 65}, r"model\.config: "),
    ],
)
def test_a_model_that_does_not_fit_is_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        build_model(tiny_job("single", 1, model=config), vocab_size=VOCAB_SIZE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("stated", "positions"), [({}, 1500), ({"n_positions": 1600}, 1600)])
def test_a_new_model_has_positions_for_its_sequences_where_nobody_says_how_many(
    stated: dict[str, int], positions: int
) -> None:
    """transformers' own number for GPT-2 is 1,024; one that is stated, and too small, is refused at launch."""
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2} | stated
    job = tiny_job("single", 1, model=config, sequence_length=1500)
    model = outline_model(job, vocab_size=VOCAB_SIZE)
    assert model.config.n_positions == positions == model.get_parameter("transformer.wpe.weight").size(0)
    assert required_shape(job.spec).learned_positions == positions
    with pytest.raises(InputError, match="has 1024 positions"):
        job = tiny_job("single", 1, model=config | {"n_positions": 1024}, sequence_length=1500)
        outline_model(job, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(("sequence_length", "rows"), [(64, 2050), (2500, 2502)])
def test_the_planner_counts_the_positions_that_a_new_opt_gets(sequence_length: int, rows: int) -> None:
    config = {"model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    job = tiny_job("single", 1, model=config | {"word_embed_proj_dim": 32}, sequence_length=sequence_length)
    model = outline_model(job, vocab_size=VOCAB_SIZE)
    assert model.get_parameter("model.decoder.embed_positions.weight").size(0) == rows
    assert required_shape(job.spec).learned_positions == rows


def test_a_model_folder_that_is_not_one_is_refused(tmp_path: Path) -> None:
    job = tiny_job("single", 1)
    for source, message in ((str(tmp_path), "no config.json"), ("s3://bucket/model", "reads local folders")):
        model = job.spec.model.model_copy(update={"config": None, "source": source})
        wrong = job.model_copy(update={"spec": job.spec.model_copy(update={"model": model})})
        with pytest.raises(InputError, match=message):
            build_model(wrong, vocab_size=VOCAB_SIZE)


def test_a_saved_model_is_read_back(tmp_path: Path) -> None:
    job = tiny_job("single", 1)
    saved = build_model(job, vocab_size=VOCAB_SIZE)
    saved.save_pretrained(tmp_path)
    model = job.spec.model.model_copy(update={"config": None, "source": str(tmp_path)})
    spec = job.spec.model_copy(update={"model": model})
    read = build_model(job.model_copy(update={"spec": spec}), vocab_size=VOCAB_SIZE)
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in saved.state_dict().items())


@pytest.mark.parametrize(("count", "fits"), [(2, True), (3, True), (4, True), (5, False)])
def test_interleaved_stages_take_rounds_of_equal_size(count: int, fits: bool) -> None:
    """As torch has it: a round for every two micro-batches on two ranks, rounded down, and none larger than another."""
    layout = ParallelismSpec(pipeline=2, pipeline_schedule="interleaved_1f1b")
    refusal = pipeline_obstacle(ModelFacts("llama", 4), layout, num_micro_batches=count, recompute="none")
    if fits:
        assert refusal is None
        return
    assert refusal is not None
    assert re.search(r"5 micro-batches a step in 2 rounds .* a multiple of 2 by", refusal)


def refused_job(changes: dict[str, Any], parallelism: dict[str, Any]) -> ResolvedJob:
    """The tiny job with sections replaced, resolved by hand."""
    content = tiny_job("single", 1).spec.model_dump()
    for key, value in changes.items():
        content[key] = content[key] | value if isinstance(value, dict) else value
    spec = JobSpec.model_validate(content | {"parallelism": parallelism})
    assert not isinstance(spec.parallelism, str)
    return ResolvedJob(
        spec=spec,
        parallelism=spec.parallelism,
        num_hosts=1,
        processes_per_host=spec.parallelism.world_size,
        steps=20,
        micro_batch_size=GLOBAL_BATCH // spec.parallelism.data_parallel_size,
        gradient_accumulation_steps=1,
        activation_checkpointing="none",
        learning_rate=1e-3,
    )


@pytest.mark.parametrize(
    ("changes", "parallelism", "message"),
    [
        ({"training": {"precision": "fp8"}}, {}, r"training\.precision: fp8"),
        ({}, {"tensor": 3}, r"parallelism\.tensor: 3 does not divide .*num_attention_heads \(4\)"),
        ({}, {"pipeline": 2}, r"parallelism\.pipeline: 2"),
        ({}, {"data_shard": 2, "expert": 2}, r"parallelism\.expert: 2"),
        ({"training": {"precision": "fp16"}}, {"engine": "deepspeed", "zero_stage": 2}, "no fp16 on this CPU"),
        ({"training": {"precision": "fp16"}}, {"engine": "deepspeed"}, "fp16 with zero_stage 0"),
        ({"training": {"precision": "fp64"}}, {"engine": "deepspeed", "zero_stage": 1}, "fp64 is not what DeepSpeed"),
    ],
)
def test_what_is_not_implemented_is_refused_in_one_line(
    changes: dict[str, Any], parallelism: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_supported(refused_job(changes, parallelism), device_type="cpu")
    assert "\n" not in str(caught.value)
