"""One configuration of a job over GPUs: what the memory and time formulas take."""

from dataclasses import dataclass
from typing import Literal

from trainyard.planner.once import once

Precision = Literal["bf16", "fp16", "fp8", "fp4", "fp32", "fp64"]
Recompute = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
Method = Literal["full", "lora", "qlora"]
Optimizer = Literal["adamw", "adamw_8bit", "adamw_paged", "adafactor", "muon", "sgd"]
Masks = Literal["never", "windows", "documents", "always"]
"""windows: of layers that have one. documents: of packed ones where torch's kernel for them can't take the model."""
AttentionKernel = Literal["usual", "ampere", "own"]
"""usual: the engine's of that year. ampere: FlashAttention-2's, of Ampere's instructions, on later parts too. own: of
the part's own instructions, where it has more (cuDNN's, FlashAttention-3)."""

Library = Literal["", "litgpt", "transformers", "nanotron", "torchtune", "trainyard"]
"""Whose loop, where its kernels differ from those of its engine; empty: of which nothing more is known.
trainyard is our own trainer, whose memory has formulas of its own (`trainer_memory`)."""
RECOMPUTED_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""What Megatron's selective recomputation (`--recompute-modules`) may make again: attention's core; the outputs of
norms; queries, keys and values of latent attention; dense feed-forward blocks; whole layers of experts, with their
exchange; the experts' activated values; the shared expert."""

Masters = Literal["usual", "none", "weights", "copy"]
"""usual: the engine's. none: weights, gradients and moments are all as narrow as products. weights: all of these are in
fp32. copy: moments, and a copy of the weights that the optimizer updates, are; weights and gradients are narrow."""
Kept = Literal["usual", "fp32", "bf16", "fp16", "fp8"]
"""The type of gradients' sums, or of an optimizer's moments; usual: what the masters say."""
Adapter = Literal["lora", "prefix", "scale"]
"""What is trained beside frozen weights: LoRA; LLaMA-Adapter's prefixes to attention (arXiv:2303.16199); its second
version's scale and bias of each product (arXiv:2304.15010)."""
Rank = Literal["worst", "first", "last"]
Engine = Literal["torch", "deepspeed", "megatron", "plain"]
"""Whose training state and kernels: FSDP2/DDP with fp32 weights; DeepSpeed; Megatron-Core; a plain loop whose
weights, gradients and moments all have the training precision."""

KEPT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class ZeroSizes:
    """What a job of our own trainer states of DeepSpeed's messages, in elements; None: what the trainer chooses."""

    bucket: int | None = None
    """Gradients that are reduced at once."""
    prefetch: int | None = None
    """Stage 3: weights that are gathered ahead of their use."""
    live: int | None = None
    """Stage 3: gathered weights beyond which none is asked for ahead."""
    reuse: float | None = None
    """Stage 3: a gathered weight that is used again before so many others are is kept; DeepSpeed's own field."""
    overlaps: bool = True
    """Gradients travel behind the backward pass."""
    persistence: int = 100_000
    """Stage 3: weights of at most so many elements stay whole on every rank."""
    persistent_in_all: int | None = None
    """Stage 3: the most that these may be together; DeepSpeed's own field."""
    sub_group: float | None = None
    """Stage 3: of a rank's part, what is updated at a time; DeepSpeed's own field."""
    sums_on_all: bool | None = None
    """Stages 1 and 2: a bucket is summed on all ranks, whoever has its parts; by DeepSpeed's own fields."""


