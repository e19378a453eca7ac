"""Jobs for a Slurm cluster without one: the batch script, what is refused, states read, the session on a login node."""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from botocore.stub import Stubber
from launch_testing import contract_content, job_content
from trainer.host.losses import _diagnosis

from trainyard import planner
from trainyard.errors import AwsAwayError, AwsRefusedError, InputError
from trainyard.launch import cluster, cluster_shell, slurm_backend
from trainyard.launch.backend import AwayError, LogCursor, LogLine, SilentError
from trainyard.launch.backends import ByRecord
from trainyard.launch.checks import refused_by_month, refused_by_tenant
from trainyard.launch.cluster import (
    here_directory,
    here_places,
    partition_of,
    tenant_backend,
    tenant_directory,
    tenant_places,
)
from trainyard.launch.cluster_shell import Answer, HereShell, SessionShell, shell_of
from trainyard.launch.elastic import revised
from trainyard.launch.launcher import new_record
from trainyard.launch.record import JobRecord, RecordedChannel
from trainyard.launch.session import Account
from trainyard.launch.slurm_backend import LOG_BYTES, LOG_TAIL_BYTES, SlurmBackend, read_looks
from trainyard.launch.slurm_script import ClusterPlace, batch_script, limit_minutes
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec
from trainyard.spec.platform import TenantContract

GOLDEN = Path(__file__).parent / "golden" / "job.sbatch"
JOB_ID = "acme-tiny-20260131120000-1a2b"
PARTITIONS = {"train": ["p5.48xlarge"], "small": ["g6e.12xlarge"], "mixed": ["p5.48xlarge", "p5en.48xlarge"]}


def contract_with(**cluster: Any) -> TenantContract:
    content = contract_content() | {"version": 3}
    content["cluster"] = {"engine": "pcs", "id": "pcs_abc", "queues": PARTITIONS, "login_tag": "login"} | cluster
    return parse(TenantContract, content, "contract")


def cluster_job(**compute: Any) -> JobSpec:
    content = job_content()
    content["compute"] = {"backend": "slurm", "instance_type": "p5.48xlarge", "instance_count": 2, "max_hours": 2}
    content["compute"] |= compute
    content["training"]["global_batch_size"] = 32
    content["parallelism"] = {"data_shard": 8 * content["compute"]["instance_count"]}
    content["recovery"] = {"max_resumes": 3}
    content["data"]["train"][0]["path"] = "fsx://sets/train"
    return parse(JobSpec, content, "job")


def record_of(job: JobSpec, channels: tuple[RecordedChannel, ...] = ()) -> JobRecord:
    spec = job.model_copy(
        update={
            "checkpoint": job.checkpoint.model_copy(update={"destination": f"s3://acme-checkpoints/jobs/{JOB_ID}/"})
        }
    )
    return new_record(
        job,
        planner.resolve(spec),
        job_id=JOB_ID,
        backend="slurm",
        environment="test",
        plan={},
        image=None,
        channels=channels,
        forced=(),
        launched_by="",
    )


INPUT = RecordedChannel(name="train-0", kind="fsx", location="sets/train", uri="fsx://sets/train")


def script_of(job: JobSpec, *channels: RecordedChannel) -> str:
    record = record_of(job, channels)
    return batch_script(record, tenant_places(contract_with())(record))


def test_the_batch_script_is_the_golden_one() -> None:
    """To renew it: TRAINYARD_RENEW=1 pytest tests/launch/test_slurm.py -k golden; then read the difference."""
    script = script_of(cluster_job(), INPUT)
    if os.environ.get("TRAINYARD_RENEW"):
        GOLDEN.write_text(script)
    assert script == GOLDEN.read_text()


SRUN = 'exit "$TASK_CODE"'
SCONTROL = """
case "$*" in
  "show hostnames"*) echo node1 ;;
  "--oneliner show node"*) echo "NodeName=node1 NodeAddr=10.0.0.9 Port=1" ;;
  "--oneliner show job"*)
    echo "JobId=12 JobState=$([ -e requested ] && echo "${STATE_THEN:-RUNNING}" || echo RUNNING) PreemptTime=None x" ;;
  ping)
    said=$(sed -n 1p "$PINGS")
    sed -i 1d "$PINGS"
    for state in $said; do echo "Slurmctld($state) at x is ${state#*=}"; done
    ;;
  requeue*)
    echo requeue >&2
    touch requested
    if [ ! -s "$PINGS" ]; then kill -9 "$PPID"; fi
    exit 1
    ;;
esac
"""
"""What the batch script asks of Slurm. A requeue is refused as long as PINGS has answers, then it ends the script."""


