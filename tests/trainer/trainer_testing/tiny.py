"""The tiny job of the trainer's tests: a two-layer Llama, resolved by hand, and batches without a data room."""

from dataclasses import dataclass
from typing import Any

import torch
from trainer.losses.token_loss import IGNORED_LABEL

from trainyard.spec.job import JobSpec, ParallelismSpec, ResolvedJob

VOCAB_SIZE = 96
SEQUENCE_LENGTH = 24
GLOBAL_BATCH = 16
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB_SIZE,
}

LAYOUTS: dict[str, dict[int, dict[str, Any]]] = {
    "single": {1: {}},
    "ddp": {world: {"data_replicate": world} for world in (2, 4)},
    "fsdp": {world: {"data_shard": world} for world in (2, 4)},
    "hsdp": {4: {"data_replicate": 2, "data_shard": 2}},
    **{
        f"zero{stage}": {
            world: {"engine": "deepspeed", "data_replicate": world, "zero_stage": stage} for world in (1, 2, 4)
        }
        for stage in range(4)
    },
}
"""Strategy name -> world size -> the job's parallelism section."""


def tiny_job(
    strategy: str,
    world_size: int,
    *,
    model: dict[str, Any] | None = None,
    source: str | None = None,
    adapter: dict[str, Any] | None = None,
    parallelism: dict[str, Any] | None = None,
    activation_checkpointing: str = "none",
    micro_batch_size: int | None = None,
    steps: int = 20,
    sequence_length: int = SEQUENCE_LENGTH,
    document_masks: bool = True,
    attention: str = "auto",
    **training: Any,
) -> ResolvedJob:
    """The job under one layout: global batch 16, of which two micro-batches accumulate on every rank, or two for each
    pipeline stage; with a stated `micro_batch_size`, as many as that makes.

    On a CPU the number of micro-batches is nearly all of a tiny step's time, and two show what eight do.
    `sequence_length` is what the job says; batches keep theirs. With one that `tensor` doesn't divide no sequence is
    split. `parallelism` adds to what LAYOUTS has under the strategy's name; a product has nothing there.
    """
    layout = LAYOUTS.get(strategy, {}).get(world_size, {}) | (parallelism or {})
    if micro_batch_size is None:
        degrees = ParallelismSpec.model_validate(layout)
        whole = training.get("global_batch_size", GLOBAL_BATCH) // degrees.data_parallel_size
        micro_batch_size = max(1, whole // (2 * degrees.pipeline))
    settings: dict[str, Any] = {
        "steps": steps,
        "global_batch_size": GLOBAL_BATCH,
        "micro_batch_size": micro_batch_size,
        "learning_rate": 3e-3,
        "gradient_clip": 0.5,
        "precision": "fp32",
        "schedule": {"kind": "cosine", "warmup_steps": 3},
        "seed": 11,
    }
    spec = JobSpec.model_validate(
        {
            "name": "tiny",
            "model": ({"source": source, "adapter": adapter} if source else {"config": model or MODEL})
            | ({} if attention == "auto" else {"attention": attention}),
            "data": {
                "train": [{"path": "unused", "format": "text"}],
                "sequence_length": sequence_length,
                **({} if document_masks else {"document_masks": False}),
            },
            "training": settings | training,
            "parallelism": layout,
        }
    )
    assert not isinstance(spec.parallelism, str)
    return ResolvedJob(
        spec=spec,
        parallelism=spec.parallelism,
        num_hosts=1,
        processes_per_host=world_size,
        steps=steps,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=spec.training.global_batch_size
        // micro_batch_size
        // spec.parallelism.data_parallel_size,
        activation_checkpointing=activation_checkpointing,  # type: ignore[arg-type]
        learning_rate=spec.training.learning_rate,
    )


def strategy_name(layout: ParallelismSpec) -> str:
    """What the engine calls itself, so that a run of another engine than the one meant is no proof."""
    if layout.engine == "deepspeed":
        return f"zero{layout.zero_stage}"
    degrees = {axis: getattr(layout, axis) for axis in ("pipeline", "tensor", "context", "expert")}
    if max(degrees.values()) == 1:
        if layout.data_shard == 1:
            return "ddp"
        return "hsdp" if layout.data_replicate > 1 else "fsdp"
    if layout.data_shard > 1:
        degrees |= {"fsdp": layout.data_shard, "replicate": layout.data_replicate}
    else:
        degrees["ddp"] = layout.data_replicate
    return "-".join(f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1)


@dataclass(frozen=True)
class TinyBatch:
    """A micro-batch as `trainer.data.MicroBatch` looks to a strategy."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None

    @property
    def num_target_tokens(self) -> int:
        """Labels that count."""
        return int((self.labels[:, 1:] != IGNORED_LABEL).sum())


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Step's sequences (16, 24) and labels; lengths differ a lot, so equal weights per rank would be wrong.

    A smaller global batch is the first of them.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(0, VOCAB_SIZE, (GLOBAL_BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (GLOBAL_BATCH, 1), generator=generator)
    tokens = (start + stride * torch.arange(SEQUENCE_LENGTH)) % VOCAB_SIZE
    lengths = torch.randint(3, SEQUENCE_LENGTH + 1, (GLOBAL_BATCH, 1), generator=generator)
    padding = torch.arange(SEQUENCE_LENGTH) >= lengths
    return tokens.masked_fill(padding, 0), tokens.masked_fill(padding, IGNORED_LABEL)


def document_positions(step: int) -> torch.Tensor:
    """(16, 24): positions that begin anew at one or two places of each sequence, seldom where a rank's pieces end."""
    generator = torch.Generator().manual_seed(2000 + step)
    positions = torch.arange(SEQUENCE_LENGTH).repeat(GLOBAL_BATCH, 1)
    for row in positions:
        for cut in sorted(torch.randint(2, SEQUENCE_LENGTH - 2, (2,), generator=generator).tolist()):
            row[cut:] = torch.arange(SEQUENCE_LENGTH - cut)
    return positions


def rank_batches(job: ResolvedJob, step: int, rank: int, *, is_packed: bool = False) -> list[TinyBatch]:
    """The micro-batches of one rank: micro-step a, rank r takes block a x ranks + r.

    `is_packed`: two or three documents a sequence, cut at places of its own.
    """
    tokens, labels = global_batch(step)
    positions = document_positions(step)
    num_ranks, size = job.parallelism.data_parallel_size, job.micro_batch_size
    starts = [(a * num_ranks + rank) * size for a in range(job.gradient_accumulation_steps)]
    return [
        TinyBatch(tokens[part], labels[part], positions[part] if is_packed else None)
        for part in (slice(start, start + size) for start in starts)
    ]


def global_targets(step: int, num_sequences: int = GLOBAL_BATCH) -> int:
    """Labels that count in the whole global batch."""
    return int((global_batch(step)[1][:num_sequences, 1:] != IGNORED_LABEL).sum())
