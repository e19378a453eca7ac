"""Data: formats, the token cache, one global order for any number of ranks, packing, resume, validation."""

import codecs
import errno
import gzip
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from trainer.data import IGNORED_LABEL, BatchStream, JobData, TextData, build_data, token_units
from trainer.data import build as data_build
from trainer.data import readers as readers_module
from trainer.data.files import LocalFile, local_files
from trainer.data.stream import Permutation, SequenceTable
from trainer.data.token_cache import TokenCache, entropy_nats, open_token_cache
from trainer.data.tokenizer import ByteTokenizer, JsonTokenizer, json_object

from trainyard.errors import InputError
from trainyard.spec.job import DataSource, JobSpec, ModelSpec, ParallelismSpec, ResolvedJob

SEQUENCE_LENGTH = 16


def resolved(
    data: dict[str, Any], *, global_batch: int = 8, micro_batch: int = 2, ranks: int = 1, **training: Any
) -> ResolvedJob:
    """A job with this data section."""
    spec = JobSpec.model_validate(
        {
            "name": "tiny",
            "model": {"config": {"model_type": "llama"}},
            "data": {"sequence_length": SEQUENCE_LENGTH, **data},
            "training": {"steps": 4, "global_batch_size": global_batch, "learning_rate": 1e-3, **training},
        }
    )
    return ResolvedJob(
        spec=spec,
        parallelism=ParallelismSpec(data_replicate=ranks),
        num_hosts=1,
        processes_per_host=ranks,
        steps=4,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=global_batch // (micro_batch * ranks),
        activation_checkpointing="none",
        learning_rate=1e-3,
    )


def source(path: Path, kind: str = "jsonl", **more: Any) -> dict[str, Any]:
    """A data source as a job writes it."""
    return {"path": str(path), "format": kind, **more}


def corpus(folder: Path, num_documents: int = 40) -> Path:
    """Documents of different lengths, each of a character of its own."""
    path = folder / "train.jsonl"
    lines = [json.dumps({"text": chr(65 + number % 60) * (5 + 7 * (number % 9))}) for number in range(num_documents)]
    path.write_text("\n".join(lines) + "\n")
    return path


def build(job: ResolvedJob, tmp_path: Path, rank: int = 0, size: int = 1) -> JobData:
    """The job's data for one rank."""
    return build_data(job, data_parallel_rank=rank, data_parallel_size=size, cache_dir=tmp_path / "cache")


def rows_of(batch: torch.Tensor) -> list[tuple[int, ...]]:
    """Sequences as tuples, to be counted."""
    return [tuple(row) for row in batch.tolist()]


# ---------------------------------------------------------------- the global order


def step_rows(job: ResolvedJob, tmp_path: Path, size: int, steps: int) -> list[list[tuple[int, ...]]]:
    """The global batch of each step, put together from all ranks."""
    streams = [build(job, tmp_path, rank, size).train for rank in range(size)]
    return [
        [row for stream in streams for batch in stream.next_step() for row in rows_of(batch.input_ids)]
        for _ in range(steps)
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_any_number_of_ranks_reads_the_same_global_batches(tmp_path: Path, size: int) -> None:
    job = resolved({"train": [source(corpus(tmp_path))]})
    alone = step_rows(job, tmp_path, 1, 20)
    together = step_rows(job, tmp_path, size, 20)
    assert [Counter(rows) for rows in together] == [Counter(rows) for rows in alone]


def test_ranks_take_blocks_by_micro_step_then_rank(tmp_path: Path) -> None:
    job = resolved({"train": [source(corpus(tmp_path))]})
    alone = build(job, tmp_path).train.next_step()
    flat = [row for batch in alone for row in rows_of(batch.input_ids)]
    first, second = (build(job, tmp_path, rank, 2).train.next_step() for rank in (0, 1))
    assert [rows_of(batch.input_ids) for batch in first] == [flat[0:2], flat[4:6]]
    assert [rows_of(batch.input_ids) for batch in second] == [flat[2:4], flat[6:8]]


def test_an_epoch_reads_every_sequence_once_and_the_next_in_another_order(tmp_path: Path) -> None:
    job = resolved({"train": [source(corpus(tmp_path))]}, global_batch=1, micro_batch=1)
    stream = build(job, tmp_path).train
    epochs = [[rows_of(stream.next_step()[0].input_ids)[0] for _ in range(stream.num_sequences)] for _ in range(2)]
    assert Counter(epochs[0]) == Counter(epochs[1])
    assert epochs[0] != epochs[1]
    table = [int(token) for row in epochs[0] for token in row]
    text = (tmp_path / "train.jsonl").read_text().splitlines()
    expected = sum(len(json.loads(line)["text"]) + 1 for line in text)
    assert abs(len(table) - expected) < SEQUENCE_LENGTH


def test_another_seed_is_another_order_and_no_shuffle_is_file_order(tmp_path: Path) -> None:
    path = corpus(tmp_path)
    first, second = (step_rows(resolved({"train": [source(path)]}, seed=seed), tmp_path, 1, 1) for seed in (1, 2))
    assert first != second
    plain = build(resolved({"train": [source(path)], "shuffle": False}), tmp_path).train.next_step()
    flat = [token for batch in plain for row in rows_of(batch.input_ids) for token in row]
    text = [json.loads(line)["text"].encode() for line in path.read_text().splitlines()]
    assert flat == [token for document in text for token in (*document, 256)][: len(flat)]


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 5))
def test_the_permutation_is_one(size: int, seed: int, epoch: int) -> None:
    shuffled = Permutation(size, seed, epoch)(np.arange(size, dtype=np.int64))
    assert sorted(shuffled.tolist()) == list(range(size))


