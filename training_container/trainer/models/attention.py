"""Which attention a model runs, why, and what is refused; and attention over packed documents by their offsets.

`choose_attention` decides before the model is built, `describe_attention` says which kernel torch will really take.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import is_flash_attn_3_available

from trainer.models.configuration import configuration_of, differs_by_layer, size_of
from trainer.models.known_code import class_like
from trainyard.errors import InputError
from trainyard.spec.job import ResolvedJob
from trainyard.spec.obstacles import separates_documents
from trainyard.spec.support import STATE_HEADS

VARLEN = "document_varlen"
"""The name under which transformers knows attention by document offsets."""

HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Precisions in which attention's inputs have two bytes: fp8 is for linear layers alone."""

MAX_HEAD_SIZE = 256
"""Of torch's flash kernels."""

_UNTOLD_WINDOWS = frozenset({"phimoe"})
"""Model types (transformers 5.17 and 5.23) whose mask has the configuration's window, and whose attention isn't told of
it."""

_UNTOLD_POSITIONS = frozenset({"afmoe", "gpt_oss"})
"""Model types whose code (transformers 5.17 and 5.23) makes its masks without the position ids: packed documents would
see each other."""

_SINKS = frozenset({"gpt_oss"})
"""Model types whose attention gives a share to no token, which torch's kernels don't."""

_ALWAYS_MASKED = frozenset({"falcon"})
"""Model types whose code makes a mask where torch's kernels need none."""

_PROBED_TOKENS = 256
"""Enough to make torch choose as for a long sequence, and small."""

_TRIED_TOKENS = 128
_TRIED_BEGINS = (0, 1, 50, _TRIED_TOKENS)
_TRIED_TOLERANCE = 0.05
"""Relative, in bf16; a token too many or too few in a window moves it by more."""


@dataclass(frozen=True)
class AttentionChoice:
    """What transformers is asked for, and why."""

    implementation: str
    """sdpa, eager, flash_attention_3 or VARLEN."""
    reason: str


def choose_attention(job: ResolvedJob, config: PretrainedConfig, *, device_type: str) -> AttentionChoice:
    """The job's attention for a model of this configuration; InputError for one that can't be had here."""
    asked = job.spec.model.attention
    if asked == "flash_attention_3":
        _check_flash_attention_3(job, config, device_type)
        return AttentionChoice(asked, "model.attention asks for it")
    obstacle = _varlen_obstacle(job, config, device_type)
    if asked == "varlen":
        if obstacle is not None:
            raise InputError(f"model.attention: varlen can't be had: {obstacle}; set it to auto")
        return AttentionChoice(VARLEN, "model.attention asks for it")
    if asked == "sdpa" and _caps_scores(config):
        raise InputError(
            f"model.attention: sdpa can't be had: it leaves out the cap on attention's scores that {config.model_type}"
            " has (attn_logit_softcapping); set it to auto or eager"
        )
    if asked != "auto":
        return AttentionChoice(asked, "model.attention asks for it")
    if obstacle is None:
        return AttentionChoice(VARLEN, "packed documents are kept apart by offsets, without a mask")
    if _caps_scores(config) or not _supports(config, "sdpa"):
        lacks = "caps attention's scores, which sdpa leaves out" if _caps_scores(config) else "has no other"
        return AttentionChoice("eager", f"{config.model_type} {lacks} in transformers")
    return AttentionChoice("sdpa", _mask_reason(job, config))


def masks_documents(job: ResolvedJob, config: PretrainedConfig) -> bool:
    """Whether a mask keeps packed documents apart where torch's kernel for them is to be had: on GPUs since Ampere."""
    asked = job.spec.model.attention
    if not separates_documents(job.spec) or job.parallelism.context > 1 or asked in ("eager", "flash_attention_3"):
        return False
    is_half = job.spec.training.precision in HALF_TYPES
    return asked == "sdpa" or not is_half or _model_obstacle(job, config.get_text_config()) is not None


def check(job: ResolvedJob, *, device_type: str) -> None:
    """InputError, in one line and before anything is read, for attention that can't be had here."""
    config = configuration_of(job)
    if config is None or job.spec.task != "causal_lm":
        return
    choose_attention(job, config, device_type=device_type)


def attention_of(model: PreTrainedModel, job: ResolvedJob, device: torch.device) -> str:
    """One line on what a language model that was built for this job runs."""
    config = model.config.get_text_config()
    if job.parallelism.context > 1:
        if (reason := written_out_for(config)) is not None:
            return (
                f"written out, over keys and values of {job.parallelism.context} ranks (parallelism.context;"
                f" {config.model_type} {reason}): own x all tokens a head in memory"
            )
        more = "; layers with a state along the sequence have all tokens of a rank's own heads"
        more = more if config.model_type in STATE_HEADS else _documents_over_ranks(job, config)
        return f"sdpa over keys and values of {job.parallelism.context} ranks (parallelism.context{more})"
    return describe_attention(choose_attention(job, config, device_type=device.type), job, config, device)


