"""One configuration in, one prediction out: the contract of `trainyard predict --jsonl`.

A field that is missing or null is unknown, and taken as a user of that kind of run would have it.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from trainyard.errors import InputError
from trainyard.hardware import Gpu, gpu, instance, instance_types
from trainyard.planner.communication import EFA, INFINIBAND, Fabric, fabric, fabric_of
from trainyard.planner.constants import GIB, has_hopper_workspaces
from trainyard.planner.families import (
    checked,
    has_size,
    known_name,
    normal_name,
    says_experts,
    shape_of_known,
    size_of_unknown,
)
from trainyard.planner.kinds import other_kinds
from trainyard.planner.layout import (
    Adapter,
    Engine,
    Layout,
    Library,
    Masters,
    Method,
    Optimizer,
    Precision,
    Rank,
    Recompute,
)
from trainyard.planner.memory import memory
from trainyard.planner.operators import lacks_flash
from trainyard.planner.shapes import ModelShape
from trainyard.planner.time_constants import DEFAULT_CONSTANTS, PRE_AMPERE, TORCH_TAKES_CUDNN, Constants
from trainyard.planner.timing import step_time, time_spread
from trainyard.planner.wording import in_plain_words

KNOWN_FIELDS = frozenset(
    (
        *("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "seq", "gated_mlp", "tied_embeddings"),
        *("experts", "experts_per_token", "moe_ffn", "model", "params_b"),
        *("gpu", "gpu_mem_gb", "gpus", "gpus_per_node", "interconnect"),
        *("tp", "pp", "vp", "cp", "ep", "dp", "data_replicate", "sharding", "sequence_parallel", "offload"),
        "offload_parameters",
        *("micro_batch", "global_batch", "precision", "recompute", "optimizer", "method", "lora_rank"),
        *("framework", "framework_version"),
        *("encoder_layers", "encoder_seq", "cross_attention", "hybrid_pattern", "mla", "mtp_layers", "shared_ffn"),
        *("dense_layers", "lora_targets", "trains_vocabulary", "quantization", "adapter"),
        *("loss_chunk_tokens", "parallel_loss", "master_weights", "autocast", "offload_checkpoints"),
        *("deferred_head", "grouped_experts", "gathers_tokens", "last_stage_layers", "learned_positions"),
        "head_products",
        *("expert_overlap", "expert_exchange", "capacity_factor"),
        *("rank", "dropout", "deterministic", "attention", "loss_fusion", "transformer_engine", "expert_tp"),
    )
)

ATTENTIONS = ("flash", "flash_attention_2", "flash_attention_3", "unfused", "eager")
"""What `attention` may say: fused, with Ampere's kernels or Hopper's own, its matrix kept, and kept in fp32 as well."""

MASTERS = ("none", "weights", "copy")
"""Where a request's weights are in fp32: nowhere, as they are, or as a copy beside narrow ones."""

PLACES = ("none", "cpu", "nvme")
"""Of what is offloaded."""

SHARDING = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}

NODE_GB_PER_SECOND = {
    "V100": 12.5,
    "A100": 200.0,
    "H100": 400.0,
    "H200": 400.0,
    "H800": 400.0,
    "B300": 800.0,
    "GB300": 800.0,
}
"""Network of a usual training node (8 cards of 200 Gb/s with the A100, of 400 with Hopper), where none is stated."""

RACKS = {"GB200": 72, "GB300": 72}
"""Parts that are built into racks, whose GPUs NVLink joins as those of one node."""

DEFAULT_NODE_GB_PER_SECOND = 400.0
CARD_GB_PER_SECOND = 50.0
"""The fastest card that A100 and H100 nodes have one of per GPU: a stated rate up to this is a GPU's."""
SLOW_NODE_GB_PER_SECOND = 12.5
"""Nodes of GPUs without NVLink: one card of 100 Gb/s."""


@dataclass(frozen=True)
class Question:
    """A configuration with nothing unknown left."""

    shape: ModelShape
    layout: Layout
    device: Gpu
    links: Fabric
    causal_flops: bool
    """The framework's own MFU counts half of the attention scores."""


MOST = {
    "layers": 10_000,
    "head_products": 10_000,
    "encoder_layers": 10_000,
    "mtp_layers": 10_000,
    "experts_per_token": 100_000,
    "heads": 100_000,
    "gpus_per_node": 100_000,
    "vp": 10_000,
}
"""Upper limits of single fields; far above what anyone has, low enough for every figure to stay finite."""

MOST_WHOLE = 10**9
MOST_NUMBER = 10**6
"""Of the others: whole numbers, and params_b and gpu_mem_gb."""


def _shown(value: object) -> str:
    """A value for a message, cut where it is endless."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "too large to print"
    return text if len(text) <= 80 else f"{text[:80]}..."


class _Fields:
    """Typed access to one JSON object; InputError names the field, the value and what is allowed."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def given(self, name: str) -> bool:
        return self._content.get(name) is not None

    def whole(self, name: str, default: int, *, least: int = 1) -> int:
        """A count, `default` where none is given. InputError below `least`, above what any job has, or broken."""
        value = self._content.get(name)
        if value is None:
            return default
        most = MOST.get(name, MOST_WHOLE)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and value > most:
            raise InputError(f"{name}: must be a whole number of at most {most} (given: {_shown(value)})")
        # Not a number (NaN) is on neither side.
        if not number or not least <= value <= most or value != int(value):
            raise InputError(f"{name}: must be a whole number of at least {least} (given: {_shown(value)})")
        return int(value)

    def number(self, name: str) -> float | None:
        value = self._content.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MOST_NUMBER:
            raise InputError(f"{name}: must be a number above 0, of at most {MOST_NUMBER} (given: {_shown(value)})")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._content.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{name}: must be true or false (given: {_shown(value)})")
        return value

    def text(self, name: str) -> str:
        """Words, "" where none are given. InputError for what is none."""
        value = self._content.get(name)
        if value is None:
            return ""
        if name == "framework_version" and isinstance(value, int | float) and not isinstance(value, bool):
            # 24.07 without its quotes; 25.1 was 25.10.
            return f"{value:.2f}" if isinstance(value, float) else _shown(value)
        if not isinstance(value, str):
            raise InputError(f"{name}: must be a text (given: {_shown(value)})")
        return value

    def choice(self, name: str, default: str, allowed: Iterable[str]) -> str:
        value = self.text(name).lower() or default
        options = list(allowed)
        if value not in options:
            raise InputError(f"{name}: must be one of {', '.join(options)} (given: {self._content[name]!r})")
        return value


