"""Synthesized templates, and the values that their intrinsic functions would have once deployed.

Physical ids are made up, but shaped as CloudFormation makes them: generated names begin with the stack's name, ids of
EC2 and keys are opaque. So a policy that is written for a pattern of names meets the names that it would meet.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.children import output_of, start
from trainyard.errors import InputError, JobFailedError
from trainyard.isolation.packages import look_at_packages
from trainyard.spec.platform import EnvironmentSpec

Template = dict[str, Any]

SYNTHESIS_SECONDS = 600


def synthesize(environment: Path, checkout: Path) -> dict[str, Template]:
    """Templates by stack name, from the checkout's app.py in a process of its own: nothing here imports the CDK.

    Without the checks, which take half of the time: for looking at templates that somebody else deploys. The functions'
    code, which stands beside them and not in them, is looked at here.
    """
    with tempfile.TemporaryDirectory(prefix="trainyard-isolation-") as folder:
        templates = synthesize_into(Path(folder), environment, checkout, {"checks": "off"})
        look_at_packages(Path(folder), templates, checkout)
    return templates


def synthesize_into(
    folder: Path, environment: Path, checkout: Path, context: Mapping[str, str] | None = None
) -> dict[str, Template]:
    """The same, with the cloud assembly left in `folder`: what `cdk deploy --app FOLDER` deploys, so that the templates
    must pass every check. `context` is app.py's, beside the environment."""
    app = checkout / "app.py"
    if not app.is_file():
        raise InputError(f"{app}: no CDK app there; run trainyard from its checkout")
    settings = json.loads((checkout / "cdk.json").read_text(encoding="utf-8"))["context"]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CDK_"))}
    # The CDK's own rules are told by the environment; by context they could only be made warnings.
    fast = {"CDK_VALIDATION": "false"} if (context or {}).get("checks") == "off" else {}
    whole = json.dumps({**settings, "environment": str(environment.resolve()), **(context or {})})
    told = {**fast, **_package_cache(), "CDK_OUTDIR": str(folder), "CDK_CONTEXT_JSON": whole}
    # Node and the app each leave what they keep for themselves where they are killed.
    with tempfile.TemporaryDirectory(prefix="trainyard-synthesis-") as scratch:
        process = start(
            [sys.executable, str(app)],
            cwd=checkout,
            env={**inherited, **told, "TMPDIR": scratch},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        _, errors = output_of(process, SYNTHESIS_SECONDS)
    if process.returncode:
        said = (errors.strip() or "it printed nothing").splitlines()[-1]
        if process.returncode == InputError.exit_code:
            raise InputError(said)
        raise JobFailedError(f"{environment}: synthesis failed: {said}; `cdk synth` prints all of it")
    suffix = ".template.json"
    return {
        path.name.removesuffix(suffix): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob(f"*{suffix}"))
    }


def _package_cache() -> dict[str, str]:
    """jsii keeps its packages below the home folder, and ends where it may not write there: it then goes without."""
    try:
        folder = Path.home() / ".cache/aws/jsii"
        there = next(place for place in (folder, *folder.parents) if place.exists())
        is_writable = os.access(there, os.W_OK)
    except (OSError, RuntimeError):  # a folder that may not be looked into; nobody's home
        is_writable = False
    return {} if is_writable else {"JSII_RUNTIME_PACKAGE_CACHE": "disabled"}


_OPAQUE = {
    "AWS::EC2::VPC": "vpc-",
    "AWS::EC2::Subnet": "subnet-",
    "AWS::EC2::SecurityGroup": "sg-",
    "AWS::EC2::VPCEndpoint": "vpce-",
    "AWS::EC2::RouteTable": "rtb-",
    "AWS::EC2::FlowLog": "fl-",
    "AWS::EC2::LaunchTemplate": "lt-",
    "AWS::FSx::FileSystem": "fs-",
    "AWS::EFS::AccessPoint": "fsap-",
    "AWS::EFS::FileSystem": "fs-",
    "AWS::KMS::Key": "",
}
"""Types whose id is made by AWS, with the id's prefix."""

