"""The strategy worker with something wrong in its trainer: what a campaign of random jobs has to see.

TRAINYARD_TEST_SPOIL names which of `SPOILS`.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from trainer.leaving import leave
from trainer.losses import linear
from trainer.optimizers.loss_scaling import LossScaler
from trainer.tasks import causal_lm

from trainer_testing import strategy_worker

VARIABLE = "TRAINYARD_TEST_SPOIL"


def _drop_last_chunk() -> None:
    """Of the head's gradient, where there are several chunks."""
    honest = linear._Sums.add

    def add(sums: Any, rows: slice, logits: torch.Tensor, *others: torch.Tensor) -> None:
        is_last = rows.start > 0 and rows.stop == len(sums._hidden)
        honest(sums, rows, torch.zeros_like(logits) if is_last else logits, *others)

    linear._Sums.add = add  # type: ignore[method-assign]


def _balance_first_rank_alone() -> None:
    """The other ranks' routers are told nothing."""
    if int(os.environ["RANK"]) > 0:
        causal_lm.router_loss_sum = lambda *_, **__: None


def _forget_loss_scale() -> None:
    """A resume begins with the first one."""
    LossScaler.restore = lambda *_: None  # type: ignore[method-assign]


def _forget_random_numbers() -> None:
    """A resume draws what its seed begins with."""
    strategy_worker.restore_rng_state = lambda *_: None


SPOILS: dict[str, Callable[[], None]] = {
    "drop the last chunk": _drop_last_chunk,
    "balance the first rank alone": _balance_first_rank_alone,
    "forget the loss scale": _forget_loss_scale,
    "forget random numbers": _forget_random_numbers,
}


if __name__ == "__main__":
    SPOILS[os.environ[VARIABLE]]()
    torch.set_num_threads(1)
    strategy_worker.main([strategy_worker.RunRequest(**request) for request in json.loads(sys.argv[1])])
    leave(0)
