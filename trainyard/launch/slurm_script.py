"""A job as a Slurm batch script: one pure function. What the script does on the cluster is docs/clusters.md.

The script runs in the job's folder, which the login node and all machines share. It starts one task a machine
(`trainer.slurm`), writes down what happens (`events`, `outcome`), and requeues itself where another start goes on.
"""

import math
import shlex
from dataclasses import dataclass
from string import Template

from trainyard.errors import InputError
from trainyard.launch.machines import SHARED_ROOT, common_variables, efa_interfaces
from trainyard.launch.record import JobRecord
from trainyard.spec.job import ResolvedJob

KILL_SECONDS = 130
"""After a signal the hosts give their ranks 110 s to save (trainer.host.run); a host that is stuck is killed then."""
LOST_SECONDS = 30
"""After a host said that another one is gone. A lost one that still has its process, frozen, is killed then: srun waits
for it for ever, and Slurm, whose own daemon answers there, finds nothing wrong."""
SAVE_SECONDS = 180
"""Between the signal and the time limit."""

_SCRIPT = Template(
    r"""#!/bin/bash
$directives
# Written by trainyard for one attempt of a job. It requeues itself, so it may start more than once.
set -u
cd $directory || exit 1
attempt=$attempt
most_requeues=$most_requeues
$exports

event() { printf '%s\t%s\t%s\t%s\n' "$$attempt" "$$1" "$$(date -u +%Y-%m-%dT%H:%M:%S+00:00)" "$$2" >> events; }
finish() {
  event "$$1" "$$2"
  # A disk that is full now may have room in a while; without an outcome nobody knows how the job ended.
  for _ in {1..24}; do
    printf 'attempt=%s\nstate=%s\nseconds=%s\nfailure=%s\n' "$$attempt" "$$1" "$$SECONDS" "$$3" > outcome.new \
      && mv outcome.new outcome && break
    sleep 5
  done
  exit "$$code"
}
# The first of the controllers: a backup that is up beside it answers nothing until it has taken over.
is_up() { scontrol ping | head -n 1 | grep -q ' \(is\|are\) UP'; }
requeue() {
  event Interrupted "$$1"
  trap - TERM
  refused=0
  for _ in {1..60}; do
    was_up=""
    if is_up; then was_up=yes; fi
    # Slurm ends this script as a part of it; in short sleeps, as the one that runs then is left behind.
    scontrol requeue "$$SLURM_JOB_ID" && for _ in {1..120}; do sleep 1; done
    # A controller that is down, or moves to another machine, is asked again; what one refuses twice that was up before
    # each question and after it stays refused: in a single one it may have gone and come back.
    if [ -n "$$was_up" ] && is_up; then
      end_where_slurm_does
      refused=$$(( refused + 1 ))
    else
      refused=0
    fi
    [ "$$refused" -ge 2 ] && break
    sleep 5
  done
  finish Stopped "$$1; Slurm did not requeue it" ""
}
of_slurm() { scontrol --oneliner show job "$$SLURM_JOB_ID" | sed -n "s/.* $$1=\\([^ ]*\\).*/\\1/p"; }
# Slurm itself ends this start (scancel, a lost node), and says what comes next.
end_where_slurm_does() { case "$$(of_slurm JobState)" in RUNNING | "") ;; *) exit "$$code" ;; esac; }

code=0
told=""
# The file is for tasks that are only just being started, which a signal doesn't reach.
on_stop() {
  told=$$SECONDS
  touch told
  # Where Slurm ends this start itself, it has told the tasks, and scancel would try in vain until KillWait is over.
  case "$$(of_slurm JobState)" in RUNNING | "") scancel --quiet --signal=TERM "$$SLURM_JOB_ID" ;; esac
}
# Where a full disk takes no file's content, the word is what a link leads to (trainer.host.word).
reason_of() {
  for word in host/failure hosts/*/failure; do
    if [ -L "$$word" ]; then readlink "$$word"; else cat "$$word"; fi
  done 2> /dev/null | head -n 1
}
# Step by step: with this signal scancel takes a job's number for the wish that it be cancelled.
kill_tasks() {
  squeue --noheader --steps --jobs="$$SLURM_JOB_ID" --format=%i | grep '\.[0-9][0-9]*$$' \
    | xargs -r scancel --quiet --signal=KILL
}
is_past() { [ -n "$$1" ] && [ $$(( SECONDS - $$1 )) -ge "$$2" ]; }
is_loss() { case "$$1" in "host "*" is gone"* | "the first host "*" is gone"*) true ;; *) false ;; esac; }
# In the background, as bash hears no signal while a command runs in front.
run() {
  "$$@" &
  child=$$!
  gone=""
  while kill -0 "$$child" 2> /dev/null; do
    sleep 5 &
    wait -n "$$child" "$$!"
    { kill "$$!" && wait "$$!"; } 2> /dev/null
    # Also where it is a loss too many, which the reason then begins with.
    case "$$(reason_of)" in *"host "*" is gone"*) gone=$${gone:-$$SECONDS} ;; esac
    if is_past "$$told" $kill_seconds || is_past "$$gone" $lost_seconds; then
      kill_tasks
    fi
  done
  # bash remembers it, even where the loop has waited already. Through no file: the disk may be full.
  wait "$$child"
  code=$$?
}

first=$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | head -n 1)
address=$$(scontrol --oneliner show node "$$first" | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p')
export TRAINYARD_HOST_ADDRESSES="{\"$$first\": \"$${address:-$$first}\"}"
rm -rf told host/failure hosts
trap on_stop TERM
# Slurm may requeue a job before its save is done, but whoever stopped it wants no further start. After the trap: who
# stops it writes the file first, so a stop is either seen here or heard there.
if [ -e stop_requested ]; then finish Stopped "requeued after it was asked to stop; not started again" ""; fi
event Training "$$SLURM_JOB_NODELIST, start $$(( $${SLURM_RESTART_COUNT:-0} + 1 ))"
$stage
if [ "$$code" = 0 ] && [ -z "$$told" ]; then
  run srun --export=ALL --ntasks-per-node=1 --kill-on-bad-exit=0 --open-mode=append --output=log/node-%n.txt \
    $container$python -u -m trainer.slurm run $directory
elif [ -n "$$told" ]; then
  code=75
fi

reason=$$(reason_of)
saved=""
lost=""
# 143: ended by the signal itself, before its ranks were started.
case "$$code" in 75 | 143) saved="saved, and asks to be resumed" ;; esac
if [ "$$code" = 137 ] && [ -n "$$told" ]; then saved="killed: it had not saved within $kill_seconds s"; fi
if is_loss "$$reason"; then lost=$${reason%%:*}; fi
if [ "$$code" = 0 ]; then finish Completed "" ""; fi
end_where_slurm_does
if [ -n "$$saved" ] && [ -e stop_requested ]; then
  case "$$saved" in killed*) finish Stopped "$$saved" "" ;; *) finish Stopped "" "" ;; esac
fi
if [ -n "$$saved$$lost" ]; then
  case "$$(of_slurm PreemptTime)" in None | "") ;; *) requeue "preempted" ;; esac
  why=$${lost:-$$saved}
  if [ -n "$$saved" ] && [ -n "$$told" ]; then why="its time limit came; $${saved%%, and asks*}"; fi
  count=$$(cat requeues 2> /dev/null | wc -l)
  # A disk that is full takes no count: then Slurm's own bounds it, which has preemptions in it too.
  if [ "$$count" -lt "$$most_requeues" ] \
    && { echo "$$why" >> requeues || [ "$${SLURM_RESTART_COUNT:-0}" -lt "$$most_requeues" ]; }; then
    requeue "$$why"
  fi
  if [ -z "$$lost" ]; then finish Stopped "$$why; recovery.max_resumes is spent ($$most_requeues)" ""; fi
fi
finish Failed "" "$${reason:-a task ended with exit code $$code; the end of log/ may say why}"
"""
)


