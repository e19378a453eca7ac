"""The meter of a month's budget: exact to a millionth, the month's part alone, spot as billed, a stop at 100 %."""

import itertools
import json
import sys
import types
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import botocore.session
import pytest
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st

from trainyard.functions import budget_meter
from trainyard.functions.job_meter import WITHOUT_MACHINES, Use, month_of, uses_of
from trainyard.launch.spending import BILLED_STATES, WAITING

KIND = "ml.p5.4xlarge"
RATES = {KIND: {"on_demand": Decimal("6.88"), "spot": Decimal("2.5")}}
NOON = datetime(2026, 3, 15, 12, tzinfo=UTC)
MARCH = month_of(NOON)


def job(name: str = "acme-a", *, began: datetime | None = None, hours: float = 1, **more: Any) -> dict[str, Any]:
    """DescribeTrainingJob's answer for an ended job of two machines."""
    began = began or NOON - timedelta(hours=5)
    return {
        "TrainingJobName": name,
        "TrainingJobStatus": "Completed",
        "ResourceConfig": {"InstanceType": KIND, "InstanceCount": 2},
        "TrainingStartTime": began,
        "TrainingEndTime": began + timedelta(hours=hours),
        "TrainingTimeInSeconds": round(hours * 3600),
        "BillableTimeInSeconds": round(hours * 3600),
        **more,
    }


def used(description: dict[str, Any]) -> Use:
    (found,) = uses_of(description, NOON)
    return found


def test_the_month_is_the_calendars_in_utc() -> None:
    assert (datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 4, 1, tzinfo=UTC)) == MARCH
    assert month_of(datetime(2026, 12, 31, 23, tzinfo=UTC))[1] == datetime(2027, 1, 1, tzinfo=UTC)


def test_a_job_costs_instances_times_billed_time_times_price() -> None:
    assert used(job()).usd(*MARCH, Decimal("6.88")) == Decimal("13.760000")
    assert used(job()).instance_seconds(*MARCH) == 7200
    assert uses_of({**job(), "TrainingStartTime": None}, NOON) == [], "it never had a machine"


def test_spot_is_billed_as_sagemaker_tells_it_and_holds_its_machines_all_the_same() -> None:
    ended = used(job(EnableManagedSpotTraining=True, BillableTimeInSeconds=1200))
    assert ended.rate(RATES) == Decimal("6.88"), "the saving is in the billed time"
    assert ended.usd(*MARCH, Decimal("6.88")) == Decimal("4.586667")
    assert ended.instance_seconds(*MARCH) == 7200
    running = used(job(EnableManagedSpotTraining=True, TrainingJobStatus="InProgress"))
    assert running.rate(RATES) == Decimal("2.5"), "nobody has billed it yet: at the spot price"
    assert running.billed_seconds == 5 * 3600
    assert running.rate({KIND: {"on_demand": Decimal(7)}}) == 7, "and where that isn't known, at its most"


def test_what_was_interrupted_holds_no_machines_until_it_has_some_again() -> None:
    """Of a running spot job: nobody bills the wait for capacity, which can take days."""

    def change(status: str, since: float, until: float | None = None) -> dict[str, Any]:
        ends = {} if until is None else {"EndTime": NOON - timedelta(hours=until)}
        return {"Status": status, "StartTime": NOON - timedelta(hours=since), **ends}

    started = [change("Starting", 6, 4.5), change("Downloading", 4.5, 4), change("Training", 4, 3)]
    waits = [*started, change("Interrupted", 3)]
    runs = [*started, change("Interrupted", 3, 2), change("Starting", 2, 1), change("Downloading", 1)]
    sought = [change("LaunchingMLInstances", 2, 1.5), change("PreparingTrainingStack", 1.5, 1), change("Training", 1)]
    relaunched = [*started, change("Interrupted", 3, 2), *sought]
    for changes, held in ((started, 5), (waits, 2), (runs, 3), (relaunched, 3)):
        told = {"TrainingJobStatus": "InProgress", "SecondaryStatusTransitions": changes}
        running = used(job(EnableManagedSpotTraining=True, **told))
        assert (running.held_seconds, running.billed_seconds) == (held * 3600, held * 3600)
    assert used(job(SecondaryStatusTransitions=runs)).held_seconds == 3600, "of an ended one SageMaker tells it"


