"""How many kernels the host launches for a layer and a head of our own trainer, (forward, backward).

A GPU's queue lets the host run ahead: a pass takes what all its kernels do, or what launching them does, whichever is
longer. The counts are by reading transformers' code as the trainer runs it, and are held against traces
(`tests/trainer/test_traced_launches.py`); what depends on values, like the documents of a sequence, isn't counted.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from trainyard.planner.adapters import MLP_INPUTS, MLP_OUTPUTS
from trainyard.planner.layout import Layout
from trainyard.planner.once import once
from trainyard.planner.quantized_reads import num_parts
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import Stage
from trainyard.planner.trainer_layers import DELTA_CHUNK, LOSS_PART_TOKENS, TrainerLayers, layers_of
from trainyard.planner.weight_tensors import weight_tensors

Kernels = tuple[float, float]
"""Of a forward and of a backward pass."""

NORM: dict[str, Kernels] = {
    "layer_fp32": (5, 4),
    "layer_written_out": (14, 20),
    "rms_wide": (8, 16),
    "rms_cast": (8, 16),
    "rms": (8, 16),
}
"""`TrainerLayers.norm` -> kernels of one; of others one each."""

CORE: Kernels = (2, 3)
"""Attention's kernel, the residual's sum; backward a copy of what the kernel reads."""

WRITTEN_OUT: Kernels = (8, 8)
"""More where scores are written out: scaled, masked, their softmax, in two types, and two products."""

ROTATION: Kernels = (10, 15)
"""Queries and keys: twice multiplied, cut, negated, put together, added."""

GATED: Kernels = (3, 6)
"""Residual, activation function, product with the other half; backward the function once more."""

UNGATED: Kernels = (2, 2)
"""Residual and activation function."""

ROUTED: Kernels = (22, 26)
"""Router, its softmax and choice, the order of rows by experts, what weighs and adds them up; and two grouped
products."""

CHOSEN_OF_GROUPS: Kernels = (14, 8)
"""More of routers that choose among groups of experts, by sigmoids and a bias."""

EXCHANGED: Kernels = (26, 9)
"""More of experts on other ranks: counts, places, rows put in order twice."""

CAST_WEIGHT: Kernels = (2, 3)
"""Of a product under autocast: its weight, and its input; backward their gradients."""

UNPACKED, UNPACKED_PART = 3, 6
"""Of a four-bit weight, in either pass; and of each part in which it is read."""

ADAPTED, GATHERED = (4.0, 5.0), (4, 4)
"""Of an adapter beside a product; of what tensor ranks gather, a layer."""

OF_CONTEXT, OF_CONTEXT_RANK = (9, 11), 2
"""Of a layer whose keys and values come from other ranks: put in order, repeated, attended to in two pieces; and more
for each of these ranks, backward."""

DELTA_KERNELS = 9
"""Of a chunk of a gated delta rule, which transformers' torch code goes through one by one, either way."""

OF_UNIT: Kernels = (2, 2)
"""Of what FSDP gathers at once, and sends of its gradients."""

OF_UNCUT: Kernels = (2, 2)
"""Of each weight that it has whole, of one rank, beside other axes: narrowed, and copied."""

OF_PIPELINES_UNIT, OF_PIPELINES_UNCUT, OF_FROZEN_UNCUT = 4, 2, 1
"""In a pipeline, once a step: of both; and of a frozen weight that it has whole."""

EMBEDDED: Kernels = (14, 3)
"""Of a micro-batch's ends beside the loss: positions, their angles, the embedding, the last norm."""

LOSS, CHUNK, WHOLE = (11.0, 3.0), 33.0, (16.0, 6.0)
"""Of a loss made in the head, once and for each chunk; and of whole logits."""

LATENT, LATENT_OF_BOTH = (11, 14), (17, 29)
"""Of latent attention, beside its products and norms: rotations of a part, cut off and put together again; where
queries come through a latent, too, which is DeepSeek-V3's code."""

PARTIAL_ROTATION: Kernels = (2, 8)
"""More where a part of queries and keys is not rotated: put together again; backward each part in a whole one."""

MAMBA: Kernels = (85, 125)
"""A layer that is a Mamba-2 block with its norm, in transformers' torch code, however long its sequence is."""

OUTER: Kernels = (6, 2)
"""Of a micro-batch in a stage that has no embedding."""

CAST_EXPERTS: Kernels = (12, 20)
"""More of a layer of experts under autocast."""

NOT_AGAIN = 2
"""Of a layer computed again: its last product and sum, before which torch stops (all that backward reads is there)."""


def total(*parts: Kernels) -> Kernels:
    """Their sum."""
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def times(number: float, kernels: Kernels) -> Kernels:
    """So many of them."""
    return number * kernels[0], number * kernels[1]


def _unpacked(weights: float) -> float:
    """Kernels that read one matrix of so many."""
    return UNPACKED + UNPACKED_PART * num_parts(weights)