def test_the_permutation_never_changes() -> None:
    # A resume years later must find the same order: these numbers are part of the checkpoint format.
    assert Permutation(10, 1234, 0)(np.arange(10, dtype=np.int64)).tolist() == GOLDEN_ORDER


GOLDEN_ORDER = [1, 2, 5, 4, 9, 8, 6, 7, 3, 0]


@pytest.mark.parametrize(
    ("size", "seed", "epoch", "expected"),
    [
        (10, 1234, 1, [3, 9, 1, 6]),
        (10, 1234, 2, [6, 3, 0, 9]),
        (1_000, 0, 3, [232, 774, 110, 4]),
        (1_024, 7, 1, [756, 1019, 52, 1010]),
        (100_003, 2**63 + 5, 0, [17334, 3655, 61137, 57878]),
        (5_000_000_000, 1234, 7, [4413041782, 3314437049, 4416762012, 3204918816]),
    ],
)
def test_nor_do_those_of_later_epochs_and_of_large_sets(size: int, seed: int, epoch: int, expected: list[int]) -> None:
    """A job that is resumed in its third epoch goes on in that one's order."""
    assert Permutation(size, seed, epoch)(np.asarray([0, 1, 2, size - 1], dtype=np.int64)).tolist() == expected


def test_the_permutation_mixes() -> None:
    size = 20_000
    shuffled = Permutation(size, 7, 0)(np.arange(size, dtype=np.int64))
    correlation = np.corrcoef(np.arange(size), shuffled)[0, 1]
    assert abs(correlation) < 0.03
    neighbours = np.abs(np.diff(shuffled))
    assert abs(neighbours.mean() / (size / 3) - 1) < 0.03


# ---------------------------------------------------------------- resume


def test_resume_continues_the_exact_stream_on_another_number_of_ranks(tmp_path: Path) -> None:
    job = resolved({"train": [source(corpus(tmp_path))]})
    expected = step_rows(job, tmp_path, 1, 12)
    before = build(job, tmp_path).train
    for _ in range(5):
        before.next_step()
    state = json.loads(json.dumps(before.state_dict()))
    assert state["sequences_consumed"] == 40
    streams = [build(job, tmp_path, rank, 4).train for rank in range(4)]
    for stream in streams:
        stream.load_state_dict(state)
    for step in range(5, 12):
        rows = [row for stream in streams for batch in stream.next_step() for row in rows_of(batch.input_ids)]
        assert Counter(rows) == Counter(expected[step])


@pytest.mark.parametrize(
    ("data", "training", "word"),
    [
        ({"sequence_length": 8}, {}, "sequence_length"),
        ({"shuffle": False}, {}, "shuffle"),
        ({"packing": False}, {}, "packing"),
        ({}, {"seed": 5}, "seed"),
    ],
)
def test_another_order_is_refused(tmp_path: Path, data: dict[str, Any], training: dict[str, Any], word: str) -> None:
    train = [source(corpus(tmp_path))]
    state = build(resolved({"train": train}), tmp_path).train.state_dict()
    other = build(resolved({"train": train, **data}, **training), tmp_path).train
    with pytest.raises(InputError, match=word):
        other.load_state_dict(state)


