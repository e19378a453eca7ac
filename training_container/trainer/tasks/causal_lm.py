"""Next-token prediction with an unmodified Hugging Face causal language model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer.data import JobData, TextData, build_data
from trainer.losses.head import ScoringHead, plan_loss
from trainer.losses.router import Routed, RouterLoss, librarys_own_left_out, router_loss_sum
from trainer.losses.token_loss import next_token_loss_sum, shifted, target_loss_sum
from trainer.models.attention import positions_on
from trainer.models.build import check_configuration, outline_model
from trainer.tasks.base import Task
from trainyard.spec.job import ResolvedJob

if TYPE_CHECKING:  # the engines ask a job for its task: neither room can be imported before the other
    from trainer.strategies.base import Batch


class CausalLM(Task):
    """See Task."""

    def check(self, job: ResolvedJob) -> None:
        """See Task: language goes with everything; what an engine can't do with a model, the engine says."""

    def check_model(self, job: ResolvedJob) -> None:
        """See Task: the data, which is not there yet, would give the vocabulary."""
        model = check_configuration(job)
        if model is not None and job.spec.training.loss == "chunked":
            plan_loss(model, job)  # says what such a loss needs of a model

    def build_data(
        self, job: ResolvedJob, *, data_parallel_rank: int, data_parallel_size: int, cache_dir: Path
    ) -> JobData:
        """See Task."""
        return build_data(
            job, data_parallel_rank=data_parallel_rank, data_parallel_size=data_parallel_size, cache_dir=cache_dir
        )

    def build_model(self, job: ResolvedJob, data: JobData | None) -> PreTrainedModel:
        """See Task."""
        assert isinstance(data, TextData)
        return outline_model(job, vocab_size=data.vocab_size)

    def loss_sum(self, forward: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
        """See Task."""
        return sequence_loss_sum(forward, batch, device)

    def probe_loss(self, model: nn.Module, forward: nn.Module, device: torch.device) -> torch.Tensor:
        """See Task."""
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
        logits: torch.Tensor = forward(input_ids=tokens, use_cache=False).logits
        return logits.float().sum()


def sequence_loss_sum(
    forward: nn.Module,
    batch: Batch,
    device: torch.device,
    *,
    routed: Routed | None = None,
    router: RouterLoss | None = None,
) -> torch.Tensor:
    """Sum of the losses of one micro-batch, from its logits or, where the model has a ScoringHead, without them.

    `routed`: of a rank that has a part of the sequences, whose labels are those of the next position already.
    `router`: as in `router_loss_sum`.
    """
    is_shifted = routed is not None
    labels = batch.labels.to(device)
    targets = labels if is_shifted else shifted(labels)
    head = ScoringHead.of(forward)
    if head is not None:
        with head.scoring(targets):
            output = _output(forward, batch, device)
        loss: torch.Tensor = output.logits
    else:
        output = _output(forward, batch, device)
        loss = target_loss_sum(output.logits, labels) if is_shifted else next_token_loss_sum(output.logits, labels)
    balance = router_loss_sum(forward, output, targets, routed=routed, router=router)
    return loss if balance is None else loss + balance.to(loss.dtype)


def _output(forward: nn.Module, batch: Batch, device: torch.device) -> Any:
    """The model's output. Position ids that restart keep packed documents from seeing each other."""
    position_ids = None if batch.position_ids is None else positions_on(device, batch.position_ids)
    with librarys_own_left_out(forward):
        return forward(input_ids=batch.input_ids.to(device), position_ids=position_ids, use_cache=False)
