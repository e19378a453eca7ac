"""A job that loses a host goes on with the other, and later with both again: the same samples, the same losses."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from trainer.course import Course
from trainer.entrypoint import read_job, read_place
from trainer.host.hosts import Judge, ManyHosts
from trainer.host.recovery import Ending, RestartPolicy
from trainer_testing.distributed import finish, free_port
from trainer_testing.host import entrypoints, write_trees
from trainer_testing.text_job import rows_of, start_faulty_trainer, write_job

from trainyard.errors import InputError
from trainyard.functions import job_resumer
from trainyard.planner import resolve
from trainyard.planner.elastic import on_hosts
from trainyard.spec.job import RecoverySpec, load_job

STEPS = 12
BATCH = 8
TOLERANCE = 1e-5
"""docs/checkpoints.md: losses of another layout in fp32, relative."""
SETTINGS = [
    "checkpoint.every_steps=2",
    "compute.instance_count=2",
    "recovery.backoff_seconds=0.1",
    # Dropout draws anew on another layout; all else must not change.
    "model.config.attention_dropout=0.0",
]
Samples = dict[int, list[str]]
HOWS = [pytest.param("ranks", id="ranks"), pytest.param("hosts", id="hosts", marks=pytest.mark.full)]
"""One rank a host, as forks, or under the container's entrypoint."""


def elastic_job(folder: Path, batch: str, *more: str) -> tuple[Path, list[str]]:
    """The job's file, and the settings beside it: two hosts of one rank each, or one."""
    limits = f"recovery.elastic={{min_instances: 1, max_instances: 2, batch: {batch}}}"
    return write_job(folder, "ddp", steps=STEPS), [*SETTINGS, limits, *more]


def give_hosts(trees: Sequence[Path], hosts: Sequence[str]) -> None:
    """What SageMaker tells of the machines, in the trees of the job that was launched on two."""
    for tree, host in zip(trees, hosts, strict=True):
        resources = {"current_host": host, "hosts": list(hosts), "network_interface_name": "lo"}
        (tree / "input/config/resourceconfig.json").write_text(json.dumps(resources))


