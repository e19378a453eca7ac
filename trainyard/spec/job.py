"""The job spec: one YAML file that is planned, launched anywhere, and read by the trainer.

`JobSpec` is what a person writes and may say `auto`. `ResolvedJob` is what runs: no `auto` left, made by
`trainyard.planner.resolve` alone. World size = data_replicate x data_shard x tensor x pipeline x context.
"""

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from trainyard.errors import InputError
from trainyard.spec.backends import BackendName
from trainyard.spec.base import Name, SpecModel, apply_overrides, parse, read_yaml, worded
from trainyard.spec.checkpoint_names import is_foreign, names_no_bucket
from trainyard.spec.retention import BestSpec, Retention
from trainyard.spec.tracking import JobTrackingSpec
from trainyard.spec.words import counted

SPEC_VERSION = 1
"""Laptop and image drift: the image refuses a spec newer than it knows."""

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
"""Of waiting, a day at most: torch counts milliseconds in 32 bits."""


class AdapterSpec(SpecModel):
    """A parameter-efficient adapter on a frozen base model."""

    kind: Literal["lora", "qlora"]
    """lora: the base model stays in the type that the job computes in. qlora: its blocks' matrices, packed experts
    included, are stored in 4 bits (NF4 with double quantization, 0.52 bytes a weight) and read for each product; for
    every torch engine, not for deepspeed. What reading costs on a GPU is not measured yet: run a job both ways and
    compare step_seconds in metrics.jsonl."""
    rank: PositiveInt = 16
    """Rows of an adapter's first matrix and columns of its second."""
    alpha: float = Field(default=32.0, gt=0)
    """What an adapter gives is multiplied by alpha / rank."""
    dropout: Share = 0.0
    """The share of an adapter's inputs that are dropped in training."""
    targets: tuple[str, ...] = Field(default=("q_proj", "v_proj"), min_length=1)
    """Names of the linear modules that get an adapter; the packed experts of a mixture get none."""


class ModelSpec(SpecModel):
    """What is trained: an existing model (`source`) or a new one (`config`)."""

    source: str | None = None
    """Hugging Face directory with all of its weights: s3://, fsx://, tenant://, artifact:// (the tenant's
    artifacts bucket, where `trainyard promote` puts models) or a local path. Nothing is asked of the Hugging Face Hub:
    `hf download ID --local-dir FOLDER` first. (`trainyard plan` knows many models by their id.)"""
    config: dict[str, Any] | None = None
    """Hugging Face configuration with at least `model_type`: trains from random weights. One that states no number of
    positions (max_position_embeddings, GPT-2's n_positions) gets at least data.sequence_length of them."""
    adapter: AdapterSpec | None = None
    attention: Literal["auto", "eager", "sdpa", "varlen", "flash_attention_3"] = "auto"
    """Which attention runs; what really runs, and why, is said at the start and in result.json. sdpa: torch's own
    choice of kernel, which is no flash kernel where packed documents need a mask. varlen: torch's flash kernel told
    where documents begin, without a mask; NVIDIA GPUs alone, bf16 and fp16. flash_attention_3: the package of that
    name, on Hopper GPUs. auto: varlen where it can be had and documents are kept apart, else sdpa, else eager. Nothing
    but sdpa and eager has run yet: `pytest tests/trainer/test_attention.py -k gpu` compares varlen with sdpa."""

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
    """jsonl and parquet: the field that holds the text; with prompt_field, the answer."""
    prompt_field: str | None = None
    """jsonl and parquet: the field with a prompt. It is tokenized as it stands, before text_field (which then is what
    the model shall answer), and without a chat template; write messages for a chat model."""
    messages_field: str | None = None
    """jsonl and parquet: the field with a conversation, a list of {role, content}, which the chat template renders. A
    field `tools` beside it is given to the template."""
    learn: Literal["assistant", "all"] = "assistant"
    """With prompt_field or messages_field: what counts in the loss, the assistant's turns (the answer) or all. A
    turn of `weight` 0 is not learnt with `assistant`, and a bad record with `all`."""

    @model_validator(mode="after")
    def _fields_of_records(self) -> Self:
        given = [name for name in ("prompt_field", "messages_field") if getattr(self, name) is not None]
        if len(given) == 2:
            raise ValueError("prompt_field and messages_field: a record holds a prompt or a conversation; give one")
        if given and self.format not in ("jsonl", "parquet"):
            raise ValueError(f"{given[0]} belongs to format jsonl or parquet (given: {self.format})")
        if self.learn == "all" and not given:
            raise ValueError("learn: all is for records with prompt_field or messages_field; plain text is all learnt")
        return self


class ValidationSource(DataSource):
    """Files to validate on. Those of one name make up one set, those without a name the default set."""

    name: Name | None = None
    """Names a further set: its loss and perplexity are recorded under this name."""
    every_steps: PositiveInt | None = None
    """Steps between validations on this named set; default: training.validation_every_steps."""
    batches: PositiveInt | None = None
    """Global batches read per validation on this named set; default: training.validation_batches."""

    @model_validator(mode="after")
    def _schedule_of_a_name(self) -> Self:
        for field in ("every_steps", "batches"):
            if self.name is None and getattr(self, field) is not None:
                raise ValueError(
                    f"{field} needs a name; sources without one follow training.validation_every_steps and"
                    " training.validation_batches"
                )
        return self


