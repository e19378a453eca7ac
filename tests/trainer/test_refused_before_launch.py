"""What the trainer doesn't do, `resolve` refuses before machines are rented, in the words that the trainer has."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer.models import facts as trainer_facts
from trainer.session import Session
from trainer.strategies import check_supported
from trainer.tasks import task_of
from trainer.tasks.causal_lm import CausalLM
from trainer_testing.families import FAMILIES
from trainer_testing.image_shards import CONVNEXT, RESNET, VIT, image_job
from trainer_testing.llava import CLIP_LLAMA, LANGUAGE, SIGLIP_QWEN, TOWER, vlm_job
from trainer_testing.tiny import tiny_job
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.pytorch_utils import Conv1D

from trainyard import planner
from trainyard.errors import InputError
from trainyard.planner.facts import facts_of
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec, ParallelismSpec, ResolvedJob
from trainyard.spec.model_files import check_weight_files
from trainyard.spec.model_types import CAUSAL_LM_TYPES, LINEAR_LAYERS, POSITION_NAMES
from trainyard.spec.obstacles import MEASURES
from trainyard.spec.support import NO_RECOMPUTATION

LLAMA = {
    **{"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024, "max_position_embeddings": 8192},
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = FAMILIES["DeepSeek-V3"] | {"max_position_embeddings": 8192}
GPT2 = {"model_type": "gpt2", "n_embd": 512, "n_layer": 6, "n_head": 8, "vocab_size": 1024}
BERT = {
    **{"model_type": "bert", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6},
    **{"num_attention_heads": 8, "vocab_size": 1024, "max_position_embeddings": 8192},
}
OPT = LLAMA | {"model_type": "opt", "ffn_dim": 1024}
QWEN3_NEXT = LLAMA | {
    **{"model_type": "qwen3_next", "linear_num_key_heads": 4, "linear_num_value_heads": 8, "head_dim": 64},
    **{"num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 0},
}
GEMMA4 = LLAMA | {"model_type": "gemma4_text", "head_dim": 64, "hidden_size_per_layer_input": 0, "pad_token_id": 0}
BART = {
    **{
        "model_type": "bart",
        "d_model": 512,
        "decoder_layers": 6,
        "decoder_attention_heads": 8,
        "decoder_ffn_dim": 1024,
    },
    **{"vocab_size": 1024, "max_position_embeddings": 8192, "is_decoder": True},
}
LORA = {"kind": "lora"}
QLORA = {"kind": "qlora"}
FSDP = {"data_shard": 8}
ZERO = {"engine": "deepspeed", "data_replicate": 8, "zero_stage": 2}
ZERO_BUBBLE = {"pipeline": 2, "pipeline_schedule": "zero_bubble", "data_shard": 4}
TOKENS = {"path": "tenant://x", "format": "tokens"}
IMAGES = {"train": [{"path": "x", "format": "webdataset"}], "packing": False}


def job_of(
    config: dict[str, Any], layout: dict[str, Any], source: str | None = None, **sections: Any
) -> dict[str, Any]:
    """A job on one host of eight GPUs; `source`: stands for a folder with a configuration."""
    data: Any = {"train": [TOKENS], "sequence_length": 4096, "packing": True}
    training: Any = {"steps": 10, "global_batch_size": 64, "learning_rate": 1e-4, "micro_batch_size": 1}
    job = {
        "name": "test",
        "tenant": "acme",
        "data": data | sections.pop("data", {}),
        "training": training | sections.pop("training", {}),
        "model": ({"config": config} if source is None else {"source": source}) | sections.pop("model", {}),
        "parallelism": layout,
        "compute": {"backend": "sagemaker", "instance_type": "ml.p5.48xlarge", "instance_count": 1},
    }
    return job | sections


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a BERT that sees ahead": (
        job_of(BERT, FSDP, data={"document_masks": False}),
        "of this bert see those that they are to predict, which it would learn to copy: set is_decoder: true",
    ),
    "a family that can't compute again": (
        job_of(LLAMA | {"model_type": "jetmoe"}, FSDP, training={"activation_checkpointing": "selective"}),
        "training.activation_checkpointing: selective: transformers' jetmoe can't compute its blocks again",
    ),
    "a Llama that is told to": (
        job_of(LLAMA | {"is_causal": False}, FSDP),
        "would learn to copy: set is_causal: true",
    ),
    "a Gemma that embeds": (
        job_of(LLAMA | {"model_type": "gemma3_text", "use_bidirectional_attention": True}, FSDP),
        "would learn to copy: set use_bidirectional_attention: false in its configuration",
    ),
    "a pipeline of gemma4": (job_of(LLAMA | {"model_type": "gemma4_text"}, {"pipeline": 2, "data_shard": 4}), "gemma4"),
    "gptj's sequences": (job_of(LLAMA | {"model_type": "gptj"}, {"context": 2, "data_shard": 4}), "context: 2"),
    "persimmon's matrices": (job_of(LLAMA | {"model_type": "persimmon"}, {"tensor": 2, "data_shard": 4}), "tensor: 2"),
    "skipped blocks": (
        job_of(OPT | {"layerdrop": 0.1}, FSDP, data={"document_masks": False}),
        "model.config.layerdrop: 0.1 skips blocks, others on each rank",
    ),
    "a decoder's skipped blocks": (
        job_of(BART | {"decoder_layerdrop": 0.25}, ZERO, data={"document_masks": False}),
        "model.config.decoder_layerdrop: 0.25 skips blocks",
    ),
    "zero_bubble recomputed": (
        job_of(LLAMA, ZERO_BUBBLE, training={"activation_checkpointing": "full"}),
        "zero_bubble computes two",
    ),
    "zero_bubble with experts": (job_of(MIXTRAL, ZERO_BUBBLE | {"expert": 2}), "zero_bubble takes weight gradients"),
    "too few layers": (
        job_of(LLAMA, {"pipeline": 4, "pipeline_schedule": "interleaved_1f1b", "data_shard": 2}),
        "makes 8 stages, but the model has 6 layers",
    ),
    "context, eager": (job_of(LLAMA, {"context": 8}, model={"attention": "eager"}), "model.attention: eager"),
    "context, odd": (job_of(LLAMA, {"context": 8}, data={"sequence_length": 4090}), "use 4080"),
    "context of too few heads": (
        job_of(QWEN3_NEXT, {"context": 8}, data={"document_masks": False}),
        "context: 8 does not divide the model's linear_num_key_heads (4)",
    ),
    "context beside tensor of too few heads": (
        job_of(QWEN3_NEXT, {"context": 4, "tensor": 2}, data={"document_masks": False}),
        "context: 4 x tensor 2 does not divide the model's linear_num_key_heads (4)",
    ),
    "deepspeed, muon": (job_of(LLAMA, ZERO, training={"optimizer": {"kind": "muon"}}), "optimizer.kind: muon"),
    "deepspeed, sgd": (job_of(LLAMA, ZERO, training={"optimizer": {"kind": "sgd"}}), "optimizer.kind: sgd"),
    "deepspeed, average": (job_of(LLAMA, ZERO, training={"optimizer": {"average_decay": 0.9}}), "average_decay"),
    "deepspeed, skip": (job_of(LLAMA, ZERO, training={"on_anomaly": "skip"}), "on_anomaly: skip"),
    "deepspeed, fp64": (job_of(LLAMA, ZERO, training={"precision": "fp64"}), "fp64"),
    "deepspeed, fp16": (job_of(LLAMA, ZERO | {"zero_stage": 0}, training={"precision": "fp16"}), "zero_stage 0"),
    "deepspeed, qlora": (job_of(LLAMA, ZERO, source="config", model={"adapter": QLORA}), "qlora"),
    "deepspeed, key": (job_of(LLAMA, ZERO | {"deepspeed": {"sparse_attention": {}}}), "is not passed to DeepSpeed"),
    "deepspeed, stated": (
        job_of(LLAMA, ZERO | {"deepspeed": {"zero_optimization": {"stage": 3}}}),
        "set parallelism.zero_stage instead",
    ),
    "deepspeed, not offloaded": (
        job_of(LLAMA, ZERO | {"deepspeed": {"zero_optimization": {"offload_param": {"pin_memory": True}}}}),
        "nothing is offloaded",
    ),
    "deepspeed, value": (job_of(LLAMA, ZERO | {"deepspeed": {"dump_state": "yes"}}), "must be true or false"),
    "deepspeed, aio": (job_of(LLAMA, ZERO | {"deepspeed": {"aio": {"block_size": 0}}}), "at least 1, is 0"),
    "varlen, fp32": (
        job_of(LLAMA, FSDP, model={"attention": "varlen"}, training={"precision": "fp32"}),
        "bf16 and fp16, not in fp32",
    ),
    "varlen, no documents": (
        job_of(LLAMA, FSDP, model={"attention": "varlen"}, data={"document_masks": False}),
        "no packed documents",
    ),
    "flash_attention_3, wide heads": (
        job_of(GEMMA4, FSDP, model={"attention": "flash_attention_3"}),
        "flash_attention_3 takes heads of at most 256 dimensions, and gemma4_text has some of 512; set it to auto",
    ),
    "flash_attention_3, two sequences": (
        job_of(LLAMA, FSDP, model={"attention": "flash_attention_3"}, training={"micro_batch_size": 2}),
        "micro_batch_size 1 alone",
    ),
    "fp8, gpt2": (job_of(GPT2, FSDP, training={"precision": "fp8"}), "Conv1D"),
    "fp8, tokens": (job_of(LLAMA, FSDP, training={"precision": "fp8"}, data={"sequence_length": 4090}), "is 4090"),
    "adamw_8bit, fp64": (
        job_of(LLAMA, FSDP, training={"precision": "fp64", "optimizer": {"kind": "adamw_8bit"}}),
        "adamw_8bit",
    ),
    "best of what isn't measured": (
        job_of(
            *(LLAMA, FSDP),
            checkpoint={"keep_best": {"metric": "validation_top1_accuracy"}},
            data={"validation": [{"path": "tenant://y", "format": "tokens"}]},
        ),
        "is not measured by this task",
    ),
    "loss of zero_bubble": (job_of(LLAMA, ZERO_BUBBLE, training={"loss": "chunked"}), "loss: chunked"),
    "loss of an adapted head": (
        job_of(
            *(LLAMA, FSDP),
            source="config",
            model={"adapter": LORA | {"targets": ["q_proj", "lm_head"]}},
            training={"loss": "chunked"},
        ),
        "loss: chunked can't be had: the adapter on lm_head (model.adapter.targets) adds to what the head gives; set",
    ),
    "router's loss, family": (
        job_of(LLAMA | {"output_router_logits": True}, FSDP),
        "auxiliary loss of llama is not verified",
    ),
    "router's noise, cut": (
        job_of(MIXTRAL | {"router_jitter_noise": 0.1}, {"tensor": 2, "data_shard": 4}),
        "router_jitter_noise: 0.1 is not implemented with it",
    ),
    "norms of each head, cut": (
        job_of(LLAMA | {"model_type": "cohere", "use_qk_norm": True}, {"tensor": 2, "data_shard": 4}),
        "use_qk_norm is not implemented with it in cohere",
    ),
    "experts, compiled": (job_of(MIXTRAL, {"tensor": 2, "data_shard": 4}, training={"compile": True}), "of experts"),
    "mamba, packed": (job_of({"model_type": "mamba"}, FSDP), "document_masks"),
    "unknown type": (job_of(LLAMA | {"model_type": "llamma"}, FSDP), "did you mean llama?"),
    "too long": (job_of(LLAMA | {"max_position_embeddings": 2048}, FSDP), "has 2048 positions"),
    "too long for GPT-2": (job_of(GPT2 | {"n_positions": 2048}, FSDP), "has 2048 positions"),
    "too long for one of two names": (
        job_of(GPT2 | {"n_positions": 4096, "max_position_embeddings": 64}, FSDP),
        "has 64 positions",
    ),
    "images for language": (job_of(LLAMA, FSDP, data=IMAGES), "webdataset is for images"),
    "tokens of who knows which ids, streamed": (
        job_of({name: value for name, value in LLAMA.items() if name != "vocab_size"}, FSDP, data={"streaming": True}),
        "set model.config.vocab_size or data.tokenizer",
    ),
    "tokens and text, streamed": (
        job_of(LLAMA, FSDP, data={"streaming": True, "train": [TOKENS, {"path": "tenant://y", "format": "jsonl"}]}),
        "can't be mixed with other sources",
    ),
    "no template": (
        job_of(LLAMA, FSDP, data={"train": [{"path": "x", "format": "jsonl", "messages_field": "m"}]}),
        "messages_field: needs a chat template",
    ),
    "lora of nothing": (
        job_of(LLAMA, FSDP, source="config", model={"adapter": LORA | {"targets": ["nothing"]}}),
        "no linear layer",
    ),
    "lora of experts": (
        job_of(MIXTRAL, FSDP, source="config", model={"adapter": LORA | {"targets": ["up_proj"]}}),
        "these are experts too",
    ),
    "lora of shared experts": (
        job_of(
            *(DEEPSEEK, {"tensor": 2, "data_shard": 4}),
            source="config",
            model={"adapter": LORA | {"targets": ["shared_experts.down_proj"]}},
        ),
        "no linear layer",
    ),
    "lora of queries beside a latent, shared experts": (
        job_of(
            *(DEEPSEEK, {"tensor": 2, "data_shard": 4}),
            source="config",
            model={"adapter": LORA | {"targets": ["q_proj" if DEEPSEEK["q_lora_rank"] else "q_a_proj"]}},
        ),
        "no linear layer",
    ),
    "lora of the head, in a pipeline": (
        job_of(
            *(LLAMA, {"pipeline": 2, "data_shard": 4}),
            source="config",
            model={"adapter": LORA | {"targets": ["lm_head"]}},
        ),
        "first pipeline stages",
    ),
    "images, tensor": (
        job_of({"model_type": "vit"}, {"tensor": 8}, task="image_classification", data=IMAGES),
        "splits language models alone",
    ),
    "images, muon": (
        job_of(
            *({"model_type": "resnet"}, {"data_replicate": 8}),
            task="image_classification",
            data=IMAGES,
            training={"optimizer": {"kind": "muon"}},
        ),
        "not verified on convolutions",
    ),
    "images, lora": (
        job_of(LLAMA, FSDP, source="config", task="image_classification", data=IMAGES, model={"adapter": LORA}),
        "leave the adapter out",
    ),
    "images, recomputed": (
        job_of(
            *({"model_type": "resnet"}, {"data_replicate": 8}),
            task="image_classification",
            data=IMAGES,
            training={"activation_checkpointing": "full"},
        ),
        "keeps its activations",
    ),
    "images and text, packed": (
        job_of(LLAMA, FSDP, source="config", task="vision_language", data=IMAGES | {"packing": True}),
        "set packing: false",
    ),
}


def resolved(job: JobSpec) -> ResolvedJob:
    """What a planner that refuses nothing would give the trainer."""
    layout = job.parallelism
    assert isinstance(layout, ParallelismSpec)
    assert isinstance(job.training.micro_batch_size, int)
    stated = job.training.activation_checkpointing
    return ResolvedJob(
        spec=job,
        parallelism=layout,
        num_hosts=1,
        processes_per_host=layout.world_size,
        steps=10,
        micro_batch_size=job.training.micro_batch_size,
        gradient_accumulation_steps=job.global_batch_size // layout.data_parallel_size // job.training.micro_batch_size,
        activation_checkpointing="none" if stated == "auto" else stated,
        learning_rate=1e-4,
    )


def test_blocks_that_one_process_skips_are_no_matter() -> None:
    written = job_of(OPT | {"layerdrop": 0.1}, {"data_replicate": 1}, data={"document_masks": False})
    job = parse(JobSpec, written, "job")
    check_supported(resolved(job), device_type="cuda")


@pytest.mark.parametrize("case", CASES)
def test_a_launch_is_refused_in_the_trainers_words(case: str, tmp_path: Path) -> None:
    written, words = CASES[case]
    if "source" in written["model"]:
        config = DEEPSEEK if "shared" in case else MIXTRAL if "experts" in case else LLAMA
        (tmp_path / "config.json").write_text(json.dumps(config))
        written = written | {"model": written["model"] | {"source": str(tmp_path)}}
    job = parse(JobSpec, written, "job")
    with pytest.raises(InputError) as at_launch:
        planner.resolve(job)
    assert words in str(at_launch.value)
    with pytest.raises(InputError) as at_start:
        check_supported(resolved(job), device_type="cuda")
    if case != "mamba, packed":  # of which transformers knows the layers, and a configuration doesn't state them
        assert str(at_start.value) == str(at_launch.value)


def test_what_goes_together_is_launched() -> None:
    for layout in ({"pipeline": 2, "data_shard": 4}, {"context": 2, "data_shard": 4}, {"tensor": 2, "data_shard": 4}):
        found = planner.resolve(parse(JobSpec, job_of(LLAMA, layout), "job")).parallelism
        assert {name: getattr(found, name) for name in layout} == layout
    planner.resolve(parse(JobSpec, job_of(LLAMA, FSDP, data={"streaming": True}), "job"))
    planner.resolve(parse(JobSpec, job_of(LLAMA, ZERO | {"deepspeed": {"aio": {"block_size": 4096}}}), "job"))


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (LLAMA | {"n_positions": 64}, 8192),
        (LLAMA | {"n_positions": None}, 8192),
        ({name: value for name, value in LLAMA.items() if "max" not in name} | {"n_positions": 64}, None),
        (GPT2, None),
        (GPT2 | {"n_positions": 64}, 64),
        (GPT2 | {"max_position_embeddings": 64}, 64),
        (GPT2 | {"n_positions": 4096, "max_position_embeddings": 64}, 64),
        (GPT2 | {"n_positions": 64, "max_position_embeddings": 4096}, 4096),
    ],
)
def test_positions_are_those_that_transformers_gives_the_model(config: dict[str, Any], positions: int | None) -> None:
    job = parse(JobSpec, job_of(config, FSDP), "job")
    assert facts_of(job, None).max_positions == positions
    assert trainer_facts.facts_of(resolved(job)).max_positions == positions
    if positions is None or positions > job.data.sequence_length:
        planner.resolve(job)


def test_zero_bubble_recomputes_nothing_unless_it_is_told_to() -> None:
    job = job_of(LLAMA | {"num_hidden_layers": 200, "hidden_size": 8192, "intermediate_size": 65536}, ZERO_BUBBLE)
    assert planner.resolve(parse(JobSpec, job, "job")).activation_checkpointing == "none"


def test_types_and_layers_are_those_of_transformers() -> None:
    here = {config.model_type for config in AutoModelForCausalLM._model_mapping}
    assert here <= CAUSAL_LM_TYPES, "a type that transformers has would be refused"
    for settings in FAMILIES.values():
        model_type = str(settings["model_type"])
        stated = dict(settings)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(stated.pop("model_type"), **stated))
        modules = model.named_modules()
        linear = {name.rpartition(".")[2] for name, module in modules if isinstance(module, torch.nn.Linear | Conv1D)}
        assert linear <= LINEAR_LAYERS[model_type], "an adapter of a layer that the model has would be refused"


def test_families_that_cannot_compute_again_are_those_that_transformers_says() -> None:
    """Fails when one of them learns to: then it can leave `NO_RECOMPUTATION`."""
    known = AutoModelForCausalLM._model_mapping
    classes = {name: known[CONFIG_MAPPING[name]] for name in CAUSAL_LM_TYPES if name in CONFIG_MAPPING}
    cannot = {name for name, one in classes.items() if not one.supports_gradient_checkpointing}
    assert cannot == NO_RECOMPUTATION


def test_names_of_positions_are_those_of_transformers() -> None:
    names = {config.model_type: config.attribute_map for config in AutoModelForCausalLM._model_mapping}
    own = {
        kind: known["max_position_embeddings"] for kind, known in names.items() if "max_position_embeddings" in known
    }
    assert own.items() <= POSITION_NAMES.items(), "positions that a job states by this name would not be seen"


def test_validations_measure_what_may_be_kept_as_best() -> None:
    for name, measures in MEASURES.items():
        job = tiny_job("single", 1)
        task = task_of(job.model_copy(update={"spec": job.spec.model_copy(update={"task": name})}))
        own = ("loss", *(["perplexity"] if task.unit == "tokens" else []), *task.measures)
        assert measures == own


def test_a_truth_value_is_no_vocabulary_of_one() -> None:
    job = parse(JobSpec, job_of(LLAMA | {"vocab_size": True}, FSDP, data={"streaming": True}), "job")
    with pytest.raises(InputError, match=r"model.config.vocab_size: must be a whole number"):
        planner.resolve(job)
    with pytest.raises(InputError, match=r"vocabulary must be known: set model.config.vocab_size"):
        check_supported(resolved(job), device_type="cuda")


def refusal(job: ResolvedJob, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """What a job's start says, before it has come to its data."""
    runtime = SimpleNamespace(device=torch.device("cpu"), rendezvous_seconds=0.0)

    def unread(*_: Any, **__: Any) -> None:
        pytest.fail("data was read")

    monkeypatch.setattr("trainer.session.StopFlag", unread)
    with pytest.raises(InputError) as caught:
        Session(job, runtime, output_dir=folder, scratch_dir=folder)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"hidden_act": "foo"}, r"model\.config\.hidden_act: there is no activation function 'foo'; allowed: .*silu"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"Missing required keys in `rope_parameters`.*'factor'"),
        ({"dtype": "float8"}, "float8"),
        ({"pad_token_id": 1 << 20}, "pad_token_id, which must be below vocab_size"),
        (
            {"num_attention_heads": 0},
            r"^model\.config\.num_attention_heads: must be a whole number of at least 1, is 0$",
        ),
        ({"num_hidden_layers": -1}, r"^model\.config\.num_hidden_layers: must be a whole number of at least 1, is -1$"),
        ({"model_type": "gpt2", "n_head": "4"}, r"^model\.config\.n_head: must be a whole number .*, is '4'$"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads is 3, which must divide"),
    ],
)
def test_what_no_model_can_be_built_of_is_said_before_data_is_read(
    stated: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = tiny_job("single", 1, model=LLAMA | stated)
    assert re.search(message, refusal(job, monkeypatch, tmp_path))


@pytest.mark.parametrize(("target", "is_there"), [("q_proj", False), ("qkv_proj", True)])
def test_an_adapter_of_layers_that_are_not_there_is_said_before_data_is_read(
    target: str, is_there: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a family whose layers the spec doesn't list; no weights are looked at."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    AutoConfig.for_model("phi3", **sizes, pad_token_id=0).save_pretrained(tmp_path)
    assert "phi3" not in LINEAR_LAYERS
    adapter = {"kind": "lora", "targets": [target]}
    job = tiny_job("single", 1, source=str(tmp_path), adapter=adapter)
    if is_there:
        CausalLM().check_model(job)
        return
    told = refusal(job, monkeypatch, tmp_path)
    assert re.search(r"^model\.adapter\.targets: q_proj: no linear layer .* in phi3; it has .*qkv_proj", told)


@pytest.mark.parametrize("is_source", [False, True])
def test_a_model_whose_loss_can_not_be_had_in_parts_is_said_before_data_is_read(
    is_source: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if is_source:
        AutoConfig.for_model("granite", **sizes).save_pretrained(tmp_path)
    model: dict[str, Any] = {"source": str(tmp_path)} if is_source else {"model": sizes | {"model_type": "granite"}}
    told = refusal(tiny_job("single", 1, **model, loss="chunked"), monkeypatch, tmp_path)
    assert told.startswith("training.loss: chunked can't be had: GraniteForCausalLM changes the logits after its head;")
    CausalLM().check_model(tiny_job("single", 1, **model))


@pytest.mark.parametrize("target", ["head", "key"])
def test_so_is_an_adapter_on_a_head_of_any_name(target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    AutoConfig.for_model("rwkv", hidden_size=32, num_hidden_layers=2, vocab_size=96).save_pretrained(tmp_path)
    model = {"source": str(tmp_path), "adapter": LORA | {"targets": [target]}, "document_masks": False}
    job = tiny_job("single", 1, **model, loss="chunked")
    if target == "head":
        told = refusal(job, monkeypatch, tmp_path)
        assert told.startswith("training.loss: chunked can't be had: the adapter on head (model.adapter.targets) adds")
    else:
        CausalLM().check_model(job)
    CausalLM().check_model(tiny_job("single", 1, **model))


def _cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def _indexed(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))


def _linked(file: Path) -> None:
    """To a file that is gone, as of a cache that was cleared."""
    file.unlink()
    file.symlink_to(file.with_name("gone"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_cut, r"model\.safetensors: has [\d,]+ bytes, not [\d,]+; copy or download it again"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"abc"), r"model\.safetensors: is no safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"<!DOCTYPE html>" * 9), r"is no safetensors file"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]"),
            r"is no safetensors file",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes((9**6).to_bytes(8, "little") + b"{"),
            r"has 9 bytes, and its header alone 531,449; copy",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid"),
            r"is a pointer of Git LFS, not the file: git lfs pull",
        ),
        (
            lambda folder: _indexed(folder, "model-00002-of-00002.safetensors"),
            r"model-00002-of-00002\.safetensors: is not there, which model\.safetensors\.index\.json names",
        ),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "model.safetensors.index.json"),
            r"model\.safetensors\.index\.json: can't be read",
        ),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            r"has no weights, neither model\.safetensors nor .* nor pytorch_model\.bin; copy or download it again, or",
        ),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "",
        ),
        (
            lambda folder: (
                (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
                (folder / "model.safetensors.index.json").symlink_to("nowhere"),
            ),
            "",
        ),
        (
            lambda folder: _linked(folder / "model.safetensors"),
            r"model\.safetensors: is not there, which a link names; copy or download it again",
        ),
        (
            lambda folder: (
                (folder / "model.safetensors")
                .rename(folder / "other")
                .with_name("model.safetensors.index.json")
                .write_text("[" * 200_000)
            ),
            r"model\.safetensors\.index\.json: can't be read",
        ),
        (lambda folder: _indexed(folder, "model-00001-of-00001.safetensors"), ""),
        (lambda folder: None, ""),
    ],
)
def test_files_of_weights_that_are_not_whole_are_told_before_data_is_read(
    spoil: Any, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**LLAMA | {"hidden_size": 8, "intermediate_size": 8})
    ).save_pretrained(tmp_path)
    spoil(tmp_path)
    if not message:
        check_weight_files(str(tmp_path))
        return
    told = refusal(tiny_job("single", 1, source=str(tmp_path)), monkeypatch, tmp_path)
    assert re.search(message, told) and told.startswith(f"model.source: {tmp_path}: ") and "\n" not in told


