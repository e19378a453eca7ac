"""How wrong the planner is on published runs that nobody here had seen when its formulas and constants were made.

    python benchmarks/planner_unseen.py [--rows FILE ...] [--dump FILE] [--as-first-read]

A FILE (benchmarks/data/planner_unseen.csv; planner_unseen_2.csv to _6.csv, each written down when all that those
before it taught was known) has a line per published figure: where it stands, what the page says, the request as
`trainyard predict --jsonl` reads it, and the figure. No constant is fitted to these lines, and nothing is inferred
from a source: what a page doesn't say is not in the request. `restated` is what was added after the first prediction,
because the planner could not be told it then or the first reading had left it out; --as-first-read leaves it away.
"""

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner_accuracy import Answer, Score, answer, fits_line, line

from trainyard.planner.predict import understand

DATA = Path(__file__).resolve().parent / "data"
ROWS = tuple(DATA / f"planner_unseen{number}.csv" for number in ("", "_2", "_3", "_4", "_5", "_6"))

PREDICTED: dict[str, Callable[[Answer], float]] = {
    "tokens_per_second_per_gpu": lambda result: result["tokens_per_second_per_gpu"],
    "step_seconds": lambda result: result["step_seconds"],
    "mfu": lambda result: result["mfu"] * 100,
    # Narayanan's formula counts what full recomputation does again: the forward pass, a third of the model's work.
    "hw_tflops_per_gpu": lambda result: result["model_tflops_per_gpu"] * 4 / 3,
    "peak_memory_gib": lambda result: result["peak_memory_gib"],
    "reserved_memory_gib": lambda result: result["reserved_memory_gib"],
    "device_memory_gib": lambda result: result["device_memory_gib"],
    "fits": lambda result: float(result["fits"]),
}
"""The metrics of the rows' file, as the planner's answer has them."""


@dataclass(frozen=True)
class Unseen:
    """A published figure, what is predicted for it, and whether the 80% interval of time holds it (None: no time)."""

    score: Score
    held: bool | None
    page: str
    request: dict[str, Any]


def scores(rows: Iterable[dict[str, str]], *, as_first_read: bool = False) -> Iterator[Unseen]:
    """Each line of the file with its prediction."""
    for index, row in enumerate(rows):
        restated = "" if as_first_read else row.get("restated")
        request = json.loads(row["request"]) | json.loads(restated or "{}")
        result = answer(request)
        metric, measured = row["metric"], float(row["value"])
        predicted = PREDICTED[metric](result) if result is not None else None
        held = None
        if "memory" not in metric and metric != "fits":
            # One factor up and down, whichever figure it is of.
            spread = result["step_seconds_high"] / result["step_seconds"] if result else 0.0
            held = predicted is not None and predicted / spread <= measured <= predicted * spread
        yield Unseen(
            Score("unseen", index, row["source"], metric, measured, predicted), held, row["page_says"], request
        )


def kind(metric: str) -> str:
    """Time (throughput and utilization are times too), memory, or whether it fits."""
    return "fits" if metric == "fits" else "memory" if "memory" in metric else "time"


def goal_of(item: Unseen) -> str:
    """Which of the planner's goals the row is of."""
    if item.score.predicted is None:
        return "refused"
    if "method" in item.request:
        return "tuning"
    question = understand(item.request)
    new = question.shape.experts > 0 or question.layout.precision in ("fp8", "fp4")
    if new or question.device.generation in ("blackwell", "cdna3"):
        return "experts, FP8, Blackwell"
    return "dense, 16 bits, up to Hopper"


def report(found: list[Unseen]) -> Iterator[str]:
    """A line for each kind, then for each source."""
    header = f"{'':72} {'rows':>5} {'refused':>8} {'median':>7} {'p90':>7} {'worst':>8} {'bias':>7}"
    for name in ("time", "memory"):
        members = [item for item in found if kind(item.score.metric) == name]
        if not members:
            continue
        yield header
        yield line(f"{name}, all", [item.score for item in members])
        for goal in dict.fromkeys(goal_of(item) for item in members):
            yield line(f"{name}, {goal}", [item.score for item in members if goal_of(item) == goal])
        for source in dict.fromkeys(item.score.source for item in members):
            yield line(source, [item.score for item in members if item.score.source == source])
        held = [item.held for item in members if item.held is not None]
        if held:
            yield f"{sum(held) / len(held):.1%} of {len(held)} inside the 80% interval"
        yield ""
    verdicts = [item.score for item in found if kind(item.score.metric) == "fits"]
    if verdicts:
        yield fits_line("whether it fits", verdicts)


def main() -> int:
    """Prints the tables, and writes each prediction where --dump says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=Path, nargs="+", default=ROWS, help="CSV with source,address,page_says,request,metric,value"
    )
    parser.add_argument("--dump", type=Path, help="CSV to write: source,metric,measured,predicted,held,page_says")
    parser.add_argument("--as-first-read", action="store_true", help="without what was restated later")
    arguments = parser.parse_args()
    found: list[Unseen] = []
    for path in arguments.rows:
        if not path.is_file():
            print(f"{path}: is not there", file=sys.stderr)
            return 2
        with path.open(newline="", encoding="utf-8") as file:
            members = list(scores(csv.DictReader(file), as_first_read=arguments.as_first_read))
        print(f"== {path.name}", *report(members), sep="\n")
        found += members
    if arguments.dump:
        with arguments.dump.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["source", "metric", "measured", "predicted", "held", "page_says"])
            for item in found:
                said = "" if item.score.predicted is None else f"{item.score.predicted:.6g}"
                held = "" if item.held is None else str(item.held).lower()
                score = item.score
                writer.writerow([score.source, score.metric, f"{score.measured:g}", said, held, item.page])
    return 0


if __name__ == "__main__":
    sys.exit(main())
