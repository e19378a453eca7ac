"""The worst moment of a step of our own trainer: what a rank holds beside its state, in closed form.

A step has a few moments that can be the worst: the loss, when all layers' activations are there; the backward pass of
a layer, with the gradients that it makes (in its feed-forward block, and in either norm), where FSDP has gathered two
layers and still sends the gradients of the one before; and the end, when the vocabulary's gradients are reduced. Which
one it is depends on the sizes, so each is reckoned, and the largest is the answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainyard.planner.layout import Layout
from trainyard.planner.shapes import ModelShape
from trainyard.planner.trainer_layers import NORM_BACKWARD_BYTES, TrainerLayers

if TYPE_CHECKING:
    from trainyard.planner.memory import Stage, StageParams


@dataclass(frozen=True)
class Moment:
    """Bytes beside the training state."""

    activations: float
    """With gradients of activations."""
    loss: float
    buffers: float
    """Gathered and cast weights, gradients on their way, what pipelines have received."""
    gradients: float = 0.0
    """This rank's own, where they only come to be in the one backward pass of a step; counted with the state."""

    @property
    def total(self) -> float:
        """By which moments are compared."""
        return self.activations + self.loss + self.buffers + self.gradients


def worst_moment(shape: ModelShape, layout: Layout, stage: "Stage", params: "StageParams") -> Moment:
    """The moment of a step at which a rank of the stage holds most."""
    return max(_Step(shape, layout, stage, params).moments(), key=lambda moment: moment.total)


