"""The trainer, whose every rank fails once all are ready.

`python -m trainer_testing.failing_trainer common|own FOLDER ...`; common: all of the same. own: the last rank of
something that befell it alone, the others of its loss. The first rank ends last, as torchrun's own store outlives all
ranks; FOLDER: where the others say that they are through.
"""

import sys
import time
from pathlib import Path

import trainer.loop
from trainer.__main__ import main
from trainer.leaving import leave
from trainer.runtime import Runtime
from trainer.session import Session

from trainyard.errors import JobFailedError

runtimes: list[Runtime] = []
"""Kept, as the first rank's holds the store."""


def fails(session: Session, kind: str) -> None:
    runtime: Runtime = session._runtime
    runtimes.append(runtime)
    if kind == "own" and runtime.rank == runtime.world_size - 1:
        raise JobFailedError("a disk of this rank's own is broken")
    raise JobFailedError("what all ranks fail of")


def tell_or_wait(folder: Path) -> None:
    (runtime,) = runtimes
    if runtime.rank > 0:
        (folder / f"through-{runtime.rank}").write_text("")
    until = time.monotonic() + 300
    while runtime.is_first and len(list(folder.glob("through-*"))) < runtime.world_size - 1:
        assert time.monotonic() < until, "the others don't end"
        time.sleep(0.02)


if __name__ == "__main__":
    trainer.loop.train = lambda session: fails(session, sys.argv[1])  # type: ignore[assignment, return-value]
    code = main(sys.argv[3:])
    tell_or_wait(Path(sys.argv[2]))
    leave(code)
