"""Collectives by a segmented alpha-beta model: a latency, the filling of the pipeline, and bytes over a bandwidth.

Volumes as in Thakur et al. (2005): all-reduce moves 2 (n-1)/n of the buffer through every link, all-gather and
reduce-scatter half of that. Groups over several nodes work in both levels at once, as NCCL does: the slower level
sets the time. The constants are those of nccl-tests on p5.48xlarge, 8 and 16 GPUs (awslabs/awsome-distributed-ai).
"""

import math
from dataclasses import dataclass, replace

from trainyard.hardware import Gpu, Instance

LINK_EFFICIENCY = 0.80
"""Bus bandwidth of large messages within a node over the link's peak: 235 of 300 GB/s on A100."""

SWITCH_REDUCTION_GAIN = 1.21
"""All-reduce on Hopper and later, where the NVSwitch adds (NCCL's NVLS): 444 GB/s of 450, 840 of a B200's 900."""

SWITCH_REDUCTION_LINK_GB_PER_SECOND = 450
"""GPUs with at least this link have switches that add."""

LINK_LATENCY_SECONDS = 13e-6
"""All-reduce of 8 bytes within a node."""

LINK_LATENCY_PER_DOUBLING = 0.35e-6
"""What each doubling of a small message adds to that."""

LINK_FILL_SECONDS, LINK_FILL_BYTES = 45e-6, 4e6
"""What a large all-reduce within a node loses until all its links are busy; messages of that size lose half of it."""

PEER_SECONDS = 5e-6
"""What every peer in another node adds to an all-to-all."""

SEND_LATENCY_SECONDS = 20e-6

PCIE_BYTES_PER_SECOND = 24e9
"""One way between a host's memory and a GPU: what 16 lanes of PCIe 4 give in practice."""

HOST_MEMORY_GB_PER_SECOND = 110.0
"""Of its memory, what a large host's processors together get in an update of AdamW: eight ranks of a node took 2.1 s
for a billion parameters each (github.com/stas00/ml-engineering, DeepSpeed on H200), of 28 bytes read and written."""

CORE_MEMORY_GB_PER_SECOND = 15.0
"""Of that, what one core gets: 1.8 s for a billion parameters by torch's fused AdamW on one of a Xeon with AVX-512."""


@dataclass(frozen=True)
class Network:
    """What a kind of network costs beside the rate of its cards."""

    efficiency: float
    """Bus bandwidth of large messages over the network's peak."""
    latency_seconds: float
    """What two nodes add to a node's own latency; it grows with the logarithm of the nodes, as in NCCL's trees."""
    step_seconds: float
    """What a message loses when it is no longer sent with its flag (NCCL's LL and LL128 protocols)."""
    fill_seconds: float
    """What a large one loses until every card is busy; of `fill_bytes` it loses half of that."""
    fill_bytes: float


EFA = Network(efficiency=0.85, latency_seconds=54e-6, step_seconds=50e-6, fill_seconds=360e-6, fill_bytes=24e6)
"""AWS's: 42 to 45 of 50 GB/s a GPU in an all-to-all."""

INFINIBAND = Network(efficiency=0.95, latency_seconds=12e-6, step_seconds=0.0, fill_seconds=40e-6, fill_bytes=4e6)
"""And RoCE: 24 of 25 GB/s a card is what NCCL's maintainers call usual. 24 A100 in 3 nodes of four such cards had 96 of
100 GB/s at 128 MB, and 85 as the mean of all sizes from 1 MB to that (github.com/NVIDIA/nccl-tests/issues/119)."""

STEP_BYTES = 32e3
"""Where NCCL changes its protocol."""


@dataclass(frozen=True)
class Fabric:
    """What connects the GPUs. GB/s are decimal, one direction."""

    gpus_per_node: int
    link_gb_per_second: float
    """Of one GPU, to the others of its node."""
    node_gb_per_second: float
    """Of one node, to the others."""
    network: Network
    host_memory_gb_per_second: float = HOST_MEMORY_GB_PER_SECOND
    """Of memory, what a node's processors read and write as they update what is offloaded to it."""


@dataclass(frozen=True)
class Group:
    """Ranks of one collective: `size` of them, `per_node` in each node they touch."""

    size: int
    per_node: int

    @property
    def num_nodes(self) -> int:
        """Nodes that the group spans."""
        return math.ceil(self.size / self.per_node)


def fabric_of(machine: Instance) -> Fabric:
    """The fabric of a cluster of one AWS instance type."""
    assert machine.gpu is not None
    links = fabric(machine.gpu, machine.num_gpus, machine.network_gb_per_second, EFA)
    # Two vCPUs are a core's two threads, which get no more of memory than one.
    of_cores = machine.vcpus / 2 * CORE_MEMORY_GB_PER_SECOND
    return replace(links, host_memory_gb_per_second=min(HOST_MEMORY_GB_PER_SECOND, of_cores))


