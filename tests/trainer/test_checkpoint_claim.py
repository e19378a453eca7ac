"""Two jobs at one destination: the second one is refused, and a start of the same job is not."""

import errno
import fcntl
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from trainer.checkpoint.checkpointer import _make_folder
from trainer.checkpoint.claim import CLAIM_FILE, Claim, Claimant, claimant_of
from trainer_testing.distributed import finish
from trainer_testing.text_job import read_until, run_trainer, start_faulty_trainer, start_trainer, write_job

from trainyard.errors import InputError, JobFailedError


def named(job: str) -> Claimant:
    return claimant_of({"TRAINYARD_JOB_ID": job})


def hold(folder: Path, environment: dict[str, str], output: Path | None, ready: Any) -> None:
    """A process that saves to `folder` until it is killed."""
    kept = Claim(folder, claimant=claimant_of(environment, output), report=print)
    if os.fork() == 0:  # what it has forked, a reader of data say, keeps nothing
        signal.pause()
    ready.set()
    signal.pause()
    kept.close()


@contextmanager
def holder(folder: Path, environment: dict[str, str], output: Path | None = None) -> Iterator[multiprocessing.Process]:
    ready = multiprocessing.get_context("fork").Event()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(folder, environment, output, ready))
    process.start()
    assert ready.wait(60)
    forked = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    try:
        yield process  # type: ignore[misc]
    finally:
        process.kill()
        process.join()
        for pid in forked:
            os.kill(int(pid), signal.SIGKILL)


def test_another_job_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    said: list[str] = []
    with holder(tmp_path / "shared", {"TRAINYARD_JOB_ID": "acme-a-1"}) as first:
        with pytest.raises(InputError, match=r"acme-a-1 on .*, process \d+ saves there") as refused:
            Claim(tmp_path / "shared", claimant=named("acme-a-12"), report=said.append, other_seconds=0.1)
        assert f"process {first.pid} " in str(refused.value)
        first.kill()
        first.join()
        Claim(tmp_path / "shared", claimant=named("acme-a-12"), report=said.append, other_seconds=60).close()
    assert not said and (tmp_path / "shared" / CLAIM_FILE).read_text().startswith("acme-a-12 on ")


def test_a_start_of_the_same_job_waits_and_is_never_lost(tmp_path: Path) -> None:
    said: list[str] = []
    with holder(tmp_path, {"TRAINYARD_JOB_ID": "acme-a-1"}):
        Claim(tmp_path, claimant=named("acme-a-1"), report=said.append, own_seconds=0.3, other_seconds=0).close()
    line = said[-1]
    assert "acme-a-1 on " in line and line.endswith("has not let go of it; this start goes on")


def test_a_copy_of_the_job_is_no_start_of_it(tmp_path: Path) -> None:
    """With a stated destination both have one place and one name; the second went on beside the first."""
    environment, names = {"TRAINYARD_JOB_ID": "acme-a-1"}, ("a", "copy", "\udcff\nlong" + 1000 * "/x")
    outputs = [tmp_path / name for name in names]
    for first in outputs:
        with holder(tmp_path / "saved", environment, first):
            for output in outputs:
                claimant = claimant_of(environment, output)
                if output == first:  # whose machine was lost, say
                    Claim(tmp_path / "saved", claimant=claimant, report=print, own_seconds=0.2).close()
                    continue
                with pytest.raises(JobFailedError, match=r"with its output in \S+ saves there, and two jobs would"):
                    Claim(tmp_path / "saved", claimant=claimant, report=print, own_seconds=0.2)
            with pytest.raises(InputError, match=r"process \d+ saves there"):  # where another job's is is no news
                Claim(tmp_path / "saved", claimant=named("acme-b-2"), report=print, other_seconds=0.2)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert claimant_of(environment, tmp_path / "link") == claimant_of(environment, tmp_path / "a")
    with holder(tmp_path / "saved", environment):  # an earlier trainer's start
        Claim(tmp_path / "saved", claimant=claimant_of(environment, outputs[0]), report=print, own_seconds=0.2).close()