def run_script(
    folder: Path,
    code: int,
    *,
    pings: str | None = None,
    limits: str = "",
    task: str = SRUN,
    restarts: int = 0,
    state_then: str = "RUNNING",
) -> tuple[str, int]:
    """The batch script in `folder`/job, its task ended with `code`: what it said, and its own exit code. `state_then`:
    the job's, once a requeue was asked for."""
    job, programs = folder / "job", folder / "programs"
    for one in (job, programs):
        one.mkdir()
    commands = {"srun": task, "scontrol": SCONTROL, "squeue": "", "sleep": "exec /bin/sleep 0.01"}
    for name, text in commands.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    if pings is not None:
        (folder / "pings").write_text(pings)
    place = ClusterPlace(directory=str(job), partition=None, comment="", python="python")
    (folder / "job.sbatch").write_text(batch_script(record_of(cluster_job()), place))
    settings = {"PATH": f"{programs}:{os.environ['PATH']}", "PINGS": str(folder / "pings"), "TASK_CODE": str(code)}
    settings["STATE_THEN"] = state_then
    settings |= {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node1", "SLURM_RESTART_COUNT": str(restarts)}
    command = ["bash", "-c", f"{limits} exec bash {folder}/job.sbatch"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120)
    return done.stderr, done.returncode


@pytest.mark.parametrize(("code", "state"), [(0, "Completed"), (1, "Failed"), (3, "Failed")])
def test_the_job_ends_as_its_task_did(code: int, state: str, tmp_path: Path) -> None:
    assert run_script(tmp_path, code)[1] == code
    outcome = (tmp_path / "job/outcome").read_text()
    assert f"\nstate={state}\n" in outcome
    assert (f"ended with exit code {code};" in outcome) == bool(code)


@pytest.mark.parametrize("code", [0, 75])
def test_a_disk_that_takes_nothing_changes_no_exit_code(code: int, tmp_path: Path) -> None:
    """Not a byte may be written: a job that saved is requeued, one that is done is not said to have failed."""
    said, ended = run_script(tmp_path, code, limits="trap '' XFSZ; ulimit -f 0;")
    assert ("requeue" in said.splitlines()) == (code == 75)
    assert ended == (-signal.SIGKILL if code == 75 else 0), "Slurm ends what it requeues"


def test_a_disk_that_takes_no_count_of_requeues_makes_them_no_more_than_the_job_allows(tmp_path: Path) -> None:
    most = cluster_job().recovery.max_resumes
    said, ended = run_script(tmp_path, 75, limits="trap '' XFSZ; ulimit -f 0;", restarts=most)
    assert "requeue" not in said.splitlines() and ended == 75


def test_a_word_that_found_room_in_a_name_alone_is_read_there(tmp_path: Path) -> None:
    """Which is how another host's loss is told on a disk that takes no file's content."""
    task = 'mkdir host; ln -s "host node2 is gone: its entrypoint was killed" host/failure; exit "$TASK_CODE"'
    said, _ = run_script(tmp_path, 1, task=task)
    assert "requeue" in said.splitlines()
    assert (tmp_path / "job/requeues").read_text() == "host node2 is gone\n"


def test_a_loss_too_many_is_no_reason_to_start_again(tmp_path: Path) -> None:
    reason = _diagnosis("host node2 is gone: its entrypoint was killed, or the network parted", 3, 5).replace("`", "")
    said, code = run_script(tmp_path, 1, task=f'mkdir host; echo "{reason}" > host/failure; exit "$TASK_CODE"')
    assert "requeue" not in said.splitlines() and code == 1
    assert f"failure={reason}\n" in (tmp_path / "job/outcome").read_text()


@pytest.mark.parametrize(
    ("pings", "num_requests", "is_given_up"),
    [
        # It comes back between a request and the question whether it is up.
        ("primary=DOWN\nprimary=UP\n", 2, False),
        ("primary=UP\nprimary=DOWN\nprimary=UP\n", 2, False),
        # It goes and comes back between the two.
        ("primary=UP\nprimary=UP\n", 2, False),
        ("primary=UP\nprimary=UP\nprimary=DOWN\nprimary=UP\nprimary=UP\nprimary=UP\n", 4, False),
        # A backup that is up has not taken over yet.
        ("primary=DOWN backup=UP\nprimary=DOWN backup=UP\n", 2, False),
        ("primary=UP backup=DOWN\n" * 4, 2, True),
    ],
)
def test_a_requeue_is_given_up_where_a_controller_that_was_up_refuses_it(
    pings: str, num_requests: int, is_given_up: bool, tmp_path: Path
) -> None:
    said, _ = run_script(tmp_path, 75, pings=pings)
    assert said.splitlines().count("requeue") == num_requests
    assert ("Slurm did not requeue it" in (tmp_path / "job/events").read_text()) == is_given_up


def test_a_requeue_that_slurm_has_begun_itself_is_none_that_it_refuses(tmp_path: Path) -> None:
    """It had found the lost machine meanwhile; the job was told as Stopped, and a person had to resume it."""
    said, code = run_script(tmp_path, 75, pings="primary=UP\n" * 4, state_then="COMPLETING")
    assert said.splitlines().count("requeue") == 1 and code == 75
    assert not (tmp_path / "job/outcome").exists() and "Stopped" not in (tmp_path / "job/events").read_text()


def test_a_container_sees_the_shared_folder_and_what_the_job_names() -> None:
    slurm = {"container_image": "/fsx/cluster/trainyard.sqsh", "container_mounts": ["/opt/sets:/sets"]}
    script = script_of(cluster_job(slurm=slurm), INPUT)
    option = "--container-image=/fsx/cluster/trainyard.sqsh --container-mounts=/fsx:/fsx,/opt/sets:/sets "
    assert script.count(f"{option}/opt/trainyard/bin/python -u -m trainer.slurm") == 2, "for its inputs and for its run"
    elsewhere = script_of(cluster_job(slurm={"container_image": "r#image:1", "directory": "/shared/jobs"}))
    assert "--container-mounts=/shared/jobs:/shared/jobs " in elsewhere


def test_efa_is_asked_for_where_the_machines_have_it() -> None:
    assert "export FI_PROVIDER=efa" in script_of(cluster_job())
    one = script_of(cluster_job(instance_count=1))
    assert "FI_PROVIDER" not in one and "export TRAINYARD_SKIP_EFA_CHECK=1" in one


def test_the_time_limit_leaves_time_to_save() -> None:
    assert "#SBATCH --time=120\n#SBATCH --signal=B:TERM@180\n" in script_of(cluster_job())
    assert "#SBATCH --time=2\n#SBATCH --signal=B:TERM@30\n" in script_of(cluster_job(max_hours=0.03))
    assert [limit_minutes(hours) for hours in (0.001, 0.5, 1.001)] == [1, 30, 61]


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        ({"queue": "none"}, "is no partition of tenant acme's cluster: mixed (p5.48xlarge, p5en.48xlarge); small"),
        ({"queue": "small"}, "compute.instance_type p5.48xlarge: no partition .* has it under small"),
        ({"queue": "mixed"}, "partition mixed also starts p5en.48xlarge"),
        ({"instance_type": "p4d.24xlarge"}, "compute.instance_type p4d.24xlarge: no partition"),
    ],
)
def test_what_the_cluster_does_not_offer_is_refused(compute: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words.replace("(", r"\(").replace(")", r"\)")):
        partition_of(cluster_job(**compute), contract_with())


