"""The tenant contract and the image, read from SSM: all that the launcher knows of what is deployed."""

import re

from trainyard.errors import AwsRefusedError, InputError
from trainyard.launch.aws import aws_errors, is_missing
from trainyard.launch.session import Account, checkout_root
from trainyard.spec.platform import EnvironmentSpec, TenantContract, parse_contract


class NotDeployedError(AwsRefusedError):
    """What a stack, or a release, writes for everybody isn't there."""


_IMAGE = re.compile(r"^\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(\.cn)?/[a-z0-9._/-]+@sha256:[0-9a-f]{64}$")

_NO_IMAGE = (
    "build and publish one: scripts/build_image, then scripts/publish_image (docs/image.md); until then use "
    "`--environment local` (AWS on this machine) or `--backend local`"
)


def check_tenant(environment: EnvironmentSpec, tenant: str | None, where: str) -> str:
    """The tenant's name; InputError lists those that exist where it is missing or unknown."""
    exist = ", ".join(sorted(environment.tenants))
    if tenant is None:
        raise InputError(f"{where}: tenant is missing; environment {environment.name} has: {exist}")
    if tenant not in environment.tenants:
        raise InputError(f"{where}: tenant '{tenant}' is not in environment {environment.name}, which has: {exist}")
    return tenant


def read_contract(account: Account, environment: EnvironmentSpec, tenant: str) -> TenantContract:
    """The tenant's contract; NotDeployedError where its stack isn't."""
    name = environment.contract_parameter(tenant)
    text = _parameter(account, name, how_to_deploy(environment))
    contract = parse_contract(text, f"SSM parameter {name}")
    given = (contract.environment, contract.tenant, contract.account)
    if given != (environment.name, tenant, environment.account):
        raise AwsRefusedError(
            f"SSM parameter {name}: says environment {given[0]}, tenant {given[1]}, account {given[2]}, which is not "
            f"where it was read; deploy the tenant's stack again"
        )
    return contract


def how_to_deploy(environment: EnvironmentSpec) -> str:
    """The command that deploys the environment's stacks."""
    # Its file's name is not known here: one that bears the environment's may be another, or not be there.
    named = f"environments/{environment.name}.yaml"
    file = named if (checkout_root() / named).is_file() else "ENV.yaml"
    if environment.emulated and file == named:
        # The CDK CLI by hand would need the emulator's endpoint and key in its environment.
        return "deploy the stacks: scripts/quickstart (those of a file of your own: trainyard deploy ENV.yaml)"
    return f"deploy the stacks: trainyard deploy {file}"


def read_image(account: Account, parameter: str, *, emulated: bool) -> str:
    """The training image's URI with its digest; AwsRefusedError where there is none yet.

    The platform stack starts with a digest of zeros, which only the emulator (it runs our entrypoint for any image)
    can do with.
    """
    image = _parameter(account, parameter, _NO_IMAGE)
    if not _IMAGE.match(image):
        raise AwsRefusedError(
            f"SSM parameter {parameter}: {image!r} is not an image pinned by digest "
            "(<account>.dkr.ecr.<region>.amazonaws.com/<name>@sha256:<64 hex digits>); write such a URI there"
        )
    if image.endswith("0" * 64) and not emulated:
        raise AwsRefusedError(f"SSM parameter {parameter}: no training image is published yet; {_NO_IMAGE}")
    return image


def _parameter(account: Account, name: str, mend: str) -> str:
    ssm = account.client("ssm")
    with aws_errors("reading", f"SSM parameter {name}"):
        try:
            return str(ssm.get_parameter(Name=name)["Parameter"]["Value"])
        except ssm.exceptions.ClientError as error:
            if is_missing(error):
                raise NotDeployedError(f"SSM parameter {name} doesn't exist; {mend}") from None
            raise
