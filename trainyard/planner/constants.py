"""What the memory formulas can't derive: a few constants, fitted over all sources at once, never to one of them.

`benchmarks/planner_accuracy.py --cross-validate` fits each again without the source that it then scores.
"""

from dataclasses import dataclass

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class MemoryConstants:
    """Fitted constants of the memory formulas."""

    unfused_norm_units: float = 4.0
    """Tensors of tokens x hidden that a norm computed in fp32 by parts keeps (two is its input and output)."""
    selective_share: float = 0.5
    """Of the matrix products' outputs, what FSDP runs with selective recomputation keep: every second one."""
    plain_loss_bytes: float = 12.0
    """Bytes a logit beyond the logits themselves, where the loss is torch's own in fp32."""
    quantized_inputs: float = 1.0
    """Of the inputs of four-bit products, what is kept for the backward pass."""
    fragmentation: float = 0.03
    """Share by which the allocator's reserved memory exceeds what is allocated at the peak."""
    context_gib: float = 0.9
    """What a process holds outside the allocator: the CUDA context and NCCL's channels."""


DEFAULT_MEMORY = MemoryConstants()
"""The shipped fit."""