@pytest.mark.parametrize("is_running", [True, False])
def test_an_interruption_lowers_the_month_that_it_fell_into(is_running: bool) -> None:
    """Over the first of a month, and by the day: a job's time falls where it had machines."""
    now, first = NOON, MARCH[0]
    began, day = first - timedelta(days=12), timedelta(days=1)

    def held(*lost: datetime) -> list[Decimal]:
        gone = [{"Status": "Interrupted", "StartTime": lost[0]}]
        if len(lost) > 1:
            gone = [{**gone[0], "EndTime": lost[1]}, {"Status": "Training", "StartTime": lost[1]}]
        changes = [{"Status": "Training", "StartTime": began, "EndTime": lost[0]}, *gone]
        seconds = round((now - began - ((lost[1:] or (now,))[0] - lost[0])).total_seconds())
        told = {"TrainingJobStatus": "InProgress" if is_running else "Stopped", "TrainingEndTime": now}
        told |= {"TrainingTimeInSeconds": seconds, "BillableTimeInSeconds": seconds}
        one = used(job(began=began, EnableManagedSpotTraining=True, SecondaryStatusTransitions=changes, **told))
        days = [one.instance_seconds(began + n * day, began + (n + 1) * day) / 7200 for n in range(28)]
        month = one.instance_seconds(*MARCH) / 7200
        assert one.usd(*MARCH, Decimal(3600)) == 7200 * month
        return [month, days[1], days[11], days[13]]

    assert held(first - 10 * day, first) == [14 * 24 + 12, 24, 0, 24], "since the 1st it has all its machines"
    assert held(first) == [0, 24, 24, 0], "it holds none of this month"
    assert held(first - day, first + day) == [13 * 24 + 12, 24, 0, 24]


def test_each_of_sagemakers_words_for_a_job_is_known_as_with_machines_or_without() -> None:
    """One list for those who bill, who watch and who look for what is wrong; of a new word somebody must decide."""
    service = botocore.session.get_session().get_service_model("sagemaker")
    ended = {"Completed", "Failed", "Stopped", "MaxRuntimeExceeded", "MaxWaitTimeExceeded"}
    assert set(service.shape_for("SecondaryStatus").enum) == WITHOUT_MACHINES | BILLED_STATES | ended
    assert not WITHOUT_MACHINES & BILLED_STATES
    assert not WAITING & BILLED_STATES and WAITING >= WITHOUT_MACHINES


def test_a_job_that_is_being_deleted_has_ended() -> None:
    ended = used(job(TrainingJobStatus="Deleting", began=NOON - timedelta(days=9)))
    assert (ended.held_seconds, ended.is_running) == (3600, False)


def test_a_warm_pools_idle_time_and_a_plans_price_count() -> None:
    pooled = used(job(WarmPoolStatus={"Status": "Reused", "ResourceRetainedBillableTimeInSeconds": 600}))
    assert pooled.instance_seconds(*MARCH) == 2 * 4200
    planned = job()
    planned["ResourceConfig"]["TrainingPlanArn"] = "arn:aws:sagemaker:us-east-1:1:training-plan/x"
    assert used(planned).rate(RATES) is None, "no plan's price is known"


