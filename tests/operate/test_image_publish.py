"""An image to the repository, and its digest to the parameter that jobs read: ECR's and SSM's APIs by moto, a skopeo
that writes down what it is told. The real skopeo pushes in test_image_build.py."""

import json
from pathlib import Path

import pytest
from image_testing import good
from launch_testing import ACCOUNT, REGION

from trainyard.errors import AwsRefusedError, InputError
from trainyard.launch.contract import read_image
from trainyard.launch.session import Account
from trainyard.operate.image import layout, publish
from trainyard.operate.image.layout import Image
from trainyard.spec.platform import EnvironmentSpec

REGISTRY = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com"
NAME = "trainyard-test"
PARAMETER = "/trainyard/test/image"


@pytest.fixture
def platform(aws: Account) -> Account:
    """The platform's stack, as it is before a first release."""
    aws.client("ecr").create_repository(repositoryName=NAME, imageTagMutability="IMMUTABLE")
    nothing = f"{REGISTRY}/{NAME}@sha256:{'0' * 64}"
    aws.client("ssm").put_parameter(Name=PARAMETER, Value=nothing, Type="String")
    return aws


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return good().write(tmp_path / "image")


def another(tmp_path: Path) -> Image:
    draft = good()
    draft.history.append("RUN true")
    return layout.read(draft.write(tmp_path / "another"))


def test_an_image_is_released_by_digest_once_and_can_be_rolled_back(
    platform: Account, environment: EnvironmentSpec, folder: Path, tmp_path: Path
) -> None:
    environment = environment.model_copy(update={"emulated": True})
    said: list[str] = []
    image, later = layout.read(folder), another(tmp_path)
    uri = publish.publish(platform, environment, folder, image, said.append)
    assert uri == f"{REGISTRY}/{NAME}@{image.digest}" == read_image(platform, PARAMETER, emulated=False)
    assert "no layers" in said[0], "what an emulated registry can't show is said"
    assert publish.publish(platform, environment, folder, image, said.append) == uri
    assert "already" in said[-2] and "already" in said[-1]

    publish.publish(platform, environment, folder, later, said.append)
    assert read_image(platform, PARAMETER, emulated=False).endswith(later.digest)
    repository = publish.find_repository(platform, environment)
    publish.release(platform, environment, repository, image.digest, said.append)
    assert read_image(platform, PARAMETER, emulated=False) == uri
    assert later.digest in said[-1], "what it was before, so that it can be taken back"


def test_what_the_repository_doesnt_have_is_not_released(platform: Account, environment: EnvironmentSpec) -> None:
    repository = publish.find_repository(platform, environment)
    with pytest.raises(AwsRefusedError, match="has no image sha256:abab"):
        publish.release(platform, environment, repository, "sha256:" + "ab" * 32, print)
    with pytest.raises(InputError, match="64 hex digits"):
        publish.release(platform, environment, repository, "latest", print)
    assert platform.client("ssm").get_parameter(Name=PARAMETER)["Parameter"]["Value"].endswith("0" * 64)


def test_without_a_platform_nothing_is_pushed(aws: Account, environment: EnvironmentSpec, folder: Path) -> None:
    with pytest.raises(AwsRefusedError, match=r"/trainyard/test/image doesn't exist; deploy the stacks"):
        publish.publish(aws, environment, folder, layout.read(folder), print)
    aws.client("ssm").put_parameter(Name=PARAMETER, Value="docker.io/library/debian:latest", Type="String")
    with pytest.raises(AwsRefusedError, match="names no image of ECR"):
        publish.find_repository(aws, environment)


SKOPEO = """#!/bin/sh
printf '%s\\n' "$@" > {folder}/arguments
while [ "$1" != --authfile ]; do shift; done
cp "$2" {folder}/auth.json
stat -c %a "$2" > {folder}/mode
{ending}
"""


def skopeo(folder: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "bin" / "skopeo"
    program.parent.mkdir()
    program.write_text(SKOPEO.format(folder=folder, ending=ending))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


def test_a_real_account_gets_the_layout_by_skopeo_and_no_argument_is_a_secret(
    platform: Account, environment: EnvironmentSpec, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skopeo(tmp_path, "exit 0", monkeypatch)
    image = layout.read(folder)
    with pytest.raises(AwsRefusedError, match="has no image"):  # the stand-in pushed nothing: then nothing is released
        publish.publish(platform, environment, folder, image, print)
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[:3] == ["copy", "--preserve-digests", "--authfile"]
    tagged = f"docker://{REGISTRY}/{NAME}:sha256-{image.digest[7:39]}"
    assert arguments[-2:] == [f"oci:{folder}:built", tagged]
    (registry, secret), *others = json.loads((tmp_path / "auth.json").read_text())["auths"].items()
    assert (registry, others) == (REGISTRY, []) and secret["auth"] not in "".join(arguments)
    assert (tmp_path / "mode").read_text().strip() == "600"
    assert not Path(arguments[3]).exists(), "the token is gone with the push"


def test_a_push_that_fails_is_one_line(
    platform: Account, environment: EnvironmentSpec, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skopeo(tmp_path, "echo first >&2; echo 'denied: no push for you' >&2; exit 1", monkeypatch)
    with pytest.raises(AwsRefusedError, match=r"^pushing to .*: denied: no push for you$"):
        publish.publish(platform, environment, folder, layout.read(folder), print)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="needs skopeo; run: scripts/setup --with image"):
        publish.publish(platform, environment, folder, layout.read(folder), print)
