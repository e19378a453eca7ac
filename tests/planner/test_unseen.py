"""Rows that no constant was fitted to: what their file has, and that the page prints what they score today."""

import csv
import json
import math
import re
import statistics
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from planner_accuracy import error  # noqa: E402
from planner_unseen import PREDICTED, ROWS, Unseen, kind, report, scores  # noqa: E402

from trainyard.planner import predict  # noqa: E402

REFUSED = frozenset(
    row["address"] for row in csv.DictReader(ROWS[2].open(encoding="utf-8")) if row["source"] == "SmolLM3 blog (H100)"
)
"""Its batch is no multiple of its ranks, as its layout is in a picture alone: counted as the worst error."""

PAGE = (REPOSITORY / "docs" / "planner_unseen.md").read_text(encoding="utf-8")


def _rows(which: int = 0) -> list[dict[str, str]]:
    with ROWS[which].open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("which", "least"), [(0, 200), (1, 100), (2, 100), (3, 100), (4, 100), (5, 100)])
def test_every_row_says_where_it_is_from_and_nothing_of_it_goes_unread(which: int, least: int) -> None:
    rows = _rows(which)
    assert len(rows) >= least and len({row["address"] for row in rows}) >= 15
    for row in rows:
        assert row["page_says"] and re.match(r"arXiv:\d{4}\.\d{5}|[\w.-]+\.\w+/\S", row["address"]), row
        assert row["metric"] in PREDICTED and math.isfinite(float(row["value"]))
        request = json.loads(row["request"]) | json.loads(row["restated"] or "{}")
        if row["address"] not in REFUSED:
            assert "ignored_fields" not in predict(request), row


def _figures(found: list[Unseen], name: str) -> tuple[str, str]:
    errors = sorted(error(item.score) for item in found if kind(item.score.metric) == name)
    return f"{statistics.median(errors):.1%}", f"{errors[math.ceil(0.9 * len(errors)) - 1]:.1%}"


@pytest.mark.parametrize(
    ("which", "label"),
    [
        (0, "today"),
        (1, "today, the second pages"),
        (2, "today, the third pages"),
        (3, "today, the fourth pages"),
        (4, "today, the fifth pages"),
        (5, "today, the sixth pages"),
    ],
)
def test_the_page_prints_todays_scores(which: int, label: str) -> None:
    found = list(scores(_rows(which)))
    held = [item.held for item in found if item.held is not None]
    missed = [item for item in found if item.score.metric == "fits" and item.score.measured == 0]
    called = sum(item.score.predicted == 1 for item in missed)
    time, memory = _figures(found, "time"), _figures(found, "memory")
    cells = (", ".join(time), f"{sum(held) / len(held):.1%}", ", ".join(memory), f"{called} of {len(missed)}")
    line = f"| {label} | {' | '.join(cells)} |"
    assert line in PAGE, line


def test_what_was_restated_later_can_be_left_away() -> None:
    rows = _rows()
    first, today = list(scores(rows, as_first_read=True)), list(scores(rows))
    changed = [one.score.row for one, other in zip(first, today, strict=True) if one.request != other.request]
    assert changed == [index for index, row in enumerate(rows) if row["restated"]]
    assert changed


def test_a_refusal_is_infinitely_wrong_and_outside_the_interval() -> None:
    (found,) = scores([_rows()[0] | {"request": json.dumps({"model": "no such"}), "restated": ""}])
    assert found.score.predicted is None and found.held is False
    text = "\n".join(report([found]))
    assert "refused" in text and "0.0% of 1 inside the 80% interval" in text