def test_the_partition_of_one_type_is_preferred_and_sagemakers_name_will_do() -> None:
    assert partition_of(cluster_job(instance_type="ml.p5.48xlarge"), contract_with()) == "train"


def test_a_tenant_without_a_cluster_is_told_what_to_do(contract: TenantContract) -> None:
    with pytest.raises(InputError, match="tenant acme has no cluster in environment test; use backend sagemaker"):
        partition_of(cluster_job(), contract)


def test_a_job_that_could_cost_more_than_a_month_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path))
    (words,) = refused_by_month(cluster_job(max_hours=100), contract_with())
    # Four starts: three requeues may follow the first.
    assert "2 x p5.48xlarge for 4 x 100 hours could cost" in words and "5,000 USD a month" in words
    assert refused_by_month(cluster_job(max_hours=1), contract_with()) == []
    job = cluster_job(max_hours=100)
    for backend in ("kubernetes", "ray"):  # their deadline is of all starts together
        elsewhere = job.model_copy(update={"compute": job.compute.model_copy(update={"backend": backend})})
        (words,) = refused_by_month(elsewhere, contract_with())
        assert "2 x p5.48xlarge for 1 x 100 hours could cost" in words


def test_a_job_without_a_price_is_said_to_be_unchecked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path))
    said: list[str] = []
    contract = contract_with().model_copy(update={"region": "af-south-1"})
    assert refused_by_month(cluster_job(max_hours=100), contract, said.append) == []
    (line,) = said
    assert line.startswith("warning: not checked against the 5,000 USD that tenant acme has a month: ")
    assert "af-south-1" in line


