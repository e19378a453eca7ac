"""What a request's framework and its version say: engine, kernels, numerics, era, and what is usual there."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, cast, get_args

from trainyard.errors import InputError
from trainyard.hardware import Gpu, instance, instance_types
from trainyard.planner.constants import has_hopper_workspaces
from trainyard.planner.layout import (
    Engine,
    Kept,
    Layout,
    Library,
    Masters,
    Method,
    Rank,
)
from trainyard.planner.request_fields import Fields
from trainyard.planner.shapes import ModelShape
from trainyard.planner.time_constants import TORCH_TAKES_CUDNN

ATTENTIONS = ("flash", "flash_attention_2", "flash_attention_3", "unfused", "eager")
"""What `attention` may say: fused, with Ampere's kernels or Hopper's own, its matrix kept, and kept in fp32 as well."""

MASTERS = ("none", "weights", "copy")
"""Where a request's weights are in fp32: nowhere, as they are, or as a copy beside narrow ones."""

MOMENTS = ("fp32", "bf16", "fp16", "fp8")
"""What `moment_precision` may say."""

SHARDING = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}


def engine_of(fields: Fields, gpus: int, split: int) -> Engine:
    """Whose training state and kernels: by the framework's name, else by the layout, `split` over TP, PP and CP."""
    text = fields.text("framework").lower()
    known: tuple[tuple[str, Engine], ...] = (
        ("automodel", "torch"),
        ("deepspeed", "deepspeed"),
        ("megatron", "megatron"),
        ("nemo", "megatron"),
        ("nanotron", "megatron"),
        ("megascale", "megatron"),
        ("litgpt", "plain"),
        ("torchtune", "plain"),
        ("unsloth", "plain"),
        ("peft", "plain"),
        ("transformers", "plain"),
        ("hugging", "plain"),
    )
    if "megatron-deepspeed" in text:
        return "megatron"
    for word, engine in known:
        if word in text:
            return engine
    if text:
        return "torch"
    if split > 1:
        return "megatron"
    sharding = fields.choice("sharding", "none", SHARDING)
    if sharding in ("zero1", "zero2"):
        return "deepspeed"
    return "plain" if gpus == 1 or fields.text("method") in ("lora", "qlora") else "torch"


def has_flash(fields: Fields) -> bool:
    """Attention kept its matrix in frameworks before FlashAttention (2022)."""
    text = f"{fields.text('framework')} {fields.text('framework_version')}".lower()
    year = re.search(r"\b20(19|20|21|22)\b", text)
    return not (year or "megatron-deepspeed" in text)


RECIPES = ("nemo", "bridge")
"""Words of frameworks whose recipes all have Megatron's distributed optimizer."""

COMPILED = "compil"
"""In the words of a framework whose layers, or whose loss, torch.compile makes: compile, compiled, compilation."""

OWN_KERNELS = (COMPILED, "liger", "unsloth", "xtuner")
"""Words of a framework that says transformers, whose norms, rotations or losses are kernels of their own."""


def says(text: str, word: str) -> bool:
    """Whether a framework's words have one and don't deny it: "Liger kernels", not "no Liger kernels", "uncompiled"."""
    return word in text and not _denies(text, word)


def _denies(text: str, word: str) -> bool:
    """ "no Liger", "isn't compiled", "uncompiled", "torch.compile off", "compile=False", "torch.compile (disabled)"."""
    before = r"(?:\b(?:no|not|non|never|without|un)|n't)[\s-]*(?:yet\s+)?(?:(?:torch|fused)[.\s-]*)?"
    after = r"\w*(?:\s+kernels?)?(?:[\s(:=]+(?:(?:is|are|turned|set|to)\s+)*)(?:off|disabled|false|unused|not used)\b"
    # Of "compile: no liger" the no is another word's; a digit begins the version.
    return re.search(rf"{before}{word}|{word}{after}|{word}\w*\s*[:=]\s*no\s*(?:$|[,;)\d])", text) is not None


