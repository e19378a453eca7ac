"""The bare trainer as a command: under torchrun, alone, and with wrong input."""

import contextlib
import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from trainer.__main__ import RESUME_FILE, _tell_of_resume, main
from trainer.checkpoint.provenance import provenance
from trainer_testing.distributed import TESTS, finish, start_ranks
from trainer_testing.text_job import bits, read_until, rows_of, run_trainer, start_trainer, write_job

from trainyard.planner import resolve
from trainyard.spec.job import load_job

REQUIRED = {"step", "attempt", "loss", "learning_rate", "grad_norm", "tokens", "step_seconds", "breakdown"}
PHASES = {"data", "forward", "backward", "communication", "optimizer", "checkpoint", "other"}


def test_torchrun_trains_and_writes_what_the_contract_says(tmp_path: Path) -> None:
    job = write_job(tmp_path, "fsdp", steps=30)
    output_dir = tmp_path / "out"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainer"]
    own = {"path": str(tmp_path / "validation.txt"), "format": "text"}
    seen = {"path": str(tmp_path / "train.txt"), "format": "text", "name": "seen", "every_steps": 2, "batches": 1}
    sets = f"data.validation={json.dumps([own, seen])}"
    options = ["--job", str(job), "--output-dir", str(output_dir), "--set", "training.steps=6", "--set", sets]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command, *options],
        env=environment,
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = rows_of(output_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert set(row) >= REQUIRED
        assert set(row["breakdown"]) == PHASES
        assert row["breakdown"]["communication"] > 0
        assert sum(row["breakdown"].values()) == pytest.approx(row["step_seconds"], rel=1e-6)
        assert 8 * 31 - 32 < row["tokens"] <= 8 * 32, "all sequences are full but the file's last"
    result = json.loads((output_dir / "result.json").read_text())
    assert result["loss_first"] == rows[0]["loss"]
    assert result["loss_last"] == rows[-1]["loss"]
    assert result["validation_loss"] == rows[-1]["validation_loss"]
    expected = {
        "status": "completed",
        "steps": 6,
        "attempts": 1,
        "strategy": "fsdp",
        "world_size": 2,
    }
    assert {key: result[key] for key in expected} == expected
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("step=")] == [f"step={s}" for s in range(1, 7)]
    (committed,) = (line for line in lines if line.startswith("checkpoint step=4 committed uri="))
    assert datetime.fromisoformat(committed.rpartition(" at=")[2]).tzinfo is not None, "which a log alone doesn't say"
    assert any(line.startswith("validation step=6 loss=") for line in lines)
    assert [row["step"] for row in rows if "validation_loss" in row] == [6]
    assert [row["step"] for row in rows if "validation_sets" in row] == [2, 4, 6]
    measured = rows[1]["validation_sets"]["seen"]
    assert measured["perplexity"] == pytest.approx(math.exp(measured["loss"]))
    assert f"validation step=2 set=seen loss={measured['loss']:.6f} perplexity={measured['perplexity']:.6f}" in lines
    assert result["validation_sets"] == rows[-1]["validation_sets"]
    assert result["validation_perplexity"] == pytest.approx(math.exp(result["validation_loss"]))


