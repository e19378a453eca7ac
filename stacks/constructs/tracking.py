"""A tenant's experiment tracking: SageMaker's managed MLflow, one server for each tenant that asks for one.

One each, because IAM tells servers apart and nothing on a server: who reads one run there reads all. A server and not
the serverless MLflow app: the app's id is made with it, so that no boundary could name it before, and a single action
opens its whole API, deleting included, where a server's are told apart.
"""

from aws_cdk import RemovalPolicy
from aws_cdk import aws_iam as iam
from aws_cdk import aws_sagemaker as sagemaker
from constructs import Construct

from stacks.constructs.statements import Statement, allow
from stacks.naming import TenantScope
from trainyard.spec.platform import TRACKING_FOLDER, TrackingSpec

BOUNDED_ACTIONS = ["sagemaker-mlflow:*e*", "sagemaker-mlflow:L*", "sagemaker:CreatePresignedM*"]
"""What the boundary lets through, on the own server: all that is below and more, in few characters, as a boundary holds
6,144. What each role may do of it, and that none deletes, is in the roles' own policies."""


def _mlflow(names: str) -> list[str]:
    return [f"sagemaker-mlflow:{name}" for name in names.split()]


SEE_RUNS = _mlflow(
    "GetExperiment GetExperimentByName GetMetricHistory GetRun ListArtifacts SearchExperiments SearchRuns"
)
LOG_RUNS = _mlflow("CreateExperiment CreateRun LogBatch LogInputs LogMetric LogParam SetExperimentTag SetTag UpdateRun")
OPEN_PAGE = [
    "sagemaker:CreatePresignedMlflowTrackingServerUrl",
    "sagemaker:DescribeMlflowTrackingServer",
]
"""MLflow's own page, by a link that is good for minutes."""

SEE_PAGE = "sagemaker-mlflow:AccessUI"
"""The only action of `sagemaker-mlflow` without a resource (service authorization reference): on an ARN it lets nobody
in. Whose page it is, is the link's to say."""

RUN_ACTIONS = ["sagemaker-mlflow:*l*", "sagemaker-mlflow:*r*", "sagemaker-mlflow:*t*"]
"""Every action of `sagemaker-mlflow` but that one: each has one of these letters, it has none. IAM takes no exception
beside a pattern."""

TRACKING_WILDCARDS = {
    "SeePage": "AccessUI has no resource; the page opens by a link, which is made for the own server alone.",
}


class TenantTracking(Construct):
    """The server. Its runs are a copy: what they say is in the jobs' records, so that it goes with its stack."""

    server: sagemaker.CfnMlflowTrackingServer

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        tenant: TenantScope,
        spec: TrackingSpec,
        bucket: str,
        role: iam.Role,
    ) -> None:
        super().__init__(scope, construct_id)
        self.server = sagemaker.CfnMlflowTrackingServer(
            self,
            "Server",
            tracking_server_name=tenant.environment.tracking_server(tenant.name),
            tracking_server_size=spec.size.capitalize(),
            artifact_store_uri=f"s3://{bucket}/{TRACKING_FOLDER}",
            role_arn=role.role_arn,
            # Models are registered by `trainyard promote`, after their gate.
            automatic_model_registration=False,
        )
        self.server.apply_removal_policy(RemovalPolicy.DESTROY)


def log_runs(tenant: TenantScope) -> list[Statement]:
    """For what trains: runs made and written, on the own server. Not where jobs are kept from each other: IAM knows no
    single run, so that one job could write over the next one's."""
    if tenant.spec.tracking is None or tenant.isolates_jobs:
        return []
    return [_on_server(tenant, "LogRuns", [*SEE_RUNS, *LOG_RUNS])]


def track_jobs(tenant: TenantScope) -> list[Statement]:
    """For people: `trainyard track`, and MLflow's page."""
    if tenant.spec.tracking is None:
        return []
    return [_on_server(tenant, "TrackJobs", [*SEE_RUNS, *LOG_RUNS, *OPEN_PAGE]), _see_page()]


def see_runs(tenant: TenantScope) -> list[Statement]:
    """For the auditor."""
    if tenant.spec.tracking is None:
        return []
    return [_on_server(tenant, "SeeRuns", [*SEE_RUNS, *OPEN_PAGE]), _see_page()]


def _see_page() -> Statement:
    return allow("SeePage", [SEE_PAGE], ["*"])


def _on_server(tenant: TenantScope, sid: str, actions: list[str]) -> Statement:
    return allow(sid, sorted(actions), [tenant.tracking_server])
