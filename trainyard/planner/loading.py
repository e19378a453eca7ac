"""Images on their way to a step: what a rank's decoding threads give, and what of it no step can hide.

Text has none of this: a job's tokens are made before it starts, and a step reads them at 4 bytes each (8 H100 that
train a 7B take a third of a megabyte a second), so that its reading is taken as hidden.
"""

from dataclasses import dataclass

from trainyard.planner.reading import Machines
from trainyard.spec.job import ImageSpec, JobSpec
from trainyard.spec.words import counted, either

IMAGES_PER_CORE_SECOND = 298.0
"""JPEGs of 500 x 375 pixels and 113 KB, decoded, cropped and scaled to 224 by the trainer's code in one thread of an
AMD EPYC (benchmarks/planner_decoding.py, 2026-11-22). Another machine's, a day later, had 518 to 566. AWS's virtual
processors, halves of cores, are taken for the slower ones; unmeasured."""

INTERPRETER_IMAGES_PER_SECOND = 1400.0
"""Of one process, should all that isn't decoding or scaling (0.7 of an image's 3.4 ms, as measured there) hold the
interpreter, so that its threads take turns."""


@dataclass(frozen=True)
class Loading:
    """One rank's images."""

    threads: int
    """That work at once: no more than `most_threads`."""
    most_threads: int
    """A rank's share of the host's processors."""
    given_per_second: float
    needed_per_second: float
    """By a step that waits for nothing."""
    exposed_seconds: float
    """Of a step, which its images are late: they are read one step ahead."""

    def note(self) -> str:
        """What a plan says of it."""
        said = (
            f"data: a step takes {self.needed_per_second:,.0f} images/s of each rank, "
            f"{counted(self.threads, 'thread')} {either(self.threads, 'decodes', 'decode')} "
            f"about {self.given_per_second:,.0f}"
        )
        if self.exposed_seconds > 0:
            return f"{said}, so that it waits {self.exposed_seconds:.3g} s; {self._mend()}"
        if self.needed_per_second > INTERPRETER_IMAGES_PER_SECOND:
            return (
                f"{said}, but perhaps no more than {INTERPRETER_IMAGES_PER_SECOND:,.0f}: one process holds them; "
                "breakdown.data in metrics.jsonl shows it"
            )
        return said

    def _mend(self) -> str:
        """Threads beyond a rank's processors only take turns on them."""
        if self.threads < self.most_threads:
            return f"raise images.decode_threads (a rank has {self.most_threads} processors)"
        return f"a rank has no more processors than {self.most_threads}: take machines with more of them for each GPU"


def loading_of(job: JobSpec, machines: Machines, *, images_per_rank: int, step_seconds: float) -> Loading | None:
    """Of a step of `images_per_rank` that takes `step_seconds` unless it waits; None: no images, or no machine."""
    if job.task == "causal_lm" or machines.instance is None:
        return None
    stated = (job.images or ImageSpec()).decode_threads
    most = max(1, machines.instance.vcpus // machines.processes_per_host)
    threads = min(stated, most)
    given = threads * IMAGES_PER_CORE_SECOND
    return Loading(
        threads=threads,
        most_threads=most,
        given_per_second=given,
        needed_per_second=images_per_rank / step_seconds,
        exposed_seconds=max(0.0, images_per_rank / given - step_seconds),
    )
