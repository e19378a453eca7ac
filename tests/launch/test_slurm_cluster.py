"""Jobs on a real Slurm (Debian's, on the loopback interface): queue, signals, preemption and losses are the real ones.

What the machines run is a small program in the trainer's place, which waits, saves and fails as it is told; with the
trainer itself goes tests/launch/test_slurm_trainer.py.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import pytest
from launch_testing import contract_content, job_content
from slurm_testing.desk import Desk
from slurm_testing.machines import SlurmCluster
from trainer.slurm import host_names

from trainyard.errors import InputError
from trainyard.launch import slurm_script, watch
from trainyard.launch.backend import LogCursor
from trainyard.launch.backends import ByRecord
from trainyard.launch.cluster import launch_on_cluster, launch_on_slurm_here, tenant_backend
from trainyard.launch.record import S3RecordStore
from trainyard.launch.session import Account
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec
from trainyard.spec.platform import TenantContract


def states(status: watch.Status) -> list[tuple[str, int]]:
    """The record's states with their attempts, without those that a look may miss, and what comes again after these."""
    seen = [(change.state, change.attempt) for change in status.record.states if change.state not in ("Queued",)]
    return [state for state, _ in groupby(seen)]


def test_a_job_runs_on_every_machine_without_the_persons_credentials(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a person's")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "7")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "never")
    record = desk.launch("fine", "exit 0")
    texts: list[str] = []
    for _, lines in watch.watch(desk.place.store, desk.place.backend, record.job_id, sleep=lambda _: time.sleep(0.1)):
        texts += [f"{line.host} {line.text}" for line in lines]
    status = desk.status(record)
    assert (status.state, status.record.attempt.failure) == ("Completed", "")
    assert sorted(texts) == [
        "node-0 node1 start 1 of attempt 1, secret none",
        "node-1 node2 start 1 of attempt 1, secret none",
    ]
    # A busy controller may say once more, between two looks, what it said before.
    assert list(dict.fromkeys(states(status))) == [
        ("Created", 1),
        ("Submitted", 1),
        ("Training", 1),
        ("Completed", 1),
    ]
    assert "trainyard:job=fine" in desk.cluster.command("scontrol", "show", "job", desk.slurm_id(record))


def test_what_slurm_would_refuse_leaves_no_record(desk: Desk) -> None:
    with pytest.raises(InputError, match=r"Slurm would not take it: .*partition"):
        desk.launch("nowhere", "exit 0", queue="none")
    with pytest.raises(InputError, match=r"Slurm would not take it: .*[Nn]ode"):
        spec = desk.spec("large", "exit 0").model_dump(mode="json")
        spec["compute"]["instance_count"] = 4
        spec["parallelism"] = {"data_replicate": 4}
        launch_on_slurm_here(parse(JobSpec, spec, "job"), desk.folder / "jobs")
    assert desk.place.store.job_ids() == []


def test_two_who_submit_one_attempt_start_one_job(desk: Desk) -> None:
    record = desk.launch("once", "wait_for_a_signal")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: desk.place.backend.submit(record, lambda _: None), range(4)))
    # Also where nobody was left to write down that Slurm took it.
    (desk.directory(record) / "submitted").unlink()
    desk.place.backend.submit(record, lambda _: None)
    queued = desk.cluster.command("squeue", "--noheader", f"--name={record.job_id}", "--format=%i").split()
    assert queued == [desk.slurm_id(record)]
    watch.stop(desk.place.store, desk.place.backend, record.job_id)
    assert desk.ended(record).state == "Stopped"
    # Also when Slurm has it no longer in its queue.
    desk.place.backend.submit(record, lambda _: None)
    assert desk.status(record).state == "Stopped"


def test_a_failure_is_told_in_the_first_machines_words(desk: Desk) -> None:
    status = desk.ended(
        desk.launch("bad", "say_why 'rank 0 on node1: ValueError: no such column'; exit 1", max_resumes=3)
    )
    assert status.state == "Failed"
    assert status.record.attempt.failure == "rank 0 on node1: ValueError: no such column"
    assert status.record.attempt.reclaims == 0, "an error of the program is not tried again"


def test_stop_saves_and_resume_goes_on(desk: Desk) -> None:
    record = desk.launch("stopped", "[ -e saved-0 ] && [ -e saved-1 ] && exit 0; wait_for_a_signal", max_resumes=3)
    desk.running_on_both(record)
    assert watch.stop(desk.place.store, desk.place.backend, record.job_id).state in ("Stopping", "Stopped")
    status = desk.ended(record)
    assert (status.state, status.record.attempt.reclaims) == ("Stopped", 0), "who stops a job does not want it requeued"
    resumed = watch.resume(desk.place.store, desk.place.backend, record.job_id)
    assert resumed.attempt.training_job_name == f"{record.job_id}-r2"
    status = desk.ended(record)
    assert (status.state, status.record.attempt.number) == ("Completed", 2)
    with pytest.raises(InputError, match="has completed"):
        watch.resume(desk.place.store, desk.place.backend, record.job_id)


