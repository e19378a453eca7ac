"""The search: one job on every sensible machine, count and layout; what is fastest, what is cheapest, why others lost.

Of each machine (type and count) the fastest configuration that fits stands for it. Of these, some are beaten by another
one in time and in dollars; the rest is the front. Chosen is the cheapest that keeps to the hours and dollars asked for.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trainyard.errors import InputError
from trainyard.hardware import DEFAULT_REGION, Instance, PriceBook, instance, instance_types
from trainyard.planner.candidates import Rules, layouts, obstacle_of_all, offloading_layouts, powers
from trainyard.planner.configurations import (
    SAME_SPEED,
    as_fast_simplest_first,
    configuration,
    does_not_fit,
    verdict_of,
)
from trainyard.planner.facts import check_job
from trainyard.planner.fastest import NUM_ALTERNATIVES, Estimates, Fitting, Found, Starting
from trainyard.planner.formulas import Formulas, formulas_of
from trainyard.planner.money import cost_of, goodput_of, quotes_of, todays_book, unpriced_storage
from trainyard.planner.moving import Moved, layout_words, moved_to
from trainyard.planner.reading import Machines, machines_of
from trainyard.planner.resolve import check_precision, num_steps
from trainyard.planner.results import Configuration, Option, Search, figure, told_apart
from trainyard.spec.job import JobSpec
from trainyard.spec.words import counted, either

LEAST_MOST_NODES = 16
"""Machines that are looked at where nobody says how many: up to so many, or twice the job's own number."""

MOST_HOURS = 28 * 24
"""What compute.max_hours takes: SageMaker runs no job for longer."""

STEPS_OF_ENDLESS = 1000
"""A job in epochs has no known length: hours and dollars are of so many steps."""

SAME_MONEY = 0.005
"""Hours and dollars closer than this are the same."""


def search(
    job: JobSpec,
    *,
    instances: Sequence[str] = (),
    max_nodes: int | None = None,
    deadline_hours: float | None = None,
    region: str = DEFAULT_REGION,
    book: PriceBook | None = None,
) -> Search:
    """The machines and layouts for a job, ranked; InputError in one line for a wrong option or model.

    `instances`: the types to look at; default: those with a price, and the job's own. `max_nodes`: default twice the
    job's own number, at least 16. `deadline_hours`: default the job's compute.max_hours. A job on a training plan is
    looked at on as many of its type as it has, unless types or more of them are asked for: these are on demand.
    """
    stated, job = job, job.inelastic()  # other machines are compared by the same batch
    formulas = formulas_of(job)
    check_job(job, formulas.shape)
    if max_nodes is not None and max_nodes < 1:
        raise InputError(f"--max-nodes {max_nodes}: must be at least 1")
    if deadline_hours is not None and not 0 < deadline_hours < math.inf:
        raise InputError(f"--deadline-hours {deadline_hours:g}: must be above 0, and have an end")
    book = book or todays_book()
    types, left_out = _types(job, instances, region, book)
    on_plan = job.compute.training_plan is not None and types == [_own_type(job)]
    most = max_nodes or _most_machines(job, on_plan=on_plan)
    limit = deadline_hours or job.compute.max_hours
    budget = job.budget.max_usd if job.budget else None
    looked = _Searched(formulas=formulas, region=region, book=book, limit=limit, budget=budget)
    options = [option for item in _places(job, types, most) if (option := looked.moved_option(stated, *item))]
    if not options:
        raise InputError(looked.why_nothing(job, most))
    ranked = _ranked(options, limit, budget)
    chosen = next((item for item in ranked if item.chosen), None)
    notes = looked.notes_of_missing([*asked_types(instances), _own_type(job)], most)
    if left_out:
        notes.append(
            f"{counted(len(left_out), 'type')} without a price in {region} "
            f"{either(len(left_out), 'was', 'were')} left out (name them: --instances "
            f"{','.join(left_out[:3])}...); newer prices: trainyard prices refresh"
        )
    if num_steps(job) is None:
        notes.append(f"the job is stated in epochs: hours and dollars are of {STEPS_OF_ENDLESS:,} steps")
    if on_plan and max_nodes is None and not asked_types(instances):
        notes.append(
            f"compute.training_plan {job.compute.training_plan}: the job holds {job.compute.instance_count} x "
            f"{types[0]} of it, and its size isn't known here: no more and no other type was looked at; on demand, "
            "without it: --instances, --max-nodes"
        )
    if any(item.usd is not None for item in ranked) and (missing := unpriced_storage(job, region, book)):
        notes.append(missing)
    if chosen is None:
        notes.append(_nothing_chosen(ranked, limit, budget))
    elif (changed := looked.moved_of(chosen).note()) is not None:
        notes.append(changed)
    return Search(
        job=job.name,
        params=formulas.params,
        steps=num_steps(job),
        unit=formulas.unit,
        region=region,
        deadline_hours=limit,
        max_usd=budget,
        num_layouts=looked.estimates.num_layouts,
        num_estimates=looked.estimates.count,
        options=tuple(ranked),
        alternatives=() if chosen is None else looked.alternatives(chosen),
        overrides=() if chosen is None else _overrides(looked.moved_of(chosen), chosen, limit),
        notes=tuple(notes),
    )


