"""Next-token prediction with an unmodified Hugging Face causal language model."""

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer.data import JobData, build_data
from trainer.loss import next_token_loss_sum
from trainer.model import build_model
from trainer.strategies.base import Batch
from trainyard.spec.job import ResolvedJob


class CausalLM:
    """See Task."""

    def check(self, job: ResolvedJob) -> None:
        """See Task: language goes with everything; what an engine can't do with a model, the engine says."""

    def build_data(
        self, job: ResolvedJob, *, data_parallel_rank: int, data_parallel_size: int, cache_dir: Path
    ) -> JobData:
        """See Task."""
        return build_data(
            job, data_parallel_rank=data_parallel_rank, data_parallel_size=data_parallel_size, cache_dir=cache_dir
        )

    def build_model(self, job: ResolvedJob, data: JobData) -> PreTrainedModel:
        """See Task."""
        return build_model(job, vocab_size=data.vocab_size)

    def loss_sum(self, forward: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
        """See Task."""
        return next_token_loss_sum(model_logits(forward, batch, device), batch.labels.to(device))


def model_logits(model: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
    """(batch, sequence, vocabulary). Position ids that restart keep packed documents from seeing each other."""
    position_ids = None if batch.position_ids is None else batch.position_ids.to(device)
    output = model(input_ids=batch.input_ids.to(device), position_ids=position_ids, use_cache=False)
    logits: torch.Tensor = output.logits
    return logits
