"""The rooms' import rules (ARCHITECTURE.md), held over every module's own import statements."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TRAINER = ROOT / "training_container" / "trainer"


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which room is entered; write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.py"))
    assert found, f"{folder} holds no module: this test would prove nothing"
    return found


def offenders(folder: Path, forbidden: tuple[str, ...], exempt: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(folder)
        if path.relative_to(folder).as_posix() not in exempt
        for name in imported_modules(path)
        if any(name == module or name.startswith(module + ".") for module in forbidden)
    ]


def test_trainyard_imports_no_torch_no_cdk_no_stacks_no_trainer() -> None:
    assert (
        offenders(ROOT / "trainyard", ("torch", "aws_cdk", "stacks", "trainer", "transformers", "deepspeed", "app"))
        == []
    )


MAY_IMPORT = {
    "spec": {"errors"},
    "hardware": {"errors", "spec"},
    "functions": set(),
    "planner": {"errors", "spec", "hardware"},
    "isolation": {"children", "errors", "spec", "hardware", "functions"},
    "emulator": {"errors", "importing", "spec", "hardware"},
    "launch": {"errors", "importing", "kept_room", "spec", "hardware", "functions", "planner", "emulator"},
    "operate": {
        *("__version__", "children", "errors", "kept_room", "spec", "hardware"),
        *("functions", "planner", "emulator", "launch", "isolation"),
    },
    "cli": {
        *("__version__", "children", "errors", "spec", "hardware"),
        *("planner", "emulator", "launch", "isolation", "operate"),
    },
}
"""ARCHITECTURE.md's table, for the rooms of the toolkit; a room may always import itself."""


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_rooms_import_one_way(room: str) -> None:
    allowed = {room, *MAY_IMPORT[room]}
    entered = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(ROOT / "trainyard" / room)
        for name in imported_modules(path)
        if name.startswith("trainyard.") and name.split(".")[1] not in allowed
    ]
    assert entered == []


def test_every_room_has_its_rule() -> None:
    rooms = {path.parent.relative_to(ROOT / "trainyard").parts[0] for path in (ROOT / "trainyard").glob("*/**/*.py")}
    assert rooms == set(MAY_IMPORT)


def test_stacks_import_only_spec_and_hardware() -> None:
    rooms = ("planner", "launch", "operate", "functions", "emulator", "cli")
    assert offenders(ROOT / "stacks", (*(f"trainyard.{room}" for room in rooms), "torch", "trainer", "boto3")) == []


def test_nothing_in_stacks_reads_the_environment() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in modules(ROOT / "stacks")}
    assert [name for name, text in texts.items() if re.search(r"\benviron\b|\bgetenv\b", text)] == []


def test_trainer_modules_import_only_the_job_spec() -> None:
    rooms = ("launch", "operate", "functions", "emulator", "cli", "spec.platform")
    everywhere = offenders(TRAINER, (*(f"trainyard.{room}" for room in rooms), "aws_cdk", "stacks", "sagemaker"))
    below = offenders(
        TRAINER,
        ("trainyard.planner", "trainyard.hardware"),
        exempt=("entrypoint.py", "__main__.py", "export.py", "collectives.py"),
    )
    assert everywhere + below == []


def test_entrypoint_can_report_a_broken_torch() -> None:
    host = [TRAINER / "container.py", TRAINER / "entrypoint.py", *modules(TRAINER / "host")]
    names = {name for path in host for name in imported_modules(path)}
    assert len(host) > 4 and names
    assert [name for name in names if name.split(".")[0] in {"torch", "transformers", "deepspeed"}] == []
    inner = {name.split(".")[1] for name in names if name.startswith("trainer.")}
    rooms = {"host", "heartbeat", "leaving", "early_save", "speech", "entrypoint", "checkpoint"}
    assert inner <= rooms, "what these import loads no torch either"
    of_checkpoints = {name.split(".")[2] for name in names if name.startswith("trainer.checkpoint.")}
    assert of_checkpoints == {"destination"}, "held below: the rest of that room has torch"


def test_where_checkpoints_lie_is_known_without_torch() -> None:
    import subprocess
    import sys

    code = "import sys; sys.modules['torch'] = None\nimport trainer.checkpoint.destination, trainer.host.losses"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("forbidden", ["torch", "boto3", "aws_cdk", "sagemaker", "rich", "typer", "moto"])
def test_spec_and_planner_load_without(forbidden: str) -> None:
    """The container's wheel has pydantic and PyYAML only; its import must not need more."""
    import subprocess
    import sys

    code = (
        f"import sys; sys.modules[{forbidden!r}] = None\n"
        "import trainyard.spec.job, trainyard.spec.platform, trainyard.planner, trainyard.hardware, trainyard.errors"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def module_graph() -> dict[str, set[str]]:
    """Each module of ours to those that it imports, wherever in its text: a circle is one too where an import is put
    off into a function, or is for the type checker alone."""
    paths = [path for folder in (ROOT / "trainyard", ROOT / "stacks", TRAINER) for path in modules(folder)]
    roots = {path: TRAINER.parent if path.is_relative_to(TRAINER) else ROOT for path in paths}
    dotted = {path: ".".join(path.relative_to(roots[path]).with_suffix("").parts) for path in paths}
    names = {path: name.removesuffix(".__init__") for path, name in dotted.items()}
    known = set(names.values())
    return {
        name: {next((one for one in (found, found.rpartition(".")[0]) if one in known), name) for found in imported}
        - {name}
        for path, name in names.items()
        for imported in (set(imported_modules(path)),)
    }


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found, todo = set[str](), list(graph[start])
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            todo += graph[name]
    return found


def test_no_modules_import_each_other() -> None:
    graph = module_graph()
    assert [name for name in graph if name in reached(graph, name)] == []
