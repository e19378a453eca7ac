"""GPUs: peaks, memory and links, from the tables beside this file."""

import difflib
import functools
import re
from dataclasses import dataclass, replace

from trainyard.errors import InputError
from trainyard.hardware.tables import rows, specifications

GIB = 2**30

USABLE_MEMORY_SHARE = 0.9888
"""What `torch.cuda.get_device_properties().total_memory` shows of the marketed GiB: 79.1 of an H100's 80; the
driver and ECC keep the rest. Consumer and other data-centre parts lie within 1% of it."""

PCIE_GB_PER_SECOND = 24.0
"""One direction of PCIe 4 x16 as NCCL gets it (31.5 GB/s before protocol): for GPUs without NVLink."""


GENERATIONS = {
    "V100": "volta",
    **dict.fromkeys(("T4", "RTX 2080 TI", "TITAN RTX", "RTX 8000"), "turing"),
    **dict.fromkeys(("A100", "A100 PCIE", "A800", "A10G", "A10", "A30", "A40", "A6000", "A5000", "A4500"), "ampere"),
    **dict.fromkeys(("A4000", "RTX 3090 TI", "RTX 3090", "RTX 3080 TI", "RTX 3080", "RTX 3070"), "ampere"),
    **dict.fromkeys(("RTX 3060 TI", "RTX 3060"), "ampere"),
    **dict.fromkeys(("L4", "L20", "L40", "L40S", "RTX 6000 ADA", "RTX 5000 ADA", "RTX 4090"), "ada"),
    **dict.fromkeys(("RTX 4080 SUPER", "RTX 4080", "RTX 4070 TI SUPER", "RTX 4070 TI", "RTX 4070 SUPER"), "ada"),
    **dict.fromkeys(("RTX 4070", "RTX 4060 TI", "RTX 4060"), "ada"),
    **dict.fromkeys(("H100", "H100 PCIE", "H100 NVL", "H200", "H800", "H800 PCIE", "H20", "GH200"), "hopper"),
    **dict.fromkeys(("B200", "B300", "GB200", "GB300", "RTX PRO 6000", "RTX PRO 4500"), "blackwell"),
    **dict.fromkeys(("RTX 5090", "RTX 5080", "RTX 5070 TI", "RTX 5060 TI"), "blackwell"),
    # CDNA 4 as well: nothing here tells the two apart.
    **dict.fromkeys(("MI300X", "MI325X", "MI355X"), "cdna3"),
}


USUAL_PARTS = {
    **dict.fromkeys(("volta", "turing"), "V100"),
    **dict.fromkeys(("ampere", "ada"), "A100"),
    "hopper": "H100",
    **dict.fromkeys(("blackwell", "cdna3"), "B200"),
}
"""The part of a generation (or of the one whose constants it is given) that nearly all published runs are of."""

GRACE_GB = {"GH200": (120,)}
"""In the names of parts that driver and torch print: the memory of the processor beside the GPU, where it is no more
than twice the GPU's own ("GH200 480GB" is of 96 GB as well)."""

UNNAMED_GB = {**dict.fromkeys(("A100", "A100 PCIE", "A800"), (40, 80)), "V100": (16, 32)}
"""Sizes that are known for what they are without their unit: "A100-40"."""

MOST_TIMES = 2
"""A size of more than so many times the part's own is a machine's. GPUs have been refitted with twice."""


@dataclass(frozen=True)
class Gpu:
    """One accelerator. Peaks are dense, without sparsity, in TFLOP/s."""

    name: str
    memory_gib: float
    """What a process can allocate on an otherwise empty device."""
    bf16_tflops: float
    fp32_tflops: float
    fp8_tflops: float | None
    """None: the part has no FP8 units."""
    fp4_tflops: float | None
    """None: the part has no FP4 units."""
    memory_tb_per_second: float
    link_gb_per_second: float
    """One direction to the other GPUs of the node (NVLink, else PCIe)."""
    nvlink: bool
    achievable_bf16_tflops: float | None
    """Measured ceiling of a large matrix product (of any shape that was tried), where it has been published."""
    source: str

    def peak_tflops(self, precision: str) -> float:
        """Dense peak in a precision (bf16, fp16, fp8, fp4, fp32, fp64); what a part lacks counts as its next wider one.

        fp64 counts as fp32, which is at least its peak on every part: nothing is planned by it but proofs.
        """
        if precision in ("fp32", "fp64"):
            return self.fp32_tflops
        if precision == "fp4" and self.fp4_tflops is not None:
            return self.fp4_tflops
        if precision in ("fp8", "fp4") and self.fp8_tflops is not None:
            return self.fp8_tflops
        return self.bf16_tflops

    @property
    def generation(self) -> str:
        """The architecture: volta, turing, ampere, ada, hopper, blackwell, or cdna3 (AMD)."""
        return GENERATIONS.get(self.name, "ampere")

    @property
    def sustained(self) -> float:
        """What products reach of this part's peak, over what they reach of its generation's usual part's.

        A cut-down part with its whole power is never throttled (H20: 1.2), one of 72 W always (L4: 0.67). 1 where
        nobody has published a measurement.
        """
        usual = _build(USUAL_PARTS[self.generation], None)
        if self.achievable_bf16_tflops is None or usual.achievable_bf16_tflops is None:
            return 1.0
        return self.achievable_bf16_tflops / self.bf16_tflops / (usual.achievable_bf16_tflops / usual.bf16_tflops)


