"""`export` and `promote`: a checkpoint's weights for those who serve them, and their registration."""

import ctypes
import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainyard.children import output_of, start
from trainyard.cli.checkpoints import CheckpointsOf, StepOption, beside_of, destination_of, tenants_place
from trainyard.cli.options import DEFAULT_ENVIRONMENT, EnvironmentOption, JobId, JsonOption, TenantOption
from trainyard.cli.output import console, print_json, turner
from trainyard.errors import AwsRefusedError, InputError, JobFailedError
from trainyard.spec.words import counted

if TYPE_CHECKING:
    from trainyard.launch.registry import Promotion, Registered
    from trainyard.launch.session import Account


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
    Path | None, typer.Option("--base", metavar="DIR", help="The model that was begun with; default: the job's source.")
]
TokenizerOption = Annotated[
    str | None, typer.Option("--tokenizer", metavar="DIR", help="Whose tokenizer goes along; default: the job's.")
]
ShardOption = Annotated[float, typer.Option("--max-shard-gib", min=0.001, help="Largest file of weights.")]
TypeOption = Annotated[WeightType | None, typer.Option("--dtype", help="Type of the weights; default: as saved.")]


def register(parent: typer.Typer) -> None:
    """Put the verbs of this file into the command line."""
    parent.command()(export)
    parent.command()(promote)


