"""Context parallel in layers that carry a state along the sequence: ranks trade tokens for heads.

A convolution along the sequence, and the delta rule or the state space behind it, take all tokens in their order, but
every head (or channel) by itself. So each rank gives its own tokens of all heads for all tokens of its own heads, runs
both over whole sequences, and trades back: two all-to-alls a layer forward and two backward, as DeepSpeed-Ulysses has
them for attention (Jacobs et al., arXiv:2309.14509). What comes before and after works on tokens one by one, and does
so on own tokens.

What runs is the library's own forward pass, which finds other functions where it looks up the convolution and the
recurrence: the former hands on what it is given and is computed with the latter, since nothing stands between them that
mixes heads. Weights of heads (the convolution's, decays, skips) are whole on every rank and used in slices: a gradient
is zero elsewhere, and FSDP's sum over data_shard x context, which all weights' gradients go through, is one process's.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, __version__

from trainer.strategies.context_parallel import SequenceLayout
from trainyard.errors import InputError

CONVOLUTION = "causal_conv1d_fn"
"""The function of transformers' modules (5.17 and 5.23) that runs a depthwise convolution along the sequence."""

DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
"""Those that run a delta rule with a gate (arXiv:2412.06464; Kimi's has one a channel, arXiv:2510.26692)."""

STATE_SPACE = "mamba2_chunk_scan"
"""The one that runs a state space of Mamba-2's kind (arXiv:2405.21060)."""

_FUSED = "mamba2_split_conv1d_scan_combined"
"""One that does all of it in a kernel, up to the last projection; it gives None where there is no such kernel."""

_MASKED = "apply_mask_to_padding_states"
"""One that zeroes padding, of which there is none here: the mask is all ones (`ContextAttention.before_forward`)."""


def apply(model: PreTrainedModel, axis: DeviceMesh) -> None:
    """Lets the layers of `model` with a convolution along the sequence see all tokens that the ranks of `axis` (1-d)
    hold; InputError, in one line, for one whose code is not known."""
    exchange = HeadExchange(axis)
    for name, module in model.named_modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            recurrence = recurrence_of(module)
            if recurrence is None:
                raise InputError(
                    f"parallelism.context: {axis.size()}: transformers {__version__} computes {name} of"
                    f" {model.config.model_type} in a way that this trainer does not cut; set it to 1"
                )
            mixer = _MIXERS[recurrence](module, recurrence, exchange)
            # Not compiled: graphs would end at its messages anyway, and find the library's functions by their names.
            module.forward = torch.compiler.disable(mixer.forward)  # type: ignore[no-untyped-call]


def recurrence_of(module: nn.Module) -> str | None:
    """The function behind the convolution of a module's forward pass, CONVOLUTION where there is none behind it; None
    where the pass is not of a kind that is known here."""
    names = inspect.unwrap(type(module).forward).__code__.co_names
    if CONVOLUTION not in names:
        return None
    return next((name for name in _MIXERS if name in names), None)


