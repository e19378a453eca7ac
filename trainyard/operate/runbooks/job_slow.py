"""A job is slower than it should be: is it data, communication, a straggler, throttling, or its saves?"""

from trainyard.operate.runbooks.diagnosis import clear_or_unknown, fault, job_words, others
from trainyard.operate.runbooks.evidence import Evidence
from trainyard.operate.runbooks.figures import Cause, Speed, are_cold, speed
from trainyard.operate.runbooks.framework import Finding

NEXT: dict[Cause, tuple[str, ...]] = {
    "data": (
        "scripts/runbooks/fsx_full_or_slow {job}",
        "trainyard report {job}   # is it every step, or now and then?",
    ),
    "communication": (
        "scripts/runbooks/efa_not_used {job}",
        "torchrun --nproc-per-node 8 -m trainer.collectives --instance-type {type}   # on the machines: the floors",
    ),
    "straggler": (
        "scripts/runbooks/bad_node {job} --log KERNEL_LOG_OF_THAT_HOST",
        "trainyard stop {job} --wait && trainyard resume {job}   # other machines",
    ),
    "throttling": (
        "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER   # on the machines: which clocks event is active",
        "scripts/runbooks/bad_node {job} --log KERNEL_LOG_OF_THE_HOSTS",
    ),
    "checkpoint": (
        "trainyard checkpoints list {job}",
        "trainyard stop {job} --wait && trainyard resume {job} --set checkpoint.every_steps=auto",
    ),
}


def diagnose(evidence: Evidence) -> list[Finding]:
    """One finding for each cause; clear where the job keeps up with its plan, or with its own better times."""
    found = speed(evidence.rows, evidence.planned, evidence.least_of_plan)
    if found is None:
        nothing = clear_or_unknown(evidence, "no step was made yet: nothing to measure", "figures", "job")
        return [nothing, *others(evidence, "straggler")]
    if are_cold(evidence.rows):
        unjudged = "can't be told: an attempt's first steps load and compile, and there are no others"
        return [Finding("unknown", unjudged), *others(evidence, "straggler")]
    words = {"job": job_words(evidence), "type": evidence.instance_type or "TYPE"}
    findings = [
        fault(
            evidence,
            f"slow: {one.cause}",
            (one.words, found.as_line()),
            tuple(command.format(**words) for command in NEXT[one.cause]),
        )
        for one in found.slow
    ]
    return [*(findings or [_no_cause(evidence, found)]), *others(evidence, "straggler")]


def _no_cause(evidence: Evidence, found: Speed) -> Finding:
    if not found.is_below_plan:
        return Finding("clear", found.as_line())
    words = "slow: below the plan's speed, and no phase of the step shows why; is the plan right for this model?"
    job = job_words(evidence)
    return fault(evidence, words, (found.as_line(),), (f"trainyard compare {job}", f"trainyard status {job}"))
