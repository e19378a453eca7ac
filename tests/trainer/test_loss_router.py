"""The router's auxiliary loss is transformers' own, for each micro-batch; its engines are in test_loss_engines."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from trainer.losses.head import choices_of, install, plan_loss
from trainer.losses.router import RouterLoss, balance_of, librarys_own_left_out
from trainer.losses.token_loss import IGNORED_LABEL
from trainer.models.build import build_model
from trainer.strategies import check_supported
from trainer.strategies.expert_parallel import expert_modules
from trainer.tasks.causal_lm import sequence_loss_sum
from trainer_testing.families import FAMILIES
from trainer_testing.mixtures import MIXTURES, mixture
from trainer_testing.strategy_worker import RunRequest, run
from trainer_testing.tiny import VOCAB_SIZE, TinyBatch, global_batch, tiny_job
from transformers.models.mixtral import modeling_mixtral
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from trainyard.errors import InputError
from trainyard.spec.notes import NORMALIZES
from trainyard.spec.support import ROUTER_FAMILIES

LEAST = 1e-6
"""Of a router that computes in float32 whatever the model does."""
CPU = torch.device("cpu")
COEFFICIENT = 0.05


def with_router_loss(family: str) -> dict[str, Any]:
    return FAMILIES[family] | {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}


def balanced(router_logits: Sequence[torch.Tensor], num_chosen: int, is_token: torch.Tensor) -> torch.Tensor:
    """In float32, as transformers has it."""
    router = RouterLoss(router_logits[0].size(-1), num_chosen, coefficient=1.0)
    return balance_of(router.tally(router_logits, is_token), num_chosen).float()


def test_the_balance_is_that_of_transformers() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = tuple(torch.randn(12, 4, generator=generator) for _ in range(3))
    for padding in (0, 5):
        is_token = (torch.arange(12) < 12 - padding).view(1, 12)
        theirs = load_balancing_loss_func(logits, 4, 2, attention_mask=is_token.long())
        torch.testing.assert_close(balanced(logits, 2, is_token), theirs)


def trained(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3-MoE"])
@pytest.mark.parametrize(("kind", "recomputed"), [("logits", "none"), ("chunked", "full"), ("chunked", "selective")])
def test_loss_and_gradients_are_those_of_transformers_own_loss(family: str, kind: str, recomputed: str) -> None:
    job = tiny_job("single", 1, model=with_router_loss(family), loss=kind, activation_checkpointing=recomputed)
    model = build_model(job, vocab_size=VOCAB_SIZE)
    install(model, plan_loss(model, job))
    tokens, labels = (part[:3] for part in global_batch(1))
    num_targets = int((labels[:, 1:] != IGNORED_LABEL).sum())
    model.train()
    ours = trained(model, sequence_loss_sum(model, TinyBatch(tokens, labels), CPU) / num_targets)
    plain = build_model(tiny_job("single", 1, model=with_router_loss(family)), vocab_size=VOCAB_SIZE)
    mask = (labels != IGNORED_LABEL).long()
    # Attention needs no mask: padding comes last. The balance does.
    output = plain(input_ids=tokens, labels=labels)
    plain_loss = (output.loss - COEFFICIENT * output.aux_loss).item()
    balance = load_balancing_loss_func(output.router_logits, 4, 2, attention_mask=mask)
    theirs = trained(plain, output.loss + COEFFICIENT * (balance - output.aux_loss))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    model.eval()
    without = sequence_loss_sum(model, TinyBatch(tokens, labels), CPU) / num_targets
    assert without.item() == pytest.approx(plain_loss, rel=1e-5)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("gpt_oss", "qwen2_moe") else pytest.mark.slow)
        for name in sorted(ROUTER_FAMILIES & MIXTURES.keys())
    ],
)
def test_so_is_that_of_other_families(family: str) -> None:
    """Each has a function, and a name for how many are chosen, of its own; one layer of two is a mixture, or both."""
    job = tiny_job("single", 1, model=mixture(family), document_masks=False, precision="fp64")
    model: Any = build_model(job, vocab_size=VOCAB_SIZE).train()
    assert 1 <= len(expert_modules(model)) <= 2
    tokens, labels = (part[:3] for part in global_batch(1))
    num_targets = int((labels[:, 1:] != IGNORED_LABEL).sum())
    ours = trained(model, sequence_loss_sum(model, TinyBatch(tokens, labels), CPU) / num_targets)
    output = model(input_ids=tokens, labels=labels)
    chosen, factor = model.config.num_experts_per_tok, model.config.router_aux_loss_coef
    everywhere = balanced(output.router_logits, chosen, torch.ones_like(tokens, dtype=torch.bool))
    torch.testing.assert_close(everywhere, output.aux_loss, check_dtype=False)
    padded = balanced(output.router_logits, chosen, labels != IGNORED_LABEL)
    theirs = trained(model, output.loss + factor * (padded - everywhere))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2}], ids=str)
def test_of_a_family_that_has_none_it_is_refused(layout: dict[str, int]) -> None:
    name = "product" if layout else "single"
    job = tiny_job(name, 2 if layout else 1, model=with_router_loss("DeepSeek-V3"), parallelism=layout)
    with pytest.raises(InputError, match=r"output_router_logits: .* of deepseek_v3 is not verified; set it to false"):
        check_supported(job, device_type="cpu")


def test_16_bits_round_no_tally() -> None:
    """Autocast makes matrix products of 16 bits, in which the choices of 1,000 tokens are counted by fours."""
    generator = torch.Generator().manual_seed(5)
    logits = [torch.randn(1023, 4, generator=generator) for _ in range(2)]
    router = RouterLoss(4, 2, COEFFICIENT)
    is_token = torch.ones((1, 1023), dtype=torch.bool)
    plain = router.tally(logits, is_token)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(router.tally(logits, is_token), plain)
    assert plain[0].sum() == 2 * 2 * 1023


@pytest.mark.parametrize("wrapped", [False, True])
def test_transformers_makes_none_of_its_own(wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would take more memory than all else of a large mixture, in validation, too; by a class of FSDP's, too."""
    model: Any = build_model(tiny_job("single", 1, model=with_router_loss("Mixtral")), vocab_size=VOCAB_SIZE)
    if wrapped:
        model.__class__ = type("FSDPModel", (type(model),), {"__module__": "torch"})
    seen: list[int] = []
    own = modeling_mixtral.load_balancing_loss_func
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda *given: seen.append(1) or own(*given))
    tokens, labels = global_batch(1)
    for module in (model.train(), model.eval()):
        sequence_loss_sum(module, TinyBatch(tokens, labels), CPU)
    assert seen == []
    with librarys_own_left_out(nn.Linear(2, 2)):  # of a model that has none
        model(input_ids=tokens)
    assert seen == [1]  # and it is there again


