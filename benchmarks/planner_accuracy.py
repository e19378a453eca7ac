"""How wrong the planner is, on published and measured runs.

    python benchmarks/planner_accuracy.py --rows DIR --dump FILE [--cross-validate]

DIR holds train_rows.csv, vtrain_single.csv, vtrain_multi.csv, megatron_ci_memory.csv, finetune_memory.csv and
nccl_measured.csv (those that exist are read). FILE gets one line per measured value: file,row,metric,measured,
predicted; an empty prediction is a refusal. A row goes through `predict`, as `trainyard predict --jsonl` would
answer it: whatever the row doesn't state is unknown to the planner too.

With --cross-validate the fitted constants are fitted again without each source, which is then scored by them.
"""

import argparse
import csv
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner_cross_validation import Case, held_out
from planner_fit import TimeCase, constants_table, fit, left_out, without_each
from planner_picking import Measured, layout_of_row, picking, told_apart

from trainyard.errors import InputError
from trainyard.hardware import gpu, instance
from trainyard.planner.communication import all_reduce_seconds, all_to_all_seconds, fabric_of, group, send_seconds
from trainyard.planner.constants import DEFAULT_MEMORY, GIB, MemoryConstants
from trainyard.planner.memory import memory
from trainyard.planner.predict import predict, understand
from trainyard.planner.timing import SPREAD_DENSE, SPREAD_LAUNCH, SPREAD_NEW, SPREAD_UNMEASURED, step_time, time_spread

Row = dict[str, str]
Answer = dict[str, Any]


@dataclass(frozen=True)
class Score:
    """One measured value and what the planner says; None: refused."""

    file: str
    row: int
    source: str
    metric: str
    measured: float
    predicted: float | None


def number(text: str | None) -> float | None:
    """The number in a cell, or None."""
    try:
        return float(text) if text else None
    except ValueError:
        return None


def whole(text: str | None) -> int | None:
    """The whole number in a cell, or None; of "1 (2)", two runs' in one cell, the first, as of the value."""
    value = number(re.sub(r"\s*\(.*\)", "", text)) if text else None
    return int(value) if value is not None and value == int(value) else None


def answer(fields: dict[str, Any]) -> Answer | None:
    """The planner's answer; None where it refuses."""
    try:
        return predict(fields)
    except InputError:
        return None


def precision_of(text: str) -> str | None:
    """The precision in a table's words."""
    lowered = text.lower()
    for name in ("fp8", "fp4", "bf16", "fp16"):
        if name in lowered:
            return name
    return None


def recompute_of(text: str) -> str | None:
    """The recomputation in a table's words."""
    lowered = text.lower()
    for name in ("none", "selective", "full"):
        if lowered.startswith(name):
            return name
    return "selective" if "sac" in lowered else None


def sharding_of(text: str) -> str | None:
    """The sharding in a table's words."""
    lowered = text.lower()
    if "zero-2" in lowered:
        return "zero2"
    if "dist" in lowered or "zero-1" in lowered:
        return "zero1"
    if "fsdp" in lowered or "zero-3" in lowered:
        return "zero3"
    return "none" if lowered.startswith(("none", "zero-0")) else None


TRAIN_FIELDS = ("layers", "hidden", "heads", "seq", "vocab", "gpus", "tp", "pp", "vp", "cp", "ep", "micro_batch")


def _global_batch(row: Row) -> int | None:
    """The global batch; unknown where the table's own degrees leave less than a sequence for a rank."""
    batch, gpus = whole(row["global_batch"]), whole(row["gpus"]) or 1
    split = (whole(row["tp"]) or 1) * (whole(row["pp"]) or 1) * (whole(row["cp"]) or 1)
    return None if batch is not None and batch < gpus // split else batch


def _precision(row: Row) -> str | None:
    """NeMo's tables print two kinds of FP8 in one cell, "1614 (1540)", and then leave the precision out."""
    pair = not row["precision"] and "printed as" in row["note"]
    return "fp8" if pair else precision_of(row["precision"])


def _framework(row: Row) -> str | None:
    """The framework; Megatron-Bridge's own tables name only the library under it."""
    return "Megatron-Bridge" if "/Megatron-Bridge" in row["source"] else row["framework"] or None


def _version(row: Row) -> str | None:
    """The release or date that the row's framework, place or source names."""
    for text in (row["framework"], row["locator"], row["source"]):
        found = re.search(r"\b(2\d\.(?:0[1-9]|1[0-2])|20[12]\d(?:-[01]\d)?)\b", text)
        if found:
            return found.group(1)
    paper = re.search(r"arXiv:(\d\d)(\d\d)\.", row["source"])
    return f"20{paper.group(1)}-{paper.group(2)}" if paper else None


