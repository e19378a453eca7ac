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
from trainyard.hardware import Gpu, gpu, instance
from trainyard.planner.assumptions import assumed, turning
from trainyard.planner.communication import Fabric
from trainyard.planner.constants import GIB
from trainyard.planner.layout import (
    RECOMPUTED_MODULES,
    Adapter,
    Engine,
    Layout,
    Method,
    Optimizer,
    Precision,
    Recompute,
)
from trainyard.planner.memory import masters_of, memory
from trainyard.planner.operators import lacks_flash
from trainyard.planner.request_fields import KNOWN_FIELDS, Fields, shown
from trainyard.planner.request_framework import (
    RECIPES,
    SHARDING,
    engine_of,
    exchanges_experts,
    graphs_step,
    has_flash,
    kernels_of,
    usual_optimizer,
    usual_recompute,
    with_liger_chunks,
    words_of,
    year_of,
)
from trainyard.planner.request_network import links_of, reads_links
from trainyard.planner.request_shape import predicts_further, shape_of, stated_size, with_further_tokens
from trainyard.planner.shapes import ModelShape
from trainyard.planner.time_constants import DEFAULT_CONSTANTS, PRE_AMPERE, Constants
from trainyard.planner.timing import step_time, time_spread
from trainyard.planner.wording import in_plain_words
from trainyard.spec.words import counted

PLACES = ("none", "cpu", "nvme")
"""Of what is offloaded."""


@dataclass(frozen=True)
class Question:
    """A configuration with nothing unknown left."""

    shape: ModelShape
    layout: Layout
    device: Gpu
    links: Fabric
    causal_flops: bool
    """The framework's own MFU counts half of the attention scores."""


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
        turning(content, shape, layout, question.device),
        _of_nodes(content, question),
    )
    notes = [note for note in said if note]
    unsaid = assumed(content, shape, layout)
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
        **({"assumed": unsaid} if unsaid else {}),
        **({"notes": notes} if notes else {}),
    }


def _visible_gib(bytes_: float, needed: float, question: Question) -> float:
    """GiB that the allocator or the driver shows: where a run fits, never more than there is."""
    there = question.device.memory_gib * GIB
    return (min(bytes_, there) if needed <= there else bytes_) / GIB


