"""What a seed of the parity campaign stands for: a job, and two layouts of which one goes on from the other's save.

Everything that one process can do too is drawn once for both (`models` has the model); what is only a layout (degrees,
micro-batch, recomputation, schedule, loss and its chunks, sizes of FSDP's and ZeRO's units) is drawn for each. What the
trainer refuses is drawn again, and told.
"""

import random
import re
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from pydantic import ValidationError
from trainer.strategies import check_supported
from trainer.tasks import task_of
from trainer_testing.families import FAMILIES
from trainer_testing.strategy_worker import RunRequest
from trainer_testing.tiny import SEQUENCE_LENGTH, strategy_name, tiny_job
from transformers import AutoConfig

from parity.models import draw_adapter, draw_model, draw_noise
from trainyard.errors import InputError
from trainyard.spec.job import ParallelismSpec
from trainyard.spec.support import DOCUMENT_FAMILIES, OTHER_TENSOR_FAMILIES, PIPELINE_FAMILIES

STEPS = 6
MOST_DRAWS = 200
"""Of layouts for one job: so many in a row that are refused would be a fault of the draw."""
WORLD_SIZES = (1, 2, 2, 2, 3, 4, 4, 4, 6, 8)
GLOBAL_BATCHES = (8, 12, 16)
OPTIMIZERS = ("adamw", "adamw", "muon", "adafactor", "sgd", "adamw_8bit", "adamw_8bit")
CHUNKS = (None, 5, 16, 64)
"""Positions of the loss's chunks; None: the trainer's own, of which tiny micro-batches fill no two."""
_CHUNK_NAMES = ("trainer.losses.linear.CHUNK_TOKENS", "trainer.losses.token_loss.CHUNK_TOKENS")
_COMPILER, _NO_COMPILER = "trainer.strategies.compiled.BACKEND", "aot_eager"
_SCALING = "trainer.optimizers.loss_scaling"
_EMULATED = "trainer.models.float8.EMULATE"
COMPILED_SHARE = 0.2
"""Of the layouts that can be: tracing a family's blocks takes as long as all else of a seed."""
NARROW_SHARE = 0.6
"""Of the jobs in bf16 that can be so in one process."""
_OF_BATCHES = {"sequence_length": SEQUENCE_LENGTH}
"""What `rank_batches` makes; a whole job (`whole_jobs`) has the length that is drawn."""
_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zero_bubble", "zero_bubble")
"""Half of the last are refused for their stages, others for what is recomputed or for experts."""
_AXES = ("data_replicate", "data_shard", "tensor", "pipeline", "pipeline", "context")
_JUMPS = frozenset({"apertus"})
"""In fp64 alone, where nothing falls there: the slope of xIELU as transformers has it jumps a millionth below
zero, and a tiny model's fp32 activations do fall there, so that a last digit becomes 1e-5 of the gradient's norm."""
_IN_FP32 = frozenset({"deepseek_v2", "deepseek_v3"})
"""Whose routers and rotations are computed in fp32 in fp64 jobs, too: tensor ranks add parts of their gradients, each
of which is rounded; under every other layout they are one process's to 1e-15."""
_RATES = {"adamw": 3e-3, "adamw_8bit": 3e-3, "muon": 1e-2, "adafactor": 3e-3, "sgd": 5e-2}


@dataclass(frozen=True)
class Layout:
    """What one run has of its own."""

    parallelism: dict[str, Any]
    micro_batch_size: int
    recompute: str
    loss: str = "auto"
    chunk_tokens: int | None = None
    is_compiled: bool = False
    """By the engines' runs alone, with a backend that needs no compiler; a whole job's blocks aren't."""

    @property
    def spec(self) -> ParallelismSpec:
        """Its degrees, validated."""
        return ParallelismSpec.model_validate(self.parallelism)

    @property
    def strategy(self) -> str:
        """What the engine calls itself."""
        return "single" if self.spec.world_size == 1 and self.spec.engine == "torch" else strategy_name(self.spec)

    def job(self, shared: dict[str, Any]) -> dict[str, Any]:
        """tiny_job's arguments, with what the job shares."""
        return shared | {
            "parallelism": self.parallelism,
            "micro_batch_size": self.micro_batch_size,
            "activation_checkpointing": self.recompute,
            "loss": self.loss,
            "compile": self.is_compiled,
        }


@dataclass(frozen=True)
class BaseFiles:
    """How the model lies in files, where the job begins with one that exists."""

    dtype: str
    max_shard_size: str


