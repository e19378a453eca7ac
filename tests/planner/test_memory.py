"""Each memory formula against the paper or the measurement that it is from."""

import dataclasses
import itertools
import math
import re
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.planner import exchanges, predict, timing, updates
from trainyard.planner.activations import (
    encoder_bytes,
    gathered_tokens_bytes,
    layer_activation_bytes,
    logits_bytes,
    pipeline_buffer_bytes,
)
from trainyard.planner.communication import all_gather_seconds, group
from trainyard.planner.constants import DEFAULT_MEMORY, GIB, MIB
from trainyard.planner.families import shape_from_config, shape_of_known
from trainyard.planner.layout import Layout
from trainyard.planner.memory import PARTS, least_memory, memory, state_bytes, workspace_bytes
from trainyard.planner.predict import understand
from trainyard.planner.quantized_reads import four_bit_bytes
from trainyard.planner.shapes import ModelShape
from trainyard.planner.timing import step_time

GPT = ModelShape(
    layers=12, hidden=512, ffn=2048, heads=8, kv_heads=8, head_dim=64, vocab=50304, gated_mlp=False,
    tied_embeddings=True, norm="layer", qkv_bias=True, output_bias=True, mlp_bias=True,
)  # fmt: skip
"""The model of Megatron's own functional tests."""

MEGATRON = Layout(engine="megatron", micro_batch=4, sequence_length=1024, dropout=True, fused_loss=False)
SBH = 4 * 1024 * 512


def test_a_megatron_layer_keeps_34_sbh_with_flash_attention() -> None:
    # Korthikanti et al. 2022, section 4.1, without the attention matrix; the softmax's statistics are not in theirs.
    statistics = 4 * 8 * 4 * 1024
    assert layer_activation_bytes(GPT, MEGATRON, "none") == 34 * SBH + statistics


@pytest.mark.parametrize(("tensor", "sequence", "units"), [(2, False, 10 + 24 / 2), (4, False, 16), (4, True, 34 / 4)])
def test_tensor_and_sequence_parallelism_split_as_the_paper_says(tensor: int, sequence: bool, units: float) -> None:
    # Equations 2 and 4 of the same paper: sbh (10 + 24/t), and 34 sbh / t with sequence parallelism.
    layout = dataclasses.replace(MEGATRON, tensor=tensor, sequence_parallel=sequence)
    statistics = 4 * 8 / tensor * 4 * 1024
    assert layer_activation_bytes(GPT, layout, "none") == units * SBH + statistics


def test_an_attention_matrix_costs_5_as_over_h_more() -> None:
    unfused = dataclasses.replace(MEGATRON, flash_attention=False)
    more = layer_activation_bytes(GPT, unfused, "none") - layer_activation_bytes(GPT, MEGATRON, "none")
    assert more == 5 * 8 * 1024 * 4 * 1024
    dry = dataclasses.replace(unfused, dropout=False)
    without_masks = layer_activation_bytes(GPT, dry, "none") - layer_activation_bytes(
        GPT, dataclasses.replace(dry, flash_attention=True), "none"
    )
    assert without_masks == 2 * 8 * 1024 * 4 * 1024


@pytest.mark.parametrize(
    ("changes", "mib"),
    [
        ({"large_workspace": True}, 2 * 32 + 4),
        ({}, 2 * 8.125 + 4),
        ({"hopper": True}, 2 * 32 + 32),
        ({"engine": "torch"}, 2 * 8.125),
        ({"engine": "torch", "hopper": True}, 2 * 32),
        ({"transformer_engine": False, "large_workspace": True}, 3 * 32),
    ],
)
def test_workspaces_by_generation_and_determinism(changes: dict[str, Any], mib: float) -> None:
    # Megatron's functional tests leave 68, 20.8 and 96 MiB beside the training state (golden values at d98e8a64).
    assert workspace_bytes(dataclasses.replace(MEGATRON, **changes)) == mib * MIB


def test_logits_by_kind_of_loss() -> None:
    elements = 4 * 1024 * 50304
    assert logits_bytes(GPT, MEGATRON) == 6 * elements
    assert logits_bytes(GPT, dataclasses.replace(MEGATRON, fused_loss=True)) == 10 * elements
    plain = dataclasses.replace(MEGATRON, engine="torch")
    assert logits_bytes(GPT, plain) == 14 * elements
    assert logits_bytes(GPT, dataclasses.replace(plain, compiled_loss=True)) == 6 * elements


def test_a_pipeline_keeps_what_it_received() -> None:
    tensor = 4 * 1024 * 512 * 2
    assert pipeline_buffer_bytes(GPT, MEGATRON) == 0
    assert pipeline_buffer_bytes(GPT, dataclasses.replace(MEGATRON, pipeline=4)) == 3 * tensor
    assert pipeline_buffer_bytes(GPT, dataclasses.replace(MEGATRON, pipeline=4, chunks=3)) == 7 * tensor


CI_ROW: dict[str, Any] = {
    "layers": 12, "hidden": 512, "heads": 8, "seq": 1024, "vocab": 50304, "gated_mlp": False, "gpus": 8,
    "micro_batch": 4, "framework": "Megatron-Core", "dropout": True, "deterministic": True, "loss_fusion": False,
    "gpu": "A100", "rank": "last",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "resting_mib", "peak_mib"),
    [
        # tests/functional_tests/test_cases of NVIDIA/Megatron-LM at d98e8a64, golden values on A100 and H100.
        ({"sharding": "zero1"}, 526.6, 2586.1),
        ({"sharding": "zero1", "attention": "unfused"}, 526.6, 4456.6),
        ({"recompute": "full"}, 1177.4, 2418.7),
        ({"tp": 2, "pp": 2, "sequence_parallel": False}, 464.5, 1344.5),
        ({"tp": 2, "pp": 2, "sequence_parallel": False, "gpu": "H100"}, 493.3, 1362.0),
        ({"pp": 4, "vp": 3, "sharding": "zero1"}, 497.7, 2327.7),
        # Two layers at either end of the pipeline.
        ({"pp": 4, "last_stage_layers": 2, "attention": "unfused"}, 628.2, 2275.7),
    ],
)
def test_megatrons_own_measurements(changes: dict[str, Any], resting_mib: float, peak_mib: float) -> None:
    answer = predict(CI_ROW | changes)
    assert answer["resting_memory_gib"] * 1024 == pytest.approx(resting_mib, rel=0.03)
    assert answer["peak_memory_gib"] * 1024 == pytest.approx(peak_mib, rel=0.03)


def test_products_behind_the_last_layer_are_whole_on_every_tensor_rank_of_the_last_stage() -> None:
    """bert_release of the same tests: 24 layers of 1024 over TP8 x PP8 in fp16, 20 bytes a parameter at rest."""
    split = CI_ROW | {"tp": 8, "pp": 4, "sequence_parallel": False, "precision": "fp16", "rank": "last"}
    split |= {"heads": 8, "gpus": 32}
    plain, with_two, first = (
        predict(split | changes)["model_state_gib"] * 2**30
        for changes in ({}, {"head_products": 2}, {"head_products": 2, "rank": "first"})
    )
    hidden = CI_ROW["hidden"]
    assert with_two - plain == pytest.approx(20 * 2 * hidden * (hidden + 1))
    assert first == pytest.approx(predict(split | {"rank": "first"})["model_state_gib"] * 2**30)
    one, none = (understand(CI_ROW | {"head_products": count}).shape.params for count in (1, 0))
    assert one - none == hidden * (hidden + 1)


OWN_LAYERS = {"transformer_engine": False, "precision": "fp16", "sequence_parallel": False}


