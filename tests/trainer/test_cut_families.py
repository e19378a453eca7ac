"""Families that no table holds, cut into stages or along the sequence: in float64, as one process computes them.

Each with all that its kind has (`trainer_testing.cut_families`), over several steps with accumulation, clipping and
unequal numbers of tokens; packed too where documents are kept apart.
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainer.models.build import build_model, transformer_blocks
from trainer.strategies import check_supported
from trainer.strategies.context_parallel import written_out
from trainer.strategies.pipeline import BLOCKS_IN_TUPLES, STREAMS, Stage, check_trained
from trainer_testing.agreement import agreement
from trainer_testing.cut_families import model_of
from trainer_testing.strategy_worker import RunRequest, run, worst_relative_error
from trainer_testing.tiny import VOCAB_SIZE, strategy_name, tiny_job
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from trainyard.errors import InputError
from trainyard.spec.job import ParallelismSpec
from trainyard.spec.support import (
    CONTEXT_FAMILIES,
    DOCUMENT_FAMILIES,
    PIPELINE_FAMILIES,
    STATE_HEADS,
    TENSOR_FAMILIES,
    handed_along,
)

TOLERANCE = 1e-7
EXACT = 1e-10
"""With nothing in float32."""
ROUNDED = 1e-6
"""Of gradient norms and weights where models compute in float32 what comes of sums in another order."""
STEPS = 4
SECONDS = 900
SHORT = ("gemma2", "gptj", "granite", "qwen3_5_text")
"""Two types of layers and caps; blocks that give tuples; scales on the way in and out; a state along the sequence."""
SHORT_CONTEXT = ("gemma2", "gpt_oss", "olmo3", "falcon_h1", "lfm2", "qwen3_5_text")
"""Caps, sinks, and two types of layers; a state space beside attention, short convolutions, delta rules."""
IN_FLOAT32 = ("gemma2", "gemma3_text", "hy_v3", "vaultgemma", *sorted(STATE_HEADS))
"""Whose norms, routers and recurrences are in float32 whatever they are given, so that it shows more than in others."""
WITH_STATES = ("kimi_linear", "lfm2_moe", "nemotron_h", "qwen3_next")
"""Delta rules with a decay a head and a channel, a state space with groups of heads, short convolutions; experts."""
OF_PRODUCTS = ("cohere2", "gemma2", "gemma3_text", "glm4_moe", "gpt_oss", "granite", "minimax_m2", "olmo2", "phi3")
"""Two types of layers, caps, wide norms, shared experts, sinks, scales, norms of all heads, fused matrices."""
ADAPTED = {
    "gemma3_text": ["q_proj", "o_proj", "gate_proj", "down_proj"],
    "glm4_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "gpt_oss": ["q_proj", "o_proj"],
    "minimax_m2": ["q_proj", "k_proj", "o_proj"],
    "olmo2": ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
}
ADAPTED_STATES = {
    "bamba": ["q_proj", "in_proj", "out_proj"],
    "lfm2": ["q_proj", "in_proj"],
    "qwen3_5_text": ["q_proj", "in_proj_qkv"],
    "qwen3_next": ["q_proj", "in_proj_qkvz", "out_proj"],
}
"""Likewise, of layers with a state."""
"""By family, what an adapter goes to: of mixtures that are cut, to attention alone."""
GROUP = 8
"""Families in one launch."""
Case = tuple[str, bool]
"""A family, and whether its documents are packed."""


def cases_of(families: tuple[str, ...]) -> list[Case]:
    return [(family, packed) for family in families for packed in (False, True)[: 1 + (family in DOCUMENT_FAMILIES)]]


def request(case: Case, parallelism: dict[str, Any], folder: Path, **changes: Any) -> RunRequest:
    """The case's run; of one process, which leaves its weights in `folder`, where there is no layout."""
    family, is_packed = case
    job: dict[str, Any] = {"model": model_of(family), "precision": "fp64", "micro_batch_size": 4, "steps": STEPS}
    job |= {"document_masks": family in DOCUMENT_FAMILIES} | changes
    weights = str(folder / f"{family}-{is_packed}.pt")
    if not parallelism:
        return RunRequest("single", last_step=STEPS, job=job, is_packed=is_packed, keep_weights=weights, is_wide=True)
    name = strategy_name(ParallelismSpec.model_validate(parallelism))
    job["parallelism"] = parallelism
    return RunRequest(name, last_step=STEPS, job=job, is_packed=is_packed, weights=weights, is_wide=True)


