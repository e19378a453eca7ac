"""What is drawn and alarmed: made from the list of meters, and current in dashboards/."""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from trainer.observe.exposition import Exposition

from trainyard.operate import dashboards
from trainyard.operate.dashboards import DASHBOARD, RULES, files
from trainyard.spec.base import parse
from trainyard.spec.meters import BURNS, BY_NAME, METERS, OBJECTIVES, PANELS
from trainyard.spec.objectives import ObjectivesSpec
from trainyard.spec.platform import TenantSpec, load_environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", [RULES, DASHBOARD])
def test_the_files_are_what_the_list_says(name: str) -> None:
    assert (ROOT / "dashboards" / name).read_text() == files()[name], "run scripts/make_dashboards"


def test_every_meter_is_drawn_once_and_nothing_else() -> None:
    assert sorted(name for _, names in PANELS for name in names) == sorted(BY_NAME)


def test_queries_name_meters_alone() -> None:
    known = {meter.prometheus_name for meter in METERS}
    dashboard = json.loads(files()[DASHBOARD])
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    rules = [rule["expr"] for rule in yaml.safe_load(files()[RULES])["groups"][0]["rules"]]
    assert len(panels) == len(METERS) and len(rules) == len(OBJECTIVES) * len(BURNS)
    assert {name for text in panels + rules for name in re.findall(r"trainyard_\w+", text)} <= known


def test_what_a_job_tells_once_is_counted_over_all_jobs_of_a_tenant() -> None:
    """As CloudWatch's alarms do: of one job it could never happen twice in a window."""
    events = {objective.name for objective in OBJECTIVES if objective.meter.is_event}
    assert events == {"start", "queue", "launch", "recovery"}
    for rule in yaml.safe_load(files()[RULES])["groups"][0]["rules"]:
        is_event = rule["labels"]["objective"] in events
        assert ("max by (tenant) (trainyard_" in rule["expr"]) is is_event
        assert ("training_job" in rule["annotations"]["summary"]) is not is_event


def tenants() -> dict[str, TenantSpec]:
    """Of the local environment; acme has limits of its own."""
    found = load_environment(ROOT / "environments/local.yaml").tenants
    own = {"checkpoint_age": {"most_seconds": 3600}, "launch": {"most_seconds": 1234567}, "goodput": {"target": 0.97}}
    acme = found["acme"].model_copy(update={"objectives": parse(ObjectivesSpec, own, "acme")})
    return {**found, "acme": acme}


def test_a_tenant_with_limits_of_its_own_has_rules_of_its_own() -> None:
    assert files(load_environment(ROOT / "environments/local.yaml").tenants) == files(), "nobody there has any"
    rules = yaml.safe_load(files(tenants())[RULES])["groups"][0]["rules"]
    own = [rule for rule in rules if rule["labels"].get("tenant")]
    assert {rule["labels"]["tenant"] for rule in own} == {"acme"} and len(rules) == len(own) + len(OBJECTIVES) * 2
    told = {(rule["labels"]["objective"], rule["labels"]["severity"]): rule for rule in own}
    assert told.keys() == {
        (name, burn) for name in ("checkpoint-age", "launch", "goodput") for burn in ("page", "ticket")
    }
    age = told["checkpoint-age", "page"]
    assert age["expr"] == 'sum_over_time((trainyard_checkpoint_age_seconds{tenant="acme"} > bool 3600)[60m:5m]) >= 2'
    assert "older than an hour" in age["annotations"]["description"]
    assert "> bool 1234567)" in told["launch", "page"]["expr"], "no digit is lost"
    for rule in rules:
        is_others = rule not in own and rule["labels"]["objective"] in ("checkpoint-age", "launch", "goodput")
        assert ('{tenant!~"acme"}' in rule["expr"]) is is_others, "else a tenant is alarmed about by two limits"


