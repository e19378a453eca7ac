"""Offloaded updates: as many threads as a rank has cores, while a step lasts."""

import os

import pytest
import torch
from trainer.strategies import host_update


class _Watched(torch.optim.SGD):
    """Notes the threads that its step has."""

    threads = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.threads = torch.get_num_threads()
        super().step()


def _optimizer() -> _Watched:
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    return _Watched([weight], lr=0.5)


@pytest.mark.parametrize(("cores", "ranks", "at_least", "expected"), [(8, 2, 1, 4), (8, 16, 1, 1), (8, 8, 3, 3)])
def test_a_step_has_the_ranks_share_of_the_cores_and_nothing_else_has(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, at_least: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    before = torch.get_num_threads()
    optimizer = _optimizer()
    host_update.use_own_cores(optimizer, at_least=at_least)
    for _ in range(2):
        optimizer.step()
        assert optimizer.threads == expected
        assert torch.get_num_threads() == before
    assert torch.equal(optimizer.param_groups[0]["params"][0].detach(), torch.zeros(4))
