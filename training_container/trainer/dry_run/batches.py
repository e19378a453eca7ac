"""Micro-batches as a task's data would give them, without data: what a step does depends on their shapes alone."""

from typing import Any

import torch

from trainer.data.stream import MicroBatch
from trainer.tasks.images import Pixels, Preprocessing
from trainyard.spec.job import ResolvedJob


def made_up(job: ResolvedJob, model_config: Any) -> list[Any]:
    """One rank's micro-batches of one optimizer step, all sequences full.

    One document a sequence: on a GPU packed documents are kept apart by offsets, which keep nothing of their own.
    """
    return [_TASKS[job.spec.task](job, model_config) for _ in range(job.gradient_accumulation_steps)]


def tensors_of(batches: list[Any]) -> list[torch.Tensor]:
    """Everything that micro-batches hold."""
    held: list[Any] = [value for batch in batches for value in vars(batch).values()]
    held += [value.values for value in held if isinstance(value, Pixels)]
    return [value for value in held if isinstance(value, torch.Tensor)]


def _text(job: ResolvedJob, _: Any) -> MicroBatch:
    size, length = job.micro_batch_size, job.spec.data.sequence_length
    ids = torch.zeros((size, length), dtype=torch.int64)
    return MicroBatch(ids, torch.zeros_like(ids), None, size * (length - 1), size * length)


def _image(job: ResolvedJob, model_config: Any) -> Any:
    from trainer.tasks.image_classification import ImageBatch

    size = job.micro_batch_size
    return ImageBatch(_pixels(job, model_config), torch.zeros(size, dtype=torch.int64), size, size)


def _image_with_text(job: ResolvedJob, model_config: Any) -> Any:
    from trainer.tasks.vision_language import VisionLanguageBatch

    size, length = job.micro_batch_size, job.spec.data.sequence_length
    ids = torch.zeros((size, length), dtype=torch.int64)
    pixels = _pixels(job, model_config.vision_config)
    return VisionLanguageBatch(ids, torch.zeros_like(ids), pixels, size * (length - 1), size * length)


def _pixels(job: ResolvedJob, model_config: Any) -> Pixels:
    known = Preprocessing.of(job, model_size=getattr(model_config, "image_size", None))
    values = torch.zeros((job.micro_batch_size, 3, known.size, known.size), dtype=torch.uint8)
    return Pixels(values, known.mean, known.std)


_TASKS = {"causal_lm": _text, "image_classification": _image, "vision_language": _image_with_text}
