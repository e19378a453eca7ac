"""SGD with momentum, what ResNets are trained with; its state is made at once, so that a load can read into it."""

from collections.abc import Iterable
from typing import Any

import torch


def new_step() -> torch.Tensor:
    """A parameter's count of steps, on the host: it is read in every step, which must not wait for the device."""
    return torch.zeros((), dtype=torch.float32, device="cpu")


class Momentum(torch.optim.SGD):
    """torch's SGD, counting its steps like every other optimizer here.

    The momentum begins at zero, which makes the first step's direction the gradient itself, as torch's own first step.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, momentum: float, nesterov: bool) -> None:
        """`groups`: parameters (plain or DTensor) with their weight_decay, which is added to the gradient."""
        super().__init__(groups, lr=lr, momentum=momentum, nesterov=nesterov)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = new_step()
                if momentum:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(
                        parameter, memory_format=torch.preserve_format
                    )
        # Hooks, as torch wraps a `step` of our own once more than its own, which would run everybody's hooks twice.
        self._decays: list[float] = []
        self.register_step_pre_hook(_decay_in_place)
        self.register_step_post_hook(_count)


@torch.no_grad()
def _decay_in_place(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Weight decay is added to the gradients where they are: torch would add it to a copy of all of them."""
    assert isinstance(optimizer, Momentum)
    optimizer._decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group, decay in zip(optimizer.param_groups, optimizer._decays, strict=True):
        group["weight_decay"] = 0.0
        decayed = [parameter for parameter in group["params"] if decay and parameter.grad is not None]
        if decayed:
            torch._foreach_add_([parameter.grad for parameter in decayed], decayed, alpha=decay)


def _count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    assert isinstance(optimizer, Momentum)
    for group, decay in zip(optimizer.param_groups, optimizer._decays, strict=True):
        group["weight_decay"] = decay
    steps = [state["step"] for state in optimizer.state.values()]
    if steps:
        torch._foreach_add_(steps, 1)