@dataclass(frozen=True)
class Layout:
    """Degrees, batch and numerics. Sequences in batches, elements elsewhere."""

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    """Model chunks per pipeline rank (virtual stages); 1: not interleaved."""
    context: int = 1
    expert: int = 1
    data_parallel: int = 1
    """Ranks that read different sequences."""
    zero_stage: int = 0
    """What is sharded: 1 optimizer, 2 and gradients, 3 and parameters (FSDP is stage 3)."""
    shard_degree: int = 1
    """Ranks over which it is sharded: a divisor of data_parallel x context."""
    micro_batch: int = 1
    num_micro_batches: int = 1
    """Per optimizer step and data-parallel rank."""
    sequence_length: int = 2048
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    recompute_modules: frozenset[str] = frozenset({"core_attn"})
    """Of RECOMPUTED_MODULES those that Megatron's selective recomputation is told; other engines' selects products."""
    schedule: Schedule = "1f1b"
    sequence_parallel: bool = True
    """With tensor > 1: norms and residuals are split over the tensor ranks too."""
    engine: Engine = "torch"
    method: Method = "full"
    lora_rank: int = 16
    num_lora_targets: int = 2
    """Adapted linear modules per layer, each taken as hidden x hidden."""
    lora_targets: tuple[str, ...] = ()
    """Their names, where they are known: then their own sizes count."""
    quantization: Literal["nf4", "gptq"] = "nf4"
    """Of QLoRA's base: bitsandbytes' (transformers then keeps embeddings, norms and head in fp32), or GPTQ."""
    adapter: Adapter = "lora"
    trains_vocabulary: bool = False
    """Beside adapters, copies of the embedding and the head are trained whole."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where optimizer state lives."""
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
    """ZeRO-3: where a rank's part of the weights lives between uses."""
    zero_sizes: ZeroSizes = ZeroSizes()
    flash_attention: bool = True
    fp32_softmax: bool = False
    """Attention is written out (eager), and keeps the fp32 result of its softmax too."""
    attention_kernel: AttentionKernel = "usual"
    """Whose kernels fused attention has."""
    masks: Masks = "never"
    """Where fused attention's kernel reads a mask, and computes what it hides."""
    keeps_gathered: bool = False
    """FSDP's weights, gathered for the forward pass, stay for the backward one."""
    unit_parameters: int | None = None
    """Our own trainer's FSDP gathers as many layers at once as have so many parameters together; None: one."""
    units_ahead: int = 0
    """Those units that it asks for before they are needed; 0: FSDP's own order."""
    optimizer: Optimizer = "adamw"
    has_momentum: bool = True
    """SGD keeps an average of the gradients."""
    keeps_average: bool = False
    """A running average of the weights beside them."""
    year: float = 2026.0
    """When the framework's version appeared: kernels and overlap have improved since."""
    masters: Masters = "usual"
    """What is in fp32 beside products of 16 bits or fewer."""
    gradient_precision: Kept = "usual"
    """Of what ranks add up, and of gradients that stay until the step. fp32 weights have fp32 ones whatever is sent."""
    moment_precision: Kept = "usual"
    """Of AdamW's, Muon's or SGD's averages."""
    autocast: bool = False
    """Products alone are narrow: weights are gathered, and what flows between them is, in fp32."""
    offloads_checkpoints: bool = False
    """What recomputation keeps of each layer waits in the host's memory."""
    whole_logits: bool = False
    """Tensor ranks gather the logits: each computes the loss of all of the vocabulary."""
    loss_chunk_tokens: int | None = None
    """Positions whose logits exist at one time, where the loss is computed in the head; None: a micro-batch's all."""
    chunks_short_losses: bool = False
    """The loss of a micro-batch of no more positions than a chunk has is computed in the head as well."""
    rank: Rank = "worst"
    """Whose memory is asked for: the pipeline rank that needs most, or a stated one (Megatron logs the last)."""
    expert_tensor: int | None = None
    """Tensor parallelism inside an expert; None: as outside."""
    dropout: bool = False
    """Hidden and attention dropout keep their masks."""
    fused_loss: bool = True
    """Megatron's fused cross-entropy, which keeps two fp32 tensors of the logits' size, its plain one keeps one."""
    saves_every_second_product: bool = False
    """Selective recomputation keeps every other matrix product's output (torchtitan's default), not all of them."""
    compiled: bool = False
    """torch.compile makes a layer: what isn't a product's is computed again where it is asked for."""
    compiled_loss: bool = False
    """Compiled cross-entropy never makes the fp32 copies of the logits."""
    deferred_head: bool = False
    """Megatron computes the head's weight gradient after the pipeline has drained, and keeps the logits' gradients."""
    grouped_experts: bool = True
    """Megatron's experts run as one grouped product over four streams, each with a workspace."""
    gathers_tokens: bool = False
    """Megatron's all-gather dispatcher: every rank of an expert group has all its tokens in a buffer that stays."""
    capacity_factor: float | None = None
    """Each expert gets its even share of tokens times this, padded to it, and drops the others; None: drops none."""
    expert_overlap: bool | None = None
    """Whether the experts' exchange runs behind another micro-batch's computing; None: nobody says."""
    forwards_tokens: bool = False
    """Tokens go to experts by DeepEP: once to each node, however many of their experts lie there."""
    host_exchange: bool = False
    """That over EFA: without GPU-initiated RDMA, threads of the host drive the network."""
    last_stage_layers: int | None = None
    """Layers of the last pipeline rank where the split is uneven; None: as many as the others."""
    transformer_engine: bool = True
    """Megatron's layers are Transformer Engine's, with a workspace of their own."""
    weighs_inside: bool = False
    """Experts' results are weighted where their activation is, so that they are not kept for the weights' gradient."""
    narrow_weights: bool = False
    """FP8's weights are in FP8 themselves, and gathered so, beside the optimizer's copies."""
    graphs_step: bool = False
    """A whole step's kernels are launched at once, from a CUDA graph, which experts' inputs of any number need buffers
    for; Megatron's come with one kernel for two of an expert's products and what lies between them."""
    library: Library = ""
    unfused: bool = False
    """Layers run as Hugging Face's code has them, a kernel for each operation: neither compiled nor fused."""
    pads_vocabulary: bool = False
    """The framework rounds the rows of the embedding up by itself, on one rank too: Megatron-LM and its kin."""
    large_workspace: bool = False
    """cuBLAS has 32 MiB a stream (Hopper and newer, or deterministic runs: CUBLAS_WORKSPACE_CONFIG=:4096:8)."""
    hopper: bool = False
    """Hopper or newer, where Transformer Engine's workspace is 32 MiB instead of 4."""

    def __hash__(self) -> int:
        """By what tells most layouts of a search apart: all fields together take longer than many a value that is kept
        by a layout."""
        degrees = (self.tensor, self.pipeline, self.context, self.expert, self.shard_degree, self.schedule)
        return hash((degrees, self.micro_batch, self.num_micro_batches, self.recompute, self.zero_stage, self.method))

    def in_micro_batches(self, size: int, count: int, recompute: Recompute) -> "Layout":
        """The same with so many of that size, and that recomputation: of each layout that a search looks at it tries a
        dozen, which `dataclasses.replace` would take longer to make than their state to reckon."""
        found = object.__new__(Layout)
        # What it has reckoned already, `element_bytes`, is of none of these.
        found.__dict__.update(self.__dict__, micro_batch=size, num_micro_batches=count, recompute=recompute)
        return found

    def of_layers(self) -> "Layout":
        """The same for all layouts whose layers do and keep the same: these don't know how many ranks share the rest of
        a model, or micro-batches there are, so that what is reckoned of them need not be reckoned for each of many."""
        found = object.__new__(Layout)
        found.__dict__.update(self.__dict__, **_UNKNOWN_TO_LAYERS, pipeline=min(self.pipeline, 2))
        return found

    @property
    def world_size(self) -> int:
        """GPUs."""
        return self.tensor * self.pipeline * self.context * self.data_parallel

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch * self.num_micro_batches * self.data_parallel

    @property
    def tokens_per_micro_batch(self) -> float:
        """Tokens that one rank holds of a micro-batch: context parallelism splits the sequence."""
        return self.micro_batch * self.sequence_length / self.context

    @once
    def element_bytes(self) -> int:
        """Bytes of an activation element; FP8 matmuls still keep activations in bf16."""
        return {"fp32": 4, "fp64": 8}.get(self.precision, 2)

    @property
    def gradient_bytes(self) -> int | None:
        """Bytes an element of `gradient_precision`; None: usual, as are adapters' (fp32)."""
        return KEPT_BYTES.get(self.gradient_precision) if self.method == "full" else None

    @property
    def moment_bytes(self) -> int | None:
        """Bytes an element of `moment_precision`; None: usual, as of optimizers that have types of their own."""
        return KEPT_BYTES.get(self.moment_precision) if self.optimizer in ("adamw", "muon", "sgd") else None

    @property
    def is_deepspeed_autocast(self) -> bool:
        """Our own trainer's ZeRO stage 0 in bf16: fp32 weights, cast product by product, as under DDP."""
        ours = self.engine == "deepspeed" and self.library == "trainyard"
        return ours and self.zero_stage == 0 and self.precision == "bf16"

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Whether gradients travel after each micro-batch: DeepSpeed's stage 2 keeps no whole ones to sum them in."""
        return self.engine == "deepspeed" and self.zero_stage == 2

    @property
    def sends_gradients_as_made(self) -> bool:
        """Our own trainer's ZeRO stage 1, of a step's one micro-batch: gradients move into the buckets one by
        one, and are never there whole. Without overlap nothing is sent before all are there."""
        ours = self.engine == "deepspeed" and self.library == "trainyard" and self.zero_stage == 1
        return ours and self.num_micro_batches == 1 and self.zero_sizes.overlaps

    @property
    def keeps_rest_in_fp32(self) -> bool:
        """What is not quantized is in fp32, and so are the activations that it gives (prepare_model_for_kbit).

        FSDP cuts tensors of one type alone: there all that isn't trained has the training precision.
        """
        widened = self.method == "qlora" and self.library == "transformers" and self.quantization == "nf4"
        return widened and self.zero_stage < 3

    def makes_again(self, module: str) -> bool:
        """Whether Megatron's selective recomputation makes one of RECOMPUTED_MODULES again."""
        return self.engine == "megatron" and self.recompute == "selective" and module in self.recompute_modules

    @property
    def stream_bytes(self) -> int:
        """Bytes of an element between layers: embeddings in fp32 make them fp32, whatever autocast narrows inside."""
        is_wide = self.keeps_rest_in_fp32 or self.autocast
        return max(self.element_bytes, 4) if is_wide else self.element_bytes

    @property
    def loss_split(self) -> int:
        """Tensor ranks that share the logits."""
        return 1 if self.whole_logits else self.tensor

    @property
    def expert_split(self) -> int:
        """Ranks over which one MoE layer's routed experts are spread."""
        return self.expert * (self.expert_tensor or self.tensor)

    @property
    def expert_shard_degree(self) -> int:
        """Ranks that share an expert's training state: those of `shard_degree` that hold the same experts."""
        if self.expert_tensor is None:
            return max(1, self.shard_degree // self.expert)
        return max(1, self.shard_degree * self.tensor // self.expert_split)

    @property
    def norm_split(self) -> int:
        """Over how many ranks norms and residuals are split."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def is_grid(self) -> bool:
        """Whether our own trainer's ranks hold different parts of different tensors: more than data parallelism."""
        return self.tensor * self.pipeline * self.context * self.expert > 1

    @property
    def is_uncut(self) -> bool:
        """Whether each rank of our own trainer has all weights as they are."""
        return not self.is_grid and self.zero_stage != 3

    @property
    def gathers_once(self) -> bool:
        """FSDP under a pipeline keeps a stage's parameters gathered, and its gradients whole, until the step's end."""
        return self.zero_stage == 3 and self.shard_degree > 1 and self.pipeline > 1

    def words(self) -> str:
        """The layout in a few words, for tables and messages."""
        parts = []
        if self.tensor > 1:
            parts.append(f"TP{self.tensor}")
        if self.pipeline > 1:
            # Interleaved stages show by their chunks.
            schedule = "" if self.chunks > 1 or self.schedule == "1f1b" else f" ({self.schedule})"
            parts.append(f"PP{self.pipeline}" + (f"x{self.chunks}" if self.chunks > 1 else "") + schedule)
        if self.context > 1:
            parts.append(f"CP{self.context}")
        if self.expert > 1:
            parts.append(f"EP{self.expert}")
        parts.append(self._data_words())
        if kept := {place for place in (self.offload, self.offload_parameters) if place != "none"}:
            parts.append(f"offload {'+'.join(sorted(kept))}")
        return " ".join(parts)

    def _data_words(self) -> str:
        ranks = self.data_parallel * self.context
        if self.zero_stage == 3 and self.engine == "torch":
            replicas = ranks // self.shard_degree
            return f"FSDP{self.shard_degree}" + (f" x DDP{replicas}" if replicas > 1 else "")
        if self.zero_stage:
            return f"ZeRO-{self.zero_stage} over {self.shard_degree}"
        return f"DDP{self.data_parallel}" if self.data_parallel > 1 else "one replica"


_UNKNOWN_TO_LAYERS = {
    name: Layout.__dataclass_fields__[name].default
    for name in (
        *("chunks", "data_parallel", "shard_degree", "num_micro_batches", "schedule", "zero_sizes"),
        *("keeps_gathered", "unit_parameters", "units_ahead", "last_stage_layers"),
    )
}
"""What no layer's work or memory depends on (`tests/planner/test_fastest.py`); and of a pipeline only that it is
one."""
