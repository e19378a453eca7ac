"""Types that no API of the emulator stands behind: an id and ARN of the right shape, and nothing else.

They are listed as `recorded-only`, so that nobody takes a green deploy for more than it is.
"""

import uuid
from collections.abc import Mapping
from types import MappingProxyType

from trainyard.emulator.cloudformation.model import Created, Properties, ResourceType, Site

_EFS_THROUGHPUT = ("bursting", "elastic", "provisioned")


def _recorded(
    name: str,
    arn: str,
    *,
    name_property: str = "",
    ref_is_arn: bool = False,
    arn_attribute: str = "Arn",
    replaced_by: tuple[str, ...] = (),
    choices: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> ResourceType:
    def require_choices(properties: Properties) -> None:
        for key, allowed in choices.items():
            if properties.get(key, allowed[0]) not in allowed:
                raise ValueError(f"{key} {properties[key]}: must be one of {', '.join(allowed)}")

    def create(site: Site, properties: Properties, generated: str) -> Created:
        require_choices(properties)
        identifier = uuid.uuid4().hex[:17]
        own_name = str(properties.get(name_property) or generated)
        full = arn.format(region=site.region, account=site.account, name=own_name, id=identifier)
        physical_id = full if ref_is_arn else own_name if name_property else full.rpartition("/")[2]
        return Created(physical_id, {arn_attribute: full, "Arn": full, "Id": identifier})

    def update(site: Site, physical_id: str, old: Properties, new: Properties) -> None:
        require_choices(new)

    return ResourceType(
        name,
        create,
        exists=lambda site, physical_id: True,
        delete=lambda site, physical_id, properties: None,
        update=update,
        replaced_by=(*replaced_by, *((name_property,) if name_property else ())),
        name_property=name_property,
        recorded=True,
    )


TYPES = (
    # CDK's own usage marker: CloudFormation keeps it and does nothing either.
    _recorded("AWS::CDK::Metadata", "arn:aws:cdk:{region}:{account}:metadata/{id}"),
    _recorded(
        "AWS::FSx::DataRepositoryAssociation",
        "arn:aws:fsx:{region}:{account}:association/dra-{id}",
        arn_attribute="ResourceARN",
        replaced_by=("BatchImportMetaDataOnCreate", "DataRepositoryPath", "FileSystemId", "FileSystemPath"),
    ),
    _recorded(
        "AWS::EFS::FileSystem",
        "arn:aws:elasticfilesystem:{region}:{account}:file-system/fs-{id}",
        replaced_by=("AvailabilityZoneName", "Encrypted", "KmsKeyId", "PerformanceMode"),
        choices={"PerformanceMode": ("generalPurpose", "maxIO"), "ThroughputMode": _EFS_THROUGHPUT},
    ),
    _recorded(
        "AWS::EFS::MountTarget",
        "arn:aws:elasticfilesystem:{region}:{account}:mount-target/fsmt-{id}",
        replaced_by=("FileSystemId", "IpAddress", "IpAddressType", "Ipv6Address", "SubnetId"),
    ),
    _recorded(
        "AWS::EFS::AccessPoint",
        "arn:aws:elasticfilesystem:{region}:{account}:access-point/fsap-{id}",
        replaced_by=("ClientToken", "FileSystemId", "PosixUser", "RootDirectory"),
    ),
    _recorded(
        "AWS::EC2::PlacementGroup",
        "arn:aws:ec2:{region}:{account}:placement-group/{name}",
        name_property="GroupName",
        replaced_by=("ParentGroupId", "PartitionCount", "SpreadLevel", "Strategy", "Tags"),
        choices={"Strategy": ("cluster", "partition", "spread")},
    ),
    # Behind these nothing runs here: no controller, no machine.
    _recorded(
        "AWS::PCS::Cluster",
        "arn:aws:pcs:{region}:{account}:cluster/pcs_{id}",
        ref_is_arn=True,
        replaced_by=("Name", "Networking", "Size"),
        choices={"Size": ("SMALL", "MEDIUM", "LARGE")},
    ),
    _recorded(
        "AWS::PCS::ComputeNodeGroup",
        "arn:aws:pcs:{region}:{account}:cluster/any/computenodegroup/pcs_{id}",
        ref_is_arn=True,
        replaced_by=("ClusterId", "InstanceConfigs", "Name"),
    ),
    _recorded(
        "AWS::SageMaker::MlflowTrackingServer",
        "arn:aws:sagemaker:{region}:{account}:mlflow-tracking-server/{name}",
        name_property="TrackingServerName",
        arn_attribute="TrackingServerArn",
        replaced_by=("MlflowVersion", "RoleArn"),
    ),
    _recorded(
        "AWS::SageMaker::Cluster",
        "arn:aws:sagemaker:{region}:{account}:cluster/{id}",
        arn_attribute="ClusterArn",
        replaced_by=("ClusterName", "Orchestrator.Eks", "VpcConfig"),
    ),
    _recorded(
        "AWS::PCS::Queue",
        "arn:aws:pcs:{region}:{account}:cluster/any/queue/pcs_{id}",
        ref_is_arn=True,
        replaced_by=("ClusterId", "Name"),
    ),
    _recorded(
        "AWS::NetworkFirewall::RuleGroup",
        "arn:aws:network-firewall:{region}:{account}:stateful-rulegroup/{name}",
        name_property="RuleGroupName",
        ref_is_arn=True,
        arn_attribute="RuleGroupArn",
        replaced_by=("Capacity", "Type"),
        choices={"Type": ("STATEFUL", "STATELESS")},
    ),
    _recorded(
        "AWS::NetworkFirewall::FirewallPolicy",
        "arn:aws:network-firewall:{region}:{account}:firewall-policy/{name}",
        name_property="FirewallPolicyName",
        ref_is_arn=True,
        arn_attribute="FirewallPolicyArn",
    ),
    _recorded(
        "AWS::NetworkFirewall::LoggingConfiguration",
        "arn:aws:network-firewall:{region}:{account}:logging/{id}",
        replaced_by=("FirewallArn", "FirewallName"),
    ),
    _recorded(
        "AWS::CloudWatch::CompositeAlarm",
        "arn:aws:cloudwatch:{region}:{account}:alarm:{name}",
        name_property="AlarmName",
    ),
    _recorded(
        "AWS::CloudTrail::Trail", "arn:aws:cloudtrail:{region}:{account}:trail/{name}", name_property="TrailName"
    ),
    _recorded(
        "AWS::Budgets::BudgetsAction",
        "arn:aws:budgets::{account}:action/{id}",
        arn_attribute="ActionId",
        replaced_by=("ActionType", "BudgetName"),
    ),
    _recorded(
        "AWS::CE::AnomalyMonitor",
        "arn:aws:ce::{account}:anomalymonitor/{id}",
        ref_is_arn=True,
        arn_attribute="MonitorArn",
        replaced_by=("MonitorDimension", "MonitorSpecification", "MonitorType", "ResourceTags"),
    ),
    _recorded(
        "AWS::CE::AnomalySubscription",
        "arn:aws:ce::{account}:anomalysubscription/{id}",
        ref_is_arn=True,
        arn_attribute="SubscriptionArn",
        replaced_by=("ResourceTags",),
    ),
)
