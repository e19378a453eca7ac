"""What is deployed: an environment, its tenants, and the contract each tenant's stack publishes.

Every field says what changing it does to a deployed tenant: `update` (in place), `replace` (replaces a stateful
resource, so `trainyard deploy` refuses it), `none` (nothing is deployed from it).
"""

import difflib
import ipaddress
import itertools
import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from trainyard.spec import shares
from trainyard.spec.base import Name, SpecModel, on_change, parse, read_yaml, worded
from trainyard.spec.cluster import ClusterSpec
from trainyard.spec.objectives import ObjectivesSpec
from trainyard.spec.shares import ShareContract, ShareSpec
from trainyard.spec.words import counted

CONTRACT_VERSION = 4
"""2: a bucket and a key for artifacts. 3: the cluster, shares of training queues. 4: the tracking server, engine
hyperpod. Older contracts are read; what they lack is empty. A contract states the lowest that has all that it says, so
that an older trainyard reads those of tenants without the new."""

TRAINING_LOG_GROUP = "/aws/sagemaker/TrainingJobs"
"""SageMaker writes every job's output here, whoever owns the job: streams are told apart by the job's name."""

TRACKING_FOLDER = "tracking"
"""Of the artifacts bucket: files beside MLflow's runs."""

MAX_LINKS = 8
"""FSx: data repository associations of one file system."""

ARCHIVE_MIN_DAYS = 90
"""S3: the shortest time that an object in Glacier Instant Retrieval is billed for."""


EFA_STEP_GIB = {125: 38_400, 250: 19_200, 500: 9_600, 1000: 9_600}
"""FSx for Lustre with EFA: MB/s per TiB to the GiB that its storage must be a multiple of. The least that every source
that we have agrees on: for 1000 one has 4,800, another 9,600, which is right by both."""


