"""The real trainer, one rank of which computes wrong losses: `python -m ... '{"5": "nan", "9": 50}' RANK ARGUMENT...`.

The first argument says by which factor the losses of a step are wrong on which rank; the rest is the trainer's own.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from trainer.__main__ import main
from trainer.leaving import leave
from trainer.session import GlobalBatch, Session
from trainer.tasks.causal_lm import CausalLM

honest_loss, honest_batch = CausalLM.loss_sum, Session.next_batch
now: dict[str, float] = {"factor": 1.0, "steps": 0.0}


def poison(factors: dict[str, float], rank: int) -> None:
    """From now on."""

    def next_batch(self: Session) -> GlobalBatch:
        now["steps"] = 1.0
        mine = rank == int(os.environ["RANK"])
        now["factor"] = float(factors.get(str(self.step + 1), 1.0)) if mine else 1.0
        return honest_batch(self)

    def loss_sum(self: CausalLM, forward: nn.Module, batch: Any, device: torch.device) -> torch.Tensor:
        loss = honest_loss(self, forward, batch, device)
        return loss * now["factor"] if torch.is_grad_enabled() and now["factor"] != 1.0 else loss

    tell_of_barriers()
    Session.next_batch = next_batch  # type: ignore[method-assign]
    CausalLM.loss_sum = loss_sum  # type: ignore[method-assign]


def tell_of_barriers() -> None:
    """Each call of a barrier while steps are made is said; a save, and what comes before and after, may have some."""
    honest_save = Session.save

    def save(self: Session) -> None:
        now["steps"], before = 0.0, now["steps"]
        honest_save(self)
        now["steps"] = before

    def watched(honest: Callable[..., Any]) -> Callable[..., Any]:
        def barrier(*arguments: Any, **options: Any) -> Any:
            if now["steps"]:
                print("a barrier in a step", flush=True)
            return honest(*arguments, **options)

        return barrier

    Session.save = save  # type: ignore[method-assign]
    dist.barrier, dist.monitored_barrier = watched(dist.barrier), watched(dist.monitored_barrier)


def run(arguments: Sequence[str]) -> int:
    """The trainer's exit code."""
    poison(json.loads(arguments[0]), int(arguments[1]))
    return main(arguments[2:])


if __name__ == "__main__":
    leave(run(sys.argv[1:]))
