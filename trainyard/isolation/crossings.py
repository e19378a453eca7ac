"""Every request that would cross a tenant's border or pass a guard-rail, and must therefore be refused.

What a request doesn't state is the caller's choice (`Context.free`): a refusal here holds in whatever way it is
asked. Where a policy's own pattern could name something that the examples don't, the pattern itself makes the example.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from trainyard.functions.broker_queue import training_job_prefix
from trainyard.functions.job_roles import job_role_arn
from trainyard.hardware import instance
from trainyard.isolation.account import (
    EACH_JOB,
    NODE_TAG,
    PLATFORM,
    SHARED_LOG_GROUP,
    TENANT_TAG,
    Account,
    DocumentKey,
    Endpoint,
    Role,
    Thing,
    example_job,
)
from trainyard.isolation.catalogue import ESCAPES, SHARED_ALLOWED, every_action
from trainyard.isolation.conditions import Context, Value
from trainyard.isolation.evaluator import Caller, Request
from trainyard.isolation.policy import Policy, action_matches, parse_statements

CREATE_JOB = "sagemaker:CreateTrainingJob"
SUBMIT = "batch:SubmitServiceJob"
MANAGE_JOB_ROLES = ("iam:CreateRole", "iam:DeleteRole", "iam:DeleteRolePolicy", "iam:PutRolePolicy", "iam:TagRole")
"""What a broker does that makes a role for each job."""
GUARD_RAIL = "guard-rail"
OUTSIDER = "999999999999"
"""An account that is not the environment's."""

FOREIGN_TYPE = "ml.c4.2xlarge"
"""A SageMaker type that no queue of ours can have: the planner knows only accelerated ones."""

_KNOWN_ABSENT = frozenset({"aws:principaltag/*", "aws:resourcetag/*", "aws:principalservicename"})
"""Roles have no tags but those of their templates, for no trust policy lets sts:TagSession through; the same for
resources."""


@dataclass(frozen=True)
class Question:
    """A request that must be refused, and whom it would hurt."""

    tenant: str
    """Who asks; empty for somebody who is no tenant's."""
    target: str
    """Whose it is: a tenant, `platform`, or `guard-rail`."""
    principal: str
    thing: str
    request: Request
    stated: str = ""
    """What the request says, for a reader."""


@dataclass(frozen=True)
class Scope:
    """Which questions to ask: all, or those that a change of policy can touch."""

    roles: frozenset[str] | None = None
    documents: frozenset[DocumentKey] | None = None
    actions: frozenset[str] | None = None
    """Patterns: no answer about another action can change."""

    def role(self, role: Role) -> bool:
        """Whether everything that the role asks is in scope."""
        return self.roles is None or role.arn in self.roles

    def thing(self, thing: Thing) -> bool:
        """Whether everything that is asked of the thing is in scope."""
        return self.documents is None or thing.document in self.documents

    def document(self, key: DocumentKey | None) -> bool:
        """Whether that document is."""
        return self.documents is None or key in self.documents

    def action(self, action: str) -> bool:
        """Whether a pattern covers the action."""
        return self.actions is None or any(action_matches(pattern, action) for pattern in self.actions)


EVERYWHERE = Scope()


@lru_cache(maxsize=100_000)
def intersection(first: str, second: str) -> str | None:
    """A string that both wildcard patterns match, or None."""
    prefixes = [_literal_prefix(pattern) for pattern in (first, second)]
    shorter = min(map(len, prefixes))
    if prefixes[0][:shorter] != prefixes[1][:shorter]:
        return None
    seen: set[tuple[int, int]] = set()
    stack: list[tuple[int, int, str]] = [(0, 0, "")]
    while stack:
        i, j, made = stack.pop()
        if (i, j) in seen:
            continue
        seen.add((i, j))
        if i == len(first) and j == len(second):
            return made
        left, right = first[i : i + 1], second[j : j + 1]
        if left == "*":
            stack.append((i + 1, j, made))
        if right == "*":
            stack.append((i, j + 1, made))
        if left == "*" and right not in {"", "*"}:
            stack.append((i, j + 1, made + ("x" if right == "?" else right)))
        elif right == "*" and left not in {"", "*"}:
            stack.append((i + 1, j, made + ("x" if left == "?" else left)))
        elif left and right and "*" not in {left, right} and (left == right or "?" in {left, right}):
            both = "x" if left == right == "?" else left if right == "?" else right
            stack.append((i + 1, j + 1, made + both))
    return None


@lru_cache(maxsize=100_000)
def _literal_prefix(pattern: str) -> str:
    ends = [at for at in (pattern.find(char) for char in "*?$") if at >= 0]
    return pattern[: min(ends)] if ends else pattern