def _documents_over_ranks(job: ResolvedJob, config: PretrainedConfig) -> str:
    """Under context parallelism, what packed documents cost: with a window a byte for each of own times all tokens."""
    if not separates_documents(job.spec):
        return ""
    if getattr(config, "sliding_window", None) is None:
        return "; packed documents one after the other, without a mask"
    length = job.spec.data.sequence_length
    size = length // job.parallelism.context * length / 2**30
    return f"; packed documents and windows take a mask of {size:.2g} GiB a sequence, which no flash kernel reads"


def describe_attention(
    choice: AttentionChoice, job: ResolvedJob, config: PretrainedConfig, device: torch.device
) -> str:
    """One line: implementation, the kernel that torch will take for it, the reason."""
    if choice.implementation == VARLEN:
        return f"varlen, flash kernel ({choice.reason})"
    if choice.implementation != "sdpa":
        return f"{choice.implementation} ({choice.reason})"
    kernel = _sdpa_kernel(
        config, has_mask=_needs_mask(job, config), precision=job.spec.training.precision, device=device
    )
    return f"sdpa, {kernel} kernel ({choice.reason})"


def _check_flash_attention_3(job: ResolvedJob, config: PretrainedConfig, device_type: str) -> None:
    if _hides_window(job, config):
        raise InputError(
            f"model.attention: flash_attention_3 can't be had: {config.model_type} tells its window of"
            f" {config.sliding_window} tokens to the mask alone, and flash_attention_3 has none; set it to auto"
        )
    if getattr(config, "attention_dropout", 0.0) or getattr(config, "attn_pdrop", 0.0):
        reason = "has no dropout, which this model's attention is trained with"
    elif device_type != "cuda":
        reason = "runs on Hopper GPUs, and this machine has none"
    elif torch.cuda.get_device_capability()[0] != 9:
        reason = f"runs on Hopper GPUs, and this is {torch.cuda.get_device_name()}"
    elif not is_flash_attn_3_available():
        reason = "needs the package flash_attn_3, which this image does not hold"
    else:
        return
    raise InputError(f"model.attention: flash_attention_3 {reason}; set it to auto")


def _varlen_obstacle(job: ResolvedJob, config: PretrainedConfig, device_type: str) -> str | None:
    """Why documents can't be kept apart by offsets here; None when they can."""
    if not separates_documents(job.spec):
        return "no packed documents have to be kept apart"
    if job.parallelism.context > 1:
        return "parallelism.context has its own"
    if job.spec.training.precision not in HALF_TYPES:
        return f"torch's kernel for it computes in bf16 and fp16, not in {job.spec.training.precision}"
    obstacle = _machine_obstacle(device_type) or _model_obstacle(job, config)
    if obstacle is not None:
        return obstacle
    dtype, head_size = HALF_TYPES[job.spec.training.precision], _head_size(config)
    assert head_size is not None, "an obstacle of the model's"
    return varlen_flaw(_ATTENTION.kernel, head_size=head_size, dtype=dtype, device=torch.device(device_type))


def _machine_obstacle(device_type: str) -> str | None:
    if device_type != "cuda" or torch.cuda.get_device_capability()[0] < 8:
        return "torch's kernel for it needs an NVIDIA GPU of compute capability 8.0 or more"
    if not _has_varlen():
        return f"torch {torch.__version__} lacks torch.nn.attention.varlen with windows and grouped queries"
    return None


def has_sinks(config: PretrainedConfig) -> bool:
    """Whether attention gives a share to no token, which torch's kernels don't."""
    return config.model_type in _SINKS


def written_out_for(config: PretrainedConfig) -> str | None:
    """What of a model's attention no kernel computes over cut sequences, so that it is written out; None: nothing."""
    if has_sinks(config):
        return "has sinks"
    return "caps attention's scores" if _caps_scores(config) else None


def _caps_scores(config: PretrainedConfig) -> bool:
    """Whether attention's scores are capped (Gemma 2). transformers' sdpa leaves that out; 5.17 has it for Gemma 2 all
    the same, and says nothing."""
    return getattr(config, "attn_logit_softcapping", None) is not None


def _cuts_window(job: ResolvedJob, config: PretrainedConfig) -> bool:
    """Whether a sequence of the job is longer than the model's window: with it a token sees itself and those before."""
    window = getattr(config, "sliding_window", None)
    return window is not None and window < job.spec.data.sequence_length