def test_other_data_is_refused_but_another_place_is_not(tmp_path: Path) -> None:
    path = corpus(tmp_path)
    state = build(resolved({"train": [source(path)]}), tmp_path).train.state_dict()
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "part-1.jsonl").write_text(path.read_text())
    build(resolved({"train": [source(moved)]}), tmp_path).train.load_state_dict(state)
    (moved / "part-1.jsonl").write_text(path.read_text().replace("AAAAA", "AAAAB", 1))
    changed = build(resolved({"train": [source(moved)]}), tmp_path).train
    told = r"dataset_digest was .* the data, the tokenizer or what the image takes for text changed"
    with pytest.raises(InputError, match=told):
        changed.load_state_dict(state)


# ---------------------------------------------------------------- sequences and labels


def test_packed_sequences_are_full_and_labels_are_the_inputs(tmp_path: Path) -> None:
    job = resolved({"train": [source(corpus(tmp_path))], "shuffle": False, "document_masks": False})
    for batch in build(job, tmp_path).train.next_step():
        assert batch.input_ids.shape == (2, SEQUENCE_LENGTH) and batch.input_ids.dtype == torch.int64
        assert torch.equal(batch.input_ids, batch.labels)
        assert batch.num_target_tokens == 2 * (SEQUENCE_LENGTH - 1)
        assert batch.position_ids is None


def test_unpacked_documents_are_padded_and_long_ones_continued(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    texts = ["abc", "d" * 40, "e", ""]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    job = resolved({"train": [source(path)], "packing": False, "shuffle": False}, global_batch=5, micro_batch=5)
    (batch,) = build(job, tmp_path).train.next_step()
    # "abc" + end; 40 d + end = 41 = 16 + 16 + 9; "e" + end; then the first again.
    lengths = (batch.labels != IGNORED_LABEL).sum(dim=1).tolist()
    assert lengths == [4, 16, 16, 9, 2]
    assert batch.num_target_tokens == int((batch.labels[:, 1:] != IGNORED_LABEL).sum())
    assert batch.input_ids[0, :4].tolist() == [97, 98, 99, 256]
    assert batch.labels[0, 4:].unique().tolist() == [IGNORED_LABEL]


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    sequence_length=st.integers(2, 20),
    packing=st.booleans(),
)
def test_no_token_is_lost_or_doubled(lengths: list[int], sequence_length: int, packing: bool) -> None:
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.uint32)
    cache = TokenCache(tokens, np.cumsum(lengths), "digest", 0.0, len(tokens) + 1)
    table = SequenceTable(cache, sequence_length=sequence_length, packing=packing)
    read: list[int] = []
    for row in range(len(table)):
        batch = table.micro_batch(np.asarray([row]))
        read += batch.labels[batch.labels != IGNORED_LABEL].tolist()
        assert batch.num_target_tokens == int((batch.labels[:, 1:] != IGNORED_LABEL).sum()) >= 1
    assert read == sorted(set(read))
    # Only a piece of a single token, which has nothing to predict, may be left out.
    pieces = [sum(lengths)] if packing else lengths
    assert len(tokens) - len(read) == sum(1 for length in pieces if length % sequence_length == 1)


# ---------------------------------------------------------------- validation


def test_validation_reads_each_sequence_once_and_fills_up_with_nothing(tmp_path: Path) -> None:
    train = [source(corpus(tmp_path))]
    held_back = tmp_path / "validation.txt"
    held_back.write_text("x" * (10 * SEQUENCE_LENGTH - 1))  # 10 sequences with the end token
    job = resolved({"train": train, "validation": [source(held_back, "text")]})
    seen = []
    for rank in range(2):
        validation = build(job, tmp_path, rank, 2).validation
        assert validation is not None and validation.num_steps == 2
        batches = [batch for step in validation for batch in step]
        assert len(batches) == 4
        seen += batches
        again = [batch for step in validation for batch in step]
        assert [batch.num_target_tokens for batch in again] == [batch.num_target_tokens for batch in batches]
    assert sum(batch.num_target_tokens for batch in seen) == 10 * (SEQUENCE_LENGTH - 1)
    empty = [batch for batch in seen if batch.num_target_tokens == 0]
    assert empty and all((batch.labels == IGNORED_LABEL).all() for batch in empty)


