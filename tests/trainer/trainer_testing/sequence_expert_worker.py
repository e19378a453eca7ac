"""One rank: trains tiny models with cut sequences and spread experts; rank 0 prints what every step gave.

`python -m trainer_testing.sequence_expert_worker '[{"family": "Llama", "parallelism": {"context": 2}}, ...]'`; see
`Case`. The model families are those of the support table.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from trainer.leaving import leave
from trainer.model import outline_model
from trainer.runtime import Runtime, distributed_runtime
from trainer.schedule import learning_rate_at
from trainer.strategies import Strategy, build_strategy

from trainer_testing.distributed import run_ranks
from trainer_testing.families import FAMILIES
from trainer_testing.strategy_worker import MARK, Result, no_clock
from trainer_testing.tiny import (
    GLOBAL_BATCH,
    LAYOUTS,
    SEQUENCE_LENGTH,
    VOCAB_SIZE,
    TinyBatch,
    global_targets,
    rank_batches,
    tiny_job,
)
from trainyard.spec.job import ResolvedJob

VALIDATION_STEP = 999


@dataclass(frozen=True)
class Case:
    """One layout's run over steps first_step..last_step of one family."""

    family: str
    parallelism: dict[str, Any] = field(default_factory=dict)
    is_packed: bool = False
    """Two or three documents a sequence, cut at places of its own."""
    first_step: int = 1
    last_step: int = 4
    load: str | None = None
    """Checkpoint folder read before the first step."""
    save: str | None = None
    """Checkpoint folder written after the last step."""
    model: dict[str, Any] = field(default_factory=dict)
    """Changes to the family's configuration."""
    job: dict[str, Any] = field(default_factory=dict)
    """Changes to the tiny job."""

    def on_one_process(self) -> "Case":
        """What this case is compared with."""
        return replace(self, parallelism={}, load=None, save=None)


def run(world_size: int, cases: Sequence[Case], timeout_seconds: float = 240) -> list[Result]:
    """All cases one after the other in one launch: rank 0's results, in order."""
    asked = json.dumps([asdict(case) for case in cases])
    module = "trainer_testing.sequence_expert_worker"
    output = run_ranks(world_size, module, asked, timeout_seconds=timeout_seconds)[0]
    results = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    assert len(results) == len(cases), output[-4000:]
    return results


def document_positions(step: int) -> torch.Tensor:
    """(16, 24): positions that begin anew at one or two places of each sequence, seldom where a rank's pieces end."""
    generator = torch.Generator().manual_seed(2000 + step)
    positions = torch.arange(SEQUENCE_LENGTH).repeat(GLOBAL_BATCH, 1)
    for row in positions:
        for cut in sorted(torch.randint(2, SEQUENCE_LENGTH - 2, (2,), generator=generator).tolist()):
            row[cut:] = torch.arange(SEQUENCE_LENGTH - cut)
    return positions


def batches_of(case: Case, job: ResolvedJob, step: int, data_parallel_rank: int) -> list[TinyBatch]:
    """The micro-batches of one data-parallel rank."""
    batches = rank_batches(job, step, data_parallel_rank)
    if not case.is_packed:
        return batches
    positions, size = document_positions(step), job.micro_batch_size
    starts = [(a * job.parallelism.data_parallel_size + data_parallel_rank) * size for a in range(len(batches))]
    return [
        replace(batch, position_ids=positions[start : start + size])
        for start, batch in zip(starts, batches, strict=True)
    ]


def train(case: Case, job: ResolvedJob, strategy: Strategy, runtime: Runtime) -> Result:
    """Losses, gradient norms and the validation loss at the end."""
    assert job.steps is not None
    # Ranks that read the same sequences report parts of, or the same, loss: see Strategy.forward_backward.
    if case.load:
        tensors = strategy.state_tensors()
        dcp.load(tensors, checkpoint_id=case.load)
        strategy.after_load(tensors)
    losses, grad_norms = [], []
    for step in range(case.first_step, case.last_step + 1):
        targets = global_targets(step)
        loss_sum = strategy.forward_backward(
            batches_of(case, job, step, strategy.data_parallel_rank), targets, no_clock
        )
        rate = learning_rate_at(step, num_steps=job.steps, peak=job.learning_rate, schedule=job.spec.training.schedule)
        losses.append(runtime.sum_over_ranks(loss_sum.item())[0] / targets)
        grad_norms.append(strategy.optimizer_step(rate).grad_norm)
    if case.save:
        dcp.save(strategy.state_tensors(), checkpoint_id=case.save)
    loss_sum = strategy.evaluate(batches_of(case, job, VALIDATION_STEP, strategy.data_parallel_rank))
    validation = runtime.sum_over_ranks(loss_sum.item())[0] / global_targets(VALIDATION_STEP)
    names = sorted(strategy.state_tensors())
    return {"loss": losses, "grad_norm": grad_norms, "validation": [validation], "names": names}


def job_of(case: Case, world_size: int) -> ResolvedJob:
    """The tiny job under the case's layout."""
    name = "a case of its own"
    LAYOUTS[name] = {world_size: case.parallelism}
    return tiny_job(name, world_size, model=FAMILIES[case.family] | case.model, **case.job)


def main(cases: Sequence[Case]) -> None:
    """Every case, in one process group."""
    with distributed_runtime(cpu_threads=1) as runtime:
        for case in cases:
            job = job_of(case, runtime.world_size)
            strategy = build_strategy(job, model=outline_model(job, vocab_size=VOCAB_SIZE), runtime=runtime)
            result = train(case, job, strategy, runtime)
            strategy.close()
            if runtime.is_first:
                print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main([Case(**case) for case in json.loads(sys.argv[1])])
    leave(0)
