"""What an image holds: its packages, read from its layers, as a CycloneDX 1.6 document that is the same every time.

Debian's packages are in dpkg's list, Python's in their own METADATA. What was copied in without a package (the CUDA
libraries of a base, AWS's EFA software where it is no Debian package) is in no list, and so not in this one.
"""

import json
import re
import uuid
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainyard.operate.image.layout import Image

FILE_NAME = "sbom.cdx.json"
_NAMESPACE = uuid.UUID("0f1c7b8e-0f0e-5d1c-9a35-7a1b1b8f4c11")
"""Of the documents' serial numbers, which are made from the image's digest."""
_ESSENTIAL = re.compile(r"(?:^|/)var/lib/dpkg/status(?:\.d/[^/]+)?$")


def packages(image: Image) -> dict[str, dict[str, str]]:
    """Every package that a container sees: purl -> name, version, and licence where the package says it."""
    found: dict[str, dict[str, str]] = {}
    for path, file in sorted(image.files.items()):
        if file.text is None:
            continue
        text = file.text.decode(errors="replace")
        if path.endswith((".dist-info/METADATA", ".egg-info/PKG-INFO")):
            found.update(_python_package(text))
        elif _ESSENTIAL.search(path):
            for name, version, machine in _debian_packages(text):
                purl = f"pkg:deb/{_distribution(image)}/{quote(name)}@{quote(version, safe='')}?arch={machine}"
                found[purl] = {"name": name, "version": version}
    return found


def _python_package(text: str) -> dict[str, dict[str, str]]:
    headers = HeaderParser().parsestr(text)
    name, version = headers.get("Name"), headers.get("Version")
    if not name or not version:
        return {}
    described = {"name": name, "version": version}
    if licence := headers.get("License-Expression"):
        described["license"] = licence
    plain = re.sub(r"[-_.]+", "-", name).lower()
    return {f"pkg:pypi/{plain}@{quote(version, safe='')}": described}


def _debian_packages(text: str) -> Iterator[tuple[str, str, str]]:
    for paragraph in text.split("\n\n"):
        headers = HeaderParser().parsestr(paragraph)
        is_there = headers.get("Status", "install ok installed").endswith(" installed")
        if is_there and headers.get("Package") and headers.get("Version"):
            yield headers["Package"], headers["Version"], headers.get("Architecture", "all")


def _distribution(image: Image) -> str:
    release = image.files.get("usr/lib/os-release") or image.files.get("etc/os-release")
    text = (release.text or b"").decode(errors="replace") if release else ""
    found = re.search(r'^ID="?([a-z]+)"?$', text, re.MULTILINE)
    return found[1] if found else "debian"


def document(image: Image) -> dict[str, Any]:
    """The CycloneDX document; nothing in it but what the image's bytes say."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, image.digest)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "container",
                "bom-ref": image.digest,
                "name": image.labels.get("org.opencontainers.image.title", "container"),
                "version": image.digest,
            }
        },
        "components": [
            {
                "type": "library",
                "bom-ref": purl,
                "name": described["name"],
                "version": described["version"],
                **({"licenses": [{"expression": described["license"]}]} if "license" in described else {}),
                "purl": purl,
            }
            for purl, described in sorted(packages(image).items())
        ],
    }


def write(image: Image, folder: Path) -> Path:
    """The document beside the layout's blobs, in `folder`."""
    path = folder / FILE_NAME
    path.write_text(json.dumps(document(image), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return path
