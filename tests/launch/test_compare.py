"""What was planned beside what happened: medians of warm steps, the plan's own interval, honest gaps."""

import json
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from trainyard.cli.app import run
from trainyard.errors import AwsRefusedError, InputError
from trainyard.launch.backend import Observation, SilentError
from trainyard.launch.compare import Line, compare
from trainyard.launch.launcher import new_record
from trainyard.launch.local_backend import LocalBackend
from trainyard.launch.record import FolderRecordStore, JobRecord, StateChange
from trainyard.operate.canary import seen
from trainyard.planner import resolve
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec

TIME = {
    "step_seconds": 2.0,
    "step_seconds_low": 1.6,
    "step_seconds_high": 2.5,
    "tokens_per_second": 1000.0,
    "breakdown_seconds": {
        "forward": 0.5,
        "backward": 1.0,
        "recompute": 0.1,
        "tensor_communication": 0.2,
        "bubble": 0.1,
        "optimizer": 0.1,
    },
}
MEMORY = {f"{part}_gib": 1.0 for part in ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")}
PLAN: dict[str, Any] = {
    "configurations": [
        {"chosen": False, "time": {"step_seconds": 99.0}},
        {"chosen": True, "time": TIME, "memory": MEMORY, "host": {"rank_gib": 4.0}},
    ],
    "cost": {"expected_hours": 10.0, "expected_hours_low": 8.0, "expected_hours_high": 13.0, "usd_on_demand": 500.0},
    "checkpoint": {"goodput": 0.95},
    "on_demand": {"usd_per_hour": 50.0},
    "instance_count": 1,
}


def recorded(folder: Path, plan: dict[str, Any], job_id: str = "acme-test-20260131120000-1a2b") -> JobRecord:
    spec = parse(
        JobSpec,
        {
            "name": "test",
            "model": {"source": "gpt2"},
            "data": {"train": [{"path": "x.txt", "format": "text"}]},
            "training": {"steps": 10, "global_batch_size": 4, "learning_rate": 1e-3},
            "checkpoint": {"destination": str(folder / job_id)},
        },
        "job",
    )
    record = new_record(
        spec,
        resolve(spec),
        job_id=job_id,
        backend="local",
        environment=None,
        plan=plan,
        image=None,
        channels=(),
        forced=(),
        launched_by="",
    )
    FolderRecordStore(folder).create(record)
    return record


def row(step: int, seconds: float, **more: Any) -> dict[str, Any]:
    parts = {"data": 0.0, "forward": seconds * 0.3, "backward": seconds * 0.6, "communication": None}
    return {"step": step, "attempt": 1, "step_seconds": seconds, "tokens": 2200, "breakdown": parts, **more}


def write(folder: Path, record: JobRecord, rows: list[dict[str, Any]]) -> None:
    text = "\n".join(json.dumps(item) for item in rows) + '\n{"step": 99, "step_sec'
    (folder / record.job_id / "metrics.jsonl").write_text(text, encoding="utf-8")


def by_name(lines: tuple[Line, ...]) -> dict[str, Line]:
    return {line.name: line for line in lines}


def test_medians_of_warm_steps_against_the_chosen_configuration(tmp_path: Path) -> None:
    record = recorded(tmp_path, PLAN)
    peak = {"observed": {"peak_bytes": {"allocated_peak": 5 * 2**30, "host_peak": 3 * 2**30}}}
    write(
        tmp_path,
        record,
        [row(1, 30.0), row(2, 9.0), row(3, 9.0), *(row(step, 2.2) for step in range(4, 9)), row(9, 2.2, **peak)],
    )
    found = compare(record, None)
    assert found.num_steps == 6, "the first three load and compile"
    lines = by_name(found.lines)
    assert (lines["step"].planned, lines["step"].measured) == (2.0, 2.2)
    assert lines["step"].error == pytest.approx(2.0 / 2.2 - 1)
    assert lines["step"].verdict == "within the interval"
    assert lines["throughput"].measured == pytest.approx(1000.0)
    assert (lines["throughput"].low, lines["throughput"].high) == (pytest.approx(800.0), pytest.approx(1250.0))
    assert (lines["peak memory of a GPU"].planned, lines["peak memory of a GPU"].measured) == (6.0, 5.0)
    assert (lines["host memory of a rank"].planned, lines["host memory of a rank"].measured) == (4.0, 3.0)
    parts = by_name(found.breakdown)
    assert parts["backward"].planned == pytest.approx(1.1) and parts["backward"].measured == pytest.approx(1.32)
    assert parts["communication"].planned == pytest.approx(0.3) and parts["communication"].measured is None
    assert parts["communication"].verdict == "not measured"


def test_that_the_plan_counts_padding_is_said_of_a_job_that_pads(tmp_path: Path) -> None:
    record = recorded(tmp_path, PLAN)
    write(tmp_path, record, [row(step, 2.0) for step in range(1, 9)])
    data = record.spec.data.model_copy(update={"packing": False})
    pads = record.model_copy(update={"spec": record.spec.model_copy(update={"data": data})})
    words = "data.packing is false: the plan's tokens have the padding in them, the measured ones have not"
    assert words in compare(pads, None).notes and words not in compare(record, None).notes


def test_outside_of_the_interval_is_said(tmp_path: Path) -> None:
    record = recorded(tmp_path, PLAN)
    write(tmp_path, record, [row(step, 4.0) for step in range(1, 9)])
    assert by_name(compare(record, None).lines)["step"].verdict == "outside of the interval"


def test_a_job_of_two_steps_is_measured_by_both(tmp_path: Path) -> None:
    record = recorded(tmp_path, PLAN)
    write(tmp_path, record, [row(1, 4.0), row(2, 2.0)])
    assert compare(record, None).num_steps == 2


def test_hours_and_dollars_wait_for_the_end(tmp_path: Path) -> None:
    record = recorded(tmp_path, PLAN)
    write(tmp_path, record, [row(step, 2.0) for step in range(1, 9)])
    found = compare(record, None)
    assert by_name(found.lines)["hours"].measured is None
    assert any("compared when it has completed" in note for note in found.notes)


def test_what_it_waited_for_machines_is_neither_worked_nor_paid(tmp_path: Path) -> None:
    record = recorded(tmp_path, PLAN)
    write(tmp_path, record, [row(step, 2.0) for step in range(1, 9)])
    rows = [{"start": {}}, {"totals": {"steps": 8, "useful_seconds": 9000.0, "save_seconds": 0.0}}]
    (tmp_path / record.job_id / "goodput.jsonl").write_text("\n".join(map(json.dumps, rows)))
    times = {"Queued": "00:00:00", "Training": "06:00:00", "Completed": "09:00:00"}
    states = tuple(StateChange(state=state, at=f"2026-01-31T{at}+00:00") for state, at in times.items())
    record = record.model_copy(update={"backend": "sagemaker", "states": states})
    lines = by_name(compare(record, None).lines)
    assert lines["hours"].measured == pytest.approx(3.0), "of nine"
    assert lines["goodput"].measured == pytest.approx(9000 / 10800)
    assert lines["on-demand dollars"].measured == pytest.approx(150.0)
    of_four = record.model_copy(update={"plan": {**PLAN, "instance_count": 4}})
    assert by_name(compare(of_four, None).lines)["on-demand dollars"].measured == pytest.approx(600.0)


def test_what_may_not_be_read_is_told_as_that(tmp_path: Path) -> None:
    class Closed:
        def get_object(self, **_: Any) -> None:
            raise ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "GetObject")

    record = recorded(tmp_path, PLAN)
    record = record.model_copy(update={"checkpoint_destination": "s3://acme/x"})
    with pytest.raises(AwsRefusedError, match="AccessDenied"):
        compare(record, Closed())


