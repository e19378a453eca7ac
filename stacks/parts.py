"""One environment synthesized by several processes, each a part of its tenants, and joined into one cloud assembly.

A tenant's stacks import the platform's and no other tenant's, so that every process makes the platform and its own
tenants, and each template is the same, byte for byte, as if one process had made all: a test compares. Every part is
held to every check; what any of them finds is in the joined report.
"""

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MIN_TENANTS = 12
"""Of a part: for fewer, a process costs more to start than it saves."""

_MANIFEST, _TREE, _REPORT = "manifest.json", "tree.json", "validation-report.json"
_OF_ONE = {_MANIFEST, _TREE, _REPORT, "cdk.out"}
"""Files that an assembly has once."""

Document = dict[str, Any]


def split(tenants: Sequence[str], processes: int, least: int = MIN_TENANTS) -> list[list[str]]:
    """The tenants, in their order, in up to `processes` runs of equal length; fewer, but one, where a run would have
    under `least`."""
    parts = max(1, min(processes, len(tenants) // least))
    bounds = [len(tenants) * number // parts for number in range(parts + 1)]
    return [list(tenants[begin:end]) for begin, end in itertools.pairwise(bounds)]


def join(assembly: Path, part: Path) -> None:
    """Put what `part` has into `assembly`. AssertionError where the manifests of both list a file and the two differ:
    then the parts would depend on how the tenants were split. What else lies in the assembly is of an earlier
    synthesis into the same folder, and is overwritten."""
    fresh = _listed(assembly)
    for file in sorted(part.iterdir()):
        target = assembly / file.name
        if file.name in _OF_ONE:
            continue
        if file.name in fresh:
            same = target.exists() and file.read_bytes() == target.read_bytes()
            assert same, f"{file.name} differs between two parts of one environment"
        elif file.is_dir():
            shutil.copytree(file, target, dirs_exist_ok=True)
        else:
            shutil.copy2(file, target)
    for name, merge in ((_MANIFEST, _join_manifests), (_TREE, _join_trees), (_REPORT, _join_reports)):
        ours, theirs = assembly / name, part / name
        if theirs.exists():
            whole = merge(_read(ours), _read(theirs)) if ours.exists() else _read(theirs)
            # Each laid out as the CDK does; indented, the tree would take seconds.
            indent = None if name == _TREE else 2
            ours.write_text(json.dumps(whole, indent=indent), encoding="utf-8")


def discard(assembly: Path) -> None:
    """Remove the manifest and what it lists: without it nothing in the folder is an assembly."""
    for name in (*_listed(assembly), _MANIFEST):
        (assembly / name).unlink(missing_ok=True)


def _listed(assembly: Path) -> set[str]:
    """The files that the manifest names: templates, lists of assets, and what is told of stacks beside them."""
    manifest = assembly / _MANIFEST
    artifacts = _read(manifest)["artifacts"].values() if manifest.exists() else ()
    named = [{**item.get("properties", {}), **item} for item in artifacts]
    files = {item.get(key) for item in named for key in ("templateFile", "file", "additionalMetadataFile")}
    return {name for name in files if name and name not in _OF_ONE}


def _read(path: Path) -> Document:
    content: Document = json.loads(path.read_text(encoding="utf-8"))
    return content


def _join_manifests(ours: Document, theirs: Document) -> Document:
    return {**ours, "artifacts": {**theirs["artifacts"], **ours["artifacts"]}}


def _join_trees(ours: Document, theirs: Document) -> Document:
    children = {**theirs["tree"].get("children", {}), **ours["tree"].get("children", {})}
    return {**ours, "tree": {**ours["tree"], "children": children}}


def _join_reports(ours: Document, theirs: Document) -> Document:
    """Every finding of either, by plugin; a failure of either is one of the whole."""
    reports: dict[str, Document] = {}
    for report in (*ours["pluginReports"], *theirs["pluginReports"]):
        known = reports.setdefault(report["pluginName"], {**report, "violations": []})
        known["violations"] += [item for item in report["violations"] if item not in known["violations"]]
        if report["conclusion"] == "failure":
            known["conclusion"] = "failure"
    return {**ours, "pluginReports": list(reports.values())}
