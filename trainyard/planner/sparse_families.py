"""Readers of families whose attention chooses or compresses what it sees: a configuration to a `ModelShape` each."""

from collections.abc import Callable, Mapping
from typing import Any

from trainyard.errors import InputError
from trainyard.planner.config_values import Config, NotCoveredError, common_sizes, listed, number
from trainyard.planner.expert_families import dense_or_listed
from trainyard.planner.family_parts import latents, one_per_layer, routed
from trainyard.planner.shapes import ModelShape
from trainyard.planner.sparse_attention import Compression, Indexer

DEEPSEEK_V32_DEFAULTS = {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "vocab_size": 129280,
}

GLM_DSA_DEFAULTS = {
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_hidden_layers": 78,
    "intermediate_size": 12288,
    "vocab_size": 154880,
}

DEEPSEEK_V4_DEFAULTS = {
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "num_hidden_layers": 43,
    "intermediate_size": 0,
    "vocab_size": 129280,
    "head_dim": 512,
}


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What V3.2's kind calls the number of routed experts: transformers takes the first that is stated."""


def _indexed(config: Config, sizes: dict[str, Any], attention: dict[str, Any], indexer: Indexer) -> ModelShape:
    """DeepSeek-V3's latent attention and experts, and an indexer that chooses what is seen."""
    if config.get("mlp_bias", False):
        raise NotCoveredError(f"model.config: a {config['model_type']} with mlp_bias is not covered")
    if not attention["q_lora_rank"]:
        raise InputError("model.config.q_lora_rank: must be at least 1, as the indexer reads the queries' latent")
    layers, expert = sizes["layers"], number(config, 2048, "moe_intermediate_size")
    dense = min(number(config, 3, "first_k_dense_replace"), layers)
    return ModelShape(
        **sizes | attention | routed(config, width=expert, experts=256, per_token=8, experts_names=EXPERTS),
        indexer=indexer,
        shared_ffn=expert * number(config, 1, "n_shared_experts"),
        **dense_or_listed(config, layers, dense=dense),
        wide_router=True,
        wide_weights=True,
        sigmoid_weights=True,
    )


def _deepseek_v32(config: Config) -> ModelShape:
    sizes = common_sizes({**config, "num_key_value_heads": None}, DEEPSEEK_V32_DEFAULTS)
    attention = latents(config, query=1536, key=128, value=128)
    return _indexed(config, sizes, attention, _indexer(config, heads=64, layers=sizes["layers"]))


def _glm_moe_dsa(config: Config) -> ModelShape:
    """GLM-5; of 5.2 most layers see what the last one before them chose."""
    sizes = common_sizes({**config, "num_key_value_heads": None}, GLM_DSA_DEFAULTS)
    attention = latents(config, query=2048, key=192, value=256)
    return _indexed(config, sizes, attention, _indexer(config, heads=32, layers=_choosing(config, sizes["layers"])))


def _indexer(config: Config, *, heads: int, layers: int) -> Indexer:
    return Indexer(
        heads=number(config, heads, "index_n_heads"),
        head_dim=number(config, 128, "index_head_dim"),
        chosen=_at_least_one(config, 2048, "index_topk"),
        layers=layers,
    )


def _at_least_one(config: Config, default: int, name: str) -> int:
    found = number(config, default, name)
    if found < 1:
        raise InputError(f"model.config.{name}: must be at least 1 (given: {found})")
    return found


def _choosing(config: Config, layers: int) -> int:
    """Layers with an indexer of their own: as listed, by a pattern of F and S, or one of so many from an offset on."""
    name = "indexer_types" if config.get("indexer_types") is not None else "index_topk_pattern"
    if (stated := config.get(name)) is not None:
        letters = {"F": "full", "S": "shared"}
        listed_kinds = [letters.get(letter, letter) for letter in stated] if isinstance(stated, str) else stated
        kinds = one_per_layer({name: listed_kinds}, name, layers)
        if set(map(str, kinds or [])) - {"full", "shared"}:
            raise InputError(f"model.config.{name}: must be a list of full and shared (one a layer)")
        return (kinds or []).count("full")
    step = max(number(config, 1, "index_topk_freq"), 1)
    offset = number(config, 2, "index_skip_topk_offset")
    return sum(max(index - offset + 1, 0) % step == 0 for index in range(layers))


