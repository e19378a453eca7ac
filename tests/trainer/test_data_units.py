"""Large corpora: cut into units, tokenized by many processes, resumable after a kill; broken records up to a limit."""

import gzip
import json
import multiprocessing
import os
import resource
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from test_data import build, resolved, source
from trainer.checkpoint.destination import DestinationError, MissingFileError
from trainer.data import readers, token_cache, token_units
from trainer.data.bad_records import BadRecords
from trainer.data.documents import encoder_of
from trainer.data.readers import units_of
from trainer.data.shared_units import SharedUnits
from trainer.data.token_cache import TokenCache, open_token_cache
from trainer.data.token_units import Vocabulary, write_unit
from trainer.data.tokenizer import ByteTokenizer

from trainyard.errors import InputError
from trainyard.spec.job import DataSource


def corpus(folder: Path, num_lines: int = 400) -> Path:
    """Lines of different lengths, with blank ones, over three files, one of them packed."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"text": f"{number} " + "ü" * (number * 7 % 50)}) for number in range(num_lines)]
    lines[5] = lines[50] = ""
    third = num_lines // 3
    (folder / "a.jsonl").write_text("\n".join(lines[:third]) + "\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[third : 2 * third]).encode()))
    (folder / "c.jsonl").write_text("\n".join(lines[2 * third :]))
    return folder


def opened(path: Path, cache: Path, **options: Any) -> TokenCache:
    """The corpus's tokens."""
    return open_token_cache([DataSource(path=str(path), format="jsonl")], ByteTokenizer(), cache, **options)


@pytest.mark.parametrize("unit_bytes", [60, 1000])
def test_units_of_any_size_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit_bytes: int
) -> None:
    path = corpus(tmp_path / "data", num_lines=60)
    whole = opened(path, tmp_path / "whole")
    monkeypatch.setattr(readers, "UNIT_BYTES", unit_bytes)
    cut = opened(path, tmp_path / "cut")
    assert len(units_of(DataSource(path=str(path), format="jsonl"))) > 3
    assert cut.tokens[:].tolist() == whole.tokens[:].tolist()
    assert np.array_equal(cut.document_ends, whole.document_ends)
    assert (cut.digest, cut.unigram_entropy_nats) == (whole.digest, whole.unigram_entropy_nats)
    for begin, end in ((0, 1), (10, 700), (699, 701), (len(cut.tokens) - 3, len(cut.tokens)), (5, 5)):
        assert cut.tokens[begin:end].tolist() == whole.tokens[:].tolist()[begin:end]


def test_masks_of_units_are_put_together_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"p": "p" * (n * 5 % 13), "text": "a" * (n % 7 + 1)}) + "\n" for n in range(60)))
    options = {"format": "jsonl", "prompt_field": "p"}
    whole = open_token_cache([DataSource(path=str(path), **options)], ByteTokenizer(), tmp_path / "whole")
    monkeypatch.setattr(readers, "UNIT_BYTES", 100)
    cut = open_token_cache([DataSource(path=str(path), **options)], ByteTokenizer(), tmp_path / "cut")
    assert whole.learnt is not None and cut.learnt is not None and cut.digest == whole.digest
    assert cut.learnt[0 : len(cut.tokens)].tolist() == whole.learnt[0 : len(whole.tokens)].tolist()
    expected = [token != ord("p") for token in whole.tokens[:].tolist()]
    for begin in range(0, 120, 7):
        assert cut.learnt[begin : begin + 33].tolist() == expected[begin : begin + 33]


def test_parquet_is_cut_at_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"text {number}" for number in range(100)] + [""]
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=10)
    one = DataSource(path=str(path), format="parquet")
    whole = open_token_cache([one], ByteTokenizer(), tmp_path / "whole")
    monkeypatch.setattr(readers, "UNIT_BYTES", 200)
    units = units_of(one)
    assert len(units) > 3
    assert units[1].place(2) == f"{path}: row {units[1].begin * 10 + 3}"
    assert open_token_cache([one], ByteTokenizer(), tmp_path / "cut").digest == whole.digest


