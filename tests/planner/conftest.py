"""A job to vary, on a day when every shipped price may be quoted."""

import datetime
from collections.abc import Callable
from typing import Any

import pytest

from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec

BASE: dict[str, Any] = {
    "name": "test",
    "model": {"source": "llama-3.1-8b"},
    "data": {"train": [{"path": "corpus.txt", "format": "text"}], "sequence_length": 4096},
    "training": {"steps": 100, "global_batch_size": 512, "learning_rate": 1e-4},
    "compute": {"backend": "sagemaker", "instance_type": "ml.p5.48xlarge", "instance_count": 16},
}


@pytest.fixture(autouse=True)
def _a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' prices must not grow old with the calendar."""
    monkeypatch.setattr("trainyard.planner.money.today", lambda: datetime.date(2025, 11, 20))


@pytest.fixture(name="job")
def make_job() -> Callable[..., JobSpec]:
    """The base job with sections merged in; None removes a key."""

    def make(**sections: Any) -> JobSpec:
        content = dict(BASE)
        for name, value in sections.items():
            merged = {**content.get(name, {}), **value} if isinstance(value, dict) and name in BASE else value
            if isinstance(merged, dict):
                merged = {key: item for key, item in merged.items() if item is not None}
            content[name] = merged
        return parse(JobSpec, content, "job")

    return make


@pytest.fixture(name="real_parameters", scope="session")
def count_real_parameters() -> Callable[[dict[str, Any]], int]:
    """Counts the parameters of transformers' own model of a configuration, which is built without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def count(config: dict[str, Any]) -> int:
        rest = {key: value for key, value in config.items() if key != "model_type"}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **rest))
        return sum(parameter.numel() for parameter in model.parameters())

    return count