@given(
    seconds=st.integers(1, 10**6),
    billed=st.integers(0, 10**6),
    count=st.integers(1, 64),
    rate=st.decimals("0.0001", "200", places=4),
    cuts=st.lists(st.integers(0, 10**6), max_size=8),
)
def test_parts_add_up_to_the_whole_exactly(
    seconds: int, billed: int, count: int, rate: Decimal, cuts: list[int]
) -> None:
    until = NOON + timedelta(seconds=seconds)
    use = Use("a", KIND, count, "on_demand", NOON, until, seconds, billed, is_running=False)
    edges = [NOON, *(NOON + timedelta(seconds=cut) for cut in sorted(cuts)), until + timedelta(days=30)]
    parts = [use.usd(one, other, rate) for one, other in itertools.pairwise(edges)]
    assert sum(parts) == use.usd(NOON, edges[-1], rate)
    assert abs(sum(parts) - Decimal(count) * billed * rate / 3600) <= Decimal("0.0000005")


def test_only_the_months_part_of_a_job_counts() -> None:
    over = used(job("acme-over", began=datetime(2026, 2, 28, 20, tzinfo=UTC), hours=8))
    assert over.usd(*MARCH, Decimal("6.88")) == 4 * 2 * Decimal("6.88")
    found = budget_meter.taken([over, used(job())], RATES, {KIND: 1}, NOON)
    assert (found["usd"], found["gpu_hours"]) == (Decimal("68.800000"), 10)
    none = budget_meter.taken([over, used(job())], {}, {KIND: 8}, NOON)
    assert none == {"usd": 0, "gpu_hours": 80, "unpriced": [KIND], "unpriced_jobs": 2}
    before = used(job(began=datetime(2026, 2, 2, tzinfo=UTC)))
    assert budget_meter.taken([before], {}, {}, NOON)["unpriced_jobs"] == 0, "it took nothing of this month"


def test_what_runs_on_a_training_plan_takes_gpu_hours_and_no_dollars_and_lacks_no_price() -> None:
    planned = job()
    planned["ResourceConfig"]["TrainingPlanArn"] = "arn:aws:sagemaker:us-east-1:1:training-plan/x"
    nothing = {"usd": 0, "gpu_hours": 2, "unpriced": [], "unpriced_jobs": 0}
    for rates in (RATES, {}, {KIND: {"training_plan": Decimal(5)}}):
        assert budget_meter.taken([used(planned)], rates, {KIND: 1}, NOON) == nothing


def test_each_group_of_a_heterogeneous_cluster_counts() -> None:
    groups = [{"InstanceType": KIND, "InstanceCount": 4}, {"InstanceType": "ml.g6e.8xlarge", "InstanceCount": 1}]
    uses = uses_of(job(ResourceConfig={"InstanceGroups": groups}), NOON)
    rates = RATES | {"ml.g6e.8xlarge": {"on_demand": Decimal(5)}}
    found = budget_meter.taken(uses, rates, {KIND: 1, "ml.g6e.8xlarge": 1}, NOON)
    assert (found["usd"], found["gpu_hours"]) == (4 * Decimal("6.88") + 5, 5)


def test_a_warm_pool_that_waits_counts_by_the_clock_until_sagemaker_tells_its_time() -> None:
    machines = {"InstanceType": KIND, "InstanceCount": 1, "KeepAlivePeriodInSeconds": 1800}
    waits = job(began=NOON - timedelta(hours=1, minutes=10), ResourceConfig=machines)
    waits["WarmPoolStatus"] = {"Status": "Available"}
    assert [uses_of(waits, at)[0].billed_seconds for at in (NOON, NOON + timedelta(hours=9))] == [4200, 5400]
    told = {"WarmPoolStatus": {"Status": "Reused", "ResourceRetainedBillableTimeInSeconds": 700}}
    later = [uses_of(waits | told, at)[0].billed_seconds for at in (NOON, NOON + timedelta(hours=9))]
    assert later == [4300, 4300], "what it could have been kept for is no bill"


def test_the_nearer_quota_decides() -> None:
    found = {"usd": Decimal(50), "gpu_hours": Decimal(90)}
    assert budget_meter.used_percent(found, {"monthly_usd": 100.0}) == 50
    assert budget_meter.used_percent(found, {"monthly_usd": 100.0, "monthly_gpu_hours": 100.0}) == 90