def gpu(name: str, memory_gb: float | None = None) -> Gpu:
    """The GPU of that name ("H100", "A100-SXM4-80GB", "NVIDIA H200"); `memory_gb` overrides the marketed size.

    InputError names the GPUs that are known.
    """
    key = _key(name)
    if key is None:
        known = sorted(_known())
        close = difflib.get_close_matches(name.upper(), known, n=2, cutoff=0.5)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        # Cards of desks are known by their numbers; the list stays one that can be read.
        listed = [part for part in known if not part.startswith(("RTX", "TITAN"))]
        raise InputError(f"unknown GPU {name!r}{hint} (known: {', '.join(listed)}, RTX 3060 to RTX 5090)")
    size = memory_gb if memory_gb is not None else _size_in(name, key)
    return _build(key, size)


_SIZE = r"(?:(\d+(?:\.\d+)?)\s*GI?B\b|(?<![A-Z0-9.])(\d+)\s*G(?![A-Z0-9.])|(\d{4,})\s*MI?B\b)"
"""A number of GB or GiB, of G alone, of MiB as nvidia-smi prints them. "A10G" is a name, "3g.20gb" a part of 20."""


_PART = r"(?<![A-Z0-9])\d+G\.(\d+)GB(?![A-Z0-9])"
"""A profile of MIG: beside it the driver names the whole GPU, with its size."""


@functools.cache
def _known() -> frozenset[str]:
    return frozenset(
        name for name, metrics in specifications().items() if "bf16_dense_tflops_peak" in metrics and name != "Trn2"
    )


def _key(name: str) -> str | None:
    text = " ".join(re.sub(r"[-_/]", " ", name.upper()).replace("NVIDIA", "").replace("GEFORCE", "").split())
    text = text.replace("RTX PRO SERVER 6000", "RTX PRO 6000").replace("RTX 6000 PRO", "RTX PRO 6000")
    # "H100 80GB PCIe" is another part than "H100 80GB HBM3".
    text = " ".join(re.sub(rf"\b{_SIZE}", " ", text).split())
    # The longest name first, so that "GB200" is not read as "B200".
    for known in sorted(_known(), key=len, reverse=True):
        found = re.search(rf"(?<![A-Z0-9]){re.escape(known)}(?![A-Z0-9])", text)
        # "RTX 3070 Ti" and a laptop's "RTX 4090" are others than those without the word.
        if found and not re.match(r" ?(?:TI|SUPER|LAPTOP|MOBILE|MAX Q)(?![A-Z0-9])", text[found.end() :]):
            return known
    return None


def _size_in(name: str, key: str) -> float | None:
    """The GiB that a name says, of memory that such a part can have; None: the part's usual ones."""
    usual = _build(key, None).memory_gib / USABLE_MEMORY_SHARE
    part = re.search(_PART, name.upper())
    if part and 0 < int(part.group(1)) <= usual:
        return float(part.group(1))
    for match in re.finditer(_SIZE, name.upper()):
        size = float(match.group(1) or match.group(2)) if not match.group(3) else float(match.group(3)) / 1024
        if usual < size <= usual * GIB / 1e9 * 1.01:
            return None  # in decimal GB, as vendors print it
        if 0 < size <= MOST_TIMES * usual and size not in GRACE_GB.get(key, ()):
            return size
    unnamed = re.search(rf"{re.escape(key)}[-_/ ](\d+)(?![A-Z0-9.])", re.sub(r"[-_/]", " ", name.upper()))
    return float(unnamed.group(1)) if unnamed and int(unnamed.group(1)) in UNNAMED_GB.get(key, ()) else None


@functools.cache
def _build(key: str, memory_gb: float | None) -> Gpu:
    specs = specifications()
    own = specs[key]
    # The A100 was made with 40 and 80 GB; without a size the larger and commoner one.
    sized = specs.get(f"{key}-{memory_gb:.0f}" if memory_gb else f"{key}-80", {})
    metrics = {**specs.get(f"{key}-80", {}), **sized, **own}
    capacity_gib = memory_gb if memory_gb is not None else _capacity_gib(key, metrics)
    link = metrics.get("nvlink_unidirectional")
    achievable = metrics.get("bf16_MAMF_achievable")
    fp8, fp4 = metrics.get("fp8_dense_tflops_peak"), metrics.get("fp4_dense_tflops_peak")
    return Gpu(
        name=key,
        memory_gib=capacity_gib * USABLE_MEMORY_SHARE,
        bf16_tflops=metrics["bf16_dense_tflops_peak"][0],
        fp32_tflops=metrics["fp32_dense_tflops_peak"][0],
        fp8_tflops=fp8[0] if fp8 else None,
        fp4_tflops=fp4[0] if fp4 else None,
        memory_tb_per_second=metrics["hbm_bandwidth"][0],
        link_gb_per_second=link[0] if link else PCIE_GB_PER_SECOND,
        nvlink=link is not None,
        achievable_bf16_tflops=achievable[0] if achievable else None,
        source=metrics["bf16_dense_tflops_peak"][1],
    )


def _capacity_gib(key: str, metrics: dict[str, tuple[float, str]]) -> float:
    """GiB of memory: from the instance table (in MiB, exact) where the GPU is in it, else as the driver shows it where
    that was read, else the datasheet's size, which is of GiB up to Hopper's H100."""
    sizes = [float(row["accel_mem_MiB_each"]) / 1024 for row in rows("aws_instances") if row["accel_name"] == key]
    if sizes:
        return max(sizes)
    return metrics["memory_shown"][0] / 1024 if "memory_shown" in metrics else metrics["hbm_capacity"][0]


def with_memory(device: Gpu, memory_gib: float) -> Gpu:
    """The same GPU with `memory_gib` marketed GiB of memory."""
    return replace(device, memory_gib=memory_gib * USABLE_MEMORY_SHARE)
