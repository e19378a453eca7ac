"""What a tenant's own work asks of AWS, exactly as it asks: a wall without doors would prove isolation too.

Here a key that a request doesn't state is absent, as for IAM. A key that a policy reads and that neither `stated`
nor `absent` mentions is noted: nobody then knows what AWS would answer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainyard.functions.broker_queue import training_job_prefix
from trainyard.functions.job_roles import job_role_arn
from trainyard.functions.training_request import spec_prefix
from trainyard.hardware import instance
from trainyard.isolation.account import (
    EACH_JOB,
    NODE_TAG,
    SHARED_LOG_GROUP,
    TENANT_TAG,
    Account,
    Role,
    example_job,
)
from trainyard.isolation.catalogue import ON_NO_RESOURCE
from trainyard.isolation.conditions import Context, Value
from trainyard.isolation.crossings import CREATE_JOB, SUBMIT, share_arn
from trainyard.isolation.evaluator import Caller, Request
from trainyard.isolation.passages import image_layers
from trainyard.isolation.questions import OUTSIDER, somebody

_ABSENT = frozenset({"aws:principaltag/*", "aws:resourcetag/*", "aws:requesttag/*"})
_SDK_UPLOAD = frozenset({"s3:x-amz-server-side-encryption", "s3:x-amz-server-side-encryption-aws-kms-key-id"})
"""The SageMaker SDK and the trainer send no encryption header: the bucket's default encrypts."""


@dataclass(frozen=True)
class Need:
    """A request that must be allowed."""

    tenant: str
    principal: str
    what: str
    request: Request


