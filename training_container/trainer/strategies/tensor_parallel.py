"""Tensor parallelism by the model's own plan: which matrices are cut by columns, which by rows.

transformers ships a plan with most model classes, and styles (`transformers.distributed`) that cut a parameter into a
DTensor and hook its module. Everything taken from there is taken in this file, because 5.23 needs care in two places:

- `replicated_with_grad_allreduce` (per-head norms of Qwen3 and others) sums gradients over ranks in a hook after each
  backward pass, so that with accumulated micro-batches what was summed before is summed again: wrong by 4 to 8 times
  with four micro-batches. Those gradients are summed once a step instead: `apply` names them.
- Every column-wise matrix sums its own input's gradient. Here the module around them makes one DTensor of its input,
  so that attention sums one gradient and not three, and gathers one sequence and not three.

With sequence parallelism what lies between (norms, residuals) is split along the sequence over the same ranks: the
same bytes travel, as a reduce-scatter and an all-gather in place of an all-reduce, and the activations between take
1/N of the memory (Korthikanti et al., arXiv:2205.05198).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PretrainedConfig, PreTrainedModel
from transformers.distributed.tensor_parallel import (
    ColwiseParallel,
    EmbeddingParallel,
    RowwiseParallel,
    TensorParallelLayer,
)

from trainyard.errors import InputError

PARTIAL_STYLE = "replicated_with_grad_allreduce"
HEAD_STYLES = ("colwise_gather_output", "colwise_rep")
KNOWN_STYLES = frozenset({"colwise", "rowwise", PARTIAL_STYLE, *HEAD_STYLES})


def check(config: PretrainedConfig, degree: int) -> None:
    """InputError, in one line, unless a model of this configuration can be split over `degree` ranks."""
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not plan:
        raise InputError(
            f"parallelism.tensor: {degree}: transformers has no tensor-parallel plan for {config.model_type};"
            " set it to 1 and use data_shard or pipeline"
        )
    if unknown := sorted(set(plan.values()) - KNOWN_STYLES):
        raise InputError(
            f"parallelism.tensor: {degree}: the plan of {config.model_type} has parts that this trainer does not split"
            f" ({', '.join(unknown)}); set it to 1 and use data_shard, pipeline or expert"
        )
    sizes = {"num_attention_heads": None, "num_key_value_heads": "num_attention_heads", "intermediate_size": None}
    for field, fallback in sizes.items():
        size = getattr(config, field, None) or getattr(config, fallback or field, None)
        if size is not None and size % degree:
            raise InputError(
                f"parallelism.tensor: {degree} does not divide the model's {field} ({size}); choose a divisor of it"
            )


def can_split_sequence(model: PreTrainedModel, blocks: Sequence[nn.Module]) -> bool:
    """Whether blocks are attention and feed-forward by plan, with nothing but position-wise parameters between."""
    plan = _plan_of(model)
    modules = {module: name for name, module in model.named_modules()}
    return all(
        not isinstance(module, nn.Linear | nn.Embedding) or plan.get(modules[module]) in ("colwise", "rowwise")
        for block in blocks
        for module in block.modules()
    )


def apply(model: PreTrainedModel, blocks: Sequence[nn.Module], axis: DeviceMesh, *, split_sequence: bool) -> list[str]:
    """Cuts the model's matrices over `axis`, in place; what a pipeline stage lacks is passed over.

    Returns the names of the parameters whose gradients are sums over this rank's heads or positions alone: they have
    to be summed over `axis` once a step.
    """
    plan = _plan_of(model)
    between = Shard(1) if split_sequence else Replicate()
    styles: dict[str, TensorParallelLayer] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(output_layouts=between),
    }
    modules = dict(model.named_modules())
    for name, style in plan.items():
        if style in styles and isinstance(modules[name], nn.Linear):
            _cut(modules[name], styles[style], axis)
    _cut_vocabulary(model, axis)
    _join_inputs(model, plan, axis, between)
    if split_sequence and blocks:
        _split_between(blocks[0], blocks[-1], axis)
    return _partial_names(model, plan, blocks if split_sequence else ())


def _plan_of(model: PreTrainedModel) -> dict[str, str]:
    """Module name -> style, one entry a module."""
    expanded: dict[str, str] = model._expand_parallel_plan(dict(model.tp_plan))
    modules = dict(model.named_modules())
    return {name: style for name, style in expanded.items() if name in modules}


def _cut(module: nn.Module, style: TensorParallelLayer, axis: DeviceMesh) -> None:
    for name in [name for name, _ in module.named_parameters(recurse=False)]:
        style.shard_param(module, name, axis)
    style.install_forward(module, axis)


def _cut_vocabulary(model: PreTrainedModel, axis: DeviceMesh) -> None:
    """Cuts embedding and head by vocabulary where that divides; tied ones stay one parameter.

    Plans leave the embedding whole; cut, it takes 1/N of the memory. An odd vocabulary stays whole on every rank.
    """
    if model.config.get_text_config().vocab_size % axis.size():
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    style = ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    is_tied = getattr(head, "weight", None) is getattr(embedding, "weight", embedding)
    if isinstance(embedding, nn.Embedding):
        _cut(embedding, EmbeddingParallel(shard_dim=0), axis)
    if isinstance(head, nn.Linear) and is_tied:
        head.weight = embedding.weight
        style.install_forward(head, axis)
    elif isinstance(head, nn.Linear):
        _cut(head, style, axis)


def _join_inputs(model: nn.Module, plan: dict[str, str], axis: DeviceMesh, between: Replicate | Shard) -> None:
    """Makes the hidden states one DTensor where they enter a module that feeds them to column-wise matrices alone."""
    modules = dict(model.named_modules())
    for parent in {name.rpartition(".")[0] for name, style in plan.items() if style == "colwise"}:
        linear = [name for name, child in modules[parent].named_children() if isinstance(child, nn.Linear)]
        assert all(plan.get(f"{parent}.{name}") in ("colwise", "rowwise") for name in linear)

        def join(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            hidden = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
            joined = DTensor.from_local(hidden, axis, [between], run_check=False).redistribute(placements=[Replicate()])
            return (joined, *args[1:]), kwargs

        modules[parent].register_forward_pre_hook(join, with_kwargs=True)


def _split_between(first: nn.Module, last: nn.Module, axis: DeviceMesh) -> None:
    """Before the first block each rank takes its positions; after the last one all have all again."""

    def split(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        whole = DTensor.from_local(args[0], axis, [Replicate()], run_check=False)
        return (whole.redistribute(placements=[Shard(1)]).to_local(), *args[1:]), kwargs

    def gather(_: nn.Module, __: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        assert isinstance(hidden, torch.Tensor)
        part = DTensor.from_local(hidden, axis, [Shard(1)], run_check=False)
        whole = part.redistribute(placements=[Replicate()]).to_local()
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    first.register_forward_pre_hook(split, with_kwargs=True)
    last.register_forward_hook(gather)


def _partial_names(model: nn.Module, plan: dict[str, str], split_blocks: Sequence[nn.Module]) -> list[str]:
    modules = dict(model.named_modules())
    partial = {
        parameter for name, style in plan.items() if style == PARTIAL_STYLE for parameter in modules[name].parameters()
    }
    # Between the blocks' matrices a rank sees its own positions alone. A row-wise matrix's bias is a DTensor, which
    # sums its gradient by itself.
    for block in split_blocks:
        partial |= {parameter for parameter in block.parameters() if not isinstance(parameter, DTensor)}
    return [name for name, parameter in model.named_parameters() if parameter in partial]
