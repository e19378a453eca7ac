"""What a checkpoint says of its model, so that an export needs nothing else, whatever becomes of the job's file."""

import json
from pathlib import Path
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
        "reads_bytes": _reads_bytes(spec),
        "chat_template": _stated_template(spec),
    }


def _reads_bytes(spec: JobSpec) -> bool:
    """Whether the ids of a language model are those of ByteTokenizer."""
    sources = (*spec.data.train, *spec.data.validation)
    has_tokenizer = spec.data.tokenizer is not None or spec.model.source is not None
    return spec.task == "causal_lm" and not has_tokenizer and all(source.format != "tokens" for source in sources)


def _stated_template(spec: JobSpec) -> str | None:
    """The text of data.chat_template, which no machine but the job's hosts may have; None where the tokenizer's own
    renders."""
    if spec.data.chat_template is None:
        return None
    try:
        return Path(spec.data.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None  # of a task that reads no chats: the data has read the others' already
