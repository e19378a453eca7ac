"""What is judged is what is executed: requests that could be read in two ways, sent as no SDK would send them."""

import http.client
import json
from typing import Any
from urllib.parse import quote

import pytest
from emulator_testing import ACCOUNT, Caller, Site, allow, deny, policy, refusal

Tenants = tuple[Caller, Caller]
SECRET = b"globex only"


def scope(caller: Caller, service: str, region: str = "us-east-1") -> str:
    """The credential scope of a caller's own key for a service."""
    return f"{caller.session.get_credentials().access_key}/20260101/{region}/{service}/aws4_request"


def token(caller: Caller) -> str:
    return str(caller.session.get_credentials().token)


def signed(caller: Caller, service: str, region: str = "us-east-1", **more: str) -> dict[str, str]:
    """The headers of a request in the accepted form; the emulator asks for the token, not for the signature."""
    authorization = (
        f"AWS4-HMAC-SHA256 Credential={scope(caller, service, region)}, SignedHeaders=host, Signature={'0' * 64}"
    )
    return {"Authorization": authorization, "x-amz-security-token": token(caller), **more}


def send(
    site: Site, method: str, target: str, headers: dict[str, str], body: bytes | str = b"", *, host: str = ""
) -> tuple[int, bytes]:
    """Status and body; the target goes over the wire as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", site.info.port, timeout=120)
    try:
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        content = body.encode() if isinstance(body, str) else body
        host = host or f"localhost:{site.info.port}"
        for name, value in {"Host": host, "Content-Length": str(len(content)), **headers}.items():
            connection.putheader(name, value)
        connection.endheaders(content)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.fixture
def secret(site: Site, tenants: Tenants) -> Tenants:
    """Two tenants; the second has an object `secret` that the first may not read."""
    site("s3").put_object(Bucket=tenants[1].bucket, Key="secret", Body=SECRET)
    return tenants


def refused(answer: tuple[int, bytes]) -> bool:
    """Whether the authorizer said no, and nothing of the other tenant's came along."""
    return answer[0] in (400, 403) and SECRET not in answer[1]


def test_the_forms_of_these_tests_are_taken_when_nothing_is_odd(site: Site, secret: Tenants) -> None:
    acme, globex = secret
    assert send(site, "GET", f"/{globex.bucket}/secret", signed(globex, "s3")) == (200, SECRET)
    assert refused(send(site, "GET", f"/{globex.bucket}/secret", signed(acme, "s3")))
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    identity = send(site, "POST", "/", signed(acme, "sts", **form), "Action=GetCallerIdentity&Version=2011-06-15")
    assert identity[0] == 200
    assert acme.role.encode() in identity[1]


@pytest.mark.parametrize("service", ["sts", "s3"])
def test_a_presigned_url_is_for_s3_and_runs_in_s3(site: Site, secret: Tenants, service: str) -> None:
    acme, globex = secret
    signature = (
        f"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential={quote(scope(acme, service), safe='')}"
        f"&X-Amz-Security-Token={quote(token(acme), safe='')}&X-Amz-Signature=x&Action=GetCallerIdentity"
    )
    assert refused(send(site, "GET", f"/{globex.bucket}/secret?{signature}", {}))
    # Unsigned by header, moto would dispatch this one by its body: credentials of any role.
    body = f"Action=AssumeRoleWithWebIdentity&RoleArn={globex.role_arn}&RoleSessionName=x&WebIdentityToken=x"
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = send(site, "PUT", f"/{acme.bucket}/x?{signature}", form, body)
    assert b"SecretAccessKey" not in answer[1]


