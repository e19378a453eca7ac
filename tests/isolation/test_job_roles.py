"""A role for each job: it does all that its own job needs, and nothing to another job of the same tenant.

The role stands in the account as the broker makes it, under the tenant's boundary, keys and endpoints; two evaluators
that share no code decide, and must agree.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from trainyard.functions.job_roles import (
    MAX_POLICY_CHARACTERS,
    job_role_arn,
    job_role_policies,
    job_role_trust,
)
from trainyard.functions.training_request import spec_prefix
from trainyard.isolation import Site
from trainyard.isolation.account import EACH_JOB, Account
from trainyard.isolation.evaluator import Request, decide
from trainyard.isolation.needs import Need, Needs
from trainyard.isolation.policy import parse_statements
from trainyard.spec.platform import TenantContract

sys.path.insert(0, str(Path(__file__).parent))

from test_differential import second_opinion  # after the path is set

MINE, OTHER = "acme-llama-20260101000000-0a1b", "acme-llama-20260101000000-0a1c"
RESUMED = f"{MINE}-r2"
NOT_NARROWED = {"s3:ListBucketMultipartUploads"}
"""IAM has no condition key for its prefix: names of another job's torn uploads show, and nothing of what is in them."""


def inputs_of(contract: TenantContract) -> list[str]:
    return [f"s3://{contract.buckets.data}/train/", f"s3://{contract.buckets.artifacts}/models/acme-llama/x/"]


@pytest.fixture(scope="module")
def account(site: Site) -> Account:
    return site.account


def answer(request: Request) -> bool:
    """Whether it is allowed, by both."""
    own, other = decide(request).allowed, second_opinion(request) == "Allow"
    assert own == other, f"the evaluators differ on {request.action} on {request.resource}"
    return own


def bare(need: Need) -> Request:
    """Without the endpoint's policy, which the second evaluator doesn't model; the first is asked with it too."""
    assert decide(need.request).allowed, f"{need.what}: {decide(need.request).reason}"
    return replace(need.request, endpoint_policy=None)


def needs(account: Account, label: str = EACH_JOB) -> Iterator[Need]:
    found = Needs(account, "acme")
    assert found.job_id == MINE
    return found.of_a_job_as(label)


def test_it_may_do_all_that_its_job_needs(account: Account) -> None:
    asked = 0
    for need in needs(account):
        assert answer(bare(need)), f"{need.what}: {need.request.action} on {need.request.resource}"
        asked += 1
    assert asked > 40


def about_another(need: Need) -> Request | None:
    """The same for another job; None where nothing in the request names the job."""
    context = need.request.context
    stated = {
        key: value.replace(MINE, OTHER) if isinstance(value, str) else value for key, value in context.stated.items()
    }
    changed = replace(
        need.request, resource=need.request.resource.replace(MINE, OTHER), context=replace(context, stated=stated)
    )
    return None if (changed.resource, stated) == (need.request.resource, context.stated) else changed


def test_it_may_do_none_of_it_to_another_job(account: Account) -> None:
    closed = []
    for need, of_tenant in zip(needs(account), needs(account, "job"), strict=True):
        foreign, by_tenants_role = about_another(need), about_another(of_tenant)
        if foreign is None or by_tenants_role is None or foreign.action in NOT_NARROWED:
            continue
        assert not answer(replace(foreign, endpoint_policy=None)), f"{need.what}: {foreign.action} {foreign.resource}"
        assert decide(by_tenants_role).allowed, "the tenant's one role may: without that the test would prove nothing"
        closed.append(foreign.action)
    assert {"s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject", "logs:PutLogEvents"} <= set(closed)