PLAIN, CHOSEN, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATIOS = {0: PLAIN, 4: CHOSEN, 128: HEAVY}
"""Of `compress_ratios`, as DeepSeek's own configurations list them."""


def _deepseek_v4(config: Config) -> ModelShape:
    """Every layer has experts; the first few, whose tokens' words choose, have as many weights as the others."""
    if config.get("attention_bias", False) or config.get("mlp_bias", False):
        raise NotCoveredError("model.config: a deepseek_v4 with biases is not covered")
    sizes = common_sizes({**config, "intermediate_size": None}, DEEPSEEK_V4_DEFAULTS)
    # Of two that are stated transformers takes what it maps to the family's own.
    expert = number(config, 2048, "intermediate_size", "moe_intermediate_size")
    kinds, (rate, heavy_rate) = _v4_layers(config, sizes["layers"]), _v4_rates(config)
    groups = _at_least_one(config, 8, "o_groups")
    if sizes["heads"] * sizes["head_dim"] % groups:
        raise InputError(f"model.config.o_groups: must divide all heads' width (given: {groups})")
    indexer = Indexer(
        heads=number(config, 64, "index_n_heads"),
        head_dim=number(config, 128, "index_head_dim"),
        chosen=_at_least_one(config, 512, "index_topk"),
        layers=kinds.count(CHOSEN),
        rate=rate,
    )
    compression = Compression(
        window=_at_least_one(config, 128, "sliding_window"),
        chosen_layers=kinds.count(CHOSEN),
        heavy_layers=kinds.count(HEAVY),
        heavy_rate=heavy_rate,
        output_groups=groups,
        output_rank=number(config, 1024, "o_lora_rank"),
        streams=_at_least_one(config, 4, "hc_mult"),
    )
    return ModelShape(
        **sizes,
        **routed(config, width=expert, experts=256, per_token=6),
        norm="rms_wide",
        q_lora_rank=number(config, 1024, "q_lora_rank"),
        indexer=indexer,
        compression=compression,
        shared_ffn=expert,
        wide_router=True,
    )


def _v4_layers(config: Config, layers: int) -> list[Any]:
    """What attention each layer has: as listed by name or by ratio (of which there may be one more, of the layer that
    predicts a further token), else two of many positions and then in turns."""
    kinds = listed(config, "layer_types")
    if kinds is None and (ratios := listed(config, "compress_ratios")) is not None:
        if any(not isinstance(ratio, int) or ratio not in RATIOS for ratio in ratios):
            raise InputError(f"model.config.compress_ratios: must be a list of {', '.join(map(str, RATIOS))}")
        kinds = [RATIOS[ratio] for ratio in ratios]
    if kinds is None:
        kinds = [HEAVY] * min(layers, 2) + [CHOSEN if index % 2 else HEAVY for index in range(max(layers - 2, 0))]
    kinds = kinds[:layers]
    if len(kinds) != layers or set(map(str, kinds)) - set(RATIOS.values()):
        raise InputError(f"model.config.layer_types: must be a list of {', '.join(RATIOS.values())} (one a layer)")
    return kinds


def _v4_rates(config: Config) -> tuple[int, int]:
    """Positions of an entry: of those among which an indexer chooses, and of the others."""
    rates = config.get("compress_rates") or {}
    if not isinstance(rates, dict):
        raise InputError(f"model.config.compress_rates: must be a mapping of layer types (given: {rates!r})"[:200])
    chosen = _at_least_one({**rates, **_stated(config, "compress_rate_csa", CHOSEN)}, 4, CHOSEN)
    return chosen, _at_least_one({**rates, **_stated(config, "compress_rate_hca", HEAVY)}, 128, HEAVY)


def _stated(config: Config, name: str, kind: str) -> dict[str, Any]:
    return {kind: config[name]} if config.get(name) is not None else {}


SPARSE_READERS: Mapping[str, Callable[[Config], ModelShape]] = {
    "deepseek_v32": _deepseek_v32,
    "deepseek_v4": _deepseek_v4,
    "glm_moe_dsa": _glm_moe_dsa,
}
"""model_type to reader."""
