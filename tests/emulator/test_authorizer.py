"""Requests as boto3 sends them, judged by the policies that are deployed at that moment."""

import json
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from emulator_testing import ACCOUNT, TRUST_ROOT, TRUST_SAGEMAKER, Caller, Site, allow, deny, policy, refusal

from trainyard.emulator.authorization.actions import Check
from trainyard.emulator.authorization.decide import Judge
from trainyard.emulator.authorization.principals import Principal, Principals

Tenants = tuple[Caller, Caller]


def put(caller: Caller, bucket: str, key: str = "checkpoint", **more: Any) -> str:
    return refusal(lambda: caller.s3.put_object(Bucket=bucket, Key=key, Body=b"data", **more))


def get(caller: Caller, bucket: str, key: str = "checkpoint", **more: Any) -> str:
    return refusal(lambda: caller.s3.get_object(Bucket=bucket, Key=key, **more))


def test_own_bucket_is_open_and_the_other_tenants_closed(tenants: Tenants) -> None:
    acme, globex = tenants
    assert put(acme, acme.bucket) == ""
    assert get(acme, acme.bucket) == ""
    assert refusal(lambda: acme.s3.head_object(Bucket=acme.bucket, Key="checkpoint")) == ""
    assert refusal(lambda: acme.s3.list_objects_v2(Bucket=acme.bucket)) == ""
    denied = get(globex, acme.bucket)
    assert denied.startswith("AccessDenied: User: arn:aws:sts::123456789012:assumed-role/")
    assert f"is not authorized to perform: s3:GetObject on resource: arn:aws:s3:::{acme.bucket}/checkpoint" in denied
    assert denied.endswith("because no identity-based policy allows the s3:GetObject action")
    assert "s3:ListBucket" in refusal(lambda: globex.s3.list_objects_v2(Bucket=acme.bucket))
    assert "s3:PutObject" in put(globex, acme.bucket)
    assert "403" in refusal(lambda: globex.s3.head_object(Bucket=acme.bucket, Key="checkpoint"))


def test_s3_alone_does_not_open_an_encrypted_object(site: Site, tenants: Tenants) -> None:
    """The flip: S3 granted, still denied by the key; key and role both, allowed; taken back, denied again."""
    acme, globex = tenants
    put(acme, acme.bucket)
    globex.grant("s3", allow("s3:GetObject", f"arn:aws:s3:::{acme.bucket}/*"))
    assert f"kms:Decrypt on resource: {acme.key_arn}" in get(globex, acme.bucket)
    globex.grant("kms", allow("kms:Decrypt", acme.key_arn))
    assert get(globex, acme.bucket).endswith("because no resource-based policy allows the kms:Decrypt action")

    before = site("kms").get_key_policy(KeyId=acme.key_arn, PolicyName="default")["Policy"]
    trusting = json.loads(before)
    trusting["Statement"].append(allow("kms:Decrypt", Principal={"AWS": globex.role_arn}))
    site("kms").put_key_policy(KeyId=acme.key_arn, PolicyName="default", Policy=json.dumps(trusting))
    assert get(globex, acme.bucket) == ""
    assert "s3:PutObject" in put(globex, acme.bucket)
    site("kms").put_key_policy(KeyId=acme.key_arn, PolicyName="default", Policy=before)
    assert "kms:Decrypt" in get(globex, acme.bucket)


def test_writing_needs_a_data_key_of_the_buckets_default_or_the_asked_one(tenants: Tenants) -> None:
    acme, globex = tenants
    globex.grant("s3", allow("s3:*", [f"arn:aws:s3:::{acme.bucket}", f"arn:aws:s3:::{acme.bucket}/*"]))
    assert f"kms:GenerateDataKey on resource: {acme.key_arn}" in put(globex, acme.bucket)
    asked = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": acme.key_arn}
    assert "kms:GenerateDataKey" in put(globex, globex.bucket, **asked)
    assert put(globex, globex.bucket) == ""
    multipart = refusal(lambda: globex.s3.create_multipart_upload(Bucket=acme.bucket, Key="big"))
    assert "kms:GenerateDataKey" in multipart