def _hides_window(job: ResolvedJob, config: PretrainedConfig) -> bool:
    """Whether a kernel without a mask would leave out a window that matters here."""
    return config.model_type in _UNTOLD_WINDOWS and _cuts_window(job, config)


def _model_obstacle(job: ResolvedJob, config: PretrainedConfig) -> str | None:
    head_size = _head_size(config)
    if head_size is None or head_size > MAX_HEAD_SIZE or size_of(config, "kv_lora_rank"):
        return f"{config.model_type}'s heads are too large for torch's kernel, or of two sizes"
    if getattr(config, "attention_dropout", 0.0) or getattr(config, "attn_pdrop", 0.0):
        return "torch's kernel for it has no dropout"
    if _caps_scores(config):
        return f"{config.model_type} caps attention's scores, which torch's kernel for it doesn't"
    if _hides_window(job, config):
        return f"{config.model_type} tells its window to the mask alone"
    if has_sinks(config) or not _supports(config, "flash_attn"):
        return f"{config.model_type}'s attention is more than a causal mask"
    return None


def _head_size(config: PretrainedConfig) -> int | None:
    """None where layers have heads of different sizes (Gemma 4), or several models lie below (BLT)."""
    heads = size_of(config, "num_attention_heads")
    if heads is None or differs_by_layer(config, "head_dim"):
        return None
    return size_of(config, "head_dim") or int(config.hidden_size // heads)


def varlen_operations() -> tuple[Any, ...]:
    """The operation behind varlen, as torch's dispatcher knows it: too dear to be recomputed where others are."""
    return (torch.ops.torch_attn._varlen_attn.default,) if _has_varlen() else ()


def _has_varlen() -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)


def _supports(config: PretrainedConfig, attention: str) -> bool:
    """Whether the model's class says so; one that AutoModelForCausalLM does not know is not asked."""
    known = type(config) in AutoModelForCausalLM._model_mapping
    return not known or bool(getattr(AutoModelForCausalLM._model_mapping[type(config)], f"_supports_{attention}"))


def _needs_mask(job: ResolvedJob, config: PretrainedConfig) -> bool:
    window = getattr(config, "sliding_window", None)
    is_cut = window is not None and window <= job.spec.data.sequence_length
    return separates_documents(job.spec) or is_cut or config.model_type in _ALWAYS_MASKED


def _mask_reason(job: ResolvedJob, config: PretrainedConfig) -> str:
    if separates_documents(job.spec):
        return "a mask keeps packed documents apart"
    if config.model_type in _ALWAYS_MASKED:
        return f"{config.model_type}'s code always makes a mask"
    return "a mask cuts the window" if _needs_mask(job, config) else "causal, no mask"


def _sdpa_kernel(config: PretrainedConfig, *, has_mask: bool, precision: str, device: torch.device) -> str:
    """What torch's own choice is for tensors like the model's: flash, efficient, cudnn or math."""
    types, head_size = HALF_TYPES | {"fp64": torch.float64}, _head_size(config)
    if head_size is None:
        return "each layer's own"
    shape = (1, config.num_attention_heads, _PROBED_TOKENS, head_size)
    dtype = types.get(precision, torch.float32)
    query = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
    mask = torch.ones((1, 1, _PROBED_TOKENS, _PROBED_TOKENS), dtype=torch.bool, device=device) if has_mask else None
    with kernels_for(mask, device):
        choice = torch._fused_sdp_choice(query, query, query, attn_mask=mask, dropout_p=0.0, is_causal=mask is None)
    names = {SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.EFFICIENT_ATTENTION: "efficient"}
    names |= {SDPBackend.CUDNN_ATTENTION: "cudnn", SDPBackend.MATH: "math"}
    return {backend.value: name for backend, name in names.items()}.get(choice, "another")


_RIGHT_WITH_MASKS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def kernels_for(mask: torch.Tensor | None, device: torch.device) -> AbstractContextManager[None]:
    """Inside, torch's attention on `device` leaves cuDNN's kernels alone if there is a mask.

    torch 2.11 and newer (with cuDNN 9.15.1 or newer) take them first on Hopper and on Blackwell's data-centre parts:
    right and fast without a mask, but with one their backward pass gives NaN for queries where sequences are 64 tokens
    longer than a multiple of 128 and a row's scores are far below zero (pytorch#196678, which Qwen 2.5's do:
    trl#7181), and in windows with heads of 256 (Automodel#3232). tests/trainer/test_attention.py tells, on a GPU, when
    cuDNN is mended.
    """
    return nullcontext() if mask is None or device.type != "cuda" else sdpa_kernel(_RIGHT_WITH_MASKS)