class _Step:
    """The moments of one rank."""

    def __init__(self, shape: ModelShape, layout: Layout, stage: "Stage", params: "StageParams") -> None:
        self._shape, self._layout, self._stage = shape, layout, stage
        self._layers = TrainerLayers(shape, layout)
        vocabulary = self._layers.head_weight
        is_tied = shape.tied_embeddings and stage.embedding
        matrices = stage.embedding + (stage.head and not is_tied)
        self._root = vocabulary * matrices + shape.learned_positions * shape.hidden * stage.embedding
        self._layer = max(params.total - self._root, 0.0) / max(stage.layers, 1)
        self._params = params.total
        self._passes = stage.layers * stage.in_flight
        self._is_sharded = layout.engine == "torch" and not self._is_replicated

    @property
    def _is_replicated(self) -> bool:
        layout = self._layout
        split = layout.tensor * layout.pipeline * layout.context * layout.expert
        return split == 1 and layout.zero_stage != 3

    def moments(self) -> Iterator[Moment]:
        """All that can be the worst."""
        if self._stage.head:
            yield self._at_loss()
        for number in sorted({0, 1, self._stage.layers - 2, self._stage.layers - 1}):
            if 0 <= number < self._stage.layers:
                yield from self._in_layer(number)
        yield from self._at_end()

    def _own_gradients(self, num_layers: float) -> float:
        """This rank's part of the gradients of so many layers, where they are not there from micro-batches before."""
        layout = self._layout
        if layout.num_micro_batches > 1 or layout.pipeline > 1 or not self._is_sharded or layout.method != "full":
            return 0.0
        return num_layers * self._layer * 4 / layout.shard_degree

    def _ends(self) -> float:
        """What a stage of a pipeline keeps of what it gives, until that micro-batch's backward pass."""
        layout, layers = self._layout, self._layers
        if layout.pipeline == 1:
            return 0.0
        passes = self._stage.in_flight * layout.chunks
        sent = passes - (1 if self._stage.head else 0)
        split = passes * layers.input_bytes if layout.tensor > 1 and layout.recompute == "selective" else 0.0
        return max(sent, 0.0) * layers.whole_hidden_bytes + split

    def _at_loss(self) -> Moment:
        """The last micro-batch in flight has just gone through the head."""
        layers = self._layers
        held = self._passes * layers.kept_bytes + self._ends() + layers.final_norm_bytes + self._made_apart()
        return Moment(held, layers.loss_bytes, self._weights(num_layers=1) + self._received())

    def _in_layer(self, number: int) -> Iterator[Moment]:
        """The backward pass of the layer that is `number`th from the stage's end."""
        layers, layout = self._layers, self._layout
        others = (self._passes - 1 - number) * layers.kept_bytes + self._ends()
        above = layers.split_hidden * layers.residual_element
        if layout.tensor > 1:
            above += layers.whole_hidden_bytes
        gradients = self._own_gradients(number)
        before = self._layer if number else 0.0
        mlp = self._mlp_weights()
        left = layers.whole_bytes - layers.mlp_bytes
        # The feed-forward block: its output's factors have their gradients, its first matrix has its own.
        in_block = layers.whole_bytes - layers.product_bytes + self._block_tensors() * layers.product_bytes + above
        yield self._moment(others + in_block, self._weights_and_gradients(mlp / 3, before), mlp / 3, gradients)
        # Both products that read a norm's output have given it a gradient.
        after_block = left + above + 2 * layers.whole_hidden_bytes
        yield self._moment(others + after_block, self._weights_and_gradients(mlp, before), mlp, gradients)
        # The norms.
        norm = layers.split_hidden * self._norm_bytes() + above
        second = left - layers.mlp_norm_output_bytes + norm
        yield self._moment(others + second, self._weights_and_gradients(mlp, before), mlp, gradients)
        first = layers.norm_input_bytes + norm
        yield self._moment(others + first, self._weights_and_gradients(self._layer, before), self._layer, gradients)

    def _moment(self, activations: float, buffers: float, made: float, gradients: float) -> Moment:
        """`made`: weights of which the backward pass has just made gradients; a pipeline adds them up afterwards."""
        if self._layout.pipeline > 1 and self._layout.method == "full":
            activations += self._made_apart() or made * self._layers.element
        return Moment(activations, 0.0, buffers + self._received(), gradients)

    def _made_apart(self) -> float:
        """zero_bubble makes the gradients of a stage, of a rank's two, in a pass of their own."""
        return self._params / 2 * self._layers.element * (self._layout.schedule == "zero_bubble")

    def _at_end(self) -> Iterator[Moment]:
        """The embedding's gradient, and the reduction of the vocabulary's matrices."""
        layout, element = self._layout, self._layers.element
        if not self._is_sharded or layout.pipeline > 1 or layout.method != "full":
            return
        gradients = self._own_gradients(self._stage.layers)
        wide = 4 if element < 4 else element
        below = self._layers.input_bytes
        yield Moment(below, 0.0, self._root * (element + wide), gradients)
        yield Moment(below, 0.0, self._root * 2 * element + self._layer * wide, gradients)

    def _block_tensors(self) -> int:
        """Gradients as wide as the feed-forward block, at their most."""
        return 3 if self._shape.gated_mlp or self._shape.activation_tensors > 1 else 2

    def _norm_bytes(self) -> float:
        return NORM_BACKWARD_BYTES if self._shape.norm == "rms" else 2 * self._layers.residual_element

    def _mlp_weights(self) -> float:
        """Of a layer's parameters, those of its feed-forward block."""
        shape = self._shape
        block = shape.mlp_params(shape.ffn) * shape.num_mlps / shape.layers / self._layout.tensor
        return min(block, self._layer) if not shape.moe_layers else self._layer

    def _weights(self, num_layers: int) -> float:
        """Weights that are gathered, or cast."""
        layers, layout = self._layers, self._layout
        is_trained = layout.method == "full"
        if self._is_replicated:
            if not layers.is_autocast:
                return 0.0
            cast = self._stage.layers * self._layer + layers.head_weight * self._stage.head
            return layers.element * (cast if is_trained else self._adapters())
        if not self._is_sharded:
            return 0.0
        if layout.pipeline > 1:
            return self._params * (layers.element + (max(4, layers.element) if is_trained else 0))
        if layout.keeps_gathered:
            return self._params * layers.element
        return (self._root + num_layers * self._layer) * layers.element

    def _adapters(self) -> float:
        layout, shape = self._layout, self._shape
        return shape.layers * adapter_params(shape, layout)

    def _weights_and_gradients(self, made: float, before: float) -> float:
        """In a backward pass: this layer and the next, the gradients that it made, those of the one `before` on their
        way, and the head's."""
        layers, layout = self._layers, self._layout
        found = self._weights(num_layers=2)
        if layout.method != "full" or layout.pipeline > 1:
            return found
        head = layers.head_weight * self._stage.head
        if not self._is_sharded:
            # They are the rank's own at once.
            return found
        return found + (made + head) * layers.element + before * max(4, layers.element)

    def _received(self) -> float:
        """What a pipeline's rank has received of micro-batches in flight, and one gradient."""
        layout = self._layout
        if layout.pipeline == 1:
            return 0.0
        passes = self._stage.in_flight * layout.chunks
        if self._stage.embedding:
            passes = passes * (layout.chunks - 1) / (2 * layout.chunks)
        return (passes + (0 if self._stage.head and layout.chunks == 1 else 1)) * self._layers.whole_hidden_bytes


def adapter_params(shape: ModelShape, layout: Layout) -> float:
    """Parameters of one layer's adapters, each of its two matrices by the sizes of what it is put beside."""
    query, key, hidden, ffn = shape.query_dim, shape.kv_dim, shape.hidden, shape.ffn
    sizes = {
        "q_proj": hidden + query,
        "k_proj": hidden + key,
        "v_proj": hidden + key,
        "o_proj": query + hidden,
        "gate_proj": hidden + ffn,
        "up_proj": hidden + ffn,
        "down_proj": ffn + hidden,
        "fc1": hidden + ffn,
        "fc2": ffn + hidden,
        "c_attn": hidden + 3 * query,
        "query_key_value": hidden + 3 * query,
        "dense": query + hidden,
        "c_fc": hidden + ffn,
        "dense_h_to_4h": hidden + ffn,
        "dense_4h_to_h": ffn + hidden,
    }
    return float(sum(layout.lora_rank * sizes.get(name, 2 * hidden) for name in layout.lora_targets))
