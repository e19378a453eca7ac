"""What the VPC endpoints of a tenant's network must not let through: another's credentials inside, others' things from
there, and other accounts' buckets, by which data would be carried out."""

from collections.abc import Iterator, Mapping

from trainyard.isolation.account import PLATFORM, Account, Endpoint, Thing
from trainyard.isolation.catalogue import SHARED_ALLOWED
from trainyard.isolation.conditions import Context, Value
from trainyard.isolation.evaluator import Caller, Request
from trainyard.isolation.outsiders import named_by
from trainyard.isolation.policy import Policy
from trainyard.isolation.questions import (
    GUARD_RAIL,
    NO_SERVICE,
    OUTSIDER,
    Question,
    Scope,
    example_of,
    examples,
    open_door,
    somebody,
)


class Passages:
    """Asks of the endpoints."""

    def __init__(self, account: Account, scope: Scope, actions: Mapping[str, tuple[str, ...]]) -> None:
        self._account, self._scope, self._actions = account, scope, actions
        self._id, self._region = account.environment.account, account.environment.region

    def asked(self, tenant: str) -> Iterator[Question]:
        """Of the tenant's endpoints."""
        for endpoint in self._account.endpoints:
            if endpoint.tenant != tenant or not self._scope.document(endpoint.document):
                continue
            policy = self._account.endpoint_policy(endpoint)
            yield from self._other_accounts(endpoint, policy)
            if endpoint.service == "s3":
                yield from self._buckets(tenant, endpoint, policy)
            yield from self._as_somebody_else(tenant, endpoint, policy)
            yield from self._to_somebody_elses(tenant, endpoint, policy)

    def _other_accounts(self, endpoint: Endpoint, policy: Policy | None) -> Iterator[Question]:
        """Another account's credentials inside the network, or what is its own from there: a way to carry data out."""
        ways = dict.fromkeys(_passages(endpoint.service, self._id, self._region))
        if endpoint.service in _BY_NAME_ALONE:  # whatever the policy names may be another account's
            named = self._named(policy)
            ways |= dict.fromkeys((self._id, OUTSIDER, action, resource) for action, resource in named)
        for caller, owner, action, resource in ways:
            context = Context(_who(caller, self._id) | {"aws:resourceaccount": owner}, True, NO_SERVICE)
            request = Request(somebody(caller), action, resource, context, endpoint_policy=policy)
            text = f"caller of account {caller}, resource of account {owner}"
            yield Question("", GUARD_RAIL, "in the network", endpoint.name, request, text)

    def _named(self, policy: Policy | None) -> list[tuple[str, str]]:
        """The actions and resources of the policy's Allows, an example each, but for ECR's own image layers."""
        layers = image_layers(self._region).removesuffix("layer") + "*"
        return sorted(
            {
                (action.replace("*", "Anything"), example_of(resource))
                for statement in (policy.statements if policy else ())
                for action in statement.actions
                for resource in statement.resources
                if statement.allows and resource != layers
            }
        )

    def _inside(self, endpoint: Endpoint, arn: str, action: str, resource: str, **more: Value) -> Request:
        """A request of a role with every right, on what lets everybody in: the endpoint alone can refuse it."""
        account = arn.split(":")[4]
        stated: dict[str, Value] = {
            "aws:principalaccount": account,
            "aws:principalarn": arn,
            "aws:resourceaccount": self._id,
            **more,
        }
        caller = Caller(arn, account, somebody(account).policy)
        context, policy = Context(stated, True, NO_SERVICE), self._account.endpoint_policy(endpoint)
        return Request(caller, action, resource, context, open_door(), endpoint_policy=policy)

    def _as_somebody_else(self, tenant: str, endpoint: Endpoint, policy: Policy | None) -> Iterator[Question]:
        """Other tenants', administrators' and other accounts' credentials in this network, and those of whomever the
        endpoint's policy names, at all that it names: what is carried in by hand is of no use there."""
        others = {f"{name}'s job": item.roles.job for name, item in self._account.contracts.items() if name != tenant}
        others["an administrator"] = somebody(self._id).arn
        others["another account's administrator"] = somebody(OUTSIDER).arn
        own = f"arn:aws:iam::{self._id}:role/trainyard/{self._account.environment.name}/{tenant}/"
        for item in named_by(policy, self._id) if policy else ():
            arn = str(item.stated.get("aws:principalarn", item.caller.arn))
            if arn.startswith("arn:") and not arn.startswith(own):
                others.setdefault(item.name, arn)
        for who, arn in others.items():
            for action, resource in self._named(policy):
                request = self._inside(endpoint, arn, action, resource)
                text = f"in {tenant}'s network"
                yield Question("", GUARD_RAIL, who, endpoint.name, request, text)

    def _to_somebody_elses(self, tenant: str, endpoint: Endpoint, policy: Policy | None) -> Iterator[Question]:
        """The own job's role, made an administrator, at what isn't the tenant's."""
        service = _PREFIXES.get(endpoint.service, endpoint.service)
        role = self._account.contracts[tenant].roles.job
        who, text = f"{tenant}'s job with every right", "through the endpoint"
        kinds = {
            kind: tuple(action for action in actions if action.startswith(f"{service}:"))
            for kind, actions in self._actions.items()
        }
        for other in (*self._account.contracts, None):
            if other == tenant:
                continue
            for thing in self._account.things_of(other):
                allowed = SHARED_ALLOWED.get(thing.kind, frozenset()) if other is None else frozenset()
                for resource in examples(thing, policy) if kinds[thing.kind] else ():
                    for action in kinds[thing.kind]:
                        if action not in allowed:
                            request = self._inside(endpoint, role, action, resource, **thing.context)
                            yield Question("", other or PLATFORM, who, endpoint.name, request, text)
            if service == "cloudwatch" and other is not None:
                space = {"cloudwatch:namespace": f"trainyard/{other}"}
                request = self._inside(endpoint, role, "cloudwatch:PutMetricData", "*", **space)
                yield Question("", other, who, endpoint.name, request, f"as trainyard/{other}")

    def _buckets(self, tenant: str, endpoint: Endpoint, policy: Policy | None) -> Iterator[Question]:
        """Own buckets with foreign credentials or in foreign hands; other tenants' with any right."""

        def ask(target: str, thing: Thing, caller: str, owner: str) -> Iterator[Question]:
            context = Context(_who(caller, self._id) | {"aws:resourceaccount": owner}, True, NO_SERVICE)
            text = f"caller of account {caller}, bucket of account {owner}"
            for resource in examples(thing, policy):
                request = Request(somebody(caller), "s3:GetObject", resource, context, endpoint_policy=policy)
                who = f"an administrator in {tenant}'s network"
                yield Question("", target, who, endpoint.name, request, text)

        for other in self._account.contracts:
            for thing in self._account.things_of(other, "object"):
                if other == tenant:
                    yield from ask(GUARD_RAIL, thing, OUTSIDER, self._id)
                    yield from ask(GUARD_RAIL, thing, self._id, OUTSIDER)
                else:
                    yield from ask(other, thing, self._id, self._id)


