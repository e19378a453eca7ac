"""The model's configuration, known before the model is."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from trainyard.errors import InputError
from trainyard.spec.job import ResolvedJob

_WRONG = (StrictDataclassError, OSError, ValueError, TypeError, KeyError, AttributeError)
"""What transformers raises for a configuration that is no good."""


_NEARLY = 0.88
"""Likeness (difflib's) of two names of which one is meant for the other: hidden_sise and hidden_size have 0.91. Fields
that another family has, which people leave in, are farther off: num_experts and num_local_experts have 0.79."""


def folder_of(source: str) -> Path:
    """The folder that `model.source` names; InputError unless a model's configuration is in it.

    Nothing is looked up in the Hugging Face Hub: a training host has no internet, and would wait for it.
    """
    folder = Path(source)
    if (folder / "config.json").is_file():
        return folder
    if "://" in source:
        wrong, mend = "the trainer reads local folders", "launch the job, or copy the model here first"
    elif folder.is_dir():
        wrong, mend = "no config.json there", "give a Hugging Face model directory"
    else:
        wrong = "no such folder; the trainer reads local folders, and asks the Hugging Face Hub for nothing"
        mend = "correct the path" if source.startswith(("/", ".", "~")) else f"hf download {source} --local-dir FOLDER"
        mend += ", and give FOLDER" if mend.startswith("hf") else ""
    raise InputError(f"model.source: {source}: {wrong}; {mend}")


def configuration_in(source: str) -> PretrainedConfig:
    """What the folder that `model.source` names says of its model; raises what transformers raises, and InputError.

    Code that comes with a model is never run, nor anyone asked whether it may be: transformers would ask at a terminal.
    """
    folder = folder_of(source)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ValueError:
        stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "auto_map" not in stated:
            raise
        raise InputError(
            f"model.source: {source}: transformers has no model_type {stated.get('model_type')}, and code that comes"
            " with a model (auto_map) is not run; give a model of a type that transformers has"
        ) from None


def check_source(source: str) -> None:
    """InputError where `model.source` is nothing that can be read; what else is wrong is said where it is built."""
    try:
        configuration_in(source)
    except InputError:
        raise
    except _WRONG:
        return


def check_names(stated: Mapping[str, Any]) -> None:
    """InputError for a field of a new model's configuration that is not one of its type's, but nearly is.

    transformers takes any name: for one wrong letter of hidden_size it would build a Llama of 7 billion weights.
    """
    model_type = str(stated["model_type"])
    try:
        known = AutoConfig.for_model(model_type)
    except _WRONG:
        return  # said where the model is built
    names = {*known.to_dict(), *known.attribute_map}
    for name in stated:
        if name not in names and not hasattr(known, name):
            close = difflib.get_close_matches(name, sorted(names - stated.keys()), n=1, cutoff=_NEARLY)
            if close:
                raise InputError(
                    f"model.config.{name}: the configuration of {model_type} has no such field, and would take it for"
                    f" nothing; did you mean {close[0]}?"
                )


def states_positions(config: PretrainedConfig, stated: Mapping[str, Any]) -> bool:
    """Whether what a job states of its model's configuration says how many positions it has, by any of their names."""
    return "max_position_embeddings" in stated or config.attribute_map.get("max_position_embeddings") in stated


def configuration_of(job: ResolvedJob) -> PretrainedConfig | None:
    """Read without making the model; None where it is no good, which is said where the model is built."""
    source, stated = job.spec.model.source, dict(job.spec.model.config or {})
    try:
        if source is not None:
            return configuration_in(source).get_text_config()
        return AutoConfig.for_model(stated.pop("model_type"), **stated).get_text_config()
    except _WRONG:
        return None
