"""What of DeepSpeed's own JSON a job may pass on: keys, and the values that DeepSpeed itself doesn't check.

Whether the other values are what DeepSpeed takes, its own models say, in the trainer (`deepspeed_settings`).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trainyard.spec.job import ParallelismSpec

_STATED = {
    "train_batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size and training.micro_batch_size",
    "gradient_clipping": "training.gradient_clip",
    "optimizer": "training.optimizer",
    "scheduler": "training.schedule",
    "fp16": "training.precision",
    "bf16": "training.precision",
    "amp": "training.precision",
    "torch_autocast": "training.precision",
    "data_types": "training.precision",
    "communication_data_type": "training.precision",
    "activation_checkpointing": "training.activation_checkpointing",
    "compile": "training.compile",
    "checkpoint": "checkpoint",
    "zero_force_ds_cpu_optimizer": "parallelism.offload",
}
_STATED_ZERO = {
    "stage": "parallelism.zero_stage",
    "reduce_bucket_size": "parallelism.zero.reduce_bucket_elements",
    "allgather_bucket_size": "parallelism.zero.allgather_bucket_elements",
    "overlap_comm": "parallelism.zero.overlap",
    "stage3_prefetch_bucket_size": "parallelism.zero.prefetch_elements",
    "prefetch_bucket_size": "parallelism.zero.prefetch_elements",
    "stage3_param_persistence_threshold": "parallelism.zero.persistence_threshold_elements",
    "param_persistence_threshold": "parallelism.zero.persistence_threshold_elements",
    "stage3_max_live_parameters": "parallelism.zero.max_live_elements",
    "max_live_parameters": "parallelism.zero.max_live_elements",
    "cpu_offload": "parallelism.offload",
    "cpu_offload_param": "parallelism.zero.offload_parameters",
    "offload_optimizer.device": "parallelism.offload",
    "offload_optimizer.nvme_path": "parallelism.zero.nvme_path",
    "offload_param.device": "parallelism.zero.offload_parameters",
    "offload_param.nvme_path": "parallelism.zero.nvme_path",
}
"""DeepSpeed's key -> the field of the job that states it."""

_PASSED = frozenset(
    {
        "zero_optimization",
        "aio",
        "comms_logger",
        "flops_profiler",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "steps_per_print",
        "tensorboard",
        "wandb",
        "csv_monitor",
    }
)
"""Sections and switches of DeepSpeed's that change no number of the training."""

_PASSED_ZERO = frozenset(
    {
        "contiguous_gradients",
        "reduce_scatter",
        "allgather_partitions",
        "use_multi_rank_bucket_allreduce",
        "sub_group_size",
        "stage3_max_reuse_distance",
        "max_reuse_distance",
        "stage3_module_granularity_threshold",
        "module_granularity_threshold",
        "stage3_use_all_reduce_for_fetch_params",
        "use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential",
        "allgather_sequential",
        "model_persistence_threshold",
        "stage3_model_persistence_threshold",
        "ignore_unused_parameters",
        "log_trace_cache_warnings",
        "enable_sanity_checks",
        "offload_optimizer",
        "offload_param",
    }
)
"""Of zero_optimization. The others quantize, or lay memory out otherwise than checkpoints know it."""