@pytest.mark.parametrize(
    "form",
    [
        "AWS4-HMAC-SHA256 X=k/d/r/s3/aws4_request, Credential={sts}",
        "AWS4-HMAC-SHA256 X=k/d/r/s3/aws4_request, Credential={sts}, SignedHeaders=host, Signature={zeros}",
        "AWS4-HMAC-SHA256 Credential={sts}, Credential={s3}, SignedHeaders=host, Signature={zeros}",
        "AWS4-HMAC-SHA256  Credential={sts}",
        "AWS4-HMAC-SHA256 SignedHeaders=host, Credential={sts}, Signature={zeros}",
        "AWS {key}:a/b/us-east-1/s3/x",
        "Bearer {sts}",
    ],
)
def test_one_form_of_the_authorization_header(site: Site, secret: Tenants, form: str) -> None:
    acme, globex = secret
    key = acme.session.get_credentials().access_key
    header = form.format(sts=scope(acme, "sts"), s3=scope(acme, "s3"), key=key, zeros="0" * 64)
    headers = {"Authorization": header, "x-amz-security-token": token(acme)}
    assert refused(send(site, "GET", f"/{globex.bucket}/secret?Action=GetCallerIdentity", headers))
    assert refused(send(site, "GET", f"/{acme.bucket}?prefix=x", headers))


def test_signed_twice_is_refused(site: Site, secret: Tenants) -> None:
    acme, _ = secret
    twice = f"/{acme.bucket}?X-Amz-Credential={quote(scope(acme, 's3'), safe='')}"
    assert refused(send(site, "GET", twice, signed(acme, "s3")))
    for name in ("awsaccesskeyid", "AWSAccessKeyId", "x-amz-credential", "Signature"):
        assert refused(send(site, "GET", f"/{acme.bucket}?{name}=x", signed(acme, "s3"))), name


def ssm(caller: Caller, site: Site, operation: str, body: str, target: str = "/", **more: str) -> tuple[int, bytes]:
    kind = {"Content-Type": "application/x-amz-json-1.1", "x-amz-target": f"AmazonSSM.{operation}"}
    return send(site, "POST", target, signed(caller, "ssm", **{**kind, **more}), body)


def test_the_operation_of_a_json_request_stands_in_its_target_alone(site: Site, name: str, tenants: Tenants) -> None:
    acme, _ = tenants
    site("ssm").put_parameter(Name=f"/{name}", Value="globex only", Type="String")
    acme.grant("ssm", allow("ssm:DescribeParameters"))
    asked = json.dumps({"Name": f"/{name}"})
    assert ssm(acme, site, "DescribeParameters", "{}")[0] == 200
    assert ssm(acme, site, "GetParameter", asked)[0] == 400
    hidden = json.dumps({"Name": f"/{name}", "X": "&Action=GetParameter&"})
    for answer in (
        ssm(acme, site, "DescribeParameters", asked, "/?Action=GetParameter"),
        ssm(acme, site, "DescribeParameters", hidden),
        ssm(acme, site, "DescribeParameters", "", Action="GetParameter", Name=f"/{name}"),
        ssm(acme, site, "DescribeParameters", f"Action=GetParameter&Name=/{name}"),
        ssm(acme, site, "DescribeParameters", asked, **{"Content-Type": "application/x-www-form-urlencoded"}),
        ssm(acme, site, "DescribeParameters,AmazonSSM.GetParameter", asked),
        ssm(acme, site, "DescribeParameters", asked, "/x/invocations"),
    ):
        assert b"globex only" not in answer[1]


def test_the_parameters_of_a_json_request_are_those_that_were_judged(site: Site, name: str, tenants: Tenants) -> None:
    acme, _ = tenants
    for which, value in (("own", "acme only"), ("foreign", "globex only")):
        site("ssm").put_parameter(Name=f"/{name}/{which}", Value=value, Type="String")
    acme.grant("ssm", allow("ssm:GetParameter", f"arn:aws:ssm:us-east-1:{ACCOUNT}:parameter/{name}/own"))
    assert b"acme only" in ssm(acme, site, "GetParameter", json.dumps({"Name": f"/{name}/own"}))[1]
    hidden = json.dumps({"Name": f"/{name}/own", "X": f"&Name=/{name}/foreign&"})
    assert b"acme only" in ssm(acme, site, "GetParameter", hidden)[1]
    twice = f'{{"Name": "/{name}/foreign", "Name": "/{name}/own"}}'
    assert b"globex only" not in ssm(acme, site, "GetParameter", twice)[1]
    for odd in (f"/{name}/foreign:parameter/{name}/own", f"arn:aws:ssm:us-east-1:{ACCOUNT}:parameter/{name}/own:x:y"):
        assert ssm(acme, site, "GetParameter", json.dumps({"Name": odd}))[0] == 400