@dataclass(frozen=True)
class Drawn:
    """A seed: the same job in one process, under `first`, and under `second` from `first`'s save on."""

    seed: int
    family: str
    model: dict[str, Any]
    adapter: dict[str, Any] | None
    training: dict[str, Any]
    is_packed: bool
    saved_at: int
    first: Layout
    second: Layout
    is_noisy: bool = False
    """Something draws numbers in each step, and layouts draw others."""
    growth_steps: int | None = None
    """After so many good steps fp16's loss scale grows here, so that it overflows within these few; None: never."""
    micro_batch_size: int | None = None
    """What all layouts have, where the loss hangs on it: a router's balance does."""
    base: BaseFiles | None = None
    """Of every adapter, and of some models that are trained whole."""
    attention: str = "auto"
    is_narrow: bool = False
    """By the engines' runs alone, a job in bf16 multiplies in emulated 8 bits."""
    refused: Counter[str] = field(default_factory=Counter, compare=False)
    """The trainer's lines for layouts that were drawn before these, numbers left out, and how often each came."""

    @property
    def precision(self) -> str:
        """fp64, the proof; fp32; or one of 16 bits, whose resumes alone prove something."""
        return str(self.training["precision"])

    @property
    def is_exact(self) -> bool:
        """Whether its figures are compared with one process; if not, that it is resumed bit for bit is the proof."""
        is_rounded = self.precision in ("bf16", "fp16") or self.training["optimizer"]["kind"] == "adamw_8bit"
        return not (is_rounded or self.is_noisy)

    @property
    def proof(self) -> str:
        """fp64 or fp32: how near to one process it has to be; bits: it isn't compared."""
        if not self.is_exact:
            return "bits"
        is_cut = any(layout.spec.tensor > 1 for layout in (self.first, self.second))
        return "fp32" if is_cut and self.model["model_type"] in _IN_FP32 else self.precision

    @property
    def whole_batch(self) -> Layout:
        """The one process that layouts are compared with."""
        return Layout({}, self.micro_batch_size or self.training["global_batch_size"], "none")

    @property
    def parts(self) -> Layout:
        """The same process in other parts, which differs from it by roundings alone: a sequence at a time, or where
        micro-batches are not to be changed, a few positions of the loss at a time."""
        if self.micro_batch_size is None:
            return Layout({}, 2 if self.is_narrow else 1, "none")
        return Layout({}, self.micro_batch_size, "full", chunk_tokens=7)

    def shared(self, source: Path) -> dict[str, Any]:
        """tiny_job's arguments that one process has too. `source`: the folder of the base model, if it has one."""
        whole: dict[str, Any] = {"model": self.model} if self.base is None else {"source": str(source)}
        whole["attention"] = self.attention
        masks = {} if self.is_packed or self.model["model_type"] in DOCUMENT_FAMILIES else {"document_masks": False}
        return whole | {"adapter": self.adapter, "steps": STEPS} | masks | self.training

    def alone(self, source: Path, weights: Path) -> RunRequest:
        """One process, which leaves its last weights in the file `weights`."""
        return self._request(self.whole_batch, source, keep_weights=str(weights))

    def ranks(self, layout: Layout, source: Path, weights: Path, **more: Any) -> RunRequest:
        """A run of `layout`, compared with the weights in the file."""
        return self._request(layout, source, weights=str(weights), **more)

    def _request(self, layout: Layout, source: Path, **more: Any) -> RunRequest:
        constants = {} if layout.chunk_tokens is None else dict.fromkeys(_CHUNK_NAMES, layout.chunk_tokens)
        if layout.is_compiled:
            constants |= {_COMPILER: _NO_COMPILER}
        narrow = {"precision": "fp8"} if self.is_narrow else {}
        constants |= dict.fromkeys([_EMULATED] * self.is_narrow, True)
        if self.growth_steps is not None:
            constants |= {f"{_SCALING}.INITIAL_SCALE": 2.0 ** (16 + self.growth_steps)}
            constants |= {f"{_SCALING}.GROWTH_INTERVAL_STEPS": self.growth_steps}
        return RunRequest(
            layout.strategy,
            last_step=STEPS,
            job=layout.job(self.shared(source)) | _OF_BATCHES | narrow,
            is_packed=self.is_packed,
            constants=constants,
            **more,
        )