class FileSystemSpec(SpecModel):
    """The tenant's FSx for Lustre file system (PERSISTENT_2, SSD)."""

    storage_gib: int = Field(default=1200, ge=1200, json_schema_extra=on_change("update"))
    """GiB: 1200, or a multiple of 2400."""
    throughput_mb_per_s_per_tib: Literal[125, 250, 500, 1000] = Field(
        default=250, json_schema_extra=on_change("replace")
    )
    links: dict[str, str] = Field(default_factory=dict, max_length=MAX_LINKS, json_schema_extra=on_change("replace"))
    """Folder of the file system to folder of the tenant's data bucket (`/datasets: datasets`): objects appear as files
    and are fetched at their first read, and files written there are exported. At most eight, none inside another. A
    file system with links has no backups: what is outside of them is kept by nothing else."""
    efa: bool = Field(default=False, json_schema_extra=on_change("replace"))
    """Reached over EFA by the machines of the tenant's cluster that have it, and by all others, SageMaker's training
    jobs among them, over TCP as before. Only at its creation, and only in large sizes (EFA_STEP_GIB)."""

    @model_validator(mode="after")
    def _size_allowed(self) -> Self:
        if self.storage_gib != 1200 and self.storage_gib % 2400:
            raise ValueError(f"storage_gib is 1200 or a multiple of 2400, not {self.storage_gib}")
        if self.efa and self.storage_gib % (step := EFA_STEP_GIB[self.throughput_mb_per_s_per_tib]):
            rate = self.throughput_mb_per_s_per_tib
            raise ValueError(
                f"efa: storage_gib is then a multiple of {step:,} at {rate} MB/s per TiB, not {self.storage_gib:,}: "
                "FSx makes no other; take so much (a higher throughput_mb_per_s_per_tib needs less), or leave efa out"
            )
        return self

    @model_validator(mode="after")
    def _links_apart(self) -> Self:
        for path, folder in self.links.items():
            if not re.fullmatch(r"(/[A-Za-z0-9._-]+)+", path) or {".", ".."} & set(path.split("/")):
                raise ValueError(
                    f"links: {path!r} is no folder of the file system; write an absolute path, e.g. /datasets"
                )
            if not re.fullmatch(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*", folder):
                raise ValueError(f"links.{path}: {folder!r} is no folder of the data bucket; write e.g. datasets/text")
            if folder.split("/")[0] == "jobs":
                raise ValueError(
                    f"links.{path}: jobs/ holds the jobs' records and can't be linked; name another folder"
                )
        for kind, names in (("folder of the file system", self.links), ("folder of the bucket", self.links.values())):
            parts = sorted(name.strip("/").split("/") for name in names)
            for one, other in itertools.pairwise(parts):
                if other[: len(one)] == one:
                    raise ValueError(
                        f"links: {'/'.join(one)} and {'/'.join(other)}: each {kind} is linked once, and none inside "
                        "another; link the outer one alone, or two beside each other"
                    )
        return self


class StorageSpec(SpecModel):
    """How long the tenant's buckets keep what, and how cheaply."""

    old_version_days: int = Field(default=30, ge=1, le=3650, json_schema_extra=on_change("update"))
    """How long an overwritten or deleted object can be brought back."""
    archive_data_after_days: int | None = Field(default=None, ge=30, le=3650, json_schema_extra=on_change("update"))
    """Age at which objects of the data bucket move to Glacier Instant Retrieval: cheaper to keep, dearer to read, as
    fast; billed for at least 90 days and 128 KB."""
    archive_checkpoints_after_days: int | None = Field(
        default=None, ge=30, le=3650, json_schema_extra=on_change("update")
    )
    """The same for checkpoints and outputs. A job that is resumed from there reads as fast, at the higher price."""
    delete_checkpoints_after_days: int | None = Field(
        default=None, ge=1, le=3650, json_schema_extra=on_change("update")
    )
    """Age at which checkpoints and outputs are deleted, finished job or not. The broker's ledger beside them stays."""
    archive_artifacts_after_days: int | None = Field(
        default=None, ge=30, le=3650, json_schema_extra=on_change("update")
    )
    """Age at which exported models move to Glacier Instant Retrieval. They are never deleted by age: a registered model
    names them."""
    lock_data_days: int | None = Field(default=None, ge=1, le=3650, json_schema_extra=on_change("update"))
    """Object Lock on the data bucket: no version of data or of a job's record can be deleted or replaced within so many
    days. Once on, a bucket's lock can be changed and never taken away."""
    lock_artifacts_days: int | None = Field(default=None, ge=1, le=3650, json_schema_extra=on_change("update"))
    """The same for the artifacts bucket: for so long no exported model, and no record of why it was registered, can be
    deleted or replaced."""
    lock_mode: Literal["governance", "compliance"] = Field(default="governance", json_schema_extra=on_change("update"))
    """Who can still delete a locked version, of data or artifacts: with governance, who holds
    s3:BypassGovernanceRetention; with compliance nobody, the account's root included, so such a tenant can't be
    shredded before its time."""

    @model_validator(mode="after")
    def _ages_in_order(self) -> Self:
        archive, delete = self.archive_checkpoints_after_days, self.delete_checkpoints_after_days
        if archive is not None and delete is not None and delete < archive + ARCHIVE_MIN_DAYS:
            raise ValueError(
                f"delete_checkpoints_after_days {delete}: archived at {counted(archive, 'day')}, an object is "
                "billed for "
                f"{ARCHIVE_MIN_DAYS} days more; delete at {archive + ARCHIVE_MIN_DAYS} or later, or don't archive"
            )
        return self


class QueueSpec(SpecModel):
    """A training queue: which machines, and how many of them at once."""

    instance_types: tuple[str, ...] = Field(min_length=1, json_schema_extra=on_change("update"))
    """SageMaker types, `ml.` and all."""
    max_instances: int = Field(ge=1, json_schema_extra=on_change("update"))
    """Instances that the tenant's jobs in this queue may hold together. What would go over is refused: by the broker,
    or by launch and resume where there is none, where two at the same moment may pass each other. With `submission:
    queue` it waits instead, and this counts for each type alone: up to so many are the tenant's or borrowed. A job that
    runs counts in each queue that offers its type, as SageMaker tells no queue: give a type to one queue alone."""
    multi_node: bool = Field(default=True, json_schema_extra=on_change("update"))
    """Jobs over several hosts: every type must then have EFA."""

    @field_validator("instance_types")
    @classmethod
    def _named_once(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            raise ValueError(f"{', '.join(twice)}: stands twice; keep one")
        return kinds


class BudgetLimits(SpecModel):
    """What the tenant may spend."""

    monthly_usd: float = Field(gt=0, json_schema_extra=on_change("update"))
    """Dollars a month. The broker refuses a job that could pass it, by EC2's prices; a type without a known price
    counts nothing, which synthesis warns of and the broker's answer says. AWS's budget only warns, hours later."""
    monthly_gpu_hours: float | None = Field(default=None, gt=0, json_schema_extra=on_change("update"))
    """GPU-hours a month, of all types together (a machine's hour counts as many as it has GPUs). Held as `monthly_usd`
    is, without a price. Default: no such quota."""
    when_spent: Literal["finish", "stop"] = Field(default="finish", json_schema_extra=on_change("update"))
    """`finish`: no job is started that could pass a quota at its longest, and what runs ends by itself. `stop`: jobs
    are started as long as something is left, and at 100 % those that run get SIGTERM, save a checkpoint and end; they
    can be resumed in the next month. The quota is looked at every five minutes: so long it can be passed."""
    warn_at_percent: float = Field(default=80.0, gt=0, le=100, json_schema_extra=on_change("update"))
    """Of either quota: the tenant's topic is told, and who launches a job. AWS's budget warns too, hours later."""
    notify: tuple[str, ...] = Field(min_length=1, max_length=10, json_schema_extra=on_change("update"))
    """E-mail addresses: AWS Budgets tells no more than ten."""
    stop_at_percent: float | None = Field(default=None, ge=1, le=1000, json_schema_extra=on_change("update"))
    """A back-stop behind the broker's own cap: at so many percent of monthly_usd, by the bill and hours late, AWS takes
    the right to start jobs from whoever submits them. What runs goes on. Default: no such action."""
    anomaly_usd: float | None = Field(default=None, ge=0.01, json_schema_extra=on_change("update"))
    """Unusual spending of at least so many dollars is told the same day, by an anomaly monitor over the tenant's tag.
    Needs the organization's management account: in a member account AWS refuses the monitor, and with it the whole
    deployment. Default: no monitor."""

    @field_validator("monthly_usd", "monthly_gpu_hours", mode="before")
    @classmethod
    def _frozen_by_a_little(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool) and value == 0:
            raise ValueError(
                "must be above 0; so that no further job starts, write monthly_usd: 0.01, and monthly_gpu_hours: 0.01 "
                "for types without a price, with when_spent: finish"
            )
        return value


MAX_ALLOWED_DOMAINS = 100
"""Of one tenant: a list that people can still read. The firewall would take thousands."""

ANYBODYS_DOMAINS = ("amazonaws.com", "amazonaws.com.cn", "api.aws", "on.aws")
"""AWS itself, where everybody has buckets and APIs."""


class EgressSpec(SpecModel):
    """A way out to a few named hosts: a firewall, a NAT gateway and a public address of the tenant's own."""

    allowed_domains: tuple[str, ...] = Field(
        min_length=1, max_length=MAX_ALLOWED_DOMAINS, json_schema_extra=on_change("update")
    )
    """Hosts that HTTPS on port 443 may name: `pypi.org` is that host alone, `.hf.co` is hf.co and all hosts below it.
    Everything else is dropped and logged, plain HTTP too. What is told apart is the name that the client states (TLS
    server name), so list no domain where anybody can get a host of his own."""

    @field_validator("allowed_domains")
    @classmethod
    def _are_domains(cls, domains: tuple[str, ...]) -> tuple[str, ...]:
        for domain in domains:
            if not re.fullmatch(r"\.?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9]", domain):
                raise ValueError(
                    f"{domain!r} is no host name; write it in small letters without scheme, port or *, e.g. pypi.org, "
                    "or .hf.co for hf.co and all below it"
                )
            if any(domain.lstrip(".") == aws or domain.endswith(f".{aws}") for aws in ANYBODYS_DOMAINS):
                raise ValueError(
                    f"{domain!r} is AWS's, where everybody has buckets: it would lead round the network's endpoints, "
                    "which reach what is the tenant's own; leave it out"
                )
        twice = sorted({domain for domain in domains if domains.count(domain) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)}: stands twice; keep one")
        return domains


class TenantNetworkSpec(SpecModel):
    """What the tenant's network leads to besides the tenant's own resources."""

    egress: EgressSpec | None = Field(default=None, json_schema_extra=on_change("update"))
    """Default: nothing; no gateway, no NAT. Taking it away again drops two subnets and the public address, which
    `trainyard deploy` asks to be told by name."""


class TrackingSpec(SpecModel):
    """A managed MLflow server of the tenant's own, paid for by the hour whether anybody looks or not."""

    size: Literal["small", "medium", "large"] = Field(default="small", json_schema_extra=on_change("update"))
    """By AWS's advice for teams of up to 25, 50 and 100 people. AWS takes half an hour to make or change one."""


class RemovalSpec(SpecModel):
    """What becomes of the tenant's data when `trainyard tenant remove` takes the tenant away."""

    data: Literal["retain", "shred"] | None = Field(default=None, json_schema_extra=on_change("none"))
    """`retain`: buckets, keys, file system and logs stay, and are listed. `shred`: buckets are emptied and deleted with
    all versions, the file system is deleted, and the keys are scheduled for deletion, without which no copy anywhere
    can be read. Default: retain where the environment has retain_data, shred where it hasn't."""
    export_to: str | None = Field(
        default=None,
        pattern=worded(r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s]*)?$", "s3://bucket or s3://bucket/prefix"),
        json_schema_extra=on_change("none"),
    )
    """`s3://bucket/prefix` that gets a copy of every current object of the tenant's buckets first."""


class TrainingPlanSpec(SpecModel):
    """A SageMaker training plan of target training-job, bought by whoever may (docs/tenants.md)."""

    instance_type: str = Field(json_schema_extra=on_change("update"))
    """SageMaker type, as the plan has it."""
    max_instances: int = Field(ge=1, json_schema_extra=on_change("update"))
    """Instances that it holds: no job asks for more."""


class TenantSpec(SpecModel):
    """One team's place: its own network, keys, roles, storage, queues and budget."""

    network_index: int = Field(ge=0, json_schema_extra=on_change("replace"))
    """Which block of the environment's address range the VPC takes: stated, so that it never moves."""
    cost_center: str = Field(
        default="unassigned",
        max_length=256,
        pattern=worded(
            r"^[\p{L}\p{N} _.:/=+@-]+$",  # the length apart: counted, the classes are too large a program
            "what a tag's value can hold: 1 to 256 letters, digits, spaces and _.:/=+@-",
        ),
        json_schema_extra=on_change("update"),
    )
    network: TenantNetworkSpec = TenantNetworkSpec()
    file_system: FileSystemSpec = FileSystemSpec()
    storage: StorageSpec = StorageSpec()
    queues: dict[Name, QueueSpec] = Field(min_length=1)
    cluster: ClusterSpec | None = Field(default=None, json_schema_extra=on_change("update"))
    """EC2 machines under Slurm beside the training jobs; default: none. Taking it away again drops its accounting,
    which `trainyard deploy` asks to be told by name."""
    tracking: TrackingSpec | None = Field(default=None, json_schema_extra=on_change("update"))
    """Experiment tracking: SageMaker's managed MLflow; default: none. Taking it away again drops its runs, which
    `trainyard deploy` asks to be told by name; the jobs' records stay, and `trainyard track` tells them anew."""
    budget: BudgetLimits
    log_retention_days: Literal[30, 90, 180, 365, 731] = Field(default=365, json_schema_extra=on_change("update"))
    max_job_hours: float = Field(default=120.0, gt=0, le=28 * 24, json_schema_extra=on_change("update"))
    """The longest running time that a job may ask for."""
    submission: Literal["broker", "direct", "queue"] | None = Field(default=None, json_schema_extra=on_change("update"))
    """Who hands this tenant's jobs to SageMaker; default: as the environment says."""
    warm_pool_minutes: float = Field(default=0, ge=0, le=360, json_schema_extra=on_change("update"))
    """The longest that a job may keep its machines for the next one (compute.keep_alive_minutes); 0: not at all. They
    are billed meanwhile, and count against the account's quotas of warm pools, which begin at 0."""
    training_plans: dict[str, TrainingPlanSpec] = Field(default_factory=dict, json_schema_extra=on_change("update"))
    """Capacity bought ahead for training jobs, by the plans' names (compute.training_plan)."""
    job_isolation: Literal["tenant", "role", "key"] = Field(default="tenant", json_schema_extra=on_change("update"))
    """What keeps one of the tenant's jobs from the next. `tenant`: nothing, all run as one role. `role`: the broker
    makes a role for each, which reaches that job's own files, inputs and log streams alone, and removes it after it.
    `key`: and each file that a job writes is encrypted under a key of its own, which KMS opens to that role alone."""
    share: ShareSpec = ShareSpec()
    """With `submission: queue`: what of the account's machines is the tenant's, and what it lends."""
    objectives: ObjectivesSpec = ObjectivesSpec()
    """What its jobs are alarmed about; default: everybody's limits (docs/meters.md)."""
    removal: RemovalSpec = RemovalSpec()


PRIVATE_RANGES = tuple(map(ipaddress.IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))
"""RFC 1918."""


class NetworkSpec(SpecModel):
    """The address range from which tenants' VPCs are cut."""

    cidr: str = Field(default="10.64.0.0/10", json_schema_extra=on_change("replace"))
    vpc_prefix_length: int = Field(default=20, ge=16, le=24, json_schema_extra=on_change("replace"))

    @model_validator(mode="after")
    def _valid_range(self) -> Self:
        try:
            network = ipaddress.ip_network(self.cidr)
        except ValueError as error:
            raise ValueError(f"cidr {self.cidr!r} is not a network in CIDR notation: {error}") from None
        # By these alone: Python also calls loopback, link-local and documentation ranges private.
        if network.version != 4 or not any(network.subnet_of(item) for item in PRIVATE_RANGES):
            raise ValueError(f"cidr {self.cidr} must lie in a private IPv4 range (10/8, 172.16/12 or 192.168/16)")
        if network.prefixlen >= self.vpc_prefix_length:
            raise ValueError(f"cidr {self.cidr} holds no /{self.vpc_prefix_length} block; give a larger range")
        return self

    @property
    def num_blocks(self) -> int:
        """How many tenants' VPCs fit."""
        return int(2 ** (self.vpc_prefix_length - ipaddress.ip_network(self.cidr).prefixlen))

    def block(self, index: int) -> str:
        """The CIDR of VPC number `index`."""
        network = ipaddress.ip_network(self.cidr)
        size = 2 ** (32 - self.vpc_prefix_length)
        return f"{network.network_address + index * size}/{self.vpc_prefix_length}"


class AuditSpec(SpecModel):
    """Who did what in the account: a CloudTrail of its API calls, and of every read and write of an object."""

    trail: bool = Field(default=True, json_schema_extra=on_change("replace"))
    """False where the organization has a trail of its own with data events: a second copy of the events costs money.
    Once deployed, false drops the trail, its log bucket and its key: `trainyard deploy` refuses that until each is
    given up by name, with the --accept-loss options that the refusal prints."""
    keep_days: int = Field(default=400, ge=90, le=3650, json_schema_extra=on_change("update"))
    """How long the log files are kept. Where the environment retains data they are locked (Object Lock) for as long."""
    lock_mode: Literal["governance", "compliance"] = Field(default="governance", json_schema_extra=on_change("update"))
    """Who can still delete a locked log file: with governance, who holds s3:BypassGovernanceRetention; with compliance
    nobody, the account's root included."""


class EnvironmentSpec(SpecModel):
    """One deployment of the platform into one account and region."""

    name: Name
    """No dash, unlike a tenant's: stacks are `trainyard-<environment>-<tenant>-<part>`, and where the name of the
    environment ends must be beyond doubt."""
    account: str = Field(
        pattern=worded(r"^\d{12}$", "the account's twelve digits, without dashes"),
        json_schema_extra=on_change("replace"),
    )
    """The AWS account, as a quoted string: leading zeros count."""
    region: str = Field(
        pattern=worded(r"^[a-z]{2}(-[a-z]+)+-\d$", "a region's code, e.g. us-east-1"),
        json_schema_extra=on_change("replace"),
    )
    availability_zones: tuple[str, ...] = Field(min_length=1, json_schema_extra=on_change("replace"))
    """The first one is where EFA, FSx and training run; endpoints use all but Local Zones. Synthesis looks nothing
    up."""
    emulated: bool = False
    """AWS on this machine (trainyard.emulator) stands in for the account."""
    retain_data: bool = Field(default=True, json_schema_extra=on_change("update"))
    """Keys, buckets and file systems outlive the stack; stacks are protected from deletion."""
    max_instances: dict[str, PositiveInt] = Field(min_length=1, json_schema_extra=on_change("update"))
    """The account's quota, instances by SageMaker type; the tenants' queues may not exceed it one by one."""
    submission: Literal["broker", "direct", "queue"] = Field(default="broker", json_schema_extra=on_change("update"))
    """Who hands the tenants' jobs to SageMaker. `broker`: a function of the platform, one for each tenant, that makes
    the request itself and checks quota and budget; the tenant's own roles can't. `queue`: the same, but it hands the
    job to AWS Batch, where it waits for room in the tenant's share. `direct`: the tenant's launcher role, held by the
    guard-rails alone."""
    network: NetworkSpec = NetworkSpec()
    audit: AuditSpec = AuditSpec()
    tenants: dict[Name, TenantSpec] = Field(min_length=1)

    @field_validator("name")
    @classmethod
    def _no_dash(cls, name: str) -> str:
        if "-" in name:
            raise ValueError(
                f"an environment's name has no dash, as environment a-b with tenant c would share its stacks' names "
                f"with environment a with tenant b-c; take {name.replace('-', '')}"
            )
        return name

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        # A zone's letter, or a Local Zone's name: us-east-1a, us-east-1-dfw-2a.
        zone = re.compile(re.escape(self.region) + r"(-[a-z]{3}-\d)?[a-z]")
        outside = [name for name in self.availability_zones if not zone.fullmatch(name)]
        if outside:
            raise ValueError(
                f"availability_zones {', '.join(outside)} are not in region {self.region}; name zones as "
                f"{self.region}a (names differ by account, ids such as use1-az1 are not taken)"
            )
        self._check_names()
        owner: dict[int, str] = {}
        num_blocks = self.network.num_blocks
        for name, tenant in self.tenants.items():
            if tenant.network_index >= num_blocks:
                raise ValueError(
                    f"tenants.{name}.network_index {tenant.network_index}: {self.network.cidr} has only "
                    f"{counted(num_blocks, 'block')} of /{self.network.vpc_prefix_length} (0 to {num_blocks - 1})"
                )
            if tenant.network_index in owner:
                raise ValueError(
                    f"tenants.{name}.network_index {tenant.network_index} is {owner[tenant.network_index]}'s already "
                    f"({self.network.block(tenant.network_index)}): two VPCs would overlap"
                )
            owner[tenant.network_index] = name
            self._check_queues(name, tenant)
            self._check_capacity(name, tenant)
            if self.isolates_jobs(name) and not self.brokered(name):
                raise ValueError(
                    f"tenants.{name}.job_isolation {tenant.job_isolation}: the broker makes the jobs' roles, and its "
                    "submission is direct; set submission: broker or queue, or leave job_isolation out"
                )
            self._check_reservations(name, tenant)
            if tenant.removal.data == "retain" and not self.retain_data:
                raise ValueError(
                    f"tenants.{name}.removal.data: retain needs the environment's retain_data: true, as its stacks "
                    "delete what they hold; set that, or leave removal.data out"
                )
        self._check_shares()
        return self

    def _check_shares(self) -> None:
        """Of tenants that queue: no more is guaranteed than there is, and nobody borrows without lending."""
        queued = [name for name in self.tenants if self.queued(name)]
        for name, tenant in self.tenants.items():
            if name in queued:
                wrong = shares.refusals(name, self.guaranteed(name), self.most(name), tenant.share)
            else:
                wrong = ["share: is for submission: queue; leave it out"] if tenant.share != ShareSpec() else []
            if wrong:
                raise ValueError(f"tenants.{name}.{wrong[0]}")
            if name.startswith("awsbatch"):
                raise ValueError(
                    f"tenants.{name}: Batch's own training jobs are named so, and policies would match them; take a "
                    "name that begins otherwise"
                )
        for kind, limit in self.max_instances.items():
            parts = {name: count for name in queued if (count := self.guaranteed(name).get(kind, 0))}
            if sum(parts.values()) > limit:
                listed = ", ".join(f"{name} {count}" for name, count in parts.items())
                raise ValueError(
                    f"max_instances {limit} {kind}: tenants are guaranteed {sum(parts.values())} together ({listed}); "
                    "guarantee fewer in tenants.NAME.share.guaranteed: up to max_instances of its queues a tenant may "
                    "still borrow"
                )

    def _check_names(self) -> None:
        """IAM tells jobs apart by `<tenant>-*`: acme's policies would also match the jobs of acme-labs."""
        if "jobs" in self.tenants:
            raise ValueError(
                "tenants.jobs: all tenants' job metrics are in the namespace trainyard/jobs, which would be this "
                "tenant's own; take another name"
            )
        for name in sorted(self.tenants):
            for other in sorted(self.tenants):
                if other.startswith(f"{name}-"):
                    raise ValueError(
                        f"tenants {name} and {other}: policies for {name}'s jobs ({name}-*) would match {other}'s too; "
                        "rename one so that neither begins with the other and a dash"
                    )

    def _check_queues(self, name: str, tenant: TenantSpec) -> None:
        for queue_name, queue in tenant.queues.items():
            for instance_type in queue.instance_types:
                limit = self.max_instances.get(instance_type)
                where = f"tenants.{name}.queues.{queue_name}"
                if limit is None:
                    allowed = ", ".join(sorted(self.max_instances))
                    close = difflib.get_close_matches(instance_type, self.max_instances, n=1)
                    hint = f"did you mean {close[0]}? (there are: {allowed})" if close else f"there are: {allowed}"
                    raise ValueError(f"{where}: {instance_type} is not in the environment's max_instances; {hint}")
                if queue.max_instances > limit:
                    raise ValueError(
                        f"{where}.max_instances {queue.max_instances} exceeds the environment's {limit} {instance_type}"
                    )

    def _check_capacity(self, name: str, tenant: TenantSpec) -> None:
        """Warm pools and training plans, where something else rules them out."""
        where, kinds = f"tenants.{name}", self.most(name)
        given = [field for field in ("warm_pool_minutes", "training_plans") if getattr(tenant, field)]
        if given and self.queued(name):
            raise ValueError(
                f"{where}.{given[0]}: with submission: queue AWS Batch counts the machines that jobs hold, and knows "
                "of none that are kept warm or were bought ahead; leave it out, or set submission: broker"
            )
        if tenant.warm_pool_minutes and self.isolates_jobs(name):
            raise ValueError(
                f"{where}.warm_pool_minutes: a warm pool serves jobs of the same role, and with job_isolation: role "
                "each has its own; leave one of them out"
            )
        for plan, spec in tenant.training_plans.items():
            if not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,63}", plan):
                raise ValueError(f"{where}.training_plans: {plan!r} is no training plan's name")
            if spec.instance_type not in kinds:
                raise ValueError(
                    f"{where}.training_plans.{plan}: no queue of the tenant offers {spec.instance_type} (they offer "
                    f"{', '.join(sorted(kinds))}); add it to one"
                )
            owners = [other for other, item in self.tenants.items() if plan in item.training_plans]
            if len(owners) > 1:
                raise ValueError(f"training_plans {plan}: is {' and '.join(owners)}'s; a plan is one tenant's")

    def _check_reservations(self, name: str, tenant: TenantSpec) -> None:
        """Capacity that was reserved for a tenant is no other's."""
        for other, item in self.tenants.items():
            if other != name and tenant.cluster and item.cluster:
                shared = tenant.cluster.reservations & item.cluster.reservations
                if shared:
                    raise ValueError(
                        f"tenants.{name}.cluster: reservation {min(shared)} is {other}'s too; a reservation is one "
                        "tenant's, or one could starve the other: split it"
                    )

    def tenant(self, name: str) -> TenantSpec:
        """The tenant of that name; KeyError is for callers that have checked."""
        return self.tenants[name]

    def data_on_removal(self, tenant: str) -> Literal["retain", "shred"]:
        """What becomes of the tenant's data when it is removed."""
        return self.tenants[tenant].removal.data or ("retain" if self.retain_data else "shred")

    def brokered(self, tenant: str) -> bool:
        """Whether a broker submits the tenant's jobs, and nobody else: to SageMaker, or to a queue."""
        return (self.tenants[tenant].submission or self.submission) != "direct"

    def queued(self, tenant: str) -> bool:
        """Whether the tenant's jobs wait in the training queues that all tenants share."""
        return (self.tenants[tenant].submission or self.submission) == "queue"

    def isolates_jobs(self, tenant: str) -> bool:
        """Whether each of the tenant's jobs runs as a role of its own."""
        return self.tenants[tenant].job_isolation != "tenant"

    def encrypts_by_job(self, tenant: str) -> bool:
        """Whether what a job writes is encrypted under keys that KMS gives that job's role alone."""
        return self.tenants[tenant].job_isolation == "key"

    @property
    def endpoint_zones(self) -> tuple[str, ...]:
        """The zones that can hold interface endpoints: those of the region itself, no Local Zones (Local Zones user
        guide, "How AWS Local Zones work", Considerations)."""
        return tuple(name for name in self.availability_zones if len(name) == len(self.region) + 1)

    def most(self, tenant: str) -> dict[str, int]:
        """Instances by type that the tenant's jobs may hold together in the training queues, with borrowed ones."""
        found: dict[str, int] = {}
        for queue in self.tenants[tenant].queues.values():
            for kind in queue.instance_types:
                found[kind] = max(found.get(kind, 0), queue.max_instances)
        for kind, count in self.tenants[tenant].share.guaranteed.items():
            if 1 <= count <= found.get(kind, 0):
                found[kind] = shares.reachable(count, found[kind])
        return found

    def guaranteed(self, tenant: str) -> dict[str, int]:
        """Instances by type that are the tenant's in the training queues whenever it has work."""
        stated = self.tenants[tenant].share.guaranteed
        return {kind: stated.get(kind, most) for kind, most in self.most(tenant).items()}

    def training_queue(self, kind: str, tenant: str) -> str:
        """Name of the queue where the tenant's jobs on instances of that type wait."""
        return shares.queue_name(self.name, kind, shares.shard(self.tenants[tenant].network_index))

    def queue_capacity(self) -> dict[tuple[str, int], int]:
        """Instances of each training queue, by type and number.

        The first queue of a type has what the others leave, so that the platform changes for none of its tenants; a
        further one has what its own are guaranteed. Each is there as long as a tenant is, whoever submits its jobs
        (the platform is deployed first, and couldn't delete a queue whose shares still stand); then with room for one,
        which nobody without a share can use.
        """
        numbers = {shares.shard(tenant.network_index) for tenant in self.tenants.values()}
        capacity: dict[tuple[str, int], int] = {}
        for kind, limit in self.max_instances.items():
            taken = dict.fromkeys(numbers | {0}, 0)
            for name, tenant in self.tenants.items():
                if self.queued(name):
                    taken[shares.shard(tenant.network_index)] += self.guaranteed(name).get(kind, 0)
            others = sum(count for number, count in taken.items() if number)
            capacity |= {(kind, number): max(1, count) for number, count in taken.items()}
            capacity[kind, 0] = max(1, limit - others)
        return capacity

    def tracking_server(self, tenant: str) -> str:
        """Name of the tenant's MLflow server: stated, so that policies can name it before it is there."""
        return f"trainyard-{self.name}-{tenant}"

    def broker_name(self, tenant: str) -> str:
        """The function that submits the tenant's jobs: stated, so that policies can name it before it is there."""
        return f"trainyard-{self.name}-{tenant}-broker"

    def contract_parameter(self, tenant: str) -> str:
        """SSM parameter that holds the tenant's contract."""
        return f"/trainyard/{self.name}/{tenant}/contract"

    @property
    def image_repository(self) -> str:
        """ECR's repository of the training images: jobs may pull from it, and from no other."""
        return f"trainyard-{self.name}"

    @property
    def image_parameter(self) -> str:
        """SSM parameter of the training image's URI with digest, apart so that a release redeploys no tenant."""
        return f"/trainyard/{self.name}/image"