_NAMES = (
    "BucketName",
    "RoleName",
    "ManagedPolicyName",
    "Name",
    "RepositoryName",
    "LogGroupName",
    "TopicName",
    "FunctionName",
    "JobQueueName",
    "FirewallName",
    "FirewallPolicyName",
    "InstanceProfileName",
    "RuleGroupName",
    "TrackingServerName",
)

_ARNS: dict[str, str] = {
    "AWS::S3::Bucket": "arn:aws:s3:::{id}",
    "AWS::IAM::Role": "arn:aws:iam::{account}:role{path}{id}",
    "AWS::IAM::ManagedPolicy": "arn:aws:iam::{account}:policy{path}{id}",
    "AWS::IAM::InstanceProfile": "arn:aws:iam::{account}:instance-profile{path}{id}",
    "AWS::KMS::Key": "arn:aws:kms:{place}:key/{id}",
    "AWS::KMS::Alias": "arn:aws:kms:{place}:{id}",
    "AWS::ECR::Repository": "arn:aws:ecr:{place}:repository/{id}",
    "AWS::SNS::Topic": "arn:aws:sns:{place}:{id}",
    "AWS::SQS::Queue": "arn:aws:sqs:{place}:{id}",
    "AWS::SSM::Parameter": "arn:aws:ssm:{place}:parameter{id}",
    "AWS::Logs::LogGroup": "arn:aws:logs:{place}:log-group:{id}:*",
    "AWS::FSx::FileSystem": "arn:aws:fsx:{place}:file-system/{id}",
    "AWS::EFS::AccessPoint": "arn:aws:elasticfilesystem:{place}:access-point/{id}",
    "AWS::EFS::FileSystem": "arn:aws:elasticfilesystem:{place}:file-system/{id}",
    "AWS::EC2::VPC": "arn:aws:ec2:{place}:vpc/{id}",
    "AWS::EC2::Subnet": "arn:aws:ec2:{place}:subnet/{id}",
    "AWS::EC2::SecurityGroup": "arn:aws:ec2:{place}:security-group/{id}",
    "AWS::EC2::VPCEndpoint": "arn:aws:ec2:{place}:vpc-endpoint/{id}",
    "AWS::EC2::RouteTable": "arn:aws:ec2:{place}:route-table/{id}",
    "AWS::EC2::FlowLog": "arn:aws:ec2:{place}:vpc-flow-log/{id}",
    "AWS::EC2::InternetGateway": "arn:aws:ec2:{place}:internet-gateway/{id}",
    "AWS::EC2::NatGateway": "arn:aws:ec2:{place}:natgateway/{id}",
    "AWS::NetworkFirewall::Firewall": "arn:aws:network-firewall:{place}:firewall/{id}",
    "AWS::NetworkFirewall::FirewallPolicy": "arn:aws:network-firewall:{place}:firewall-policy/{id}",
    "AWS::NetworkFirewall::RuleGroup": "arn:aws:network-firewall:{place}:stateful-rulegroup/{id}",
    "AWS::Batch::JobQueue": "arn:aws:batch:{place}:job-queue/{id}",
    "AWS::Batch::SchedulingPolicy": "arn:aws:batch:{place}:scheduling-policy/{id}",
    "AWS::Batch::ServiceEnvironment": "arn:aws:batch:{place}:service-environment/{id}",
    "AWS::CloudWatch::Alarm": "arn:aws:cloudwatch:{place}:alarm:{id}",
    "AWS::CloudWatch::Dashboard": "arn:aws:cloudwatch::{account}:dashboard/{id}",
    "AWS::Events::Rule": "arn:aws:events:{place}:rule/{id}",
    "AWS::Lambda::Function": "arn:aws:lambda:{place}:function:{id}",
    "AWS::StepFunctions::StateMachine": "arn:aws:states:{place}:stateMachine:{id}",
    "AWS::DynamoDB::Table": "arn:aws:dynamodb:{place}:table/{id}",
    "AWS::SecretsManager::Secret": "arn:aws:secretsmanager:{place}:secret:{id}",
    "AWS::Budgets::Budget": "arn:aws:budgets::{account}:budget/{id}",
    "AWS::CloudTrail::Trail": "arn:aws:cloudtrail:{place}:trail/{id}",
    "AWS::EC2::LaunchTemplate": "arn:aws:ec2:{place}:launch-template/{id}",
    "AWS::EC2::PlacementGroup": "arn:aws:ec2:{place}:placement-group/{id}",
    "AWS::PCS::Cluster": "arn:aws:pcs:{place}:cluster/{id}",
    # Within their cluster's; which one is of no account to who may touch them.
    "AWS::PCS::ComputeNodeGroup": "arn:aws:pcs:{place}:cluster/any/computenodegroup/{id}",
    "AWS::PCS::Queue": "arn:aws:pcs:{place}:cluster/any/queue/{id}",
    "AWS::SageMaker::Cluster": "arn:aws:sagemaker:{place}:cluster/{id}",
    "AWS::SageMaker::MlflowTrackingServer": "arn:aws:sagemaker:{place}:mlflow-tracking-server/{id}",
}

