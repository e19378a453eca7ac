"""What Slurm runs of a campaign's job on a machine: `trainer.slurm`'s commands, whose ranks run `faulty_trainer`.

python -m trainer_testing.faulty_slurm run|inputs DIRECTORY
"""

import os
import sys
from pathlib import Path

import trainer.host.run
from trainer.slurm import main

from trainer_testing import shifted_clock, warm
from trainer_testing.faulty_entrypoint import FOLDER_VARIABLE, MODULE


def run(arguments: list[str]) -> int:
    """The command's exit code."""
    if warm.VARIABLE in os.environ:
        warm.install(trainer.host.run)
    shifted_clock.install(Path(os.environ[FOLDER_VARIABLE]))
    return main(arguments, {**os.environ, "TRAINYARD_RANK_MODULE": MODULE})


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
