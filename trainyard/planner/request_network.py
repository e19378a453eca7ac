"""Nodes and network of a request to `predict`, from the words of `interconnect`."""

import re

from trainyard.errors import InputError
from trainyard.hardware import Gpu, instance, instance_types
from trainyard.planner.communication import EFA, INFINIBAND, Fabric, fabric, fabric_of
from trainyard.planner.request_fields import MOST, MOST_NUMBER, Fields

NODE_GB_PER_SECOND = {
    "V100": 12.5,
    "A100": 200.0,
    "H100": 400.0,
    "H200": 400.0,
    "H800": 400.0,
    "B300": 800.0,
    "GB300": 800.0,
}
"""Network of a usual training node (8 cards of 200 Gb/s with the A100, of 400 with Hopper), where none is stated."""

RACKS = {"GB200": 72, "GB300": 72}
"""Parts that are built into racks, whose GPUs NVLink joins as those of one node."""

DEFAULT_NODE_GB_PER_SECOND = 400.0
CARD_GB_PER_SECOND = 50.0
"""The fastest card that A100 and H100 nodes have one of per GPU: a stated rate up to this is a GPU's."""

SLOW_NODE_GB_PER_SECOND = 12.5
"""Nodes of GPUs without NVLink: one card of 100 Gb/s."""


def links_of(fields: Fields, device: Gpu, gpus: int) -> Fabric:
    """Nodes and network, from the words of `interconnect` where they say something."""
    text = fields.text("interconnect")
    per_node = fields.whole("gpus_per_node", min(gpus, RACKS.get(device.name, 8)))
    lowered = text.lower()
    for name in instance_types():
        if name in lowered and instance(name).gpu is not None:
            return fabric_of(instance(name))
    nvlink_domain = re.search(r"nvl(\d+)", lowered)
    if nvlink_domain:
        per_node = int(nvlink_domain.group(1)[:7])
        if not 1 <= per_node <= MOST["gpus_per_node"]:
            raise InputError(f"interconnect: {nvlink_domain.group()[:20]} is no NVLink domain; NVL72 is one of 72 GPUs")
    usual = NODE_GB_PER_SECOND.get(
        device.name, DEFAULT_NODE_GB_PER_SECOND if device.nvlink else SLOW_NODE_GB_PER_SECOND
    )
    # Nodes of other sizes have as many cards a GPU (a rack of NVLink has 72 of them, a node of four GPUs four), or one.
    usual = max(SLOW_NODE_GB_PER_SECOND, usual * per_node / 8)
    network = EFA if re.search(r"\befa", lowered) else INFINIBAND
    return fabric(device, per_node, _stated_gb_per_second(text, per_node) or usual, network)


READ_LINKS = r"\befa|nvl\d|\b(?:infiniband|ib|roce|rdma)(?![a-z])"
"""Words of `interconnect` that say something without a rate: AWS's network, a rack, and what is assumed elsewhere."""


def reads_links(text: str, device: Gpu) -> bool:
    """Whether a stated `interconnect` says something that counts, or is what is assumed anyway."""
    lowered = text.lower()
    within = r"nv-?(?:link|switch)" if device.nvlink else r"pci-?e"
    return (
        not text.strip()
        or re.search(f"{READ_LINKS}|{within}", lowered) is not None
        or any(name in lowered and instance(name).gpu is not None for name in instance_types())
        or _stated_gb_per_second(text, 8) is not None
    )


SLINGSHOT_GB_PER_SECOND = 25.0
"""A card of HPE's Slingshot 11 (200 Gb/s), of which nodes with GH200 or MI250X have one a GPU; Slingshot 10's have half
of it."""

RATE = r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[TGM](?:(?:iga)?bits?(?:/s|ps)?|b(?:/s|ps|E)?|E)?)(?![a-z0-9])"
"""A rate: 400 Gb/s, 3.2 Tbps, 50 GB/s, 100GbE, 10G. A capital B counts bytes."""

RDMA = (
    r"(?<!no )(?<!without )(?:roce|rdma|spectrum|infiniband|slingshot|\befa|(?<![a-z])ib(?![a-z])"
    r"|(?<![a-z])[xnhe]dr(?![a-z]))"
)
"""A network of which each GPU has a card; Ethernet that carries none of it is a node's one network."""

WITHIN_NODE = (
    rf"(?:nv-?link|nv-?switch|intra(?:-?node)?)\s*(?:v?\d(?:\.\d)?)?[\s:(]*(?:at\s+)?{RATE}",
    rf"{RATE.replace('number', 'n').replace('unit', 'u')}\s*\(?(?:of\s+|over\s+)?(?:nv-?link|nv-?switch|intra)",
)
"""Rates of the links inside of a node, which say nothing of the network."""


