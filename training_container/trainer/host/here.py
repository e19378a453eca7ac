"""A job on this machine alone, with the container's recovery: `python -m trainer.host.here DIRECTORY`.

Reads DIRECTORY/resolved_job.json; the trainer's output goes to DIRECTORY/output, `failure` or `resume_me` and what is
of no use afterwards to DIRECTORY/host. Signals, exit codes and flags in the environment are `trainer.entrypoint`'s,
and TRAINYARD_RANK_MODULE: what the ranks run instead of the trainer (tests). Imports no torch.
"""

import contextlib
import os
import random
import socket
import sys
from pathlib import Path

from trainer.host.hosts import OneHost
from trainer.host.recovery import Ending, RestartPolicy
from trainer.host.run import Folders, HostRun, Place, finish, outlive_early_saves
from trainer.leaving import leave
from trainyard.errors import TrainyardError
from trainyard.spec.job import ResolvedJob

HOST = "this machine"
ADDRESS = "127.0.0.1"


def main(directory: Path) -> int:
    """Run the job; its exit code."""
    outlive_early_saves()
    job = ResolvedJob.model_validate_json((directory / "resolved_job.json").read_bytes())
    # A port of its own, so that two jobs on one machine never meet.
    settings = {"TRAINYARD_RENDEZVOUS_PORT": str(_free_port())} | dict(os.environ)
    place = Place(HOST, (HOST,), interface="", instance_type="")
    folders = Folders(directory / "host", directory / "output", directory / "host")
    run = HostRun(folders, place, job, ADDRESS, settings, settings.get("TRAINYARD_RANK_MODULE", "trainer"))
    try:
        ending = run.run(OneHost(RestartPolicy(job.spec.recovery)))
    except TrainyardError as error:
        ending = Ending(error.exit_code, str(error))
    return finish(ending, folders.output)


def _free_port() -> int:
    """From below those that the system gives to outgoing connections: it is used again at every start of the ranks."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(12_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((ADDRESS, port))
            return port


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))
