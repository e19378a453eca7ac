"""Any flat range of any tensor is a few boxes, and a checkpoint cut one way can be read cut another way."""

import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from trainer.strategies.flat_shard import FlatShard, boxes_of_range


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (1, 5, 1), (2, 2, 3, 2)])
def test_boxes_cover_exactly_the_range_in_order(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations(range(numbers.numel() + 1), 2):
        boxes = boxes_of_range(shape, start, stop)
        covered = []
        for box in boxes:
            block = numbers[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].flatten()
            assert block[0].item() == box.flat_start
            covered += block.tolist()
        assert covered == list(range(start, stop)), (shape, start, stop)
        assert len(boxes) <= 2 * len(shape) - 1


def test_an_empty_range_has_no_box_and_a_scalar_has_one() -> None:
    assert boxes_of_range((3, 4), 5, 5) == []
    assert [box.num_elements for box in boxes_of_range((), 0, 1)] == [1]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_checkpoint_cut_one_way_is_read_cut_another_way(tmp_path: Path) -> None:
    whole = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    flat = whole.flatten()
    dcp.save({"whole": whole}, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    pieces = {f"{lo}": FlatShard(torch.zeros(hi - lo), whole.shape, lo) for lo, hi in ((0, 9), (9, 23), (23, 35))}
    for shard in pieces.values():
        dcp.load({"whole": shard}, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    assert torch.equal(torch.cat([shard.local for shard in pieces.values()]), flat)

    dcp.save({"whole": FlatShard(flat.clone(), whole.shape, 0)}, checkpoint_id=str(tmp_path / "b"), no_dist=True)
    read = torch.zeros(5, 7)
    dcp.load({"whole": read}, checkpoint_id=str(tmp_path / "b"), no_dist=True)
    assert torch.equal(read, whole)


def test_what_is_copied_to_another_type_or_into_another_shard_is_the_same_part() -> None:
    """As a save copies it to the host, and as the next save uses that copy's memory again."""
    shard = FlatShard(torch.arange(4.0), (2, 3), 1)
    wide = shard.to(torch.float64)
    assert isinstance(wide, FlatShard) and wide.dtype == wide.local.dtype == torch.float64
    assert (wide.start, tuple(wide.shape), wide.boxes) == (1, (2, 3), shard.boxes)
    shard.local += 5
    assert wide.local.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert wide.copy_(shard) is wide
    assert wide.local.tolist() == [5.0, 6.0, 7.0, 8.0]


def test_a_copy_is_apart_and_arithmetic_is_refused() -> None:
    shard = FlatShard(torch.arange(4.0), (2, 3), 1)
    copy = shard.clone()
    shard.local += 1
    assert isinstance(copy, FlatShard)
    assert copy.local.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (copy.start, tuple(copy.shape)) == (1, (2, 3))
    with pytest.raises(NotImplementedError, match="only travels to and from checkpoints"):
        _ = shard + 1
