"""What DeepSpeed is told: trainyard's fields in its own words, and the rest of its JSON, its values checked first.

Imports DeepSpeed, which takes seconds, only where a job has something that needs it to be checked.
"""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import ValidationError

from trainer.models.configuration import configuration_of
from trainer.strategies import nvme_offload
from trainer.strategies.deepspeed_import import load_deepspeed
from trainyard.errors import InputError
from trainyard.spec.job import ParallelismSpec, ResolvedJob

MAX_BUCKET_ELEMENTS = 100_000_000
"""Elements reduced or gathered at once; DeepSpeed's default of 5e8 allocates 2 GB a rank for the smallest model."""

_NOISE_IN_ROUTERS = ("input_jitter_noise", "moe_jitter_eps")
"""By which PhiMoE's and DBRX's routers multiply their own input, for the experts too."""

MAX_LIVE_ELEMENTS = 1_000_000_000

MAX_OWNERS = 8
"""Ranks to which one bucket of gradients is reduced by a message each; beyond, latency eats what the bytes save."""


def check(job: ResolvedJob, *, device_type: str) -> None:
    """InputError, in one line, for what DeepSpeed would refuse later, or not notice, on this machine.

    What no machine could do is refused where the job is read: `trainyard.spec.obstacles`.
    """
    layout = job.parallelism
    if layout.deepspeed:
        _check_values(layout.deepspeed)
    if "nvme" in (layout.offload, layout.zero.offload_parameters):
        nvme_offload.check()
    if job.spec.training.precision == "fp16" and device_type == "cpu":
        raise InputError("training.precision: DeepSpeed has no fp16 on this CPU; use fp32 or bf16, or engine: torch")
    if layout.zero_stage == 3 and job.spec.task == "causal_lm":
        _check_noise(job)


def _check_noise(job: ResolvedJob) -> None:
    """Stage 3's hooks make a router's input a view, which nobody may change."""
    config = configuration_of(job)
    for part, where in ((config, ""), (getattr(config, "ffn_config", None), "ffn_config.")):
        for name in _NOISE_IN_ROUTERS:
            if (noise := getattr(part, name, None)) is not None and noise > 0:
                raise InputError(
                    f"parallelism.zero_stage: 3: model.config.{where}{name}: {noise:g} is not implemented with it, as"
                    " DeepSpeed lets no router change its input; set it to 0, or use zero_stage 2 or data_shard"
                )


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


def _check_values(given: dict[str, Any]) -> None:
    """By DeepSpeed's own models; keys, and sections that it has no models of, were checked where the job was read."""
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
        if section in models:
            try:
                models[section](**value)
            except (ValidationError, TypeError) as error:
                raise InputError(f"parallelism.deepspeed.{section}: {_first_line(error)}") from None


def _first_line(error: ValidationError | TypeError) -> str:
    if isinstance(error, TypeError):
        return "must be a section"
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']} (given: {first['input']!r})"
