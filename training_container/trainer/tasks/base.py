"""What the trainer needs to know of a task, whichever it is: its data, its model, its loss."""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer.data import JobData
from trainyard.spec.job import ResolvedJob


class Task(Protocol):
    """One kind of training: language, images, both. Stateless: everything it needs is given to it."""

    def check(self, job: ResolvedJob) -> None:
        """InputError, in one line and before anything is read, for what this task can't do with such a job."""

    def build_data(
        self, job: ResolvedJob, *, data_parallel_rank: int, data_parallel_size: int, cache_dir: Path
    ) -> JobData:
        """The job's data for one data-parallel rank; InputError names the file or field."""

    def build_model(self, job: ResolvedJob, data: JobData) -> PreTrainedModel:
        """The model on CPU, the same weights on every rank; InputError when it doesn't fit the data."""

    def loss_sum(self, forward: nn.Module, batch: Any, device: torch.device) -> torch.Tensor:
        """Sum of the losses (nats, float32 or wider) of one micro-batch's targets.

        `forward` is the model, perhaps wrapped by its engine; `batch` is one of this task's own micro-batches.
        """
