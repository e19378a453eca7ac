"""What `--over` says: a setting of the job and the values, or the range, that trials have of it."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import yaml

from trainyard.errors import InputError

RangeKind = Literal["log", "linear", "int"]
KINDS: tuple[RangeKind, ...] = ("log", "linear", "int")
_HOW = "must look like training.learning_rate=1e-4,2e-4 or, to be searched, =log:1e-5..1e-3 (or linear:, int:)"
DIGITS = 6
"""Significant ones of a drawn number: the job file has the very number that the record has."""


@dataclass(frozen=True)
class Axis:
    """One setting that trials differ in."""

    key: str
    """By its dotted name, as --set takes it."""
    choices: tuple[str, ...] = ()
    """Values as YAML text; empty for a range."""
    kind: RangeKind | None = None
    low: float = 0.0
    high: float = 0.0

    def draw(self, source: random.Random) -> str:
        """A value at random: log-uniform, uniform, a whole number, or one of the choices."""
        if self.kind is None:
            return source.choice(self.choices)
        if self.kind == "int":
            return str(source.randint(int(self.low), int(self.high)))
        if self.kind == "log":
            return text_of(math.exp(source.uniform(math.log(self.low), math.log(self.high))))
        return text_of(source.uniform(self.low, self.high))


def text_of(value: float) -> str:
    """A number as YAML reads it back as one: an exponent needs a point before it and a sign after it."""
    text = f"{value:.{DIGITS}g}"
    mantissa, separator, exponent = text.partition("e")
    return text if not separator else f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent):+d}"


def parse_axis(text: str) -> Axis:
    """An axis of one `--over`; InputError says what it must look like."""
    key, separator, values = text.partition("=")
    if not separator or not key.strip() or not values.strip():
        raise InputError(f"--over {text}: {_HOW}")
    kind, colon, bounds = values.partition(":")
    if colon and kind in KINDS:
        return _range(text, key, kind, bounds)
    return Axis(key, _split(text, values))


def _range(text: str, key: str, kind: str, bounds: str) -> Axis:
    low_text, separator, high_text = bounds.partition("..")
    try:
        low, high = float(low_text), float(high_text)
    except ValueError:
        separator = ""
    if not separator:
        raise InputError(f"--over {text}: {_HOW}")
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or (kind == "log" and low <= 0):
        least = "0 < low < high" if kind == "log" else "low < high"
        raise InputError(f"--over {text}: a {kind} range needs {least}, both finite; given {low:g} and {high:g}")
    if kind == "int" and (low != int(low) or high != int(high)):
        raise InputError(f"--over {text}: an int range needs whole numbers; given {low:g} and {high:g}")
    return Axis(key, (), next(known for known in KINDS if known == kind), low, high)


def _split(text: str, values: str) -> tuple[str, ...]:
    """The elements of a YAML list without its brackets, each as it was written."""
    listed = f"[{values}]"
    try:
        node = yaml.compose(listed, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        node = None
    if not isinstance(node, yaml.SequenceNode) or not node.value or node.end_mark.index != len(listed):
        raise InputError(f"--over {text}: {_HOW}")
    found = tuple(listed[one.start_mark.index : one.end_mark.index].strip() for one in node.value)
    if "" in found or len(set(found)) < len(found):
        raise InputError(f"--over {text}: a value is empty or stands twice; give each once")
    return found


def parse_axes(texts: Sequence[str]) -> tuple[Axis, ...]:
    """All axes; InputError where one setting is given twice."""
    axes = tuple(parse_axis(text) for text in texts)
    keys = [axis.key for axis in axes]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise InputError(f"--over {twice}: is given twice; put all its values into one, separated by commas")
    return axes


def grid(axes: Sequence[Axis]) -> Iterator[tuple[str, ...]]:
    """Every combination as overrides, the last axis the fastest; InputError where an axis is a range."""
    ranged = next((axis for axis in axes if axis.kind is not None), None)
    if ranged is not None:
        raise InputError(
            f"--over {ranged.key}: a grid has no ranges; list values, or give --search random|optuna and --trials N"
        )
    return itertools.product(*([f"{axis.key}={choice}" for choice in axis.choices] for axis in axes))
