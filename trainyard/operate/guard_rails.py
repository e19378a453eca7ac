"""The guard-rails' cases put to AWS itself: `scripts/verify_guardrails ENV.yaml`.

`iam:SimulateCustomPolicy` decides each case of `trainyard.isolation.rails` by the policies of the synthesized
templates. It starts and changes nothing, costs nothing, and needs nothing deployed: credentials that may call it do.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.errors import InputError, TrainyardError
from trainyard.isolation.account import build
from trainyard.isolation.conditions import Value
from trainyard.isolation.rails import RailCase, rail_cases
from trainyard.isolation.templates import Deployment, synthesize
from trainyard.launch.aws import aws_errors
from trainyard.launch.place import environment_file
from trainyard.launch.session import checkout_root
from trainyard.spec.platform import load_environment
from trainyard.spec.words import counted

TYPES = {
    "sagemaker:EnableRemoteDebug": "boolean",
    "sagemaker:KeepAlivePeriod": "numeric",
    "sagemaker:MaxRuntimeInSeconds": "numeric",
    "ssm:SessionDocumentAccessCheck": "boolean",
}
"""Condition keys that are no strings, in SimulateCustomPolicy's words."""


@dataclass(frozen=True)
class Answer:
    """What AWS said of one case."""

    case: RailCase
    decision: str
    """`allowed`, `explicitDeny` or `implicitDeny`."""

    @property
    def agrees(self) -> bool:
        """Whether it is what the case says: a refusal must be an explicit one."""
        return self.decision == ("allowed" if self.case.allowed else "explicitDeny")


def simulate(iam: Any, deployment: Deployment, cases: Iterable[RailCase]) -> Iterator[Answer]:
    """AWS's answers, one request a case; AwsRefusedError where it gives none."""
    for case in cases:
        own, limits = case.policies(deployment)
        with aws_errors("iam:SimulateCustomPolicy", str(case), "allow the caller iam:SimulateCustomPolicy"):
            answer = iam.simulate_custom_policy(
                PolicyInputList=[_text(item) for item in own],
                PermissionsBoundaryPolicyInputList=[_text(item) for item in limits],
                ActionNames=[case.action],
                ResourceArns=[case.resource],
                ContextEntries=[_entry(key, value) for key, value in case.stated.items()],
            )
        yield Answer(case, answer["EvaluationResults"][0]["EvalDecision"])


def _text(document: dict[str, Any]) -> str:
    import json

    return json.dumps({"Version": "2012-10-17", **document}, separators=(",", ":"))


def _entry(key: str, value: Value) -> dict[str, Any]:
    single = isinstance(value, str)
    kind = TYPES.get(key, "string" if single else "stringList")
    return {"ContextKeyName": key, "ContextKeyType": kind, "ContextKeyValues": [value] if single else list(value)}


def open_cases(environment: Path, checkout: Path) -> tuple[Deployment, list[RailCase]]:
    """The cases of each tenant against its neighbour; InputError where there is no other tenant."""
    spec = load_environment(environment)
    tenants = list(spec.tenants)
    if len(tenants) < 2:
        raise InputError(
            f"{environment}: environment {spec.name} has one tenant, and the cases need another's things; "
            "give an environment with two, e.g. environments/local.yaml"
        )
    deployment = Deployment.of(synthesize(environment, checkout), spec)
    account = build(deployment, spec)
    pairs = zip(tenants, [*tenants[1:], tenants[0]], strict=True)
    return deployment, [case for tenant, other in pairs for case in rail_cases(account, tenant, other)]


def main(arguments: list[str] | None = None) -> int:
    """0: AWS agrees with every case; 1: it doesn't; 2: wrong input; 3: AWS refused."""
    parser = argparse.ArgumentParser(prog="scripts/verify_guardrails", description=__doc__)
    parser.add_argument("environment", metavar="ENV.yaml", help="the environment file, or its name")
    try:
        deployment, cases = open_cases(environment_file(parser.parse_args(arguments).environment), checkout_root())
        import boto3

        with aws_errors("open", "a session", "sign in (`aws sso login`) or set AWS_PROFILE"):
            iam = boto3.client("iam", region_name=deployment.region)
        answers = list(simulate(iam, deployment, cases))
    except TrainyardError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    wrong = [answer for answer in answers if not answer.agrees]
    for answer in wrong:
        print(
            f"{answer.case}: AWS says {answer.decision}, {'allowed' if answer.case.allowed else 'explicitDeny'} wanted"
        )
    print(f"{counted(len(answers), 'case')} put to iam:SimulateCustomPolicy, {len(wrong)} answered otherwise")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