def test_validation_is_bounded_and_ends(tmp_path: Path) -> None:
    path = corpus(tmp_path)
    job = resolved({"train": [source(path)], "validation": [source(path)]}, validation_batches=3)
    validation = build(job, tmp_path).validation
    assert validation is not None and validation.num_steps == 3
    for _ in range(3):
        validation.next_step()
    with pytest.raises(IndexError):
        validation.next_step()
    validation.reset()
    assert len(validation.next_step()) == 4


def test_entropy_is_that_of_the_validation_tokens(tmp_path: Path) -> None:
    (tmp_path / "validation.txt").write_text("aabb")
    job = resolved({"train": [source(corpus(tmp_path))], "validation": [source(tmp_path / "validation.txt", "text")]})
    data = build(job, tmp_path)
    # a, a, b, b and the end token.
    assert data.unigram_entropy_nats == pytest.approx(-(2 * 0.4 * math.log(0.4) + 0.2 * math.log(0.2)))
    assert data.vocab_size == 257
    assert entropy_nats(np.asarray([5, 0, 5, 5, 5])) == pytest.approx(math.log(4))


# ---------------------------------------------------------------- formats


def decoded(tmp_path: Path, *sources: dict[str, Any]) -> list[int]:
    """All tokens of the sources, by the byte tokenizer."""
    cache = open_token_cache([DataSource.model_validate(one) for one in sources], ByteTokenizer(), tmp_path / "cache")
    return [int(token) for token in cache.tokens[:]]


def test_text_jsonl_gzip_and_parquet_hold_the_same(tmp_path: Path) -> None:
    expected = [*b"one\ntwo", 256, *"drei ü".encode(), 256]
    texts = ["one\ntwo", "drei ü"]
    lines = "".join(json.dumps({"body": text, "n": 1}) + "\n" for text in texts)
    folder = tmp_path / "text"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    (folder / ".hidden").write_text("not this")
    (tmp_path / "a.jsonl").write_text(lines + "\n")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "a.parquet")
    assert decoded(tmp_path, source(folder, "text")) == expected
    assert decoded(tmp_path, source(tmp_path / "a.jsonl", text_field="body")) == expected
    assert decoded(tmp_path, source(tmp_path / "a.jsonl.gz", text_field="body")) == expected
    assert decoded(tmp_path, source(tmp_path / "a.parquet", "parquet", text_field="body")) == expected
    assert decoded(tmp_path, source(folder, "text"), source(folder, "text")) == expected * 2


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """Windows' editors begin files with one: it would be learnt as three bytes, or a token, that nobody wrote."""
    text = "é\ufeff one"  # within a text it is one's own
    (tmp_path / "marked.txt").write_bytes(codecs.BOM_UTF8 + text.encode())
    (tmp_path / "marked.jsonl").write_bytes(codecs.BOM_UTF8 + json.dumps({"text": text}).encode() + b"\n")
    for name, kind in (("marked.txt", "text"), ("marked.jsonl", "jsonl")):
        assert decoded(tmp_path, source(tmp_path / name, kind)) == [*text.encode(), 256]
    (tmp_path / "tokenizer_config.json").write_bytes(codecs.BOM_UTF8 + b'{"eos_token": "x"}')
    assert json_object(tmp_path / "tokenizer_config.json") == {"eos_token": "x"}


