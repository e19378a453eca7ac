"""Collectives: what nccl-tests measured on instances of AWS, and what must hold for any message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.hardware import gpu, instance
from trainyard.planner.communication import (
    EFA,
    INFINIBAND,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    fabric,
    fabric_of,
    forwarded_all_to_all_seconds,
    group,
)


@pytest.mark.parametrize(
    ("instance_type", "gpus", "size", "measured_seconds"),
    [
        ("p5.48xlarge", 8, 1024, 16.4e-6),
        ("p5.48xlarge", 8, 2**26, 326.6e-6),
        ("p5.48xlarge", 8, 2**34, 62.2e-3),
        ("p5.48xlarge", 16, 8, 69.1e-6),
        ("p5.48xlarge", 16, 2**30, 4.608e-3),
        ("p5.48xlarge", 16, 2**34, 66.1e-3),
        # The rows of a B200 name bus bandwidths: 646 GB/s at 256 MiB, 846 at 16 GiB.
        ("p6-b200.48xlarge", 8, 2**28, 2 * 7 / 8 * 2**28 / 646.1e9),
        ("p6-b200.48xlarge", 8, 2**34, 2 * 7 / 8 * 2**34 / 845.7e9),
    ],
)
def test_all_reduce_is_near_what_was_measured(
    instance_type: str, gpus: int, size: int, measured_seconds: float
) -> None:
    predicted = all_reduce_seconds(size, group(gpus, 1, 8), fabric_of(instance(instance_type)))
    assert predicted == pytest.approx(measured_seconds, rel=0.2)


def test_all_to_all_over_the_network_is_near_what_was_measured() -> None:
    # 32 GPUs of four p5.48xlarge: 45.1 GB/s of bus bandwidth at 64 MiB.
    measured = 31 / 32 * 2**26 / 45.1e9
    predicted = all_to_all_seconds(2**26, group(32, 1, 8), fabric_of(instance("p5.48xlarge")))
    assert predicted == pytest.approx(measured, rel=0.25)


def test_textbook_figures_of_14_gb() -> None:
    # One GPU a node at 400 Gb/s: 2 x 14 GB / 50 GB/s = 560 ms, less (n-1)/n, over what a network reaches of its rate.
    for network, share in ((EFA, 0.85), (INFINIBAND, 0.95)):
        links = fabric(gpu("H100"), 8, 400, network)
        assert all_reduce_seconds(14e9, group(8, 8, 8), links) == pytest.approx(0.560 * 7 / 8 / share, rel=0.01)
    assert fabric_of(instance("p5.48xlarge")).network == EFA


def test_all_reduce_over_infiniband_is_near_what_was_measured() -> None:
    """24 A100 in 3 nodes of 4 HDR cards (github.com/NVIDIA/nccl-tests/issues/119): large ones, and the mean of all."""
    members, links = group(24, 1, 8), fabric(gpu("A100"), 8, 100, INFINIBAND)
    assert all_reduce_seconds(133169160, members, links) == pytest.approx(2666e-6, rel=0.1)
    sizes = [2**20 * count for count in range(1, 128)]
    bus = [2 * 23 / 24 * size / all_reduce_seconds(size, members, links) / 1e9 for size in sizes]
    assert sum(bus) / len(bus) == pytest.approx(84.86, rel=0.05)


def test_a_ring_of_two_nodes_sends_nearly_all_of_a_buffer_and_a_tree_half_of_it() -> None:
    """Of 16 GPUs in two nodes a ring leaves 15/16 to the network; switches that add send on what a node has summed."""
    members, size = group(16, 1, 8), 2**34
    ring, tree = fabric(gpu("A100"), 8, 100, INFINIBAND), fabric(gpu("H100"), 8, 100, INFINIBAND)
    bandwidth = 0.95 * 100e9
    assert all_gather_seconds(size, members, ring) == pytest.approx(15 / 16 * size / bandwidth, rel=0.01)
    assert all_reduce_seconds(size, members, ring) == pytest.approx(2 * 15 / 16 * size / bandwidth, rel=0.01)
    assert all_gather_seconds(size, members, tree) == pytest.approx(15 / 16 * size / bandwidth, rel=0.01)
    assert all_reduce_seconds(size, members, tree) == pytest.approx(2 * 1 / 2 * size / bandwidth, rel=0.01)


@given(st.integers(0, 34), st.sampled_from([2, 8, 16, 64, 1024]), st.floats(0.1, 1.0))
def test_slower_links_and_larger_messages_take_longer(power: int, ranks: int, node: float) -> None:
    members, device = group(ranks, 1, 8), gpu("A100")
    fast = fabric(device, 8, 200, INFINIBAND)
    slow = fabric(device, 8, 200 * node, INFINIBAND)
    assert all_reduce_seconds(2**power, members, slow) >= all_reduce_seconds(2**power, members, fast)
    assert all_reduce_seconds(2 ** (power + 1), members, fast) > all_reduce_seconds(2**power, members, fast)
    assert all_to_all_seconds(2**power, members, slow) >= all_to_all_seconds(2**power, members, fast)


def test_a_forwarded_exchange_crosses_the_network_once_for_a_node_and_goes_on_by_its_links() -> None:
    links = fabric(gpu("H100"), 8, 400, INFINIBAND)
    two_nodes, size = group(16, 1, 8), 2**34
    # Of 16 GiB for either node, half leaves it, at an eighth of a node's 400 GB/s for a GPU.
    across = forwarded_all_to_all_seconds(size, size, two_nodes, links)
    assert across == pytest.approx(size / 2 / (400e9 * 0.95 / 8), rel=0.01)
    # Copies for many ranks of few nodes take their node's links: 7 of 8, at 80% of 450 GB/s.
    within = forwarded_all_to_all_seconds(64 * size, size, two_nodes, links)
    assert within == pytest.approx(64 * size * 7 / 8 / (0.8 * 450e9), rel=0.01)
    # Each copy to a rank of its own, it is NCCL's exchange in one node; over two it spares the network.
    one_node = group(8, 1, 8)
    assert forwarded_all_to_all_seconds(size, size, one_node, links) == all_to_all_seconds(size, one_node, links)
    assert forwarded_all_to_all_seconds(size, size / 4, two_nodes, links) < all_to_all_seconds(size, two_nodes, links)
    assert forwarded_all_to_all_seconds(size, size, group(1, 1, 8), links) == 0
