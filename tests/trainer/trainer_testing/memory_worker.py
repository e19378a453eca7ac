"""One rank: trains a small model under each of DeepSpeed's stages and says what a step leaves in memory.

`python -m trainer_testing.memory_worker '[{"strategy": "zero2", ...}, ...]'`; see `Case`. On a CPU the host's memory is
the device's: what DeepSpeed offloads is counted too.
"""

import gc
import itertools
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch.utils._python_dispatch import TorchDispatchMode
from trainer.leaving import leave
from trainer.models.build import outline_model
from trainer.runtime import Runtime, distributed_runtime
from trainer.strategies import build_strategy

from trainer_testing.pool import run_pooled
from trainer_testing.strategy_worker import no_clock
from trainer_testing.tiny import GLOBAL_BATCH, SEQUENCE_LENGTH, TinyBatch, tiny_job

MARK = "RESULT "
VOCAB_SIZE = 64
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB_SIZE,
}
"""4.2 million parameters, next to none of them at the ends or in a single layer, which stage 3 leaves gathered."""
LEAST_BYTES = 10_000
"""Smaller tensors are norms and counts."""


@dataclass(frozen=True)
class Case:
    """One stage."""

    strategy: str
    precision: str
    parallelism: dict[str, Any] = field(default_factory=dict)
    at_messages: bool = False
    micro_batches: int = 2


def measure(cases: Sequence[Case], world_size: int = 2) -> list[dict[str, float]]:
    """Of each case, bytes a parameter on the first rank: `summed` when a step's backward passes are done, `resting`
    when it has been taken; `bucket`: those of them that hold gradients on their way; `on_device`: sums that are made on
    the device by name; `most`: at any message of any rank's backward pass, and `updating`: at those of the first
    one's update that make much (stages 1 and 2), both with `at_messages`. `is_on_host`: 1 where stage 3 makes its own
    in the host's memory."""
    asked = json.dumps([asdict(case) for case in cases])
    output = run_pooled(world_size, "trainer_testing.memory_worker", asked, timeout_seconds=900)[0]
    return [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]


_settled: list[weakref.ref[torch.Tensor]] = []


def settle() -> None:
    """From now on a look goes through these tensors and what comes after: DeepSpeed and its model are half a million
    objects, and looks are many."""
    gc.unfreeze()
    gc.collect()
    _settled[:] = [weakref.ref(tensor) for tensor in _tracked()]
    gc.freeze()


def _tracked() -> Iterator[torch.Tensor]:
    # Others than tensors may not even say of what class they are.
    return (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor))


def living(*, collects: bool = True) -> dict[int, int]:
    """Address -> bytes of the storages of all tensors; `collects`: those that wait for Python to let go are gone."""
    if collects:
        gc.collect()
    found: dict[int, int] = {}
    settled = (tensor for reference in _settled if (tensor := reference()) is not None)
    for item in itertools.chain(settled, _tracked()):
        for tensor in (item, item.grad if item.is_leaf else None):
            if tensor is not None and (size := tensor.untyped_storage().nbytes()) >= LEAST_BYTES:
                found[tensor.untyped_storage().data_ptr()] = size
    return found


class Most(TorchDispatchMode):
    """The most that is there when an operation has run; `asked`: at which ones somebody looks, by their names."""

    def __init__(self, new_bytes: Callable[[], int], asked: tuple[str, ...]) -> None:
        super().__init__()
        self._new_bytes, self._asked = new_bytes, asked
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Passes the operation on."""
        result = func(*args, **(kwargs or {}))
        if func.name().startswith(self._asked):
            self.most = max(self.most, self._new_bytes())
        return result


MESSAGES, UPDATES = ("c10d::",), ("aten::cat", "aten::_to_copy", "aten::_fused_adam")


def run(case: Case, runtime: Runtime) -> dict[str, float]:
    """The case's bytes a parameter, of the second step."""
    job = tiny_job(
        case.strategy,
        runtime.world_size,
        model=MODEL,
        parallelism=case.parallelism,
        micro_batch_size=GLOBAL_BATCH // runtime.world_size // case.micro_batches,
        precision=case.precision,
    )
    settle()
    before = living()

    def new_bytes(*, collects: bool = True) -> int:
        return sum(size for address, size in living(collects=collects).items() if address not in before)

    model = outline_model(job, vocab_size=VOCAB_SIZE)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    strategy = build_strategy(job, model=model, runtime=runtime)
    # Of two tokens no activation is as large as what is counted; between steps there is none.
    tokens = torch.randint(0, VOCAB_SIZE, (1, 2) if case.at_messages else (job.micro_batch_size, SEQUENCE_LENGTH))
    batches = [TinyBatch(tokens, tokens)] * job.gradient_accumulation_steps
    found = {}
    settle()
    for step in range(2):
        # Messages are many: only where somebody asks what lies there then, without what the step before has left.
        gc.collect()
        seen, updating = (Most(partial(new_bytes, collects=False), asked) for asked in (MESSAGES, UPDATES))
        with seen if step and case.at_messages else nullcontext():
            strategy.forward_backward(batches, tokens.numel(), no_clock)
        found["most"] = _worst(seen.most)
        found["summed"] = new_bytes()
        found["on_device"] = _on_device(strategy)
        # Stage 3's update is one of thousands of such operations: looking at each takes minutes.
        looks = step and case.at_messages and case.strategy != "zero3"
        with updating if looks else nullcontext():
            strategy.optimizer_step(1e-3)
        found["updating"] = updating.most
    found["resting"] = new_bytes()
    engine: Any = strategy
    buckets = getattr(engine._engine.optimizer, "ipg_buckets", {}).values()
    buffers = [bucket.buffer for bucket in buckets]
    found["bucket"] = sum(each.nbytes for each in buffers if isinstance(each, torch.Tensor))
    optimizer = engine._engine.optimizer
    # A name of DeepSpeed's own for the host; else the accelerator's, which is a CPU here.
    is_on_host = hasattr(optimizer, "grad_partitions_flat_buffer") and isinstance(optimizer.device, OffloadDeviceEnum)
    strategy.close()
    return {name: value / num_params for name, value in found.items()} | {"is_on_host": float(is_on_host)}


def _worst(value: int) -> int:
    """Of all ranks."""
    held = torch.tensor([value])
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return int(held)


def _on_device(strategy: Any) -> int:
    """Of stage 2, where they have another type than the weights: wherever the optimizer's state is."""
    optimizer = strategy._engine.optimizer
    groups = getattr(optimizer, "averaged_gradients", {}).values()
    flat = [getattr(group, "flat_partition", None) for group in groups]
    return sum(each.nbytes for each in flat if each is not None)


def main(cases: Sequence[Case]) -> None:
    """Every case, in one process group."""
    with distributed_runtime(cpu_threads=1) as runtime:
        for case in cases:
            found = run(case, runtime)
            if runtime.is_first:
                print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main([Case(**case) for case in json.loads(sys.argv[1])])
    leave(0)
