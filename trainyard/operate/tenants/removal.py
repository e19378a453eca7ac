"""A tenant leaves: what would go is planned, then done by the tenant's policy, then what is left is written down.

Nothing is changed before `remove`; a removal that was interrupted is finished by the same command, because what the
tenant held is written down (`<state>/offboarding/<environment>-<tenant>.json`) before the first stack goes.
"""

import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trainyard.errors import AwsRefusedError, InputError, TrainyardError
from trainyard.kept_room import write_whole
from trainyard.launch.aws import aws_errors, error_code
from trainyard.launch.contract import read_contract
from trainyard.launch.session import Account, assume
from trainyard.operate.deploy import tenant_stacks
from trainyard.operate.tenants import leftovers, storage
from trainyard.operate.tenants.leftovers import Left
from trainyard.operate.tenants.revocations import Revocation, lift, refuse_needed, revocations
from trainyard.operate.tenants.storage import Contents
from trainyard.operate.tenants.survey import NOT_DEPLOYED, Held, held, stack_status
from trainyard.operate.tenants.unfinished import NOT_TOLD, Unfinished, not_ended, silent
from trainyard.spec.platform import TRAINING_LOG_GROUP, EnvironmentSpec
from trainyard.spec.words import counted

Say = Callable[[str], None]

STACK_SECONDS = 3600.0
BUCKET = "AWS::S3::Bucket"
BLIND = (
    "not known here: no stack of it is deployed, and no unfinished removal of it is written down on this machine (of "
    "one that was finished, offboarding/ENVIRONMENT-TENANT-MOMENT.txt of the state folder says what was left); of one "
    "that another machine began, that one's state folder lists what is left: bring offboarding/ENVIRONMENT-TENANT.json "
    "here, and repeat the command"
)


@dataclass(frozen=True)
class Plan:
    """What a removal would do."""

    environment: EnvironmentSpec
    tenant: str
    policy: Literal["retain", "shred"]
    export_to: str | None
    stacks: Mapping[str, str]
    """Stack name to status."""
    held: tuple[Held, ...]
    contents: Mapping[str, Contents]
    """By bucket."""
    running: Unfinished
    """Jobs that have not ended: while there are any, the tenant stays."""
    job_streams: int = 0
    """Log streams of its jobs in the group that SageMaker shares among all."""
    job_roles: tuple[str, ...] = ()
    """Roles of single jobs that its broker made and hasn't removed yet."""
    machine_logs: tuple[str, ...] = ()
    """Log groups that HyperPod made for its machines."""
    was_emptied: bool = False
    """An earlier removal began to empty its buckets, and did not end."""
    revoked: tuple[Revocation, ...] = ()
    """Roles whose older sessions were closed by hand."""
    is_remembered: bool = False
    """An unfinished removal on this machine wrote down what the tenant held."""
    ended: tuple[str, ...] = ()
    """Jobs that a person vouches for: they can't run any longer, though nobody answers for them."""

    @property
    def is_blind(self) -> bool:
        """Whether nothing tells here what the tenant holds: BLIND says what may be the reason."""
        return not (self.held or self.is_remembered) and all(one == NOT_DEPLOYED for one in self.stacks.values())

    def unowned(self) -> list[str]:
        """What no stack owns, and what becomes of it, for a person."""
        fate = "deleted" if self.policy == "shred" else "stays"
        streams = (
            [f"{counted(self.job_streams, 'log stream')} of its jobs in {TRAINING_LOG_GROUP}"]
            if self.job_streams
            else []
        )
        lines = [f"{what}: {fate}" for what in (*streams, *(f"Logs::LogGroup {name}" for name in self.machine_logs))]
        lines += [f"{counted(len(self.job_roles), 'role')} of its jobs: deleted"] if self.job_roles else []
        return lines + [f"sessions of role {one.role} that were closed by hand: the role goes" for one in self.revoked]

    def fate(self, thing: Held) -> str:
        """What becomes of one thing."""
        if self.policy == "retain":
            return "stays" if thing.retained else "goes with its stack"
        key = f"serves nobody from now on, deleted for good {leftovers.KEY_DELETION_DAYS} days later"
        if thing.kind == "AWS::KMS::Key":
            return key if thing.retained else "serves nobody from now on, deleted for good after its waiting time"
        return "emptied and deleted" if thing.kind == BUCKET else "deleted"

    def lines(self) -> list[str]:
        """For a person."""
        where = f"environment {self.environment.name}, account {self.environment.account}"
        lines = [f"tenant {self.tenant} of {where}; its data: {self.policy}"]
        lines += [f"  stack {name}: {status}" for name, status in self.stacks.items()]
        if self.export_to:
            lines.append(f"  every current object is copied to {self.export_to} first")
            if self.was_emptied:
                lines.append("  an earlier removal began to empty its buckets: what went then can't be copied")
        for thing in self.held:
            inside = self.contents.get(thing.physical_id)
            lines.append(f"  {thing}{f', {inside}' if inside else ''}: {self.fate(thing)}")
        lines += [f"  {BLIND}"] if self.is_blind else []
        return lines + [f"  {line}" for line in self.unowned()]


