"""Rows of metrics.jsonl: phases sum to the step, a resume drops what came after its checkpoint."""

import errno
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from trainer.checkpoint import Checkpointer
from trainer.observe import waits
from trainer.observe.left_out import LEFT_OUT_FILE, LeftOutBatches
from trainer.observe.metrics import ATTEMPTS_FILE, METRICS_FILE, MetricsLog, Row
from trainer.observe.step_clock import PHASES, StepClock
from trainer.runtime import Runtime
from trainer.session import _check_places

from trainyard.errors import InputError, JobFailedError


def row(step: int, attempt: int = 1, **changes: Any) -> Row:
    values: dict[str, Any] = {
        "step": step,
        "attempt": attempt,
        "loss": 1.0 / 3.0,
        "learning_rate": 1e-3,
        "grad_norm": 2.0,
        "tokens": 100,
        "step_seconds": 0.5,
        "breakdown": dict.fromkeys(PHASES, 0.0),
    }
    return Row(**(values | changes))


def one_rank() -> Runtime:
    return cast(Runtime, SimpleNamespace(is_first=True, rank=0, world_size=1, control_group=None))


class Time:
    """Stands still, but where a test lets it pass."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    """In the place of the step clock's."""
    passing = Time()
    monkeypatch.setattr("trainer.observe.step_clock.time", passing)
    return passing


def test_phases_sum_to_the_step_and_validation_is_no_part_of_it(time: Time) -> None:
    clock = StepClock(torch.device("cpu"), world_size=2)
    with clock("forward"):
        time.sleep(2.0)
    with clock.excluded():
        time.sleep(300.0)
    with clock("forward"), clock("optimizer"):
        time.sleep(1.0)
    seconds, breakdown = clock.finish_row()
    assert tuple(breakdown) == PHASES
    assert breakdown["communication"] == 0.0
    assert breakdown["forward"] == 3.0
    assert breakdown["optimizer"] == 1.0
    assert seconds == sum(breakdown.values())
    assert seconds < 300.0
    clock = StepClock(torch.device("cpu"), world_size=1)
    with clock("backward"):
        time.sleep(1.0)
    time.sleep(2.0)
    seconds, breakdown = clock.finish_row()
    assert breakdown == dict.fromkeys(PHASES, 0.0) | {"backward": 1.0, "other": 2.0}
    assert seconds == 3.0


