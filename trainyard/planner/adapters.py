"""The linear layers that adapters are put beside, by the names that transformers' models give them: what each reads,
and how large an adapter's two matrices are.

A mean over a model's layers: of a mixture's, those with an ordinary feed-forward block have a `gate_proj`, and those
with a shared expert one of its width.
"""

from collections import defaultdict
from collections.abc import Mapping

from trainyard.planner.layout import Layout
from trainyard.planner.shapes import ModelShape
from trainyard.spec.job import AdapterSpec
from trainyard.spec.model_types import HEADS
from trainyard.spec.notes import notes_on_rank

ATTENTION_INPUTS = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "c_attn", "query_key_value", "qkv_proj", "Wqkv"),
        *("q_a_proj", "kv_a_proj_with_mqa"),
        *("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    }
)
"""They read what the norm before attention gives."""
ATTENTION_OUTPUTS = frozenset({"o_proj", "out_proj", "dense", "c_proj"})
"""They read what attention gives."""
QUERY_LATENT_INPUTS, KEY_LATENT_INPUTS = frozenset({"q_b_proj"}), frozenset({"kv_b_proj"})
"""They read what the norm of a latent gives."""
MLP_INPUTS = frozenset({"gate_proj", "up_proj", "gate_up_proj", "c_fc", "dense_h_to_4h", "fc1", "fc_in"})
"""They read what the norm before the feed-forward block gives."""
MLP_OUTPUTS = frozenset({"down_proj", "dense_4h_to_h", "fc2", "fc_out", "c_proj"})
"""They read what is inside of that block. GPT-2's attention ends in a `c_proj` too."""


def reads_last_product(shape: ModelShape, layout: Layout) -> bool:
    """Whether anything of a layer needs what its last product gives: an adapter's matrices, the second of which comes
    after it; a norm, where that is a layer's last; or dropout, which keeps its mask. A hybrid's layers end in one
    block's product or the other's."""
    outputs = MLP_OUTPUTS | ATTENTION_OUTPUTS if shape.is_hybrid else MLP_OUTPUTS
    is_adapted = layout.method != "full" and not outputs.isdisjoint(layout.lora_targets)
    return is_adapted or shape.ends_in_norm or shape.dropout or layout.dropout


def adapter_params(shape: ModelShape, layout: Layout, layers: float, *, has_head: bool, split: int = 1) -> float:
    """Parameters of the adapters of so many layers, and of the head's; `split`: of one of so many tensor ranks, which
    all have the matrix on the side of the hidden state whole, and of a head both."""
    sizes = _sizes(shape, split)
    # What this page has no name for: a square matrix in each layer.
    square = shape.hidden * (1 + 1 / split)
    each = sum(sizes.get(name, square) for name in layout.lora_targets if name not in HEADS)
    head = has_head * (shape.hidden + shape.vocab) * len(HEADS.intersection(layout.lora_targets))
    return layout.lora_rank * (layers * each + head)


def adapter_outputs(shape: ModelShape, layout: Layout, *, names: frozenset[str] | None = None) -> float:
    """Elements of a token that the adapters of a mean layer give (those of `names`), after either of their two
    matrices: of one tensor rank, which has a hidden state whole, and what the first matrix gives."""
    sizes = _sizes(shape, layout.tensor)
    targets = [name for name in layout.lora_targets if name not in HEADS and (names is None or name in names)]
    value_dim, width = _value_dim(shape) / layout.tensor, _width(shape) / layout.tensor
    reads = {**dict.fromkeys(ATTENTION_OUTPUTS, value_dim), **dict.fromkeys(MLP_OUTPUTS, width)}
    if shape.wide_layers:
        # Some layers have no product of values.
        reads["v_proj"] = shape.hidden * sum(number for number, kind in shape.attentions if not kind.values_are_keys)
        reads["v_proj"] /= shape.layers
    reads |= dict.fromkeys(QUERY_LATENT_INPUTS, shape.q_lora_rank) | dict.fromkeys(
        KEY_LATENT_INPUTS, shape.kv_lora_rank
    )
    both = {"c_proj": value_dim + width}
    given = sum(
        max(sizes.get(name, 2.0 * shape.hidden) - (both | reads).get(name, shape.hidden), 0) for name in targets
    )
    return given + layout.lora_rank * len(targets)


def _value_dim(shape: ModelShape) -> float:
    """Of layers that have attention, the mean."""
    kinds = shape.attentions
    return sum(number * kind.value_dim for number, kind in kinds) / max(sum(number for number, _ in kinds), 1)


def notes_on_adapter(shape: ModelShape, adapter: AdapterSpec | None) -> tuple[str, ...]:
    """What is odd about the job's adapter beside the layers that it adapts, of those that this page has a name for."""
    if adapter is None:
        return ()
    sides = _sides(shape)
    return notes_on_rank(
        adapter.rank, {name: int(min(map(min, sides[name]))) for name in adapter.targets if name in sides}
    )


