"""What Ray's job server starts of a job: places its hosts on machines, an actor each; starts them again if one goes.

    python -m trainer.ray DIRECTORY

TRAINYARD_JOB holds the job (base64 of gzip of a JSON object: file name to content), TRAINYARD_GPUS_PER_HOST what each
host asks Ray for. DIRECTORY is a folder on every machine, shared or not. What happens is told in lines
`trainyard event JSON`, the last of which is the outcome; what the hosts say is in their actors' logs. SIGTERM, and the
end of compute.max_hours, which count while it has machines, have all ranks save.

Ray places, and knows of machines that are lost; rendezvous, restarts of ranks and checkpoints are the trainer's own, as
everywhere. Exit codes are `trainer.entrypoint`'s. Imports no torch.
"""

import base64
import contextlib
import gzip
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import FrameType
from typing import Any

from trainer.host.hosts import LOST_HOST
from trainer.host.rank import RESUME_EXIT_CODE
from trainer.ray_host import Host, Hosts, actor_log
from trainyard.errors import InputError, TrainyardError
from trainyard.spec.base import parse
from trainyard.spec.job import ResolvedJob

JOB_VARIABLE = "TRAINYARD_JOB"
GPUS_VARIABLE = "TRAINYARD_GPUS_PER_HOST"
EVENT = "trainyard event "
"""How a line begins that trainyard.launch.ray_backend reads."""
_POLL_SECONDS = 0.5


