"""A checked image to the platform's repository, and the digest that jobs use from then on.

The push is skopeo's, with ECR's own token in a file that only we can read. Then the repository is asked for the digest,
and the environment's image parameter gets it: no stack is deployed, jobs that run go on with the image they began with,
and a resume of theirs too. `--digest` releases an image that is there already: that is a roll-back.

An emulated account has ECR's API and no registry behind it: there the manifest alone is put, by that API.
"""

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.errors import AwsRefusedError, InputError
from trainyard.launch.aws import aws_errors, error_code, is_missing
from trainyard.launch.contract import how_to_deploy
from trainyard.launch.session import Account
from trainyard.operate.image.layout import Image
from trainyard.spec.platform import EnvironmentSpec

Say = Callable[[str], None]

SECONDS = 4 * 3600
"""For one push: gigabytes over an office's line."""
_PARAMETER = re.compile(
    r"^(?P<registry>\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(?:\.cn)?)/(?P<name>[a-z0-9._/-]+)@"
)


@dataclass(frozen=True)
class Repository:
    """The platform's ECR repository."""

    registry: str
    name: str

    def image(self, digest: str) -> str:
        """The URI that jobs use."""
        return f"{self.registry}/{self.name}@{digest}"


def find_repository(account: Account, environment: EnvironmentSpec) -> Repository:
    """The repository that the image parameter names; AwsRefusedError where the platform isn't deployed."""
    name = environment.image_parameter
    ssm = account.client("ssm")
    with aws_errors("reading", f"SSM parameter {name}"):
        try:
            value = str(ssm.get_parameter(Name=name)["Parameter"]["Value"])
        except ssm.exceptions.ClientError as error:
            if is_missing(error):
                raise AwsRefusedError(f"SSM parameter {name} doesn't exist; {how_to_deploy(environment)}") from None
            raise
    found = _PARAMETER.match(value)
    if found is None:
        raise AwsRefusedError(
            f"SSM parameter {name}: {value!r} names no image of ECR by its digest; deploy the platform again"
        )
    return Repository(found["registry"], found["name"])


def publish(account: Account, environment: EnvironmentSpec, layout: Path, image: Image, say: Say) -> str:
    """Push the layout unless its digest is there, then release it; the image's URI."""
    repository = find_repository(account, environment)
    if is_there(account, repository, image.digest):
        say(f"{repository.name} has {image.digest} already")
    elif environment.emulated:
        say("an emulated account has no registry: its ECR gets the manifest, and no layers")
        put_manifest(account, repository, image)
    else:
        registry, password = token(account)
        if registry != repository.registry:
            raise AwsRefusedError(
                f"ECR's token is for {registry}, the repository is in {repository.registry}; deploy again"
            )
        push(layout, f"{repository.registry}/{repository.name}:{tag(image)}", registry, password)
    return release(account, environment, repository, image.digest, say)


def release(account: Account, environment: EnvironmentSpec, repository: Repository, digest: str, say: Say) -> str:
    """Make `digest` what new jobs run; AwsRefusedError where the repository doesn't have it."""
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise InputError(f"--digest {digest}: must be sha256:<64 hex digits>")
    if not is_there(account, repository, digest):
        raise AwsRefusedError(f"{repository.name}: has no image {digest}, so it can't be released; publish it first")
    uri = repository.image(digest)
    name = environment.image_parameter
    ssm = account.client("ssm")
    with aws_errors("writing", f"SSM parameter {name}", "releasing is for the platform's engineers"):
        before = str(ssm.get_parameter(Name=name)["Parameter"]["Value"])
        if before == uri:
            say(f"{name} names it already")
            return uri
        ssm.put_parameter(Name=name, Value=uri, Type="String", Overwrite=True)
    say(f"{name} named {before.partition('@')[2]} before")
    return uri


def is_there(account: Account, repository: Repository, digest: str) -> bool:
    """Whether the repository has an image of that digest."""
    ecr = account.client("ecr")
    with aws_errors("looking into", f"the repository {repository.name}"):
        try:
            ecr.describe_images(repositoryName=repository.name, imageIds=[{"imageDigest": digest}])
        except ecr.exceptions.ClientError as error:
            if error_code(error) == "ImageNotFoundException":
                return False
            raise
    return True


def tag(image: Image) -> str:
    """A tag of its own for every image: the repository lets none be moved."""
    return f"sha256-{image.digest.partition(':')[2][:32]}"


def put_manifest(account: Account, repository: Repository, image: Image) -> None:
    """The manifest by ECR's API."""
    with aws_errors("putting an image into", f"the repository {repository.name}"):
        account.client("ecr").put_image(
            repositoryName=repository.name,
            imageManifest=image.manifest_text,
            imageManifestMediaType=str(image.manifest.get("mediaType", "application/vnd.oci.image.manifest.v1+json")),
            imageTag=tag(image),
            imageDigest=image.digest,
        )


def token(account: Account) -> tuple[str, str]:
    """ECR's registry, and its base64 `AWS:password` of twelve hours."""
    with aws_errors("asking for", "a token of ECR", "allow the caller ecr:GetAuthorizationToken"):
        answer: dict[str, Any] = account.client("ecr").get_authorization_token()["authorizationData"][0]
    return str(answer["proxyEndpoint"]).removeprefix("https://"), str(answer["authorizationToken"])


def push(layout: Path, destination: str, registry: str, password: str, *options: str) -> None:
    """The layout to a registry by skopeo, byte for byte: the digest stays. `options`: more of skopeo's."""
    if shutil.which("skopeo") is None:
        raise InputError("publishing needs skopeo; run: scripts/setup --with image")
    with tempfile.TemporaryDirectory(prefix="trainyard-publish-") as folder:
        # In a file of ours, not among the arguments: those every user of this machine can list.
        secrets = Path(folder) / "auth.json"
        secrets.touch(mode=0o600)
        secrets.write_text(json.dumps({"auths": {registry: {"auth": password}}}), encoding="utf-8")
        command = ["skopeo", "copy", "--preserve-digests", "--authfile", str(secrets), *options]
        try:
            done = subprocess.run(
                [*command, f"oci:{layout}:built", f"docker://{destination}"],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise AwsRefusedError(
                f"pushing to {destination}: took more than {SECONDS // 3600} hours; repeat it"
            ) from None
    if done.returncode:
        said = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        raise AwsRefusedError(f"pushing to {destination}: {said[-1] if said else f'exit code {done.returncode}'}")
