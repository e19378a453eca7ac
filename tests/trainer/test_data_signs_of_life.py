"""A rank that tokenizes, indexes, or waits for one that does, is alive; one that waits for a stuck one isn't."""

import functools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_data_webdataset import write_shard
from trainer import heartbeat
from trainer.data import readers, shared_work, stream, token_cache, token_units, webdataset
from trainer.data.shared_work import exclusive
from trainer.data.stream import SequenceTable
from trainer.data.token_cache import TokenCache, open_token_cache
from trainer.data.tokenizer import ByteTokenizer
from trainer.data.webdataset import ShardIndex

from trainyard.spec.job import DataSource


@pytest.fixture
def beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often this process has beaten."""
    monkeypatch.setenv(heartbeat.FILE_VARIABLE, str(tmp_path / "heart"))
    monkeypatch.setattr(heartbeat, "_heart", functools.cache(heartbeat._Heart))

    def counted() -> int:
        found = heartbeat.read_beat(tmp_path / "heart")
        return 0 if found is None else found.number

    return counted


@pytest.mark.parametrize("kind", ["jsonl", "text", "tokens", "prompts"])
def test_a_tokenization_shows_that_it_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beats: Callable[[], int], kind: str
) -> None:
    path = tmp_path / ("a.bin" if kind == "tokens" else "a")
    if kind == "tokens":
        path.write_bytes(np.arange(2000, dtype="<u2").tobytes())
    elif kind == "text":
        path.write_text("a line of text\n" * 100)
    else:
        path.write_text("".join(json.dumps({"p": "?" * 10, "text": "a" * 20}) + "\n" for _ in range(100)))
    options: dict[str, Any] = {"format": "jsonl", "prompt_field": "p"} if kind == "prompts" else {"format": kind}
    one = DataSource(path=str(path), **options)
    pieces: list[tuple[Any, str, int]] = [
        (readers, "TEXT_BLOCK_CHARACTERS", 100),
        (token_units, "_BATCH_CHARACTERS", 100),
        (token_units, "_COPY_TOKENS", 100),
        (token_cache, "_READ_TOKENS", 100),
    ]
    before = beats()
    open_token_cache([one], ByteTokenizer(), tmp_path / "large", vocab_is_open=True)
    at_once = beats() - before
    made = []
    for module, name, value in pieces:
        with monkeypatch.context() as patched:
            patched.setattr(module, name, value)
            before = beats()
            open_token_cache([one], ByteTokenizer(), tmp_path / name, vocab_is_open=True)
            made.append(beats() - before - at_once)
    blocks, batches, copies, reads = made
    assert reads > (30 if kind == "prompts" else 10)  # of the tokens, of what isn't learnt, and of the mask
    assert (copies if kind == "tokens" else batches if kind != "text" else reads) > 10
    assert blocks == 0  # many to a batch


def test_masks_are_looked_through_alive(monkeypatch: pytest.MonkeyPatch, beats: Callable[[], int]) -> None:
    monkeypatch.setattr(stream, "_TOKENS_AT_ONCE", 100)
    learnt = np.ones(5000, dtype=bool)
    cache = TokenCache(np.zeros(5000, dtype=np.uint16), np.asarray([5000]), "digest", None, 100, learnt)
    SequenceTable(cache, sequence_length=10, packing=True)
    assert beats() == 50


def test_an_index_of_shards_shows_that_it_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beats: Callable[[], int]
) -> None:
    (tmp_path / "data").mkdir()
    for shard in range(6):
        write_shard(tmp_path / "data" / f"{shard}.tar", [(f"{number}.cls", b"1") for number in range(20)])
    one = DataSource(path=str(tmp_path / "data"), format="webdataset")
    ShardIndex.open(one, tmp_path / "cache")
    assert beats() == 6
    monkeypatch.setattr(webdataset, "_MEMBERS_AT_ONCE", 5)
    ShardIndex.open(one, tmp_path / "other")
    assert beats() == 6 + 6 + 24


def test_who_waits_lives_as_long_as_the_work_gets_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, by, looks = tmp_path / "lock", [], []
    pause, enough = time.sleep, threading.Event()
    monkeypatch.setattr(shared_work, "beat", lambda: by.append(threading.get_ident()))
    monkeypatch.setattr(shared_work.time, "sleep", lambda _: looks.append(1) or pause(0.001))

    def wait() -> None:
        with exclusive(lock) as at_work:
            assert at_work is not None
            enough.set()

    def until(reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not reached():
            assert time.monotonic() < deadline
            pause(0.001)

    with exclusive(lock) as at_work:
        assert at_work is not None
        with exclusive(lock, wait=False) as other:
            assert other is None
        waiter = threading.Thread(target=wait)
        waiter.start()
        until(lambda: len(looks) > 5)
        assert by == [], "nothing has been done yet"
        for count in range(1, 4):
            pause(0.02)  # a file's time is as fine as the kernel's tick
            at_work()
            until(lambda count=count: len(by) >= 2 * count)  # type: ignore[misc]
        stuck, since = list(by), len(looks)
        until(lambda: len(looks) > since + 50)
        assert by == stuck and not enough.is_set(), "who waits for a stuck one is as silent"
    waiter.join(timeout=60)
    assert enough.is_set()
    assert {ident: by.count(ident) for ident in by} == {threading.get_ident(): 3, waiter.ident: 3}