@pytest.mark.parametrize(
    ("changes", "resting_mib", "peak_mib"),
    [
        ({"tp": 4, "vocab": 50688, "learned_positions": 1024, "attention": "unfused"}, 397.1, 1522.5),
        ({"tp": 2, "pp": 2, "vocab": 50432, "attention": "eager"}, 535.0, 1990.0),
    ],
)
def test_fp16_leaves_fp32_gradients_between_steps_and_not_at_the_peak(
    changes: dict[str, Any], resting_mib: float, peak_mib: float
) -> None:
    # gpt3_mcore_tp4_pp1_resume_torch and gpt3_mcore_tp2_pp2_uninstall_te of the same tests: 20 bytes a parameter rest,
    # 16 at the peak. Without its kernel, a softmax in fp32 keeps 2 bytes a score more.
    answer = predict(CI_ROW | OWN_LAYERS | changes)
    assert answer["resting_memory_gib"] * 1024 == pytest.approx(resting_mib, rel=0.04)
    assert answer["peak_memory_gib"] * 1024 == pytest.approx(peak_mib, rel=0.02)
    if changes["attention"] == "eager":
        fused = predict(CI_ROW | OWN_LAYERS | changes | {"attention": "unfused"})
        scores = 6 * 4 * 4 * 1024**2
        assert (answer["peak_memory_gib"] - fused["peak_memory_gib"]) * 1024 * MIB == pytest.approx(2 * scores)


def test_gradients_that_rest_in_fp32_are_training_state() -> None:
    question = understand(CI_ROW | {"precision": "fp16"})
    use = memory(question.shape, question.layout)
    # 2 of weights, 2 and 4 of gradients, 4 of master weights, 8 of moments.
    assert use.state == pytest.approx(20 * question.shape.params, rel=1e-4)
    assert use.resting == use.state + use.workspace
    certain = dataclasses.replace(use, moving_error=0.0)
    assert certain.margin == pytest.approx(1.2816 * 0.03 * use.state)
    assert predict(CI_ROW | {"precision": "fp16"})["model_state_gib"] * 2**30 == pytest.approx(use.state)


@pytest.mark.parametrize(("precision", "dropout", "more"), [("bf16", False, 4), ("bf16", True, 2), ("fp32", False, 0)])
def test_a_softmax_written_out_in_fp32_is_a_second_one_only_beside_a_narrower(
    precision: str, dropout: bool, more: int
) -> None:
    asked = CI_ROW | {"precision": precision, "dropout": dropout}
    scores = 8 * 4 * 1024**2
    for framework, method in (("Megatron-Core", "full"), ("litgpt", "lora")):
        said = {"framework": framework, "method": method, "recompute": "none"}
        written, unfused = (
            layer_activation_bytes(question.shape, question.layout, "none")
            for question in (understand(asked | said | {"attention": kind}) for kind in ("eager", "unfused"))
        )
        assert written - unfused == pytest.approx(more * scores), framework


EXPERTS = {"experts": 8, "experts_per_token": 2, "moe_ffn": 1024, "ep": 8, "sharding": "zero1", "gathers_tokens": True}


def test_experts_of_a_rank_get_more_than_their_share_and_a_buffer_for_all_tokens_stays() -> None:
    # gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_optimizer of the same tests.
    answer = predict(CI_ROW | EXPERTS | {"learned_positions": 1024})
    assert answer["resting_memory_gib"] * 1024 == pytest.approx(612.7, rel=0.01)
    assert answer["peak_memory_gib"] * 1024 == pytest.approx(3124.4, rel=0.03)
    not_gathered = predict(CI_ROW | EXPERTS | {"learned_positions": 1024, "gathers_tokens": None})
    buffer = (answer["resting_memory_gib"] - not_gathered["resting_memory_gib"]) * 1024 * MIB
    assert buffer == pytest.approx(8 * 4 * 1024 * 512 * 2)


def test_an_even_router_is_what_one_expert_parallel_rank_sees() -> None:
    one = understand(CI_ROW | EXPERTS | {"ep": 1})
    spread, even = (dataclasses.replace(DEFAULT_MEMORY, load_spread=value) for value in (0.5, 0.0))
    assert layer_activation_bytes(one.shape, one.layout, "none", spread) == layer_activation_bytes(
        one.shape, one.layout, "none", even
    )
    # Two of eight experts' ranks: sqrt((2 - 1) / 8) of the spread; all eight of one: sqrt(7 / 8).
    for ranks in (2, 8):
        many = dataclasses.replace(one.layout, expert=ranks)
        uneven, mean = (layer_activation_bytes(one.shape, many, "none", constants) for constants in (spread, even))
        routed = 4 * 1024 * 2 * 2 * (2 * 1024 + 2 * 512)
        assert (uneven - mean) / routed == pytest.approx(0.5 * math.sqrt((ranks - 1) / 8))


def test_ranks_that_share_an_expert_hold_its_tokens_whole() -> None:
    split = understand(CI_ROW | EXPERTS | {"ep": 1, "tp": 2})
    tokens = 4 * 1024
    copies = 2 * 2 * tokens * 2 * 512
    alone = dataclasses.replace(split.layout, expert_tensor=1)
    shared, own = (layer_activation_bytes(split.shape, layout, "none") for layout in (split.layout, alone))
    assert shared - own == copies / 2


def test_the_worst_rank_is_at_least_the_first_and_the_last() -> None:
    piped = {**CI_ROW, "pp": 4, "rank": None}
    worst, first, last = (predict({**piped, "rank": rank})["peak_memory_gib"] for rank in (None, "first", "last"))
    assert worst == max(first, last)
    with pytest.raises(InputError, match="rank: must be one of worst, first, last"):
        predict({**piped, "rank": "middle"})


def test_an_encoder_is_counted_once_and_attended_to_by_every_layer() -> None:
    sizes = {**CI_ROW, "encoder_layers": 12, "encoder_seq": 512}
    alone, before = (understand(fields).shape for fields in (CI_ROW, sizes))
    crossed = understand({**sizes, "cross_attention": True}).shape
    layer = alone.layer_params(moe=False)
    assert before.params - alone.params == 12 * layer
    assert crossed.params - before.params == 12 * (alone.attention_params + alone.norm_params)
    plain, longer = (memory(shape, MEGATRON).activations for shape in (alone, before))
    # Activations grow with tokens: an encoder of half of the positions keeps half of as many layers.
    assert longer - plain == pytest.approx(12 * layer_activation_bytes(alone, MEGATRON, "none") / 2, rel=0.01)


def test_a_softmax_that_no_fused_kernel_takes_keeps_its_fp32_result() -> None:
    whole = understand({**CI_ROW, "attention": "unfused", "micro_batch": 4})
    fused = dataclasses.replace(whole.layout, flash_attention=True)

    def scores(tokens: int, **changes: Any) -> float:
        """Bytes kept of one score, dropped scores aside."""
        layouts = [dataclasses.replace(one, sequence_length=tokens, **changes) for one in (whole.layout, fused)]
        written, kernel = (layer_activation_bytes(whole.shape, layout, "none") for layout in layouts)
        return (written - kernel) / (layouts[0].micro_batch * whole.shape.heads * tokens**2)

    even, odd = (scores(tokens, dropout=False) for tokens in (1024, 1601))
    assert (even, odd) == (2, 2 + 4)
    # Heads of all sequences are a multiple of four as well: a rank that has two of the eight, of one, keeps more.
    assert scores(1024, dropout=False, micro_batch=1) == 2
    assert scores(1024, dropout=False, micro_batch=1, tensor=4) == (2 + 4) / 4


