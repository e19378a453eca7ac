"""Products with pipeline parallelism: one rank's stages, and the schedule that drives them through a step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from trainer.losses.router import Routed
from trainer.losses.token_loss import shifted, target_loss_sum
from trainer.optimizers.build import local_tensor
from trainer.runtime import Runtime
from trainer.strategies import pipeline
from trainer.strategies.base import Batch, Clock
from trainer.strategies.context_parallel import SequenceShard
from trainer.strategies.fsdp import COMPUTE_TYPES, fill_shards, reshard, shard_weights
from trainer.strategies.parallel import ProductStrategy
from trainyard.spec.job import ResolvedJob


class PipelineStrategy(ProductStrategy):
    """One or two stages of a pipeline, each split over tensor and data axes."""

    _model: nn.ModuleList

    def __init__(self, *, job: ResolvedJob, model: nn.Module, runtime: Runtime) -> None:
        self._scale = 1.0
        self._loss_total = torch.zeros((), dtype=torch.float64, device=runtime.device)
        self._tied: list[nn.Parameter] = []
        super().__init__(job=job, model=model, runtime=runtime)
        self._tied_group = self._pair_ends()
        self._has_first = any(stage.is_first for stage in self._stages)
        self._has_last = any(stage.is_last for stage in self._stages)
        self._dtype = COMPUTE_TYPES.get(job.spec.training.precision, torch.float32)
        self._timed = [
            pipeline.timed_stage(
                stage,
                job,
                num_stages=self._num_stages,
                dtype=self._dtype,
                device=runtime.device,
                group=self._mesh.group("pipeline"),
                gives_loss=self._loss_plan.kind != "logits",
            )
            for stage in self._stages
        ]
        self._schedule = pipeline.schedule_of(job, self._timed, self._scaled_loss)

    def _place(self, model: nn.Module) -> nn.Module:
        # Before it is cut into stages: they share what a forward pass of the whole model begins with.
        model = super()._place(model)
        assert isinstance(model, PreTrainedModel)
        layout = self._job.parallelism
        pipeline.check_trained(model, layout)
        mine = pipeline.stages_of_rank(layout.pipeline_schedule, self._mesh.place.pipeline, layout.pipeline)
        self._num_stages = layout.pipeline * len(mine)
        return nn.ModuleList(pipeline.Stage(model, index, self._num_stages, self._router) for index in mine)

    @property
    def _stages(self) -> list[pipeline.Stage]:
        return [stage for stage in self._model if isinstance(stage, pipeline.Stage)]

    def _parts(self) -> Sequence[nn.Module]:
        return [stage.model for stage in self._stages]

    def _wrap(self, model: nn.Module) -> nn.Module:
        for stage in self._stages:
            partial = self._cut_matrices(stage.model, stage.blocks)
            left = self._spread_experts(stage.model, keep_gathered=True)
            # Weights stay gathered over a step's micro-batches: gathering them anew for each would cost more than
            # a stage's share of the model takes.
            shard_weights(stage, stage.blocks, self._mesh.weights, self._job, left=left, keep_gathered=True)
            fill_shards(stage, stage.model, self._device)
            self._keep_partial(stage.model, partial)
            if stage.is_tied and (stage.is_first or stage.is_last):
                weights = [stage.model.get_input_embeddings().weight]
                self._tied += [weight for weight in weights if weight.requires_grad]  # frozen under an adapter
        return model

    def _pair_ends(self) -> dist.ProcessGroup | None:
        """The group of this rank and the one that holds the same tied weight at the pipeline's other end."""
        layout = self._job.parallelism
        places = range(layout.pipeline)
        ends = [pipeline.stages_of_rank(layout.pipeline_schedule, place, layout.pipeline) for place in places]
        first = next(place for place, stages in enumerate(ends) if 0 in stages)
        last = next(place for place, stages in enumerate(ends) if self._num_stages - 1 in stages)
        if first == last or not self._stages[0].is_tied:
            return None
        own = None
        for pair in self._mesh.whole.mesh.flatten(start_dim=1)[[first, last]].T.tolist():
            group = dist.new_group(pair)
            own = group if dist.get_rank() in pair else own
        return own

    def forward_backward(self, batches: Sequence[Batch], num_global_targets: int, clock: Clock) -> torch.Tensor:
        """See Strategy. Forward and backward passes interleave as the schedule says."""
        self._model.train()
        self._scale = self._scaler.scale / num_global_targets
        return self._run(batches, self._schedule.step, clock)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        """See Strategy."""
        self._model.eval()
        if self._job.parallelism.pipeline_schedule == "zero_bubble":
            loss_sum = self._evaluate_in_v(batches)
        else:
            loss_sum = self._run(batches, self._schedule.eval, no_clock)
        reshard(self._model)
        return loss_sum

    def _evaluate_in_v(self, batches: Sequence[Batch]) -> torch.Tensor:
        self._loss_total.zero_()
        batches = [self._own_part(batch) for batch in batches]
        positions = [batch.position_ids for batch in batches]
        tokens = [batch.input_ids.to(self._device) for batch in batches]
        told = [{"tokens": ids} if self._stages[0].reads_tokens else {} for ids in tokens]
        pipeline.forward_in_v(
            self._stages,
            tokens,
            [
                more if ids is None else more | {"position_ids": ids.to(self._device)}
                for more, ids in zip(told, positions, strict=True)
            ],
            dtype=self._dtype,
            group=self._mesh.group("pipeline"),
            on_output=lambda number, logits: self._scaled_loss(logits, self._targets(batches[number])),
        )
        return self._share(self._loss_total.clone())

    def _run(self, batches: Sequence[Batch], step: Callable[..., Any], clock: Clock) -> torch.Tensor:
        self._loss_total.zero_()
        for stage in self._timed:
            stage.clock = clock
        batches = [self._own_part(batch) for batch in batches]
        tokens = torch.cat([batch.input_ids for batch in batches]).to(self._device)
        targets = torch.cat([self._targets(batch) for batch in batches])
        positions = [batch.position_ids for batch in batches if batch.position_ids is not None]
        more = {"position_ids": torch.cat(positions).to(self._device)} if positions else {}
        if self._stages[0].reads_tokens:
            more["tokens"] = tokens
        if self._has_last and self._loss_plan.kind != "logits":
            more["targets"] = targets
        if self._router is not None:
            routed = [self._routed(batch) for batch in batches]
            more["is_token"] = torch.cat([each.is_token for each in routed])
            more["num_targets"] = torch.cat([each.num_targets for each in routed])
        step(
            *((tokens,) if self._has_first else ()),
            target=targets if self._has_last else None,
            losses=[] if self._has_last else None,
            return_outputs=False,
            **more,
        )
        return self._share(self._loss_total.clone())

    def _targets(self, batch: Batch) -> torch.Tensor:
        """(batch, own tokens): the label of the token that follows each."""
        labels = batch.labels.to(self._device)
        return labels if self._job.parallelism.context > 1 else shifted(labels)

    def _routed(self, batch: Batch) -> Routed:
        routed = batch.routed if isinstance(batch, SequenceShard) else Routed.of(self._targets(batch))
        return routed.to(self._device)

    def _scaled_loss(self, output: Any, targets: torch.Tensor) -> torch.Tensor:
        """One micro-batch's part of what is differentiated; its sum of losses is noted.

        output: what the last stage gives, logits or already the loss of `targets`; beside it the router's, if there is
        one.
        """
        result, balance = output if isinstance(output, tuple) else (output, None)
        loss: torch.Tensor = target_loss_sum(result, targets) if self._loss_plan.kind == "logits" else result
        if balance is not None:
            loss = loss + balance.to(loss.dtype)
        self._loss_total += loss.detach().double()
        return loss * self._scale

    @torch.no_grad()
    def _finish_gradients(self) -> None:
        super()._finish_gradients()
        if not self._tied:
            return
        gradients = [local_tensor(weight.grad) for weight in self._tied if weight.grad is not None]
        total = torch.stack(gradients).sum(dim=0)
        if self._tied_group is not None:
            dist.all_reduce(total, group=self._tied_group)
        for gradient in gradients:
            gradient.copy_(total)

    def _num_copies(self, parameter: nn.Parameter) -> int:
        is_tied = any(parameter is weight for weight in self._tied)
        return super()._num_copies(parameter) * (2 if is_tied else 1)

    def after_load(self, tensors: dict[str, torch.Tensor]) -> None:
        """See Strategy. A rank that has both ends of the pipeline read a tied weight into one of them."""
        super().after_load(tensors)
        if len(self._tied) == 2:
            stale, read = self._tied
            local_tensor(stale.detach()).copy_(local_tensor(read.detach()))
            kept = self._optimizer.state[stale]
            for name, values in self._optimizer.state[read].items():
                local_tensor(kept[name]).copy_(local_tensor(values))


def no_clock(phase: str) -> AbstractContextManager[None]:
    """Measures nothing."""
    return nullcontext()
