"""One way to say what AWS refused: every boto error becomes one line with the action, the resource and the mend."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainyard.errors import AwsAwayError, AwsRefusedError

_MENDS = {
    "AccessDenied": "check the role's policy, or run `trainyard doctor`",
    "AccessDeniedException": "check the role's policy, or run `trainyard doctor`",
    "UnauthorizedOperation": "check the role's policy, or run `trainyard doctor`",
    "ExpiredToken": "sign in again (`aws sso login`) and repeat the command",
    "ExpiredTokenException": "sign in again (`aws sso login`) and repeat the command",
    "InvalidClientTokenId": "the credentials are not valid here: sign in again, or check AWS_PROFILE",
    "NoSuchBucket": "create it, or deploy the tenant's stack again",
    "ResourceLimitExceeded": "ask for a higher quota in Service Quotas, or use fewer instances",
    "ThrottlingException": "wait a moment and repeat the command",
    "RequestLimitExceeded": "wait a moment and repeat the command",
    "Throttling": "wait a moment and repeat the command",
}

_THROTTLES = frozenset(
    {
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestTimeout",
        "SlowDown",
    }
)
"""Said with statuses below 500, and over as soon as others ask less."""


def advice_for(code: str) -> str:
    """What to do about one of AWS's error codes; empty where nothing better than its own words is known."""
    return _MENDS.get(code, "")


ERROR_PAGE = "no answer but an error page"
"""Of a proxy, or of an emulator that lacks the call: nobody reads HTML in a line."""
DENIED_CODES = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "Forbidden"})
"""A policy's no, in the words of every service that we ask; any other refusal proves nothing about isolation."""


def error_code(error: BaseException) -> str:
    """The service's code of a botocore ClientError ("NoSuchKey", "404", ...); "" for any other error."""
    response: Any = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def is_missing(error: BaseException) -> bool:
    """Whether a ClientError says that the object, bucket or job isn't there."""
    return error_code(error) in {
        "404",
        "NoSuchKey",
        "NoSuchBucket",
        "NotFound",
        "ParameterNotFound",
        "ResourceNotFound",
    }


def is_conflict(error: BaseException) -> bool:
    """Whether a conditional write lost: the object exists already, or changed since it was read."""
    return error_code(error) in {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}


@contextmanager
def aws_errors(action: str, resource: str, mend: str = "") -> Iterator[None]:
    """Turn boto's errors inside into AwsRefusedError: "<action> <resource>: <why>; <mend>".

    `mend` is used where the service's own code suggests nothing better.
    """
    # botocore takes 0.1 s to import; verbs that never reach AWS must not pay for it.
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError, SSLError
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    try:
        with _transfers_causes():
            yield
    except ClientError as error:
        code = error_code(error)
        message = _one_line(str(error.response.get("Error", {}).get("Message", "")))
        if "<html" in message.lower():
            message = ERROR_PAGE
        why = f"{code}: {message}" if message else code
        advice = _MENDS.get(code, mend)
        kind = AwsAwayError if _is_passing(error) else AwsRefusedError
        raise kind(f"{action} {resource}: AWS refused: {why}" + (f"; {advice}" if advice else "")) from error
    except (Boto3Error, HTTPError) as error:  # an answer that broke off: of TLS the SDK wraps nothing
        raise AwsAwayError(f"{action} {resource}: {_one_line(str(error))}") from error
    except ResponseParserError as error:
        raise AwsRefusedError(f"{action} {resource}: {ERROR_PAGE}; is a proxy between here and AWS?") from error
    except BotoCoreError as error:
        is_away = isinstance(error, (HTTPClientError, ConnectionError)) and not isinstance(error, SSLError)
        kind = AwsAwayError if is_away else AwsRefusedError
        raise kind(f"{action} {resource}: {_client_side(error)}") from error


@contextmanager
def _transfers_causes() -> Iterator[None]:
    """What boto3's transfers wrap in errors of their own, out of its wrapping."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except Boto3Error as error:
        cause = error.__cause__ or error.__context__
        if not isinstance(cause, (BotoCoreError, ClientError)):
            raise
        raise cause from error


def _is_passing(error: Any) -> bool:
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    return status == 429 or status >= 500 or error_code(error) in _THROTTLES


def _client_side(error: Exception) -> str:
    name = type(error).__name__
    if name in {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}:
        return "no usable AWS credentials; run `aws sso login`, or set AWS_PROFILE"
    if name in {"TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError", "LoginRefreshTokenExpired"}:
        return "the AWS sign-in has expired; run `aws sso login`"
    if name == "ProfileNotFound":
        return f"{_one_line(str(error))}; set AWS_PROFILE to one of those in ~/.aws/config"
    if name in {"EndpointConnectionError", "ConnectTimeoutError", "ConnectionClosedError", "ReadTimeoutError"}:
        return f"AWS can't be reached ({_one_line(str(error))}); check the network, or that the emulator still runs"
    return _one_line(str(error)) or name


def _one_line(text: str) -> str:
    return " ".join(text.split())
