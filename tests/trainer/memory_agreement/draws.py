"""What a seed of the memory campaign stands for: a job as wide as the formulas are made for, and one of its ranks.

Nothing is computed of it, so sizes cost nothing: a trace's time is that of its layers and micro-batches. What the
trainer refuses, and what has no formulas, is drawn again, and told.
"""

import json
import random
import re
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from trainer.strategies import check_supported
from trainer.tasks import task_of
from trainer_testing.families import ATTENTION_LINEARS, FAMILIES, TIED, adapted_linears
from trainer_testing.tiny import strategy_name

from trainyard.errors import InputError
from trainyard.planner import resolve
from trainyard.planner.dense_families import DENSE_READERS
from trainyard.planner.formulas import formulas_of
from trainyard.spec.job import AdapterSpec, JobSpec
from trainyard.spec.model_types import LINEAR_LAYERS
from trainyard.spec.support import DOCUMENT_FAMILIES, PIPELINE_FAMILIES

MOST_DRAWS = 300
"""Of layouts for one model: so many in a row that are refused would be a fault of the draw."""
WORLD_SIZES = (1, 2, 4, 4, 8, 8, 8, 16, 16)
OPTIMIZERS = ("adamw", "adamw", "adamw", "adamw_8bit", "adafactor", "muon", "sgd")
LONGEST = 8192
"""Tokens of a sequence, and positions that a model knows."""
_MORE_DENSE = ("gemma2", "phi3")

ROUTED: dict[str, dict[str, Any]] = {
    "afmoe": {"number": "num_experts", "is_dense_first": True},
    "cohere2_moe": {"number": "num_experts", "more": {"num_shared_experts": 2}},
    "dots1": {"number": "n_routed_experts", "is_dense_first": True, "more": {"n_shared_experts": 2}},
    "ernie4_5_moe": {"number": "moe_num_experts", "is_dense_first": True},
    "exaone_moe": {"number": "num_experts", "is_dense_first": True},
    "flex_olmo": {"number": "num_experts"},
    "glm4_moe": {"number": "n_routed_experts", "is_dense_first": True, "more": {"use_qk_norm": True}},
    "glm4_moe_lite": {"number": "n_routed_experts", "is_dense_first": True, "has_heads_of_keys": True},
    "gpt_oss": {"number": "num_local_experts"},
    "granitemoe": {"number": "num_local_experts"},
    "granitemoeshared": {"number": "num_local_experts", "more": {"shared_intermediate_size": 1536}},
    "hunyuan_v1_moe": {"number": "num_experts", "more": {"moe_topk": 2}},
    "hy_v3": {"number": "num_experts", "is_dense_first": True},
    "llama4_text": {"number": "num_local_experts", "more": {"intermediate_size_mlp": 6144}},
    "minimax_m2": {"number": "num_local_experts"},
    "olmoe": {"number": "num_experts"},
    "phimoe": {"number": "num_local_experts", "more": {"attention_bias": True, "lm_head_bias": True}},
    "qwen2_moe": {"number": "num_experts", "more": {"shared_expert_intermediate_size": 3072}},
    "solar_open": {"number": "n_routed_experts"},
}
"""Families with routed experts that have readers of their own: what their configurations call the number of experts,
whether the first layers are dense (whose width is then another field than the experts'), whether each query head has
keys of its own, and what else they state."""

FAMILY_NAMES = (*FAMILIES, *sorted(DENSE_READERS), *_MORE_DENSE, *sorted(ROUTED))


@dataclass(frozen=True)
class Drawn:
    """A seed: a job, and the rank of it that is traced."""

    seed: int
    family: str
    job: JobSpec
    rank: int
    refused: Counter[str] = field(default_factory=Counter, compare=False)
    """Lines of the trainer and the planner for layouts that were drawn before, numbers left out; how often each."""

    @property
    def layout(self) -> str:
        """What the engine calls itself, and the degrees."""
        spec = self.job.parallelism
        assert not isinstance(spec, str)
        name = "single" if spec.world_size == 1 and spec.engine == "torch" else strategy_name(spec)
        return f"{name}: {json.dumps(spec.model_dump(exclude_defaults=True))}"

    @property
    def words(self) -> str:
        """The job in a line, but for its layout."""
        job = self.job
        adapter = job.model.adapter.model_dump(exclude_defaults=True) if job.model.adapter else None
        parts = {
            "model": job.model.config,
            "attention": job.model.attention,
            "adapter": adapter,
            **job.training.model_dump(exclude_defaults=True, exclude={"steps", "learning_rate"}),
            "sequence_length": job.data.sequence_length,
            "packing": job.data.packing,
            "document_masks": job.data.document_masks,
        }
        return f"{self.family}: {json.dumps(parts, default=str)}"


