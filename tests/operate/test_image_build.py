"""The image for real, without a Docker engine: built twice, judged, pushed to a registry, and run as SageMaker runs it.

Needs root and `scripts/setup --with image`; without them these tests fail with that command.
"""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from image_testing import registry

from trainyard import planner
from trainyard.operate.image import __main__ as command
from trainyard.operate.image import build, docker, layout
from trainyard.operate.image.build import Tools
from trainyard.spec.job import load_job

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".trainyard" / "image"
SECONDS = 900


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The local image as an OCI layout."""
    folder = tmp_path_factory.mktemp("image") / "layout"
    assert command.main(["build", "--base", "local", "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def root_folder(built: Path) -> Iterator[Path]:
    """The image's files, as a container's root; the folder is a copy on write of the image."""
    tools = Tools(WORK, print)
    container = tools.buildah("", "from", "--quiet", "--pull=never", f"{build.NAME}:built")
    try:
        yield Path(tools.buildah("", "mount", container))
    finally:
        tools.buildah("", "umount", container)
        tools.buildah("", "rm", container)


def test_two_builds_that_share_nothing_have_one_digest(built: Path, tmp_path: Path) -> None:
    again = tmp_path / "layout"
    (ROOT / "docs/image-test-only.md").write_text("a change of the docs")
    try:
        assert command.main(["build", "--base", "local", "--fresh", "--output", str(again)]) == 0
    finally:
        (ROOT / "docs/image-test-only.md").unlink()
    first, second = layout.read(built), layout.read(again)
    assert first.files.keys() == second.files.keys()
    differing = [path for path, file in first.files.items() if second.files[path] != file]
    assert (differing, second.digest) == ([], first.digest)
    assert (again / "sbom.cdx.json").read_bytes() == (built / "sbom.cdx.json").read_bytes()


def test_the_image_keeps_the_rules_and_has_no_installer(built: Path) -> None:
    assert command.main(["check", str(built)]) == 0
    image = layout.read(built)
    assert image.labels["org.opencontainers.image.base.digest"].startswith("sha256:")
    assert image.settings["Entrypoint"] == ["/opt/trainyard/bin/train"]
    assert not [path for path in image.files if path.endswith(("bin/pip", "site-packages/pip"))]
    times = subprocess.run(
        ["skopeo", "inspect", "--format", "{{.Created}}", f"oci:{built}:built"], capture_output=True, text=True
    )
    assert times.stdout.startswith("2026-01-01"), times


def test_a_push_keeps_the_digest(built: Path, tmp_path: Path) -> None:
    image = layout.read(built)
    password = base64.b64encode(b"AWS:nobody asks").decode()
    secrets = tmp_path / "auth"
    with registry.serving() as (address, there):
        secrets.write_text(json.dumps({"auths": {address: {"auth": password}}}))
        docker.push(built, f"{address}/trainyard-test:one", secrets, "--dest-tls-verify=false")
    assert there.credentials == {f"Basic {password}"}
    assert image.digest in there.manifests
    wanted = {image.manifest["config"]["digest"], *(layer["digest"] for layer in image.manifest["layers"])}
    assert set(there.blobs) == wanted, "byte for byte: the registry computes the digests anew"


def opt_ml(folder: Path, **changes: Any) -> Path:
    """An /opt/ml as SageMaker makes it for one host: jobs/tiny.yaml on two ranks, its texts as channels."""
    spec = load_job(ROOT / "jobs/tiny.yaml")
    training = spec.training.model_copy(update={"steps": 4})
    checkpoint = spec.checkpoint.model_copy(update={"every_steps": 2, "destination": "/opt/ml/checkpoints/tiny"})
    resolved = planner.resolve(
        spec.model_copy(update={"training": training, "checkpoint": checkpoint, **changes}), world_size=2
    )
    channels = {}
    for name, uri in (("train-0", "LICENSE"), ("train-1", "ARCHITECTURE.md"), ("validation-0", "README.md")):
        (folder / "input/data" / name).mkdir(parents=True)
        (folder / "input/data" / name / uri).write_bytes((ROOT / uri).read_bytes())
        channels[uri] = name
    job = folder / "input/data/job"
    job.mkdir()
    (job / "channels.json").write_text(json.dumps(channels))
    (job / "resolved_job.json").write_text(resolved.model_dump_json())
    config = folder / "input/config"
    config.mkdir()
    resources = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "lo"}
    (config / "resourceconfig.json").write_text(json.dumps(resources | {"current_instance_type": "ml.c5.xlarge"}))
    folder.chmod(0o755)
    return folder


LOOPBACK = "import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh', b'lo', 0x49))"
RUN = """
set -eu
mount --bind "$2" "$1/opt/ml"
mount -t proc proc "$1/proc"
mount -t tmpfs tmpfs "$1/dev"
for device in null zero random urandom; do touch "$1/dev/$device"; mount --bind "/dev/$device" "$1/dev/$device"; done
mkdir "$1/dev/shm"
mount -t tmpfs tmpfs "$1/dev/shm"
"$3" -c "$4"
root=$1
shift 4
exec chroot "$root" /usr/bin/env -i "$@"
"""
"""A container by hand: own processes, mounts and network, of which loopback alone is up. SIOCSIFFLAGS is 0x8914."""


def container(root: Path, tree: Path, *arguments: str) -> "subprocess.Popen[str]":
    """The image's entry point with its own variables, and nothing else of ours, without any network."""
    settings = Tools(WORK, print).buildah("", "inspect", "--type", "image", f"{build.NAME}:built")
    image = json.loads(settings)["OCIv1"]["config"]
    spaces = ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"]
    return subprocess.Popen(
        [
            *(*spaces, "sh", "-c", RUN, "run", str(root), str(tree), sys.executable, LOOPBACK),
            *(*image["Env"], *image["Entrypoint"], *(arguments or image["Cmd"])),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    output, _ = process.communicate(timeout=SECONDS)
    return process.returncode, output


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder that the user of the image can reach."""
    for folder in (tmp_path, *list(tmp_path.parents)[:3]):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    (tmp_path / "ml").mkdir()
    return tmp_path / "ml"


def test_train_trains_on_two_ranks_as_the_user_without_network_and_leaves_a_checkpoint(
    root_folder: Path, tree: Path
) -> None:
    code, output = ended(container(root_folder, opt_ml(tree)))
    assert code == 0, output
    assert "runs as trainer (uid 1001)" in output
    committed = sorted(tree.glob("checkpoints/tiny/checkpoints/*/COMMITTED"))
    assert len(committed) == 2, output
    assert {path.stat().st_uid for path in committed} == {1001}
    last = json.loads((tree / "output/data/metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 4, last
    assert not (tree / "output/failure").exists()


def test_a_broken_job_says_why_by_file_and_exit_code(root_folder: Path, tree: Path) -> None:
    opt_ml(tree)
    (tree / "input/data/train-0/LICENSE").unlink()
    (tree / "input/data/train-0").rmdir()
    code, output = ended(container(root_folder, tree))
    assert code == 2, output
    failure = (tree / "output/failure").read_text()
    assert "LICENSE: its channel train-0 is not at /opt/ml/input/data/train-0" in failure


def test_a_stop_saves_and_asks_to_be_resumed(root_folder: Path, tree: Path) -> None:
    spec = load_job(ROOT / "jobs/tiny.yaml")
    opt_ml(tree, training=spec.training.model_copy(update={"steps": 100_000}))
    process = container(root_folder, tree)
    try:
        metrics = tree / "output/data/metrics.jsonl"
        deadline = time.monotonic() + SECONDS
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.1)
        os.kill(first_child(process.pid), signal.SIGTERM)
        code, output = ended(process)
    finally:
        process.kill()
    assert code == 75, output
    assert (tree / "output/resume_me").exists() and list(tree.glob("checkpoints/tiny/checkpoints/*/COMMITTED"))


def first_child(pid: int) -> int:
    """The container's first process, as the machine numbers it."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def test_any_user_can_run_a_command_of_the_image(root_folder: Path, tree: Path) -> None:
    opt_ml(tree)
    code, output = ended(
        container(root_folder, tree, "python", "-c", "import os, torch; print(os.getuid(), torch.__version__)")
    )
    assert code == 0 and output.splitlines()[-1].startswith("1001 2."), output
