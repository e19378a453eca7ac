"""The job spec: one YAML file that is planned, launched anywhere, and read by the trainer.

`JobSpec` is what a person writes and may say `auto`. `ResolvedJob` is what runs: no `auto` left, made by
`trainyard.planner.resolve` alone. World size = data_replicate x data_shard x tensor x pipeline x context.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from trainyard.spec.base import Name, SpecModel, apply_overrides, parse, read_yaml

SPEC_VERSION = 1
"""Laptop and image drift: the image refuses a spec newer than it knows."""

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class AdapterSpec(SpecModel):
    """A parameter-efficient adapter on a frozen base model."""

    kind: Literal["lora", "qlora"]
    rank: PositiveInt = 16
    alpha: float = Field(default=32.0, gt=0)
    dropout: Fraction = 0.0
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    """Names of the linear modules that get an adapter."""


class ModelSpec(SpecModel):
    """What is trained: an existing model (`source`) or a new one (`config`)."""

    source: str | None = None
    """Hugging Face directory: s3://, fsx://, tenant://, a local path, or a hub id."""
    config: dict[str, Any] | None = None
    """Hugging Face configuration with at least `model_type`: trains from random weights."""
    adapter: AdapterSpec | None = None
    attention: Literal["auto", "eager", "sdpa", "flash_attention_3"] = "auto"

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.source is None) == (self.config is None):
            raise ValueError("give exactly one of source (an existing model) and config (train from scratch)")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("config needs model_type, e.g. {model_type: llama, hidden_size: 512, ...}")
        if self.config is not None and self.adapter is not None:
            raise ValueError("an adapter needs source: a freshly initialized base model is nothing to adapt")
        return self


class DataSource(SpecModel):
    """Files of one format under one path."""

    path: str
    """A file or a folder: s3://, tenant:// (the tenant's data bucket), fsx://, or a local path."""
    format: Literal["text", "jsonl", "parquet", "tokens", "webdataset"]
    text_field: str = "text"
    """jsonl and parquet: the field that holds the text."""


class DataSpec(SpecModel):
    """What the model reads. One global sample order, whatever the number of ranks."""

    train: tuple[DataSource, ...] = Field(min_length=1)
    validation: tuple[DataSource, ...] = ()
    tokenizer: str | None = None
    """tokenizer.json or a Hugging Face tokenizer directory; default: the one beside model.source."""
    sequence_length: int = Field(default=1024, ge=2)
    """Tokens a sequence."""
    packing: bool = True
    """Concatenate documents into full sequences; otherwise one document a sequence, padded."""
    shuffle: bool = True


class ScheduleSpec(SpecModel):
    """The learning rate over steps; warm-up is linear from 0."""

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    final_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """The last step's learning rate, as a fraction of the peak."""
    decay_fraction: float = Field(default=0.2, gt=0.0, le=1.0)
    """wsd: the share of all steps, at the end, in which the rate falls."""