PHIMOE = FAMILIES["Mixtral"] | {"model_type": "phimoe"}


@pytest.mark.parametrize(
    ("config", "noise"),
    [
        (PHIMOE, "0.01"),  # its own default
        (FAMILIES["Mixtral"] | {"router_jitter_noise": 0.25}, "0.25"),
        (PHIMOE | {"router_jitter_noise": 0.0}, None),
        (FAMILIES["Mixtral"], None),
    ],
)
def test_noise_in_the_router_is_said_at_the_start(config: dict[str, Any], noise: str | None) -> None:
    job = tiny_job("single", 1, model=config)
    model = build_model(job, vocab_size=VOCAB_SIZE)
    told = choices_of(model, job, plan_loss(model, job), CPU).get("router_noise")
    if noise is None:
        assert told is None
    else:
        assert told is not None and told.startswith(f"{noise}, drawn by each rank") and "noise: 0" in told


@pytest.mark.slow
def test_the_noise_alone_is_what_a_layout_changes_of_phimoes_losses() -> None:
    jobs = [{"model": PHIMOE | {"router_jitter_noise": noise}, "document_masks": False} for noise in (0.0, 0.05)]
    whole = run(1, [RunRequest("single", last_step=3, job=job) for job in jobs])
    cut = run(2, [RunRequest("fsdp", last_step=3, job=job) for job in jobs])
    assert cut[0]["loss"] == pytest.approx(whole[0]["loss"], rel=1e-5)
    assert cut[1]["loss"] != pytest.approx(whole[1]["loss"], rel=1e-5)


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_zero_3_draws_the_noise_of_one_process(recompute: str) -> None:
    """Where Mixtral multiplied its block's input, which DeepSpeed's hooks forbid, the first step failed."""
    job = {"model": FAMILIES["Mixtral"] | {"router_jitter_noise": 0.05}, "activation_checkpointing": recompute}
    single, zero = run(1, [RunRequest(name, last_step=2, job=job) for name in ("single", "zero3")])
    assert zero["loss"] == pytest.approx(single["loss"], rel=1e-6)


DBRX = {"model_type": "dbrx", "d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 64}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (PHIMOE | {"input_jitter_noise": 0.01}, "input_jitter_noise"),
        (DBRX | {"ffn_config": {"moe_jitter_eps": 0.01}}, "ffn_config.moe_jitter_eps"),
    ],
)
def test_noise_that_experts_see_too_is_refused_under_zero_3(config: dict[str, Any], name: str) -> None:
    job = tiny_job("zero3", 2, model=config, document_masks=False)
    with pytest.raises(InputError, match=rf"zero_stage: 3: model.config.{name}: 0.01 is not implemented with it"):
        check_supported(job, device_type="cpu")
    check_supported(tiny_job("zero2", 2, model=config, document_masks=False), device_type="cpu")


@pytest.mark.parametrize(
    ("family", "is_normalized"),
    [("Mixtral", True), *((family, value) for family in ("Qwen3-MoE", "DeepSeek-V3") for value in (True, False))],
)
def test_a_router_whose_only_expert_has_weight_1_learns_nothing(family: str, is_normalized: bool) -> None:
    """Which `trainyard.spec.notes` tells of the families that do so where nothing is stated."""
    model_type = str(FAMILIES[family]["model_type"])
    stated = {} if NORMALIZES[model_type] == is_normalized else {"norm_topk_prob": is_normalized}
    job = tiny_job("single", 1, model=FAMILIES[family] | {"num_experts_per_tok": 1} | stated, precision="fp64")
    model = build_model(job, vocab_size=VOCAB_SIZE)
    tokens, labels = global_batch(1)
    sequence_loss_sum(model, TinyBatch(tokens, labels), CPU).backward()
    routers = [weight.grad for name, weight in model.named_parameters() if name.endswith("mlp.gate.weight")]
    others = [weight.grad for name, weight in model.named_parameters() if "self_attn" in name]
    assert routers and min(float(grad.norm()) for grad in others if grad is not None) > 1e-3
    norms = [float(grad.norm()) for grad in routers if grad is not None]
    assert (max(norms) < LEAST) if is_normalized else (min(norms) > 100 * LEAST), norms
