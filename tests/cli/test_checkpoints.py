"""`trainyard checkpoints` on a folder of the bare trainer: output, JSON and exit codes."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainyard.cli.app import run
from trainyard.errors import AwsAwayError, AwsRefusedError, InputError, TrainyardError
from trainyard.launch.backend import Observation
from trainyard.launch.checkpoints import has_any


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 10, 20 and 30; the newest is altered."""
    for step in (10, 20, 30):
        place = tmp_path / f"out/checkpoints/step-{step:08d}"
        place.mkdir(parents=True)
        (place / "__0_0.distcp").write_bytes(b"weights!")
        shard = {"name": "__0_0.distcp", "bytes": 8, "sha256": hashlib.sha256(b"weights!").hexdigest()}
        manifest = json.dumps({"version": 1, "step": step, "world_size": 1, "shards": [shard], "extra": {"step": step}})
        (place / "manifest.json").write_text(manifest)
        digest = hashlib.sha256(manifest.encode()).hexdigest()
        (place / "COMMITTED").write_text(json.dumps({"manifest_sha256": digest}))
    (tmp_path / "out/checkpoints/step-00000030/__0_0.distcp").write_bytes(b"Weights!")
    return tmp_path / "out"


def test_a_folders_plain_name_will_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent)
    assert run(["checkpoints", "out", "--json"]) == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)] == [10, 20, 30]


