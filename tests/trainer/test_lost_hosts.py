"""Hosts that are lost again and again: what the others say at the third time, and to whom it means what."""

import errno
import json
import signal
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws
from test_entrypoint import failure, opt_ml, running, wait_for
from trainer.checkpoint import destination as destinations
from trainer.host import losses
from trainer.host.losses import _SECONDS, LOSSES_FILE, MOST_LOSSES, LostHosts
from trainer.host.recovery import Ending
from trainer_testing.distributed import free_port

from trainyard.emulator.batch.service_jobs import may_retry
from trainyard.functions.job_resumer import cause
from trainyard.functions.retry_rules import PREFIX, retry_rules

LOST = Ending(1, "host algo-2 is gone: its entrypoint was killed, or the network parted")
FIRST_LOST = Ending(1, "the first host (10.0.0.9) is gone: its entrypoint was killed, or the network parted")


NEW_CLIENT = destinations.s3_client


def start(destination: object, *, index: int = 0, **settings: str) -> LostHosts:
    """A host of one start of the job."""
    return LostHosts(str(destination), index=index, settings=settings)


def commit(folder: Path, step: int) -> None:
    path = folder / f"checkpoints/step-{step:08d}/COMMITTED"
    path.parent.mkdir(parents=True)
    path.touch()


def is_retried(reason: str) -> bool:
    """By a training queue."""
    strategy = retry_rules({"recovery": {"max_resumes": 9}})
    return may_retry(strategy, 1, f"{PREFIX}AlgorithmError: {reason}, exit code: 1")


def test_the_third_loss_from_one_checkpoint_is_a_diagnosis_that_nobody_takes_for_a_loss(tmp_path: Path) -> None:
    commit(tmp_path, 120)
    reasons = [start(tmp_path).judged(LOST).reason for _ in range(MOST_LOSSES)]
    assert reasons[:-1] == [LOST.reason] * (MOST_LOSSES - 1)
    assert reasons[-1].startswith("3 times in a row since step 120 was saved a host was lost, so another start may not")
    assert reasons[-1].endswith(f"then `trainyard resume`; the last time: {LOST.reason}")
    assert [is_retried(reason) for reason in reasons] == [True, True, False]
    told = {"TrainingJobStatus": "Failed", "FailureReason": f"AlgorithmError: {reasons[-1]}, exit code: 1"}
    assert cause(told) is None


def test_progress_or_a_person_begins_the_count_anew(tmp_path: Path) -> None:
    for _ in range(MOST_LOSSES - 1):
        start(tmp_path).judged(LOST)
    commit(tmp_path, 5)
    for _ in range(MOST_LOSSES - 1):
        assert start(tmp_path).judged(LOST) == LOST
    asked = {"TRAINYARD_ATTEMPT": "2"}
    for _ in range(MOST_LOSSES - 1):
        assert start(tmp_path, **asked).judged(LOST) == LOST
    # A start that the tenant's resumer made counts for what the person asked for.
    assert start(tmp_path, TRAINYARD_ATTEMPT="3", TRAINYARD_ASKED_ATTEMPT="2").judged(LOST) != LOST


def test_hosts_that_are_left_say_the_same_and_one_of_them_notes_it(tmp_path: Path) -> None:
    for number in range(MOST_LOSSES):
        hosts = [start(tmp_path, index=index) for index in (1, 2, 3)]
        said = {host.judged(FIRST_LOST).reason for host in hosts}
        assert len(said) == 1 and (said == {FIRST_LOST.reason}) == (number < MOST_LOSSES - 1)
        assert len((tmp_path / LOSSES_FILE).read_text().splitlines()) == number + 1


def test_a_clock_that_is_set_back_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start's machines are an hour behind those of the one before; hosts of one start differ by a minute."""
    for number in range(MOST_LOSSES):
        said = set()
        for index in (1, 2, 3):
            monkeypatch.setattr(losses.time, "time", lambda at=1e9 - 3600 * number + 60 * index: at)
            said.add(start(tmp_path, index=index).judged(FIRST_LOST, start=f"start {number}").reason)
        assert len(said) == 1 and (said == {FIRST_LOST.reason}) == (number < MOST_LOSSES - 1), number
        assert len((tmp_path / LOSSES_FILE).read_text().splitlines()) == number + 1


@pytest.mark.parametrize(
    "ending",
    [Ending(0, ""), Ending(75, "saved; resume me"), Ending(1, "rank 1 on algo-2: ValueError: host algo-2 is gone")],
)
def test_what_is_no_loss_is_left_alone(ending: Ending, tmp_path: Path) -> None:
    assert start(tmp_path).judged(ending) is ending
    assert not (tmp_path / LOSSES_FILE).exists()


def test_a_place_that_takes_nothing_costs_the_count_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for _ in range(MOST_LOSSES):
        assert start(tmp_path / "file/below").judged(LOST) == LOST
    assert "lost_hosts.jsonl can't be kept at" in capsys.readouterr().out


def test_a_folder_that_no_save_has_made_yet_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "jobs/tiny"
    said = [start(folder).judged(LOST).reason for _ in range(MOST_LOSSES)]
    assert said[-2] == LOST.reason and "3 times in a row before the first checkpoint" in said[-1]
    assert [path.name for path in folder.iterdir()] == [LOSSES_FILE]


