"""Which attention runs is chosen, said and refused with a reason; documents by offsets equal documents by a mask."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from trainer.models import attention
from trainer.models.attention import (
    VARLEN,
    DocumentAttention,
    attach,
    attention_of,
    choose_attention,
    positions_on,
    register,
)
from trainer.models.build import build_model
from trainer.models.configuration import configuration_of
from trainer.strategies import check_supported
from trainer_testing.families import FAMILIES, OWN_SIZES
from trainer_testing.tiny import SEQUENCE_LENGTH, VOCAB_SIZE, global_batch, tiny_job
from transformers import AttentionInterface, PreTrainedModel

from trainyard.errors import InputError
from trainyard.spec.job import ResolvedJob
from trainyard.spec.support import DOCUMENT_FAMILIES

CPU = torch.device("cpu")


def job_with(
    family: str = "Llama", *, asked: str = "auto", data: dict[str, Any] | None = None, **job: Any
) -> ResolvedJob:
    world_size = job.get("parallelism", {}).get("context", 1)
    made = tiny_job("single", world_size, model=FAMILIES.get(family, FAMILIES["Llama"] | {"model_type": family}), **job)
    model = made.spec.model.model_copy(update={"attention": asked})
    spec = made.spec.model_copy(update={"model": model, "data": made.spec.data.model_copy(update=data or {})})
    return made.model_copy(update={"spec": spec})


def said(job: ResolvedJob) -> str:
    return attention_of(build_model(job, vocab_size=VOCAB_SIZE), job, CPU)


def test_what_runs_is_said_with_its_kernel_and_reason() -> None:
    apart = {"document_masks": False}
    assert said(job_with()) == "sdpa, flash kernel (a mask keeps packed documents apart)"
    assert said(job_with(data=apart)) == "sdpa, flash kernel (causal, no mask)"
    assert said(job_with("Mistral", data=apart)) == "sdpa, flash kernel (a mask cuts the window)"
    assert said(job_with(asked="eager")) == "eager (model.attention asks for it)"
    assert said(job_with("gemma2")) == "eager (gemma2 caps attention's scores, which sdpa leaves out in transformers)"


def test_what_packed_documents_cost_with_cut_sequences_is_said() -> None:
    model = build_model(job_with(), vocab_size=VOCAB_SIZE)
    job = job_with(parallelism={"context": 2}, data={"sequence_length": 131072})
    told = attention_of(model, job, CPU)
    assert told.endswith("of 2 ranks (parallelism.context; packed documents one after the other, without a mask)")
    model.config.sliding_window = 4096
    told = attention_of(model, job, CPU)
    assert "(parallelism.context; packed documents and windows take a mask of 8 GiB a sequence" in told
    apart = job_with(parallelism={"context": 2}, data={"document_masks": False})
    assert attention_of(model, apart, CPU) == "sdpa over keys and values of 2 ranks (parallelism.context)"


@pytest.mark.parametrize(
    ("family", "asked", "data", "message"),
    [
        (
            "Llama",
            "flash_attention_3",
            {"packing": False},
            r"flash_attention_3 runs on Hopper GPUs, and this machine has none; set it",
        ),
        ("gpt2", "flash_attention_3", {"packing": False}, r"flash_attention_3 has no dropout, .*; set it to auto"),
        ("Llama", "varlen", {}, r"varlen can't be had: torch's kernel for it needs an NVIDIA GPU .*; set it to auto"),
        ("Llama", "varlen", {"document_masks": False}, r"varlen can't be had: no packed documents"),
        (
            "gemma2",
            "sdpa",
            {},
            r"sdpa can't be had: it leaves out the cap .* gemma2 has .*; set it to auto or eager",
        ),
        ("bloom", "auto", {}, r"data.document_masks: .* bloom is not verified for it: set .*document_masks to false"),
        ("qwen3_next", "auto", {}, r"data.document_masks: .* layers \(linear_attention\) that see through it"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_is_read(
    family: str, asked: str, data: dict[str, Any], message: str
) -> None:
    job = job_with(family, asked=asked, data=data, precision="bf16")
    with pytest.raises(InputError, match=message) as caught:
        check_supported(job, device_type="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [{"document_masks": False}, {"packing": False}])
def test_documents_that_may_see_each_other_need_no_verified_model(data: dict[str, Any]) -> None:
    check_supported(job_with("falcon_mamba", data=data), device_type="cpu")


@pytest.mark.skipif(not attention._has_varlen(), reason="torch 2.11 has no varlen attention with windows")
def test_varlen_is_chosen_on_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(attention, "varlen_flaw", lambda *_, **__: None)
    bf16 = job_with(precision="bf16")
    config = configuration_of(bf16)
    assert config is not None
    assert choose_attention(bf16, config, device_type="cuda").implementation == VARLEN
    for other in (job_with(), job_with(precision="bf16", data={"packing": False}), job_with(asked="sdpa")):
        assert choose_attention(other, config, device_type="cuda").implementation == "sdpa"
    for family, instead in (("DeepSeek-V3", "sdpa"), ("gemma2", "eager")):
        theirs = configuration_of(job_with(family))
        assert theirs is not None
        assert choose_attention(bf16, theirs, device_type="cuda").implementation == instead, family
    monkeypatch.setattr(attention, "varlen_flaw", lambda *_, **__: "it is wrong here")
    assert choose_attention(bf16, config, device_type="cuda").implementation == "sdpa"


def test_a_window_that_only_the_mask_is_told_of_matters_where_it_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_machine_obstacle", lambda _: None)
    monkeypatch.setattr(attention, "varlen_flaw", lambda *_, **__: None)
    for window, instead in ((SEQUENCE_LENGTH - 1, "sdpa"), (SEQUENCE_LENGTH, VARLEN), (None, VARLEN)):
        job = job_with("phimoe", precision="bf16")
        config = configuration_of(job)
        assert config is not None
        config.sliding_window = window
        assert choose_attention(job, config, device_type="cuda").implementation == instead, window
        asked = job_with("phimoe", asked="flash_attention_3", precision="bf16")
        cut = rf"phimoe tells its window of {window} tokens to the mask alone.*; set it to auto"
        with pytest.raises(InputError, match=cut if instead == "sdpa" else "this machine has none"):
            choose_attention(asked, config, device_type="cpu")


TABLED = {str(model["model_type"]) for model in FAMILIES.values()}


class OneByOne(DocumentAttention):
    """The kernel's contract, by the letter: each document through plain attention."""

    def kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        offsets: torch.Tensor,
        longest: int,
        scale: float | None,
        window: tuple[int, int],
    ) -> torch.Tensor:
        outputs = []
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            length = end - begin
            assert 0 < length <= longest
            ages = torch.arange(length).unsqueeze(1) - torch.arange(length)
            seen = (ages >= 0) & ((ages <= window[0]) | (window[0] < 0))
            parts = [part[begin:end].transpose(0, 1) for part in (query, key, value)]
            output = F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale, enable_gqa=True)
            outputs.append(output.transpose(0, 1))
        return torch.cat(outputs)


