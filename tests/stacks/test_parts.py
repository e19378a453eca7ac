"""Parts of an environment joined into one assembly: nothing is lost, and nothing that a check found."""

import json
from pathlib import Path
from typing import Any

import pytest

from stacks.parts import MIN_TENANTS, join, split


@pytest.mark.parametrize(
    ("tenants", "processes", "sizes"),
    [(2, 8, [2]), (MIN_TENANTS * 2, 2, [MIN_TENANTS, MIN_TENANTS]), (100, 2, [50, 50]), (100, 3, [33, 33, 34])],
)
def test_tenants_are_split_evenly_where_it_pays(tenants: int, processes: int, sizes: list[int]) -> None:
    names = [f"team{number}" for number in range(tenants)]
    parts = split(names, processes)
    assert [len(part) for part in parts] == sizes
    assert [name for part in parts for name in part] == names


def assembly(folder: Path, stack: str, found: list[str], *, platform: str = "same") -> Path:
    """What a process leaves: the platform's template, and one of its own."""
    folder.mkdir()
    violations = [{"ruleName": rule, "violatingConstructs": []} for rule in found]
    failed = {"pluginName": "Nag", "conclusion": "failure" if found else "success", "violations": violations}
    documents: dict[str, Any] = {
        "manifest.json": {"version": "55", "artifacts": {name: {"type": "stack"} for name in ("platform", stack)}},
        "tree.json": {"tree": {"id": "App", "children": {name: {"id": name} for name in ("platform", stack)}}},
        "validation-report.json": {"version": "1", "pluginReports": [failed]},
        "platform.template.json": {"Resources": platform},
        f"{stack}.template.json": {"Resources": stack},
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    return folder


def test_what_any_part_found_is_in_the_joined_report(tmp_path: Path) -> None:
    whole = assembly(tmp_path / "whole", "one", [])
    join(whole, assembly(tmp_path / "part", "two", ["S1", "S2"]))
    (report,) = json.loads((whole / "validation-report.json").read_text())["pluginReports"]
    assert report["conclusion"] == "failure"
    assert [item["ruleName"] for item in report["violations"]] == ["S1", "S2"]
    assert list(json.loads((whole / "manifest.json").read_text())["artifacts"]) == ["platform", "two", "one"]
    assert set(json.loads((whole / "tree.json").read_text())["tree"]["children"]) == {"platform", "one", "two"}
    assert json.loads((whole / "two.template.json").read_text()) == {"Resources": "two"}


def test_parts_that_make_another_platform_are_not_joined(tmp_path: Path) -> None:
    whole = assembly(tmp_path / "whole", "one", [])
    with pytest.raises(AssertionError, match=r"platform\.template\.json differs"):
        join(whole, assembly(tmp_path / "part", "two", [], platform="other"))
