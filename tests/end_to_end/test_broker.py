"""A tenant with a broker, on the deployed platform: its job runs, and its people get past the broker in no way."""

import json
from typing import Any

import pytest
from botocore.exceptions import ClientError
from deployed_site import Site, access, copy_data

from trainyard.launch.place import TenantAccess
from trainyard.launch.queue_backend import backend_of

# The first of the folder: the quickstart's time counts as its own.
pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(3600), pytest.mark.slow]
# Far too long to end by itself: it must hold its instances until the test stops it.
LONG = ("training.steps=5000", "training.schedule.warmup_steps=1", "checkpoint.every_steps=5000", "compute.spot=false")


def refused(call: Any) -> str:
    with pytest.raises(ClientError) as caught:
        call()
    assert caught.value.response["Error"]["Code"].startswith("AccessDenied"), caught.value
    return str(caught.value)


def test_a_brokers_job_is_the_records_job_and_nobody_gets_past_the_broker(site: Site) -> None:
    acme, globex = access("acme"), access("globex")
    assert (acme.contract.broker, globex.contract.broker) == ("", "trainyard-local-globex-broker")
    copy_data(acme, globex)
    overrides = [word for value in (*LONG, "tenant=globex", "name=brokered") for word in ("--set", value)]
    done = site.trainyard("launch", "jobs/quickstart.yaml", "--json", *overrides)
    assert done.returncode == 0, done.stderr
    job_id = str(json.loads(done.stdout)["job_id"])
    described = globex.launcher.client("sagemaker").describe_training_job(TrainingJobName=job_id)
    request = backend_of(globex.launcher, globex.contract).request(globex.place.store.read(job_id).record)
    for key in set(request) - {"Tags", "HyperParameters"}:
        assert described[key] == request[key], key
    log = globex.launcher.client("logs").filter_log_events(logGroupName=globex.contract.log_group)["events"]
    (audit,) = [json.loads(event["message"]) for event in log if '"submission"' in event["message"]]
    assert (audit["submitted"], audit["request"]) == (job_id, request)

    # Its queue is full now: what would go over is refused, by the launcher's own look and by the broker's.
    again = site.trainyard("launch", "jobs/quickstart.yaml", *overrides)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1), again.stderr
    assert "over the quota of tenant globex" in again.stderr
    forge(globex, job_id)

    name = f"{job_id}-r9"
    said = refused(
        lambda: globex.launcher.client("sagemaker").create_training_job(**{**request, "TrainingJobName": name})
    )
    assert "explicit deny in a permissions boundary" in said
    for caller, function in ((acme, globex.contract.broker), (globex, "trainyard-local-acme-broker")):
        refused(lambda c=caller, f=function: c.launcher.client("lambda").invoke(FunctionName=f, Payload=b"{}"))
    assert site.trainyard("stop", job_id, "--wait").returncode == 0
    resume_with_other_settings(site, globex, job_id)


def resume_with_other_settings(site: Site, globex: TenantAccess, job_id: str) -> None:
    """Each attempt goes on reading the spec that it was started with: SageMaker may bring it again."""
    done = site.trainyard("resume", job_id, "--set", "checkpoint.keep_last=7")
    assert done.returncode == 0, done.stderr
    s3, sagemaker = globex.launcher.client("s3"), globex.launcher.client("sagemaker")
    kept = []
    for name in (job_id, f"{job_id}-r2"):
        channels = sagemaker.describe_training_job(TrainingJobName=name)["InputDataConfig"]
        (place,) = [one["DataSource"]["S3DataSource"]["S3Uri"] for one in channels if one["ChannelName"] == "job"]
        _, _, bucket, prefix = place.split("/", 3)
        spec = json.loads(s3.get_object(Bucket=bucket, Key=f"{prefix}resolved_job.json")["Body"].read())["spec"]
        kept.append(spec["checkpoint"]["keep_last"])
    assert kept == [3, 7]
    # To its end: the next test's job needs the quota that this one holds.
    assert site.trainyard("stop", job_id, "--wait").returncode == 0


def forge(globex: TenantAccess, job_id: str) -> None:
    """The tenant rewrites its record, as it may, and asks its broker: another tenant's bucket, more machines."""
    s3, bucket, key = globex.launcher.client("s3"), globex.contract.buckets.data, f"jobs/{job_id}/record.json"
    proper = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    for change, words in (
        ({"attempts": [{"number": 1, "training_job_name": "acme-llama-1", "created_at": ""}]}, "not globex-"),
        ({"channels": [{"name": "x", "kind": "s3", "location": "s3://acme/x/", "uri": "x"}]}, "outside of tenant"),
        ({"attempts": [{"number": 2, "training_job_name": f"{job_id}-r2", "created_at": ""}]}, "over the quota"),
    ):
        s3.put_object(Bucket=bucket, Key=key, Body=json.dumps({**json.loads(proper), **change}).encode())
        asked = json.dumps({"job_id": job_id}).encode()
        answer = globex.launcher.client("lambda").invoke(FunctionName=globex.contract.broker, Payload=asked)
        assert words in json.load(answer["Payload"])["refused"]
    s3.put_object(Bucket=bucket, Key=key, Body=proper)