def draw(seed: int) -> Drawn:
    """The seed's job; always the same one, for one version of this module and of what the trainer refuses."""
    rng = random.Random(seed)
    family = rng.choice((*FAMILIES, *FAMILIES, *sorted(OTHER_TENSOR_FAMILIES)))
    model = draw_model(rng, family)
    tuned = draw_adapter(rng, model) if family in FAMILIES else None
    is_noisy = family in FAMILIES and rng.random() < 0.12
    if is_noisy:
        model, tuned = draw_noise(rng, model, tuned)
    training = draw_training(rng, model, tuned)
    job = Drawn(
        *(seed, family, model, tuned, training),
        is_packed=model["model_type"] in DOCUMENT_FAMILIES and rng.random() < 0.35,
        saved_at=rng.randint(1, STEPS - 1),
        first=ONE_BY_ONE,
        second=ONE_BY_ONE,
        is_noisy=is_noisy,
        growth_steps=rng.choice((1, 2, None)) if training["precision"] == "fp16" else None,
        micro_batch_size=rng.choice((1, 2, 4)) if model.get("output_router_logits") else None,
        base=draw_base(rng) if tuned is not None or rng.random() < 0.25 else None,
        attention=rng.choice(("auto", "auto", "auto", "eager")),
    )
    return with_layouts(rng, job)


def with_layouts(rng: random.Random, job: Drawn) -> Drawn:
    """The job under two layouts that it can have."""
    refused: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        _save_configuration(job.model, Path(folder))
        first = _supported(rng, job, Path(folder), refused)
        second = _supported(rng, job, Path(folder), refused)
        first, second = (_perhaps_compiled(rng, job, layout, Path(folder)) for layout in (first, second))
        drawn = replace(job, first=first, second=second, refused=refused)
        return _perhaps_narrow(random.Random(f"in 8 bits {job.seed}"), drawn, Path(folder))


def _perhaps_narrow(rng: random.Random, job: Drawn, source: Path) -> Drawn:
    """With layouts of its own: most that a job in bf16 may have are nothing for 8 bits. A whole job has sequences of
    that length, which the layouts are drawn for."""
    if job.precision != "bf16" or rng.random() > NARROW_SHARE:
        return job
    short = job.training | _OF_BATCHES
    narrow = replace(job, training=short | {"precision": "fp8"}, is_narrow=True)
    with mock.patch(_EMULATED, True):
        if any(refusal(narrow, layout, source) is not None for layout in (narrow.whole_batch, narrow.parts)):
            return job
        first, second = (_supported(rng, narrow, source, job.refused) for _ in range(2))
    return replace(narrow, training=short, first=first, second=second)


def draw_base(rng: random.Random) -> BaseFiles:
    """How the files of a model lie."""
    return BaseFiles(rng.choice(("float32", "float32", "bfloat16")), rng.choice(("5GB", "20KB")))


ONE_BY_ONE = Layout({}, 1, "none")
"""One process that accumulates a sequence at a time."""


def _save_configuration(model: dict[str, Any], folder: Path) -> None:
    stated = dict(model)
    AutoConfig.for_model(stated.pop("model_type"), **stated).save_pretrained(folder)


def _supported(rng: random.Random, job: Drawn, source: Path, refused: Counter[str]) -> Layout:
    for _ in range(MOST_DRAWS):
        layout = _layout(rng, job)
        if layout is None:
            continue
        if (reason := refusal(job, layout, source)) is None:
            return layout
        assert "\n" not in reason, f"no single line: {reason}"
        refused[re.sub(r"\d+", "N", reason).replace(str(source), "SOURCE")] += 1
    raise AssertionError(f"seed {job.seed}: no layout is supported; refused: {refused}")


def _perhaps_compiled(rng: random.Random, job: Drawn, layout: Layout, source: Path) -> Layout:
    """Drawn last: what a seed stands for beside stays what it was before there were any."""
    compiled = replace(layout, is_compiled=rng.random() < COMPILED_SHARE)
    with mock.patch(_COMPILER, _NO_COMPILER):  # whether this machine has one changes no draw
        return compiled if refusal(job, compiled, source) is None else layout


def refusal(job: Drawn, layout: Layout, source: Path) -> str | None:
    """Why the job can't run so; None when it can."""
    try:
        built = tiny_job(layout.strategy, layout.spec.world_size, **layout.job(job.shared(source)))
        check_supported(built, device_type="cpu")
        task_of(built).check_model(built)
    except ValidationError as error:
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    except InputError as error:
        return str(error)
    return None


