"""Experts that lie packed in a few weights, one slice an expert: what a module of them is known by, not its class."""

from torch import nn

MATRICES, BIASES = 3, 2
"""Dimensions of such weights: (experts, out, in) or (experts, in, out), and (experts, out)."""


def packed_matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """By name the module's own weights of three dimensions, a convolution's among them."""
    return {name: weight for name, weight in module.named_parameters(recurse=False) if weight.ndim == MATRICES}


def num_packed(module: nn.Module) -> int | None:
    """How many experts the module holds, if all of its own weights have one slice of each: matrices, and perhaps their
    biases (gpt-oss). None: it holds none. A router has a row an expert, and no matrix."""
    number = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    is_packed = all(weight.ndim in (BIASES, MATRICES) and weight.size(0) == number for weight in own)
    return number if is_packed and packed_matrices(module) else None
