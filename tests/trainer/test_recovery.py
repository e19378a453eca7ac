"""Ranks that die, raise or freeze: found, stopped, started again from the last checkpoint, and never a wrong loss."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from trainer.loop import Outcome, train
from trainer.session import Session
from trainer_testing.distributed import finish
from trainer_testing.host import entrypoints, recoveries, write_trees
from trainer_testing.text_job import bits, rows_of, run_trainer, start_faulty_trainer, write_job

STEPS = 12
SETTINGS = ["checkpoint.every_steps=3", "recovery.hang_seconds=10", "recovery.backoff_seconds=0.1"]
STARTS = [pytest.param("ddp", id="forks"), pytest.param("", id="real", marks=pytest.mark.full)]
"""How processes start; the test of an error that comes back has real starts always."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The job's file, and what each of its steps gives when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = write_job(folder, "ddp", steps=STEPS)
    _, rows = run_trainer(2, job, folder / "out", "--set", "checkpoint.every_steps=3")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return job, bits(rows)


def run(
    root: Path,
    job: Path,
    faults: Sequence[dict[str, Any]],
    *settings: str,
    num_hosts: int = 1,
    forked: str = "",
    peer_copy: bool = False,
) -> tuple[list[int], str, list[Path]]:
    """Exit codes of the hosts, what they said, and their trees."""
    overrides = [*SETTINGS, f"checkpoint.destination={root}/checkpoints", *settings]
    trees = write_trees(root, job, num_hosts=num_hosts, overrides=overrides, peer_copy=peer_copy)
    with entrypoints(trees, faults, forked=forked) as processes:
        ended = finish(processes, timeout_seconds=600)
    return [code for code, _ in ended], "\n".join(output for _, output in ended), trees


@pytest.mark.slow
@pytest.mark.parametrize("forked", STARTS)
def test_a_frozen_and_a_raising_rank_cost_a_few_steps_and_no_bit(
    undisturbed: tuple[Path, list[Any]], tmp_path: Path, forked: str
) -> None:
    job, expected = undisturbed
    faults = [{"rank": 1, "step": 5, "kind": "stop"}, {"rank": 0, "step": 12, "kind": "raise"}]
    codes, output, (tree,) = run(tmp_path, job, faults, forked=forked)
    assert codes == [0], output[-6000:]
    assert bits(rows_of(tree / "output/data")) == expected
    rows = recoveries(tree)
    assert [(row["restart"], row["last_step"]) for row in rows] == [(1, 4), (2, 11)]
    assert all(row["seconds_to_next_step"] > 0 for row in rows)
    assert "rank 1 on algo-1 hangs" in rows[0]["reason"] and "is stopped" in rows[0]["reason"]
    assert rows[1]["reason"] == "rank 0 on algo-1: ValueError: injected"
    # Where who asks for the job's state finds them; of the last one the row may come after the last save.
    beside = [json.loads(line) for line in (tmp_path / "checkpoints/recovery.jsonl").read_text().splitlines()]
    assert beside and beside == rows[: len(beside)]
    # From the newest checkpoint, not from the beginning.
    resumed = re.findall(r"resumed step=(\d+)", output)
    # Step 9's save may have been on its way when the rank raised.
    assert resumed[-1] in ("6", "9"), output[-6000:]
    # And step 3's when the other rank froze two fast steps later: then the job began anew.
    assert resumed[:-1] in ([], ["3"]), output[-6000:]
    assert "next_batch" in (tree / "output/data/stacks/rank-1.txt").read_text()
    assert "most recent call first" in (tree / "output/data/stacks/rank-0.txt").read_text()
    assert not (tree / "output/failure").exists()


