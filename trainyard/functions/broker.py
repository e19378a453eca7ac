"""Lambda: the only way in which a tenant's job gets to SageMaker, by a queue or at once.

The tenant hands over a job's id and nothing else. The request is made here, from the job's record in S3 (which the
tenant can write, so all of it is checked) and from the tenant's contract and the released images (which it can't).
"""

import datetime
import json
import os
from functools import partial
from typing import Any

from trainyard.functions import broker_rules as rules
from trainyard.functions.broker_answers import ANSWER_SECONDS, ANSWER_TRIES, UnknownError, answered, difference
from trainyard.functions.broker_ledger import PREPAID, BusyError, Ledger
from trainyard.functions.broker_queue import QueueLedger, queue_up
from trainyard.functions.broker_roles import JobRoles, once_seen
from trainyard.functions.broker_rules import Refused
from trainyard.functions.job_meter import described
from trainyard.functions.training_request import keep_alive_seconds, stopping_condition, training_job_request

MAX_RECORD_BYTES = 4 * 2**20
"""Of a record, which takes some ten thousand bytes and a hundred more for each attempt."""


def handler(event: dict[str, Any], context: object) -> dict[str, Any]:
    """`event`: {"job_id": ...}; its newest attempt is submitted. Or {"sweep": true}: roles of jobs that are over
    go; with "ended", an attempt's name, its job's alone.

    Answers {"submitted": NAME, "already": whether it was before}, with an "uncapped" line where no price is known and
    a "warning" where a quota of the month is nearly spent, or {"refused": one line, "by": "rules" or "aws", "code":
    AWS's own}. With "may_run": true nothing was refused, and nobody can say yet whether the job was taken (an older
    launcher takes for submitted what isn't `refused`): asked again, the broker looks first. The last line of its log is
    the audit's, JSON.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    if isinstance(event, dict) and event.get("sweep"):
        return _sweep(event.get("ended"))
    try:
        answer = _submit(event.get("job_id") if isinstance(event, dict) else None)
    except Refused as refusal:
        answer = {"refused": str(refusal), "by": "rules"}
    except BusyError as busy:
        answer = {"refused": str(busy), "by": "aws", "code": "Busy"}
    except UnknownError as unknown:
        answer = {"refused": str(unknown), "by": "aws", "code": "Unknown", "may_run": True}
    except ClientError as error:
        told = error.response["Error"]
        text = " ".join(f"{error.operation_name}: {told.get('Code')}: {told.get('Message', '')}".split())
        answer = {"refused": text, "by": "aws", "code": str(told.get("Code"))}
    except BotoCoreError as error:
        answer = {"refused": " ".join(str(error).split()), "by": "aws", "code": type(error).__name__}
    asked = event.get("job_id") if isinstance(event, dict) else event
    print(json.dumps({"audit": "submission", "job_id": str(asked)[:100], **answer}))
    return {key: value for key, value in answer.items() if key != "request"}


def _submit(job_id: Any) -> dict[str, Any]:
    import boto3
    from botocore.config import Config

    settings = json.loads(os.environ["BROKER"])
    # By default no answer is waited for five times a minute, longer than this function may take.
    quick = Config(connect_timeout=5, read_timeout=ANSWER_SECONDS, retries={"total_max_attempts": ANSWER_TRIES})
    ssm, s3, sagemaker = (boto3.client(name, config=quick) for name in ("ssm", "s3", "sagemaker"))
    contract = json.loads(ssm.get_parameter(Name=settings["contract"])["Parameter"]["Value"])
    job_id = rules.check_job_id(job_id, contract)
    job = rules.check_record(_record(s3, contract["buckets"]["data"], job_id), job_id, contract)
    rules.check_image(job["image"], _released(ssm, contract), emulated=contract["emulated"])
    name, compute = job["name"], job["spec"]["compute"]
    shares = contract.get("shares")

    def make_role(queue: str = "") -> None:
        if contract.get("job_boundary"):
            JobRoles(boto3.client("iam", config=quick), contract).make(job_id, job, queue)

    request = training_job_request(
        job["spec"],
        contract,
        job_id=job_id,
        training_job_name=name,
        image=job["image"],
        channels=job["channels"],
        num_hosts=job["num_hosts"],
        volume_key=compute["instance_type"] in settings["volume_keys"],
        asked=job["asked"],
        spec_name=job["spec_name"],
    )
    if not shares and (there := described(sagemaker, name)) is not None:
        return {"submitted": _same(name, there, request), "already": True}
    longest = stopping_condition(compute)["MaxRuntimeInSeconds"] + keep_alive_seconds(compute)
    kept: dict[str, Any] = {
        "bucket": contract["buckets"]["checkpoints"],
        "tenant": contract["tenant"],
        "prices": settings["prices"],
        "gpus": settings.get("gpus", {}),
        "now": datetime.datetime.now(datetime.UTC),
        "follows_spot": contract.get("when_spent") == "stop",
    }
    if shares:
        batch = boto3.client("batch", config=quick)
        queued = QueueLedger(s3, sagemaker, batch=batch, **kept)
        return queue_up(job, contract, request, batch=batch, ledger=queued, longest_seconds=longest, prepare=make_role)
    ledger = Ledger(s3, sagemaker, **kept)
    entry = ledger.entry(compute["instance_type"], job["num_hosts"], longest)
    entry |= {"usd_per_hour": PREPAID} if compute.get("training_plan") else {}
    warnings: list[str] = []

    def check(jobs: dict[str, dict[str, Any]], holders: list[dict[str, Any]]) -> None:
        beside = rules.without_reused(holders, compute["instance_type"], job["num_hosts"])
        rules.check_quota(compute, job["num_hosts"], contract, beside)
        told = rules.check_budget(entry, jobs.values(), contract, ledger.month, now_seconds=ledger.now_seconds)
        warnings[:] = told

    ledger.promise(name, entry, check)

    there = answered(
        name,
        lambda: once_seen(lambda: sagemaker.create_training_job(**request), sagemaker.exceptions.ClientError),
        partial(described, sagemaker, name),
        prepare=make_role,
        give_up=partial(ledger.release, name, entry),
    )
    if there is not None:
        _same(name, there, request)
    return {"submitted": name, "already": False, "request": request, **rules.remarks(entry, warnings)}


def _same(name: str, there: dict[str, Any], request: dict[str, Any]) -> str:
    """The name of a job that is there; Refused where it isn't the one that is asked for."""
    if other := difference(there, request):
        raise Refused(
            f"job {name}: is there already, and not as its record says now: {other}; stop it (trainyard stop) or let "
            "it end, and resume it then"
        )
    return name


