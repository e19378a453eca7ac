"""The table of configurations: a model, a layout, an accumulation, a precision; and what each is allowed to differ by.

float64 is the real proof: there a layout that is right differs by rounding alone, 1e-16 to 1e-12, and one that is
nearly right (a norm that counts a replica twice, a mean in place of a sum) by what it does wrong. float32 is what
jobs train in; accumulation alone moves it by 1e-6 to 1e-5. Token counts are unequal everywhere, and clipping is
active at every step.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from trainer_testing.strategy_worker import RunRequest
from trainer_testing.tiny import VOCAB_SIZE, strategy_name

from trainyard.spec.job import ParallelismSpec

STEPS = 10
TOLERANCES = {"fp64": 1e-7, "fp32": 1e-5}
"""Of loss and gradient norm, relative; in fp64 of the weights too, relative to each tensor's largest."""

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-tied": _LLAMA | {"tie_word_embeddings": True},
    "qwen3": _LLAMA | {"model_type": "qwen3", "head_dim": 8},
    "mixtral": _LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3-moe": _LLAMA | _EXPERTS | {"model_type": "qwen3_moe", "head_dim": 8},
}
"""Name -> model.config, but for the number of layers, which is that of the stages where there are more than two."""

MIXTURES = ("mixtral", "qwen3-moe")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")


def _zero(world_size: int, stage: int, **more: Any) -> dict[str, Any]:
    return {"engine": "deepspeed", "data_replicate": world_size, "zero_stage": stage} | more


LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp2": {"data_replicate": 2},
    "ddp4": {"data_replicate": 4},
    "fsdp2": {"data_shard": 2},
    "fsdp4": {"data_shard": 4},
    "hsdp2x2": {"data_replicate": 2, "data_shard": 2},
    "tensor2": {"tensor": 2},
    "tensor4": {"tensor": 4},
    **{
        f"pipeline{degree}-{schedule}": {"pipeline": degree, "pipeline_schedule": schedule}
        for degree in (2, 4)
        for schedule in SCHEDULES
    },
    "context2": {"context": 2},
    "expert2": {"data_shard": 2, "expert": 2},
    "expert4": {"data_shard": 4, "expert": 4},
    "fsdp2-expert2": {"data_shard": 4, "expert": 2},
    "fsdp2-tensor2": {"data_shard": 2, "tensor": 2},
    "ddp2-tensor2": {"data_replicate": 2, "tensor": 2},
    "hsdp2x2-tensor2": {"data_replicate": 2, "data_shard": 2, "tensor": 2},
    "pipeline2-fsdp2-tensor2": {"pipeline": 2, "data_shard": 2, "tensor": 2},
    "pipeline2-fsdp2-expert2": {"pipeline": 2, "data_shard": 2, "expert": 2},
    "expert2-tensor2": {"data_shard": 2, "expert": 2, "tensor": 2},
    "fsdp2-expert2-tensor2": {"data_shard": 4, "expert": 2, "tensor": 2},
    "ddp2-context2-tensor2": {"data_replicate": 2, "context": 2, "tensor": 2},
    **{f"zero{stage}-{world}": _zero(world, stage) for world in (2, 4) for stage in (0, 1, 2, 3)},
    **{f"zero{stage}-2-offload": _zero(2, stage, offload="cpu") for stage in (1, 2, 3)},
    "zero3-2-offload-weights": _zero(2, 3, offload="cpu", zero={"offload_parameters": "cpu"}),
}
"""Name -> the job's parallelism section."""


@dataclass(frozen=True)
class Reference:
    """A single-process run, with what configurations that share it have in common."""

    model: str
    num_layers: int
    global_batch_size: int
    is_packed: bool
    precision: str

    @property
    def job(self) -> dict[str, Any]:
        """tiny_job's arguments, for the whole batch at once."""
        return {
            "model": MODELS[self.model] | {"num_hidden_layers": self.num_layers},
            "precision": self.precision,
            "steps": STEPS,
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.global_batch_size,
        }

    def request(self, folder: Path) -> RunRequest:
        """The run, which leaves its weights in `folder`."""
        path = str(self.weights(folder))
        return RunRequest("single", last_step=STEPS, job=self.job, is_packed=self.is_packed, keep_weights=path)

    def weights(self, folder: Path) -> Path:
        """The file of its last weights."""
        packed = "packed" if self.is_packed else "plain"
        return folder / f"{self.model}-{self.num_layers}-{self.global_batch_size}-{packed}-{self.precision}.pt"


