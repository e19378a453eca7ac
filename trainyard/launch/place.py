"""Where jobs live: a store of records and the backend that runs them, opened for one tenant or for this machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.errors import InputError
from trainyard.launch.backend import Backend
from trainyard.launch.backends import ByRecord
from trainyard.launch.contract import check_tenant, read_contract
from trainyard.launch.doors import DOORS
from trainyard.launch.local_backend import LocalBackend
from trainyard.launch.moved import Copied, copied_to, moved_to
from trainyard.launch.queue_backend import backend_of
from trainyard.launch.record import FolderRecordStore, JobRecord, RecordStore, S3RecordStore
from trainyard.launch.session import Account, assume, checkout_root, open_account, state_root
from trainyard.spec.platform import EnvironmentSpec, TenantContract, load_environment


@dataclass(frozen=True)
class Place:
    """Records and the backend behind them."""

    store: RecordStore
    backend: Backend
    s3: Any = None
    """A client that reads the jobs' files; None on this machine."""
    account: Account | None = None
    """Who the client acts as; None on this machine."""
    has_resumer: bool = False
    """Whether the tenant's resumer starts failed jobs again (`recovery.max_resumes`): where a broker submits them."""

    has_queue: bool = False
    """Whether jobs wait in a training queue, which starts failed ones again by its own rules."""

    tracking_server: str = ""
    """ARN of the tenant's own MLflow server; empty where it has none."""

    emulated: bool = False
    """Whether AWS is emulated there: nobody is billed."""

    @property
    def variables(self) -> dict[str, str]:
        """What a process of our own needs in its environment to read the jobs' files, for an hour."""
        return {} if self.account is None else self.account.variables()

    def located(self, record: JobRecord) -> JobRecord:
        """`record` with its checkpoints where they are now, for who reads what the job saved: its folder may have been
        moved since. Never to be written: a folder that is moved back is its place again."""
        moved = moved_to(record, self.store.folder) if isinstance(self.store, FolderRecordStore) else None
        return record if moved is None else record.model_copy(update={"checkpoint_destination": str(moved)})

    def copied(self, record: JobRecord) -> Copied | None:
        """Where the job's checkpoints lie twice, as its folder was copied: who removes some has to be asked which."""
        return copied_to(record, self.store.folder) if isinstance(self.store, FolderRecordStore) else None


@dataclass(frozen=True)
class TenantAccess:
    """A tenant of a deployed environment, opened for a verb."""

    environment: EnvironmentSpec
    contract: TenantContract
    account: Account
    """The person's own credentials."""
    launcher: Account
    """The tenant's launcher role."""

    @property
    def place(self) -> Place:
        """Where the tenant's jobs live."""
        s3 = self.launcher.client("s3")
        store = S3RecordStore(s3, self.contract.buckets.data)
        backends: dict[str, Backend] = {"sagemaker": backend_of(self.launcher, self.contract)}
        for name, door in DOORS.items():
            if (backend := door.tenant_backend(self.launcher, self.contract)) is not None:
                backends[name] = backend
        resumes, queued = bool(self.contract.broker), bool(self.contract.shares)
        return Place(
            store,
            ByRecord(backends),
            s3,
            self.launcher,
            has_resumer=resumes and not queued,
            has_queue=queued,
            tracking_server=self.contract.tracking.server if self.contract.tracking else "",
            emulated=self.contract.emulated,
        )


def environment_file(name_or_path: str) -> Path:
    """The environment file: a path as it stands, or a name for environments/<name>.yaml; InputError lists the names."""
    path = Path(name_or_path)
    if path.suffix in {".yaml", ".yml"} or len(path.parts) > 1:
        return path
    known = checkout_root() / "environments"
    if (named := known / f"{name_or_path}.yaml").is_file():
        return named
    names = ", ".join(sorted(file.stem for file in known.glob("*.yaml"))) or "none"
    raise InputError(
        f"--environment {name_or_path}: no such environment in {known} (there: {names}); give a name or a path"
    )


def open_tenant(environment: EnvironmentSpec, tenant: str | None, where: str) -> TenantAccess:
    """Account checked, contract read, launcher role assumed."""
    name = check_tenant(environment, tenant, where)
    account = open_account(environment)
    contract = read_contract(account, environment, name)
    launcher = assume(account, contract.roles.launcher, session_name=f"trainyard-{environment.name}-{name}")
    return TenantAccess(environment, contract, account, launcher)


def local_place(folder: Path | None = None) -> Place:
    """Jobs on this machine."""
    folder = folder or local_jobs_folder()
    backends: dict[str, Backend] = {name: door.here_backend(folder) for name, door in DOORS.items()}
    return Place(FolderRecordStore(folder), ByRecord(backends | {"local": LocalBackend(folder)}))


def local_jobs_folder() -> Path:
    """Where `--backend local` keeps its jobs."""
    return state_root() / "jobs"


def place_of(job_id: str, environment: str, tenant: str | None) -> Place:
    """Where that job lives: on this machine if it has a record here, else with the tenant that its name begins with."""
    if (local_jobs_folder() / job_id / "record.json").exists():
        return local_place()
    spec = load_environment(environment_file(environment))
    return open_tenant(spec, tenant or tenant_in(job_id, spec), f"job {job_id}").place


def tenant_in(job_id: str, environment: EnvironmentSpec) -> str:
    """The tenant whose name a job id begins with, the longest where several do."""
    owners = [tenant for tenant in environment.tenants if job_id.startswith(f"{tenant}-")]
    if not owners:
        exist = ", ".join(sorted(environment.tenants))
        raise InputError(
            f"job {job_id}: is not on this machine, and begins with no tenant of environment {environment.name} "
            f"({exist}); check the id (`trainyard jobs`) or --environment"
        )
    return max(owners, key=len)