class Clients:
    """SageMaker, CloudWatch and Batch as the function sees them."""

    def __init__(self, jobs: list[dict[str, Any]]) -> None:
        self.jobs = {item["TrainingJobName"]: item for item in jobs}
        self.queued: list[dict[str, Any]] = [{"jobId": "1", "jobName": "acme-b", "share": "acme", "status": "RUNNABLE"}]
        self.described: list[str] = []
        self.stopped: list[str] = []
        self.unstoppable: set[str] = set()
        self.metrics: dict[str, float] = {}
        self.exceptions = types.SimpleNamespace(ClientError=ClientError)

    def client(self, _: str) -> "Clients":
        return self

    def get_paginator(self, operation: str) -> Any:
        return types.SimpleNamespace(paginate=getattr(self, f"_{operation}"))

    def _list_training_jobs(
        self, NameContains: str, CreationTimeAfter: datetime, PaginationConfig: dict[str, int]
    ) -> Iterator[dict[str, Any]]:
        assert CreationTimeAfter < month_of(datetime.now(UTC))[0] - timedelta(days=28)
        assert PaginationConfig == {"PageSize": 100}, "left alone SageMaker lists ten at a time"
        yield {"TrainingJobSummaries": [item for name, item in self.jobs.items() if NameContains in name]}

    def _list_service_jobs(self, jobQueue: str, filters: Any, jobStatus: str) -> Iterator[dict[str, Any]]:
        (share,) = filters[0]["values"]
        yield {"jobSummaryList": [job for job in self.queued if (job["share"], job["status"]) == (share, jobStatus)]}

    def describe_training_job(self, TrainingJobName: str) -> dict[str, Any]:
        self.described.append(TrainingJobName)
        return self.jobs[TrainingJobName]

    def put_metric_data(self, Namespace: str, MetricData: list[dict[str, Any]]) -> None:
        assert Namespace == "trainyard/acme"
        self.metrics = {item["MetricName"]: item["Value"] for item in MetricData}

    def stop_training_job(self, TrainingJobName: str) -> None:
        self._check(TrainingJobName)
        self.stopped.append(TrainingJobName)

    def terminate_service_job(self, jobId: str, reason: str) -> None:
        self._check(jobId)
        self.stopped.append(f"{jobId}: {reason}")

    def _check(self, name: str) -> None:
        if name in self.unstoppable:
            raise OSError(f"no\nroute to {name}")


def looked(
    monkeypatch: pytest.MonkeyPatch, clients: Clients, *, queues: tuple[str, ...] = (), **budget: Any
) -> dict[str, Any]:
    monkeypatch.setitem(sys.modules, "boto3", clients)  # type: ignore[arg-type]
    settings = {
        "tenant": "acme",
        "environment": "test",
        "namespace": "trainyard/acme",
        "prefixes": ["acme-", "AWSBatchacme-"],
        "rates": {KIND: {"on_demand": "6.88"}},
        "gpus": {KIND: 1},
        "queues": list(queues),
        "budget": {"monthly_usd": 1000.0, "monthly_gpu_hours": None, "when_spent": "finish"} | budget,
    }
    monkeypatch.setenv("METER", json.dumps(settings))
    return budget_meter.handler({}, None)


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Clients:
    monkeypatch.setattr(budget_meter, "_ended", {})
    now = datetime.now(UTC)
    first = month_of(now)[0]
    ended = job("acme-ended", began=first - timedelta(hours=10), hours=10)  # all of it last month's
    running = job("acme-runs", began=max(first, now - timedelta(hours=2)), TrainingJobStatus="InProgress")
    stopping = job("AWSBatchacme-s", began=now, TrainingJobStatus="Stopping")
    return Clients([ended, running, stopping, job("globex-acme-like", began=now, hours=99)])


