"""The fastest layouts of a job on given machines: best first, by the least that a step of each can take.

What layers compute is the same for many layouts and quickly there, what a rank's memory is at its worst moment and what
ranks send each other is not. So a layout's memory and time are reckoned in the order of a bound of its time, until none
that is left can be as fast as those that are to be chosen from or shown.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trainyard.errors import InputError
from trainyard.hardware import Gpu
from trainyard.planner.candidates import Rules
from trainyard.planner.communication import Fabric, fabric_of
from trainyard.planner.configurations import SAME_SPEED, fits_both, host_of
from trainyard.planner.formulas import Formulas
from trainyard.planner.layout import Layout, Recompute
from trainyard.planner.memory import Memory
from trainyard.planner.moving import Moved, layout_words
from trainyard.planner.reading import Machines, layout_of
from trainyard.planner.resolve import levels, micro_batch_choices, resolve, sequences_per_rank
from trainyard.spec.job import JobSpec, ParallelismSpec

NUM_ALTERNATIVES = 8
"""Other configurations of the chosen machines that are kept, with why they lost."""


@dataclass(frozen=True)
class Fitting:
    """One layout at its fastest."""

    parallelism: ParallelismSpec
    layout: Layout
    seconds: float


@dataclass
class Found:
    """What was found on machines of a type and number, as it was proposed: of equally fast ones the first counts."""

    fitting: Sequence[Fitting]
    too_large: Sequence[tuple[ParallelismSpec, Layout]]
    """Each at its most frugal."""


@dataclass
class _Candidate:
    """A layout of which not all is known yet."""

    parallelism: ParallelismSpec
    layouts: Sequence[Layout]
    """With each micro-batch that it may have, the largest first, and each recomputation, the least first."""
    left: list[tuple[float, Layout]] | None = None
    """Those that may be its fastest, with the bounds of their times, the least last; None: not looked at yet."""
    best: Fitting | None = None

    @property
    def frugal(self) -> Layout:
        """What needs least memory."""
        return self.layouts[-1]

    def without_slower(self, fits: Layout) -> None:
        """Leaves out what can't be faster than one that fits, or than the best: of one micro-batch more recomputation,
        and (but by less than an estimate can tell) without a pipeline to fill a smaller one than fits without any."""
        assert self.left is not None and self.best is not None
        no_smaller = fits.pipeline == 1 and fits.recompute == self.layouts[0].recompute
        self.left = [
            (bound, layout)
            for bound, layout in self.left
            if bound < self.best.seconds
            and layout.micro_batch != fits.micro_batch
            and not (no_smaller and layout.micro_batch < fits.micro_batch)
        ]


class Starting:
    """Which configurations of a moved job the command starts with the micro-batches that were priced; each is asked
    once, and why not is kept."""

    def __init__(self, moved: Moved | None) -> None:
        self._moved = moved
        self._known: dict[Layout, bool] = {}
        self._refusals: list[InputError] = []

    def first_of(self, by_time: Iterable[Fitting]) -> Fitting | None:
        """The first that starts."""
        return next(filter(self.starts, by_time), None)

    def starts(self, item: Fitting) -> bool:
        """Whether it does; a job that isn't moved does."""
        if self._moved is None:
            return True
        if item.layout not in self._known:
            self._known[item.layout] = self._asked(self._moved, item)
        return self._known[item.layout]

    def refusal(self) -> InputError:
        """Why none does, of those that were asked."""
        name = self._moved.own.name if self._moved else ""
        return self._refusals[0] if self._refusals else InputError(f"{name}: no layout runs as it was priced")

    def _asked(self, moved: Moved, item: Fitting) -> bool:
        layout = item.layout
        try:
            runs = resolve(moved.with_layout(layout_words(item.parallelism, layout.micro_batch, layout.recompute)))
        except InputError as error:
            self._refusals.append(error)
            return False
        return runs.gradient_accumulation_steps == layout.num_micro_batches


