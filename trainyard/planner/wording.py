"""A request as users word it, in the words of `predict`: other names of fields, other spellings of values."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from trainyard.errors import InputError
from trainyard.hardware import instance, instance_types

FIELDS = {
    **dict.fromkeys(("num_gpus", "n_gpus", "world_size"), "gpus"),
    **dict.fromkeys(("seq_len", "seq_length", "sequence_length", "max_seq_length"), "seq"),
    **dict.fromkeys(("micro_batch_size", "mbs", "per_device_train_batch_size"), "micro_batch"),
    **dict.fromkeys(("global_batch_size", "gbs"), "global_batch"),
    **dict.fromkeys(("tensor_parallel", "tensor_parallel_size"), "tp"),
    **dict.fromkeys(("pipeline_parallel", "pipeline_parallel_size"), "pp"),
    **dict.fromkeys(("context_parallel", "context_parallel_size"), "cp"),
    **dict.fromkeys(("expert_parallel", "expert_parallel_size"), "ep"),
    **dict.fromkeys(("num_layers", "num_hidden_layers"), "layers"),
    "hidden_size": "hidden",
    "intermediate_size": "ffn",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "vocab_size": "vocab",
    "model_name": "model",
}
"""Other names of fields, as frameworks' own options have them. `batch_size` is none: it may be either batch."""


HYBRID = ("hsdp", "hsdp2", "hybridshard", "fsdphybridshard", "hybridshardingfsdp")
"""Words, without what parts them, of weights that are cut within a node and copied from node to node."""


def _sharding(text: str) -> str:
    """ "ZeRO-3", "stage 3", "FSDP" and "FULL_SHARD" are zero3; what replicates too is, beside its copies (`HYBRID`)."""
    words = re.sub(r"[^a-z0-9]", "", text)
    stage = re.fullmatch(r"(?:zero|stage|zerostage)?([0-3])", words)
    if stage:
        return "none" if stage[1] == "0" else f"zero{stage[1]}"
    known = {"fsdp": "zero3", "fsdp2": "zero3", "fullshard": "zero3", "shardgradop": "zero2", "ddp": "none"}
    known |= {"noshard": "none", **dict.fromkeys(HYBRID, "zero3")}
    return known.get(words, "zero1" if words in ("distopt", "distributedoptimizer") else text)


def _precision(text: str) -> str:
    """ "bfloat16", "amp_bf16", "MXFP8", "NVFP4", "float16"; the kind of scales is no matter of these formulas. Of
    several ("bf16_with_fp8_mixed") the narrowest, which products have; two of one width say nothing, nor does a "no".
    """
    words = text.replace("bfloat", "bf").replace("float", "fp")
    found = set(re.findall(r"(?<![a-z])(?:mx|nv)?(bf16|fp(?:4|8|16|32|64)(?!\d))", words))
    if not found or re.search(r"(?<![a-z])(?:no|non|not|without)(?![a-z])", words):
        return "fp16" if words == "half" else text
    narrowest = min(int(word[2:]) for word in found)
    named = [word for word in found if int(word[2:]) == narrowest]
    return named[0] if len(named) == 1 else text


def _recompute(text: str) -> str:
    """Megatron's "uniform" and a plain yes compute all layers again (its "block" some, which it counts beside);
    torchtitan's "op" every second product."""
    words = re.sub(r"[^a-z0-9]", "", text)
    known = dict.fromkeys(("true", "yes", "on", "all", "uniform", "fulluniform"), "full")
    known |= dict.fromkeys(("gradientcheckpointing", "activationcheckpointing", "everylayer"), "full")
    known |= dict.fromkeys(("false", "no", "off", "disabled"), "none")
    known |= dict.fromkeys(("op", "selectiveop", "coreattn", "coreattention"), "selective")
    return known.get(words, text)


def _method(text: str) -> str:
    """ "SFT", "full fine-tuning" and "pretraining" train all weights; 4 bits under LoRA are QLoRA."""
    words = re.sub(r"[^a-z0-9]", "", text)
    if re.fullmatch(
        r"(?:full(?:parameters?|params?|weights?)?)?(?:sft|fft|(?:pre|continuedpre)?train(?:ing)?)?", words
    ):
        return "full" if words else text
    if re.fullmatch(r"(?:full(?:parameters?|params?|weights?)?)?fine?tun(?:e|ing)", words):
        return "full"
    known = dict.fromkeys(("qlora4bit", "qloranf4", "lora4bit", "4bitlora", "4bitqlora", "loranf4"), "qlora")
    known |= dict.fromkeys(("lora16bit", "lorabf16", "16bitlora", "loraft", "loratuning"), "lora")
    return known.get(words, text)


