"""The plan of a job whose model has no formulas: a dry run's counts in their place."""

import dataclasses
from collections.abc import Sequence

from trainyard.errors import InputError
from trainyard.planner.formulas import Formulas
from trainyard.planner.layout import Layout
from trainyard.planner.memory import Memory
from trainyard.planner.money import saved_of
from trainyard.planner.reading import layout_of_resolved
from trainyard.planner.traced import SPREAD, Trace, active_params, traced_flops, traced_memory, traced_step
from trainyard.spec.job import JobSpec, ResolvedJob

BY_TRACE = (
    "by a dry run of the trainer's own code, as there are no formulas for this model: no published run has checked such"
    " a plan, its interval is a guess, and of other layouts nothing is known"
)


def ranks_to_trace(resolved: ResolvedJob) -> tuple[int, ...]:
    """One rank of each kind along the pipeline: the first and the last, of which one has the head."""
    if resolved.parallelism.pipeline == 1:
        return (0,)
    return 0, resolved.world_size - 1


def formulas_of_traces(job: JobSpec, resolved: ResolvedJob, traces: Sequence[Trace]) -> Formulas:
    """What stands in for formulas, of the layout that was traced alone; `traces`: of `ranks_to_trace`.

    InputError where a trace can't tell: under DeepSpeed, which cuts memory by code of its own.
    """
    parallelism = resolved.parallelism
    check_traceable(resolved)
    traced = layout_of_resolved(job, resolved)
    frozen = job.model.adapter is not None

    def worst(layout: Layout) -> Memory:
        _check(layout, traced)
        return max((traced_memory(trace, layout) for trace in traces), key=lambda use: use.allocated)

    return Formulas(
        shape=None,
        params=traces[0]["params"],
        active_params=active_params(traces, traced, is_frozen=frozen),
        saved=saved_of(job, float(traces[0]["trained_params"])),
        unit="tokens" if job.task == "causal_lm" else "images",
        units_per_sample=job.data.sequence_length if job.task == "causal_lm" else 1,
        flops_per_sample=traced_flops(traces, traced) / traced.global_batch,
        memory=worst,
        rank_memory=lambda layout, _: worst(layout),
        step=lambda layout, device, links: traced_step(traces, parallelism, layout, device, links),
        spread=lambda *_: SPREAD,
        notes=(BY_TRACE, *(_of_compiled(job))),
    )


def check_traceable(resolved: ResolvedJob) -> None:
    """InputError under an engine of which a trace says too little for a plan."""
    engine = resolved.parallelism.engine
    if engine != "torch":
        raise InputError(
            f"parallelism.engine {engine}: a dry run knows the model alone under it, and there are no formulas for"
            " this model; plan it with engine torch"
        )


def _check(layout: Layout, traced: Layout) -> None:
    """A trace says nothing of any layout but its own."""
    assert dataclasses.replace(layout, year=traced.year) == traced, "another layout than the traced one"


def _of_compiled(job: JobSpec) -> list[str]:
    if not job.training.compile:
        return []
    return ["blocks were traced as they are before compilation: what is element-wise will take less time than planned"]
