"""LoRA under every engine equals one process; its checkpoint holds the adapter alone; peft reads what is exported."""

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import inject_adapter_in_model
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from trainer.checkpoint.manifest import step_folder
from trainer.export import Export, export
from trainer.models.adapters import adapter_configuration, add_adapter, notes_on_adapter
from trainer.models.build import build_model
from trainer.models.described import describe_model
from trainer.runtime import distributed_runtime
from trainer.strategies import build_strategy
from trainer_testing.checkpoints import save_checkpoint
from trainer_testing.families import FAMILIES, adapter
from trainer_testing.strategy_worker import RunRequest, no_clock, run, worst_relative_error
from trainer_testing.support_table import CASES, TOLERANCE, measure, save_sources, source_of
from trainer_testing.tiny import VOCAB_SIZE, global_targets, rank_batches, tiny_job
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from trainyard.errors import InputError
from trainyard.planner.adapters import notes_on_adapter as planned_notes
from trainyard.planner.families import trained_shape
from trainyard.spec.job import AdapterSpec, ResolvedJob

HALF, STEPS = 2, 4
PAIRS = (("fsdp", "zero2"), ("zero2", "zero3"), ("zero3", "ddp"), ("ddp", "fsdp"))
"""Saved by, gone on with."""


def lora_job(folder: Path, family: str = "Llama", **adapter_changes: Any) -> dict[str, Any]:
    """tiny_job's arguments for LoRA on the saved base model."""
    return {"source": str(source_of(folder, family)), "adapter": adapter(family, "lora") | adapter_changes}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_sources(folder, ["Llama", "Llama, tied"])
    return folder


def test_lora_at_two_ranks_equals_one_process() -> None:
    """Every other pair of these: with the rest, they are cells of the table that test_families measures in --full."""
    families, engines = ("GPT-2, tied", "Mixtral", "DeepSeek-V3"), ("ddp", "fsdp", "zero2", "zero3")
    pairs = [(family, engine) for row, family in enumerate(families) for engine in engines[row % 2 :: 2]]
    errors = measure([case for case in CASES if case.method == "lora" and (case.family, case.engine) in pairs])
    assert len(errors) == len(pairs) == 6 and {engine for _, engine in pairs} == set(engines)
    assert {case: error for case, error in errors.items() if error > TOLERANCE} == {}


@pytest.mark.slow
def test_an_adapter_checkpoint_of_one_engine_goes_on_under_another(base: Path, tmp_path: Path) -> None:
    job = lora_job(base)
    saved = run(2, [RunRequest(name, 1, STEPS, save=str(tmp_path / name), save_after_step=HALF, job=job)
                    for name, _ in PAIRS])  # fmt: skip
    for name, _ in PAIRS:
        names = FileSystemReader(tmp_path / name / step_folder(HALF)).read_metadata().state_dict_metadata
        assert {key.split(".")[-1] for key in names} >= {"exp_avg", "exp_avg_sq", "weight", "step"}
        assert all(".lora_A." in key or ".lora_B." in key for key in names if key != "optim.step"), name
    resumed = run(2, [RunRequest(target, HALF + 1, STEPS, load=str(tmp_path / name), job=job)
                      for name, target in PAIRS])  # fmt: skip
    for pair, whole, rest in zip(PAIRS, saved, resumed, strict=True):
        assert worst_relative_error(rest, whole) < TOLERANCE, pair