def check(
    families: tuple[str, ...],
    layouts: list[dict[str, Any]],
    folder: Path,
    *,
    tolerance: float = TOLERANCE,
    is_wide: bool = True,
    **changes: Any,
) -> None:
    """Every family under every layout against one process: losses, gradient norms, validation loss and weights.

    `tolerance`: of gradient norms and weights; losses are as near as TOLERANCE in any case.
    """
    cases = cases_of(families)
    alone = run(1, [replace(request(case, {}, folder), is_wide=is_wide) for case in cases], SECONDS)
    assert all(result["loss"][-1] < result["loss"][0] for result in alone), "what doesn't learn proves nothing"
    errors: dict[tuple[Case, str], float] = {}
    for world_size in {ParallelismSpec.model_validate(layout).world_size for layout in layouts}:
        own = [one for one in layouts if ParallelismSpec.model_validate(one).world_size == world_size]
        asked = [(case, layout) for layout in own for case in cases]
        requests = [replace(request(*each, folder, **changes), is_wide=is_wide) for each in asked]
        for (case, layout), result in zip(asked, run(world_size, requests, SECONDS), strict=True):
            one = alone[cases.index(case)]
            losses = worst_relative_error(result, one, ("loss", "validation"))
            assert losses <= TOLERANCE, (case, layout, losses)
            errors[case, str(layout)] = max(worst_relative_error(result, one), result["weights_error"])
    print(", ".join(f"{case} {layout} {error:.0e}" for (case, layout), error in errors.items()))
    assert {name: error for name, error in errors.items() if not error <= tolerance} == {}


def groups(families: frozenset[str]) -> list[tuple[str, ...]]:
    ordered = sorted(families)
    return [tuple(ordered[first : first + GROUP]) for first in range(0, len(ordered), GROUP)]


@pytest.mark.slow
def test_stages_of_further_families_are_one_process(tmp_path: Path) -> None:
    check(SHORT, [{"pipeline": 2}], tmp_path)


@pytest.mark.slow
def test_further_families_whose_sequences_are_cut_are_one_process(tmp_path: Path) -> None:
    check(SHORT_CONTEXT, [{"context": 2}], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "families",
    [("gemma3_text",), pytest.param(IN_FLOAT32, marks=[pytest.mark.full, pytest.mark.timeout(1800)])],
    ids=["quick", "all"],
)
def test_what_cut_sequences_differ_by_is_rounding(families: tuple[str, ...], tmp_path: Path) -> None:
    """Of what these models compute in float32: without it nothing is left of it."""
    check(families, [{"context": 2}], tmp_path, tolerance=EXACT)
    check(families, [{"context": 2}], tmp_path, tolerance=ROUNDED, is_wide=False)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("families", groups(PIPELINE_FAMILIES - TENSOR_FAMILIES), ids=lambda families: families[0])
def test_every_further_family_is_one_process(families: tuple[str, ...], tmp_path: Path) -> None:
    check(families, [{"pipeline": 2}], tmp_path)
    if cut := tuple(family for family in families if family in CONTEXT_FAMILIES):
        check(cut, [{"context": 2}], tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_other_schedules_and_recomputation_are_one_process(tmp_path: Path) -> None:
    families = ("gemma2", "glm4_moe", "gptj", "granite", "mamba", "nemotron_h", "olmo3", "qwen3_5_moe_text")
    schedules = [{"pipeline": 2, "pipeline_schedule": one} for one in ("gpipe", "interleaved_1f1b", "zero_bubble")]
    check(families, schedules, tmp_path)
    check(families, [{"pipeline": 2}], tmp_path, activation_checkpointing="full")
    check(SHORT_CONTEXT, [{"context": 2}], tmp_path, activation_checkpointing="full")


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("families", "layouts"),
    [
        pytest.param(OF_PRODUCTS, [{"pipeline": 2, "tensor": 2, "data_shard": 2}], id="all three"),
        pytest.param(OF_PRODUCTS, [{"context": 2, "data_shard": 2}, {"pipeline": 2, "data_shard": 2}], id="FSDP2"),
        pytest.param(OF_PRODUCTS, [{"pipeline": 2, "context": 2}], id="stages of sequences"),
        pytest.param(OF_PRODUCTS, [{"context": 2, "tensor": 2, "data_shard": 2}], id="matrices of sequences"),
        pytest.param(
            ("glm4_moe", "gpt_oss", "minimax_m2", "olmoe"),
            [
                {"pipeline": 2, "tensor": 2, "expert": 2, "data_shard": 2},
                {"context": 2, "expert": 2, "data_shard": 2},
                {"pipeline": 2, "expert": 2, "data_shard": 2},
            ],
            id="experts",
        ),
        pytest.param(
            WITH_STATES,
            [{"context": 4}, {"context": 2, "expert": 2, "data_shard": 2}, {"pipeline": 2, "context": 2}],
            id="states",
        ),
        pytest.param(("qwen3_5_text", "qwen3_next"), [{"context": 2, "tensor": 2}], id="heads of states"),
        pytest.param(
            ("granitemoehybrid", "qwen3_5_moe_text", "qwen3_next"),
            [{"pipeline": 2, "data_shard": 2, "expert": 2}],
            id="hybrids",
        ),
    ],
)
def test_products_are_one_process(families: tuple[str, ...], layouts: list[dict[str, Any]], tmp_path: Path) -> None:
    check(families, layouts, tmp_path, tolerance=EXACT)


