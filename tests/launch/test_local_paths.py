"""What this machine can't read, or can't save to, is refused before a process starts, in a line that names it."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.launch import launch_here, watch
from trainyard.launch.local_backend import LocalBackend
from trainyard.launch.local_paths import local_job
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
    (tmp_path / "folder/text.txt").write_text("a text\n")
    job = spec(tmp_path)
    in_folder = {"train": [{"path": str(tmp_path / "folder"), "format": "text"}], "sequence_length": 8}

    def refuses(path: object, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuses)
        with pytest.raises(InputError, match=r"^data\.train\.0\.path: .*text\.txt: can't be read: Permission denied$"):
            launch_here(job, tmp_path / "jobs")
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuses)
        with pytest.raises(InputError, match=r"^data\.train\.0\.path: .*folder: can't be read: Permission denied$"):
            launch_here(spec(tmp_path, data=in_folder), tmp_path / "jobs")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_file", refuses)
        tokenizer = {**in_folder, "tokenizer": str(tmp_path / "folder")}
        with pytest.raises(InputError, match=r"^tokenizer: .*folder: can't be read: Permission denied$"):
            launch_here(spec(tmp_path, data=tokenizer), tmp_path / "jobs")
    os.mkfifo(tmp_path / "pipe")
    data = {"train": [{"path": str(tmp_path / "pipe"), "format": "text"}], "sequence_length": 8}
    with pytest.raises(InputError, match=r"pipe: is neither a file nor a folder$"):
        launch_here(spec(tmp_path, data=data), tmp_path / "jobs")


def _folders(root: Path) -> None:
    """What nothing can be read from, each for a reason of its own."""
    for name in ("empty", "hidden/.git", "other", "packed", "blank", "tokenizer"):
        (root / name).mkdir(parents=True)
    (root / "hidden/.git/a.jsonl").write_text("{}")
    (root / "other/a.txt").write_text("a text")
    (root / "packed/a.jsonl.zst").write_text("packed")
    (root / "blank/a.jsonl").touch()
    (root / "pointer.json").write_text("version https://git-lfs.github.com/spec/v1")
    (root / "config.json").write_text("{}")
    (root / "deep.json").write_text("[" * 200_000)


ANY_JSON = r"no file that ends in \.jsonl, \.json, \.jsonl\.gz, \.json\.gz \(format: jsonl\)"
MEND = "; put some there, or correct the path or the format$"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train": [("empty", "text")]}, r"^data\.train\.0\.path: .*/empty: no file \(format: text\); put some there"),
        ({"train": [("text.txt", "text"), ("empty", "jsonl")]}, rf"^data\.train\.1\.path: .*/empty: {ANY_JSON}{MEND}"),
        ({"train": [("hidden", "jsonl")]}, rf"/hidden: {ANY_JSON}{MEND}"),
        ({"validation": [("other", "jsonl")]}, rf"^data\.validation\.0\.path: .*/other: {ANY_JSON}{MEND}"),
        ({"train": [("packed", "jsonl")]}, rf"/packed: {ANY_JSON}, but a\.jsonl\.zst \(packed in a way .*\){MEND}"),
        ({"train": [("blank", "jsonl")]}, r"^data\.train: .*/blank: not one byte; give files with some text, or take"),
        ({"tokenizer": "tokenizer"}, r"^data\.tokenizer .*/tokenizer: holds no tokenizer\.json; .* correct the path$"),
        ({"tokenizer": "pointer.json"}, r"/pointer\.json: is not a tokenizer\.json \(.*no pointer of Git LFS\?\)$"),
        ({"tokenizer": "deep.json"}, r"/deep\.json: is not a tokenizer\.json \(.*no pointer of Git LFS\?\)$"),
        ({"tokenizer": "config.json"}, r"/config\.json: is not a tokenizer\.json \(it has no model\)$"),
    ],
    ids=str,
)
def test_what_holds_nothing_to_read_is_refused_before_anything_is_made(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    """Its ranks said so 12 s later, and left a failed job behind."""
    _folders(tmp_path)
    job = spec(tmp_path)
    data = job.data.model_dump()
    for name, stated in changes.items():
        is_path = isinstance(stated, str)
        data[name] = (
            str(tmp_path / stated) if is_path else [{"path": str(tmp_path / p), "format": kind} for p, kind in stated]
        )
    changed = parse(JobSpec, job.model_dump() | {"data": data}, "job")
    with pytest.raises(InputError, match=told):  # as of a cluster that shares this machine's files
        local_job(changed)
    with pytest.raises(InputError, match=told) as caught:
        launch_here(changed, tmp_path / "jobs")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "jobs").exists(), "no record of it"


def test_one_source_of_a_set_may_be_blank(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").touch()
    sources = [{"path": str(tmp_path / name), "format": "text"} for name in ("text.txt", "blank.txt")]
    record = launch_here(spec(tmp_path, data={"train": sources, "sequence_length": 8}), tmp_path / "jobs")
    assert [source.path for source in record.resolved.spec.data.train] == [source["path"] for source in sources]


def test_what_the_ranks_of_a_cluster_may_read_and_this_user_may_not_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    job = spec(tmp_path, data={"train": [{"path": str(folder), "format": "text"}], "sequence_length": 8})

    def refuses(path: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "scandir", refuses)
    assert local_job(job).data.train[0].path == str(folder)


def test_a_link_may_lead_to_something_where_a_cluster_runs(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").symlink_to("/scratch/of/the/cluster/a.txt")
    job = spec(tmp_path, data={"train": [{"path": str(folder), "format": "text"}], "sequence_length": 8})
    assert local_job(job, runs_here=False).data.train[0].path == str(folder)
    with pytest.raises(InputError, match=r"a\.txt \(a link to nothing\); put some there"):
        local_job(job)


def test_a_resume_is_refused_where_its_data_is_gone_and_changes_nothing(tmp_path: Path) -> None:
    jobs, folder = tmp_path / "jobs", tmp_path / "folder"
    folder.mkdir()
    (folder / "text.txt").write_text("a text\n")
    data = {"train": [{"path": str(folder), "format": "text"}], "sequence_length": 8}
    record = launch_here(spec(tmp_path, data=data), jobs)
    (folder / "text.txt").unlink()
    with pytest.raises(InputError, match=r"^data\.train\.0\.path: .*/folder: no file \(format: text\)"):
        watch.resume(FolderRecordStore(jobs), LocalBackend(jobs), record.job_id)
    assert FolderRecordStore(jobs).read(record.job_id).record.attempt.number == 1


def test_a_folder_in_a_files_place_and_a_file_in_a_folders_are_refused(tmp_path: Path) -> None:
    text = {"train": [{"path": str(tmp_path / "text.txt"), "format": "text"}], "sequence_length": 8}
    with pytest.raises(InputError, match=rf"^data\.chat_template: {tmp_path}: is a folder; name the file in it$"):
        launch_here(spec(tmp_path, data=text | {"chat_template": str(tmp_path)}), tmp_path / "jobs")
    with pytest.raises(InputError, match=r"^model\.source: .*text\.txt: is a file; name the folder that holds it"):
        launch_here(spec(tmp_path, model={"source": str(tmp_path / "text.txt")}), tmp_path / "jobs")
