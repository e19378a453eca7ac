"""What is drawn and alarmed: made from the list of meters, and current in dashboards/."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from trainyard.operate.dashboards import FILES
from trainyard.spec.meters import BURNS, BY_NAME, METERS, OBJECTIVES, PANELS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", sorted(FILES))
def test_the_files_are_what_the_list_says(name: str) -> None:
    assert (ROOT / "dashboards" / name).read_text() == FILES[name](), "run scripts/make_dashboards"


def test_every_meter_is_drawn_once_and_nothing_else() -> None:
    assert sorted(name for _, names in PANELS for name in names) == sorted(BY_NAME)


def test_queries_name_meters_alone() -> None:
    known = {meter.prometheus_name for meter in METERS}
    dashboard = json.loads(FILES["grafana.json"]())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    rules = [rule["expr"] for rule in yaml.safe_load(FILES["prometheus-rules.yaml"]())["groups"][0]["rules"]]
    assert len(panels) == len(METERS) and len(rules) == len(OBJECTIVES) * len(BURNS)
    assert {name for text in panels + rules for name in re.findall(r"trainyard_\w+", text)} <= known


def test_panels_lie_beside_each_other() -> None:
    taken = set()
    for panel in json.loads(FILES["grafana.json"]())["panels"]:
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
    alert_rule_test:
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


@pytest.mark.full
def test_prometheus_own_tool_accepts_and_tries_the_rules(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: apt-get install prometheus (or deselect this test by its name)"
    (tmp_path / "rules.yaml").write_text(FILES["prometheus-rules.yaml"]())
    advice = next(objective.advice for objective in OBJECTIVES if objective.name == "checkpoint-age")
    (tmp_path / "test.yaml").write_text(RULE_TEST.replace("ADVICE", advice))
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "test.yaml"]):
        found = subprocess.run([promtool, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout + found.stderr