def fabric(device: Gpu, gpus_per_node: int, node_gb_per_second: float, network: Network) -> Fabric:
    """The fabric of nodes of `gpus_per_node` GPUs."""
    return Fabric(gpus_per_node, device.link_gb_per_second, node_gb_per_second, network)


def group(size: int, stride: int, gpus_per_node: int) -> Group:
    """A group of ranks `stride` apart: those of the fast axes (tensor first) sit closest together."""
    return Group(size, max(1, min(size, gpus_per_node // stride)))


def _latency_seconds(total_bytes: float, members: Group, network: Network) -> float:
    """What an all-reduce costs beyond its bytes over bandwidth: hops, and the filling of the pipeline by segments."""
    if members.num_nodes == 1:
        small = LINK_LATENCY_SECONDS + LINK_LATENCY_PER_DOUBLING * math.log2(1 + total_bytes / 16)
        return small + LINK_FILL_SECONDS * total_bytes / (total_bytes + LINK_FILL_BYTES)
    latency = LINK_LATENCY_SECONDS + network.latency_seconds * math.log2(members.num_nodes)
    step = network.step_seconds * total_bytes / (total_bytes + STEP_BYTES)
    return latency + step + network.fill_seconds * total_bytes / (total_bytes + network.fill_bytes)


def _volume_seconds(total_bytes: float, members: Group, links: Fabric, gain: float, *, ring: bool) -> float:
    """Bytes over bandwidth of an all-gather or reduce-scatter: the slower of the two levels.

    A ring carries all but one rank's part over the network, a tree what nodes that have added up still lack.
    """
    within_bandwidth = links.link_gb_per_second * LINK_EFFICIENCY * gain * 1e9
    within = total_bytes * (members.per_node - 1) / members.per_node / within_bandwidth
    ends = members.size if ring and members.num_nodes > 1 else members.num_nodes
    across = total_bytes / members.per_node * (ends - 1) / ends / _network_bandwidth(links)
    return max(within, across)


def _network_bandwidth(links: Fabric) -> float:
    """Bytes/s between nodes for one GPU: the groups that share a node share its network cards."""
    return links.node_gb_per_second * links.network.efficiency / links.gpus_per_node * 1e9


def all_gather_seconds(total_bytes: float, members: Group, links: Fabric) -> float:
    """All-gather of a result of `total_bytes` (or reduce-scatter of such an input)."""
    if members.size <= 1 or total_bytes <= 0:
        return 0.0
    latency = _latency_seconds(total_bytes, members, links.network) / 2
    return latency + _volume_seconds(total_bytes, members, links, 1.0, ring=True)


def all_reduce_seconds(total_bytes: float, members: Group, links: Fabric) -> float:
    """All-reduce of a buffer of `total_bytes`."""
    if members.size <= 1 or total_bytes <= 0:
        return 0.0
    adds = links.link_gb_per_second >= SWITCH_REDUCTION_LINK_GB_PER_SECOND
    gain = SWITCH_REDUCTION_GAIN if adds else 1.0
    return _latency_seconds(total_bytes, members, links.network) + 2 * _volume_seconds(
        total_bytes, members, links, gain, ring=not adds
    )


def all_to_all_seconds(total_bytes: float, members: Group, links: Fabric) -> float:
    """All-to-all where every rank holds `total_bytes`: only what leaves the node crosses the network."""
    if members.size <= 1:
        return 0.0
    inside = total_bytes * (members.per_node - 1) / members.size
    outside = total_bytes * (members.size - members.per_node) / members.size
    within = links.link_gb_per_second * LINK_EFFICIENCY * 1e9
    peers = PEER_SECONDS * (members.size - members.per_node)
    latency = _latency_seconds(total_bytes, members, links.network) / 2 + peers
    return latency + max(inside / within, outside / _network_bandwidth(links))


def forwarded_all_to_all_seconds(to_ranks: float, to_nodes: float, members: Group, links: Fabric) -> float:
    """All-to-all of DeepEP: a token crosses the network once for each node and goes on from there by the node's links.

    Bytes of a rank's tokens, as often as there are ranks and nodes that each goes to. What comes home is added up
    in the node first (github.com/deepseek-ai/DeepEP), so that the way back is as long.
    """
    if members.size <= 1:
        return 0.0
    inside = to_ranks * (members.per_node - 1) / members.per_node
    outside = to_nodes * (members.num_nodes - 1) / members.num_nodes
    within = links.link_gb_per_second * LINK_EFFICIENCY * 1e9
    peers = PEER_SECONDS * (members.size - members.per_node)
    latency = _latency_seconds(to_ranks, members, links.network) / 2 + peers
    return latency + max(inside / within, outside / _network_bandwidth(links))


def send_seconds(total_bytes: float, *, between_nodes: bool, links: Fabric) -> float:
    """One rank to one other (pipeline stages); every GPU of the node sends at once."""
    within = links.link_gb_per_second * LINK_EFFICIENCY * 1e9
    return SEND_LATENCY_SECONDS + total_bytes / (_network_bandwidth(links) if between_nodes else within)