class DataSpec(SpecModel):
    """What the model reads. One global sample order, whatever the number of ranks."""

    train: tuple[DataSource, ...] = Field(min_length=1)
    validation: tuple[ValidationSource, ...] = ()
    """Sources without a name are one set, whose loss is `validation_loss`; each name is a set of its own."""
    tokenizer: str | None = None
    """tokenizer.json or a Hugging Face tokenizer directory; default: the one beside model.source. A directory brings
    its end token and chat template along."""
    chat_template: str | None = None
    """Jinja file that renders messages_field; default: chat_template.jinja, else tokenizer_config.json's, beside the
    tokenizer. `strftime_now` tells a fixed date, so that a resume on another day reads the same text."""
    streaming: bool = False
    """Reads s3:// and tenant:// sources where they lie, in the same order as a copy: ready-made tokens of train by
    ranges, ahead of training (sizes and ETags are checked), other formats once, to tokenize them. false: a launched job
    gets them copied to each host before it starts."""
    shared_tokens: bool = False
    """Keeps what is tokenized beside the checkpoints: each host tokenizes a share for all, and a resume on new machines
    nothing. For data that all hosts see as the same files, by streaming or on one file system; copies of their own, as
    launched jobs get without streaming, differ in age, and each host tokenizes its own."""
    stream_cache_gib: float = Field(default=16.0, gt=0)
    """streaming: disk that a host keeps what it has read on, for its next epoch."""
    max_bad_records: int = Field(default=0, ge=0)
    """Records of train, and of each validation set, that may be left out because they are broken (not JSON, not UTF-8,
    a missing field, no message ...). One more ends the job; each is counted, the first few are named. webdataset:
    samples count as training meets them, by all ranks together, from 0 again after a resume."""
    sequence_length: int = Field(default=1024, ge=2)
    """Tokens a sequence."""
    packing: bool = True
    """Concatenate documents into full sequences; otherwise one document a sequence, padded."""
    document_masks: bool = True
    """With packing: documents of one sequence don't see each other. Attention stays inside a document, positions
    restart at each, and a document's first token is not predicted from the one before, so that packing changes no
    document's loss or gradient. false: text runs on over document ends, as in much of pretraining. Needs a model that
    takes its documents from position ids (the trainer refuses others)."""
    shuffle: bool = True

    @model_validator(mode="after")
    def _one_schedule_a_name(self) -> Self:
        schedules: dict[Name | None, tuple[int | None, int | None]] = {}
        for source in self.validation:
            schedule = (source.every_steps, source.batches)
            if schedules.setdefault(source.name, schedule) != schedule:
                raise ValueError(
                    f"validation set {source.name}: its sources disagree on every_steps or batches; give all the same"
                )
        return self


Channels = tuple[float, float, float]
"""One number each for red, green and blue."""


class ImageSpec(SpecModel):
    """How images become tensors, and what is learnt of them. For task image_classification and vision_language.

    Data is WebDataset: tar shards whose records are members of one name, an image (jpg, jpeg, png, webp) beside its
    text. image_classification reads the class from `cls` (a number or a name) or from `json`'s `label`;
    vision_language reads `json`: `messages`, or `question` and `answer`, or `caption`; or `txt`, a caption.

    What the model's files say counts where a field here doesn't: `image_processor` of processor_config.json; where that
    has none, preprocessor_config.json. Its `do_normalize: false` makes the defaults mean 0 and std 1.

    Scaling is bilinear, or by the filter (`resample`) that those files name, with support over all source pixels. A
    sample that can't be learnt from (a torn image, a class that the model doesn't have) is found when it is read:
    those that all ranks have met count against data.max_bad_records, and the next sample of the shards stands in.
    """

    size: PositiveInt | None = None
    """Pixels a side; default: what the model's configuration says, else those files, else 224."""
    augment: bool = True
    """Training images of image_classification: a crop of random size and place, flipped half the time. Drawn from
    (training.seed, place in the global order), so it is the same for any number of ranks and after a resume."""
    crop_area: tuple[float, float] = (0.08, 1.0)
    """Share of the image that a random crop covers, from and to (0.08 to 1 are Inception's)."""
    resize_ratio: float = Field(default=0.875, gt=0, le=1)
    """Without augmentation, and in validation: the shorter side becomes size / this, then the centre is cut out."""
    mean: Channels | None = None
    """Subtracted from values in 0..1; default: what those files say, else ImageNet's."""
    std: Channels | None = None
    """Divided by, after mean; default: as mean's."""
    num_classes: PositiveInt | None = None
    """image_classification; default: the model's. Another number than model.source has gives it a new, random head."""
    class_names: str | None = Field(default=None, min_length=1)
    """image_classification: a text file with one class name a line, for labels that are names; a class's number is that
    of its line, from 0 on. null: labels are numbers."""
    label_smoothing: Share = 0.0
    """image_classification: this share of the target is spread over all classes. Validation does without."""
    batch_norm: Literal["synchronized", "local", "frozen"] = "synchronized"
    """Models with batch normalization. synchronized: statistics over the micro-batches of all ranks, so that R ranks
    with micro-batches of m equal one process with R x m. local: over a rank's own, without the communication; other
    numbers on other layouts. frozen: model.source's running averages, never updated."""
    freeze_vision: bool = False
    """vision_language: the vision tower keeps its weights; projector and language model are trained."""
    decode_threads: PositiveInt = 4
    """Threads a rank that read and decode images, one step ahead of the training."""

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        low, high = self.crop_area
        if not 0 < low <= high <= 1:
            raise ValueError(f"crop_area {low}, {high}: must be two shares of the image, 0 < from <= to <= 1")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError("std is divided by: every channel's must be above 0")
        return self


class ScheduleSpec(SpecModel):
    """The learning rate over steps; warm-up is linear from 0."""

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    final_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """The last step's learning rate, as a fraction of the peak."""
    decay_fraction: float = Field(default=0.2, gt=0.0, le=1.0)
    """wsd: the share of all steps, at the end, in which the rate falls."""

    def notes(self, num_steps: int) -> tuple[str, ...]:
        """What is odd for a job of so many steps, though a short trial of a long job may mean it."""
        if num_steps == 1 and self.kind != "constant" and not self.warmup_steps and not self.final_fraction:
            return (
                f"training.schedule: {self.kind} ends at final_fraction, 0, in the last step, which is the job's only"
                " one: it changes nothing; give it kind: constant or more steps",
            )
        if self.warmup_steps > num_steps:
            return (
                f"training.schedule.warmup_steps: {self.warmup_steps} is more than the job's "
                f"{counted(num_steps, 'step')}, so its"
                f" learning rate ends at {num_steps / self.warmup_steps:.0%} of the peak",
            )
        if self.warmup_steps == num_steps > 1:
            decay = "" if self.kind == "constant" else f", and kind: {self.kind} never lowers it"
            return (
                f"training.schedule.warmup_steps: {num_steps} is all of the job's steps, so its learning rate reaches"
                f" the peak in the last one{decay}",
            )
        begin = self.decay_begins_after(num_steps)
        if self.kind == "wsd" and begin < self.warmup_steps < num_steps:
            return (
                f"training.schedule.decay_fraction: {self.decay_fraction:g} would lower the learning rate from step"
                f" {begin} of {num_steps} on, and warm-up ends at {self.warmup_steps}: it falls from there, and never"
                " stays at the peak",
            )
        return ()

    def decay_begins_after(self, num_steps: int) -> int:
        """wsd: the last step at the peak, of a job of so many; warm-up may end later."""
        return num_steps - max(1, round(self.decay_fraction * num_steps))


