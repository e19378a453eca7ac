"""What is learnt, behind one small interface: `task_of(job)` gives its data, its model and its loss.

`base` is the interface, `causal_lm` language. Engines, loop and checkpoints never ask which task it is.
"""

from trainer.tasks.base import Task
from trainer.tasks.causal_lm import CausalLM
from trainyard.errors import InputError
from trainyard.spec.job import ResolvedJob

__all__ = ["Task", "task_of"]


def task_of(job: ResolvedJob) -> Task:
    """The job's task; InputError for one that this trainer does not have."""
    if job.spec.task != "causal_lm":
        raise InputError(f"task: {job.spec.task} is not implemented in this trainer; it trains causal_lm")
    return CausalLM()
