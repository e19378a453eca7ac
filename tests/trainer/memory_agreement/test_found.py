"""What the campaign has found to be off, each held by the smallest job that shows it."""

from dataclasses import replace
from typing import Any

import pytest
from trainer_testing.agreement import FEW, agreement, dry_run_cases, moving

from memory_agreement.campaign import Played, play
from memory_agreement.draws import Drawn
from trainyard import planner
from trainyard.planner.adapters import adapter_outputs
from trainyard.planner.families import shape_from_config
from trainyard.planner.reading import layout_of_resolved

pytestmark = pytest.mark.slow
"""Each traces a step, some seconds: of the campaign itself a few seeds run every time (test_campaign.py)."""

SMALL: dict[str, Any] = {
    **{"num_hidden_layers": 2, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2},
    **{"intermediate_size": 2816, "vocab_size": 50304, "tie_word_embeddings": False, "model_type": "llama"},
}
GPT2 = {"model_type": "gpt2", "n_embd": 1024, "n_layer": 2, "n_head": 8, "n_positions": 8192, "vocab_size": 32000}
CUT = {"data_shard": 4, "tensor": 2}


def test_a_vocabulary_that_tensor_ranks_dont_divide_is_whole_on_each() -> None:
    """A fifth of a rank's state, in a model with large ends, that no plan had."""
    found = agreement(SMALL | {"vocab_size": 50257}, CUT)
    assert found.planned["parameters"] == pytest.approx(found.traced["parameters"], rel=0.005)


def test_learned_positions_are_whole_on_each_tensor_rank() -> None:
    found = agreement(GPT2, CUT)
    untouched = agreement(GPT2 | {"n_positions": 2048}, CUT)
    for side in ("planned", "traced"):
        more = getattr(found, side)["parameters"] - getattr(untouched, side)["parameters"]
        assert more == pytest.approx((8192 - 2048) * 1024 * 4 / 4, rel=0.001)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_without_momentum_keeps_nothing(momentum: float) -> None:
    found = agreement(SMALL, optimizer={"kind": "sgd", "momentum": momentum})
    assert found.planned["optimizer"] == pytest.approx(found.traced["optimizer"], rel=0.01, abs=1e5)


def test_granites_experts_scale_their_logits_so_that_all_of_them_are_there() -> None:
    """Planned as a loss in the head, which was half of what the step needs."""
    experts = {"model_type": "granitemoe", "intermediate_size": 768, "num_local_experts": 16, "num_experts_per_tok": 4}
    planned, traced = moving(agreement(SMALL | experts, micro_batch_size=2, global_batch_size=32))
    assert planned == pytest.approx(traced, rel=0.03)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_next_chunks_logits_are_made_when_the_last_ones_are_gone(precision: str) -> None:
    """In fp32 two chunks' were there at once: a gigabyte of a vocabulary of 128k beside the plan."""
    model = SMALL | {"vocab_size": 128256}
    layout, training = {"data_shard": 8}, {"loss": "chunked", "precision": precision, "micro_batch_size": 2}
    found = agreement(model, layout, **training, global_batch_size=32)
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.03)


@pytest.mark.parametrize("layout", [{"data_shard": 8}, {"data_replicate": 8}])
def test_fp16s_products_in_float32_have_no_narrow_result_beside_them(layout: dict[str, Any]) -> None:
    """The trace had the head's gradient in 16 bits, too, which no GPU has: an eighth of what small steps need."""
    planned, traced = moving(agreement(SMALL, layout, precision="fp16", activation_checkpointing="none"))
    assert planned == pytest.approx(traced, rel=0.01)


def test_eight_bit_adamw_is_traced_where_it_is_not_cut() -> None:
    """FSDP's shards make their state unseen; one process's asked a dry run where a table has its zero."""
    found = agreement(SMALL, {"data_replicate": 8}, optimizer={"kind": "adamw_8bit"})
    assert found.planned["optimizer"] == pytest.approx(found.traced["optimizer"], rel=0.05)


WIDE = {"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 8192, "vocab_size": 102400} | {
    "tie_word_embeddings": True
}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 16, "num_experts_per_tok": 1}


@pytest.mark.parametrize(
    ("kind", "layout", "model"),
    [
        ("adafactor", {"data_shard": 8}, WIDE),
        ("muon", {"data_replicate": 8}, MIXTRAL | {"intermediate_size": 4096}),
    ],
    ids=["adafactor-fsdp", "muon-experts"],
)
def test_updates_of_whole_matrices_can_be_a_steps_worst_moment(
    kind: str, layout: dict[str, Any], model: dict[str, Any]
) -> None:
    """Plans left them out: an eighth of what a wide model's ends need. (Muon's of few layers go to the first ranks.)"""
    training = {"activation_checkpointing": "full", "loss": "chunked", "optimizer": {"kind": kind}}
    found = agreement(SMALL | model, layout, rank=0, **training, global_batch_size=64)
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.03)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_frozen_experts_are_cut_over_the_ranks_that_hold_them_alone(kind: str) -> None:
    """LoRA beside experts on several ranks: the plan had each expert cut over the expert ranks a second time."""
    found = agreement(SMALL | MIXTRAL, {"data_shard": 8, "expert": 4}, adapter=kind)
    assert found.static is not None and abs(found.static) < 0.03


ROWS = SMALL | {"hidden_size": 4096, "num_attention_heads": 32, "num_experts_per_tok": 4, "vocab_size": 16000}
"""Of whose experts nothing counts but what they read and give."""
WEIGHED_WIDE = ROWS | {"model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 256}
WEIGHED_NARROW = ROWS | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 256, "head_dim": 128}
SPREAD = {"data_shard": 8, "expert": 4}


@pytest.mark.parametrize(
    ("model", "layout", "recompute"),
    [
        (WEIGHED_WIDE, None, "full"),
        (WEIGHED_WIDE, None, "none"),
        (WEIGHED_WIDE, SPREAD, "full"),
        (WEIGHED_NARROW, None, "full"),
        (WEIGHED_NARROW, SPREAD, "full"),
    ],
    ids=["wide", "wide-none", "wide-spread", "narrow", "narrow-spread"],
)
def test_experts_results_are_weighted_in_the_routers_type(
    model: dict[str, Any], layout: dict[str, Any] | None, recompute: str
) -> None:
    """Three tensors of all chosen experts' results in float32 where they were planned in 16 bits."""
    training = {"micro_batch_size": 2, "global_batch_size": 16, "activation_checkpointing": recompute}
    planned, traced = moving(agreement(model, layout, **training))
    assert planned == pytest.approx(traced, rel=0.01)