def _runs_unfused(text: str, engine: Engine, library: str) -> bool:
    """A kernel for each operation: transformers' layers, and a loop of one's own that says it isn't compiled."""
    own_loop = engine in ("torch", "plain") and not library and _denies(text, COMPILED)
    return own_loop or (library == "transformers" and not any(says(text, word) for word in OWN_KERNELS))


def liger_chunk_tokens(tokens: int, shape: ModelShape) -> int:
    """Of a micro-batch of `tokens`, how many Liger's fused loss makes logits of at a time: the tokens over how often
    the hidden states' width goes into the vocabulary, rounded up to a power of two (linkedin/Liger-Kernel,
    fused_linear_cross_entropy; arXiv:2410.10989)."""
    share = math.ceil(tokens / math.ceil(shape.vocab / shape.hidden))
    return min(tokens, 1 << (share - 1).bit_length())


def with_liger_chunks(fields: Fields, shape: ModelShape, layout: Layout) -> Layout:
    """The layout with Liger's parts of a micro-batch's loss, where `framework` says Liger and nobody states others."""
    if fields.given("loss_chunk_tokens") or not says(words_of(fields), "liger"):
        return layout
    tokens = int(layout.tokens_per_micro_batch)
    return dataclasses.replace(layout, loss_chunk_tokens=liger_chunk_tokens(tokens, shape))


def words_of(fields: Fields) -> str:
    """Framework and version, in small letters."""
    return f"{fields.text('framework')} {fields.text('framework_version')}".lower()


def kernels_of(fields: Fields, device: Gpu, engine: Engine, method: Method) -> dict[str, Any]:
    """Which kernels save what: of the framework, its era, and the generation of the GPU."""
    text = words_of(fields)
    year = re.search(r"\b20(\d\d)\b", text)
    deterministic = fields.flag("deterministic", False)
    attention = fields.choice("attention", "flash" if has_flash(fields) else "unfused", ATTENTIONS)
    library = next((name for name in ("litgpt", "transformers", "nanotron", "torchtune") if name in text), "")
    if engine == "plain" and not library and any(word in text for word in ("peft", "unsloth", "hugging")):
        library = "transformers"
    return {
        # Before flash attention, models were trained with dropout.
        "dropout": fields.flag("dropout", engine == "megatron" and not has_flash(fields)),
        "fused_loss": fields.flag("loss_fusion", has_flash(fields)),
        "weighs_inside": engine == "megatron" and _weighs_inside(fields, text),
        "narrow_weights": fields.flag("fp8_param_gather", any(word in text for word in RECIPES)),
        "compiled": engine != "megatron" and says(text, COMPILED),
        "compiled_loss": engine == "torch"
        and year is not None
        and int(year.group(1)) >= 25
        # Of other loops the layers are compiled alone, if anything is.
        and (says(text, COMPILED) or ("torchtitan" in text and not _denies(text, COMPILED))),
        "transformer_engine": fields.flag("transformer_engine", True),
        "expert_tensor": fields.whole("expert_tp", 1) if fields.given("expert_tp") else None,
        "rank": cast(Rank, fields.choice("rank", "worst", get_args(Rank))),
        "large_workspace": deterministic,
        "hopper": has_hopper_workspaces(device.name),
        "saves_every_second_product": "torchtitan" in text,
        "library": cast(Library, library),
        "unfused": _runs_unfused(text, engine, library),
        "pads_vocabulary": engine == "megatron" and "deepspeed" not in text and library != "nanotron",
        "deferred_head": fields.flag("deferred_head", False),
        "grouped_experts": fields.flag("grouped_experts", True),
        "gathers_tokens": fields.flag("gathers_tokens", False),
        "expert_overlap": fields.flag("expert_overlap", False) if fields.given("expert_overlap") else None,
        "capacity_factor": fields.number("capacity_factor"),
        "forwards_tokens": fields.choice("expert_exchange", "nccl", ("nccl", "deepep")) == "deepep",
        "host_exchange": _host_exchange(fields),
        "last_stage_layers": fields.whole("last_stage_layers", 1) if fields.given("last_stage_layers") else None,
        "flash_attention": attention.startswith("flash"),
        "attention_kernel": {"flash_attention_2": "ampere", "flash_attention_3": "own"}.get(attention, "usual"),
        "loss_chunk_tokens": fields.whole("loss_chunk_tokens", 1) if fields.given("loss_chunk_tokens") else None,
        "whole_logits": not fields.flag("parallel_loss", True),
        **_numerics(fields, loops_narrow=engine == "plain" and library == "transformers" and method == "full"),
        "fp32_softmax": attention == "eager",
    }


