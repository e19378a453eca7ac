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

    unit: str = "tokens"
    """What a micro-batch's `num_tokens` counts, and speed is stated in."""

    measures: tuple[str, ...] = ()
    """What a validation measures besides the loss, each as a share of the targets: top1_accuracy, ..."""

    def check(self, job: ResolvedJob) -> None:
        """InputError, in one line and before anything is read, for what this task can't do with such a job."""

    def check_model(self, job: ResolvedJob) -> None:
        """InputError, before any data is read, for a stated `model.config` of which no model can be built.

        By building it without weights, as it is built again when the data is there: half a second for 80 layers, inside
        `deferred_weights.shapes_alone`, which the caller sees to.
        """
        if job.spec.model.config is not None:
            self.build_model(job, None)

    def build_data(
        self, job: ResolvedJob, *, data_parallel_rank: int, data_parallel_size: int, cache_dir: Path
    ) -> JobData:
        """The job's data for one data-parallel rank; InputError names the file or field."""

    def build_model(self, job: ResolvedJob, data: JobData | None) -> PreTrainedModel:
        """The model on CPU, the same on every rank; InputError when it doesn't fit the data.

        With its weights, or outlined (`deferred_weights`): then no rank ever holds more of them than its part. `data`
        is None where it is built without: an export of a task with images.
        """

    def loss_sum(self, forward: nn.Module, batch: Any, device: torch.device) -> torch.Tensor:
        """Sum of the losses (nats, float32 or wider) of one micro-batch's targets.

        `forward` is the model, perhaps wrapped by its engine; `batch` is one of this task's own micro-batches.
        """

    def validation_sums(self, forward: nn.Module, batch: Any, device: torch.device) -> torch.Tensor:
        """One dimension: the sum of the losses, then of each of `measures` over the targets."""
        return self.loss_sum(forward, batch, device).reshape(1)

    def probe_loss(self, model: nn.Module, forward: nn.Module, device: torch.device) -> torch.Tensor:
        """Any number that depends on every trained weight as the loss does, of a made-up batch; changes no state.

        `forward` calls `model`, which is the bare one.
        """
