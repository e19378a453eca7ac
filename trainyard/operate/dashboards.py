"""Prometheus' alert rules and Grafana's dashboard, both made from the list of meters.

scripts/make_dashboards                             # writes dashboards/; a test holds that they are what the list says
scripts/make_dashboards -e production --out FOLDER  # with the limits of that environment's tenants
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from trainyard.errors import InputError, TrainyardError
from trainyard.launch.place import environment_file
from trainyard.launch.session import checkout_root
from trainyard.spec.checkpoint_names import why_not_here
from trainyard.spec.meters import BURNS, BY_NAME, OBJECTIVES, PANELS, PERIOD_MINUTES, Burn, Meter, Objective
from trainyard.spec.platform import TenantSpec, load_environment

_DATASOURCE = {"name": "datasource", "type": "datasource", "query": "prometheus"}

_GRAFANA_UNITS = {"Seconds": "s", "Bytes": "bytes", "Bytes/Second": "Bps", "Count": "short", "Count/Second": "cps"}


def prometheus_rules(tenants: Mapping[str, TenantSpec] | None = None) -> str:
    """The file for Prometheus' rule_files, YAML.

    A tenant that has limits of its own has rules of its own, and everybody's leave it out.
    """
    rules = []
    for objective in OBJECTIVES:
        own = {
            name: one
            for name, spec in sorted((tenants or {}).items())
            for one in spec.objectives.own()
            if one.name == objective.name
        }
        others = f'{{tenant!~"{"|".join(own)}"}}' if own else ""
        rules += [_rule(objective, burn, others) for burn in BURNS]
        rules += [_rule(one, burn, f'{{tenant="{name}"}}', tenant=name) for name, one in own.items() for burn in BURNS]
    heading = "# Made by scripts/make_dashboards from trainyard/spec/meters.py: change that.\n"
    content = {"groups": [{"name": "trainyard", "interval": f"{PERIOD_MINUTES}m", "rules": rules}]}
    return heading + yaml.safe_dump(content, sort_keys=False, width=120)


def _rule(objective: Objective, burn: Burn, selector: str, *, tenant: str = "") -> dict[str, Any]:
    """`selector`: of whose jobs, in Prometheus' words. `tenant`: whose rule it is, which tells its alert from
    everybody's."""
    bad, num_periods = burn.bad_periods(objective)
    sign = ">" if objective.is_upper else "<"
    worst = "max" if objective.is_upper else "min"
    name = f"{objective.meter.prometheus_name}{selector}"
    whose = "{{ $labels.tenant }}/{{ $labels.training_job }}"
    if objective.meter.is_event:  # a job tells it once: what repeats does so among the tenant's jobs
        name, whose = f"{worst} by (tenant) ({name})", "{{ $labels.tenant }}"
    window = f"[{burn.window_minutes}m:{PERIOD_MINUTES}m]"
    labels = {"severity": "page" if burn.name == "fast" else "ticket", "objective": objective.name}
    return {
        "alert": f"Trainyard{_camel(objective.name)}{burn.name.capitalize()}Burn",
        "expr": f"sum_over_time(({name} {sign} bool {objective.limit:.15g}){window}) >= {bad}",
        "labels": labels | ({"tenant": tenant} if tenant else {}),
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
        "fieldConfig": {"defaults": {"unit": _grafana_unit(meter)}, "overrides": []},
        "targets": [
            {
                "refId": "A",
                "expr": f'{meter.prometheus_name}{{tenant=~"$tenant",training_job=~"$training_job"}}',
                "legendFormat": "{{tenant}}/{{training_job}}",
            }
        ],
    }


def _grafana_unit(meter: Meter) -> str:
    return "percentunit" if meter.is_share else _GRAFANA_UNITS.get(meter.unit, "none")


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


RULES, DASHBOARD = "prometheus-rules.yaml", "grafana.json"


def files(tenants: Mapping[str, TenantSpec] | None = None) -> dict[str, str]:
    """What dashboards/ holds; with tenants, by their limits."""
    return {RULES: prometheus_rules(tenants), DASHBOARD: grafana_dashboard()}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see scripts/make_dashboards --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files; the exit code."""
    parser = _Parser(prog="scripts/make_dashboards", description="Write Prometheus' rules and Grafana's dashboard.")
    parser.add_argument("--environment", "-e", metavar="NAME|PATH", help="whose tenants' own limits the rules have")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to; default, without -e: dashboards/")
    try:
        given = parser.parse_args(arguments)
        if given.environment and given.out is None:
            raise InputError(
                f"--environment {given.environment}: needs --out FOLDER, as dashboards/ has everybody's limits"
            )
        tenants = load_environment(environment_file(given.environment)).tenants if given.environment else None
        if given.out is not None and (why := why_not_here(given.out)) is not None:
            raise InputError(f"--out {given.out}: {why}")
        folder = given.out or checkout_root() / "dashboards"
        for name, text in files(tenants).items():
            _write(folder / name, text)
            print(f"written: {folder / name}")
    except TrainyardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {path}: can't be written ({error.strerror}); name another folder") from None


if __name__ == "__main__":
    sys.exit(main())
