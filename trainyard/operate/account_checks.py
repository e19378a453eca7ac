"""The doctor's questions to the account: bootstrap, zones, quotas, offerings, endpoints, file system, image, roles.

Nothing is changed. What AWS (or what stands in for it) doesn't answer is a warning that says so: never a pass.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainyard.errors import TrainyardError
from trainyard.launch.aws import ERROR_PAGE, aws_errors, is_missing
from trainyard.launch.contract import how_to_deploy
from trainyard.launch.session import Account
from trainyard.spec.platform import EnvironmentSpec, TenantContract

Level = Literal["pass", "warn", "fail"]

BOOTSTRAP_STACK = "CDKToolkit"
MIN_BOOTSTRAP = 6
"""The oldest bootstrap that CDK 2's default synthesizer deploys with."""
BOOTSTRAP_VERSION = "/cdk-bootstrap/hnb659fds/version"

ENDPOINT_SERVICES = ("ecr.api", "ecr.dkr", "kms", "logs", "monitoring", "s3", "sagemaker.api", "ssm", "sts")
"""Without any of them jobs in a network without a gateway can't start, log or save (stacks/constructs/network.py)."""


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    level: Level
    finding: str
    mend: str = ""


def failed(name: str, error: TrainyardError) -> Check:
    """What an error says: our messages end in "; how to mend it", after the last semicolon."""
    finding, separator, mend = str(error).rpartition("; ")
    return Check(name, "fail", finding if separator else str(error), mend if separator else "")


def asked(name: str, question: Callable[[], Check], needs: str) -> Check:
    """The answer; where there is none a warning, as nobody knows then. `needs`: the right that the caller may lack."""
    try:
        with aws_errors("asking", name, f"it needs {needs}"):
            return question()
    except TrainyardError as error:
        why = str(error).partition("AWS refused: ")[2].rpartition("; ")[0] or str(error)
        if ERROR_PAGE in why:
            return Check(name, "warn", f"not known: {ERROR_PAGE} to {needs}", "only AWS itself tells")
        return Check(name, "warn", f"not known: {why}", f"needs {needs}; repeat with it")


def of_environment(account: Account, environment: EnvironmentSpec) -> Iterator[Check]:
    """Bootstrap, zones, quotas and where the instance types are offered."""
    yield asked("bootstrap", lambda: bootstrap(account, environment), "ssm:GetParameter")
    yield asked("zones", lambda: zones(account, environment), "ec2:DescribeAvailabilityZones")
    needs = "ec2:DescribeVpcEndpointServices"
    yield asked("endpoint services", lambda: endpoint_services(account, environment), needs)
    yield asked("offerings", lambda: offerings(account, environment), "ec2:DescribeInstanceTypeOfferings")
    yield from quotas(account, environment)


def bootstrap(account: Account, environment: EnvironmentSpec) -> Check:
    """Whether the account and region can be deployed to by the CDK, and by this one."""
    # The CLI synthesizes in a checkout whatever it bootstraps.
    there = f"aws://{environment.account}/{environment.region}"
    mend = f"cdk bootstrap {there} -c environment=environments/{environment.name}.yaml"
    mend = how_to_deploy(environment) if environment.emulated else mend
    ssm = account.client("ssm")
    try:
        version = int(ssm.get_parameter(Name=BOOTSTRAP_VERSION)["Parameter"]["Value"])
    except ssm.exceptions.ClientError as error:
        if is_missing(error):
            return Check("bootstrap", "fail", f"{environment.account}/{environment.region} is not bootstrapped", mend)
        raise
    if version < MIN_BOOTSTRAP:
        return Check("bootstrap", "fail", f"version {version}, and {MIN_BOOTSTRAP} is the least", mend)
    return Check("bootstrap", "pass", f"version {version}")


def zones(account: Account, environment: EnvironmentSpec) -> Check:
    """Whether the environment's zones are there for this account."""
    answer = account.client("ec2").describe_availability_zones(
        Filters=[{"Name": "region-name", "Values": [environment.region]}]
    )
    states = {zone["ZoneName"]: zone["State"] for zone in answer["AvailabilityZones"]}
    bad = _unavailable(environment.availability_zones, states)
    if bad:
        there = ", ".join(sorted(states))
        mend = f"take zones of this account (there: {there}) for availability_zones"
        return Check("zones", "fail", f"not available: {', '.join(bad)}", mend)
    return Check("zones", "pass", ", ".join(environment.availability_zones))


