"""What Slurm starts on each machine of a job: who is there, what is read, and when nothing is started at all.

The whole of it on a real Slurm is tests/launch/test_slurm_trainer.py.
"""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from boto3.exceptions import RetriesExceededError
from moto import mock_aws
from trainer import inputs, slurm
from trainer.host.recovery import Ending
from trainer.inputs import bring_inputs
from trainer.slurm import host_names, ranks_settings, read_place

from trainyard.errors import InputError

STEP = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[1-2,10]", "SLURMD_NODENAME": "gpu10"}


def test_a_machine_finds_its_place_in_slurms_order() -> None:
    place = read_place(STEP)
    assert (place.hosts, place.index) == (("gpu1", "gpu2", "gpu10"), 2)
    # The step's list counts: a job may hold more machines than the step has.
    assert read_place({**STEP, "SLURM_STEP_NODELIST": "gpu10"}).hosts == ("gpu10",)


def test_no_task_of_slurms_is_told_so() -> None:
    with pytest.raises(InputError, match="SLURMD_NODENAME: is not set, so this is no task of Slurm's"):
        read_place({key: value for key, value in STEP.items() if key != "SLURMD_NODENAME"})
    with pytest.raises(InputError, match="SLURMD_NODENAME gpu3 is not among the job's machines gpu1, gpu2, gpu10"):
        read_place({**STEP, "SLURMD_NODENAME": "gpu3"})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("a", ["a"]),
        ("a[01-03]", ["a01", "a02", "a03"]),
        ("a[9-11],b", ["a9", "a10", "a11", "b"]),
        ("r[1-2]n[5,7]", ["r1n5", "r1n7", "r2n5", "r2n7"]),
    ],
)
def test_host_names_are_written_out(names: str, expected: list[str]) -> None:
    assert host_names(names) == expected


@pytest.mark.parametrize(
    ("names", "words"),
    [("", "is empty"), ("a[1-2", "a bracket too many"), ("a[x]", "'x' is no number"), ("a[1-99999]", "at most 10000")],
)
def test_a_list_that_is_none_is_refused(names: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        host_names(names)


def test_ranks_do_not_take_themselves_for_slurms_tasks() -> None:
    settings = {**STEP, "SLURM_PROCID": "0", "PMIX_RANK": "0", "PMI_SIZE": "2", "PATH": "/bin", "FI_PROVIDER": "efa"}
    assert ranks_settings(settings) == {"PATH": "/bin", "FI_PROVIDER": "efa"}


def test_a_task_that_comes_after_the_stop_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / slurm.TOLD).touch()
    assert slurm.run(tmp_path, {**STEP, "SLURMD_NODENAME": "gpu1"}) == 75
    assert (tmp_path / "host" / "resume_me").exists()
    assert slurm.run(tmp_path, {**STEP, "SLURMD_NODENAME": "gpu2"}) == 75
    assert (tmp_path / "hosts" / "gpu2" / "resume_me").exists()


