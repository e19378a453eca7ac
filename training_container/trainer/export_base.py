"""The model that a job began with, as far as an export needs it: what was frozen, and what an adapter is added to.

It is read by the trainer's own loader, which leaves weights in their files: whatever the files call them, they have the
names of the model's parameters here, and each is in memory only while it is written.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from trainer.checkpoint.base_model import FREEZABLE, weights_digest
from trainer.export_layouts import Read, lacking
from trainer.export_weights import Described
from trainer.models.configuration import configuration_in
from trainer.models.sharded_source import LOADING_ERRORS, Stored, load, part_of, stored_of
from trainyard.errors import InputError

_SEEING = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
"""Classes of models that see; of a folder whose model also does, the trainer takes the text's part for a causal_lm."""


@dataclass(frozen=True)
class BaseFolder:
    """Where it lies."""

    path: Path
    named: str
    """What to call it in a message: the option, or the job's field, that names it."""

    @classmethod
    def of(cls, given: Path | None, source: str, *, why: str) -> "BaseFolder":
        """The folder that was given, else the job's; InputError where that is no model's. `why`: what asks for it."""
        named = f"--base {given}" if given is not None else f"{why}: model.source {source}"
        folder = given or Path(source)
        if not (folder / "config.json").is_file():
            raise InputError(f"{named}: is no model's folder on this machine; give the base model's with --base FOLDER")
        return cls(folder, named)

    def is_whole(self, config: dict[str, Any]) -> bool:
        """Whether its config.json is of the checkpoint's model, and not of one that sees, whose text part that is."""
        stated = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        return bool(stated.get("model_type") == config.get("model_type"))

    def check(self, saved: str | None, *, what: str, mend: str) -> None:
        """InputError where `what` was trained upon other weights: the same shapes alone are no sign."""
        own = weights_digest(self.path)
        if saved is not None and own is not None and own != saved:
            raise InputError(
                f"{self.named}: is not the base that {what} was trained upon (fingerprint {own[:12]}, the"
                f" checkpoint's is {saved[:12]}; the same weights in other files count as another); {mend}"
            )


@dataclass(frozen=True)
class BaseModel:
    """Its tensors under the names that the model's own class has for them, in the types of their files."""

    model: PreTrainedModel
    tensors: list[Described]
    stored: dict[str, Stored]

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor; it may be a view of its file."""
        stored = self.stored[name]
        return part_of(stored, tuple(torch.arange(size) for size in stored.shape))


def read_base(base: BaseFolder, class_name: str | None) -> BaseModel:
    """The model in the folder; InputError where it is none of the class, or can't be read."""
    auto_class = AutoModelForImageTextToText if class_name in _SEEING else AutoModelForCausalLM
    try:
        with redirect_stdout(sys.stderr):  # what the loader leaves out; stdout is the result's
            model = load(auto_class, str(base.path), configuration_in(str(base.path)))
    except (StrictDataclassError, *LOADING_ERRORS) as error:  # an InputError is a ValueError
        words = " ".join(str(error).split())[:300].removeprefix(f"model.source: {base.path}: ")
        raise InputError(f"{base.named}: {words}") from None
    if class_name not in (None, type(model).__name__):
        raise InputError(f"{base.named}: is a {type(model).__name__}, the checkpoint is of a {class_name}")
    stored: dict[str, Stored] = {name: stored_of(weight) for name, weight in model.named_parameters()}
    kept = model.state_dict().keys()
    stored |= {name: buffer for name, buffer in model.named_buffers() if name in kept}
    tensors = [Described(name, tuple(one.shape), one.dtype) for name, one in stored.items()]
    return BaseModel(model, tensors, stored)


def with_frozen(
    model: PreTrainedModel, tensors: Sequence[Described], read: Read, extra: dict[str, Any], given: Path | None
) -> tuple[list[Described], Read]:
    """The tensors of a checkpoint, and how to read them, with those that the job's source has alone: they were frozen.

    `model`: on the meta device. `given`: the source's folder, where it isn't where the job had it.
    """
    missing, source = set(lacking(model, tensors)), extra.get("model_source")
    if not missing or source is None or not all(FREEZABLE in name for name in missing):
        return list(tensors), read
    folder = BaseFolder.of(given, source, why="what was frozen is in no checkpoint")
    folder.check(extra.get("base"), what="the model", mend="give that one with --base FOLDER")
    base = read_base(folder, extra.get("model_class"))
    frozen = [tensor for tensor in base.tensors if tensor.name in missing]
    return [*tensors, *frozen], lambda name: base.read(name) if name in missing else read(name)