class OptimizerSpec(SpecModel):
    """The optimizer and its constants."""

    kind: Literal["adamw", "adamw_8bit", "adafactor", "muon", "sgd"] = "adamw"
    """adamw: torch's fused kernel under every engine. adamw_8bit: both averages in 8 bits a weight, with a quarter of
    the memory and nearly the same training. adafactor: a row and a column a matrix in place of a second average.
    muon: for the matrices inside the blocks, a convolution's kernels being one (of images' patches, too); embeddings of
    words, head, norms and biases stay with AdamW. Those two gather each matrix's gradient. With engine: deepspeed it is
    adamw alone. sgd: with momentum and L2 regularization (weight_decay is added to the gradient), what ResNets are
    trained with."""
    momentum: Share = 0.9
    """sgd: how much of the last step's direction is kept."""
    nesterov: bool = False
    """sgd: look ahead along the momentum; needs momentum above 0."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    average_decay: Share | None = None
    """Keeps a running average of the weights beside them, which each step moves by 1 - this; null: none. It lies in the
    checkpoints, and `trainyard export --average` writes it out; validation judges the weights themselves."""
    router_bias_rate: float | None = Field(default=None, gt=0)
    """DeepSeek-V3 and families like it: by how much each step moves the bias by which routers choose experts, against
    each expert's load over the whole batch (0.001 in its report, 0 at the end); null: it stays as it is. One small
    message a step more."""

    @model_validator(mode="after")
    def _momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov looks ahead along the momentum: set momentum above 0, or nesterov: false")
        return self


class TrainingSpec(SpecModel):
    """How long, how big a batch, and with which numbers."""

    steps: PositiveInt | None = None
    tokens: PositiveInt | None = None
    """Total training tokens, rounded up to whole steps."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over train's sequences (packed ones: of sequence_length tokens), all together rounded up to whole
    steps."""
    global_batch_size: PositiveInt
    """Sequences per optimizer step, over all ranks and accumulation."""
    micro_batch_size: PositiveInt | Auto = "auto"
    """Sequences per rank and forward pass."""
    learning_rate: float = Field(gt=0)
    """Peak rate, stated for base_batch_size where that is given, else for global_batch_size."""
    base_batch_size: PositiveInt | None = None
    """The linear scaling rule: the rate used is learning_rate x global_batch_size / base_batch_size; null: as stated.

    It holds for SGD while the batch is far below the gradient's noise scale, with a warm-up (Goyal et al. 2017,
    arXiv:1706.02677; McCandlish et al. 2018, arXiv:1812.06162): beyond that scale a larger rate diverges, or no longer
    saves steps. AdamW, Adafactor and Muon divide by the gradient's size, for them the square root of the ratio is the
    better guess (Malladi et al. 2022, arXiv:2205.10287): state the rate itself, or a base_batch_size that gives it."""
    schedule: ScheduleSpec = ScheduleSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    gradient_clip: float | None = Field(default=1.0, gt=0)
    """Global norm above which gradients are scaled down; null: never."""
    precision: Literal["bf16", "fp16", "fp8", "fp32", "fp64"] = "bf16"
    """Matrix products; weights and moments are fp32 beside it. fp8: as bf16, and the products of the blocks' linear
    layers in 8 bits, by torchao, on GPUs from Ada and Hopper on; with compile: true, without which its scaling costs
    more than it saves. For causal_lm, full or with lora (the frozen layers; adapters compute in bf16), and the torch
    engine without tensor; which layers were converted, and which not, is said at the start and in result.json. fp64:
    all of it, for proofs of numerics; torch engine only, slow everywhere (an H100 does fp64 at less than a tenth of its
    bf16 rate)."""
    loss: Literal["auto", "logits", "chunked"] = "auto"
    """How the cross-entropy is computed. logits: from the whole logits, micro-batch x sequence x vocabulary of them.
    chunked: in the model's head, 1,024 positions at a time and with their gradients, so that a long sequence's logits
    never exist; same loss and gradient. auto: chunked where a micro-batch is longer than a chunk and the model leaves
    its head's output as it is; with parallelism.tensor above 1, each rank with its own part of the vocabulary. What was
    chosen is said at the start and in result.json."""
    activation_checkpointing: Literal["none", "selective", "full"] | Auto = "auto"
    compile: bool = False
    """torch.compile, a transformer block at a time: faster steps after a first one that takes a minute or so. Needs
    triton on a GPU, g++ on a CPU. With every torch layout but experts spread over ranks; schedules and recomputation
    that it doesn't go with are refused."""
    seed: int = Field(default=1234, ge=0, lt=2**63)
    deterministic: bool = False
    """Deterministic kernels and seeds: the same bits on the same layout and hardware. The cost on a CPU is 1 % of
    processor time (measured, in turns); on a GPU it is not measured yet: benchmarks/deterministic_cost.py does."""
    validation_every_steps: PositiveInt | None = None
    """Default: only after the last step."""
    validation_batches: PositiveInt = 16
    """Global batches read per validation."""
    cpu_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Intra-op threads a rank on CPU: part of what must not change for a bitwise resume."""
    observe_every_steps: PositiveInt = 50
    """Every so many steps all ranks compare their times (a straggler is named) and the growth of their memory."""
    phase_ranges: bool = False
    """Marks the phases of each step as NVTX ranges, for Nsight Systems; they cost a few microseconds a step."""
    on_anomaly: Literal["stop", "skip", "rollback"] = "stop"
    """A loss or gradient norm that is no number, or a spike: stop with a snapshot, or leave the batch out. skip makes
    its update on no rank; it looks at the loss before the update, two small messages more a step; torch engine only.
    rollback goes back to the newest checkpoint and from there passes over the batch, as every later start does: any
    engine, one small message a step, and a checkpoint before the first step."""
    spike_factor: float | None = Field(default=None, gt=1)
    """A loss or gradient norm above so many times its running median, and far outside its usual spread, is a spike;
    null: only what is no finite number any more is an anomaly."""
    max_skips: PositiveInt = 5
    """skip: so many batches left out in a row end the job: then it is no longer the batch. rollback: so many since
    the last new checkpoint."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        given = [name for name in ("steps", "tokens", "epochs") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of steps, tokens and epochs; given: {', '.join(given) or 'none'}")
        return self


