"""torch.compile, a transformer block at a time.

A block is compiled in place when it first runs, after it was cut and wrapped, so that parameters keep their names;
blocks that are alike share one compilation, so that start-up takes a block's time and not the model's; and what lies
between blocks (FSDP's gathering, DDP's reductions, stages that send) goes on as ever, outside of what is compiled.
Inside are the hooks of tensor parallelism, whose messages become part of the graph. Context parallelism's attention
interrupts it.
"""

import os
import shutil

import torch
from torch import nn

from trainer.models.build import transformer_blocks
from trainer.models.configuration import configuration_of
from trainer.strategies.expert_parallel import num_experts_of
from trainyard.errors import InputError
from trainyard.spec.job import ResolvedJob

BACKEND = "inductor"
"""torch.compile's; tests also take aot_eager, which needs no compiler."""


def check(job: ResolvedJob, *, device_type: str) -> None:
    """InputError, in one line, for what is not proved to be the same compiled, or can't be compiled here."""
    spec = job.spec
    if not spec.training.compile:
        return
    if job.parallelism.engine == "deepspeed":
        raise InputError(
            "training.compile: is not implemented with engine: deepspeed, whose hooks move weights inside the blocks;"
            " use engine: torch"
        )
    if spec.task != "causal_lm":
        raise InputError(f"training.compile: is not implemented for task {spec.task}; set it to false")
    if job.activation_checkpointing == "selective":
        raise InputError(
            "training.compile: can't be had with training.activation_checkpointing: selective, which chooses among"
            " operations that a compiled block no longer has; use full or none"
        )
    if spec.model.adapter is not None and spec.model.adapter.kind == "qlora":
        raise InputError("training.compile: is not implemented with model.adapter: qlora; use lora, or set it to false")
    if (obstacle := _layout_obstacle(job)) is not None:
        raise InputError(f"training.compile: {obstacle}")
    _check_compiler(device_type)


def _layout_obstacle(job: ResolvedJob) -> str | None:
    """What of the job's parallelism a compiled block doesn't survive; None: nothing."""
    layout = job.parallelism
    if layout.pipeline > 1 and layout.pipeline_schedule == "zero_bubble":
        return (
            "can't be had with parallelism.pipeline_schedule: zero_bubble, which takes a backward pass apart that a"
            " compiled block has in one piece; use 1f1b, or set it to false"
        )
    if layout.tensor > 1 and job.activation_checkpointing == "full":
        # torch 2.13 saves the mesh among the tensors of a recomputed graph, and stops.
        return (
            f"is not implemented with parallelism.tensor: {layout.tensor} and training.activation_checkpointing: full"
            " together; set one of them to none or 1, or it to false"
        )
    config = configuration_of(job)
    if layout.expert > 1 or (layout.tensor > 1 and config is not None and num_experts_of(config)):
        degree = "expert" if layout.expert > 1 else "tensor"
        return (
            f"is not implemented with parallelism.{degree}: {getattr(layout, degree)} for a mixture of experts, whose"
            " tokens travel in numbers that differ from step to step; use data_shard, or set it to false"
        )
    return None


def compile_blocks(model: nn.Module, job: ResolvedJob) -> None:
    """Has the blocks of `model` compiled when they first run, if the job asks for it."""
    if job.spec.training.compile:
        # Torch would cut a compiled graph again where DDP's buckets end. Blocks are apart already, so that reductions
        # begin between them.
        torch._dynamo.config.optimize_ddp = False
        for block in transformer_blocks(model):
            block.compile(backend=BACKEND)


def _check_compiler(device_type: str) -> None:
    if BACKEND != "inductor":
        return
    if device_type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise InputError("training.compile: needs triton, which is not installed or does not know this GPU")
        return
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise InputError(
            f"training.compile: needs a C++ compiler on a CPU, and {compiler} is not on the PATH; install g++, or set"
            " it to false"
        )