class QueueContract(SpecModel):
    """A queue as deployed."""

    arn: str = ""
    """Of a queue of the tenant's own; empty where its jobs wait in those that all share (`shares`)."""
    instance_types: tuple[str, ...]
    max_instances: int
    multi_node: bool


class FileSystemContract(SpecModel):
    """The file system as deployed."""

    id: str
    mount_name: str
    dns_name: str


class KeyContract(SpecModel):
    """ARNs of the tenant's customer-managed keys."""

    data: str
    checkpoints: str
    logs: str
    artifacts: str = ""
    """Exported models; empty in contracts of version 1."""


class BucketContract(SpecModel):
    """Names of the tenant's buckets."""

    data: str
    """Data sets, job specs and job records (`jobs/<job>/`)."""
    checkpoints: str
    """Checkpoints and outputs, by job."""
    artifacts: str = ""
    """Exported models (`models/`) and why each was registered (`registry/`); empty in contracts of version 1."""


class ClusterContract(SpecModel):
    """The cluster as deployed: what a person needs to reach it and to name a partition."""

    engine: Literal["pcs", "hyperpod"]
    id: str
    """PCS's own id, which its API and `AWS_PCS` tools take; HyperPod's ARN."""
    queues: dict[str, tuple[str, ...]]
    """Slurm partition to the EC2 types that it starts."""
    login_tag: str
    """Value of the tag `trainyard:node` on login nodes, the only machines that take a Session Manager session; of
    HyperPod the name of their group."""


