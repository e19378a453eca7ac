"""Which network interfaces an EC2 machine is launched with, so that every network card of it carries EFA.

EC2 user guide, "Maximize network bandwidth on Amazon EC2 instances with multiple network cards": the primary interface
(card 0, device 0) is ENA; a card 0 that has EFA takes an EFA-only interface as device 1; every further card takes one
as device 0. p6-b300 has EFA on all cards but card 0. PCS takes no `efa-only` (its user guide wires `efa`, an EFA with
an ENA beside it, as device 0 of card 0 and device 1 of every further card), so that each card then takes an address.
"""

from dataclasses import dataclass
from typing import Literal

from trainyard.hardware.instances import Instance

Kind = Literal["interface", "efa", "efa-only"]


@dataclass(frozen=True)
class NetworkInterface:
    """One interface of a launch template."""

    network_card: int
    device: int
    kind: Kind

    @property
    def has_efa(self) -> bool:
        """Whether it is one of the type's EFA devices."""
        return self.kind != "interface"

    @property
    def has_address(self) -> bool:
        """Whether it takes an IP address of the subnet."""
        return self.kind != "efa-only"


def network_interfaces(machine: Instance, *, efa_only: bool) -> tuple[NetworkInterface, ...]:
    """Every interface of a machine of this type, the primary one first. `efa_only`: whether the launcher takes
    `efa-only` interfaces (EC2 itself does, PCS doesn't)."""
    cards, efas = machine.network_cards, machine.efa_interfaces
    if not efas:
        return (NetworkInterface(0, 0, "interface"),)
    assert cards - efas in {0, 1}, f"{machine.type}: {efas} EFA on {cards} cards is wired in no way that is known here"
    first_has_efa, rest = cards == efas, range(1, cards)
    if efa_only:
        first = (NetworkInterface(0, 0, "interface"), *([NetworkInterface(0, 1, "efa-only")] if first_has_efa else []))
        return (*first, *(NetworkInterface(card, 0, "efa-only") for card in rest))
    primary = NetworkInterface(0, 0, "efa" if first_has_efa else "interface")
    return (primary, *(NetworkInterface(card, 1, "efa") for card in rest))
