"""The account that an environment's templates would make: who is in it, what they own, and every policy there is."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainyard.errors import JobFailedError
from trainyard.functions.job_roles import job_role_arn, job_role_policies, job_role_trust
from trainyard.isolation.evaluator import Caller
from trainyard.isolation.policy import Policy, Statement, parse_statements
from trainyard.isolation.templates import Deployment
from trainyard.spec.platform import TRAINING_LOG_GROUP, EnvironmentSpec, TenantContract, parse_contract
from trainyard.spec.shares import BATCH_PREFIX

PLATFORM = "the platform"
"""What a finding calls the owner of what all tenants share: words, as a tenant may be called `platform`."""

SHARED_LOG_GROUP = TRAINING_LOG_GROUP
"""SageMaker writes every job's output here, in streams that begin with the job's name."""

TENANT_TAG = "trainyard:tenant"

ENVIRONMENT_TAG = "trainyard:environment"

COST_TAG = "trainyard:cost-center"

NODE_TAG = "trainyard:node"

EACH_JOB = "each job"
"""Label of the role that the broker makes for a single job, where it does: one stands for all."""

DocumentKey = tuple[str, str, str]
"""Stack, logical id, and which document of the resource."""

DOCUMENTS = {
    "AWS::IAM::Role": ("AssumeRolePolicyDocument",),
    "AWS::IAM::Policy": ("PolicyDocument",),
    "AWS::IAM::RolePolicy": ("PolicyDocument",),
    "AWS::IAM::ManagedPolicy": ("PolicyDocument",),
    "AWS::S3::BucketPolicy": ("PolicyDocument",),
    "AWS::SNS::TopicPolicy": ("PolicyDocument",),
    "AWS::SQS::QueuePolicy": ("PolicyDocument",),
    "AWS::EC2::VPCEndpoint": ("PolicyDocument",),
    "AWS::KMS::Key": ("KeyPolicy",),
    "AWS::ECR::Repository": ("RepositoryPolicyText",),
    "AWS::EFS::FileSystem": ("FileSystemPolicy",),
}
"""Where each type keeps the policies that the proof reads. A document anywhere else stops the proof."""

_ATTACHED_TO = {
    "AWS::S3::BucketPolicy": "Bucket",
    "AWS::SNS::TopicPolicy": "Topics",
    "AWS::SQS::QueuePolicy": "Queues",
}
"""Policies that are resources of their own: the property that names what they protect."""

EVERYTHING = {"Statement": [{"Sid": "UnreadManagedPolicy", "Effect": "Allow", "Action": "*", "Resource": "*"}]}
"""What a managed policy of AWS counts as: its text is not in the templates, so it may allow anything."""


@dataclass(frozen=True)
class Role:
    """A role of the account."""

    arn: str
    tenant: str | None
    """None for the platform's."""
    label: str
    """`job`, `launcher` or `auditor` where the contract names it, else the logical id."""
    tags: Mapping[str, str]
    identity: tuple[DocumentKey, ...]
    trust: DocumentKey
    boundary: DocumentKey | None


@dataclass(frozen=True)
class Thing:
    """A resource, or a family of them, that somebody owns."""

    kind: str
    tenant: str | None
    """None for the platform's."""
    pattern: str
    """ARN; with wildcards for a family (all objects of a bucket)."""
    examples: tuple[str, ...]
    """ARNs of the family that are always asked about."""
    name: str
    """Stack and logical id, for a reader."""
    context: Mapping[str, str] = field(default_factory=dict)
    """Condition keys that follow from the resource."""
    document: DocumentKey | None = None
    """Its own policy."""


@dataclass(frozen=True)
class Endpoint:
    """A VPC endpoint of a tenant."""

    tenant: str
    service: str
    """`s3`, `kms`, `ecr.dkr`, ..."""
    name: str
    document: DocumentKey | None


