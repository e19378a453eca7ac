"""One rank: trains tiny models under many layouts and counts what it says to other ranks in one optimizer step.

`python -m trainer_testing.communication_worker '[{"name": "ddp", ...}, ...]'`; see `Case`. Counted is what reaches
torch.distributed, whoever calls it: our code, DDP's reducer in C++, FSDP2, pipelining or DeepSpeed.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer.leaving import leave
from trainer.loop import train
from trainer.models.build import outline_model
from trainer.runtime import Runtime, distributed_runtime
from trainer.session import Session
from trainer.strategies import build_strategy

from trainer_testing.pool import run_pooled
from trainer_testing.strategy_worker import no_clock
from trainer_testing.tiny import global_targets, rank_batches, tiny_job
from trainyard.planner import resolve
from trainyard.spec.job import load_job

MARK = "RESULT "
WARM_UP_STEPS = 2
"""DDP settles its buckets, pipelining its shapes and FSDP its order before the step that is counted."""

Counts = dict[str, list[int]]
"""Kind of message -> [messages, bytes]. A payload is counted as NCCL's tests do: an all-gather's output, a
reduce-scatter's input, and the tensor of everything else; what a group of one says to itself is none."""


@dataclass(frozen=True)
class Case:
    """One layout."""

    name: str
    strategy: str = "product"
    """Of tiny.LAYOUTS, or a product's `parallelism`."""
    model: dict[str, Any] | None = None
    parallelism: dict[str, Any] | None = None
    micro_batch_size: int = 2
    document_masks: bool = True
    job_file: str | None = None
    """Runs the whole trainer on this job instead, for its steps, and counts them all."""
    job: dict[str, Any] = field(default_factory=dict)
    """Changes to the training section of the tiny job."""


KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "receive",
    "barrier": "barrier",
    "gather_": "gather",
    "scatter_": "scatter",
}
SILENT = frozenset({"wait_tensor", "_wrap_tensor_autograd", "monitored_barrier_"})


class MessageCounter(TorchDispatchMode):
    """Counts every operation of torch.distributed while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Passes the operation on."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if space in ("c10d", "_c10d_functional", "_c10d_functional_autograd") and name not in SILENT:
            kind = KINDS[name]
            size = _group_size(space, args, kwargs)
            if size > 1:
                self.counts[kind][0] += 1
                self.counts[kind][1] += _payload(kind, args, result)
        return result


def _group_size(space: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    values = [*args, *kwargs.values()]
    if space != "c10d":
        from torch.distributed.distributed_c10d import _resolve_process_group

        groups = [_resolve_process_group(value) for value in values if isinstance(value, str) and value.isdigit()]
        return groups[-1].size()
    for value in values:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value).size()
            except (RuntimeError, TypeError):
                continue  # a ReduceOp
    raise AssertionError("an operation without a group")


def _payload(kind: str, args: Sequence[Any], result: Any) -> int:
    """Bytes: the larger of what goes in and what comes out, which tells gathers from scatters without their names."""
    tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
    if kind == "barrier":
        return 0
    if kind in ("all_gather", "reduce_scatter"):
        lists = [value for value in args if isinstance(value, (list, tuple))]
        inside = [leaf for value in lists for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        whole = max(tensor.numel() * tensor.element_size() for tensor in tensors)
        return max(whole, sum(tensor.numel() * tensor.element_size() for tensor in inside) if inside else 0)
    first = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
    if kind == "all_to_all" and len(args) > 1 and isinstance(args[1], torch.Tensor):
        first = [args[1]]  # (output, input, ...): what this rank sends
    return sum(tensor.numel() * tensor.element_size() for tensor in first)


def count(num_ranks: int, cases: Sequence[Case], timeout_seconds: float = 600) -> dict[str, list[Counts]]:
    """Every rank's counts of one step of each case, by its name."""
    asked = json.dumps([asdict(case) for case in cases])
    module = "trainer_testing.communication_worker"
    seen: dict[str, list[Counts]] = {case.name: [] for case in cases}
    for output in run_pooled(num_ranks, module, asked, timeout_seconds=timeout_seconds):
        lines = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
        assert len(lines) == len(cases), output[-4000:]
        for name, counts in map(json.loads, lines):
            seen[name].append(counts)
    return seen


def main(cases: Sequence[Case]) -> None:
    """Every case, in one process group."""
    with distributed_runtime(cpu_threads=1) as runtime:
        for case in cases:
            counts = _whole_job(case, runtime) if case.job_file else _one_step(case, runtime)
            print(MARK + json.dumps([case.name, counts]), flush=True)


def _one_step(case: Case, runtime: Runtime) -> Counts:
    job = tiny_job(
        case.strategy,
        runtime.world_size,
        model=case.model,
        parallelism=case.parallelism,
        micro_batch_size=case.micro_batch_size,
        document_masks=case.document_masks,
        **case.job,
    )
    vocabulary = (job.spec.model.config or {})["vocab_size"]
    strategy = build_strategy(job, model=outline_model(job, vocab_size=vocabulary), runtime=runtime)
    counter = MessageCounter()
    for step in range(1, WARM_UP_STEPS + 2):
        batches = rank_batches(job, step, strategy.data_parallel_rank)
        if step == WARM_UP_STEPS + 1:
            with counter:
                strategy.forward_backward(batches, global_targets(step), no_clock)
                strategy.optimizer_step(1e-3)
        else:
            strategy.forward_backward(batches, global_targets(step), no_clock)
            strategy.optimizer_step(1e-3)
    strategy.close()
    return dict(counter.counts)


def _whole_job(case: Case, runtime: Runtime) -> Counts:
    assert case.job_file is not None
    path = Path(case.job_file)
    job = resolve(load_job(path), world_size=runtime.world_size)
    folder = path.parent / f"output-{case.name}"
    session = Session(job, runtime, output_dir=folder, scratch_dir=folder / "scratch")
    session.save = lambda: None  # type: ignore[method-assign]  # a checkpoint is no part of a step
    counter = MessageCounter()
    with counter:
        train(session)
    session.close()
    return dict(counter.counts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main([Case(**case) for case in json.loads(sys.argv[1])])
    leave(0)
