"""Seeds of the campaign whose task has pictures: whole jobs alone, under data parallelism, which is all they have."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_testing.image_shards import CONVNEXT, RESNET, SIZE, VIT, captioned, classified, write_shards
from trainer_testing.llava import CLIP_LLAMA, SIGLIP_QWEN, save_source

from parity.draws import Drawn, Layout
from parity.whole_jobs import STEPS_OF_WHOLE, WholeJob, draw_end, draw_saves, draw_where_it_ends

SHARE = 0.15
"""Of all seeds."""
_BATCH = 8
_LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"data_replicate": 2},
    {"data_shard": 2},
    {"data_replicate": 4},
    {"data_shard": 4},
    {"data_replicate": 2, "data_shard": 2},
)
_MODELS: dict[str, dict[str, Any]] = {
    "ResNet": RESNET,
    "ResNet of bottlenecks": RESNET | {"layer_type": "bottleneck", "hidden_sizes": [16, 32]},
    "ViT": VIT,
    "ConvNeXt": CONVNEXT,
    "LLaVA of CLIP and Llama": CLIP_LLAMA,
    "LLaVA of SigLIP and Qwen2": SIGLIP_QWEN,
}


@dataclass(frozen=True)
class DrawnPictures(Drawn):
    """`micro_batch_size`: with batch normalization the sequences of all ranks' micro-batches together."""

    @property
    def parts(self) -> Layout:
        """A picture at a time, where nothing is normalized over a micro-batch."""
        return Layout({}, self.micro_batch_size or 1, "none")


def is_of_pictures(seed: int) -> bool:
    """Whether the seed is one of these."""
    return random.Random(f"task {seed}").random() < SHARE


def draw_pictures(seed: int) -> DrawnPictures:
    """The seed's model, training and layouts."""
    rng = random.Random(f"pictures {seed}")
    family = rng.choice(tuple(_MODELS))
    normalizes = family.startswith("ResNet")
    # Roundings of fp32 can't be measured where micro-batches can't be changed.
    precision = rng.choices(("fp64", "fp32", "bf16"), (50, 0 if normalizes else 30, 20))[0]
    is_sgd = not family.startswith("LLaVA") and rng.random() < 0.5
    optimizer: dict[str, Any] = {"kind": "adamw"}
    if is_sgd:
        optimizer = {"kind": "sgd", "weight_decay": 1e-4, "nesterov": rng.random() < 0.5}
    # In bf16 DeepSpeed would round the running averages of batch normalization, which is refused.
    has_zero = precision != "fp64" and not is_sgd and not (normalizes and precision == "bf16")
    if not has_zero and rng.random() < 0.3:
        optimizer["average_decay"] = 0.7
    training = {
        **{"precision": precision, "optimizer": optimizer, "learning_rate": 0.02 if is_sgd else 3e-3},
        **{"global_batch_size": _BATCH, "gradient_clip": rng.choice((None, 0.5)), "seed": rng.randrange(10_000)},
        "schedule": {"kind": rng.choice(("constant", "cosine")), "warmup_steps": rng.choice((0, 2))},
    }
    together = rng.choice((4, 8)) if normalizes else None
    first, second = (_layout(rng, together, has_zero=has_zero) for _ in range(2))
    return DrawnPictures(
        *(seed, family, _MODELS[family], None, training),
        **{"is_packed": False, "saved_at": 0, "first": first, "second": second},
        micro_batch_size=together,
    )


def _layout(rng: random.Random, together: int | None, *, has_zero: bool) -> Layout:
    parallelism = rng.choice(_LAYOUTS)
    if has_zero and rng.random() < 0.5:
        ranks, stage = rng.choice((2, 4)), rng.randint(0, 3)
        parallelism = {"engine": "deepspeed", "data_replicate": ranks, "zero_stage": stage}
    ranks = Layout(parallelism, 1, "none").spec.data_parallel_size
    share = _BATCH // ranks
    size = rng.choice([number for number in (1, 2, 4, 8) if share % number == 0])
    return Layout(parallelism, size if together is None else together // ranks, "none")


def whole_pictures(drawn: DrawnPictures, folder: Path) -> WholeJob:
    """The seed's job, with its shards in `folder`; some pictures are broken, and others stand in for them."""
    rng = random.Random(f"whole pictures {drawn.seed}")
    sees_text = drawn.family.startswith("LLaVA")
    make = captioned if sees_text else classified
    samples = list(make(rng.choice((30, 56)), seed=drawn.seed))
    for number in rng.sample(range(len(samples)), rng.choice((0, 0, 2))):
        kind = "jpg" if sees_text else "png"
        samples[number][kind] = samples[number][kind][:40]
    write_shards(folder / "train", iter(samples))
    write_shards(folder / "validation", make(13, seed=drawn.seed + 1))
    model: dict[str, Any] = {"config": drawn.model}
    data: dict[str, Any] = {
        **{"train": [_shards(folder / "train")], "packing": False, "shuffle": rng.random() < 0.8},
        **{"validation": [_shards(folder / "validation")] if rng.random() < 0.6 else [], "max_bad_records": 1000},
    }
    images: dict[str, Any] = {"decode_threads": rng.choice((1, 2))}
    if sees_text:
        data["sequence_length"] = 64
        images["freeze_vision"] = rng.random() < 0.4
        if drawn.model == CLIP_LLAMA and rng.random() < 0.5:
            save_source(folder / "source", folder)
            model, data["tokenizer"] = {"source": str(folder / "source")}, str(folder / "source")
            if drawn.training["optimizer"].get("average_decay") is None and rng.random() < 0.6:
                model["adapter"] = {"kind": "lora", "rank": 4, "targets": ["q_proj", "v_proj"]}
    else:
        images |= {"size": SIZE, "augment": rng.random() < 0.7, "label_smoothing": rng.choice((0.0, 0.1))}
    return _ended(rng, drawn, {"model": model, "data": data, "images": images}, is_language=sees_text)


def _shards(folder: Path) -> dict[str, Any]:
    return {"path": str(folder), "format": "webdataset"}


def _ended(rng: random.Random, drawn: DrawnPictures, sections: dict[str, Any], *, is_language: bool) -> WholeJob:
    training = drawn.training | {"validation_batches": 1, "validation_every_steps": rng.choice((None, 2))}
    training |= {"epochs": 2.7} if rng.random() < 0.3 else {"steps": STEPS_OF_WHOLE}
    content: dict[str, Any] = sections | {
        "name": "whole",
        "task": "vision_language" if is_language else "image_classification",
        "training": training,
        "checkpoint": draw_saves(rng, validates=bool(sections["data"]["validation"])),
    }
    end = draw_end(rng, content)
    average = drawn.training["optimizer"].get("average_decay") is not None and rng.random() < 0.5
    merge = "adapter" in content["model"] and rng.random() < 0.5
    return WholeJob(
        drawn,
        content,
        **draw_where_it_ends(rng, end, content, drawn.first),
        exported={"average": average, "merge": merge},
    )