def _numerics(fields: Fields, *, loops_narrow: bool) -> dict[str, Any]:
    """What is in fp32 beside narrow products. InputError where two fields contradict each other.

    `loops_narrow`: transformers trains whole models, whose type is their weights'. Of fp16 there are none: torch's loss
    scaler refuses gradients of fp16 ("Attempting to unscale FP16 gradients"), so that its Trainer has autocast there.
    """
    words, precision = words_of(fields), fields.text("precision").lower()
    stated = fields.choice("master_weights", "usual", MASTERS) if fields.given("master_weights") else "usual"
    scales = loops_narrow and precision == "fp16"
    # PaddlePaddle's O1 narrows products alone; its O2 has weights and gradients of 16 bits, and the optimizer's copy.
    is_o1 = "paddle" in words and re.search(r"\bo1\b", words) is not None and precision not in ("fp32", "fp64")
    autocast = fields.flag("autocast", (scales or is_o1) and stated in ("usual", "weights"))
    if autocast and precision in ("fp32", "fp64"):
        raise InputError(f"autocast: makes fp32 narrower; set precision to bf16 or fp16 (given: {precision})")
    if autocast and stated not in ("usual", "weights"):
        raise InputError(f"master_weights {stated}: autocast has weights in fp32; leave one of the two out")
    masters = "copy" if "paddle" in words and stated == "usual" and not autocast else stated
    return {"autocast": autocast, "masters": cast(Masters, masters), **_kept_types(fields, precision)}


def _kept_types(fields: Fields, precision: str) -> dict[str, Kept]:
    """Of gradients' sums and of moments, `usual` where nobody says. InputError for a type of gradients that products of
    `precision` (bf16, where it says nothing) don't give."""
    narrow = precision if precision in ("fp32", "fp16") else "bf16"
    found: dict[str, Kept] = {}
    if precision == "fp64":
        return found  # all is
    if stated := fields.text("gradient_precision"):
        if stated.lower() not in ("fp32", narrow):
            allowed = " or ".join(dict.fromkeys(("fp32", narrow)))
            beside = precision or "bf16, which is assumed"
            raise InputError(f"gradient_precision: must be {allowed} (given: {stated!r}; precision: {beside})")
        found["gradient_precision"] = cast(Kept, stated.lower())
    if fields.text("moment_precision"):
        found["moment_precision"] = cast(Kept, fields.choice("moment_precision", "usual", MOMENTS))
    return found


def _host_exchange(fields: Fields) -> bool:
    """DeepEP on AWS's network, EFA, which its kernels can't drive from the GPU."""
    place = fields.text("interconnect").lower()
    machines = [instance(name) for name in instance_types() if name in place]
    efa = re.search(r"\befa", place) is not None or any(machine.efa_interfaces for machine in machines)
    return fields.choice("expert_exchange", "nccl", ("nccl", "deepep")) == "deepep" and efa


def usual_recompute(fields: Fields, kernels: Mapping[str, Any], gpus: int, method: Method) -> str:
    """What nobody states: transformers' tuning scripts turn checkpointing on, litgpt's where it shards."""
    if kernels["library"] == "transformers":
        return "full"
    return "full" if kernels["library"] == "litgpt" and (gpus > 1 or method == "full") else "none"