def _gb_per_second(rate: re.Match[str]) -> float:
    """Decimal GB/s of a rate as RATE reads it."""
    unit = rate.group("unit")
    scale = {"t": 1000.0, "g": 1.0, "m": 0.001}[unit[0].lower()]
    counts_bytes = "B" in unit and unit[-1] not in "eE"
    return float(rate.group("number")) * scale / (1 if counts_bytes else 8)


def _of_rates(text: str, lowered: str, gpus_per_node: int) -> float | None:
    """GB/s of a node by the rates in the text, of a GPU, so many cards, or a node; None without any."""
    # "80 GB" is a size.
    rates = [rate for rate in re.finditer(RATE, text, flags=re.IGNORECASE) if rate.group("unit")[1:] != "B"]
    for rate in rates:
        # What the rate is of stands behind it, up to the next comma.
        if re.match(r"[^,;]*(?:per[ -]|/)gpu", lowered[rate.end() :]):
            return _gb_per_second(rate) * gpus_per_node
        count = re.search(r"(\d{1,4})\s*x\s*$", lowered[: rate.start()])
        if count:
            return int(count.group(1)) * _gb_per_second(rate)
    cards = re.search(r"(\d{1,4})\s*x\s*(?:[hnxe]dr)?\s*(\d{2,4})(?:g(?=-)|(?![a-z0-9]))", lowered)
    if cards:
        return float(cards.group(1)) * float(cards.group(2)) / 8
    if rates:
        # Of several networks the GPUs' is the one with RDMA.
        rate = next((item for item in rates if re.search(RDMA, _beside(lowered, item))), rates[0])
        speed = _gb_per_second(rate)
        # "400 Gb/s", of a node with eight cards of that speed, is each card's; Ethernet of 100GbE is the node's.
        is_ethernet = rate.group("unit")[-1] in "eE" or _is_plain_ethernet(lowered, rate)
        whole = "node" in lowered or is_ethernet or speed < SLOW_NODE_GB_PER_SECOND
        return speed if whole or speed > CARD_GB_PER_SECOND else speed * gpus_per_node
    return None


def _beside(lowered: str, rate: re.Match[str]) -> str:
    """The words that a rate stands among, from comma to comma."""
    return re.split("[,;]", lowered[: rate.start()])[-1] + " " + re.split("[,;]", lowered[rate.end() :])[0]


def _is_plain_ethernet(lowered: str, rate: re.Match[str]) -> bool:
    """Whether a rate is Ethernet's without RDMA: by the words beside it, or by all where these name no network."""
    for words in (_beside(lowered, rate), lowered):
        if re.search(RDMA, words):
            return False
        if "ethernet" in words:
            return True
    return False


def _stated_gb_per_second(text: str, gpus_per_node: int) -> float | None:
    """GB/s of a node: "400 Gb/s per GPU", "8x200 Gb/s per node", "3.2 Tb/s", "100GbE", "NDR", "EFA 3200".

    InputError for a rate that can't be read, so that it isn't taken for the usual one unseen.
    """
    for within in WITHIN_NODE:
        text = re.sub(within, " ", text, flags=re.IGNORECASE)
    lowered = text.lower()
    numbers = _of_rates(text, lowered, gpus_per_node)
    if numbers is not None:
        if not 0 < numbers <= MOST_NUMBER:
            raise InputError(f"interconnect: {numbers:g} GB/s a node is no rate of a network")
        return numbers
    adapter = re.search(r"efa\s*(\d{3,5})", lowered)
    if adapter:
        return float(adapter.group(1)) / 8
    # InfiniBand's generations; HDR100 and NDR200 are cards of half of it.
    card = re.search(r"(?<![a-z])(xdr|ndr|hdr|edr)(\d{2,3})?(?!\d)", lowered)
    if card:
        gigabits = {"xdr": 800, "ndr": 400, "hdr": 200, "edr": 100}[card[1]]
        return int(card[2] or gigabits) * gpus_per_node / 8
    unread = re.search(r"\d[\d.]*\s*[kKmMgGtT](?:i?[bB]|bit)\S*", text)
    if unread:
        raise InputError(
            f"interconnect: can't read the rate {unread.group()!r}; state e.g. 400 Gb/s per GPU, or 50 GB/s"
        )
    slingshot = re.search(r"slingshot[\s-]*(10(?!\d))?", lowered)
    if slingshot is None:
        return None
    return SLINGSHOT_GB_PER_SECOND * gpus_per_node / (2 if slingshot[1] else 1)