def _says_full(value: object) -> bool:
    """Whether a method is one of the words for whole models, but for "full" itself."""
    return isinstance(value, str) and value.lower() != "full" and _method(value.lower()) == "full"


SAME_STATE = "torch|apex|xla|npu|hf|bnb|fused|foreach|distributed|decoupled"
"""What names of AdamW add without a word of its averages: whose code it is, and how it is launched."""


def _optimizer(text: str) -> str:
    """ "torch.optim.AdamW", "adamw_torch_fused", "FusedAdam", "adamw_bnb_8bit", "paged_adamw_8bit". What has a word
    more ("galore_adamw", "adam_mini", 4 bits) keeps other averages, and is none of these."""
    words = re.sub(r"[^a-z0-9]", "", text.rsplit(".", 1)[-1])
    bits = "(?:8bit|32bit)?"
    rest = re.sub(SAME_STATE, "", words)
    if not re.fullmatch(f"(?:paged)?{bits}adamw?(?:paged)?{bits}", rest):
        return text
    return "adamw_paged" if "paged" in rest else "adamw_8bit" if "8bit" in rest else "adamw"


SPELLINGS: dict[str, Callable[[str], str]] = {
    "sharding": _sharding,
    **dict.fromkeys(("precision", "gradient_precision", "moment_precision"), _precision),
    "optimizer": _optimizer,
    "recompute": _recompute,
    "method": _method,
}


def in_plain_words(content: Mapping[str, Any]) -> dict[str, Any]:
    """The request in `predict`'s own words; what has none there stays as it is. InputError where two fields differ."""
    found = {name: value for name, value in content.items() if name not in FIELDS}
    for name in content.keys() & FIELDS.keys():
        value, usual = content[name], FIELDS[name]
        if value is not None and found.get(usual) not in (None, value):
            raise InputError(f"{name} {value!r}: {usual} is {found[usual]!r}; leave one of the two out")
        found[usual] = value if found.get(usual) is None else found[usual]
    found = _with_copies(_with_machine(found))
    for name, spelling in SPELLINGS.items():
        value = found.get(name)
        if name == "method" and found.get("lora_rank") is not None and _says_full(value):
            continue  # a rank is LoRA's: nothing is read into the two
        if isinstance(value, str) or (name == "sharding" and isinstance(value, int) and not isinstance(value, bool)):
            found[name] = spelling(str(value).lower())
    if isinstance(found.get("recompute"), bool):
        found["recompute"] = "full" if found["recompute"] else "none"
    return found


def _with_copies(found: dict[str, Any]) -> dict[str, Any]:
    """How many copies there are of weights under HSDP, where nobody states it: torch's HYBRID_SHARD has one a node
    (torch.distributed.fsdp.ShardingStrategy)."""
    words = re.sub(r"[^a-z0-9]", "", str(found.get("sharding")).lower())
    if words not in HYBRID or found.get("data_replicate") is not None:
        return found
    place = str(found.get("interconnect")).lower()
    machine = next((instance(name) for name in instance_types() if name in place), None)
    usual = machine.num_gpus if machine and machine.gpu else 8
    splits = (found.get(name) or 1 for name in ("tp", "pp", "cp"))
    stated = [found.get("gpus"), *splits, found.get("gpus_per_node") or usual]
    sizes = [size for size in stated if isinstance(size, int) and size > 0]
    if len(sizes) < len(stated):
        return found
    gpus, tensor, pipeline, context, per_node = sizes
    ranks, within = gpus // (tensor * pipeline * context), max(1, per_node // (tensor * context))
    return found if ranks > within and ranks % within else found | {"data_replicate": max(1, ranks // within)}


def _with_machine(found: dict[str, Any]) -> dict[str, Any]:
    """The GPU of an AWS machine that stands in its place, or that `interconnect` names while no GPU is stated."""
    stated, place = found.get("gpu"), found.get("interconnect")
    # What is stated and can't be (a 0) stays, to be refused.
    text = place if stated in (None, "") else stated
    if not isinstance(text, str):
        return found
    name = next((item for item in instance_types() if item in text.lower()), None)
    device = instance(name).gpu if name else None
    if device is None:
        return found
    # Which of its part's sizes the machine has: the A100 was made with 40 and 80 GB.
    size = round(device.memory_gib) if found.get("gpu_mem_gb") is None else found["gpu_mem_gb"]
    return found | {"gpu": device.name, "gpu_mem_gb": size, "interconnect": name if place in (None, "") else place}
