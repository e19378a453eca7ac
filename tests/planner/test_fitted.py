"""What a plan says in a narrow terminal is what it says in a wide one: nothing is cut, no word broken."""

import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console, RenderableType
from rich.table import Table

from trainyard.planner import plan, search
from trainyard.planner.fitted import Fitted
from trainyard.planner.render import render
from trainyard.planner.render_search import render_search
from trainyard.spec.job import JobSpec

MakeJob = Callable[..., JobSpec]

SMALL: dict[str, Any] = {"model": {"source": "tinyllama-1.1b"}, "training": {"global_batch_size": 64}}
"""Of the base job, on one machine."""


def shown(what: RenderableType, width: int) -> list[str]:
    console = Console(width=width, record=True, force_terminal=False)
    console.print(what)
    return console.export_text().splitlines()


def words(lines: list[str]) -> set[str]:
    return set(re.findall(r"[^\s,;:()]+", " ".join(lines)))


def small(job: MakeJob) -> JobSpec:
    return job(**SMALL, compute={"instance_count": 1})


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_a_plan_in_a_narrow_terminal_has_every_figure_of_a_wide_one(job: MakeJob, width: int) -> None:
    found = plan(small(job))
    wide, narrow = shown(render(found), 300), shown(render(found), width)
    assert words(wide) - {"verdict"} <= words(narrow) and "…" not in "".join(narrow)
    assert max(map(len, narrow)) <= width
    assert not [line for line in narrow if len(line.strip()) == 1 and line.strip().isalpha()], "a letter a line"
    assert len(narrow) < 5 * len(wide)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_search_in_a_narrow_terminal_has_every_figure_of_a_wide_one(job: MakeJob, width: int) -> None:
    found = search(small(job), instances=["p5.48xlarge"], max_nodes=1)
    wide, narrow = shown(render_search(found), 300), shown(render_search(found), width)
    assert words(wide) - {"verdict", "-"} <= words(narrow) and "…" not in "".join(narrow)


@pytest.mark.parametrize("width", [60, 100, 400])
def test_the_command_of_a_search_can_be_pasted_from_any_terminal(job: MakeJob, width: int) -> None:
    found = search(small(job), instances=["p5.48xlarge"], max_nodes=1)
    text = "\n".join(line.rstrip() for line in shown(render_search(found), width))
    command = text[text.index("run it: ") + len("run it: ") :].partition("\nnote: ")[0]
    wanted = ["trainyard", "launch", "JOB.yaml", *(word for item in found.overrides for word in ("--set", item))]
    # As a shell does, which shlex leaves to it.
    assert shlex.split(command.replace("\\\n", "")) == wanted, (
        "a line without a backslash would be a command of its own"
    )
    assert all(line.endswith("\\") for line in command.splitlines()[:-1])


def table() -> Table:
    found = Table(box=None, pad_edge=False)
    for name in ("", "layout", "GiB", "verdict"):
        found.add_column(name, justify="right" if name == "GiB" else "left", no_wrap=name != "verdict")
    found.add_row("->", "FSDP8", "54.3", "chosen: the least sharding that fits, of all that were looked at")
    found.add_row("", "TP2 FSDP4", "158.3", "-")
    return found


def test_where_there_is_room_the_table_is_rich_s_own() -> None:
    assert shown(Fitted(table()), 120) == shown(table(), 120)


def test_words_stand_beneath_their_row_and_cells_behind_their_headings() -> None:
    beneath = [line.rstrip() for line in shown(Fitted(table()), 40)]
    assert beneath[:3] == ["    layout       GiB", "->  FSDP8       54.3", "      chosen: the least sharding that"]
    assert "    TP2 FSDP4  158.3" in beneath
    named = [line.rstrip() for line in shown(Fitted(table()), 18)]
    assert named[:2] == ["-> layout FSDP8", "      GiB 54.3"]
    assert named[-2:] == ["layout TP2 FSDP4", "      GiB 158.3"]
