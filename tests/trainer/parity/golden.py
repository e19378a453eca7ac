"""What one process gave when these files were last written: losses and gradient norms of every model of the table.

All layouts equal one process, so a change that moves these numbers moves every job. `python -m parity.golden` in
tests/trainer writes them anew; do that only in a commit that says why they moved.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from trainer_testing.strategy_worker import Result, RunRequest, run
from trainer_testing.tiny import global_batch, tiny_job

from parity.table import MODELS, STEPS, Reference

FOLDER = Path(__file__).resolve().parent / "golden"
GLOBAL_BATCH = 8
NUMBERS = ("loss", "grad_norm", "validation")
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-5}
"""Relative, on a CPU with the vector unit that the file names."""
OTHER_CPU_TOLERANCE = 1e-5
"""On another one: models compute norms, routers and first weights in float32 whatever they train in, and how wide a
vector is decides in which order float32 is summed."""


def references() -> list[Reference]:
    """The runs, by model and precision."""
    return [Reference(model, 2, GLOBAL_BATCH, False, precision) for model in MODELS for precision in TOLERANCES]


def path_of(model: str) -> Path:
    """A model's file."""
    return FOLDER / f"{model}.json"


def request_of(reference: Reference) -> RunRequest:
    """The run."""
    return RunRequest("single", last_step=STEPS, job=reference.job)


def digest(reference: Reference) -> str:
    """Of everything that was chosen for the run: settings and tokens. Another one asks for another file."""
    spec = tiny_job("single", 1, **reference.job).spec.model_dump(mode="json", exclude_unset=True)
    tokens = [part[:GLOBAL_BATCH].tolist() for step in range(1, STEPS + 1) for part in global_batch(step)]
    return hashlib.sha256(json.dumps([spec, tokens], sort_keys=True).encode()).hexdigest()


def measure() -> dict[Reference, Result]:
    """What one process gives now."""
    runs = references()
    return dict(zip(runs, run(1, [request_of(reference) for reference in runs]), strict=True))


def cpu() -> str:
    """The vector unit that torch uses here."""
    return str(torch.backends.cpu.get_cpu_capability())


def main() -> int:
    """Writes every file."""
    results = measure()
    FOLDER.mkdir(exist_ok=True)
    for model in MODELS:
        content: dict[str, Any] = {"torch": torch.__version__, "cpu": cpu()}
        for reference, result in results.items():
            if reference.model == model:
                numbers = {name: result[name] for name in NUMBERS}
                content[reference.precision] = {"digest": digest(reference), **numbers}
        path_of(model).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