THIS_YEAR = 2026.0


def year_of(fields: Fields) -> float:
    """When the framework's version appeared; this year's where nobody says."""
    stated = _stated_year(fields)
    return THIS_YEAR if stated is None else stated


def _stated_year(fields: Fields) -> float | None:
    """The same from its words: "2024-08", "26.04" (containers' names), "2021"."""
    text = f"{fields.text('framework_version')} {fields.text('framework')}"
    dated = re.search(r"\b(20[12]\d)(?:-(\d\d))?", text)
    if dated:
        return float(dated.group(1)) + (int(dated.group(2)) - 0.5 if dated.group(2) else 6) / 12
    container = re.search(r"\b(2[1-9])\.(0[1-9]|1[0-2])\b", text)
    if container:
        return 2000 + int(container.group(1)) + (int(container.group(2)) - 0.5) / 12
    torch = re.search(r"torch[ =]*2\.(\d+)", text, re.IGNORECASE)
    if torch and int(torch.group(1)) >= 11:
        return TORCH_TAKES_CUDNN
    # Megatron-DeepSpeed is of 2022, FSDP's first version of 2023: later ones would be called something else.
    usual = {"megatron-deepspeed": 2022.5, "fsdp1": 2023.5}
    return next((year for word, year in usual.items() if word in text.lower()), None)


def exchanges_experts(fields: Fields, engine: Engine) -> bool:
    """Whether somebody says how tokens get to experts, of a framework that sends them to any."""
    return bool(fields.text("expert_exchange")) and (engine == "megatron" or "automodel" in words_of(fields))


WEIGHS_INSIDE_SINCE = 2025.5
"""Megatron-Core 0.13: "memory efficient token permutation" (Transformer Engine's pull request 1468, of February 2025).
Values of its own tests have experts' results all the same, to a percent, so that a version has to be said."""


def _weighs_inside(fields: Fields, text: str) -> bool:
    """Megatron-Bridge is younger than that; of Megatron's own core by its number, or its day."""
    if "megatron" not in text and not any(word in text for word in RECIPES):
        return False  # nanotron and others have code of their own
    is_said = _stated_year(fields) is not None and year_of(fields) >= WEIGHS_INSIDE_SINCE
    return "bridge" in text or is_said or re.search(r"(?<![\d.])0\.(1[3-9]|[2-9]\d)(?!\d)", text) is not None


STEP_GRAPHS_SINCE = 2026.4
"""NeMo's container 26.06: since then Megatron-Bridge's recipes for experts in MXFP8 on Blackwell launch whole steps
from a CUDA graph, with one kernel for an expert's products (its releases 0.5.0 and 0.5.1: DeepSeek, Qwen3, gpt-oss)."""


def graphs_step(fields: Fields, shape: ModelShape, layout: Layout, device: Gpu) -> bool:
    """Whether whole steps are launched from a CUDA graph: as stated, else as that framework's recipes do by then.

    Hybrids' recipes have theirs layer by layer, and are no faster since.
    """
    is_usual = (
        layout.engine == "megatron"
        and any(word in words_of(fields) for word in RECIPES)
        and layout.year > STEP_GRAPHS_SINCE
        and layout.precision == "fp8"
        and device.generation == "blackwell"
        and shape.experts > 0
        and not shape.is_hybrid
    )
    stated = fields.choice("cuda_graphs", "step" if is_usual else "layers", ("layers", "step"))
    return stated == "step"


def usual_optimizer(kernels: Mapping[str, Any], ranks: int, method: Method) -> str:
    """litgpt's recipes for whole models on one GPU keep AdamW's averages in paged memory."""
    return "adamw_paged" if kernels["library"] == "litgpt" and method == "full" and ranks == 1 else "adamw"
