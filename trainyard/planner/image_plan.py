"""The plan of a job with images: its machines and the layout that it states, no other; data parallelism alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainyard.errors import InputError
from trainyard.hardware import Gpu, PriceBook
from trainyard.planner.communication import Fabric, fabric_of
from trainyard.planner.configurations import chosen_verdict, fits_both, host_plan, memory_plan
from trainyard.planner.constants import GIB
from trainyard.planner.convolutions import (
    SPREAD,
    ConvolutionalShape,
    convolutional_memory,
    convolutional_step,
    shape_of_resnet,
)
from trainyard.planner.families import config_from_source
from trainyard.planner.goodput import CHECKPOINT_BYTES_PER_PARAM
from trainyard.planner.host_memory import PROCESS_GIB, SYSTEM_GIB, HostMemory
from trainyard.planner.layout import Layout
from trainyard.planner.memory import Memory
from trainyard.planner.money import affordable, checkpoint_plan, cost_of, goodput_of, quotes_of, saved_params
from trainyard.planner.reading import Machines, layout_of, machines_of
from trainyard.planner.resolve import num_steps, resolve
from trainyard.planner.results import Configuration, Plan, TimePlan
from trainyard.planner.timing import StepTime
from trainyard.planner.vision_language import (
    is_frozen,
    shape_of_vision_language,
    vision_language_flops_per_sample,
    vision_language_memory,
    vision_language_step,
)
from trainyard.spec.job import ImageSpec, JobSpec, ParallelismSpec

DEFAULT_PIXELS = 224


@dataclass(frozen=True)
class Formulas:
    """What a task's model needs."""

    params: int
    saved: float
    """Parameters that a checkpoint holds."""
    unit: Literal["tokens", "images"]
    units_per_sample: int
    flops_per_sample: float
    memory: Callable[[Layout], Memory]
    step: Callable[[Layout, Gpu, Fabric], StepTime]


def formulas_of(job: JobSpec) -> Formulas:
    """The formulas of a job of task image_classification or vision_language; InputError where there are none."""
    if job.task == "image_classification":
        shape = image_shape(job)
        return Formulas(
            params=shape.params,
            saved=float(shape.params),
            unit="images",
            units_per_sample=1,
            flops_per_sample=shape.flops_per_image,
            memory=lambda layout: convolutional_memory(shape, layout),
            step=lambda layout, device, links: convolutional_step(shape, layout, device, links),
        )
    both, frozen, adapted = shape_of_vision_language(job), is_frozen(job), job.model.adapter is not None
    length = job.data.sequence_length
    return Formulas(
        params=both.params,
        saved=saved_params(job, both.language) if adapted else float(both.params),
        unit="tokens",
        units_per_sample=length,
        flops_per_sample=vision_language_flops_per_sample(both, length, frozen=frozen, adapted=adapted),
        memory=lambda layout: vision_language_memory(both, layout, frozen=frozen),
        step=lambda layout, device, links: vision_language_step(both, layout, device, links, frozen=frozen),
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


def plan_images(job: JobSpec, *, region: str, book: PriceBook) -> Plan:
    """The plan of a job with images on the machines and with the layout that it states."""
    found = formulas_of(job)
    resolved, machines = resolve(job), machines_of(job)
    layout = layout_of(
        job,
        resolved.parallelism,
        micro_batch=resolved.micro_batch_size,
        num_micro_batches=resolved.gradient_accumulation_steps,
        recompute=resolved.activation_checkpointing,
    )
    item = _configuration(job, resolved.parallelism, layout, machines, found)
    quotes = quotes_of(job, machines, region, book)
    checkpoint = cost = None
    if item.time is not None:
        run, stated = goodput_of(job, machines, found.saved, item.time.step_seconds, resolved.steps)
        checkpoint = checkpoint_plan(run, stated)
        cost = cost_of(job, steps=resolved.steps, time=item.time, run=run, machines=machines, quotes=quotes, book=book)
        if cost is not None and found.unit == "images":
            # Images are no sequences of tokens.
            cost = cost.model_copy(update={"usd_per_million_tokens": None})
    documents = quotes.documents()
    notes = [*quotes.notes, "no published run has checked the formulas for images: the interval is a guess"]
    if job.task == "vision_language":
        notes.append("every sample is counted as one image and data.sequence_length tokens: padding is not known yet")
    if item.time is not None and item.time.hours is None:
        notes.append("the job is stated in epochs: steps, hours and cost are known when the data has been read")
    return Plan(
        job=job.name,
        tenant=job.tenant,
        params=found.params,
        active_params=found.params,
        steps=resolved.steps,
        tokens=None,
        unit=found.unit,
        instance_type=job.compute.instance_type,
        instance_count=machines.num_hosts,
        num_gpus=machines.world_size,
        gpu=machines.instance.accelerator if machines.instance else None,
        region=region,
        configurations=(item,),
        on_demand=next((quote for quote in documents if quote.purchase == "on_demand"), None),
        spot=next((quote for quote in documents if quote.purchase == "spot"), None),
        quotes=documents,
        checkpoint=checkpoint,
        cost=cost,
        max_usd=job.budget.max_usd if job.budget else None,
        max_hours=job.compute.max_hours,
        fits=item.fits,
        affordable=affordable(job, cost),
        notes=tuple(notes),
    )


def _configuration(
    job: JobSpec, parallelism: ParallelismSpec, layout: Layout, machines: Machines, found: Formulas
) -> Configuration:
    use = found.memory(layout)
    saved = found.saved * CHECKPOINT_BYTES_PER_PARAM / machines.world_size * machines.processes_per_host
    host = HostMemory(
        processes=(SYSTEM_GIB + PROCESS_GIB * machines.processes_per_host) * GIB,
        checkpoint=saved if job.checkpoint.asynchronous else 0.0,
        offloaded=0.0,
    )
    machine = machines.instance
    item = Configuration(
        layout=layout.words(),
        parallelism=parallelism,
        micro_batch_size=layout.micro_batch,
        gradient_accumulation_steps=layout.num_micro_batches,
        activation_checkpointing=layout.recompute,
        memory=memory_plan(use, machine.gpu.memory_gib if machine and machine.gpu else None),
        host=host_plan(host, machines),
        time=_time(job, layout, machines, found),
        fits=fits_both(use, host, machine),
        chosen=True,
        verdict="",
    )
    return item.model_copy(update={"verdict": chosen_verdict(item, "as the job states")})


def _time(job: JobSpec, layout: Layout, machines: Machines, found: Formulas) -> TimePlan | None:
    if machines.instance is None or machines.instance.gpu is None:
        return None
    device = machines.instance.gpu
    time = found.step(layout, device, fabric_of(machines.instance))
    samples = layout.global_batch
    steps = num_steps(job)
    peak = device.peak_tflops(layout.precision) * 1e12 * layout.world_size
    return TimePlan(
        step_seconds=time.total,
        step_seconds_low=time.total / SPREAD,
        step_seconds_high=time.total * SPREAD,
        breakdown_seconds=time.breakdown(),
        tokens_per_second=samples * found.units_per_sample / time.total,
        mfu=found.flops_per_sample * samples / time.total / peak,
        hours=steps * time.total / 3600 if steps is not None else None,
    )
