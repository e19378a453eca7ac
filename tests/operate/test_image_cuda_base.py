"""What the Dockerfile does to a base that brings CUDA, an NCCL of its own and EFA: real builds on a stand-in for one.

CPU wheels in it, as the base's side is what is asked about; with CUDA's own the same build has run (docs/image.md).
Needs root and `scripts/setup --with image`, like test_image_build.py.
"""

from pathlib import Path

import pytest
from image_testing.cuda_base import ANSWER, OTHER_NCCL, cuda_base, efa_installer

from trainyard.operate.image import __main__ as command
from trainyard.operate.image import build, layout, rules
from trainyard.operate.image.build import Options, Tools
from trainyard.operate.image.layout import Image

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

WORK = Path(__file__).resolve().parents[2] / ".trainyard" / "image"


def built(folder: Path, *arguments: str) -> Image:
    """For CPUs by its label, so that the rules of CUDA are ours to apply."""
    assert command.main(["build", *arguments, "--accelerator", "cpu", "--output", str(folder / "layout")]) == 0
    return layout.read(folder / "layout")


def in_the_image(*words: str) -> str:
    """What a command of the newest image prints, by the image's own loader."""
    tools = Tools(WORK, print)
    container = tools.buildah("", "from", "--quiet", "--pull=never", f"{build.NAME}:built")
    try:
        return tools.buildah("", "run", container, "--", *words)
    finally:
        tools.buildah("", "rm", container)


def findings(image: Image) -> list[str]:
    """Of the rules that need no CUDA wheels."""
    question = rules.Question(image, {}, None)
    return [what for rule in (rules.cuda_compat_is_absent, rules.efa_is_there) for what, _ in rule(question)]


LOADED = "import ctypes; print(ctypes.CDLL('libnccl-net.so').stand_in())"


def test_the_bases_nccl_and_compat_go_and_its_efa_is_what_the_loader_finds(tmp_path: Path) -> None:
    options = Options("local", "cpu", build.SUITE_PYTHON, "none", tmp_path / "layout", WORK)
    base = cuda_base(Tools(WORK, print), options, tmp_path)
    image = built(tmp_path, "--base", base, "--python", build.SUITE_PYTHON, "--efa", "base")
    assert image.labels["org.opencontainers.image.base.digest"] == base.partition("@")[2]
    assert findings(image) == []
    assert rules.nccl_versions(image) == {}, "a wheel of torch for CUDA would bring the only one"
    assert not [path for path in image.files if OTHER_NCCL in path and path.startswith(("usr/lib/x86", "opt/hpcx"))]
    # Its layers below have them still: that nothing was there to remove would look the same.
    below = [file.path for files in image.layers for file in files]
    assert {"opt/hpcx/lib/libnccl.so.2.28.5", "usr/local/cuda-13.0/compat/libcuda.so.580.1"} <= set(below)
    assert in_the_image("python", "-c", LOADED) == str(ANSWER)
    assert "libfabric: " in in_the_image("fi_info", "--version"), "by the PATH"


def test_the_installer_gets_its_options_and_its_plugin_is_found(tmp_path: Path) -> None:
    archive = efa_installer(tmp_path)
    image = built(tmp_path, "--base", "local", "--efa", "installer", "--efa-installer", str(archive))
    assert findings(image) == []
    assert in_the_image("python", "-c", LOADED) == str(ANSWER)
    assert not [path for path in image.files if path.startswith(("tmp/efa", "var/lib/apt/lists/deb"))]