def test_tokens_of_an_earlier_reader_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of before a mark was no text would keep it, and a resume on another machine would have other tokens."""
    (tmp_path / "marked.txt").write_bytes(codecs.BOM_UTF8 + b"one")
    with monkeypatch.context() as before:
        before.setattr(token_units, "_READERS", {})
        before.setattr(readers_module, "_text_records", lambda _: iter([readers_module.Record(0, "\ufeffone")]))
        assert decoded(tmp_path, source(tmp_path / "marked.txt", "text")) == [*"\ufeffone".encode(), 256]
    assert decoded(tmp_path, source(tmp_path / "marked.txt", "text")) == [*b"one", 256]


def test_a_large_text_file_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers_module, "TEXT_BLOCK_CHARACTERS", 10)
    text = "".join(f"line {number}\n" for number in range(50)) + "no newline at the end"
    (tmp_path / "a.txt").write_text(text)
    (unit,) = readers_module.units_of(DataSource(path=str(tmp_path / "a.txt"), format="text"))
    records = list(unit.records())
    assert len(records) > 20
    assert [record.begins for record in records] == [True] + [False] * (len(records) - 1)
    assert [record.ends for record in records] == [False] * (len(records) - 1) + [True]
    assert decoded(tmp_path, source(tmp_path / "a.txt", "text")) == [*text.encode(), 256]


def test_ready_made_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.asarray([1, 2, 70_000], dtype=np.int64))
    (tmp_path / "b.bin").write_bytes(np.asarray([5, 6], dtype="<u2").tobytes())
    job = resolved({"train": [source(tmp_path, "tokens")], "packing": False, "shuffle": False}, global_batch=2)
    data = build(job, tmp_path)
    (batch,) = data.train.next_step()
    assert batch.input_ids[:, :3].tolist() == [[1, 2, 70_000], [5, 6, 0]]
    assert data.vocab_size == 70_001


def test_ready_made_tokens_of_a_small_vocabulary_need_no_more_than_theirs(tmp_path: Path) -> None:
    """Of letters or proteins, say: without text nobody reads bytes."""
    (tmp_path / "letters").mkdir()
    np.save(tmp_path / "letters/a.npy", np.asarray([1, 2, 32] * 20, dtype=np.uint8))
    letters = source(tmp_path / "letters", "tokens")
    assert build(resolved({"train": [letters]}), tmp_path).vocab_size == 33
    assert build(resolved({"train": [letters, source(corpus(tmp_path))]}), tmp_path).vocab_size == 257
    np.save(tmp_path / "letters/b.npy", np.asarray([4, -1], dtype=np.int8))
    with pytest.raises(InputError, match=r"b.npy: holds id -1, the vocabulary's ids are 0 to 268435455"):
        build(resolved({"train": [letters]}), tmp_path)


def test_a_model_without_a_tokenizer_beside_it_reads_ready_made_tokens(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    np.save(tmp_path / "letters/a.npy", np.asarray([1, 2, 32] * 20, dtype=np.uint8))
    (tmp_path / "model").mkdir()

    def vocab_size(*sources: dict[str, Any]) -> int:
        job = resolved({"train": [source(tmp_path / "letters", "tokens")], "validation": list(sources)})
        model = ModelSpec(source=str(tmp_path / "model"))
        job = job.model_copy(update={"spec": job.spec.model_copy(update={"model": model})})
        data = build(job, tmp_path)
        assert isinstance(data, TextData)
        return data.vocab_size

    assert vocab_size() == 33
    with pytest.raises(InputError, match=r"^model.source .*/model: holds no tokenizer.json; save the tokenizer"):
        vocab_size(source(corpus(tmp_path)))
    json_tokenizer(tmp_path / "model")
    assert vocab_size() == 268, "the tokenizer's own, where there is one"


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_vocabulary_that_is_too_small_is_said_before_anything_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    def made(size: int, **data: Any) -> JobData:
        job = resolved({"train": [source(corpus(tmp_path))], **data})
        config = {"model_type": "llama", "vocab_size": size}
        (tmp_path / "config.json").write_text(json.dumps(config))
        origin = {"source": str(tmp_path), "config": None} if is_stored else {"config": config}
        model = job.spec.model.model_copy(update=origin)
        return build(job.model_copy(update={"spec": job.spec.model_copy(update={"model": model})}), tmp_path / "cache")

    tokenizer = str(json_tokenizer(tmp_path / "tokenizer"))
    assert made(268, tokenizer=tokenizer).train.num_sequences
    (letters := tmp_path / "letters").mkdir()
    np.save(letters / "a.npy", np.asarray([1, 2, 32] * 20))
    monkeypatch.setattr(data_build, "open_token_cache", lambda *_, **__: pytest.fail("data was read"))
    with pytest.raises(
        InputError, match=r"^model vocab_size is 267, but the data's ids go up to 267: set model\.config"
    ):
        made(267, tokenizer=tokenizer)
    monkeypatch.undo()
    made(33, train=[source(letters, "tokens")])  # of ids that nobody has counted yet


def json_tokenizer(folder: Path, text: str = "hello world " * 50) -> Path:
    """A small BPE tokenizer with a BOS template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(4)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    return folder


