"""What single operators take on a GPU: matrix products by their tiles, fused attention, what moves through memory.

Every matrix product has tiles that must fill the device's processors, a ceiling, and bytes that must move; attention
has the efficiency of its kernel's generation.
"""

from trainyard.hardware import Gpu
from trainyard.planner.layout import Layout
from trainyard.planner.time_constants import (
    AMPERE_CEILING_TFLOPS,
    EFFICIENT_PLAIN_SHARE,
    EFFICIENT_SHARE,
    EFFICIENT_WIDE_TIMES,
    FLASH_2,
    FLASH_2_HALF_LENGTH,
    OWN_INSTRUCTIONS_TFLOPS,
    PRE_AMPERE,
    TORCH_TAKES_CUDNN,
    Constants,
)

PROCESSORS = {"volta": 80, "turing": 40, "ampere": 108, "ada": 142, "hopper": 132, "blackwell": 148, "cdna3": 304}
"""Streaming multiprocessors of a generation's large part: a product of fewer tiles leaves some idle."""

TILE = 128
"""Rows and columns of the output that one processor computes at a time."""


def matmul_ceiling_tflops(layout: Layout, device: Gpu, constants: Constants) -> float:
    """TFLOP/s of a large product of linear layers in the layout's precision."""
    if layout.precision == "fp4" and device.fp4_tflops is not None:
        return constants.fp4_ceiling * device.sustained * device.fp4_tflops
    if layout.precision in ("fp8", "fp4") and device.fp8_tflops is not None:
        shares = {
            "blackwell": constants.fp8_ceiling_blackwell,
            # Of AMD's peak no more than in its 16 bits.
            "cdna3": constants.ceiling_blackwell,
        }
        share = shares.get(device.generation, constants.fp8_ceiling_hopper)
        return share * device.sustained * device.fp8_tflops
    return wide_ceiling_tflops(layout, device, constants)


def wide_ceiling_tflops(layout: Layout, device: Gpu, constants: Constants) -> float:
    """The same for what is kept in 16 bits (or 32) where the linear layers have fewer: the output projection."""
    precision = layout.precision if layout.precision in ("fp32", "fp64") else "bf16"
    hopper = constants.ceiling_hopper if layout.engine == "megatron" else constants.ceiling_hopper_torch
    shares = {
        "volta": constants.ceiling_volta,
        "turing": constants.ceiling_volta,
        "ampere": constants.ceiling_ampere,
        "ada": constants.ceiling_ampere,
        "hopper": hopper,
    }
    # What throttles a part are its tensor cores: plain fp32 is spared.
    sustained = 1.0 if precision in ("fp32", "fp64") else device.sustained
    return shares.get(device.generation, constants.ceiling_blackwell) * sustained * device.peak_tflops(precision)


def lacks_flash(layout: Layout, device: Gpu) -> bool:
    """Whether torch has no flash kernel for it: they compute in 16 bits, on NVIDIA's parts since Ampere."""
    if device.generation == "cdna3":
        return False
    return layout.precision in ("fp32", "fp64") or device.generation in PRE_AMPERE


