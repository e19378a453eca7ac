"""What FSDP keeps in memory between the micro-batches of a step: the trap, and that the trainer is not in it."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer.strategies.fsdp import synchronization

pytestmark = pytest.mark.slow

ROWS = 61
"""Of a matrix beside which nothing of its size is in memory."""


@pytest.fixture(params=[(2,), (2, 2)], ids=["shards", "shards and copies"])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """Rank 0 of a few whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2 ** len(request.param), store=FakeStore())
    try:
        yield init_device_mesh("cpu", request.param, mesh_dim_names=("copies", "shards")[-len(request.param) :])
    finally:
        dist.destroy_process_group()


def num_whole_gradients(mesh: DeviceMesh, around: Callable[[nn.Module], AbstractContextManager[Any]]) -> int:
    """How many outlive the backward pass of a micro-batch that is not the step's last."""
    root = fully_shard(nn.Linear(ROWS, 2 * ROWS, bias=False), mesh=mesh)
    # Not by isinstance, which asks what a dead weak proxy stands for.
    before = {id(found) for found in gc.get_objects() if issubclass(type(found), torch.Tensor)}
    with around(root):
        root(torch.ones(2, ROWS)).sum().backward()
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) is torch.Tensor and id(found) not in before]
    whole = 2 * ROWS * (ROWS + ROWS % 2)
    return sum(found.numel() in (2 * ROWS * ROWS, whole) and found.untyped_storage().size() > 0 for found in tensors)


def told_of_more(root: nn.Module) -> AbstractContextManager[None]:
    """As torch's documentation has it for accumulated micro-batches."""
    assert isinstance(root, FSDPModule)
    root.set_is_last_backward(False)
    return nullcontext()


def test_fsdp_keeps_what_it_sent_last_where_it_is_told_of_another_backward_pass(mesh: DeviceMesh) -> None:
    """A trap of the library's: when this fails, the reason given in `synchronization` of strategies/fsdp.py is gone."""
    assert num_whole_gradients(mesh, told_of_more) > 0


def test_between_micro_batches_no_rank_holds_a_whole_gradient(mesh: DeviceMesh) -> None:
    assert num_whole_gradients(mesh, lambda root: synchronization(root, is_last=False)) == 0
