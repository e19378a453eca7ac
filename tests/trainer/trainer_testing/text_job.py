"""A whole job on text files, run by the real command: for tests of the loop, resumes and errors."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer_testing.distributed import finish
from trainer_testing.pool import ForkedRank, start_pooled

LAYOUTS = {
    "single": "{}",
    "ddp": "{data_replicate: 2}",
    "fsdp": "{data_shard: 2}",
    "zero2": "{engine: deepspeed, data_replicate: 2, zero_stage: 2}",
    "zero3": "{engine: deepspeed, data_replicate: 2, zero_stage: 3}",
    "pipeline": "{pipeline: 2}",
    "tensor": "{tensor: 2}",
    "context": "{context: 2}",
}


def write_job(folder: Path, layout: str, *, name: str = "job.yaml", **training: Any) -> Path:
    """A job file for a folder that holds its texts too. Attention dropout is on: random numbers must go on as well."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, seed in (("train", 1), ("validation", 2)):
        draw = random.Random(seed)
        words = ["to", "train", "a", "model", "you", "need", "some", "text", "and", "time"]
        text = " ".join(draw.choice(words) for _ in range(6000))
        (folder / f"{split}.txt").write_text(text, encoding="utf-8")
    settings = {
        "steps": 9,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "learning_rate": 3e-3,
        "schedule": {"kind": "cosine", "warmup_steps": 2},
        "precision": "fp32",
        "seed": 7,
    } | training
    path = folder / name
    path.write_text(
        f"""
name: tiny
model:
  config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
            num_key_value_heads: 2, attention_dropout: 0.1}}
data:
  train: [{{path: {folder}/train.txt, format: text}}]
  validation: [{{path: {folder}/validation.txt, format: text}}]
  sequence_length: 32
training: {json.dumps(settings)}
parallelism: {LAYOUTS[layout]}
checkpoint: {{every_steps: 4, keep_last: 2}}
""",
        encoding="utf-8",
    )
    return path


def start_trainer(num_ranks: int, job: Path, output_dir: Path, *arguments: str) -> list[ForkedRank]:
    """The real trainer, once a rank."""
    return start_pooled(num_ranks, "trainer", "--job", str(job), "--output-dir", str(output_dir), *arguments)


def start_faulty_trainer(
    num_ranks: int, job: Path, output_dir: Path, faults: Sequence[dict[str, Any]], *arguments: str
) -> list[ForkedRank]:
    """The real trainer, to which `faults` happen at their step: see `trainer_testing.faulty_trainer`."""
    folder = output_dir.parent / f"{output_dir.name}-faults"
    folder.mkdir(exist_ok=True)
    (folder / "faults.json").write_text(json.dumps(list(faults)), encoding="utf-8")
    own = ("--faults", str(folder), "--job", str(job), "--output-dir", str(output_dir))
    return start_pooled(num_ranks, "trainer_testing.faulty_trainer", *own, *arguments)


def run_trainer(
    num_ranks: int, job: Path, output_dir: Path, *arguments: str, expected_code: int = 0
) -> tuple[str, list[dict[str, Any]]]:
    """Rank 0's output and the rows of metrics.jsonl, after every rank exited with `expected_code`.

    Of a failure all ranks' output: what they fail of together is said by the first of them that ends.
    """
    outputs = finish(start_trainer(num_ranks, job, output_dir, *arguments), timeout_seconds=600)
    assert [code for code, _ in outputs] == [expected_code] * num_ranks, "\n".join(text for _, text in outputs)
    said = [text for _, text in outputs]
    return said[0] if expected_code == 0 else "".join(said), rows_of(output_dir)


def read_until(rank: ForkedRank, beginning: str) -> str:
    """What the rank printed, up to a line that begins with `beginning`."""
    seen = []
    for line in rank.stdout:
        seen.append(line)
        if line.startswith(beginning):
            return "".join(seen)
    raise AssertionError(f"no line begins with {beginning!r}:\n" + "".join(seen))


def rows_of(output_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, parsed."""
    path = output_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def bits(rows: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What must be equal bit for bit: everything but times and attempts."""
    numbers = ("loss", "grad_norm", "learning_rate", "validation_loss")
    return [
        (row["step"], row["tokens"], *(float(row[key]).hex() if key in row else None for key in numbers))
        for row in rows
    ]
