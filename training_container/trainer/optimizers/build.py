"""The job's optimizer, with decay on matrices only, and the global gradient norm; for plain and sharded parameters."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trainer.optimizers.eight_bit import MOMENTS, AdamW8bit
from trainer.optimizers.matrix import Adafactor, Muon
from trainer.optimizers.momentum import Momentum
from trainyard.spec.job import ResolvedJob

_MATRIX_DIMS = 2

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does."""


_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)
"""Whose kernels Muon takes, each as one matrix."""

_DECAY_RATES = "A_log"
"""Of a state-space layer (Mamba): the logarithms of rates, a row a channel; its authors mark them _no_weight_decay."""


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay pulls on it, and Muon may take it: by its name too, for some others have two dimensions.

    Norms of heads (Cohere's), packed experts' biases (gpt-oss') and a state-space layer's rates.
    """
    owner, _, own = name.rpartition(".")
    is_norm = "norm" in owner.rpartition(".")[2]
    return parameter.ndim >= _MATRIX_DIMS and not (is_norm or own.endswith("bias") or own == _DECAY_RATES)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters that weight decay pulls on (matrices and embeddings), and those it must not (norms, biases).

    Each split once more by the mesh that parameters are distributed over: torch's fused kernel takes the parameters
    of a group together, and refuses a mixture of meshes, or of plain tensors and DTensors.
    """
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((is_matrix(name, parameter), mesh), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
        for (decays, _), parameters in sorted(groups.items(), key=lambda item: not item[0][0])
    ]


def build_adamw(model: nn.Module, job: ResolvedJob) -> torch.optim.AdamW:
    """The job's optimizer over `model`'s parameters (plain or DTensor), as torch's fused kernel on CPU and GPU.

    The rate is set at every step; fused measured 8.1 ms against 10.1 ms for a loop on a 0.36M-parameter model on CPU.
    """
    settings = job.spec.training.optimizer
    return torch.optim.AdamW(
        decay_groups(model, settings.weight_decay),
        lr=job.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


def build_optimizer(
    model: nn.Module, job: ResolvedJob, *, replicas: dist.ProcessGroup | None = None
) -> torch.optim.Optimizer:
    """The job's optimizer over `model`'s parameters (plain or DTensor), its state made: a load can read into it.

    `replicas`: the ranks that have the same plain parameters, and may share the work of an update.
    """
    settings = job.spec.training.optimizer
    optimizer: torch.optim.Optimizer
    if settings.kind == "adafactor":
        optimizer = Adafactor(decay_groups(model, settings.weight_decay), lr=job.learning_rate)
    elif settings.kind == "muon":
        groups = muon_groups(model, settings.weight_decay)
        optimizer = Muon(
            groups,
            lr=job.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            replicas=replicas,
            uses_tf32=job.spec.training.precision not in ("fp32", "fp64"),
        )
    elif settings.kind == "adamw_8bit":
        groups = decay_groups(model, settings.weight_decay)
        optimizer = AdamW8bit(groups, lr=job.learning_rate, betas=settings.betas, eps=settings.eps)
    elif settings.kind == "sgd":
        groups = decay_groups(model, settings.weight_decay)
        optimizer = Momentum(groups, lr=job.learning_rate, momentum=settings.momentum, nesterov=settings.nesterov)
    else:
        optimizer = build_adamw(model, job)
        _create_moments(optimizer)
    if settings.average_decay is not None:
        _keep_average(optimizer, settings.average_decay)
    return optimizer


def describe(optimizer: torch.optim.Optimizer) -> str:
    """Which optimizer runs, and by which kernel, in a few words."""
    if isinstance(optimizer, torch.optim.AdamW):
        kernel = "torch's fused kernel" if optimizer.defaults["fused"] else "a loop over parameters"
        return f"AdamW ({kernel})"
    if isinstance(optimizer, AdamW8bit):
        return f"AdamW in 8 bits ({optimizer.state_bytes()} bytes of averages on the first rank)"
    if isinstance(optimizer, Momentum):
        return "SGD (torch's own)"
    if isinstance(optimizer, Muon):
        return f"Muon (matrices dealt out to ranks{', in TF32 on a GPU' if optimizer.uses_tf32 else ''})"
    return f"{type(optimizer).__name__} (one matrix at a time)"


def moments_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """What the optimizer keeps for one parameter, besides the count of its steps, under torch's names; live.

    But for what it keeps in 8 bits, which is read: `set_moments` stores it again.
    """
    kept = {name: tensor for name, tensor in optimizer.state[parameter].items() if name != "step"}
    if not isinstance(optimizer, AdamW8bit):
        return kept
    return optimizer.moments(parameter) | {name: kept[name] for name in ("average",) if name in kept}


def set_moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, moments: dict[str, torch.Tensor]) -> None:
    """Takes over what was loaded into the tensors of `moments_of`."""
    if isinstance(optimizer, AdamW8bit):
        for name in set(MOMENTS) & set(moments):
            optimizer.set_moment(parameter, name, moments[name])


def _create_moments(optimizer: torch.optim.Optimizer) -> None:
    """Creates the state that AdamW makes in its first step, so that a load has something to read into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                # The fused kernel wants the step on the parameter's device, as a plain tensor under FSDP too.
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{
                    moment: torch.zeros_like(parameter, memory_format=torch.preserve_format)
                    for moment in ("exp_avg", "exp_avg_sq")
                },
            }


def muon_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """`decay_groups`, the matrices that turn one hidden vector into another apart from embedding and head."""
    ends = {id(parameter) for module in _ends(model) for parameter in module.parameters()}
    kernels = {id(module.weight) for module in model.modules() if isinstance(module, _CONVOLUTIONS)} - ends
    inner = {id(each) for name, each in model.named_parameters() if is_matrix(name, each)} - ends - kernels
    groups = []
    for group in decay_groups(model, weight_decay):
        kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            of_kernels = id(parameter) in kernels
            kinds.setdefault((of_kernels or id(parameter) in inner, of_kernels), []).append(parameter)
        groups += [
            group | {"params": parameters, "orthogonal": orthogonal, "kernels": of_kernels}
            for (orthogonal, of_kernels), parameters in sorted(kinds.items(), key=lambda item: item[0], reverse=True)
        ]
    return groups


def _ends(model: nn.Module) -> list[nn.Module]:
    """Embeddings (of positions too), the head, and what runs along a sequence (Mamba's convolutions)."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]  # a pipeline's stages
    heads = [head for part in models if isinstance(head := part.get_output_embeddings(), nn.Module)]
    return [*(module for module in model.modules() if isinstance(module, nn.Embedding | nn.Conv1d)), *heads]


def _keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Adds `average` to each parameter's state: sharded, saved and resumed like every moment."""
    for parameter, state in optimizer.state.items():
        state["average"] = parameter.detach().clone()

    @torch.no_grad()
    def update(*_: Any) -> None:
        averages = [local_tensor(state["average"]) for state in optimizer.state.values()]
        torch._foreach_lerp_(averages, [local_tensor(parameter.detach()) for parameter in optimizer.state], 1 - decay)

    optimizer.register_step_post_hook(update)


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Sets the rate of every parameter group (of a torch optimizer or of DeepSpeed's wrapper)."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or the plain tensor itself; shares memory either way."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's gradient (shards) of the parameters that have one; empty shards are left out."""
    gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return [gradient for gradient in gradients if gradient.numel()]


@torch.no_grad()
def global_grad_norm(gradients: Sequence[torch.Tensor], shard_group: dist.ProcessGroup | None) -> float:
    """The 2-norm over all gradients; `shard_group`: the ranks that together hold them once, None when each holds all.

    Norms of one tensor are taken in its own type, summed in float64: as many small terms as there are tensors.
    """
    if gradients:
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(list(gradients), 2.0, dtype=dtype))
        squares = norms.double().square().sum()
    else:
        squares = torch.zeros((), dtype=torch.float64)
    if shard_group is not None:
        if squares.device.type == "cpu" and dist.get_backend(shard_group) == "nccl":
            squares = squares.cuda()
        dist.all_reduce(squares, group=shard_group)
    total = squares.item()  # waits for the device, and nothing else does
    return math.sqrt(total) if math.isfinite(total) else math.inf


def clip_factor(grad_norm: float, max_norm: float | None) -> float:
    """What gradients are multiplied by so that their norm stays below `max_norm`; 1.0 when it already does."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (grad_norm + CLIP_EPSILON))
