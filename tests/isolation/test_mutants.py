"""The proof sees: every statement broken in turn, every break caught or explained."""

import re
from collections import Counter
from pathlib import Path

import pytest

from trainyard.isolation import Site, Survey, survey
from trainyard.isolation.mutants import OWN_ONLY, REFUSES_MORE, mutants

pytestmark = pytest.mark.slow

SURVIVORS = Path(__file__).with_name("survivors.txt")


@pytest.fixture(scope="module")
def surveyed(site: Site) -> Survey:
    return survey(site.account)


def test_every_statement_has_mutants(site: Site, surveyed: Survey) -> None:
    broken = {verdict.mutant.origin for verdict in surveyed.verdicts}
    statements = {
        statement.origin
        for key, items in site.account.documents.items()
        if key[0].startswith(("trainyard-local-acme-", "trainyard-local-platform"))
        for statement in items
    }
    assert statements <= broken
    kinds = Counter(re.split(r":| for | to ", verdict.mutant.what)[0] for verdict in surveyed.verdicts)
    for kind in ("condition dropped", "resource widened", "action widened", "principal swapped", "boundary lifted"):
        assert kinds[kind] > 2, kinds
    assert kinds["removed"] > 10


def test_what_opens_is_caught_and_named(surveyed: Survey) -> None:
    opened = [verdict for verdict in surveyed.verdicts if verdict.opened]
    assert len(opened) > 100
    for verdict in opened:
        mutant = verdict.mutant
        widened = mutant.what.startswith(("resource widened", "action widened"))
        if widened and not mutant.origin.stack.endswith("NetworkVpc"):
            named = {name for finding in verdict.opened for name in finding.decided_by}
            assert str(mutant.origin) in named, f"{mutant}: {named}"


def test_no_wildcard_on_what_is_anothers_survives(surveyed: Survey) -> None:
    """A resource widened to * in what a role may do: only where IAM has no narrower resource, or nothing to hurt."""
    kept = {
        verdict.mutant.origin.sid
        for verdict in surveyed.survivors
        if verdict.mutant.what.startswith("resource widened")
        and verdict.mutant.origin.resource.startswith("Permissions")
    }
    # The platform has one repository; LeaveNetwork is held by its condition on the VPC; the boundary lets own job roles
    # be made and passed, and jobs and models of the own name be made, and no others. JoinCluster is held by the
    # cluster's tag.
    held = {"LeaveNetwork", "MakeJobRoles", "PassJobRole", "CreateJobs", "AskBroker", "RegisterModels", "JoinCluster"}
    assert kept == {"PullImage", "SeeImage", *held}


def test_no_swapped_principal_survives_but_where_the_boundary_holds(surveyed: Survey) -> None:
    kept = {
        verdict.mutant.origin.resource.rstrip("0123456789ABCDEF"): verdict.reason
        for verdict in surveyed.survivors
        if "principal" in verdict.mutant.what
    }
    # Globex's roles can't assume anything; the DynamoDB endpoint serves no table of ours yet. Of the audit log's bucket
    # a Deny is swapped, of what is plain HTTP: no tenant reads there at all.
    assert set(kept) == {"LogsFlowLogWriter", "NetworkVpcDynamoDb", "BudgetActorRole", "AuditLogPolicy"}
    for role in ("LogsFlowLogWriter", "BudgetActorRole"):
        assert kept[role] == "still refused by the permissions boundary"


def test_another_account_in_the_place_of_a_principal_is_found(surveyed: Survey) -> None:
    swapped = [item for item in surveyed.verdicts if item.mutant.what == "principal swapped for another account"]
    opened = {item.mutant.origin.document for item in swapped if item.opened}
    assert {"KeyPolicy", "AssumeRolePolicyDocument", "PolicyDocument"} == opened
    trusts = [item for item in swapped if item.mutant.origin.document == "AssumeRolePolicyDocument"]
    assert trusts and all(item.opened for item in trusts)


def test_every_survivor_is_listed_and_explained(surveyed: Survey) -> None:
    """The list is reviewed by hand: a new line in it is a break that the proof doesn't see."""
    lines = sorted({_line(str(verdict.mutant), verdict.reason) for verdict in surveyed.survivors})
    reasons = {verdict.reason for verdict in surveyed.survivors}
    assert all(reason in {OWN_ONLY, REFUSES_MORE} or reason.startswith("still refused by ") for reason in reasons)
    assert "\n".join(lines) + "\n" == SURVIVORS.read_text(), "review `trainyard isolation --mutants`, then the list"


def _line(mutant: str, reason: str) -> str:
    short = re.sub(r"[0-9A-F]{8}(?= )", "", mutant.removeprefix("trainyard-local-acme-"))
    return f"{re.sub(r'key/[0-9a-f-]{36}', 'key/...', short)} | {reason}"


def test_lifting_the_brokers_boundary_opens_guard_rails(surveyed: Survey) -> None:
    lifted = [item for item in surveyed.verdicts if item.mutant.what == "boundary lifted" and item.opened]
    stated = {
        item.mutant.origin.resource.rstrip("0123456789ABCDEF"): {finding.stated for finding in item.opened}
        for item in lifted
    }
    assert {"no sagemaker:vpcsubnets", "sagemaker:enableremotedebug = true"} <= stated.pop("RolesBroker")
    # Without it each could write to what was an own bucket once and is somebody else's by now.
    assert {"RolesJob", "EachJob", "RolesLauncher"} <= set(stated)
    assert {text for texts in stated.values() for text in texts} == {"a bucket of another account"}


def test_a_mutant_touches_one_document(site: Site) -> None:
    for mutant in mutants(site.account, "acme", "globex"):
        assert len(mutant.documents) + len(mutant.unbounded) == 1
