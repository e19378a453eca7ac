"""Rotary positions whose frequencies transformers chooses anew in every forward pass, chosen once for a job.

longrope (Phi-3; arXiv:2402.13753) has two sets of them: one for up to `original_max_position_embeddings` tokens, one
for more. transformers (5.17 and 5.23, `dynamic_rope_update`) takes the second for a whole forward pass as soon as one
position in it lies beyond. So a sequence would be computed in two ways, by what shares its micro-batch, and, cut over
ranks, by which piece of it a rank has. Here data.sequence_length decides, as in a server that is told the longest text
it will see.
"""

from typing import Any

import torch
from torch import nn

_CHOSEN_EACH_TIME = "longrope"
_SETTLED = "longrope, settled"
"""A type of which `dynamic_rope_update` knows nothing, so that it leaves the frequencies as they are."""
_ORIGINAL = "original_max_position_embeddings"


def settle(model: nn.Module, sequence_length: int) -> None:
    """Gives every longrope of `model` the frequencies for sequences of this length, for good (see `described`)."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind == _CHOSEN_EACH_TIME:
            _choose(module, sequence_length)
            setattr(module, "rope_type", _SETTLED)  # noqa: B010  # no parameter, buffer or module
        elif isinstance(kind, dict):  # by type of layer
            for layer_type in [name for name, each in kind.items() if each == _CHOSEN_EACH_TIME]:
                _choose(module, sequence_length, layer_type=layer_type)
                kind[layer_type] = _SETTLED


def described(model: nn.Module, sequence_length: int) -> str | None:
    """One line on which set a model that was settled computes with; None where it has no longrope.

    Who generates with transformers from what such a job exported gets the short set for a short prompt, whichever was
    learnt with: the line is there to be read before that.
    """
    found = {limit for module in model.modules() for limit in _original_positions(module)}
    if not found:
        return None
    limit = max(found)
    if sequence_length <= limit:
        return f"longrope's short set (data.sequence_length {sequence_length} is within its original {limit} positions)"
    return (
        f"longrope's long set (data.sequence_length {sequence_length} is above its original {limit} positions), for"
        " short documents too: serve the export by its longest length, or shorten the sequence"
    )


def _original_positions(module: Any) -> list[int]:
    """Of each longrope in the module that was settled."""
    kind = getattr(module, "rope_type", None)
    if kind == _SETTLED:
        return [int(module.config.rope_parameters[_ORIGINAL])]
    if isinstance(kind, dict):
        return [int(module.config.rope_parameters[name][_ORIGINAL]) for name in kind if kind[name] == _SETTLED]
    return []


@torch.no_grad()
def _choose(module: Any, sequence_length: int, **which: str) -> None:
    """Lets the module choose for itself, by one forward pass over a last position."""
    module(torch.zeros(1), torch.tensor([[sequence_length - 1]]), **which)
