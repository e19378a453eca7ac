"""What a checkpoint says of its model, so that an export needs nothing else, whatever becomes of the job's file."""

import json
from typing import Any

from transformers import PreTrainedModel

from trainyard.spec.job import JobSpec


def describe_model(spec: JobSpec, model: PreTrainedModel) -> dict[str, Any]:
    """The part of a checkpoint's `extra` that `trainer.export` reads: configuration, class, source and adapter."""
    return {
        "model_config": json.loads(model.config.to_json_string(use_diff=False)),
        "model_class": type(model).__name__,
        "model_source": spec.model.source,
        "adapter": None if spec.model.adapter is None else spec.model.adapter.model_dump(mode="json"),
        "tokenizer": spec.data.tokenizer,
    }
