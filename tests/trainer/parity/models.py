"""The models of the campaign's seeds: a family with sizes of its own, adapters beside it, what it drops."""

import random
from typing import Any

from trainer_testing.families import FAMILIES, OWN_SIZES, TIED, adapted_linears, adapter
from trainer_testing.tiny import VOCAB_SIZE

from trainyard.spec.support import OTHER_TENSOR_FAMILIES, ROUTER_FAMILIES

_DROPOUTS = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "gpt_neox": ("hidden_dropout", "attention_dropout"),
}
_DROPPED = 0.1


def draw_model(rng: random.Random, family: str) -> dict[str, Any]:
    """The family's `model.config`."""
    heads = rng.choice((4, 4, 6, 8))
    layers = rng.randint(2, 5)
    more: dict[str, Any] = {"vocab_size": rng.choice((VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE + 1, 128))}
    if family.startswith("GPT-2"):
        return FAMILIES[family] | more | {"n_head": heads, "n_embd": 8 * heads, "n_layer": layers}
    more |= {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": 8 * heads}
    more |= {"intermediate_size": rng.choice((40, 48, 72))}
    keys = rng.choice([number for number in (1, 2, 3, 4, 6, 8) if heads % number == 0])
    if family in OTHER_TENSOR_FAMILIES:
        own = OWN_SIZES.get(family, {})
        return _other_model(family) | own | more | {"num_key_value_heads": heads if "kv_lora_rank" in own else keys}
    known = FAMILIES[family]
    kind = known["model_type"]
    more["num_key_value_heads"] = heads if kind.startswith(("deepseek", "gpt_neox")) else keys
    if "head_dim" in known:  # heads that are no part of the hidden size
        more |= {"head_dim": rng.choice((8, 16)), "hidden_size": rng.choice((32, 40, 48))}
    if kind in ("llama", "qwen3", "gemma"):
        more["attention_bias"] = rng.random() < 0.3
    if kind == "llama":
        more["mlp_bias"] = rng.random() < 0.3
    if kind == "mistral":
        more["sliding_window"] = rng.choice((3, 8, 16))
    return known | more | _experts(rng, kind)


def _experts(rng: random.Random, kind: str) -> dict[str, Any]:
    """A single expert whose weight is normalized has weight 1, and its router no gradient but roundings, which an
    optimizer blows up: there are two of them wherever weights are normalized."""
    number, is_normalized = rng.choice((4, 6, 8)), rng.random() < 0.5
    if kind == "mixtral":
        return {"num_local_experts": number, "num_experts_per_tok": rng.randint(2, 3)} | _balance(rng, kind)
    chosen = {"num_experts_per_tok": 2 if is_normalized else rng.randint(1, 2)}
    chosen |= {"moe_intermediate_size": rng.choice((16, 24)), "norm_topk_prob": is_normalized}
    if kind == "qwen3_moe":
        return chosen | {"num_experts": number} | _balance(rng, kind)
    if kind.startswith("deepseek"):
        groups = {"n_group": 2, "topk_group": rng.randint(1, 2), "n_shared_experts": rng.randint(1, 2)}
        return chosen | groups | {"n_routed_experts": number, "first_k_dense_replace": rng.randint(0, 1)}
    return {}


def _balance(rng: random.Random, kind: str) -> dict[str, Any]:
    """The router's auxiliary loss, with a coefficient that is felt."""
    assert kind in ROUTER_FAMILIES
    return {"output_router_logits": True, "router_aux_loss_coef": 0.5} if rng.random() < 0.6 else {}


def _other_model(family: str) -> dict[str, Any]:
    """Without dropout, which some of them have by default."""
    return {
        **{"model_type": family, "max_position_embeddings": 64, "tie_word_embeddings": family in TIED},
        **{"head_dim": 8, "pad_token_id": 0, "attention_dropout": 0.0, "residual_dropout": 0.0},
    }


def draw_adapter(rng: random.Random, model: dict[str, Any]) -> dict[str, Any] | None:
    """`model.adapter` for a model of FAMILIES; for a good part none."""
    kind = rng.choices((None, "lora", "qlora"), (70, 22, 8))[0]
    if kind is None:
        return None
    known = adapted_linears(model)
    if not model.get("tie_word_embeddings", model["model_type"] == "gpt2"):
        known.append("lm_head")
    usual = next(name for name, stated in FAMILIES.items() if stated["model_type"] == model["model_type"])
    targets = rng.choice((adapter(usual, kind)["targets"], rng.sample(known, rng.randint(1, len(known)))))
    return {"kind": kind, "rank": rng.choice((2, 4)), "alpha": 8.0, "targets": list(targets)}


def draw_noise(
    rng: random.Random, model: dict[str, Any], tuned: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Both with what draws numbers in each step: what the model drops, or an adapter, or noise in a router."""
    if tuned is not None and rng.random() < 0.7:
        return model, tuned | {"dropout": _DROPPED}
    if model["model_type"] == "mixtral" and rng.random() < 0.5:
        return model | {"router_jitter_noise": 0.05}, tuned
    names = _DROPOUTS.get(model["model_type"], ("attention_dropout",))
    return model | dict.fromkeys(names, _DROPPED), tuned
