"""What a tenant's templates connect, beside what their policies allow: networks, targets, roles, buckets, addresses.

A policy says who may ask. A security group that lets another tenant's in, a function that runs as the platform's role,
a rule that hears of everybody's jobs or a file system that is linked to somebody's bucket asks nobody: so each property
of each resource of a tenant must name the tenant's own things, and what opens a way (a network's rule or route, a
function's permission, a bucket's public access) must be as it is listed here. A type that nobody has looked at stops
the proof: whatever it opens would be seen by nobody.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

from trainyard.errors import JobFailedError
from trainyard.isolation.account import DOCUMENTS, PLATFORM, TENANT_TAG, Account
from trainyard.isolation.catalogue import KIND_OF_TYPE
from trainyard.isolation.measures import Measures
from trainyard.isolation.places import EVERYBODY, OwnWords, Place, Wire, in_clear, strings
from trainyard.isolation.shapes import shortcomings, stated
from trainyard.isolation.templates import Deployment
from trainyard.isolation.watchers import Watchers
from trainyard.spec.machine_start import SmallFilesMount, machine_start
from trainyard.spec.platform import TenantContract, parse_contract
from trainyard.spec.shares import BATCH_PREFIX, borrow_percent, strategy

WIRES = frozenset(
    {
        *("AWS::Budgets::BudgetsAction", "AWS::CE::AnomalyMonitor", "AWS::CE::AnomalySubscription"),
        *("AWS::CloudTrail::Trail", "AWS::CloudWatch::Dashboard", "AWS::EC2::EIP", "AWS::EC2::Route"),
        *("AWS::EC2::SecurityGroupEgress", "AWS::EC2::SecurityGroupIngress", "AWS::EC2::SubnetRouteTableAssociation"),
        *("AWS::EC2::VPCCidrBlock", "AWS::EC2::VPCGatewayAttachment", "AWS::EFS::MountTarget"),
        *("AWS::FSx::DataRepositoryAssociation", "AWS::Lambda::Permission", "AWS::Logs::MetricFilter"),
        *("AWS::NetworkFirewall::LoggingConfiguration", "AWS::SNS::Subscription"),
    }
)
"""Types that are nothing by themselves and connect others. With the things of the catalogue and the policies, all that
the proof has looked at."""

_WAYS_OUT = frozenset(
    {
        *("AWS::EC2::EIP", "AWS::EC2::InternetGateway", "AWS::EC2::NatGateway", "AWS::EC2::Route"),
        "AWS::EC2::VPCGatewayAttachment",
    }
)
"""Only for a tenant with `egress`."""

_OWN = {
    "AWS::Budgets::BudgetsAction": "BudgetName Definition.IamActionDefinition.PolicyArn",
    "AWS::CE::AnomalySubscription": "MonitorArnList",
    "AWS::CloudWatch::Alarm": "AlarmActions OKActions",
    "AWS::EC2::FlowLog": "LogGroupName ResourceId",
    "AWS::EC2::LaunchTemplate": """
        LaunchTemplateData.BlockDeviceMappings.Ebs.KmsKeyId LaunchTemplateData.NetworkInterfaces.Groups
        LaunchTemplateData.NetworkInterfaces.SubnetId""",
    "AWS::EC2::SubnetRouteTableAssociation": "RouteTableId SubnetId",
    "AWS::EC2::VPCEndpoint": "RouteTableIds SecurityGroupIds SubnetIds VpcId",
    "AWS::EFS::FileSystem": "KmsKeyId",
    "AWS::EFS::MountTarget": "SecurityGroups SubnetId",
    "AWS::Events::Rule": "Targets.Arn",
    "AWS::FSx::FileSystem": "KmsKeyId SecurityGroupIds SubnetIds",
    "AWS::Lambda::Function": "LoggingConfig.LogGroup",
    "AWS::Lambda::Permission": "FunctionName",
    "AWS::Logs::LogGroup": "KmsKeyId",
    "AWS::Logs::MetricFilter": "LogGroupName",
    "AWS::NetworkFirewall::LoggingConfiguration": """
        FirewallArn LoggingConfiguration.LogDestinationConfigs.LogDestination.logGroup""",
    "AWS::PCS::Cluster": "Networking.SecurityGroupIds Networking.SubnetIds",
    "AWS::PCS::ComputeNodeGroup": "CustomLaunchTemplate.TemplateId SubnetIds",
    "AWS::S3::Bucket": """
        BucketEncryption.ServerSideEncryptionConfiguration.ServerSideEncryptionByDefault.KMSMasterKeyID""",
    "AWS::SNS::Subscription": "TopicArn",
    "AWS::SNS::Topic": "KmsMasterKeyId",
    "AWS::SageMaker::Cluster": """
        InstanceGroups.InstanceStorageConfigs.EbsVolumeConfig.VolumeKmsKeyId VpcConfig.SecurityGroupIds
        VpcConfig.Subnets""",
}
"""Properties that name a thing of the tenant's own, or, where they name nothing, must not be there; of what lies open
without a key of the tenant's they must."""

