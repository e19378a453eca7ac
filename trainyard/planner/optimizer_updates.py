"""What an update of our own trainer's torch optimizers makes and lets go, in closed form.

AdamW's, SGD's and the 8-bit AdamW's are small: a kernel's, or a slice's. Adafactor and Muon
(`training_container/trainer/optimizers/matrix.py`) work on whole matrices, one parameter after the other, however many
ranks these are cut over: of a small model with many words more than its step needs.
"""

import math

from trainyard.planner.layout import Layout
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import Stage, vocabulary_split

_FACTORED = 2
"""Of a whole gradient: its squares, and what rows and columns say of them, which becomes the update."""

_ORTHOGONAL = 3
"""Of a whole matrix: the direction, what it is by now, and what it becomes."""

_SQUARES = 1
"""Beside them, of its smaller side: what it is multiplied with. (Its square is gone before it becomes another.)"""

_ADAMW = 2
"""Of a rank's part of what Muon leaves to AdamW: the root of its second moment, and the update."""


MOVED_BYTES = {"adamw": 44.0, "adamw_paged": 44.0, "sgd": 56.0, "adamw_8bit": 290.0, "muon": 89.0, "adafactor": 36.0}
"""That an update and the clipping before it read and write of a weight that a rank has, in float32: as a dry run counts
the trainer's kernels. AdamW's is one; eight bits are unpacked and packed by torch's operations, a dozen of them."""

_DEALT = 40.0
"""Of Muon's more, where its matrices are dealt out to ranks: stacks, and what is sent."""

_OF_WHOLE = 68.0
"""Of Adafactor's more, of every weight of the matrix: each rank updates it as a whole."""


def update_moved_bytes(shape: ModelShape, layout: Layout, own_params: float) -> float:
    """What a step's update moves through a rank's memory, beside Muon's products; `own_params`: the weights that the
    rank updates. Of our own trainer's torch engine, where nothing is offloaded."""
    each = MOVED_BYTES[layout.optimizer]
    if layout.optimizer == "muon" and layout.zero_stage == 3 and layout.shard_degree > 1:
        each += _DEALT
    whole = 0.0
    if layout.optimizer == "adafactor":
        is_cut = layout.zero_stage == 3 and layout.method != "full"
        whole = own_params * layout.shard_degree if is_cut else own_params
        whole = shape.params / layout.pipeline if layout.method == "full" else whole
    return (each * own_params + _OF_WHOLE * whole) * (2 if layout.precision == "fp64" else 1)


def update_temporary_bytes(shape: ModelShape, layout: Layout, stage: Stage) -> float:
    """At their most; 0 of adapters, whose matrices are thin, and of optimizers that go weight by weight."""
    if layout.method != "full" or layout.engine != "torch":
        return 0.0
    element = 8 if layout.precision == "fp64" else 4
    ends = shape.vocab * shape.hidden * (stage.embedding or stage.head)
    if layout.optimizer == "adafactor":
        is_cut = layout.zero_stage == 3 or layout.tensor > 1
        largest = max([ends, *(rows * columns for rows, columns in _matrices(shape)), _stack(shape) * shape.experts])
        return element * (_FACTORED + is_cut) * largest
    if layout.optimizer != "muon":
        return 0.0
    own_ends = ends / vocabulary_split(shape, layout) / (layout.shard_degree if layout.zero_stage == 3 else 1)
    matrices = [_ORTHOGONAL * rows * columns + _SQUARES * min(rows, columns) ** 2 for rows, columns in _matrices(shape)]
    if shape.moe_layers:
        # Experts are made orthogonal where they are: one by one in number, but all of a rank's at once.
        split = layout.expert_split if layout.expert_split > 1 else layout.shard_degree
        square = min(shape.hidden, _stack(shape) // shape.hidden) ** 2
        matrices.append(math.ceil(shape.experts / split) * (_ORTHOGONAL * _stack(shape) + _SQUARES * square))
    return element * max(_ADAMW * own_ends, *matrices)


def _matrices(shape: ModelShape) -> list[tuple[int, int]]:
    """Rows and columns of a layer's widest: attention's queries, and the feed-forward block's."""
    found = [(max(kind.query_dim for _, kind in shape.attentions), shape.hidden)]
    return found + [(shape.ffn, shape.hidden)] * (shape.num_mlps > 0)


def _stack(shape: ModelShape) -> int:
    """Elements of one expert's part of its layer's largest parameter: gate and up lie together."""
    return (2 if shape.gated_mlp else 1) * shape.moe_ffn * shape.hidden * (shape.moe_layers > 0)
