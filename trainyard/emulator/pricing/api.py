"""The offers where requests come in: EC2's and SageMaker's operations in moto, which invents or lacks them."""

import datetime
from collections.abc import Callable, Mapping
from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend
from moto.ec2.responses import EC2Response
from moto.sagemaker.exceptions import SagemakerClientError
from moto.sagemaker.responses import SageMakerResponse

from trainyard.emulator.pricing.capacity import ZoneNames, capacity_blocks, spot_history, training_plans
from trainyard.emulator.pricing.offers import Offers, RefusedError


def install(offers: Offers) -> None:
    """Put `offers` in place of moto's spot prices (0.00001 USD, of 2006), and beside what it has no operation for."""

    def history(self: Any) -> dict[str, Any]:
        return spot_history(offers, _asked(self.params), self.region, _zone_names(self.region), _now())

    def blocks(self: Any) -> dict[str, Any]:
        return capacity_blocks(offers, _asked(self.params), self.region, _now())

    def plans(self: Any) -> dict[str, Any]:
        return training_plans(offers, _asked(self.params), self.region, _now())

    ec2: Any = EC2Response
    sagemaker: Any = SageMakerResponse
    ec2.describe_spot_price_history = _answering(history, EC2ClientError)
    ec2.describe_capacity_block_offerings = _answering(blocks, EC2ClientError)
    sagemaker.search_training_plan_offerings = _answering(plans, SagemakerClientError)


def _answering(
    make: Callable[[Any], dict[str, Any]], refusal: Callable[[str, str], Exception]
) -> Callable[[Any], ActionResult]:
    def answer(self: Any) -> ActionResult:
        try:
            content = make(self)
            if self.params.get("DryRun"):
                raise RefusedError("DryRunOperation", "Request would have succeeded, but DryRun flag is set.")
        except RefusedError as error:
            raise refusal(error.code, str(error)) from None
        return ActionResult(content)

    return answer


def _asked(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters, times with their zone: moto's are in UTC without saying so."""
    return {
        name: value.replace(tzinfo=datetime.UTC) if isinstance(value, datetime.datetime) else value
        for name, value in parameters.items()
    }


def _zone_names(region: str) -> ZoneNames:
    return {zone.zone_id: zone.name for zone in RegionsAndZonesBackend.zones.get(region, [])}


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