LARGE_LAYERS = SMALL | {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 6, "vocab_size": 32000}


@pytest.mark.parametrize(
    "fsdp",
    [
        {"prefetch_units": 2},
        {"wrap": "size", "min_parameters": 100_000_000},
        {"wrap": "size", "min_parameters": 60_000_000, "prefetch_units": 1},
        {"reshard_after_forward": False},
        {"wrap": "size", "reshard_after_forward": False},
    ],
    ids="-".join,
)
@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.full)])
def test_units_of_fsdp_are_gathered_as_they_are_stated(fsdp: dict[str, Any], method: str) -> None:
    """A unit was taken as one block: a third too little of a model in units of three."""
    layout = {"data_shard": 8, "fsdp": fsdp}
    training = {"micro_batch_size": 1, "global_batch_size": 32, "activation_checkpointing": "full"}
    tuned = None if method == "full" else method
    model = LARGE_LAYERS | {"vocab_size": 4000}  # of few tokens and words what is gathered is the most
    planned, traced = moving(agreement(model, layout, adapter=tuned, sequence_length=256, **training))
    assert planned == pytest.approx(traced, rel=0.04)


def test_adapters_are_gathered_beside_four_bit_weights() -> None:
    """As large as these, of a high rank in fp32: planned as nothing."""
    layout = {"data_shard": 8, "fsdp": {"wrap": "size"}}
    adapts = {"rank": 256, "targets": ("q_proj", "v_proj", "up_proj", "down_proj")}
    training = {"precision": "fp32", "micro_batch_size": 1, "activation_checkpointing": "full"}
    found = agreement(LARGE_LAYERS, layout, adapter="qlora", adapts=adapts, sequence_length=256, **training)
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.03)


def test_the_first_layer_is_gathered_beside_what_the_embedding_was_gathered_into() -> None:
    """The worst moment of few tokens in fp32, where a unit is all of a small model's layers."""
    layout = {"data_shard": 8, "fsdp": {"wrap": "size"}}
    planned, traced = moving(agreement(SMALL, layout, precision="fp32", micro_batch_size=1, global_batch_size=32))
    assert planned == pytest.approx(traced, rel=0.03)


def test_a_loss_that_is_to_be_chunked_is_computed_in_the_head_though_it_is_one_chunk() -> None:
    layout = {"data_shard": 4, "context": 2}  # 1,024 positions a rank, all of a chunk
    found = agreement(SMALL | {"vocab_size": 128256}, layout, loss="chunked", global_batch_size=8)
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.03)


def test_gpt2s_queries_keys_and_values_are_whole_on_each_tensor_rank() -> None:
    """A third of a rank's state that no plan had."""
    found = agreement(GPT2 | {"n_layer": 4, "n_positions": 2048}, {"tensor": 4, "data_shard": 2})
    assert found.static is not None and abs(found.static) < 0.01


@pytest.mark.parametrize("model_type", ["phi3", "glm4", "olmo2"])
def test_fused_matrices_are_whole_on_each_tensor_rank_and_norms_of_all_heads_written_out(model_type: str) -> None:
    """Of Phi-3 twice the state that was planned."""
    found = agreement({**FEW, "model_type": model_type, "intermediate_size": 6144}, {"tensor": 4, "data_shard": 2})
    assert found.static is not None and abs(found.static) < 0.01
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.03)


FEW_TOKENS = SMALL | {"vocab_size": 128256, "num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (FEW_TOKENS | {"tie_word_embeddings": True}, {"data_shard": 2, "context": 4}),
        (FEW_TOKENS | {"tie_word_embeddings": True}, {"data_replicate": 8}),
        (FEW_TOKENS | {"tie_word_embeddings": True}, {"tensor": 2, "context": 4}),
        (FEW_TOKENS, {"tensor": 4, "context": 2}),
        (FEW_TOKENS, {"tensor": 4, "data_replicate": 2}),
    ],
    ids=["tied-fsdp", "tied-ddp", "tied-tensor", "tensor-context", "copies-of-tensor"],
)
def test_the_ends_gradients_can_be_a_steps_worst_moment(model: dict[str, Any], layout: dict[str, Any]) -> None:
    """Both ends' of a tied matrix and their sum; under `tensor` alone the copies that FSDP makes of what isn't sent."""
    training = {"activation_checkpointing": "full", "global_batch_size": 32}
    length = 512 if "data_replicate" in layout and "tensor" not in layout else 2048
    planned, traced = moving(agreement(model, layout, sequence_length=length, **training))
    assert planned == pytest.approx(traced, rel=0.03)


def test_ddp_widens_the_heads_gradient_of_a_loss_in_one_chunk() -> None:
    """A third of such a step: 2 GB of a vocabulary of 128k that is 4,096 wide."""
    training = {"loss": "chunked", "global_batch_size": 8}
    planned, traced = moving(agreement(FEW_TOKENS, {"data_replicate": 8}, sequence_length=512, **training))
    assert planned == pytest.approx(traced, rel=0.03)


@pytest.mark.parametrize(
    ("kind", "layout", "model"),
    [
        ("adafactor", {"tensor": 4, "data_shard": 2}, {"vocab_size": 128256}),
        ("muon", {"tensor": 4, "data_shard": 2}, WIDE),
    ],
    ids=["adafactor", "muon"],
)
def test_so_can_updates_of_matrices_that_are_cut_twice(
    kind: str, layout: dict[str, Any], model: dict[str, Any]
) -> None:
    training = {"activation_checkpointing": "full", "optimizer": {"kind": kind}}
    planned, traced = moving(
        agreement(SMALL | {"num_key_value_heads": 8} | model, layout, **training, global_batch_size=64)
    )
    assert planned == pytest.approx(traced, rel=0.03)


