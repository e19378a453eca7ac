"""What diagnosing runbooks share: how a line that decides becomes a finding, and what is somebody else's."""

import shlex
from collections.abc import Callable, Sequence

from trainyard.operate.runbooks.evidence import Evidence
from trainyard.operate.runbooks.framework import Finding
from trainyard.operate.runbooks.log_lines import RUNBOOKS, Fault, Hit
from trainyard.spec.words import counted

MOST_SHOWN = 3
"""Lines of a kind in a report; all are in the evidence."""

Diagnose = Callable[[Evidence], list[Finding]]


def shown(hits: Sequence[Hit]) -> tuple[str, ...]:
    """Lines as a report has them, with their number in lines.txt."""
    told = [f"line {hit.number}: {hit.line[:400]}" for hit in hits[:MOST_SHOWN]]
    return (*told, *([f"and {counted(len(hits) - MOST_SHOWN, 'more line')}"] if len(hits) > MOST_SHOWN else []))


def own_hits(evidence: Evidence, *faults: Fault) -> list[Hit]:
    """The lines of these faults, if one of them decides; else none: the line that decides is another's affair."""
    decided = evidence.decisive
    if decided is None or decided.fault not in faults:
        return []
    return [hit for hit in evidence.hits if hit.fault in faults]


def own_warnings(evidence: Evidence, *faults: Fault) -> list[Hit]:
    """The lines of these faults that only warned: of a job that trains all the same, if no line decides."""
    if evidence.decisive is not None:
        return []
    return [hit for hit in evidence.hits if hit.fault in faults and hit.is_warning]


def over(evidence: Evidence, *faults: Fault) -> list[Finding]:
    """That one of these faults happened, where the job has run past it: no fault now, and still to be told."""
    found = [hit for hit in evidence.over if hit.fault in faults]
    if not found:
        return []
    return [Finding("clear", f"it happened, and a later start ran past it: {found[-1].meaning}", shown(found[-1:]))]


def fault(evidence: Evidence, words: str, decided_by: Sequence[str], then: Sequence[str] = ()) -> Finding:
    """A fault; of a job that has completed all the same it is told as one that is over."""
    if evidence.state == "Completed":
        return Finding("clear", f"is over, the job has completed: {words}", tuple(decided_by))
    return Finding("fault", words, tuple(decided_by), tuple(then))


def others(evidence: Evidence, *own: Fault) -> list[Finding]:
    """What else decides, with the runbook that looks into it."""
    decided = evidence.decisive
    if decided is None or decided.fault in own or evidence.state == "Completed":
        return []
    runbook = RUNBOOKS[decided.fault]
    subject = job_words(evidence) if evidence.record else "--log FILE"
    then = f"{runbook} {subject}" if runbook.startswith("scripts/") else there(evidence, *runbook.split())
    return [Finding("neighbour", decided.meaning, shown([decided]), (then,))]


def clear_or_unknown(evidence: Evidence, words: str, *needs: str) -> Finding:
    """That the fault is not there; or, where what shows it is missing, that nobody can say."""
    lacking = {name: why for name, why in evidence.missing.items() if name in needs}
    if not lacking:
        return Finding("clear", words)
    told = "; ".join(f"{name}: {why}" for name, why in lacking.items())
    return Finding("unknown", f"can't be told: {told}")


def there(evidence: Evidence, *words: str, of_all_tenants: bool = False) -> str:
    """A command on the job's environment instead of this machine's; of its tenant there, or of all."""
    where = list(evidence.where)
    if of_all_tenants and "--tenant" in where:
        at = where.index("--tenant")
        del where[at : at + 2]
    return shlex.join((*words, *where))


def job_words(evidence: Evidence) -> str:
    """The job's id as commands need it, with where it is: so that they can be pasted."""
    return shlex.join((evidence.record.job_id, *evidence.where)) if evidence.record else "JOB"