@dataclass(frozen=True)
class Account:
    """Roles, things and policies, all resolved. `changed` gives the same account with a policy altered."""

    environment: EnvironmentSpec
    contracts: Mapping[str, TenantContract]
    roles: tuple[Role, ...]
    things: tuple[Thing, ...]
    endpoints: tuple[Endpoint, ...]
    documents: Mapping[DocumentKey, tuple[Statement, ...]]
    unbounded: frozenset[str] = frozenset()
    """Roles whose boundary is lifted."""
    _policies: dict[tuple[DocumentKey, ...], Policy] = field(default_factory=dict, compare=False)
    _callers: dict[str, Caller] = field(default_factory=dict, compare=False)
    _things: dict[str | None, list[Thing]] = field(default_factory=dict, compare=False)
    _at: dict[str, Thing | None] = field(default_factory=dict, compare=False)

    def policy(self, *keys: DocumentKey) -> Policy:
        """Documents judged as one policy."""
        if keys not in self._policies:
            self._policies[keys] = Policy(tuple(item for key in keys for item in self.documents[key]))
        return self._policies[keys]

    def caller(self, role: Role) -> Caller:
        """The role's session as an evaluator takes it."""
        if role.arn not in self._callers:
            lifted = role.boundary is None or role.arn in self.unbounded
            self._callers[role.arn] = Caller(
                role.arn,
                self.environment.account,
                self.policy(*role.identity),
                None if lifted or role.boundary is None else self.policy(role.boundary),
            )
        return self._callers[role.arn]

    def policy_of(self, thing: Thing) -> Policy | None:
        """The resource's own policy, if it has one."""
        return self.policy(thing.document) if thing.document else None

    def endpoint_policy(self, endpoint: Endpoint) -> Policy | None:
        """None where the endpoint has none: it then lets everything through."""
        return self.policy(endpoint.document) if endpoint.document else None

    def role(self, tenant: str, label: str) -> Role:
        """The tenant's role of that label, or whose logical id begins with it."""
        return next(role for role in self.roles if role.tenant == tenant and role.label.startswith(label))

    def roles_of(self, tenant: str | None) -> list[Role]:
        """The tenant's roles, or the platform's."""
        return [role for role in self.roles if role.tenant == tenant]

    def things_of(self, tenant: str | None, *kinds: str) -> list[Thing]:
        """What the tenant, or the platform, owns; of some kinds only where given."""
        if tenant not in self._things:
            self._things[tenant] = [thing for thing in self.things if thing.tenant == tenant]
        return [thing for thing in self._things[tenant] if not kinds or thing.kind in kinds]

    def thing_at(self, arn: str) -> Thing | None:
        """The thing with a policy that this ARN is, or is in."""
        if arn not in self._at:
            bucket = arn.partition("/")[0] if arn.startswith("arn:aws:s3:") else arn
            found = next((item for item in self.things if item.pattern in {arn, bucket}), None)
            role = (item for item in self.things if item.kind == "role" and arn in item.examples)
            self._at[arn] = found or next(role, None)
        return self._at[arn]

    def changed(
        self, documents: Mapping[DocumentKey, tuple[Statement, ...]], unbounded: frozenset[str] = frozenset()
    ) -> "Account":
        """This account with some documents replaced and some boundaries lifted. What isn't touched is shared."""
        return replace(
            self,
            documents={**self.documents, **documents},
            unbounded=self.unbounded | unbounded,
            _policies={
                keys: policy for keys, policy in self._policies.items() if not any(key in documents for key in keys)
            },
            _callers={},
        )


def build(deployment: Deployment, environment: EnvironmentSpec) -> Account:
    """The account of an environment's templates; JobFailedError for a policy that the proof wouldn't read."""
    reader = _Reader(deployment, environment)
    return Account(
        environment,
        reader.contracts,
        tuple(reader.roles()),
        tuple(reader.things()),
        tuple(reader.endpoints()),
        reader.documents,
    )