_BIAS = "additive_bias"
"""Attribute of a mask: what it is to kernels."""


def shared_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What torch makes of a boolean mask, zero or minus infinity, in `dtype`: once for all layers that are given it.

    In every call of its own torch makes another, which the backward pass keeps: tokens x tokens numbers a layer.
    """
    if mask.dtype != torch.bool or torch.compiler.is_compiling():
        return mask
    made: torch.Tensor | None = getattr(mask, _BIAS, None)
    if made is None or made.dtype != dtype:
        made = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))
        setattr(mask, _BIAS, made)
    return made


def _type_on_gpu(query: torch.Tensor) -> torch.dtype:
    """That in which attention computes there."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype


_theirs = AttentionInterface()["sdpa"]  # transformers', before ours has its name


def _sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' own, by `kernels_for` what comes as a mask or becomes one."""
    bias = kwargs.get("position_bias")
    if attention_mask is not None and bias is None and query.device.type == "cuda":
        attention_mask = shared_bias(attention_mask, _type_on_gpu(query))
    with kernels_for(bias if attention_mask is None else attention_mask, query.device):
        output: tuple[torch.Tensor, None] = _theirs(module, query, key, value, attention_mask, **kwargs)
    return output


AttentionInterface.register("sdpa", _sdpa)


def _asks_torch_itself(kind: type[nn.Module]) -> bool:
    """Whether a class's code calls torch's attention, past transformers' interface: Falcon's does."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and F.scaled_dot_product_attention.__name__ in code.co_names


@functools.cache
def _with_right_kernels(kind: Any) -> Any:
    """A class like `kind`, also by its name, whose forward pass runs by `kernels_for`, also where it is recomputed."""

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask", hidden_states)  # one that isn't named may be there
        with kernels_for(mask, hidden_states.device):
            return kind.forward(self, hidden_states, *args, **kwargs)

    return class_like(kind, forward, _with_right_kernels)


def varlen_flaw(
    kernel: Callable[..., torch.Tensor], *, head_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """What is wrong with a kernel of DocumentAttention's here, tried on three small documents; None: nothing.

    Kernels depend on GPU, driver and torch's version, of which no test machine has all: where one raises or is wrong,
    documents are kept apart by a mask instead.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((_TRIED_TOKENS, heads, head_size) for heads in (4, 2, 2))
    inputs = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    begins = torch.tensor(_TRIED_BEGINS, dtype=torch.int32, device=device)
    window = 9  # that many tokens and the query itself
    places = torch.arange(_TRIED_TOKENS, device=device)
    owners = torch.searchsorted(begins, places, right=True)
    ages = places.unsqueeze(1) - places
    seen = (ages >= 0) & (ages <= window) & (owners.unsqueeze(1) == owners)
    try:
        output = kernel(*inputs, begins, _TRIED_TOKENS, None, (window, 0))
        found = [output, *torch.autograd.grad(output.float().square().sum(), inputs)]
    except Exception as error:  # of whatever kind: a kernel that can't run is not taken
        return f"torch's kernel for it does not run here ({' '.join(str(error).split())[:120]})"
    wide = [part.detach().float().requires_grad_() for part in inputs]
    query, key, value = (part.transpose(0, 1) for part in wide)
    key, value = (part.repeat_interleave(2, dim=0) for part in (key, value))
    plain = F.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(0, 1)
    expected = [plain, *torch.autograd.grad(plain.square().sum(), wide)]
    pairs = [(ours.detach().float(), other.detach()) for ours, other in zip(found, expected, strict=True)]
    errors = [(ours - other).norm() / other.norm() for ours, other in pairs]
    worst = float(torch.stack(errors).max())
    return None if worst < _TRIED_TOLERANCE else f"torch's kernel for it is off by {worst:.2g} here"


_OFFSETS = "document_offsets"
"""Attribute of position ids on a device: their documents' offsets, counted before they went there."""


def offsets_of(positions: torch.Tensor) -> torch.Tensor:
    """(documents + 1,) int32: where documents begin in (batch, tokens) positions, all sequences as one, and the end.

    On a GPU this waits until it is idle: how many there are decides the size of the result.
    """
    begins = (positions.flatten() == 0).nonzero().flatten()
    return F.pad(begins, (0, 1), value=positions.numel()).to(torch.int32)


def positions_on(device: torch.device, positions: torch.Tensor) -> torch.Tensor:
    """A micro-batch's position ids, which are on the CPU, on `device`, with their offsets for varlen attention."""
    moved = positions.to(device)
    setattr(moved, _OFFSETS, offsets_of(positions).to(device, non_blocking=True))
    return moved


