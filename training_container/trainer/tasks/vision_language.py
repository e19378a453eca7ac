"""Text about images: LLaVA models (a vision tower, a projector, a language model) on WebDataset shards.

One family, verified: towers CLIP and SigLIP, language models Llama and Qwen2. A sample is one image and its text, in
which `<image>` stands where the image goes (at the beginning where it doesn't stand); it becomes as many image tokens
as the tower gives. Only what the assistant says is learnt.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from trainer.checkpoint.base_model import FREEZABLE
from trainer.data import IGNORED_LABEL, JobData, part_cache
from trainer.data.bad_records import BadRecordError
from trainer.data.chat import ChatTemplate, chat_template_of
from trainer.data.documents import DocumentEncoder, encoder_of
from trainer.data.readers import Record
from trainer.data.tokenizer import JsonTokenizer, TextTokenizer, tokenizer_of
from trainer.losses.token_loss import next_token_loss_sum
from trainer.models.adapters import add_adapter
from trainer.models.attention import HALF_TYPES
from trainer.models.configuration import check_vocabulary
from trainer.tasks.base import Task
from trainer.tasks.building import config_of, finished, image_data, outlined, try_picture
from trainer.tasks.images import ImageTransform, Pixels, Preprocessing
from trainer.tasks.samples import SampleTable, image_of
from trainyard.errors import InputError
from trainyard.spec.data_files import tokenizer_file_of
from trainyard.spec.job import DataSource, ImageSpec, ResolvedJob
from trainyard.spec.words import counted

MODEL_TYPES = ("llava",)
"""Others (Qwen2-VL, Idefics3, PaliGemma ...) lay image tokens and positions out in ways of their own: not verified."""

TOWERS = ("clip_vision_model", "siglip_vision_model")
LANGUAGE_MODELS = ("llama", "qwen2")
IMAGE_MARK = "<image>"

_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class VisionLanguageBatch:
    """Samples of one forward pass on one rank. B = micro batch size, S = its longest sample's tokens."""

    input_ids: torch.Tensor
    """(B, S) int64, padded at the end: attention is causal, so nothing sees the padding."""
    labels: torch.Tensor
    """(B, S) int64, not shifted; IGNORED_LABEL on image, prompt and padding."""
    pixels: Pixels
    num_target_tokens: int
    num_tokens: int
    """Image tokens included, padding not."""


@dataclass(frozen=True)
class ImageTokens:
    """What one image becomes in the text."""

    token_id: int
    count: int
    mark: _Ids
    """The tokenizer's ids of IMAGE_MARK, which they stand in for."""

    def expanded(self, ids: _Ids, learnt: npt.NDArray[np.bool_]) -> tuple[_Ids, npt.NDArray[np.bool_]]:
        """With image tokens in the place of the one mark; BadRecordError where there is not one."""
        length = len(self.mark)
        starts = range(len(ids) - length + 1)
        places = [start for start in starts if np.array_equal(ids[start : start + length], self.mark)]
        if len(places) != 1:
            raise BadRecordError(f"its text has {len(places)} times {IMAGE_MARK} as tokens; a sample has one image")
        before, after = places[0], places[0] + length
        if self.token_id in ids[:before] or self.token_id in ids[after:]:
            raise BadRecordError(
                f"its text has the token {self.token_id}, which stands for images in the model (image_token_index)"
            )
        image = np.full(self.count, self.token_id, dtype=np.int64)
        return (
            np.concatenate([ids[:before], image, ids[after:]]),
            np.concatenate([learnt[:before], np.zeros(self.count, dtype=bool), learnt[after:]]),
        )