def test_a_job_without_a_plan_shows_what_was_measured(tmp_path: Path) -> None:
    record = recorded(tmp_path, {"job": "test", "unplanned": "task image_classification: ..."})
    write(tmp_path, record, [row(step, 2.0) for step in range(1, 9)])
    found = compare(record, None)
    step = by_name(found.lines)["step"]
    assert (step.planned, step.measured, step.verdict) == (None, 2.0, "not planned")
    assert any("launched without a plan: task image" in note for note in found.notes)


def test_a_plan_that_knows_no_machine_says_nothing_of_a_host(tmp_path: Path) -> None:
    """Four GiB a process are CUDA and its libraries: of processes on this machine that is no prediction."""
    memory = {"chosen": True, "time": None, "memory": MEMORY, "host": {"rank_gib": 4.0}}
    record = recorded(tmp_path, {"configurations": [memory]})
    peaks = {"observed": {"peak_bytes": {"host_peak": 2**29}}}
    write(tmp_path, record, [row(1, 2.0, **peaks)])
    found = compare(record, None)
    host = by_name(found.lines)["host memory of a rank"]
    assert (host.planned, host.measured, host.verdict) == (None, 0.5, "not planned")
    assert any("knows no machine" in note for note in found.notes)


def test_a_job_of_images_is_compared_by_images(tmp_path: Path) -> None:
    record = recorded(tmp_path, PLAN)
    rows = [row(step, 2.0) for step in range(1, 9)]
    write(
        tmp_path, record, [{**{name: item[name] for name in item if name != "tokens"}, "images": 1800} for item in rows]
    )
    throughput = by_name(compare(record, None).lines)["throughput"]
    assert (throughput.unit, throughput.planned, throughput.measured) == ("images/s", 1000.0, 900.0)


