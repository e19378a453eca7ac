"""What the rules of `trainyard.spec.obstacles` ask of a model, from transformers' configuration of it."""

from transformers import PretrainedConfig

from trainer.models.configuration import configuration_of, differs_by_layer, size_of, states_positions
from trainyard.spec.job import ResolvedJob
from trainyard.spec.support import OWN_HEAD_NORMS, ModelFacts, causal_if, handed_along, layer_drop, state_heads


def facts_of(job: ResolvedJob) -> ModelFacts:
    """The job's language model; nothing is known of one whose configuration is no good, which is said where it is
    built."""
    stated = job.spec.model.config
    config = configuration_of(job) if job.spec.task == "causal_lm" else None
    if config is None:
        return ModelFacts()
    # A new model gets as many positions as its sequences have, unless the job says how many.
    is_open = stated is not None and not states_positions(config, stated)
    return ModelFacts(
        model_type=config.model_type,
        num_layers=getattr(config, "num_hidden_layers", None),
        num_experts=num_experts_of(config),
        hidden_size=getattr(config, "hidden_size", None),
        split_sizes=_split_sizes(config),
        row_widths=_row_widths(config),
        widest_head=_widest_head(config),
        layer_types=frozenset(getattr(config, "layer_types", None) or ()),
        max_positions=None if is_open else getattr(config, "max_position_embeddings", None),
        balances_router=bool(getattr(config, "output_router_logits", False)),
        router_noise=float(getattr(config, "router_jitter_noise", None) or 0.0),
        norms_heads=any(getattr(config, name, None) is True for name in OWN_HEAD_NORMS.values()),
        has_query_latent=size_of(config, "q_lora_rank") is not None if size_of(config, "kv_lora_rank") else None,
        handed_along=handed_along(config.model_type, lambda name, usual: getattr(config, name, usual)),
        causal_if=causal_if(config.model_type, lambda name: getattr(config, name, None)),
        layer_drop=layer_drop(lambda name: getattr(config, name, None)),
        state_heads=state_heads(config.model_type, lambda name: getattr(config, name, None)),
    )


def num_experts_of(config: PretrainedConfig) -> int:
    """Routed experts a layer; 0 for a model without."""
    names = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
    return next((getattr(config, name) for name in names if getattr(config, name, None)), 0)


def _split_sizes(config: PretrainedConfig) -> dict[str, int]:
    """What tensor parallelism divides; experts go to ranks whole, but for those that all tokens share."""
    heads = size_of(config, "num_attention_heads")
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": size_of(config, "num_key_value_heads") or heads,
        "intermediate_size": size_of(config, "intermediate_size"),
        "moe_intermediate_size": _shared_width(config) and size_of(config, "moe_intermediate_size"),
        "shared_expert_intermediate_size": size_of(config, "shared_expert_intermediate_size"),
        "linear_num_key_heads": size_of(config, "linear_num_key_heads"),
        "linear_num_value_heads": size_of(config, "linear_num_value_heads"),
        "swa_num_attention_heads": size_of(config, "swa_num_attention_heads"),
        "swa_num_key_value_heads": size_of(config, "swa_num_key_value_heads"),
    }
    return {name: size for name, size in sizes.items() if size}


def _row_widths(config: PretrainedConfig) -> dict[str, int]:
    """What goes into row-wise matrices, which are cut where a block of 4-bit weights ends."""
    heads = size_of(config, "num_attention_heads")
    if not heads:
        return {}
    head_size = size_of(config, "v_head_dim") or size_of(config, "head_dim") or config.hidden_size // heads
    # GPT-2 calls it n_inner, and means four times its hidden size where that is null.
    feed_forward = size_of(config, "intermediate_size") or size_of(config, "n_inner")
    widths = {
        "heads": heads * head_size,
        "intermediate_size": feed_forward or 4 * config.hidden_size,
        "shared experts": _shared_width(config),
        "linear_num_value_heads": (size_of(config, "linear_num_value_heads") or 0)
        * (size_of(config, "linear_value_head_dim") or 0),
    }
    unknown = {"heads": "head_dim", "intermediate_size": "intermediate_size"}
    unknown = {name: field for name, field in unknown.items() if differs_by_layer(config, field)}
    return {name: int(width) for name, width in widths.items() if width and name not in unknown}


def _widest_head(config: PretrainedConfig) -> int | None:
    heads = size_of(config, "num_attention_heads")
    if differs_by_layer(config, "head_dim"):
        return max(int(config.per_layer_config[layer].head_dim) for layer in range(config.num_hidden_layers))
    if not heads:
        return None
    if size_of(config, "kv_lora_rank"):
        return (size_of(config, "qk_nope_head_dim") or 0) + (size_of(config, "qk_rope_head_dim") or 0)
    return size_of(config, "head_dim") or int(config.hidden_size // heads)


def _shared_width(config: PretrainedConfig) -> int:
    """Of what is cut beside the routed experts; 0 where they are of a width of their own, or there is nothing."""
    names = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    shared = next((getattr(config, name) for name in names if getattr(config, name, None)), 0)
    return shared * (size_of(config, "moe_intermediate_size") or 0)
