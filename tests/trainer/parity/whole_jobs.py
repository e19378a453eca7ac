"""A seed of the parity campaign as a whole job: the trainer's own command on files of a random kind, ended midway.

`draws` has the model, the optimizer and two layouts; here come data of one or two formats (with broken records among
them), packing, validation sets, when to save and what to keep, and how the first layout's run ends: one rank is told
to stop, or all are killed. The second layout goes on in the same folder. One process that nobody disturbs is what both
must equal: every step once, exactly its tokens, its losses, norms, rates and validations within tolerance, and the
model that is exported in the end.
"""

import json
import math
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from trainer.export import Export, export
from trainer_testing.distributed import finish
from trainer_testing.text_job import rows_of, start_faulty_trainer, start_trainer
from transformers import AutoModelForCausalLM

from parity.draws import Drawn, Layout

CHAT = """
{%- for message in messages %}
    {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
_WORDS = ("to", "train", "a", "modél", "you", "need", "some", "text", "and", "time", "\n", "?")
STEPS_OF_WHOLE = 10
_SECONDS = 300
_STOPPED = 75
"""The exit code of whoever wants to be resumed."""
_COMPARED = ("loss", "grad_norm", "learning_rate", "validation_loss")


@dataclass(frozen=True)
class WholeJob:
    """What a seed adds to `Drawn`."""

    drawn: Drawn
    content: dict[str, Any]
    """The job file, but for its layout."""
    end: str
    """terminate: one rank is told to stop; kill: all die at once."""
    end_step: int
    end_ranks: tuple[int, ...]
    exported: dict[str, bool]
    """How the model is exported: its running average, an adapter merged."""

    def file(self, folder: Path, name: str, layout: Layout, *, output: str) -> Path:
        """The job under a layout, written; what it keeps outside `output` lies in folders of that run's own."""
        training = self.content["training"] | {
            "micro_batch_size": layout.micro_batch_size,
            "activation_checkpointing": layout.recompute,
            "loss": layout.loss,
        }
        path = folder / name
        places = ("destination", "local_directory")
        own = {place: str(folder / f"{output}-{place}") for place in places if place in self.content["checkpoint"]}
        changes = {"training": training, "parallelism": layout.parallelism}
        changes["checkpoint"] = self.content["checkpoint"] | own
        path.write_text(json.dumps(self.content | changes))
        return path


def whole_job(drawn: Drawn, folder: Path, source: Path) -> WholeJob:
    """The seed's, with its files in `folder`; `source`: the base model of an adapter, of any vocabulary."""
    rng = random.Random(f"whole job {drawn.seed}")
    is_packed = rng.random() < 0.7
    data: dict[str, Any] = {
        "sequence_length": drawn.training["sequence_length"],
        "packing": is_packed,
        "document_masks": drawn.is_packed and is_packed,
        "shuffle": rng.random() < 0.8,
    }
    kinds = [_tokens] if drawn.adapter is not None else rng.sample((_text, _lines, _pairs, _chats, _rows, _tokens), 2)
    bad = rng.choice((0, 0, 2))
    sources = [make(rng, folder / f"train-{number}", bad if number == 0 else 0) for number, make in enumerate(kinds)]
    found = sum(count for _, count in sources)
    data["train"] = [source for source, _ in sources]
    data["validation"] = _validation(rng, folder, kinds[0])
    data |= {"max_bad_records": found} if found else {}
    if _chats in kinds:
        (folder / "chat.jinja").write_text(CHAT)
        data["chat_template"] = str(folder / "chat.jinja")
    model: dict[str, Any] = {"source": str(source), "adapter": drawn.adapter}
    if drawn.adapter is None:
        model = {"config": drawn.model | {"vocab_size": rng.choice((257, 264, 300))}}
    training = {name: value for name, value in drawn.training.items() if name != "sequence_length"}
    training |= {"validation_every_steps": rng.choice((None, 2)), "validation_batches": 1} | _course(rng, drawn)
    content: dict[str, Any] = {
        "name": "whole",
        "model": model,
        "data": data,
        "training": training,
        "checkpoint": _saves(rng),
    }
    end, ranks = rng.choice(("terminate", "kill")), tuple(range(drawn.first.spec.world_size))
    if end == "kill":
        content["checkpoint"]["asynchronous"] = False  # else nothing may be committed yet, and nothing gone on with
    average = drawn.training["optimizer"].get("average_decay") is not None and rng.random() < 0.5
    return WholeJob(
        drawn,
        content,
        end=end,
        end_step=rng.randint(1 + content["checkpoint"]["every_steps"], STEPS_OF_WHOLE - 2),
        end_ranks=ranks if end == "kill" else (rng.choice(ranks),),
        exported={"average": average, "merge": drawn.adapter is not None and rng.random() < 0.5},
    )


