"""`plan` with its options, as a person and as a program use it: wrong questions are one line and code 2."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainyard.cli.app import run

JOBS = Path(__file__).resolve().parents[2] / "jobs"
JOB = str(JOBS / "llama-7b.yaml")


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees this machine's refreshed prices."""
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("trainyard: ") and printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--set", "training.global_batch_size=-4"],
            "training.global_batch_size: input should be greater than or equal",
        ),
        (["--set", "training.micro_batch_size=0"], "micro_batch_size"),
        (["--set", "compute.instance_type=ml.p9.48xlarge"], "unknown instance type 'ml.p9.48xlarge'; close to it"),
        (
            ["--set", "parallelism={tensor: 16, data_shard: 1}", "--set", "compute.instance_count=2"],
            "does not divide",
        ),
        (["--max-nodes", "4"], "--max-nodes: belongs to --search"),
        (["--deadline-hours", "4"], "--deadline-hours: belongs to --search"),
        (["--search", "--instances", "p9.48xlarge"], "unknown instance type 'p9.48xlarge'"),
        (["--search", "--region", "ap-south-1"], "no price is known in ap-south-1"),
        (["--region", "moon"], "--region moon: is no AWS region"),
        (["--search", "--instances", " , "], "--instances ' , ': names no type"),
        (
            ["--html", "/no/such/folder/plan.html"],
            "--html /no/such/folder/plan.html: can't be written",
        ),
        pytest.param(
            ["--html", f"/{'x' * 300}/plan.html"],
            "can't be written (File name too long)",
            id="--html in an endless one",
        ),
        *(
            (["--dry-run", name, value], f"{name}: not with --dry-run")
            for name, value in (
                ("--instances", "zzz"),
                ("--max-nodes", "3"),
                ("--deadline-hours", "3"),
                ("--loss-curve", "/nonexistent"),
                ("--target-loss", "2"),
            )
        ),
        (["--search", "--deadline-hours", "0"], "--deadline-hours 0: must be above 0"),
        (["--search", "--deadline-hours", "inf"], "--deadline-hours inf: must be above 0, and have an end"),
        (["--search", "--max-nodes", "0"], "--max-nodes"),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, list) else "",
)
def test_wrong_questions(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    # 40 heads: 16 divides neither them nor the hosts' eight GPUs.
    model = ["--set", "model.source=llama-2-13b"] if "divide" in words else []
    assert words in refused(["plan", JOB, *model, *arguments], capsys)


def test_zero_layers_and_an_unknown_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    job = str(JOBS / "gpt-175b.yaml")
    zero = ["--set", "model.config.num_hidden_layers=0"]
    assert "layers must be at least 1 (given: 0)" in refused(["plan", job, *zero], capsys)
    assert "layers must be at least 1 (given: 0)" in refused(["plan", job, "--search", *zero], capsys)
    monkeypatch.setattr("sys.stdin", io.StringIO('{"gpu": "H1000", "layers": 2, "hidden": 64}\n'))
    assert run(["predict", "--jsonl"]) == 2
    assert "unknown GPU 'H1000'; did you mean H100" in json.loads(capsys.readouterr().out)["error"]


def test_a_search_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--search", "--instances", "p5.48xlarge", "--max-nodes", "2"]
    assert run(["plan", JOB, *few]) == 0
    shown = capsys.readouterr().out
    assert "-> " in shown and "run it: trainyard launch JOB.yaml --set 'compute.instance_type=ml.p5.48xlarge'" in shown
    assert run(["plan", JOB, *few, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [option["instance_count"] for option in found["options"] if option["chosen"]] != []
    assert {option["instance_type"] for option in found["options"]} == {"ml.p5.48xlarge"}


def test_a_search_draws_its_page_though_nothing_fits_the_jobs_own_machines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The search is asked for just then: the page is of what it chose, and without that of the machines alone."""
    page = tmp_path / "plan.html"
    large = ["plan", str(JOBS / "llama-70b.yaml"), "--set", "compute.instance_count=1", "--set", "parallelism=auto"]
    large += ["--set", "budget=null", "--html", str(page)]
    few = ["--search", "--instances", "p5.48xlarge", "--max-nodes", "8"]
    assert "nothing fits 1 x p5.48xlarge" in refused(large, capsys) and not page.exists()
    assert run([*large, *few, "--deadline-hours", "672"]) == 0
    assert "-> " in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "Memory of a GPU" in text and re.search(r"on \d x ml\.p5\.48xlarge: ", text)
    assert "the job can&#x27;t be: nothing fits 1 x p5.48xlarge" in text, "why it isn't drawn as it is stated"
    assert run([*large, *few, "--deadline-hours", "0.001"]) == 0
    assert "nothing keeps to 0.001 h" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "Nothing was chosen" in text and "Memory of a GPU" not in text and "p5.48xlarge" in text
    assert "the job can&#x27;t be: nothing fits 1 x p5.48xlarge" in text


def test_a_page_of_nothing_says_what_the_jobs_own_machines_refuse(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """That no layout fits was said of a batch that nothing divides."""
    page = tmp_path / "plan.html"
    odd = ["plan", str(JOBS / "llama-8b-lora.yaml"), "--set", "compute.instance_type=ml.p5.48xlarge"]
    odd += ["--set", "parallelism={data_shard: 8}", "--set", "training.global_batch_size=7", "--html", str(page)]
    few = ["--search", "--instances", "p4d.24xlarge", "--max-nodes", "1", "--deadline-hours", "0.01"]
    assert run([*odd, *few]) == 0
    capsys.readouterr()
    assert re.search(r"can&#x27;t be: training\.global_batch_size 7: is not divisible", page.read_text("utf-8"))


def test_a_plan_notes_what_a_launch_here_would_refuse(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It plans all the same: data may come later."""
    monkeypatch.chdir(JOBS.parent)
    odd = ["plan", str(JOBS / "tiny.yaml"), "--json", "--set", f"data.tokenizer={tmp_path}"]
    assert run(odd) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["job"] == "tiny"
    note = f"note: `trainyard launch` would refuse it as it stands: data.tokenizer {tmp_path}: holds no tokenizer.json;"
    assert shown.err.startswith(note) and shown.err.count("\n") == 1
    assert run(["plan", str(JOBS / "tiny.yaml")]) == 0 and run(["plan", JOB]) == 0
    assert capsys.readouterr().err == "", "nor is anything known of what another machine reads"


def test_a_search_to_a_loss_says_the_steps_that_it_was_made_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    curve = tmp_path / "curve.csv"
    curve.write_text("tokens,loss\n1000000,9\n100000000,3\n")
    few = ["--search", "--instances", "p5.48xlarge", "--max-nodes", "1", "--loss-curve", str(curve)]
    assert run(["plan", JOB, *few, "--target-loss", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    said = [part for item in found["overrides"] for part in ("--set", item)]
    assert run(["plan", JOB, *said, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == found["steps"] < 1000


def test_a_byte_that_no_locale_reads_is_one_lines_fault() -> None:
    """Under a strict locale, too, the lines after it are answered."""
    lines = b'{"gpu": "caf\xe9"}\n{"gpu": "H100", "model": "llama-3-8b"}\n'
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    command = [sys.executable, "-m", "trainyard", "predict", "--jsonl"]
    done = subprocess.run(command, input=lines, capture_output=True, env=environment, check=False)
    odd, good = (json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 2 and b"Traceback" not in done.stderr
    assert "error" in odd and good["peak_memory_gib"] > 0