@dataclass(frozen=True)
class Journal:
    """What a removal must still know after an interruption: with the stacks go what they list, and the contract."""

    held: tuple[Held, ...] = ()
    launcher: str = ""
    """ARN of the role that the export reads as; empty until it was asked for."""
    exported: Mapping[str, Any] = field(default_factory=dict)
    """What Report.exported will say; empty until every object is copied."""
    copied: Mapping[str, str] = field(default_factory=dict)
    """By bucket, its fingerprint when the copying began; empty where one isn't any more what it was then."""
    emptying: bool = False
    """Buckets may have been emptied in part: what is in them is not all that was exported."""


@dataclass
class Report:
    """What a removal did, and what is left."""

    environment: str
    tenant: str
    account: str
    region: str
    policy: str
    started_at: str
    finished_at: str = ""
    exported: dict[str, Any] = field(default_factory=dict)
    stacks_deleted: list[str] = field(default_factory=list)
    versions_deleted: dict[str, int] = field(default_factory=dict)
    """By bucket."""
    deleted: list[str] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For a person, and for the file that is kept."""
        lines = [f"tenant {self.tenant} left environment {self.environment} ({self.account}, {self.region})"]
        lines += [f"data: {self.policy}; from {self.started_at} to {self.finished_at}"]
        if self.exported:
            lines.append(
                f"exported: {counted(self.exported['objects'], 'object')}, {self.exported['size_bytes']} bytes, "
                f"to {self.exported['to']}"
            )
        lines += [f"deleted: stack {name}" for name in self.stacks_deleted]
        lines += [f"emptied: {bucket}, {counted(count, 'version')}" for bucket, count in self.versions_deleted.items()]
        lines += [f"deleted: {thing}" for thing in self.deleted]
        lines += [f"left: {item}" for item in self.left] or ["left: nothing"]
        return lines


def plan(
    account: Account, environment: EnvironmentSpec, tenant: str, state_dir: Path, ended: Sequence[str] = ()
) -> Plan:
    """What removing the tenant would do; changes nothing. `ended`: see Plan."""
    journal = _remembered(_journal(state_dir, environment, tenant))
    found = {thing.physical_id: thing for thing in journal.held}
    found |= {thing.physical_id: thing for thing in held(account, environment, tenant)}
    there = [thing for thing in found.values() if leftovers.condition(account, thing) is not None]
    buckets = [thing.physical_id for thing in there if thing.kind == BUCKET]
    stacks = {name: stack_status(account, name) for name in tenant_stacks(environment, tenant)}
    return Plan(
        environment=environment,
        tenant=tenant,
        policy=environment.data_on_removal(tenant),
        export_to=environment.tenant(tenant).removal.export_to,
        stacks=stacks,
        held=tuple(leftovers.in_deletion_order(there)),
        contents={bucket: storage.contents(account, bucket) for bucket in buckets},
        running=leftovers.running_jobs(account, environment, tenant).without(ended),
        job_streams=len(leftovers.job_streams(account, tenant)),
        job_roles=tuple(leftovers.job_roles(account, environment.name, tenant)),
        machine_logs=tuple(leftovers.machine_log_groups(account, environment.name, tenant)),
        was_emptied=journal.emptying,
        is_remembered=bool(journal.held),
        revoked=tuple(revocations(account, (name for name in stacks if stacks[name] != NOT_DEPLOYED))),
        ended=tuple(ended),
    )


def remove(account: Account, planned: Plan, state_dir: Path, say: Say) -> Report:
    """Carry the plan out. InputError while jobs run; AwsRefusedError where AWS refuses: the same command goes on."""
    environment, tenant = planned.environment, planned.tenant
    _refuse_running(tenant, planned.running)
    refuse_needed(tenant, planned.revoked)
    report = Report(environment.name, tenant, environment.account, environment.region, planned.policy, _now())
    path = _journal(state_dir, environment, tenant)
    journal = replace(_remembered(path), held=planned.held)
    _write(path, journal)
    if planned.policy == "shred":
        _refuse_locked(account, planned, say)
    if planned.export_to:
        journal = _export(account, planned, journal, path, say)
        report.exported = dict(journal.exported)
    running = leftovers.running_jobs(account, environment, tenant)  # an export takes long
    _refuse_running(tenant, running.without(planned.ended))
    if planned.export_to:
        _refuse_uncopied(account, journal, path)
    if planned.policy == "shred":
        _write(path, journal := replace(journal, emptying=True))
        _empty(account, planned, report, say)
    if roles := leftovers.delete_job_roles(account, environment.name, tenant):
        report.deleted.append(f"{counted(len(roles), 'role')} of its jobs")
    lift(account, planned.revoked)
    for name in reversed(list(planned.stacks)):
        if planned.stacks[name] != NOT_DEPLOYED:
            _delete_stack(account, name, say)
            report.stacks_deleted.append(name)
    refusals = _delete_retained(account, planned, report, say) if planned.policy == "shred" else {}
    there = _account_for(account, planned, report, refusals)
    if planned.is_blind:
        report.left.append(Left("what an earlier removal left", tenant, BLIND))
    report.finished_at = _now()
    if planned.policy == "shred" and there:
        try:
            told = str(write_report(report, state_dir))
        except OSError as error:
            told = f"can't be kept ({error.strerror})"
        raise AwsRefusedError(
            f"tenant {tenant}: {there[0]}{f' (and {len(there) - 1} more)' if there[1:] else ''}; mend that and repeat "
            f"the command; what went so far: {told}"
        )
    path.unlink(missing_ok=True)
    return report


def _refuse_running(tenant: str, running: Unfinished) -> None:
    """InputError while a job runs or may run, AwsRefusedError where that can't be told."""
    if running.jobs:
        raise InputError(
            f"tenant {tenant}: {not_ended(running.jobs)} ({', '.join(running.jobs[:3])}); "
            "stop them (trainyard stop JOB), or wait"
        )
    if running.unanswered:
        raise InputError(
            f"tenant {tenant}: {silent(running.unanswered)}: {', '.join(list(running.unanswered)[:3])}; mend that, or "
            "say of each that can't run any longer, as its machines are gone: --ended JOB"
        )
    if running.untold:
        raise AwsRefusedError(f"tenant {tenant}: {NOT_TOLD}: {running.untold}")


