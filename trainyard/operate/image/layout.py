"""An OCI layout, read whole: configuration, history, every file of every layer; nothing is unpacked.

Each blob's SHA-256 is compared with its name on the way. What the rules and the list of packages look at is kept.
"""

import gzip
import hashlib
import io
import json
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from trainyard.errors import InputError

MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
MAX_TEXT_BYTES = 128 * 1024
MAX_PACKAGE_LIST_BYTES = 32 * 1024**2

_PACKAGE_LISTS = re.compile(r"(^|/)var/lib/dpkg/(status|status\.d/[^/]+)$")
_METADATA = re.compile(r"\.(dist-info/METADATA|egg-info/PKG-INFO)$")
_SEARCHED = re.compile(r"^((root|home|etc|opt/ml|app|workspace|run|srv|tmp|var/tmp)/|opt/trainyard/[^/]+$)")
_OPAQUE = ".wh..wh..opq"


@dataclass(frozen=True)
class File:
    """A file, folder or link of a layer."""

    path: str
    """Without the leading slash."""
    layer: int
    kind: str
    """`file`, `folder`, `link` or `other`."""
    mode: int
    size: int
    user: int
    text: bytes | None = None
    """Contents, where something looks at them."""
    target: str = ""


@dataclass(frozen=True)
class Image:
    """What a layout holds."""

    digest: str
    """The manifest's, by which jobs name the image."""
    manifest: Mapping[str, Any]
    manifest_text: str
    config: Mapping[str, Any]
    layers: tuple[tuple[File, ...], ...]
    files: Mapping[str, File] = field(default_factory=dict)
    """As a container sees them: later layers over earlier ones."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The configuration's part about how a container starts."""
        return self.config.get("config") or {}

    @property
    def labels(self) -> Mapping[str, str]:
        """Its labels."""
        return self.settings.get("Labels") or {}

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a container starts with."""
        pairs = (item.partition("=") for item in self.settings.get("Env") or [])
        return {name: value for name, _, value in pairs}

    @property
    def accelerator(self) -> str:
        """`cuda` or `cpu`, as its label says; `cuda` where none does."""
        return self.labels.get("io.trainyard.accelerator") or "cuda"


def named(folder: Path) -> str:
    """The digest of the one image of the layout `folder`, as it says; InputError where there is none, or several."""
    index = _json(folder / "index.json", f"{folder} is no OCI layout (scripts/build_image makes one)")
    manifests = [item for item in index.get("manifests") or [] if item.get("mediaType") in MANIFESTS]
    if len(manifests) != 1:
        raise InputError(f"{folder}/index.json: names {len(manifests)} images, must be one")
    return str(manifests[0]["digest"])


def read(folder: Path) -> Image:
    """That image; InputError too where a blob is damaged."""
    digest = named(folder)
    text = _blob(folder, digest)
    manifest = json.loads(text)
    config = json.loads(_blob(folder, manifest["config"]["digest"]))
    layers = tuple(tuple(_layer(folder, item, number)) for number, item in enumerate(manifest["layers"]))
    return Image(digest, manifest, text.decode(), config, layers, merged(layers))


def merged(layers: tuple[tuple[File, ...], ...]) -> dict[str, File]:
    """Every file that a container sees: whiteouts take away what lies below, a file takes a folder's place."""
    seen: dict[str, File] = {}
    for layer in layers:
        for item in layer:
            name = PurePosixPath(item.path)
            if name.name == _OPAQUE:
                _drop(seen, f"{name.parent}", item.layer, is_itself=False)
            elif name.name.startswith(".wh."):
                _drop(seen, str(name.parent / name.name.removeprefix(".wh.")), item.layer, is_itself=True)
        for item in layer:
            if not PurePosixPath(item.path).name.startswith(".wh."):
                if item.kind != "folder" and item.path in seen and seen[item.path].kind == "folder":
                    _drop(seen, item.path, item.layer, is_itself=False)
                seen[item.path] = item
    return seen


def _drop(seen: dict[str, File], path: str, layer: int, *, is_itself: bool) -> None:
    """Take away what earlier layers have under `path`."""
    prefix = "" if path == "." else f"{path}/"
    for other in [name for name in seen if name.startswith(prefix) or (is_itself and name == path)]:
        if seen[other].layer < layer:
            del seen[other]


def _layer(folder: Path, descriptor: Mapping[str, Any], number: int) -> Iterator[File]:
    kind, digest = str(descriptor["mediaType"]), str(descriptor["digest"])
    if kind.endswith("zstd"):
        raise InputError(
            f"{folder}: layer {number} is compressed by zstd, which isn't read here; "
            "`skopeo copy --dest-compress-format gzip` makes another"
        )
    path = _blob_path(folder, digest)
    with path.open("rb") as raw:
        hashed = _Hashed(raw)
        plain = io.BufferedReader(hashed, 1 << 20)
        stream = plain if kind.endswith("tar") else gzip.GzipFile(fileobj=plain)
        try:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for member in tar:
                    yield _file(tar, member, number)
            while stream.read(1 << 20):
                pass
        except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
            raise InputError(f"{path}: layer {number} can't be read: {error}; build the image again") from None
        if f"sha256:{hashed.digest()}" != digest:
            raise InputError(f"{path}: layer {number} is not what its name says; build or copy the image again")


def _file(tar: tarfile.TarFile, member: tarfile.TarInfo, layer: int) -> File:
    path = member.name.removeprefix("./").strip("/")
    kinds = {"file": member.isreg() or member.islnk(), "folder": member.isdir(), "link": member.issym()}
    kind = next((name for name, is_it in kinds.items() if is_it), "other")
    text = None
    if member.isreg() and is_read(path, member.size):
        content = tar.extractfile(member)
        text = content.read() if content else b""
    return File(path, layer, kind, member.mode, member.size, member.uid, text, member.linkname)


def is_read(path: str, size: int) -> bool:
    """Whether something looks into that file: lists of packages, and where people leave secrets."""
    if _PACKAGE_LISTS.search(path) or _METADATA.search(path):
        return size <= MAX_PACKAGE_LIST_BYTES
    return path.endswith("lib/os-release") or (size <= MAX_TEXT_BYTES and is_searched(path))


def is_searched(path: str) -> bool:
    """Whether people or programs may have left a secret there; packages' own files are no such place."""
    return _SEARCHED.match(path) is not None


class _Hashed(io.RawIOBase):
    """A file whose bytes are hashed as they are read."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._hash = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._raw.read(len(buffer))
        buffer[: len(content)] = content
        self._hash.update(content)
        return len(content)

    def digest(self) -> str:
        """Of all that is left too."""
        while content := self._raw.read(1 << 20):
            self._hash.update(content)
        return self._hash.hexdigest()


def _blob_path(folder: Path, digest: str) -> Path:
    algorithm, _, value = digest.partition(":")
    if algorithm != "sha256" or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise InputError(f"{folder}: {digest!r} is no SHA-256 digest")
    path = folder / "blobs" / algorithm / value
    if not path.is_file():
        raise InputError(f"{folder}: its blob {digest} is missing; build or copy the image again")
    return path


def _blob(folder: Path, digest: str) -> bytes:
    path = _blob_path(folder, digest)
    content = path.read_bytes()
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
        raise InputError(f"{path}: is not what its name says; build or copy the image again")
    return content


def _json(path: Path, mend: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(mend) from None
    if not isinstance(content, dict):
        raise InputError(mend)
    return content
