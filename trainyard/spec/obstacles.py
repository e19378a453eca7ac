"""Everything that this trainer doesn't do, told before anything is rented or read: one list for all who ask.

`trainyard.planner.resolve` asks it of every job that is planned or launched, the search of every layout that it might
propose, and the trainer once more, with transformers' own configuration in place of what the job states of one. What
needs torch, transformers or the machine itself is checked in the trainer alone: `trainer.strategies.check_supported`.

An obstacle is one line that says what is wrong, where, and what to do instead.
"""

import difflib
from collections.abc import Iterable, Iterator

from trainyard.spec.deepspeed_keys import passed_obstacles
from trainyard.spec.job import AdapterSpec, JobSpec, ParallelismSpec
from trainyard.spec.model_types import CAUSAL_LM_TYPES, HEADS, LINEAR_LAYERS
from trainyard.spec.support import (
    ATTENTION_LAYERS,
    DOCUMENT_FAMILIES,
    EXPERT_TENSOR_FAMILIES,
    NO_RECOMPUTATION,
    ROUTER_BIAS_FAMILIES,
    ROUTER_FAMILIES,
    ModelFacts,
    context_obstacle,
    expert_obstacle,
    pipeline_obstacle,
    tensor_obstacle,
)

FP8_MULTIPLE = 16
"""What the sizes of an 8-bit product have to be multiples of: rows, columns and tokens."""

HALF_PRECISIONS = frozenset({"bf16", "fp16", "fp8"})
"""Those in which attention's inputs have two bytes: fp8 is for linear layers alone."""