@pytest.mark.parametrize("name", ["my jobs", "100%", 'a"b'])
def test_a_folder_that_a_batch_script_cannot_name_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster, "has_slurm_here", lambda: True)
    with pytest.raises(InputError, match=r"compute.slurm.directory, or TRAINYARD_STATE_DIR, to a folder"):
        cluster.launch_on_slurm_here(cluster_job(), tmp_path / name)
    assert not (tmp_path / name).exists()


class TakesAll:
    """A backend at the edge: whatever is submitted, it is taken."""

    def check(self, _: JobRecord) -> None:
        """Nothing is wrong."""

    def submit(self, *_: Any) -> None:
        """It is taken."""


@pytest.mark.parametrize(
    ("stated", "saved"), [(None, ""), ("saved", "/saved"), ("/lustre/saved", None), ("s3://kept/saved", None)]
)
def test_every_job_of_one_file_saves_in_a_folder_of_its_own(
    stated: str | None, saved: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A path is from the job's own folder, where its script runs; the second job would go on from the first one's."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train/tokenizer.json").write_text('{"model": {}}')
    content = cluster_job().model_dump(mode="json", exclude_unset=True)
    content["data"]["train"][0]["path"] = str(tmp_path / "train")
    content["data"] |= {"validation": [], "tokenizer": str(tmp_path / "train"), "chat_template": None}
    content["checkpoint"] = {"destination": stated, "local_directory": "nvme"}
    job = parse(JobSpec, content, "job")
    monkeypatch.setattr(cluster, "has_slurm_here", lambda: True)
    monkeypatch.setattr(cluster, "here_backend", lambda _: TakesAll())
    monkeypatch.chdir(tmp_path)
    records = [cluster.launch_on_slurm_here(job, tmp_path / "jobs", force=True) for _ in range(2)]
    for record in records:
        own = cluster.here_directory(tmp_path / "jobs", record)
        assert record.checkpoint_destination == (stated if saved is None else f"{own}{saved}")
        assert record.resolved.spec.checkpoint.local_directory == "nvme", "of the host that it is on"
    assert records[0].job_id != records[1].job_id


class AgreeableShell:
    """Whatever is asked, Slurm takes it."""

    where = "a test"

    def run(self, *_: str) -> Answer:
        return Answer(0, "", "")


def backend_for(contract: TenantContract, monkeypatch: pytest.MonkeyPatch, aws: Account) -> SlurmBackend:
    monkeypatch.setattr(cluster, "shell_of", lambda *_: AgreeableShell())
    return tenant_backend(aws, contract)


def test_a_resume_holds_to_the_tenants_hours_and_month(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, aws: Account
) -> None:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path))
    backend = backend_for(contract_with(), monkeypatch, aws)
    first = record_of(cluster_job(max_hours=1))
    backend.check(first.with_next_attempt())
    longer = revised(first, ["compute.max_hours=672"], None)
    with pytest.raises(InputError, match=r"compute.max_hours 672 is over the 24 hours that tenant acme's jobs may run"):
        backend.check(longer.with_next_attempt())
    dearer = revised(first, ["compute.max_hours=20"], None)
    with pytest.raises(InputError, match=r"could cost .* and tenant acme has 5,000 USD a month"):
        backend.check(dearer.with_next_attempt())
    # What the launch was forced to is forced again, and no more than that.
    forced = first.model_copy(update={"forced": tuple(refused_by_tenant(dearer.resolved.spec, contract_with()))})
    backend.check(revised(forced, ["compute.max_hours=20"], None).with_next_attempt())
    with pytest.raises(InputError, match=r"compute.max_hours 672 is over"):
        backend.check(revised(forced, ["compute.max_hours=672"], None).with_next_attempt())


@pytest.mark.parametrize(
    "queues", [{"other": ["g6e.12xlarge"]}, {"train": ["p5.48xlarge", "p5en.48xlarge"]}], ids=["gone", "mixed"]
)
def test_jobs_of_a_partition_that_was_taken_away_can_still_be_seen_and_stopped(
    queues: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, aws: Account
) -> None:
    backend, record = backend_for(contract_with(queues=queues), monkeypatch, aws), record_of(cluster_job(max_hours=1))
    backend.stop(record)
    assert backend.observe(record) is None and backend.states([record]) == {}
    assert backend.read_logs(record, LogCursor()) == []
    with pytest.raises(InputError, match="partition"):
        backend.check(record.with_next_attempt())


