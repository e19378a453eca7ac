"""What readers of families share, beside single values (`config_values`): defaults, biases, windows, experts, and
latents."""

from collections.abc import Callable, Mapping
from typing import Any

from trainyard.errors import InputError
from trainyard.planner.config_values import Config, listed, number

LLAMA_LIKE: Mapping[str, int] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}


def four_biases(config: Config, *, default: bool = False, name: str = "attention_bias") -> dict[str, Any]:
    """Of families where one field speaks of the biases of all four projections of attention."""
    bias = bool(config.get(name, default))
    return {"qkv_bias": bias, "output_bias": bias}


def without_head_dim(config: Config) -> Config:
    """Of families whose attention divides hidden_size by its heads, whatever head_dim says."""
    return {key: value for key, value in config.items() if key != "head_dim"}


def must_fill_hidden(sizes: Mapping[str, Any], model_type: str) -> None:
    """InputError where heads that have to be as wide together as hidden_size aren't."""
    if sizes["heads"] * sizes["head_dim"] != sizes["hidden"]:
        raise InputError(
            f"model.config.head_dim: the heads of {model_type} must be as wide together as hidden_size, "
            f"{sizes['hidden']} (given: {sizes['heads']} of {sizes['head_dim']})"
        )


def window_of(config: Config, default: int | None = None) -> int:
    """A window's positions; 0: there is none."""
    stated = config.get("sliding_window", default)
    return 0 if stated is None else number({"sliding_window": stated}, None, "sliding_window")


def windows(window: int, windowed: int) -> dict[str, Any]:
    """So many layers see a window, as `ModelShape` calls it."""
    return {"attention_window": window, "windowed_layers": windowed} if window and windowed else {}


def one_per_layer(config: Config, name: str, layers: int) -> list[Any] | None:
    """What a configuration lists layer by layer; None where it says nothing."""
    found = listed(config, name)
    if found is not None and len(found) != layers:
        raise InputError(f"model.config.{name}: must have one entry for each of {layers} layers (given: {len(found)})")
    return found


def listed_windows(config: Config, layers: int, window: int, *, unlisted: Callable[[], int]) -> dict[str, Any]:
    """Layers as layer_types lists them; where it says nothing, so many as `unlisted` answers see a window."""
    kinds = one_per_layer(config, "layer_types", layers)
    if kinds is None:
        return windows(window, unlisted())
    return windows(window, kinds.count("sliding_attention"))


def patterned_windows(
    config: Config, layers: int, *, every: int, pattern: tuple[str, ...] = (), window: int = 4096
) -> dict[str, Any]:
    """All but each `every`-th layer see a window, where nothing else is stated; 0: all of them. `pattern`: what a
    configuration may call that number, which may be a text ("LLLG") where layers are listed."""

    def unlisted() -> int:
        step = number(config, every, *pattern)
        return layers - (layers // step if step else 0)

    return listed_windows(config, layers, window_of(config, window), unlisted=unlisted)


def late_windows(config: Config, layers: int) -> dict[str, Any]:
    """Qwen's: where use_sliding_window asks for it, layers from max_window_layers on see a window."""
    window = window_of(config, 4096) if config.get("use_sliding_window", False) else 0
    return listed_windows(
        config, layers, window, unlisted=lambda: max(layers - number(config, 28, "max_window_layers"), 0)
    )


ACTIVATION_TENSORS: Mapping[str, int] = {
    # Written out: the input or what it becomes, and each product's factors.
    **dict.fromkeys(("gelu_new", "gelu_accurate"), 4),
    "gelu_fast": 7,
    "gelu_python": 3,
    "quick_gelu": 2,
    # Its result says where it was cut; the next product keeps that anyway.
    "relu": 0,
}


def activation_tensors(activation: Any) -> int:
    """What an activation function keeps of its input's size, beside its result: one where it is a single kernel."""
    return ACTIVATION_TENSORS.get(str(activation), 1)


EXPERT_NAMES, LOCAL_EXPERT_NAMES = ("num_local_experts", "num_experts"), ("num_experts", "num_local_experts")
ROUTED_EXPERT_NAMES = ("num_local_experts", "n_routed_experts")
"""What configurations call the number of routed experts: of two that are stated transformers takes the one that it maps
to the family's own, which is the second."""


def routed(
    config: Config,
    *,
    width: int,
    experts: int | None,
    per_token: int | None,
    experts_names: tuple[str, ...] = ROUTED_EXPERT_NAMES,
) -> dict[str, Any]:
    """Routed experts, as `ModelShape` calls them."""
    if experts is None and all(config.get(name) is None for name in experts_names):
        raise InputError(f"model.config: {experts_names[-1]} is missing")
    return {
        "experts": number(config, experts, *experts_names),
        "experts_per_token": number(config, per_token, "num_experts_per_tok"),
        "moe_ffn": width,
    }


def first_dense(config: Config, default: int, layers: int) -> int:
    """Layers before the first one with experts."""
    return min(number(config, default, "first_k_dense_replace"), layers)


def latents(config: Config, *, query: int, key: int, value: int) -> dict[str, Any]:
    """Latent attention (DeepSeek-V2), by the defaults of its queries' latent and of its heads' keys and values. A null
    for q_lora_rank says that queries have no latent."""
    key, value = number(config, key, "qk_nope_head_dim"), number(config, value, "v_head_dim")
    if value < 1:
        raise InputError(f"model.config.v_head_dim: must be at least 1 (given: {value})")
    return {
        "head_dim": key,
        "value_head_dim": 0 if value == key else value,
        "q_lora_rank": 0 if config.get("q_lora_rank", query) is None else number(config, query, "q_lora_rank"),
        "kv_lora_rank": number(config, 512, "kv_lora_rank"),
        "rope_dim": number(config, 64, "qk_rope_head_dim"),
        **four_biases(config),
    }
