"""The container's first process: root becomes the user where the user can do the job, and says so where it can't."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer import container

IS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
CHECKOUT = Path(container.__file__).resolve().parents[2]


@pytest.fixture
def tree() -> Iterator[Path]:
    """/opt/ml where any user can get at it, which pytest's own folders are not."""
    with tempfile.TemporaryDirectory(prefix="trainyard-container-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        (root / "input/data/train-0").mkdir(parents=True)
        (root / "input/data/train-0/part.jsonl").write_text("{}")
        (root / "output/data").mkdir(parents=True)
        yield root


SHOW = """
import os, pathlib, resource, sys
from trainer import container
said = container.leave_root(pathlib.Path(sys.argv[1]), "nobody")
print(os.geteuid(), os.getegid(), 0 in os.getgroups(), os.environ["HOME"], said, sep="|")
try:
    pathlib.Path(sys.argv[1], "output/data/metrics.jsonl").write_text("1")
    os.setuid(0)
    print("root again")
except PermissionError as error:
    print("no:", error.strerror)
"""


def show(tree: Path, **variables: str) -> list[str]:
    environment = (
        os.environ | {"PYTHONPATH": f"{CHECKOUT / 'training_container'}:{CHECKOUT}", "HOME": "/root"} | variables
    )
    done = subprocess.run(
        [sys.executable, "-c", SHOW, str(tree)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    return [*first.split("|"), second]


@IS_ROOT
def test_root_becomes_the_user_for_good_and_the_outputs_are_the_users(tree: Path) -> None:
    uid, gid, has_roots_group, home, said, ending = show(tree)
    nobody = container.pwd.getpwnam("nobody")
    assert (int(uid), int(gid), has_roots_group) == (nobody.pw_uid, nobody.pw_gid, "False")
    assert home == nobody.pw_dir and said == f"runs as nobody (uid {nobody.pw_uid})"
    assert ending == "no: Operation not permitted", "there is no way back"
    assert (tree / "output/data/metrics.jsonl").stat().st_uid == nobody.pw_uid


@IS_ROOT
def test_an_input_of_others_keeps_it_root_and_is_named(tree: Path) -> None:
    (tree / "input/data/train-0/part.jsonl").chmod(0o600)
    uid, gid, has_roots_group, home, said, ending = show(tree)
    assert (uid, gid, has_roots_group, home, ending) == ("0", "0", str(0 in os.getgroups()), "/root", "root again")
    assert said == f"stays root: nobody can't read {tree / 'input/data/train-0/part.jsonl'}"


@IS_ROOT
def test_root_stays_where_it_is_told_to(tree: Path) -> None:
    uid, *_, said, _ = show(tree, TRAINYARD_RUN_AS_ROOT="1")
    assert uid == "0" and "TRAINYARD_RUN_AS_ROOT" in said


def test_a_user_that_isnt_there_is_no_reason_to_fail(tree: Path) -> None:
    said = container.leave_root(tree, "no-such-user")
    assert said == (
        "stays root: there is no user no-such-user here" if os.geteuid() == 0 else f"runs as uid {os.geteuid()}"
    )


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {
        "PYTHONPATH": f"{CHECKOUT / 'training_container'}:{CHECKOUT}",
        "TRAINYARD_RUN_AS_ROOT": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        environment |= {"TRAINYARD_OPT_ML": folder}
        done = subprocess.run(
            [sys.executable, "-m", "trainer.container", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        failure = Path(folder, "output/failure")
        done.stderr += failure.read_text() if failure.exists() else ""
        return done


def test_train_is_the_entrypoint_and_other_words_are_a_command() -> None:
    trained = run("train")
    assert trained.returncode == 2 and "resourceconfig.json" in trained.stderr
    assert run().returncode == 2, "without a word as well"
    told = run("sh", "-c", "echo $0; exit 7", "x")
    assert (told.returncode, told.stdout.splitlines()[-1]) == (7, "x")
    unknown = run("no-such-command")
    assert unknown.returncode == 2 and "no-such-command: No such file" in unknown.stderr
