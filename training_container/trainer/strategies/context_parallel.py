"""Context parallel: every sequence is cut over the ranks of one axis, and attention still sees all of it.

Each rank computes the keys and values of its own tokens, all-gathers the others', and attends from its own queries:
exact, whatever the mask. A sequence is cut into twice as many equal pieces as there are ranks, and rank r of n holds
pieces r and 2n - 1 - r: what causal attention spares the early piece it spends on the late one, so that ranks finish
together. Everything else in a transformer block works on tokens one by one and needs no change.

Packed documents are attended to one after the other: no mask, which would be own x all tokens, no time on what it would
hide, and a flash kernel where there is one. Rules other than causal (sliding windows) still take a mask, and where a
model has sinks (gpt-oss) or caps its scores (Gemma 2) its attention is written out, as in its own code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from trainer.collective_names import all_gather_single, reduce_scatter_single
from trainer.losses.router import Routed
from trainer.losses.token_loss import IGNORED_LABEL
from trainer.models.attention import kernels_for, written_out_for
from trainer.strategies.base import Batch

OTHER_ATTENTION = ("position_bias",)
"""Arguments by which models ask for more than a mask, a scale, dropout, a cap and sinks; none of CONTEXT_FAMILIES
does."""

WITHOUT_ATTENTION = frozenset({"mamba2"})
"""Model types whose tokens meet in layers with a state alone (`context_states`): nothing asks where a token stands."""


@dataclass(frozen=True)
class SequenceShard:
    """One rank's tokens of a micro-batch: a Batch, except that its labels are shifted already."""

    input_ids: torch.Tensor
    """(batch, sequence / ranks), int64."""
    labels: torch.Tensor
    """(batch, sequence / ranks), int64: the label of the token that follows, wherever that token lies; or -100."""
    position_ids: torch.Tensor
    """(batch, sequence / ranks), int64, counted from the document's start in the whole sequence."""
    routed: Routed
    """Of the same tokens, by the whole sequences' labels."""


def shard_batch(batch: Batch, axis: DeviceMesh) -> SequenceShard:
    """This rank's tokens of `batch`, which every rank of `axis` (1-d) holds whole."""
    num_tokens = batch.input_ids.size(1)
    positions = batch.position_ids
    if positions is None:
        positions = torch.arange(num_tokens, device=batch.input_ids.device).expand_as(batch.input_ids)
    last = torch.full_like(batch.labels[:, :1], IGNORED_LABEL)
    targets = torch.cat([batch.labels[:, 1:], last], dim=1)
    layout = SequenceLayout(rank=axis.get_local_rank(), size=axis.size())
    routed = Routed.of(targets)
    return SequenceShard(
        input_ids=layout.own_part(batch.input_ids, dim=1),
        labels=layout.own_part(targets, dim=1),
        position_ids=layout.own_part(positions, dim=1),
        routed=replace(routed, is_token=layout.own_part(routed.is_token, dim=1)),
    )


def apply(model: PreTrainedModel, axis: DeviceMesh) -> None:
    """Makes `model`, called with a SequenceShard's fields on each rank of `axis` (1-d), attend over whole sequences."""
    attention = ContextAttention(axis, is_written_out=written_out_for(model.config.get_text_config()) is not None)
    # One name a group: a process may hold models of several layouts, as tests do.
    name = f"context_parallel_{axis.get_group().group_name}"
    AttentionInterface.register(name, attention.forward)
    AttentionMaskInterface.register(name, attention.mask)
    model.set_attn_implementation(name)
    assert model.config._attn_implementation == name
    if model.config.model_type not in WITHOUT_ATTENTION:
        # The base model, not the head around it: pipeline stages call the former.
        model.base_model.register_forward_pre_hook(attention.before_forward, with_kwargs=True)


@dataclass(frozen=True)
class SequenceLayout:
    """Which pieces of a sequence each rank holds."""

    rank: int
    size: int

    def pieces_of(self, rank: int) -> tuple[int, int]:
        """The two of the 2 x size equal pieces that `rank` holds, in order."""
        return rank, 2 * self.size - 1 - rank

    def own_part(self, whole: torch.Tensor, *, dim: int) -> torch.Tensor:
        """This rank's two pieces of a whole sequence, one after the other."""
        pieces = whole.chunk(2 * self.size, dim=dim)
        assert len(pieces) == 2 * self.size
        return torch.cat([pieces[index] for index in self.pieces_of(self.rank)], dim=dim)

    def in_order(self, parts: torch.Tensor, *, dim: int) -> torch.Tensor:
        """The whole sequence from every rank's part, which `parts` (ranks, ...) stacks; `dim` counts within a part."""
        pieces: dict[int, torch.Tensor] = {}
        for rank, part in enumerate(parts.unbind(0)):
            pieces.update(zip(self.pieces_of(rank), part.chunk(2, dim=dim), strict=True))
        return torch.cat([pieces[index] for index in range(2 * self.size)], dim=dim)


