"""How fast the trainer is on one GPU beside Hugging Face's Trainer, with the device's ceiling measured in the same run.

    python benchmarks/trainer_gpu.py                  # everything, within 10 minutes
    python benchmarks/trainer_gpu.py --case 1b-full   # one case
    python benchmarks/trainer_gpu.py --tiny           # the same way on a CPU, tiny models, fp8 emulated: a test of this

Llama-3.2-1B and 3B full and Llama-3.1-8B LoRA, sequences of 4096, bf16 and fp8, random weights. Every run is a process
of its own and contenders alternate: ours, Trainer, Trainer, ours, ... for as many rounds as --minutes allows. What is
compared and the goals: benchmarks/README.md. Writes benchmarks/results/trainer_gpu-MACHINE.json; exits 1 when a goal is
missed or a run failed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MARK = "RESULT "
SEQUENCE_LENGTH = 4096
WARM_UP_STEPS, MEASURED_STEPS = 3, 8
SECONDS_A_RUN = 150.0
"""A run that takes longer is killed and reported as failed."""

_LLAMA_3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
SHAPES: dict[str, dict[str, Any]] = {
    # As on the models' cards, but for the rotary scaling of long contexts, which costs no time.
    "1b": _LLAMA_3
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "3b": _LLAMA_3
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "8b": _LLAMA_3
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Case:
    """One training that both contenders do."""

    model: str
    method: str
    """full or lora."""
    micro_batch_size: int
    num_micro_batches: int
    goal: float
    """Our tokens per second in bf16 on one H200: benchmarks/README.md says where it comes from."""

    @property
    def name(self) -> str:
        """As --case takes it."""
        return f"{self.model}-{self.method}"


CASES = (
    Case("1b", "full", micro_batch_size=4, num_micro_batches=4, goal=50_000),
    Case("3b", "full", micro_batch_size=2, num_micro_batches=4, goal=19_500),
    Case("8b", "lora", micro_batch_size=2, num_micro_batches=4, goal=12_500),
)
RUNS = (("ours", "bf16"), ("trainer", "bf16"), ("ours", "fp8"))
"""Contender and precision; Trainer has no fp8 of its own. fp8 runs compiled: hold it against bf16 under --compile."""

Result = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; also one measured process, when --child says so."""
    options = _options(arguments)
    if options.child:
        from trainer_gpu_run import run_child

        run_child(json.loads(options.child), MARK)
        return 0
    started = time.monotonic()
    import machine

    description = machine.describe()
    print(json.dumps(description))
    if description["gpu"] is None and not options.tiny:
        print("trainer_gpu: there is no GPU here; --tiny goes the same way on a CPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="trainer-gpu-", dir=options.scratch) as folder:
        cases = [case for case in CASES if not options.case or case.name in options.case]
        runs, ceiling = _measure(cases, options, Path(folder), started + 60 * options.minutes)
    results = [summary(case, runs, ceiling, is_tiny=options.tiny) for case in cases]
    for result in results:
        _print(result)
    name = f"trainer_gpu{'_tiny' if options.tiny else ''}-{machine.file_name(description)}.json"
    output = options.output or HERE / "results" / name
    output.parent.mkdir(parents=True, exist_ok=True)
    whole = {
        "machine": description,
        "seconds": round(time.monotonic() - started, 1),
        "matmul_ceiling_tflops": ceiling,
        "sequence_length": 64 if options.tiny else SEQUENCE_LENGTH,
        "compile": options.compile,
        "emulates_fp8": options.tiny,
        "results": results,
    }
    output.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(f"written: {output}")
    return 0 if all(result["passed"] is not False and not result["failed"] for result in results) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--minutes", type=float, default=9.0, help="no run begins that would end later (default 9)")
    parser.add_argument("--rounds", type=int, default=2, help="times that every contender runs (default 2)")
    parser.add_argument("--compile", action="store_true", help="torch.compile, for both contenders")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on whatever there is, in one process")
    parser.add_argument("--scratch", type=Path, help="folder on a disk with 30 GB free (default: the system's)")
    parser.add_argument("--output", type=Path, help="result file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _measure(
    cases: Sequence[Case], options: argparse.Namespace, folder: Path, deadline: float
) -> tuple[list[Result], dict[str, float]]:
    """Every run's result, and what matrix products reach on the device, by precision."""
    if options.tiny:
        orders = (RUNS, tuple(reversed(RUNS[:2])))
        requests = [_request(case, run, options, folder) for case in cases for order in orders for run in order]
        answers = _child([{"kind": "ceiling", "size": 256}, *requests], timeout_seconds=600, threads=1)
        return answers[1:], answers[0]["tflops"]
    ceiling = _child([{"kind": "ceiling", "size": 8192}], timeout_seconds=120)[0].get("tflops", {})
    runs: list[Result] = []
    for number in range(options.rounds):
        for case in cases:
            # fp8 once is enough of a look; the contenders' order turns around from round to round.
            order = RUNS if number == 0 else tuple(reversed(RUNS[:2]))
            for run in order:
                if time.monotonic() + SECONDS_A_RUN / 2 > deadline:
                    print(f"no time left for {case.name} {' '.join(run)} (round {number + 1})", flush=True)
                    continue
                request = _request(case, run, options, folder)
                runs += _child([request], timeout_seconds=min(SECONDS_A_RUN, deadline + 60 - time.monotonic()))
                print(json.dumps(runs[-1]), flush=True)
    return runs, ceiling


def _request(case: Case, run: tuple[str, str], options: argparse.Namespace, folder: Path) -> Result:
    contender, precision = run
    shape = dict(SHAPES[case.model])
    if options.tiny:
        shape |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        shape |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}
    return {
        "kind": "train",
        "case": case.name,
        "method": case.method,
        "contender": contender,
        "precision": precision,
        "model": shape,
        "weights": str(folder / f"weights-{case.model}"),
        "folder": str(folder),
        "sequence_length": 64 if options.tiny else SEQUENCE_LENGTH,
        "micro_batch_size": 2 if options.tiny else case.micro_batch_size,
        "num_micro_batches": 2 if options.tiny else case.num_micro_batches,
        "warm_up_steps": WARM_UP_STEPS,
        "measured_steps": 2 * MEASURED_STEPS if options.tiny else MEASURED_STEPS,
        # What fp8 scales by is found in passes over memory that pay only where a compiler fuses them.
        "compile": options.compile or (precision == "fp8" and not options.tiny),
        "emulates_fp8": options.tiny,
    }


