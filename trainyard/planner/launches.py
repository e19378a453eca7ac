"""How many kernels the host launches for an update of our own trainer, where these are many and small; what it sends.

Counted by its code (`training_container/trainer/optimizers`, `strategies/torch_engine.py` and `parallel.py`), and held
against traces (`tests/trainer/test_traced_time.py`). AdamW's are one for all weights of a group; the others go from
tensor to tensor, so that a small model's update takes what its launching does.
"""

import math
from collections.abc import Sequence

from trainyard.planner.communication import Fabric, all_gather_seconds, all_reduce_seconds, group
from trainyard.planner.layout import Layout
from trainyard.planner.muon import muon_sending_seconds, orthogonal_launches
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import stages
from trainyard.planner.time_constants import Constants
from trainyard.planner.weight_tensors import WeightTensors, weight_tensors

KERNELS_A_LAYER = 45
"""Of a layer whose launching takes `launch_seconds`: a Llama's has 49 forward, as traced, and 83 backward."""

NORM_KERNELS = 6
"""Of all gradients' norm, and what clips them."""

NORM_KERNELS_EACH = 5
"""Of each gradient's, where ranks hold different parts of different tensors (`strategies/parallel.py`)."""

FACTORED, UNFACTORED = 24, 18
"""Of a matrix and of a vector in Adafactor's update, their counts of steps included."""

WHOLE_NORM_KERNELS = 2
"""More of each, whose size is of parts on several ranks, for each axis of these."""

EIGHT_BIT_SLICE, EIGHT_BIT_MATRIX, WIDE_MOMENTS = 40, 2, 9
"""Of a slice whose averages are unpacked, moved and packed again; beside that of its matrix; of a tensor whose averages
have 32 bits."""

SLICE_ELEMENTS, LEAST_QUANTIZED = 1 << 22, 4096
"""Of 8 bits: a slice, and a whole tensor (`eight_bit.py`)."""


ADAMW, SGD = 4, 8
"""Of all weights at once."""


def kernel_seconds(constants: Constants) -> float:
    """What the host needs for one kernel."""
    return constants.launch_seconds / KERNELS_A_LAYER


def queued(on_gpu: Sequence[float], launches: Sequence[float], constants: Constants) -> list[float]:
    """Seconds of parts of a pass that share a queue, by their work and their kernels: all the work, or where that takes
    longer all the launching, each part having its share of the work's."""
    work, launching = sum(on_gpu), sum(launches) * kernel_seconds(constants)
    return [part * max(1.0, launching / work) if work else launching / len(on_gpu) for part in on_gpu]


def update_kernels(shape: ModelShape, layout: Layout) -> float:
    """Of a step's norm, clipping and update, on the rank that has most tensors."""
    return max(_update_kernels(shape, layout, weight_tensors(shape, layout, stage)) for stage in stages(shape, layout))


def _update_kernels(shape: ModelShape, layout: Layout, tensors: WeightTensors) -> float:
    axes = (layout.zero_stage == 3 and layout.shard_degree > 1) + (layout.tensor > 1)
    is_cut, of_whole = axes > 0 or layout.is_grid, WHOLE_NORM_KERNELS * max(axes, layout.is_grid)
    norms = NORM_KERNELS_EACH * tensors.count + NORM_KERNELS if layout.is_grid else NORM_KERNELS
    kinds = {
        "adafactor": (FACTORED + of_whole) * sum(tensors.matrices.values()) + (UNFACTORED + of_whole) * tensors.vectors,
        "adamw_8bit": _eight_bit(tensors, layout),
        "sgd": (1 + 2 * layout.has_momentum) * tensors.count if is_cut else SGD,
        "muon": orthogonal_launches(shape, layout, tensors) if layout.optimizer == "muon" else 0.0,
    }
    # DDP's gradients stay in its buckets, and are made zero there.
    zeros = tensors.count * (layout.data_parallel > 1 and not is_cut and layout.optimizer != "adamw")
    return norms + kinds.get(layout.optimizer, ADAMW) + zeros + layout.keeps_average


def _eight_bit(tensors: WeightTensors, layout: Layout) -> float:
    found = WIDE_MOMENTS * tensors.vectors
    for (rows, columns), number in tensors.matrices.items():
        if rows * columns < LEAST_QUANTIZED:
            found += WIDE_MOMENTS * number
            continue
        own = math.ceil(rows / layout.tensor / (layout.shard_degree if layout.zero_stage == 3 else 1))
        slices = math.ceil(own / max(1, SLICE_ELEMENTS // columns))
        found += number * (EIGHT_BIT_MATRIX + EIGHT_BIT_SLICE * slices)
    return found


def update_sending_seconds(shape: ModelShape, layout: Layout, links: Fabric) -> float:
    """What ranks send each other in an update, which waits for it: of Adafactor each gradient to all that have a part,
    and its weight's size; of Muon what it deals out."""
    if layout.optimizer == "muon" and layout.method == "full":
        return muon_sending_seconds(shape, layout, links)
    is_cut = layout.zero_stage == 3 and layout.shard_degree > 1
    if layout.optimizer != "adafactor" or not is_cut:
        return 0.0
    tensors = max(
        (weight_tensors(shape, layout, stage) for stage in stages(shape, layout)), key=lambda each: each.count
    )
    elements = sum(rows * columns * number for (rows, columns), number in tensors.matrices.items())
    members, count = group(layout.shard_degree, layout.tensor, links.gpus_per_node), tensors.count
    each = (8 if layout.precision == "fp64" else 4) * elements / layout.tensor / count
    return count * (all_gather_seconds(each, members, links) + all_reduce_seconds(4, members, links))