@pytest.mark.parametrize(
    ("layout", "adapter", "training"),
    [
        ({"data_replicate": 8}, None, {"activation_checkpointing": "full", "loss": "logits"}),
        ({"data_replicate": 8}, None, {"optimizer": {"kind": "sgd"}, "activation_checkpointing": "full"}),
        ({"data_shard": 8}, "lora", {"activation_checkpointing": "selective"}),
        ({"data_shard": 8}, "qlora", {"activation_checkpointing": "selective"}),
    ],
    ids=["ddp-casts", "sgd-decay", "lora-products", "qlora-products"],
)
def test_what_recomputation_and_decay_leave(
    layout: dict[str, Any], adapter: str | None, training: dict[str, Any]
) -> None:
    """Autocast's copies of layers that are computed again are gone; decay is added to gradients, not to a copy of all
    of them; of adapted layers both products are kept."""
    model = LARGE_LAYERS | {"num_key_value_heads": 16}
    planned, traced = moving(agreement(model, layout, adapter=adapter, global_batch_size=16, **training))
    assert planned == pytest.approx(traced, rel=0.03)


QUERIES = {"num_attention_heads": 40, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 4096}
DDP = {"data_replicate": 8}


@pytest.mark.parametrize(
    ("model", "training"),
    [
        # Experts' weights: their gradient in 16 bits and in float32.
        (SMALL | MIXTRAL | {"num_local_experts": 64}, {"activation_checkpointing": "full", "micro_batch_size": 1}),
        # Results weighted in the type of what the router reads.
        (
            ROWS | {"model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 4, "moe_intermediate_size": 256},
            {"activation_checkpointing": "full"},
        ),
        # What experts read, before it was narrowed.
        (WEIGHED_NARROW, {"activation_checkpointing": "full"}),
        # Both halves' gradients, when a layer with parallel residuals is made again.
        (
            SMALL
            | {"model_type": "cohere2_moe", "num_experts": 8, "num_experts_per_tok": 1, "num_shared_experts": 2}
            | {"moe_intermediate_size": 256, "intermediate_size": 256, "vocab_size": 4000}
            | {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16},
            {"activation_checkpointing": "full"},
        ),
        # Queries ten times as wide as the hidden state, in float32 where a norm is written out; and the gradient of a
        # tied head, which waits for the embedding's.
        (
            SMALL | {"model_type": "qwen3", "tie_word_embeddings": True} | QUERIES,
            {"activation_checkpointing": "selective"},
        ),
    ],
    ids=["widened-experts", "weights-as-read", "chosen-tokens", "both-halves", "rotated-queries"],
)
def test_autocasts_float32_tensors_are_counted(model: dict[str, Any], training: dict[str, Any]) -> None:
    """Under plain data parallelism: a tenth to a quarter of what moves."""
    model = model | {"pad_token_id": 0}
    training = {"micro_batch_size": 2, "global_batch_size": 32} | training
    planned, traced = moving(agreement(model, DDP, **training))
    assert planned == pytest.approx(traced, rel=0.05)


@pytest.mark.parametrize(
    ("layout", "adapter", "training", "adapts"),
    [
        # A loss in the head of frozen weights: what it reads, and a chunk's gradient.
        (DDP, "lora", {"activation_checkpointing": "full"}, {}),
        (CUT, "lora", {"activation_checkpointing": "selective"}, {}),
        # A model's first layer keeps nothing in front of its first adapter.
        ({"context": 4, "data_shard": 2}, "lora", {}, {"targets": ("up_proj", "down_proj")}),
        ({"pipeline": 2, "data_replicate": 4, "pipeline_schedule": "gpipe"}, None, {"loss": "logits"}, {}),
        # Of whole logits in many parts none is there when their gradients are put together.
        (DDP, None, {"loss": "logits", "micro_batch_size": 12}, {}),
        # Each micro-batch of a last stage keeps the gradients that its loss has made: twice what was planned.
        ({"pipeline": 2, "data_replicate": 4, "pipeline_schedule": "gpipe"}, None, {}, {}),
    ],
    ids=["frozen-head", "frozen-head-tensor", "first-layer", "gpipe-logits", "parts-of-logits", "gpipe"],
)
def test_what_is_there_at_a_loss_and_at_a_steps_end(
    layout: dict[str, Any], adapter: str | None, training: dict[str, Any], adapts: dict[str, Any]
) -> None:
    model = SMALL | {"num_key_value_heads": 8, "vocab_size": 32000}
    training = {"global_batch_size": 96} | training
    planned, traced = moving(agreement(model, layout, adapter=adapter, adapts=adapts, **training))
    assert planned == pytest.approx(traced, rel=0.03)


def test_ends_that_have_no_gradients_before_are_there_with_them_when_they_are_reduced() -> None:
    """Planned was a moment before it, with twice as much on its way but without these gradients."""
    model, training = FEW_TOKENS | {"num_hidden_layers": 3}, {"global_batch_size": 1, "micro_batch_size": 1}
    planned, traced = moving(agreement(model, {"tensor": 8}, sequence_length=512, **training))
    assert planned == pytest.approx(traced, rel=0.03)


@pytest.mark.parametrize("num_micro_batches", [8, 24])
def test_gradients_of_the_first_micro_batch_stand_beside_what_all_others_keep(num_micro_batches: int) -> None:
    """Of gpipe's last stage and few tokens: planned was its first or its last way back, a seventh less."""
    layout = {"pipeline": 2, "data_replicate": 4, "pipeline_schedule": "gpipe"}
    model = SMALL | {"num_key_value_heads": 8, "vocab_size": 32000, "num_hidden_layers": 2}
    training = {"global_batch_size": 4 * num_micro_batches, "micro_batch_size": 1}
    planned, traced = moving(agreement(model, layout, sequence_length=256, **training))
    assert 0.98 * traced < planned < 1.1 * traced


def test_logits_are_gathered_by_way_of_one_copy() -> None:
    """A trace had two: torch's fake tensors make another one of what a collective gave when it is waited for."""
    layout, training = {"data_shard": 2, "tensor": 4}, {"loss": "logits", "precision": "fp32"}
    planned, traced = moving(agreement(SMALL | {"num_key_value_heads": 8}, layout, **training))
    assert planned == pytest.approx(traced, rel=0.03)


@pytest.mark.parametrize(
    ("zero_stage", "model", "training"),
    [
        # One micro-batch: the moment at which uncut gradients are all there is none of DeepSpeed's.
        (2, MIXTRAL, {"global_batch_size": 8, "sequence_length": 512}),
        # Autocast over float32 weights, as under DDP.
        (0, {"vocab_size": 4000}, {"micro_batch_size": 4, "global_batch_size": 64}),
    ],
    ids=["one-micro-batch", "autocast"],
)
def test_activations_under_deepspeed_are_traced_as_it_has_them(
    zero_stage: int, model: dict[str, Any], training: dict[str, Any]
) -> None:
    """Traced was nothing of what is there at the loss, or a sixth less."""
    layout = {"engine": "deepspeed", "data_replicate": 8, "zero_stage": zero_stage}
    found = agreement(SMALL | model, layout, **training)
    assert abs(found.activations) < 0.03


LLAMA_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("kind", "model", "targets", "part"),
    [
        ("lora", SMALL | {"num_key_value_heads": 8}, LLAMA_LINEARS, "gradients"),
        ("lora", GPT2, ("c_attn", "c_fc", "c_proj"), "gradients"),
        ("qlora", GPT2, ("c_attn",), "parameters"),
    ],
    ids=["llama", "gpt2", "positions"],
)
def test_tensor_ranks_hold_what_isnt_cut_of_adapters(
    kind: str, model: dict[str, Any], targets: tuple[str, ...], part: str
) -> None:
    """Of each adapter the matrix beside the hidden state is whole on every tensor rank: up to four times what was
    planned. So are learned positions, which are not read from four bits: a fifth of a GPT-2's rank."""
    found = agreement(model, {"tensor": 8}, adapter=kind, adapts={"rank": 128, "targets": targets})
    assert found.planned[part] == pytest.approx(found.traced[part], rel=0.01)


