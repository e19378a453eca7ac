"""The last word of a rank and of a host, on a disk on which no byte can be had any more."""

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_entrypoint import job as resolved_job
from torch.distributed import HashStore
from trainer import speech
from trainer.host import rank
from trainer.host.hosts import OneHost
from trainer.host.recovery import Ending, RestartPolicy
from trainer.host.run import ROOM, Folders, HostRun, Place, finish
from trainer.host.word import first_line
from trainer.kubernetes import LOST_EXIT_CODE, tell_ending
from trainer.runtime import Runtime

from trainyard.errors import JobFailedError
from trainyard.kept_room import ROOM_BYTES, keep_room
from trainyard.spec.job import ResolvedJob

LOST = "host algo-2 is gone: its entrypoint was killed, or the network parted"


class Disk:
    """Once it is full, files keep the blocks that they have: bytes beyond these are refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self.takes_writes_over = True
        honest = os.write

        def written(descriptor: int, content: Any) -> int:
            if not self.is_full or not Path(f"/proc/self/fd/{descriptor}").readlink().is_absolute():
                return honest(descriptor, content)
            room = os.fstat(descriptor).st_size - os.lseek(descriptor, 0, os.SEEK_CUR)
            if room <= 0 or not self.takes_writes_over:
                raise OSError(errno.ENOSPC, "No space left on device")
            return honest(descriptor, content[:room])

        monkeypatch.setattr(os, "write", written)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    yield Disk(monkeypatch)


@pytest.mark.parametrize(("code", "name"), [(75, "resume_me"), (1, "failure")])
def test_a_hosts_last_word_and_exit_code_do_not_depend_on_the_disk(
    code: int, name: str, disk: Disk, tmp_path: Path
) -> None:
    keep_room(tmp_path / ROOM)
    disk.is_full = True
    assert finish(Ending(code, LOST, details=("the end", "of what was said")), tmp_path) == code
    words = (tmp_path / name).read_text().splitlines()
    assert words == ([LOST] if code == 75 else [LOST, "the end", "of what was said"])
    assert not (tmp_path / ROOM).exists(), "it became the word"


def test_of_words_that_the_room_does_not_hold_the_reason_is_told(disk: Disk, tmp_path: Path) -> None:
    keep_room(tmp_path / ROOM)
    disk.is_full = True
    finish(Ending(1, LOST, details=("x" * ROOM_BYTES,)), tmp_path)
    assert (tmp_path / "failure").read_text() == f"{LOST}\n"


def test_where_nothing_can_be_written_over_a_name_tells_it_and_who_starts_pods_again_reads_it(
    disk: Disk, tmp_path: Path
) -> None:
    keep_room(tmp_path / "output" / ROOM)
    disk.is_full, disk.takes_writes_over = True, False
    assert finish(Ending(1, LOST), tmp_path / "output") == 1
    assert str((tmp_path / "output/failure").readlink()) == LOST
    disk.is_full = False
    assert tell_ending(1, tmp_path, tmp_path / "message") == LOST_EXIT_CODE
    assert (tmp_path / "message").read_text() == LOST


NO_TEXT = "rank 0 on algo-1: ValueError: bad row \ud83d in caf\udce9.jsonl"
"""Half a character of somebody's JSON, and a file's name in another encoding."""
WRITTEN_OUT = NO_TEXT.encode(errors="backslashreplace").decode()


@pytest.mark.parametrize("takes_writes_over", [True, False])
def test_a_reason_that_is_no_text_is_written_out(takes_writes_over: bool, disk: Disk, tmp_path: Path) -> None:
    keep_room(tmp_path / "output" / ROOM)
    disk.is_full, disk.takes_writes_over = True, takes_writes_over
    assert finish(Ending(1, NO_TEXT, details=(NO_TEXT,)), tmp_path / "output") == 1
    disk.is_full = False
    assert first_line(tmp_path / "output/failure") == WRITTEN_OUT
    assert tell_ending(1, tmp_path, tmp_path / "message") == 1
    assert (tmp_path / "message").read_text() == WRITTEN_OUT


def test_a_name_of_bytes_is_read_all_the_same(tmp_path: Path) -> None:
    os.symlink(b"caf\xe9 is full", os.fsencode(tmp_path / "failure"))  # noqa: PTH211  # of bytes
    assert first_line(tmp_path / "failure") == "caf\\udce9 is full"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "utf-8:surrogateescape"])
def test_what_is_no_text_is_said_all_the_same(encoding: str) -> None:
    program = f"from trainer.speech import say; say({NO_TEXT!a}); say('step=2 \\xe9')"
    paths = str(Path(rank.__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONPATH": f"{paths}:{Path(paths).parent}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=300)
    second = "step=2 \\xe9" if encoding == "ascii" else "step=2 \xe9"
    assert done.stdout.decode() == f"{WRITTEN_OUT}\n{second}\n", done.stderr


def test_what_is_no_text_is_said_to_somebodys_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    for log in (io.StringIO(), io.TextIOWrapper(io.BytesIO(), "utf-8")):
        monkeypatch.setattr(sys, "stdout", log)
        speech.say(NO_TEXT)
        log.seek(0)
        assert log.read() == f"{WRITTEN_OUT}\n"


def test_what_is_no_text_is_said_once_a_host() -> None:
    group: Any = SimpleNamespace()
    rank = Runtime(0, 1, 0, torch.device("cpu"), group, store=HashStore())
    assert [rank.is_first_to_say(NO_TEXT) for _ in range(2)] == [True, False]


def test_a_word_without_room_and_without_a_full_disk_is_told_all_the_same(tmp_path: Path) -> None:
    finish(Ending(1, LOST), tmp_path / "new")
    assert (tmp_path / "new/failure").read_text() == f"{LOST}\n"
    finish(Ending(0, ""), tmp_path / "new")


REPORTING = """
import os, sys
sys.path[:0] = {paths!r}
from test_word import full_from_now_on
full_from_now_on()
print("words of the rank " * 10, file=sys.stderr)
raise SystemExit(75)
"""


def full_from_now_on() -> None:
    """In a rank: no further byte can be had."""
    with contextlib.suppress(ImportError):
        disk = Disk(pytest.MonkeyPatch())
        disk.is_full = True


def test_a_rank_that_saved_says_so_on_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "saving.py").write_text(REPORTING.format(paths=[str(Path(__file__).parent)]))
    (tmp_path / "reports").mkdir()
    container = Path(rank.__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "trainer.host.rank", str(tmp_path / "reports"), "saving"],
        env=os.environ
        | {"RANK": "0", "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, container, container.parent)))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert rank.read_reports(tmp_path / "reports")[0].exit_code == 75


def test_of_a_report_that_is_too_long_the_end_of_what_the_rank_said_is_told(disk: Disk, tmp_path: Path) -> None:
    rank.write_report(tmp_path, rank.RankReport(0, 7))
    keep_room(tmp_path / "rank-0.room")
    disk.is_full = True
    tail = tuple("x" * 1000 for _ in range(60))
    rank._write_last_report(tmp_path, rank.RankReport(0, 7, 1, 1.0, "ValueError: no", tail))
    report = rank.read_reports(tmp_path)[0]
    assert (report.exit_code, report.error, report.stderr_tail) == (1, "ValueError: no", ["x" * 800])
    rank._write_last_report(tmp_path, rank.RankReport(0, 7, 1, 1.0, "y" * ROOM_BYTES))
    assert json.loads((tmp_path / "rank-0.json").read_text())["error"] == "ValueError: no", "whole or not at all"


class Log(io.StringIO):
    """A file whose disk is full for a while, or that refuses for another reason."""

    error = 0

    def write(self, text: str) -> int:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return super().write(text)


def test_a_log_whose_disk_is_full_costs_lines_and_the_next_one_begins_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Log()
    monkeypatch.setattr(sys, "stdout", log)
    speech.say("step=1")
    log.error = errno.ENOSPC
    speech.say("step=2")
    said = rank._TailedStream(log)
    said.write("an error\n")
    assert said.tail == ("an error",)
    log.error = 0
    speech.say("step=3")
    speech.say("step=4")
    assert log.getvalue() == "step=1\n\nstep=3\nstep=4\n"
    log.error = errno.EPIPE
    with pytest.raises(OSError, match="Broken pipe"):
        speech.say("step=5")
    with pytest.raises(OSError, match="Broken pipe"):
        said.write("more\n")


SAVING = """
import sys
from pathlib import Path
from trainer import heartbeat
from trainer.speech import say
output = Path(sys.argv[sys.argv.index("--output-dir") + 1])
(output / "room").write_text(str((output.parent / "host/.room").stat().st_size))
for step in range(1, 1000):  # more than the pipe to torchrun's stderr holds
    say(f"step={step} " + "x" * 200)
    print("a warning " * 20, file=sys.stderr)
