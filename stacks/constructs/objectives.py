"""What a tenant's jobs are promised, watched: burn-rate alarms, and a dashboard of every meter that jobs publish.

Both from `trainyard.spec.meters`, with the tenant's own limits where its entry has some (`trainyard.spec.objectives`).
The metrics are in the tenant's log streams, from where CloudWatch takes them; a job with meters.cloudwatch: false has
none, and an alarm without data is silent.
"""

import json
from typing import Any

from aws_cdk import Duration
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_sns as sns
from constructs import Construct

from stacks.naming import TenantScope
from trainyard.spec.meters import BURNS, BY_NAME, NAMESPACE, PANELS, PERIOD_MINUTES, Burn, Meter, Objective

_WIDTH, _HEIGHT = 8, 6
_COLUMNS = 24
"""A dashboard's width, in its own units."""


class TenantObjectives(Construct):
    """Two alarms for each objective, which tell the tenant's topic, and the tenant's dashboard."""

    def __init__(self, scope: Construct, construct_id: str, *, tenant: TenantScope, topic: sns.ITopic) -> None:
        super().__init__(scope, construct_id)
        tell, period = actions.SnsAction(topic), Duration.minutes(PERIOD_MINUTES)
        for objective in tenant.spec.objectives.applied():
            for burn in BURNS:
                self._alarm(tenant, objective, burn, period).add_alarm_action(tell)
        cloudwatch.CfnDashboard(self, "Dashboard", dashboard_body=json.dumps(_dashboard(tenant), sort_keys=True))

    def _alarm(self, tenant: TenantScope, objective: Objective, burn: Burn, period: Duration) -> cloudwatch.Alarm:
        bad, num_periods = burn.bad_periods(objective)
        comparisons = cloudwatch.ComparisonOperator
        return cloudwatch.Alarm(
            self,
            "".join(word.capitalize() for word in (*objective.name.split("-"), burn.name)),
            alarm_description=(
                f"Tenant {tenant.name}, {objective.name}: {bad} of the last {num_periods} periods of {PERIOD_MINUTES}"
                f" minutes were bad, {burn.rate_at_alarm(objective):.1f} times what {100 * objective.target:.12g}% of a"
                " month allows;"
                f" {objective.advice_at(tenant.environment.name)}. Which job:"
                f" trainyard jobs --tenant {tenant.name} --environment {tenant.environment.name}"
            ),
            metric=cloudwatch.Metric(
                namespace=NAMESPACE,
                metric_name=objective.meter.cloudwatch_name,
                dimensions_map={"Tenant": tenant.name},
                # Of several jobs the worst decides: a mean would hide it behind the others.
                statistic="Maximum" if objective.is_upper else "Minimum",
                period=period,
            ),
            threshold=objective.limit,
            comparison_operator=(
                comparisons.GREATER_THAN_THRESHOLD if objective.is_upper else comparisons.LESS_THAN_THRESHOLD
            ),
            evaluation_periods=num_periods,
            datapoints_to_alarm=bad,
            treat_missing_data=cloudwatch.TreatMissingData.NOT_BREACHING,
        )


def _dashboard(tenant: TenantScope) -> dict[str, Any]:
    """The body of a CloudWatch dashboard: a heading for each question, a graph for each meter, a line for each job
    and for each limit that is the tenant's own."""
    widgets: list[dict[str, Any]] = []
    top = 0
    for title, names in PANELS:
        text = {"type": "text", "properties": {"markdown": f"## {title}"}}
        widgets.append(text | {"x": 0, "y": top, "width": _COLUMNS, "height": 1})
        top += 1
        in_row = _COLUMNS // _WIDTH
        for index, name in enumerate(names):
            place = {"x": _WIDTH * (index % in_row), "y": top + _HEIGHT * (index // in_row)}
            widgets.append(_graph(tenant, BY_NAME[name]) | place | {"width": _WIDTH, "height": _HEIGHT})
        top += _HEIGHT * -(-len(names) // in_row)
    return {"widgets": widgets}


def _graph(tenant: TenantScope, meter: Meter) -> dict[str, Any]:
    metric = f'MetricName="{meter.cloudwatch_name}" Tenant="{tenant.name}"'
    own = [one for one in tenant.spec.objectives.own() if one.meter == meter]
    lines = [{"label": f"limit of {one.name}", "value": one.limit} for one in own]
    search = f"SEARCH('{{{NAMESPACE},Tenant,Job}} {metric}', 'Average', 60)"
    return {
        "type": "metric",
        "properties": {
            "title": meter.name.replace("_", " "),
            "region": tenant.environment.region,
            "view": "timeSeries",
            "metrics": [[{"expression": search, "label": "", "id": "jobs"}]],
            **({"annotations": {"horizontal": lines}} if lines else {}),
        },
    }
