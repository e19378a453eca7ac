"""Whole templates against committed ones: what no assertion names is not changed unseen either.

To renew them: TRAINYARD_RENEW=1 pytest tests/stacks/test_snapshots.py; then read the difference, as a reviewer will.
"""

import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

SNAPSHOTS = Path(__file__).parent / "snapshots"
STACKS = ("trainyard-local-platform", "trainyard-local-globex-foundation", "trainyard-local-globex-training")
"""A tenant with every setting at its default, and what it shares."""


def plain(template: dict[str, Any]) -> dict[str, Any]:
    """Without what changes for other reasons and is tested where it is made: functions' code, prices, and the alarms of
    the jobs' objectives."""
    resources = {name: item for name, item in template["Resources"].items() if not name.startswith("Objectives")}
    text = json.dumps({**template, "Resources": resources})
    text = re.sub(r'"[0-9a-f]{64}\.zip"', '"asset.zip"', text)
    text = re.sub(r'\\"prices\\": {[^}]*}', r'\\"prices\\": {}', text)
    document: dict[str, Any] = json.loads(text)
    for item in document["Resources"].values():
        if "ZipFile" in item.get("Properties", {}).get("Code", {}):
            item["Properties"]["Code"]["ZipFile"] = "code"
    return document


@pytest.mark.parametrize("stack", STACKS)
def test_the_template_is_the_one_that_was_reviewed(stack: str, templates: dict[str, Any]) -> None:
    made = json.dumps(plain(templates["local"][stack]), indent=1, sort_keys=True) + "\n"
    path = SNAPSHOTS / f"{stack.removeprefix('trainyard-local-')}.json"
    if os.environ.get("TRAINYARD_RENEW"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(made)
    difference = list(difflib.unified_diff(path.read_text().splitlines(), made.splitlines(), lineterm="", n=2))
    assert difference == [], "\n".join([__doc__ or "", *difference[:60]])