def event(state: str, note: str = "", **more: Any) -> None:
    """Tell what has happened."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    print(EVENT + json.dumps({"state": state, "at": at, "note": note, **more}), flush=True)


class Told:
    """Whether, and why, the job is to save and end."""

    def __init__(self, max_hours: float) -> None:
        """`max_hours`: with machines; waiting for them, at first or after a loss, costs nobody anything."""
        self._seconds_left = 3600 * max_hours
        self._began: float | None = None
        """When the start that has its machines now got them (monotonic)."""
        self._was_signalled = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While the job has its machines."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._seconds_left -= time.monotonic() - self._began
            self._began = None

    def on_signal(self, _: int, __: FrameType | None) -> None:
        """SIGTERM."""
        self._was_signalled = True

    @property
    def why(self) -> str:
        """ "" while nobody has told it."""
        if self._was_signalled:
            return "stopped"
        ran = 0.0 if self._began is None else time.monotonic() - self._began
        return "its time limit came" if ran >= self._seconds_left else ""


class Start:
    """The hosts of one start, from their placement to the last one's end."""

    def __init__(self, ray: Any, job: ResolvedJob, directory: str) -> None:
        self._ray = ray
        self._job = job
        self._directory = directory
        self._gpus = int(os.environ.get(GPUS_VARIABLE, "0"))
        bundle = {"CPU": 1.0, **({"GPU": float(self._gpus)} if self._gpus else {})}
        # Hosts without a machine's name may share one, as ranks on a CPU do.
        strategy = "SPREAD" if job.spec.compute.instance_type is None else "STRICT_SPREAD"
        placement = importlib.import_module("ray.util.placement_group")
        self._group = placement.placement_group([bundle] * job.num_hosts, strategy=strategy)
        self._remove = placement.remove_placement_group
        self._actors: list[Any] = []

    def wait_for_machines(self, told: Told) -> bool:
        """False where it was told to end before it had them."""
        ready = self._group.ready()
        while not told.why:
            if self._ray.wait([ready], timeout=_POLL_SECONDS)[0]:
                return True
        return False

    def run(self, files: Mapping[str, str], told: Told, number: int) -> list[tuple[int, str]]:
        """Each host's exit code and reason; a host whose actor is gone has none of its own."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        actor = self._ray.remote(Host)
        for index in range(self._job.num_hosts):
            where = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            options = {"num_cpus": 1, "num_gpus": self._gpus, "max_concurrency": 2, "scheduling_strategy": where}
            self._actors.append(actor.options(**options).remote(self._directory, index))
        asked = [(one.address.remote(), one.pid.remote()) for one in self._actors]
        found, pids = [], []
        for index, (address, pid) in enumerate(asked):
            try:
                found.append(self._ray.get(address))
                pids.append(self._ray.get(pid))
            except self._ray.exceptions.RayError as error:
                return [(1, _why_not(index, error))]
        names = [f"node-{index}" for index in range(self._job.num_hosts)]
        hosts = Hosts(names, [address for address, _ in found], found[0][1])
        logs = {name: actor_log(one) for name, one in zip(names, self._actors, strict=True)}
        event("Training", f"{', '.join(hosts.addresses)}, start {number}", logs=logs, pids=pids)
        return self._ended([one.run.remote(dict(files), hosts) for one in self._actors], told)

    def _ended(self, runs: Sequence[Any], told: Told) -> list[tuple[int, str]]:
        was_told, waiting = False, list(runs)
        while waiting:
            _, waiting = self._ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_SECONDS)
            if told.why and not was_told:
                was_told = True
                event("Stopping", told.why)
                for one in self._actors:
                    one.stop.remote()
        endings = []
        for index, run in enumerate(runs):
            try:
                code, reason = self._ray.get(run)
            except self._ray.exceptions.RayError as error:
                code, reason = 1, _why_not(index, error)
            endings.append((code, reason))
        return endings

    def close(self) -> None:
        """Give the machines back."""
        for one in self._actors:
            self._ray.kill(one)
        self._remove(self._group)


def main(arguments: Sequence[str]) -> int:
    """Run the job; its exit code."""
    try:
        if len(arguments) != 1:
            raise InputError("usage: python -m trainer.ray DIRECTORY; the job server starts it")
        files = _files(os.environ.get(JOB_VARIABLE, ""))
        job = parse(ResolvedJob, json.loads(files["resolved_job.json"]), "resolved_job.json")
        ray = _ray()
    except TrainyardError as error:
        event("Failed", failure=str(error))
        return error.exit_code
    try:
        # Hosts' words stay in their own logs: here they would be many, and thinned out.
        ray.init(log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:
        event("Failed", failure=f"the driver can't join its cluster: {_words(error)}")
        return 1
    told = Told(job.spec.compute.max_hours)
    signal.signal(signal.SIGTERM, told.on_signal)  # after ray's own
    return _run(ray, job, files, told, arguments[0])


def _run(ray: Any, job: ResolvedJob, files: Mapping[str, str], told: Told, directory: str) -> int:
    """Start after start, until one ends by itself or the starts are spent."""
    number = 0
    while True:
        number += 1
        start = Start(ray, job, directory)
        try:
            event("Queued", "waits for machines")
            if not start.wait_for_machines(told):
                event("Stopped", f"{told.why} before it had its machines")
                return RESUME_EXIT_CODE
            with told.running():
                endings = start.run(files, told, number)
        finally:
            start.close()
        if told.why:
            return _told_ending(told, endings)
        again = _why_again(endings)
        if again and number <= job.spec.recovery.max_resumes:
            event("Interrupted", again)
            continue
        return _own_ending(endings, again)


def _told_ending(told: Told, endings: Sequence[tuple[int, str]]) -> int:
    if all(code == 0 for code, _ in endings):
        event("Completed")
        return 0
    bad = [(code, reason) for code, reason in endings if code not in (0, RESUME_EXIT_CODE)]
    if bad:
        event("Failed", failure=_cause(endings))
        return bad[0][0]
    event("Stopped", "" if told.why == "stopped" else f"{told.why}; saved")
    return RESUME_EXIT_CODE


def _own_ending(endings: Sequence[tuple[int, str]], again: str) -> int:
    if all(code == 0 for code, _ in endings):
        event("Completed")
        return 0
    if again and all(code in (0, RESUME_EXIT_CODE) for code, _ in endings):
        event("Stopped", again)
        return RESUME_EXIT_CODE
    event("Failed", failure=_cause(endings))
    return 2 if any(code == 2 for code, _ in endings) else 1


def _why_again(endings: Sequence[tuple[int, str]]) -> str:
    """Why another start goes on: a machine was lost, or taken; "" where the program ended by itself."""
    bad = [reason for code, reason in endings if code not in (0, RESUME_EXIT_CODE)]
    if any(not LOST_HOST.match(reason) for reason in bad):
        return ""
    if bad:
        return _cause(endings)
    return "a host was told to stop; saved" if any(code == RESUME_EXIT_CODE for code, _ in endings) else ""


def _cause(endings: Sequence[tuple[int, str]]) -> str:
    """A host's own error before another's loss, and a loss that Ray saw before one that a host missed."""
    bad = [reason for code, reason in endings if code not in (0, RESUME_EXIT_CODE)]
    own = [reason for reason in bad if not LOST_HOST.match(reason)]
    seen = [reason for reason in bad if "Ray:" in reason]
    return next(iter([*own, *seen, *bad]), "")


def _files(packed: str) -> dict[str, str]:
    try:
        content = json.loads(gzip.decompress(base64.b64decode(packed, validate=True)))
        return {name: str(content[name]) for name in ("resolved_job.json", "channels.json", "inputs.json")}
    except (ValueError, OSError, EOFError, KeyError, TypeError) as error:
        raise InputError(f"{JOB_VARIABLE}: holds no job ({error!r}); `trainyard launch` sets it") from None


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise InputError(
            f"{sys.executable}: has no ray ({error}); install the cluster's own version there, or set "
            "compute.ray.python"
        ) from None


def _why_not(index: int, error: BaseException) -> str:
    """Why an actor gave no answer: its machine or process is gone, or (no start mends that) its own code raised."""
    own = type(error).__name__ == "RuntimeEnvSetupError" or "creation task" in str(error)
    if own or any(kind.__name__ == "RayTaskError" for kind in type(error).__mro__):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"node-{index} on Ray: {lines[-1] if lines else type(error).__name__}"
    return f"host node-{index} is gone: {_words(error)}"


def _words(error: BaseException) -> str:
    return f"Ray: {next(iter(str(error).splitlines()), type(error).__name__)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
