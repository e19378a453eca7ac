"""Spending that is out of the ordinary, noticed by AWS's own model long before a budget is full."""

import json

from aws_cdk import aws_ce as ce
from constructs import Construct

from stacks.naming import TAG_COST_CENTER, TAG_ENVIRONMENT, TAG_TENANT, TenantScope


class SpendingWatch(Construct):
    """An anomaly monitor over everything that carries the tenant's tag, and a daily mail with what it found.

    Only for a budget with `anomaly_usd`, and only in an organization's management account: AWS refuses a monitor over
    a cost allocation tag in a member account, and the deployment with it.

    Daily, because AWS sends single findings to topics alone, and bills come in a few times a day anyway. The tag counts
    once it is activated as a cost allocation tag.
    """

    def __init__(self, scope: Construct, construct_id: str, *, tenant: TenantScope, anomaly_usd: float) -> None:
        super().__init__(scope, construct_id)
        budget = tenant.spec.budget
        name = f"trainyard-{tenant.environment.name}-{tenant.name}"
        tagged = {"Tags": {"Key": TAG_TENANT, "Values": [tenant.name], "MatchOptions": ["EQUALS"]}}
        impact = {
            "Dimensions": {
                "Key": "ANOMALY_TOTAL_IMPACT_ABSOLUTE",
                "MatchOptions": ["GREATER_THAN_OR_EQUAL"],
                "Values": [plain_number(anomaly_usd)],
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


def plain_number(value: float) -> str:
    """Without an exponent, which Cost Explorer doesn't read, and without needless zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
