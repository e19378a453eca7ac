"""The tenant contract: all that the launcher knows of a tenant, as one SSM parameter."""

import json
from typing import Any

from aws_cdk import Stack, Token
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from stacks.constructs.cluster import TenantCluster
from stacks.constructs.hyperpod import TenantHyperPod
from stacks.constructs.identity import TenantRoles
from stacks.constructs.permissions import TenantResources
from stacks.constructs.queues import TenantQueues
from stacks.naming import PARTITION, TenantScope
from trainyard.errors import InputError
from trainyard.spec.cluster import LOGIN_GROUP
from trainyard.spec.platform import (
    CONTRACT_VERSION,
    TRACKING_FOLDER,
    BucketContract,
    ClusterContract,
    FileSystemContract,
    KeyContract,
    QueueContract,
    RoleContract,
    TenantContract,
    TrackingContract,
    TrainingPlanContract,
)
from trainyard.spec.shares import ShareContract

MAX_BYTES = 8_192
"""Systems Manager: of a parameter's value, in the Advanced tier."""

_LONGEST = {
    "buckets": 63,
    "subnet_ids": 24,
    "security_group_ids": 20,
    "vpc_id": 21,
    "log_group": 120,
}
"""How many characters what AWS makes for these has at most; any other's is a role's ARN, or shorter."""

_NAME_SUFFIX = len("Queue") + 8 + 17
"""What a queue's name has after the environment file's: the CDK's in its logical id, then CloudFormation's. It calls
queues of Batch <logical id>-<16 characters at most>, without the stack's name, which it gives most other things."""

WITHOUT_BOTH = 3
"""The version that has all that is said of a tenant without a tracking server and without HyperPod."""


class PublishedContract(Construct):
    """The parameter `/trainyard/<environment>/<tenant>/contract`."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        tenant: TenantScope,
        roles: TenantRoles,
        resources: TenantResources,
        queues: TenantQueues | None,
        cluster: TenantCluster | TenantHyperPod | None,
    ) -> None:
        super().__init__(scope, construct_id)
        contract = tenant_contract(tenant, roles, resources, queues, cluster)
        unsaid = {"tracking"} if contract.tracking is None else None  # an older trainyard knows no such key
        content = contract.model_dump(mode="json", exclude=unsaid)
        _check_size(content, tenant)
        ssm.StringParameter(
            self,
            "Parameter",
            parameter_name=tenant.environment.contract_parameter(tenant.name),
            description=f"Contract of tenant {tenant.name}: what trainyard launches with",
            tier=ssm.ParameterTier.ADVANCED,  # a contract with several queues passes the Standard tier's 4 KB
            string_value=Stack.of(self).to_json_string(content),
        )


def _check_size(content: dict[str, Any], tenant: TenantScope) -> None:
    """InputError for a contract that Systems Manager wouldn't take half-way through a deployment."""
    role = f"arn:{PARTITION}:iam::{tenant.environment.account}:role{tenant.iam_path}jobs/"
    queue = tenant.arn("batch", "job-queue/Queues")
    longest = _LONGEST | {
        "keys": len(tenant.arn("kms", "key/")) + 36,
        "file_system": len(f"fs-0123456789abcdef0.fsx.{tenant.environment.region}.amazonaws.com"),
    }
    whole = {key: _as_deployed(item, longest.get(key, len(role) + 64)) for key, item in content.items()}
    whole["queues"] = {
        name: _as_deployed(item, len(queue) + len(name) + _NAME_SUFFIX) for name, item in content["queues"].items()
    }
    length = len(json.dumps(whole, separators=(",", ":")).encode())
    if length > MAX_BYTES:
        spec = tenant.spec
        raise InputError(
            f"tenants.{tenant.name}: with {len(spec.queues)} queues and {len(spec.training_plans)} training plans the "
            f"tenant's contract would have up to {length:,} bytes, and Systems Manager takes {MAX_BYTES:,} of a "
            "parameter: name fewer of them, put several instance types into a queue, or split the tenant"
        )


def _as_deployed(value: Any, longest: int) -> Any:
    """The value with texts as long as AWS's in the place of those that are still to come."""
    if isinstance(value, dict):
        return {key: _as_deployed(item, longest) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_deployed(item, longest) for item in value]
    return "x" * longest if isinstance(value, str) and Token.is_unresolved(value) else value