def test_an_adapter_and_what_it_adapts_give_a_gradient_each() -> None:
    """And their sum, which is made beside both: a sixth of what moves where the feed-forward block is wide."""
    model, adapts = SMALL | {"intermediate_size": 14336, "vocab_size": 4000}, {"targets": ("down_proj",)}
    training = {"precision": "fp32", "activation_checkpointing": "full", "global_batch_size": 32}
    planned, traced = moving(agreement(model, DDP, adapter="lora", adapts=adapts, **training))
    assert planned == pytest.approx(traced, rel=0.03)


def test_the_gradients_of_a_models_one_unit_are_copied_when_they_are_sent() -> None:
    """No unit's come before them, beside which they would be made: a fifth of what moves."""
    layout = {"data_shard": 8, "fsdp": {"wrap": "size", "min_parameters": 300_000_000}}
    model, training = LARGE_LAYERS | {"num_hidden_layers": 4}, {"activation_checkpointing": "full"}
    planned, traced = moving(agreement(model, layout, sequence_length=256, global_batch_size=16, **training))
    assert planned == pytest.approx(traced, rel=0.03)


def test_keys_of_latent_attention_are_there_from_all_ranks_of_a_context() -> None:
    """A fifteenth of what moves: they were planned as this rank's own."""
    sizes = {
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    experts = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 512}
    model = SMALL | {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2} | sizes
    layout, training = {"data_shard": 2, "context": 4}, {"micro_batch_size": 2, "loss": "chunked"}
    model |= experts | {"num_key_value_heads": 8, "vocab_size": 4000}
    planned, traced = moving(agreement(model, layout, **training, global_batch_size=8))
    assert planned == pytest.approx(traced, rel=0.03)


LAST_OF_TWO = {"pipeline": 2, "pipeline_schedule": "1f1b"}


@pytest.mark.parametrize(
    ("model", "layout", "rank", "training"),
    [
        # The loss, before there is a gradient, or the update, which has all of them.
        (FEW_TOKENS, {}, 0, {"optimizer": {"kind": "muon"}, "global_batch_size": 1}),
        (FEW_TOKENS, {"data_shard": 8}, 5, {"optimizer": {"kind": "sgd"}, "global_batch_size": 8}),
        # Both ends' gradients of a tied matrix, before they are the rank's own.
        (FEW_TOKENS | {"tie_word_embeddings": True}, {}, 0, {"global_batch_size": 1, "sequence_length": 512}),
        # Experts' gradients, widened.
        (SMALL | MIXTRAL, {}, 0, {"global_batch_size": 1, "sequence_length": 512}),
        # A pipeline's sums of whole gradients, which are cut at its end.
        (FEW_TOKENS, LAST_OF_TWO, 1, {"global_batch_size": 2, "sequence_length": 512}),
    ],
    ids=["one-process", "fsdp", "tied", "experts", "pipeline"],
)
def test_gradients_that_come_late_are_not_beside_the_loss(
    model: dict[str, Any], layout: dict[str, Any], rank: int, training: dict[str, Any]
) -> None:
    """Up to a quarter too much was planned: the worst moment, and beside it gradients that come to be after it."""
    told = _played(model, layout, rank, **training)
    assert told.whole is not None and told.problems == []
    assert told.whole[1] == pytest.approx(told.whole[0], rel=0.03)


def _played(
    model: dict[str, Any],
    layout: dict[str, Any],
    rank: int,
    *,
    sequence_length: int = 2048,
    document_masks: bool = False,
    adapter: str | None = None,
    targets: tuple[str, ...] = ("q_proj", "v_proj"),
    **training: Any,
) -> Played:
    """That rank of few layers, traced and reckoned."""
    cases, training = dry_run_cases(), {"micro_batch_size": 1} | training
    if adapter is None:
        job = cases.few_layers(layout, model, **training)
    else:
        job = cases.adapted(layout, adapter, model, **training)
        adapts = job.model.adapter.model_copy(update={"targets": targets})
        job = job.model_copy(update={"model": job.model.model_copy(update={"adapter": adapts})})
    data = job.data.model_copy(update={"sequence_length": sequence_length, "document_masks": document_masks})
    return play(Drawn(0, "", job.model_copy(update={"data": data}), rank))


