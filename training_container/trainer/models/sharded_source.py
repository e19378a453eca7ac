"""An existing model's weights as files mapped into memory: a rank that shards the model reads no more than its part.

A weight loaded in the type it is stored in is a view of its safetensors file: no memory is spent before it is touched,
and ranks of one host share what is. `deferred_weights` copies a rank's part of it, in the type it is trained in.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

_TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def stored_type(folder: Path) -> torch.dtype | None:
    """The floating-point type that all weights in `folder` have; None when they differ, or it holds no safetensors."""
    found = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  # not a dict
    types = {_TYPES.get(name) for name in found}
    return types.pop() if len(types) == 1 else None


@torch.no_grad()
def to_trained_type(parameters: Iterable[nn.Parameter], precision: str) -> None:
    """Trained weights become float32 (fp64: float64); frozen ones (under an adapter) the type that the job computes in.

    For parameters that have no values yet: the type is that in which they get them.
    """
    trained_type = torch.float64 if precision == "fp64" else torch.float32
    frozen_type = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, trained_type)
    for parameter in parameters:
        wanted = trained_type if parameter.requires_grad else frozen_type
        if parameter.dtype != wanted and parameter.is_floating_point():
            parameter.data = parameter.data.to(wanted)
