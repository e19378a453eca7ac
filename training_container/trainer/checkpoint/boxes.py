"""Any flat range of an n-dimensional array as a few boxes of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """An axis-aligned block of a tensor that is contiguous in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    flat_start: int
    """Row-major index of the box's first element in the whole tensor."""

    @property
    def num_elements(self) -> int:
        """Product of the sizes."""
        return math.prod(self.sizes)


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes, in row-major order, that together are elements [start, stop) of a tensor of `shape`.

    At most 2 x ndim - 1: ragged ends, and whole slices between.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), (), 0)]
    if len(shape) == 1:
        return [Box((start,), (stop - start,), start)]
    slice_elements = math.prod(shape[1:])
    first_whole, end_whole = -(-start // slice_elements), stop // slice_elements
    if first_whole > end_whole:
        return _boxes_inside_slice(shape, end_whole, start, stop)
    boxes = _boxes_inside_slice(shape, first_whole - 1, start, first_whole * slice_elements)
    if end_whole > first_whole:
        offsets = (first_whole, *(0 for _ in shape[1:]))
        boxes.append(Box(offsets, (end_whole - first_whole, *shape[1:]), first_whole * slice_elements))
    return boxes + _boxes_inside_slice(shape, end_whole, end_whole * slice_elements, stop)


def _boxes_inside_slice(shape: Sequence[int], index: int, start: int, stop: int) -> list[Box]:
    """Boxes of a range that lies within slice `index` of the first dimension."""
    base = index * math.prod(shape[1:])
    inner = boxes_of_range(shape[1:], start - base, stop - base)
    return [Box((index, *box.offsets), (1, *box.sizes), base + box.flat_start) for box in inner]