_REF_IS_ARN = {
    "AWS::PCS::Cluster",
    "AWS::PCS::ComputeNodeGroup",
    "AWS::PCS::Queue",
    "AWS::NetworkFirewall::Firewall",
    "AWS::NetworkFirewall::FirewallPolicy",
    "AWS::NetworkFirewall::RuleGroup",
    "AWS::IAM::ManagedPolicy",
    "AWS::SNS::Topic",
    "AWS::Batch::JobQueue",
    "AWS::Batch::QuotaShare",
    "AWS::Batch::SchedulingPolicy",
    "AWS::Batch::ServiceEnvironment",
    "AWS::StepFunctions::StateMachine",
    "AWS::SecretsManager::Secret",
}


class UnresolvedError(JobFailedError):
    """An intrinsic function that has no value here: no proof can rest on a guess."""


@dataclass(frozen=True)
class Deployment:
    """All of an environment's templates as if deployed."""

    templates: Mapping[str, Template]
    account: str
    region: str

    @classmethod
    def of(cls, templates: Mapping[str, Template], environment: EnvironmentSpec) -> "Deployment":
        """The templates in the environment's account and region."""
        return cls(templates, environment.account, environment.region)

    def type_of(self, stack: str, logical_id: str) -> str:
        """The resource's CloudFormation type."""
        return str(self.templates[stack]["Resources"][logical_id]["Type"])

    def properties(self, stack: str, logical_id: str) -> dict[str, Any]:
        """The resource's properties as the template has them, intrinsics and all."""
        return dict(self.templates[stack]["Resources"][logical_id].get("Properties", {}))

    def physical_id(self, stack: str, logical_id: str) -> str:
        """What Ref gives for types that don't give their ARN: the stated name, or one as CloudFormation makes it."""
        kind, properties = self.type_of(stack, logical_id), self.properties(stack, logical_id)
        digest = hashlib.sha256(f"{stack}/{logical_id}".encode()).hexdigest()
        if kind in _OPAQUE:
            if kind == "AWS::KMS::Key":
                return "-".join((digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:32]))
            return _OPAQUE[kind] + digest[:17]
        stated = next((properties[name] for name in _NAMES if name in properties), None)
        if stated is not None:
            return str(self.resolve(stated, stack))
        if kind == "AWS::S3::Bucket":
            return f"{stack}-{logical_id}"[:50].lower() + f"-{digest[:12]}"
        return f"{stack}-{logical_id}"[:51] + f"-{digest[:12]}"

    def arn(self, stack: str, logical_id: str) -> str:
        """The resource's ARN."""
        kind = self.type_of(stack, logical_id)
        service, _, noun = kind.removeprefix("AWS::").lower().partition("::")
        shape = _ARNS.get(kind, f"arn:aws:{service}:{{place}}:{noun}/{{id}}")
        if kind == "AWS::Batch::QuotaShare":  # in a queue, which it names by name
            properties = self.resolve(self.properties(stack, logical_id), stack)
            inside = f"job-queue/{properties['JobQueue']}/quota-share/{properties['QuotaShareName']}"
            return f"arn:aws:batch:{self.region}:{self.account}:{inside}"
        name = self.physical_id(stack, logical_id)
        if kind == "AWS::SSM::Parameter" and not name.startswith("/"):
            name = f"/{name}"
        path = self.properties(stack, logical_id).get("Path", "/")
        return shape.format(id=name, account=self.account, place=f"{self.region}:{self.account}", path=path)

    def resolve(self, value: Any, stack: str) -> Any:
        """`value` with every intrinsic function replaced by what it would give."""
        if isinstance(value, list):
            return [item for item in (self.resolve(item, stack) for item in value) if item is not None]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            ((function, argument),) = value.items()
            if function == "Ref" or function.startswith("Fn::"):
                return self._call(function, argument, stack)
        return {key: self.resolve(item, stack) for key, item in value.items()}

    def _call(self, function: str, argument: Any, stack: str) -> Any:
        calls: dict[str, Callable[[Any, str], Any]] = {
            "Ref": self._ref,
            "Fn::GetAtt": self._attribute,
            "Fn::Join": lambda given, where: given[0].join(str(item) for item in self.resolve(given[1], where)),
            "Fn::Base64": lambda given, where: b64encode(str(self.resolve(given, where)).encode()).decode(),
            "Fn::Sub": self._sub,
            "Fn::Select": lambda given, where: self.resolve(given[1], where)[int(given[0])],
            "Fn::Split": lambda given, where: str(self.resolve(given[1], where)).split(given[0]),
            "Fn::ImportValue": lambda given, where: self._import(str(self.resolve(given, where))),
        }
        if function not in calls:
            raise UnresolvedError(f"stack {stack}: {function} has no value before deployment; decide at synth")
        return calls[function](argument, stack)

    def _ref(self, name: str, stack: str) -> Any:
        pseudo = {
            "AWS::AccountId": self.account,
            "AWS::Region": self.region,
            "AWS::Partition": "aws",
            "AWS::URLSuffix": "amazonaws.com",
            "AWS::StackName": stack,
            "AWS::StackId": f"arn:aws:cloudformation:{self.region}:{self.account}:stack/{stack}/0",
            "AWS::NoValue": None,
        }
        if name in pseudo:
            return pseudo[name]
        if name not in self.templates[stack]["Resources"]:
            raise UnresolvedError(f"stack {stack}: Ref to {name}, which is no resource; templates take no parameters")
        if self.type_of(stack, name) in _REF_IS_ARN:
            return self.arn(stack, name)
        return self.physical_id(stack, name)

    def _attribute(self, argument: Any, stack: str) -> Any:
        name, _, attribute = argument.partition(".") if isinstance(argument, str) else (argument[0], "", argument[1])
        if attribute == "EndpointIds":  # a firewall's: "zone:endpoint", one each
            return [f"zone:vpce-{self.physical_id(stack, name)}"]
        if attribute.endswith("Arn"):
            return self.arn(stack, name)
        if attribute in {"GroupId", "VpcId", "FileSystemId", "Id", "KeyId"}:
            return self.physical_id(stack, name)
        return f"{self.physical_id(stack, name)}.{attribute}"

    def _sub(self, argument: Any, stack: str) -> str:
        text, extra = (argument, {}) if isinstance(argument, str) else argument

        def value(match: re.Match[str]) -> str:
            name = match[1]
            if name.startswith("!"):
                return "${" + name[1:] + "}"
            if name in extra:
                return str(self.resolve(extra[name], stack))
            return str(self._attribute(name, stack) if "." in name else self._ref(name, stack))

        return re.sub(r"\$\{([^}]+)\}", value, text)

    def _import(self, export: str) -> Any:
        for stack, template in self.templates.items():
            for output in template.get("Outputs", {}).values():
                if output.get("Export", {}).get("Name") == export:
                    return self.resolve(output["Value"], stack)
        raise UnresolvedError(f"nothing exports {export}")
