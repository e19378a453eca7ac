"""Model FLOPs of a trained token, as speed is published."""

from typing import Any


def flops_per_token(shape: dict[str, Any], sequence_length: int, *, method: str) -> dict[str, float]:
    """Model FLOPs a trained token, without recomputation, in both conventions in use.

    full: 6 N + 12 L H S, N without the input embedding (torchtitan's); causal: half of the attention scores (NeMo's).
    LoRA leaves out a third, as NeMo publishes it: of attention too, which has no frozen weights, so that a job's own
    figures are more (3% for an 8B at 4096).
    """
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    inner = shape["head_dim"] * shape["num_attention_heads"]
    keys = shape["head_dim"] * shape["num_key_value_heads"]
    block = 2 * hidden * inner + 2 * hidden * keys + 3 * hidden * shape["intermediate_size"]
    weights = layers * block + hidden * shape["vocab_size"]
    scores = 12 * layers * inner * sequence_length
    share = 1.0 if method == "full" else 2 / 3
    return {"full": share * (6 * weights + scores), "causal": share * (6 * weights + scores / 2)}
