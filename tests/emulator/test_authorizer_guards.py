"""Each guard of the authorizer by itself: the first reason to refuse a request, before any later one could.

The tests over HTTP show that such requests get nothing done; there a second guard hides the loss of the first.
"""

import io
import json
from typing import Any

import pytest

from trainyard.emulator.authorization.middleware import Authorizer
from trainyard.emulator.authorization.requests import parse

KEY = "AKIA" + "A" * 16
FORM = "application/x-www-form-urlencoded"
JSON = "application/x-amz-json-1.1"
LARGE = 16 * 1024 * 1024 + 1


def signed(service: str) -> str:
    scope = f"{KEY}/20260101/us-east-1/{service}/aws4_request"
    return f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature={'0' * 64}"


def environ(
    service: str, method: str = "POST", uri: str = "/", body: bytes = b"", kind: str = "", **headers: str
) -> dict[str, Any]:
    """A WSGI request, signed for `service` unless `Authorization` is among the headers ("" leaves it out)."""
    made = {"Authorization": signed(service), **headers}
    return {
        "REQUEST_METHOD": method,
        "RAW_URI": uri,
        "HTTP_HOST": "localhost:4566",
        "CONTENT_TYPE": kind,
        "CONTENT_LENGTH": str(len(body)) if body else "",
        "wsgi.input": io.BytesIO(body),
        **{f"HTTP_{name.upper().replace('-', '_')}": value for name, value in made.items() if value},
    }


SSM = {"X-Amz-Target": "AmazonSSM.GetParameter"}
QUERY_SIGNATURE = "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature=0"


@pytest.mark.parametrize(
    ("request_environ", "reason"),
    [
        (environ("sts", "GET", "/?Action=GetCallerIdentity&Version=2011-06-15"), "GET where AWS takes POST"),
        (environ("sts", uri="/?Action=GetCallerIdentity"), "?Action: parameters belong into the body"),
        (environ("sts", body=b"Action=x", kind=FORM, **{"Content-Encoding": "gzip"}), "a compressed body"),
        (environ("sts", body=b"Action=x", kind="text/plain"), f"content type text/plain where AWS takes {FORM}"),
        (environ("sts", body=b"Action=x&Action=y", kind=FORM), "Action stands twice"),
        (environ("sts", body=b"Action=%ff", kind=FORM), "the body is not a form in UTF-8"),
        (environ("sts", uri="/elsewhere", body=b"Action=x", kind=FORM), "path /elsewhere where AWS takes /"),
        (environ("ssm", body=b"{}", kind="text/plain", **SSM), "content type text/plain where AWS takes JSON"),
        (environ("ssm", body=b"[]", kind=JSON, **SSM), "the body is not a JSON object"),
        (environ("ssm", body=b"{" * 100_000, kind=JSON, **SSM), "the body is not a JSON object"),
        (environ("ssm", uri="/elsewhere", body=b"{}", kind=JSON, **SSM), "path /elsewhere where AWS takes /"),
        (environ("batch", "GET", "/v1/describejobqueues"), "GET where AWS takes POST"),
        (environ("s3", "GET", "/b?prefix=a&prefix=b"), "?prefix stands twice"),
        (environ("s3", "PUT", "/b/k", b"x", FORM), "the body of an S3 request is no form here"),
        (environ("s3", "PUT", "/b/k", b"x", "multipart/form-data; boundary=x"), "the body of an S3 request is no form"),
        (environ("s3", "GET", "/b/k", b"x"), "GET takes no body"),
        (environ("s3", "GET", "/b/k", **{"Transfer-Encoding": "chunked"}), "GET takes no body"),
        (environ("s3", "GET", "/%62/k"), "the name of a bucket is not percent-encoded"),
        (environ("s3", "GET", "/b/s3.eu-west-1.amazonaws.com"), "the URL names an AWS endpoint"),
        (
            environ("s3", "POST", "/b?delete", b"x", **{"X-Amz-Content-Sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER"}),
            "the list of objects to delete comes in chunks",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_second_reading_is_named(request_environ: dict[str, Any], reason: str) -> None:
    assert parse(request_environ).ambiguity.startswith(reason)


@pytest.mark.parametrize(
    ("request_environ", "reason"),
    [
        (environ("sts", Authorization="AWS AKIA:signature"), "the Authorization header is not AWS4-HMAC-SHA256"),
        (environ("s3", "GET", f"/b/k?{QUERY_SIGNATURE}"), "signed twice"),
        (
            environ("", "GET", f"/b/k?X-Amz-Credential={KEY}/20260101/us-east-1/sts/aws4_request", Authorization=""),
            "X-Amz-Credential must be KEY/DATE/REGION/s3/aws4_request",
        ),
        (
            environ("", "GET", f"/b/k?AWSAccessKeyId={KEY}&Signature=x&X-Amz-Signature=y", Authorization=""),
            "?X-Amz-Signature does not belong into one presigned URL",
        ),
        (environ("sts", body=b"x" * LARGE, kind=FORM), f"the body is larger than {LARGE - 1} bytes"),
        (
            environ("sts", body=b"Action=x", kind=FORM, **{"Transfer-Encoding": "chunked"}),
            "a body has either a length or Transfer-Encoding",
        ),
        (environ("s3", "PATCH", "/b/k"), "the method must be one of"),
        (environ("s3", "GET", "//b/k"), "the request target must be a path"),
        (environ("s3", "GET", "/b/k", Host="elsewhere.example.com"), "the Host header must be the emulator's own"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_aws_would_not_read_is_refused_before_anything_is_judged(
    request_environ: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match="^" + reason.replace("?", r"\?")):
        parse(request_environ)


def test_an_odd_request_is_refused_whoever_may_do_it() -> None:
    """What has two readings is refused before anybody looks at its operation: even one that needs nothing."""
    authorizer = Authorizer(None, account="123456789012", admin_access_key_id=KEY)
    odd = parse(environ("ssm", body=json.dumps({"Name": "/x"}).encode(), kind="text/plain", **SSM))
    with pytest.raises(Exception, match="sees more than one way to read it: content type text/plain"):
        authorizer.checks(odd)
    plain = parse(environ("ssm", body=json.dumps({"Name": "/x"}).encode(), kind=JSON, **SSM))
    assert [check.action for check in authorizer.checks(plain)] == ["ssm:GetParameter"]


@pytest.mark.parametrize(
    "path",
    ["/moto-api/reset", "/%6doto-api/reset", "/latest/meta-data", "/favicon.ico", "/v20180820/x", "/@connections/x"],
)
def test_motos_own_paths_are_closed_even_to_the_root(path: str) -> None:
    """Nobody judges the root's requests, so this is all that stands before moto's back door."""
    reached: list[str] = []
    status: list[str] = []

    def moto(request: dict[str, Any], start_response: Any) -> list[bytes]:
        reached.append(request["PATH_INFO"])
        return [b""]

    authorizer = Authorizer(moto, account="123456789012", admin_access_key_id=KEY)
    body = b"".join(authorizer(environ("s3", "GET", path), lambda line, _: status.append(line)))
    assert (reached, status) == ([], ["403 Forbidden"])
    assert b"moto's own paths closed" in body
