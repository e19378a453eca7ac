"""Who hears when something is wrong: an encrypted topic with alarms and failed jobs on it, and the budget's mails."""

from aws_cdk import Annotations, Duration
from aws_cdk import aws_budgets as budgets
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from constructs import Construct

from stacks.constructs.job_events import named, state_changes
from stacks.constructs.storage import TenantFileSystem
from stacks.naming import TAG_TENANT, TenantScope

FULL_FRACTION = 0.1
"""Below this share of free space somebody must clean up: Lustre slows down before it is full."""

REJECTED_PER_PERIOD = 100
"""Connections that the security groups refused in five minutes: stray packets are few, a shut EFA or Lustre port is
thousands."""


class TenantAlarms(Construct):
    """The tenant's topic and what publishes to it."""

    topic: sns.Topic
    budget: budgets.CfnBudget

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        tenant: TenantScope,
        key: kms.IKey,
        file_system: TenantFileSystem,
        flows: logs.ILogGroup,
        operator: iam.IRole,
    ) -> None:
        super().__init__(scope, construct_id)
        self.topic = self._make_topic(tenant, key)
        action = actions.SnsAction(self.topic)
        for alarm in (self._storage_alarm(tenant, file_system), self._rejection_alarm(tenant, flows)):
            alarm.add_alarm_action(action)
            alarm.add_ok_action(action)
        self._tell_failed_jobs(tenant)
        self._tell_broken_glass(tenant, operator)
        self.budget = TenantBudget(self, "Budget", tenant=tenant).resource

    def _tell_failed_jobs(self, tenant: TenantScope) -> None:
        rule = events.Rule(
            self,
            "FailedJobs",
            description=f"Training jobs of tenant {tenant.name} that failed",
            event_pattern=state_changes(["Failed"], named(tenant)),
        )
        self._tell("FailedJobs", rule)

    def _tell_broken_glass(self, tenant: TenantScope, operator: iam.IRole) -> None:
        """Each time that somebody becomes the operator, or tries. EventBridge hears of it from CloudTrail: there must
        be a trail of the account's management events in this region, and STS must have been asked in this region."""
        rule = events.Rule(
            self,
            "BrokenGlass",
            description=f"Somebody became the operator of tenant {tenant.name}, or tried",
            event_pattern=events.EventPattern(
                detail_type=["AWS API Call via CloudTrail"],
                detail={
                    "eventSource": ["sts.amazonaws.com"],
                    "eventName": ["AssumeRole"],
                    "requestParameters": {"roleArn": [operator.role_arn]},
                },
            ),
        )
        resource = rule.node.default_child
        assert isinstance(resource, events.CfnRule)
        # AssumeRole counts as a read, and rules in the ordinary state are not told of reads.
        resource.state = "ENABLED_WITH_ALL_CLOUDTRAIL_MANAGEMENT_EVENTS"
        self._tell("BrokenGlass", rule)

    def _tell(self, sid: str, rule: events.Rule) -> None:
        # The target would let every rule of every account publish here; by its ARN alone it grants nothing.
        rule.add_target(targets.SnsTopic(sns.Topic.from_topic_arn(self, f"TopicOf{sid}", self.topic.topic_arn)))
        # That an ARN which deployment resolves is of the own account the CDK can't know, and warns of.
        unresolved = "@aws-cdk/aws-events:ruleUnresolvedEnvironment"
        Annotations.of(rule).acknowledge_warning(unresolved, "The topic is the own stack's.")
        self.topic.add_to_resource_policy(
            iam.PolicyStatement(
                sid=sid,
                principals=[iam.ServicePrincipal("events.amazonaws.com")],
                actions=["sns:Publish"],
                resources=[self.topic.topic_arn],
                conditions={"ArnEquals": {"aws:SourceArn": rule.rule_arn}},
            )
        )

    def _make_topic(self, tenant: TenantScope, key: kms.IKey) -> sns.Topic:
        topic = sns.Topic(
            self, "Topic", display_name=f"trainyard {tenant.environment.name} {tenant.name}", master_key=key
        )
        topic.add_to_resource_policy(
            iam.PolicyStatement(
                sid="Alarms",
                principals=[iam.ServicePrincipal("cloudwatch.amazonaws.com")],
                actions=["sns:Publish"],
                resources=[topic.topic_arn],
                conditions={
                    "StringEquals": {"aws:SourceAccount": tenant.environment.account},
                    # Of the tenant's own stacks: generated names begin with the stack's.
                    "ArnLike": {"aws:SourceArn": tenant.arn("cloudwatch", f"alarm:{tenant.stack_name('')}*")},
                },
            )
        )
        for address in tenant.spec.budget.notify:
            topic.add_subscription(subscriptions.EmailSubscription(address))
        return topic

    def metric_free_storage(self, file_system: TenantFileSystem) -> cloudwatch.Metric:
        """Bytes free over all storage targets of the file system."""
        return cloudwatch.Metric(
            namespace="AWS/FSx",
            metric_name="FreeDataStorageCapacity",
            dimensions_map={"FileSystemId": file_system.resource.ref},
            statistic="Sum",
            period=Duration.minutes(1),  # published per target each minute: a longer Sum would add minutes together
        )

    def _storage_alarm(self, tenant: TenantScope, file_system: TenantFileSystem) -> cloudwatch.Alarm:
        total_bytes = tenant.spec.file_system.storage_gib * 1024**3
        return cloudwatch.Alarm(
            self,
            "StorageAlmostFull",
            alarm_description=(
                f"File system of tenant {tenant.name}: under {FULL_FRACTION:.0%} free. What to remove: "
                f"scripts/runbooks/fsx_full_or_slow --tenant {tenant.name} --environment {tenant.environment.name},"
                " docs/runbooks/fsx_full_or_slow.md"
            ),
            metric=self.metric_free_storage(file_system),
            threshold=int(total_bytes * FULL_FRACTION),
            comparison_operator=cloudwatch.ComparisonOperator.LESS_THAN_THRESHOLD,
            evaluation_periods=15,
            datapoints_to_alarm=15,
            treat_missing_data=cloudwatch.TreatMissingData.MISSING,
        )

    def _rejection_alarm(self, tenant: TenantScope, flows: logs.ILogGroup) -> cloudwatch.Alarm:
        rejected = logs.MetricFilter(
            self,
            "RejectedFlows",
            log_group=flows,
            # The default flow-log format; action is the thirteenth of its fourteen fields.
            filter_pattern=logs.FilterPattern.literal(
                "[version, account, eni, source, destination, srcport, destport, protocol, packets, bytes, "
                'windowstart, windowend, action="REJECT", flowlogstatus]'
            ),
            metric_namespace=f"trainyard/{tenant.name}",
            metric_name=f"RejectedFlows-{tenant.environment.name}",
            metric_value="1",
        )
        return cloudwatch.Alarm(
            self,
            "TrafficRejected",
            alarm_description=(
                f"Network of tenant {tenant.name}: security groups reject traffic. A job that hangs at its first "
                "collective or at mounting Lustre has this cause. Addresses and ports: "
                f"{tenant.logs_command} --rejected, docs/runbooks/README.md."
            ),
            metric=rejected.metric(statistic="Sum", period=Duration.minutes(5)),
            threshold=REJECTED_PER_PERIOD,
            evaluation_periods=1,
            comparison_operator=cloudwatch.ComparisonOperator.GREATER_THAN_THRESHOLD,
            treat_missing_data=cloudwatch.TreatMissingData.NOT_BREACHING,
        )


