"""What torch.compile would gain a job: its layers' element-wise work in a few kernels, not one for each operation."""

import dataclasses
from contextlib import suppress

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
    machine = machines.instance
    if not layout.unfused or formulas.shape is None or machine is None or machine.gpu is None:
        return None
    stated = job.model_dump(mode="json")
    stated["parallelism"] = chosen.parallelism.model_dump(mode="json")
    stated["training"] |= {
        "compile": True,
        "micro_batch_size": chosen.micro_batch_size,
        "activation_checkpointing": chosen.activation_checkpointing,
    }
    with suppress(InputError):
        resolve(parse(JobSpec, stated, job.name))
        links = fabric_of(machine)
        compiled = dataclasses.replace(layout, unfused=False)
        seconds = [formulas.step(each, machine.gpu, links).total for each in (compiled, layout)]
        return 1 - seconds[0] / seconds[1]
    return None
