"""What a request to `predict` may say, and typed access to it."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainyard.errors import InputError

KNOWN_FIELDS = frozenset(
    (
        *("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "seq", "gated_mlp", "tied_embeddings"),
        *("experts", "experts_per_token", "moe_ffn", "model", "params_b"),
        *("gpu", "gpu_mem_gb", "gpus", "gpus_per_node", "interconnect"),
        *("tp", "pp", "vp", "cp", "ep", "dp", "data_replicate", "sharding", "sequence_parallel", "offload"),
        "offload_parameters",
        *("micro_batch", "global_batch", "precision", "recompute", "optimizer", "method", "lora_rank"),
        *("framework", "framework_version"),
        *("encoder_layers", "encoder_seq", "cross_attention", "hybrid_pattern", "mla", "mtp_layers", "shared_ffn"),
        *("dense_layers", "lora_targets", "trains_vocabulary", "quantization", "adapter"),
        *("loss_chunk_tokens", "parallel_loss", "master_weights", "autocast", "offload_checkpoints"),
        *("recompute_modules", "gradient_precision", "moment_precision", "fp8_param_gather"),
        *("deferred_head", "grouped_experts", "gathers_tokens", "last_stage_layers", "learned_positions"),
        "head_products",
        *("expert_overlap", "expert_exchange", "capacity_factor", "cuda_graphs"),
        *("rank", "dropout", "deterministic", "attention", "loss_fusion", "transformer_engine", "expert_tp"),
    )
)


MOST = {
    "layers": 10_000,
    "head_products": 10_000,
    "encoder_layers": 10_000,
    "mtp_layers": 10_000,
    "experts_per_token": 100_000,
    "heads": 100_000,
    "gpus_per_node": 100_000,
    "vp": 10_000,
}
"""Upper limits of single fields; far above what anyone has, low enough for every figure to stay finite."""

MOST_WHOLE = 10**9


MOST_NUMBER = 10**6
"""Of the others: whole numbers, and params_b and gpu_mem_gb."""


def shown(value: object) -> str:
    """A value for a message, cut where it is endless."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "too large to print"
    return text if len(text) <= 80 else f"{text[:80]}..."


class Fields:
    """Typed access to one JSON object; InputError names the field, the value and what is allowed."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def given(self, name: str) -> bool:
        """Whether it says anything."""
        return self._content.get(name) is not None

    def whole(self, name: str, default: int, *, least: int = 1) -> int:
        """A count, `default` where none is given. InputError below `least`, above what any job has, or broken."""
        value = self._content.get(name)
        if value is None:
            return default
        most = MOST.get(name, MOST_WHOLE)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and value > most:
            raise InputError(f"{name}: must be a whole number of at most {most} (given: {shown(value)})")
        # Not a number (NaN) is on neither side.
        if not number or not least <= value <= most or value != int(value):
            raise InputError(f"{name}: must be a whole number of at least {least} (given: {shown(value)})")
        return int(value)

    def number(self, name: str) -> float | None:
        """A number above 0, None where none is given. InputError for any other."""
        value = self._content.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MOST_NUMBER:
            raise InputError(f"{name}: must be a number above 0, of at most {MOST_NUMBER} (given: {shown(value)})")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Yes or no. InputError for anything else."""
        value = self._content.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{name}: must be true or false (given: {shown(value)})")
        return value

    def text(self, name: str) -> str:
        """Words, "" where none are given. InputError for what is none."""
        value = self._content.get(name)
        if value is None:
            return ""
        if name == "framework_version" and isinstance(value, int | float) and not isinstance(value, bool):
            # 24.07 without its quotes; 25.1 was 25.10.
            return f"{value:.2f}" if isinstance(value, float) else shown(value)
        if not isinstance(value, str):
            raise InputError(f"{name}: must be a text (given: {shown(value)})")
        return value

    def words(self, name: str, allowed: Iterable[str]) -> frozenset[str]:
        """Some of a few words, in a list or between commas and blanks; none where none is given. InputError, which
        lists them, for any other."""
        value = self._content.get(name)
        if value is None:
            return frozenset()
        found = value if isinstance(value, list) else re.split(r"[,\s]+", self.text(name).strip())
        options = list(allowed)
        if wrong := [word for word in found if word not in options]:
            raise InputError(f"{name}: must be of {', '.join(options)} (given: {shown(wrong[0])})")
        return frozenset(found)

    def choice(self, name: str, default: str, allowed: Iterable[str]) -> str:
        """One of some words, in whatever letters. InputError, which lists them, for any other."""
        value = self.text(name).lower() or default
        options = list(allowed)
        if value not in options:
            raise InputError(f"{name}: must be one of {', '.join(options)} (given: {self._content[name]!r})")
        return value
