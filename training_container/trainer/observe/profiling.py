"""A look inside of a running job, when somebody asks: torch's profiler, and what collectives are under way.

    echo 3 > OUTPUT_DIR/profile_me        # the next three steps, on the first rank of every host
    echo 3 all > OUTPUT_DIR/profile_me    # on all ranks
    kill -s RTMIN PID                     # of any one rank: the same as `echo 3`

All ranks begin with the same step. Each writes OUTPUT_DIR/profiles/step-N/rank-R.json (open it in Perfetto or
chrome://tracing), and every rank rank-R-collectives.json, torch's flight recorder (`trainer.observe.flight_recorder`):
its newest collectives with their sizes and states. The time that writing takes is in no row.
"""

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.observe.flight_recorder import flight_record
from trainer.runtime import Runtime
from trainer.speech import say

REQUEST_FILE = "profile_me"
DEFAULT_STEPS = 3
MOST_STEPS = 100
NUM_VOTES = 3
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    num_steps: int
    on_all_ranks: bool


def parse_request(text: str) -> Request:
    """`3`, `3 all`, `all` or nothing; what can't be read counts as the default: somebody wants to see something."""
    words = text.split()
    numbers = [int(word) for word in words if word.isdecimal()]
    return Request(min(max(1, numbers[0] if numbers else DEFAULT_STEPS), MOST_STEPS), "all" in words)


class Profiling:
    """Hears requests on any host, begins on all ranks together, writes and goes on."""

    def __init__(self, runtime: Runtime, output_dir: Path) -> None:
        self._runtime = runtime
        self._output_dir = output_dir
        self._asked_by_signal = False
        self._next_poll = 0.0
        self._profiler: torch.profiler.profile | None = None
        self._first_step = self._last_step = 0
        self._previous = signal.signal(signal.SIGRTMIN, self._note)

    def _note(self, *_: object) -> None:
        self._asked_by_signal = True

    def votes(self) -> list[float]:
        """NUM_VOTES numbers that, summed over all ranks, `after_step` understands; zeros where nobody asks."""
        request = self._request()
        return [0.0] * NUM_VOTES if request is None else [1.0, float(request.num_steps), float(request.on_all_ranks)]

    def _request(self) -> Request | None:
        if self._asked_by_signal:
            self._asked_by_signal = False
            return Request(DEFAULT_STEPS, False)
        # One rank of a host looks, and not at every step: the folder may be on a network.
        if self._runtime.local_rank != 0 or time.monotonic() < self._next_poll:
            return None
        self._next_poll = time.monotonic() + _POLL_SECONDS
        path = self._output_dir / REQUEST_FILE
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
            path.unlink(missing_ok=True)
        except OSError:
            return None
        return parse_request(text)

    def after_step(self, step: int, totals: Sequence[float]) -> None:
        """Once a step on all ranks, with the sums of their votes: begins, or ends and writes."""
        if self._first_step:
            if step == self._last_step:
                self._finish()
        elif totals[0] > 0:
            # Hosts that asked for different numbers get their mean.
            self._begin(step + 1, Request(round(totals[1] / totals[0]), totals[2] > 0))

    def _begin(self, first_step: int, request: Request) -> None:
        self._first_step, self._last_step = first_step, first_step + request.num_steps - 1
        if self._runtime.is_first:
            say(f"profile begins step={first_step} last_step={self._last_step}")
        if request.on_all_ranks or self._runtime.local_rank == 0:
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()

    def _finish(self) -> None:
        """Writes; a full disk costs the profile, not the job."""
        steps = f"{self._first_step}-{self._last_step}"
        folder = self._output_dir / "profiles" / f"step-{self._first_step:08d}"
        profiler, self._profiler = self._profiler, None
        self._first_step = self._last_step = 0
        if profiler is not None:
            profiler.stop()
        try:
            has_record = self._write(folder, profiler)
        except (OSError, RuntimeError) as error:  # torch's export raises either
            reason = str(error).split("\n", maxsplit=1)[0]
            say(f"profile steps={steps} not written on rank {self._runtime.rank}: {reason}")
            return
        if self._runtime.is_first:
            missing = "" if has_record else "; this torch has no flight recorder for its collectives"
            say(f"profile steps={steps} folder={folder}{missing}")

    def _write(self, folder: Path, profiler: torch.profiler.profile | None) -> bool:
        """This rank's files; whether there is a record of collectives."""
        folder.mkdir(parents=True, exist_ok=True)
        if profiler is not None:
            profiler.export_chrome_trace(str(folder / f"rank-{self._runtime.rank}.json"))
        recorded = flight_record()
        if recorded:
            (folder / f"rank-{self._runtime.rank}-collectives.json").write_text(json.dumps(recorded), encoding="utf-8")
        return bool(recorded)

    def close(self) -> None:
        """Writes what a job that ends earlier has, and hears no signal any more."""
        if self._first_step:
            self._finish()
        signal.signal(signal.SIGRTMIN, self._previous)
