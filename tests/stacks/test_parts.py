"""Parts of an environment joined into one assembly: nothing is lost, and nothing that a check found."""

import json
from pathlib import Path
from typing import Any

import pytest

from stacks.parts import MIN_TENANTS, discard, join, split


@pytest.mark.parametrize(
    ("tenants", "processes", "sizes"),
    [(2, 8, [2]), (MIN_TENANTS * 2, 2, [MIN_TENANTS, MIN_TENANTS]), (100, 2, [50, 50]), (100, 3, [33, 33, 34])],
)
def test_tenants_are_split_evenly_where_it_pays(tenants: int, processes: int, sizes: list[int]) -> None:
    names = [f"team{number}" for number in range(tenants)]
    parts = split(names, processes)
    assert [len(part) for part in parts] == sizes
    assert [name for part in parts for name in part] == names


def artifact(stack: str) -> dict[str, Any]:
    return {"type": "stack", "properties": {"templateFile": f"{stack}.template.json"}}


def assembly(folder: Path, stack: str, found: list[str], *, platform: str = "same") -> Path:
    """What a process leaves: the platform's template, and one of its own. The folder may have another's already."""
    folder.mkdir(exist_ok=True)
    violations = [{"ruleName": rule, "violatingConstructs": []} for rule in found]
    failed = {"pluginName": "Nag", "conclusion": "failure" if found else "success", "violations": violations}
    documents: dict[str, Any] = {
        "manifest.json": {"version": "55", "artifacts": {name: artifact(name) for name in ("platform", stack)}},
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


def test_a_second_synthesis_into_one_folder_overwrites_the_first(tmp_path: Path) -> None:
    """The CDK's command keeps its folder: what lies there of the last time is no part of this time's environment."""
    kept = assembly(tmp_path / "kept", "one", [])
    join(kept, assembly(tmp_path / "part", "two", []))
    for platform in ("changed", "changed again"):
        assembly(kept, "one", [], platform=platform)
        part = assembly(tmp_path / "part", "two", ["S1"], platform=platform)
        (part / "two.template.json").write_text(json.dumps({"Resources": platform}))
        (part / "asset.1").mkdir(exist_ok=True)
        (part / "asset.1" / "code.py").write_text(platform)
        join(kept, part)
        assert json.loads((kept / "two.template.json").read_text()) == {"Resources": platform}
        assert (kept / "asset.1" / "code.py").read_text() == platform
    with pytest.raises(AssertionError, match=r"two\.template\.json differs"):
        (part / "two.template.json").write_text("{}")
        join(kept, part)


def test_what_is_discarded_can_be_taken_for_no_assembly(tmp_path: Path) -> None:
    kept = assembly(tmp_path / "kept", "one", [])
    discard(kept)
    assert {item.name for item in kept.iterdir()} == {"tree.json", "validation-report.json"}
    discard(kept)