class FsdpSpec(SpecModel):
    """How FSDP takes a model apart (engine: torch with data_shard above 1, and every product)."""

    wrap: Literal["block", "size"] = "block"
    """What is gathered at once. block: one transformer block. size: as many blocks that follow each other as have
    min_parameters together: fewer and larger messages for a model of small blocks, at more memory."""
    min_parameters: PositiveInt = 100_000_000
    """wrap: size: parameters of a unit, at least; the last unit may have fewer."""
    reshard_after_forward: bool | Auto = "auto"
    """Whether a unit's weights are dropped after its forward pass and gathered again for the backward one (ZeRO-3),
    or kept (ZeRO-2: a third less communication, the whole model's compute copy in memory). auto: dropped, but kept
    over a step in a pipeline, where each micro-batch would gather them anew."""
    prefetch_units: int = Field(default=0, ge=0, le=8)
    """Units asked for ahead of the one that runs, forward and backward; each takes its gathered size in memory.
    0: FSDP's own order, which asks for the next one while this one runs, as far as the CPU is ahead of the GPU."""


class ZeroSpec(SpecModel):
    """DeepSpeed's ZeRO: sizes in elements (of what is sent), not bytes. For engine: deepspeed alone."""

    reduce_bucket_elements: PositiveInt | Auto = "auto"
    """Gradients that are reduced in one message. auto: 1e8, or all of them where they are fewer; DeepSpeed's own 5e8
    allocates 2 GB a rank for the smallest model."""
    allgather_bucket_elements: PositiveInt | Auto = "auto"
    """Stages 1 and 2: weights that are gathered in one message after the update. auto: as reduce_bucket_elements."""
    overlap: bool | Auto = "auto"
    """Reduce gradients while the backward pass goes on, at twice the bucket's memory. auto: on GPUs."""
    prefetch_elements: Annotated[int, Field(ge=0)] | Auto = "auto"
    """Stage 3: weights gathered ahead of their use; 0: none. auto: as reduce_bucket_elements; 0 from NVMe."""
    persistence_threshold_elements: int = Field(default=100_000, ge=0)
    """Stage 3: parameters with fewer stay whole on every rank: norms and biases, too small to be worth a message."""
    max_live_elements: PositiveInt | Auto = "auto"
    """Stage 3: gathered weights beyond which none is prefetched. auto: 1e9."""
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
    """Stage 3: where a rank's part of the weights lives between uses; needs offload for the optimizer state too."""
    nvme_path: str | None = None
    """Folder on a local NVMe disk, for offload: nvme; its files go when the job ends well. Needs libaio."""


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
    """DeepSpeed only: where optimizer state lives, and is updated."""
    fsdp: FsdpSpec = FsdpSpec()
    zero: ZeroSpec = ZeroSpec()
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """More of DeepSpeed's own configuration, as it stands in its JSON (zero_optimization, comms_logger, ...), merged
    into what trainyard makes. What DeepSpeed does not know is refused, and what another field states."""

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
            for section in ("zero", "deepspeed"):
                if getattr(self, section) not in (ZeroSpec(), {}):
                    raise ValueError(f"{section} belongs to engine: deepspeed")
        else:
            for degree in ("data_shard", "tensor", "pipeline", "context", "expert"):
                if getattr(self, degree) != 1:
                    raise ValueError(
                        f"{degree} belongs to engine: torch; deepspeed shards over data_replicate by zero_stage"
                    )
            if self.offload != "none" and self.zero_stage == 0:
                raise ValueError("offload needs zero_stage 1, 2 or 3")
            if self.fsdp != FsdpSpec():
                raise ValueError("fsdp belongs to engine: torch; with deepspeed, see zero")
            self._check_offload()
        if (self.data_shard * self.context) % self.expert:
            shards = self.data_shard * self.context
            raise ValueError(f"expert ({self.expert}) must divide data_shard x context ({shards})")
        return self

    def _check_offload(self) -> None:
        weights = self.zero.offload_parameters
        if weights != "none" and self.zero_stage != 3:
            raise ValueError(f"zero.offload_parameters: {weights} needs zero_stage: 3, which alone splits the weights")
        if weights != "none" and self.offload == "none":
            raise ValueError(f"zero.offload_parameters: {weights} needs offload: cpu (or nvme) for the optimizer too")
        if "nvme" in (weights, self.offload):
            if self.zero_stage != 3:
                raise ValueError("offload: nvme needs zero_stage: 3")
            if self.zero.nvme_path is None:
                raise ValueError("offload: nvme needs zero.nvme_path, a folder on a local NVMe disk")
        elif self.zero.nvme_path is not None:
            raise ValueError("zero.nvme_path is for offload: nvme")