@pytest.mark.slow
def test_a_job_saved_by_stages_goes_on_without(tmp_path: Path) -> None:
    case, saved = ("gemma2", True), str(tmp_path / "checkpoint")
    (alone,) = run(1, [request(case, {}, tmp_path)], SECONDS)
    stages = replace(request(case, {"pipeline": 2}, tmp_path), save=saved, save_after_step=2)
    later = [{"data_shard": 2}, {"tensor": 2}, {"pipeline": 2}]
    resumed = [replace(request(case, layout, tmp_path), first_step=3, load=saved) for layout in later]
    for result in run(2, [stages, *resumed], SECONDS):
        assert max(worst_relative_error(result, alone), result["weights_error"]) <= TOLERANCE


def check_adapters(targets: dict[str, list[str]], layouts: list[dict[str, Any]], folder: Path) -> None:
    """By family, what has an adapter; the base models are read from files."""
    ones = []
    for family, names in targets.items():
        has_masks = family in DOCUMENT_FAMILIES
        masks = {"document_masks": has_masks}
        built = build_model(tiny_job("single", 1, model=model_of(family), **masks), vocab_size=VOCAB_SIZE)
        built.save_pretrained(folder / family)
        adapter = {"kind": "lora", "rank": 4, "targets": names}
        job = {"source": str(folder / family), "adapter": adapter, "precision": "fp64", "micro_batch_size": 4} | masks
        kept = str(folder / f"{family}.pt")
        one = RunRequest("single", last_step=STEPS, job=job, is_wide=True, is_packed=has_masks, keep_weights=kept)
        ones.append(one)
    alone, errors = run(1, ones, SECONDS), {}
    for layout in layouts:
        spec = ParallelismSpec.model_validate(layout)
        changed = {"strategy": strategy_name(spec), "keep_weights": None}
        asked = [
            replace(one, job=one.job | {"parallelism": layout}, weights=one.keep_weights, **changed) for one in ones
        ]
        for family, result, one in zip(targets, run(spec.world_size, asked, SECONDS), alone, strict=True):
            errors[family, str(layout)] = max(worst_relative_error(result, one), result["weights_error"])
    print(", ".join(f"{name} {error:.0e}" for name, error in errors.items()))
    assert {name: error for name, error in errors.items() if not error <= EXACT} == {}