_NEEDED = frozenset({"KmsKeyId", "KMSMasterKeyID", "KmsMasterKeyId", "LogGroup", "LogGroupName", "VolumeKmsKeyId"})
"""Their last words, where AWS would take a key of its own, or a group that everybody has."""

_ROLES = frozenset(
    {
        *("Role", "RoleArn", "ExecutionRole", "ExecutionRoleArn", "DeliverLogsPermissionArn"),
        *("Roles", "IamInstanceProfileArn", "IamInstanceProfile"),
    }
)
"""Properties by which something runs as a role: an instance profile's, and how machines name one, among them."""

_FENCE = {
    "StatelessDefaultActions": ["aws:forward_to_sfe"],
    "StatelessFragmentDefaultActions": ["aws:forward_to_sfe"],
    "StatefulDefaultActions": ["aws:drop_established_app_layer", "aws:alert_established_app_layer"],
    "StatefulEngineOptions": {"RuleOrder": "STRICT_ORDER", "StreamExceptionPolicy": "REJECT"},
}
"""A firewall that reads every packet, and drops what no rule of its own group lets through."""

_KNOWN_BY_NAME = frozenset(
    {
        *("AWS::Budgets::Budget", "AWS::EC2::LaunchTemplate", "AWS::IAM::InstanceProfile", "AWS::IAM::Role"),
        *("AWS::Logs::LogGroup", "AWS::S3::Bucket"),
    }
)
"""Types that others name without their ARN."""

_PUBLIC = ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets")
_NOWHERE = "255.255.255.255/32"
"""What the CDK writes where a group may send nothing: without a rule EC2 would let everything out."""

_ARN = re.compile(r"\barn:aws[a-z-]*:[^\s\"',;<>\\]+")
_RESOLVED_LATER = re.compile(r"\{\{resolve:[^}]*\}\}")
_NAMESPACE = re.compile(r"(?<![\w./-])trainyard/([A-Za-z0-9-]+)(?![\w/-])")
_SECTIONS = frozenset({"AWSTemplateFormatVersion", "Description", "Metadata", "Outputs", "Resources"})
_ATTRIBUTES = frozenset({"DeletionPolicy", "DependsOn", "Metadata", "Properties", "Type", "UpdateReplacePolicy"})
_OPAQUE = re.compile(
    r"\b(?:[a-z]{2,6}-[0-9a-f]{17}|(?:eni|fs|rtb|sg|subnet|vpc|vpce)-[0-9a-f]{8}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b"
)
_HEARD_QUEUES = "EventPattern.detail.jobQueue.prefix"
_ACCOUNT = re.compile(r"\barn:aws[a-z-]*:[a-z0-9-]+:[a-z0-9-]*:(\d{12}):")
_BUCKET = re.compile(r"(?:\barn:aws[a-z-]*:s3:::|\bs3://)([a-z0-9][a-z0-9.-]*)")


def wires(deployment: Deployment, account: Account) -> tuple[Wire, ...]:
    """Every wrong connection; JobFailedError for a type, or a whole template, that the proof doesn't know."""
    for stack, template in deployment.templates.items():
        _look_at_kinds(stack, template)
    return tuple(_Wiring(deployment, account).all())


