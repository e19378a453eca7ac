"""Dynamic loss scaling for fp16: gradients are kept inside fp16's narrow range, and steps that overflow are skipped."""

import math
from dataclasses import dataclass
from typing import Any

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL_STEPS = 2000
"""Initial scale and growth interval are those of torch.amp.GradScaler."""


@dataclass
class LossScaler:
    """Multiplies the loss by `scale`, halves it after an overflow, doubles it after 2000 good steps.

    Every rank sees the same global gradient norm, so all ranks take the same decision without talking.
    """

    scale: float = 1.0
    is_dynamic: bool = False
    num_good_steps: int = 0

    @classmethod
    def for_precision(cls, precision: str) -> "LossScaler":
        """Dynamic for fp16; a constant 1 for every type with float32's exponent range."""
        return cls(scale=INITIAL_SCALE, is_dynamic=True) if precision == "fp16" else cls()

    def accepts(self, grad_norm: float) -> bool:
        """Whether the step may be applied; adjusts the scale for the next one. `grad_norm` may be scaled or not."""
        if not self.is_dynamic:
            return True
        if not math.isfinite(grad_norm):
            self.scale = max(self.scale / 2.0, 1.0)
            self.num_good_steps = 0
            return False
        self.num_good_steps += 1
        if self.num_good_steps == GROWTH_INTERVAL_STEPS:
            self.scale *= 2.0
            self.num_good_steps = 0
        return True

    def state(self) -> dict[str, Any]:
        """What a resume needs."""
        return {"scale": self.scale, "num_good_steps": self.num_good_steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Puts back what `state` gave; a constant scale stays what it is."""
        if not self.is_dynamic:
            return
        self.scale = float(state["scale"])
        self.num_good_steps = int(state["num_good_steps"])
