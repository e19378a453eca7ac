"""A tenant's MLflow server: none unless asked for, one each, nobody's but the tenant's, told to its jobs."""

import json
from dataclasses import replace
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.functions.training_request import training_job_request
from trainyard.hardware.base_prices import base_cost
from trainyard.isolation.catalogue import ACTIONS
from trainyard.isolation.evaluator import decide
from trainyard.isolation.mutants import OWN_ONLY
from trainyard.isolation.needs import Needs
from trainyard.isolation.policy import action_matches
from trainyard.isolation.proof import prove, resolve_templates
from trainyard.isolation.templates import Deployment
from trainyard.operate.stateful import losses
from trainyard.spec.base import parse
from trainyard.spec.platform import EnvironmentSpec, parse_contract

FOUNDATION, STACK = "trainyard-local-acme-foundation", "trainyard-local-acme-training"
SERVER = "arn:aws:sagemaker:us-east-1:123456789012:mlflow-tracking-server/trainyard-local-acme"


def only(made: dict[str, Any], kind: str, stack: str = FOUNDATION) -> dict[str, Any]:
    deployment = Deployment(made, "123456789012", "us-east-1")
    (found,) = (item for item in made[stack]["Resources"].values() if item["Type"] == f"AWS::{kind}")
    return dict(deployment.resolve(found["Properties"], stack))


def test_the_server_keeps_its_files_in_the_tenants_bucket_as_a_role_under_the_boundary(
    optional: dict[str, Any],
) -> None:
    server = only(optional, "SageMaker::MlflowTrackingServer")
    of_type = (
        name for name, item in optional[FOUNDATION]["Resources"].items() if item["Type"].endswith("TrackingServer")
    )
    assert list(of_type) == ["TrackingServerFA53660A"], "a new logical id is a new, empty server"
    deployment = Deployment(optional, "123456789012", "us-east-1")
    resources = optional[FOUNDATION]["Resources"]
    bucket = deployment.physical_id(FOUNDATION, next(name for name in resources if name.startswith("BucketsArtifacts")))
    role = next(name for name in resources if name.startswith("RolesTracking"))
    assert server["ArtifactStoreUri"] == f"s3://{bucket}/tracking"
    assert (server["TrackingServerName"], server["TrackingServerSize"]) == ("trainyard-local-acme", "Small")
    assert server["RoleArn"] == deployment.arn(FOUNDATION, role)
    assert "PermissionsBoundary" in resources[role]["Properties"]
    assert not server["AutomaticModelRegistration"], "models pass their gate first"


def test_isolation_holds_with_every_option_and_the_boundary_has_room(
    optional: dict[str, Any], optional_environment: EnvironmentSpec
) -> None:
    proof = prove(resolve_templates(optional, optional_environment))
    found = (proof.allowed_cross_tenant, proof.denied_own, proof.open_guard_rails, proof.unknown_keys)
    assert found == ((), (), (), ())
    boundary = only(optional, "IAM::ManagedPolicy")["PolicyDocument"]
    assert len(json.dumps(boundary, separators=(",", ":"))) < 6144 - 200, "IAM takes no more, and names may be longer"


def test_the_boundary_admits_the_own_server_alone_whatever_is_attached(
    optional: dict[str, Any], optional_environment: EnvironmentSpec, railed: Any
) -> None:
    assert railed(optional, optional_environment, {"OwnThings"}) > 30


def test_its_page_opens_on_no_resource_and_its_link_for_the_own_server_alone(
    optional: dict[str, Any], optional_environment: EnvironmentSpec
) -> None:
    """AccessUI has no resource: IAM asks with *, and a policy on the server's ARN would let nobody in."""
    account = resolve_templates(optional, optional_environment).account
    page, link = "sagemaker-mlflow:AccessUI", "sagemaker:CreatePresignedMlflowTrackingServerUrl"
    asked = {(need.principal, need.request.action): need.request for need in Needs(account, "acme").all()}
    for who in ("launcher", "auditor"):
        assert asked[who, page].resource == "*" and decide(asked[who, page]).allowed
        assert asked[who, link].resource == SERVER and decide(asked[who, link]).allowed
        for other in ("*", SERVER.replace("acme", "globex")):
            assert not decide(replace(asked[who, link], resource=other)).allowed
    assert not decide(replace(asked["job", "sagemaker-mlflow:LogBatch"], action=page, resource="*")).allowed


def test_the_boundarys_rule_on_runs_misses_no_action_but_the_pages() -> None:
    from stacks.constructs.tracking import RUN_ACTIONS, SEE_PAGE

    def denied(action: str) -> bool:
        return any(action_matches(pattern, action) for pattern in RUN_ACTIONS)

    runs = [action for action in ACTIONS["tracking server"] if action.startswith("sagemaker-mlflow:")]
    assert len(runs) == 60 and [action for action in runs if not denied(action)] == []
    assert not denied(SEE_PAGE)


