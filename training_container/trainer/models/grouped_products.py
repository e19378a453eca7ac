"""Experts' products in the type of autocast.

torch's product of groups takes no part in autocast (2.13; pytorch issue 174763): over float32 weights, as plain data
parallelism has them, experts would be multiplied in float32 whatever the job's precision says, slower, and keep twice
the memory. `test_library_traps.py` fails when upstream mends it.
"""

import sys
from typing import Any

import torch

_MODULE, _NAME = "transformers.integrations.moe", "_grouped_mm"
_MARK = "is_narrowed"


def narrow_grouped_products() -> None:
    """From now on, transformers' products of groups cast what they read as autocast casts it for other products.
    Nothing happens where no model with experts has been made, nor a second time."""
    module = sys.modules.get(_MODULE)
    theirs = getattr(module, _NAME, None)
    if theirs is None or hasattr(theirs, _MARK):
        return

    def narrowed(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> Any:  # their name
        kind = weight.device.type
        if not torch.is_autocast_enabled(kind) or weight.dtype != torch.float32:
            return theirs(input, weight, offs)
        dtype = torch.get_autocast_dtype(kind)
        return theirs(input.to(dtype), weight.to(dtype), offs)

    setattr(narrowed, _MARK, True)
    setattr(module, _NAME, narrowed)
