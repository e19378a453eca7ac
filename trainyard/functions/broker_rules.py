"""What the broker lets through: a job's record, which its tenant can write as it likes, against the tenant's contract.

Pure: nothing is read here and no clock is asked. Every refusal is one line that reaches the person who launched.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainyard.functions.job_resumer import asked_attempt

MAX_NAME = 63
"""SageMaker: characters of a training job's name."""
MAX_ATTEMPTS = 99
MAX_CHANNELS = 19
"""SageMaker's 20, less the one that carries the spec."""
MAX_HOURS = 28 * 24
_CHANNEL_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
_JOB_ID = re.compile(r"[a-z0-9-]+-[0-9]{14}-[0-9a-f]{4}")
"""As the launcher makes them. Nothing else can end in `-r2`, and so be another job's attempt."""
_ATTEMPT = re.compile(r"-r[0-9]{1,2}$")
_JOB_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_PATH = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*/?")
_SPEC_NAME = re.compile(r"[0-9a-f]{16}")
_NO_DIGEST = "0" * 64


class Refused(Exception):
    """The request breaks a rule: one line, what and how to mend it."""


def check_job_id(job_id: Any, contract: Mapping[str, Any]) -> str:
    """The job's id; refused where it isn't one of this tenant's."""
    tenant = contract["tenant"]
    if not isinstance(job_id, str) or not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", job_id):
        raise Refused(f"job_id: {_shown(job_id)} is no job id (lower-case letters, digits and dashes)")
    if not job_id.startswith(f"{tenant}-") or len(job_id) > MAX_NAME:
        raise Refused(f"job_id: {_shown(job_id)} is no job of tenant {tenant}, whose jobs are named {tenant}-...")
    if not _JOB_ID.fullmatch(job_id):
        raise Refused(
            f"job_id: {_shown(job_id)} doesn't end as a job's id does (-YYYYMMDDhhmmss-1a2b); launch it again"
        )
    return job_id


def job_of(attempt: Any, contract: Mapping[str, Any]) -> str:
    """The id of the job that an attempt of this name is of; refused where it isn't one of this tenant's."""
    return check_job_id(_ATTEMPT.sub("", attempt) if isinstance(attempt, str) else attempt, contract)


def check_record(record: Any, job_id: str, contract: Mapping[str, Any]) -> dict[str, Any]:
    """What the request is made of, each part checked: `spec`, `name` of the attempt, `num_hosts`, `channels`, image,
    `asked`: the newest attempt that a person asked for (by the record: only meters go by it), `spec_name`: which of the
    job's specs it reads, "" by a launcher that had one place for all."""
    try:
        spec, attempt = record["resolved"]["spec"], record["attempts"][-1]
        number, num_hosts, compute = attempt["number"], record["resolved"]["num_hosts"], spec["compute"]
        given, _ = spec["name"], compute["instance_type"]
        said = (record["job_id"], record["tenant"], record["environment"], record["backend"])
        name, image, channels = attempt["training_job_name"], record["image"], record["channels"]
    except (KeyError, TypeError, IndexError) as error:
        raise Refused(f"job {job_id}: its record is no job record ({type(error).__name__}: {error})") from None
    own = (job_id, contract["tenant"], contract["environment"], "sagemaker")
    for what, one, other in zip(("job_id", "tenant", "environment", "backend"), said, own, strict=True):
        if one != other:
            raise Refused(f"job {job_id}: its record says {what} {_shown(one)}, not {other}")
    if not _is_whole(number) or not 1 <= number <= MAX_ATTEMPTS:
        raise Refused(f"job {job_id}: attempt {_shown(number)} is not between 1 and {MAX_ATTEMPTS}")
    expected = job_id if number == 1 else f"{job_id}-r{number}"
    if name != expected or len(expected) > MAX_NAME:
        raise Refused(f"job {job_id}: its record names attempt {number} {_shown(name)}, not {expected}")
    if not isinstance(given, str) or not _JOB_NAME.fullmatch(given):
        raise Refused(f"job {job_id}: name {_shown(given)} is no job's name")
    _check_compute(compute, num_hosts, contract)
    checked = [_check_channel(channel, contract) for channel in _list(channels, job_id)]
    names = [channel["name"] for channel in checked]
    if len(set(names)) < len(names) or len(names) > MAX_CHANNELS or "job" in names:
        raise Refused(f"job {job_id}: input channels {', '.join(names)}: up to {MAX_CHANNELS}, each once, none `job`")
    _check_sources(spec.get("data"), job_id)
    asked = asked_attempt(number, record.get("states"))
    spec_name = record.get("spec_name", "")
    if spec_name != "" and not (isinstance(spec_name, str) and _SPEC_NAME.fullmatch(spec_name)):
        raise Refused(
            f"job {job_id}: spec_name {_shown(spec_name)} of its record is not 16 hex digits; resume it again"
        )
    return {
        "spec": spec,
        "name": name,
        "asked": asked,
        "spec_name": spec_name,
        "num_hosts": num_hosts,
        "channels": checked,
        "image": str(image),
    }


