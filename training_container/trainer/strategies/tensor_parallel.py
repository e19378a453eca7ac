"""Tensor parallelism: which matrices of a block are cut by columns, which by rows, and what has to be summed.

transformers ships a plan with most model classes; DeepSeek's attention and GPT-2 have theirs here. A plan is carried
out here too. Its unit is a *region*, an attention, feed-forward or mixture-of-experts module: hidden states enter it
whole, each rank computes with its columns, rows and experts alone, on plain local tensors, and what leaves the region
is the sum over ranks. So inside a region everything is linear in the ranks' parts: every gradient of what is not cut
(the input, per-head norms, latent projections, the router, the uncut half of an adapter) is a sum over ranks as well.
The input's is summed where the region begins, the parameters' once a step (`apply` names them).

transformers' own styles are not used: every version has others, those of 5.23 sum the gradient of a replicated norm in
a hook after each backward pass, so that with accumulated micro-batches what was summed before is summed again (wrong by
4 to 8 times with four of them), and they know neither adapters nor 4-bit weights.

With sequence parallelism what lies between regions (norms, residuals) is split along the sequence over the same ranks:
the same bytes travel, as a reduce-scatter and an all-gather in place of an all-reduce, and the activations between
take 1/N of the memory (Korthikanti et al., arXiv:2205.05198).
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainer.models.quantized import QuantizedLinear
from trainer.optimizers.build import local_tensor
from trainer.strategies import expert_parallel
from trainer.strategies.own_stream import OwnStream, drops_anything, drops_inside
from trainyard.errors import InputError
from trainyard.spec.support import EXPERT_FAMILIES

COLUMN, ROW, EXPERTS = "colwise", "rowwise", "moe_tp_experts"
"""Styles that make a region: columns, rows, and experts on different ranks."""

FUSED, GATED = "fused_qkv", "fused_gate_up"
"""Styles that do, too: query, key and value in one matrix, gate and up projection in one."""

DELTA = "fused_delta_rule"
"""And query, key and value of a delta rule (arXiv:2412.06464) in one matrix, or in one convolution by channel."""

NORM = "norm_of_all_heads"
"""A root mean square over the outputs of a column-wise matrix, of which each rank has some: they sum their squares."""

WHOLE_STYLES = frozenset({"replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"})
"""Modules inside a region that every rank has whole, or that are marked for transformers alone."""

_LATENT_ATTENTION = {
    "layers.*.self_attn.q_proj": COLUMN,
    "layers.*.self_attn.q_b_proj": COLUMN,
    "layers.*.self_attn.kv_b_proj": COLUMN,
    "layers.*.self_attn.o_proj": ROW,
}
_GPT2 = {
    "h.*.attn.c_attn": FUSED,
    "h.*.attn.c_proj": ROW,
    "h.*.mlp.c_fc": COLUMN,
    "h.*.mlp.c_proj": ROW,
}
_ATTENTION = {**{f"layers.*.self_attn.{name}_proj": COLUMN for name in "qkv"}, "layers.*.self_attn.o_proj": ROW}
_NEMOTRON = {**_ATTENTION, "layers.*.mlp.up_proj": COLUMN, "layers.*.mlp.down_proj": ROW}
_STABLELM = {**_NEMOTRON, "layers.*.mlp.gate_proj": COLUMN}
_GLM = {"layers.*.mlp.gate_up_proj": GATED, "layers.*.mlp.down_proj": ROW}
_PHI3 = {**_GLM, "layers.*.self_attn.qkv_proj": FUSED, "layers.*.self_attn.o_proj": ROW}
_NORMED_ATTENTION = {**_ATTENTION, **{f"layers.*.self_attn.{name}_norm": NORM for name in "qk"}}
_GPTJ = {
    **{f"h.*.attn.{name}_proj": COLUMN for name in "qkv"},
    "h.*.attn.out_proj": ROW,
    "h.*.mlp.fc_in": COLUMN,
    "h.*.mlp.fc_out": ROW,
}


_DELTA = {
    "layers.*.linear_attn.conv1d": DELTA,
    **{f"layers.*.linear_attn.{name}": COLUMN for name in ("A_log", "dt_bias")},
    "layers.*.linear_attn.out_proj": ROW,
}
_QWEN3_5 = {
    **_DELTA,
    "layers.*.linear_attn.in_proj_qkv": DELTA,
    **{f"layers.*.linear_attn.in_proj_{name}": COLUMN for name in "zba"},
}
_QWEN3_NEXT = {**_DELTA, **{f"layers.*.linear_attn.in_proj_{name}": COLUMN for name in ("qkvz", "ba")}}


def _gated(module: str) -> dict[str, str]:
    """A block of a gate, what it lets through, and the way back."""
    return {f"layers.*.{module}.{name}_proj": ROW if name == "down" else COLUMN for name in ("gate", "up", "down")}


_SHARED_EXPERTS = _gated("mlp.shared_experts")

OWN_PLANS: dict[str, dict[str, str]] = {
    "afmoe": _ATTENTION | {"layers.*.self_attn.gate_proj": COLUMN} | _gated("mlp") | _SHARED_EXPERTS,
    "cohere2_moe": _SHARED_EXPERTS,
    "deepseek_v2": _LATENT_ATTENTION,
    "deepseek_v3": _LATENT_ATTENTION,
    "exaone_moe": _SHARED_EXPERTS,
    "flex_olmo": _NORMED_ATTENTION,
    "glm": _GLM,
    "glm4": _GLM,
    "glm4_moe_lite": _SHARED_EXPERTS,
    "gpt2": _GPT2,
    "gpt_oss": _ATTENTION | {"layers.*.self_attn.sinks": COLUMN, "layers.*.mlp.experts": EXPERTS},
    "gptj": _GPTJ,
    "granitemoe": _ATTENTION,
    "granitemoeshared": _ATTENTION,
    "hunyuan_v1_moe": _ATTENTION | _gated("mlp.shared_mlp"),
    "minimax_m2": _NORMED_ATTENTION,
    "nemotron": _NEMOTRON,
    "olmo2": _NORMED_ATTENTION,
    "olmo3": _NORMED_ATTENTION,
    "olmoe": _NORMED_ATTENTION,
    "phi3": _PHI3,
    "qwen2_moe": _gated("mlp.shared_expert"),
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_next": _QWEN3_NEXT,
    "solar_open": _SHARED_EXPERTS,
    "stablelm": _STABLELM,
    "youtu": _LATENT_ATTENTION,
}
"""By model type, what is missing in transformers' plan: V3's and Youtu's leave their attention whole, OLMo's and
MiniMax-M2's gather all heads on every rank for their norm, Phi-3's and GLM's what comes out of fused matrices, GPT-2,
GPT-J, StableLM and gpt-oss have none, Nemotron's is not in 5.17, Qwen's run delta rules whole on every rank
(Qwen3-Next's fused matrices go by key heads, and are cut like any other), and others leave whole what all tokens share,
which would be added up as often as there are ranks."""

_HEAD_COUNTS: dict[str, tuple[str, ...]] = {
    "gpt2": ("split_size",),
    "gptj": ("num_attention_heads",),
    "phi3": ("num_key_value_heads", "config.num_attention_heads"),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text"), ("key_dim", "value_dim")),
    "qwen3_next": ("key_dim", "value_dim", "num_k_heads", "num_v_heads"),
    "stablelm": ("num_heads", "num_key_value_heads"),
}
"""By model type, what the attention module's code takes for the number or width of all heads; the others' code goes by
the size of a head alone."""


def check(config: PretrainedConfig, degree: int) -> None:
    """InputError, in one line, unless this transformers' plan for the job's model is one that can be carried out.

    Which families and sizes can be split, `trainyard.spec.support` says; a plan may differ between versions.
    """
    plan = plan_of(config)
    if not plan:
        raise InputError(
            f"parallelism.tensor: {degree}: transformers has no tensor-parallel plan for {config.model_type};"
            " set it to 1 and use data_shard or pipeline"
        )
    known = {COLUMN, ROW, FUSED, GATED, DELTA, NORM, *WHOLE_STYLES}
    if config.model_type in EXPERT_FAMILIES:
        known |= {EXPERTS}
        experts = [f"{name}." for name, style in plan.items() if style == EXPERTS]  # whose weights go with them
        plan = {name: style for name, style in plan.items() if not name.startswith((*experts,))}
    if unknown := sorted(set(plan.values()) - known):
        raise InputError(
            f"parallelism.tensor: {degree}: the plan of {config.model_type} has parts that this trainer does not split"
            f" ({', '.join(unknown)}); set it to 1 and use data_shard, pipeline or expert"
        )


def plan_of(config: PretrainedConfig) -> dict[str, str]:
    """Module name below the base model, with * for a layer's number -> style.

    Without the embedding's, which transformers 5.17 adds where it is tied to the head, in no other version: here the
    head's style decides for both.
    """
    plan = (getattr(config, "base_model_tp_plan", None) or {}) | OWN_PLANS.get(config.model_type, {})
    return {name: style for name, style in plan.items() if name != "embed_tokens"}


def can_split_sequence(model: PreTrainedModel, blocks: Sequence[nn.Module]) -> bool:
    """Whether blocks are regions, with nothing but position-wise parameters between."""
    inside = {module for region in regions_of(model) for module in region.modules()}
    matrices = (nn.Linear, nn.Embedding, Conv1D, QuantizedLinear)
    return all(not isinstance(module, matrices) or module in inside for block in blocks for module in block.modules())


def apply(model: PreTrainedModel, blocks: Sequence[nn.Module], axis: DeviceMesh, *, split_sequence: bool) -> list[str]:
    """Cuts the model's matrices over `axis`, in place; what a pipeline stage lacks is passed over.

    Experts are left to `expert_parallel.apply`, which comes after. Returns the names of the parameters whose gradients
    are sums over this rank's heads, experts or positions alone: they have to be summed over `axis` once a step.
    """
    check_experts(model, axis.size())
    between = Shard(1) if split_sequence else Replicate()
    modules, regions = dict(model.named_modules()), regions_of(model)
    own_stream = OwnStream(axis.get_local_rank(), axis.device_type)
    added_after: set[nn.Parameter] = set()
    for name, style in _styles_of(model).items():
        parent = modules[name.rpartition(".")[0]]
        if style == COLUMN and name not in modules:
            _cut_by_head(parent, name.rpartition(".")[2], axis)
        elif style == COLUMN:
            _cut_columns(modules[name], axis)
        elif style in (FUSED, GATED, DELTA):
            _cut_fused(parent, modules[name], _shares_of(style, model.config.get_text_config()), axis)
        elif style == NORM:
            _cut_norm(modules[name], axis)
        elif style == ROW:
            base = _cut_rows(modules[name], axis)
            if parent in regions:
                added_after |= {base.bias} if base.bias is not None else set()
                _sum_output(modules[name], base, axis, between)
                if not split_sequence and drops_inside(parent):
                    own_stream.between(parent, modules[name])
        elif style == EXPERTS:
            # Nothing is dropped inside: no adapter goes to experts, to those that all tokens share as little
            # (`trainyard.spec.obstacles`), and no verified family drops anything there itself.
            _sum_output(parent, None, axis, between)
    for region in regions:
        _count_own_heads(region, model.config.get_text_config().model_type, axis.size())
        _gather_input(region, axis, between)
    _cut_vocabulary(model, axis)
    if split_sequence and blocks:
        _split_between(blocks[0], blocks[-1], axis)
        if drops_anything(blocks):
            own_stream.between(blocks[0], blocks[-1])
    return _partial_names(model, regions, added_after, blocks if split_sequence else ())


def regions_of(model: PreTrainedModel) -> list[nn.Module]:
    """The modules around cut matrices and experts; of nested ones (shared experts) the outermost."""
    modules = dict(model.named_modules())
    cut = [name for name, style in _styles_of(model).items() if style not in WHOLE_STYLES]
    names = {name.rpartition(".")[0] for name in cut}
    return [modules[name] for name in sorted(names) if not any(name.startswith(f"{other}.") for other in names)]


def check_experts(model: PreTrainedModel, degree: int) -> None:
    """InputError, in one line, where a mixture has something beside its experts that ranks can't have whole.

    What leaves its region is a sum over ranks, so all that is added there has to be cut: a shared expert that a plan
    leaves whole would be added once a rank, and a norm of what experts gave sees a part of it. Whole may be what gives
    a number an expert or one for all of them: routers, and the gate of a shared expert.
    """
    modules, styles = dict(model.named_modules()), _styles_of(model)
    for name in (name for name, style in styles.items() if style == EXPERTS):
        region, whole = name.rpartition(".")[0], {getattr(modules[name], "num_experts", 1), 1}
        for path, weight in modules[region].named_parameters(prefix=region):
            parts = path.split(".")
            is_cut = any(".".join(parts[:depth]) in styles for depth in range(1, len(parts)))
            if not is_cut and weight.size(0) not in whole and not any(part.startswith("lora_") for part in parts):
                raise InputError(
                    f"parallelism.tensor: {degree}: {path.removesuffix('.weight')} of {model.config.model_type} is"
                    " beside experts and neither cut nor a router, and would be counted once a rank; set it to 1 and"
                    " use data_shard or expert"
                )


def _styles_of(model: PreTrainedModel) -> dict[str, str]:
    """Name in `model` -> style, one entry a module, or a weight of an attention's own, that there is."""
    plan, base = plan_of(model.config.get_text_config()), model.base_model
    prefix = next(name for name, module in model.named_modules() if module is base)
    prefix = f"{prefix}." if prefix else ""
    vectors = [name for name, weight in base.named_parameters() if weight.ndim == 1]  # experts' are packed, and theirs
    names = [*(name for name, _ in base.named_modules()), *vectors]
    found = {name: plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) for name in names}
    return {prefix + name: style for name, style in found.items() if style is not None}


