"""A sweep of a tenant with a broker, on the deployed platform: its quota, one budget, and a loser stopped early."""

import json
from typing import Any

import pytest
from deployed_site import Site, access, copy_data

pytestmark = [pytest.mark.end_to_end, pytest.mark.full, pytest.mark.timeout(3600)]

STEPS = 600
# One machine a trial: the queue has two. So many steps that the trials, not the looks at them, take the time.
TRIAL = (
    *("tenant=globex", "name=swept", "compute.instance_count=1", "compute.spot=false", "compute.max_hours=0.5"),
    *(f"training.steps={STEPS}", "training.global_batch_size=8", "parallelism=auto", "checkpoint.every_steps=200"),
)
RATES = ("4e-3", "1e-7", "1e-6")
SWEEP = (
    *("sweep", "jobs/quickstart.yaml", "--over", f"training.learning_rate={','.join(RATES)}", "--json"),
    *(word for setting in TRIAL for word in ("--set", setting)),
)


def jobs_of(tenant: str) -> list[dict[str, Any]]:
    """The trials' training jobs, as SageMaker has them."""
    sagemaker = access(tenant).launcher.client("sagemaker")
    found = sagemaker.list_training_jobs(NameContains=f"{tenant}-swept-")["TrainingJobSummaries"]
    return [sagemaker.describe_training_job(TrainingJobName=row["TrainingJobName"]) for row in found]


def most_at_once(jobs: list[dict[str, Any]]) -> int:
    """Trials that held a machine at the same moment."""
    starts = [job["CreationTime"] for job in jobs]
    return max(sum(job["CreationTime"] <= at < job["TrainingEndTime"] for job in jobs) for at in starts)


def test_trials_go_by_the_broker_under_quota_and_budget_and_the_loser_is_stopped(site: Site) -> None:
    globex = access("globex")
    copy_data(access("acme"), globex)

    dear = site.trainyard(*SWEEP, "--name", "dear", "--max-cost-usd", "0.01")
    assert (dear.returncode, dear.stderr.count("\n")) == (2, 1), dear.stderr
    assert "3 trials are planned at" in dear.stderr and jobs_of("globex") == [], "nothing was started"

    # Three at once are asked for, the queue has room for two: the third waits, and none is lost.
    done = site.trainyard(*SWEEP, "--name", "rates", "--parallel", "3", "--max-cost-usd", "200")
    assert done.returncode == 0, done.stderr
    assert "trial 3 waits: " in done.stderr and "over the quota of tenant globex" in done.stderr, done.stderr
    table = json.loads(done.stdout)
    best, loser, last = table["trials"]
    assert [line["settings"] for line in table["trials"]] == [{"training.learning_rate": rate} for rate in RATES]
    assert (loser["state"], loser["why"].partition(":")[0]) == ("Stopped", "loser"), loser
    assert 0 < loser["step"] < STEPS and loser["value_at_equal_step"] > best["value_at_equal_step"]
    assert best["state"] == "Completed" and best["step"] == STEPS and table["best"]["job_id"] == best["job_id"]
    # It hardly learns either, and is judged by the first one's curve; a fast machine has it done before a look.
    assert last["state"] == "Completed" or last["why"].startswith("loser: loss"), last
    assert table["usd"] == pytest.approx(sum(line["usd"] for line in table["trials"])) and 0 < table["usd"] < 200
    assert all(line["units_per_second"] > 0 for line in table["trials"])

    jobs = jobs_of("globex")
    assert {job["TrainingJobName"] for job in jobs} == {line["job_id"] for line in table["trials"]}
    assert most_at_once(jobs) == 2
    (stopped,) = [job for job in jobs if job["TrainingJobName"] == loser["job_id"]]
    assert stopped["TrainingJobStatus"] == "Stopped"
    s3, bucket = globex.launcher.client("s3"), globex.contract.buckets.checkpoints
    kept = s3.list_objects_v2(Bucket=bucket, Prefix=f"jobs/{loser['job_id']}/")["Contents"]
    assert any(item["Key"].endswith("/COMMITTED") for item in kept), "the loser was saved, and can be resumed"
    log = globex.launcher.client("logs").filter_log_events(logGroupName=globex.contract.log_group)["events"]
    told = [json.loads(event["message"]) for event in log if '"submission"' in event["message"]]
    submitted = {one.get("submitted") for one in told}
    assert {line["job_id"] for line in table["trials"]} <= submitted, "each by the broker, and by nobody else"

    shown = site.trainyard("sweep", "--show", "rates", "--json")
    assert shown.returncode == 0 and json.loads(shown.stdout)["best"] == table["best"], shown.stderr