def _check_sources(data: Any, job_id: str) -> None:
    """Each source of a job that streams has a path, by which its role is made."""
    if not isinstance(data, dict) or not data.get("streaming"):
        return
    for part in ("train", "validation"):
        sources = data.get(part) or []
        paths = [
            source.get("path") if isinstance(source, dict) else None
            for source in _list(sources, job_id, f"data.{part}")
        ]
        if not all(isinstance(path, str) for path in paths):
            raise Refused(f"job {job_id}: data.{part} of its record has a source without a path")


def _list(value: Any, job_id: str, of: str = "channels") -> list[Any]:
    if not isinstance(value, list):
        raise Refused(f"job {job_id}: its record has no list of {of}")
    return value


def _check_compute(compute: Any, num_hosts: Any, contract: Mapping[str, Any]) -> None:
    kind, hours, wait = compute.get("instance_type"), compute.get("max_hours"), compute.get("max_wait_hours")
    if not _is_whole(num_hosts) or num_hosts < 1 or num_hosts != compute.get("instance_count"):
        raise Refused(f"compute.instance_count: {_shown(num_hosts)} hosts is no number of machines")
    if not isinstance(kind, str):
        raise Refused(f"compute.instance_type: {_shown(kind)} is no instance type")
    if not _is_number(hours) or not 1 / 3600 <= hours <= MAX_HOURS:  # SageMaker counts whole seconds
        raise Refused(f"compute.max_hours: {_shown(hours)} is no running time")
    if hours > contract["max_job_hours"]:
        raise Refused(
            f"compute.max_hours {hours:g} is over the {contract['max_job_hours']:g} hours that tenant "
            f"{contract['tenant']}'s jobs may run: lower it (a stopped job resumes from its checkpoint)"
        )
    if not isinstance(compute.get("spot"), bool):
        raise Refused(f"compute.spot: {_shown(compute.get('spot'))} is neither true nor false")
    if wait is not None and (not _is_number(wait) or not hours <= wait <= 2 * MAX_HOURS):
        raise Refused(f"compute.max_wait_hours: {_shown(wait)} is not between max_hours and {2 * MAX_HOURS}")
    check_capacity(compute, num_hosts, contract)


def check_capacity(compute: Mapping[str, Any], num_hosts: int, contract: Mapping[str, Any]) -> None:
    """Refused where the job keeps its machines for longer than the tenant's may, or asks for a training plan that is
    none of the tenant's or doesn't hold its machines."""
    warm, plan, tenant = compute.get("keep_alive_minutes"), compute.get("training_plan"), contract["tenant"]
    if warm is not None:
        most = contract.get("warm_pool_minutes", 0)
        if not _is_number(warm) or not 0 < warm <= most:
            raise Refused(
                f"compute.keep_alive_minutes {_shown(warm)}: tenant {tenant}'s jobs may keep their machines for up to "
                f"{most:g} minutes; lower it, or raise warm_pool_minutes in the environment file"
            )
    if plan is not None:
        known = contract.get("training_plans") or {}
        if not isinstance(plan, str) or plan not in known:
            raise Refused(
                f"compute.training_plan {_shown(plan)}: is none of tenant {tenant}'s ({', '.join(known) or 'none'}); "
                "name one, or add it to training_plans in the environment file"
            )
        if compute["instance_type"] != known[plan]["instance_type"] or num_hosts > known[plan]["max_instances"]:
            raise Refused(
                f"compute.training_plan {plan}: holds {known[plan]['max_instances']} x {known[plan]['instance_type']}, "
                f"and the job asks for {num_hosts} x {compute['instance_type']}"
            )
    if bool(compute["spot"]) + (warm is not None) + (plan is not None) > 1:
        raise Refused("compute: spot, keep_alive_minutes and training_plan exclude each other; leave all but one out")


def _check_channel(channel: Any, contract: Mapping[str, Any]) -> dict[str, str]:
    if not isinstance(channel, dict) or not all(
        isinstance(channel.get(key), str) for key in ("name", "kind", "location")
    ):
        raise Refused(f"input channel {_shown(channel)}: needs name, kind and location")
    name, kind, location = channel["name"], channel["kind"], channel["location"]
    if not _CHANNEL_NAME.fullmatch(name):
        raise Refused(f"input channel {_shown(name)}: is no channel's name")
    if kind == "fsx":
        if not _PATH.fullmatch(location) or {".", ".."} & set(location.split("/")):
            raise Refused(f"input channel {name}: {_shown(location)} is no path of the file system")
    elif kind == "s3":
        buckets = [bucket for bucket in contract["buckets"].values() if bucket]
        if not location.startswith(tuple(f"s3://{bucket}/" for bucket in buckets)):
            raise Refused(
                f"input channel {name}: {_shown(location)} is outside of tenant {contract['tenant']}'s buckets "
                f"({', '.join(buckets)}); copy the data there"
            )
    else:
        raise Refused(f"input channel {name}: kind {_shown(kind)} is neither s3 nor fsx")
    return {"name": name, "kind": kind, "location": location}


