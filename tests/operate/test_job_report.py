"""A job's report: whole by itself, with every restart and the plan in its pictures; and in a real browser, legible."""

import json
import re
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from launch_testing import JOB_ID
from operate_browser import NoBrowserError, look_at

from trainyard.cli.app import run
from trainyard.launch.compare import Line
from trainyard.launch.record import Attempt, FolderRecordStore, JobRecord, StateChange
from trainyard.operate.job_report import compared, figure, report_of
from trainyard.planner.drawing import Curve, between, line_chart, thinned
from trainyard.spec.job import JobSpec, ResolvedJob

BEGIN = datetime(2026, 3, 20, 8, tzinfo=UTC)
NUM_STEPS = 400
PLAN: dict[str, Any] = {
    "instance_count": 2,
    "on_demand": {"usd_per_hour": 6.88, "basis": "EC2 on demand", "as_of": "2026-03-01"},
    "cost": {"planned_usd": 20.0, "price_basis": "EC2 on demand", "expected_hours": 1.4, "usd_on_demand": 19.3},
    "configurations": [
        {
            "chosen": True,
            "time": {
                "step_seconds": 10.0,
                "step_seconds_low": 9.0,
                "step_seconds_high": 12.0,
                "tokens_per_second": 100.0,
                "mfu": 0.4,
                "breakdown_seconds": {"forward": 3.0, "backward": 6.0, "optimizer": 1.0},
            },
        }
    ],
}


def states() -> tuple[StateChange, ...]:
    """A reclaim in the first attempt, a failure, a resume that completed."""
    told = [("Created", 0, 1), ("Starting", 1, 1), ("Training", 4, 1), ("Interrupted", 30, 1), ("Training", 38, 1)]
    told += [("Failed", 50, 1), ("Created", 60, 2), ("Training", 63, 2), ("Completed", 100, 2)]
    return tuple(
        StateChange(state=name, at=(BEGIN + timedelta(minutes=at)).isoformat(), attempt=attempt)
        for name, at, attempt in told
    )


def metrics() -> list[dict[str, Any]]:
    breakdown = {"data": 0.5, "forward": 3.0, "backward": 6.0, "communication": 1.0, "optimizer": 0.5}
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "attempt": 1 if step <= 200 else 2,
            "loss": 3.0 + 2.0 / step if step != 150 else None,
            "learning_rate": 1e-3,
            "grad_norm": 1.0,
            "tokens": 1100,
            "step_seconds": 11.0,
            "breakdown": breakdown,
        }
        for step in range(1, NUM_STEPS + 1)
    ]
    for step in range(50, NUM_STEPS + 1, 50):
        gpu = {"utilization": 0.93, "held_back": 0.0, "memory_peak": 0.8}
        rows[step - 1]["observed"] = {"throughput": {"mfu_causal": 0.41}, "gpu": gpu}
    rows[-1]["validation_loss"] = 3.2
    return rows


