"""Models as transformers' own defaults have them, which are some published one's, without memory."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trainyard.errors import InputError
from trainyard.planner.families import shape_from_config
from trainyard.planner.shapes import ModelShape


def of_defaults(family: str) -> tuple[ModelShape, PreTrainedModel]:
    """What the plan takes a family for, and its model of two layers; skips one that can't be made."""
    try:
        config = AutoConfig.for_model(family)
        shape = shape_from_config(config.to_dict() | {"model_type": family})
    except (InputError, TypeError) as error:  # of defaults that its reader, or transformers, has not
        pytest.skip(str(error))
    config.num_hidden_layers = 2
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[:2])
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except TypeError as error:
        pytest.skip(f"transformers' own defaults make no model: {error}")
    assert isinstance(model, PreTrainedModel)
    return shape, model
