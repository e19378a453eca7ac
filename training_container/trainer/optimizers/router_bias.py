"""The router's bias of DeepSeek-V3 and families like it, moved against experts' loads: balance without auxiliary loss.

The bias is added to experts' scores where they are chosen and nowhere else, so that no gradient reaches it. Instead,
after each optimizer step (DeepSeek-V3, arXiv:2412.19437, 2.1.2; Wang et al., arXiv:2408.15664, algorithm 1),

    bias of expert e  +=  rate * sign(mean load - load of e)

where a load is how often an expert was chosen over the whole global batch, padding included: it is routed too. Loads
are whole numbers and summed over all ranks, so every rank moves its copy of the bias by the same; the bias is a buffer
of the model, saved, resumed and exported like every other.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.losses.router import is_asked_for
from trainer.models.facts import num_experts_of
from trainyard.spec.job import ResolvedJob
from trainyard.spec.support import ROUTER_BIAS_FAMILIES

BUFFER = "e_score_correction_bias"
"""transformers' name of it, in every version that this trainer runs with."""


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that have such a bias, by name."""
    return {name: module for name, module in model.named_modules() if BUFFER in module._buffers}


def described(model: nn.Module, job: ResolvedJob) -> str | None:
    """What becomes of the bias, in a line; None where there is none, or an adapter leaves all routers as they are."""
    # Of ERNIE 4.5 and Laguna it is a frozen weight, which engines shard as such and this trainer doesn't move.
    is_there = routers_of(model) or any(name.endswith(f".{BUFFER}") for name, _ in model.named_parameters())
    if job.spec.model.adapter is not None or not is_there:
        return None
    rate = job.spec.training.optimizer.router_bias_rate
    if rate is not None:
        return f"{BUFFER} moves by {rate:g} a step against each expert's load"
    config: Any = model.config
    if is_asked_for(config):
        return f"{BUFFER} stays as it is; the routers' auxiliary loss keeps the experts' loads even"
    if config.model_type not in ROUTER_BIAS_FAMILIES:
        return (
            f"{BUFFER} stays as it is, and nothing else keeps the experts' loads even: no way to move it is verified"
            f" in {config.model_type}"
        )
    return (
        f"{BUFFER} stays as it is, and nothing else keeps the experts' loads even: set"
        " training.optimizer.router_bias_rate (0.001 in DeepSeek-V3's report) where the model is trained for long"
    )


def _chooser(owner: nn.Module) -> nn.Module:
    """The module that says third what was chosen: the bias's own, or the router that is handed it (MiniMax-M2)."""
    return owner._modules.get("gate") or owner


class RouterBias:
    """Counts what each router of this rank's `parts` chooses in training, and moves its bias at the end of a step."""

    def __init__(
        self, parts: Sequence[nn.Module], *, rate: float, size: tuple[int, int], device: torch.device, world_size: int
    ) -> None:
        """`size`: layers and experts of the whole model: of a pipeline's ranks, some have no router."""
        self._rate = rate
        self._size = size
        self._device = device
        self._world_size = world_size
        self._routers: dict[int, nn.Module] = {}
        self._loads: dict[int, torch.Tensor] = {}
        for part in parts:
            for name, router in routers_of(part).items():
                number = re.search(r"\.(\d+)\.", name)
                assert number is not None
                layer = int(number[1])
                self._routers[layer] = router
                self._loads[layer] = torch.zeros(size[1], dtype=torch.int64, device=device)
                _chooser(router).register_forward_hook(self._counter(layer))

    @classmethod
    def of(cls, parts: Sequence[nn.Module], config: Any, job: ResolvedJob, device: torch.device) -> "RouterBias | None":
        """As the job asks; None where it doesn't. `config`: the model's, if it is a language model."""
        rate = job.spec.training.optimizer.router_bias_rate
        if rate is None:
            return None
        size = (config.num_hidden_layers, num_experts_of(config))
        return cls(parts, rate=rate, size=size, device=device, world_size=job.world_size)

    def _counter(self, layer: int) -> Any:
        """Counts a micro-batch's choices. Where a block is computed again they count twice, all of a layer alike, and
        over tensor ranks, which route the same tokens, as often as there are: a sign sees neither."""

        @torch.no_grad()
        def count(router: nn.Module, _: Any, output: Any) -> None:
            if router.training:
                chosen = output[2].reshape(-1)
                self._loads[layer].scatter_add_(0, chosen, torch.ones_like(chosen))

        return count

    @torch.no_grad()
    def end_step(self, *, was_applied: bool) -> None:
        """Moves the biases, where the step's update was made; all ranks call it together. Then counting begins anew."""
        if was_applied:
            self._move()
        self.forget()

    def forget(self) -> None:
        """What was counted so far was no step's."""
        for loads in self._loads.values():
            loads.zero_()

    def _move(self) -> None:
        loads = self._summed()
        for layer, router in self._routers.items():
            bias = router._buffers[BUFFER]
            assert bias is not None
            own = loads[layer]
            # sign(mean - load) in whole numbers: exact, whatever was rounded elsewhere.
            bias.add_(torch.sign(own.sum() - own * own.numel()).to(bias.dtype), alpha=self._rate)

    def _summed(self) -> torch.Tensor:
        """(layers, experts): over all ranks, in one message."""
        loads = torch.zeros(self._size, dtype=torch.int64, device=self._device)
        for layer, own in self._loads.items():
            loads[layer] = own
        if self._world_size > 1:
            dist.all_reduce(loads)
        return loads