_PASSED_OFFLOAD = {
    "offload_optimizer": {"pin_memory", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"},
    "offload_param": {"pin_memory", "buffer_count", "buffer_size", "max_in_cpu"},
}

_KINDS: dict[str, tuple[tuple[type, ...], float]] = {
    "true or false": ((bool,), 0),
    "a whole number of at least 1": ((int,), 1),
    "a whole number of at least 0": ((int,), 0),
    "a whole number, or -1 for all": ((int,), -1),
    "a number of at least 0": ((int, float), 0),
    "a file's name, or null": ((str, type(None)), 0),
}
"""What a refusal calls it -> its types and its least value."""

_UNMODELLED: dict[str, dict[str, str]] = {
    "flops_profiler": {
        "enabled": "true or false",
        "recompute_fwd_factor": "a number of at least 0",
        "profile_step": "a whole number of at least 1",
        "module_depth": "a whole number, or -1 for all",
        "top_modules": "a whole number of at least 1",
        "detailed": "true or false",
        "output_file": "a file's name, or null",
    },
    "aio": {
        "block_size": "a whole number of at least 1",
        "queue_depth": "a whole number of at least 1",
        "intra_op_parallelism": "a whole number of at least 1",
        "single_submit": "true or false",
        "overlap_events": "true or false",
        "use_gds": "true or false",
    },
}
"""Sections that DeepSpeed has no models of: their keys, and what `_KINDS` calls their values."""

_SWITCHES = frozenset({"wall_clock_breakdown", "memory_breakdown", "dump_state"})


def passed_obstacles(layout: ParallelismSpec) -> Iterator[str]:
    """What in `parallelism.deepspeed` is not passed on, or is nothing that DeepSpeed could read."""
    where = "parallelism.deepspeed"
    given = layout.deepspeed
    yield from _stated(where, given, _STATED)
    if unknown := sorted(set(given) - _PASSED):
        yield (
            f"{where}.{unknown[0]}: is not passed to DeepSpeed (nothing of this name, or it changes what is trained);"
            f" what is: {', '.join(sorted(_PASSED))}"
        )
    zero = given.get("zero_optimization", {})
    if not isinstance(zero, dict):
        yield f"{where}.zero_optimization: must be a section, is {zero!r}"
    else:
        yield from _zero_obstacles(f"{where}.zero_optimization", zero, layout)
    for section, value in given.items():
        yield from _value_obstacles(f"{where}.{section}", section, value)


def _stated(where: str, given: Mapping[str, Any], stated: Mapping[str, str]) -> Iterator[str]:
    for key in given:
        if key in stated:
            yield f"{where}.{key}: trainyard states this itself; set {stated[key]} instead"


def _zero_obstacles(where: str, zero: dict[str, Any], layout: ParallelismSpec) -> Iterator[str]:
    sections = {section: zero.get(section, {}) for section in _PASSED_OFFLOAD}
    for section, value in sections.items():
        if not isinstance(value, dict):
            yield f"{where}.{section}: must be a section, is {value!r}"
            return
    flat = zero | {f"{section}.{key}": item for section, value in sections.items() for key, item in value.items()}
    yield from _stated(where, flat, _STATED_ZERO)
    allowed = _PASSED_ZERO | {f"{section}.{key}" for section, keys in _PASSED_OFFLOAD.items() for key in keys}
    if unknown := sorted(set(flat) - allowed):
        yield (
            f"{where}.{unknown[0]}: DeepSpeed has nothing of this name, or it changes what is trained or how memory is"
            f" laid out, which is not implemented; allowed: {', '.join(sorted(allowed))}"
        )
    for section, device in (("offload_optimizer", layout.offload), ("offload_param", layout.zero.offload_parameters)):
        if section in zero and device == "none":
            yield f"{where}.{section}: nothing is offloaded; set {_STATED_ZERO[section + '.device']}"


def _value_obstacles(where: str, section: str, value: Any) -> Iterator[str]:
    """Of sections and switches that DeepSpeed has no models of."""
    if section in _UNMODELLED:
        yield from _unmodelled(where, value, _UNMODELLED[section])
    elif section == "steps_per_print":
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f"{where}: must be a number of steps, is {value!r}"
    elif section in _SWITCHES and not isinstance(value, bool):
        yield f"{where}: must be true or false, is {value!r}"


def _unmodelled(where: str, value: Any, kinds: Mapping[str, str]) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where}: must be a section, is {value!r}"
        return
    if wrong := sorted(set(value) - set(kinds), key=str):
        yield f"{where}: {wrong[0]} is nothing that it has; it has {', '.join(sorted(kinds))}"
        return
    for key, given in value.items():
        types, least = _KINDS[kinds[key]]
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        if type(given) not in types or (is_number and not (given >= least and math.isfinite(given))):
            yield f"{where}.{key}: must be {kinds[key]}, is {given!r}"
