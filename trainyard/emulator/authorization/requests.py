"""An HTTP request to AWS, taken apart as far as authorization needs it, and put together again in one reading.

What is judged must be what moto executes, and moto reads requests generously: the service from the first field of
any Authorization header, the operation from the query, a header or a JSON text that looks like a form. So a request
has exactly one accepted form here, and what goes on to moto is rewritten from what was judged (`forward`).
"""

import functools
import io
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, unquote_plus, urlencode

import botocore.session

from trainyard.emulator.authorization.plain import make_plain

_SCOPE = r"([A-Z0-9]{16,128})/(\d{8})/([a-z]{2}(?:-[a-z]+)+-\d)/([a-z0-9-]+)/aws4_request"
_AUTHORIZATION = re.compile(
    rf"AWS4-HMAC-SHA256 Credential={_SCOPE}, ?SignedHeaders=([a-z0-9;_.-]+), ?Signature=([0-9a-f]{{64}})"
)
_PRESIGNED = re.compile(_SCOPE)
_QUERY_SIGNATURE_NAMES = frozenset(
    ["x-amz-algorithm", "x-amz-credential", "x-amz-signature", "x-amz-security-token", "awsaccesskeyid", "signature"]
)
_V4_QUERY = ("X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Signature", "X-Amz-Security-Token")
_V2_QUERY = ("AWSAccessKeyId", "Signature", "x-amz-security-token")
_TARGET = re.compile(r"[A-Za-z0-9_.-]+\.([A-Za-z0-9]+)")
_INVOKE_PATH = re.compile(
    r"/2015-03-31/functions/((?:arn:aws:lambda:[a-z0-9-]+:\d{12}:function:)?[A-Za-z0-9_-]{1,64})/invocations"
)
_RPC_PATH = re.compile(r"/service/([A-Za-z0-9_]+)/operation/([A-Za-z0-9]+)")
_MAX_BODY_BYTES = 16 * 1024 * 1024
_JSON_TYPES = ("application/json", "application/x-amz-json-1.0", "application/x-amz-json-1.1")
_FORM_TYPE = "application/x-www-form-urlencoded"

OPERATION_KEY = "trainyard.operation"
"""WSGI: the operation that was judged; moto is made to execute that one."""
_IAM_PREFIX = {"monitoring": "cloudwatch", "email": "ses"}
"""Signing name to IAM prefix, where they differ."""
REST_JSON_SERVICES = ("batch", "lambda", "scheduler", "eks", "resource-groups")


@dataclass(frozen=True)
class AwsRequest:
    """One request. `operation` is empty where it could not be told: then nothing may be allowed."""

    service: str
    """IAM prefix: s3, sagemaker, cloudwatch."""
    operation: str
    """Name of the API operation; for S3 left to the s3 module."""
    region: str
    access_key_id: str
    session_token: str
    method: str
    path: str
    """Decoded, with its leading slash."""
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    """Lower-case names."""
    protocol: str
    """json, query, ec2, rest-json, rest-xml or cbor: how the client wants to be answered."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    body: bytes = b""
    authorization: str = ""
    """The Authorization header that says what was judged, whether the signature stood there or in the query."""
    ambiguity: str = ""
    """Why the request could be read in more than one way: then nothing may be allowed. Empty: it can't."""
    canonical: tuple[str, bytes] | None = None
    """Content type and body that have the one reading that was judged; None: as they came."""

    def text(self, name: str, default: str = "") -> str:
        """A scalar parameter as text."""
        value = self.parameters.get(name)
        return default if value is None else str(value)


def parse(environ: dict[str, Any]) -> AwsRequest:
    """The request in a WSGI environ, which is made plain first; ValueError for a form that AWS would not take.

    The body is read (and put back) except for S3, whose bodies are data.
    """
    make_plain(environ)
    headers = {
        name[5:].replace("_", "-").lower(): str(value) for name, value in environ.items() if name.startswith("HTTP_")
    }
    if environ.get("CONTENT_TYPE"):
        headers["content-type"] = environ["CONTENT_TYPE"]
    query = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
    credentials = _credentials(headers, query)
    prefix = _IAM_PREFIX.get(credentials.service, credentials.service)
    repeated = sorted(name for name, values in query.items() if len(values) > 1)
    common: dict[str, Any] = {
        "service": prefix,
        "region": credentials.region,
        "access_key_id": credentials.access_key_id,
        "session_token": credentials.session_token,
        "method": environ["REQUEST_METHOD"],
        "path": unquote(environ["RAW_URI"].partition("?")[0]),
        "query": query,
        "headers": headers,
        "authorization": credentials.authorization,
    }
    if prefix == "s3":
        ambiguity = f"?{repeated[0]} stands twice" if repeated else _s3_ambiguity(environ, query)
        # Only a multi-object delete names its objects in the body.
        body = _read_body(environ) if environ["REQUEST_METHOD"] == "POST" and "delete" in query else b""
        return AwsRequest(operation="", protocol="rest-xml", body=body, ambiguity=ambiguity, **common)
    body = _read_body(environ)
    return AwsRequest(body=body, **common, **_operation(prefix, common, body))