def fastest(job: JobSpec, *, region: str = DEFAULT_REGION, book: PriceBook | None = None) -> Configuration | None:
    """The fastest configuration on the very machines that the job names, or the nearest to fit; None: no layout."""
    looked = _Searched(formulas=formulas_of(job), region=region, book=book or todays_book())
    machines = machines_of(job)
    if machines.instance is None:
        return None
    try:
        check_precision(job, machines)
    except InputError:
        return None
    option = looked.option(job, machines)
    return None if option is None else option.configuration


def _types(job: JobSpec, asked: Sequence[str], region: str, book: PriceBook) -> tuple[list[str], list[str]]:
    """(types to look at, types that are left out for want of a price), without `ml.`."""
    if named := asked_types(asked):
        for name in named:
            if instance(name).gpu is None:
                raise InputError(
                    f"--instances {name}: has {instance(name).accelerator}, the trainer runs on NVIDIA GPUs"
                )
        return named, []
    own = _own_type(job)
    if job.compute.training_plan is not None:
        return [own], []
    priced: list[str] = []
    without: list[str] = []
    for name in _distinct_types():
        purchase = "spot" if job.compute.spot else "on_demand"
        found = any(_has_price(book, name, region, kind) for kind in (purchase, "on_demand"))
        (priced if found else without).append(name)
    if not priced:
        raise InputError(
            f"--search: no price is known in {region}, or none that is young enough; get today's (trainyard prices "
            f"refresh --region {region}), or name --instances to rank them by time alone"
        )
    without = [name for name in without if name != own]
    if own and own not in priced:
        priced.append(own)
    return priced, without


def asked_types(asked: Sequence[str]) -> list[str]:
    """What --instances names, without `ml.`, each once."""
    return list(dict.fromkeys(name.strip().removeprefix("ml.") for name in asked if name.strip()))


def _own_type(job: JobSpec) -> str:
    return (job.compute.instance_type or "").removeprefix("ml.")


def _most_machines(job: JobSpec, *, on_plan: bool) -> int:
    """How many are looked at where nobody says it: on a training plan as many as the job has."""
    own = job.compute.instance_count
    return own if on_plan else max(LEAST_MOST_NODES, 2 * own)


def _has_price(book: PriceBook, name: str, region: str, purchase: str) -> bool:
    """On SageMaker, where the search's machines are: its own rate counts."""
    try:
        book.price(f"ml.{name}", region, "spot" if purchase == "spot" else "on_demand")
    except InputError:
        return False
    return True


def _distinct_types() -> list[str]:
    """GPU types that differ in GPUs or network: of those that differ in processors alone, the smallest."""
    smallest: dict[tuple[object, ...], Instance] = {}
    for name in instance_types():
        machine = instance(name)
        if machine.gpu is None:
            continue
        # Alone, a machine of one GPU is as good as another: its network doesn't count.
        network = machine.network_gb_per_second if machine.num_gpus > 1 or machine.efa_interfaces else 0.0
        kind = (machine.accelerator, machine.gpu_memory_gib, machine.num_gpus, network)
        if kind not in smallest or machine.vcpus < smallest[kind].vcpus:
            smallest[kind] = machine
    return sorted(machine.type for machine in smallest.values())


def _places(job: JobSpec, types: Sequence[str], most: int) -> Iterator[tuple[str, int]]:
    """(type, count) of the machines to look at: counts in powers of two, the job's own, and the most."""
    for name in types:
        machine = instance(name)
        counts = {*powers(most), most} if machine.efa_interfaces else {1}
        full = f"ml.{name}"
        if job.compute.instance_type in (full, name) and (machine.efa_interfaces or job.compute.instance_count == 1):
            counts.add(job.compute.instance_count)
        yield from ((full, count) for count in sorted(item for item in counts if item <= most))


