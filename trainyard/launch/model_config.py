"""The configuration of a model in a tenant's bucket, read for the plan: the planner itself asks no AWS."""

import json
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from trainyard.errors import InputError
from trainyard.launch.channels import absolute_job
from trainyard.launch.record import JobRecord
from trainyard.planner.families import learn_config
from trainyard.spec.job import JobSpec
from trainyard.spec.platform import TenantContract

_MOST_BYTES = 4 * 1024 * 1024
"""No configuration is as large: what is isn't read."""


def learn_model(s3: Any, job: JobSpec, contract: TenantContract) -> None:
    """Tell the planner what the config.json says that lies in the tenant's bucket beside the model of `job`.

    Without it a model under a name of its own (a promoted one, say) had no plan, and so no memory, hours and dollars
    were held against anything. What can't be read is no error here: the inputs are looked for later.
    """
    if job.model.source is None:
        return
    try:
        uri = absolute_job(job, contract).model.source
    except InputError:
        return
    learn_source(s3, str(uri), job.model.source)


def learn_source(s3: Any, uri: str, *names: str) -> None:
    """As `learn_model`, of the model at `uri`, which jobs also call by `names`."""
    if not uri.startswith("s3://"):
        return
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    try:
        found = s3.get_object(Bucket=bucket, Key=f"{key.strip('/')}/config.json")
        if found["ContentLength"] > _MOST_BYTES:
            return
        config = json.loads(found["Body"].read())
    except (ClientError, BotoCoreError, ValueError, RecursionError):
        return
    if isinstance(config, dict):
        for name in (uri, *names):
            learn_config(name, config)


def learn_recorded(s3: Any, record: JobRecord) -> None:
    """As `learn_model`, of a job that was launched: its record has the model's place already."""
    uri, name = record.resolved.spec.model.source, record.spec.model.source
    if s3 is not None and uri is not None and name is not None:
        learn_source(s3, uri, name)
