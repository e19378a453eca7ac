"""Gradients that are sums over tensor ranks: large ones are added up where they are, small ones in one message."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainer.strategies.parallel import ALONE_ELEMENTS, ProductStrategy
from trainer_testing.strategy_worker import RunRequest, run, worst_relative_error


def with_gradient(*shape: int) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.ones(shape)
    return parameter


def test_each_is_added_up_once_and_large_ones_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def doubled(tensor: torch.Tensor, *, group: Any) -> None:
        sent.append(tensor.numel())
        tensor.mul_(2)

    monkeypatch.setattr(dist, "all_reduce", doubled)
    large, turned = with_gradient(1024, ALONE_ELEMENTS // 1024), with_gradient(1024, ALONE_ELEMENTS // 1024)
    assert turned.grad is not None
    turned.grad = turned.grad.T.contiguous().T  # gloo adds up nothing that doesn't lie in one piece
    partial = [with_gradient(8), large, with_gradient(4, 4), turned, nn.Parameter(torch.zeros(3))]
    own: Any = SimpleNamespace(_partial=partial, _mesh=SimpleNamespace(group=lambda axis: axis))
    ProductStrategy._finish_gradients(own)
    assert sent == [ALONE_ELEMENTS, 8 + 16 + ALONE_ELEMENTS]
    assert all(bool((each.grad == 2).all()) for each in partial if each.grad is not None)
    own._partial = [large]
    ProductStrategy._finish_gradients(own)
    assert sent[2:] == [ALONE_ELEMENTS]


@pytest.mark.slow
def test_wide_matrices_that_stay_whole_on_each_rank_equal_one_process() -> None:
    """GLM's gate and up, fused: 2^20 elements a layer."""
    model = {
        **{"model_type": "glm", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "head_dim": 64},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0},
    }
    job = {"model": model, "precision": "fp64", "document_masks": False, "parallelism": {"tensor": 2}}
    asked = RunRequest("tensor2", last_step=3, job=job)
    alone = replace(asked, strategy="single", job=job | {"parallelism": {}})
    assert worst_relative_error(run(2, [asked])[0], run(1, [alone])[0]) < 1e-7
