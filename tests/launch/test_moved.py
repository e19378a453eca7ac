"""A job whose folder was moved or copied, with the checkout that it was launched from, most often."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launch_testing import LOCAL_JOB_ID as JOB_ID
from launch_testing import job_content, record_without_tenant

from trainyard.cli.app import run
from trainyard.errors import InputError
from trainyard.launch.checkpoints import has_any
from trainyard.launch.launcher import with_destination
from trainyard.launch.moved import moved_to, refused_resume
from trainyard.launch.place import local_place
from trainyard.launch.record import FolderRecordStore, JobRecord
from trainyard.operate.course import newest_rows
from trainyard.operate.runbooks.evidence import gather
from trainyard.spec.backends import BackendName
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec

COMPUTE: dict[BackendName, dict[str, Any]] = {
    "local": {"backend": "local"},
    "slurm": {"backend": "slurm", "instance_type": "p5.48xlarge", "max_hours": 2},
    "ray": {"backend": "ray", "instance_type": "p5.48xlarge", "ray": {"address": "http://127.0.0.1:9"}},
}


def record_at(backend: BackendName, destination: Path, compute: dict[str, Any]) -> JobRecord:
    content = job_content() | {"tenant": None, "parallelism": "auto", "compute": COMPUTE[backend] | compute}
    job = parse(JobSpec, content, "job")
    resolved = with_destination(job, str(destination), world_size=1 if backend == "local" else None)
    return record_without_tenant(job, resolved, backend)


def saved(folder: Path) -> None:
    """A checkpoint that can be listed, and is not whole."""
    (folder / "checkpoints/step-00000005").mkdir(parents=True)
    (folder / "checkpoints/step-00000005/COMMITTED").write_text("{}")


def told(record: JobRecord) -> str:
    """What whoever starts that attempt is told; where nothing is wrong with the job itself, no cluster answers here."""
    try:
        local_place().backend.check(record)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("inside", ["", "ck/kept"])
@pytest.mark.parametrize("backend", ["local", "slurm", "ray"])
def test_it_is_seen_and_not_begun_anew(
    backend: BackendName,
    inside: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, now = tmp_path / "before", tmp_path / "now there"
    known = before / "jobs" / JOB_ID / inside
    record = record_at(backend, known, {})
    FolderRecordStore(before / "jobs").create(record)
    saved(known)
    before.rename(now)
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(now))
    assert run(["checkpoints", JOB_ID, "--json"]) == 0
    (seen,) = json.loads(capsys.readouterr().out)
    assert (seen["step"], seen["uri"]) == (5, f"{now / 'jobs' / JOB_ID / inside}/checkpoints/step-00000005/")
    moved = f"its checkpoints are in {now / 'jobs' / JOB_ID / inside}, and its record says {known}"
    assert moved in told(record.with_next_attempt())
    assert moved not in told(record), "the first attempt has nothing to go on from"
    assert "; move it back, or link it: mkdir -p " in told(record.with_next_attempt())
    known.mkdir(parents=True)
    refusal = told(record.with_next_attempt())
    assert "; move it back, or move what is there away, and then link it: " in refusal
    shutil.rmtree(before)
    subprocess.run(["sh", "-c", refusal.partition("link it: ")[2]], check=True)
    assert moved not in told(record.with_next_attempt())
    assert "was copied" not in told(record.with_next_attempt())


@pytest.mark.parametrize("backend", ["local", "slurm", "ray"])
def test_a_copy_of_its_folder_does_not_go_on_in_the_first_ones_place(
    backend: BackendName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job may run there: its copy's resume was taken for a start of the same job, and both wrote to one place."""
    known = tmp_path / "first/jobs" / JOB_ID
    record = record_at(backend, known, {}).with_next_attempt()
    FolderRecordStore(tmp_path / "first/jobs").create(record)
    saved(known)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "copy"))
    copied = "its folder was copied, and both would save to one place; resume it from where it was, or launch a job"
    assert f"{known} by its record, and there are some in {tmp_path}/copy/jobs/{JOB_ID} too: {copied}" in told(record)
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "first"))
    assert copied not in told(record)
    kept = record_at(backend, tmp_path / "kept", {}).with_next_attempt()
    saved(tmp_path / "kept")
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "copy"))
    assert copied not in told(kept), "a stated place is the job's wherever its records are"


def test_it_is_found_where_its_clusters_folder_was_moved_and_is_named_anew(tmp_path: Path) -> None:
    record = record_at("slurm", tmp_path / "shared" / JOB_ID, {"slurm": {"directory": str(tmp_path / "shared")}})
    saved(tmp_path / "shared" / JOB_ID)
    assert refused_resume(record.with_next_attempt(), tmp_path / "jobs") == []
    (tmp_path / "shared").rename(tmp_path / "lustre")
    revised = record_at("slurm", tmp_path / "shared" / JOB_ID, {"slurm": {"directory": str(tmp_path / "lustre")}})
    (reason,) = refused_resume(revised.with_next_attempt(), tmp_path / "jobs")
    assert f"its checkpoints are in {tmp_path}/lustre/{JOB_ID}, and its record says {tmp_path}/shared" in reason


