"""A job as a run of Weights & Biases, by its own client, where somebody has installed that (`pip install wandb`).

The client sends from the machine that launched the job; nothing is in the training image, and a job needs no way out.
"""

import importlib.util
from pathlib import Path
from typing import Any

from trainyard.errors import InputError, JobFailedError
from trainyard.launch.compare import metrics_rows
from trainyard.launch.record import JobRecord
from trainyard.launch.session import state_root
from trainyard.operate.tracking import Tracked, files_of, params_of, tags_of
from trainyard.spec.meters import METERS
from trainyard.spec.tracking import WandbSpec

VERSION = "0.31.0"
"""That this was tried with; pyproject's extra `wandb` names it, too."""


def check_wandb(spec: WandbSpec) -> None:
    """InputError where this interpreter has no client."""
    if importlib.util.find_spec("wandb") is None:
        raise InputError(
            f"tracking.wandb: project {spec.project}: the package wandb isn't installed here; "
            f"pip install 'wandb=={VERSION}', or leave tracking.wandb out"
        )


class WandbTracker:
    """One run, open from the first `tell` to `close`."""

    def __init__(self, spec: WandbSpec) -> None:
        """InputError where the client is missing."""
        check_wandb(spec)
        self._spec = spec
        self._run: Any = None
        self._last_step = 0
        """The newest that this run has been told."""

    def tell(self, record: JobRecord, s3: Any) -> Tracked:
        """New steps, state and files; JobFailedError where the client or its server refuses."""
        folder = state_root() / "tracking" / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        marker = folder / f"{record.job_id}.step"
        try:
            is_first = self._run is None
            run = self._run = self._run or self._opened(record, str(folder))
            if is_first:
                self._last_step = self._told_before(run, marker)
            rows = [row for row in metrics_rows(record, s3) if row.get("step", 0) > self._last_step]
            for row in rows:
                told = {meter.name: value for meter in METERS if (value := meter.read(row)) is not None}
                run.log({name: value for name, value in told.items() if name != "step"}, step=int(row["step"]))
            if rows:
                self._last_step = int(rows[-1]["step"])
                marker.write_text(str(self._last_step))
            for name, text in tags_of(record).items():
                run.summary[name] = text
            # Each is a version of its own there: what was asked at the beginning, and how it went at the end.
            if is_first or record.finished:
                self._put_files(run, record, s3)
        except Exception as error:
            raise JobFailedError(f"Weights & Biases, project {self._spec.project}: {error}") from None
        return Tracked(record.job_id, str(run.url or folder), len(rows))

    def _told_before(self, run: Any, marker: Path) -> int:
        """The newest step that a run before this one was told. An offline one knows nothing of those before it; of one
        online the server knows what has come: the client sends behind, and may be gone before it has."""
        if self._spec.mode == "offline" and marker.exists():
            return int(marker.read_text())
        return int(run.step) - 1

    def close(self, record: JobRecord) -> None:
        """End the run: failed where the job did."""
        if self._run is not None:
            self._run.finish(exit_code=1 if record.state == "Failed" else 0)
            self._run = None

    def _opened(self, record: JobRecord, folder: str) -> Any:
        import wandb

        # Nothing of the machine that launches: no code, no console, no figures of its processors.
        settings = wandb.Settings(silent=True, disable_git=True, console="off", x_disable_stats=True)
        return wandb.init(
            project=self._spec.project,
            entity=self._spec.entity,
            dir=folder,
            id=record.job_id,
            name=record.job_id,
            group=record.spec.name,
            config=params_of(record),
            resume="allow" if self._spec.mode == "online" else None,
            mode=self._spec.mode,
            save_code=False,
            settings=settings,
        )

    @staticmethod
    def _put_files(run: Any, record: JobRecord, s3: Any) -> None:
        import wandb

        artifact = wandb.Artifact(f"job-{record.job_id}", type="trainyard-job")
        for name, content in files_of(record, s3).items():
            with artifact.new_file(name, mode="wb") as file:
                file.write(content)
        run.log_artifact(artifact)
