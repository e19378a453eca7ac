"""The model's configuration, known before the model is."""

import contextlib
import difflib
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PretrainedConfig
from transformers.activations import ACT2FN

from trainyard.errors import InputError
from trainyard.spec.job import ResolvedJob
from trainyard.spec.model_files import folder_of

WRONG = (StrictDataclassError, OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError)
"""What transformers raises for a configuration that is no good."""
_WRONG_SIZES = (ArithmeticError, AssertionError, IndexError, RuntimeError)
"""What it and torch raise where a model is built of sizes that don't go together."""
_MACHINE_ERRORS = re.compile(r"DefaultCPUAllocator|[Cc]annot allocate memory|out of memory|CUDA error")
"""What torch's plain RuntimeErrors, and the system, say of a lack of memory or of a device."""

_COUNTS = frozenset(
    {
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
        *("image_size", "patch_size", "num_labels"),
    }
)
"""Fields of which 0 or less means nothing, in no family."""


_NEARLY = 0.88
"""Likeness (difflib's) of two names of which one is meant for the other: hidden_sise and hidden_size have 0.91. Fields
that another family has may be as near (moe_intermediate_size and intermediate_size): they are passed over by name."""

_ONCE_OF_ALL = frozenset(
    {
        *("add_cross_attention", "cross_attention_hidden_size", "finetuning_task", "is_decoder", "pruned_heads"),
        *("task_specific_params", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "torch_dtype"),
        *("torchscript", "use_bfloat16"),
    }
)
"""Fields that transformers' configurations had before 5.0, whatever their type: published ones state them still."""


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
    except WRONG:
        return


@contextlib.contextmanager
def refusing(stated: Mapping[str, Any]) -> Iterator[None]:
    """Around what is made of a `model.config`: InputError, in one line, for what transformers and torch raise of it."""
    model_type = stated.get("model_type")
    try:
        yield
    except InputError:
        raise  # it is a ValueError too, and says already what is wrong where
    except (*_WRONG_SIZES, *WRONG, ImportError) as error:
        if is_of_the_machine(error):
            raise
        if isinstance(error, _WRONG_SIZES):
            raise InputError(
                f"model.config: no {model_type} can be built of it ({one_line(error)}); what it doesn't state is as in"
                " a published model: state what has to go with its sizes, like pad_token_id, which must be below"
                " vocab_size, or null"
            ) from None
        raise InputError(
            _of_activation(error, stated)
            or f"model.config: {one_line(error)}; see the Hugging Face configuration of '{model_type}'"
        ) from None


def _of_activation(error: Exception, stated: Mapping[str, Any]) -> str | None:
    """Of the bare name of an activation function that transformers doesn't have: its field and what there is."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    for path, part in _parts(stated):
        field = next((field for field, value in part.items() if value == name and "act" in field), None)
        if field is not None:
            return f"{path}.{field}: there is no activation function {name!r}; allowed: {', '.join(sorted(ACT2FN))}"
    return None


def _parts(stated: Mapping[str, Any], path: str = "model.config") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A configuration and those of other models inside it (a LLaVA's text_config), each with its path."""
    yield path, stated
    for name, value in stated.items():
        if isinstance(value, Mapping) and "model_type" in value:
            yield from _parts(value, f"{path}.{name}")


def is_of_the_machine(error: BaseException) -> bool:
    """Whether the host or its device failed: the job's input may be right, and another start may find room."""
    is_told = isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError)
    return is_told or _MACHINE_ERRORS.search(str(error)) is not None


def one_line(error: BaseException) -> str:
    """An error's text, for a one-line message."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def check_stated(stated: Mapping[str, Any]) -> None:
    """InputError for a field of a new model's configuration, or of a model's inside it, that can't be meant."""
    for path, part in _parts(stated):
        check_names(part, path)
        _check_counts(part, path)


