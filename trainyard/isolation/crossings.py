"""Every request that would cross a tenant's border or pass a guard-rail, and must therefore be refused.

What a request doesn't state is the caller's choice (`Context.free`): a refusal here holds in whatever way it is
asked. Where a policy's own pattern could name something that the examples don't, the pattern itself makes the example.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

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
    Role,
    example_job,
)
from trainyard.isolation.catalogue import ESCAPES, SHARED_ALLOWED, every_action
from trainyard.isolation.conditions import Context, Value
from trainyard.isolation.evaluator import Request
from trainyard.isolation.outsiders import Outsiders
from trainyard.isolation.passages import Passages
from trainyard.isolation.questions import (
    EVERYWHERE,
    GUARD_RAIL,
    OUTSIDER,
    UNTAGGED_ROLE,
    Question,
    Scope,
    example_of,
    examples,
    open_door,
)

CREATE_JOB = "sagemaker:CreateTrainingJob"
SUBMIT = "batch:SubmitServiceJob"
MANAGE_JOB_ROLES = ("iam:CreateRole", "iam:DeleteRole", "iam:DeleteRolePolicy", "iam:PutRolePolicy", "iam:TagRole")
"""What a broker does that makes a role for each job."""
FOREIGN_TYPE = "ml.c4.2xlarge"
"""A SageMaker type that no queue of ours can have: the planner knows only accelerated ones."""

_STOPS = frozenset({"iam:AttachRolePolicy", "iam:DetachRolePolicy"})
"""What AWS Budgets does to tenants' roles as a role of the platform's, with policies of a stop/ path."""

_LEDGER = "broker/"
"""Where a broker keeps quota and budget, in the checkpoints' bucket."""


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
        self._outsiders = Outsiders(account, scope, self._actions)
        self._passages = Passages(account, scope, self._actions)

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
                yield from self._ledger_rules(role, tenant)
            yield from self._outsiders.asked(tenant)
            yield from self._passages.asked(tenant)
        for role in self._account.roles_of(None):
            for target in tenants:
                yield from self._things(role, "", target)
            if self._scope.role(role):
                yield from self._escapes(role, "")
        yield from self._outsiders.asked(None)

    def _things(self, role: Role, tenant: str, target: str | None) -> Iterator[Question]:
        """Every action on every thing of the target (None: of the platform)."""
        account, caller = self._account, self._account.caller(role)
        for thing in account.things_of(target):
            if not (self._scope.role(role) or self._scope.thing(thing)):
                continue
            policy = account.policy_of(thing)
            context = self._context(role, thing.context)
            allowed = SHARED_ALLOWED.get(thing.kind, frozenset()) if target is None else frozenset()
            for resource in examples(thing, caller.policy, policy):
                for action in self._actions[thing.kind]:
                    if action not in allowed:
                        request = Request(caller, action, resource, context, policy)
                        yield from self._asked_by(role, tenant, target or PLATFORM, thing.name, request)

    def _asked_by(self, role: Role, tenant: str, target: str, thing: str, request: Request) -> Iterator[Question]:
        """Of the platform's role AWS Budgets is known to put stop policies on tenants' roles: it is asked of others."""
        if role.tenant is not None:
            yield Question(tenant, target, role.label, thing, request)
        elif request.action not in _STOPS:
            yield Question(tenant, target, f"{PLATFORM}'s {role.label}", thing, request)
        else:
            for policy in self._no_stops(target):
                said = {**request.context.stated, "iam:policyarn": policy}
                asked = replace(request, context=replace(request.context, stated=said))
                text = f"iam:policyarn = {policy}"
                yield Question(tenant, target, f"{PLATFORM}'s {role.label}", thing, asked, text)

    def _no_stops(self, target: str) -> tuple[str, ...]:
        """Policies that are no stop policies: AWS's, one of the account's own, and one where the target's are, as the
        boundary is, which lets each of its roles do the most that any may."""
        environment = self._account.environment
        own = f"arn:aws:iam::{environment.account}:policy/"
        folders = [f"{name}/" for name in environment.tenants if name == target]
        return (
            "arn:aws:iam::aws:policy/AdministratorAccess",
            f"{own}Administrators",
            *(f"{own}trainyard/{environment.name}/{folder}Boundary" for folder in folders or [""]),
        )

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
            UNTAGGED_ROLE | absent,
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
        thing = self._account.thing_at(resource)
        own = thing.context if thing and thing.pattern == resource else {}
        context = self._context(role, {**own, **stated}, absent=frozenset({absent} if absent else ()))
        said = ", ".join(
            [f"{key} = {_said(value)}" for key, value in stated.items()] + ([f"no {absent}"] * bool(absent))
        )
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
        own = [*(self._own(tenant) if tenant else ()), "*"]
        for action in filter(self._scope.action, ESCAPES):
            named = {
                example_of(pattern)
                for statement in caller.policy.about(action)[0]
                for pattern in statement.resources
                if pattern != "*"
            }
            for resource in [*own, *sorted(named)]:
                if role.label == "broker" and self._is_its_work(tenant, action, resource):
                    continue
                thing = self._account.thing_at(resource)
                policy = self._account.policy_of(thing) if thing else None
                request = Request(caller, action, resource, context, policy)
                yield from self._asked_by(role, tenant, GUARD_RAIL, resource, request)

    def _own(self, tenant: str) -> Iterable[str]:
        """Of the tenant's things, those that would raise rights or start compute."""
        contract = self._account.contracts[tenant]
        yield contract.roles.job
        yield from (thing.pattern for thing in self._account.things_of(tenant, "managed policy"))
        yield from contract.keys.model_dump().values()
        yield from (queue.arn for queue in contract.queues.values() if queue.arn)
        for share in contract.shares.values():
            yield from (share.queue, share_arn(share.queue, tenant))

    def _is_its_work(self, tenant: str, action: str, resource: str) -> bool:
        """A broker's; what it must say is asked in _queue_rules and _role_rules, and whose share in _things."""
        contract = self._account.contracts[tenant]
        submits = action == SUBMIT and contract.shares and resource != "*"
        makes_roles = action in MANAGE_JOB_ROLES and contract.job_boundary and "/jobs/each/" in resource
        return bool(submits or makes_roles)

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
        yield from self._carried_out(role, tenant)
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
        whose = f"aws:resourcetag/{TENANT_TAG}"
        yield self._ask(role, tenant, GUARD_RAIL, "batch:TerminateServiceJob", job, {}, absent=whose)
        yield self._ask(role, tenant, GUARD_RAIL, "batch:TagResource", job, {tag: "somebody-else"})

    def _carried_out(self, role: Role, tenant: str) -> Iterator[Question]:
        """An upload to another account's bucket that lets everybody in: any, and each that a policy names."""
        said: dict[str, Value] = {"aws:resourceaccount": OUTSIDER}
        caller, context = self._account.caller(role), self._context(role, said)
        named = (example_of(name) for name in caller.policy.patterns if name.startswith("arn:aws:s3:") and "/" in name)
        for resource in dict.fromkeys(("arn:aws:s3:::carried-out/object", *named)):
            request = Request(caller, "s3:PutObject", resource, context, open_door(), OUTSIDER)
            yield Question(tenant, GUARD_RAIL, role.label, resource, request, "a bucket of another account")

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
                policy = account.policy_of(thing)
                asked = examples(thing, caller.policy, policy)
                for action, said in stated:
                    context = self._context(role, said)
                    text = ", ".join(f"{name} = {_said(value)}" for name, value in said.items())
                    for resource in asked:
                        request = Request(caller, action, resource, context, policy)
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

    def _ledger_rules(self, role: Role, tenant: str) -> Iterator[Question]:
        """Quota and budget written by whom they bind: by all but the broker, and the operator who breaks the glass."""
        if role.label in ("broker", "operator"):
            return
        account, caller = self._account, self._account.caller(role)
        bucket = f"arn:aws:s3:::{account.contracts[tenant].buckets.checkpoints}"
        for thing in account.things_of(tenant, "object"):
            if thing.pattern != f"{bucket}/*" or not (self._scope.role(role) or self._scope.thing(thing)):
                continue
            begin, policy = f"{bucket}/{_LEDGER}", account.policy_of(thing)
            ledger = replace(thing, pattern=f"{begin}*", examples=(f"{begin}ledger-2026-01.json",))
            for resource in examples(ledger, caller.policy, policy):
                for action in ("s3:PutObject", "s3:DeleteObject"):
                    request = Request(caller, action, resource, self._context(role, thing.context), policy)
                    yield Question(tenant, GUARD_RAIL, role.label, thing.name, request, "the broker's ledger")

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


def share_arn(queue: str, tenant: str) -> str:
    """The tenant's share of a queue: shares have the tenants' names."""
    return f"{queue}/quota-share/{tenant}"


def _said(value: Value) -> str:
    return value if isinstance(value, str) else " + ".join(value)
