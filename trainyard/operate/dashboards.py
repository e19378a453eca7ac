"""Prometheus' alert rules and Grafana's dashboard, both made from the list of meters.

scripts/make_dashboards     # writes dashboards/; a test holds that they are what the list says
"""

import json
from typing import Any

import yaml

from trainyard.spec.meters import BURNS, BY_NAME, OBJECTIVES, PANELS, PERIOD_MINUTES, Burn, Meter, Objective

_DATASOURCE = {"name": "datasource", "type": "datasource", "query": "prometheus"}

_GRAFANA_UNITS = {"Seconds": "s", "Bytes": "bytes", "Bytes/Second": "Bps", "Count": "short", "Count/Second": "cps"}


def prometheus_rules() -> str:
    """The file for Prometheus' rule_files, YAML."""
    rules = [_rule(objective, burn) for objective in OBJECTIVES for burn in BURNS]
    heading = "# Made by scripts/make_dashboards from trainyard/spec/meters.py: change that.\n"
    content = {"groups": [{"name": "trainyard", "interval": f"{PERIOD_MINUTES}m", "rules": rules}]}
    return heading + yaml.safe_dump(content, sort_keys=False, width=120)


def _rule(objective: Objective, burn: Burn) -> dict[str, Any]:
    bad, num_periods = burn.bad_periods(objective)
    sign = ">" if objective.is_upper else "<"
    worst = "max" if objective.is_upper else "min"
    name, whose = objective.meter.prometheus_name, "{{ $labels.tenant }}/{{ $labels.training_job }}"
    if objective.meter.is_event:  # a job tells it once: what repeats does so among the tenant's jobs
        name, whose = f"{worst} by (tenant) ({name})", "{{ $labels.tenant }}"
    window = f"[{burn.window_minutes}m:{PERIOD_MINUTES}m]"
    return {
        "alert": f"Trainyard{_camel(objective.name)}{burn.name.capitalize()}Burn",
        "expr": f"sum_over_time(({name} {sign} bool {objective.limit:g}){window}) >= {bad}",
        "labels": {"severity": "page" if burn.name == "fast" else "ticket", "objective": objective.name},
        "annotations": {
            "summary": (
                f"{objective.name} of {whose}: bad in {{{{ $value }}}} of {num_periods} periods of {PERIOD_MINUTES} "
                "minutes"
            ),
            "description": objective.advice,
        },
    }


def grafana_dashboard() -> str:
    """The dashboard to import, JSON."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, names in PANELS:
        panels.append(_place({"type": "row", "title": title, "collapsed": False}, len(panels), top, 0, 24, 1))
        top += 1
        for index, name in enumerate(names):
            panel = _panel(BY_NAME[name])
            panels.append(_place(panel, len(panels), top + 8 * (index // 3), 8 * (index % 3), 8, 8))
        top += 8 * -(-len(names) // 3)
    content = {
        "title": "trainyard jobs",
        "uid": "trainyard-jobs",
        "schemaVersion": 39,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {
            "list": [_DATASOURCE, _variable("tenant", ""), _variable("training_job", '{tenant=~"$tenant"}')]
        },
        "panels": panels,
    }
    return json.dumps(content, indent=1) + "\n"


def _panel(meter: Meter) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": meter.name.replace("_", " "),
        "description": meter.help,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": _GRAFANA_UNITS.get(meter.unit, "none")}, "overrides": []},
        "targets": [
            {
                "refId": "A",
                "expr": f'{meter.prometheus_name}{{tenant=~"$tenant",training_job=~"$training_job"}}',
                "legendFormat": "{{tenant}}/{{training_job}}",
            }
        ],
    }


def _place(panel: dict[str, Any], number: int, top: int, left: int, width: int, height: int) -> dict[str, Any]:
    return panel | {"id": number + 1, "gridPos": {"x": left, "y": top, "w": width, "h": height}}


def _variable(label: str, selector: str) -> dict[str, Any]:
    return {
        "name": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": f"label_values({BY_NAME['step'].prometheus_name}{selector}, {label})",
        "includeAll": True,
        "multi": True,
        "refresh": 2,
    }


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("-"))


FILES = {"prometheus-rules.yaml": prometheus_rules, "grafana.json": grafana_dashboard}
"""What dashboards/ holds."""
