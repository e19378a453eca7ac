"""A GPU or its machine is broken, or a host was lost: classify its Xid errors, take it out, go on with another."""

import argparse

from trainyard.errors import AwsRefusedError, InputError
from trainyard.launch.cluster_shell import ClusterShell, HereShell, has_slurm_here, shell_of
from trainyard.launch.queue_backend import QUEUED
from trainyard.launch.record import CREATED, SUBMITTED, TERMINAL_STATES, JobRecord
from trainyard.operate.runbooks.diagnosis import (
    clear_or_unknown,
    fault,
    job_words,
    others,
    over,
    own_hits,
    own_warnings,
    shown,
)
from trainyard.operate.runbooks.evidence import Evidence
from trainyard.operate.runbooks.framework import Finding, Step, command
from trainyard.operate.runbooks.log_lines import Fault, XidSeen, xids
from trainyard.operate.runbooks.runbook import Context, Runbook

SUMMARY = "Xid errors of a GPU: classify, quarantine, replace"
ADVICE = {
    "replace": "quarantine the machine and take another",
    "reset": "take the job off the machine; a reset of the GPU (or another machine) mends it",
    "watch": "go on; reset the GPU when it is idle, and replace it if it comes again",
    "application": "look at the program: the GPU is as good as before",
}
ORDER = ("replace", "reset", "watch", "application")
COMES_AGAIN = 3
"""So many errors that a GPU has mended itself, within one log, make it one to take out: our own choice."""
_DRAIN = """\
drain() { "$@" scontrol update NodeName="$node" State=DRAIN Reason="$reason" 2>&1; }
node=$1 reason=$2
said=$(drain env) && exit
case "$said" in
*[Ii]nvalid\\ user*|*ermission\\ denied*)
  said=$(drain sudo -n env PATH="$PATH" ${SLURM_CONF:+SLURM_CONF="$SLURM_CONF"}) && exit ;;
esac
echo "$said" >&2
exit 1
"""
"""Slurm lets its own user, its operators and root drain a machine, and nobody who only submits jobs."""


def diagnose(evidence: Evidence) -> list[Finding]:
    """Every Xid by what it asks for. A machine is bad where one asks for a reset or a replacement, where the job's own
    measurement found its GPUs' links below their floor, or where a host was lost and no line says why."""
    passed = {hit.number for hit in evidence.over}
    seen = [one for one in xids(evidence.all_lines) if one.number not in passed]
    hard = [one for one in seen if one.known.action in ("replace", "reset")]
    if not hard and (slow := own_hits(evidence, "slow_host") or own_warnings(evidence, "slow_host")):
        words = "slow links inside a host, below their floor: PCIe instead of NVLink, or a broken link"
        then = ("nvidia-smi topo -m; nvidia-smi nvlink -s   # on the host that the line points at", *_next(evidence))
        return [fault(evidence, words, shown(slow), then)]
    mended = [one for one in seen if one.known.action == "watch"]
    if hard or len(mended) >= COMES_AGAIN:
        worst = min(hard or mended, key=lambda one: ORDER.index(one.known.action))
        action = worst.known.action if hard else "reset"
        words = f"Xid {worst.code}{_where(worst)}: {worst.known.meaning}: {ADVICE[action]}"
        return [fault(evidence, words, _lines(hard or mended), _next(evidence))]
    if lost := own_hits(evidence, "host_lost"):
        return [_lost(evidence, (*shown(lost), *_lines(seen)))]
    own: tuple[Fault, ...] = ("bad_node", "slow_host", "host_lost")
    return [_harmless(evidence, seen), *over(evidence, *own), *others(evidence, *own)]


def _harmless(evidence: Evidence, seen: list[XidSeen]) -> Finding:
    if not seen:
        told = "no Xid in these lines; the driver tells the trainer of some, and the kernel's log (dmesg) of all"
        return clear_or_unknown(evidence, told, "lines")
    code = min(seen, key=lambda one: ORDER.index(one.known.action))
    words = f"Xid {code.code}{_where(code)}: {code.known.meaning}: {ADVICE[code.known.action]}"
    return Finding("clear", words, _lines(seen))