def _sides(shape: ModelShape) -> dict[str, list[tuple[float, float]]]:
    """Inputs and outputs of the layers of a name, each size once."""
    hidden, found = shape.hidden, defaultdict[str, list[tuple[float, float]]](list)
    parts: list[Mapping[str, tuple[float, float]]] = [dict.fromkeys(HEADS, (hidden, shape.vocab))]
    for number, kind in shape.attentions:
        parts += [_attention_sides(kind, 1), {"c_proj": (kind.value_dim, hidden)}] if number else []
    for width in (shape.ffn * (shape.num_mlps > 0), shape.shared_ffn * (shape.moe_layers > 0)):
        block = dict.fromkeys(MLP_INPUTS - {"gate_up_proj"}, (hidden, width)) | {"gate_up_proj": (hidden, 2 * width)}
        parts.append(block | dict.fromkeys(MLP_OUTPUTS, (width, hidden)))
    if shape.delta_layers:
        parts.append(_delta_sides(shape))
    for part in parts:
        for name, pair in part.items():
            if min(pair) > 0:
                found[name].append(pair)
    return found


def _width(shape: ModelShape) -> float:
    return (shape.num_mlps * shape.ffn + shape.moe_layers * shape.shared_ffn) / shape.layers


def _sizes(shape: ModelShape, split: int = 1) -> dict[str, float]:
    """Inputs and outputs of all layers of a name, of one layer of the model, where so many tensor ranks split what is
    no hidden state."""
    hidden, block = shape.hidden, _block(shape, 1 / split)
    found = dict.fromkeys(MLP_INPUTS | MLP_OUTPUTS, block) | {"gate_up_proj": _block(shape, 2 / split)}
    kinds = [(number / shape.layers, _sums(_attention_sides(kind, split))) for number, kind in shape.attentions]
    found |= {name: sum(share * sizes[name] for share, sizes in kinds) for name in kinds[0][1]}
    share = shape.num_attentions / shape.layers
    found["c_proj"] = share * (shape.value_dim / split + hidden) + block
    if shape.is_hybrid:
        mamba = shape.mamba_layers / shape.layers
        mixed = shape.mamba_inner + 2 * shape.mamba_groups * shape.mamba_state
        found["in_proj"] = mamba * (hidden + shape.mamba_inner + mixed + shape.mamba_heads)
        found["out_proj"] = mamba * (shape.mamba_inner + hidden)
    if shape.delta_layers:
        found |= {name: shape.delta_layers / shape.layers * size for name, size in _sums(_delta_sides(shape)).items()}
    return found


def _sums(sides: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    return {name: inputs + outputs for name, (inputs, outputs) in sides.items()}


def _delta_sides(shape: ModelShape) -> dict[str, tuple[float, float]]:
    """Inputs and outputs of a delta layer's: Qwen3-Next's have two projections in, Qwen3.5's four."""
    hidden, keys, values, heads = (
        shape.hidden,
        shape.delta_key_width,
        shape.delta_value_width,
        shape.delta_value_heads,
    )
    found: dict[str, tuple[float, float]] = {"out_proj": (values, hidden)}
    if shape.delta_inputs == 2:
        return found | {"in_proj_qkvz": (hidden, 2 * (keys + values)), "in_proj_ba": (hidden, 2 * heads)}
    found |= dict.fromkeys(("in_proj_a", "in_proj_b"), (hidden, heads))
    return found | {"in_proj_qkv": (hidden, 2 * keys + values), "in_proj_z": (hidden, values)}


def _attention_sides(shape: ModelShape, split: int) -> dict[str, tuple[float, float]]:
    """Inputs and outputs of those of a layer's attention."""
    hidden, key = shape.hidden, shape.kv_dim / split
    queries = shape.heads * (shape.head_dim + shape.rope_dim) / split
    # Queries come through a latent or they don't: no model has layers of both kinds.
    first, latents = (0, 0), shape.kv_lora_rank + shape.rope_dim
    return {
        "q_proj": first if shape.q_lora_rank else (hidden, queries * (1 + shape.attention_gate)),
        "k_proj": (hidden, key),
        "v_proj": first if shape.values_are_keys else (hidden, key),
        **dict.fromkeys(("o_proj", "out_proj", "dense"), (shape.value_dim / split, hidden)),
        **dict.fromkeys(("query_key_value", "qkv_proj", "Wqkv"), (hidden, shape.query_dim / split + 2 * key)),
        "c_attn": (hidden, shape.query_dim + 2.0 * shape.kv_dim),  # whole on each rank, as what it adapts
        "q_a_proj": (hidden, shape.q_lora_rank) if shape.q_lora_rank else first,
        "q_b_proj": (shape.q_lora_rank, queries) if shape.q_lora_rank else first,
        "kv_a_proj_with_mqa": (hidden, latents),
        "kv_b_proj": (shape.kv_lora_rank, (shape.query_dim + shape.value_dim) / split),
    }


def _block(shape: ModelShape, tensors: float) -> float:
    """Of a feed-forward block one projection's inputs and outputs, `tensors` times as wide as the block."""
    hidden = shape.hidden
    dense = shape.num_mlps * (hidden + tensors * shape.ffn)
    shared = shape.moe_layers * (hidden + tensors * shape.shared_ffn) if shape.shared_ffn else 0
    return (dense + shared) / shape.layers
