"""A training image on its way to the platform's repository: made alone, with `-c image=DIGEST`."""

import re
from pathlib import Path

from aws_cdk import DefaultStackSynthesizer, Stack
from constructs import Construct

from stacks.settings import stack_settings
from trainyard.errors import InputError
from trainyard.spec.platform import EnvironmentSpec

DOCKER = Path(__file__).resolve().parents[1] / "scripts/lib/docker"


class ImageStack(Stack):
    """An image asset and no resource: `cdk publish-assets` pushes it, and a deployment would have nothing to do.

    What jobs run is the image parameter's, which the platform's stack has: a template that named a digest would take
    a roll-back back with the next deployment.
    """

    def __init__(self, scope: Construct, *, environment: EnvironmentSpec, digest: str) -> None:
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            raise InputError(f"-c image={digest}: must be sha256:<64 hex digits>; scripts/publish_image says which")
        synthesizer = DefaultStackSynthesizer(
            generate_bootstrap_version_rule=False,
            image_assets_repository_name=environment.image_repository,
            # The one that the bootstrap makes may push to the CDK's own repository alone, and is every app's in the
            # account: who publishes is who pushes.
            image_asset_publishing_role_arn="",
            docker_tag_prefix="sha256-",
        )
        super().__init__(
            scope,
            f"trainyard-{environment.name}-image",
            description="trainyard: a training image, published and not deployed",
            **{**stack_settings(environment, stateful=False), "synthesizer": synthesizer},
        )
        # The stack binds a copy, which jsii takes for the original; assets are noted by both together.
        synthesizer.bind(self)
        # Half of the digest: registries that know no referrers keep a list of them under the tag of a whole one.
        # The repository lets no tag be moved, and what is released is the digest.
        synthesizer.add_docker_image_asset(
            executable=[str(DOCKER), "load", digest],
            source_hash=digest.removeprefix("sha256:")[:32],
            display_name=f"training image {digest}",
        )