class ContextAttention:
    """Attention of this rank's queries over all keys, as transformers' models call it, and the mask that goes with it.

    Batch shapes: query (batch, heads, own tokens, head size), key and value likewise with their number of heads.
    """

    def __init__(self, axis: DeviceMesh, *, is_written_out: bool = False) -> None:
        """`is_written_out`: where the model's attention has what no kernel has; always under a mask, then."""
        self._is_written_out = is_written_out
        self._group = axis.get_group()
        self._layout = SequenceLayout(rank=axis.get_local_rank(), size=axis.size())
        self._num_tokens = 0
        self._documents: torch.Tensor | None = None

    def before_forward(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Notes the whole sequence's documents, which `mask` will need in this forward pass of the model.

        The all-ones attention mask says how long the sequence really is, and keeps transformers from looking for
        documents itself: to it, this rank's two pieces would look like two.
        """
        positions = kwargs.get("position_ids")
        assert positions is not None, "a rank's tokens don't begin at position 0: their positions must be given"
        whole = self._layout.in_order(_all_gather(positions, self._group), dim=1)
        self._num_tokens = whole.size(1)
        restarts = whole.diff(dim=1, prepend=whole[:, :1] - 1) != 1
        self._documents = restarts.cumsum(dim=1) if restarts.any() else None
        return args, {**kwargs, "attention_mask": positions.new_ones(whole.shape)}

    def _own_documents(self) -> torch.Tensor:
        """(parts of documents, 4) int64, on the CPU: sequence, queries, and of their keys the first and the end.

        In the order of this rank's queries, piece after piece. It is no mask, but goes where one would: as an argument
        of every block, so that one which is computed again in the backward pass has its own micro-batch's.
        """
        assert self._documents is not None
        size = self._num_tokens // (2 * self._layout.size)
        found: list[tuple[int, int, int, int]] = []
        for row, owners in enumerate(self._documents.cpu()):
            begins = [0, *(owners.diff().nonzero().flatten() + 1).tolist(), self._num_tokens]
            for piece in self._layout.pieces_of(self._layout.rank):
                first, end = piece * size, (piece + 1) * size
                for begin, last in pairwise(begins):
                    if begin < end and last > first:
                        found.append((row, min(last, end) - max(begin, first), begin, min(last, end)))
        return torch.tensor(found)

    def mask(
        self, *, mask_function: Any, device: torch.device, use_vmap: bool = False, **_: Any
    ) -> torch.Tensor | None:
        """(batch or 1, 1, own tokens, all tokens), true where a query may look; None: causal and nothing else. Of
        documents without another rule than causal: `_own_documents`.

        `mask_function` is transformers' rule over positions (causal, sliding window), evaluated at this rank's.
        """
        assert not use_vmap, "a mask that is no rule over positions"
        if mask_function is causal_mask_function and not self._is_written_out:
            return None if self._documents is None else self._own_documents()
        keys = torch.arange(self._num_tokens, device=device)
        queries = self._layout.own_part(keys, dim=0)
        nothing = keys.new_zeros((1, 1, 1, 1))
        allowed: torch.Tensor = mask_function(nothing, nothing, queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))
        if self._documents is None:
            return allowed
        own = self._layout.own_part(self._documents, dim=1)
        return allowed & (own[:, None, :, None] == self._documents[:, None, None, :])

    def forward(
        self,
        _: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention call: (batch, own tokens, heads, value size), and no weights."""
        assert all(kwargs.get(name) is None for name in OTHER_ATTENTION)
        assert self._is_written_out or (softcap is None and s_aux is None)
        num_repeats = query.size(1) // key.size(1)
        # Repeated after the exchange: grouped queries' keys and values travel once.
        key, value = (self._whole(tensor).repeat_interleave(num_repeats, dim=1) for tensor in (key, value))
        if self._is_written_out:
            assert attention_mask is not None
            output = written_out(
                query, key, value, attention_mask, cap=softcap, sinks=s_aux, dropout=dropout, scaling=scaling
            )
        elif attention_mask is None:
            output = self._causal(query, key, value, dropout, scaling)
        elif attention_mask.dtype == torch.int64:
            output = by_document(query, key, value, attention_mask, dropout, scaling)
        else:
            with kernels_for(attention_mask, query.device):
                output = F.scaled_dot_product_attention(
                    query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
                )
        return output.transpose(1, 2).contiguous(), None

    def _causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, scaling: float | None
    ) -> torch.Tensor:
        """Each piece over what precedes it and itself: no mask in memory where a flash kernel runs."""
        outputs = []
        own_pieces = self._layout.pieces_of(self._layout.rank)
        for index, piece in zip(own_pieces, query.chunk(2, dim=2), strict=True):
            end = (index + 1) * piece.size(2)
            # Written out: in a function of its own it would interrupt compiled graphs once more, as would causal_bias.
            make = causal_lower_right if torch.compiler.is_compiling() else causal_bias
            output = F.scaled_dot_product_attention(
                piece,
                key[:, :, :end],
                value[:, :, :end],
                attn_mask=make(piece.size(2), end),
                dropout_p=dropout,
                scale=scaling,
            )
            outputs.append(output)
        return torch.cat(outputs, dim=2)

    def _whole(self, own: torch.Tensor) -> torch.Tensor:
        """All tokens of a key or value (batch, heads, own tokens, size), in order; gradients return to their ranks."""
        parts: torch.Tensor = _AllGather.apply(own, self._group)  # type: ignore[no-untyped-call]
        return self._layout.in_order(parts, dim=2)


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor,
    *,
    cap: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """(batch, heads, own tokens, size): attention where `allowed` (batch or 1, 1, own tokens, all tokens).

    `cap`: what scores come near at most, as cap x tanh(score / cap) (Gemma 2, arXiv:2408.00118). `sinks`: (heads,), a
    score a head whose share goes to no token (gpt-oss; Xiao et al., arXiv:2309.17453). The softmax is in float32, with
    sinks in the scores' own type: as in these models' code.
    """
    scores = query @ key.transpose(2, 3) * (query.size(-1) ** -0.5 if scaling is None else scaling)
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    scores = scores.masked_fill(allowed.logical_not(), float("-inf"))
    if sinks is None:
        shares = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    else:
        shown = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        shares = torch.cat([scores, shown], dim=-1).softmax(dim=-1)[..., : key.size(2)]
    return F.dropout(shares, dropout) @ value


