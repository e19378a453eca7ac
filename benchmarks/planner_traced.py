"""How long steps take by what a dry run counts, against published runs of Hugging Face's own layers.

    python benchmarks/planner_traced.py

Three full fine-tunings on two A100 with FSDP and recomputation (fms-acceleration's, in data/planner_unseen.csv): each
is traced as our trainer runs such a job, which has the same layers. No constant is fitted to them. Of Mistral the
window is left out: those runs' attention kernels skip what lies before it, or see that no sequence is longer.
"""

import csv
import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "training_container")]

from trainer.dry_run.trace import trace  # noqa: E402  # after the trainer's folder is on the path

from trainyard.hardware import gpu  # noqa: E402
from trainyard.planner import resolve  # noqa: E402
from trainyard.planner.communication import INFINIBAND, fabric  # noqa: E402
from trainyard.planner.formulas import formulas_of  # noqa: E402
from trainyard.planner.reading import layout_of_resolved  # noqa: E402
from trainyard.planner.traced import traced_step  # noqa: E402
from trainyard.spec.job import JobSpec  # noqa: E402

ROWS = ROOT / "benchmarks" / "data" / "planner_unseen.csv"
SOURCE = "fms-acceleration, tuning (A100)"
YEAR = 2024.9

MODELS: dict[str, dict[str, Any]] = {
    "SantaCoder 1.1B": {
        **{"model_type": "gpt_bigcode", "n_embd": 2048, "n_inner": 8192, "n_layer": 24, "n_head": 16},
        **{"vocab_size": 49280, "multi_query": True, "n_positions": 2048},
    },
    "Mistral 7B": {
        **{"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": None},
    },
    "PowerLM 3B": {
        **{"model_type": "granite", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 40},
        **{"num_attention_heads": 36, "num_key_value_heads": 36, "vocab_size": 49152, "tie_word_embeddings": True},
    },
}
"""As the page names them -> their published sizes."""


def job_of(model: dict[str, Any], request: dict[str, Any]) -> JobSpec:
    """A job of ours like the published run."""
    ranks, size = request["gpus"], request["micro_batch"]
    training = {
        **{"steps": 10, "learning_rate": 1e-4, "precision": "bf16", "activation_checkpointing": request["recompute"]},
        **{"global_batch_size": ranks * size, "micro_batch_size": size},
    }
    data = {"train": [{"path": "unused", "format": "tokens"}], "sequence_length": request["seq"]}
    stated = {"name": "published", "model": {"config": model}, "data": data, "training": training}
    return JobSpec.model_validate(stated | {"parallelism": {"data_shard": ranks}})


def compared(row: dict[str, str]) -> str:
    """The published tokens per second and GPU beside those by trace and by formulas, as a line of Markdown."""
    request = json.loads(row["request"])
    name = row["page_says"].partition(",")[0]
    job = job_of(MODELS[name], request)
    resolved = resolve(job, world_size=request["gpus"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trace(resolved, 0)
    layout = dataclasses.replace(layout_of_resolved(job, resolved), year=YEAR)
    device = gpu(request["gpu"])
    links = fabric(device, 8, 400, INFINIBAND)
    counted = traced_step([found], resolved.parallelism, layout, device, links).total
    reckoned = formulas_of(job).step(layout, device, links).total
    tokens, measured = request["micro_batch"] * request["seq"], float(row["value"])
    cells = [f"{tokens / seconds:,.0f} ({seconds * measured / tokens - 1:+.1%})" for seconds in (counted, reckoned)]
    return f"| {name} | {measured:,.0f} | {cells[0]} | {cells[1]} |"


def main() -> None:
    """Print the table."""
    print(
        "| two A100, full, tokens/s a GPU | measured | by trace (its time's error) | by formulas |\n|---|---|---|---|"
    )
    with ROWS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            request = json.loads(row["request"])
            if row["source"] == SOURCE and request["method"] == "full" and request["gpus"] == 2:
                print(compared(row), flush=True)


if __name__ == "__main__":
    main()