class CheckpointSpec(SpecModel):
    """When progress is saved, where, and how much of it is kept."""

    every_steps: PositiveInt | Auto | None = None
    """Optimizer steps from one save to the next. auto: as many as cost least, by what a save takes (the first, after
    the first step, measures it) and how often the capacity fails, but at least one every every_minutes."""
    every_minutes: Annotated[float, Field(gt=0)] | Auto | None = 15.0
    """Whichever of every_steps and every_minutes comes first; null: by steps alone; auto: as every_steps: auto, without
    a limit."""
    keep_last: PositiveInt = 3
    """How many of the newest good ones stay. Of one alone, every byte is read back from the destination before the one
    before it goes."""
    keep_every_steps: PositiveInt | None = None
    """Good ones of every so many steps stay too, for good."""
    keep_best: BestSpec | None = None
    """Those with the best values of a metric stay too."""
    asynchronous: bool = True
    last_save_seconds: float = Field(default=30.0, ge=0, le=60)
    """How long the job's last save, at its end or before it stops, is tried again where disk or S3 don't take it (each
    save tries its requests again by itself as well); then what came after the checkpoint before it is lost."""
    destination: str | None = Field(default=None, min_length=1)
    """s3:// prefix or folder; default: the trainer's output folder. Jobs of a tenant have none: theirs go to the
    tenant's checkpoint bucket, where policies, quotas and resumes look for them."""
    local_directory: str | None = Field(default=None, min_length=1)
    """Folder on each host's own fast disk (NVMe): a save is committed there first, then goes to `destination` while
    training goes on. A restart takes a step from the hosts' disks where they hold it whole and the destination has no
    newer one. Two steps fit at most, of one host's ranks each; with peer_copy, of two hosts'."""
    peer_copy: bool = False
    """local_directory: each host's part also goes to the next host's disk, so that the loss of one disk doesn't cost
    the newest step. Needs two hosts or more."""

    @property
    def retention(self) -> Retention:
        """Which ones stay."""
        return Retention(self.keep_last, self.keep_every_steps, self.keep_best)

    @model_validator(mode="after")
    def _tiers(self) -> Self:
        destination = self.destination or ""
        if is_foreign(destination) or names_no_bucket(destination):
            raise ValueError(
                f"destination: must be an s3://BUCKET/PREFIX or a folder, e.g. /fsx/checkpoints (given:"
                f" {self.destination})"
            )
        if self.local_directory is not None and "://" in self.local_directory:
            raise ValueError(
                f"local_directory: must be a folder on each host's own disk, e.g. /tmp/checkpoints (given:"
                f" {self.local_directory}); an s3:// prefix is a destination"
            )
        if self.peer_copy and self.local_directory is None:
            raise ValueError("peer_copy copies what lies in local_directory: set that too, e.g. /tmp/checkpoints")
        return self


class ElasticSpec(SpecModel):
    """On how many instances a job may go on where it can't have all that it was launched on, or may have more."""

    min_instances: PositiveInt
    """No fewer: below it the job waits for a person."""
    max_instances: PositiveInt
    """No more; training.global_batch_size and learning_rate are stated for as many."""
    batch: Literal["keep", "adapt"] = "keep"
    """keep: the same global batch whatever the instances, by more or less accumulation: the same steps, losses equal
    within rounding. adapt: a batch in proportion to the instances, more steps over the same samples, and a learning
    rate with it: by training.base_batch_size where that is given, else in proportion for sgd, by the square root for
    the other optimizers (see base_batch_size); the schedule goes by samples. Another run than that on all instances,
    and a quicker one where accumulation would be the slower half."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_instances > self.max_instances:
            raise ValueError(f"min_instances {self.min_instances}: must be at most max_instances {self.max_instances}")
        return self

    def share(self, num_instances: int) -> Fraction:
        """Of the stated batch: what a step has on so many instances."""
        return Fraction(num_instances, self.max_instances) if self.batch == "adapt" else Fraction(1)


STOP_SECONDS = 110.0
"""What a host has from SIGTERM to the end of its save: SageMaker kills after 120 s, the rest is for the report."""


class RecoverySpec(SpecModel):
    """What the hosts do when a rank dies or stands still: start all ranks again from the newest checkpoint."""

    max_restarts: int = Field(default=3, ge=0)
    """Restarts in place within window_minutes; 0: the first failure ends the attempt."""
    window_minutes: float = Field(default=60.0, gt=0, le=28 * 24 * 60)
    """A restart that lies further back no longer counts: a month's job may lose a rank every day."""
    backoff_seconds: float = Field(default=2.0, ge=0, le=300)
    """Pause before the window's first restart; doubled for each further one, at most 300."""
    max_resumes: int = Field(default=0, ge=0, le=20)
    """On SageMaker: how often the tenant's resumer starts the job again when it has failed for lack of capacity, by an
    error of SageMaker's own or a lost host, or asks to be resumed; 0: a person does. What spot capacity takes SageMaker
    starts again by itself, and doesn't count. A second failure from the same checkpoint is left to a person. On Slurm:
    how often the job requeues itself when its time limit comes or a host is lost; what Slurm requeues doesn't count. On
    Kubernetes and Ray: how often all hosts are started again when one is lost or taken."""
    elastic: ElasticSpec | None = None
    """On how many instances the job may go on: after a lack of capacity the resumer takes about half as many each time,
    `trainyard resume --set compute.instance_count=N` any number within the limits. null: as many as it was launched
    on, unless a person says otherwise."""
    hang_seconds: Seconds | None = 120.0
    """A rank that finished no step for this long, and for ten times the median step, hangs; before the first step of a
    restart it may take three times as long as the longest start so far, if that is longer (and a minute at least), and
    where blocks are compiled a set's first validation of a start may take start_minutes. A process that is stopped for
    this long hangs whatever it is at. null: never; then the checkpoint-age alarm alone tells of it."""
    start_minutes: float = Field(default=60.0, gt=0, le=24 * 60)
    """How long the job's first step may take, from the last sign of life of the ranks; collectives wait as long until
    it is done. A save that takes longer is a hang too."""
    arrival_seconds: Seconds = 600.0
    """How long the ranks wait for each other at the start; then the ones that are missing are named. A host that has
    not come by then is lost, once the others' starts have failed without it (torchrun's, after 15 minutes at least)."""
    collective_seconds: Seconds | None = None
    """After the first step, how long a collective waits for a rank before it fails; saves and the job's end keep the
    start's limit. null: twice hang_seconds, at least 600, so that a hang is looked into before ranks give up."""

    @property
    def patience_seconds(self) -> float:
        """`collective_seconds` with its default."""
        return self.collective_seconds or max(600.0, 2 * (self.hang_seconds or 0.0))


GigabytesPerSecond = Annotated[float, Field(gt=0, le=10_000)]