class Event:
    """A CUDA event on that time, which it tells in milliseconds."""

    def __init__(self, time: Time) -> None:
        self._time, self.at = time, math.nan

    def record(self) -> None:
        self.at = self._time.seconds

    def synchronize(self) -> None:
        assert not math.isnan(self.at)

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.at - self.at)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_wait_for_other_ranks_is_communication_but_in_a_save_and_in_validation(
    time: Time, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr("trainer.observe.step_clock._event", lambda: Event(time))
    clock = StepClock(torch.device(device), world_size=2)
    with clock("forward"):
        time.sleep(2.0)
        with clock.waiting():
            time.sleep(1.0)
    with clock("backward"):
        time.sleep(4.0)
    clock.waited(0.5)  # in the backward pass, as its own hooks saw
    with clock("data"):
        time.sleep(0.25)
        with clock.waiting():
            time.sleep(0.125)
    with clock.waiting():
        time.sleep(8.0)
    with clock("checkpoint"), clock.waiting():
        time.sleep(16.0)
    with clock.excluded(), clock.waiting():
        time.sleep(100.0)
    time.sleep(32.0)
    seconds, breakdown = clock.finish_row()
    found = {"data": 0.25, "forward": 2.0, "backward": 3.5, "communication": 9.625, "checkpoint": 16.0, "other": 32.0}
    assert breakdown == dict.fromkeys(PHASES, 0.0) | found
    assert seconds == sum(found.values())
    assert clock.finish_row() == (0.0, dict.fromkeys(PHASES, 0.0)), "the next row begins with nothing"
    waits.listen(None)


class Stream:
    """A GPU's, on that time: kernels run one after the other, and the host goes on meanwhile."""

    def __init__(self, time: Time) -> None:
        self.time, self.free_at = time, 0.0

    def launch(self, seconds: float) -> None:
        """A kernel of so many seconds."""
        self.free_at = max(self.free_at, self.time.seconds) + seconds

    def synchronize(self) -> None:
        """The host waits until all that was launched is done."""
        self.time.seconds = max(self.time.seconds, self.free_at)


class StreamEvent(Event):
    """An event that is reached when the stream gets there."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream.time)
        self._stream = stream

    def record(self) -> None:
        self.at = max(self._stream.free_at, self._time.seconds)

    def synchronize(self) -> None:
        self._time.seconds = max(self._time.seconds, self.at)

    def elapsed_time(self, end: Event) -> float:
        assert max(self.at, end.at) <= self._time.seconds, "an event that is not reached yet has no time"
        return super().elapsed_time(end)


@pytest.mark.parametrize(("reading", "answering"), [(1.0, 0.25), (7.0, 0.25), (1.0, 3.0), (7.0, 3.0)])
def test_on_a_gpu_what_the_host_does_meanwhile_makes_no_step_longer(
    time: Time, monkeypatch: pytest.MonkeyPatch, reading: float, answering: float
) -> None:
    """It reads the next batch while the GPU is at this one, and hears other ranks while it is at the update."""
    stream = Stream(time)
    monkeypatch.setattr("trainer.observe.step_clock._event", lambda: StreamEvent(stream))
    clock = StepClock(torch.device("cuda"), world_size=2)
    for phase, seconds in (("forward", 2.0), ("backward", 4.0)):
        with clock(phase):
            stream.launch(seconds)
    with clock("data"):
        time.sleep(reading)
    stream.synchronize()  # the loss is asked for
    with clock("optimizer"):
        stream.launch(0.5)
    with clock.waiting():
        time.sleep(answering)
    seconds, breakdown = clock.finish_row()
    found = {"forward": 2.0, "backward": 4.0, "optimizer": 0.5}
    found |= {"data": max(0.0, reading - 6.0), "communication": max(0.0, answering - 0.5)}
    assert breakdown == dict.fromkeys(PHASES, 0.0) | found
    assert seconds == time.seconds == sum(found.values())
    waits.listen(None)


@pytest.mark.parametrize(("world_size", "is_listening"), [(1, False), (2, True)])
def test_of_one_rank_nobody_watches_for_waits(
    monkeypatch: pytest.MonkeyPatch, world_size: int, is_listening: bool
) -> None:
    told: list[StepClock | None] = []
    monkeypatch.setattr(waits, "listen", told.append)
    clock = StepClock(torch.device("cpu"), world_size=world_size)
    assert told == [clock if is_listening else None]


def test_a_checkpoint_after_a_row_is_in_the_next_row(time: Time) -> None:
    clock = StepClock(torch.device("cpu"), world_size=1)
    _, first = clock.finish_row()
    with clock("checkpoint"):
        time.sleep(1.0)
    _, second = clock.finish_row()
    assert first["checkpoint"] == 0.0
    assert second["checkpoint"] == 1.0


def test_rows_keep_full_precision_and_are_valid_json(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.begin_attempt(resumed_step=0)
    log.append(row(1, grad_norm=math.inf, was_applied=False))
    log.append(row(2, validation={"validation_loss": 0.25}))
    first, second = log.rows()
    assert first["loss"].hex() == (1.0 / 3.0).hex()
    assert first["grad_norm"] is None
    assert first["skipped"] is True
    assert "validation_loss" not in first
    assert second["validation_loss"] == 0.25
    assert "Infinity" not in log.path.read_text()


class Disk:
    """The one that the folder lies on; while it is full, every file there takes half of what it is given."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        honest = Path.open

        class Half(io.TextIOWrapper):
            def write(self, text: str) -> int:
                super().write(text[: len(text) // 2])
                self.flush()
                raise OSError(errno.ENOSPC, "No space left on device")

        def opened(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
            if self.is_full and path.parent == folder and mode in ("a", "w"):
                return Half(honest(path, f"{mode}b"), encoding="utf-8")
            return honest(path, mode, *rest, **options)

        monkeypatch.setattr(Path, "open", opened)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Of the test's folder."""
    return Disk(tmp_path, monkeypatch)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_rows_that_a_full_disk_does_not_take_wait_and_no_checkpoint_lacks_one(tmp_path: Path, disk: Disk) -> None:
    log = MetricsLog(tmp_path)
    log.begin_attempt(resumed_step=0)
    log.append(row(1))
    disk.is_full = True
    for step in (2, 3):
        log.append(row(step))
    assert [one["step"] for one in log.rows()] == [1, 2, 3]
    assert steps_in(log.path) == [1], "no half row"
    copies = [log.to_copy()]
    log.append(row(4))
    copies.append(log.to_copy())
    assert [steps_in(copy) for copy in copies] == [[1, 2, 3], [1, 2, 3, 4]], "the save before may still be on its way"
    disk.is_full = False
    log.append(row(5))
    assert steps_in(log.path) == [1, 2, 3, 4, 5]
    assert log.to_copy() == log.path


def test_a_save_that_began_on_a_full_disk_takes_no_row_away_that_was_written_since(tmp_path: Path, disk: Disk) -> None:
    checkpointer = Checkpointer(
        str(tmp_path), rank=0, world_size=1, local_dir=tmp_path / "scratch", keep_last=1, asynchronous=False
    )
    log = MetricsLog(tmp_path, is_published=checkpointer.is_place_of(METRICS_FILE, tmp_path / METRICS_FILE))
    log.begin_attempt(resumed_step=0)
    log.append(row(1))
    disk.is_full = True
    log.append(row(2))
    attachments = {METRICS_FILE: log.to_copy()}
    disk.is_full = False
    log.append(row(3))
    checkpointer.save(3, {"weights": torch.zeros(1)}, {"step": 3}, attachments=attachments)
    assert checkpointer.last_committed_step == 3
    assert [one["step"] for one in log.rows()] == steps_in(log.path) == [1, 2, 3]
    log.append(row(4))
    assert steps_in(log.path) == [1, 2, 3, 4]


def test_a_file_has_its_place_at_a_destination_by_folder_and_name(tmp_path: Path) -> None:
    def is_place(destination: str, path: Path) -> bool:
        checkpointer = Checkpointer(
            destination, rank=0, world_size=1, local_dir=tmp_path / "scratch", keep_last=1, asynchronous=False
        )
        return checkpointer.is_place_of(METRICS_FILE, path)

    (tmp_path / "link").symlink_to(tmp_path)
    assert is_place(str(tmp_path), tmp_path / METRICS_FILE), "before the first row, too"
    assert is_place(str(tmp_path / "link"), tmp_path / METRICS_FILE)
    assert not is_place(str(tmp_path), tmp_path / "other.jsonl")
    assert not is_place(str(tmp_path / "elsewhere"), tmp_path / METRICS_FILE)


def test_what_a_full_disk_does_not_let_be_rewritten_waits_too(tmp_path: Path, disk: Disk) -> None:
    log = MetricsLog(tmp_path)
    log.begin_attempt(resumed_step=0)
    for step in (1, 2, 3):
        log.append(row(step))
    disk.is_full = True
    log.append(row(4))
    log.drop_after(2)
    log.complete(2, {"validation_loss": 0.5})
    assert sorted(path.name for path in tmp_path.iterdir()) == [ATTEMPTS_FILE, METRICS_FILE], "no partial file"
    log.append(row(3, loss=2.0))
    assert [one["step"] for one in log.rows()] == steps_in(log.to_copy()) == [1, 2, 3]
    disk.is_full = False
    log.flush()
    written = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [(one["step"], one["loss"], one.get("validation_loss")) for one in written[1:]] == [
        (2, 1.0 / 3.0, 0.5),
        (3, 2.0, None),
    ]
    assert log.to_copy() == log.path
    disk.is_full = True
    assert log.begin_attempt(resumed_step=2) == 2, "a start goes on as well"
    assert [one["step"] for one in log.rows()] == [1, 2]


def test_a_batch_is_left_out_though_the_disk_has_no_room_to_note_it(
    tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    left_out = LeftOutBatches(tmp_path, one_rank())
    disk.is_full = True
    left_out.add(step=2, anomaly="loss is nan", data={"sequences_consumed": 8}, checkpoint_step=0, num_sequences=8)
    assert capsys.readouterr().out == f"{left_out.path}: not written, its disk is full\n"
    assert left_out.num_since(0, {"sequences_consumed": 16}) == 1 and not list(tmp_path.iterdir())
    disk.is_full = False
    left_out.add(step=3, anomaly="loss is nan", data={"sequences_consumed": 16}, checkpoint_step=0, num_sequences=8)
    assert [json.loads(line)["first_sequence"] for line in left_out.path.read_text().splitlines()] == [8, 16]


def test_another_error_than_a_full_disk_is_an_error(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        log.append(row(1))


def test_a_resume_truncates_and_counts_attempts(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    assert log.begin_attempt(resumed_step=0) == 1
    for step in range(1, 6):
        log.append(row(step))
    with log.path.open("a") as file:
        file.write('{"step": 6, "att')  # killed while it wrote
    assert log.begin_attempt(resumed_step=3) == 2
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [1, 2, 3]
    assert log.begin_attempt(resumed_step=3) == 3, "an attempt that wrote no row counts too"
    log.attempts_path.unlink()
    log.append(row(4, attempt=3))
    assert log.begin_attempt(resumed_step=3) == 4, "rows tell, where the counter was lost"
    log.append(row(4, attempt=4))
    for torn in ("", "{}", "[4]", '{"attempts": null}'):
        log.attempts_path.write_text(torn)
        assert log.begin_attempt(resumed_step=4) == 5, "or the power went before it was on the disk"


def test_a_resume_that_drops_nothing_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    """To write all rows of a long job anew would take seconds of each of its starts."""
    log = MetricsLog(tmp_path)
    log.begin_attempt(resumed_step=0)
    for step in range(1, 41):
        log.append(row(step))
    before = log.path.stat().st_ino
    log.begin_attempt(resumed_step=40)
    assert log.path.stat().st_ino == before
    assert [one["step"] for one in log.recent()] == list(range(21, 41))
    for broken in ('{"step": 41, "att', '{"step": 41, "att\n', '{"step": 40}'):
        with log.path.open("a") as file:
            file.write(broken)
        assert len(log.recent()) == 20 and log.recent()[-1]["step"] == 40
        log.begin_attempt(resumed_step=40, rows=[one for one in log.rows() if "attempt" in one])
        assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == list(range(1, 41))


def test_rows_that_a_disk_has_altered_are_dropped_and_told_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(tmp_path)
    for step in range(1, 7):
        log.append(row(step))
    lines = log.path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"step"', b'"st\xffp"')
    broken = [b"3\n", b"[1]\n", b"null\n", b'{"step": "2"}\n', b'{"step": Infinity}\n', b"\xff\xfe\n"]
    log.path.write_bytes(b"".join([*broken, *lines, b'{"step": 7, "att']))
    again = MetricsLog(tmp_path)
    again.rows()
    assert again.begin_attempt(resumed_step=5) == 2
    assert [one["step"] for one in again.rows()] == [1, 3, 4, 5]
    told = capsys.readouterr().out
    assert told == f"warning: {log.path}: 8 of 13 rows can't be read: dropped\n"
    log.path.read_text(encoding="utf-8")
    MetricsLog(tmp_path).begin_attempt(resumed_step=5)
    assert capsys.readouterr().out == ""


def test_a_byte_altered_in_a_rows_words_stays_no_longer_than_to_the_next_start(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(row(1, more={"anomaly": "loss is odd"}))
    log.path.write_bytes(log.path.read_bytes().replace(b"odd", b"o\xffd"))
    log.begin_attempt(resumed_step=1)
    assert [one["anomaly"] for one in log.rows()] == ["loss is o\ufffdd"]
    log.path.read_text(encoding="utf-8")


def test_rows_of_later_steps_are_put_behind_what_is_taken_over(tmp_path: Path) -> None:
    own, taken = MetricsLog(tmp_path / "own"), MetricsLog(tmp_path / "taken")
    for log, steps in ((own, range(1, 6)), (taken, range(1, 4))):
        log.path.parent.mkdir()
        for step in steps:
            log.append(row(step, more={"of": log.path.parent.name}))
    taken.add_later(own.rows())
    taken.add_later([])
    assert [(one["step"], one["of"]) for one in taken.rows()] == [
        *((step, "taken") for step in (1, 2, 3)), *((step, "own") for step in (4, 5)),
    ]  # fmt: skip


def test_a_record_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.path.mkdir()
    with pytest.raises(JobFailedError, match=r"metrics\.jsonl: can't be read: Is a directory"):
        log.rows()
    record = tmp_path / LEFT_OUT_FILE
    for content in (b"\xff", b"3\n", b"[]\n", b'{"first_sequence": "x", "rolled_back_to": 3}\n'):
        record.write_bytes(content)
        with pytest.raises(JobFailedError, match="is not what this trainer wrote"):
            LeftOutBatches(tmp_path, one_rank()).read()


@pytest.mark.parametrize("name", ["result.json", "recovery.jsonl"])
def test_a_folder_in_the_place_of_a_record_is_refused_before_anything_is_trained(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=rf"{name}: is a folder, where the job writes a file: move it away"):
        _check_places(tmp_path)


def test_the_line_on_stdout_begins_with_what_filters_match() -> None:
    line = row(12, tokens=1000, step_seconds=0.5).as_line()
    assert line.startswith("step=12 loss=0.333333 learning_rate=0.001 ")
    assert " tokens=1000 tokens_per_second=2000.0 step_seconds=0.5000" in line
