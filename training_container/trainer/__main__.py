"""The bare trainer: `torchrun --nproc-per-node N -m trainer --job JOB.yaml --output-dir DIR`.

Exit codes: 0 done; 75 stopped by a signal, progress saved, to be resumed (the file DIR/resume_me says so too, because
torchrun exits 1 whatever its workers exit with); 1 the job failed; 2 the input was wrong.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from trainer.early_save import note_early_saves
from trainer.leaving import EXIT_RESUME_ME, leave
from trainer.observe.throughput import Expected
from trainyard.errors import InputError, TrainyardError
from trainyard.importing import importing
from trainyard.spec.checkpoint_names import why_not_here
from trainyard.spec.job import ResolvedJob, load_job, load_resolved
from trainyard.spec.words import counted

RESUME_FILE = "resume_me"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank; returns its exit code."""
    note_early_saves()
    options = _options(arguments)
    try:
        return _run(options)
    except _SaidError as said:
        return said.exit_code
    except TrainyardError as error:
        # One line a host, not one a rank: what is wrong before they have met is wrong for all of them.
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            _say_why(error)
        return error.exit_code


class _SaidError(Exception):
    """A failure of which nothing more has to be said."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def _say_why(error: TrainyardError) -> None:
    sys.stderr.write(f"trainyard: {error}\n")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trainer",
        description="Train one job on this rank; start it under torchrun for more than one rank.",
        epilog="example: torchrun --nproc-per-node 2 -m trainer --job job.yaml --output-dir out --set training.steps=9",
    )
    job = parser.add_mutually_exclusive_group(required=True)
    job.add_argument("--job", type=Path, help="job spec (YAML); each auto is decided for this world size")
    job.add_argument("--resolved-job", type=Path, help="resolved job (JSON), as launch writes it")
    parser.add_argument("--output-dir", type=Path, required=True, help="gets metrics.jsonl, result.json, checkpoints/")
    parser.add_argument(
        "--scratch-dir", type=Path, help="token cache and checkpoints on their way (default: OUTPUT_DIR/scratch)"
    )
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a value of --job"
    )
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    from trainyard.planner.preflight import known_floors

    world_size = _launched_world_size()
    job = _resolved_job(options, world_size)
    output_dir = _made(options.output_dir)

    # torch takes seconds to import: a wrong job is refused before that.
    with importing():
        from trainer.loop import Outcome, train
        from trainer.observe.flight_recorder import told_when_asked
        from trainer.preflight import check_network
        from trainer.runtime import distributed_runtime
        from trainer.session import Session

    with (
        told_when_asked(),
        distributed_runtime(cpu_threads=job.spec.training.cpu_threads, recovery=job.spec.recovery) as runtime,
    ):
        try:
            check_network(job.spec.preflight, known_floors(job.spec), runtime)
            session = Session(
                job,
                runtime,
                output_dir=output_dir,
                scratch_dir=options.scratch_dir or output_dir / "scratch",
                expected=expected_of(job, runtime.device_name),
            )
            if runtime.is_first:
                (output_dir / RESUME_FILE).unlink(missing_ok=True)
            outcome = train(session)
            session.finish(outcome.value)
            session.close()
        except TrainyardError as error:
            # A record, a disk or a connection may be one rank's trouble alone, and then nobody else would name it.
            if runtime.is_first_to_say(str(error)):
                _say_why(error)
            raise _SaidError(error.exit_code) from error
        if outcome is Outcome.INTERRUPTED and runtime.is_first:
            _tell_of_resume(output_dir / RESUME_FILE, session.step)
    return EXIT_RESUME_ME if outcome is Outcome.INTERRUPTED else 0


def _made(output_dir: Path) -> Path:
    if (why := why_not_here(output_dir)) is not None:
        raise InputError(f"--output-dir {output_dir}: {why}")
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output-dir {output_dir}: can't be made: {error.strerror or error}") from None
    if not os.access(output_dir, os.W_OK | os.X_OK):
        raise InputError(f"--output-dir {output_dir}: can't be written (its rights, or a read-only file system)")
    return output_dir


def _tell_of_resume(path: Path, step: int) -> None:
    """A full disk costs the file, not the exit code: the step is saved, which may be elsewhere."""
    from trainer.observe.metrics import replace_all
    from trainer.speech import say

    if not replace_all(path, f"step={step}\n"):
        say(f"{path}: not written, its disk is full")


def expected_of(job: ResolvedJob, device_name: str | None) -> Expected:
    """What the planner's formulas and the device's data sheet say of a job; nothing where they don't cover it.

    `device_name`: the GPU's; None on CPU, which has no peak here, and no plan.
    """
    from trainyard.hardware import gpu
    from trainyard.planner.communication import fabric_of
    from trainyard.planner.memory import memory
    from trainyard.planner.reading import layout_of, machines_of, shape_of
    from trainyard.planner.timing import step_time

    peak = planned = seconds = None
    try:
        shape = shape_of(job.spec)
        if device_name is not None and job.spec.training.precision != "fp64":
            peak = gpu(device_name).peak_tflops(job.spec.training.precision) * 1e12
    except InputError:
        shape = None  # a GPU without a data sheet, or sizes that are no model's: the model itself will say so
    if shape is None:
        return Expected(peak_flops=peak)
    if device_name is not None:
        layout = layout_of(
            job.spec,
            job.parallelism,
            micro_batch=job.micro_batch_size,
            num_micro_batches=job.gradient_accumulation_steps,
            recompute=job.activation_checkpointing,
        )
        planned = memory(shape, layout).needed
        instance = machines_of(job.spec, job.world_size).instance
        if instance is not None and instance.gpu is not None:
            seconds = step_time(shape, layout, instance.gpu, fabric_of(instance)).total
    length, is_frozen = job.spec.data.sequence_length, job.spec.model.adapter is not None
    return Expected(
        full_flops_per_token=shape.flops_per_token(length, is_frozen=is_frozen),
        causal_flops_per_token=shape.flops_per_token(length, causal=True, is_frozen=is_frozen),
        peak_flops=peak,
        planned_bytes=planned,
        planned_step_seconds=seconds,
    )


def _launched_world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _resolved_job(options: argparse.Namespace, world_size: int) -> ResolvedJob:
    """The job with nothing left to decide; InputError when it was made for another number of ranks."""
    if options.resolved_job is not None:
        if options.overrides:
            raise InputError("--set: changes a job spec; a resolved job is final: give --job, or resolve it again")
        job = load_resolved(options.resolved_job)
    else:
        from trainyard.planner import resolve

        job = resolve(load_job(options.job, options.overrides), world_size=world_size)
    if job.world_size != world_size:
        raise InputError(
            f"parallelism asks for {counted(job.world_size, 'rank')}, but WORLD_SIZE is {world_size}:"
            f" start it with torchrun --nproc-per-node {job.world_size}, or change the degrees"
        )
    return job


if __name__ == "__main__":
    if "trainer.host.rank" in sys.orig_argv:
        sys.exit(main())  # it runs this module inside its own process, and has to write down how it went
    try:
        code = main()
    except Exception:
        # Left from here, where its frames are still held: their process group's destructor may wait for a lost peer.
        sys.stderr.write(traceback.format_exc())
        leave(1)
    leave(code)
