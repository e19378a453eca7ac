"""The loss is no number, jumped, or climbs: which step, and which checkpoint lies before it?"""

from trainyard.operate.runbooks.diagnosis import clear_or_unknown, fault, job_words, others, over, own_hits, shown
from trainyard.operate.runbooks.evidence import Evidence
from trainyard.operate.runbooks.figures import diverged
from trainyard.operate.runbooks.framework import Finding
from trainyard.spec.words import counted


def diagnose(evidence: Evidence) -> list[Finding]:
    """By the trainer's own word of an anomaly, else by the losses."""
    hits, by_rows = own_hits(evidence, "diverged"), diverged(evidence.rows)
    if not hits and not by_rows:
        told = clear_or_unknown(evidence, "the loss is that of a job that learns", "figures", "job")
        return [told, *over(evidence, "diverged"), *others(evidence, "diverged")]
    job = job_words(evidence)
    good = [one for one in evidence.checkpoints if one.is_good]
    before = "no checkpoint"
    if good:
        steps = f"steps {good[0].step} to {good[-1].step}" if good[1:] else f"step {good[0].step}"
        before = f"{counted(len(good), 'good checkpoint')}, of {steps}"
    before += f" ({evidence.missing['checkpoints']})" if "checkpoints" in evidence.missing else ""
    anew = (
        "trainyard launch JOB.yaml --set training.on_anomaly=rollback --set training.spike_factor=5"
        " --set training.learning_rate=HALF"
    )
    from_before = [
        f"trainyard checkpoints list {job}   # one from well before",
        f"trainyard checkpoints copy {job} FOLDER --step N   # then a new job from there:",
        f"{anew} --set checkpoint.destination=FOLDER",
    ]
    then = [
        "read anomalies/step-N/rank-R.json in the evidence folder: the data that the step read, and its random numbers",
        # A job that diverged before its first save has nothing to copy: it begins anew.
        *(from_before if good or "checkpoints" in evidence.missing else [anew]),
    ]
    decided = [*shown(hits), *([by_rows] if by_rows else []), before]
    return [fault(evidence, "the loss diverged", decided, then), *others(evidence, "diverged")]
