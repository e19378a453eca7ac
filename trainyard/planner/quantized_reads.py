"""QLoRA in our own trainer: what its four-bit weights take, and what they cost while a product reads them
(`models/quantized.py` of the trainer). In bytes, of one rank; nothing where weights are not stored so."""

import math
from dataclasses import dataclass

from trainyard.planner.layout import Layout
from trainyard.planner.shapes import ModelShape

READ_ELEMENTS = 1 << 24
"""Weights that are read from four bits at a time."""


def four_bit_bytes(row: int) -> float:
    """Of a weight in rows of that length: half a byte, a byte's share of a block's scale, and of eight bytes a row."""
    block = max(2, min(64, (row & -row) // 8))
    return 0.5 + 1 / block + 8 / row


def num_parts(weights: float) -> int:
    """In which so many weights are read."""
    return max(1, math.ceil(weights / READ_ELEMENTS))


@dataclass(frozen=True)
class QuantizedReads:
    """Of a model's layers."""

    shape: ModelShape
    layout: Layout

    @property
    def _is_quantized(self) -> bool:
        return self.layout.method == "qlora"

    @property
    def block_weights(self) -> float:
        """Of one product of a feed-forward block that is no routed expert: the widest one's."""
        shape = self.shape
        return shape.hidden * max(shape.ffn * (shape.num_mlps > 0), shape.shared_ffn) / self.layout.tensor

    @property
    def mixing_weights(self) -> float:
        """Of the widest product of what mixes tokens."""
        shape = self.shape
        widths = [shape.delta_projected * (shape.delta_layers > 0)]
        for _, kind in shape.attentions:
            widths.append(kind.query_dim * (1 + kind.attention_gate) + 2 * kind.kv_dim * kind.fused_qkv)
            widths.append(kind.value_dim)
        return shape.hidden * max(widths) / self.layout.tensor

    @property
    def last_bytes(self) -> float:
        """While the weight of a feed-forward block's last product is read."""
        return self._reading(self.block_weights)

    @property
    def first_bytes(self) -> float:
        """The same of a product before it, which gives a gate and what it gates at once where these are one."""
        return self._reading(self.block_weights * (1 + self.shape.whole_gate_up))

    @property
    def mixing_bytes(self) -> float:
        """The same of what mixes tokens."""
        return self._reading(self.mixing_weights)

    @property
    def experts_weights(self) -> tuple[float, float]:
        """Of a layer's experts here: of the product or products before their last one, which are read as one weight,
        and of that one."""
        last = self._expert_weights / (3 if self.shape.gated_mlp else 2)
        return self._expert_weights - last, last

    @property
    def experts_bytes(self) -> float:
        """The same of a layer's experts, one kind of weights after the other: those of the last product are read beside
        all that came of the others'."""
        first, last = self.experts_weights
        return max(self._reading(first), self._reading(last, beside=first))

    @property
    def read_experts_bytes(self) -> float:
        """A layer's experts when all have been read."""
        return self._is_quantized * self.layout.element_bytes * self._expert_weights

    @property
    def _expert_weights(self) -> float:
        return self.shape.expert_params / self.layout.expert_split

    def _reading(self, weights: float, *, beside: float = 0.0) -> float:
        """So many in the type of the product, and `beside` them those read before; and of one part of them their codes
        as indices, and what these give."""
        element = self.layout.element_bytes
        part = weights / num_parts(weights)
        return self._is_quantized * (element * (weights + beside) + (element + 2) * part)
