"""What the rules of `trainyard.spec.obstacles` ask of a model, from what a job or the folder of its model states."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from trainyard.errors import InputError
from trainyard.planner.config_values import listed
from trainyard.planner.families import own_config_from_source
from trainyard.planner.shapes import ModelShape
from trainyard.spec.job import JobSpec
from trainyard.spec.model_types import position_names
from trainyard.spec.obstacles import job_obstacles
from trainyard.spec.support import OWN_HEAD_NORMS, ModelFacts, causal_if, handed_along, layer_drop, state_heads


def facts_of(job: JobSpec, shape: ModelShape | None) -> ModelFacts:
    """The job's language model, as far as it is known here; `shape`: its sizes, where the formulas know them."""
    config = _text_config(job) if job.task == "causal_lm" else {}
    model_type = None if config.get("model_type") is None else str(config["model_type"])
    positions = [config[name] for name in position_names(model_type) if config.get(name) is not None]
    facts = ModelFacts(
        model_type=model_type,
        num_layers=_whole(config.get("num_hidden_layers", config.get("n_layer"))),
        layer_types=frozenset(map(str, listed(config, "layer_types") or ())),
        max_positions=_whole(positions[0]) if positions else None,
        balances_router=bool(config.get("output_router_logits", False)),
        router_noise=_share(config.get("router_jitter_noise")),
        norms_heads=any(config.get(name) is True for name in OWN_HEAD_NORMS.values()),
        handed_along=handed_along(model_type, config.get),
        causal_if=causal_if(model_type, config.get),
        layer_drop=layer_drop(config.get),
        state_heads=state_heads(model_type, config.get),
    )
    return facts if shape is None else _with_sizes(facts, config, shape)


def check_job(job: JobSpec, shape: ModelShape | None) -> None:
    """InputError, in one line, for what the trainer would refuse of the job under every layout."""
    if (obstacle := next(job_obstacles(job, facts_of(job, shape)), None)) is not None:
        raise InputError(obstacle)


def _with_sizes(facts: ModelFacts, config: Mapping[str, Any], shape: ModelShape) -> ModelFacts:
    # Some families have no key/value heads of their own, and a configuration that states them all the same.
    stated = _whole(config.get("num_key_value_heads"))
    own_width = shape.shared_ffn if _whole(config.get("shared_expert_intermediate_size")) else 0
    split = {
        "num_attention_heads": shape.heads,
        "num_key_value_heads": stated or shape.kv_heads,
        "intermediate_size": shape.ffn,
        "moe_intermediate_size": shape.moe_ffn if shape.shared_ffn and not own_width else 0,
        "shared_expert_intermediate_size": own_width,
        "linear_num_key_heads": shape.delta_key_heads,
        "linear_num_value_heads": shape.delta_value_heads,
    }
    rows = {
        "heads": 0 if shape.wide_head_dim else shape.value_dim,  # of two widths
        "intermediate_size": shape.ffn,
        "shared experts": shape.shared_ffn,
        "linear_num_value_heads": shape.delta_value_width,
    }
    return dataclasses.replace(
        facts,
        num_layers=shape.layers,
        num_experts=shape.experts,
        has_query_latent=shape.q_lora_rank > 0 if shape.kv_lora_rank else None,
        hidden_size=shape.hidden,
        split_sizes={name: size for name, size in split.items() if size},
        widest_head=max((kind.head_dim + kind.rope_dim for number, kind in shape.attentions if number), default=None),
        row_widths={name: width for name, width in rows.items() if width},
    )


def _text_config(job: JobSpec) -> Mapping[str, Any]:
    """The configuration, of a model with other parts that of its language model; empty where nothing tells."""
    stated: Mapping[str, Any] | None = job.model.config
    if stated is None:
        assert job.model.source is not None
        try:
            stated = own_config_from_source(job.model.source)
        except InputError:
            return {}
    text = stated.get("text_config")
    return text if isinstance(text, dict) else stated


def _whole(value: object) -> int | None:
    """A size, where it is one: others are refused by who reads all of them."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _share(value: object) -> float:
    """Likewise of a number that need not be whole; 0 where there is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
