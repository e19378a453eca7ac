"""RMS norms by torch's kernel: the same numbers, nothing else of a model changed, and only where the code is known."""

import copy
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from trainer.dry_run import kernels
from trainer.dry_run.work import Work
from trainer.models import norms
from trainer.models.norms import CASTING, KNOWN, WIDE, fuse_norms, is_written_out, rms_norm
from trainer_testing.published import of_defaults
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from trainyard.planner.families import FAMILIES
from trainyard.planner.sparse_families import SPARSE_READERS
from trainyard.planner.trainer_layers import FUSED_NORMS
from trainyard.planner.unfused import NORM_BYTES


class Moved(TorchDispatchMode):
    """Counts the bytes that operations move, as a dry run does."""

    def __init__(self) -> None:
        super().__init__()
        self._work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._work.note(func, args, kwargs or {}, result, phase="all")
        return result

    @property
    def num_bytes(self) -> int:
        return self._work.moved_bytes["all"]


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


PLAIN = [LlamaRMSNorm, Olmo2RMSNorm, HeliumRMSNorm, Llama4TextRMSNorm, Gemma4RMSNorm]
KINDS = pytest.mark.parametrize("kind", [*PLAIN, Gemma2RMSNorm])


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
    weight = ours.weight.double()
    exact = rms_norm(hidden.double(), weight if kind in PLAIN else 1 + weight, 1e-6)
    worst = [float((norm(hidden).detach().double() - exact.detach()).abs().max()) for norm in (theirs, ours)]
    assert ours(hidden).dtype == torch.bfloat16
    assert worst[1] <= worst[0]


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("kind", [Gemma2RMSNorm, Gemma4RMSNorm])
def test_gemmas_is_computed_in_fp32_and_its_gradients_are_the_same(
    kind: type[nn.Module], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Of 16 bits in and out; weights of 32 beside them are autocast's, and Gemma's own code takes them, too."""
    theirs, ours = _norms(dtypes[1], kind)
    hidden = torch.randn(64, 48).to(dtypes[0])
    expected, found = _with_gradients(theirs, hidden), _with_gradients(ours, hidden)
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    for one, other in zip(found, expected, strict=True):
        # Rounded once by either, so that all but a few are the same to the bit.
        assert float((one == other).float().mean()) > 0.98
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm, Gemma4RMSNorm])
def test_in_fp64_the_librarys_code_stays_to_the_bit(kind: type[nn.Module]) -> None:
    theirs, ours = _norms(torch.float64, kind)
    hidden = torch.randn(5, 48, dtype=torch.float64)
    assert torch.equal(theirs(hidden), ours(hidden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gemma_4s_norm_of_values_has_no_weight(dtype: torch.dtype) -> None:
    theirs = Gemma4RMSNorm(48, with_scale=False)
    ours = copy.deepcopy(theirs)
    fuse_norms(ours)
    assert type(ours) is not type(theirs)
    both = []
    for norm in (theirs, ours):
        hidden = torch.randn(64, 48, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
        result = norm(hidden)
        result.sum().backward()
        both.append([result.detach(), hidden.grad])
    assert both[1][0].dtype == dtype
    for expected, found in zip(*both, strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)


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
    # 2.11, which also runs, does not widen them either.
    assert torch.__version__ < "2.13" or widened.dtype == torch.float32, "torch has mended it: F.rms_norm would do"


def test_it_is_copied_and_pickled_as_any_module() -> None:
    _, ours = _norms(torch.float32)
    hidden = torch.randn(3, 48)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(other) is type(ours) and other is not ours
        assert torch.equal(other(hidden), ours(hidden)) and other.weight is not ours.weight


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm, Gemma4RMSNorm])
def test_heads_before_positions_come_out_in_the_order_that_they_came_in(kind: type[nn.Module]) -> None:
    theirs, ours = _norms(torch.float32, kind)
    hidden = torch.randn(2, 6, 4, 48).transpose(1, 2)
    torch.testing.assert_close(ours(hidden), theirs(hidden), rtol=1e-5, atol=1e-6)
    assert ours(hidden).stride() == hidden.stride()


def test_code_that_is_not_known_is_left_alone() -> None:
    """Families that copy Llama's norm, or OLMo 2's, have to be told when transformers writes either anew."""
    known = (
        *KNOWN,
        *WIDE,
        *CASTING,
        Qwen3RMSNorm,
        GptOssRMSNorm,
        NemotronHRMSNorm,
        GemmaRMSNorm,
        Gemma3RMSNorm,
        Qwen3NextRMSNorm,
        Gemma3nRMSNorm,
    )
    assert all(is_written_out(kind) for kind in known)
    assert not any(is_written_out(kind) for kind in (nn.LayerNorm, nn.RMSNorm, nn.Linear))


def _model(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES), dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    return model


@pytest.mark.parametrize(("kind", "each"), [("llama", 2), ("qwen3", 4), ("gemma2", 4), ("gemma3_text", 6), ("olmo", 0)])
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


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_models_gradients_are_the_same(checkpointing: bool) -> None:
    model, ids = _model("gemma3_text"), torch.arange(24).view(2, 12)
    ours = copy.deepcopy(model)
    fuse_norms(ours)
    if checkpointing:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
        ours.train()
    for each in (model, ours):
        each(ids, labels=ids).loss.backward()
    for (name, one), other in zip(ours.named_parameters(), model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None, name
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm, Gemma4RMSNorm])
def test_it_is_compiled_in_one_graph(kind: type[nn.Module], dtype: torch.dtype) -> None:
    _, ours = _norms(dtype, kind)
    hidden = torch.randn(5, 48).to(dtype)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    expected, found = _with_gradients(ours, hidden), _with_gradients(compiled, hidden)
    assert all(torch.equal(one, other) for one, other in zip(found[:2], expected[:2], strict=True))


def _counted(norm: nn.Module) -> list[float]:
    """Bytes an element of 16 bits: moved forward, moved back, and kept in between."""
    hidden = torch.randn(256, 48).to(torch.bfloat16).requires_grad_()
    gradient, kept = torch.randn(256, 48).to(torch.bfloat16), dict[int, int]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with Moved() as moved, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = norm(hidden)
        forward = moved.num_bytes
        torch.autograd.grad(result, [hidden, *norm.parameters()], gradient)
    return [each / hidden.numel() for each in (forward, moved.num_bytes - forward, sum(kept.values()))]


def test_gemmas_moves_less_and_keeps_one_copy_in_fp32() -> None:
    with mock.patch.object(norms, "rms_norm", kernels._rms_norm):  # as a GPU has it
        theirs, ours = map(_counted, _norms(torch.bfloat16, Gemma2RMSNorm))
    assert ours == pytest.approx([*NORM_BYTES["layer_fp32"], 4], rel=0.03), "as the plan counts it"
    assert theirs[0] > 38 and theirs[1] > 80 and theirs[2] > 8


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
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(SPARSE_READERS)))
def test_the_plan_knows_which_families_norms_are_fused(family: str) -> None:
    """As each reader says; what has a gate or no weights isn't the layers' own."""
    shape, model = of_defaults(family)
    found = {
        is_written_out(type(module))
        for module in model.modules()
        if type(module).__name__.endswith("Norm") and not type(module).__name__.endswith("L2Norm")
    }
    assert found == {shape.norm in FUSED_NORMS}
