"""What watches a tenant's jobs: functions that hold them to rules, quota and budget, and who sees the bill.

A function whose settings say less than the environment file does, whose code is not ours, or that nobody calls any more
holds nobody to anything, and no policy shows it.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainyard.functions import job_guard
from trainyard.isolation.account import Account
from trainyard.isolation.measures import Measures
from trainyard.isolation.places import EVERYBODY, Place, Wire, settings_of

Owns = Callable[[Place, object], bool]
"""Whether a name is of the tenant's own thing."""

DETECTIVE = "index.handler"
"""The one function whose code stands in the template."""

METER = "trainyard.functions.budget_meter.handler"
_WAYS_IN: dict[str, dict[str, Any]] = {
    DETECTIVE: {"state": ["InProgress"], "schedule": None},
    METER: {"state": ["Completed", "Failed", "Stopped"], "schedule": "rate(5 minutes)"},
}
"""The functions without which a tenant's rules and quota would be held by nobody, and when each is called."""

_SETTINGS = {
    METER: "METER",
    "trainyard.functions.broker.handler": "BROKER",
    "trainyard.functions.job_resumer.handler": "RESUMER",
}
"""The variable that each function reads, and without which it does nothing."""

_CDK_ASSETS = "cdk-hnb659fds-assets-{account}-{region}"
"""The bucket of the CDK's bootstrap stack, which is where `cdk deploy` puts a function's code."""

_ON = frozenset({"ENABLED", "ENABLED_WITH_ALL_CLOUDTRAIL_MANAGEMENT_EVENTS"})


