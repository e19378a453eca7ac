"""The moments of a step that adapters (LoRA, QLoRA) have of their own, on a rank of our trainer.

Next to no gradients are made of them, so that a forward pass can be the worst; where layers are made again, that is as
dear as to go back through them, since of what frozen weights read nothing is kept; and QLoRA reads four-bit weights by
way of wider copies. Whence each term comes: `trainer_layers`, which has what such layers keep, and `quantized_reads`.
"""

from collections.abc import Iterator

from trainyard.planner.trainer_experts import gathering_bytes
from trainyard.planner.trainer_rank import Moment, TrainerRank


def in_forward(rank: TrainerRank) -> Iterator[Moment]:
    """A unit that is put together beside what the one before it was gathered into, and its last layer's feed-forward
    block."""
    layers, units = rank.layers, rank.units
    mask = layers.given_mask_bytes * (rank.layout.recompute == "none")
    for number in units.dearest_in_forward:
        before = rank.kept_before(number) + mask + _embedded(rank)
        yield Moment(before + layers.input_bytes, 0.0, rank.weights(units.arriving(number)) + rank.received)
        gathered = rank.weights(units.running(number)) + rank.received
        here = rank.of_kind(number)
        running = max(_running(here, number), _in_forward_norm(here), _at_layers_end(here))
        yield Moment(before + running, 0.0, gathered)
    if layers.has_norm_copies and rank.stage.head:
        # The last norm, written out: what it reads, twice in float32, and narrowed.
        held = rank.kept_in_all + _embedded(rank) + layers.input_bytes + layers.hidden * (8 + layers.element)
        yield Moment(held, 0.0, rank.weights(rank.last_gathered()) + rank.received)


def at_first_pass(rank: TrainerRank) -> Iterator[Moment]:
    """In a pipeline, where sums that would outweigh it are small: what FSDP gathered a unit into, the ends' before any
    layer's, stays until the next one is put together of its own."""
    layers, layer = rank.layers, 2 * rank.units.of(rank.stage.layers - 1) if rank.stage.layers else 0.0
    ends = 2 * rank.root * layers.element
    yield Moment(layers.input_bytes, 0.0, ends + layer * layers.weight_element + rank.received)
    experts = 0.0
    if layers.is_spread and rank.routed_layers and rank.layout.expert_shard_degree > 1:
        experts = gathering_bytes(rank) - rank.experts * layers.weight_element  # one of three stays
    put_together = max(layer * layers.weight_element, experts)
    yield Moment(layers.input_bytes, 0.0, rank.weights(0.0) + put_together + rank.received)


def _embedded(rank: TrainerRank) -> float:
    """In a forward pass a model's code has what the embedding gave, of which sequence parallelism made parts; else it
    counts as what the first layer keeps, if that keeps it."""
    layers = rank.layers
    if rank.layout.tensor > 1:
        return layers.whole_hidden_bytes * rank.stage.embedding
    return layers.input_bytes * (layers.unreached_bytes > 0) * rank.stage.embedding


def _in_forward_norm(rank: TrainerRank) -> float:
    """The second norm of a layer that is kept whole, written out: what it makes in float32 is narrowed beside the
    residual and the layer's own input."""
    layers = rank.layers
    if not layers.has_norm_copies or rank.layout.recompute != "none":
        return 0.0
    return layers.attention_half_bytes + 2 * layers.input_bytes + layers.split_hidden * (4 + layers.element)


def _at_layers_end(rank: TrainerRank) -> float:
    """A layer that is kept whole and ends in a norm, when what this gave has been added to the residual; with what came
    to the layer."""
    layers = rank.layers
    if rank.layout.recompute != "none" or not rank.shape.norms_after:
        return 0.0
    residual = layers.whole_hidden_bytes * (not layers.adapts_first)  # else kept
    return layers.whole_bytes + layers.unkept_input_bytes + residual + 2 * layers.whole_hidden_bytes


def _running(rank: TrainerRank, number: int) -> float:
    """What there is of a layer in its forward pass, while its feed-forward block's last product runs. Of one that is
    computed again nothing is kept: there is what its code has in its hands."""
    layers = rank.layers
    held, is_again = 2 * layers.whole_hidden_bytes, rank.layout.recompute == "full"
    if number < rank.routed_layers:
        rows = 2 * (layers.rows_bytes + layers.weighed_bytes) + 3 * layers.expert_product_bytes
        there = held + layers.kept_routed_bytes
        if rank.layout.recompute == "none":
            there = layers.block_frame_bytes + layers.attention_half_bytes + held * layers.has_norm_copies
        return there + max(layers.reads.experts_bytes, rows)
    if is_again:
        block = 3 * layers.product_bytes + max(layers.product_bytes, layers.reads.last_bytes)
        return held + layers.input_bytes + layers.block_frame_bytes + block
    # What is activated beside what is gated; the last product, its weight read, or its adapter's, scaled too, of which
    # selective recomputation keeps one; what the layer gives.
    is_whole = rank.layout.recompute == "none"
    num_last = 1 + layers.adapts_last * (1 + is_whole)
    is_by_steps = rank.shape.activation_tensors > 1 and not is_whole
    activated = layers.product_bytes * (rank.shape.gated_mlp or is_by_steps)
    made = layers.whole_hidden_bytes * (layers.adapts_last and not is_whole)  # kept once its weight has been read
    last = max(activated, layers.reads.last_bytes - made, num_last * layers.whole_hidden_bytes)
    if is_whole:
        # Its last norm has read nothing yet.
        there = layers.whole_bytes - layers.mlp_norm_output_bytes - layers.last_norm_bytes
        there += held * layers.has_norm_copies
        there += layers.unkept_input_bytes
        # Of parallel halves attention's result waits for the other's.
        there += layers.whole_hidden_bytes * rank.shape.parallel_residual
        running = layers.product_bytes * (not layers.keeps_block_result) + last
        if layers.adapts_first and not rank.shape.gated_mlp:
            # Or the first one's, when nothing of the block is kept yet.
            running = max(running, 3 * layers.product_bytes - layers.mlp_bytes)
        return there + layers.block_frame_bytes + max(running, held)
    there = layers.kept_bytes + layers.input_bytes + layers.block_frame_bytes + layers.summed_products_bytes
    return there + max(layers.product_bytes + last, held)