def train_fields(row: Row) -> dict[str, Any]:
    """A row of train_rows.csv as `predict` reads it."""
    fields: dict[str, Any] = {name: whole(row[name]) for name in TRAIN_FIELDS}
    fields |= {"kv_heads": whole(row["kv_heads"]), "global_batch": _global_batch(row)}
    if row["family"] == "moe" or not (row["layers"] or row["params_B"]):
        # The table prints the experts' width as ffn and leaves out their number: the name must tell.
        fields |= {"model": re.sub(r"\(.*\)", "", row["model"]), "moe_ffn": whole(row["ffn"])}
    else:
        fields["ffn"] = whole(row["ffn"])
    fields |= {
        "params_b": number(row["params_B"]),
        "gpu": row["gpu"] or None,
        "gpu_mem_gb": number(row["gpu_mem_GB"]),
        "interconnect": row["interconnect"] or None,
        "sharding": sharding_of(row["zero_or_fsdp"]),
        "precision": _precision(row),
        "recompute": recompute_of(row["recompute"]),
        "sequence_parallel": True if "sequence par" in row["recompute"] else None,
        "framework": _framework(row),
        "framework_version": _version(row),
        "method": "lora" if row["task"] == "lora" else None,
        "mtp_layers": 0 if "w/o MTP" in row["model"] else None,
        "expert_exchange": "deepep" if "DeepEP" in row["note"] else None,
        "expert_overlap": _expert_overlap(row["note"]),
    }
    return fields


def _expert_overlap(note: str) -> bool | None:
    """Whether the experts' exchange was overlapped, where the note says so."""
    said = re.search(r"a2a overlap (on|off)", note)
    return said.group(1) == "on" if said else None


def _hardware_share(row: Row) -> float:
    """Hardware over model FLOPs: full recomputation runs the forward pass twice."""
    return 4 / 3 if recompute_of(row["recompute"]) == "full" else 1.0


def _tokens(row: Row, result: Answer) -> float:
    gpus = whole(row["gpus"]) or 1
    return float(result["tokens_per_second_per_gpu"]) * gpus


TRAIN_METRICS: dict[str, Callable[[Row, Answer], float]] = {
    "tokens_per_s_per_gpu": lambda row, result: result["tokens_per_second_per_gpu"],
    "tokens_per_s_total": _tokens,
    "samples_per_s_total_median": lambda row, result: _tokens(row, result) / (whole(row["seq"]) or 2048),
    "step_time_s": lambda row, result: result["step_seconds"],
    "iter_time_s": lambda row, result: result["step_seconds"],
    "iter_time_ms": lambda row, result: result["step_seconds"] * 1000,
    "model_tflops_per_gpu": lambda row, result: result["model_tflops_per_gpu"],
    "tflops_per_gpu": lambda row, result: result["model_tflops_per_gpu"],
    "hw_tflops_per_gpu": lambda row, result: result["model_tflops_per_gpu"] * _hardware_share(row),
    "aggregate_pflops": lambda row, result: (
        result["model_tflops_per_gpu"] * _hardware_share(row) * (whole(row["gpus"]) or 1) / 1000
    ),
    "MFU": lambda row, result: result["mfu"] * 100,
    "pct_peak": lambda row, result: result["mfu"] * _hardware_share(row) * 100,
    "HFU": lambda row, result: result["mfu"] * _hardware_share(row) * 100,
    "peak_memory_GiB": lambda row, result: result["peak_memory_gib"],
    "peak_memory_GB": lambda row, result: result["peak_memory_gib"] * GIB / 1e9,
    "mem_activations_GiB_per_gpu": lambda row, result: result["activation_gib"],
    "mem_params_opt_GiB_per_gpu": lambda row, result: result["model_state_gib"],
}

UNSCORED = {
    "model_state_GB_ZeRO1": "a printed formula, no measurement",
    "model_state_GB_ZeRO2": "a printed formula, no measurement",
    "model_state_GB_ZeRO3": "a printed formula, no measurement",
    "mem_activations_pct_of_TP_baseline": "a ratio of two configurations",
    "OOM": "a flag",
}


def train_scores(rows: Iterable[Row], name: str) -> Iterator[Score]:
    """train_rows.csv: throughput, step time, FLOPS and memory."""
    for index, row in enumerate(rows):
        metric, measured = row["reported_metric"], number(row["value"])
        if metric not in TRAIN_METRICS or measured is None:
            continue
        result = answer(train_fields(row))
        predicted = TRAIN_METRICS[metric](row, result) if result is not None else None
        yield Score(name, index, row["source"], metric, measured, predicted)