def _look_at_kinds(stack: str, template: Mapping[str, Any]) -> None:
    if "Transform" in template:
        raise JobFailedError(
            f"stack {stack}: Transform makes resources that the isolation proof can't see; leave it out"
        )
    if hidden := sorted(set(template) - _SECTIONS):
        raise JobFailedError(
            f"stack {stack}: {hidden[0]} is decided at deployment, where the isolation proof can't see "
            "it; decide at synth"
        )
    for logical_id, resource in template.get("Resources", {}).items():
        kind = resource["Type"]
        if hidden := sorted(set(resource) - _ATTRIBUTES):
            raise JobFailedError(
                f"stack {stack}: {kind} {logical_id} has {hidden[0]}: the isolation proof can't see whether or how "
                "it is made then; leave it out"
            )
        if kind not in WIRES and kind not in KIND_OF_TYPE and kind not in DOCUMENTS:
            raise JobFailedError(
                f"stack {stack}: {kind} {logical_id} is of a type that the isolation proof doesn't know; add it to "
                "trainyard/isolation/wiring.py, with what it could connect, or to catalogue.py, with who could use it"
            )


class _Wiring:
    """One pass over the tenants' stacks."""

    def __init__(self, deployment: Deployment, account: Account) -> None:
        self._deployment, self._account = deployment, account
        self._environment = account.environment
        self._tenants = list(self._environment.tenants)
        self._owners = {name: owner for owner, name in self._names()}
        env = re.escape(self._environment.name)
        self._named = re.compile(rf"(?:\btrainyard|\bAWSPCS)-{env}-([A-Za-z0-9-]+)|/trainyard/{env}/([a-z0-9-]+)/")

    def all(self) -> Iterator[Wire]:
        """What each place shows, the tenants' own stacks first; then what is shared."""
        for place in self._places:
            for check in self._checks(place.kind):
                yield from check(place)
        yield from self._watchers.missing()
        for place in self._shared:
            yield from self._shape(place)
            yield from self._later(place)
            yield from self._reaching(place)
            if place.kind in self._shared_checks:
                yield from self._shared_checks[place.kind](place)

    @cached_property
    def _watchers(self) -> Watchers:
        return Watchers(self._account, self._places, self._is_own, self._arn)

    def _arn(self, place: Place) -> str:
        return self._deployment.arn(place.stack, place.logical_id)

    @cached_property
    def _places(self) -> list[Place]:
        return [
            place
            for stack in self._deployment.templates
            if (tenant := self._tenant_of(stack)) is not None
            for place in self._resources(stack, tenant)
        ]

    @cached_property
    def _shared(self) -> list[Place]:
        stacks = [stack for stack in self._deployment.templates if self._tenant_of(stack) is None]
        return [place for stack in stacks for place in self._resources(stack, PLATFORM)]

    def _resources(self, stack: str, tenant: str) -> Iterator[Place]:
        for logical_id, resource in self._deployment.templates[stack].get("Resources", {}).items():
            properties = self._deployment.resolve(resource.get("Properties", {}), stack)
            clear = in_clear(properties, f"stack {stack}: {resource['Type']} {logical_id}")
            yield Place(tenant, stack, logical_id, resource["Type"], clear)

    def _tenant_of(self, stack: str) -> str | None:
        prefix = f"trainyard-{self._environment.name}-"
        return next((name for name in self._tenants if stack.startswith(f"{prefix}{name}-")), None)

    def _names(self) -> Iterator[tuple[str | None, str]]:
        """What AWS or the templates call each resource, with whose it is: its ARN, and its id where it is no word.

        Of the platform's every name of ours, as it may begin with a tenant's: p5's queue is no thing of a tenant p5."""
        ours = f"trainyard-{self._environment.name}-"
        for stack, template in self._deployment.templates.items():
            owner = self._tenant_of(stack)
            if owner is None:
                yield None, stack
            for logical_id, resource in template.get("Resources", {}).items():
                yield owner, self._deployment.arn(stack, logical_id)
                name = self._deployment.physical_id(stack, logical_id)
                is_ours = owner is None and name.startswith(ours)
                if is_ours or _OPAQUE.fullmatch(name) or resource["Type"] in _KNOWN_BY_NAME:
                    yield owner, name

    def _checks(self, kind: str) -> list[Callable[[Place], Iterator[Wire]]]:
        special: dict[str, Callable[[Place], Iterator[Wire]]] = {
            "AWS::Batch::QuotaShare": self._share,
            "AWS::Budgets::Budget": self._watchers.bill,
            "AWS::CE::AnomalyMonitor": self._watchers.bill,
            "AWS::EC2::LaunchTemplate": self._start,
            "AWS::EC2::SecurityGroup": self._group,
            "AWS::EC2::SecurityGroupEgress": lambda place: self._out(place, place.properties),
            "AWS::EC2::SecurityGroupIngress": lambda place: self._in(place, place.properties),
            "AWS::EC2::VPCEndpoint": self._service,
            "AWS::Events::Rule": self._rule,
            "AWS::IAM::ManagedPolicy": self._managed,
            "AWS::IAM::Policy": self._holders,
            "AWS::IAM::Role": self._boundary,
            "AWS::Lambda::Function": self._function,
            "AWS::Lambda::Permission": self._permission,
            "AWS::NetworkFirewall::Firewall": self._firewall,
            "AWS::NetworkFirewall::FirewallPolicy": self._fence,
            "AWS::NetworkFirewall::RuleGroup": self._hosts,
            "AWS::S3::Bucket": self._bucket,
            "AWS::SNS::Subscription": lambda place: self._subscription(place, place.properties),
            "AWS::SNS::Topic": self._topic,
            "AWS::SSM::Parameter": self._published,
        }
        ways = [self._way_out] if kind in _WAYS_OUT else []
        all_kinds = [self._shape, self._later, self._foreign, self._unknown, self._owned, self._tags, self._runs_as]
        return [*all_kinds, self._mailed, *ways, *([special[kind]] if kind in special else [])]

    @cached_property
    def _shared_checks(self) -> dict[str, Callable[[Place], Iterator[Wire]]]:
        """What may be no other way in a stack that is no tenant's, beside that it names no tenant's thing. The rest of
        the platform's is everybody's by intent: its queues and its repository, and what it lets tenants do with them
        the policies say."""
        return {
            "AWS::IAM::ManagedPolicy": self._managed,
            "AWS::Lambda::Permission": self._permission,
            "AWS::S3::Bucket": self._bucket,
            "AWS::SNS::Subscription": lambda place: self._subscription(place, place.properties),
            "AWS::SNS::Topic": self._topic,
        }

    def _reaching(self, place: Place) -> Iterator[Wire]:
        """Rules, routes, links and all else that acts on a tenant's thing belong into its own stacks, whose checks know
        whose the thing is: from a stack of all they would let another tenant in. Nor is one named that nobody knows."""
        for where, text in self._texts(place):
            if (owner := self._other("", text)) is not None:  # no tenant's own: any tenant is another
                yield place.wire(where, text, owner, "acts on a tenant's thing from a stack that is no tenant's")
            elif unknown := [name for name in _OPAQUE.findall(text) if name not in self._owners]:
                yield place.wire(where, unknown[0], EVERYBODY, "names what no template makes")

    def _is_own(self, place: Place, name: object) -> bool:
        return str(name) in self._owners and self._owners[str(name)] == self._tenant_of(place.stack)

    def _shape(self, place: Place) -> Iterator[Wire]:
        for where, said, why in shortcomings(place.kind, place.properties):
            yield place.wire(where, said, EVERYBODY, why)

    def _texts(self, place: Place) -> Iterator[tuple[str, str]]:
        """All but what the evaluator reads, where a name may be a pattern, or what is refused; and but the environment
        file's own words, which may look like anything's name and name nothing."""
        policies = {*DOCUMENTS.get(place.kind, ()), *(("Policies",) if place.kind == "AWS::IAM::Role" else ())}
        words = OwnWords.of(self._environment, place)
        for where, text in strings(words.without_cost_center(place.properties)):
            said = words.rest(where, text)
            if said and where.partition(".")[0] not in policies:
                yield where, said

    def _later(self, place: Place) -> Iterator[Wire]:
        """What CloudFormation reads somewhere else when it deploys, policies included, but for a machine's image."""
        outside = self._measures(place).outside if place.tenant != PLATFORM else frozenset()
        for where, text in strings(place.properties):
            for found in _RESOLVED_LATER.findall(text):
                if (place.kind, where) != ("AWS::PCS::ComputeNodeGroup", "AmiId") or found not in outside:
                    yield place.wire(where, found, EVERYBODY, "is read at deployment, where no proof sees it")

    def _unknown(self, place: Place) -> Iterator[Wire]:
        """Names of things that no template makes, and the environment file doesn't state."""
        measures = self._measures(place)
        known = {*measures.outside, *measures.plans}
        for where, text in self._texts(place):
            names = [name.removesuffix(":*") for name in _ARN.findall(text)] + _OPAQUE.findall(text)
            for name in names:
                buckets = name.startswith("arn:aws:s3:::")  # _foreign's
                ours = name in self._owners or f"{name}:*" in self._owners or name in known
                # How the names of queues begin, in what a rule hears of; whose jobs those are, _rule holds.
                begins = where == _HEARD_QUEUES and any(other.startswith(name) for other in self._owners)
                if not (buckets or ours or begins or name.startswith(measures.own_roles)):
                    yield place.wire(where, name, EVERYBODY, "names what no template makes")

    def _owned(self, place: Place) -> Iterator[Wire]:
        for where in _OWN.get(place.kind, "").split():
            is_needed = where.split(".")[-1] in _NEEDED
            for value in stated(place.properties, where):
                if (value is not None or is_needed) and not self._is_own(place, value):
                    yield place.wire(where, value, EVERYBODY, "is not of the tenant's own things")

    def _mailed(self, place: Place) -> Iterator[Wire]:
        """Whom a budget and its kin tell; a topic's subscriptions have their own check."""
        for where, text in strings(place.properties):
            if where.split(".")[-2:] in (["Subscribers", "Address"], ["Subscribers", "address"]):
                yield from self._watchers.mail(place, where, text)

    def _foreign(self, place: Place) -> Iterator[Wire]:
        """Names of other tenants' things, of other accounts, and of buckets that are none of the tenant's own."""
        for where, text in self._texts(place):
            if (owner := self._other(place.tenant, text)) is not None:
                yield place.wire(where, text, owner, "names another tenant's")
            if any(account != self._environment.account for account in _ACCOUNT.findall(text)):
                yield place.wire(where, text, "another account", "names another account's")
            for bucket in _BUCKET.findall(text):
                if not self._is_own(place, bucket):
                    yield place.wire(where, text, EVERYBODY, "names a bucket that is none of the tenant's")

    def _other(self, tenant: str, text: str) -> str | None:
        """The other tenant whose thing the text names, by an id that AWS makes, an ARN, or a name of ours."""
        if text in self._owners:
            owner = self._owners[text]
            return owner if owner != tenant else None
        for name in _OPAQUE.findall(text):
            owner = self._owners.get(name, tenant)
            if owner is not None and owner != tenant:
                return owner
        for match in self._named.finditer(text):
            if self._owners.get(match[0], tenant) is None:
                continue  # the platform's, which may begin as a tenant is called
            rest = f"{match[1] or match[2]}-"
            found = next((name for name in self._tenants if rest.startswith(f"{name}-")), tenant)
            if found != tenant:
                return found
        spaces = (name for name in _NAMESPACE.findall(text) if name in self._tenants and name != tenant)
        return next(spaces, None)

    def _tags(self, place: Place) -> Iterator[Wire]:
        """By its tag a thing, or a machine that is started, is told to be a tenant's, to policies and to the bill."""
        for where, owner in _tagged(place.properties):
            if owner != place.tenant:
                target = owner if owner in self._tenants else EVERYBODY
                yield place.wire(where, owner, target, "is tagged as another's")

    def _runs_as(self, place: Place) -> Iterator[Wire]:
        """As a role of its own tenant; only AWS Budgets acts as one of the platform's, which can do nothing else."""
        for where, text in strings(place.properties):
            is_budgets = (place.kind, where) == ("AWS::Budgets::BudgetsAction", "ExecutionRoleArn")
            names = where.split(".")
            is_role = names[-1] in _ROLES or "IamInstanceProfile" in names
            if is_role and not is_budgets and not self._is_own(place, text):
                does = "gives rights to" if place.kind in DOCUMENTS else "runs as"
                yield place.wire(where, text, PLATFORM, f"{does} a role that is none of the tenant's")

    def _way_out(self, place: Place) -> Iterator[Wire]:
        properties = place.properties
        network = self._environment.tenant(place.tenant).network
        if network.egress is None:
            yield place.wire("Type", place.kind, EVERYBODY, "leads out of a network that has no egress")
        fence = properties.get("VpcEndpointId")
        if place.kind == "AWS::EC2::Route" and self._serves_jobs(place) and fence not in self._fences(place.tenant):
            target = fence or properties.get("GatewayId") or properties.get("NatGatewayId")
            yield place.wire("RouteTableId", target, EVERYBODY, "leads jobs out past the firewall")

    def _firewall(self, place: Place) -> Iterator[Wire]:
        policy = place.properties.get("FirewallPolicyArn")
        if not self._is_own(place, policy):
            yield place.wire("FirewallPolicyArn", policy, EVERYBODY, "lets through by a policy not the tenant's")

    def _fence(self, place: Place) -> Iterator[Wire]:
        """Only its own group of hosts lets through, and nothing is said that nobody has looked at."""
        policy = place.properties.get("FirewallPolicy", {})
        for group in policy.get("StatefulRuleGroupReferences", []):
            if not self._is_own(place, group.get("ResourceArn")):
                yield place.wire(
                    "FirewallPolicy.StatefulRuleGroupReferences", group, EVERYBODY, "lets through by rules of others"
                )
        for name in sorted({*policy, *_FENCE} - {"StatefulRuleGroupReferences"}):
            if policy.get(name) != (right := _FENCE.get(name)):
                why = f"is not {json.dumps(right)}" if right else "is nothing that a firewall of ours says"
                yield place.wire(f"FirewallPolicy.{name}", policy.get(name), EVERYBODY, why)

    def _hosts(self, place: Place) -> Iterator[Wire]:
        """The hosts that the environment file allows, by the names that TLS states."""
        egress = self._environment.tenant(place.tenant).network.egress
        hosts = sorted(egress.allowed_domains) if egress is not None else []
        allowed = {"GeneratedRulesType": "ALLOWLIST", "TargetTypes": ["TLS_SNI"], "Targets": hosts}
        said = place.properties.get("RuleGroup", {}).get("RulesSource", {})
        if said != {"RulesSourceList": allowed}:
            yield place.wire("RuleGroup.RulesSource", json.dumps(said), EVERYBODY, f"is not the list of {hosts}")

    def _fences(self, tenant: str) -> set[str]:
        """The endpoints of the tenant's own firewall: another's may lead anywhere."""
        return {
            f"vpce-{self._deployment.physical_id(place.stack, place.logical_id)}"
            for place in self._places
            if (place.tenant, place.kind) == (tenant, "AWS::NetworkFirewall::Firewall")
        }

    def _serves_jobs(self, route: Place) -> bool:
        """Whether it is in the table of a subnet that the contract gives to jobs."""
        subnets = self._contract(route).subnet_ids
        return any(
            other.properties.get("RouteTableId") == route.properties.get("RouteTableId")
            for other in self._places
            if other.kind == "AWS::EC2::SubnetRouteTableAssociation" and other.properties.get("SubnetId") in subnets
        )

    def _contract(self, place: Place) -> TenantContract:
        return self._account.contracts[place.tenant]

    def _measures(self, place: Place) -> Measures:
        return self._watchers.measures(place.tenant)

    def _service(self, place: Place) -> Iterator[Wire]:
        """AWS's own, of this region: an endpoint can as well lead to a service that anybody offers."""
        name = str(place.properties.get("ServiceName"))
        if not re.fullmatch(rf"(com\.amazonaws|aws\.sagemaker)\.{self._environment.region}\.[a-z0-9.-]+", name):
            yield place.wire("ServiceName", name, EVERYBODY, "leads to no service of AWS's in this region")

    def _start(self, place: Place) -> Iterator[Wire]:
        """What machines run as root, letter by letter."""
        files, small = self._contract(place).file_system.id, None
        cluster = self._environment.tenant(place.tenant).cluster
        if cluster is not None and cluster.small_files is not None and cluster.small_files.mounted:
            ids = {
                other.kind: self._deployment.physical_id(other.stack, other.logical_id)
                for other in self._places
                if other.tenant == place.tenant and other.kind.startswith("AWS::EFS::")
            }
            small = SmallFilesMount(ids.get("AWS::EFS::FileSystem", ""), ids.get("AWS::EFS::AccessPoint", ""))
        said = place.properties.get("LaunchTemplateData", {}).get("UserData")
        if said != machine_start(f"{files}.DNSName", f"{files}.LustreMountName", small):
            where = "LaunchTemplateData.UserData"
            yield place.wire(where, said, EVERYBODY, "is not what the machines of such a cluster run at their start")

    def _function(self, place: Place) -> Iterator[Wire]:
        yield from self._watchers.settings(place)
        yield from self._watchers.code(place)

    def _group(self, place: Place) -> Iterator[Wire]:
        for rule in place.properties.get("SecurityGroupIngress", []):
            yield from self._in(place, rule)
        for rule in place.properties.get("SecurityGroupEgress", []):
            yield from self._out(place, rule)
        if not place.properties.get("SecurityGroupEgress") and not self._has_rule_out(place):
            yield place.wire("SecurityGroupEgress", None, EVERYBODY, "has no rule, so that EC2 lets everything out")

    def _has_rule_out(self, group: Place) -> bool:
        own = self._deployment.physical_id(group.stack, group.logical_id)
        return any(
            other.kind == "AWS::EC2::SecurityGroupEgress" and other.properties.get("GroupId") == own
            for other in self._places
        )

    def _in(self, place: Place, rule: Mapping[str, Any]) -> Iterator[Wire]:
        """Nobody is let in but by an own group."""
        if not self._is_own(place, rule.get("SourceSecurityGroupId")):
            source = {name: value for name, value in rule.items() if name.startswith(("Cidr", "Source"))}
            yield place.wire("SecurityGroupIngress", source, EVERYBODY, "lets in what is no group of the tenant's")

    def _out(self, place: Place, rule: Mapping[str, Any]) -> Iterator[Wire]:
        """To own groups, and to port 443 of the endpoints (and of the firewall, where there is one)."""
        port = (rule.get("IpProtocol"), rule.get("FromPort"), rule.get("ToPort"))
        if rule.get("CidrIp") == _NOWHERE or self._is_own(place, rule.get("DestinationSecurityGroupId")):
            return
        if "CidrIp" not in rule or port != ("tcp", 443, 443):
            yield place.wire("SecurityGroupEgress", dict(rule), EVERYBODY, "sends elsewhere than to port 443")

    def _rule(self, place: Place) -> Iterator[Wire]:
        """Hears of the tenant's jobs and roles, and of nobody else's."""
        pattern = place.properties.get("EventPattern")
        for heard in _alternatives(pattern.get("detail", {})) if pattern is not None else ():
            named = [heard.get("TrainingJobName"), heard.get("jobName"), heard.get("RoleArn")]
            named.append(heard.get("requestParameters", {}).get("roleArn"))
            if not any(names and all(self._is_heard(place.tenant, item) for item in names) for names in named):
                yield place.wire("EventPattern", json.dumps(heard), EVERYBODY, "hears of other tenants' jobs")

    def _is_heard(self, tenant: str, item: object) -> bool:
        text = item.get("prefix") if isinstance(item, dict) and set(item) == {"prefix"} else item
        path = f":role/trainyard/{self._environment.name}/{tenant}/"
        own = (f"{tenant}-", f"{BATCH_PREFIX}{tenant}-", f"{BATCH_PREFIX.lower()}{tenant}-")
        return isinstance(text, str) and (text.startswith(own) or path in text)

    def _holders(self, place: Place) -> Iterator[Wire]:
        for name in ("Users", "Groups"):
            if place.properties.get(name):
                yield place.wire(name, place.properties[name], EVERYBODY, "gives rights to whom no boundary holds")

    def _managed(self, place: Place) -> Iterator[Wire]:
        """A stop policy is on no role of the templates: AWS Budgets puts it there, and then it may only refuse."""
        yield from self._holders(place)
        for statement in self._account.documents[place.stack, place.logical_id, "PolicyDocument"]:
            if "/stop/" in self._arn(place) and statement.allows:
                said = statement.origin.sid or statement.origin.index
                yield place.wire(
                    "PolicyDocument", said, EVERYBODY, "allows by a policy that AWS Budgets may put on roles"
                )

    def _boundary(self, place: Place) -> Iterator[Wire]:
        boundary = place.properties.get("PermissionsBoundary")
        if not self._is_own(place, boundary):
            yield place.wire("PermissionsBoundary", boundary, EVERYBODY, "stands under no boundary of the tenant's")

    def _published(self, place: Place) -> Iterator[Wire]:
        """The contract, to which the broker holds jobs, allows what the environment file does."""
        if place.properties.get("Name") != self._environment.contract_parameter(place.tenant):
            return
        text, where = str(place.properties.get("Value")), f"{place.stack}/{place.logical_id}"
        said = parse_contract(text, where).model_dump(mode="json")
        for queue in said["queues"].values():
            del queue["arn"]
        said["shares"] = {kind: (share["guaranteed"], share["most"]) for kind, share in said["shares"].items()}
        for name, value in self._measures(place).allowances().items():
            if said[name] != value:
                yield place.wire(f"Value.{name}", json.dumps(said[name]), EVERYBODY, f"is not {json.dumps(value)}")
        things = {
            name: said[name] for name in ("buckets", "keys", "roles", "subnet_ids", "security_group_ids", "vpc_id")
        }
        for where, name in strings(
            {**things, "file_system": said["file_system"]["id"], "log_group": said["log_group"]}
        ):
            if name and not self._is_own(place, name):
                yield place.wire(f"Value.{where}", name, EVERYBODY, "is not of the tenant's own things")

    def _permission(self, place: Place) -> Iterator[Wire]:
        """Called by EventBridge, for a rule of the tenant's: people's rights are their roles' policies' to give."""
        principal, source = place.properties.get("Principal"), place.properties.get("SourceArn")
        if principal != "events.amazonaws.com" or not self._is_own(place, source):
            yield place.wire("Principal", principal, EVERYBODY, f"may call the function (source: {source})")

    def _bucket(self, place: Place) -> Iterator[Wire]:
        block = place.properties.get("PublicAccessBlockConfiguration", {})
        for name in _PUBLIC:
            if str(block.get(name)).lower() != "true":
                yield place.wire(name, block.get(name), EVERYBODY, "is not shut to the public")
        owner = [item.get("ObjectOwnership") for item in place.properties.get("OwnershipControls", {}).get("Rules", [])]
        if owner != ["BucketOwnerEnforced"] or "AccessControl" in place.properties:
            yield place.wire("OwnershipControls", owner, EVERYBODY, "listens to access control lists")

    def _share(self, place: Place) -> Iterator[Wire]:
        """Under its own name, and with no more of a queue than the environment file guarantees and lets it borrow."""
        name, sharing = place.properties.get("QuotaShareName"), "ResourceSharingConfiguration"
        if name != place.tenant:
            yield place.wire("QuotaShareName", name, str(name), "is another tenant's share of a queue")
        guaranteed, most = self._environment.guaranteed(place.tenant), self._environment.most(place.tenant)
        limits, shared = place.properties.get("CapacityLimits", []), place.properties.get(sharing, {})
        if not limits:
            yield place.wire("CapacityLimits", None, EVERYBODY, "takes without a limit")
        for limit in limits:
            kind, count = limit.get("CapacityUnit"), limit.get("MaxCapacity")
            own = guaranteed.get(kind, 0)
            if count > own:
                yield place.wire("CapacityLimits", f"{count} {kind}", EVERYBODY, f"takes more than its {own}")
            way, percent = shared.get("Strategy"), shared.get("BorrowLimit")
            if percent is None or percent < 0:  # Batch takes either for no limit
                percent = math.inf if way == "LEND_AND_BORROW" else 0
            if percent > (borrow_percent(own, most[kind]) if own else 0):
                said = "no limit" if percent == math.inf else f"{percent} %"
                yield place.wire(sharing, said, EVERYBODY, "borrows more than its queues may hold")
            elif own and way != (right := strategy(self._environment.tenant(place.tenant).share, own, most[kind])):
                yield place.wire(sharing, way, EVERYBODY, f"is not {right}")

    def _topic(self, place: Place) -> Iterator[Wire]:
        for listed in place.properties.get("Subscription", []):
            yield from self._subscription(place, listed)

    def _subscription(self, place: Place, subscription: Mapping[str, Any]) -> Iterator[Wire]:
        protocol = subscription.get("Protocol")
        if protocol != "email":
            yield place.wire("Protocol", protocol, EVERYBODY, "hands the tenant's alarms on; they are mailed alone")
        elif place.tenant != PLATFORM:
            yield from self._watchers.mail(place, "Endpoint", subscription.get("Endpoint"))


def _alternatives(detail: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What an event may say, one by one."""
    if "$or" not in detail:
        yield detail
    for one in detail.get("$or", []):
        yield {**{name: value for name, value in detail.items() if name != "$or"}, **one}


def _tagged(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Whose each thing is said to be, by a tag in whatever form, with its place."""
    if isinstance(value, dict):
        if value.get("Key") == TENANT_TAG and "Value" in value:
            yield where, str(value["Value"])
        for name, item in value.items():
            if name == TENANT_TAG:
                yield where, str(item)
            yield from _tagged(item, f"{where}.{name}" if where else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _tagged(item, where)