def predict(content: Mapping[str, Any], constants: Constants = DEFAULT_CONSTANTS) -> dict[str, Any]:
    """The prediction for one configuration; InputError in one line for a field that can't be."""
    content = in_plain_words(content)
    question = understand(content)
    shape, layout = question.shape, question.layout
    use = memory(shape, layout)
    time = step_time(shape, layout, question.device, question.links, constants)
    tokens = layout.global_batch * layout.sequence_length
    rate = tokens / time.total / layout.world_size
    flops = shape.flops_per_token(layout.sequence_length, causal=question.causal_flops) * rate
    if layout.method != "full":
        # As the pages count to which this is compared (NeMo's): two thirds of all, attention too, which has no weights
        # and is whole in a job's own figures (ModelShape.flops_per_token). 3% less for an 8B at 4096.
        flops *= 2 / 3
    spread = time_spread(shape, layout, question.device)
    ignored = sorted((set(content) - KNOWN_FIELDS) | _without_effect(content, question))
    said = (
        _of_model(content),
        _of_heads(question),
        _of_precision(content, question),
        _of_attention(content, question),
        _of_recomputation(content, question, use.needed),
        _of_nodes(content, question),
    )
    notes = [note for note in said if note]
    return {
        "peak_memory_gib": use.allocated / GIB,
        "model_state_gib": use.state / GIB,
        "resting_memory_gib": use.resting / GIB,
        "reserved_memory_gib": _visible_gib(use.reserved, use.needed, question),
        "device_memory_gib": _visible_gib(use.device, use.needed, question),
        "needed_memory_gib": use.needed / GIB,
        "activation_gib": use.activations / GIB,
        "step_seconds": time.total,
        "step_seconds_low": time.total / spread,
        "step_seconds_high": time.total * spread,
        "tokens_per_second_per_gpu": rate,
        "tokens_per_second_per_gpu_low": rate / spread,
        "tokens_per_second_per_gpu_high": rate * spread,
        "model_tflops_per_gpu": flops / 1e12,
        "mfu": flops / (question.device.peak_tflops(layout.precision) * 1e12),
        "communication_fraction": time.communication / time.total,
        "bubble_fraction": time.bubble / time.total,
        "fits": use.needed <= question.device.memory_gib * GIB,
        # A misspelt field, or one that the method has no use for, must not pass unseen, and a caller's own label must
        # not cost the prediction.
        **({"ignored_fields": ignored} if ignored else {}),
        **({"notes": notes} if notes else {}),
    }


def _visible_gib(bytes_: float, needed: float, question: Question) -> float:
    """GiB that the allocator or the driver shows: where a run fits, never more than there is."""
    there = question.device.memory_gib * GIB
    return (min(bytes_, there) if needed <= there else bytes_) / GIB


def _of_model(content: Mapping[str, Any]) -> str:
    """What to say where nothing but the size in an unknown model's name was taken for it; "" elsewhere."""
    size = _size_of_unknown(_Fields(content))
    if size is None:
        return ""
    return (
        f"model: {_shown(content['model'])} is not known here, and taken as a Llama of {size:g} billion parameters by "
        "its name; state layers, hidden, ffn, heads, kv_heads and vocab"
    )


def _of_heads(question: Question) -> str:
    """What to say of heads that tensor cores can't read in whole words; "" of all others."""
    width = question.shape.head_dim
    if not question.shape.attention_params or width * question.layout.element_bytes % 16 == 0:
        return ""
    return (
        f"head_dim {width}: its rows don't begin at multiples of 16 bytes, which this time doesn't count; steps of "
        "such models have taken 1.4 to 1.55 times as long (a multiple of 8 avoids it)"
    )


def _of_precision(content: Mapping[str, Any], question: Question) -> str:
    """What to say of a stated precision that the GPU has no units for; "" elsewhere."""
    device, precision = question.device, question.layout.precision
    if not content.get("precision"):
        return ""
    if precision == "bf16" and device.generation in PRE_AMPERE:
        return (
            f"precision bf16: {device.name}'s tensor cores have fp16 alone, and torch emulates bf16 without them; this "
            "time is fp16's, several times shorter (fp16 is what to use there)"
        )
    if precision in ("fp8", "fp4") and device.peak_tflops(precision) == device.bf16_tflops:
        return f"precision {precision}: {device.name} has no units for it; this time is that of 16 bits"
    if precision == "fp4" and device.fp4_tflops is None:
        return f"precision fp4: {device.name} has no units for it; this time is that of fp8"
    return ""


def _of_attention(content: Mapping[str, Any], question: Question) -> str:
    """What to say of stated flash kernels that there are none of; "" elsewhere."""
    stated = str(content.get("attention") or "").lower()
    if not stated.startswith("flash") or not lacks_flash(question.layout, question.device):
        return ""
    return f"attention {stated}: computes in 16 bits, on GPUs since Ampere; torch's memory-efficient kernel is counted"


def _of_recomputation(content: Mapping[str, Any], question: Question, needed: float) -> str:
    """What to say where recomputation is not stated, none is assumed, and that does not fit; "" elsewhere."""
    shape, layout, room = question.shape, question.layout, question.device.memory_gib * GIB
    if content.get("recompute") or layout.recompute != "none" or needed <= room:
        return ""
    levels: tuple[Recompute, ...] = ("selective", "full")
    others = {level: memory(shape, dataclasses.replace(layout, recompute=level)).needed for level in levels}
    found = ", ".join(
        f"with {level} recomputation {use / GIB:.1f} GiB ({'fits' if use <= room else 'does not fit'})"
        for level, use in others.items()
    )
    return (
        f"recompute: not stated, and none is assumed, which needs {needed / GIB:.1f} GiB of {room / GIB:.1f}; {found}"
    )


def _of_nodes(content: Mapping[str, Any], question: Question) -> str:
    """What to say where a stated `gpus_per_node` gives way to the machine or rack that `interconnect` names."""
    taken = question.links.gpus_per_node
    stated = _Fields(content).whole("gpus_per_node", taken)
    if stated == taken:
        return ""
    return f"gpus_per_node: {stated} gives way to interconnect {_shown(content['interconnect'])}, which is of {taken}"