@pytest.mark.slow
def test_a_save_that_is_asked_for_while_torch_is_imported_is_the_first_steps(tmp_path: Path) -> None:
    job, output_dir = write_job(tmp_path, "single", steps=3), tmp_path / "out"
    options = ["--job", str(job), "--output-dir", str(output_dir), "--set", "checkpoint.every_steps=100"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", *options],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=TESTS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 300
    while not output_dir.exists():  # made just before
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert re.findall(r"checkpoint step=(\d+) committed", output) == ["1", "3"]


def test_a_resolved_job_runs_without_a_launcher_and_a_finished_one_does_nothing(tmp_path: Path) -> None:
    schedule = {"kind": "cosine", "warmup_steps": 8}
    job = write_job(tmp_path, "single", steps=5, global_batch_size=4, deterministic=True, schedule=schedule)
    path = tmp_path / "resolved.json"
    resolved = resolve(load_job(job), world_size=1)
    path.write_text(resolved.model_dump_json())
    command = [sys.executable, "-m", "trainer", "--resolved-job", str(path), "--output-dir", str(tmp_path / "out")]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert first.returncode == 0, first.stderr[-3000:]
    assert "warning: training.schedule.warmup_steps: 8 is more than the job's 5 steps" in first.stdout
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 5
    assert all(row["breakdown"]["communication"] == 0.0 for row in rows)
    manifest = json.loads((tmp_path / "out" / "checkpoints" / "step-00000005" / "manifest.json").read_text())
    own = provenance(resolved)
    assert {key: manifest["extra"][key] for key in own} == own
    changed = resolved.model_copy(update={"learning_rate": 2 * resolved.learning_rate})
    path.write_text(changed.model_dump_json())
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "resumed step=5 " in again.stdout
    assert "checkpoint step=5 was written by another version of the job (job " in again.stdout
    assert bits(rows_of(tmp_path / "out")) == bits(rows)
    assert not any(line.startswith("step=") for line in again.stdout.splitlines())


ON_A_FULL_DISK = """
import errno, sys
from datetime import datetime
from pathlib import Path
from trainer.__main__ import main

out, honest = Path(sys.argv[-1]), Path.open

def opened(path, mode="r", *rest, **options):
    rows, saved = out / "metrics.jsonl", out / "checkpoints/step-00000002/COMMITTED"
    is_full = rows.exists() and rows.stat().st_size > 0 and not saved.exists()
    if mode in ("a", "w") and ((path == rows and is_full) or path.name.startswith("result.json")):
        raise OSError(errno.ENOSPC, "No space left on device")
    return honest(path, mode, *rest, **options)

Path.open = opened
sys.exit(main(sys.argv[1:]))
"""
"""A trainer whose second row finds no room before that step's checkpoint is there, and its result none at all."""


def test_a_job_that_is_to_end_before_its_checkpoint_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out"
    said, rows = run_trainer(1, write_job(tmp_path, "single", steps=3), out)
    assert "nothing is" not in said
    said, again = run_trainer(1, write_job(tmp_path, "single", steps=3), out)
    assert "checkpoint step=3 is of the job's last step: nothing is left to train" in said
    assert again == rows and "nothing is trained" not in said, "a job that is done is no odd one"
    said, again = run_trainer(1, write_job(tmp_path, "single", steps=2), out)
    assert again == rows
    assert "warning: the job ends at step 2, and its checkpoint is of step 3: nothing is trained; " in said


def test_a_disk_that_is_full_for_a_while_costs_neither_rows_nor_the_job(tmp_path: Path) -> None:
    job = write_job(tmp_path, "single", steps=4, global_batch_size=4)
    settings = ["--set", "checkpoint.every_steps=1", "--set", "checkpoint.asynchronous=false"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out/result.json").write_text('{"status": "interrupted"}')
    done = subprocess.run(
        [sys.executable, "-c", ON_A_FULL_DISK, "--job", str(job), *settings, "--output-dir", str(tmp_path / "out")],
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [row["step"] for row in rows_of(tmp_path / "out")] == [1, 2, 3, 4]
    assert "result.json: not written, its disk is full" in done.stdout
    assert not (tmp_path / "out/result.json").exists(), "an earlier start's"


def test_a_diverged_job_fails_in_one_line_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    job = write_job(tmp_path, "single", steps=12, learning_rate=1e30, gradient_clip=None)
    output, _ = run_trainer(1, job, tmp_path / "out", expected_code=1)
    assert "training diverged: " in output and "; lower training.learning_rate" in output
    assert "; there is no checkpoint yet" in output and "of step 0" not in output
    assert "Traceback" not in output
    assert not (tmp_path / "out" / "result.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--job", "{folder}/nowhere.yaml"], "nowhere.yaml: no such file"),
        (["--job", "{job}", "--set", "training.stepz=3"], "unknown key"),
        (["--job", "{job}", "--set", "parallelism.data_replicate=2"], "2 ranks"),
        (["--resolved-job", "{folder}/train.txt"], "is not valid JSON"),
        (["--resolved-job", "{two_ranks}"], "parallelism asks for 2 ranks, but WORLD_SIZE is 1"),
        (["--resolved-job", "{two_ranks}", "--set", "training.steps=3"], "a resolved job is final"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    job = write_job(tmp_path, "single")
    two_ranks = tmp_path / "two_ranks.json"
    two_ranks.write_text(resolve(load_job(write_job(tmp_path, "ddp", name="two.yaml")), world_size=2).model_dump_json())
    places = {"folder": tmp_path, "job": job, "two_ranks": two_ranks}
    code = main([argument.format(**places) for argument in arguments] + ["--output-dir", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_so_is_an_output_folder_that_nobody_can_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    # Root may write where the rights say no; a read-only file system says so by the same call.
    monkeypatch.setattr("trainer.__main__.os.access", lambda path, mode: path != tmp_path / "out")
    assert main(["--job", str(write_job(tmp_path, "single")), "--output-dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert (
        error
        == f"trainyard: --output-dir {tmp_path / 'out'}: can't be written (its rights, or a read-only file system)\n"
    )


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("~/out", "--output-dir ~/out: only a shell takes ~ for a home; write the whole path"),
        ("s3://bucket/out", "--output-dir s3:/bucket/out: must be a path of this machine, and no address"),
    ],
)
def test_so_is_an_output_folder_that_is_no_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: str, said: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    job = write_job(tmp_path, "single")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["--job", str(job), "--output-dir", place]) == 2
    assert capsys.readouterr().err == f"trainyard: {said}\n"
    assert not any((tmp_path / "here").iterdir())


def test_only_the_first_rank_of_a_host_speaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["--job", str(tmp_path / "nowhere.yaml"), "--output-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == ""


def test_nothing_is_learnt_where_nothing_can_be_saved(tmp_path: Path) -> None:
    for name in ("attempts.json", "checkpoints/.probe"):
        (tmp_path / "there" / name).mkdir(parents=True)  # to be written over: refused to root too
    (tmp_path / "out").mkdir()
    (tmp_path / "out/attempts.json").write_text('{"attempts": 1}')
    job = write_job(tmp_path, "ddp")
    ranks = start_trainer(2, job, tmp_path / "out", "--set", f"checkpoint.destination={tmp_path}/there")
    outputs = finish(ranks, timeout_seconds=600)
    assert [code for code, _ in outputs] == [2, 2], outputs
    said = "".join(text for _, text in outputs)
    assert "Traceback" not in said, "the first rank writes there, and the others hear of it"
    assert said.count(f"can't write {tmp_path}/there/checkpoints/.probe: Is a directory; no checkpoint") == 1
    assert "step=1 " not in said


def test_a_last_save_is_tried_again_until_the_destination_takes_it(tmp_path: Path) -> None:
    job = write_job(tmp_path, "ddp", steps=5000)
    ranks = start_trainer(2, job, tmp_path / "out", "--set", "checkpoint.every_steps=4000")
    read_until(ranks[0], "step=2 ")
    shutil.rmtree(tmp_path / "out/checkpoints", ignore_errors=True)
    (tmp_path / "out/checkpoints").write_text("a file where the folder of checkpoints should be")
    ranks[1].send_signal(signal.SIGTERM)
    said = read_until(ranks[0], "checkpoint step=")
    assert "not committed" in said
    (tmp_path / "out/checkpoints").unlink()
    outputs = finish(ranks, timeout_seconds=600)
    assert [code for code, _ in outputs] == [75, 75], outputs
    stopped_at = rows_of(tmp_path / "out")[-1]["step"]
    assert (tmp_path / f"out/checkpoints/step-{stopped_at:08d}/COMMITTED").exists()


def test_who_saved_asks_to_be_resumed_though_a_full_disk_takes_no_file_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / RESUME_FILE
    _tell_of_resume(path, 7)
    assert path.read_text() == "step=7\n"
    monkeypatch.setattr(Path, "write_text", full)
    _tell_of_resume(path, 8)
    assert capsys.readouterr().out == f"{path}: not written, its disk is full\n"


def _put_a_file_in_the_place_of(folder: Path) -> None:
    """Whatever a save makes there meanwhile."""
    while not folder.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(IsADirectoryError):
            folder.write_text("a file where the folder of checkpoints should be")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "overrides", "ran", "goes_on"),
    [
        ("stopped", ("every_steps=4000",), "stopped at step {step}", "no checkpoint is there, so it begins anew"),
        ("ended", ("every_steps=4000",), "ran 400 steps", "no checkpoint is there, so it begins anew"),
        ("saved before", ("every_steps=2",), "stopped at step {step}", "it continues from step {saved}"),
        (
            "on the host's disk",
            ("every_steps=4000", "local_directory={near}"),
            "stopped at step {step}",
            "it continues from the last checkpoint that it finds",
        ),
    ],
    ids=["stopped", "ended", "saved before", "on the host's disk"],
)
def test_an_end_whose_save_fails_never_says_resume_me_and_says_what_the_next_start_goes_on_from(
    tmp_path: Path, case: str, overrides: tuple[str, ...], ran: str, goes_on: str
) -> None:
    job = write_job(tmp_path, "single", steps=400 if case == "ended" else 5000)
    given = [f"checkpoint.{one.format(near=tmp_path / 'near')}" for one in (*overrides, "last_save_seconds=0")]
    (rank,) = start_trainer(1, job, tmp_path / "out", *(part for item in given for part in ("--set", item)))
    shown = read_until(rank, "checkpoint step=2 committed" if case == "saved before" else "step=2 ")
    _put_a_file_in_the_place_of(tmp_path / "out/checkpoints")
    if case != "ended":
        rank.send_signal(signal.SIGTERM)
    ((code, output),) = finish([rank], timeout_seconds=600)
    assert code == 1, output
    assert not (tmp_path / "out/resume_me").exists()
    assert not (tmp_path / "out/result.json").exists(), "which would tell of an end that is saved"
    last = output.strip().splitlines()[-1]
    step = re.findall(r"^step=(\d+) ", output, re.MULTILINE)[-1]
    saved = re.findall(r"checkpoint step=(\d+) committed", f"{shown}{output}")
    assert f"{ran.format(step=step)}, but the last checkpoint could not be saved: " in last
    assert last.endswith(f"start the job again: {goes_on.format(saved=saved[-1] if saved else None)}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("common", ["trainyard: what all ranks fail of"]),
        ("own", ["trainyard: a disk of this rank's own is broken", "trainyard: what all ranks fail of"]),
    ],
)
def test_what_befalls_one_rank_is_said_by_it_and_what_befalls_all_is_said_once(
    kind: str, lines: list[str], tmp_path: Path
) -> None:
    job = write_job(tmp_path, "ddp", steps=5)
    options = ("--job", str(job), "--output-dir", str(tmp_path / "out"))
    ended = finish(
        start_ranks(2, "trainer_testing.failing_trainer", kind, str(tmp_path), *options), timeout_seconds=600
    )
    assert [code for code, _ in ended] == [1, 1], ended
    said = [line for _, output in ended for line in output.splitlines() if line.startswith("trainyard: ")]
    assert sorted(said) == lines
    assert "Traceback" not in "".join(output for _, output in ended)
    if kind == "own":
        assert lines[0] in ended[-1][1]
