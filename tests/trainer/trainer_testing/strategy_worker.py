"""One rank: trains the tiny job under each strategy in turn and prints, on rank 0, what every step gave.

`python -m trainer_testing.strategy_worker '[{"strategy": "ddp", "last_step": 20}, ...]'`; see `RunRequest`.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from trainer.checkpoint import Checkpointer
from trainer.leaving import leave
from trainer.models.build import outline_model
from trainer.optimizers.schedule import learning_rate_at
from trainer.runtime import Runtime, distributed_runtime
from trainer.seeds import restore_rng_state, rng_state, seed_everything
from trainer.strategies import Strategy, build_strategy
from trainer.strategies.flat_shard import FlatShard
from trainer.strategies.mesh import has_same_streams, random_stream
from trainer.strategies.torch_engine import TorchStrategy

from trainer_testing.pool import run_pooled
from trainer_testing.tiny import VOCAB_SIZE, global_targets, rank_batches, tiny_job
from trainyard.spec.job import ResolvedJob

MARK = "RESULT "
VALIDATION_STEP = 999
Result = dict[str, Any]
FIGURES = ("loss", "grad_norm", "validation")
_NOTHING = 1e-12
"""Norm of weights that no more than roundings moved from zero: OPT's keys have biases, to which attention is blind."""


@dataclass(frozen=True)
class RunRequest:
    """One strategy's run over steps first_step..last_step."""

    strategy: str
    first_step: int = 1
    last_step: int = 20
    load: str | None = None
    """Checkpoint folder read before the first step."""
    save: str | None = None
    """Checkpoint folder written after `save_after_step`."""
    save_after_step: int = 0
    job: dict[str, Any] = field(default_factory=dict)
    """Changes to the tiny job."""
    is_packed: bool = False
    """Two or three documents a sequence, which don't see each other."""
    keep_weights: str | None = None
    """One process: the file that its last weights are written to."""
    weights: str | None = None
    """Such a file: the last weights are compared with it, tensor by tensor."""
    constants: dict[str, Any] = field(default_factory=dict)
    """The trainer's constants that have another value in this run, by module and name."""
    loss_scale: float = 1.0
    """Torch engines: gradients are made so many times larger and divided by it, as fp16's are. Where it is no power of
    two all that is rounded on the way is rounded otherwise, as it is under three data-parallel ranks."""
    is_wide: bool = False
    """In fp64, all that models name float32 for too (softmax, norms, routers): its rounding is another one where sums
    have another order."""


def run(
    world_size: int,
    requests: Sequence[RunRequest],
    timeout_seconds: float = 600,
    *,
    worker: str = "trainer_testing.strategy_worker",
) -> list[Result]:
    """All requests one after the other in one launch of `world_size` ranks: rank 0's results, in order."""
    asked = json.dumps([asdict(request) for request in requests])
    output = run_pooled(world_size, worker, asked, timeout_seconds=timeout_seconds)[0]
    results = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    assert [result["strategy"] for result in results] == [request.strategy for request in requests], output[-4000:]
    return results


def worst_relative_error(result: Result, reference: Result, keys: Sequence[str] = FIGURES) -> float:
    """Over losses, gradient norms and the validation loss; a reference of more steps is compared from its end."""
    pairs = [pair for key in keys for pair in zip(result[key], reference[key][-len(result[key]) :], strict=True)]
    if not all(math.isfinite(value) for pair in pairs for value in pair):
        return math.inf  # which max() would pass over
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def no_clock(_: str) -> AbstractContextManager[None]:
    """Times nothing."""
    return nullcontext()


def train(request: RunRequest, job: ResolvedJob, strategy: Strategy, runtime: Runtime) -> Result:
    """Losses, gradient norms and the validation loss at the end, as every rank sees them."""
    assert job.steps is not None
    if request.load:
        load(request.load, strategy, job, runtime)
    losses, grad_norms, applied = [], [], []
    for step in range(request.first_step, request.last_step + 1):
        batches = rank_batches(job, step, strategy.data_parallel_rank, is_packed=request.is_packed)
        targets = global_targets(step, job.spec.training.global_batch_size)
        loss_sum = strategy.forward_backward(batches, targets, no_clock)
        rate = learning_rate_at(step, num_steps=job.steps, peak=job.learning_rate, schedule=job.spec.training.schedule)
        update = strategy.optimizer_step(rate)
        losses.append(runtime.sum_over_ranks(loss_sum.item())[0] / targets)
        grad_norms.append(update.grad_norm)
        applied.append(update.was_applied)
        if request.save and step == request.save_after_step:
            save(request.save, step, strategy, job, runtime)
    batches = rank_batches(job, VALIDATION_STEP, strategy.data_parallel_rank, is_packed=request.is_packed)
    targets = global_targets(VALIDATION_STEP, job.spec.training.global_batch_size)
    total = runtime.sum_over_ranks(strategy.evaluate(batches).item())[0] / targets
    seen: Result = {"loss": losses, "grad_norm": grad_norms, "applied": applied, "validation": [total]}
    seen["engine"] = strategy.engine_state()
    if request.keep_weights:
        torch.save(weights_of(strategy), request.keep_weights)
    if request.weights:
        reference = torch.load(request.weights, mmap=True)
        seen["weights_error"] = weights_error(weights_of(strategy), reference, runtime)
    return seen


