"""What training.deterministic costs: the same steps with deterministic kernels and without, in turns.

`.venv/bin/python benchmarks/deterministic_cost.py` on this machine's GPU, or its CPU where there is none. Prints the
ratio of the medians (deterministic / free; above 1 is slower), in wall time and in processor time, and the machine.
"""

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import machine
import torch
from trainer.losses.token_loss import IGNORED_LABEL
from trainer.runtime import Runtime, distributed_runtime
from trainer.seeds import use_any_kernels, use_deterministic_kernels
from trainer.strategies import Strategy, build_strategy
from trainer.strategies.base import Batch

from trainyard.planner import resolve
from trainyard.spec.job import JobSpec, ResolvedJob

SIZES = {
    "cpu": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
    "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
}
LENGTHS = {"cpu": 128, "cuda": 4096}
VOCAB_SIZE = 4096


class Tokens:
    """A micro-batch of one document a sequence."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.input_ids = torch.randint(0, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(1))
        self.labels = self.input_ids.clone()
        self.labels[:, 0] = IGNORED_LABEL
        self.position_ids = None


def job_of(device_type: str) -> ResolvedJob:
    """A Llama on one rank."""
    spec = JobSpec.model_validate(
        {
            "name": "deterministic-cost",
            "model": {"config": {"model_type": "llama", "vocab_size": VOCAB_SIZE, **SIZES[device_type]}},
            "data": {"train": [{"path": "unused", "format": "text"}], "sequence_length": LENGTHS[device_type]},
            "training": {
                **{"steps": 10**6, "global_batch_size": 4, "micro_batch_size": 4, "learning_rate": 1e-4},
                **{"precision": "bf16" if device_type == "cuda" else "fp32", "activation_checkpointing": "none"},
            },
            "parallelism": {},
        }
    )
    return resolve(spec, world_size=1)


def step_seconds(strategy: Strategy, batch: Batch, device: torch.device) -> tuple[float, float]:
    """Wall and processor time of one optimizer step."""
    wall, cpu = time.perf_counter(), time.process_time()
    strategy.forward_backward([batch], batch.labels.numel(), lambda _: nullcontext())
    strategy.optimizer_step(1e-4)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(runtime: Runtime, *, rounds: int, steps: int) -> dict[str, Any]:
    """Alternates blocks of `steps` steps, `rounds` times; which goes first alternates too."""
    # For both: cuBLAS reads its setting once, so what costs here is the choice of kernels alone.
    use_deterministic_kernels()
    job = job_of(runtime.device.type)
    from trainer.models.build import outline_model

    strategy = build_strategy(job, model=outline_model(job, vocab_size=VOCAB_SIZE), runtime=runtime)
    batch = Tokens((job.micro_batch_size, job.spec.data.sequence_length))
    seen: dict[str, list[tuple[float, float]]] = {"deterministic": [], "free": []}
    modes = {"deterministic": use_deterministic_kernels, "free": use_any_kernels}
    for number in range(rounds + 1):
        for name in sorted(modes, reverse=number % 2 == 0):
            modes[name]()
            taken = [step_seconds(strategy, batch, runtime.device) for _ in range(steps)]
            if number:  # the first round warms up
                seen[name] += taken
    strategy.close()
    medians = {name: [statistics.median(times) for times in zip(*taken, strict=True)] for name, taken in seen.items()}
    return {
        "steps_each": rounds * steps,
        "median_wall_seconds": {name: round(values[0], 5) for name, values in medians.items()},
        "median_processor_seconds": {name: round(values[1], 5) for name, values in medians.items()},
        "ratio_wall": round(medians["deterministic"][0] / medians["free"][0], 4),
        "ratio_processor": round(medians["deterministic"][1] / medians["free"][1], 4),
        "model": SIZES[runtime.device.type],
        "machine": machine.describe(),
    }


def main() -> None:
    """Measures, prints, and writes the result where asked."""
    parser = argparse.ArgumentParser(description="What training.deterministic costs on this machine.")
    parser.add_argument("--rounds", type=int, default=10, help="alternations (default 10)")
    parser.add_argument("--steps", type=int, default=5, help="steps of each in a round (default 5)")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    with distributed_runtime(cpu_threads=1) as runtime:
        result = measure(runtime, rounds=options.rounds, steps=options.steps)
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
