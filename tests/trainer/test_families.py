"""Every model family of the support table at two ranks equals one process; the table says what the trainer does."""

import re

from trainer_testing.support_table import CASES, ENGINES, METHODS, PAGE, TOLERANCE, Case, measure, refusals_of

MEASURED_HERE = ("fsdp", "zero3")
"""The engines that cut every weight; the others are in the whole table, and in test_strategies for four families."""


def table() -> dict[Case, str]:
    """The cells of docs/support.md."""
    cells: dict[Case, str] = {}
    method = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            method = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith("| family"):
            family, *values = (value.strip() for value in line.strip("|").split("|"))
            cells |= {Case(family, method, engine): value for engine, value in zip(ENGINES, values, strict=True)}
    return cells


def test_every_family_at_two_ranks_equals_one_process() -> None:
    cases = [case for case in CASES if case.method == "full" and case.engine in MEASURED_HERE]
    errors = measure([case for case in cases if case not in refusals_of(cases)])
    assert {case: error for case, error in errors.items() if error > TOLERANCE} == {}


def test_the_support_table_is_whole_and_its_refusals_are_the_trainers() -> None:
    cells, refusals, text = table(), refusals_of(CASES), PAGE.read_text(encoding="utf-8")
    assert set(cells) == set(CASES)
    assert {case for case, cell in cells.items() if cell.startswith("refused")} == set(refusals)
    reasons = dict(re.findall(r"^(\d+)\. `(.*)`$", text, flags=re.MULTILINE))
    for case, reason in refusals.items():
        assert reasons[re.sub(r"\D", "", cells[case])] == reason
    assert all(float(cells[case]) <= TOLERANCE for case in CASES if case not in refusals)
    assert {case.method for case in cells} == set(METHODS)