class _Reader:
    """One pass over the templates."""

    def __init__(self, deployment: Deployment, environment: EnvironmentSpec) -> None:
        self._deployment, self._environment = deployment, environment
        self.documents: dict[DocumentKey, tuple[Statement, ...]] = {}
        for stack, logical_id in self._resources():
            self._read_documents(stack, logical_id)
        self.contracts = {tenant: self._contract(tenant) for tenant in environment.tenants}
        self._labels = {
            arn: label
            for contract in self.contracts.values()
            for label, arn in contract.roles.model_dump().items()
            if isinstance(arn, str)
        }
        self._policy_of = self._attached_policies()

    def _resources(self, kind: str = "") -> Iterator[tuple[str, str]]:
        for stack, template in self._deployment.templates.items():
            for logical_id, resource in template.get("Resources", {}).items():
                if not kind or resource["Type"] == kind:
                    yield stack, logical_id

    def _property(self, stack: str, logical_id: str, name: str) -> Any:
        value = self._deployment.properties(stack, logical_id).get(name)
        return self._deployment.resolve(value, stack)

    def _read_documents(self, stack: str, logical_id: str) -> None:
        deployment = self._deployment
        kind, properties = deployment.type_of(stack, logical_id), deployment.properties(stack, logical_id)
        known = DOCUMENTS.get(kind, ())
        for name, value in properties.items():
            if name in known:
                self._add(stack, logical_id, name, deployment.resolve(value, stack))
            elif kind == "AWS::IAM::Role" and name == "Policies":
                for inline in deployment.resolve(value, stack):
                    self._add(stack, logical_id, f"Policies.{inline['PolicyName']}", inline["PolicyDocument"])
            elif _holds_statements(value):
                raise JobFailedError(
                    f"stack {stack}: {kind} {logical_id} has a policy in {name} that the isolation proof doesn't read; "
                    "add it to trainyard/isolation/account.py"
                )

    def _add(self, stack: str, logical_id: str, name: str, document: Any) -> None:
        content = json.loads(document) if isinstance(document, str) else document
        self.documents[stack, logical_id, name] = parse_statements(content, stack, logical_id, name)

    def _contract(self, tenant: str) -> TenantContract:
        name = self._environment.contract_parameter(tenant)
        for stack, logical_id in self._resources("AWS::SSM::Parameter"):
            if self._property(stack, logical_id, "Name") == name:
                found = parse_contract(str(self._property(stack, logical_id, "Value")), f"{stack}/{logical_id}")
                if found.tenant != tenant:
                    raise JobFailedError(f"{stack}/{logical_id} publishes tenant {found.tenant}'s contract as {name}")
                return found
        raise JobFailedError(f"no stack publishes {name}; tenant {tenant} has no contract")

    def _owner(self, stack: str, logical_id: str) -> str | None:
        """By its tag, else by its stack's name."""
        tag = tags_of(self._property(stack, logical_id, "Tags")).get(TENANT_TAG)
        if tag in self._environment.tenants:
            return tag
        prefix = f"trainyard-{self._environment.name}-"
        return next((name for name in self._environment.tenants if stack.startswith(f"{prefix}{name}-")), None)

    def roles(self) -> Iterator[Role]:
        """Every role with its policies, boundary and trust."""
        for stack, logical_id in self._resources("AWS::IAM::Role"):
            arn = self._deployment.arn(stack, logical_id)
            yield Role(
                arn,
                self._owner(stack, logical_id),
                self._labels.get(arn, logical_id),
                tags_of(self._property(stack, logical_id, "Tags")),
                tuple(self._identity(stack, logical_id, arn)),
                (stack, logical_id, "AssumeRolePolicyDocument"),
                self._managed(stack, logical_id, self._property(stack, logical_id, "PermissionsBoundary")),
            )
        yield from self._each_jobs()

    def _each_jobs(self) -> Iterator[Role]:
        """A job's own role as the broker would make it, where it makes such: in no template, but what stands in the
        account all day."""
        for tenant, contract in self.contracts.items():
            if not contract.job_boundary:
                continue
            content, job_id = contract.model_dump(mode="json"), example_job(tenant)
            stack = f"trainyard-{self._environment.name}-{tenant}-foundation"
            own, trust = (stack, "EachJob", "PolicyDocument"), (stack, "EachJob", "AssumeRolePolicyDocument")
            inputs = [f"s3://{contract.buckets.data}/train/", f"s3://{contract.buckets.artifacts}/models/acme-llama/x/"]
            self._add(*own, job_role_policies(content, job_id, inputs))
            self._add(*trust, job_role_trust(content))
            arn = job_role_arn(content, job_id)
            boundary = self._managed(stack, "EachJob", contract.job_boundary)
            tags = {ENVIRONMENT_TAG: self._environment.name, TENANT_TAG: tenant}
            yield Role(arn, tenant, EACH_JOB, tags, (own,), trust, boundary)

    def _identity(self, stack: str, logical_id: str, arn: str) -> Iterator[DocumentKey]:
        name = arn.rsplit("/", 1)[-1]
        yield from (key for key in self.documents if key[:2] == (stack, logical_id) and key[2].startswith("Policies."))
        for kind, listing in (
            ("AWS::IAM::Policy", "Roles"),
            ("AWS::IAM::ManagedPolicy", "Roles"),
            ("AWS::IAM::RolePolicy", "RoleName"),
        ):
            for where, policy in self._resources(kind):
                if name in _many(self._property(where, policy, listing)):
                    yield (where, policy, "PolicyDocument")
        for managed in _many(self._property(stack, logical_id, "ManagedPolicyArns")):
            key = self._managed(stack, logical_id, managed)
            if key:
                yield key

    def _managed(self, stack: str, logical_id: str, arn: str | None) -> DocumentKey | None:
        """The document of a managed policy; one that no template defines may allow anything."""
        if arn is None:
            return None
        for where, policy in self._resources("AWS::IAM::ManagedPolicy"):
            if self._deployment.arn(where, policy) == arn:
                return (where, policy, "PolicyDocument")
        key = (stack, logical_id, arn)
        self.documents[key] = parse_statements(EVERYTHING, *key)
        return key

    def _attached_policies(self) -> dict[str, DocumentKey]:
        """Resource policies by the ARN of what they protect."""
        found: dict[str, DocumentKey] = {}
        for stack, logical_id, name in self.documents:
            kind = self._deployment.type_of(stack, logical_id)
            if kind in _ATTACHED_TO:
                for target in _many(self._property(stack, logical_id, _ATTACHED_TO[kind])):
                    arn = target if str(target).startswith("arn:") else f"arn:aws:s3:::{target}"
                    found[arn] = (stack, logical_id, name)
            elif (
                kind in {"AWS::KMS::Key", "AWS::ECR::Repository", "AWS::EFS::FileSystem"}
                or name == "AssumeRolePolicyDocument"
            ):
                found[self._deployment.arn(stack, logical_id)] = (stack, logical_id, name)
        return found

    def things(self) -> Iterator[Thing]:
        """Every resource that somebody could reach, with what belongs to it."""
        from trainyard.isolation.catalogue import FAMILIES, KIND_OF_TYPE

        for stack, logical_id in self._resources():
            kind = KIND_OF_TYPE.get(self._deployment.type_of(stack, logical_id))
            if kind is None:
                continue
            arn, owner = self._deployment.arn(stack, logical_id), self._owner(stack, logical_id)
            tags = tags_of(self._property(stack, logical_id, "Tags"))
            context = {f"aws:resourcetag/{key.lower()}": value for key, value in tags.items()}
            document = self._policy_of.get(arn)
            base = arn.removesuffix(":*") if kind == "log group" else arn
            name = f"{stack}/{logical_id}"
            spellings = ("", ":*") if kind == "log group" else ("",)
            yield Thing(kind, owner, base, tuple(base + end for end in spellings), name, context, document)
            for family, suffix, endings in FAMILIES.get(kind, ()):
                inside = tuple(f"{base}{suffix}{ending}" for ending in endings)
                yield Thing(family, owner, f"{base}{suffix}*", inside, name, {}, document)
        yield from self._named_things()

    def _named_things(self) -> Iterator[Thing]:
        """What is no resource of a template: told apart by name alone, or made at run time."""
        region, account = self._environment.region, self._environment.account
        place = f"{region}:{account}"

        def family(kind: str, tenant: str, prefix: str, *endings: str, **context: str) -> Thing:
            examples = tuple(f"{prefix}{ending}" for ending in endings)
            return Thing(kind, tenant, f"{prefix}*", examples, f"{kind}s of {tenant}", context)

        for tenant, contract in self.contracts.items():
            tags = self._tags(tenant)
            prefixes = [
                f"{tenant}-",
                *(f"{batch}{tenant}-" for batch in (BATCH_PREFIX, BATCH_PREFIX.lower()) if contract.shares),
            ]
            for prefix in prefixes:  # a queue's jobs are Batch's to name
                job = f"arn:aws:sagemaker:{place}:training-job/{prefix}"
                yield family("training job", tenant, job, "llama-20260101000000-0a1b", **tags)
                streams = f"arn:aws:logs:{place}:log-group:{SHARED_LOG_GROUP}:log-stream:{prefix}"
                yield family("log stream", tenant, streams, "llama-20260101000000-0a1b/algo-1-1700000000")
            if contract.shares:  # told apart by their tags alone
                queued = f"arn:aws:batch:{place}:service-job/"
                yield Thing("service job", tenant, f"{queued}*", (f"{queued}0a1b",), f"queued jobs of {tenant}", tags)
            if contract.job_boundary:
                content = contract.model_dump(mode="json")
                each, stack = job_role_arn(content, ""), f"trainyard-{self._environment.name}-{tenant}-foundation"
                trust, name = (stack, "EachJob", "AssumeRolePolicyDocument"), f"roles of {tenant}'s jobs"
                made = self._tags(tenant, with_cost=False)  # the broker says of a role whose it is, not who pays
                yield Thing("role", tenant, f"{each}*", (each + example_job(tenant),), name, made, trust)
            packages = f"arn:aws:sagemaker:{place}:model-package"
            yield family("model package", tenant, f"{packages}/{tenant}-", "llama/1", **tags)
            yield family("model package group", tenant, f"{packages}-group/{tenant}-", "llama", **tags)
            parameters = f"arn:aws:ssm:{place}:parameter/trainyard/{self._environment.name}/{tenant}/"
            yield family("parameter", tenant, parameters, "contract")
            vpc = f"arn:aws:ec2:{place}:vpc/{contract.vpc_id}"
            interfaces = f"arn:aws:ec2:{place}:network-interface/"
            yield Thing(
                "network interface", tenant, interfaces + "*", (interfaces + f"eni-{tenant}",), vpc, {"ec2:vpc": vpc}
            )
            if contract.cluster is not None and contract.cluster.engine == "hyperpod":
                # Its machines are SageMaker's own; a shell on them is asked of the cluster.
                name = f"trainyard-{self._environment.name}-{tenant}"
                logs = f"arn:aws:logs:{place}:log-group:/aws/sagemaker/Clusters/{name}/"
                yield family("log group", tenant, logs, "a1b2c3d4e5f6")
            elif contract.cluster is not None:
                tags = {TENANT_TAG: tenant, NODE_TAG: contract.cluster.login_tag}
                said = {
                    f"{kind}:resourcetag/{key}": value for kind in ("aws", "ec2", "ssm") for key, value in tags.items()
                }
                machines = f"arn:aws:ec2:{place}:instance/"
                name = f"machines of {tenant}"
                yield Thing("machine", tenant, machines + "*", (machines + f"i-{tenant}",), name, said)
        group = f"arn:aws:logs:{place}:log-group:{SHARED_LOG_GROUP}"
        yield Thing("log group", None, group, (group, f"{group}:*"), "SageMaker's shared log group")
        for stack in self._deployment.templates:
            arn = f"arn:aws:cloudformation:{place}:stack/{stack}/"
            owner = next(
                (t for t in self.contracts if stack.startswith(f"trainyard-{self._environment.name}-{t}-")), None
            )
            example = (arn + "00000000-0000-0000-0000-000000000000",)
            yield Thing("stack", owner, arn + "*", example, stack, self._tags(owner))

    def _tags(self, tenant: str | None, *, with_cost: bool = True) -> dict[str, str]:
        """What everything of the tenant, or of the platform, is tagged as, by whoever makes it. Other tags it may have
        too."""
        said = {ENVIRONMENT_TAG: self._environment.name}
        if tenant is not None:
            said[TENANT_TAG] = tenant
            said |= {COST_TAG: self._environment.tenant(tenant).cost_center} if with_cost else {}
        return {f"aws:resourcetag/{key}": value for key, value in said.items()}

    def endpoints(self) -> Iterator[Endpoint]:
        """The tenants' VPC endpoints."""
        for stack, logical_id in self._resources("AWS::EC2::VPCEndpoint"):
            tenant = self._owner(stack, logical_id)
            service = str(self._property(stack, logical_id, "ServiceName"))
            key = (stack, logical_id, "PolicyDocument")
            if tenant:
                prefix = f"com.amazonaws.{self._environment.region}."
                document = key if key in self.documents else None
                # SageMaker's newer endpoints are named the other way round: aws.sagemaker.us-east-1.experiments.
                name = service.removeprefix(prefix).removeprefix(f"aws.sagemaker.{self._environment.region}.")
                yield Endpoint(tenant, name, f"{stack}/{logical_id}", document)


def example_job(tenant: str) -> str:
    """The id of the job that stands for all of a tenant's."""
    return f"{tenant}-llama-20260101000000-0a1b"


def _holds_statements(value: Any) -> bool:
    if isinstance(value, dict):
        return ("Statement" in value and "Version" in value) or any(map(_holds_statements, value.values()))
    return isinstance(value, list) and any(map(_holds_statements, value))


def _many(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def tags_of(value: Any) -> dict[str, str]:
    """Tags as the templates have them: most types list them, some map them."""
    if isinstance(value, dict):
        return {str(key): str(text) for key, text in value.items()}
    return {str(tag["Key"]): str(tag["Value"]) for tag in _many(value) if isinstance(tag, dict) and "Key" in tag}
