"""Schedule, loss, loss scaling, norms, random numbers: the small pure parts."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from trainer.losses import token_loss as loss_module
from trainer.losses.token_loss import IGNORED_LABEL, next_token_loss_sum
from trainer.models.build import build_model
from trainer.optimizers.build import build_optimizer, clip_factor, decay_groups, global_grad_norm
from trainer.optimizers.loss_scaling import (
    GROWTH_INTERVAL_STEPS,
    INITIAL_SCALE,
    LossScaler,
    deepspeed_scaler_state,
    restore_deepspeed_scaler,
)
from trainer.optimizers.schedule import learning_rate_at
from trainer.seeds import restore_rng_state, rng_state, seed_everything
from trainer.strategies.deepspeed_import import load_deepspeed
from trainer.strategies.mesh import has_same_streams, random_stream
from trainer_testing.tiny import VOCAB_SIZE, tiny_job

from trainyard.spec.job import ParallelismSpec, ScheduleSpec


def rates(num_steps: int = 10, **schedule: object) -> list[float]:
    """The rate of each step, peak 1."""
    spec = ScheduleSpec.model_validate(schedule)
    return [learning_rate_at(s, num_steps=num_steps, peak=1.0, schedule=spec) for s in range(1, num_steps + 1)]


def test_warm_up_is_a_line_from_zero_that_reaches_the_peak() -> None:
    assert rates(kind="constant", warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_the_last_step_has_the_final_fraction(kind: str) -> None:
    values = rates(kind=kind, warmup_steps=2, final_fraction=0.1)
    assert values[-1] == pytest.approx(0.1)
    assert max(values) == 1.0
    assert values[1:] == sorted(values[1:], reverse=True)


def test_cosine_falls_slowly_fast_and_slowly_and_linear_is_a_line() -> None:
    # Half a turn in twelve steps: the cosines of 15, 30, 45 ... degrees, from 1 to -1.
    turned = {0: 1.0, 2: math.sqrt(3) / 2, 3: math.sqrt(0.5), 4: 0.5, 6: 0.0, 8: -0.5, 9: -math.sqrt(0.5), 12: -1.0}
    for fraction in (0.0, 0.1):
        # Three steps of warm-up, the third at the peak.
        found = rates(15, kind="cosine", warmup_steps=3, final_fraction=fraction)[2:]
        for place, cosine in turned.items():
            assert found[place] == pytest.approx(fraction + (1 - fraction) * (1 + cosine) / 2, abs=1e-12)
    assert rates(kind="linear") == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0])


def test_wsd_holds_the_peak_until_its_decay() -> None:
    assert rates(kind="wsd", decay_fraction=0.3) == pytest.approx([1, 1, 1, 1, 1, 1, 1, 2 / 3, 1 / 3, 0])


def test_a_warm_up_longer_than_the_job_never_passes_the_peak() -> None:
    assert max(rates(kind="cosine", warmup_steps=50)) == pytest.approx(0.2)


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "wsd"])
def test_a_job_of_one_step_that_changes_nothing_is_told_of(kind: str) -> None:
    for more in ({}, {"final_fraction": 0.1}, {"warmup_steps": 1}):
        spec = ScheduleSpec.model_validate({"kind": kind, **more})
        assert bool(spec.notes(1)) == (rates(1, kind=kind, **more) == [0.0])
        assert not spec.notes(2)


def test_loss_is_the_sum_over_counted_next_tokens() -> None:
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, 3, 4], [0, 1, IGNORED_LABEL, IGNORED_LABEL]])
    log_probabilities = logits.log_softmax(-1)
    counted = [(0, 0, 2), (0, 1, 3), (0, 2, 4), (1, 0, 1)]
    expected = -sum(log_probabilities[b, i, token] for b, i, token in counted)
    assert next_token_loss_sum(logits, labels) == pytest.approx(float(expected))


def test_chunks_of_low_precision_logits_give_the_same_loss_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.randint(0, 5, (3, 6), generator=torch.Generator().manual_seed(1))
    values = torch.randn(3, 6, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    results = []
    for chunk in (1000, 4):
        monkeypatch.setattr(loss_module, "CHUNK_TOKENS", chunk)
        logits = values.clone().requires_grad_()
        loss = next_token_loss_sum(logits, labels)
        loss.backward()
        assert logits.grad is not None
        results.append((loss.item(), logits.grad))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert torch.equal(results[0][1], results[1][1])


def test_a_batch_of_padding_alone_costs_nothing_and_has_no_nan() -> None:
    logits = torch.randn(1, 3, 4, requires_grad=True)
    loss = next_token_loss_sum(logits, torch.full((1, 3), IGNORED_LABEL))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_the_fp16_scale_halves_on_overflow_and_grows_after_many_good_steps() -> None:
    scaler = LossScaler.for_precision("fp16")
    assert not scaler.accepts(math.inf)
    assert not scaler.accepts(math.nan)
    assert scaler.scale == INITIAL_SCALE / 4
    assert all(scaler.accepts(1.0) for _ in range(GROWTH_INTERVAL_STEPS))
    assert scaler.scale == INITIAL_SCALE / 2
    resumed = LossScaler.for_precision("fp16")
    resumed.restore(scaler.state())
    assert resumed == scaler


def test_the_fp16_scale_grows_after_good_steps_in_a_row_alone_and_never_falls_below_one() -> None:
    scaler = LossScaler.for_precision("fp16")
    assert all(scaler.accepts(1.0) for _ in range(GROWTH_INTERVAL_STEPS - 1))
    assert not scaler.accepts(math.inf) and scaler.scale == INITIAL_SCALE / 2
    assert all(scaler.accepts(1.0) for _ in range(GROWTH_INTERVAL_STEPS - 1))
    assert scaler.scale == INITIAL_SCALE / 2, "those before the overflow count no more"
    assert scaler.accepts(1.0) and scaler.scale == INITIAL_SCALE
    assert not any(scaler.accepts(math.inf) for _ in range(40))
    assert scaler.scale == 1.0


def test_other_precisions_are_never_scaled() -> None:
    for precision in ("fp32", "bf16"):
        scaler = LossScaler.for_precision(precision)
        assert scaler.accepts(math.inf)
        scaler.restore({"scale": 8.0, "num_good_steps": 3})
        assert scaler.scale == 1.0


def test_a_constant_scale_leaves_nothing_that_fp16_would_begin_with() -> None:
    scaler = LossScaler.for_precision("fp16")
    scaler.restore(LossScaler.for_precision("bf16").state())
    assert scaler.scale == INITIAL_SCALE


def deepspeed_scaler(num_good_steps: int) -> Any:
    """DeepSpeed's own, as its fp16 optimizer makes it, after an overflow and so many good steps."""
    loss_scaler = load_deepspeed().runtime.fp16.loss_scaler
    scaler = loss_scaler.DynamicLossScaler(INITIAL_SCALE, 1000, 1, 1, False)
    scaler.update_scale(False)
    scaler.cur_scale, scaler.last_overflow_iter = scaler.cur_scale / 2, scaler.cur_iter
    scaler.cur_iter += 1
    for _ in range(num_good_steps):
        scaler.update_scale(False)
    return scaler


