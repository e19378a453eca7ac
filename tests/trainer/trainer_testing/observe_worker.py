"""One rank: trains the tiny job under each layout while one rank is slow, and says where every rank's time went.

`python -m trainer_testing.observe_worker SLOW_SECONDS '[["fsdp", {...}], ...]'`: rank 1 sleeps inside of each forward
pass of its model.
"""

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from trainer.leaving import leave
from trainer.models.build import build_model
from trainer.observe.step_clock import StepClock
from trainer.runtime import Runtime, distributed_runtime
from trainer.strategies import build_strategy

from trainer_testing.tiny import VOCAB_SIZE, global_targets, rank_batches, tiny_job

MARK = "RESULT "
SLOW_RANK = 1


def slow(model: nn.Module, seconds: float) -> None:
    """Every forward pass of the model's last block takes so much longer."""
    model.model.layers[-1].register_forward_pre_hook(lambda *_: time.sleep(seconds))  # type: ignore[union-attr]


def breakdowns(name: str, runtime: Runtime, seconds: float, settings: dict[str, Any]) -> list[dict[str, float]]:
    """Of two steps; the reader leaves out the first, which warms up."""
    job = tiny_job(name, runtime.world_size, **settings)
    model = build_model(job, vocab_size=VOCAB_SIZE)
    if runtime.rank == SLOW_RANK:
        slow(model, seconds)
    strategy = build_strategy(job, model=model, runtime=runtime)
    clock = StepClock(runtime.device, world_size=runtime.world_size)
    rows = []
    for step in range(1, 3):
        strategy.forward_backward(rank_batches(job, step, strategy.data_parallel_rank), global_targets(step), clock)
        with clock("optimizer"):
            strategy.optimizer_step(1e-3)
        runtime.sum_over_ranks(0.0)  # as the loop does, for the loss
        total, breakdown = clock.finish_row()
        rows.append({"total": total, **breakdown})
    strategy.close()
    return rows


def main(seconds: float, requests: list[tuple[str, dict[str, Any]]]) -> None:
    """Every layout, in one process group; rank 0 prints all ranks' rows."""
    with distributed_runtime(cpu_threads=1) as runtime:
        for name, settings in requests:
            rows = breakdowns(name, runtime, seconds, settings)
            gathered: list[Any] = [None] * runtime.world_size
            dist.all_gather_object(gathered, rows, group=runtime.control_group)
            if runtime.is_first:
                print(MARK + json.dumps([name, gathered]), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(float(sys.argv[1]), json.loads(sys.argv[2]))
    leave(0)
