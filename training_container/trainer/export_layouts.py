"""Which tensors of a file come out of which of a checkpoint: a whole model's, or an adapter's in peft's format."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trainer.checkpoint.base_model import FREEZABLE
from trainer.export_weights import Described, Group
from trainer.models.adapters import adapter_configuration, name_in_peft
from trainyard.errors import InputError
from trainyard.spec.job import AdapterSpec

Read = Callable[[str], torch.Tensor]
"""The values of a tensor of the checkpoint."""

_SHOWN = 3


def model_groups(model: PreTrainedModel, tensors: Sequence[Described], read: Read) -> list[Group]:
    """A whole model's tensors as Hugging Face's files have them.

    transformers keeps some tensors otherwise than files do (a mixture's experts packed into one): its own conversions
    are turned round, for one tensor at a time. `model`: on the meta device.
    """
    _check_whole(model, tensors)
    groups = []
    for tensor in tensors:
        outline = _converted(model, tensor.name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        results = tuple(Described(name, tuple(one.shape), one.dtype) for name, one in outline.items())
        groups.append(Group(results, partial(_make, model, tensor.name, read)))
    names = [result.name for group in groups for result in group.tensors]
    if len(set(names)) != len(names):
        # Two tensors of the checkpoint make one of a file: no conversion that a tensor at a time can turn round.
        raise InputError(f"{model.config.model_type}: its files join tensors of the model, which no export does yet")
    return groups


def _make(model: PreTrainedModel, name: str, read: Read) -> dict[str, torch.Tensor]:
    return _converted(model, name, read(name))


def _converted(model: PreTrainedModel, name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, {name: values})
    return converted


def _check_whole(model: PreTrainedModel, tensors: Sequence[Described]) -> None:
    held = {tensor.name: tensor.shape for tensor in tensors}
    for name, parameter in model.named_parameters():  # of tied ones the first alone, as in a checkpoint
        if name in held and held[name] != tuple(parameter.shape):
            raise InputError(
                f"{name} has shape {list(held[name])} in the checkpoint, {list(parameter.shape)} by its configuration"
            )
    if missing := lacking(model, tensors):
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        cause = "it is not of the whole model"
        if all(FREEZABLE in name for name in missing):
            cause = "an earlier trainer saved no frozen weights; train a step more with this one, and export that"
        raise InputError(f"the checkpoint holds no {', '.join(missing[:_SHOWN])}{more}: {cause}")


def lacking(model: PreTrainedModel, tensors: Sequence[Described]) -> list[str]:
    """What of the model is not among the tensors."""
    held = {tensor.name for tensor in tensors}
    return [name for name, _ in model.named_parameters() if name not in held]


def adapter_groups(tensors: Sequence[Described], read: Read) -> list[Group]:
    """The adapter's matrices under peft's names."""
    return [
        Group(
            (Described(name_in_peft(tensor.name), tensor.shape, tensor.dtype),),
            lambda name=tensor.name: {name_in_peft(name): read(name)},  # type: ignore[misc]
        )
        for tensor in tensors
    ]


def write_adapter_config(folder: Path, adapter: AdapterSpec, *, base_model: str) -> None:
    """adapter_config.json, which `peft.PeftModel.from_pretrained` reads; `base_model` is named in it."""
    content = adapter_configuration(adapter).to_dict()
    content |= {"base_model_name_or_path": base_model, "inference_mode": True, "task_type": "CAUSAL_LM"}
    content = {key: sorted(value) if isinstance(value, set) else value for key, value in content.items()}
    (folder / "adapter_config.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
