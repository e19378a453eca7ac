"""A plan as one page with pictures: memory, a step's time, scaling, dollars against hours; each with its uncertainty.

The page is whole by itself: no script, no font, no request to anywhere.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape

from trainyard.errors import InputError
from trainyard.hardware import PriceBook
from trainyard.planner.configurations import does_not_fit
from trainyard.planner.drawing import CHARACTER_WIDTH, COLOURS, WIDTH, Bar, Picture, Scale, legend, stacked_bars
from trainyard.planner.render import UNFINISHED, above_limits, count_of, hours_of, machines_of, usd_of
from trainyard.planner.results import Configuration, Option, Plan, Search, figure
from trainyard.planner.scaling import Point, scaling
from trainyard.planner.search import search as search_machines
from trainyard.spec.job import JobSpec
from trainyard.spec.words import counted

MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "workspace")
MOST_BARS = 9
MOST_TOO_LARGE = 2.5

UNKNOWN = "<p class=note>Not known for this job.</p>"

STYLE = """
body { font-family: system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; } p { line-height: 1.45; }
svg { width: 100%; height: auto; border: 1px solid #e4e4e4; }
table { border-collapse: collapse; font-size: 0.85em; } td, th { padding: 0.25em 0.7em; text-align: left; }
tr.chosen { font-weight: bold; } td.number { text-align: right; } .note { color: #555; font-size: 0.9em; }
"""


def page_of(
    job: JobSpec, plan: Plan | None, *, book: PriceBook, search: Search | None = None, refusal: str | None = None
) -> str:
    """The page as HTML. Without a search, dollars against hours are of the job's own type in other numbers; without a
    plan there is what the search says of machines. `refusal`: why the job can't be as it is stated."""
    found = search or (_own_type(job, plan, book) if plan else None)
    money = (
        "Dollars against hours",
        _money(found),
        "Each machine at its fastest layout, saves and failures counted. Joined: "
        "none is both faster and cheaper. Crosses: the 80% intervals, without what prices do.",
    )
    sections = [*(_sections(job, plan, book) if plan else ()), money]
    body = "".join(
        f"<h2>{escape(title)}</h2>{picture or UNKNOWN}<p class=note>{escape(words)}</p>"
        for title, picture, words in sections
    )
    own = (f"As it is stated, the job can't be: {refusal}",) if plan and refusal else ()
    said = (*own, *(plan.notes if plan else ()), *(found.notes if found else ()))
    notes = "".join(f"<p class=note>{escape(note)}</p>" for note in said)
    nothing = f"Nothing was chosen, and as it is stated the job can't be: {refusal or 'it has no plan'}."
    headline = escape(_headline(plan) if plan else nothing)
    table = _table(found) if found else ""
    name = escape(job.name)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}: plan</title>'
        f"<style>{STYLE}</style></head><body><h1>{name}</h1><p>{headline}</p>{body}{table}{notes}</body></html>\n"
    )


def _sections(job: JobSpec, plan: Plan, book: PriceBook) -> list[tuple[str, str, str]]:
    """(title, picture, words) of what a plan is asked for."""
    return [
        ("Memory of a GPU, worst rank", _memory(plan), _memory_words(plan)),
        ("A step's time", _time(plan), "Black: the 80% interval, by how far published runs lie from such an estimate."),
        (
            "Scaling",
            _scaling(job, book, plan.unit),
            f"{plan.unit.capitalize()}/s of all GPUs, each number of machines at its fastest layout; pale: the "
            "80% interval. Strong: the same global batch. Weak: a batch that grows with the machines.",
        ),
    ]


def _headline(plan: Plan) -> str:
    length = counted(plan.steps, "step") if plan.steps else "by epochs"
    words = f"{count_of(plan.params)} parameters, {length}, on {machines_of(plan)}: {plan.chosen.layout}."
    if plan.cost is not None and not math.isfinite(plan.cost.expected_hours):
        words += f" It {UNFINISHED}: it fails more often than it saves."
    elif plan.cost is not None:
        cost = plan.cost
        words += f" {figure(cost.expected_hours)} h ({figure(cost.expected_hours_low)} to "
        words += f"{figure(cost.expected_hours_high)})"
        words += f", {usd_of(cost.planned_usd)}"
        if cost.planned_usd_low is not None:
            words += f" ({usd_of(cost.planned_usd_low)} to {usd_of(cost.planned_usd_high)})"
        words += f"; {cost.price_basis}" + (f", as of {cost.price_as_of}." if cost.price_as_of else ".")
    if plan.fits is False:
        words += f" It {does_not_fit(plan.chosen)}."
    if plan.affordable is False:
        words += f" Not affordable: {above_limits(plan)}."
    return words


