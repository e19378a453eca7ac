"""Looking after checkpoints: what is good, what is damaged, and a prune that never takes the last good one."""

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
import urllib3
from boto3.exceptions import S3UploadFailedError
from botocore.exceptions import ClientError, IncompleteReadError, ResponseStreamingError
from moto import mock_aws
from moto.server import ThreadedMotoServer

from trainyard.errors import AwsRefusedError, InputError, JobFailedError
from trainyard.launch import checkpoint_files, checkpoints, upload_journal
from trainyard.launch.checkpoint_files import Files, open_files
from trainyard.launch.lineage import refuse_anothers
from trainyard.spec.retention import BestSpec, Retention


@pytest.fixture(autouse=True)
def state_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written down in the checkout."""
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two buckets."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        for bucket in ("one", "two"):
            client.create_bucket(Bucket=bucket)
        yield client


def save(
    root: Path, step: int, *, marker: bool = True, metrics: dict[str, float] | None = None, job: str | None = None
) -> Path:
    """A checkpoint in the trainer's layout."""
    folder = root / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    shards = []
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        content = f"{name} of step {step}".encode() * 100
        (folder / name).write_bytes(content)
        shards.append({"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    extra: dict[str, Any] = {"strategy": "ddp", "step": step, "rng": {"torch": "long"}}
    extra["data"] = {"sequences_consumed": 8 * step}
    if metrics is not None:
        extra["metrics"] = metrics
    if job is not None:
        extra["job_sha256"] = job
    manifest = {"version": 1, "step": step, "world_size": 2, "shards": shards, "extra": extra}
    content = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(content)
    if marker:
        (folder / "COMMITTED").write_text(json.dumps({"manifest_sha256": hashlib.sha256(content).hexdigest()}))
    return folder


def upload(root: Path, s3: Any, bucket: str, prefix: str) -> str:
    """The folder's files as objects."""
    for path in root.rglob("*"):
        if path.is_file():
            s3.upload_file(str(path), bucket, f"{prefix}/{path.relative_to(root).as_posix()}")
    return f"s3://{bucket}/{prefix}/"


def flip(path: Path) -> None:
    """One bit, in place."""
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


def steps(found: Any) -> list[int]:
    return [checkpoint.step for checkpoint in found]


def test_list_tells_good_from_torn_and_from_broken(tmp_path: Path, s3: Any) -> None:
    save(tmp_path, 10)
    (save(tmp_path, 20) / "__1_0.distcp").unlink()
    flip(save(tmp_path, 30) / "manifest.json")
    save(tmp_path, 40, marker=False)
    (tmp_path / "checkpoints" / "notes.txt").write_text("not a checkpoint")
    for destination in (str(tmp_path), upload(tmp_path, s3, "one", "jobs/a")):
        found = checkpoints.list_checkpoints(destination, s3)
        assert steps(found) == [10, 20, 30, 40]
        assert [one.is_good for one in found] == [True, False, False, False]
        assert [one.committed for one in found] == [True, True, True, False]
        assert (found[0].world_size, found[0].strategy, found[0].num_files) == (2, "ddp", 5)
        assert found[1].problem == "__1_0.distcp is missing"
        assert "SHA-256 differs" in found[2].problem
        assert checkpoints.chosen(destination, s3, None).step == 10
    with pytest.raises(InputError, match=r"--step 11: .* has no checkpoint of that step \(there: 10, 20, 30, 40\)"):
        checkpoints.chosen(str(tmp_path), None, 11)
    assert checkpoints.list_checkpoints(str(tmp_path / "nowhere"), None) == []


def test_a_prefix_in_a_folder_of_checkpoints_is_told_and_a_bucket_called_so_is_none(tmp_path: Path, s3: Any) -> None:
    save(tmp_path, 10)
    upload(tmp_path, s3, "one", "jobs/a")
    s3.create_bucket(Bucket="checkpoints")
    for inside in ("checkpoints/", "checkpoints/step-00000010"):
        with pytest.raises(
            InputError, match="lies in a folder of checkpoints; give the one that holds it: s3://one/jobs/a"
        ):
            checkpoints.list_checkpoints(f"s3://one/jobs/a/{inside}", s3)
    assert checkpoints.list_checkpoints("s3://checkpoints", s3) == []
    assert checkpoints.list_checkpoints("s3://one/checkpoints", s3) == []


def test_verify_reads_every_byte(tmp_path: Path, s3: Any) -> None:
    folder = save(tmp_path, 10)
    good = checkpoints.chosen(str(tmp_path), None, 10)
    assert checkpoints.verified(str(tmp_path), None, good).is_good
    flip(folder / "__1_0.distcp")
    altered = checkpoints.chosen(str(tmp_path), None, 10)
    assert altered.is_good, "sizes alone can't tell"
    for destination in (str(tmp_path), upload(tmp_path, s3, "one", "a")):
        told = checkpoints.verified(destination, s3, altered)
        assert told.problem == "__1_0.distcp is altered (its SHA-256 is not the manifest's)"


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_what_its_job_removes_meanwhile_is_not_broken(
    tmp_path: Path, s3: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    destination = str(tmp_path) if kind == "folder" else upload(tmp_path, s3, "one", "jobs/a")
    found = checkpoints.list_checkpoints(destination, s3)
    files = open_files(destination.rstrip("/"), s3)
    held = files.sizes("checkpoints/step-00000010")
    files.delete(held)
    told = checkpoints.verified(destination, s3, found[0])
    assert (told.committed, told.is_good) == (False, False) and told.problem.startswith("it was removed while")
    honest = type(files).sizes

    def sizes(self: Any, prefix: str) -> dict[str, int]:
        listed = honest(self, prefix)
        self.delete([name for name in listed if "step-00000020" in name])
        return listed

    monkeypatch.setattr(type(files), "sizes", sizes)
    listed = checkpoints.list_checkpoints(destination, s3)
    assert [(one.step, one.committed) for one in listed] == [(20, False), (30, True)]
    assert listed[0].problem == told.problem


def test_a_shard_that_is_gone_beside_its_marker_is_told(tmp_path: Path) -> None:
    shard = save(tmp_path, 10) / "__1_0.distcp"
    found = checkpoints.list_checkpoints(str(tmp_path), None)
    shard.unlink()
    with pytest.raises(JobFailedError, match=r"can't read .*__1_0\.distcp: No such file or directory"):
        checkpoints.verified(str(tmp_path), None, found[0])


def test_a_listing_survives_what_goes_between_its_look_and_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    honest = os.walk

    def walk(top: Path, **options: Any) -> Iterator[Any]:
        for at, folders, names in honest(top, **options):
            if at.endswith("step-00000010"):
                shutil.rmtree(at)
            yield at, folders, names

    monkeypatch.setattr(os, "walk", walk)
    assert steps(checkpoints.list_checkpoints(str(tmp_path), None)) == [20]
    monkeypatch.undo()
    (tmp_path / "file").touch()
    with pytest.raises(JobFailedError, match=r"can't list .*/file/checkpoints: Not a directory"):
        checkpoints.list_checkpoints(str(tmp_path / "file"), None)


@pytest.fixture
def refused(tmp_path: Path, s3: Any) -> str:
    """Steps 10, 20, 30 and 40 in a bucket; S3 refuses the manifests of 10 and 40, and a shard of 20."""
    for step in (10, 20, 30, 40):
        save(tmp_path / "whole", step)
    where = upload(tmp_path / "whole", s3, "one", "jobs/a")
    keys = ("step-00000010/manifest.json", "step-00000040/manifest.json", "step-00000020/__1_0.distcp")

    def refuse(params: dict[str, Any], **_: Any) -> None:
        if params["Key"].endswith(keys):
            answer = {"Error": {"Code": "AccessDenied", "Message": "kms:Decrypt"}}
            raise ClientError(answer, "GetObject")  # type: ignore[arg-type]

    s3.meta.events.register("before-parameter-build.s3.GetObject", refuse)
    return where


def test_what_s3_refuses_hides_nothing_else_and_is_never_removed(refused: str, s3: Any, tmp_path: Path) -> None:
    found = checkpoints.list_checkpoints(refused, s3)
    assert [(one.step, one.is_good, one.is_readable) for one in found] == [
        (10, False, False),
        (20, True, True),
        (30, True, True),
        (40, False, False),
    ]
    assert "step-00000040/manifest.json: AWS refused: AccessDenied: kms:Decrypt" in found[-1].problem
    with pytest.raises(AwsRefusedError, match=r"^2 of 4 checkpoints can't be read \(step 10, 40\): reading s3:"):
        checkpoints.refuse_unreadable(refused, found)
    read = checkpoints.looked_through(refused, s3, found[1])
    assert not read.is_readable and "__1_0.distcp: AWS refused" in read.problem
    # The newest may be the good one that was asked for; a step that is named and can be read is given.
    for step in (None, 10):
        with pytest.raises(AwsRefusedError, match="can't be read"):
            checkpoints.chosen(refused, s3, step)
    assert checkpoints.chosen(refused, s3, 30).is_good
    done = checkpoints.prune(refused, s3, rules=Retention(1, None, None), dry_run=False)
    assert (steps(done.removed), steps(done.kept)) == ([20], [10, 30, 40])
    assert steps(checkpoints.list_checkpoints(refused, s3)) == [10, 30, 40]


def test_a_copy_replaces_nothing_that_it_may_not_look_at(refused: str, s3: Any, tmp_path: Path) -> None:
    save(tmp_path / "another", 40)
    (asked,) = checkpoints.list_checkpoints(str(tmp_path / "another"), None)
    before = s3.list_objects_v2(Bucket="one")["KeyCount"]
    with pytest.raises(AwsRefusedError, match=r"1 of 1 checkpoint can't be read \(step 40\)"):
        checkpoints.copy(str(tmp_path / "another"), s3, [asked], refused)
    assert s3.list_objects_v2(Bucket="one")["KeyCount"] == before


def test_show_leaves_out_what_nobody_reads(tmp_path: Path) -> None:
    save(tmp_path, 10)
    details = checkpoints.chosen(str(tmp_path), None, None).details()
    assert details["extra"] == {"strategy": "ddp", "step": 10, "data": {"sequences_consumed": 80}}
    assert [shard["name"] for shard in details["shards"]] == ["__0_0.distcp", "__1_0.distcp", ".metadata"]


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_prune_keeps_the_newest_good_ones_and_saves_on_their_way(tmp_path: Path, s3: Any, kind: str) -> None:
    for step in (10, 20, 40, 50):
        save(tmp_path, step)
    save(tmp_path, 30, marker=False)
    save(tmp_path, 60, marker=False)  # a save on its way: newer than the newest good one
    destination = str(tmp_path) if kind == "folder" else upload(tmp_path, s3, "one", "jobs/a")
    planned = checkpoints.prune(destination, s3, rules=Retention(2), dry_run=True)
    assert (steps(planned.removed), steps(planned.kept)) == ([10, 20, 30], [40, 50, 60])
    assert len(checkpoints.list_checkpoints(destination, s3)) == 6
    checkpoints.prune(destination, s3, rules=Retention(2), dry_run=False)
    assert steps(checkpoints.list_checkpoints(destination, s3)) == [40, 50, 60]


def test_prune_keeps_what_the_jobs_rules_keep(tmp_path: Path) -> None:
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, None), (50, 4.0)):
        save(tmp_path, step, metrics={} if loss is None else {"validation_loss": loss})
    rules = Retention(1, keep_every_steps=30, keep_best=BestSpec())
    done = checkpoints.prune(str(tmp_path), None, rules=rules, dry_run=False)
    assert (steps(done.removed), steps(done.kept)) == ([10, 40], [20, 30, 50])


def test_prune_never_takes_the_only_good_one(tmp_path: Path) -> None:
    save(tmp_path, 10)
    flip(save(tmp_path, 20) / "__0_0.distcp")  # whole by its sizes, altered inside
    done = checkpoints.prune(str(tmp_path), None, rules=Retention(1), dry_run=False)
    assert (steps(done.removed), steps(done.kept)) == ([], [10, 20])
    flip(tmp_path / "checkpoints/step-00000010/__0_0.distcp")
    with pytest.raises(JobFailedError, match="not one of 2 checkpoints is whole, so nothing was removed"):
        checkpoints.prune(str(tmp_path), None, rules=Retention(1), dry_run=False)
    assert len(checkpoints.list_checkpoints(str(tmp_path), None)) == 2


def test_prune_leaves_what_a_steps_link_leads_to(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path / "mine", step)
    folder = tmp_path / "mine/checkpoints/step-00000010"
    shutil.move(folder, tmp_path / "kept")
    folder.symlink_to(tmp_path / "kept")
    (tmp_path / "mine/checkpoints/back").symlink_to(tmp_path / "mine")
    names = sorted(path.name for path in (tmp_path / "kept").iterdir())
    done = checkpoints.prune(str(tmp_path / "mine"), None, rules=Retention(1, None, None), dry_run=False)
    assert (steps(done.removed), steps(done.kept)) == ([10], [20])
    assert not folder.is_symlink() and sorted(path.name for path in (tmp_path / "kept").iterdir()) == names


def test_the_promise_is_removed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    removed: list[str] = []
    original = Path.unlink

    def unlink(self: Path, missing_ok: bool = False) -> None:
        removed.append(self.name)
        original(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    checkpoints.prune(str(tmp_path), None, rules=Retention(1), dry_run=False)
    assert removed[:2] == ["COMMITTED", "manifest.json"] and len(removed) == 5


@pytest.mark.parametrize(("source", "target"), [("folder", "folder"), ("folder", "s3"), ("s3", "folder"), ("s3", "s3")])
def test_copy_is_whole_or_not_there(tmp_path: Path, s3: Any, source: str, target: str) -> None:
    save(tmp_path / "a", 10)
    flip(save(tmp_path / "a", 20) / "__0_0.distcp")
    (tmp_path / "a/metrics.jsonl").write_text('{"step": 10}\n')
    origin = str(tmp_path / "a") if source == "folder" else upload(tmp_path / "a", s3, "one", "jobs/a")
    to = str(tmp_path / "b") if target == "folder" else "s3://two/kept/b"
    found = checkpoints.list_checkpoints(origin, s3)
    uris = checkpoints.copy(origin, s3, found[:1], to)
    assert uris == [f"{to}/checkpoints/step-00000010/"]
    there = checkpoints.chosen(to, s3, 10)
    assert checkpoints.verified(to, s3, there).is_good
    if target == "folder":
        assert (tmp_path / "b/metrics.jsonl").read_text() == '{"step": 10}\n'
    with pytest.raises(JobFailedError, match=r"checkpoint of step 20 is not copied: __0_0\.distcp is altered"):
        checkpoints.copy(origin, s3, found[1:], to)
    assert steps(checkpoints.list_checkpoints(to, s3)) == [10], "nothing is left of a copy that failed"
    with pytest.raises(InputError, match="is where the checkpoints are"):
        checkpoints.copy(origin, s3, found[:1], origin)


@pytest.mark.parametrize("error", [ResponseStreamingError, IncompleteReadError, urllib3.exceptions.SSLError])
def test_an_answer_that_breaks_off_is_read_on(s3: Any, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    """A copy of hours went again for one connection that was lost."""
    content = bytes(range(250)) * 4
    s3.put_object(Bucket="one", Key="a/shard", Body=content)
    errors = {"error": "reset", "actual_bytes": 1, "expected_bytes": 2}
    honest, most = s3.get_object, [2]
    asked: list[str] = []
    waited: list[float] = []

    class Body:
        def __init__(self, body: Any) -> None:
            self.body = body

        def iter_chunks(self, size: int) -> Iterator[bytes]:
            for number, block in enumerate(self.body.iter_chunks(size)):
                if number == most[0]:
                    raise error("reset") if error is urllib3.exceptions.SSLError else error(**errors)
                yield block

    def get_object(**request: Any) -> Any:
        asked.append(request.get("Range", ""))
        answer = honest(**request)
        return {**answer, "Body": Body(answer["Body"])}

    monkeypatch.setattr(s3, "get_object", get_object)
    monkeypatch.setattr(checkpoint_files, "_BLOCK_BYTES", 100)
    monkeypatch.setattr("trainyard.launch.checkpoint_files.time.sleep", waited.append)
    files = checkpoint_files.open_files("s3://one/a", s3)
    assert b"".join(files.blocks("shard")) == content
    assert asked == ["", *(f"bytes={start}-" for start in (200, 400, 600, 800))] and max(waited) == 1
    most[0] = 0
    with pytest.raises(AwsRefusedError, match=r"^reading s3://one/a/shard: "):
        list(files.blocks("shard"))
    assert asked[5:] == ["", *["bytes=0-"] * 5], "not for ever"
    most[0] = 1
    blocks = files.blocks("shard")
    next(blocks)
    s3.put_object(Bucket="one", Key="a/shard", Body=content[::-1])
    with pytest.raises(AwsRefusedError, match="PreconditionFailed"):
        next(blocks)


def test_a_copy_that_s3_refuses_in_the_middle_leaves_nothing(
    tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """boto3's transfers wrap a refusal in an error of their own."""
    save(tmp_path / "a", 10)
    denied = {"Error": {"Code": "AccessDenied", "Message": "no"}}
    honest = s3.upload_file

    def upload_file(name: str, *place: str) -> None:
        if name.endswith("__1_0.distcp"):
            try:
                raise ClientError(denied, "PutObject")
            except ClientError as error:
                raise S3UploadFailedError(f"Failed to upload {name}: {error}")  # noqa: B904  # as boto3 does
        honest(name, *place)

    monkeypatch.setattr(s3, "upload_file", upload_file)
    found = checkpoints.list_checkpoints(str(tmp_path / "a"), s3)
    with pytest.raises(AwsRefusedError, match="AWS refused: AccessDenied: no"):
        checkpoints.copy(str(tmp_path / "a"), s3, found, "s3://two/kept")
    assert "Contents" not in s3.list_objects_v2(Bucket="two")
    assert list((tmp_path / "state/copies").iterdir()) == []


LARGE = 20 << 20
"""Bytes: above what the SDK sends at once."""


def _large(root: Path, step: int) -> None:
    """A checkpoint whose first shard goes up in parts."""
    folder = save(root, step)
    content = bytes(LARGE)
    (folder / "__0_0.distcp").write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0] |= {"bytes": LARGE, "sha256": hashlib.sha256(content).hexdigest()}
    text = json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "COMMITTED").write_text(json.dumps({"manifest_sha256": digest}))


def _on_their_way(s3: Any) -> list[str]:
    return [one["UploadId"] for one in s3.list_multipart_uploads(Bucket="two").get("Uploads", ())]


def _killed(*_: object, **__: object) -> None:
    os._exit(137)


@pytest.fixture
def served_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As `s3`, for several processes."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    endpoint = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    urllib.request.urlopen(f"{endpoint}/moto-api/reset", b"").close()  # what another test of this process left
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    client = boto3.client("s3", region_name="us-east-1")
    for bucket in ("one", "two"):
        client.create_bucket(Bucket=bucket)
    yield client
    server.stop()


@pytest.mark.parametrize("source", ["folder", "s3"])
def test_what_a_killed_copy_had_on_its_way_is_given_up_by_the_next_and_nothing_of_others(
    tmp_path: Path, served_s3: Any, source: str
) -> None:
    _large(tmp_path / "a", 10)
    origin = str(tmp_path / "a") if source == "folder" else upload(tmp_path / "a", served_s3, "one", "jobs/a")
    to, said = "s3://two/kept", list[str]()
    found = checkpoints.list_checkpoints(origin, served_s3)
    others = [
        served_s3.create_multipart_upload(Bucket="two", Key=f"kept/checkpoints/step-00000010/{name}")["UploadId"]
        for name in ("__0_0.distcp", "another")
    ]

    def copy_and_die() -> None:
        client = boto3.client("s3", region_name="us-east-1")
        # As S3 answers where a bucket is named by an access point's alias, by which alone it may be asked.
        client.meta.events.register(
            "after-call.s3.CreateMultipartUpload", lambda parsed, **_: parsed.update(Bucket="b")
        )
        client.meta.events.register("before-call.s3.CompleteMultipartUpload", _killed)
        checkpoints.copy(origin, client, found, to)

    dies = multiprocessing.get_context("fork").Process(target=copy_and_die)
    dies.start()
    dies.join(60)
    assert dies.exitcode == 137 and len(_on_their_way(served_s3)) == 3
    elsewhere = checkpoints.copy(origin, served_s3, found, "s3://two/elsewhere", said.append)
    assert len(elsewhere) == 1 and said == [] and len(_on_their_way(served_s3)) == 3
    checkpoints.copy(origin, served_s3, found, to, said.append)
    assert said == [f"unfinished uploads of an earlier copy to {to} removed: 1"]
    assert sorted(_on_their_way(served_s3)) == sorted(others), "those may be of one that lives"
    assert list((tmp_path / "state/copies").iterdir()) == []
    there = checkpoints.chosen(to, served_s3, 10)
    assert checkpoints.verified(to, served_s3, there).is_good


def test_uploads_that_nobody_may_give_up_now_are_given_up_later(
    tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", 10)
    found = checkpoints.list_checkpoints(str(tmp_path / "a"), s3)
    upload_id = s3.create_multipart_upload(Bucket="two", Key="kept/x")["UploadId"]
    (tmp_path / "state/copies").mkdir(parents=True)
    name = hashlib.sha256(b"s3://two/kept").hexdigest()[:32]
    lines = [{"Bucket": "two", "Key": "kept/x", "UploadId": one} for one in (upload_id, "none")]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"Bucket": "tw'
    (tmp_path / f"state/copies/{name}.jsonl").write_text(text)
    honest = s3.abort_multipart_upload

    def refuse(**_: str) -> None:
        raise ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "AbortMultipartUpload")

    said = list[str]()
    monkeypatch.setattr(s3, "abort_multipart_upload", refuse)
    checkpoints.copy(str(tmp_path / "a"), s3, found, "s3://two/kept", said.append)
    assert said == [] and _on_their_way(s3) == [upload_id]
    noted = [json.loads(line) for line in (tmp_path / f"state/copies/{name}.jsonl").read_text().split("\n") if line]
    assert noted == lines, "half a line alone is forgotten"
    monkeypatch.setattr(s3, "abort_multipart_upload", honest)
    checkpoints.copy(str(tmp_path / "a"), s3, found, "s3://two/kept", said.append)
    assert said == ["unfinished uploads of an earlier copy to s3://two/kept removed: 1"] and _on_their_way(s3) == []
    assert list((tmp_path / "state/copies").iterdir()) == [], "also without the one that had come to its end"


def test_what_a_client_uploads_after_a_copy_is_noted_nowhere(tmp_path: Path, s3: Any) -> None:
    save(tmp_path / "a", 10)
    checkpoints.copy(str(tmp_path / "a"), s3, checkpoints.list_checkpoints(str(tmp_path / "a"), s3), "s3://two/kept")
    others = [(tmp_path / str(number)).open("w") for number in range(9)]  # one has the number that the journal had
    s3.create_multipart_upload(Bucket="one", Key="x")
    for file in others:
        file.close()
        assert Path(file.name).read_text() == ""


def test_a_note_that_found_no_room_costs_no_other(tmp_path: Path) -> None:
    upload = {"Bucket": "two", "Key": "kept/x", "UploadId": "1"}
    descriptor = os.open(tmp_path / "journal", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, b'{"Bucket": "tw')
    upload_journal._note(descriptor, upload)
    assert upload_journal._uploads(descriptor) == [upload]
    os.close(descriptor)


def test_of_two_copies_from_this_machine_to_one_prefix_the_second_is_refused(tmp_path: Path, s3: Any) -> None:
    save(tmp_path / "a", 10)
    found = checkpoints.list_checkpoints(str(tmp_path / "a"), s3)
    with (
        open_files("s3://two/kept", s3).claimed(),
        pytest.raises(InputError, match=r"^s3://two/kept: another `trainyard checkpoints copy` of this machine"),
    ):
        checkpoints.copy(str(tmp_path / "a"), s3, found, "s3://two/kept")
    checkpoints.copy(str(tmp_path / "a"), s3, found, "s3://two/kept")


def test_where_nothing_can_be_written_down_a_copy_goes_on(tmp_path: Path, s3: Any) -> None:
    (tmp_path / "state").write_text("")
    save(tmp_path / "a", 10)
    found = checkpoints.list_checkpoints(str(tmp_path / "a"), s3)
    assert len(checkpoints.copy(str(tmp_path / "a"), s3, found, "s3://two/kept")) == 1


def test_a_copy_that_finds_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a", 10)
    found = checkpoints.list_checkpoints(str(tmp_path / "a"), None)
    honest = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target.name == "manifest.json":  # after the shards
            raise OSError(errno.ENOSPC, "No space left on device")
        return honest(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(JobFailedError, match=r"can't write .*/manifest\.json: No space left on device"):
        checkpoints.copy(str(tmp_path / "a"), None, found, str(tmp_path / "b"))
    assert not (tmp_path / "b").exists(), "no empty folders either"
    monkeypatch.undo()
    (tmp_path / "b/checkpoints/step-00000010/COMMITTED").mkdir(parents=True)
    checkpoints.copy(str(tmp_path / "a"), None, found, str(tmp_path / "b"))
    assert checkpoints.chosen(str(tmp_path / "b"), None, None).step == 10, "an empty folder keeps no file out"


@pytest.mark.parametrize("change", [{"step": float("inf")}, {"world_size": float("inf")}, {"version": float("inf")}])
def test_odd_numbers_of_a_manifest_are_told(tmp_path: Path, change: dict[str, float]) -> None:
    folder = save(tmp_path, 10)
    content = json.dumps(json.loads((folder / "manifest.json").read_bytes()) | change).encode()
    (folder / "manifest.json").write_bytes(content)
    (folder / "COMMITTED").write_text(json.dumps({"manifest_sha256": hashlib.sha256(content).hexdigest()}))
    (found,) = checkpoints.list_checkpoints(str(tmp_path), None)
    assert found.problem.startswith("manifest.json can't be read (OverflowError: ")


@pytest.mark.parametrize(
    "odd", [{"metrics": -1}, {"metrics": "x"}, {"metrics": {"loss": 10**400}}, {"metrics": [1]}, {"job_sha256": []}]
)
def test_odd_values_beside_the_tensors_keep_no_other_from_what_is_done_with_it(
    tmp_path: Path, odd: dict[str, Any]
) -> None:
    for step in (10, 20, 30):
        manifest = save(tmp_path, step, metrics={"loss": 1.0 * step}, job="one") / "manifest.json"
        if step == 20:
            content = json.loads(manifest.read_bytes())
            content["extra"] |= odd
            manifest.write_text(json.dumps(content))
            digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
            manifest.with_name("COMMITTED").write_text(json.dumps({"manifest_sha256": digest}))
    found = checkpoints.list_checkpoints(str(tmp_path), None)
    done = checkpoints.prune(str(tmp_path), None, rules=Retention(1, None, BestSpec(metric="loss")), dry_run=True)
    assert steps(done.kept) == [10, 30]
    copied = tmp_path / "copy"
    assert len(checkpoints.copy(str(tmp_path), None, found[:1], str(copied))) == 1
    assert len(checkpoints.copy(str(tmp_path), None, found, str(copied))) == 3


def record(root: Path, steps: int, *, seconds: float) -> bytes:
    """A run's metrics: the seconds are its own."""
    rows = [{"step": step, "loss": 1 / step, "step_seconds": seconds + step} for step in range(1, steps + 1)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (root / "metrics.jsonl").write_bytes(content)
    return content


def files_below(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("told_by", ["rows", "job"])
def test_another_jobs_checkpoints_are_not_mixed_with_a_copy(tmp_path: Path, told_by: str) -> None:
    """`rows`: a run anew of the same job, or one that went on elsewhere from a copy."""
    here, there = tmp_path / "a", tmp_path / "b"
    save(here, 30, job="one")
    save(there, 10, job="one" if told_by == "rows" else "two")
    record(here, 30, seconds=1.0)
    record(there, 12 if told_by == "rows" else 5, seconds=2.0)
    before = files_below(there)
    found = checkpoints.list_checkpoints(str(here), None)
    with pytest.raises(
        InputError, match=r"b: holds what seem to be another job's checkpoints \(step 10\), which stay; give another"
    ):
        checkpoints.copy(str(here), None, found, str(there))
    assert files_below(there) == before


def test_a_copy_goes_on_with_its_own_run_and_never_back_in_its_records(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    save(here, 10, job="one")
    record(here, 12, seconds=1.0)
    checkpoints.copy(str(here), None, checkpoints.list_checkpoints(str(here), None), str(there))
    shutil.rmtree(here / "checkpoints")  # retention removed it, and the job is of another version since
    for step in (20, 30):
        save(here, step, job="two")
    newest = record(here, 31, seconds=1.0)
    older, old = checkpoints.list_checkpoints(str(here), None)
    checkpoints.copy(str(here), None, [old], str(there))
    assert (there / "metrics.jsonl").read_bytes() == newest
    shutil.rmtree(here / "checkpoints/step-00000030")
    record(here, 21, seconds=1.0)
    checkpoints.copy(str(here), None, [older], str(there))
    assert steps(checkpoints.list_checkpoints(str(there), None)) == [10, 20, 30]
    assert (there / "metrics.jsonl").read_bytes() == newest, "which those of step 30 go on from"


def test_nothing_is_copied_to_where_a_job_saves_now(tmp_path: Path) -> None:
    save(tmp_path / "a", 10)
    found = checkpoints.list_checkpoints(str(tmp_path / "a"), None)
    (tmp_path / "b").mkdir()
    claim = tmp_path / "b/.in_use"
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:  # a lock is its process's
        with claim.open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            file.write("acme-a-1 on algo-1, process 7, with its output in /home/acme/out\n")
            file.flush()
            os.write(theirs, b"1")
            signal.pause()
    try:
        assert os.read(ours, 1) == b"1"
        with pytest.raises(InputError, match="b: acme-a-1 on algo-1, process 7 saves there: wait for its end"):
            checkpoints.copy(str(tmp_path / "a"), None, found, str(tmp_path / "b"))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert [path.name for path in (tmp_path / "b").iterdir()] == [".in_use"]
    checkpoints.copy(str(tmp_path / "a"), None, found, str(tmp_path / "b"))


def once(action: Callable[[], object]) -> Callable[..., str]:
    """In the place of `sha256`: does that after the first shard was read back."""
    left = [action]

    def hashed(files: Files, name: str) -> str:
        digest = checkpoint_files.sha256(files, name)
        while left:
            left.pop()()
        return digest

    return hashed


def test_no_job_begins_to_save_where_a_copy_is_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a", 10)
    found = checkpoints.list_checkpoints(str(tmp_path / "a"), None)
    words = list[str]()

    def ask() -> None:
        ours, theirs = os.pipe()
        if (pid := os.fork()) == 0:  # a lock is its process's
            with suppress(InputError), open_files(str(tmp_path / "b"), None).claimed():
                os.write(theirs, b"free")
                os._exit(0)
            os.write(theirs, (tmp_path / "b/.in_use").read_bytes())
            os._exit(0)
        words.append(os.read(ours, 400).decode())
        os.waitpid(pid, 0)

    monkeypatch.setattr(checkpoints, "sha256", once(ask))
    checkpoints.copy(str(tmp_path / "a"), None, found, str(tmp_path / "b"))
    assert words == [f"`trainyard checkpoints copy` on {socket.gethostname()}, process {os.getpid()}\n"]
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["checkpoints"]
    ask()
    assert words[-1] == "free"


def write(s3: Any, root: str, name: str, content: bytes) -> None:
    """As somebody else would."""
    if root.startswith("s3://"):
        bucket, _, prefix = root.removeprefix("s3://").partition("/")
        s3.put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=content)
    else:
        path = Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@pytest.mark.parametrize("kind", ["folder", "s3"])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "checkpoints/step-00000005/__0_0.distcp",
        "checkpoints/step-00000010/__0_0.distcp",
        "checkpoints/step-00000010/COMMITTED",
        "attempts.json",
    ],
)
def test_a_copy_is_given_up_where_another_writer_appears(
    tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, is_late: bool
) -> None:
    """No bucket can say who saves there, nor a file system without locks. `is_late`: just before the marker."""

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(checkpoint_files.fcntl, "lockf", no_locks)
    save(tmp_path / "a", 10)
    record(tmp_path / "a", 12, seconds=1.0)
    to = str(tmp_path / "b") if kind == "folder" else "s3://two/kept"
    found = checkpoints.list_checkpoints(str(tmp_path / "a"), None)
    there = open_files(to, s3)
    marks, honest = list[str](), type(there).write_new

    def write_new(files: Any, marker: str, content: bytes) -> str | None:
        marks.append(marker)
        write(s3, to, name, b"theirs")
        return honest(files, marker, content)

    monkeypatch.setattr(type(there), "write_new", write_new)
    if not is_late:
        monkeypatch.setattr(checkpoints, "sha256", once(lambda: write(s3, to, name, b"theirs")))
    with pytest.raises(
        JobFailedError, match=rf"{name}: somebody else wrote it meanwhile.*give another prefix or folder"
    ):
        checkpoints.copy(str(tmp_path / "a"), s3, found, to)
    assert bool(marks) == is_late, "who comes before it is seen before it"
    assert there.read(name) == b"theirs" and set(there.sizes("checkpoints")) <= {name}, "what is theirs stays"
    assert there.read("metrics.jsonl") is None


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_of_two_markers_that_come_at_once_the_first_stays(tmp_path: Path, s3: Any, kind: str) -> None:
    files = open_files(str(tmp_path) if kind == "folder" else "s3://one/a", s3)
    assert files.write_new("x/COMMITTED", b"first")
    assert files.write_new("x/COMMITTED", b"second") is None
    assert files.read("x/COMMITTED") == b"first" and list(files.sizes("x")) == ["x/COMMITTED"]


def test_a_marker_whose_answer_was_lost_is_the_copys_own(
    tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK repeats the request, and then meets what it wrote itself."""
    honest = s3.put_object

    def twice(**asked: Any) -> Any:
        answer = honest(**asked)
        return honest(**asked) if "IfNoneMatch" in asked else answer

    save(tmp_path / "a", 10)
    found = checkpoints.list_checkpoints(str(tmp_path / "a"), None)
    monkeypatch.setattr(s3, "put_object", twice)
    checkpoints.copy(str(tmp_path / "a"), s3, found, "s3://two/kept")
    assert [one.is_good for one in checkpoints.list_checkpoints("s3://two/kept", s3)] == [True]


@pytest.mark.parametrize("all_of_it", [True, False])
def test_a_source_that_its_job_removes_meanwhile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_of_it: bool
) -> None:
    folder = save(tmp_path / "a", 10)
    found = checkpoints.list_checkpoints(str(tmp_path / "a"), None)
    remove = partial(shutil.rmtree, folder) if all_of_it else (folder / "COMMITTED").unlink
    monkeypatch.setattr(checkpoints, "sha256", once(remove))
    with pytest.raises(JobFailedError, match="step 10 is not copied: it was removed while it was looked at"):
        checkpoints.copy(str(tmp_path / "a"), None, found, str(tmp_path / "b"))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("name", ["__0_0.distcp", "manifest.json", "COMMITTED"])
def test_a_copy_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    honest, left = checkpoint_files._mark, [KeyboardInterrupt()]

    def interrupt(path: Path) -> str:
        if path.name == name and left:  # it is written
            raise left.pop()
        return honest(path)

    save(tmp_path / "a", 10)
    found = checkpoints.list_checkpoints(str(tmp_path / "a"), None)
    monkeypatch.setattr(checkpoint_files, "_mark", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.copy(str(tmp_path / "a"), None, found, str(tmp_path / "b"))
    assert not (tmp_path / "b").exists()


def test_a_step_that_lies_under_anothers_name_is_broken(tmp_path: Path) -> None:
    shutil.copytree(save(tmp_path, 10), tmp_path / "checkpoints/step-00000020")
    marker = save(tmp_path, 30) / "COMMITTED"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"step": 10}))
    found = checkpoints.list_checkpoints(str(tmp_path), None)
    assert [one.problem for one in found] == ["", "its manifest is of step 10", "its marker is of step 10"]
    assert checkpoints.chosen(str(tmp_path), None, None).step == 10


def test_a_manifest_that_names_files_elsewhere_is_not_copied(tmp_path: Path) -> None:
    """Its names would be written to outside of the target."""
    folder = save(tmp_path / "a", 10)
    (tmp_path / "a/elsewhere").write_bytes(b"x")
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["shards"].append({"name": "../../elsewhere", "bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()})
    content = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(content)
    (folder / "COMMITTED").write_text(json.dumps({"manifest_sha256": hashlib.sha256(content).hexdigest()}))
    (found,) = checkpoints.list_checkpoints(str(tmp_path / "a"), None)
    assert "'../../elsewhere' is no name of a file" in found.problem
    with pytest.raises(JobFailedError, match="is no name of a file"):
        checkpoints.copy(str(tmp_path / "a"), None, [found], str(tmp_path / "b"))
    assert not (tmp_path / "b/elsewhere").exists()


def test_a_copy_never_costs_a_good_one_at_its_target(tmp_path: Path) -> None:
    shard = save(tmp_path / "a", 10) / "__0_0.distcp"
    beside = ("metrics.jsonl", "attempts.json", "goodput.jsonl", "recovery.jsonl", "left_out_batches.jsonl")
    for name in beside:
        (tmp_path / "a" / name).write_text("{}\n")
    origin, to = str(tmp_path / "a"), str(tmp_path / "b")
    found = checkpoints.list_checkpoints(origin, None)
    checkpoints.copy(origin, None, found, to)
    assert all((tmp_path / "b" / name).is_file() for name in beside)
    copied = tmp_path / "b/checkpoints/step-00000010/__0_0.distcp"
    flip(copied)
    checkpoints.copy(origin, None, found, to)
    assert copied.read_bytes() == shard.read_bytes(), "one that is altered there is replaced"
    flip(shard)  # the source is altered now, by nobody's word
    checkpoints.copy(origin, None, found, to)
    assert checkpoints.verified(to, None, checkpoints.chosen(to, None, 10)).is_good
    (tmp_path / "b/checkpoints/step-00000010/COMMITTED").unlink()
    with pytest.raises(JobFailedError, match=r"step 10 is not copied: __0_0\.distcp is altered"):
        checkpoints.copy(origin, None, found, to)
    assert copied.is_file(), "nothing goes before the source was found whole"
    save(tmp_path / "c", 10, metrics={"validation_loss": 1.0})
    with pytest.raises(InputError, match="holds another checkpoint of step 10, which stays"):
        checkpoints.copy(origin, None, found, str(tmp_path / "c"))
    assert checkpoints.chosen(str(tmp_path / "c"), None, 10).is_good


def test_one_checkpoint_that_both_have_makes_two_places_one_runs(tmp_path: Path) -> None:
    """Steps that were replayed since, and a target that went on under another destination, are not another job's."""

    def saved(step: int, digest: str, job: str) -> SimpleNamespace:
        return SimpleNamespace(step=step, manifest_sha256=digest, extra={"job_sha256": job})

    def place(name: str, attempt: int, seconds: float) -> Files:
        (tmp_path / name).mkdir()
        row = {"step": 30, "attempt": attempt, "loss": 2.5, "step_seconds": seconds}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return open_files(str(tmp_path / name), None)

    here, there = place("a", 2, 0.5), place("b", 1, 0.4)
    refuse_anothers(here, there, [saved(20, "x", "j")], [saved(20, "x", "j"), saved(40, "y", "other")], "b")
    refuse_anothers(here, there, [saved(40, "z", "j")], [saved(30, "w", "j")], "b")
    same_attempt = place("c", 2, 0.4)
    with pytest.raises(InputError, match="seem to be another job's"):
        refuse_anothers(here, same_attempt, [saved(40, "z", "j")], [saved(30, "w", "j")], "c")


def test_a_job_in_another_layout_is_the_same_job_to_a_copy(tmp_path: Path) -> None:
    def saved(step: int, job: str, recipe: str) -> SimpleNamespace:
        extra = {"job_sha256": job, "recipe_sha256": recipe}
        return SimpleNamespace(step=step, manifest_sha256=f"m{step}", extra=extra)

    (tmp_path / "a").mkdir()
    files = open_files(str(tmp_path / "a"), None)  # no row tells
    refuse_anothers(files, files, [saved(40, "in one layout", "r")], [saved(20, "in another", "r")], "a")
    with pytest.raises(InputError, match="seem to be another job's"):
        refuse_anothers(files, files, [saved(40, "in one layout", "r")], [saved(20, "in another", "q")], "a")
