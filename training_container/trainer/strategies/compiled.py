"""torch.compile, a transformer block at a time.

A block is compiled in place, so that parameters keep their names; all blocks share one compilation, so that start-up
takes a block's time and not the model's; and what lies between blocks (FSDP's gathering, recomputation of activations)
goes on as ever, outside of what is compiled.
"""

import os
import shutil

from torch import nn

from trainer.models.build import transformer_blocks
from trainyard.errors import InputError
from trainyard.spec.job import ResolvedJob

BACKEND = "inductor"
"""torch.compile's; tests also take aot_eager, which needs no compiler."""


def check(job: ResolvedJob, *, device_type: str) -> None:
    """InputError, in one line, for what is not proved to be the same compiled, or can't be compiled here."""
    spec, layout = job.spec, job.parallelism
    if not spec.training.compile:
        return
    if layout.engine == "deepspeed":
        raise InputError(
            "training.compile: is not implemented with engine: deepspeed, whose hooks move weights inside the blocks;"
            " use engine: torch"
        )
    if spec.task != "causal_lm":
        raise InputError(f"training.compile: is not implemented for task {spec.task}; set it to false")
    for degree in ("tensor", "pipeline", "context", "expert"):
        if getattr(layout, degree) > 1:
            raise InputError(
                f"training.compile: is not implemented with parallelism.{degree}: {getattr(layout, degree)}; use"
                " data_shard alone, or set it to false"
            )
    if layout.data_replicate > 1:
        raise InputError(
            "training.compile: is not proved for DDP and HSDP yet; use data_shard alone, or set it to false"
        )
    if job.activation_checkpointing == "selective":
        raise InputError(
            "training.compile: can't be had with training.activation_checkpointing: selective, which chooses among"
            " operations that a compiled block no longer has; use full or none"
        )
    if spec.model.adapter is not None and spec.model.adapter.kind == "qlora":
        raise InputError("training.compile: is not implemented with model.adapter: qlora; use lora, or set it to false")
    _check_compiler(device_type)


def compile_blocks(model: nn.Module, job: ResolvedJob) -> None:
    """Has the blocks of `model` compiled when they first run, if the job asks for it."""
    if job.spec.training.compile:
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