def tenant_contract(
    tenant: TenantScope,
    roles: TenantRoles,
    resources: TenantResources,
    queues: TenantQueues | None,
    cluster: TenantCluster | TenantHyperPod | None,
) -> TenantContract:
    """The contract with CloudFormation's values still to come: they are strings to the model. `queues`: None where the
    tenant's jobs wait in those that all share."""
    environment, network = tenant.environment, resources.network
    keys, buckets, file_system = resources.keys, resources.buckets, resources.file_system.resource
    return TenantContract(
        version=CONTRACT_VERSION if tenant.spec.tracking is not None or tenant.hyperpod else WITHOUT_BOTH,
        environment=environment.name,
        tenant=tenant.name,
        account=environment.account,
        region=environment.region,
        availability_zone=tenant.availability_zone,
        vpc_id=network.vpc.vpc_id,
        subnet_ids=(network.training_subnet.subnet_id,),
        security_group_ids=(network.training_security_group.security_group_id,),
        keys=KeyContract(
            data=keys.data.key_arn,
            checkpoints=keys.checkpoints.key_arn,
            logs=keys.logs.key_arn,
            artifacts=keys.artifacts.key_arn,
        ),
        buckets=BucketContract(
            data=buckets.data.bucket_name,
            checkpoints=buckets.checkpoints.bucket_name,
            artifacts=buckets.artifacts.bucket_name,
        ),
        file_system=FileSystemContract(
            id=file_system.ref,
            mount_name=file_system.attr_lustre_mount_name,
            dns_name=file_system.attr_dns_name,
        ),
        roles=RoleContract(
            job=roles.job.role_arn,
            launcher=roles.launcher.role_arn,
            auditor=roles.auditor.role_arn,
            operator=roles.operator.role_arn,
            broker=roles.broker.role_arn if tenant.brokered else "",
        ),
        queues={
            name: QueueContract(
                arn=queues.queues[name].queue.attr_job_queue_arn if queues else "",
                instance_types=spec.instance_types,
                max_instances=spec.max_instances,
                multi_node=spec.multi_node,
            )
            for name, spec in tenant.spec.queues.items()
        },
        shares=_shares(tenant),
        log_group=resources.logs.group.log_group_name,
        image_parameter=environment.image_parameter,
        cost_center=tenant.spec.cost_center,
        max_job_hours=tenant.spec.max_job_hours,
        monthly_usd=tenant.spec.budget.monthly_usd,
        monthly_gpu_hours=tenant.spec.budget.monthly_gpu_hours,
        when_spent=tenant.spec.budget.when_spent,
        warn_at_percent=tenant.spec.budget.warn_at_percent,
        broker=tenant.broker_name if tenant.brokered else "",
        cluster=_cluster(tenant, cluster),
        warm_pool_minutes=tenant.spec.warm_pool_minutes,
        training_plans={
            name: TrainingPlanContract(arn=tenant.training_plans[name], **plan.model_dump())
            for name, plan in tenant.spec.training_plans.items()
        },
        tracking=_tracking(tenant, resources),
        job_keys=tenant.encrypts_by_job,
        job_boundary=roles.boundary.managed_policy_arn if tenant.isolates_jobs else "",
        emulated=environment.emulated,
    )


def _cluster(tenant: TenantScope, cluster: TenantCluster | TenantHyperPod | None) -> ClusterContract | None:
    if (spec := tenant.spec.cluster) is None or cluster is None:
        return None
    return ClusterContract(
        engine=spec.engine,
        id=cluster.cluster.attr_cluster_arn if isinstance(cluster, TenantHyperPod) else cluster.cluster.attr_id,
        queues={
            queue: tuple(sorted({spec.node_groups[name].instance_type for name in groups}))
            for queue, groups in spec.partitions.items()
        },
        login_tag=LOGIN_GROUP,
    )


def _tracking(tenant: TenantScope, resources: TenantResources) -> TrackingContract | None:
    if tenant.spec.tracking is None:
        return None
    artifacts = f"s3://{resources.buckets.artifacts.bucket_name}/{TRACKING_FOLDER}"
    return TrackingContract(server=tenant.tracking_server, artifacts=artifacts)


def _shares(tenant: TenantScope) -> dict[str, ShareContract]:
    if not tenant.queued:
        return {}
    environment = tenant.environment
    guaranteed, most = environment.guaranteed(tenant.name), environment.most(tenant.name)
    return {
        kind: ShareContract(queue=queue, guaranteed=guaranteed[kind], most=most[kind])
        for kind, queue in tenant.training_queues.items()
    }
