"""What is asked of a job's network before its first step: where floors come from, and what is refused."""

from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.planner import resolve
from trainyard.planner.preflight import known_floors
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec


def job_of(preflight: dict[str, Any], *, hosts: int = 2, **sections: Any) -> JobSpec:
    """A job on hosts of eight GPUs."""
    content: dict[str, Any] = {
        "name": "test",
        "model": {"config": {"model_type": "llama"}},
        "data": {"train": [{"path": "tenant://x", "format": "tokens"}]},
        "training": {"steps": 10, "global_batch_size": 96, "learning_rate": 1e-4, "micro_batch_size": 1},
        "parallelism": {"data_shard": 8 * hosts},
        "compute": {"backend": "sagemaker", "instance_type": "ml.p5.48xlarge", "instance_count": hosts},
        "preflight": preflight,
    }
    return parse(JobSpec, content | sections, "job")


def on_g5(**changes: Any) -> dict[str, Any]:
    """A machine without a floor: one GPU, no EFA."""
    compute = {"backend": "sagemaker", "instance_type": "ml.g5.2xlarge", "instance_count": 1}
    return {"compute": compute, "parallelism": {}} | changes


def with_one_gpu_a_host() -> dict[str, Any]:
    """Two hosts with EFA between them."""
    compute = {"backend": "sagemaker", "instance_type": "ml.g5.16xlarge", "instance_count": 2}
    return {"compute": compute, "parallelism": {"data_shard": 2}}


def test_floors_are_the_instance_types() -> None:
    floors = known_floors(job_of({}))
    assert set(floors) == {"across", "host"}
    assert all(floor > 0 for floor, _ in floors.values())
    assert known_floors(job_of({}, **on_g5())) == {}
    assert known_floors(job_of({}, compute={})) == {}


@pytest.mark.parametrize(
    ("preflight", "message"),
    [
        ({"collectives": "off", "host_gb_per_second": 5}, "host_gb_per_second: nothing is measured with collectives"),
        ({"across_gb_per_second": 0}, "preflight.across_gb_per_second"),
        ({"across_gb_per_second": float("inf")}, "preflight.across_gb_per_second"),
        ({"host_gb_per_second": 20_000}, "preflight.host_gb_per_second"),
        ({"collectives": "halt"}, "preflight.collectives"),
        ({"collective": "stop"}, "did you mean"),
    ],
)
def test_nonsense_is_refused_where_the_job_is_read(preflight: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        job_of(preflight)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("preflight", "hosts", "sections", "message"),
    [
        ({"across_gb_per_second": 5}, 1, {}, "is for several hosts, and this job has one"),
        ({"collectives": "stop"}, 1, on_g5(), "one rank, which talks to nobody"),
        ({"host_gb_per_second": 5}, 2, with_one_gpu_a_host(), "several GPUs of one host, and a host of ml.g5.16xlarge"),
        (
            {"collectives": "stop", "host_gb_per_second": 5},
            2,
            {"compute": {"backend": "slurm", "instance_count": 2}, "parallelism": {"data_shard": 2}},
            "host_gb_per_second: is for several GPUs of one host, and each host of this job has one",
        ),
        ({"collectives": "warn"}, 1, {"compute": {}, "parallelism": {"data_shard": 2}}, "no floor is known"),
    ],
)
def test_what_would_compare_nothing_is_refused_before_launch(
    preflight: dict[str, Any], hosts: int, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        resolve(job_of(preflight, hosts=hosts, **sections))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("preflight", "hosts", "sections"),
    [
        ({}, 1, on_g5()),
        ({"collectives": "off"}, 1, {}),
        ({"collectives": "stop"}, 2, {}),
        ({"collectives": "stop"}, 1, {}),
        ({"host_gb_per_second": 5}, 1, {}),
        ({"across_gb_per_second": 5}, 2, with_one_gpu_a_host()),
        (
            {"across_gb_per_second": 5},
            1,
            {"recovery": {"elastic": {"min_instances": 1, "max_instances": 2}}},
        ),
        ({"collectives": "warn", "across_gb_per_second": 1}, 1, {"compute": {}, "parallelism": {"data_shard": 2}}),
    ],
)
def test_what_can_be_measured_is_resolved(preflight: dict[str, Any], hosts: int, sections: dict[str, Any]) -> None:
    assert resolve(job_of(preflight, hosts=hosts, **sections)).spec.preflight.collectives == preflight.get(
        "collectives", "auto"
    )


def test_a_rehearsal_with_a_process_a_host_keeps_the_floor_inside_a_host() -> None:
    """A host of its machines has eight GPUs; the trainer says that the floor is compared with nothing here."""
    rehearsed = job_of({"host_gb_per_second": 5}, parallelism="auto")
    assert resolve(rehearsed, world_size=2).processes_per_host == 1


@pytest.mark.parametrize("preflight", [{"collectives": "stop"}, {"host_gb_per_second": 5}])
def test_a_rehearsal_with_one_process_is_not_taken_for_a_job_of_one_rank(preflight: dict[str, Any]) -> None:
    """Its one host has eight GPUs: refused, it could be tried with two processes and not with one."""
    rehearsed = job_of(preflight, hosts=1, parallelism={})
    assert resolve(rehearsed, world_size=1).processes_per_host == 1