class TrackingContract(SpecModel):
    """The MLflow server as deployed."""

    server: str
    """Its ARN, which MLflow's clients take as tracking URI (with AWS's plugin `sagemaker-mlflow`)."""
    artifacts: str
    """`s3://bucket/prefix` of the files beside its runs, which clients write themselves."""


class TrainingPlanContract(SpecModel):
    """Capacity that was bought ahead."""

    arn: str
    instance_type: str
    max_instances: int


class RoleContract(SpecModel):
    """ARNs of the tenant's roles."""

    job: str
    """What a running training job is."""
    launcher: str
    """What people and CI assume to launch, watch and stop jobs."""
    auditor: str
    """Read-only."""
    operator: str = ""
    """Breaks the glass, with a second factor; empty in contracts from before there was one."""
    broker: str = ""
    """What the function that submits the tenant's jobs runs as; empty where the launcher submits them itself."""


class TenantContract(SpecModel):
    """All that the launcher knows of a tenant: published by its stack in SSM, read by nothing else."""

    version: int = CONTRACT_VERSION
    environment: str
    tenant: str
    account: str
    region: str
    availability_zone: str
    vpc_id: str
    subnet_ids: tuple[str, ...]
    """Private subnets of `availability_zone`, where training runs."""
    security_group_ids: tuple[str, ...]
    """The EFA group first, then the file system's client group where it is another."""
    keys: KeyContract
    buckets: BucketContract
    file_system: FileSystemContract
    roles: RoleContract
    queues: dict[str, QueueContract]
    log_group: str
    """The tenant's own log group (SageMaker itself always writes jobs' output to /aws/sagemaker/TrainingJobs)."""
    image_parameter: str
    cost_center: str
    max_job_hours: float
    monthly_usd: float
    monthly_gpu_hours: float | None = None
    """None: no quota of GPU-hours."""
    when_spent: Literal["finish", "stop"] = "finish"
    """What becomes of the tenant's jobs when a quota of the month is spent: see BudgetLimits."""
    warn_at_percent: float = 80.0
    broker: str = ""
    """Name of the function that submits the tenant's jobs; empty where the launcher submits them itself."""
    shares: dict[str, ShareContract] = Field(default_factory=dict)
    """By instance type, where the broker hands jobs to the training queues and not to SageMaker. A share has the
    tenant's name. Empty otherwise, and in contracts before version 3."""
    cluster: ClusterContract | None = None
    """None where the tenant has none, and in contracts before version 3."""
    tracking: TrackingContract | None = None
    """None where the tenant has none, and in contracts before version 4."""
    warm_pool_minutes: float = 0
    """The longest that a job may keep its machines; 0, and in contracts before version 3, not at all."""
    training_plans: dict[str, TrainingPlanContract] = Field(default_factory=dict)
    """By name; empty in contracts before version 3."""
    job_keys: bool = False
    """Whether KMS judges each use of the checkpoint key by the object that it is for."""
    job_boundary: str = ""
    """ARN of the permissions boundary of the roles that the broker makes, one for each job; empty where all jobs run as
    `roles.job`, and in contracts before version 3."""
    emulated: bool = False


def load_environment(path: Path) -> EnvironmentSpec:
    """The environment in a YAML file; InputError names the file, the field and what is allowed."""
    return parse(EnvironmentSpec, read_yaml(path), str(path))


def parse_contract(text: str, where: str) -> TenantContract:
    """A contract from its JSON; InputError where it is not one or is newer than this trainyard."""
    import json

    from trainyard.errors import InputError

    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: is not JSON ({error}); deploy the tenant's stack again") from None
    if not isinstance(content, dict):
        raise InputError(f"{where}: is no contract but a {type(content).__name__}; deploy the tenant's stack again")
    version = content.get("version", 1)
    if not isinstance(version, int) or isinstance(version, bool):
        raise InputError(f"{where}: version: {version!r} is no whole number; deploy the tenant's stack again")
    if version > CONTRACT_VERSION:
        raise InputError(f"{where}: contract version {version} is above {CONTRACT_VERSION}; upgrade trainyard")
    return parse(TenantContract, content, where)
