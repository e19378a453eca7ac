"""A job does not start: AWS has no machine, or a limit is reached."""

from trainyard.launch.record import CREATED
from trainyard.launch.spending import WAITING
from trainyard.operate.runbooks.diagnosis import (
    clear_or_unknown,
    fault,
    job_words,
    others,
    over,
    own_hits,
    shown,
    there,
)
from trainyard.operate.runbooks.evidence import Evidence
from trainyard.operate.runbooks.framework import Finding
from trainyard.spec.words import counted


def diagnose(evidence: Evidence) -> list[Finding]:
    """Capacity (AWS has none) or quota (somebody may raise it): they need different people."""
    hits = own_hits(evidence, "capacity", "quota")
    if not hits:
        told = _waits(evidence) if evidence.is_waiting else _has_machines(evidence)
        return [told, *over(evidence, "capacity", "quota"), *others(evidence, "capacity", "quota")]
    decided = evidence.decisive
    if decided is not None and decided.name == "quota-of-tenant":
        then = [
            f"{there(evidence, 'trainyard', 'jobs')}   # which of the tenant's jobs hold its machines",
            "trainyard deploy ENVIRONMENT.yaml   # once max_instances of the tenant's queue was raised there",
        ]
        return [fault(evidence, "the tenant's quota is short", shown(hits), then)]
    if decided is not None and decided.fault == "quota":
        then = [
            # The account's quota is all tenants'.
            f"{there(evidence, 'trainyard', 'jobs', of_all_tenants=True)}   # who holds the machines",
            "aws service-quotas list-service-quotas --service-code sagemaker --query"
            f" \"Quotas[?contains(QuotaName, '{evidence.instance_type or 'TYPE'} for training job usage')]\"",
            "aws service-quotas request-service-quota-increase --service-code sagemaker --quota-code CODE"
            " --desired-value N",
        ]
        return [fault(evidence, "a quota is short", shown(hits), then)]
    return [fault(evidence, "AWS has no capacity", shown(hits), _elsewhere(evidence))]


def _elsewhere(evidence: Evidence) -> list[str]:
    """What a job can do that gets no machines; one that still waits is stopped first."""
    job = job_words(evidence)
    stopped = f"trainyard stop {job} --wait && " if evidence.is_waiting else ""
    fewer = [str(one.num_hosts) for one in evidence.record.smaller] if evidence.record else []
    then = [
        f"{stopped}trainyard resume {job} --set compute.instance_count={count}   # laid out already"
        for count in fewer[:1]
    ]
    if evidence.num_hosts > 1 and not fewer:
        half = evidence.num_hosts // 2
        then.append(f"{stopped}trainyard resume {job} --set compute.instance_count={half} --set parallelism=auto")
    then.append(f"{stopped}trainyard resume {job} --set compute.spot=false   # if it asks for spot capacity")
    if not stopped:
        then.append(f"trainyard resume {job}   # later; recovery.max_resumes does it by itself")
    return [*then, "trainyard plan JOB.yaml --search   # other machines that would do"]


def _waits(evidence: Evidence) -> Finding:
    """A job that waits isn't refused: its state, and for how long, is all that AWS tells."""
    seconds, most = evidence.waited_seconds, evidence.most_waited_seconds
    state = ": ".join(word for word in (evidence.state, evidence.note) if word)
    if evidence.state == CREATED:
        words = "it isn't submitted: it waits for its launcher, not for machines"
        return Finding("unknown", words, (state,), (f"trainyard status {job_words(evidence)}",))
    if seconds is None:
        return Finding("unknown", "it waits for machines, and since when isn't known", (state,))
    words = f"it has waited for machines for {counted(round(seconds / 60), 'minute')}, and still waits"
    if seconds <= most:
        return Finding("clear", f"{words}: its tenant's jobs may for {most / 60:.0f}", (state,))
    held = f"{there(evidence, 'trainyard', 'jobs')}   # which of the tenant's jobs hold machines"
    return fault(evidence, words, (state,), (held, *_elsewhere(evidence)))


def _has_machines(evidence: Evidence) -> Finding:
    """The alarm on waits rings when they are over: how long it was is still to be told."""
    told = clear_or_unknown(evidence, "neither capacity nor a quota is short", "lines")
    seconds = evidence.waited_seconds
    if not evidence.has_had_machines and evidence.record is not None and seconds is not None:
        return _never_had_any(evidence, seconds)
    if told.kind != "clear" or seconds is None or seconds <= evidence.most_waited_seconds:
        return told
    words = f"{told.words}; it had its machines after {counted(round(seconds / 60), 'minute')}"
    return Finding("clear", words, _states(evidence), (f"trainyard status {job_words(evidence)}",))


def _never_had_any(evidence: Evidence, seconds: float) -> Finding:
    """Its wait ended with the job: nobody says that machines would have come."""
    words = f"it ended after {counted(round(seconds / 60), 'minute')} without having had any machine"
    decided_by = (*_states(evidence), ": ".join(word for word in (evidence.state, evidence.note) if word))
    if seconds <= evidence.most_waited_seconds:
        most = f"its tenant's jobs may wait for {evidence.most_waited_seconds / 60:.0f}"
        return Finding("clear", f"{words}: {most}", decided_by)
    held = f"{there(evidence, 'trainyard', 'jobs')}   # which of the tenant's jobs hold machines"
    return fault(evidence, words, decided_by, (held, *_elsewhere(evidence)))


def _states(evidence: Evidence) -> tuple[str, ...]:
    """Of the newest attempt's wait."""
    record = evidence.record
    if record is None:
        return ()
    mine = [one for one in record.states if one.attempt == record.attempt.number and one.state in WAITING]
    return tuple(f"{one.at} {one.state}{f': {one.note}' if one.note else ''}" for one in mine)
