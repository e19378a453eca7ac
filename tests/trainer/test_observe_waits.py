"""Where a step's time goes, on several ranks: waiting for a slow one is communication, under every engine."""

import json
from typing import Any

import pytest
from trainer_testing.pool import run_pooled

MARK = "RESULT "
SLOW_SECONDS = 0.2
TENSOR = {"parallelism": {"tensor": 2}}
CONTEXT = {"parallelism": {"context": 2}}
PIPELINE = {"parallelism": {"pipeline": 2}}
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}),
    ("fsdp", {}),
    ("tensor2", TENSOR),
    ("pipeline2", PIPELINE),
    ("zero3", {}),
]
MORE_LAYOUTS: list[tuple[str, dict[str, Any]]] = [("context2", CONTEXT), ("zero1", {})]


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE_LAYOUTS, marks=pytest.mark.full)])
def test_waiting_for_a_slow_rank_is_communication_under_every_engine(layouts: list[tuple[str, Any]]) -> None:
    asked = (str(SLOW_SECONDS), json.dumps(layouts))
    output = run_pooled(2, "trainer_testing.observe_worker", *asked, timeout_seconds=600)[0]
    results = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    assert [name for name, _ in results] == [name for name, _ in layouts], output[-3000:]
    for name, ranks in results:
        for rows in ranks:
            for row in rows:
                total = row.pop("total")
                assert abs(sum(row.values()) - total) < 1e-6, name
                assert min(row.values()) >= 0.0, (name, row)
        (_, waited), (_, slept) = ranks
        # Rank 1 sleeps in at least two forward passes (of as many micro-batches); rank 0 waits for most of that time,
        # if it is not itself as much slower at computing.
        assert slept["forward"] > 1.5 * SLOW_SECONDS, (name, ranks)
        assert waited["communication"] > SLOW_SECONDS, (name, ranks)
        assert slept["communication"] < waited["communication"], (name, ranks)
        assert waited["forward"] < slept["forward"], (name, ranks)