def test_a_tokenizers_own_bos_and_eos_frame_each_document_and_nothing_is_truncated(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(json_tokenizer(tmp_path / "tokenizer") / "tokenizer.json")
    assert (tokenizer.prefix_ids, tokenizer.eos_id) == ((0,), 1)
    (tmp_path / "a.jsonl").write_text('{"text": "hello world hello world hello world"}\n{"text": "hello"}\n')
    cache = open_token_cache(
        [DataSource(path=str(tmp_path / "a.jsonl"), format="jsonl")], tokenizer, tmp_path / "cache"
    )
    documents = np.split(cache.tokens[:], cache.document_ends[:-1])
    assert [(document[0], document[-1]) for document in documents] == [(0, 1), (0, 1)]
    assert len(documents[0]) >= 6
    assert cache.tokens[:].dtype == np.uint16


def test_a_token_that_begins_and_ends_documents_does_both(tmp_path: Path) -> None:
    """OPT's </s>: a text has it in front, by the tokenizer's own template, and a document has it at its end."""
    from tokenizers import Tokenizer, processors

    path = json_tokenizer(tmp_path / "tokenizer") / "tokenizer.json"
    inner = Tokenizer.from_file(str(path))
    inner.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 1)])
    inner.save(str(path))
    tokenizer = JsonTokenizer(path)
    assert (tokenizer.prefix_ids, tokenizer.eos_id) == ((1,), 1)
    inner.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 1)])
    inner.save(str(path))
    assert JsonTokenizer(path).prefix_ids == ()


def test_a_vocabulary_that_can_write_few_texts_has_its_bos_too(tmp_path: Path) -> None:
    """Of DNA, say: without a token for what it doesn't know, "a" is no id at all."""
    from tokenizers import Tokenizer, models, processors

    inner = Tokenizer(models.BPE({"<s>": 0, "A": 1, "C": 2, "G": 3, "T": 4}, []))
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    inner.save(str(tmp_path / "tokenizer.json"))
    assert inner.encode("a").ids == [0] and inner.encode("GA").ids == [0, 3, 1]
    assert JsonTokenizer(tmp_path / "tokenizer.json").prefix_ids == (0,)


