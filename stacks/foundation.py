"""A tenant's stateful half: network, keys, storage, and every principal that a key policy names.

Every principal, so that nothing in the training stack has to be granted anything here: a grant from there would
make the two stacks depend on each other.
"""

from aws_cdk import Stack
from aws_cdk import aws_ecr as ecr
from constructs import Construct

from stacks.constructs.acknowledged import INLINE_POLICIES, acknowledge
from stacks.constructs.egress import TenantEgress
from stacks.constructs.guard_rails import TenantBoundary
from stacks.constructs.identity import TenantRoles
from stacks.constructs.keys import TenantKeys
from stacks.constructs.logs import TenantLogs
from stacks.constructs.network import TenantNetwork
from stacks.constructs.passages import open_passages
from stacks.constructs.permissions import TenantPermissions, TenantResources
from stacks.constructs.small_files import TenantSmallFiles
from stacks.constructs.storage import TenantBuckets, TenantFileSystem
from stacks.constructs.tracking import TenantTracking
from stacks.naming import TenantScope
from stacks.settings import stack_settings


class FoundationStack(Stack):
    """What must not be lost, and who may touch it."""

    roles: TenantRoles
    resources: TenantResources

    def __init__(self, scope: Construct, *, tenant: TenantScope, images: ecr.IRepository) -> None:
        super().__init__(
            scope,
            tenant.stack_name("foundation"),
            description=f"trainyard: network, keys, storage and roles of tenant {tenant.name}",
            **stack_settings(tenant.environment, stateful=True),
        )
        self._zones = list(tenant.environment.availability_zones)
        acknowledge(self, INLINE_POLICIES)
        network = TenantNetwork(self, "Network", tenant=tenant)
        boundary = TenantBoundary(self, "Boundary", tenant=tenant, network=network)
        self.roles = TenantRoles(self, "Roles", tenant=tenant, boundary=boundary)
        keys = TenantKeys(self, "Keys", tenant=tenant, roles=self.roles)
        if (egress := tenant.spec.network.egress) is not None:
            TenantEgress(self, "Egress", tenant=tenant, spec=egress, network=network, keys=keys)
        buckets = TenantBuckets(self, "Buckets", tenant=tenant, keys=keys)
        file_system = TenantFileSystem(self, "FileSystem", tenant=tenant, network=network, keys=keys, buckets=buckets)
        small_files = None
        if (cluster := tenant.spec.cluster) is not None and (spec := cluster.small_files) is not None:
            small_files = TenantSmallFiles(self, "SmallFiles", tenant=tenant, spec=spec, network=network, keys=keys)
        self.resources = TenantResources(
            network=network,
            keys=keys,
            buckets=buckets,
            file_system=file_system,
            logs=TenantLogs(self, "Logs", tenant=tenant, network=network, keys=keys, boundary=boundary),
            images=images,
            small_files=small_files,
        )
        open_passages(tenant, self.resources)
        rights = TenantPermissions(self, "Permissions", tenant=tenant, roles=self.roles, resources=self.resources)
        if (tracking := tenant.spec.tracking) is not None and (role := self.roles.tracking) is not None:
            bucket = buckets.artifacts.bucket_name
            TenantTracking(
                self, "Tracking", tenant=tenant, spec=tracking, bucket=bucket, role=role
            ).node.add_dependency(rights)  # it looks at its bucket as it comes up
        self._keep_exports()

    def _keep_exports(self) -> None:
        """Export what the training stack imports by some settings only: this stack is deployed first, and
        CloudFormation drops no export that is still imported, so that such a setting could never be taken back."""
        for role in (self.roles.broker, self.roles.resumer):
            self.export_value(role.role_arn)
        for role in (self.roles.broker, self.roles.launcher):  # whom the budget stops
            self.export_value(role.role_name)
        self.export_value(self.roles.boundary.managed_policy_arn)  # what the broker makes jobs' roles under
        if (files := self.resources.small_files) is not None:  # mounted or not
            for value in (files.resource.ref, files.folder.ref):
                self.export_value(value)

    @property
    def availability_zones(self) -> list[str]:
        """The environment file's zones: CDK's own property would ask AWS for them."""
        return self._zones
