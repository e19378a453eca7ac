"""One rank: trains jobs on pictures under several layouts and prints, on rank 0, what every step gave.

`python -m trainer_testing.task_worker FOLDER '[{"layout": "ddp", "job": {...}}, ...]'`; see `TaskRequest`.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from trainer.leaving import leave
from trainer.optimizers.schedule import learning_rate_at
from trainer.runtime import Runtime, distributed_runtime
from trainer.strategies import build_strategy
from trainer.strategies.mesh import data_parallel_rank
from trainer.tasks import task_of

from trainer_testing.pool import run_pooled
from trainyard.planner import resolve
from trainyard.spec.job import JobSpec

MARK = "RESULT "

LAYOUTS: dict[str, dict[int, dict[str, Any]]] = {
    "single": {1: {}},
    "ddp": {2: {"data_replicate": 2}, 4: {"data_replicate": 4}},
    "fsdp": {2: {"data_shard": 2}, 4: {"data_shard": 4}},
    "hsdp": {4: {"data_replicate": 2, "data_shard": 2}},
    **{
        f"zero{stage}": {
            world: {"engine": "deepspeed", "data_replicate": world, "zero_stage": stage} for world in (2, 4)
        }
        for stage in range(4)
    },
}


@dataclass(frozen=True)
class TaskRequest:
    """One run under one layout."""

    layout: str
    job: dict[str, Any]
    """The spec, without parallelism; training.micro_batch_size is that of one process and is divided by the ranks."""
    training: dict[str, Any] = field(default_factory=dict)
    """Changes to the spec's section."""


def run(world_size: int, folder: Path, requests: Sequence[TaskRequest]) -> list[dict[str, Any]]:
    """All requests in one launch of `world_size` ranks: rank 0's results, in order."""
    asked = json.dumps([asdict(request) for request in requests])
    output = run_pooled(world_size, "trainer_testing.task_worker", str(folder), asked, timeout_seconds=600)[0]
    results = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    assert len(results) == len(requests), output[-4000:]
    return results


def train(request: TaskRequest, cache_dir: Path, runtime: Runtime) -> dict[str, Any]:
    """Losses, gradient norms and the validation's sums at the end, global."""
    spec = JobSpec.model_validate(request.job)
    spec = spec.model_copy(update={"training": spec.training.model_copy(update=request.training)})
    size = spec.training.micro_batch_size
    assert isinstance(size, int)
    layout = LAYOUTS[request.layout][runtime.world_size]
    training = spec.training.model_copy(update={"micro_batch_size": size // runtime.world_size})
    written = spec.model_copy(update={"training": training}).model_dump(mode="json") | {"parallelism": layout}
    job = resolve(JobSpec.model_validate(written), world_size=runtime.world_size)
    task = task_of(job)
    data = task.build_data(
        job,
        data_parallel_rank=data_parallel_rank(job.parallelism, runtime.rank),
        data_parallel_size=runtime.world_size,
        cache_dir=cache_dir,
    )
    strategy = build_strategy(job, model=task.build_model(job, data), runtime=runtime)
    losses, grad_norms = [], []
    assert job.steps is not None
    for step in range(1, job.steps + 1):
        batches = data.train.next_step()
        (targets,) = runtime.sum_over_ranks(sum(batch.num_target_tokens for batch in batches))
        loss_sum = strategy.forward_backward(batches, int(targets), _NoClock())
        rate = learning_rate_at(step, num_steps=job.steps, peak=job.learning_rate, schedule=job.spec.training.schedule)
        grad_norms.append(strategy.optimizer_step(rate).grad_norm)
        losses.append(runtime.sum_over_ranks(loss_sum.item())[0] / targets)
    sums = torch.zeros(1 + len(task.measures), dtype=torch.float64)
    assert data.validation is not None
    for batches in data.validation:
        sums += strategy.evaluate(batches).cpu()
    names = sorted(name for name in strategy.state_tensors() if name.startswith("model."))
    data.close()
    strategy.close()
    return {
        "layout": strategy.name,
        "loss": losses,
        "grad_norm": grad_norms,
        "validation": runtime.sum_over_ranks(*sums.tolist()),
        "names": names,
    }


class _NoClock:
    def __call__(self, _: str) -> "_NoClock":
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    with distributed_runtime(cpu_threads=1) as runtime:
        for number, asked in enumerate(json.loads(sys.argv[2])):
            result = train(TaskRequest(**asked), Path(sys.argv[1]), runtime)
            if runtime.is_first:
                print(MARK + json.dumps(result | {"number": number}), flush=True)
    leave(0)