class Crossings:
    """Asks the questions of one account."""

    def __init__(self, account: Account, scope: Scope = EVERYWHERE) -> None:
        self._account, self._scope = account, scope
        self._place = f"{account.environment.region}:{account.environment.account}"
        patterns = frozenset(
            pattern
            for statements in account.documents.values()
            for statement in statements
            if statement.allows
            for pattern in statement.actions
        )
        kinds = {thing.kind for thing in account.things}
        self._actions = {kind: tuple(filter(scope.action, every_action(kind, patterns))) for kind in kinds}
        self._things_by_pattern: dict[str, Thing] = {}
        for thing in account.things:
            self._things_by_pattern.setdefault(thing.pattern, thing)
        self._patterns: dict[str, tuple[str, ...]] = {}

    def all(self) -> Iterator[Question]:
        """Every question in scope."""
        if self._scope.actions is None:
            return self._asked()
        known: dict[str, bool] = {}
        return (question for question in self._asked() if self._is_asked(question.request.action, known))

    def _is_asked(self, action: str, known: dict[str, bool]) -> bool:
        if action not in known:
            known[action] = self._scope.action(action)
        return known[action]

    def _asked(self) -> Iterator[Question]:
        tenants = list(self._account.environment.tenants)
        for tenant in tenants:
            for role in self._account.roles_of(tenant):
                for target in tenants:
                    if target != tenant:
                        yield from self._things(role, tenant, target)
                        if self._scope.role(role):
                            yield from self._uses(role, tenant, target)
                yield from self._things(role, tenant, None)
                if self._scope.role(role):
                    yield from self._escapes(role, tenant)
                    yield from self._broken_rules(role, tenant)
                yield from self._storage_rules(role, tenant)
            yield from self._outside(tenant)

    def _things(self, role: Role, tenant: str, target: str | None) -> Iterator[Question]:
        """Every action on every thing of the target (None: of the platform)."""
        account, caller = self._account, self._account.caller(role)
        for thing in account.things_of(target):
            if not (self._scope.role(role) or self._scope.thing(thing)):
                continue
            policy = account.policy_of(thing)
            context = self._context(role, thing.context)
            allowed = SHARED_ALLOWED.get(thing.kind, frozenset()) if target is None else frozenset()
            for resource in self._resources(role, caller, thing):
                for action in self._actions[thing.kind]:
                    if action not in allowed:
                        request = Request(caller, action, resource, context, policy)
                        yield Question(tenant, target or PLATFORM, role.label, thing.name, request)

    def _resources(self, role: Role, caller: Caller, thing: Thing) -> list[str]:
        """The thing's examples, and one for each pattern of an Allow that meets the family."""
        if not thing.pattern.endswith("*"):
            return list(thing.examples)
        if role.arn not in self._patterns:
            self._patterns[role.arn] = tuple(
                {item for statement in caller.policy.statements if statement.allows for item in statement.resources}
            )
        met = (intersection(pattern, thing.pattern) for pattern in self._patterns[role.arn] if pattern != "*")
        return list(dict.fromkeys([*thing.examples, *(name for name in met if name)]))

    def _context(
        self, role: Role, stated: Mapping[str, Value], *, absent: frozenset[str] = frozenset(), free: bool = True
    ) -> Context:
        account = self._account.environment.account
        return Context(
            {
                "aws:principalarn": role.arn,
                "aws:principalaccount": account,
                "aws:principaltype": "AssumedRole",
                "aws:principalisawsservice": "false",
                "aws:resourceaccount": account,
                "aws:requestedregion": self._account.environment.region,
                "kms:calleraccount": account,
                **{f"aws:principaltag/{key.lower()}": value for key, value in role.tags.items()},
                **stated,
            },
            free,
            _KNOWN_ABSENT | absent,
        )

    def _ask(
        self,
        role: Role,
        tenant: str,
        target: str,
        action: str,
        resource: str,
        stated: Mapping[str, Value],
        absent: str = "",
    ) -> Question:
        context = self._context(role, stated, absent=frozenset({absent} if absent else ()))
        said = ", ".join(
            [f"{key} = {_said(value)}" for key, value in stated.items()] + ([f"no {absent}"] * bool(absent))
        )
        thing = self._things_by_pattern.get(resource)
        policy = self._account.policy_of(thing) if thing else None
        request = Request(self._account.caller(role), action, resource, context, policy)
        return Question(tenant, target, role.label, resource, request, said)

    def _uses(self, role: Role, tenant: str, target: str) -> Iterator[Question]:
        """Own jobs that would use what is the target's, and what counts as the target's by a tag or a name."""
        own, other = self._account.contracts[tenant], self._account.contracts[target]
        job = f"arn:aws:sagemaker:{self._place}:training-job/{tenant}-intruder"
        tag = f"aws:requesttag/{TENANT_TAG}"
        stated: list[dict[str, Value]] = [
            {"sagemaker:vpcsubnets": other.subnet_ids},
            {"sagemaker:vpcsubnets": own.subnet_ids + other.subnet_ids},
            {"sagemaker:vpcsecuritygroupids": other.security_group_ids},
            {"sagemaker:vpcsecuritygroupids": own.security_group_ids + other.security_group_ids},
            {"sagemaker:outputkmskeyarn": other.keys.checkpoints},
            {"sagemaker:outputkmskeyarn": other.keys.data},
            {"sagemaker:outputkmskeyarn": other.keys.artifacts},
            {"sagemaker:volumekmskeyarn": other.keys.checkpoints},
            {"sagemaker:filesystemid": other.file_system.id},
            {tag: target},
        ]
        for said in stated:
            yield self._ask(role, tenant, target, CREATE_JOB, job, said)
        yield self._ask(role, tenant, target, "sagemaker:AddTags", job, {tag: target})
        group = f"arn:aws:sagemaker:{self._place}:model-package-group/{tenant}-intruder"
        for action in ("sagemaker:CreateModelPackageGroup", "sagemaker:AddTags"):
            yield self._ask(role, tenant, target, action, group, {tag: target})
        yield self._ask(
            role, tenant, target, "cloudwatch:PutMetricData", "*", {"cloudwatch:namespace": f"trainyard/{target}"}
        )

    def _escapes(self, role: Role, tenant: str) -> Iterator[Question]:
        """Raising own rights, and compute or openings that no guard-rail binds, on whatever an Allow names."""
        caller, context = self._account.caller(role), self._context(role, {})
        boundary = [thing.pattern for thing in self._account.things_of(tenant, "managed policy")]
        contract = self._account.contracts[tenant]
        keys = tuple(contract.keys.model_dump().values())
        queues = [queue.arn for queue in contract.queues.values() if queue.arn]
        queues += [arn for share in contract.shares.values() for arn in (share.queue, share_arn(share.queue, tenant))]
        own = [contract.roles.job, *boundary, *keys, *queues, "*"]
        for action in filter(self._scope.action, ESCAPES):
            named = {
                pattern.replace("*", "x").replace("?", "x")
                for statement in caller.policy.about(action)[0]
                for pattern in statement.resources
                if pattern != "*"
            }
            for resource in [*own, *sorted(named)]:
                # Its work; what it must say is asked in _queue_rules and _role_rules, and whose share in _things.
                submits = action == SUBMIT and contract.shares and resource != "*"
                makes_roles = action in MANAGE_JOB_ROLES and contract.job_boundary and "/jobs/each/" in resource
                if role.label == "broker" and (submits or makes_roles):
                    continue
                thing = self._things_by_pattern.get(resource)
                policy = self._account.policy_of(thing) if thing else None
                yield Question(
                    tenant, GUARD_RAIL, role.label, resource, Request(caller, action, resource, context, policy)
                )

    def _broken_rules(self, role: Role, tenant: str) -> Iterator[Question]:
        """Own jobs that break one rule, and the job role handed to another service."""
        contract = self._account.contracts[tenant]
        job = f"arn:aws:sagemaker:{self._place}:training-job/{tenant}-unruly"
        types = sorted({kind for queue in contract.queues.values() for kind in queue.instance_types})
        for key in (
            "sagemaker:vpcsubnets",
            "sagemaker:vpcsecuritygroupids",
            "sagemaker:instancetypes",
            "sagemaker:outputkmskeyarn",
            "sagemaker:maxruntimeinseconds",
            f"aws:requesttag/{TENANT_TAG}",
        ):
            yield self._ask(role, tenant, GUARD_RAIL, CREATE_JOB, job, {}, absent=key)
        stated: list[dict[str, Value]] = [
            {"sagemaker:instancetypes": (FOREIGN_TYPE,)},
            {"sagemaker:instancetypes": (*types, FOREIGN_TYPE)},
            {"sagemaker:maxruntimeinseconds": str(round(contract.max_job_hours * 3600) + 1)},
            {"sagemaker:enableremotedebug": "true"},
            {"sagemaker:keepaliveperiod": str(round(contract.warm_pool_minutes * 60) + 1)},
        ]
        for said in stated:
            yield self._ask(role, tenant, GUARD_RAIL, CREATE_JOB, job, said)
        for kind in types:
            if not instance(kind).local_nvme_gib:
                said = {"sagemaker:instancetypes": (kind,)}
                yield self._ask(role, tenant, GUARD_RAIL, CREATE_JOB, job, said, absent="sagemaker:volumekmskeyarn")
        for service in ("lambda.amazonaws.com", "ec2.amazonaws.com"):
            said = {"iam:passedtoservice": service}
            yield self._ask(role, tenant, GUARD_RAIL, "iam:PassRole", contract.roles.job, said)
        shared = f"arn:aws:logs:{self._place}:log-group:{SHARED_LOG_GROUP}"
        yield self._ask(role, tenant, GUARD_RAIL, "logs:FilterLogEvents", shared, {})
        yield from self._queue_rules(role, tenant)
        yield from self._role_rules(role, tenant)
        if role.label == EACH_JOB:
            yield from self._next_job(role, tenant)
        yield self._carried_out(role, tenant)
        yield from self._shells(role, tenant)

    def _role_rules(self, role: Role, tenant: str) -> Iterator[Question]:
        """Of roles that are made for jobs: without the boundary or under another, elsewhere than where those of single
        jobs lie, by whom it may be taken, and the shared job role in their place."""
        contract = self._account.contracts[tenant]
        if not contract.job_boundary:
            return
        own = job_role_arn(contract.model_dump(mode="json"), example_job(tenant))
        limit = "iam:permissionsboundary"
        foreign = f"arn:aws:iam::{self._account.environment.account}:policy/Anything"
        for action in ("iam:CreateRole", "iam:PutRolePolicy"):
            yield self._ask(role, tenant, GUARD_RAIL, action, own, {}, absent=limit)
            yield self._ask(role, tenant, GUARD_RAIL, action, own, {limit: foreign})
        said: dict[str, Value] = {limit: contract.job_boundary}
        elsewhere = (contract.roles.job, contract.roles.broker, own.replace("/jobs/each/", "/"))
        for action in MANAGE_JOB_ROLES:
            for resource in elsewhere:
                yield self._ask(role, tenant, GUARD_RAIL, action, resource, said)
        for action in ("iam:UpdateAssumeRolePolicy", "iam:AttachRolePolicy", "iam:DeleteRolePermissionsBoundary"):
            yield self._ask(role, tenant, GUARD_RAIL, action, own, said)
        to_sagemaker: dict[str, Value] = {"iam:passedtoservice": "sagemaker.amazonaws.com"}
        yield self._ask(role, tenant, GUARD_RAIL, "iam:PassRole", contract.roles.job, to_sagemaker)
        for service in ("lambda.amazonaws.com", "ec2.amazonaws.com"):
            yield self._ask(role, tenant, GUARD_RAIL, "iam:PassRole", own, {"iam:passedtoservice": service})

    def _next_job(self, role: Role, tenant: str) -> Iterator[Question]:
        """A job's own role at what is another job's of the same tenant."""
        contract, other = self._account.contracts[tenant], f"{example_job(tenant)[:-1]}c"
        buckets, group = contract.buckets, f"arn:aws:logs:{self._place}:log-group:{SHARED_LOG_GROUP}"
        checkpoints, data = f"arn:aws:s3:::{buckets.checkpoints}", f"arn:aws:s3:::{buckets.data}"
        for bucket, prefix in (
            (checkpoints, f"jobs/{other}/"),
            (data, f"jobs/{other}/"),
            (f"arn:aws:s3:::{buckets.artifacts}", "models/another/"),
        ):
            yield self._ask(role, tenant, GUARD_RAIL, "s3:ListBucket", bucket, {"s3:prefix": prefix})
        for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"):
            stored = f"{checkpoints}/jobs/{other}/checkpoints/step-1/shard-0"
            yield self._ask(role, tenant, GUARD_RAIL, action, stored, {})
        for name in (f"jobs/{other}/spec/resolved_job.json", f"jobs/{other}/record.json", "secret/part-0.jsonl"):
            yield self._ask(role, tenant, GUARD_RAIL, "s3:GetObject", f"{data}/{name}", {})
        if contract.job_keys:
            for place in (f"{checkpoints}/jobs/{other}/checkpoints/step-1/shard-0", checkpoints):
                said: dict[str, Value] = {"kms:encryptioncontext:aws:s3:arn": place}
                for action in ("kms:Decrypt", "kms:GenerateDataKey"):
                    yield self._ask(role, tenant, GUARD_RAIL, action, contract.keys.checkpoints, said)
        names = [other, f"{training_job_prefix(tenant, other)}{'0' * 32}" if contract.shares else f"{other}-r2"]
        for name in names:
            stream = f"{group}:log-stream:{name}/algo-1-1700000000"
            yield self._ask(role, tenant, GUARD_RAIL, "logs:PutLogEvents", stream, {})

    def _shells(self, role: Role, tenant: str) -> Iterator[Question]:
        """A shell on a machine of the own cluster that is no login node, on one without a tag, or by another document
        than that of an interactive shell; somebody else's shell."""
        machine, start = f"arn:aws:ec2:{self._place}:instance/i-own", "ssm:StartSession"
        cluster, whose = f"arn:aws:sagemaker:{self._place}:cluster/a1b2c3d4e5f6", f"aws:resourcetag/{TENANT_TAG}"
        yield self._ask(role, tenant, GUARD_RAIL, start, cluster, {}, absent=whose)
        yield self._ask(role, tenant, GUARD_RAIL, start, cluster, {whose: "somebody-else"})
        # A tag on what is there already would make it the tenant's own.
        network = f"arn:aws:ec2:{self._place}:network-interface/eni-0"
        yield self._ask(role, tenant, GUARD_RAIL, "ec2:CreateTags", network, {}, absent="ec2:createaction")
        owner, node = f"ssm:resourcetag/{TENANT_TAG}", f"ssm:resourcetag/{NODE_TAG}"
        yield self._ask(role, tenant, GUARD_RAIL, start, machine, {owner: tenant, node: "compute"})
        yield self._ask(role, tenant, GUARD_RAIL, start, machine, {owner: tenant}, absent=node)
        yield self._ask(role, tenant, GUARD_RAIL, start, machine, {}, absent=owner)
        yield self._ask(role, tenant, GUARD_RAIL, start, machine, {"ssm:sessiondocumentaccesscheck": "false"})
        tunnel = f"arn:aws:ssm:{self._place}:document/AWS-StartPortForwardingSession"
        yield self._ask(role, tenant, GUARD_RAIL, start, tunnel, {})
        if role.label in ("launcher", "auditor", "operator"):  # people; the login node's agent serves all its sessions
            session, who = f"arn:aws:ssm:{self._place}:session/AROAOTHER:bob-0123456789abcdef0", "AROAEXAMPLE:ana"
            yield self._ask(role, tenant, GUARD_RAIL, "ssmmessages:OpenDataChannel", session, {"aws:userid": who})

    def _queue_rules(self, role: Role, tenant: str) -> Iterator[Question]:
        """Jobs for a queue that don't say whose they are, and jobs there that nobody has tagged."""
        tag = f"aws:requesttag/{TENANT_TAG}"
        for share in self._account.contracts[tenant].shares.values():
            for resource in (share.queue, share_arn(share.queue, tenant)):
                yield self._ask(role, tenant, GUARD_RAIL, SUBMIT, resource, {}, absent=tag)
                yield self._ask(role, tenant, GUARD_RAIL, SUBMIT, resource, {tag: "somebody-else"})
        job = f"arn:aws:batch:{self._place}:service-job/0a1b"
        # No tag of the job is stated: it has none.
        yield self._ask(role, tenant, GUARD_RAIL, "batch:TerminateServiceJob", job, {})
        yield self._ask(role, tenant, GUARD_RAIL, "batch:TagResource", job, {tag: "somebody-else"})

    def _carried_out(self, role: Role, tenant: str) -> Question:
        """An upload to another account's bucket that lets everybody in."""
        said: dict[str, Value] = {"aws:resourceaccount": OUTSIDER}
        resource = "arn:aws:s3:::carried-out/object"
        caller, context = self._account.caller(role), self._context(role, said)
        request = Request(caller, "s3:PutObject", resource, context, open_door(), OUTSIDER)
        return Question(tenant, GUARD_RAIL, role.label, resource, request, "a bucket of another account")

    def _storage_rules(self, role: Role, tenant: str) -> Iterator[Question]:
        """Own buckets over plain HTTP, or with objects under another key than the tenant's; own keys given away."""
        account, caller = self._account, self._account.caller(role)
        algorithm, key = "s3:x-amz-server-side-encryption", "s3:x-amz-server-side-encryption-aws-kms-key-id"
        stated: list[tuple[str, dict[str, Value]]] = [
            ("s3:GetObject", {"aws:securetransport": "false"}),
            ("s3:PutObject", {"aws:securetransport": "false"}),
            ("s3:PutObject", {algorithm: "AES256"}),
            ("s3:PutObject", {key: f"arn:aws:kms:{self._place}:key/another"}),
        ]
        for thing in account.things_of(tenant, "object"):
            if self._scope.role(role) or self._scope.thing(thing):
                for action, said in stated:
                    context, policy = self._context(role, said), account.policy_of(thing)
                    request = Request(caller, action, thing.examples[0], context, policy)
                    text = ", ".join(f"{name} = {_said(value)}" for name, value in said.items())
                    yield Question(tenant, GUARD_RAIL, role.label, thing.name, request, text)
        yield from self._small_files_rules(role, tenant)
        # Grants outlive the session that makes them: only for volumes, only by the services that attach those.
        for thing in account.things_of(tenant, "key"):
            if self._scope.role(role) or self._scope.thing(thing):
                direct = {"kms:grantisforawsresource": "false"}
                for context, text in (
                    (self._context(role, direct), "for itself"),
                    (self._context(role, {}, absent=frozenset({"kms:viaservice"})), "not through a service"),
                ):
                    request = Request(caller, "kms:CreateGrant", thing.pattern, context, account.policy_of(thing))
                    yield Question(tenant, GUARD_RAIL, role.label, thing.name, request, text)

    def _small_files_rules(self, role: Role, tenant: str) -> Iterator[Question]:
        """The own small files without TLS, past the mount target in the tenant's network, past the one folder, as
        root."""
        account, caller, said = self._account, self._account.caller(role), "elasticfilesystem:accesspointarn"
        elsewhere = f"arn:aws:elasticfilesystem:{self._place}:access-point/fsap-elsewhere"
        ways: tuple[dict[str, Value], ...] = (
            {"aws:securetransport": "false"},
            {"elasticfilesystem:accessedviamounttarget": "false"},
            {said: elsewhere},
        )
        stated = [(f"elasticfilesystem:{verb}", broken) for verb in ("ClientMount", "ClientWrite") for broken in ways]
        stated += [("elasticfilesystem:ClientRootAccess", {})]
        for thing in account.things_of(tenant, "small files"):
            if self._scope.role(role) or self._scope.thing(thing):
                for action, broken in stated:
                    request = Request(
                        caller, action, thing.pattern, self._context(role, broken), account.policy_of(thing)
                    )
                    text = ", ".join(f"{name} = {_said(value)}" for name, value in broken.items())
                    yield Question(tenant, GUARD_RAIL, role.label, thing.name, request, text)

    def _outside(self, tenant: str) -> Iterator[Question]:
        """Who is no tenant's role: administrators of the account, other accounts, services acting for those."""
        for thing in self._account.things_of(tenant):
            if thing.document and self._scope.thing(thing):
                yield from self._outsiders(tenant, thing)
                yield from self._services(tenant, thing)
        yield from self._through_endpoints(tenant)

    def _outsiders(self, tenant: str, thing: Thing) -> Iterator[Question]:
        account = self._account.environment.account
        policy = self._account.policy_of(thing)
        stranger, administrator = somebody(OUTSIDER), somebody(account)
        actions = self._actions[thing.kind]
        for action in actions:
            context = Context({"aws:principalaccount": OUTSIDER, "kms:calleraccount": OUTSIDER}, True, _KNOWN_ABSENT)
            request = Request(stranger, action, thing.examples[0], context, policy, account)
            yield Question("", tenant, "another account", thing.name, request)
        at_hand = {"aws:principalaccount": account, "kms:calleraccount": account, "aws:principalarn": administrator.arn}
        context = Context(at_hand, True, _KNOWN_ABSENT | {"kms:viaservice"})
        forbidden: dict[str, tuple[str, ...]] = {
            "key": ("kms:Decrypt", "kms:Encrypt", "kms:GenerateDataKey", "kms:ReEncryptFrom", "kms:CreateGrant")
        }
        if thing.pattern == self._account.contracts[tenant].roles.job:
            forbidden["role"] = ("sts:AssumeRole",)
        for action in forbidden.get(thing.kind, ()):
            request = Request(administrator, action, thing.examples[0], context, policy)
            yield Question("", GUARD_RAIL, "an administrator", thing.name, request, "no kms:ViaService")

        if thing.pattern == self._account.contracts[tenant].roles.operator:
            present, age = "aws:multifactorauthpresent", "aws:multifactorauthage"
            yield from (
                Question("", GUARD_RAIL, "an administrator", thing.name, self._glass(thing, said), text)
                for said, text in (
                    ({}, "without a second factor"),
                    ({present: "false", age: "60"}, "with no second factor"),
                    ({present: "true", age: "7200"}, "two hours after the second factor"),
                )
            )

    def _glass(self, thing: Thing, said: Mapping[str, Value]) -> Request:
        """An administrator of the account who would be the operator."""
        account = self._account.environment.account
        caller = somebody(account)
        absent = {"aws:multifactorauthpresent", "aws:multifactorauthage"} - set(said)
        stated: dict[str, Value] = {"aws:principalaccount": account, "aws:principalarn": caller.arn, **said}
        context = Context(stated, True, _KNOWN_ABSENT | absent)
        return Request(caller, "sts:AssumeRole", thing.examples[0], context, self._account.policy_of(thing))

    def _services(self, tenant: str, thing: Thing) -> Iterator[Question]:
        """Services that the thing's policy names, at work for another account or another tenant's log group."""
        policy = self._account.policy_of(thing)
        assert policy is not None
        foreign = f"arn:aws:logs:{self._account.environment.region}:{OUTSIDER}:log-group:any"
        stated: dict[str, Value] = {
            "aws:sourceaccount": OUTSIDER,
            "aws:sourcearn": foreign,
            "kms:encryptioncontext:aws:logs:arn": foreign,
        }
        names = {
            name: statement
            for statement in policy.statements
            if statement.allows and statement.principals
            for name in statement.principals.services
        }
        for name, statement in names.items():
            if name in {"lambda.amazonaws.com", "ec2.amazonaws.com"} and thing.kind == "role":
                continue  # functions and machines take only roles of their own account, and state no source then
            if thing.kind == "key" and name.startswith("events."):
                continue  # EventBridge states no source when it encrypts: the topic's own policy holds there
            service = Caller(name, OUTSIDER, service=True)
            for action in statement.actions:
                request = Request(service, action, thing.examples[0], Context(stated, True, _KNOWN_ABSENT), policy)
                text = "for another account"
                yield Question("", tenant, name, thing.name, request, text)

    def _through_endpoints(self, tenant: str) -> Iterator[Question]:
        """Another account's credentials inside the network, or its bucket from there: a way to carry data out. And any
        rights of this account at all, but another tenant's bucket."""
        account = self._account.environment.account
        for endpoint in self._account.endpoints:
            if endpoint.tenant != tenant or not self._scope.document(endpoint.document):
                continue
            policy = self._account.endpoint_policy(endpoint)
            for caller, owner, action, resource in _passages(
                endpoint.service, account, self._account.environment.region
            ):
                context = Context(_who(caller, account) | {"aws:resourceaccount": owner}, True, _KNOWN_ABSENT)
                request = Request(somebody(caller), action, resource, context, endpoint_policy=policy)
                text = f"caller of account {caller}, resource of account {owner}"
                yield Question("", GUARD_RAIL, "in the network", endpoint.name, request, text)
            if endpoint.service == "s3":
                yield from self._through_s3(tenant, endpoint, policy)
            yield from self._through_as_somebody_else(tenant, endpoint, policy)
            yield from self._through_to_somebody_elses(tenant, endpoint)

    def _inside(self, endpoint: Endpoint, arn: str, action: str, resource: str, **more: Value) -> Request:
        """A request of a role with every right, on what lets everybody in: the endpoint alone can refuse it."""
        account = arn.split(":")[4]
        stated: dict[str, Value] = {
            "aws:principalaccount": account,
            "aws:principalarn": arn,
            "aws:resourceaccount": self._account.environment.account,
            **more,
        }
        caller = Caller(arn, account, somebody(account).policy)
        context, policy = Context(stated, True, _KNOWN_ABSENT), self._account.endpoint_policy(endpoint)
        return Request(caller, action, resource, context, open_door(), endpoint_policy=policy)

    def _through_as_somebody_else(self, tenant: str, endpoint: Endpoint, policy: Policy | None) -> Iterator[Question]:
        """Other tenants', administrators' and other accounts' credentials in this network, at all that the endpoint's
        policy names: what is carried in by hand is of no use there."""
        others = {f"{name}'s job": item.roles.job for name, item in self._account.contracts.items() if name != tenant}
        others["an administrator"] = somebody(self._account.environment.account).arn
        others["another account's administrator"] = somebody(OUTSIDER).arn
        layers = image_layers(self._account.environment.region).removesuffix("layer") + "*"  # ECR's own, see below
        named = {
            (action.replace("*", "Anything"), resource.replace("*", "x"))
            for statement in (policy.statements if policy else ())
            for action in statement.actions
            for resource in statement.resources
            if statement.allows and resource != layers
        }
        for who, arn in others.items():
            for action, resource in sorted(named):
                request = self._inside(endpoint, arn, action, resource)
                text = f"in {tenant}'s network"
                yield Question("", GUARD_RAIL, who, endpoint.name, request, text)

    def _through_to_somebody_elses(self, tenant: str, endpoint: Endpoint) -> Iterator[Question]:
        """The own job's role, made an administrator, at what isn't the tenant's."""
        service = _PREFIXES.get(endpoint.service, endpoint.service)
        role = self._account.contracts[tenant].roles.job
        who, text = f"{tenant}'s job with every right", "through the endpoint"
        for other in (*self._account.contracts, None):
            if other == tenant:
                continue
            for thing in self._account.things_of(other):
                allowed = SHARED_ALLOWED.get(thing.kind, frozenset()) if other is None else frozenset()
                for action in self._actions[thing.kind]:
                    if action.startswith(f"{service}:") and action not in allowed:
                        request = self._inside(endpoint, role, action, thing.examples[0])
                        yield Question("", other or PLATFORM, who, endpoint.name, request, text)
            if service == "cloudwatch" and other is not None:
                space = {"cloudwatch:namespace": f"trainyard/{other}"}
                request = self._inside(endpoint, role, "cloudwatch:PutMetricData", "*", **space)
                yield Question("", other, who, endpoint.name, request, f"as trainyard/{other}")

    def _through_s3(self, tenant: str, endpoint: Endpoint, policy: Policy | None) -> Iterator[Question]:
        """Own buckets with foreign credentials or in foreign hands; other tenants' with any right."""
        account = self._account.environment.account

        def ask(target: str, thing: Thing, caller: str, owner: str) -> Question:
            context = Context(_who(caller, account) | {"aws:resourceaccount": owner}, True, _KNOWN_ABSENT)
            request = Request(somebody(caller), "s3:GetObject", thing.examples[0], context, endpoint_policy=policy)
            text = f"caller of account {caller}, bucket of account {owner}"
            return Question("", target, f"an administrator in {tenant}'s network", endpoint.name, request, text)

        for other in self._account.contracts:
            for thing in self._account.things_of(other, "object"):
                if other == tenant:
                    yield ask(GUARD_RAIL, thing, OUTSIDER, account)
                    yield ask(GUARD_RAIL, thing, account, OUTSIDER)
                else:
                    yield ask(other, thing, account, account)


