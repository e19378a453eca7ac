"""The model: an unmodified Hugging Face class, from a configuration or from a directory."""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from trainer.models import rotary
from trainer.models.adapters import add_adapter, check_targets
from trainer.models.attention import HALF_TYPES, attach, choose_attention
from trainer.models.configuration import (
    check_vocabulary,
    configuration_in,
    refusing,
    size_of,
    states_positions,
)
from trainer.models.deferred_weights import defer, fill, outline, source_of
from trainer.models.gates import thin_gates
from trainer.models.grouped_products import narrow_grouped_products
from trainer.models.norms import fuse_norms
from trainer.models.quantized import quantize_blocks
from trainer.models.recomputation import checkpoint_activations
from trainer.models.sharded_source import load, refusing_source, to_trained_type
from trainer.seeds import seed_everything
from trainyard.errors import InputError
from trainyard.spec.job import ResolvedJob

MANY_WORDS = 1 << 18
"""For a vocabulary that the data decides, where only the rest of a configuration is looked at."""


def build_model(job: ResolvedJob, *, vocab_size: int) -> PreTrainedModel:
    """The job's causal language model on CPU, whole: `outline_model` with its weights."""
    model = outline_model(job, vocab_size=vocab_size)
    fill(model, device=torch.device("cpu"))
    return model


def outline_model(job: ResolvedJob, *, vocab_size: int) -> PreTrainedModel:
    """The job's causal language model without its weights, which `deferred_weights.fill` gives it once it is cut.

    They are the same on every rank and under every strategy; trained ones are float32 (float64 in fp64).
    `vocab_size`: ids that the tokenizer can emit; a configuration that states none gets exactly that many.
    """
    seed_everything(job.spec.training.seed)
    model = _from_config(job, vocab_size) if job.spec.model.config is not None else _from_source(job)
    check_vocabulary(model.config.get_text_config(), vocab_size)
    _check_sizes(job, model)
    attach(model)
    fuse_norms(model)
    thin_gates(model)
    rotary.settle(model, job.spec.data.sequence_length)
    if job.spec.training.precision == "fp64":
        model.set_experts_implementation("eager")  # torch's grouped product takes float32 at most
    if job.spec.model.adapter is not None:
        computes_in_half = job.spec.training.precision in HALF_TYPES
        add_adapter(model, job.spec.model.adapter, seed=job.spec.training.seed, computes_in_half=computes_in_half)
    if source_of(model) is None:
        defer(model)
    to_trained_type(model.parameters(), job.spec.training.precision)
    if job.spec.model.adapter is not None and job.spec.model.adapter.kind == "qlora":
        quantize_blocks(model, transformer_blocks(model))
    narrow_grouped_products()
    if job.activation_checkpointing != "none":
        checkpoint_activations(model, transformer_blocks(model), job.activation_checkpointing)
    return model


def _from_config(job: ResolvedJob, vocab_size: int) -> PreTrainedModel:
    stated = job.spec.model.config
    assert stated is not None
    settings: dict[str, Any] = {"vocab_size": vocab_size, **stated}
    model_type = settings.pop("model_type")
    with refusing(stated):
        config = AutoConfig.for_model(model_type, **settings)
        _lengthen_default(config, settings, job.spec.data.sequence_length)
        attention = _attention(job, config)
        make = partial(AutoModelForCausalLM.from_config, config, attn_implementation=attention, dtype=torch.float32)
        model = outline(make, seed=job.spec.training.seed)
    return _as_pretrained(model)


def _lengthen_default(config: PretrainedConfig, stated: Mapping[str, Any], sequence_length: int) -> None:
    """Gives a new model positions for the job's sequences where the job states no number of them (a stated one that
    is too small is refused): the library's default is that of some published model, not anybody's wish."""
    positions = getattr(config, "max_position_embeddings", None)
    if not states_positions(config, stated) and positions and positions < sequence_length:
        config.max_position_embeddings = sequence_length