class Machines:
    """Up to two hosts, on which the job is started again and again."""

    def __init__(self, folder: Path, how: str, batch: str) -> None:
        self._job, self._settings = elastic_job(folder, batch, f"checkpoint.destination={folder}/checkpoints")
        self._has_hosts = how == "hosts"
        self._output = folder / "out"
        self._faults = folder / "out-faults"
        if self._has_hosts:
            self._trees = write_trees(folder / "hosts", self._job, num_hosts=2, overrides=self._settings)
            self._output, self._faults = self._trees[0] / "output/data", folder / "hosts/faults"

    def run(self, num_hosts: int, *faults: dict[str, Any]) -> tuple[list[int], str, Samples]:
        """Exit codes of hosts or ranks, what they said, and what each step was made of."""
        for path in self._faults.glob("*"):
            path.unlink()
        ended = self._on_hosts(num_hosts, faults) if self._has_hosts else self._as_ranks(num_hosts, faults)
        found: Samples = {}
        for path in self._faults.glob("samples-*.jsonl"):
            last = {row["step"]: row["ids"] for row in map(json.loads, path.read_text().splitlines())}
            found = {step: sorted([*found.get(step, []), *last.get(step, [])]) for step in {*found, *last}}
        return [code for code, _ in ended], "\n".join(output for _, output in ended), found

    def _as_ranks(self, num_hosts: int, faults: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
        settings = [*self._settings, f"compute.instance_count={num_hosts}"]
        arguments = [word for setting in settings for word in ("--set", setting)]
        ranks = start_faulty_trainer(num_hosts, self._job, self._output, faults, *arguments)
        return finish(ranks, timeout_seconds=600)

    def _on_hosts(self, num_hosts: int, faults: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
        # The same trees with one host: within the limits its entrypoint lays the job out anew.
        trees = self._trees[:num_hosts]
        give_hosts(trees, [tree.name for tree in trees])
        with entrypoints(trees, faults, forked="ddp") as processes:
            if any(fault["kind"] == "lose_host" for fault in faults):
                until = time.monotonic() + 300
                while not (self._faults / "done-0").exists() and processes[-1].poll() is None:
                    assert time.monotonic() < until
                    time.sleep(0.02)
                processes[-1].kill()
            return finish(processes, timeout_seconds=600)

    def lose_a_host(self) -> Samples:
        """Both hosts, of which the second is lost in step 6; what the first one says is what a resumer looks for."""
        codes, output, samples = self.run(2, {"rank": 1, "step": 6, "kind": "lose_host" if self._has_hosts else "kill"})
        assert codes == [1, -9], output[-6000:]
        if self._has_hosts:
            reason = (self._trees[0] / "output/failure").read_text().splitlines()[0]
            told = {"TrainingJobStatus": "Failed", "FailureReason": f"AlgorithmError: {reason}"}
            assert job_resumer.cause(told) == "a host was lost", reason
        return samples

    @property
    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl."""
        return rows_of(self._output)


def undisturbed(folder: Path, batch: str) -> tuple[list[dict[str, Any]], Samples]:
    machines = Machines(folder, "ranks", batch)
    codes, output, samples = machines.run(2)
    assert codes == [0, 0], output[-6000:]
    return machines.rows, samples


@pytest.mark.parametrize("how", HOWS)
def test_with_the_batch_kept_a_lost_host_costs_time_and_no_sample(tmp_path: Path, how: str) -> None:
    whole, expected = undisturbed(tmp_path / "whole", "keep")
    machines = Machines(tmp_path / "job", how, "keep")
    first = machines.lose_a_host()
    codes, output, alone = machines.run(1, {"rank": 0, "step": 9, "kind": "terminate"})
    assert codes == [75] and "resumed step=" in output, output[-6000:]
    codes, output, last = machines.run(2)
    assert codes == [0, 0] and "resumed step=9" in output, output[-6000:]

    rows = machines.rows
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "none twice, none left out"
    assert {**first, **alone, **last} == expected, "every step of the same samples"
    assert sum(map(len, expected.values())) == len({one for ids in expected.values() for one in ids}) == STEPS * BATCH
    for ours, theirs in zip(rows, whole, strict=True):
        assert (ours["tokens"], ours["learning_rate"]) == (theirs["tokens"], theirs["learning_rate"])
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
    assert {row["attempt"] for row in rows} == {1, 2, 3} and 8 in alone and 8 not in last


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_an_adapted_batch_reads_the_same_samples_in_more_steps_at_its_rate(tmp_path: Path, how: str) -> None:
    whole, expected = undisturbed(tmp_path / "whole", "adapt")
    machines = Machines(tmp_path / "job", how, "adapt")
    first = machines.lose_a_host()
    codes, output, alone = machines.run(1)
    assert codes == [0], output[-6000:]

    rows = machines.rows
    before = [row for row in rows if row["attempt"] == 1]
    resumed = len(before)
    assert 2 <= resumed <= 5 and len(rows) == resumed + 2 * (STEPS - resumed)
    assert [row["loss"] for row in before] == [row["loss"] for row in whole[:resumed]], "bitwise, while it is the same"
    for step in range(resumed + 1, STEPS + 1):
        half = resumed + 2 * (step - resumed) - 1
        assert sorted([*alone[half], *alone[half + 1]]) == expected[step], "half the batch, and then the other half"
        assert rows[half]["learning_rate"] == pytest.approx(whole[step - 1]["learning_rate"] / 2**0.5, rel=1e-12)
    assert set(first) >= set(range(1, resumed + 1))
    assert sum(row["tokens"] for row in rows) == sum(row["tokens"] for row in whole)


@pytest.mark.parametrize(
    ("own", "told"),
    [
        (Ending(1, "rank 0: connection closed by peer", is_consequence=True), "host algo-2 is gone: its entrypoint"),
        (Ending(1, "rank 0: ValueError: a shape is wrong", has_spoken=True), "rank 0: ValueError: a shape is wrong"),
        (Ending(75, "saved; resume me", step=8, is_consequence=True), "saved; resume me"),
        # Told to stop because SageMaker had lost the other one: nothing was saved that would speak for itself.
        (Ending(75, "stopped before the first step; resume me", was_told_to_stop=True), "host algo-2 is gone: its"),
    ],
)
def test_a_lost_host_is_the_reason_unless_this_one_has_its_own(own: Ending, told: str) -> None:
    port = free_port()
    judge = Judge(
        ["algo-1", "algo-2"], "127.0.0.1", port, RestartPolicy(RecoverySpec(max_restarts=1)), arrival_seconds=600
    )
    first = ManyHosts("algo-1", "127.0.0.1", port, judge=judge, patience_seconds=60)
    second = ManyHosts("algo-2", "127.0.0.1", port, judge=None, patience_seconds=60)
    try:
        assert second.tell_of_hang(), "the judge knows it"
        until = time.monotonic() + 60
        while first.wants_stop() != "hang":
            assert time.monotonic() < until
            time.sleep(0.01)
        second.close()
        while first.wants_stop() != "lost":
            assert time.monotonic() < until
            time.sleep(0.01)
        # What this host reports may come when the judge has said its last word, and changes that no more.
        judge._note("algo-1", own)
        judge._tell_all({"answered": True})
        while not first.have_answered():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert first.wants_stop() == "lost"
        order = first.conclude(own)
    finally:
        first.close()
    assert isinstance(order, Ending) and order.reason.startswith(told)


def test_hosts_beyond_the_limits_are_refused_in_a_line(tmp_path: Path) -> None:
    job, settings = elastic_job(tmp_path, "keep")
    tree = write_trees(tmp_path / "hosts", job, num_hosts=2, overrides=settings)[0]
    names = ["algo-1", "algo-2", "algo-3"]
    give_hosts([tree, tree, tree], names)
    place = read_place(tree)
    assert len(place.hosts) == 3
    with pytest.raises(InputError, match=r"instance_count 3: recovery.elastic allows 1 to 2 instances; stay within"):
        read_job(tree, place, {})
    give_hosts([tree], names[:1])
    alone = read_job(tree, read_place(tree), {})
    assert (alone.world_size, alone.gradient_accumulation_steps, alone.spec.compute.instance_count) == (1, 4, 1)


@pytest.mark.parametrize(
    ("epochs", "sequences", "steps"), [(3, 10, 4), (3, 16, 6), (1.1, 80, 11), (0.5, 3, 1), (90, 9, 102)]
)
def test_epochs_are_rounded_up_to_whole_steps_once(tmp_path: Path, epochs: float, sequences: int, steps: int) -> None:
    """Of 8 sequences each: rounded up in each epoch, three epochs of 10 sequences would read them five times."""
    job, settings = elastic_job(tmp_path, "keep", "training.steps=null", f"training.epochs={epochs}")
    course = Course(resolve(load_job(job, settings)), sequences_per_epoch=sequences)
    assert course.num_steps == steps


@pytest.mark.parametrize("length", [["training.steps=12"], ["training.steps=null", "training.epochs=1.5"]])
def test_a_course_counts_samples_whatever_the_batches_were(tmp_path: Path, length: list[str]) -> None:
    job, settings = elastic_job(tmp_path, "adapt", *length)
    spec = load_job(job, [*settings, "training.schedule.warmup_steps=4"])
    whole = Course(resolve(spec), sequences_per_epoch=64)
    assert whole.num_steps == STEPS, "64 sequences, one and a half times, 8 a step"
    half = Course(on_hosts(spec, 1, processes_per_host=1), sequences_per_epoch=64)
    assert half.num_steps == 2 * STEPS
    half.resumed(3, 3 * BATCH)
    assert half.num_steps == 3 + 2 * (STEPS - 3)
    peak = half.learning_rate(5) / whole.learning_rate(4)
    assert [half.learning_rate(step) for step in (5, 7, 21)] == pytest.approx(
        [peak * whole.learning_rate(step) for step in (4, 5, 12)]
    )
    assert not half.notes()
    long = load_job(job, [*settings, "training.schedule.warmup_steps=16"])
    (note,) = Course(on_hosts(long, 1, processes_per_host=1), sequences_per_epoch=64).notes()
    assert "16 is more than the job's 12 steps, so its learning rate ends at 75% of the peak" in note
    # An odd number of halves: the last step of the whole batch reads on, and the rate stays at its end.
    whole.resumed(5, 4 * BATCH + BATCH // 2)
    assert whole.num_steps == 5 + 8 and whole.learning_rate(13) == whole.learning_rate(13 + 1)


@pytest.mark.parametrize("kind", ["linear", "wsd", "cosine"])
def test_a_base_batch_scales_the_rate_with_every_resume_and_the_schedule_stands_where_the_samples_do(
    tmp_path: Path, kind: str
) -> None:
    """Two hosts; one from step 5 on; both again from step 9 on, when as much was read as in 7 steps of both."""
    job, settings = elastic_job(tmp_path, "adapt", "training.base_batch_size=16", f"training.schedule.kind={kind}")
    spec = load_job(job, [*settings, "training.schedule.warmup_steps=3"])
    whole, half, again = (
        Course(one, sequences_per_epoch=64)
        for one in (resolve(spec), on_hosts(spec, 1, processes_per_host=1), on_hosts(spec, 2, processes_per_host=1))
    )
    peak = spec.training.learning_rate * BATCH / 16
    assert max(whole.learning_rate(step) for step in range(1, STEPS + 1)) == pytest.approx(peak)
    half.resumed(5, 5 * BATCH)
    for step in (7, 9):
        stated = 5 + (step - 5) // 2
        assert half.learning_rate(step) == pytest.approx(whole.learning_rate(stated) / 2, rel=1e-12)
    again.resumed(9, 7 * BATCH)
    assert again.num_steps == 9 + STEPS - 7
    for step in range(10, again.num_steps + 1):
        assert again.learning_rate(step) == pytest.approx(whole.learning_rate(step - 2), rel=1e-12)