@dataclass(frozen=True)
class LayerLaunches:
    """Of one micro-batch."""

    shape: ModelShape
    layout: Layout

    def stage(self, stage: Stage) -> tuple[float, float, float]:
        """Forward, backward and computed again, of all that a pipeline's rank has."""
        share, layers = stage.layers / self.shape.layers, _all_layers(self.shape, self.layout.of_layers())
        forward, backward = total(times(share, layers[:2]), self._weights(stage), self._ends(stage))
        return forward, backward, share * layers[2]

    def all_layers(self) -> tuple[float, float, float]:
        """The same of all of a model's layers, without their weights' gathering."""
        forward, backward = self._of_passes
        # Experts' weights are read where their layer goes back, made again or not.
        return forward, backward, self._again(forward - self.shape.moe_layers * self._reading_experts)

    @once
    def _of_passes(self) -> Kernels:
        shape = self.shape
        attention, dense, routed = self.attention(), self._block(shape.ffn), self._routed()
        kinds = [(number, LayerLaunches(kind, self.layout)) for number, kind in shape.attentions]
        delta = total(attention, times(DELTA_KERNELS * self.layout.sequence_length / DELTA_CHUNK, (1, 1)))
        return total(
            *(times(number, kind.attention()) for number, kind in kinds),
            times(shape.delta_layers, delta),
            times(shape.mamba_layers, MAMBA),
            times(shape.num_mlps, dense),
            times(shape.moe_layers, routed),
        )

    def attention(self) -> Kernels:
        """Norms, projections, rotation, attention itself and the residual."""
        shape, layout = self.shape, self.layout
        into = self._num_inputs
        if shape.kv_lora_rank:
            into = 4 if shape.q_lora_rank else 3
        parts = [CORE, self._norms(shape.norms_per_layer if shape.parallel_residual else self._norms_a_block)]
        biases = (1 if shape.fused_qkv else 3) * shape.qkv_bias + shape.output_bias
        parts.append(self._products(into + 1, into, biases, self._layers.reads.mixing_weights))
        if shape.kv_lora_rank:
            parts.append(LATENT_OF_BOTH if shape.q_lora_rank else LATENT)
            parts.append(times(1 + (shape.q_lora_rank > 0), NORM.get(self._layers.inner_norm, (1, 1))))
        elif not (shape.learned_positions or shape.alibi or shape.is_hybrid):
            parts.append(total(ROTATION, times(shape.copies_attention, PARTIAL_ROTATION)))
        if shape.qk_norm_per_head or shape.qk_norm_whole:
            parts.append(times(2, NORM.get(self._layers.inner_norm, (1, 1))))
        if shape.normalizes_values:
            parts.append((1, 1))
        if not layout.flash_attention:
            parts.append(WRITTEN_OUT)
        if layout.context > 1:
            parts.append(total(OF_CONTEXT, (0, OF_CONTEXT_RANK * layout.context)))
        if layout.tensor > 1:
            parts.append(GATHERED)
        parts.append(self._adapters(is_of_block=False))
        return total(*parts)

    @property
    def _num_inputs(self) -> int:
        """Products that queries, keys and values come of, but for latent attention's."""
        return 1 if self.shape.fused_qkv else 1 + self.shape.projected_kv_dim // self.shape.kv_dim

    def _block(self, width: int) -> Kernels:
        """A feed-forward block with its norms."""
        if not width:
            return 0.0, 0.0
        norms = self._norms(0 if self.shape.parallel_residual else self._norms_a_block)
        return total(norms, self._mlp())

    def _mlp(self) -> Kernels:
        shape, into = self.shape, 1 + self.shape.gated_mlp
        function = GATED if shape.gated_mlp else total(UNGATED, times(3 * (shape.activation_tensors > 1), (1, 2)))
        products = self._products(into + 1, into, (into + 1) * shape.mlp_bias, self._layers.reads.block_weights)
        return total(function, products, self._adapters(is_of_block=True))

    def _routed(self) -> Kernels:
        """Router, experts and the shared one, with their norms."""
        shape = self.shape
        if not shape.moe_layers:
            return 0.0, 0.0
        parts = [self._norms(self._norms_a_block), ROUTED]
        if shape.wide_router and (shape.q_lora_rank or not shape.kv_lora_rank):
            parts.append(CHOSEN_OF_GROUPS)
        if self.layout.expert_split > 1:
            parts.append(EXCHANGED)
        if shape.shared_ffn:
            parts += [self._mlp(), times(shape.shared_gate, (2, 4))]
        if self._layers.is_autocast and not self._layers.is_frozen:
            parts.append(CAST_EXPERTS)
        parts.append(times(self._reading_experts, (1, 1)))
        return total(*parts)

    @property
    def _reading_experts(self) -> float:
        """QLoRA: kernels that read a layer's experts, of each product all of them at once."""
        return sum(map(_unpacked, self._layers.reads.experts_weights)) * (self.layout.method == "qlora")

    def _norms(self, number: float) -> Kernels:
        # After a block they read what a product gives.
        kind = self._layers.half_norm
        return times(number, NORM.get(kind, (1, 1)))

    def _products(self, number: float, into: float, biases: float, weights: float) -> Kernels:
        """So many, `into` of them of one input, whose gradients are added up; `weights`: of the widest."""
        backward = (1 if self._layers.is_frozen else 2) * number + into - 1
        found = number, backward + (0 if self._layers.is_frozen else biases)
        if self._layers.is_autocast and not self._layers.is_frozen:
            found = total(found, times(number, CAST_WEIGHT))
        if self.layout.method == "qlora":
            read = _unpacked(weights)
            found = total(found, times(number, (read, read)))
        return found

    def _adapters(self, *, is_of_block: bool) -> Kernels:
        if not self._layers.is_frozen:
            return 0.0, 0.0
        names = MLP_INPUTS | MLP_OUTPUTS
        number = sum((name in names and name != "c_proj") == is_of_block for name in self.layout.lora_targets)
        casts = times(2 * self._layers.is_autocast, (1, 2))
        return times(number, total(ADAPTED, casts))

    def _weights(self, stage: Stage) -> Kernels:
        """What is gathered, and gradients that are added to those of earlier micro-batches, or to DDP's buckets."""
        layout, is_trained = self.layout, self.layout.method == "full"
        trained = weight_tensors(self.shape, layout, stage).count
        earlier = 1 - 1 / layout.num_micro_batches
        is_cut = layout.zero_stage == 3 and layout.shard_degree > 1
        if not (is_cut or layout.is_grid):
            return 0.0, trained * (1 if layout.data_parallel > 1 else earlier)
        units = stage.layers + 1
        whole = layout if is_trained else replace(layout, method="full")
        uncut = 0.0 if is_cut else weight_tensors(self.shape, whole, stage).count
        if layout.pipeline > 1:
            each = OF_PIPELINES_UNCUT if is_trained else OF_FROZEN_UNCUT
            once = OF_PIPELINES_UNIT * units + each * uncut
            # A first gradient of 16 bits is widened.
            sums = trained * is_trained * (earlier if layout.element_bytes >= 4 else 1)
            return once / layout.num_micro_batches, sums
        # DeepSpeed sums in buckets; where others have copies of a weight, traces show no kernels of their own for sums.
        is_summed = layout.engine == "torch" and (is_cut or layout.data_parallel == 1)
        of_weights = times(units, OF_UNIT) if is_cut else times(uncut, OF_UNCUT if is_trained else (1, 1))
        return of_weights[0], of_weights[1] + trained * earlier * is_summed

    def _ends(self, stage: Stage) -> Kernels:
        parts = [EMBEDDED] if stage.embedding else [OUTER]
        if stage.head:
            if self._layers.loss_is_in_head:
                chunk = min(float(self.layout.loss_chunk_tokens or 1), self._layers.tokens)
                parts.append(total(LOSS, times(self._layers.tokens / chunk, (CHUNK, 0.0))))
            else:
                parts.append(times(max(1.0, self._layers.tokens / LOSS_PART_TOKENS), WHOLE))
        return total(*parts)

    def _again(self, forward: float) -> float:
        """Of so many kernels of all layers."""
        shape, layers = self.shape, self.shape.layers
        if self.layout.recompute == "none":
            return 0.0
        reads = self._layers.reads
        if self.layout.recompute == "full":
            unread = shape.num_mlps * _unpacked(reads.block_weights) * self._layers.stops_before_reading
            return forward - NOT_AGAIN * layers - unread
        # Products are kept (the last of each block ends it), and attention's kernels; experts' are made again.
        attention_kernels = layers
        mixing = layers + sum(
            number * LayerLaunches(kind, self.layout)._num_inputs for number, kind in shape.attentions
        )
        blocks = shape.num_mlps * (1 + shape.gated_mlp) + layers
        products, unpacked = mixing + blocks, 0.0
        if self.layout.method == "qlora":
            unpacked = mixing * _unpacked(reads.mixing_weights) + blocks * _unpacked(reads.block_weights)
        return forward - products - attention_kernels - unpacked

    @property
    def _norms_a_block(self) -> float:
        """A hybrid's layers have one block each."""
        return self.shape.norms_per_layer / (1 if self.shape.is_hybrid else 2)

    @once
    def _layers(self) -> TrainerLayers:
        return layers_of(self.shape, self.layout)


@lru_cache(maxsize=1024)
def _all_layers(shape: ModelShape, layout: Layout) -> tuple[float, float, float]:
    """Of a layout as layers know it."""
    return LayerLaunches(shape, layout).all_layers()
