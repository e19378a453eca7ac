"""What a pod of a Kubeflow TrainJob runs: the container's own work, with the controller's word for who is there.

    python -m trainer.kubernetes

The controller sets PET_NNODES, PET_NODE_RANK and PET_MASTER_ADDR, the first pod's name in DNS, which the others' are
made from; a ConfigMap, in TRAINYARD_JOB_FOLDER (/etc/trainyard/job), is the channel `job`. What SageMaker would write
(`input/config/resourceconfig.json`) is written here, the inputs are brought, and `trainer.entrypoint` does the rest:
its signals, flags and exit codes are these. The reason of a failure also goes to the termination message
(TRAINYARD_TERMINATION_LOG, /dev/termination-log).

One exit code more: 69, another host is gone, or has not come. The program is sound, and all hosts are to be started
again, where 1 and 2 are final (`trainyard.launch.kubernetes_manifest` tells the controller so). Imports no torch.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from trainer import entrypoint
from trainer.host.hosts import LOST_HOST
from trainer.host.rank import RESUME_EXIT_CODE
from trainer.host.recovery import Ending
from trainer.host.run import finish
from trainer.host.word import first_line
from trainer.inputs import bring_inputs
from trainyard.errors import InputError, TrainyardError

LOST_EXIT_CODE = 69
"""EX_UNAVAILABLE of sysexits.h."""
_MOST_MESSAGE_BYTES = 4096
"""Kubernetes keeps no more of a termination message."""
_NEVER_MET = re.compile(r"^(host \S+ has no address|the first host \(.+\) does not answer) after ")
"""How `trainer.entrypoint`'s reason begins where the others' pods had no machine yet, while it waited."""
_FIRST = re.compile(r"^(?P<name>.+-)0(?P<domain>(\..+)?)$")


def main(environment: Mapping[str, str] | None = None) -> int:
    """Run this pod's share of the job; the exit code."""
    settings = dict(os.environ if environment is None else environment)
    opt_ml = Path(settings.get("TRAINYARD_OPT_ML", "/opt/ml"))
    # As a container's first process it would not hear a signal that nobody has asked for.
    signal.signal(signal.SIGTERM, _nothing_to_save)
    try:
        hosts = host_names(settings)
        lay_out(Path(settings.get("TRAINYARD_JOB_FOLDER", "/etc/trainyard/job")), opt_ml / "input/data")
        write_place(opt_ml, hosts, int(settings["PET_NODE_RANK"]), settings.get("TRAINYARD_INSTANCE_TYPE", ""))
        bring_inputs(opt_ml)
    except TrainyardError as error:
        code = finish(Ending(error.exit_code, str(error)), opt_ml / "output")
    else:
        # torchrun takes its defaults from the controller's variables.
        code = entrypoint.main({name: value for name, value in settings.items() if not name.startswith("PET_")})
    return tell_ending(code, opt_ml, Path(settings.get("TRAINYARD_TERMINATION_LOG", "/dev/termination-log")))


def host_names(settings: Mapping[str, str]) -> list[str]:
    """Every pod's name in DNS, in the order of their indices; InputError where this is no pod of a TrainJob's."""
    for name in ("PET_NNODES", "PET_NODE_RANK"):
        if not settings.get(name, "").isdigit():
            raise InputError(
                f"{name}: is {settings.get(name, 'not set')!r}, so this is no pod of a TrainJob's with a torch policy; "
                "Kubeflow Trainer's controller sets it"
            )
    count, index = int(settings["PET_NNODES"]), int(settings["PET_NODE_RANK"])
    if not index < count:
        raise InputError(f"PET_NODE_RANK {index}: must be below PET_NNODES {count}")
    first = _FIRST.match(settings.get("PET_MASTER_ADDR", ""))
    if first is None:
        raise InputError(
            f"PET_MASTER_ADDR {settings.get('PET_MASTER_ADDR', '')!r}: is no first pod's name, JOB-node-0-0.JOB"
        )
    return [f"{first['name']}{number}{first['domain']}" for number in range(count)]


def lay_out(job: Path, folder: Path) -> None:
    """The ConfigMap's files where the entrypoint looks for them; InputError where one is missing."""
    places = {name: folder / "job" / name for name in ("resolved_job.json", "channels.json")}
    for name, path in {**places, "inputs.json": folder / "inputs.json"}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(job / name, path)
        except OSError as error:
            raise InputError(
                f"{job / name}: can't be read ({error.strerror}); `trainyard launch` makes the ConfigMap"
            ) from None


def write_place(opt_ml: Path, hosts: Sequence[str], index: int, instance_type: str) -> None:
    """What `trainer.entrypoint` reads of who is there, as SageMaker writes it."""
    path = opt_ml / "input/config/resourceconfig.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, object] = {"current_host": hosts[index], "hosts": list(hosts)}
    content["current_instance_type"] = instance_type
    path.write_text(json.dumps(content), encoding="utf-8")


def tell_ending(code: int, opt_ml: Path, message: Path) -> int:
    """The exit code for whoever started this process; why, for people, in `message`."""
    if code in (0, RESUME_EXIT_CODE):
        return code
    reason = first_line(opt_ml / "output/failure")
    if not reason:
        return code
    with contextlib.suppress(OSError):  # a pod without such a file: the log has it too
        message.write_bytes(reason.encode()[:_MOST_MESSAGE_BYTES])
    return LOST_EXIT_CODE if LOST_HOST.match(reason) or _NEVER_MET.match(reason) else code


def _nothing_to_save(_: int, __: FrameType | None) -> NoReturn:
    print("kubernetes: told to stop before the ranks started; resume me", flush=True)
    raise SystemExit(RESUME_EXIT_CODE)


if __name__ == "__main__":
    sys.exit(main())
