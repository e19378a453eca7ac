"""A job does not start: AWS has no machine, or a limit is reached."""

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


def diagnose(evidence: Evidence) -> list[Finding]:
    """Capacity (AWS has none) or quota (somebody may raise it): they need different people."""
    hits = own_hits(evidence, "capacity", "quota")
    if not hits:
        told = clear_or_unknown(evidence, "neither capacity nor a quota is short", "lines")
        return [told, *over(evidence, "capacity", "quota"), *others(evidence, "capacity", "quota")]
    job = job_words(evidence)
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
    fewer = [str(one.num_hosts) for one in evidence.record.smaller] if evidence.record else []
    then = [f"trainyard resume {job} --set compute.instance_count={count}   # laid out already" for count in fewer[:1]]
    if evidence.num_hosts > 1 and not fewer:
        half = evidence.num_hosts // 2
        then.append(f"trainyard resume {job} --set compute.instance_count={half} --set parallelism=auto")
    then += [
        f"trainyard resume {job} --set compute.spot=false   # if it asks for spot capacity",
        f"trainyard resume {job}   # later; recovery.max_resumes does it by itself",
        "trainyard plan JOB.yaml --search   # other machines that would do",
    ]
    return [fault(evidence, "AWS has no capacity", shown(hits), then)]
