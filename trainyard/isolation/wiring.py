"""What a tenant's templates connect, beside what their policies allow: networks, targets, roles, buckets, addresses.

A policy says who may ask. A security group that lets another tenant's in, a function that runs as the platform's role,
a rule that hears of everybody's jobs or a file system that is linked to somebody's bucket asks nobody: so each property
of each resource of a tenant must name the tenant's own things, and what opens a way (a network's rule or route, a
function's permission, a bucket's public access) must be as it is listed here. A type that nobody has looked at stops
the proof: whatever it opens would be seen by nobody.
"""

import binascii
import json
import math
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trainyard.errors import InputError, JobFailedError
from trainyard.hardware import instance, price
from trainyard.isolation.account import DOCUMENTS, PLATFORM, TENANT_TAG, Account, tags_of
from trainyard.isolation.catalogue import KIND_OF_TYPE
from trainyard.isolation.templates import Deployment
from trainyard.spec.platform import TenantContract, parse_contract
from trainyard.spec.shares import BATCH_PREFIX, borrow_percent, strategy

EVERYBODY = "every tenant"
"""Whom a finding hurts where it is not one tenant."""

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

_WAYS_OUT = {
    "AWS::EC2::EIP": frozenset({"Domain", "Tags"}),
    "AWS::EC2::InternetGateway": frozenset({"Tags"}),
    "AWS::EC2::NatGateway": frozenset({"AllocationId", "SubnetId", "Tags"}),
    "AWS::EC2::Route": frozenset(
        {"RouteTableId", "DestinationCidrBlock", "GatewayId", "NatGatewayId", "VpcEndpointId"}
    ),
    "AWS::EC2::VPCGatewayAttachment": frozenset({"InternetGatewayId", "VpcId"}),
}
"""Only for a tenant with `egress`, and by these properties alone: no peering, no transit gateway, no other network."""

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

_KNOWN_BY_NAME = frozenset({"AWS::IAM::InstanceProfile", "AWS::IAM::Role", "AWS::S3::Bucket"})
"""Types that others name without their ARN."""

_PUBLIC = ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets")
_NOWHERE = "255.255.255.255/32"
"""What the CDK writes where a group may send nothing: without a rule EC2 would let everything out."""

_OPAQUE = re.compile(r"\b(?:[a-z]{2,6}-[0-9a-f]{17}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b")
_ACCOUNT = re.compile(r"\barn:aws[a-z-]*:[a-z0-9-]+:[a-z0-9-]*:(\d{12}):")
_BUCKET = re.compile(r"(?:\barn:aws[a-z-]*:s3:::|\bs3://)([a-z0-9][a-z0-9.-]*)")


@dataclass(frozen=True)
class Wire:
    """A connection that leads out of its tenant, or lets somebody in."""

    tenant: str
    resource: str
    """Stack and logical id."""
    where: str
    """The property."""
    reaches: str
    """What it names."""
    target: str
    """Whose that is: a tenant, the platform, or everybody's."""
    why: str

    def __str__(self) -> str:
        return f"{self.tenant}'s {self.resource} {self.where}: {self.reaches} of {self.target}: {self.why}"


