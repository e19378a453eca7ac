"""The verbs on a job, one after the other, as a person and as a program use them."""

import errno
import io
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_testing import IMAGE, job_content, record_without_tenant
from rich.console import Console

from trainyard.cli import jobs, live
from trainyard.cli.app import run
from trainyard.cli.checkpoints import destination_of
from trainyard.cli.live import follow
from trainyard.cli.seen import Seen
from trainyard.errors import AwsAwayError, AwsRefusedError, InputError, JobFailedError
from trainyard.launch import place as place_module
from trainyard.launch import watch
from trainyard.launch.backend import LogCursor, LogLine, Observation
from trainyard.launch.backends import ByRecord
from trainyard.launch.local_backend import LocalBackend
from trainyard.launch.place import place_of
from trainyard.launch.ray_jobs import HttpJobServer
from trainyard.launch.record import FolderRecordStore, JobRecord, update
from trainyard.launch.session import Account
from trainyard.launch.watch import Status
from trainyard.operate import following
from trainyard.spec.job import JobSpec, ResolvedJob
from trainyard.spec.platform import TenantContract


@pytest.fixture
def job_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_content()), encoding="utf-8")
    return str(path)


def output_of(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert run(arguments) == code
    return capsys.readouterr().out


def launch_json(job_path: str, environment: str, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    launched: dict[str, Any] = json.loads(output_of(["launch", job_path, "-e", environment, "--json", *more], capsys))
    return launched


def test_launch_status_jobs_checkpoints(
    job_path: str,
    environment_path: Path,
    deployed: Account,
    contract: TenantContract,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # globex is in the environment file too: `jobs` lists every tenant.
    other = contract.model_copy(update={"tenant": "globex"})
    deployed.client("ssm").put_parameter(
        Name="/trainyard/test/globex/contract", Value=other.model_dump_json(), Type="String"
    )
    where = str(environment_path)
    launched = launch_json(job_path, where, capsys, "--set", "training.steps=7")
    job_id = launched["job_id"]
    assert launched["state"] == "Submitted" and launched["tenant"] == "acme"
    described = deployed.client("sagemaker").describe_training_job(TrainingJobName=job_id)
    assert described["AlgorithmSpecification"]["TrainingImage"] == IMAGE

    status = json.loads(output_of(["status", job_id, "-e", where, "--json"], capsys))
    assert (status["job_id"], status["state"], status["finished"]) == (job_id, "Completed", True)
    assert job_id in output_of(["status", job_id, "-e", where], capsys)
    assert job_id in output_of(["jobs", "-e", where, "-t", "acme"], capsys)
    assert [
        item["job_id"] for item in json.loads(output_of(["jobs", "-e", where, "-t", "acme", "--json"], capsys))
    ] == [job_id]

    assert json.loads(output_of(["checkpoints", job_id, "-e", where, "--json"], capsys)) == []
    s3 = deployed.client("s3")
    for key in ("step-00000005/shard-0", "step-00000005/COMMITTED", "step-00000010/shard-0"):
        s3.put_object(Bucket=contract.buckets.checkpoints, Key=f"jobs/{job_id}/checkpoints/{key}", Body=b"12345678")
    found = json.loads(output_of(["checkpoints", job_id, "-e", where, "--json"], capsys))
    assert [(item["step"], item["committed"], item["size_bytes"]) for item in found] == [(5, True, 16), (10, False, 8)]
    assert "torn" in output_of(["checkpoints", job_id, "-e", where], capsys)


def test_a_resume_is_advised_with_where_it_would_begin(
    job_path: str,
    environment_path: Path,
    deployed: Account,
    contract: TenantContract,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = str(environment_path)
    job_id = launch_json(job_path, where, capsys)["job_id"]
    seen = Observation("Failed", failure="the disk is gone")
    monkeypatch.setattr(ByRecord, "observe", lambda *_: seen)

    def told() -> str:
        document = json.loads(output_of(["status", job_id, "-e", where, "--json"], capsys))
        printed = output_of(["status", job_id, "-e", where], capsys)
        assert "".join(document["advice"].split()) in "".join(printed.split())
        return str(document["advice"])

    assert (
        f"trainyard resume {job_id} " in told() and "starts it from its first step, as it has no checkpoint" in told()
    )
    s3 = deployed.client("s3")
    for name in ("shard-0", "COMMITTED"):
        key = f"jobs/{job_id}/checkpoints/step-00000005/{name}"
        assert "from its first step" in told(), "a torn one is none"
        s3.put_object(Bucket=contract.buckets.checkpoints, Key=key, Body=b"12345678")
    assert told().endswith("starts it from its newest checkpoint")
    monkeypatch.setattr("trainyard.launch.checkpoints.open_files", refuse)
    assert "(without one, from its first step)" in told(), "a status does not fail for it"
    seen = Observation("Training")
    assert "resume" not in told()


def refuse(*_: object) -> None:
    raise AwsRefusedError("no")


def test_a_tenant_that_cannot_be_opened_hides_no_job_of_another(
    job_path: str, environment_path: Path, deployed: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not deployed yet, or not this person's: who has one tenant of a company's many got no list at all."""
    where = str(environment_path)
    job_id = launch_json(job_path, where, capsys)["job_id"]
    assert run(["jobs", "-e", where, "--json"]) == 0
    said = capsys.readouterr()
    assert [job["job_id"] for job in json.loads(said.out)] == [job_id]
    (line,) = said.err.strip().splitlines()
    assert line.startswith("warning: tenant globex is left out: SSM parameter /trainyard/test/globex/contract doesn't")
    assert run(["jobs", "-e", where, "-t", "globex"]) == 3
    deployed.client("ssm").delete_parameter(Name="/trainyard/test/acme/contract")
    assert run(["jobs", "-e", where]) == 3, "none can be opened"
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 2 and "warning" not in said.err
    of_globex, of_both = said.err.splitlines()
    assert "tenant globex: " not in of_globex and "acme" not in of_globex, "who asks for one hears of that one"
    assert "no tenant can be opened: tenant acme: SSM parameter /trainyard/test/acme/contract doesn't" in of_both
    assert "; tenant globex: SSM parameter /trainyard/test/globex/contract doesn't" in of_both


def test_what_hinders_all_tenants_is_told_once(
    environment_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AwsAwayError("AWS can't be reached")

    monkeypatch.setattr("trainyard.launch.place.open_tenant", refuse)
    assert run(["jobs", "-e", str(environment_path)]) == 3
    assert capsys.readouterr().err.count("AWS can't be reached") == 1


@pytest.mark.parametrize("backend", ["local", "slurm", "kubernetes", "ray"])
@pytest.mark.parametrize(("setting", "value"), [("keep_alive_minutes", 30), ("training_plan", "plan-a")])
def test_what_sagemaker_alone_has_stays_there_when_a_job_is_moved(
    job_path: str, tmp_path: Path, backend: str, setting: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """What its file states, and a line says so; who sets it for this launch is refused, as it was dropped unheard."""
    content = yaml.safe_load(Path(job_path).read_text())
    plain = {name: stated for name, stated in content["compute"].items() if name not in ("spot", "max_wait_hours")}
    path, other = tmp_path / "moved.yaml", tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump(content | {"compute": plain | {setting: value}}))
    other.write_text(yaml.safe_dump(content | {"compute": plain}))
    moved = jobs.load_for_backend(path, [], backend).compute
    assert (moved.backend, getattr(moved, setting)) == (backend, None)
    (told,) = capsys.readouterr().err.splitlines()
    assert told == f"note: {path}: compute.{setting} left out: SageMaker alone has it, and the job goes to {backend}"
    for file in (path, other):
        with pytest.raises(InputError, match=f"{setting} is SageMaker's: needs backend: sagemaker"):
            jobs.load_for_backend(file, [f"compute.{setting}={value}"], backend)
    capsys.readouterr()
    jobs.load_for_backend(other, [], backend)
    for same in (None, "sagemaker"):
        assert getattr(jobs.load_for_backend(path, [], same).compute, setting) == value
    assert capsys.readouterr().err == "", "nothing was left out"


def test_what_is_set_of_machines_and_this_one_has_not_is_told(
    job_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file may name them, for elsewhere; who sets them for this launch took them for used."""
    jobs.load_for_backend(Path(job_path), [], "local")
    jobs.load_for_backend(Path(job_path), ["compute.instance_count=1", "compute.spot=false"], "local")
    assert capsys.readouterr().err == ""
    given = ["compute.instance_type=ml.p5.48xlarge", "compute.instance_count=2", "recovery.elastic.min_instances=1"]
    moved = jobs.load_for_backend(Path(job_path), [*given, "training.steps=3"], "local")
    assert (moved.compute.instance_type, moved.compute.instance_count, moved.training.steps) == (None, 1, 3)
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(" changes nothing: --backend local is one host")[0] for line in told] == [
        f"note: --set {one}" for one in given
    ]
    assert told[1].endswith("; --processes N says how many ranks")


def test_launch_says_on_how_many_instances_an_elastic_job_may_go_on(
    job_path: str, environment_path: Path, deployed: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = ["launch", job_path, "-e", str(environment_path), "--set", "recovery.max_resumes=2"]
    limits = "recovery.elastic={min_instances: 1, max_instances: 4}"
    wide = ["--set", "compute.instance_count=4", "--set", "parallelism=auto", "--set", limits, "--force"]
    assert "  without capacity for 4 instances it goes on with 2, then 1\n" in output_of([*launch, *wide], capsys)
    # Three machines don't divide the batch of eight: said before anything is written.
    narrow = [*wide[:-2], "recovery.elastic={min_instances: 3, max_instances: 4}", "--force"]
    assert run([*launch, *narrow]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "recovery.elastic.min_instances 3: no number of instances from 3 to 3 can run this job" in told
    records = output_of(["jobs", "-e", str(environment_path), "-t", "acme", "--json"], capsys)
    assert len(json.loads(records)) == 1
    # This machine has one host, whatever the limits.
    assert jobs.load_for_backend(Path(job_path), [limits.replace("1,", "2,")], "local").recovery.elastic is None


def test_a_job_that_nobody_can_follow_from_here_is_launched_once(
    job_path: str,
    environment_path: Path,
    deployed: Account,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """What is known before is refused before; what turns out later is a warning, and no error of the launch."""
    tracked = ["launch", job_path, "-e", str(environment_path), "--set", "tracking.mlflow=http://127.0.0.1:9"]
    (tmp_path / "state").mkdir()
    # Rights don't stop root: the kernel's own folder takes nobody's files.
    (tmp_path / "state" / "tracking").symlink_to("/sys")
    assert run(tracked) == 2
    said = capsys.readouterr()
    assert said.out == "" and f"the state folder {tmp_path}/state: can't be written" in said.err
    assert json.loads(output_of(["jobs", "-e", str(environment_path), "-t", "acme", "--json"], capsys)) == []
    (tmp_path / "state" / "tracking").unlink()

    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(following.subprocess, "Popen", refuse)
    assert run([*tracked, "--json"]) == 0
    said = capsys.readouterr()
    job_id = json.loads(said.out)["job_id"]
    assert f"warning: job {job_id} is Submitted, but its trackers aren't told" in said.err
    deployed.client("sagemaker").describe_training_job(TrainingJobName=job_id)


def test_a_completed_job_neither_stops_nor_resumes(
    job_path: str, environment_path: Path, deployed: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = launch_json(job_path, str(environment_path), capsys)["job_id"]
    for verb, ended in {"resume": "completed", "stop": "ended already (Completed)"}.items():
        assert run([verb, job_id, "-e", str(environment_path)]) == 2
        assert f"job {job_id}: has {ended}; there is nothing to {verb}" in capsys.readouterr().err


def test_wait_ends_with_the_jobs_own_result(
    job_path: str,
    environment_path: Path,
    deployed: Account,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = launch_json(job_path, str(environment_path), capsys, "--wait")
    assert launched["state"] == "Completed"

    failed = Observation("Failed", failure="CapacityError: no ml.p5.4xlarge")
    monkeypatch.setattr("trainyard.launch.sagemaker_backend.SageMakerBackend.observe", lambda *_: failed)
    more = ("--set", "recovery.max_resumes=1", "--json")
    assert run(["launch", job_path, "-e", str(environment_path), "--wait", *more]) == 1
    told = capsys.readouterr()
    assert "Failed: CapacityError: no ml.p5.4xlarge\n" in told.err
    assert "tenant acme submits directly and has no resumer" in told.err
    place = place_of(json.loads(told.out)["job_id"], str(environment_path), None)
    record = place.store.read(json.loads(told.out)["job_id"]).record
    with pytest.raises(JobFailedError, match=r"no ml\.p5\.4xlarge; the tenant's resumer may start it again"):
        jobs.require_completed(replace(place, has_resumer=True), record)


def test_stop_ends_with_how_the_job_ended(
    job_path: str,
    environment_path: Path,
    deployed: Account,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = str(environment_path)
    job_id = launch_json(job_path, where, capsys)["job_id"]
    backend = "trainyard.launch.sagemaker_backend.SageMakerBackend"
    seen = [Observation("Training"), Observation("Stopping"), Observation("Stopped")]
    monkeypatch.setattr(f"{backend}.stop", lambda *_: None)
    monkeypatch.setattr(f"{backend}.observe", lambda *_: seen.pop(0) if len(seen) > 1 else seen[0])
    stopping = json.loads(output_of(["stop", job_id, "-e", where, "--json"], capsys))
    assert (stopping["job_id"], stopping["state"], stopping["finished"]) == (job_id, "Stopping", False)

    seen[:] = [Observation("Training"), Observation("Stopping"), Observation("Stopped")]
    stopped = json.loads(output_of(["stop", job_id, "-e", where, "--wait", "--json"], capsys))
    assert (stopped["state"], stopped["finished"]) == ("Stopped", True)

    seen[:] = [Observation("Training"), Observation("Stopping"), Observation("Failed", failure="OSError: disk full")]
    assert run(["stop", job_id, "-e", where, "--wait"]) == 1
    assert f"job {job_id}: Failed: OSError: disk full" in capsys.readouterr().err


def test_jobs_are_listed_in_their_present_state(
    job_path: str, environment_path: Path, deployed: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(environment_path)
    job_id = launch_json(job_path, where, capsys)["job_id"]  # moto completes it at once; its record says Submitted
    (listed,) = json.loads(output_of(["jobs", "-e", where, "-t", "acme", "--json"], capsys))
    assert (listed["job_id"], listed["state"], listed["finished"]) == (job_id, "Completed", True)
    table = output_of(["jobs", "-e", where, "-t", "acme"], capsys)
    assert "Completed" in table and "Submitted" not in table


def test_a_cluster_that_is_away_hides_no_other_job(
    job_path: str,
    environment_path: Path,
    deployed: Account,
    contract: TenantContract,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There is no login node here, nor perhaps the plugin to reach one."""
    where = str(environment_path)
    content = contract.model_dump(mode="json")
    content["version"] = 3
    content["cluster"] = {"engine": "pcs", "id": "pcs_a", "queues": {"train": ["p5.48xlarge"]}, "login_tag": "login"}
    with_cluster = TenantContract.model_validate(content)
    deployed.client("ssm").put_parameter(
        Name="/trainyard/test/acme/contract", Value=with_cluster.model_dump_json(), Type="String", Overwrite=True
    )
    there = launch_json(job_path, where, capsys)["job_id"]
    store = place_of(there, where, "acme").store
    record = store.read(launch_json(job_path, where, capsys)["job_id"]).record
    away = "acme-tiny-20990131120000-1a2b"
    store.create(record.model_copy(update={"job_id": away, "backend": "slurm"}))
    assert run(["jobs", "-e", where, "-t", "acme", "--json"]) == 0
    said = capsys.readouterr()
    states = {job["job_id"]: job["state"] for job in json.loads(said.out)}
    assert (states[there], states[away]) == ("Completed", record.state)
    (line,) = said.err.strip().splitlines()
    assert line.startswith("warning: slurm of tenant acme was not asked, so its jobs are as last seen: ")


def test_a_ray_that_is_gone_hides_no_job_of_another(
    job_path: str,
    environment_path: Path,
    deployed: Account,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = str(environment_path)
    first = launch_json(job_path, where, capsys)["job_id"]
    store = place_of(first, where, "acme").store
    record = store.read(first).record
    for number, address in enumerate(("http://10.0.0.1:8265", "http://10.0.0.2:8265")):
        compute = record.resolved.spec.compute
        ray = compute.ray.model_copy(update={"address": address})
        spec = record.resolved.spec.model_copy(update={"compute": compute.model_copy(update={"ray": ray})})
        changes = {"job_id": f"acme-ray-2099013112000{number}-1a2b", "backend": "ray"}
        resolved = record.resolved.model_copy(update={"spec": spec})
        store.create(record.model_copy(update={**changes, "resolved": resolved}))

    def jobs(_: HttpJobServer, address: str) -> list[dict[str, str]]:
        if "10.0.0.1" in address:
            raise InputError(f"{address}: no job server answers")
        return [{"submission_id": record.attempt.training_job_name, "status": "SUCCEEDED"}]

    monkeypatch.setattr(HttpJobServer, "jobs", jobs)
    assert run(["jobs", "-e", where, "-t", "acme", "--json"]) == 0
    said = capsys.readouterr()
    states = {job["job_id"]: job["state"] for job in json.loads(said.out)}
    assert states["acme-ray-20990131120001-1a2b"] == "Completed"
    assert states["acme-ray-20990131120000-1a2b"] == record.state
    (line,) = said.err.strip().splitlines()
    assert "ray of tenant acme was not asked" in line and "10.0.0.1:8265: no job server answers" in line


def test_a_record_that_cannot_be_read_hides_no_other_job(
    job_path: str,
    environment_path: Path,
    deployed: Account,
    contract: TenantContract,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A later trainyard's, half of one, and a folder that is no job: newer than all others, they take nobody's line."""
    where = str(environment_path)
    job_id = launch_json(job_path, where, capsys)["job_id"]
    later, half, none = (f"acme-tiny-2099013112000{second}-1a2b" for second in range(3))
    s3, bucket = deployed.client("s3"), contract.buckets.data
    s3.put_object(Bucket=bucket, Key=f"jobs/{later}/record.json", Body=b'{"version": 99}')
    s3.put_object(Bucket=bucket, Key=f"jobs/{half}/record.json", Body=b'{"vers')
    s3.put_object(Bucket=bucket, Key=f"jobs/{none}/notes.txt", Body=b"mine")
    assert run(["jobs", "-e", where, "-t", "acme", "--limit", "1", "--json"]) == 0
    said = capsys.readouterr()
    assert [job["job_id"] for job in json.loads(said.out)] == [job_id]
    told = dict(zip((none, half, later), said.err.strip().splitlines(), strict=True))
    assert all(f"{name} is left out: " in line and line.startswith("warning: ") for name, line in told.items())
    assert "it has no record" in told[none] and "is not JSON" in told[half] and "upgrade it" in told[later]
    assert job_id in output_of(["jobs", "-e", where, "-t", "acme"], capsys)

    s3.delete_object(Bucket=bucket, Key=f"jobs/{job_id}/record.json")
    assert "no jobs yet" not in output_of(["jobs", "-e", where, "-t", "acme"], capsys), "there may be, in those"


def test_logs_go_on_over_a_read_without_lines(
    job_path: str,
    environment_path: Path,
    deployed: Account,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = str(environment_path)
    job_id = launch_json(job_path, where, capsys)["job_id"]
    meters = '{"_aws":{"Timestamp":1}}'  # for CloudWatch alone
    reads = [["one", meters], [], ["two"]]

    def read_logs(_: object, __: object, cursor: LogCursor) -> list[LogLine]:
        texts = reads.pop(0)
        cursor.more = bool(reads)
        return [LogLine("algo-1", text, 0) for text in texts]

    monkeypatch.setattr("trainyard.launch.sagemaker_backend.SageMakerBackend.read_logs", read_logs)
    assert output_of(["logs", job_id, "-e", where], capsys) == "algo-1 one\nalgo-1 two\n"
    reads[:] = [["one", meters], [], ["two"]]
    assert output_of(["logs", job_id, "-e", where, "--follow"], capsys) == "algo-1 one\nalgo-1 two\n"


def test_the_emulators_types_need_no_emulator(job_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = json.loads(output_of(["emulator", "types", "--json"], capsys))
    assert known["AWS::KMS::Key"] == "api-backed"


def test_two_who_resume_a_local_job_at_once(
    job_path: str,
    environment_path: Path,
    deployed: Account,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = str(environment_path)
    job_id = launch_json(job_path, where, capsys)["job_id"]
    monkeypatch.setattr(
        "trainyard.launch.sagemaker_backend.SageMakerBackend.observe", lambda *_: Observation("Stopped")
    )
    first = watch.update

    def other_first(store: Any, job: str, change: Any) -> Any:
        if "next_attempt" in change.__qualname__:
            stored = store.read(job)
            store.replace(stored, stored.record.with_next_attempt())
        return first(store, job, change)

    monkeypatch.setattr(watch, "update", other_first)
    assert run(["resume", job_id, "-e", where]) == 2
    assert "somebody else has just resumed it" in capsys.readouterr().err


def test_plan_and_predict_speak_json(
    job_path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = json.loads(output_of(["plan", job_path, "--json"], capsys))
    assert plan["job"] == "tiny" and plan["configurations"]
    configuration = {"model": "llama-3.1-8b", "gpu": "H100", "gpus": 8, "global_batch": 64, "seq": 4096}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(configuration) + "\nnonsense\n"))
    lines = output_of(["predict", "--jsonl"], capsys, code=2).splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0])["peak_memory_gib"] > 0
    assert "error" in json.loads(lines[1])


def test_interrupting_is_quiet(
    job_path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainyard.planner.plan", interrupt)
    assert run(["plan", job_path]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_step_line_is_understood() -> None:
    seen = Seen()
    line = "step=12 loss=3.2145 learning_rate=0.001 tokens=2048 tokens_per_second=1590.4 step_seconds=1.2"
    assert seen.read(LogLine("algo-1", line, 0))
    assert str(seen) == "step 12  loss 3.2145  1,590 tokens/s"
    assert not seen.read(LogLine("algo-1", "checkpoint step=10 committed uri=x", 0))
    assert seen.step == 12


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_following_shows_steps_states_and_checkpoints(
    job_path: str,
    environment_path: Path,
    deployed: Account,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
) -> None:
    job_id = launch_json(job_path, str(environment_path), capsys)["job_id"]

    place = place_of(job_id, str(environment_path), None)
    record = place.store.read(job_id).record

    def script(*_: object, **__: object) -> Iterator[tuple[Status, list[LogLine]]]:
        training = LogLine("algo-1", "step=3 loss=2.5 tokens_per_second=10.0", 0)
        saved = LogLine("algo-1", "checkpoint step=3 committed uri=s3://x", 1)
        yield _status(record, "Training"), [training, saved, LogLine("algo-1", "[a] noise", 2)]
        yield _status(record.with_attempt(reclaims=1), "Training"), []
        deadline = time.monotonic() + 120  # a look at AWS takes a while: the spinner's own thread draws meanwhile
        while told not in shown.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
        yield _status(record, "Completed"), []

    told = "3 of 20" if terminal else "step 3  loss 2.5  10 tokens/s"
    shown = io.StringIO()
    monkeypatch.setattr(watch, "watch", script)
    monkeypatch.setattr(
        live, "console", lambda **_: Console(file=shown, force_terminal=terminal, width=200, highlight=False)
    )
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    assert follow(place, job_id, quiet=False).state == "Completed"
    text = shown.getvalue()
    assert told in text
    assert "checkpoint step=3 committed" in text
    assert "Training" in text
    assert "noise" not in text
    assert text.count("spot capacity reclaimed") == 1


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
@pytest.mark.parametrize("verb", ["stop", "resume", "watch"])
def test_who_waits_for_a_stop_or_a_resume_is_not_shown_what_was_said_before(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    job: JobSpec,
    resolved: ResolvedJob,
    verb: str,
    terminal: bool,
) -> None:
    """Of a job of this machine all attempts' lines are in one file: 100,000 steps were shown once more."""

    class Machine:
        """Two reads to the end of what is there, then a third."""

        reads, is_started = 0, verb != "resume"

        def observe(self, _: JobRecord) -> Observation:
            return Observation("Training" if self.is_started and self.reads < 3 else "Stopped")

        def read_logs(self, _: JobRecord, cursor: LogCursor) -> list[LogLine]:
            self.reads += 1
            cursor.more = self.reads == 1
            texts = [f"step={self.reads} loss=2.5", f"checkpoint step={self.reads} committed uri=x"]
            return [LogLine("local", text, None) for text in (texts if self.reads <= 3 else [])]

        def stop(self, _: JobRecord) -> None: ...

        def check(self, _: JobRecord) -> None: ...

        def submit(self, *_: object) -> None:
            self.is_started, self.reads = True, 2  # however often what was there has been read until now

    machine, shown = Machine(), io.StringIO()
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path))
    record = record_without_tenant(job, resolved).with_attempt(submitted_at="2026-01-31T12:00:00+00:00")
    FolderRecordStore(tmp_path / "jobs").create(record)
    monkeypatch.setattr(place_module, "LocalBackend", lambda _: machine)
    monkeypatch.setattr(live, "console", lambda **_: Console(file=shown, width=200, highlight=False))
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert run([verb, record.job_id, *(["--wait"] if verb != "watch" else [])]) == (0 if verb == "stop" else 1)
    text, all_of_it = shown.getvalue(), verb == "watch"
    assert [f"checkpoint step={step} committed" in text for step in (1, 2, 3)] == [all_of_it, all_of_it, True]
    if not terminal:
        assert [f"step {step}  loss" in text for step in (1, 2, 3)] == [all_of_it, all_of_it, True]


@pytest.mark.parametrize("verb", ["logs --follow", "watch"])
def test_who_follows_a_job_over_a_resume_is_shown_each_line_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    job: JobSpec,
    resolved: ResolvedJob,
    verb: str,
) -> None:
    """Both attempts write to one file; the first one's end fell between two looks."""
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path))
    store = FolderRecordStore(tmp_path / "jobs")
    record = record_without_tenant(job, resolved).with_attempt(submitted_at="2026-01-31T12:00:00+00:00")
    store.create(record)
    looks: list[int] = []

    class Machine(LocalBackend):
        def observe(self, record: JobRecord) -> Observation:
            looks.append(record.attempt.number)
            with (tmp_path / "jobs" / record.job_id / "log.txt").open("a") as log:
                log.write(f"step={len(looks)} loss=2.5\n")
            if len(looks) == 2:
                update(
                    store,
                    record.job_id,
                    lambda now: now.with_next_attempt().with_attempt(submitted_at=now.attempt.created_at),
                )
            return Observation("Training" if len(looks) < 5 else "Completed")

    monkeypatch.setattr(place_module, "LocalBackend", Machine)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert run([*verb.split()[:1], record.job_id, *verb.split()[1:]]) == 0
    printed = capsys.readouterr()
    steps = re.findall(r"step[ =](\d+) ", printed.out if "logs" in verb else printed.err)
    assert (looks, steps) == ([1, 1, 2, 2, 2], ["1", "2", "3", "4", "5"])


def _status(record: JobRecord, state: str) -> Status:
    return Status(record, Observation(state))


def test_an_export_looks_for_the_tokenizer_where_the_jobs_record_has_it(
    job_path: str, environment_path: Path, deployed: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(environment_path)
    job_id = launch_json(job_path, where, capsys)["job_id"]
    tokenizer = "s3://acme-data/sets/tokenizer.json"
    assert destination_of(job_id, where, None).beside == (tokenizer,)