def test_a_key_out_of_service_serves_nobody(site: Site, tenants: Tenants) -> None:
    """Not the root either: it reads nothing of a tenant whose keys await their deletion."""
    acme, _ = tenants
    kms = site("kms")
    put(acme, acme.bucket)
    blob = kms.encrypt(KeyId=own_key(site), Plaintext=b"secret")["CiphertextBlob"]
    arn, key_id = acme.key_arn, acme.key_arn.rpartition("/")[2]

    def told() -> set[str]:
        source = {"Bucket": acme.bucket, "Key": "checkpoint"}
        calls = [
            get(acme, acme.bucket),
            put(acme, acme.bucket),
            refusal(lambda: site("s3").get_object(**source)),
            refusal(lambda: site("s3").put_object(**source)),
            refusal(lambda: site("s3").copy_object(Bucket=acme.bucket, Key="copy", CopySource=source)),
            refusal(lambda: site("s3").create_multipart_upload(Bucket=acme.bucket, Key="big")),
        ]
        return set(calls)

    assert told() == {""}
    kms.disable_key(KeyId=key_id)
    assert told() == {f"KMS.DisabledException: {arn} is disabled."}
    assert "400" in refusal(lambda: acme.s3.head_object(Bucket=acme.bucket, Key="checkpoint"))
    assert refusal(lambda: kms.encrypt(KeyId=arn, Plaintext=b"x")) == f"DisabledException: {arn} is disabled."
    kms.enable_key(KeyId=key_id)
    assert told() == {""}
    kms.schedule_key_deletion(KeyId=key_id, PendingWindowInDays=7)
    assert told() == {f"KMS.KMSInvalidStateException: {arn} is pending deletion."}
    for change in (kms.enable_key, kms.schedule_key_deletion):
        assert "KMSInvalidStateException" in refusal(lambda change=change: change(KeyId=key_id))  # type: ignore[misc]
    assert refusal(lambda: site("s3").delete_object(Bucket=acme.bucket, Key="checkpoint")) == ""
    kms.cancel_key_deletion(KeyId=key_id)
    assert told() == {f"KMS.DisabledException: {arn} is disabled.", "NoSuchKey: The specified key does not exist."}
    assert "is not pending deletion" in refusal(lambda: kms.cancel_key_deletion(KeyId=key_id))
    assert kms.decrypt(CiphertextBlob=blob)["Plaintext"] == b"secret"


def test_nothing_is_written_under_a_key_that_is_not_there(site: Site, tenants: Tenants) -> None:
    acme, _ = tenants
    missing = acme.key_arn[:-12] + "0" * 12
    asked = {"Bucket": acme.bucket, "Key": "x", "ServerSideEncryption": "aws:kms", "SSEKMSKeyId": missing}
    told = refusal(lambda: site("s3").put_object(**asked))
    assert told == f"KMS.NotFoundException: Key '{missing}' does not exist"
    default = {"Bucket": acme.bucket, "Key": "x", "ServerSideEncryption": "aws:kms"}
    assert refusal(lambda: site("s3").put_object(**default)) == ""  # aws/s3, which every account has


def own_key(site: Site) -> str:
    """A key that only the root uses."""
    return str(site("kms").create_key()["KeyMetadata"]["Arn"])


def test_copying_needs_both_ends(tenants: Tenants) -> None:
    acme, globex = tenants
    put(acme, acme.bucket)
    stolen = refusal(
        lambda: globex.s3.copy_object(Bucket=globex.bucket, Key="x", CopySource=f"{acme.bucket}/checkpoint")
    )
    assert f"s3:GetObject on resource: arn:aws:s3:::{acme.bucket}/checkpoint" in stolen
    own = {"Bucket": acme.bucket, "Key": "copy", "CopySource": f"{acme.bucket}/checkpoint"}
    assert refusal(lambda: acme.s3.copy_object(**own)) == ""


def test_a_large_refused_upload_ends_with_the_refusal(tenants: Tenants) -> None:
    acme, globex = tenants
    body = b"x" * (24 * 1024 * 1024)
    refused = refusal(lambda: globex.s3.put_object(Bucket=acme.bucket, Key="big", Body=body))
    assert refused.startswith("AccessDenied")


def test_deleting_many_is_judged_object_by_object(tenants: Tenants) -> None:
    acme, _ = tenants
    put(acme, acme.bucket, "jobs/a")
    put(acme, acme.bucket, "keep/b")
    acme.grant("no", deny("s3:DeleteObject", f"arn:aws:s3:::{acme.bucket}/keep/*"))

    def delete(*keys: str) -> str:
        objects = {"Objects": [{"Key": key} for key in keys]}
        return refusal(lambda: acme.s3.delete_objects(Bucket=acme.bucket, Delete=objects))

    assert delete("jobs/a", "keep/b").endswith("with an explicit deny in an identity-based policy")
    assert delete("jobs/a") == ""
    assert get(acme, acme.bucket, "keep/b") == ""


def test_conditions_count(site: Site, tenants: Tenants) -> None:
    acme, _ = tenants
    only_jobs = {"StringLike": {"s3:prefix": "jobs/*"}}
    acme.grant("own", allow("s3:ListBucket", f"arn:aws:s3:::{acme.bucket}", Condition=only_jobs))
    assert refusal(lambda: acme.s3.list_objects_v2(Bucket=acme.bucket, Prefix="jobs/1")) == ""
    assert "s3:ListBucket" in refusal(lambda: acme.s3.list_objects_v2(Bucket=acme.bucket, Prefix="other/"))
    assert "s3:ListBucket" in refusal(lambda: acme.s3.list_objects_v2(Bucket=acme.bucket))


def test_that_a_key_is_missing_is_told_to_who_may_list_the_whole_bucket(tenants: Tenants) -> None:
    acme, globex = tenants
    arn = f"arn:aws:s3:::{acme.bucket}"
    put(acme, acme.bucket, "jobs/there")
    put(acme, acme.bucket, "jobs/deleted")
    acme.s3.delete_object(Bucket=acme.bucket, Key="jobs/deleted")
    globex.grant("read", allow("s3:GetObject", f"{arn}/jobs/*"), allow("kms:Decrypt", acme.key_arn))
    globex.grant("list", allow("s3:ListBucket", arn, Condition={"StringLike": {"s3:prefix": "jobs/*"}}))
    for key in ("jobs/missing", "jobs/deleted"):
        assert get(acme, acme.bucket, key).startswith("NoSuchKey")
        assert f"s3:ListBucket on resource: {arn} " in get(globex, acme.bucket, key)
        assert "403" in refusal(lambda key=key: globex.s3.head_object(Bucket=acme.bucket, Key=key))  # type: ignore[misc]
    assert "s3:ListBucket" not in get(globex, acme.bucket, "jobs/there")
    assert refusal(lambda: globex.s3.list_objects_v2(Bucket=acme.bucket, Prefix="jobs/missing")) == ""
    globex.grant("list", allow("s3:ListBucket", arn))
    assert get(globex, acme.bucket, "jobs/missing").startswith("NoSuchKey")