def test_a_look_publishes_and_stops_nothing_where_jobs_may_finish(
    monkeypatch: pytest.MonkeyPatch, clients: Clients
) -> None:
    answer = looked(monkeypatch, clients, monthly_usd=0.000001)
    assert answer["stopped"] == clients.stopped == []
    assert answer["used_percent"] > 100
    assert clients.metrics["BudgetUsedPercent-test"] == pytest.approx(answer["used_percent"], rel=1e-3)
    assert clients.metrics["SpentUsd-test"] == pytest.approx(float(answer["usd"]))
    assert "globex-acme-like" not in clients.described
    clients.described.clear()
    looked(monkeypatch, clients)
    assert sorted(clients.described) == ["AWSBatchacme-s", "acme-runs"], "what has ended isn't asked for again"


def test_at_100_percent_what_runs_is_told_to_save_and_end(monkeypatch: pytest.MonkeyPatch, clients: Clients) -> None:
    assert looked(monkeypatch, clients, monthly_usd=10_000.0, when_spent="stop")["stopped"] == []
    assert looked(monkeypatch, clients, monthly_usd=0.000001, when_spent="stop")["stopped"] == ["acme-runs"]
    assert clients.stopped == ["acme-runs"]
    clients.stopped.clear()
    spent = {"monthly_gpu_hours": 0.0001, "when_spent": "stop"}
    batch_runs = job("AWSBatchacme-r", began=datetime.now(UTC) - timedelta(hours=1), TrainingJobStatus="InProgress")
    clients.jobs["AWSBatchacme-r"] = batch_runs
    assert looked(monkeypatch, clients, queues=("arn:q",), **spent)["stopped"] == ["acme-runs", "acme-b"]
    told = ["acme-runs", "1: the month's budget is spent"]
    assert clients.stopped == told, "Batch would start again what SageMaker alone ended; the rest isn't Batch's"
    clients.stopped.clear()
    assert looked(monkeypatch, clients, **spent)["stopped"] == ["AWSBatchacme-r", "acme-runs"], "it queues no more"


@pytest.mark.parametrize("queues", [(), ("arn:q",)])
def test_jobs_are_stopped_though_nobody_can_be_told(
    monkeypatch: pytest.MonkeyPatch, clients: Clients, capsys: pytest.CaptureFixture[str], queues: tuple[str, ...]
) -> None:
    def refused(**_: object) -> None:
        raise OSError("throttled")

    monkeypatch.setattr(clients, "put_metric_data", refused)
    with pytest.raises(OSError, match="throttled"):
        looked(monkeypatch, clients, queues=queues, monthly_usd=0.000001, when_spent="stop")
    assert clients.stopped == ["acme-runs", *(["1: the month's budget is spent"] if queues else [])]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["stopped"], "its log tells it all the same"


@pytest.mark.parametrize("queues", [(), ("arn:q",)])
def test_a_job_that_cant_be_stopped_leaves_no_other_running(
    monkeypatch: pytest.MonkeyPatch, clients: Clients, capsys: pytest.CaptureFixture[str], queues: tuple[str, ...]
) -> None:
    clients.jobs["acme-later"] = clients.jobs["acme-runs"] | {"TrainingJobName": "acme-later"}
    clients.queued.append({"jobId": "2", "jobName": "acme-c", "share": "acme", "status": "RUNNING"})
    clients.unstoppable = {"acme-later", "1"}
    later = "acme-later: OSError: no route to acme-later"
    others = "; acme-b: OSError: no route to 1" if queues else ""
    with pytest.raises(RuntimeError, match=f"^not stopped: {later}{others}$"):
        looked(monkeypatch, clients, queues=queues, monthly_usd=0.000001, when_spent="stop")
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["stopped"] == ["acme-runs", *(["acme-c"] if queues else [])]
    assert len(answer["failed"]) == (2 if queues else 1)


