"""One rank of a tensor group: which random numbers it would drop activations by, at every place of a forward pass.

`python -m trainer_testing.dropout_worker '{"split": {...}, ...}'`: the tiny job's changes by case. Rank 0 prints, by
case, each rank's list of [place, number]: the generator is looked at, not moved.
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from trainer.leaving import leave
from trainer.models.build import outline_model
from trainer.runtime import Runtime, distributed_runtime
from trainer.seeds import seed_everything
from trainer.strategies import Strategy, build_strategy
from trainer.strategies.mesh import random_stream

from trainer_testing.strategy_worker import no_clock
from trainer_testing.tiny import VOCAB_SIZE, global_targets, rank_batches, tiny_job

MARK = "DRAWN "
Drawn = list[tuple[str, float]]


def next_number() -> float:
    """What the default generator would give."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return float(torch.rand((), generator=generator))


def watch(model: nn.Module, drawn: Drawn) -> None:
    """Notes the number at every dropout of `model`, and at every attention."""

    def note(name: str) -> Any:
        return lambda module, _: drawn.append((name, next_number())) if module.training else None

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_pre_hook(note(name))
    attend = functional.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dropout_p"):
            drawn.append(("attention", next_number()))
        return attend(*args, **kwargs)

    functional.scaled_dot_product_attention = watched  # type: ignore[assignment]


def drawn_by(changes: dict[str, Any], runtime: Runtime) -> list[Drawn]:
    """By rank, of one optimizer step and the validation after it; and the next number after all of that."""
    job = tiny_job("tensor2", runtime.world_size, **changes)
    strategy: Strategy = build_strategy(job, model=outline_model(job, vocab_size=VOCAB_SIZE), runtime=runtime)
    drawn: Drawn = []
    attend = functional.scaled_dot_product_attention
    watch(strategy._model, drawn)  # type: ignore[attr-defined]
    seed_everything(job.spec.training.seed, rank=random_stream(job.parallelism, runtime.rank))
    batches = rank_batches(job, 1, strategy.data_parallel_rank)
    strategy.forward_backward(batches, global_targets(1), no_clock)
    drawn.append(("before validation", next_number()))
    strategy.evaluate(batches)
    drawn.append(("after validation", next_number()))
    strategy.close()
    functional.scaled_dot_product_attention = attend
    found: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(found, drawn, group=runtime.control_group)
    return found


def main(cases: dict[str, dict[str, Any]]) -> None:
    """Every case, in one process group."""
    with distributed_runtime(cpu_threads=1) as runtime:
        found = {name: drawn_by(changes, runtime) for name, changes in cases.items()}
        if runtime.is_first:
            print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]))
    leave(0)