class PreflightSpec(SpecModel):
    """What is measured before the first step of every start: whether the network is the one that is paid for.

    A large all-reduce between hosts (groups of about eight, one GPU of each, all GPUs at once) and inside each host,
    held against a floor of bus bandwidth; results are checked element by element. It takes seconds.
    """

    collectives: Literal["stop", "warn", "off"] | Auto = "auto"
    """stop: below the floor twice in a row the start fails, with a line that says what was measured, which hosts it
    points at and what to do; it is repeated as recovery says, and a second one that says the same ends the job. warn:
    it says so and trains; wrong results stop the job even so. auto: stop on the GPUs of several hosts whose instance
    type has a floor between hosts (those with EFA), and wherever a floor is stated here; elsewhere off."""
    across_gb_per_second: GigabytesPerSecond | None = None
    """The floor between hosts, GB/s of bus bandwidth a GPU; null: 0.4 of the instance type's EFA rate, on GPUs."""
    host_gb_per_second: GigabytesPerSecond | None = None
    """The floor inside a host; null: 0.6 of what AWS' own health check asks of the instance type, on GPUs."""
    nccl_log: bool = False
    """NCCL says at every start which network it chose (NCCL_DEBUG=INFO, some tens of lines a rank): what
    scripts/runbooks/efa_not_used decides by, and the only sign of a fallback that reaches the floor all the same."""

    @property
    def stated_floors(self) -> dict[str, tuple[float, str]]:
        """{"across" or "host": (GB/s, where that comes from)}, as `trainyard.hardware.bandwidth` has them."""
        stated = {"across": self.across_gb_per_second, "host": self.host_gb_per_second}
        return {kind: (floor, f"preflight.{kind}_gb_per_second") for kind, floor in stated.items() if floor is not None}

    @model_validator(mode="after")
    def _floors_are_used(self) -> Self:
        if self.collectives == "off" and self.stated_floors:
            name = next(iter(self.stated_floors.values()))[1].removeprefix("preflight.")
            raise ValueError(f"{name}: nothing is measured with collectives: off; leave it out, or take stop or warn")
        return self


class SlurmSpec(SpecModel):
    """backend slurm: what a cluster must be told beside the machines (docs/clusters.md)."""

    directory: str | None = Field(default=None, pattern=r"^/[A-Za-z0-9._/-]+$")
    """Folder that the login node and all machines share; each job has a folder of its own in it. Default: on a tenant's
    cluster /fsx/cluster/trainyard, elsewhere the folder of jobs on this machine."""
    python: str | None = Field(default=None, pattern=r"^/[A-Za-z0-9._/-]+$")
    """Interpreter that has the trainer and its packages, as the machines (or the container) see it. Default: on a
    tenant's cluster /fsx/cluster/trainyard/venv/bin/python, in a container the training image's own, elsewhere the one
    that launches."""
    container_image: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:/@#+-]+$")
    """What pyxis' --container-image takes: a .sqsh file on the shared folder, or registry#name:tag. Default: none."""
    container_mounts: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/-]+$")], ...] = ()
    """HOST:CONTAINER, beside the shared folder and /fsx."""
    gpus_per_node: PositiveInt | None = None
    """Ask Slurm for so many, where GPUs are among its resources. Default: whole machines, with all they have."""
    account: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")
    qos: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")


