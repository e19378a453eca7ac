"""After a deploy: does every resource of the templates really exist? CREATE_COMPLETE alone proves nothing."""

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.emulator.info import EmulatorInfo
from trainyard.errors import AwsRefusedError, InputError, JobFailedError
from trainyard.spec.words import counted, either


@dataclass(frozen=True)
class DeploymentReport:
    """What was looked at. Nothing was missing, or there would be no report."""

    stacks: tuple[str, ...]
    num_resources: int
    api_backed: tuple[str, ...]
    """CloudFormation types whose resources were found by their own service's API."""
    recorded_only: tuple[str, ...]
    """Types of which only CloudFormation's record exists."""


def verify_deployment(info: EmulatorInfo, stack_names: Iterable[str], templates_dir: Path) -> DeploymentReport:
    """Compare every resource of `stack_names`' synthesized templates (DIR/<stack>.template.json) with what exists.

    JobFailedError names each one that is missing: absent from the stack, of an unknown type, or not found by its
    service. InputError where a template is missing.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    names = tuple(stack_names)
    templates = {name: _template(templates_dir, name) for name in names}
    prober = _Prober(info)
    try:
        missing = [problem for name in names for problem in prober.problems(name, templates[name])]
    except (ClientError, BotoCoreError) as error:
        raise AwsRefusedError(f"the deployment can't be verified at {info.endpoint}: {error}") from None
    if missing:
        absent = f"{counted(len(missing), 'deployed resource')} {either(len(missing), 'is', 'are')} not there"
        raise JobFailedError(f"{absent}: {'; '.join(missing)}; deploy again")
    backing = prober.backing
    return DeploymentReport(
        stacks=names,
        num_resources=prober.num_resources,
        api_backed=tuple(sorted(name for name, recorded in backing.items() if not recorded)),
        recorded_only=tuple(sorted(name for name, recorded in backing.items() if recorded)),
    )


def _template(templates_dir: Path, stack_name: str) -> Mapping[str, Any]:
    path = templates_dir / f"{stack_name}.template.json"
    try:
        content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such template; synthesize first: cdk synth -c environment=...") from None
    except ValueError as error:
        raise InputError(f"{path}: is not JSON: {error}") from None
    return content


class _Prober:
    """Asks the emulator's APIs, as the account's root."""

    def __init__(self, info: EmulatorInfo) -> None:
        import boto3
        from botocore.config import Config

        from trainyard.emulator.cloudformation.model import Site

        session = boto3.session.Session(
            aws_access_key_id=info.admin_access_key_id,
            aws_secret_access_key=info.admin_secret_access_key,
            region_name=info.region,
        )
        config = Config(retries={"max_attempts": 2}, s3={"addressing_style": "path"}, proxies={})
        clients: dict[str, Any] = {}

        def client(service: str) -> Any:
            if service not in clients:
                clients[service] = session.client(service, endpoint_url=info.endpoint, config=config)
            return clients[service]

        self.site = Site(info.account, info.region, client)
        self.backing: dict[str, bool] = {}
        self.num_resources = 0

    def problems(self, stack_name: str, template: Mapping[str, Any]) -> list[str]:
        """What is missing of one stack, each as `stack/logical id (type): why`."""
        from botocore.exceptions import ClientError

        from trainyard.emulator.cloudformation.catalogue import RESOURCE_TYPES
        from trainyard.emulator.cloudformation.model import is_missing

        try:
            pages = (
                self.site.client("cloudformation").get_paginator("list_stack_resources").paginate(StackName=stack_name)
            )
            deployed = {item["LogicalResourceId"]: item for page in pages for item in page["StackResourceSummaries"]}
        except ClientError as error:
            if is_missing(error):
                return [f"{stack_name}: no such stack"]
            raise

        def problem(logical_id: str, resource: Mapping[str, Any]) -> str | None:
            kind = RESOURCE_TYPES.get(resource["Type"])
            physical_id = deployed.get(logical_id, {}).get("PhysicalResourceId")
            where = f"{stack_name}/{logical_id} ({resource['Type']})"
            if kind is None:
                return f"{where}: of a type that the emulator doesn't know"
            self.backing[kind.name] = kind.recorded
            if not physical_id or physical_id == "unknown":
                return f"{where}: not in the stack"
            return (
                None if kind.exists(self.site, physical_id) else f"{where}: {physical_id} is not found by its service"
            )

        resources = [
            (key, value)
            for key, value in template.get("Resources", {}).items()
            if "Condition" not in value or key in deployed
        ]
        self.num_resources += len(resources)
        for _, resource in resources:  # make clients before the threads do: making one is not thread-safe
            self._warm(resource["Type"])
        with ThreadPoolExecutor(max_workers=4) as pool:
            return [found for found in pool.map(lambda item: problem(*item), resources) if found]

    def _warm(self, resource_type: str) -> None:
        services = {
            "EC2": "ec2",
            "IAM": "iam",
            "S3": "s3",
            "FSx": "fsx",
            "ECR": "ecr",
            "Logs": "logs",
            "CloudWatch": "cloudwatch",
            "SNS": "sns",
        }
        services |= {"SSM": "ssm", "Events": "events", "Budgets": "budgets", "Batch": "batch", "KMS": "kms"}
        services |= {"Lambda": "lambda"}
        service = services.get(resource_type.split("::")[1])
        if service:
            self.site.client(service)