class DocumentAttention:
    """Attention inside documents alone, which are told by their offsets: no mask, and no time on what it would hide.

    Offsets go through the model as its attention mask: an argument of every block, so that a block which is computed
    again in the backward pass sees those of its own micro-batch.
    """

    def __init__(self) -> None:
        self._offsets: torch.Tensor | None = None

    def before_forward(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Notes where documents begin in the micro-batch, all its sequences one after the other.

        The all-ones attention mask keeps transformers from looking for documents itself, once more. Where positions
        did not come by `positions_on`, as in a pipeline, which cuts them, `nonzero` waits for the device once a
        micro-batch (what that costs is unmeasured).
        """
        positions = kwargs.get("position_ids")
        if positions is None:  # one document a sequence
            tokens = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            positions = torch.arange(tokens.size(1), device=tokens.device).expand(tokens.shape[:2])
        told = getattr(positions, _OFFSETS, None)
        self._offsets = offsets_of(positions) if told is None else told
        return args, {**kwargs, "attention_mask": torch.ones_like(positions)}

    def mask(self, **_: Any) -> torch.Tensor:
        """(documents + 1,) int32: where each document begins, and the end of the last."""
        assert self._offsets is not None
        return self._offsets

    def forward(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention call: (batch, tokens, heads, head size), and no weights.

        query: (batch, heads, tokens, head size), key and value likewise with their number of heads.
        """
        assert not dropout and all(kwargs.get(name) is None for name in ("softcap", "s_aux", "position_bias"))
        batch, heads, tokens, size = query.shape
        query, key, value = (part.transpose(1, 2).reshape(batch * tokens, -1, size) for part in (query, key, value))
        # transformers counts a window with the query itself, the kernel without.
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        output = self.kernel(query, key, value, attention_mask, tokens, scaling, window)
        return output.view(batch, tokens, heads, size), None

    def kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        offsets: torch.Tensor,
        longest: int,
        scale: float | None,
        window: tuple[int, int],
    ) -> torch.Tensor:
        """(all tokens, heads, head size), causal inside each document: torch's flash kernel for variable lengths."""
        from torch.nn.attention.varlen import varlen_attn

        output = varlen_attn(
            query, key, value, offsets, offsets, longest, longest, scale=scale, window_size=window, enable_gqa=True
        )
        assert isinstance(output, torch.Tensor)
        return output


class MaskPositions:
    """Tells position ids to masks that a model's own code makes without them (`_UNTOLD_POSITIONS`).

    The functions that make masks are replaced in that model's module, where its code looks them up: what they are given
    beside has the type of the hidden states there, under FSDP's types and under autocast.
    """

    def __init__(self) -> None:
        self._positions: torch.Tensor | None = None

    def attach(self, base: nn.Module) -> None:
        """To the model below the head."""
        module = sys.modules[type(base).__module__]
        for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
            made = getattr(module, name)
            if getattr(made, "tells", None) is not self:
                setattr(module, name, self._telling(made))
        base.register_forward_pre_hook(self._before, with_kwargs=True)
        base.register_forward_hook(self._after, always_call=True)

    def _telling(self, made: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(made)
        def telling(*args: Any, **kwargs: Any) -> Any:
            return made(*args, **{"position_ids": self._positions, **kwargs})

        telling.tells = self  # type: ignore[attr-defined]
        return telling

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._positions = kwargs.get("position_ids")

    def _after(self, *_: Any) -> None:
        self._positions = None


_MASK_POSITIONS = MaskPositions()


def attach(model: PreTrainedModel) -> None:
    """Puts a DocumentAttention in front of a model that was built with VARLEN (see `register`), and position ids where
    others' masks lack them; `kernels_for` around code that doesn't come by our `sdpa`."""
    if model.config._attn_implementation == VARLEN:
        model.base_model.register_forward_pre_hook(_ATTENTION.before_forward, with_kwargs=True)
    elif model.config.model_type in _UNTOLD_POSITIONS:
        _MASK_POSITIONS.attach(model.base_model)
    for module in model.modules():
        kind: Any = type(module)
        if _asks_torch_itself(kind):
            module.__class__ = _with_right_kernels(kind)  # as FSDP does it


def register(attention: DocumentAttention) -> None:
    """Makes transformers' name VARLEN mean `attention`."""
    AttentionInterface.register(VARLEN, attention.forward)
    AttentionMaskInterface.register(VARLEN, attention.mask)


_ATTENTION = DocumentAttention()
register(_ATTENTION)