@dataclass(frozen=True)
class _Place:
    """A resource of a tenant, resolved."""

    tenant: str
    stack: str
    logical_id: str
    kind: str
    properties: Mapping[str, Any]

    def wire(self, where: str, reaches: object, target: str, why: str) -> Wire:
        return Wire(self.tenant, f"{self.stack}/{self.logical_id}", where, str(reaches), target, why)


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
    for logical_id, resource in template.get("Resources", {}).items():
        kind = resource["Type"]
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
        for place in self._places:
            for check in self._checks(place.kind):
                yield from check(place)
        for place in self._shared:
            if place.kind in self._shared_checks:
                yield from self._shared_checks[place.kind](place)

    @cached_property
    def _places(self) -> list[_Place]:
        return [
            place
            for stack in self._deployment.templates
            if (tenant := self._tenant_of(stack)) is not None
            for place in self._resources(stack, tenant)
        ]

    @cached_property
    def _shared(self) -> list[_Place]:
        stacks = [stack for stack in self._deployment.templates if self._tenant_of(stack) is None]
        return [place for stack in stacks for place in self._resources(stack, PLATFORM)]

    def _resources(self, stack: str, tenant: str) -> Iterator[_Place]:
        for logical_id, resource in self._deployment.templates[stack].get("Resources", {}).items():
            properties = self._deployment.resolve(resource.get("Properties", {}), stack)
            clear = _in_clear(properties, f"stack {stack}: {resource['Type']} {logical_id}")
            yield _Place(tenant, stack, logical_id, resource["Type"], clear)

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

    def _checks(self, kind: str) -> list[Callable[[_Place], Iterator[Wire]]]:
        special: dict[str, Callable[[_Place], Iterator[Wire]]] = {
            "AWS::Batch::QuotaShare": self._share,
            "AWS::EC2::SecurityGroup": self._group,
            "AWS::EC2::SecurityGroupEgress": lambda place: self._out(place, place.properties),
            "AWS::EC2::SecurityGroupIngress": lambda place: self._in(place, place.properties),
            "AWS::Events::Rule": self._rule,
            "AWS::IAM::ManagedPolicy": self._holders,
            "AWS::IAM::Policy": self._holders,
            "AWS::IAM::Role": self._boundary,
            "AWS::Lambda::Function": self._settings,
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
        return [self._foreign, self._tags, self._runs_as, *ways, *([special[kind]] if kind in special else [])]

    @cached_property
    def _shared_checks(self) -> dict[str, Callable[[_Place], Iterator[Wire]]]:
        """What may be no other way in a stack that is no tenant's. The rest of the platform's is everybody's by intent:
        its queues and its repository, and what it lets tenants do with them the policies say."""
        return {
            "AWS::Lambda::Permission": self._permission,
            "AWS::S3::Bucket": self._bucket,
            "AWS::SNS::Subscription": lambda place: self._subscription(place, place.properties),
            "AWS::SNS::Topic": self._topic,
        }

    def _is_own(self, place: _Place, name: object) -> bool:
        return str(name) in self._owners and self._owners[str(name)] == self._tenant_of(place.stack)

    def _foreign(self, place: _Place) -> Iterator[Wire]:
        """Names of other tenants' things, of other accounts, and of buckets that are none of the tenant's own."""
        policies = {*DOCUMENTS.get(place.kind, ()), *(("Policies",) if place.kind == "AWS::IAM::Role" else ())}
        for where, text in _strings(place.properties):
            if where.partition(".")[0] in policies:
                continue  # the evaluator's: a name there may be a pattern, or what is refused
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
        return None

    def _tags(self, place: _Place) -> Iterator[Wire]:
        """By its tag a thing is told to be a tenant's, to policies and to the bill."""
        owner = tags_of(place.properties.get("Tags")).get(TENANT_TAG, place.tenant)
        if owner != place.tenant:
            yield place.wire("Tags", owner, owner, "is tagged as another's")

    def _runs_as(self, place: _Place) -> Iterator[Wire]:
        """As a role of its own tenant; only AWS Budgets acts as one of the platform's, which can do nothing else."""
        for where, text in _strings(place.properties):
            is_budgets = (place.kind, where) == ("AWS::Budgets::BudgetsAction", "ExecutionRoleArn")
            names = where.split(".")
            is_role = names[-1] in _ROLES or "IamInstanceProfile" in names
            if is_role and not is_budgets and not self._is_own(place, text):
                does = "gives rights to" if place.kind in DOCUMENTS else "runs as"
                yield place.wire(where, text, PLATFORM, f"{does} a role that is none of the tenant's")

    def _way_out(self, place: _Place) -> Iterator[Wire]:
        properties = place.properties
        network = self._environment.tenant(place.tenant).network
        if network.egress is None:
            yield place.wire("Type", place.kind, EVERYBODY, "leads out of a network that has no egress")
        for name in sorted(set(properties) - _WAYS_OUT[place.kind]):
            yield place.wire(name, properties[name], EVERYBODY, "leads out by another way than the firewall")
        fence = properties.get("VpcEndpointId")
        if place.kind == "AWS::EC2::Route" and self._serves_jobs(place) and fence not in self._fences(place.tenant):
            target = fence or properties.get("GatewayId") or properties.get("NatGatewayId")
            yield place.wire("RouteTableId", target, EVERYBODY, "leads jobs out past the firewall")

    def _firewall(self, place: _Place) -> Iterator[Wire]:
        policy = place.properties.get("FirewallPolicyArn")
        if not self._is_own(place, policy):
            yield place.wire("FirewallPolicyArn", policy, EVERYBODY, "lets through by a policy not the tenant's")

    def _fence(self, place: _Place) -> Iterator[Wire]:
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

    def _hosts(self, place: _Place) -> Iterator[Wire]:
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

    def _serves_jobs(self, route: _Place) -> bool:
        """Whether it is in the table of a subnet that the contract gives to jobs."""
        subnets = self._contract(route).subnet_ids
        return any(
            other.properties.get("RouteTableId") == route.properties.get("RouteTableId")
            for other in self._places
            if other.kind == "AWS::EC2::SubnetRouteTableAssociation" and other.properties.get("SubnetId") in subnets
        )

    def _contract(self, place: _Place) -> TenantContract:
        return self._account.contracts[place.tenant]

    def _group(self, place: _Place) -> Iterator[Wire]:
        for rule in place.properties.get("SecurityGroupIngress", []):
            yield from self._in(place, rule)
        for rule in place.properties.get("SecurityGroupEgress", []):
            yield from self._out(place, rule)
        if not place.properties.get("SecurityGroupEgress") and not self._has_rule_out(place):
            yield place.wire("SecurityGroupEgress", None, EVERYBODY, "has no rule, so that EC2 lets everything out")

    def _has_rule_out(self, group: _Place) -> bool:
        own = self._deployment.physical_id(group.stack, group.logical_id)
        return any(
            other.kind == "AWS::EC2::SecurityGroupEgress" and other.properties.get("GroupId") == own
            for other in self._places
        )

    def _in(self, place: _Place, rule: Mapping[str, Any]) -> Iterator[Wire]:
        """Nobody is let in but by an own group."""
        if not self._is_own(place, rule.get("SourceSecurityGroupId")):
            source = {name: value for name, value in rule.items() if name.startswith(("Cidr", "Source"))}
            yield place.wire("SecurityGroupIngress", source, EVERYBODY, "lets in what is no group of the tenant's")

    def _out(self, place: _Place, rule: Mapping[str, Any]) -> Iterator[Wire]:
        """To own groups, and to port 443 of the endpoints (and of the firewall, where there is one)."""
        port = (rule.get("IpProtocol"), rule.get("FromPort"), rule.get("ToPort"))
        if rule.get("CidrIp") == _NOWHERE or self._is_own(place, rule.get("DestinationSecurityGroupId")):
            return
        if "CidrIp" not in rule or port != ("tcp", 443, 443):
            yield place.wire("SecurityGroupEgress", dict(rule), EVERYBODY, "sends elsewhere than to port 443")

    def _rule(self, place: _Place) -> Iterator[Wire]:
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

    def _holders(self, place: _Place) -> Iterator[Wire]:
        for name in ("Users", "Groups"):
            if place.properties.get(name):
                yield place.wire(name, place.properties[name], EVERYBODY, "gives rights to whom no boundary holds")

    def _boundary(self, place: _Place) -> Iterator[Wire]:
        boundary = place.properties.get("PermissionsBoundary")
        if not self._is_own(place, boundary):
            yield place.wire("PermissionsBoundary", boundary, EVERYBODY, "stands under no boundary of the tenant's")

    def _settings(self, place: _Place) -> Iterator[Wire]:
        """A function's settings are JSON: whom it serves, how that one's jobs are called, what they may cost."""
        for name, text in place.properties.get("Environment", {}).get("Variables", {}).items():
            content = _json(text)
            wrong = [] if content.get("tenant", place.tenant) == place.tenant else [content["tenant"]]
            wrong += [prefix for prefix in content.get("prefixes", []) if not self._is_heard(place.tenant, prefix)]
            for found in wrong:
                yield place.wire(f"Environment.{name}", found, EVERYBODY, "serves another tenant")
            for key, value in self._measures(place.tenant).get(name, {}).items():
                if content.get(key) != value:
                    said = f"{key} {json.dumps(content.get(key))}"
                    yield place.wire(f"Environment.{name}", said, EVERYBODY, f"is not {json.dumps(value)}")

    def _measures(self, tenant: str) -> dict[str, dict[str, Any]]:
        """By what a tenant's functions measure, by their variables: one that hears of no job, or knows no price, would
        hold nobody to a quota."""
        spec, queued = self._environment.tenant(tenant), self._environment.queued(tenant)
        batch = [f"{prefix}{tenant}-" for prefix in (BATCH_PREFIX, BATCH_PREFIX.lower()) if queued]
        own = sorted(self._environment.most(tenant))
        kinds = sorted({*own, *self._environment.max_instances})
        rates: dict[str, dict[str, str]] = {}
        for way, spot in (("on_demand", False), ("spot", True)):
            for kind, usd in self._prices(kinds, spot=spot).items():
                rates.setdefault(kind, {})[way] = str(usd)
        return {
            "METER": {
                "prefixes": [f"{tenant}-", *batch],
                "budget": spec.budget.model_dump(
                    mode="json", include={"monthly_usd", "monthly_gpu_hours", "when_spent"}
                ),
                "rates": {kind: rates.get(kind, {}) for kind in kinds},
                "gpus": {kind: instance(kind).num_gpus for kind in kinds},
            },
            "BROKER": {
                "contract": self._environment.contract_parameter(tenant),
                "prices": self._prices(own, spot=False),
                "gpus": {kind: instance(kind).num_gpus for kind in own},
            },
        }

    def _prices(self, kinds: Iterable[str], *, spot: bool) -> dict[str, float]:
        known = {}
        for kind in kinds:
            try:
                known[kind] = price(kind, self._environment.region, spot=spot).usd_per_hour
            except InputError:  # none is known: it is no part of the settings then
                continue
        return known

    def _published(self, place: _Place) -> Iterator[Wire]:
        """The contract, to which the broker holds jobs, allows what the environment file does."""
        if place.properties.get("Name") != self._environment.contract_parameter(place.tenant):
            return
        text, where = str(place.properties.get("Value")), f"{place.stack}/{place.logical_id}"
        said = parse_contract(text, where).model_dump(mode="json")
        for queue in said["queues"].values():
            del queue["arn"]
        said["shares"] = {kind: (share["guaranteed"], share["most"]) for kind, share in said["shares"].items()}
        for name, value in self._allowances(place.tenant).items():
            if said[name] != value:
                yield place.wire(f"Value.{name}", json.dumps(said[name]), EVERYBODY, f"is not {json.dumps(value)}")

    def _allowances(self, tenant: str) -> dict[str, Any]:
        environment, spec = self._environment, self._environment.tenant(tenant)
        most, guaranteed = environment.most(tenant), environment.guaranteed(tenant)
        budget = {"monthly_usd", "monthly_gpu_hours", "when_spent", "warn_at_percent"}
        return {
            "queues": {
                name: queue.model_dump(mode="json", include={"instance_types", "max_instances", "multi_node"})
                for name, queue in spec.queues.items()
            },
            "shares": {kind: (guaranteed[kind], most[kind]) for kind in most} if environment.queued(tenant) else {},
            **spec.budget.model_dump(mode="json", include=budget),
            "max_job_hours": spec.max_job_hours,
            "warm_pool_minutes": spec.warm_pool_minutes,
        }

    def _permission(self, place: _Place) -> Iterator[Wire]:
        """Called by EventBridge, for a rule of the tenant's: people's rights are their roles' policies' to give."""
        principal, source = place.properties.get("Principal"), place.properties.get("SourceArn")
        if principal != "events.amazonaws.com" or not self._is_own(place, source):
            yield place.wire("Principal", principal, EVERYBODY, f"may call the function (source: {source})")

    def _bucket(self, place: _Place) -> Iterator[Wire]:
        block = place.properties.get("PublicAccessBlockConfiguration", {})
        for name in _PUBLIC:
            if str(block.get(name)).lower() != "true":
                yield place.wire(name, block.get(name), EVERYBODY, "is not shut to the public")
        owner = [item.get("ObjectOwnership") for item in place.properties.get("OwnershipControls", {}).get("Rules", [])]
        if owner != ["BucketOwnerEnforced"] or "AccessControl" in place.properties:
            yield place.wire("OwnershipControls", owner, EVERYBODY, "listens to access control lists")

    def _share(self, place: _Place) -> Iterator[Wire]:
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

    def _topic(self, place: _Place) -> Iterator[Wire]:
        for listed in place.properties.get("Subscription", []):
            yield from self._subscription(place, listed)

    def _subscription(self, place: _Place, subscription: Mapping[str, Any]) -> Iterator[Wire]:
        protocol = subscription.get("Protocol")
        if protocol != "email":
            yield place.wire("Protocol", protocol, EVERYBODY, "hands the tenant's alarms on; they are mailed alone")


def _alternatives(detail: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What an event may say, one by one."""
    if "$or" not in detail:
        yield detail
    for one in detail.get("$or", []):
        yield {**{name: value for name, value in detail.items() if name != "$or"}, **one}


def _strings(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a property, with its place; the texts in a list stand where the list does."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(item, f"{where}.{name}" if where else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, where)


def _json(text: object) -> Mapping[str, Any]:
    """Settings that are written as JSON; nothing where they aren't."""
    try:
        content = json.loads(str(text))
    except json.JSONDecodeError:
        return {}
    return content if isinstance(content, dict) else {}


def _in_clear(value: Any, where: str) -> Any:
    """The same with what machines run as root in plain text, which EC2 takes in base64."""
    if isinstance(value, list):
        return [_in_clear(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    clear = {name: _in_clear(item, where) for name, item in value.items()}
    if isinstance(clear.get("UserData"), str):
        try:
            clear["UserData"] = b64decode(clear["UserData"], validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise JobFailedError(
                f"{where}: UserData is no text in base64, so that the isolation proof can't read what machines run; "
                "write it with Fn::Base64"
            ) from None
    return clear