@pytest.mark.parametrize(("num_good_steps", "since_growth"), [(0, 0), (7, 7), (1500, 500)])
def test_the_fp16_scale_goes_from_engine_to_engine(num_good_steps: int, since_growth: int) -> None:
    theirs = deepspeed_scaler(num_good_steps)
    saved = deepspeed_scaler_state(theirs)
    ours = LossScaler.for_precision("fp16")
    ours.restore(saved["loss_scaler"])
    grown = 2 if num_good_steps > 1000 else 1
    assert (ours.scale, ours.num_good_steps) == (INITIAL_SCALE / 2 * grown, since_growth)

    same, moved = deepspeed_scaler(3), deepspeed_scaler(3)
    restore_deepspeed_scaler(same, saved)
    assert vars(same) == vars(theirs)
    restore_deepspeed_scaler(moved, {"loss_scaler": ours.state()})
    left = 1000 - since_growth
    for _ in range(left):
        assert moved.cur_scale == ours.scale
        moved.update_scale(False)
    moved.update_scale(False)
    assert moved.cur_scale == 2 * ours.scale, "it grows when it would have grown"


def test_decay_pulls_on_matrices_alone() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.LayerNorm(3))
    decayed, kept = decay_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert {tuple(p.shape) for p in decayed["params"]} == {(4, 3), (3, 3)}
    assert kept["weight_decay"] == 0.0
    assert all(p.ndim == 1 for p in kept["params"])
    assert len(kept["params"]) == 3


