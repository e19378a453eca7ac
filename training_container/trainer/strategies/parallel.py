"""Products of tensor, pipeline, context, expert and data parallelism on one grid of ranks.

Order matters: a stage is cut out of the model first, then its matrices are cut over the tensor axis and its experts
over theirs, and last FSDP shards what is left over the data axes. FSDP is there even where those axes have one rank:
then it moves nothing, but every parameter is a DTensor on the same grid and lower precision works the same everywhere.
"""

import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trainer.losses.router import RouterLoss
from trainer.models.build import transformer_blocks
from trainer.models.facts import num_experts_of
from trainer.optimizers.build import local_tensor
from trainer.runtime import Runtime
from trainer.strategies import context_parallel, context_states, expert_parallel, tensor_parallel
from trainer.strategies.base import Batch, Clock
from trainer.strategies.fsdp import (
    fill_shards,
    precision_policy,
    reshard,
    reshards_after_forward,
    shard_weights,
    synchronization,
)
from trainer.strategies.mesh import Mesh, data_parallel_rank
from trainer.strategies.torch_engine import TorchStrategy
from trainer.tasks.causal_lm import sequence_loss_sum
from trainyard.spec.job import ParallelismSpec, ResolvedJob

ALONE_ELEMENTS = 2**20
"""From so many on a gradient is a message of its own. Norms' are smaller; matrices that stay whole on each tensor rank
(GLM's and Phi-3's fused ones) would take their size once more, at a step's end: 17 GiB of a GLM-4 9B's."""


