"""Where a job's record goes beside its own buckets: MLflow, Weights & Biases (docs/meters.md)."""

from typing import Literal

from pydantic import Field

from trainyard.spec.base import SpecModel

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"


class WandbSpec(SpecModel):
    """A project of Weights & Biases; needs the package wandb where the job is launched, and nothing in the image."""

    project: str = Field(pattern=_NAME)
    entity: str | None = Field(default=None, pattern=_NAME)
    """User or team; default: the one of the key in WANDB_API_KEY."""
    mode: Literal["online", "offline"] = "online"
    """offline: kept in .trainyard/tracking/wandb, for `wandb sync`."""


class JobTrackingSpec(SpecModel):
    """Who is told of the job as it goes, by the machine that launches it: its file, plan, settings, metrics, report."""

    mlflow: str | None = Field(
        default=None,
        pattern=r"^(https?://\S+|arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:\d{12}:mlflow-tracking-server/[A-Za-z0-9-]+)$",
    )
    """Address, or ARN, of the tracking server; default: the tenant's own, where it has one."""
    experiment: str | None = Field(default=None, min_length=1, max_length=200)
    """MLflow's experiment; default: trainyard/TENANT/NAME OF THE JOB."""
    wandb: WandbSpec | None = None
    automatic: bool = True
    """Told from the launch on; false: only by `trainyard track`."""