def draw_training(rng: random.Random, model: dict[str, Any], tuned: dict[str, Any] | None) -> dict[str, Any]:
    """The job's training section, but for what is a layout's."""
    is_quantized = tuned is not None and tuned["kind"] == "qlora"
    precision = rng.choices(("fp64", "fp32", "bf16", "fp16"), (50, 30, 12, 8))[0]
    if is_quantized and precision == "fp64":
        precision = "fp32"
    if model["model_type"] in _JUMPS:
        precision = "fp64"
    # DeepSpeed knows no other, and no fp64: it would be drawn hardly ever.
    kind = "adamw" if precision != "fp64" and rng.random() < 0.5 else rng.choice(OPTIMIZERS)
    if kind == "adamw_8bit" and precision == "fp64":  # of no use there, and refused
        kind = "adamw"
    optimizer: dict[str, Any] = {"kind": kind, "weight_decay": rng.choice((0.0, 0.1))}
    if kind == "sgd":
        optimizer |= {"momentum": 0.9, "nesterov": rng.random() < 0.5}
    elif rng.random() < 0.3:
        optimizer["betas"] = (0.8, 0.99)
    if rng.random() < 0.2:
        optimizer["average_decay"] = 0.7
    if model["model_type"] == "deepseek_v3" and tuned is None and rng.random() < 0.5:
        optimizer["router_bias_rate"] = 0.01
    return {
        "precision": precision,
        "optimizer": optimizer,
        "learning_rate": _RATES[kind],
        "global_batch_size": rng.choice(GLOBAL_BATCHES),
        "sequence_length": rng.choice((24, 24, 48, 25)),
        "gradient_clip": rng.choice((None, 0.5, 0.5)),
        "schedule": {
            "kind": rng.choice(("constant", "cosine", "linear", "wsd")),
            "warmup_steps": rng.choice((0, 2)),
            "final_fraction": rng.choice((0.0, 0.1)),
        },
        "seed": rng.randrange(10_000),
    }


def _layout(rng: random.Random, job: Drawn) -> Layout | None:
    """None where the batch can't be divided so, which no job gets as far as being refused for here."""
    world_size = rng.choice(WORLD_SIZES)
    if job.precision != "fp64" and world_size in (2, 4) and rng.random() < 0.6:
        parallelism = _zero(rng, world_size)
    else:
        parallelism = _degrees(rng, world_size, job)
    batch = job.training["global_batch_size"]
    share, rest = divmod(batch, parallelism.get("data_replicate", 1) * parallelism.get("data_shard", 1))
    if rest:
        return None
    size = rng.choice([number for number in range(1, share + 1) if share % number == 0])
    if job.micro_batch_size is not None:
        size = job.micro_batch_size
        if share % size:
            return None
    recompute = rng.choice(("none", "none", "selective", "full"))
    return Layout(parallelism, size, recompute, rng.choice(("auto", "logits", "chunked")), rng.choice(CHUNKS))


def _degrees(rng: random.Random, world_size: int, job: Drawn) -> dict[str, Any]:
    cuts_layers = job.model["model_type"] in PIPELINE_FAMILIES
    axes = _AXES if cuts_layers else _AXES[:3]
    found: dict[str, Any] = {}
    for factor in {1: (), 2: (2,), 3: (3,), 4: (2, 2), 6: (2, 3), 8: (2, 2, 2)}[world_size]:
        axis = rng.choice(axes)
        found[axis] = found.get(axis, 1) * factor
    if found.get("pipeline", 1) > 1:
        found["pipeline_schedule"] = rng.choice(_SCHEDULES)
    shards = found.get("data_shard", 1) * found.get("context", 1)
    has_experts = any("expert" in name for name in job.model)
    if has_experts and shards > 1 and rng.random() < 0.7:
        found["expert"] = rng.choice([number for number in range(2, shards + 1) if shards % number == 0])
    if found.get("data_shard", 1) > 1 and rng.random() < 0.5:
        found["fsdp"] = {
            "wrap": rng.choice(("block", "size")),
            "min_parameters": 20_000,
            "reshard_after_forward": rng.choice((True, False, "auto")),
            "prefetch_units": rng.choice((0, 1)),
        }
    return found


def _zero(rng: random.Random, world_size: int) -> dict[str, Any]:
    stage = rng.randint(0, 3)
    found: dict[str, Any] = {"engine": "deepspeed", "data_replicate": world_size, "zero_stage": stage}
    sizes: dict[str, Any] = {
        "reduce_bucket_elements": rng.choice(("auto", 3_000)),
        "overlap": rng.choice(("auto", True, False)),
    }
    if stage and rng.random() < 0.3:
        found["offload"] = "cpu"
        if stage == 3 and rng.random() < 0.5:
            sizes["offload_parameters"] = "cpu"
    if stage == 3:
        sizes |= {"persistence_threshold_elements": rng.choice((0, 100, 100_000))}
        sizes |= {"prefetch_elements": rng.choice(("auto", 0, 2_000)), "max_live_elements": rng.choice(("auto", 5_000))}
    elif stage:
        sizes["allgather_bucket_elements"] = rng.choice(("auto", 3_000))
    return found | {"zero": sizes}