def test_a_login_node_that_cannot_look_tells_of_no_job_s_end(monkeypatch: pytest.MonkeyPatch, aws: Account) -> None:
    """No word of a job is how one is told that Slurm has forgotten: a tenant's removal would go on."""
    backend, record = backend_for(contract_with(), monkeypatch, aws), record_of(cluster_job(max_hours=1))
    monkeypatch.setattr(AgreeableShell, "run", lambda *_: Answer(127, "", "bash: sudo: command not found"))
    for look in (lambda: backend.observe(record), lambda: backend.states([record])):
        with pytest.raises(AwayError, match=r"^a test: jobs can't be looked at there: bash: sudo: command not found$"):
            look()
    with pytest.raises(AwayError, match=r"^a test: logs can't be read there: bash: sudo: command not found$"):
        backend.read_logs(record, LogCursor())


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_on_a_full_disk_what_waits_is_stopped_and_of_what_runs_is_said_what_it_takes(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_of(cluster_job())
    folder, programs = Path(here_directory(tmp_path, record)), tmp_path / "programs"
    for one in (folder, programs):
        one.mkdir(parents=True)
    (folder / "submitted").write_text("attempt=1\nid=12\n")
    full = "echo \"touch: cannot touch '$1': No space left on device\" >&2; exit 1"
    for name, text in {"squeue": f"echo {state}", "scancel": f'echo "$@" >> {tmp_path}/told', "touch": full}.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    backend = SlurmBackend(HereShell(), here_places(tmp_path), lambda one: here_directory(tmp_path, one))
    if state == "PENDING":
        backend.stop(record)
        assert (tmp_path / "told").read_text() == "12\n"
        return
    words = rf"its folder takes no file \(No space left on device\), .*: make room in {folder}, or `scancel 12`"
    with pytest.raises(InputError, match=words):
        backend.stop(record)
    assert not (tmp_path / "told").exists()
    (programs / "touch").unlink()
    backend.stop(record)
    assert (tmp_path / "told").read_text() == "--signal=TERM --batch 12\n" and (folder / "stop_requested").exists()


def test_the_folder_that_is_looked_at_is_the_one_that_was_submitted_to(tmp_path: Path) -> None:
    for slurm in ({}, {"directory": "/shared/jobs"}):
        record = record_of(cluster_job(slurm=slurm))
        assert tenant_places(contract_with())(record).directory == tenant_directory(record)
        assert here_places(tmp_path)(record).directory == here_directory(tmp_path, record)


LOOK = """\
job /jobs/a
submitted attempt=2
submitted id=12
slurm JobId=12 JobName=a JobState={state} Reason={reason} Partition=train StartTime=2026-01-31T12:02:00 ExitCode={code}
event 1\tTraining\t2026-01-31T11:00:00+00:00\tnode[1-2], start 1
event 1\tFailed\t2026-01-31T11:10:00+00:00\t
event 2\tTraining\t2026-01-31T12:00:00+00:00\tnode[1-2], start 1
"""


@pytest.mark.parametrize(
    ("state", "more", "expected"),
    [
        ("RUNNING", "", ("Training", "")),
        ("RUNNING", "stopping\n", ("Stopping", "")),
        ("PENDING", "", ("Queued", "")),
        ("CANCELLED", "", ("Stopped", "")),
        ("CANCELLED", "stopping\n", ("Stopped", "")),
        ("TIMEOUT", "", ("Stopped", "")),
        ("OUT_OF_MEMORY", "", ("Failed", "a machine's memory was not enough")),
        ("FAILED", "", ("Failed", "its batch script was killed by signal 9")),
        ("COMPLETING", "event 2\tInterrupted\t2026-01-31T12:01:00+00:00\tpreempted\n", ("Interrupted", "")),
        ("RUNNING", "outcome attempt=2\noutcome state=Failed\noutcome failure=a = b\n", ("Failed", "a = b")),
        ("RUNNING", "outcome attempt=1\noutcome state=Failed\noutcome failure=old\n", ("Training", "")),
    ],
)
def test_a_state_is_slurms_until_the_script_has_written_its_end(
    state: str, more: str, expected: tuple[str, str]
) -> None:
    text = LOOK.format(state=state, reason="BeginTime", code="0:9") + more
    seen = read_looks(text.splitlines())["/jobs/a"].observation(2)
    assert seen is not None
    assert (seen.state, seen.failure) == expected
    assert {change.attempt for change in seen.transitions} == {2}


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("", "before its ranks had saved"),
        ("saved, and asks to be resumed", ""),
        ("its time limit came; saved", ""),
        ("its time limit came; killed: it had not saved within 130 s", "after: its time limit came; killed: .*"),
        ("host node2 is gone", "after: host node2 is gone"),
    ],
)
def test_a_job_that_is_stopped_while_it_waits_to_start_again_has_lost_no_save(last: str, expected: str) -> None:
    text = LOOK.format(state="CANCELLED", reason="None", code="0:0") + "stopping\n"
    text += f"event 2\tInterrupted\t2026-01-31T12:01:00+00:00\t{last}\n" if last else ""
    seen = read_looks(text.splitlines())["/jobs/a"].observation(2)
    assert seen is not None and seen.state == "Stopped" and re.fullmatch(expected, seen.note), seen


