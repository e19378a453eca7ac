"""How fast the trainer is on CPU beside a bare torch loop, Accelerate and Hugging Face's Trainer.

    python benchmarks/trainer_cpu.py                  # 1, 2 and 4 ranks: ratios of tokens per second
    python benchmarks/trainer_cpu.py --overhead       # milliseconds of loop in a step, told on a busy machine too
    python benchmarks/trainer_cpu.py --packing        # useful tokens per second on texts of unequal length

What is compared, and how noise is met: benchmarks/README.md. Writes benchmarks/results/trainer_cpu-MACHINE.json
(--packing: trainer_cpu_packing-MACHINE.json, ...); exits 1 when a goal is missed.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
GOALS = {"bare": 0.98, "trainer": 1.00}
"""Our tokens per second must be at least this many times theirs."""
PACKING_GOAL = 1.5
MARK = "RESULT "

MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""4.2 million parameters: a step of a tenth of a second, in which a millisecond of loop is a whole percent."""

CASES = ((1, "ddp"), (2, "ddp"), (4, "ddp"), (2, "fsdp"), (4, "fsdp"))
"""Ranks and layout. Accelerate and Trainer have no FSDP on CPU: there ours stands beside bare torch alone."""

Result = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; also one rank of it, when --rank-of says so."""
    options = _options(arguments)
    if options.rank_of:
        from trainer_cpu_rank import run_rank

        run_rank(json.loads(options.rank_of), MARK)
        return 0
    import machine

    description = machine.describe()
    print(" ".join(f"{name}={description[name]}" for name in ("cpu", "cores", "load_average_1_minute", "versions")))
    name = "trainer_cpu" + "_packing" * options.packing + "_overhead" * options.overhead
    output = options.output or HERE / "results" / f"{name}-{machine.file_name(description)}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    kind = _packing if options.packing else _overhead if options.overhead else _speed
    for result in kind(options):
        results.append(result)
        description["load_average_1_minute_at_end"] = round(os.getloadavg()[0], 2)
        whole = {"machine": description, "options": _jsonable(options), "model": MODEL, "results": results}
        output.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(f"written: {output}")
    missed = [line for result in results for line in result["missed_goals"]]
    print("\n".join(f"missed: {line}" for line in missed) or "all goals met")
    return 1 if missed else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--packing", action="store_true", help="texts of unequal length, ours packed, Trainer padded")
    parser.add_argument(
        "--overhead", action="store_true", help="steps of 5 ms: what a loop itself costs, on busy machines too"
    )
    parser.add_argument("--ranks", type=int, action="append", help="only these numbers of ranks (repeatable)")
    parser.add_argument("--layout", choices=("ddp", "fsdp"), help="only this layout")
    parser.add_argument("--repeats", type=int, default=3, help="process starts of every case (default 3)")
    parser.add_argument("--rounds", type=int, default=12, help="turns of every contender in one start (default 12)")
    parser.add_argument("--block", type=int, default=4, help="optimizer steps in a turn (default 4)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per optimizer step (default 1)")
    parser.add_argument("--contenders", default="ours,bare,accelerate,trainer", help="comma separated")
    parser.add_argument("--output", type=Path, help="result file")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _jsonable(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name not in ("output", "rank_of")}


def _speed(options: argparse.Namespace) -> Iterator[Result]:
    """One result per case, as soon as it is there."""
    for num_ranks, layout in CASES:
        if (options.ranks and num_ranks not in options.ranks) or (options.layout and layout != options.layout):
            continue
        names = [name for name in options.contenders.split(",") if layout == "ddp" or name in ("ours", "bare")]
        request = {
            "kind": "speed",
            "shape": {
                "model": MODEL,
                "sequence_length": 128,
                "micro_batch_size": 4,
                "num_micro_batches": options.accumulate,
                "layout": layout,
            },
            "names": names,
            "rounds": options.rounds,
            "block": options.block,
        }
        repeats = [start_ranks(num_ranks, request) for _ in range(options.repeats)]
        result = summary(f"{num_ranks} x {layout}", num_ranks, repeats, options.block)
        _print(result)
        yield result


TINY = MODEL | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 320}
REFERENCE_STEP_MILLISECONDS = 170.0
"""A step of MODEL with 4 x 128 tokens on one quiet core of the machine in results/."""


def _overhead(options: argparse.Namespace) -> list[Result]:
    """The fastest step of each loop: a neighbour's load makes steps slower, and never faster.

    What ours has more than theirs is the loop's, because the model's work is the same; as a share of a real step it is
    what the goals of the other benchmark ask for.
    """
    shape = {"model": TINY, "sequence_length": 64, "micro_batch_size": 2, "num_micro_batches": 1, "layout": "ddp"}
    names = options.contenders.split(",")
    request = {"kind": "speed", "shape": shape, "names": names, "rounds": 5 * options.rounds, "block": 8}
    repeats = [start_ranks(1, request) for _ in range(options.repeats)]
    fastest = {name: 1000 * min(min(repeat["step_seconds"][name]) for repeat in repeats) for name in names}
    more = {name: fastest["ours"] - value for name, value in fastest.items() if name != "ours"}
    step = REFERENCE_STEP_MILLISECONDS
    ratios = {name: step / (step + milliseconds) for name, milliseconds in more.items()}
    result = {
        "case": "overhead",
        "fastest_step_milliseconds": {name: round(value, 3) for name, value in fastest.items()},
        "ours_takes_more_milliseconds": {name: round(value, 3) for name, value in more.items()},
        "ours_to_in_a_step_of_170_milliseconds": {name: round(ratio, 4) for name, ratio in ratios.items()},
        "missed_goals": [
            f"overhead: {ratios[name]:.4f} of {name}'s tokens/s, goal {goal}"
            for name, goal in GOALS.items()
            if name in ratios and ratios[name] < goal
        ],
    }
    print(json.dumps(result))
    return [result]


def _packing(options: argparse.Namespace) -> list[Result]:
    """Useful tokens (labels that count) per second: ours packed, Trainer padded to the longest text of a batch."""
    request = {"kind": "packing", "model": MODEL, "rounds": options.rounds, "block": options.block}
    repeats = [start_ranks(1, request) for _ in range(options.repeats)]
    rates: dict[str, list[float]] = {name: [] for name in repeats[0]["useful_tokens_per_second"]}
    for repeat in repeats:
        for name, values in repeat["useful_tokens_per_second"].items():
            rates[name] += values
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = statistics.median(ours / theirs for ours, theirs in zip(rates["ours"], rates["trainer"], strict=True))
    missed = [] if ratio >= PACKING_GOAL else [f"packing: {ratio:.3f} of Trainer's padding, goal {PACKING_GOAL}"]
    result = {
        "case": "packing",
        "texts": repeats[0]["texts"],
        "useful_tokens_per_second": {name: round(value, 1) for name, value in medians.items()},
        "ratio_to_trainer": round(ratio, 3),
        "missed_goals": missed,
    }
    print(f"packing: useful tokens/s {result['useful_tokens_per_second']}, {ratio:.2f} times Trainer's padding")
    return [result]


def start_ranks(num_ranks: int, request: dict[str, Any]) -> Result:
    """Runs a request on fresh processes; rank 0's result."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="trainer-cpu-") as folder:
        text = json.dumps(request | {"folder": folder})
        ranks = []
        for rank in range(num_ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
            more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""}
            environment = os.environ | {name: str(value) for name, value in {**place, **more}.items()}
            command = [sys.executable, str(HERE / "trainer_cpu.py"), "--rank-of", text]
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        try:
            outputs = [rank.communicate()[0] for rank in ranks]
        finally:
            for process in ranks:
                process.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed: exit codes {[rank.returncode for rank in ranks]}")
    found = [line for line in outputs[0].splitlines() if line.startswith(MARK)]
    result: Result = json.loads(found[-1].removeprefix(MARK))
    return result


