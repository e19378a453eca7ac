"""How long the planner takes: one estimate warm, a plan, a search; on one core.

    python benchmarks/planner_speed.py [--repeat N]

Goals: an estimate under 50 ms, a search under 10 s of one core. Prints a table of processor seconds, which others on
the machine change little; the shipped prices are quoted at any age.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from trainyard.hardware import PriceBook
from trainyard.planner import plan, predict, search
from trainyard.spec.job import load_job

JOBS = Path(__file__).resolve().parents[1] / "jobs"
QUESTION = {"model": "llama-3.1-70b", "gpu": "H100", "gpus": 128, "tp": 8, "pp": 4, "global_batch": 512, "seq": 4096}


def median_seconds(work: Callable[[], object], repeat: int) -> float:
    """The median processor time of `repeat` runs, after one that isn't counted."""
    work()
    times = []
    for _ in range(repeat):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return statistics.median(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args().repeat
    book = PriceBook.opened(today=None)
    print("| what | job | processor seconds |\n|---|---|---|")
    print(f"| one estimate | TP8 x PP4 of a 70B | {median_seconds(lambda: predict(QUESTION), 20 * repeat):.4f} |")
    for name in ("llama-7b", "llama-70b", "gpt-175b", "llama-8b-lora"):
        job = load_job(JOBS / f"{name}.yaml")
        found = search(job, book=book)
        words = f"{found.num_layouts:,} layouts, {len(found.options)} machines, {found.num_estimates:,} estimates"
        print(f"| plan | {name} | {median_seconds(lambda job=job: plan(job, book=book), repeat):.3f} |")
        print(f"| search ({words}) | {name} | {median_seconds(lambda job=job: search(job, book=book), repeat):.2f} |")


if __name__ == "__main__":
    main()