_PREFIXES = {
    "monitoring": "cloudwatch",
    "sagemaker.api": "sagemaker",
    "experiments": "sagemaker-mlflow",
    "ecr.api": "ecr",
    "ecr.dkr": "ecr",
}
"""Actions' prefixes where they differ from the endpoint's name."""


def _passages(endpoint: str, account: str, region: str) -> Iterator[tuple[str, str, str, str]]:
    """Caller's account, resource's account, action and resource that an endpoint must not let through."""
    service = _PREFIXES.get(endpoint, endpoint)
    resource = "arn:aws:s3:::carried-out/object" if service == "s3" else "*"
    for action in ("s3:PutObject", "s3:GetObject") if service == "s3" else (f"{service}:Anything",):
        yield OUTSIDER, OUTSIDER, action, resource
        yield OUTSIDER, account, action, resource
        if service in {"s3", "dynamodb"}:
            yield account, OUTSIDER, action, resource
    if service == "s3":
        yield OUTSIDER, OUTSIDER, "s3:PutObject", image_layers(region)


def image_layers(region: str) -> str:
    """An object of the bucket where ECR keeps image layers, which it fetches with credentials of its own."""
    return f"arn:aws:s3:::prod-{region}-starport-layer-bucket/layer"


def _who(caller: str, account: str) -> dict[str, Value]:
    """The caller's account; of this one the role is anybody's guess."""
    who: dict[str, Value] = {"aws:principalaccount": caller}
    return who if caller == account else {**who, "aws:principalarn": somebody(caller).arn}


@lru_cache(maxsize=8)
def somebody(account: str) -> Caller:
    """An administrator: everything allowed by the own policies, no boundary."""
    statements = parse_statements(
        {"Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}}, "", "administrator", "PolicyDocument"
    )
    return Caller(f"arn:aws:iam::{account}:role/Administrator", account, Policy(statements))


@lru_cache(maxsize=1)
def open_door() -> Policy:
    """A bucket policy that lets everybody do everything."""
    everybody = {"Effect": "Allow", "Principal": "*", "Action": "*", "Resource": "*"}
    return Policy(parse_statements({"Statement": everybody}, "", "bucket of another account", "PolicyDocument"))


def share_arn(queue: str, tenant: str) -> str:
    """The tenant's share of a queue: shares have the tenants' names."""
    return f"{queue}/quota-share/{tenant}"


def _said(value: Value) -> str:
    return value if isinstance(value, str) else " + ".join(value)
