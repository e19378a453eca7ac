"""What Slurm runs of a job on each of its machines: `trainer.entrypoint`'s work, with Slurm's word for who is there.

    python -m trainer.slurm run DIRECTORY       this machine's share of the job (srun starts one task a machine)
    python -m trainer.slurm inputs DIRECTORY    what the job reads is fetched once, for all machines

DIRECTORY is the job's folder, which all its machines share, laid out as a container's /opt/ml: `input/data/job` and a
folder for each other input. The trainer's output folder is `output/`, why the first machine failed `host/failure`;
the other machines' are under `hosts/`. What is of no use afterwards lies on each machine's own disk, and goes with the
task. Signals, exit codes and flags in the environment are `trainer.entrypoint`'s. Imports no torch.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainer.entrypoint import check_efa, first_address, join_hosts, read_job
from trainer.host.rank import RESUME_EXIT_CODE
from trainer.host.recovery import Ending
from trainer.host.run import Folders, HostRun, Place, finish, outlive_early_saves
from trainer.inputs import bring_inputs
from trainyard.errors import InputError, JobFailedError, TrainyardError

TOLD = "told"
"""In the job's folder: the job was told to stop, by a signal that came before this task."""
_RANGE = re.compile(r"^(?P<first>\d+)(?:-(?P<last>\d+))?$")
_MOST_HOSTS = 10_000
"""Of a list that is taken for one: a job of more is a typing error."""


def main(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """One of the two commands; the exit code."""
    settings = dict(os.environ if environment is None else environment)
    if len(arguments) != 2 or arguments[0] not in ("run", "inputs"):
        print("slurm: usage: python -m trainer.slurm run|inputs DIRECTORY", file=sys.stderr)
        return 2
    directory = Path(arguments[1])
    if arguments[0] == "run":
        return run(directory, settings)
    try:
        bring_inputs(directory)
    except TrainyardError as error:
        return finish(Ending(error.exit_code, str(error)), directory / "host")
    return 0


def run(directory: Path, settings: Mapping[str, str]) -> int:
    """This machine's share of the job under `directory`; the exit code."""
    output = directory / "host"
    outlive_early_saves()
    try:
        place = read_place(settings)
        if place.index > 0:
            output = directory / "hosts" / place.host
        if (directory / TOLD).exists():
            return finish(Ending(RESUME_EXIT_CODE, "stopped before the ranks started; resume me"), output)
        job = read_job(directory, place, settings)
        if len(place.hosts) > 1 and settings.get("TRAINYARD_SKIP_EFA_CHECK") != "1":
            check_efa(job.spec.compute.instance_type or "")
        address = first_address(place, settings)
        data = directory / "output" if place.index == 0 else output / "data"
        work = _scratch(directory, place.host)
        hosts = join_hosts(place, job, address, settings)
        try:
            module = settings.get("TRAINYARD_RANK_MODULE", "trainer")
            return finish(
                HostRun(Folders(output, data, work), place, job, address, ranks_settings(settings), module).run(hosts),
                output,
            )
        finally:
            hosts.close()
            shutil.rmtree(work, ignore_errors=True)
    except TrainyardError as error:
        return finish(Ending(error.exit_code, str(error)), output)


def _scratch(directory: Path, host: str) -> Path:
    """This machine's folder of the job, empty: a start before this one may have been killed here. Not named by Slurm's
    number, which a resume changes; named by the user, as nobody else's can be removed from a /tmp that all share."""
    path = Path(tempfile.gettempdir()) / f"trainyard-{os.getuid()}-{directory.resolve().name}-{host}"
    shutil.rmtree(path, ignore_errors=True)
    try:
        path.mkdir(mode=0o700, parents=True)  # texts, and checkpoints on their way
    except OSError as error:
        raise JobFailedError(f"{path} on {host}: can't be made anew ({error.strerror}); remove it there") from None
    return path


def ranks_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """`settings` without Slurm's own: a library that finds them would take the ranks for tasks of Slurm."""
    return {name: value for name, value in settings.items() if not name.startswith(("SLURM_", "SLURMD_", "PMI"))}


def read_place(settings: Mapping[str, str]) -> Place:
    """This machine among the step's; InputError where this is no task of Slurm's."""
    missing = [name for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURMD_NODENAME") if not settings.get(name)]
    if missing:
        raise InputError(f"{missing[0]}: is not set, so this is no task of Slurm's; srun starts trainer.slurm")
    hosts = tuple(host_names(settings.get("SLURM_STEP_NODELIST") or settings["SLURM_JOB_NODELIST"]))
    host = settings["SLURMD_NODENAME"]
    if host not in hosts:
        raise InputError(f"SLURMD_NODENAME {host} is not among the job's machines {', '.join(hosts)}")
    return Place(host=host, hosts=hosts, interface=settings.get("TRAINYARD_INTERFACE", ""), instance_type="")


def host_names(node_list: str) -> list[str]:
    """Slurm's short form of host names, written out in its own order: `gpu[1-2,05],login` -> gpu1, gpu2, gpu05, login.

    As `scontrol show hostnames`, which a container lacks; several brackets multiply, the last one runs fastest.
    """
    names = [name for part in _split(node_list) for name in _expanded(part)]
    if not names:
        raise InputError(f"node list {node_list!r}: is empty")
    return names


def _split(node_list: str) -> Iterator[str]:
    """At the commas outside of brackets."""
    depth, part = 0, ""
    for character in node_list:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            yield part
            part = ""
        else:
            part += character
    if depth:
        raise InputError(f"node list {node_list!r}: has a bracket too many")
    if part:
        yield part


def _expanded(name: str) -> list[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        return [name]
    inner, _, after = rest.partition("]")
    numbers = [number for item in inner.split(",") for number in _numbers(item, name)]
    if len(numbers) > _MOST_HOSTS:
        raise InputError(f"node list {name!r}: names {len(numbers)} hosts; at most {_MOST_HOSTS}")
    return [f"{before}{number}{end}" for number in numbers for end in _expanded(after)]


def _numbers(item: str, name: str) -> list[str]:
    """`08-10` -> 08, 09, 10: as wide as the first."""
    match = _RANGE.match(item)
    if match is None:
        raise InputError(f"node list {name!r}: {item!r} is no number and no range of numbers")
    first, last = match["first"], match["last"] or match["first"]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
