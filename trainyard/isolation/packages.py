"""The code of the functions that no template shows: what was packed beside the templates is what the checkout has."""

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainyard.errors import JobFailedError

_EMPTY = frozenset({"trainyard/__init__.py", "trainyard/functions/__init__.py"})
"""Packed empty, so that the modules have the names by which they import each other."""


def look_at_packages(assembly: Path, templates: Mapping[str, Mapping[str, Any]], checkout: Path) -> None:
    """JobFailedError for a function whose package isn't there, lacks its module, or holds what the checkout doesn't."""
    for stack, template in templates.items():
        for logical_id, resource in template.get("Resources", {}).items():
            properties = resource.get("Properties", {})
            code = properties.get("Code", {})
            if resource["Type"] == "AWS::Lambda::Function" and "ZipFile" not in code:
                where = f"stack {stack}: AWS::Lambda::Function {logical_id}"
                _look_at(where, assembly / f"asset.{code.get('S3Key')}", str(properties.get("Handler")), checkout)


def _look_at(where: str, package: Path, handler: str, checkout: Path) -> None:
    wrong = next(_faults(package, handler, checkout), None)
    if wrong is not None:
        raise JobFailedError(
            f"{where}: {package.name} {wrong}, so that the isolation proof can't tell what runs; pack modules of "
            "trainyard/functions as function_code does (stacks/constructs/functions.py)"
        )


def _faults(package: Path, handler: str, checkout: Path) -> Iterator[str]:
    if not package.is_file() or not zipfile.is_zipfile(package):
        yield "is no zip file beside the templates"
        return
    with zipfile.ZipFile(package) as packed:
        names = packed.namelist()
        for name in names:
            source = checkout / name
            ours = b"" if name in _EMPTY else _source(source)
            if packed.read(name) != ours or (name not in _EMPTY and not name.startswith("trainyard/functions/")):
                yield f"holds {name}, which the checkout hasn't as it is there"
    if len(names) != len(set(names)):
        yield "holds a file twice"
    if f"{handler.rpartition('.')[0].replace('.', '/')}.py" not in names:
        yield f"lacks {handler}"


def _source(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
