"""Image classification with an unmodified Hugging Face model: ResNet, ViT, ConvNeXt; from WebDataset shards."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForImageClassification, PretrainedConfig, PreTrainedModel

from trainer.data import IGNORED_LABEL, JobData, part_cache
from trainer.data.bad_records import BadRecordError
from trainer.tasks.base import Task
from trainer.tasks.batch_norm import replace_batch_norms
from trainer.tasks.building import config_of, finished, image_data, outlined, try_picture
from trainer.tasks.images import ImageTransform, Pixels, Preprocessing
from trainer.tasks.samples import SampleTable, image_of
from trainyard.errors import InputError
from trainyard.spec.job import DataSource, ImageSpec, ResolvedJob
from trainyard.spec.words import counted

MODEL_TYPES = ("resnet", "vit", "convnext")
"""Verified: parity, resumes and learning are tested with them."""

_WITH_BATCH_NORM = ("resnet",)
_TOP = 5


@dataclass(frozen=True)
class ImageBatch:
    """Images of one forward pass on one rank. B = micro batch size."""

    pixels: Pixels
    labels: torch.Tensor
    """(B,) int64; IGNORED_LABEL where there is no image."""
    num_target_tokens: int
    """Images: what the loss is averaged over."""
    num_tokens: int
    """Images too: the task's unit."""


class ImageTable(SampleTable):
    """Images with their class."""

    def __init__(
        self, *arguments: Any, transform: ImageTransform, job: ResolvedJob, classes: "Classes", **settings: Any
    ) -> None:
        """`arguments`, `settings`: SampleTable's."""
        super().__init__(*arguments, **settings)
        self._transform = transform
        self._seed = job.spec.training.seed
        self._classes = classes

    def read(self, members: dict[str, bytes], position: int) -> tuple[torch.Tensor, int]:
        """See SampleTable."""
        label = self._classes.label_of(members)
        return self._transform(image_of(members), seed=self._seed, position=position), label

    def collate(self, samples: Sequence[tuple[torch.Tensor, int] | None]) -> ImageBatch:
        """See SampleTable."""
        size, known = self._transform.size, self._classes.preprocessing
        images = torch.zeros((len(samples), 3, size, size), dtype=torch.uint8)
        labels = torch.full((len(samples),), IGNORED_LABEL)
        for row, sample in enumerate(samples):
            if sample is not None:
                images[row], labels[row] = sample
        count = int((labels != IGNORED_LABEL).sum())
        return ImageBatch(Pixels(images, known.mean, known.std), labels, count, count)


@dataclass(frozen=True)
class Classes:
    """What the labels of the data mean, and how images are normalized for the model that tells them apart."""

    number: int
    names: dict[str, int]
    preprocessing: Preprocessing

    def label_of(self, members: dict[str, bytes]) -> int:
        """The sample's class, 0 to number - 1; BadRecordError where it has none or another."""
        stated = _stated_label(members)
        label, named = self.names.get(stated), f" ({stated[:60]!r} in images.class_names)"
        if label is None:
            label, named = self._number_in(stated), ""
        if not 0 <= label < self.number:
            raise BadRecordError(f"its class is {label}{named}, the model has {self.number} (0 to {self.number - 1})")
        return label

    def _number_in(self, stated: str) -> int:
        try:
            return int(stated)
        except ValueError:
            known = (
                f"is not in images.class_names ({counted(len(self.names), 'name')})" if self.names else "is no number"
            )
            raise BadRecordError(f"its class {stated[:60]!r} {known}") from None


def _stated_label(members: dict[str, bytes]) -> str:
    """The text of `cls`, else `label` in `json`."""
    try:
        if "cls" in members:
            return members["cls"].decode("utf-8-sig").strip()
        if "json" in members:
            content = json.loads(members["json"])
            if isinstance(content, dict) and isinstance(content.get("label"), str | int):
                return str(content["label"]).strip()
            raise BadRecordError("its json has no label (a number or a name)")
    except ValueError:
        raise BadRecordError("its class is not UTF-8 text, or its json is broken") from None
    raise BadRecordError(f"has no class: no cls and no json, only {', '.join(sorted(members))}")