def _own_type(job: JobSpec, plan: Plan, book: PriceBook) -> Search | None:
    if plan.instance_type is None:
        return None
    try:
        return search_machines(job, instances=[plan.instance_type], region=plan.region, book=book)
    except InputError:
        return None


def _kept(plan: Plan) -> list[Configuration]:
    """The chosen one and the next best."""
    fitting = [item for item in plan.configurations if item.fits is not False][:MOST_BARS]
    have = plan.chosen.memory.available_gib or math.inf
    rejected = [item for item in plan.configurations if item.fits is False]
    # One that is many times too large would leave no room for the others.
    rejected = [item for item in rejected if item.memory.total_gib < MOST_TOO_LARGE * have][:2]
    kept = [*fitting, *rejected]
    return kept if plan.chosen in kept else [plan.chosen, *kept]


def _name(item: Configuration) -> str:
    recompute = "" if item.activation_checkpointing == "none" else f", {item.activation_checkpointing}"
    return f"{'→ ' if item.chosen else ''}{item.layout}, {item.micro_batch_size}{recompute}"


def _memory(plan: Plan) -> str:
    bars = []
    for item in _kept(plan):
        use = item.memory
        parts = [getattr(use, f"{part}_gib") for part in MEMORY_PARTS]
        bars.append(
            Bar(
                _name(item),
                parts,
                low=max(0.0, use.total_gib - 2 * use.margin_gib),
                high=use.total_gib,
                after=f"{use.total_gib:.1f}{'' if item.fits is not False else ' ✗'}",
                marked=item.chosen,
            )
        )
    limit = plan.chosen.memory.available_gib
    words = f"{limit:.1f} GiB are there" if limit is not None else ""
    return stacked_bars("memory of a GPU", "GiB", MEMORY_PARTS, bars, limit=limit, limit_name=words)


def _memory_words(plan: Plan) -> str:
    host = plan.chosen.host
    have = f" of {host.available_gib:,.0f}" if host.available_gib is not None else ""
    return (
        "Layout, micro-batch, recomputation. Black: what is meant to be exceeded once in ten, to what is to be missed "
        f"once in ten; a configuration fits when its upper end does. The host needs {host.total_gib:,.0f} GiB{have}."
    )


def _time(plan: Plan) -> str:
    kept = [item for item in _kept(plan) if (item.time is not None and item.fits is not False) or item.chosen]
    names: list[str] = []
    for item in kept:
        names += [name for name in (item.time.breakdown_seconds if item.time else {}) if name not in names]
    used = [name for name in names if any(item.time and item.time.breakdown_seconds[name] > 0 for item in kept)]
    if not used:
        return ""
    bars = [
        Bar(
            _name(item),
            [item.time.breakdown_seconds[name] for name in used],
            low=item.time.step_seconds_low,
            high=item.time.step_seconds_high,
            after=f"{item.time.step_seconds:.3g} s, {item.time.mfu:.0%}",
            marked=item.chosen,
        )
        for item in kept
        if item.time is not None
    ]
    return stacked_bars("a step's time", "s", [name.replace("_", " ") for name in used], bars)


