"""What plain torch strategies (single process, DDP, FSDP2) share: accumulation, clipping, AdamW, canonical state."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.checkpoint.base_model import FROZEN, keeps_frozen
from trainer.losses.head import choices_of, plan_loss
from trainer.losses.head import install as install_loss_head
from trainer.models.deferred_weights import fill
from trainer.models.float8 import convert_blocks
from trainer.optimizers.build import (
    build_optimizer,
    clip_factor,
    describe,
    global_grad_norm,
    local_gradients,
    local_tensor,
    moments_of,
    set_learning_rate,
    set_moments,
)
from trainer.optimizers.loss_scaling import LossScaler
from trainer.optimizers.router_bias import RouterBias
from trainer.runtime import Runtime
from trainer.strategies.base import Batch, Clock, OptimizerStep, Strategy
from trainer.strategies.compiled import compile_blocks
from trainer.tasks import task_of
from trainyard.spec.job import ResolvedJob

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's two running averages, under torch's own names."""


class TorchStrategy(Strategy):
    """The common part; a subclass wraps the model and says how gradients are synchronized."""

    gradient_scale: float = 1.0
    """What undoes the mean that the wrapper takes over ranks: our gradients are sums."""

    shard_group: dist.ProcessGroup | None = None
    """The ranks over which one copy of the gradients is split; None: every rank has all."""

    replicas: dist.ProcessGroup | None = None
    """The ranks that have the same plain parameters, for optimizers that share their work; None: each does all."""

    def __init__(self, *, job: ResolvedJob, model: nn.Module, runtime: Runtime) -> None:
        self.data_parallel_rank = runtime.rank
        self.data_parallel_size = job.parallelism.data_parallel_size
        self._job = job
        self._device = runtime.device
        self._task = task_of(job)
        self._scaler = LossScaler.for_precision(job.spec.training.precision)
        self._loss_plan = plan_loss(model, job)
        self.choices = choices_of(model, job, self._loss_plan, self._device)
        if (converted := convert_blocks(model, job)) is not None:
            self.choices["fp8"] = converted
        compile_blocks(model, job)
        self._model = self._place(model)
        self._forward = self._wrap(self._model).train()
        for part in self._parts():
            install_loss_head(part, self._loss_plan)
        self._optimizer = build_optimizer(self._model, job, replicas=self.replicas)
        self._parameters = list(self._model.parameters())
        self._router_bias = RouterBias.of(self._parts(), getattr(model, "config", None), job, self._device)
        self.choices["optimizer"] = describe(self._optimizer)

    def _place(self, model: nn.Module) -> nn.Module:
        """What this rank trains of `model`, on its device."""
        return fill(model, device=self._device)

    def _parts(self) -> Sequence[nn.Module]:
        """What this rank trains, each a model in which names are Hugging Face's."""
        return [self._model]

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under their Hugging Face names."""
        for part in self._parts():
            yield from part.named_parameters()

    def _wrap(self, model: nn.Module) -> nn.Module:
        """The module to call forward on; it may shard `model` in place."""
        return model

    def _synchronization(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch; after the last, gradients must be sums over ranks."""
        return nullcontext()

    def _autocast(self) -> AbstractContextManager[Any]:
        """Around the forward pass: which type matrix products are computed in."""
        return nullcontext()

    def forward_backward(self, batches: Sequence[Batch], num_global_targets: int, clock: Clock) -> torch.Tensor:
        """See Strategy. The weights stay float32; activations have the job's precision."""
        if not self._forward.training:  # a walk through all modules, which only a validation before makes necessary
            self._forward.train()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        scale = self._scaler.scale * self.gradient_scale / num_global_targets
        for index, batch in enumerate(batches):
            with self._synchronization(is_last=index == len(batches) - 1):
                with clock("forward"):
                    loss = self._loss_sum(batch)
                with clock("backward"):
                    torch.autograd.backward(loss * scale)
            loss_sum += loss.detach().double()
            del loss  # its graph holds what adapters' first layer read, and the gradient of that
        return loss_sum

    def _loss_sum(self, batch: Batch) -> torch.Tensor:
        with self._autocast():
            return self._task.loss_sum(self._forward, batch, self._device)

    def optimizer_step(self, learning_rate: float, accepts: Callable[[float], bool] | None = None) -> OptimizerStep:
        """See Strategy."""
        self._finish_gradients()
        gradients = local_gradients(self._parameters)
        scale = self._scaler.scale
        grad_norm = self._grad_norm(gradients) / scale
        was_applied = self._scaler.accepts(grad_norm) and (accepts is None or accepts(grad_norm))
        if was_applied:
            factor = clip_factor(grad_norm, self._job.spec.training.gradient_clip) / scale
            if factor != 1.0 and gradients:
                torch._foreach_mul_(gradients, factor)
            set_learning_rate(self._optimizer, learning_rate)
            self._optimizer.step()
        if self._router_bias is not None:
            self._router_bias.end_step(was_applied=was_applied)
        self._forget_gradients()
        return OptimizerStep(grad_norm=grad_norm, was_applied=was_applied)

    def _forget_gradients(self) -> None:
        """After a step: the next one's begin at nothing."""
        self._optimizer.zero_grad(set_to_none=True)

    def _finish_gradients(self) -> None:
        """Once a step, after the last backward pass: what the wrapper has not summed."""

    def _grad_norm(self, gradients: Sequence[torch.Tensor]) -> float:
        """The global 2-norm, given this rank's gradients."""
        return global_grad_norm(gradients, self.shard_group)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        """See Strategy."""
        self._forward.eval()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch in batches:
            loss_sum = loss_sum + self._validation_sums(batch).double()
        return loss_sum

    def _validation_sums(self, batch: Batch) -> torch.Tensor:
        """The loss of one micro-batch, and what else the task measures."""
        if not self._task.measures:
            return self._loss_sum(batch)
        with self._autocast():
            return self._task.validation_sums(self._forward, batch, self._device)

    def held(self) -> dict[str, list[torch.Tensor]]:
        """This rank's part of what it keeps: `parameters` (frozen ones and buffers too), `gradients`, `optimizer`."""
        parameters = list(self._model.parameters())
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        return {
            "parameters": [local_tensor(tensor) for tensor in (*parameters, *self._model.buffers())],
            "gradients": [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None],
            "optimizer": [local_tensor(value) for value in states if isinstance(value, torch.Tensor)],
        }

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """See Strategy. Parameters and moments are plain tensors under DDP, DTensors under FSDP."""
        tensors: dict[str, torch.Tensor] = {}
        for part in self._parts():
            tensors |= persistent_buffers(part)
        for name, parameter in self._named_parameters():
            if not parameter.requires_grad:
                if keeps_frozen(self._job):  # else it comes from the model's source
                    tensors[FROZEN + name] = parameter.detach()
                continue
            tensors[f"model.{name}"] = parameter.detach()
            for moment, values in moments_of(self._optimizer, parameter).items():
                tensors[f"optim.{name}.{moment}"] = values
        tensors["optim.step"] = self._steps()[0].detach().clone().cpu()
        return tensors

    def after_load(self, tensors: dict[str, torch.Tensor]) -> None:
        """See Strategy. Weights and most moments were read in place; AdamW counts its steps per parameter."""
        for name, parameter in self._named_parameters():
            if parameter.requires_grad:
                moments = {moment: tensors.get(f"optim.{name}.{moment}") for moment in MOMENTS}
                loaded = {moment: values for moment, values in moments.items() if values is not None}
                set_moments(self._optimizer, parameter, loaded)
        for step in self._steps():
            step.copy_(tensors["optim.step"])

    def _steps(self) -> list[torch.Tensor]:
        return [state["step"] for state in self._optimizer.state.values()]

    def engine_state(self) -> dict[str, Any]:
        """See Strategy."""
        return {"loss_scaler": self._scaler.state()}

    def load_engine_state(self, state: dict[str, Any]) -> None:
        """See Strategy."""
        if "loss_scaler" in state:
            self._scaler.restore(state["loss_scaler"])


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to a checkpoint, under canonical names; rebuilt ones (rotary frequencies) are left out."""
    names = model.state_dict(keep_vars=True).keys()
    return {f"model.{name}": buffer for name, buffer in model.named_buffers() if name in names}