class Needs:
    """What the roles of a tenant do in a day."""

    def __init__(self, account: Account, tenant: str) -> None:
        self._account, self._tenant = account, tenant
        self._contract = account.contracts[tenant]
        environment = account.environment
        self._place = f"{environment.region}:{environment.account}"
        self._id = environment.account
        self.job_id = example_job(tenant)
        """The job that these needs are about."""
        # A queue's training jobs are called by Batch.
        queued = f"{training_job_prefix(tenant, self.job_id)}{'0' * 32}"
        name = queued if self._contract.shares else self.job_id
        self._job = f"arn:aws:sagemaker:{self._place}:training-job/{name}"
        self._stream = f"{self._group(SHARED_LOG_GROUP)}:log-stream:{name}/algo-1-1700000000"
        self._submitter = "broker" if self._contract.broker else "launcher"
        self._endpoints = {item.service: item for item in account.endpoints if item.tenant == tenant}

    def all(self) -> Iterator[Need]:
        """Everything that must be allowed."""
        yield from self._launcher()
        yield from self._registry()
        yield from self._jobs()
        yield from self.of_a_job()
        yield from self._in_the_network()
        yield from self._auditor()
        yield from self._operator()
        yield from self._guard()
        yield from self._broker()
        yield from self._job_roles()
        yield from self._resumer()
        yield from self._cluster()
        yield from self._tracking()
        yield from self._services()

    def of_a_job(self) -> Iterator[Need]:
        """What a running job asks, as its role: the tenant's job role, and one of its own where jobs have such."""
        for label in ("job", *([EACH_JOB] if self._contract.job_boundary else [])):
            yield from self.of_a_job_as(label)

    def of_a_job_as(self, label: str) -> Iterator[Need]:
        """The same as the role of that label."""
        yield from self._work(label)
        yield from self._job_volume(label)
        yield from self._job_network(label)

    def _group(self, name: str) -> str:
        return f"arn:aws:logs:{self._place}:log-group:{name}"

    def _may(
        self,
        label: str,
        what: str,
        actions: str,
        *resources: str,
        stated: Mapping[str, Value] | None = None,
        absent: frozenset[str] = frozenset(),
        endpoint: str = "",
    ) -> Iterator[Need]:
        """Every action on every resource. `endpoint`: the service whose VPC endpoint the request comes through."""
        role = self._account.role(self._tenant, label)
        for action in actions.split():
            # A grant on an ARN gives nothing of these, and would satisfy a need that names one.
            assert resources == ("*",) or action.lower() not in ON_NO_RESOURCE, action
            for resource in resources:
                thing = self._account.thing_at(resource)
                context = self._context(role, {**(thing.context if thing else {}), **(stated or {})}, absent)
                policy = self._account.policy_of(thing) if thing else None
                passage = self._account.endpoint_policy(self._endpoints[endpoint]) if endpoint else None
                request = Request(
                    self._account.caller(role), action, resource, context, policy, endpoint_policy=passage
                )
                yield Need(self._tenant, label, what, request)

    def _context(self, role: Role, stated: Mapping[str, Value], absent: frozenset[str]) -> Context:
        return Context(
            {
                "aws:principalarn": role.arn,
                "aws:principalaccount": self._id,
                "aws:resourceaccount": self._id,
                "aws:securetransport": "true",
                "kms:calleraccount": self._id,
                **{f"aws:principaltag/{key.lower()}": value for key, value in role.tags.items()},
                **stated,
            },
            absent=_ABSENT | absent,
        )

    def _bucket(self, name: str, key: str = "") -> str:
        return f"arn:aws:s3:::{name}" + (f"/{key}" if key else "")

    def _via_s3(self, bucket: str) -> dict[str, Value]:
        """How S3 asks KMS for a caller; with bucket keys the encryption context is the bucket, else the object."""
        region, contract = self._account.environment.region, self._contract
        by_object = contract.job_keys and bucket == contract.buckets.checkpoints
        key = f"jobs/{self.job_id}/checkpoints/step-1/shard-0" if by_object else ""
        return {
            "kms:viaservice": f"s3.{region}.amazonaws.com",
            "kms:encryptioncontext:aws:s3:arn": self._bucket(bucket, key),
            "kms:grantisforawsresource": "false",
        }

    def _launcher(self) -> Iterator[Need]:
        contract, buckets, keys = self._contract, self._contract.buckets, self._contract.keys
        parameters = [
            f"arn:aws:ssm:{self._place}:parameter{name}"
            for name in (self._account.environment.contract_parameter(self._tenant), contract.image_parameter)
        ]
        yield from self._may("launcher", "read the contract and the image", "ssm:GetParameter", *parameters)
        every = [self._bucket(name) for name in buckets.model_dump().values()]
        yield from self._may("launcher", "list the buckets", "s3:ListBucket s3:GetBucketLocation", *every)
        data = [self._bucket(buckets.data, key) for key in ("train/part-0.jsonl", "jobs/job-1/record.json")]
        yield from self._may("launcher", "read and remove data", "s3:GetObject s3:DeleteObject", *data)
        yield from self._may(
            "launcher", "upload data", "s3:PutObject s3:AbortMultipartUpload", *data, absent=_SDK_UPLOAD
        )
        checkpoint = self._bucket(buckets.checkpoints, "jobs/job-1/checkpoints/step-1/COMMITTED")
        yield from self._may("launcher", "read and prune checkpoints", "s3:GetObject s3:DeleteObject", checkpoint)
        encrypt = "kms:GenerateDataKey kms:Decrypt"
        yield from self._may("launcher", "encrypt data", encrypt, keys.data, stated=self._via_s3(buckets.data))
        via = self._via_s3(buckets.checkpoints)
        yield from self._may("launcher", "decrypt checkpoints", "kms:Decrypt", keys.checkpoints, stated=via)
        models = [
            self._bucket(buckets.artifacts, key)
            for key in ("models/acme-llama/x/model.safetensors", "registry/acme-llama/x.json")
        ]
        yield from self._may("launcher", "read models", "s3:GetObject", *models)
        add = "s3:PutObject s3:AbortMultipartUpload s3:ListMultipartUploadParts"
        yield from self._may("launcher", "add models", add, *models, absent=_SDK_UPLOAD)
        via = self._via_s3(buckets.artifacts)
        yield from self._may("launcher", "encrypt models", encrypt, keys.artifacts, stated=via)
        yield from self._logs("launcher")
        repository = next(thing.pattern for thing in self._account.things_of(None, "image repository"))
        yield from self._may("launcher", "check the image", "ecr:DescribeImages", repository)
        yield from self._may("launcher", "find the file system", "fsx:DescribeFileSystems", "*")
        yield from self._may(
            "launcher", "see jobs and quotas", "sagemaker:ListTrainingJobs servicequotas:GetServiceQuota", "*"
        )

    def _registry(self) -> Iterator[Need]:
        """Models registered by the launcher, also from a machine in the network, and seen by the auditor."""
        base = f"arn:aws:sagemaker:{self._place}:model-package"
        package, group = f"{base}/{self._tenant}-llama/1", f"{base}-group/{self._tenant}-llama"
        see = "sagemaker:DescribeModelPackage sagemaker:ListModelPackages"
        tag: dict[str, Value] = {f"aws:requesttag/{TENANT_TAG}": self._tenant}
        for endpoint in ("", "sagemaker.api"):
            name = "sagemaker:CreateModelPackageGroup sagemaker:AddTags"
            yield from self._may("launcher", "name a model", name, group, stated=tag, endpoint=endpoint)
            register = f"sagemaker:CreateModelPackage {see}"
            yield from self._may("launcher", "register a model", register, package, endpoint=endpoint)
            describe = "sagemaker:DescribeModelPackageGroup"
            yield from self._may("launcher", "find a model's group", describe, group, endpoint=endpoint)
        yield from self._may("auditor", "see registered models", see, package)

    def _logs(self, label: str) -> Iterator[Need]:
        own = self._group(self._contract.log_group)
        groups = [self._group(SHARED_LOG_GROUP), own]
        both = [name for group in groups for name in (group, f"{group}:*")]
        yield from self._may(label, "find logs", "logs:DescribeLogStreams", *both)
        yield from self._may(label, "read logs", "logs:GetLogEvents", self._stream, f"{own}:log-stream:tool")
        yield from self._may(label, "search the own log group", "logs:FilterLogEvents", own, f"{own}:*")

    def _jobs(self) -> Iterator[Need]:
        """A job on each type of each queue, as the broker asks for it, or trainyard.launch where there is none."""
        contract, submitter = self._contract, self._submitter
        if contract.shares:
            yield from self._queue()
            return
        tag = {f"aws:requesttag/{TENANT_TAG}": self._tenant}
        for kind in sorted({kind for queue in contract.queues.values() for kind in queue.instance_types}):
            volume: dict[str, Value] = {}
            if not instance(kind).local_nvme_gib:
                volume = {"sagemaker:volumekmskeyarn": contract.keys.checkpoints}
            stated: dict[str, Value] = {
                **tag,
                **volume,
                "sagemaker:vpcsubnets": contract.subnet_ids,
                "sagemaker:vpcsecuritygroupids": contract.security_group_ids,
                "sagemaker:instancetypes": (kind,),
                "sagemaker:outputkmskeyarn": contract.keys.checkpoints,
                "sagemaker:maxruntimeinseconds": str(round(contract.max_job_hours * 3600)),
            }
            absent = {"sagemaker:enableremotedebug", "sagemaker:volumekmskeyarn", "sagemaker:filesystemid"}
            absent |= {"sagemaker:keepaliveperiod"}
            what = f"train on {kind}"
            yield from self._may(submitter, what, CREATE_JOB, self._job, stated=stated, absent=frozenset(absent))
            with_files = {**stated, "sagemaker:filesystemid": contract.file_system.id}
            what += " with the own file system"
            yield from self._may(submitter, what, CREATE_JOB, self._job, stated=with_files, absent=frozenset(absent))
            for plan in contract.training_plans.values():
                if plan.instance_type == kind:
                    on_plan = f"train on {kind} of a training plan"
                    yield from self._may(
                        submitter, on_plan, CREATE_JOB, self._job, plan.arn, stated=stated, absent=frozenset(absent)
                    )
        yield from self._may(submitter, "tag the job", "sagemaker:AddTags", self._job, stated=tag)
        passed: dict[str, Value] = {"iam:passedtoservice": "sagemaker.amazonaws.com"}
        yield from self._may(submitter, "hand over the job role", "iam:PassRole", self._job_role(), stated=passed)
        follow = "sagemaker:DescribeTrainingJob sagemaker:StopTrainingJob"
        yield from self._may("launcher", "follow and stop the job", follow, self._job)

    def _job_role(self) -> str:
        """What a job runs as."""
        own = job_role_arn(self._contract.model_dump(mode="json"), self.job_id)
        return own if self._contract.job_boundary else self._contract.roles.job

    def _job_roles(self) -> Iterator[Need]:
        """The broker makes the role of a job, and removes it again."""
        if not self._contract.job_boundary:
            return
        limit: dict[str, Value] = {"iam:permissionsboundary": self._contract.job_boundary}
        make = "iam:CreateRole iam:PutRolePolicy"
        yield from self._may("broker", "make a job's role", make, self._job_role(), stated=limit)
        keep = "iam:TagRole iam:ListRoleTags iam:DeleteRolePolicy iam:DeleteRole"
        yield from self._may("broker", "keep and remove a job's role", keep, self._job_role())
        yield from self._may("broker", "find jobs' roles", "iam:ListRoles", "*")
        own: dict[str, Value] = {"aws:sourceaccount": self._id, "aws:principalaccount": self._id}
        yield self._service("sagemaker.amazonaws.com", "take a job's role", "sts:AssumeRole", self._job_role(), own)

    def _queue(self) -> Iterator[Need]:
        """A job into the own share of each type's queue, found there, and taken out again."""
        tag: dict[str, Value] = {f"aws:requesttag/{TENANT_TAG}": self._tenant}
        mine: dict[str, Value] = {f"aws:resourcetag/{TENANT_TAG}": self._tenant}
        job = f"arn:aws:batch:{self._place}:service-job/0a1b"
        for kind, share in self._contract.shares.items():
            places = (share.queue, share_arn(share.queue, self._tenant), job)
            yield from self._may("broker", f"queue a job on {kind}", SUBMIT, *places, stated=tag)
        yield from self._may("broker", "tag the queued job", "batch:TagResource", job, stated=tag)
        passed: dict[str, Value] = {"iam:passedtoservice": "sagemaker.amazonaws.com"}
        yield from self._may("broker", "hand over the job role", "iam:PassRole", self._job_role(), stated=passed)
        for label in ("broker", "launcher", "RolesGuard"):
            yield from self._may(label, "find a queued job", "batch:ListServiceJobs", "*")
        for label in ("launcher", "operator", "RolesGuard"):
            end = "batch:TerminateServiceJob"
            yield from self._may(label, "take the job out of the queue", end, job, stated=mine)
        follow = "sagemaker:DescribeTrainingJob sagemaker:StopTrainingJob"
        yield from self._may("launcher", "follow and stop the job", follow, self._job)

    def _work(self, label: str) -> Iterator[Need]:
        """A running job, through its network's endpoints: as the job role, or as a machine of the cluster."""
        contract, buckets, keys = self._contract, self._contract.buckets, self._contract.keys
        folder, model = f"jobs/{self.job_id}", "models/acme-llama/x"
        spec = spec_prefix(self.job_id, "0123456789abcdef")
        for bucket, prefix in (
            (buckets.data, "train/"),
            (buckets.data, spec),
            (buckets.checkpoints, f"{folder}/checkpoints/"),
            (buckets.artifacts, f"{model}/"),
        ):
            stated: dict[str, Value] = {"s3:prefix": prefix}
            name = self._bucket(bucket)
            yield from self._may(label, "list its files", "s3:ListBucket", name, stated=stated, endpoint="s3")
        # What a killed save left on its way is found, and aborted, by the next one.
        where, prefix = self._bucket(buckets.checkpoints), f"{folder}/checkpoints/"
        uploads, stated = "s3:ListBucketMultipartUploads", {"s3:prefix": prefix}
        yield from self._may(label, "find unfinished uploads", uploads, where, stated=stated, endpoint="s3")
        read = (
            self._bucket(buckets.data, "train/part-0.jsonl"),
            self._bucket(buckets.data, f"{spec}resolved_job.json"),
            self._bucket(buckets.artifacts, f"{model}/model.safetensors"),
        )
        yield from self._may(label, "read its inputs", "s3:GetObject", *read, endpoint="s3")
        mine = self._bucket(buckets.checkpoints, f"{folder}/checkpoints/step-1/shard-0")
        yield from self._may(label, "read and prune checkpoints", "s3:GetObject s3:DeleteObject", mine, endpoint="s3")
        write = "s3:PutObject s3:AbortMultipartUpload s3:ListMultipartUploadParts"
        yield from self._may(label, "write checkpoints", write, mine, absent=_SDK_UPLOAD, endpoint="s3")
        via = self._via_s3(buckets.data)
        yield from self._may(label, "decrypt data", "kms:Decrypt", keys.data, stated=via, endpoint="kms")
        via = self._via_s3(buckets.artifacts)
        yield from self._may(label, "decrypt models", "kms:Decrypt", keys.artifacts, stated=via, endpoint="kms")
        encrypt = "kms:GenerateDataKey kms:Decrypt"
        via = self._via_s3(buckets.checkpoints)
        yield from self._may(label, "encrypt checkpoints", encrypt, keys.checkpoints, stated=via, endpoint="kms")
        shared, own = self._group(SHARED_LOG_GROUP), self._group(contract.log_group)
        groups = (shared, f"{shared}:*", own, f"{own}:*")
        yield from self._may(label, "open log streams", "logs:CreateLogStream", *groups, endpoint="logs")
        yield from self._may(label, "make SageMaker's log group", "logs:CreateLogGroup", shared, f"{shared}:*")
        streams = (self._stream, f"{own}:log-stream:{self.job_id}")
        yield from self._may(label, "write logs", "logs:PutLogEvents", *streams, endpoint="logs")
        space: dict[str, Value] = {"cloudwatch:namespace": f"trainyard/{self._tenant}"}
        publish = "cloudwatch:PutMetricData"
        yield from self._may(label, "write metrics", publish, "*", stated=space, endpoint="monitoring")
        pull = "ecr:BatchCheckLayerAvailability ecr:BatchGetImage ecr:GetDownloadUrlForLayer"
        repository = next(thing.pattern for thing in self._account.things_of(None, "image repository"))
        yield from self._may(label, "log in to the registry", "ecr:GetAuthorizationToken", "*", endpoint="ecr.api")
        yield from self._may(label, "pull the image", pull, repository, endpoint="ecr.dkr")
        yield from self._may(label, "find the file system", "fsx:DescribeFileSystems", "*")

    def _job_volume(self, label: str) -> Iterator[Need]:
        """SageMaker gives the job a volume as the job's role."""
        grant: dict[str, Value] = {
            "kms:viaservice": f"sagemaker.{self._account.environment.region}.amazonaws.com",
            "kms:grantisforawsresource": "true",
        }
        key = self._contract.keys.checkpoints
        yield from self._may(label, "encrypt volumes", "kms:CreateGrant", key, stated=grant)

    def _job_network(self, label: str) -> Iterator[Need]:
        """SageMaker puts the job into the VPC as the job's role."""
        contract = self._contract
        ec2 = f"arn:aws:ec2:{self._place}"
        vpc: dict[str, Value] = {"ec2:vpc": f"{ec2}:vpc/{contract.vpc_id}"}
        joined = (
            *(f"{ec2}:subnet/{name}" for name in contract.subnet_ids),
            *(f"{ec2}:security-group/{name}" for name in contract.security_group_ids),
            f"{ec2}:network-interface/*",
        )
        yield from self._may(label, "join the network", "ec2:CreateNetworkInterface", *joined, stated=vpc)
        leave = "ec2:CreateNetworkInterfacePermission ec2:DeleteNetworkInterface ec2:DeleteNetworkInterfacePermission"
        yield from self._may(label, "leave the network", leave, f"{ec2}:network-interface/eni-0", stated=vpc)
        see = "ec2:DescribeNetworkInterfaces ec2:DescribeVpcs ec2:DescribeSubnets ec2:DescribeSecurityGroups"
        yield from self._may(label, "see the network", f"{see} ec2:DescribeDhcpOptions", "*")

    def _in_the_network(self) -> Iterator[Need]:
        """From a machine in the VPC: who am I, what is running, what is the contract; and ECR's own image layers."""
        yield from self._may("launcher", "ask who it is", "sts:GetCallerIdentity", "*", endpoint="sts")
        yield from self._may(
            "launcher", "follow the job", "sagemaker:DescribeTrainingJob", self._job, endpoint="sagemaker.api"
        )
        yield from self._may("launcher", "list jobs", "sagemaker:ListTrainingJobs", "*", endpoint="sagemaker.api")
        read = "cloudwatch:GetMetricData cloudwatch:ListMetrics cloudwatch:DescribeAlarms"
        yield from self._may("launcher", "read metrics", read, "*", endpoint="monitoring")
        repository = next(thing.pattern for thing in self._account.things_of(None, "image repository"))
        yield from self._may("launcher", "check the image", "ecr:DescribeImages", repository, endpoint="ecr.api")
        yield from self._may("launcher", "read logs", "logs:GetLogEvents", self._stream, endpoint="logs")
        name = self._account.environment.contract_parameter(self._tenant)
        parameter = f"arn:aws:ssm:{self._place}:parameter{name}"
        yield from self._may("launcher", "read the contract", "ssm:GetParameter", parameter, endpoint="ssm")
        registry, stated = somebody(OUTSIDER), {"aws:principalaccount": OUTSIDER, "aws:resourceaccount": OUTSIDER}
        request = Request(
            registry,
            "s3:GetObject",
            image_layers(self._account.environment.region),
            Context(stated, absent=_ABSENT),
            endpoint_policy=self._account.endpoint_policy(self._endpoints["s3"]),
        )
        yield Need(self._tenant, "ECR", "pull image layers", request)

    def _auditor(self) -> Iterator[Need]:
        contract, buckets, keys = self._contract, self._contract.buckets, self._contract.keys
        every = [self._bucket(name) for name in buckets.model_dump().values()]
        see = "s3:ListBucket s3:GetBucketPolicy s3:GetEncryptionConfiguration s3:GetBucketPublicAccessBlock"
        yield from self._may("auditor", "see the buckets' configuration", see, *every)
        for bucket, key, record in (
            (buckets.data, keys.data, "jobs/j/record.json"),
            (buckets.checkpoints, keys.checkpoints, "jobs/j/result.json"),
            (buckets.artifacts, keys.artifacts, "registry/acme-llama/x.json"),
        ):
            yield from self._may("auditor", "read job records", "s3:GetObject", self._bucket(bucket, record))
            via = self._via_s3(bucket)
            yield from self._may("auditor", "decrypt job records", "kms:Decrypt", key, stated=via)
        examine = "kms:DescribeKey kms:GetKeyPolicy kms:GetKeyRotationStatus"
        directly = frozenset({"kms:viaservice"})
        yield from self._may("auditor", "examine the keys", examine, *keys.model_dump().values(), absent=directly)
        yield from self._may("auditor", "see jobs", "sagemaker:DescribeTrainingJob", self._job)
        roles = (contract.roles.job, contract.roles.launcher, contract.roles.auditor)
        yield from self._may("auditor", "see the roles", "iam:GetRole iam:GetRolePolicy", *roles)
        yield from self._logs("auditor")

    def _operator(self) -> Iterator[Need]:
        """Who breaks the glass mends data and checkpoints by hand, and stops jobs."""
        buckets, keys = self._contract.buckets, self._contract.keys
        for bucket, key in (
            (buckets.data, keys.data),
            (buckets.checkpoints, keys.checkpoints),
            (buckets.artifacts, keys.artifacts),
        ):
            thing = self._bucket(bucket, "jobs/job-1/any")
            yield from self._may("operator", "read and remove objects", "s3:GetObject s3:DeleteObject", thing)
            yield from self._may("operator", "write objects", "s3:PutObject", thing, absent=_SDK_UPLOAD)
            via = self._via_s3(bucket)
            yield from self._may("operator", "encrypt objects", "kms:GenerateDataKey kms:Decrypt", key, stated=via)
        yield from self._may("operator", "stop jobs", "sagemaker:StopTrainingJob", self._job)
        yield from self._logs("operator")

    def _guard(self) -> Iterator[Need]:
        """The function that re-checks jobs that have started."""
        label, own = "RolesGuard", self._group(self._contract.log_group)
        stop = "sagemaker:DescribeTrainingJob sagemaker:StopTrainingJob"
        yield from self._may(label, "look at jobs and stop them", stop, self._job)
        space: dict[str, Value] = {"cloudwatch:namespace": f"trainyard/{self._tenant}"}
        yield from self._may(label, "find the month's jobs", "sagemaker:ListTrainingJobs", "*")
        yield from self._may(label, "count violations", "cloudwatch:PutMetricData", "*", stated=space)
        log = "logs:CreateLogStream logs:PutLogEvents"
        yield from self._may(label, "write its log", log, f"{own}:log-stream:guard")
        role, stated = self._account.role(self._tenant, label), {"aws:principalaccount": self._id}
        yield self._service("lambda.amazonaws.com", "take its role", "sts:AssumeRole", role.arn, stated)

    def _broker(self) -> Iterator[Need]:
        """The function that submits jobs, besides submitting; and who calls it."""
        if not self._contract.broker:
            return
        contract, buckets, keys = self._contract, self._contract.buckets, self._contract.keys
        function = f"arn:aws:lambda:{self._place}:function:{contract.broker}"
        yield from self._may("launcher", "hand a job to the broker", "lambda:InvokeFunction", function)
        base, label = f"arn:aws:ssm:{self._place}:parameter", "broker"
        parameter = base + self._account.environment.contract_parameter(self._tenant)
        yield from self._may(label, "read the contract", "ssm:GetParameter", parameter)
        yield from self._may(
            label, "see the released images", "ssm:GetParameterHistory", base + contract.image_parameter
        )
        record = self._bucket(buckets.data, f"jobs/{self._tenant}-llama-20260101000000-0a1b/record.json")
        yield from self._may(label, "read a job's record", "s3:GetObject", record)
        via = self._via_s3(buckets.data)
        yield from self._may(label, "decrypt a job's record", "kms:Decrypt", keys.data, stated=via)
        ledger = self._bucket(buckets.checkpoints, "broker/ledger-2026-01.json")
        yield from self._may(label, "keep its ledger", "s3:GetObject s3:PutObject", ledger, absent=_SDK_UPLOAD)
        encrypt, via = "kms:GenerateDataKey kms:Decrypt", self._via_s3(buckets.checkpoints)
        yield from self._may(label, "encrypt its ledger", encrypt, keys.checkpoints, stated=via)
        both = (self._bucket(buckets.data), self._bucket(buckets.checkpoints))
        yield from self._may(label, "tell what is missing from what is denied", "s3:ListBucket", *both)
        yield from self._may(label, "see what runs", "sagemaker:DescribeTrainingJob", self._job)
        yield from self._may(label, "list jobs", "sagemaker:ListTrainingJobs", "*")
        stream = f"{self._group(contract.log_group)}:log-stream:2026/01/01/[$LATEST]0a1b"
        yield from self._may(label, "write its log", "logs:CreateLogStream logs:PutLogEvents", stream)
        stated = {"aws:principalaccount": self._id}
        yield self._service("lambda.amazonaws.com", "take its role", "sts:AssumeRole", contract.roles.broker, stated)

    def _resumer(self) -> Iterator[Need]:
        """The function that resumes failed jobs; there is one where a broker submits them at once."""
        if not self._contract.broker or self._contract.shares:
            return
        buckets, keys, label = self._contract.buckets, self._contract.keys, "RolesResumer"
        yield from self._may(label, "see why a job failed", "sagemaker:DescribeTrainingJob", self._job)
        record = self._bucket(buckets.data, f"jobs/{self._tenant}-llama-20260101000000-0a1b/record.json")
        write = "s3:GetObject s3:PutObject"
        yield from self._may(label, "write the next attempt into a job's record", write, record, absent=_SDK_UPLOAD)
        encrypt, via = "kms:GenerateDataKey kms:Decrypt", self._via_s3(buckets.data)
        yield from self._may(label, "encrypt a job's record", encrypt, keys.data, stated=via)
        yield from self._may(label, "find the newest checkpoint", "s3:ListBucket", self._bucket(buckets.checkpoints))
        function = f"arn:aws:lambda:{self._place}:function:{self._contract.broker}"
        yield from self._may(label, "have the broker submit", "lambda:InvokeFunction", function)
        stream = f"{self._group(self._contract.log_group)}:log-stream:2026/01/01/[$LATEST]0a1b"
        yield from self._may(label, "write its log", "logs:CreateLogStream logs:PutLogEvents", stream)
        role, stated = self._account.role(self._tenant, label), {"aws:principalaccount": self._id}
        yield self._service("lambda.amazonaws.com", "take its role", "sts:AssumeRole", role.arn, stated)

    def _tracking(self) -> Iterator[Need]:
        """Runs told to the tenant's MLflow server, where there is one, by people and by jobs; and what it does."""
        if (tracking := self._contract.tracking) is None:
            return
        contract, see = self._contract, "sagemaker-mlflow:SearchRuns sagemaker-mlflow:GetRun"
        write = f"{see} sagemaker-mlflow:CreateExperiment sagemaker-mlflow:CreateRun sagemaker-mlflow:LogBatch"
        write += " sagemaker-mlflow:GetExperimentByName sagemaker-mlflow:UpdateRun"
        page = "sagemaker:CreatePresignedMlflowTrackingServerUrl"
        server, inside = tracking.server, "experiments"
        yield from self._may("launcher", "track a job", write, server)
        yield from self._may("launcher", "track a job from its network", write, server, endpoint=inside)
        for label in ("launcher", "auditor"):
            yield from self._may(label, "open MLflow's page", f"{see} {page}", server)
            yield from self._may(label, "open MLflow's page", "sagemaker-mlflow:AccessUI", "*")
        if not contract.job_boundary:
            labels = ("job", *(["RolesNodes"] if contract.cluster is not None else []))
            for label in labels:
                yield from self._may(label, "log its run", write, server, endpoint=inside)
        bucket, key = contract.buckets.artifacts, contract.keys.artifacts
        files, own = self._bucket(bucket, "tracking/1/0a1b/artifacts/report.html"), "RolesTracking"
        add, via = "s3:GetObject s3:PutObject", self._via_s3(bucket)
        for label in ("launcher", own):
            yield from self._may(label, "keep files beside a run", add, files, absent=_SDK_UPLOAD)
            encrypt = "kms:GenerateDataKey kms:Decrypt"
            yield from self._may(label, "encrypt files beside a run", encrypt, key, stated=via)
        below: dict[str, Value] = {"s3:prefix": "tracking/1/"}
        yield from self._may(own, "find files beside a run", "s3:ListBucket", self._bucket(bucket), stated=below)
        role, stated = self._account.role(self._tenant, own), {"aws:sourceaccount": self._id}
        yield self._service("sagemaker.amazonaws.com", "take its role", "sts:AssumeRole", role.arn, stated)

    def _cluster(self) -> Iterator[Need]:
        """Machines of the tenant's cluster, where there is one, and who gets a shell on its login node."""
        if (cluster := self._contract.cluster) is None:
            return
        if cluster.engine == "hyperpod":
            yield from self._hyperpod(cluster.id)
            return
        own: dict[str, Value] = {f"aws:resourcetag/{TENANT_TAG}": self._tenant}
        arn = f"arn:aws:pcs:{self._place}:cluster/pcs_0123456789"
        files = [thing.pattern for thing in self._account.things_of(self._tenant, "small files")]
        folder = next((thing.pattern for thing in self._account.things_of(self._tenant, "small files' folder")), "")
        mounted: dict[str, Value] = {
            "elasticfilesystem:accesspointarn": folder,
            "elasticfilesystem:accessedviamounttarget": "true",
        }
        for label in ("RolesNodes", "RolesLogin"):
            use = "elasticfilesystem:ClientMount elasticfilesystem:ClientWrite"
            yield from self._may(label, "use the small files", use, *files, stated=mounted)
            register = "pcs:RegisterComputeNodeGroupInstance"
            yield from self._may(label, "join the cluster", register, arn, stated=own, endpoint="pcs")
            role, stated = self._account.role(self._tenant, label), {"aws:principalaccount": self._id}
            yield self._service("ec2.amazonaws.com", "take its role", "sts:AssumeRole", role.arn, stated)
        yield from self._work("RolesNodes")
        yield from self._may("RolesLogin", "say that it is up", "ssm:UpdateInstanceInformation", "*", endpoint="ssm")
        channels = " ".join(
            f"ssmmessages:{verb}{end}Channel" for verb in ("Create", "Open") for end in ("Control", "Data")
        )
        yield from self._may("RolesLogin", "take sessions", channels, "*", endpoint="ssmmessages")
        tags: dict[str, Value] = {
            f"ssm:resourcetag/{TENANT_TAG}": self._tenant,
            f"ssm:resourcetag/{NODE_TAG}": cluster.login_tag,
            "ssm:sessiondocumentaccesscheck": "true",
        }
        machine = f"arn:aws:ec2:{self._place}:instance/i-0123456789abcdef0"
        document = f"arn:aws:ssm:{self._place}:document/SSM-SessionManagerRunShell"
        yield from self._may("launcher", "find the login node", "ec2:DescribeInstances", "*")
        yield from self._may("launcher", "open a shell", "ssm:StartSession", machine, document, stated=tags)
        yield from self._own_session()
        service = Caller(
            f"arn:aws:iam::{self._id}:role/aws-service-role/pcs.amazonaws.com/AWSServiceRoleForPCS", self._id
        )
        asked: dict[str, Value] = {
            "aws:principalaccount": self._id,
            "aws:principalarn": service.arn,
            "kms:calleraccount": self._id,
            "kms:viaservice": f"ec2.{self._account.environment.region}.amazonaws.com",
            "kms:grantisforawsresource": "true",
        }
        for action in ("kms:CreateGrant", "kms:GenerateDataKeyWithoutPlaintext", "kms:Decrypt"):
            yield self._somebody(service, "encrypt machines' volumes", action, self._contract.keys.checkpoints, asked)

    def _own_session(self) -> Iterator[Need]:
        mine: dict[str, Value] = {"aws:userid": "AROAEXAMPLE:ana"}
        session = f"arn:aws:ssm:{self._place}:session/AROAEXAMPLE:ana-0123456789abcdef0"
        yield from self._may("launcher", "talk to its shell", "ssmmessages:OpenDataChannel", session, stated=mine)

    def _hyperpod(self, cluster: str) -> Iterator[Need]:
        """What HyperPod does as its machines' roles, and who gets a shell on them."""
        ec2, name = f"arn:aws:ec2:{self._place}", f"trainyard-{self._account.environment.name}-{self._tenant}"
        vpc: dict[str, Value] = {"ec2:vpc": f"{ec2}:vpc/{self._contract.vpc_id}"}
        logs = f"{self._group(f'/aws/sagemaker/Clusters/{name}/a1b2c3d4e5f6')}:log-stream:LifecycleConfig/x"
        script = self._bucket(self._contract.buckets.data, "cluster/start.sh")
        for label in ("RolesNodes", "RolesLogin"):
            role, stated = self._account.role(self._tenant, label), {"aws:sourceaccount": self._id}
            yield self._service("sagemaker.amazonaws.com", "take its role", "sts:AssumeRole", role.arn, stated)
            yield from self._job_network(label)
            yield from self._job_volume(label)
            region = self._account.environment.region
            looked: dict[str, Value] = {"kms:viaservice": f"sagemaker.{region}.amazonaws.com"}
            key = self._contract.keys.checkpoints
            yield from self._may(label, "look at its volumes' key", "kms:DescribeKey", key, stated=looked)
            made: dict[str, Value] = {"ec2:createaction": "CreateNetworkInterface"}
            yield from self._may(
                label, "tag interfaces", "ec2:CreateTags", f"{ec2}:network-interface/eni-0", stated=made
            )
            leave = "ec2:DetachNetworkInterface"
            yield from self._may(label, "leave the network", leave, f"{ec2}:network-interface/eni-0", stated=vpc)
            # EC2 asks for the machine as well, which knows no VPC and may be one of SageMaker's own account.
            for owner in (self._id, OUTSIDER):
                machine = f"arn:aws:ec2:{self._account.environment.region}:{owner}:instance/i-0"
                yield from self._may(label, "leave the network", leave, machine, absent=frozenset({"ec2:vpc"}))
            write = "logs:CreateLogStream logs:PutLogEvents"
            yield from self._may(label, "write the machine's log", write, logs, endpoint="logs")
            yield from self._may(label, "fetch the script", "s3:GetObject", script, endpoint="s3")
            via = self._via_s3(self._contract.buckets.data)
            yield from self._may(label, "decrypt the script", "kms:Decrypt", self._contract.keys.data, stated=via)
            channels = "ssmmessages:CreateControlChannel ssmmessages:OpenDataChannel"
            yield from self._may(label, "take sessions", channels, "*", endpoint="ssmmessages")
        yield from self._work("RolesNodes")
        own: dict[str, Value] = {
            f"aws:resourcetag/{TENANT_TAG}": self._tenant,
            "ssm:sessiondocumentaccesscheck": "true",
        }
        find = "sagemaker:ListClusterNodes sagemaker:DescribeCluster"
        yield from self._may("launcher", "find the login node", find, cluster, stated=own)
        document = f"arn:aws:ssm:{self._place}:document/SSM-SessionManagerRunShell"
        yield from self._may("launcher", "open a shell", "ssm:StartSession", cluster, document, stated=own)
        yield from self._own_session()

    def _services(self) -> Iterator[Need]:
        """Services and people that act for the tenant."""
        contract, region = self._contract, self._account.environment.region
        own: dict[str, Value] = {"aws:sourceaccount": self._id, "aws:principalaccount": self._id}
        yield self._service("sagemaker.amazonaws.com", "take the job role", "sts:AssumeRole", contract.roles.job, own)
        people = somebody(self._id)
        at_hand: dict[str, Value] = {"aws:principalaccount": self._id, "aws:principalarn": people.arn}
        for role in (contract.roles.launcher, contract.roles.auditor):
            yield self._somebody(people, "take the role", "sts:AssumeRole", role, at_hand)
        factor: dict[str, Value] = {"aws:multifactorauthpresent": "true", "aws:multifactorauthage": "60"}
        yield self._somebody(people, "break the glass", "sts:AssumeRole", contract.roles.operator, at_hand | factor)
        files = {**at_hand, "kms:viaservice": f"fsx.{region}.amazonaws.com", "kms:calleraccount": self._id}
        for action in ("kms:CreateGrant", "kms:GenerateDataKey"):
            yield self._somebody(people, "make the file system", action, contract.keys.data, files)
        yield self._somebody(people, "administer the key", "kms:PutKeyPolicy", contract.keys.data, at_hand)
        group: dict[str, Value] = {"kms:encryptioncontext:aws:logs:arn": self._group(contract.log_group)}
        yield self._service(
            f"logs.{region}.amazonaws.com", "encrypt logs", "kms:GenerateDataKey", contract.keys.logs, group
        )
        for thing in self._account.things_of(self._tenant, "topic"):
            for service, kind in (("cloudwatch", "alarm"), ("events", "rule")):
                for source in self._account.things_of(self._tenant, kind):
                    if "/Alarms" not in source.name:
                        continue  # the job guard's rule calls a function, its alarms are like any other
                    name = f"{service}.amazonaws.com"
                    stated: dict[str, Value] = {**own, "aws:sourcearn": source.pattern}
                    yield self._service(name, "notify", "sns:Publish", thing.pattern, stated)
                    yield self._service(name, "encrypt notices", "kms:GenerateDataKey", contract.keys.logs, stated)

    def _service(self, name: str, what: str, action: str, resource: str, stated: Mapping[str, Value]) -> Need:
        return self._somebody(Caller(name, self._id, service=True), what, action, resource, stated)

    def _somebody(self, caller: Caller, what: str, action: str, resource: str, stated: Mapping[str, Value]) -> Need:
        thing = self._account.thing_at(resource)
        assert thing is not None, f"{resource} is nothing of the account"
        context = Context(stated, absent=_ABSENT | {"kms:viaservice"})
        return Need(
            self._tenant,
            caller.arn.rsplit("/", 1)[-1],
            what,
            Request(caller, action, resource, context, self._account.policy_of(thing)),
        )
