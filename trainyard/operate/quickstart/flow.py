"""The quickstart, read top to bottom: each phase is one function, `run` is the composing place."""

import contextlib
import hashlib
import json
import os
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from trainyard import emulator
from trainyard.emulator import EmulatorInfo
from trainyard.errors import InputError, JobFailedError, TrainyardError
from trainyard.launch.contract import check_tenant
from trainyard.launch.place import TenantAccess, open_tenant
from trainyard.operate import deploy as deployment
from trainyard.operate.isolation_probe import ProbeResult, probe
from trainyard.operate.quickstart import report as reporting
from trainyard.operate.quickstart.narrator import Narrator, Phase
from trainyard.operate.quickstart.options import Options, run_quietly
from trainyard.operate.quickstart.report import usd
from trainyard.operate.quickstart.training import JobRun, launch_job, stop_own_jobs, watch
from trainyard.planner import Plan
from trainyard.spec.job import JobSpec, load_job
from trainyard.spec.platform import EnvironmentSpec, load_environment
from trainyard.spec.words import counted

DATASET_PREFIX = "datasets/python-stdlib"
SOURCES = (
    *("app.py", "cdk.json", "cdk.context.json", "requirements.txt", "package-lock.json", "stacks"),
    *("trainyard/__init__.py", "trainyard/errors.py", "trainyard/children.py", "trainyard/importing.py"),
    *("trainyard/spec", "trainyard/hardware", "trainyard/functions"),
)
"""Files and folders of the checkout that an assembly is made from: the CDK's versions and its settings among them."""


@dataclass(frozen=True)
class Site:
    """What the deployment left: the emulator, and both tenants opened as their own launchers."""

    info: EmulatorInfo
    owner: TenantAccess
    intruder: TenantAccess


def run(options: Options, console: Console) -> reporting.QuickstartReport:
    """Do all of it; TrainyardError where something fails, the report where it ran (its `passed` says how)."""
    started = time.monotonic()
    narrator = Narrator(console)
    setup_seconds = float(os.environ.get("TRAINYARD_SETUP_SECONDS", "0"))
    narrator.seconds["setup"] = setup_seconds
    environment, job = load_inputs(options)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    with narrator.phase("emulator", "AWS on this machine") as phase:
        info = emulator.start(options.state_dir / "emulator", port=options.port)
        phase.summary = f"{info.endpoint}, {'started' if info.started_now else 'found running'}"
    with stopped_on_interrupt(info, options, environment, job):
        with narrator.phase("deploy", f"cdk bootstrap and deploy: tenants {', '.join(environment.tenants)}") as phase:
            deploy(options, environment, info, phase)
        site = open_site(environment, info, job)
        with narrator.phase("data", "Data: the Python standard library's source") as phase:
            stop_own_jobs(site.owner, options.output_dir, phase)
            dataset = prepare_data(options, site, phase)
        with narrator.phase("plan", f"trainyard plan {options.job.name}") as phase:
            plan = plan_job(options, phase)
        with narrator.phase("train", "Training on two hosts, with a spot reclaim") as phase:
            main_run = train(options, site, job, phase)
        with narrator.phase("reference", "The same job without a reclaim, to compare with") as phase:
            reference = launch_job(options, [f"name={job.name[:30]}-reference", "compute.spot=false"], phase)
            reference = watch(site.owner, info, reference, phase)
            phase.summary = f"{reference.num_steps} steps, no interruption"
        intruder = site.intruder.contract.tenant
        with narrator.phase("isolation", f"{intruder} tries to reach {job.tenant}'s things") as phase:
            probed = probe_isolation(site, main_run, phase)
    narrator.seconds["total"] = setup_seconds + time.monotonic() - started
    report = build_report(narrator, environment, main_run, reference, probed, plan, dataset, options)
    reporting.draw_loss(report, reference.losses, options.output_dir / "loss.png")
    reporting.write_report(report, options.output_dir)
    reporting.print_summary(console, report, options)
    if not report.passed:
        console.print("[red]Something above did not hold: see the NO lines.[/]")
    return report


def load_inputs(options: Options) -> tuple[EnvironmentSpec, JobSpec]:
    """The environment and the job; InputError where they are not what a quickstart can run."""
    environment, job = load_environment(options.environment), load_job(options.job)
    if not environment.emulated:
        raise InputError(
            f"{options.environment}: is a real account's environment; the quickstart runs where emulated is true "
            "(environments/local.yaml)"
        )
    check_tenant(environment, job.tenant, str(options.job))
    if len(environment.tenants) < 2:
        raise InputError(f"{options.environment}: has one tenant; isolation needs a second one to try the doors")
    if not job.compute.spot:
        raise InputError(f"{options.job}: compute.spot must be true: capacity on demand is not reclaimed")
    every, steps = job.checkpoint.every_steps, job.training.steps
    if not isinstance(every, int) or steps is None or every < 4 or steps < 3 * every:
        raise InputError(
            f"{options.job}: the reclaim must fall between two checkpoints: state training.steps and "
            f"checkpoint.every_steps, at least 4 and at most a third of the steps (given: {every} and {steps})"
        )
    return environment, job


