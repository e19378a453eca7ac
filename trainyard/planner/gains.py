"""What other choices than a job's own would gain: compiled layers, and attention's kernels of a Hopper's own."""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trainyard.errors import InputError
from trainyard.planner.communication import fabric_of
from trainyard.planner.formulas import Formulas
from trainyard.planner.layout import Layout
from trainyard.planner.reading import Machines
from trainyard.planner.resolve import resolve
from trainyard.planner.results import Configuration
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec


def gain_of_compiling(
    job: JobSpec, chosen: Configuration, layout: Layout, machines: Machines, formulas: Formulas
) -> float | None:
    """The share of a step that `training.compile: true` is estimated to save; None where it can't be had, or is there.

    `layout`: the formulas' view of `chosen`.
    """
    if not layout.unfused:
        return None
    compiled = dataclasses.replace(layout, unfused=False)
    return _gain(job, chosen, {"training": {"compile": True}}, (layout, compiled), machines, formulas)


def gain_of_flash_attention_3(
    job: JobSpec, chosen: Configuration, layout: Layout, machines: Machines, formulas: Formulas
) -> float | None:
    """The same of `model.attention: flash_attention_3`, which has a Hopper's own instructions without masks."""
    machine = machines.instance
    if machine is None or machine.gpu is None or machine.gpu.generation != "hopper":
        return None
    if job.model.attention not in ("auto", "sdpa", "varlen"):
        return None
    if formulas.shape is None or formulas.shape.attention_dropout:  # which its kernels have not
        return None
    own = dataclasses.replace(layout, attention_kernel="own", masks="never")
    return _gain(job, chosen, {"model": {"attention": "flash_attention_3"}}, (layout, own), machines, formulas)


def _gain(
    job: JobSpec,
    chosen: Configuration,
    changes: Mapping[str, Mapping[str, Any]],
    layouts: tuple[Layout, Layout],
    machines: Machines,
    formulas: Formulas,
) -> float | None:
    """What the second of `layouts` saves of the first's step, if the job with `changes` may run as `chosen`."""
    machine = machines.instance
    if formulas.shape is None or machine is None or machine.gpu is None:
        return None
    stated = job.model_dump(mode="json")
    stated["parallelism"] = chosen.parallelism.model_dump(mode="json")
    stated["training"] |= {
        "micro_batch_size": chosen.micro_batch_size,
        "activation_checkpointing": chosen.activation_checkpointing,
    }
    for section, values in changes.items():
        stated[section] |= values
    with suppress(InputError):
        resolve(parse(JobSpec, stated, job.name))
        links = fabric_of(machine)
        before, after = (formulas.step(each, machine.gpu, links).total for each in layouts)
        return 1 - after / before
    return None
