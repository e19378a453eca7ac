"""Jobs on a Slurm cluster: submitted, watched and stopped by short scripts beside Slurm's commands.

A job's folder lies on the file system that the cluster's machines share. Beside what `trainyard.launch.slurm_script`
writes there (`events`, `outcome`, `log/`) it holds `submitted`: which attempt is which job of Slurm's. So a state is
known as long as the folder is, however soon Slurm forgets its jobs.
"""

import base64
import codecs
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trainyard.errors import InputError
from trainyard.launch.backend import (
    AwayError,
    LogCursor,
    LogLine,
    Observation,
    Say,
    SilentError,
    without_first_line,
)
from trainyard.launch.channels import job_files
from trainyard.launch.cluster_shell import ClusterShell
from trainyard.launch.record import JobRecord, StateChange
from trainyard.launch.slurm_script import ClusterPlace, batch_script

QUEUED = "Queued"
"""Slurm holds it: it waits for machines, for its turn, or for its next start."""
LOG_BYTES = 256 * 1024
"""Of all of a job's logs together, in one read."""
LOG_SHARE_BYTES = 4096
"""At least, of one log of many."""
LOG_TAIL_BYTES = 64 * 1024
"""Of each log whose newest lines are wanted."""

_HELPERS = r"""
set -u
value() { sed -n "s/^$2=//p" "$1" 2> /dev/null | head -n 1; }
# Slurm's word for a job; FORGOTTEN; or nothing where it lists no such job. Fails, with its words, where it gives none.
state_of() {
  local id=$1 said
  shift
  if said=$(squeue --noheader --jobs "$id" --format=%T "$@" 2>&1); then
    grep -x '[A-Z_]*' <<< "$said" | head -n 1
  elif grep -q -i 'invalid job id' <<< "$said"; then
    echo FORGOTTEN
  else
    echo "$said" >&2
    return 1
  fi
}
"""
_SUBMIT = (
    _HELPERS
    + r"""
directory=$1 attempt=$2 name=$3
mkdir -p "$directory/input/data/job" "$directory/log" "$directory/host" && cd "$directory" || exit 1
# Of two that submit one attempt at once, the second waits, and finds it submitted.
exec 9> submit.lock && flock 9 || exit 1
[ "$(value submitted attempt)" = "$attempt" ] && exit 0
# Taken by Slurm, and nobody was left to write it down.
id=$(squeue --noheader --name="$name" --format=%i | head -n 1)
if [ -z "$id" ]; then
  write_files || exit 1
  rm -f outcome requeues stop_requested
  id=$(sbatch --parsable job.sbatch) || exit 1
fi
printf 'attempt=%s\nid=%s\n' "$attempt" "${id%%;*}" > submitted.new && mv submitted.new submitted
"""
)
_CHECK = r"""
script=$(mktemp) && base64 -d <<< "$1" > "$script" || exit 1
cd / && sbatch --test-only --chdir=/ "$script" 2>&1
code=$?
rm -f "$script"
exit $code
"""
_LOOK = (
    _HELPERS
    + r"""
for directory in "$@"; do
  cd "$directory" 2> /dev/null || continue
  echo "job $directory"
  sed 's/^/submitted /' submitted 2> /dev/null || continue
  id=$(value submitted id)
  # Before the outcome is read: it is written while Slurm still says RUNNING.
  slurm=$(scontrol --oneliner show job "$id" 2> /dev/null)
  if [ -z "$slurm" ]; then
    # No answer is no end: that is only what Slurm itself says, or a job that it has forgotten.
    state=$(state_of "$id" --states=all 2> /dev/null)
    case "$state" in
      "") echo "unreachable" ;;
      FORGOTTEN) state=$(sacct --noheader --parsable2 --allocations --jobs="$id" --format=State 2> /dev/null) ;;
    esac
    [ -n "$state" ] && slurm="JobState=${state%% *}"
  fi
  [ -n "$slurm" ] && echo "slurm $slurm"
  [ -e stop_requested ] && echo "stopping"
  # Before the events are read: the last of them is written first, so that no end is told without its words.
  sed 's/^/outcome /' outcome 2> /dev/null
  sed 's/^/event /' events 2> /dev/null
done
exit 0
"""
)
_NO_ROOM = 4
"""Exit code of a stop that its folder takes no word of."""
_STOP = (
    _HELPERS
    + f"no_room={_NO_ROOM}\n"
    + r"""
cd "$1" || exit 1
id=$(value submitted id)
state=$(state_of "$id") || exit 1
if said=$(touch stop_requested 2>&1); then is_written=yes; else is_written=""; fi
case "$state" in
  "" | FORGOTTEN) ;;
  PENDING | SUSPENDED | CONFIGURING | REQUEUED | REQUEUE_HOLD) scancel "$id" ;;
  *)
    # Without the file, on a full disk, the job would save and start again.
    if [ -z "$is_written" ]; then
      echo "its folder takes no file (${said##*: }), and it would start again after its save:" \
        "make room in $PWD, or \`scancel $id\` on the cluster, which leaves it Slurm's KillWait to save" >&2
      exit "$no_room"
    fi
    # Its script tells the ranks, which save; Slurm alone would kill them after KillWait.
    scancel --signal=TERM --batch "$id"
    ;;
esac
"""
)
_LOGS = r"""
directory=$1 left=$2 least=$3 newest=$4
shift 4
cd "$directory/log" 2> /dev/null || exit 0
names=() offsets=() news=()
for file in *.txt; do
  [ -e "$file" ] || continue
  size=$(stat -c %s "$file")
  offset=0
  if [ "$newest" -gt 0 ] && [ "$size" -gt "$newest" ]; then offset=$((size - newest)); fi
  for known in "$@"; do
    [ "${known%%:*}" = "$file" ] && offset=${known##*:}
  done
  [ "$size" -gt "$offset" ] || continue
  names+=("$file") offsets+=("$offset") news+=($((size - offset)))
done
for index in "${!names[@]}"; do
  file=${names[index]} offset=${offsets[index]} count=${news[index]}
  # What a log leaves of its share goes to those after it.
  share=$((left / (${#names[@]} - index)))
  [ "$share" -ge "$least" ] || share=$least
  [ "$share" -le "$left" ] || share=$left
  more=""
  if [ "$count" -gt "$share" ]; then count=$share more=more; fi
  left=$((left - count))
  echo "file $file $offset $(tail -c +$((offset + 1)) "$file" | head -c "$count" | base64 -w 0) $more"
done
exit 0
"""

