"""What the memory formulas can't derive: a few constants, fitted over all sources at once, but `load_spread` to one.

`benchmarks/planner_accuracy.py --cross-validate` fits three of them again (selective_share, plain_loss_bytes,
quantized_inputs) without the source that it then scores; the others are from the sources' tables or estimates.
"""

import re
from dataclasses import dataclass

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class MemoryConstants:
    """Fitted constants of the memory formulas."""

    unfused_norm_units: float = 4.0
    """Tensors of tokens x hidden that a norm computed in fp32 by parts keeps (two is its input and output)."""
    selective_share: float = 0.5
    """Of the matrix products' outputs, what torchtitan's selective recomputation keeps: every second one."""
    plain_loss_bytes: float = 12.0
    """Bytes a logit beyond the logits themselves, where the loss is torch's own in fp32."""
    quantized_inputs: float = 1.0
    """Of the inputs of four-bit products, what is kept for the backward pass."""
    load_spread: float = 0.5
    """Standard deviation of an expert's share of the tokens, of the mean share, at a run's worst moment: of Megatron's
    functional tests with 2 and 8 expert-parallel ranks (routers in their first hundred steps)."""
    fragmentation: float = 0.03
    """Share of what is allocated at the peak that the allocator can't do without: pieces that nothing fits into."""
    held_back: float = 0.08
    """Share by which the allocator's reserved memory usually exceeds what is allocated at the peak. What of it is free
    is given back before a run ends for want of memory. By Qwen's profile (51 rows of nvidia-smi, 1.07 times the
    estimate with 0.03); eight of nine further sources have more (benchmarks/data/planner_unseen*.csv), where the
    estimate of the peak may be what is too small."""
    state_error: float = 0.03
    """Standard deviation of the training state's relative error."""
    moving_error: float = 0.12
    """That of activations, logits and buffers, under engines whose kernels are known."""
    plain_moving_error: float = 0.25
    """The same for plain loops, whose scripts say less of what they keep."""
    context_gib: float = 0.9
    """What a process holds outside the allocator: the CUDA context and NCCL's channels."""


BEFORE_HOPPER = re.compile(r"v100|a100|a800|a10|a40|a30|a6000|a5000|l4|l40|rtx|t4|p100", re.IGNORECASE)


def has_hopper_workspaces(gpu_name: str) -> bool:
    """cuBLAS and Transformer Engine take 32 MiB a stream from Hopper on, and on what is not known to be older."""
    return BEFORE_HOPPER.search(gpu_name) is None


DEFAULT_MEMORY = MemoryConstants()
"""The shipped fit."""
