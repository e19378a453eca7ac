"""FSDP2 (`fully_shard`): parameters, gradients and optimizer state are split over `data_shard` ranks."""

import dataclasses
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import Shard

from trainer.models.build import transformer_blocks
from trainer.models.deferred_weights import fill_parameters, source_of
from trainer.runtime import Runtime
from trainer.strategies.base import Batch
from trainer.strategies.torch_engine import TorchStrategy
from trainyard.spec.job import FsdpSpec, ResolvedJob
from trainyard.spec.support import MOST_EXPERT_PADDING

COMPUTE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16, "fp64": torch.float64}
"""What FSDP gathers, and what is between the matrix products: fp8 is inside of them."""

_ROTATIONS = "position_embeddings"
"""What transformers' models give their blocks by this name: cosines and sines of the positions."""

_PACKED_DIMS = 3
"""Of a layer's experts in one weight: (experts, out, in)."""


class FullyShardedStrategy(TorchStrategy):
    """One FSDP unit a transformer block (or as `fsdp` says), the rest (embedding, last norm, head) the root's.

    With data_replicate > 1 the ranks form a 2-d mesh (HSDP): shards inside, copies across. bf16 and fp16 compute in
    that type on float32 shards, and gradients are reduced in float32.
    """

    def __init__(self, *, job: ResolvedJob, model: nn.Module, runtime: Runtime) -> None:
        layout = job.parallelism
        self.name = "hsdp" if layout.data_replicate > 1 else "fsdp"
        if self.name == "hsdp":
            shape, axes = (layout.data_replicate, layout.data_shard), ("data_replicate", "data_shard")
        else:
            shape, axes = (layout.data_shard,), ("data_shard",)  # type: ignore[assignment]  # tuples of another length
        self._mesh = init_device_mesh(runtime.device.type, shape, mesh_dim_names=axes)
        self.shard_group = self._mesh.get_group("data_shard")
        super().__init__(job=job, model=model, runtime=runtime)

    def _place(self, model: nn.Module) -> nn.Module:
        """Stays an outline: a shard gets its values when it is all that is left."""
        return model

    def _wrap(self, model: nn.Module) -> nn.Module:
        wrapped = shard_weights(model, transformer_blocks(model), self._mesh, self._job)
        fill_shards(wrapped, model, self._device)
        return wrapped

    def _synchronization(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Reduce-scatters after every micro-batch, so that no rank ever holds whole gradients; copies meet once."""
        return synchronization(self._forward, is_last=is_last)

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        """See Strategy."""
        loss_sum = super().evaluate(batches)
        reshard(self._forward)
        return loss_sum


def precision_policy(precision: str) -> MixedPrecisionPolicy:
    """Compute in the job's type; sum gradients in float32, or wider where that is."""
    compute_type = COMPUTE_TYPES.get(precision, torch.float32)
    return MixedPrecisionPolicy(
        param_dtype=COMPUTE_TYPES.get(precision), reduce_dtype=torch.promote_types(compute_type, torch.float32)
    )


def shard_weights(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    job: ResolvedJob,
    *,
    left: Set[nn.Parameter] = frozenset(),
    keep_gathered: bool = False,
) -> nn.Module:
    """Shards the blocks, in units by the job's `fsdp`, and the rest of `root` together, in place, and returns `root`.

    `left` are weights that lie on their ranks already. `keep_gathered`: by default, weights stay whole from their first
    use until the step's last backward pass.
    """
    settings, policy = job.parallelism.fsdp, precision_policy(job.spec.training.precision)
    is_dropped = reshards_after_forward(settings, keep_gathered=keep_gathered)
    # Mamba's residual stream has seven digits in one process and under DDP, too; a stage is given it.
    if getattr(getattr(root, "config", None), "residual_in_fp32", False):
        policy = dataclasses.replace(policy, cast_forward_inputs=False)
    units = [list(blocks[begin:end]) for begin, end in unit_bounds(blocks, settings)]
    placements = {weight: placement_of(weight, mesh.size(-1)) for weight in root.parameters()}
    ignored = left | left_as_they_are(root, mesh, policy)
    for unit in units:
        shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=is_dropped,
            shard_placement_fn=placements.get,
            ignored_params=ignored,
        )
    if getattr(root, "router", None) is not None:  # a stage's, whose tally is no activation; its hidden states fit
        policy = dataclasses.replace(policy, cast_forward_inputs=False)
    shard(root, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    for block in blocks:
        _keep_positions(block)
    _prefetch([unit[0] for unit in units], settings.prefetch_units)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Sums, not means: the loss is divided by the global number of targets. Plain SUM on the wire, because
            # FSDP2 would otherwise ask for PREMUL_SUM, which gloo lacks and NCCL gets wrong in bf16 (pytorch#190747).
            # A mesh of one rank (tensor or pipeline alone) divides by one, into a copy of a unit's gradients, if told.
            if mesh.size() > 1:
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def reshards_after_forward(settings: FsdpSpec, *, keep_gathered: bool) -> bool:
    """Whether a unit lets go of what it gathered when its forward pass ends; `keep_gathered`: unless that is stated."""
    stated = settings.reshard_after_forward
    return not keep_gathered if stated == "auto" else stated


def left_as_they_are(root: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> set[nn.Parameter]:
    """Frozen weights that FSDP would do nothing for, but to copy them: those that no rank shares, in the type that is
    computed in. A stage's copies would stay through all of its micro-batches, beside what they are copies of."""
    if mesh.size(-1) > 1:
        return set()
    return {
        weight
        for weight in root.parameters()
        if not weight.requires_grad
        and (policy.param_dtype in (None, weight.dtype) or not weight.dtype.is_floating_point)
    }


def _keep_positions(block: nn.Module) -> None:
    """Has a sharded block's rotations as they are given.

    FSDP casts all that a unit is given to the type of its weights. Families that rotate in float32 (OLMo's, ERNIE's)
    leave their rotations in it: in bf16 they would have three digits, where one process and DDP have seven.
    """
    given: list[dict[str, Any]] = []  # by name, since a layer without rotations may be given None (BEAM's)

    def take(_: nn.Module, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given.append({name: value for name, value in named.items() if name == _ROTATIONS})
        return args, {name: value for name, value in named.items() if name != _ROTATIONS}

    def give(_: nn.Module, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, named | given.pop()

    block.register_forward_pre_hook(take, prepend=True, with_kwargs=True)
    block.register_forward_pre_hook(give, with_kwargs=True)


def placement_of(weight: nn.Parameter, num_ranks: int) -> Shard | None:
    """Along which dimension so many ranks share a weight; None: the first, as FSDP has it.

    Of packed experts dimension 0 is their number, and FSDP pads what its ranks don't divide: 8 experts on 64 ranks had
    64 slots, gathered and sent, and 8 ranks the training state of all. They are cut inside of each instead.
    """
    if weight.ndim != _PACKED_DIMS or -weight.size(0) % num_ranks <= weight.size(0) * MOST_EXPERT_PADDING:
        return None
    return inner_placement(weight, num_ranks)


def inner_placement(weight: nn.Parameter, num_ranks: int) -> Shard | None:
    """Packed experts cut inside of each; None where the ranks divide none of the dimensions."""
    return next((Shard(dim) for dim in range(1, weight.ndim) if weight.size(dim) % num_ranks == 0), None)


def shard(module: nn.Module | list[nn.Module], **settings: Any) -> None:
    """`fully_shard`, of weights in integers (QLoRA's codes) too.

    torch 2.11 makes every shard a parameter that wants a gradient, and asks only then whether it should: no integer can
    want one. 2.13 asks first.
    """
    theirs = vars(_fsdp_param)["nn"]
    setattr(_fsdp_param, "nn", _IntegersWantNoGradient())  # noqa: B010  # mypy: it is a module's name
    # Asked for in the first forward pass, long after this call: it stays.
    setattr(FSDPParam, "init_dtype_attrs", _types_of)  # noqa: B010
    try:
        fully_shard(module, **settings)
    finally:
        setattr(_fsdp_param, "nn", theirs)  # noqa: B010


_types_by_torch = FSDPParam.init_dtype_attrs


def _types_of(parameter: FSDPParam, policy: MixedPrecisionPolicy) -> None:
    """torch 2.11 gathers integers in the type that is computed in, too: a byte of codes as bf16 is none any more."""
    _types_by_torch(parameter, policy)
    if not parameter.orig_dtype.is_floating_point:
        parameter.param_dtype = None


class _IntegersWantNoGradient:
    """torch.nn, but for what a parameter of integers is made with."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)

    @staticmethod
    def Parameter(data: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:  # torch's name
        """See nn.Parameter."""
        return nn.Parameter(data, requires_grad and data.is_floating_point())


def synchronization(root: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
    """Around one micro-batch of an FSDP root: shards are summed after each, copies of them once a step.

    `set_is_last_backward` stays true: told otherwise, FSDP keeps what it sent last, the gradients of embedding and head
    whole in float32 (4 GiB of an 8B), through the next forward pass. It spares no waiting: that pass begins with a
    gathering that goes through the same communicator.
    """
    assert isinstance(root, FSDPModule)
    root.set_requires_all_reduce(is_last)
    return nullcontext()


def fill_shards(root: nn.Module, model: nn.Module, device: torch.device) -> None:
    """Gives the shards of `model`, whose FSDP root is `root`, their values on `device`."""
    fill_parameters(
        model.named_parameters(),
        source_of(model),
        device=device,
        settle=lambda: root.to(device),  # FSDP pads the memory that it finds
    )


def unit_bounds(blocks: Sequence[nn.Module], settings: FsdpSpec) -> list[tuple[int, int]]:
    """Which blocks are gathered together: of each unit the first, and one past the last."""
    if settings.wrap == "block":
        return [(number, number + 1) for number in range(len(blocks))]
    bounds, begin, size = [], 0, 0
    for number, block in enumerate(blocks):
        size += sum(parameter.numel() for parameter in block.parameters())
        if size >= settings.min_parameters or number == len(blocks) - 1:
            bounds.append((begin, number + 1))
            begin, size = number + 1, 0
    return bounds


def _prefetch(units: Sequence[nn.Module], depth: int) -> None:
    """Each unit asks for the `depth` that follow it in a forward pass, and for those before it in a backward one."""
    modules: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for number, module in enumerate(modules if depth else ()):
        module.set_modules_to_forward_prefetch(modules[number + 1 : number + 1 + depth])
        module.set_modules_to_backward_prefetch(modules[max(0, number - depth) : number][::-1])


def add_up_gradients(root: nn.Module) -> None:
    """Adds whole gradients that a pass has left beside their sums to these, which have the type of the reduction.

    FSDP does so at the end of a pass that gives gradients of inputs. Of one for weights alone it waits for the next
    such pass: a stage's gradients stand beside the sums until then, and a second one's are added to them as they are.
    """
    for module in root.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for parameter in () if group is None else group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def reshard(root: nn.Module) -> None:
    """Shards again what a forward pass alone left gathered: a gathered parameter is not the one the optimizer has."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
