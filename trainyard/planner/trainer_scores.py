"""The moments of a step that attention has of its own where its scores are written out, or its rotation is, on a rank
of our trainer. Whence each term comes: `trainer_layers`, which has what such attention keeps.
"""

from collections.abc import Iterator

from trainyard.planner.trainer_rank import Moment, TrainerRank


def in_last_scores(rank: TrainerRank) -> Iterator[Moment]:
    """Selective recomputation keeps all layers' scores, as a product gave them, when the last layer's have their sinks
    in the forward pass; beside copies of its keys and values for every query."""
    layers = rank.layers
    if rank.layout.recompute != "selective" or not layers.sink_bytes or not rank.stage.layers:
        return
    copies = layers.input_bytes + 2 * layers.tokens * layers.element * layers.shape.query_dim / rank.layout.tensor
    held = rank.kept_in_all + rank.ends + layers.sink_bytes + copies
    yield Moment(held, 0.0, rank.weights(rank.units.running(0)) + rank.received)


def in_last_block(rank: TrainerRank) -> Iterator[Moment]:
    """Trained whole and computed again, where scores are written out: the last layer's feed-forward block in the
    forward pass, beside the scores that its code still has in its hands and nobody keeps."""
    layers, layout = rank.layers, rank.layout
    is_there = layout.method == "full" and layout.recompute != "none" and rank.stage.layers
    if not (layers.returned_scores_bytes and is_there):
        return
    held = rank.kept_in_all + rank.ends + layers.returned_scores_bytes
    # Its last product and what that reads; the residual, and what the norm before it gave.
    block = layers.product_bytes + layers.whole_hidden_bytes
    block += layers.input_bytes + layers.hidden * layers.residual_element
    yield Moment(held + block, 0.0, rank.weights(rank.units.running(0)) + rank.received)


def scores_in_backward(rank: TrainerRank) -> Iterator[float]:
    """What there is of a layer without experts, when its feed-forward block is gone and scores have their gradients;
    and when these, which selective recomputation kept as a product gave them, are made anew."""
    layers, shape, layout = rank.layers, rank.shape, rank.layout
    if layers.score_gradient_bytes:
        gone = layers.norm_input_bytes + layers.mlp_norm_output_bytes + layers.outputs_norms_bytes * 2
        # A layer's only norm has not gone back; beside the copies of context parallelism traces have as much as two
        # norms keep.
        is_there = layout.flash_attention or shape.norms_per_layer == 1
        gone *= shape.norms_per_layer >= 4 or not is_there
        if not layout.flash_attention and layers.is_frozen and layers.adapts_mixed:
            # What attention's last product has read for its adapter.
            gone += layers.tokens * layers.element * layers.shape.value_dim / layout.tensor
        yield layers.whole_bytes - layers.mlp_bytes - gone + rank.above + layers.score_gradient_bytes
    if layers.scores_again_bytes:
        yield layers.kept_bytes + rank.above + layers.whole_hidden_bytes + layers.scores_again_bytes


def rotating_again_bytes(rank: TrainerRank) -> float:
    """What there is of a layer while its queries' and keys' rotation goes back."""
    layers = rank.layers
    again = 0.0
    if rank.layout.recompute != "none":
        again = rank.above + max(layers.kept_bytes - layers.input_bytes - layers.scored_products_bytes, 0.0)
    return layers.attention_norm_bytes + layers.rotating_bytes + again
