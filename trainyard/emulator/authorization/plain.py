"""Take out of a WSGI environ what its readers could read differently: the URL, the host, headers that steer moto."""

import re
from typing import Any
from urllib.parse import unquote_to_bytes

_METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")
_URI = re.compile(r"/(?!/)[!\"$-\[\]-~]*")
"""Printable ASCII without # (a fragment to some readers) and backslash; no second slash, which would open a host."""
_HOST = re.compile(r"(?:([a-z0-9][a-z0-9.-]*)\.)?(localhost|127\.0\.0\.1)(:\d{1,5})?", re.I)
_STEERING_HEADERS = (
    "HTTP_X_MOTO_ACCOUNT_ID",
    "HTTP_X_HTTP_METHOD_OVERRIDE",
    "HTTP_X_METHOD_OVERRIDE",
    "HTTP_X_FORWARDED_HOST",
    "HTTP_X_FORWARDED_PREFIX",
    "HTTP_X_FORWARDED_PROTO",
    "HTTP_FORWARDED",
    "HTTP_X_ORIGINAL_URL",
    "HTTP_X_REWRITE_URL",
)


def make_plain(environ: dict[str, Any]) -> None:
    """Rewrite `environ` in place; ValueError where it has no plain form.

    One URI, of which path and query are views; S3's bucket in the path, never in the host name; the account and the
    region where the signature says them.
    """
    if environ["REQUEST_METHOD"] not in _METHODS:
        raise ValueError(f"the method must be one of {', '.join(_METHODS)}")
    uri = str(environ.get("RAW_URI") or environ.get("REQUEST_URI") or "")
    if not _URI.fullmatch(uri):
        raise ValueError("the request target must be a path in ASCII with one leading slash, without a fragment")
    host = _HOST.fullmatch(str(environ.get("HTTP_HOST", "")))
    if host is None or (host[1] and host[2] != "localhost"):
        raise ValueError("the Host header must be the emulator's own, or BUCKET.localhost")
    if host[1]:
        uri = f"/{host[1].lower()}{uri}"
    environ["HTTP_HOST"] = f"localhost{host[3] or ''}"
    path, _, query = uri.partition("?")
    environ["RAW_URI"] = environ["REQUEST_URI"] = uri
    environ["SCRIPT_NAME"] = ""
    environ["PATH_INFO"] = unquote_to_bytes(path).decode("latin-1")
    environ["QUERY_STRING"] = query
    for name in _STEERING_HEADERS:
        environ.pop(name, None)
    if "HTTP_USER_AGENT" in environ:  # moto would take `region/NAME` in it for the region
        environ["HTTP_USER_AGENT"] = str(environ["HTTP_USER_AGENT"]).replace("region/", "region:")