def test_a_job_that_slurm_holds_says_what_lets_it_go() -> None:
    text = LOOK.format(state="PENDING", reason="launch_failed_requeued_held", code="0:0")
    seen = read_looks(text.splitlines())["/jobs/a"].observation(2)
    assert seen is not None and seen.state == "Queued" and seen.note.endswith("holds it: `scontrol release 12`")


def test_an_attempt_that_was_never_submitted_is_unknown() -> None:
    look = read_looks(LOOK.format(state="RUNNING", reason="None", code="0:0").splitlines())["/jobs/a"]
    assert look.observation(3) is None
    assert read_looks(["job /jobs/b"])["/jobs/b"].observation(1) is None


def test_a_controller_that_is_down_is_no_failed_job() -> None:
    with pytest.raises(SilentError, match="the controller does not answer"):
        read_looks(["job /a", "submitted attempt=1", "submitted id=3", "unreachable"])["/a"].observation(1)


def test_a_log_without_line_ends_holds_no_other_up(tmp_path: Path) -> None:
    record = record_of(cluster_job())
    logs = tmp_path / JOB_ID / "log"
    logs.mkdir(parents=True)
    texts = {
        "node-0": "first\n" + "\rprogress 12%" * 60000 + "\nlast\n",
        "node-1": "é" * (2 * LOG_BYTES) + "\nlast\n",
        "node-2": "hello\nunfinished",
        "node-3": "".join(f"{number}\n" for number in range(100000)),
    }
    for host, text in texts.items():
        (logs / f"{host}.txt").write_text(text)
    backend, cursor = cluster.here_backend(tmp_path), LogCursor()
    lines: list[LogLine] = []
    reads = 0
    while cursor.more or not reads:
        block = backend.read_logs(record, cursor)
        assert sum(len(line.text.encode()) for line in block) <= LOG_BYTES
        if not reads:
            assert {line.host for line in block} == set(texts), "each log has its share"
        lines += block
        reads += 1
        assert reads < 30, cursor
    assert {line.at_ms for line in lines} == {None}, "logs have no times: when they are read is none of them"
    read = {host: [line.text for line in lines if line.host == host] for host in texts}
    assert read["node-0"].count("progress 12%") == 60000 and read["node-0"][-1] == "last"
    assert "".join(read["node-1"]) == "é" * (2 * LOG_BYTES) + "last"
    assert read["node-2"] == ["hello"], "the rest may still be written"
    assert read["node-3"] == texts["node-3"].splitlines()


def test_who_wants_the_newest_lines_begins_at_each_logs_end(tmp_path: Path) -> None:
    record = record_of(cluster_job())
    logs = tmp_path / JOB_ID / "log"
    logs.mkdir(parents=True)
    (logs / "node-0.txt").write_text("".join(f"{number:09}\n" for number in range(100_000)))
    (logs / "node-1.txt").write_text("short\n")
    backend, cursor = cluster.here_backend(tmp_path), LogCursor(from_end=True)
    lines = backend.read_logs(record, cursor)
    first, *_ = read = [int(line.text) for line in lines if line.host == "node-0"]
    assert read == list(range(first, 100_000)) and 10 * len(read) > LOG_TAIL_BYTES - 20, "but the line it begins in"
    assert [line.text for line in lines if line.host == "node-1"] == ["short"] and not cursor.more
    with (logs / "node-0.txt").open("a") as log:
        log.write("new\n")
    assert [line.text for line in backend.read_logs(record, cursor)] == ["new"]


def test_a_record_whose_backend_is_gone_says_so(record: JobRecord) -> None:
    with pytest.raises(InputError, match="ran on slurm, which tenant acme no longer has"):
        ByRecord({}).observe(record.model_copy(update={"backend": "slurm"}))


