"""What a configuration may state beside sizes means the same to the plan and to transformers, in every family."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from trainyard.errors import InputError
from trainyard.planner.config_values import NotCoveredError
from trainyard.planner.families import ATTENTION_DROPOUT, FAMILIES, WRITTEN_OUT, shape_from_config, writes_scores_out

Counted = Callable[[dict[str, Any]], int]

NARROW = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
NARROW |= {"vocab_size": 500, "num_hidden_layers": 4, "pad_token_id": 0, "moe_intermediate_size": 40}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
OWN: dict[str, dict[str, Any]] = {
    # Another width than by default, which must not stand in for it.
    "bloom": {"hidden_size": 96},
    "dots1": {"n_shared_experts": 1},
    "falcon": {"new_decoder_architecture": True},
    # Layers' own inputs have no formula.
    "gemma4_text": {"hidden_size_per_layer_input": 0, "top_k_experts": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2},
    "ministral": {"head_dim": 16},
    "opt": {"word_embed_proj_dim": 64},
}
NESTED = {"qwen3_5", "qwen3_5_moe"}
"""Their sizes are in text_config; their text parts are families of their own."""
PLAIN = sorted(set(FAMILIES) - NESTED)
RUNS: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
    "deepseek_v32": {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
    "glm_moe_dsa": {"num_key_value_heads": 4},
    "gptj": {"rotary_dim": 8},
    "minicpm3": {"num_key_value_heads": 4},
    "youtu": {"num_key_value_heads": 4},
}
"""What a small one needs that is not only made, but runs."""


def _small(model_type: str) -> dict[str, Any]:
    default = AutoConfig.for_model(model_type)
    known = {*default.to_dict(), *default.attribute_map}
    sizes = {name: value for name, value in NARROW.items() if name in known}
    own = next((name for name in reversed(EXPERTS) if name in default.to_dict()), None)
    if own is not None:
        sizes |= {own: 6, "num_experts_per_tok": 2}
    return {"model_type": model_type, **sizes, **OWN.get(model_type, {})}


def _real(config: dict[str, Any], real_parameters: Counted) -> int | None:
    """None: transformers makes no such model."""
    try:
        return real_parameters(config)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, ZeroDivisionError, StrictDataclassError):
        return None


def _planned(config: dict[str, Any]) -> int | None:
    """None: the plan says that it doesn't know such a model, or that there is none."""
    try:
        return shape_from_config(config).params
    except InputError:
        return None


@pytest.mark.parametrize("model_type", PLAIN)
def test_a_small_one_has_the_real_number_of_parameters(model_type: str, real_parameters: Counted) -> None:
    config = _small(model_type)
    assert shape_from_config(config).params == real_parameters(config)


@pytest.mark.parametrize("model_type", PLAIN)
def test_switches_mean_the_same(model_type: str, real_parameters: Counted) -> None:
    """Biases, ties, norms: each switch turned over alone is counted, or the model is said not to be covered."""
    small, covered, refused = _small(model_type), 0, []
    switches = {
        name: value for name, value in AutoConfig.for_model(model_type).to_dict().items() if value in (True, False)
    }
    asked = {"attention_bias", "mlp_bias", "use_bias", "tie_word_embeddings"}
    for name in sorted({name for name, value in switches.items() if isinstance(value, bool)} | asked):
        config = small | {name: not switches.get(name, False)}
        real = _real(config, real_parameters)
        try:
            planned = shape_from_config(config).params
        except NotCoveredError:
            refused.append(name)
            continue
        except InputError:
            assert real is None, name
            continue
        covered += 1
        assert real is None or planned == real, name
    assert covered > 4 * len(refused), refused


@pytest.mark.parametrize("model_type", PLAIN)
def test_other_names_of_a_size_mean_the_same(model_type: str, real_parameters: Counted) -> None:
    """transformers maps names to a family's own, and takes them before these; a name of other families it ignores."""
    small = _small(model_type)
    default = AutoConfig.for_model(model_type)
    numbers = {alias for alias, own in default.attribute_map.items() if isinstance(getattr(default, own, None), int)}
    for name in sorted((numbers | set(EXPERTS)) - {"num_mtp_layers"}):
        config = small | {name: 4 if "layers" in name or "expert" in name else 32}
        real = _real(config, real_parameters)
        assert real is None or _planned(config) == real, name


NULLS = (
    "head_dim",
    "num_key_value_heads",
    "num_kv_heads",
    "n_embed",
    "n_inner",
    "intermediate_size",
    "ffn_hidden_size",
)
NULLS += (
    "num_ln_in_parallel_attn",
    "attention_types",
    "layer_types",
    "mlp_layer_types",
    "no_rope_layers",
    "moe_layers",
)


@pytest.mark.parametrize("model_type", PLAIN)
def test_a_null_means_the_same(model_type: str, real_parameters: Counted) -> None:
    for name in NULLS:
        config = _small(model_type) | {name: None}
        real = _real(config, real_parameters)
        assert real is None or _planned(config) == real, name


def _windowed(config: PretrainedConfig) -> tuple[int, int]:
    """Layers of transformers' model that see a window, and the window."""
    if config.model_type == "gpt_neo":
        return config.attention_layers.count("local"), config.window_size
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    count = config.num_hidden_layers if kinds is None else kinds.count("sliding_attention")
    return (count, window) if window and count else (0, 0)


