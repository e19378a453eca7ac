"""The tenant's own log group, and the network's flow logs."""

from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from constructs import Construct

from stacks.constructs.guard_rails import TenantBoundary
from stacks.constructs.keys import TenantKeys
from stacks.constructs.network import TenantNetwork
from stacks.naming import TenantScope
from stacks.settings import removal_policy

RETENTION = {
    30: logs.RetentionDays.ONE_MONTH,
    90: logs.RetentionDays.THREE_MONTHS,
    180: logs.RetentionDays.SIX_MONTHS,
    365: logs.RetentionDays.ONE_YEAR,
    731: logs.RetentionDays.TWO_YEARS,
}


class TenantLogs(Construct):
    """Encrypted log groups with the tenant's retention."""

    group: logs.LogGroup
    """For what the tenant's jobs and tools write themselves; SageMaker has a group of its own for job output."""
    flows: logs.LogGroup
    """Every connection that the network admitted or rejected: who talked to whom, and which port was shut."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        tenant: TenantScope,
        network: TenantNetwork,
        keys: TenantKeys,
        boundary: TenantBoundary,
    ) -> None:
        super().__init__(scope, construct_id)
        self.group = self._group("Group", tenant, keys)
        self.flows = self._group("Flows", tenant, keys)
        writer = iam.Role(
            self,
            "FlowLogWriter",
            path=tenant.iam_path + "service/",
            description=f"Writes the flow logs of tenant {tenant.name}",
            permissions_boundary=boundary.policy,
            assumed_by=iam.ServicePrincipal(
                "vpc-flow-logs.amazonaws.com",
                conditions={"StringEquals": {"aws:SourceAccount": tenant.environment.account}},
            ),
        )
        ec2.FlowLog(
            self,
            "FlowLog",
            resource_type=ec2.FlowLogResourceType.from_vpc(network.vpc),
            destination=ec2.FlowLogDestination.to_cloud_watch_logs(self.flows, writer),
            traffic_type=ec2.FlowLogTrafficType.ALL,
        )

    def _group(self, construct_id: str, tenant: TenantScope, keys: TenantKeys) -> logs.LogGroup:
        return logs.LogGroup(
            self,
            construct_id,
            encryption_key=keys.logs,
            retention=RETENTION[tenant.spec.log_retention_days],
            removal_policy=removal_policy(tenant.environment),
        )
