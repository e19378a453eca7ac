"""What a collective must reach on an instance type, so that a fallback (TCP for EFA, PCIe for NVLink) is noticed."""

from trainyard.hardware.instances import instance
from trainyard.hardware.tables import specifications

HOST_SHARE = 0.6
"""Of the bus bandwidth below which AWS's own health check calls a node broken (large all-reduce inside of it): our
messages may be smaller. PCIe instead of NVLink gives less than a tenth."""
ACROSS_SHARE = 0.4
"""Of the EFA line rate that falls to one GPU. TCP uses one network card: a quarter of a p4d's four, an eighth of a p5's
eight sets of four, at best. On a type with a single card TCP may pass. What was reported of EFA with large all-reduces
lies above: 0.59 of the rate by four p4d and 0.64 by three (NVIDIA/nccl issue 527, 2022, a complaint about slowness),
0.48 to 0.64 by 8 to 32 p3dn (issue 235, 2019). Those were rings over all GPUs of the hosts; ours, one of each, nobody
has published."""


def bandwidth_floors(instance_type: str) -> dict[str, tuple[float, str]]:
    """{"host" or "across": (GB/s of bus bandwidth of a large all-reduce, where that comes from)}, where known.

    host: all GPUs of one host; across: one GPU of each host, all local ranks at the same time.
    """
    machine = instance(instance_type)
    floors = {}
    stated = specifications().get(machine.type, {}).get("healthcheck_min_intra_node_busbw")
    if stated is not None:
        value, source = stated
        floors["host"] = (HOST_SHARE * value, f"{HOST_SHARE} x {value:g} GB/s, {source}")
    if machine.efa_interfaces:
        per_gpu = machine.network_gb_per_second / machine.num_gpus
        source = f"{ACROSS_SHARE} x {per_gpu:g} GB/s of EFA for each GPU, {machine.source}"
        floors["across"] = (ACROSS_SHARE * per_gpu, source)
    return floors