def test_an_images_patches_are_cut_by_tensor_parallelism_alone() -> None:
    shape = understand({**CI_ROW, "encoder_layers": 12, "encoder_seq": 577}).shape
    layout = dataclasses.replace(MEGATRON, tensor=4, sequence_parallel=True)
    alone, split = (encoder_bytes(shape, dataclasses.replace(layout, context=degree)) for degree in (1, 2))
    assert alone == split
    # Two norms of a layer have an input and an output each, whole.
    assert alone > 12 * 4 * 577 * shape.hidden * 2 * layout.micro_batch


def test_a_pattern_makes_a_hybrid() -> None:
    shape = understand({**CI_ROW, "layers": None, "hybrid_pattern": "M-M*|-MM"}).shape
    assert (shape.layers, shape.mamba_layers, shape.attention_layers, shape.num_mlps) == (7, 4, 1, 2)
    with pytest.raises(InputError, match="hybrid_pattern: must be made of M"):
        understand({**CI_ROW, "hybrid_pattern": "MX"})


def test_experts_split_by_their_own_tensor_parallelism() -> None:
    moe = dataclasses.replace(GPT, experts=8, experts_per_token=2, moe_ffn=2048)
    layout = dataclasses.replace(MEGATRON, tensor=2, data_parallel=4, expert=4)
    outside, whole = (memory(moe, dataclasses.replace(layout, expert_tensor=degree)).parameters for degree in (None, 1))
    assert whole - outside == 2 * 12 * moe.expert_params * (1 / 4 - 1 / 8)


LITGPT: dict[str, Any] = {
    "model": "Llama 2", "params_b": 7, "gpu": "A100", "gpu_mem_gb": 40, "gpus": 1, "seq": 1304, "micro_batch": 1,
    "method": "lora", "framework": "litgpt",
}  # fmt: skip
CANIFT: dict[str, Any] = {
    "model": "Qwen2.5-1.5B-Instruct", "gpu": "A100", "gpus": 1, "seq": 1024, "micro_batch": 1, "method": "qlora",
    "framework": "transformers", "optimizer": "adamw_8bit",
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "gigabytes"),
    [
        # Lightning-AI/litgpt tutorials/resource-tables.md at 26857050, A100 40 GB.
        (LITGPT, 21.30),
        ({**LITGPT, "micro_batch": 2}, 29.07),
        ({**LITGPT, "method": "qlora"}, 14.14),
        ({**LITGPT, "model": "phi-1.5", "params_b": 1.3, "seq": 1044, "micro_batch": 4}, 10.68),
        ({**LITGPT, "gpus": 2, "micro_batch": 4}, 23.39),
        # DaoyuanLi2816/can-i-finetune-this at 053ce9e1 (MIT), GiB allocated.
        (CANIFT, 4.0413 * 1.0737),
        ({**CANIFT, "seq": 2048}, 6.5324 * 1.0737),
        ({**CANIFT, "recompute": "none"}, 9.3413 * 1.0737),
    ],
)
def test_published_peaks_of_fine_tuning(fields: dict[str, Any], gigabytes: float) -> None:
    assert predict(fields)["peak_memory_gib"] * 1.0737 == pytest.approx(gigabytes, rel=0.08)


def test_what_ran_out_of_memory_is_not_called_fitting() -> None:
    # The same page: these three ended with "OOM" on 40 GB.
    assert predict(LITGPT)["fits"]
    assert not predict({**LITGPT, "micro_batch": 4})["fits"]
    assert not predict({**LITGPT, "params_b": 13, "micro_batch": 2})["fits"]
    assert not predict({**LITGPT, "params_b": 13, "gpus": 2})["fits"]


def test_the_need_is_the_peak_and_a_margin_for_what_is_not_known() -> None:
    shape = understand(LITGPT).shape
    use = memory(shape, MEGATRON)
    # What the allocator holds back and doesn't need is given back before a run ends for want of it.
    context = DEFAULT_MEMORY.context_gib * GIB
    assert use.needed == pytest.approx(use.allocated * (1 + DEFAULT_MEMORY.fragmentation) + context + use.margin)
    assert use.needed - use.margin < use.device == use.reserved + context
    certain = dataclasses.replace(use, moving_error=0.0)
    assert 0 < certain.margin == pytest.approx(1.2816 * 0.03 * use.state)
    assert use.margin > certain.margin
    assert sum(getattr(use, part) for part in PARTS) == use.allocated


def test_a_name_and_a_size_apart_make_one_model() -> None:
    assert understand(LITGPT).shape.params == pytest.approx(6.738e9, rel=1e-3)
    assert understand({**LITGPT, "params_b": 13}).shape.params == pytest.approx(13.016e9, rel=1e-3)
    # A name that nobody knows is no reason to refuse where the size is stated; without a size it is.
    assert understand({**LITGPT, "model": "our-own"}).shape.params == pytest.approx(7e9, rel=0.1)
    with pytest.raises(InputError, match="unknown model 'our-own'"):
        understand({**LITGPT, "model": "our-own", "params_b": None})


def test_frozen_weights_spare_inputs_and_four_bits_spare_weights() -> None:
    full = predict({**LITGPT, "method": "full", "optimizer": "adamw", "recompute": "none"})
    lora, qlora = predict(LITGPT), predict({**LITGPT, "method": "qlora"})
    assert lora["activation_gib"] < full["activation_gib"] * 1.01
    assert qlora["activation_gib"] > lora["activation_gib"]
    assert qlora["model_state_gib"] < lora["model_state_gib"] / 3 < full["model_state_gib"]


def test_averages_in_paged_memory_are_not_on_the_gpu() -> None:
    paged = predict({**LITGPT, "method": "full"})
    here = predict({**LITGPT, "method": "full", "optimizer": "adamw"})
    assert here["model_state_gib"] == pytest.approx(2 * paged["model_state_gib"])


def test_selective_recomputation_keeps_products_and_attention_all_or_every_second() -> None:
    layout = Layout(micro_batch=4, sequence_length=1024)
    tokens = 4 * 1024 * 2
    products = tokens * (3 * 512 + 2048 + 2 * 512)
    both = tokens * (512 + 512)
    assert layer_activation_bytes(GPT, layout, "selective") == both + products
    halved = dataclasses.replace(layout, saves_every_second_product=True)
    assert layer_activation_bytes(GPT, halved, "selective") == both + products / 2


def test_a_layer_is_rebuilt_when_the_logits_are_gone() -> None:
    layout = dataclasses.replace(MEGATRON, recompute="full")
    use = memory(GPT, layout)
    assert use.activations == pytest.approx(12 * 2 * SBH + 2 * 2 * SBH)
    tiny = dataclasses.replace(GPT, vocab=8)
    rebuilt = layer_activation_bytes(tiny, MEGATRON, "none") - 2 * SBH - logits_bytes(tiny, layout)
    assert memory(tiny, layout).activations == pytest.approx(14 * 2 * SBH + rebuilt)


def test_grouped_experts_have_four_more_workspaces() -> None:
    # Golden values differ by 112 and 16 MiB on H100 and A100 between cases with and without --moe-grouped-gemm.
    for hopper, each in ((True, 32), (False, 4)):
        layout = dataclasses.replace(MEGATRON, hopper=hopper)
        apart = dataclasses.replace(layout, grouped_experts=False)
        assert workspace_bytes(layout, experts=True) - workspace_bytes(apart, experts=True) == 4 * each * MIB
        assert workspace_bytes(layout) == workspace_bytes(apart)


