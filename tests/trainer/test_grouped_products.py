"""Experts' products have the job's precision where weights are float32 and autocast narrows the rest."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer.models.build import build_model
from trainer_testing.tiny import MODEL, VOCAB_SIZE, tiny_job

EXPERTS = MODEL | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64}


class Types(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """What products of groups read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            self.seen += [leaf.dtype for leaf in tree_leaves(args[:2])]
        return func(*args, **(kwargs or {}))


def _types(dtype: torch.dtype | None) -> set[torch.dtype]:
    model = build_model(tiny_job("single", 1, model=EXPERTS), vocab_size=VOCAB_SIZE)
    model.init_weights()
    for parameter in model.parameters():
        parameter.data = torch.full(parameter.shape, 0.01)
    types = Types()
    with types, torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = model(torch.arange(24).reshape(1, 24)).logits.float().square().mean()
        torch.autograd.backward(loss)
    assert types.seen, "this model has products of groups"
    return set(types.seen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_narrows_the_experts_forward_and_back(dtype: torch.dtype) -> None:
    assert _types(dtype) == {dtype}


def test_without_it_they_are_as_the_weights() -> None:
    assert _types(None) == {torch.float32}
