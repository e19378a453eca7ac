"""Somebody who launches jobs on the cluster and waits for them."""

import time
from collections.abc import Callable
from pathlib import Path

from launch_testing import job_content

from slurm_testing.machines import SlurmCluster
from trainyard.launch import watch
from trainyard.launch.backend import LogCursor
from trainyard.launch.cluster import launch_on_slurm_here
from trainyard.launch.place import Place, local_place
from trainyard.launch.record import JobRecord
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec

PROGRAM = """#!/bin/bash
# As `python -u -m trainer.slurm run DIRECTORY`: one task a machine, told of its end by SIGTERM.
directory=$5
cd "$directory"
start=$(grep -c Training events)
echo "$SLURMD_NODENAME start $start of attempt $(tail -n 1 events | cut -f 1), secret ${AWS_SECRET_ACCESS_KEY:-none}"
echo "$SLURMD_NODENAME" >> started
say_why() { if [ "$SLURM_NODEID" = 0 ]; then echo "$1" > host/failure; fi; }
save() { touch "saved-$SLURM_NODEID"; echo "$SLURMD_NODENAME saved"; exit 75; }
trap save TERM
[ -e told ] && save
wait_for_a_signal() { while true; do sleep 0.1 & wait $!; done; }
"""
WAIT_SECONDS = 100.0


class Desk:
    """Launches jobs whose machines run a given program, and waits for them."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.place: Place = local_place(folder / "jobs")

    def launch(self, name: str, program: str, **changes: object) -> JobRecord:
        """`program`: bash, after PROGRAM's own lines; `changes`: of the job's compute section."""
        return launch_on_slurm_here(self.spec(name, program, **changes), self.folder / "jobs")

    def spec(self, name: str, program: str, *, max_resumes: int = 0, **changes: object) -> JobSpec:
        text, path = self.folder / "text.jsonl", self.folder / f"{name}.sh"
        text.write_text('{"text": "x"}\n')
        path.write_text(f"{PROGRAM}{program}\n")
        path.chmod(0o755)
        content = job_content() | {"name": name, "tenant": None, "recovery": {"max_resumes": max_resumes}}
        content["data"] = {"train": [{"path": str(text), "format": "jsonl"}], "sequence_length": 64}
        compute = {"backend": "slurm", "instance_count": 2, "max_hours": 1, "slurm": {"python": str(path)}}
        return parse(JobSpec, content | {"compute": compute | changes}, "job")

    def directory(self, record: JobRecord) -> Path:
        return self.folder / "jobs" / record.job_id

    def status(self, record: JobRecord) -> watch.Status:
        return watch.status(self.place.store, self.place.backend, record.job_id)

    def until(
        self, record: JobRecord, is_so: Callable[[watch.Status], object], what: str, seconds: float = WAIT_SECONDS
    ) -> watch.Status:
        deadline = time.monotonic() + seconds
        while not is_so(current := self.status(record)):
            assert time.monotonic() < deadline, f"waited for {what}: {current.state}, {current.observation}"
            time.sleep(0.1)
        return current

    def ended(self, record: JobRecord, seconds: float = WAIT_SECONDS) -> watch.Status:
        return self.until(record, lambda status: status.finished, "its end", seconds)

    def running_on_both(self, record: JobRecord, starts: int = 1) -> None:
        path = self.directory(record) / "started"
        self.until(
            record, lambda _: path.exists() and len(path.read_text().split()) == 2 * starts, f"{starts} starts of two"
        )

    def lines(self, record: JobRecord) -> list[str]:
        return [f"{line.host} {line.text}" for line in self.place.backend.read_logs(record, LogCursor())]

    def slurm_id(self, record: JobRecord) -> str:
        return (self.directory(record) / "submitted").read_text().split("id=")[1].strip()