def test_a_queue_that_gives_no_answer_rings_and_leaves_no_others_jobs_running(
    monkeypatch: pytest.MonkeyPatch, clients: Clients, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = clients._list_service_jobs

    def answers(jobQueue: str, **asked: Any) -> Iterator[dict[str, Any]]:
        if jobQueue == "arn:mute":
            raise OSError("no\nroute")
        return listed(jobQueue, **asked)

    monkeypatch.setattr(clients, "_list_service_jobs", answers)
    with pytest.raises(RuntimeError, match=r"^not stopped: arn:mute: OSError: no route"):
        looked(monkeypatch, clients, queues=("arn:mute", "arn:q"), monthly_usd=0.000001, when_spent="stop")
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["stopped"], answer["unasked"]) == (["acme-runs", "acme-b"], ["arn:mute: OSError: no route"])


@pytest.mark.parametrize("queues", [(), ("arn:q",)])
def test_a_job_that_ended_or_was_stopped_meanwhile_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, clients: Clients, queues: tuple[str, ...]
) -> None:
    """Each end of a job starts a look, so that of many that are stopped at once several look together."""

    if queues:  # Batch's own: it alone is told
        clients.jobs["AWSBatchacme-r"] = clients.jobs.pop("acme-runs") | {"TrainingJobName": "AWSBatchacme-r"}

    def refused(name: str) -> None:
        if not queues:
            clients.jobs["acme-runs"] = clients.jobs["acme-runs"] | {"TrainingJobStatus": "Stopping"}
        clients.queued.clear()
        raise OSError(f"{name} has ended")

    monkeypatch.setattr(clients, "_check", refused)
    answer = looked(monkeypatch, clients, queues=queues, monthly_usd=0.000001, when_spent="stop")
    assert (answer["stopped"], answer["failed"]) == (["acme-b"] if queues else ["acme-runs"], [])


@pytest.mark.parametrize("queues", [(), ("arn:q",)])
def test_a_job_of_which_nobody_knows_whether_it_ended_is_told_as_refused(
    monkeypatch: pytest.MonkeyPatch, clients: Clients, queues: tuple[str, ...]
) -> None:
    if queues:  # Batch's own: it alone is told
        clients.jobs["AWSBatchacme-r"] = clients.jobs.pop("acme-runs") | {"TrainingJobName": "AWSBatchacme-r"}

    def refused(*_: object, **__: object) -> None:
        monkeypatch.setattr(clients, "describe_training_job", refused)
        monkeypatch.setattr(clients, "_list_service_jobs", refused)
        raise OSError("no route")

    monkeypatch.setattr(clients, "_check", refused)
    with pytest.raises(RuntimeError, match=r"not stopped: acme-(runs|b): OSError: no route"):
        looked(monkeypatch, clients, queues=queues, monthly_usd=0.000001, when_spent="stop")


def test_a_job_that_was_deleted_since_it_was_listed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, clients: Clients
) -> None:
    describe = clients.describe_training_job

    def gone(TrainingJobName: str) -> dict[str, Any]:
        if TrainingJobName == "acme-ended":
            told = {"Code": "ValidationException", "Message": "Requested resource not found."}
            raise ClientError({"Error": told}, "DescribeTrainingJob")  # type: ignore[typeddict-item]
        return describe(TrainingJobName)

    monkeypatch.setattr(clients, "describe_training_job", gone)
    assert looked(monkeypatch, clients)["failed"] == []
    assert clients.metrics["SpentUsd-test"] > 0


def test_a_look_that_has_no_time_for_all_that_ended_leaves_the_rest_to_the_next(
    monkeypatch: pytest.MonkeyPatch, clients: Clients
) -> None:
    """In the same process: nothing is told or stopped by a part of the month."""
    for number in range(3):
        clients.jobs[f"acme-{number}"] = job(f"acme-{number}", began=datetime.now(UTC) - timedelta(hours=3))
    monkeypatch.setattr(budget_meter, "PATIENCE_SECONDS", -1.0)
    for known in (1, 2, 3):
        with pytest.raises(RuntimeError, match=f"^{known} ended jobs are known, not all yet; the next look goes on"):
            looked(monkeypatch, clients, monthly_usd=0.000001, when_spent="stop")
    assert (clients.metrics, clients.stopped, len(clients.described)) == ({}, [], 3)
    assert looked(monkeypatch, clients, monthly_usd=0.000001, when_spent="stop")["stopped"] == ["acme-runs"]


