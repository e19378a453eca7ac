"""A model read from files in bf16 trains as in one process; under FSDP and ZeRO-3 no rank ever holds all of it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer.model import build_model
from trainer.sharded_source import stored_type
from trainer_testing.distributed import run_ranks
from trainer_testing.families import FAMILIES, adapter
from trainer_testing.source_worker import MARK
from trainer_testing.strategy_worker import RunRequest, run, worst_relative_error
from trainer_testing.tiny import VOCAB_SIZE, tiny_job

from trainyard.errors import InputError

STEPS = 4
LARGE = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 8}


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


def test_no_rank_holds_a_model_that_is_sharded(tmp_path: Path) -> None:
    small, large = save(tmp_path / "small", "Llama"), save(tmp_path / "large", "Llama", **LARGE)
    for engine, most in (("fsdp", 1.75), ("zero3", 3.5)):
        output = run_ranks(2, "trainer_testing.source_worker", str(small), str(large), engine)[0]
        seen = json.loads(next(line for line in output.splitlines() if line.startswith(MARK)).removeprefix(MARK))
        whole = 4 * seen["elements"]
        assert seen["loaded"] < 0.1 * whole, engine
        # A half of the weights and of both moments is 1.5; DeepSpeed has a second copy, gradients and buckets.
        assert seen["peak"] < most * whole, (engine, seen["peak"] / whole)


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
