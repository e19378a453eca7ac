"""Facts of machines, and refusals where there is none."""

import datetime

import pytest

from trainyard.errors import InputError
from trainyard.hardware import PriceBook, failures_per_node_day, gpu, instance, instance_types, price
from trainyard.hardware.gpus import GENERATIONS, _known


@pytest.mark.parametrize(
    ("name", "gpus", "device", "efa", "network"),
    [
        ("ml.p5.48xlarge", 8, "H100", 32, 400),
        ("ml.p5.4xlarge", 1, "H100", 1, 12.5),
        ("p5en.48xlarge", 8, "H200", 16, 400),
        ("p4d.24xlarge", 8, "A100", 4, 50),
        ("p6-b200.48xlarge", 8, "B200", 8, 400),
        ("p6-b300.48xlarge", 8, "B300", 16, 800),
        ("g5.xlarge", 1, "A10G", 0, 0.3125),
        ("g5.48xlarge", 8, "A10G", 1, 12.5),
        ("g6e.48xlarge", 8, "L40S", 4, 50),
    ],
)
def test_instances(name: str, gpus: int, device: str, efa: int, network: float) -> None:
    found = instance(name)
    assert found.gpu is not None
    assert (found.num_gpus, found.gpu.name, found.efa_interfaces) == (gpus, device, efa)
    assert found.network_gb_per_second == pytest.approx(network)


def test_every_type_is_read_and_named_by_a_source() -> None:
    for name in instance_types():
        found = instance(name)
        assert found.source and found.vcpus > 0 and found.memory_gib > 0
        assert found.sagemaker_type == f"ml.{name}"


def test_trainium_is_known_but_is_no_gpu() -> None:
    assert instance("ml.trn1.32xlarge").gpu is None


def test_an_unknown_type_is_refused_with_close_names() -> None:
    with pytest.raises(InputError, match=r"unknown instance type 'ml.p5.44xlarge'; close to it: .*ml\.p5\.4"):
        instance("ml.p5.44xlarge")


@pytest.mark.parametrize(
    ("name", "key", "gib"),
    [
        ("H100", "H100", 79.1),
        ("NVIDIA H100 80GB HBM3", "H100", 79.1),
        ("A100-SXM4-40GB", "A100", 39.55),
        ("A100 (paper: Ampere)", "A100", 79.1),
        ("H200", "H200", 139.4),
        ("NVIDIA GeForce RTX 4080", "RTX 4080", 15.8),
        # What nvidia-smi shows, not 186 and 279 decimal GB.
        ("GB200", "GB200", 183.0),
        ("NVIDIA GB300", "GB300", 274.4),
        ("MI300X 192GB", "MI300X", 189.8),
        ("MI325X", "MI325X", 253.1),
        # Grace's memory, which is no GPU's.
        ("NVIDIA GH200 480GB", "GH200", 94.9),
        ("NVIDIA GH200 120GB", "GH200", 94.9),
        ("NVIDIA GH200 144G HBM3e", "GH200", 142.4),
        ("p5 H100 640GB", "H100", 79.1),
        # A G alone, none, and MiB.
        ("A100-40G", "A100", 39.55),
        ("A100 40G", "A100", 39.55),
        ("A100-40", "A100", 39.55),
        ("V100-16G", "V100", 15.8),
        ("H100 80G PCIe", "H100 PCIE", 79.1),
        ("NVIDIA A100-PCIE, 40960MiB", "A100 PCIE", 39.55),
        # Neither a size: a name, so many GPUs, a part of one.
        ("NVIDIA A10G", "A10G", 22.1),
        ("V100 x 16", "V100", 31.6),
        ("A100 MIG 3g.20gb", "A100", 19.8),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "A100", 19.8),
        ("A100-SXM4-80GB MIG 1g.10gb", "A100", 9.9),
        ("NVIDIA A100 80GB PCIe MIG 1g.20gb+me", "A100 PCIE", 19.8),
        # Decimal GB of the same part; a part that was made with more; a refitted one.
        ("B200 192GB", "B200", 177.1),
        ("H100 96GB HBM2e", "H100", 94.9),
        ("RTX 4090 48GB", "RTX 4090", 47.5),
        ("RTX 3080 20GB", "RTX 3080", 19.8),
        ("NVIDIA A100-PCIE-40", "A100 PCIE", 39.55),
    ],
)
def test_gpus_by_their_many_names(name: str, key: str, gib: float) -> None:
    found = gpu(name)
    assert found.name == key
    assert found.memory_gib == pytest.approx(gib, rel=0.003)


def test_peaks_by_precision() -> None:
    assert gpu("H100").peak_tflops("bf16") == 989
    assert gpu("H100").peak_tflops("fp8") == 1979
    assert gpu("A100").peak_tflops("fp8") == 312, "no FP8 units: bf16 runs instead"
    assert gpu("A100").peak_tflops("fp32") == 19.5


