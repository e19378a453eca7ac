"""EFS for small files of a cluster: none unless asked for, two locks, and a way to take it away again."""

import base64
import copy
from dataclasses import replace
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.hardware.base_prices import base_cost
from trainyard.isolation.crossings import Crossings
from trainyard.isolation.evaluator import decide
from trainyard.isolation.mutants import OWN_ONLY, REFUSES_MORE
from trainyard.isolation.needs import Needs
from trainyard.isolation.proof import resolve_templates
from trainyard.isolation.questions import GUARD_RAIL, Scope
from trainyard.isolation.templates import Deployment
from trainyard.operate.stateful import losses, refuse_dropped_exports
from trainyard.spec.base import parse
from trainyard.spec.platform import EnvironmentSpec

FOUNDATION, STACK = "trainyard-local-acme-foundation", "trainyard-local-acme-training"


@pytest.fixture(scope="module")
def unmounted(synthesize: Any, optional_environment: EnvironmentSpec) -> dict[str, Any]:
    """The step before it is taken away."""
    content = optional_environment.model_dump(mode="json")
    content["tenants"]["acme"]["cluster"]["small_files"]["mounted"] = False
    return dict(synthesize(EnvironmentSpec.model_validate(content)))


def of(made: dict[str, Any], kind: str, stack: str = FOUNDATION) -> dict[str, dict[str, Any]]:
    deployment = Deployment(made, "123456789012", "us-east-1")
    return {
        name: deployment.resolve(item.get("Properties", {}), stack)
        for name, item in made[stack]["Resources"].items()
        if item["Type"] == f"AWS::{kind}"
    }


def test_it_is_encrypted_reached_by_the_machines_alone_and_its_name_is_pinned(optional: dict[str, Any]) -> None:
    ((name, files),) = of(optional, "EFS::FileSystem").items()
    assert name == "SmallFiles12AED42B", "a new logical id is a new, empty file system"
    deployment = Deployment(optional, "123456789012", "us-east-1")
    data = next(name for name in optional[FOUNDATION]["Resources"] if name.startswith("KeysData"))
    assert (files["Encrypted"], files["KmsKeyId"]) == (True, deployment.arn(FOUNDATION, data))
    assert files["LifecyclePolicies"][0] == {"TransitionToIA": "AFTER_30_DAYS"}
    (target,) = of(optional, "EFS::MountTarget").values()
    (group,) = target["SecurityGroups"]
    (rule,) = (item for item in of(optional, "EC2::SecurityGroupIngress").values() if item["GroupId"] == group)
    assert (rule["FromPort"], rule["ToPort"], rule["IpProtocol"]) == (2049, 2049, "tcp")
    groups = of(optional, "EC2::SecurityGroup")
    (clients,) = (name for name in groups if name.startswith("NetworkTrainingGroup"))
    assert rule["SourceSecurityGroupId"] == deployment.physical_id(FOUNDATION, clients)


def test_no_copy_of_it_is_made_under_another_key_where_data_is_retained_too(
    synthesize: Any, optional_environment: EnvironmentSpec
) -> None:
    """AWS Backup's are under its vault's key, which stays when the tenant's keys are shredded."""
    content = optional_environment.model_dump(mode="json") | {"retain_data": True}
    kept = synthesize(EnvironmentSpec.model_validate(content))
    (files,) = (item for item in kept[FOUNDATION]["Resources"].values() if item["Type"] == "AWS::EFS::FileSystem")
    assert files["DeletionPolicy"] == "RetainExceptOnCreate"
    assert files["Properties"]["BackupPolicy"] == {"Status": "DISABLED"}
    assert "AWS::Backup" not in str(kept[FOUNDATION])


def test_machines_mount_it_over_tls_with_their_role(optional: dict[str, Any], unmounted: dict[str, Any]) -> None:
    for made, mounted in ((optional, True), (unmounted, False)):
        templates = of(made, "EC2::LaunchTemplate", STACK).values()
        assert len(templates) == 2, "where jobs run, and the login node"
        for template in templates:
            text = base64.b64decode(template["LaunchTemplateData"]["UserData"]).decode()
            assert (" /efs efs _netdev,tls,iam,accesspoint=fsap-" in text) is mounted
            assert ("install -d -m 000 /efs" in text) is mounted
            assert text.endswith("\n--==TRAINYARD==--\n")


def entered(made: dict[str, Any], environment: EnvironmentSpec) -> set[tuple[str, str]]:
    """(who, whose) of every way onto EFS that crosses a tenant's border."""
    asked = Crossings(resolve_templates(made, environment).account, Scope(actions=frozenset({"elasticfilesystem:*"})))
    questions = [item for item in asked.all() if item.target != GUARD_RAIL]
    assert len(questions) > 500
    return {(item.principal, item.target) for item in questions if decide(item.request).allowed}


def test_its_own_policy_keeps_others_out_whatever_they_are_allowed(
    optional: dict[str, Any], optional_environment: EnvironmentSpec
) -> None:
    changed = copy.deepcopy(optional)
    for item in changed["trainyard-local-globex-foundation"]["Resources"].values():
        if item["Type"] in {"AWS::IAM::ManagedPolicy", "AWS::IAM::Policy"}:
            opened = {"Effect": "Allow", "Action": "elasticfilesystem:Client*", "Resource": "*"}
            item["Properties"]["PolicyDocument"]["Statement"].append(opened)
    assert entered(changed, optional_environment) == set()
    (files,) = (item for item in changed[FOUNDATION]["Resources"].values() if item["Type"] == "AWS::EFS::FileSystem")
    policy = files["Properties"]["FileSystemPolicy"]
    policy["Statement"] = [item for item in policy["Statement"] if item["Sid"] != "NobodyElse"]
    found = entered(changed, optional_environment)
    assert ("launcher", "acme") in found and {whose for _, whose in found} == {"acme"}