def test_the_region_is_the_signatures(site: Site, name: str, tenants: Tenants) -> None:
    acme, _ = tenants
    elsewhere = site.session.client("ssm", endpoint_url=site.info.endpoint, region_name="eu-west-1")
    elsewhere.put_parameter(Name=f"/{name}", Value="globex only", Type="String")
    acme.grant("ssm", allow("ssm:GetParameter", f"arn:aws:ssm:us-east-1:{ACCOUNT}:parameter/{name}"))
    asked = json.dumps({"Name": f"/{name}"})
    for more in ({"User-Agent": "x region/eu-west-1"}, {"Host": "ssm.eu-west-1.amazonaws.com"}):
        assert b"globex only" not in ssm(acme, site, "GetParameter", asked, **more)[1]


def test_the_query_protocol_takes_each_name_once_and_in_the_body(site: Site, tenants: Tenants) -> None:
    acme, globex = tenants
    form = {"Content-Type": "application/x-www-form-urlencoded"}

    def ask(target: str, body: str, **more: str) -> tuple[int, bytes]:
        return send(site, "POST", target, signed(acme, "iam", **{**form, **more}), body)

    acme.grant("iam", allow("iam:GetRole", acme.role_arn))
    own = f"Action=GetRole&RoleName={acme.role}&Version=2010-05-08"
    assert ask("/", own)[0] == 200
    other = f"RoleName={globex.role}"
    for answer in (
        ask(f"/?{other}", own),
        ask("/", f"{own}&{other}"),
        ask("/?Action=GetRole", own),
        ask("/", f"{own}&Action=DeleteRole"),
        ask("/", own, **{"Content-Encoding": "gzip"}),
        ask("/", own, **{"Content-Type": "text/plain"}),
        ask("/x", own),
        send(site, "GET", f"/?{own}", signed(acme, "iam")),
    ):
        assert answer[0] == 403, answer
        assert b"more than one way" in answer[1]


def test_the_url_has_one_reading(site: Site, secret: Tenants) -> None:
    acme, globex = secret
    site("s3").put_object(Bucket=acme.bucket, Key="secret", Body=b"own")
    headers, port = signed(acme, "s3"), site.info.port
    for target in (
        f"//{globex.bucket}/secret",
        f"/{globex.bucket};x/secret",
        f"/%{ord(globex.bucket[0]):x}{globex.bucket[1:]}/secret",
        f"/{acme.bucket}%2F..%2F{globex.bucket}/secret",
        f"http://{globex.bucket}.s3.amazonaws.com/secret",
        f"/{acme.bucket}/secret#?x",
        "/latest/meta-data/iam/security-credentials/",
        "/v20180820/accesspoint",
        "/moto-api/data.json",
        "/%6doto-api/data.json",
    ):
        assert refused(send(site, "GET", target, headers)), target
    for host in (f"{globex.bucket}.s3.amazonaws.com", f"{globex.bucket}.s3.localhost.x", "s3-control.amazonaws.com"):
        assert refused(send(site, "GET", f"/{acme.bucket}/secret", headers, host=host)), host
    for host in (f"{globex.bucket}.localhost:{port}", f"www.{globex.bucket}.localhost:{port}"):
        assert SECRET not in send(site, "GET", f"/{acme.bucket}/secret", headers, host=host)[1]
        assert refused(send(site, "GET", "/secret", headers, host=host))
    assert refused(send(site, "GET", "/meta-data/iam/", headers, host=f"latest.localhost:{port}"))
    assert send(site, "GET", "/secret", headers, host=f"{acme.bucket}.localhost:{port}") == (200, b"own")


def test_a_method_override_overrides_nothing(site: Site, secret: Tenants) -> None:
    acme, _ = secret
    site("s3").put_object(Bucket=acme.bucket, Key="kept", Body=b"own")
    acme.grant("own", allow(["s3:GetObject", "kms:Decrypt"]))
    override = signed(acme, "s3", **{"X-HTTP-Method-Override": "DELETE"})
    assert send(site, "GET", f"/{acme.bucket}/kept", override) == (200, b"own")
    assert send(site, "GET", f"/{acme.bucket}/kept", signed(acme, "s3"))[0] == 200
    assert send(site, "OPTIONS", f"/{acme.bucket}/kept", signed(acme, "s3"))[0] == 400