def test_what_a_killed_start_left_on_the_machine_goes_with_the_next_one_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where somebody resumed it, as another job of Slurm's."""
    disk, job = tmp_path / "disk", SimpleNamespace(spec=None)
    disk.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    monkeypatch.setattr(slurm, "read_job", lambda *_: job)
    monkeypatch.setattr(slurm, "join_hosts", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(slurm, "first_address", lambda *_: "127.0.0.1")
    seen = []

    class Run:
        def __init__(self, folders: Any, *_: Any) -> None:
            self.work = folders.work

        def run(self, _: Any) -> Ending:
            seen.append(sorted(path.name for path in self.work.iterdir()))
            (self.work / "staging").touch()
            if len(seen) == 1:
                raise KeyboardInterrupt  # in place of SIGKILL, after which nobody tidies
            return Ending(0, "")

    monkeypatch.setattr(slurm, "HostRun", Run)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", lambda path, **_: None)
        slurm.run(tmp_path / "job-a", {**STEP, "TRAINYARD_SKIP_EFA_CHECK": "1"})
    assert len(list(disk.iterdir())) == 1
    assert slurm.run(tmp_path / "job-a", {**STEP, "SLURM_JOB_ID": "8", "TRAINYARD_SKIP_EFA_CHECK": "1"}) == 0
    assert seen == [[], []] and list(disk.iterdir()) == []


def test_scratch_is_the_users_own_and_what_cant_be_removed_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(slurm, "read_job", lambda *_: SimpleNamespace(spec=None))
    monkeypatch.setattr(slurm, "first_address", lambda *_: "127.0.0.1")
    (tmp_path / f"trainyard-{os.getuid()}-job-a-gpu10").touch()  # in a folder's place: not removed as one
    assert slurm.run(tmp_path / "job-a", {**STEP, "TRAINYARD_SKIP_EFA_CHECK": "1"}) == 1
    (told,) = (tmp_path / "job-a/hosts/gpu10/failure").read_text().splitlines()
    assert f"-{os.getuid()}-job-a-gpu10 on gpu10: can't be made anew" in told and told.endswith("remove it there")


def test_a_wrong_job_folder_is_the_first_machines_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm.main(["run", str(tmp_path)], {**STEP, "SLURMD_NODENAME": "gpu1"}) == 2
    assert "resolved_job.json: no such file" in (tmp_path / "host" / "failure").read_text()
    assert slurm.main(["start", str(tmp_path)], STEP) == 2
    assert "usage: python -m trainer.slurm run|inputs DIRECTORY" in capsys.readouterr().err


def write_inputs(directory: Path, *items: tuple[str, str, str]) -> Path:
    folder = directory / "input/data"
    folder.mkdir(parents=True)
    listed = [{"name": name, "kind": kind, "location": location} for name, kind, location in items]
    (folder / "inputs.json").write_text(json.dumps(listed))
    return folder


def test_inputs_come_as_a_container_would_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "fsx"
    (shared / "sets" / "text").mkdir(parents=True)
    (shared / "sets" / "text" / "a.jsonl").write_text("a")
    (shared / "tokenizer.json").write_text("t")
    monkeypatch.setattr(inputs, "SHARED_ROOT", str(shared))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    folder = write_inputs(
        tmp_path / "job",
        ("text", "fsx", "sets/text"),
        ("tokenizer", "fsx", "tokenizer.json"),
        ("images", "s3", "s3://acme/images/"),
        ("names", "s3", "s3://acme/names.txt"),
    )
    with mock_aws():
        s3 = boto3.client("s3")
        s3.create_bucket(Bucket="acme")
        for key in ("images/one/0.tar", "images/1.tar", "images-other/2.tar", "names.txt", "names.txt.old"):
            s3.put_object(Bucket="acme", Key=key, Body=key.encode())
        bring_inputs(tmp_path / "job")
        (folder / "images" / "1.tar").write_text("kept")
        bring_inputs(tmp_path / "job")  # a start after a requeue: nothing is fetched twice
    assert (folder / "text" / "a.jsonl").read_text() == "a"
    assert (folder / "tokenizer" / "tokenizer.json").read_text() == "t"
    found = {
        path.relative_to(folder / "images").as_posix() for path in (folder / "images").rglob("*") if path.is_file()
    }
    assert found == {"one/0.tar", "1.tar"}
    assert (folder / "images" / "1.tar").read_text() == "kept"
    assert [path.name for path in (folder / "names").iterdir()] == ["names.txt"]


@pytest.mark.parametrize("key", ["set//{outside}/a.txt", "set/../../../../outside.txt", "set/./a.txt", "set/a//b.txt"])
def test_a_key_of_s3_that_is_no_plain_path_writes_nowhere(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    folder = write_inputs(tmp_path / "job", ("set", "s3", "s3://acme/set/"))
    key = key.format(outside=str(tmp_path).strip("/"))
    with mock_aws():
        s3 = boto3.client("s3")
        s3.create_bucket(Bucket="acme")
        s3.put_object(Bucket="acme", Key=key, Body=b"x")
        where = re.escape(f"s3://acme/{key}")
        with pytest.raises(InputError, match=f"^{where}: is no path of a file below its prefix") as caught:
            bring_inputs(tmp_path / "job")
    assert "\n" not in str(caught.value)
    assert not (folder / "set").exists() and not list(tmp_path.glob("*.txt"))


def test_links_of_a_start_before_are_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that leads nowhere any longer, and a single file's folder that was left half made."""
    shared = tmp_path / "fsx"
    (shared / "text").mkdir(parents=True)
    (shared / "names.txt").write_text("n")
    monkeypatch.setattr(inputs, "SHARED_ROOT", str(shared))
    folder = write_inputs(tmp_path / "job", ("text", "fsx", "text"), ("names", "fsx", "names.txt"))
    (folder / "text").symlink_to(shared / "gone")
    (folder / ".names.partial").mkdir()
    (folder / ".names.partial" / "names.txt").symlink_to(shared / "names.txt")
    assert slurm.main(["inputs", str(tmp_path / "job")], {}) == 0
    assert (folder / "text").resolve() == shared / "text"
    assert [path.read_text() for path in (folder / "names").iterdir()] == ["n"]


def test_a_file_of_s3_that_breaks_off_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class BreaksOff:
        """S3 as boto3 shows it once its own retries are spent."""

        def get_paginator(self, _: str) -> "BreaksOff":
            return self

        def paginate(self, **_: str) -> list[dict[str, list[dict[str, str]]]]:
            return [{"Contents": [{"Key": "set/a"}]}]

        def download_file(self, *_: str) -> None:
            raise RetriesExceededError(ConnectionError("reset"))

    monkeypatch.setattr(boto3, "client", lambda _: BreaksOff())
    write_inputs(tmp_path / "job", ("set", "s3", "s3://acme/set/"))
    assert slurm.main(["inputs", str(tmp_path / "job")], {}) == 1
    assert "s3://acme/set/: can't be copied to" in (tmp_path / "job/host/failure").read_text()


@pytest.mark.parametrize(
    ("text", "words"), [(None, "no such file"), ("[{}]", "is no list of inputs"), ("{", "is no list of inputs")]
)
def test_a_list_of_inputs_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    path = write_inputs(tmp_path) / "inputs.json"
    path.unlink() if text is None else path.write_text(text)
    assert slurm.main(["inputs", str(tmp_path)], {}) == 2
    assert f"inputs.json: {words}" in (tmp_path / "host/failure").read_text()


def test_an_input_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "SHARED_ROOT", str(tmp_path))
    write_inputs(tmp_path / "job", ("text", "fsx", "sets/none"))
    assert slurm.main(["inputs", str(tmp_path / "job")], {}) == 2
    assert "sets/none is not on the cluster's file system" in (tmp_path / "job/host/failure").read_text()