def test_a_deferred_head_keeps_logits_gradients_and_a_short_last_stage_fewer_parameters() -> None:
    golden = predict({**CI_ROW, "tp": 2, "pp": 2, "sequence_parallel": False, "deferred_head": True})
    assert golden["peak_memory_gib"] * 1024 == pytest.approx(1765.5, rel=0.05)
    even, short = (predict({**CI_ROW, "pp": 4, "last_stage_layers": layers}) for layers in (None, 1))
    layer = GPT.layer_params(moe=False) * 18 / 2**30
    assert even["model_state_gib"] - short["model_state_gib"] == pytest.approx(2 * layer, rel=1e-3)


@pytest.mark.parametrize("row", [64, 768, 4096, 11008, 14336])
def test_four_bit_weights_are_counted_as_the_trainer_stores_them(row: int) -> None:
    """QLoRA's base: codes, a byte a block's scale, and eight a row, of which an eighth is a whole number of blocks."""
    blocks = next(row // size for size in (64, 32, 16, 8, 4, 2) if row % (8 * size) == 0)
    assert four_bit_bytes(row) * row == pytest.approx(row / 2 + blocks + 8)


@pytest.mark.parametrize("name", ["codellama-34b", "mixtral-8x7b", "gemma-2-9b", "exaone-3.5-7.8b"])
def test_what_a_search_asks_first_is_never_more_than_a_ranks_memory(name: str) -> None:
    """Its margin was, by up to 1.4%: of the worst moment's activations, which need not be all that layers keep."""
    shape, ours = shape_of_known(name), Layout(library="trainyard", engine="torch", lora_targets=("down_proj",))
    choices = itertools.product(
        ("none", "selective"), ("full", "qlora"), (1, 4), (1, 8), (1, 16), (512, 4096), ("bf16", "fp32")
    )
    for recompute, method, pipeline, shards, count, length, precision in choices:
        layout = dataclasses.replace(
            ours,
            **{"recompute": recompute, "method": method, "pipeline": pipeline, "sequence_length": length},
            **{"micro_batch": 8 if length == 512 else 1, "precision": precision, "zero_stage": 3 if shards > 1 else 0},
            **{"shard_degree": shards, "data_parallel": shards, "num_micro_batches": count},
        )
        assert least_memory(shape, layout).needed < memory(shape, layout).needed


def test_queries_without_a_bottleneck_are_projected_at_once() -> None:
    """DeepSeek-V2-Lite's configuration says `q_lora_rank: null`."""
    sizes = {"model_type": "deepseek_v2", "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 27}
    lite = shape_from_config(sizes | {"q_lora_rank": None})
    assert lite.q_lora_rank == 0
    queries, down, up, out = 2048 * 16 * (128 + 64), 2048 * (512 + 64) + 512, 512 * 16 * (128 + 128), 16 * 128 * 2048
    assert lite.attention_params == queries + down + up + out


LLAMA_2: dict[str, Any] = {
    "model": "Llama 2", "params_b": 7, "gpu": "A100", "gpu_mem_gb": 40, "gpus": 1, "seq": 1304, "micro_batch": 1,
    "precision": "bf16", "method": "lora", "framework": "litgpt",
}  # fmt: skip


@pytest.mark.parametrize(
    ("adapter", "quantized", "gb"), [("prefix", False, 19.98), ("scale", False, 25.51), ("scale", True, 18.3)]
)
def test_adapters_keep_what_their_gradients_need(adapter: str, quantized: bool, gb: float) -> None:
    # litgpt, tutorials/resource-tables.md: LLaMA-Adapter of both versions, Llama 2 7B.
    answer = predict(LLAMA_2 | {"adapter": adapter, "method": "qlora" if quantized else "lora"})
    assert answer["peak_memory_gib"] * 1.073741824 == pytest.approx(gb, rel=0.03)
    with pytest.raises(InputError, match="adapter: must be one of lora, prefix, scale"):
        predict(LLAMA_2 | {"adapter": "prompt"})


def test_a_plain_loops_optimizer_step_can_be_the_peak() -> None:
    tiny = LLAMA_2 | {"model": "tiny-llama", "params_b": None, "method": "full", "seq": 128, "gpu_mem_gb": None}
    question = understand(tiny)
    assert question.layout.optimizer == "adamw", "who has the room doesn't page"
    use = memory(question.shape, question.layout)
    # Weights, gradients, both moments and the roots of one, of 2 bytes each.
    assert use.allocated - use.workspace == pytest.approx(5 * 2 * question.shape.params, rel=1e-4)
    assert use.allocated > sum(getattr(use, part) for part in PARTS)
    assert understand(LLAMA_2 | {"method": "full"}).layout.optimizer == "adamw_paged", "13.5 GB x 5 of 40"


def test_a_loss_that_stays_in_fp16() -> None:
    four_bit = {"model": "Qwen-7B", "params_b": None, "method": "qlora", "framework": "transformers", "seq": 4096}
    gptq, nf4 = (understand(LLAMA_2 | four_bit | {"quantization": kind}) for kind in ("gptq", "nf4"))
    elements = 4096 * gptq.shape.vocab
    assert logits_bytes(gptq.shape, gptq.layout) == 8 * elements
    assert logits_bytes(nf4.shape, nf4.layout) == 16 * elements


TUNING: dict[str, Any] = {
    "layers": 40, "hidden": 2304, "ffn": 9216, "gated_mlp": True, "heads": 36, "vocab": 49152, "tied_embeddings": True,
    "seq": 4096, "gpu": "A100", "gpus": 1, "framework": "transformers", "recompute": "full",
}  # fmt: skip
"""PowerLM 3B, as published tuning benchmarks ran it (benchmarks/data/planner_unseen.csv)."""


def test_gradients_of_a_step_of_one_micro_batch_come_when_the_logits_have_gone() -> None:
    # 8 sequences: the logits decide; more micro-batches find the sums of those before.
    one, two = (understand(TUNING | {"micro_batch": 8, "global_batch": batch}) for batch in (8, 16))
    alone, summed = memory(one.shape, one.layout), memory(two.shape, two.layout)
    assert summed.allocated - alone.allocated == alone.gradients == pytest.approx(2 * one.shape.params, rel=1e-3)
    # One sequence: the optimizer's step decides, of 2 + 2 + 4 bytes a parameter and the moments' roots.
    small = memory(one.shape, dataclasses.replace(one.layout, micro_batch=1))
    assert small.allocated == pytest.approx(10 * one.shape.params, rel=0.01)
    # No vocabulary to speak of, and an optimizer that makes nothing: the last layer stands beside all gradients.
    bare, eight_bits = (
        dataclasses.replace(one.shape, vocab=128),
        dataclasses.replace(one.layout, optimizer="adamw_8bit"),
    )
    least = memory(bare, eight_bits)
    assert least.allocated == least.resting + layer_activation_bytes(bare, eight_bits, "none")


def test_four_bits_widen_what_runs_between_layers_unless_fsdp_cuts_it() -> None:
    asked = TUNING | {"method": "qlora", "micro_batch": 4, "vocab": 128}
    alone, cut = understand(asked), understand(asked | {"gpus": 2, "sharding": "zero3"})
    tokens = 4 * 4096 * 2304
    assert layer_activation_bytes(alone.shape, alone.layout, "full") == 4 * tokens
    assert layer_activation_bytes(cut.shape, cut.layout, "full") == 2 * tokens
    assert memory(cut.shape, cut.layout).parameters < memory(alone.shape, alone.layout).parameters / 2


def test_a_loss_in_parts_never_has_all_its_logits() -> None:
    asked = {
        "model": "llama-3.1-8b",
        "gpu": "H200",
        "gpus": 8,
        "seq": 65536,
        "micro_batch": 1,
        "framework": "DeepSpeed",
    }
    chunked, whole = understand(asked | {"loss_chunk_tokens": 2048}), understand(asked)
    assert logits_bytes(whole.shape, whole.layout) == 65536 * 128256 * 14
    parts = 2048 * 128256 * 8 + 4 * 128256 * 4096 + 65536 * 4096 * 2
    assert logits_bytes(chunked.shape, chunked.layout) == parts


SEVEN: dict[str, Any] = {
    "model": "llama-2-7b", "gpu": "A100", "gpus": 8, "seq": 4096, "micro_batch": 4, "sharding": "zero3",
    "recompute": "full", "framework": "PyTorch FSDP", "framework_version": "2025-03",
}  # fmt: skip


CORE = {"framework": "Megatron-Core", "sharding": "zero1"}


def _layout_of(**fields: Any) -> Layout:
    return understand(SEVEN | fields).layout


@pytest.mark.parametrize(
    ("fields", "bytes_"),
    [
        ({}, (4, 4, 8, 2)),
        ({"master_weights": "none"}, (2, 2, 4, 0)),
        ({"master_weights": "copy"}, (2, 2, 12, 0)),
        ({"framework": "transformers"}, (2, 2, 4, 0)),
        ({"framework": "transformers", "master_weights": "weights"}, (4, 4, 8, 2)),
        # FSDP gathers fp32, of which autocast makes 16 bits.
        ({"framework": "transformers", "autocast": True}, (4, 4, 8, 6)),
        ({"autocast": True, "sharding": "none"}, (4, 4, 8, 2)),
        ({"framework": "PaddlePaddle", "precision": "fp16"}, (2, 2, 12, 0)),
        ({"framework": "PaddlePaddle, O2", "precision": "fp16"}, (2, 2, 12, 0)),
        ({"framework": "PaddlePaddle (AMP O1)", "precision": "fp16"}, (4, 4, 8, 6)),
        ({"framework": "PaddlePaddle", "autocast": True}, (4, 4, 8, 6)),
        ({"framework": "PaddlePaddle (AMP O1)", "master_weights": "copy"}, (2, 2, 12, 0)),
        ({"framework": "Megatron-Core", "sharding": "zero1", "master_weights": "copy"}, (2, 4, 12, 0)),
        # torch's loss scaler refuses fp16 gradients: transformers' loop has fp32 weights there, and autocast.
        ({"framework": "transformers", "precision": "fp16"}, (4, 4, 8, 6)),
        ({"framework": "transformers", "precision": "fp16", "master_weights": "weights"}, (4, 4, 8, 6)),
        ({"framework": "transformers", "precision": "fp16", "autocast": False}, (2, 2, 4, 0)),
        ({"framework": "transformers", "precision": "fp16", "method": "lora"}, (2, 2, 4, 0)),
        ({"framework": "litgpt", "precision": "fp16"}, (2, 2, 4, 0)),
        ({"framework": "transformers, DeepSpeed", "precision": "fp16"}, (2, 2, 12, 0)),
        # A byte for each average, whatever the weights' type.
        ({"framework": "transformers", "optimizer": "adamw_8bit"}, (2, 2, 2.03125, 0)),
        ({"master_weights": "none", "precision": "fp32"}, (4, 4, 8, 0)),
        # fp32 weights have fp32 gradients; what is stated is what travels.
        ({"gradient_precision": "bf16", "moment_precision": "bf16"}, (4, 4, 4, 2)),
        ({"master_weights": "none", "gradient_precision": "fp32", "moment_precision": "fp32"}, (2, 4, 8, 0)),
        ({"master_weights": "copy", "gradient_precision": "fp32", "moment_precision": "fp8"}, (2, 4, 6, 0)),
        ({"master_weights": "copy", "gradient_precision": "bf16"}, (2, 2, 12, 0)),
        (CORE, (2, 4, 12, 0)),
        # The update reads fp32 copies of narrow gradients, or, where its moments are narrow, these themselves; of the
        # weights' copies it then keeps what bf16 has cut off, since Transformer Engine 2.1.
        (CORE | {"gradient_precision": "bf16"}, (2, 4, 12, 0)),
        (CORE | {"gradient_precision": "bf16", "moment_precision": "bf16"}, (2, 2, 6, 0)),
        (CORE | {"moment_precision": "fp8"}, (2, 4, 4, 0)),
        (CORE | {"moment_precision": "bf16", "framework_version": "2024-12"}, (2, 4, 8, 0)),
        (CORE | {"precision": "fp16", "moment_precision": "fp16"}, (2, 2, 8, 0)),
        (CORE | {"moment_precision": "bf16", "optimizer": "muon"}, (2, 4, 6, 0)),
        (CORE | {"gradient_precision": "bf16", "moment_precision": "bf16", "optimizer": "muon"}, (2, 4, 6, 0)),
        (CORE | {"master_weights": "none", "gradient_precision": "bf16"}, (2, 2, 4, 0)),
        (CORE | {"gradient_precision": "bf16", "moment_precision": "fp32"}, (2, 4, 12, 0)),
        (CORE | {"precision": "fp16", "gradient_precision": "fp32"}, (2, 4, 12, 0)),
        (CORE | {"precision": "fp8", "moment_precision": "fp8"}, (2, 4, 6, 0)),
        (CORE | {"precision": "fp8", "gradient_precision": "bf16", "moment_precision": "fp8"}, (2, 4, 6, 0)),
        # Without its fp32 sums it has no copies of the weights.
        ({"framework": "nanotron", "gradient_precision": "bf16"}, (2, 2, 4, 0)),
        ({"framework": "nanotron", "gradient_precision": "fp32", "moment_precision": "bf16"}, (2, 6, 8, 0)),
        ({"optimizer": "muon", "moment_precision": "bf16"}, (4, 4, 2, 2)),
        ({"precision": "fp32", "moment_precision": "bf16"}, (4, 4, 4, 0)),
    ],
)
def test_who_trains_says_what_is_in_fp32(fields: dict[str, Any], bytes_: tuple[float, ...]) -> None:
    each = state_bytes(_layout_of(**fields))
    assert (each.parameter, each.gradient, each.optimizer, each.compute_copy) == bytes_


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"master_weights": "copy"}, False),
        ({"master_weights": "copy", "method": "lora"}, True),
        ({"master_weights": "weights", "method": "qlora"}, True),
        ({"master_weights": "none", "method": "lora"}, False),
        ({"master_weights": "copy", "precision": "fp32"}, True),
        ({"master_weights": "weights", "precision": "fp32"}, False),
        ({"method": "lora"}, False),
    ],
)
def test_weights_that_nothing_counts_as_stated_are_said_to_be_ignored(fields: dict[str, Any], ignored: bool) -> None:
    assert predict(SEVEN | fields).get("ignored_fields", []) == ["master_weights"] * ignored