def check_image(image: str, released: Iterable[str], *, emulated: bool) -> str:
    """The image; refused where the platform never released it. The newest of `released` is the last."""
    images = list(released)
    if image not in images:
        raise Refused(
            f"image {_shown(image)}: is none that the platform has released (now: {images[-1]}); launch again"
        )
    if image.endswith(_NO_DIGEST) and not emulated:
        raise Refused("image: the platform has released none yet")
    return image


def without_reused(holders: Iterable[Mapping[str, Any]], kind: str, count: int) -> list[Mapping[str, Any]]:
    """The holders less one that keeps as many machines of the type warm as the job asks for: it gets those."""
    listed = list(holders)
    fitting = (job for job in listed if job.get("warm") and (job["type"], job["count"]) == (kind, count))
    reused = next(fitting, None)
    return [job for job in listed if job is not reused]


def check_quota(
    compute: Mapping[str, Any],
    num_hosts: int,
    contract: Mapping[str, Any],
    holders: Iterable[Mapping[str, Any]],
) -> str:
    """The queue that takes the job beside its `holders` (`name`, `type`, `count` of each job that runs, waits or keeps
    its machines warm)."""
    kind, wanted, holding = compute["instance_type"], compute.get("queue"), list(holders)
    queues = {name: queue for name, queue in contract["queues"].items() if wanted in (None, name)}
    if not queues:
        raise Refused(f"compute.queue {_shown(wanted)}: tenant {contract['tenant']} has no such queue")
    offering = {name: queue for name, queue in queues.items() if kind in queue["instance_types"]}
    if not offering:
        raise Refused(f"compute.instance_type {_shown(kind)}: no queue of tenant {contract['tenant']} offers it")
    most = max(queue["max_instances"] for queue in offering.values())
    if num_hosts > most:
        raise Refused(
            f"compute.instance_count {num_hosts}: over the quota of tenant {contract['tenant']}, which is "
            f"{most} x {kind}; use fewer, or raise max_instances of the queue in the environment file"
        )
    full = []
    for name, queue in offering.items():
        if num_hosts > 1 and not queue["multi_node"]:
            full.append(f"queue {name} takes one-host jobs only")
            continue
        jobs = [job for job in holding if job["type"] in queue["instance_types"]]
        held = sum(job["count"] for job in jobs)
        if held + num_hosts <= queue["max_instances"]:
            return str(name)
        listed = ", ".join(f"{job['name']} ({job['count']})" for job in jobs)
        full.append(
            f"{held} of the {queue['max_instances']} instances of queue {name} are held by {listed or 'nobody'}"
            + _also_of(jobs, name, contract["queues"])
        )
    raise Refused(
        f"compute.instance_count {num_hosts}: over the quota of tenant {contract['tenant']}: {'; '.join(full)}; wait "
        "until one ends, stop one (trainyard stop), or raise max_instances of the queue in the environment file"
    )


def _also_of(jobs: Iterable[Mapping[str, Any]], name: str, queues: Mapping[str, Any]) -> str:
    """What a queue's holders may be held in besides: of a job that runs SageMaker tells the type, and no queue."""
    kinds = {job["type"] for job in jobs}
    others = [other for other, queue in queues.items() if other != name and kinds & set(queue["instance_types"])]
    return f" (a job counts in each queue that offers its type: {', '.join([name, *others])})" if others else ""


def check_share(compute: Mapping[str, Any], num_hosts: int, contract: Mapping[str, Any]) -> dict[str, Any]:
    """The tenant's share of its type's queue; refused where a queue of the tenant's would never take the job. Whether
    there is room now is Batch's to see."""
    check_quota(compute, num_hosts, contract, ())
    kind = compute["instance_type"]
    share = contract["shares"].get(kind)
    if share is None:
        raise Refused(f"compute.instance_type {_shown(kind)}: tenant {contract['tenant']} has no share of its queue")
    if num_hosts > share["most"]:
        raise Refused(
            f"compute.instance_count {num_hosts}: tenant {contract['tenant']} may hold up to {share['most']} x {kind}, "
            "borrowed ones with them; use fewer, or raise max_instances of the queue in the environment file"
        )
    return dict(share)


