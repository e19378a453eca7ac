"""The worked examples of docs/planner.md, computed: what the planner says beside what textbooks say.

    python benchmarks/planner_examples.py            print the table
    python benchmarks/planner_examples.py --write    put it into docs/planner.md, between its marks

A test holds the page to what this prints.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainyard.hardware import PriceBook, gpu, instance
from trainyard.planner import plan, predict
from trainyard.planner.communication import EFA, Fabric, all_reduce_seconds, fabric_of, group
from trainyard.planner.constants import GIB
from trainyard.planner.families import shape_of_known
from trainyard.planner.known_models import KNOWN_CONFIGS
from trainyard.planner.layout import Layout
from trainyard.planner.results import Plan
from trainyard.planner.timing import step_time
from trainyard.planner.vision_language import CLIP_LARGE
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec, load_job

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "planner.md"
BEGIN, END = "<!-- examples: written by benchmarks/planner_examples.py -->", "<!-- end of examples -->"

SCALING_GPUS = (8, 32, 64, 256, 1024)
TEXTBOOK_SCALING = "90/84/80/70/60%"

Row = tuple[str, str, str]
"""(example, here, textbook)."""

IMAGES = {"train": [{"path": "tenant://images", "format": "webdataset"}]}
RESNET = {
    "name": "resnet",
    "task": "image_classification",
    "model": {"config": {"model_type": "resnet", "num_labels": 1000}},
    "data": IMAGES,
    "images": {"decode_threads": 16},
    "training": {
        "steps": 56_300,
        "global_batch_size": 1024,
        "micro_batch_size": 256,
        "learning_rate": 0.1,
        "optimizer": {"kind": "sgd"},
    },
    "parallelism": {"data_replicate": 4},
    "compute": {"backend": "sagemaker", "instance_type": "ml.p5.4xlarge", "instance_count": 4},
}
"""90 epochs of ImageNet in batches of 1,024."""

QWEN_2B = KNOWN_CONFIGS["qwen2.5-1.5b"]
MULTI_MODAL = {
    "name": "vlm-2b",
    "task": "vision_language",
    "model": {"config": {"model_type": "llava", "text_config": QWEN_2B, "vision_config": CLIP_LARGE}},
    "data": {**IMAGES, "sequence_length": 2048, "packing": False},
    "training": {
        "steps": 10_000,
        "global_batch_size": 512,
        "micro_batch_size": 4,
        "activation_checkpointing": "none",
        "learning_rate": 2e-5,
    },
    "parallelism": {"data_replicate": 8, "data_shard": 8},
    "compute": {"backend": "sagemaker", "instance_type": "ml.p5.48xlarge", "instance_count": 8},
}
"""CLIP ViT-L/14, trained, and a Qwen2 of 1.5B."""


def _plan(job: JobSpec) -> Plan:
    return plan(job, book=PriceBook.opened(today=None))


def _planned(found: Plan) -> str:
    time, cost = found.chosen.time, found.cost
    assert time is not None
    words = f"{time.step_seconds:.3g} s, MFU {time.mfu:.0%}"
    words += f", {time.tokens_per_second / found.num_gpus:,.0f} {found.unit}/s a GPU"
    memory = found.chosen.memory
    state = memory.parameters_gib + memory.gradients_gib + memory.optimizer_gib
    words += f"; {memory.total_gib:.0f} GiB at the peak, {state:.3g} of them state"
    if cost is not None and cost.planned_usd is not None:
        words += f"; {cost.expected_hours:.3g} h ({cost.expected_hours_low:.3g} to {cost.expected_hours_high:.3g})"
        words += f", ${cost.planned_usd:,.0f}"
    return words


def _textbook(found: Plan, each: str, bytes_per_param: float) -> str:
    """Of a decoder: ZeRO's state (Rajbhandari et al., 2020, section 3.1), and six FLOPs a parameter and token."""
    time = found.chosen.time
    assert time is not None and found.steps is not None and found.gpu is not None
    state = bytes_per_param * found.params / GIB
    tokens = time.tokens_per_second * time.step_seconds * found.steps
    peak = found.num_gpus * gpu(found.gpu).peak_tflops("bf16") * 1e12
    least, most = (6 * found.params * tokens / (share * peak) / 3600 for share in (0.5, 0.4))
    hours = f"6 FLOPs a parameter and token at 50 to 40% MFU: {least:.3g} to {most:.3g} h"
    return f"state, {each} a parameter: {state:.3g} GiB; {hours}"