PLUGIN = """#!/bin/bash
# As Session Manager's plugin: a shell on another machine, at this terminal.
echo "${!1}" > "$(dirname "$0")/session.json"
echo "$*" > "$(dirname "$0")/arguments"
echo "Starting session with SessionId: acme-1"
cd /
exec sh -i
"""
SUDO = 'echo "$*" > "$(dirname "$0")/became"; while [ $# -gt 0 ] && [ "$1" != env ]; do shift; done; exec "$@"'
ID = 'case "$*" in *1000) echo ec2-user ;; *) echo ssm-user ;; esac'


@pytest.fixture
def login_node(tmp_path: Path, aws: Account, monkeypatch: pytest.MonkeyPatch) -> SessionShell:
    """A login node that is this machine, behind a plugin that opens a shell at the terminal that it is given."""
    plugin = tmp_path / "bin" / cluster_shell.PLUGIN
    plugin.parent.mkdir()
    # The session's user is not the one whom all machines know: scripts run as that one.
    for name, text in ((plugin.name, PLUGIN), ("sudo", f"#!/bin/sh\n{SUDO}\n"), ("id", f"#!/bin/sh\n{ID}\n")):
        (plugin.parent / name).write_text(text)
        (plugin.parent / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{plugin.parent}:{os.environ['PATH']}")
    return SessionShell(_Launcher(aws), contract_with())


class _Launcher:
    """The launcher's clients, of which those that a session takes answer as AWS documents it."""

    def __init__(self, account: Account) -> None:
        self._clients = {name: account.session.client(name) for name in ("ec2", "ssm")}
        self.stubs = {name: Stubber(client) for name, client in self._clients.items()}
        wanted = {"tenant": "acme", "environment": "test", "node": "login"}
        filters = [{"Name": f"tag:trainyard:{name}", "Values": [value]} for name, value in wanted.items()]
        filters.append({"Name": "instance-state-name", "Values": ["running"]})
        self.stubs["ec2"].add_response(
            "describe_instances",
            {"Reservations": [{"Instances": [{"InstanceId": "i-0123456789abcdef0"}]}]},
            {"Filters": filters},
        )
        self.stubs["ssm"].add_response(
            "start_session",
            {"SessionId": "acme-1", "StreamUrl": "wss://example.com/", "TokenValue": "secret"},
            {"Target": "i-0123456789abcdef0"},
        )
        for stub in self.stubs.values():
            stub.activate()

    def client(self, service: str) -> Any:
        return self._clients[service]


def test_a_session_runs_scripts_one_after_the_other(login_node: Any, tmp_path: Path) -> None:
    script = 'printf "%s|" "$@"; echo "täst"; echo "no such partition" >&2; exit 3\n' + "# long\n" * 5000
    answer = login_node.run(script, "it's", "a b", "$HOME")
    assert (answer.code, answer.out) == (3, "it's|a b|$HOME|täst\n")
    assert answer.words == "no such partition"
    # Large answers, and a second script in the same session: the stub would not open another.
    again = login_node.run("head -c 300000 /dev/zero | tr '\\0' x; echo; pwd")
    assert again.code == 0 and again.out.splitlines()[0] == "x" * 300000
    assert json.loads((tmp_path / "bin" / "session.json").read_text())["SessionId"] == "acme-1"
    arguments = (tmp_path / "bin" / "arguments").read_text()
    assert "us-east-1 StartSession" in arguments and "i-0123456789abcdef0" in arguments
    assert "secret" not in arguments, "the session's token, where everybody sees it"
    assert (tmp_path / "bin" / "became").read_text().startswith("-n -H -u ec2-user env PATH=")
    login_node.close()


def test_a_long_argument_comes_through_a_slow_line(login_node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch script is one; keys come a few ms apart through Session Manager, while the shell is at work."""
    type_at_once = login_node._type

    def type_slowly(lines: list[str], deadline: float) -> None:
        for line in lines:
            type_at_once([line], deadline)
            time.sleep(0.004)

    monkeypatch.setattr(login_node, "_type", type_slowly)
    monkeypatch.setattr(cluster_shell, "SESSION_SECONDS", 20.0)
    script = GOLDEN.read_text() + "# as long as any\n" * 2000
    answer = login_node.run('printf %s "$1" | sha256sum; echo "$2"', script, "it's")
    assert (answer.code, answer.out) == (0, f"{hashlib.sha256(script.encode()).hexdigest()}  -\nit's\n")
    login_node.close()


def test_a_session_that_takes_nothing_is_left_in_time(
    login_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typing a script counts as well: one that is longer than a terminal's buffer waited for ever."""
    (tmp_path / "bin" / cluster_shell.PLUGIN).write_text("#!/bin/sh\nexec sleep 1000\n")
    monkeypatch.setattr(cluster_shell, "SESSION_SECONDS", 1.0)
    with pytest.raises(AwsAwayError, match="gave no answer within 1 s; repeat the command"):
        login_node.run("true", random.Random(1).randbytes(400_000).hex())


def test_a_session_that_ends_is_told(login_node: Any, tmp_path: Path) -> None:
    (tmp_path / "bin" / cluster_shell.PLUGIN).write_text(
        "#!/bin/sh\necho 'SessionId: x : i-0 is not connected.'\nexit 254\n"
    )
    words = "the session on the login node of tenant acme ended: SessionId: x : i-0 is not connected."
    with pytest.raises(AwsAwayError, match=f"^{re.escape(words)}$"):
        login_node.run("true")


def test_without_plugin_or_login_node_one_line_says_what_to_do(
    aws: Account, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shell = SessionShell(aws, contract_with())
    with pytest.raises(AwsRefusedError, match="none is running; PCS starts it with the cluster"):
        shell.login_node()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="install AWS's Session Manager plugin, or run this on the cluster's login"):
        shell.run("true")


def test_a_tenants_job_goes_to_the_tenants_cluster_only(
    aws: Account, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An sbatch on the PATH may be another tenant's: what counts is whose file system is mounted."""
    for name, text in (("sbatch", "exit 0"), ("findmnt", 'cat "$(dirname "$0")/mounted"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "mounted").write_text("10.0.0.7@tcp:/abcdefgh\n")
    assert isinstance(shell_of(aws, contract_with()), HereShell)
    (tmp_path / "mounted").write_text("10.0.0.8@tcp:/zyxwvuts\n")
    assert isinstance(shell_of(aws, contract_with()), SessionShell)
    (tmp_path / "mounted").write_text("")
    assert isinstance(shell_of(aws, contract_with()), SessionShell)


def test_on_the_login_node_scripts_run_as_the_owner_of_its_files(
    aws: Account, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who is in a session there is ssm-user, whom the other machines don't know."""
    commands = {"sbatch": "exit 0", "findmnt": "echo 10.0.0.7@tcp:/abcdefgh", "id": ID, "sudo": SUDO}
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm of ours")
    shell = shell_of(aws, contract_with())
    answer = shell.run('printf "%s|" "$@" "$SLURM_CONF"; exit 3', "it's", "a b")
    assert (answer.code, answer.out) == (3, "it's|a b|/etc/slurm of ours|"), answer
    became = (tmp_path / "became").read_text()
    assert became.startswith("-n -H -u ec2-user env PATH=") and "SLURM_CONF=/etc/slurm of ours bash" in became
    (tmp_path / "became").unlink()
    assert HereShell().run("true").code == 0 and not (tmp_path / "became").exists(), "a person's own cluster"
    (tmp_path / "sudo").write_text("#!/bin/sh\necho 'sudo: a password is required' >&2\nexit 1\n")
    assert shell.run("true").words == "run it as ec2-user, whose the cluster's files are"


def test_no_slurm_here_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cluster, "has_slurm_here", lambda: False)
    with pytest.raises(InputError, match="there is no `sbatch` on the PATH here"):
        cluster.launch_on_slurm_here(cluster_job(), tmp_path)


def test_a_look_at_a_job_that_ends_meanwhile_tells_no_end_without_its_words(tmp_path: Path) -> None:
    """The script writes its last event, then its outcome: whoever reads them the other way round may miss the first."""
    (tmp_path / "submitted").write_text("attempt=1\nid=7\n", encoding="utf-8")
    os.mkfifo(tmp_path / "events")
    looking = subprocess.Popen(
        ["bash", "-c", slurm_backend._LOOK, "look", str(tmp_path)],
        env={"PATH": "/usr/bin:/bin"},  # no Slurm there
        stdout=subprocess.PIPE,
        text=True,
    )
    with (tmp_path / "events").open("w", encoding="utf-8") as events:  # opens when it is read
        (tmp_path / "outcome").write_text("attempt=1\nstate=Stopped\nseconds=1\nfailure=\n", encoding="utf-8")
        events.write("1\tTraining\t2026-01-31T12:00:00Z\tnode1, start 1\n")
    told = looking.communicate(timeout=60)[0]
    look = read_looks(told.splitlines())[str(tmp_path)]
    assert [event.state for event in look.events] == ["Training"]
    assert look.outcome == {}, "it is looked at again"