class TenantBudget(Construct):
    """A monthly cost budget over everything that carries the tenant's tag.

    A back-stop: AWS updates it a few times a day. The tag counts once it is activated as a cost allocation tag.
    Mails go out directly: a mail address needs no confirmation here, as it does on a topic.
    """

    resource: budgets.CfnBudget

    def __init__(self, scope: Construct, construct_id: str, *, tenant: TenantScope) -> None:
        super().__init__(scope, construct_id)
        limits = tenant.spec.budget
        subscribers = [
            budgets.CfnBudget.SubscriberProperty(subscription_type="EMAIL", address=address)
            for address in limits.notify
        ]
        thresholds = {("ACTUAL", limits.warn_at_percent), ("ACTUAL", 100.0), ("FORECASTED", 100.0)}
        self.resource = budgets.CfnBudget(
            self,
            "Resource",
            budget=budgets.CfnBudget.BudgetDataProperty(
                budget_type="COST",
                time_unit="MONTHLY",
                budget_limit=budgets.CfnBudget.SpendProperty(amount=limits.monthly_usd, unit="USD"),
                cost_filters={"TagKeyValue": [f"user:{TAG_TENANT}${tenant.name}"]},
            ),
            notifications_with_subscribers=[
                budgets.CfnBudget.NotificationWithSubscribersProperty(
                    notification=budgets.CfnBudget.NotificationProperty(
                        comparison_operator="GREATER_THAN",
                        notification_type=kind,
                        threshold=percent,
                        threshold_type="PERCENTAGE",
                    ),
                    subscribers=subscribers,
                )
                for kind, percent in sorted(thresholds)
            ],
        )