def in_backward(rank: TrainerRank) -> Iterator[float]:
    """What there is of a layer without experts in its backward pass, when it is made again; and when QLoRA reads the
    weights of products once more."""
    if rank.layout.recompute != "none":
        yield _made_again(rank)
    if rank.layout.method == "qlora":
        yield max(_reading_first(rank), _reading_mixing(rank))


def _made_again(rank: TrainerRank) -> float:
    """Of a layer that is made again what there is in its feed-forward block, or in its norms."""
    layers, above = rank.layers, rank.above
    # Gate and up, or what is activated, and as many tensors on the way to the last product's input.
    block = (4 if rank.shape.gated_mlp else 2) * layers.product_bytes
    if layers.reads_last_again:
        block = max(block, block - layers.product_bytes + layers.reads.last_bytes)
    if rank.layout.recompute == "full" and "gate_up_proj" in rank.layout.lora_targets:
        block = max(block, 3 * 2 * layers.product_bytes)  # the two's product, and its adapter's, scaled too
    if rank.layout.recompute == "full" and layers.adapts_first and not rank.shape.gated_mlp:
        # Or the first product, its adapter's, scaled too.
        waits = layers.whole_hidden_bytes * rank.shape.parallel_residual  # attention's result
        block = max(block, 3 * layers.product_bytes + waits)
    again = layers.attention_half_bytes + block + above + layers.block_frame_bytes
    again += layers.input_bytes * layers.has_norm_copies - layers.mlp_norm_output_bytes
    if rank.shape.norms_after or not layers.reads_last_again:
        # Whose input nothing has given yet; beside the last weight that QLoRA reads again traces of four norms a layer
        # have as much, all the same (`test_adapters.py`: "norms after both").
        again -= layers.last_norm_bytes
    again = max(again, _in_norm_again(rank))
    # What came to the last product's input already; or what came to the layer, scaled for that one's adapter: where a
    # norm comes after it, that one asks first.
    scaled = layers.adapts_last and not rank.shape.ends_in_norm
    again += layers.product_bytes * layers.stops_before_reading + layers.input_bytes * scaled
    if rank.shape.ends_in_norm:
        again = max(again, _in_last_norm_again(rank))
    return again


def _in_norm_again(rank: TrainerRank) -> float:
    """The second norm of a layer that is made again, written out, as in `_in_forward_norm`; beside what is kept of the
    feed-forward block, and the gradient that came to the layer."""
    layers = rank.layers
    if not layers.has_norm_copies:
        return 0.0
    norm = layers.input_bytes + layers.split_hidden * (4 + layers.element)
    half = layers.attention_half_bytes - layers.mlp_norm_output_bytes
    return half + norm + layers.kept_block_bytes + rank.above


def _in_last_norm_again(rank: TrainerRank) -> float:
    """Of a layer that is made again the norm of what its feed-forward block gave, which asks for it; what came to it is
    there in float32 too, where the norm is written out, and what it gives beside what it reads."""
    layers = rank.layers
    # The residual stands for what the block read, which is gone.
    kept = layers.attention_half_bytes + layers.input_bytes
    kept += (1 + rank.shape.gated_mlp + layers.keeps_block_result) * layers.product_bytes
    if not layers.has_norm_copies:
        # Or before it the last product's adapter gives its own, which is scaled.
        return kept + max(layers.input_bytes, 2 * layers.whole_hidden_bytes * layers.adapts_last) + rank.above
    return kept + layers.whole_hidden_bytes + 2 * 4 * layers.split_hidden + rank.above


def _reading_first(rank: TrainerRank) -> float:
    """QLoRA: the backward pass of the products that read the second norm's output, the last of them first: what came to
    each, and what an adapter gave."""
    layers, above = rank.layers, rank.above
    adapted = layers.whole_hidden_bytes * layers.adapts_first
    came = layers.product_bytes * (1 + rank.shape.gated_mlp)
    return layers.attention_half_bytes + above + came + adapted + layers.reads.first_bytes


def _reading_mixing(rank: TrainerRank) -> float:
    """The same of attention's last product, when the second norm's gradient is there; and of its queries', when keys
    and values have given theirs."""
    layers = rank.layers
    width = layers.tokens * layers.element / rank.layout.tensor
    left = layers.attention_half_bytes - layers.norm_input_bytes - layers.mlp_norm_output_bytes
    last = left + width * layers.shape.value_dim * layers.adapts_mixed
    first = layers.attention_norm_bytes + width * layers.shape.query_dim + 2 * layers.whole_hidden_bytes
    return max(last, first) + rank.above + layers.reads.mixing_bytes
