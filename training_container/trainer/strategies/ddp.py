"""One process, and plain data parallelism: every rank holds the whole model and optimizer state."""

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.observe import waits
from trainer.runtime import Runtime
from trainer.strategies.base import Batch, Clock
from trainer.strategies.torch_engine import TorchStrategy
from trainyard.spec.job import ResolvedJob

AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}

# torch 2.13 warns of the name that 2.11 knows.
_HAS_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFERS_BROADCAST: dict[str, Any] = {"forward_sync_buffers" if _HAS_NEW_NAME else "broadcast_buffers": False}


class ReplicatedStrategy(TorchStrategy):
    """DistributedDataParallel over all ranks; with one rank the bare model.

    bf16 and fp16 are torch.autocast over float32 weights.
    """

    def __init__(self, *, job: ResolvedJob, model: nn.Module, runtime: Runtime) -> None:
        self.name = "single" if runtime.world_size == 1 else "ddp"
        # DDP averages over ranks, and our loss is already divided by the global number of targets.
        self.gradient_scale = float(runtime.world_size)
        self.replicas = dist.group.WORLD if runtime.world_size > 1 else None
        super().__init__(job=job, model=model, runtime=runtime)
        if self.name == "ddp":
            self._settle_buckets()

    def _wrap(self, model: nn.Module) -> nn.Module:
        return model if self.name == "single" else self._replicated(model, finds_unused=False)

    def _replicated(self, model: nn.Module, *, finds_unused: bool) -> DistributedDataParallel:
        device_ids = [self._device.index] if self._device.type == "cuda" else None
        # Buffers are constants here (rotary frequencies), or moved alike on every rank (RouterBias): nothing to
        # broadcast at each step.
        wrapped = DistributedDataParallel(
            model,
            device_ids=device_ids,
            gradient_as_bucket_view=True,
            find_unused_parameters=finds_unused,
            **_NO_BUFFERS_BROADCAST,
        )
        waits.log_every_step(wrapped)
        return wrapped

    def forward_backward(self, batches: Sequence[Batch], num_global_targets: int, clock: Clock) -> torch.Tensor:
        """See Strategy. DDP waits for other ranks where only its own log sees it."""
        loss_sum = super().forward_backward(batches, num_global_targets, clock)
        if isinstance(self._forward, DistributedDataParallel):
            waits.tell_ddp_wait(self._forward)
        return loss_sum

    def _settle_buckets(self) -> None:
        """Runs one throw-away pass, after which DDP has its final gradient buckets.

        DDP reorders its buckets after the first backward pass it sees. With three ranks and more the order decides
        in which order a gradient's terms are added, so without this the first step after a resume could differ in
        the last bit from the same step of an uninterrupted run.
        """
        self._probe()
        if any(parameter.grad is None for parameter in self._parameters if parameter.requires_grad):
            # DDP would wait for those for ever (DeepSeek-V3.2's indexers, which only choose; cross attention without
            # an encoder): another one, which looks for them in each pass.
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # what the first one sends
            self._optimizer.zero_grad(set_to_none=True)
            self._forward = self._replicated(self._model, finds_unused=True)
            self._probe()
        self._probe()  # the new buckets are built at the start of the second forward pass
        self._forget_gradients()
        if self._router_bias is not None:
            self._router_bias.forget()

    def _probe(self) -> None:
        with self._autocast():
            loss = self._task.probe_loss(self._model, self._forward, self._device)
        torch.autograd.backward(loss)

    def _forget_gradients(self) -> None:
        """Where gradients are views of DDP's buckets they stay so: made anew, those of accumulated micro-batches would
        stand beside the buckets until the last one copies them (28 GB of a 7B)."""
        self._optimizer.zero_grad(set_to_none=not isinstance(self._forward, DistributedDataParallel))

    def _synchronization(self, *, is_last: bool) -> AbstractContextManager[Any]:
        if is_last or not isinstance(self._forward, DistributedDataParallel):
            return nullcontext()
        return self._forward.no_sync()

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = AUTOCAST_TYPES.get(self._job.spec.training.precision)
        return nullcontext() if dtype is None else torch.autocast(self._device.type, dtype=dtype)
