"""A frozen linear layer in 8-bit floats: its product, and the gradient of its input; its weight has none.

torchao's own layer also keeps its input and multiplies out the gradient of its weight, whether or not the weight takes
one: a third of the work and, beside an adapter that keeps the same input anyway, memory for nothing. The roundings are
torchao's own. The weight's is made anew in the backward pass: kept, it would take half of the weights' memory again.

Importing this imports torchao.
"""

from typing import Any

import torch
from torchao.float8.config import e4m3_dtype, e5m2_dtype
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig


class FrozenFloat8Linear(Float8Linear):  # type: ignore[misc]  # torchao has no types
    """torchao's layer, of whose three products it computes the two that a frozen weight needs."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        device_type = hidden.device.type
        if torch.is_autocast_enabled(device_type):
            hidden = hidden.to(torch.get_autocast_dtype(device_type))
        output: torch.Tensor = _Product.apply(hidden, self.weight, self.linear_mm_config)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(output.dtype)


@torch._dynamo.allow_in_graph
class _Product(torch.autograd.Function):
    """hidden @ weight.T, both rounded to e4m3 by their largest elements; gradients to e5m2."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, settings: LinearMMConfig) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.settings = settings
        rows = _rounded(hidden.reshape(-1, hidden.size(-1)), e4m3_dtype, GemmInputRole.INPUT, settings)
        columns = _rounded(weight.t(), e4m3_dtype, GemmInputRole.WEIGHT, settings)
        return torch.mm(rows, columns).reshape(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        (weight,) = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.size(-1))
        rounded = _rounded(rows, e5m2_dtype, GemmInputRole.GRAD_OUTPUT, ctx.settings)
        # Rounded as in the forward pass, and turned afterwards: the same memory order is asked of torch's kernel.
        columns = _rounded(weight.t(), e4m3_dtype, GemmInputRole.WEIGHT, ctx.settings).t()
        return torch.mm(rounded, columns).reshape(*gradient.shape[:-1], -1), None, None


def _rounded(values: torch.Tensor, dtype: torch.dtype, role: GemmInputRole, settings: LinearMMConfig) -> torch.Tensor:
    rounded: torch.Tensor = hp_tensor_to_float8_dynamic(values, dtype, settings, gemm_input_role=role)
    return rounded
