"""How FSDP takes a stage's layers apart (`parallelism.fsdp`), and what of them is gathered at once, in elements.

Layers are counted from the stage's end, as a backward pass meets them: 0 is the last one. A unit is one layer, or with
`wrap: size` as many that follow each other as have `min_parameters` together, counted from the stage's beginning.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from trainyard.planner.once import once


@dataclass(frozen=True)
class Units:
    """The layers of a stage of which FSDP gathers some at once."""

    num_layers: int
    num_routed: int
    """Of these the last so many have experts; a model's first ones may have none."""
    dense: float
    """Elements of a layer without experts on a rank that has gathered it."""
    routed: float
    """The same of a layer with experts; without these where they lie on several ranks, as units of their own."""
    ends: tuple[int, ...] | None
    """Of each unit the number past its first layer, ascending; None: every layer is a unit."""
    num_ahead: int
    """Units asked for ahead of the one that runs; 0: FSDP's own order."""
    keeps_gathered: bool
    """What is gathered for the forward pass stays until its own backward pass."""
    copied: float = 0.0
    """Of a layer with experts, what is put together by way of a copy, as it is cut along another dimension than 0."""

    def size(self, first: int, end: int) -> float:
        """Elements of the layers with these numbers, `end` left out."""
        end = min(end, self.num_layers)
        if not self.num_routed:
            return max(0, end - first) * self.dense
        num_routed = max(0, min(end, self.num_routed) - first)
        return num_routed * self.routed + max(0, end - first - num_routed) * self.dense

    def bounds(self, number: int) -> tuple[int, int]:
        """The layers of that layer's unit: the first number, and one past the last."""
        if self.ends is None:
            return number, number + 1
        place = bisect_right(self.ends, number)
        return (self.ends[place - 1] if place else 0), self.ends[place]

    def of(self, number: int) -> float:
        """Elements of that layer's unit."""
        return self.size(*self.bounds(number))

    def above(self, number: int) -> float:
        """Elements of the unit whose backward pass was before that layer's."""
        first, _ = self.bounds(number)
        return self.of(first - 1) if first else 0.0

    def made_above(self, number: int) -> float:
        """Elements of that layer's unit of which the backward pass has made the gradients before it comes to it."""
        return self.size(self.bounds(number)[0], number)

    def num_reduced(self, number: int) -> int:
        """Layers whose gradients are cut to this rank's part when the backward pass comes to that layer."""
        return self.bounds(number)[0]

    def in_backward(self, number: int) -> float:
        """Gathered during that layer's backward pass: its unit and those that come next."""
        first, end = self.bounds(number)
        if self.keeps_gathered:
            return self.size(first, self.num_layers)
        return self.size(first, end) + self._following(number, -1, max(self.num_ahead, 1))

    def copied_of(self, number: int) -> float:
        """Elements of that layer's unit that are copied when it is gathered."""
        first, end = self.bounds(number)
        return max(0, min(end, self.num_routed) - first) * self.copied

    def arriving(self, number: int) -> float:
        """Gathered while that layer's unit is put together in the forward pass: what the unit before it was gathered
        into is still there (FSDP lets go of it when this one is together), and what was asked for ahead."""
        first, end = self.bounds(number)
        before = 0.0
        if end < self.num_layers:
            before = self.of(end) + self._following(number, 1, max(self.num_ahead - 1, 0))
        return self._held_in_forward(number) + self.size(first, end) + before + self.copied_of(number)

    def running(self, number: int) -> float:
        """Gathered during that layer's forward pass: its unit, what this was gathered into, and what is asked for
        ahead."""
        return self._held_in_forward(number) + self.of(number) + self._following(number, 1, self.num_ahead)

    def _held_in_forward(self, number: int) -> float:
        first, end = self.bounds(number)
        return self.size(first, self.num_layers if self.keeps_gathered else end)

    @property
    def after_forward(self) -> float:
        """Gathered when the last layer's forward pass is done."""
        return self.size(0, self.num_layers) if self.keeps_gathered else 0.0

    def _following(self, number: int, direction: int, count: int) -> float:
        """Elements of so many units beside that layer's; `direction`: 1 to the stage's end."""
        total, (first, end) = 0.0, self.bounds(number)
        for _ in range(count):
            number = first - 1 if direction == 1 else end
            if not 0 <= number < self.num_layers:
                break
            first, end = self.bounds(number)
            total += self.size(first, end)
        return total

    @once
    def dearest_in_forward(self) -> Sequence[int]:
        """The same in a forward pass, where activations come to be: the last layer of each of the last units, up to the
        first that has all its others ahead of it, and of the first unit, which may be larger than all."""
        found: list[int] = []
        number = 0
        while number < self.num_layers and len(found) < self.num_ahead + 2:
            found.append(number)
            _, number = self.bounds(number)
        if self.num_layers:
            first, _ = self.bounds(self.num_layers - 1)
            found += [first] * (first not in found)
        return found

    @once
    def dearest(self) -> Sequence[int]:
        """Layers of which one can be the worst in a backward pass: while gradients are made activations are let go, in
        each unit as in the next, so that it is one at an end of the first two or the last two units."""
        found: set[int] = set()
        number = 0
        for _ in range(2):
            if number < self.num_layers:
                begin, end = self.bounds(number)
                found |= {begin, end - 1}
                number = end
        number = self.num_layers - 1
        for _ in range(2):
            if number >= 0:
                begin, end = self.bounds(number)
                found |= {begin, end - 1}
                number = begin - 1
        return sorted(found)


def unit_ends(sizes: Sequence[float], min_parameters: int) -> tuple[int, ...]:
    """`Units.ends` of layers of so many parameters each, from the stage's beginning, before any is cut."""
    begins, so_far = [0], 0.0
    for place, size in enumerate(sizes[:-1]):
        so_far += size
        if so_far >= min_parameters:
            begins.append(place + 1)
            so_far = 0.0
    return tuple(len(sizes) - begin for begin in reversed(begins)) if sizes else ()