@pytest.mark.parametrize(
    ("fields", "resting", "peak"),
    [
        ({}, 2 + 4 + 12 / 8, 2 + 4 + 12 / 8),
        # Copies of an eighth in fp32, from the step to the next one's begin.
        ({"gradient_precision": "bf16"}, 2 + 2 + 12 / 8 + 4 / 8, 2 + 2 + 12 / 8),
        ({"gradient_precision": "bf16", "moment_precision": "bf16"}, 2 + 2 + 6 / 8, 2 + 2 + 6 / 8),
        ({"gradient_precision": "bf16", "master_weights": "none"}, 2 + 2 + 4 / 8, 2 + 2 + 4 / 8),
        ({"precision": "fp16"}, 2 + 2 + 12 / 8 + 4 / 8, 2 + 2 + 12 / 8),
        ({"gradient_precision": "bf16", "offload": "cpu"}, 2 + 2, 2 + 2),
        ({"precision": "fp16", "gradient_precision": "fp16"}, 2 + 2 + 12 / 8 + 4 / 8, 2 + 2 + 12 / 8),
        ({"precision": "fp16", "gradient_precision": "fp32"}, 2 + 4 + 12 / 8, 2 + 4 + 12 / 8),
    ],
)
def test_narrow_gradients_of_megatron(fields: dict[str, Any], resting: float, peak: float) -> None:
    """Bytes a parameter of the state between steps, and at the peak beside activations."""
    question = understand(SEVEN | CORE | fields)
    found = memory(question.shape, question.layout)
    state = found.parameters + found.gradients + found.optimizer
    assert state / question.shape.params == pytest.approx(peak, rel=1e-3)
    assert found.state / question.shape.params == pytest.approx(resting, rel=1e-3)