@pytest.mark.parametrize("mask", [0o022, 0o077])
@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o2775, 0o664), (0o755, 0o644), (0o700, 0o600)])
def test_whoever_may_save_there_may_ask_who_does(tmp_path: Path, mask: int, folder_mode: int, file_mode: int) -> None:
    tmp_path.chmod(folder_mode)
    before = os.umask(mask)
    try:
        Claim(tmp_path, claimant=named("acme-a-1"), report=print).close()
    finally:
        os.umask(before)
    assert (tmp_path / CLAIM_FILE).stat().st_mode & 0o777 == file_mode


def test_in_a_folder_of_a_group_that_is_not_this_users_others_may_ask_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchown", refused)
    for mode, expected in ((0o777, 0o666), (0o2770, 0o666), (0o755, 0o644), (0o700, 0o600)):
        tmp_path.chmod(mode)
        Claim(tmp_path, claimant=named("acme-a-1"), report=print).close()
        assert (tmp_path / CLAIM_FILE).stat().st_mode & 0o777 == expected


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_a_link_there_leaves_what_it_leads_to_alone(tmp_path: Path, link: Any) -> None:
    folder, private = tmp_path / "shared", tmp_path / "private"
    folder.mkdir()
    folder.chmod(0o777)
    private.write_text("mine")
    private.chmod(0o600)
    link(folder / CLAIM_FILE, private)
    Claim(folder, claimant=named("acme-a-1"), report=print).close()
    assert private.read_text() == "mine" and private.stat().st_mode & 0o777 == 0o600


def test_a_pipe_there_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / CLAIM_FILE)
    monkeypatch.setattr(os, "open", open_as_another(os.open))
    (tmp_path / CLAIM_FILE).chmod(0o444)
    Claim(tmp_path, claimant=named("acme-a-1"), report=print).close()
    assert (tmp_path / CLAIM_FILE).read_text().startswith("acme-a-1 on ")


def open_as_another(opened: Any) -> Any:
    """As a user who owns nothing there: root is refused nothing."""

    def open_as(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_RDWR and path.exists() and not path.stat().st_mode & 0o222:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, flags, *rest)  # type: ignore[no-any-return]

    return open_as


