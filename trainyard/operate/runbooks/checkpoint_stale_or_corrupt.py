"""The newest checkpoint is old, or not whole: what would a restart go back to?"""

from trainyard.operate.runbooks.diagnosis import (
    MOST_SHOWN,
    clear_or_unknown,
    fault,
    job_words,
    others,
    shown,
    there,
)
from trainyard.operate.runbooks.evidence import Evidence
from trainyard.operate.runbooks.framework import Finding
from trainyard.spec.words import counted

LATE = 2.0
"""So many intervals without a save is late: one save may be on its way, and one may fail."""
LEAST_SECONDS = 60.0
"""By a running job's lines: saves beside fast steps may be behind by as many."""
AUTO_MINUTES = 20.0
"""Where the interval is automatic: the objective's own limit (trainyard.spec.meters, checkpoint-age)."""


def diagnose(evidence: Evidence) -> list[Finding]:
    """What is spoiled, by hash; how much would be lost, by the steps since."""
    unknown = "checkpoints" in evidence.missing
    if (unknown and not evidence.checkpoints) or evidence.record is None:
        return [clear_or_unknown(evidence, "", "checkpoints", "job"), *others(evidence)]
    findings = [*_spoiled(evidence), *_late(evidence)]
    if findings:
        return [*findings, *others(evidence)]
    if unknown:  # some can't be read: what they hold nobody says
        return [clear_or_unknown(evidence, "", "checkpoints", "job"), *others(evidence)]
    good = [one for one in evidence.checkpoints if one.is_good]
    words = f"the newest, of step {good[-1].step}, is whole: every byte was hashed" if good else "none is due yet"
    if evidence.unsaved_seconds is not None:
        words += f"; {evidence.unsaved_seconds:.0f} s since " + ("its step" if good else "the first step")
    return [Finding("clear", words), *others(evidence)]


def _spoiled(evidence: Evidence) -> list[Finding]:
    good = [one for one in evidence.checkpoints if one.is_good]
    newest_good = good[-1].step if good else 0
    # A folder without a marker that is newer than all good ones may be a save on its way.
    bad = [one for one in evidence.checkpoints if one.problem and (one.committed or not evidence.is_running)]
    bad = [one for one in bad if one.is_readable and (one.committed or one.step < newest_good)]
    unread = [one for one in evidence.checkpoints if not one.is_readable]
    lines = [hit for hit in evidence.hits if hit.fault == "checkpoint_spoiled"]
    if not bad and not (lines and not good and not unread):
        return []
    job = job_words(evidence)
    told = [f"step {one.step}: {one.problem}" for one in bad[-3:]]
    goes_back = f"a restart goes back to step {newest_good}" if good else "not one is whole: a restart begins anew"
    if unread and unread[-1].step > newest_good:
        goes_back = f"step {unread[-1].step} can't be read, and may be what a restart goes back to"
    then = [f"trainyard checkpoints verify {job}", f"trainyard checkpoints list {job}"]
    if evidence.record and evidence.record.checkpoint_destination.startswith("s3://"):
        bucket, _, prefix = evidence.record.checkpoint_destination.removeprefix("s3://").partition("/")
        then.append(
            f"aws s3api list-object-versions --bucket {bucket} --prefix {prefix}   # what was overwritten or "
            "deleted is there for storage.old_version_days"
        )
    return [fault(evidence, f"checkpoints are spoiled; {goes_back}", (*told, *shown(lines)), then)]


def _late(evidence: Evidence) -> list[Finding]:
    record = evidence.record
    assert record is not None
    failed = [hit for hit in evidence.hits if hit.fault == "checkpoint_failed"]
    newest = max((one.step for one in evidence.checkpoints if one.committed), default=0)
    made = [row for row in evidence.rows if int(row.get("step", 0)) > newest]
    # The figures of a job on AWS come with its checkpoints: none is of a step after the newest one. Its lines are new.
    num_steps = max(len(made), evidence.told_step - newest if evidence.is_running else 0)
    seconds = sum(float(row.get("step_seconds") or 0.0) for row in made) + (evidence.silent_seconds or 0.0)
    seconds = max(seconds, evidence.unsaved_seconds or 0.0)
    if not _is_late(evidence, num_steps, seconds):
        return []
    told = f"{counted(num_steps, 'step')} ({seconds:.0f} s) since the newest commit, of step {newest}"
    if not newest:
        told = f"{counted(num_steps, 'step')} ({seconds:.0f} s), and no commit"
    job, doctor = job_words(evidence), there(evidence, "trainyard", "doctor")
    then = [f"trainyard logs {job} | grep ' checkpoint '", f"{doctor}   # buckets and keys"]
    own = record.resolved.spec.checkpoint.every_minutes
    if isinstance(own, int | float) and 60 * own > evidence.most_unsaved_seconds:
        then.append(
            f"trainyard stop {job} --wait && trainyard resume {job} --set checkpoint.every_minutes="
            f"{max(1.0, evidence.most_unsaved_seconds / 120):.0f}   # its own interval is {counted(own, 'minute')}"
        )
    words = "the newest checkpoint is stale"
    if (evidence.unsaved_seconds or 0.0) > evidence.most_unsaved_seconds:
        words += f": the tenant's may be {evidence.most_unsaved_seconds:.0f} s old"
    return [fault(evidence, words, (told, *shown(failed[-MOST_SHOWN:])), then)]


def _is_late(evidence: Evidence, num_steps: int, seconds: float) -> bool:
    """By the job's own interval; and by what its tenant is promised, as the alarm that rings does."""
    assert evidence.record is not None
    settings = evidence.record.resolved.spec.checkpoint
    minutes = settings.every_minutes if isinstance(settings.every_minutes, int | float) else None
    steps = settings.every_steps if isinstance(settings.every_steps, int) else None
    unsaved = evidence.unsaved_seconds
    if steps and num_steps > LATE * steps and (unsaved is None or unsaved > LEAST_SECONDS):
        return True
    if unsaved is not None and unsaved > evidence.most_unsaved_seconds:
        return True
    return (steps is None or minutes is not None) and seconds > 60 * LATE * (minutes or AUTO_MINUTES)