def test_jobs_write_runs_and_delete_none_and_the_auditor_reads(
    optional: dict[str, Any], optional_environment: EnvironmentSpec
) -> None:
    account = resolve_templates(optional, optional_environment).account
    needs = {(need.principal, need.request.action): need.request for need in Needs(account, "acme").all()}
    log = needs["job", "sagemaker-mlflow:LogBatch"]
    assert decide(log).allowed and log.resource == SERVER
    read = needs["auditor", "sagemaker-mlflow:SearchRuns"]
    for request, action in (
        (log, "sagemaker-mlflow:DeleteRun"),
        (log, "sagemaker:CreatePresignedMlflowTrackingServerUrl"),
        (read, "sagemaker-mlflow:LogBatch"),
        (needs["launcher", "sagemaker-mlflow:LogBatch"], "sagemaker-mlflow:DeleteExperiment"),
    ):
        assert decide(request).allowed
        assert not decide(replace(request, action=action)).allowed, action


BOUNDARY, WIDENED = "still refused by the permissions boundary", "action widened to *"
SURVIVORS = {
    ("OwnThings", "removed"): "still refused by what the roles' own policies allow",
    ("LogRuns", "resource widened to *"): BOUNDARY,
    ("FindFiles", WIDENED): BOUNDARY,
    ("KeepFiles", WIDENED): BOUNDARY,
    ("EncryptFiles", WIDENED): BOUNDARY,
    # Of the tenant's own buckets the server may list one, and in it what is its own.
    ("FindFiles", "condition dropped: StringLike s3:prefix"): OWN_ONLY,
    # An endpoint allows nothing that the caller's policies don't.
    ("OwnServer", WIDENED): OWN_ONLY,
}
"""What a break of a statement for tracking doesn't open, and the guard that still refuses."""


def test_a_broken_statement_is_seen_or_explained(
    optional: dict[str, Any], optional_environment: EnvironmentSpec, survivors: Any
) -> None:
    people = {"TrackJobs", "SeeRuns", "SeePage", "OwnThings", "OwnServer"}
    sids = people | {"LogRuns", "FindFiles", "KeepFiles", "EncryptFiles"}
    assert survivors(optional, optional_environment, sids) == SURVIVORS


def test_the_contract_tells_jobs_where_and_others_contracts_are_as_before(
    optional: dict[str, Any], templates: dict[str, dict[str, Any]]
) -> None:
    contract = parse_contract(only(optional, "SSM::Parameter", STACK)["Value"], "contract")
    assert contract.version == 4
    assert contract.tracking is not None and contract.tracking.server == SERVER
    without = json.loads(only(templates["local"], "SSM::Parameter", STACK)["Value"])
    assert without["version"] == 3 and "tracking" not in without, "what an older trainyard can read"


def test_a_jobs_request_names_the_server_but_where_jobs_are_kept_from_each_other(optional: dict[str, Any]) -> None:
    contract = json.loads(only(optional, "SSM::Parameter", STACK)["Value"])
    spec = {"name": "x", "compute": {"instance_type": "ml.p5.4xlarge", "spot": False, "max_hours": 1}}

    def environment(**changes: Any) -> dict[str, str]:
        request = training_job_request(
            spec,
            {**contract, **changes},
            job_id="acme-x-1",
            training_job_name="acme-x-1",
            image="image",
            channels=[],
            num_hosts=1,
            volume_key=False,
        )
        return dict(request["Environment"])

    assert environment()["MLFLOW_TRACKING_URI"] == SERVER
    assert "MLFLOW_TRACKING_URI" not in environment(tracking=None)
    boundary = "arn:aws:iam::123456789012:policy/trainyard/local/acme/x"
    assert "MLFLOW_TRACKING_URI" not in environment(job_boundary=boundary)


def test_it_comes_and_goes_in_place_and_its_loss_is_asked_about(
    optional: dict[str, Any], templates: dict[str, dict[str, Any]]
) -> None:
    assert losses(templates["local"], optional) == []
    lost = {loss.kind for loss in losses(optional, templates["local"])}
    assert {"AWS::SageMaker::MlflowTrackingServer", "AWS::IAM::Role"} <= lost


def test_what_it_costs_a_month_is_priced_or_named(optional: dict[str, Any], templates: dict[str, Any]) -> None:
    cost = base_cost([optional[FOUNDATION]], "us-east-1")
    (line,) = (line for line in cost.lines if line.item == "mlflow-tracking-server-small")
    assert (line.quantity, line.unit) == (730, "hours")
    assert (line.usd_per_month is None) == ("mlflow-tracking-server-small" in cost.unknown)


def test_the_emulator_records_it_and_says_so() -> None:
    from trainyard.emulator.cloudformation.catalogue import describe_types

    assert describe_types()["AWS::SageMaker::MlflowTrackingServer"] == "recorded-only"


def test_what_cannot_work_is_refused_in_one_line(optional_environment: EnvironmentSpec) -> None:
    content = optional_environment.model_dump(mode="json")
    content["tenants"]["acme"]["tracking"] = {"size": "huge"}
    with pytest.raises(InputError) as error:
        parse(EnvironmentSpec, content, "environment.yaml")
    assert "tracking.size" in str(error.value) and "\n" not in str(error.value)
