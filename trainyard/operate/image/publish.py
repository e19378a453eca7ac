"""A checked image to the platform's repository, and the digest that jobs use from then on.

The CDK publishes it: an asset of the environment's image stack, whose destination is that repository, with `docker` in
the place of a Docker engine. Then the repository is asked for the digest, and the environment's image parameter gets
it: no stack is deployed, jobs that run go on with the image they began with, and a resume of theirs too. `--digest`
releases an image that is there already: that is a roll-back.
"""

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainyard.errors import AwsRefusedError, InputError
from trainyard.isolation.templates import synthesize_into
from trainyard.launch.aws import aws_errors, error_code, is_missing
from trainyard.launch.contract import how_to_deploy
from trainyard.launch.session import Account, checkout_root
from trainyard.operate.deploy import cdk
from trainyard.operate.image.docker import Desk
from trainyard.spec.platform import EnvironmentSpec

Say = Callable[[str], None]

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


def publish(
    account: Account, environment: EnvironmentSpec, path: Path, layout: Path, digest: str, say: Say, log: Path
) -> Repository:
    """Push the layout, which has that digest, to the environment's repository, unless it is there. `path` is the
    environment's file; `log` gets the CLI's output."""
    repository = find_repository(account, environment)
    if repository.name != environment.image_repository:
        raise AwsRefusedError(
            f"SSM parameter {environment.image_parameter} names the repository {repository.name}; jobs may pull from "
            f"{environment.image_repository} alone: deploy the platform again"
        )
    if is_there(account, repository, digest):
        say(f"{repository.name} has {digest} already")
    else:
        say(f"cdk publish-assets pushes it to {repository.name}; its output: {log}")
        push(account, environment, path, layout, digest, log)
        if not is_there(account, repository, digest):
            raise AwsRefusedError(f"{repository.name}: has no image {digest} after the push; {log} says what happened")
    return repository


def push(account: Account, environment: EnvironmentSpec, path: Path, layout: Path, digest: str, log: Path) -> None:
    """The layout to the environment's repository, by the CDK's CLI."""
    if shutil.which("skopeo") is None and not environment.emulated:
        raise InputError("publishing needs skopeo; run: scripts/setup --with image")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="trainyard-publish-") as folder:
        docker = Desk(Path(folder)).prepare(layout, digest, is_emulated=environment.emulated)
        assembly = Path(folder) / "cdk.out"
        # Without checks: they ask for resources, and this stack has none.
        (stack,) = synthesize_into(assembly, path, checkout_root(), {"image": digest, "checks": "off"})
        # The command is new to the CLI, which wants that said; its version is pinned.
        arguments = ["publish-assets", stack, "--unstable=publish-assets", "--app", str(assembly)]
        cdk(checkout_root(), arguments, {**account.variables(), **docker}, log, lambda _: None)


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