def test_a_bucket_policys_denials_hold_and_its_tls_rule_spares_loopback(site: Site, tenants: Tenants) -> None:
    acme, globex = tenants
    arns = [f"arn:aws:s3:::{acme.bucket}", f"arn:aws:s3:::{acme.bucket}/*"]
    tls = deny("s3:*", arns, Principal="*", Condition={"Bool": {"aws:SecureTransport": "false"}})
    strangers = deny(
        "s3:*",
        arns,
        Principal="*",
        Condition={"ArnNotEquals": {"aws:PrincipalArn": [acme.role_arn, f"arn:aws:iam::{ACCOUNT}:root"]}},
    )
    site("s3").put_bucket_policy(Bucket=acme.bucket, Policy=policy(tls, strangers))
    assert put(acme, acme.bucket) == ""
    globex.grant("all", allow(["s3:*", "kms:*"]))
    assert get(globex, acme.bucket).endswith("with an explicit deny in a resource-based policy")
    direct = allow("s3:GetObject", arns[1:], Principal={"AWS": globex.role_arn})
    site("s3").put_bucket_policy(Bucket=acme.bucket, Policy=policy(tls, direct))
    globex.grant("all", allow("s3:ListAllMyBuckets"))
    assert "kms:Decrypt" in get(globex, acme.bucket)  # the bucket's policy lets it in, the key does not


def test_boundary_and_explicit_deny_win(site: Site, name: str, tenants: Tenants) -> None:
    acme, _ = tenants
    boundary = site("iam").create_policy(PolicyName=name, PolicyDocument=policy(allow("s3:GetObject")))["Policy"]["Arn"]
    put(acme, acme.bucket)
    site("iam").put_role_permissions_boundary(RoleName=acme.role, PermissionsBoundary=boundary)
    assert put(acme, acme.bucket).endswith("because no permissions boundary allows the s3:PutObject action")
    site("iam").create_policy_version(PolicyArn=boundary, PolicyDocument=policy(allow("*")), SetAsDefault=True)
    assert put(acme, acme.bucket) == ""
    site("iam").create_policy_version(
        PolicyArn=boundary, PolicyDocument=policy(allow("*"), deny("s3:PutObject")), SetAsDefault=True
    )
    assert put(acme, acme.bucket).endswith("with an explicit deny in a permissions boundary")
    site("iam").delete_role_permissions_boundary(RoleName=acme.role)
    acme.grant("no", deny("s3:PutObject"))
    assert put(acme, acme.bucket).endswith("with an explicit deny in an identity-based policy")


def test_an_attached_managed_policy_counts_in_its_default_version(site: Site, name: str) -> None:
    role = site.role(name)
    s3 = site.make_client(site.assume(role), "s3")
    managed = site("iam").create_policy(PolicyName=name, PolicyDocument=policy(allow("s3:ListAllMyBuckets")))["Policy"][
        "Arn"
    ]
    assert "s3:ListAllMyBuckets" in refusal(s3.list_buckets)
    site("iam").attach_role_policy(RoleName=name, PolicyArn=managed)
    assert refusal(s3.list_buckets) == ""
    site("iam").create_policy_version(
        PolicyArn=managed, PolicyDocument=policy(allow("s3:GetObject")), SetAsDefault=True
    )
    assert "s3:ListAllMyBuckets" in refusal(s3.list_buckets)


def test_what_has_no_resource_is_allowed_on_all_or_not_at_all(site: Site, name: str) -> None:
    fsx = site.make_client(site.assume(site.role(name)), "fsx")

    def told(resource: str) -> str:
        document = policy(allow("fsx:DescribeFileSystems", resource))
        site("iam").put_role_policy(RoleName=name, PolicyName="own", PolicyDocument=document)
        return refusal(fsx.describe_file_systems)

    assert "fsx:DescribeFileSystems" in told(f"arn:aws:fsx:us-east-1:{ACCOUNT}:file-system/*")
    assert told("*") == ""


def test_a_session_policy_narrows(site: Site, tenants: Tenants) -> None:
    acme, _ = tenants
    narrow = site.assume(acme.role_arn, Policy=policy(allow(["s3:GetObject", "kms:Decrypt"])))
    s3 = site.make_client(narrow, "s3")
    put(acme, acme.bucket)
    assert refusal(lambda: s3.get_object(Bucket=acme.bucket, Key="checkpoint")) == ""
    assert "s3:PutObject" in refusal(lambda: s3.put_object(Bucket=acme.bucket, Key="x", Body=b""))


