"""The live meter on the deployed platform: with its own role it finds a job and ends it with a checkpoint."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployed_site import CHECKOUT, Site, access, wait_until

from trainyard import emulator
from trainyard.launch import watch
from trainyard.launch.backend import LogLine
from trainyard.launch.place import TenantAccess

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(1800), pytest.mark.slow]
DEADLINE_SECONDS = 600.0
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def long_job(folder: Path) -> str:
    """Far too long to end by itself, and without a checkpoint before it is told to end."""
    content = {
        "name": "metered",
        "tenant": "globex",
        "model": {"config": MODEL},
        "data": {"train": [{"path": "tenant://sets/text.txt", "format": "text"}], "sequence_length": 64},
        "training": {"steps": 100_000, "global_batch_size": 4, "learning_rate": 1e-3, "precision": "fp32"},
        "checkpoint": {"every_steps": 100_000},
        "compute": {"backend": "sagemaker", "instance_type": "ml.p5.4xlarge", "max_hours": 1},
    }
    path = folder / "metered.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def news(globex: TenantAccess, job_id: str) -> Iterator[tuple[watch.Status, list[LogLine]]]:
    """What `trainyard watch` would print, until the job has ended: looked at here, for the command's own start, again
    and again, would take the job's processor."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    for status, lines in watch.watch(globex.place.store, globex.place.backend, job_id, sleep=time.sleep):
        yield status, lines
        assert time.monotonic() < deadline, status.state


def wait_for_line(globex: TenantAccess, job_id: str, words: str) -> None:
    """An end of the job before that ends the test."""
    for status, lines in news(globex, job_id):
        if any(words in line.text for line in lines):
            return
        assert not status.finished, status.record.attempt.failure
    raise AssertionError(f"{job_id} is not known")


class Meter:
    """The tenant's function, called as its schedule and the ends of jobs call it."""

    def __init__(self, globex: TenantAccess) -> None:
        self._lambda = globex.account.client("lambda")
        (self._name,) = (
            item["FunctionName"]
            for item in self._lambda.list_functions(MaxItems=1000)["Functions"]
            if item.get("Description", "").startswith("Meters") and item["Description"].endswith(" globex cost")
        )

    def looks_at_the_end_of(self, site: Site, job_id: str) -> list[dict[str, Any]]:
        """What it found as it was called by the job's end, and not by the clock or from here."""
        return [
            json.loads(item["payload"])
            for item in emulator.deliveries(site.info)
            if item["function"].endswith(f":{self._name}")
            and item.get("event", {}).get("detail", {}).get("TrainingJobName") == job_id
            and item.get("payload")
            and not item.get("error")
        ]

    def look(self) -> dict[str, Any]:
        answer = self._lambda.invoke(FunctionName=self._name, Payload=b"{}")
        assert "FunctionError" not in answer, answer["Payload"].read()
        return dict(json.load(answer["Payload"]))

    def deploy(self, **budget: Any) -> None:
        """With another budget, as a deployment would."""
        settings = json.loads(self._variables()["METER"])
        settings["budget"] |= budget
        self._set({"METER": json.dumps(settings)})

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """The site is the whole session's: a meter left at no budget would end other tests' jobs."""
        before = self._variables()
        try:
            yield
        finally:
            self._set(before)

    def _variables(self) -> dict[str, str]:
        return dict(self._lambda.get_function_configuration(FunctionName=self._name)["Environment"]["Variables"])

    def _set(self, variables: dict[str, str]) -> None:
        self._lambda.update_function_configuration(FunctionName=self._name, Environment={"Variables": variables})


def test_a_spent_budget_ends_a_job_with_a_checkpoint(site: Site, tmp_path: Path) -> None:
    globex = access("globex")
    text = (CHECKOUT / "LICENSE").read_bytes()
    globex.launcher.client("s3").put_object(Bucket=globex.contract.buckets.data, Key="sets/text.txt", Body=text)
    launched = site.trainyard("launch", long_job(tmp_path), "--force", "--json")
    assert launched.returncode == 0, launched.stderr
    job_id = json.loads(launched.stdout)["job_id"]
    wait_for_line(globex, job_id, "step=5 ")
    assert "step=5 " in site.trainyard("logs", job_id).stdout

    meter = Meter(globex)
    first = meter.look()
    assert (first["stopped"], first["unpriced"]) == ([], [])
    # Of so much a fast start is none, rounded.
    assert 0 < float(first["usd"]) < 2000 and 0 <= first["used_percent"] < 100
    with meter.as_it_was():
        meter.deploy(monthly_usd=1e-6, when_spent="finish")
        assert meter.look()["stopped"] == [], "what runs may finish"
        meter.deploy(monthly_usd=1e-6, when_spent="stop")
        spent = meter.look()
    assert meter.look()["used_percent"] < 100, "the budget is what it was"
    assert spent["stopped"] == [job_id] and spent["used_percent"] > 100

    for _ in news(globex, job_id):
        pass  # until it has ended
    status = json.loads(site.trainyard("status", job_id, "--json").stdout)
    assert (status["finished"], status["state"]) == (True, "Stopped"), status["failure"]
    looks = wait_until(lambda: meter.looks_at_the_end_of(site, job_id), pause_seconds=0.5)
    assert float(looks[0]["usd"]) > float(first["usd"]), "an end is looked at at once"
    kept = json.loads(site.trainyard("checkpoints", job_id, "--json").stdout)
    assert [item["committed"] for item in kept] == [True] and kept[0]["step"] >= 5, "it saved as it was stopped"
    told = json.loads(site.trainyard("cost", "--by", "job", "--tenant", "globex", "--json").stdout)
    (group,) = (item for item in told["groups"] if item["key"] == job_id)
    assert float(group["usd"]) > 0 and float(group["gpu_hours"]) > 0
    published = globex.account.client("cloudwatch").list_metrics(Namespace="trainyard/globex")["Metrics"]
    assert {f"{name}-local" for name in ("BudgetUsedPercent", "SpentUsd", "GpuHours")} <= {
        item["MetricName"] for item in published
    }
    watched = site.trainyard("watch", job_id)
    assert watched.returncode == 1 and f"{job_id}: Stopped" in watched.stderr
    report = tmp_path / "report.html"
    assert site.trainyard("report", job_id, "--out", str(report)).returncode == 0
    assert 'aria-label="loss"' in report.read_text(encoding="utf-8")
