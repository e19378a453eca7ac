"""Adafactor, Muon and the running average: torch's own numbers, equal under every layout, resumed bit for bit."""

import math
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer.checkpoint.manifest import step_folder
from trainer.checkpoint.reading import left_moments, mismatch, moment_kinds
from trainer.models.build import build_model
from trainer.optimizers.build import build_optimizer, describe, moments_of, muon_groups
from trainer.optimizers.matrix import (
    MUON_RMS,
    Adafactor,
    Muon,
    _dealt,
    _tf32_products,
    orthogonalized,
)
from trainer.optimizers.momentum import Momentum
from trainer.strategies import check_supported
from trainer_testing.families import FAMILIES
from trainer_testing.strategy_worker import Result, RunRequest, run, worst_relative_error
from trainer_testing.tiny import MODEL, VOCAB_SIZE, tiny_job

from trainyard.errors import InputError

HALF, STEPS = 2, 4
TOLERANCES = {"adamw_8bit": 1e-4}
"""Of losses and norms, by kind; others 1e-5. A last bit's difference now and then picks a neighbour of 256 values."""
KINDS: dict[str, dict[str, Any]] = {
    "adafactor": {"kind": "adafactor"},
    "muon": {"kind": "muon"},
    "average": {"kind": "adamw", "average_decay": 0.9},
    "muon of experts": {"kind": "muon"},
    "adamw_8bit": {"kind": "adamw_8bit"},
}
MODELS = {
    "muon of experts": FAMILIES["Mixtral"],
    # Rows of which the tensor axis cuts whole blocks.
    "adamw_8bit": MODEL | {"hidden_size": 128, "intermediate_size": 256},
}
ENGINES = ("ddp", "fsdp")
PRODUCTS: dict[str, dict[str, int]] = {
    "tensor2": {"tensor": 2},
    "pipeline2": {"pipeline": 2},
    "expert2-fsdp2": {"expert": 2, "data_shard": 2},
}
IN_PRODUCTS = [
    ("adafactor", "tensor2"),
    ("muon", "tensor2"),
    ("adamw_8bit", "tensor2"),
    ("average", "pipeline2"),
    ("muon", "pipeline2"),
    ("muon of experts", "expert2-fsdp2"),
    ("muon of experts", "tensor2"),
]
"""What is cut: columns and rows, the model into stages of which one has the head, and experts."""


