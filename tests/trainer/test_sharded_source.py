"""A model read from files in bf16 trains as in one process; and a model that is split is never whole on any rank."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer.models.build import build_model, outline_model
from trainer.models.sharded_source import stored_type
from trainer.runtime import Runtime
from trainer.strategies import build_strategy
from trainer_testing.distributed import run_ranks
from trainer_testing.families import FAMILIES, adapter
from trainer_testing.source_worker import MARK, Peak, give_back
from trainer_testing.strategy_worker import RunRequest, run, worst_relative_error
from trainer_testing.tiny import VOCAB_SIZE, tiny_job

from trainyard.errors import InputError

STEPS = 4
SMALL = {"num_hidden_layers": 4, "num_key_value_heads": 4}
LARGE = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}


def save(folder: Path, family: str, **changes: int) -> Path:
    """A base model of random bf16 weights."""
    model = build_model(tiny_job("single", 1, model=FAMILIES[family] | changes), vocab_size=VOCAB_SIZE)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    families = ("Llama, tied", "Mixtral", "DeepSeek-V3")
    return {family: save(folder / family.replace(", ", "-"), family) for family in families}


def test_a_bf16_source_trains_as_in_one_process(sources: dict[str, Path]) -> None:
    jobs = {family: {"source": str(source)} for family, source in sources.items()}
    one = dict(
        zip(jobs, run(1, [RunRequest("single", last_step=STEPS, job=job) for job in jobs.values()]), strict=True)
    )
    cases = [(family, engine) for family in jobs for engine in ("ddp", "fsdp", "zero2", "zero3")]
    two = run(2, [RunRequest(engine, last_step=STEPS, job=jobs[family]) for family, engine in cases])
    errors = {case: worst_relative_error(result, one[case[0]]) for case, result in zip(cases, two, strict=True)}
    assert {case: error for case, error in errors.items() if error > 1e-5} == {}


def test_lora_in_bf16_keeps_the_frozen_weights_as_they_are_stored(sources: dict[str, Path]) -> None:
    job = {"source": str(sources["Llama, tied"]), "adapter": adapter("Llama", "lora")}
    model = build_model(tiny_job("single", 1, precision="bf16", **job), vocab_size=VOCAB_SIZE)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    exact = run(1, [RunRequest("single", last_step=STEPS, job=job)])[0]
    engines = ("ddp", "fsdp", "zero2", "zero3")
    for result in run(2, [RunRequest(name, last_step=STEPS, job=job | {"precision": "bf16"}) for name in engines]):
        assert 0 < worst_relative_error(result, exact) < 0.02, result["strategy"]


LAYOUTS: list[tuple[str, dict[str, Any] | None]] = [
    ("fsdp", None),
    ("tensor4", {"tensor": 4}),
    ("pipeline4", {"pipeline": 4}),
    ("tensor2-fsdp2", {"tensor": 2, "data_shard": 2}),
]
MOST = 0.9
"""Of the whole model's float32 weights: on one of four ranks, a quarter of them and of both moments is 0.75."""


def origins_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The same model, to be read and to be made."""
    source = save(folder, "Llama", **LARGE)
    return {"files": {"source": str(source)}, "configuration": {"model": FAMILIES["Llama"] | LARGE}}


def share_of_one_of_four(strategy: str, layout: dict[str, Any] | None, changes: dict[str, Any]) -> float:
    """Memory that building a model takes on rank 2, over the model's float32 weights; its process group sends nothing.

    Building is each rank's own work.
    """
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    try:
        runtime = Runtime(
            rank=2, world_size=4, local_rank=2, device=torch.device("cpu"), control_group=dist.new_group()
        )
        job = tiny_job(strategy, 4, parallelism=layout, micro_batch_size=1, **changes)
        give_back()
        with Peak() as peak:
            model = outline_model(job, vocab_size=VOCAB_SIZE)
            whole = 4 * sum(parameter.numel() for parameter in model.parameters())
            built = build_strategy(job, model=model, runtime=runtime)
        del built, model
        return peak.num_bytes / whole
    finally:
        dist.destroy_process_group()


def test_one_of_four_ranks_never_holds_the_whole_model(tmp_path: Path) -> None:
    origins = origins_of(tmp_path)
    for strategy, layout in LAYOUTS:
        # Imports, and makes what stays.
        share_of_one_of_four(strategy, layout, {"model": FAMILIES["Llama"] | SMALL})
        for origin, changes in origins.items():
            # Twice: what else goes on in this process is seen too, but hardly in both.
            shares = [share_of_one_of_four(strategy, layout, changes) for _ in range(2)]
            # A measurement that sees nothing would say less than half.
            assert min(shares) < MOST and max(shares) > 0.5, (strategy, origin, shares)


@pytest.mark.full
def test_no_rank_holds_a_model_that_is_split(tmp_path: Path) -> None:
    origins = origins_of(tmp_path)
    # DeepSpeed has a second copy of its quarter, gradients and buckets.
    buckets = {"zero": {"reduce_bucket_elements": 1_000_000}}
    layouts = [*((strategy, layout, MOST) for strategy, layout in LAYOUTS), ("zero3", buckets, 1.9)]
    cases = [(strategy, layout, origin, most) for origin in origins for strategy, layout, most in layouts]
    asked = [
        {"strategy": strategy, "job": {**origins[origin], "parallelism": layout, "micro_batch_size": 1}}
        for strategy, layout, origin, _ in cases
    ]
    # The first runs are forgotten: they import, compile and make what stays.
    small = FAMILIES["Llama"] | SMALL
    warm = [{**case, "job": {**case["job"], "model": small}} for case in asked[len(layouts) :]]
    output = run_ranks(4, "trainer_testing.source_worker", json.dumps(warm + asked), timeout_seconds=900)[0]
    seen = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    shares = {
        (strategy, origin): (growth["loaded"] / (4 * growth["elements"]), growth["peak"] / (4 * growth["elements"]))
        for (strategy, _, origin, _), growth in zip(cases, seen[len(warm) :], strict=True)
    }
    allowed = {(strategy, origin): most for strategy, _, origin, most in cases}
    assert {case: share for case, share in shares.items() if share[0] > 0.1 or share[1] > allowed[case]} == {}, shares


def test_a_folder_of_mixed_types_has_no_one_type(tmp_path: Path) -> None:
    source = save(tmp_path, "Llama")
    assert stored_type(source) == torch.bfloat16
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert stored_type(source) is None
    assert stored_type(tmp_path / "nothing") is None
    model = build_model(tiny_job("single", 1, source=str(source)), vocab_size=VOCAB_SIZE)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    source = save(tmp_path, "Llama")
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InputError, match="can't be loaded") as caught:
        build_model(tiny_job("single", 1, source=str(source)), vocab_size=VOCAB_SIZE)
    assert "\n" not in str(caught.value)
