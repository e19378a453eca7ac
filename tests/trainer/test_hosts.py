"""Hosts that never come, and hosts that are told to stop while they wait for others: nobody waits for ever."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from test_entrypoint import failure, opt_ml, running, wait_for
from trainer.host.hosts import LOST_HOST, Judge, ManyHosts, Stop, _connect
from trainer.host.recovery import Ending, Restart, RestartPolicy
from trainer_testing.distributed import free_port

from trainyard.errors import JobFailedError
from trainyard.spec.job import RecoverySpec

HOSTS = ("algo-1", "algo-2", "algo-3")
MISSED = Ending(1, "rank 0 on algo-1: rank 1 of 3 did not arrive within 600 s", is_consequence=True)
SAVED = Ending(75, "stopped before the first step; resume me", was_told_to_stop=True)
NOT_COME = "host algo-2 is gone: it has not come within {} s (recovery.arrival_seconds): did its machine start"
Join = Callable[[str], ManyHosts]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Job:
    """The judge of three hosts, and those of them that come."""

    def __init__(self, stack: ExitStack, arrival_seconds: float = 600, tell_seconds: float = 60) -> None:
        self._port = free_port()
        self._stack = stack
        policy = RestartPolicy(RecoverySpec(max_restarts=3))
        times = {"arrival_seconds": arrival_seconds, "tell_seconds": tell_seconds}
        self.judge = Judge(HOSTS, "127.0.0.1", self._port, policy, **times)
        stack.callback(self.judge.close)

    def come(self, host: str) -> ManyHosts:
        """Connected, and heard."""
        came = ManyHosts(host, "127.0.0.1", self._port, judge=None, patience_seconds=60)
        self._stack.enter_context(closing(came))
        until(lambda: bool(came.start))
        return came

    def reported(self, ending: Ending) -> None:
        """By the first host, which need not wait for an answer."""
        self.come("algo-1").conclude(ending, lambda: bool(self.judge._endings) or self.judge._is_over)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as kept:
        yield kept


def test_a_host_that_never_comes_is_lost_once_the_others_have_failed(stack: ExitStack) -> None:
    job = Job(stack, arrival_seconds=0.2)
    first, third = job.come("algo-1"), job.come("algo-3")
    until(lambda: job.judge._is_late)
    assert not job.judge._is_over and first.wants_stop() is None, "ranks that still wait for it may yet meet it"
    first._connection.send({"ending": {**MISSED.__dict__}})
    order = third.conclude(MISSED)
    assert isinstance(order, Ending) and order.reason.startswith(NOT_COME.format(0))
    assert LOST_HOST.match(order.reason), "who starts jobs again knows it by these words"
    assert first.conclude(MISSED) == order


def test_a_host_that_is_missed_is_named_long_before_it_is_given_up(
    stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def told(words: str) -> bool:
        said.extend(capsys.readouterr().out.splitlines())
        return any(words in line for line in said)

    job = Job(stack, tell_seconds=0.3)
    job.come("algo-1")
    until(lambda: told("2 of 3 not here after 0 s: algo-2, algo-3; does its machine run"))
    job.come("algo-3")
    until(lambda: told("1 of 3 not here after 1 s: algo-2; does"))
    assert not job.judge._is_over and not job.judge._endings, "it may yet come"
    job.come("algo-2")
    until(lambda: not any("tell_of_missing" in thread.name for thread in threading.enumerate()))


def test_a_first_host_that_is_missed_is_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with pytest.raises(JobFailedError):
        _connect("127.0.0.1", port, 0.5, tell_seconds=0.1)
    said = capsys.readouterr().out
    assert f"the first host (127.0.0.1 port {port}) does not answer after 0 s: Connection refused; does" in said


def test_who_fails_early_waits_for_the_hosts_that_may_yet_come(stack: ExitStack) -> None:
    job = Job(stack)
    first = job.come("algo-1")
    job.come("algo-3").conclude(MISSED, lambda: bool(job.judge._endings))
    first._connection.send({"ending": {**MISSED.__dict__}})
    until(lambda: len(job.judge._endings) == 2)
    assert not job.judge._is_over
    second = job.come("algo-2")
    until(lambda: second.wants_stop() == "failed")  # it is told what it came too late to hear
    assert isinstance(second.conclude(MISSED), Restart)
    assert isinstance(first.conclude(MISSED), Restart)


@pytest.mark.parametrize(("ending", "stop"), [(SAVED, "told"), (MISSED, "failed")])
def test_a_host_that_comes_after_a_stop_is_told_of_it(ending: Ending, stop: Stop, stack: ExitStack) -> None:
    job = Job(stack)
    job.come("algo-3")
    job.reported(ending)
    second = job.come("algo-2")
    until(lambda: second.wants_stop() == stop)


def test_who_is_told_to_stop_waits_for_no_host_that_has_not_come(stack: ExitStack) -> None:
    job = Job(stack)
    first, third = job.come("algo-1"), job.come("algo-3")
    first._connection.send({"ending": {**MISSED.__dict__}})
    until(lambda: bool(job.judge._endings))
    assert not job.judge._is_over, "the third one may be saving"
    told = third.conclude(SAVED)
    assert told == first.conclude(SAVED) and isinstance(told, Ending) and told.is_failure


def test_an_ending_is_ones_own_once_time_is_up(stack: ExitStack) -> None:
    job = Job(stack)
    first, _ = job.come("algo-1"), job.come("algo-2")
    looks = iter([False, False, True])
    assert first.conclude(SAVED, lambda: next(looks)) == SAVED
    assert not job.judge._is_over and next(looks, None) is None


def test_a_host_alone_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """Its torchrun waits for the other one's, and its entrypoint would wait for the other host."""
    addresses = json.dumps({"algo-1": "127.0.0.2", "algo-2": "127.0.0.3"})
    tree = opt_ml(tmp_path / "ml", hosts=("algo-1", "algo-2"), processes_per_host=1)
    flags = {"TRAINYARD_HOST_ADDRESSES": addresses, "TRAINYARD_STOP_GRACE_SECONDS": "1"}
    with running(tree, {}, **flags) as process:
        wait_for(tree / "trainyard/ranks", process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 75, output
    assert (tree / "output/resume_me").exists() and not (tree / "output/failure").exists()


@pytest.mark.slow
def test_who_is_told_to_stop_ends_though_another_host_never_says_how_its_ranks_ended(tmp_path: Path) -> None:
    addresses, port = json.dumps({"algo-1": "127.0.0.1", "algo-2": "127.0.0.3"}), free_port()
    tree = opt_ml(tmp_path / "ml", hosts=("algo-1", "algo-2"), processes_per_host=1)
    flags = {"TRAINYARD_HOST_ADDRESSES": addresses, "TRAINYARD_RENDEZVOUS_PORT": str(port)}
    with running(tree, {}, **flags, TRAINYARD_STOP_GRACE_SECONDS="1") as process:
        wait_for(tree / "trainyard/ranks", process)
        other = ManyHosts("algo-2", "127.0.0.1", port + 1, judge=None, patience_seconds=60)
        with closing(other):
            until(lambda: bool(other.start))
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=400)
    assert process.returncode == 75, output
    assert (tree / "output/resume_me").exists() and not (tree / "output/failure").exists()


