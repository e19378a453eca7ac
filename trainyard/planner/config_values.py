"""What a Hugging Face configuration says of a model's sizes, read one value at a time.

Families' readers are made of these; whatever stands there instead of a size is one line.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from trainyard.errors import InputError

Config = Mapping[str, Any]


class NotCoveredError(InputError):
    """A model that there may well be, and that no formula here describes."""


MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "max_window_layers"), 10_000),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 100_000),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 100_000),
}
"""Upper limits of what is counted one by one, layer by layer; far above what anyone has, as `predict` has them."""

MOST_OF_ALL = 10**9


def number(config: Config, default: int | None, *names: str) -> int:
    """The first of `names` in the configuration, else the family's default."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InputError(f"model.config.{name}: must be a whole number of at least 0 (given: {value!r})")
            if value > (most := MOST.get(name, MOST_OF_ALL)):
                raise InputError(
                    f"model.config.{name}: must be a whole number of at most {most} (given: {value:,})"[:200]
                )
            return value
    if default is None:
        raise InputError(f"model.config: {names[0]} is missing")
    return default


def listed(config: Config, name: str) -> list[Any] | None:
    """What a configuration lists under that name; None where it says nothing."""
    found = config.get(name)
    if found is not None and not isinstance(found, list | tuple):
        raise InputError(f"model.config.{name}: must be a list (given: {found!r})")
    return None if found is None else list(found)


def common_sizes(config: Config, defaults: Mapping[str, int]) -> dict[str, Any]:
    """Sizes that the Llama-like families name alike, as `ModelShape` calls them."""
    hidden = number(config, defaults["hidden_size"], "hidden_size")
    heads = number(config, defaults["num_attention_heads"], "num_attention_heads")
    if heads < 1 or hidden < 1:
        raise InputError("model.config: hidden_size and num_attention_heads must be at least 1")
    # A null is no default of the family's: transformers makes of it what follows from the other sizes.
    nulls = {name for name in ("num_key_value_heads", "head_dim") if name in config and config[name] is None}
    kv_default = heads if "num_key_value_heads" in nulls else defaults.get("num_key_value_heads", heads)
    head_default = hidden // heads if "head_dim" in nulls else defaults.get("head_dim", hidden // heads)
    return {
        "layers": number(config, defaults["num_hidden_layers"], "num_hidden_layers"),
        "hidden": hidden,
        "ffn": number(config, defaults["intermediate_size"], "intermediate_size"),
        "heads": heads,
        "kv_heads": number(config, kv_default, "num_key_value_heads"),
        "head_dim": number(config, head_default, "head_dim"),
        "vocab": number(config, defaults["vocab_size"], "vocab_size"),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def dense_at(places: Iterable[int]) -> dict[str, Any]:
    """Of a mixture's layers those without routed experts: how many, and which, unless they are its first."""
    found = tuple(places)
    return {"dense_layers": len(found), "dense_places": () if found == tuple(range(len(found))) else found}


def without_experts(config: Config, layers: int) -> dict[str, Any]:
    """Layers of a Qwen MoE model without routed experts."""
    named = listed(config, "mlp_only_layers") or []
    step = number(config, 1, "decoder_sparse_step")
    return dense_at(index for index in range(layers) if index in named or step == 0 or (index + 1) % step != 0)
