"""Lines as NCCL, aws-ofi-nccl, PyTorch, the NVIDIA driver, the kernel, Lustre, botocore, SageMaker and our own trainer
write them, a fault each. Formats are the sources'; hosts, numbers and account are made up."""

import tempfile
from pathlib import Path

from trainer.collectives import Measurement, check_floors
from trainer.entrypoint import check_efa
from trainer.preflight import RankSpeed, measured_words, shortfall_words

from trainyard.emulator.training.tree import failure_reason
from trainyard.errors import JobFailedError

# NVIDIA/nccl#1597 and aws/aws-ofi-nccl#715 (plugin 1.13 and 1.16): once a rank. `Bootstrap` is always TCP.
GOOD_EFA = (
    "algo-1 algo-1:412:412 [0] NCCL INFO Bootstrap: Using eth0:10.64.1.20<0>",
    "algo-1 NCCL version 2.27.5+cuda12.9",
    "algo-1 algo-1:412:640 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.16.2",
    "algo-1 algo-1:412:640 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 32 nics)",
    "algo-1 algo-1:412:640 [0] NCCL INFO NET/OFI NIC group 0 device #0 0000:56:00.0",
    "algo-1 algo-1:412:640 [0] NCCL INFO Using network AWS Libfabric",
    "algo-1 algo-1:412:640 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA",
    "algo-1 step=20 loss=4.210000 learning_rate=0.0001 grad_norm=1.2000 tokens=4194304 tokens_per_second=2097152.0"
    " step_seconds=2.0000",
    "algo-1 checkpoint step=20 committed uri=s3://acme-checkpoints/jobs/x/checkpoints/step-00000020 seconds=4.1",
)
# NVIDIA/nccl#352 and #527: no plugin, NCCL's own sockets.
TCP_SOCKETS = (
    "algo-1 algo-1:412:412 [0] NCCL INFO Bootstrap : Using eth0:10.64.1.20<0>",
    "algo-1 algo-1:412:412 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot"
    " open shared object file: No such file or directory",
    "algo-1 algo-1:412:412 [0] NCCL INFO NET/Plugin : No plugin found, using internal implementation",
    "algo-1 algo-1:412:640 [0] NCCL INFO NET/IB : No device found.",
    "algo-1 algo-1:412:640 [0] NCCL INFO NET/Socket : Using [0]eth0:10.64.1.20<0>",
    "algo-1 algo-1:412:640 [0] NCCL INFO Using network Socket",
)
# The plugin without EFA devices; `Using network AWS Libfabric` follows here too.
TCP_LIBFABRIC = (
    "algo-2 algo-2:411:633 [1] NCCL WARN NET/OFI No eligible providers were found",
    "algo-2 algo-2:411:633 [1] NCCL INFO NET/OFI Selected provider is tcp, fabric is 10.64.1.0/24 (found 1 nics)",
    "algo-2 algo-2:411:633 [1] NCCL INFO NET/OFI Need to force simple protocol: GDR not supported",
    "algo-2 algo-2:411:633 [1] NCCL INFO Using network AWS Libfabric",
)
# aws/aws-ofi-nccl#715: a job on SageMaker whose container saw fewer cards.
PARTIAL_EFA = (
    "algo-1 algo-1:412:640 [0] NCCL INFO NET/OFI Selected Provider is efa (found 32 nics)",
    "algo-2 algo-2:418:651 [3] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)",
    "algo-2 algo-2:418:651 [3] NCCL INFO Using network AWS Libfabric",
)
# NVIDIA's GPU memory error management (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt, table 3) and kernel logs of
# NVIDIA/gpu-operator#1146, stas00/ml-engineering (GPU debug), leptonai/gpud#1209, AWS's HyperPod documentation.
XID = {
    48: "[430954.509105] NVRM: Xid (PCI:0000:52:00): 48, pid='<unknown>', name=<unknown>, An uncorrectable double bit"
    " error (DBE) has been detected on GPU in the framebuffer at physAddr 0x18f31d80 partition 16, subpartition 3.",
    63: "May 19 07:08:57 node-3 kernel: [680111.646286] NVRM: Xid (PCI:0000:10:1c): 63, pid=1850, Row Remapper: New row"
    " marked for remapping, reset gpu to activate.",
    64: "NVRM: Xid (PCI:0000:65:00): 64, pid='N/A', Row Remapper: Failed to remap row",
    74: "[449410.332316] NVRM: Xid (PCI:0000:b9:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected"
    " on link 6(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
    79: "[ 9112.044100] NVRM: Xid (PCI:0000:44:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    94: "NVRM: Xid (PCI:0000:01:00): 94, pid=7062, Contained: CE User Channel (0x9). RST: No, D-RST: No",
    95: "NVRM: Xid (PCI:0000:01:00): 95, pid=7062, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
}
XID_OF_A_PROGRAM = (
    "[Fri Aug 30 11:43:09 2024] NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp"
    " Exception on (GPC 7, TPC 0, SM 0): Out Of Range Address"
)
FELL_OFF_WITHOUT_NUMBER = (
    "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0",
    "[ 1843.308145] NVRM: fallen off the bus and is not responding to commands.",
)
# hiyouga/LlamaFactory#7396, XPixelGroup/BasicSR#737 (PyTorch 2.6).
WATCHDOG = (
    "algo-1 [rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation"
    " timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran"
    " for 600060 milliseconds before timing out.",
    "algo-1 [rank0]:[E321 02:07:08.465150152 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank"
    " 0] Exception"
    " (either an error or timeout) detected by watchdog at work: 1580, last enqueued NCCL work: 1582, last completed"
    " NCCL work: 1579.",
)
# Our own host (trainer.host.run), as recovery.jsonl and the failure have it.
STAND_STILL = (
    "local recovery restart=1 last_step=57 backoff_seconds=2 reason=rank 1 on this machine hangs: no progress for 301 s"
    " after step 57; it is stopped (SIGSTOP or frozen); stacks and collectives of all ranks in"
    " /x/output/stacks; rank 1 has"
    " not called all_reduce of 32x64 Float, number 57 of ranks 0, 1, in which rank 0 waits",
)
# trainer.host.hosts: what is left of a host that went without a word.
HOST_GONE = ("algo-1 entrypoint: host algo-2 is gone: its entrypoint was killed, or the network parted",)
FIRST_HOST_GONE = (
    "algo-2 entrypoint: the first host (10.64.1.20) is gone: its entrypoint was killed, or the network parted",
)
# aws/aws-ofi-nccl#161 and #663, pytorch's DistBackendError.
NCCL_REMOTE = (
    "algo-2 algo-2:418:702 [3] NCCL WARN NET/OFI Request completed with error. RC: 15. Error: unresponsive receiver"
    " (peer may have gone away). Completed length: 0, Request: { dev: 3, size: 0, state: CREATED, direction: SEND }",
    "algo-2 [rank3]: torch.distributed.DistBackendError: NCCL error in:"
    " ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error,"
    " NCCL version 2.27.5",
    "algo-2 [rank3]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
    " prematurely.",
)
# pytorch/pytorch#16417 (comment of 2024-03), murong-xu/CADS#4.
DEVICE_MEMORY = (
    "algo-1 [rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 2 has a total capacity"
    " of 79.11 GiB of which 1.20 GiB is free. Including non-PyTorch memory, this process has 77.90 GiB memory"
    " in use. Of"
    " the allocated memory 74.31 GiB is allocated by PyTorch, and 2.02 GiB is reserved by PyTorch but unallocated.",
)
# docker/for-linux#1001, pcyin/tranX#41.
HOST_MEMORY = (
    "[2059991.491436] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=docker,mems_allowed=0-1,task=python3,"
    "pid=25315,uid=0",
    "[2059991.491542] Memory cgroup out of memory: Killed process 25315 (python3) total-vm:533122440kB,"
    " anon-rss:314514560kB, file-rss:74816kB, shmem-rss:12296kB, UID:0 pgtables:69068kB oom_score_adj:0",
)
# What a container sees of it: our host's own words.
HOST_MEMORY_FROM_INSIDE = (
    "algo-1 entrypoint: rank 5 on algo-1 was killed by SIGKILL: out of memory on the host, or killed from outside",
)
# FailureReason of a container that was killed: the form is aws/sagemaker-python-sdk#134's and #658's, 137 is SIGKILL.
CONTAINER_KILLED = ("AlgorithmError: , exit code: 137",)
CONTAINER_FAILED = ("AlgorithmError: , exit code: 139",)
# Of several hosts, in the emulator's form; one that asks to be resumed was told to stop because another one had ended.
CONTAINERS_KILLED = (failure_reason((), {"algo-1": 137, "algo-2": 1}),)
LAST_CONTAINER_KILLED = (failure_reason((), {"algo-1": 1, "algo-2": 137}),)
HOST_KILLED = (failure_reason((), {"algo-1": 75, "algo-2": 137}),)
FIRST_HOST_KILLED = (failure_reason((), {"algo-1": -9, "algo-2": 75}),)
SHARED_MEMORY = (
    "algo-1 RuntimeError: DataLoader worker (pid 7121) is killed by signal: Bus error. It is possible that dataloader's"
    " workers are out of shared memory. Please try to raise your shared memory limit.",
)
# aws-ia/terraform-aws-bedrock#41, slashdevops/idp-scim-sync#540, boto/boto3#2952.
ACCESS_DENIED = (
    "algo-1 botocore.exceptions.ClientError: An error occurred (AccessDenied) when calling the GetObject"
    " operation: User:"
    " arn:aws:sts::123456789012:assumed-role/acme-job/SageMaker is not authorized to perform: kms:Decrypt on resource:"
    " arn:aws:kms:us-east-1:123456789012:key/1 because no identity-based policy allows the kms:Decrypt action",
)
# aws/sagemaker-python-sdk#1968, aws-samples/aws-sagemaker-build#28: FailureReason of DescribeTrainingJob.
IMAGE_PULL = (
    "ClientError: Cannot pull algorithm container. Either the image does not exist or its permissions are incorrect.",
)
# sagemaker-python-sdk's own tests, and FailureReason of SageMaker jobs in public issue trackers.
CAPACITY = (
    "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML"
    " instance type.",
)
# trainyard.launch.checks and the broker.
QUOTA_OF_TENANT = (
    "compute.instance_count 16: over the quota of tenant acme, which is 4 x ml.p5.48xlarge; use fewer, or raise"
    " max_instances of the queue in the environment file",
)
# zenml-io/zenml#847.
QUOTA = (
    "An error occurred (ResourceLimitExceeded) when calling the CreateTrainingJob operation: The account-level service"
    " limit 'ml.p5.48xlarge for training job usage' is 0 Instances, with current utilization of 0 Instances"
    " and a request"
    " delta of 2 Instances. Please use AWS Service Quotas to request an increase for this quota.",
)
# Python's OSError; Lustre manual, "LustreError: 11-0" of a client (rc -28 is ENOSPC),
# wiki.lustre.org/Handling_Full_OSTs.
FSX_FULL = (
    "algo-1 OSError: [Errno 28] No space left on device: '/opt/ml/input/data/fsx/tokens/part-0007.bin'",
    "[23952.015110] LustreError: 11-0: abcdefgh-OST0003-osc-ffff8801: operation ost_write to node 10.64.1.9@tcp failed:"
    " rc = -28",
)


