"""Weights made part by part are the whole's, and a new model's are spread as its own class would spread them."""

from typing import Any

import pytest
import torch
import trainer.models.deferred_weights as deferred
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer.models.build import build_model, outline_model
from trainer.models.deferred_weights import InitializedWeights, fill, local_index, outline, source_of
from trainer_testing.families import FAMILIES
from trainer_testing.tiny import VOCAB_SIZE, tiny_job
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

CPU = torch.device("cpu")


def library_model(settings: dict[str, Any]) -> PreTrainedModel:
    """As transformers alone would make it."""
    config = AutoConfig.for_model(settings["model_type"], **{k: v for k, v in settings.items() if k != "model_type"})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_model_is_spread_as_its_class_spreads_it(family: str) -> None:
    # Large enough for the deviations to be told apart, with a row of the embedding that has to be zero.
    settings = FAMILIES[family] | {"pad_token_id": 3, "initializer_range": 0.05}
    settings |= {"n_embd": 64} if "n_embd" in settings else {"hidden_size": 64}
    outlined = outline_model(tiny_job("single", 1, model=settings), vocab_size=VOCAB_SIZE)
    assert isinstance(source_of(outlined), InitializedWeights)  # built in parts, not whole
    assert all(parameter.is_meta for parameter in outlined.parameters())
    model = fill(outlined, device=CPU)
    torch.manual_seed(0)
    reference = library_model(settings)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        scale = theirs.std().item() if theirs.numel() > 1 else 0.0
        assert ours.std().item() == pytest.approx(scale, rel=0.15, abs=1e-9), name
        assert ours.mean().item() == pytest.approx(theirs.mean().item(), abs=0.15 * scale + 1e-9), name
        assert torch.equal((ours == 0).all(-1), (theirs == 0).all(-1)), name
    for (name, ours), (_, theirs) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    tied = reference.get_output_embeddings().weight is reference.get_input_embeddings().weight
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied  # type: ignore[operator]


@pytest.mark.parametrize("chunk_elements", [64, 200, 2**20])
def test_a_part_is_what_the_whole_has_there(chunk_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "CHUNK_ELEMENTS", chunk_elements)
    model = outline_model(tiny_job("single", 1, model=FAMILIES["Mixtral"] | {"pad_token_id": 3}), vocab_size=VOCAB_SIZE)
    source = source_of(model)
    assert source is not None
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    whole = {name: source.read(name, tuple(torch.arange(size) for size in shape)) for name, shape in shapes.items()}
    assert len({values.flatten()[0].item() for values in whole.values() if values.ndim > 1}) > 10
    assert (whole["model.embed_tokens.weight"][3] == 0).all()
    generator = torch.Generator().manual_seed(5)
    for name, shape in shapes.items():
        for _ in range(4):
            index = tuple(
                torch.randperm(size, generator=generator)[: max(1, size // 3)].sort().values for size in shape
            )
            expected = whole[name][torch.meshgrid(*index, indexing="ij")]
            assert torch.equal(source.read(name, index), expected), name


def test_a_model_that_is_being_filled_shows_that_it_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[None] = []
    monkeypatch.setattr(deferred, "beat", lambda: beats.append(None))
    model = outline_model(tiny_job("single", 1, model=FAMILIES["Llama"]), vocab_size=VOCAB_SIZE)
    assert beats == []
    num_parameters = len(list(model.parameters()))
    fill(model, device=CPU)
    assert len(beats) == num_parameters > 10


def test_rows_are_made_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "CHUNK_ELEMENTS", 320)
    source = source_of(outline_model(tiny_job("single", 1, model=FAMILIES["Llama"]), vocab_size=VOCAB_SIZE))
    made = []
    rows = InitializedWeights._rows
    monkeypatch.setattr(
        InitializedWeights, "_rows", lambda self, *arguments: made.append(arguments[1:3]) or rows(self, *arguments)
    )
    assert source is not None
    source.read("lm_head.weight", (torch.arange(25, 45), torch.arange(32)))
    assert made == [(20, 10), (30, 10), (40, 10)]


class Unusual(nn.Module):
    """Initializes itself by what can't be done to a part of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(6, 6)
        self.kept = nn.Parameter(torch.linspace(0, 1, 7))
        nn.init.orthogonal_(self.matrix.weight)


class Bounded(nn.Module):
    """Initializes itself by a function that does nothing on meta, without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(60, 60)
        nn.init.trunc_normal_(self.matrix.weight, std=0.02, a=-0.03, b=0.03)


class Kept(nn.Module):
    """Leaves a parameter as it was constructed."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.linspace(0, 1, 7))
        self.scaled = nn.Parameter(torch.ones(3, 2))
        with torch.no_grad():
            self.scaled.mul_(0.5)


class Derived(nn.Module):
    """Makes one parameter from another, as Mamba does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(1, 2, 7))
        self.second = nn.Parameter(torch.empty(7))
        with torch.no_grad():
            self.second.copy_(self.first.log())


def test_a_class_that_initializes_itself_oddly_is_built_whole() -> None:
    torch.manual_seed(3)
    odd = fill(outline(Unusual, seed=1), device=CPU)
    assert isinstance(odd, Unusual)
    torch.testing.assert_close(odd.matrix.weight @ odd.matrix.weight.T, torch.eye(6))
    bounded = fill(outline(Bounded, seed=1), device=CPU)
    assert isinstance(bounded, Bounded)
    assert 0.02 < bounded.matrix.weight.abs().max().item() < 0.031
    derived = fill(outline(Derived, seed=1), device=CPU)
    assert isinstance(derived, Derived)
    assert torch.equal(derived.second, torch.linspace(1, 2, 7).log())
    model = outline(Kept, seed=1)
    assert isinstance(source_of(model), InitializedWeights)
    fill(model, device=CPU)
    assert isinstance(model, Kept)
    assert torch.equal(model.kept, torch.linspace(0, 1, 7))
    assert torch.equal(model.scaled, torch.full((3, 2), 0.5))


def test_the_position_of_a_shard_is_where_torch_puts_it() -> None:
    """Strided shards: what FSDP makes of a tensor that is cut by rows already, and what packed matrices are cut by."""
    torch.distributed.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        for shape, placements in (
            ((8, 6), [Shard(0), Shard(1)]),
            ((7, 5), [Shard(0), Shard(0)]),
            ((8, 6), [_StridedShard(0, split_factor=2), Shard(0)]),
            ((8, 6), [Shard(0), _StridedShard(-1, split_factor=3)]),
            ((4, 8, 6), [Shard(2), _StridedShard(1, split_factor=2)]),
        ):
            values = torch.arange(torch.Size(shape).numel()).view(shape)
            part = distribute_tensor(values, mesh, placements, src_data_rank=None)
            index = local_index(part)
            assert torch.equal(values[torch.meshgrid(*index, indexing="ij")], part.to_local()), placements
    finally:
        torch.distributed.destroy_process_group()


def test_weights_have_the_type_that_they_are_trained_in() -> None:
    double = build_model(tiny_job("single", 1, model=FAMILIES["Llama"], precision="fp64"), vocab_size=VOCAB_SIZE)
    single = build_model(tiny_job("single", 1, model=FAMILIES["Llama"]), vocab_size=VOCAB_SIZE)
    assert {parameter.dtype for parameter in double.parameters()} == {torch.float64}
    for ours, theirs in zip(double.parameters(), single.parameters(), strict=True):
        assert torch.equal(ours, theirs.double())