FOUR_LAYERS = SMALL | {"num_hidden_layers": 4, "vocab_size": 32000}
IN_V = {"pipeline": 2, "pipeline_schedule": "zero_bubble"}
QWEN3_MOE = (
    FOUR_LAYERS
    | {"model_type": "qwen3_moe", "num_key_value_heads": 8, "head_dim": 64}
    | {**{"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 256}}
)


MASKED = {"pipeline": 2, "tensor": 2, "pipeline_schedule": "gpipe"}


@pytest.mark.parametrize(
    ("model", "layout", "rank", "more"),
    [
        # What one stage keeps until its weights' pass; the trainer adds their gradients to the sums after it.
        (FOUR_LAYERS, IN_V, 1, {"global_batch_size": 4}),
        # Each micro-batch has a mask of its own, once; experts on two ranks.
        (QWEN3_MOE, MASKED, 0, {"global_batch_size": 2, "document_masks": True, "sequence_length": 8192}),
        # Nothing adapted is before the first layer's feed-forward block.
        (
            FOUR_LAYERS | {"model_type": "gpt_neox", "num_key_value_heads": 8, "use_parallel_residual": True},
            LAST_OF_TWO,
            0,
            {"global_batch_size": 2, "adapter": "lora", "targets": ("query_key_value",)},
        ),
    ],
    ids=["two-passes", "masks", "unreached"],
)
def test_pipelines_that_fsdp_doesnt_cut(
    model: dict[str, Any], layout: dict[str, Any], rank: int, more: dict[str, Any]
) -> None:
    """Planned was up to a fifth more or less than moves."""
    traced, planned = _played(model, layout, rank, **more).moving
    assert planned == pytest.approx(traced, rel=0.04)


@pytest.mark.parametrize(("layout", "rank"), [(LAST_OF_TWO, 1), (IN_V, 0)], ids=["1f1b", "zero_bubble"])
def test_a_tied_matrix_is_there_on_both_of_a_pipelines_stages(layout: dict[str, Any], rank: int) -> None:
    """A trace had the last one's twice, and a plan one on the rank that has both."""
    told = _played(FOUR_LAYERS | {"tie_word_embeddings": True}, layout, rank, global_batch_size=2, sequence_length=64)
    assert told.state is not None
    assert told.state[1] == pytest.approx(told.state[0], rel=0.001)


@pytest.mark.parametrize("layout", [{"pipeline": 2}, {"tensor": 2, "data_replicate": 2}], ids="-".join)
def test_frozen_weights_that_no_rank_shares_are_there_once(layout: dict[str, Any]) -> None:
    """FSDP copied them: a stage's stayed beside its copy through the whole step."""
    adapts = {"rank": 8, "targets": ("q_proj", "v_proj")}
    training = {"micro_batch_size": 1, "global_batch_size": 4, "activation_checkpointing": "full"}
    found = agreement(LARGE_LAYERS, layout, adapter="lora", adapts=adapts, sequence_length=256, rank=1, **training)
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.1)
    assert traced < 0.5 * found.traced["parameters"]


GEMMA = {
    "model_type": "gemma",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "head_dim": 128,
    "intermediate_size": 8192,
}
EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IN_TURNS = {"tensor": 2, "pipeline": 2, "pipeline_schedule": "interleaved_1f1b"}


@pytest.mark.parametrize(
    ("model", "layout", "adapter", "targets", "training"),
    [
        (GEMMA, {"tensor": 2}, "lora", ("k_proj",), {"activation_checkpointing": "full"}),
        ({}, {"tensor": 2}, "lora", EVERYWHERE, {"activation_checkpointing": "selective"}),
        ({"num_hidden_layers": 5}, IN_TURNS, "lora", ("o_proj", "down_proj"), {"global_batch_size": 6}),
        (
            {"num_hidden_layers": 4},
            {"data_replicate": 2, "pipeline": 2, "pipeline_schedule": "gpipe"},
            "qlora",
            EVERYWHERE,
            {"activation_checkpointing": "selective", "loss": "chunked", "global_batch_size": 8},
        ),
    ],
    ids=["made-again", "in-forward", "in-turns", "pipeline-qlora"],
)
def test_adapters_of_ranks_that_share_no_data_hold_what_a_layers_code_holds(
    model: dict[str, Any], layout: dict[str, Any], adapter: str, targets: tuple[str, ...], training: dict[str, Any]
) -> None:
    """5 to 21% too little: no gradient is large there, so that a layer's forward pass, or the one that makes it again,
    is the worst moment, with tensors that autograd keeps none of."""
    training = {"micro_batch_size": 2, "activation_checkpointing": "none"} | training
    found = agreement(SMALL | model, layout, adapter=adapter, adapts={"targets": targets}, rank=0, **training)
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.04)


