"""Step time: a roofline per operator of one rank's layers.

What is element-wise is bound by memory, what is small by the host that launches it; operators.py has the products'
tiles and attention's kernels, step.py how the parts come together. The constants are global: per GPU generation and
framework era, none belongs to one model, system or row; benchmarks/planner_accuracy.py --cross-validate shows what
they are worth on sources unseen.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from trainyard.hardware import Gpu
from trainyard.planner.adapters import reads_last_product
from trainyard.planner.communication import (
    EFA,
    PCIE_BYTES_PER_SECOND,
    Fabric,
    Group,
    all_gather_seconds,
    all_to_all_seconds,
    group,
)
from trainyard.planner.exchanges import (
    expert_group,
    expert_seconds,
    pipeline_seconds,
    replica_seconds,
    sharding_seconds,
    tensor_seconds,
    waited_share,
)
from trainyard.planner.launches import kernel_seconds, queued
from trainyard.planner.layer_launches import LayerLaunches
from trainyard.planner.layout import Layout
from trainyard.planner.memory import QLORA_BYTES
from trainyard.planner.once import once
from trainyard.planner.operators import Operators
from trainyard.planner.shapes import ModelShape
from trainyard.planner.sparse_attention import Compression
from trainyard.planner.stages import Stage, num_ranks, num_stages, part_of, stage_params, stages
from trainyard.planner.step import OnceAStep, Pass, StepTime, bubble_passes, combined, jitter, sharding_beyond
from trainyard.planner.time_constants import DEFAULT_CONSTANTS, EARLY, Constants
from trainyard.planner.trainer_layers import DELTA_CHUNK, WIDEST_SHARED_HEAD, TrainerLayers, layers_of
from trainyard.planner.trainer_products import Product, attention_products, block_products
from trainyard.planner.unfused import Unfused
from trainyard.planner.updates import update_seconds

UNPACKED_BYTES = 7.9
"""Of a four-bit weight that our own trainer reads, in torch's operations (`models/quantized.py`): a look-up of two
values at a time, and their scales; as a dry run counts them."""


@dataclass(frozen=True)
class _Work:
    """Seconds of a layer's forward pass on the GPU, by kind."""

    products: float
    scores: float
    elementwise: float
    idle: float = 0.0
    """Nothing to do until the host, which waited for the device, has launched something."""
    last: float = 0.0
    """Of the products, the last one: its result is the layer's, which no backward pass reads."""
    unpacked: float = 0.0
    """Four-bit weights turned into 16 bits, in every pass again."""
    unfused: tuple[float, float] = (0.0, 0.0)
    """In place of `elementwise`, where each operation of the model's code is a kernel: forward and backward."""
    remade: float = 0.0
    """Of the products, those that our own trainer's selective recomputation doesn't keep: experts'."""
    gradients: float = 0.0
    """Products of the backward pass, where they are reckoned one by one; 0: as long as forward for each."""

    @property
    def forward(self) -> float:
        return self.products + self.scores + self.elementwise + self.idle + self.unpacked + self.unfused[0]

    def backward(self, *, frozen: bool) -> float:
        """Products twice (once for frozen weights), attention 2.5 times: its scores are computed again."""
        products = self.gradients or self.products * (1.0 if frozen else 2.0)
        return products + 2.5 * self.scores + 1.5 * self.elementwise + self.idle + self.unpacked + self.unfused[1]


def step_time(
    shape: ModelShape, layout: Layout, device: Gpu, links: Fabric, constants: Constants = DEFAULT_CONSTANTS
) -> StepTime:
    """One optimizer step of the layout on nodes of that GPU."""
    passes = [
        (_Rank(part_of(shape, layout, stage), layout, device, links, constants).one_pass(stage), number)
        for stage, number in zip(stages(shape, layout), num_ranks(shape, layout), strict=True)
    ]
    gradients, parameters = replica_seconds(shape, layout, links)
    once = OnceAStep(
        gradients=gradients,
        waited=gradients * waited_share(shape, layout),
        parameters=parameters,
        pipeline=pipeline_seconds(shape, layout, links, constants),
        optimizer=update_seconds(shape, layout, device, links, constants),
    )
    return combined(passes, once, layout, links, constants)


def least_step_seconds(
    shape: ModelShape, layout: Layout, device: Gpu, links: Fabric, constants: Constants = DEFAULT_CONSTANTS
) -> float:
    """No more than `step_time`'s total of our own trainer, for a small part of its work: what a pipeline's rank with
    the fewest layers computes and moves for them, without a pipeline the head too, and what it waits for of other ranks
    in each pass. A search asks for the rest where this is short enough."""
    each = _layer_times(shape, layout.of_layers(), device, constants)
    parts = num_stages(layout)
    layers = shape.layers // (layout.pipeline * parts) * parts
    ways = [layers * each.forward, layers * (each.backward + each.again)]
    if layout.library == "trainyard":
        weights = Unfused(shape, layout).weights(layers * each.params)
        ways = [way + moved / each.bytes_per_second for way, moved in zip(ways, weights, strict=True)]
    if layout.pipeline == 1:
        ways = [way + (1 + shape.mtp_layers) * head for way, head in zip(ways, each.head, strict=True)]
    compute = sum(max(way, layers * launching) for way, launching in zip(ways, each.launching, strict=True))
    stage = Stage(layers, embedding=False, head=False, in_flight=0.0)
    rhythm = compute + tensor_seconds(shape, layout, stage, links) * tensor_exposed(layout, constants)
    if layout.context * layout.expert > 1:
        rhythm += _Rank(shape, layout, device, links, constants).exchanged_seconds(stage)
    if not layout.gathers_once:
        # However much more is computed behind which it hides, it takes no less time together.
        rhythm += sharding_beyond(sharding_seconds(shape, layout, stage, links), compute, layout, constants)
    return rhythm * (layout.num_micro_batches + bubble_passes(layout)) * (1 + jitter(layout, links, constants))


