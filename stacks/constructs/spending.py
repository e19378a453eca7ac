"""Spending that is out of the ordinary, noticed by AWS's own model long before a budget is full."""

import json

from aws_cdk import aws_ce as ce
from constructs import Construct

from stacks.naming import TAG_COST_CENTER, TAG_ENVIRONMENT, TAG_TENANT, TenantScope

DEFAULT_FRACTION = 0.1
"""Of the monthly budget: an anomaly smaller than that is noise, one of that size leaves nine tenths to act upon."""


class SpendingWatch(Construct):
    """An anomaly monitor over everything that carries the tenant's tag, and a daily mail with what it found.

    Daily, because AWS sends single findings to topics alone, and bills come in a few times a day anyway. The tag counts
    once it is activated as a cost allocation tag.
    """

    def __init__(self, scope: Construct, construct_id: str, *, tenant: TenantScope) -> None:
        super().__init__(scope, construct_id)
        budget = tenant.spec.budget
        name = f"trainyard-{tenant.environment.name}-{tenant.name}"
        tagged = {"Tags": {"Key": TAG_TENANT, "Values": [tenant.name], "MatchOptions": ["EQUALS"]}}
        impact = {
            "Dimensions": {
                "Key": "ANOMALY_TOTAL_IMPACT_ABSOLUTE",
                "MatchOptions": ["GREATER_THAN_OR_EQUAL"],
                "Values": [f"{budget.anomaly_usd or budget.monthly_usd * DEFAULT_FRACTION:g}"],
            }
        }
        tags = {
            TAG_COST_CENTER: tenant.spec.cost_center,
            TAG_ENVIRONMENT: tenant.environment.name,
            TAG_TENANT: tenant.name,
        }
        monitor = ce.CfnAnomalyMonitor(
            self,
            "Monitor",
            monitor_name=name,
            monitor_type="CUSTOM",
            monitor_specification=json.dumps(tagged),
            resource_tags=[ce.CfnAnomalyMonitor.ResourceTagProperty(key=key, value=tags[key]) for key in tags],
        )
        ce.CfnAnomalySubscription(
            self,
            "Mail",
            subscription_name=name,
            frequency="DAILY",
            monitor_arn_list=[monitor.attr_monitor_arn],
            subscribers=[
                ce.CfnAnomalySubscription.SubscriberProperty(type="EMAIL", address=address) for address in budget.notify
            ],
            threshold_expression=json.dumps(impact),
            resource_tags=[ce.CfnAnomalySubscription.ResourceTagProperty(key=key, value=tags[key]) for key in tags],
        )