def test_each_verb(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(folder)
    assert run(["checkpoints", where, "--json"]) == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)] == [10, 20, 30]
    assert run(["checkpoints", "list", where]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert "\n".join(lines).count("committed") == 3
    assert last.endswith(f"contents were not read: trainyard checkpoints verify {where}")
    assert run(["checkpoints", "show", where, "--step", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shards"][0]["bytes"] == 8

    assert run(["checkpoints", "verify", where]) == 1
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        "step 10: whole",
        "step 20: whole",
        "step 30: __0_0.distcp is altered (its SHA-256 is not the manifest's)",
    ]
    assert told.err == f"trainyard: {where}: 1 of 3 checkpoints is broken (step 30)\n"
    assert run(["checkpoints", "verify", where, "--step", "20"]) == 0

    target = str(folder.parent / "kept")
    assert run(["checkpoints", "copy", where, target, "--step", "20", "--json"]) == 0
    capsys.readouterr()
    assert run(["checkpoints", "verify", target]) == 0
    assert run(["checkpoints", "copy", where, target, "--step", "30"]) == 1
    capsys.readouterr()
    assert run(["checkpoints", "prune", where, "--keep-last", "1", "--keep-best", "loss:max:2"]) == 0
    assert capsys.readouterr().out.endswith("kept step 20, 30; --yes removes\n")
    assert run(["checkpoints", "prune", where, "--keep-last", "1", "--json", "--yes"]) == 0
    pruned = json.loads(capsys.readouterr().out)
    assert pruned.pop("freed_bytes") > 200
    assert pruned == {
        "removed": [10],
        "kept": [20, 30],
        "dry_run": False,
    }


def test_a_list_tells_what_is_missing_or_cut_and_promises_nothing_of_contents(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed() -> str:
        assert run(["checkpoints", "list", str(folder)]) == 0
        return capsys.readouterr().out

    (folder / "checkpoints/step-00000010/__0_0.distcp").write_bytes(b"weigh")
    (folder / "checkpoints/step-00000020/__0_0.distcp").unlink()
    out = listed()
    assert "broken: __0_0.distcp has 5 bytes, the manifest says 8" in out and "broken: __0_0.distcp is missing" in out
    assert "contents were not read" in out, "step 30 is altered, and its sizes are right"
    (folder / "checkpoints/step-00000030/COMMITTED").unlink()
    assert "contents" not in listed(), "none of these is said to be good"


@pytest.mark.parametrize("inside", ["checkpoints", "checkpoints/", "checkpoints/step-00000010/"])
def test_an_export_of_a_folder_of_checkpoints_says_which_folder_is_meant(
    folder: Path, capsys: pytest.CaptureFixture[str], inside: str
) -> None:
    assert run(["export", f"{folder}/{inside}", "--to", str(folder.parent / "to")]) == 2
    assert capsys.readouterr().err.endswith(f"lies in a folder of checkpoints; give the one that holds it: {folder}\n")


def test_an_empty_path_is_not_the_folder_that_one_is_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (folder / "metrics.jsonl").write_text("{}\n")
    before = sorted(folder.rglob("*"))
    for words in (
        ["checkpoints", "list", ""],
        ["checkpoints", "verify", " "],
        ["checkpoints", "prune", "", "--keep-last", "1", "--yes"],
        ["checkpoints", "copy", "", str(folder / "to")],
        ["checkpoints", "copy", str(folder), "", "--step", "20"],
        ["export", "", "--to", str(folder / "to")],
        ["export", str(folder), "--to", ""],
    ):
        assert run(words) == 2, words
        (line,) = capsys.readouterr().err.splitlines()
        assert "names no place" in line and ("--to" in line) == (words[-2:] == ["--to", ""])
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "to", ["~/kept", "~", "gs://bucket/x", "S3://bucket/x", "s3:/bucket/x", "file:///tmp/x", "s3://", "s3:///x"]
)
def test_no_folder_is_made_of_an_address_or_a_home(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    """`--to=~/kept` reaches the command as it stands; what was exported to gs:// was said to be there."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    if "~" in to:
        why = "only a shell takes ~ for a home; write the whole path"
    elif to in ("s3://", "s3:///x"):
        why = "names no bucket; an s3:// prefix is s3://BUCKET/PREFIX"
    else:
        why = "must be an s3:// prefix or a folder"
    copied, exported = ["checkpoints", "copy", str(folder), to], ["export", str(folder), "--to", to]
    for words, what in ((copied, to), (exported, f"--to {to}")):
        assert run(words) == 2
        assert capsys.readouterr().err == f"trainyard: {what}: {why}\n"
    assert not any((tmp_path / "here").iterdir())


@pytest.mark.parametrize("inside", ["checkpoints", "checkpoints/", "checkpoints/step-00000020"])
def test_who_names_what_lies_in_the_folder_is_told_which_one_to_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], inside: str
) -> None:
    """It looked like a job that has saved nothing; a copy to it was one that no resume of the job finds."""
    where, before = f"{folder}/{inside}", sorted(folder.rglob("*"))
    for words in (["list", where], ["verify", where], ["prune", where, "--keep-last", "1"], ["show", where]):
        assert run(["checkpoints", *words]) == 2, words
        told = f"{where.rstrip('/')}: lies in a folder of checkpoints; give the one that holds it: {folder}\n"
        assert capsys.readouterr().err.endswith(told)
    assert run(["checkpoints", "copy", str(folder), where, "--step", "20"]) == 2
    assert sorted(folder.rglob("*")) == before
    monkeypatch.chdir(folder)
    assert run(["checkpoints", "list", f"./{inside}"]) == 2
    assert capsys.readouterr().err.endswith("give the one that holds it: .\n")


def test_a_folder_called_checkpoints_that_holds_none_has_none_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.chdir(tmp_path)
    for verb in ("list", "verify"):
        assert run(["checkpoints", verb, "./checkpoints"]) == 0
        assert capsys.readouterr().out == "no checkpoint yet\n"


@pytest.mark.parametrize("address", ["s3:/acme/x", "s3:acme/x", "S3://acme/x", "arn:aws:s3:::acme/x", "gs://acme/x"])
def test_an_address_that_is_none_of_s3_is_no_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    monkeypatch.chdir(folder.parent)
    assert run(["checkpoints", "copy", "out", address, "--step", "20"]) == 2
    assert capsys.readouterr().err == f"trainyard: {address}: must be an s3:// prefix or a folder\n"
    assert run(["checkpoints", "list", address]) == 2
    assert f"{address}: must be a job's id, an s3://bucket/prefix, or the folder" in capsys.readouterr().err
    assert [path.name for path in folder.parent.iterdir()] == ["out"], "nothing was copied beside it"


def test_a_folder_that_nobody_can_look_at_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    long, circle = str(tmp_path / ("c" * 300) / "x"), str(tmp_path / "circle")
    (tmp_path / "circle").symlink_to("circle")
    for place in (long, circle):
        assert run(["checkpoints", "list", place]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert place in line and "can't be looked at: " in line
        assert run(["checkpoints", "copy", str(folder), place, "--step", "20"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("trainyard: can't ") and place in line
    honest = Path.stat

    def refused(path: Path, **how: bool) -> Any:
        if path.name == "checkpoints":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return honest(path, **how)

    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(Path, "stat", refused)  # root may look anywhere
    assert run(["checkpoints", "list", "out"]) == 2
    assert capsys.readouterr().err == "trainyard: out/checkpoints: can't be looked at: Permission denied\n"


def test_a_steps_folder_that_may_not_be_looked_into_hides_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    honest_scan, honest_list, closed = os.scandir, os.listdir, str(folder / "checkpoints/step-00000010")
    before = sorted(folder.rglob("*"))

    def refuse(honest: Any) -> Any:
        def refused(path: Any = ".") -> Any:
            if str(path) == closed:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return honest(path)

        return refused

    monkeypatch.setattr(os, "scandir", refuse(honest_scan))  # root may look anywhere
    monkeypatch.setattr(os, "listdir", refuse(honest_list))
    told = f"can't look into {closed}: Permission denied"
    assert run(["checkpoints", "list", str(folder), "--json"]) == 1
    answer = capsys.readouterr()
    listed = json.loads(answer.out)
    assert [(one["step"], one["readable"], one["num_files"]) for one in listed][:2] == [(10, False, 0), (20, True, 3)]
    assert answer.err.endswith(f"1 of 3 checkpoints can't be read (step 10): {told}\n")
    assert run(["checkpoints", "list", str(folder)]) == 1
    assert "can't be read: can't look into" in " ".join(capsys.readouterr().out.split())
    (folder / "checkpoints/step-00000030/__0_0.distcp").write_bytes(b"weights!")
    assert run(["checkpoints", "prune", str(folder), "--keep-last", "1", "--json", "--yes"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] == [10, 30]
    assert run(["checkpoints", "copy", str(folder), str(tmp_path / "copy"), "--step", "10"]) == 1
    assert told in capsys.readouterr().err and not (tmp_path / "copy").exists()
    assert run(["checkpoints", "copy", str(folder), str(tmp_path / "copy")]) == 0, "the newest is whole"
    assert has_any(str(folder), None)
    shutil.rmtree(folder / "checkpoints/step-00000030")
    assert has_any(str(folder), None) is None, "it may be one"
    monkeypatch.undo()
    assert {path for path in before if "step-00000010" in path.parts} <= set(folder.rglob("*"))


def test_one_that_cant_be_read_hides_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    honest = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.name == "manifest.json" and "step-00000010" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return honest(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    told = "1 of 3 checkpoints can't be read (step 10): can't read"
    assert run(["checkpoints", "list", str(folder), "--json"]) == 1
    answer = capsys.readouterr()
    assert [one["readable"] for one in json.loads(answer.out)] == [False, True, True]
    assert told in answer.err and answer.err.count("\n") == 1
    assert run(["checkpoints", "list", str(folder)]) == 1
    answer = capsys.readouterr()
    assert "can't be read: can't read" in answer.out and answer.out.count("committed") == 2
    (folder / "checkpoints/step-00000030/__0_0.distcp").write_bytes(b"weights!")
    assert run(["checkpoints", "verify", str(folder)]) == 1
    answer = capsys.readouterr()
    assert told in answer.err and answer.out.count(": whole") == 2
    assert run(["checkpoints", "copy", str(folder), str(tmp_path / "copy"), "--all"]) == 1
    answer = capsys.readouterr()
    assert told in answer.err and answer.out.count("step-") == 2
    for step in (20, 30):
        shutil.rmtree(folder / f"checkpoints/step-{step:08d}")
    assert run(["checkpoints", "prune", str(folder), "--keep-last", "1"]) == 1
    assert capsys.readouterr().err.startswith("trainyard: 1 of 1 checkpoint can't be read (step 10): can't read")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["list", "./nowhere"], "./nowhere: no such folder; give a job's id, or the folder"),
        (["show", "{folder}", "--step", "7"], "has no checkpoint of that step (there: 10, 20, 30)"),
        (["prune", "{folder}"], "a folder knows no job's rules; give --keep-last N"),
        (["prune", "{folder}", "--keep-best", "loss"], "together with --keep-last N"),
        (["prune", "{folder}", "--keep-last", "1", "--keep-best", "speed"], "--keep-best speed: metric"),
        (["list", "s3://a/b"], "s3://a/b: give --tenant NAME too"),
        (["copy", "{folder}", "gs://a/b"], "gs://a/b: must be an s3:// prefix or a folder"),
        (["copy", "{folder}", "s3://a/b", "--step", "20"], "s3://a/b: is on S3, and nothing here says whose role"),
        (
            ["copy", "{folder}", "{folder}/to", "--all", "--step", "20"],
            "--all: copies every good one; leave out --step 20",
        ),
        (["copy", "{folder}/empty", "{folder}/to", "--all"], "{folder}/empty: has no good checkpoint (of 0)"),
        (["copy", "{folder}", "{folder}/../out"], "{folder}/../out: is where the checkpoints are; give another"),
        (
            ["copy", "{folder}", "{folder}/file", "--step", "20"],
            "{folder}/file: is no folder, and nothing can be copied",
        ),
        (["copy", "{folder}", "{folder}/file/a/b", "--step", "20"], "{folder}/file: is no folder, and nothing can be"),
    ],
)
def test_wrong_input_is_one_line(
    folder: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty/checkpoints").mkdir(parents=True)
    (folder / "file").touch()
    told = told.replace("{folder}", str(folder))
    before = sorted(folder.rglob("*"))
    assert run(["checkpoints", *(one.replace("{folder}", str(folder)) for one in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("state", ["Training", "Completed", None])
@pytest.mark.parametrize("place", ["its own", "another's", "of no job"])
def test_a_copy_to_where_a_job_saves_waits_for_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str, state: str | None
) -> None:
    """A bucket knows no locks, and a job that computes writes nothing for hours."""
    job = "acme-tiny-20260131120000-1a2b"
    to = {"of no job": f"s3://acme-data/kept/{job}", "another's": f"s3://acme-data/jobs/{job}"}.get(
        place, f"s3://acme-checkpoints/jobs/{job}"
    )
    record = SimpleNamespace(checkpoint_destination=f"s3://acme-checkpoints/jobs/{job}/")
    store = SimpleNamespace(read=lambda job_id: SimpleNamespace(record={job: record}[job_id]))
    backend = SimpleNamespace(observe=lambda _: Observation(state) if state else None)
    opened: list[str] = []

    def place_of(job_id: str, *_: object) -> Any:
        opened.append(job_id)
        return SimpleNamespace(store=store, backend=backend)

    copied: list[str] = []
    monkeypatch.setattr("trainyard.launch.place.place_of", place_of)
    monkeypatch.setattr("trainyard.cli.checkpoints.tenants_place", lambda *_: SimpleNamespace(s3=None))
    monkeypatch.setattr("trainyard.launch.checkpoints.copy", lambda *words, **_: copied.append(words[3]) or [])
    words = ["checkpoints", "copy", str(folder), to, "--step", "20", "--tenant", "acme"]
    is_refused = (place, state) == ("its own", "Training")
    assert run(words) == (2 if is_refused else 0)
    assert copied == ([] if is_refused else [to]) and opened == ([] if place == "of no job" else [job])
    if is_refused:
        assert f"{to}: job {job} saves there, and is still going (Training)" in capsys.readouterr().err


@pytest.mark.parametrize("state", ["Training", "Completed"])
def test_a_copy_to_a_prefix_where_a_job_of_this_machine_saves_waits_for_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    """Of its `checkpoint.destination`, which no tenant's job may state, the prefix says nothing."""
    record = SimpleNamespace(checkpoint_destination="s3://acme-data/runs/one/")
    of_a_folder = SimpleNamespace(checkpoint_destination="acme-data/runs/one-more")  # as earlier trainyards noted them
    records = {"local-tiny-20260131120000-1a2b": record, "local-tiny-20260131120002-1a2b": of_a_folder}

    def read(job_id: str) -> Any:
        if job_id not in records:
            raise InputError(f"job {job_id}: its record can't be read")
        return SimpleNamespace(record=records[job_id])

    store = SimpleNamespace(read=read, job_ids=lambda: ["local-other-20260131120001-1a2b", *records])
    here = SimpleNamespace(store=store, backend=SimpleNamespace(observe=lambda _: Observation(state)))
    copied: list[str] = []
    monkeypatch.setattr("trainyard.launch.place.local_place", lambda: here)
    monkeypatch.setattr("trainyard.cli.checkpoints.tenants_place", lambda *_: SimpleNamespace(s3=None))
    monkeypatch.setattr("trainyard.launch.checkpoints.copy", lambda *words, **_: copied.append(words[3]) or [])
    words = ["checkpoints", "copy", str(folder), "--step", "20", "--tenant", "acme"]
    assert run([*words, "s3://acme-data/runs/one-more"]) == 0
    is_refused = state == "Training"
    assert run([*words, "s3://acme-data//runs/one"]) == (2 if is_refused else 0)
    assert len(copied) == (1 if is_refused else 2)
    if is_refused:
        assert "job local-tiny-20260131120000-1a2b saves there, and is still going" in capsys.readouterr().err


@pytest.mark.parametrize("error", [InputError, AwsRefusedError, AwsAwayError])
def test_a_place_whose_job_nobody_knows_is_copied_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[TrainyardError]
) -> None:
    """But not while AWS gives no answer: it may be asked a little later."""

    def place_of(job_id: str, *_: object) -> Any:
        raise error(f"job {job_id}: there is no such job")

    copied: list[str] = []
    monkeypatch.setattr("trainyard.launch.place.place_of", place_of)
    monkeypatch.setattr("trainyard.cli.checkpoints.tenants_place", lambda *_: SimpleNamespace(s3=None))
    monkeypatch.setattr("trainyard.launch.checkpoints.copy", lambda *words, **_: copied.append(words[3]) or [])
    to = "s3://kept/jobs/acme-tiny-20260131120000-1a2b"
    is_away = error is AwsAwayError
    assert run(["checkpoints", "copy", str(folder), to, "--step", "20", "--tenant", "acme"]) == (3 if is_away else 0)
    assert copied == ([] if is_away else [to])
