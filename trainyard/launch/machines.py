"""What jobs on machines of a cluster have in common, whoever manages it: Slurm, Kubernetes, Ray."""

from trainyard import hardware
from trainyard.launch.record import JobRecord
from trainyard.spec.job import ResolvedJob

SHARED_ROOT = "/fsx"
"""Where the machines of a tenant's cluster mount its file system (stacks/constructs/cluster.py)."""
IMAGE_PYTHON = "/opt/trainyard/bin/python"
"""The training image's interpreter (training_container/Dockerfile)."""


def efa_interfaces(job: ResolvedJob) -> int:
    """EFA interfaces of each machine; 0 where the job names no type."""
    kind = job.spec.compute.instance_type
    return hardware.instance(kind).efa_interfaces if kind else 0


def common_variables(record: JobRecord, region: str | None) -> dict[str, str]:
    """What every host's environment says: which submission of which job it is of, and where data are (None: no AWS)."""
    found = {"TRAINYARD_JOB_ID": record.job_id, "TRAINYARD_ATTEMPT": str(record.attempt.number)}
    return found | ({"AWS_REGION": region, "AWS_DEFAULT_REGION": region} if region else {})
