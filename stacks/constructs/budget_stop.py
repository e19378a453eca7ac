"""The back-stop behind the broker's cap: AWS Budgets takes the right to start jobs away once the bill says so.

The bill comes in a few times a day, so that this is never the cap itself; it is there for what the broker doesn't see:
prices that were wrong, and costs that are no jobs.
"""

from aws_cdk import aws_budgets as budgets
from aws_cdk import aws_iam as iam
from constructs import Construct

from stacks.constructs.acknowledged import INLINE_POLICIES, acknowledge
from stacks.constructs.guard_rails import CREATE_JOB
from stacks.constructs.statements import deny, policy_document
from stacks.naming import PARTITION, TenantScope
from trainyard.spec.platform import EnvironmentSpec


class BudgetActor(Construct):
    """What AWS Budgets acts as, for all tenants of an environment: it puts their stop policies on their roles, and off.

    The platform's and no tenant's: a tenant's boundary holds no right over policies, and shall not.
    """

    role: iam.Role

    def __init__(self, scope: Construct, construct_id: str, *, environment: EnvironmentSpec) -> None:
        super().__init__(scope, construct_id)
        own = f"arn:{PARTITION}:iam::{environment.account}"
        self.role = iam.Role(
            self,
            "Role",
            path=f"/trainyard/{environment.name}/",
            description="Stops the submission of jobs where a budget is spent",
            assumed_by=iam.ServicePrincipal(
                "budgets.amazonaws.com",
                conditions={
                    "StringEquals": {"aws:SourceAccount": environment.account},
                    "ArnLike": {"aws:SourceArn": f"arn:{PARTITION}:budgets::{environment.account}:budget/*"},
                },
            ),
            inline_policies={
                "Stop": iam.PolicyDocument(
                    statements=[
                        iam.PolicyStatement(
                            sid="PutAndTakeStopPolicies",
                            actions=["iam:AttachRolePolicy", "iam:DetachRolePolicy"],
                            resources=[f"{own}:role/trainyard/{environment.name}/*"],
                            conditions={
                                "ArnLike": {"iam:PolicyARN": f"{own}:policy/trainyard/{environment.name}/*/stop/*"}
                            },
                        )
                    ]
                )
            },
        )
        reason = "Only policies of the stop/ path, which deny and grant nothing, on the environment's tenants' roles."
        pattern = f"Resource::{own}:role/trainyard/{environment.name}/*"
        acknowledge(self.role, {**INLINE_POLICIES, f"AwsSolutions-IAM5[{pattern}]": reason})


class BudgetStop(Construct):
    """The tenant's stop policy, and the action that puts it on whoever submits the tenant's jobs.

    What waits in a training queue by then is started all the same: Batch starts it, as a role of its own.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        tenant: TenantScope,
        budget_name: str,
        percent: float,
        submitter: iam.Role,
        actor: iam.IRole,
    ) -> None:
        super().__init__(scope, construct_id)
        stop = iam.ManagedPolicy(
            self,
            "Policy",
            path=f"{tenant.iam_path}stop/",
            description=f"Attached while the budget of tenant {tenant.name} is spent: no job is submitted",
            document=policy_document([deny("BudgetIsSpent", [CREATE_JOB, "batch:SubmitServiceJob"], {})]),
        )
        budgets.CfnBudgetsAction(
            self,
            "Action",
            budget_name=budget_name,
            action_type="APPLY_IAM_POLICY",
            approval_model="AUTOMATIC",
            notification_type="ACTUAL",
            action_threshold=budgets.CfnBudgetsAction.ActionThresholdProperty(type="PERCENTAGE", value=percent),
            definition=budgets.CfnBudgetsAction.DefinitionProperty(
                iam_action_definition=budgets.CfnBudgetsAction.IamActionDefinitionProperty(
                    policy_arn=stop.managed_policy_arn, roles=[submitter.role_name]
                )
            ),
            execution_role_arn=actor.role_arn,
            subscribers=[
                budgets.CfnBudgetsAction.SubscriberProperty(type="EMAIL", address=address)
                for address in tenant.spec.budget.notify
            ],
        )