def _of_model(content: Mapping[str, Any]) -> str:
    """What to say where nothing but the size in an unknown model's name was taken for it; "" elsewhere."""
    size = stated_size(Fields(content))
    if size is None:
        return ""
    return (
        f"model: {shown(content['model'])} is not known here, and taken as a Llama of {size:g} billion parameters by "
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


def _of_nodes(content: Mapping[str, Any], question: Question) -> str:
    """What to say where a stated `gpus_per_node` gives way to the machine or rack that `interconnect` names."""
    taken = question.links.gpus_per_node
    stated = Fields(content).whole("gpus_per_node", taken)
    if stated == taken:
        return ""
    return f"gpus_per_node: {stated} gives way to interconnect {shown(content['interconnect'])}, which is of {taken}"


def _without_effect(content: Mapping[str, Any], question: Question) -> set[str]:
    """Fields that are stated, and that no formula of the layout's method, precision and engine reads."""
    shape, layout = question.shape, question.layout
    unread: set[str] = set()
    if not reads_links(content.get("interconnect") or "", question.device):
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
    # Frozen weights are as narrow as products are, and in fp32 there is nothing else.
    taken = "weights" if layout.precision in ("fp32", "fp64") else "none" if layout.method != "full" else ""
    if taken and str(content.get("master_weights")).lower() != taken:
        unread.add("master_weights")
    if layout.moment_bytes is None:
        unread.add("moment_precision")
    # fp32 weights have fp32 gradients, and one rank sends none.
    is_alone = layout.data_parallel * layout.context == 1 and masters_of(layout) == "weights"
    if layout.gradient_bytes is None or (layout.gradient_bytes < 4 and is_alone):
        unread.add("gradient_precision")
    return {name for name in unread if content.get(name) not in (None, "")}


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
    fields = Fields(in_plain_words(content))
    shape = shape_of(fields)
    device = _device(fields)
    degrees = {name: fields.whole(name, 1) for name in ("tp", "pp", "cp", "ep")}
    split = degrees["tp"] * degrees["pp"] * degrees["cp"]
    gpus = fields.whole("gpus", split * fields.whole("dp", 1))
    engine = engine_of(fields, gpus, split)
    if not fields.given("ep") and exchanges_experts(fields, engine):
        ranks = gpus // degrees["pp"] // fields.whole("expert_tp", 1)
        degrees["ep"] = _spread_of_exchanged(shape, ranks)
    _check_divides(shape, degrees)
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
    shape = with_further_tokens(fields, shape, engine)
    layout = _layout(fields, shape, degrees, data_parallel, engine, device)
    is_recipes = shape.mtp_layers > 0 and predicts_further(fields, engine)
    if is_recipes and layout.pipeline > 1 and layout.last_stage_layers is None:
        layout = dataclasses.replace(layout, last_stage_layers=_layers_beside_ends(shape, layout.pipeline))
    if shape.indexer is not None and (layout.unfused or layout.library or engine in ("plain", "deepspeed")):
        raise InputError(
            f"framework {fields.text('framework')!r}: writes all scores of this model's attention out, which no "
            "formula here tells; name a framework with kernels for it, e.g. megatron-core"
        )
    links = links_of(fields, device, gpus)
    if not fields.given("optimizer") and layout.optimizer == "adamw_paged":
        plain = dataclasses.replace(layout, optimizer="adamw")
        # Who has the room doesn't page.
        layout = plain if memory(shape, plain).needed <= device.memory_gib * GIB else layout
    if not fields.given("micro_batch"):
        layout = _usual_micro_batch(fields, shape, layout, device, links)
    return Question(shape, layout, device, links, _counts_causal(fields))


def _layers_beside_ends(shape: ModelShape, ranks: int) -> int:
    """Layers of the last of a pipeline's ranks where it predicts further tokens too, as Megatron-Bridge's recipes lay
    models out: each further token takes the time of two layers there, its own and its pass through the head."""
    ends = 2 * shape.mtp_layers
    return max(1, math.ceil((shape.layers + ends) / ranks) - ends)


def _counts_causal(fields: Fields) -> bool:
    """Frameworks whose own TFLOP/s count half of the attention scores, as causal kernels compute them."""
    text = fields.text("framework").lower()
    return "bridge" in text or "automodel" in text


def _usual_micro_batch(fields: Fields, shape: ModelShape, layout: Layout, device: Gpu, links: Fabric) -> Layout:
    """The fastest micro-batch that fits, as whoever runs a job would have tried; the smallest where none fits.

    Of a known global batch, those that divide it; else the number of micro-batches stays, and the batch grows.
    """
    batch_known = fields.given("global_batch")
    sequences = layout.micro_batch * layout.num_micro_batches
    sizes = [
        dataclasses.replace(
            layout, micro_batch=size, num_micro_batches=sequences // size if batch_known else layout.num_micro_batches
        )
        for size in (1, 2, 4, 8, 16)
        if (not batch_known or sequences % size == 0) and (size == 1 or size * layout.sequence_length <= 65536)
    ]
    choices = [with_liger_chunks(fields, shape, item) for item in sizes]
    fitting = [item for item in choices if memory(shape, item).needed <= device.memory_gib * GIB]
    if not fitting:
        return choices[0]
    return min(fitting, key=lambda item: step_time(shape, item, device, links).total / item.global_batch)


def _check_divides(shape: ModelShape, degrees: Mapping[str, int]) -> None:
    if shape.heads % degrees["tp"]:
        allowed = ", ".join(str(size) for size in range(1, shape.heads + 1) if shape.heads % size == 0)
        raise InputError(f"tp {degrees['tp']}: does not divide the {counted(shape.heads, 'head')} (allowed: {allowed})")
    if degrees["pp"] > shape.layers:
        raise InputError(f"pp {degrees['pp']}: the model has only {counted(shape.layers, 'layer')}")
    if degrees["ep"] > 1 and (not shape.experts or shape.experts % degrees["ep"]):
        raise InputError(f"ep {degrees['ep']}: must divide the number of experts, {shape.experts}")


MOST_EXPERT_RANKS = 64
"""Ranks that published runs spread a layer's experts over, at most."""


def _spread_of_exchanged(shape: ModelShape, ranks: int) -> int:
    """Over how many ranks experts are spread where somebody says how tokens get to them, but not that: as many of a
    pipeline stage's `ranks` (those that share an expert as one) as the experts can be dealt out to."""
    most = math.gcd(shape.experts, ranks) if shape.experts and ranks else 1
    return max(size for size in range(1, min(most, MOST_EXPERT_RANKS) + 1) if most % size == 0)


def _device(fields: Fields) -> Gpu:
    name = fields.text("gpu")
    if not name:
        raise InputError("gpu: is needed, e.g. H100")
    stated = fields.number("gpu_mem_gb")
    if re.search(r"\.\d*(?:xlarge|metal)", name.lower()):
        # A machine that is known stands there as its GPU by now (`wording`): this one is not, or has none.
        machine = instance(name.strip().lower())
        raise InputError(f"gpu {shown(name)}: has {machine.accelerator}, and no GPU that is known here")
    # A bare number is the marketed size: keep the table's figure where it is the same part.
    device = gpu(name)
    if stated is not None and abs(stated - device.memory_gib) > 0.15 * stated:
        return gpu(name, memory_gb=stated)
    return device


def _layout(
    fields: Fields, shape: ModelShape, degrees: Mapping[str, int], data_parallel: int, engine: Engine, device: Gpu
) -> Layout:
    ranks = data_parallel * degrees["cp"]
    method = cast(Method, fields.choice("method", "full", get_args(Method)))
    kernels = kernels_of(fields, device, engine, method)
    split = ranks > 1 and degrees["tp"] * degrees["pp"] == 1
    sharding = method == "full" and engine == "torch" and shape.params > 1.5e9
    usual = "zero3" if split and (sharding or kernels["library"] == "litgpt") else "none"
    if ranks > 1 and method == "full" and engine == "megatron" and any(word in words_of(fields) for word in RECIPES):
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
    recomputation = _recomputation(fields, engine, usual_recompute(fields, kernels, ranks, method))
    chunks = fields.whole("vp", 1)
    sequence_length = fields.whole("seq", 4096 if shape.gated_mlp else 2048)
    layout = Layout(
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
        year=year_of(fields),
        sequence_length=sequence_length,
        precision=cast(Precision, fields.choice("precision", "bf16", get_args(Precision))),
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        sequence_parallel=fields.flag("sequence_parallel", has_flash(fields)),
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
            Optimizer, fields.choice("optimizer", usual_optimizer(kernels, ranks, method), get_args(Optimizer))
        ),
        **recomputation,
        **kernels,
    )
    layout = dataclasses.replace(layout, graphs_step=graphs_step(fields, shape, layout, device))
    return with_liger_chunks(fields, shape, layout)