def test_experts_with_biases_are_stored_in_four_bits_too() -> None:
    """gpt-oss's were left as they were, at four times the bytes that were planned."""
    experts = {"num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 512, "head_dim": 128}
    found = agreement(SMALL | experts | {"model_type": "gpt_oss", "pad_token_id": 0}, adapter="qlora")
    assert found.static is not None and abs(found.static) < 0.03


@pytest.mark.parametrize("name", ["q_b_proj", "kv_b_proj"])
def test_adapters_of_latents_give_what_comes_of_them(name: str) -> None:
    """Under `tensor` a rank's share of it was less than the hidden state that they were taken to read, so nothing."""
    latent = {"q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    model = {"model_type": "deepseek_v3", "num_key_value_heads": 8, "n_routed_experts": 8, "moe_intermediate_size": 512}
    shape, job = shape_from_config(SMALL | latent | model), dry_run_cases().adapted({"tensor": 2}, "lora", SMALL)
    layout = layout_of_resolved(job, planner.resolve(job))
    given = {"q_b_proj": 8 * (64 + 32), "kv_b_proj": 8 * (64 + 64)}[name]
    assert adapter_outputs(shape, replace(layout, lora_targets=(name,))) == given / 2 + layout.lora_rank


def test_written_out_attention_is_given_a_mask_of_numbers_that_recomputation_keeps() -> None:
    """Of 4,096 tokens one head's scores, beside which few heads' are not much more."""
    model = SMALL | {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 4000}
    training = {"attention": "eager", "documents": False, "activation_checkpointing": "full", "micro_batch_size": 2}
    planned, traced = moving(agreement(model, adapter="lora", sequence_length=4096, **training))
    assert planned == pytest.approx(traced, rel=0.02)


@pytest.mark.parametrize("rank", [0, 7])
def test_a_mixtures_stages_have_the_layers_that_they_have(rank: int) -> None:
    """A model's first layer has no experts: planned as a mean of all, its stage was too large and the others' too
    small, by a seventh in a model of few layers."""
    model = SMALL | {"model_type": "glm4_moe", "num_hidden_layers": 4, "n_routed_experts": 32, "head_dim": 128}
    model |= {"num_experts_per_tok": 2, "moe_intermediate_size": 512, "first_k_dense_replace": 1}
    found = agreement(model, {"pipeline": 2, "data_shard": 4}, rank=rank)
    assert found.static is not None and abs(found.static) < 0.005


def test_norms_of_what_a_half_gives_are_written_out_under_autocast() -> None:
    """No kernel has 16 bits beside weights of 32: OLMo 2's norms keep four times what was planned."""
    training = {"micro_batch_size": 2, "global_batch_size": 16, "activation_checkpointing": "none"}
    model = SMALL | {"model_type": "olmo2", "vocab_size": 4000}
    planned, traced = moving(agreement(model, {"data_replicate": 8}, **training))
    assert planned == pytest.approx(traced, rel=0.03)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("lora", {"pipeline": 2, "context": 4, "expert": 2}),
        ("qlora", {"data_shard": 8, "expert": 2, "fsdp": {"reshard_after_forward": False}}),
    ],
)
def test_frozen_experts_are_gathered_as_they_are_stored(kind: str, layout: dict[str, Any]) -> None:
    """A stage's by way of two copies, a fifth beyond the plan; in four bits, where they were planned in 16."""
    model = SMALL | MIXTRAL | {"num_hidden_layers": 4, "intermediate_size": 8192, "vocab_size": 16000}
    training = {"micro_batch_size": 1, "global_batch_size": 8, "activation_checkpointing": "full"}
    adapts = {"targets": ("q_proj", "o_proj")}
    planned, traced = moving(agreement(model, layout, adapter=kind, adapts=adapts, sequence_length=512, **training))
    assert planned == pytest.approx(traced, rel=0.05 if kind == "lora" else 0.1)


LLAMA_4 = {
    "model_type": "llama4_text",
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 2816,
}


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_batched_experts_keep_every_tokens_state_as_it_came(recompute: str) -> None:
    """In float32 under autocast, for each expert: a quarter of a layer that no plan had."""
    model = SMALL | LLAMA_4 | {"intermediate_size": 256, "head_dim": 128, "vocab_size": 16000}
    training = {"micro_batch_size": 1, "global_batch_size": 16, "activation_checkpointing": recompute}
    planned, traced = moving(agreement(model, {"data_replicate": 8}, **training))
    assert planned == pytest.approx(traced, rel=0.05)


def test_batched_experts_are_cast_by_autocast_which_keeps_them_until_the_loss() -> None:
    """Of few tokens: a third of what moves."""
    model = SMALL | LLAMA_4 | {"num_hidden_layers": 4, "intermediate_size": 1024, "head_dim": 128, "vocab_size": 16000}
    training = {"micro_batch_size": 1, "global_batch_size": 16, "activation_checkpointing": "full", "loss": "logits"}
    planned, traced = moving(agreement(model, {"data_replicate": 8}, sequence_length=256, **training))
    assert planned == pytest.approx(traced, rel=0.05)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_a_frozen_stage_is_put_together_beside_what_it_was_gathered_into(kind: str) -> None:
    """Of large ends nearly twice what stays of them, and what the passes hold is small beside it."""
    model, training = SMALL | {"vocab_size": 128256}, {"activation_checkpointing": "full", "loss": "chunked"}
    layout = {"pipeline": 2, "context": 4}
    found = agreement(model, layout, adapter=kind, rank=7, sequence_length=512, global_batch_size=4, **training)
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.03)


@pytest.mark.parametrize(
    "layout",
    [
        {"data_replicate": 2, "data_shard": 4, "expert": 4},
        {"data_shard": 8},
    ],
)
def test_a_wide_experts_gate_is_differentiated_beside_all_that_it_reads(layout: dict[str, Any]) -> None:
    """Six tensors of the experts' width, of which four were planned."""
    model = SMALL | MIXTRAL | {"num_local_experts": 4, "intermediate_size": 11008, "vocab_size": 4000}
    training = {"micro_batch_size": 4, "global_batch_size": 32, "activation_checkpointing": "full"}
    planned, traced = moving(agreement(model, layout, **training))
    assert planned == pytest.approx(traced, rel=0.03)


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.full)])
def test_spread_experts_stay_gathered_where_that_is_stated(recompute: str) -> None:
    """They were gathered a second time, as other weights are where nothing is stated."""
    model = SMALL | MIXTRAL | {"num_hidden_layers": 6, "intermediate_size": 2816, "vocab_size": 4000}
    layout = {"data_shard": 8, "expert": 2, "fsdp": {"reshard_after_forward": False}}
    training = {"micro_batch_size": 1, "global_batch_size": 32, "activation_checkpointing": recompute}
    planned, traced = moving(agreement(model, layout, sequence_length=512, **training))
    assert planned == pytest.approx(traced, rel=0.03)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("lora", {"pipeline": 2, "tensor": 2, "data_shard": 2, "expert": 2}),
        ("qlora", {"data_shard": 4, "tensor": 2, "expert": 4}),
    ],
)
def test_frozen_experts_that_no_rank_shares_are_read_where_they_are(kind: str, layout: dict[str, Any]) -> None:
    """A stage kept a copy of all of its experts beside them."""
    model = SMALL | MIXTRAL | {"num_hidden_layers": 6, "intermediate_size": 2048, "vocab_size": 4000}
    training = {"micro_batch_size": 1, "global_batch_size": 32, "activation_checkpointing": "full"}
    adapts = {"targets": ("q_proj", "o_proj")}
    planned, traced = moving(agreement(model, layout, adapter=kind, adapts=adapts, sequence_length=512, **training))
    a_stages = 3 * 16 / 4 * 3 * 1024 * 2048 * 2  # experts of two matrices in and one out, of which a rank has a quarter
    assert planned == pytest.approx(traced, abs=0.1 * a_stages)