class OptimizerSpec(SpecModel):
    """The optimizer and its constants."""

    kind: Literal["adamw", "adamw_8bit", "adafactor", "muon"] = "adamw"
    """muon: for the matrices inside the blocks; embeddings, head, norms and biases stay with AdamW."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    average_decay: Fraction | None = None
    """Keeps a running average of the weights beside them, which each step moves by 1 - this; null: none."""


class TrainingSpec(SpecModel):
    """How long, how big a batch, and with which numbers."""

    steps: PositiveInt | None = None
    tokens: PositiveInt | None = None
    """Total training tokens, rounded up to whole steps."""
    epochs: float | None = Field(default=None, gt=0)
    global_batch_size: PositiveInt
    """Sequences per optimizer step, over all ranks and accumulation."""
    micro_batch_size: PositiveInt | Auto = "auto"
    """Sequences per rank and forward pass."""
    learning_rate: float = Field(gt=0)
    """Peak rate, stated for base_batch_size where that is given, else for global_batch_size."""
    base_batch_size: PositiveInt | None = None
    """The linear scaling rule: the rate used is learning_rate x global_batch_size / base_batch_size."""
    schedule: ScheduleSpec = ScheduleSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    gradient_clip: float | None = Field(default=1.0, gt=0)
    """Global norm above which gradients are scaled down; null: never."""
    precision: Literal["bf16", "fp16", "fp8", "fp32"] = "bf16"
    activation_checkpointing: Literal["none", "selective", "full"] | Auto = "auto"
    seed: int = Field(default=1234, ge=0)
    deterministic: bool = False
    """Deterministic kernels: the same bits on the same layout and hardware, at a cost in speed."""
    validation_every_steps: PositiveInt | None = None
    """Default: only after the last step."""
    validation_batches: PositiveInt = 16
    """Global batches read per validation."""
    cpu_threads: PositiveInt = 1
    """Intra-op threads a rank on CPU: part of what must not change for a bitwise resume."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        given = [name for name in ("steps", "tokens", "epochs") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of steps, tokens and epochs; given: {', '.join(given) or 'none'}")
        return self


class ParallelismSpec(SpecModel):
    """How the model and the batch are laid out over ranks."""

    engine: Literal["torch", "deepspeed"] = "torch"
    data_replicate: PositiveInt = 1
    """Copies of the (sharded) model; with deepspeed, its data-parallel degree, over which ZeRO shards."""
    data_shard: PositiveInt = 1
    """FSDP degree; 1 with data_replicate > 1 is plain DDP. Torch engine only."""
    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    context: PositiveInt = 1
    expert: PositiveInt = 1
    """Expert-parallel degree: divides data_shard x context."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = "1f1b"
    zero_stage: int = Field(default=0, ge=0, le=3)
    """DeepSpeed only."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """DeepSpeed only: where optimizer state lives."""

    @property
    def world_size(self) -> int:
        """Ranks: the product of all degrees (expert lies inside data_shard x context)."""
        return self.data_replicate * self.data_shard * self.tensor * self.pipeline * self.context

    @property
    def data_parallel_size(self) -> int:
        """Ranks that read different sequences."""
        return self.data_replicate * self.data_shard

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if self.engine == "torch":
            if self.zero_stage:
                raise ValueError("zero_stage belongs to engine: deepspeed; with torch, set data_shard (FSDP) instead")
            if self.offload != "none":
                raise ValueError("offload belongs to engine: deepspeed")
        else:
            for degree in ("data_shard", "tensor", "pipeline", "context", "expert"):
                if getattr(self, degree) != 1:
                    raise ValueError(
                        f"{degree} belongs to engine: torch; deepspeed shards over data_replicate by zero_stage"
                    )
            if self.offload != "none" and self.zero_stage == 0:
                raise ValueError("offload needs zero_stage 1, 2 or 3")
        if (self.data_shard * self.context) % self.expert:
            shards = self.data_shard * self.context
            raise ValueError(f"expert ({self.expert}) must divide data_shard x context ({shards})")
        return self


class CheckpointSpec(SpecModel):
    """When progress is saved, where, and how much of it is kept."""

    every_steps: PositiveInt | None = None
    every_minutes: Annotated[float, Field(gt=0)] | Auto | None = 15.0
    """Whichever of every_steps and every_minutes comes first; null: by steps alone; auto: what costs least by
    the time that a save takes (the first, after the first step, measures it) and how often the capacity fails."""
    keep_last: PositiveInt = 3
    asynchronous: bool = True
    destination: str | None = None
    """s3:// prefix or folder; default: the tenant's checkpoint bucket, or the trainer's output folder."""