def test_where_it_was_may_be_another_users(tmp_path: Path) -> None:
    """Who brings somebody's job here sees what lies here, whatever is known of the place of before."""
    saved(tmp_path / "jobs" / JOB_ID)
    (tmp_path / "home").write_text("a folder that may not be looked into raises as this does")
    (tmp_path / "loop").symlink_to("loop")
    for known in (tmp_path / "home" / JOB_ID, tmp_path / "loop" / JOB_ID, Path("/", "x" * 300, JOB_ID)):
        assert moved_to(record_at("local", known, {}), tmp_path / "jobs") == tmp_path / "jobs" / JOB_ID


def test_of_a_place_that_is_gone_nobody_says_that_there_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk isn't mounted: `status` advised a resume from the first step, which the trainer would refuse."""
    place = tmp_path / "[red]disk" / ("long " * 30)
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))
    FolderRecordStore(tmp_path / "state/jobs").create(record_at("local", place, {}))
    for verb in ("list", "verify"):
        assert run(["checkpoints", verb, JOB_ID]) == 0
        assert capsys.readouterr().out == f"no checkpoint: there is no {place}\n"
    assert has_any(str(place), None) is None
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "earlier"))
    FolderRecordStore(tmp_path / "earlier/jobs").create(record_at("ray", Path("kept/here"), {}))
    assert run(["checkpoints", JOB_ID]) == 0
    assert f"there is no kept/here in {Path.cwd()}, and its record, an earlier trainyard's" in capsys.readouterr().out
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))
    place.mkdir(parents=True)
    assert run(["checkpoints", JOB_ID]) == 0 and capsys.readouterr().out == "no checkpoint yet\n"
    assert has_any(str(place), None) is False


def test_a_slurm_jobs_record_of_before_has_its_place_in_the_jobs_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier trainyards noted a relative path as it was stated; the batch script goes to that folder first."""
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    record = record_at("slurm", Path("kept/here"), {})
    FolderRecordStore(tmp_path / "jobs").create(record)
    for folder in (tmp_path / "jobs" / JOB_ID, tmp_path):  # and another job's, where this is asked
        saved(folder / "kept/here")
    assert run(["checkpoints", JOB_ID, "--json"]) == 0
    (seen,) = json.loads(capsys.readouterr().out)
    assert seen["uri"] == f"{tmp_path}/jobs/{JOB_ID}/kept/here/checkpoints/step-00000005/"
    assert refused_resume(record.with_next_attempt(), tmp_path / "jobs") == []


def test_what_it_measured_is_seen_where_its_folder_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`status` told of no goodput, `compare`, `report` and the runbooks of no figures."""
    before, now = tmp_path / "before/jobs", tmp_path / "now/jobs"
    FolderRecordStore(before).create(record_at("local", before / JOB_ID, {}))
    saved(before / JOB_ID)
    rows = [{"start": {"attempt": 1, "at": 0.0}}, {"totals": {"steps": 5, "useful_seconds": 7.5, "save_seconds": 0}}]
    (before / JOB_ID / "goodput.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (before / JOB_ID / "metrics.jsonl").write_text('{"step": 5, "loss": 2.5, "step_seconds": 1.5, "tokens": 9}\n')
    (tmp_path / "before").rename(tmp_path / "now")
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "now"))
    assert run(["status", JOB_ID, "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["goodput"]["useful_seconds"] == 7.5 and seen["checkpoint_destination"] == str(now / JOB_ID)
    assert run(["compare", JOB_ID, "--json"]) == 0
    (step,) = [line for line in json.loads(capsys.readouterr().out)["lines"] if line["name"] == "step"]
    assert step["measured"] == 1.5
    assert run(["report", JOB_ID, "--out", "-"]) == 0
    page = capsys.readouterr().out
    assert "5 of 20" in page and str(now / JOB_ID) in page
    place = local_place()
    record = place.store.read(JOB_ID).record
    assert record.checkpoint_destination == str(before / JOB_ID), "who only looks writes nothing of it"
    assert [row["loss"] for row in newest_rows(place, record)] == [2.5]
    found = gather(place, JOB_ID, [], tmp_path / "kept")
    assert [one.step for one in found.checkpoints] == [5]


def test_of_a_copied_folder_nothing_is_removed_at_the_first_ones_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, copy = tmp_path / "first/jobs" / JOB_ID, tmp_path / "a copy/jobs" / JOB_ID
    FolderRecordStore(first.parent).create(record_at("local", first, {}))
    saved(first)
    shutil.copytree(tmp_path / "first", tmp_path / "a copy")
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "a copy"))
    for options in ([], ["--yes"], ["--keep-last", "1", "--yes"]):
        assert run(["checkpoints", "prune", JOB_ID, *options]) == 2
        told = capsys.readouterr().err
        assert f"{JOB_ID}: its checkpoints are in {first} by its record, and there are some in {copy} too" in told
        assert f"trainyard checkpoints prune '{copy}' --keep-last N" in told
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "first"))
    assert run(["checkpoints", "prune", JOB_ID]) == 1 and "not one of 1 checkpoint is whole" in capsys.readouterr().err
