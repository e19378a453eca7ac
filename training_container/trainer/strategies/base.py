"""What the loop needs of an engine, whichever it is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Batch(Protocol):
    """One forward pass worth of sequences (`trainer.data.MicroBatch`)."""

    @property
    def input_ids(self) -> torch.Tensor:
        """(batch, sequence), int64."""

    @property
    def labels(self) -> torch.Tensor:
        """(batch, sequence), int64, not shifted; -100 does not count."""

    @property
    def position_ids(self) -> torch.Tensor | None:
        """(batch, sequence), int64, from 0 at each document's start; None: one document a sequence."""


class Clock(Protocol):
    """Times a phase of a step: `with clock("forward"): ...` (`trainer.observe.step_clock.StepClock`)."""

    def __call__(self, phase: str) -> AbstractContextManager[None]:
        """Adds the block's seconds to the phase."""


@dataclass(frozen=True)
class OptimizerStep:
    """What one optimizer step did."""

    grad_norm: float
    """Global 2-norm before clipping, without loss scaling; infinite when fp16 overflowed."""
    was_applied: bool
    """False when fp16 overflowed or the step was not accepted: then nothing was updated."""


class Strategy(ABC):
    """One engine with one layout: owns the wrapped model, its optimizer and how gradients travel."""

    name: str
    """single, ddp, fsdp, hsdp, zero0, zero1, zero2, zero3, or a product's degrees: tensor2-fsdp2."""

    choices: dict[str, str]
    """What runs where a job may say auto, each with its reason: `loss`, `attention`. Said at the start, and kept in
    result.json."""

    data_parallel_rank: int
    """Which share of each global batch this rank reads, from 0."""

    data_parallel_size: int
    """Ranks that read different sequences."""

    @abstractmethod
    def forward_backward(self, batches: Sequence[Batch], num_global_targets: int, clock: Clock) -> torch.Tensor:
        """Gradients of (sum of losses over the global batch) / num_global_targets, accumulated over `batches`.

        Returns this rank's share of the sum of losses, float64, on its device: shares add up to the global sum, so
        of ranks that compute the same loss one reports it, the others zero. `num_global_targets` is global too.
        """

    @abstractmethod
    def optimizer_step(self, learning_rate: float, accepts: Callable[[float], bool] | None = None) -> OptimizerStep:
        """Clips, updates the weights and clears the gradients.

        One method and not two: DeepSpeed reduces, measures, clips and updates in a single call. `accepts` is asked
        with the gradient norm before anything is updated, on all ranks; where it says no, the step is not applied.
        """

    @abstractmethod
    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        """This rank's share of the sum of losses over `batches`, float64, without gradients and with dropout off.

        Where the task measures more than the loss: one dimension, the loss and then `Task.measures`, each summed.
        """

    @abstractmethod
    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Live references under canonical names, the same for every engine and world size.

        model.<Hugging Face name>, optim.<name>.exp_avg, optim.<name>.exp_avg_sq (float32, each a whole tensor, a
        DTensor or a FlatShard) and optim.step; frozen.<name>, of the type that it computes in, where no file has what
        is frozen (`keeps_frozen`). torch.distributed.checkpoint can save them and load in place.
        """

    @abstractmethod
    def after_load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Makes the engine consistent once a checkpoint was read into `tensors`, which `state_tensors` gave."""

    def engine_state(self) -> dict[str, Any]:
        """JSON state besides the tensors: fp16's loss scale. Another engine may ignore it."""
        return {}

    def load_engine_state(self, state: dict[str, Any]) -> None:
        """Puts back what `engine_state` of the same engine gave."""
        assert not state, f"{self.name} keeps no state of this kind"

    def close(self) -> None:  # noqa: B027  # most engines hold nothing that outlives them
        """Frees what the engine holds; the process group stays."""