@pytest.mark.parametrize(
    ("family", "more", "kept"),
    [
        ("cohere", {"use_qk_norm": True}, {"q_norm.weight", "k_norm.weight"}),
        ("gpt_oss", {"num_local_experts": 4}, {"gate_up_proj_bias", "down_proj_bias"}),
        ("mamba", {"state_size": 4}, {"A_log"}),
    ],
)
def test_some_of_two_dimensions_are_no_matrices(family: str, more: dict[str, Any], kept: set[str]) -> None:
    """Neither for weight decay nor for Muon, whose step would turn their rows against each other."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "pad_token_id": 0}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    job = tiny_job("single", 1, model=sizes | {"model_type": family} | more, optimizer={"kind": "muon"})
    model = build_model(job, vocab_size=VOCAB_SIZE)
    names = {parameter: name for name, parameter in model.named_parameters()}
    flat = {name for parameter, name in names.items() if name.endswith(tuple(kept)) and parameter.ndim == 2}
    assert {name for name in flat for each in kept if name.endswith(each)} == flat and len(flat) == len(kept)
    groups = build_optimizer(model, job).param_groups
    decayed = {names[each] for group in groups if group["weight_decay"] for each in group["params"]}
    orthogonal = {names[each] for group in groups if group["orthogonal"] for each in group["params"]}
    assert not flat & (decayed | orthogonal)
    assert orthogonal < decayed and not [name for name in orthogonal if "conv1d" in name]


def test_the_norm_is_over_all_gradients_and_clipping_brings_it_to_the_limit() -> None:
    gradients = [torch.full((3,), 2.0), torch.full((2, 2), 1.0)]
    assert global_grad_norm(gradients, None) == pytest.approx(4.0)
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25, rel=1e-5)
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, None) == 1.0
    assert global_grad_norm([torch.tensor([math.nan])], None) == math.inf


def test_random_numbers_go_on_where_they_were_and_differ_by_rank() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed_everything(5)
    random.gauss(0, 1)  # leaves a cached value, part of Python's state
    state = rng_state()
    expected = [draw() for _ in range(3)] + [(random.gauss(0, 1),)]
    seed_everything(6)
    restore_rng_state(state)
    assert [draw() for _ in range(3)] + [(random.gauss(0, 1),)] == expected
    seed_everything(5, rank=1)
    other = draw()
    seed_everything(5)
    assert all(a != b for a, b in zip(draw(), other, strict=True))


def test_random_streams_go_on_only_where_the_same_ranks_have_to_draw_alike() -> None:
    sharded, cut = ParallelismSpec(data_shard=2), ParallelismSpec(tensor=2)
    assert [random_stream(sharded, rank) for rank in range(2)] == [0, 1]
    assert [random_stream(cut, rank) for rank in range(2)] == [0, 0]
    saved = {layout.tensor: {"world_size": 2, "ranks_a_stream": layout.tensor} for layout in (sharded, cut)}
    assert has_same_streams(sharded, saved[1]) and has_same_streams(cut, saved[2])
    assert not has_same_streams(cut, saved[1]), "the tensor ranks would drop different activations"
    assert not has_same_streams(sharded, saved[2])
    assert not has_same_streams(ParallelismSpec(data_shard=4), saved[1])
