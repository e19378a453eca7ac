"""Dropout under tensor parallelism: what all ranks of a group have whole they drop alike, what is split each by itself.

The ranks of a tensor group share a random stream (`mesh.random_stream`): activations that all of them compute must be
dropped alike, or their copies of the model drift apart. Of what is split between them (heads, and with sequence
parallelism positions) each rank has other elements; with the shared stream they would be dropped in one pattern,
repeated in every part. So while a rank works on its part alone it draws from a stream of its own.

That stream begins anew at each entry, at a place told by the shared one: a block that is computed again in the backward
pass begins with the shared stream as it was, and so drops the same elements again.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_OFFSET_STEP = 4
"""Numbers of a CUDA generator come in fours."""


class OwnStream:
    """Swaps the default generator of this rank's device between the group's stream and that of rank `place` in it."""

    def __init__(self, place: int, device_type: str) -> None:
        self._place = place
        self._is_cuda = device_type == "cuda"
        self._shared: torch.Tensor | None = None

    def enter(self) -> None:
        """From here on numbers are this rank's own; the group's stream is one draw further, alike on all its ranks."""
        generator = self._generator()
        if self._is_cuda:  # a draw would wait for the device
            drawn = (generator.initial_seed(), generator.get_offset())
            generator.set_offset(generator.get_offset() + _OFFSET_STEP)
        else:
            drawn = (int(torch.randint(2**62, (), generator=generator)), 0)
        self._shared = generator.get_state()
        words = f"{drawn[0]} {drawn[1]} {self._place}".encode()
        generator.manual_seed(int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "big"))

    def leave(self) -> None:
        """The group's numbers again.

        A block that is computed again may leave what it did not enter (entries are in other blocks): the generators of
        the forward pass are kept apart from that by torch's checkpointing.
        """
        if self._shared is not None:
            self._generator().set_state(self._shared)
            self._shared = None

    def _generator(self) -> torch.Generator:
        if not self._is_cuda:
            return torch.default_generator
        return torch.cuda.default_generators[torch.cuda.current_device()]

    def between(self, first: nn.Module, last: nn.Module) -> None:
        """Own numbers from before `first` to after `last`, in training. `first` may be around `last`."""
        first.register_forward_pre_hook(self._begin)
        last.register_forward_hook(self._end)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
    def _begin(self, module: nn.Module, _: Any) -> None:
        if module.training:
            self.enter()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
    def _end(self, module: nn.Module, *_: Any) -> None:
        if module.training:
            self.leave()


def drops_anything(blocks: Sequence[nn.Module]) -> bool:
    """Whether something in `blocks` is dropped in training, be it by a module or a function that is told a share."""
    return any(_shares_of(module) for block in blocks for module in block.modules())


def drops_inside(region: nn.Module) -> bool:
    """Whether something is dropped of what tensor ranks split in `region`: attention scores, an adapter's inputs."""
    for module in region.modules():
        if any(name.startswith(("attention_dropout", "attn_dropout")) for name in _shares_of(module)):
            return True
        if any(_shares_of(dropout) for dropout in getattr(module, "lora_dropout", {}).values()):
            return True
    return False


def _shares_of(module: nn.Module) -> list[str]:
    """Names of the module's shares above 0, its own and those of Dropout modules that it has."""
    stated = {name: value for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)}
    stated |= {name: child.p for name, child in module.named_children() if isinstance(child, nn.Dropout)}
    if isinstance(module, nn.Dropout):
        stated["dropout"] = module.p
    return [name for name, share in stated.items() if share > 0]