def test_more_units_than_a_process_may_open_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(200):
        row = {"p": "p" * (number % 3), "text": str(number)}
        (tmp_path / "data" / f"{number:04}.jsonl").write_text(json.dumps(row))
    one = DataSource(path=str(tmp_path / "data"), format="jsonl", prompt_field="p")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = len(list(Path("/proc/self/fd").iterdir())) + 2 * token_cache._MOST_MAPPED + 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        for _ in range(2):  # made, then found
            cache = open_token_cache([one], ByteTokenizer(), tmp_path / "cache")
            assert len(cache.document_ends) == 200 and cache.learnt is not None
            begins = [0, *cache.document_ends[:-1].tolist()]
            for number in (*range(200), 3, 150, 199):  # in order, and at random
                stretch = slice(begins[number], int(cache.document_ends[number]))
                answer = [*str(number).encode(), 256]
                assert cache.tokens[stretch].tolist() == [ord("p")] * (number % 3) + answer
                assert cache.learnt[stretch].tolist() == [False] * (number % 3) + [True] * len(answer)
            assert cache.tokens[0 : len(cache.tokens)].tolist() == np.asarray(cache.tokens).tolist()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# ---------------------------------------------------------------- many processes, kills, changes


class _Noting(ByteTokenizer):
    """Writes down which process tokenized what; each waits at its first unit until `meeting` are at theirs."""

    def __init__(self, folder: Path, meeting: Any) -> None:
        self._folder = folder
        self._meeting = meeting

    def encode_batch(self, texts: Any) -> Any:
        with (self._folder / f"{os.getpid()}.notes").open("a") as file:
            file.write(f"{texts[0]}\n")
        if self._meeting is not None:
            self._meeting.wait(timeout=120)
            self._meeting = None
        elif len(self._notes()) == 4 and (self._folder / "hold").exists():
            time.sleep(600)
        return super().encode_batch(texts)

    def _notes(self) -> list[str]:
        return (self._folder / f"{os.getpid()}.notes").read_text().splitlines()


def _open_noting(path: Path, cache: Path, folder: Path, meeting: Any) -> None:
    found = open_token_cache([DataSource(path=str(path), format="jsonl")], _Noting(folder, meeting), cache)
    (folder / f"{os.getpid()}.digest").write_text(found.digest)


