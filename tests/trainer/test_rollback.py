"""A batch that spoils the weights costs the way back to a checkpoint, and the job is one that never had it."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer.checkpoint.group import Group
from trainer.observe.left_out import LEFT_OUT_FILE, LeftOutBatches
from trainer.session import Session
from trainer_testing.distributed import finish
from trainer_testing.pool import start_pooled
from trainer_testing.text_job import bits, rows_of, run_trainer, write_job

from trainyard.errors import InputError, JobFailedError

STEPS, BATCH = 10, 8
POISONED = (2, 6, 7)
"""Batches: one before the first checkpoint, and two in a row."""


def run(
    folder: Path, job: Path, poisoned: tuple[int, ...], *settings: str, left_out: tuple[int, ...] = ()
) -> tuple[list[int], str, list[dict[str, Any]]]:
    """Exit codes, all words and the rows, with batches that are poisoned on rank 1 or known to be left out."""
    faults = [{"rank": 1, "kind": "poison", "step": 0, "first_sequence": BATCH * (number - 1)} for number in poisoned]
    (folder / "faults").mkdir(parents=True, exist_ok=True)
    (folder / "faults/faults.json").write_text(json.dumps(faults))
    output = folder / "out"
    output.mkdir(exist_ok=True)
    rows = [{"first_sequence": BATCH * (number - 1), "rolled_back_to": 0} for number in left_out]
    if rows:
        (output / LEFT_OUT_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [part for setting in settings for part in ("--set", setting)]
    command = ["--faults", str(folder / "faults"), "--job", str(job), "--output-dir", str(output), *options]
    ended = finish(start_pooled(2, "trainer_testing.faulty_trainer", *command), timeout_seconds=600)
    return [code for code, _ in ended], "\n".join(text for _, text in ended), rows_of(output)


def read_samples(folder: Path) -> list[tuple[str, ...]]:
    """Of rank 0, the sequences of each step, the last time that it was made."""
    lines = (folder / "faults/samples-0.jsonl").read_text().splitlines()
    last = {row["step"]: tuple(row["ids"]) for row in map(json.loads, lines)}
    return [last[step] for step in sorted(last)]


def check(tmp_path: Path, layout: str) -> None:
    job = write_job(tmp_path, layout, steps=STEPS, on_anomaly="rollback")
    codes, said, rows = run(tmp_path / "poisoned", job, POISONED)
    assert codes == [0, 0], said[-6000:]
    # Batch 2 was of step 2; batches 6 and 7 were both of step 5, after one had been passed over.
    for step, back in ((2, 0), (5, 4)):
        assert f"anomaly step={step} rolled back to step={back}: " in said
    codes, said, expected = run(tmp_path / "never", job, (), left_out=POISONED)
    assert codes == [0, 0], said[-6000:]
    assert "anomaly" not in said
    assert bits(rows) == bits(expected)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    # That it never had them is told apart from that by the samples of a job that had.
    codes, said, whole = run(tmp_path / "whole", job, ())
    assert codes == [0, 0], said[-6000:]
    assert bits(whole) != bits(rows)
    batches = read_samples(tmp_path / "whole")
    read = read_samples(tmp_path / "poisoned")
    assert read == read_samples(tmp_path / "never")
    assert read[: STEPS - len(POISONED)] == [
        batch for number, batch in enumerate(batches, start=1) if number not in POISONED
    ]


def test_a_poisoned_batch_leaves_no_trace(tmp_path: Path) -> None:
    check(tmp_path, "fsdp")
    record = tmp_path / "poisoned/out" / LEFT_OUT_FILE
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(row["step"], row["first_sequence"], row["rolled_back_to"]) for row in rows] == [
        (2, BATCH * 1, 0), (5, BATCH * 5, 4), (5, BATCH * 6, 4),
    ]  # fmt: skip
    assert all("nan" in row["anomaly"] for row in rows)

    # A start that begins anew passes over them as well, without having met them.
    before = bits(rows_of(tmp_path / "poisoned/out"))
    shutil.rmtree(tmp_path / "poisoned/out/checkpoints")
    elsewhere = tmp_path / "elsewhere"
    settings = ("checkpoint.every_steps=8", f"checkpoint.destination={elsewhere}")
    codes, said, rows = run(tmp_path / "poisoned", tmp_path / "job.yaml", (), *settings)
    assert codes == [0, 0], said[-6000:]
    assert "anomaly" not in said and bits(rows) == before
    assert (elsewhere / LEFT_OUT_FILE).read_text() == record.read_text(), "it goes along with every checkpoint"


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3", "pipeline", "tensor", "context"])
def test_a_poisoned_batch_leaves_no_trace_under(tmp_path: Path, layout: str) -> None:
    check(tmp_path, layout)


def test_batches_that_are_all_bad_end_the_job(tmp_path: Path) -> None:
    job = write_job(tmp_path, "ddp", steps=STEPS, on_anomaly="rollback", max_skips=2)
    codes, said, _ = run(tmp_path / "poisoned", job, (6, 7, 8))
    assert codes == [1, 1], said[-6000:]
    assert "step 5: loss is nan" in said or "step 6: loss is nan" in said
    assert "2 batches were left out since step 4 (training.max_skips)" in said
    assert "Traceback" not in said


def test_a_record_that_is_none_is_one_line(tmp_path: Path) -> None:
    job = write_job(tmp_path, "ddp", steps=2)
    (tmp_path / "run/out").mkdir(parents=True)
    (tmp_path / "run/out" / LEFT_OUT_FILE).write_text('{"step": 2}\n')
    codes, said, _ = run(tmp_path / "run", job, ())
    assert codes == [1, 1], said[-6000:]
    assert said.count(f"trainyard: {tmp_path}/run/out/{LEFT_OUT_FILE}: is not what this trainer wrote") == 1
    assert "Traceback" not in said, "the others hear of what the first rank read"


@pytest.mark.parametrize(
    ("position", "batch_size", "is_good"),
    [(0, 8, True), (24, 8, True), (40, 16, True), (0, 16, False), (24, 4, False), (20, 8, False), (28, 8, False)],
)
def test_batches_of_another_size_are_not_left_out_in_part(
    tmp_path: Path, position: int, batch_size: int, is_good: bool
) -> None:
    """Of 8 sequences each, from 24 and 32 on: with 16 a step, the first was learnt from without a word."""
    runtime: Any = SimpleNamespace(is_first=True, rank=0, world_size=1, control_group=None)
    left_out = LeftOutBatches(tmp_path, runtime)
    for first in (24, 32):
        data = {"sequences_consumed": first}
        left_out.add(step=4, anomaly="loss is nan", data=data, checkpoint_step=2, num_sequences=8)
    again = LeftOutBatches(tmp_path, runtime)
    again.read()
    if is_good:
        again.check(position, batch_size)
        return
    with pytest.raises(InputError, match=rf"no batch of .*global_batch_size {batch_size}: set it to what it"):
        again.check(position, batch_size)


def test_a_resume_with_another_batch_says_so_before_it_reads_on(tmp_path: Path) -> None:
    job = write_job(tmp_path, "single", steps=4, on_anomaly="rollback")
    output = tmp_path / "out"
    output.mkdir()
    row = {"first_sequence": 8, "num_sequences": 8, "rolled_back_to": 0}
    (output / LEFT_OUT_FILE).write_text(json.dumps(row) + "\n")
    said, _ = run_trainer(1, job, output, "--set", "training.global_batch_size=16", expected_code=2)
    assert "leaves out 8 sequences, from 8 on, which are no batch of a job that goes on at sequence 0" in said


@pytest.mark.parametrize("what", ["rows", "record", "row"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_the_first_rank_alone_cannot_read_or_write_ends_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, rank: int
) -> None:
    """Else they would wait for it in the load, or in the next step."""
    error = JobFailedError("metrics.jsonl: can't be read: Input/output error")
    loaded = list[Any]()

    def fail(*_: Any) -> Any:
        raise error

    def from_first(_: Group, make: Any) -> Any:
        if rank == 0:
            return make()
        if what == "record" or not leaves_out.pop():  # what the first rank found, told to this one
            raise error
        return True

    leaves_out = [False, True]
    monkeypatch.setattr(Group, "from_first", from_first)
    session: Any = object.__new__(Session)
    session.step, session._runtime = 5, SimpleNamespace(is_first=rank == 0, rank=rank, world_size=2, control_group=1)
    session._group = Group(session._runtime.control_group, rank, 2)
    session._job = SimpleNamespace(spec=SimpleNamespace(global_batch_size=8, training=SimpleNamespace(max_skips=2)))
    session.anomalies = SimpleNamespace(found="loss is nan", data={"sequences_consumed": 40})
    session.strategy = SimpleNamespace(state_tensors=dict)
    session.clock = SimpleNamespace(excluded=nullcontext)
    session._patience = SimpleNamespace(as_at_start=nullcontext)
    session._metrics = SimpleNamespace(rows=fail, complete=fail)
    session._left_out = LeftOutBatches(tmp_path, session._runtime)
    session._load = lambda *given: loaded.append(given)
    session._checkpointer = SimpleNamespace(
        wait=lambda: True,
        last_committed_step=4,
        latest=lambda *_, **__: SimpleNamespace(step=4),
        publish_file=lambda *_: True,
        complete=lambda *given: loaded.append(given),
    )
    if what == "row":
        leaves_out[:] = [False]
        session._validation = SimpleNamespace(was_broken_off=True, due=lambda *_: [])
        session._course = SimpleNamespace(num_steps=9)

        def made_up(*_: Any) -> dict[str, Any]:
            session._validation.was_broken_off = False
            return {}

        session._validated = made_up
    if what == "record":
        monkeypatch.setattr("trainer.observe.left_out.replace_all", fail)
    with pytest.raises(JobFailedError, match="Input/output error"):
        session.make_up_validation() if what == "row" else session.roll_back()
    assert not loaded


@pytest.mark.parametrize("found", [4, 2, None])
def test_the_batch_is_noted_before_the_long_read(tmp_path: Path, found: int | None) -> None:
    record = tmp_path / LEFT_OUT_FILE
    session: Any = object.__new__(Session)
    session.step, session._output_dir = 5, tmp_path
    session._runtime = SimpleNamespace(is_first=True, rank=0, world_size=1, control_group=None)
    session._group = Group(None, 0, 1)
    session._job = SimpleNamespace(spec=SimpleNamespace(global_batch_size=8, training=SimpleNamespace(max_skips=2)))
    watch = SimpleNamespace(num_overflows=0)
    session.anomalies = SimpleNamespace(found="loss is nan", data={"sequences_consumed": 40}, watch=watch)
    session.strategy = SimpleNamespace(state_tensors=dict)
    session.clock = SimpleNamespace(excluded=nullcontext)
    session._patience = SimpleNamespace(as_at_start=nullcontext)
    session._goodput = SimpleNamespace(went_back=lambda *_: None)
    session._metrics = SimpleNamespace(rows=list, drop_after=lambda *_: None)
    session._left_out = LeftOutBatches(tmp_path, session._runtime)
    session._load = lambda info, tensors: setattr(watch, "num_overflows", 60)  # as the checkpoint has it
    published = []

    def latest(*_: Any, **__: Any) -> Any:
        assert json.loads(record.read_text())["rolled_back_to"] == 4 and published == [LEFT_OUT_FILE]
        return found and SimpleNamespace(step=found)

    session._checkpointer = SimpleNamespace(
        wait=lambda: True,
        last_committed_step=4,
        latest=latest,
        publish_file=lambda name, path: published.append(name),
    )
    if found is None:
        with pytest.raises(JobFailedError, match="found no checkpoint"):
            session.roll_back()
        return
    session.roll_back()
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(row["first_sequence"], row["rolled_back_to"]) for row in rows] == [(40, found)]
    assert watch.num_overflows == 0
