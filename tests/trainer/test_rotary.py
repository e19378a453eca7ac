"""Rotary frequencies that transformers would choose in every forward pass: one choice a job, by its sequence length."""

from typing import Any

import pytest
import torch
from trainer.losses.head import choices_of, plan_loss
from trainer.models.build import build_model
from trainer.tasks.causal_lm import CausalLM
from trainer_testing.strategy_worker import RunRequest, run, worst_relative_error
from trainer_testing.tiny import SEQUENCE_LENGTH, VOCAB_SIZE, TinyBatch, document_positions, global_batch, tiny_job
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainyard.spec.job import ResolvedJob

CPU = torch.device("cpu")
HEAD_SIZE = 8


def model_of(original: int) -> dict[str, Any]:
    """A Llama with longrope that was made for `original` positions."""
    return {
        **{"model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0},
            "short_factor": [1.0] * (HEAD_SIZE // 2),
            "long_factor": [1.0, 2.0, 3.0, 4.0],
            "original_max_position_embeddings": original,
        },
    }


def built(original: int) -> PreTrainedModel:
    model = build_model(tiny_job("single", 1, model=model_of(original), precision="fp64"), vocab_size=VOCAB_SIZE)
    return model.train()


def loss_sum(model: PreTrainedModel, batch: TinyBatch) -> float:
    return CausalLM().loss_sum(model, batch, CPU).item()


@pytest.mark.parametrize("original", [16, 32])
def test_whole_sequences_are_computed_as_transformers_does(original: int) -> None:
    """Longer than the original positions, and not."""
    model, (tokens, _) = built(original), global_batch(1)
    plain: Any = AutoModelForCausalLM.from_config(model.config, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    assert tokens.size(1) == SEQUENCE_LENGTH
    torch.testing.assert_close(model(input_ids=tokens).logits, plain(input_ids=tokens).logits, rtol=0, atol=1e-12)


def test_which_set_runs_is_told() -> None:
    """Of a model that has longrope, and by what it was really settled for."""

    def said(job: ResolvedJob) -> tuple[PreTrainedModel, str | None]:
        model = build_model(job, vocab_size=VOCAB_SIZE)
        return model, choices_of(model, job, plan_loss(model, job), CPU).get("positions")

    shares = {16: torch.tensor([1.0, 2.0, 3.0, 4.0]), 32: torch.ones(HEAD_SIZE // 2)}
    words = {
        16: f"longrope's long set (data.sequence_length {SEQUENCE_LENGTH} is above its original 16 positions), for",
        32: f"longrope's short set (data.sequence_length {SEQUENCE_LENGTH} is within its original 32 positions)",
    }
    plain, none = said(tiny_job("single", 1, model=model_of(16) | {"rope_parameters": {"rope_type": "default"}}))
    assert none is None
    for original, share in shares.items():
        model, told = said(tiny_job("single", 1, model=model_of(original)))
        frequencies, usual = (each.get_submodule("model.rotary_emb").inv_freq for each in (model, plain))
        assert isinstance(frequencies, torch.Tensor) and isinstance(usual, torch.Tensor)
        torch.testing.assert_close(frequencies, usual / share)
        assert told is not None and told.startswith(words[original])


def test_a_sequence_is_computed_alike_whatever_shares_its_micro_batch() -> None:
    """Packed, so that some sequences hold a document beyond the original 16 positions and others none."""
    model, (tokens, labels), positions = built(16), global_batch(1), document_positions(1)
    longest = positions.amax(dim=1)
    assert longest.min() < 16 <= longest.max()
    whole = loss_sum(model, TinyBatch(tokens, labels, positions))
    rows = [slice(row, row + 1) for row in range(tokens.size(0))]
    alone = [loss_sum(model, TinyBatch(tokens[row], labels[row], positions[row])) for row in rows]
    assert sum(alone) == pytest.approx(whole, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "layout"),
    [("ddp", {}), ("context2", {"context": 2}), ("pipeline2", {"pipeline": 2})],
)
def test_every_layout_equals_one_process(strategy: str, layout: dict[str, int]) -> None:
    job = {"model": model_of(16), "precision": "fp64"}
    (alone,) = run(1, [RunRequest("single", last_step=2, job=job, is_packed=True)])
    (cut,) = run(2, [RunRequest(strategy, last_step=2, job=job | {"parallelism": layout}, is_packed=True)])
    assert worst_relative_error(cut, alone) < 1e-10
