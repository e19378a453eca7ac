"""Names and ARN patterns that follow from the environment file alone, so that no template has to import them."""

from dataclasses import dataclass

from trainyard.spec.platform import TRAINING_LOG_GROUP, EnvironmentSpec, TenantSpec
from trainyard.spec.shares import BATCH_PREFIX

PARTITION = "aws"
"""Written out: a token would make policies unreadable Fn::Joins. `preflight` refuses regions of other partitions."""

TAG_ENVIRONMENT = "trainyard:environment"
TAG_TENANT = "trainyard:tenant"
TAG_COST_CENTER = "trainyard:cost-center"
TAG_NODE = "trainyard:node"
"""Of the cluster's machines: `compute`, or `login` for the one that takes a session."""


@dataclass(frozen=True)
class TenantScope:
    """One tenant in one environment: what constructs need to name the tenant's things, and nobody else's."""

    environment: EnvironmentSpec
    name: str

    @property
    def spec(self) -> TenantSpec:
        """The tenant's part of the environment file."""
        return self.environment.tenant(self.name)

    @property
    def availability_zone(self) -> str:
        """Where EFA, the file system and training are: traffic between zones has no EFA and costs money."""
        return self.environment.availability_zones[0]

    @property
    def iam_path(self) -> str:
        """Roles live under a path of their own, so that a policy can name them all without a physical name."""
        return f"/trainyard/{self.environment.name}/{self.name}/"

    @property
    def instance_types(self) -> list[str]:
        """Every type that one of the tenant's queues admits, sorted."""
        return sorted({kind for queue in self.spec.queues.values() for kind in queue.instance_types})

    @property
    def max_runtime_seconds(self) -> int:
        """The longest running time that a job may ask for, as CreateTrainingJob takes it."""
        return round(self.spec.max_job_hours * 3600)

    @property
    def warm_pool_seconds(self) -> int:
        """The longest that a job may keep its machines, as CreateTrainingJob takes it."""
        return round(self.spec.warm_pool_minutes * 60)

    def stack_name(self, part: str) -> str:
        """The CloudFormation name of the tenant's stack `part`: foundation or training."""
        return f"trainyard-{self.environment.name}-{self.name}-{part}"

    @property
    def logs_command(self) -> str:
        """What prints the logs of the tenant's functions, as an alarm's text has it."""
        return f"trainyard tenant logs {self.environment.name} {self.name}"

    def arn(self, service: str, resource: str) -> str:
        """ARN, or pattern of ARNs, of this account and region."""
        return f"arn:{PARTITION}:{service}:{self.environment.region}:{self.environment.account}:{resource}"

    @property
    def image_repository(self) -> str:
        """URI of the platform's repository, whose name the platform stack states: no import of it is needed here."""
        environment = self.environment
        return f"{environment.account}.dkr.ecr.{environment.region}.amazonaws.com/{environment.image_repository}"

    @property
    def job_prefixes(self) -> list[str]:
        """How the names of the tenant's training jobs begin. No tenant's name begins another's, or with awsbatch.

        Batch calls what it takes from a queue `AWSBatch<name asked for><32 characters>` (its user guide's examples; its
        service-linked role may make no others). SageMaker writes names in small letters in ARNs, Batch's examples do
        not: both are meant.
        """
        return [
            f"{self.name}-",
            *(f"{batch}{self.name}-" for batch in (BATCH_PREFIX, BATCH_PREFIX.lower()) if self.queued),
        ]

    @property
    def training_jobs(self) -> list[str]:
        """All jobs of the tenant."""
        return [self.arn("sagemaker", f"training-job/{prefix}*") for prefix in self.job_prefixes]

    @property
    def model_packages(self) -> str:
        """All registered models of the tenant: their group's name begins with the tenant's, as a job's does. Versions
        alone, which have the slash: a package of no group may be validated as it is made, by a transform job."""
        return self.arn("sagemaker", f"model-package/{self.name}-*/*")

    @property
    def model_package_groups(self) -> str:
        """The groups that they are versions of."""
        return self.arn("sagemaker", f"model-package-group/{self.name}-*")

    @property
    def tracking_server(self) -> str:
        """ARN of the tenant's MLflow server, where it has one."""
        return self.arn("sagemaker", f"mlflow-tracking-server/{self.environment.tracking_server(self.name)}")

    @property
    def training_plans(self) -> dict[str, str]:
        """ARN of each training plan that the tenant's jobs may run on, by its name."""
        return {name: self.arn("sagemaker", f"training-plan/{name}") for name in self.spec.training_plans}

    @property
    def brokered(self) -> bool:
        """Whether a broker submits the tenant's jobs, and nobody else."""
        return self.environment.brokered(self.name)

    @property
    def queued(self) -> bool:
        """Whether the broker hands the tenant's jobs to the training queues, and not to SageMaker."""
        return self.environment.queued(self.name)

    @property
    def resumed(self) -> bool:
        """Whether a function has failed jobs submitted again. What waits in a queue Batch retries by itself."""
        return self.brokered and not self.queued

    @property
    def training_queues(self) -> dict[str, str]:
        """ARN of the queue for each of the tenant's instance types."""
        return {
            kind: self.arn("batch", f"job-queue/{self.environment.training_queue(kind, self.name)}")
            for kind in self.instance_types
        }

    @property
    def training_queue_prefix(self) -> str:
        """What the ARNs of all the environment's training queues begin with, and of no other environment's."""
        return self.arn("batch", f"job-queue/trainyard-{self.environment.name}-")

    @property
    def shares(self) -> list[str]:
        """The tenant's shares of them, which have its name."""
        return [f"{queue}/quota-share/{self.name}" for queue in self.training_queues.values()]

    @property
    def share_pattern(self) -> str:
        """The tenant's shares in all of the environment's queues, for a policy that has no room for each."""
        return f"{self.training_queue_prefix}*/quota-share/{self.name}"

    @property
    def service_jobs(self) -> str:
        """Jobs in Batch's queues, whoever's: Batch makes up their ids, so that only their tags tell them apart."""
        return self.arn("batch", "service-job/*")

    @property
    def broker_name(self) -> str:
        """The function that submits the tenant's jobs. Stated, so that the foundation's policies can name it."""
        return self.environment.broker_name(self.name)

    @property
    def broker_arn(self) -> str:
        """The same, as policies name it."""
        return self.arn("lambda", f"function:{self.broker_name}")

    @property
    def broker_iam_path(self) -> str:
        """Where the broker's role lies, alone: the boundary tells it from the tenant's others by this path."""
        return f"{self.iam_path}broker/"

    @property
    def broker_role_pattern(self) -> str:
        """The role in it."""
        return f"arn:{PARTITION}:iam::{self.environment.account}:role{self.broker_iam_path}*"

    @property
    def policy_pattern(self) -> str:
        """All managed policies of the tenant: its boundary, and what a spent budget attaches, which only denies."""
        return f"arn:{PARTITION}:iam::{self.environment.account}:policy{self.iam_path}*"

    @property
    def role_pattern(self) -> str:
        """All roles of the tenant."""
        return f"arn:{PARTITION}:iam::{self.environment.account}:role{self.iam_path}*"

    @property
    def job_iam_path(self) -> str:
        """Below the tenant's path: the roles that training jobs run as, and that alone may be passed to SageMaker."""
        return f"{self.iam_path}jobs/"

    @property
    def job_role_pattern(self) -> str:
        """All roles that the tenant's jobs run as."""
        return f"arn:{PARTITION}:iam::{self.environment.account}:role{self.job_iam_path}*"

    @property
    def isolates_jobs(self) -> bool:
        """Whether each of the tenant's jobs runs as a role of its own, made by the broker."""
        return self.environment.isolates_jobs(self.name)

    @property
    def encrypts_by_job(self) -> bool:
        """Whether what a job writes is encrypted under keys that KMS gives that job's role alone."""
        return self.environment.encrypts_by_job(self.name)

    @property
    def each_job_role_pattern(self) -> str:
        """The roles that the broker makes, one for each job (trainyard/functions/job_roles.py): in a path of their own,
        so that it can change none of the others."""
        return f"arn:{PARTITION}:iam::{self.environment.account}:role{self.job_iam_path}each/*"

    @property
    def job_log_streams(self) -> list[str]:
        """The tenant's streams in SageMaker's shared log group, which begin with the job's name."""
        group = f"log-group:{TRAINING_LOG_GROUP}:log-stream"
        return [self.arn("logs", f"{group}:{prefix}*") for prefix in self.job_prefixes]

    @property
    def hyperpod(self) -> bool:
        """Whether the tenant has a cluster, and SageMaker HyperPod runs it."""
        return self.spec.cluster is not None and self.spec.cluster.engine == "hyperpod"

    @property
    def cluster_name(self) -> str:
        """HyperPod's name of the tenant's cluster: stated, as the log groups of its machines are named by it."""
        return f"trainyard-{self.environment.name}-{self.name}"

    def machine_name(self, kind: str) -> str:
        """Role (of PCS and its instance profile) of the cluster's machines of a kind: `nodes` or `login`. Stated,
        because PCS takes only roles whose name begins with AWSPCS, and so that the stack of the cluster need not import
        it."""
        prefix = "trainyard" if self.hyperpod else "AWSPCS"
        return f"{prefix}-{self.environment.name}-{self.name}-{kind}"

    def machine_role_arn(self, kind: str) -> str:
        """The role of that name."""
        return f"arn:{PARTITION}:iam::{self.environment.account}:role{self.iam_path}{self.machine_name(kind)}"

    def machine_profile_arn(self, kind: str) -> str:
        """The instance profile of that name."""
        name = self.machine_name(kind)
        return f"arn:{PARTITION}:iam::{self.environment.account}:instance-profile{self.iam_path}{name}"

    def parameter_arn(self, parameter: str) -> str:
        """ARN of the SSM parameter with this absolute name."""
        return self.arn("ssm", f"parameter{parameter}")

    def via(self, service: str) -> str:
        """The value of kms:ViaService for requests that come through `service`."""
        return f"{service}.{self.environment.region}.amazonaws.com"