def _unavailable(wanted: Iterable[str], states: Mapping[str, str]) -> list[str]:
    return [f"{name} ({states.get(name, 'none')})" for name in wanted if states.get(name) != "available"]


def endpoint_services(account: Account, environment: EnvironmentSpec) -> Check:
    """Whether each service's endpoints are offered in all zones that get them: EC2 refuses an endpoint with a subnet in
    another zone, half-way through a deployment."""
    # Without a filter: the whole list is a page or two, and the emulator's EC2 knows no filter here.
    pages = account.client("ec2").get_paginator("describe_vpc_endpoint_services").paginate()
    offered = {item["ServiceName"]: set(item["AvailabilityZones"]) for page in pages for item in page["ServiceDetails"]}
    wanted = _interface_services(environment)
    lacking = {name: sorted(set(environment.endpoint_zones) - offered[name]) for name in wanted if name in offered}
    if bad := [f"{name} in {', '.join(zones)}" for name, zones in lacking.items() if zones]:
        mend = "take those zones out of availability_zones (changing them replaces what is deployed)"
        return Check("endpoint services", "fail", f"not offered: {'; '.join(bad)}", mend)
    if unknown := [name for name in wanted if name not in offered]:
        mend = "take another region, or a tenant without what needs it"
        return Check("endpoint services", "warn", f"EC2 names none such: {', '.join(unknown)}", mend)
    return Check("endpoint services", "pass", f"{len(wanted)} in {', '.join(environment.endpoint_zones)}")


def _interface_services(environment: EnvironmentSpec) -> list[str]:
    """The services of which some tenant's network has an interface endpoint, by their whole names."""
    names = [name for name in ENDPOINT_SERVICES if name != "s3"]
    clusters = [tenant.cluster for tenant in environment.tenants.values() if tenant.cluster is not None]
    names += ["ssmmessages"] if clusters else []
    names += ["pcs"] if any(cluster.engine == "pcs" for cluster in clusters) else []
    found = [f"com.amazonaws.{environment.region}.{name}" for name in names]
    tracks = any(tenant.tracking is not None for tenant in environment.tenants.values())
    return found + ([f"aws.sagemaker.{environment.region}.experiments"] if tracks else [])


def offerings(account: Account, environment: EnvironmentSpec) -> Check:
    """Whether EC2 offers the types where training runs. SageMaker's machines are not EC2's offer, but its hardware."""
    zone = environment.availability_zones[0]
    types = sorted({kind.removeprefix("ml.") for kind in environment.max_instances})
    pages = account.client("ec2").get_paginator("describe_instance_type_offerings")
    found = [
        (item["InstanceType"], item["Location"])
        for page in pages.paginate(
            LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": types}]
        )
        for item in page["InstanceTypeOfferings"]
    ]
    missing = [kind for kind in types if (kind, zone) not in found]
    if not missing:
        return Check("offerings", "pass", f"{', '.join(types)} in {zone}")
    other = sorted({where for kind, where in found if kind in missing})
    elsewhere = f"offered in {', '.join(other)}: put such a zone first in availability_zones" if other else ""
    mend = elsewhere or "take another region or type"
    return Check("offerings", "warn", f"EC2 doesn't offer {', '.join(missing)} in {zone}, where training runs", mend)


def quotas(account: Account, environment: EnvironmentSpec) -> Iterator[Check]:
    """SageMaker's own quotas of each type against what the environment lets tenants hold together: of all jobs, of spot
    ones, and of warm pools where a tenant may keep machines."""
    needs = "servicequotas:ListServiceQuotas"
    known: dict[str, tuple[float, str]] = {}

    def read() -> Check:
        client = account.client("service-quotas")
        for page in client.get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker"):
            for item in page["Quotas"]:
                known[item["QuotaName"]] = (float(item["Value"]), item["QuotaCode"])
        return Check("quotas", "pass", f"{len(known)} read")

    answer = asked("quotas", read, needs)
    if answer.level != "pass":
        yield answer
        return
    for kind, wanted in sorted(environment.max_instances.items()):
        found = known.get(f"{kind} for training job usage")
        yield _quota(f"quota {kind}", found, wanted, "fail", "max_instances", environment.region)
        # Any job may ask for spot: what is too low there ends such jobs alone.
        spot = known.get(f"{kind} for spot training job usage")
        yield _quota(f"spot quota {kind}", spot, wanted, "warn", "max_instances", environment.region)
    for kind, wanted in sorted(_in_warm_pools(environment).items()):
        warm = known.get(f"{kind} for training warm pool usage")
        yield _quota(f"warm pool quota {kind}", warm, wanted, "warn", "warm_pool_minutes", environment.region)


