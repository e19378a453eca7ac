"""Activations that are computed again in the backward pass: all of a block, or all but its expensive results."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachingTorchDispatchMode,
    _VersionWrapper,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainer.models.attention import varlen_operations
from trainer.models.configuration import one_line
from trainer.models.quantized import QuantizedLinear
from trainer.models.replay import in_last_product, last_product, replay
from trainer.optimizers.build import local_tensor
from trainyard.errors import InputError

_KEPT_OPERATIONS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        *varlen_operations(),
    }
)
"""selective: results of matrix products and attention are kept (but for attention that drops), everything cheap is
recomputed."""


def checkpoint_activations(model: PreTrainedModel, blocks: Sequence[nn.Module], mode: str) -> None:
    """full: a block keeps its input alone; selective: also its expensive results. Names of parameters don't change."""
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        kwargs["context_fn"] = _kept_contexts
        for block in blocks:
            _mark_last_product(block)
    # transformers 5.17 knows the older name alone, of which 5.23 warns.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable(kwargs)
    except ValueError as error:
        raise InputError(f"training.activation_checkpointing: {mode}: {one_line(error)}; set it to none") from None
    # For torch's older way alone transformers has what the embedding gives take a gradient. Beside adapters it would
    # come through nothing but frozen weights, and stay to the end of the step.
    if getattr(model, "_require_grads_hook", None) is not None:  # transformers 5.17 asks for one
        model.disable_input_require_grads()


def _selective_policy(_: Any, operation: Any, *args: Any, **named: Any) -> CheckpointPolicy:
    is_kept = operation in _KEPT_OPERATIONS and not in_last_product() and not _drops(operation, args, named)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _drops(operation: Any, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether it draws numbers (a GPU's fused attention with dropout). Kept, it would not draw them again where its
    block is recomputed, and what the block drops after it would be other elements than in the forward pass: torch puts
    the generator back once, at the block's beginning."""
    names = (argument.name for argument in operation._schema.arguments)
    return float((dict(zip(names, args, strict=False)) | dict(named)).get("dropout_p", 0.0)) > 0.0


def _kept_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For a block's first pass, and for the one that computes it again."""
    first, again = create_selective_checkpoint_contexts(_selective_policy)  # type: ignore[no-untyped-call]
    first.__class__ = Keeping  # which torch makes by itself, with arguments that differ between versions
    return _uncounted(first), _replaying(_uncounted(again))


class Keeping(_CachingTorchDispatchMode):  # type: ignore[no-untyped-call]
    """torch's, but what is kept stays what it was when something changes it in place: such a one is copied before.

    torch (2.13) looks for changes at the version of what it kept, and the results of products with more than two
    dimensions leave `matmul` as views that share no version with it. Without a word, the second pass began with what
    the first one ended with: ZeRO-3's linear layers added their bias twice, Falcon divided its scores twice.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            named = zip((argument.name for argument in func._schema.arguments), args, strict=False)
            given = dict(named) | (kwargs or {})
            # Of the operations for many tensors at once it is a list of them.
            changed = tree_leaves([given.get(each.name) for each in func._schema.arguments if each.is_write])
            self._copy_kept({_memory_of(one) for one in changed if isinstance(one, torch.Tensor)})
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def _copy_kept(self, changed: set[int]) -> None:
        for kept in tree_leaves(self.storage):
            value = kept.val if isinstance(kept, _VersionWrapper) else None
            if isinstance(value, torch.Tensor) and _memory_of(value) in changed:
                kept.val = value.clone()
                kept.version = kept.val._version


def _memory_of(tensor: torch.Tensor) -> int:
    """What views of the same memory have in common, be there bytes in it or none."""
    return int(local_tensor(tensor).untyped_storage()._cdata)


@contextmanager
def _uncounted(context: AbstractContextManager[Any]) -> Iterator[None]:
    """`context`, in which torch counts what is kept alone; its own list is there for all others, and afterwards."""
    own = torch.utils.checkpoint.SAC_IGNORED_OPS
    torch.utils.checkpoint.SAC_IGNORED_OPS = AllButKept(own)
    try:
        with context:
            yield
    finally:
        torch.utils.checkpoint.SAC_IGNORED_OPS = own


class AllButKept(set[Any]):
    """What torch (2.13) leaves uncounted of a block that is computed again, in place of its own short list.

    It counts every operation of the first pass, whatever becomes of its result, and stops where the second has more of
    a kind ("encountered during backward but not found"). FSDP's units inside a block, as experts that tensor ranks
    share, then tell a profiler more, and ZeRO-3 gathers in other portions, while what is kept is the same in both.
    """

    def __contains__(self, operation: object) -> bool:
        return operation not in _KEPT_OPERATIONS


@contextmanager
def _replaying(context: AbstractContextManager[None]) -> Iterator[None]:
    with replay(), context:
        yield


def _mark_last_product(block: nn.Module) -> None:
    """Where only a sum follows a block's last product, nothing needs its result again, and recomputation ends before
    it: keeping it would be for nothing, under tensor parallelism whole on each rank. Where something that needs it
    follows (the norm of Gemma 2 and 3 and OLMo 2), or the last by name is not the last to run, it is computed twice:
    time for memory, and never another number."""
    products = [module for module in block.modules() if isinstance(module, nn.Linear | Conv1D | QuantizedLinear)]
    if not products:
        return
    inside = ExitStack()

    def enter(*_: Any) -> None:
        inside.enter_context(last_product())

    def leave(*_: Any) -> None:
        inside.close()

    products[-1].register_forward_pre_hook(enter)
    products[-1].register_forward_hook(leave, always_call=True)
