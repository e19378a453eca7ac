"""Packed documents train as if each stood alone: loss and gradients in float64, every family of the support table."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trainer.data.stream import SequenceTable
from trainer.data.token_cache import TokenCache
from trainer.losses.token_loss import IGNORED_LABEL
from trainer.models.attention import attach
from trainer.models.build import build_model
from trainer.tasks.causal_lm import CausalLM
from trainer_testing.families import FAMILIES, OWN_SIZES, TINY
from trainer_testing.tiny import SEQUENCE_LENGTH, VOCAB_SIZE, TinyBatch, tiny_job
from transformers import AutoConfig, AutoModelForCausalLM

from trainyard.spec.support import DOCUMENT_FAMILIES

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


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"Gemma", "GPT-2", "Llama, tied"}))
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


def test_without_positions_documents_would_see_each_other() -> None:
    model = model_of("Llama")
    packed = table().micro_batch(np.arange(2))
    apart, _ = gradients(model, [TinyBatch(packed.input_ids, packed.labels, packed.position_ids)])
    together, _ = gradients(model, [TinyBatch(packed.input_ids, packed.labels)])
    assert together != pytest.approx(apart, rel=1e-4)


def test_accumulated_micro_batches_are_the_big_batch() -> None:
    model = model_of("Qwen3")
    rows = table(lengths=(3, 40, 17, 2, 2, 2, 30, 24)).micro_batch(np.arange(5))
    batches = [
        TinyBatch(
            rows.input_ids[part], rows.labels[part], None if rows.position_ids is None else rows.position_ids[part]
        )
        for part in (slice(0, 1), slice(1, 4), slice(4, 5), slice(0, 5))
    ]
    loss, grads = gradients(model, batches[:3])
    expected_loss, expected = gradients(model, batches[3:])
    assert loss == pytest.approx(expected_loss, rel=1e-10)
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)  # the norms compute in float32


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(lambda found: sum(found) > 1))
def test_positions_labels_and_counts_of_packed_documents(lengths: list[int]) -> None:
    apart = table(lengths=lengths)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    batch = apart.micro_batch(np.arange(len(apart)))
    together = table(lengths=lengths, separate_documents=False).micro_batch(np.arange(len(apart)))
    assert torch.equal(batch.input_ids, together.input_ids) and together.position_ids is None
    assert batch.position_ids is not None and batch.num_tokens == together.num_tokens
    assert batch.num_target_tokens == int((batch.labels[:, 1:] != IGNORED_LABEL).sum())
    for row, (positions, labels) in enumerate(zip(batch.position_ids.tolist(), batch.labels.tolist(), strict=True)):
        owned = owners[row * SEQUENCE_LENGTH : (row + 1) * SEQUENCE_LENGTH]
        for place, owner in enumerate(owned):
            is_first = place == 0 or owned[place - 1] != owner
            assert positions[place] == (0 if is_first else positions[place - 1] + 1)
            assert (labels[place] == IGNORED_LABEL) == (is_first and place > 0)


@pytest.mark.full
@pytest.mark.parametrize("model_type", sorted(DOCUMENT_FAMILIES - {"deepseek_v2", "deepseek_v3"}))
def test_every_verified_model_type_keeps_documents_apart(model_type: str) -> None:
    """(DeepSeek, whose heads are no Llama's, is in the short test above.)"""
    config = AutoConfig.for_model(**TINY | OWN_SIZES.get(model_type, {}) | {"model_type": model_type})
    asked = {"experts_implementation": "eager", "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **asked).double().eval()
    attach(model)
    tokens = torch.randint(3, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(24).repeat(2, 1)
    positions[0, 7:], positions[1, 15:] = torch.arange(17), torch.arange(9)

    @torch.no_grad()
    def logits(ids: torch.Tensor, where: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=ids, position_ids=where, use_cache=False).logits
        return found

    alone = [
        logits(tokens[row : row + 1, part]) for row, cut in ((0, 7), (1, 15)) for part in (slice(cut), slice(cut, 24))
    ]
    expected = torch.stack([torch.cat(alone[:2], dim=1)[0], torch.cat(alone[2:], dim=1)[0]])
    scale = expected.abs().max()
    assert (logits(tokens, positions) - expected).abs().max() < 1e-5 * scale
    assert (logits(tokens) - expected).abs().max() > 1e-4 * scale, "the model doesn't look back at all"


@pytest.mark.parametrize("model_type", ["afmoe", "gpt_oss"])
def test_masks_that_are_made_without_positions_are_told_them(model_type: str) -> None:
    """Fails at its end when transformers tells them itself: then `_UNTOLD_POSITIONS` can lose the type."""
    config = AutoConfig.for_model(**TINY | OWN_SIZES.get(model_type, {}) | {"model_type": model_type})
    asked = {"experts_implementation": "eager", "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **asked).eval()
    tokens = torch.randint(3, VOCAB_SIZE, (1, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(7), torch.arange(17)])[None]
    others = torch.cat([tokens[:, :7].flip(1), tokens[:, 7:]], dim=1)

    @torch.no_grad()
    def second(ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return found[:, 7:]

    untold = (second(tokens) - second(others)).abs().max()
    attach(model)
    attach(model)  # as a second model of the process does
    torch.testing.assert_close(second(tokens), second(others), rtol=1e-4, atol=1e-5)
    whole = model(input_ids=tokens, use_cache=False).logits
    assert not torch.equal(whole[:, 7:], second(tokens)), "what one call was told, the next must not know"
    assert untold > 0.01, "transformers tells its masks the positions"
