"""When a checkout is set up anew: its stamp, without setting anything up."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SETUP = Path(__file__).resolve().parents[1] / "scripts/lib/setup.py"


@pytest.fixture
def setup() -> ModuleType:
    specification = importlib.util.spec_from_file_location("set_up", SETUP)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_another_build_of_the_same_python_sets_nothing_up_anew(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = setup.digest()
    monkeypatch.setattr(sys, "version", f"{sys.version_info[0]}.{sys.version_info[1]}.99 (another build)")
    assert setup.digest() == wanted
    monkeypatch.setattr(sys, "version_info", (sys.version_info[0], sys.version_info[1] + 1, 0))
    assert setup.digest() != wanted


def test_a_moved_checkout_or_other_packages_do(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = setup.digest()
    for name in setup.INPUTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((setup.ROOT / name).read_bytes())
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    moved = setup.digest()
    (tmp_path / "requirements-dev.txt").write_text("other==1.0\n")
    assert len({wanted, moved, setup.digest()}) == 3


def test_an_environment_whose_interpreter_is_gone_is_made_anew(setup: ModuleType) -> None:
    assert setup.VENV / "bin/python" in setup.COMMANDS


def test_who_may_not_write_runs_what_is_set_up_and_is_told_where_it_is_not(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file in the folder's place stops root too."""
    (tmp_path / ".trainyard").write_text("")
    (tmp_path / "stamp").write_text("made")
    monkeypatch.setattr(setup, "digest", lambda: "made")
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(setup, "COMMANDS", ())
    monkeypatch.setattr(sys, "argv", ["setup"])
    assert setup.main() == 0
    (tmp_path / "stamp").unlink()
    assert setup.main() == 2
    told = capsys.readouterr().err
    assert told.startswith("trainyard: the checkout can't be set up (") and told.count("\n") == 1


def test_scripts_run_their_own_checkouts_code_wherever_they_are_started(tmp_path: Path) -> None:
    (tmp_path / "trainyard").mkdir()
    (tmp_path / "trainyard/__init__.py").write_text("raise SystemExit('the code of another checkout')\n")
    root = SETUP.parents[2]
    done = subprocess.run([root / "scripts/runbooks/job_hung", "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Python puts the working folder before everything that is installed, unless it is told -P.
    scripts = [path for path in (root / "scripts").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    starts = [path for path in scripts if " -m trainyard" in path.read_text()]
    assert len(starts) > 20
    assert [path.name for path in starts if '/bin/python" -P -m trainyard' not in path.read_text()] == []