def write_report(report: Report, state_dir: Path) -> Path:
    """The report as JSON, and as text beside it; the JSON's path."""
    stamp = report.finished_at.replace(":", "").replace("-", "")
    path = _folder(state_dir) / f"{report.environment}-{report.tenant}-{stamp}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    path.with_suffix(".txt").write_text("\n".join(report.lines()) + "\n", encoding="utf-8")
    return path


def _refuse_locked(account: Account, planned: Plan, say: Say) -> None:
    """AwsRefusedError where a lock keeps a version: before anything is copied or deleted, as a lock is a promise that
    what is under it can be read until it ends, and half a tenant, or a deleted key, would break it."""
    for bucket in planned.contents:
        say(f"looking for locks in {bucket}")
        if kept := storage.locked(account, bucket):
            raise AwsRefusedError(
                f"s3://{bucket}: versions can't be deleted ({kept}); nothing was deleted: wait until their lock ends "
                "and repeat the command"
            )


def _export(account: Account, planned: Plan, journal: Journal, path: Path, say: Say) -> Journal:
    """Copy every object that isn't copied yet; the journal then says so. Nothing to copy needs no contract, which a
    tenant that was never deployed completely doesn't have."""
    target = planned.export_to or ""
    now = {bucket: storage.fingerprint(account, bucket) for bucket in planned.contents}
    before = journal.exported if journal.exported.get("to") == target else {}
    is_copied = bool(before) and all(
        print_ in (storage.EMPTY, journal.copied.get(name)) for name, print_ in now.items()
    )
    # With the foundation goes the role that could read: what came since is nobody's to read any more.
    foundation = tenant_stacks(planned.environment, planned.tenant)[0]
    is_late = journal.emptying and planned.stacks.get(foundation) == NOT_DEPLOYED
    objects, size = int(before.get("objects", 0)), int(before.get("size_bytes", 0))
    if not (is_copied or is_late):
        found = [storage.Exported(0, 0, 0, 0)]
        if any(print_ != storage.EMPTY for print_ in now.values()):
            launcher, journal = _launcher(account, planned, journal, path)
            found += [storage.export(launcher, account, bucket, target, say) for bucket in now]
        if journal.emptying:  # what was copied first is no longer there to be counted
            objects, size = objects + sum(one.new_objects for one in found), size + sum(one.new_bytes for one in found)
        else:
            objects, size = sum(one.objects for one in found), sum(one.size_bytes for one in found)
    exported = {"to": target, "objects": objects, "size_bytes": size}
    _write(path, journal := replace(journal, exported=exported, copied=now))
    return journal


