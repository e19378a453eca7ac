"""fp8 is planned as what it is: bf16's memory, faster products, no cut matrices, and only GPUs that have it."""

from collections.abc import Callable
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.hardware import gpu
from trainyard.planner import plan, resolve
from trainyard.planner.layout import Layout
from trainyard.planner.memory import state_bytes
from trainyard.spec.job import JobSpec

MakeJob = Callable[..., JobSpec]


def test_it_takes_bf16s_memory_and_less_time(job: MakeJob) -> None:
    assert state_bytes(Layout(precision="fp8")) == state_bytes(Layout(precision="bf16"))
    narrow, wide = (plan(job(training={"precision": precision})).chosen for precision in ("fp8", "bf16"))
    assert narrow.memory == wide.memory
    assert narrow.time is not None and wide.time is not None
    assert gpu("H100").peak_tflops("fp8") > 1.9 * gpu("H100").peak_tflops("bf16")
    assert 0.5 < narrow.time.step_seconds / wide.time.step_seconds < 0.95


def test_beside_an_adapter_too(job: MakeJob) -> None:
    asked = {"source": "llama-3.1-8b", "adapter": {"kind": "lora", "rank": 16}}
    narrow, wide = (plan(job(model=asked, training={"precision": precision})).chosen for precision in ("fp8", "bf16"))
    assert narrow.memory == wide.memory
    assert narrow.time is not None and wide.time is not None
    assert 0.5 < narrow.time.step_seconds / wide.time.step_seconds < 0.95


def test_no_layout_that_the_trainer_refuses_is_offered(job: MakeJob) -> None:
    small: dict[str, Any] = {"instance_type": "ml.p5.48xlarge", "instance_count": 4}
    large = {"source": "llama-3.1-70b"}
    offered = plan(job(model=large, compute=small, training={"precision": "bf16"})).configurations
    assert any(item.parallelism.tensor > 1 for item in offered)
    offered = plan(job(model=large, compute=small, training={"precision": "fp8"})).configurations
    assert len(offered) > 1
    assert all(item.parallelism.tensor == 1 for item in offered)


def test_gpus_without_it_are_refused(job: MakeJob) -> None:
    old = {"instance_type": "ml.p4d.24xlarge", "instance_count": 16}
    with pytest.raises(InputError, match=r"fp8 needs Ada or Hopper GPUs .*, and ml\.p4d\.24xlarge has A100; use"):
        resolve(job(compute=old, training={"precision": "fp8"}))
