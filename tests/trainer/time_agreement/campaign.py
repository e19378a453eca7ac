"""A time campaign: jobs drawn at random, of each one step's closed form held against what its dry run counted.

    scripts/time_campaign --seeds 40 --json results.json

The jobs are those of the memory campaign, but for DeepSpeed's, whose traces say too little. Both sides are seconds of
an H100 by the same operators, links and constants: what they don't share is which operations there are. A step's total
must be within `TOTAL_LIMIT` of its trace's; its parts (`StepTime`) are told where it isn't.

The exit code is 0 when all of it held. `--first-seed N --seeds 1` plays one again.
"""

import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[3])]

from memory_agreement.draws import Drawn, draw
from trainer_testing.agreement import steps_of
from trainer_testing.seeds import PlannedSeed, command, planned_words, refused_lines

from trainyard.errors import TrainyardError

TOTAL_LIMIT = 0.10
LEAST_SECONDS = 5e-5
"""Of a part that is told."""


@dataclass
class Played(PlannedSeed):
    """A seed, and what came of it. Seconds by the parts of a step."""

    traced: dict[str, float] = field(default_factory=dict)
    planned: dict[str, float] = field(default_factory=dict)

    @property
    def off(self) -> float:
        """The planned total over the traced one, less one."""
        return sum(self.planned.values()) / sum(self.traced.values()) - 1


def play(drawn: Drawn) -> Played:
    """One job, traced and reckoned."""
    started = time.monotonic()
    told = Played(drawn.seed, drawn.words, drawn.layout, refused=dict(drawn.refused))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planned, traced = steps_of(drawn.job)
    except TrainyardError as error:
        told.problems = [f"not traced: {error}"]
        return told
    told.planned, told.traced = planned.breakdown(), traced.breakdown()
    told.problems = problems(told)
    told.seconds = round(time.monotonic() - started, 1)
    return told


def problems(played: Played) -> list[str]:
    """What of a traced and reckoned step is off, in lines."""
    if abs(played.off) <= TOTAL_LIMIT:
        return []
    traced, planned = sum(played.traced.values()), sum(played.planned.values())
    return [f"step: trace {1e3 * traced:.1f}, formulas {1e3 * planned:.1f} ms ({played.off:+.0%})"]


def parts(played: Played) -> str:
    """All that take time, trace and formulas."""
    cells = [
        f"{name} {1e3 * played.traced[name]:.1f}, {1e3 * planned:.1f}"
        for name, planned in played.planned.items()
        if max(planned, played.traced[name]) > LEAST_SECONDS
    ]
    return "; ".join(cells) + " ms"


def table(rows: Sequence[Played]) -> str:
    """For people: how many agree, how far off the others are, what was refused."""
    good = [row for row in rows if not row.problems]
    lines = [f"{len(good)} of {len(rows)} steps agree"]
    errors = [row.off for row in rows if row.planned]
    if errors:
        middle = median(abs(error) for error in errors)
        lines.append(f"  median {middle:.1%}, from {min(errors):+.0%} to {max(errors):+.0%}")
    lines += refused_lines(rows)
    for row in rows:
        if row.problems:
            lines.append(f"OFF seed {row.seed}: {'; '.join(row.problems)}\n  {row.job}\n  {row.layout}")
            lines += [f"  {parts(row)}"] if row.planned else []
    return "\n".join(lines)


def play_seed(seed: int) -> Played:
    """The seed's step."""
    return play(draw(seed, engine="torch"))


def main() -> int:
    """The command; its exit code."""
    described = "Random jobs, each step's planned seconds against its trace."
    return command(
        "time_campaign", described, kind=Played, play=play_seed, words=planned_words, table=table, num_seeds=40
    )


if __name__ == "__main__":
    sys.exit(main())
