"""What a person may choose of a quickstart, and how it runs the commands that a person would."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from trainyard.children import output_of, start
from trainyard.errors import JobFailedError


@dataclass(frozen=True)
class Options:
    """What a person may choose."""

    checkout: Path
    environment: Path
    job: Path
    output_dir: Path
    seed: int
    """Chooses the step of the spot reclaim."""
    port: int | None
    state_dir: Path
    """Where the emulator is, and all that is kept between runs."""


def run_quietly(options: Options, command: list[str], what: str) -> str:
    """A command's stdout; JobFailedError with its last line where it fails, and it is ended if we are interrupted."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    process = start(command, cwd=options.checkout, env=inherited, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = output_of(process)
    if process.returncode:
        last = (errors.strip() or output.strip() or "it printed nothing").splitlines()[-1]
        raise JobFailedError(f"{what} failed: {last.removeprefix('trainyard: ')}")
    return output
