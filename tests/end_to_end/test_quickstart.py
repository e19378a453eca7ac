"""The first training job: what the quickstart claims, read from what it left."""

import json
import math
import signal
from pathlib import Path

import jsonschema
import pytest
from deployed_site import CHECKOUT, Site, processes_of, start_quickstart

from trainyard.launch.session import open_account
from trainyard.spec.job import load_job
from trainyard.spec.platform import load_environment

pytestmark = pytest.mark.end_to_end
JOB = load_job(CHECKOUT / "jobs/quickstart.yaml")


def test_report_follows_its_published_schema(site: Site) -> None:
    schema = json.loads((site.state_dir / "quickstart/report.schema.json").read_text())
    jsonschema.validate(site.report, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**site.report, "loss": {}}, schema)


def test_two_tenants_were_deployed_and_two_hosts_trained(site: Site) -> None:
    assert site.report["tenants"] == list(load_environment(CHECKOUT / "environments/local.yaml").tenants)
    assert len(site.report["tenants"]) == 2
    job = site.report["job"]
    assert (job["status"], job["steps"], job["hosts"]) == ("Completed", JOB.training.steps, 2)


def test_the_model_learned(site: Site) -> None:
    loss = site.report["loss"]
    assert len(loss["list"]) == JOB.training.steps
    assert all(math.isfinite(value) for value in loss["list"])
    assert loss["last"] < loss["first"]
    assert 0 < loss["validation_last"] < loss["unigram_entropy"]


def test_the_reclaim_fell_between_checkpoints_and_left_no_trace_in_the_losses(site: Site) -> None:
    reclaim, every = site.report["reclaim"], JOB.checkpoint.every_steps
    assert every is not None
    assert reclaim["step"] % every != 0
    assert 1 < reclaim["resumed_step"] <= reclaim["step"] + 1
    assert (reclaim["resumed_step"] - 1) % every == 0, "without a notice it goes on from a periodic checkpoint"
    assert reclaim["step"] - reclaim["resumed_step"] < every, "at most one interval is lost"
    assert reclaim["bitwise_equal"] is True


def test_the_other_tenant_was_denied_everything_and_the_owner_nothing(site: Site) -> None:
    isolation = site.report["isolation"]
    assert isolation["attempts"] == isolation["denied"] >= 10
    assert isolation["controls_allowed"] == len(isolation["details"]) - isolation["attempts"] > 0


def test_artifacts_are_in_the_tenants_bucket(site: Site) -> None:
    account = open_account(load_environment(CHECKOUT / "environments/local.yaml"))
    s3 = account.client("s3")
    for uri in site.report["artifacts"]:
        if uri.startswith("s3://"):
            bucket, _, key = uri.removeprefix("s3://").partition("/")
            assert s3.list_objects_v2(Bucket=bucket, Prefix=key)["KeyCount"] > 0, uri
        else:
            assert Path(uri.removeprefix("file://")).stat().st_size > 10_000
    assert any(uri.startswith("s3://") for uri in site.report["artifacts"])


def test_a_second_run_finds_what_the_killed_one_left(site: Site) -> None:
    assert "found running" in site.output
    assert "unchanged" in site.output
    assert "left by an earlier run" in site.output


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    process = start_quickstart(tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if "cdk bootstrap and deploy" in line:
            break
    assert processes_of(tmp_path), "nothing runs: this test would prove nothing"
    process.send_signal(signal.SIGINT)
    output = process.stdout.read()
    assert process.wait(timeout=300) == 130, output
    assert "Traceback" not in output
    assert processes_of(tmp_path) == []