def test_an_ended_job_is_asked_for_again_as_long_as_its_warm_pool_waits(
    monkeypatch: pytest.MonkeyPatch, clients: Clients
) -> None:
    ended = clients.jobs["acme-ended"]
    over = {"Status": "Terminated", "ResourceRetainedBillableTimeInSeconds": 60}
    for pool, is_asked in (({"Status": "Available"}, True), (over, True), (over, False)):
        ended["WarmPoolStatus"] = pool
        clients.described.clear()
        looked(monkeypatch, clients)
        assert ("acme-ended" in clients.described) is is_asked


def test_who_waits_longest_is_published_while_it_waits(monkeypatch: pytest.MonkeyPatch, clients: Clients) -> None:
    now = datetime.now(UTC)
    clients.jobs["acme-runs"] |= {"CreationTime": now - timedelta(hours=99)}
    assert looked(monkeypatch, clients)["longest_wait_seconds"] == 0, "all of them have had machines"
    created = {"TrainingStartTime": None, "CreationTime": now - timedelta(hours=2)}
    for name, state in (("acme-waits", "InProgress"), ("acme-gave-up", "Failed"), ("globex-waits", "InProgress")):
        clients.jobs[name] = job(name, TrainingJobStatus=state) | created
    clients.jobs["acme-gave-up"] |= {"CreationTime": now - timedelta(hours=9)}
    clients.jobs["globex-waits"] |= {"CreationTime": now - timedelta(hours=9)}
    assert looked(monkeypatch, clients)["longest_wait_seconds"] == pytest.approx(7200, abs=60)
    assert clients.metrics["LongestWaitSeconds-test"] == pytest.approx(7200, abs=60)
    # In a training queue SageMaker has none of it yet; another tenant's share is not this one's.
    long_ago = 1000 * (now - timedelta(hours=3)).timestamp()
    clients.queued = [
        {"jobId": "1", "jobName": "acme-b", "share": "acme", "status": "RUNNABLE", "createdAt": long_ago},
        {"jobId": "2", "jobName": "acme-c", "share": "acme", "status": "RUNNING", "createdAt": 0},
        {"jobId": "3", "jobName": "globex-b", "share": "globex", "status": "RUNNABLE", "createdAt": 0},
        # It ran on borrowed machines, and waits again since it was preempted.
        {"jobId": "4", "jobName": "acme-d", "share": "acme", "status": "RUNNABLE", "createdAt": 0}
        | {"latestAttempt": {"serviceResourceId": {"name": "TrainingJobArn", "value": "arn"}}},
    ]
    assert looked(monkeypatch, clients, queues=("arn:q",))["longest_wait_seconds"] == pytest.approx(10800, abs=60)
    monkeypatch.setattr(clients, "_list_service_jobs", lambda **_: clients._check("no-queue"))
    clients.unstoppable = {"no-queue"}
    answer = looked(monkeypatch, clients, queues=("arn:q",))
    assert answer["unasked"] == ["arn:q: OSError: no route to no-queue"] and answer["usd"] != "0"
    assert answer["longest_wait_seconds"] == pytest.approx(7200, abs=60), "what is known is told"


def test_jobs_whose_price_nobody_knows_are_counted_and_published(
    monkeypatch: pytest.MonkeyPatch, clients: Clients
) -> None:
    assert (looked(monkeypatch, clients)["unpriced"], clients.metrics["UnpricedJobs-test"]) == ([], 0)
    machines = {"InstanceType": "ml.m5.large", "InstanceCount": 1}
    clients.jobs["acme-runs"] |= {
        "ResourceConfig": machines,
        "TrainingStartTime": datetime.now(UTC) - timedelta(days=1),
    }
    assert looked(monkeypatch, clients)["unpriced"] == ["ml.m5.large"]
    assert clients.metrics["UnpricedJobs-test"] == 1
