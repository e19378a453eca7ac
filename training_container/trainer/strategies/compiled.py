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
from trainyard.errors import InputError
from trainyard.spec.job import ResolvedJob

BACKEND = "inductor"
"""torch.compile's; tests also take aot_eager, which needs no compiler."""


def check(job: ResolvedJob, *, device_type: str) -> None:
    """InputError, in one line, where blocks can't be compiled here; what no machine could do was refused before."""
    if job.spec.training.compile:
        _check_compiler(device_type)


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
