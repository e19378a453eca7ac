"""A tenant's EC2 cluster: machines under Slurm, started when a job asks for them and stopped when nobody does."""

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from trainyard.spec.base import SpecModel, on_change, worded

_CLUSTER_NAME = worded(r"^[a-z][a-z0-9-]{2,24}$", "3 to 25 small letters, digits and dashes, a letter first")
ClusterName = Annotated[str, Field(pattern=_CLUSTER_NAME)]
"""Of a node group or queue: PCS takes 3 to 25 letters, digits and dashes; people type it after `sbatch -p`."""

MAX_NODES = {"small": 32, "medium": 512, "large": 2048}
"""PCS: nodes that a controller of each size manages, login nodes included."""

LOGIN_GROUP = "login"
"""Name of the login node's group, which no group of the environment file may have."""

CONTROLLER_GROUP = "controller"
"""Name of the group of HyperPod's controller, which no group of the environment file may have."""

AMI_PATTERN = worded(
    r"^(ami-[0-9a-f]{8,17}|ssm:/[A-Za-z0-9_./-]+)$",
    "an image's id, ami-0123456789abcdef0, or ssm:/NAME, a parameter that holds one",
)


def _named_by_ec2(value: object) -> object:
    """Before the pattern, which would only say that SageMaker's name has a dot too many."""
    if isinstance(value, str) and value.startswith("ml."):
        raise ValueError(f"{value} is SageMaker's name; a cluster's machines are EC2's: {value.removeprefix('ml.')}")
    return value


InstanceType = Annotated[
    str,
    BeforeValidator(_named_by_ec2),
    Field(pattern=worded(r"^[a-z0-9-]+\.[a-z0-9-]+$", "a type's name as EC2 has it, e.g. p5.48xlarge")),
]
"""EC2's name, without `ml.`."""


class NodeGroupSpec(SpecModel):
    """Machines of one type, which Slurm starts and stops between a floor and a ceiling."""

    instance_type: InstanceType = Field(json_schema_extra=on_change("update"))
    """EC2's name, without `ml.`. Every network card of it is wired for EFA."""
    min_instances: int = Field(default=0, ge=0, json_schema_extra=on_change("update"))
    """Machines that run, and are paid for, whether a job needs them or not. Engine hyperpod runs max_instances always:
    there it is how many must have come up for the group to count as made."""
    max_instances: int = Field(ge=1, json_schema_extra=on_change("update"))
    purchase: Literal["on_demand", "spot", "capacity_block"] = Field(
        default="on_demand", json_schema_extra=on_change("update")
    )
    """`capacity_block`: machines that were bought for a time beforehand; needs `reservation`."""
    reservation: str | None = Field(
        default=None,
        pattern=worded(r"^cr-[0-9a-f]{8,17}$", "a capacity reservation's id, cr-0123456789abcdef0"),
        json_schema_extra=on_change("update"),
    )
    """Id of the capacity block, or of an on-demand capacity reservation that these machines then run in and nowhere
    else."""
    training_plan: str | None = Field(
        default=None, pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,63}$", json_schema_extra=on_change("update")
    )
    """Engine hyperpod: name of a SageMaker training plan of target hyperpod-cluster that these machines come from."""
    placement_group: bool | None = Field(default=None, json_schema_extra=on_change("update"))
    """Machines side by side. Default: yes, but not in a capacity block, which AWS places by itself."""
    root_gib: int = Field(default=200, ge=50, le=16384, json_schema_extra=on_change("update"))
    """GiB of each machine's root volume, which goes with the machine. Engine hyperpod: of the volume beside its root
    (/opt/sagemaker)."""

    @property
    def grouped(self) -> bool:
        """Whether its machines are in a placement group."""
        return self.placement_group if self.placement_group is not None else self.purchase != "capacity_block"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_instances > self.max_instances:
            raise ValueError(
                f"min_instances {self.min_instances} is above max_instances {self.max_instances}; lower the floor"
            )
        if self.purchase == "capacity_block" and self.reservation is None:
            raise ValueError("purchase: capacity_block needs reservation: the block's id, cr-...")
        if self.purchase == "capacity_block" and self.placement_group:
            raise ValueError(
                "placement_group: true with purchase: capacity_block: AWS refuses machines with both, and places a "
                "block's side by side anyway; leave placement_group out"
            )
        if self.purchase == "spot" and self.reservation is not None:
            raise ValueError(
                "reservation with purchase: spot: spot machines run in no reservation; take purchase: on_demand, or "
                "capacity_block where the reservation is one"
            )
        return self