def test_of_two_who_replace_a_dead_users_file_one_has_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find that nobody has it; the other one is through when this one removes it."""
    (tmp_path / CLAIM_FILE).write_text("acme-a-1 on a machine, process 1\n")
    (tmp_path / CLAIM_FILE).chmod(0o444)
    monkeypatch.setattr(os, "open", open_as_another(os.open))
    others: list[Any] = []
    stack = ExitStack()

    def after_another(remove: Any) -> Any:
        def late(path: Path, *rest: Any) -> Any:
            if not others and path.name == CLAIM_FILE:
                others.append(None)  # nor does the other one wait for a third
                others.append(stack.enter_context(holder(tmp_path, {"TRAINYARD_JOB_ID": "acme-b-2"})))
            return remove(path, *rest)

        return late

    for name in ("unlink", "rename"):
        monkeypatch.setattr(Path, name, after_another(getattr(Path, name)))
    with stack, pytest.raises(InputError, match=r"acme-b-2 on .* saves there"):
        Claim(tmp_path, claimant=named("acme-c-3"), report=print, other_seconds=0.3)
    assert len(others) == 2 and [path.name for path in tmp_path.iterdir()] == [CLAIM_FILE]


def test_a_file_that_only_another_user_may_write_keeps_out_while_that_lives_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holder(tmp_path, {"TRAINYARD_JOB_ID": "acme-a-1"}) as first:
        (tmp_path / CLAIM_FILE).chmod(0o444)
        monkeypatch.setattr(os, "open", open_as_another(os.open))
        with pytest.raises(InputError, match=r"acme-a-1 on .* saves there"):
            Claim(tmp_path, claimant=named("acme-b-2"), report=print, other_seconds=0.3)
        first.kill()
        first.join()
        mine = Claim(tmp_path, claimant=named("acme-b-2"), report=print, other_seconds=60)
    # Of another process: here a lock is no obstacle, and to look into the file would give it up.
    process = multiprocessing.get_context("fork").Process(target=expect_refusal, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    mine.close()
    # A folder whose files only their owners may remove: who is gone keeps nobody out there either.
    (tmp_path / CLAIM_FILE).chmod(0o444)
    for name in ("unlink", "rename"):
        monkeypatch.setattr(Path, name, lambda path, *_: os.open(path, os.O_RDWR))
    Claim(tmp_path, claimant=named("acme-c-3"), report=print, other_seconds=0).close()


def expect_refusal(folder: Path) -> None:
    """Where acme-b-2 saves."""
    with pytest.raises(InputError, match="acme-b-2 on"):
        Claim(folder, claimant=named("acme-d-4"), report=print, other_seconds=0)


BY_HAND = ({}, {"SLURM_JOB_ID": "12"}, {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "0"})


@pytest.mark.parametrize("environment", BY_HAND)
def test_a_start_by_hand_waits_as_for_its_own_and_fails_so_that_another_may_follow(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """Who holds the folder may be its own start before, on a machine that was lost: no wrong input."""
    said: list[str] = []
    with holder(tmp_path, environment) as first:
        with pytest.raises(JobFailedError, match=rf"process {first.pid} saves there"):
            Claim(tmp_path, claimant=claimant_of(environment), report=said.append, own_seconds=0.5, other_seconds=0)
        (line,) = said
        assert line.endswith("saves there; this start waits up to 0.5 s for its end")
        first.kill()
        first.join()
        Claim(tmp_path, claimant=claimant_of(environment), report=said.append, own_seconds=60).close()


def test_a_job_that_slurm_has_requeued_goes_on_as_one_with_an_id_does(tmp_path: Path) -> None:
    said: list[str] = []
    with holder(tmp_path, {"SLURM_JOB_ID": "12"}):
        again = {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}
        Claim(tmp_path, claimant=claimant_of(again), report=said.append, own_seconds=0.3, other_seconds=0).close()
        assert said[-1].endswith("has not let go of it; this start goes on")
        other = again | {"SLURM_JOB_ID": "1"}
        with pytest.raises(InputError, match="Slurm's job 12 on"):
            Claim(tmp_path, claimant=claimant_of(other), report=said.append, other_seconds=0.1)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refused)
    Claim(tmp_path, claimant=named("a"), report=print).close()
    (tmp_path / "file").touch()
    Claim(tmp_path / "file/below", claimant=named("a"), report=print).close()


def test_a_second_trainer_at_the_same_place_ends_with_a_line_and_the_first_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_JOB_ID", "acme-a-1")
    job = write_job(tmp_path, "single", steps=4)
    there = ("--set", f"checkpoint.destination={tmp_path / 'shared'}")
    wait = [{"rank": 0, "kind": "await_stop", "step": 3}]
    (first,) = start_faulty_trainer(1, job, tmp_path / "first", wait, *there)
    read_until(first, "step=2 ")
    monkeypatch.setenv("TRAINYARD_JOB_ID", "acme-b-2")
    output, _ = run_trainer(1, job, tmp_path / "second", *there, expected_code=2)
    (line,) = [line for line in output.splitlines() if "saves there" in line]
    assert (
        line.startswith(f"trainyard: checkpoint.destination {tmp_path / 'shared'}: acme-a-1 on ") and "rank" not in line
    )
    assert not [*(tmp_path / "second").rglob("token_cache")], "before the long part: its data were not read"
    first.send_signal(signal.SIGTERM)
    assert [code for code, _ in finish([first], timeout_seconds=600)] == [75]
    assert [code for code, _ in finish(start_trainer(1, job, tmp_path / "second", *there), timeout_seconds=600)] == [0]


@pytest.mark.slow
def test_a_second_job_of_several_ranks_ends_with_one_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_JOB_ID", "acme-b-2")
    job = write_job(tmp_path, "ddp", steps=4)
    with holder(tmp_path / "shared", {"TRAINYARD_JOB_ID": "acme-a-1"}):
        ranks = start_trainer(2, job, tmp_path / "out", "--set", f"checkpoint.destination={tmp_path / 'shared'}")
        outputs = finish(ranks, timeout_seconds=600)
    assert [code for code, _ in outputs] == [2, 2], outputs
    said = "".join(text for _, text in outputs)
    assert said.count("saves there") == 1 and "Traceback" not in said


def test_a_place_that_may_not_be_searched_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As below a folder of another user's, of which Path.exists raises too; root, as tests may run, may search all."""

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("mkdir", "stat"):
        monkeypatch.setattr(Path, name, refused)
    with pytest.raises(InputError, match=r"can't be made: Permission denied; name another folder"):
        _make_folder(tmp_path / "there")
