"""The authorizer in front of moto, and denials in the form that each protocol's clients read."""

import functools
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal
from xml.sax.saxutils import escape

import botocore.session

from trainyard.emulator.authorization import actions, key_states, s3
from trainyard.emulator.authorization.actions import Check, UnmappedError
from trainyard.emulator.authorization.decide import Judge
from trainyard.emulator.authorization.principals import Principal, Principals, UnknownCallerError
from trainyard.emulator.authorization.requests import AwsRequest, forward, parse
from trainyard.emulator.throttling import Throttle

# moto's back door (state reset and the like), its instance metadata with credentials, and S3's control plane, all of
# which it chooses by path alone, before it looks at who calls which service.
_CLOSED_PATHS = ("/moto-api", "/latest/", "/favicon.ico", "/v20180820", "/@connections")


def _is_judged(principal: Principal, request: AwsRequest) -> bool:
    """The root may do everything, but assumes only roles that trust it."""
    return not principal.is_root or f"{request.service}:{request.operation}" == "sts:AssumeRole"


OwnService = Callable[[AwsRequest], tuple[int, dict[str, Any]]]
"""A service that moto lacks: a request to the status and the JSON content of its answer."""


@functools.cache
def known_regions() -> frozenset[str]:
    """Those that an account of the partition `aws` may have."""
    return frozenset(botocore.session.get_session().get_available_regions("ec2"))


class Authorizer:
    """WSGI: lets a request through to the application only if the deployed policies allow it.

    `own` are services that answer in the application's place, by IAM prefix; `throttle` refuses what is allowed.
    """

    def __init__(
        self,
        application: Any,
        *,
        account: str,
        admin_access_key_id: str,
        throttle: Throttle | None = None,
        own: Mapping[str, OwnService] | None = None,
    ) -> None:
        self._application = application
        self._throttle = throttle or Throttle()
        self._own = own or {}
        self.principals = Principals(account, admin_access_key_id)
        self._judge = Judge(self.principals)
        self._s3 = s3.S3State(account)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        try:
            request = parse(environ)
        except (ValueError, KeyError) as error:
            return _respond(start_response, 400, "text/plain", f"not a request that AWS would read: {error}\n".encode())
        if environ["PATH_INFO"].startswith(_CLOSED_PATHS):  # made plain meanwhile: a bucket in the host counts
            return _respond(start_response, 403, "text/plain", b"the emulator keeps moto's own paths closed\n")
        try:
            principal = self._caller(request)
        except UnknownCallerError as error:
            _drain(environ)
            return deny(start_response, request, error.code, str(error))
        message = self._refusal(principal, request)
        if message is not None:
            _drain(environ)
            return deny(start_response, request, "AccessDenied", message)
        code, message = self._key_refusal(request)
        if code:
            _drain(environ)
            return deny(start_response, request, code, message, status=400)
        return self._answer(environ, start_response, principal, request)

    def _caller(self, request: AwsRequest) -> Principal:
        if request.region not in known_regions():
            reason = f"Credential should be scoped to a valid region, which {request.region} is not."
            raise UnknownCallerError("SignatureDoesNotMatch", reason)
        return self.principals.resolve(request.access_key_id, request.session_token)

    def _answer(self, environ: dict[str, Any], start_response: Any, principal: Principal, request: AwsRequest) -> Any:
        """What an allowed request gets."""
        if self._throttle.refuses(f"{request.service}:{request.operation}"):
            _drain(environ)
            return deny(start_response, request, "Throttling", "Rate exceeded")
        own = self._own.get(request.service)
        if own is not None:
            status, content = own(request)
            return _respond(start_response, status, "application/x-amz-json-1.1", json.dumps(content).encode())
        forward(environ, request, judged=_is_judged(principal, request))
        return self._application(environ, start_response)

    def _refusal(self, principal: Principal, request: AwsRequest) -> str | None:
        if not _is_judged(principal, request):
            return None
        try:
            checks = self.checks(request)
        except UnmappedError as error:
            action = f"{request.service}:{request.operation or request.method}"
            return f"User: {principal.session_arn} is not authorized to perform: {action} because {error}"
        for check in checks:
            denial = self._judge.deny(principal, check, request.region)
            if denial is not None:
                return denial.message
        return None

    def _key_refusal(self, request: AwsRequest) -> tuple[str, str]:
        """Of a key that is gone or out of service, to the root too."""
        if request.service not in ("s3", "kms"):
            return "", ""
        try:
            return key_states.refusal(request, self.checks(request), self.principals.key_state)
        except UnmappedError:  # only the root's, who is not judged
            return "", ""

    def checks(self, request: AwsRequest) -> list[Check]:
        """What `request` needs to be allowed; UnmappedError where that can't be told."""
        if request.ambiguity:
            raise UnmappedError(f"the emulator's authorizer sees more than one way to read it: {request.ambiguity}")

        def key_arn(given: str) -> str:
            return self.principals.key_arn(given, request.region)

        if request.service == "s3":
            return s3.checks_for(request, self._s3, key_arn)
        checks = actions.checks_for(request, self.principals.account, self.principals.role_arn, key_arn)
        return [self._with_tags(check) for check in checks] if request.service == "batch" else checks

    def _with_tags(self, check: Check) -> Check:
        """The tags of a job in a training queue, which its id says nothing of."""
        tags = self.principals.service_job_tags(check.resource)
        stated = {f"aws:resourcetag/{key}".lower(): value for key, value in tags.items()}
        return replace(check, context={**check.context, **stated})