class RecoverySpec(SpecModel):
    """What the hosts do when a rank dies or stands still: start all ranks again from the newest checkpoint."""

    max_restarts: int = Field(default=3, ge=0)
    """Restarts in place within window_minutes; 0: the first failure ends the attempt."""
    window_minutes: float = Field(default=60.0, gt=0)
    """A restart that lies further back no longer counts: a month's job may lose a rank every day."""
    backoff_seconds: float = Field(default=2.0, ge=0)
    """Pause before the window's first restart; doubled for each further one, at most 300."""
    hang_seconds: float | None = Field(default=300.0, gt=0)
    """A rank that finished no step for this long, and for ten times the median step, hangs; null: never."""
    start_minutes: float = Field(default=60.0, gt=0)
    """How long the first step may take, from the start of the ranks."""


class ComputeSpec(SpecModel):
    """The machines. The default is this one."""

    backend: Literal["sagemaker", "slurm", "local"] = "local"
    instance_type: str | None = None
    instance_count: PositiveInt = 1
    spot: bool = False
    max_hours: float = Field(default=24.0, gt=0, le=28 * 24)
    """Hours of running before SageMaker stops the job (at most 28 days)."""
    max_wait_hours: float | None = Field(default=None, gt=0)
    """spot: hours of waiting and running together; default: twice max_hours."""
    queue: str | None = None
    """One of the tenant's training queues; default: its first that offers the instance type."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.backend == "sagemaker":
            if self.instance_type is None:
                raise ValueError("backend sagemaker needs instance_type, e.g. ml.p5.48xlarge")
            if not self.instance_type.startswith("ml."):
                raise ValueError(f"SageMaker's instance types begin with 'ml.': ml.{self.instance_type}")
        if self.max_wait_hours is not None and self.max_wait_hours < self.max_hours:
            raise ValueError("max_wait_hours counts the running too, so it must be at least max_hours")
        return self


class BudgetSpec(SpecModel):
    """What the job may cost."""

    max_usd: float = Field(gt=0)


class JobSpec(SpecModel):
    """Everything about one training job."""

    version: int = Field(default=SPEC_VERSION, ge=1)
    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")
    """Lower-case letters, digits and dashes, at most 40: SageMaker names and S3 prefixes are made from it."""
    tenant: Name | None = None
    """Required to launch on AWS; the bare trainer does without."""
    task: Literal["causal_lm", "image_classification", "vision_language"] = "causal_lm"
    model: ModelSpec
    data: DataSpec
    training: TrainingSpec
    parallelism: ParallelismSpec | Auto = "auto"
    checkpoint: CheckpointSpec = CheckpointSpec()
    recovery: RecoverySpec = RecoverySpec()
    compute: ComputeSpec = ComputeSpec()
    budget: BudgetSpec | None = None

    @field_validator("version")
    @classmethod
    def _known_version(cls, version: int) -> int:
        if version > SPEC_VERSION:
            raise ValueError(f"this trainyard reads job specs up to version {SPEC_VERSION}; upgrade it (or the image)")
        return version


class ResolvedJob(SpecModel):
    """A job with every `auto` decided. The trainer's modules take this and nothing else."""

    spec: JobSpec
    """The job as written."""
    parallelism: ParallelismSpec
    num_hosts: PositiveInt
    processes_per_host: PositiveInt
    steps: PositiveInt | None
    """Optimizer steps; None until the data is read, for a job stated in epochs."""
    micro_batch_size: PositiveInt
    gradient_accumulation_steps: PositiveInt
    activation_checkpointing: Literal["none", "selective", "full"]
    learning_rate: float
    """Peak, after the linear scaling rule."""
    hours_between_failures: float | None = Field(default=None, gt=0)
    """Mean, of all hosts together, for checkpoint.every_minutes: auto."""

    @property
    def world_size(self) -> int:
        """Ranks over all hosts."""
        return self.parallelism.world_size

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        assert self.world_size == self.num_hosts * self.processes_per_host
        batch = self.micro_batch_size * self.gradient_accumulation_steps * self.parallelism.data_parallel_size
        assert batch == self.spec.training.global_batch_size
        return self


def load_job(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """The job in a YAML file with `section.key=value` overrides applied; InputError is one actionable line."""
    return parse(JobSpec, apply_overrides(read_yaml(path), overrides), str(path))