def job_of(name: str, strategy: str = "") -> dict[str, Any]:
    """tiny_job's arguments."""
    changes: dict[str, Any] = {"optimizer": KINDS[name], "parallelism": PRODUCTS.get(strategy, {})}
    return changes | ({"model": MODELS[name]} if name in MODELS else {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("optimizers")


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Result]:
    names = [*KINDS]
    results = run(1, [RunRequest("single", last_step=STEPS, job=job_of(name)) for name in names])
    return dict(zip(names, results, strict=True))


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> dict[tuple[str, str], Result]:
    cases = [*((name, engine) for name in KINDS for engine in ENGINES), *IN_PRODUCTS]
    requests = [
        RunRequest(
            engine,
            last_step=STEPS,
            save=str(folder / f"{name}-{engine}"),
            save_after_step=HALF,
            job=job_of(name, engine),
        )
        for name, engine in cases
    ]
    results = run(2, requests)
    return dict(zip(cases, results, strict=True))


def test_every_layout_equals_one_process(one_rank: dict[str, Result], two_ranks: dict[tuple[str, str], Result]) -> None:
    errors = {case: worst_relative_error(result, one_rank[case[0]]) for case, result in two_ranks.items()}
    print({case: f"{error:.0e}" for case, error in errors.items()})
    assert {case: error for case, error in errors.items() if error > TOLERANCES.get(case[0], 1e-5)} == {}


@pytest.mark.slow
def test_muon_deals_matrices_of_any_number_and_size_out(folder: Path) -> None:
    """Rows that four ranks don't divide, fewer matrices of a shape than ranks, two axes: in float64 as one process."""
    jobs = [MODEL | {"intermediate_size": 50, "num_hidden_layers": 3}, MODEL | {"num_hidden_layers": 1}]
    layouts: dict[str, dict[str, int]] = {
        **{"ddp": {}, "fsdp": {}, "hsdp": {"data_replicate": 2, "data_shard": 2}},
        **{"tensor2-fsdp2": {"tensor": 2, "data_shard": 2}},
    }
    for model in jobs:
        job = {"optimizer": {"kind": "muon"}, "precision": "fp64", "model": model}
        (alone,) = run(1, [RunRequest("single", last_step=STEPS, job=job)])
        several = [
            RunRequest(name, last_step=STEPS, job=job | {"parallelism": layout}) for name, layout in layouts.items()
        ]
        for name, result in zip(layouts, run(4, several), strict=True):
            assert worst_relative_error(result, alone) < 1e-12, (name, model)


@pytest.mark.parametrize(
    ("num_replicas", "expected"), [(2, [[0, 2], [1, 4], [3, 5], [6]]), (1, [[n] for n in range(7)])]
)
def test_muon_deals_out_what_is_alike(num_replicas: int, expected: list[list[int]]) -> None:
    """As many of one shape as there are ranks that have them; each parameter once, in an order that all ranks have."""
    parameters = [torch.empty(shape) for shape in ((8, 4), (4, 4), (8, 4), (8, 4), (4, 4), (8, 4), (8, 4))]
    places = {id(parameter): index for index, parameter in enumerate(parameters)}
    dealt = _dealt(parameters, num_replicas, are_kernels=False)
    assert [[places[id(each)] for each in alike] for alike in dealt] == expected


@pytest.mark.parametrize("rows", [[_StridedShard(0, split_factor=2), Shard(0)], [Shard(0), Shard(1)]])
def test_muon_deals_out_what_two_axes_cut(rows: list[Placement]) -> None:
    """Whether FSDP cuts rows of what tensor parallelism has cut in rows, or in columns: no rank makes all of them."""
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        part = torch.empty((2, 4) if rows[1] == Shard(0) else (4, 2))
        whole = {"shape": torch.Size((8, 4)), "stride": (4, 1)}
        cut = [DTensor.from_local(part, mesh, rows, run_check=False, **whole) for _ in range(5)]
        dealt = _dealt(cut, 1, are_kernels=False)
    finally:
        dist.destroy_process_group()
    assert [len(alike) for alike in dealt] == [4, 1]


def test_what_replicas_send_each_other_lies_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are sent as they lie: a sender's rows are no columns to whose parameter is a transpose."""
    seen: list[bool] = []
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "broadcast", lambda sent, **_: seen.append(sent.is_contiguous()))
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda _, rank=rank: rank)
        parameters = [nn.Parameter(torch.randn(4, 6).t()), nn.Parameter(torch.randn(4, 6).t())]
        for parameter in parameters:
            parameter.grad = torch.randn(6, 4)
        groups = [{"params": parameters, "orthogonal": True}]
        group: Any = "the replicas"
        Muon(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, replicas=group).step()
    assert seen == [True] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="TF32 is a GPU's")
def test_what_is_made_orthogonal_by_tf32_is_as_good() -> None:
    """And products outside of an update stay what they were."""
    weights = torch.randn(512, 768, generator=torch.Generator().manual_seed(0))
    found = []
    for uses_tf32 in (False, True):
        parameter = nn.Parameter(weights.cuda())
        parameter.grad = weights.cuda().flip(0)
        groups = [{"params": [parameter], "orthogonal": True}]
        Muon(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, uses_tf32=uses_tf32).step()
        found.append(parameter.detach() - weights.cuda())
    difference = (found[1] - found[0]).norm() / found[0].norm()
    assert 1e-6 < difference < 1e-2
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"


def test_muons_last_matrix_is_gone_when_adamws_updates_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block's widest, in float32: 176 MiB of a Gemma's, beside the largest update of all, the embedding's."""
    matrix, ends = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))
    groups = [
        {"params": [parameter], "orthogonal": is_orthogonal, "kernels": False, "lr": 0.1, "weight_decay": 0.0}
        for parameter, is_orthogonal in ((matrix, True), (ends, False))
    ]
    matrix.grad, ends.grad = torch.randn(8, 8), torch.randn(8, 8)
    optimizer = Muon(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8)
    made: list[weakref.ref[torch.Tensor]] = []
    orthogonal, adamw = optimizer._orthogonal_update, optimizer._adamw_update

    def noted(*given: Any) -> torch.Tensor:
        update = orthogonal(*given)
        made.append(weakref.ref(update))
        return update

    def looked(*given: Any) -> torch.Tensor:
        assert [each() for each in made] == [None]
        return adamw(*given)

    monkeypatch.setattr(optimizer, "_orthogonal_update", noted)
    monkeypatch.setattr(optimizer, "_adamw_update", looked)
    optimizer.step()
    assert len(made) == 1


