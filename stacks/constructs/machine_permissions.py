"""What the machines of a tenant's cluster may do besides a job's work, and who gets a shell on the login node."""

from stacks.constructs.statements import Statement, allow, deny, deny_outside
from stacks.naming import PARTITION, TAG_NODE, TAG_TENANT, TenantScope

TAG_INTERFACE = "ec2:CreateTags"
LEAVE_INTERFACE = "ec2:DetachNetworkInterface"
FIND_NODES = ["sagemaker:DescribeCluster", "sagemaker:ListClusterNodes"]
WRITE_MACHINE_LOGS = ["logs:CreateLogGroup", "logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]

REGISTER = "pcs:RegisterComputeNodeGroupInstance"
OPEN_SHELL = "ssm:StartSession"
SESSIONS = [
    "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel",
    "ssmmessages:OpenDataChannel",
]
"""How the login node's agent takes sessions. They name no resource."""

USE_SESSION = "ssmmessages:OpenDataChannel"
"""How the CLI's plugin reads and writes a session that it has started."""

SHELL_DOCUMENT = "SSM-SessionManagerRunShell"
"""The account's own settings of an interactive shell: no port forwarding, no other document."""

SCRIPTS_FOLDER = "cluster"
"""Of the data bucket: what HyperPod's machines run as they come up, written by the tenant's launcher."""

USE_FILES = ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"]
"""Of EFS. Without ClientRootAccess: root of a machine is nobody there."""

MACHINE_WILDCARDS = {
    "FindMachines": "SageMaker makes up the cluster's id; the condition on its tag holds it to the tenant's own.",
    "OpenMachineShell": "SageMaker makes up the cluster's id; the condition on its tag holds it to the tenant's own.",
    "TagInterfaces": "An interface's id is made with it; only one that is being made is tagged.",
    "LeaveInterfaces": "An interface's id is made with it; the condition holds it to the tenant's VPC.",
    "LeaveMachines": "The machine beside the interface, which SageMaker makes up; the interface is the tenant's.",
    "MachineLogs": "HyperPod's log group of the tenant's cluster: the id behind its name is made with it.",
    "MachineMetrics": "PutMetricData has no resource; the condition holds it to HyperPod's namespace.",
    "FindLoginNode": "DescribeInstances has no resource: it shows that machines exist, and opens none.",
    "JoinCluster": "PCS makes up the cluster's id; the condition on its tag holds it to the tenant's own.",
    "OpenShell": "A machine's id is made with it; the condition on its tags holds it to the tenant's login node.",
    "SayAlive": "The agent reports for the machine whose credentials it has; the action needs no resource.",
    "TakeSessions": "The session channels have no resource; what a session may reach, who opens it is asked for.",
    "UseOwnSessions": "A session's id begins with its caller's own, which the policy variable stands for.",
}


def machine_actions(tenant: TenantScope) -> list[str]:
    """What the boundary of a tenant with a cluster lets through besides. Few characters: a policy holds 6,144."""
    if (cluster := tenant.spec.cluster) is None:
        return []
    if tenant.hyperpod:
        return [OPEN_SHELL, "ssmmessages:*Channel", TAG_INTERFACE, LEAVE_INTERFACE]
    files = USE_FILES if cluster.small_files is not None else []
    return [REGISTER, OPEN_SHELL, "ssm:UpdateInstanceInformation", "ssmmessages:*Channel", *files]


def own_clusters(tenant: TenantScope) -> list[str]:
    """Any cluster: PCS makes up the ids, so that a condition on the tag must tell the tenant's."""
    return [tenant.arn("pcs", "cluster/*")]


def join_cluster(tenant: TenantScope) -> list[Statement]:
    """A machine tells PCS that it is up."""
    return [
        allow(
            "JoinCluster",
            [REGISTER],
            own_clusters(tenant),
            {"StringEquals": {f"aws:ResourceTag/{TAG_TENANT}": tenant.name}},
        )
    ]


def take_sessions() -> list[Statement]:
    """The login node's agent."""
    return [
        allow("SayAlive", ["ssm:UpdateInstanceInformation"], ["*"]),
        allow("TakeSessions", SESSIONS, ["*"]),
    ]


def machine_logs(tenant: TenantScope) -> list[str]:
    """HyperPod's log groups of the tenant's cluster; the id behind its name is made with it."""
    return [tenant.arn("logs", f"log-group:/aws/sagemaker/Clusters/{tenant.cluster_name}/*")]


def be_hyperpod(tenant: TenantScope, *, vpc_id: str, scripts: str) -> list[Statement]:
    """What HyperPod does as the role of each machine, beside its network interfaces: tags and leaves those, writes its
    logs, fetches the tenant's script, answers Session Manager (SageMaker developer guide, "IAM role for SageMaker
    HyperPod" and the policy AmazonSageMakerClusterInstanceRolePolicy, whose buckets, `sagemaker-*`, are anybody's)."""
    interfaces, vpc = tenant.arn("ec2", "network-interface/*"), tenant.arn("ec2", f"vpc/{vpc_id}")
    made = {"StringEquals": {"ec2:CreateAction": "CreateNetworkInterface"}}
    space = {"StringEquals": {"cloudwatch:namespace": "/aws/sagemaker/Clusters"}}

    return [
        allow("TagInterfaces", [TAG_INTERFACE], [interfaces], made),
        allow("LeaveInterfaces", [LEAVE_INTERFACE], [interfaces], {"ArnEquals": {"ec2:Vpc": vpc}}),
        # EC2 judges the machine that loses it too, which has no VPC to ask for and may be of an account of SageMaker's.
        # Alone this detaches nothing; an interface has a VPC, so that the pattern can't be read as one's.
        allow("LeaveMachines", [LEAVE_INTERFACE], [_any_machine(tenant)], {"Null": {"ec2:Vpc": "true"}}),
        allow("MachineLogs", WRITE_MACHINE_LOGS, machine_logs(tenant)),
        allow("MachineMetrics", ["cloudwatch:PutMetricData"], ["*"], space),
        allow("FetchScript", ["s3:GetObject"], [scripts]),
        allow("TakeSessions", SESSIONS, ["*"]),
    ]


def _open_machine_shells(tenant: TenantScope) -> list[Statement]:
    """On HyperPod: a shell on any machine of the own cluster, as its machines have no tags to tell the login node by.
    What SSM asks IAM of such a target is in no document of AWS's that we know; without a tag, this lets nobody in."""
    tag, own = {f"aws:ResourceTag/{TAG_TENANT}": tenant.name}, [tenant.arn("sagemaker", "cluster/*")]
    on_own = {"StringEquals": tag}
    checked = {**on_own, "BoolIfExists": {"ssm:SessionDocumentAccessCheck": "true"}}
    return [
        allow("FindMachines", FIND_NODES, own, on_own),
        allow("OpenMachineShell", [OPEN_SHELL], own, checked),
        allow("ShellDocument", [OPEN_SHELL], [_shell_document(tenant)]),
        _use_own_sessions(tenant),
    ]


def _use_own_sessions(tenant: TenantScope) -> Statement:
    # As AWS's own example has it (Systems Manager user guide, quickstart end user policies).
    return allow("UseOwnSessions", [USE_SESSION], [tenant.arn("ssm", "session/${aws:userid}-*")])


def open_shells(tenant: TenantScope) -> list[Statement]:
    """The tenant's login node found, and a shell on it, by no other document than the account's own for shells: without
    the check of the document, IAM isn't asked about it."""
    if tenant.spec.cluster is None:
        return []
    if tenant.hyperpod:
        return _open_machine_shells(tenant)
    return [
        allow(
            "OpenShell",
            [OPEN_SHELL],
            [_machines(tenant)],
            {
                "StringEquals": _login_node(tenant),
                "BoolIfExists": {"ssm:SessionDocumentAccessCheck": "true"},
            },
        ),
        allow("ShellDocument", [OPEN_SHELL], [_shell_document(tenant)]),
        allow("FindLoginNode", ["ec2:DescribeInstances"], ["*"]),
        _use_own_sessions(tenant),
    ]


def only_login_nodes(tenant: TenantScope) -> list[Statement]:
    """For the boundary: no shell on anything but the tenant's login node, and by no other document, whatever else a
    person is allowed. A negated operator also matches an absent key: a machine without tags is nobody's."""
    if tenant.spec.cluster is None:
        return []
    if tenant.hyperpod:
        return _only_own_machines(tenant)
    # What is not the shell's document must be a machine with these tags: other documents, which forward ports, managed
    # machines outside EC2 and containers are closed by it too.
    return [
        deny_outside(f"Shell{name}", [OPEN_SHELL], [_shell_document(tenant)], {"StringNotEquals": {key: value}})
        for name, (key, value) in zip(("OwnMachine", "LoginNode"), _login_node(tenant).items(), strict=True)
    ]


def _only_own_machines(tenant: TenantScope) -> list[Statement]:
    """The same for HyperPod; and no tag on what is there already, or a role could make another's machine its own."""
    own = {f"aws:ResourceTag/{TAG_TENANT}": tenant.name}
    made = {"ec2:CreateAction": "CreateNetworkInterface"}
    return [
        deny_outside("ShellOwnMachine", [OPEN_SHELL], [_shell_document(tenant)], {"StringNotEquals": own}),
        deny("TagOnlyNew", [TAG_INTERFACE], {"StringNotEquals": made}),
    ]


def _shell_document(tenant: TenantScope) -> str:
    return tenant.arn("ssm", f"document/{SHELL_DOCUMENT}")


def _machines(tenant: TenantScope) -> str:
    return tenant.arn("ec2", "instance/*")


def _any_machine(tenant: TenantScope) -> str:
    return f"arn:{PARTITION}:ec2:{tenant.environment.region}:*:instance/*"


def _login_node(tenant: TenantScope) -> dict[str, str]:
    return {f"ssm:resourceTag/{TAG_TENANT}": tenant.name, f"ssm:resourceTag/{TAG_NODE}": "login"}
