"""A job under the real entrypoint: one or two hosts of this machine, each with its /opt/ml tree."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer import entrypoint

from trainer_testing import warm
from trainer_testing.distributed import TESTS, free_port
from trainer_testing.faulty_entrypoint import FOLDER_VARIABLE
from trainyard.planner import resolve
from trainyard.spec.job import load_job

CONTAINER = Path(entrypoint.__file__).resolve().parents[1]


def write_trees(
    root: Path, job: Path, *, num_hosts: int, overrides: Sequence[str], peer_copy: bool = False
) -> list[Path]:
    """One tree a host; the job's paths are this machine's own, so it needs no channels.

    `peer_copy`: as in the job, whose own word of it is for machines that it states.
    """
    resolved = resolve(load_job(job, overrides))
    trees = []
    hosts = [f"algo-{number + 1}" for number in range(num_hosts)]
    per_host = resolved.world_size // num_hosts
    checkpoint = resolved.spec.checkpoint.model_copy(update={"peer_copy": peer_copy})
    spec = resolved.spec.model_copy(update={"checkpoint": checkpoint})
    resolved = resolved.model_copy(update={"num_hosts": num_hosts, "processes_per_host": per_host, "spec": spec})
    for host in hosts:
        tree = root / host
        (tree / "input/config").mkdir(parents=True)
        (tree / "input/data/job").mkdir(parents=True)
        resources = {"current_host": host, "hosts": hosts, "network_interface_name": "lo"}
        (tree / "input/config/resourceconfig.json").write_text(json.dumps(resources))
        (tree / "input/data/job/resolved_job.json").write_text(resolved.model_dump_json())
        (tree / "input/data/job/channels.json").write_text("{}")
        trees.append(tree)
    return trees


@contextmanager
def entrypoints(
    trees: Sequence[Path], faults: Sequence[dict[str, Any]], *, forked: str = ""
) -> Iterator[list[subprocess.Popen[str]]]:
    """The hosts, running; whatever is left of them is killed at the end.

    `forked`: the engine of jobs whose torchrun and ranks are forks (`warm`), at every start; empty: real starts.
    """
    folder = trees[0].parent / "faults"
    folder.mkdir(exist_ok=True)
    (folder / "faults.json").write_text(json.dumps(list(faults)))
    addresses = {f"algo-{number + 1}": f"127.0.0.{number + 2}" for number in range(len(trees))}
    common = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(CONTAINER), str(CONTAINER.parent)]),
        "TRAINYARD_RENDEZVOUS_PORT": str(free_port()),
        "TRAINYARD_HOST_ADDRESSES": json.dumps(addresses),
        "TRAINYARD_SKIP_EFA_CHECK": "1",
        "TRAINYARD_ANSWER_SECONDS": "30",  # on a busy machine
        "CUDA_VISIBLE_DEVICES": "",
        FOLDER_VARIABLE: str(folder),
        **({warm.VARIABLE: warm.modules_for(forked)} if forked else {}),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "trainer_testing.faulty_entrypoint"],
            env=common | {"TRAINYARD_OPT_ML": str(tree)},
            cwd=tree,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for tree in trees
    ]
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def recoveries(tree: Path) -> list[dict[str, Any]]:
    """recovery.jsonl of the first host."""
    path = tree / "output/data/recovery.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