@pytest.mark.parametrize("uses_tf32", [True, False])
def test_tf32_is_taken_for_an_updates_products_alone(uses_tf32: bool) -> None:
    """The setting itself; what it does is a GPU's."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    assert before != "tf32"
    with pytest.raises(ZeroDivisionError), _tf32_products(torch.device("cuda"), uses_tf32):
        assert products.fp32_precision == ("tf32" if uses_tf32 else before)
        raise ZeroDivisionError
    assert products.fp32_precision == before
    with _tf32_products(torch.device("cpu"), uses_tf32):
        assert products.fp32_precision == before


@pytest.mark.parametrize(("precision", "uses_tf32"), [("bf16", True), ("fp16", True), ("fp32", False), ("fp64", False)])
def test_jobs_of_sixteen_bits_take_tf32_for_muon(precision: str, uses_tf32: bool) -> None:
    job = tiny_job("single", 1, optimizer={"kind": "muon"}, model=FAMILIES["Llama"], precision=precision)
    optimizer = build_optimizer(build_model(job, vocab_size=VOCAB_SIZE), job)
    assert isinstance(optimizer, Muon) and optimizer.uses_tf32 == uses_tf32


def test_eight_bits_train_as_adamw_does() -> None:
    job = {"model": MODELS["adamw_8bit"]}
    kinds = [{"optimizer": {"kind": kind}} for kind in ("adamw_8bit", "adamw")]
    ours, theirs = run(1, [RunRequest("single", last_step=15, job=job | kind) for kind in kinds])
    differences = [abs(a / b - 1) for a, b in zip(ours["loss"], theirs["loss"], strict=True)]
    print(f"{max(differences):.1e}", theirs["loss"][0], theirs["loss"][-1])
    assert 1e-7 < max(differences) < 0.02


def test_the_kinds_are_others_than_adamw_and_learn(one_rank: dict[str, Result]) -> None:
    losses = {name: result["loss"] for name, result in one_rank.items()}
    assert losses["muon"][-1] < losses["muon"][0] - 0.05
    assert abs(losses["adafactor"][-1] - losses["muon"][-1]) > 1e-3
    assert abs(losses["average"][-1] - losses["muon"][-1]) > 1e-3


def test_a_checkpoint_goes_on_bit_for_bit_and_under_the_other_layout(
    folder: Path, two_ranks: dict[tuple[str, str], Result]
) -> None:
    ways = (("ddp", "ddp"), ("fsdp", "fsdp"), ("ddp", "fsdp"))
    cases = [(name, source, target) for name in KINDS for source, target in ways]
    cases += [(name, "tensor2", "fsdp") for name in ("muon", "adamw_8bit")]
    requests = [
        RunRequest(target, HALF + 1, STEPS, load=str(folder / f"{name}-{source}"), job=job_of(name))
        for name, source, target in cases
    ]
    for (name, source, target), result in zip(cases, run(2, requests), strict=True):
        expected = two_ranks[name, source]
        if source == target:
            assert result["loss"] == expected["loss"][HALF:], (name, source)
            assert result["validation"] == expected["validation"], (name, source)
        assert worst_relative_error(result, expected) < TOLERANCES.get(name, 1e-5), (name, source, target)


def test_another_optimizer_than_the_checkpoints_is_named_and_not_the_model(
    folder: Path, two_ranks: dict[tuple[str, str], Result]
) -> None:
    saved = FileSystemReader(folder / "average-ddp" / step_folder(HALF)).read_metadata()
    job, deeper = job_of("average"), MODEL | {"num_hidden_layers": 3}
    for change, cause in (
        ({"optimizer": {"kind": "muon"}}, r"training.optimizer \(kind, momentum, average_decay\) .*model.source"),
        (
            {"optimizer": {"kind": "sgd"}, "model": deeper},
            "model is not the one that was saved",
        ),
        ({"model": MODEL | {"hidden_size": 32}}, "has shape .*; the job's model is not the one"),
    ):
        changed = tiny_job("single", 1, **job | change)
        model = build_model(changed, vocab_size=VOCAB_SIZE)
        optimizer = build_optimizer(model, changed)
        tensors = {f"model.{name}": weight for name, weight in model.named_parameters()}
        for name, weight in model.named_parameters():
            tensors |= {f"optim.{name}.{moment}": kept for moment, kept in moments_of(optimizer, weight).items()}
        told = mismatch(saved, tensors)
        assert told is not None and re.search(cause, told), told


def test_what_no_rank_keeps_of_a_checkpoints_optimizer_is_named() -> None:
    saved = metadata_of(
        {f"optim.w.{name}": torch.zeros(2) for name in ("exp_avg", "average")} | {"model.w": torch.zeros(2)}
    )
    both = frozenset({"exp_avg", "average"})
    assert left_moments(saved, [both, frozenset()]) is None
    assert left_moments(saved, [frozenset({"exp_avg"}), frozenset({"average"})]) is None, "each on a rank of its own"
    assert "holds average of" in str(left_moments(saved, [frozenset({"exp_avg"})]))
    assert "holds average, exp_avg of" in str(left_moments(saved, [moment_kinds(["model.w.weight"])]))
    counted = metadata_of({"optim.w.exp_avg": torch.zeros(2), "optim.w.step": torch.zeros(())})
    assert left_moments(counted, [moment_kinds(["optim.v.exp_avg"])]) is None, "a count of steps is no loss"


def test_what_an_earlier_muon_took_for_a_matrix_is_named() -> None:
    """Momentum of Mamba's rates and convolutions, of which AdamW's averages are kept now: no setting brings it back."""
    tensors, saved = {}, {}
    for name, is_matrix, was_matrix in (("in_proj", True, True), ("A_log", False, True), ("norm", False, False)):
        for kept, into in ((is_matrix, tensors), (was_matrix, saved)):
            moments = ("momentum_buffer",) if kept else ("exp_avg", "exp_avg_sq")
            into |= {f"optim.{name}.weight.{moment}": torch.zeros(2, 2) for moment in moments}
    told = mismatch(metadata_of(saved), tensors)
    assert told is not None and "no optim.A_log.weight.exp_avg," in told, told
    assert re.search(r"; an earlier trainer's Muon took .* image, .* model.source, with another checkpoint", told), told
    as_adamw = {f"optim.{name}.weight.exp_avg": torch.zeros(2, 2) for name in ("in_proj", "A_log", "norm")}
    of_sgd = {f"optim.{name}.weight.momentum_buffer": torch.zeros(2, 2) for name in ("in_proj", "A_log", "norm")}
    for held, wanted in ((saved, as_adamw), (of_sgd, tensors), (of_sgd, as_adamw)):
        told = mismatch(metadata_of(held), wanted)
        assert told is not None and "training.optimizer (kind" in told, told


def metadata_of(tensors: dict[str, torch.Tensor]) -> Metadata:
    properties = TensorProperties(dtype=torch.float32)
    return Metadata({name: TensorStorageMetadata(properties, held.size(), []) for name, held in tensors.items()})


def test_the_average_is_saved_under_the_weights_names(folder: Path, two_ranks: dict[tuple[str, str], Result]) -> None:
    saved = FileSystemReader(folder / "average-fsdp" / step_folder(HALF)).read_metadata().state_dict_metadata
    weights = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    assert {f"optim.{name}.average" for name in weights} <= set(saved)


TIED = MODEL | {"num_hidden_layers": 4, "tie_word_embeddings": True}
AVERAGED: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}),
    ("fsdp", {}),
    ("pipeline2", {"pipeline": 2}),
    ("pipeline2", {"pipeline": 2, "pipeline_schedule": "zero_bubble"}),
    ("tensor2", {"tensor": 2}),
]
"""Of a tied model: a pipeline has its average at both ends, and in zero_bubble one rank has both."""


@pytest.mark.slow
def test_averages_are_one_processs_on_the_way_and_after_a_resume_under_another_layout(tmp_path: Path) -> None:
    """No loss depends on them: they are compared themselves, in float64."""
    job = {"model": TIED, "optimizer": KINDS["average"], "precision": "fp64"}
    weights = tmp_path / "weights"
    one = run(1, [RunRequest("single", last_step=STEPS, job=job, keep_weights=str(weights))])[0]
    kept = torch.load(weights)
    averages = {name for name in kept if name.endswith(".average")}
    assert {f"optim.{name.removeprefix('model.')}.average" for name in kept if name.startswith("model.")} == averages
    moved = {
        name: kept[name] - kept[f"model.{name.removeprefix('optim.').removesuffix('.average')}"] for name in averages
    }
    assert all(difference.abs().max() > 1e-4 for difference in moved.values()), "an average is no copy of the weights"
    whole = [
        RunRequest(
            name,
            last_step=STEPS,
            job=job | {"parallelism": layout},
            save=str(tmp_path / str(number)),
            save_after_step=HALF,
            weights=str(weights),
        )
        for number, (name, layout) in enumerate(AVERAGED)
    ]
    half = {"first_step": HALF + 1, "save": None}
    same = [replace(request, load=request.save, **half) for request in whole]
    # Each goes on from the next one's.
    other = [
        replace(request, load=from_.save, **half) for request, from_ in zip(whole, whole[1:] + whole[:1], strict=True)
    ]
    for requests in (whole, same + other):
        for request, result in zip(requests, run(2, requests), strict=True):
            assert result["weights_error"] < 1e-7, request
            assert worst_relative_error(result, one) < 1e-7, request


def run_steps(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Steps over the same made-up gradients every time."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(num_steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 0.1
        optimizer.step()


def after_steps(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer], *shapes: tuple[int, ...]) -> Any:
    """The weights after 5 steps of an optimizer."""
    generator = torch.Generator().manual_seed(2)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    run_steps(parameters, build(parameters), 5)
    return [parameter.detach() for parameter in parameters]


def test_adafactor_is_torchs() -> None:
    shapes = ((6, 10), (10, 6), (7,), (3, 4, 5))
    ours = after_steps(lambda p: Adafactor([{"params": p, "weight_decay": 0.1}], lr=0.02), *shapes)
    theirs = after_steps(lambda p: torch.optim.Adafactor(p, lr=0.02, weight_decay=0.1), *shapes)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_adafactor_computes_in_float64_where_weights_are() -> None:
    def weights(dtype: torch.dtype) -> list[torch.Tensor]:
        shapes = ((6, 10), (7,), (3, 4, 5))
        generator = torch.Generator().manual_seed(2)
        parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
        optimizer = Adafactor([{"params": parameters, "weight_decay": 0.1}], lr=0.02)
        generator = torch.Generator().manual_seed(3)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        optimizer.step()
        moments = [moments_of(optimizer, parameter) for parameter in parameters]
        assert {tensor.dtype for each in moments for tensor in each.values()} == {dtype}
        return [parameter.detach() for parameter in parameters]

    wide = weights(torch.float64)
    torch.testing.assert_close([tensor.float() for tensor in wide], weights(torch.float32), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["adafactor", "muon", "adamw_8bit", "sgd"])
def test_steps_are_counted_on_the_host(kind: str) -> None:
    """They are read once a parameter and step: on a GPU each would be a wait. `meta` stands for the GPU."""
    job = tiny_job("single", 1, optimizer={"kind": kind}, model=FAMILIES["Llama"])
    optimizer = build_optimizer(build_model(job, vocab_size=VOCAB_SIZE).to("meta"), job)
    steps = {state["step"].device.type for state in optimizer.state.values()}
    moments = {tensor.device.type for p in optimizer.state for tensor in optimizer_tensors(optimizer, p)}
    assert (steps, moments) == ({"cpu"}, {"meta"})


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[torch.Tensor]:
    return [tensor for name, tensor in optimizer.state[parameter].items() if name != "step"]


def test_muon_is_torchs_up_to_its_bf16_and_leaves_the_rest_to_adamw() -> None:
    def muon(orthogonal: bool) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
        return lambda p: Muon(
            [{"params": p, "weight_decay": 0.1, "orthogonal": orthogonal}], lr=0.02, betas=(0.9, 0.95), eps=1e-8
        )

    shapes = ((16, 10), (10, 16))
    theirs = after_steps(lambda p: torch.optim.Muon(p, lr=0.02, adjust_lr_fn="match_rms_adamw"), *shapes)
    torch.testing.assert_close(after_steps(muon(True), *shapes), theirs, rtol=0.05, atol=2e-3)
    adamw = after_steps(lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1), *shapes)
    torch.testing.assert_close(after_steps(muon(False), *shapes), adamw, rtol=1e-5, atol=1e-7)


def test_orthogonalized_singular_values_are_about_one() -> None:
    matrices = torch.randn((3, 12, 20), generator=torch.Generator().manual_seed(1))
    for tensor in (matrices, matrices.mT, matrices[0], matrices.view(3, 2, 6, 20), matrices.new_zeros((0, 12, 20))):
        found = orthogonalized(tensor)
        assert found.shape == tensor.shape
        values = torch.linalg.svdvals(found)
        assert not tensor.numel() or 0.6 < values.min() < values.max() < 1.3
    assert pytest.approx(0.2) == MUON_RMS


def test_sgd_decays_as_torchs_own_and_runs_a_hook_once_a_step() -> None:
    """Whoever built a plain SGD before: torch wraps a class's `step` then, and with it one that calls it."""
    start = torch.randn((4, 3), generator=torch.Generator().manual_seed(1))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    plain = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
    momentum = Momentum([{"params": [ours], "weight_decay": 0.1}], lr=0.1, momentum=0.9, nesterov=True)
    called: list[int] = []
    momentum.register_step_post_hook(lambda *_: called.append(1))
    for _ in range(3):
        for parameter, optimizer in ((ours, momentum), (theirs, plain)):
            parameter.grad = parameter.detach().cos()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert (len(called), momentum.state[ours]["step"].item(), momentum.param_groups[0]["weight_decay"]) == (3, 3, 0.1)