_STATES = {
    "PENDING": QUEUED,
    "REQUEUED": QUEUED,
    "REQUEUE_HOLD": QUEUED,
    "REQUEUE_FED": QUEUED,
    "SUSPENDED": QUEUED,
    "CONFIGURING": "Starting",
    "RUNNING": "Training",
    "COMPLETING": "Stopping",
    "SIGNALING": "Stopping",
    "STAGE_OUT": "Stopping",
    "COMPLETED": "Completed",
    "CANCELLED": "Stopped",
    "TIMEOUT": "Stopped",
    "DEADLINE": "Stopped",
    "PREEMPTED": "Stopped",
    "FAILED": "Failed",
    "NODE_FAIL": "Failed",
    "BOOT_FAIL": "Failed",
    "OUT_OF_MEMORY": "Failed",
}
"""Slurm's words (squeue's manual, "Job state codes") in SageMaker's."""
_NOTES = {
    "TIMEOUT": "its time limit came before it had saved",
    "PREEMPTED": "taken from its machines, and this cluster does not requeue",
    "CANCELLED": "scancel took it",
}
_FAILURES = {
    "NODE_FAIL": "a machine was lost",
    "BOOT_FAIL": "a machine did not come up",
    "OUT_OF_MEMORY": "a machine's memory was not enough",
}