def test_without_tls_as_root_or_past_the_folder_nobody_gets_in(
    optional: dict[str, Any], optional_environment: EnvironmentSpec
) -> None:
    account = resolve_templates(optional, optional_environment).account
    proper = [need for need in Needs(account, "acme").all() if need.what == "use the small files"]
    assert {need.principal for need in proper} == {"RolesNodes", "RolesLogin"}
    for need in proper:
        request, said = need.request, need.request.context
        assert decide(request).allowed
        for key, value in (
            ("aws:securetransport", "false"),
            ("elasticfilesystem:accessedviamounttarget", "false"),
            ("elasticfilesystem:accesspointarn", "arn:aws:elasticfilesystem:us-east-1:123456789012:access-point/x"),
        ):
            changed = type(said)({**said.stated, key: value}, absent=said.absent)
            assert not decide(replace(request, context=changed)).allowed, key
        assert not decide(replace(request, action="elasticfilesystem:ClientRootAccess")).allowed


BOUNDARY, WIDENED = "still refused by the permissions boundary", "action widened to *"
OTHERS = "still refused by what the roles' own policies allow"
ROOT = f"{BOUNDARY} and what the roles' own policies allow"
SURVIVORS = {
    # globex's roles name no EFS, and their boundary none of acme's keys in use.
    ("NobodyElse", "removed"): OTHERS,
    ("NobodyElse", "principal swapped for globex's roles"): OTHERS,
    ("NobodyElse", "principal swapped for another account"): OTHERS,
    ("NobodyElse", WIDENED): REFUSES_MORE,
    ("OverTls", WIDENED): REFUSES_MORE,
    ("InsideTheNetwork", WIDENED): REFUSES_MORE,
    # Nobody's policy and no boundary holds ClientRootAccess.
    ("NobodyIsRoot", "removed"): "still refused by the resources' own policies",
    ("NobodyIsRoot", "principal swapped for globex's roles"): ROOT,
    ("NobodyIsRoot", "principal swapped for another account"): ROOT,
    # The folder, which its condition names, is of one file system.
    ("UseSmallFiles", "resource widened to *"): OWN_ONLY,
    ("UseSmallFiles", WIDENED): BOUNDARY,
    # Who uses the key through EFS is the account's root principal: of this account anyway.
    ("SmallFilesService", "condition dropped: StringEquals kms:CallerAccount"): OWN_ONLY,
    ("SmallFilesService", WIDENED): OTHERS,
    # The other account's key users state their own account, which the condition refuses.
    ("SmallFilesService", "principal swapped for another account"): "still refused by the resources' own policies",
}
"""What a break of a statement for small files doesn't open, and the guard that still refuses."""


def test_a_broken_statement_is_seen_or_explained(
    optional: dict[str, Any], optional_environment: EnvironmentSpec, survivors: Any
) -> None:
    sids = {"NobodyElse", "OverTls", "InsideTheNetwork", "NobodyIsRoot", "UseSmallFiles", "SmallFilesService"}
    assert survivors(optional, optional_environment, sids) == SURVIVORS


def imports(value: Any) -> set[str]:
    if isinstance(value, dict):
        here = {value["Fn::ImportValue"]} if "Fn::ImportValue" in value else set()
        return here.union(*map(imports, value.values()))
    return set().union(*map(imports, value)) if isinstance(value, list) else set()


def test_it_comes_and_goes_in_place_in_two_steps_and_its_loss_is_asked_about(
    templates: dict[str, dict[str, Any]], optional: dict[str, Any], unmounted: dict[str, Any]
) -> None:
    """The foundation is deployed first: what it drops while the deployed training stack imports it, is refused."""
    without = templates["local"]
    for old, new in ((without, optional), (optional, unmounted), (unmounted, without)):
        exports = {out["Export"]["Name"] for item in new.values() for out in item.get("Outputs", {}).values()}
        assert imports(old[STACK]) <= exports
    assert {name for name in optional if optional[name] != unmounted[name]} == {STACK}, (
        "nor does another tenant's change"
    )
    acme = {name: unmounted[name] for name in (FOUNDATION, STACK)}  # as if it alone were deployed
    with pytest.raises(InputError, match="mounted: false"):
        refuse_dropped_exports(optional, without)
    refuse_dropped_exports(optional, unmounted)
    refuse_dropped_exports(acme, without)
    assert losses(without, optional) == losses(optional, unmounted) == []
    assert "AWS::EFS::FileSystem" in {loss.kind for loss in losses(unmounted, without)}


def test_it_costs_by_use_and_the_emulator_only_records_it(optional: dict[str, Any]) -> None:
    from trainyard.emulator.cloudformation.catalogue import describe_types

    assert "AWS::EFS::FileSystem" in base_cost([optional[FOUNDATION]], "us-east-1").by_use
    known = describe_types()
    assert {name: known[name] for name in known if "::EFS::" in name} == {
        f"AWS::EFS::{name}": "recorded-only" for name in ("AccessPoint", "FileSystem", "MountTarget")
    }


def test_what_cannot_work_is_refused_in_one_line(optional_environment: EnvironmentSpec) -> None:
    content = optional_environment.model_dump(mode="json")
    content["tenants"]["acme"]["cluster"]["small_files"] = {"archive_after_days": 31}
    with pytest.raises(InputError) as error:
        parse(EnvironmentSpec, content, "environment.yaml")
    assert "small_files.archive_after_days" in str(error.value) and "\n" not in str(error.value)
