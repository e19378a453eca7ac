"""The plan of a vision-language job (LLaVA): its language model by the usual formulas, its vision tower beside it.

The tower and the projector run before the language model on every sample, one image each; a frozen tower has weights
and a forward pass, a trained one gradients, moments, activations and a backward pass as well.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.errors import InputError
from trainyard.hardware import Gpu
from trainyard.planner.activations import encoder_bytes
from trainyard.planner.communication import Fabric
from trainyard.planner.families import config_from_source, normal_name, trained_shape
from trainyard.planner.layout import Layout
from trainyard.planner.memory import Memory, memory, state_bytes, trained_state
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import StageParams
from trainyard.planner.step import StepTime
from trainyard.planner.time_constants import DEFAULT_CONSTANTS
from trainyard.planner.timing import step_time
from trainyard.spec.job import ImageSpec, JobSpec

VICUNA = {"model_type": "llama", "vocab_size": 32064}
CLIP_LARGE = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
KNOWN: dict[str, dict[str, Any]] = {
    "llava-1.5-7b": {"model_type": "llava", "text_config": VICUNA, "vision_config": CLIP_LARGE},
    "llava-1.5-13b": {
        "model_type": "llava",
        "text_config": {
            **VICUNA,
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
        },
        "vision_config": CLIP_LARGE,
    },
}
"""By name: Vicuna and CLIP ViT-L/14 at 336 pixels (Liu et al., arXiv:2310.03744)."""

TOWER_DEFAULTS: dict[str, dict[str, int]] = {
    "clip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 32,
    },
    "siglip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
    },
}
"""transformers' own, for what a configuration leaves out."""


@dataclass(frozen=True)
class VisionLanguageShape:
    """A tower and a language model."""

    language: ModelShape
    tower: ModelShape
    """Without vocabulary: its layers alone count."""
    image_tokens: int
    """Positions of one image in the tower."""
    patch_params: int
    """Of the patches' embedding, and of positions."""
    projector_params: int

    @property
    def tower_params(self) -> int:
        """Layers, patches and positions."""
        return self.tower.encoder_params + self.patch_params

    @property
    def params(self) -> int:
        """All."""
        return self.language.params + self.tower_params + self.projector_params


