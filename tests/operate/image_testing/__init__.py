"""Small OCI layouts for the tests of the image's rules: a good one, and what is done to it."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PINS = {"numpy": "2.5.0", "pydantic": "2.12.0"}
EPOCH = 1767225600


@dataclass
class Entry:
    """A file of a layer."""

    text: str = ""
    mode: int = 0o644
    user: int = 0
    kind: bytes = tarfile.REGTYPE


@dataclass
class Draft:
    """An image to be."""

    layers: list[dict[str, Entry]]
    config: dict[str, Any]
    history: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> Path:
        """As an OCI layout."""
        blobs = folder / "blobs" / "sha256"
        blobs.mkdir(parents=True)

        def blob(content: bytes) -> dict[str, Any]:
            digest = hashlib.sha256(content).hexdigest()
            (blobs / digest).write_bytes(content)
            return {"digest": f"sha256:{digest}", "size": len(content)}

        layers = [
            {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", **blob(gzip.compress(_tar(layer), mtime=0))}
            for layer in self.layers
        ]
        config = {"architecture": "amd64", "os": "linux", "config": self.config}
        config["history"] = [{"created_by": step} for step in self.history]
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **blob(json.dumps(config).encode())},
            "layers": layers,
        }
        described = {"mediaType": manifest["mediaType"], **blob(json.dumps(manifest).encode())}
        described["annotations"] = {"org.opencontainers.image.ref.name": "built"}
        (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        return folder


def _tar(layer: Mapping[str, Entry]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for path, entry in layer.items():
            member = tarfile.TarInfo(path)
            content = entry.text.encode()
            member.size = len(content) if entry.kind == tarfile.REGTYPE else 0
            member.mode, member.uid, member.type, member.mtime = entry.mode, entry.user, entry.kind, EPOCH
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def python_package(name: str, version: str) -> dict[str, Entry]:
    """What an installed wheel leaves behind."""
    folder = f"opt/trainyard/lib/python3.11/site-packages/{name.replace('-', '_')}-{version}.dist-info"
    return {f"{folder}/METADATA": Entry(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\nhttps://a:b@c/\n")}


def good() -> Draft:
    """An image with CUDA that keeps every rule."""
    status = "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36-9\n"
    base = {
        "etc/passwd": Entry("root:x:0:0:root:/root:/bin/bash\n"),
        "usr/lib/os-release": Entry('NAME="Ubuntu"\nID=ubuntu\n'),
        "var/lib/dpkg/status": Entry(status),
        "tmp": Entry(kind=tarfile.DIRTYPE, mode=0o1777),
        "opt/amazon/efa/lib/libfabric.so.1": Entry("elf"),
        "usr/lib/x86_64-linux-gnu/libibverbs/libefa-rdmav34.so": Entry("elf"),
        "opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so": Entry("elf"),
        "usr/lib/libnccl-net.so": Entry("/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so", kind=tarfile.SYMTYPE),
        "usr/local/cuda-13.0/compat/libcuda.so.1": Entry("elf"),
        "usr/bin/su": Entry("elf", mode=0o4755),
    }
    ours = {
        "etc/passwd": Entry("root:x:0:0:root:/root:/bin/bash\ntrainer:x:1001:1001::/home/trainer:/bin/sh\n"),
        "usr/bin/su": Entry("elf", mode=0o755),
        "usr/local/cuda-13.0/.wh.compat": Entry(),
        "opt/trainyard/bin/train": Entry("#!/opt/trainyard/bin/python\n", mode=0o755),
        **python_package("numpy", "2.5.0"),
        **python_package("pydantic", "2.12.0"),
        **python_package("nvidia-nccl-cu13", "2.29.7"),
    }
    config = {
        "Entrypoint": ["/opt/trainyard/bin/train"],
        "Cmd": ["train"],
        "Env": ["PATH=/opt/trainyard/bin:/usr/bin:/bin", "PYTHONUNBUFFERED=1"],
        "Labels": {
            "org.opencontainers.image.title": "trainyard trainer",
            "org.opencontainers.image.base.digest": "sha256:" + "ab" * 32,
            "io.trainyard.code-digest": "sha256:" + "cd" * 32,
            "io.trainyard.accelerator": "cuda",
        },
    }
    return Draft([base, ours], deepcopy(config), ["/bin/sh -c #(nop) ADD file:1 in /", "RUN useradd trainer"])