def test_a_task_that_no_signal_reaches_finds_the_stop_in_the_jobs_folder(desk: Desk) -> None:
    record = desk.launch("deaf", "trap '' TERM; until [ -e told ]; do sleep 0.1; done; exit 75")
    desk.running_on_both(record)
    watch.stop(desk.place.store, desk.place.backend, record.job_id)
    assert desk.ended(record).state == "Stopped"


@pytest.mark.slow
def test_a_job_that_is_requeued_after_its_stop_does_not_train_on(desk: Desk) -> None:
    """As when a machine is lost, or an urgent job comes, before a stopped job has saved."""
    record = desk.launch("requeued", "trap '' TERM; until [ -e over ]; do sleep 0.1; done; exit 1", max_resumes=3)
    desk.running_on_both(record)
    watch.stop(desk.place.store, desk.place.backend, record.job_id)
    desk.cluster.command("scontrol", "requeue", desk.slurm_id(record))
    (desk.directory(record) / "over").touch()
    status = desk.ended(record)
    assert (status.state, _note(status)) == ("Stopped", "requeued after it was asked to stop; not started again")
    assert len((desk.directory(record) / "started").read_text().split()) == 2, "one start of two machines"


def test_a_job_that_waits_is_stopped_at_once(desk: Desk) -> None:
    holder = desk.launch("holder", "wait_for_a_signal")
    desk.running_on_both(holder)
    waiting = desk.launch("waiting", "exit 0")
    status = desk.until(waiting, lambda status: "machines are in use" in _note(status), "Slurm's reason")
    assert status.state == "Queued"
    assert desk.place.backend.states([holder, waiting]) == {holder.job_id: "Training", waiting.job_id: "Queued"}
    watch.stop(desk.place.store, desk.place.backend, waiting.job_id)
    assert desk.ended(waiting).state == "Stopped"
    assert not (desk.directory(waiting) / "started").exists()
    # Whoever uses Slurm's own command is seen too.
    desk.cluster.command("scancel", desk.slurm_id(holder))
    assert desk.ended(holder).state == "Stopped"


def _note(status: watch.Status) -> str:
    return status.observation.note if status.observation else ""


def test_a_preempted_job_saves_and_comes_back(desk: Desk) -> None:
    record = desk.launch("yields", "[ -e saved-0 ] && [ -e saved-1 ] && exit 0; wait_for_a_signal")
    desk.running_on_both(record)
    urgent = desk.launch("urgent", "sleep 1; exit 0", queue="urgent")
    assert desk.ended(urgent).state == "Completed"
    status = desk.ended(record)
    assert (status.state, status.record.attempt.number, status.record.attempt.reclaims) == ("Completed", 1, 1)
    assert ("Interrupted", 1) in states(status)
    assert [change.note for change in status.record.states if change.state == "Interrupted"] == ["preempted"]