def test_one_sub_resource_at_a_time(site: Site, tenants: Tenants) -> None:
    acme, _ = tenants
    site("s3").put_bucket_policy(
        Bucket=acme.bucket, Policy=policy(deny("s3:GetBucketCORS", f"arn:aws:s3:::{acme.bucket}", Principal="*"))
    )
    site("s3").put_object(Bucket=acme.bucket, Key="kept", Body=b"own")
    tagging = ["s3:PutBucketTagging", "s3:GetObjectRetention", "s3:ListMultipartUploadParts"]
    acme.grant("own", allow([*tagging, "s3:AbortMultipartUpload", "s3:PutObject"]))
    new = policy(allow("s3:*", Principal="*"))
    headers = signed(acme, "s3")
    for method, target in (
        ("PUT", f"/{acme.bucket}?tagging&policy"),
        ("PUT", f"/{acme.bucket}?policy&tagging"),
        ("GET", f"/{acme.bucket}/kept?retention"),
        ("GET", f"/{acme.bucket}/kept?uploadId="),
        ("DELETE", f"/{acme.bucket}/kept?uploadId="),
        ("PUT", f"/{acme.bucket}/kept?uploadId=x"),
    ):
        answer = send(site, method, target, headers, new if method == "PUT" else b"")
        assert answer[0] == 403, target
        assert answer[1] != b"own"
    assert "GetBucketCORS" in site("s3").get_bucket_policy(Bucket=acme.bucket)["Policy"]
    assert site("s3").get_object(Bucket=acme.bucket, Key="kept")["Body"].read() == b"own"


def test_s3_parameters_come_from_the_query(site: Site, tenants: Tenants) -> None:
    acme, _ = tenants
    s3 = site("s3")
    s3.put_bucket_versioning(Bucket=acme.bucket, VersioningConfiguration={"Status": "Enabled"})
    version = s3.put_object(Bucket=acme.bucket, Key="kept", Body=b"own")["VersionId"]
    acme.grant("own", allow("s3:DeleteObject"))
    where, body = f"/{acme.bucket}/kept", json.dumps({"versionId": version})
    assert send(site, "DELETE", f"{where}?versionId={version}", signed(acme, "s3"))[0] == 403
    assert send(site, "DELETE", f"{where}?versionId=&versionId={version}", signed(acme, "s3"))[0] == 403
    assert send(site, "DELETE", where, signed(acme, "s3"), body)[0] == 403
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert send(site, "DELETE", where, signed(acme, "s3", **form), f"versionId={version}")[0] == 403
    assert s3.get_object(Bucket=acme.bucket, Key="kept", VersionId=version)["Body"].read() == b"own"


@pytest.mark.parametrize(
    "body",
    [
        "<Delete><Object><Key >keep</Key ></Object></Delete>",
        "<Delete><Object><Key>free</Key></Object><Object><Key\n>keep</Key></Object></Delete>",
        '<!DOCTYPE d [<!ENTITY k "keep">]><Delete><Object><Key>&k;</Key></Object></Delete>',
        "<Delete><Object><Key><![CDATA[keep]]></Key></Object></Delete>",
        "<Delete><Object><Key>free</Key><Key>keep</Key></Object></Delete>",
        "<Delete><Object><Key>&#107;eep</Key></Object></Delete>",
        "<Delete><Object><Key>free</Key><VersionId>{version}</VersionId></Object></Delete>",
        "<Delete></Delete>",
        "<Key>free</Key><Key>keep</Key>",
        "",
    ],
)
def test_a_list_of_deletions_is_read_as_xml(site: Site, tenants: Tenants, body: str) -> None:
    acme, _ = tenants
    s3 = site("s3")
    s3.put_bucket_versioning(Bucket=acme.bucket, VersioningConfiguration={"Status": "Enabled"})
    versions = {key: s3.put_object(Bucket=acme.bucket, Key=key, Body=b"x")["VersionId"] for key in ("free", "keep")}
    acme.grant("own", allow("s3:DeleteObject", f"arn:aws:s3:::{acme.bucket}/free"))
    content = body.replace("{version}", versions["free"])
    assert send(site, "POST", f"/{acme.bucket}?delete", signed(acme, "s3"), content)[0] == 403
    listed = s3.list_object_versions(Bucket=acme.bucket)
    assert len(listed["Versions"]) == 2
    assert "DeleteMarkers" not in listed


