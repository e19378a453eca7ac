"""RMS norms by torch's kernel: the same numbers, nothing else of a model changed, and only where the code is known."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from trainer.dry_run import kernels
from trainer.models.norms import KNOWN, fuse_norms, is_written_out, rms_norm
from trainer_testing.published import of_defaults
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from trainyard.planner.families import FAMILIES
from trainyard.planner.trainer_layers import FUSED_NORMS

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
    **{"num_key_value_heads": 2, "vocab_size": 128, "pad_token_id": 0},
}


def _norms(dtype: torch.dtype, kind: type[nn.Module] = LlamaRMSNorm) -> tuple[nn.Module, nn.Module]:
    """(the library's, ours) with weights that are not one."""
    theirs = kind(48)
    torch.manual_seed(5)
    theirs.weight.data = (1 + 0.3 * torch.randn(48)).to(dtype)
    ours = copy.deepcopy(theirs)
    fuse_norms(ours)
    return theirs, ours


def _with_gradients(norm: nn.Module, hidden: torch.Tensor) -> list[torch.Tensor]:
    hidden = hidden.clone().requires_grad_()
    result = norm(hidden)
    norm.weight.grad = None
    result.backward(torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result))
    assert hidden.grad is not None and isinstance(norm.weight.grad, torch.Tensor)
    return [result.detach(), hidden.grad, norm.weight.grad]


KINDS = pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm, HeliumRMSNorm, Llama4TextRMSNorm])


@KINDS
def test_in_fp32_it_is_the_same_norm(kind: type[nn.Module]) -> None:
    theirs, ours = _norms(torch.float32, kind)
    hidden = torch.randn(3, 7, 48)
    for expected, found in zip(_with_gradients(theirs, hidden), _with_gradients(ours, hidden), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@KINDS
def test_in_16_bits_it_is_at_least_as_near_to_the_exact_one(kind: type[nn.Module]) -> None:
    theirs, ours = _norms(torch.bfloat16, kind)
    hidden = torch.randn(64, 48).to(torch.bfloat16)
    exact = rms_norm(hidden.double(), ours.weight.double(), 1e-6)
    worst = [float((norm(hidden).detach().double() - exact.detach()).abs().max()) for norm in (theirs, ours)]
    assert ours(hidden).dtype == torch.bfloat16
    assert worst[1] <= worst[0]


def test_in_fp64_the_librarys_code_stays_to_the_bit() -> None:
    theirs, ours = _norms(torch.float64)
    hidden = torch.randn(5, 48, dtype=torch.float64)
    assert torch.equal(theirs(hidden), ours(hidden))


def test_of_two_types_the_librarys_code_stays() -> None:
    """Autocast's: a product's result in 16 bits, weights in 32. Theirs returns 32."""
    theirs, ours = _norms(torch.float32)
    hidden = torch.randn(5, 48).to(torch.bfloat16)
    assert torch.equal(theirs(hidden), ours(hidden)) and ours(hidden).dtype == torch.float32


@KINDS
def test_autocast_on_a_gpu_leaves_16_bits_16_bits(kind: type[nn.Module]) -> None:
    """Frozen norms of an adapter's base. Of tensors without values torch tells what a GPU's autocast makes of them."""
    kept = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode(), torch.no_grad():
            norm = kind(48)
            norm.weight = nn.Parameter(torch.empty(48, dtype=torch.bfloat16, device="cuda"))
            hidden = torch.empty(2, 5, 48, dtype=torch.bfloat16, device="cuda")
            fuse_norms(norm)
            assert norm(hidden).dtype == torch.bfloat16
            widened = nn.functional.rms_norm(hidden, (48,), norm.weight, 1e-6)
    finally:
        torch.set_autocast_enabled("cuda", kept)
    assert widened.dtype == torch.float32, "torch has mended it: F.rms_norm would do"


def test_it_is_copied_and_pickled_as_any_module() -> None:
    _, ours = _norms(torch.float32)
    hidden = torch.randn(3, 48)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(other) is type(ours) and other is not ours
        assert torch.equal(other(hidden), ours(hidden)) and other.weight is not ours.weight


def test_heads_before_positions_come_out_in_the_order_that_they_came_in() -> None:
    theirs, ours = _norms(torch.float32)
    hidden = torch.randn(2, 6, 4, 48).transpose(1, 2)
    torch.testing.assert_close(ours(hidden), theirs(hidden), rtol=1e-5, atol=1e-6)
    assert ours(hidden).stride() == hidden.stride()


def test_code_that_is_not_known_is_left_alone() -> None:
    """Families that copy Llama's norm, or OLMo 2's, have to be told when transformers writes either anew."""
    assert all(is_written_out(kind) for kind in (*KNOWN, Qwen3RMSNorm, GptOssRMSNorm, NemotronHRMSNorm))
    assert not any(is_written_out(kind) for kind in (Gemma2RMSNorm, nn.LayerNorm, nn.RMSNorm, nn.Linear))


def _model(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES), dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    return model


@pytest.mark.parametrize(("kind", "each"), [("llama", 2), ("qwen3", 4), ("gemma2", 0)])
def test_a_model_keeps_its_names_and_its_logits(kind: str, each: int) -> None:
    model = _model(kind)
    before = {name: type(module).__name__ for name, module in model.named_modules()}
    ids = torch.arange(24).view(2, 12)
    expected = model(ids).logits
    fuse_norms(model)
    assert {name: type(module).__name__ for name, module in model.named_modules()} == before
    changed = [module for module in model.modules() if type(module).__module__ == type(module).__mro__[1].__module__]
    fused = [module for module in changed if is_written_out(type(module).__mro__[1])]
    assert len(fused) == (2 * each + 1 if each else 0)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_twice_is_once() -> None:
    model = _model("llama")
    fuse_norms(model)
    kinds = [type(module) for module in model.modules()]
    fuse_norms(model)
    assert [type(module) for module in model.modules()] == kinds


def test_a_dry_runs_stand_in_keeps_what_the_kernel_keeps() -> None:
    """Of 32 rows of 48 in 16 bits: the input, the weight, and 4 bytes a row."""
    hidden = torch.randn(32, 48).to(torch.bfloat16).requires_grad_()
    weight = torch.ones(48, dtype=torch.bfloat16, requires_grad=True)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = kernels._rms_norm(hidden, weight, 1e-6)
    assert 32 * 48 * 2 + 48 * 2 < sum(kept.values()) <= 32 * 48 * 2 + 48 * 2 + 32 * 4
    result.sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.shape == hidden.shape and weight.grad.shape == weight.shape


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_plan_knows_which_families_norms_are_fused(family: str) -> None:
    """As each reader says; what has a gate or no weights isn't the layers' own."""
    shape, model = of_defaults(family)
    found = {
        is_written_out(type(module))
        for module in model.modules()
        if type(module).__name__.endswith("Norm") and not type(module).__name__.endswith("L2Norm")
    }
    assert found == {shape.norm in FUSED_NORMS}
