"""An image to the repository by the CDK's real CLI, and its digest to the parameter that jobs read.

ECR and SSM are the emulator's. What a real account's registry would get, a stand-in of one gets from the real skopeo.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import image_testing
import pytest
import yaml
from image_testing import Draft, good, registry
from image_testing.registry import Registry
from launch_testing import ACCOUNT, REGION, environment_content

from trainyard import emulator
from trainyard.errors import AwsRefusedError, InputError
from trainyard.isolation.templates import synthesize_into
from trainyard.launch.contract import read_image
from trainyard.launch.session import Account, emulated_account
from trainyard.operate.deploy import cdk
from trainyard.operate.image import __main__ as command
from trainyard.operate.image import docker, layout, publish, sbom
from trainyard.spec.platform import EnvironmentSpec

ROOT = Path(__file__).resolve().parents[2]
REGISTRY = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com"
NAME = "trainyard-test"
PARAMETER = "/trainyard/test/image"
NOTHING = f"{REGISTRY}/{NAME}@sha256:{'0' * 64}"
BOOTSTRAPPED = "/cdk-bootstrap/hnb659fds/version"


@pytest.fixture(scope="module")
def bootstrapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    """An emulated account as `cdk bootstrap` leaves it."""
    folder = tmp_path_factory.mktemp("account")
    info = emulator.start(folder / "emulator")
    try:
        account = emulated_account(info, REGION)
        image = {"image": f"sha256:{'ab' * 32}", "checks": "off"}
        synthesize_into(folder / "cdk.out", ROOT / "environments/local.yaml", ROOT, image)
        options = ["--app", str(folder / "cdk.out")]
        cdk(ROOT, ["bootstrap", f"aws://{ACCOUNT}/{REGION}", *options], account.variables(), folder / "log", print)
        yield account
    finally:
        emulator.stop(folder / "emulator")


@pytest.fixture
def platform(bootstrapped: Account) -> Iterator[Account]:
    """With what the platform's stack has before a first release."""
    ecr, ssm = bootstrapped.client("ecr"), bootstrapped.client("ssm")
    ecr.create_repository(repositoryName=NAME, imageTagMutability="IMMUTABLE")
    ssm.put_parameter(Name=PARAMETER, Value=NOTHING, Type="String")
    yield bootstrapped
    ecr.delete_repository(repositoryName=NAME, force=True)
    ssm.delete_parameter(Name=PARAMETER)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return good().write(tmp_path / "image")


def another() -> Draft:
    draft = good()
    draft.history.append("RUN true")
    return draft


Publish = Callable[[EnvironmentSpec, Path], str]


@pytest.fixture
def published(platform: Account, environment_path: Path, tmp_path: Path) -> Publish:
    """Publishes a layout for an environment, and releases it; its URI. The CLI's output is in `log`."""

    def call(environment: EnvironmentSpec, layout_folder: Path) -> str:
        digest = layout.named(layout_folder)
        repository = publish.publish(
            platform, environment, environment_path, layout_folder, digest, print, tmp_path / "log"
        )
        return publish.release(platform, environment, repository, digest, print)

    return call


def released(account: Account) -> str:
    return str(account.client("ssm").get_parameter(Name=PARAMETER)["Parameter"]["Value"])


def pushed(account: Account) -> dict[str, list[str]]:
    """Tags by digest."""
    found = account.client("ecr").describe_images(repositoryName=NAME)["imageDetails"]
    return {image["imageDigest"]: image.get("imageTags", []) for image in found}


