"""A fault campaign: one job, killed and frozen at random points until the time is up, then compared bit for bit.

    python tests/faults/campaign.py --seconds 300 --seed 7 --layout fsdp --hosts 2

A rank dies or freezes at a random moment of a random step (in the forward or backward pass, in a save, between them);
now and then a whole host's entrypoint is killed, and all hosts are started again, as SageMaker does it. What must hold:
- every start after a fault resumes from a step no older than the newest commit that was told before the fault;
- every step is in metrics.jsonl once, with exactly the loss, gradient norm and tokens of the undisturbed run;
- no process, partial file or staging copy is left.

The exit code is 0 when all of it held.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "trainer")]

from trainer_testing.host import entrypoints, recoveries, write_trees
from trainer_testing.text_job import bits, rows_of, run_trainer, write_job

STEPS = 60
KINDS = ("kill", "kill", "stop", "raise")
_LEAST_FAULTS = 2
_LONGEST_SECONDS = 600.0
_COMMITTED = re.compile(r"checkpoint step=(\d+) committed")
_RESUMED = re.compile(r"resumed step=(\d+)")


@dataclass
class Report:
    """What a campaign saw."""

    num_faults: int = 0
    """Ranks and hosts that were killed or frozen, or that raised."""
    num_starts: int = 0
    """Starts of the ranks, the first included."""
    is_complete: bool = False
    """The job ran to its last step."""
    seconds_to_next_step: list[float] = field(default_factory=list)
    """From each failure that a host survived to the next step."""
    problems: list[str] = field(default_factory=list)
    """What did not hold; empty: all of it."""
    reasons: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """The job is done, and all that must hold does."""
        return self.is_complete and not self.problems

    def table(self) -> str:
        """For people."""
        slowest = max(self.seconds_to_next_step, default=0.0)
        lines = [
            f"faults {self.num_faults}  starts {self.num_starts}  complete {self.is_complete}",
            f"seconds to the next step: at most {slowest:.1f} of {len(self.seconds_to_next_step)}",
            *(f"  {reason}" for reason in self.reasons),
            *(f"PROBLEM: {problem}" for problem in self.problems),
        ]
        return "\n".join(lines)


def campaign(root: Path, *, seconds: float, seed: int, layout: str, num_hosts: int, recover: bool = True) -> Report:
    """Disturb one job for `seconds`, then let it end; what was seen."""
    draw = random.Random(seed)
    job = write_job(root / "job", layout, steps=STEPS)
    every = ["checkpoint.every_steps=3"]
    _, undisturbed = run_trainer(2, job, root / "undisturbed", "--set", every[0])
    overrides = [
        *every,
        f"checkpoint.destination={root}/checkpoints",
        "recovery.hang_seconds=5",
        "recovery.backoff_seconds=0",
        f"recovery.max_restarts={1000 if recover else 0}",
    ]
    trees = write_trees(root / "hosts", job, num_hosts=num_hosts, overrides=overrides)
    until = time.time() + seconds
    report = Report()
    # The first two happen in any case: on a busy machine the time may be up before the first step.
    faults = [
        _fault(draw, step, until if number >= _LEAST_FAULTS else None) for number, step in enumerate(range(4, STEPS, 3))
    ]
    while not report.is_complete and time.time() < until + _LONGEST_SECONDS:
        # About every fourth start of the hosts loses one of them, at a random moment.
        kill_host_at = draw.uniform(6, 25) if draw.random() < 0.5 and time.time() < until - 10 else None
        codes, lines = _run_hosts(trees, faults, kill_host_at, draw)
        report.num_starts += sum("torch.distributed.run" in line and "algo-1:" in line for line in lines)
        report.problems += _lost_commits(lines)
        if kill_host_at is not None and any(code < 0 for code in codes):
            report.num_faults += 1
            report.reasons.append("a host's entrypoint was killed")
            continue
        report.is_complete = codes == [0] * num_hosts
        if not report.is_complete:
            report.problems.append(f"the hosts ended with {codes}: {lines[-1] if lines else 'no word'}")
            break
    rows = [row for tree in trees for row in recoveries(tree)]
    report.seconds_to_next_step = [row["seconds_to_next_step"] for row in rows]
    report.reasons += [row["reason"] for row in rows]
    report.num_faults += len(list((root / "hosts/faults").glob("done-*")))
    if report.is_complete and bits(rows_of(trees[0] / "output/data")) != bits(undisturbed):
        report.problems.append("the losses are not those of the undisturbed run")
    report.problems += _leftovers(root)
    return report


def _fault(draw: random.Random, step: int, until: float | None) -> dict[str, Any]:
    fault: dict[str, Any] = {"rank": draw.randrange(2), "step": step + draw.randrange(3), "kind": draw.choice(KINDS)}
    if until is not None:
        fault["until"] = until
    # An exception belongs to the thread that trains; a signal may come at any moment.
    return fault if fault["kind"] == "raise" else {**fault, "after_seconds": draw.uniform(0, 0.06)}


def _run_hosts(
    trees: Sequence[Path], faults: Sequence[dict[str, Any]], kill_at: float | None, draw: random.Random
) -> tuple[list[int], list[str]]:
    """Exit codes of the hosts, and their lines, in the order in which they were told."""
    lines: list[str] = []
    with entrypoints(trees, faults) as processes:
        readers = [threading.Thread(target=_read, args=(process, lines), daemon=True) for process in processes]
        for reader in readers:
            reader.start()
        deadline = time.monotonic() + _LONGEST_SECONDS
        killing = None if kill_at is None else time.monotonic() + kill_at
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if killing is not None and time.monotonic() > killing:
                draw.choice(processes).kill()
                killing = None
            time.sleep(0.1)
        for reader in readers:
            reader.join(timeout=10)
        return [-9 if process.poll() is None else process.returncode for process in processes], lines


def _read(process: "subprocess.Popen[str]", lines: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip())


def _lost_commits(lines: Sequence[str]) -> list[str]:
    """Resumes from before the newest commit that had been told."""
    newest = 0
    problems = []
    for line in lines:
        if match := _COMMITTED.match(line):
            newest = max(newest, int(match[1]))
        elif (match := _RESUMED.match(line)) and int(match[1]) < newest:
            problems.append(f"step {newest} was committed, and step {match[1]} was resumed")
    return problems


def _leftovers(root: Path) -> list[str]:
    time.sleep(1)
    problems = []
    listing = subprocess.run(["ps", "-A", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    problems += [f"left running: {line.strip()[:120]}" for line in listing.splitlines() if f"{root}/hosts" in line]
    problems += [f"left behind: {path}" for path in (root / "checkpoints").rglob("*partial*")]
    problems += [f"left behind: {path}" for path in (root / "hosts").rglob("staging/*/*")]
    return problems


def main() -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(description="Kill and freeze a job at random points; compare it bit for bit.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults happen")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layout", choices=("ddp", "fsdp", "zero2"), default="ddp")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = campaign(
            Path(folder), seconds=options.seconds, seed=options.seed, layout=options.layout, num_hosts=options.hosts
        )
    print(json.dumps(report.__dict__) if options.json else report.table())
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
