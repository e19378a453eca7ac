"""Gated feed-forward blocks that keep one tensor less for their backward pass, where a model's code is Llama's.

`down(act(gate(x)) * up(x))` keeps four tensors of the block's width: what both products gave, the activated gate, and
the result. The activated gate is made again from the gate, by the same kernel, so that no number changes: a quarter of
what the block keeps is saved for one more read and write of it. Models stay Hugging Face's.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP

from trainer.models.known_code import class_like, is_known

KNOWN = (LlamaMLP,)
"""Its code is that of more than a hundred families, shared experts' too."""

_aten = torch.ops.aten


def thin_gates(model: nn.Module) -> None:
    """Has every block of `model` whose code is a known one's, and whose activation is one kernel, make it again."""
    for module in model.modules():
        kind: Any = type(module)
        if is_gated(kind) and _gelu_kind(module.act_fn) is not None:
            module.__class__ = _thin(kind)


def is_gated(kind: type[nn.Module]) -> bool:
    """Whether a class's forward pass is a known one's, by its bytecode."""
    return is_known(kind, KNOWN)


def _gelu_kind(activation: Any) -> str | None:
    """Of GELU which (torch's names), "" for SiLU, None for functions that are more than one of torch's kernels."""
    if isinstance(activation, nn.SiLU | SiLUActivation):
        return ""
    computed = getattr(activation, "act", None)  # GELUActivation's and GELUTanh's
    if isinstance(computed, functools.partial) and computed.func is F.gelu:
        return str(computed.keywords["approximate"])
    return "none" if computed is F.gelu else None


class _Gated(torch.autograd.Function):
    """activation(gate) * up, of which both factors' sources are kept."""

    clear_saved_tensors_on_access = True
    """So that each goes when it has been read for the last time: beside the gradient that comes in, there are never
    more than three tensors of the block's width."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, gelu_kind: str) -> torch.Tensor:
        ctx.gelu_kind = gelu_kind
        ctx.save_for_backward(gate, up)
        return _activated(gate, gelu_kind) * up

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        of_gate = of_up = None
        if ctx.needs_input_grad[0]:
            product = gradients[0] * up
            del up
            of_gate = _before(gate, product, ctx.gelu_kind)
            del product
        if ctx.needs_input_grad[1]:
            activated = _activated(gate, ctx.gelu_kind)
            del gate
            of_up = gradients[0] * activated
        return of_gate, of_up, None


def _activated(gate: torch.Tensor, gelu_kind: str) -> torch.Tensor:
    return F.gelu(gate, approximate=gelu_kind) if gelu_kind else F.silu(gate)


def _before(gate: torch.Tensor, gradient: torch.Tensor, gelu_kind: str) -> torch.Tensor:
    """The gradient of what was activated, by autograd's own kernels."""
    if gelu_kind:
        return _aten.gelu_backward(gradient, gate, approximate=gelu_kind)  # type: ignore[no-any-return]
    return _aten.silu_backward(gradient, gate)  # type: ignore[no-any-return]


@functools.cache
def _thin(kind: Any) -> Any:
    """A class like `kind`, also by its name, whose activated gate isn't kept."""

    def forward(self: Any, hidden: torch.Tensor) -> Any:
        gate, up = self.gate_proj(hidden), self.up_proj(hidden)
        if torch.compiler.is_compiling():  # which makes again what is cheap by itself
            return self.down_proj(self.act_fn(gate) * up)
        return self.down_proj(_Gated.apply(gate, up, _gelu_kind(self.act_fn)))  # type: ignore[no-untyped-call]

    return class_like(kind, forward, _thin)