def test_muon_takes_the_blocks_matrices_alone() -> None:
    job = tiny_job("single", 1, optimizer={"kind": "muon"}, model=FAMILIES["Llama"])
    model = build_model(job, vocab_size=VOCAB_SIZE)
    optimizer = build_optimizer(model, job)
    muons = {name for name, p in model.named_parameters() if "momentum_buffer" in moments_of(optimizer, p)}
    assert muons == {name for name, _ in model.named_parameters() if "_proj." in name}


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (64, 4, 3, 3), (16, 1, 7, 7), (8, 3, 2, 3, 3)])
def test_muon_takes_a_convolution_for_one_matrix(shape: tuple[int, ...]) -> None:
    """A row for each channel that comes out, as its author has it: a kernel of 3 x 3 alone maps nothing."""
    settings: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8}
    flat = (shape[0], math.prod(shape[1:]))

    def groups(parameters: list[nn.Parameter], *, kernels: bool) -> list[dict[str, Any]]:
        return [{"params": parameters, "weight_decay": 0.1, "orthogonal": True, "kernels": kernels}]

    (kernels,) = after_steps(lambda p: Muon(groups(p, kernels=True), **settings), shape)
    (matrix,) = after_steps(lambda p: Muon(groups(p, kernels=False), **settings), flat)
    torch.testing.assert_close(kernels, matrix.view(shape), rtol=0, atol=0)