def _drain(environ: dict[str, Any]) -> None:
    """Read a refused upload to its end: a client that is still sending would see a reset, not the answer."""
    try:
        left = int(environ.get("CONTENT_LENGTH") or 0)
    except ValueError:
        return
    while left > 0:
        chunk = environ["wsgi.input"].read(min(left, 1024 * 1024))
        if not chunk:
            return
        left -= len(chunk)


_STATUS = {200: "200 OK", 400: "400 Bad Request", 403: "403 Forbidden"}
_CODES = {
    # AWS's JSON services, EC2 and S3 name the same failures differently.
    "InvalidClientTokenId": {"json": "UnrecognizedClientException", "rest-xml": "InvalidAccessKeyId"},
    "ExpiredToken": {"json": "ExpiredTokenException", "rest-xml": "ExpiredToken"},
    "MissingAuthenticationToken": {"json": "MissingAuthenticationTokenException", "rest-xml": "AccessDenied"},
    "SignatureDoesNotMatch": {"json": "InvalidSignatureException", "ec2": "AuthFailure"},
    "Throttling": {"json": "ThrottlingException", "ec2": "RequestLimitExceeded", "rest-xml": "SlowDown"},
}


def _respond(
    start_response: Any, status: int, content_type: str, body: bytes, extra: tuple[tuple[str, str], ...] = ()
) -> list[bytes]:
    headers = [
        ("Content-Type", content_type),
        ("Content-Length", str(len(body))),
        ("x-amzn-RequestId", str(uuid.uuid4())),
        *extra,
    ]
    start_response(_STATUS[status], headers)
    return [body]


def deny(
    start_response: Any, request: AwsRequest, code: str, message: str, *, status: Literal[400, 403] = 403
) -> list[bytes]:
    """Answer with an error that the request's own SDK turns into a ClientError with `message`."""
    family = "json" if request.protocol in ("json", "rest-json", "cbor") else request.protocol
    named = _CODES.get(code, {}).get(family, code)
    if request.protocol == "rest-xml":
        body = b"" if request.method == "HEAD" else _s3_error(named, message, request.path)
        return _respond(start_response, status, "application/xml", body)
    if request.protocol == "ec2":
        named = (
            "UnauthorizedOperation"
            if code == "AccessDenied"
            else "AuthFailure"
            if code == "InvalidClientTokenId"
            else named
        )
        error = f"<Errors><Error><Code>{named}</Code><Message>{escape(message)}</Message></Error></Errors>"
        text = f"<Response>{error}<RequestID>{uuid.uuid4()}</RequestID></Response>"
        return _respond(start_response, 403, "text/xml", text.encode())
    if request.protocol == "query":
        named = "AuthorizationError" if request.service == "sns" and code == "AccessDenied" else named
        error = f"<Error><Type>Sender</Type><Code>{named}</Code><Message>{escape(message)}</Message></Error>"
        text = f"<ErrorResponse>{error}<RequestId>{uuid.uuid4()}</RequestId></ErrorResponse>"
        return _respond(start_response, 403, "text/xml", text.encode())
    named = "AccessDeniedException" if code == "AccessDenied" else named
    if request.protocol == "cbor":
        content = _cbor_map({"__type": named, "message": message})
        return _respond(start_response, 403, "application/cbor", content, (("smithy-protocol", "rpc-v2-cbor"),))
    body = json.dumps({"__type": named, "message": message, "Message": message}).encode()
    return _respond(
        start_response,
        403 if request.protocol == "rest-json" else 400,
        "application/x-amz-json-1.1",
        body,
        (("x-amzn-ErrorType", named),),
    )


def _s3_error(code: str, message: str, path: str) -> bytes:
    resource = f"<Resource>{escape(path)}</Resource><RequestId>{uuid.uuid4()}</RequestId>"
    error = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message>{resource}</Error>"
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{error}'.encode()


def _cbor_map(content: dict[str, str]) -> bytes:
    """A map of texts in CBOR (RFC 8949): major type 5 over pairs of major type 3."""

    def text(value: str) -> bytes:
        data = value.encode()
        return _cbor_head(3, len(data)) + data

    return _cbor_head(5, len(content)) + b"".join(text(key) + text(value) for key, value in content.items())


def _cbor_head(major: int, length: int) -> bytes:
    if length < 24:
        return bytes([major << 5 | length])
    if length < 256:
        return bytes([major << 5 | 24, length])
    return bytes([major << 5 | 25]) + length.to_bytes(2, "big")