@dataclass
class Estimates:
    """Memory and time of one model's layouts; memory is remembered, as it is the same on machines that differ in their
    links alone."""

    formulas: Formulas
    num_layouts: int = 0
    """That were proposed."""
    count: int = 0
    """Memories and times that were reckoned."""
    _memory: dict[Layout, Memory] = field(default_factory=dict)

    def use(self, layout: Layout) -> Memory:
        """A layout's memory, of the worst rank."""
        found = self._memory.get(layout)
        if found is None:
            self.count += 1
            found = self._memory[layout] = self.formulas.memory(layout)
        return found

    def fastest(
        self, job: JobSpec, machines: Machines, proposed: Sequence[ParallelismSpec], rules: Rules, starting: Starting
    ) -> Found:
        """The fastest layouts, as many as are chosen from or shown, each with its fastest micro-batch that fits; and of
        those that might have been as fast the ones that don't fit. Where none fits these are all."""
        self.num_layouts += len(proposed)
        candidates = {
            place: candidate
            for place, each in enumerate(proposed)
            if (candidate := _candidate(job, each, rules)) is not None
        }
        machine = machines.instance
        assert machine is not None and machine.gpu is not None
        gpu, links = machine.gpu, fabric_of(machine)
        waiting = [(self._bound(candidate, gpu, links), place) for place, candidate in candidates.items()]
        heapq.heapify(waiting)
        fitting: dict[int, Fitting] = {}
        too_large: list[int] = []
        while waiting and not _is_enough(fitting.values(), waiting[0][0], starting):
            _, place = heapq.heappop(waiting)
            candidate = candidates[place]
            self._look_on(job, machines, candidate, gpu, links)
            if candidate.best is not None:
                fitting[place] = candidate.best
            if candidate.left:
                heapq.heappush(waiting, (candidate.left[-1][0], place))
            elif candidate.best is None:
                too_large.append(place)
        return Found(
            [fitting[place] for place in sorted(fitting)],
            [(candidates[place].parallelism, candidates[place].frugal) for place in sorted(too_large)],
        )

    def _bound(self, candidate: _Candidate, gpu: Gpu, links: Fabric) -> float:
        """Seconds than which no step of the layout is shorter."""
        first: dict[int, Layout] = {}
        for layout in candidate.layouts:  # of one micro-batch the least recomputation is the fastest
            first.setdefault(layout.micro_batch, layout)
        return min(self._least_seconds(layout, gpu, links) for layout in first.values())

    def _least_seconds(self, layout: Layout, gpu: Gpu, links: Fabric) -> float:
        least = self.formulas.least_step_seconds
        return 0.0 if least is None else least(layout, gpu, links)

    def _look_on(self, job: JobSpec, machines: Machines, candidate: _Candidate, gpu: Gpu, links: Fabric) -> None:
        """Of a layout the next of its micro-batches, by the bounds of their times."""
        if candidate.left is None:
            if not self._may_fit(job, candidate.frugal, machines):
                candidate.left = []
                return
            bounds = [(self._least_seconds(layout, gpu, links), layout) for layout in candidate.layouts]
            # Of equal bounds as they come: the larger micro-batch first.
            candidate.left = sorted(bounds, key=lambda item: item[0])[::-1]
        _, layout = candidate.left.pop()
        if not self._fits(job, layout, machines):
            return
        self.count += 1
        seconds = self.formulas.step(layout, gpu, links).total
        if candidate.best is None or seconds < candidate.best.seconds:
            candidate.best = Fitting(candidate.parallelism, layout, seconds)
        candidate.without_slower(layout)

    def _may_fit(self, job: JobSpec, layout: Layout, machines: Machines) -> bool:
        """False: it doesn't fit, as is quickly told."""
        least = self.formulas.least_memory
        if least is None or layout in self._memory:
            return True
        return fits_both(least(layout), host_of(job, layout, machines, self.formulas), machines.instance) is True

    def _fits(self, job: JobSpec, layout: Layout, machines: Machines) -> bool:
        if not self._may_fit(job, layout, machines):
            return False
        return fits_both(self.use(layout), host_of(job, layout, machines, self.formulas), machines.instance) is True


def _candidate(job: JobSpec, parallelism: ParallelismSpec, rules: Rules) -> _Candidate | None:
    """The layout with all batches that the trainer takes; None: it takes none."""
    per_rank = sequences_per_rank(job, parallelism)
    sizes = [size for size in micro_batch_choices(job, parallelism) if per_rank // size >= parallelism.pipeline]
    allowed: list[tuple[int, Recompute]] = [
        (size, recompute)
        for size in sizes
        for recompute in levels(job, parallelism)
        if rules.accepts_batch(parallelism, micro_batch=size, num_micro_batches=per_rank // size, recompute=recompute)
    ]
    if not allowed:
        return None
    size, recompute = allowed[-1]
    frugal = layout_of(job, parallelism, micro_batch=size, num_micro_batches=per_rank // size, recompute=recompute)
    others = [frugal.in_micro_batches(size, per_rank // size, recompute) for size, recompute in allowed]
    return _Candidate(parallelism, others)


def _is_enough(fitting: Iterable[Fitting], bound: float, starting: Starting) -> bool:
    """Whether all that may be chosen or shown has been found, if nothing else is faster than `bound`: what is shown,
    and what no estimate tells from the fastest that starts."""
    by_time = sorted(fitting, key=lambda item: item.seconds)
    if len(by_time) <= NUM_ALTERNATIVES or by_time[NUM_ALTERNATIVES].seconds > bound:
        return False
    if by_time[0].seconds * (1 + SAME_SPEED) > bound:
        return False
    first = starting.first_of(by_time)
    return first is not None and first.seconds * (1 + SAME_SPEED) <= bound