heartbeat.beat(step)
raise SystemExit(75)
"""


def test_a_log_on_a_full_disk_changes_no_exit_code(tmp_path: Path) -> None:
    """As with `launch --backend local`, whose log lies beside the checkpoints."""
    (tmp_path / "saving.py").write_text(SAVING)
    job = {**resolved_job(1, 1), "parallelism": {"data_replicate": 1}}
    (tmp_path / "resolved_job.json").write_text(json.dumps(job))
    container = Path(rank.__file__).resolve().parents[2]
    paths = os.pathsep.join(map(str, (tmp_path, container, container.parent)))
    with Path("/dev/full").open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-m", "trainer.host.here", str(tmp_path)],
            env=os.environ | {"PYTHONPATH": paths, "TRAINYARD_RANK_MODULE": "saving", "PYTHONUNBUFFERED": ""},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
    assert done.returncode == 75
    assert (tmp_path / "host/resume_me").read_text() == "saved; resume me\n"
    assert (tmp_path / "output/room").read_text() == str(ROOM_BYTES)


def test_a_start_on_a_full_disk_is_one_line(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "output", tmp_path / "data", tmp_path / "work")
    job = ResolvedJob.model_validate(resolved_job(1, 1))
    host = HostRun(folders, Place("algo-1", ("algo-1",), "", ""), job, "127.0.0.1", {}, "nothing")
    folders.work.mkdir()
    (folders.work / "resolved_job.json").symlink_to("/dev/full")
    with pytest.raises(JobFailedError, match=rf"^{folders.work} on algo-1: its disk is full, .*: make room there$"):
        host.run(OneHost(RestartPolicy(job.spec.recovery)))