def _scaling(job: JobSpec, book: PriceBook, unit: str) -> str:
    curves = {"strong": scaling(job, weak=False, book=book), "weak": scaling(job, weak=True, book=book)}
    shown = {name: points for name, points in curves.items() if len(points) > 1}
    if not shown:
        return ""
    picture = Picture(400, "scaling")
    every = [point for points in shown.values() for point in points]
    across = Scale(min(p.num_gpus for p in every), max(p.num_gpus for p in every), 90, WIDTH - 150, logarithmic=True)
    up = Scale(min(p.low for p in every) * 0.9, max(p.high for p in every) * 1.1, 340, 40, logarithmic=True)
    _frame(picture, across, up)
    legend(picture, list(shown), 20)
    for count in sorted({point.num_gpus for point in every}):
        picture.line(across.at(count), 40, across.at(count), 345, colour="#eee")
        picture.text(across.at(count), 360, f"{count}", anchor="middle", colour="#666")
    picture.text((across.start + across.end) / 2, 384, "GPUs", anchor="middle", colour="#666")
    for value in _spaced(decades(up.low, up.high), up, 18):
        picture.line(across.start, up.at(value), across.end, up.at(value), colour="#eee")
        picture.text(across.start - 8, up.at(value) + 4, count_of(int(value)), anchor="end", colour="#666")
    ends = []
    for index, (name, points) in enumerate(shown.items()):
        _curve(picture, points, across, up, COLOURS[index], name, unit)
        ends.append((up.at(points[-1].tokens_per_second), f"{name}: {points[-1].efficiency:.0%}", COLOURS[index]))
    for y, words, colour in apart(ends):
        picture.text(across.end + 8, y + 4, words, colour=colour)
    return picture.svg()


def _curve(
    picture: Picture, points: Sequence[Point], across: Scale, up: Scale, colour: str, name: str, unit: str
) -> None:
    high = [(across.at(point.num_gpus), up.at(point.high)) for point in points]
    low = [(across.at(point.num_gpus), up.at(point.low)) for point in points]
    picture.area([*high, *reversed(low)], colour=colour)
    picture.path([(across.at(point.num_gpus), up.at(point.tokens_per_second)) for point in points], colour=colour)
    for point in points:
        tip = (
            f"{name}, {counted(point.num_gpus, 'GPU')}: {point.tokens_per_second:,.0f} {unit}/s, "
            f"{point.efficiency:.0%} of the "
            f"first's a GPU; {point.configuration.layout}"
        )
        picture.dot(across.at(point.num_gpus), up.at(point.tokens_per_second), 4, colour, tip)


def apart(places: Sequence[tuple[float, str, str]], least: float = 15.0) -> list[tuple[float, str, str]]:
    """The same labels, those that would lie on each other moved down."""
    found: list[tuple[float, str, str]] = []
    for y, words, colour in sorted(places):
        found.append((max(y, found[-1][0] + least) if found else y, words, colour))
    return found


def decades(low: float, high: float) -> Iterator[float]:
    """Round numbers from `low`, above 0, to `high` for a logarithmic axis."""
    value = 10.0 ** math.floor(math.log10(low))
    while value <= high:
        for factor in (1, 1.5, 2, 3, 5, 7):
            if low <= value * factor <= high:
                yield value * factor
        value *= 10


def _frame(picture: Picture, across: Scale, up: Scale) -> None:
    picture.line(across.start, up.end, across.start, up.start, colour="#888")
    picture.line(across.start, up.start, across.end, up.start, colour="#888")


def _money(found: Search | None) -> str:
    options = found.options if found else ()
    priced = [item for item in options if item.usd is not None and item.expected_hours and math.isfinite(item.usd)]
    shown = [item for item in priced if item.on_front or item.chosen]
    shown += [item for item in priced if item not in shown][: max(0, 24 - len(shown))]
    if not shown:
        return ""
    picture = Picture(430, "dollars against hours")
    hours = [value for item in shown for value in (item.expected_hours_low, item.expected_hours_high) if value]
    usd = [value for item in shown for value in (item.usd_low, item.usd_high) if value]
    across = Scale(min(hours) * 0.9, max(hours) * 1.1, 100, WIDTH - 30, logarithmic=True)
    up = Scale(min(usd) * 0.9, max(usd) * 1.1, 360, 30, logarithmic=True)
    _frame(picture, across, up)
    for value in _spaced(decades(across.low, across.high), across, 50):
        picture.line(across.at(value), 30, across.at(value), 364, colour="#eee")
        picture.text(across.at(value), 380, f"{value:g}", anchor="middle", colour="#666")
    for value in _spaced(decades(up.low, up.high), up, 18):
        picture.line(across.start, up.at(value), across.end, up.at(value), colour="#eee")
        picture.text(
            across.start - 8, up.at(value) + 4, f"${value:,.0f}" if value >= 1 else f"${value:g}", anchor="end"
        )
    picture.text((across.start + across.end) / 2, 404, "hours", anchor="middle", colour="#666")
    front = sorted((item for item in shown if item.on_front), key=lambda item: item.expected_hours or 0.0)
    places = [(across.at(item.expected_hours or 0.0), up.at(item.usd or 0.0)) for item in front]
    if len(places) > 1:
        picture.path(places, colour="#3b6fb6", dash="4 3")
    for item in shown:
        _option(picture, item, across, up)
    dots = [(across.at(item.expected_hours or 0.0), up.at(item.usd or 0.0)) for item in shown]
    for item, (x, y) in zip(shown, dots, strict=True):
        if item.chosen:
            _label(picture, _machines(item), x, y, dots)
    legend(picture, ("chosen or on the front", "beaten by another"), 424)
    return picture.svg()


