"""Which layers choose experts: in fewer bits than the job computes in they would send tokens elsewhere."""

_NAMES = frozenset({"gate", "router", "shared_expert_gate"})
"""What modules are called that choose experts, or say how much shared ones count."""


def is_router(name: str) -> bool:
    """Whether the layer of this name chooses experts, or lies in a module that does (Hunyuan's `mlp.gate.wg`)."""
    return not _NAMES.isdisjoint(name.split("."))