def export(
    job: CheckpointsOf,
    to: Annotated[
        str,
        typer.Option("--to", metavar="DIR|S3-PREFIX", help="A folder that is empty or not there yet, or s3://."),
    ],
    step: StepOption = None,
    average: AverageOption = False,
    merge: MergeOption = False,
    base: BaseOption = None,
    tokenizer: TokenizerOption = None,
    dtype: TypeOption = None,
    max_shard_gib: ShardOption = 5.0,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint as a Hugging Face model: safetensors, sharded, one tensor in memory at a time.

    An adapter comes out in peft's format, or with --merge as a whole model. What comes out can be the model.source of
    another job. Only the bytes of the weights are read. Needs the trainer (torch) on this machine.

    Example: trainyard export acme-stdlib-llama-20260131120000-1a2b --step 500 --to exported
    """
    from trainyard.launch.checkpoints import refuse_inside
    from trainyard.launch.local_backend import check_trainer
    from trainyard.spec.checkpoint_names import why_not_written

    if not to.strip():
        raise InputError(
            f"--to {to!r}: names no place; give a folder that is empty or not there yet, or an s3:// prefix"
        )
    if (why := why_not_written(to)) is not None:
        raise InputError(f"--to {to}: {why}")
    check_trainer()
    arguments = _arguments(to, step, average, merge, base, tokenizer, dtype, max_shard_gib)
    with console(stderr=True).status("asking") as spinner:
        place = destination_of(job, environment, tenant)
        variables = place.variables
        if place.destination == job:
            refuse_inside(job.rstrip("/"), place.s3)
        if to.startswith("s3://") and not variables:
            if tenant is None:
                raise InputError(
                    f"--to {to}: {job} is on this machine, and nothing says whose role may write there: give --tenant"
                    " NAME, or a folder"
                )
            variables = tenants_place(tenant, environment, to).variables
        turner(spinner)(f"writing {to}")
        written = run_export(place.destination, [*arguments, *_beside(place.beside)], variables)
    if as_json:
        print_json(written)
        return
    size = written["num_bytes"] / 2**20
    print(
        f"{to}: {written['kind']}, {counted(written['num_tensors'], 'tensor')}, {size:.1f} MiB, step {written['step']}"
    )
    if written["kind"] == "adapter":
        print("  peft.PeftModel.from_pretrained reads it; --merge writes a whole model")
        return
    print(f"  a job reads it with model: {{source: {to}}}")
    _warn_of_no_tokenizer(written["beside"])


def _warn_of_no_tokenizer(beside: Iterable[str]) -> None:
    if not any(name.startswith(("tokenizer", "vocab")) for name in beside):
        print(
            "  without a tokenizer: the job has none, or its own was not found; --tokenizer DIR brings one along. A "
            "job that reads this model needs data.tokenizer, or data of format: tokens"
        )


def _arguments(
    to: str,
    step: int | None,
    average: bool,
    merge: bool,
    base: Path | None,
    tokenizer: str | None,
    dtype: WeightType | None,
    max_shard_gib: float,
) -> list[str]:
    """Of `python -m trainer.export`, but for the checkpoints."""
    arguments = ["--to", to, "--max-shard-bytes", str(int(max_shard_gib * 2**30))]
    for option, value in (("--step", step), ("--base", base), ("--tokenizer", tokenizer), ("--dtype", dtype)):
        arguments += [] if value is None else [option, str(value)]
    return arguments + [option for option, wanted in (("--average", average), ("--merge", merge)) if wanted]


def _beside(places: Iterable[str]) -> list[str]:
    return [word for place in places for word in ("--beside", place)]


def promote(
    job: JobId,
    gate: Annotated[
        list[str] | None,
        typer.Option("--gate", metavar="METRIC<=VALUE", help="What a metric at that step must be; may be repeated."),
    ] = None,
    step: StepOption = None,
    model: Annotated[str | None, typer.Option("--model", help="The model's name; default: the job's.")] = None,
    approve: Annotated[
        bool, typer.Option("--approve", help="Register it as approved; default: waiting for a person's approval.")
    ] = False,
    image: Annotated[str, typer.Option("--image", metavar="ECR-URI", help="The image that serves it.")] = "",
    average: Annotated[bool, typer.Option("--average", help="Refused: no metric is measured of it.")] = False,
    merge: MergeOption = False,
    base: BaseOption = None,
    tokenizer: TokenizerOption = None,
    dtype: TypeOption = None,
    max_shard_gib: ShardOption = 5.0,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Export a checkpoint that passes its gates to the artifacts bucket, and register it in the Model Registry.

    The gates are asked of metrics.jsonl at the checkpoint's step. A second run finds what the first one did. The model
    can be a job's model.source. Needs the trainer (torch) on this machine.

    Example: trainyard promote acme-stdlib-llama-20260131120000-1a2b --gate 'validation_loss<=2.5'
    """
    from trainyard.launch import registry
    from trainyard.launch.local_backend import check_trainer

    gates = [registry.parse_gate(text) for text in gate or ()]
    if not gates:
        raise InputError("--gate is missing: say what the checkpoint must reach, e.g. --gate 'validation_loss<=2.5'")
    if average:
        raise InputError(
            "--average: metrics.jsonl has the metrics of the weights and none of their average, so no gate speaks of "
            "it; leave the option out (`trainyard export --average` writes the average, and registers nothing)"
        )
    check_trainer()
    variant = _variant(merge=merge, base=base, tokenizer=tokenizer, dtype=dtype)
    with console(stderr=True).status("asking") as spinner:
        turn = turner(spinner)
        promotion, launcher = _promotion(job, environment, tenant, step=step, model=model, variant=variant, image=image)
        s3, record, taken = launcher.client("s3"), promotion.record, promotion.checkpoint.step
        metrics = registry.metrics_at(record.checkpoint_destination, s3, taken)
        registry.check_gates(gates, metrics, taken)
        known = registry.Registry(launcher, promotion.contract)
        listing, found = registry.exported(promotion, s3), known.find(promotion)
        if listing is None:
            turn(f"writing {promotion.uri}")
            arguments = _arguments(promotion.uri, taken, False, merge, base, tokenizer, dtype, max_shard_gib)
            arguments += ["--continue", *_beside(beside_of(record))]
            run_export(record.checkpoint_destination, arguments, launcher.variables())
            listing = registry.check_listing(registry.exported(promotion, s3), promotion)
        if found is None:
            turn(f"registering {promotion.group}")
            source = registry.record_reason(promotion, s3, gates, metrics, listing)
            request = registry.package_request(promotion, listing, source, approve=approve)
            registered = known.register(promotion, request)
        else:
            registered = found
    _tell_promotion(promotion, registered, is_new=found is None, as_json=as_json)
    if not as_json and listing.get("kind") != "adapter":
        _warn_of_no_tokenizer(listing.get("beside", ()))
    if approve:
        registry.refuse_unapproved(registered)


def _variant(*, merge: bool, base: Path | None, tokenizer: str | None, dtype: WeightType | None) -> str:
    """What a promotion's folder has in its name of the options that change what lies there; "" for the plain one."""
    words = [word for word in (merge and "merged", dtype and dtype.value) if word]
    for option, place in (("base", None if base is None else str(base)), ("tokenizer", tokenizer)):
        if place is not None:
            words.append(f"{option}-{_fingerprint(place)[:8]}")
    return "".join(f"-{word}" for word in words)


def _fingerprint(place: str) -> str:
    """SHA-256 of a model's or tokenizer's files but for the weights, so of what they say; of S3 the name."""
    digest = hashlib.sha256(place.encode() if place.startswith("s3://") else b"")
    path = Path(place)
    try:
        for file in sorted(path.iterdir() if path.is_dir() else [path]):
            if file.is_file() and file.suffix in (".json", ".txt", ".model", ".jinja"):
                digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    except OSError as error:
        raise InputError(f"{place}: can't be read: {error.strerror or error}; give a folder of this machine") from None
    return digest.hexdigest()


def _promotion(
    job: str,
    environment: str,
    tenant: str | None,
    *,
    step: int | None,
    model: str | None,
    variant: str,
    image: str,
) -> "tuple[Promotion, Account]":
    """What is promoted, and the tenant's launcher; InputError where that job, step or name can't be."""
    from trainyard.launch.checkpoints import chosen
    from trainyard.launch.names import job_id_of
    from trainyard.launch.place import environment_file, local_jobs_folder, open_tenant, tenant_in
    from trainyard.launch.registry import Promotion, check_names
    from trainyard.spec.platform import load_environment

    job_id = job_id_of(job)
    if (local_jobs_folder() / job_id / "record.json").exists():
        raise InputError(
            f"job {job_id}: ran on this machine, which has no registry; `trainyard export` writes its model"
        )
    spec = load_environment(environment_file(environment))
    access = open_tenant(spec, tenant or tenant_in(job_id, spec), f"job {job_id}")
    place = access.place
    record = place.store.read(job_id).record
    name = model or record.spec.name
    check_names(name, image, access.contract)
    checkpoint = chosen(record.checkpoint_destination, place.s3, step)
    if not checkpoint.is_good:
        raise InputError(f"--step {step}: {checkpoint.uri} can't be promoted: {checkpoint.problem}")
    return Promotion(record, checkpoint, access.contract, name, variant, image), access.launcher


def _tell_promotion(promotion: "Promotion", registered: "Registered", *, is_new: bool, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "model_package": registered.arn,
                "approval": registered.approval,
                "is_new": is_new,
                "model": promotion.uri,
                "source": promotion.reference,
                **promotion.properties,
                "step": promotion.checkpoint.step,
            }
        )
        return
    verb = "registered" if is_new else "registered already, by an earlier run"
    print(f"{registered.arn}: {verb}, {registered.approval}")
    print(f"  step {promotion.checkpoint.step} of {promotion.record.job_id}, in {promotion.uri}/")
    print(f"  a job of the tenant reads it with model: {{source: {promotion.reference}}}")


def run_export(checkpoints: str, arguments: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """What `python -m trainer.export` says it wrote; its one-line error as ours."""
    from trainyard.launch.local_backend import trainer_environment

    process = start(
        [sys.executable, "-m", "trainer.export", "--checkpoints", checkpoints, *arguments],
        env=trainer_environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=_end_with_parent,
    )
    # Told to end it removes what it has written so far, which may be as large as the model.
    out, err = output_of(process)
    if process.returncode == 0:
        for line in err.splitlines():
            # A checkpoint that was passed over: what is written is not the newest. What of a base model is left out.
            if line.startswith(("checkpoint ", "warning: ")):
                print(line, file=sys.stderr)
        written: dict[str, Any] = json.loads(out.splitlines()[-1])
        return written
    code = process.returncode
    last = next((line for line in reversed(err.splitlines()) if line.strip()), f"exit code {code}")
    words = last.strip().removeprefix("trainyard: ")
    kinds = {kind.exit_code: kind for kind in (InputError, AwsRefusedError)}
    raise kinds.get(code, JobFailedError)(words)


def _end_with_parent() -> None:
    """Nobody would wait for an export whose command was killed (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
