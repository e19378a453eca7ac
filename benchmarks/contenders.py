"""Four loops that train the same model on the same batches: ours, bare torch, Accelerate and Hugging Face's Trainer.

What must be equal is: initial weights, data and its order, fused AdamW with decay on matrices alone, clipping at 1.0,
threads, precision. Trainer v5 defaults to fused AdamW, which a loop with torch's default would lose against.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from interleave import Body
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trainer.loop import train
from trainer.models.build import build_model, transformer_blocks
from trainer.optimizers.build import decay_groups
from trainer.runtime import Runtime
from trainer.session import Session

from trainyard.spec.job import JobSpec, ResolvedJob

BETAS, EPS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Shape:
    """The work of one optimizer step."""

    model: dict[str, Any]
    """Hugging Face configuration."""
    sequence_length: int
    micro_batch_size: int
    num_micro_batches: int
    """Per rank and optimizer step."""
    layout: str
    """ddp or fsdp."""
    precision: str = "fp32"

    @property
    def tokens_per_rank(self) -> int:
        """Tokens that one rank reads in one optimizer step."""
        return self.sequence_length * self.micro_batch_size * self.num_micro_batches


def job_of(shape: Shape, *, tokens: Path, num_steps: int, world_size: int, num_threads: int = 1) -> ResolvedJob:
    """Our job for the shape, reading `tokens` (one document) in order."""
    layout = {"data_replicate": world_size} if shape.layout == "ddp" else {"data_shard": world_size}
    spec = JobSpec.model_validate(
        {
            "name": "benchmark",
            "model": {"config": shape.model},
            "data": {
                "train": [{"path": str(tokens), "format": "tokens"}],
                "sequence_length": shape.sequence_length,
                "shuffle": False,
            },
            "training": {
                "steps": num_steps,
                "global_batch_size": shape.micro_batch_size * shape.num_micro_batches * world_size,
                "micro_batch_size": shape.micro_batch_size,
                "learning_rate": LEARNING_RATE,
                "schedule": {"kind": "constant"},
                "optimizer": {"betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY},
                "gradient_clip": CLIP,
                "precision": shape.precision,
                "activation_checkpointing": "none",
                "cpu_threads": num_threads,
            },
            "parallelism": layout,
        }
    )
    assert not isinstance(spec.parallelism, str)
    return ResolvedJob(
        spec=spec,
        parallelism=spec.parallelism,
        num_hosts=1,
        processes_per_host=world_size,
        steps=num_steps,
        micro_batch_size=shape.micro_batch_size,
        gradient_accumulation_steps=shape.num_micro_batches,
        activation_checkpointing="none",
        learning_rate=LEARNING_RATE,
    )


def model_of(job: ResolvedJob) -> nn.Module:
    """The job's model, the same weights for every contender."""
    assert job.spec.model.config is not None
    return build_model(job, vocab_size=job.spec.model.config["vocab_size"])


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The same sequences as ours, cut from the token file; labels equal the ids."""

    def __init__(self, tokens: npt.NDArray[Any], length: int) -> None:
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self._tokens[index * self._length : (index + 1) * self._length].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


@dataclass
class Contender:
    """A loop, and the model it trains once it has begun."""

    name: str
    body: Body
    model: Callable[[], nn.Module]


def all_contenders(
    shape: Shape, job: ResolvedJob, runtime: Runtime, *, tokens: Path, folder: Path, names: Sequence[str]
) -> list[Contender]:
    """The named ones, in their order; ours is built here because it listens to signals, which a thread can't."""
    makers = {"ours": _ours, "bare": _bare, "accelerate": _accelerate, "trainer": _trainer}
    return [makers[name](shape, job, runtime, tokens, folder) for name in names]


def _ours(shape: Shape, job: ResolvedJob, runtime: Runtime, tokens: Path, folder: Path) -> Contender:
    session = Session(job, runtime, output_dir=folder, scratch_dir=folder / f"scratch-{runtime.rank}")

    def body(finished_step: Callable[[], None]) -> None:
        step = session.strategy.optimizer_step

        def stepping(*given: Any, **options: Any) -> Any:
            update = step(*given, **options)
            finished_step()
            return update

        session.strategy.optimizer_step = stepping  # type: ignore[method-assign]  # the one event all loops share
        train(session)

    return Contender("ours", body, lambda: session.strategy._model)  # type: ignore[attr-defined]