def forward(environ: dict[str, Any], request: AwsRequest, *, judged: bool) -> None:
    """Rewrite what goes on to moto so that it reads the service, and of a judged request the rest, as we did."""
    environ["HTTP_AUTHORIZATION"] = request.authorization
    environ.pop(OPERATION_KEY, None)
    if not judged or request.service == "s3":
        return
    environ[OPERATION_KEY] = request.operation
    if request.canonical is not None:
        environ["CONTENT_TYPE"], body = request.canonical
        environ["wsgi.input"] = io.BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body))


@dataclass(frozen=True)
class _Credentials:
    access_key_id: str = ""
    session_token: str = ""
    region: str = "us-east-1"
    service: str = "s3"
    date: str = "19700101"

    @property
    def authorization(self) -> str:
        scope = f"{self.access_key_id or 'NOBODY'}/{self.date}/{self.region}/{self.service}/aws4_request"
        return f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature={'0' * 64}"


def _credentials(headers: Mapping[str, str], query: Mapping[str, list[str]]) -> _Credentials:
    """From the one form of the header, or from a presigned URL of S3: nothing else is presigned here."""
    in_query = [name for name in query if name.lower() in _QUERY_SIGNATURE_NAMES]
    authorization = headers.get("authorization")
    if authorization is not None:
        match = _AUTHORIZATION.fullmatch(authorization)
        if match is None:
            raise ValueError("the Authorization header is not AWS4-HMAC-SHA256 Credential=..., SignedHeaders=..., ...")
        if in_query:
            raise ValueError(f"signed twice, in the Authorization header and by ?{in_query[0]}")
        return _Credentials(match[1], headers.get("x-amz-security-token", ""), match[3], match[4], match[2])
    if not in_query:
        return _Credentials()
    allowed = _V4_QUERY if "X-Amz-Credential" in query else _V2_QUERY
    strange = [name for name in in_query if name not in allowed or len(query[name]) > 1]
    if strange or "x-amz-security-token" in headers:
        raise ValueError(f"?{(strange or in_query)[0]} does not belong into one presigned URL")
    if allowed is _V2_QUERY:
        token = query.get("x-amz-security-token", [""])[0]
        return _Credentials(query.get("AWSAccessKeyId", [""])[0], token)
    match = _PRESIGNED.fullmatch(query["X-Amz-Credential"][0])
    if match is None or match[4] != "s3":
        raise ValueError("X-Amz-Credential must be KEY/DATE/REGION/s3/aws4_request: only S3 has presigned URLs here")
    token = query.get("X-Amz-Security-Token", [""])[0]
    return _Credentials(match[1], token, match[3], match[4], match[2])


def _read_body(environ: dict[str, Any]) -> bytes:
    stream = environ["wsgi.input"]
    if environ.get("HTTP_TRANSFER_ENCODING"):
        if str(environ["HTTP_TRANSFER_ENCODING"]).lower() != "chunked" or environ.get("CONTENT_LENGTH"):
            raise ValueError("a body has either a length or Transfer-Encoding: chunked")
        body: bytes = stream.read(_MAX_BODY_BYTES + 1)
    else:
        length = int(environ.get("CONTENT_LENGTH") or "0")
        body = stream.read(min(length, _MAX_BODY_BYTES + 1)) if length > 0 else b""
    if len(body) > _MAX_BODY_BYTES:
        raise ValueError(f"the body is larger than {_MAX_BODY_BYTES} bytes")
    environ["wsgi.input"] = io.BytesIO(body)
    environ["CONTENT_LENGTH"] = str(len(body))
    environ.pop("HTTP_TRANSFER_ENCODING", None)
    environ.pop("wsgi.input_terminated", None)
    return body


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _s3_ambiguity(environ: Mapping[str, Any], query: Mapping[str, list[str]]) -> str:
    """What would let S3 parameters come from elsewhere than the query."""
    if _media_type(str(environ.get("CONTENT_TYPE", ""))) in (_FORM_TYPE, "multipart/form-data"):
        return "the body of an S3 request is no form here"
    with_body = environ.get("HTTP_TRANSFER_ENCODING") or environ.get("CONTENT_LENGTH", "") not in ("", "0")
    if with_body and environ["REQUEST_METHOD"] in ("GET", "HEAD", "DELETE"):
        return f"{environ['REQUEST_METHOD']} takes no body"
    if "%" in environ["RAW_URI"].partition("?")[0].split("/")[1]:
        return "the name of a bucket is not percent-encoded"
    if ".amazonaws.com" in environ["RAW_URI"].lower():
        return "the URL names an AWS endpoint, which would choose another region"
    if "delete" in query and str(environ.get("HTTP_X_AMZ_CONTENT_SHA256", "")).startswith("STREAMING-"):
        return "the list of objects to delete comes in chunks"
    return ""