def _tower(**vision_config: Any) -> dict[str, Any]:
    return CLIP_LLAMA | {"vision_config": TOWER | {"model_type": "clip_vision_model"} | vision_config}


def _llava(**text_config: Any) -> dict[str, Any]:
    return CLIP_LLAMA | {"text_config": LANGUAGE | {"model_type": "llama"} | text_config}


@pytest.mark.parametrize(
    ("make", "config", "message"),
    [
        (image_job, VIT | {"hidden_act": "foo"}, r"model\.config\.hidden_act: there is no activation function 'foo'"),
        (image_job, VIT | {"num_attention_heads": 0}, r"^model\.config\.num_attention_heads: must be a whole number"),
        (image_job, CONVNEXT | {"num_stages": 3}, r"no convnext can be built of it \(list index out of range\)"),
        (image_job, RESNET | {"depths": [1]}, r"a picture of 16 x 16 pixels can't go through such a resnet"),
        (image_job, VIT | {"num_channels": 1}, r"a picture of 16 x 16 pixels can't go through such a vit \(Make sure"),
        (image_job, VIT | {"patch_size": 32}, r"a picture of 16 x 16 pixels can't go through such a vit"),
        pytest.param(
            image_job,
            {"model_type": "resnet", "num_labels": 4, "hiden_sizes": [8]},
            "did you mean hidden_sizes",
            marks=pytest.mark.slow,  # looks at all types' names
        ),
        (vlm_job, _llava(hidden_act="foo"), r"^model\.config\.text_config\.hidden_act: there is no activation"),
        (vlm_job, _llava(num_attention_heads=0), r"^model\.config\.text_config\.num_attention_heads: must be a whole"),
        (vlm_job, _llava(num_key_value_heads=3), r"text_config\.num_key_value_heads is 3, which must divide"),
        (vlm_job, _llava(pad_token_id=5000), "pad_token_id, which must be below vocab_size"),
        (vlm_job, CLIP_LLAMA | {"vision_feature_layer": 7}, r"vision_feature_layer 7: the tower has 2 layers"),
        (vlm_job, CLIP_LLAMA | {"vision_feature_layer": 0}, r"layer 0: .* must be 1 to 2, or -3 to -1 from the end"),
        (
            vlm_job,
            _tower(num_channels=1),
            r"a picture of 16 x 16 pixels can't go through such a llava \(Invalid channel",
        ),
        (vlm_job, _tower(patch_size=32), r"a picture of 16 x 16 pixels can't go through such a llava"),
    ],
)
def test_so_are_models_of_tasks_with_images(
    make: Any, config: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = planner.resolve(parse(JobSpec, make(tmp_path, model={"config": config}), "job"), world_size=1)
    assert re.search(message, refusal(job, monkeypatch, tmp_path))


def test_to_see_whether_a_model_can_be_built_none_is_built_with_its_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A SigLIP's own start can't be made in parts: its LLaVA would be built whole, 28 GB of 7 billion weights."""
    honest, built = AutoModelForImageTextToText.from_config, list[Any]()

    def from_config(*args: Any, **kwargs: Any) -> Any:
        built.append(honest(*args, **kwargs))
        return built[-1]

    monkeypatch.setattr(AutoModelForImageTextToText, "from_config", from_config)
    tower = SIGLIP_QWEN["vision_config"] | {"num_channels": 1}
    content = vlm_job(tmp_path, model={"config": SIGLIP_QWEN | {"vision_config": tower}})
    job = planner.resolve(parse(JobSpec, content, "job"), world_size=1)
    assert "can't go through such a llava" in refusal(job, monkeypatch, tmp_path)
    assert len(built) == 1 and all(parameter.is_meta for parameter in built[0].parameters())
    built.clear()
    task_of(job).build_model(job)
    assert len(built) == 2, "a class whose weights are recorded by now: name another"


@pytest.mark.parametrize("is_llava", [False, True])
def test_attention_that_runs_on_a_gpu_alone_is_no_wrong_size(
    is_llava: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FlashAttention takes neither a picture without values nor fp32."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")

    monkeypatch.setitem(AttentionInterface._global_mapping, "of_gpus", refuse)
    make, config = (vlm_job, CLIP_LLAMA) if is_llava else (image_job, VIT)
    job = planner.resolve(parse(JobSpec, make(tmp_path, model={"config": config}), "job"), world_size=1)
    model = job.spec.model.model_copy(update={"attention": "of_gpus"})
    task_of(job).check_model(job.model_copy(update={"spec": job.spec.model_copy(update={"model": model})}))