@pytest.mark.parametrize(
    ("bucket", "key", "is_open"),
    [
        ("data", "train/part-1.jsonl", True),
        ("data", "training/part-1.jsonl", False),  # only begins like the folder
        ("data", "secret/part-1.jsonl", False),
        ("data", f"{spec_prefix(MINE)}resolved_job.json", True),
        ("data", f"{spec_prefix(MINE, '0123456789abcdef')}resolved_job.json", True),
        ("data", f"{spec_prefix(OTHER)}resolved_job.json", False),
        ("data", f"{spec_prefix(OTHER, '0123456789abcdef')}resolved_job.json", False),
        ("artifacts", "models/acme-llama/x/config.json", True),
        ("artifacts", "models/acme-llama/xy/config.json", False),
        ("checkpoints", f"jobs/{OTHER}/checkpoints/step-1/COMMITTED", False),
        ("checkpoints", f"jobs/{MINE}x/checkpoints/step-1/COMMITTED", False),
    ],
)
def test_which_objects_it_reads(account: Account, bucket: str, key: str, is_open: bool) -> None:
    contract = account.contracts["acme"]
    model = next(need for need in needs(account) if need.request.action == "s3:GetObject")
    resource = f"arn:aws:s3:::{getattr(contract.buckets, bucket)}/{key}"
    policy = next(thing for thing in account.things if thing.pattern == resource.partition("/")[0])
    request = replace(model.request, resource=resource, resource_policy=account.policy_of(policy), endpoint_policy=None)
    assert answer(request) == is_open


def test_a_resume_goes_on_under_the_same_role(account: Account) -> None:
    need = next(need for need in needs(account) if need.request.action == "logs:PutLogEvents")
    stream = need.request.resource.replace(MINE, RESUMED)
    assert answer(replace(need.request, resource=stream, endpoint_policy=None))


def test_the_role_is_one_that_may_be_passed_and_fits(site: Site) -> None:
    contract = site.account.contracts["acme"]
    content = contract.model_dump(mode="json")
    arn = job_role_arn(content, MINE)
    assert arn == f"arn:aws:iam::{contract.account}:role/trainyard/local/acme/jobs/each/{MINE}"
    shared = site.account.role("acme", "job").arn
    assert arn.startswith(shared.rpartition("/")[0]) and not shared.startswith(arn.rpartition("/")[0])
    trust = site.account.documents[site.account.role("acme", "job").trust]
    assert parse_statements(job_role_trust(content), *site.account.role("acme", "job").trust)[0].conditions == (
        trust[0].conditions
    )
    many = [f"s3://{contract.buckets.data}/datasets/corpus-{number}/train/" for number in range(20)]
    document = job_role_policies(content, MINE, [*many, *inputs_of(contract)])
    assert len(json.dumps(document).replace(" ", "")) < MAX_POLICY_CHARACTERS
    assert document == job_role_policies(content, MINE, [*many, *inputs_of(contract)])


@pytest.mark.parametrize(
    ("job", "location", "words"),
    [
        ("globex-x-20260101000000-0a1b", "", "is none of tenant acme"),
        ("acme-*", "", "is none of tenant acme"),
        (MINE, "s3://somebody-elses/train/", "in none of the tenant's buckets"),
        (MINE, "https://example.com/train", "in none of the tenant's buckets"),
        (MINE, "s3://{data}/", "no file or folder"),
        (MINE, "s3://{data}/*", "no file or folder"),
        (MINE, "s3://{data}/${{aws:username}}/", "no file or folder"),
    ],
)
def test_what_would_widen_it_is_refused(site: Site, job: str, location: str, words: str) -> None:
    contract = site.account.contracts["acme"]
    inputs = [location.format(data=contract.buckets.data)] if location else []
    with pytest.raises(ValueError, match=words):
        job_role_policies(contract.model_dump(mode="json"), job, inputs)


@pytest.mark.parametrize("by_job", [True, False])
def test_another_jobs_checkpoints_that_are_an_input_can_be_decrypted(site: Site, by_job: bool) -> None:
    """By their own names where keys are by job; else the tenant's key opens them, and all of its checkpoints."""
    contract = site.account.contracts["acme"]
    content = contract.model_dump(mode="json") | {"job_keys": by_job}
    step = f"{contract.buckets.checkpoints}/jobs/{OTHER}/checkpoints/step-9/"
    statements = job_role_policies(content, MINE, [f"s3://{step}"])["Statement"]
    opening = [
        item.get("Condition", {}).get("StringLike", {}).get("kms:EncryptionContext:aws:s3:arn")
        for item in statements
        if "kms:Decrypt" in item["Action"] and contract.keys.checkpoints in item["Resource"]
    ]
    own = f"arn:aws:s3:::{contract.buckets.checkpoints}/jobs/{MINE}/*"
    assert opening == ([[f"arn:aws:s3:::{step}*"], own] if by_job else [None])
