"""The few shapes that the plan's page is drawn with: SVG as text, no script, nothing loaded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

WIDTH = 960
"""Of every picture, in SVG's units."""

LABEL_WIDTH = 250
"""Left of the bars, for their names."""

CHARACTER_WIDTH = 6.6
"""Of a 12-unit character, roughly: texts are cut where they would run into what stands beside them."""

COLOURS = (
    "#3b6fb6",
    "#e08a2e",
    "#4a9d5b",
    "#b5493f",
    "#7d62a8",
    "#8a6d5a",
    "#c96fa6",
    "#7f8790",
    "#b3a53a",
    "#3a9fb0",
)


@dataclass
class Picture:
    """Shapes in the order that they are drawn."""

    height: float
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "start",
        size: int = 12,
        colour: str = "#222",
        most: float = 0,
        halo: bool = False,
    ) -> None:
        """Words at a place, cut to `most` units of width where that is given; `halo`: legible over lines."""
        fits = int(most / (CHARACTER_WIDTH * size / 12)) if most else 0
        shown = words if not fits or len(words) <= fits else words[: max(1, fits - 1)] + "…"
        behind = ' stroke="#fff" stroke-width="4" paint-order="stroke"' if halo else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"{behind}>'
            f"{escape(shown)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str, tip: str = "") -> None:
        """A filled rectangle, with words that appear over it."""
        tips = f"<title>{escape(tip)}</title>" if tip else ""
        self.parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(0.0, width):.2f}" height="{height:.2f}" fill="{colour}">'
            f"{tips}</rect>"
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, colour: str = "#888", width: float = 1, dash: str = ""
    ) -> None:
        """A straight line."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{colour}" '
            f'stroke-width="{width}"{dashes}/>'
        )

    def path(self, points: Sequence[tuple[float, float]], *, colour: str, dash: str = "") -> None:
        """A line through points."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        where = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self.parts.append(f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')

    def area(self, points: Sequence[tuple[float, float]], *, colour: str) -> None:
        """A pale surface: where a value may lie."""
        where = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self.parts.append(f'<polygon points="{where}" fill="{colour}" fill-opacity="0.15"/>')

    def dot(self, x: float, y: float, radius: float, colour: str, tip: str) -> None:
        """A point with words that appear over it."""
        self.parts.append(
            f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius}" fill="{colour}"><title>{escape(tip)}</title></circle>'
        )

    def whisker(self, x1: float, x2: float, y: float, *, size: float = 5) -> None:
        """An interval from left to right."""
        self.line(x1, y, x2, y, colour="#111", width=1.5)
        for x in (x1, x2):
            self.line(x, y - size, x, y + size, colour="#111", width=1.5)

    def svg(self) -> str:
        """The picture."""
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height:.0f}" role="img" aria-label="{escape(self.title)}" '
            f'font-family="system-ui, sans-serif">{"".join(self.parts)}</svg>'
        )


def legend(picture: Picture, names: Sequence[str], y: float) -> float:
    """Colours and what they mean, in rows; where the last row ends."""
    x = 10.0
    for index, name in enumerate(names):
        width = 22 + len(name) * CHARACTER_WIDTH
        if x + width > WIDTH - 10:
            x, y = 10.0, y + 20
        picture.box(x, y - 10, 12, 12, COLOURS[index % len(COLOURS)])
        picture.text(x + 16, y, name)
        x += width + 14
    return y + 14


