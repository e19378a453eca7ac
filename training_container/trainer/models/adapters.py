"""LoRA through peft: small trained matrices beside frozen linear layers, put in before any engine shards the model.

The order matters: peft on a model that is sharded already leaves adapters that are never synchronized, silently wrong
by 7e-3 in the loss after four steps. Frozen weights come from the model's source and are in no checkpoint; with QLoRA
they are stored in 4 bits (`quantized`).
"""

import warnings
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from trainer.models.configuration import one_line
from trainer.seeds import seed_everything
from trainyard.errors import InputError
from trainyard.spec.job import AdapterSpec
from trainyard.spec.notes import notes_on_rank
from trainyard.spec.obstacles import EXPERT_TARGETS, adapted_experts

_SHOWN_TARGETS = 12


def add_adapter(model: PreTrainedModel, adapter: AdapterSpec, *, seed: int, computes_in_half: bool = False) -> None:
    """Freezes `model` and gives every linear layer named in `adapter.targets` a low-rank pair, the same on every rank.

    The pair starts as zero (its second matrix is), so the first loss is the base model's own. `computes_in_half`: the
    engine sees to the type of products, by autocast or by what it gathers; peft's own cast to the pair's float32 would
    only keep a copy of the input for each adapted layer, of the very numbers that autocast then makes of it again.
    """
    check_targets(model, adapter)
    from peft import inject_adapter_in_model  # seconds to import: only jobs that use it pay

    seed_everything(seed)
    with warnings.catch_warnings():
        # peft says of each of GPT-2's layers, whose matrices are transposed, that it takes them as they are.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False but the target module is `Conv1D`")
        try:
            inject_adapter_in_model(adapter_configuration(adapter), model)
        except ValueError as error:  # peft's: packed weights of which a target names a part alone
            raise InputError(f"model.adapter.targets: {one_line(error)}") from None
    # peft's wrapper of a weight that is no layer's: packed experts, in types that `trainyard.spec` doesn't know of.
    if any(hasattr(module, "parameter_name") and hasattr(module, "lora_A") for module in model.modules()):
        raise InputError(adapted_experts(model.config.model_type, EXPERT_TARGETS.intersection(adapter.targets)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_adapter(name))
    for module in model.modules():
        if computes_in_half and hasattr(module, "lora_A"):
            setattr(module, "cast_input_dtype_enabled", False)  # noqa: B010  # no attribute that mypy knows


def name_in_peft(name: str) -> str:
    """What peft's own files call an adapter's parameter."""
    return "base_model.model." + name.replace(".default.", ".")


def adapter_configuration(adapter: AdapterSpec) -> Any:
    """peft's own settings for a job's adapter."""
    from peft import LoraConfig

    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # any number does
        lora_dropout=adapter.dropout,
        target_modules=list(adapter.targets),
        bias="none",
    )


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def check_targets(model: PreTrainedModel, adapter: AdapterSpec) -> None:
    """Every target has to be a linear layer of this model, and not the head that is the embedding too."""
    tied_head = model.get_output_embeddings() if model.config.get_text_config().tie_word_embeddings else None
    names = {path.rpartition(".")[2] for path, module in model.named_modules() if _is_linear(module)}
    names -= {path.rpartition(".")[2] for path, module in model.named_modules() if module is tied_head}
    missing = [target for target in adapter.targets if target not in names]
    if missing:
        shown = ", ".join(sorted(names)[:_SHOWN_TARGETS])
        raise InputError(
            f"model.adapter.targets: {', '.join(missing)}: no linear layer that can be adapted has this name in"
            f" {model.config.model_type}; it has {shown}"
        )


def notes_on_adapter(model: nn.Module, adapter: AdapterSpec | None) -> tuple[str, ...]:
    """What is odd about the job's adapter, which stands in a whole model already; its base's sizes no job states."""
    widths: dict[str, int] = {}
    for path, one in model.named_modules():
        if hasattr(one, "lora_A"):
            width = min(one.lora_A["default"].in_features, one.lora_B["default"].out_features)
            name = path.rpartition(".")[2]
            widths[name] = min(width, widths.get(name, width))
    return () if adapter is None else notes_on_rank(adapter.rank, widths)


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer, with its matrix transposed

    return isinstance(module, (nn.Linear, Conv1D))
