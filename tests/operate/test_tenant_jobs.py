"""Which jobs keep a tenant from being removed: whatever still writes to its buckets, or could begin to."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError
from launch_testing import JOB_ID

from trainyard.errors import AwsRefusedError, InputError
from trainyard.launch.record import JobRecord, S3RecordStore
from trainyard.launch.session import Account
from trainyard.operate.tenants import leftovers, removal, unfinished
from trainyard.spec.platform import EnvironmentSpec, TenantContract
from trainyard.spec.shares import ShareContract

GPU, QUEUE = "ml.p5.4xlarge", "arn:aws:batch:us-east-1:123456789012:job-queue/trainyard-test-p5-4xlarge-0"


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What moto lacks, by service: SageMaker's listing is empty."""
    sagemaker = SimpleNamespace(get_paginator=lambda _: SimpleNamespace(paginate=lambda **_: []))
    given: dict[str, Any] = {"sagemaker": sagemaker}
    original = Account.client
    monkeypatch.setattr(Account, "client", lambda account, name: given.get(name) or original(account, name))
    return given


@pytest.fixture
def running(deployed: Account, environment: EnvironmentSpec, clients: dict[str, Any]) -> Callable[[], list[str]]:
    return lambda: list(leftovers.running_jobs(deployed, environment, "acme").jobs)


def recorded(deployed: Account, record: JobRecord, backend: str, number: int, state: str = "Training") -> str:
    """A job of that backend in the tenant's records."""
    job_id = f"{JOB_ID[:-4]}{number:04d}"
    kept = record.model_copy(update={"job_id": job_id, "backend": backend}).with_state(state)
    S3RecordStore(deployed.client("s3"), "acme-data").create(kept)
    return job_id


class Machines:
    """A backend that knows some states, or gives no answer."""

    def __init__(self, states: dict[str, str] | None) -> None:
        self.known = states

    def states(self, records: list[JobRecord]) -> dict[str, str]:
        if self.known is None:
            raise AwsRefusedError("no login node answers")
        asked = {record.job_id for record in records}
        return {job_id: state for job_id, state in self.known.items() if job_id in asked}


def doors(**machines: Machines | None) -> dict[str, Any]:
    return {name: SimpleNamespace(tenant_backend=lambda *_, it=it: it) for name, it in machines.items()}


