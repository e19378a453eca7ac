"""ListServiceQuotas of Service Quotas: SageMaker's limits of training instances, the ones that jobs meet here."""

import hashlib
from typing import Any

from trainyard.emulator.authorization.requests import AwsRequest
from trainyard.emulator.pricing.offers import RefusedError, only, page_of
from trainyard.emulator.training.jobs import TrainingJobs
from trainyard.hardware.instances import instance_types

_MAX_RESULTS = 100
_USES = ("training job usage", "spot training job usage")
"""Of spot jobs AWS has a limit of their own; here both hold machines of one limit. There are no warm pools here."""


class QuotaService:
    """Answers requests of the service `servicequotas`."""

    def __init__(self, jobs: TrainingJobs) -> None:
        self._jobs = jobs

    def __call__(self, request: AwsRequest) -> tuple[int, dict[str, Any]]:
        """Status and JSON body."""
        try:
            if request.operation != "ListServiceQuotas":
                raise RefusedError("UnknownOperationException", f"the emulator doesn't know {request.operation}")
            only(request.parameters, request.operation, "ServiceCode", "MaxResults", "NextToken")
            if request.parameters.get("ServiceCode") != "sagemaker":
                raise RefusedError("NoSuchResourceException", "the emulator has quotas of sagemaker alone")
            code = "InvalidPaginationTokenException"
            items, token = page_of(self._listed(), request.parameters, most=_MAX_RESULTS, code=code)
            return 200, {"Quotas": items, **({"NextToken": token} if token else {})}
        except RefusedError as error:
            return 400, {"__type": error.code, "Message": str(error)}

    def _listed(self) -> list[dict[str, Any]]:
        kinds = [f"ml.{kind.removeprefix('ml.')}" for kind in instance_types()]
        names = {f"{kind} for {use}": float(self._jobs.quota_of(kind)) for kind in kinds for use in _USES}
        return [
            {
                "ServiceCode": "sagemaker",
                "ServiceName": "Amazon SageMaker",
                "QuotaCode": f"L-{hashlib.sha256(name.encode()).hexdigest()[:8].upper()}",
                "QuotaName": name,
                "Value": value,
                "Unit": "None",
                "Adjustable": True,
                "GlobalQuota": False,
            }
            for name, value in sorted(names.items())
        ]