SPREAD_DENSE = 1.2
"""Factor up and down of the 80% interval for dense models in 16 bits on GPUs up to Hopper: it holds well over 80% of
the rows of sources that a fit has not seen, as pages that nobody had looked at are farther off than those
(docs/planner_accuracy.md: Interval)."""

SPREAD_NEW = 1.25
"""The same for experts, FP8 and FP4, and Blackwell, whose software still changes from release to release."""

SPREAD_UNMEASURED = 1.45
"""The same under Hugging Face's Trainer, DeepSpeed, plain loops and our own trainer, whose layers are Hugging Face's,
compiled or not: of such runs the fit has one, untuned. By 93 figures on pages that were read after it, of which it
holds 81% (docs/planner_accuracy.md: Interval)."""

SPREAD_LAUNCH = 1.83
"""The same where half of the layers or more are so small that the host's launches set their time, or nearly."""


def time_spread(shape: ModelShape, layout: Layout, device: Gpu) -> float:
    """The 80% interval of a step's time is from the estimate over this factor to the estimate times it."""
    # Links have no part in what a layer computes.
    rank = _Rank(shape, layout, device, Fabric(1, 1.0, 1.0, EFA), DEFAULT_CONSTANTS)
    kinds = rank.layers
    if sum(count for count, work, launch in kinds if work.forward < 1.5 * launch) >= sum(kind[0] for kind in kinds) / 2:
        return SPREAD_LAUNCH
    loops = layout.engine in ("plain", "deepspeed") or layout.library in ("transformers", "trainyard")
    if loops or layout.unfused:
        return SPREAD_UNMEASURED
    recent = shape.experts > 0 or layout.precision in ("fp8", "fp4") or device.generation in ("blackwell", "cdna3")
    return SPREAD_NEW if recent else SPREAD_DENSE


@dataclass(frozen=True)
class _LayerTimes:
    """Seconds of one micro-batch on a rank."""

    forward: float
    """Of a layer, the mean one."""
    backward: float
    again: float
    head: tuple[float, float]
    """Output projection and loss, forward and backward."""
    launching: tuple[float, float]
    """Of a layer, where the host runs ahead of the GPU through a pass: what it takes for that, forward and backward."""
    params: float
    """At least so many of a rank's layer."""
    bytes_per_second: float


@lru_cache(maxsize=4096)
def _layer_times(shape: ModelShape, layout: Layout, device: Gpu, constants: Constants) -> _LayerTimes:
    """Of a layout as layers know it (`Layout.of_layers`): a search asks for few of these, and for each often."""
    # Links have no part in what a layer computes.
    rank = _Rank(shape, layout, device, Fabric(1, 1.0, 1.0, EFA), constants)
    frozen = layout.method != "full"
    total = sum(count for count, _, _ in rank.layers)
    forward = backward = again = 0.0
    for count, work, each in rank.layers:
        share, launch = count / total, 0.0 if rank.is_queued else each
        forward += share * max(work.forward, launch)
        backward += share * max(work.backward(frozen=frozen), launch)
        again += share * rank.recomputed(work, launch)
    return _LayerTimes(
        forward,
        backward,
        again + rank.modules_again(),
        rank.head_seconds(frozen=frozen),
        rank.launching_layer() if rank.is_queued else (0.0, 0.0),
        stage_params(shape, layout, Stage(1, embedding=False, head=False, in_flight=0.0)).total,
        rank.bytes_per_second,
    )


def tensor_exposed(layout: Layout, constants: Constants) -> float:
    """Share of the tensor ranks' collectives that stands alone: all of it where each is waited for."""
    if layout.year < EARLY:
        return 1.0
    # nanotron's tensor parallelism is its own, of torch's collectives.
    overlapped = layout.engine == "megatron" and layout.library != "nanotron"
    return constants.tensor_exposed_megatron if overlapped else constants.tensor_exposed_torch