def test_a_job_on_the_tenants_own_cluster_keeps_it(
    deployed: Account,
    environment: EnvironmentSpec,
    record: JobRecord,
    running: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trains, ended_since, forgotten = (recorded(deployed, record, "slurm", number) for number in range(3))
    recorded(deployed, record, "slurm", 3, "Completed")
    recorded(deployed, record, "sagemaker", 4)  # SageMaker lists what runs; a record is as old as the last look
    store = "jobs/broken-20260131120000-1a2b/record.json"
    deployed.client("s3").put_object(Bucket="acme-data", Key=store, Body=b"no JSON")
    cluster = Machines({trains: "Training", ended_since: "Completed"})
    monkeypatch.setattr(unfinished, "DOORS", doors(slurm=cluster, ray=None))
    assert running() == [trains]
    cluster.known = None
    all_told = leftovers.running_jobs(deployed, environment, "acme")
    assert (all_told.jobs, set(all_told.unanswered)) == ((), {forgotten, ended_since, trains}), "all may run"
    assert set(all_told.unanswered.values()) == {"no login node answers"}
    monkeypatch.setattr(unfinished, "DOORS", doors(slurm=None))
    assert running() == [], "its cluster is gone, and they with it"


def test_other_peoples_machines_count_by_their_answer_alone(
    deployed: Account, record: JobRecord, running: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ray that was taken down for good would keep the tenant for ever."""
    ray, kubernetes = recorded(deployed, record, "ray", 1), recorded(deployed, record, "kubernetes", 2)
    monkeypatch.setattr(unfinished, "DOORS", doors(ray=Machines(None), kubernetes=Machines({kubernetes: "Queued"})))
    assert running() == [kubernetes]
    monkeypatch.setattr(unfinished, "DOORS", doors(ray=Machines({ray: "Training"}), kubernetes=Machines(None)))
    assert running() == [ray]


class Clusters(Machines):
    """Several behind one door, of which one is gone: who asks all of them at once hears of none."""

    def __init__(self, states: dict[str, str], gone: str) -> None:
        super().__init__(states)
        self.gone = gone

    def states(self, records: list[JobRecord]) -> dict[str, str]:
        if self.gone in {record.job_id for record in records}:
            raise InputError("no job server answers")
        return super().states(records)


@pytest.mark.parametrize(
    ("backend", "setting", "gone", "live"),
    [
        ("ray", "address", "http://10.0.0.1:8265", "http://10.0.0.2:8265"),
        ("kubernetes", "context", "old", "new"),
        ("kubernetes", "namespace", "old", "new"),
    ],
)
def test_a_cluster_that_is_gone_hides_no_job_of_another(
    deployed: Account,
    record: JobRecord,
    running: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    setting: str,
    gone: str,
    live: str,
) -> None:
    def on(where: str, number: int) -> str:
        compute = record.resolved.spec.compute
        place = getattr(compute, backend).model_copy(update={setting: where})
        spec = record.resolved.spec.model_copy(update={"compute": compute.model_copy(update={backend: place})})
        resolved = record.resolved.model_copy(update={"spec": spec})
        return recorded(deployed, record.model_copy(update={"resolved": resolved}), backend, number)

    for first, second in ((1, 2), (4, 3)):  # whichever is asked first
        away, trains = on(gone, first), on(live, second)
        monkeypatch.setattr(unfinished, "DOORS", doors(**{backend: Clusters({trains: "Training"}, gone=away)}))
        monkeypatch.setattr(
            unfinished, "_records", lambda store, ids=(away, trains): [store.read(one).record for one in ids]
        )
        assert running() == [trains]


class Batch:
    """Batch's listing of a share: by status, as AWS has it."""

    exceptions = SimpleNamespace(ClientError=ClientError)

    def __init__(self, **jobs: str) -> None:
        self.jobs = jobs
        self.refusal = ""

    def get_paginator(self, name: str) -> Any:
        assert name == "list_service_jobs"
        return self

    def paginate(self, *, jobQueue: str, filters: list[dict[str, Any]], jobStatus: str) -> list[dict[str, Any]]:
        assert (jobQueue, filters) == (QUEUE, [{"name": "QUOTA_SHARE_NAME", "values": ["acme"]}])
        if self.refusal:
            answer: Any = {"Error": {"Code": "ClientException", "Message": self.refusal}}
            raise ClientError(answer, "ListServiceJobs")
        found = [
            {"jobName": name.replace("_", "-"), "jobId": name}
            for name, status in self.jobs.items()
            if status == jobStatus
        ]
        return [{"jobSummaryList": found}]


def test_a_job_that_waits_in_a_queue_keeps_it_and_is_counted_once(
    deployed: Account, contract: TenantContract, clients: dict[str, Any], running: Callable[[], list[str]]
) -> None:
    """It could start while its buckets are emptied."""
    batch = clients["batch"] = Batch(acme_a="RUNNABLE", acme_b="RUNNING", acme_c="SUCCEEDED", acme_d="SUBMITTED")
    assert running() == [], "a tenant without shares has nothing in a queue"
    share = ShareContract(queue=QUEUE, guaranteed=1, most=1)
    told = contract.model_copy(update={"shares": {GPU: share, "ml.g5.xlarge": share}}).model_dump_json()
    name = "/trainyard/test/acme/contract"
    deployed.client("ssm").put_parameter(Name=name, Value=told, Type="String", Overwrite=True)
    assert running() == ["acme-d", "acme-a", "acme-b"]
    names = [{"TrainingJobName": one} for one in ("AWSBatchacme-b-1", "acme-direct", "globex-x")]

    def listed(*, NameContains: str, StatusEquals: str, PaginationConfig: dict[str, int]) -> list[dict[str, Any]]:
        assert NameContains == "acme-" and PaginationConfig == {"PageSize": 100}, "ten a page where none is named"
        return [{"TrainingJobSummaries": names if StatusEquals == "InProgress" else []}]

    clients["sagemaker"] = SimpleNamespace(get_paginator=lambda _: SimpleNamespace(paginate=listed))
    assert running() == ["acme-direct", "acme-d", "acme-a", "acme-b"]
    batch.jobs.clear()
    assert running() == ["AWSBatchacme-b-1", "acme-direct"], "what Batch let go and SageMaker still stops"
    batch.refusal = f"{QUEUE} does not exist"
    assert running() == ["AWSBatchacme-b-1", "acme-direct"]
    batch.refusal = "not today"
    with pytest.raises(AwsRefusedError, match="not today"):
        running()


def test_a_tenant_without_a_contract_has_nobody_to_ask(
    deployed: Account, record: JobRecord, running: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went with the first stack of a removal that was interrupted, and the launcher's role with the second."""
    recorded(deployed, record, "slurm", 1)
    deployed.client("ssm").delete_parameter(Name="/trainyard/test/acme/contract")
    monkeypatch.setattr(unfinished, "assume", lambda *_, **__: pytest.fail("there is no such role"))
    monkeypatch.setattr(unfinished, "DOORS", doors(slurm=Machines(None)))
    assert running() == []


@pytest.fixture
def planned(
    deployed: Account,
    environment: EnvironmentSpec,
    clients: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> Callable[..., removal.Plan]:
    """The plan of a tenant that has nothing but jobs."""
    monkeypatch.setattr(removal, "held", lambda *_: [])
    monkeypatch.setattr(removal, "stack_status", lambda *_: removal.NOT_DEPLOYED)
    for name in ("job_streams", "job_roles", "machine_log_groups"):
        monkeypatch.setattr(leftovers, name, lambda *_: [])
    return lambda ended=(): removal.plan(deployed, environment, "acme", tmp_path, ended)


def remove(account: Account, plan: removal.Plan, tmp_path: Any) -> removal.Report:
    return removal.remove(account, plan, tmp_path, lambda _: None)


def test_who_gives_no_answer_is_told_with_the_reason_and_a_way_through(
    deployed: Account,
    record: JobRecord,
    planned: Callable[..., removal.Plan],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    """A cluster that was deleted by hand would keep the tenant for ever."""
    first, second = (recorded(deployed, record, "slurm", number) for number in (1, 2))
    cluster = Machines(None)
    monkeypatch.setattr(unfinished, "DOORS", doors(slurm=cluster))
    (line,) = planned().running.lines()
    assert line.startswith("2 jobs had not ended by their records, and their cluster gives no answer (no login node")
    assert first in line and second in line
    for ended in ((), (first,)):
        with pytest.raises(InputError, match=r"gives no answer \(no login node answers\): .*--ended JOB") as refused:
            remove(deployed, planned(ended), tmp_path)
        assert (first in str(refused.value)) == (first not in ended) and second in str(refused.value)
    assert remove(deployed, planned((first, second)), tmp_path).finished_at
    cluster.known = {first: "Training"}
    with pytest.raises(InputError, match=rf"1 job has not ended \({first}\); stop them"):
        remove(deployed, planned((first, second)), tmp_path)


def test_who_may_not_become_the_launcher_sees_the_plan_and_removes_nothing(
    deployed: Account, planned: Callable[..., removal.Plan], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AwsRefusedError("assuming the launcher: AccessDenied")

    assert planned().running.lines() == []
    monkeypatch.setattr(unfinished, "assume", refuse)
    found = planned()
    assert found.running.lines() == [
        "jobs on other machines than SageMaker's can't be told: assuming the launcher: AccessDenied"
    ]
    with pytest.raises(AwsRefusedError, match=r"tenant acme: jobs on other machines .* can't be told: assuming"):
        remove(deployed, found, tmp_path)
    assert list(tmp_path.iterdir()) == [], "it did not begin"
