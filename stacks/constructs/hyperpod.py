"""A tenant's cluster on SageMaker HyperPod: Slurm on machines that SageMaker keeps running, and replaces when one
fails.

The same cluster as `cluster.py` makes with AWS PCS, by another engine: the tenant's subnet and group, disks under its
key, its Lustre at /fsx, partitions by the same names, no way in but Session Manager. HyperPod wires EFA, configures
Slurm and mounts Lustre itself; a script of the tenant's, in its data bucket, may do the rest. The roles are in the
foundation and have stated names, so that a cluster can be taken away again.
"""

from aws_cdk import aws_sagemaker as sagemaker
from constructs import Construct

from stacks.constructs.machine_permissions import SCRIPTS_FOLDER
from stacks.constructs.permissions import TenantResources
from stacks.naming import TenantScope
from trainyard.hardware import instance
from trainyard.spec.cluster import CONTROLLER_GROUP, LOGIN_GROUP, ClusterSpec, NodeGroupSpec

CFN = sagemaker.CfnCluster


class TenantHyperPod(Construct):
    """The cluster: a controller, a login node, and one instance group for each node group."""

    cluster: CFN

    def __init__(
        self, scope: Construct, construct_id: str, *, tenant: TenantScope, spec: ClusterSpec, resources: TenantResources
    ) -> None:
        super().__init__(scope, construct_id)
        self._tenant, self._spec, self._resources = tenant, spec, resources
        network = resources.network
        partitions = {group: queue for queue, groups in spec.partitions.items() for group in groups}
        assert spec.controller is not None, "the spec demands one of this engine"
        self.cluster = CFN(
            self,
            "Cluster",
            cluster_name=tenant.cluster_name,
            vpc_config=CFN.VpcConfigProperty(
                subnets=[network.training_subnet.subnet_id],
                security_group_ids=[network.training_security_group.security_group_id],
            ),
            orchestrator=CFN.OrchestratorProperty(
                slurm=CFN.ClusterOrchestratorSlurmConfigProperty(slurm_config_strategy="Managed")
            ),
            node_recovery="Automatic",
            # Groups come and go one by one: a lack of machines of one type fails no other.
            node_provisioning_mode="Continuous",
            instance_groups=[
                self._single(CONTROLLER_GROUP, "Controller", spec.controller.instance_type, spec.controller.root_gib),
                self._single(LOGIN_GROUP, "Login", spec.login.instance_type, spec.login.root_gib),
                *(self._machines(name, group, partitions.get(name)) for name, group in spec.node_groups.items()),
            ],
        )

    def _single(self, name: str, node: str, instance_type: str, gib: int) -> CFN.ClusterInstanceGroupProperty:
        return CFN.ClusterInstanceGroupProperty(
            instance_group_name=name,
            instance_type=f"ml.{instance_type}",
            instance_count=1,
            execution_role=self._tenant.machine_role_arn("login"),
            slurm_config=CFN.ClusterSlurmConfigProperty(node_type=node),
            instance_storage_configs=self._storage(gib),
            life_cycle_config=self._script(),
        )

    def _machines(self, name: str, spec: NodeGroupSpec, partition: str | None) -> CFN.ClusterInstanceGroupProperty:
        plan = self._tenant.arn("sagemaker", f"training-plan/{spec.training_plan}") if spec.training_plan else None
        efa = instance(spec.instance_type).efa_interfaces
        return CFN.ClusterInstanceGroupProperty(
            instance_group_name=name,
            instance_type=f"ml.{spec.instance_type}",
            instance_count=spec.max_instances,
            min_instance_count=spec.min_instances or None,
            execution_role=self._tenant.machine_role_arn("nodes"),
            slurm_config=CFN.ClusterSlurmConfigProperty(
                node_type="Compute", partition_names=[partition] if partition else None
            ),
            network_interface=CFN.ClusterNetworkInterfaceProperty(interface_type="efa") if efa else None,
            instance_storage_configs=self._storage(spec.root_gib),
            life_cycle_config=self._script(),
            training_plan_arn=plan,
        )

    def _storage(self, gib: int) -> list[CFN.ClusterInstanceStorageConfigProperty]:
        """The root volume and one more (/opt/sagemaker), both under the tenant's key; and the tenant's Lustre."""
        key, files = self._resources.keys.checkpoints.key_arn, self._resources.file_system.resource
        storage, volume = CFN.ClusterInstanceStorageConfigProperty, CFN.ClusterEbsVolumeConfigProperty
        lustre = CFN.ClusterFsxLustreConfigProperty(
            dns_name=files.attr_dns_name, mount_name=files.attr_lustre_mount_name, mount_path="/fsx"
        )
        return [
            storage(ebs_volume_config=volume(root_volume=True, volume_kms_key_id=key)),
            storage(ebs_volume_config=volume(volume_size_in_gb=gib, volume_kms_key_id=key)),
            storage(fsx_lustre_config=lustre),
        ]

    def _script(self) -> CFN.ClusterLifeCycleConfigProperty | None:
        if self._spec.start_script is None:
            return None
        bucket = self._resources.buckets.data.bucket_name
        return CFN.ClusterLifeCycleConfigProperty(
            source_s3_uri=f"s3://{bucket}/{SCRIPTS_FOLDER}/", on_init_complete=self._spec.start_script
        )
