"""What this machine can't read, or can't save to, is refused before a process starts, in a line that names it."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.launch import launch_here, watch
from trainyard.launch.local_backend import LocalBackend
from trainyard.launch.record import FolderRecordStore
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec


@pytest.fixture(autouse=True)
def never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these starts a process."""
    monkeypatch.setattr(LocalBackend, "submit", lambda *_: None)


def spec(folder: Path, **sections: dict[str, Any]) -> JobSpec:
    """A tiny model's job over a file of that folder."""
    (folder / "text.txt").write_text("a text\n" * 100)
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    data = {"train": [{"path": str(folder / "text.txt"), "format": "text"}], "sequence_length": 8}
    training = {"steps": 3, "global_batch_size": 4, "learning_rate": 1e-3}
    content = {"model": {"config": config}, "data": data, "training": training} | sections
    return parse(JobSpec, {"name": "here", **content}, "job")


@pytest.mark.parametrize("name", ["destination", "local_directory"])
def test_a_place_of_checkpoints_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    jobs, file, link = tmp_path / "jobs", tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path / "unmounted")

    def refused(place: Path, why: str) -> None:
        with pytest.raises(InputError, match=rf"^checkpoint\.{name} {place}: {why}"):
            launch_here(spec(tmp_path, checkpoint={name: str(place)}), jobs)
        assert not jobs.exists(), "no record of it"

    refused(file, f"{file} is no folder; name another place")
    refused(file / "below", f"{file} is no folder")
    refused(link, f"{link} is a link to what isn't there")
    refused(Path("/proc/new/one"), "nothing may be written to /proc by this user: ")  # root's neither
    launch_here(spec(tmp_path, checkpoint={name: str(tmp_path / "new/one")}), jobs)
    launch_here(spec(tmp_path, checkpoint={"destination": "s3://results/x"}), jobs)


def test_a_resume_is_refused_where_its_place_is_a_file_now_and_changes_nothing(tmp_path: Path) -> None:
    jobs, place = tmp_path / "jobs", tmp_path / "saved"
    record = launch_here(spec(tmp_path, checkpoint={"destination": str(place)}), jobs)
    store, backend = FolderRecordStore(jobs), LocalBackend(jobs)
    place.touch()
    with pytest.raises(InputError, match=rf"checkpoint\.destination {place}: {place} is no folder"):
        watch.resume(store, backend, record.job_id)
    assert store.read(record.job_id).record.attempt.number == 1


def test_what_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    job = spec(tmp_path)
    in_folder = {"train": [{"path": str(tmp_path / "folder"), "format": "text"}], "sequence_length": 8}

    def refuses(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuses)
        with pytest.raises(InputError, match=r"^data\.train\.0\.path: .*text\.txt: can't be read: Permission denied$"):
            launch_here(job, tmp_path / "jobs")
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuses)
        with pytest.raises(InputError, match=r"^data\.train\.0\.path: .*folder: can't be read: Permission denied$"):
            launch_here(spec(tmp_path, data=in_folder), tmp_path / "jobs")
    os.mkfifo(tmp_path / "pipe")
    data = {"train": [{"path": str(tmp_path / "pipe"), "format": "text"}], "sequence_length": 8}
    with pytest.raises(InputError, match=r"pipe: is neither a file nor a folder$"):
        launch_here(spec(tmp_path, data=data), tmp_path / "jobs")


def test_a_folder_in_a_files_place_and_a_file_in_a_folders_are_refused(tmp_path: Path) -> None:
    text = {"train": [{"path": str(tmp_path / "text.txt"), "format": "text"}], "sequence_length": 8}
    with pytest.raises(InputError, match=rf"^data\.chat_template: {tmp_path}: is a folder; name the file in it$"):
        launch_here(spec(tmp_path, data=text | {"chat_template": str(tmp_path)}), tmp_path / "jobs")
    with pytest.raises(InputError, match=r"^model\.source: .*text\.txt: is a file; name the folder that holds it"):
        launch_here(spec(tmp_path, model={"source": str(tmp_path / "text.txt")}), tmp_path / "jobs")
