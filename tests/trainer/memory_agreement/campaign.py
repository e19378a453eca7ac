"""A memory campaign: jobs drawn at random, of each one rank's closed form held against its dry run.

    scripts/memory_campaign --seeds 200 --json results.json

What `benchmarks/planner_dry_run.py` and the agreement tests hold is what somebody thought of. A seed (`draws`)
is any job that the trainer takes and the planner has formulas for: family, sizes, optimizer, adapter, precision,
sequence, micro-batches, recomputation, loss, and a layout of up to 16 ranks, of which one is traced. What must hold:

- parameters, gradients and optimizer together are within `STATE_LIMIT` of the trace;
- activations and buffers together are within `MOVING_LIMIT`;
- all that is there at the peak is within `WHOLE_LIMIT`.

Where gradients come late (in a step's one backward pass, or at a pipeline's end), moments with many of them and moments
with many activations may be as dear, and the peak of either side the other's: those that are there then move, too. Of
DeepSpeed's jobs activations alone are traced. `LEAST_BYTES` is what nobody plans by.

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

from trainer.dry_run.trace import trace
from trainer_testing.seeds import PlannedSeed, command, planned_words, refused_lines

from memory_agreement.draws import Drawn, draw
from trainyard.cli.dry_running import STATE, compared, planned_bytes, planned_memory
from trainyard.errors import TrainyardError
from trainyard.planner import resolve

STATE_LIMIT, MOVING_LIMIT, WHOLE_LIMIT = 0.03, 0.10, 0.05
LEAST_BYTES = 16 * 2**20
"""Differences below it are none."""
_MIB = 2**20


@dataclass
class Played(PlannedSeed):
    """A seed, and what came of it. Bytes by the formulas' categories."""

    rank: int
    traced: dict[str, int | None] = field(default_factory=dict)
    planned: dict[str, int] = field(default_factory=dict)
    gradients_at_peak: int | None = None
    """At the trace's peak; `traced` has them at their most."""
    planned_gradients_at_peak: int = 0
    """The same of the formulas."""
    phase: str = ""

    @property
    def state(self) -> tuple[int, int] | None:
        """By trace and by formulas: parameters, gradients and optimizer; None: not traced."""
        values = [self.traced[name] for name in STATE]
        if None in values:
            return None
        return sum(value or 0 for value in values), sum(self.planned[name] for name in STATE)

    @property
    def moving(self) -> tuple[int, int]:
        """By trace and by formulas: activations and buffers, and gradients that come late and are there; without
        buffers where they are not traced."""
        names = [name for name in ("activations", "buffers") if self.traced[name] is not None]
        traced, planned = sum(self.traced[name] or 0 for name in names), sum(self.planned[name] for name in names)
        return (traced + self._gradients[0], planned + self._gradients[1]) if self._comes_late else (traced, planned)

    @property
    def whole(self) -> tuple[int, int] | None:
        """By trace and by formulas: all that is there at the peak; None: not traced."""
        if self.state is None:
            return None
        (traced, planned), gradients = self.moving, (0, 0) if self._comes_late else self._gradients
        kept = [sum(side[name] or 0 for name in ("parameters", "optimizer")) for side in (self.traced, self.planned)]
        return kept[0] + gradients[0] + traced, kept[1] + gradients[1] + planned

    @property
    def _gradients(self) -> tuple[int, int]:
        return min(self.gradients_at_peak or 0, self.traced["gradients"] or 0), self.planned_gradients_at_peak

    @property
    def _comes_late(self) -> bool:
        at_most = self.traced["gradients"], self.planned["gradients"]
        return None not in at_most and self._gradients != at_most


def play(drawn: Drawn) -> Played:
    """One rank, traced and reckoned."""
    started = time.monotonic()
    told = Played(drawn.seed, drawn.words, drawn.layout, drawn.rank, refused=dict(drawn.refused))
    resolved = resolve(drawn.job)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = trace(resolved, drawn.rank)
    except TrainyardError as error:
        told.problems = [f"not traced: {error}"]
        return told
    planned, use = (ask(drawn.job, resolved, drawn.rank) for ask in (planned_bytes, planned_memory))  # type: ignore[operator]
    assert planned is not None and use is not None
    traced = compared(found)
    told.traced = {name: traced[name] for name in (*STATE, "activations", "buffers")}
    told.planned = {name: round(value) for name, value in planned.items()}
    told.gradients_at_peak, told.phase = found["memory_bytes"]["gradients"], found["peak_phase"]
    told.planned_gradients_at_peak = round(use.at_peak["gradients"])
    told.problems = problems(told)
    told.seconds = round(time.monotonic() - started, 1)
    return told


def problems(played: Played) -> list[str]:
    """What of a traced and reckoned rank is off, in lines."""
    found = []
    if played.state is not None and _is_off(*played.state, STATE_LIMIT):
        found.append(_line("state", *played.state))
    if played.whole is not None and _is_off(*played.whole, WHOLE_LIMIT):
        found.append(_line("whole", *played.whole))
    if _is_off(*played.moving, MOVING_LIMIT):
        found.append(_line("moving", *played.moving))
    return found


def _is_off(traced: int, planned: int, limit: float) -> bool:
    return abs(planned - traced) > max(limit * traced, LEAST_BYTES)


def _line(what: str, traced: int, planned: int) -> str:
    ratio = f"{planned / traced - 1:+.1%}" if traced else "of nothing"
    return f"{what}: trace {traced / _MIB:,.0f}, formulas {planned / _MIB:,.0f} MiB ({ratio})"


def parts(played: Played) -> str:
    """All categories, trace and formulas."""
    cells = []
    for name, planned in played.planned.items():
        traced = played.traced[name]
        words = "-" if traced is None else f"{traced / _MIB:,.0f}"
        cells.append(f"{name} {words}, {planned / _MIB:,.0f}")
    late = ""
    if played.gradients_at_peak is not None:
        at_peak = played.gradients_at_peak, played.planned_gradients_at_peak
        late = f", gradients then {', '.join(f'{value / _MIB:,.0f}' for value in at_peak)}"
    return "; ".join(cells) + f" MiB; peak in {played.phase}{late}"


def table(rows: Sequence[Played]) -> str:
    """For people: how many agree, how far off the others are, what was refused."""
    good = [row for row in rows if not row.problems]
    lines = [f"{len(good)} of {len(rows)} ranks agree"]
    for what in ("state", "moving"):
        pairs = [getattr(row, what) for row in rows if row.planned]
        errors = [planned / traced - 1 for traced, planned in filter(None, pairs) if traced > LEAST_BYTES]
        if errors:
            middle = median(abs(error) for error in errors)
            lines.append(f"  {what:<6} median {middle:.1%}, from {min(errors):+.1%} to {max(errors):+.1%}")
    lines += refused_lines(rows)
    for row in rows:
        if row.problems:
            lines.append(
                f"OFF seed {row.seed}: {'; '.join(row.problems)}\n  {row.job}\n  rank {row.rank}, {row.layout}"
            )
            lines += [f"  {parts(row)}"] if row.planned else []
    return "\n".join(lines)


def play_seed(seed: int) -> Played:
    """The seed's rank."""
    return play(draw(seed))


def main() -> int:
    """The command; its exit code."""
    described = "Random jobs, each plan against its trace."
    return command(
        "memory_campaign", described, kind=Played, play=play_seed, words=planned_words, table=table, num_seeds=100
    )


if __name__ == "__main__":
    sys.exit(main())
