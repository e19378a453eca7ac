"""Next-token cross-entropy as a sum: divided once, by the global number of targets, every split of a batch is equal."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

IGNORED_LABEL = -100
"""A label that does not count: padding, or a prompt that is not to be learned."""

CHUNK_TOKENS = 2048
"""Positions whose float32 logits exist at one time: whole ones would be the largest activation of all in bf16."""


def next_token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropy (nats, float32 or wider) of each position's prediction of the next label.

    logits: (batch, sequence, vocabulary), any float type; labels: (batch, sequence), not shifted:
    `labels[:, i]` is the token at i, so position i is scored against `labels[:, i + 1]`.
    """
    # Not logits[:, :-1], which no view can flatten: that would copy them, and their gradient once more.
    return target_loss_sum(logits, shifted(labels))


def target_loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same with `targets` (batch, sequence) shifted already: position i is scored against `targets[:, i]`."""
    predictions = logits.reshape(-1, logits.size(-1))
    targets = targets.reshape(-1)
    if predictions.size(0) <= CHUNK_TOKENS or logits.dtype in (torch.float32, torch.float64):
        # Already that wide there is no copy to save, and chunks would only recompute.
        return _cross_entropy_sum(predictions, targets)
    chunks = zip(torch.split(predictions, CHUNK_TOKENS), torch.split(targets, CHUNK_TOKENS), strict=True)
    sums = [checkpoint(_cross_entropy_sum, part, wanted, use_reentrant=False) for part, wanted in chunks]
    return torch.stack(sums).sum()


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """(batch, sequence) labels as targets: at each position the next one's label; the last has none."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def _cross_entropy_sum(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(predictions.dtype, torch.float32)
    return F.cross_entropy(predictions.to(wide), targets, ignore_index=IGNORED_LABEL, reduction="sum")