class SlurmBackend:
    """Jobs of one cluster, through a shell beside its Slurm."""

    def __init__(
        self,
        shell: ClusterShell,
        place_of: "PlaceOf",
        directory_of: Callable[[JobRecord], str],
        refusals: Callable[[JobRecord], Sequence[str]] = lambda _: (),
    ) -> None:
        """`place_of`: where on the cluster a record's job goes; InputError where nothing takes it any longer.
        `directory_of`: the same place's folder, known as long as the record is. `refusals`: why its owner may not start
        it, beyond what Slurm says."""
        self._shell = shell
        self._place_of = place_of
        self._directory_of = directory_of
        self._refusals = refusals

    def check(self, record: JobRecord) -> None:
        """InputError where the newest attempt is over its owner's limits (and was not forced), or where Slurm would
        not take it (partition, nodes, account, time)."""
        script = batch_script(record, self._place_of(record))
        if refused := [reason for reason in self._refusals(record) if reason not in record.forced]:
            raise InputError(f"job {record.job_id}: {'; '.join(refused)}")
        answer = self._shell.run(_CHECK, base64.b64encode(script.encode()).decode())
        if answer.code:
            raise InputError(f"job {record.job_id}: Slurm would not take it: {_without_prefix(answer.words)}")

    def submit(self, record: JobRecord, say: Say) -> None:
        """Hand the newest attempt to sbatch; one that Slurm has already is left alone."""
        place = self._place_of(record)
        say(f"submitting {record.attempt.training_job_name} to Slurm, by {self._shell.where}")
        folders = {"inputs.json": "input/data"}
        given = {f"{folders.get(name, 'input/data/job')}/{name}": text for name, text in job_files(record).items()}
        files = {**given, "job.sbatch": batch_script(record, place)}
        answer = self._shell.run(
            _writer(files) + _SUBMIT, place.directory, str(record.attempt.number), record.attempt.training_job_name
        )
        if answer.code:
            raise InputError(f"job {record.job_id}: Slurm did not take it: {_without_prefix(answer.words)}")

    def observe(self, record: JobRecord) -> Observation | None:
        """The newest attempt by its folder and by Slurm together; None where neither knows it."""
        return self._looked([record]).get(record.job_id)

    def states(self, records: Sequence[JobRecord]) -> dict[str, str]:
        """All of them by one script."""
        seen = self._looked([record for record in records if not record.finished])
        return {job_id: observation.state for job_id, observation in seen.items()}

    def _looked(self, records: Sequence[JobRecord]) -> dict[str, Observation]:
        if not records:
            return {}
        directories = {self._directory_of(record): record for record in records}
        answer = self._shell.run(_LOOK, *directories)
        if answer.code:  # not the script's own, which ends with 0: that nothing is told means nothing then
            raise AwayError(f"{self._shell.where}: jobs can't be looked at there: {answer.words}")
        found = {}
        for directory, look in read_looks(answer.out.splitlines()).items():
            record = directories[directory]
            if (observation := look.observation(record.attempt.number)) is not None:
                found[record.job_id] = observation
        return found

    def stop(self, record: JobRecord) -> None:
        """A job that runs saves and ends, within the time that SageMaker gives too; one that waits is cancelled."""
        answer = self._shell.run(_STOP, self._directory_of(record))
        if answer.code == _NO_ROOM:
            raise InputError(f"job {record.job_id}: not stopped: {answer.words}")
        if answer.code:
            raise InputError(f"job {record.job_id}: Slurm did not stop it: {_without_prefix(answer.words)}")

    def read_logs(self, record: JobRecord, cursor: LogCursor) -> list[LogLine]:
        """Whole lines of every machine's log, and of the batch script's, since the cursor."""
        known = [f"{name}:{offset}" for name, offset in cursor.positions.items()]
        limits = str(LOG_BYTES), str(LOG_SHARE_BYTES), str(LOG_TAIL_BYTES if cursor.from_end else 0)
        answer = self._shell.run(_LOGS, self._directory_of(record), *limits, *known)
        if answer.code:  # as of a look: a job without a line ends the script with 0
            raise AwayError(f"{self._shell.where}: logs can't be read there: {answer.words}")
        cursor.more = False
        lines: list[LogLine] = []
        for line in answer.out.splitlines():
            _, name, offset, *rest = line.split(" ")
            content = base64.b64decode(rest[0]) if rest else b""
            is_full = rest[-1] == "more"
            whole = _whole_lines(content, is_full)
            is_tail = cursor.from_end and name not in cursor.positions and int(offset) > 0
            cursor.positions[name] = str(int(offset) + len(whole))
            cursor.more = cursor.more or is_full
            host = name.removesuffix(".txt")
            whole = without_first_line(whole) if is_tail else whole
            lines += [LogLine(host, text, None) for text in whole.decode("utf-8", "replace").splitlines()]
        return lines


PlaceOf = Callable[[JobRecord], ClusterPlace]


def _whole_lines(content: bytes, is_full: bool) -> bytes:
    """As much of `content` as ends with a line. Where a full block holds no end, as a progress bar writes none, up to
    its last return, or all of it: what waited for the end would keep the log from ever going on."""
    end = content.rfind(b"\n") + 1
    if end or not is_full:
        return content[:end]
    if end := content.rfind(b"\r") + 1:
        return content[:end]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(content)
    return content[: len(content) - len(decoder.getstate()[0])]


