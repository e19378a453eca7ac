"""Cross-entropy without logits: the same loss and gradients, in every model's own head, and never a whole sequence."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from trainer.losses import linear as linear_loss
from trainer.losses.head import ScoringHead, install, plan_loss
from trainer.losses.linear import linear_loss_sum
from trainer.losses.token_loss import IGNORED_LABEL, target_loss_sum
from trainer.models.build import build_model
from trainer.strategies import check_supported
from trainer.tasks.causal_lm import sequence_loss_sum
from trainer_testing.families import FAMILIES
from trainer_testing.tiny import VOCAB_SIZE, TinyBatch, global_batch, tiny_job

from trainyard.errors import InputError

CPU = torch.device("cpu")


def problem(dtype: torch.dtype, *, has_bias: bool = False, is_frozen: bool = False) -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(3)
    head = nn.Linear(8, 21, bias=has_bias, dtype=dtype).requires_grad_(not is_frozen)
    return head, torch.randn(3, 10, 8, dtype=dtype, requires_grad=True)


def targets() -> torch.Tensor:
    labels = torch.randint(0, 21, (3, 10), generator=torch.Generator().manual_seed(4))
    labels[1, 4:] = IGNORED_LABEL
    labels[2] = IGNORED_LABEL
    return labels


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven positions: no divisor of anything here."""
    monkeypatch.setattr(linear_loss, "CHUNK_TOKENS", 7)


@pytest.mark.parametrize(("has_bias", "is_frozen"), [(False, False), (True, False), (True, True)])
@pytest.mark.usefixtures("small_chunks")
def test_chunks_give_the_loss_and_gradients_of_whole_logits(has_bias: bool, is_frozen: bool) -> None:
    found = []
    for is_chunked in (True, False):
        head, hidden = problem(torch.float64, has_bias=has_bias, is_frozen=is_frozen)
        if is_chunked:
            loss = linear_loss_sum(hidden, head.weight, head.bias, targets())
        else:
            loss = target_loss_sum(head(hidden), targets())
        (loss * 0.25).backward()
        found.append([loss.detach(), hidden.grad, *(parameter.grad for parameter in head.parameters())])
    for ours, theirs in zip(*found, strict=True):
        if is_frozen and theirs is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("small_chunks")
def test_low_precision_is_as_near_to_float64_as_with_whole_logits(dtype: torch.dtype) -> None:
    head, hidden = problem(dtype)
    exact_head, exact_hidden = head.weight.detach().double().requires_grad_(), hidden.detach().double().requires_grad_()
    target_loss_sum(exact_hidden @ exact_head.T, targets()).backward()
    errors = []
    for is_chunked in (True, False):
        head, hidden = problem(dtype)
        loss = (
            linear_loss_sum(hidden, head.weight, None, targets())
            if is_chunked
            else target_loss_sum(head(hidden), targets())
        )
        loss.backward()
        assert loss.dtype == torch.float32 and head.weight.grad is not None and head.weight.grad.dtype == dtype
        errors.append(float((head.weight.grad.double() - exact_head.grad).norm() / exact_head.grad.norm()))
    # A chunk's part of the weight gradient is rounded before it is added, in float32, to the others.
    assert errors[0] < 2 * errors[1] < 0.02


@pytest.mark.parametrize("num_positions", [5, 30], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.usefixtures("small_chunks")
def test_fp16_gradients_are_no_larger_on_their_way_than_scaled(num_positions: int, is_autocast: bool) -> None:
    """Infinite before the scale is applied, no smaller scale would mend them: every step would be left out."""
    hidden = torch.full((num_positions, 8), 60000.0, dtype=torch.float16, requires_grad=True)
    weight = nn.Parameter(torch.zeros(21, 8, dtype=torch.float32 if is_autocast else torch.float16))
    with torch.autocast("cpu", dtype=torch.float16, enabled=is_autocast):
        loss = linear_loss_sum(hidden, weight, None, torch.zeros(num_positions, dtype=torch.int64))
    (loss / num_positions).backward()
    expected = torch.full((21, 8), 60000.0 / 21)
    expected[0] -= 60000.0
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.float(), expected, rtol=2e-3, atol=0)


def test_fp16_scaled_up_shows_what_is_smaller_than_its_smallest_number() -> None:
    """exp(-20) is 2e-9, and fp16 has nothing between 0 and 6e-8; so is what the scale is for in a loss of logits."""
    hidden = torch.ones(1, 1, dtype=torch.float16, requires_grad=True)
    weight = nn.Parameter(torch.tensor([[0.0], [-20.0]], dtype=torch.float16))
    (linear_loss_sum(hidden, weight, None, torch.tensor([0])) * 2.0**16).backward()
    assert weight.grad is not None
    # The right token's is what float32 leaves of one less one.
    assert float(weight.grad[1]) == pytest.approx(2.0**16 * math.exp(-20), rel=2e-3)


