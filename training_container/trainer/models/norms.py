"""RMS norms by torch's own kernel, where a model's code has one written out.

Nearly all families have LlamaRMSNorm's lines, word for word: a cast to fp32, a square, a mean, a product, a cast back
and the weight, each a kernel that reads and writes the whole tensor, with two copies of it kept for the backward pass;
others multiply with the weight before they cast, as OLMo 2 and gpt-oss. As one kernel (`aten._fused_rms_norm`, which
CUDA has) a norm reads its input, writes its output and keeps no more than its input: a ninth of the bytes. In fp32
nothing changes but the order of sums; in 16 bits the result is rounded once, where Llama's is twice.

Gemma's norm computes in fp32 with one more than its weight, whatever it is given, and so it does here: by the kernel
between two casts, half of the bytes forward and a quarter backward, with one fp32 copy kept instead of two. Gemma 4's
computes in fp32, too, with a plain weight or none, so that the kernel alone does where both are of one type. Models
stay Hugging Face's: names, weights and exports are the same.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from trainer.models.known_code import class_like, is_known

KNOWN = (LlamaRMSNorm, Olmo2RMSNorm, HeliumRMSNorm, Llama4TextRMSNorm)
"""Whose forward passes are torch's RMS norm."""

WIDE = (Gemma2RMSNorm,)
"""In fp32, times one more than the weight: all of Gemma's, Qwen3-Next's and Qwen3.5's."""

CASTING = (Gemma4RMSNorm,)
"""In fp32, times a plain weight or none, and back to the type of what is read: Gemma 3n's and Gemma 4's."""

FUSED_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""In float64 the library's code stays, which computes in float32 whatever it is given: proofs are held against that."""


def fuse_norms(model: nn.Module) -> None:
    """Has every norm of `model` whose code is that of a known one computed by one kernel."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        kind: Any = type(module)
        if is_known(kind, CASTING):
            module.__class__ = _fused_casting(kind)  # as FSDP does it
        elif is_written_out(kind) and isinstance(weight, torch.Tensor) and weight.dim() == 1:
            module.__class__ = _fused_wide(kind) if is_known(kind, WIDE) else _fused(kind)


def is_written_out(kind: type[nn.Module]) -> bool:
    """Whether a class's forward pass is a known one's, by its bytecode: of other code nothing is assumed."""
    return is_known(kind, (*KNOWN, *WIDE, *CASTING))


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """hidden / root mean square over its last dim, times weight (that dim); both of one type, which the result has.

    By its inner name: autocast widens what `F.rms_norm` is given on CUDA to float32, as no model's own code does.
    """
    result: torch.Tensor = torch.ops.aten._fused_rms_norm(hidden, [hidden.shape[-1]], weight, epsilon)[0]
    return result


@functools.cache
def _fused(kind: Any) -> Any:
    """A class like `kind`, also by its name, which asks torch's kernel."""

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:  # their name
        weight = self.weight
        # Of two types (autocast's: a norm of a product's output) no kernel takes, and each family's code says which
        # of them it returns.
        if hidden_states.dtype != weight.dtype or weight.dtype not in FUSED_TYPES:
            return kind.forward(self, hidden_states)
        epsilon = self.eps if hasattr(self, "eps") else self.variance_epsilon
        return _in_their_order(hidden_states, lambda each: rms_norm(each, weight, epsilon))

    return class_like(kind, forward, _fused)


@functools.cache
def _fused_wide(kind: Any) -> Any:
    """The same of Gemma's, which takes any types and returns that of what it is given."""

    def forward(self: Any, x: torch.Tensor) -> Any:  # their name
        if not {x.dtype, self.weight.dtype} <= set(FUSED_TYPES):
            return kind.forward(self, x)
        scale = 1.0 + self.weight.float()
        return _in_their_order(x, lambda each: rms_norm(each.float(), scale, self.eps).to(x.dtype))

    return class_like(kind, forward, _fused_wide)


@functools.cache
def _fused_casting(kind: Any) -> Any:
    """The same of Gemma 4's, which takes any types, too; without a weight it is of what it is given alone."""

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:  # their name
        weight = self.weight if self.with_scale else None
        if not {hidden_states.dtype, hidden_states.dtype if weight is None else weight.dtype} <= set(FUSED_TYPES):
            return kind.forward(self, hidden_states)
        if weight is None or weight.dtype == hidden_states.dtype:
            return _in_their_order(hidden_states, lambda each: rms_norm(each, weight, self.eps))
        scale, given = weight.float(), hidden_states.dtype
        return _in_their_order(hidden_states, lambda each: rms_norm(each.float(), scale, self.eps).to(given))

    return class_like(kind, forward, _fused_casting)


def _in_their_order(hidden: torch.Tensor, norm: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """norm(hidden), without another order in memory.

    Of queries with heads before positions, as a view: a kernel would put them in that order, and attention its result,
    only for the output projection to put it back.
    """
    if hidden.dim() == 4 and not hidden.is_contiguous():
        in_order = hidden.transpose(1, 2)
        if in_order.is_contiguous():
            return norm(in_order).transpose(1, 2)
    return norm(hidden)
