"""NCCL failed: whose fault was it, and is it the network's?"""

import re

from trainyard.operate.runbooks.diagnosis import clear_or_unknown, fault, job_words, others, over, own_hits, shown
from trainyard.operate.runbooks.evidence import Evidence
from trainyard.operate.runbooks.framework import Finding

KINDS = {
    "ncclRemoteError": "a rank lost another one: look for the host whose lines end first",
    "ncclSystemError": "a call of the system failed: sockets, shared memory, or locked memory (ulimit -l)",
    "ncclUnhandledCudaError": "a CUDA call failed inside of NCCL: memory, or a GPU that failed",
    "ncclInternalError": "a check of NCCL's own failed: the plugin, the topology, or a bug",
    "ncclInvalidUsage": "ranks called NCCL differently: versions, devices, or the program",
    "ncclInvalidArgument": "ranks called NCCL differently: versions, devices, or the program",
}
"""NCCL user guide, "Errors"."""
BAD_VERSION = re.compile(r"NCCL version 2\.28\.[3-8]\b")


def diagnose(evidence: Evidence) -> list[Finding]:
    """The kind of error, where no other fault explains that ranks were lost."""
    hits = own_hits(evidence, "nccl_error")
    if not hits:
        told = clear_or_unknown(evidence, "no error of NCCL's decides", "lines")
        return [told, *over(evidence, "nccl_error"), *others(evidence, "nccl_error")]
    text = " ".join(hit.line for hit in hits)
    kind = next((words for name, words in KINDS.items() if name in text), "the network plugin's request failed")
    job = job_words(evidence)
    then = [
        f"scripts/runbooks/bad_node {job} --log KERNEL_LOG   # of each host: an Xid before this line is the cause",
        f"scripts/runbooks/efa_not_used {job}",
        f"trainyard resume {job}",
    ]
    bad = [line for line in evidence.all_lines if BAD_VERSION.search(line)]
    if bad:
        then.insert(0, "scripts/check_image   # NCCL 2.28.3 to 2.28.8 are to be avoided: publish another image")
    return [fault(evidence, f"NCCL failed: {kind}", (*shown(hits), *bad[:1]), tuple(then))]