_ATTENTION_TARGETS = frozenset(
    {"q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "lm_head"}
)
"""Of mixtures that tensor parallelism cuts."""

MEASURES: dict[str, tuple[str, ...]] = {
    "causal_lm": ("loss", "perplexity"),
    "image_classification": ("loss", "top1_accuracy", "top5_accuracy"),
    "vision_language": ("loss", "perplexity"),
}
"""What a validation measures, by task."""

PACKED_EXPERT_FAMILIES = frozenset(
    {
        *("afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe"),
        *("exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "mixtral", "qwen3_moe"),
        *("qwen3_next", "solar_open"),
    }
)
"""Model types in which peft (0.21) takes EXPERT_TARGETS for the packed experts as well."""

EXPERT_TARGETS = frozenset({"gate_proj", "up_proj", "down_proj"})
"""Linear layers of dense blocks and shared experts."""

_NO_DEEPSPEED_OPTIMIZERS = {
    "adamw_8bit": "keeps its averages in blocks of rows",
    "adafactor": "keeps a row and a column a matrix",
    "muon": "needs whole matrices",
    "sgd": "is not what its checkpoints are made for here",
}


def job_obstacles(job: JobSpec, model: ModelFacts) -> Iterator[str]:
    """What no layout would mend."""
    yield from _data_obstacles(job)
    if job.task == "image_classification":
        yield from _classification_obstacles(job)
    if job.task == "vision_language":
        yield from _vision_language_obstacles(job)
    if job.training.optimizer.kind == "adamw_8bit" and job.training.precision == "fp64":
        yield "training.optimizer.kind: adamw_8bit is of no use in fp64; use adamw"
    yield from _best_obstacles(job)
    if job.training.optimizer.router_bias_rate is not None:
        yield from _router_bias_obstacles(job, model)
    if job.task != "causal_lm":
        return
    yield from _type_obstacles(job)
    yield from _model_obstacles(job, model)
    yield from _target_obstacles(job, model)
    if job.training.precision == "fp8":
        yield from _fp8_obstacles(model)
    if model.balances_router and model.model_type not in ROUTER_FAMILIES:
        yield (
            f"model.config.output_router_logits: the router's auxiliary loss of {model.model_type} is not verified;"
            f" set it to false, or use one of {', '.join(sorted(ROUTER_FAMILIES))}"
        )


def layout_obstacles(
    job: JobSpec,
    layout: ParallelismSpec,
    model: ModelFacts,
    *,
    micro_batch_size: int,
    num_micro_batches: int,
    recompute: str,
) -> Iterator[str]:
    """What this layout, with these micro-batches a rank and step and this recomputation, can't do with the job."""
    if job.task != "causal_lm":
        yield from _whole_model_obstacles(job, layout, recompute)
    yield from _adapter_obstacles(job, layout)
    if layout.engine == "deepspeed":
        yield from _deepspeed_obstacles(job, layout)
    if job.task == "causal_lm":
        yield from _product_obstacles(job, layout, model, num_micro_batches=num_micro_batches, recompute=recompute)
        yield from _attention_obstacles(job, model, micro_batch_size)
    if model.layer_drop is not None and (layout.engine == "deepspeed" or layout.world_size > 1):
        yield (
            f"model.config.{model.layer_drop} skips blocks, others on each rank, which would wait for each other's"
            " weights or gradients; set it to 0"
        )
    if recompute != "none" and model.model_type in NO_RECOMPUTATION:
        yield (
            f"training.activation_checkpointing: {recompute}: transformers' {model.model_type} can't compute its blocks"
            " again; set it to none"
        )
    num_tokens = micro_batch_size * job.data.sequence_length // layout.context
    if job.training.precision == "fp8" and num_tokens % FP8_MULTIPLE:
        yield (
            f"training.precision: fp8 multiplies multiples of {FP8_MULTIPLE} tokens, and a rank's part of a micro-batch"
            f" is {num_tokens}; change data.sequence_length or training.micro_batch_size, or use bf16"
        )
    if job.training.compile:
        yield from _compile_obstacles(layout, model, recompute)
    if job.training.loss == "chunked" and (reason := loss_obstacle(job, layout)) is not None:
        yield f"training.loss: chunked can't be had: {reason}; set it to auto or logits"


def loss_obstacle(job: JobSpec, layout: ParallelismSpec) -> str | None:
    """Why no model's loss can be computed in its head; None where one's may."""
    if job.task != "causal_lm":
        return f"task {job.task} computes its own"
    if layout.pipeline > 1 and layout.pipeline_schedule == "zero_bubble":
        return "zero_bubble goes through the head's gradient twice"
    return None if job.model.adapter is None else head_obstacle(job.model.adapter, HEADS)


def head_obstacle(adapter: AdapterSpec, heads: Iterable[str]) -> str | None:
    """Why the loss can't be computed in a head of one of these names; None where the adapter leaves it as it is."""
    adapted = [target for target in adapter.targets if target in heads]
    return f"the adapter on {adapted[0]} (model.adapter.targets) adds to what the head gives" if adapted else None


def separates_documents(job: JobSpec) -> bool:
    """Whether packed documents must not see each other."""
    return job.task == "causal_lm" and job.data.packing and job.data.document_masks


def _data_obstacles(job: JobSpec) -> Iterator[str]:
    for name in ("train", "validation"):
        for number, source in enumerate(getattr(job.data, name)):
            where = f"data.{name}.{number}"
            if job.task == "causal_lm" and source.format == "webdataset":
                yield (
                    f"{where}.format: webdataset is for images; a causal_lm job reads text, jsonl, parquet or tokens"
                )
            has_tokenizer = job.data.tokenizer is not None or job.model.source is not None
            if source.messages_field is not None and job.data.chat_template is None and not has_tokenizer:
                yield (
                    f"{where}.messages_field: needs a chat template, and without a tokenizer there is none beside it;"
                    " set data.tokenizer to a directory with one, or data.chat_template to a Jinja file"
                )
    yield from _streaming_obstacles(job)


def _streaming_obstacles(job: JobSpec) -> Iterator[str]:
    ready_made = [
        source.format == "tokens" and source.path.startswith(("s3://", "tenant://")) for source in job.data.train
    ]
    if not job.data.streaming or not any(ready_made):
        return
    if not all(ready_made):
        yield (
            "data.train: tokens that are streamed from S3 can't be mixed with other sources; tokenize all of them"
            " beforehand, or set data.streaming: false and launch the job, which copies them"
        )
    elif job.data.tokenizer is None and job.model.source is None and stated_vocabulary(job) is None:
        yield (
            "data.train: streamed tokens are not all read before training, so their vocabulary must be known: set"
            " model.config.vocab_size or data.tokenizer"
        )


def stated_vocabulary(job: JobSpec) -> int | None:
    """How many ids a new model's configuration has a place for; None where it leaves that to the data."""
    size = (job.model.config or {}).get("vocab_size")
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def _classification_obstacles(job: JobSpec) -> Iterator[str]:
    kind = job.training.optimizer.kind
    if job.model.adapter is not None:
        yield "model.adapter: task image_classification trains whole models; leave the adapter out"
    if kind not in ("adamw", "sgd"):
        yield (
            f"training.optimizer.kind: {kind} is not verified on convolutions; task image_classification takes sgd or"
            " adamw"
        )
    if job.training.on_anomaly == "skip":
        yield "training.on_anomaly: skip can't take a batch back from batch norm's running statistics; use stop"


def _vision_language_obstacles(job: JobSpec) -> Iterator[str]:
    kind = job.training.optimizer.kind
    if job.data.packing:
        yield "data.packing: task vision_language pads, one sample a sequence; set packing: false"
    if kind != "adamw":
        yield (f"training.optimizer.kind: {kind} is not verified on vision towers; task vision_language takes adamw")
    if job.model.adapter is not None and job.model.adapter.kind != "lora":
        yield "model.adapter: task vision_language takes lora; other kinds are not verified with it"


def _best_obstacles(job: JobSpec) -> Iterator[str]:
    best, known = job.checkpoint.keep_best, MEASURES[job.task]
    if best is None or best.metric == "loss":
        return
    named = best.metric.startswith("validation_sets.")
    measure = best.metric.split(".")[2] if named else best.metric.removeprefix("validation_")
    if measure not in known:
        given = best.metric.removesuffix(measure)
        yield (
            f"checkpoint.keep_best.metric: {best.metric} is not measured by this task; it measures"
            f" {', '.join(given + name for name in known)}"
        )


def _model_obstacles(job: JobSpec, model: ModelFacts) -> Iterator[str]:
    """Of a language model and what it reads."""
    if model.causal_if is not None:
        yield (
            f"task causal_lm: tokens of this {model.model_type} see those that they are to predict, which it would"
            f" learn to copy: {model.causal_if}"
        )
    others = model.layer_types - ATTENTION_LAYERS
    if separates_documents(job) and model.model_type is not None:
        is_known = model.model_type in DOCUMENT_FAMILIES
        what = f"has layers ({', '.join(sorted(others))}) that see through it" if others else "is not verified for it"
        if others or not is_known:
            yield (
                f"data.document_masks: packed documents are kept apart by a mask, and model_type {model.model_type}"
                f" {what}: set data.document_masks to false (documents then see each other), or data.packing to false"
            )
    if model.max_positions is not None and model.max_positions < job.data.sequence_length:
        yield (
            f"data.sequence_length is {job.data.sequence_length}, but the model has"
            f" {model.max_positions} positions (max_position_embeddings; GPT-2's n_positions): shorten the"
            " sequence, or state more of them for a model that is trained from its configuration"
        )
    if job.model.attention == "varlen":
        if not separates_documents(job):
            yield "model.attention: varlen can't be had: no packed documents have to be kept apart; set it to auto"
        if job.training.precision not in HALF_PRECISIONS:
            yield (
                "model.attention: varlen can't be had: torch's kernel for it computes in bf16 and fp16, not in"
                f" {job.training.precision}; set it to auto"
            )


def _type_obstacles(job: JobSpec) -> Iterator[str]:
    """Of a new model; one that exists says its type itself, and transformers whether it has it."""
    stated = None if job.model.config is None else str(job.model.config["model_type"])
    if stated is None or stated in CAUSAL_LM_TYPES:
        return
    close = difflib.get_close_matches(stated, sorted(CAUSAL_LM_TYPES), n=1)
    hint = f"; did you mean {close[0]}?" if close else ", e.g. llama, qwen3 or mixtral"
    yield f"model.config.model_type: {stated}: transformers has no causal language model of this type{hint}"


def _target_obstacles(job: JobSpec, model: ModelFacts) -> Iterator[str]:
    """Of an adapter's layers, in families whose layers are known; the trainer asks every model."""
    adapter = job.model.adapter
    if adapter is None or model.model_type is None:
        return
    if model.model_type in PACKED_EXPERT_FAMILIES and (found := EXPERT_TARGETS & set(adapter.targets)):
        yield adapted_experts(model.model_type, found)
    if model.model_type not in LINEAR_LAYERS:
        return
    known = LINEAR_LAYERS[model.model_type] - (EXPERT_TARGETS if model.num_experts else set())
    if model.has_query_latent is not None:
        known -= {"q_proj"} if model.has_query_latent else {"q_a_proj", "q_b_proj"}
    if missing := [target for target in adapter.targets if target not in known]:
        yield (
            f"model.adapter.targets: {', '.join(missing)}: no linear layer that can be adapted has this name in"
            f" {model.model_type}; it has {', '.join(sorted(known))}"
        )


def adapted_experts(model_type: str, targets: Iterable[str]) -> str:
    """Why experts' weights are none of an adapter's targets."""
    return (
        f"model.adapter.targets: {', '.join(sorted(targets))}: in {model_type} these are experts too,"
        " whose weights are packed and get no adapter in this trainer; name layers of the attention"
    )


def _router_bias_obstacles(job: JobSpec, model: ModelFacts) -> Iterator[str]:
    name = f"training.optimizer.router_bias_rate: {job.training.optimizer.router_bias_rate:g}"
    is_other = model.model_type is not None and model.model_type not in ROUTER_BIAS_FAMILIES
    if job.task != "causal_lm" or is_other:
        what = f"task {job.task}" if job.task != "causal_lm" else model.model_type
        yield (
            f"{name} is for routers with a bias of their own, which are verified in"
            f" {', '.join(sorted(ROUTER_BIAS_FAMILIES))}, not in {what}; leave it out"
        )
    if job.model.adapter is not None:
        yield f"{name}: an adapter leaves the model's routers as they are; leave it out, or train without an adapter"
    if job.training.compile:
        yield f"{name} is not implemented with training.compile: true; set compile to false, or leave it out"


def _fp8_obstacles(model: ModelFacts) -> Iterator[str]:
    if model.hidden_size is not None and model.hidden_size % FP8_MULTIPLE:
        yield (
            f"training.precision: fp8 multiplies matrices of multiples of {FP8_MULTIPLE}, and the model's hidden_size"
            f" is {model.hidden_size}; use bf16"
        )
    if model.model_type == "gpt2":
        yield "training.precision: fp8 has no layers to convert in gpt2, whose matrices are Conv1D; use bf16"


def _whole_model_obstacles(job: JobSpec, layout: ParallelismSpec, recompute: str) -> Iterator[str]:
    """Of the tasks with images."""
    for degree in ("tensor", "pipeline", "context", "expert"):
        if getattr(layout, degree) > 1:
            yield (
                f"parallelism.{degree}: {getattr(layout, degree)} splits language models alone; task {job.task} trains"
                " with data_replicate, data_shard, or engine: deepspeed with a zero_stage"
            )
    if recompute != "none" and job.task == "image_classification":
        yield (
            f"training.activation_checkpointing: {recompute}: task image_classification keeps its activations (a second"
            " pass would count a batch twice in running averages); set none"
        )
    if recompute != "none" and job.task == "vision_language":
        yield f"training.activation_checkpointing: {recompute} is not verified for task vision_language; set none"


def _adapter_obstacles(job: JobSpec, layout: ParallelismSpec) -> Iterator[str]:
    adapter = job.model.adapter
    if adapter is None:
        return
    if adapter.kind == "qlora" and layout.engine == "deepspeed":
        yield (
            "model.adapter: qlora is not implemented with engine: deepspeed, whose partitions are of one floating-point"
            " type; use engine: torch, which shards 4-bit weights with data_shard"
        )
    if layout.pipeline > 1 and set(adapter.targets) == {"lm_head"}:
        yield (
            "model.adapter.targets: lm_head alone leaves the first pipeline stages nothing to train; add a layer of the"
            " blocks, or set parallelism.pipeline to 1"
        )


def _deepspeed_obstacles(job: JobSpec, layout: ParallelismSpec) -> Iterator[str]:
    optimizer, precision = job.training.optimizer, job.training.precision
    reason = _NO_DEEPSPEED_OPTIMIZERS.get(optimizer.kind)
    name = f"kind: {optimizer.kind}" if reason else "average_decay" if optimizer.average_decay is not None else None
    if name is not None:
        yield (
            f"training.optimizer.{name} is not implemented with engine: deepspeed, whose optimizer sees flat"
            f" partitions of all parameters{', and this one ' + reason if reason else ''}; use engine: torch, or"
            " plain adamw"
        )
    if job.training.on_anomaly == "skip":
        yield (
            "training.on_anomaly: skip is not implemented with engine: deepspeed, which measures the gradient norm and"
            " updates in one call; use stop, or engine: torch"
        )
    yield from passed_obstacles(layout)
    if precision == "fp64":
        yield (
            "training.precision: fp64 is not what DeepSpeed computes in, its optimizer states are float32;"
            " use engine: torch, or fp32"
        )
    if precision == "fp16" and layout.zero_stage == 0:
        yield "training.precision: fp16 with zero_stage 0 is not implemented; use engine: torch, or zero_stage 1"


def _product_obstacles(
    job: JobSpec, layout: ParallelismSpec, model: ModelFacts, *, num_micro_batches: int, recompute: str
) -> Iterator[str]:
    """Of layouts that cut the model or its sequences."""
    if model.model_type is None:
        return
    found: list[str | None] = []
    adapter = job.model.adapter
    if layout.tensor > 1:
        is_quantized = adapter is not None and adapter.kind == "qlora"
        found.append(tensor_obstacle(model, layout.tensor, is_quantized=is_quantized))
        if adapter is not None and model.model_type in EXPERT_TENSOR_FAMILIES:
            found.append(_cut_mixture_obstacle(adapter, layout.tensor, model.model_type))
    if layout.pipeline > 1:
        found.append(pipeline_obstacle(model, layout, num_micro_batches=num_micro_batches, recompute=recompute))
    if layout.context > 1:
        length, attention = job.data.sequence_length, job.model.attention
        found.append(context_obstacle(model, layout, sequence_length=length, attention=attention))
    if layout.expert > 1 or (layout.tensor > 1 and model.num_experts):
        found.append(expert_obstacle(model.model_type, model.num_experts, layout))
    yield from (obstacle for obstacle in found if obstacle is not None)


def _cut_mixture_obstacle(adapter: AdapterSpec, degree: int, model_type: str) -> str | None:
    """Beside attention, whose ranks drop what is their own, an adapter's dropout would have to be one on all ranks."""
    others = sorted(set(adapter.targets) - _ATTENTION_TARGETS)
    if not others:
        return None
    return (
        f"model.adapter.targets: {', '.join(others)}: adapters beside the attention are not verified in {model_type}"
        f" with parallelism.tensor: {degree}; name layers of the attention, or set tensor to 1"
    )


WIDEST_FLASH_HEAD = 256
"""FlashAttention's kernels take no wider ones, its README says."""


def _attention_obstacles(job: JobSpec, model: ModelFacts, micro_batch_size: int) -> Iterator[str]:
    if job.model.attention != "flash_attention_3":
        return
    if model.widest_head is not None and model.widest_head > WIDEST_FLASH_HEAD:
        yield (
            f"model.attention: flash_attention_3 takes heads of at most {WIDEST_FLASH_HEAD} dimensions, and"
            f" {model.model_type} has some of {model.widest_head}; set it to auto"
        )
    if job.training.precision not in HALF_PRECISIONS:
        yield (
            "model.attention: flash_attention_3 computes in bf16 and fp16, not in"
            f" {job.training.precision}; set it to auto"
        )
    if separates_documents(job) and micro_batch_size > 1:
        # transformers 5.23 finds documents for it in micro-batches of one sequence alone (_is_packed_sequence).
        yield (
            "model.attention: flash_attention_3 keeps packed documents apart with training.micro_batch_size 1 alone:"
            " set that, or set attention to auto"
        )


def _compile_obstacles(layout: ParallelismSpec, model: ModelFacts, recompute: str) -> Iterator[str]:
    """What only the resolved job or its model tells; the rest JobSpec has refused."""
    if recompute == "selective":
        yield (
            "training.compile: can't be had with training.activation_checkpointing: selective, which chooses among"
            " operations that a compiled block no longer has; use full or none"
        )
    if layout.tensor > 1 and recompute == "full":
        # torch 2.13 saves the mesh among the tensors of a recomputed graph, and stops.
        yield (
            f"training.compile: is not implemented with parallelism.tensor: {layout.tensor} and"
            " training.activation_checkpointing: full together; set activation_checkpointing to none, tensor to 1, or"
            " compile to false"
        )
    if layout.tensor > 1 and model.num_experts:
        yield (
            f"training.compile: is not implemented with parallelism.tensor: {layout.tensor} for a mixture of experts,"
            " whose tokens travel in numbers that differ from step to step; use data_shard, or set it to false"
        )