def _refused(num_cards: int) -> str:
    """What the entrypoint itself says of a machine with so few."""
    with tempfile.TemporaryDirectory() as folder:
        for card in range(num_cards):
            (Path(folder) / f"rdmap{card}s0").mkdir()
        try:
            check_efa("ml.p5.48xlarge", Path(folder))
        except JobFailedError as error:
            return f"algo-2 entrypoint: {error}"
    raise AssertionError(f"{num_cards} cards are enough")


# trainer.entrypoint.check_efa and trainer.preflight, as the failure has them; trainer.collectives by hand.
EFA_REFUSED = (_refused(4),)
_FLOORS = {"across": (20.0, "0.4 of EFA's 50.00 a GPU"), "host": (288.0, "0.6 of AWS' health check")}


def _short(kind: str, slowest: float) -> str:
    return shortfall_words(kind, _FLOORS[kind], [RankSpeed(8, "algo-2", slowest)])


def measured(kind: str, of_floor: float) -> str:
    """A start's measurement, in shares of the floor."""
    floor, _ = _FLOORS[kind]
    return f"algo-1 {measured_words(kind, 268435456, of_floor * floor, floor, seconds=4.1)}"


BELOW_FLOOR_BETWEEN = (
    measured("across", 0.155),
    f"rank 0 on algo-1: JobFailedError: {_short('across', 3.1)}",
)
BELOW_FLOOR_INSIDE = (f"rank 0 on algo-1: JobFailedError: {_short('host', 14.2)}",)
WARNED_BETWEEN = (f"algo-1 warning: {_short('across', 3.1)}",)
WARNED_INSIDE = (f"algo-1 warning: {_short('host', 14.2)}",)
COLLECTIVES_BETWEEN, COLLECTIVES_INSIDE = (
    tuple(check_floors([Measurement("all_reduce", kind, 8, 1073741824, 0.1, 3.1, 3.1)], {kind: _FLOORS[kind]}))
    for kind in ("across", "host")
)
# trainer.observe.anomalies, as the job's failure has it.
DIVERGED = ("rank 0 on algo-1: JobFailedError: step 812: loss is nan; snapshot in /opt/ml/output/data/anomalies",)
# trainer.checkpoint.restore and checkpointer.
SPOILED = (
    "algo-1 checkpoint step=400 skipped: rank-00000.bin is altered (its SHA-256 is not the manifest's); looking for the"
    " one before it",
)
SAVE_FAILED = (
    "algo-1 checkpoint step=400 not committed: SlowDown: Please reduce your request rate.; training goes on",
)

