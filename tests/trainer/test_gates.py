"""Gated blocks that keep one tensor less: bit for bit the same numbers, nothing else of a model changed."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer.dry_run.ledger import Ledger
from trainer.models.gates import is_gated, thin_gates
from trainer.models.known_code import is_known
from trainer_testing.published import of_defaults
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.glm4.modeling_glm4 import Glm4MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mistral.modeling_mistral import MistralMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from trainyard.planner.families import FAMILIES, shape_from_config
from trainyard.planner.layout import Layout
from trainyard.planner.sparse_families import SPARSE_READERS
from trainyard.planner.trainer_layers import TrainerLayers
from trainyard.planner.unfused import Unfused

TOKENS, HIDDEN, WIDTH = 32, 16, 48
SIZES = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_attention_heads": 4}


def _blocks(activation: str = "silu", dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """(the library's, ours) with the same weights."""
    torch.manual_seed(7)
    theirs = LlamaMLP(LlamaConfig(**SIZES, hidden_act=activation)).to(dtype)
    ours = copy.deepcopy(theirs)
    thin_gates(ours)
    assert type(ours) is not type(theirs) and type(ours).__name__ == "LlamaMLP"
    return theirs, ours


def _with_gradients(block: nn.Module, hidden: torch.Tensor) -> list[torch.Tensor]:
    hidden = hidden.clone().requires_grad_()
    result = block(hidden)
    result.backward(torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result))
    grads = [parameter.grad for parameter in block.parameters()]
    return [each for each in (result.detach(), hidden.grad, *grads) if each is not None]


@pytest.mark.parametrize("activation", ["silu", "swish", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_bit_changes(activation: str, dtype: torch.dtype) -> None:
    theirs, ours = _blocks(activation, dtype)
    hidden = torch.randn(2, TOKENS, HIDDEN, dtype=dtype)
    expected, found = _with_gradients(theirs, hidden), _with_gradients(ours, hidden)
    assert len(found) == len(expected) == 5
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_no_bit_changes_under_autocast() -> None:
    theirs, ours = _blocks()
    hidden = torch.randn(2, TOKENS, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = _with_gradients(theirs, hidden), _with_gradients(ours, hidden)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _num_kept(block: nn.Module) -> int:
    """Tensors of the block's width that are kept."""
    kept: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == TOKENS * WIDTH:
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        block(torch.randn(TOKENS, HIDDEN, requires_grad=True))
    return len(kept)


def test_three_tensors_are_kept_and_not_four_and_two_of_a_frozen_block() -> None:
    theirs, ours = _blocks()
    assert (_num_kept(theirs), _num_kept(ours)) == (4, 3)
    for each in (theirs, ours):
        each.requires_grad_(False)
    assert (_num_kept(theirs), _num_kept(ours)) == (3, 2)


class Widths(TorchDispatchMode):
    """Notes the tensors of the block's width that are there, at every moment."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.ledger.note([leaf for leaf in leaves if leaf.numel() == TOKENS * WIDTH])
        return result

    @property
    def most(self) -> float:
        return self.ledger.peak().num_bytes / (TOKENS * WIDTH * 4)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_backward_no_more_than_four_tensors_are_there_and_not_six(activation: str, is_frozen: bool) -> None:
    theirs, ours = _blocks(activation)
    most = []
    for block in (theirs, ours):
        block.requires_grad_(not is_frozen)
        with Widths() as seen:
            block(torch.randn(TOKENS, HIDDEN, requires_grad=True)).sum().backward()
        most.append(seen.most)
    assert most == [6, 4]


def test_it_is_differentiated_once() -> None:
    _, ours = _blocks()
    loss = ours(torch.randn(TOKENS, HIDDEN, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="saved_tensors can only be accessed once"):
        loss.backward()


def test_only_known_code_is_changed() -> None:
    assert all(is_gated(kind) for kind in (LlamaMLP, MistralMLP, Qwen3MLP, Gemma3MLP, DeepseekV3MLP))
    assert not any(is_gated(kind) for kind in (Phi3MLP, Glm4MLP, nn.Linear))


@pytest.mark.parametrize("activation", ["relu2", "gelu_new", "gelu_python", "gelu_python_tanh", "quick_gelu"])
def test_what_is_more_than_a_kernel_of_torchs_stays(activation: str) -> None:
    block = LlamaMLP(LlamaConfig(**SIZES, hidden_act=activation))
    thin_gates(block)
    assert type(block) is LlamaMLP


def test_a_decorators_code_is_not_what_it_wraps() -> None:
    def decorated(inner: Any) -> Any:
        def forward(self: Any, x: Any) -> Any:
            return inner(self, x)

        return forward

    known, other = (type(name, (nn.Linear,), {"forward": decorated(of)}) for name, of in (("A", len), ("B", max)))
    assert not is_known(known, (other,)) and not is_known(known, (known,))


def _model(kind: str) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"head_dim": 8, "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_keeps_its_names_its_logits_and_its_gradients(checkpointing: bool) -> None:
    model, ids = _model("qwen3"), torch.arange(24).view(2, 12)
    ours = copy.deepcopy(model)
    thin_gates(ours)
    if checkpointing:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
        ours.train()
    assert [*ours.state_dict()] == [*model.state_dict()]
    for each in (model, ours):
        each(ids, labels=ids).loss.backward()
    for (name, one), other in zip(ours.named_parameters(), model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad), name


def test_it_is_copied_and_pickled() -> None:
    _, ours = _blocks()
    hidden = torch.randn(TOKENS, HIDDEN)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(again) is type(ours) and torch.equal(again(hidden), ours(hidden))


def test_compiled_it_is_one_graph_of_the_librarys_operations() -> None:
    theirs, ours = _blocks()
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(hidden), theirs(hidden))


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(SPARSE_READERS)))
def test_the_plan_knows_whose_gates_are_made_again(family: str) -> None:
    """Of blocks that no expert is: of a family's own code nothing is assumed."""
    shape, model = of_defaults(family)
    blocks = {type(module) for module in model.modules() if isinstance(getattr(module, "down_proj", None), nn.Linear)}
    if not shape.gated_mlp or not blocks:
        return
    assert {is_gated(kind) for kind in blocks} == {not shape.keeps_activated_gate}


def test_the_plan_counts_the_tensor_that_is_kept_no_more_and_the_kernel_that_makes_it_again() -> None:
    sizes = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2}
    shape = shape_from_config(sizes | {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024})
    layout = Layout(library="trainyard", unfused=True, sequence_length=512)
    found = []
    for each in (shape, dataclasses.replace(shape, keeps_activated_gate=True)):
        found.append((TrainerLayers(each, layout).mlp_bytes, *Unfused(each, layout).block(4096)))
    thin, kept = found
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024}
    assert shape_from_config(sizes | heads | {"hidden_act": "relu"}).keeps_activated_gate
    width_bytes = 512 * 4096 * 2
    assert kept[0] - thin[0] == width_bytes
    assert thin[1] == kept[1] and thin[2] - kept[2] == 2 * width_bytes, "the gate read, and written activated"
