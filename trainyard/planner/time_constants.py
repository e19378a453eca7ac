"""What the formulas of a step's time can't derive: one set of constants for everything, per GPU generation and era.

benchmarks/planner_accuracy.py --cross-validate shows what they are worth on sources unseen.
"""

from dataclasses import dataclass

EARLY = 2023.0
"""Frameworks before this year waited for their collectives to end, data parallelism's too, and fused fewer kernels."""

WAITED_UNTIL = 2023.8
"""Megatron sent gradients, and the sharded optimizer's weights, when the backward pass was done; its releases since
overlap both (`--overlap-grad-reduce`, `--overlap-param-gather`)."""

FLASH_2 = 2024.0
"""FlashAttention-2's kernels came in July 2023; torch's own attention has them since 2.2, of January 2024."""

TORCH_TAKES_CUDNN = 2026.2
"""torch's own attention has cuDNN's kernels on Hopper since 2.11, of March 2026 (`check_prefer_cudnn_attention`)."""

FLASH_2_HALF_LENGTH = 1500.0
"""Tokens of a sequence at which they reach half of their speed, which is never below the first kernels'. Set by hand:
on an A100 they come to 0.5 and more of the peak in runs that are nearly all attention (of 64,000 tokens and more), and
to 0.4 in steps of 8,192."""


AMPERE_CEILING_TFLOPS = {"hopper": 494.5, "blackwell": 610.0}
"""Of a later part's peak, what is there for kernels of Ampere's instructions, which lack the part's own.

They reach half of the share of it on an H100 that they reach of an A100's (fits of either: 0.51 for the first kernels,
0.5 for the second; alone 328 TFLOP/s to 189, flash-attention's flash2_*_fwd_bwd_benchmark.png), on a B200 0.27 of it
(346 TFLOP/s to 176, without a mask and with heads of 64, flash-attention#1589). A part that has no more than this has
all of it for them: an H20 (84 of 148 TFLOP/s, flash-attention#1310), a workstation's Blackwell (343 of 503,
sglang#36494)."""

OWN_INSTRUCTIONS_TFLOPS = 1000.0
"""Blackwell parts with less have Ampere's instructions alone (compute capability 12.0)."""

EFFICIENT_SHARE = 0.3
"""Of an A100's peak, for torch's memory-efficient kernels, which take masks and values of another width than keys (92
and 98 of 312 TFLOP/s with and without a causal mask, flash2_a100_fwd_bwd_benchmark.png: xformers). Of a V100's and a
T4's too, which have no others (forward 36 of 125 with heads of 128, xformers#439; half of what kernels reach that have
two thirds of a T4's peak, flash-attention#2379)."""

EFFICIENT_WIDE_TIMES = 3.1
"""How much longer these take in fp32, which no flash kernel computes. Since Ampere each product is three of TF32 on
tensor cores (`OpMultiplyAddFastF32`): on an A100 2.78 ms for 0.91 forward, heads of 64, and 47.3 for 14.7 backward,
heads of 128 (xformers#387, #587), 25 and 29 TFLOP/s, more than its plain fp32 has."""

EFFICIENT_PLAIN_SHARE = 0.6
"""Of fp32's own peak, for them on Volta and Turing, whose tensor cores have 16 bits alone: 11.2 of a V100's 15.7
TFLOP/s forward (xformers#439), less backward, where they lie a quarter behind cuBLAS's products (xformers#362)."""

PRE_AMPERE = ("volta", "turing")
"""Generations of which torch has no flash kernels (it asks for compute capability 8.0), nor bf16 tensor cores."""


