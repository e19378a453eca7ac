"""The model's configuration, known before the model is."""

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from trainyard.spec.job import ResolvedJob


def configuration_of(job: ResolvedJob) -> PretrainedConfig | None:
    """Read without making the model; None where it is no good, which is said where the model is built."""
    source, stated = job.spec.model.source, dict(job.spec.model.config or {})
    try:
        if source is not None:
            return AutoConfig.from_pretrained(source).get_text_config()
        return AutoConfig.for_model(stated.pop("model_type"), **stated).get_text_config()
    except (StrictDataclassError, OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
