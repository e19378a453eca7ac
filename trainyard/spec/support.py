"""Which layouts the trainer runs for which models: one set of rules, asked by the trainer and by the planner.

What is verified for a model family is measured by the parity suite and printed in docs/support.md. An obstacle is one
line that names the field to change; None: there is none.
"""

from collections.abc import Iterator

from trainyard.spec.job import JobSpec, ParallelismSpec

PIPELINE_FAMILIES = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "gemma",
        "gpt2",
        "gpt_neox",
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
    }
)
"""Models whose forward pass does nothing on the way in but embed, and nothing on the way out but norm and head, so
that running it once a stage is the same as running it once. Each has a parity test."""

CONTEXT_FAMILIES = PIPELINE_FAMILIES
"""Model types whose tokens meet in attention alone, and there through transformers' AttentionInterface (each tested).

A state-space or convolution layer would silently see a cut sequence, so others are refused.
"""

TENSOR_FAMILIES = PIPELINE_FAMILIES
"""Model types whose matrices are cut in the parity suite. The trainer also takes others for which transformers has a
plan that it can follow; what is proposed to a person is of these."""

EXPERT_FAMILIES = frozenset({"deepseek_v2", "deepseek_v3", "mixtral", "qwen3_moe"})
"""Model types with packed experts that are called as (hidden states, chosen experts, their weights); each tested."""

TWO_STAGES = frozenset({"interleaved_1f1b", "zero_bubble"})
"""Pipeline schedules in which a rank has two stages."""


def pipeline_obstacle(
    model_type: str, num_layers: int, layout: ParallelismSpec, *, num_micro_batches: int, recompute: str
) -> str | None:
    """Why a model and a batch can't go through the layout's pipeline (of more than one stage)."""
    asked, schedule = f"parallelism.pipeline: {layout.pipeline}", layout.pipeline_schedule
    if model_type not in PIPELINE_FAMILIES:
        return (
            f"{asked}: {model_type} is not cut into stages by this trainer;"
            f" set it to 1 and use data_shard, or take one of {', '.join(sorted(PIPELINE_FAMILIES))}"
        )
    num_stages = layout.pipeline * (2 if schedule in TWO_STAGES else 1)
    if num_layers < num_stages:
        return (
            f"{asked}: {schedule} makes {num_stages} stages, but the model has"
            f" {num_layers} layers; lower it, or use 1f1b, which makes one stage a rank"
        )
    count = num_micro_batches
    if count < layout.pipeline:
        return (
            f"{asked}: needs at least as many micro-batches a step, there are {count};"
            " lower training.micro_batch_size or raise training.global_batch_size"
        )
    num_rounds = count // layout.pipeline
    if schedule == "interleaved_1f1b" and count % num_rounds:
        return (
            f"{asked}: interleaved_1f1b takes {count} micro-batches a step in {num_rounds} rounds (one for every"
            f" {layout.pipeline}, rounded down), which must be of equal size: make them a multiple of {layout.pipeline}"
            " by training.micro_batch_size or training.global_batch_size, or use 1f1b"
        )
    if schedule == "zero_bubble" and recompute != "none":
        return (
            f"parallelism.pipeline_schedule: zero_bubble computes two backward passes of each stage, and can't with"
            f" training.activation_checkpointing: {recompute}; set that to none, or use 1f1b"
        )
    return None


def context_obstacle(model_type: str, degree: int, *, sequence_length: int, attention: str) -> str | None:
    """Why sequences can't be cut over so many ranks (more than one)."""
    if model_type not in CONTEXT_FAMILIES:
        return (
            f"parallelism.context: {degree} is not verified for model_type {model_type}: set it to 1, or use"
            f" one of {', '.join(sorted(CONTEXT_FAMILIES))}"
        )
    if attention not in ("auto", "sdpa"):
        return (
            f"model.attention: {attention} is not what parallelism.context {degree} computes, which is sdpa over"
            " exchanged keys and values: set it to auto, or context to 1"
        )
    if sequence_length % (2 * degree):
        below = max(sequence_length - sequence_length % (2 * degree), 2 * degree)
        return (
            f"parallelism.context: {degree} cuts a sequence into {2 * degree} equal pieces, but data.sequence_length is"
            f" {sequence_length}: use {below}, or another multiple of {2 * degree}"
        )
    return None


def expert_obstacle(model_type: str, num_experts: int, layout: ParallelismSpec) -> str | None:
    """Why a model's experts can't be spread over the layout's expert and tensor axes (one of them above 1)."""
    degree = layout.expert * layout.tensor
    if layout.pipeline > 1 and layout.pipeline_schedule == "zero_bubble":
        return (
            "parallelism.pipeline_schedule: zero_bubble takes weight gradients apart from the others, which experts on"
            f" {degree} ranks don't survive: use 1f1b, or set expert and tensor to 1"
        )
    # Tensor parallelism alone divides experts too: what is named is what the job set.
    asked = f"parallelism.expert: {layout.expert}" if layout.expert > 1 else f"parallelism.tensor: {layout.tensor}"
    if model_type not in EXPERT_FAMILIES:
        return (
            f"{asked} needs a mixture of experts that is verified for it, model_type"
            f" {model_type} is not: set it to 1, or use one of {', '.join(sorted(EXPERT_FAMILIES))}"
        )
    if num_experts % degree:
        both = f" x tensor {layout.tensor}" if layout.expert > 1 and layout.tensor > 1 else ""
        return f"{asked}{both} does not divide the model's {num_experts} experts: use a divisor"
    return None


def deepspeed_obstacles(job: JobSpec) -> Iterator[str]:
    """What of a job DeepSpeed's engine does not do; what a layout says of itself, its own section checks."""
    training, adapter = job.training, job.model.adapter
    if adapter is not None and adapter.kind == "qlora":
        yield "model.adapter: qlora"
    if training.optimizer.kind != "adamw":
        yield f"training.optimizer.kind: {training.optimizer.kind}"
    if training.optimizer.average_decay is not None:
        yield "training.optimizer.average_decay"
    if training.on_anomaly == "skip":
        yield "training.on_anomaly: skip"
    if training.precision in ("fp64", "fp8"):
        yield f"training.precision: {training.precision}"
    if training.compile:
        yield "training.compile"