@dataclass(frozen=True)
class ClusterPlace:
    """Where on a cluster a job goes."""

    directory: str
    """Of this job alone, absolute, on the shared file system."""
    partition: str | None
    """None: Slurm's default one."""
    comment: str
    """What Slurm's accounting tells of the job: tenant, cost centre."""
    python: str
    """Interpreter with the trainer."""
    region: str | None = None
    """Of the data that the job reads and writes; None without AWS."""
    variables: tuple[tuple[str, str], ...] = ()
    """Further environment of the trainer."""


def batch_script(record: JobRecord, place: ClusterPlace) -> str:
    """The newest attempt of `record` as sbatch takes it; nothing is read and no clock is asked."""
    job = record.resolved
    directory = shlex.quote(place.directory)
    stage = ""
    if record.channels:
        stage = (
            f"run srun --export=ALL --nodes=1 --ntasks=1 --open-mode=append --output=log/inputs.txt "
            f"{_container(job, place)}{shlex.quote(place.python)} -u -m trainer.slurm inputs {directory}\n"
        )
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables(record, place).items())
    return _SCRIPT.substitute(
        directives="\n".join(f"#SBATCH {line}" for line in _directives(record, place)),
        directory=directory,
        attempt=record.attempt.number,
        most_requeues=job.spec.recovery.max_resumes,
        exports=exports,
        stage=stage,
        kill_seconds=KILL_SECONDS,
        lost_seconds=LOST_SECONDS,
        container=_container(job, place),
        python=shlex.quote(place.python),
    )


