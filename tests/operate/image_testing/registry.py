"""A registry's HTTP API on loopback, as far as a push and an inspection go: it keeps what it is sent, by digest."""

import hashlib
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Registry(ThreadingHTTPServer):
    """Blobs and manifests in memory."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[str, bytes]] = {}
        """By tag and by digest: media type, bytes."""
        self.uploads: dict[str, bytes] = {}
        self.credentials: set[str] = set()


class Handler(BaseHTTPRequestHandler):
    """The few requests that skopeo makes."""

    protocol_version = "HTTP/1.1"
    server: Registry

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test says what it saw."""

    def do_GET(self) -> None:
        """The API itself, a manifest, a blob."""
        if not self._is_known():
            return None
        path = self.path.partition("?")[0]
        if path == "/v2/":
            return self._answer(200)
        name = path.rsplit("/", 1)[1]
        if "/manifests/" in path and name in self.server.manifests:
            kind, content = self.server.manifests[name]
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            return self._answer(200, {"Content-Type": kind, "Docker-Content-Digest": digest}, content)
        if "/blobs/" in path and name in self.server.blobs:
            return self._answer(200, {}, self.server.blobs[name])
        if path.endswith("/tags/list"):
            return self._answer(200, {"Content-Type": "application/json"}, b'{"tags": []}')
        return self._answer(404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """An upload begins."""
        self._read()
        if not self._is_known():
            return
        name = uuid.uuid4().hex
        self.server.uploads[name] = b""
        self._answer(202, {"Location": f"{self.path.partition('?')[0]}{name}"})

    def do_PATCH(self) -> None:
        """A piece of it."""
        name = self.path.rsplit("/", 1)[1]
        self.server.uploads[name] += self._read()
        self._answer(202, {"Location": self.path, "Range": f"0-{len(self.server.uploads[name]) - 1}"})

    def do_PUT(self) -> None:
        """Its end, or a manifest."""
        content = self._read()
        path, _, query = self.path.partition("?")
        name = path.rsplit("/", 1)[1]
        if "/manifests/" in path:
            kept = (self.headers["Content-Type"], content)
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            self.server.manifests |= {name: kept, digest: kept}
            return self._answer(201, {"Docker-Content-Digest": digest})
        content = self.server.uploads.pop(name) + content
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if digest not in query.replace("%3A", ":"):
            return self._answer(400)
        self.server.blobs[digest] = content
        return self._answer(201, {"Docker-Content-Digest": digest})

    def _is_known(self) -> bool:
        """Whether the request says who makes it; else it is told to."""
        given = self.headers.get("Authorization")
        if not given:
            self._answer(401, {"WWW-Authenticate": 'Basic realm="registry"'})
            return False
        self.server.credentials.add(given)
        return True

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _answer(self, code: int, headers: dict[str, str] | None = None, content: bytes = b"") -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serving() -> Iterator[tuple[str, Registry]]:
    """A registry and its address."""
    registry = Registry()
    thread = threading.Thread(target=registry.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{registry.server_address[1]}", registry
    finally:
        registry.shutdown()
        thread.join()
        registry.server_close()