class Operators:
    """Seconds of single operators, forward, on one GPU under a layout's engine, precision and year."""

    def __init__(self, layout: Layout, device: Gpu, constants: Constants) -> None:
        self.layout, self.device, self.constants = layout, device, constants
        self.narrow = matmul_ceiling_tflops(layout, device, constants) * 1e12
        self.wide = wide_ceiling_tflops(layout, device, constants) * 1e12
        self.bytes_per_second = device.memory_tb_per_second * 1e12 * constants.bandwidth_efficiency
        self.processors = PROCESSORS[device.generation]
        self.casts = layout.precision in ("fp8", "fp4") and device.fp8_tflops is not None

    def product(self, rows: float, columns: float, depth: float, groups: float = 1.0, *, wide: bool = False) -> float:
        """Seconds of [rows, depth] x [depth, columns], the rows being spread over `groups` matrices."""
        constants = self.constants
        tiles = groups * max(1.0, rows / groups / TILE) * max(1.0, columns / TILE)
        speed = 1 / (1 + constants.half_waves * self.processors / tiles + constants.half_depth / depth)
        seconds = 2.0 * rows * columns * depth / ((self.wide if wide else self.narrow) * speed)
        element = self.layout.element_bytes
        moved = element * (rows * depth + rows * columns + groups * depth * columns) / self.bytes_per_second
        if self.casts and not wide:
            is_megatron = self.layout.engine == "megatron"
            passes = constants.fp8_cast_passes if is_megatron else constants.fp8_cast_passes_torch
            return max(seconds, moved) + passes * element * rows * (depth + columns) / self.bytes_per_second
        return max(seconds, moved)

    def gradients(self, rows: float, columns: float, depth: float, groups: float = 1.0, *, frozen: bool) -> float:
        """Seconds of the two products that follow backward: of the inputs' gradient, and unless they are frozen of the
        weights', whose sum is as long as a group has rows."""
        inputs = self.product(rows, depth, columns, groups)
        return inputs if frozen else inputs + self.product(groups * columns, depth, rows / groups, groups)

    @property
    def attention_peak(self) -> float:
        """FLOP/s of which attention's kernels reach a share: they have 16 bits where the layers have fewer."""
        device, precision = self.device, self.layout.precision
        if self._is_wide:
            return device.peak_tflops(precision) * 1e12
        return device.sustained * device.peak_tflops("bf16") * 1e12

    def fused_attention(self, flops: float, head_dim: int, *, is_causal: bool = True, efficient: bool = False) -> float:
        """Seconds of a fused kernel, `flops` being those of all scores and both of their products.

        `efficient`: torch's memory-efficient one, which is taken anyway where no flash kernel is to be had. Without
        `is_causal` all scores are computed, as under a mask.
        """
        half_head = self.constants.half_head
        # Tiles on the diagonal are computed whole.
        causal = 0.5 * (1 + min(1.0, TILE / self.layout.sequence_length)) if is_causal else 1.0
        narrower = (1 + half_head / 128) / (1 + half_head / head_dim)
        if efficient or lacks_flash(self.layout, self.device):
            return causal * flops / (narrower * self._efficient_flops)
        return causal * flops / (self.flash_share() * narrower * self.attention_peak)

    @property
    def _is_wide(self) -> bool:
        return self.layout.precision in ("fp32", "fp64")

    @property
    def _efficient_flops(self) -> float:
        """FLOP/s that torch's memory-efficient kernels reach with heads of 128."""
        if not self._is_wide:
            return EFFICIENT_SHARE * self._ampere_share * self.attention_peak
        if self.device.generation in PRE_AMPERE:
            return EFFICIENT_PLAIN_SHARE * self.attention_peak
        tensor_cores = self.device.sustained * self.device.peak_tflops("bf16") * 1e12
        return EFFICIENT_SHARE * self._ampere_share * tensor_cores / EFFICIENT_WIDE_TIMES

    @property
    def _ampere_share(self) -> float:
        """Of the part's peak, what is there for kernels of Ampere's instructions: no more where its products keep up
        more of their peak than others of its generation do (an H20's)."""
        peak = self.device.peak_tflops("bf16")
        ceiling = AMPERE_CEILING_TFLOPS.get(self.device.generation)
        return 1.0 if ceiling is None else min(1.0, ceiling / peak) / max(1.0, self.device.sustained)

    def flash_share(self) -> float:
        """Of the peak, what fused attention's forward pass reaches with heads of 128."""
        constants, layout, generation = self.constants, self.layout, self.device.generation
        if self._has_own_kernels():
            return constants.flash_hopper_native if generation == "hopper" else constants.flash_blackwell
        if layout.year < FLASH_2:
            return self._ampere_share * constants.flash_ampere
        joins = layout.context > 1 and layout.engine == "torch" and layout.library != "trainyard"
        ring = constants.ring_speed if joins else 1.0
        second = constants.flash2_ampere * layout.sequence_length / (layout.sequence_length + FLASH_2_HALF_LENGTH)
        return self._ampere_share * ring * max(constants.flash_ampere, second)

    def _has_own_kernels(self) -> bool:
        """Whether attention runs on kernels of the part's own instructions, where it has more than Ampere's."""
        layout, generation = self.layout, self.device.generation
        if generation == "cdna3":
            return True
        if layout.attention_kernel == "ampere" or generation not in ("hopper", "blackwell"):
            return False
        if generation == "blackwell":
            return self.device.peak_tflops("bf16") >= OWN_INSTRUCTIONS_TFLOPS
        since = FLASH_2 if layout.engine == "megatron" else TORCH_TAKES_CUDNN
        return layout.attention_kernel == "own" or layout.year >= since