def test_a_full_disk_keeps_the_rows_so_far_and_no_half_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path).judged(LOST)
    rows = (tmp_path / LOSSES_FILE).read_text()

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(destinations, "sync", full)
    assert start(tmp_path).judged(LOST) == LOST
    assert "No space left on device" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == [LOSSES_FILE]
    assert (tmp_path / LOSSES_FILE).read_text() == rows


def test_another_job_at_the_same_place_counts_its_own(tmp_path: Path) -> None:
    first, second = ({"TRAINYARD_JOB_ID": f"acme-tiny-{number}", "TRAINYARD_ATTEMPT": "1"} for number in (1, 2))
    for _ in range(MOST_LOSSES - 1):
        assert start(tmp_path, **first).judged(LOST) == LOST
    for _ in range(MOST_LOSSES - 1):
        assert start(tmp_path, **second).judged(LOST) == LOST
    assert all(start(tmp_path, **job).judged(LOST) != LOST for job in (first, second))


def test_half_a_row_is_passed_over(tmp_path: Path) -> None:
    for _ in range(MOST_LOSSES - 1):
        start(tmp_path).judged(LOST)
    path = tmp_path / LOSSES_FILE
    path.write_text(f'{path.read_text()}{{"at": 1, "st')
    assert start(tmp_path).judged(LOST) != LOST


def as_a_job_may(*, in_haste: bool = False) -> Any:
    """The client, whose role may list below `jobs/tiny` alone: so S3 names no key that is missing, it refuses."""
    client = NEW_CLIENT(in_haste=in_haste)

    def get(parsed: dict[str, Any], **_: Any) -> None:
        if parsed.get("Error", {}).get("Code") == "NoSuchKey":
            parsed["Error"]["Code"] = "AccessDenied"

    def list_objects(params: dict[str, Any], **_: Any) -> None:
        if not params.get("Prefix", "").startswith("jobs/tiny/"):
            raise PermissionError("s3:ListBucket")

    client.meta.events.register("after-call.s3.GetObject", get)
    client.meta.events.register("before-parameter-build.s3.ListObjectsV2", list_objects)
    assert client.meta.config.read_timeout < _SECONDS, "the answer would come after the host's end"
    return client


def test_on_s3_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destinations, "s3_client", as_a_job_may)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        s3 = boto3.client("s3")
        s3.create_bucket(Bucket="acme")
        s3.put_object(Bucket="acme", Key="jobs/tiny/checkpoints/step-00000007/COMMITTED", Body=b"")
        said = [start("s3://acme/jobs/tiny").judged(LOST).reason for _ in range(MOST_LOSSES)]
        rows = s3.get_object(Bucket="acme", Key=f"jobs/tiny/{LOSSES_FILE}")["Body"].read().splitlines()
    assert said[-2] == LOST.reason and said[-1].startswith("3 times in a row since step 7 was saved")
    assert [json.loads(row)["step"] for row in rows] == [7] * MOST_LOSSES


@pytest.mark.parametrize("place", ["folder", "s3"])
def test_a_file_is_told_from_those_whose_names_begin_so(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    with mock_aws():
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="acme")
        there = destinations.open_destination(str(tmp_path) if place == "folder" else "s3://acme/jobs/tiny")
        assert not there.has("rows.jsonl")
        for name in ("rows.jsonl.old", "rows/jsonl"):
            there.put_bytes(name, b"")
            assert there.has(name)
        assert not there.has("rows.jsonl") and not there.has("rows")


def lose_the_second(root: Path, destination: Path) -> tuple[str, int]:
    """Two hosts, of which the second is killed: the first one's reason and exit code."""
    addresses = json.dumps({"algo-1": "127.0.0.2", "algo-2": "127.0.0.3"})
    flags = {"TRAINYARD_HOST_ADDRESSES": addresses, "TRAINYARD_RENDEZVOUS_PORT": str(free_port())}
    trees = [
        opt_ml(root / host, host=host, hosts=("algo-1", "algo-2"), processes_per_host=1)
        for host in ("algo-1", "algo-2")
    ]
    for tree in trees:
        path = tree / "input/data/job/resolved_job.json"
        job: dict[str, Any] = json.loads(path.read_text())
        job["spec"]["checkpoint"]["destination"] = str(destination)
        path.write_text(json.dumps(job))
    with running(trees[1], {"all": "wait"}, **flags) as lost, running(trees[0], {"all": "wait"}, **flags) as first:
        wait_for(trees[0] / "output/data/ready-0", first)
        wait_for(trees[1] / "output/data/ready-1", lost)
        lost.send_signal(signal.SIGKILL)
        first.communicate(timeout=400)
    return failure(trees[0])[0], first.returncode


@pytest.mark.slow
def test_the_entrypoint_gives_up_at_the_third_loss(tmp_path: Path) -> None:
    for _ in range(MOST_LOSSES - 1):
        start(tmp_path / "shared").judged(LOST)
    reason, code = lose_the_second(tmp_path, tmp_path / "shared")
    assert code == 1 and not is_retried(reason), reason
    assert "before the first checkpoint a host was lost" in reason
    rows = [json.loads(line) for line in (tmp_path / "shared" / LOSSES_FILE).read_text().splitlines()]
    assert len(rows) == MOST_LOSSES and len(rows[-1]["start"]) == 16, "the first host named the start for all"
