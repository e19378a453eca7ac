"""The mode in which a dry step runs: every operation is seen once, its memory and its messages written down."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.dry_run.ledger import Ledger
from trainer.dry_run.messages import SPACES, Messages
from trainer.dry_run.work import Work, phase_now

_aten = torch.ops.aten
_CASTS = frozenset({_aten._to_copy.default})
_GROUPED = _aten._grouped_mm.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Answers questions for a value (`tensor.item()`), which nobody has: one, and false where it is a truth value."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, unless it is such a question; experts' products of any type."""
        if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return _answer(args[0].dtype)
        if func is _WAIT:
            return args[0]  # what was waited for, of which torch's fake tensors make another one
        if func is _GROUPED:
            return _grouped_product(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Watch(Answers):  # type: ignore[no-untyped-call]
    """Notes what operations allocate, send and compute. Enter it inside the mode whose tensors have no values.

    It answers also for tensors that have values (an optimizer's count of steps): operations on them were not run."""

    def __init__(self, ledger: Ledger, messages: Messages, work: Work, *, recomputes: bool) -> None:
        """`recomputes`: forward passes are run again where the backward one needs them."""
        super().__init__()
        self._ledger, self._messages, self._work = ledger, messages, work
        self._recomputes = recomputes
        self._is_paused = False
        self._is_inside_of_fsdp = False

    @contextmanager
    def without_questions_of_shape(self) -> Iterator[None]:
        """Inside, what DTensor runs to find out an operation's shape, on all ranks' sizes together, is not noted."""
        ask = ShardingPropagator._propagate_tensor_meta_non_cached

        def quietly(*args: Any) -> Any:
            before, self._is_paused = self._is_paused, True
            try:
                return ask(*args)
            finally:
                self._is_paused = before

        with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", quietly):
            yield

    @contextmanager
    def inside_of_fsdp(self) -> Iterator[None]:
        """Inside, what FSDP makes between shards and whole weights or gradients counts as buffers. Sums that wait for
        the step's last micro-batch, to meet their copies on other ranks (HSDP), are this rank's gradients already."""
        with ExitStack() as stack:
            for name in ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce"):
                run = self._as_buffers(getattr(_fsdp_param_group, name))
                stack.enter_context(mock.patch.object(_fsdp_param_group, name, run))
            yield

    def _as_buffers(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if run.__name__ == "foreach_reduce":
                self._ledger.mark(_tensors(args[1]), "buffers")  # whole gradients: of some FSDP sends a copy
            self._is_inside_of_fsdp = True
            try:
                with self._ledger.making("buffers"):
                    result = run(*args, **kwargs)
            finally:
                self._is_inside_of_fsdp = False
            if run.__name__ == "foreach_reduce" and result[-1] is not None:
                self._ledger.mark([result[-1]], "gradients")
            return result

        return watched

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """A Clock (strategies.base): says which phase of the step it is."""
        before, self._ledger.phase = self._ledger.phase, phase
        try:
            yield
        finally:
            self._ledger.phase = before

    @property
    def _purpose(self) -> str:
        """Of a message that is sent now, `Kind.purpose`."""
        if self._ledger.phase == "optimizer":
            return "update"
        return "weights" if self._is_inside_of_fsdp else "pass"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, and writes down what came of it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its local tensor comes here again
        kwargs = kwargs or {}
        if self._is_paused:
            return _grouped_product(func, args, kwargs) if func is _GROUPED else func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            result = _answer(args[0].dtype)
        else:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        if not isinstance(result, int | float):
            self._ledger.note(_tensors(result))
        if any(isinstance(each, FakeTensor) for each in _tensors((args, kwargs, result))):
            self._work.note(func, args, kwargs, result, phase=phase_now(self._ledger.phase, self._recomputes))
        space = func.namespace
        if space in SPACES:
            tensors = self._messages.note(func, args, kwargs, result, purpose=self._purpose)
            name = func._schema.name.rpartition("::")[2].lstrip("_")
            is_gradient = name.startswith("reduce_scatter") and any(
                self._ledger.is_held_as(tensor, "buffers") for tensor in tensors
            )  # on its way: what FSDP put together before, where context parallelism scatters activations' gradients
            if tensors and (name.startswith("recv") or is_gradient):
                self._ledger.mark(tensors, "buffers")
        elif space == "fsdp":
            self._ledger.mark(_tensors((args, kwargs, result)), "buffers")
        elif func in _CASTS and self._ledger.is_held_as(args[0], "parameters"):
            self._ledger.mark(_tensors(result), "buffers")
        return result


def _answer(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


def _grouped_product(func: Any, args: Any, kwargs: Any) -> Any:
    """What torch knows of the shapes of an experts' product, it knows in bf16 alone."""
    first, second, *more = args
    if first.dtype == torch.bfloat16 or not isinstance(first, FakeTensor):
        return func(*args, **kwargs)
    return func(first.bfloat16(), second.bfloat16(), *more, **kwargs).to(first.dtype)


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