def test_peft_reads_the_exported_adapter(base: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    job = tiny_job("single", 1, **lora_job(base, targets=("q_proj", "down_proj")))
    model = build_model(job, vocab_size=VOCAB_SIZE).eval()
    trained = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}
    for tensor in trained.values():
        tensor.normal_()
    save_checkpoint(tmp_path / "checkpoints", trained, describe_model(job.spec, model))
    written = export(Export(str(tmp_path / "checkpoints"), tmp_path / "adapter"))
    assert (written["step"], written["kind"]) == (3, "adapter")
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base / "Llama"), tmp_path / "adapter").eval()
    tokens = torch.arange(8)[None]
    plain = AutoModelForCausalLM.from_pretrained(base / "Llama")(tokens).logits
    torch.testing.assert_close(read(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    assert not torch.allclose(read(tokens).logits, plain, atol=1e-2)


def test_an_adapter_begins_as_nothing_and_is_all_that_trains(base: Path) -> None:
    job: ResolvedJob = tiny_job("single", 1, **lora_job(base))
    adapted = build_model(job, vocab_size=VOCAB_SIZE).eval()
    plain = build_model(tiny_job("single", 1, model=FAMILIES["Llama"]), vocab_size=VOCAB_SIZE).eval()
    tokens = torch.arange(8)[None]
    assert torch.equal(adapted(tokens).logits, plain(tokens).logits)
    trained = [parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2  # two layers, two linears, two matrices
    assert sum(trained) == 2 * (4 * (32 + 32) + 4 * (32 + 16))


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_a_rank_beyond_the_narrowest_adapted_layer_is_told(base: Path, kind: str) -> None:
    job = tiny_job("single", 1, **lora_job(base, kind=kind, rank=4096))
    model, stated = build_model(job, vocab_size=VOCAB_SIZE), job.spec.model.adapter
    assert stated is not None
    (note,) = notes_on_adapter(model, stated)
    config = model.config
    keys = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    assert f"rank: 4096 is more than the width of v_proj, {keys}," in note
    assert notes_on_adapter(model, stated.model_copy(update={"rank": keys})) == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_tells_of_a_rank_what_the_model_itself_does(family: str) -> None:
    """Of each of its linear layers alone: the plan knows their widths by its own formulas."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES[family]))
    names = {
        path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))
    }
    shape, told = trained_shape(FAMILIES[family]), []
    for name in names:
        stated, adapted = AdapterSpec(kind="lora", rank=10**4, targets=(name,)), copy.deepcopy(model)
        try:
            add_adapter(adapted, stated.model_copy(update={"rank": 1}), seed=1)
        except InputError:
            continue  # no job has that one: a head that is the embedding, a mixture's packed experts
        assert notes_on_adapter(adapted, stated) == planned_notes(shape, stated)
        told += notes_on_adapter(adapted, stated)
    assert len(told) > 2 and all("is more than the width of" in note for note in told)


def test_of_a_micro_batch_nothing_is_left_when_the_next_one_begins(base: Path) -> None:
    """What the first layer reads has a gradient where layers are computed again: the last loss's graph kept both."""
    job = tiny_job("single", 1, micro_batch_size=4, activation_checkpointing="full", **lora_job(base))
    read: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def note(_: torch.nn.Module, __: Any, output: torch.Tensor) -> None:
        alive.append(sum(each() is not None for each in read))
        read.append(weakref.ref(output))

    with distributed_runtime(cpu_threads=1) as runtime:
        model = build_model(job, vocab_size=VOCAB_SIZE)
        strategy = build_strategy(job, model=model, runtime=runtime)
        model.get_input_embeddings().register_forward_hook(note)
        strategy.forward_backward(rank_batches(job, 1, 0), global_targets(1), no_clock)
    assert len(alive) > 1
    assert alive == [0] * len(alive)


def test_gpt2s_transposed_matrices_are_adapted_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    model = build_model(tiny_job("single", 1, model=FAMILIES["GPT-2"]), vocab_size=VOCAB_SIZE)
    add_adapter(model, AdapterSpec(kind="lora", targets=("c_attn",)), seed=1)
    assert not [one.message for one in recwarn if "fan_in_fan_out" in str(one.message)]
    plain = build_model(tiny_job("single", 1, model=FAMILIES["GPT-2"]), vocab_size=VOCAB_SIZE)
    with pytest.warns(UserWarning, match="fan_in_fan_out"):  # where peft no longer says so, nothing is to be silenced
        inject_adapter_in_model(adapter_configuration(AdapterSpec(kind="lora", targets=("c_attn",))), plain)


@pytest.mark.parametrize(("family", "target"), [("Llama", "qq_proj"), ("Llama, tied", "lm_head"), ("Llama", "norm")])
def test_a_target_that_can_not_be_adapted_is_one_line(base: Path, family: str, target: str) -> None:
    model = build_model(tiny_job("single", 1, model=FAMILIES[family]), vocab_size=VOCAB_SIZE)
    with pytest.raises(InputError, match=rf"model\.adapter\.targets: {target}: .* it has down_proj, gate_proj"):
        add_adapter(model, AdapterSpec(kind="lora", targets=("q_proj", target)), seed=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_pefts_cast_the_gradients_are_the_same_bit_for_bit(dtype: torch.dtype) -> None:
    """Autocast makes the same half-precision numbers of an input, whether or not peft widened it before."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")

    def gradients(*, computes_in_half: bool) -> dict[str, torch.Tensor]:
        model = build_model(tiny_job("single", 1, model=FAMILIES["Llama"]), vocab_size=VOCAB_SIZE).train()
        spec = AdapterSpec(kind="lora", rank=4, targets=targets, dropout=0.0)
        add_adapter(model, spec, seed=1, computes_in_half=computes_in_half)
        casts = {module.cast_input_dtype_enabled for module in model.modules() if hasattr(module, "lora_A")}
        assert casts == {not computes_in_half}
        generator = torch.Generator().manual_seed(2)
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
            elif ".lora_B." in name:  # zero, it would leave the first matrix without a gradient
                parameter.data.normal_(std=0.2, generator=generator)
        tokens = torch.randint(0, VOCAB_SIZE, (2, 16), generator=generator)
        with torch.autocast("cpu", dtype=dtype):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    ours, pefts = gradients(computes_in_half=True), gradients(computes_in_half=False)
    assert len(ours) == 2 * 5 * 2 and all(gradient.any() for gradient in ours.values())
    assert [name for name in pefts if not torch.equal(ours[name], pefts[name])] == [] and set(ours) == set(pefts)