def test_trust_decides_who_assumes_a_role(site: Site, name: str, tenants: Tenants) -> None:
    acme, globex = tenants
    for_acme = {"Version": "2012-10-17", "Statement": [allow("sts:AssumeRole", Principal={"AWS": acme.role_arn})]}
    del for_acme["Statement"][0]["Resource"]
    direct = site.role(f"{name}-direct", for_acme)
    through_root = site.role(f"{name}-root", TRUST_ROOT)
    for_service = site.role(f"{name}-service", TRUST_SAGEMAKER)
    with_id = json.loads(json.dumps(TRUST_ROOT))
    with_id["Statement"][0]["Condition"] = {"StringEquals": {"sts:ExternalId": "secret"}}
    guarded = site.role(f"{name}-guarded", with_id)

    def assume(client: Any, arn: str, **more: Any) -> str:
        return refusal(lambda: client.assume_role(RoleArn=arn, RoleSessionName="test", **more))

    assert assume(acme.client("sts"), direct) == ""
    assert "sts:AssumeRole" in assume(globex.client("sts"), direct)
    assert "trust policy" in assume(site("sts"), direct)
    assert assume(acme.client("sts"), through_root).endswith(
        "no identity-based policy allows the sts:AssumeRole action"
    )
    acme.grant("assume", allow("sts:AssumeRole", through_root))
    assert assume(acme.client("sts"), through_root) == ""
    assert "trust policy" in assume(site("sts"), for_service)
    assert "trust policy" in assume(site("sts"), guarded)
    assert "trust policy" in assume(site("sts"), guarded, ExternalId="wrong")
    assert assume(site("sts"), guarded, ExternalId="secret") == ""
    assert "AccessDenied" in assume(site("sts"), f"arn:aws:iam::{ACCOUNT}:role/absent")
    tags = [{"Key": "a", "Value": "b"}]
    assert "session tags" in assume(acme.client("sts"), direct, Tags=tags)


def test_tags_of_the_caller_and_policy_variables(site: Site, name: str) -> None:
    role = site.role(name, Tags=[{"Key": "team", "Value": "red"}])
    ssm = site.make_client(site.assume(role), "ssm")
    for team in ("red", "blue"):
        site("ssm").put_parameter(Name=f"/{name}/{team}", Value="1", Type="String")
    variable = f"arn:aws:ssm:us-east-1:{ACCOUNT}:parameter/{name}/${{aws:PrincipalTag/team}}"
    site("iam").put_role_policy(
        RoleName=name, PolicyName="own", PolicyDocument=policy(allow("ssm:GetParameter", variable))
    )
    assert refusal(lambda: ssm.get_parameter(Name=f"/{name}/red")) == ""
    assert "ssm:GetParameter" in refusal(lambda: ssm.get_parameter(Name=f"/{name}/blue"))
    tagged = allow("ssm:GetParameter", Condition={"StringEquals": {"aws:PrincipalTag/team": "blue"}})
    site("iam").put_role_policy(RoleName=name, PolicyName="own", PolicyDocument=policy(tagged))
    assert "ssm:GetParameter" in refusal(lambda: ssm.get_parameter(Name=f"/{name}/red"))
    nameless = allow("ssm:GetParameter", f"arn:aws:ssm:us-east-1:{ACCOUNT}:parameter/${{aws:PrincipalTag/absent}}")
    site("iam").put_role_policy(RoleName=name, PolicyName="own", PolicyDocument=policy(nameless))
    assert "has no value here" in refusal(lambda: ssm.get_parameter(Name=f"/{name}/red"))


@pytest.mark.parametrize(
    ("service", "call", "code"),
    [
        ("sqs", lambda client: client.list_queues(), "AccessDenied"),
        ("dynamodb", lambda client: client.list_tables(), "AccessDeniedException"),
        ("sagemaker", lambda client: client.list_models(), "AccessDeniedException"),
        ("iam", lambda client: client.create_user(UserName="x"), "AccessDenied"),
        ("ec2", lambda client: client.create_vpc(CidrBlock="10.0.0.0/16"), "UnauthorizedOperation"),
        ("batch", lambda client: client.terminate_job(jobId="a", reason="b"), "AccessDeniedException"),
        ("s3", lambda client: client.get_bucket_replication(Bucket="b"), "AccessDenied"),
    ],
)
def test_what_is_not_mapped_is_denied_even_to_an_administrator(
    site: Site, name: str, service: str, call: Any, code: str
) -> None:
    role = site.role(name)
    site("iam").put_role_policy(RoleName=name, PolicyName="all", PolicyDocument=policy(allow("*")))
    denied = refusal(lambda: call(site.make_client(site.assume(role), service)))
    assert denied.startswith(code)
    assert "the emulator's authorizer" in denied


