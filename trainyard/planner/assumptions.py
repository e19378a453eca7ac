"""What a request to `predict` leaves unsaid: what its answer stands on, and whether that decides what fits."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from trainyard.hardware import Gpu
from trainyard.planner.activations import keeps_narrow
from trainyard.planner.constants import GIB
from trainyard.planner.layout import Layout, Masters, Recompute
from trainyard.planner.memory import masters_of, memory
from trainyard.planner.request_fields import Fields
from trainyard.planner.request_framework import SHARDING, with_liger_chunks
from trainyard.planner.shapes import ModelShape

WHOLE = frozenset({"fp32", "fp64"})
"""Precisions beside which nothing is wider."""


def assumed(content: Mapping[str, Any], shape: ModelShape, layout: Layout) -> dict[str, Any]:
    """Each field that nobody stated, of those that move memory or time most, with the value that was taken for it."""
    taken: dict[str, Any] = {
        "seq": layout.sequence_length,
        "micro_batch": layout.micro_batch,
        "global_batch": layout.global_batch,
        "precision": layout.precision,
        "optimizer": layout.optimizer,
        "recompute": layout.recompute,
        "attention": _attention(layout),
    }
    if layout.data_parallel * layout.context > 1:
        taken["sharding"] = next(name for name, stage in SHARDING.items() if stage == layout.zero_stage)
    if layout.method == "full" and layout.precision not in WHOLE:
        taken["master_weights"] = masters_of(layout)
    if layout.method != "full" and layout.adapter == "lora":
        taken |= {"lora_rank": layout.lora_rank, "lora_targets": layout.num_lora_targets}
    if layout.graphs_step:
        taken["cuda_graphs"] = "step"
    if keeps_narrow(layout) and layout.method == "full":
        taken["fp8_param_gather"] = layout.narrow_weights
    if layout.last_stage_layers is not None:
        taken["last_stage_layers"] = layout.last_stage_layers
    if layout.expert > 1:
        taken["ep"] = layout.expert
    if shape.mtp_layers:
        taken["mtp_layers"] = shape.mtp_layers
    if _says_recompute(content, layout):
        del taken["recompute"]
    return {name: value for name, value in taken.items() if _is_unsaid(content, name)}


def _is_unsaid(content: Mapping[str, Any], name: str) -> bool:
    return content.get(name) in (None, "")


def _says_recompute(content: Mapping[str, Any], layout: Layout) -> bool:
    """Itself, or by a field that one kind of it alone has."""
    return not _is_unsaid(content, "recompute") or bool(content.get("recompute_modules")) or layout.offloads_checkpoints


def _attention(layout: Layout) -> str:
    if layout.flash_attention:
        return "flash"
    return "eager" if layout.fp32_softmax else "unfused"


def turning(content: Mapping[str, Any], shape: ModelShape, layout: Layout, device: Gpu) -> str:
    """What to say where a field that nobody stated, taken otherwise, would turn `fits`; "" elsewhere."""
    room = device.memory_gib * GIB
    fits = memory(shape, layout).needed <= room
    found = []
    for name, taken, others in _alternatives(content, shape, layout):
        needs = {word: memory(shape, other).needed for word, other in others.items()}
        turned = [f"with {word} {use / GIB:.1f}" for word, use in needs.items() if (use <= room) != fits]
        if turned:
            found.append(f"{name}, taken as {taken} ({', '.join(turned)})")
    if not found:
        return ""
    needed = memory(shape, layout).needed / GIB
    verdict = "fits" if fits else "does not fit"
    return (
        f"{verdict}, {needed:.1f} GiB needed of {room / GIB:.1f}, by what is not stated: {'; '.join(found)}; state "
        f"{'it' if len(found) == 1 else 'them'}"
    )


def _alternatives(
    content: Mapping[str, Any], shape: ModelShape, layout: Layout
) -> Iterator[tuple[str, str, dict[str, Layout]]]:
    """(field, the word that was taken, the layout under each other word) of what people do either way.

    Whose micro-batch is not stated would take a smaller one.
    """
    if _is_unsaid(content, "micro_batch"):
        # Of an unknown batch their number stays (`predict._usual_micro_batch`).
        count = layout.num_micro_batches * (1 if _is_unsaid(content, "global_batch") else layout.micro_batch)
        layout = dataclasses.replace(layout, micro_batch=1, num_micro_batches=count)
        layout = with_liger_chunks(Fields(content), shape, layout)
    if not _says_recompute(content, layout):
        levels: tuple[Recompute, ...] = tuple(level for level in get_args(Recompute) if level != layout.recompute)
        yield "recompute", layout.recompute, {level: dataclasses.replace(layout, recompute=level) for level in levels}
    is_narrow = layout.method == "full" and layout.precision not in WHOLE and not layout.autocast
    if is_narrow and layout.engine == "plain" and _is_unsaid(content, "master_weights"):
        taken = masters_of(layout)
        others: tuple[Masters, ...] = ("weights",) if taken == "none" else ("none",)
        yield "master_weights", taken, {word: dataclasses.replace(layout, masters=word) for word in others}
