"""What DeepSpeed is told: trainyard's fields in its own words, and the rest of its JSON, checked before it is used.

Imports DeepSpeed, which takes seconds, only where a job has something that needs it to be checked.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import ValidationError

from trainer.strategies import nvme_offload
from trainer.strategies.deepspeed_import import load_deepspeed
from trainyard.errors import InputError
from trainyard.spec.job import ParallelismSpec, ResolvedJob

MAX_BUCKET_ELEMENTS = 100_000_000
"""Elements reduced or gathered at once; DeepSpeed's default of 5e8 allocates 2 GB a rank for the smallest model."""

MAX_LIVE_ELEMENTS = 1_000_000_000

MAX_OWNERS = 8
"""Ranks to which one bucket of gradients is reduced by a message each; beyond, latency eats what the bytes save."""

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

PASSED = frozenset(
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

PASSED_ZERO = frozenset(
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


def check(job: ResolvedJob, *, device_type: str) -> None:
    """InputError, in one line, for what DeepSpeed would refuse later, or not notice."""
    layout = job.parallelism
    if layout.deepspeed:
        _check_passed(layout)
    if "nvme" in (layout.offload, layout.zero.offload_parameters):
        nvme_offload.check()
    precision = job.spec.training.precision
    if precision == "fp64":
        raise InputError(
            "training.precision: fp64 is not what DeepSpeed computes in, its optimizer states are float32;"
            " use engine: torch, or fp32"
        )
    if precision == "fp16" and layout.zero_stage == 0:
        raise InputError(
            "training.precision: fp16 with zero_stage 0 is not implemented; use engine: torch, or zero_stage 1"
        )
    if precision == "fp16" and device_type == "cpu":
        raise InputError("training.precision: DeepSpeed has no fp16 on this CPU; use fp32 or bf16, or engine: torch")


def configuration(
    job: ResolvedJob, sizes: Sequence[int], *, device_type: str, num_trained: int | None = None
) -> dict[str, Any]:
    """The whole of DeepSpeed's JSON for this job.

    `sizes`: elements of each parameter; `num_trained`: elements that are trained, all of them unless stated.
    """
    training, layout = job.spec.training, job.parallelism
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.micro_batch_size,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        # Stage 0 is clipped here: DeepSpeed does not report the norm there.
        "gradient_clipping": (training.gradient_clip or 0.0) if layout.zero_stage else 0.0,
        "zero_optimization": _zero(job, sizes, device_type) | _reduction(layout, sizes, num_trained or sum(sizes)),
        # Offload asks for DeepSpeed's own CPU Adam, which has to be compiled; torch's fused one needs no compiler.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**12,
        **_precision(job),
    }
    return _merged(config, layout.deepspeed)


def compute_type(config: dict[str, Any]) -> torch.dtype:
    """What the weights that compute are stored in."""
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((dtype for name, dtype in types.items() if name in config), torch.float32)


def _reduction(layout: ParallelismSpec, sizes: Sequence[int], num_trained: int) -> dict[str, Any]:
    """Stages 1 and 2: each rank's gradients are reduced to it alone, as many bytes on the wire as a reduce-scatter.

    DeepSpeed's default, an all-reduce of the whole bucket, sends twice as many, in one message for all its owners.
    """
    if layout.zero_stage not in (1, 2):
        return {}
    bucket = min(_bucket(layout, sizes), num_trained)
    num_owners = min(layout.data_parallel_size, 1 + -(-bucket * layout.data_parallel_size // num_trained))
    return {"use_multi_rank_bucket_allreduce": num_owners > MAX_OWNERS}


def _bucket(layout: ParallelismSpec, sizes: Sequence[int]) -> int:
    """Elements of gradient that are reduced at once."""
    stated = layout.zero.reduce_bucket_elements
    return max(*sizes, min(sum(sizes), MAX_BUCKET_ELEMENTS)) if stated == "auto" else stated


def _zero(job: ResolvedJob, sizes: Sequence[int], device_type: str) -> dict[str, Any]:
    layout = job.parallelism
    settings, is_gpu = layout.zero, device_type == "cuda"
    bucket = _bucket(layout, sizes)

    def chosen(value: int | str, default: int) -> int:
        return default if isinstance(value, str) else value

    zero: dict[str, Any] = {
        "stage": layout.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": chosen(settings.allgather_bucket_elements, bucket),
        "overlap_comm": is_gpu if settings.overlap == "auto" else settings.overlap,
    }
    if layout.zero_stage == 3:
        is_on_disk = settings.offload_parameters == "nvme"
        prefetch = chosen(settings.prefetch_elements, 0 if is_on_disk else bucket)
        zero |= {
            "stage3_prefetch_bucket_size": prefetch,
            "stage3_max_live_parameters": chosen(settings.max_live_elements, max(bucket, MAX_LIVE_ELEMENTS)),
            "stage3_param_persistence_threshold": settings.persistence_threshold_elements,
        }
    for name, device in (("offload_optimizer", layout.offload), ("offload_param", settings.offload_parameters)):
        if device != "none":
            zero[name] = {"device": device, "pin_memory": is_gpu}
        if device == "nvme":
            zero[name]["nvme_path"] = str(nvme_offload.path_of(job))
    if settings.offload_parameters == "nvme":
        # A weight read from disk holds a buffer of the largest one's size until it is let go, and DeepSpeed stops where
        # none is left: none is kept for a later use, and each that may be read ahead has one. Its own defaults are five
        # buffers of 1e8 elements, whatever the model's size, and to keep and read ahead as if there were no end.
        zero["stage3_max_reuse_distance"] = 0
        ahead = 4 * prefetch // (nvme_offload.LEAST_BYTES * layout.data_parallel_size)
        zero["offload_param"] |= {
            "buffer_size": -(-max(sizes) // layout.data_parallel_size),
            "buffer_count": 5 + ahead,
        }
    return zero


def _precision(job: ResolvedJob) -> dict[str, Any]:
    """bf16 and fp16 weights with a float32 master copy; stage 0 has no master copy, so there it is autocast."""
    precision, stage = job.spec.training.precision, job.parallelism.zero_stage
    if precision == "bf16" and stage == 0:
        return {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    if precision == "bf16":
        # Gradients travel in float32. (Stage 1 also adds up micro-batches in bf16: with float32 there DeepSpeed
        # takes another optimizer class, whose memory is laid out differently.)
        accumulation = {} if stage == 1 else {"data_types": {"grad_accum_dtype": "fp32"}}
        return {"bf16": {"enabled": True}, "communication_data_type": "fp32", **accumulation}
    if precision == "fp16":
        return {
            "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
            "communication_data_type": "fp32",
        }
    return {}


def _merged(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    merged = dict(ours)
    for key, value in theirs.items():
        is_section = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if is_section else value
    return merged


def _check_passed(layout: ParallelismSpec) -> None:
    where = "parallelism.deepspeed"
    given = layout.deepspeed
    _refuse_stated(where, given, _STATED)
    if unknown := sorted(set(given) - PASSED):
        raise InputError(
            f"{where}.{unknown[0]}: is not passed to DeepSpeed (nothing of this name, or it changes what is trained);"
            f" what is: {', '.join(sorted(PASSED))}"
        )
    zero = given.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise InputError(f"{where}.zero_optimization: must be a section, is {zero!r}")
    where = f"{where}.zero_optimization"
    for section in _PASSED_OFFLOAD:
        if not isinstance(zero.get(section, {}), dict):
            raise InputError(f"{where}.{section}: must be a section, is {zero[section]!r}")
    flat = zero | {
        f"{section}.{key}": value for section in _PASSED_OFFLOAD for key, value in zero.get(section, {}).items()
    }
    _refuse_stated(where, flat, _STATED_ZERO)
    allowed = PASSED_ZERO | {f"{section}.{key}" for section, keys in _PASSED_OFFLOAD.items() for key in keys}
    if unknown := sorted(set(flat) - allowed):
        raise InputError(
            f"{where}.{unknown[0]}: DeepSpeed has nothing of this name, or it changes what is trained or how memory is"
            f" laid out, which is not implemented; allowed: {', '.join(sorted(allowed))}"
        )
    for section, device in (("offload_optimizer", layout.offload), ("offload_param", layout.zero.offload_parameters)):
        if section in zero and device == "none":
            raise InputError(f"{where}.{section}: nothing is offloaded; set {_STATED_ZERO[section + '.device']}")
    _check_values(given)


def _refuse_stated(where: str, given: dict[str, Any], stated: dict[str, str]) -> None:
    for key in given:
        if key in stated:
            raise InputError(f"{where}.{key}: trainyard states this itself; set {stated[key]} instead")


def _check_values(given: dict[str, Any]) -> None:
    """By DeepSpeed's own models."""
    load_deepspeed()
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models: dict[str, Any] = {
        "zero_optimization": DeepSpeedZeroConfig,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
    }
    for section, value in given.items():
        where = f"parallelism.deepspeed.{section}"
        if section in _UNMODELLED:
            _check_unmodelled(where, value, _UNMODELLED[section])
        elif section in models:
            try:
                models[section](**value)
            except (ValidationError, TypeError) as error:
                raise InputError(f"{where}: {_first_line(error)}") from None
        elif section == "steps_per_print":
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{where}: must be a number of steps, is {value!r}")
        elif not isinstance(value, bool):
            raise InputError(f"{where}: must be true or false, is {value!r}")


def _check_unmodelled(where: str, value: Any, kinds: dict[str, str]) -> None:
    if not isinstance(value, dict):
        raise InputError(f"{where}: must be a section, is {value!r}")
    if wrong := sorted(set(value) - set(kinds), key=str):
        raise InputError(f"{where}: {wrong[0]} is nothing that it has; it has {', '.join(sorted(kinds))}")
    for key, given in value.items():
        types, least = _KINDS[kinds[key]]
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        if type(given) not in types or (is_number and not (given >= least and math.isfinite(given))):
            raise InputError(f"{where}.{key}: must be {kinds[key]}, is {given!r}")


def _first_line(error: ValidationError | TypeError) -> str:
    if isinstance(error, TypeError):
        return "must be a section"
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']} (given: {first['input']!r})"