@pytest.mark.parametrize(
    ("service", "call", "code"),
    [
        ("s3", lambda client: client.list_buckets(), "AccessDenied"),
        ("iam", lambda client: client.list_roles(), "AccessDenied"),
        ("ec2", lambda client: client.describe_vpcs(), "UnauthorizedOperation"),
        ("ssm", lambda client: client.get_parameter(Name="/x"), "AccessDeniedException"),
        ("kms", lambda client: client.list_keys(), "AccessDeniedException"),
        ("batch", lambda client: client.describe_job_queues(), "AccessDeniedException"),
        ("cloudwatch", lambda client: client.list_metrics(), "AccessDenied"),
        ("sns", lambda client: client.list_topics(), "AuthorizationError"),
        ("sagemaker", lambda client: client.list_training_jobs(), "AccessDeniedException"),
        ("logs", lambda client: client.describe_log_groups(), "AccessDeniedException"),
        ("events", lambda client: client.list_rules(), "AccessDeniedException"),
        ("cloudformation", lambda client: client.list_stacks(), "AccessDenied"),
    ],
)
def test_each_protocol_says_no_in_its_own_form(site: Site, name: str, service: str, call: Any, code: str) -> None:
    denied = refusal(lambda: call(site.make_client(site.assume(site.role(name)), service)))
    assert denied.startswith(code), denied
    assert "is not authorized to perform" in denied