class ProductStrategy(TorchStrategy):
    """One rank's part of a model that is split over tensor and data axes."""

    def __init__(self, *, job: ResolvedJob, model: nn.Module, runtime: Runtime) -> None:
        # Tensor parallelism's modules end in `to_local`, a view; nothing is written into it, which FSDP warns of.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self.name = name_of(job.parallelism)
        self._mesh = Mesh.of(job.parallelism, runtime.device.type)
        self._partial: list[nn.Parameter] = []
        parts = self._mesh.group("context") if job.parallelism.context > 1 else None
        self._router = RouterLoss.of(getattr(model, "config", None), parts=parts, num_copies=job.parallelism.tensor)
        super().__init__(job=job, model=model, runtime=runtime)
        self.data_parallel_rank = data_parallel_rank(job.parallelism, runtime.rank)

    def _place(self, model: nn.Module) -> nn.Module:
        """Stays an outline: a rank gets only what is left after all cuts."""
        if self._job.parallelism.context > 1:
            assert isinstance(model, PreTrainedModel)
            context_parallel.apply(model, self._mesh.axis("context"))
            context_states.apply(model, self._mesh.axis("context"))
        return model

    def _wrap(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, PreTrainedModel)
        blocks = transformer_blocks(model)
        partial = self._cut_matrices(model, blocks)
        left = self._spread_experts(model)
        wrapped = shard_weights(model, blocks, self._mesh.weights, self._job, left=left)
        fill_shards(wrapped, model, self._device)
        self._keep_partial(model, partial)
        return wrapped

    def _cut_matrices(self, model: PreTrainedModel, blocks: Sequence[nn.Module]) -> list[str]:
        """Names of the parameters whose gradients are partial sums over the tensor axis."""
        degree = self._job.parallelism.tensor
        if degree == 1:
            return []
        split_sequence = self._job.spec.data.sequence_length // self._job.parallelism.context % degree == 0
        return tensor_parallel.apply(
            model,
            blocks,
            self._mesh.axis("tensor"),
            split_sequence=split_sequence and tensor_parallel.can_split_sequence(model, blocks),
        )

    def _spread_experts(self, model: PreTrainedModel, *, keep_gathered: bool = False) -> set[nn.Parameter]:
        """Returns the weights of theirs that `shard_weights` is to leave as they are; `keep_gathered` is as there."""
        layout = self._job.parallelism
        if layout.expert > 1 or (layout.tensor > 1 and num_experts_of(model.config.get_text_config())):
            experts = expert_parallel.build_mesh(layout, self._device.type)
            return expert_parallel.apply(
                model,
                experts,
                precision_policy(self._job.spec.training.precision),
                reshard_after_forward=reshards_after_forward(layout.fsdp, keep_gathered=keep_gathered),
            )
        return set()

    def _own_part(self, batch: Batch) -> Batch:
        """What of `batch` goes through this rank's model; under context parallelism its labels are shifted."""
        is_whole = self._job.parallelism.context == 1
        return batch if is_whole else context_parallel.shard_batch(batch, self._mesh.axis("context"))

    def _loss_sum(self, batch: Batch) -> torch.Tensor:
        own = self._own_part(batch)
        routed = own.routed.to(self._device) if isinstance(own, context_parallel.SequenceShard) else None
        return sequence_loss_sum(self._forward, own, self._device, routed=routed, router=self._router)

    def _keep_partial(self, model: nn.Module, names: Sequence[str]) -> None:
        parameters = dict(model.named_parameters())
        self._partial += [parameters[name] for name in names]

    def _synchronization(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """As FSDP alone."""
        return synchronization(self._forward, is_last=is_last)

    def forward_backward(self, batches: Sequence[Batch], num_global_targets: int, clock: Clock) -> torch.Tensor:
        """See Strategy. Every rank of a tensor group computes the whole loss; one of them reports it."""
        return self._share(super().forward_backward(batches, num_global_targets, clock))

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        """See Strategy."""
        loss_sum = self._share(super().evaluate(batches))
        reshard(self._forward)
        return loss_sum

    def _share(self, loss_sum: torch.Tensor) -> torch.Tensor:
        return loss_sum if self._mesh.place.tensor == 0 else torch.zeros_like(loss_sum)

    @torch.no_grad()
    def _finish_gradients(self) -> None:
        """Sums partial gradients over the tensor axis: large ones where they are, all others in one message."""
        gradients = [local_tensor(parameter.grad) for parameter in self._partial if parameter.grad is not None]
        if not gradients:
            return
        group = self._mesh.group("tensor")
        others = []
        for gradient in gradients:
            if gradient.numel() >= ALONE_ELEMENTS and gradient.is_contiguous():
                dist.all_reduce(gradient, group=group)
            else:
                others.append(gradient)
        if not others:
            return
        flat = torch.cat([gradient.flatten() for gradient in others])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [gradient.numel() for gradient in others])
        torch._foreach_copy_(others, [part.view_as(own) for part, own in zip(parts, others, strict=True)])

    @torch.no_grad()
    def _grad_norm(self, gradients: Sequence[torch.Tensor]) -> float:
        """The 2-norm over the whole grid, in one all-reduce: each shard counts once, however many ranks hold it."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for _, parameter in self._named_parameters():
            if parameter.grad is not None:
                gradient = local_tensor(parameter.grad)
                norm = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
                squares += norm.double().square() / self._num_copies(parameter)
        dist.all_reduce(squares)
        total = squares.item()  # waits for the device, and nothing else does
        return math.sqrt(total) if math.isfinite(total) else math.inf

    def _num_copies(self, parameter: nn.Parameter) -> int:
        """How many ranks hold the same shard of a parameter."""
        assert isinstance(parameter, DTensor)
        layout = self._job.parallelism
        num_shards = 1
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            num_shards *= 1 if placement.is_replicate() else size
        return layout.world_size // layout.pipeline // num_shards


def name_of(layout: ParallelismSpec) -> str:
    """The degrees above 1, as metrics and checkpoints name them: `tensor2-fsdp2`."""
    data = {"ddp": layout.data_replicate} if layout.data_shard == 1 else {"fsdp": layout.data_shard}
    if layout.data_shard > 1 and layout.data_replicate > 1:
        data["replicate"] = layout.data_replicate
    model = {axis: getattr(layout, axis) for axis in ("pipeline", "tensor", "context", "expert")}
    degrees = {**model, **data}
    return "-".join(f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1)
