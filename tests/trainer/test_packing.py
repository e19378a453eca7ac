"""Packed documents train as if each stood alone: loss and gradients in float64, every family of the support table."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn
from trainer.data.stream import SequenceTable
from trainer.data.token_cache import TokenCache
from trainer.model import build_model
from trainer.tasks.causal_lm import CausalLM
from trainer_testing.families import FAMILIES
from trainer_testing.tiny import SEQUENCE_LENGTH, VOCAB_SIZE, TinyBatch, tiny_job

CPU = torch.device("cpu")
DOCUMENT_LENGTHS = (5, 11, 1, 20, 3, 8)
"""48 tokens: two sequences of 24, with the fourth document in both."""


def cache(lengths: Sequence[int]) -> TokenCache:
    tokens = np.random.default_rng(7).integers(1, VOCAB_SIZE, sum(lengths)).astype(np.uint16)
    return TokenCache(tokens, np.cumsum(lengths).astype(np.int64), "digest", 1.0, VOCAB_SIZE)


def table(*, separate_documents: bool = True, lengths: Sequence[int] = DOCUMENT_LENGTHS) -> SequenceTable:
    return SequenceTable(
        cache(lengths), sequence_length=SEQUENCE_LENGTH, packing=True, separate_documents=separate_documents
    )


def model_of(family: str) -> nn.Module:
    job = tiny_job("single", 1, model=FAMILIES[family] | {"experts_implementation": "eager"})
    return build_model(job, vocab_size=VOCAB_SIZE).double()


def gradients(model: nn.Module, batches: Sequence[TinyBatch]) -> tuple[float, list[torch.Tensor]]:
    """Sum of the losses over all batches, and its gradient."""
    model.zero_grad()
    total = torch.stack([CausalLM().loss_sum(model, batch, CPU) for batch in batches]).sum()
    total.backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return total.item(), found


def pieces_of_documents() -> list[TinyBatch]:
    """Every document of DOCUMENT_LENGTHS alone, cut where its sequence ended."""
    ends = np.cumsum(DOCUMENT_LENGTHS)
    cuts = sorted({0, SEQUENCE_LENGTH, *ends.tolist()})
    tokens = torch.from_numpy(cache(DOCUMENT_LENGTHS).tokens.astype(np.int64))
    pieces = [tokens[begin:end].unsqueeze(0) for begin, end in itertools.pairwise(cuts)]
    return [TinyBatch(piece, piece) for piece in pieces]


@pytest.fixture
def everything_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models name float32 for norms and routers, whatever their weights are in: their rounding would hide errors."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.usefixtures("everything_in_float64")
def test_a_packed_batch_is_the_sum_of_its_documents(family: str) -> None:
    model = model_of(family)
    packed = table().micro_batch(np.arange(2))
    assert packed.position_ids is not None
    loss, grads = gradients(model, [TinyBatch(packed.input_ids, packed.labels, packed.position_ids)])
    expected_loss, expected = gradients(model, pieces_of_documents())
    assert loss == pytest.approx(expected_loss, rel=1e-10)
    for ours, theirs in zip(grads, expected, strict=True):
        scale = theirs.abs().max().clamp(min=1e-6)
        assert float((ours - theirs).abs().max() / scale) < 1e-10