FAULTS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "good": (GOOD_EFA, None),
    "tcp": (TCP_SOCKETS, "efa_not_used"),
    "tcp by libfabric": (TCP_LIBFABRIC, "efa_not_used"),
    "a part of efa": (PARTIAL_EFA, "efa_not_used"),
    **{f"xid {code}": ((XID[code],), "bad_node") for code in (48, 64, 74, 79, 95)},
    "xid 63": ((XID[63],), None),
    "xid 94": ((XID[94],), None),
    "xid of a program": ((XID_OF_A_PROGRAM,), None),
    "fell off the bus": (FELL_OFF_WITHOUT_NUMBER, "bad_node"),
    "watchdog": (WATCHDOG, "job_hung"),
    "stand-still": (STAND_STILL, "job_hung"),
    "nccl error": (NCCL_REMOTE, "nccl_error"),
    # The job is one on spot capacity: it may have been taken, and nothing is shouted.
    "host gone": (HOST_GONE, None),
    "first host gone": (FIRST_HOST_GONE, None),
    "device memory": (DEVICE_MEMORY, "out_of_memory"),
    "host memory": (HOST_MEMORY, "out_of_memory"),
    "host memory, from inside": (HOST_MEMORY_FROM_INSIDE, "out_of_memory"),
    "container killed": (CONTAINER_KILLED, "out_of_memory"),
    "container failed": (CONTAINER_FAILED, None),
    "the first of two containers killed": (CONTAINERS_KILLED, "out_of_memory"),
    "the last of two containers killed": (LAST_CONTAINER_KILLED, "out_of_memory"),
    "host killed, the other told to stop": (HOST_KILLED, None),
    "first host killed, the other told to stop": (FIRST_HOST_KILLED, None),
    "shared memory": (SHARED_MEMORY, "out_of_memory"),
    "access denied": (ACCESS_DENIED, None),
    "image pull": (IMAGE_PULL, None),
    "capacity": (CAPACITY, "capacity_or_quota_short"),
    "quota": (QUOTA, "capacity_or_quota_short"),
    "quota of the tenant": (QUOTA_OF_TENANT, "capacity_or_quota_short"),
    "fsx full": (FSX_FULL, "fsx_full_or_slow"),
    "efa refused": (EFA_REFUSED, "efa_not_used"),
    "below the floor between hosts": (BELOW_FLOOR_BETWEEN, "efa_not_used"),
    "below the floor inside a host": (BELOW_FLOOR_INSIDE, "bad_node"),
    "below the floor between hosts, by hand": (COLLECTIVES_BETWEEN, "efa_not_used"),
    "below the floor inside a host, by hand": (COLLECTIVES_INSIDE, "bad_node"),
    "below the floor, then at it": (
        (*BELOW_FLOOR_INSIDE, *BELOW_FLOOR_BETWEEN, measured("host", 1.0), measured("across", 1.5)),
        None,
    ),
    "diverged": (DIVERGED, "loss_diverged"),
    # Consequences after their cause: the cause alone is named.
    "xid, then nccl, then watchdog": ((XID[79], *NCCL_REMOTE, *WATCHDOG), "bad_node"),
    "memory, then watchdog": ((*DEVICE_MEMORY, *WATCHDOG), "out_of_memory"),
    "watchdog, then nccl": ((*WATCHDOG, *NCCL_REMOTE), "nccl_error"),
    # The job was told to train all the same, and did until its memory was full.
    "warned inside a host, then memory": ((*WARNED_INSIDE, *DEVICE_MEMORY), "out_of_memory"),
    "warned between hosts, then memory": ((*WARNED_BETWEEN, *DEVICE_MEMORY), "out_of_memory"),
    "host gone, then nccl, then watchdog": ((*HOST_GONE, *NCCL_REMOTE, *WATCHDOG), None),
    "host gone, by memory": ((*HOST_GONE, *HOST_MEMORY), "out_of_memory"),
    "floor, then nccl": ((*BELOW_FLOOR_INSIDE, *NCCL_REMOTE), "bad_node"),
    "file system, then nccl": ((*FSX_FULL, *NCCL_REMOTE), "fsx_full_or_slow"),
}
"""Lines of a job of two hosts of p5.48xlarge -> the one runbook that names them its own; None: none does."""
