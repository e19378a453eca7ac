"""The update by an optimizer whose state is offloaded to a GPU's host: by all the cores that a rank has there."""

from typing import Any

import torch

from trainer.checkpoint.group import cores_a_rank


def use_own_cores(optimizer: torch.optim.Optimizer, *, at_least: int) -> None:
    """Lets each step of `optimizer` compute with this rank's share of the host's cores, and nothing else.

    A rank of a GPU job has one thread, or `at_least` (`training.cpu_threads`), and AdamW's 28 bytes a parameter at
    15 GB/s a thread would take longer than the step itself. No sum depends on it: the update is elementwise.
    """
    usual = torch.get_num_threads()

    def widen(*_: Any) -> None:
        torch.set_num_threads(max(at_least, cores_a_rank()))

    def narrow(*_: Any) -> None:
        torch.set_num_threads(usual)

    optimizer.register_step_pre_hook(widen)
    optimizer.register_step_post_hook(narrow)
