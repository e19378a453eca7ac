"""Is a tenant as it should be: access, keys, buckets, isolation; with a folder for an auditor."""

import argparse
from typing import Any

from trainyard.launch.aws import aws_errors, error_code
from trainyard.launch.place import TenantAccess
from trainyard.launch.session import Account
from trainyard.operate.doctor import examine
from trainyard.operate.runbooks.framework import Finding, Kind, call_words, command, keep
from trainyard.operate.runbooks.runbook import Context, Runbook

SUMMARY = "is a tenant as it should be: access, keys, buckets, isolation; evidence for an auditor"
KINDS: dict[str, Kind] = {"pass": "clear", "warn": "unknown", "fail": "fault"}
CLOSED = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")


def options(parser: argparse.ArgumentParser) -> None:
    """Its own."""
    parser.add_argument("--tenant", "-t", required=True, help="whom to look at")
    parser.add_argument("--skip-isolation", action="store_true", help="without the proof, which synthesizes the stacks")


def run(context: Context) -> None:
    """The doctor's checks of the tenant, its buckets as they are, and the proof of isolation."""
    given = context.options
    checks = list(examine(context.environment, given.tenant))
    keep(context.report.folder, "doctor.json", [one.__dict__ for one in checks])
    for one in checks:
        then = (one.mend,) if one.mend else ()
        context.report.findings.append(Finding(KINDS[one.level], f"{one.name}: {one.finding}", (), then))
    access = context.tenant(given.tenant)
    buckets = {name: bucket for name, bucket in access.contract.buckets.model_dump().items() if bucket}
    seen = {bucket: _bucket(access, bucket) for bucket in buckets.values()}
    keep(context.report.folder, "buckets.json", seen)
    keys = access.contract.keys.model_dump()
    for name, bucket in buckets.items():
        has_bucket_key = not (
            name == "checkpoints" and access.contract.job_keys
        )  # as stacks/constructs/storage.py has it
        context.report.findings.append(
            _judged(seen[bucket], bucket, keys[name], access.account, has_bucket_key=has_bucket_key)
        )
    if not given.skip_isolation:
        page = str(context.report.folder / "isolation.html")
        context.perform([command("isolation", str(context.environment_path), "--html", page, changes=False)])


def _bucket(access: TenantAccess, bucket: str) -> dict[str, Any]:
    """Public access, versions and encryption, as S3 has them now."""
    s3 = access.account.client("s3")
    asked = {
        "public": ("get_public_access_block", "PublicAccessBlockConfiguration", "NoSuchPublicAccessBlockConfiguration"),
        "versions": ("get_bucket_versioning", "Status", ""),
        "encryption": (
            "get_bucket_encryption",
            "ServerSideEncryptionConfiguration",
            "ServerSideEncryptionConfigurationNotFoundError",
        ),
    }
    found: dict[str, Any] = {}
    for name, (operation, key, absent) in asked.items():
        with aws_errors(f"s3:{operation}", bucket):
            try:
                found[name] = getattr(s3, operation)(Bucket=bucket).get(key)
            except s3.exceptions.ClientError as error:
                if error_code(error) != absent:
                    raise
                found[name] = None
    return found


def _judged(found: dict[str, Any], bucket: str, key: str, account: Account, *, has_bucket_key: bool) -> Finding:
    """`key`: ARN of what its objects are to be under; `has_bucket_key`: S3 asks KMS for it once an hour, and not for
    each object, as the stacks have it. What is wrong comes with the call that mends it: a deployment
    sends what differs from the templates before it, and not what somebody changed beside them."""
    problems, then = list[str](), list[str]()

    def mend(operation: str, **parameters: Any) -> None:
        then.append(call_words(account, "s3", operation, Bucket=bucket, **parameters))

    if wrong := [name for name in CLOSED if not (found["public"] or {}).get(name)]:
        problems.append(f"not set: {', '.join(wrong)}")
        mend("put_public_access_block", PublicAccessBlockConfiguration=dict.fromkeys(CLOSED, True))
    if found["versions"] != "Enabled":
        problems.append("keeps no versions")
        mend("put_bucket_versioning", VersioningConfiguration={"Status": "Enabled"})
    rules = (found["encryption"] or {}).get("Rules", [])
    by_default = [rule.get("ApplyServerSideEncryptionByDefault") or {} for rule in rules]
    # S3 takes a key's id for its ARN; without one it is the account's aws/s3, which everybody in the account may use.
    own = [one for one in by_default if one.get("KMSMasterKeyID") in (key, key.rpartition("/")[2])]
    if not own:
        under = ", ".join(str(one.get("KMSMasterKeyID") or one.get("SSEAlgorithm")) for one in by_default) or "none"
        problems.append(f"not encrypted by the tenant's key {key} by default, but by {under}")
        default = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key}
        rule = {"ApplyServerSideEncryptionByDefault": default, "BucketKeyEnabled": has_bucket_key}
        mend("put_bucket_encryption", ServerSideEncryptionConfiguration={"Rules": [rule]})
    if problems:
        return Finding("fault", f"bucket {bucket}: {'; '.join(problems)}", (), tuple(then))
    return Finding("clear", f"bucket {bucket}: closed to the public, versioned, encrypted by the tenant's key")


RUNBOOK = Runbook("audit_tenant", SUMMARY, run, options, changes=False, subject="tenant")
