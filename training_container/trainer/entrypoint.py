"""What a SageMaker training container runs: from /opt/ml to `torchrun -m trainer`, and from its end to /opt/ml/output.

    python -m trainer.entrypoint

Reads `input/config/resourceconfig.json` (who and where we are) and the channel `job` (`resolved_job.json`, and
`channels.json`: URI -> channel). Starts the ranks of this host, tells them of SIGTERM and SIGUSR1, and reports.

A rank that dies or stands still stops the others, on every host, and all are started again from the newest checkpoint,
within what the job's `recovery` allows. What happened is a line each on stdout, and in `output/data/recovery.jsonl`.

Exit codes: 0 done; 75 "saved, resume me" (also a file `output/resume_me`); 2 the job's input is wrong; 1 failed. The
reason of a failure is in `output/failure`: one line, then the end of what the failing rank said. The third loss of a
host in a row from one checkpoint is told in other words than the first ones (trainer.host.losses).

Imports no torch, so that it can tell of a broken one.

In the environment: TRAINYARD_JOB_ID, the job's id, which ends with the time of its launch, TRAINYARD_ATTEMPT, which
submission of it this is, and TRAINYARD_ASKED_ATTEMPT, the newest one that a person asked for (absent: this one); for
the meters of how long it was waited for (trainer.observe.away), and for the count of lost hosts.

Flags in the environment, for tests and the emulator, absent on SageMaker:
- TRAINYARD_OPT_ML: the tree's root instead of /opt/ml.
- TRAINYARD_HOST_ADDRESSES: JSON, host name -> address, instead of asking DNS.
- TRAINYARD_RENDEZVOUS_PORT: port of the first host at which the ranks meet (29500); on the next one the hosts agree.
- TRAINYARD_PROCESSES_PER_HOST: ranks on each host, where it is not what the job was resolved for.
- TRAINYARD_SKIP_EFA_CHECK=1: don't look for EFA devices.
- TRAINYARD_HOST_SILENCE_SECONDS: a host that the others have not heard of for so long is lost (30).
- TRAINYARD_ANSWER_SECONDS: how long ranks have to tell their collectives when one hangs, and live on for the other
  hosts' answers, at most (3).
- TRAINYARD_STOP_GRACE_SECONDS: how long the ranks have after SIGTERM (110 of SageMaker's 120 s).
- TRAINYARD_RANK_MODULE: what the ranks run instead of the trainer.
"""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.host.hosts import SILENCE_SECONDS, Hosts, Judge, ManyHosts, OneHost
from trainer.host.recovery import Ending, RestartPolicy
from trainer.host.run import DEFAULT_PORT, Folders, HostRun, Place, finish, outlive_early_saves
from trainer.speech import say
from trainyard.errors import InputError, JobFailedError, TrainyardError
from trainyard.spec.base import parse
from trainyard.spec.job import DataSource, ResolvedJob
from trainyard.spec.words import counted

RESOLVE_SECONDS = 600.0
"""How long a host's name may take to appear in DNS: hosts of one job don't start together."""


def main(environment: Mapping[str, str] | None = None, module: str | None = None) -> int:
    """Run the job's share of this host; the exit code. `module`: what every rank runs, if not what the flags say."""
    outlive_early_saves()
    settings = dict(os.environ if environment is None else environment)
    opt_ml = Path(settings.get("TRAINYARD_OPT_ML", "/opt/ml"))
    output = opt_ml / "output"
    try:
        place = read_place(opt_ml)
        job = read_job(opt_ml, place, settings)
        if len(place.hosts) > 1 and settings.get("TRAINYARD_SKIP_EFA_CHECK") != "1":
            check_efa(place.instance_type)
        address = first_address(place, settings)
        hosts = join_hosts(place, job, address, settings)
        try:
            folders = Folders(output, output / "data", opt_ml / "trainyard")
            run = module or settings.get("TRAINYARD_RANK_MODULE", "trainer")
            return finish(HostRun(folders, place, job, address, settings, run).run(hosts), output)
        finally:
            hosts.close()
    except TrainyardError as error:
        return finish(Ending(error.exit_code, str(error)), output)