def shape_of_vision_language(job: JobSpec) -> VisionLanguageShape:
    """The shape; InputError where its sizes aren't known."""
    config = config_of(job)
    parts = {name: config.get(name) for name in ("text_config", "vision_config")}
    text, vision = parts["text_config"], parts["vision_config"]
    if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
        raise InputError("model.config: a llava needs vision_config and text_config, each with its model_type")
    kind = str(vision.get("model_type"))
    if kind not in TOWER_DEFAULTS:
        raise InputError(
            f"model.config.vision_config.model_type {kind!r}: can't be planned (known: {', '.join(TOWER_DEFAULTS)})"
        )
    stated = {**TOWER_DEFAULTS[kind], **{name: value for name, value in vision.items() if value is not None}}
    if job.images is not None and job.images.size is not None:
        stated["image_size"] = job.images.size
    for name in TOWER_DEFAULTS[kind]:
        if not isinstance(stated[name], int) or isinstance(stated[name], bool) or stated[name] < 1:
            raise InputError(
                f"model.config.vision_config.{name}: must be a whole number of at least 1 (given: {stated[name]!r})"
            )
    language = trained_shape(text)
    hidden, heads = stated["hidden_size"], stated["num_attention_heads"]
    if hidden % heads:
        raise InputError(f"model.config.vision_config: num_attention_heads {heads} must divide hidden_size {hidden}")
    if stated["image_size"] < stated["patch_size"]:
        raise InputError(
            f"model.config.vision_config.patch_size {stated['patch_size']}: an image of {stated['image_size']} x "
            f"{stated['image_size']} pixels holds no such patch; make images.size, or image_size, at least as large"
        )
    positions = (stated["image_size"] // stated["patch_size"]) ** 2 + (kind == "clip_vision_model")
    tower = ModelShape(
        layers=1,
        hidden=hidden,
        ffn=stated["intermediate_size"],
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=1,
        gated_mlp=False,
        norm="layer",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        encoder_layers=stated["num_hidden_layers"],
        encoder_tokens=positions,
    )
    patches = 3 * stated["patch_size"] ** 2 * hidden + positions * hidden + 5 * hidden
    projector = language.hidden * (hidden + language.hidden + 2)
    return VisionLanguageShape(language, tower, positions, patches, projector)


def config_of(job: JobSpec) -> Mapping[str, Any]:
    """The job's configuration, or a known model's; InputError where neither tells."""
    if job.model.config is not None:
        return job.model.config
    assert job.model.source is not None
    name = normal_name(job.model.source)
    known = next((config for label, config in KNOWN.items() if label in name), None)
    if known is not None:
        return known
    try:
        return config_from_source(job.model.source)
    except InputError:
        raise InputError(
            f"model.source {job.model.source!r}: its sizes aren't known here; name a folder with config.json, or a "
            f"path that ends in a known model's name ({', '.join(KNOWN)})"
        ) from None


def is_frozen(job: JobSpec) -> bool:
    """Whether the tower keeps its weights."""
    return (job.images or ImageSpec()).freeze_vision or job.model.adapter is not None


def vision_language_memory(shape: VisionLanguageShape, layout: Layout, *, frozen: bool) -> Memory:
    """The language model's, and the tower's and the projector's state and activations."""
    use = memory(shape.language, layout)
    each = state_bytes(layout)
    trained = shape.projector_params + (0 if frozen else shape.tower_params)
    if layout.method != "full":
        trained = 0
    there = dataclasses.replace(layout, sequence_length=shape.image_tokens, recompute="none")
    kept = encoder_bytes(shape.tower, there) if not frozen else 0.0
    # The projector's input, its middle and output.
    kept += 3 * layout.micro_batch * shape.image_tokens * shape.language.hidden * layout.element_bytes
    others = shape.tower_params + shape.projector_params
    weights, _, _ = trained_state(StageParams(others, 0.0), layout)
    _, gradients, optimizer = trained_state(StageParams(trained, 0.0), layout)
    return dataclasses.replace(
        use,
        parameters=use.parameters + weights,
        gradients=use.gradients + gradients,
        optimizer=use.optimizer + optimizer,
        activations=use.activations + kept,
        buffers=use.buffers + shape.tower_params / max(1, shape.tower.encoder_layers) * 2 * each.compute_copy,
    )


TOWER_LAUNCHES = (0.3, 1.0)
"""Launching a tower's layer, forward and backward, over a Llama's: 14 and 46 kernels of CLIP's, as traced, 45 counted
of the other's (`launches.KERNELS_A_LAYER`)."""


def vision_language_step(
    shape: VisionLanguageShape, layout: Layout, device: Gpu, links: Fabric, *, frozen: bool
) -> StepTime:
    """The language model's step, and the tower's passes before each micro-batch.

    A tower's small kernels wait for the host only as long as the device has nothing else to do: what the language model
    computes longer than it takes to launch covers them.
    """
    time = step_time(shape.language, layout, device, links)
    there = dataclasses.replace(layout, sequence_length=shape.image_tokens, recompute="none")
    # A tower's layers as those of a decoder without a vocabulary; its attention is not causal: twice the scores.
    alone = dataclasses.replace(
        shape.tower,
        layers=shape.tower.encoder_layers,
        encoder_layers=0,
        encoder_tokens=0,
        learned_positions=shape.image_tokens,
    )
    launch, count = DEFAULT_CONSTANTS.launch_seconds, layout.num_micro_batches
    tower = step_time(alone, there, device, links, dataclasses.replace(DEFAULT_CONSTANTS, launch_seconds=0.0))
    extra = shape.projector_params / max(1, alone.params)

    def beside(computed: float, on_device: float, share: float) -> float:
        """Seconds of the tower's one direction, which takes `on_device`, given what the language model computes."""
        covered = max(0.0, computed - launch * count * shape.language.layers / layout.pipeline)
        return max(on_device, launch * count * share * shape.tower.encoder_layers - covered)

    backward = beside(time.backward, tower.backward, TOWER_LAUNCHES[1])
    return dataclasses.replace(
        time,
        forward=time.forward + beside(time.forward, tower.forward * (1 + extra), TOWER_LAUNCHES[0]),
        backward=time.backward + (0.0 if frozen else backward) + 2 * extra * tower.forward,
    )


def vision_language_flops_per_sample(
    shape: VisionLanguageShape, sequence_length: int, *, frozen: bool, adapted: bool
) -> float:
    """Forward and backward of a sample: a frozen tower's forward pass alone, no gradients of adapted weights."""
    language = shape.language.flops_per_token(sequence_length, is_frozen=adapted) * sequence_length
    tower = 6.0 * shape.tower.encoder_params * shape.image_tokens * (1 / 3 if frozen else 1.0)
    return language + tower