def test_what_spread_experts_give_is_kept_in_its_tokens_order_alone() -> None:
    """What came from other ranks was kept as well, for its shape's sake: torch's `index_copy` saves its source."""
    training = {"micro_batch_size": 2, "global_batch_size": 16, "activation_checkpointing": "none"}
    for kind in (None, "qlora"):
        planned, traced = moving(agreement(WEIGHED_WIDE, SPREAD, adapter=kind, **training))
        assert planned == pytest.approx(traced, rel=0.03), kind


def test_every_stage_of_a_rank_makes_its_own_masks() -> None:
    """Documents' masks of 4,096 tokens: half of them were planned, a tenth of all that moves."""
    training = {"micro_batch_size": 2, "global_batch_size": 4, "precision": "fp32"}
    layout = {"pipeline": 2, "pipeline_schedule": "interleaved_1f1b"}
    model = GPT2 | {"n_layer": 4, "vocab_size": 4000}
    found = agreement(model, layout, rank=1, sequence_length=4096, activation_checkpointing="selective", **training)
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.05)


@pytest.mark.parametrize(
    ("schedule", "rank", "count"),
    [
        ("interleaved_1f1b", 0, 2),
        ("zero_bubble", 1, 2),
        ("interleaved_1f1b", 1, 3),
        ("interleaved_1f1b", 1, 12),
        ("1f1b", 0, 2),
    ],
)
def test_of_few_micro_batches_all_are_there_before_any_gradients_sum_is(schedule: str, rank: int, count: int) -> None:
    """Ranks with two stages were planned with the sums of both beside everything: two fifths too much."""
    model = SMALL | {"num_hidden_layers": 8, "vocab_size": 16000}
    training = {"micro_batch_size": 1, "global_batch_size": count, "activation_checkpointing": "none"}
    found = agreement(model, {"pipeline": 2, "pipeline_schedule": schedule}, rank=rank, **training)
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.06)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["full", "none"])
def test_a_large_weights_gradient_stands_beside_its_sum_before_it_is_added(precision: str, recompute: str) -> None:
    """Of few tokens the head's, which autocast widens first: two fifths of what moves."""
    model = SMALL | {"vocab_size": 128256}
    training = {"precision": precision, "activation_checkpointing": recompute, "loss": "logits", "micro_batch_size": 1}
    planned, traced = moving(agreement(model, {"data_replicate": 8}, sequence_length=256, **training))
    assert planned == pytest.approx(traced, rel=0.05)


def test_so_does_that_of_experts() -> None:
    model = SMALL | MIXTRAL | {"intermediate_size": 4096, "vocab_size": 4000}
    training = {"precision": "fp32", "activation_checkpointing": "full", "micro_batch_size": 2}
    planned, traced = moving(agreement(model, {"data_replicate": 8}, sequence_length=512, **training))
    assert planned == pytest.approx(traced, rel=0.05)


def test_a_stages_logits_stay_beside_their_parts_gradients_and_what_these_become() -> None:
    """A sixth of a large vocabulary's stage that was planned as if they were gone, as they are without a pipeline."""
    model = SMALL | {"vocab_size": 128256, "num_hidden_layers": 2}
    training = {"loss": "logits", "micro_batch_size": 12, "global_batch_size": 24, "activation_checkpointing": "full"}
    found = agreement(model, {"pipeline": 2}, rank=1, **training)
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.03)


def test_spread_experts_run_once_more_beside_their_sums_gradient() -> None:
    """QLoRA under `tensor`: four tensors of the experts' width and a gradient in fp32, of which three were planned."""
    model = SMALL | MIXTRAL | {"intermediate_size": 4096, "vocab_size": 4000}
    layout = {"data_shard": 4, "tensor": 2, "expert": 2}
    training = {"micro_batch_size": 4, "global_batch_size": 16, "activation_checkpointing": "selective"}
    planned, traced = moving(agreement(model, layout, adapter="qlora", **training))
    assert planned == pytest.approx(traced, rel=0.06)


ENDS = SMALL | {"vocab_size": 131072, "intermediate_size": 1024}
"""Of which nothing counts but its vocabulary, where tokens are few."""
SHORT: dict[str, Any] = {"sequence_length": 512, "micro_batch_size": 1, "activation_checkpointing": "full"}
PHI = {"model_type": "phi", "num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("more", "loss", "per_rank"),
    [
        ({"hidden_size": 4096, "num_attention_heads": 32}, "chunked", 8),
        ({}, "logits", 1),
        ({"tie_word_embeddings": True}, "chunked", 1),
        (PHI, "logits", 1),
    ],
    ids=["summed-over-chunks", "logits", "tied", "a-bias-comes-after-it"],
)
def test_fsdp_holds_its_last_parameters_gradient_alone(more: dict[str, Any], loss: str, per_rank: int) -> None:
    """Its loop has it in a variable, once what is sent has been put together: a head, unless it is tied or has a bias.
    A plan was a quarter too large of phi's, and a seventh too small of heads whose gradient chunks sum."""
    layout, few = {"data_replicate": 4, "context": 2}, SHORT | {"micro_batch_size": per_rank}
    found = agreement(ENDS | more, layout, loss=loss, global_batch_size=8 * per_rank, **few)
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.03)


def test_ranks_that_share_an_embedding_which_scales_make_its_whole_gradient() -> None:
    """Gemma's: each rank has all of what comes to it, and DTensor cuts the gradient when it is there. Plans of four
    ranks were a seventh too small; Llama's ranks make their own part alone."""
    sgd = {"optimizer": {"kind": "sgd", "momentum": 0.0}}
    for kind in ("gemma", "llama"):
        model = ENDS | {"model_type": kind, "tie_word_embeddings": True, "head_dim": 128, "num_key_value_heads": 8}
        told = _played(model, {"tensor": 4}, 0, global_batch_size=1, **SHORT | sgd)
        assert told.whole is not None
        assert told.whole[1] == pytest.approx(told.whole[0], rel=0.03)


def test_learned_positions_have_one_gradient() -> None:
    """They had as many as a tied head in a plan."""
    model = GPT2 | {"vocab_size": 64000, "tie_word_embeddings": True}
    told = _played(model, {"tensor": 1}, 0, global_batch_size=1, **SHORT | {"sequence_length": 512})
    assert told.problems == [] and told.whole is not None
    assert told.whole[1] == pytest.approx(told.whole[0], rel=0.01)


