"""Jobs for a Kubernetes cluster with Kubeflow Trainer v2: checked, recorded, submitted by the kubectl on the PATH.

The cluster is the one that kubectl's configuration names, and the submitter's rights are those that it gives. A
tenant's job goes into its namespace, as a service account whose IAM role reads and writes what a training job does.
"""

from collections.abc import Callable
from pathlib import Path

from trainyard.errors import InputError
from trainyard.launch import checks
from trainyard.launch.backend import Say, say_nothing
from trainyard.launch.channels import inputs_as_written
from trainyard.launch.contract import read_image
from trainyard.launch.kubectl import Cluster, Kubectl
from trainyard.launch.kubernetes_backend import KubernetesBackend, namespace_of
from trainyard.launch.kubernetes_manifest import KubernetesPlace
from trainyard.launch.launcher import launch_from_here, launch_on_machines
from trainyard.launch.machines import SHARED_ROOT
from trainyard.launch.record import JobRecord
from trainyard.launch.session import Account
from trainyard.spec.job import JobSpec
from trainyard.spec.platform import TenantContract

TENANT_SERVICE_ACCOUNT = "trainyard-job"


def launch_on_tenants_kubernetes(
    job: JobSpec,
    contract: TenantContract,
    *,
    account: Account,
    launcher: Account,
    force: bool = False,
    say: Say = say_nothing,
) -> JobRecord:
    """Launch `job` in the tenant's namespace; returns once the cluster has taken it.

    InputError where the plan, the hours or the budget refuse it (which yield to `force`), or the cluster does.
    """
    assert job.tenant == contract.tenant
    checks.check_machines_are_named(job)
    _check_shared(job)
    image = job.compute.kubernetes.image or read_image(account, contract.image_parameter, emulated=contract.emulated)
    cluster = Kubectl()
    return launch_on_machines(
        pinned(job, cluster),
        contract,
        "kubernetes",
        tenant_backend(launcher, contract, cluster),
        image=image,
        account=account,
        launcher=launcher,
        force=force,
        say=say,
    )


def launch_on_kubernetes_here(job: JobSpec, folder: Path, *, force: bool = False, say: Say = say_nothing) -> JobRecord:
    """Launch `job` on the cluster of this machine's kubectl; its record is under `folder`, its data and its checkpoints
    where pods reach them."""
    image = job.compute.kubernetes.image
    if image is None:
        raise InputError(
            "compute.kubernetes.image: is missing, and no tenant's platform has published one; give the training image "
            "by digest, REGISTRY/NAME@sha256:... (docs/image.md)"
        )
    _check_shared(job)
    destination = job.checkpoint.destination or ""
    if not destination.startswith(("s3://", f"{SHARED_ROOT}/")):
        raise InputError(
            f"checkpoint.destination {destination or 'null'}: goes with the pod that writes it; give an s3:// prefix, "
            f"or a folder under {SHARED_ROOT} with compute.kubernetes.volume_claim"
        )
    cluster = Kubectl()
    sent = pinned(job, cluster)
    return launch_from_here(
        sent,
        folder,
        "kubernetes",
        here_backend(folder, cluster),
        sent=sent,
        image=image,
        channels=inputs_as_written(job),
        force=force,
        say=say,
    )


def pinned(job: JobSpec, cluster: Cluster) -> JobSpec:
    """`job` with the context that is kubectl's now: a later `kubectl config use-context` must not lose it."""
    kubernetes = job.compute.kubernetes
    if kubernetes.context is not None:
        return job
    kubernetes = kubernetes.model_copy(update={"context": cluster.current_context()})
    return job.model_copy(update={"compute": job.compute.model_copy(update={"kubernetes": kubernetes})})


def _check_shared(job: JobSpec) -> None:
    """InputError where something lies on the shared file system, and no pod is given that."""
    if job.compute.kubernetes.volume_claim is not None:
        return
    paths = [source.path for source in (*job.data.train, *job.data.validation)]
    named = [*paths, job.data.tokenizer, job.data.chat_template, job.model.source, job.checkpoint.destination]
    named += [job.images.class_names] if job.images is not None else []
    for path in named:
        if path and path.startswith(("fsx://", f"{SHARED_ROOT}/")):
            raise InputError(
                f"{path}: is on a file system that the pods don't have; set compute.kubernetes.volume_claim to the "
                f"claim that is to be their {SHARED_ROOT}"
            )


def tenant_backend(_: Account, contract: TenantContract, cluster: Cluster | None = None) -> KubernetesBackend:
    """The clusters of this machine's kubectl, for the tenant's jobs."""
    return KubernetesBackend(
        cluster or Kubectl(),
        tenant_places(contract),
        lambda record: checks.refused_by_tenant(record.resolved.spec, contract),
    )


def here_backend(_: Path, cluster: Cluster | None = None) -> KubernetesBackend:
    """The clusters of this machine's kubectl, for jobs of nobody's environment."""
    return KubernetesBackend(cluster or Kubectl(), _here_place)


def tenant_places(contract: TenantContract) -> Callable[[JobRecord], KubernetesPlace]:
    """Where the tenant's jobs go, and as whom they run."""

    def place_of(record: JobRecord) -> KubernetesPlace:
        """That job's, with the tenant's service account."""
        kubernetes = record.resolved.spec.compute.kubernetes
        return KubernetesPlace(
            namespace=kubernetes.namespace or contract.tenant,
            image=_image(record),
            labels=(
                ("environment", contract.environment),
                ("tenant", contract.tenant),
                ("cost-center", contract.cost_center),
            ),
            service_account=kubernetes.service_account or TENANT_SERVICE_ACCOUNT,
            region=contract.region,
        )

    return place_of


def _here_place(record: JobRecord) -> KubernetesPlace:
    kubernetes = record.resolved.spec.compute.kubernetes
    return KubernetesPlace(
        namespace=namespace_of(record),
        image=_image(record),
        service_account=kubernetes.service_account,
    )


def _image(record: JobRecord) -> str:
    """The launch's, unless a resume says another."""
    image = record.resolved.spec.compute.kubernetes.image or record.image
    assert image is not None
    return image