class HeadExchange:
    """Own tokens of all heads for all tokens of own heads, between the ranks of one axis, and back."""

    def __init__(self, axis: DeviceMesh) -> None:
        self._group = axis.get_group()
        self._layout = SequenceLayout(rank=axis.get_local_rank(), size=axis.size())

    def to_heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Of (batch, own tokens, heads, ...) each, in one message: (batch, all tokens in order, own heads, ...).

        Heads that there are fewer of than ranks (groups that share theirs) go to all ranks that need them.
        """
        size = self._layout.size
        spread = [_for_ranks(tensor, size) for tensor in tensors]
        arrived = _exchange([torch.stack(tensor.chunk(size, dim=2)) for tensor in spread], self._group)
        return [self._layout.in_order(parts, dim=1) for parts in arrived]

    def to_tokens(self, whole: torch.Tensor) -> torch.Tensor:
        """The way back: (batch, own tokens, all heads, ...) of (batch, all tokens, own heads, ...)."""
        size = self._layout.size
        pieces = whole.chunk(2 * size, dim=1)
        parts = [torch.cat([pieces[index] for index in self._layout.pieces_of(rank)], dim=1) for rank in range(size)]
        (arrived,) = _exchange([torch.stack(parts)], self._group)
        return torch.cat(arrived.unbind(0), dim=2)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's heads of a weight (heads, ...)."""
        num_heads, size = whole.size(0), self._layout.size
        first = self._layout.rank * num_heads // size
        return whole.narrow(0, first, max(1, num_heads // size))


def _for_ranks(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """(batch, tokens, heads, ...), with no fewer heads than ranks: neighbouring ranks share one."""
    num_heads = tensor.size(2)
    return tensor if num_heads >= size else tensor.repeat_interleave(size // num_heads, dim=2)


class Mixer:
    """Stands in for the forward pass of a module with a convolution alone (LFM2's): on own tokens, but for that."""

    def __init__(self, module: nn.Module, recurrence: str, exchange: HeadExchange) -> None:
        inner = inspect.unwrap(type(module).forward)
        assert isinstance(inner, FunctionType)
        self._exchange = exchange
        self._convolution: Callable[..., torch.Tensor] = inner.__globals__[CONVOLUTION]
        self._recurrence: Callable[..., Any] = inner.__globals__[recurrence]
        found = inner.__globals__ | self._ours(recurrence)
        pass_ = FunctionType(inner.__code__, found, inner.__name__, inner.__defaults__, inner.__closure__)
        pass_.__kwdefaults__ = inner.__kwdefaults__
        self.forward = MethodType(pass_, module)

    def _ours(self, _: str) -> dict[str, Callable[..., Any]]:
        """What the library's forward pass finds in place of the functions that it calls, by name."""
        return {
            CONVOLUTION: self._convolve,
            _FUSED: lambda *_, **__: None,
            _MASKED: lambda hidden, _: hidden,
        }

    def _convolve(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """(batch, channels, own tokens) of the same; weight: (channels, kernel)."""
        (own,) = self._exchange.to_heads(hidden.transpose(1, 2))
        own_bias = None if bias is None else self._exchange.own(bias)
        convolved = self._convolution(own.transpose(1, 2), self._exchange.own(weight), own_bias, **kwargs)
        return self._exchange.to_tokens(convolved.transpose(1, 2)).transpose(1, 2)


class RecurrentMixer(Mixer, ABC):
    """With a recurrence behind the convolution: both are computed between two exchanges."""

    def __init__(self, module: nn.Module, recurrence: str, exchange: HeadExchange) -> None:
        super().__init__(module, recurrence, exchange)
        self._asked: tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]] | None = None
        """Weight, bias and the rest of what the convolution was called with, until the recurrence runs it."""

    def _ours(self, recurrence: str) -> dict[str, Callable[..., Any]]:
        return {recurrence: self._recur, **super()._ours(recurrence)}

    @abstractmethod
    def _recur(self, *args: Any, **kwargs: Any) -> Any:
        """The recurrence over all tokens of own heads, of what the library calls it with."""

    def _convolve(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        self._asked = weight, bias, kwargs
        return hidden

    def _convolved(self, parts: Sequence[torch.Tensor], num_heads: Sequence[int]) -> list[torch.Tensor]:
        """What the convolution makes of (batch, all tokens, own heads, size) each, whose channels are side by side.

        `num_heads`: how many all ranks have of each.
        """
        assert self._asked is not None
        (weight, bias, kwargs), self._asked = self._asked, None
        widths = [count * part.size(3) for count, part in zip(num_heads, parts, strict=True)]

        def own(whole: torch.Tensor) -> torch.Tensor:
            of_parts = zip(torch.split(whole, widths), num_heads, strict=True)
            heads = [each.reshape(count, -1, *each.shape[1:]) for each, count in of_parts]
            return torch.cat([self._exchange.own(each).flatten(0, 1) for each in heads])

        channels = torch.cat([part.flatten(2) for part in parts], dim=2).transpose(1, 2)
        convolved = self._convolution(channels, own(weight), None if bias is None else own(bias), **kwargs)
        split = torch.split(convolved.transpose(1, 2), [part.size(2) * part.size(3) for part in parts], dim=2)
        return [each.reshape(part.shape) for each, part in zip(split, parts, strict=True)]


class DeltaMixer(RecurrentMixer):
    """A delta rule: queries and keys of some heads, values of as many or of a multiple."""

    def _recur(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """As the library's: (batch, own tokens, heads, size of a value), and no last state."""
        repeats = self._repeats(key, value)
        query, key = (each[:, :, ::repeats] for each in (query, key))
        num_heads = [each.size(2) for each in (query, key, value)]
        query, key, value, g, beta = self._exchange.to_heads(query, key, value, g, beta)
        query, key, value = self._convolved((query, key, value), num_heads)
        if repeats > 1:
            query, key = (each.repeat_interleave(repeats, dim=2) for each in (query, key))
        output, _ = self._recurrence(query, key, value, g=g, beta=beta, **kwargs)
        return self._exchange.to_tokens(output), None

    def _repeats(self, key: torch.Tensor, value: torch.Tensor) -> int:
        """How often each key's head is there: in 5.17 the module repeats them, in 5.23 the function that is called."""
        assert self._asked is not None
        num_channels = self._asked[0].size(0)
        num_keys = (num_channels - value.size(2) * value.size(3)) // (2 * key.size(3))
        return key.size(2) // num_keys


class StateSpaceMixer(RecurrentMixer):
    """Mamba-2's: heads of which groups share what goes into the state (B) and what is read from it (C)."""

    def _recur(
        self,
        hidden: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        *,
        D: torch.Tensor,
        dt_bias: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As the library's: (batch, own tokens, heads, size)."""
        num_heads = [each.size(2) for each in (hidden, B, C)]
        hidden, dt, B, C = self._exchange.to_heads(hidden, dt, B, C)
        hidden, B, C = self._convolved((hidden, B, C), num_heads)
        own = [self._exchange.own(each) for each in (A, D, dt_bias)]
        output: torch.Tensor = self._recurrence(hidden, dt, own[0], B, C, D=own[1], dt_bias=own[2], **kwargs)
        return self._exchange.to_tokens(output)


_MIXERS: dict[str, type[Mixer]] = {
    **dict.fromkeys(DELTA_RULES, DeltaMixer),
    STATE_SPACE: StateSpaceMixer,
    CONVOLUTION: Mixer,
}
"""Function -> what runs it, in the order in which they are looked for."""


def _exchange(stacks: Sequence[torch.Tensor], group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """Row r of each stack (ranks, ...) goes to rank r, and comes from it; gradients go the same ways back."""
    exchanged: tuple[torch.Tensor, ...] = _AllToAll.apply(group, *stacks)  # type: ignore[no-untyped-call]
    return exchanged


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *stacks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return _sent(stacks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *_sent(gradients, ctx.group)


def _sent(stacks: Sequence[torch.Tensor], group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """All in one message, as bytes where they are of more than one type: decays have 32 bits, keys 16."""
    is_mixed = len({stack.dtype for stack in stacks}) > 1
    rows = [stack.contiguous().view(stack.size(0), -1) for stack in stacks]
    packed = torch.cat([row.view(torch.uint8) if is_mixed else row for row in rows], dim=1)
    arrived = torch.empty_like(packed)
    dist.all_to_all_single(arrived, packed, group=group)
    widths = [row.size(1) * (row.itemsize if is_mixed else 1) for row in rows]
    parts = torch.split(arrived, widths, dim=1)
    return tuple(
        part.contiguous().view(stack.dtype).view(stack.shape) for part, stack in zip(parts, stacks, strict=True)
    )