def test_fsdps_gradients_on_their_way_are_of_the_type_that_is_summed() -> None:
    request = SEVEN | {"loss_chunk_tokens": 256}  # else they come when larger logits have gone
    wide, narrow = (
        memory(question.shape, question.layout)
        for question in (understand(request | {"gradient_precision": word}) for word in ("fp32", "bf16"))
    )
    assert narrow.buffers < wide.buffers and narrow.state == wide.state


def test_whole_matrices_beside_adapters_have_averages_of_the_stated_type() -> None:
    tuned = SEVEN | {"method": "lora", "trains_vocabulary": True}
    usual, narrow, wide = (
        memory(question.shape, question.layout).optimizer
        for question in (understand(tuned | {"moment_precision": word}) for word in (None, "bf16", "fp32"))
    )
    vocabulary = 2 * 32000 * 4096
    assert wide - usual == pytest.approx(4 * vocabulary)
    assert wide == pytest.approx(2 * narrow)


def test_stated_gradients_are_what_travels() -> None:
    replicated = ({"sharding": "none"}, {"data_replicate": 32})  # DDP, and FSDP in groups
    for engine in ({}, *replicated, CORE | {"sharding": "none"}, CORE, {"framework": "transformers, DeepSpeed"}):
        request = SEVEN | {"gpus": 256, "global_batch": 1024} | engine
        wide = predict(request | {"gradient_precision": "fp32"})["step_seconds"]
        assert predict(request | {"gradient_precision": "bf16"})["step_seconds"] < wide


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"gradient_precision": "fp16"},
            "gradient_precision: must be fp32 or bf16 (given: 'fp16'; precision: bf16, which is assumed)",
        ),
        (
            {"gradient_precision": "fp8", "precision": "fp8"},
            "gradient_precision: must be fp32 or bf16 (given: 'fp8'; precision: fp8)",
        ),
        ({"gradient_precision": "bf16", "precision": "fp16"}, "gradient_precision: must be fp32 or fp16 (given"),
        ({"gradient_precision": "bf16", "precision": "fp32"}, "gradient_precision: must be fp32 (given: 'bf16'"),
        ({"moment_precision": 16}, "moment_precision: must be a text (given: 16)"),
        ({"moment_precision": "int4"}, "moment_precision: must be one of fp32, bf16, fp16, fp8 (given: 'int4')"),
    ],
)
def test_types_that_nothing_gives_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        predict(SEVEN | fields)


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"gradient_precision": "bf16", "method": "lora"}, ["gradient_precision"]),
        ({"moment_precision": "bf16", "method": "lora"}, []),
        ({"moment_precision": "bf16", "optimizer": "adafactor"}, ["moment_precision"]),
        ({"moment_precision": "bf16", "optimizer": "muon"}, []),
        ({"moment_precision": "bf16", "gradient_precision": "fp64", "precision": "fp64"}, None),
        # fp32 weights have fp32 gradients, and alone a rank sends none.
        ({"gradient_precision": "bf16", "gpus": 1, "framework": "torchtitan"}, ["gradient_precision"]),
        ({"gradient_precision": "bf16", "gpus": 1, "framework": "Megatron-Core"}, []),
    ],
)
def test_types_that_nothing_reads_are_said_to_be_ignored(fields: dict[str, Any], ignored: list[str] | None) -> None:
    names = ["gradient_precision", "moment_precision"] if ignored is None else ignored
    answer = predict(SEVEN | fields)
    assert answer.pop("ignored_fields", []) == names
    if names:
        assert answer == predict(SEVEN | fields | dict.fromkeys(names)), "and they change nothing"


def test_types_are_spelled_as_the_precision_is() -> None:
    spelled = SEVEN | {"gradient_precision": "torch.bfloat16", "moment_precision": "Float16"}
    assert predict(spelled) == predict(SEVEN | {"gradient_precision": "bf16", "moment_precision": "fp16"})
    assert predict(SEVEN | {"gradient_precision": "", "moment_precision": ""}) == predict(SEVEN)


def test_autocast_keeps_what_flows_between_layers_in_fp32() -> None:
    shape = understand(SEVEN).shape
    narrow, wide = _layout_of(), _layout_of(autocast=True)
    tokens = 4 * 4096
    assert layer_activation_bytes(shape, narrow, "full") == tokens * 4096 * 2
    assert layer_activation_bytes(shape, wide, "full") == tokens * 4096 * 4
    # Two norms: an fp32 input and normalized value, and narrow copies for three products, and for two.
    copied, by_parts = 2 * (2 * 4) + 5 * 2, 2 * 4 * 2
    more = layer_activation_bytes(shape, wide, "none") - layer_activation_bytes(shape, narrow, "none")
    assert more == tokens * 4096 * (copied - by_parts)
    # So are the embedding's output, and what the head reads.
    kept = memory(shape, _layout_of(autocast=True, recompute="none")).activations
    layers = 32 * layer_activation_bytes(shape, wide, "none")
    assert kept == pytest.approx(layers + 2 * tokens * 4096 * 4)


def test_autocast_over_frozen_weights_has_these_in_fp32() -> None:
    adapted = {"method": "lora", "framework": "transformers"}
    shape = understand(SEVEN | adapted).shape
    narrow, wide = (memory(shape, _layout_of(**adapted, autocast=flag)) for flag in (False, True))
    assert wide.parameters - narrow.parameters == pytest.approx(2 * shape.params / 8, rel=1e-3)
    # Layers are gathered in fp32, each product's narrow copy beside them.
    assert wide.buffers == pytest.approx(3 * narrow.buffers)
    # Of what is kept without recomputation two RMS norms have both of their tensors twice as wide.
    layers = [layer_activation_bytes(shape, _layout_of(**adapted, autocast=flag), "none") for flag in (False, True)]
    assert layers[1] - layers[0] == 4 * 4096 * 2 * 4 * 4096


def test_autocast_moves_fp32_between_layers_and_between_gpus() -> None:
    shape = understand(SEVEN).shape
    far = {"gpus": 16, "gpus_per_node": 1, "interconnect": "1 Gb/s per GPU"}
    question = understand(SEVEN | far)
    narrow, wide = (
        timing.step_time(shape, _layout_of(**far, autocast=flag), question.device, question.links)
        for flag in (False, True)
    )
    assert wide.total - wide.communication > narrow.total - narrow.communication
    # Weights come twice, of 4 bytes for 2; gradients, of 4, once.
    assert wide.communication / narrow.communication == pytest.approx((2 * 4 + 4) / (2 * 2 + 4), rel=0.03)