def _without_effect(content: Mapping[str, Any], question: Question) -> set[str]:
    """Fields that are stated, and that no formula of the layout's method and engine reads."""
    shape, layout = question.shape, question.layout
    unread: set[str] = set()
    if not _reads_links(content.get("interconnect") or "", question.device):
        unread.add("interconnect")
    if layout.method == "full":
        # Not lora_rank, which tables state in every row.
        unread |= {"adapter", "lora_targets", "trains_vocabulary"}
    elif layout.engine != "plain" and layout.adapter != "lora":
        unread.add("adapter")
    if layout.method != "qlora":
        unread.add("quantization")
    if not shape.moe_layers:
        unread.add("capacity_factor")
    return {name for name in unread if content.get(name) is not None}


@dataclass
class Errors:
    """Whether any line was refused: the command then ends with 2."""

    any: bool = False


BYTE_ORDER_MARK = "\ufeff"
"""What some editors put before a file's first line."""


def predict_jsonl(lines: Iterable[str] | Iterable[bytes], errors: Errors | None = None) -> Iterator[str]:
    """One JSON line out per line in (blank ones are skipped); a bad one gives {"error": ...} and sets `errors.any`."""
    for line in lines:
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8") if isinstance(line, bytes) else line
            content = json.loads(text.removeprefix(BYTE_ORDER_MARK))
            if not isinstance(content, dict):
                raise InputError(f"must be a JSON object, is {type(content).__name__}")
            answer = predict(content)
        except InputError as error:
            answer = {"error": str(error)}
        except json.JSONDecodeError as error:
            answer = {"error": f"not JSON: {error}"}
        except (ValueError, ArithmeticError, RecursionError) as error:
            # Endless numbers and nesting: one line's fault must not end the others'.
            answer = {"error": f"can't be read or computed: {error}"}
        if errors is not None and "error" in answer:
            errors.any = True
        yield json.dumps(answer)


