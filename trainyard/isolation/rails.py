"""Guard-rail by guard-rail: one request that it lets through, and requests that it alone refuses.

Each refusal is asked of the tenant's launcher, or of its broker where that submits the jobs, after somebody has
attached an administrator's policy to it, and differs from an allowed request in what the guard-rail is about, so that
nothing else can be the reason. The same cases go to every evaluator there is: ours, the tests' two others, and AWS's
own (`scripts/verify_guardrails`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainyard.functions.job_roles import job_role_arn
from trainyard.hardware import instance
from trainyard.isolation.account import NODE_TAG, TENANT_TAG, Account, DocumentKey, Role, example_job
from trainyard.isolation.conditions import Context, Value
from trainyard.isolation.crossings import CREATE_JOB, FOREIGN_TYPE, MANAGE_JOB_ROLES, SUBMIT, share_arn
from trainyard.isolation.evaluator import Caller, Request
from trainyard.isolation.policy import Policy, parse_statements
from trainyard.isolation.questions import OUTSIDER
from trainyard.isolation.templates import Deployment
from trainyard.spec.shares import BATCH_PREFIX

ADMINISTRATOR = {"Statement": [{"Sid": "Administrator", "Effect": "Allow", "Action": "*", "Resource": "*"}]}
"""What somebody has attached to the role."""

INVOKE = "lambda:InvokeFunction"
NEVER = "Never"
"""The rail against other compute, and against reading what jobs in the shared queues ask for."""

OWN_THINGS = "OwnThings"
"""The rail that holds what is made, stopped, called, passed and logged to to the tenant's own, kind by kind."""
_FOREIGN_POLICY = f"arn:aws:iam::{OUTSIDER}:policy/Anything"

SIBLINGS = {
    "tuning": ("sagemaker:CreateHyperParameterTuningJob", "hyper-parameter-tuning-job/x"),
    "processing": ("sagemaker:CreateProcessingJob", "processing-job/x"),
    "transform": ("sagemaker:CreateTransformJob", "transform-job/x"),
    "AutoML": ("sagemaker:CreateAutoMLJobV2", "automl-job/x"),
    "a cluster": ("sagemaker:CreateCluster", "cluster/x"),
    "a pipeline": ("sagemaker:CreatePipeline", "pipeline/x"),
    "a pipeline's run": ("sagemaker:StartPipelineExecution", "pipeline/x"),
    "a model to serve": ("sagemaker:CreateModel", "model/x"),
    "a model card": ("sagemaker:CreateModelCard", "model-card/x"),
    "a tracking server": ("sagemaker:CreateMlflowTrackingServer", "mlflow-tracking-server/x"),
    "changing a registered model": ("sagemaker:UpdateModelPackage", "model-package/x/1"),
    "an endpoint": ("sagemaker:CreateEndpoint", "endpoint/x"),
    "a notebook": ("sagemaker:CreateNotebookInstance", "notebook-instance/x"),
    "a space": ("sagemaker:CreateSpace", "space/d-0/x"),
    "a training plan": ("sagemaker:CreateTrainingPlan", "training-plan/x"),
    "changing a running job": ("sagemaker:UpdateTrainingJob", "training-job/x"),
    "a shell in a space": ("sagemaker:StartSession", "space/d-0/x"),
    "Batch's unchecked queue": ("batch:SubmitServiceJob", "job-queue/x"),
    "a machine": ("ec2:RunInstances", "instance/i-0"),
    "a function": ("lambda:CreateFunction", "function:x"),
}
"""Other ways to compute, by the words for them: the action, and a resource of its kind."""


@dataclass(frozen=True)
class RailCase:
    """One request and what every evaluator must say of it."""

    rail: str
    """Sid of the statement that refuses; for an allowed request the one that it passes."""
    what: str
    allowed: bool
    role: Role
    action: str
    resource: str
    stated: Mapping[str, Value]
    """Condition keys as IAM spells them. What isn't here is absent."""

    def __str__(self) -> str:
        return f"{self.rail}: {self.what}"

    def request(self, account: Account) -> Request:
        """For our evaluator."""
        caller = account.caller(self.role)
        if not self.allowed:
            attached = parse_statements(ADMINISTRATOR, "", "attached by somebody", "PolicyDocument")
            caller = Caller(caller.arn, caller.account, Policy((*caller.policy.statements, *attached)), caller.boundary)
        lower = {key.lower(): value for key, value in self.stated.items()}
        return Request(caller, self.action, self.resource, Context(lower))

    def policies(self, deployment: Deployment) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The role's own policies and its boundary as the templates have them, for other evaluators."""
        own = [written(deployment, key) for key in self.role.identity]
        limits = [written(deployment, self.role.boundary)] if self.role.boundary else []
        return [*own, *([] if self.allowed else [ADMINISTRATOR])], limits


