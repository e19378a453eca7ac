"""Data in S3, read where it lies: the same batches as from a copy, whatever fails on the way."""

import io
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import sleep as pause  # of tests: the readers' own is patched away
from typing import Any

import numpy as np
import pyarrow
import pytest
from botocore.exceptions import ResponseStreamingError
from pyarrow import parquet
from test_data import build, json_tokenizer, resolved, rows_of, source
from test_data_webdataset import shards
from trainer.data import BatchStream, JobData, TextData, s3_files, stream
from trainer.data.readers import files_of
from trainer.data.s3_files import PartCache, S3File
from trainer.data.streamed_tokens import open_streamed_tokens
from trainer.data.token_cache import open_token_cache
from trainer.data.token_units import Vocabulary
from trainer.data.tokenizer import ByteTokenizer
from trainer.data.webdataset import ShardIndex
from trainer.tasks import task_of
from trainer_testing.bucket import BUCKET, bucket_here, upload
from trainer_testing.image_shards import classified, image_job, write_shards

from trainyard.errors import InputError, JobFailedError
from trainyard.planner import resolve
from trainyard.spec.base import parse
from trainyard.spec.job import DataSource, JobSpec


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """An S3 on this machine, and a client for it."""
    with bucket_here() as client:
        yield client


class Flaky:
    """A client with which some ranges break off in the middle at first, then come short, and then are there."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._lock = threading.Lock()
        self.tries: Counter[tuple[str, str]] = Counter()
        self.failures_of_a_range = 2
        self.every_range = False

    @property
    def num_failed(self) -> int:
        """Reads that went wrong."""
        return sum(count - 1 for count in self.tries.values())

    def get_object(self, **request: Any) -> Any:
        answer = self._client.get_object(**request)
        with self._lock:
            self.tries[request["Key"], request["Range"]] += 1
            tries = self.tries[request["Key"], request["Range"]]
        fails = self.every_range or sum(request["Range"].encode()) % 3 == 0
        if fails and tries <= self.failures_of_a_range:
            answer["Body"] = _Breaking() if tries % 2 else io.BytesIO(answer["Body"].read()[:-1])
        return answer

    def get_paginator(self, name: str) -> Any:
        return self._client.get_paginator(name)


class _Breaking:
    def read(self) -> bytes:
        raise ResponseStreamingError(error="the connection was reset")


@pytest.fixture
def flaky(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Flaky:
    """Every reader gets this client, and no pause is made between tries."""
    client = Flaky(s3)
    monkeypatch.setattr(s3_files, "s3_client", lambda: client)
    monkeypatch.setattr(s3_files.time, "sleep", lambda _: None)
    monkeypatch.setattr(s3_files, "AT_RANDOM_BYTES", 256)
    monkeypatch.setattr(s3_files, "FRONT_TO_BACK_BYTES", 700)
    return client


def token_shards(folder: Path) -> Path:
    """Three shards of ids, of both kinds and different lengths."""
    folder.mkdir()
    draw = np.random.default_rng(3)
    np.save(folder / "a.npy", draw.integers(0, 256, 300, dtype=np.int64))
    (folder / "b.bin").write_bytes(draw.integers(0, 256, 133).astype("<u2").tobytes())
    np.save(folder / "c.npy", draw.integers(0, 256, 212, dtype=np.uint16))
    return folder


def steps_of(data: JobData, count: int) -> list[list[tuple[int, ...]]]:
    """All sequences of some steps."""
    return [[row for batch in data.train.next_step() for row in rows_of(batch.input_ids)] for _ in range(count)]


@pytest.mark.parametrize(("shuffle", "packing", "ranks"), [(True, True, 1), (False, True, 2), (True, False, 2)])
def test_streamed_tokens_give_the_batches_of_a_copy_bit_by_bit(
    s3: Any, flaky: Flaky, tmp_path: Path, shuffle: bool, packing: bool, ranks: int
) -> None:
    local = token_shards(tmp_path / "tokens")
    uri = upload(s3, local, tmp_path.name)
    settings = {"shuffle": shuffle, "packing": packing, "tokenizer": str(json_tokenizer(tmp_path / "tokenizer"))}
    copied = resolved({"train": [source(local, "tokens")], **settings}, ranks=ranks)
    # A cache of 4 parts: almost everything that is read has had to make room for something else.
    train = [{"path": uri, "format": "tokens"}]
    streamed = resolved({"train": train, "streaming": True, "stream_cache_gib": 1e-9, **settings}, ranks=ranks)
    for rank in range(ranks):
        expected, found = build(copied, tmp_path, rank, ranks), build(streamed, tmp_path, rank, ranks)
        # More than an epoch, with a resume in it.
        assert steps_of(found, 6) == steps_of(expected, 6)
        resumed = build(streamed, tmp_path, rank, ranks)
        resumed.train.load_state_dict(json.loads(json.dumps(found.train.state_dict())))
        assert found.train.state_dict()["sequences_consumed"] == 48
        assert steps_of(resumed, 6) == steps_of(expected, 6)
        found.close()
        resumed.close()
    assert flaky.num_failed >= 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("s3-parts")]
    assert "unigram_entropy_nats" in found.describe()


@pytest.mark.usefixtures("flaky")
def test_without_a_tokenizer_the_models_own_vocabulary_is_that_of_streamed_tokens(s3: Any, tmp_path: Path) -> None:
    train = [{"path": upload(s3, token_shards(tmp_path / "tokens"), tmp_path.name), "format": "tokens"}]

    def data_of(vocab_size: int, *, is_stored: bool = False) -> JobData:
        job = resolved({"train": train, "streaming": True})
        config: dict[str, Any] = {"model_type": "llama", "vocab_size": vocab_size}
        (tmp_path / "config.json").write_text(json.dumps(config))
        origin = {"source": str(tmp_path), "config": None} if is_stored else {"config": config}
        model = job.spec.model.model_copy(update=origin)
        return build(job.model_copy(update={"spec": job.spec.model_copy(update={"model": model})}), tmp_path)

    data = data_of(256)
    assert isinstance(data, TextData) and data.vocab_size == 256
    assert steps_of(data, 1)[0]
    data.close()
    stored = data_of(256, is_stored=True)
    assert isinstance(stored, TextData) and stored.vocab_size == 256
    stored.close()
    data = data_of(200)
    with pytest.raises(InputError, match=r"holds id 2\d\d, the vocabulary's ids are 0 to 199"):
        steps_of(data, 8)
    data.close()


def test_what_is_read_next_is_there_and_a_second_epoch_costs_nothing(s3: Any, flaky: Flaky, tmp_path: Path) -> None:
    flaky.failures_of_a_range = 0
    uri = upload(s3, token_shards(tmp_path / "tokens"), tmp_path.name)
    files = files_of(DataSource(path=uri, format="tokens"), streaming=True)
    assert [(file.where, file.size) for file in files] == [
        (f"{uri}/{path.name}", path.stat().st_size) for path in sorted((tmp_path / "tokens").iterdir())
    ]
    first = files[0]
    assert isinstance(first, S3File)
    parts = PartCache(tmp_path / "parts", max_bytes=1 << 20)
    parts.will_read(first, 100, 1000)
    parts._threads.shutdown(wait=True)  # what was announced arrives; nothing more can be fetched
    content = (tmp_path / "tokens" / "a.npy").read_bytes()
    assert parts.read(first, 100, 1000) == content[100:1100]
    assert parts.read(first, 130, 5) == content[130:135]
    assert parts.num_fetched == flaky.tries.total() == -(-1100 // 256)
    assert not list((tmp_path / "parts").iterdir()), "the cache has no name, so that nothing stays behind"
    parts.close()


def _wait_until_idle(parts: PartCache) -> None:
    deadline = time.monotonic() + 120
    while parts._under_way or parts._wanted:
        assert time.monotonic() < deadline
        pause(0.002)


def test_steps_of_more_parts_than_are_fetched_at_once_are_there_when_they_are_wanted(
    s3: Any, flaky: Flaky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flaky.failures_of_a_range = 0
    monkeypatch.setattr(s3_files, "_MOST_UNDER_WAY", 2)
    draw = np.random.default_rng(5)
    (tmp_path / "a.bin").write_bytes(draw.integers(0, 256, 40_000).astype("<u2").tobytes())
    s3.upload_file(str(tmp_path / "a.bin"), BUCKET, f"{tmp_path.name}.bin")
    train = [{"path": f"s3://{BUCKET}/{tmp_path.name}.bin", "format": "tokens"}]
    settings = {"tokenizer": str(json_tokenizer(tmp_path / "tokenizer"))}
    expected = build(resolved({"train": [source(tmp_path / "a.bin", "tokens")], **settings}), tmp_path)
    data = build(resolved({"train": train, "streaming": True, **settings}), tmp_path)
    parts = data.train._table._tokens._parts  # type: ignore[union-attr]
    assert steps_of(data, 1) == steps_of(expected, 1)
    _wait_until_idle(parts)
    monkeypatch.setattr(BatchStream, "_announce", lambda _: None)
    fetched = flaky.tries.total()
    assert fetched > 20
    assert steps_of(data, stream.STEPS_AHEAD) == steps_of(expected, stream.STEPS_AHEAD)
    assert flaky.tries.total() == fetched
    data.close()


def test_a_small_cache_is_not_filled_beyond_what_is_read_next(s3: Any, flaky: Flaky, tmp_path: Path) -> None:
    flaky.failures_of_a_range = 0
    uri = upload(s3, token_shards(tmp_path / "tokens"), tmp_path.name)
    first = files_of(DataSource(path=uri, format="tokens"), streaming=True)[0]
    assert isinstance(first, S3File)
    content = (tmp_path / "tokens" / "a.npy").read_bytes()
    parts = PartCache(tmp_path / "parts", max_bytes=6 * 256)
    num_parts = -(-len(content) // 256)
    assert num_parts > 9
    parts.will_read(first, 0, len(content))
    for part in range(num_parts):
        deadline = time.monotonic() + 120
        while parts._under_way and time.monotonic() < deadline:  # each has come when it is read
            pause(0.002)
        assert parts.num_fetched == min(num_parts, part + 3)
        assert parts.read(first, 256 * part, min(256, len(content) - 256 * part))
    parts.close()
    assert flaky.tries.total() == num_parts


def test_of_a_file_of_ids_its_header_alone_is_read(
    s3: Any, flaky: Flaky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flaky.failures_of_a_range = 0
    (tmp_path / "tokens").mkdir()
    for name in "ab":
        np.save(tmp_path / "tokens" / f"{name}.npy", np.zeros(30_000, dtype=np.uint16))
    uri = upload(s3, tmp_path / "tokens", tmp_path.name)
    vocabulary = Vocabulary(257, is_open=False)
    sources = [DataSource(path=uri, format="tokens")]
    cache = open_streamed_tokens(sources, vocabulary, tmp_path / "cache", cache_bytes=1 << 20)
    assert len(cache.tokens) == 60_000
    assert sorted(range_ for _, range_ in flaky.tries) == ["bytes=0-16383"] * 2
    # Who reads on from the beginning is read ahead for, but not before.
    monkeypatch.setattr(s3_files, "FRONT_TO_BACK_BYTES", 5000)
    with s3_files._FrontToBack(files_of(sources[0], streaming=True)[0]) as file:  # type: ignore[arg-type]
        file.read(10)
        assert list(file._parts) == [0]
        assert len(file.read()) == 60_118
        assert max(file._parts) == 60_128 // 5000
    cache.tokens.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("written", [OSError(28, "No space left on device"), 100])
def test_a_full_disk_keeps_less_and_mixes_up_nothing(
    s3: Any, flaky: Flaky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: OSError | int
) -> None:
    flaky.failures_of_a_range = 0
    uri = upload(s3, token_shards(tmp_path / "tokens"), tmp_path.name)
    first = files_of(DataSource(path=uri, format="tokens"), streaming=True)[0]
    assert isinstance(first, S3File)
    content = (tmp_path / "tokens" / "a.npy").read_bytes()
    parts = PartCache(tmp_path / "parts", max_bytes=1)  # four parts of 256 bytes
    real, number = os.pwrite, iter(range(1000))

    def write(disk: int, data: bytes, offset: int) -> int:
        if next(number) % 3 == 1:  # the second, the fifth, ...: also while one makes room for another
            if isinstance(written, OSError):
                raise written
            return real(disk, data[:written], offset)
        return real(disk, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    num_parts = -(-len(content) // 256)
    assert num_parts > 5, "more than there is room for"
    for latest in range(3 * num_parts):
        for part in (latest, latest - 1, latest - 2, latest - 1):  # those that may be there still, too
            begin = part % num_parts * 256
            wanted = content[begin : begin + 256]  # of the last part, as much as the file has
            assert parts.read(first, begin, len(wanted)) == wanted
    assert parts.num_fetched < 4 * 3 * num_parts, "what was written whole is kept"
    parts.close()


def test_other_formats_are_tokenized_from_where_they_lie(s3: Any, flaky: Flaky, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    texts = [f"text {number} " + "ü" * (number % 9) for number in range(30)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    parquet.write_table(pyarrow.table({"text": texts}), folder / "b.parquet", row_group_size=7)
    (folder / "c.bin").write_bytes(np.arange(200, dtype="<u2").tobytes())
    uri = upload(s3, folder, tmp_path.name)
    for name, kind in (("a.jsonl", "jsonl"), ("b.parquet", "parquet"), ("a.jsonl", "text"), ("c.bin", "tokens")):
        local, remote = (
            open_token_cache(
                [DataSource(path=f"{root}/{name}", format=kind)],  # type: ignore[arg-type]
                ByteTokenizer(),
                tmp_path / "cache",
                streaming=True,
            )
            for root in (folder, uri)
        )
        assert remote.digest == local.digest, name
    assert flaky.num_failed >= 4


def test_samples_of_shards_are_read_where_they_lie(s3: Any, flaky: Flaky, tmp_path: Path) -> None:
    local = shards(tmp_path / "shards")
    remote = DataSource(path=upload(s3, tmp_path / "shards", tmp_path.name), format="webdataset")
    parts = PartCache(tmp_path / "parts", max_bytes=1)
    ours = ShardIndex.open(local, tmp_path / "cache")
    theirs = ShardIndex.open(remote, tmp_path / "cache", parts=parts)
    assert len(theirs) == len(ours) == 6 and theirs.digest == ours.digest
    for number in (5, 0, 3, 4, 1, 2):
        theirs.will_read((number + 1) % 6)
        assert theirs.read_sample(number) == ours.read_sample(number)
    assert theirs.place(3).startswith(f"{remote.path}/train-00001.tar: class/")
    parts.close()
    assert flaky.num_failed >= 4


def test_pictures_in_s3_are_trained_on_as_from_a_copy(
    s3: Any, flaky: Flaky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_files, "AT_RANDOM_BYTES", 1500)
    monkeypatch.setattr(s3_files, "FRONT_TO_BACK_BYTES", 8000)
    folder = write_shards(tmp_path / "pictures", classified(12, seed=1), shard_size=5)
    uri = upload(s3, folder, tmp_path.name)
    read = []
    for path, streaming in ((str(folder), False), (uri, True)):
        own = {"path": path, "format": "webdataset"}
        named = own | {"name": "seen", "batches": 1, "every_steps": 2}
        settings = {"train": [own], "validation": [own, named], "streaming": streaming, "stream_cache_gib": 1e-9}
        job = resolve(parse(JobSpec, image_job(tmp_path, data=settings), "job"), world_size=1)
        data = task_of(job).build_data(
            job, data_parallel_rank=0, data_parallel_size=1, cache_dir=tmp_path / f"cache-{streaming}"
        )
        assert data.validation is not None
        (seen,) = data.named_validation
        assert (seen.name, seen.every_steps, seen.stream.num_steps) == ("seen", 2, 1)
        batches = [batch for _ in range(2) for batch in data.train.next_step()]
        batches += [batch for stream in (data.validation, seen.stream) for step in stream for batch in step]
        read.append([(batch.pixels.values.numpy().tobytes(), batch.labels.tolist()) for batch in batches])
        data.close()
    assert read[0] == read[1]
    assert flaky.num_failed >= 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("s3-parts")]


def test_a_changed_or_lost_object_is_told_in_one_line(s3: Any, flaky: Flaky, tmp_path: Path) -> None:
    flaky.failures_of_a_range = 0
    uri = upload(s3, token_shards(tmp_path / "tokens"), tmp_path.name)
    first, second, _ = files_of(DataSource(path=uri, format="tokens"), streaming=True)
    assert isinstance(first, S3File) and isinstance(second, S3File)
    s3.put_object(Bucket=BUCKET, Key=first.key, Body=b"x" * first.size)
    with pytest.raises(InputError, match=r"a.npy: changed since the job began"):
        first.read(0, 10)
    s3.delete_object(Bucket=BUCKET, Key=second.key)
    with pytest.raises(InputError, match=r"b.bin: no such object; it was there when the job began"):
        second.read(0, 10)


def test_a_read_that_never_works_ends_the_job_and_says_how_often_it_was_tried(
    s3: Any, flaky: Flaky, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = upload(s3, token_shards(tmp_path / "tokens"), tmp_path.name)
    (first, *_) = files_of(DataSource(path=uri, format="tokens"), streaming=True)
    assert isinstance(first, S3File)
    flaky.every_range, flaky.failures_of_a_range = True, 99
    with pytest.raises(JobFailedError, match=r"of s3://.*a.npy: 9 bytes came; tried 6 times; start the job again"):
        first.read(0, 10)
    assert len(capsys.readouterr().out.splitlines()) == 5


@pytest.mark.usefixtures("flaky")
def test_packed_objects_that_are_not_read_are_said(s3: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl.zst", "README.md"):
        (folder / name).write_text('{"text": "abc"}')
    uri = upload(s3, folder, "mixed")
    assert [file.where for file in s3_files.list_s3(DataSource(path=uri, format="jsonl"))] == [f"{uri}/a.jsonl"]
    assert f"warning: data path {uri}: without b.jsonl.zst (packed in a way that" in capsys.readouterr().out
    s3_files.list_s3(DataSource(path=f"{uri}/a.jsonl", format="jsonl"))
    assert capsys.readouterr().out == ""


def test_what_streaming_cannot_do_is_refused(s3: Any, tmp_path: Path) -> None:
    uri = upload(s3, token_shards(tmp_path / "tokens"), tmp_path.name)
    tokens = {"path": uri, "format": "tokens"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"train": [tokens]}, "or read them from S3 with data.streaming: true"),
        ({"train": [{"path": f"{uri}/nothing", "format": "jsonl"}], "streaming": True}, "no file that ends in .jsonl"),
        ({"train": [{"path": "s3://nowhere/x", "format": "jsonl"}], "streaming": True}, "NoSuchBucket"),
        ({"train": [{"path": "s3://nowhere", "format": "jsonl"}], "streaming": True}, "must be s3://BUCKET/PATH"),
    ]
    for data, message in cases:
        with pytest.raises(InputError, match=message) as caught:
            build(resolved(data), tmp_path)
        assert "\n" not in str(caught.value)