def causal_bias(num_queries: int, num_keys: int) -> CausalBias:
    """torch makes no tensor subclass inside a dispatch mode, and selective recomputation is one: out of it."""
    with _disable_current_modes():
        bias: CausalBias = causal_lower_right(num_queries, num_keys)
        return bias


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, scaling: float | None
) -> torch.Tensor:
    """Causal attention of the last tokens of (batch, heads, tokens, size) keys."""
    bias = causal_bias(query.size(2), key.size(2))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout, scale=scaling)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
def by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: torch.Tensor,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """(batch, heads, own tokens, size): each part of a document, as `ContextAttention._own_documents` lists them, over
    the keys of its own document up to itself."""
    parts: list[list[list[int]]] = [[] for _ in range(query.size(0))]
    for row, *part in documents.tolist():
        parts[row].append(part)
    outputs = []
    # Split once: the gradient of a row taken by itself is a tensor of the whole micro-batch, zero but there.
    rows = zip(torch.split(query, 1), torch.split(key, 1), torch.split(value, 1), parts, strict=True)
    for own_query, own_key, own_value, of_row in rows:
        queries = torch.split(own_query, [count for count, _, _ in of_row], dim=2)
        bounds = [(begin, end) for _, begin, end in of_row]
        keys, values = _ranges(own_key, bounds), _ranges(own_value, bounds)
        attended = [_attend(*own, dropout, scaling) for own in zip(queries, keys, values, strict=True)]
        outputs.append(torch.cat(attended, dim=2))
    return torch.cat(outputs)


def _ranges(tokens: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Tokens begin..end of (1, heads, tokens, size), for each of `bounds`.

    Taken from few splits, of as many ranges as follow each other: the gradient of a split is one tensor as large as all
    tokens, that of a slice is one too, and there may be hundreds of slices.
    """
    found: list[torch.Tensor] = []
    runs: list[list[tuple[int, int]]] = []
    for begin, end in bounds:
        if not runs or begin < runs[-1][-1][1]:
            runs.append([])
        runs[-1].append((begin, end))
    for run in runs:
        places = [0, *(place for bound in run for place in bound), tokens.size(2)]
        found += torch.split(tokens, [end - begin for begin, end in pairwise(places)], dim=2)[1::2]
    return found


def _all_gather(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's tensor, stacked: (ranks, ...). gloo wants them one after the other in the first dimension."""
    flat = own.new_empty((group.size() * own.size(0), *own.shape[1:]))
    all_gather_single(flat, own.contiguous(), group=group)
    return flat.view(group.size(), *own.shape)


class _AllGather(torch.autograd.Function):
    """Stacks every rank's tensor; backward sums the ranks' gradients of one part at its owner.

    torch's own differentiable all-gather changed its name between the versions that we run on.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_gather(own, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        own = gradient.new_empty(gradient.shape[1:])
        reduce_scatter_single(own, gradient.contiguous().flatten(0, 1), group=ctx.group)
        return own, None
