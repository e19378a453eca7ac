"""How far the planner's closed forms and the dry run's traces lie apart: the example jobs, and a few layers of others.

    python benchmarks/planner_dry_run.py [NAME ...]           trace these (default: all, 7 to 30 minutes of a core)
    python benchmarks/planner_dry_run.py [NAME ...] --write   put their rows into docs/dry_run.md, between its marks

Needs the trainer's torch (scripts/setup), no GPU. tests/trainer/test_dry_run_agreement.py holds the limits.
"""

import argparse
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "training_container"))

from trainer.dry_run.building import with_configuration  # noqa: E402  # after the trainer's folder is on the path
from trainer.dry_run.trace import trace  # noqa: E402

from trainyard.cli.dry_running import STATE, compared, planned_bytes  # noqa: E402
from trainyard.launch.tracing import known_configuration  # noqa: E402
from trainyard.planner import resolve  # noqa: E402
from trainyard.planner.communication import fabric_of  # noqa: E402
from trainyard.planner.formulas import formulas_of  # noqa: E402
from trainyard.planner.reading import layout_of_resolved, machines_of  # noqa: E402
from trainyard.planner.traced import traced_step  # noqa: E402
from trainyard.planner.traced_plan import ranks_to_trace  # noqa: E402
from trainyard.spec.job import AdapterSpec, JobSpec, load_job  # noqa: E402

PAGE = ROOT / "docs" / "dry_run.md"
BEGIN, END = "<!-- agreement: written by benchmarks/planner_dry_run.py -->", "<!-- end of agreement -->"
TIMES_BEGIN, TIMES_END = "<!-- times: written by benchmarks/planner_dry_run.py --times -->", "<!-- end of times -->"

SEVEN_BILLION: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}
NEOX = {
    "model_type": "gpt_neox",
    "num_hidden_layers": 8,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "vocab_size": 50304,
    "tie_word_embeddings": True,
}
EIGHT_LAYERS = SEVEN_BILLION | {"num_hidden_layers": 8}
GPT2 = {"model_type": "gpt2", "n_embd": 2048, "n_layer": 4, "n_head": 16, "n_positions": 2048, "vocab_size": 50257}
GROUPED = SEVEN_BILLION | {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}