def _recomputation(fields: Fields, engine: Engine, usual: str) -> dict[str, Any]:
    """What is computed again, and where what is kept for that waits."""
    modules = fields.words("recompute_modules", RECOMPUTED_MODULES)
    recompute = fields.choice("recompute", "selective" if modules else usual, get_args(Recompute))
    if modules and (engine != "megatron" or recompute != "selective"):
        given = f"framework: {fields.text('framework') or 'none'}, recompute: {recompute}"
        raise InputError(f"recompute_modules: are of Megatron's selective recomputation ({given})")
    is_away = fields.choice("offload_checkpoints", "none", ("none", "cpu")) == "cpu"
    if is_away and recompute != "full":
        raise InputError(
            f"offload_checkpoints cpu: is of what full recomputation keeps; set recompute to full (given: {recompute})"
        )
    return {
        "recompute": recompute,
        "offloads_checkpoints": is_away,
        "recompute_modules": modules or frozenset({"core_attn"}),
    }


def _offloads(fields: Fields, engine: Engine, stage: int, ranks: int) -> tuple[str, str]:
    """Where optimizer state and weights live. FSDP knows one offload alone: of the weights, and all that is theirs."""
    state = fields.choice("offload", "none", PLACES)
    is_fsdp = engine != "deepspeed" and stage == 3 and ranks > 1
    weights = fields.choice("offload_parameters", state if is_fsdp else "none", PLACES)
    if weights != "none" and stage != 3:
        raise InputError(f"offload_parameters {weights}: only cut weights leave a GPU; set sharding to zero3")
    if weights != "none" and state == "none":
        raise InputError(f"offload_parameters {weights}: needs offload; set it to cpu or nvme")
    return state, weights