class _Rank(Operators):
    """Times of the operators of one rank for one micro-batch."""

    def __init__(self, shape: ModelShape, layout: Layout, device: Gpu, links: Fabric, constants: Constants) -> None:
        super().__init__(layout, device, constants)
        self.shape, self.links, self.tokens = shape, links, layout.tokens_per_micro_batch
        self.moe_era = math.exp(-constants.moe_gain_per_year * (min(layout.year, 2027.0) - 2026.0))

    def one_pass(self, stage: Stage) -> Pass:
        """One micro-batch through a stage."""
        shape, layout, constants = self.shape, self.layout, self.constants
        frozen = layout.method != "full"
        each = _layer_times(shape, layout.of_layers(), self.device, constants)
        forward, backward, again = (stage.layers * part for part in (each.forward, each.backward, each.again))
        least = 0.0 if self.is_queued else constants.launch_seconds
        for count, work in self._beside(stage):
            forward += count * max(work.forward, least)
            backward += count * max(work.backward(frozen=frozen), least)
            again += count * self.recomputed(work, least)
        if layout.library == "trainyard":  # compiled or not: blocks alone are compiled
            held = stage_params(shape, layout, stage).total
            for_weights = self._unfused.weights(held)
            forward += for_weights[0] / self.bytes_per_second
            backward += for_weights[1] / self.bytes_per_second
            if stage.embedding and not frozen:
                rows = shape.vocab * shape.hidden / self._head_split
                backward += self._unfused.embedding_gradient(rows) / self.bytes_per_second
        if layout.offloads_checkpoints:
            # One goes out while the next layer runs, and comes back while the one after it is differentiated.
            moved = stage.layers * self.tokens * self._stream * layout.element_bytes / PCIE_BYTES_PER_SECOND
            again += max(0.0, moved - forward) + max(0.0, moved - backward - again)
        heads = (1 + shape.mtp_layers) * stage.head
        if heads:
            forward += heads * max(each.head[0], least)
            backward += heads * (max(each.head[1], least) if each.head[1] else 0.0)
        if self.is_queued:
            launches = self._launches.stage(stage)
            (forward,) = queued([forward], launches[:1], constants)
            backward, again = queued([backward, again], launches[1:], constants)
        return Pass(
            forward=forward,
            backward=backward,
            recompute=again,
            tensor=tensor_seconds(shape, layout, stage, self.links) * tensor_exposed(layout, constants)
            + self._gathering(stage),
            expert=self._expert_exposed(stage),
            context=self._context_seconds(stage),
            sharding=sharding_seconds(shape, layout, stage, self.links),
        )

    @property
    def is_queued(self) -> bool:
        """Our own trainer's kernels are counted (`layer_launches`): the host runs ahead of the GPU through a pass. Of
        others' loops, and compiled blocks, a layer is the least that either can be late by."""
        return self.layout.library == "trainyard" and self.layout.unfused

    def launching_layer(self) -> tuple[float, float]:
        """Seconds of the host's for the mean layer's kernels, forward and backward, what is done again included."""
        forward, backward, again = (number / self.shape.layers for number in self._launches.all_layers())
        each = kernel_seconds(self.constants)
        return forward * each, (backward + again) * each

    @once
    def _trainer_layers(self) -> TrainerLayers:
        return layers_of(self.shape, self.layout)

    @once
    def _unfused(self) -> Unfused:
        return Unfused(self.shape, self.layout)

    @once
    def _launches(self) -> LayerLaunches:
        return LayerLaunches(self.shape, self.layout)

    def _gathering(self, stage: Stage) -> float:
        """Of the logits, where each tensor rank has them whole: for the loss, which waits for it. Backward each takes
        its own part of their gradients, without a word to the others."""
        shape, layout = self.shape, self.layout
        if not (layout.whole_logits and stage.head):
            return 0.0
        bytes_ = (1 + shape.mtp_layers) * self.tokens * shape.vocab * layout.element_bytes
        return all_gather_seconds(bytes_, group(layout.tensor, 1, self.links.gpus_per_node), self.links)

    def _beside(self, stage: Stage) -> Iterator[tuple[int, _Work]]:
        """(how many, each one's work) of layers that only one stage has: the encoder's before the first, those of
        further tokens after the last."""
        shape, layout = self.shape, self.layout
        if stage.embedding and shape.encoder_layers:
            alone = dataclasses.replace(shape, encoder_layers=0, cross_attention=False, experts=0)
            there = dataclasses.replace(layout, sequence_length=shape.encoder_tokens)
            encoder = _Rank(alone, there, self.device, self.links, self.constants)
            yield shape.encoder_layers, _sum(encoder._attention(), encoder._mlp(shape.ffn))
        if stage.head and shape.mtp_layers:
            block = self._routed() if shape.moe_layers else self._mlp(shape.ffn)
            product = self.product(self.tokens, shape.hidden, 2 * shape.hidden / layout.tensor)
            joined = _Work(product, 0.0, 0.0, gradients=self._as_long(product))
            yield shape.mtp_layers, _sum(joined, _sum(self._attention(), block))

    def exchanged_seconds(self, stage: Stage) -> float:
        """What ranks of contexts and experts send each other in a pass, and wait for."""
        return self._expert_exposed(stage) + self._context_seconds(stage)

    def _expert_exposed(self, stage: Stage) -> float:
        """Of the experts' exchange, what stands alone.

        A share of it where nobody says whether computing hides it, or it does; all of it where it doesn't, or where
        the host drives DeepEP's network half: where a group lies in one node there is none.
        """
        layout, constants = self.layout, self.constants
        crosses = expert_group(layout, self.links).num_nodes > 1
        alone = (layout.host_exchange and crosses) or layout.expert_overlap is False
        share = max(constants.expert_exposed, 1.0) if alone else constants.expert_exposed
        return expert_seconds(self.shape, layout, stage, self.links, constants) * self._fullest() * share

    def _context_seconds(self, stage: Stage) -> float:
        """Context parallelism: every rank's keys and values, and back their gradients, beyond the attention's time; of
        our own trainer also what layers with a delta rule exchange.

        (cp-1)/cp of the whole sequence's keys and values reach each rank forward; backward they come again, with as
        many gradients (Ring Attention, arXiv:2310.01889). Attention on one part hides the exchange of the next.
        """
        shape, layout = self.shape, self.layout
        if layout.context == 1:
            return 0.0
        if shape.wide_layers:
            kinds = [
                (number / shape.layers, _Rank(kind, layout, self.device, self.links, self.constants))
                for number, kind in shape.attentions
            ]
            return sum(share * rank._context_seconds(stage) for share, rank in kinds)
        width = 2 * shape.kv_dim
        if shape.kv_lora_rank:
            width = shape.query_dim + shape.value_dim + shape.heads * shape.rope_dim
        bytes_ = width * self.tokens * layout.context * layout.element_bytes / layout.tensor
        members = group(layout.context, layout.tensor, self.links.gpus_per_node)
        if layout.library == "trainyard":
            # Attention waits for both, and what is before it for their gradients (`strategies/context_parallel.py`).
            both = 2 * all_gather_seconds(bytes_ / 2, members, self.links)
            attentions = both * shape.num_attentions + self._delta_exchange_seconds(members) * shape.delta_layers
            return attentions * (2 if layout.recompute == "none" else 3) * stage.layers / shape.layers
        each = all_gather_seconds(bytes_, members, self.links)
        scores = self._score_seconds()
        forward, backward = max(0.0, each - scores), max(0.0, 2 * each - 2.5 * scores)
        again = forward if layout.recompute == "full" else 0.0
        return (forward + backward + again) * stage.layers * shape.num_attentions / shape.layers

    def _delta_exchange_seconds(self, members: Group) -> float:
        """A delta rule's own tokens of all heads for all tokens of own heads, and back (`strategies/context_states.py`
        of the trainer): queries, keys, values, and a decay in fp32 and a rate of each value's head; then the result."""
        shape, element = self.shape, self.layout.element_bytes
        mixed = 2 * shape.delta_key_width + shape.delta_value_width
        there = element * mixed + (4 + element) * shape.delta_value_heads
        own = self.tokens / self.layout.tensor
        widths = (there, element * shape.delta_value_width)
        return sum(all_to_all_seconds(own * width, members, self.links) for width in widths)

    @property
    def _has_torchs_checkpoints(self) -> bool:
        """Our own trainer's jobs have them under DeepSpeed too (training_container/trainer/models/recomputation.py)."""
        return self.layout.engine == "torch" or self.layout.library == "trainyard"

    @property
    def _stops_before_last(self) -> bool:
        """Whether full recomputation leaves out a layer's last product.

        torch's checkpoints compute again until the last tensor is there that the backward pass asks for; products of
        eight bits keep what they read when they are done (tests/trainer/test_recomputation.py counts them all in our
        own trainer; in torchtitan's compiled FP8 nobody has).
        """
        shape, layout = self.shape, self.layout
        # Of others' QLoRA it is not known.
        is_narrow = layout.precision == "fp8" if layout.library == "trainyard" else layout.method == "qlora"
        stops = not (is_narrow or reads_last_product(shape, layout))
        return stops and self._has_torchs_checkpoints and layout.year >= EARLY

    def modules_again(self) -> float:
        """Seconds a layer (the mean one) of blocks that Megatron's selection makes again, beside attention's core. What
        is element-wise alone (norms, activations) is left out."""
        shape, layout, seconds = self.shape, self.layout, 0.0
        if shape.moe_layers and layout.makes_again("moe"):
            seconds += shape.moe_layers * self._routed().forward
        elif shape.moe_layers and layout.makes_again("shared_experts"):
            seconds += shape.moe_layers * self._mlp(shape.shared_ffn).forward
        if layout.makes_again("mlp"):
            seconds += shape.num_mlps * self._mlp(shape.ffn).forward
        if shape.kv_lora_rank and layout.makes_again("mla_up_proj"):
            seconds += shape.num_attentions * self._latent_up_products()
        return seconds / shape.layers

    def recomputed(self, work: _Work, launch: float) -> float:
        """Seconds of a layer's work that is done again backward."""
        if self.layout.recompute == "full":
            return max(work.forward - (work.last if self._stops_before_last else 0.0), launch)
        if self.layout.recompute == "none":
            return 0.0
        if self._has_torchs_checkpoints:
            # All that is element-wise; torchtitan's selection by operator also computes half of the products again, and
            # our own trainer's the attention that drops scores, which has to draw the same numbers once more.
            drops = self.layout.library == "trainyard" and self.shape.attention_dropout
            again = work.elementwise + work.unfused[0] + work.scores * (drops and self.layout.flash_attention)
            again += work.remade
            return again + (0.4 * work.products if self.layout.saves_every_second_product else 0.0)
        # Megatron's: the core of attention, which fused kernels compute again anyway.
        is_core = self.layout.engine != "megatron" or self.layout.makes_again("core_attn")
        return (0.1 * work.scores if self.layout.flash_attention else work.scores) * is_core

    @once
    def layers(self) -> list[tuple[float, _Work, float]]:
        """(how many, GPU seconds, host seconds) of each kind of layer."""
        shape, constants = self.shape, self.constants
        small, large = constants.launch_seconds, constants.launch_moe_seconds * self.moe_era
        if self.layout.graphs_step:
            small = large = 0.0
        if self.layout.library == "trainyard":  # no host waits for the numbers of tokens
            large = small
        attention, dense = self._attention(), self._mlp(shape.ffn)
        if shape.cross_attention:
            attention = _sum(attention, attention)
        routed = self._routed() if shape.moe_layers else _Work(0.0, 0.0, 0.0)
        if shape.delta_layers:
            return self._with_delta(attention, dense, routed, small, large)
        if shape.wide_layers:
            return self._with_wide(dense, routed, small, large)
        if shape.is_hybrid:
            found: list[tuple[float, _Work, float]] = [
                (shape.mamba_layers, self._mamba(), small),
                (shape.attention_layers, attention, small / 2),
                (shape.moe_layers, routed, large),
                (shape.num_mlps, dense, small / 2),
            ]
        else:
            found = [
                (shape.num_mlps, _sum(attention, dense), small),
                (shape.moe_layers, _sum(attention, routed), small / 2 + large),
            ]
        return [item for item in found if item[0]]

    def _with_delta(
        self, attention: _Work, dense: _Work, routed: _Work, small: float, large: float
    ) -> list[tuple[float, _Work, float]]:
        """The same where some layers have a delta rule for attention: their share of both kinds of block."""
        shape = self.shape
        share = shape.delta_layers / shape.layers
        delta, beside = self._delta(), 0.0
        if self.layout.library == "trainyard":
            # transformers' torch code goes from chunk to chunk, all sequences of a micro-batch together: some nine
            # kernels each, where a layer that `small` is of launches some 45.
            beside = small * self.layout.sequence_length / DELTA_CHUNK / 5
        found = [
            (count * part, _sum(mixer, block), launch + more)
            for count, block, launch in ((shape.num_mlps, dense, small), (shape.moe_layers, routed, small / 2 + large))
            for part, mixer, more in ((1 - share, attention, 0.0), (share, delta, beside))
        ]
        return [item for item in found if item[0]]

    def _with_wide(self, dense: _Work, routed: _Work, small: float, large: float) -> list[tuple[float, _Work, float]]:
        """The same where attention is of two widths: each kind's share of both kinds of block."""
        shape = self.shape
        kinds = [
            (number / shape.layers, _Rank(kind, self.layout, self.device, self.links, self.constants)._attention())
            for number, kind in shape.attentions
        ]
        found = [
            (count * share, _sum(attention, block), launch)
            for count, block, launch in ((shape.num_mlps, dense, small), (shape.moe_layers, routed, small / 2 + large))
            for share, attention in kinds
        ]
        return [item for item in found if item[0]]

    def _elementwise(self, per_token: float) -> float:
        """Seconds for so many elements read or written for every token."""
        constants, layout = self.constants, self.layout
        passes = constants.passes_fused if layout.engine == "megatron" else constants.passes_compiled
        if layout.year < EARLY:
            passes = constants.passes_early
        return passes * per_token * self.tokens * layout.element_bytes / self.bytes_per_second

    def _moved(self, per_token: float, unfused: Callable[[], tuple[float, float]]) -> tuple[float, tuple[float, float]]:
        """Seconds of what is element-wise: by an era's kernels, or by an operation's own, forward and backward."""
        if not self.layout.unfused:
            return self._elementwise(per_token), (0.0, 0.0)
        forward, backward = unfused()
        return 0.0, (forward / self.bytes_per_second, backward / self.bytes_per_second)

    @property
    def _stream(self) -> float:
        """Elements of the layer's own width that a token has on a rank; twice as many where they are of fp32."""
        widened = self.layout.stream_bytes / self.layout.element_bytes
        return widened * self.shape.hidden / self.layout.norm_split

    def _attention(self) -> _Work:
        """Projections, scores, and norm, residual and rotation around them."""
        shape, split = self.shape, self.layout.tensor
        if shape.compression is not None:
            return self._compressed(shape.compression)
        width = shape.query_dim * (1 + shape.attention_gate) + shape.projected_kv_dim
        if shape.kv_lora_rank:
            products = self._latent_products() + self._indexing()
        else:
            products = self.product(self.tokens, width / split, shape.hidden)
        last, gradients = self.product(self.tokens, shape.hidden, shape.value_dim / split), 0.0
        if self.is_queued:
            products, gradients = self._one_by_one(attention_products(shape, split))
            products -= last
        around = 6 * self._stream + 3 * width / split
        unpacked = self._unpacked((width + shape.query_dim) * shape.hidden / split)
        around, unfused = self._moved(around, self._unfused.attention_half)
        return _Work(
            products + last,
            self._score_seconds(),
            around + self._adapters(),
            last=last,
            unpacked=unpacked,
            unfused=unfused,
            gradients=gradients,
        )

    def _indexing(self) -> float:
        """Projections of what chooses positions, of which some layers may have none: the mean layer's."""
        shape, indexer = self.shape, self.shape.indexer
        if indexer is None:
            return 0.0
        queries = self.product(self.tokens, indexer.heads * indexer.head_dim, shape.q_lora_rank)
        rest = self.product(self.tokens, indexer.head_dim + indexer.heads, shape.hidden)
        return (queries + rest) * indexer.layers / shape.layers

    def _compressed(self, compression: Compression) -> _Work:
        """DeepSeek-V4's attention, the mean layer's, and the weights of its residual streams.

        Streams are read to be weighed, read to be joined to what the block reads, and read and written when the
        block's result is added to each of them; ordinary layers read and write one.
        """
        shape, indexer, split = self.shape, self.shape.indexer, self.layout.tensor
        assert indexer is not None  # the reader gives both
        chosen, heavy = compression.chosen_layers / shape.layers, compression.heavy_layers / shape.layers
        queries = self.product(self.tokens, shape.q_lora_rank + shape.head_dim, shape.hidden)
        queries += self.product(self.tokens, shape.query_dim / split, shape.q_lora_rank)
        groups = max(1.0, compression.output_groups / split)
        depth = shape.query_dim / compression.output_groups
        joined = self.product(self.tokens * groups, compression.output_rank, depth, groups)
        last = self.product(self.tokens, shape.hidden, compression.output_groups * compression.output_rank / split)
        entries = chosen * self.product(self.tokens, 4 * (shape.head_dim + indexer.head_dim), shape.hidden)
        entries += chosen * self.product(self.tokens, indexer.heads * indexer.head_dim, shape.q_lora_rank)
        entries += heavy * self.product(self.tokens, 2 * shape.head_dim, shape.hidden)
        weights = compression.streams * (compression.streams + 2)
        weighed = 2 * self.product(self.tokens, weights, compression.streams * shape.hidden, wide=True)
        around = (4 * compression.streams + 4) * self._stream + 3 * (2 * shape.query_dim + shape.head_dim) / split
        around += 6 * (chosen * 4 * (shape.head_dim + indexer.head_dim) + heavy * 2 * shape.head_dim)
        return _Work(
            queries + joined + last + entries + weighed, self._score_seconds(), self._elementwise(around), last=last
        )

    def _as_long(self, product: float) -> float:
        """Seconds of a product's gradients where each takes as long as it does; 0 where no gradients are reckoned."""
        return product * (1.0 if self.layout.method != "full" else 2.0) * self.is_queued

    def _one_by_one(self, products: Iterable[Product]) -> tuple[float, float]:
        """Seconds of a layer's products on a rank's tokens, forward and backward."""
        frozen, sizes = self.layout.method != "full", [size for size in products if all(size)]
        forward = sum(self.product(self.tokens, *size) for size in sizes)
        return forward, sum(self.gradients(self.tokens, *size, frozen=frozen) for size in sizes)

    def _adapters(self) -> float:
        """LoRA beside a layer's products: matrices so narrow that only what they read and write takes time.

        The input once for the first matrix; the second one's result written, scaled (read and written) and added to
        the product's (both read, their sum written). So peft computes them; Megatron's and Automodel's adapters have
        kernels of their own, and no published run says what these take.
        """
        layout = self.layout
        by_steps = layout.engine == "plain" or layout.library == "trainyard"
        if layout.method == "full" or layout.adapter != "lora" or not by_steps:
            return 0.0
        targets = len(layout.lora_targets) or layout.num_lora_targets
        # Tensor ranks hold either the input or the result cut, of which the result has most passes. These are counted
        # one by one, not in the units of an era's kernels.
        elements = 7.0 * targets * self._stream * layout.norm_split / layout.tensor
        return elements * self.tokens * layout.element_bytes / self.bytes_per_second

    def _unpacked(self, weights: float) -> float:
        """Four-bit weights read, and written with 16 bits for the product that reads them."""
        if self.layout.method != "qlora":
            return 0.0
        each = QLORA_BYTES + self.layout.element_bytes
        if self.layout.library == "trainyard":
            each = UNPACKED_BYTES
        return weights * each / self.bytes_per_second

    def _latent_products(self) -> float:
        """DeepSeek's projections down to the latents and up from them."""
        shape = self.shape
        down = self.product(self.tokens, shape.q_lora_rank + shape.kv_lora_rank + shape.rope_dim, shape.hidden)
        return down + self._latent_up_products()

    def _latent_up_products(self) -> float:
        shape, split = self.shape, self.layout.tensor
        queries = shape.heads * (shape.head_dim + shape.rope_dim)
        up = self.product(self.tokens, queries / split, shape.q_lora_rank or shape.hidden)
        return up + self.product(self.tokens, (shape.query_dim + shape.value_dim) / split, shape.kv_lora_rank)

    def _score_seconds(self) -> float:
        """Attention's own products: causal and fused, or whole and through memory."""
        shape, layout, constants = self.shape, self.layout, self.constants
        each = 4.0 * shape.score_dim * self.tokens / layout.tensor
        flops = each * shape.mean_span(layout.sequence_length)
        if shape.indexer is not None:
            share = shape.indexer.layers / shape.layers
            flops += share * self.tokens * shape.indexer.flops_per_token(layout.sequence_length)
        if layout.flash_attention:
            masked, whole = self._trainer_layers.masked_share, each * layout.sequence_length
            seconds = self.fused_attention(flops if not masked else whole, shape.head_dim, efficient=self._is_efficient)
            hidden = self.fused_attention(whole, shape.head_dim, is_causal=False, efficient=True)
            return (1 - masked) * seconds + masked * hidden
        # Tiles of such products are 64 wide.
        flops *= math.ceil(shape.head_dim / 64) * 64 / shape.head_dim
        if layout.unfused:
            return flops / (0.4 * self.attention_peak)  # `Unfused` has what moves
        matrix = self.tokens * layout.sequence_length * shape.heads / layout.tensor * layout.element_bytes
        return flops / (0.4 * self.attention_peak) + matrix * constants.attention_matrix_passes / self.bytes_per_second

    @property
    def _is_efficient(self) -> bool:
        """Latent attention's values are narrower than its keys, which our own trainer's torch has this kernel for; and
        for heads that are too wide for others."""
        is_wide = self.shape.head_dim > WIDEST_SHARED_HEAD
        return self.layout.library == "trainyard" and (self.shape.kv_lora_rank > 0 or is_wide)

    def _mlp(self, width: float) -> _Work:
        """A feed-forward block of that width."""
        shape, split = self.shape, self.layout.tensor
        if not width:
            return _Work(0.0, 0.0, 0.0)
        inputs = 2 if shape.gated_mlp else 1
        products = self.product(self.tokens, inputs * width / split, shape.hidden)
        last, gradients = self.product(self.tokens, shape.hidden, width / split), 0.0
        if self.is_queued:
            products, gradients = self._one_by_one(block_products(shape, width, split))
            products -= last
        around = 6 * self._stream + (inputs + 1) * width / split
        unpacked = self._unpacked((inputs + 1) * width * shape.hidden / split)
        around, unfused = self._moved(around, lambda: self._unfused.block(width))
        return _Work(products + last, 0.0, around, 0.0, last, unpacked, unfused, gradients=gradients)

    def _fullest(self) -> float:
        """The tokens of the fullest rank's experts over the mean; with a capacity all have as many."""
        return self.layout.capacity_factor or self.constants.imbalance

    def _routed(self) -> _Work:
        """Router, routed experts and the shared one; each rank has its share of experts and of tokens."""
        if self.layout.library == "trainyard":
            return self._trainer_routed()
        shape, layout, constants = self.shape, self.layout, self.constants
        inputs = 2 if shape.gated_mlp else 1
        hidden = shape.latent or shape.hidden
        copies = self.tokens * shape.experts_per_token / layout.tensor * self._fullest()
        # Each tensor rank may hold a slice of every one.
        local = max(1.0, shape.experts / layout.expert)
        products = self.product(copies, inputs * shape.moe_ffn, hidden, local)
        products += self.product(copies, hidden, shape.moe_ffn, local)
        products += self.product(self.tokens / layout.norm_split, shape.experts, shape.hidden, wide=True)
        if shape.latent:
            products += 2 * self.product(self.tokens / layout.norm_split, shape.latent, shape.hidden)
        shared = self._mlp(shape.shared_ffn)
        passes = constants.moe_passes * self.moe_era * hidden
        if not layout.graphs_step:
            passes += (inputs + 1) * shape.moe_ffn
        moved = copies * passes * layout.element_bytes / self.bytes_per_second
        # Of an unfused layer the shared expert's block has the norm and the residual.
        streams = 4 * shape.compression.streams - 2 if shape.compression else 0
        around = 0.0 if sum(shared.unfused) else self._elementwise((6 + streams) * shape.hidden / layout.norm_split)
        waits = constants.launch_exposed * constants.launch_moe_seconds * self.moe_era
        idle = 0.0 if layout.graphs_step else waits
        held = shape.experts / layout.expert_split * (inputs + 1) * shape.moe_ffn * hidden
        unpacked = self._unpacked(held) + shared.unpacked
        moved += around + shared.elementwise
        return _Work(products + shared.products, 0.0, moved, idle, unpacked=unpacked, unfused=shared.unfused)

    def _trainer_routed(self) -> _Work:
        """The same of our own trainer's, whose experts are grouped products that no host waits for."""
        shape, layout, inputs = self.shape, self.layout, 1 + self.shape.gated_mlp
        hidden, split = shape.latent or shape.hidden, layout.expert_split
        # A rank that has all experts has all of its tokens' copies, however these are spread.
        copies = self.tokens * shape.experts_per_token / layout.tensor * (self.constants.imbalance if split > 1 else 1)
        local = max(1.0, shape.experts / split)
        frozen, sizes = layout.method != "full", ((inputs * shape.moe_ffn, hidden), (hidden, shape.moe_ffn))
        products = sum(self.product(copies, *size, local) for size in sizes)
        gradients = sum(self.gradients(copies, *size, local, frozen=frozen) for size in sizes)
        router = self.product(self.tokens / layout.norm_split, shape.experts, shape.hidden, wide=True)
        shared = self._mlp(shape.shared_ffn)
        moved = [each / self.bytes_per_second for each in self._unfused.routed(copies)]
        if not self.is_queued:  # compiled: what puts copies in order moves as much
            return _Work(products + router + shared.products, 0.0, moved[0] + shared.elementwise)
        return _Work(
            products + router + shared.products,
            0.0,
            shared.elementwise,
            unpacked=self._unpacked(shape.experts / split * (inputs + 1) * shape.moe_ffn * hidden) + shared.unpacked,
            unfused=(moved[0] + shared.unfused[0], moved[1] + shared.unfused[1]),
            remade=0.0 if shape.batches_experts else products,
            gradients=gradients + self._as_long(router) + shared.gradients,
        )

    def _mamba(self) -> _Work:
        """Projections in and out, the convolution and the scan, which is bound by memory."""
        shape, split = self.shape, self.layout.tensor
        mixed = shape.mamba_inner + 2 * shape.mamba_groups * shape.mamba_state
        products = self.product(self.tokens, (shape.mamba_inner + mixed) / split, shape.hidden)
        last = self.product(self.tokens, shape.hidden, shape.mamba_inner / split)
        around = 6 * self._stream + 12 * mixed / split
        return _Work(products + last, 0.0, self._elementwise(around), last=last)

    def _delta(self) -> _Work:
        """Projections in and out, and the delta rule between: our own trainer's as torch's code, in fp32 and bound by
        memory (three passes over what it keeps); others' as kernels."""
        shape, split = self.shape, self.layout.tensor
        products = self.product(self.tokens, shape.delta_projected / split, shape.hidden)
        last = self.product(self.tokens, shape.hidden, shape.delta_value_width / split)
        mixed = 2 * shape.delta_key_width + shape.delta_value_width
        around = self._elementwise(6 * self._stream + 12 * mixed / split)
        rule, precision = 0.0, "bf16"
        if self.layout.library == "trainyard":
            rule = 3 * (self._trainer_layers.delta_bytes / self.bytes_per_second)
            precision = "fp32"
        # Two products within a chunk and two solved systems, one product with new values, three with the state.
        keys, values = shape.delta_value_heads * shape.delta_key_head_dim, shape.delta_value_width
        flops = DELTA_CHUNK * (5 * keys + 3 * values) + 6 * values * shape.delta_key_head_dim
        scores = flops * self.tokens / split / (0.4 * self.device.peak_tflops(precision) * 1e12)
        unpacked = self._unpacked(shape.hidden * (shape.delta_projected + shape.delta_value_width) / split)
        gradients = self._as_long(products + last)
        return _Work(products + last, scores, around + rule, last=last, unpacked=unpacked, gradients=gradients)

    def head_seconds(self, *, frozen: bool) -> tuple[float, float]:
        """The output projection and the loss, forward and backward; our own trainer's, made in the head, has its
        gradient at once."""
        shape, layout = self.shape, self.layout
        logits = self.tokens * shape.vocab / self._head_split
        product, again = self._head_product(), 1.0 if frozen else 2.0
        if layout.whole_logits:
            logits *= self._head_split
        if layout.library == "trainyard":
            return self._trainer_head_seconds(logits)
        product += shape.head_products * self.product(self.tokens, shape.hidden, shape.hidden)
        forward = product + 3 * logits * 4 / self.bytes_per_second
        return forward, forward * again

    def _trainer_head_seconds(self, logits: float) -> tuple[float, float]:
        """The same of our own trainer."""
        shape, layout, layers = self.shape, self.layout, self._trainer_layers
        rows = self.tokens
        if layers.loss_is_in_head:
            rows = min(rows, float(layout.loss_chunk_tokens or rows))
        each = rows, shape.vocab / self._head_split, shape.hidden
        products = [self.product(*each, wide=True), self.gradients(*each, frozen=layout.method != "full")]
        if self._is_unaligned:
            products = [product / self.constants.unaligned_speed for product in products]
        moves = self._unfused
        if layers.loss_is_in_head:
            return self.tokens / rows * sum(products) + moves.loss(logits) / self.bytes_per_second, 0.0
        forward, backward = (moved / self.bytes_per_second for moved in moves.whole_loss(logits))
        return products[0] + forward, products[1] + backward

    @property
    def _is_unaligned(self) -> bool:
        """Rows of the logits don't begin at multiples of 16 bytes. Over several ranks others pad them: they have to
        divide. The head stays in 16 bits under narrower ones."""
        row_bytes = self.shape.vocab * max(2, self.layout.element_bytes)
        return bool(self._head_split == 1 and row_bytes % 16 and not self.layout.pads_vocabulary)

    @property
    def _head_split(self) -> int:
        """Ranks that share the output projection."""
        if self.layout.library == "trainyard" and self.shape.vocab % self.layout.tensor:
            return 1  # whole on every rank (training_container/trainer/strategies/tensor_parallel.py)
        return self.layout.tensor

    def _head_product(self) -> float:
        """The output projection."""
        product = self.product(self.tokens, self.shape.vocab / self._head_split, self.shape.hidden, wide=True)
        return product / self.constants.unaligned_speed if self._is_unaligned else product


def _sum(one: _Work, other: _Work) -> _Work:
    """One after the other."""
    return _Work(
        one.products + other.products,
        one.scores + other.scores,
        one.elementwise + other.elementwise,
        one.idle + other.idle,
        other.last,
        one.unpacked + other.unpacked,
        (one.unfused[0] + other.unfused[0], one.unfused[1] + other.unfused[1]),
        one.remade + other.remade,
        one.gradients + other.gradients,
    )