class Conversations:
    """A sample's json or txt -> token ids, and which of them are learnt."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate | None) -> None:
        prompts = DataSource(path="webdataset", format="jsonl", prompt_field="prompt", text_field="answer")
        chats = DataSource(path="webdataset", format="jsonl", messages_field="messages")
        self._prompts = encoder_of(prompts, tokenizer, template)
        self._chats = encoder_of(chats, tokenizer, template) if template is not None else None
        self._in_parts = template is not None and _takes_parts(template)

    def encode(self, members: dict[str, bytes]) -> tuple[_Ids, npt.NDArray[np.bool_]]:
        """Ids, and whether each is learnt; BadRecordError says why there is nothing to learn."""
        stated = _stated_text(members)
        if "messages" in stated:
            return self._chat(stated["messages"])
        if "caption" in stated:
            if not isinstance(stated["caption"], str) or not stated["caption"]:
                raise BadRecordError(
                    "its caption (caption in its json, or its txt) is empty, or no text: there is nothing to learn"
                )
            return self._prompt(IMAGE_MARK, stated["caption"])
        question, answer = stated.get("question"), stated.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str):
            raise BadRecordError("its json has neither messages, nor question and answer, nor caption as text")
        question = question if IMAGE_MARK in question else f"{IMAGE_MARK}\n{question}"
        if self._chats is None:
            return self._prompt(f"{question}\n", answer)
        return self._chat([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])

    def _prompt(self, prompt: str, answer: Any) -> tuple[_Ids, npt.NDArray[np.bool_]]:
        return _encoded(self._prompts, {"prompt": prompt, "answer": answer})

    def _chat(self, messages: Any) -> tuple[_Ids, npt.NDArray[np.bool_]]:
        if self._chats is None:
            raise BadRecordError(
                "messages need a chat template, and none is beside the tokenizer: set data.chat_template"
            )
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise BadRecordError("messages must be a list of {role, content}")
        texts = [message | {"content": _as_text(message.get("content"))} for message in messages]
        if not any(IMAGE_MARK in message["content"] for message in texts):
            first = next((message for message in texts if message.get("role") == "user"), None)
            if first is None:
                raise BadRecordError("messages have no turn of the user, where the image would go")
            first["content"] = f"{IMAGE_MARK}\n{first['content']}"
        if self._in_parts:
            texts = [message | {"content": _as_parts(message["content"])} for message in texts]
        return _encoded(self._chats, {"messages": texts})


def _takes_parts(template: ChatTemplate) -> bool:
    """Whether the template wants content as a list of parts (LLaVA's own do), not as text."""
    try:
        text = template.text([{"role": "user", "content": _as_parts(f"{IMAGE_MARK}probe")}])
    except BadRecordError:
        return False
    return IMAGE_MARK in text and "'type'" not in text


def _as_parts(text: str) -> list[dict[str, str]]:
    before, mark, after = text.partition(IMAGE_MARK)
    words = (before + after).strip("\n")
    return [*([{"type": "image"}] if mark else []), {"type": "text", "text": words}]


def _as_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if not all(isinstance(part, dict) for part in parts):
        parts = []
    texts = [IMAGE_MARK + "\n" if part.get("type") == "image" else part.get("text") for part in parts]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise BadRecordError("a message's content must be text, or a list of image and text parts")
    return "".join(map(str, texts))


def _encoded(encoder: DocumentEncoder, value: dict[str, Any]) -> tuple[_Ids, npt.NDArray[np.bool_]]:
    (found,) = encoder.encode([Record(0, value)])
    if isinstance(found, BadRecordError):
        raise found
    if found is None:
        raise BadRecordError("its text is empty")
    ids = found.ids.astype(np.int64)
    return ids, np.ones(len(ids), dtype=bool) if found.learnt is None else found.learnt


def _stated_text(members: dict[str, bytes]) -> dict[str, Any]:
    try:
        if "json" in members:
            content = json.loads(members["json"])
            if isinstance(content, dict):
                return content
            raise BadRecordError("its json must be an object")
        if "txt" in members:
            return {"caption": members["txt"].decode("utf-8-sig").strip()}
    except ValueError:
        raise BadRecordError("its text is not UTF-8, or its json is broken") from None
    raise BadRecordError(f"has no text: no json and no txt, only {', '.join(sorted(members))}")


class VisionLanguageTable(SampleTable):
    """Images with what is said of them."""

    def __init__(
        self,
        *arguments: Any,
        transform: ImageTransform,
        known: Preprocessing,
        conversations: Conversations,
        image: ImageTokens,
        job: ResolvedJob,
        **settings: Any,
    ) -> None:
        """`arguments`, `settings`: SampleTable's."""
        super().__init__(*arguments, **settings)
        self.sequence_length = job.spec.data.sequence_length
        self._transform, self._known = transform, known
        self._conversations, self._image = conversations, image

    def read(self, members: dict[str, bytes], position: int) -> tuple[torch.Tensor, _Ids, _Ids]:
        """See SampleTable."""
        ids, learnt = self._image.expanded(*self._conversations.encode(members))
        if len(ids) > self.sequence_length:
            raise BadRecordError(
                f"has {counted(len(ids), 'token')}, {self._image.count} of them its image's; data.sequence_length is"
                f" {self.sequence_length}"
            )
        labels = np.where(learnt, ids, IGNORED_LABEL)
        if not (labels[1:] != IGNORED_LABEL).any():
            raise BadRecordError("has nothing to learn: no turn of the assistant")
        return self._transform(image_of(members), seed=0, position=position), ids, labels

    def collate(self, samples: Sequence[tuple[torch.Tensor, _Ids, _Ids] | None]) -> VisionLanguageBatch:
        """See SampleTable. An empty sample has an image too: the model counts images and image tokens."""
        size = self._transform.size
        empty = np.full(self._image.count + 1, self._image.token_id, dtype=np.int64)
        empty[-1] = 0
        longest = max(len(empty) if sample is None else len(sample[1]) for sample in samples)
        input_ids = torch.zeros((len(samples), longest), dtype=torch.int64)
        labels = torch.full_like(input_ids, IGNORED_LABEL)
        images = torch.zeros((len(samples), 3, size, size), dtype=torch.uint8)
        num_tokens = 0
        for row, sample in enumerate(samples):
            if sample is None:
                input_ids[row, : len(empty)] = torch.from_numpy(empty)
                continue
            images[row], ids, wanted = sample
            input_ids[row, : len(ids)], labels[row, : len(ids)] = torch.from_numpy(ids), torch.from_numpy(wanted)
            num_tokens += len(ids)
        num_targets = int((labels[:, 1:] != IGNORED_LABEL).sum())
        pixels = Pixels(images, self._known.mean, self._known.std)
        return VisionLanguageBatch(input_ids, labels, pixels, num_targets, num_tokens)


class VisionLanguage(Task):
    """See Task."""

    def check(self, job: ResolvedJob) -> None:
        """See Task."""
        _check_config(_config(job), job)

    def check_model(self, job: ResolvedJob) -> None:
        """See Task."""
        if job.spec.model.config is not None:
            model = self.build_model(job)
            size = model.config.vision_config.image_size
            try_picture(model, size, lambda model, picture: model.get_image_features(pixel_values=picture))

    def build_data(
        self, job: ResolvedJob, *, data_parallel_rank: int, data_parallel_size: int, cache_dir: Path
    ) -> JobData:
        """See Task."""
        spec, config, tokenizer = job.spec, _config(job), _with_mark(tokenizer_of(job.spec))
        check_vocabulary(config.text_config, tokenizer.vocab_size, field="model.config.text_config.vocab_size")
        known = Preprocessing.of(job, model_size=config.vision_config.image_size)
        conversations = Conversations(tokenizer, chat_template_of(spec.data.chat_template, tokenizer_file_of(spec)))
        mark = tokenizer.encode_batch([IMAGE_MARK])[0].astype(np.int64)
        image = ImageTokens(config.image_token_id, num_image_tokens(config), mark)

        def table(sources: Sequence[DataSource], field: str, is_training: bool) -> SampleTable:
            """Of the sources of a field, `data.train` or `data.validation`, which are read alike."""
            return VisionLanguageTable(
                sources,
                cache_dir=cache_dir,
                max_bad_records=spec.data.max_bad_records,
                parts=part_cache(job, cache_dir),
                where=field,
                # The centre square, as CLIP's own processor cuts it; a random crop might lose what the text names.
                transform=ImageTransform(known.size, None, 1.0, known.resample),
                known=known,
                conversations=conversations,
                image=image,
                job=job,
            )

        return image_data(job, table, data_parallel_rank=data_parallel_rank, data_parallel_size=data_parallel_size)

    def build_model(self, job: ResolvedJob, data: JobData | None = None) -> PreTrainedModel:
        """See Task; the data is not asked."""
        attention = "sdpa" if job.spec.model.attention == "auto" else job.spec.model.attention
        model = outlined(job, AutoModelForImageTextToText, _config(job), attn_implementation=attention)
        if job.spec.model.adapter is not None:
            computes_in_half = job.spec.training.precision in HALF_TYPES
            add_adapter(model, job.spec.model.adapter, seed=job.spec.training.seed, computes_in_half=computes_in_half)
        tower = {name: parameter for name, parameter in model.named_parameters() if FREEZABLE in name}
        if (job.spec.images or ImageSpec()).freeze_vision:
            for parameter in tower.values():
                parameter.requires_grad_(False)
        model = finished(model, job)
        # In the type of those before them, whose output they get: what is frozen earlier is stored in 16 bits.
        for name, parameter in tower.items():
            if _is_unused(name, model.config):
                parameter.requires_grad_(False)
        return model

    def loss_sum(self, forward: nn.Module, batch: VisionLanguageBatch, device: torch.device) -> torch.Tensor:
        """See Task."""
        output = forward(
            input_ids=batch.input_ids.to(device),
            pixel_values=batch.pixels.on(device, _type_of(forward)),
            use_cache=False,
        )
        return next_token_loss_sum(output.logits, batch.labels.to(device))

    def probe_loss(self, model: nn.Module, forward: nn.Module, device: torch.device) -> torch.Tensor:
        """See Task."""
        assert isinstance(model, PreTrainedModel)
        config = model.config
        ids = torch.full((1, num_image_tokens(config) + 2), config.image_token_id, device=device)
        ids[:, -2:] = 0
        size = config.vision_config.image_size
        images = torch.zeros((1, 3, size, size), dtype=_type_of(model), device=device)
        logits: torch.Tensor = forward(input_ids=ids, pixel_values=images, use_cache=False).logits
        return logits.float().sum()


def _with_mark(tokenizer: TextTokenizer) -> TextTokenizer:
    """One for which IMAGE_MARK is a token, as a LLaVA's own has it: others join its last character with the line end
    that follows (Qwen2's, Llama 3's), or its first with the blank before. Bytes join nothing."""
    return tokenizer.with_token(IMAGE_MARK) if isinstance(tokenizer, JsonTokenizer) else tokenizer


def num_image_tokens(config: PretrainedConfig) -> int:
    """Tokens that one image becomes: the tower's patches."""
    count: int = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    has_class_token = config.vision_config.model_type == "clip_vision_model"
    return count + 1 if has_class_token and config.vision_feature_select_strategy == "full" else count


def _type_of(model: nn.Module) -> torch.dtype:
    """The weights' own type: autocast and FSDP take it from there."""
    return next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())