def test_every_part_says_its_generation_and_lies_within_its_kinds_bounds() -> None:
    """Of each its peak in 16 bits, by how many times plain fp32's it is, and what was measured of it."""
    for name in _known():
        part = gpu(name)
        assert name in GENERATIONS, f"{name}: taken for an ampere"
        assert 1.9 < part.bf16_tflops / part.fp32_tflops < 35, name
        assert 0.5 < part.sustained < 1.5, name
        assert part.memory_tb_per_second > 0.2 and 5 < part.memory_gib < 300, name


def test_a_card_on_pcie_has_its_own_power_memory_and_links() -> None:
    module, card = gpu("A100"), gpu("NVIDIA A100 80GB PCIe")
    assert card.sustained < 1 == module.sustained and not card.nvlink
    assert card.memory_tb_per_second == 1.935 and gpu("A100-PCIE-40GB").memory_tb_per_second == 1.555


@pytest.mark.parametrize("name", ["RTX 3070 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4060 SUPER"])
def test_a_card_of_another_word_is_another(name: str) -> None:
    with pytest.raises(InputError, match="unknown GPU"):
        gpu(name)


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"unknown GPU 'H1000'.*known: .*H200"):
        gpu("H1000")


def test_the_quickstarts_machine_has_a_real_price() -> None:
    found = price("ml.p5.4xlarge")
    assert found.usd_per_hour == 6.88
    assert "EC2 on demand" in found.basis and "SageMaker" in found.basis
    assert found.as_of == datetime.date(2025, 11, 1)
    assert found.source.startswith("SkyPilot")


def test_spot_is_the_median_of_the_regions_zones() -> None:
    found = price("ml.p4de.24xlarge", "us-west-2", spot=True)
    assert found.usd_per_hour == 10.9991
    assert "not a forecast" in found.basis


@pytest.mark.parametrize(
    ("name", "region", "spot", "words"),
    [
        ("ml.p5.4xlarge", "us-east-1", True, "no spot price known for ml.p5.4xlarge in us-east-1; known for it"),
        ("ml.p5.48xlarge", "eu-west-1", False, "known in us-east-1, us-west-2"),
        ("ml.g5.xlarge", "us-east-1", False, "or anywhere else"),
        ("p5e.48xlarge", "us-west-2", False, "capacity block"),
    ],
)
def test_no_price_is_guessed(name: str, region: str, spot: bool, words: str) -> None:
    with pytest.raises(InputError, match=words):
        price(name, region, spot=spot)


def test_failure_rate_is_llama_3s() -> None:
    rate, source = failures_per_node_day()
    assert rate == pytest.approx(419 / (2048 * 54), rel=0.01)
    assert "Llama 3" in source


def book_of(*found: tuple[str, str, str, str], today: datetime.date | None = datetime.date(2026, 11, 23)) -> PriceBook:
    """p5.48xlarge: (region, purchase, price, as of)."""
    keys = ("region", "purchase", "price", "as_of")
    of = {"instance": "p5.48xlarge", "zone": "", "source": "a test"}
    return PriceBook([{**of, **dict(zip(keys, row, strict=True))} for row in found], today=today)


def test_a_rate_of_sagemakers_alone_is_a_price_of_its_own_machines_and_of_no_other() -> None:
    book = book_of(("eu-west-1", "sagemaker on-demand", "60", "2026-11-01"))
    assert book.price("ml.p5.48xlarge", "eu-west-1").usd_per_hour == 60
    with pytest.raises(InputError, match=r"in eu-west-1; known for it: sagemaker on-demand$"):
        book.price("p5.48xlarge", "eu-west-1")
    with pytest.raises(InputError, match=r"in us-east-1; known in eu-west-1$"):
        book.price("ml.p5.48xlarge", "us-east-1")


def test_a_price_of_a_day_that_is_still_to_come_is_quoted_where_there_is_no_other_and_says_so() -> None:
    """Of tomorrow it may be, somewhere; of next month a clock is wrong, here or where it was written."""
    tomorrow = ("us-east-1", "on-demand", "50", "2026-11-24")
    later, known = ("us-east-1", "on-demand", "40", "2026-12-24"), ("us-east-1", "on-demand", "60", "2026-11-01")
    assert book_of(tomorrow, known).price("p5.48xlarge").usd_per_hour == 50
    assert book_of(tomorrow).price("p5.48xlarge").basis == "EC2 on demand"
    assert book_of(later, known).price("p5.48xlarge").usd_per_hour == 60
    assert book_of(later, today=None).price("p5.48xlarge").basis == "EC2 on demand"
    alone = book_of(later).price("p5.48xlarge")
    assert alone.usd_per_hour == 40
    assert alone.basis == "EC2 on demand; dated later than this machine's clock, 2026-11-23"


def test_a_rate_that_is_too_old_stands_in_no_other_ones_way() -> None:
    own, other = (
        ("us-east-1", "sagemaker on-demand", "60", "2025-01-01"),
        ("us-east-1", "on-demand", "50", "2026-11-01"),
    )
    assert book_of(own, other).price("ml.p5.48xlarge").usd_per_hour == 50
    assert book_of(own, other, today=None).price("ml.p5.48xlarge").usd_per_hour == 60
    with pytest.raises(InputError, match="is of 2025-01-01, 691 days old, and is not quoted after 540"):
        book_of(own).price("ml.p5.48xlarge")