def test_dividing_by_the_number_of_targets_shifts_no_gradient() -> None:
    """1 / 1537 lies 0.26 % from the nearest number of bf16: so rounded, it shifts all gradients of a step."""
    norms = []
    for factor in (1.0, 1 / 1537):
        torch.manual_seed(3)
        weight = nn.Parameter(torch.randn(50, 64, dtype=torch.bfloat16))
        hidden = torch.randn(600, 64, dtype=torch.bfloat16, requires_grad=True)
        (linear_loss_sum(hidden, weight, None, torch.arange(600) % 50) * factor).backward()
        gradients = [hidden.grad, weight.grad]
        norms.append([float(found.double().norm()) / factor for found in gradients if found is not None])
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


@pytest.mark.usefixtures("small_chunks")
def test_autocast_computes_in_its_type_and_gives_gradients_in_the_weights() -> None:
    head, hidden = problem(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_loss_sum(hidden, head.weight, None, targets())
        reference = target_loss_sum(head(hidden), targets())
    loss.backward()
    assert (
        loss.item() == pytest.approx(reference.item(), rel=1e-5)
        and loss.item() != target_loss_sum(head(hidden), targets()).item()
    )
    assert head.weight.grad is not None and head.weight.grad.dtype == torch.float32


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation gives."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return result


@pytest.mark.parametrize("kind", ["logits", "chunked"])
def test_a_long_sequences_logits_never_exist(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "CHUNK_TOKENS", 64)
    length, vocab_size = 1024, 5003
    model = FAMILIES["Llama"] | {"vocab_size": vocab_size, "max_position_embeddings": length, "num_hidden_layers": 1}
    job = tiny_job("single", 1, model=model, loss=kind)
    built = build_model(job, vocab_size=vocab_size)
    install(built, plan_loss(built, job))
    tokens = torch.randint(0, vocab_size, (1, length))
    with Largest() as seen:
        sequence_loss_sum(built, TinyBatch(tokens, tokens), CPU).backward()
    everything = length * vocab_size
    assert (seen.num_elements >= everything - vocab_size) == (kind == "logits")
    # What remains: a chunk's logits, the attention's scores (4 heads), and the head's weight.
    assert kind == "logits" or seen.num_elements <= max(64 * vocab_size, 4 * length * length, 32 * vocab_size)


@pytest.mark.parametrize(
    "family", ["DeepSeek-V3", "GPT-2, tied", "GPT-NeoX", "Gemma, tied", "Llama", "Mixtral", "Qwen3"]
)
@pytest.mark.usefixtures("small_chunks")
def test_families_give_the_same_loss_and_gradients(family: str) -> None:
    tokens, labels = (part[:3] for part in global_batch(1))
    found = []
    for kind in ("chunked", "logits"):
        job = tiny_job("single", 1, model=FAMILIES[family] | {"experts_implementation": "eager"}, loss=kind)
        model = build_model(job, vocab_size=VOCAB_SIZE).double()
        plan = plan_loss(model, job)
        assert plan.kind == kind
        install(model, plan)
        assert (ScoringHead.of(model) is not None) == (kind == "chunked")
        loss = sequence_loss_sum(model, TinyBatch(tokens, labels), CPU)
        loss.backward()
        found.append(
            [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
        )
        assert model(input_ids=tokens).logits.shape == (*tokens.shape, VOCAB_SIZE), "logits are there when asked for"
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("gemma2", {"head_dim": 8}), ("cohere", {}), ("granite", {"logits_scaling": 2.0})],
)
def test_a_model_that_changes_its_logits_keeps_them(model_type: str, changes: dict[str, Any]) -> None:
    model = FAMILIES["Llama"] | {"model_type": model_type} | changes
    job = tiny_job("single", 1, model=model)
    built = build_model(job, vocab_size=VOCAB_SIZE)
    plan = plan_loss(built, job)
    assert plan.kind == "logits" and "changes the logits" in plan.reason
    asked = tiny_job("single", 1, model=model, loss="chunked")
    with pytest.raises(InputError, match=r"training.loss: chunked can't be had: .* set it to auto or logits"):
        plan_loss(built, asked)


def test_zero_bubble_keeps_logits_and_refuses_chunks_before_anything_is_read() -> None:
    layout = {"pipeline": 2, "pipeline_schedule": "zero_bubble"}
    model = FAMILIES["Llama"] | {"num_hidden_layers": 4}
    asked = tiny_job("pipeline2", 2, model=model, parallelism=layout, loss="chunked")
    with pytest.raises(InputError, match=r"training.loss: chunked can't be had: zero_bubble"):
        check_supported(asked, device_type="cpu")
    job = tiny_job("pipeline2", 2, model=model, parallelism=layout)
    check_supported(job, device_type="cpu")
    assert plan_loss(build_model(job, vocab_size=VOCAB_SIZE), job).kind == "logits"


def test_auto_takes_chunks_where_a_micro_batch_is_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny_job("single", 1)
    model = build_model(job, vocab_size=VOCAB_SIZE)
    assert plan_loss(model, job).kind == "logits"
    monkeypatch.setattr(linear_loss, "CHUNK_TOKENS", 47)
    assert str(plan_loss(model, job)) == "chunked (47 positions at a time)"