def draw(seed: int, *, engine: str | None = None) -> Drawn:
    """The seed's job; always the same one, for one version of this module and of what the trainer refuses.

    `engine`: layouts of others are drawn again, those of DeepSpeed where only torch's will do."""
    rng = random.Random(seed)
    # Families with tests of every layout come as often as all others.
    family = rng.choice(tuple(FAMILIES) if rng.random() < 0.5 else FAMILY_NAMES)
    model = _model(rng, family)
    refused: Counter[str] = Counter()
    # Drawn once: else a family that few layouts take would come in one process mostly.
    world_size = rng.choice(WORLD_SIZES)
    for _ in range(MOST_DRAWS):
        made = _job(rng, family, model, world_size)
        reason = made if isinstance(made, str) else _unwanted(made, engine) or refusal(made)
        if reason is None:
            assert isinstance(made, JobSpec)
            return Drawn(seed, family, made, rng.randrange(world_size), refused)
        assert "\n" not in reason, f"no single line: {reason}"
        refused[re.sub(r"\d+", "N", reason)] += 1
    raise AssertionError(f"seed {seed}: no layout is supported; refused: {refused}")


def _unwanted(job: JobSpec, engine: str | None) -> str | None:
    assert not isinstance(job.parallelism, str)
    drawn = job.parallelism.engine
    return None if engine in (None, drawn) else f"engine {drawn}: not wanted here"


def refusal(job: JobSpec) -> str | None:
    """Why the job can't run so, or has no formulas; None when it can and has."""
    try:
        formulas_of(job)
        built = resolve(job)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_supported(built, device_type="cpu")
            task_of(built).check_model(built)
    except InputError as error:
        return str(error)
    return None


def _job(rng: random.Random, family: str, model: dict[str, Any], world_size: int) -> JobSpec | str:
    """Or in one line why there is none."""
    tuned = _adapter(rng, family, model)
    parallelism = _layout(rng, model, world_size)
    micro_batch, shares = rng.choice((1, 1, 2, 3, 4)), rng.choice((1, 1, 2, 3, 4, 8))
    parallel = parallelism.get("data_replicate", 1) * parallelism.get("data_shard", 1)
    is_of_documents = model["model_type"] in DOCUMENT_FAMILIES
    spec = {
        "name": "few-layers",
        "model": {"config": model, "attention": rng.choice(("auto",) * 9 + ("eager",))},
        "data": {
            "train": [{"path": "unused", "format": "text"}],
            "sequence_length": rng.choice((512, 1024, 2048, 4096, LONGEST)),
            "packing": rng.random() < 0.7,
            "document_masks": is_of_documents and rng.random() < 0.6,
        },
        "training": {
            "steps": 10,
            "micro_batch_size": micro_batch,
            "global_batch_size": micro_batch * shares * parallel,
            "learning_rate": 1e-4,
            "precision": rng.choice(("bf16", "bf16", "bf16", "fp32")),
            "activation_checkpointing": rng.choice(("none", "selective", "full")),
            "loss": rng.choice(("auto", "auto", "logits", "chunked")),
            "optimizer": _optimizer(rng),
        },
        "parallelism": parallelism,
    }
    try:
        job = JobSpec.model_validate(spec)
        adapter = tuned and AdapterSpec.model_validate(tuned)
    except ValidationError as error:
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    # A job takes adapters beside a source alone: here its configuration stands for one.
    return job.model_copy(update={"model": job.model.model_copy(update={"adapter": adapter})})


