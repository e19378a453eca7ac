"""Tenants whose jobs wait in shared queues: the same proof, and what alone holds there."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard.functions.job_roles import job_role_policies
from trainyard.isolation import Site, prove, resolve_templates
from trainyard.isolation.account import EACH_JOB, example_job
from trainyard.isolation.conditions import Context
from trainyard.isolation.evaluator import Request, decide
from trainyard.isolation.mutants import Trial, mutants
from trainyard.isolation.policy import parse_statements
from trainyard.isolation.rails import rail_cases
from trainyard.isolation.templates import synthesize
from trainyard.spec.platform import load_environment

sys.path.insert(0, str(Path(__file__).parent))

from test_differential import second_opinion  # after the path is set

ROOT = Path(__file__).parents[2]
LOCAL = ROOT / "environments" / "local.yaml"


@pytest.fixture(scope="module")
def queued(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Acme and globex share the queues, and borrow from each other."""
    content = yaml.safe_load(LOCAL.read_text())
    content["submission"] = "queue"
    del content["tenants"]["acme"]["submission"]
    content["tenants"]["acme"]["job_isolation"] = "key"
    content["tenants"]["acme"]["share"] = {"guaranteed": {"ml.p5.4xlarge": 2}}
    path: Path = tmp_path_factory.mktemp("queue") / "local.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return resolve_templates(synthesize(path, ROOT), load_environment(path))


def test_it_holds(queued: Site) -> None:
    proof = prove(queued)
    assert proof.allowed_cross_tenant == ()
    assert proof.open_guard_rails == ()
    assert proof.denied_own == ()
    assert proof.unknown_keys == ()
    assert proof.foreign_wires == ()
    (listing,) = [line for line in proof.unscopable if line.startswith("batch:ListServiceJobs ")]
    assert {"broker", "launcher", "operator"} <= set(listing.partition("(")[2].rstrip(")").split(", "))
    assert not [line for line in proof.unscopable if line.startswith("batch:DescribeServiceJob")]


def test_every_rail_of_a_queue_lets_through_and_alone_refuses(queued: Site) -> None:
    """The other two evaluators are asked by `test_guard_rails`, in full."""
    cases = list(rail_cases(queued.account, "acme", "globex"))
    rails = {case.rail for case in cases}
    assert {"OwnShare", "QueuedOwnTag", "OwnQueuedJobs", "Never", "BrokerSubmits"} <= rails
    for rail in rails:
        assert {case.allowed for case in cases if case.rail == rail} == {True, False}, rail
    for case in cases:
        decision = decide(case.request(queued.account))
        assert decision.allowed == case.allowed, f"{case}: {decision.reason}"
        if not case.allowed:
            assert case.rail in decision.reason, f"{case}: {decision.reason}"


def test_a_jobs_role_opens_no_other_jobs_objects_even_where_s3_would_give_them(queued: Site) -> None:
    """KMS alone: by the encryption context, which with bucket keys would be the bucket and tell no jobs apart."""
    contract = queued.account.contracts["acme"]
    content = contract.model_dump(mode="json")
    own, other = example_job("acme"), f"{example_job('acme')[:-1]}c"

    def may(job_id: str, policy: dict[str, Any]) -> bool:
        role = queued.account.role("acme", EACH_JOB)
        account = queued.account.changed({role.identity[0]: parse_statements(policy, *role.identity[0])})
        key = next(thing for thing in account.things if thing.pattern == contract.keys.checkpoints)
        stated = {
            "aws:principalarn": role.arn,
            "aws:principalaccount": contract.account,
            "kms:encryptioncontext:aws:s3:arn": f"arn:aws:s3:::{contract.buckets.checkpoints}/jobs/{job_id}/x",
        }
        request = Request(account.caller(role), "kms:Decrypt", key.pattern, Context(stated), account.policy_of(key))
        answer = decide(request).allowed
        assert answer == (second_opinion(request) == "Allow")
        return answer

    bound = job_role_policies(content, own, [])
    assert (may(own, bound), may(other, bound)) == (True, False)
    unbound = job_role_policies({**content, "job_keys": False}, own, [])
    assert may(other, unbound), "without that the test would prove nothing"


QUEUE_SIDS = {
    *("SubmitJobs", "TagJobs", "StopQueuedJobs"),
    *("OwnShare", "QueuedOwnTag", "OwnQueuedJobs", "Never", "BrokerSubmits"),
}

BOUNDARY = "still refused by the permissions boundary"
BOTH = "still refused by a condition of the Allow and another explicit Deny"
SURVIVORS = {
    ("OwnShare", "removed"): "still refused by what the roles' own policies allow",
    ("QueuedOwnTag", "removed"): "still refused by a condition of the Allow",
    ("OwnQueuedJobs", "removed"): "still refused by a condition of the Allow",
    ("Never", "removed"): "still refused by what the roles' own policies allow",
    ("BrokerSubmits", "removed"): "still refused by what the roles' own policies allow",
    ("StopQueuedJobs", "condition dropped"): BOUNDARY,
    ("StopQueuedJobs", "resource widened to *"): BOTH,
    ("StopQueuedJobs", "action widened to *"): BOTH,
    ("SubmitJobs", "condition dropped"): BOUNDARY,
    ("SubmitJobs", "resource widened to *"): BOUNDARY,
    ("TagJobs", "action widened to *"): BOUNDARY,
}
"""What a break of a queue's statements doesn't open, and the guard that still refuses."""


@pytest.mark.full
def test_a_broken_statement_of_a_queue_is_seen_or_explained(queued: Site) -> None:
    """Each in turn. In the short suite the same is asked of a tenant that a broker alone serves."""
    trial = Trial(queued.account, "acme")
    broken = [item for item in mutants(queued.account, "acme", "globex") if item.origin.sid in QUEUE_SIDS]
    assert {item.origin.sid for item in broken} == QUEUE_SIDS
    verdicts = [trial.judge(item) for item in broken]
    kept = {
        (item.mutant.origin.sid, item.mutant.what.partition(":")[0]): item.reason
        for item in verdicts
        if not item.caught
    }
    assert kept == SURVIVORS
    opened = {(item.mutant.origin.sid, item.mutant.what.partition(":")[0]) for item in verdicts if item.opened}
    assert {("TagJobs", "condition dropped"), ("TagJobs", "resource widened to *")} <= opened