class ImageClassification(Task):
    """See Task. A micro-batch's targets and its unit are images."""

    unit = "images"
    measures = ("top1_accuracy", "top5_accuracy")

    def __init__(self, job: ResolvedJob) -> None:
        self._label_smoothing = (job.spec.images or ImageSpec()).label_smoothing

    def check(self, job: ResolvedJob) -> None:
        """See Task."""
        spec, images = job.spec, job.spec.images or ImageSpec()
        model_type = _config(job).model_type
        if model_type not in _WITH_BATCH_NORM:
            return
        if images.batch_norm == "frozen" and spec.model.source is None:
            raise InputError("images.batch_norm: frozen uses the averages of model.source; a new model has none")
        if job.parallelism.engine == "deepspeed" and spec.training.precision != "fp32":
            raise InputError(
                f"training.precision: {spec.training.precision} with engine: deepspeed would round the running averages"
                f" of {model_type}'s batch normalization; use engine: torch, or fp32"
            )

    def check_model(self, job: ResolvedJob) -> None:
        """See Task."""
        if job.spec.model.config is not None:
            model = self.build_model(job)
            size = _preprocessing(job, model.config).size
            try_picture(model, size, lambda model, picture: model(pixel_values=picture))

    def build_data(
        self, job: ResolvedJob, *, data_parallel_rank: int, data_parallel_size: int, cache_dir: Path
    ) -> JobData:
        """See Task."""
        images = job.spec.images or ImageSpec()
        config = _config(job)
        known = _preprocessing(job, config)
        classes = Classes(config.num_labels, _names(images, config.num_labels), known)

        def table(sources: Sequence[DataSource], field: str, is_training: bool) -> SampleTable:
            crop_area = images.crop_area if is_training and images.augment else None
            return ImageTable(
                sources,
                cache_dir=cache_dir,
                max_bad_records=job.spec.data.max_bad_records,
                parts=part_cache(job, cache_dir),
                where=field,
                transform=ImageTransform(known.size, crop_area, images.resize_ratio, known.resample),
                job=job,
                classes=classes,
            )

        return image_data(job, table, data_parallel_rank=data_parallel_rank, data_parallel_size=data_parallel_size)

    def build_model(self, job: ResolvedJob, data: JobData | None = None) -> PreTrainedModel:
        """See Task; the data is not asked."""
        config = _config(job)
        options = {"attn_implementation": _attention(job)} if config.model_type == "vit" else {}
        new_head = "classifier." if (job.spec.images or ImageSpec()).num_classes is not None else None
        model = outlined(job, AutoModelForImageClassification, config, new_head=new_head, **options)
        replace_batch_norms(model, (job.spec.images or ImageSpec()).batch_norm)
        return finished(model, job)

    def loss_sum(self, forward: nn.Module, batch: ImageBatch, device: torch.device) -> torch.Tensor:
        """See Task."""
        logits = _logits(forward, batch.pixels, device)
        return _cross_entropy(logits, batch.labels.to(device), self._label_smoothing)

    def validation_sums(self, forward: nn.Module, batch: ImageBatch, device: torch.device) -> torch.Tensor:
        """See Task: the loss without smoothing, and how many images have their class first, and among five."""
        logits, labels = _logits(forward, batch.pixels, device), batch.labels.to(device)
        best = logits.topk(min(_TOP, logits.size(1))).indices == labels[:, None]
        loss = _cross_entropy(logits, labels, 0.0)
        return torch.stack([loss.double(), best[:, 0].sum().double(), best.sum().double()])

    def probe_loss(self, model: nn.Module, forward: nn.Module, device: torch.device) -> torch.Tensor:
        """See Task. Running averages are put back."""
        assert isinstance(model, PreTrainedModel)
        size = getattr(model.config, "image_size", 64)
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        forward.train()
        images = torch.zeros((2, 3, size, size), dtype=next(model.parameters()).dtype, device=device)
        logits: torch.Tensor = forward(pixel_values=images).logits
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
        return logits.float().sum()


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, ignore_index=IGNORED_LABEL, reduction="sum", label_smoothing=label_smoothing)


def _logits(forward: nn.Module, pixels: Pixels, device: torch.device) -> torch.Tensor:
    """(B, classes). In the weights' own type: autocast and FSDP take it from there."""
    dtype = next(forward.parameters()).dtype
    logits: torch.Tensor = forward(pixel_values=pixels.on(device, dtype)).logits
    return logits


def _config(job: ResolvedJob) -> PretrainedConfig:
    """The model's configuration with the job's number of classes."""
    stated = (job.spec.images or ImageSpec()).num_classes
    given = job.spec.model.config
    if given is not None:
        in_config = given.get("num_labels")
        if stated is None and in_config is None:
            raise InputError("images.num_classes: say how many classes the new model tells apart")
        if stated is not None and in_config not in (None, stated):
            raise InputError(f"images.num_classes: {stated}, but model.config.num_labels is {in_config}; keep one")
    config = config_of(job, MODEL_TYPES)
    if stated is not None and config.num_labels != stated:
        config.num_labels = stated
    return config


def _preprocessing(job: ResolvedJob, config: PretrainedConfig) -> Preprocessing:
    return Preprocessing.of(job, model_size=config.image_size if config.model_type == "vit" else None)


def _names(images: ImageSpec, num_classes: int) -> dict[str, int]:
    """Class names and their numbers, which are those of their lines from 0 on; {} where labels are numbers."""
    if images.class_names is None:
        return {}
    where = f"images.class_names: {images.class_names}"
    try:
        lines = Path(images.class_names).read_text(encoding="utf-8-sig").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: can't be read ({error})") from None
    names = [line.strip() for line in lines]
    if not names:
        raise InputError(
            f"{where}: has no name in it: write one class name a line, or leave class_names out if labels are numbers"
        )
    if "" in names:
        raise InputError(
            f"{where}: line {names.index('') + 1} is blank, and a class's number is that of its line: name it, or"
            " take it out"
        )
    if len(names) > num_classes:
        raise InputError(
            f"{where}: has {counted(len(names), 'name')}, and the model tells {num_classes} classes apart: make "
            "images.num_classes"
            " and the names agree"
        )
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{where}: {twice!r} stands twice; keep one")
    return {name: number for number, name in enumerate(names)}


def _attention(job: ResolvedJob) -> str:
    return "sdpa" if job.spec.model.attention == "auto" else job.spec.model.attention