@pytest.mark.slow
def test_the_cdk_publishes_an_image_once_and_a_roll_back_publishes_none(
    platform: Account, published: Publish, environment: EnvironmentSpec, folder: Path, tmp_path: Path
) -> None:
    environment = environment.model_copy(update={"emulated": True})
    first, later = layout.named(folder), another().write(tmp_path / "later")
    uri = published(environment, folder)
    assert uri == f"{REGISTRY}/{NAME}@{first}" == read_image(platform, PARAMETER, emulated=False)
    assert pushed(platform) == {first: [f"sha256-{first[7:39]}"]}
    assert "Assets published successfully" in (tmp_path / "log").read_text()
    (tmp_path / "log").unlink()
    assert published(environment, folder) == uri and not (tmp_path / "log").exists(), "nothing is left to push"

    second = published(environment, later).partition("@")[2]
    assert released(platform).endswith(second) and pushed(platform).keys() == {first, second}
    said: list[str] = []
    repository = publish.find_repository(platform, environment)
    publish.release(platform, environment, repository, first, said.append)
    assert released(platform) == uri
    assert second in said[-1], "what it was before, so that it can be taken back"


STAND_IN = """#!{python}
'''ECR's registry is the stand-in: skopeo pushes there, and ECR's API lists what has arrived.'''
import json, os, subprocess, sys, urllib.request
import boto3
arguments = sys.argv[1:]
secrets = arguments[arguments.index("--authfile") + 1]
seen = {{"arguments": arguments, "mode": oct(os.stat(secrets).st_mode & 0o777), "auth": json.load(open(secrets))}}
json.dump(seen, open("{folder}/seen.json", "w"))
(secret,) = seen["auth"]["auths"].values()
json.dump({{"auths": {{"{address}": secret}}}}, open("{folder}/auth.json", "w"))
tag = arguments[-1].rpartition(":")[2]
arguments[arguments.index("--authfile") + 1] = "{folder}/auth.json"
arguments[-1] = "docker://{address}/{name}:" + tag
{meanwhile}
done = subprocess.run(["{skopeo}", *arguments, "--dest-tls-verify=false"])
if done.returncode:
    sys.exit(done.returncode)
asked = urllib.request.Request("http://{address}/v2/{name}/manifests/" + tag)
asked.add_header("Authorization", "Basic " + secret["auth"])
answer = urllib.request.urlopen(asked)
boto3.client("ecr").put_image(repositoryName="{name}", imageManifest=answer.read().decode(), imageTag=tag,
    imageManifestMediaType=answer.headers["Content-Type"], imageDigest=answer.headers["Docker-Content-Digest"])
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Registry]]:
    """What becomes of a push, with what happens to it on its way."""
    skopeo = shutil.which("skopeo")
    if skopeo is None:
        pytest.skip("needs skopeo: scripts/setup --with image")
    with registry.serving() as (address, there):

        def call(meanwhile: str) -> Registry:
            program = tmp_path / "bin" / "skopeo"
            program.parent.mkdir()
            text = STAND_IN.format(
                python=sys.executable, folder=tmp_path, address=address, name=NAME, skopeo=skopeo, meanwhile=meanwhile
            )
            program.write_text(text)
            program.chmod(0o755)
            monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
            return there

        yield call


def test_a_real_account_gets_the_layout_byte_for_byte_and_no_argument_is_a_secret(
    platform: Account,
    published: Publish,
    stand_in: Callable[[str], Registry],
    environment: EnvironmentSpec,
    folder: Path,
    tmp_path: Path,
) -> None:
    there, image = stand_in(""), layout.read(folder)
    assert published(environment, folder) == f"{REGISTRY}/{NAME}@{image.digest}" == released(platform)
    assert there.manifests[image.digest][1].decode() == image.manifest_text
    wanted = {image.manifest["config"]["digest"], *(layer["digest"] for layer in image.manifest["layers"])}
    assert set(there.blobs) == wanted, "the registry computes the digests anew"

    token = platform.client("ecr").get_authorization_token()["authorizationData"][0]["authorizationToken"]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["auth"] == {"auths": {REGISTRY: {"auth": token}}} and there.credentials == {f"Basic {token}"}
    assert seen["mode"] == "0o600" and token not in "".join(seen["arguments"])
    password = base64.b64decode(token).decode().partition(":")[2]
    assert password not in (tmp_path / "log").read_text() + "".join(seen["arguments"])
    assert not Path(seen["arguments"][3]).exists(), "the token is gone with the push"


MEANWHILE = {
    "denied": ("print('first\\ndenied: no push for you', file=sys.stderr); sys.exit(1)", "denied: no push for you"),
    "changed": (
        "from pathlib import Path\n"
        "layer = max(Path('{image}/blobs/sha256').iterdir(), key=lambda path: path.stat().st_size)\n"
        "layer.write_bytes(layer.read_bytes()[:-1] + b'x')",
        r"digest sha256:[0-9a-f]{64} does not match expected",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", MEANWHILE)
def test_a_push_that_fails_is_one_line_and_releases_nothing(
    what: str,
    platform: Account,
    published: Publish,
    stand_in: Callable[[str], Registry],
    environment: EnvironmentSpec,
    folder: Path,
) -> None:
    meanwhile, told = MEANWHILE[what]
    there = stand_in(meanwhile.format(image=folder))
    with pytest.raises(AwsRefusedError, match=rf"publish-assets failed: pushing to {REGISTRY}.*{told}") as error:
        published(environment, folder)
    assert "\n" not in str(error.value)
    assert (pushed(platform), there.manifests, released(platform)) == ({}, {}, NOTHING)


def test_an_account_without_the_bootstrap_is_told_so(
    platform: Account, published: Publish, environment: EnvironmentSpec, folder: Path
) -> None:
    ssm = platform.client("ssm")
    version = ssm.get_parameter(Name=BOOTSTRAPPED)["Parameter"]["Value"]
    ssm.delete_parameter(Name=BOOTSTRAPPED)
    try:
        with pytest.raises(AwsRefusedError, match=rf"^cdk publish-assets failed: .*{BOOTSTRAPPED} not found"):
            published(environment.model_copy(update={"emulated": True}), folder)
    finally:
        ssm.put_parameter(Name=BOOTSTRAPPED, Value=version, Type="String")
    assert (pushed(platform), released(platform)) == ({}, NOTHING)


def test_what_the_repository_doesnt_have_is_not_released(platform: Account, environment: EnvironmentSpec) -> None:
    repository = publish.find_repository(platform, environment)
    with pytest.raises(AwsRefusedError, match="has no image sha256:abab"):
        publish.release(platform, environment, repository, "sha256:" + "ab" * 32, print)
    with pytest.raises(InputError, match="64 hex digits"):
        publish.release(platform, environment, repository, "latest", print)
    assert released(platform) == NOTHING


def test_without_a_platform_or_skopeo_nothing_is_pushed(
    platform: Account, published: Publish, environment: EnvironmentSpec, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = environment.model_copy(update={"name": "other"})
    with pytest.raises(AwsRefusedError, match=r"/trainyard/other/image doesn't exist; deploy the stacks"):
        published(elsewhere, folder)
    ssm = platform.client("ssm")
    for value, told in (
        ("docker.io/library/debian:latest", "names no image of ECR"),
        (NOTHING.replace(NAME, "somebodys"), f"names the repository somebodys; jobs may pull from {NAME} alone"),
    ):
        ssm.put_parameter(Name=PARAMETER, Value=value, Type="String", Overwrite=True)
        with pytest.raises(AwsRefusedError, match=told):
            published(environment, folder)
    ssm.put_parameter(Name=PARAMETER, Value=NOTHING, Type="String", Overwrite=True)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="needs skopeo; run: scripts/setup --with image"):
        published(environment, folder)
    assert (pushed(platform), released(platform)) == ({}, NOTHING)


def refused(draft: Draft) -> Draft:
    draft.config["Env"].append("NCCL_PROTO=simple")
    return draft


@pytest.mark.parametrize(
    ("draft", "code", "told"),
    [
        (None, 2, "is no OCI layout (scripts/build_image makes one)"),
        (refused(good()), 1, "1 finding; docs/image.md says what the rules are for"),
        (good(), 2, "is not what its name says; build or copy the image again"),
    ],
    ids=["missing", "refused", "changed"],
)
def test_a_bad_layout_reaches_no_account(
    draft: Draft | None,
    code: int,
    told: str,
    environment_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "pins", lambda _: image_testing.PINS)
    monkeypatch.setattr(command, "open_account", None)
    folder = tmp_path / "image"
    if draft:
        sbom.write(layout.read(draft.write(folder)), folder)
    if code == InputError.exit_code and draft:
        layer = max((folder / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
        layer.write_bytes(layer.read_bytes() + b"x")
    assert command.main(["publish", str(environment_path), "--image", str(folder)]) == code
    assert told in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_the_command_pushes_and_releases_and_pushes_alone_for_a_canary(
    platform: Account, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(command, "pins", lambda _: image_testing.PINS)
    monkeypatch.setattr(command, "open_account", lambda _: platform)
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(environment_content() | {"emulated": True}))
    sbom.write(layout.read(folder), folder)
    uri = f"{REGISTRY}/{NAME}@{layout.named(folder)}"
    arguments = ["publish", str(path), "--image", str(folder)]
    assert command.main([*arguments, "--push-only"]) == 0
    told = capsys.readouterr()
    assert (told.out.strip(), released(platform)) == (uri, NOTHING)
    assert "no layers" in told.err, "what an emulated account can't show is said"
    assert command.main(arguments) == 0 and released(platform) == uri
    assert command.main(["publish", str(path), "--digest", f"sha256:{'ab' * 32}"]) == AwsRefusedError.exit_code
    assert released(platform) == uri


def program(*arguments: str, folder: Path | None = None, secret: str = "") -> tuple[int, str]:
    """`scripts/lib/docker` as the CLI starts it: its exit code and what it says."""
    settings = {"PATH": os.defpath, **({docker.FOLDER: str(folder)} if folder else {})}
    done = subprocess.run(
        [str(ROOT / "scripts/lib/docker"), *arguments], env=settings, input=secret, capture_output=True, text=True
    )
    return done.returncode, (done.stdout + done.stderr).strip()


@pytest.mark.slow
def test_the_stand_in_for_docker_pushes_what_was_judged_where_ecr_says_and_is_nothing_else(
    folder: Path, tmp_path: Path
) -> None:
    digest, desk = layout.named(folder), tmp_path / "desk"
    desk.mkdir()
    docker.Desk(desk).prepare(folder, digest, is_emulated=False)
    destination = f"{REGISTRY}/{NAME}:one"
    code, said = program("push", destination)
    assert code == 2 and said.startswith("trainyard: ") and "scripts/publish_image ENV" in said and "\n" not in said
    code, said = program("push", destination, folder=desk)
    assert code == 2 and "has no 'tag' yet" in said and "\n" not in said, "out of order"
    assert program("load", digest, folder=desk) == (0, digest)
    assert program("tag", digest, destination, folder=desk)[0] == 0
    code, said = program("push", f"{REGISTRY}/somebodys:one", folder=desk)
    assert (code, "no image has that tag" in said) == (2, True)
    login = ("login", "--username", "AWS", "--password-stdin", "999999999999.dkr.ecr.us-east-1.amazonaws.com")
    assert program(*login, folder=desk, secret="nobody asks") == (0, "")
    code, said = program("push", destination, folder=desk)
    assert code == 3 and "ECR's token is for 999999999999" in said and "\n" not in said
    for arguments in (["build", "."], ["inspect", digest], []):
        code, said = program(*arguments, folder=desk)
        assert code == 2 and "only login, load, tag and push" in said and "\n" not in said
    other = f"sha256:{'ab' * 32}"
    assert program("load", other, folder=desk)[0] == 2
    shutil.rmtree(folder)
    another().write(folder)
    code, said = program("load", digest, folder=desk)
    assert code == 2 and f"is no longer {digest}, which was judged" in said, "built anew after it was judged"
