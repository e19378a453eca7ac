"""Plans of adapters against traces, where few layers and a small vocabulary make a layer's moments the step's largest.

What a fine-tune of many layers holds is mostly what all of them keep; how much one has in its hands, while it runs, is
made again or goes back, is what decides with full recomputation, short sequences and quantized weights.
"""

from typing import Any

import pytest
from trainer.models import quantized
from trainer_testing.agreement import agreement, moving

from memory_agreement.test_found import GPT2, ROWS, WEIGHED_NARROW, WEIGHED_WIDE
from trainyard.planner import quantized_reads

pytestmark = pytest.mark.slow
"""Each traces a step, some seconds: of the campaign itself a few seeds run every time (test_campaign.py)."""

ATTENTION, LAST, FIRST = ("q_proj", "o_proj"), ("q_proj", "down_proj"), ("gate_proj", "up_proj")
DENSE = ROWS | {"vocab_size": 1000, "head_dim": 128}
MODELS: dict[str, tuple[dict[str, Any], tuple[tuple[str, ...], ...]]] = {
    "llama": (DENSE | {"intermediate_size": 4096}, (ATTENTION, LAST, FIRST)),
    "norms written out": (DENSE | {"model_type": "gemma", "intermediate_size": 1024}, (ATTENTION, LAST, FIRST)),
    "norms after both": (DENSE | {"model_type": "gemma3_text", "intermediate_size": 8192}, (ATTENTION, LAST, FIRST)),
    "wide": (DENSE | {"model_type": "qwen3", "intermediate_size": 12288}, (ATTENTION, LAST, FIRST)),
    "one product": (
        DENSE | {"model_type": "phi3", "num_key_value_heads": 32, "intermediate_size": 8192, "pad_token_id": 0},
        (("qkv_proj",), ("gate_up_proj", "down_proj")),
    ),
    "experts": (WEIGHED_NARROW | {"vocab_size": 1000}, (("q_proj",), ("o_proj",))),
    "experts, weighed in fp32": (WEIGHED_WIDE | {"vocab_size": 1000}, (("q_proj",), ("o_proj",))),
    "gpt2": (GPT2 | {"n_embd": 4096, "n_head": 32, "vocab_size": 1000}, (("c_attn",), ("c_proj",))),
}
WIDE_ATTENTION = DENSE | {"model_type": "qwen3", "num_attention_heads": 64, "intermediate_size": 2816}
PHI3 = MODELS["one product"][0] | {"intermediate_size": 14336}
NEAR = {"gpt2": 0.04}
"""Where an activation is written out; of all others 0.03."""
COPIES = {"data_replicate": 8}
QUICK = (("llama", LAST), ("norms written out", ATTENTION), ("experts, weighed in fp32", ("q_proj",)))


def test_the_trainer_reads_as_many_weights_at_a_time_as_are_planned() -> None:
    assert quantized_reads.READ_ELEMENTS == quantized._READ_ELEMENTS


@pytest.mark.parametrize(
    ("model", "targets"),
    [(WIDE_ATTENTION, ("o_proj",)), (PHI3, ("qkv_proj",))],
    ids=["attention", "gate and block"],
)
def test_the_widest_weight_is_read_from_four_bits(model: dict[str, Any], targets: tuple[str, ...]) -> None:
    """Of few tokens nothing else counts: wide attention's, or both products that are one."""
    few = {"micro_batch_size": 1, "activation_checkpointing": "full", "global_batch_size": 8, "sequence_length": 256}
    found = agreement(model, COPIES, adapter="qlora", adapts={"targets": targets}, **few)
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.1)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_norms_that_have_gone_back_are_not_beside_written_out_scores(recompute: str) -> None:
    """Four norms a layer, of which three have gone back: they were counted beside the scores' gradients."""
    model = DENSE | {"model_type": "gemma2", "intermediate_size": 4096}
    few = {"micro_batch_size": 2, "activation_checkpointing": recompute, "global_batch_size": 16}
    planned, traced = moving(agreement(model, COPIES, adapter="lora", adapts={"targets": LAST}, **few))
    assert planned == pytest.approx(traced, rel=0.01)


@pytest.mark.parametrize("targets", [LAST, ATTENTION, ()], ids=["last", "attention", "whole"])
def test_nor_is_one_of_two(targets: tuple[str, ...]) -> None:
    """Nor what an adapter of attention's last product reads; of few tokens, whose scores leave norms to be seen."""
    family, layout = ("llama", COPIES) if targets else ("olmo2", {"data_shard": 8})
    model = DENSE | {"model_type": family, "intermediate_size": 4096, "num_hidden_layers": 4}
    few = {"micro_batch_size": 4, "activation_checkpointing": "full", "global_batch_size": 32, "sequence_length": 512}
    adapts = {"adapter": "lora", "adapts": {"targets": targets}} if targets else {}
    planned, traced = moving(agreement(model, layout, attention="eager", **adapts, **few))
    assert planned == pytest.approx(traced, rel=0.005)