def _is_unused(name: str, config: PretrainedConfig) -> bool:
    """Whether a weight of the tower lies behind the layer whose output is taken: it gets no gradient.

    `vision_feature_layer` counts the embeddings' output as 0, so k takes the first k layers, and -2 all but the last.
    """
    num_layers = config.vision_config.num_hidden_layers
    layer = config.vision_feature_layer
    num_used: int = layer if layer >= 0 else num_layers + 1 + layer
    inside = name.partition(FREEZABLE)[2].removeprefix("vision_model.")
    if inside.startswith("encoder.layers."):
        return int(inside.split(".")[2]) >= num_used
    return inside.startswith(("post_layernorm.", "head."))


def _check_config(config: PretrainedConfig, job: ResolvedJob) -> None:
    where = "model.config" if job.spec.model.config is not None else f"model.source: {job.spec.model.source}"
    tower, language = config.vision_config.model_type, config.text_config.model_type
    if tower not in TOWERS or language not in LANGUAGE_MODELS:
        raise InputError(
            f"{where}: a {tower} with a {language}: llava is verified with the towers {', '.join(TOWERS)} and the"
            f" language models {', '.join(LANGUAGE_MODELS)}"
        )
    if not isinstance(config.vision_feature_layer, int):
        raise InputError(f"{where}: vision_feature_layer must be one layer, is {config.vision_feature_layer}")
    layers, heads = config.vision_config.num_hidden_layers, config.text_config.num_attention_heads
    if config.vision_feature_layer == 0 or not -layers - 1 <= config.vision_feature_layer <= layers:
        raise InputError(
            f"{where}: vision_feature_layer {config.vision_feature_layer}: the tower has "
            f"{counted(layers, 'layer')}, so it must be"
            f" 1 to {layers}, or {-layers - 1} to -1 from the end"
        )
    if heads % config.text_config.num_key_value_heads:
        raise InputError(
            f"{where}: text_config.num_key_value_heads is {config.text_config.num_key_value_heads}, which must divide"
            f" num_attention_heads, {heads}: state both"
        )
    if tower == "siglip_vision_model" and config.vision_feature_select_strategy != "full":
        raise InputError(
            f"{where}: vision_feature_select_strategy: a SigLIP tower has no class token to drop; set full"
        )
    if config.image_token_id >= config.text_config.vocab_size:
        raise InputError(
            f"{where}: image_token_index {config.image_token_id} lies outside text_config.vocab_size,"
            f" {config.text_config.vocab_size}"
        )
    count, length = num_image_tokens(config), job.spec.data.sequence_length
    if length < count + 2:
        raise InputError(f"data.sequence_length: {length}: an image alone is {counted(count, 'token')}; lengthen it")
    positions = config.text_config.max_position_embeddings
    if length > positions:
        raise InputError(f"data.sequence_length is {length}, but the model has {positions} positions; shorten it")


def _config(job: ResolvedJob) -> PretrainedConfig:
    """A configuration in the job that names no image token gets a new id behind the tokenizer's."""
    given = job.spec.model.config
    if given is None or given.get("model_type") not in MODEL_TYPES:
        return config_of(job, MODEL_TYPES)
    size = tokenizer_of(job.spec).vocab_size
    text = given.get("text_config")
    if not isinstance(text, dict) or not isinstance(given.get("vision_config"), dict):
        raise InputError("model.config: a llava needs vision_config and text_config, each with its model_type")
    completed = given | {"text_config": {"vocab_size": size + 1} | text}
    completed.setdefault("image_token_index", size)
    spec = job.spec.model_copy(update={"model": job.spec.model.model_copy(update={"config": completed})})
    return config_of(job.model_copy(update={"spec": spec}), MODEL_TYPES)