@contextlib.contextmanager
def stopped_on_interrupt(
    info: EmulatorInfo, options: Options, environment: EnvironmentSpec, job: JobSpec
) -> Iterator[None]:
    """Ctrl-C leaves no process: an emulator that this run started goes, with its jobs; a found one stays, without."""
    try:
        yield
    except KeyboardInterrupt:
        if info.started_now:
            emulator.stop(options.state_dir / "emulator")
        else:
            with contextlib.suppress(TrainyardError):
                stop_own_jobs(open_tenant(environment, job.tenant, str(options.job)), options.output_dir, None)
        raise


def deploy(options: Options, environment: EnvironmentSpec, info: EmulatorInfo, phase: Phase) -> None:
    """Deploy what isn't deployed yet to this emulator, then compare the templates with what exists."""
    # The account's quota is the emulator's too: a job beyond it must be refused here as it would be there.
    emulator.set_quota(info, environment.max_instances)
    stamp = options.output_dir / "deployed.json"
    wanted = {"instance_id": info.instance_id, "sources": sources_digest(options)}
    names = deployment.stack_names(environment)
    with contextlib.suppress(OSError, ValueError):
        if json.loads(stamp.read_text()) == wanted:
            phase.update("unchanged: looking whether it is all still there")
            try:
                emulator.verify_deployment(info, names, options.output_dir / "cdk.out")
                phase.summary = f"{counted(len(names), 'stack')}, unchanged"
                return
            except JobFailedError as error:
                phase.note(f"deploying again: {error}")
    stamp.unlink(missing_ok=True)
    deployment.deploy(
        options.checkout,
        options.environment,
        environment,
        info.environment(),
        work=options.output_dir,
        progress=phase.update,
    )
    phase.update("comparing the templates with what exists")
    checked = emulator.verify_deployment(info, names, options.output_dir / "cdk.out")
    stamp.write_text(json.dumps(wanted))
    recorded = f"{counted(len(checked.recorded_only), 'type')} only recorded: {', '.join(checked.recorded_only)}"
    backed = f"{counted(len(checked.api_backed), 'type')} found by their service's API"
    phase.summary = (
        f"{counted(len(names), 'stack')}; all {checked.num_resources} resources exist ({backed}; {recorded})"
    )


def sources_digest(options: Options) -> str:
    """SHA-256 over everything that the assembly is made from: the templates, and the code of the functions in it."""
    digest = hashlib.sha256()
    named = [options.checkout / name for name in SOURCES]
    inside = (path for folder in named if folder.is_dir() for path in sorted(folder.rglob("*")))
    for path in (options.environment, *named, *inside):
        if path.is_file() and path.suffix != ".pyc":
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{os.path.relpath(path, options.checkout)} {content}\n".encode())
    return digest.hexdigest()


def open_site(environment: EnvironmentSpec, info: EmulatorInfo, job: JobSpec) -> Site:
    """Access as the job's tenant and as another one, each through its own launcher role."""
    other = next(name for name in environment.tenants if name != job.tenant)
    return Site(
        info,
        owner=open_tenant(environment, job.tenant, "the quickstart's job"),
        intruder=open_tenant(environment, other, "the quickstart"),
    )


def prepare_data(options: Options, site: Site, phase: Phase) -> dict[str, Any]:
    """Corpus and tokenizer, made once, then uploaded to the tenant's data bucket; returns the corpus manifest."""
    folder = options.output_dir / "data"
    phase.update("collecting modules, training the tokenizer")
    python = options.checkout / ".venv/bin/python"
    run_quietly(options, [str(python), "-m", "trainer.data.prepare_stdlib", "--out", str(folder)], "prepare_stdlib")
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    s3, bucket = site.owner.launcher.client("s3"), site.owner.contract.buckets.data
    with contextlib.suppress(s3.exceptions.ClientError):
        there = s3.get_object(Bucket=bucket, Key=f"{DATASET_PREFIX}/manifest.json")["Body"].read()
        if there == (folder / "manifest.json").read_bytes():
            phase.summary = "unchanged, in the bucket already"
            return manifest
    # The manifest goes last: an upload that was cut short is done again.
    for name in ("train.jsonl", "validation.jsonl", "tokenizer.json", "manifest.json"):
        phase.update(f"uploading {name}")
        s3.upload_file(str(folder / name), bucket, f"{DATASET_PREFIX}/{name}")
    total_mib = sum((folder / name).stat().st_size for name in ("train.jsonl", "validation.jsonl")) / 2**20
    phase.summary = f"{total_mib:.1f} MiB to s3://{bucket}/{DATASET_PREFIX}"
    return manifest


def plan_job(options: Options, phase: Phase) -> Plan:
    """`trainyard plan --json` as a person would run it."""
    trainyard = options.checkout / ".venv/bin/trainyard"
    output = run_quietly(options, [str(trainyard), "plan", str(options.job), "--json"], "plan")
    plan = Plan.model_validate_json(output)
    phase.summary = plan_summary(plan)
    return plan


