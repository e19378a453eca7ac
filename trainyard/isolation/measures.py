"""By what a tenant's functions, contract and bill measure: all of it follows from the environment file and from what
the tenant owns, so that one that hears of no job, knows no price or looks at no rule is found."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainyard.errors import InputError
from trainyard.hardware import instance, price
from trainyard.isolation.account import TENANT_TAG
from trainyard.spec.platform import EnvironmentSpec, TenantContract
from trainyard.spec.shares import BATCH_PREFIX


@dataclass(frozen=True)
class Measures:
    """Of one tenant."""

    environment: EnvironmentSpec
    contract: TenantContract

    @property
    def _tenant(self) -> str:
        return self.contract.tenant

    def variables(self) -> dict[str, dict[str, Any]]:
        """What stands in the functions' environment, by variable."""
        return {"METER": self._meter(), "BROKER": self._broker(), "RESUMER": self._resumer()}

    def _meter(self) -> dict[str, Any]:
        budget = self.environment.tenant(self._tenant).budget
        kinds = sorted({*self._kinds, *self.environment.max_instances})
        rates: dict[str, dict[str, str]] = {kind: {} for kind in kinds}
        for way, spot in (("on_demand", False), ("spot", True)):
            for kind, usd in self._prices(kinds, spot=spot).items():
                rates[kind][way] = str(usd)
        return {
            "tenant": self._tenant,
            "environment": self.environment.name,
            "namespace": f"trainyard/{self._tenant}",
            "prefixes": self._prefixes,
            "budget": budget.model_dump(mode="json", include={"monthly_usd", "monthly_gpu_hours", "when_spent"}),
            "rates": rates,
            "gpus": {kind: instance(kind).num_gpus for kind in kinds},
            "queues": sorted(self.environment.training_queue(kind, self._tenant) for kind in self._kinds)
            if self._queued
            else [],
        }

    def _broker(self) -> dict[str, Any]:
        return {
            "contract": self.environment.contract_parameter(self._tenant),
            "prices": self._prices(self._kinds, spot=False),
            "gpus": {kind: instance(kind).num_gpus for kind in self._kinds},
            "volume_keys": [kind for kind in self._kinds if not instance(kind).local_nvme_gib],
        }

    def _resumer(self) -> dict[str, Any]:
        buckets = self.contract.buckets
        broker = self.environment.broker_name(self._tenant)
        return {"data": buckets.data, "checkpoints": buckets.checkpoints, "broker": broker}

    def job_rules(self) -> dict[str, Any]:
        """What the detective holds a job against."""
        environment, contract = self.environment, self.contract
        spec, buckets = environment.tenant(self._tenant), contract.buckets
        registry = f"{environment.account}.dkr.ecr.{environment.region}.amazonaws.com"
        return {
            "prefixes": self._prefixes,
            "role": contract.roles.job,
            "own_roles": self.own_roles,
            "subnets": list(contract.subnet_ids),
            "groups": list(contract.security_group_ids),
            "types": environment.most(self._tenant),
            "key": contract.keys.checkpoints,
            "files": contract.file_system.id,
            "places": sorted(
                f"s3://{name}/" for name in (buckets.data, buckets.checkpoints, buckets.artifacts) if name
            ),
            "images": f"{registry}/{environment.image_repository}@",
            "seconds": round(spec.max_job_hours * 3600),
            "plans": list(self.plans),
            "metric": f"JobViolations-{environment.name}",
            "namespace": f"trainyard/{self._tenant}",
        }

    def allowances(self) -> dict[str, Any]:
        """What the contract, to which the broker holds jobs, lets them have."""
        environment, spec = self.environment, self.environment.tenant(self._tenant)
        most, guaranteed = environment.most(self._tenant), environment.guaranteed(self._tenant)
        budget = {"monthly_usd", "monthly_gpu_hours", "when_spent", "warn_at_percent"}
        return {
            "queues": {
                name: queue.model_dump(mode="json", include={"instance_types", "max_instances", "multi_node"})
                for name, queue in spec.queues.items()
            },
            "shares": {kind: (guaranteed[kind], most[kind]) for kind in most} if self._queued else {},
            **spec.budget.model_dump(mode="json", include=budget),
            "max_job_hours": spec.max_job_hours,
            "warm_pool_minutes": spec.warm_pool_minutes,
            "image_parameter": environment.image_parameter,
            "broker": environment.broker_name(self._tenant) if environment.brokered(self._tenant) else "",
        }

    def bill(self) -> dict[str, Any]:
        """Whose costs the tenant's budget and anomaly monitor look at."""
        tagged = {"Tags": {"Key": TENANT_TAG, "Values": [self._tenant], "MatchOptions": ["EQUALS"]}}
        return {"filters": {"TagKeyValue": [f"user:{TENANT_TAG}${self._tenant}"]}, "monitor": tagged}

    @property
    def own_roles(self) -> str:
        """How the ARNs of the roles begin that the broker makes."""
        path = f"trainyard/{self.environment.name}/{self._tenant}/jobs/each/"
        return f"arn:aws:iam::{self.environment.account}:role/{path}"

    @property
    def plans(self) -> tuple[str, ...]:
        """ARNs of the training plans that the environment file gives to the tenant's jobs, or to its cluster."""
        spec = self.environment.tenant(self._tenant)
        return tuple(self._arn("sagemaker", f"training-plan/{name}") for name in spec.training_plans)

    @property
    def outside(self) -> frozenset[str]:
        """What the environment file names that no template makes: machines' images, capacity that was bought."""
        cluster = self.environment.tenant(self._tenant).cluster
        if cluster is None:
            return frozenset()
        groups = cluster.node_groups.values()
        plans = (self._arn("sagemaker", f"training-plan/{group.training_plan}") for group in groups)
        images = {image for image in (cluster.ami, cluster.login.ami) if image is not None}
        images |= {f"{{{{resolve:{image}}}}}" for image in images}
        return frozenset({*images, *cluster.reservations, *plans})

    @property
    def _kinds(self) -> list[str]:
        return sorted(self.environment.most(self._tenant))

    @property
    def _queued(self) -> bool:
        return self.environment.queued(self._tenant)

    @property
    def _prefixes(self) -> list[str]:
        batch = [f"{prefix}{self._tenant}-" for prefix in (BATCH_PREFIX, BATCH_PREFIX.lower()) if self._queued]
        return [f"{self._tenant}-", *batch]

    def _arn(self, service: str, resource: str) -> str:
        return f"arn:aws:{service}:{self.environment.region}:{self.environment.account}:{resource}"

    def _prices(self, kinds: Iterable[str], *, spot: bool) -> dict[str, float]:
        known = {}
        for kind in kinds:
            try:
                known[kind] = price(kind, self.environment.region, spot=spot).usd_per_hour
            except InputError:  # none is known: it is no part of the settings then
                continue
        return known
