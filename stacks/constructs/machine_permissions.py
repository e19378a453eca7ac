"""What the machines of a tenant's cluster may do besides a job's work, and who gets a shell on the login node."""

from aws_cdk import aws_iam as iam

from stacks.naming import TAG_NODE, TAG_TENANT, TenantScope

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

USE_FILES = ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"]
"""Of EFS. Without ClientRootAccess: root of a machine is nobody there."""

MACHINE_WILDCARDS = {
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
    files = USE_FILES if cluster.small_files is not None else []
    return [REGISTER, OPEN_SHELL, "ssm:UpdateInstanceInformation", "ssmmessages:*Channel", *files]


def own_clusters(tenant: TenantScope) -> list[str]:
    """Any cluster: PCS makes up the ids, so that a condition on the tag must tell the tenant's."""
    return [tenant.arn("pcs", "cluster/*")]


def join_cluster(tenant: TenantScope) -> list[iam.PolicyStatement]:
    """A machine tells PCS that it is up."""
    return [
        iam.PolicyStatement(
            sid="JoinCluster",
            actions=[REGISTER],
            resources=own_clusters(tenant),
            conditions={"StringEquals": {f"aws:ResourceTag/{TAG_TENANT}": tenant.name}},
        )
    ]


def take_sessions() -> list[iam.PolicyStatement]:
    """The login node's agent."""
    return [
        iam.PolicyStatement(sid="SayAlive", actions=["ssm:UpdateInstanceInformation"], resources=["*"]),
        iam.PolicyStatement(sid="TakeSessions", actions=SESSIONS, resources=["*"]),
    ]


def open_shells(tenant: TenantScope) -> list[iam.PolicyStatement]:
    """The tenant's login node found, and a shell on it, by no other document than the account's own for shells: without
    the check of the document, IAM isn't asked about it."""
    if tenant.spec.cluster is None:
        return []
    return [
        iam.PolicyStatement(
            sid="OpenShell",
            actions=[OPEN_SHELL],
            resources=[_machines(tenant)],
            conditions={
                "StringEquals": _login_node(tenant),
                "BoolIfExists": {"ssm:SessionDocumentAccessCheck": "true"},
            },
        ),
        iam.PolicyStatement(sid="ShellDocument", actions=[OPEN_SHELL], resources=[_shell_document(tenant)]),
        iam.PolicyStatement(sid="FindLoginNode", actions=["ec2:DescribeInstances"], resources=["*"]),
        # As AWS's own example has it (Systems Manager user guide, quickstart end user policies).
        iam.PolicyStatement(
            sid="UseOwnSessions", actions=[USE_SESSION], resources=[tenant.arn("ssm", "session/${aws:userid}-*")]
        ),
    ]


def only_login_nodes(tenant: TenantScope) -> list[iam.PolicyStatement]:
    """For the boundary: no shell on anything but the tenant's login node, and by no other document, whatever else a
    person is allowed. A negated operator also matches an absent key: a machine without tags is nobody's."""
    if tenant.spec.cluster is None:
        return []
    # What is not the shell's document must be a machine with these tags: other documents, which forward ports, managed
    # machines outside EC2 and containers are closed by it too.
    return [
        iam.PolicyStatement(
            sid=f"Shell{name}",
            effect=iam.Effect.DENY,
            actions=[OPEN_SHELL],
            not_resources=[_shell_document(tenant)],
            conditions={"StringNotEquals": {key: value}},
        )
        for name, (key, value) in zip(("OwnMachine", "LoginNode"), _login_node(tenant).items(), strict=True)
    ]


def _shell_document(tenant: TenantScope) -> str:
    return tenant.arn("ssm", f"document/{SHELL_DOCUMENT}")


def _machines(tenant: TenantScope) -> str:
    return tenant.arn("ec2", "instance/*")


def _login_node(tenant: TenantScope) -> dict[str, str]:
    return {f"ssm:resourceTag/{TAG_TENANT}": tenant.name, f"ssm:resourceTag/{TAG_NODE}": "login"}