def written(deployment: Deployment, key: DocumentKey) -> dict[str, Any]:
    """A policy document of a template, its intrinsics resolved, otherwise untouched."""
    stack, logical_id, name = key
    document = deployment.resolve(deployment.properties(stack, logical_id)[name], stack)
    return {"Version": "2012-10-17", **document}


def rail_cases(account: Account, tenant: str, other: str) -> Iterator[RailCase]:
    """All cases of `tenant`; `other` is the tenant whose things it must not use."""
    cases = _Cases(account, tenant, other)
    if account.contracts[tenant].shares:
        yield from cases.queue()
    else:
        yield from cases.jobs()
        yield from cases.volumes()
    yield from cases.requests()
    yield from cases.siblings()
    yield from cases.roles()
    yield from cases.objects()
    yield from cases.models()
    yield from cases.broker()
    yield from cases.job_roles()
    yield from cases.shells()
    yield from cases.runs()


class _Cases:
    """The requests of one tenant."""

    def __init__(self, account: Account, tenant: str, other: str) -> None:
        self._account, self._tenant = account, tenant
        self._own, self._other = account.contracts[tenant], account.contracts[other]
        self._foreign_tag = other
        self._launcher = account.role(tenant, "launcher")
        self._submitter = account.role(tenant, "broker") if self._own.broker else self._launcher
        self._place = f"{account.environment.region}:{account.environment.account}"
        self._types = sorted({kind for queue in self._own.queues.values() for kind in queue.instance_types})
        each = job_role_arn(self._own.model_dump(mode="json"), example_job(tenant))
        self._job_role = each if self._own.job_boundary else self._own.roles.job
        self._job = f"arn:aws:sagemaker:{self._place}:training-job/{tenant}-llama-20260101000000-0a1b"

    def _proper(self, kind: str) -> dict[str, Value]:
        """The condition keys of a job that follows every rule."""
        own = self._own
        volume: dict[str, Value] = {}
        if not instance(kind).local_nvme_gib:
            volume = {"sagemaker:VolumeKmsKeyArn": own.keys.checkpoints}
        return {
            f"aws:RequestTag/{TENANT_TAG}": self._tenant,
            "sagemaker:VpcSubnets": own.subnet_ids,
            "sagemaker:VpcSecurityGroupIds": own.security_group_ids,
            "sagemaker:InstanceTypes": (kind,),
            "sagemaker:OutputKmsKeyArn": own.keys.checkpoints,
            "sagemaker:MaxRuntimeInSeconds": str(round(own.max_job_hours * 3600)),
            "sagemaker:EnableRemoteDebug": "false",
            **volume,
        }

    def _case(
        self, rail: str, what: str, *, action: str, resource: str, stated: Mapping[str, Value], allowed: bool = False
    ) -> RailCase:
        return RailCase(rail, what, allowed, self._launcher, action, resource, stated)

    def _submit(
        self, rail: str, what: str, *, action: str, resource: str, stated: Mapping[str, Value], allowed: bool = False
    ) -> RailCase:
        """A case of whoever submits the tenant's jobs, which the boundary knows by its ARN."""
        submits = self._own.broker and action in (CREATE_JOB, SUBMIT, *MANAGE_JOB_ROLES)
        known = {"aws:PrincipalArn": self._submitter.arn} if submits else {}
        said: Mapping[str, Value] = {**stated, **known}
        return RailCase(rail, what, allowed, self._submitter, action, resource, said)

    def _job_case(self, rail: str, what: str, changes: Mapping[str, Value | None], kind: str = "") -> RailCase:
        """A proper job with some keys changed (None: not stated)."""
        stated = {**self._proper(kind or self._types[0]), **changes}
        present = {key: value for key, value in stated.items() if value is not None}
        return self._submit(rail, what, action=CREATE_JOB, resource=self._job, stated=present)

    def jobs(self) -> Iterator[RailCase]:
        """CreateTrainingJob: a proper job, with the optional keys too, and then each rule broken."""
        own, other, kind = self._own, self._other, self._types[0]
        proper = self._job_case("", "a proper job", {})
        files = self._job_case("", "the own file system", {"sagemaker:FileSystemId": own.file_system.id})
        without, warm = {"sagemaker:EnableRemoteDebug": None}, "sagemaker:KeepAlivePeriod"
        rules: dict[str, tuple[RailCase, dict[str, Mapping[str, Value | None]]]] = {
            "JobsSayVpc": (
                proper,
                {
                    "no VPC": {"sagemaker:VpcSubnets": None},
                    "serverless: neither VPC nor types": {
                        "sagemaker:VpcSubnets": None,
                        "sagemaker:VpcSecurityGroupIds": None,
                        "sagemaker:InstanceTypes": None,
                    },
                },
            ),
            "JobsOwnSubnets": (
                proper,
                {
                    "another tenant's subnet": {"sagemaker:VpcSubnets": other.subnet_ids},
                    "the own subnet and another's": {"sagemaker:VpcSubnets": own.subnet_ids + other.subnet_ids},
                },
            ),
            "JobsSayGroups": (proper, {"no security group": {"sagemaker:VpcSecurityGroupIds": None}}),
            "JobsOwnGroups": (
                proper,
                {
                    "another tenant's group": {"sagemaker:VpcSecurityGroupIds": other.security_group_ids},
                    "the own group and another's": {
                        "sagemaker:VpcSecurityGroupIds": own.security_group_ids + other.security_group_ids
                    },
                },
            ),
            "OwnFileSystem": (
                files,
                {
                    "another tenant's file system": {"sagemaker:FileSystemId": other.file_system.id},
                },
            ),
            "JobsSayOutputKey": (proper, {"no output key": {"sagemaker:OutputKmsKeyArn": None}}),
            "OutputUnderOwnKey": (
                proper,
                {"another tenant's key": {"sagemaker:OutputKmsKeyArn": other.keys.checkpoints}},
            ),
            "JobsSayTypes": (proper, {"instance preferences: no type stated": {"sagemaker:InstanceTypes": None}}),
            "JobsQueueTypes": (
                proper,
                {
                    "a type of no queue": {"sagemaker:InstanceTypes": (FOREIGN_TYPE,)},
                    "an own type and another": {"sagemaker:InstanceTypes": (kind, FOREIGN_TYPE)},
                },
            ),
            "JobsMaxTime": (
                proper,
                {
                    "no running time": {"sagemaker:MaxRuntimeInSeconds": None},
                    "a second too long": {"sagemaker:MaxRuntimeInSeconds": str(round(own.max_job_hours * 3600) + 1)},
                },
            ),
            "JobsKeepWarm": (
                self._job_case("", "machines kept as long as allowed", {warm: str(round(own.warm_pool_minutes * 60))}),
                {"machines kept a second longer": {warm: str(round(own.warm_pool_minutes * 60) + 1)}},
            ),
            "JobsOwnTag": (
                proper,
                {
                    "no tenant's tag": {f"aws:RequestTag/{TENANT_TAG}": None},
                    "another tenant's tag": {f"aws:RequestTag/{TENANT_TAG}": self._foreign_tag},
                },
            ),
            "JobsNoShell": (
                self._job_case("", "remote debug not spoken of", without),
                {"a shell": {"sagemaker:EnableRemoteDebug": "true"}},
            ),
        }
        for rail, (passing, broken) in rules.items():
            yield replace(passing, rail=rail, allowed=True)
            for what, changes in broken.items():
                base = {"sagemaker:FileSystemId": own.file_system.id} if passing is files else {}
                yield self._job_case(rail, what, {**base, **changes})
        yield replace(proper, rail=OWN_THINGS, allowed=True)
        foreign = self._job.replace(f"/{self._tenant}-", f"/{self._foreign_tag}-")
        yield replace(proper, rail=OWN_THINGS, what="another tenant's job name", resource=foreign)

    def _proper_case(self, rail: str) -> RailCase:
        """A job that follows every rule, as the tenant's jobs are submitted; refused until it is said to be allowed."""
        if not self._own.shares:
            return self._job_case(rail, "a proper job", {})
        share = share_arn(next(iter(self._own.shares.values())).queue, self._tenant)
        stated: dict[str, Value] = {f"aws:RequestTag/{TENANT_TAG}": self._tenant}
        return self._submit(rail, "a proper job", action=SUBMIT, resource=share, stated=stated)

    def queue(self) -> Iterator[RailCase]:
        """A job for a queue: the own share, the own tag; no other tenant's job ended."""
        proper = self._proper_case("OwnShare")
        yield replace(proper, allowed=True)
        queue = next(iter(self._own.shares.values())).queue
        yield replace(proper, what="another tenant's share", resource=share_arn(queue, self._foreign_tag))
        yield replace(proper, what="another queue", resource=f"{queue}-elsewhere")
        tag, proper = f"aws:RequestTag/{TENANT_TAG}", replace(proper, rail="QueuedOwnTag")
        without = {key: value for key, value in proper.stated.items() if key != tag}
        yield replace(proper, allowed=True)
        yield replace(proper, what="no tenant's tag", stated=without)
        yield replace(proper, what="another tenant's tag", stated={**without, tag: self._foreign_tag})
        job, mine = f"arn:aws:batch:{self._place}:service-job/0a1b", f"aws:ResourceTag/{TENANT_TAG}"
        end, rail = "batch:TerminateServiceJob", "OwnQueuedJobs"
        own: dict[str, Value] = {mine: self._tenant}
        yield self._case(rail, "an own job", action=end, resource=job, stated=own, allowed=True)
        yield self._case(rail, "another tenant's job", action=end, resource=job, stated={mine: self._foreign_tag})
        yield self._case(rail, "a job that nobody tagged", action=end, resource=job, stated={})
        stop, rail = "sagemaker:StopTrainingJob", OWN_THINGS
        for owner, whose in ((self._tenant, "the own"), (self._foreign_tag, "another tenant's")):
            started = f"arn:aws:sagemaker:{self._place}:training-job/{BATCH_PREFIX}{owner}-0a1b"
            yield self._case(
                rail, f"{whose} job", action=stop, resource=started, stated={}, allowed=owner == self._tenant
            )

    def requests(self) -> Iterator[RailCase]:
        """What jobs in the shared queues ask for is nobody's to read, of a tenant that doesn't queue either."""
        rail = NEVER
        queues, request = "batch:DescribeJobQueues", "batch:DescribeServiceJob"
        yield self._case(rail, "that queues exist", action=queues, resource="*", stated={}, allowed=True)
        yield self._case(rail, "a job's request", action=request, resource="*", stated={})

    def volumes(self) -> Iterator[RailCase]:
        """A volume key: demanded of types that take one, never another's. Types with local NVMe refuse one."""
        key = "sagemaker:VolumeKmsKeyArn"
        yield replace(
            self._job_case("VolumeUnderOwnKey", "the own key", {key: self._own.keys.checkpoints}), allowed=True
        )
        yield self._job_case("VolumeUnderOwnKey", "another tenant's key", {key: self._other.keys.checkpoints})
        for kind in self._types:
            if not instance(kind).local_nvme_gib:
                yield replace(self._job_case("JobsSayVolumeKey", f"{kind} with the own key", {}, kind), allowed=True)
                yield self._job_case("JobsSayVolumeKey", f"{kind} without a key", {key: None}, kind)

    def siblings(self) -> Iterator[RailCase]:
        """Everything else that computes; a proper training job is what the same statement lets through."""
        yield replace(self._proper_case(NEVER), allowed=True)
        siblings = dict(SIBLINGS)
        if self._own.shares:  # whose queue it is then, and who may use it, is asked in `queue`
            del siblings["Batch's unchecked queue"]
            siblings["a training job past the queue"] = (CREATE_JOB, f"training-job/{self._tenant}-x")
        for what, (action, resource) in siblings.items():
            arn = f"arn:aws:{action.partition(':')[0]}:{self._place}:{resource}"
            by_name = not action.startswith("sagemaker:Create") or action == CREATE_JOB
            rail = NEVER if by_name else OWN_THINGS
            yield self._case(rail, what, action=action, resource=arn, stated={})

    def roles(self) -> Iterator[RailCase]:
        """PassRole: the tenant's job roles, to SageMaker."""
        key = "iam:PassedToService"
        sagemaker: dict[str, Value] = {key: "sagemaker.amazonaws.com"}

        def case(rail: str, what: str, resource: str, stated: Mapping[str, Value], allowed: bool = False) -> RailCase:
            return self._submit(rail, what, action="iam:PassRole", resource=resource, stated=stated, allowed=allowed)

        own = self._own.roles
        yield case(OWN_THINGS, "the own job role", self._job_role, sagemaker, True)
        yield case(OWN_THINGS, "another tenant's job role", self._other.roles.job, sagemaker)
        yield case(OWN_THINGS, "the own launcher", own.launcher, sagemaker)
        if self._own.job_boundary:  # each job runs as a role of its own then
            yield case(OWN_THINGS, "the job role that all share", own.job, sagemaker)
        yield case(OWN_THINGS, "an administrator's role", f"arn:aws:iam::{self._own.account}:role/Admin", sagemaker)
        yield case("PassToSageMaker", "to SageMaker", self._job_role, sagemaker, True)
        yield case("PassToSageMaker", "to Lambda", self._job_role, {key: "lambda.amazonaws.com"})

    def objects(self) -> Iterator[RailCase]:
        """Nothing leaves the account: access points are the S3 resources whose ARN names one."""
        bucket = f"arn:aws:s3:::{self._own.buckets.data}/train/part-0.jsonl"
        point = f"arn:aws:s3:{self._account.environment.region}:{OUTSIDER}:accesspoint/shared/object/part-0"
        put, key = "s3:PutObject", "aws:ResourceAccount"
        inside: dict[str, Value] = {key: self._own.account}
        yield self._case("OwnAccount", "the own bucket", action=put, resource=bucket, stated=inside, allowed=True)
        yield self._case("OwnAccount", "another account", action=put, resource=point, stated={key: OUTSIDER})

    def models(self) -> Iterator[RailCase]:
        """Registering a model under the own name, and under another's."""
        base = f"arn:aws:sagemaker:{self._place}:model-package"
        for owner, whose in ((self._tenant, "the own"), (self._foreign_tag, "another tenant's")):
            allowed, rail = owner == self._tenant, OWN_THINGS
            tag: dict[str, Value] = {f"aws:RequestTag/{TENANT_TAG}": self._tenant}
            group, create = f"{base}-group/{owner}-llama", "sagemaker:CreateModelPackageGroup"
            yield self._case(rail, f"{whose} group", action=create, resource=group, stated=tag, allowed=allowed)
            package, create = f"{base}/{owner}-llama/1", "sagemaker:CreateModelPackage"
            yield self._case(rail, f"a version of {whose}", action=create, resource=package, stated={}, allowed=allowed)
        # Its ValidationSpecification would run a batch transform job, on machines that no rail sees.
        loose = f"{base}/{self._tenant}-llama"
        yield self._case(OWN_THINGS, "a package of no group", action=create, resource=loose, stated={})

    def broker(self) -> Iterator[RailCase]:
        """Where there is a broker: only it submits jobs, and of all functions only the own broker is called."""
        if not self._own.broker:
            return
        base, environment = f"arn:aws:lambda:{self._place}:function:", self._account.environment
        for owner, whose in ((self._tenant, "the own"), (self._foreign_tag, "another tenant's")):
            arn, allowed = base + environment.broker_name(owner), owner == self._tenant
            yield self._case(OWN_THINGS, f"{whose} broker", action=INVOKE, resource=arn, stated={}, allowed=allowed)
        yield self._case(OWN_THINGS, "another function", action=INVOKE, resource=f"{base}x", stated={})
        proper = self._proper_case("BrokerSubmits")
        yield replace(proper, allowed=True)
        stated = {**proper.stated, "aws:PrincipalArn": self._launcher.arn}
        yield replace(proper, what="a proper job of the launcher's own", role=self._launcher, stated=stated)

    def job_roles(self) -> Iterator[RailCase]:
        """Where jobs have roles of their own: those alone are made and removed, under the boundary, by the broker."""
        if not self._own.job_boundary:
            return
        key, role = "iam:PermissionsBoundary", self._job_role
        bounded: dict[str, Value] = {key: self._own.job_boundary}

        def case(rail: str, what: str, action: str, resource: str, said: Mapping[str, Value]) -> RailCase:
            return self._submit(rail, what, action=action, resource=resource, stated=said)

        for action in MANAGE_JOB_ROLES:
            said = bounded if action in ("iam:CreateRole", "iam:PutRolePolicy") else {}
            made = case(OWN_THINGS, f"{action} of a job's role", action, role, said)
            yield replace(made, allowed=True)
            for what, other in (("the shared job role", self._own.roles.job), ("the launcher", self._launcher.arn)):
                yield replace(made, what=f"{action} of {what}", resource=other)
            if said:
                yield replace(made, rail="JobRolesBounded", allowed=True)
                for what, limit in (("without a boundary", {}), ("under another", {key: _FOREIGN_POLICY})):
                    yield case("JobRolesBounded", f"{action} {what}", action, role, limit)
            stated = {**said, "aws:PrincipalArn": self._launcher.arn}
            yield RailCase("BrokerSubmits", f"{action} by the launcher", False, self._launcher, action, role, stated)

    def shells(self) -> Iterator[RailCase]:
        """Where there is a cluster: a shell on the own login node, and on no other machine."""
        if (cluster := self._own.cluster) is None:
            return
        if cluster.engine == "hyperpod":
            yield from self._hyperpod()
            return
        owner, node = f"ssm:resourceTag/{TENANT_TAG}", f"ssm:resourceTag/{NODE_TAG}"
        machine = f"arn:aws:ec2:{self._place}:instance/i-0123456789abcdef0"
        proper: dict[str, Value] = {
            owner: self._tenant,
            node: cluster.login_tag,
            "ssm:SessionDocumentAccessCheck": "true",
        }

        def case(rail: str, what: str, stated: Mapping[str, Value], allowed: bool = False) -> RailCase:
            return self._case(rail, what, action="ssm:StartSession", resource=machine, stated=stated, allowed=allowed)

        for rail, key, broken in (
            ("ShellOwnMachine", owner, {"another tenant's login node": self._foreign_tag}),
            ("ShellLoginNode", node, {"a machine where jobs run": "compute"}),
        ):
            yield case(rail, "the own login node", proper, True)
            for what, value in broken.items():
                yield case(rail, what, {**proper, key: value})
            yield case(rail, "a machine without that tag", {name: said for name, said in proper.items() if name != key})
            for what, other in (
                ("a managed machine outside EC2", "managed-instance/mi-0123456789abcdef0"),
                ("a document that forwards ports", "document/AWS-StartPortForwardingSession"),
            ):
                arn = f"arn:aws:ssm:{self._place}:{other}"
                yield self._case(rail, what, action="ssm:StartSession", resource=arn, stated={})

    def runs(self) -> Iterator[RailCase]:
        """Where there is an MLflow server: runs on the own one, and on no other."""
        if (tracking := self._own.tracking) is None:
            return
        foreign = tracking.server.replace(f"-{self._tenant}", f"-{self._foreign_tag}")
        log, page = "sagemaker-mlflow:LogBatch", "sagemaker:CreatePresignedMlflowTrackingServerUrl"
        rail = OWN_THINGS
        for what, action in (("a run", log), ("a link to the page", page)):
            for whose, server in (("own", tracking.server), ("another tenant's", foreign)):
                said: dict[str, Value] = {}
                allowed = server == tracking.server
                yield self._case(
                    rail, f"{what} of the {whose} server", action=action, resource=server, stated=said, allowed=allowed
                )
        # It has no resource: whose page it is, is asked of the link.
        see = "sagemaker-mlflow:AccessUI"
        yield self._case(rail, "the page that a link opens", action=see, resource="*", stated={}, allowed=True)

    def _hyperpod(self) -> Iterator[RailCase]:
        """A shell on machines of the own cluster alone, and a tag on nothing that is there already."""
        start, owner = "ssm:StartSession", f"aws:ResourceTag/{TENANT_TAG}"
        cluster = f"arn:aws:sagemaker:{self._place}:cluster/a1b2c3d4e5f6"
        rail = "ShellOwnMachine"
        proper: dict[str, Value] = {owner: self._tenant, "ssm:SessionDocumentAccessCheck": "true"}
        yield self._case(rail, "the own cluster", action=start, resource=cluster, stated=proper, allowed=True)
        for what, resource, stated in (
            ("another tenant's cluster", cluster, {owner: self._foreign_tag}),
            ("a cluster that nobody tagged", cluster, {}),
            (
                "a document that forwards ports",
                f"arn:aws:ssm:{self._place}:document/AWS-StartPortForwardingSession",
                {},
            ),
        ):
            said: dict[str, Value] = dict(stated)
            yield self._case(rail, what, action=start, resource=resource, stated=said)
        tag, rail, key = "ec2:CreateTags", "TagOnlyNew", "ec2:CreateAction"
        nodes = self._account.role(self._tenant, "RolesNodes")
        interface = f"arn:aws:ec2:{self._place}:network-interface/eni-0"
        new: dict[str, Value] = {key: "CreateNetworkInterface"}
        yield RailCase(rail, "an interface that is being made", True, nodes, tag, interface, new)
        yield RailCase(rail, "an interface that is there", False, nodes, tag, interface, {})
        other: dict[str, Value] = {key: "RunInstances"}
        yield RailCase(rail, "a machine that is being made", False, nodes, tag, interface, other)
