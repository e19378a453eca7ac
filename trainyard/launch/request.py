"""The CreateTrainingJob request of a typed job: `trainyard.functions.training_request`, which the broker uses too."""

from collections.abc import Sequence
from typing import Any

from trainyard import hardware
from trainyard.functions import training_request
from trainyard.launch.channels import Channel
from trainyard.spec.job import ResolvedJob
from trainyard.spec.platform import TenantContract


def training_job_request(
    job: ResolvedJob,
    contract: TenantContract,
    *,
    job_id: str,
    training_job_name: str,
    image: str,
    channels: Sequence[Channel],
    asked: int | None = None,
    spec_name: str = "",
) -> dict[str, Any]:
    """CreateTrainingJob's arguments for one attempt of `job`; nothing is read and no clock is asked.

    `asked`: the newest attempt that a person asked for; None: this one. `spec_name`: which of the job's specs.
    """
    spec = job.spec
    assert spec.compute.instance_type is not None
    return training_request.training_job_request(
        spec.model_dump(mode="json"),
        contract.model_dump(mode="json"),
        job_id=job_id,
        training_job_name=training_job_name,
        image=image,
        channels=[{"name": item.name, "kind": item.kind, "location": item.location} for item in channels],
        num_hosts=job.num_hosts,
        # VolumeKmsKeyId may not be set on types with local NVMe (hardware-encrypted): CreateTrainingJob refuses it.
        asked=asked,
        spec_name=spec_name,
        volume_key=not hardware.instance(spec.compute.instance_type).local_nvme_gib,
    )
