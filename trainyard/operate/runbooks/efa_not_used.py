"""A job over several hosts talks over TCP, or over a part of its EFA cards: it works, and crawls."""

from trainyard.errors import TrainyardError
from trainyard.hardware import instance
from trainyard.launch.record import TERMINAL_STATES
from trainyard.operate.runbooks.diagnosis import fault, job_words, others, over, own_hits, own_warnings, shown, there
from trainyard.operate.runbooks.evidence import Evidence
from trainyard.operate.runbooks.framework import Finding
from trainyard.operate.runbooks.log_lines import Fault, transport


def diagnose(evidence: Evidence) -> list[Finding]:
    """By our own refusal, by NCCL's choice of provider, by the count of cards against the table, by the floor."""
    job = job_words(evidence)
    mend = (
        f"{there(evidence, 'trainyard', 'doctor')}   # the EFA group must let itself in and out, all protocols",
        "fi_info -p efa   # on the machines, in the container: one `domain:` a card",
        "torchrun --nproc-per-node 8 -m trainer.collectives "
        f"--instance-type {evidence.instance_type or 'TYPE'}   # over both hosts: the floors",
        f"scripts/check_image   # EFA's user space and the plugin are in the image that {job} ran?",
    )
    if refused := own_hits(evidence, "efa_missing"):
        return [fault(evidence, "EFA cards are missing: the job refused to start without them", shown(refused), mend)]
    seen = transport(evidence.all_lines)
    if seen.uses_sockets or any(not name.startswith("efa") for name in seen.providers):
        chosen = "NCCL's own sockets" if seen.uses_sockets else f"libfabric's {', '.join(seen.providers)}"
        if evidence.num_hosts > 1 or evidence.record is None:
            return [fault(evidence, f"TCP instead of EFA: {chosen}", (seen.line,), mend)]
        return [Finding("clear", "one host: its ranks need no network", (seen.line,))]
    expected = _expected(evidence.instance_type)
    if seen.num_nics is not None and expected is not None and seen.num_nics < expected:
        words = f"a part of EFA: {seen.num_nics} of {expected} cards of {evidence.instance_type}"
        return [fault(evidence, words, (seen.line,), mend)]
    # Of the job's own measurement or of the collectives'; inside a host there is no EFA.
    if below := own_hits(evidence, "slow_network") or own_warnings(evidence, "slow_network"):
        return [fault(evidence, "the network is below its floor", shown(below), mend)]
    told = _nothing(evidence, bool(seen.providers), seen.line, expected)
    own: tuple[Fault, ...] = ("efa_missing", "slow_network")
    return [told, *over(evidence, *own), *others(evidence, *own)]


def _nothing(evidence: Evidence, told: bool, line: str, expected: int | None) -> Finding:
    if told:
        count = "" if expected is None else f", all of the {expected} cards that the type has"
        return Finding("clear", f"EFA is used{count if 'found' in line else ''}", (line,))
    if evidence.record is not None and evidence.num_hosts == 1:
        return Finding("clear", "one host: its ranks need no network")
    job, asked = job_words(evidence), "--set preflight.nccl_log=true"
    again = f"trainyard resume {job} {asked}"
    if evidence.state == "Completed" or evidence.record is None:
        again = f"trainyard launch JOB.yaml {asked}"
    elif evidence.state not in TERMINAL_STATES:
        again = f"trainyard stop {job} --wait; {again}"
    return Finding(
        "unknown",
        "NCCL said nothing of its network: let it tell (preflight.nccl_log), or run the collectives' floors",
        then=(
            again,
            f"torchrun --nproc-per-node 8 -m trainer.collectives --instance-type {evidence.instance_type or 'TYPE'}",
        ),
    )


def _expected(instance_type: str) -> int | None:
    try:
        return instance(instance_type).efa_interfaces if instance_type else None
    except TrainyardError:
        return None
