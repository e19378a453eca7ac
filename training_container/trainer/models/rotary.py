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


def settle(model: nn.Module, sequence_length: int) -> None:
    """Gives every longrope of `model` the frequencies for sequences of this length, for good."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind == _CHOSEN_EACH_TIME:
            _choose(module, sequence_length)
            setattr(module, "rope_type", _SETTLED)  # noqa: B010  # no parameter, buffer or module
        elif isinstance(kind, dict):  # by type of layer
            for layer_type in [name for name, each in kind.items() if each == _CHOSEN_EACH_TIME]:
                _choose(module, sequence_length, layer_type=layer_type)
                kind[layer_type] = _SETTLED


@torch.no_grad()
def _choose(module: Any, sequence_length: int, **which: str) -> None:
    """Lets the module choose for itself, by one forward pass over a last position."""
    module(torch.zeros(1), torch.tensor([[sequence_length - 1]]), **which)
