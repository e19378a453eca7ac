"""AWS instance types: GPUs, network, EFA interfaces, disks."""

import difflib
import functools
import re
from dataclasses import dataclass

from trainyard.errors import InputError
from trainyard.hardware.gpus import GIB, Gpu, gpu, with_memory
from trainyard.hardware.tables import rows, specifications


@dataclass(frozen=True)
class Instance:
    """One EC2 instance type; SageMaker's name for it has `ml.` in front."""

    type: str
    """Without `ml.`."""
    accelerator: str
    """As AWS names it: a GPU, or Trainium or Inferentia."""
    gpu: Gpu | None
    """None for accelerators that are not NVIDIA GPUs."""
    num_gpus: int
    """Accelerators, GPUs or not."""
    gpu_memory_gib: float
    """Of one accelerator, as AWS states it; `gpu.memory_gib` is what a process gets."""
    efa_interfaces: int
    """0: no EFA, so not for jobs over several hosts."""
    network_cards: int
    """Each is wired by itself (`network_cards.network_interfaces`)."""
    network_gb_per_second: float
    """GB/s, one direction, all cards together."""
    vcpus: int
    memory_gib: float
    """Host memory."""
    local_nvme_gib: float
    regions: tuple[str, ...]
    """Of us-east-1, us-east-2 and us-west-2, those that offer it."""
    source: str

    @property
    def sagemaker_type(self) -> str:
        """The name that SageMaker takes."""
        return f"ml.{self.type}"


def instance(instance_type: str) -> Instance:
    """The instance type, with or without `ml.`; InputError offers close names."""
    name = instance_type.removeprefix("ml.")
    table = _instances()
    if name not in table:
        close = difflib.get_close_matches(name, table, n=3, cutoff=0.5)
        prefix = "ml." if instance_type.startswith("ml.") else ""
        families = ", ".join(sorted({item.partition(".")[0] for item in table}))
        hint = (
            f"close to it: {', '.join(prefix + item for item in close)}" if close else f"known are types of {families}"
        )
        raise InputError(f"unknown instance type {instance_type!r}; {hint}")
    return table[name]


def instance_types() -> tuple[str, ...]:
    """All known types, without `ml.`, sorted."""
    return tuple(sorted(_instances()))


@functools.cache
def _instances() -> dict[str, Instance]:
    # trn2u's accelerators are missing from the source: a type without them would only mislead.
    return {row["instance"]: _read(row) for row in rows("aws_instances") if row["accel_count"]}


def _read(row: dict[str, str]) -> Instance:
    memory_gib = float(row["accel_mem_MiB_each"]) / 1024
    device: Gpu | None
    try:
        device = with_memory(gpu(row["accel_name"], memory_gb=round(memory_gib)), memory_gib)
    except InputError:
        device = None
    offered = {"us-east-1": "in_us_east_1", "us-east-2": "in_us_east_2", "us-west-2": "in_us_west_2"}
    return Instance(
        type=row["instance"],
        accelerator=row["accel_name"],
        gpu=device,
        num_gpus=int(row["accel_count"]),
        gpu_memory_gib=memory_gib,
        efa_interfaces=int(row["max_efa_interfaces"] or 0),
        network_cards=int(row["network_cards"] or 1),
        network_gb_per_second=_network_gb_per_second(row),
        vcpus=int(row["vcpus"]),
        memory_gib=float(row["host_mem_MiB"]) / 1024,
        local_nvme_gib=float(row["local_nvme_GB"] or 0) * 1e9 / GIB,
        regions=tuple(region for region, column in offered.items() if row[column] == "True"),
        source=row["source"],
    )


def _network_gb_per_second(row: dict[str, str]) -> float:
    """The EFA table where it speaks, else the type's own words: '4x 100 Gigabit', 'Up to 25 Gigabit' (the baseline)."""
    stated = specifications().get(row["instance"], {}).get("EFA_total_per_node")
    if stated:
        return stated[0]
    words = row["network_performance"]
    match = re.fullmatch(r"(?:(\d+)x )?([\d.]+) Gigabit", words)
    gigabits = int(match.group(1) or 1) * float(match.group(2)) if match else float(row["sum_card_baseline_Gbps"])
    return gigabits / 8