def checkpoints_at(folder: str, runtime: Runtime) -> Checkpointer:
    """The trainer's own, for one save or load."""
    return Checkpointer(
        folder,
        rank=runtime.rank,
        world_size=runtime.world_size,
        local_dir=Path(f"{folder}-scratch"),
        keep_last=1,
        asynchronous=False,
        process_group=runtime.control_group,
        report=lambda _: None,
    )


def save(folder: str, step: int, strategy: Strategy, job: ResolvedJob, runtime: Runtime) -> None:
    """As a session does; returns when it is committed."""
    streams = {"world_size": runtime.world_size, "ranks_a_stream": job.parallelism.tensor, "rng": rng_state()}
    with closing(checkpoints_at(folder, runtime)) as checkpoints:
        checkpoints.save(step, strategy.state_tensors(), {"engine": strategy.engine_state(), **streams})
        assert checkpoints.last_committed_step == step, checkpoints.last_error


def load(folder: str, strategy: Strategy, job: ResolvedJob, runtime: Runtime) -> None:
    """As a session does, straight into the engine's tensors."""
    with closing(checkpoints_at(folder, runtime)) as checkpoints:
        tensors = strategy.state_tensors()
        info = checkpoints.latest(lambda: tensors, may_spoil=True)
        assert info is not None, f"{folder} has no checkpoint"
        extra = checkpoints.load(info, tensors)
        strategy.after_load(tensors)
        strategy.load_engine_state(extra["engine"])
    if has_same_streams(job.parallelism, extra):
        restore_rng_state(extra["rng"])


def weights_of(strategy: Strategy) -> dict[str, torch.Tensor]:
    """What this rank has of the model and of its weights' averages: live, by name."""
    tensors = strategy.state_tensors().items()
    return {name: tensor for name, tensor in tensors if name.startswith("model.") or name.endswith(".average")}


def weights_error(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], runtime: Runtime) -> float:
    """The norm of the difference, relative to the tensor's own: the worst of all tensors, and of all ranks' copies.

    Infinite unless all ranks together have the reference's tensors and no others.
    """
    held: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(held, sorted(ours), group=runtime.control_group)
    is_whole = set().union(*held) == set(reference)
    worst = torch.zeros((), dtype=torch.float64)
    for name in sorted(set(ours) & set(reference)):
        wanted, tensor = reference[name], ours[name]
        scale = wanted.double().norm()
        scale = scale if scale > _NOTHING else 1.0  # of what is zero, or but for roundings: the difference itself
        if isinstance(tensor, FlatShard):
            tensor, wanted = tensor.local, wanted.flatten()[tensor.start : tensor.start + tensor.local.numel()]
        elif isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if tensor.numel():
            worst = torch.maximum(worst, (tensor.double() - wanted.double()).norm() / scale)
    if not is_whole or not torch.isfinite(worst):
        worst.fill_(torch.inf)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=runtime.control_group)
    return float(worst)


def main(requests: Sequence[RunRequest]) -> None:
    """Every request, in one process group."""
    with distributed_runtime(cpu_threads=1) as runtime:
        for request in requests:
            with ExitStack() as changed:
                for name, value in request.constants.items():
                    changed.enter_context(patch(name, value))
                for name, wide in _WIDE.items() if request.is_wide else ():
                    changed.enter_context(patch(name, wide))
                seen = _run(request, runtime)
            if runtime.is_first:
                print(MARK + json.dumps({"strategy": request.strategy, **seen}), flush=True)


def _wide_softmax(
    scores: torch.Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """torch's, in no narrower type than it is given."""
    return scores.softmax(dim, dtype=None if dtype is None else torch.promote_types(dtype, scores.dtype))


def _wide_cast(cast: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch's, but that what is float64 doesn't become float32."""

    def wide(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.float64:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in kwargs.items()}
        return cast(tensor, *args, **kwargs)

    return wide


_WIDE: dict[str, Callable[..., torch.Tensor]] = {
    "torch.nn.functional.softmax": _wide_softmax,
    "torch.Tensor.float": lambda tensor: tensor.to(torch.float32),
    "torch.Tensor.to": _wide_cast(torch.Tensor.to),
    "torch.Tensor.type": _wide_cast(torch.Tensor.type),
}
"""torch's functions by which models compute in float32 -> those that don't, where they are given float64."""


def _run(request: RunRequest, runtime: Runtime) -> Result:
    job = tiny_job(request.strategy, runtime.world_size, **request.job)
    started = time.perf_counter()
    strategy = build_strategy(job, model=outline_model(job, vocab_size=VOCAB_SIZE), runtime=runtime)
    assert strategy.name == request.strategy
    if request.loss_scale != 1.0:
        assert isinstance(strategy, TorchStrategy)
        strategy._scaler.scale = request.loss_scale
    # As a session does: what is built may have drawn numbers, on one rank more than on another.
    seed_everything(job.spec.training.seed, rank=random_stream(job.parallelism, runtime.rank))
    built = time.perf_counter()
    seen = train(request, job, strategy, runtime)
    seconds = {"build": built - started, "train": time.perf_counter() - built}
    strategy.close()
    return {"seconds": seconds, **seen}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main([RunRequest(**request) for request in json.loads(sys.argv[1])])
    leave(0)
