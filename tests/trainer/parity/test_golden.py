"""One process gives what it gave: a change of the trainer that moves a number is seen, and must be meant."""

import json

import pytest
from trainer_testing.strategy_worker import Result

from parity.golden import NUMBERS, OTHER_CPU_TOLERANCE, TOLERANCES, cpu, digest, measure, path_of, references
from parity.table import STEPS, Reference


@pytest.fixture(scope="module")
def results() -> dict[Reference, Result]:
    return measure()


@pytest.mark.parametrize("reference", [pytest.param(one, id=f"{one.model}-{one.precision}") for one in references()])
def test_numbers_are_those_of_the_golden_file(reference: Reference, results: dict[Reference, Result]) -> None:
    golden = json.loads(path_of(reference.model).read_text(encoding="utf-8"))
    expected = golden[reference.precision]
    assert expected["digest"] == digest(reference), "another run: python -m parity.golden writes the file anew"
    is_same_cpu = golden["cpu"] == cpu()
    tolerance = TOLERANCES[reference.precision] if is_same_cpu else OTHER_CPU_TOLERANCE
    assert len(expected["loss"]) == len(expected["grad_norm"]) == STEPS
    for name in NUMBERS:
        assert results[reference][name] == pytest.approx(expected[name], rel=tolerance), name