def test_the_tanh_that_caps_logits_is_kept_in_the_forward_pass_already() -> None:
    """DeepSpeed's: the loss's moment is before any gradient; an eighth was missing."""
    model = {"model_type": "gemma2", "head_dim": 128, "tie_word_embeddings": True, "pad_token_id": 0}
    sizes = {"vocab_size": 102400, "num_key_value_heads": 4, "intermediate_size": 11008, "num_hidden_layers": 5}
    settings = {"global_batch_size": 64, "activation_checkpointing": "selective", "sequence_length": 512}
    told = _played(SMALL | model | sizes, {"engine": "deepspeed", "data_replicate": 8}, 0, **SHORT | settings)
    assert told.problems == []


OSS = {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64}


@pytest.mark.parametrize("layout", [{"data_shard": 8}, {"data_replicate": 8}])
def test_written_out_scores_meet_their_sinks_beside_all_that_products_gave(layout: dict[str, Any]) -> None:
    """Selective recomputation, in the forward pass: plans were a seventh too small."""
    few = {"micro_batch_size": 1, "activation_checkpointing": "selective", "global_batch_size": 16}
    sizes = {"vocab_size": 16000, "intermediate_size": 512, "num_hidden_layers": 4}
    planned, traced = moving(agreement(SMALL | OSS | sizes, layout, sequence_length=4096, documents=False, **few))
    assert planned == pytest.approx(traced, rel=0.05)


WINDOWS = SMALL | {"model_type": "mistral", "sliding_window": 512, "vocab_size": 16000, "intermediate_size": 1024}


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [({"data_shard": 8}, "full"), ({"data_shard": 4, "context": 2}, "none")],
    ids=["given-to-layers-again", "of-cut-sequences"],
)
def test_sequences_share_a_mask_of_windows(layout: dict[str, Any], recompute: str) -> None:
    """Layers are given one for all sequences; of cut ones kernels read one, too, and give their result whole."""
    few = {"micro_batch_size": 4, "activation_checkpointing": recompute, "global_batch_size": 64}
    planned, traced = moving(agreement(WINDOWS, layout, documents=False, sequence_length=4096, **few))
    assert planned == pytest.approx(traced, rel=0.03)


LATENT = {"model_type": "deepseek_v3", "first_k_dense_replace": 4, "kv_lora_rank": 256, "q_lora_rank": 512} | {
    **{"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 8, "n_group": 2},
    **{"topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 512},
}


@pytest.mark.parametrize("model", [{}, LATENT], ids=["keys", "latents"])
def test_cut_sequences_results_are_put_together_for_who_reads_them(model: dict[str, Any]) -> None:
    """Adapters of what attention reads alone: nothing needs its result whole, an eighth of a layer."""
    adapts = {"targets": ("q_proj", "v_proj") if not model else ("q_a_proj", "q_b_proj")}
    few = {"micro_batch_size": 4, "activation_checkpointing": "none", "global_batch_size": 64}
    sizes = {"num_key_value_heads": 8, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 16000}
    found = agreement(SMALL | sizes | model, {"data_shard": 2, "context": 4}, adapter="lora", adapts=adapts, **few)
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.035)


@pytest.mark.parametrize("kind", ["dots1", "glm4_moe"])
def test_autocast_leaves_a_sigmoids_weights_narrow(kind: str) -> None:
    """A router's product is of autocast's type, and only a softmax widens it: a sixth too much was planned."""
    fields = {"model_type": kind, "n_routed_experts": 8, "moe_intermediate_size": 256, "n_shared_experts": 1}
    model = ROWS | fields | {"head_dim": 128, "pad_token_id": 0, "max_position_embeddings": 4096}
    found = agreement(model, {"data_replicate": 8}, activation_checkpointing="full", global_batch_size=16)
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.03)


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_frozen_experts(recompute: str, adapter: str) -> None:
    """QLoRA's have run once more when their sum is differentiated, and keep what they read until then; what LoRA's read
    is in the hands of the code that makes their layer again. Plans were a seventh too large, and a sixteenth too small.
    """
    few = {"micro_batch_size": 2, "activation_checkpointing": recompute, "global_batch_size": 16}
    found = agreement(WEIGHED_NARROW, {"data_replicate": 8}, adapter=adapter, adapts={"targets": ("q_proj",)}, **few)
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.005)


@pytest.mark.parametrize("vocabulary", [4000, 32000], ids=["in the forward pass", "in the backward pass"])
def test_a_models_first_norm_keeps_nothing_under_adapters(vocabulary: int) -> None:
    """No gradient comes to what is before it: of few layers a tenth too much was planned. In the forward pass the
    model's code has what the embedding gave."""
    gemma = {"model_type": "gemma", "head_dim": 128, "vocab_size": vocabulary, "intermediate_size": 1024}
    few = {"micro_batch_size": 4, "activation_checkpointing": "none", "global_batch_size": 32}
    planned, traced = moving(agreement(SMALL | gemma, {"data_shard": 8}, adapter="lora", **few))
    assert planned == pytest.approx(traced, rel=0.01)


def test_adapted_layers_that_are_computed_again_keep_nothing_in_their_forward_pass() -> None:
    """Beside the memory of a large unit's gathering they were planned as if they did: a seventh too much."""
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 4, "vocab_size": 4000}
    layout = {"data_shard": 8, "fsdp": {"wrap": "size", "min_parameters": 300_000_000}}
    few = {"micro_batch_size": 2, "activation_checkpointing": "full", "global_batch_size": 16}
    planned, traced = moving(agreement(SMALL | sizes, layout, adapter="lora", **few))
    assert planned == pytest.approx(traced, rel=0.05)


def test_stages_of_wide_weights_add_up_gradients_one_by_one() -> None:
    """In fp32 each is added to its sum when it is made: of a mixture's experts a twentieth less than was planned."""
    model = SMALL | MIXTRAL | {"intermediate_size": 4096, "vocab_size": 16000}
    few = {"precision": "fp32", "activation_checkpointing": "full", "global_batch_size": 3}
    told = _played(model, {"pipeline": 2, "pipeline_schedule": "gpipe"}, 0, sequence_length=512, **few)
    assert told.whole is not None
    assert told.whole[1] == pytest.approx(told.whole[0], rel=0.02)