def test_a_kernel_that_is_wrong_or_does_not_run_is_not_taken() -> None:
    def flaw(kernel: Any) -> str | None:
        return attention.varlen_flaw(kernel, head_size=16, dtype=torch.bfloat16, device=CPU)

    right = OneByOne().kernel
    assert flaw(right) is None
    wider = flaw(lambda *parts: right(*parts[:-1], (parts[-1][0] + 1, 0)))
    across = flaw(lambda *parts: right(*parts[:3], parts[3][[0, -1]], *parts[4:]))
    assert wider is not None and "is off by" in wider
    assert across is not None and "is off by" in across
    assert "does not run here" in str(flaw(DocumentAttention().kernel)), "torch has it for NVIDIA GPUs alone"


def documents() -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences of tokens, and their positions, with one restart each."""
    positions = torch.arange(SEQUENCE_LENGTH).repeat(2, 1)
    positions[0, 7:] = torch.arange(SEQUENCE_LENGTH - 7)
    positions[1, 22:] = torch.arange(2)
    return global_batch(1)[0][:2], positions


def logits_and_gradient(model: PreTrainedModel) -> list[torch.Tensor]:
    tokens, positions = documents()
    model.train()
    device = model.device
    logits = model(input_ids=tokens.to(device), position_ids=positions.to(device), use_cache=False).logits
    logits.float().square().mean().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, VARLEN is OneByOne."""
    kernel = OneByOne()
    register(kernel)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_ATTENTION", kernel)
        yield
    register(attention._ATTENTION)


