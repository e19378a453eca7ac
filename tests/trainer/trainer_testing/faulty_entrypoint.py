"""The container's entrypoint, whose ranks run `faulty_trainer`: `python -m trainer_testing.faulty_entrypoint`."""

import os
import sys
from pathlib import Path

import trainer.host.run
from trainer.entrypoint import main

from trainer_testing import shifted_clock, warm

FOLDER_VARIABLE = "TRAINYARD_TEST_FAULTS"
S3_SECONDS_VARIABLE = "TRAINYARD_TEST_S3_SECONDS"
"""How long the ranks' SDK waits for S3; absent: as long as the trainer asked it to."""
MODULE = "trainer_testing.faulty_trainer"


def run() -> int:
    """The entrypoint's exit code."""
    if warm.VARIABLE in os.environ:
        warm.install(trainer.host.run)
    shifted_clock.install(Path(os.environ[FOLDER_VARIABLE]))
    return main(module=MODULE)


if __name__ == "__main__":
    sys.exit(run())