def check_configuration(job: ResolvedJob) -> PreTrainedModel | None:
    """InputError for a stated configuration of which no language model can be built, whatever the data's vocabulary,
    and for an adapter of layers that the source's model doesn't have. No file of weights is opened.

    Returns the model without its weights; None of a source whose model can't be made so, or of which nothing is asked
    that its files don't say.
    """
    source, adapter = job.spec.model.source, job.spec.model.adapter
    if job.spec.model.config is not None:
        model: PreTrainedModel | None = _from_config(job, MANY_WORDS)
        assert model is not None
        _check_sizes(job, model)
        return model
    assert source is not None
    if adapter is None and job.spec.training.loss != "chunked":
        return None
    model = _bare(source)
    if adapter is not None and model is not None:
        check_targets(model, adapter)
    return model


def _bare(source: str) -> PreTrainedModel | None:
    """A source's model on the meta device; None where it can't be made so, which is said, if it is wrong, when it is
    loaded."""
    try:
        with torch.device("meta"):
            return _as_pretrained(AutoModelForCausalLM.from_config(configuration_in(source)))
    except Exception:  # of whatever kind: transformers makes it in another way
        return None


def _from_source(job: ResolvedJob) -> PreTrainedModel:
    source = job.spec.model.source
    assert source is not None
    with refusing_source(source):
        config = configuration_in(source)
        return load(AutoModelForCausalLM, source, config, attn_implementation=_attention(job, config))


def _as_pretrained(model: Any) -> PreTrainedModel:
    assert isinstance(model, PreTrainedModel)
    return model


def _attention(job: ResolvedJob, config: PretrainedConfig) -> str:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return choose_attention(job, config.get_text_config(), device_type=device_type).implementation


def _check_sizes(job: ResolvedJob, model: PreTrainedModel) -> None:
    """InputError for sizes of which transformers builds a model that can't run."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < job.spec.data.sequence_length:
        raise InputError(
            f"data.sequence_length is {job.spec.data.sequence_length}, but the model has"
            f" {positions} positions (max_position_embeddings; GPT-2's n_positions): shorten the"
            " sequence, or state more of them for a model that is trained from its configuration"
        )
    heads, shared = (size_of(config, f"num_{name}_heads") for name in ("attention", "key_value"))
    # Latent attention (DeepSeek) makes keys and values of every head, whatever this says: 128 unless it is stated.
    is_shared = size_of(config, "kv_lora_rank") is None
    has_groups = is_shared and any(hasattr(module, "num_key_value_groups") for module in model.modules())
    if has_groups and isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        raise InputError(
            f"model.config.num_key_value_heads is {shared}, which must divide num_attention_heads, {heads}: state both"
        )


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, in order: FSDP's units. By the model's own `_no_split_modules`, else its longest list.

    BERT's kin name their embeddings there as well. Where the head has these, too, they are no unit: FSDP takes weights
    of one alone.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    uses = _uses(model)
    blocks = [
        module for module in model.modules() if type(module).__name__ in names and _uses(module).items() <= uses.items()
    ]
    if blocks:
        ids = {id(block) for block in blocks}
        # Of blocks inside blocks (ConvNeXt's layers in its stages) the inner ones: they are what repeats.
        return [block for block in blocks if sum(id(module) in ids for module in block.modules()) == 1]
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def path_to_blocks(model: nn.Module) -> str:
    """The name in `model` of the list whose entries are its `transformer_blocks`, or have some of them each (Mamba's,
    and in transformers 5.17 Aria's)."""
    blocks = {*transformer_blocks(model)}

    def are_in(entries: nn.ModuleList) -> bool:
        counts = [sum(part in blocks for part in entry.modules()) for entry in entries]
        return sum(counts) == len(blocks) and 0 not in counts

    found: str = next(
        name for name, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each) and are_in(each)
    )
    return found


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """How many of a module's parts have each of its weights."""
    return Counter(weight for part in module.modules() for weight in part.parameters(recurse=False))