def _collectives() -> Iterator[Row]:
    device, bytes_ = gpu("H100"), 14e9
    inside = all_reduce_seconds(bytes_, group(8, 1, 8), Fabric(8, device.link_gb_per_second, 400.0, EFA))
    # One GPU of each of eight nodes, each with its own card of 400 Gb/s.
    across = all_reduce_seconds(bytes_, group(8, 1, 1), Fabric(1, device.link_gb_per_second, 50.0, EFA))
    yield (
        "all-reduce of 14 GB, 8 H100 on NVLink",
        f"{1000 * inside:.0f} ms",
        "41 ms: 14 GB over 600 GB/s less 1/8 each way; NCCL gets 444 GB/s of bus",
    )
    yield (
        "the same, 8 H100 in 8 nodes at 400 Gb/s a GPU",
        f"{1000 * across:.0f} ms",
        "560 ms: without the 1/8 saved, at the full rate",
    )


def _jobs() -> Iterator[Row]:
    named = {
        "llama-70b": ("TP8 x PP4 x FSDP4 on 16 p5.48xlarge, batch 512 x 4096", "16 bytes over 128", 16 / 128),
        "llama-7b": ("FSDP8 on one p5.48xlarge, batch 256 x 4096", "16 bytes over 8", 16 / 8),
        "gpt2-1.3b": ("ZeRO-1 on one p4d.24xlarge, batch 512 x 1024", "4 bytes, and 12 over 8", 4 + 12 / 8),
        "gpt-175b": ("TP8 x PP8x2 x FSDP8 on 64 p5.48xlarge, batch 1536 x 2048", "16 bytes over 512", 16 / 512),
    }
    for name, (words, each, bytes_) in named.items():
        found = _plan(load_job(ROOT / "jobs" / f"{name}.yaml"))
        yield f"`{name}`: {words}", _planned(found), _textbook(found, each, bytes_)
    found = _plan(parse(JobSpec, MULTI_MODAL, "example"))
    words = "2B multi-modal (CLIP ViT-L and Qwen2-1.5B, all trained) on 64 H100, batch 512 x 2048"
    yield words, _planned(found), _textbook(found, "16 bytes over 8", 16 / 8)
    yield (
        "ResNet-50, 90 epochs of ImageNet on 4 H100 (p5.4xlarge), batch 1024",
        _planned(_plan(parse(JobSpec, RESNET, "example"))),
        "4.1 billion multiply-adds an image forward, three times that a step",
    )


def _days(question: dict[str, Any]) -> float:
    found = predict({"model": "llama-2-7b", "seq": 4096, "global_batch": 1024, **question})
    return float(1e12 / (found["tokens_per_second_per_gpu"] * question["gpus"]) / 86400)


def _trillion() -> Iterator[Row]:
    frameworks = {"Megatron-Core": "Megatron-Core 2025-06", "torch": "torchtitan 2025-06"}
    for machine, device, gpus, textbook in (
        ("p4de.24xlarge", "A100-80GB", 64, "6 x 7e9 x 1e12 FLOPs at 50% MFU: 49 days"),
        ("p5.48xlarge", "H100", 512, "at 40% MFU: 2.4 days"),
    ):
        question = {"gpu": device, "gpus": gpus, "interconnect": machine, "sharding": "zero3"}
        days = {name: _days({**question, "framework": framework}) for name, framework in frameworks.items()}
        words = ", ".join(f"{value:.3g} days ({name})" for name, value in days.items())
        yield f"1T tokens of a 7B on {gpus} {device} ({machine})", words, textbook


def _scaling() -> Iterator[Row]:
    shape, machine = shape_of_known("llama-2-7b"), instance("p5.48xlarge")
    assert machine.gpu is not None
    shares = []
    for gpus in SCALING_GPUS:
        layout = Layout(data_parallel=gpus, zero_stage=3, shard_degree=gpus, sequence_length=4096, recompute="full")
        time = step_time(shape, layout, machine.gpu, fabric_of(machine))
        shares.append((time.forward + time.backward + time.recompute + time.optimizer) / time.total)
    words = "/".join(f"{100 * share:.0f}" for share in shares)
    sizes = "/".join(str(gpus) for gpus in SCALING_GPUS)
    yield f"weak scaling of the 7B, one sequence of 4096 a GPU, at {sizes} H100", f"{words}%", TEXTBOOK_SCALING


def table() -> str:
    """The examples as Markdown."""
    rows = [*_collectives(), *_jobs(), *_trillion(), *_scaling()]
    lines = ["| example | here | textbook |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def between_marks(page: str) -> str:
    """What the page says between its marks."""
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    """Print, or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if not parser.parse_args().write:
        print(table())
        return
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