def test_an_unknown_key_a_wrong_token_and_no_key_are_nobody(site: Site, tenants: Tenants) -> None:
    acme, _ = tenants
    nobody = boto3.session.Session("AKIAAAAAAAAAAAAAAAAA", "secret", region_name="us-east-1")
    assert refusal(site.make_client(nobody, "sts").get_caller_identity).startswith("InvalidClientTokenId")
    assert refusal(site.make_client(nobody, "s3").list_buckets).startswith("InvalidAccessKeyId")
    assert refusal(site.make_client(nobody, "ssm").describe_parameters).startswith("UnrecognizedClientException")
    own = acme.session.get_credentials().get_frozen_credentials()
    forged = boto3.session.Session(own.access_key, own.secret_key, "forged", region_name="us-east-1")
    assert refusal(site.make_client(forged, "s3").list_buckets).startswith("InvalidAccessKeyId")
    for path in (f"/{acme.bucket}/checkpoint", "/moto-api/reset", "/moto-api/data.json"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(site.info.endpoint + path, timeout=120)
        assert caught.value.code == 403


def test_a_presigned_url_carries_its_makers_rights(tenants: Tenants) -> None:
    acme, globex = tenants
    put(acme, acme.bucket)
    where = {"Bucket": acme.bucket, "Key": "checkpoint"}
    with urllib.request.urlopen(acme.s3.generate_presigned_url("get_object", Params=where), timeout=120) as answer:
        assert answer.read() == b"data"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(globex.s3.generate_presigned_url("get_object", Params=where), timeout=120)
    assert caught.value.code == 403


def test_a_bucket_in_the_host_name_is_the_same_bucket(site: Site, tenants: Tenants) -> None:
    acme, globex = tenants
    put(acme, acme.bucket)

    def get_by_host(caller: Caller) -> bytes:
        # *.localhost doesn't resolve everywhere: connect by number, and name the bucket in the Host header.
        config = Config(s3={"addressing_style": "virtual"}, signature_version="s3v4")
        s3 = caller.session.client("s3", endpoint_url=site.info.endpoint, config=config)
        url = s3.generate_presigned_url("get_object", Params={"Bucket": acme.bucket, "Key": "checkpoint"})
        host = f"{acme.bucket}.localhost:{site.info.port}"
        assert host in url
        request = urllib.request.Request(url.replace(host, f"127.0.0.1:{site.info.port}"), headers={"Host": host})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return bytes(answer.read())

    assert get_by_host(acme) == b"data"
    with pytest.raises(urllib.error.HTTPError) as caught:
        get_by_host(globex)
    assert f"s3:GetObject on resource: arn:aws:s3:::{acme.bucket}/checkpoint" in caught.value.read().decode()


def test_kms_is_the_keys_own_decision(site: Site, tenants: Tenants) -> None:
    acme, globex = tenants
    kms, other = acme.client("kms"), globex.client("kms")
    acme.grant("kms", allow(["kms:Encrypt", "kms:Decrypt"], acme.key_arn))
    blob = kms.encrypt(KeyId=acme.key_arn, Plaintext=b"secret")["CiphertextBlob"]
    assert kms.decrypt(CiphertextBlob=blob)["Plaintext"] == b"secret"
    globex.grant("kms", allow("kms:*"))
    assert acme.key_arn in refusal(lambda: other.decrypt(CiphertextBlob=blob))
    site("kms").create_alias(AliasName=f"alias/{acme.role}", TargetKeyId=acme.key_arn)
    assert acme.key_arn in refusal(lambda: other.encrypt(KeyId=f"alias/{acme.role}", Plaintext=b"x"))


def test_a_deny_that_cannot_be_judged_denies(site: Site, tenants: Tenants) -> None:
    acme, _ = tenants
    acme.grant("odd", deny("s3:*", Condition={"StringEquals": {"aws:PhaseOfTheMoon": "full"}}))
    assert "aws:PhaseOfTheMoon of a Deny statement is not known" in put(acme, acme.bucket)
    acme.grant("odd", allow("s3:ListAllMyBuckets"))
    unknown = {"StringSortaEquals": {"aws:PrincipalArn": "x"}}
    odd = deny("s3:*", f"arn:aws:s3:::{acme.bucket}/*", Principal="*", Condition=unknown)
    site("s3").put_bucket_policy(Bucket=acme.bucket, Policy=policy(odd))
    assert "operator StringSortaEquals is not known" in put(acme, acme.bucket)
    site("s3").delete_bucket_policy(Bucket=acme.bucket)
    acme.grant("odd", deny("s3:*", Condition={"Null": {"aws:SourceVpce": "true"}}))
    assert put(acme, acme.bucket).endswith("with an explicit deny in an identity-based policy")


def test_a_wildcard_in_a_resource_policys_principal_names_nobody(site: Site, tenants: Tenants) -> None:
    acme, globex = tenants
    put(acme, acme.bucket)
    anyone = allow("s3:ListBucket", f"arn:aws:s3:::{acme.bucket}", Principal={"AWS": f"arn:aws:iam::{ACCOUNT}:role/*"})
    told = refusal(lambda: site("s3").put_bucket_policy(Bucket=acme.bucket, Policy=policy(anyone)))
    assert told == "MalformedPolicy: Invalid principal in policy"
    assert "s3:ListBucket" in refusal(lambda: globex.s3.list_objects_v2(Bucket=acme.bucket))


def job_request(role_arn: str, name: str, **more: Any) -> dict[str, Any]:
    """A CreateTrainingJob request with what guard rails look at."""
    return {
        "TrainingJobName": name,
        "RoleArn": role_arn,
        "AlgorithmSpecification": {"TrainingImage": "image", "TrainingInputMode": "File"},
        "ResourceConfig": {"InstanceType": "ml.p5.4xlarge", "InstanceCount": 1, "VolumeSizeInGB": 10},
        "StoppingCondition": {"MaxRuntimeInSeconds": 600},
        "OutputDataConfig": {"S3OutputPath": "s3://nowhere/out"},
        "VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]},
        "Tags": [{"Key": "team", "Value": "red"}],
        **more,
    }


def test_create_training_job_is_judged_by_its_request(site: Site, name: str) -> None:
    job_role = site.role(f"{name}-job", TRUST_SAGEMAKER)
    launcher = site.role(name)
    subnet = site("ec2").describe_subnets()["Subnets"][0]["SubnetId"]
    group = site("ec2").describe_security_groups()["SecurityGroups"][0]["GroupId"]
    arn = f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-job/{name}-*"
    passing = allow(
        "iam:PassRole", job_role, Condition={"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}
    )
    rules = [
        allow(["sagemaker:CreateTrainingJob", "sagemaker:AddTags"], arn),
        deny("sagemaker:CreateTrainingJob", Condition={"Null": {"sagemaker:VpcSubnets": "true"}}),
        deny(
            "sagemaker:CreateTrainingJob",
            Condition={"ForAnyValue:StringNotEquals": {"sagemaker:VpcSubnets": [subnet]}},
        ),
        deny(
            "sagemaker:CreateTrainingJob",
            Condition={"ForAnyValue:StringNotLike": {"sagemaker:InstanceTypes": "ml.p5.*"}},
        ),
        deny(
            "sagemaker:CreateTrainingJob", Condition={"NumericGreaterThan": {"sagemaker:MaxRuntimeInSeconds": "3600"}}
        ),
        deny("sagemaker:CreateTrainingJob", Condition={"StringNotEquals": {"aws:RequestTag/team": "red"}}),
    ]
    sagemaker = site.make_client(site.assume(launcher), "sagemaker")
    network = {"VpcConfig": {"Subnets": [subnet], "SecurityGroupIds": [group]}}

    def rule(*statements: Any) -> None:
        site("iam").put_role_policy(RoleName=name, PolicyName="launch", PolicyDocument=policy(*statements))

    def create(job: str, role: str = job_role, **more: Any) -> str:
        return refusal(lambda: sagemaker.create_training_job(**job_request(role, job, **{**network, **more})))

    rule(*rules)
    assert "iam:PassRole on resource: " + job_role in create(f"{name}-1")
    rule(*rules, passing)
    assert create(f"{name}-1") == ""
    assert "iam:PassRole" in create(f"{name}-2", launcher)
    assert "sagemaker:CreateTrainingJob" in create("someone-elses")
    outside: dict[str, Any] = {"VpcConfig": {"Subnets": ["subnet-2"], "SecurityGroupIds": ["sg-1"]}}
    without = job_request(job_role, f"{name}-3")
    del without["VpcConfig"]
    big = {"ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 10}}
    for change in (
        outside,
        big,
        {"StoppingCondition": {"MaxRuntimeInSeconds": 7200}},
        {"Tags": [{"Key": "team", "Value": "blue"}]},
    ):
        assert "with an explicit deny in an identity-based policy" in create(f"{name}-3", **change), change
    assert "explicit deny" in refusal(lambda: sagemaker.create_training_job(**without))
    rule(allow("sagemaker:CreateTrainingJob", arn), passing)
    assert "sagemaker:AddTags" in create(f"{name}-4")


def test_a_job_role_must_trust_sagemaker(site: Site, name: str) -> None:
    for_people = site.role(name)
    refused = refusal(lambda: site("sagemaker").create_training_job(**job_request(for_people, name)))
    assert refused.startswith("ValidationException: Could not assume role")
    other_account = json.loads(json.dumps(TRUST_SAGEMAKER))
    other_account["Statement"][0]["Condition"] = {"StringEquals": {"aws:SourceAccount": "999999999999"}}
    guarded = site.role(f"{name}-2", other_account)
    assert "Could not assume role" in refusal(
        lambda: site("sagemaker").create_training_job(**job_request(guarded, f"{name}-2"))
    )


def judge_with(
    identity: list[Any], boundary: list[Any], bucket: list[Any], principals: Principals, role_arn: str
) -> tuple[Judge, Principal]:
    """Our judge over one role with these policies, and the role's session; every bucket has the one policy."""
    managed = SimpleNamespace(
        default_version_id="v1", versions=[SimpleNamespace(version_id="v1", document=policy(*boundary))]
    )
    principals.managed_policies = lambda: {"boundary": managed}  # type: ignore[method-assign]
    role = SimpleNamespace(
        arn=role_arn,
        id="AROA",
        tags=[],
        policies={"own": policy(*identity)},
        managed_policies={},
        permissions_boundary_arn="boundary",
    )
    judge = Judge(principals)
    judge._resource_policies.of = lambda service, resource: policy(*bucket)  # type: ignore[method-assign]
    return judge, Principal(ACCOUNT, f"{role_arn}/session", role)


def test_our_judge_agrees_with_a_plain_reading_of_many_random_policies() -> None:
    """Our judge against a brute-force reading of IAM's rules, without wildcards."""
    import itertools
    import random

    rng = random.Random(7)
    actions, resources = ["s3:GetObject", "s3:PutObject"], ["arn:aws:s3:::a/k", "arn:aws:s3:::b/k"]
    me, other = f"arn:aws:iam::{ACCOUNT}:role/me", f"arn:aws:iam::{ACCOUNT}:role/other"

    def some_statements(principals: bool) -> list[dict[str, Any]]:
        made = []
        for _ in range(rng.randrange(4)):
            statement = rng.choice([allow, deny])(rng.choice(actions), rng.choice(resources))
            made.append(statement | ({"Principal": {"AWS": rng.choice([me, other])}} if principals else {}))
        return made

    def says(statements: list[dict[str, Any]], effect: str, action: str, resource: str, mine: bool = False) -> bool:
        return any(
            item["Effect"] == effect and item["Action"] == action and item["Resource"] == resource
            and (not mine or item["Principal"]["AWS"] == me)
            for item in statements
        )  # fmt: skip

    for _ in range(400):
        identity, boundary, bucket = some_statements(False), some_statements(False), some_statements(True)
        for action, resource in itertools.product(actions, resources):
            denied = (
                says(identity, "Deny", action, resource)
                or says(boundary, "Deny", action, resource)
                or says(bucket, "Deny", action, resource, mine=True)
            )
            allowed = says(identity, "Allow", action, resource) or says(bucket, "Allow", action, resource, mine=True)
            expected = allowed and says(boundary, "Allow", action, resource) and not denied
            judge, caller = judge_with(identity, boundary, bucket, Principals(ACCOUNT, "AKIA"), me)
            denial = judge.deny(caller, Check(action, resource), "us-east-1")
            assert (denial is None) == expected, (identity, boundary, bucket, action, resource, denial)


@pytest.mark.parametrize(
    "key", ["s3:ExistingObjectTag/team", "s3:TlsVersion", "kms:KeyOrigin", "ec2:Vpc", "aws:ResourceTag/team"]
)
def test_a_key_that_is_not_filled_in_closes_a_deny_and_unmatches_an_allow(key: str) -> None:
    me, resource = f"arn:aws:iam::{ACCOUNT}:role/me", "arn:aws:s3:::a/k"
    check = Check("s3:GetObject", resource)

    def decide(*identity: Any, bucket: list[Any]) -> str:
        judge, caller = judge_with(list(identity), [allow("*")], bucket, Principals(ACCOUNT, "AKIA"), me)
        denial = judge.deny(caller, check, "us-east-1")
        return denial.message if denial else ""

    tagged: dict[str, Any] = {"Condition": {"StringEquals": {key: "red"}}}
    other: dict[str, Any] = {"Condition": {"StringNotEquals": {key: "red"}}}
    everything = allow("s3:*")
    assert decide(everything, bucket=[]) == ""
    assert f"{key} of a Deny statement is not known" in decide(everything, deny("s3:GetObject", **tagged), bucket=[])
    of_bucket = deny("s3:GetObject", resource, Principal={"AWS": me}, **tagged)
    assert f"{key} of a Deny statement is not known" in decide(everything, bucket=[of_bucket])
    assert decide(everything, deny("s3:PutObject", **tagged), bucket=[]) == ""
    for condition in (tagged, other):
        assert "no identity-based policy allows" in decide(allow("s3:GetObject", **condition), bucket=[])
        letting = allow("s3:GetObject", resource, Principal={"AWS": me}, **condition)
        assert "no identity-based policy allows" in decide(bucket=[letting])


@pytest.mark.parametrize(
    "more",
    [
        {"PolicyArns": [{"arn": "arn:aws:iam::aws:policy/ReadOnlyAccess"}]},
        {"SourceIdentity": "somebody"},
        {"SerialNumber": f"arn:aws:iam::{ACCOUNT}:mfa/x", "TokenCode": "123456"},
    ],
)
def test_limits_of_a_session_that_are_not_kept_are_refused(site: Site, name: str, more: dict[str, Any]) -> None:
    role = site.role(name)
    assert refusal(lambda: site("sts").assume_role(RoleArn=role, RoleSessionName="test")) == ""
    refused = refusal(lambda: site("sts").assume_role(RoleArn=role, RoleSessionName="test", **more))
    assert "the emulator doesn't judge it" in refused


def test_an_arn_is_one_resource_of_this_account_and_region(site: Site, name: str, tenants: Tenants) -> None:
    acme, _ = tenants
    job_role = site.role(f"{name}-job", TRUST_SAGEMAKER)
    foreign = job_request(job_role, f"{name}-foreign")
    del foreign["VpcConfig"]  # nothing of it is there
    site("sagemaker").create_training_job(**foreign)
    start = f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-job/"
    acme.grant("tags", allow("sagemaker:ListTags", f"{start}acme-*"))
    sagemaker = acme.client("sagemaker")
    for arn in (f"{start}acme-x:training-job/{name}-foreign", f"{start}{name}-foreign", f"acme-{start}{name}-foreign"):
        refused = refusal(lambda given=arn: sagemaker.list_tags(ResourceArn=given))  # type: ignore[misc]
        assert refused.startswith("AccessDeniedException"), arn
    topic = site("sns").create_topic(Name=name)["TopicArn"]
    other = site("sns").create_topic(Name=f"{name}-2")["TopicArn"]
    acme.grant("sns", allow("sns:Publish", topic))
    assert refusal(lambda: acme.client("sns").publish(TopicArn=topic, Message="x")) == ""
    both = refusal(lambda: acme.client("sns").publish(TopicArn=topic, TargetArn=other, Message="x"))
    assert "names its resource twice" in both


def test_a_stack_is_not_built_with_more_rights_than_its_callers(site: Site, name: str, tenants: Tenants) -> None:
    acme, _ = tenants
    acme.grant("stacks", allow("cloudformation:*"))
    template = {"Resources": {"Role": {"Type": "AWS::IAM::Role", "Properties": {"AssumeRolePolicyDocument": {}}}}}
    build = {"StackName": name, "TemplateBody": json.dumps(template)}
    assert "without RoleARN" in refusal(lambda: acme.client("cloudformation").create_stack(**build))
    other = site.role(name)
    passed = refusal(lambda: acme.client("cloudformation").create_stack(**build, RoleARN=other))
    assert f"iam:PassRole on resource: {other}" in passed


def test_a_change_set_is_one_of_the_stack_that_was_judged(site: Site, name: str, tenants: Tenants) -> None:
    acme, _ = tenants
    body = json.dumps({"Resources": {"Topic": {"Type": "AWS::SNS::Topic"}}})
    made = {
        which: site("cloudformation").create_change_set(
            StackName=f"{name}-{which}", ChangeSetName="change", ChangeSetType="CREATE", TemplateBody=body
        )["Id"]
        for which in ("own", "foreign")
    }
    acme.grant("stacks", allow("cloudformation:*", f"arn:aws:cloudformation:us-east-1:{ACCOUNT}:stack/{name}-own/*"))
    stacks = acme.client("cloudformation")
    assert stacks.describe_change_set(StackName=f"{name}-own", ChangeSetName=made["own"])["ChangeSetId"] == made["own"]
    for call in (stacks.describe_change_set, stacks.execute_change_set, stacks.delete_change_set):
        # Deleting what isn't there is no error, here as on AWS.
        refusal(lambda ask=call: ask(StackName=f"{name}-own", ChangeSetName=made["foreign"]))  # type: ignore[misc]
    left = site("cloudformation").describe_change_set(ChangeSetName=made["foreign"])
    assert left["ExecutionStatus"] == "AVAILABLE"


def test_a_ciphertext_is_opened_by_its_own_key(site: Site, tenants: Tenants) -> None:
    acme, globex = tenants
    key = site("kms").get_key_policy(KeyId=acme.key_arn, PolicyName="default")["Policy"]
    opened = json.loads(key.replace("kms:DescribeKey", "kms:Encrypt"))
    site("kms").put_key_policy(KeyId=acme.key_arn, PolicyName="default", Policy=json.dumps(opened))
    foreign = site("kms").encrypt(KeyId=acme.key_arn, Plaintext=b"secret")["CiphertextBlob"]
    kms = globex.client("kms")
    globex.grant("kms", allow("kms:*"))
    own = kms.encrypt(KeyId=globex.key_arn, Plaintext=b"x")["CiphertextBlob"]
    assert refusal(lambda: kms.decrypt(CiphertextBlob=own, KeyId=globex.key_arn)) == ""
    for source in ({}, {"SourceKeyId": globex.key_arn}):
        moved = refusal(
            lambda more=source: kms.re_encrypt(CiphertextBlob=foreign, DestinationKeyId=globex.key_arn, **more)  # type: ignore[misc]
        )
        assert moved.startswith("AccessDenied"), moved
    assert "not one of key" in refusal(lambda: kms.decrypt(CiphertextBlob=foreign, KeyId=globex.key_arn))


def test_the_error_is_a_client_error_that_sdks_know(tenants: Tenants) -> None:
    acme, globex = tenants
    with pytest.raises(ClientError) as caught:
        globex.s3.get_object(Bucket=acme.bucket, Key="x")
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
    with pytest.raises(globex.client("kms").exceptions.ClientError):
        globex.client("kms").list_keys()
