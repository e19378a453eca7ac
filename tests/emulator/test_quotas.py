"""The account's quotas: told as Service Quotas tells them, those that jobs meet, and what the doctor makes of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from emulator_testing import Caller, Site, allow, refusal

from trainyard import emulator
from trainyard.operate.account_checks import Check, quotas
from trainyard.spec.platform import load_environment

KIND = "ml.p5.48xlarge"


@pytest.fixture
def limited(site: Site) -> Iterator[Site]:
    """The shared emulator, with the limit that types have by themselves again afterwards."""
    yield site
    emulator.set_quota(site.info, {KIND: 64})


def listed(site: Site) -> dict[str, float]:
    pages = site("service-quotas").get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker")
    found = [item for page in pages for item in page["Quotas"]]
    assert len({item["QuotaCode"] for item in found}) == len(found)
    return {item["QuotaName"]: item["Value"] for item in found}


def test_each_type_has_its_limits_page_by_page_and_they_are_those_that_jobs_meet(limited: Site) -> None:
    emulator.set_quota(limited.info, {KIND: 3})
    found = listed(limited)
    assert found[f"{KIND} for training job usage"] == found[f"{KIND} for spot training job usage"] == 3
    assert found["ml.p4d.24xlarge for training job usage"] == 64
    first = limited("service-quotas").list_service_quotas(ServiceCode="sagemaker")
    assert first["NextToken"] and len(first["Quotas"]) < len(found)


def test_the_doctor_passes_a_quota_that_is_enough_and_fails_one_that_is_not(limited: Site) -> None:
    environment = load_environment(Path(__file__).resolve().parents[2] / "environments/local.yaml")
    environment = environment.model_copy(update={"max_instances": {KIND: 4}})

    def found() -> dict[str, Check]:
        return {one.name: one for one in quotas(Account(limited), environment)}  # type: ignore[arg-type]

    assert {one.level for one in found().values()} == {"pass"}
    emulator.set_quota(limited.info, {KIND: 3})
    told = found()
    assert (told[f"quota {KIND}"].level, told[f"spot quota {KIND}"].level) == ("fail", "warn")
    assert "--desired-value 4" in told[f"quota {KIND}"].mend


class Account:
    """Whoever asks, as `trainyard.launch.session.Account` does."""

    def __init__(self, site: Site) -> None:
        self.client: Any = site


def test_what_is_not_known_is_refused_and_asking_needs_its_action(site: Site, tenants: tuple[Caller, Caller]) -> None:
    client = site("service-quotas")
    assert "quotas of sagemaker alone" in refusal(lambda: client.list_service_quotas(ServiceCode="ec2"))
    assert refusal(client.list_services).startswith("UnknownOperationException")
    acme, _ = tenants

    def ask() -> Any:
        return acme.client("service-quotas").list_service_quotas(ServiceCode="sagemaker")

    assert "is not authorized to perform: servicequotas:ListServiceQuotas" in refusal(ask)
    acme.grant("quotas", allow("servicequotas:ListServiceQuotas"))
    assert refusal(ask) == ""
    acme.grant("quotas", allow("s3:ListAllMyBuckets"))