def _optimizer(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(OPTIMIZERS)
    found: dict[str, Any] = {"kind": kind}
    if kind == "sgd":
        found["momentum"] = rng.choice((0.0, 0.9))
    if rng.random() < 0.2:
        found["average_decay"] = 0.999
    return found


def _adapter(rng: random.Random, family: str, model: dict[str, Any]) -> dict[str, Any] | None:
    kind = rng.choices((None, "lora", "qlora"), (70, 20, 10))[0]
    if kind is None or model["model_type"] not in LINEAR_LAYERS:
        return None
    usual = ATTENTION_LINEARS.get(family, ("q_proj", "v_proj"))
    names = adapted_linears(model)
    targets = rng.choice((usual, names, rng.sample(names, rng.randint(1, len(names)))))
    return {"kind": kind, "rank": rng.choice((8, 16, 64)), "alpha": 32, "targets": list(targets)}


def _model(rng: random.Random, family: str) -> dict[str, Any]:
    head_dim = rng.choice((64, 128, 128))
    hidden = rng.choice((1024, 1536, 2048, 2560, 3072, 4096))
    heads, layers = hidden // head_dim, rng.randint(2, 6)
    vocabulary = rng.choice((32000, 32001, 50257, 50304, 65536, 102400, 128256, 151936))
    ends = {"vocab_size": vocabulary, "max_position_embeddings": LONGEST}
    if family.startswith("GPT-2"):
        sizes = {"n_head": heads, "n_embd": hidden, "n_layer": layers, "n_positions": LONGEST}
        return FAMILIES[family] | {"vocab_size": vocabulary} | sizes
    sizes = ends | {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden}
    sizes["num_key_value_heads"] = rng.choice([number for number in (1, 2, 4, 8, heads) if heads % number == 0])
    sizes["intermediate_size"] = rng.choice((2 * hidden, 4 * hidden, hidden * 11 // 4, 5504, 11008, 14336))
    if family in FAMILIES:
        return _of_known(rng, FAMILIES[family] | sizes, head_dim)
    sizes |= {"head_dim": head_dim, "pad_token_id": 0, "tie_word_embeddings": family in TIED or rng.random() < 0.2}
    if family not in ROUTED:
        return {"model_type": family} | sizes
    if ROUTED[family].get("has_heads_of_keys"):
        sizes["num_key_value_heads"] = heads
    return {"model_type": family} | sizes | _routed(rng, ROUTED[family], hidden)


def _routed(rng: random.Random, fields: dict[str, Any], hidden: int) -> dict[str, Any]:
    width = rng.choice((512, 768, 1408))
    found = {fields["number"]: rng.choice((8, 16, 32, 64)), "num_experts_per_tok": rng.choice((1, 2, 4, 8))}
    found |= {"moe_intermediate_size": width} | fields.get("more", {})
    if not fields.get("is_dense_first"):
        found["intermediate_size"] = rng.choice((width, 2 * hidden))
    return found


def _of_known(rng: random.Random, model: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """A family of `FAMILIES`, with what its configuration may state."""
    kind = model["model_type"]
    if "head_dim" in model:  # heads that are no part of the hidden size
        model |= {"head_dim": rng.choice((64, 128, 256))}
    if kind in ("llama", "qwen3", "gemma"):
        model["attention_bias"] = rng.random() < 0.3
    if kind == "llama":
        model["mlp_bias"] = rng.random() < 0.3
    if kind == "mistral":
        model["sliding_window"] = rng.choice((256, 1024, 4096))
    if kind == "gpt_neox":
        model |= {"use_parallel_residual": rng.random() < 0.7}
    if kind.startswith("gpt_neox") or kind.startswith("deepseek"):
        model["num_key_value_heads"] = model["num_attention_heads"]
    number, chosen = rng.choice((8, 16, 32, 64, 128)), rng.choice((1, 2, 4, 8))
    width = rng.choice((512, 768, 1408))
    if kind == "mixtral":
        return model | {"num_local_experts": rng.choice((8, 16)), "num_experts_per_tok": rng.choice((1, 2))}
    if kind == "qwen3_moe":
        return model | {"num_experts": number, "num_experts_per_tok": chosen, "moe_intermediate_size": width}
    if kind.startswith("deepseek"):
        ranks = {"kv_lora_rank": rng.choice((256, 512)), "qk_rope_head_dim": 64, "qk_nope_head_dim": head_dim}
        groups = {"n_group": 4, "topk_group": 2, "n_shared_experts": rng.randint(1, 2), "v_head_dim": head_dim}
        latent = None if kind == "deepseek_v2" else rng.choice((768, 1536))
        experts = {"n_routed_experts": number, "num_experts_per_tok": min(chosen, number // 2)}
        experts |= {"moe_intermediate_size": width, "first_k_dense_replace": rng.randint(0, 2), "q_lora_rank": latent}
        return model | ranks | groups | experts
    return model


def _layout(rng: random.Random, model: dict[str, Any], world_size: int) -> dict[str, Any]:
    if world_size > 1 and rng.random() < 0.12:
        return _zero(rng, world_size)
    axes = ["data_shard", "data_shard", "data_shard", "data_replicate", "tensor", "context"]
    if model["model_type"] in PIPELINE_FAMILIES:
        axes += ["pipeline", "pipeline"]
    found: dict[str, Any] = {}
    kept = rng.sample(axes, rng.randint(1, 3))
    while world_size > 1:
        world_size //= 2
        axis = rng.choice(kept)
        found[axis] = found.get(axis, 1) * 2
    if found.get("pipeline", 1) > 1:
        found["pipeline_schedule"] = rng.choice(("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"))
    shards = found.get("data_shard", 1) * found.get("context", 1)
    if any("expert" in name for name in model) and shards > 1 and rng.random() < 0.6:
        found["expert"] = rng.choice([number for number in (2, 4, 8, 16) if shards % number == 0])
    if found.get("data_shard", 1) > 1 and rng.random() < 0.4:
        found["fsdp"] = {
            "wrap": rng.choice(("block", "block", "size")),
            "min_parameters": rng.choice((100_000_000, 300_000_000)),
            "reshard_after_forward": rng.choice((True, False, "auto")),
            "prefetch_units": rng.choice((0, 0, 1, 2)),
        }
    return found


def _zero(rng: random.Random, world_size: int) -> dict[str, Any]:
    stage = rng.randint(0, 3)
    found: dict[str, Any] = {"engine": "deepspeed", "data_replicate": world_size, "zero_stage": stage}
    sizes: dict[str, Any] = {"reduce_bucket_elements": rng.choice(("auto", 10_000_000, 500_000_000))}
    if stage and rng.random() < 0.3:
        found["offload"] = "cpu"
        if stage == 3 and rng.random() < 0.5:
            sizes["offload_parameters"] = "cpu"
    if stage == 3:
        sizes |= {"persistence_threshold_elements": rng.choice((0, 10_000, 100_000))}
    return found | {"zero": sizes}