def _operation(service: str, common: Mapping[str, Any], body: bytes) -> dict[str, Any]:
    """Operation, protocol, parameters, ambiguity and canonical body of anything but S3."""
    headers, query, path, method = common["headers"], common["query"], common["path"], common["method"]
    ambiguity = ""
    if method != "POST":
        ambiguity = f"{method} where AWS takes POST"
    elif query:
        ambiguity = f"?{next(iter(query))}: parameters belong into the body"
    elif headers.get("content-encoding"):
        ambiguity = "a compressed body"
    target = headers.get("x-amz-target")
    rpc = _RPC_PATH.fullmatch(path)
    result: dict[str, Any]
    if target is not None:
        named = _TARGET.fullmatch(target)
        result = {"operation": named[1] if named else "", "protocol": "json", **_json(headers, body)}
    elif rpc:
        return {"operation": rpc[2], "protocol": "cbor", "ambiguity": ambiguity}
    elif service == "lambda":
        # Its body is the event, no parameters; of Lambda's operations tenants have this one alone.
        invoked = _INVOKE_PATH.fullmatch(path)
        function = {"FunctionName": invoked[1]} if invoked else {}
        operation = "Invoke" if invoked else _rest_operation(service, method, path)
        return {"operation": operation, "protocol": "rest-json", "parameters": function, "ambiguity": ambiguity}
    elif service in REST_JSON_SERVICES:
        operation = _rest_operation(service, method, path)
        result = {"operation": operation, "protocol": "rest-json", **_json(headers, body)}
        return {**result, "ambiguity": ambiguity or result["ambiguity"]}
    else:
        result = _form(service, query, headers, body)
    if path != "/":
        ambiguity = ambiguity or f"path {path} where AWS takes /"
    return {**result, "ambiguity": ambiguity or result["ambiguity"]}


def _json(headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """Parameters of a JSON body, and the body without the characters that moto would split it at as a form."""
    ambiguity = ""
    if _media_type(headers.get("content-type", "")) not in (*_JSON_TYPES, ""):
        ambiguity = f"content type {headers['content-type']} where AWS takes JSON"
    try:
        content = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        return {"parameters": {}, "ambiguity": "the body is not a JSON object"}
    text = json.dumps(content).replace("&", "\\u0026").replace("=", "\\u003d").replace(";", "\\u003b")
    kind = headers.get("content-type") or _JSON_TYPES[-1]
    return {"parameters": content, "ambiguity": ambiguity, "canonical": (kind, text.encode())}


def _form(service: str, query: Mapping[str, list[str]], headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """Parameters of the query protocol."""
    ambiguity = ""
    if _media_type(headers.get("content-type", "")) not in (_FORM_TYPE, ""):
        ambiguity = f"content type {headers['content-type']} where AWS takes {_FORM_TYPE}"
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, errors="strict")
    except ValueError:
        pairs, ambiguity = [], "the body is not a form in UTF-8"
    repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1 or name in query]
    if repeated:
        ambiguity = f"{repeated[0]} stands twice"
    flat = {**{name: values[0] for name, values in query.items()}, **dict(pairs)}
    return {
        "operation": flat.get("Action", ""),
        "protocol": "ec2" if service == "ec2" else "query",
        "parameters": _nest(flat),
        "ambiguity": ambiguity,
        "canonical": (f"{_FORM_TYPE}; charset=utf-8", urlencode(pairs).encode()),
    }


def _nest(flat: Mapping[str, str]) -> dict[str, Any]:
    """Query-protocol names with their lists gathered: `Tags.member.1.Key` under Tags, in order, as dictionaries."""
    result: dict[str, Any] = {}
    for name in sorted(flat, key=lambda item: [int(part) if part.isdigit() else -1 for part in item.split(".")]):
        parts = [part for part in name.split(".") if part != "member"]
        if len(parts) == 1:
            result[name] = flat[name]
        elif parts[1].isdigit():
            items = result.setdefault(parts[0], {})
            if isinstance(items, dict):
                if len(parts) == 2:
                    items[parts[1]] = flat[name]
                else:
                    items.setdefault(parts[1], {})[".".join(parts[2:])] = flat[name]
    return {name: list(value.values()) if isinstance(value, dict) else value for name, value in result.items()}


@functools.cache
def _routes(service: str) -> list[tuple[str, re.Pattern[str], str]]:
    model = botocore.session.get_session().get_service_model(service)
    routes = []
    for name in model.operation_names:
        http = model.operation_model(name).http
        pattern = re.sub(r"\\{[^}]*?\\}", "[^/]+", re.escape(http["requestUri"].partition("?")[0]))
        routes.append((http["method"], re.compile(pattern), name))
    return sorted(routes, key=lambda route: route[1].pattern.count("[^/]+"))  # the literal path before the general one


def _rest_operation(service: str, method: str, path: str) -> str:
    for route_method, pattern, name in _routes(service):
        if route_method == method and pattern.fullmatch(path):
            return name
    return ""


def decode_plus(text: str) -> str:
    """A header such as x-amz-copy-source, decoded."""
    return unquote_plus(text)