def understand(content: Mapping[str, Any]) -> Question:
    """The configuration with every unknown filled in."""
    fields = _Fields(in_plain_words(content))
    shape = _shape(fields)
    device = _device(fields)
    degrees = {name: fields.whole(name, 1) for name in ("tp", "pp", "cp", "ep")}
    _check_divides(shape, degrees)
    split = degrees["tp"] * degrees["pp"] * degrees["cp"]
    gpus = fields.whole("gpus", split * fields.whole("dp", 1))
    data_parallel, rest = divmod(gpus, split)
    if rest or not data_parallel:
        raise InputError(f"gpus {gpus}: is not a multiple of tp x pp x cp = {split}")
    if fields.whole("dp", data_parallel) != data_parallel:
        raise InputError(f"dp {fields.whole('dp', 1)}: gpus {gpus} / (tp x pp x cp = {split}) is {data_parallel}")
    expert_split = degrees["ep"] * fields.whole("expert_tp", 1)
    if (gpus // degrees["pp"]) % expert_split:
        raise InputError(
            f"ep {degrees['ep']}: ep x expert_tp = {expert_split} must divide tp x cp x dp = {gpus // degrees['pp']}"
        )
    engine = _engine(fields, shape, gpus, split)
    layout = _layout(fields, shape, degrees, data_parallel, engine, device)
    links = _links(fields, device, gpus)
    if not fields.given("optimizer") and layout.optimizer == "adamw_paged":
        plain = dataclasses.replace(layout, optimizer="adamw")
        # Who has the room doesn't page.
        layout = plain if memory(shape, plain).needed <= device.memory_gib * GIB else layout
    if not fields.given("micro_batch"):
        layout = _usual_micro_batch(shape, layout, device, links, batch_known=fields.given("global_batch"))
    return Question(shape, layout, device, links, _counts_causal(fields))


def _counts_causal(fields: _Fields) -> bool:
    """Frameworks whose own TFLOP/s count half of the attention scores, as causal kernels compute them."""
    text = fields.text("framework").lower()
    return "bridge" in text or "automodel" in text


def _usual_micro_batch(shape: ModelShape, layout: Layout, device: Gpu, links: Fabric, *, batch_known: bool) -> Layout:
    """The fastest micro-batch that fits, as whoever runs a job would have tried; the smallest where none fits.

    Of a known global batch, those that divide it; else the number of micro-batches stays, and the batch grows.
    """
    sequences = layout.micro_batch * layout.num_micro_batches
    choices = [
        dataclasses.replace(
            layout, micro_batch=size, num_micro_batches=sequences // size if batch_known else layout.num_micro_batches
        )
        for size in (1, 2, 4, 8, 16)
        if (not batch_known or sequences % size == 0) and (size == 1 or size * layout.sequence_length <= 65536)
    ]
    fitting = [item for item in choices if memory(shape, item).needed <= device.memory_gib * GIB]
    if not fitting:
        return choices[0]
    return min(fitting, key=lambda item: step_time(shape, item, device, links).total / item.global_batch)


def _check_divides(shape: ModelShape, degrees: Mapping[str, int]) -> None:
    if shape.heads % degrees["tp"]:
        allowed = ", ".join(str(size) for size in range(1, shape.heads + 1) if shape.heads % size == 0)
        raise InputError(f"tp {degrees['tp']}: does not divide the {shape.heads} heads (allowed: {allowed})")
    if degrees["pp"] > shape.layers:
        raise InputError(f"pp {degrees['pp']}: the model has only {shape.layers} layers")
    if degrees["ep"] > 1 and (not shape.experts or shape.experts % degrees["ep"]):
        raise InputError(f"ep {degrees['ep']}: must divide the number of experts, {shape.experts}")


def _size_of_unknown(fields: _Fields) -> float | None:
    """Billions of parameters that an unknown dense model's name states, where nothing else says its size."""
    name = fields.text("model")
    stated = any(fields.given(field) for field in ("params_b", "layers", "hidden", "hybrid_pattern"))
    return None if stated or not name else size_of_unknown(name)


def _with_rows_and_mixture(fields: _Fields, shape: ModelShape, base: ModelShape | None) -> ModelShape:
    """Stated positions and products of the head, and the mixture of a known hybrid's layers."""
    for name in ("learned_positions", "head_products"):
        if fields.given(name):
            stated: dict[str, Any] = {name: fields.whole(name, 0, least=0)}
            shape = dataclasses.replace(shape, **stated)
    if base is not None and base.is_hybrid and not fields.given("hybrid_pattern"):
        # A cut or longer one keeps the mixture of its layers.
        share = shape.layers / base.layers
        mixture = {name: round(getattr(base, name) * share) for name in ("mamba_layers", "attention_layers")}
        shape = dataclasses.replace(shape, **mixture)
    return shape


def _is_label(fields: _Fields) -> bool:
    """Whether an unknown model's name is no more than a name: the widths that count are stated beside its depth."""
    name = fields.text("model")
    widths = fields.given("experts") or (fields.given("ffn") and not says_experts(name))
    return widths and known_name(name) is None


def _check_kind(fields: _Fields) -> None:
    """InputError for an unknown model's name that says another kind of model than a decoder of the stated sizes."""
    name = fields.text("model")
    if not name or known_name(name) is not None:
        return
    for kind, word in other_kinds(normal_name(name)):
        if any(fields.given(field) for field in kind.fields):
            continue
        stated = f"state {' or '.join(kind.fields)} beside its sizes, or " if kind.fields else ""
        raise InputError(
            f"unknown model {name!r}: is {kind.what} by its name ({word}), for which no plain decoder stands; {stated}"
            "leave model out and state layers, hidden, ffn, heads, kv_heads and vocab of a decoder"
        )


def _shape(fields: _Fields) -> ModelShape:
    _check_kind(fields)
    params = fields.number("params_b") or _size_of_unknown(fields)
    has_depth = fields.given("layers") or fields.given("hybrid_pattern")
    has_sizes = has_depth and fields.given("hidden")
    # Of a model cut to fewer layers, the stated size is not the known one's.
    named = fields.given("model") and not (has_sizes and _is_label(fields))
    base = _known_shape(fields, None if has_depth and not has_sizes else params) if named else None
    if base is None and not has_sizes:
        if params is None:
            raise InputError("layers and hidden (or model, or params_b) are needed to know the model's size")
        if says_experts(fields.text("model")):
            raise InputError(
                f"model {fields.text('model')!r}: has experts, and its sizes aren't known; state layers, hidden, "
                "experts, experts_per_token and moe_ffn"
            )
        base = _shape_of_size(params * 1e9)
    hidden = fields.whole("hidden", base.hidden if base else 0)
    heads = fields.whole("heads", base.heads if base else max(1, hidden // 128))
    stated_ffn = fields.whole("ffn", base.ffn if base else 0)
    # Two projections of 4 x hidden, or three of less: the width tells which, where nobody says.
    gated = fields.flag("gated_mlp", base.gated_mlp if base else stated_ffn != 4 * hidden)
    ffn = stated_ffn or (math.ceil(8 * hidden / 3 / 256) * 256 if gated else 4 * hidden)
    heads_or_base = base.kv_heads if base else heads
    stated = ModelShape(
        layers=fields.whole("layers", base.layers if base else 0, least=0 if fields.given("hybrid_pattern") else 1),
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=fields.whole("kv_heads", heads_or_base),
        head_dim=fields.whole("head_dim", base.head_dim if base else max(1, hidden // heads)),
        # GPT-2's words as its trainers pad them: 50,257 would slow the output projection.
        vocab=fields.whole("vocab", base.vocab if base else (32000 if gated else 50304)),
        tied_embeddings=fields.flag("tied_embeddings", base.tied_embeddings if base else not gated),
        **_block(gated=gated),
    )
    sizes = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated_mlp", "tied_embeddings")
    shape = dataclasses.replace(base, **{name: getattr(stated, name) for name in sizes}) if base else stated
    shape = _with_experts(fields, _with_rows_and_mixture(fields, shape, base))
    shape = _with_encoder(fields, shape)
    if fields.flag("mla", False) and not shape.kv_lora_rank:
        # DeepSeek's sizes, which those who follow it keep.
        shape = dataclasses.replace(shape, q_lora_rank=1536, kv_lora_rank=512, rope_dim=64)
    if fields.given("hybrid_pattern"):
        shape = _with_pattern(fields, shape)
    shape = checked(dataclasses.replace(shape, mtp_layers=fields.whole("mtp_layers", shape.mtp_layers, least=0)))
    return shape if base or params is None else _read_by_size(fields, shape, params * 1e9)


def _block(*, gated: bool) -> dict[str, Any]:
    """What comes with the kind of feed-forward block: Llama's norms and no biases, or GPT's norms and biases."""
    return {
        "gated_mlp": gated,
        "norm": "rms" if gated else "layer",
        "qkv_bias": not gated,
        "output_bias": not gated,
        "mlp_bias": not gated,
    }


STATED_PRECISION = 0.005
"""A size of three digits says this much: a reading that lies nearer meets it."""
FAR_FROM_STATED = 0.03
"""Names round to less ("7B" of 6.74): a usual reading that lies nearer than this stays."""


def _read_by_size(fields: _Fields, shape: ModelShape, params: float) -> ModelShape:
    """The reading of a plain decoder's sizes that the stated number of parameters chooses; else the usual one, `shape`.

    Whoever states a size along with layers and widths says by it whether the block is gated and the embeddings are
    tied, where no field does. Of two readings that meet it (layers x ffn = vocab makes one projection of all layers as
    large as the output's) the gated one counts, as nearly all decoders of today are. What the count rests on must be
    stated too: key/value heads or a vocabulary that are guessed would explain a gap as well.
    """
    known = all(fields.given(name) for name in ("ffn", "heads", "kv_heads", "vocab"))
    plain = not (shape.experts or shape.is_hybrid or shape.kv_lora_rank or shape.encoder_layers or shape.mtp_layers)
    if not (known and plain) or abs(shape.params / params - 1) <= FAR_FROM_STATED:
        return shape
    gates = [shape.gated_mlp] if fields.given("gated_mlp") else [True, False]
    ties = [shape.tied_embeddings] if fields.given("tied_embeddings") else [True, False]
    readings = [
        dataclasses.replace(shape, tied_embeddings=tied, **_block(gated=gated)) for gated in gates for tied in ties
    ]
    return next((item for item in readings if abs(item.params / params - 1) <= STATED_PRECISION), shape)


def _known_shape(fields: _Fields, params_b: float | None) -> ModelShape | None:
    """The named model; where its size stands apart ("Llama 2", 7), both; None: an unknown name of known size."""
    name = fields.text("model")
    known = known_name(name)
    if params_b is None:
        return shape_of_known(name)
    if known is None:
        family = re.sub(r"[\s_]+", "-", name.strip())
        joined = known_name(f"{family}-{params_b:g}b")
        return shape_of_known(joined) if joined is not None and has_size(joined, params_b) else None
    if has_size(known, params_b):
        return shape_of_known(known)
    if fields.given("layers") or fields.given("hybrid_pattern"):
        # Everything that counts is stated: the name is a family's.
        return None
    raise InputError(
        f"params_b {params_b:g}: {known} has {shape_of_known(known).params / 1e9:.3g}; leave out one of model and "
        "params_b, or state layers and hidden"
    )


def _with_experts(fields: _Fields, shape: ModelShape) -> ModelShape:
    experts = fields.whole("experts", shape.experts, least=0)
    if experts <= 1:
        return dataclasses.replace(shape, experts=0, experts_per_token=0, moe_ffn=0)
    return dataclasses.replace(
        shape,
        experts=experts,
        experts_per_token=fields.whole("experts_per_token", shape.experts_per_token or 2),
        moe_ffn=fields.whole("moe_ffn", shape.moe_ffn or shape.ffn),
        shared_ffn=fields.whole("shared_ffn", shape.shared_ffn, least=0),
        dense_layers=fields.whole("dense_layers", min(shape.dense_layers, shape.layers), least=0),
    )


def _with_encoder(fields: _Fields, shape: ModelShape) -> ModelShape:
    if not fields.given("encoder_layers"):
        return shape
    return dataclasses.replace(
        shape,
        encoder_layers=fields.whole("encoder_layers", 0, least=0),
        encoder_tokens=fields.whole("encoder_seq", 512),
        cross_attention=fields.flag("cross_attention", False),
        norms_per_layer=shape.norms_per_layer + fields.flag("cross_attention", False),
    )


def _with_pattern(fields: _Fields, shape: ModelShape) -> ModelShape:
    """A hybrid by Megatron's letters: M Mamba-2, * attention, - feed-forward, E experts; | cuts the pipeline."""
    letters = fields.text("hybrid_pattern").replace("|", "")
    if not letters or set(letters) - set("M*-E") or "M" not in letters:
        raise InputError(
            "hybrid_pattern: must be made of M (Mamba), * (attention), - (feed-forward) and E (experts), with an M "
            f"(given: {fields.text('hybrid_pattern')!r})"
        )
    if "E" in letters and not shape.experts:
        raise InputError("hybrid_pattern: has E, layers of experts: experts (at least 2) is needed")
    head_dim = 64
    return dataclasses.replace(
        shape,
        layers=len(letters),
        mamba_layers=letters.count("M"),
        attention_layers=letters.count("*"),
        dense_layers=letters.count("-"),
        mamba_heads=2 * shape.hidden // head_dim,
        mamba_head_dim=head_dim,
        mamba_state=128,
        mamba_groups=8,
    )


def _shape_of_size(params: float) -> ModelShape:
    """A Llama-like model of about that many parameters: hidden = 128 x layers, so 12 x 128^2 x layers^3 of them.

    Of larger ones a multiple of eight heads, which tensor parallelism can split.
    """
    heads = max(1, round((params / (12 * 128**2)) ** (1 / 3)))
    if heads > 8:
        heads = 8 * round(heads / 8)
    hidden = 128 * heads
    layers = max(1, round(params / (12 * hidden**2)))
    ffn = math.ceil(8 * hidden / 3 / 256) * 256
    return ModelShape(layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=heads, head_dim=128, vocab=32000)


def _device(fields: _Fields) -> Gpu:
    name = fields.text("gpu")
    if not name:
        raise InputError("gpu: is needed, e.g. H100")
    stated = fields.number("gpu_mem_gb")
    if re.search(r"\.\d*(?:xlarge|metal)", name):
        # A machine that is known stands there as its GPU by now (`wording`): this one is not, or has none.
        machine = instance(name.strip().lower())
        raise InputError(f"gpu {_shown(name)}: has {machine.accelerator}, and no GPU that is known here")
    # A bare number is the marketed size: keep the table's figure where it is the same part.
    device = gpu(name)
    if stated is not None and abs(stated - device.memory_gib) > 0.15 * stated:
        return gpu(name, memory_gb=stated)
    return device


def _engine(fields: _Fields, shape: ModelShape, gpus: int, split: int) -> Engine:
    text = fields.text("framework").lower()
    known: tuple[tuple[str, Engine], ...] = (
        ("automodel", "torch"),
        ("deepspeed", "deepspeed"),
        ("megatron", "megatron"),
        ("nemo", "megatron"),
        ("nanotron", "megatron"),
        ("megascale", "megatron"),
        ("litgpt", "plain"),
        ("torchtune", "plain"),
        ("unsloth", "plain"),
        ("peft", "plain"),
        ("transformers", "plain"),
        ("hugging", "plain"),
    )
    if "megatron-deepspeed" in text:
        return "megatron"
    for word, engine in known:
        if word in text:
            return engine
    if text:
        return "torch"
    if split > 1:
        return "megatron"
    sharding = fields.choice("sharding", "none", SHARDING)
    if sharding in ("zero1", "zero2"):
        return "deepspeed"
    return "plain" if gpus == 1 or fields.text("method") in ("lora", "qlora") else "torch"


def _flash(fields: _Fields) -> bool:
    """Attention kept its matrix in frameworks before FlashAttention (2022)."""
    text = f"{fields.text('framework')} {fields.text('framework_version')}".lower()
    year = re.search(r"\b20(19|20|21|22)\b", text)
    return not (year or "megatron-deepspeed" in text)


RECIPES = ("nemo", "bridge")
"""Words of frameworks whose recipes all have Megatron's distributed optimizer."""

OWN_KERNELS = ("compile", "liger", "unsloth", "xtuner")
"""Words of a framework that says transformers, whose norms, rotations or losses are kernels of their own."""


def _says(text: str, word: str) -> bool:
    """Whether a framework's words have one and don't deny it: "Liger kernels", not "no Liger kernels", "uncompiled"."""
    return word in text and not _denies(text, word)


def _denies(text: str, word: str) -> bool:
    before = r"\b(no|not|non|without|un)[\s-]*((torch|fused)[.\s-]*)?"
    after = r"\w*(\s+kernels?)?\s+(off|disabled)\b"
    return re.search(rf"{before}{word}|{word}{after}", text) is not None


def _runs_unfused(text: str, engine: Engine, library: str) -> bool:
    """A kernel for each operation: transformers' layers, and a loop of one's own that says it isn't compiled."""
    own_loop = engine in ("torch", "plain") and not library and _denies(text, "compile")
    return own_loop or (library == "transformers" and not any(_says(text, word) for word in OWN_KERNELS))


def _liger_chunk_tokens(tokens: int, shape: ModelShape) -> int:
    """Of a micro-batch of `tokens`, how many Liger's fused loss makes logits of at a time: the tokens over how often
    the hidden states' width goes into the vocabulary, rounded up to a power of two (linkedin/Liger-Kernel,
    fused_linear_cross_entropy; arXiv:2410.10989)."""
    share = math.ceil(tokens / math.ceil(shape.vocab / shape.hidden))
    return min(tokens, 1 << (share - 1).bit_length())


def _words(fields: _Fields) -> str:
    return f"{fields.text('framework')} {fields.text('framework_version')}".lower()


def _kernels(fields: _Fields, device: Gpu, engine: Engine, method: Method) -> dict[str, Any]:
    """Which kernels save what: of the framework, its era, and the generation of the GPU."""
    text = _words(fields)
    year = re.search(r"\b20(\d\d)\b", text)
    deterministic = fields.flag("deterministic", False)
    attention = fields.choice("attention", "flash" if _flash(fields) else "unfused", ATTENTIONS)
    library = next((name for name in ("litgpt", "transformers", "nanotron", "torchtune") if name in text), "")
    if engine == "plain" and not library and any(word in text for word in ("peft", "unsloth", "hugging")):
        library = "transformers"
    return {
        # Before flash attention, models were trained with dropout.
        "dropout": fields.flag("dropout", engine == "megatron" and not _flash(fields)),
        "fused_loss": fields.flag("loss_fusion", _flash(fields)),
        "compiled": engine in ("torch", "plain") and _says(text, "compile"),
        "compiled_loss": engine == "torch"
        and year is not None
        and int(year.group(1)) >= 25
        # Of other loops the layers are compiled alone, if anything is.
        and (_says(text, "compile") or ("torchtitan" in text and not _denies(text, "compile"))),
        "transformer_engine": fields.flag("transformer_engine", True),
        "expert_tensor": fields.whole("expert_tp", 1) if fields.given("expert_tp") else None,
        "rank": cast(Rank, fields.choice("rank", "worst", get_args(Rank))),
        "large_workspace": deterministic,
        "hopper": has_hopper_workspaces(device.name),
        "saves_every_second_product": "torchtitan" in text,
        "library": cast(Library, library),
        "unfused": _runs_unfused(text, engine, library),
        "pads_vocabulary": engine == "megatron" and "deepspeed" not in text and library != "nanotron",
        "deferred_head": fields.flag("deferred_head", False),
        "grouped_experts": fields.flag("grouped_experts", True),
        "gathers_tokens": fields.flag("gathers_tokens", False),
        "expert_overlap": fields.flag("expert_overlap", False) if fields.given("expert_overlap") else None,
        "capacity_factor": fields.number("capacity_factor"),
        "forwards_tokens": fields.choice("expert_exchange", "nccl", ("nccl", "deepep")) == "deepep",
        "host_exchange": _host_exchange(fields),
        "last_stage_layers": fields.whole("last_stage_layers", 1) if fields.given("last_stage_layers") else None,
        "flash_attention": attention.startswith("flash"),
        "attention_kernel": {"flash_attention_2": "ampere", "flash_attention_3": "own"}.get(attention, "usual"),
        "loss_chunk_tokens": fields.whole("loss_chunk_tokens", 1) if fields.given("loss_chunk_tokens") else None,
        "whole_logits": not fields.flag("parallel_loss", True),
        **_numerics(fields, loops_narrow=engine == "plain" and library == "transformers" and method == "full"),
        "fp32_softmax": attention == "eager",
    }


def _numerics(fields: _Fields, *, loops_narrow: bool) -> dict[str, Any]:
    """What is in fp32 beside narrow products. InputError where two fields contradict each other.

    `loops_narrow`: transformers trains whole models, whose type is their weights'. Of fp16 there are none: torch's loss
    scaler refuses gradients of fp16 ("Attempting to unscale FP16 gradients"), so that its Trainer has autocast there.
    """
    # PaddlePaddle's O2: weights and gradients of 16 bits, and the optimizer's copy.
    usual = "copy" if "paddle" in _words(fields) else "usual"
    masters = fields.choice("master_weights", usual, MASTERS) if fields.given("master_weights") else usual
    precision = fields.text("precision")
    scales = loops_narrow and precision == "fp16" and masters == "usual"
    autocast = fields.flag("autocast", scales)
    if autocast and precision in ("fp32", "fp64"):
        raise InputError(f"autocast: makes fp32 narrower; set precision to bf16 or fp16 (given: {precision})")
    if autocast and masters not in ("usual", "weights"):
        raise InputError(f"master_weights {masters}: autocast has weights in fp32; leave one of the two out")
    return {"autocast": autocast, "masters": cast(Masters, masters)}


def _host_exchange(fields: _Fields) -> bool:
    """DeepEP on AWS's network, EFA, which its kernels can't drive from the GPU."""
    place = fields.text("interconnect").lower()
    machines = [instance(name) for name in instance_types() if name in place]
    efa = re.search(r"\befa", place) is not None or any(machine.efa_interfaces for machine in machines)
    return fields.choice("expert_exchange", "nccl", ("nccl", "deepep")) == "deepep" and efa


def _usual_recompute(fields: _Fields, kernels: Mapping[str, Any], gpus: int, method: Method) -> str:
    """What nobody states: transformers' tuning scripts turn checkpointing on, litgpt's where it shards."""
    if kernels["library"] == "transformers":
        return "full"
    return "full" if kernels["library"] == "litgpt" and (gpus > 1 or method == "full") else "none"


THIS_YEAR = 2026.0


def _year(fields: _Fields) -> float:
    """When the framework's version appeared, from its words: "2024-08", "26.04" (containers' names), "2021"."""
    text = f"{fields.text('framework_version')} {fields.text('framework')}"
    dated = re.search(r"\b(20[12]\d)(?:-(\d\d))?", text)
    if dated:
        return float(dated.group(1)) + (int(dated.group(2)) - 0.5 if dated.group(2) else 6) / 12
    container = re.search(r"\b(2[1-9])\.(0[1-9]|1[0-2])\b", text)
    if container:
        return 2000 + int(container.group(1)) + (int(container.group(2)) - 0.5) / 12
    torch = re.search(r"torch[ =]*2\.(\d+)", text, re.IGNORECASE)
    if torch and int(torch.group(1)) >= 11:
        return TORCH_TAKES_CUDNN
    # Megatron-DeepSpeed is of 2022, FSDP's first version of 2023: later ones would be called something else.
    usual = {"megatron-deepspeed": 2022.5, "fsdp1": 2023.5}
    return next((year for word, year in usual.items() if word in text.lower()), THIS_YEAR)


def _layout(
    fields: _Fields, shape: ModelShape, degrees: Mapping[str, int], data_parallel: int, engine: Engine, device: Gpu
) -> Layout:
    ranks = data_parallel * degrees["cp"]
    method = cast(Method, fields.choice("method", "full", get_args(Method)))
    kernels = _kernels(fields, device, engine, method)
    split = ranks > 1 and degrees["tp"] * degrees["pp"] == 1
    sharding = method == "full" and engine == "torch" and shape.params > 1.5e9
    usual = "zero3" if split and (sharding or kernels["library"] == "litgpt") else "none"
    if ranks > 1 and method == "full" and engine == "megatron" and any(word in _words(fields) for word in RECIPES):
        usual = "zero1"
    stage = SHARDING[fields.choice("sharding", usual, SHARDING)]
    replicas = fields.whole("data_replicate", 1)
    if ranks % replicas:
        raise InputError(f"data_replicate {replicas}: does not divide the {ranks} data-parallel ranks")
    micro = fields.whole("micro_batch", 1)
    usual_count = 4 * degrees["pp"] if degrees["pp"] > 1 else 1
    batch = fields.whole("global_batch", micro * data_parallel * usual_count)
    if batch % (micro * data_parallel):
        if fields.given("micro_batch"):
            raise InputError(f"global_batch {batch}: is not a multiple of micro_batch x dp = {micro} x {data_parallel}")
        raise InputError(f"global_batch {batch}: is not a multiple of dp = {data_parallel}")
    offload, offload_parameters = _offloads(fields, engine, stage, ranks)
    recompute = fields.choice("recompute", _usual_recompute(fields, kernels, ranks, method), get_args(Recompute))
    offloads_checkpoints = fields.choice("offload_checkpoints", "none", ("none", "cpu")) == "cpu"
    if offloads_checkpoints and recompute != "full":
        raise InputError(f"offload_checkpoints cpu: is of what recompute full keeps (recompute: {recompute})")
    chunks = fields.whole("vp", 1)
    sequence_length = fields.whole("seq", 4096 if shape.gated_mlp else 2048)
    if kernels["loss_chunk_tokens"] is None and _says(_words(fields), "liger"):
        tokens = micro * sequence_length // degrees["cp"]
        kernels["loss_chunk_tokens"] = _liger_chunk_tokens(tokens, shape)
    return Layout(
        tensor=degrees["tp"],
        pipeline=degrees["pp"],
        chunks=chunks if degrees["pp"] > 1 else 1,
        context=degrees["cp"],
        expert=degrees["ep"],
        data_parallel=data_parallel,
        zero_stage=stage,
        shard_degree=ranks // replicas if stage else 1,
        micro_batch=micro,
        num_micro_batches=batch // (micro * data_parallel),
        year=_year(fields),
        sequence_length=sequence_length,
        precision=cast(Precision, fields.choice("precision", "bf16", get_args(Precision))),
        recompute=cast(Recompute, recompute),
        offloads_checkpoints=offloads_checkpoints,
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        sequence_parallel=fields.flag("sequence_parallel", _flash(fields)),
        engine=engine,
        method=method,
        lora_rank=fields.whole("lora_rank", 16),
        num_lora_targets=fields.whole("lora_targets", 2),
        quantization=cast(Any, fields.choice("quantization", "nf4", ("nf4", "gptq"))),
        trains_vocabulary=fields.flag("trains_vocabulary", False),
        adapter=cast(Adapter, fields.choice("adapter", "lora", get_args(Adapter))),
        offload=cast(Any, offload),
        offload_parameters=cast(Any, offload_parameters),
        optimizer=cast(
            Optimizer, fields.choice("optimizer", _usual_optimizer(kernels, ranks, method), get_args(Optimizer))
        ),
        **kernels,
    )


def _offloads(fields: _Fields, engine: Engine, stage: int, ranks: int) -> tuple[str, str]:
    """Where optimizer state and weights live. FSDP knows one offload alone: of the weights, and all that is theirs."""
    state = fields.choice("offload", "none", PLACES)
    is_fsdp = engine != "deepspeed" and stage == 3 and ranks > 1
    weights = fields.choice("offload_parameters", state if is_fsdp else "none", PLACES)
    if weights != "none" and stage != 3:
        raise InputError(f"offload_parameters {weights}: only cut weights leave a GPU; set sharding to zero3")
    if weights != "none" and state == "none":
        raise InputError(f"offload_parameters {weights}: needs offload; set it to cpu or nvme")
    return state, weights


def _usual_optimizer(kernels: Mapping[str, Any], ranks: int, method: Method) -> str:
    """litgpt's recipes for whole models on one GPU keep AdamW's averages in paged memory."""
    return "adamw_paged" if kernels["library"] == "litgpt" and method == "full" and ranks == 1 else "adamw"


def _links(fields: _Fields, device: Gpu, gpus: int) -> Fabric:
    """Nodes and network, from the words of `interconnect` where they say something."""
    text = fields.text("interconnect")
    per_node = fields.whole("gpus_per_node", min(gpus, RACKS.get(device.name, 8)))
    lowered = text.lower()
    for name in instance_types():
        if name in lowered and instance(name).gpu is not None:
            return fabric_of(instance(name))
    nvlink_domain = re.search(r"nvl(\d+)", lowered)
    if nvlink_domain:
        per_node = int(nvlink_domain.group(1)[:7])
        if not 1 <= per_node <= MOST["gpus_per_node"]:
            raise InputError(f"interconnect: {nvlink_domain.group()[:20]} is no NVLink domain; NVL72 is one of 72 GPUs")
    usual = NODE_GB_PER_SECOND.get(
        device.name, DEFAULT_NODE_GB_PER_SECOND if device.nvlink else SLOW_NODE_GB_PER_SECOND
    )
    # Nodes of other sizes have as many cards a GPU (a rack of NVLink has 72 of them, a node of four GPUs four), or one.
    usual = max(SLOW_NODE_GB_PER_SECOND, usual * per_node / 8)
    network = EFA if re.search(r"\befa", lowered) else INFINIBAND
    return fabric(device, per_node, _stated_gb_per_second(text, per_node) or usual, network)


READ_LINKS = r"\befa|nvl\d|\b(?:infiniband|ib|roce|rdma)(?![a-z])"
"""Words of `interconnect` that say something without a rate: AWS's network, a rack, and what is assumed elsewhere."""


def _reads_links(text: str, device: Gpu) -> bool:
    """Whether a stated `interconnect` says something that counts, or is what is assumed anyway."""
    lowered = text.lower()
    within = r"nv-?(?:link|switch)" if device.nvlink else r"pci-?e"
    return (
        not text.strip()
        or re.search(f"{READ_LINKS}|{within}", lowered) is not None
        or any(name in lowered and instance(name).gpu is not None for name in instance_types())
        or _stated_gb_per_second(text, 8) is not None
    )


SLINGSHOT_GB_PER_SECOND = 25.0
"""A card of HPE's Slingshot 11, of which nodes with GH200 or MI250X have one a GPU."""

RATE = r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[TGM](?:(?:iga)?bits?(?:/s|ps)?|b(?:/s|ps|E)?|E)?)(?![a-z0-9])"
"""A rate: 400 Gb/s, 3.2 Tbps, 50 GB/s, 100GbE, 10G. A capital B counts bytes."""

RDMA = (
    r"(?<!no )(?<!without )(?:roce|rdma|spectrum|infiniband|slingshot|\befa|(?<![a-z])ib(?![a-z])"
    r"|(?<![a-z])[xnhe]dr(?![a-z]))"
)
"""A network of which each GPU has a card; Ethernet that carries none of it is a node's one network."""

WITHIN_NODE = (
    rf"(?:nv-?link|nv-?switch|intra(?:-?node)?)\s*(?:v?\d(?:\.\d)?)?[\s:(]*(?:at\s+)?{RATE}",
    rf"{RATE.replace('number', 'n').replace('unit', 'u')}\s*\(?(?:of\s+|over\s+)?(?:nv-?link|nv-?switch|intra)",
)
"""Rates of the links inside of a node, which say nothing of the network."""


def _gb_per_second(rate: re.Match[str]) -> float:
    """Decimal GB/s of a rate as RATE reads it."""
    unit = rate.group("unit")
    scale = {"t": 1000.0, "g": 1.0, "m": 0.001}[unit[0].lower()]
    counts_bytes = "B" in unit and unit[-1] not in "eE"
    return float(rate.group("number")) * scale / (1 if counts_bytes else 8)


def _of_rates(text: str, lowered: str, gpus_per_node: int) -> float | None:
    """GB/s of a node by the rates in the text, of a GPU, so many cards, or a node; None without any."""
    # "80 GB" is a size.
    rates = [rate for rate in re.finditer(RATE, text, flags=re.IGNORECASE) if rate.group("unit")[1:] != "B"]
    for rate in rates:
        # What the rate is of stands behind it, up to the next comma.
        if re.match(r"[^,;]*(?:per[ -]|/)gpu", lowered[rate.end() :]):
            return _gb_per_second(rate) * gpus_per_node
        count = re.search(r"(\d{1,4})\s*x\s*$", lowered[: rate.start()])
        if count:
            return int(count.group(1)) * _gb_per_second(rate)
    cards = re.search(r"(\d{1,4})\s*x\s*(?:[hnxe]dr)?\s*(\d{2,4})(?:g(?=-)|(?![a-z0-9]))", lowered)
    if cards:
        return float(cards.group(1)) * float(cards.group(2)) / 8
    if rates:
        # Of several networks the GPUs' is the one with RDMA.
        rate = next((item for item in rates if re.search(RDMA, _beside(lowered, item))), rates[0])
        speed = _gb_per_second(rate)
        # "400 Gb/s", of a node with eight cards of that speed, is each card's; Ethernet of 100GbE is the node's.
        is_ethernet = rate.group("unit")[-1] in "eE" or _is_plain_ethernet(lowered, rate)
        whole = "node" in lowered or is_ethernet or speed < SLOW_NODE_GB_PER_SECOND
        return speed if whole or speed > CARD_GB_PER_SECOND else speed * gpus_per_node
    return None


def _beside(lowered: str, rate: re.Match[str]) -> str:
    """The words that a rate stands among, from comma to comma."""
    return re.split("[,;]", lowered[: rate.start()])[-1] + " " + re.split("[,;]", lowered[rate.end() :])[0]


def _is_plain_ethernet(lowered: str, rate: re.Match[str]) -> bool:
    """Whether a rate is Ethernet's without RDMA: by the words beside it, or by all where these name no network."""
    for words in (_beside(lowered, rate), lowered):
        if re.search(RDMA, words):
            return False
        if "ethernet" in words:
            return True
    return False


def _stated_gb_per_second(text: str, gpus_per_node: int) -> float | None:
    """GB/s of a node: "400 Gb/s per GPU", "8x200 Gb/s per node", "3.2 Tb/s", "100GbE", "NDR", "EFA 3200".

    InputError for a rate that can't be read, so that it isn't taken for the usual one unseen.
    """
    for within in WITHIN_NODE:
        text = re.sub(within, " ", text, flags=re.IGNORECASE)
    lowered = text.lower()
    numbers = _of_rates(text, lowered, gpus_per_node)
    if numbers is not None:
        if not 0 < numbers <= MOST_NUMBER:
            raise InputError(f"interconnect: {numbers:g} GB/s a node is no rate of a network")
        return numbers
    adapter = re.search(r"efa\s*(\d{3,5})", lowered)
    if adapter:
        return float(adapter.group(1)) / 8
    # InfiniBand's generations; HDR100 and NDR200 are cards of half of it.
    card = re.search(r"(?<![a-z])(xdr|ndr|hdr|edr)(\d{2,3})?(?!\d)", lowered)
    if card:
        gigabits = {"xdr": 800, "ndr": 400, "hdr": 200, "edr": 100}[card[1]]
        return int(card[2] or gigabits) * gpus_per_node / 8
    unread = re.search(r"\d[\d.]*\s*[kKmMgGtT](?:i?[bB]|bit)\S*", text)
    if unread:
        raise InputError(
            f"interconnect: can't read the rate {unread.group()!r}; state e.g. 400 Gb/s per GPU, or 50 GB/s"
        )
    return SLINGSHOT_GB_PER_SECOND * gpus_per_node if "slingshot" in lowered else None