def _in_warm_pools(environment: EnvironmentSpec) -> dict[str, int]:
    """Instances by type that tenants with `warm_pool_minutes` may keep together."""
    found: dict[str, int] = {}
    for tenant, spec in environment.tenants.items():
        for kind, most in environment.most(tenant).items() if spec.warm_pool_minutes else ():
            found[kind] = min(found.get(kind, 0) + most, environment.max_instances[kind])
    return found


def _quota(name: str, found: tuple[float, str] | None, wanted: int, level: Level, setting: str, region: str) -> Check:
    """`found`: its value and code; `level`: what a quota that is too low is; `setting`: what `wanted` comes from."""
    if found is None:
        return Check(name, "warn", "not known: SageMaker names no such quota", "look it up in Service Quotas")
    value, code = found
    if value >= wanted:
        return Check(name, "pass", f"{value:g}, of which tenants may hold {wanted}")
    mend = (
        "aws service-quotas request-service-quota-increase --service-code sagemaker "
        f"--quota-code {code} --desired-value {wanted} --region {region}, or lower {setting}"
    )
    return Check(name, level, f"{value:g}, and tenants may hold {wanted} together ({setting})", mend)


def of_tenant(account: Account, contract: TenantContract, other: TenantContract | None, image: str) -> Iterator[Check]:
    """Endpoints, file system, image, and the roles as IAM's simulator judges them. `image`: "" where none is known."""
    tenant = contract.tenant
    yield asked(f"{tenant}: endpoints", lambda: endpoints(account, contract), "ec2:DescribeVpcEndpoints")
    yield asked(f"{tenant}: file system", lambda: file_system(account, contract), "fsx:DescribeFileSystems")
    if image:
        yield asked(f"{tenant}: image", lambda: published(account, contract, image), "ecr:DescribeImages")
    yield from simulated(account, contract, other)


def endpoints(account: Account, contract: TenantContract) -> Check:
    """Every endpoint that jobs need, there and available."""
    name = f"{contract.tenant}: endpoints"
    pages = account.client("ec2").get_paginator("describe_vpc_endpoints")
    states: dict[str, str] = {}
    for page in pages.paginate(Filters=[{"Name": "vpc-id", "Values": [contract.vpc_id]}]):
        for item in page["VpcEndpoints"]:
            service = item["ServiceName"].partition(f"{contract.region}.")[2]
            states[service] = str(item.get("State", "")).lower()
    bad = _unavailable(ENDPOINT_SERVICES, states)
    if bad:
        mend = f"deploy stack trainyard-{contract.environment}-{contract.tenant}-foundation again"
        return Check(name, "fail", f"in {contract.vpc_id} not available: {', '.join(bad)}", mend)
    return Check(name, "pass", f"{len(states)} available in {contract.vpc_id}")


def file_system(account: Account, contract: TenantContract) -> Check:
    """Whether the tenant's file system can be mounted."""
    name, wanted = f"{contract.tenant}: file system", contract.file_system.id
    found = account.client("fsx").describe_file_systems(FileSystemIds=[wanted])["FileSystems"]
    state = found[0].get("Lifecycle") if found else None
    if state is None:
        return Check(name, "warn", f"not known: FSx tells no state of {wanted}", "look at it in the console")
    if state != "AVAILABLE":
        detail = (found[0].get("FailureDetails") or {}).get("Message", "")
        mend = "wait until it is AVAILABLE" if state in {"CREATING", "UPDATING"} else "see FSx's events; restore it"
        return Check(name, "fail", f"{wanted} is {state}{f': {detail}' if detail else ''}", mend)
    return Check(name, "pass", f"{wanted}, {found[0].get('StorageCapacity')} GiB")