def _course(rng: random.Random, drawn: Drawn) -> dict[str, Any]:
    """How long, and what is looked at on the way: of what changes no number, or both layouts' alike."""
    batch, length = drawn.training["global_batch_size"], drawn.training["sequence_length"]
    found: dict[str, Any] = {"steps": STEPS_OF_WHOLE}
    if rng.random() < 0.25:
        found = {"tokens": STEPS_OF_WHOLE * batch * length - rng.randrange(length)}
    if rng.random() < 0.2:
        found["base_batch_size"] = 2 * batch
    if rng.random() < 0.2:
        found["on_anomaly"] = "rollback"
    if rng.random() < 0.3:
        found["deterministic"] = True
    return found | {"observe_every_steps": rng.choice((50, 2))}


def _saves(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {
        "every_steps": rng.choice((1, 1, 2, 3)),
        "keep_last": rng.choice((1, 2)),
        "asynchronous": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        found["keep_every_steps"] = 2
    if rng.random() < 0.3:
        found["keep_best"] = {"metric": "loss"}
    if rng.random() < 0.3:
        found["local_directory"] = "its own"
    if rng.random() < 0.3:
        found["destination"] = "its own"
    return found


def _validation(rng: random.Random, folder: Path, make: Callable[..., Any]) -> list[dict[str, Any]]:
    sets = []
    for number in range(rng.randint(0, 2)):
        source, _ = make(rng, folder / f"validation-{number}", 0)
        named = {"name": "more", "every_steps": 3, "batches": 1} if number else {}
        sets.append(source | named)
    return sets


def _said(rng: random.Random, most: int = 60) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(1, most)))


def _text(rng: random.Random, folder: Path, _: int) -> tuple[dict[str, Any], int]:
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(_said(rng, 900), encoding="utf-8")
    return {"path": str(folder), "format": "text"}, 0


def _records(rng: random.Random, path: Path, bad: int, make: Callable[[], dict[str, Any]]) -> tuple[str, int]:
    lines = [json.dumps(make(), ensure_ascii=False) for _ in range(80)]
    for _ in range(bad):
        lines.insert(rng.randrange(len(lines)), rng.choice(("{", '{"other": 1}', "[]")))
    path = path.with_suffix(".jsonl")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path), bad


def _lines(rng: random.Random, folder: Path, bad: int) -> tuple[dict[str, Any], int]:
    path, found = _records(rng, folder, bad, lambda: {"body": _said(rng)})
    return {"path": path, "format": "jsonl", "text_field": "body"}, found


def _pairs(rng: random.Random, folder: Path, bad: int) -> tuple[dict[str, Any], int]:
    path, found = _records(rng, folder, bad, lambda: {"ask": _said(rng, 10), "text": _said(rng, 30)})
    learn = rng.choice(("assistant", "all"))
    return {"path": path, "format": "jsonl", "prompt_field": "ask", "learn": learn}, found


def _chats(rng: random.Random, folder: Path, bad: int) -> tuple[dict[str, Any], int]:
    def chat() -> dict[str, Any]:
        turns = [{"role": role, "content": _said(rng, 8)} for _ in range(rng.randint(1, 3)) for role in _ROLES]
        return {"messages": turns}

    path, found = _records(rng, folder, bad, chat)
    return {"path": path, "format": "jsonl", "messages_field": "messages"}, found


_ROLES = ("user", "assistant")


def _rows(rng: random.Random, folder: Path, _: int) -> tuple[dict[str, Any], int]:
    path = folder.with_suffix(".parquet")
    pq.write_table(pa.table({"text": [_said(rng) for _ in range(80)]}), path, row_group_size=20)
    return {"path": str(path), "format": "parquet"}, 0


def _tokens(rng: random.Random, folder: Path, _: int) -> tuple[dict[str, Any], int]:
    path = folder.with_suffix(".npy")
    np.save(path, np.array([rng.randrange(96) for _ in range(4000)], dtype=np.uint16))
    return {"path": str(path), "format": "tokens"}, 0


