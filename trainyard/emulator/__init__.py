"""AWS on this machine: the real CDK CLI and SDKs talk to it.

- `start`, `find`, `stop`: a daemon on loopback, found again by its state directory; `EmulatorInfo` says where.
- `verify_deployment`: every resource of the deployed templates really exists.

Underneath are moto's services, made honest: a CloudFormation engine that fails on what it doesn't know
(`cloudformation`), an authorizer that judges every request by the deployed policies (`authorization`), and
SageMaker training jobs that run as processes (`training`). Only the daemon itself (`serve`) imports moto.

What it isolates are API calls, not processes. The root key lies in DIR/emulator.json, readable by its owner only, but
a job's processes run as the same user on this machine and could read it there, or the memory of the daemon; and a
session is known by its key and token, a root call by its key id: signatures are not recomputed. A job's code is
trusted here as far as anything that its user runs; on AWS the container and the account's boundary stand between.
"""

from trainyard.emulator.client import (
    deliveries,
    fail_jobs,
    job_attempts,
    reclaim_after,
    set_prices,
    set_quota,
    throttle,
)
from trainyard.emulator.daemon import find, start, stop
from trainyard.emulator.info import DEFAULT_STATE_DIR, EmulatorInfo
from trainyard.emulator.verify import DeploymentReport, verify_deployment

__all__ = [
    "DEFAULT_STATE_DIR",
    "DeploymentReport",
    "EmulatorInfo",
    "deliveries",
    "fail_jobs",
    "find",
    "job_attempts",
    "reclaim_after",
    "set_prices",
    "set_quota",
    "start",
    "stop",
    "throttle",
    "verify_deployment",
]
