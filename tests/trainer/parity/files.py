"""Files for whole jobs of the campaign: what a job may read, in every format, with broken records among it.

Each maker takes a generator, a path without an ending, how many records to break where the format has such, and how
many documents to write; it gives `data.train`'s entry and how many records of it are bad.
"""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHAT = """
{%- for message in messages %}
    {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
MARKED_CHAT = """
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.role == 'assistant' %}{% generation %}{{- message.content + '<|end|>' }}{% endgeneration %}
    {%- else %}{{- message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
_SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>")
_WORDS = ("to", "train", "a", "modél", "you", "need", "some", "text", "and", "time", "\n", "?")
_ROLES = ("user", "assistant")
NUM_IDS = 50
"""Of ready-made tokens: fewer than `write_tokenizer` makes, which makes fewer than any model of the campaign has."""

Made = tuple[dict[str, Any], int]


def _said(rng: random.Random, most: int = 60) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(1, most)))


def text(rng: random.Random, path: Path, _: int, count: int) -> Made:
    """Files of text, a document each, in a folder with one below it."""
    (path / "below").mkdir(parents=True)
    for number in range(3):
        name = f"below/{number}.txt" if number == 2 else f"{number}.txt"
        (path / name).write_text(_said(rng, 12 * count), encoding="utf-8")
    return {"path": str(path), "format": "text"}, 0


def lines(rng: random.Random, path: Path, bad: int, count: int) -> Made:
    """JSON with a text."""
    written = _records(rng, path, bad, [{"body": _said(rng)} for _ in range(count)])
    return written | {"text_field": "body"}, bad


def pairs(rng: random.Random, path: Path, bad: int, count: int) -> Made:
    """JSON or Parquet with a prompt and an answer."""
    records = [{"ask": _said(rng, 10), "text": _said(rng, 30)} for _ in range(count)]
    written = _records(rng, path, bad, records) if rng.random() < 0.6 else _rows(path, records)
    told = {"prompt_field": "ask", "learn": rng.choice(("assistant", "all"))}
    return written | told, bad if written["format"] == "jsonl" else 0


def chats(rng: random.Random, path: Path, bad: int, count: int) -> Made:
    """JSON or Parquet with conversations; of some an answer is not learnt."""
    is_json, learn = rng.random() < 0.6, rng.choice(("assistant", "assistant", "all"))
    records = []
    for _ in range(count):
        turns: list[dict[str, Any]] = [
            {"role": role, "content": _said(rng, 8)} for _ in range(rng.randint(1, 3)) for role in _ROLES
        ]
        if is_json and learn == "assistant" and len(turns) > 2 and rng.random() < 0.2:
            turns[1]["weight"] = 0
        records.append({"messages": turns})
    written = _records(rng, path, bad, records) if is_json else _rows(path, records)
    return written | {"messages_field": "messages", "learn": learn}, bad if is_json else 0


def rows(rng: random.Random, path: Path, _: int, count: int) -> Made:
    """Parquet with a text."""
    return _rows(path, [{"text": _said(rng)} for _ in range(count)]), 0


def tokens(rng: random.Random, path: Path, _: int, count: int) -> Made:
    """Ready-made ids: one file of either kind, or three in a folder."""
    number, name = rng.choice((1, 3)), rng.choice((".npy", ".bin"))
    path.mkdir()
    for part in range(number):
        ids = np.array([rng.randrange(NUM_IDS) for _ in range(50 * count // number)], dtype=np.uint16)
        file = (path / str(part)).with_suffix(name)
        if name == ".npy":
            np.save(file, ids)
        else:
            ids.tofile(file)
    only = str((path / "0").with_suffix(name))
    return {"path": only if number == 1 else str(path), "format": "tokens"}, 0


MAKERS: tuple[Callable[[random.Random, Path, int, int], Made], ...] = (text, lines, pairs, chats, rows, tokens)


def _records(rng: random.Random, path: Path, bad: int, records: list[dict[str, Any]]) -> dict[str, Any]:
    written = [json.dumps(record, ensure_ascii=False) for record in records]
    for _ in range(bad):
        written.insert(rng.randrange(len(written)), rng.choice(("{", '{"other": 1}', "[]")))
    content = ("\n".join(written) + "\n").encode()
    is_packed = rng.random() < 0.3
    path = path.with_suffix(".jsonl.gz" if is_packed else ".jsonl")
    path.write_bytes(gzip.compress(content, mtime=0) if is_packed else content)
    return {"path": str(path), "format": "jsonl"}


def _rows(path: Path, records: list[dict[str, Any]]) -> dict[str, Any]:
    path = path.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=20)
    return {"path": str(path), "format": "parquet"}


def num_ids(source: dict[str, Any]) -> int:
    """Of a source of ready-made tokens."""
    path = Path(source["path"])
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return sum(np.load(file).size if file.suffix == ".npy" else file.stat().st_size // 2 for file in files)


def write_tokenizer(rng: random.Random, folder: Path) -> None:
    """A Hugging Face tokenizer directory: few tokens, an end of documents, a chat template, perhaps a beginning."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    learning = trainers.BpeTrainer(vocab_size=80, special_tokens=list(_SPECIAL), show_progress=False)
    made.train_from_iterator([" ".join(_WORDS)], learning)
    if rng.random() < 0.5:
        first = [("<s>", made.token_to_id("<s>"))]
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=first)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": rng.choice((CHAT, MARKED_CHAT)), **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")
