"""What campaigns of jobs drawn at random share: seed after seed, a file that keeps what came of each, the command."""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.machine import describe


@dataclass
class Seed:
    """A seed, and what came of it; each campaign adds what it tells."""

    seed: int
    problems: list[str] = field(default_factory=list, kw_only=True)
    """What did not hold; empty: all of it."""
    refused: dict[str, int] = field(default_factory=dict, kw_only=True)
    """The trainer's lines for what was drawn before, and how often each came."""
    seconds: float = field(default=0.0, kw_only=True)


@dataclass
class PlannedSeed(Seed):
    """A job that was traced and planned."""

    job: str
    layout: str


P = TypeVar("P", bound=Seed)


def campaign(
    seeds: Iterable[int], play: Callable[[int], P], *, minutes: float | None, say: Callable[[P], None]
) -> list[P]:
    """Seed after seed, `say` each; none is begun later than `minutes` after the first."""
    deadline = time.monotonic() + 60 * minutes if minutes else float("inf")
    played = []
    for seed in seeds:
        if time.monotonic() > deadline:
            break
        played.append(play(seed))
        say(played[-1])
    return played


def read(path: Path, kind: type[P]) -> list[P]:
    """The seeds of a file; none where there is no such file."""
    if not path.exists():
        return []
    return [kind(**row) for row in json.loads(path.read_text(encoding="utf-8"))["played"]]


def write(path: Path, played: Sequence[Seed]) -> None:
    """Every seed with its job and what came of it, and the machine of the last."""
    rows: list[dict[str, Any]] = [asdict(row) for row in played]
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"machine": describe(), "played": rows}, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def refused_lines(played: Iterable[Seed]) -> list[str]:
    """What was refused, the most frequent first."""
    refused: Counter[str] = Counter()
    for row in played:
        refused.update(row.refused)
    return [f"refused {count}: {reason}" for reason, count in refused.most_common()]


def planned_words(row: PlannedSeed) -> str:
    """A seed in a line."""
    return f"{row.job[:40]} {row.layout[:40]}: {'; '.join(row.problems) or 'agrees'}"


def command(
    name: str,
    description: str,
    *,
    kind: type[P],
    play: Callable[[int], P],
    words: Callable[[P], str],
    table: Callable[[Sequence[P]], str],
    num_seeds: int,
) -> int:
    """The command of a campaign; its exit code, 1 when something did not hold."""
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("--seeds", type=int, default=num_seeds, help="how many (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, help="the first one (default: 1, or the next of --json's)")
    parser.add_argument("--minutes", type=float, help="begin no seed later than that")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add to this file: every seed, and what came of it")
    options = parser.parse_args()
    earlier = read(options.json, kind) if options.json else []
    first = options.first_seed or 1 + max((row.seed for row in earlier), default=0)
    seeds = range(first, first + options.seeds)
    told = [row for row in earlier if row.seed not in seeds]

    def say(row: P) -> None:
        print(f"seed {row.seed} ({row.seconds:.0f} s): {words(row)}", flush=True)
        told.append(row)
        if options.json:
            write(options.json, told)

    played = campaign(seeds, play, minutes=options.minutes, say=say)
    print(table(told))
    return 1 if any(row.problems for row in played) or not played else 0