@dataclass(frozen=True)
class Configuration:
    """One line of the table."""

    layout: str
    model: str
    accumulation: int = 4
    """Micro-batches a rank and step."""
    is_packed: bool = False
    """Two or three documents a sequence, which don't see each other; their positions restart."""
    precision: Literal["fp64", "fp32"] = "fp64"
    is_short: bool = field(default=False, compare=False)
    """Whether scripts/test runs it, not --full alone."""

    @property
    def name(self) -> str:
        """As in `pytest -k`."""
        packed = "-packed" if self.is_packed else ""
        return f"{self.layout}-{self.model}-accumulation{self.accumulation}{packed}-{self.precision}"

    @cached_property
    def parallelism(self) -> ParallelismSpec:
        """Its layout, validated."""
        return ParallelismSpec.model_validate(LAYOUTS[self.layout])

    @property
    def reference(self) -> Reference:
        """What it must equal."""
        layout = self.parallelism
        two = layout.pipeline_schedule in ("interleaved_1f1b", "zero_bubble")
        num_layers = max(2, layout.pipeline * (2 if two and layout.pipeline > 1 else 1))
        size = max(8, layout.data_parallel_size * self.accumulation)
        return Reference(self.model, num_layers, size, self.is_packed, self.precision)

    def request(self, folder: Path) -> RunRequest:
        """The run; `folder`: where its reference left its weights."""
        reference = self.reference
        size = reference.global_batch_size // self.parallelism.data_parallel_size // self.accumulation
        job = reference.job | {"micro_batch_size": size, "parallelism": LAYOUTS[self.layout]}
        return RunRequest(
            strategy_name(self.parallelism),
            last_step=STEPS,
            job=job,
            is_packed=self.is_packed,
            weights=str(reference.weights(folder)),
        )


SHORT = (
    Configuration("ddp2", "llama"),
    Configuration("fsdp2", "llama-tied"),
    Configuration("tensor2", "qwen3"),
    Configuration("pipeline2-gpipe", "qwen3"),
    Configuration("pipeline2-1f1b", "llama-tied", is_packed=True),
    Configuration("pipeline2-interleaved_1f1b", "llama"),
    Configuration("pipeline2-zero_bubble", "llama-tied"),
    Configuration("context2", "qwen3", accumulation=1, is_packed=True),
    Configuration("expert2", "mixtral"),
    *(Configuration(f"zero{stage}-2", "llama", precision="fp32") for stage in (1, 2, 3)),
    Configuration("zero3-2", "qwen3-moe", accumulation=1, is_packed=True, precision="fp32"),
    Configuration("zero2-2-offload", "llama-tied", precision="fp32"),
    Configuration("ddp4", "qwen3", accumulation=1, is_packed=True),
    Configuration("fsdp4", "qwen3-moe", accumulation=1, is_packed=True),
    Configuration("hsdp2x2", "mixtral", accumulation=1),
    Configuration("tensor4", "llama-tied", accumulation=1),
    Configuration("pipeline4-1f1b", "mixtral"),
    Configuration("pipeline4-zero_bubble", "llama"),
    Configuration("expert4", "qwen3-moe"),
    Configuration("fsdp2-tensor2", "llama-tied", accumulation=1, is_packed=True),
    Configuration("fsdp2-tensor2", "llama", accumulation=1, precision="fp32"),
    Configuration("pipeline2-fsdp2-expert2", "mixtral", is_packed=True),
    Configuration("pipeline2-fsdp2-tensor2", "qwen3"),
    Configuration("ddp2-context2-tensor2", "llama", accumulation=1, is_packed=True),
)
"""Every kind of parallelism, every schedule, every model, accumulation and packing: what scripts/test runs."""


def is_possible(layout: str, model: str) -> bool:
    """Whether a layout can have a model at all: experts are for mixtures."""
    spec = ParallelismSpec.model_validate(LAYOUTS[layout])
    return spec.expert == 1 or model in MIXTURES


def _whole() -> list[Configuration]:
    """Every layout with every model; two with as little accumulation as it can have, two packed so; in float32, one."""
    found = []
    for layout, settings in LAYOUTS.items():
        precision: Literal["fp64", "fp32"] = "fp32" if "engine" in settings else "fp64"
        models = [model for model in MODELS if is_possible(layout, model)]
        fewest = settings.get("pipeline", 1)
        found += [Configuration(layout, model, precision=precision) for model in models]
        # Two families without accumulation, the second a mixture: what is summed over micro-batches hides some errors.
        for model in dict.fromkeys((models[0], "mixtral" if models[0] != "mixtral" else "qwen3-moe")):
            found.append(Configuration(layout, model, accumulation=fewest, precision=precision))
        for model in ("llama-tied", "qwen3-moe"):
            if model in models:
                found.append(Configuration(layout, model, accumulation=fewest, is_packed=True, precision=precision))
        found.append(Configuration(layout, models[0], precision="fp32"))
    return found


TABLE = tuple(
    dict.fromkeys(
        [
            *(Configuration(c.layout, c.model, c.accumulation, c.is_packed, c.precision, is_short=True) for c in SHORT),
            *_whole(),
        ]
    )
)
"""All configurations, the short ones first, each once."""
