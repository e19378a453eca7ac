"""What a rank of our own trainer holds: the worst of all ranks, and what optimizers, DeepSpeed and adapters keep."""

import dataclasses

import pytest

from trainyard.planner.layout import Layout, Schedule
from trainyard.planner.memory import memory, rank_memory
from trainyard.planner.shapes import ModelShape

SHAPE = ModelShape(layers=36, hidden=2048, ffn=8192, heads=16, kv_heads=4, head_dim=128, vocab=128256)
"""As large at its ends as in six of its layers each."""


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"])
@pytest.mark.parametrize("pipeline", [2, 4, 8, 16])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_worst_rank_is_the_worst_of_all_along_the_pipeline(
    schedule: Schedule, pipeline: int, is_tied: bool
) -> None:
    """zero_bubble's first rank has both ends; of 36 layers over eight ranks the second has one more than the first."""
    shape = dataclasses.replace(SHAPE, tied_embeddings=is_tied)
    layout = Layout(
        library="trainyard",
        pipeline=pipeline,
        chunks=2 if schedule == "interleaved_1f1b" else 1,
        schedule=schedule,
        num_micro_batches=32,
        data_parallel=2,
        zero_stage=3,
        shard_degree=2,
    )
    every = [rank_memory(shape, layout, place) for place in range(pipeline)]
    worst = memory(shape, layout)
    assert worst.allocated == max(rank.allocated for rank in every)
    assert worst in every
    assert sum(rank.parameters for rank in every) / 4 * 2 == pytest.approx(
        shape.params + (is_tied and schedule != "zero_bubble") * shape.vocab * shape.hidden
    )
