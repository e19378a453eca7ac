"""A tenant's cluster on EC2: AWS Parallel Computing Service, with machines that carry EFA on every network card.

It stands in the tenant's own network: the controller's interface and all machines are in the training group, which
admits everything from itself (Slurm's ports are within that) and nobody else. No machine has a key pair, a public
address or an open port; the login node is reached through Session Manager. The roles of the machines are in the
foundation, as key policies name them; nothing is imported for them, so that a cluster can be taken away again.
"""

from typing import Any

from aws_cdk import Fn
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_pcs as pcs
from constructs import Construct

from stacks.constructs.permissions import TenantResources
from stacks.naming import TAG_COST_CENTER, TAG_ENVIRONMENT, TAG_NODE, TAG_TENANT, TenantScope
from trainyard.hardware import NetworkInterface, instance, network_interfaces
from trainyard.spec.cluster import LOGIN_GROUP, ClusterSpec, NodeGroupSpec
from trainyard.spec.machine_start import SmallFilesMount, machine_start

PURCHASE = {"on_demand": "ONDEMAND", "spot": "SPOT", "capacity_block": "CAPACITY_BLOCK"}


class TenantCluster(Construct):
    """The controller, one node group per machine type, the partitions, and the login node."""

    cluster: pcs.CfnCluster
    queues: dict[str, pcs.CfnQueue]

    def __init__(
        self, scope: Construct, construct_id: str, *, tenant: TenantScope, spec: ClusterSpec, resources: TenantResources
    ) -> None:
        super().__init__(scope, construct_id)
        self._tenant, self._spec, self._resources = tenant, spec, resources
        self._group = resources.network.training_security_group.security_group_id
        self._subnet = resources.network.training_subnet.subnet_id
        self.cluster = self._controller()
        groups = {name: self._node_group(name, group) for name, group in spec.node_groups.items()}
        self._login()
        self.queues = {
            name: self._queue(name, [groups[group] for group in members], first=number == 0)
            for number, (name, members) in enumerate(spec.partitions.items())
        }

    def _controller(self) -> pcs.CfnCluster:
        spec, cluster = self._spec, pcs.CfnCluster
        assert spec.slurm_version is not None, "the spec demands one of this engine"
        return cluster(
            self,
            "Controller",
            size=spec.size.upper(),
            scheduler=cluster.SchedulerProperty(type="SLURM", version=spec.slurm_version),
            networking=cluster.NetworkingProperty(subnet_ids=[self._subnet], security_group_ids=[self._group]),
            slurm_configuration=cluster.SlurmConfigurationProperty(
                accounting=cluster.AccountingProperty(
                    mode="STANDARD", default_purge_time_in_days=spec.accounting_days or -1
                ),
                scale_down_idle_time_in_seconds=spec.idle_minutes * 60,
            ),
        )

    def _node_group(self, name: str, spec: NodeGroupSpec) -> pcs.CfnComputeNodeGroup:
        scope = Construct(self, name)
        cards = network_interfaces(instance(spec.instance_type), efa_only=False)
        template = self._template(scope, "compute", cards, spec.root_gib, spec)
        return self._machines(
            scope,
            name,
            "nodes",
            template,
            spec.instance_type,
            ami=self._spec.ami,
            bounds=(spec.min_instances, spec.max_instances),
            purchase=spec.purchase,
        )

    def _login(self) -> None:
        scope, spec = Construct(self, LOGIN_GROUP), self._spec.login
        template = self._template(scope, "login", (NetworkInterface(0, 0, "interface"),), spec.root_gib)
        ami = spec.ami or self._spec.ami
        self._machines(scope, LOGIN_GROUP, "login", template, spec.instance_type, ami=ami, bounds=(1, 1))

    def _machines(
        self,
        scope: Construct,
        name: str,
        role: str,
        template: ec2.CfnLaunchTemplate,
        instance_type: str,
        *,
        ami: str | None,
        bounds: tuple[int, int],
        purchase: str = "on_demand",
    ) -> pcs.CfnComputeNodeGroup:
        group, (least, most) = pcs.CfnComputeNodeGroup, bounds
        return group(
            scope,
            "Machines",
            name=name,  # Slurm names the machines after it
            cluster_id=self.cluster.attr_id,
            ami_id=_ami(ami),
            iam_instance_profile_arn=self._tenant.machine_profile_arn(role),
            instance_configs=[group.InstanceConfigProperty(instance_type=instance_type)],
            scaling_configuration=group.ScalingConfigurationProperty(min_instance_count=least, max_instance_count=most),
            subnet_ids=[self._subnet],
            custom_launch_template=group.CustomLaunchTemplateProperty(
                template_id=template.ref, version=template.attr_latest_version_number
            ),
            purchase_option=PURCHASE[purchase],
            spot_options=(
                group.SpotOptionsProperty(allocation_strategy="capacity-optimized") if purchase == "spot" else None
            ),
        )

    def _queue(self, name: str, groups: list[pcs.CfnComputeNodeGroup], *, first: bool) -> pcs.CfnQueue:
        queue = pcs.CfnQueue
        # Whole machines: a training job never shares one. The first queue takes jobs that name none.
        settings = {"OverSubscribe": "EXCLUSIVE", **({"Default": "YES"} if first else {})}
        return queue(
            Construct(self, f"queue-{name}"),
            "Partition",
            name=name,
            cluster_id=self.cluster.attr_id,
            compute_node_group_configurations=[
                queue.ComputeNodeGroupConfigurationProperty(compute_node_group_id=group.attr_id) for group in groups
            ],
            slurm_configuration=queue.SlurmConfigurationProperty(
                slurm_custom_settings=[
                    queue.SlurmCustomSettingProperty(parameter_name=key, parameter_value=value)
                    for key, value in settings.items()
                ]
            ),
        )

    def _template(
        self,
        scope: Construct,
        node: str,
        cards: tuple[NetworkInterface, ...],
        root_gib: int,
        spec: NodeGroupSpec | None = None,
    ) -> ec2.CfnLaunchTemplate:
        template = ec2.CfnLaunchTemplate
        tags = [{"key": key, "value": value} for key, value in self._tags(node).items()]
        return template(
            scope,
            "Template",
            tag_specifications=[
                template.LaunchTemplateTagSpecificationProperty(resource_type="launch-template", tags=tags)
            ],
            launch_template_data=template.LaunchTemplateDataProperty(
                **_purchase(spec),
                placement=self._placement(scope, spec),
                network_interfaces=[self._interface(card) for card in cards],
                block_device_mappings=[self._root(root_gib)],
                metadata_options=template.MetadataOptionsProperty(
                    http_endpoint="enabled", http_tokens="required", http_put_response_hop_limit=1
                ),
                monitoring=template.MonitoringProperty(enabled=True),
                # Not by itself: Tags.of() reaches the template, not what is launched from it.
                tag_specifications=[
                    template.TagSpecificationProperty(resource_type=kind, tags=tags)
                    for kind in ("instance", "volume", "network-interface")
                ],
                user_data=Fn.base64(self._user_data()),
            ),
        )

    def _tags(self, node: str) -> dict[str, str]:
        tenant = self._tenant
        return {
            TAG_ENVIRONMENT: tenant.environment.name,
            TAG_TENANT: tenant.name,
            TAG_COST_CENTER: tenant.spec.cost_center,
            TAG_NODE: node,
        }

    def _interface(self, card: NetworkInterface) -> ec2.CfnLaunchTemplate.NetworkInterfaceProperty:
        # No word on public addresses: EC2 takes one only for a single interface, and the subnet gives none.
        return ec2.CfnLaunchTemplate.NetworkInterfaceProperty(
            network_card_index=card.network_card,
            device_index=card.device,
            interface_type=card.kind,
            subnet_id=self._subnet,
            groups=[self._group],
            delete_on_termination=True,
        )

    def _root(self, gib: int) -> ec2.CfnLaunchTemplate.BlockDeviceMappingProperty:
        template = ec2.CfnLaunchTemplate
        return template.BlockDeviceMappingProperty(
            device_name=self._spec.root_device,
            ebs=template.EbsProperty(
                volume_size=gib,
                volume_type="gp3",
                encrypted=True,
                kms_key_id=self._resources.keys.checkpoints.key_arn,
                delete_on_termination=True,
            ),
        )

    def _placement(
        self, scope: Construct, spec: NodeGroupSpec | None
    ) -> ec2.CfnLaunchTemplate.PlacementProperty | None:
        if spec is None or not spec.grouped:
            return None
        group = ec2.CfnPlacementGroup(scope, "Placement", strategy="cluster")
        return ec2.CfnLaunchTemplate.PlacementProperty(group_name=group.ref)

    def _user_data(self) -> str:
        files, small = self._resources.file_system.resource, self._resources.small_files
        wanted, mounted = self._spec.small_files, None
        if wanted is not None and wanted.mounted and small is not None:
            mounted = SmallFilesMount(small.resource.ref, small.folder.ref)
        return machine_start(files.attr_dns_name, files.attr_lustre_mount_name, mounted)


def _ami(ami: str | None) -> str:
    """An id, or a reference that CloudFormation follows when it deploys."""
    assert ami is not None, "the spec demands one of this engine"
    return f"{{{{resolve:{ami}}}}}" if ami.startswith("ssm:") else ami


def _purchase(spec: NodeGroupSpec | None) -> dict[str, Any]:
    """What a launch template says of capacity. A block's machines are of another market, whose type the template must
    state; a targeted reservation states none. PCS asks for spot machines by itself."""
    if spec is None or spec.reservation is None:
        return {}
    template = ec2.CfnLaunchTemplate
    target = template.CapacityReservationSpecificationProperty(
        capacity_reservation_target=template.CapacityReservationTargetProperty(capacity_reservation_id=spec.reservation)
    )
    if spec.purchase != "capacity_block":
        return {"capacity_reservation_specification": target}
    return {
        "capacity_reservation_specification": target,
        "instance_type": spec.instance_type,
        "instance_market_options": template.InstanceMarketOptionsProperty(market_type="capacity-block"),
    }