MIXTRAL = {
    "model_type": "mixtral",
    "num_hidden_layers": 4,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
LATENT = {
    "num_hidden_layers": 4,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEEPSEEK_V2_LITE = LATENT | {
    "model_type": "deepseek_v2",
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "vocab_size": 102400,
}
DEEPSEEK_V3 = LATENT | {
    "model_type": "deepseek_v3",
    "intermediate_size": 6144,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 768,
    "vocab_size": 64000,
}


def few_layers(parallelism: dict[str, Any], model: dict[str, Any] = SEVEN_BILLION, **training: Any) -> JobSpec:
    """A few layers of a large model: as dear to trace as a tiny model's, and as large as the formulas are made for."""
    settings = {
        "steps": 10,
        "global_batch_size": 16,
        "micro_batch_size": 1,
        "learning_rate": 1e-4,
        "precision": "bf16",
        "activation_checkpointing": "none",
    }
    spec = {
        "name": "few-layers",
        "model": {"config": model},
        "data": {"train": [{"path": "unused", "format": "text"}], "sequence_length": 2048},
        "training": settings | training,
        "parallelism": parallelism,
    }
    return JobSpec.model_validate(spec)


def adapted(parallelism: dict[str, Any], kind: str, model: dict[str, Any], **training: Any) -> JobSpec:
    """The same with adapters. A job takes them beside a source alone: here its configuration stands for one."""
    job = few_layers(parallelism, model, **training)
    adapter = AdapterSpec.model_validate({"kind": kind, "rank": 16, "alpha": 32, "targets": ["q_proj", "v_proj"]})
    return job.model_copy(update={"model": job.model.model_copy(update={"adapter": adapter})})


@dataclass(frozen=True)
class Case:
    """One rank of one job."""

    words: str
    job: JobSpec
    rank: int
    is_short: bool = False
    """Seconds to trace, not minutes."""


def _cases() -> dict[str, Case]:
    found = {}
    split = {"data_shard": 2, "tensor": 2, "pipeline": 2}
    turns = {**split, "pipeline_schedule": "interleaved_1f1b"}
    selective: dict[str, Any] = {"activation_checkpointing": "selective"}
    small: dict[str, tuple[str, JobSpec, int]] = {
        "fsdp": ("FSDP8", few_layers({"data_shard": 8}), 5),
        "fsdp-selective": ("FSDP8, selective recomputation", few_layers({"data_shard": 8}, **selective), 5),
        "fsdp-full": ("FSDP8, full", few_layers({"data_shard": 8}, activation_checkpointing="full"), 5),
        "fsdp-fp32": ("FSDP8, fp32", few_layers({"data_shard": 8}, precision="fp32"), 0),
        "fsdp-grouped": ("FSDP8, grouped queries, 128,256 words", few_layers({"data_shard": 8}, GROUPED), 0),
        "fsdp-neox": ("FSDP8, GPT-NeoX, 8 layers", few_layers({"data_shard": 8}, NEOX), 0),
        "fsdp-gpt2": ("FSDP8, GPT-2", few_layers({"data_shard": 8}, GPT2), 0),
        "ddp": ("DDP8", few_layers({"data_replicate": 8}), 1),
        "tensor": ("TP4 x FSDP2", few_layers({"data_shard": 2, "tensor": 4}), 3),
        "context": ("CP2 x FSDP4", few_layers({"data_shard": 4, "context": 2}), 1),
        "pipeline-first": ("TP2 x PP2 x FSDP2, 8 layers, first stage", few_layers(split, EIGHT_LAYERS), 0),
        "pipeline-last": ("TP2 x PP2 x FSDP2, 8 layers, last stage", few_layers(split, EIGHT_LAYERS), 7),
        "interleaved": ("the same, GPT-NeoX, interleaved, selective", few_layers(turns, NEOX, **selective), 0),
        "zero-bubble": (
            "PP2 x FSDP4, 8 layers, zero_bubble",
            few_layers({"data_shard": 4, "pipeline": 2, "pipeline_schedule": "zero_bubble"}, EIGHT_LAYERS),
            0,
        ),
    }
    small |= _experts()
    for name, (words, job, rank) in small.items():
        found[name] = Case(words, job, rank, is_short=True)
    jobs = {
        "tiny": (0,),
        "quickstart": (0,),
        "llama-8b-lora": (0,),
        "llama-7b": (0,),
        "gpt2-1.3b": (0,),
        "resnet50-imagenet": (0,),
        "vlm-llava-7b": (0,),
        "llama-70b": (0, 40, 127),
        "gpt-175b": (0, 511),
    }
    for name, ranks in jobs.items():
        for rank in ranks:
            job = load_job(ROOT / "jobs" / f"{name}.yaml")
            found[f"{name}:{rank}"] = Case(f"`jobs/{name}.yaml`, rank {rank}", job, rank, is_short=len(ranks) == 1)
    return found


def _experts() -> dict[str, tuple[str, JobSpec, int]]:
    """Copies of shards, adapters, experts, latent attention: four layers each, of which DeepSeek's first is dense."""
    spread, narrow = {"data_shard": 8, "expert": 4}, {"data_shard": 4, "tensor": 2}
    both = narrow | {"expert": 2}
    selective: dict[str, Any] = {"activation_checkpointing": "selective"}
    full: dict[str, Any] = {"activation_checkpointing": "full"}
    copied = {"data_replicate": 2, "data_shard": 4}
    copied_and_cut = {"data_replicate": 2, "data_shard": 2, "tensor": 2}
    return {
        "hsdp": ("HSDP 2 x 4", few_layers(copied), 5),
        "hsdp-tensor": ("TP2 x HSDP 2 x 2", few_layers(copied_and_cut), 5),
        "lora": ("FSDP8, LoRA", adapted({"data_shard": 8}, "lora", SEVEN_BILLION), 5),
        "qlora": ("FSDP8, QLoRA", adapted({"data_shard": 8}, "qlora", SEVEN_BILLION), 5),
        "qlora-full": ("FSDP8, QLoRA, full", adapted({"data_shard": 8}, "qlora", SEVEN_BILLION, **full), 5),
        "qlora-mixtral": ("FSDP8, QLoRA of Mixtral", adapted({"data_shard": 8}, "qlora", MIXTRAL), 5),
        "lora-tensor": ("TP2 x FSDP4, LoRA", adapted(narrow, "lora", SEVEN_BILLION), 5),
        "qlora-tensor": ("TP2 x FSDP4, QLoRA", adapted(narrow, "qlora", SEVEN_BILLION), 5),
        "mixtral": ("FSDP8, Mixtral", few_layers({"data_shard": 8}, MIXTRAL), 5),
        "mixtral-spread": ("EP4 x FSDP8, Mixtral", few_layers(spread, MIXTRAL), 5),
        "mixtral-alone": ("EP8 x FSDP8, Mixtral", few_layers(spread | {"expert": 8}, MIXTRAL), 5),
        "mixtral-tensor": ("TP2 x EP2 x FSDP4, Mixtral", few_layers(both, MIXTRAL), 5),
        "mixtral-selective": ("EP4 x FSDP8, Mixtral, selective", few_layers(spread, MIXTRAL, **selective), 5),
        "mixtral-full": ("EP4 x FSDP8, Mixtral, full", few_layers(spread, MIXTRAL, **full), 5),
        "qwen3-moe": ("FSDP8, Qwen3-MoE", few_layers({"data_shard": 8}, QWEN3_MOE), 5),
        "qwen3-moe-spread": ("EP8 x FSDP8, Qwen3-MoE", few_layers(spread | {"expert": 8}, QWEN3_MOE), 5),
        "deepseek-v2": ("EP4 x FSDP8, DeepSeek-V2-Lite", few_layers(spread, DEEPSEEK_V2_LITE), 5),
        "deepseek-v3": ("FSDP8, DeepSeek-V3's kind", few_layers({"data_shard": 8}, DEEPSEEK_V3), 5),
        "deepseek-v3-spread": ("EP4 x FSDP8, DeepSeek-V3's kind", few_layers(spread, DEEPSEEK_V3), 5),
        "deepseek-v3-tensor": ("TP2 x EP2 x FSDP4, DeepSeek-V3's kind", few_layers(both, DEEPSEEK_V3), 5),
        "deepseek-v3-full": ("EP4 x FSDP8, DeepSeek-V3's kind, full", few_layers(spread, DEEPSEEK_V3, **full), 5),
    }


CASES = _cases()
"""By name; jobs are NAME:RANK."""


ACTIVATIONS, SAME_PEAK = 0.10, 0.04
"""Activations agree within the one; of moments that need the same but for the other, either may be the peak."""


@dataclass(frozen=True)
class Agreement:
    """Bytes by trace and by formulas. None: not traced."""

    traced: dict[str, int | None]
    planned: dict[str, float]

    @property
    def static(self) -> float | None:
        """By how much the formulas' parameters, gradients and optimizer are off together; None: not traced."""
        values = [self.traced[name] for name in STATE]
        if None in values:
            return None
        return sum(self.planned[name] for name in STATE) / sum(value or 0 for value in values) - 1

    @property
    def activations(self) -> float:
        """By how much the formulas' activations, loss included, are off."""
        assert self.traced["activations"]
        return self.planned["activations"] / self.traced["activations"] - 1

    @property
    def beside_state(self) -> tuple[int, float]:
        """All that is there at the peak but the state, by trace and by formulas."""
        traced = sum(self.traced.get(name) or 0 for name in ("activations", "buffers"))
        return traced, self.planned["activations"] + self.planned["buffers"]

    @property
    def is_of_two_moments(self) -> bool:
        """Whether two moments of the step need the same, and the trace's peak is one, the formulas' the other."""
        traced, planned = self.beside_state
        return abs(self.activations) >= ACTIVATIONS and abs(planned / traced - 1) < SAME_PEAK


def agreement(case: Case) -> Agreement:
    """The case, traced and reckoned."""
    stated = case.job.parallelism
    resolved = resolve(case.job, world_size=None if isinstance(stated, str) else stated.world_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trace(with_configuration(resolved, known_configuration(case.job)), case.rank)
    planned = planned_bytes(case.job, resolved, case.rank)
    assert planned is not None
    return Agreement(compared(found), planned)


def table(names: list[str]) -> str:
    """The cases as Markdown."""
    lines = [
        "| rank | state: trace, formulas | activations: trace, formulas | buffers: trace, formulas |",
        "|---|---|---|---|",
    ]
    for name in names:
        found = agreement(CASES[name])
        state = [found.traced[part] for part in STATE]
        total = None if None in state else sum(value or 0 for value in state)
        cells = [
            _cell(total, sum(found.planned[part] for part in STATE)),
            _cell(found.traced["activations"], found.planned["activations"]),
            _cell(found.traced["buffers"], found.planned["buffers"]),
        ]
        if found.is_of_two_moments:
            cells[1:] = [f"two moments alike: {_cell(*found.beside_state)}", "with these"]
        lines.append(f"| {CASES[name].words} | {' | '.join(cells)} |")
    return "\n".join(lines)


TIMED = ("llama-8b-lora", "llama-7b", "llama-70b", "gpt-175b")
"""Jobs whose step is reckoned in seconds, too."""


def times_table() -> str:
    """The step of each of `TIMED` by formulas and by the trace of its pipeline's first and last ranks, as Markdown."""
    lines = ["| job | a step: trace, formulas | forward and backward | the rest |", "|---|---|---|---|"]
    for name in TIMED:
        job = load_job(ROOT / "jobs" / f"{name}.yaml")
        resolved, machine = resolve(job), machines_of(job).instance
        assert machine is not None and machine.gpu is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            known = with_configuration(resolved, known_configuration(job))
            traces = [trace(known, rank) for rank in ranks_to_trace(resolved)]
        layout, links = layout_of_resolved(job, resolved), fabric_of(machine)
        counted = traced_step(traces, resolved.parallelism, layout, machine.gpu, links)
        reckoned = formulas_of(job).step(layout, machine.gpu, links)
        computing = [step.forward + step.backward + step.recompute for step in (counted, reckoned)]
        others = [step.total - part for step, part in zip((counted, reckoned), computing, strict=True)]
        cells = [_seconds(counted.total, reckoned.total), _seconds(*computing), _seconds(*others)]
        lines.append(f"| `jobs/{name}.yaml`, {layout.words()} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _seconds(traced: float, planned: float) -> str:
    return f"{traced:.3g}, {planned:.3g} s ({planned / traced - 1:+.0%})"


def merged(there: str, written: str) -> str:
    """The page's table with the rows that were written now in their places; what has no place yet comes last.

    Rows of no case that is left are dropped.
    """
    rows = {_name(line): line for line in [*there.splitlines(), *written.splitlines()] if line.startswith("|")}
    order = [*rows][:2] + [case.words for case in CASES.values() if case.words in rows]
    return "\n".join(rows[name] for name in order)


def _name(line: str) -> str:
    """A row's first cell."""
    return line.split("|")[1].strip()


def _cell(traced: int | None, planned: float) -> str:
    if traced is None:
        return "not traced"
    difference = f" ({planned / traced - 1:+.1%})" if traced > 2**20 else ""
    return f"{traced / 2**20:,.0f}, {planned / 2**20:,.0f} MiB{difference}"


def main() -> None:
    """Print, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--times", action="store_true", help="the table of seconds, not that of bytes")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(CASES)):
        parser.error(f"no such case: {', '.join(unknown)}")
    written = times_table() if options.times else table(options.names or list(CASES))
    if not options.write:
        print(written)
        return
    begin, end = (TIMES_BEGIN, TIMES_END) if options.times else (BEGIN, END)
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    there, after = rest.split(end)
    made = written if options.times else merged(there, written)
    PAGE.write_text(f"{before}{begin}\n{made}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
