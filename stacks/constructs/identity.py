"""Who acts for a tenant, people and services. What they may do is in `permissions`."""

from aws_cdk import Duration
from aws_cdk import aws_iam as iam
from constructs import Construct

from stacks.constructs.guard_rails import TenantBoundary
from stacks.naming import TenantScope

MFA_SECONDS = 3600
"""How long ago the operator's second factor may have been shown."""


class TenantRoles(Construct):
    """The principals that the tenant's key policies name, all under the tenant's path and boundary."""

    job: iam.Role
    """What a running training job is; only SageMaker, acting for this account, can take it."""
    launcher: iam.Role
    """What people and CI of this account assume to launch, watch and stop jobs."""
    auditor: iam.Role
    """Read-only."""
    guard: iam.Role
    """The function that re-checks jobs that have started; nobody but Lambda can take it."""
    broker: iam.Role
    """The function that submits the tenant's jobs. Without a right where the launcher submits them itself, and not
    absent: CloudFormation drops no export that another stack still imports, so that it could never go."""
    resumer: iam.Role
    """The function that has the broker submit failed jobs again. Without a right where there is no broker."""
    nodes: iam.Role | None = None
    """What the cluster's machines are, and with them the jobs that run there."""
    login: iam.Role | None = None
    """What the cluster's login node is: it can join the cluster and take a session, and nothing else."""
    tracking: iam.Role | None = None
    """What the tenant's MLflow server is; only SageMaker, acting for this account, can take it."""
    operator: iam.Role
    """Breaks the glass: mends data and checkpoints by hand. Needs a second factor; the tenant hears of each use."""
    boundary: iam.ManagedPolicy
    """What they all stand under, and what the roles of single jobs are made under."""

    @property
    def workers(self) -> tuple[iam.Role, ...]:
        """What training runs as: the job role, and the cluster's machines where there is one."""
        return (self.job, *([self.nodes] if self.nodes else []))

    @property
    def submitter(self) -> iam.Role:
        """Who hands jobs to SageMaker: the broker, or the launcher where there is none."""
        return self.broker if self._brokered else self.launcher

    def __init__(self, scope: Construct, construct_id: str, *, tenant: TenantScope, boundary: TenantBoundary) -> None:
        super().__init__(scope, construct_id)
        account = tenant.environment.account
        self._brokered = tenant.brokered
        self.boundary = boundary.policy

        def role(
            name: str, trusts: iam.IPrincipal, description: str, hours: int, path: str = "", stated: str | None = None
        ) -> iam.Role:
            return iam.Role(
                self,
                name,
                role_name=stated,
                path=path or tenant.iam_path,
                assumed_by=trusts,
                permissions_boundary=boundary.policy,
                description=f"{description} of tenant {tenant.name}",
                max_session_duration=Duration.hours(hours),
            )

        sagemaker = iam.ServicePrincipal(
            "sagemaker.amazonaws.com", conditions={"StringEquals": {"aws:SourceAccount": account}}
        )
        self.job = role("Job", sagemaker, "Training jobs", hours=1, path=tenant.job_iam_path)
        # The account as principal: who in it may assume the role is for the account's own IAM to say (identity centre,
        # CI). A tenant's roles can't: their boundary holds no sts:AssumeRole.
        people = iam.AccountPrincipal(account)
        self.launcher = role("Launcher", people, "Launches, watches and stops jobs", hours=12)
        self.auditor = role("Auditor", people, "Reads and changes nothing", hours=4)
        # No source account: a function takes only roles of its own account.
        functions, path = iam.ServicePrincipal("lambda.amazonaws.com"), f"{tenant.iam_path}service/"
        self.guard = role("Guard", functions, "Re-checks the training jobs", hours=1, path=path)
        self.resumer = role("Resumer", functions, "Resumes failed training jobs", hours=1, path=path)
        if tenant.spec.tracking is not None:
            self.tracking = role("Tracking", sagemaker, "Keeps experiments", hours=1, path=path)
        self.broker = role("Broker", functions, "Submits the training jobs", hours=1, path=tenant.broker_iam_path)
        # An absent key matches neither: sessions without a second factor, and those of identity providers, which don't
        # tell AWS of theirs, are not let in.
        present = people.with_conditions(
            {
                "Bool": {"aws:MultiFactorAuthPresent": "true"},
                "NumericLessThan": {"aws:MultiFactorAuthAge": str(MFA_SECONDS)},
            }
        )
        self.operator = role("Operator", present, "Breaks the glass", hours=1)
        if tenant.spec.cluster is not None:
            machine = sagemaker if tenant.hyperpod else iam.ServicePrincipal("ec2.amazonaws.com")
            stated = {kind: tenant.machine_name(kind) for kind in ("nodes", "login")}
            self.nodes = role("Nodes", machine, "Machines of the cluster", hours=1, stated=stated["nodes"])
            self.login = role("Login", machine, "Login node of the cluster", hours=1, stated=stated["login"])
            profiles = {} if tenant.hyperpod else {"nodes": self.nodes, "login": self.login}
            for name, held in profiles.items():
                iam.CfnInstanceProfile(
                    self,
                    f"Profile-{name}",
                    instance_profile_name=stated[name],
                    path=tenant.iam_path,
                    roles=[held.role_name],
                )