def read_place(opt_ml: Path) -> Place:
    """This host's place from resourceconfig.json."""
    path = opt_ml / "input/config/resourceconfig.json"
    content = _read_json(path)
    try:
        hosts = sorted((str(host) for host in content["hosts"]), key=_numeric_order)
        place = Place(
            host=str(content["current_host"]),
            hosts=tuple(hosts),
            interface=str(content.get("network_interface_name", "")),
            instance_type=str(content.get("current_instance_type", "")),
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: has no usable {error}; SageMaker writes current_host and hosts") from None
    if place.host not in place.hosts:
        raise InputError(f"{path}: current_host {place.host} is not among hosts {', '.join(place.hosts)}")
    return place


def _numeric_order(host: str) -> tuple[Any, ...]:
    """Digits compare as numbers, so that algo-10 comes after algo-2."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", host))


def read_job(opt_ml: Path, place: Place, settings: Mapping[str, str]) -> ResolvedJob:
    """The job from its channel, its paths turned to local ones, laid out for the hosts that are really here."""
    channel = opt_ml / "input/data/job"
    path = channel / "resolved_job.json"
    job = parse(ResolvedJob, _read_json(path), str(path))
    channels = _read_json(channel / "channels.json")
    per_host = int(settings.get("TRAINYARD_PROCESSES_PER_HOST", job.processes_per_host))
    world_size = len(place.hosts) * per_host
    if world_size != job.world_size:
        say(f"entrypoint: {counted(world_size, 'rank')} instead of {job.world_size}: laying the job out anew")
        job = _laid_out_anew(job, len(place.hosts), per_host)
    if (job.num_hosts, job.processes_per_host) != (len(place.hosts), per_host):
        job = job.model_copy(update={"num_hosts": len(place.hosts), "processes_per_host": per_host})
    return _with_local_paths(job, channels, opt_ml / "input/data")


def _laid_out_anew(job: ResolvedJob, num_hosts: int, per_host: int) -> ResolvedJob:
    """Within `recovery.elastic`, where the job states limits: InputError beyond them."""
    if job.spec.recovery.elastic is not None and num_hosts != job.num_hosts:
        from trainyard.planner.elastic import on_hosts

        return on_hosts(job.spec, num_hosts, processes_per_host=per_host)
    from trainyard.planner import resolve

    return resolve(job.spec, world_size=num_hosts * per_host)


def _with_local_paths(job: ResolvedJob, channels: Mapping[str, Any], inputs: Path) -> ResolvedJob:
    def local(uri: str) -> str:
        name = channels.get(uri)
        if name is None:
            if "://" in uri:
                raise InputError(
                    f"{uri}: no input channel brings it (channels.json has: {', '.join(channels) or 'none'})"
                )
            return uri
        folder = inputs / str(name)
        if not folder.is_dir():
            raise InputError(f"{uri}: its channel {name} is not at {folder}")
        # An S3 prefix may name one object: it lies in the channel under its own name.
        file = folder / uri.rstrip("/").rsplit("/", 1)[-1]
        return str(file if file.is_file() else folder)  # a folder of that name is one of those in it

    spec = job.spec

    def sources(given: Sequence[DataSource]) -> tuple[DataSource, ...]:
        return tuple(
            source
            if spec.data.streaming and source.path.startswith("s3://")
            else source.model_copy(update={"path": local(source.path)})
            for source in given
        )

    data = spec.data.model_copy(
        update={
            "train": sources(spec.data.train),
            "validation": sources(spec.data.validation),
            "tokenizer": spec.data.tokenizer and local(spec.data.tokenizer),
            "chat_template": spec.data.chat_template and local(spec.data.chat_template),
        }
    )
    model = spec.model.model_copy(update={"source": spec.model.source and local(spec.model.source)})
    images = spec.images
    if images and images.class_names:
        images = images.model_copy(update={"class_names": local(images.class_names)})
    return job.model_copy(update={"spec": spec.model_copy(update={"data": data, "model": model, "images": images})})


def check_efa(instance_type: str, devices: Path = Path("/sys/class/infiniband")) -> None:
    """JobFailedError unless every EFA interface of the instance type is there: NCCL would take TCP in silence."""
    from trainyard.hardware import instance

    expected = instance(instance_type).efa_interfaces
    if expected == 0:
        raise InputError(f"compute.instance_type {instance_type}: has no EFA, so it can't run a job over several hosts")
    found = sorted(path.name for path in devices.iterdir()) if devices.is_dir() else []
    if len(found) < expected:
        raise JobFailedError(
            f"EFA: {instance_type} has {expected} interfaces, {devices} shows {len(found)}; is the container's EFA "
            "software there, and does the security group let itself in and out? (a job without EFA would crawl)"
        )


def first_address(place: Place, settings: Mapping[str, str], patience_seconds: float = RESOLVE_SECONDS) -> str:
    """Address of the first host; asks DNS again until it knows the name."""
    if len(place.hosts) == 1:
        return "127.0.0.1"
    host = place.hosts[0]
    given = settings.get("TRAINYARD_HOST_ADDRESSES")
    if given:
        addresses = json.loads(given)
        if host not in addresses:
            raise InputError(f"TRAINYARD_HOST_ADDRESSES: has no {host} (it has: {', '.join(addresses)})")
        return str(addresses[host])
    deadline = time.monotonic() + patience_seconds
    pause = 0.5
    while True:
        try:
            return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except socket.gaierror as error:
            if time.monotonic() + pause > deadline:
                raise JobFailedError(f"host {host} has no address after {patience_seconds:.0f} s: {error}") from None
            say(f"entrypoint: host {host} has no address yet ({error}), asking again")
        time.sleep(pause)
        pause = min(2 * pause, 10.0)


def join_hosts(place: Place, job: ResolvedJob, address: str, settings: Mapping[str, str]) -> Hosts:
    """This host among the job's: alone, or connected to the first one, which judges."""
    policy = RestartPolicy(job.spec.recovery)
    if len(place.hosts) == 1:
        return OneHost(policy)
    port = int(settings.get("TRAINYARD_RENDEZVOUS_PORT", DEFAULT_PORT)) + 1
    silence = float(settings.get("TRAINYARD_HOST_SILENCE_SECONDS", SILENCE_SECONDS))
    arrival = job.spec.recovery.arrival_seconds
    judge = None
    if place.index == 0:
        judge = Judge(place.hosts, address, port, policy, arrival_seconds=arrival, silence_seconds=silence)
    return ManyHosts(place.host, address, port, judge=judge, patience_seconds=RESOLVE_SECONDS, silence_seconds=silence)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; `trainyard launch` brings it as an input channel") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: must hold a JSON object, holds {type(content).__name__}")
    return content


if __name__ == "__main__":
    sys.exit(main())
