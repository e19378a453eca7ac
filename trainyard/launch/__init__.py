"""From one job spec to a running job: on SageMaker through the real SDK, or on this machine; then watch, stop, resume.

Flow: `session` (the right account, the tenant's launcher role) -> `contract` -> `checks`, `channels` (what is refused)
-> `record` (written first) -> `request` (pure) -> a backend (`sagemaker_backend`, `local_backend`) -> `watch`.
`place` opens a tenant, or this machine, for a verb. boto3 and the SageMaker SDK are imported when first used.
"""

from trainyard.launch.launcher import launch, launch_here
from trainyard.launch.record import JobRecord
from trainyard.launch.request import training_job_request

__all__ = ["JobRecord", "launch", "launch_here", "training_job_request"]
