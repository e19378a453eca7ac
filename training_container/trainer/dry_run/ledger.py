"""Who holds how much memory, at every moment of a step: each storage from its first use to its end."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "buffers")
"""parameters: with the model's buffers; gradients, optimizer: this rank's own. activations: made in forward passes.
temporaries: made in backward passes (gradients of activations, what is computed again) and by the optimizer. buffers:
weights that were gathered or cast, gradients on their way to a reduction, what pipelines receive into."""

STATE = ("parameters", "gradients", "optimizer")
"""What stays from step to step, or through all micro-batches of one."""


@dataclass
class _Allocation:
    """One storage. What it turns out to be may be learnt after it was made, so the category is not final."""

    num_bytes: int
    """Now."""
    category: str
    first_bytes: int = 0
    """When it was made."""
    reference: Any = None


@dataclass(frozen=True)
class Peak:
    """The moment at which most is held."""

    by_category: dict[str, int]
    """Bytes."""
    phase: str
    """forward, backward or optimizer."""

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(self.by_category.values())


class Ledger:
    """Notes storages as operations make them. Sizes are the tensors' own; an allocator rounds each up to 512 bytes."""

    def __init__(self) -> None:
        self.phase = "forward"
        self._made_as: str | None = None
        self._living: dict[int, _Allocation] = {}
        self._at_first: list[_Allocation] = []
        self._events: list[tuple[_Allocation, int, str]] = []

    def hold(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """These are there before the step begins, or (what the engine made unseen) as if they had been."""
        for tensor in tensors:
            self._allocation_of(tensor, is_new=False).category = category

    def mark(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """What these storages turned out to be; those of the training state stay what they are."""
        for tensor in tensors:
            allocation = self._allocation_of(tensor, is_new=False)
            if allocation.category not in STATE or category in STATE:
                allocation.category = category

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """These lie in the host's memory."""
        for tensor in tensors:
            allocation = self._allocation_of(tensor, is_new=False)
            allocation.num_bytes = allocation.first_bytes = 0

    @contextmanager
    def making(self, category: str) -> Iterator[None]:
        """Inside, what operations make is of that category, until something marks it as another."""
        before, self._made_as = self._made_as, category
        try:
            yield
        finally:
            self._made_as = before

    def held_as(self, category: str) -> int:
        """Bytes of that category that are held now."""
        return sum(each.num_bytes for each in self._living.values() if each.category == category)

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """What an operation returned: storages not seen before are new."""
        for tensor in tensors:
            self._allocation_of(tensor, is_new=True)

    def is_held_as(self, tensor: torch.Tensor, category: str) -> bool:
        """Whether the tensor's storage is known to be of that category."""
        found = self._living.get(tensor.untyped_storage()._cdata)
        return found is not None and found.category == category

    def _allocation_of(self, tensor: torch.Tensor, *, is_new: bool) -> _Allocation:
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._living.get(key)
        if found is not None:
            return found
        category = self._made_as or ("activations" if self.phase == "forward" else "temporaries")
        made = _Allocation(storage.nbytes(), category, storage.nbytes())
        made.reference = weakref.ref(storage, lambda _: self._end(key))
        self._living[key] = made
        if is_new:
            self._events.append((made, made.num_bytes, self.phase))
        else:
            self._at_first.append(made)
        return made

    def _end(self, key: int) -> None:
        allocation = self._living.pop(key)
        self._events.append((allocation, -allocation.num_bytes, self.phase))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP frees and takes again the memory of gathered weights under the same storage."""
        found = self._living.get(storage._cdata)
        if found is not None and (change := storage.nbytes() - found.num_bytes):
            found.num_bytes += change
            self._events.append((found, change, self.phase))

    @contextmanager
    def watching_resizes(self) -> Iterator[None]:
        """Inside, `UntypedStorage.resize_` is noted: it is no operation that a dispatch mode sees."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self.resized(storage)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resize):
            yield

    def peak(self, *, of_the_model: bool = False) -> Peak:
        """The step played again, now that every storage's category is known. `of_the_model`: the moment of its passes
        at which most is there beside the state, which another engine cuts, and updates, by code of its own."""
        held = dict.fromkeys(CATEGORIES, 0)
        for allocation in self._at_first:
            held[allocation.category] += allocation.first_bytes
        counted = [name for name in CATEGORIES if name not in STATE] if of_the_model else list(CATEGORIES)
        total, largest, best = sum(held[name] for name in counted), -1, Peak({}, "forward")
        for allocation, change, phase in self._events:
            held[allocation.category] += change
            total += change * (allocation.category in counted)
            if total > largest and not (of_the_model and phase == "optimizer"):
                largest, best = total, Peak(dict(held), phase)
        return best
