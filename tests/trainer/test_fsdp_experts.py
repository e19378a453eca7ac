"""Packed experts under FSDP alone: cut inside of each where its ranks don't divide their number, and equal one process.

FSDP cuts dimension 0, and pads it: Mixtral's 8 experts over 64 ranks had 64 slots where they are gathered, and 8 ranks
the training state of all. These tests fail there, and tell when FSDP no longer pads.
"""

from typing import Any

import pytest
import torch
from memory_agreement.campaign import LEAST_BYTES
from torch import nn
from torch.distributed.tensor import Shard
from trainer.strategies.fsdp import placement_of
from trainer_testing.agreement import FEW, agreement
from trainer_testing.families import FAMILIES
from trainer_testing.strategy_worker import Result, RunRequest, run, worst_relative_error

SIX = FAMILIES["Mixtral"] | {"num_local_experts": 6}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "fsdp": {"data_shard": 4},
    "pipeline2-fsdp2": {"pipeline": 2, "data_shard": 2},
    "hsdp": {"data_replicate": 2, "data_shard": 2},
}
OPTIMIZERS = ("adamw", "muon", "adafactor")
SAVED_AT, LAST = 2, 4
TOLERANCE = 1e-7


def _request(optimizer: str, strategy: str, **changes: Any) -> RunRequest:
    precision, kind = "fp64", {"kind": optimizer}
    job = {"model": SIX, "parallelism": LAYOUTS[strategy], "steps": LAST, "precision": precision, "optimizer": kind}
    return RunRequest(strategy, last_step=LAST, job=job | {"global_batch_size": 8, "micro_batch_size": 2}, **changes)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """By optimizer and strategy; `again` goes on from the save of `fsdp`, `alone` does so in one process."""
    folder = tmp_path_factory.mktemp("experts")
    alone = run(1, [_request(kind, "single") for kind in OPTIMIZERS])
    saves = {kind: str(folder / kind) for kind in OPTIMIZERS}
    cut = run(4, [_request(kind, "fsdp", save=saves[kind], save_after_step=SAVED_AT) for kind in OPTIMIZERS])
    resumed = {"load": saves["muon"], "first_step": SAVED_AT + 1}
    again = run(4, [_request("muon", "fsdp", **resumed)])
    elsewhere = run(1, [_request("muon", "single", **resumed)])
    found = {f"{kind} single": result for kind, result in zip(OPTIMIZERS, alone, strict=True)}
    found |= {f"{kind} fsdp": result for kind, result in zip(OPTIMIZERS, cut, strict=True)}
    return found | {"muon again": again[0], "muon elsewhere": elsewhere[0]}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_they_equal_one_process(results: dict[str, Result], optimizer: str) -> None:
    alone = results[f"{optimizer} single"]
    assert alone["loss"][-1] < alone["loss"][0]
    assert worst_relative_error(results[f"{optimizer} fsdp"], alone) < TOLERANCE


def test_their_checkpoints_go_on_as_any_others(results: dict[str, Result]) -> None:
    whole = results["muon fsdp"]
    assert results["muon again"]["loss"] == whole["loss"][SAVED_AT:], "bit for bit at the same layout"
    assert worst_relative_error(results["muon elsewhere"], results["muon single"]) < TOLERANCE


@pytest.mark.slow
def test_so_do_other_numbers_of_ranks_and_beside_copies_and_stages() -> None:
    """Four experts over three ranks, and three over two, as half of four ranks hold them."""
    models = [FAMILIES["Qwen3-MoE"] | {"moe_intermediate_size": 24}, FAMILIES["Mixtral"] | {"num_local_experts": 3}]
    muon = {"optimizer": {"kind": "muon"}}
    jobs = [{"model": model, "steps": LAST, "global_batch_size": 12, "micro_batch_size": 1} for model in models]
    four, three = jobs[0], jobs[1] | muon
    alone = run(1, [RunRequest("single", last_step=LAST, job=job) for job in (four, three)])
    found = run(3, [RunRequest("fsdp", last_step=LAST, job=four | {"parallelism": {"data_shard": 3}})])
    names = ("pipeline2-fsdp2", "hsdp")
    found += run(4, [RunRequest(name, last_step=LAST, job=three | {"parallelism": LAYOUTS[name]}) for name in names])
    for result, reference in zip(found, [alone[0], alone[1], alone[1]], strict=True):
        assert worst_relative_error(result, reference) < 1e-5


@pytest.mark.parametrize(
    ("shape", "num_ranks", "dim"),
    [
        ((8, 64, 32), 8, None),
        ((8, 64, 32), 64, 1),
        ((8, 48, 32), 32, 2),
        ((6, 64, 32), 4, 1),
        ((60, 64, 32), 8, None),  # 64 slots: a fifteenth
        ((8, 50, 30), 64, None),  # nothing divides
        ((8, 64), 64, None),
    ],
)
def test_which_dimension_is_cut(shape: tuple[int, ...], num_ranks: int, dim: int | None) -> None:
    found = placement_of(nn.Parameter(torch.empty(shape, device="meta")), num_ranks)
    assert found == (None if dim is None else Shard(dim))


LARGE_UNITS = {"wrap": "size", "min_parameters": 300_000_000}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "adapter", "fsdp"),
    [
        (8, 16, "lora", {}),
        (8, 16, None, LARGE_UNITS),
        (6, 8, None, LARGE_UNITS),
        (8, 16, None, {"prefetch_units": 2}),
        (6, 8, "qlora", {}),
    ],
)
def test_their_copies_while_they_are_gathered_are_planned(
    num_experts: int, num_ranks: int, adapter: str | None, fsdp: dict[str, Any]
) -> None:
    """FSDP puts a weight that is cut along another dimension together by way of a copy: a quarter of LoRA's step."""
    model = FEW | {"model_type": "mixtral", "num_local_experts": num_experts, "num_experts_per_tok": 2}
    training = {"micro_batch_size": 1, "global_batch_size": 4 * num_ranks, "activation_checkpointing": "full"}
    layout: dict[str, Any] = {"data_shard": num_ranks, "fsdp": fsdp}
    found = agreement(model | {"intermediate_size": 3584}, layout, adapter=adapter, **training)
    planned, traced = (side["activations"] + side["buffers"] for side in (found.planned, found.traced))
    assert planned == pytest.approx(traced, rel=0.05)


@pytest.mark.parametrize("num_ranks", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_a_rank_has_its_share_of_the_state_and_a_layer_is_gathered_once(num_ranks: int) -> None:
    """Of 8 experts: planned as it is now, and seven times as much on 64 ranks."""
    model = FEW | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 3584}
    found = agreement(model, {"data_shard": num_ranks}, micro_batch_size=1, global_batch_size=num_ranks)
    for part in ("parameters", "gradients", "optimizer", "buffers"):
        assert found.planned[part] == pytest.approx(found.traced[part], rel=0.03, abs=LEAST_BYTES), part