@pytest.mark.parametrize(
    "stated", [{"eos_token": ""}, {"eos_token": {"content": ""}}, {"added_tokens_decoder": {"9": {"content": ""}}}]
)
def test_an_empty_token_is_none_stated(tmp_path: Path, stated: dict[str, Any]) -> None:
    """As older converted models write it: a common one that the vocabulary has counts."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    assert JsonTokenizer(tmp_path / "tokenizer.json").eos_id == 1


@pytest.mark.parametrize("stated", [{"eos_token": "<|im_end|>"}, {"added_tokens_decoder": {"9": {"content": "<|a|>"}}}])
def test_a_token_that_the_tokenizer_lacks_is_not_cut_up_as_text(tmp_path: Path, stated: dict[str, Any]) -> None:
    """transformers adds such tokens as it loads the tokenizer; here another would end the documents."""
    folder = json_tokenizer(tmp_path / "tokenizer")
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    with pytest.raises(InputError, match=r"tokenizer.json: has no token '<\|(im_end|a)\|>', which a configuration"):
        JsonTokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("limit", [0, 1])
def test_null_is_no_text_in_any_format(tmp_path: Path, limit: int) -> None:
    parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": null}\n{"text": "b"}\n')
    for kind, place in (("parquet", "a.parquet: row 2"), ("jsonl", "a.jsonl:2")):
        data = {"train": [source(tmp_path / f"a.{kind}", kind)], "max_bad_records": limit}
        if not limit:
            with pytest.raises(InputError, match=f"{place}: field 'text' must be a string, is NoneType"):
                build(resolved(data), tmp_path / kind)
        else:
            assert build(resolved(data), tmp_path / kind).describe()["bad_records"] == {"data.train": 1}


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        ("", "jsonl", "holds no text; give files with some, or take the source out"),
        ('{"text": "a"}\n{"text": \n', "jsonl", "bad.file:2: is not JSON"),
        ('{"body": "a"}\n', "jsonl", r"bad.file:1: has no field 'text' \(it has: body\)"),
        ('{"text": 3}\n', "jsonl", "must be a string, is int"),
        ('{"text": "half a \\ud83d"}\n', "jsonl", "bad.file:1: field 'text' is no valid Unicode"),
        ("x", "parquet", "is not a parquet file"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path: Path, content: str, kind: str, message: str) -> None:
    path = tmp_path / "bad.file"
    path.write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        build(resolved({"train": [source(path, kind)]}), tmp_path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value) or kind == "jsonl"


def test_a_set_of_bad_records_alone_says_what_is_wrong_with_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('[{"text": "a"}]\n')
    data = {"train": [source(tmp_path / "a.jsonl", "jsonl")], "max_bad_records": 5}
    with pytest.raises(InputError, match=r"holds no text but 1 bad record, the first: .*a\.jsonl:1: is no JSON object"):
        build(resolved(data), tmp_path)


def test_a_damaged_parquet_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["hello there", "second"]}), path)
    content = path.read_bytes()
    path.write_bytes(content[:20] + bytes(40) + content[60:])  # the first page's header
    with pytest.raises(InputError, match=r"a\.parquet: can't be read: .*") as caught:
        build(resolved({"train": [source(path, "parquet")]}), tmp_path)
    assert "\n" not in str(caught.value)


def test_wrong_paths_and_tokens_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "a.npy", np.asarray([1, 999], dtype=np.int64))
    (tmp_path / "text.npy").write_text("1 2 3")
    np.save(tmp_path / "minus.npy", np.asarray([1, -1]).astype(np.uint32))  # counted, it would take 32 GiB
    tokenizer = str(json_tokenizer(tmp_path / "tokenizer"))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"train": [source(tmp_path / "nowhere")]}, "no such file or folder"),
        ({"train": [source(tmp_path / "empty")]}, "no file that ends in .jsonl"),
        ({"train": [{"path": "s3://bucket/x", "format": "text"}]}, "the trainer reads local files"),
        ({"train": [source(tmp_path / "a.npy", "tokens")], "tokenizer": tokenizer}, "holds id 999"),
        ({"train": [source(tmp_path / "minus.npy", "tokens")]}, "id 4294967295, the vocabulary's ids are 0 to 2684"),
        ({"train": [source(tmp_path / "text.npy", "tokens")]}, "is not a NumPy array file .*; write ids by numpy.save"),
        ({"train": [source(corpus(tmp_path))], "tokenizer": str(tmp_path / "empty")}, "holds no tokenizer.json"),
    ]
    for data, message in cases:
        with pytest.raises(InputError, match=message):
            build(resolved(data), tmp_path)


@pytest.mark.parametrize("wide", ["<u4", "<i4"])
def test_bare_ids_of_32_bits_are_not_read_as_twice_as_many(tmp_path: Path, wide: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(np.arange(1000, 1300).astype(wide).tobytes())
    with pytest.raises(InputError, match=r"a\.bin: every second id of it is 0, .*; write them by numpy\.save"):
        build(resolved({"train": [source(path, "tokens")]}), tmp_path)
    path.write_bytes((np.arange(300) * 500).astype(wide).tobytes())  # as of Llama 3's 128,256 words, or Gemma's 262,144
    with pytest.raises(InputError, match=r"a\.bin: every second id of it is 0 to 2, as of 32-bit ids"):
        build(resolved({"train": [source(path, "tokens")]}), tmp_path)
    pairs = np.stack([np.arange(300), np.arange(300) % 5], axis=1)
    for own in (np.arange(1000, 1300), np.zeros(300), np.arange(300) % 2, np.array([5, 0, 5, 0]), pairs):
        path.write_bytes(own.astype("<u2").tobytes())
        assert len(build(resolved({"train": [source(path, "tokens")]}), tmp_path).train._table)


def test_what_a_folder_is_read_without_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that learns from less than it was given looks like any other."""
    root = tmp_path / "data"
    for name in ("open", "closed", ".hidden", "elsewhere"):
        folder = tmp_path / name if name == "elsewhere" else root / name
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text("text")
    wanted = DataSource(path=str(root), format="text")
    assert [path.parent.name for path in local_files(wanted)] == ["closed", "open"]
    assert capsys.readouterr().out == ""
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "gone.txt").symlink_to(tmp_path / "nothing.txt")
    honest = os.scandir

    def scandir(path: str) -> Any:  # root may list any folder
        if Path(path).name in refused:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return honest(path)

    refused = {"closed", ".hidden"}
    monkeypatch.setattr(os, "scandir", scandir)
    assert [path.parent.name for path in local_files(wanted)] == ["open"]
    said = capsys.readouterr().out
    assert said == (
        f"warning: data path {root}: without closed (Permission denied), gone.txt (a link to nothing),"
        " linked (a link to a folder, which is not followed)\n"
    )
    monkeypatch.setenv("RANK", "1")
    local_files(wanted)
    assert capsys.readouterr().out == "", "said once"
    refused = {"data"}
    with pytest.raises(InputError, match="data: can't be read: Permission denied"):
        local_files(wanted)