@pytest.fixture
def ended(job: JobSpec, resolved: ResolvedJob, tmp_path: Path) -> JobRecord:
    """A job of two attempts, its files in a folder."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics()) + '{"step": 4')
    start = {"attempt": 1, "at": BEGIN.timestamp(), "resumed_step": 0, "lost_steps": 7, "lost_seconds": 70.0}
    account = [{"start": start | {"load_seconds": 30.0}}, {"totals": {"steps": 400, "useful_seconds": 4400.0}}]
    account[1]["totals"]["save_seconds"] = 20.0  # type: ignore[index]  # a dictionary of dictionaries
    (folder / "goodput.jsonl").write_text("".join(json.dumps(row) + "\n" for row in account))
    first = Attempt(number=1, training_job_name=JOB_ID, created_at=BEGIN.isoformat(), reclaims=1, failure="a <b>&</b>")
    return JobRecord(
        job_id=JOB_ID,
        tenant="acme",
        environment="test",
        backend="sagemaker",
        spec=job,
        resolved=resolved,
        plan=PLAN,
        image="repository@sha256:00",
        checkpoint_destination=str(folder),
        launched_by='<script>alert("x")</script>',
        attempts=(first, Attempt(number=2, training_job_name=f"{JOB_ID}-r2", created_at=BEGIN.isoformat())),
        states=states(),
    )


@pytest.fixture
def page(ended: JobRecord) -> str:
    return report_of(ended, None, now=BEGIN + timedelta(hours=5))


def pictures(page: str) -> dict[str, ElementTree.Element]:
    found = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]
    return {item.attrib["aria-label"]: item for item in found}


def words_of(picture: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in picture.findall("text")]


def test_the_page_loads_nothing_runs_nothing_and_believes_nobody(page: str) -> None:
    assert not re.search(r"https?://|<script|<link|<img|src=|url\(|@import", page)
    assert "&lt;script&gt;" in page and "a &lt;b&gt;&amp;&lt;/b&gt;" in page
    assert "name: tiny" in page, "the job's own file"


def test_curves_restarts_plan_and_account_are_drawn(page: str) -> None:
    found = pictures(page)
    assert set(found) == {
        *("loss", "speed", "GPU use", "a step's time", "time line", "the job's time", "gradient norm", "learning rate")
    }
    assert {"in use", "MFU", "held back"} <= set(words_of(found["GPU use"]))
    for name in ("loss", "speed", "gradient norm"):
        assert "start 2" in words_of(found[name]), name
    assert len(found["loss"].findall("circle")) == 1, "one validation"
    assert "plan" in words_of(found["speed"])
    assert {"measured", "planned"} <= set(words_of(found["a step's time"]))
    line = found["time line"]
    tips = [title.text or "" for title in line.iter("title")]
    assert sum(tip.startswith("Interrupted") for tip in tips) == 1
    assert {"attempt 1", "attempt 2", "Completed", "Failed"} <= set(words_of(line))
    assert "start 2 went on at step 201" in page and "2 attempts, 1 spot reclaim;" in page


def test_figures_are_the_records_own(page: str) -> None:
    assert "400 of 20" in page.replace(",", ""), "steps of the record, as they are"
    # 26 + 12 + 37 minutes on two machines at 6.88 USD an hour.
    assert "17.20 of 100 USD (17%), at 6.88 USD/h each, EC2 on demand; as of 2026-03-01" in page
    assert "20.00 USD (EC2 on demand)" in page
    assert "9% too low, within the interval" in page, "10 s planned, 11 s measured"


def test_a_short_curve_is_drawn_once(ended: JobRecord) -> None:
    """Too few steps for a mean of several."""
    (Path(ended.checkpoint_destination) / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in metrics()[:30])
    )
    page = report_of(ended, None, now=BEGIN + timedelta(hours=5))
    assert "training" in words_of(pictures(page)["loss"]) and "mean of 1 step" not in page


def test_a_job_that_has_told_nothing_has_a_page_too(ended: JobRecord) -> None:
    fresh = ended.model_copy(update={"checkpoint_destination": "/nowhere/at-all", "states": states()[:2]})
    page = report_of(fresh, None, now=BEGIN + timedelta(minutes=3))
    assert set(pictures(page)) == {"time line"}
    assert page.count("The job has told nothing of this yet") == 6


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "-"),
        (163_412.0, "163,400"),
        (1000.4, "1,000"),
        (999.96, "1000"),
        (0.01253, "0.01253"),
        (2.69e-06, "2.69e-06"),
    ],
)
def test_a_large_figure_has_no_exponent(value: float | None, told: str) -> None:
    assert figure(value) == told


@pytest.mark.parametrize(
    ("planned", "told"), [(157.5, "32 times as high"), (9.0, "80% too high"), (2.5, "50% too low"), (5.0, "0% too low")]
)
def test_how_far_a_plan_is_off(planned: float, told: str) -> None:
    assert compared(Line("throughput", "tokens/s", planned, 5.0)) == (figure(planned), "-", "5", told)


def test_a_long_curve_keeps_its_spikes() -> None:
    points = [(float(x), 9.0 if x == 7777 else 1.0) for x in range(20_000)]
    kept = thinned(points)
    assert len(kept) <= 900 and (7777.0, 9.0) in kept and kept == sorted(kept)
    assert line_chart("x", "step", [Curve("a", [], "#000")]) == ""
    assert between(3.02, 5.5) == [3.5, 4.0, 4.5, 5.0, 5.5] and between(2.0, 2.0) == [2.0]


def test_the_verb_writes_a_file_or_says_why_not(
    ended: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))
    local = ended.model_copy(update={"backend": "local"})
    FolderRecordStore(tmp_path / "state" / "jobs").create(local)
    assert run(["report", JOB_ID, "--out", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")
    assert run(["report", JOB_ID, "--out", "-"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("</html>")
    assert run(["report", JOB_ID, "--out", str(tmp_path / "none" / "r.html")]) == 2
    assert "can't be written (there is no folder" in capsys.readouterr().err
    assert run(["report", "acme-none-20260131120000-1a2b", "-e", "nowhere"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.full
def test_a_browser_shows_every_picture_and_no_words_on_other_words(page: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    try:
        seen = look_at(path, tmp_path)
    except NoBrowserError as reason:
        pytest.skip(str(reason))
    assert seen["title"] == JOB_ID and seen["scripts"] == 0
    assert seen["resources"] == [], "nothing is fetched"
    assert 'by <script>alert("x")</script>' in seen["text"], "as words"
    assert len(seen["pictures"]) == 8
    for picture in seen["pictures"]:
        left, top, right, bottom = picture["rect"]
        assert right - left > 800 and bottom - top > 60, picture["name"]
        for text in picture["texts"]:
            x1, y1, x2, y2 = text["rect"]
            assert left <= x1 < x2 <= right and top <= y1 < y2 <= bottom, (picture["name"], text)
        for one, other in combinations(picture["texts"], 2):
            assert not overlap(one["rect"], other["rect"]), (picture["name"], one["words"], other["words"])


def overlap(one: list[float], other: list[float]) -> bool:
    """By more than a pixel each way."""
    return all(min(one[i + 2], other[i + 2]) - max(one[i], other[i]) > 1.0 for i in (0, 1))
