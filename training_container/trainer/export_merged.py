"""An adapter put into its base model, tensor by tensor as the base model's are read: W + alpha / rank * B A."""

from collections.abc import Sequence

import torch
from transformers.pytorch_utils import Conv1D

from trainer.export_base import BaseModel
from trainer.export_layouts import Read, model_groups
from trainer.export_weights import Described, Group
from trainyard.errors import InputError
from trainyard.spec.job import AdapterSpec

_FIRST, _SECOND = ".lora_A.default.weight", ".lora_B.default.weight"
_WEIGHT = ".weight"


def merged_groups(base: BaseModel, adapter: AdapterSpec, tensors: Sequence[Described], read: Read) -> list[Group]:
    """Every tensor of the base model, in its own type; adapted ones with what the adapter adds, in float32.

    `tensors`: the adapter's, of the checkpoint. What training computed with a base in 4 bits is only near this.
    """
    adapted = {tensor.name.removesuffix(_FIRST) for tensor in tensors if tensor.name.endswith(_FIRST)}
    if lost := sorted(module for module in adapted if module + _WEIGHT not in base.stored):
        raise InputError(f"--merge: the base model has no {lost[0]}{_WEIGHT}, which was adapted: it is another model's")

    def summed(name: str) -> torch.Tensor:
        values, module = base.read(name), name.removesuffix(_WEIGHT)
        if module not in adapted:
            return values
        added = read(module + _SECOND).float() @ read(module + _FIRST).float()
        if isinstance(base.model.get_submodule(module), Conv1D):  # GPT-2's linear layer, its matrix is (in, out)
            added = added.T
        if values.shape != added.shape:
            raise InputError(f"--merge: {name} has shape {list(values.shape)}, the adapter's is {list(added.shape)}")
        return values.float() + added * (adapter.alpha / adapter.rank)

    return model_groups(base.model, base.tensors, summed)