def _undivided(job: JobSpec, most: int) -> str:
    training = job.training
    words = (
        f"training.global_batch_size {training.global_batch_size}: no layout of up to "
        f"{counted(most, 'machine')} divides it"
    )
    if training.micro_batch_size != "auto":
        words += f" into micro-batches of {training.micro_batch_size} (training.micro_batch_size)"
    return words


@dataclass(frozen=True)
class _Machine:
    """What was found on one type and count."""

    job: JobSpec
    machines: Machines
    found: Found
    moved: Moved | None = None
    """How the job comes there; None: it is there."""


@dataclass
class _Searched:
    """What was looked at."""

    formulas: Formulas
    region: str
    book: PriceBook
    limit: float = math.inf
    """Hours allowed."""
    budget: float | None = None
    refusals: dict[tuple[str, int], str] = field(default_factory=dict)
    """Why machines on which the job can't run are left out: (type, count) -> the first obstacle."""
    without_layout: list[tuple[JobSpec, Machines]] = field(default_factory=list)
    """The job on machines that it may run on, but that no layout suits."""
    estimates: Estimates = field(init=False)
    """Of all machines."""
    _found: dict[tuple[str, int], _Machine] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.estimates = Estimates(self.formulas)

    def moved_option(self, stated: JobSpec, name: str, count: int) -> Option | None:
        """The job as it was stated on `count` machines of a type; None: there it doesn't run, or has no layout."""
        try:
            moved = moved_to(stated, name, count)
            machines = machines_of(moved.job)
            check_precision(moved.job, machines)
            return self.option(moved.job, machines, moved)
        except InputError as error:
            self.refusals[name, count] = str(error)
            return None

    def why_nothing(self, job: JobSpec, most: int) -> str:
        """One reason where no machine has a layout: what all refuse, else what keeps the others from having one."""
        if not self.without_layout:
            return next(iter(self.refusals.values()))
        reasons = (self._obstacle(*item) for item in self.without_layout)
        return next((reason for reason in reasons if reason is not None), _undivided(job, most))

    def _obstacle(self, job: JobSpec, machines: Machines) -> str | None:
        shape = self.formulas.shape
        return obstacle_of_all(job, machines, shape, Rules(job, shape))

    def notes_of_missing(self, types: Sequence[str], most: int) -> list[str]:
        """Why machines of these types, which somebody named, are not in the table: each reason once."""
        counts: dict[tuple[str, str], list[int]] = {}
        for (name, count), reason in self.refusals.items():
            counts.setdefault((name, reason), []).append(count)
        there = {name for name, _ in self._found}
        for job, machines in self.without_layout:
            # Of a type with other numbers in the table, that a batch doesn't divide into all of them is no news.
            if (name := str(job.compute.instance_type)) not in there:
                reason = self._obstacle(job, machines) or _undivided(job, most)
                counts.setdefault((name, reason), []).append(machines.num_hosts)
        return [
            f"left out: {', '.join(map(str, found))} x {name}: {reason}"
            for (name, reason), found in counts.items()
            if name.removeprefix("ml.") in types
        ]

    def option(self, job: JobSpec, machines: Machines, moved: Moved | None = None) -> Option | None:
        """The machine with its fastest configuration that fits, else with the one nearest to it; None: no layout.

        Of a job that is `moved` the fastest that `launch` takes; InputError says why it takes none.
        """
        shape = self.formulas.shape
        rules = Rules(job, shape)
        estimates, starting = self.estimates, Starting(moved)
        found = estimates.fastest(job, machines, layouts(job, machines, shape, rules), rules, starting)
        if not found.fitting:
            more = estimates.fastest(job, machines, offloading_layouts(job, machines, rules), rules, starting)
            found = Found(more.fitting, [*found.too_large, *more.too_large])
        if not found.fitting and not found.too_large:
            self.without_layout.append((job, machines))
            return None
        name = str(job.compute.instance_type)
        self._found[name, machines.num_hosts] = _Machine(job, machines, found, moved)
        if found.fitting:
            return self._within(job, machines, found.fitting, starting)
        nearest = min(found.too_large, key=lambda item: estimates.use(item[1]).needed)
        item = configuration(job, nearest[0], nearest[1], machines, self.formulas)
        return self._option(job, machines, item.model_copy(update={"verdict": does_not_fit(item)}))

    def _within(self, job: JobSpec, machines: Machines, fitting: Sequence[Fitting], starting: Starting) -> Option:
        """The simplest that is as fast as any, but where it breaks a limit that the fastest keeps."""
        simplest = _fastest_to_run(fitting, starting)
        option = self._priced(job, machines, simplest)
        if _obstacle(option, self.limit, self.budget) is None:
            return option
        first = _fastest_to_run(fitting, starting, gain=0.0)
        if first is simplest:
            return option
        faster = self._priced(job, machines, first)
        return option if _obstacle(faster, self.limit, self.budget) else faster

    def moved_of(self, chosen: Option) -> Moved:
        """How the job comes to the chosen machines."""
        moved = self._found[chosen.instance_type, chosen.instance_count].moved
        assert moved is not None
        return moved

    def alternatives(self, chosen: Option) -> tuple[Configuration, ...]:
        """Other configurations of the chosen machines, fitting ones first, with why they lost."""
        here = self._found[chosen.instance_type, chosen.instance_count]
        fitting = sorted(here.found.fitting, key=lambda item: item.seconds)[: NUM_ALTERNATIVES + 1]
        kept = [(item.parallelism, item.layout) for item in fitting]
        nearest = sorted(here.found.too_large, key=lambda item: self.estimates.use(item[1]).needed)
        kept += nearest[: NUM_ALTERNATIVES // 2]
        found = [configuration(here.job, *item, here.machines, self.formulas) for item in kept]
        best = chosen.configuration
        return tuple(
            item.model_copy(update={"verdict": verdict_of(item, best)})
            for item in found
            if item.parallelism != best.parallelism
        )

    def _priced(self, job: JobSpec, machines: Machines, best: Fitting) -> Option:
        """Hours and dollars of a machine's best configuration; of a job in epochs, those of some steps."""
        item = configuration(job, best.parallelism, best.layout, machines, self.formulas)
        time = item.time
        assert time is not None
        steps = num_steps(job)
        if steps is None:
            steps = STEPS_OF_ENDLESS
            time = time.model_copy(update={"hours": steps * time.step_seconds / 3600})
        quotes = quotes_of(job, machines, self.region, self.book)
        run, _ = goodput_of(job, machines, self.formulas.saved, time.step_seconds, steps)
        cost = cost_of(job, steps=steps, time=time, run=run, machines=machines, quotes=quotes, book=self.book)
        assert cost is not None
        return self._option(job, machines, item).model_copy(
            update={
                "expected_hours": cost.expected_hours,
                "expected_hours_low": cost.expected_hours_low,
                "expected_hours_high": cost.expected_hours_high,
                "usd": cost.planned_usd,
                "usd_low": cost.planned_usd_low,
                "usd_high": cost.planned_usd_high,
                "price_basis": cost.price_basis,
                "price_as_of": cost.price_as_of,
                "goodput": run.fraction,
            }
        )

    def _option(self, job: JobSpec, machines: Machines, item: Configuration) -> Option:
        return Option(
            instance_type=str(job.compute.instance_type),
            instance_count=machines.num_hosts,
            num_gpus=machines.world_size,
            configuration=item,
            verdict=item.verdict,
        )


def _fastest_to_run(fitting: Sequence[Fitting], starting: Starting, gain: float = SAME_SPEED) -> Fitting:
    """The simplest of those that the estimate can't tell from the fastest; of a moved job all of them such that the
    command starts it as it was priced. InputError: none."""
    by_time = sorted(fitting, key=lambda one: one.seconds)
    first = starting.first_of(by_time)
    if first is None:
        raise starting.refusal()
    slower = by_time[by_time.index(first) :]
    near = as_fast_simplest_first(slower, lambda item: item.seconds, lambda item: item.parallelism, gain)
    return next(item for item in near if item is first or starting.starts(item))


def _ranked(options: Sequence[Option], limit: float, budget: float | None) -> list[Option]:
    """Options with verdicts: those that keep to the limits by dollars, then the others that fit, then the rest."""
    fitting = [item for item in options if item.configuration.fits]
    front = front_of(fitting)
    allowed = [item for item in fitting if _obstacle(item, limit, budget) is None]
    priced = [item for item in allowed if item.usd is not None]
    chosen = min(priced or allowed, key=_money, default=None)
    judged = []
    for item in fitting:
        verdict = _verdict(item, chosen, fitting, limit, budget)
        judged.append(item.model_copy(update={"on_front": item in front, "chosen": item is chosen, "verdict": verdict}))
    judged.sort(key=lambda item: (_obstacle(item, limit, budget) is not None, not item.chosen, _money(item)))
    rest = sorted(
        (item for item in options if not item.configuration.fits),
        key=lambda item: item.configuration.memory.total_gib - (item.configuration.memory.available_gib or 0.0),
    )
    return [*judged, *rest]


def _money(item: Option) -> tuple[float, float]:
    hours = item.expected_hours if item.expected_hours is not None else math.inf
    return (item.usd if item.usd is not None else math.inf, hours)


def front_of(options: Sequence[Option]) -> list[Option]:
    """Those that no other one beats in hours and dollars together; what has no price can't be compared."""
    priced = sorted(
        (item for item in options if item.usd is not None and math.isfinite(item.usd)),
        key=lambda item: (item.expected_hours, item.usd),
    )
    found: list[Option] = []
    for item in priced:
        if not found or (item.usd or 0.0) < (found[-1].usd or 0.0):
            found.append(item)
    return found


def _obstacle(item: Option, limit: float, budget: float | None) -> str | None:
    """Why an option that fits may not be chosen."""
    hours = item.expected_hours if item.expected_hours is not None else math.inf
    if item.expected_hours is not None and not math.isfinite(hours):
        return "does not finish: it fails more often than it saves"
    if hours > limit:
        need, have = told_apart(hours, limit, (figure, "{:,.6g}".format, "{:,.9g}".format))
        return f"too slow: {need} h of the {have} allowed"
    if budget is not None and item.usd is not None and item.usd > budget:
        return f"too dear: ${item.usd:,.2f} of the ${budget:,.2f} allowed"
    return None


def _verdict(item: Option, chosen: Option | None, fitting: Sequence[Option], limit: float, budget: float | None) -> str:
    """Why an option is chosen or not."""
    hours = item.expected_hours or math.inf
    if item is chosen:
        within = f"{figure(limit)} h" + (f" and ${budget:,.2f}" if budget is not None else "")
        return f"chosen: the {'cheapest' if item.usd is not None else 'fastest; no price is known'} within {within}"
    obstacle = _obstacle(item, limit, budget)
    if obstacle is not None:
        return obstacle
    if item.usd is None:
        return "no price known: it can't be weighed"
    beaten = [
        other
        for other in fitting
        if other is not item
        and other.usd is not None
        and other.usd <= item.usd
        and (other.expected_hours or 0.0) <= hours
        and (other.usd, other.expected_hours) != (item.usd, item.expected_hours)
    ]
    if beaten:
        best = min(beaten, key=_money)
        return f"slower and dearer than {best.instance_count} x {best.instance_type}"
    assert chosen is not None and chosen.usd is not None and chosen.expected_hours is not None
    dearer, ratio = item.usd / chosen.usd - 1, chosen.expected_hours / hours
    if dearer < SAME_MONEY:
        return f"as dear, {ratio:.2f} times as fast"
    return f"{ratio:.2f} times as fast, {dearer:.0%} dearer"


def _nothing_chosen(ranked: Sequence[Option], limit: float, budget: float | None) -> str:
    fitting = [item for item in ranked if item.configuration.fits]
    if not fitting:
        near = ranked[0]
        return f"nothing fits: nearest is {near.instance_count} x {near.instance_type}, which {near.verdict}"
    fastest = min(fitting, key=lambda item: item.expected_hours or math.inf)
    asked = f"{figure(limit)} h" + (f" and ${budget:,.2f}" if budget is not None else "")
    price = f" for ${fastest.usd:,.2f}" if fastest.usd is not None else ""
    if fastest.expected_hours is not None and not math.isfinite(fastest.expected_hours):
        return f"nothing keeps to {asked}: on no machines does the run finish, as it fails more often than it saves"
    return (
        f"nothing keeps to {asked}: the fastest takes {figure(fastest.expected_hours or math.inf)} h{price} "
        f"({fastest.instance_count} x {fastest.instance_type}); allow more (--deadline-hours, budget.max_usd) or more "
        "machines (--max-nodes)"
    )


def _overrides(moved: Moved, chosen: Option, limit: float) -> tuple[str, ...]:
    """What to --set so that the job runs as chosen, in the hours of the search where the job itself allows fewer."""
    item, compute = chosen.configuration, moved.own.compute
    found = [
        *moved.overrides,
        *layout_words(item.parallelism, item.micro_batch_size, item.activation_checkpointing),
    ]
    hours = min(limit, MOST_HOURS)
    if hours > compute.max_hours:
        found.append(f"compute.max_hours={hours:.10g}")
        if compute.max_wait_hours is not None and compute.max_wait_hours < hours:
            found.append(f"compute.max_wait_hours={hours:.10g}")
    return tuple(found)