@pytest.mark.full
def test_a_start_that_slurm_ends_is_not_held_up_by_telling_its_tasks_once_more(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm refuses to signal such a job, and its own commands try again for as long as it lets the script live."""
    commands, called = desk.folder / "bin", desk.folder / "called"
    commands.mkdir()
    (commands / "scancel").write_text(f'#!/bin/sh\necho "$@" >> {called}\nexec {desk.cluster.bin}/scancel "$@"\n')
    (commands / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    # Started anew, it waits for a further signal, which this time is its script's to hand on.
    record = desk.launch("handed", "[ $start = 3 ] && exit 0; wait_for_a_signal", max_resumes=1)
    desk.running_on_both(record)
    desk.cluster.command("scontrol", "requeue", desk.slurm_id(record))
    desk.running_on_both(record, starts=2)
    assert not called.exists()
    desk.cluster.command("scancel", "--signal=TERM", "--batch", desk.slurm_id(record))
    assert desk.ended(record).state == "Completed"
    assert called.read_text() == f"--quiet --signal=TERM {desk.slurm_id(record)}\n"


def test_a_tenants_job_has_its_record_in_the_tenants_bucket(
    desk: Desk, deployed: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a launch but the file system, which nobody can mount here: `findmnt` says that it is the tenant's, and
    `id` that its files are ours."""
    commands = desk.folder / "bin"
    commands.mkdir()
    for name, word in (("findmnt", "10.0.0.7@tcp:/abcdefgh"), ("id", "owner")):
        (commands / name).write_text(f"#!/bin/sh\necho {word}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(desk.folder))
    content = contract_content() | {"version": 3, "monthly_usd": 50_000}
    content["cluster"] = {"engine": "pcs", "id": "pcs_a", "queues": {"train": ["p5.48xlarge"]}, "login_tag": "login"}
    contract = parse(TenantContract, content, "contract")
    spec = job_content() | {"parallelism": {"data_shard": 16}, "budget": None}
    spec["training"]["global_batch_size"] = 32
    says = "cat input/data/inputs.json; echo; echo region $AWS_REGION; exit 0"
    program = desk.spec("acme", says).compute.slurm.python
    spec["compute"] = {"backend": "slurm", "instance_type": "p5.48xlarge", "instance_count": 2, "max_hours": 2}
    spec["compute"]["slurm"] = {"python": program, "directory": str(desk.folder / "fsx")}
    record = launch_on_cluster(parse(JobSpec, spec, "job"), contract, account=deployed, launcher=deployed, force=True)
    store = S3RecordStore(deployed.client("s3"), contract.buckets.data)
    assert store.read(record.job_id).record.backend == "slurm"
    backend = ByRecord({"slurm": tenant_backend(deployed, contract)})
    for _ in watch.watch(store, backend, record.job_id, sleep=lambda _: time.sleep(0.1)):
        pass
    assert store.read(record.job_id).record.state == "Completed"
    lines = [line.text for line in backend.read_logs(record, LogCursor())]
    assert "region us-east-1" in lines and any('"location": "s3://acme-data/sets/train/"' in line for line in lines)
    submitted = (desk.folder / "fsx" / record.job_id / "submitted").read_text()
    job = desk.cluster.command("scontrol", "show", "job", submitted.split("id=")[1].strip())
    assert "Comment=trainyard:environment=test,trainyard:tenant=acme,trainyard:cost-center=research-100" in job


@pytest.mark.full
def test_a_lost_machine_is_waited_for_and_the_job_comes_back(desk: Desk) -> None:
    record = desk.launch("loses", "[ -e again ] && exit 0; wait_for_a_signal")
    desk.running_on_both(record)
    (desk.directory(record) / "again").touch()
    desk.cluster.lose_node("node2")
    try:
        desk.cluster.wait_until(lambda: "down" in desk.cluster.node_states()["node2"], 60, "the loss noticed")
        desk.until(record, lambda status: status.state == "Queued", "Slurm's requeue")
    finally:
        desk.cluster.start_node("node2")
    status = desk.ended(record)
    assert (status.state, status.record.attempt.reclaims) == ("Completed", 1)


@pytest.mark.slow
def test_a_lost_host_requeues_as_often_as_the_job_says(desk: Desk) -> None:
    record = desk.launch(
        "host", "say_why 'host node2 is gone: its entrypoint was killed'; sleep 0.2; exit 1", max_resumes=1
    )
    status = desk.ended(record)
    assert (status.state, status.record.attempt.reclaims) == ("Failed", 1)
    assert status.record.attempt.failure.startswith("host node2 is gone")


@pytest.mark.slow
def test_a_frozen_host_that_the_others_gave_up_is_ended_and_the_job_comes_back(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine answers Slurm, and srun waits for its task."""
    monkeypatch.setattr(slurm_script, "LOST_SECONDS", 1)
    program = (
        "[ -e again ] && exit 0; [ $SLURM_NODEID = 1 ] && kill -STOP $$; say_why 'host node2 is gone: why'; exit 1"
    )
    record = desk.launch("frozen", program, max_resumes=1)
    desk.running_on_both(record)
    (desk.directory(record) / "again").touch()
    status = desk.ended(record)
    assert (status.state, status.record.attempt.reclaims) == ("Completed", 1)
    assert [change.note for change in status.record.states if change.state == "Interrupted"] == ["host node2 is gone"]


@pytest.mark.slow
def test_a_task_that_does_not_save_in_time_is_killed_and_the_job_comes_back(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_script, "KILL_SECONDS", 1)
    record = desk.launch("late", "[ -e again ] && exit 0; trap '' TERM; wait_for_a_signal", max_resumes=1)
    desk.running_on_both(record)
    (desk.directory(record) / "again").touch()
    # As Slurm does it when the time limit is near.
    desk.cluster.command("scancel", "--signal=TERM", "--batch", desk.slurm_id(record))
    status = desk.ended(record)
    assert (status.state, status.record.attempt.reclaims) == ("Completed", 1)
    notes = [change.note for change in status.record.states if change.state == "Interrupted"]
    assert notes == ["its time limit came; killed: it had not saved within 1 s"]


@pytest.mark.full
def test_a_requeue_that_a_controller_does_not_hear_is_asked_for_again(desk: Desk) -> None:
    record = desk.launch(
        "unheard",
        "[ -e again ] && exit 0; until [ -e go ]; do sleep 0.1; done; say_why 'host node2 is gone: why'; exit 1",
        max_resumes=1,
    )
    desk.running_on_both(record)
    (desk.directory(record) / "again").touch()
    desk.cluster.stop_controller()
    try:
        (desk.directory(record) / "go").touch()
        events = desk.directory(record) / "events"
        desk.cluster.wait_until(lambda: "Interrupted" in events.read_text(), 200, "the script's wish")
    finally:
        desk.cluster.start_controller()
    desk.cluster.wait_until(desk.cluster.node_states, 60, "the controller")
    status = desk.ended(record, 200)
    assert (status.state, status.record.attempt.reclaims) == ("Completed", 1)
    assert [change.note for change in status.record.states if change.state == "Interrupted"] == ["host node2 is gone"]


@pytest.mark.slow
def test_a_save_that_nobody_asked_for_requeues_then_stops(desk: Desk) -> None:
    record = desk.launch("asks", "exit 75", max_resumes=1)
    status = desk.ended(record)
    assert (status.state, status.record.attempt.reclaims) == ("Stopped", 1)
    assert "recovery.max_resumes is spent (1)" in _note(status)


def test_a_script_that_is_killed_is_no_mystery(desk: Desk) -> None:
    record = desk.launch("killed", "wait_for_a_signal")
    desk.running_on_both(record)
    desk.cluster.kill_script(desk.slurm_id(record))
    status = desk.ended(record)
    assert status.state == "Failed" and "batch script was killed" in status.record.attempt.failure


def test_a_slurm_that_does_not_answer_is_neither_an_end_nor_a_stop(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = desk.launch("silent", "wait_for_a_signal")
    desk.running_on_both(record)
    deaf = tmp_path / "deaf"
    deaf.mkdir()
    with monkeypatch.context() as patched:
        patched.setenv("PATH", f"{deaf}:{os.environ['PATH']}")
        (deaf / "scontrol").write_text('#!/bin/sh\n[ "$1" = ping ]\n')
        (deaf / "scontrol").chmod(0o755)
        assert desk.status(record).state == "Training", "as squeue says"
        (deaf / "squeue").write_text("#!/bin/sh\necho 'slurm_load_jobs error: Socket timed out' >&2\nexit 1\n")
        (deaf / "squeue").chmod(0o755)
        with pytest.raises(InputError, match="the controller does not answer"):
            desk.status(record)
        with pytest.raises(InputError, match="Slurm did not stop it: slurm_load_jobs error: Socket timed out"):
            desk.place.backend.stop(record)
    assert desk.status(record).state == "Training"
    watch.stop(desk.place.store, desk.place.backend, record.job_id)
    assert desk.ended(record).state == "Stopped"
    (desk.directory(record) / "submitted").write_text("attempt=1\nid=99999\n")
    desk.place.backend.stop(record)


@pytest.mark.full
def test_a_controller_that_is_down_is_said_and_the_job_goes_on(desk: Desk) -> None:
    record = desk.launch("orphan", "until [ -e go ]; do sleep 0.1; done; exit 0")
    desk.running_on_both(record)
    desk.cluster.stop_controller()
    try:
        with pytest.raises(InputError, match="the controller does not answer"):
            desk.status(record)
    finally:
        desk.cluster.start_controller()
    desk.cluster.wait_until(lambda: set(desk.cluster.node_states().values()) == {"allocated"}, 60, "the controller")
    (desk.directory(record) / "go").touch()
    assert desk.ended(record).state == "Completed"


@pytest.mark.full
def test_the_time_limit_saves_and_requeues(desk: Desk) -> None:
    """Slurm counts limits in minutes, and may signal a minute early."""
    record = desk.launch(
        "long", "[ -e saved-0 ] && [ -e saved-1 ] && exit 0; wait_for_a_signal", max_resumes=1, max_hours=2 / 60
    )
    deadline = time.monotonic() + 240
    while not (status := desk.status(record)).finished and time.monotonic() < deadline:
        time.sleep(0.5)
    assert (status.state, status.record.attempt.reclaims) == ("Completed", 1)
    assert [change.note for change in status.record.states if change.state == "Interrupted"] == [
        "its time limit came; saved"
    ]


@pytest.mark.parametrize(
    "names", ["node1", "node[1-3,7]", "gpu[08-11],login", "r[1-2]n[01-02]", "a1,b[2,4-5],c", "n[098-101]"]
)
def test_host_names_are_slurms_own(cluster: SlurmCluster, names: str) -> None:
    assert host_names(names) == cluster.command("scontrol", "show", "hostnames", names).split()