@pytest.mark.slow
def test_adapters_in_stages_are_one_process(tmp_path: Path) -> None:
    adapters = {"gemma2": ["q_proj", "v_proj"], "phi3": ["qkv_proj"], "qwen3_5_text": ["q_proj", "in_proj_qkv"]}
    check_adapters(adapters, [{"pipeline": 2}], tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_adapters_in_products_are_one_process(tmp_path: Path) -> None:
    layouts = [{"pipeline": 2}, {"context": 2}, {"tensor": 2}, {"pipeline": 2, "tensor": 2}]
    check_adapters(ADAPTED, [layout | {"data_shard": 2} for layout in layouts], tmp_path)
    check_adapters(ADAPTED_STATES, [{"context": 2}, {"context": 2, "data_shard": 2}], tmp_path)


LINEAR, FULL = "linear_attention", "full_attention"


@pytest.mark.parametrize(
    ("kinds", "schedule", "words"),
    [
        ([LINEAR, LINEAR, FULL, FULL], "1f1b", "its rank 0 has layers 0 to 1 alone, none of which has"),
        ([LINEAR, FULL, LINEAR, FULL], "1f1b", None),
        ([LINEAR, LINEAR, FULL, FULL], "interleaved_1f1b", None),
        ([LINEAR, FULL, LINEAR, FULL], "interleaved_1f1b", "its rank 0 has layers 0 to 0 and 2 to 2 alone"),
    ],
)
def test_a_rank_without_any_module_of_the_adapter_is_refused(
    kinds: list[str], schedule: str, words: str | None
) -> None:
    """It ended in an optimizer's complaint of an empty list, was started again, and was called a crash loop."""
    sizes = model_of("qwen3_5_text") | {"num_hidden_layers": len(kinds), "layer_types": kinds}
    model: Any = build_model(tiny_job("single", 1, model=sizes, document_masks=False), vocab_size=VOCAB_SIZE)
    for name, weight in model.named_parameters():
        weight.requires_grad_("q_proj" in name)
    layout = ParallelismSpec.model_validate({"pipeline": 2, "pipeline_schedule": schedule})
    with nullcontext() if words is None else pytest.raises(InputError, match=words):
        check_trained(model, layout)


def test_such_a_job_is_refused_before_a_step_of_it_is_tried() -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000}
    sizes |= {"intermediate_size": 512}
    model = sizes | {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, FULL, FULL]}
    with pytest.raises(InputError, match=r"^parallelism\.pipeline: 2: its rank 0 has layers 0 to 1 alone"):
        agreement(model, {"pipeline": 2}, rank=1, adapter="lora", documents=False, sequence_length=128)


@pytest.mark.parametrize("family", sorted(BLOCKS_IN_TUPLES.keys() | {"gpt2", "llama", "nemotron_h", "opt"}))
def test_blocks_give_what_their_stand_ins_give(family: str) -> None:
    """Fails where transformers' blocks of a type come to give something else: then BLOCKS_IN_TUPLES is wrong."""
    job = tiny_job("single", 1, model=model_of(family), document_masks=False)
    model = build_model(job, vocab_size=VOCAB_SIZE)
    given: list[int] = []
    for block in transformer_blocks(model):
        block.register_forward_hook(lambda _, __, output: given.append(len(output) if isinstance(output, tuple) else 0))
    model(input_ids=torch.zeros((1, 4), dtype=torch.int64), use_cache=False)
    assert given and set(given) == {BLOCKS_IN_TUPLES.get(family, 0)}


def test_what_comes_before_the_blocks_is_the_first_stages_though_its_class_has_it_after() -> None:
    """As Inkling's norm of embeddings in transformers 5.17; 5.23 has it in the embedding."""
    job = tiny_job("single", 1, model=model_of("inkling_text"), document_masks=False)
    model: Any = build_model(job, vocab_size=VOCAB_SIZE)
    model.model.embed_norm = nn.LayerNorm(32)
    first, last = (Stage(model, index, 2).model.model for index in range(2))
    assert isinstance(first.embed_norm, nn.LayerNorm) and not isinstance(first.norm, type(model.model.norm))
    assert not isinstance(last.embed_norm, nn.LayerNorm) and isinstance(last.norm, type(model.model.norm))


class _Heads(nn.Module):
    """As transformers' functions ask about it."""

    num_key_value_groups = 1
    head_dim = 4

    def __init__(self, sinks: torch.Tensor) -> None:
        super().__init__()
        self.sinks = nn.Parameter(sinks)