_OUTPUT_DIMS: dict[type, dict[str, int]] = {
    QuantizedLinear: {"codes": 0, "scales": 0, "ranges": 0, "bias": 0},
    nn.Linear: {"weight": 0, "bias": 0},
    Conv1D: {"weight": 1, "bias": 0},
}
_INPUT_DIMS: dict[type, dict[str, int]] = {
    QuantizedLinear: {"codes": 1, "scales": 1},
    nn.Linear: {"weight": 1},
    Conv1D: {"weight": 0},
}
"""Kind of linear layer -> which dimension of which parameter goes with its outputs, or its inputs."""


def _adapted(module: Any) -> tuple[Any, list[nn.Module], list[nn.Module]]:
    """The linear layer itself and, where peft put an adapter around it, the adapter's first and second matrices."""
    if not hasattr(module, "base_layer"):
        return module, [], []
    return module.base_layer, list(module.lora_A.values()), list(module.lora_B.values())


def _cut_columns(module: nn.Module, axis: DeviceMesh) -> None:
    """Each rank has some outputs. Of an adapter B is cut, and A is whole."""
    base, _, second = _adapted(module)
    for linear in (base, *second):
        _cut(linear, _OUTPUT_DIMS[type(linear)], axis)
        linear.forward = _product_of(linear, with_bias=True)