@pytest.mark.parametrize(
    ("kind", "nearly", "others"),
    [
        ("jsonl", ("b.jsonl.zst", "c.JSONL", "d.json.bz2"), ("README.md", "e.jsonl.lock", ".a.jsonl.zst")),
        ("parquet", ("b.parquet.gz",), ("b.parquet.crc", "e.jsonl")),
        ("webdataset", ("b.tar.gz", "c.tgz"), ("b.tar.idx",)),
    ],
)
def test_packed_files_that_are_not_read_are_said_too(
    kind: str, nearly: tuple[str, ...], others: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {"jsonl": "a.jsonl", "parquet": "a.parquet", "webdataset": "a.tar"}[kind]
    for name in (wanted, *nearly, *others):
        (tmp_path / name).write_text("x")
    assert [path.name for path in local_files(DataSource.model_validate(source(tmp_path, kind)))] == [wanted]
    why = "packed in a way that is not read, or its name ends in capitals"
    told = ", ".join(f"{name} ({why})" for name in nearly)
    assert capsys.readouterr().out == f"warning: data path {tmp_path}: without {told}\n"


def test_a_path_that_may_not_be_looked_at_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")

    def stat(path: Path, **_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", stat)
    for read in (
        lambda: local_files(DataSource(path=str(tmp_path / "a.txt"), format="text")),
        lambda: LocalFile.at(tmp_path),
    ):
        with pytest.raises(InputError, match="can't be read: Permission denied"):
            read()


# ---------------------------------------------------------------- the cache


def test_a_second_opening_reads_the_cache_and_a_torn_cache_is_built_again(tmp_path: Path) -> None:
    one = DataSource(path=str(corpus(tmp_path)), format="jsonl")
    calls = []

    class Counting(ByteTokenizer):
        def encode_batch(self, texts: Any) -> Any:
            calls.append(len(texts))
            return super().encode_batch(texts)

    first = open_token_cache([one], Counting(), tmp_path / "cache")
    again = open_token_cache([one], Counting(), tmp_path / "cache")
    assert len(calls) == 1 and again.digest == first.digest
    (tokens,) = (tmp_path / "cache").glob("units/*.tokens")
    assert str(tokens) in Path("/proc/self/maps").read_text(), "tokens are read where they lie"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    assert open_token_cache([one], Counting(), tmp_path / "cache").digest == first.digest
    assert len(calls) == 2


def _open_in_process(arguments: tuple[str, str]) -> str:
    path, cache = arguments
    return open_token_cache([DataSource(path=path, format="jsonl")], ByteTokenizer(), Path(cache)).digest


def test_processes_that_open_it_at_once_agree(tmp_path: Path) -> None:
    arguments = (str(corpus(tmp_path, 3000)), str(tmp_path / "cache"))
    # A fork of a process with threads may wait for ever for a lock that one of them held.
    code = "import sys; from test_data import _open_in_process as opened; print(opened((sys.argv[1], sys.argv[2])))"
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, "-c", code, *arguments]
    started = [
        subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    digests = [one.communicate()[0].split()[-1] for one in started]
    assert len(set(digests)) == 1
    assert len(list((tmp_path / "cache").glob("*/meta.json"))) == 1
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_the_stream_is_what_the_seam_says() -> None:
    assert {"next_step", "state_dict", "load_state_dict", "num_sequences"} <= set(dir(BatchStream))
