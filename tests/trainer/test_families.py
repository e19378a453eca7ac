"""Every model family of the support table at two ranks equals one process; the table says what the trainer does."""

import re

import pytest
from trainer_testing.families import FAMILIES
from trainer_testing.support_table import (
    CASES,
    ENGINES,
    PAGE,
    TOLERANCE,
    Case,
    cells_of,
    measure,
    page,
    reason_of,
    refusals_of,
)

KINDS = {"data": ("ddp", "fsdp", "zero1", "zero2", "zero3"), "model": tuple(ENGINES)[5:]}


def each_family_somewhere() -> list[Case]:
    """An engine for every family, in turn: one of data parallelism, or one that cuts the model."""
    refused = refusals_of(CASES)
    found: list[Case] = []
    for number, family in enumerate(FAMILIES):
        engines = list(KINDS.values())[number % len(KINDS)]
        cases = [Case(family, "full", engine) for engine in engines]
        possible = [case for case in cases if case not in refused]
        # The one that was taken least so far.
        found.append(min(possible, key=lambda case: sum(one.engine == case.engine for one in found)))
    return found


@pytest.mark.slow
def test_every_family_at_two_ranks_equals_one_process() -> None:
    chosen = each_family_somewhere()
    assert {case.engine for case in chosen} == set(ENGINES)
    errors = measure(chosen)
    assert len(errors) == len(FAMILIES)
    assert {case: error for case, error in errors.items() if not error <= TOLERANCE} == {}


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_the_whole_table_is_measured_again(method: str) -> None:
    refused = refusals_of(CASES)
    errors = measure([case for case in CASES if case.method == method and case not in refused])
    assert {case: error for case, error in errors.items() if not error <= TOLERANCE} == {}


def test_the_support_page_is_whole_and_its_refusals_are_the_trainers() -> None:
    text, refusals = PAGE.read_text(encoding="utf-8"), refusals_of(CASES)
    cells = cells_of(text)
    assert set(cells) == set(CASES)
    assert {case for case, cell in cells.items() if cell.startswith("refused")} == set(refusals)
    reasons = dict(re.findall(r"^(\d+)\. `(.*)`$", text, flags=re.MULTILINE))
    for case, reason in refusals.items():
        assert reasons[re.sub(r"\D", "", cells[case])] == reason_of(case, reason), case
    errors = {case: float(cell) for case, cell in cells.items() if case not in refusals}
    assert max(errors.values()) <= TOLERANCE
    assert page(errors, refusals) == text, "python -m trainer_testing.support_table writes the page anew"
