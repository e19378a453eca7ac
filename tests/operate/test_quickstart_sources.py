"""What a quickstart looks at before it says that nothing has changed: all that its assembly is made from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainyard.operate.quickstart.flow import SOURCES, sources_digest
from trainyard.operate.quickstart.options import Options

ROOT = Path(__file__).parents[2]
OF_AN_ASSEMBLY = """
import importlib, pkgutil, sys
import app, stacks
for found in pkgutil.walk_packages(stacks.__path__, "stacks."):
    importlib.import_module(found.name)
print(*(module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)), sep="\\n")
"""


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