def _launcher(account: Account, planned: Plan, journal: Journal, path: Path) -> tuple[Account, Journal]:
    """Who may read the tenant's objects; the journal remembers it, as the contract goes with the first stack."""
    if not journal.launcher:
        contract = read_contract(account, planned.environment, planned.tenant)
        _write(path, journal := replace(journal, launcher=contract.roles.launcher))
    return assume(account, journal.launcher, session_name=f"trainyard-export-{planned.tenant}"), journal


def _refuse_uncopied(account: Account, journal: Journal, path: Path) -> None:
    """AwsRefusedError where a bucket isn't any more what was copied: emptying it would lose what came since."""
    for bucket, then in journal.copied.items():
        if storage.fingerprint(account, bucket) not in (then, storage.EMPTY):
            _write(path, replace(journal, copied={}))
            raise AwsRefusedError(
                f"s3://{bucket}: was written to since its copying began; nothing was deleted: find out by whom, and "
                "repeat the command, which copies what came since"
            )


def _empty(account: Account, planned: Plan, report: Report, say: Say) -> None:
    """Empty every bucket. AwsRefusedError where a version stays, before any stack or key goes."""
    stuck: dict[str, str] = {}
    for bucket in planned.contents:
        gone, refused = storage.empty(account, bucket, say)
        report.versions_deleted[bucket] = gone
        if refused:
            stuck[bucket] = f"{counted(len(refused), 'version')} can't be deleted ({refused[0]})"
    for bucket, why in stuck.items():
        raise AwsRefusedError(f"s3://{bucket}: {why}; mend that, or wait until their lock ends, and repeat the command")


def _delete_stack(account: Account, name: str, say: Say) -> None:
    cloudformation = account.client("cloudformation")
    with aws_errors("deleting", f"stack {name}", "look at its events in CloudFormation, and repeat the command"):
        try:
            found = cloudformation.describe_stacks(StackName=name)["Stacks"][0]
        except cloudformation.exceptions.ClientError as error:
            if error_code(error) != "ValidationError":  # CloudFormation's word for "no such stack"
                raise
            return  # it went since the plan was made
        stack_id = found["StackId"]
        # An interrupted removal's own deletion goes on: in that state AWS lets nobody change the protection.
        if found["StackStatus"] != "DELETE_IN_PROGRESS":
            cloudformation.update_termination_protection(StackName=name, EnableTerminationProtection=False)
            cloudformation.delete_stack(StackName=name)
        end, pause = time.monotonic() + STACK_SECONDS, 0.2
        while (status := _status(cloudformation, stack_id)) == "DELETE_IN_PROGRESS":
            say(f"deleting stack {name}")
            if time.monotonic() > end:
                raise AwsRefusedError(f"stack {name} is still being deleted; repeat the command later")
            time.sleep(pause)
            pause = min(pause * 1.5, 10.0)
        if status != "DELETE_COMPLETE":
            reason = _failures(cloudformation, stack_id)
            raise AwsRefusedError(f"stack {name}: {status}: {reason}; mend that and repeat the command")