def summary(case: str, num_ranks: int, repeats: Sequence[Result], block: int) -> Result:
    """Medians and tenth percentiles over all steps of all repeats, and ratios turn by turn."""
    names = list(repeats[0]["step_seconds"])
    cpu = {name: sum(sum(repeat["cpu_seconds"][name]) for repeat in repeats) for name in names}
    tokens = repeats[0]["tokens_per_rank"] * num_ranks
    steps = {name: [s for repeat in repeats for s in repeat["step_seconds"][name]] for name in names}
    turns = {name: np.asarray(values).reshape(-1, block).sum(axis=1) for name, values in steps.items()}
    ratios = {name: float(np.median(turns[name] / turns["ours"])) for name in names if name != "ours"}
    missed = [
        f"{case}: {ratios[name]:.3f} of {name}'s tokens/s, goal {goal}"
        for name, goal in GOALS.items()
        if name in ratios and ratios[name] < goal
    ]
    return {
        "case": case,
        "tokens_per_second": {name: round(tokens / float(np.median(values)), 1) for name, values in steps.items()},
        "step_milliseconds_median": {name: _milliseconds(values, 50) for name, values in steps.items()},
        "step_milliseconds_p10": {name: _milliseconds(values, 10) for name, values in steps.items()},
        "ours_to": {name: round(ratio, 4) for name, ratio in ratios.items()},
        "ours_to_by_processor_time": {name: round(cpu[name] / cpu["ours"], 4) for name in names if name != "ours"},
        "ours_to_by_repeat": [_turn_ratios(repeat, block) for repeat in repeats],
        "worst_weight_difference": max(repeat["worst_weight_difference"] for repeat in repeats),
        "missed_goals": missed,
    }


def _milliseconds(values: Sequence[float], percentile: int) -> float:
    return round(1000 * float(np.percentile(values, percentile)), 2)


def _turn_ratios(repeat: Result, block: int) -> dict[str, float]:
    turns = {name: np.asarray(values).reshape(-1, block).sum(axis=1) for name, values in repeat["step_seconds"].items()}
    return {name: round(float(np.median(turns[name] / turns["ours"])), 4) for name in turns if name != "ours"}


def _print(result: Result) -> None:
    parts = [
        f"{name} {rate:.0f} tokens/s (p10 {result['step_milliseconds_p10'][name]} ms)"
        for name, rate in result["tokens_per_second"].items()
    ]
    by_cpu = result["ours_to_by_processor_time"]
    ratios = ", ".join(
        f"{ratio:.3f} of {name} (processor time {by_cpu[name]:.3f})" for name, ratio in result["ours_to"].items()
    )
    print(f"{result['case']}: {'; '.join(parts)}; ours is {ratios}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