def check_offsets(job: ResolvedJob) -> None:
    masked, by_offsets = (build_model(job, vocab_size=VOCAB_SIZE) for _ in range(2))
    by_offsets.set_attn_implementation(VARLEN)
    attach(by_offsets)
    assert masked.config._attn_implementation != VARLEN
    for ours, theirs in zip(logits_and_gradient(by_offsets), logits_and_gradient(masked), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("recomputed", ["none", "full"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3", "GPT-2, tied", "Mixtral"])
@pytest.mark.usefixtures("one_by_one")
def test_documents_by_offsets_equal_documents_by_a_mask(family: str, recomputed: str) -> None:
    model = FAMILIES[family] | {"sliding_window": 5} if family == "Mistral" else FAMILIES[family]
    check_offsets(tiny_job("single", 1, model=model, activation_checkpointing=recomputed))


REFUSED_OFFSETS = {
    *("gemma2", "gpt_oss", "phimoe", "vaultgemma", "codegen", "gpt_neox_japanese", "gemma4_unified_text"),
    *("axk1", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu"),
}
"""Types that a mask keeps apart everywhere: caps, untold windows, biases, heads of two sizes."""


@pytest.mark.full
@pytest.mark.parametrize("model_type", sorted(DOCUMENT_FAMILIES - TABLED))
@pytest.mark.usefixtures("one_by_one")
def test_every_type_that_may_have_offsets_has_its_window_by_them_too(model_type: str) -> None:
    dropped = ("attention_dropout", "residual_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop")
    without = dict.fromkeys(dropped, 0.0) | {"pad_token_id": 0, "head_dim": 8}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "experts_implementation": "eager"}
    number = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4)
    # They have no window, and would tell attention of one that another model's configuration states.
    window = {} if model_type in ("olmoe", "gptj") else {"sliding_window": 5}
    named = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | OWN_SIZES.get(model_type, {})
    model = FAMILIES["Llama"] | without | experts | number | window | named | {"model_type": model_type}
    job = tiny_job("single", 1, model=model)
    config = configuration_of(job)
    assert config is not None
    if attention._model_obstacle(job, config) is None:
        check_offsets(job)
    else:
        assert model_type in REFUSED_OFFSETS, "another is refused"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's variable-length kernel runs on NVIDIA GPUs alone")
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3", "Mixtral"])
def test_varlen_on_gpu_equals_a_mask(family: str) -> None:
    found = []
    for asked in ("varlen", "sdpa"):
        job = job_with(family, asked=asked, precision="bf16")
        model = build_model(job, vocab_size=VOCAB_SIZE).to("cuda", torch.bfloat16)
        assert attention_of(model, job, torch.device("cuda")).startswith(asked)
        found.append(logits_and_gradient(model))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-3)


def test_a_mask_keeps_cudnn_out_of_torchs_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by what is switched on while transformers' own function runs; the machine's GPU is a word here."""
    seen: list[bool] = []

    def noted(*_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return torch.empty(0), None

    monkeypatch.setattr(attention, "_theirs", noted)
    function = AttentionInterface()["sdpa"]
    mask, bias = torch.ones(1, 1, 4, 4, dtype=torch.bool), torch.zeros(1, 2, 4, 4)
    for device in ("cpu", "cuda"):
        query = SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16)
        function(torch.nn.Identity(), query, query, query, None)
        function(torch.nn.Identity(), query, query, query, mask)
        function(torch.nn.Identity(), query, query, query, None, position_bias=bias)
    assert seen == [True, True, True, True, False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_layers_share_what_kernels_read_in_a_masks_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each call of its own torch would make tokens x tokens numbers anew, and keep them."""
    seen: list[torch.Tensor] = []

    def noted(_: Any, query: torch.Tensor, *rest: Any, **__: Any) -> tuple[torch.Tensor, None]:
        seen.append(rest[2])
        return torch.empty(0), None

    monkeypatch.setattr(attention, "_theirs", noted)
    function, mask = AttentionInterface()["sdpa"], torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    query = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    for each in (mask, mask, mask.clone()):
        function(torch.nn.Identity(), query, query, query, each)
    assert seen[0] is seen[1] and seen[2] is not seen[0]
    expected = torch.zeros(1, 1, 4, 4, dtype=torch.bfloat16).masked_fill(~mask, float("-inf"))
    assert torch.equal(seen[0], expected) and seen[0].dtype == torch.bfloat16
    monkeypatch.setattr(attention, "_type_on_gpu", lambda _: torch.float16)  # autocast's, which needs a GPU to be on
    function(torch.nn.Identity(), query, query, query, mask)
    assert seen[-1].dtype == torch.float16
    assert attention.shared_bias(expected, torch.float32) is expected, "is one already"


def test_a_masked_model_computes_what_transformers_alone_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the choice is narrowed, as on a GPU."""
    job = job_with("Mistral", asked="sdpa", data={"document_masks": False})
    model = build_model(job, vocab_size=VOCAB_SIZE)
    AttentionInterface.register("sdpa", attention._theirs)
    try:
        expected = logits_and_gradient(model)
    finally:
        AttentionInterface.register("sdpa", attention._sdpa)
    monkeypatch.setattr(attention, "kernels_for", lambda mask, _: sdpa_kernel(attention._RIGHT_WITH_MASKS))
    theirs, noted = attention._theirs, []

    def biased(module: Any, query: Any, key: Any, value: Any, mask: torch.Tensor, **named: Any) -> Any:
        noted.append(mask)
        return theirs(module, query, key, value, attention.shared_bias(mask, query.dtype), **named)

    monkeypatch.setattr(attention, "_theirs", biased)
    model.zero_grad()
    found = logits_and_gradient(model)
    assert noted and all(mask is not None for mask in noted)
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("recomputes", [False, True])
def test_code_that_asks_torch_itself_leaves_cudnn_out_too(recomputes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon's, whose mask is always there: in every layer, also where it is computed again in the backward pass."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2}
    model = {"model_type": "falcon", "new_decoder_architecture": True, "vocab_size": VOCAB_SIZE, **sizes}
    recomputation = "full" if recomputes else "none"
    job = tiny_job("single", 1, model=model, document_masks=False, activation_checkpointing=recomputation)
    built = build_model(job, vocab_size=VOCAB_SIZE)
    assert attention_of(built, job, CPU) == "sdpa, flash kernel (falcon's code always makes a mask)"
    expected = logits_and_gradient(built)
    built.zero_grad()

    def on_a_gpu(mask: torch.Tensor | None, _: torch.device) -> Any:
        return nullcontext() if mask is None else sdpa_kernel(attention._RIGHT_WITH_MASKS)

    asked: list[tuple[bool, bool]] = []
    theirs = F.scaled_dot_product_attention

    def noted(*tensors: torch.Tensor, **named: Any) -> torch.Tensor:
        asked.append((named["attn_mask"] is not None, torch.backends.cuda.cudnn_sdp_enabled()))
        return theirs(*tensors, **named)

    monkeypatch.setattr(attention, "kernels_for", on_a_gpu)
    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    found = logits_and_gradient(built)
    assert asked == [(True, False)] * (4 if recomputes else 2)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-7)
    assert [type(block.self_attention).__name__ for block in built.transformer.h] == ["FalconAttention"] * 2


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="cuDNN's fault is Hopper's"
)
def test_masked_gradients_are_finite_on_hopper_where_cudnns_are_not() -> None:
    """pytorch#196678: once the second half fails, cuDNN is mended, and `kernels_for` can let it have masks."""
    length, size = 704, 64
    parts = [torch.randn(1, 1, length, size, device="cuda", dtype=torch.bfloat16) * 0.1 for _ in range(3)]
    parts[0][..., 0], parts[1][..., 0] = 1.0, -120 * size**0.5
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()[None, None]
    finite = []
    for ours in (True, False):
        query, key, value = (part.clone().requires_grad_() for part in parts)
        with attention.kernels_for(mask, query.device) if ours else sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(query, key, value, attn_mask=mask).sum().backward()
        assert query.grad is not None
        finite.append(bool(query.grad.isfinite().all()))
    assert finite == [True, False]


class Operations(TorchDispatchMode):
    """Names of the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_documents_are_counted_before_they_are_on_the_device() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    counted = DocumentAttention()
    moved = positions_on(CPU, positions.clone())
    with Operations() as seen:
        counted.before_forward(torch.nn.Identity(), (), {"position_ids": moved})
    assert counted.mask().tolist() == [0, 3, 5, 6, 10]
    assert not any("nonzero" in name for name in seen.names), "that waits until a GPU is idle"
    found = DocumentAttention()
    with Operations() as seen:
        found.before_forward(torch.nn.Identity(), (), {"position_ids": positions})
    assert found.mask().tolist() == counted.mask().tolist()
    assert any("nonzero" in name for name in seen.names)
