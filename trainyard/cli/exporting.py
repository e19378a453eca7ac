"""`export` and `promote`: a checkpoint's weights for those who serve them, and their registration."""

import json
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from trainyard.cli.checkpoints import CheckpointsOf, StepOption, destination_of
from trainyard.cli.options import DEFAULT_ENVIRONMENT, EnvironmentOption, JsonOption, TenantOption
from trainyard.cli.output import console, print_json
from trainyard.errors import AwsRefusedError, InputError, JobFailedError


class WeightType(StrEnum):
    """What weights can be exported as."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


AverageOption = Annotated[
    bool, typer.Option("--average", help="The running average of the weights (training.optimizer.average_decay).")
]
MergeOption = Annotated[bool, typer.Option("--merge", help="Put an adapter into its base model.")]
BaseOption = Annotated[
    Path | None, typer.Option("--base", metavar="DIR", help="The base model of --merge; default: the job's source.")
]
TypeOption = Annotated[WeightType | None, typer.Option("--dtype", help="Type of the weights; default: as saved.")]


def register(parent: typer.Typer) -> None:
    """Put the verbs of this file into the command line."""
    parent.command()(export)


def export(
    job: CheckpointsOf,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="A folder that is empty or not there yet.")],
    step: StepOption = None,
    average: AverageOption = False,
    merge: MergeOption = False,
    base: BaseOption = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="DIR", help="Whose tokenizer goes along; default: the job's.")
    ] = None,
    dtype: TypeOption = None,
    max_shard_gib: Annotated[float, typer.Option("--max-shard-gib", min=0.001, help="Largest file of weights.")] = 5.0,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint as a Hugging Face model: safetensors, sharded, one tensor in memory at a time.

    An adapter comes out in peft's format, or with --merge as a whole model. What comes out can be the model.source of
    another job. Only the bytes of the weights are read. Needs the trainer (torch) on this machine.

    Example: trainyard export acme-stdlib-llama-20260131120000-1a2b --step 500 --to exported
    """
    from trainyard.launch.local_backend import check_trainer

    check_trainer()
    arguments = ["--to", str(to), "--max-shard-bytes", str(int(max_shard_gib * 2**30))]
    for option, value in (("--step", step), ("--base", base), ("--tokenizer", tokenizer), ("--dtype", dtype)):
        arguments += [] if value is None else [option, str(value)]
    arguments += [option for option, wanted in (("--average", average), ("--merge", merge)) if wanted]
    with console(stderr=True).status("asking") as spinner:
        place = destination_of(job, environment, tenant)
        spinner.update(f"writing {to}")
        written = run_export(place.destination, arguments, place.variables)
    if as_json:
        print_json(written)
        return
    size = written["num_bytes"] / 2**20
    print(f"{to}: {written['kind']}, {written['num_tensors']} tensors, {size:.1f} MiB, step {written['step']}")
    if written["kind"] == "adapter":
        print("  peft.PeftModel.from_pretrained reads it; --merge writes a whole model")
        return
    print(f"  a job reads it with model: {{source: {to}}}")
    if not any(name.startswith(("tokenizer", "vocab")) for name in written["beside"]):
        print("  without a tokenizer: the job's was not found on this machine; --tokenizer DIR brings one along")


def run_export(checkpoints: str, arguments: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """What `python -m trainer.export` says it wrote; its one-line error as ours."""
    from trainyard.launch.local_backend import trainer_environment

    done = subprocess.run(
        [sys.executable, "-m", "trainer.export", "--checkpoints", checkpoints, *arguments],
        env=trainer_environment() | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        for line in done.stderr.splitlines():
            if line.startswith("checkpoint "):  # one that was passed over: what is written is not the newest
                print(line, file=sys.stderr)
        written: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return written
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit code {done.returncode}")
    words = last.strip().removeprefix("trainyard: ")
    kinds = {kind.exit_code: kind for kind in (InputError, AwsRefusedError)}
    raise kinds.get(done.returncode, JobFailedError)(words)
