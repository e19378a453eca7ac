"""Shares of the training queues: what is refused and in which words, and Batch's arithmetic."""

import copy
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.spec import shares
from trainyard.spec.base import parse
from trainyard.spec.platform import EnvironmentSpec

GPU, SMALL = "ml.p5.4xlarge", "ml.g6e.12xlarge"


def tenant(index: int, most: int, **more: Any) -> dict[str, Any]:
    queue = {"instance_types": [GPU], "max_instances": most}
    budget = {"monthly_usd": 100, "notify": ["leads@example.com"]}
    return {"network_index": index, "queues": {"gpu": queue}, "budget": budget, **more}


def content(**tenants: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "test",
        "account": "123456789012",
        "region": "us-east-1",
        "availability_zones": ["us-east-1a"],
        "max_instances": {GPU: 8, SMALL: 4},
        "network": {"vpc_prefix_length": 20},
        "submission": "queue",
        "tenants": tenants,
    }


def environment(**tenants: dict[str, Any]) -> EnvironmentSpec:
    return parse(EnvironmentSpec, content(**tenants), "test.yaml")


@pytest.mark.parametrize(
    ("tenants", "words"),
    [
        ({"acme": tenant(0, 8), "globex": tenant(1, 1)}, "tenants are guaranteed 9 together (acme 8, globex 1)"),
        ({"acme": tenant(0, 4, share={"guaranteed": {GPU: 0}})}, f"{GPU}: 0 is not between 1 and 4"),
        ({"acme": tenant(0, 4, share={"guaranteed": {GPU: 5}})}, f"{GPU}: 5 is not between 1 and 4"),
        (
            {"acme": tenant(0, 4, share={"guaranteed": {SMALL: 1}})},
            f"{SMALL} is no type of the tenant's queues ({GPU})",
        ),
        ({"acme": tenant(0, 4, share={"guaranteed": {GPU: 2}, "lend": False})}, "who borrows must lend"),
        ({"a-very-long-name": tenant(0, 4)}, "up to 14 characters, as Batch adds 40"),
        ({"jobs": tenant(0, 4)}, "all tenants' job metrics are in the namespace trainyard/jobs"),
        ({"awsbatch-a": tenant(0, 4)}, "Batch's own training jobs are named so"),
        ({"acme": tenant(0, 4, submission="broker", share={"lend": False})}, "is for submission: queue"),
    ],
)
def test_a_share_that_cannot_be_is_refused_in_one_line(tenants: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        environment(**tenants)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_guaranteed_is_borrowed_up_to_the_most_that_a_tenant_may_hold() -> None:
    made = environment(acme=tenant(0, 8, share={"guaranteed": {GPU: 3}}), globex=tenant(1, 5))
    assert (made.guaranteed("acme"), made.most("acme")) == ({GPU: 3}, {GPU: 8})
    assert made.guaranteed("globex") == made.most("globex") == {GPU: 5}
    assert shares.strategy(made.tenant("acme").share, 3, 8) == "LEND_AND_BORROW"
    assert shares.strategy(made.tenant("globex").share, 5, 5) == "LEND"
    keeping = shares.ShareSpec(lend=False)
    assert shares.strategy(keeping, 5, 5) == "RESERVE"


@pytest.mark.parametrize("guaranteed", range(1, 100, 7))
def test_the_percentage_gives_the_whole_instances_that_were_meant(guaranteed: int) -> None:
    for most in range(guaranteed, 2 * guaranteed + 40):
        percent = shares.borrow_percent(guaranteed, most)
        assert guaranteed + guaranteed * percent // 100 == most


@pytest.mark.parametrize("guaranteed", [101, 150, 199, 250, 1000])
def test_no_percentage_gives_more_than_was_asked_for(guaranteed: int) -> None:
    """Above 100 a percent is more than an instance: then less, and the most that a job may ask for is what there is."""
    for most in range(guaranteed, 2 * guaranteed + 40):
        percent, held = shares.borrow_percent(guaranteed, most), shares.reachable(guaranteed, most)
        assert guaranteed + guaranteed * percent // 100 == held
        assert most - guaranteed / 100 <= held <= most
        assert shares.borrow_percent(guaranteed, held) == percent, "told twice, it is the same"
    made = content(acme=tenant(0, 201, share={"guaranteed": {GPU: 101}}), globex=tenant(1, 1))
    made["max_instances"][GPU] = 300
    assert parse(EnvironmentSpec, made, "test.yaml").most("acme") == {GPU: 200}


def test_a_tenants_queue_follows_from_its_own_number_alone() -> None:
    made = environment(**{f"t{index}": tenant(index, 1, share={}) for index in (0, 19, 20, 40)})
    assert [made.training_queue(GPU, name)[-1] for name in made.tenants] == ["0", "0", "1", "2"]
    assert made.queue_capacity() == {
        (GPU, 0): 6,  # what the others leave
        (GPU, 1): 1,
        (GPU, 2): 1,
        (SMALL, 0): 4,
        (SMALL, 1): 1,  # nobody's there, but a queue has room for one
        (SMALL, 2): 1,
    }


def test_a_queue_stays_as_long_as_its_tenants_do() -> None:
    """However they submit: the platform is deployed first, and a queue with shares in it can't be deleted."""
    there = content(aa=tenant(0, 1), bb=tenant(25, 1))
    gone = copy.deepcopy(there)
    gone["tenants"]["bb"]["submission"] = "broker"
    before, after = (parse(EnvironmentSpec, item, "test.yaml").queue_capacity() for item in (there, gone))
    assert set(before) == set(after)
