"""Dynamic loss scaling for fp16: gradients are kept inside fp16's narrow range, and steps that overflow are skipped."""

import math
from collections.abc import Mapping
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
        """What a resume needs; nothing of a constant scale, which a resume in fp16 must not begin with."""
        return {"scale": self.scale, "num_good_steps": self.num_good_steps} if self.is_dynamic else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state` gave, or `deepspeed_scaler_state`; a constant scale stays what it is."""
        if not self.is_dynamic or not state:
            return
        self.scale = float(state["scale"])
        self.num_good_steps = int(state["num_good_steps"])


_DEEPSPEED_NAMES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def deepspeed_scaler_state(scaler: Any) -> dict[str, Any]:
    """Of DeepSpeed's DynamicLossScaler: its own numbers, and under `loss_scaler` what they are to ours.

    `cur_iter` is the number of the next step, so the good ones since the last overflow are one less than the distance;
    what it has grown for already counts no more.
    """
    num_good_steps = (scaler.cur_iter - scaler.last_overflow_iter - 1) % scaler.scale_window
    return {
        "deepspeed_loss_scaler": {name: getattr(scaler, name) for name in _DEEPSPEED_NAMES},
        "loss_scaler": {"scale": scaler.cur_scale, "num_good_steps": num_good_steps},
    }


def restore_deepspeed_scaler(scaler: Any, state: Mapping[str, Any]) -> None:
    """Puts back what `deepspeed_scaler_state` gave, or what an engine with a `LossScaler` saved."""
    own, ours = state.get("deepspeed_loss_scaler", {}), state.get("loss_scaler", {})
    for name, value in own.items():
        setattr(scaler, name, value)
    if ours and not own:
        scaler.cur_scale = float(ours["scale"])
        scaler.cur_iter, scaler.last_overflow_iter = int(ours["num_good_steps"]), -1