def _sweep(ended: Any = None) -> dict[str, Any]:
    """Removes roles of jobs that are over: by the clock of all, after a job's end (of attempt `ended`) its own.

    RuntimeError, after its line of the log, where the clock's look failed: the function's errors ring. What the look
    after an end misses the clock's makes up for, and nobody need hear of it.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    removed: list[str] = []
    try:
        removed, failed = _remove_roles(ended)
    except Refused:
        failed = []  # a job that nobody launched by trainyard has no role
    except (BotoCoreError, ClientError) as error:
        failed = [f"{type(error).__name__}: {' '.join(str(error).split())}"]
    answer = {"removed": removed, **({"failed": failed} if failed else {})}
    print(json.dumps({"audit": "roles", **answer}))
    if failed and ended is None:
        raise RuntimeError(f"roles that may have to go: {'; '.join(failed)}")
    return answer


def _remove_roles(ended: Any) -> tuple[list[str], list[str]]:
    import boto3

    contract = json.loads(
        boto3.client("ssm").get_parameter(Name=json.loads(os.environ["BROKER"])["contract"])["Parameter"]["Value"]
    )
    if not contract.get("job_boundary"):
        return [], []
    only = "" if ended is None else rules.job_of(ended, contract)
    return JobRoles(boto3.client("iam"), contract).sweep(boto3.client("sagemaker"), boto3.client("batch"), only)


def _record(s3: Any, bucket: str, job_id: str) -> Any:
    try:
        body = s3.get_object(Bucket=bucket, Key=f"jobs/{job_id}/record.json")["Body"].read(MAX_RECORD_BYTES + 1)
    except s3.exceptions.NoSuchKey:
        raise Refused(f"job {job_id}: there is no record of it in s3://{bucket}/jobs/{job_id}/") from None
    if len(body) > MAX_RECORD_BYTES:
        raise Refused(f"job {job_id}: its record is larger than {MAX_RECORD_BYTES:,} bytes; launch again")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"job {job_id}: its record is not JSON ({error})") from None


def _released(ssm: Any, contract: dict[str, Any]) -> list[str]:
    """Every image that the platform has released, the newest last: a resume goes on with the one that it began with."""
    pages = ssm.get_paginator("get_parameter_history").paginate(Name=contract["image_parameter"])
    return [item["Value"] for page in pages for item in page["Parameters"]]