def test_the_files_of_an_environment_go_where_they_are_asked_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dashboards.main(["--environment", "local", "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / RULES).read_text() == files()[RULES]
    (tmp_path / "file").write_text("")
    for words, told in (
        (["--environment", "nowhere", "--out", str(tmp_path)], "no such environment"),
        (["--environment", "local"], "--environment local: needs --out FOLDER"),
        (["--out", str(tmp_path / "file")], "can't be written"),
        (["--out", "~/rules"], "--out ~/rules: only a shell takes ~ for a home"),
        (["--out", "gs://bucket/rules"], "--out gs:/bucket/rules: must be a path of this machine"),
        (["--environment"], "expected one argument"),
        (["elsewhere"], "unrecognized arguments: elsewhere"),
    ):
        capsys.readouterr()
        assert dashboards.main(words) == 2
        said = capsys.readouterr().err
        assert told in said and said.count("\n") == 1, said


def test_a_share_is_drawn_in_percent_and_a_loss_is_not() -> None:
    panels = [panel for panel in json.loads(files()[DASHBOARD])["panels"] if panel["type"] == "timeseries"]
    units = {panel["title"]: panel["fieldConfig"]["defaults"]["unit"] for panel in panels}
    percents = {"throughput of plan", "goodput", "mfu", "gpu utilization", "gpu held back", "gpu memory share"}
    assert {title for title, unit in units.items() if unit == "percentunit"} == percents
    assert (units["loss"], units["step seconds"], units["peak device bytes"]) == ("none", "s", "bytes")


def test_panels_lie_beside_each_other() -> None:
    taken = set()
    for panel in json.loads(files()[DASHBOARD])["panels"]:
        place = panel["gridPos"]
        for cell in ((x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["h"])):
            spot = (cell[0], place["y"] + cell[1])
            assert spot not in taken and spot[0] < 24
            taken.add(spot)


def test_a_fast_burn_is_two_percent_of_a_months_budget_in_an_hour() -> None:
    fast, slow = BURNS
    month_minutes = 30 * 24 * 60
    assert fast.rate * fast.window_minutes / month_minutes == pytest.approx(0.02)
    assert slow.rate * slow.window_minutes / month_minutes == pytest.approx(0.05)
    goodput = next(objective for objective in OBJECTIVES if objective.name == "goodput")
    assert fast.bad_periods(goodput) == (9, 12)  # 14.4 x 5 % of 12
    assert goodput.is_bad(0.79) and not goodput.is_bad(0.8)


RULE_TEST = """
rule_files: [rules.yaml]
evaluation_interval: 5m
tests:
  - interval: 5m
    input_series:
      - series: 'trainyard_checkpoint_age_seconds{tenant="acme", training_job="late"}'
        values: '60x5 1300x10'
      - series: 'trainyard_checkpoint_age_seconds{tenant="acme", training_job="once"}'
        values: '60x5 1300 60x10'
      - series: 'trainyard_goodput{tenant="acme", training_job="late"}'
        values: '0.9x20'
      # Two jobs of a tenant, each with one slow launch: told once, for a period; a third one's is another tenant's.
      - series: 'trainyard_launch_seconds{tenant="acme", training_job="one", instance="a"}'
        values: '_x3 9000 stale'
      - series: 'trainyard_launch_seconds{tenant="acme", training_job="two", instance="b"}'
        values: '_x6 9000 stale'
      - series: 'trainyard_launch_seconds{tenant="globex", training_job="one", instance="c"}'
        values: '_x3 9000 stale'
    alert_rule_test:
      - eval_time: 20m
        alertname: TrainyardLaunchFastBurn
        exp_alerts: []
      - eval_time: 40m
        alertname: TrainyardLaunchFastBurn
        exp_alerts:
          - exp_labels: {severity: page, objective: launch, tenant: acme}
            exp_annotations:
              summary: "launch of acme: bad in 2 of 12 periods of 5 minutes"
              description: "LAUNCHES"
      - eval_time: 25m
        alertname: TrainyardCheckpointAgeFastBurn
        exp_alerts: []
      - eval_time: 40m
        alertname: TrainyardCheckpointAgeFastBurn
        exp_alerts:
          - exp_labels: {severity: page, objective: checkpoint-age, tenant: acme, training_job: late}
            exp_annotations:
              summary: "checkpoint-age of acme/late: bad in 3 of 12 periods of 5 minutes"
              description: "ADVICE"
      - eval_time: 60m
        alertname: TrainyardGoodputFastBurn
        exp_alerts: []
"""


TENANTS_TEST = """
rule_files: [tenants.yaml]
evaluation_interval: 5m
tests:
  - interval: 5m
    input_series:
      # Too old for everybody, and not for acme.
      - series: 'trainyard_checkpoint_age_seconds{tenant="acme", training_job="late"}'
        values: '1300x20'
      - series: 'trainyard_checkpoint_age_seconds{tenant="globex", training_job="late"}'
        values: '1300x20'
    promql_expr_test:
      - expr: count by (tenant) (ALERTS{alertname="TrainyardCheckpointAgeFastBurn"})
        eval_time: 60m
        exp_samples: [{labels: '{tenant="globex"}', value: 1}]
  - interval: 5m
    input_series:
      - series: 'trainyard_checkpoint_age_seconds{tenant="acme", training_job="late"}'
        values: '3700x20'
      - series: 'trainyard_checkpoint_age_seconds{tenant="globex", training_job="late"}'
        values: '3700x20'
    promql_expr_test:
      - expr: count by (tenant) (ALERTS{alertname="TrainyardCheckpointAgeFastBurn"})
        eval_time: 60m
        exp_samples: [{labels: '{tenant="acme"}', value: 1}, {labels: '{tenant="globex"}', value: 1}]
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def debians(program: str) -> str:
    found = shutil.which(program)
    assert found, f"{program} is missing: apt-get install prometheus (or deselect this test by its name)"
    return found


@pytest.mark.full
def test_a_real_prometheus_scrapes_a_job_and_reads_the_rules(tmp_path: Path) -> None:
    """The job's port as a scrape target: every meter arrives under its name, with whose it is."""
    server, job_port, port = debians("prometheus"), free_port(), free_port()
    exposition = Exposition(tmp_path, tenant="acme", job="tiny", port=job_port)
    row: dict[str, Any] = {}
    for meter in METERS:
        place = row
        for key in meter.path[:-1]:
            place = place.setdefault(key, {})
        place[meter.path[-1]] = 7.5
    exposition.publish(row)
    rules = ROOT / "dashboards/prometheus-rules.yaml"
    targets = [{"job_name": "trainyard", "static_configs": [{"targets": [f"127.0.0.1:{job_port}"]}]}]
    config = {"global": {"scrape_interval": "1s"}, "rule_files": [str(rules)], "scrape_configs": targets}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    options = [f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [server, f"--config.file={tmp_path / 'prometheus.yml'}", *options], stdout=log, stderr=log
        )

    def asked(path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=10) as answer:
            return json.load(answer)["data"]

    try:
        samples: dict[str, Any] = {}
        deadline = time.monotonic() + 60
        while len(samples) < len(METERS):
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.2)
            with contextlib.suppress(OSError):
                found = asked("query?query=%7Btenant%3D%22acme%22%7D")["result"]
                samples = {one["metric"]["__name__"]: one for one in found}
        assert samples.keys() == {meter.prometheus_name for meter in METERS}
        assert {one["value"][1] for one in samples.values()} == {"7.5"}
        assert {one["metric"]["training_job"] for one in samples.values()} == {"tiny"}
        (group,) = asked("rules")["groups"]
        assert len(group["rules"]) == len(OBJECTIVES) * len(BURNS)
        assert all(rule["health"] in ("ok", "unknown") for rule in group["rules"])
    finally:
        process.terminate()
        process.wait(30)
        exposition.close()


@pytest.mark.full
def test_prometheus_own_tool_accepts_and_tries_the_rules(tmp_path: Path) -> None:
    promtool = debians("promtool")
    (tmp_path / "rules.yaml").write_text(files()[RULES])
    advice = {objective.name: objective.advice for objective in OBJECTIVES}
    (tmp_path / "tenants.yaml").write_text(files(tenants())[RULES])
    asked = RULE_TEST.replace("ADVICE", advice["checkpoint-age"]).replace("LAUNCHES", advice["launch"])
    (tmp_path / "test.yaml").write_text(asked)
    (tmp_path / "tenants-test.yaml").write_text(TENANTS_TEST)
    tried = (["test", "rules", "test.yaml"], ["test", "rules", "tenants-test.yaml"])
    for command in (["check", "rules", "rules.yaml", "tenants.yaml"], *tried):
        found = subprocess.run([promtool, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout + found.stderr