@dataclass(frozen=True)
class Constants:
    """What the formulas can't derive. One set for everything, fitted to published runs in log space by sources.

    The rows fitted are those that benchmarks/planner_accuracy.py scores; its --cross-validate refits without a source.
    """

    ceiling_volta: float = 0.789
    """Of the dense 16-bit peak, that large matrix products keep up for hours (power and clocks included)."""
    ceiling_ampere: float = 0.713
    ceiling_hopper: float = 0.706
    ceiling_blackwell: float = 0.5
    ceiling_hopper_torch: float = 0.565
    """Of products that aren't Transformer Engine's."""
    fp8_ceiling_hopper: float = 0.75
    """The same for FP8, of its own peak."""
    fp8_ceiling_blackwell: float = 0.8
    fp4_ceiling: float = 0.8
    half_waves: float = 0.19
    """Waves of tiles that a product loses at its end and beginning."""
    half_depth: float = 174.0
    """Length of a product's sum at which it reaches half of its speed."""
    flash_ampere: float = 0.371
    """Of the peak, for fused causal attention, its forward pass: the first FlashAttention's kernels on Ampere (0.25 to
    0.4, by the paper on the second: arXiv:2307.08691)."""
    flash2_ampere: float = 0.5
    """FlashAttention-2's, of an endless sequence (0.5 to 0.73, ibid.). Set by hand: no source that is fitted has
    sequences long enough."""
    ring_speed: float = 0.754
    """Of either's speed, what torch's own context parallelism keeps: it joins the results of parts afterwards."""
    flash_hopper_native: float = 0.639
    """Kernels written for Hopper: Transformer Engine's and FlashAttention-3."""
    flash_blackwell: float = 0.431
    half_head: float = 18.3
    """Width of a head at which fused attention reaches half of that."""
    attention_matrix_passes: float = 2.36
    """Reads and writes of the scores, forward, where attention keeps its matrix."""
    bandwidth_efficiency: float = 0.85
    """Of the memory bandwidth, for element-wise work."""
    passes_fused: float = 3.64
    """Element-wise reads and writes in Megatron's layers, in units of those that the formulas name."""
    passes_compiled: float = 1.15
    """The same in torch's, compiled or not."""
    passes_early: float = 0.922
    """The same before 2023, in units of a count that today's layers exceed: a fit, no count of its own."""
    fp8_cast_passes: float = 0.978
    """Reads and writes of a product's input and output to scale and cast them: Transformer Engine's, which scales by
    the largest values of earlier steps."""
    fp8_cast_passes_torch: float = 2.7
    """The same of torchao's, which reads a tensor for its largest value, and once more to cast it."""
    launch_seconds: float = 1042e-6
    """What the host needs to launch a layer's kernels, in either direction: a small layer can't be faster."""
    launch_moe_seconds: float = 4811e-6
    """The same for a layer of routed experts, with its waits for the numbers of tokens."""
    launch_exposed: float = 0.267
    """Share of that which stands alone beside the device's own work, in either direction: the host, waiting for
    numbers that the device computes, launches nothing ahead, and the device has nothing to do until it does."""
    moe_passes: float = 4.12
    """Reads and writes of every expert's copy of a token: permuting, weighting, gathering back. In 2026."""
    moe_gain_per_year: float = 0.203
    """Natural logarithm by which that, and the launching, has fallen a year."""
    imbalance: float = 1.25
    """The fullest rank's share of tokens over the mean."""
    tensor_exposed_megatron: float = 0.473
    """Share of tensor-parallel communication that stands alone."""
    tensor_exposed_torch: float = 1.2
    """The same factor in torch's; above one, as its collectives are slower than the model of them."""
    expert_exposed: float = 0.346
    send_exposed: float = 0.293
    """Share of an interleaved pipeline's sends that stands alone while it is full."""
    data_overlap: float = 1.0
    """Share of backward time behind which gradient and parameter traffic hides."""
    data_exposed: float = 0.0527
    """Share of what travels once a step that never hides."""
    sharding_exposed: float = 0.203
    """The same of ZeRO-3's traffic, which is under way in every layer: NCCL's kernels take 16 to 32 of a GPU's
    processors, and of its memory's bandwidth, from the products that they run beside."""
    unaligned_speed: float = 0.531
    """Of a product whose output's rows don't begin at multiples of 16 bytes, over that of one whose do: tensor cores
    read eight numbers of 16 bits at once. GPT-2's 50,257 words, before anybody has padded them. vTrain's runs on one
    tensor rank, layers taken off, have 0.29 to 0.44. The fit is of whole steps: it stays by its first guess,
    0.5, and so makes up for what else the formulas have too slow on one rank (with 0.35 they are 5% too long)."""
    proxy_peer_seconds: float = 20.4e-6
    """What every rank in another node adds to an exchange whose network half the host drives. AWS's runs with DeepEP
    over EFA are the only ones that know it."""
    optimizer_passes: float = 1.45
    """Reads and writes of gradients and optimizer state per step, over their size."""
    jitter_per_doubling: float = 0.00205
    """Share of a step lost for each doubling of the nodes: stragglers, and links that others use too."""


DEFAULT_CONSTANTS = Constants()
