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
    """InputError, in one line, for what is not proved to be the same compiled, or can't be compiled here.

    What the job alone tells, JobSpec has refused, and its planner chooses nothing of this where a job says `auto`.
    """
    spec = job.spec
    if not spec.training.compile:
        return
    if job.activation_checkpointing == "selective":
        raise InputError(
            "training.compile: can't be had with training.activation_checkpointing: selective, which chooses among"
            " operations that a compiled block no longer has; use full or none"
        )
    if (obstacle := _layout_obstacle(job)) is not None:
        raise InputError(f"training.compile: {obstacle}")
    _check_compiler(device_type)


def _layout_obstacle(job: ResolvedJob) -> str | None:
    """What of the job's parallelism a compiled block doesn't survive; None: nothing."""
    layout = job.parallelism
    if layout.tensor > 1 and job.activation_checkpointing == "full":
        # torch 2.13 saves the mesh among the tensors of a recomputed graph, and stops.
        return (
            f"is not implemented with parallelism.tensor: {layout.tensor} and training.activation_checkpointing: full"
            " together; set activation_checkpointing to none, tensor to 1, or compile to false"
        )
    config = configuration_of(job)
    if layout.tensor > 1 and config is not None and num_experts_of(config):
        return (
            f"is not implemented with parallelism.tensor: {layout.tensor} for a mixture of experts, whose"
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
