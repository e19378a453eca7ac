"""Tiny LLaVAs: their configurations, jobs and folders."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer.models.deferred_weights import fill
from trainer.tasks.vision_language import VisionLanguage

from trainer_testing.image_shards import SIZE, image_job
from trainyard.planner import resolve
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec, ResolvedJob

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": 8,
}
LANGUAGE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
CLIP_LLAMA = {
    "model_type": "llava",
    "vision_config": TOWER | {"model_type": "clip_vision_model"},
    "text_config": LANGUAGE | {"model_type": "llama"},
}
SIGLIP_QWEN = {
    "model_type": "llava",
    "vision_config": TOWER | {"model_type": "siglip_vision_model"},
    "text_config": LANGUAGE | {"model_type": "qwen2"},
    "vision_feature_select_strategy": "full",
    "vision_feature_layer": -1,
}


def vlm_job(folder: Path, **sections: Any) -> dict[str, Any]:
    """The picture job's sections, for a LLaVA without a tokenizer (bytes)."""
    training = {"optimizer": {"kind": "adamw"}, "learning_rate": 5e-3} | sections.pop("training", {})
    data = {"sequence_length": 64, "packing": False} | sections.pop("data", {})
    base = {"task": "vision_language", "model": {"config": CLIP_LLAMA}, "images": {"decode_threads": 2}}
    job = image_job(folder, **(base | sections), training=training, data=data)
    job["images"].pop("size")
    return job


def save_source(folder: Path, shards: Path) -> None:
    """A LLaVA directory as Hugging Face writes it, with a word tokenizer that knows <image>."""
    words = ["<unk>", "</s>", "<image>", "which", "colour?", "a", "patch", "red", "green", "blue", "grey"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<image>", "</s>"])
    job = resolved(vlm_job(shards, model={"config": with_words(CLIP_LLAMA, len(words))}), 1)
    model = fill(VisionLanguage().build_model(job), device=torch.device("cpu"))
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def with_words(config: dict[str, Any], size: int) -> dict[str, Any]:
    return config | {"text_config": config["text_config"] | {"vocab_size": size}, "image_token_index": 2}


def resolved(job: dict[str, Any], world_size: int) -> ResolvedJob:
    return resolve(parse(JobSpec, job, "job"), world_size=world_size)
