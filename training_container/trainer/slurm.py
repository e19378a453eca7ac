"""What Slurm runs of a job on each of its machines: `trainer.entrypoint`'s work, with Slurm's word for who is there.

    python -m trainer.slurm run DIRECTORY       this machine's share of the job (srun starts one task a machine)
    python -m trainer.slurm inputs DIRECTORY    what the job reads is fetched once, for all machines

DIRECTORY is the job's folder, which all its machines share, laid out as a container's /opt/ml: `input/data/job` and a
folder for each other input. The trainer's output folder is `output/`, why the first machine failed `host/failure`;
the other machines' are under `hosts/`. What is of no use afterwards lies on each machine's own disk, and goes with the
task. Signals, exit codes and flags in the environment are `trainer.entrypoint`'s. Imports no torch.
"""

import json
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
from trainer.host.run import Folders, HostRun, Place, finish
from trainer.speech import say
from trainyard.errors import InputError, JobFailedError, TrainyardError

TOLD = "told"
"""In the job's folder: the job was told to stop, by a signal that came before this task."""
SHARED_ROOT = "/fsx"
"""Where a tenant's cluster mounts its file system (fsx:// in a job)."""
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
        work = Path(tempfile.gettempdir()) / f"trainyard-{settings['SLURM_JOB_ID']}-{place.host}"
        # A start before this one may have been killed here.
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
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


def bring_inputs(directory: Path) -> None:
    """Every input that isn't there yet: a folder of /fsx as a link, what is on S3 as a copy. JobFailedError names it.

    `input/data/inputs.json`: a list of `name`, `kind` (s3 or fsx) and `location`, as a job's record has them.
    """
    folder = directory / "input/data"
    for item in _listed_inputs(folder / "inputs.json"):
        target = folder / item["name"]
        if item["kind"] == "fsx":
            source = Path(SHARED_ROOT) / str(item["location"]).strip("/")
            if not source.exists():
                raise InputError(f"fsx://{item['location']}: {source} is not on the cluster's file system")
            try:
                _link(source, target)
            except OSError as error:
                raise JobFailedError(f"fsx://{item['location']}: can't be linked as {target}: {error}") from None
        elif not target.exists():
            _copy_from_s3(str(item["location"]), target)


def _listed_inputs(path: Path) -> list[dict[str, str]]:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return [{key: str(item[key]) for key in ("name", "kind", "location")} for item in listed]
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; `trainyard launch` writes it as it submits the job") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path}: is no list of inputs with name, kind and location: {error!r}") from None


def _link(source: Path, target: Path) -> None:
    """`target` is the folder `source`, or a folder that holds the file `source` under its own name."""
    if target.is_symlink() and not target.exists():
        target.unlink()  # what it led to is gone, as after a move; the record says where it is now
    if target.exists():
        return
    if source.is_dir():
        target.symlink_to(source)
        return
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a start that was killed here
    partial.mkdir()
    (partial / source.name).symlink_to(source)
    partial.rename(target)


def _copy_from_s3(uri: str, target: Path) -> None:
    """What lies under `uri` into the folder `target`, there as a whole or not at all."""
    import boto3
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    s3 = boto3.client("s3")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    count = 0
    try:
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for found in page.get("Contents", []):
                key = str(found["Key"])
                if key.endswith("/") or (not prefix.endswith("/") and key != prefix):
                    continue
                # As SageMaker lays a channel out: below the prefix's last slash.
                file = partial / key[prefix.rfind("/") + 1 :]
                file.parent.mkdir(parents=True, exist_ok=True)
                s3.download_file(bucket, key, str(file))
                count += 1
    except (Boto3Error, BotoCoreError, ClientError, OSError) as error:
        raise JobFailedError(f"{uri}: can't be copied to {target}: {error}") from None
    if count == 0:
        raise InputError(f"{uri}: there is nothing there")
    partial.rename(target)
    say(f"inputs: {uri}: {count} files")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