def _child(requests: Sequence[Result], *, timeout_seconds: float, threads: int = os.cpu_count() or 1) -> list[Result]:
    """The requests' answers from a fresh process; {"failed": why} for those it did not live to answer.

    `threads`: on CPU. Several wait for each other in every operation, which on a machine that does other work takes up
    to a hundred times what they compute.
    """
    command = [sys.executable, str(HERE / "trainer_gpu.py"), "--child", json.dumps(requests)]
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": str(threads)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_seconds)
        output, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        output, errors = "", f"killed after {timeout_seconds:.0f} seconds"
    answers: list[Result] = [
        json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)
    ]
    reason = errors.strip().splitlines()[-1] if errors.strip() else "the process ended without a word"
    names = ("case", "contender", "precision")
    for request in requests[len(answers) :]:
        answers.append({name: request[name] for name in names if name in request} | {"failed": reason})
    return answers


def summary(case: Case, runs: Sequence[Result], ceiling: dict[str, float], *, is_tiny: bool) -> Result:
    """What the runs of a case say together. `passed` is None where there was nothing to hold the goal against."""
    mine = [run for run in runs if run.get("case") == case.name]
    good = [run for run in mine if "tokens_per_second" in run]
    rates = {
        f"{contender} {precision}": [run["tokens_per_second"] for run in good if _is_of(run, contender, precision)]
        for contender, precision in RUNS
    }
    medians = {name: round(statistics.median(values), 1) for name, values in rates.items() if values}
    ours = medians.get("ours bf16")
    result: Result = {
        "case": case.name,
        "goal_tokens_per_second": case.goal,
        "passed": None if is_tiny or ours is None else ours >= case.goal,
        "tokens_per_second": medians,
        "runs": {name: values for name, values in rates.items() if values},
        "ours_to_trainer": round(ours / medians["trainer bf16"], 3) if ours and "trainer bf16" in medians else None,
        "ours_to_trainer_by_processor_time": _processor_ratio(good) if is_tiny else None,
        "skipped": sorted(
            {f"{run['contender']} {run['precision']}: {run['skipped']}" for run in mine if "skipped" in run}
        ),
        "failed": [f"{run['contender']} {run['precision']}: {run['failed']}" for run in mine if "failed" in run],
    }
    for name in ("peak_memory_gib", "predicted_peak_memory_gib", "micro_batch_size", "num_micro_batches", "loss"):
        result[name] = {f"{run['contender']} {run['precision']}": run[name] for run in good if name in run}
    if good and ours is not None:
        result |= utilization(ours, good[0]["flops_per_token"], ceiling.get("bf16"))
    return result


def _processor_ratio(runs: Sequence[Result]) -> float | None:
    """How many steps ours makes in Trainer's processor time for one: what a neighbour's load changes least."""
    seconds = {
        contender: [run["processor_seconds"] for run in runs if _is_of(run, contender, "bf16")]
        for contender in ("ours", "trainer")
    }
    if not all(seconds.values()):
        return None
    return round(statistics.median(seconds["trainer"]) / statistics.median(seconds["ours"]), 3)


def _is_of(run: Result, contender: str, precision: str) -> bool:
    return bool(run["contender"] == contender and run["precision"] == precision)


def utilization(rate: float, flops: dict[str, float], ceiling: float | None) -> Result:
    """Both conventions of MFU of `rate` tokens/s against the measured ceiling (TFLOP/s)."""
    reached = {convention: rate * number / 1e12 for convention, number in flops.items()}
    return {
        "model_tflops": {name: round(value, 3) for name, value in reached.items()},
        "share_of_measured_ceiling": {name: round(value / ceiling, 4) for name, value in reached.items()}
        if ceiling
        else None,
    }


def _print(result: Result) -> None:
    verdict = {None: "not measured", True: "pass", False: "MISSED"}[result["passed"]]
    print(
        f"{result['case']}: {result['tokens_per_second']} tokens/s, goal {result['goal_tokens_per_second']:.0f}:"
        f" {verdict}; {result['ours_to_trainer']} times Trainer; peak GiB {result['peak_memory_gib']}"
        f" (predicted {result['predicted_peak_memory_gib']})"
    )
    if result["ours_to_trainer_by_processor_time"] is not None:
        print(f"  by processor time {result['ours_to_trainer_by_processor_time']} times Trainer")
    for line in (*result["skipped"], *result["failed"]):
        print(f"  {line}")


if __name__ == "__main__":
    sys.exit(main())
