"""Batch normalization over ranks: the layers of a model replaced by ones whose statistics don't depend on the layout.

torch's SyncBatchNorm has no CPU kernels; here two all-reduces of autograd-aware sums do the same on every device.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

Kind = Literal["synchronized", "local", "frozen"]


def replace_batch_norms(model: nn.Module, kind: Kind) -> int:
    """Puts a `BatchNorm` in the place of each nn.BatchNorm2d, names and tensors kept; how many there were."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.BatchNorm2d) and not isinstance(child, BatchNorm)
    ]
    for parent, name, child in found:
        setattr(parent, name, BatchNorm(child, kind))
    return len(found)


class BatchNorm(nn.BatchNorm2d):
    """nn.BatchNorm2d with float32 statistics whatever the weights' type, over the ranks as `kind` says.

    Its running averages are equal on every rank after every pass, so one copy of them is a whole checkpoint.
    """

    def __init__(self, original: nn.BatchNorm2d, kind: Kind) -> None:
        super().__init__(original.num_features, eps=original.eps, momentum=original.momentum)
        self._kind = kind
        # The same objects: nothing that was initialized or loaded is lost.
        self.weight, self.bias = original.weight, original.bias
        self.running_mean, self.running_var = original.running_mean, original.running_var
        self.num_batches_tracked = original.num_batches_tracked

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(B, channels, height, width), any float type, to the same."""
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        weight, bias = self.weight.to(self.running_mean.dtype), self.bias.to(self.running_mean.dtype)
        if not self.training or self._kind == "frozen":
            return F.batch_norm(input, self.running_mean, self.running_var, weight, bias, False, 0.0, self.eps)
        if self._kind == "local" or _num_ranks() == 1:
            means, variances = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
            # With a momentum of 1, F.batch_norm leaves this batch's statistics in the running averages.
            output = F.batch_norm(input, means, variances, weight, bias, True, 1.0, self.eps)
            # Not in place: the backward pass of F.batch_norm holds on to what it was given.
            self._track(*(_mean_over_ranks(means, variances) if self._kind == "local" else (means, variances)))
            return output
        return self._synchronized(input, weight, bias)

    def _synchronized(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Statistics over the micro-batches of all ranks, which are of one size."""
        wide = input.to(weight.dtype)
        num_values = wide.numel() // wide.size(1) * _num_ranks()
        # Two passes: a sum of squares would lose the variance of channels whose mean is large.
        mean = _sum_over_ranks(wide.sum((0, 2, 3))) / num_values
        centred = wide - mean[:, None, None]
        variance = _sum_over_ranks(centred.square().sum((0, 2, 3))) / num_values
        factor = weight * torch.rsqrt(variance + self.eps)
        output = torch.addcmul(bias[:, None, None], centred, factor[:, None, None])
        self._track(mean.detach(), variance.detach() * (num_values / max(1, num_values - 1)))
        return output.to(input.dtype)

    @torch.no_grad()
    def _track(self, means: torch.Tensor, variances: torch.Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        assert self.num_batches_tracked is not None
        self.running_mean.lerp_(means, self.momentum)
        self.running_var.lerp_(variances, self.momentum)
        self.num_batches_tracked.add_(1)


class _SumOverRanks(torch.autograd.Function):
    """All-reduce: forward a sum, backward the sum of the gradients (each rank's loss depends on every rank's input)."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        gradient: torch.Tensor = gradients[0].contiguous().clone()
        dist.all_reduce(gradient)
        return gradient


def _sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = _SumOverRanks.apply(values)  # type: ignore[no-untyped-call]  # torch
    return total


@torch.no_grad()
def _mean_over_ranks(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In one message, of tensors of one length.

    Running averages are linear in what they average, so this is the average of the ranks' averages.
    """
    joined = torch.cat(tensors)
    if _num_ranks() > 1:
        dist.all_reduce(joined)
    return (joined / _num_ranks()).chunk(len(tensors))


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