@pytest.mark.parametrize("forked", STARTS)
@pytest.mark.slow
def test_two_hosts_restart_together(undisturbed: tuple[Path, list[Any]], tmp_path: Path, forked: str) -> None:
    job, expected = undisturbed
    faults = [{"rank": 1, "step": 5, "kind": "kill"}, {"rank": 1, "step": 8, "kind": "stop"}]
    codes, output, trees = run(tmp_path, job, faults, num_hosts=2, forked=forked)
    assert codes == [0, 0], output[-6000:]
    assert bits(rows_of(trees[0] / "output/data")) == expected
    rows = recoveries(trees[0])
    # A frozen rank runs on for a moment to give its stacks; the other host's rank is not held meanwhile.
    assert rows[0]["last_step"] == 4 and 7 <= rows[1]["last_step"] <= STEPS and len(rows) == 2
    assert "rank 1 on algo-2 was killed by SIGKILL" in rows[0]["reason"]
    assert "rank 1 on algo-2 hangs" in rows[1]["reason"] and "is stopped" in rows[1]["reason"]
    waits = r"; rank 0 waits in all_reduce of \S+ \S+, number \d+ of ranks 0, 1; no answer from rank 1$"
    # Where others keep the disk busy a save may hold rank 0, which waits in no collective then: nothing is said of it.
    assert "rank 0" not in rows[1]["reason"] or re.search(waits, rows[1]["reason"]), rows[1]["reason"]
    assert recoveries(trees[1]) == []


@pytest.mark.full
@pytest.mark.parametrize("forked", STARTS)
def test_a_rank_that_freezes_while_it_restores_costs_seconds_and_not_a_starts_hour(
    undisturbed: tuple[Path, list[Any]], tmp_path: Path, forked: str
) -> None:
    job, expected = undisturbed
    faults = [
        {"rank": 0, "step": 8, "kind": "kill"},
        {"rank": 1, "step": 0, "kind": "stop", "moment": "restore"},
    ]
    settings = ("recovery.hang_seconds=5", "checkpoint.asynchronous=false")  # there is a checkpoint to restore
    codes, output, (tree,) = run(tmp_path, job, faults, *settings, forked=forked)
    assert codes == [0], output[-6000:]
    assert bits(rows_of(tree / "output/data")) == expected
    killed, frozen = recoveries(tree)
    # On a busy machine the other rank's lost connection may be told of before the death that broke it is seen.
    assert "was killed by SIGKILL" in killed["reason"] or "it lost another rank" in killed["reason"]
    assert frozen["last_step"] == 0 and "rank 1 on algo-1 hangs" in frozen["reason"]
    # It goes on for a moment while its stacks are taken, and on a busy machine its end may come before theirs.
    assert "is stopped" in frozen["reason"]
    assert "most recent call first" in (tree / "output/data/stacks/rank-1.txt").read_text()


