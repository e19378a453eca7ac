"""A job makes no steps: a rank stands still, and the others wait for it."""

from trainyard.operate.runbooks.diagnosis import clear_or_unknown, fault, job_words, others, over, own_hits, shown
from trainyard.operate.runbooks.evidence import Evidence
from trainyard.operate.runbooks.framework import Finding


def diagnose(evidence: Evidence) -> list[Finding]:
    """By what the host or NCCL's watchdog said, or by the silence of a job that should run."""
    job = job_words(evidence)
    again = (f"trainyard stop {job} --wait; trainyard resume {job}",)
    if hits := own_hits(evidence, "hung"):
        # The host's own finding names the rank and its line; the watchdog's only who waited.
        best = sorted(hits, key=lambda hit: hit.name != "stand-still")
        look = (
            "read stacks/ in the evidence folder: rank-R.txt is where rank R stands, rank-R-collectives.json its calls"
        )
        stands = best[0].name == "stand-still"
        words = "a rank stood still" if stands else "ranks waited in a collective until NCCL's watchdog gave up"
        finding = fault(evidence, words, shown(best), (*([look] if stands else []), *again))
        return [finding]
    found = others(evidence, "hung")
    silent = evidence.silent_seconds
    if silent is not None and silent > evidence.hang_seconds and not found:
        words = f"no step for {silent:.0f} s, and nobody has noticed"
        limit = f"the newest step is {silent:.0f} s old; the job's limit is {evidence.hang_seconds:.0f} s"
        return [fault(evidence, words, (limit,), (f"trainyard logs {job} | tail -50", *again))]
    told = "no rank stood still"
    if evidence.is_running and silent is not None:
        told = f"steps are made: the newest is {silent:.0f} s old, the job's limit {evidence.hang_seconds:.0f} s"
    return [clear_or_unknown(evidence, told, "lines", "times"), *over(evidence, "hung"), *found]