class LoginSpec(SpecModel):
    """The one machine that people get a shell on, by Session Manager: no key pair, no open port."""

    instance_type: InstanceType = Field(json_schema_extra=on_change("update"))
    """EC2's name. It needs no GPU, and the processor's kind that the AMI is for."""
    ami: str | None = Field(default=None, pattern=AMI_PATTERN, json_schema_extra=on_change("update"))
    """Default: the cluster's."""
    root_gib: int = Field(default=100, ge=50, le=16384, json_schema_extra=on_change("update"))


class ControllerSpec(SpecModel):
    """Engine hyperpod: the machine that Slurm's controller runs on. It needs no GPU."""

    instance_type: InstanceType = Field(json_schema_extra=on_change("update"))
    """EC2's name."""
    root_gib: int = Field(default=100, ge=50, le=16384, json_schema_extra=on_change("update"))
    """GiB of the volume beside its root."""


class SmallFilesSpec(SpecModel):
    """EFS beside Lustre: code, environments, notebooks. All machines see it at /efs; it is never full."""

    mounted: bool = Field(default=True, json_schema_extra=on_change("update"))
    """False: it is there, and no machine mounts it. The step before `small_files` is taken away: a deployment takes
    away nothing that machines still name."""
    archive_after_days: Literal[7, 14, 30, 60, 90, 180, 365] | None = Field(
        default=30, json_schema_extra=on_change("update")
    )
    """Days without a read after which a file moves to Infrequent Access: cheaper to keep, dearer to read; it comes back
    at its first read. None: never."""


