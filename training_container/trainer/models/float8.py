"""fp8: the blocks' linear layers multiply in 8-bit floats, by torchao, on GPUs that have units for them.

What stays as under bf16: weights and moments (float32), everything between the matrix products, gradients and what
travels. Before each product torchao scales both operands by their largest element (dynamic, one scale a tensor) to
e4m3, gradients to e5m2; the products themselves are torch's `_scaled_mm`. A converted layer has the same parameters
under the same names, so a checkpoint knows nothing of fp8. Under LoRA the frozen layers are converted
(`float8_frozen`), and the adapters beside them compute in bf16.
"""

from typing import Any

import torch
from torch import nn

from trainer.models.build import transformer_blocks
from trainer.models.routers import is_router
from trainyard.errors import InputError
from trainyard.spec.job import ResolvedJob
from trainyard.spec.obstacles import FP8_MULTIPLE

EMULATE = False
"""For tests: the same roundings by products in float32, on any device, and much slower than bf16."""

CAPABILITY = (8, 9)
"""The first GPUs with 8-bit units: Ada; then Hopper."""

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""What torchao's conversion, which makes a new layer, leaves behind."""


def check(job: ResolvedJob, *, device_type: str) -> None:
    """InputError, in one line and before anything is read, where a job asks for fp8 that can't be had here.

    What no machine could do (4-bit weights, DeepSpeed, odd sizes) is refused before: `JobSpec`, `spec.obstacles`.
    """
    if job.spec.training.precision != "fp8":
        return
    reason = None if EMULATE else _machine_obstacle(device_type)
    reason = reason or _package_obstacle()
    if reason is not None:
        raise InputError(f"training.precision: fp8 {reason}; use bf16")


def _machine_obstacle(device_type: str) -> str | None:
    if device_type != "cuda":
        return "needs an NVIDIA GPU, and this machine has none"
    if (found := torch.cuda.get_device_capability()) < CAPABILITY:
        wanted, own = (".".join(map(str, numbers)) for numbers in (CAPABILITY, found))
        name = torch.cuda.get_device_name()
        return f"needs a GPU of compute capability {wanted} or more (Ada, Hopper, ...), and this {name} has {own}"
    return None


def _package_obstacle() -> str | None:
    try:
        import torchao.float8  # noqa: F401  # all that is asked is whether it can be imported
    except ImportError as error:
        return f"needs the package torchao, and it can't be imported here ({' '.join(str(error).split())[:120]})"
    return None


def convert_blocks(model: nn.Module, job: ResolvedJob) -> str | None:
    """Converts the linear layers of `model`'s blocks in place, if the job asks for fp8; says which, and which not.

    Before the model is cut, wrapped or compiled. InputError where there is nothing to convert.
    """
    if job.spec.training.precision != "fp8":
        return None
    kept: dict[str, list[str]] = {}
    num_converted = 0
    for block in transformer_blocks(model):
        takes = {name for name, module in block.named_modules() if type(module) is nn.Linear and not _adapts(name)}
        for name in sorted(takes):
            reason = _obstacle(name, block.get_submodule(name))
            if reason is not None:
                kept.setdefault(reason, []).append(name)
                takes.remove(name)
        num_converted += len(takes)
        _convert(block, takes)
    if num_converted == 0:
        raise InputError("training.precision: fp8 finds no linear layer in this model's blocks to convert; use bf16")
    return _described(num_converted, kept, has_adapter=job.spec.model.adapter is not None)


def _convert(block: nn.Module, names: set[str]) -> None:
    """Puts torchao's layers in the places of those of these names; frozen ones multiply out no gradient of weights."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from trainer.models.float8_frozen import FrozenFloat8Linear

    replaced = {name: block.get_submodule(name) for name in names}
    convert_to_float8_training(
        block, config=Float8LinearConfig(emulate=EMULATE), module_filter_fn=lambda _, name: name in names
    )
    for name, layer in replaced.items():
        converted = block.get_submodule(name)
        for kind in _HOOKS:  # selective recomputation has marked a block's last product by some
            setattr(converted, kind, getattr(layer, kind))
        if not converted.weight.requires_grad:
            converted.__class__ = FrozenFloat8Linear  # another forward pass over the same attributes


def _adapts(name: str) -> bool:
    """Whether a linear layer, of this name in its block, is one of an adapter's two."""
    return not {"lora_A", "lora_B"}.isdisjoint(name.split("."))


def _obstacle(name: str, layer: Any) -> str | None:
    """Why a linear layer, of this name in its block, keeps its bf16 product; None: it doesn't."""
    if is_router(name):
        return "they choose experts"
    if "experts" in name.removesuffix(".base_layer").split(".")[:-1]:
        return "their number of tokens differs from step to step"
    if layer.in_features % FP8_MULTIPLE or layer.out_features % FP8_MULTIPLE:
        return f"their sizes are no multiples of {FP8_MULTIPLE}"
    return None


def _described(num_converted: int, kept: dict[str, list[str]], *, has_adapter: bool) -> str:
    frozen = "frozen " if has_adapter else ""
    parts = [f"torchao, one scale a tensor; {num_converted} {frozen}linear layers of the blocks"]
    for reason, names in sorted(kept.items()):
        parts.append(f"{len(names)} stay in bf16, for {reason} ({', '.join(sorted(set(names)))})")
    rest = "adapters and all outside of the blocks stay" if has_adapter else "all outside of the blocks stays"
    return "; ".join([*parts, f"{rest} in bf16"])


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The converted layers."""
    names = {"Float8Linear", "FrozenFloat8Linear"}
    return [module for module in model.modules() if type(module).__name__ in names]