def run_whole(job: WholeJob, folder: Path) -> tuple[dict[str, float], list[str]]:
    """Worst relative differences of a figure from one process: of one that accumulates (`own`), of the disturbed job
    (`job`); and what did not hold. AssertionError where a run fails."""
    drawn, batch = job.drawn, job.drawn.training["global_batch_size"]
    wanted, again = (
        _ended_well(1, job.file(folder, f"{name}.yaml", Layout({}, size, "none"), output=name), folder / name)
        for name, size in (("alone", batch), ("again", 1))
    )
    faults = [{"rank": rank, "kind": job.end, "step": job.end_step} for rank in job.end_ranks]
    first = job.file(folder, "first.yaml", drawn.first, output="out")
    ended = finish(
        start_faulty_trainer(drawn.first.spec.world_size, first, folder / "out", faults), timeout_seconds=_SECONDS
    )
    allowed = {_STOPPED} if job.end == "terminate" else {-signal.SIGKILL, 1}
    codes = [code for code, _ in ended]
    assert set(codes) <= allowed, f"{job.end} at step {job.end_step}: {codes}: {_last_words(ended)}"
    second = job.file(folder, "second.yaml", drawn.second, output="out")
    rows = _ended_well(drawn.second.spec.world_size, second, folder / "out")
    problems = odds(rows, wanted)
    if not was_gone_on_with(rows):
        problems.append(f"whole job: begun anew, or done at once: attempts {[row['attempt'] for row in rows]}")
    exports = [exported(job, folder, name) for name in ("alone", "out")]
    if exports[0].keys() != exports[1].keys():
        problems.append(f"whole job: it exports {sorted(exports[1])}, one process {sorted(exports[0])}")
    errors = {"own": worst_difference(again, wanted), "job": worst_difference(rows, wanted)}
    return errors | {"export": worst_tensor(*exports)}, problems


def exported(job: WholeJob, folder: Path, output: str) -> dict[str, torch.Tensor]:
    """The tensors of the files that the job's last checkpoint is exported as. Of a whole model AssertionError unless
    transformers finds each of its weights in them."""
    checkpoints = folder / (f"{output}-destination" if "destination" in job.content["checkpoint"] else output)
    place = folder / f"{output}-export"
    export(Export(str(checkpoints), place, **job.exported))
    if job.drawn.adapter is None or job.exported["merge"]:
        _, told = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
        assert not any(told.values()), f"{output}: transformers loads it with {told}"
    found: dict[str, torch.Tensor] = {}
    for path in place.glob("*.safetensors"):
        found |= load_file(path)
    return found


def worst_tensor(wanted: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> float:
    """The norm of the difference, relative to the tensor's own: of those that both have, the worst."""
    worst = 0.0
    for name in wanted.keys() & ours.keys():
        scale = float(wanted[name].double().norm()) or 1.0
        worst = _worse(worst, float((ours[name].double() - wanted[name].double()).norm()) / scale)
    return worst


def _worse(worst: float, error: float) -> float:
    """What is no number, which max() passes over, is worst of all."""
    return max(worst, error) if math.isfinite(error) else math.inf


def _ended_well(world_size: int, job: Path, output_dir: Path) -> list[dict[str, Any]]:
    ended = finish(start_trainer(world_size, job, output_dir), timeout_seconds=_SECONDS)
    assert [code for code, _ in ended] == [0] * world_size, _last_words(ended)
    return rows_of(output_dir)


def _last_words(ended: list[tuple[int, str]]) -> str:
    return "\n".join(f"rank {rank} exited {code}: {text[-1500:]}" for rank, (code, text) in enumerate(ended))


def odds(rows: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> list[str]:
    """What should be exactly the same of a job's rows, and isn't."""
    found = []
    for name in ("step", "tokens"):
        ours, theirs = ([row[name] for row in some] for some in (rows, wanted))
        if ours != theirs:
            found.append(f"whole job: {name}: {ours}, one process {theirs}")
    ours, theirs = ([sorted(_figures(row)) for row in some] for some in (rows, wanted))
    if ours != theirs:
        found.append(f"whole job: figures: {ours}, one process {theirs}")
    return found


def was_gone_on_with(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether the first start's steps are there, and after them the second one's."""
    attempts = [row["attempt"] for row in rows]
    return attempts == sorted(attempts) and set(attempts) == {1, 2}


def worst_difference(rows: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> float:
    """Relative, over the figures that both have of a step."""
    worst = 0.0
    for ours, theirs in zip(map(_figures, rows), map(_figures, wanted), strict=False):
        for name in ours.keys() & theirs.keys():
            worst = _worse(worst, abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 1e-12))
    return worst


def _figures(row: dict[str, Any]) -> dict[str, float]:
    found = {name: row[name] for name in _COMPARED if row.get(name) is not None}
    return found | {name: one["loss"] for name, one in row.get("validation_sets", {}).items()}