WINDOWS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 96},
    {"sliding_window": None},
    {"sliding_window": 96, "use_sliding_window": True, "max_window_layers": 1},
    {"sliding_window": 96, "use_sliding_window": True, "max_window_layers": 3},
    {"sliding_window": 96, "use_sliding_window": True, "no_rope_layers": [1, 0, 0, 1]},
    {"sliding_window": 96, "use_sliding_window": True, "no_rope_layer_interval": 2},
    {"sliding_window": 96, "sliding_window_pattern": 2},
    {
        **{"sliding_window": 96, "use_sliding_window": True, "sliding_window_pattern": "LLLG"},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    },
]
NO_LAYER_TYPES = {"mistral", "mixtral", "phi3", "phimoe", "ministral3", "starcoder2", "qwen3_moe"}
"""They have one window for all layers, whatever a list of layers says."""


@pytest.mark.parametrize("stated", WINDOWS, ids=str)
@pytest.mark.parametrize(
    "model_type", [name for name in PLAIN if not name.startswith(("qwen3_5", "qwen3_next", "llama4"))]
)
def test_windows_are_those_of_transformers(model_type: str, stated: dict[str, Any]) -> None:
    config = _small(model_type) | stated
    if model_type in NO_LAYER_TYPES or model_type == "nemotron_h":
        config.pop("layer_types", None)
    rest = {key: value for key, value in config.items() if key != "model_type"}
    try:
        real = AutoConfig.for_model(model_type, **rest)
    except (TypeError, ValueError, ZeroDivisionError, StrictDataclassError):
        pytest.skip("transformers takes no such configuration")
    has_windows = hasattr(AutoConfig.for_model(model_type), "sliding_window") or model_type == "gpt_neo"
    shape = shape_from_config(config)
    expected = _windowed(real) if has_windows else (0, 0)
    assert (shape.windowed_layers, shape.attention_window) == expected


@pytest.mark.parametrize("model_type", PLAIN)
def test_attention_is_written_out_where_transformers_writes_it_out(model_type: str) -> None:
    """The trainer asks the same: without a kernel of torch's it takes attention that is written out."""
    classes = AutoModelForCausalLM._model_mapping
    supported = classes[type(AutoConfig.for_model(model_type))]._supports_sdpa
    assert (model_type in WRITTEN_OUT) is not supported
    assert writes_scores_out({"model_type": model_type}) is not supported


@pytest.mark.parametrize("model_type", PLAIN)
def test_scores_are_dropped_where_transformers_drops_them(model_type: str) -> None:
    name = ATTENTION_DROPOUT.get(model_type, ("attention_dropout", 0.0))[0]
    default = AutoConfig.for_model(model_type)
    share = default.attn_config.attn_pdrop if model_type == "mpt" else getattr(default, name, 0.0)
    assert shape_from_config(_small(model_type)).attention_dropout is bool(share)


def _drops_scores(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether transformers' model, as it trains, drops any."""
    tokens, shares = 8, [0.0]
    dropout, attention = torch.nn.functional.dropout, torch.nn.functional.scaled_dot_product_attention

    def watched_dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        # Of heads and their rows alone: what else is dropped has three dimensions.
        shares.append(p if training and x.dim() == 4 and x.shape[-2] == tokens else 0.0)
        return dropout(x, p, training, inplace)

    def watched_attention(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        shares.append(options.get("dropout_p") or 0.0)
        return attention(*tensors, **options)

    stated = {name: value for name, value in config.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **stated)).train()
    monkeypatch.setattr(torch.nn.functional, "dropout", watched_dropout)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched_attention)
    with torch.no_grad():
        model(torch.arange(tokens)[None])
    return max(shares) > 0


@pytest.mark.parametrize("model_type", PLAIN)
def test_a_stated_share_of_scores_is_dropped_where_transformers_reads_it(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ATTENTION_DROPOUT.get(model_type, ("attention_dropout", 0.0))[0]
    config = _small(model_type) | {name: 0.1} | RUNS.get(model_type, {})
    assert shape_from_config(config).attention_dropout is _drops_scores(config, monkeypatch)


def test_what_mpt_drops_is_stated_within_its_attention() -> None:
    config = _small("mpt")
    assert shape_from_config(config | {"attn_config": {"attn_pdrop": 1}}).attention_dropout
    assert not shape_from_config(config | {"attn_config": None}).attention_dropout


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "deepseek_v2", "mlp_bias": True},
        {"model_type": "nemotron_h", "use_bias": True},
        {"model_type": "nemotron_h", "mlp_bias": True},
        {"model_type": "nemotron_h", "use_conv_bias": False},
    ],
)
def test_what_no_formula_describes_is_not_covered(config: dict[str, Any]) -> None:
    with pytest.raises(NotCoveredError):
        shape_from_config(config)


@pytest.mark.parametrize(
    ("model_type", "stated"),
    [
        ("qwen3_next", {"linear_conv_kernel_dim": 3}),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 2}),
        ("nemotron_h", {"conv_kernel": 3}),
        ("deepseek_v3", {"attention_bias": True, "q_lora_rank": None}),
        ("glm4_moe_lite", {"attention_bias": True, "q_lora_rank": None}),
    ],
)
def test_rarer_sizes_are_counted(model_type: str, stated: dict[str, Any], real_parameters: Counted) -> None:
    config = _small(model_type) | stated
    assert shape_from_config(config).params == real_parameters(config)