def ticks(most: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to about `most`."""
    if not math.isfinite(most) or most <= 0:
        return [0.0]
    raw = most / count
    unit = 10 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw)
    return [step * index for index in range(math.floor(most / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Scale:
    """A value's place on an axis."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """The place of a value, kept on the axis."""
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = (math.log(max(item, 1e-12)) for item in (value, low, high))
        share = 0.5 if high == low else (value - low) / (high - low)
        return self.start + (self.end - self.start) * min(1.0, max(0.0, share))


@dataclass(frozen=True)
class Curve:
    """A line of a chart: (x, y) points from left to right."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dots: bool = False
    """Points by themselves and no line: what is measured rarely."""
    pale: bool = False
    """Behind the others: what scatters."""


@dataclass(frozen=True)
class Mark:
    """A place on the x axis that something happened at."""

    x: float
    words: str


MOST_POINTS = 900
"""Of a curve: about one for each unit of a picture's width."""


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most so many points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    num_stretches = max(1, most // 2)
    edges = [round(index * len(points) / num_stretches) for index in range(num_stretches + 1)]
    kept: list[tuple[float, float]] = []
    for one, other in pairwise(edges):
        stretch = points[one:other]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return kept


def between(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    steps = ticks(high - low, count)
    step = steps[1] if len(steps) > 1 else high - low
    first = math.ceil(low / step - 1e-9)
    return [step * index for index in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    title: str,
    across_name: str,
    curves: Sequence[Curve],
    *,
    marks: Sequence[Mark] = (),
    level: tuple[float, float, float] | None = None,
    level_name: str = "",
    height: float = 260,
) -> str:
    """Curves over one x axis. `level`: (value, low, high) that they are held against, a line with its interval;
    `marks`: dashed lines from top to bottom. Empty where no curve has a point."""
    shown = [curve for curve in curves if curve.points]
    if not shown:
        return ""
    picture = Picture(height, title)
    bottom, top = height - 40, 40.0
    xs = [x for curve in shown for x, _ in curve.points]
    ys = [y for curve in shown for _, y in curve.points] + (list(level) if level else [])
    room = 0.06 * (max(ys) - min(ys)) or abs(max(ys)) * 0.1 or 1.0
    across = Scale(min(xs), max(xs), 80, WIDTH - 20)
    up = Scale(min(ys) - room, max(ys) + room, bottom, top)
    _axes(picture, across, up, across_name)
    if level is not None:
        value, low, high = level
        picture.box(across.start, up.at(high), across.end - across.start, up.at(low) - up.at(high), "#b0000014")
        picture.line(across.start, up.at(value), across.end, up.at(value), colour="#b00", dash="5 4")
        picture.text(across.end, up.at(value) - 5, level_name, anchor="end", colour="#b00")
    for mark in marks:
        place = across.at(mark.x)
        picture.line(place, top, place, bottom, colour="#555", dash="2 3")
        picture.text(min(place + 3, WIDTH - 60), top + 10, mark.words, size=10, colour="#555")
    for curve in sorted(shown, key=lambda item: not item.pale):
        places = [(across.at(x), up.at(y)) for x, y in thinned(curve.points)]
        if curve.dots:
            for (x, y), (at, value) in zip(places, thinned(curve.points), strict=True):
                picture.dot(x, y, 3.5, curve.colour, f"{curve.name}, {across_name} {at:g}: {value:.5g}")
        else:
            picture.path(places, colour=f"{curve.colour}{'55' if curve.pale else ''}")
    x = across.start
    for curve in shown:
        picture.box(x, 12, 12, 12, f"{curve.colour}{'55' if curve.pale else ''}")
        picture.text(x + 16, 22, curve.name)
        x += 34 + len(curve.name) * CHARACTER_WIDTH
    return picture.svg()


def _axes(picture: Picture, across: Scale, up: Scale, across_name: str) -> None:
    for value in between(up.low, up.high):
        picture.line(across.start, up.at(value), across.end, up.at(value), colour="#eee")
        picture.text(across.start - 8, up.at(value) + 4, f"{value:.6g}", anchor="end", colour="#666")
    for value in between(across.low, across.high, 8):
        picture.text(across.at(value), up.start + 16, f"{value:g}", anchor="middle", colour="#666")
    picture.text((across.start + across.end) / 2, up.start + 32, across_name, anchor="middle", colour="#666")
    picture.line(across.start, up.end, across.start, up.start, colour="#888")
    picture.line(across.start, up.start, across.end, up.start, colour="#888")


@dataclass(frozen=True)
class Bar:
    """A stacked bar: the parts' values, an interval of their sum, and words behind it."""

    name: str
    parts: Sequence[float]
    low: float | None = None
    high: float | None = None
    after: str = ""
    marked: bool = False


def stacked_bars(
    title: str,
    unit: str,
    names: Sequence[str],
    bars: Sequence[Bar],
    *,
    limit: float | None = None,
    limit_name: str = "",
) -> str:
    """Bars from left to right, one below the other, all on one scale; a dashed line where a limit is."""
    picture = Picture(0, title)
    top = legend(picture, names, 16) + 14
    behind = 130
    most = max([sum(bar.parts) for bar in bars] + [bar.high or 0.0 for bar in bars] + [limit or 0.0])
    scale = Scale(0.0, most * 1.02 or 1.0, LABEL_WIDTH, WIDTH - behind)
    y = top
    for bar in bars:
        colour = "#111" if bar.marked else "#444"
        picture.text(LABEL_WIDTH - 8, y + 15, bar.name, anchor="end", colour=colour, most=LABEL_WIDTH - 16)
        x = scale.at(0)
        total = 0.0
        for index, value in enumerate(bar.parts):
            total += value
            end = scale.at(total)
            tip = f"{names[index]}: {value:.3g} {unit}"
            picture.box(x, y, end - x, 20, COLOURS[index % len(COLOURS)], tip)
            x = end
        if bar.low is not None and bar.high is not None:
            picture.whisker(scale.at(bar.low), scale.at(bar.high), y + 10)
        furthest = max(x, scale.at(bar.high or 0.0), scale.at(limit or 0.0) if limit else 0.0)
        picture.text(furthest + 6, y + 15, bar.after, colour=colour, most=WIDTH - furthest - 8)
        y += 28
    for value in ticks(most):
        place = scale.at(value)
        picture.line(place, top - 4, place, y, colour="#ddd")
        picture.text(place, y + 16, f"{value:g}", anchor="middle", colour="#666")
    picture.text(WIDTH - behind + 40, y + 16, unit, colour="#666")
    if limit is not None:
        place = scale.at(limit)
        picture.line(place, top - 6, place, y, colour="#b00", width=2, dash="5 4")
        picture.text(place, y + 34, limit_name, anchor="middle", colour="#b00")
    picture.height = y + 44
    # The grid lies under the bars.
    picture.parts.sort(key=lambda part: 0 if 'stroke="#ddd"' in part else 1)
    return picture.svg()