def unscored(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each metric of train_rows.csv that no score is taken of, with its rows and the reason."""
    counts = Counter(row["reported_metric"] for row in rows)
    for metric in sorted(set(counts) - set(TRAIN_METRICS)):
        yield f"not scored: {counts[metric]} rows of {metric} ({UNSCORED.get(metric, 'a metric unknown here')})"


VTRAIN_FIELDS = ("layers", "hidden", "heads", "seq", "vocab", "gpus", "tp", "pp", "dp", "micro_batch", "global_batch")


def vtrain_fields(row: Row) -> dict[str, Any]:
    """A row of vtrain_*.csv as `predict` reads it."""
    fields: dict[str, Any] = {key: whole(row[key]) for key in VTRAIN_FIELDS}
    return fields | {
        "ffn": 4 * (whole(row["hidden"]) or 0),
        "gpu": row["gpu"],
        "precision": precision_of(row["precision"]),
        "recompute": recompute_of(row["recompute"]),
        "interconnect": row["interconnect"],
        "framework": "Megatron-DeepSpeed",
    }


def vtrain_scores(rows: Iterable[Row], name: str) -> Iterator[Score]:
    """vtrain_*.csv: iteration times of Megatron-DeepSpeed on A100."""
    for index, row in enumerate(rows):
        result = answer(vtrain_fields(row))
        predicted = result["step_seconds"] * 1000 if result else None
        yield Score(name, index, row["source"], row["reported_metric"], float(row["value"]), predicted)


VOCABULARIES = {"BertWordPieceCase": 29096, "bert": 28996, "GPTSentencePieceTokenizer": 256000}
"""Words of the vocabulary by tokenizer or family; otherwise GPT-2's."""


def _padded_vocabulary(row: Row) -> int:
    """Megatron pads to a multiple of 128 for each tensor rank."""
    words = whole(row["vocab"]) or VOCABULARIES.get(row["tokenizer"] or row["family"], 50257)
    multiple = 128 * (whole(row["tp"]) or 1)
    return -(-words // multiple) * multiple


def _feed_forward(row: Row) -> int:
    """Megatron's width where none is stated: 4 x hidden, and gated two thirds of it in multiples of 64."""
    hidden = whole(row["hidden"]) or 0
    usual = 8 * hidden // 3 // 64 * 64 if row["swiglu"] == "True" else 4 * hidden
    return whole(row["ffn_hidden"]) or usual


GROUPED_CASES = ("groupedGEMM", "gpt3_moe_", "zp_z3", "in_collective", "ep4_etp1", "deepseek")
"""Cases with --moe-grouped-gemm among their arguments."""


ROTATED = ("rope", "release", "grpo", "hybrid", "deepseek", "etp1", "cudagraph", "mimo")
"""Cases with rotary positions, or with none."""


def _deterministic(row: Row) -> bool:
    """Most CI cases run deterministic; context parallelism and fused losses can't."""
    can_not = ("nondeterministic", "cross_entropy_loss_fusion", "reshard", "memory_speed", "release", "grpo", "fp8")
    return row["cp"] in ("", "1") and not any(word in row["case"] for word in can_not)


def _large_workspace(row: Row) -> bool:
    """cuBLAS has the workspaces of 32 MiB that determinism needs, also in cases that then are not deterministic."""
    if row["family"] == "gpt" and row["cp"] not in ("", "1"):
        return False
    return not any(word in row["case"] for word in ("cross_entropy_loss_fusion", "reshard", "etp1", "release"))


def _megatron_recompute(row: Row, *, inferred: bool) -> str:
    """Selective recomputation spares the attention matrix only where its modules (default: it alone) name it."""
    modules = row["recompute_modules"]
    kept = modules and "core_attn" not in modules and not (inferred and "offloading" in row["case"])
    return "none" if kept else row["recompute"] or "none"


def _unfused(row: Row) -> bool:
    """Attention with its matrix: BERT and T5 always, the others where they had to be deterministic before kernels were.

    Values of the cases that don't resume, and of one cluster's files, are from before. What a file has of results
    (how many, of which steps) would tell more of its age, but is no part of a configuration.
    """
    if row["family"] in ("bert", "t5", "hybrid") or row["mla"] or not _transformer_engine(row):
        return True
    old_cluster = "dracooci" in row["suffix"]
    if "cross_entropy_loss_fusion" in row["case"]:
        return old_cluster
    return _deterministic(row) and ("resume" not in row["case"] or old_cluster)


def _transformer_engine(row: Row) -> bool:
    """Layers of Transformer Engine: cases of Megatron's own layers have other names; context parallelism needs it."""
    own = row["case"].startswith(("gpt3_mcore_tp", "t5_mcore_tp"))
    return not own or row["cp"] not in ("", "1")


def _family_fields(row: Row, *, inferred: bool) -> dict[str, Any]:
    """What only one family has: T5's and LLaVA's encoders, BERT's head, frozen language models."""
    family = row["family"]
    if family == "t5":
        # T5-base: 12 layers of 512 positions that 12 layers of 128 attend to.
        return {"layers": 12, "seq": 128, "encoder_layers": 12, "encoder_seq": 512, "cross_attention": True}
    if family == "multimodal-llava":
        # A vision transformer of the language model's own sizes: 576 patches and a class token. They stand for a token
        # that pretrain_vlm.py puts before the text, so that nothing of that is lost.
        tokens = 577
        layers, seq = whole(row["layers"]), (whole(row["seq"]) or 1024) + tokens
        return {"seq": seq, "encoder_layers": layers, "encoder_seq": tokens}
    if family == "bert":
        # Its pooler, for the guess whether sentences follow each other, and its head's transform.
        return {"head_products": 2}
    if family == "mimo":
        # The language model is frozen; without --bf16 it is in fp32.
        # A micro-batch's samples share one packed sequence.
        return {
            "micro_batch": 1,
            "method": "lora",
            "lora_rank": 1,
            "precision": "bf16" if row["bf16"] == "True" else "fp32",
        }
    if row["hybrid_pattern"]:
        return {"hybrid_pattern": row["hybrid_pattern"], "layers": None}
    return _argument_fields(row) if inferred else {"mla": True} if row["mla"] == "True" else {}


def _argument_fields(row: Row) -> dict[str, Any]:
    """What single cases have beside, by their names: latent attention, layers spread with embedding and loss."""
    if "deepseek_proxy" in row["case"]:
        # Its file: one dense layer and one of experts with a shared one, on one pipeline rank, no further token.
        return {"mla": True, "shared_ffn": 1024, "dense_layers": 1, "vocab": 50304}
    if row["mla"] == "True":
        # Their configuration files: one dense layer, four virtual stages a rank, a shared expert, one further token.
        chunks = None if "offloading" in row["case"] else 4
        return {"mla": True, "shared_ffn": 1024, "dense_layers": 1, "mtp_layers": 1, "vocab": 51200, "vp": chunks}
    if "account_for_embedding_loss" in row["case"]:
        # Embedding and loss count as a layer each when the layers are spread; vp2: two virtual stages a rank.
        layers, pipeline = whole(row["layers"]) or 0, whole(row["pp"]) or 1
        return {"last_stage_layers": (layers + 2) // pipeline - 1, "vp": 2}
    if "uneven_pipeline" in row["case"]:
        # Its file: two layers at either end, the others in the middle.
        return {"last_stage_layers": 2}
    return {}


def _inferred_fields(row: Row) -> dict[str, Any]:
    """What a row's case and file are taken to say by their names, by rules written with these rows in view."""
    case = row["case"]
    return {
        "data_replicate": 2 if "multi_dist_optimizer_instances" in case else None,
        "deterministic": _large_workspace(row),
        "attention": "eager" if "uninstall_te" in case else "unfused" if _unfused(row) else "flash",
        "loss_fusion": "loss_fusion" in case or "memory_speed" in case,
        "transformer_engine": _transformer_engine(row),
        "deferred_head": "defer_embedding_wgrad" in case,
        "grouped_experts": any(word in case for word in GROUPED_CASES),
        # Cases that state the experts' tensor parallelism exchange tokens all-to-all; gathering is Megatron's default.
        "gathers_tokens": not row["etp"],
        # Models without rotation learn a position for each token of their sequence.
        "learned_positions": None if any(word in case for word in ROTATED) else whole(row["seq"]),
    }


def megatron_fields(row: Row, *, inferred: bool = True, options: bool = False) -> dict[str, Any]:
    """A row of megatron_ci_memory.csv as `predict` reads it.

    Without `inferred` and `options`, the row's columns alone: what a user states of sizes, layout and precision. With
    `options`, Megatron's own that decide over memory too, which stand on a user's command line and in no column here.
    """
    fields: dict[str, Any] = {
        key: whole(row[key])
        for key in ("layers", "hidden", "heads", "kv_heads", "seq", "tp", "pp", "cp", "ep", "micro_batch")
    }
    layers, pipeline, chunk = whole(row["layers"]), whole(row["pp"]) or 1, whole(row["vpp_layers"])
    split = (whole(row["tp"]) or 1) * pipeline * (whole(row["cp"]) or 1)
    # A test has one node where nothing is said, a release run eight: a user knows his GPUs.
    usual = 64 if "release" in row["case"] else 8
    return fields | {
        "ffn": _feed_forward(row),
        "head_dim": whole(row["kv_channels"]),
        "vocab": _padded_vocabulary(row),
        "gated_mlp": row["swiglu"] == "True",
        "tied_embeddings": row["untied"] != "True",
        "vp": layers // pipeline // chunk if layers and chunk else None,
        "gpus": max(whole(row["gpus"]) or usual, split),
        "global_batch": whole(row["global_batch"]),
        "experts": whole(row["num_experts"]),
        "experts_per_token": whole(row["topk"]),
        "moe_ffn": whole(row["moe_ffn"]),
        "expert_tp": whole(row["etp"]),
        "sequence_parallel": row["sp"] == "True",
        "sharding": "zero3" if row["fsdp"] == "True" else "zero1" if row["dist_opt"] == "True" else "none",
        "precision": "fp8" if row["fp8"] else "bf16" if row["bf16"] == "True" else "fp16",
        "recompute": _megatron_recompute(row, inferred=inferred),
        "dropout": not row["dropout"].startswith("0.0"),
        "rank": "last",
        **(_inferred_fields(row) if inferred or options else {}),
        **_family_fields(row, inferred=inferred),
        "framework": "Megatron-Core",
        "gpu": "H100" if "h100" in row["platform"] + row["suffix"] else "A100",
    }


def megatron_scores(rows: Iterable[Row], name: str, *, inferred: bool = True, options: bool = False) -> Iterator[Score]:
    """megatron_ci_memory.csv: static and peak bytes of the last rank."""
    for index, row in enumerate(rows):
        result = answer(megatron_fields(row, inferred=inferred, options=options))
        static = result["resting_memory_gib"] * GIB if result else None
        peak = result["peak_memory_gib"] * GIB if result else None
        for metric, predicted in (("mem_allocated_bytes_last", static), ("mem_max_allocated_bytes_final", peak)):
            measured = number(row[metric])
            if measured is not None:
                yield Score(name, index, row["family"], metric, measured, predicted)


def megatron_alone(rows: list[Row], name: str) -> Iterator[str]:
    """The lines of megatron_ci_memory.csv with nothing inferred from a case's name, and with its options alone, as who
    runs it knows them; such scores are not dumped."""
    for words, options in (("names unread", False), ("options stated", True)):
        scores = list(megatron_scores(rows, name, inferred=False, options=options))
        for metric in dict.fromkeys(score.metric for score in scores):
            yield line(f"{name}: {metric}, {words}", [score for score in scores if score.metric == metric])


WIDE_OFF = 0.15
"""Relative error from which a Megatron case is named."""


def far_off(scores: Iterable[Score], rows: list[Row], name: str) -> Iterator[str]:
    """The cases of megatron_ci_memory.csv with a value off by more than `WIDE_OFF`, the worst first."""
    cases: dict[str, list[Score]] = {}
    for score in scores:
        if score.file == name and error(score) > WIDE_OFF:
            cases.setdefault(rows[score.row]["case"], []).append(score)
    yield f"{name}: {sum(map(len, cases.values()))} values of {len(cases)} cases are off by more than {WIDE_OFF:.0%}"
    for case, members in sorted(cases.items(), key=lambda item: -max(map(error, item[1]))):
        worst = max(members, key=error)
        away = "refused" if worst.predicted is None else f"{worst.predicted / worst.measured - 1:+.1%}"
        kind = "peak" if "max" in worst.metric else "static"
        yield f"  {away:>8} {kind:6} {len(members):3d} values  {case}"


def _finetune_library(row: Row) -> dict[str, Any]:
    """Whose loop: the source's own scripts say what a row leaves out."""
    if row["id"].startswith("litgpt"):
        # Rows of the recipes ran on one GPU, whatever their GPU column says (the page's text).
        alone = "one GPU" in row["note"]
        checkpointed = "FSDP act-ckpt" in row["recompute"] and (whole(row["gpus"]) or 1) > 1
        return {"framework": "litgpt", "recompute": "full" if checkpointed else None} | ({"gpus": 1} if alone else {})
    if "Qwen README" in row["source"]:
        full = row["method"].startswith("Full")
        # finetune.py: rank 64 on four products a layer; whole models by ZeRO-3 without offload, checkpointed.
        adapters = {"lora_rank": 64, "lora_targets": 7, "trains_vocabulary": "(emb)" in row["method"]}
        zero = {"framework": "DeepSpeed", "sharding": "zero3"} if full else {"framework": "transformers"}
        return {"recompute": "full"} | adapters | zero
    recompute = "full" if "checkpointing" in row["recompute"] else "none" if row["recompute"] == "none" else None
    optimizer = "adamw_8bit" if "8bit" in row["note"] else None
    return {"framework": "transformers", "recompute": recompute, "optimizer": optimizer}


def finetune_fields(row: Row) -> dict[str, Any]:
    """A row of finetune_memory.csv as `predict` reads it."""
    method = row["method"].lower()
    quantized = row["quant"].lower() not in ("", "none")
    kind = "full" if method.startswith("full") else "qlora" if quantized or method.startswith("q") else "lora"
    return {
        "model": row["model"],
        "params_b": number(row["params_B"]),
        "gpu": row["gpu"],
        "gpu_mem_gb": number(row["gpu_mem_GB"]),
        "gpus": whole(row["gpus"]),
        "seq": whole(row["seq"]),
        "micro_batch": whole(row["micro_batch"]),
        "precision": precision_of(row["precision"]),
        "method": kind,
        "quantization": "gptq" if "gptq" in row["quant"].lower() else None,
        "adapter": "scale" if "adapter v2" in method else "prefix" if "adapter" in method else None,
        **_finetune_library(row),
    }


def finetune_scores(rows: Iterable[Row], name: str) -> Iterator[Score]:
    """finetune_memory.csv: peaks in the row's unit (sums over GPUs where it says so) and whether it ran."""
    for index, row in enumerate(rows):
        result = answer(finetune_fields(row))
        measured = number(row["peak_memory"])
        if measured is not None:
            unit = GIB if row["mem_unit"] == "GiB" else 1e9
            copies = (whole(row["gpus"]) or 1) if "sum over" in row["mem_unit"] else 1
            kind = "reserved_memory_gib" if "reserved" in row["note"] or copies > 1 else "peak_memory_gib"
            if "Qwen README" in row["source"]:
                # Of whole devices: sums over them, and 1.5 GB more than any tensor takes even where nothing else is.
                kind = "device_memory_gib"
            predicted = result[kind] * GIB / unit * copies if result else None
            yield Score(name, index, row["source"], "peak_memory", measured, predicted)
        if row["outcome"] in ("ok", "OOM"):
            fits = float(result["fits"]) if result else None
            yield Score(name, index, row["source"], "fits", float(row["outcome"] == "ok"), fits)


def nccl_scores(rows: Iterable[Row], name: str) -> Iterator[Score]:
    """nccl_measured.csv: microseconds of one collective."""
    for index, row in enumerate(rows):
        measured, size = number(row["time_us"]), number(row["size_bytes"])
        if measured is None or size is None:
            continue
        yield Score(name, index, row["source"], "time_us", measured, _collective_us(row, size))


def _collective_us(row: Row, size: float) -> float | None:
    try:
        links = fabric_of(instance(row["instance"]))
    except InputError:
        return None
    # Some rows say the number of ranks only through the ratio of their two bandwidths, which is that of 8.
    members = group(whole(row["gpus"]) or 8, 1, links.gpus_per_node)
    if row["collective"] == "all_reduce":
        return all_reduce_seconds(size, members, links) * 1e6
    if row["collective"] == "alltoall":
        return all_to_all_seconds(size, members, links) * 1e6
    return send_seconds(size, between_nodes=True, links=links) * 1e6


FILES: dict[str, Callable[[Iterable[Row], str], Iterator[Score]]] = {
    "train_rows": train_scores,
    "vtrain_single": vtrain_scores,
    "vtrain_multi": vtrain_scores,
    "megatron_ci_memory": megatron_scores,
    "finetune_memory": finetune_scores,
    "nccl_measured": nccl_scores,
}


def error(score: Score) -> float:
    """Relative error; a refusal is infinitely wrong."""
    if score.predicted is None:
        return math.inf
    return abs(score.predicted / score.measured - 1)


def line(title: str, scores: list[Score]) -> str:
    """One line of a table: count, refusals, median, p90, worst answered, bias of the answered ones."""
    answered = [score for score in scores if score.predicted is not None]
    errors = sorted(error(score) for score in scores)
    middle = f"{statistics.median(errors):7.1%}" if math.isfinite(statistics.median(errors)) else "refused"
    ninth = errors[min(len(errors) - 1, math.ceil(0.9 * len(errors)) - 1)]
    p90 = f"{ninth:7.1%}" if math.isfinite(ninth) else "refused"
    worst = max((error(score) for score in answered), default=math.nan)
    ratios = [score.predicted / score.measured for score in answered if score.predicted]
    bias = statistics.median(ratios) - 1 if ratios else math.nan
    refused = len(scores) - len(answered)
    return f"{title[:72]:72} {len(scores):5d} {refused:8d} {middle} {p90} {worst:8.1%} {bias:+7.1%}"


def fits_line(title: str, scores: list[Score]) -> str:
    """Verdicts on memory: what was called fitting and ran out, and the reverse."""
    missed = sum(score.predicted == 1 and score.measured == 0 for score in scores)
    alarms = sum(score.predicted == 0 and score.measured == 1 for score in scores)
    refused = sum(score.predicted is None for score in scores)
    ran = sum(score.measured == 1 for score in scores)
    return (
        f"{title[:72]:72} {len(scores):5d} {refused:8d} called fitting but out of memory: {missed} of "
        f"{len(scores) - ran}; false alarms: {alarms} of {ran}"
    )


def _is_new(row: Row) -> bool:
    """Experts, fewer bits than 16, or Blackwell and its like."""
    parts = {"fp8", "fp4"}, {"blackwell", "cdna3"}
    return row["family"] == "moe" or _precision(row) in parts[0] or gpu(row["gpu"]).generation in parts[1]


def by_kind(scores: Iterable[Score], rows: list[Row], name: str = "train_rows") -> Iterator[str]:
    """The lines of train_rows.csv's times and throughputs: dense models in 16 bits up to Hopper, and all others."""
    groups: dict[bool, list[Score]] = {False: [], True: []}
    for score in scores:
        if score.file == name and "mem" not in score.metric:
            groups[_is_new(rows[score.row])].append(score)
    titles = {False: "dense, 16 bits, up to Hopper", True: "experts, FP8, FP4, Blackwell"}
    for new, members in groups.items():
        if members:
            yield line(f"{name}: time and throughput, {titles[new]}", members)


SAME_JOB = ("layers", "hidden", "heads", "seq", "vocab", "gpus", "global_batch")
"""Columns of vtrain_*.csv that say which job a row's layout is of."""


def same_jobs(scores: Iterable[Score], rows: list[Row], name: str) -> list[Measured]:
    """Of one of vTrain's files, what was measured and predicted, by job and layout."""
    return [
        Measured(
            tuple(rows[score.row][field] for field in SAME_JOB),
            layout_of_row(rows[score.row]),
            score.measured,
            score.predicted,
        )
        for score in scores
        if score.file == name and score.predicted is not None
    ]


def picking_lines(scores: Iterable[Score], folder: Path) -> Iterator[str]:
    """What picking a layout loses, and how near estimates may lie to tell two apart; with the mean error of a time."""
    held = list(scores)
    for name in ("vtrain_single", "vtrain_multi"):
        if found := same_jobs(held, _rows(folder, name), name):
            mean = statistics.fmean(error(score) for score in held if score.file == name)
            yield f"{picking(found, name)}; mean error of a time {mean:.1%}"
            yield from told_apart(found, name)


MEMORY_GRIDS = {
    "selective_share": (0.3, 0.5, 0.7, 0.85, 1.0),
    "plain_loss_bytes": (6.0, 8.0, 10.0, 12.0, 14.0, 16.0),
    "quantized_inputs": (0.0, 0.5, 1.0, 1.5, 2.0),
}
"""The memory formulas' fitted constants but `load_spread`, which is fitted to Megatron's tests alone: without them no
other source could say it. The others that Megatron's rows depend on are derived."""


def _memory_case(
    group: str, fields: dict[str, Any], measured: float, *, unit: float, whole_device: bool = False
) -> Case[MemoryConstants] | None:
    """A peak in bytes / `unit`, of the allocator or the whole device; None where the planner refuses."""
    try:
        question = understand(fields)
    except InputError:
        return None

    def predicted(constants: MemoryConstants) -> float:
        use = memory(question.shape, question.layout, constants)
        return (use.device if whole_device else use.allocated) / unit

    return Case(group, measured, predicted)


def memory_cases(folder: Path) -> list[Case[MemoryConstants]]:
    """Published peaks that depend on a fitted constant: of fine-tuning, and of train_rows."""
    cases = []
    for row in _rows(folder, "finetune_memory"):
        measured, gpus = number(row["peak_memory"]), whole(row["gpus"]) or 1
        if measured is not None and "reserved" not in row["note"]:
            unit = (GIB if row["mem_unit"] == "GiB" else 1e9) / (gpus if "sum over" in row["mem_unit"] else 1)
            device = "Qwen README" in row["source"]
            cases.append(_memory_case(row["source"], finetune_fields(row), measured, unit=unit, whole_device=device))
    for row in _rows(folder, "train_rows"):
        measured = number(row["value"])
        if row["reported_metric"].startswith("peak_memory") and measured is not None:
            unit = GIB if row["reported_metric"].endswith("GiB") else 1e9
            cases.append(_memory_case(row["source"], train_fields(row), measured, unit=unit))
    return [case for case in cases if case is not None]


def held_needs(folder: Path) -> Iterator[str]:
    """How many measured peaks the predicted need holds, and how many the estimate and its margin alone.

    A row that is refused has neither, and is counted as not held.
    """
    for name, metric in (("megatron_ci_memory", "mem_max_allocated_bytes_final"), ("finetune_memory", "peak_memory")):
        found = []
        for row in _rows(folder, name):
            measured = number(row[metric])
            if measured is None:
                continue
            fields = megatron_fields(row) if name == "megatron_ci_memory" else finetune_fields(row)
            try:
                question = understand(fields)
            except InputError:
                found.append((False, False))
                continue
            use = memory(question.shape, question.layout)
            if name == "finetune_memory":
                gpus = whole(row["gpus"]) or 1
                measured *= (GIB if row["mem_unit"] == "GiB" else 1e9) / (gpus if "sum over" in row["mem_unit"] else 1)
            estimate = use.device if "Qwen README" in row["source"] else use.allocated
            found.append((measured <= use.needed, measured <= estimate + use.margin))
        if found:
            needed, margin = (sum(column) / len(found) for column in zip(*found, strict=True))
            yield f"{name}: {needed:.0%} of {len(found)} peaks within the need, {margin:.0%} within estimate and margin"


def cross_validated_memory(folder: Path) -> Iterator[str]:
    """Errors by source, with the shipped constants and with those fitted without it."""
    cases = memory_cases(folder)
    if len({case.group for case in cases}) < 2:
        yield "memory: fewer than two sources, nothing to leave out"
        return
    yield f"{'peak memory, by source':72} {'rows':>5} {'shipped':>8} {'held out':>8}  constants fitted without it"
    pairs: dict[str, list[tuple[float, float]]] = {}
    fitted: dict[str, MemoryConstants] = {}
    for held in held_out(cases, DEFAULT_MEMORY, MEMORY_GRIDS):
        case, predicted = held.case, held.predicted or math.inf
        shipped = case.predict(DEFAULT_MEMORY) or math.inf
        pairs.setdefault(case.group, []).append((abs(shipped / case.measured - 1), abs(predicted / case.measured - 1)))
        fitted[case.group] = held.constants
    for source, errors in pairs.items():
        shipped, left_out = (statistics.median(pair[index] for pair in errors) for index in (0, 1))
        values = ", ".join(f"{name} {getattr(fitted[source], name):g}" for name in MEMORY_GRIDS)
        yield f"{source[:72]:72} {len(errors):5d} {shipped:8.1%} {left_out:8.1%}  {values}"
    everything = [pair for errors in pairs.values() for pair in errors]
    shipped, left_out = (statistics.median(pair[index] for pair in everything) for index in (0, 1))
    yield f"{'all':72} {len(everything):5d} {shipped:8.1%} {left_out:8.1%}"


STEP_METRICS = ("step_time_s", "iter_time_s", "iter_time_ms", "iteration_time_ms")
SMOKE_TESTS = ("smoke test", "un-tuned", "do not use")
"""Notes on rows that show that something runs, not how fast it can: scored, never fitted."""


def time_cases(folder: Path) -> list[tuple[Score, TimeCase]]:
    """What tells a step's time, as the fit reads it."""
    found = []
    for name, scorer in (
        ("train_rows", train_scores),
        ("vtrain_single", vtrain_scores),
        ("vtrain_multi", vtrain_scores),
    ):
        rows = _rows(folder, name)
        for score in scorer(rows, name):
            row = rows[score.row]
            if "emory" in score.metric or score.metric.startswith("mem_") or not score.predicted:
                continue
            question = understand(train_fields(row) if name == "train_rows" else vtrain_fields(row))
            seconds = step_time(question.shape, question.layout, question.device, question.links).total
            slower = 1 if score.metric in STEP_METRICS else -1
            measured = seconds * (score.measured / score.predicted) ** slower
            smoke = any(word in row.get("note", "") for word in SMOKE_TESTS)
            together = "vTrain" if name != "train_rows" else ""
            case = TimeCase(score.source, question, measured, fitted=not smoke, left_out_with=together)
            found.append((score, case))
    return found


def coverage(title: str, pairs: list[tuple[Score, TimeCase]]) -> str:
    """How many measured values the 80% interval around the prediction holds."""
    held, widths = 0, []
    for score, case in pairs:
        spread = time_spread(case.question.shape, case.question.layout, case.question.device)
        assert score.predicted
        held += score.predicted / spread <= score.measured <= score.predicted * spread
        widths.append(spread - 1 / spread)
    share = f"{held / len(pairs):6.1%} of {len(pairs)} inside the 80% interval"
    return f"{title[:72]:72} {share}, median width {statistics.median(widths):.0%} of the estimate"


def cross_validated_time(folder: Path) -> Iterator[str]:
    """Step time and throughput as constants predict them that never saw the row's source."""
    pairs = time_cases(folder)
    if len({case.left_out_with or case.source for _, case in pairs}) < 2:
        yield "step time: fewer than two sources, nothing to leave out"
        return
    cases = [case for _, case in pairs]
    fitted = without_each(cases)
    errors = {id(case): error for case, error in left_out(cases, fitted)}
    unseen = []
    for score, case in pairs:
        slower = 1 if score.metric in STEP_METRICS else -1
        predicted = score.measured * math.exp(slower * errors[id(case)])
        unseen.append((replace(score, predicted=predicted), case))
    yield "step time and throughput, fitted without the source that is scored"
    held = [score for score, _ in unseen]
    yield from report(held)
    yield from picking_lines(held, folder)
    if rows := _rows(folder, "train_rows"):
        yield from by_kind(held, rows)
    yield "\n" + coverage("sources known", pairs)
    yield coverage("source left out", unseen)
    for kind in (SPREAD_DENSE, SPREAD_NEW, SPREAD_UNMEASURED, SPREAD_LAUNCH):
        members = [
            pair
            for pair in unseen
            if time_spread(pair[1].question.shape, pair[1].question.layout, pair[1].question.device) == kind
        ]
        if members:
            yield coverage(f"source left out, interval x {kind:g}", members)
    for source in dict.fromkeys(case.source for _, case in unseen):
        yield coverage(f"left out: {source}", [pair for pair in unseen if pair[1].source == source])
    yield ""
    yield from constants_table([case for case in cases if case.fitted], fit(cases))


PARTS: list[Callable[[Path], Iterator[str]]] = [cross_validated_memory, cross_validated_time]
"""What --cross-validate prints, one table after the other."""


def _rows(folder: Path, name: str) -> list[Row]:
    path = folder / f"{name}.csv"
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def report(scores: list[Score]) -> Iterator[str]:
    """The tables: by file and metric, then by file and source."""
    header = f"{'':72} {'rows':>5} {'refused':>8} {'median':>7} {'p90':>7} {'worst':>8} {'bias':>7}"
    for by in ("metric", "source"):
        heading = f"by file and {by}"
        yield f"\n{heading}\n{header}"
        groups: dict[str, list[Score]] = {}
        for score in scores:
            if score.metric == "fits" and by != "metric":
                continue
            # One source may measure both, and their errors have nothing to do with each other.
            apart = ", memory" if by == "source" and score.file == "train_rows" and "mem" in score.metric else ""
            groups.setdefault(f"{score.file}{apart}: {getattr(score, by)}", []).append(score)
        for title, members in groups.items():
            yield fits_line(title, members) if members[0].metric == "fits" else line(title, members)


def main() -> int:
    """Scores every file that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="folder with the CSV files")
    parser.add_argument("--dump", type=Path, required=True, help="CSV to write: file,row,metric,measured,predicted")
    parser.add_argument("--cross-validate", action="store_true", help="also fit without each source, and score it")
    arguments = parser.parse_args()
    scores: list[Score] = []
    for name, scorer in FILES.items():
        path = arguments.rows / f"{name}.csv"
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                scores += scorer(csv.DictReader(file), name)
    if not scores:
        print(f"{arguments.rows}: none of {', '.join(f'{name}.csv' for name in FILES)} is there", file=sys.stderr)
        return 2
    with arguments.dump.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "row", "metric", "measured", "predicted"])
        for score in scores:
            predicted = "" if score.predicted is None else score.predicted
            writer.writerow([score.file, score.row, score.metric, score.measured, predicted])
    print("\n".join([*report(scores), *unscored(_rows(arguments.rows, "train_rows"))]))
    if rows := _rows(arguments.rows, "train_rows"):
        print("\n".join(by_kind(scores, rows)))
    if rows := _rows(arguments.rows, "megatron_ci_memory"):
        print("\n".join([*megatron_alone(rows, "megatron_ci_memory"), *far_off(scores, rows, "megatron_ci_memory")]))
    print("\n".join(held_needs(arguments.rows)))
    print("\n".join(picking_lines(scores, arguments.rows)))
    if arguments.cross_validate:
        for part in PARTS:
            print("\n" + "\n".join(part(arguments.rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
