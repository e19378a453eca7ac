"""A tenant's small functions: what all of them have, and how one rings when it fails."""

import atexit
import json
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from aws_cdk import Duration, Stack
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sns as sns
from constructs import Construct

import trainyard
from stacks.constructs.acknowledged import FUNCTIONS, acknowledge
from stacks.constructs.permissions import TenantResources
from trainyard.errors import InputError

MAX_VARIABLES_BYTES = 4_096
"""Lambda: of all variables of a function's environment."""

FUNCTIONS_FOLDER = Path(trainyard.__file__).parent / "functions"
PERIOD = Duration.minutes(5)
"""How long a function's errors are summed up before its alarm looks at them."""


def tenant_function(
    scope: Construct,
    *,
    description: str,
    code: lambda_.Code,
    handler: str,
    role: iam.Role,
    resources: TenantResources,
    timeout: Duration,
    findings: Mapping[str, str],
    name: str | None = None,
    settings: tuple[str, object] | None = None,
    memory_mib: int | None = None,
) -> lambda_.Function:
    """The function `Function` of `scope`, which writes to the tenant's log group.

    `role`: has its rights already; `findings`: why what the checks find of this one is as it should be; `settings`: the
    variable of its environment, and what stands there as JSON.
    """
    variables = {settings[0]: json.dumps(settings[1], sort_keys=True)} if settings else {}
    _check_size(variables, scope)
    made = lambda_.Function(
        scope,
        "Function",
        function_name=name,
        description=description,
        runtime=lambda_.Runtime.PYTHON_3_13,
        handler=handler,
        code=code,
        role=role.without_policy_updates(),
        environment=variables or None,
        timeout=timeout,
        memory_size=memory_mib,
        log_group=resources.logs.group,
    )
    acknowledge(made, FUNCTIONS | dict(findings))
    return made


def _check_size(variables: Mapping[str, str], scope: Construct) -> None:
    """InputError for settings that Lambda wouldn't take half-way through a deployment. All that may be many in them are
    the environment's instance types."""
    length = sum(len(name) + len(text.encode()) for name, text in variables.items())
    if length > MAX_VARIABLES_BYTES:
        raise InputError(
            f"{Stack.of(scope).stack_name}: the settings of its {scope.node.id} would have {length:,} bytes, and "
            f"Lambda takes {MAX_VARIABLES_BYTES:,} of a function: name fewer instance types in max_instances, queues"
        )


def ring(
    scope: Construct,
    construct_id: str,
    *,
    metric: cloudwatch.IMetric,
    topic: sns.ITopic,
    description: str,
    threshold: float = 1,
    periods: int = 1,
    is_below: bool = False,
    no_figure: cloudwatch.TreatMissingData = cloudwatch.TreatMissingData.NOT_BREACHING,
) -> None:
    """Tell the topic where `metric` reaches the threshold, or `is_below` it, in so many periods on end.

    `no_figure`: what a period without any says. Of errors that all is well, which is the default.
    """
    compare = cloudwatch.ComparisonOperator
    cloudwatch.Alarm(
        scope,
        construct_id,
        alarm_description=description,
        metric=metric,
        threshold=threshold,
        evaluation_periods=periods,
        comparison_operator=compare.LESS_THAN_THRESHOLD if is_below else compare.GREATER_THAN_OR_EQUAL_TO_THRESHOLD,
        treat_missing_data=no_figure,
    ).add_alarm_action(actions.SnsAction(topic))


def function_code(modules: Sequence[str]) -> lambda_.Code:
    """Modules of `trainyard/functions` as an asset, under the names by which they import each other.

    A zip made here and not a folder: the same bytes on every machine, and nothing that needs Docker.
    """
    return lambda_.Code.from_asset(str(_package(tuple(modules))))


@cache
def _package(modules: tuple[str, ...]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="trainyard-function-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "function.zip"
    files = {f"trainyard/functions/{name}.py": (FUNCTIONS_FOLDER / f"{name}.py").read_bytes() for name in modules}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as package:
        for name in ("trainyard/__init__.py", "trainyard/functions/__init__.py", *sorted(files)):
            # A fixed time and mode: the asset's name is the hash of its bytes.
            entry = zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            package.writestr(entry, files.get(name, b""), zipfile.ZIP_DEFLATED)
    return path