@pytest.mark.parametrize("kind", ["sinks", "cap"])
def test_attention_that_is_written_out_is_that_of_transformers(kind: str) -> None:
    """Results and gradients, of a window of three tokens."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn((2, 3, 6, 4), generator=generator, requires_grad=True) for _ in range(3))
    heads = _Heads(torch.randn(3, generator=generator))
    ages = torch.arange(6).unsqueeze(1) - torch.arange(6)
    allowed = ((ages >= 0) & (ages < 3))[None, None]
    bias = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    inputs, cap, sinks = [query, key, value], None, None
    if kind == "sinks":
        sinks = heads.sinks
        inputs.append(sinks)
        theirs, _ = gpt_oss_attention(heads, query, key, value, bias, scaling=0.5)
    else:
        cap = 0.7
        theirs, _ = gemma2_attention(heads, query, key, value, bias, scaling=0.5, softcap=cap)
    ours = written_out(query, key, value, allowed, cap=cap, sinks=sinks, dropout=0.0, scaling=0.5).transpose(1, 2)
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn(ours.shape, generator=generator)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs, weights), torch.autograd.grad(theirs, inputs, weights))


@pytest.mark.parametrize(
    ("family", "degree"),
    [
        ("bloom", "context"),
        ("falcon", "context"),
        ("gptj", "context"),
        ("mamba", "context"),
        ("minimax", "context"),
        ("zamba", "pipeline"),
    ],
)
def test_what_is_not_let_in_is_refused(family: str, degree: str) -> None:
    job = tiny_job("refused", 2, model=model_of(family), parallelism={degree: 2}, document_masks=False)
    with pytest.raises(InputError, match=rf"^parallelism\.{degree}: 2.*{family}"):
        check_supported(job, device_type="cpu")


@pytest.mark.parametrize(
    ("family", "setting", "told"),
    [
        ("gemma4_text", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input: 8"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers: 2"),
        ("gemma4_unified_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers: 2"),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared"] * 2}, "indexer_types: shared"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_freq": 2}, "indexer_types: shared"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FSFS"}, "indexer_types: shared"),
        ("hy_v4", {"indexer_types": None}, "indexer_types: shared"),
    ],
)
def test_layers_that_need_more_of_each_other_are_not_cut(family: str, setting: dict[str, Any], told: str) -> None:
    """Its twin without the setting is."""
    model = model_of(family)
    job = tiny_job("pipeline2", 2, model=model, parallelism={"pipeline": 2}, document_masks=False)
    check_supported(job, device_type="cpu")
    job = tiny_job("refused", 2, model=model | setting, parallelism={"pipeline": 2}, document_masks=False)
    with pytest.raises(
        InputError, match=rf"^parallelism\.pipeline: 2: layers of {family} with {told} .*use data_shard$"
    ):
        check_supported(job, device_type="cpu")
    assert handed_along(family, (model | setting).get) == told, "the planner, by the configuration as it is written"
    assert handed_along(family, model.get) is None


def test_a_residual_stream_in_float32_goes_on_so() -> None:
    """By what a block does, not by its configuration: Nemotron-H has the field, and no code for it."""
    kinds = {}
    for family in ("mamba", "falcon_mamba", "nemotron_h", "qwen3_5_text"):
        model = model_of(family) | ({} if family == "qwen3_5_text" else {"residual_in_fp32": True})
        built = build_model(tiny_job("single", 1, model=model, document_masks=False), vocab_size=VOCAB_SIZE)
        kinds[family] = Stage(built, 0, 2).handed((1, 2), torch.bfloat16).dtype
    wide = dict.fromkeys(("mamba", "falcon_mamba"), torch.float32)
    assert kinds == wide | dict.fromkeys(("nemotron_h", "qwen3_5_text"), torch.bfloat16)


@pytest.mark.parametrize("family", sorted(STREAMS))
def test_stages_hand_on_all_streams_and_are_told_the_tokens(family: str) -> None:
    """As the whole model computes, bit by bit; told others, Qwen4's layers look up what they have of those."""
    job = tiny_job("single", 1, model=model_of(family), document_masks=False, precision="fp64")
    model = build_model(job, vocab_size=VOCAB_SIZE)
    tokens = torch.arange(48).view(2, 24)
    first, last = (Stage(model, index, 2) for index in range(2))
    with torch.no_grad():
        handed = first(tokens, tokens=tokens)
        assert handed.shape == first.handed(tokens.shape, torch.float64).shape
        logits = last(handed, tokens=tokens)
        torch.testing.assert_close(logits, model(input_ids=tokens, use_cache=False).logits, rtol=0, atol=0)
        is_told = not torch.equal(last(handed, tokens=tokens + 1), logits)
    assert is_told == (
        family == "qwen4_exp_text"
    )  # DeepSeek's table of experts by token is all zeros, until it is read


@pytest.mark.slow
def test_a_residual_stream_in_float32_is_cut_as_it_is() -> None:
    """In bf16: of float32's digits a stage loses none, so that all is as FSDP computes it, bit by bit."""
    job = {"model": model_of("mamba"), "precision": "bf16", "document_masks": False, "micro_batch_size": 4}
    layouts: dict[str, dict[str, Any]] = {"fsdp": {"data_shard": 2}, "pipeline2": {"pipeline": 2}}
    asked = [RunRequest(name, last_step=1, job=job | {"parallelism": layout}) for name, layout in layouts.items()]
    sharded, staged = run(2, asked, SECONDS)
    assert staged["loss"] == pytest.approx(sharded["loss"], rel=1e-9)
