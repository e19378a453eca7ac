"""Which formulas answer for a job, whatever it learns: parameters, memory, time and FLOPs behind one door."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainyard.errors import InputError
from trainyard.hardware import Gpu
from trainyard.planner.adapters import notes_on_adapter
from trainyard.planner.communication import Fabric
from trainyard.planner.config_values import NotCoveredError
from trainyard.planner.convolutions import (
    SPREAD,
    ConvolutionalShape,
    convolutional_memory,
    convolutional_step,
    shape_of_resnet,
)
from trainyard.planner.families import config_from_source
from trainyard.planner.goodput import Saved
from trainyard.planner.layout import Layout
from trainyard.planner.memory import Memory, least_memory, memory, rank_memory
from trainyard.planner.money import saved_of, saved_params
from trainyard.planner.reading import required_shape
from trainyard.planner.shapes import ModelShape
from trainyard.planner.step import StepTime
from trainyard.planner.timing import least_step_seconds, step_time, time_spread
from trainyard.planner.vision_language import (
    is_frozen,
    shape_of_vision_language,
    vision_language_flops_per_sample,
    vision_language_memory,
    vision_language_step,
)
from trainyard.spec.job import ImageSpec, JobSpec

DEFAULT_PIXELS = 224


@dataclass(frozen=True)
class Formulas:
    """What a task's model needs."""

    shape: ModelShape | None
    """Of a language model alone: its layout can be chosen. None: the one that the job states."""
    params: int
    active_params: int
    saved: Saved
    """What a checkpoint holds."""
    unit: Literal["tokens", "images"]
    units_per_sample: int
    flops_per_sample: float
    memory: Callable[[Layout], Memory]
    """Of the worst rank."""
    rank_memory: Callable[[Layout, int], Memory]
    """Of a rank at one place along the pipeline."""
    step: Callable[[Layout, Gpu, Fabric], StepTime]
    spread: Callable[[Layout, Gpu], float]
    """Factor of the 80% interval of a step's time."""
    notes: tuple[str, ...] = ()
    """What a plan must say of them."""
    odd: tuple[str, ...] = ()
    """What is odd about the job by the sizes of its model, of which `trainyard.spec.notes.notes_on` knows none."""
    least_memory: Callable[[Layout], Memory] | None = None
    """No more than `memory`, and quickly there: of models whose layout can be chosen, among many."""
    least_step_seconds: Callable[[Layout, Gpu, Fabric], float] | None = None
    """The same of `step`'s total."""


def formulas_of(job: JobSpec) -> Formulas:
    """The job's formulas; InputError, in one line, where there are none for its model (NotCoveredError where a language
    model may well be one that the trainer trains)."""
    makers = {"causal_lm": _language, "image_classification": _images, "vision_language": _vision_language}
    try:
        return makers[job.task](job)
    except NotCoveredError as error:
        raise NotCoveredError(f"{error}; {BY_DRY_RUN}") from None


BY_DRY_RUN = "trainyard plan JOB --dry-run plans it by a step of the trainer's own code (needs torch)"


def odd_by_model(job: JobSpec) -> tuple[str, ...]:
    """What is odd about a job by the sizes of its model; nothing where there are no formulas for that."""
    try:
        return formulas_of(job).odd
    except InputError:
        return ()


def _language(job: JobSpec) -> Formulas:
    shape = required_shape(job)
    length = job.data.sequence_length
    return Formulas(
        shape=shape,
        params=shape.params,
        active_params=shape.active_params,
        saved=saved_of(job, saved_params(job, shape), ends=_ends(job, shape)),
        unit="tokens",
        units_per_sample=length,
        flops_per_sample=shape.flops_per_token(length, is_frozen=job.model.adapter is not None) * length,
        memory=lambda layout: memory(shape, layout),
        least_memory=lambda layout: least_memory(shape, layout),
        rank_memory=lambda layout, place: rank_memory(shape, layout, place),
        step=lambda layout, device, links: step_time(shape, layout, device, links),
        least_step_seconds=lambda layout, device, links: least_step_seconds(shape, layout, device, links),
        spread=lambda layout, device: time_spread(shape, layout, device),
        odd=notes_on_adapter(shape, job.model.adapter),
    )


def _ends(job: JobSpec, shape: ModelShape) -> float:
    """Parameters of embedding and head, where they are trained themselves."""
    if job.model.adapter is not None:
        return 0.0
    return shape.embedding_params + shape.vocab * shape.hidden * (not shape.tied_embeddings)


UNCHECKED = "no published run has checked the formulas for images: the interval is a guess"


def _images(job: JobSpec) -> Formulas:
    shape = image_shape(job)
    return Formulas(
        shape=None,
        params=shape.params,
        active_params=shape.params,
        saved=saved_of(job, shape.params),
        unit="images",
        units_per_sample=1,
        flops_per_sample=shape.flops_per_image,
        memory=lambda layout: convolutional_memory(shape, layout),
        rank_memory=lambda layout, _: convolutional_memory(shape, layout),
        step=lambda layout, device, links: convolutional_step(shape, layout, device, links),
        spread=lambda *_: SPREAD,
        notes=(UNCHECKED,),
    )


def _vision_language(job: JobSpec) -> Formulas:
    both, frozen, adapted = shape_of_vision_language(job), is_frozen(job), job.model.adapter is not None
    length = job.data.sequence_length
    # A frozen tower's weights are the source's, and in no checkpoint.
    trained = float(both.params - (both.tower_params if frozen else 0))
    saved = saved_params(job, both.language) if adapted else trained
    return Formulas(
        shape=None,
        params=both.params,
        active_params=both.params,
        saved=saved_of(job, saved, ends=_ends(job, both.language)),
        unit="tokens",
        units_per_sample=length,
        flops_per_sample=vision_language_flops_per_sample(both, length, frozen=frozen, adapted=adapted),
        memory=lambda layout: vision_language_memory(both, layout, frozen=frozen),
        rank_memory=lambda layout, _: vision_language_memory(both, layout, frozen=frozen),
        step=lambda layout, device, links: vision_language_step(both, layout, device, links, frozen=frozen),
        spread=lambda *_: SPREAD,
        notes=(
            UNCHECKED,
            "every sample is counted as one image and data.sequence_length tokens: padding is not known yet",
        ),
        odd=notes_on_adapter(both.language, job.model.adapter),
    )


def image_shape(job: JobSpec) -> ConvolutionalShape:
    """The classifier's shape; InputError where there are no formulas for it."""
    config: Mapping[str, Any]
    if job.model.config is not None:
        config = job.model.config
    else:
        assert job.model.source is not None
        try:
            config = config_from_source(job.model.source)
        except InputError:
            raise InputError(
                f"model.source {job.model.source!r}: its sizes aren't known here; name a folder with config.json, or "
                "launch it with the layout that the job states"
            ) from None
    model_type = str(config.get("model_type"))
    if model_type != "resnet":
        raise InputError(
            f"task image_classification: only model_type resnet can be planned (given: {model_type}); give the "
            "layout in parallelism and launch it"
        )
    images = job.images or ImageSpec()
    return shape_of_resnet(config, image_size=images.size or DEFAULT_PIXELS, num_classes=images.num_classes)