def published(account: Account, contract: TenantContract, image: str) -> Check:
    """Whether the released digest is in its repository: a job whose image was expired fails after its machines came."""
    name = f"{contract.tenant}: image"
    repository, _, digest = image.partition("/")[2].partition("@")
    if set(digest.removeprefix("sha256:")) == {"0"}:
        return Check(name, "warn", "none is published; the emulator runs this checkout's trainer in its place")
    ecr = account.client("ecr")
    try:
        found = ecr.describe_images(repositoryName=repository, imageIds=[{"imageDigest": digest}])["imageDetails"]
    except ecr.exceptions.ClientError as error:
        if error.response["Error"]["Code"] not in ("ImageNotFoundException", "RepositoryNotFoundException"):
            raise
        found = []
    if not found:
        gone = f"{digest[:19]} is not in repository {repository}"
        return Check(name, "fail", gone, f"publish one: scripts/publish_image environments/{contract.environment}.yaml")
    return Check(name, "pass", f"{digest[:19]}, pushed {found[0].get('imagePushedAt', 'some day')}")


@dataclass(frozen=True)
class RoleCase:
    """One request of a role, and what is to become of it."""

    label: str
    role: str
    action: str
    resource: str
    is_allowed: bool
    owner: str
    """The account that the resource is of."""

    @property
    def stated(self) -> dict[str, str]:
        """What the boundary's denials ask of every request. Their operators are negated and match an absent key too:
        without the account's the role would seem to be refused its own bucket."""
        return {"aws:ResourceAccount": self.owner, "aws:PrincipalArn": self.role}


def simulated(account: Account, contract: TenantContract, other: TenantContract | None) -> Iterator[Check]:
    """What IAM's simulator says that the roles may and may not: their policies and boundary, without the resources'."""
    iam = account.client("iam")
    answered: list[RoleCase] = []

    def question(name: str, case: RoleCase) -> Check:
        check = _simulate(iam, name, case)
        answered.append(case)
        return check

    for case in _role_cases(contract, other):
        name = f"{contract.tenant}: {case.label} {'may' if case.is_allowed else 'may not'} {case.action}"
        yield asked(name, functools.partial(question, name, case), "iam:SimulatePrincipalPolicy")
        if not answered:
            return  # who may not ask once may not ask at all


def _role_cases(contract: TenantContract, other: TenantContract | None) -> Iterator[RoleCase]:
    own, job, launcher = contract.buckets.data, contract.roles.job, contract.roles.launcher
    training = f"arn:aws:sagemaker:{contract.region}:{contract.account}:training-job"
    cases = [
        ("launcher", launcher, "sagemaker:StopTrainingJob", f"{training}/{contract.tenant}-x", True),
        ("job role", job, "s3:GetObject", f"arn:aws:s3:::{own}/x", True),
        ("job role", job, "iam:CreateRole", "*", False),
        ("launcher", launcher, "sagemaker:CreateNotebookInstance", "*", False),
        ("auditor", contract.roles.auditor, "s3:PutObject", f"arn:aws:s3:::{own}/x", False),
    ]
    yield from (RoleCase(*case, owner=contract.account) for case in cases)
    if other is not None:
        theirs = f"arn:aws:s3:::{other.buckets.data}/x"
        stop = f"{training}/{other.tenant}-x"
        yield RoleCase("job role", job, "s3:GetObject", theirs, False, owner=other.account)
        yield RoleCase("launcher", launcher, "sagemaker:StopTrainingJob", stop, False, owner=other.account)


def _simulate(iam: Any, name: str, case: RoleCase) -> Check:
    """Where the policies read a key that wasn't stated the decision says nothing of a real request."""
    entries = [
        {"ContextKeyName": key, "ContextKeyType": "string", "ContextKeyValues": [value]}
        for key, value in case.stated.items()
    ]
    answer = iam.simulate_principal_policy(
        PolicySourceArn=case.role, ActionNames=[case.action], ResourceArns=[case.resource], ContextEntries=entries
    )
    result = answer["EvaluationResults"][0]
    decision = f"{result['EvalDecision']} on {case.resource}"
    # Of a named resource AWS tells the keys beside that resource, of "*" beside the whole.
    told = [result, *result.get("ResourceSpecificResults", [])]
    missing = sorted({key for part in told for key in part.get("MissingContextValues", [])})
    if missing:
        keys = ", ".join(missing)
        mend = (
            f"ask with them: aws iam simulate-principal-policy --policy-source-arn {case.role} --action-names "
            f"{case.action} --resource-arns '{case.resource}' --context-entries ..."
        )
        return Check(name, "warn", f"not known: {decision}, but its policies also read {keys}", mend)
    if (result["EvalDecision"] == "allowed") == case.is_allowed:
        return Check(name, "pass", decision)
    return Check(name, "fail", decision, "deploy the tenant's foundation stack again")