@pytest.mark.parametrize(
    ("targets", "recompute", "layers"),
    [(FIRST, "selective", 2), (LAST, "selective", 4), ((), "selective", 6), ((), "full", 6)],
)
def test_scores_that_are_written_out_are_made_again_and_in_a_layers_hands(
    targets: tuple[str, ...], recompute: str, layers: int
) -> None:
    """Without targets the model is trained whole: its last layer's scores lie beside its feed-forward block."""
    model = DENSE | {"model_type": "llama", "intermediate_size": 4096, "num_hidden_layers": layers}
    few = {"micro_batch_size": 4, "activation_checkpointing": recompute, "global_batch_size": 32}
    adapts = {"adapter": "lora", "adapts": {"targets": targets}} if targets else {}
    planned, traced = moving(agreement(model, COPIES, attention="eager", sequence_length=512, **adapts, **few))
    assert planned == pytest.approx(traced, rel=0.005 if targets else 0.02)


def test_beside_copies_of_all_ranks_keys_there_is_as_much_as_two_norms_keep() -> None:
    model = DENSE | {"model_type": "llama", "intermediate_size": 1024}
    few = {"micro_batch_size": 1, "activation_checkpointing": "none", "global_batch_size": 8}
    layout = {"context": 2, "data_shard": 4}
    planned, traced = moving(agreement(model, layout, sequence_length=8192, documents=False, **few))
    assert planned == pytest.approx(traced, rel=0.02)


NEOX = {"model_type": "gpt_neox", "intermediate_size": 16384, "num_key_value_heads": 32}
PHI = {"model_type": "phi", "intermediate_size": 16384, "num_key_value_heads": 32, "pad_token_id": 0}
COHERE = {"model_type": "cohere", "intermediate_size": 14336, "pad_token_id": 0}
OLMO2 = {"model_type": "olmo2", "intermediate_size": 14336}
ALONE = [
    ({"model_type": "llama", "intermediate_size": 14336}, ("down_proj",), "none", "lora"),
    (NEOX, ("dense_h_to_4h",), "none", "lora"),
    (NEOX, ("dense_4h_to_h",), "none", "lora"),
    (NEOX, ("dense",), "none", "qlora"),
    (NEOX, ("query_key_value",), "selective", "lora"),
    (NEOX, ("dense_h_to_4h",), "full", "lora"),
    (NEOX, ("dense_h_to_4h",), "full", "qlora"),
    (PHI, ("fc1",), "none", "lora"),
    (PHI, ("fc2",), "none", "qlora"),
    (COHERE, ("q_proj", "v_proj"), "none", "lora"),
    (COHERE, ("gate_proj", "up_proj"), "none", "lora"),
    (COHERE, ("down_proj",), "none", "qlora"),
    (COHERE, ("gate_proj", "up_proj"), "full", "qlora"),
    (OLMO2, ("o_proj",), "none", "lora"),
    (OLMO2, ("gate_proj", "up_proj"), "none", "lora"),
    (OLMO2, ("q_proj", "o_proj"), "none", "lora"),
    (OLMO2, ("down_proj",), "full", "lora"),
    (OLMO2, ("down_proj",), "full", "qlora"),
    (OLMO2 | {"intermediate_size": 4096}, ("o_proj",), "none", "lora"),
    ({"model_type": "gemma3_text", "intermediate_size": 14336}, ("down_proj",), "none", "lora"),
    ({"model_type": "gemma3_text", "intermediate_size": 4096}, ("o_proj",), "none", "lora"),
]


@pytest.mark.parametrize(("family", "targets", "recompute", "adapter"), ALONE)
def test_adapters_of_single_products_leave_out_what_no_gradient_reaches(
    family: dict[str, Any], targets: tuple[str, ...], recompute: str, adapter: str
) -> None:
    """In a model's first layer; and halves that are side by side, or end in a norm. They were up to 55% off."""
    few = {"micro_batch_size": 2, "activation_checkpointing": recompute, "global_batch_size": 16}
    planned, traced = moving(agreement(DENSE | family, COPIES, adapter=adapter, adapts={"targets": targets}, **few))
    assert planned == pytest.approx(traced, rel=0.01)


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
@pytest.mark.parametrize("targets", [ATTENTION, LAST, FIRST], ids="-".join)
def test_a_layer_that_ends_in_its_norm_is_made_again_up_to_it(targets: tuple[str, ...], adapter: str) -> None:
    model = DENSE | {"model_type": "olmo2", "intermediate_size": 4096}
    few = {"micro_batch_size": 2, "activation_checkpointing": "full", "global_batch_size": 16}
    planned, traced = moving(agreement(model, COPIES, adapter=adapter, adapts={"targets": targets}, **few))
    assert planned == pytest.approx(traced, rel=0.01)


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("name", "targets", "layout"),
    [
        (name, targets, layout)
        for name, (_, choices) in MODELS.items()
        for targets in choices
        for is_quick in [(name, targets) in QUICK]
        for layout in ([COPIES, {"data_shard": 8}] if is_quick else [COPIES])
    ],
)
def test_what_a_layer_has_in_its_hands(
    name: str, targets: tuple[str, ...], layout: dict[str, Any], recompute: str, adapter: str
) -> None:
    few = {"micro_batch_size": 2, "activation_checkpointing": recompute, "global_batch_size": 16}
    found = agreement(MODELS[name][0], layout, adapter=adapter, adapts={"targets": targets}, **few)
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=NEAR.get(name, 0.03))
