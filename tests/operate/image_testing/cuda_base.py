"""A base as those with CUDA and EFA are, without NVIDIA's and AWS's files: Debian, and what the Dockerfile has to mend.

libfabric is Debian's own, put where AWS's installer puts it; NCCL, cuda-compat and the plugin are files of the right
names, of which the plugin can be loaded.
"""

import shutil
import subprocess
import tarfile
from pathlib import Path

from trainyard.operate.image.build import Options, Tools, local_base

NAME = "localhost/cuda-stand-in"
LIBFABRIC = ("libfabric1", "libfabric-bin", "ibverbs-providers")
PLUGIN = "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net-ofi.so"
OTHER_NCCL = "2.28.5"
"""The base's own: one of the releases to be avoided, as a package that is held, as a copy, and as Python's."""
ANSWER = 715
"""Of the plugin's function `stand_in`."""

_IN_THE_BASE = f"""
set -eu
apt-get update -q
apt-get install -y -q --no-install-recommends {" ".join(LIBFABRIC)}
mkdir -p /opt/amazon/efa/lib /opt/amazon/efa/bin
mv /usr/lib/x86_64-linux-gnu/libfabric.so.1* /opt/amazon/efa/lib/
mv /usr/bin/fi_info /opt/amazon/efa/bin/
dpkg -i /debs/libnccl2.deb /debs/libnccl-dev.deb
apt-mark hold libnccl2 libnccl-dev
rm -rf /debs /var/lib/apt/lists/* /var/cache/apt/archives/*.deb /var/cache/ldconfig/aux-cache /var/log/*
"""


def cuda_base(tools: Tools, options: Options, folder: Path) -> str:
    """The base's name with its digest, in the storage of `tools`; `folder` is for scratch."""
    tree = folder / "tree"
    debs = tree / "debs"
    debs.mkdir(parents=True)
    library = f"usr/lib/x86_64-linux-gnu/libnccl.so.{OTHER_NCCL}"
    _deb(folder / "libnccl2", debs / "libnccl2.deb", "", library)
    _deb(folder / "libnccl-dev", debs / "libnccl-dev.deb", "Depends: libnccl2\n", "usr/include/nccl.h")
    for path in (
        f"opt/hpcx/lib/libnccl.so.{OTHER_NCCL}",
        f"usr/lib/python3/dist-packages/nvidia_nccl_cu13-{OTHER_NCCL}.dist-info/METADATA",
        "usr/local/cuda-13.0/compat/libcuda.so.580.1",
    ):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(f"Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: {OTHER_NCCL}\n")
    plugin(tree / PLUGIN)
    container = tools.buildah("", "from", "--quiet", "--pull=never", local_base(tools, options).reference)
    try:
        tools.buildah("", "copy", "--quiet", container, str(tree), "/")
        tools.buildah("stand-in for a CUDA base", "run", container, "--", "sh", "-c", _IN_THE_BASE)
        tools.buildah("", "commit", "--quiet", "--timestamp", str(options.epoch), container, f"{NAME}:made")
    finally:
        tools.buildah("", "rm", container)
    digest = tools.buildah("", "inspect", "--type", "image", "--format", "{{.FromImageDigest}}", f"{NAME}:made")
    return f"{NAME}@{digest}"


def _deb(tree: Path, package: Path, more: str, path: str) -> None:
    """A package of one file."""
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / path).parent.mkdir(parents=True)
    (tree / path).write_text("nobody loads this")
    control = f"Package: {tree.name}\nVersion: {OTHER_NCCL}-1+cuda13.0\nArchitecture: amd64\n{more}"
    (tree / "DEBIAN/control").write_text(f"{control}Maintainer: nobody <nobody@example.com>\nDescription: stand-in\n")
    command = ["dpkg-deb", "--build", "--root-owner-group", str(tree), str(package)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def plugin(path: Path) -> None:
    """A library that the loader takes, which has the name of AWS's plugin inside of it too."""
    compiler = shutil.which("cc")
    assert compiler, "cc is missing: apt-get install gcc"
    path.parent.mkdir(parents=True)
    source = path.with_suffix(".c")
    source.write_text(f"int stand_in(void) {{ return {ANSWER}; }}\n")
    words = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", str(path), str(source)]
    subprocess.run(words, check=True)
    source.unlink()


_INSTALLER = """\
#!/bin/sh
set -eu
[ "$*" = "-y --skip-kmod --skip-limit-conf --no-verify" ] || { echo "not these options: $*" >&2; exit 1; }
[ -n "$(ls /var/lib/apt/lists/*_Packages* 2>/dev/null)" ] || { echo "no package lists" >&2; exit 1; }
cp -r opt /
"""


def efa_installer(folder: Path) -> Path:
    """A stand-in for AWS's archive: a folder in it, with a program that takes what our build gives it."""
    root = folder / "aws-efa-installer"
    plugin(root / PLUGIN)
    libraries = root / "opt/amazon/efa/lib"
    libraries.mkdir(parents=True)
    for name in ("libfabric.so.1", "libefa-rdmav34.so"):
        (libraries / name).write_text("nobody loads this")
    (root / "efa_installer.sh").write_text(_INSTALLER)
    (root / "efa_installer.sh").chmod(0o755)
    archive = folder / "aws-efa-installer-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(root, arcname=root.name)
    return archive