def _lost(evidence: Evidence, lines: tuple[str, ...]) -> Finding:
    """A machine that is gone says nothing of why; of spot capacity it is as a rule no fault of the machine's."""
    job = job_words(evidence)
    then = (f"scripts/runbooks/bad_node {job} --log KERNEL_LOG   # of that host, where it can be had", *_next(evidence))
    if evidence.record is not None and evidence.record.resolved.spec.compute.spot:
        words = "a host was lost: its spot capacity was taken, or its machine broke; its own lines don't say"
        return Finding("unknown", words, lines, (f"trainyard status {job}   # a reclaim is told there", then[0]))
    return fault(evidence, "host lost: its machine broke, or the network to it; no line says why", lines, then)


def _where(seen: XidSeen) -> str:
    return f" of {seen.gpu}" if seen.gpu else ""


def _lines(seen: list[XidSeen]) -> tuple[str, ...]:
    return tuple(f"line {one.number}: {one.line[:400]}" for one in seen[:4])


def _next(evidence: Evidence) -> tuple[str, ...]:
    job = job_words(evidence)
    if evidence.record is not None and evidence.record.backend == "slurm":
        return (
            f"scripts/runbooks/bad_node {job} --node NODE --yes   # drains it; the job saves, and goes on elsewhere",
            "# then the platform's engineers, by cluster.engine of the environment file: another machine",
            "aws ec2 terminate-instances --instance-ids ID   # pcs",
            "aws sagemaker batch-replace-cluster-nodes --cluster-name CLUSTER --node-ids ID   # hyperpod",
        )
    return (f"scripts/runbooks/bad_node {job} --yes   # stops it with a checkpoint, and starts it on other machines",)


def options(parser: argparse.ArgumentParser) -> None:
    """Its own."""
    parser.add_argument("--node", help="on a Slurm cluster: the node to drain, as sinfo names it")


def run(context: Context) -> None:
    """Classify; where a machine is bad, the steps that take it out."""
    evidence = context.gather()
    found = diagnose(evidence)
    context.report.findings += found
    if evidence.record is None or not any(one.kind == "fault" for one in found):
        return
    record = evidence.record
    if record.backend == "slurm":
        if context.options.node is None:
            return
        drained = [_drain(context, record, context.options.node, " ".join(found[0].words.split()[:2]))]
    else:
        # SageMaker takes no list of machines to avoid: other machines are what its health check gives the next start.
        drained = []
    # A drained machine's jobs run on: it takes no new ones. This one leaves it with a checkpoint.
    where = context.where(context.place(record.job_id))
    # One that starts, downloads or was interrupted has no rank that makes steps, and may not be resumed either.
    goes_on = evidence.state not in (*TERMINAL_STATES, CREATED, SUBMITTED, QUEUED)
    stopped = [command("stop", record.job_id, "--wait", *where)] if goes_on else []
    # What waits in a queue starts on another machine by itself.
    resumed = [] if evidence.state == QUEUED else [command("resume", record.job_id, *where)]
    context.perform([*drained, *stopped, *resumed])


def _shell(context: Context, record: JobRecord) -> ClusterShell:
    """Of the job's own cluster: an `sbatch` on the PATH here may be another's."""
    if record.environment is not None:
        access = context.tenant(context.options.tenant or record.tenant or "")
        return shell_of(access.launcher, access.contract)
    if not has_slurm_here():
        raise InputError(f"job {record.job_id}: ran on the Slurm of another machine; run this where its `sbatch` is")
    return HereShell()


def _drain(context: Context, record: JobRecord, node: str, reason: str) -> Step:
    if not node.replace("-", "").replace(".", "").isalnum():
        raise InputError(f"--node {node}: is no node's name; `sinfo -N` lists them")

    def make() -> str:
        answer = _shell(context, record).run(_DRAIN, node, reason)
        if answer.code:
            raise AwsRefusedError(f"draining {node}: {answer.words}")
        return f"{node} takes no further job"

    return Step(f"scontrol update NodeName={node} State=DRAIN Reason='{reason}'", make)


RUNBOOK = Runbook(
    "bad_node",
    SUMMARY,
    run,
    options,
    diagnose,
    example="acme-llama-20260131120000-1a2b --log dmesg.txt --environment production",
)