def _check_counts(stated: Mapping[str, Any], path: str) -> None:
    """transformers takes -1 layers for none, and divides by 0 heads."""
    try:
        others = AutoConfig.for_model(str(stated["model_type"])).attribute_map
    except WRONG:
        return  # said where the model is built
    own_names = {own: name for name, own in others.items()}
    for name, value in stated.items():
        is_none = isinstance(value, str | float) or (isinstance(value, int) and value < 1)
        if is_none and not isinstance(value, bool) and own_names.get(name, name) in _COUNTS:
            raise InputError(f"{path}.{name}: must be a whole number of at least 1, is {value!r}")


def check_names(stated: Mapping[str, Any], path: str = "model.config") -> None:
    """InputError for a field of a new model's configuration that is not one of its type's, but nearly is.

    transformers takes any name: for one wrong letter of hidden_size it would build a Llama of 7 billion weights.
    """
    model_type = str(stated["model_type"])
    try:
        known = AutoConfig.for_model(model_type)
    except WRONG:
        return  # said where the model is built
    names = {*known.to_dict(), *known.attribute_map}
    for name in stated:
        if name in names or hasattr(known, name):
            continue
        meant = sorted(each for each in names - stated.keys() if not each.startswith("_"))
        close = difflib.get_close_matches(name, meant, n=1, cutoff=_NEARLY)
        # In this order, since looking at all types costs seconds: only a name that will be refused comes so far.
        if close and not _changes_anything(name, stated) and name not in _names_anywhere():
            raise InputError(
                f"{path}.{name}: the configuration of {model_type} has no such field, and would take it for"
                f" nothing; did you mean {close[0]}?"
            )


def _changes_anything(name: str, stated: Mapping[str, Any]) -> bool:
    """Whether the configuration is another for this name, beside having it: some types read names that are no fields
    of theirs (Gemma 3's text sliding_window_pattern, DeepSeek V4 compress_ratios).

    Asked with a value that means nothing too: the stated one may be the default.
    """

    def built(settings: Mapping[str, Any]) -> Any:
        try:
            config = AutoConfig.for_model(str(stated["model_type"]), **settings)
        except WRONG as error:  # what is wrong without it too is said where the model is built
            return str(error)
        return {key: value for key, value in config.to_dict().items() if key != name}

    others = {key: value for key, value in stated.items() if key not in ("model_type", name)}
    without = built(others)
    return any(built(others | {name: value}) != without for value in (stated[name], object()))


@cache
def _names_anywhere() -> frozenset[str]:
    """Fields of any type's configuration: people copy them from one type to another, and transformers lets them."""
    found = {*_ONCE_OF_ALL, *vars(GenerationConfig())}
    for model_type in CONFIG_MAPPING:
        with contextlib.suppress(Exception):  # a type whose packages are not installed
            known = CONFIG_MAPPING[model_type]
            found |= {*getattr(known, "__dataclass_fields__", ()), *inspect.signature(known.__init__).parameters}
            found |= {*known.attribute_map}
    return frozenset(found)


def differs_by_layer(config: PretrainedConfig, name: str) -> bool:
    """Whether each layer has a value of its own: a list (Gemma 3n's intermediate_size), or what transformers gives of
    one layer alone (Gemma 4's head_dim), and raises RuntimeError for where all are asked."""
    try:
        return isinstance(getattr(config, name, None), list | tuple)
    except RuntimeError:
        return True


def size_of(config: PretrainedConfig, name: str) -> int | None:
    """A size that all layers have; None where there is none."""
    return None if differs_by_layer(config, name) else getattr(config, name, None)


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
    except WRONG:
        return None


def check_vocabulary(config: PretrainedConfig, size: int, *, field: str = "model.config.vocab_size") -> None:
    """InputError for a language model with fewer rows than the data has ids; `field`: where a job states them."""
    if config.vocab_size < size:
        raise InputError(
            f"model vocab_size is {config.vocab_size}, but the data's ids go up to {size - 1}:"
            f" set {field} to at least {size}, or use the model's own tokenizer"
        )