def _status(cloudformation: Any, stack_id: str) -> str:
    return str(cloudformation.describe_stacks(StackName=stack_id)["Stacks"][0]["StackStatus"])


def _failures(cloudformation: Any, stack_id: str) -> str:
    """What the newest deletion failed of. Events come newest first, a hundred to a page."""
    failed: list[str] = []
    pages = cloudformation.get_paginator("describe_stack_events").paginate(StackName=stack_id)
    for event in (event for page in pages for event in page["StackEvents"]):
        status = event["ResourceStatus"]
        if event.get("PhysicalResourceId") == stack_id:
            if status == "DELETE_IN_PROGRESS":
                break
        elif status == "DELETE_FAILED":
            failed.append(f"{event['LogicalResourceId']}: {event.get('ResourceStatusReason', '')}")
    return "; ".join(failed[:3]) or "CloudFormation gives no reason"


def _delete_retained(account: Account, planned: Plan, report: Report, say: Say) -> dict[str, str]:
    """Delete what the stacks left behind; the refusals by physical id, so that one of them stops nothing else."""
    refusals: dict[str, str] = {}
    for thing in planned.held:
        if not thing.retained or leftovers.condition(account, thing) != leftovers.EXISTS:
            continue  # gone already, or a key that already waits for its deletion
        say(f"deleting {thing}")
        try:
            leftovers.delete(account, thing)
        except TrainyardError as error:
            refusals[thing.physical_id] = str(error)
    streams = leftovers.job_streams(account, planned.tenant)
    if streams:
        leftovers.delete_job_streams(account, streams)
        report.deleted.append(f"{counted(len(streams), 'log stream')} of its jobs in {TRAINING_LOG_GROUP}")
    groups = leftovers.machine_log_groups(account, planned.environment.name, planned.tenant)
    leftovers.delete_log_groups(account, groups)
    report.deleted += [f"Logs::LogGroup {name}" for name in groups]
    return refusals


def _account_for(account: Account, planned: Plan, report: Report, why: Mapping[str, str]) -> list[Left]:
    """Ask for everything that the tenant held, whatever was believed to happen to it; what is still as it was."""
    there: list[Left] = []
    for thing in planned.held:
        state = leftovers.condition(account, thing)
        if state is None:
            report.deleted.append(str(thing))
            continue
        reason = why.get(thing.physical_id) or (
            state if state != leftovers.EXISTS else f"{state}; kept by the tenant's policy" if thing.retained else state
        )
        report.left.append(Left(thing.kind, thing.physical_id, reason))
        there += [report.left[-1]] if state == leftovers.EXISTS else []
    jobs = f"{planned.tenant}-*"
    streams = leftovers.job_streams(account, planned.tenant)
    if streams:
        why_streams = f"{len(streams)}; this account's administrators can read them until they are deleted"
        report.left.append(Left("log streams", f"{TRAINING_LOG_GROUP} {jobs}", why_streams))
    for name in leftovers.machine_log_groups(account, planned.environment.name, planned.tenant):
        report.left.append(
            Left("AWS::Logs::LogGroup", name, "HyperPod made it, under AWS's own key; " + leftovers.EXISTS)
        )
        there += [report.left[-1]]
    way = "SageMaker keeps their descriptions; who needs none of them: aws sagemaker delete-training-job"
    report.left.append(Left("training jobs", jobs, f"{way} --training-job-name NAME"))
    return there


def _folder(state_dir: Path) -> Path:
    return state_dir / "offboarding"


def _journal(state_dir: Path, environment: EnvironmentSpec, tenant: str) -> Path:
    return _folder(state_dir) / f"{environment.name}-{tenant}.json"


def _write(path: Path, journal: Journal) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # An interrupted removal is finished from it.
    write_whole(path, json.dumps(asdict(journal), indent=2))


def _remembered(journal: Path) -> Journal:
    try:
        content = json.loads(journal.read_text(encoding="utf-8"))
        content = {"held": content} if isinstance(content, list) else content  # as it was first written
        return Journal(**{**content, "held": tuple(Held(**item) for item in content["held"])})
    except FileNotFoundError:
        return Journal()
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{journal}: is not what a removal wrote ({error}); delete it and repeat") from None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