def test_processes_share_the_units_and_a_killed_one_loses_only_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, notes, cache = corpus(tmp_path / "data", num_lines=120), tmp_path / "notes", tmp_path / "cache"
    notes.mkdir()
    expected = opened(path, tmp_path / "alone").digest
    monkeypatch.setattr(readers, "UNIT_BYTES", 1000)
    num_units = len(units_of(DataSource(path=str(path), format="jsonl")))
    fork = multiprocessing.get_context("fork")
    (notes / "hold").touch()
    killed = fork.Process(target=_open_noting, args=(path, cache, notes, None))
    killed.start()
    deadline = time.monotonic() + 120
    while not (notes / f"{killed.pid}.notes").exists() or len(_notes_of(notes, [killed])) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.kill()
    killed.join()
    assert len(list(cache.glob("units/*.json"))) == 3 < num_units - 2
    (notes / "hold").unlink()

    meeting = fork.Barrier(2)
    workers = [fork.Process(target=_open_noting, args=(path, cache, notes, meeting)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=240)
        assert worker.exitcode == 0
    assert {(notes / f"{worker.pid}.digest").read_text() for worker in workers} == {expected}
    before, made = _notes_of(notes, [killed]), _notes_of(notes, workers)
    assert len(made) == len(set(made)), "a unit was tokenized twice"
    # What the killed one had finished is taken; the fourth it was at.
    assert set(before) & set(made) == {before[3]}
    assert len(set(before) | set(made)) == num_units
    assert not list(cache.glob("*.partial"))


def _notes_of(folder: Path, processes: list[Any]) -> list[str]:
    """The first text of every unit that these processes have begun."""
    return [line for process in processes for line in (folder / f"{process.pid}.notes").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["text", "prompts"])
def test_hosts_find_each_others_units_beside_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number}", "p": "?" * (number % 5)}) + "\n" for number in range(60)))
    one = DataSource(path=str(path), format="jsonl", **({} if kind == "text" else {"prompt_field": "p"}))
    monkeypatch.setattr(readers, "UNIT_BYTES", 200)
    num_units = len(units_of(one))
    write_unit = token_cache.write_unit
    made: list[int] = []

    def noting(folder: Path, key: str, unit: Any, *more: Any) -> Any:
        made.append(unit.begin)
        if len(made) == 4 and killed:
            raise KeyboardInterrupt
        return write_unit(folder, key, unit, *more)

    monkeypatch.setattr(token_cache, "write_unit", noting)
    shared, killed = SharedUnits(str(tmp_path / "destination")), True
    # Of two hosts the second begins in the middle; it is killed at its fourth unit, and its disk is gone.
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(KeyboardInterrupt):
        open_token_cache([one], ByteTokenizer(), tmp_path / "lost", shared=shared)
    assert made[0] == units_of(one)[num_units // 2].begin
    killed, by_the_lost = False, made[:3]
    monkeypatch.setenv("RANK", "0")
    made.clear()
    first = open_token_cache([one], ByteTokenizer(), tmp_path / "first", shared=shared)
    assert len(made) == num_units - 3 and not set(made) & set(by_the_lost)
    made.clear()
    second = open_token_cache([one], ByteTokenizer(), tmp_path / "second", shared=shared)
    assert made == []
    alone = open_token_cache([one], ByteTokenizer(), tmp_path / "alone")
    assert first.digest == second.digest == alone.digest
    assert (alone.learnt is None) == (kind == "text")
    # What was put there half is made anew.
    for name in (tmp_path / "destination" / "tokens").glob("*.tokens"):
        name.write_bytes(b"x")
    made.clear()
    assert open_token_cache([one], ByteTokenizer(), tmp_path / "third", shared=shared).digest == alone.digest
    assert len(made) == num_units


class _RefusingWhatIsMissing(SharedUnits):
    """S3 to a job's own role, which may list below its prefix alone: a read of what isn't there is a 403."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        for name in ("get_bytes", "get_file"):
            setattr(self._destination, name, self._refusing(getattr(self._destination, name)))

    @staticmethod
    def _refusing(read: Any) -> Any:
        def refused(*given: Any) -> Any:
            try:
                return read(*given)
            except MissingFileError:
                raise DestinationError(f"can't read {given[0]}: AccessDenied", permanent=True) from None

        return refused


@pytest.mark.parametrize("kind", ["text", "prompts"])
def test_a_role_that_is_not_told_what_is_missing_shares_units_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number}", "p": "?" * (number % 5)}) + "\n" for number in range(60)))
    one = DataSource(path=str(path), format="jsonl", **({} if kind == "text" else {"prompt_field": "p"}))
    shared = _RefusingWhatIsMissing(str(tmp_path / "destination"))
    first = open_token_cache([one], ByteTokenizer(), tmp_path / "first", shared=shared)
    monkeypatch.setattr(token_cache, "write_unit", None)
    assert open_token_cache([one], ByteTokenizer(), tmp_path / "second", shared=shared).digest == first.digest
    assert capsys.readouterr().out == ""


def test_a_destination_that_takes_nothing_only_costs_the_sharing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    path = corpus(tmp_path / "data")
    cache = opened(path, tmp_path / "cache", shared=SharedUnits(str(tmp_path / "file")))
    assert cache.digest == opened(path, tmp_path / "alone").digest
    assert "stay on this host" in capsys.readouterr().out


def test_a_changed_file_is_noticed_and_only_it_is_tokenized_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = corpus(tmp_path / "data")
    first = opened(path, tmp_path / "cache")
    again: list[Any] = []
    write_unit = token_cache.write_unit
    monkeypatch.setattr(token_cache, "write_unit", lambda *given: again.append(given[2]) or write_unit(*given))
    (path / "c.jsonl").write_text((path / "c.jsonl").read_text() + '\n{"text": "more"}')
    changed = opened(path, tmp_path / "cache")
    assert [unit.file.where for unit in again] == [str(path / "c.jsonl")]
    assert changed.digest != first.digest and len(changed.tokens) == len(first.tokens) + 5


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = corpus(tmp_path / "data")
    encode = ByteTokenizer.encode_batch

    def meanwhile(self: ByteTokenizer, texts: Any) -> Any:
        with (path / "a.jsonl").open("a") as file:
            file.write('{"text": "late"}\n')
        return encode(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", meanwhile)
    with pytest.raises(InputError, match=r"a.jsonl: changed while it was read"):
        opened(path, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "units").glob("*.json"))
    assert not list((tmp_path / "cache" / "units").glob("*.partial*"))


# ---------------------------------------------------------------- broken records

BROKEN = [b'{"text": "good"}', b'{"text": ', b"\xff\xfe", b'{"texts": "a"}', b'{"text": 3}', b"[1]", b'{"text": "end"}']


def test_broken_records_are_left_out_up_to_the_limit_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(BROKEN))
    reasons = (
        f"{path}:2: is not JSON",
        f"{path}:3: is not UTF-8 (invalid start byte at byte 1 of the line)",
        f"{path}:4: has no field 'text' (it has: texts); set text_field",
        f"{path}:5: field 'text' must be a string, is int",
        f"{path}:6: is no JSON object but list",
    )
    for unit_bytes in (1 << 20, 8):
        monkeypatch.setattr(readers, "UNIT_BYTES", unit_bytes)
        for _ in range(2):  # tokenized, then found in the cache
            cache = opened(path, tmp_path / str(unit_bytes), max_bad_records=5, where="data.train")
            assert cache.tokens[:].tolist() == [*b"good", 256, *b"end", 256]
            assert cache.num_bad_records == 5
            for told, reason in zip(cache.bad_records, reasons, strict=True):
                assert told.startswith(reason)
        for folder in (str(unit_bytes), f"other-{unit_bytes}"):
            with pytest.raises(
                InputError, match=r"data.train: more bad records than data.max_bad_records \(4\)"
            ) as caught:
                opened(path, tmp_path / folder, max_bad_records=4, where="data.train")
            assert f"{path}:2: is not JSON" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"data.train: .*a.jsonl:2: is not JSON .* or allow some with"):
        opened(path, tmp_path / "strict", where="data.train")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_only_records_that_are_named_are_looked_up_and_what_lies_before_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join("\n" * (number % 3) + f"[{number}]\n" for number in range(200)))
        places = [f"{path}:{number + 1}" for number, line in enumerate(path.read_text().splitlines()) if line]
    else:
        parquet.write_table(pyarrow.table({"text": [1] * 200}), path, row_group_size=7)
        places = [f"{path}: row {number + 1}" for number in range(200)]
    monkeypatch.setattr(readers, "UNIT_BYTES", 100)
    one = DataSource(path=str(path), format=kind)  # type: ignore[arg-type]
    units, read = units_of(one), Counter[str]()
    assert len(units) > 8
    counted, opened_parquet = readers._line_ends, readers._parquet_file

    def counting(file: Any, begin: int, end: int) -> int:
        read["bytes"] += end - begin
        return counted(file, begin, end)

    monkeypatch.setattr(readers, "_line_ends", counting)
    monkeypatch.setattr(readers, "_parquet_file", lambda file: read.update(["files"]) or opened_parquet(file))
    named = []
    for unit in units:
        bad = BadRecords(1000, "data")
        (tmp_path / "units").mkdir(exist_ok=True)
        key = f"{unit.begin}"
        write_unit(tmp_path / "units", key, unit, encoder_of(one, ByteTokenizer(), None), Vocabulary(257, False), bad)
        assert len(bad.named) == min(5, bad.count) > 0
        named.append((bad.count, [told.partition(": is" if kind == "jsonl" else ": field")[0] for told in bad.named]))
    assert sum(count for count, _ in named) == 200
    for count, names in named:
        assert names == places[:5][: len(names)]
        places = places[count:]
    # Of a file no byte is counted twice; a footer is opened for the records, and for the first of the names.
    assert read["bytes"] < path.stat().st_size and read["files"] <= 2 * len(units)


def test_a_text_file_that_is_no_text_is_one_bad_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "TEXT_BLOCK_CHARACTERS", 10)
    monkeypatch.setattr(token_units, "_BATCH_CHARACTERS", 100)  # much of the file is written before it turns out bad
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes(b"line\n" * 10000 + b"\xff")
    one = DataSource(path=str(tmp_path), format="text")
    cache = open_token_cache([one], ByteTokenizer(), tmp_path / ".cache", max_bad_records=1)
    assert cache.tokens[:].tolist() == [*b"good", 256]
    assert cache.bad_records == (f"{tmp_path / 'b.txt'}: is not UTF-8 text (invalid start byte)",)
    with pytest.raises(InputError, match=r"b.txt: is not UTF-8 text"):
        open_token_cache([one], ByteTokenizer(), tmp_path / ".other")


def test_a_file_cut_off_is_no_bad_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-20])
    with pytest.raises(InputError, match=r"a.jsonl.gz: can't be read"):
        opened(path, tmp_path / "cache", max_bad_records=1000)


def test_the_result_tells_how_many_were_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(BROKEN))
    job = resolved({"train": [source(path)], "validation": [source(path)], "max_bad_records": 5})
    described = build(job, tmp_path).describe()
    assert described["bad_records"] == {"data.train": 5, "data.validation": 5}