def test_muon_knows_a_models_convolutions_and_leaves_those_of_sequences() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv1d(8, 8, 4, groups=8), nn.Linear(8, 4), nn.BatchNorm2d(8))
    groups = muon_groups(model, 0.1)
    found = {id(p): (group["orthogonal"], group["kernels"]) for group in groups for p in group["params"]}
    kernels, along, linear, norm = (found[id(model[number].weight)] for number in range(4))
    assert (kernels, along, linear, norm) == ((True, True), (False, False), (True, False), (False, False))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("adamw", "AdamW (torch's fused kernel)"),
        ("adamw_8bit", "AdamW in 8 bits ("),
        ("muon", "Muon (matrices dealt out"),
        ("sgd", "SGD (torch's own)"),
    ],
)
def test_what_runs_is_said(kind: str, wanted: str) -> None:
    job = tiny_job("single", 1, optimizer={"kind": kind}, model=FAMILIES["Llama"])
    said = describe(build_optimizer(build_model(job, vocab_size=VOCAB_SIZE), job))
    assert said.startswith(wanted)


def test_the_average_follows_the_weights() -> None:
    job = tiny_job("single", 1, optimizer={"average_decay": 0.5}, model=FAMILIES["Llama"])
    model = build_model(job, vocab_size=VOCAB_SIZE)
    optimizer, parameter = build_optimizer(model, job), model.get_input_embeddings().weight
    before = parameter.detach().clone()
    run_steps(list(model.parameters()), optimizer, 1)
    torch.testing.assert_close(moments_of(optimizer, parameter)["average"], (before + parameter.detach()) / 2)
    assert not torch.equal(before, parameter)


@pytest.mark.parametrize(
    ("optimizer", "strategy", "message"),
    [
        ({"kind": "adamw_8bit"}, "zero2", r"kind: adamw_8bit is not implemented with engine: deepspeed"),
        ({"kind": "muon"}, "zero2", r"kind: muon is not implemented with engine: deepspeed"),
        ({"kind": "adafactor"}, "zero3", r"kind: adafactor is not implemented with engine: deepspeed"),
        ({"average_decay": 0.9}, "zero1", r"average_decay is not implemented with engine: deepspeed"),
    ],
)
def test_what_an_optimizer_can_not_do_is_one_line(optimizer: dict[str, Any], strategy: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_supported(tiny_job(strategy, 2, optimizer=optimizer), device_type="cpu")
    assert "\n" not in str(caught.value)
