"""The tenant's broker, which alone may hand a job to SageMaker: asked by a job's id, it reads the rest itself."""

import json
from typing import TYPE_CHECKING

from trainyard.errors import AwsAwayError, AwsRefusedError, InputError
from trainyard.launch.aws import advice_for, aws_errors
from trainyard.launch.backend import Say, say_nothing

if TYPE_CHECKING:
    from trainyard.launch.session import Account
    from trainyard.spec.platform import TenantContract

TIME_LIMIT_SECONDS = 120
"""The function's own (stacks/constructs/broker.py), which its answer is waited for a little longer than."""


def ask_broker(launcher: "Account", contract: "TenantContract", job_id: str, say: Say = say_nothing) -> None:
    """Have the newest attempt of a written record submitted; twice is no error and starts nothing twice. What the
    broker warns of is said: a quota that is nearly spent, a type whose price it doesn't know.

    InputError where a rule refuses it, AwsRefusedError where AWS does, or where the broker can't be called;
    AwsAwayError where it gave no answer of its own, or got none: the job may run.
    """
    from botocore.config import Config

    from trainyard.launch.session import client_config

    config = client_config().merge(Config(read_timeout=TIME_LIMIT_SECONDS + 10))
    function = launcher.session.client("lambda", config=config)
    where = f"broker {contract.broker} for job {job_id}"
    with aws_errors("calling", where, "run `trainyard doctor` for the tenant"):
        called = function.invoke(FunctionName=contract.broker, Payload=json.dumps({"job_id": job_id}).encode())
        text = called["Payload"].read()
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or called.get("FunctionError"):
        told = answer.get("errorMessage") if isinstance(answer, dict) else text[:200].decode(errors="replace")
        raise AwsAwayError(  # it may have submitted the job before (its time was over, say): nothing was refused
            f"{where}: it failed: {' '.join(str(told).split())}; its log is in log group {contract.log_group}"
        )
    if answer.get("may_run"):
        raise AwsAwayError(f"{where}: {answer['refused']}")
    if "refused" in answer:
        if answer.get("by") == "rules":
            raise InputError(f"{answer['refused']} (tenant {contract.tenant}'s broker)")
        if answer.get("code") == "Busy":  # the broker's own word: AWS refused nothing
            raise AwsRefusedError(f"{where}: {answer['refused']}")
        advice = advice_for(str(answer.get("code")))
        raise AwsRefusedError(f"{where}: AWS refused: {answer['refused']}" + (f"; {advice}" if advice else ""))
    for remark in ("warning", "uncapped"):
        if answer.get(remark):
            say(f"warning: {' '.join(str(answer[remark]).split())}")