def test_rows_that_a_disk_has_altered_cost_their_figures_alone(tmp_path: Path) -> None:
    record = recorded(tmp_path, PLAN)
    odd: list[dict[str, Any]] = [
        {"step": None},
        {"step": "9"},
        {"breakdown": 3},
        {"observed": [1]},
        {"step_seconds": 0},
    ]
    write(tmp_path, record, [*(row(step, 2.0) for step in range(1, 9)), *({**row(9, 2.0), **item} for item in odd)])
    found = compare(record, None)
    assert by_name(found.lines)["step"].measured == 2.0
    assert by_name(found.breakdown)["forward"].measured == pytest.approx(0.6)


@pytest.mark.parametrize("rows", [None, [row(1, 0.0)]])
def test_nothing_measured_yet_is_one_line(tmp_path: Path, rows: list[dict[str, Any]] | None) -> None:
    record = recorded(tmp_path, PLAN)
    if rows is not None:
        write(tmp_path, record, rows)
    with pytest.raises(InputError, match=r"has no metrics.jsonl at .* nothing was measured") as caught:
        compare(record, None)
    assert "\n" not in str(caught.value)


def test_the_verb_prints_a_table_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path))
    record = recorded(tmp_path / "jobs", PLAN)
    write(tmp_path / "jobs", record, [row(step, 2.2) for step in range(1, 9)])
    assert run(["compare", record.job_id]) == 0
    shown = capsys.readouterr().out
    assert "step, s" in shown and "1.6 to 2.5" in shown and "9% too low, within the interval" in shown
    assert run(["compare", record.job_id, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["lines"][0]["measured"] == 2.2 and document["num_steps"] == 5
    assert run(["compare", "acme-none-20260131120000-ffff", "-e", "nowhere"]) == 2
    assert "no such environment" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (Observation("Completed", ended_at="2026-01-31T14:00:00+00:00"), "Completed"),
        (None, "Created"),
        (SilentError("the cluster does not answer"), "Created"),
        (AwsRefusedError("describing the job: AccessDenied"), "Created"),
    ],
    ids=["ended", "forgotten", "silent", "refused"],
)
def test_the_verbs_that_judge_a_job_know_an_end_that_nobody_has_looked_at(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: Observation | Exception | None,
    state: str,
) -> None:
    """What had completed was said to be compared once it completes."""

    def observe(*_: object) -> Observation | None:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(LocalBackend, "observe", observe)
    record = recorded(tmp_path / "jobs", PLAN)
    write(tmp_path / "jobs", record, [row(step, 2.2) for step in range(1, 9)])
    assert run(["compare", record.job_id, "--json"]) == 0
    waits = [note for note in json.loads(capsys.readouterr().out)["notes"] if note.startswith("the job is ")]
    until = f"the job is {state}: hours, goodput and dollars are compared when it has completed"
    assert waits == ([] if state == "Completed" else [until])
    assert seen(record.job_id, "local", None).state == state


def test_of_a_job_that_was_stopped_half_way_nobody_waits_for_more(tmp_path: Path) -> None:
    record = recorded(tmp_path, PLAN)
    write(tmp_path, record, [row(step, 2.0) for step in range(1, 9)])
    states = (StateChange(state="Stopped", at="2026-01-31T09:00:00+00:00"),)
    found = compare(record.model_copy(update={"states": states}), None)
    assert by_name(found.lines)["hours"].measured is None and by_name(found.lines)["step"].measured == 2.0
    assert "the job is Stopped: hours, goodput and dollars are compared of one that completes" in found.notes