def test_adapters_of_the_feed_forward_block_keep_what_they_read() -> None:
    shape = understand(SEVEN).shape
    tuned = {"method": "lora", "framework": "transformers"}
    attention, every = (layer_activation_bytes(shape, _layout_of(**tuned, lora_targets=n), "none") for n in (4, 7))
    assert every - attention == 4 * 4096 * 2 * (4096 + 11008)


def _peak_gib(**fields: Any) -> float:
    return float(predict(SEVEN | fields)["peak_memory_gib"])


def test_checkpoints_in_the_hosts_memory_are_not_on_the_gpu() -> None:
    kept = 32 * 4 * 4096 * 4096 * 2 / GIB
    there, away = (_peak_gib(offload_checkpoints=place, loss_chunk_tokens=512) for place in ("none", "cpu"))
    # One layer's input stands with what is computed again.
    assert there - away == pytest.approx(kept * 31 / 32)


@pytest.mark.parametrize("seconds", [0.0, 10.0])
def test_and_take_time_where_layers_do_not_hide_them(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = predict(SEVEN | {"offload_checkpoints": "none"})["step_seconds"]
    rate = math.inf if not seconds else 32 * 4 * 4096 * 4096 * 2 / seconds
    monkeypatch.setattr(exchanges, "PCIE_BYTES_PER_SECOND", rate)
    monkeypatch.setattr(updates, "PCIE_BYTES_PER_SECOND", rate)
    monkeypatch.setattr(timing, "PCIE_BYTES_PER_SECOND", rate)
    more = predict(SEVEN | {"offload_checkpoints": "cpu"})["step_seconds"] - usual
    # Out and back, beside what a pass computes.
    assert 2 * seconds - usual < more <= 2 * seconds if seconds else more == pytest.approx(0.0)


@pytest.mark.parametrize("gpus", [1, 8])
def test_fsdps_offload_leaves_two_layers_and_the_vocabulary_on_a_gpu(gpus: int) -> None:
    question = understand(
        SEVEN | {"gpus": gpus, "loss_chunk_tokens": 512, "offload": "cpu", "offload_parameters": "cpu"}
    )
    use = memory(question.shape, question.layout)
    assert use.state == 0
    gathered = 2 * (2 * question.shape.params / 32 + 2 * 32000 * 4096)
    # Its gradients, in fp32, on their way: those of the vocabulary's two matrices are the largest.
    assert use.buffers == pytest.approx(gathered + 2 * 32000 * 4096 * 4 - use.logits, rel=0.01)


@pytest.mark.parametrize("framework", ["PyTorch FSDP2", "PyTorch FSDP2 (transformers)", "torchtune", "litgpt"])
def test_whoevers_loop_it_is_fsdps_offload_keeps_no_state_on_a_gpu(framework: str) -> None:
    """torch's CPUOffloadPolicy: gradients are copied to the host as they are reduced."""
    asked = SEVEN | {"framework": framework, "offload": "cpu"}
    question = understand(asked)
    assert memory(question.shape, question.layout).state == 0
    # Without its weights' offload nothing else leaves.
    question = understand(asked | {"offload_parameters": "none"})
    assert memory(question.shape, question.layout).gradients > 0


def test_experts_in_a_latent_are_sent_that() -> None:
    """Nemotron 3: 22 experts a token, of a latent of 1,024 in hidden states of 4,096."""
    shape = shape_of_known("nemotron-3-super")
    layout = Layout(engine="megatron", micro_batch=1, sequence_length=4096)
    wide = dataclasses.replace(shape, latent=0)
    less = layer_activation_bytes(wide, layout, "none") - layer_activation_bytes(shape, layout, "none")
    sent = 2 * 22 * (4096 - 1024) - 2 * 2 * 1024
    assert less == pytest.approx(4096 * 2 * sent * 40 / 88)
    gathering = dataclasses.replace(layout, gathers_tokens=True, expert=8, data_parallel=8)
    assert gathered_tokens_bytes(shape, gathering) == 8 * 4096 * 1024 * 2


DEEP: dict[str, Any] = {
    "model": "deepseek-v3", "gpu": "H100", "gpus": 1024, "pp": 8, "ep": 64, "micro_batch": 1,
    "framework": "Megatron-Core", "recompute": "selective",
}  # fmt: skip


def _kept_and_seconds(modules: object) -> tuple[float, float]:
    asked = DEEP | {"recompute_modules": modules, "capacity_factor": 1}
    question = understand(asked)
    kept = layer_activation_bytes(question.shape, question.layout, "selective")
    return kept / question.layout.tokens_per_micro_batch / 2, float(predict(asked)["step_seconds"])


@pytest.mark.parametrize(
    ("module", "elements"),
    [
        # Two norms' outputs a layer; of 61 layers three are dense, of 18,432, whose gated block keeps three tensors.
        ("layernorm", 2 * 7168),
        ("mlp", 3 * 18432 * 3 / 61),
        # Eight experts a token of 2,048, and a shared one; the copies sent and received; the router's fp32 scores.
        ("moe_act", 8 * 2048 * 58 / 61),
        ("shared_experts", 3 * 2048 * 58 / 61),
        ("moe", (8 * 3 * 2048 + 3 * 2048 + 2 * 8 * 7168 + 256 * 4) * 58 / 61),
        # Queries and keys of 128 heads of 128 and 64, values of 128.
        ("mla_up_proj", 128 * (2 * (128 + 64) + 128)),
    ],
)
def test_megatrons_selection_makes_again_what_it_is_told(module: str, elements: float) -> None:
    kept, seconds = _kept_and_seconds("core_attn")
    less, longer = _kept_and_seconds(["core_attn", module])
    assert kept - less == pytest.approx(elements)
    # What is element-wise alone has no seconds of its own.
    assert (longer > seconds) == (module in ("mlp", "moe", "shared_experts", "mla_up_proj"))


def test_recomputed_experts_exchange_their_tokens_again() -> None:
    moved = [
        step_time(question.shape, question.layout, question.device, question.links).expert_communication
        for question in (
            understand(DEEP | {"mtp_layers": 0, "recompute_modules": name}) for name in ("core_attn", "moe")
        )
    ]
    assert moved[1] == pytest.approx(1.5 * moved[0])


def test_who_names_modules_means_the_selection_and_without_the_core_its_matrix_stays() -> None:
    asked = {name: value for name, value in DEEP.items() if name != "recompute"}
    assert understand(asked | {"recompute_modules": "layernorm moe_act"}).layout.recompute == "selective"
    told = {"model": "llama-2-7b", "gpus": 8, "tp": 8, "attention": "unfused", "recompute": "selective"}
    question, other = (
        understand(DEEP | told | {"pp": 1, "ep": 1, "recompute_modules": name}) for name in ("core_attn", "mlp")
    )
    core, kept = (layer_activation_bytes(one.shape, one.layout, "selective") for one in (question, other))
    tokens = question.layout.tokens_per_micro_batch
    assert kept - core == pytest.approx(tokens * 2 * (32 * question.layout.sequence_length - 3 * 11008) / 8)


def test_tensor_ranks_may_each_have_all_logits() -> None:
    asked = {"tp": 4, "sharding": "none", "recompute": "none"}
    shared, whole = _layout_of(**asked), _layout_of(**asked, parallel_loss=False)
    shape = understand(SEVEN).shape
    assert logits_bytes(shape, whole) == 4 * logits_bytes(shape, shared)
    chunk = dataclasses.replace(shared, loss_chunk_tokens=512)
    more = logits_bytes(shape, dataclasses.replace(chunk, whole_logits=True)) - logits_bytes(shape, chunk)
    assert more == pytest.approx(512 * 32000 * (2 * 2 + 4) * 3 / 4), "of a chunk; the head's gradients stay cut"


@pytest.mark.parametrize("pp", [1, 2])
def test_whole_logits_are_gathered_once_a_micro_batch(pp: int) -> None:
    """Of 16 bits, to the last stage's tensor ranks alone."""
    asked = {"tp": 4, "pp": pp, "gpus": 8, "sharding": "none", "recompute": "none", "global_batch": 16}
    question = understand(SEVEN | asked)
    shape, layout, device, links = question.shape, question.layout, question.device, question.links
    shared, whole = (
        timing.step_time(shape, dataclasses.replace(layout, whole_logits=flag), device, links) for flag in (False, True)
    )
    each = all_gather_seconds(4 * 4096 * 32000 * 2, group(4, 1, 8), links)
    assert whole.communication - shared.communication == pytest.approx(layout.num_micro_batches * each)
    # The loss is of four times as many.
    assert whole.total - whole.communication > shared.total - shared.communication


def test_compiled_layers_keep_what_products_read() -> None:
    shape = understand(SEVEN).shape
    eager, compiled = _layout_of(), _layout_of(framework="PyTorch FSDP, torch.compile")
    assert not _layout_of(framework="PyTorch FSDP, no torch.compile").compiled
    # Whoever cuts its weights; Megatron's layers are its own.
    compiles = ("transformers", "DeepSpeed (transformers)", "Megatron-Core")
    assert [_layout_of(framework=f"{name}, torch.compile").compiled for name in compiles] == [True, True, False]
    # Two units less of each norm, and the activated gate.
    less = layer_activation_bytes(shape, eager, "none") - layer_activation_bytes(shape, compiled, "none")
    assert less == 4 * 4096 * 2 * (2 * 2 * 4096 + 11008)


@pytest.mark.parametrize(
    ("framework", "bytes_"),
    [("PyTorch FSDP2", 14), ("torchtitan", 6), ("torchtitan (not compiled)", 14), ("PyTorch FSDP2 (compiled)", 6)],
)
def test_a_loss_is_compiled_where_somebody_says_so(framework: str, bytes_: int) -> None:
    question = understand(SEVEN | {"framework": framework})
    assert logits_bytes(question.shape, question.layout) == 4 * 4096 * 32000 * bytes_


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"autocast": True, "precision": "fp32"}, "autocast: makes fp32 narrower; set precision to bf16 or fp16"),
        ({"autocast": True, "master_weights": "none"}, "master_weights none: autocast has weights in fp32"),
        ({"master_weights": "some"}, "master_weights: must be one of none, weights, copy"),
        (
            {"offload_checkpoints": "cpu", "recompute": "none"},
            "offload_checkpoints cpu: is of what full recomputation keeps; set recompute to full (given: none)",
        ),
        (
            {"recompute_modules": "mlp"},
            "recompute_modules: are of Megatron's selective recomputation (framework: PyTorch",
        ),
        (
            {"framework": "Megatron-Core", "sharding": "zero1", "recompute_modules": "mlp"},
            "recompute_modules: are of Megatron's selective recomputation (framework: Megatron-Core, recompute: full)",
        ),
        ({"recompute_modules": ["mlps"]}, "recompute_modules: must be of core_attn, layernorm, mla_up_proj, mlp, moe"),
        ({"recompute_modules": 3}, "recompute_modules: must be a text (given: 3)"),
        ({"offload_checkpoints": "nvme"}, "offload_checkpoints: must be one of none, cpu"),
        ({"parallel_loss": "yes"}, "parallel_loss: must be true or false"),
    ],
)
def test_what_contradicts_itself_is_one_line(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        understand(SEVEN | fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("version", "bytes_"), [("2024-09", 2 + 12 / 8), ("2024-06", 14)])
def test_torchtunes_loss_is_in_eight_parts_since_its_release_0_3(version: str, bytes_: float) -> None:
    asked = {"model": "llama-3.1-8b", "gpu": "A100", "gpus": 1, "seq": 2048, "method": "lora", "micro_batch": 2}
    question = understand(asked | {"framework": "torchtune", "framework_version": version})
    assert logits_bytes(question.shape, question.layout) == 2 * 2048 * 128256 * bytes_


FP8 = {
    "model": "llama-3.1-8b",
    "gpu": "H100",
    "gpus": 8,
    "tp": 2,
    "seq": 8192,
    "micro_batch": 1,
    "framework": "megatron",
}


@pytest.mark.parametrize(("framework", "copies"), [("megatron-core", 2), ("NeMo", 0), ("torchtitan", 0)])
def test_fp8s_weights_lie_beside_those_that_are_trained(framework: str, copies: int) -> None:
    """But for embedding and head, of which nothing is in FP8; where the trained ones are in FP8 themselves, not."""
    asked = {**FP8, "framework": framework, "sharding": "zero1", "global_batch": 8}
    narrow, wide = (predict({**asked, "precision": name})["resting_memory_gib"] for name in ("fp8", "bf16"))
    shape = shape_of_known("llama-3.1-8b")
    linears = (shape.params - 2 * shape.vocab * shape.hidden) / 2
    norms = 65 * shape.hidden
    assert (narrow - wide) * 2**30 == pytest.approx(copies * linears, rel=0.001, abs=copies * norms)
    stated = predict({**asked, "precision": "fp8", "fp8_param_gather": True})["resting_memory_gib"]
    assert stated == pytest.approx(wide)


def test_fp8s_products_keep_what_they_read_in_one_byte() -> None:
    """Of a gated block what its last product reads, of a norm what it gives, and the output projection's own input."""
    question = {name: understand({**FP8, "precision": name}) for name in ("fp8", "bf16")}
    shape, layout = question["bf16"].shape, question["bf16"].layout
    kept = {name: layer_activation_bytes(one.shape, one.layout, "none") for name, one in question.items()}
    each = layout.tokens_per_micro_batch / 2  # of tensor ranks, which share sequences too
    saved = each * (2 * shape.hidden + shape.ffn - shape.query_dim)
    assert kept["bf16"] - kept["fp8"] == pytest.approx(saved)
    own = {**FP8, "precision": "fp8", "transformer_engine": False}
    other = understand(own)
    assert layer_activation_bytes(other.shape, other.layout, "none") == pytest.approx(kept["bf16"])


@pytest.mark.parametrize(
    ("words", "inside"),
    [
        ({"framework": "megatron"}, False),
        ({"framework": "megatron", "framework_version": "2025-03"}, False),
        ({"framework": "megatron", "framework_version": "25.09"}, True),
        ({"framework": "Megatron-Bridge"}, True),
        ({"framework": "torchtitan", "framework_version": "2026-01"}, False),
    ],
    ids=str,
)
def test_experts_results_are_kept_until_they_are_weighted_where_their_activation_is(
    words: dict[str, Any], inside: bool
) -> None:
    question = understand({"model": "qwen3-30b-a3b", "gpu": "H100", "gpus": 8, "ep": 8, "micro_batch": 1, **words})
    layout, shape = question.layout, question.shape
    kept, gone = (
        layer_activation_bytes(shape, dataclasses.replace(layout, weighs_inside=there), "none")
        for there in (False, True)
    )
    assert layout.weighs_inside is inside
    uneven = 1 + DEFAULT_MEMORY.load_spread * math.sqrt(7 / 128) if layout.engine == "megatron" else 1.0
    assert kept - gone == pytest.approx(layout.tokens_per_micro_batch * 2 * 8 * uneven * shape.hidden)