@pytest.mark.full
def test_two_hosts_with_checkpoints_on_their_own_and_each_others_disks_restart_from_these(
    undisturbed: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    job, expected = undisturbed
    # The stop ends it before it is done, when the copies would go.
    faults = [{"rank": 1, "step": 8, "kind": "kill"}, {"rank": 0, "step": 11, "kind": "terminate"}]
    settings = ("checkpoint.local_directory=near", "checkpoint.asynchronous=false")  # each host's, by its own folder
    codes, output, trees = run(tmp_path, job, faults, *settings, num_hosts=2, forked="ddp", peer_copy=True)
    assert codes == [75, 75], output[-6000:]
    rows = bits(rows_of(trees[0] / "output/data"))
    assert 8 < len(rows) < STEPS and rows == expected[: len(rows)]
    assert re.findall(r"resumed step=(\d+) uri=(\S+)/near/", output) == [("6", str(trees[0]))], output[-6000:]
    copies = [{path.name for path in (tree / "near").rglob("*.distcp")} for tree in trees]
    assert copies[0] == copies[1] and len(copies[0]) >= 2, "each host has the other one's part too"


@pytest.mark.slow
def test_an_error_that_comes_back_at_the_same_step_ends_the_job_with_a_diagnosis(tmp_path: Path) -> None:
    job = write_job(tmp_path, "single", steps=STEPS)
    codes, output, (tree,) = run(tmp_path, job, [{"rank": 0, "step": 4, "kind": "raise", "always": True}])
    assert codes == [1], output[-6000:]
    assert (tree / "output/failure").read_text().splitlines()[0] == (
        "rank 0 on algo-1: ValueError: injected; twice in a row after step 3 with the same error,"
        " so another restart can't help: mend it, then `trainyard resume`; other settings of training need a launch"
    )
    assert output.count("recovery restart=1 last_step=3") == 1


def test_another_number_of_ranks_goes_on_with_the_same_batch(tmp_path: Path) -> None:
    job = write_job(tmp_path, "ddp", steps=STEPS)
    # Dropout draws anew on another layout; all else must not change.
    still = ("--set", "model.config.attention_dropout=0.0")
    alone = (*still, "--set", "parallelism=auto")
    _, whole = run_trainer(1, job, tmp_path / "whole", *alone)
    ranks = start_faulty_trainer(2, job, tmp_path / "out", [{"rank": 1, "step": 6, "kind": "terminate"}], *still)
    assert [code for code, _ in finish(ranks, timeout_seconds=600)] == [75, 75]
    num_before = len(rows_of(tmp_path / "out"))
    _, rows = run_trainer(1, job, tmp_path / "out", *alone)
    assert 5 <= num_before < STEPS and [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in whole]
    worst = max(abs(ours["loss"] / theirs["loss"] - 1) for ours, theirs in zip(rows, whole, strict=True))
    assert worst < 1e-5


def test_a_stop_is_saved_before_a_validation_is_done(tmp_path: Path) -> None:
    job = write_job(tmp_path, "single", steps=STEPS, validation_every_steps=5)
    faults = [{"rank": 0, "step": 5, "kind": "terminate"}]
    settings = ["checkpoint.every_steps=100", "checkpoint.keep_last=1"]
    settings.append("checkpoint.keep_best={metric: validation_loss, mode: max}")  # the first: losses fall
    more = [word for setting in settings for word in ("--set", setting)]
    ((code, output),) = finish(start_faulty_trainer(1, job, tmp_path / "out", faults, *more), timeout_seconds=600)
    assert code == 75 and "validation step=5 broken off: told to stop" in output, output[-6000:]
    assert "checkpoint step=5 committed" in output
    _, rows = run_trainer(1, job, tmp_path / "out", *more)
    validated = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    assert len(rows) == STEPS and sorted(validated) == [5, 10, STEPS], "the resume began with it"
    assert validated[5] > validated[10] > validated[STEPS]
    kept = {path.name for path in (tmp_path / "out/checkpoints").iterdir()}
    assert kept == {"step-00000005", f"step-{STEPS:08d}"}, "the best one is what it was measured to be later"


def test_sigusr1_to_one_rank_saves_that_step_and_training_goes_on(tmp_path: Path) -> None:
    job = write_job(tmp_path, "ddp", steps=STEPS)
    asked = [{"rank": 1, "step": 5, "kind": "save"}]
    ranks = start_faulty_trainer(2, job, tmp_path / "out", asked, "--set", "checkpoint.every_steps=100")
    ended = finish(ranks, timeout_seconds=600)
    assert [code for code, _ in ended] == [0, 0], ended[0][1][-6000:]
    # The step in which it is heard, or the next, where the message of that step was on its way.
    committed = [int(step) for step in re.findall(r"checkpoint step=(\d+) committed", ended[0][1])]
    assert committed in ([5, STEPS], [6, STEPS]) and len(rows_of(tmp_path / "out")) == STEPS


def test_a_validation_that_is_made_up_for_is_broken_off_by_a_stop_too() -> None:
    session = Session.__new__(Session)
    stops: list[Callable[[], bool]] = []

    def run(strategy: Any, sets: Any, step: int, must_exit: Callable[[], bool]) -> dict[str, Any]:
        stops.append(must_exit)
        return {}  # and the debt stays

    session._validation = Mock(was_broken_off=True, run=run)
    session.clock, session.strategy, session.stop_flag = MagicMock(), Mock(), Mock(must_exit=lambda: True)
    session._course, session.step, session._checkpointer = Mock(num_steps=12), 5, Mock()
    assert train(session) is Outcome.INTERRUPTED and stops[0]()
    session._checkpointer.complete.assert_not_called()
    assert session.step == 5, "what is saved already"
