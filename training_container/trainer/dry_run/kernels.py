"""What kernels of a GPU keep and choose, where this machine's CPU, which runs the step's Python, would do otherwise."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, placement_types
from torch.nn.attention.bias import CausalBias
from torch.optim import sgd
from transformers import masking_utils

from trainer.losses import linear
from trainer.models import attention, norms
from trainer.models.configuration import configuration_of
from trainer.strategies import expert_parallel
from trainyard.spec.job import ResolvedJob

_aten = torch.ops.aten


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """F.scaled_dot_product_attention as a GPU runs it: by a kernel that keeps inputs, output and a number a query.

    Grouped keys and values stay as they are; autocast narrows all three, as a CPU's does not. A mask, and values
    narrower than keys (latent attention), are not for torch's flash kernel: it takes the other fused one, which keeps
    what it reads in the mask's place, too. Shapes alone are told.
    """
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (part.to(torch.get_autocast_dtype("cpu")) for part in (query, key, value))
    del enable_gqa
    is_causal = is_causal or isinstance(attn_mask, CausalBias)
    has_mask = attn_mask is not None and not isinstance(attn_mask, CausalBias)
    output: torch.Tensor
    if has_mask or value.size(-1) != query.size(-1):
        bias = None
        if has_mask:  # as `models/attention.py` has it on a GPU
            bias = attention.shared_bias(attn_mask, query.dtype).expand(*query.shape[:-1], key.size(-2))
        output = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )[0]
        return output
    output = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return output


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:  # torch's name
    """F.dropout as a GPU runs it: by a kernel that keeps a byte an element, where a CPU keeps the mask's factors."""
    assert not inplace
    if not training or not p:
        return input
    output: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return output


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The loss's products of fp16 factors, which a GPU sums and returns in float32 without casts of the factors."""
    result = left @ right
    if result.dtype != torch.float16:
        return result
    shape, device = result.shape, result.device
    del result  # which a GPU never has
    return torch.empty(shape, dtype=torch.float32, device=device)


class _RmsNorm(torch.autograd.Function):
    """The kernel that a CPU hasn't, by a layer norm's, which reads and writes as much. Kept are the input and a number
    a row: the mean that a layer norm keeps beside it is none of the other's."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
        output, _, scale = _aten.native_layer_norm(hidden, hidden.shape[-1:], weight, None, epsilon)
        ctx.save_for_backward(hidden, weight, scale)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, scale = ctx.saved_tensors
        needed = [*ctx.needs_input_grad[:2], False]
        of_hidden, of_weight, _ = _aten.native_layer_norm_backward(
            gradients[0], hidden, hidden.shape[-1:], scale, scale, weight, None, needed
        )
        return of_hidden, of_weight, None


def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    return _RmsNorm.apply(hidden, weight, epsilon)  # type: ignore[no-any-return, no-untyped-call]


def _foreach(tensors: Iterable[torch.Tensor], *_: Any, **__: Any) -> tuple[bool, bool]:
    """(fused, foreach) of torch's SGD, which states neither: on a GPU, some kernels for all weights at once, but for
    sharded ones, which torch updates one by one there too."""
    return False, not any(isinstance(each, DTensor) for each in tensors)


def _no_packed_documents(_: torch.Tensor) -> None:
    """What transformers finds by looking at positions: that of tensors without values it takes packed ones for granted,
    and then makes masks, and copies of grouped keys and values to go with them."""


def _packed_documents(positions: torch.Tensor) -> torch.Tensor:
    """That each belongs to the first document, where a GPU has a mask for them."""
    return torch.zeros_like(positions)


def _taken_for_granted(*_: Any) -> None:
    """What a model demands of values (LLaVA: as many image tokens as its tower gives), which nobody has."""


def _one_document_each(positions: torch.Tensor) -> torch.Tensor:
    return positions.new_zeros(positions.size(0) + 1, dtype=torch.int32)


def _shard_dim_alltoall(
    tensor: torch.Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int
) -> torch.Tensor:
    """What DTensors that change the dimension they are cut along send: to each rank its part, and not, as on a CPU, all
    of it to every one."""
    ranks = mesh.size(mesh_dim)
    parts = torch.cat(tensor.chunk(ranks, dim=shard_dim))
    received = funcol.all_to_all_single(parts, None, None, (mesh, mesh_dim))
    if isinstance(received, funcol.AsyncCollectiveTensor):
        received = received.wait()
    return torch.cat(received.chunk(ranks), dim=gather_dim)


@contextmanager
def as_on_gpus(job: ResolvedJob) -> Iterator[None]:
    """Inside, attention keeps what a flash kernel keeps, routers spread tokens evenly over experts, and what torch
    does in another way on a CPU is done as on a GPU."""
    ranks_with_experts = job.parallelism.expert * job.parallelism.tensor

    def balanced(counts: torch.Tensor, received: torch.Tensor, num_rows: int) -> list[list[int]]:
        del received
        share = [num_rows // ranks_with_experts] * counts.size(0)
        return [share, list(share)]

    config = configuration_of(job) if job.spec.task == "causal_lm" else None
    has_mask = config is not None and attention.masks_documents(job, config)
    with ExitStack() as stack:
        for owner, name, ours in (
            (nn.functional, "scaled_dot_product_attention", _flash),
            (nn.functional, "dropout", _dropout),
            (placement_types, "shard_dim_alltoall", _shard_dim_alltoall),
            (norms, "rms_norm", _rms_norm),
            (linear, "_product", _product),
            (sgd, "_default_to_fused_or_foreach", _foreach),
            (torch, "_check_tensor_all_with", _taken_for_granted),
            (masking_utils, "find_packed_sequence_indices", _packed_documents if has_mask else _no_packed_documents),
            (expert_parallel, "row_counts", balanced),
            (attention, "offsets_of", _one_document_each),
        ):
            stack.enter_context(mock.patch.object(owner, name, ours))
        yield
