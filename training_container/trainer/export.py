"""A checkpoint as Hugging Face files: `python -m trainer.export --job JOB.yaml --checkpoints PLACE --out FOLDER`.

Writes what `from_pretrained` reads: the whole model, or for an adapter job the adapter alone (peft's format). One
process, no GPU; any layout's checkpoint will do. Exit codes as the trainer's.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainyard.errors import InputError, TrainyardError
from trainyard.spec.job import JobSpec, ResolvedJob, load_job


def export(job: ResolvedJob, *, vocab_size: int, checkpoints: str, out: Path, average: bool = False) -> int:
    """Writes the newest valid checkpoint under `checkpoints` (a folder or s3://) to `out`; returns its step.

    `vocab_size`: ids of the job's tokenizer. `average`: the running average of the weights instead of the last ones.
    InputError when there is no checkpoint, or it is another model's.
    """
    if average and job.spec.training.optimizer.average_decay is None:
        raise InputError("--average: the job keeps no average; it would need training.optimizer.average_decay")
    import torch

    from trainer.checkpoint import Checkpointer
    from trainer.models.adapters import save_adapter
    from trainer.strategies.torch_engine import persistent_buffers

    model = _model(job, vocab_size)
    spec = job.spec.model
    with tempfile.TemporaryDirectory() as scratch:
        checkpointer = Checkpointer(
            checkpoints, rank=0, world_size=1, local_dir=Path(scratch), keep_last=1, asynchronous=False
        )
        info = checkpointer.latest()
        if info is None:
            raise InputError(f"--checkpoints {checkpoints}: no valid checkpoint is there")
        trained: dict[str, torch.Tensor] = {
            f"optim.{name}.average" if average else f"model.{name}": parameter.detach()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        if spec.adapter is None:
            trained |= persistent_buffers(model)  # running averages of batch normalization
        checkpointer.load(info, trained)
        checkpointer.close()
    if spec.adapter is not None:
        assert spec.source is not None
        save_adapter(model, spec.adapter, out, base_model=spec.source)
    else:
        model.save_pretrained(out)
    return info.step


def _model(job: ResolvedJob, vocab_size: int) -> Any:
    """The job's model, whole, on CPU."""
    import torch

    from trainer.models.build import build_model
    from trainer.models.deferred_weights import fill
    from trainer.tasks import task_of

    if job.spec.task == "causal_lm":
        return build_model(job, vocab_size=vocab_size)
    return fill(task_of(job).build_model(job, None), device=torch.device("cpu"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.export", description="Write a checkpoint as Hugging Face files."
    )
    parser.add_argument("--job", type=Path, required=True, help="the job spec that was trained (YAML)")
    parser.add_argument("--checkpoints", required=True, help="the job's checkpoint destination: a folder or s3://")
    parser.add_argument("--out", type=Path, required=True, help="folder that gets the files")
    parser.add_argument("--average", action="store_true", help="the running average (training.optimizer.average_decay)")
    options = parser.parse_args(arguments)
    try:
        spec = load_job(options.job)
        step = export(
            _alone(spec),
            vocab_size=_vocab_size(spec),
            checkpoints=options.checkpoints,
            out=options.out,
            average=options.average,
        )
    except TrainyardError as error:
        print(f"trainyard: {error}", file=sys.stderr)
        return error.exit_code
    print(f"exported step={step} out={options.out}")
    return 0


def _alone(spec: JobSpec) -> ResolvedJob:
    """The job on one rank: how it was laid out in training doesn't matter to its weights."""
    from trainyard.planner import resolve

    return resolve(spec.model_copy(update={"parallelism": "auto"}), world_size=1)


def _vocab_size(spec: JobSpec) -> int:
    if spec.task == "image_classification":
        return 0  # it has no tokenizer
    from trainer.data.tokenizer import tokenizer_of

    return tokenizer_of(spec).vocab_size


if __name__ == "__main__":
    sys.exit(main())
