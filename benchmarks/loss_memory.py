"""The loss in chunks against the loss from whole logits: memory and time of one head, forward and backward.

`python benchmarks/loss_memory.py [--tokens 4096] [--vocabulary 32000] [--hidden 512] [--dtype fp32] [--device cpu]`.

Both ways compute the same numbers from the same hidden states. Times: both in one process, taking turns, the median of
all turns; on CPU in processor time, with one thread. Memory on CPU: the peak resident size of a process of its own that
runs one way, less what it had before; on a GPU: torch's own count. Prints one JSON object.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training_container"))

from trainer.losses.linear import CHUNK_TOKENS, linear_loss_sum
from trainer.losses.token_loss import target_loss_sum

WAYS = ("logits", "chunked")
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def step_of(way: str, arguments: argparse.Namespace) -> Callable[[], float]:
    """One forward and backward pass through a head of its own; returns the loss."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"dtype": TYPES[arguments.dtype], "device": arguments.device}
    head = nn.Linear(arguments.hidden, arguments.vocabulary, bias=False, **settings)
    hidden = torch.randn(1, arguments.tokens, arguments.hidden, **settings).requires_grad_()
    targets = torch.randint(0, arguments.vocabulary, (1, arguments.tokens), device=arguments.device)

    def step() -> float:
        head.zero_grad()
        hidden.grad = None
        if way == "chunked":
            loss = linear_loss_sum(hidden, head.weight, None, targets)
        else:
            loss = target_loss_sum(head(hidden), targets)
        (loss / arguments.tokens).backward()
        return loss.item()

    return step


def seconds(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Each way's steps, taking turns."""
    steps = {way: step_of(way, arguments) for way in WAYS}
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    # A CPU's own time: what neighbours do to the clock is not the loss's. A GPU works on while Python waits.
    clock = time.process_time if arguments.device == "cpu" else time.perf_counter
    for turn in range(arguments.repeats + 1):
        for way in WAYS if turn % 2 else reversed(WAYS):
            started = clock()
            steps[way]()  # .item() waits for a GPU
            if turn:  # the first is warm-up
                found[way].append(clock() - started)
    return found


def peak_mib(way: str, arguments: argparse.Namespace) -> float:
    """What one way takes beyond head, hidden states and targets, in MiB."""
    step = step_of(way, arguments)
    if arguments.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    # Not getrusage's peak: a process inherits that of the one that started it.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_kib("VmRSS")
    step()
    return (memory_kib("VmHWM") - before) / 2**10


def memory_kib(field: str) -> int:
    """VmRSS, what is resident now, or VmHWM, the most since clear_refs."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def peak_elsewhere(way: str) -> float:
    """The same in a process of its own: a peak never falls again."""
    command = [sys.executable, __file__, *sys.argv[1:], "--peak", way]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 4096), ("vocabulary", 32000), ("hidden", 512), ("repeats", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=sorted(TYPES), default="fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peak", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        print(peak_mib(arguments.peak, arguments))
        return 0
    medians = {way: statistics.median(values) for way, values in seconds(arguments).items()}
    peaks = {way: peak_elsewhere(way) for way in WAYS}
    result = {
        "machine": describe(),
        "settings": vars(arguments) | {"chunk_tokens": CHUNK_TOKENS},
        "logits_mib": arguments.tokens * arguments.vocabulary * TYPES[arguments.dtype].itemsize / 2**20,
        "peak_mib": {way: round(value, 1) for way, value in peaks.items()},
        "seconds": {way: round(value, 4) for way, value in medians.items()},
        "chunked_speed_of_logits": round(medians["logits"] / medians["chunked"], 3),
        "chunked_memory_of_logits": round(peaks["chunked"] / peaks["logits"], 3),
    }
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