def test_a_host_whose_start_fails_alone_names_the_one_that_has_not_come(tmp_path: Path) -> None:
    addresses = json.dumps({"algo-1": "127.0.0.2", "algo-2": "127.0.0.3"})
    tree = opt_ml(tmp_path / "ml", hosts=("algo-1", "algo-2"), processes_per_host=1)
    path = tree / "input/data/job/resolved_job.json"
    job = json.loads(path.read_text())
    job["spec"]["recovery"]["arrival_seconds"] = 0.1
    job["spec"]["checkpoint"]["destination"] = str(tmp_path / "checkpoints")
    path.write_text(json.dumps(job))
    torchrun = tmp_path / "short/torch/distributed"
    # As torchrun's own wait ends, 15 minutes later.
    torchrun.mkdir(parents=True)
    (tmp_path / "short/torch/__init__.py").touch()
    (torchrun / "__init__.py").touch()
    (torchrun / "run.py").write_text(
        "def main(arguments):\n"
        "    assert '--rdzv-conf' in arguments and 'timeout=900' in arguments, arguments\n"
        "    import sys\n"
        "    sys.exit('torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2.')\n"
    )
    flags = {"TRAINYARD_HOST_ADDRESSES": addresses, "PYTHONPATH": str(tmp_path / "short")}
    with running(tree, {}, **flags) as process:
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 1, output
    assert failure(tree)[0].startswith(NOT_COME.format(0)), output
