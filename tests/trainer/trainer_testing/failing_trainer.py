"""The trainer, whose every rank fails once all are ready: `python -m trainer_testing.failing_trainer common|own ...`.

common: all of the same. own: the last rank of something that befell it alone, the others of its loss.
"""

import sys

import trainer.loop
from trainer.__main__ import main
from trainer.leaving import leave
from trainer.runtime import Runtime
from trainer.session import Session

from trainyard.errors import JobFailedError


def fails(session: Session, kind: str) -> None:
    runtime: Runtime = session._runtime
    if kind == "own" and runtime.rank == runtime.world_size - 1:
        raise JobFailedError("a disk of this rank's own is broken")
    raise JobFailedError("what all ranks fail of")


if __name__ == "__main__":
    trainer.loop.train = lambda session: fails(session, sys.argv[1])  # type: ignore[assignment, return-value]
    leave(main(sys.argv[2:]))
