"""Every runbook by its name, which is also that of its script and of its page."""

from trainyard.operate.runbooks import (
    audit_tenant,
    bad_node,
    break_glass,
    capacity_or_quota_short,
    checkpoint_stale_or_corrupt,
    disaster_drill,
    efa_not_used,
    fsx_full_or_slow,
    job_hung,
    job_slow,
    loss_diverged,
    move_job,
    nccl_error,
    offboard,
    onboard,
    out_of_memory,
    restore_at_another_size,
    rotate_keys,
    spot_storm,
    upgrade_image,
)
from trainyard.operate.runbooks.runbook import Runbook, diagnosing

RUNBOOKS: tuple[Runbook, ...] = (
    diagnosing("job_slow", "a job is slow: data, communication, a straggler, throttling, saves?", job_slow.diagnose),
    diagnosing("job_hung", "a job makes no steps: which rank stands still, and where?", job_hung.diagnose),
    diagnosing("nccl_error", "NCCL failed: whose fault was it?", nccl_error.diagnose),
    diagnosing("efa_not_used", "hosts talk over TCP, or over a part of their EFA cards", efa_not_used.diagnose),
    diagnosing("out_of_memory", "a GPU's, a host's or /dev/shm's memory ran out", out_of_memory.diagnose),
    diagnosing("loss_diverged", "the loss is no number, jumped, or climbs", loss_diverged.diagnose),
    diagnosing(
        "checkpoint_stale_or_corrupt",
        "the newest checkpoint is old, or not whole: where would a restart go back to?",
        checkpoint_stale_or_corrupt.diagnose,
    ),
    diagnosing(
        "capacity_or_quota_short", "a job does not start: no machines, or a limit", capacity_or_quota_short.diagnose
    ),
    bad_node.RUNBOOK,
    fsx_full_or_slow.RUNBOOK,
    restore_at_another_size.RUNBOOK,
    move_job.RUNBOOK,
    spot_storm.RUNBOOK,
    rotate_keys.RUNBOOK,
    break_glass.RUNBOOK,
    audit_tenant.RUNBOOK,
    onboard.RUNBOOK,
    offboard.RUNBOOK,
    disaster_drill.RUNBOOK,
    upgrade_image.RUNBOOK,
)

BY_NAME = {runbook.name: runbook for runbook in RUNBOOKS}
