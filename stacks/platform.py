"""What an environment's tenants share: the image repository, which image they run, the training queues, the trail."""

from aws_cdk import Stack
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_iam as iam
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from stacks.constructs.audit import AuditTrail
from stacks.constructs.budget_stop import BudgetActor
from stacks.constructs.queues import SharedQueues
from stacks.settings import removal_policy, stack_settings
from trainyard.spec.platform import EnvironmentSpec

UNRELEASED_DIGEST = "sha256:" + "0" * 64
"""What the image parameter names until a first release is put there: no image has this digest."""

KEPT_IMAGES = 50


class PlatformStack(Stack):
    """The ECR repository, the image parameter, the training queues and the trail."""

    images: ecr.Repository
    budget_actor: iam.Role
    """What AWS Budgets acts as. There and exported even where no tenant's budget stops anything: CloudFormation drops
    no export that a tenant's stack still imports, so that the last stop could never be taken back."""

    def __init__(self, scope: Construct, *, environment: EnvironmentSpec) -> None:
        name = f"trainyard-{environment.name}-platform"
        super().__init__(
            scope, name, description="trainyard: what all tenants share", **stack_settings(environment, stateful=True)
        )
        self.images = ecr.Repository(
            self,
            "Images",
            repository_name=environment.image_repository,  # in every image URI; generated names aren't lower-case
            image_scan_on_push=True,
            image_tag_mutability=ecr.TagMutability.IMMUTABLE,
            encryption=ecr.RepositoryEncryption.KMS,  # ECR's own key: who pulls needs no right on it
            lifecycle_rules=[
                ecr.LifecycleRule(max_image_count=KEPT_IMAGES, description="Releases that can be rolled back to")
            ],
            removal_policy=removal_policy(environment),
            empty_on_delete=not environment.retain_data,
        )
        # A release puts a new value here and deploys nothing: CloudFormation changes the parameter only if the value
        # in the template changes, and this one never does.
        ssm.StringParameter(
            self,
            "Image",
            parameter_name=environment.image_parameter,
            description="Training image, pinned by digest; a release overwrites it",
            string_value=f"{self.images.repository_uri}@{UNRELEASED_DIGEST}",
        )
        self.budget_actor = BudgetActor(self, "BudgetActor", environment=environment).role
        self.export_value(self.budget_actor.role_arn)
        SharedQueues(self, "Queues", environment=environment)
        if environment.audit.trail:
            AuditTrail(self, "Audit", environment=environment)