class ClusterSpec(SpecModel):
    """Slurm on machines of the tenant's, by one of two engines. Fields say where they are one engine's alone."""

    engine: Literal["pcs", "hyperpod"] = Field(default="pcs", json_schema_extra=on_change("replace"))
    """`pcs`: AWS Parallel Computing Service runs the controller and its accounting, machines start when a job asks for
    them. `hyperpod`: SageMaker keeps all machines running, and replaces one that fails."""
    slurm_version: Literal["24.11", "25.05", "25.11", "26.05"] | None = Field(
        default=None, json_schema_extra=on_change("update")
    )
    """Engine pcs, required: one that PCS still runs, and that the AMI has the client of."""
    controller: ControllerSpec | None = Field(default=None, json_schema_extra=on_change("update"))
    """Engine hyperpod, required."""
    start_script: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,100}$", json_schema_extra=on_change("update")
    )
    """Engine hyperpod: file in `cluster/` of the tenant's data bucket, which each machine runs as root once Slurm is
    set up on it. It must be there before the cluster is deployed; a change reaches new node groups only."""
    size: Literal["small", "medium", "large"] = Field(default="small", json_schema_extra=on_change("replace"))
    """Of the controller, paid by the hour: up to 32, 512 or 2,048 machines, the login node among them."""
    ami: str | None = Field(default=None, pattern=AMI_PATTERN, json_schema_extra=on_change("update"))
    """Engine pcs, required (HyperPod has images of its own): the image of its machines, an id, or `ssm:/...`, a
    parameter with the id, which is read when the stack is deployed. It must have Slurm's and PCS's agents, EFA, the
    Lustre client and, for the login node, the SSM agent."""
    root_device: Literal["/dev/xvda", "/dev/sda1"] | None = Field(default=None, json_schema_extra=on_change("update"))
    """Engine pcs, required. The AMI's root: /dev/xvda on Amazon Linux, /dev/sda1 on Ubuntu (`aws ec2 describe-images
    --image-ids AMI --query 'Images[].RootDeviceName'`). With the wrong one the real root is not under the tenant's
    key."""
    accounting_days: int | None = Field(default=None, ge=1, le=10000, json_schema_extra=on_change("update"))
    """How long Slurm remembers jobs; default: as long as the cluster exists."""
    idle_minutes: int = Field(default=10, ge=1, le=1440, json_schema_extra=on_change("update"))
    """After which a machine without a job is stopped, down to the floor of its group."""
    node_groups: dict[ClusterName, NodeGroupSpec] = Field(
        min_length=1, max_length=9, json_schema_extra=on_change("update")
    )
    queues: dict[ClusterName, tuple[str, ...]] = Field(
        default_factory=dict, max_length=10, json_schema_extra=on_change("update")
    )
    """Slurm partition to the node groups that it starts; default: one for each group, by its name."""
    login: LoginSpec = Field(json_schema_extra=on_change("update"))
    small_files: SmallFilesSpec | None = Field(default=None, json_schema_extra=on_change("update"))
    """A file system for what is small and shared; default: none. Its loss is asked about by name."""

    @property
    def partitions(self) -> dict[str, tuple[str, ...]]:
        """`queues`, or one for each group."""
        return self.queues or {name: (name,) for name in self.node_groups}

    @property
    def num_machines(self) -> int:
        """The most that can run at once, the login node among them."""
        return 1 + sum(group.max_instances for group in self.node_groups.values())

    @property
    def reservations(self) -> frozenset[str]:
        """Capacity reservations and blocks that its machines run in."""
        return frozenset(group.reservation for group in self.node_groups.values() if group.reservation)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for kind, names in (("node_groups", self.node_groups), ("queues", self.queues)):
            taken = [name for name in names if name == LOGIN_GROUP or re.match("pcs[-_]", name)]
            if taken:
                raise ValueError(f"{kind}.{taken[0]}: `{LOGIN_GROUP}` and `pcs-...` are taken; choose another name")
            if self.engine == "hyperpod" and CONTROLLER_GROUP in names:
                raise ValueError(f"{kind}.{CONTROLLER_GROUP}: is the controller's own; choose another name")
        for queue, groups in self.queues.items():
            unknown = [name for name in groups if name not in self.node_groups]
            if unknown or not groups:
                raise ValueError(
                    f"queues.{queue}: names {', '.join(unknown) or 'no node group'}; there are "
                    f"{', '.join(sorted(self.node_groups))}"
                )
        if self.engine == "pcs" and self.num_machines > MAX_NODES[self.size]:
            raise ValueError(
                f"size {self.size} manages {MAX_NODES[self.size]} machines, and the login node and max_instances of "
                f"all node groups make {self.num_machines}; take a larger size or lower max_instances"
            )
        return self

    @model_validator(mode="after")
    def _of_its_engine(self) -> Self:
        """What the engine needs is stated, and nothing that only the other one knows."""
        needed = {"pcs": ("slurm_version", "ami", "root_device"), "hyperpod": ("controller",)}
        missing = [field for field in needed[self.engine] if getattr(self, field) is None]
        if missing:
            raise ValueError(f"{missing[0]}: engine {self.engine} needs it; state it (docs/tenants.md)")
        others = {
            "pcs": ("controller", "start_script"),
            "hyperpod": (
                "slurm_version",
                "ami",
                "root_device",
                "accounting_days",
                "size",
                "idle_minutes",
                "small_files",
            ),
        }
        for field in others[self.engine]:
            if getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(f"{field}: engine {self.engine} has no such setting; leave it out")
        for name, group in self.node_groups.items():
            if self.engine == "pcs" and group.training_plan:
                raise ValueError(f"node_groups.{name}.training_plan: engine pcs runs on none; leave it out")
            if self.engine == "hyperpod" and (group.purchase, group.placement_group) != ("on_demand", None):
                raise ValueError(
                    f"node_groups.{name}: engine hyperpod places and buys its machines itself; leave out purchase and "
                    "placement_group, and name training_plan for machines bought ahead"
                )
            if self.engine == "hyperpod" and group.reservation:
                raise ValueError(f"node_groups.{name}.reservation: HyperPod runs in none of EC2's; name training_plan")
            queues = [queue for queue, groups in self.queues.items() if name in groups]
            if self.engine == "hyperpod" and len(queues) > 1:
                raise ValueError(
                    f"queues {' and '.join(queues)}: both name {name}; with engine hyperpod a group is in one partition"
                )
        return self
