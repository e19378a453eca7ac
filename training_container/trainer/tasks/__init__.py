"""What is learnt, behind one small interface: `task_of(job)` gives its data, its model and its loss.

`base` is the interface, `causal_lm` language, `image_classification` and `vision_language` the tasks with images. What
these two share: `images` (pixels out of bytes), `samples` (streams over WebDataset shards), `batch_norm`, `building`.
Engines, loop and checkpoints never ask which task it is.
"""

from trainer.tasks.base import Task
from trainyard.spec.job import ResolvedJob

__all__ = ["Task", "task_of"]


def task_of(job: ResolvedJob) -> Task:
    """The job's task."""
    # Each is imported when it is used: a language job needs no Pillow.
    if job.spec.task == "image_classification":
        from trainer.tasks.image_classification import ImageClassification

        return ImageClassification(job)
    if job.spec.task == "vision_language":
        from trainer.tasks.vision_language import VisionLanguage

        return VisionLanguage()
    from trainer.tasks.causal_lm import CausalLM

    return CausalLM()
