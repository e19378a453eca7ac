"""Which layers choose experts: in fewer bits than the job computes in they would send tokens elsewhere. And which of
them draw random numbers to do so."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

_NAMES = frozenset({"gate", "router", "shared_expert_gate"})
"""What modules are called that choose experts, or say how much shared ones count."""


def is_router(name: str) -> bool:
    """Whether the layer of this name chooses experts, or lies in a module that does (Hunyuan's `mlp.gate.wg`)."""
    return not _NAMES.isdisjoint(name.split("."))


def noise_told(model: nn.Module) -> str | None:
    """What a layout changes of the losses, in a line, where routers draw numbers in training; None where none does.

    Mixtral multiplies what goes into a router by 1 give or take the noise, PhiMoE draws among the experts whose scores
    are so near the best: both keep its size as their own attribute.
    """
    stated = (value for module in model.modules() for name, value in vars(module).items() if "jitter" in name)
    sizes = {value for value in stated if isinstance(value, float) and value > 0}
    if not sizes:
        return None
    return (
        f"{', '.join(f'{size:g}' for size in sorted(sizes))}, drawn by each rank for its own tokens: losses are those"
        " of one process but for the draw; router_jitter_noise: 0 in the model's configuration turns it off"
    )


def copy_noisy_inputs(model: nn.Module) -> None:
    """Has Mixtral's blocks, and those that are made like them, multiply a copy of their input by noise, not the input.

    DeepSpeed's hooks for stage 3 are torch's around a module's backward pass, which make that input a view that nobody
    may change. (Where a router changes its own input, its experts see it too: a copy would spare them the noise.)
    """
    for module in model.modules():
        if getattr(module, "jitter_noise", 0.0) > 0:
            module.forward = partial(_of_a_copy, module.forward)


def _of_a_copy(forward: Callable[..., Any], hidden: torch.Tensor) -> Any:
    return forward(hidden.clone())