def _bare(shape: Shape, job: ResolvedJob, runtime: Runtime, tokens: Path, folder: Path) -> Contender:
    """What a good engineer writes for this job alone: no checkpoints, no signals, no metrics but its own loss."""
    model = model_of(job)

    def body(finished_step: Callable[[], None]) -> None:
        wrapped = _wrapped(model, shape, runtime)
        optimizer = _adamw(model)
        batches = _rank_batches(tokens, shape, runtime)
        targets = (shape.sequence_length - 1) * shape.micro_batch_size * shape.num_micro_batches
        while True:
            for index in range(shape.num_micro_batches):
                is_last = index == shape.num_micro_batches - 1
                with nullcontext() if is_last or not hasattr(wrapped, "no_sync") else wrapped.no_sync():
                    ids = next(batches)
                    logits = wrapped(input_ids=ids, use_cache=False).logits[:, :-1]
                    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / targets
                    loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            finished_step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()

    return Contender("bare", body, lambda: model)


def _wrapped(model: nn.Module, shape: Shape, runtime: Runtime) -> Any:
    if runtime.world_size == 1:
        return model
    if shape.layout == "ddp":
        return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    mesh = dist.init_device_mesh("cpu", (runtime.world_size,))
    for module in (*transformer_blocks(model), model):
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction but the sum
    return model


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    groups = decay_groups(model, WEIGHT_DECAY)
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)


def _rank_batches(tokens: Path, shape: Shape, runtime: Runtime) -> Iterator[torch.Tensor]:
    """(micro batch, sequence) ids: block b of the file goes to rank b mod ranks."""
    ids = np.load(tokens, mmap_mode="r")
    size = shape.micro_batch_size * shape.sequence_length
    for block in range(runtime.rank, len(ids) // size, runtime.world_size):
        rows = ids[block * size : (block + 1) * size].astype(np.int64)
        yield torch.from_numpy(rows).view(shape.micro_batch_size, shape.sequence_length)


def _accelerate(shape: Shape, job: ResolvedJob, runtime: Runtime, tokens: Path, folder: Path) -> Contender:
    """Accelerate's own recipe: prepare, accumulate, clip_grad_norm_."""
    model = model_of(job)

    def body(finished_step: Callable[[], None]) -> None:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=shape.num_micro_batches)
        data = Sequences(np.load(tokens, mmap_mode="r"), shape.sequence_length)
        loader = torch.utils.data.DataLoader(data, batch_size=shape.micro_batch_size, shuffle=False)
        wrapped, optimizer, loader = accelerator.prepare(model, _adamw(model), loader)
        for batch in loader:
            with accelerator.accumulate(wrapped):
                loss = wrapped(**batch, use_cache=False).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), CLIP)
                optimizer.step()
                if accelerator.sync_gradients:
                    finished_step()
                    loss.item()
                optimizer.zero_grad()

    return Contender("accelerate", body, lambda: model)


def _trainer(shape: Shape, job: ResolvedJob, runtime: Runtime, tokens: Path, folder: Path) -> Contender:
    """Hugging Face's Trainer as it comes, apart from what must be equal; it logs every 500 steps, we every one."""
    model = model_of(job)

    def body(finished_step: Callable[[], None]) -> None:
        data = Sequences(np.load(tokens, mmap_mode="r"), shape.sequence_length)
        arguments = trainer_arguments(shape, job, folder)
        run_trainer(model, arguments, data, finished_step)

    return Contender("trainer", body, lambda: model)


def trainer_arguments(shape: Shape, job: ResolvedJob, folder: Path, **more: Any) -> Any:
    """transformers.TrainingArguments for the job."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=shape.micro_batch_size,
        gradient_accumulation_steps=shape.num_micro_batches,
        max_steps=job.steps or 1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        optim="adamw_torch_fused",
        bf16=shape.precision == "bf16",
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,  # its default costs it a walk through the graph at every step
        **more,
    )


def run_trainer(
    model: nn.Module, arguments: Any, data: Any, finished_step: Callable[[], None], collator: Any = None
) -> None:
    """transformers.Trainer over `data` in order, telling `finished_step` of every optimizer step."""
    from transformers import Trainer, TrainerCallback

    class Told(TrainerCallback):
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            finished_step()

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

    InOrder(model=model, args=arguments, train_dataset=data, data_collator=collator, callbacks=[Told()]).train()


@torch.no_grad()
def whole_weights(model: nn.Module) -> torch.Tensor:
    """All parameters as one float64 vector, gathered where they are sharded."""
    parts = [
        parameter.full_tensor() if isinstance(parameter, DTensor) else parameter for parameter in model.parameters()
    ]
    return torch.cat([part.detach().double().flatten() for part in parts])
