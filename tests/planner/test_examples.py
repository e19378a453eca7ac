"""docs/planner.md's worked examples are what the planner says now."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def examples() -> ModuleType:
    """benchmarks/planner_examples.py."""
    spec = importlib.util.spec_from_file_location("planner_examples", ROOT / "benchmarks" / "planner_examples.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planner_examples"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_says_what_the_planner_says(examples: ModuleType) -> None:
    page = examples.between_marks(examples.PAGE.read_text(encoding="utf-8"))
    assert page == examples.table(), "python benchmarks/planner_examples.py --write"


def test_the_textbooks_examples_are_all_there(examples: ModuleType) -> None:
    words = examples.table()
    for part in (
        "41 ms",
        "560 ms",
        "`llama-70b`",
        "`llama-7b`",
        "`gpt2-1.3b`",
        "`gpt-175b`",
        "multi-modal",
        "ResNet-50",
    ):
        assert part in words
    assert "on 64 A100" in words and "on 512 H100" in words and examples.TEXTBOOK_SCALING in words


def test_every_example_stands_beside_a_textbooks_figure(examples: ModuleType) -> None:
    rows = [line.strip("| ").split(" | ") for line in examples.table().splitlines()[2:]]
    assert len(rows) == 11
    assert [row[0] for row in rows if len(row) != 3 or not any(letter.isdigit() for letter in row[2])] == []


def test_the_textbooks_state_is_sixteen_bytes_over_the_ranks(examples: ModuleType) -> None:
    row = next(line for line in examples.table().splitlines() if "`llama-7b`" in line)
    # 16 x 6,738,415,616 / 8 bytes; six FLOPs for each of those parameters and 954 x 256 x 4096 tokens, at 8 x 989.4 T.
    assert "16 bytes over 8 a parameter: 12.6 GiB" in row and "2.84 to 3.55 h" in row
