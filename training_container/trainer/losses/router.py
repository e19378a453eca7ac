"""The router's auxiliary loss of a mixture of experts: what keeps tokens spread over experts.

Asked for by the model's own configuration (output_router_logits: true, with router_aux_loss_coef). It is no sum over
tokens but a product of means, so what is computed has to be said exactly. For one micro-batch of T tokens without
padding, through a model of L layers and E experts, with f_e the mean over layers and tokens of how often expert e was
among the chosen, and p_e the mean of its probability:

    balance = E * sum over e of f_e * p_e        (Switch Transformer, arXiv:2101.03961, equations 4 to 6)

which is transformers' load_balancing_loss_func for one forward pass with an attention mask. The loss of an optimizer
step is the mean, weighted by targets, of cross-entropy + router_aux_loss_coef * balance over its micro-batches: what
transformers computes for each of them. So it is the same under every layout with the same micro-batches, and another
quantity at another training.micro_batch_size. Validation losses are without it: they are what perplexity is made of.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from trainer.losses.token_loss import IGNORED_LABEL


def is_asked_for(config: PretrainedConfig) -> bool:
    """Whether a model of this configuration trains with it."""
    return bool(getattr(config, "output_router_logits", False))


def router_loss_sum(forward: nn.Module, output: Any, targets: torch.Tensor) -> torch.Tensor | None:
    """Coefficient x balance x number of targets, to be added to a micro-batch's sum of losses; None: there is none.

    output: the model's; targets: (batch, sequence), shifted already. What follows a sequence's last target is padding.
    """
    model: Any = getattr(forward, "module", forward)  # of DistributedDataParallel and of DeepSpeed's engine
    config = getattr(model, "config", None)
    if config is None or not is_asked_for(config) or not model.training:
        return None
    counts = targets != IGNORED_LABEL
    # The token that is predicted last is no target's position but one after: it was routed too.
    is_token = F.pad(counts, (1, 0))[:, :-1] | counts
    is_token = is_token.flip(1).cumsum(1).flip(1) > 0
    balance = balance_of(output.router_logits, config.num_experts_per_tok, is_token.flatten())
    coefficient: float = config.router_aux_loss_coef
    return coefficient * balance * counts.sum()


def balance_of(router_logits: Sequence[torch.Tensor], num_chosen: int, is_token: torch.Tensor) -> torch.Tensor:
    """E x sum of (share of choices x mean probability). A layer's logits: (tokens, experts); is_token: (tokens,)."""
    logits = torch.stack(tuple(router_logits))
    wide = torch.promote_types(logits.dtype, torch.float32)
    probabilities = logits.to(wide).softmax(dim=-1)
    chosen = probabilities.topk(num_chosen, dim=-1).indices
    weight = is_token.to(wide)
    total = weight.sum().clamp(min=1) * logits.size(0)
    choices = F.one_hot(chosen, logits.size(-1)).sum(dim=2).to(wide)  # (layers, tokens, experts)
    shares = torch.einsum("lte,t->e", choices, weight) / total
    means = torch.einsum("lte,t->e", probabilities, weight) / total
    return logits.size(-1) * (shares * means).sum()
