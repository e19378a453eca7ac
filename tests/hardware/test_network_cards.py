"""Every network card of every type carries EFA, as EC2's and PCS's user guides wire them."""

import pytest

from trainyard.hardware import instance, instance_types, network_interfaces

EFA_INTERFACES = {
    **dict.fromkeys(("p4d.24xlarge", "p4de.24xlarge"), 4),
    **dict.fromkeys(("p5.48xlarge", "p5e.48xlarge"), 32),
    **{"p5.4xlarge": 1, "p5en.48xlarge": 16, "p6-b200.48xlarge": 8, "p6-b300.48xlarge": 16, "p3dn.24xlarge": 1},
    **{"trn1.32xlarge": 8, "trn1n.32xlarge": 16, "trn2.48xlarge": 16},
    **{f"g5.{size}xlarge": 1 for size in (8, 12, 16, 24, 48)},
    **{f"g6.{size}xlarge": 1 for size in (8, 12, 16, 24, 48)},
    **{"g6e.8xlarge": 1, "g6e.12xlarge": 1, "g6e.16xlarge": 1, "g6e.24xlarge": 2, "g6e.48xlarge": 4},
    **{"g7e.8xlarge": 1, "g7e.12xlarge": 1, "g7e.24xlarge": 2, "g7e.48xlarge": 4},
}
"""EC2 user guide, "EFA: supported instance types", those that the table of machines knows."""


@pytest.mark.parametrize("kind", sorted(EFA_INTERFACES))
def test_a_type_has_the_efa_interfaces_that_ec2s_guide_lists(kind: str) -> None:
    for efa_only in (True, False):
        cards = network_interfaces(instance(kind), efa_only=efa_only)
        assert sum(card.has_efa for card in cards) == EFA_INTERFACES[kind]


@pytest.mark.parametrize("kind", instance_types())
def test_every_card_is_wired_once_and_the_primary_interface_carries_tcp(kind: str) -> None:
    machine = instance(kind)
    for efa_only in (True, False):
        cards = network_interfaces(machine, efa_only=efa_only)
        places = [(card.network_card, card.device) for card in cards]
        assert places[0] == (0, 0) and cards[0].has_address, "the primary one, which has an address"
        assert len(set(places)) == len(places), "no two interfaces in one place"
        assert {card.network_card for card in cards} == set(range(machine.network_cards))
        assert sum(card.has_efa for card in cards) == machine.efa_interfaces
        with_efa = [card.network_card for card in cards if card.has_efa]
        assert len(set(with_efa)) == len(with_efa), "one EFA device a card"


def test_ec2s_wiring_has_one_ena_and_pcs_none_that_is_efa_only() -> None:
    machine = instance("p5.48xlarge")
    own = network_interfaces(machine, efa_only=True)
    assert [(card.network_card, card.device, card.kind) for card in own[:3]] == [
        (0, 0, "interface"),
        (0, 1, "efa-only"),
        (1, 0, "efa-only"),
    ]
    assert sum(card.has_address for card in own) == 1
    pcs = network_interfaces(machine, efa_only=False)
    assert [(card.network_card, card.device, card.kind) for card in pcs[:3]] == [
        (0, 0, "efa"),
        (1, 1, "efa"),
        (2, 1, "efa"),
    ]
    assert sum(card.has_address for card in pcs) == 32


def test_p6_b300_has_no_efa_on_its_first_card() -> None:
    for efa_only, kind, device in ((True, "efa-only", 0), (False, "efa", 1)):
        first, *rest = network_interfaces(instance("p6-b300.48xlarge"), efa_only=efa_only)
        assert (first.network_card, first.device, first.kind) == (0, 0, "interface")
        assert [(card.network_card, card.device, card.kind) for card in rest] == [
            (card, device, kind) for card in range(1, 17)
        ]


def test_a_type_without_efa_has_the_one_interface() -> None:
    (card,) = network_interfaces(instance("g5.xlarge"), efa_only=True)
    assert (card.network_card, card.device, card.kind) == (0, 0, "interface")