def plan_summary(plan: Plan) -> str:
    """The chosen configuration in a line."""
    chosen = next(item for item in plan.configurations if item.chosen)
    assert plan.cost is not None
    where = f"{plan.instance_count} x {plan.instance_type}"
    return f"{chosen.layout} on {where}, {chosen.memory.total_gib:.1f} GiB a GPU, {usd(plan.cost.planned_usd)}"


def train(options: Options, site: Site, job: JobSpec, phase: Phase) -> JobRun:
    """Launch, reclaim the capacity at a seeded step between two checkpoints, and wait for the end."""
    step = reclaim_step(job, options.seed)
    prefix = f"{job.tenant}-{job.name}-2"  # job ids go on with the year: the reference run's name doesn't match
    emulator.reclaim_after(site.info, prefix, log_pattern=rf"^step={step} ", notice=False)
    phase.note(f"The spot capacity will be taken without notice when step {step} is done (seed {options.seed}).")
    launched = launch_job(options, [], phase)
    done = watch(site.owner, site.info, launched, phase)
    phase.summary = (
        f"{done.num_steps} steps in {counted(len(done.attempts), 'attempt')}, loss {done.losses[0]:.3f} → "
        f"{done.losses[-1]:.3f}"
    )
    return done


def reclaim_step(job: JobSpec, seed: int) -> int:
    """A step between two checkpoints, by `seed`: never one that was just saved, never the last stretch."""
    every, steps = job.checkpoint.every_steps, job.training.steps
    assert isinstance(every, int) and steps is not None
    interval = random.Random(seed).randrange(1, steps // every - 1)
    # In the second half of the interval, so that the asynchronous commit of its checkpoint is through.
    return interval * every + random.Random(seed + 1).randrange(every // 2, every)


def probe_isolation(site: Site, main_run: JobRun, phase: Phase) -> ProbeResult:
    """The other tenant's launcher tries the checkpoint that the job left, its key, data, contract, job and roles."""
    key = main_run.checkpoint_key
    result = probe(
        intruder=site.intruder.launcher,
        intruder_contract=site.intruder.contract,
        owner=site.owner.launcher,
        owner_contract=site.owner.contract,
        checkpoint_key=key,
        job_id=main_run.job_id,
    )
    shown = {"s3:GetObject": "a checkpoint", "kms:Decrypt": "the key", "sts:AssumeRole": "the launcher role"}
    for action, thing in shown.items():
        attempt = next(item for item in result.attempts if item.action == action)
        outcome = f"denied: {attempt.reason}" if attempt.denied else "ALLOWED"
        asked = f"{site.intruder.contract.tenant} asks for {thing} of {site.owner.contract.tenant}"
        phase.note(f"{asked}: {outcome}", style="" if attempt.denied else "red")
    phase.summary = f"{result.num_denied} of {counted(len(result.attempts), 'attempt')} denied by the deployed policies"
    return result


def build_report(
    narrator: Narrator,
    environment: EnvironmentSpec,
    main_run: JobRun,
    reference: JobRun,
    probed: ProbeResult,
    plan: Plan,
    dataset: dict[str, Any],
    options: Options,
) -> reporting.QuickstartReport:
    """Put the findings together, and decide whether every claim held."""
    bitwise_equal = main_run.exact_rows == reference.exact_rows and len(main_run.exact_rows) > 0
    reclaim = main_run.reclaim()
    entropy = float(dataset["validation_unigram_entropy_nats"])
    assert plan.cost is not None
    rate = plan.on_demand.usd_per_hour if plan.on_demand is not None else None
    passed = (
        bitwise_equal
        and probed.passed
        and main_run.status == "Completed"
        and main_run.validation_loss < entropy
        and reclaim.fresh_processes
    )
    return reporting.QuickstartReport(
        passed=passed,
        seconds={phase: round(seconds, 2) for phase, seconds in narrator.seconds.items()},
        tenants=tuple(environment.tenants),
        job=reporting.JobReport(
            name=main_run.job_id,
            status=main_run.status,
            steps=main_run.num_steps,
            hosts=main_run.num_hosts,
            strategy=main_run.strategy,
            tokens_per_second=main_run.tokens_per_second,
        ),
        loss=reporting.LossReport(
            first=main_run.losses[0],
            last=main_run.losses[-1],
            validation_last=main_run.validation_loss,
            unigram_entropy=entropy,
            list=main_run.losses,
        ),
        reclaim=reporting.ReclaimReport(
            step=reclaim.step,
            resumed_step=reclaim.resumed_step,
            bitwise_equal=bitwise_equal,
            seconds_to_next_step=round(reclaim.seconds_to_next_step, 2),
        ),
        isolation=reporting.IsolationReport(
            attempts=len(probed.attempts),
            denied=probed.num_denied,
            controls_allowed=sum(not control.denied for control in probed.controls),
            details=tuple(str(attempt) for attempt in (*probed.attempts, *probed.controls)),
        ),
        cost=reporting.CostReport(
            planned_usd=plan.cost.planned_usd,
            price_basis=plan.cost.price_basis,
            run_usd=None if rate is None else round(main_run.held_seconds * rate / 3600, 4),
        ),
        artifacts=(*main_run.artifacts, (options.output_dir / "loss.png").as_uri()),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    )
