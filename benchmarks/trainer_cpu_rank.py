"""One rank of trainer_cpu.py: all contenders in one process group, taking turns."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from contenders import Contender, Shape, all_contenders, job_of, model_of, run_trainer, trainer_arguments, whole_weights
from interleave import Paused
from trainer.leaving import leave
from trainer.loop import train
from trainer.losses.token_loss import IGNORED_LABEL
from trainer.runtime import Runtime, distributed_runtime
from trainer.session import Session

from trainyard.spec.job import ResolvedJob

WARM_UP_STEPS = 3
LARGEST_DIFFERENCE = 1e-3
"""Of what the warm-up changed in the weights, relative: Adam's first steps blow the last bits of gradients up."""


def run_rank(request: dict[str, Any], mark: str) -> None:
    """Prints the request's result on rank 0 and ends the process."""
    with distributed_runtime(cpu_threads=1) as runtime:
        if runtime.world_size == 1:
            # Accelerate takes these for a launch of many ranks and wraps the model in DDP, which one process never has.
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                os.environ.pop(name, None)
        result = (_speed if request["kind"] == "speed" else _packing)(request, runtime)
        if runtime.is_first:
            print(mark + json.dumps(result), flush=True)
        dist.barrier()
    leave(0)


def _speed(request: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    shape = Shape(**request["shape"])
    rounds, block, folder = request["rounds"], request["block"], Path(request["folder"])
    num_steps = WARM_UP_STEPS + rounds * block + 1
    tokens = folder / "tokens.npy"
    if runtime.is_first:
        draw = np.random.default_rng(1)
        size = num_steps * shape.tokens_per_rank * runtime.world_size
        np.save(tokens, draw.integers(0, shape.model["vocab_size"], size).astype(np.uint16))
    dist.barrier()
    job = job_of(shape, tokens=tokens, num_steps=num_steps, world_size=runtime.world_size)
    start = whole_weights(model_of(job))
    names = request["names"]
    contenders = all_contenders(shape, job, runtime, tokens=tokens, folder=folder, names=names)
    loops = [Paused(contender.name, contender.body, num_threads=1) for contender in contenders]
    for loop in loops:
        loop.advance(WARM_UP_STEPS)
        loop.forget()
    difference = _worst_difference(start, contenders)
    take_turns(loops, rounds, block)
    return {
        "tokens_per_rank": shape.tokens_per_rank,
        "worst_weight_difference": difference,
        "step_seconds": {loop.name: loop.step_seconds for loop in loops},
        "cpu_seconds": {loop.name: loop.cpu_seconds for loop in loops},
    }


def take_turns(loops: Sequence[Paused], rounds: int, block: int) -> None:
    """`rounds` turns of `block` steps each; who begins changes from round to round."""
    for turn in range(rounds):
        first = turn % len(loops)
        for loop in (*loops[first:], *loops[:first]):
            loop.advance(block)


def _worst_difference(start: torch.Tensor, contenders: Sequence[Contender]) -> float:
    """How far the contenders' weights are apart, relative to how far they came: proof that they do the same work."""
    changes = [whole_weights(contender.model()) - start for contender in contenders]
    worst = max(float((change - changes[0]).norm() / changes[0].norm()) for change in changes)
    if not worst <= LARGEST_DIFFERENCE:
        raise SystemExit(f"the contenders don't train the same: weights differ by {worst:.2g} of what they changed")
    return worst


PACKED_LENGTH = 256
PACKED_ROWS = 8
PADDED_BATCHES = 3
"""Of `PACKED_ROWS` texts in one of Trainer's optimizer steps: about the useful tokens of one of ours (2,048), so that
neither has more optimizer steps for them."""
NUM_TEXTS = 171 * PACKED_ROWS * PADDED_BATCHES
"""Whole optimizer steps of Trainer's, in every pass over the texts."""


def _packing(request: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    """Texts whose lengths are log-normal, as instruction data's are; ours packed, Trainer padded to a batch's longest.
    An optimizer step of either has about as many useful tokens.

    Useful tokens of a step are labels that count: a text of n tokens, n - 1 of them; what a text's first token would
    be predicted from is another text, so it counts for neither.
    """
    folder = Path(request["folder"])
    draw = np.random.default_rng(1)
    lengths = np.clip(draw.lognormal(mean=np.log(64), sigma=0.8, size=NUM_TEXTS), 8, PACKED_LENGTH).astype(int)
    texts = [draw.integers(1, request["model"]["vocab_size"], length).astype(np.uint16) for length in lengths]
    data = folder / "texts"
    data.mkdir()
    for index, text in enumerate(texts):
        np.save(data / f"{index:05d}.npy", text)
    rounds, block = request["rounds"], request["block"]
    num_steps = WARM_UP_STEPS + rounds * block + 1
    shape = Shape(request["model"], PACKED_LENGTH, PACKED_ROWS, 1, "ddp")
    job = job_of(shape, tokens=data, num_steps=num_steps, world_size=1)
    bodies = {"ours": _packed(job, runtime, folder), "trainer": _padded(shape, job, texts, folder)}
    counts: dict[str, list[int]] = {name: [] for name in bodies}
    batches = {"ours": 1, "trainer": PADDED_BATCHES}
    loops = [
        Paused(name, lambda finished, body=body, seen=counts[name]: body(finished, seen), num_threads=1)
        for name, body in bodies.items()
    ]
    for loop in loops:
        loop.advance(WARM_UP_STEPS)
        loop.forget()
    take_turns(loops, rounds, block)
    rates = {}
    for loop in loops:
        useful = useful_of_turns(counts[loop.name], batches[loop.name], rounds, block)
        rates[loop.name] = list(useful / np.asarray(loop.step_seconds).reshape(-1, block).sum(axis=1))
    shares = {"mean_length": float(lengths.mean()), "median_length": float(np.median(lengths))}
    settings = {"rows": PACKED_ROWS, "sequence_length": PACKED_LENGTH, "distribution": "log-normal, sigma 0.8"}
    settings |= {"padded_batches_a_step": PADDED_BATCHES}
    return {"useful_tokens_per_second": rates, "texts": shares | settings}


def useful_of_turns(seen: Sequence[int], batches_a_step: int, rounds: int, block: int) -> npt.NDArray[np.int64]:
    """Useful tokens of each measured turn. `seen`: of every batch since the first of the warm-up, in order; how many
    batches a loop has looked at tells nothing of how many it has trained on, as Trainer's loader is one ahead."""
    first, last = (batches_a_step * steps for steps in (WARM_UP_STEPS, WARM_UP_STEPS + rounds * block))
    return np.asarray(seen[first:last]).reshape(rounds, -1).sum(axis=1)


Counted = Callable[[Callable[[], None], list[int]], None]


def _packed(job: ResolvedJob, runtime: Runtime, folder: Path) -> Counted:
    session = Session(job, runtime, output_dir=folder, scratch_dir=folder / "scratch")

    def body(finished_step: Callable[[], None], seen: list[int]) -> None:
        forward_backward, step = session.strategy.forward_backward, session.strategy.optimizer_step

        def counting(batches: Any, num_targets: int, clock: Any) -> Any:
            seen.append(sum(batch.num_target_tokens for batch in batches))
            return forward_backward(batches, num_targets, clock)

        def stepping(*given: Any, **options: Any) -> Any:
            update = step(*given, **options)
            finished_step()
            return update

        session.strategy.forward_backward = counting  # type: ignore[method-assign]
        session.strategy.optimizer_step = stepping  # type: ignore[method-assign]
        train(session)

    return body


def _padded(shape: Shape, job: ResolvedJob, texts: Sequence[Any], folder: Path) -> Counted:
    model = model_of(job)

    def body(finished_step: Callable[[], None], seen: list[int]) -> None:
        def collate(rows: Sequence[Any]) -> dict[str, torch.Tensor]:
            """As DataCollatorWithPadding: to the longest of the batch, labels of padding ignored."""
            longest = max(len(row) for row in rows)
            ids = torch.zeros((len(rows), longest), dtype=torch.int64)
            mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED_LABEL)
            for index, row in enumerate(rows):
                ids[index, : len(row)] = torch.from_numpy(row.astype(np.int64))
                mask[index, : len(row)] = 1
                labels[index, : len(row)] = ids[index, : len(row)]
            seen.append(sum(len(row) - 1 for row in rows))
            return {"input_ids": ids, "attention_mask": mask, "labels": labels}

        arguments = trainer_arguments(replace(shape, num_micro_batches=PADDED_BATCHES), job, folder)
        run_trainer(model, arguments, list(texts), finished_step, collate)

    return body