_PREFIXES = {
    "monitoring": "cloudwatch",
    "sagemaker.api": "sagemaker",
    "experiments": "sagemaker-mlflow",
    "ecr.api": "ecr",
    "ecr.dkr": "ecr",
}
"""Actions' prefixes where they differ from the endpoint's name."""

_BY_NAME_ALONE = frozenset({"s3"})
"""Services whose resources' ARNs name no account."""


def _passages(endpoint: str, account: str, region: str) -> Iterator[tuple[str, str, str, str]]:
    """Caller's account, resource's account, action and resource that an endpoint must not let through."""
    service = _PREFIXES.get(endpoint, endpoint)
    resource = "arn:aws:s3:::carried-out/object" if service == "s3" else "*"
    for action in ("s3:PutObject", "s3:GetObject") if service == "s3" else (f"{service}:Anything",):
        yield OUTSIDER, OUTSIDER, action, resource
        yield OUTSIDER, account, action, resource
        if service in {"s3", "dynamodb"}:
            yield account, OUTSIDER, action, resource
    if service == "s3":
        yield OUTSIDER, OUTSIDER, "s3:PutObject", image_layers(region)


def image_layers(region: str) -> str:
    """An object of the bucket where ECR keeps image layers, which it fetches with credentials of its own."""
    return f"arn:aws:s3:::prod-{region}-starport-layer-bucket/layer"


def _who(caller: str, account: str) -> dict[str, Value]:
    """The caller's account; of this one the role is anybody's guess."""
    who: dict[str, Value] = {"aws:principalaccount": caller}
    return who if caller == account else {**who, "aws:principalarn": somebody(caller).arn}
