"""Memory ran out: a GPU's, the host's, or /dev/shm."""

from trainyard.operate.runbooks.diagnosis import clear_or_unknown, fault, job_words, others, over, own_hits, shown
from trainyard.operate.runbooks.evidence import Evidence
from trainyard.operate.runbooks.figures import leaks, peak_gib
from trainyard.operate.runbooks.framework import Finding

WORDS = {
    "device-memory": "out of memory on a GPU",
    "host-memory": "out of memory on a host",
    "shared-memory": "out of shared memory (/dev/shm)",
}


def diagnose(evidence: Evidence) -> list[Finding]:
    """Which memory, how high it went, and what needs less."""
    hits = own_hits(evidence, "out_of_memory")
    if not hits:
        return [
            clear_or_unknown(evidence, "no memory ran out", "lines"),
            *over(evidence, "out_of_memory"),
            *_leaks(evidence),
            *others(evidence, "out_of_memory"),
        ]
    kind, job = hits[0].name, job_words(evidence)
    peaks = [
        f"highest seen before: {found:.2f} GiB {where}"
        for where, found in (
            ("on a GPU", peak_gib(evidence.rows, "peak_device_bytes")),
            ("of a rank on a host", peak_gib(evidence.rows, "peak_host_bytes")),
        )
        if found
    ]
    finding = fault(evidence, WORDS[kind], (*shown(hits), *peaks), tuple(_mends(evidence, kind, job)))
    return [finding, *_leaks(evidence)]


def _mends(evidence: Evidence, kind: str, job: str) -> list[str]:
    resume = f"trainyard resume {job} --set"
    if kind == "shared-memory":
        return [
            "df -h /dev/shm   # in the container: as a rule half of the host's memory, with plain Docker 64 MiB",
            f"trainyard resume {job}   # other machines, if something else filled it",
        ]
    record = evidence.record
    is_here = record is not None and record.backend == "local"
    # Without a step there is nothing to hold the plan against.
    mends = [f"trainyard compare {job}   # the planned memory beside the measured"] if evidence.rows else []
    if kind == "host-memory":
        mends.append(f"{resume} checkpoint.asynchronous=false   # no copy of the state in the host's memory")
    if kind != "host-memory" or is_here:  # ranks without a GPU have all of it in the host's
        mends.append(f"{resume} training.activation_checkpointing=full")
        size = record.resolved.spec.training.micro_batch_size if record else None
        if isinstance(size, int) and size > 1:
            mends.append(f"{resume} training.micro_batch_size={size // 2}   # same global batch: more accumulation")
    if not is_here:
        return [*mends, f"{resume} parallelism=auto --set compute.instance_count={2 * evidence.num_hosts}"]
    if record is not None and record.resolved.world_size > 1:  # this machine is one, and stays it
        mends.append(f"trainyard resume {job} --set parallelism=auto --processes {record.resolved.world_size // 2}")
    return mends


def _leaks(evidence: Evidence) -> list[Finding]:
    found = leaks(evidence.rows)
    if not found:
        return []
    last = found[-1]
    rate = float(last.get("bytes_per_step", 0.0)) / 2**20
    words = f"rank {last.get('rank')} on {last.get('host')}: {last.get('memory')} grows by {rate:.3f} MiB a step"
    return [fault(evidence, "a memory grows like a leak: it will run out", (words,), ())]