def _cut_rows(module: nn.Module, axis: DeviceMesh) -> Any:
    """Each rank has some inputs, and its output is a part of a sum, to which the bias is not added yet.

    Of an adapter A is cut, and B is whole: it maps a part of a sum to a part of a sum. Returns the layer itself.
    """
    base, first, _ = _adapted(module)
    for linear in (base, *first):
        _cut(linear, _INPUT_DIMS[type(linear)], axis)
        linear.forward = _product_of(linear, with_bias=False)
    return base


def _shares_of(style: str, config: PretrainedConfig) -> tuple[int, ...]:
    """What of a fused matrix's outputs each of the matrices in it has, as numbers that they are in proportion to."""
    if style == GATED:
        return 1, 1
    if style == DELTA:
        keys, values = (
            getattr(config, f"linear_num_{name}_heads") * getattr(config, f"linear_{name}_head_dim")
            for name in ("key", "value")
        )
        return keys, keys, values
    keys = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return config.num_attention_heads, keys, keys


def _cut_fused(region: nn.Module, module: nn.Module, shares: Sequence[int], axis: DeviceMesh) -> None:
    """Matrices side by side in one: kept whole, of which each rank uses its columns of each. Channels of a convolution
    likewise.

    They are no box of the whole, which is all that a checkpoint can describe.
    """
    base, _, second = _adapted(module)
    size, place = axis.size(), axis.get_local_rank()

    def own_parts(whole: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """Split once: the gradient of a slice is a tensor as large as the whole, that of a split is one for all."""
        each = whole.size(dim) // sum(shares)
        parts = torch.split(whole, [each * share // size for share in shares for _ in range(size)], dim=dim)
        return list(parts[place::size])

    if isinstance(base, nn.Conv1d):
        _read_own_channels(region, base, lambda weight: torch.cat(own_parts(weight, 0)))
        return

    def own_columns(outputs: torch.Tensor) -> torch.Tensor:
        return torch.cat(own_parts(outputs, -1), dim=-1)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        weights = own_parts(base.weight.T if isinstance(base, Conv1D) else base.weight, 0)
        biases = [None] * len(weights) if base.bias is None else own_parts(base.bias, 0)
        products = [functional.linear(hidden, *pair) for pair in zip(weights, biases, strict=True)]
        return torch.cat(products, dim=-1)

    if isinstance(base, QuantizedLinear):
        base.register_forward_hook(lambda _, __, output: own_columns(output))
    else:
        base.forward = forward
    for linear in second:
        linear.register_forward_hook(lambda _, __, output: own_columns(output))


def _read_own_channels(region: nn.Module, convolution: nn.Conv1d, own: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Has the code of `region`, which reads the convolution's weight itself, find this rank's part of it there."""
    inner, weights = region.forward, convolution._parameters

    def forward(*args: Any, **kwargs: Any) -> Any:
        whole = weights["weight"]
        assert whole is not None
        weights["weight"] = own(whole)  # type: ignore[assignment]  # no leaf
        try:
            return inner(*args, **kwargs)
        finally:
            weights["weight"] = whole

    setattr(region, "forward", forward)  # noqa: B010  # mypy forbids methods to be assigned


def _count_own_heads(region: Any, model_type: str, size: int) -> None:
    """Tells an attention module that it has this rank's heads alone."""
    names = _HEAD_COUNTS.get(model_type, ())
    if not names or not hasattr(region, names[0]):
        return
    for name in names:
        owner = region
        if name.startswith("config."):  # the model's, which others read
            owner = region.config = copy.copy(region.config)
        count = name.removeprefix("config.")
        setattr(owner, count, getattr(owner, count) // size)


def _cut_norm(norm: Any, axis: DeviceMesh) -> None:
    """A norm of all heads' outputs, of which this rank has its own heads': only the mean of squares needs the others'.

    What is normalized, in float32, times the weight, and rounded once: as OLMo 2's code, and as the kernel that the
    norms of others have where they are whole (`trainer.models.norms`).
    """
    width, epsilon = norm.weight.numel(), norm.variance_epsilon
    _cut(norm, {"weight": 0}, axis)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.to(torch.float32)
        squares = wide.square().sum(dim=-1, keepdim=True)
        parts = DTensor.from_local(squares, axis, [Partial()], run_check=False)
        summed: torch.Tensor = parts.redistribute(placements=[Replicate()]).to_local()
        # Every rank's outputs come of the sum, so its gradient is the sum of theirs.
        shared = DTensor.from_local(summed, axis, [Replicate()], run_check=False)
        mean = shared.to_local(grad_placements=[Partial()]) / width
        return (local_tensor(norm.weight) * (wide * torch.rsqrt(mean + epsilon))).to(hidden.dtype)

    norm.forward = forward


def _cut_by_head(attention: nn.Module, name: str, axis: DeviceMesh) -> None:
    """Each rank has its heads' entries of a vector, gpt-oss' sinks."""
    _cut(attention, {name: 0}, axis)
    inner = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with expert_parallel.local_weights(attention):
            return inner(*args, **kwargs)

    setattr(attention, "forward", forward)  # noqa: B010  # mypy forbids methods to be assigned


def _cut(linear: nn.Module, dims: Mapping[str, int], axis: DeviceMesh) -> None:
    for name, dim in dims.items():
        whole = linear._parameters.get(name)
        if whole is not None:
            # Every rank built the same weights, so each keeps its slice and nothing is sent.
            part = distribute_tensor(whole.detach(), axis, [Shard(dim)], src_data_rank=None)
            linear._parameters[name] = nn.Parameter(part, requires_grad=whole.requires_grad)


def _product_of(linear: nn.Module, *, with_bias: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """The layer's forward pass over this rank's part of its matrix."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        bias = getattr(linear, "bias", None) if with_bias else None
        bias = None if bias is None else local_tensor(bias)
        if isinstance(linear, QuantizedLinear):
            return linear.product(hidden, bias)
        assert isinstance(linear.weight, torch.Tensor)
        weight = local_tensor(linear.weight)
        return functional.linear(hidden, weight.T if isinstance(linear, Conv1D) else weight, bias)

    return forward


def _sum_output(module: nn.Module, base: Any, axis: DeviceMesh, between: Placement) -> None:
    """Sums what `module` returns over the ranks; the bias of `base`, if there is one, is added once."""

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        own = output[0] if isinstance(output, tuple) else output
        parts = DTensor.from_local(own, axis, [Partial()], run_check=False)
        total: torch.Tensor = parts.redistribute(placements=[between]).to_local()
        if base is not None and base.bias is not None:
            total = total + base.bias
        return (total, *output[1:]) if isinstance(output, tuple) else total

    module.register_forward_hook(leave)


def _gather_input(region: nn.Module, axis: DeviceMesh, between: Placement) -> None:
    """Gives a region all positions, and sums the gradient of what it was given: once, not once a matrix."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
        parts = DTensor.from_local(hidden, axis, [between], run_check=False)
        whole = parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return (whole, *args[1:]), kwargs

    region.register_forward_pre_hook(enter, with_kwargs=True)


def _cut_vocabulary(model: PreTrainedModel, axis: DeviceMesh) -> None:
    """Cuts embedding and head by vocabulary where that divides; tied ones stay one parameter.

    Plans leave the embedding whole; cut, it takes 1/N of the memory. An odd vocabulary stays whole on every rank, and
    so does a head with an adapter.
    """
    if model.config.get_text_config().vocab_size % axis.size():
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = getattr(head, "weight", None) is getattr(embedding, "weight", embedding)
    if isinstance(embedding, nn.Embedding):
        _cut(embedding, {"weight": 0}, axis)
        if type(embedding) is nn.Embedding:
            _look_up_rows(embedding, axis)
        else:  # which does more than to look up
            _run_on_rows(embedding, axis)
    if isinstance(head, nn.Linear):
        if is_tied:
            head.weight = embedding.weight
        else:
            _cut(head, _OUTPUT_DIMS[nn.Linear], axis)
        _run_on_rows(head, axis)


def _look_up_rows(embedding: nn.Embedding, axis: DeviceMesh) -> None:
    """Lets an embedding look up its own rows alone, and gives the sum over ranks, of which one has each token's row.

    DTensor's own way makes the whole matrix's gradient on every rank, in float32 while it is accumulated: 4 GiB of a
    70B. This one has the gradient of its rows.
    """
    num_rows = embedding.num_embeddings // axis.size()
    first = num_rows * axis.get_local_rank()
    padding = None if embedding.padding_idx is None else embedding.padding_idx - first
    own_padding = padding if padding is not None and 0 <= padding < num_rows else None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        rows = ids - first
        is_elsewhere = (rows < 0) | (rows >= num_rows)
        found = functional.embedding(rows.masked_fill(is_elsewhere, 0), local_tensor(embedding.weight), own_padding)
        parts = found.masked_fill(is_elsewhere.unsqueeze(-1), 0)
        whole: torch.Tensor = DTensor.from_local(parts, axis, [Partial()], run_check=False)
        total: torch.Tensor = whole.redistribute(placements=[Replicate()]).to_local()  # type: ignore[attr-defined]
        return total

    setattr(embedding, "forward", forward)  # noqa: B010  # mypy forbids methods to be assigned


def _run_on_rows(module: nn.Module, axis: DeviceMesh) -> None:
    """Lets a module whose weight is cut by vocabulary take a whole input, and give its whole output on every rank."""
    inner = module.forward

    def forward(whole: torch.Tensor) -> torch.Tensor:
        output = inner(DTensor.from_local(whole, axis, [Replicate()], run_check=False))
        local: torch.Tensor = output.redistribute(placements=[Replicate()]).to_local()
        return local

    module.forward = forward


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


def _partial_names(
    model: nn.Module, regions: Iterable[nn.Module], added_after: set[nn.Parameter], split_blocks: Sequence[nn.Module]
) -> list[str]:
    """What is whole inside a region, and, where positions are split, between regions too."""
    cut = {weight for module in expert_parallel.expert_modules(model) for weight in module.parameters()}
    inside = {parameter for region in regions for parameter in region.parameters()} - added_after
    between = {parameter for block in split_blocks for parameter in block.parameters()}
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter in inside | between and parameter not in cut and not isinstance(parameter, DTensor)
    ]