@dataclass
class Look:
    """What a job's folder and Slurm say of it."""

    submitted: dict[str, str] = field(default_factory=dict)
    slurm: dict[str, str] = field(default_factory=dict)
    """`scontrol show job`; empty where Slurm has forgotten it."""
    is_unreachable: bool = False
    is_stopping: bool = False
    """Somebody asked for its end."""
    events: list[StateChange] = field(default_factory=list)
    outcome: dict[str, str] = field(default_factory=dict)

    def observation(self, attempt: int) -> Observation | None:
        """Of that attempt; None where it was never submitted."""
        if self.submitted.get("attempt") != str(attempt):
            return None
        mine = tuple(event for event in self.events if event.attempt == attempt)
        state, note, failure = self._ended(mine) if self.outcome.get("attempt") == str(attempt) else self._now(mine)
        seconds = self.outcome.get("seconds", "")
        return Observation(
            state=state,
            note=note,
            failure=failure,
            transitions=mine,
            reclaims=max(0, sum(event.state == "Training" for event in mine) - 1),
            running_seconds=float(seconds) if seconds.isdigit() else None,
        )

    def _ended(self, events: Sequence[StateChange]) -> tuple[str, str, str]:
        return self.outcome["state"], events[-1].note if events else "", self.outcome.get("failure", "")

    def _now(self, events: Sequence[StateChange]) -> tuple[str, str, str]:
        """State, note and failure of a job whose script has not written its end."""
        if self.is_unreachable:
            raise SilentError(f"job {self.submitted['id']} of Slurm's: the controller does not answer (scontrol ping)")
        word = self.slurm.get("JobState", "")
        state = _STATES.get(word, "Failed" if not word else "Training")
        if state == "Stopping" and events and events[-1].state == "Interrupted":
            return "Interrupted", events[-1].note, ""
        if state == QUEUED:
            return QUEUED, waiting_words(self.slurm), ""
        if state in ("Failed", "Stopped") and self.is_stopping:
            return "Stopped", _unsaved_words(events), ""
        if state == "Training" and self.is_stopping:
            return "Stopping", "", ""
        if state == "Failed":
            return state, "", _FAILURES.get(word) or f"its batch script was killed{_how_it_ended(self.slurm)}"
        return state, _NOTES.get(word, ""), ""


def _unsaved_words(events: Sequence[StateChange]) -> str:
    """What a stop that its batch script did not see cost."""
    if not events:
        return "before it was started"
    last = events[-1]
    if last.state != "Interrupted":
        return "before its ranks had saved"
    # It waited for its next start.
    return "" if last.note.startswith("saved") or last.note.endswith("; saved") else f"after: {last.note}"


def waiting_words(slurm: Mapping[str, str]) -> str:
    """Why a job waits, by Slurm's reason."""
    partition, reason = slurm.get("Partition", ""), slurm.get("Reason", "None")
    known = {
        "Resources": "its machines are in use, or on their way",
        "Priority": "jobs of a higher priority come first",
        "BeginTime": f"requeued, starts again after {slurm.get('StartTime', 'a while')}",
        "None": "Slurm has not looked at it yet",
        "launch_failed_requeued_held": "Slurm could not start it on a machine, whose slurmd says why in its log, and "
        f"holds it: `scontrol release {slurm.get('JobId', 'ID')}`",
    }
    return f"in partition {partition}: {known.get(reason, reason)}"


def _how_it_ended(slurm: Mapping[str, str]) -> str:
    code, _, number = slurm.get("ExitCode", "").partition(":")
    if number not in ("", "0"):
        return f" by signal {number}"
    return f" (exit code {code})" if code not in ("", "0") else "; Slurm has forgotten why"


def read_looks(lines: Iterable[str]) -> dict[str, Look]:
    """What the look's script printed, by a job's folder."""
    looks: dict[str, Look] = {}
    look = Look()
    for line in lines:
        kind, _, rest = line.partition(" ")
        if kind == "job":
            look = looks.setdefault(rest, Look())
        elif kind in ("submitted", "outcome"):
            name, _, value = rest.partition("=")
            (look.submitted if kind == "submitted" else look.outcome)[name] = value
        elif kind == "slurm":
            pairs = (word.partition("=") for word in rest.split(" "))
            look.slurm = {name: value for name, equals, value in pairs if equals}
        elif kind == "unreachable":
            look.is_unreachable = True
        elif kind == "stopping":
            look.is_stopping = True
        elif kind == "event" and len(parts := rest.split("\t")) == 4:
            attempt, state, at, note = parts
            look.events.append(StateChange(state=state, at=at, attempt=int(attempt), note=note))
    return looks


def _writer(files: Mapping[str, str]) -> str:
    """A shell function that writes those files, each whole or not at all."""
    lines = ["write_files() {"]
    for name, text in files.items():
        content, target = base64.b64encode(text.encode()).decode(), shlex.quote(name)
        lines.append(f"base64 -d <<< {content} > {target}.new && mv {target}.new {target} || return 1")
    return "\n".join([*lines, "}", ""])


def _without_prefix(words: str) -> str:
    return words.removeprefix("sbatch: ").removeprefix("error: ").removeprefix("allocation failure: ")