class KubernetesSpec(SpecModel):
    """backend kubernetes: what a cluster with Kubeflow Trainer must be told beside the machines (docs/clusters.md)."""

    context: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:/@-]+$")
    """The cluster, as kubectl's configuration names it. Default: kubectl's current context at the launch."""
    namespace: str | None = Field(default=None, pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    """Where the job's objects go. Default: the tenant's name; without a tenant `default`."""
    service_account: str | None = Field(default=None, pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")
    """As whom the pods run: its IAM role (IRSA or EKS Pod Identity) reads the job's data and writes its checkpoints.
    Default: for a tenant's jobs `trainyard-job`, else the namespace's own."""
    image: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:/-]+@sha256:[0-9a-f]{64}$")
    """The training image, by digest. Default: the one that the tenant's platform published; without a tenant there is
    none."""
    volume_claim: str | None = Field(default=None, pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")
    """A persistent volume claim (ReadWriteMany, FSx for Lustre say) that every pod sees at /fsx. Default: none."""
    memory_gib: float | None = Field(default=None, gt=0, le=32768, allow_inf_nan=False)
    """GiB of a machine's memory that its pod asks for and may have, /dev/shm among it. Default: 80 % of the instance
    type's; without a type none is asked for."""
    disk_gib: int | None = Field(default=None, ge=1, le=1_048_576)
    """GiB of a machine's disk that its pod asks for and may fill: copied inputs, checkpoints on their way, logs.
    Default: none is asked for, and a full disk takes the pod as a drain does."""
    node_selector: dict[str, Annotated[str, Field(pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$")]] = (
        Field(default_factory=dict)
    )
    """Labels of the machines, beside the instance type: spot capacity is {eks.amazonaws.com/capacityType: SPOT}, or
    {karpenter.sh/capacity-type: spot}."""


class RaySpec(SpecModel):
    """backend ray: what a Ray cluster must be told beside the machines (docs/clusters.md)."""

    address: str | None = Field(default=None, pattern=r"^https?://[A-Za-z0-9.\[\]:-]+(/[A-Za-z0-9._/-]*)?$")
    """Of the cluster's job server (its dashboard), http://HOST:8265. Default: RAY_API_SERVER_ADDRESS where that is set,
    else http://127.0.0.1:8265."""
    directory: str | None = Field(default=None, pattern=r"^/[A-Za-z0-9._/-]+$")
    """Folder on every machine's own or shared disk for a job's inputs and outputs. Default: for a tenant's jobs
    /tmp/trainyard, else the folder of jobs on this machine, which all machines then share."""
    python: str | None = Field(default=None, pattern=r"^/[A-Za-z0-9._/-]+$")
    """Interpreter that has the trainer and the cluster's own version of ray, on every machine. Default: for a tenant's
    jobs the training image's own, elsewhere the one that launches."""


class ComputeSpec(SpecModel):
    """The machines. The default is this one."""

    backend: BackendName = "local"
    instance_type: str | None = None
    instance_count: PositiveInt = 1
    spot: bool = False
    max_hours: float = Field(default=24.0, gt=0, le=28 * 24)
    """Hours of running before SageMaker stops the job (at most 28 days). Slurm: of each start; Ray: of each attempt,
    while it has machines; Kubernetes: of each attempt, from when its pods are made: they wait for machines in it."""
    max_wait_hours: float | None = Field(default=None, gt=0)
    """spot: hours of waiting and running together; default: twice max_hours."""
    queue: str | None = None
    """One of the tenant's training queues, on Slurm a partition; default: its first that offers the instance type. On
    Kubernetes a queue of Kueue's; default: none. Ray has no queues."""
    slurm: SlurmSpec = SlurmSpec()
    kubernetes: KubernetesSpec = KubernetesSpec()
    ray: RaySpec = RaySpec()
    keep_alive_minutes: float | None = Field(default=None, gt=0, le=360)
    """On SageMaker: how long the machines stay after the job for the tenant's next one on as many of the same type,
    which then starts within a minute (a warm pool). They are billed meanwhile; the tenant's warm_pool_minutes is the
    limit. Not with spot, a training plan or a training queue."""
    training_plan: str | None = Field(default=None, pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,63}$")
    """On SageMaker: the tenant's training plan (capacity bought ahead, training_plans) whose machines the job runs on.
    It waits until they are there. Not with spot, a warm pool or a training queue."""

    @model_validator(mode="after")
    def _one_kind_of_capacity(self) -> Self:
        given = {"spot": self.spot, "keep_alive_minutes": self.keep_alive_minutes, "training_plan": self.training_plan}
        both = [name for name, value in given.items() if value]
        if len(both) > 1:
            raise ValueError(f"{both[0]} and {both[1]} exclude each other: SageMaker takes one of them; leave one out")
        if both and both != ["spot"] and self.backend != "sagemaker":
            raise ValueError(f"{both[0]} is SageMaker's: needs backend: sagemaker (given: {self.backend})")
        return self

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.backend == "sagemaker":
            if self.instance_type is None:
                raise ValueError("backend sagemaker needs instance_type, e.g. ml.p5.48xlarge")
            if not self.instance_type.startswith("ml."):
                raise ValueError(
                    f"instance_type {self.instance_type}: SageMaker's begin with 'ml.'; write ml.{self.instance_type}"
                )
        if self.max_wait_hours is not None and self.max_wait_hours < self.max_hours:
            raise ValueError("max_wait_hours counts the running too, so it must be at least max_hours")
        return self


class BudgetSpec(SpecModel):
    """What the job may cost."""

    max_usd: float = Field(gt=0)


class MetersSpec(SpecModel):
    """Who else may read a running job's figures (docs/meters.md); metrics.jsonl has them in any case."""

    prometheus_port: int | None = Field(default=None, ge=1024, le=65535)
    """The first host serves http://HOST:PORT/metrics, to whom its security groups admit; null: only the file
    metrics.prom in the output folder, for node_exporter's textfile collector."""
    cloudwatch: bool = True
    """On SageMaker: a line of CloudWatch's embedded metrics every training.observe_every_steps steps, at saves and
    validations, and of the first step of each five minutes. CloudWatch bills each metric of each job's name for the
    hours in which it gets values."""


_JOB_NAME = worded(
    r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$", "1 to 40 small letters, digits and dashes, no dash first and none last"
)


class JobSpec(SpecModel):
    """Everything about one training job."""

    version: int = Field(default=SPEC_VERSION, ge=1)
    name: str = Field(pattern=_JOB_NAME)
    """Lower-case letters, digits and dashes, at most 40: SageMaker names and S3 prefixes are made from it."""
    tenant: Name | None = None
    """Required to launch on AWS; the bare trainer does without."""
    task: Literal["causal_lm", "image_classification", "vision_language"] = "causal_lm"
    model: ModelSpec
    data: DataSpec
    images: ImageSpec | None = None
    """For the tasks with images; default: all defaults."""
    training: TrainingSpec
    parallelism: ParallelismSpec | Auto = "auto"
    checkpoint: CheckpointSpec = CheckpointSpec()
    recovery: RecoverySpec = RecoverySpec()
    preflight: PreflightSpec = PreflightSpec()
    meters: MetersSpec = MetersSpec()
    tracking: JobTrackingSpec = JobTrackingSpec()
    compute: ComputeSpec = ComputeSpec()
    budget: BudgetSpec | None = None

    @model_validator(mode="after")
    def _images_for_image_tasks(self) -> Self:
        if self.task == "causal_lm":
            if self.images is not None:
                raise ValueError("images belongs to task: image_classification or vision_language; this is causal_lm")
            return self
        if self.task == "image_classification" and self.training.tokens is not None:
            raise ValueError("training.tokens: images have no tokens; give training.epochs or training.steps")
        for field in ("train", "validation"):
            for number, source in enumerate(getattr(self.data, field)):
                if source.format != "webdataset":
                    raise ValueError(
                        f"data.{field}.{number}.format: task {self.task} reads webdataset (given: {source.format})"
                    )
        return self

    @model_validator(mode="after")
    def _fp8_can_be_had(self) -> Self:
        reason = self._fp8_obstacle() if self.training.precision == "fp8" else None
        if reason is not None:
            raise ValueError(f"training.precision: fp8 {reason}")
        return self

    def _fp8_obstacle(self) -> str | None:
        if self.task != "causal_lm":
            return f"is not implemented for task {self.task}; use bf16"
        if self.model.adapter is not None and self.model.adapter.kind == "qlora":
            return (
                "is not implemented with model.adapter: qlora, whose frozen weights are stored in 4 bits and multiplied"
                " in bf16; use lora, or bf16"
            )
        if self.parallelism == "auto":
            return None
        if self.parallelism.engine == "deepspeed":
            return "is not implemented with engine: deepspeed; use engine: torch, or bf16"
        if self.parallelism.tensor > 1:
            return (
                f"is not implemented with parallelism.tensor: {self.parallelism.tensor}, which cuts its layers; use"
                " data_shard, pipeline or context, or bf16"
            )
        return None

    @model_validator(mode="after")
    def _compiled_can_be_had(self) -> Self:
        reason = self._compile_obstacle() if self.training.compile else None
        if reason is not None:
            raise ValueError(f"training.compile: {reason}")
        return self

    def _compile_obstacle(self) -> str | None:
        """What compiled blocks don't go with; what a model adds to it, the planner and the trainer know."""
        if self.task != "causal_lm":
            return f"is not implemented for task {self.task}; set it to false"
        if self.model.adapter is not None and self.model.adapter.kind == "qlora":
            return "is not implemented with model.adapter: qlora; use lora, or set it to false"
        if self.training.activation_checkpointing == "selective":
            return (
                "can't be had with training.activation_checkpointing: selective, which chooses among operations that a"
                " compiled block no longer has; use full or none"
            )
        return None if self.parallelism == "auto" else self._compiled_layout_obstacle(self.parallelism)

    def _compiled_layout_obstacle(self, layout: ParallelismSpec) -> str | None:
        if layout.engine == "deepspeed":
            return (
                "is not implemented with engine: deepspeed, whose hooks move weights inside the blocks; use engine:"
                " torch, or set it to false"
            )
        if layout.pipeline > 1 and layout.pipeline_schedule == "zero_bubble":
            return (
                "can't be had with parallelism.pipeline_schedule: zero_bubble, which takes a backward pass apart that a"
                " compiled block has in one piece; use 1f1b, or set it to false"
            )
        if layout.tensor > 1 and self.training.activation_checkpointing == "full":
            return (
                f"is not implemented with parallelism.tensor: {layout.tensor} and training.activation_checkpointing:"
                " full together; set activation_checkpointing to none, tensor to 1, or compile to false"
            )
        if layout.expert > 1:
            return (
                f"is not implemented with parallelism.expert: {layout.expert}, whose tokens travel in numbers that"
                " differ from step to step; use data_shard, or set it to false"
            )
        return None

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step on compute.instance_count instances: as stated, or the share of it to which
        recovery.elastic adapts it."""
        elastic = self.recovery.elastic
        stated = self.training.global_batch_size
        return stated if elastic is None else int(stated * elastic.share(self.compute.instance_count))

    @property
    def num_sequences(self) -> int | None:
        """Sequences that the whole job reads, whatever the batch; None for a job stated in epochs."""
        training = self.training
        if training.steps is not None:
            return training.steps * training.global_batch_size
        if training.tokens is not None:  # rounded up to whole steps
            tokens_per_step = training.global_batch_size * self.data.sequence_length
            return -(-training.tokens // tokens_per_step) * training.global_batch_size
        return None

    def on_instances(self, number: int, where: str) -> "JobSpec":
        """The job on so many instances; InputError where it doesn't allow them. `where`: who asks, for the message."""
        content = self.model_dump(mode="json")
        return parse(JobSpec, {**content, "compute": {**content["compute"], "instance_count": number}}, where)

    def inelastic(self) -> "JobSpec":
        """The job with its batch as it stands for these instances on any number of them: to compare machines."""
        batch: dict[str, int | None] = {"global_batch_size": self.global_batch_size}
        if self.training.steps is not None:
            batch["steps"] = -(-self.training.steps * self.training.global_batch_size // self.global_batch_size)
        return self.model_copy(
            update={
                "training": self.training.model_copy(update=batch),
                "recovery": self.recovery.model_copy(update={"elastic": None}),
            }
        )

    @model_validator(mode="after")
    def _instances_within_limits(self) -> Self:
        elastic, count = self.recovery.elastic, self.compute.instance_count
        if elastic is None:
            return self
        low, high = elastic.min_instances, elastic.max_instances
        if not low <= count <= high:
            raise ValueError(
                f"compute.instance_count {count}: recovery.elastic allows {low} to {high} instances; stay within, or"
                " change its min_instances or max_instances"
            )
        batch = self.training.global_batch_size
        if (batch * elastic.share(count)).denominator > 1:
            raise ValueError(
                f"compute.instance_count {count}: recovery.elastic.batch: adapt leaves {count}/{high} of"
                f" global_batch_size {batch}, no whole number; use another count, or batch: keep"
            )
        if elastic.batch == "adapt" and self.training.on_anomaly == "rollback":
            raise ValueError(
                "recovery.elastic.batch: adapt can't be had with training.on_anomaly: rollback, which leaves out"
                " batches of one size; use batch: keep, or on_anomaly: skip"
            )
        return self

    @model_validator(mode="after")
    def _best_is_measured(self) -> Self:
        best = self.checkpoint.keep_best
        if best is None or not best.metric.startswith("validation_"):
            return self
        names = {source.name for source in self.data.validation}
        wanted = best.metric.split(".")[1] if best.metric.startswith("validation_sets.") else None
        if wanted not in names:
            what = "a source without a name" if wanted is None else f"a source named {wanted}"
            raise ValueError(f"checkpoint.keep_best.metric: {best.metric} needs {what} in data.validation")
        return self

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
    """Peak, after the linear scaling rule and recovery.elastic's."""
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
        assert batch == self.spec.global_batch_size
        return self


def load_job(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """The job in a YAML file with `section.key=value` overrides applied; InputError is one actionable line."""
    job = parse(JobSpec, apply_overrides(read_yaml(path), overrides), str(path))
    refuse_homes(job, str(path))
    return job


def refuse_homes(job: JobSpec, where: str) -> None:
    """InputError for a place that begins with ~: it would be a folder of that name, which nobody dares to remove. Not
    in the spec, as records of earlier jobs may have one."""
    for name in ("destination", "local_directory"):
        place = getattr(job.checkpoint, name) or ""
        if place.partition("/")[0] == "~":
            raise InputError(
                f"{where}: checkpoint.{name}: only a shell takes ~ for a home; write the whole path (given: {place})"
            )


def load_resolved(path: Path) -> ResolvedJob:
    """The resolved job in a JSON file; InputError is one actionable line."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: must hold a resolved job, holds {type(content).__name__}")
    return parse(ResolvedJob, content, str(path))
