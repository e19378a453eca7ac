"""A door before S3 that can be made to fail: what a job's SDK calls instead of the emulator itself.

While `fault` is set, requests for objects under `/BUCKET/KEY` are answered as it says; all others pass:
- unavailable: 503; slow_down: 503 SlowDown; expired: 400 ExpiredToken;
- timeout: no answer for longer than the client waits; partial: half of the body goes on, then the line is cut;
- wrong_etag: an upload's answer has another ETag, and half of a download's bytes are others than were stored.
"""

import contextlib
import http.client
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Fault = Literal["unavailable", "slow_down", "expired", "timeout", "partial", "wrong_etag"]
CLIENT_SECONDS = 3.0
"""What jobs of a campaign wait for an answer, instead of a minute."""
_HOP_HEADERS = {"connection", "transfer-encoding", "content-length", "expect"}
_ANSWERS = {
    "unavailable": (503, "ServiceUnavailable"),
    "slow_down": (503, "SlowDown"),
    "expired": (400, "ExpiredToken"),
}


class S3Proxy:
    """Listens on a port of its own, in threads."""

    def __init__(self, host: str, port: int) -> None:
        """`host`, `port`: the emulator's."""
        self.fault: Fault | None = None
        self.num_disturbed: Counter[str] = Counter()
        proxy = self

        class Handler(_Handler):
            upstream = (host, port)
            door = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """A client that was killed hangs up in the middle: that is what a campaign is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: tuple[str, int]
    door: S3Proxy

    def _pass(self) -> None:
        fault = self.door.fault
        body = self._body()
        if fault is not None:
            self.door.num_disturbed[fault] += 1
        if fault in _ANSWERS:
            self._refuse(*_ANSWERS[fault])
            return
        if fault == "timeout":
            time.sleep(CLIENT_SECONDS + 1)
            self.close_connection = True
            return
        if fault == "partial":
            self._send_half(body)
            return
        self._relay(body, is_wrong=fault == "wrong_etag")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass

    def log_message(self, *_: Any) -> None:
        """Nothing: a campaign's output is its own."""

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _refuse(self, status: int, code: str) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        self._answer(status, [("Content-Type", "application/xml")], b"" if self.command == "HEAD" else body)

    def _send_half(self, body: bytes) -> None:
        """S3 gets the beginning of an upload and no more; the client gets no answer."""
        self.close_connection = True
        if body:
            with contextlib.suppress(OSError), contextlib.closing(self._connect()) as connection:
                self._begin(connection, len(body))
                connection.send(body[: len(body) // 2])

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.upstream, timeout=60)

    def _begin(self, connection: http.client.HTTPConnection, num_bytes: int) -> None:
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _HOP_HEADERS:
                connection.putheader(name, value)
        connection.putheader("Content-Length", str(num_bytes))
        connection.putheader("Connection", "close")
        connection.endheaders()

    def _relay(self, body: bytes, *, is_wrong: bool) -> None:
        with contextlib.closing(self._connect()) as connection:
            try:
                self._begin(connection, len(body))
                if body:
                    connection.send(body)
                answer = connection.getresponse()
                content = answer.read()
            except (OSError, http.client.HTTPException):
                self.close_connection = True
                return
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP_HEADERS]
        if self.command == "HEAD":
            headers.append(("Content-Length", answer.getheader("Content-Length") or "0"))
        if is_wrong:
            headers = [(name, '"0123456789"' if name.lower() == "etag" else value) for name, value in headers]
            if self.command == "GET" and "list-type" not in self.path:
                content = content[: len(content) // 2] + bytes(255 - byte for byte in content[len(content) // 2 :])
        self._answer(answer.status, headers, content)

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        with contextlib.suppress(OSError):
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