def test_the_source_of_a_copy_is_cut_before_it_is_decoded(site: Site, tenants: Tenants) -> None:
    acme, globex = tenants
    s3 = site("s3")
    s3.put_bucket_versioning(Bucket=globex.bucket, VersioningConfiguration={"Status": "Enabled"})
    old = s3.put_object(Bucket=globex.bucket, Key="a", Body=SECRET)["VersionId"]
    s3.put_object(Bucket=globex.bucket, Key="a", Body=b"public")
    for key in ("a?b", "a#b", "a;b", "a+b"):
        s3.put_object(Bucket=globex.bucket, Key=key, Body=SECRET)
    keys = [f"arn:aws:s3:::{globex.bucket}/{key}" for key in ("a", "a b", "a;c", "a#c")]
    acme.grant("foreign", allow("s3:GetObject", keys), allow("kms:*"))
    key = json.loads(site("kms").get_key_policy(KeyId=globex.key_arn, PolicyName="default")["Policy"])
    key["Statement"].append(allow("kms:*", Principal={"AWS": acme.role_arn}))
    site("kms").put_key_policy(KeyId=globex.key_arn, PolicyName="default", Policy=json.dumps(key))

    def copy(source: str) -> int:
        headers = signed(acme, "s3", **{"x-amz-copy-source": f"{globex.bucket}/{source}"})
        return send(site, "PUT", f"/{acme.bucket}/copy", headers)[0]

    assert copy("a") == 200
    for source in ("a%3Fb", "a%23b", "a%3Bb", "a+b", "a;c", "a#c", f"a?versionId={old}", f"a?x=y&versionId={old}"):
        assert copy(source) == 403, source
    assert s3.get_object(Bucket=acme.bucket, Key="copy")["Body"].read() == b"public"


def test_headers_that_do_more_than_the_action_says(site: Site, tenants: Tenants) -> None:
    acme, _ = tenants
    arn = f"arn:aws:s3:::{acme.bucket}/*"
    acme.grant("own", allow("s3:PutObject", arn), allow("kms:*"))
    plain = refusal(lambda: acme.s3.put_object(Bucket=acme.bucket, Key="x", Body=b"x"))
    assert plain == ""
    put: Any = {"Bucket": acme.bucket, "Key": "x", "Body": b"x"}
    assert "s3:PutObjectAcl" in refusal(lambda: acme.s3.put_object(**put, ACL="public-read"))
    assert "s3:PutObjectAcl" in refusal(lambda: acme.s3.put_object(**put, GrantRead="id=x"))
    assert "s3:PutObjectTagging" in refusal(lambda: acme.s3.put_object(**put, Tagging="a=b"))
    assert "s3:PutObjectLegalHold" in refusal(lambda: acme.s3.put_object(**put, ObjectLockLegalHoldStatus="ON"))


def test_a_part_goes_to_the_key_that_was_judged(site: Site, tenants: Tenants) -> None:
    acme, _ = tenants
    upload = site("s3").create_multipart_upload(Bucket=acme.bucket, Key="keep/x")["UploadId"]
    acme.grant("own", allow(["s3:PutObject", "s3:AbortMultipartUpload"], f"arn:aws:s3:::{acme.bucket}/free"))
    part = {"Bucket": acme.bucket, "Key": "free", "UploadId": upload}
    assert "is not one of free" in refusal(lambda: acme.s3.upload_part(**part, PartNumber=1, Body=b"x"))
    assert "is not one of free" in refusal(lambda: acme.s3.abort_multipart_upload(**part))