def check_resumes(spec: Mapping[str, Any]) -> None:
    """Refused where the record's recovery.max_resumes, by which Batch starts the job again, is no such number."""
    recovery = spec.get("recovery") or {}
    resumes = recovery.get("max_resumes", 0) if isinstance(recovery, dict) else -1
    if not _is_whole(resumes) or not 0 <= resumes <= MAX_ATTEMPTS:
        raise Refused(f"recovery.max_resumes: {_shown(resumes)} is not between 0 and {MAX_ATTEMPTS}")


def check_budget(
    job: Mapping[str, Any],
    others: Iterable[Mapping[str, Any]],
    contract: Mapping[str, Any],
    month: str,
    *,
    now_seconds: float,
) -> list[str]:
    """Refused where the month's dollars or GPU-hours don't let the job start; else what is to be told of them.

    What has ended counts as billed. With `when_spent: finish` what runs, and this job, count at their longest: nobody
    can start more than the rest. With `stop` the meter ends jobs at 100 %, so that only what ran up to `now_seconds`
    (epoch) counts. A type without a known price counts no dollars.
    """
    entries, warnings = list(others), []
    is_stopped = contract.get("when_spent") == "stop"
    for unit, field, most, rate, told in _quotas(contract):
        could = _amount(job, rate, job["seconds"])
        if most is None or not could:
            continue
        ended = [other for other in entries if other["billed"] is not None]
        spent = sum(_amount(other, rate, other.get(told, other["billed"])) for other in ended)
        running = [other for other in entries if other["billed"] is None]
        if is_stopped:
            spent += sum(_amount(other, rate, _elapsed(other, now_seconds)) for other in running)
            _refuse_spent(contract, month, spent=spent, most=most, unit=unit, field=field)
            used = spent
        else:
            promised = sum(_amount(other, rate, other["seconds"]) for other in running)
            used = spent + promised + could
            if used > most:
                verb = "cost" if unit == "USD" else "take"
                raise Refused(
                    f"budget of tenant {contract['tenant']}: this job could {verb} up to {could:,.2f} {unit} ("
                    f"{job['count']} x {job['type']} for {job['seconds'] / 3600:g} h); of {month}'s {most:,.2f} "
                    f"{unit}, {spent:,.2f} are spent and {promised:,.2f} could go to jobs that run; lower "
                    f"compute.max_hours, wait until one ends, or raise {field} in the environment file"
                )
        if used >= most * contract.get("warn_at_percent", 100.0) / 100:
            words = "are spent" if is_stopped else "are spent or promised with this job"
            warnings.append(f"{used / most:.0%} of {month}'s {most:,.2f} {unit} {words}")
    return warnings


def _quotas(contract: Mapping[str, Any]) -> tuple[tuple[str, str, float | None, str, str], ...]:
    """(unit, the environment's field, how much a month; of a ledger's entry: what an instance-hour takes, and which
    seconds count once it has ended: what spot saves is money, not machines)."""
    gpu_hours = contract.get("monthly_gpu_hours")
    return (
        ("USD", "budget.monthly_usd", contract["monthly_usd"], "usd_per_hour", "billed"),
        ("GPU-hours", "budget.monthly_gpu_hours", gpu_hours, "gpus", "held"),
    )


def _refuse_spent(contract: Mapping[str, Any], month: str, *, spent: float, most: float, unit: str, field: str) -> None:
    if spent >= most:
        raise Refused(
            f"budget of tenant {contract['tenant']}: {spent:,.2f} of {month}'s {most:,.2f} {unit} are spent; wait for "
            f"the next month, or raise {field} in the environment file"
        )


def _elapsed(job: Mapping[str, Any], now_seconds: float) -> float:
    """For how long a job has had machines. One that only waits for them takes nothing; nor does one in a queue, which
    may wait: what that takes the meter sees, which ends it in time."""
    started = job.get("started")
    if started is None or "queue" in job:
        return 0.0
    without = job.get("interrupted", 0) + now_seconds - job.get("lost", now_seconds)
    return float(min(max(0.0, now_seconds - started - without), job["seconds"]))


def remarks(entry: Mapping[str, Any], warnings: list[str]) -> dict[str, str]:
    """What the answer and the audit say beside: a budget that is nearly spent, a type that none holds."""
    found = {"warning": "; ".join(warnings)} if warnings else {}
    if entry["usd_per_hour"] is None:
        words = f"no price of {entry['type']} is known here: what it costs is not held against budget.monthly_usd"
        found["uncapped"] = words
    return found


def _amount(job: Mapping[str, Any], rate: str, seconds: float) -> float:
    """Of a ledger's entry over so many seconds; one from before GPUs were counted has none."""
    return float((job.get(rate) or 0.0) * job["count"] * seconds / 3600)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """A value from outside in one short line."""
    text = " ".join(str(value).split())
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