class Watchers:
    """The checks of one environment's tenants."""

    def __init__(self, account: Account, places: list[Place], owns: Owns, arn: Callable[[Place], str]) -> None:
        self._account, self._places, self._owns, self._arn = account, places, owns, arn

    def measures(self, tenant: str) -> Measures:
        """By what the tenant's functions measure."""
        return Measures(self._account.environment, self._account.contracts[tenant])

    def missing(self) -> Iterator[Wire]:
        """Tenants whose jobs nobody looks at."""
        for tenant in self._account.environment.tenants:
            for handler, called in _WAYS_IN.items():
                functions = [place for place in self._of(tenant, "AWS::Lambda::Function") if _handler(place) == handler]
                rules = [rule for place in functions for rule in self._calls(place, handler, called)]
                if not rules:
                    why = "is called by no rule of the tenant's, as the environment file has it"
                    yield Wire(tenant, "the tenant's stacks", "Handler", handler, EVERYBODY, why)

    def _of(self, tenant: str, kind: str) -> list[Place]:
        return [place for place in self._places if (place.tenant, place.kind) == (tenant, kind)]

    def _calls(self, function: Place, handler: str, called: Mapping[str, Any]) -> Iterator[Place]:
        """The rules that call it whenever it must be called, and may."""
        own = self._arn(function)
        allowed = {
            place.properties.get("SourceArn")
            for place in self._of(function.tenant, "AWS::Lambda::Permission")
            if place.properties.get("FunctionName") == own
        }
        for rule in self._of(function.tenant, "AWS::Events::Rule"):
            targets = [target for target in rule.properties.get("Targets", []) if target.get("Arn") == own]
            if not targets or self._arn(rule) not in allowed or rule.properties.get("State") not in _ON:
                continue
            hears = rule.properties.get("EventPattern") == self._pattern(function.tenant, handler, called["state"])
            on_time = rule.properties.get("ScheduleExpression") == called["schedule"]
            if hears and on_time and (handler != DETECTIVE or self._is_told(function.tenant, targets)):
                yield rule

    def _pattern(self, tenant: str, handler: str, states: list[str]) -> dict[str, Any]:
        """All that the rule says: one condition more, or another source, and it never fires. It hears of every job that
        has the tenant's name; the detective's of those that have its role too."""
        rules = self.measures(tenant).job_rules()
        by_name = {"TrainingJobName": [{"prefix": prefix} for prefix in rules["prefixes"]]}
        by_role = {"RoleArn": [rules["role"], {"prefix": rules["own_roles"]}]}
        return {
            "source": ["aws.sagemaker"],
            "detail-type": ["SageMaker Training Job State Change"],
            "detail": {
                "TrainingJobStatus": states,
                **({"$or": [by_name, by_role]} if handler == DETECTIVE else by_name),
            },
        }

    def _is_told(self, tenant: str, targets: list[Mapping[str, Any]]) -> bool:
        """Of the job's name, with the rules of the environment file."""
        job = {"job": "$.detail.TrainingJobName", "rules": self.measures(tenant).job_rules()}
        return job in [_told(target) for target in targets]

    def settings(self, place: Place) -> Iterator[Wire]:
        """A function's settings are JSON: whom it serves, how that one's jobs are called, what they may cost."""
        expected = self.measures(place.tenant).variables()
        needed, variables = _SETTINGS.get(_handler(place)), place.properties.get("Environment", {}).get("Variables", {})
        if needed is not None and needed not in variables:
            yield place.wire(f"Environment.{needed}", None, EVERYBODY, "is not there, and the function does nothing")
        for name, text in variables.items():
            content = settings_of(text)
            for key in sorted({*content, *expected.get(name, {})}):
                said, right = content.get(key), expected.get(name, {}).get(key)
                if said != right:
                    wrong = f"{key} {json.dumps(said)}"
                    yield place.wire(f"Environment.{name}", wrong, EVERYBODY, f"is not {json.dumps(right)}")

    def code(self, place: Place) -> Iterator[Wire]:
        """The detective's stands in the template, letter by letter; the others' is what was packed beside it, which
        `packages` looks at."""
        code, environment = place.properties.get("Code", {}), self._account.environment
        if "ZipFile" in code:
            if code["ZipFile"] != inspect.getsource(job_guard) or _handler(place) != DETECTIVE:
                yield place.wire("Code.ZipFile", code["ZipFile"], EVERYBODY, "is not trainyard/functions/job_guard.py")
            return
        bucket = _CDK_ASSETS.format(account=environment.account, region=environment.region)
        if code.get("S3Bucket") != bucket:
            yield place.wire(
                "Code.S3Bucket", code.get("S3Bucket"), EVERYBODY, f"is not {bucket}, of the CDK's bootstrap"
            )
        if not re.fullmatch(r"trainyard\.functions\.[a-z_]+\.handler", _handler(place)):
            yield place.wire("Handler", _handler(place), EVERYBODY, "is no function of ours")

    def bill(self, place: Place) -> Iterator[Wire]:
        """A tenant sees what it has spent itself, and by the limit that it has."""
        right, budget = self.measures(place.tenant).bill(), place.properties.get("Budget", {})
        if place.kind == "AWS::CE::AnomalyMonitor":
            said = place.properties.get("MonitorSpecification")
            if settings_of(said) != right["monitor"]:
                yield place.wire("MonitorSpecification", said, EVERYBODY, "looks at what is not the tenant's alone")
            return
        if budget.get("CostFilters") != right["filters"]:
            said = json.dumps(budget.get("CostFilters"))
            yield place.wire("Budget.CostFilters", said, EVERYBODY, "counts what is not the tenant's alone")
        limit = self._account.environment.tenant(place.tenant).budget.monthly_usd
        amount = budget.get("BudgetLimit", {}).get("Amount")
        if amount is None or float(amount) != limit:
            yield place.wire("Budget.BudgetLimit", amount, EVERYBODY, f"is not {limit:g}")

    def mail(self, place: Place, where: str, address: object) -> Iterator[Wire]:
        """What a tenant does and costs is for those whom the environment file names."""
        known = self._account.environment.tenant(place.tenant).budget.notify
        if address not in known:
            yield place.wire(where, address, EVERYBODY, f"is not told of the tenant by its file: {', '.join(known)}")


def _handler(place: Place) -> str:
    return str(place.properties.get("Handler"))


def _told(target: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the target is handed: the template, with each placeholder replaced by the path that fills it."""
    transformer = target.get("InputTransformer", {})
    text = str(transformer.get("InputTemplate"))
    for name, path in transformer.get("InputPathsMap", {}).items():
        text = text.replace(f"<{name}>", json.dumps(path))
    content = dict(settings_of(text))
    if isinstance(rules := content.get("rules"), dict) and isinstance(rules.get("places"), list):
        content["rules"] = {**rules, "places": sorted(map(str, rules["places"]))}
    return content