def variables(record: JobRecord, place: ClusterPlace) -> dict[str, str]:
    """What the ranks find in their environment, over what Slurm sets.

    EFA: libfabric's provider is stated, or NCCL takes TCP in silence; of machines without EFA none is asked for. No
    other NCCL or libfabric variable: current ones choose better than what guides of older versions say.
    """
    found = common_variables(record, place.region)
    if efa_interfaces(record.resolved) and record.resolved.num_hosts > 1:
        found["FI_PROVIDER"] = "efa"
    else:
        found["TRAINYARD_SKIP_EFA_CHECK"] = "1"
    return found | dict(place.variables)


def limit_minutes(max_hours: float) -> int:
    """Slurm's time limit of one start, in whole minutes."""
    return max(1, math.ceil(max_hours * 60))


def _directives(record: JobRecord, place: ClusterPlace) -> list[str]:
    compute, slurm = record.resolved.spec.compute, record.resolved.spec.compute.slurm
    minutes = limit_minutes(compute.max_hours)
    # Slurm looks at time limits every half minute, and may be early by a whole one.
    lead = min(SAVE_SECONDS, minutes * 60 // 4)
    lines = [
        f"--job-name={record.attempt.training_job_name}",
        f"--comment={shlex.quote(place.comment)}",
        *([f"--partition={place.partition}"] if place.partition else []),
        *([f"--account={slurm.account}"] if slurm.account else []),
        *([f"--qos={slurm.qos}"] if slurm.qos else []),
        f"--nodes={record.resolved.num_hosts}",
        "--ntasks-per-node=1",
        "--exclusive",
        *([f"--gpus-per-node={slurm.gpus_per_node}"] if slurm.gpus_per_node else []),
        f"--time={minutes}",
        f"--signal=B:TERM@{lead}",
        "--requeue",
        "--export=ALL",
        f"--chdir={place.directory}",
        "--open-mode=append",
        f"--output={place.directory}/log/batch.txt",
    ]
    bad = [line for line in lines if "\n" in line]
    if bad:
        raise InputError(f"{bad[0]!r}: holds a line end, which a batch script can't have in an option")
    return lines


def _container(job: ResolvedJob, place: ClusterPlace) -> str:
    slurm = job.spec.compute.slurm
    if not slurm.container_image:
        return ""
    shared = place.directory.rpartition("/")[0]
    roots = [f"{shared}:{shared}"]
    if f"{shared}/".startswith(f"{SHARED_ROOT}/"):
        roots = [f"{SHARED_ROOT}:{SHARED_ROOT}"]
    mounts = ",".join(dict.fromkeys([*roots, *slurm.container_mounts]))
    return f"--container-image={shlex.quote(slurm.container_image)} --container-mounts={mounts} "