def _spaced(values: Iterator[float], scale: Scale, least: float) -> list[float]:
    """Those whose labels have room."""
    found: list[float] = []
    for value in values:
        if not found or abs(scale.at(value) - scale.at(found[-1])) >= least:
            found.append(value)
    return found


def _option(picture: Picture, item: Option, across: Scale, up: Scale) -> None:
    assert item.expected_hours is not None and item.usd is not None
    x, y = across.at(item.expected_hours), up.at(item.usd)
    colour = COLOURS[0] if item.on_front or item.chosen else COLOURS[1]
    if item.expected_hours_low and item.expected_hours_high and item.usd_low and item.usd_high:
        low, high = across.at(item.expected_hours_low), across.at(item.expected_hours_high)
        picture.line(low, y, high, y, colour="#bbb")
        picture.line(x, up.at(item.usd_low), x, up.at(item.usd_high), colour="#bbb")
    tip = f"{_machines(item)}: {figure(item.expected_hours)} h, {usd_of(item.usd)}; {item.verdict}"
    picture.dot(x, y, 7 if item.chosen else 4, colour, tip)


def _machines(item: Option) -> str:
    return f"{item.instance_count} x {item.instance_type}"


_ANCHORS = {"start": 0.0, "middle": 0.5, "end": 1.0}


def _label(picture: Picture, words: str, x: float, y: float, dots: Sequence[tuple[float, float]]) -> None:
    """Words at a point, on that side of it, and as near, where no dot lies under them; else where the fewest do."""
    width = len(words) * CHARACTER_WIDTH
    sides = [
        (x + across * away, y + down * away + (8 if down > 0 else 0 if down else 4), anchor)
        for away in (12, 26, 40)
        for across, down, anchor in (
            *((0, -1, "middle"), (0, 1, "middle"), (1, 0, "start"), (-1, 0, "end")),
            *((1, -1, "start"), (-1, -1, "end"), (1, 1, "start"), (-1, 1, "end")),
        )
    ]

    def covered(side: tuple[float, float, str]) -> int:
        left, below = side[0] - width * _ANCHORS[side[2]], side[1]
        if left < 100 or left + width > WIDTH - 10 or below < 24 or below > 358:
            return len(dots) + 1  # beyond the frame
        return sum(left - 5 < one < left + width + 5 and below - 15 < other < below + 7 for one, other in dots)

    at, line, anchor = min(sides, key=covered)
    picture.text(at, line, words, anchor=anchor, halo=True)


def _table(found: Search) -> str:
    rows = []
    for item in [option for option in found.options if option.usd is not None][:16]:
        kind = ' class="chosen"' if item.chosen else ""
        hours = hours_of(item.expected_hours)
        cells = (
            f"<td>{'→' if item.chosen else '∗' if item.on_front else ''}</td>"
            f"<td>{item.instance_count} x {escape(item.instance_type)}</td><td>{escape(item.configuration.layout)}</td>"
            f'<td class="number">{hours}</td><td class="number">{usd_of(item.usd)}</td><td>{escape(item.verdict)}</td>'
        )
        rows.append(f"<tr{kind}>{cells}</tr>")
    head = "<tr><th></th><th>machines</th><th>layout</th><th>hours</th><th>USD</th><th>verdict</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"
