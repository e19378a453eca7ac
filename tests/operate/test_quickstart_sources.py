"""What a quickstart looks at: the files that a person names, and, before it says that nothing has changed, all that its
assembly is made from."""

import io
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from trainyard.errors import InputError
from trainyard.operate.quickstart import __main__ as command
from trainyard.operate.quickstart import report as reporting
from trainyard.operate.quickstart.flow import SOURCES, load_inputs, sources_digest
from trainyard.operate.quickstart.options import Options

ROOT = Path(__file__).parents[2]
OF_AN_ASSEMBLY = """
import importlib, pkgutil, sys
import app, stacks
for found in pkgutil.walk_packages(stacks.__path__, "stacks."):
    importlib.import_module(found.name)
print(*(module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)), sep="\\n")
"""

REPORT = reporting.QuickstartReport.model_validate(
    {
        "passed": True,
        "seconds": {"total": 1.0},
        "tenants": ["acme", "other"],
        "job": {
            **{"name": "acme-tiny-1", "status": "Completed", "steps": 2, "hosts": 2, "strategy": "fsdp2"},
            **{"tokens_per_second": 1.0},
        },
        "loss": {"first": 2.0, "last": 1.0, "validation_last": 1.0, "unigram_entropy": 2.0, "list": [2.0, 1.0]},
        "reclaim": {"step": 1, "resumed_step": 1, "bitwise_equal": True, "seconds_to_next_step": 1.0},
        "isolation": {"attempts": 1, "denied": 1, "controls_allowed": 1, "details": []},
        "cost": {"planned_usd": None, "price_basis": "", "run_usd": None},
        "artifacts": ["s3://b/k"],
        "machine": "",
    }
)


@pytest.mark.parametrize(
    "name",
    [
        *("app.py", "cdk.json", "cdk.context.json", "requirements.txt", "package-lock.json", "local.yaml"),
        *("stacks/constructs/functions.py", "stacks/rules/some.guard", "trainyard/spec/platform.py"),
        *("trainyard/hardware/aws_prices.csv", "trainyard/functions/broker.py", "trainyard/errors.py"),
    ],
)
def test_what_has_changed_is_deployed_again(tmp_path: Path, name: str) -> None:
    assert _changes(tmp_path, name)


def test_what_python_made_of_it_is_no_source(tmp_path: Path) -> None:
    assert not _changes(tmp_path, "trainyard/functions/__pycache__/broker.cpython-311.pyc")


def test_the_same_content_under_another_name_is_a_change(tmp_path: Path) -> None:
    first, second = tmp_path / "stacks/training.py", tmp_path / "stacks/constructs/training.py"
    second.parent.mkdir(parents=True)
    first.write_text("one", encoding="utf-8")
    before = sources_digest(_options(tmp_path))
    first.rename(second)
    assert sources_digest(_options(tmp_path)) != before


def test_paths_are_the_callers_wherever_its_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in the checkout, and the report names files by their URIs, which no relative path has."""
    given: list[Options] = []

    def run(options: Options, _: object) -> SimpleNamespace:
        given.append(options)
        return SimpleNamespace(passed=True)

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    words = ["--output-dir", "out", "--job", "mine/job.yaml", "--environment", "../env.yaml"]
    monkeypatch.setattr(sys, "argv", ["quickstart", *words])
    assert command.main() == 0
    named = (given[0].output_dir, given[0].job, given[0].environment)
    assert named == (tmp_path / "out", tmp_path / "mine/job.yaml", tmp_path.parent / "env.yaml")
    assert (given[0].output_dir / "loss.png").as_uri().endswith("/out/loss.png")


@pytest.mark.parametrize(("name", "words"), [("environments/local.yaml", ""), ("my env.yaml", "--environment '{}'")])
def test_what_to_look_at_next_is_looked_for_where_the_job_is(tmp_path: Path, name: str, words: str) -> None:
    console = Console(file=io.StringIO(), width=400)
    options = replace(_options(tmp_path), environment=tmp_path / name)
    reporting.print_summary(console, REPORT, options)
    shown = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    (line,) = [line.strip("│ ").rpartition("│")[2].strip() for line in shown if "trainyard status" in line]
    assert line == f".venv/bin/trainyard status acme-tiny-1 {words.format(tmp_path / name)}".strip()


@pytest.mark.parametrize(("spot", "told"), [("true", ""), ("false", "compute.spot must be true")])
def test_a_job_whose_machines_nobody_takes_back_is_no_quickstarts(tmp_path: Path, spot: str, told: str) -> None:
    """It was said when the job had run, minutes later."""
    text = (ROOT / "jobs/quickstart.yaml").read_text(encoding="utf-8")
    assert text.count("  spot: true") == 1
    (tmp_path / "job.yaml").write_text(text.replace("  spot: true", f"  spot: {spot}"), encoding="utf-8")
    options = replace(_options(tmp_path), environment=ROOT / "environments/local.yaml")
    with pytest.raises(InputError, match=told) if told else nullcontext():
        load_inputs(options)


def test_every_source_is_there() -> None:
    assert [name for name in SOURCES if not (ROOT / name).exists()] == []


def test_what_the_stacks_import_is_looked_at() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", OF_AN_ASSEMBLY], capture_output=True, text=True, cwd=ROOT, env=environment, check=True
    )
    ours = [Path(line).relative_to(ROOT) for line in done.stdout.split() if Path(line).is_relative_to(ROOT)]
    ours = [path for path in ours if not path.parts[0].startswith(".")]
    assert Path("stacks/constructs/functions.py") in ours
    looked_at = [Path(name) for name in SOURCES]
    assert [str(path) for path in ours if not any(path.is_relative_to(name) for name in looked_at)] == []


def _changes(checkout: Path, name: str) -> bool:
    path = checkout / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("one", encoding="utf-8")
    before = sources_digest(_options(checkout))
    path.write_text("two", encoding="utf-8")
    return sources_digest(_options(checkout)) != before


def _options(checkout: Path) -> Options:
    environment, job = checkout / "local.yaml", checkout / "job.yaml"
    return Options(checkout, environment, job, output_dir=checkout, seed=0, port=None, state_dir=checkout)
