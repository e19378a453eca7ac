"""Lambda: starts a failed training job again, as `trainyard resume` does, where its `recovery.max_resumes` allows.

For what neither SageMaker nor a training queue starts again: no capacity, SageMaker's own errors, a lost host, "saved,
resume me". Who resumes writes the next attempt into the job's record first, on the condition that it still is as it was
read: of two resumers one wins. The tenant's broker then submits it, with all its checks. Until it has, the attempt says
whose it is and that it is being submitted, as the launcher's do (trainyard.launch.record.Attempt): a person who resumes
the job with other settings meanwhile is told so, and one that has changed the attempt has it.
"""

import contextlib
import datetime
import json
import os
import re
import uuid
from collections.abc import Callable
from typing import Any

HOST_MEMORY = (
    r"[Oo]ut of memory: Killed process \d+|oom-kill:constraint=|was killed by SIGKILL: out of memory on the host"
)
"""What a kernel, or a host of ours, says where a host's memory was full."""
HOST_KILLED = r"[Ee]xit [Cc]ode: (?=(?:\S+ -?\d+, )*\S+ 75\b)(?=(?:\S+ -?\d+, )*\S+ (?:137|-9)\b)"
"""How a failure reason goes on with a host that was killed without a word, beside others that saved and ask to be
resumed. Where all were killed (137 alone), the kernel did it for memory. Codes by host are the emulator's form: that it
is SageMaker's too is unverified (docs/recovery.md)."""
MOST_KILLED = 2
"""How often a job is resumed after that, whatever steps it made: a kernel that kills for memory says no more."""
_KILLED = "a host was killed"
_NO_CAPACITY = "no capacity"
CAUSES = {
    _NO_CAPACITY: r"^CapacityError",
    "SageMaker's own error": r"^InternalServerError",
    "saved, and asked to be resumed": r"exit code: (?:\S+ )?75(?:, \S+ 75)*$",
    "a host was lost": r"^AlgorithmError: (the first )?host \S+ is gone",
    _KILLED: rf"^AlgorithmError: .*{HOST_KILLED}(?:\S+ (?:75|137|-9)(?:, |$))+$",
}
"""Pattern of FailureReason's first line, by what the log and the record call it."""
_LOSSES = ("a host was lost", _KILLED)
NOTE = "resumed by itself"
_CLAIM = "resumer-"
"""How the claim of an attempt begins that nobody has changed since this function wrote it."""
_SUFFIX = re.compile(r"-r\d+$")
_CONFLICTS = ("PreconditionFailed", "ConditionalRequestConflict")
_CONFIRMATIONS = 5
"""How often a record is read again that somebody else wrote meanwhile: each look at a job's state may write it."""
_BROKER_SECONDS = 130
"""How long the broker's answer is waited for: a little longer than it may take (stacks/constructs/broker.py)."""


def cause(job: dict[str, Any]) -> str | None:
    """Which of CAUSES ended `job` (DescribeTrainingJob); None: another start mends nothing, or somebody stopped it."""
    if job["TrainingJobStatus"] != "Failed":
        return None
    reason = str(job.get("FailureReason") or "")
    first = reason.partition("\n")[0]
    why = next((name for name, words in CAUSES.items() if re.search(words, first)), None)
    # Memory that was not enough is not enough on the next host either.
    return None if why in _LOSSES and re.search(HOST_MEMORY, reason) else why


def refusal(record: dict[str, Any], why: str | None, step: int) -> str:
    """Why the job isn't started again, in a line; empty: it is. `step`: of its newest checkpoint."""
    most = record["resolved"]["spec"].get("recovery", {}).get("max_resumes", 0)
    mine = [state["note"] for state in record["states"] if state["note"].startswith(NOTE)]
    if not most:
        return "recovery.max_resumes is 0"
    if why is None:
        return "another start wouldn't mend what ended it"
    if len(mine) >= most:
        return f"recovery.max_resumes is spent ({len(mine)})"
    if why == _KILLED and sum(f": {_KILLED};" in note for note in mine) >= MOST_KILLED:
        return f"hosts were killed without a word after {MOST_KILLED} resumes for that: is their memory enough?"
    if why != _NO_CAPACITY and _last_failure(record).endswith(_how(why, step)):
        return f"a crash loop: twice in a row from step {step}, {why}"
    return ""


def _last_failure(record: dict[str, Any]) -> str:
    """What the newest resume since a person's says of why; empty without one. A lack of capacity in between is no
    start, and who resumed the job has mended what was wrong."""
    asked = asked_attempt(record["attempts"][-1]["number"], record["states"])
    since = [state["note"] for state in record["states"] if state["attempt"] > asked and state["note"].startswith(NOTE)]
    return next((note for note in reversed(since) if f": {_NO_CAPACITY};" not in note), "")


def on_fewer_instances(record: dict[str, Any]) -> dict[str, Any]:
    """The record of a job whose `recovery.elastic` allows it: resolved for the next smaller number (the launcher has
    laid it out), with its global batch. Any other record as it is."""
    now = record["resolved"]["num_hosts"]
    following = next((one for one in record.get("smaller", []) if one["num_hosts"] < now), None)
    if following is None:
        return record
    spec = record["spec"]
    compute = {**spec["compute"], "instance_count": following["num_hosts"]}
    return {**record, "resolved": following, "spec": {**spec, "compute": compute}}


def with_attempt(record: dict[str, Any], why: str, step: int, now: str) -> dict[str, Any]:
    """The record with one more attempt, as trainyard.launch.record has it, that is being submitted."""
    number = record["attempts"][-1]["number"] + 1
    count = 1 + sum(state["note"].startswith(NOTE) for state in record["states"])
    attempt = {"number": number, "training_job_name": f"{record['job_id']}-r{number}", "created_at": now}
    if "claim" in record["attempts"][-1]:  # else its launcher is older, and would refuse what it doesn't know
        attempt |= {"claim": f"{_CLAIM}{uuid.uuid4().hex}", "handed_over_at": moment_after(None)}
    attempt |= {"submitted_at": None, "reclaims": 0, "failure": ""}
    state = {
        "state": "Created",
        "at": now,
        "attempt": number,
        "note": f"{NOTE} ({count}){_where(record)}{_how(why, step)}",
    }
    return {**record, "attempts": [*record["attempts"], attempt], "states": [*record["states"], state]}


def _where(record: dict[str, Any]) -> str:
    """Of an elastic job: on how many instances it goes on."""
    elastic = record["resolved"]["spec"].get("recovery", {}).get("elastic")
    return f" on {record['resolved']['num_hosts']} of {elastic['max_instances']} instances" if elastic else ""


def _how(why: str, step: int) -> str:
    return f": {why}; from step {step}"


def is_ours(record: dict[str, Any], name: str) -> bool:
    """Whether the newest attempt follows attempt `name`, is one of this function's that nobody has changed since, and
    was never submitted."""
    before, newest = ([{}] + record["attempts"])[-2:]
    notes = [state["note"] for state in record["states"] if state["attempt"] == newest["number"]]
    follows = before.get("training_job_name") == name and not newest.get("submitted_at")
    is_unchanged = str(newest.get("claim") or _CLAIM).startswith(_CLAIM)
    return follows and is_unchanged and bool(notes) and notes[0].startswith(NOTE)


def handed_over(record: dict[str, Any], at: str | None) -> dict[str, Any]:
    """The record, its newest attempt being submitted since `at`, where its launcher knows that; None: it is not."""
    *before, newest = record["attempts"]
    return {**record, "attempts": [*before, {**newest, "handed_over_at": at}]} if "claim" in newest else record


def moment_after(before: str | None) -> str:
    """Now, in ISO 8601 and UTC, to the microsecond; the next one after `before` where a clock is behind that: of two
    who hand an attempt over one after the other each knows its own stamp. Older records have whole seconds."""
    now = datetime.datetime.now(datetime.UTC)
    with contextlib.suppress(ValueError, TypeError):  # none, or no moment: nobody need have checked the record
        now = max(now, datetime.datetime.fromisoformat(str(before)) + datetime.timedelta(microseconds=1))
    return now.isoformat(timespec="microseconds")


def in_seconds(moment: str) -> str:
    """A moment of ISO 8601 to the second, as a record's states have it; what is none as it is."""
    try:
        return datetime.datetime.fromisoformat(moment).isoformat(timespec="seconds")
    except ValueError:
        return moment


def asked_attempt(number: int, states: Any) -> int:
    """The newest attempt, of the first `number` ones, that a person asked for: those after it are this function's.

    `states`: a record's, which nobody need have checked.
    """
    told = [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []
    mine = [state.get("attempt") for state in told if str(state.get("note")).startswith(NOTE)]
    return next((one for one in range(number, 1, -1) if one not in mine), 1)


class _NoRecordError(Exception):
    """There is no record of the job: trainyard did not launch it, or the record is gone."""


def _is_missing(error: dict[str, Any]) -> bool:
    """Who may not list a bucket isn't told that an object is missing: S3 says which right it would take to know."""
    is_hidden = error["Code"] == "AccessDenied" and "s3:ListBucket" in str(error.get("Message"))
    return is_hidden or error["Code"] in ("NoSuchKey", "404")


class Records:
    """The tenant's job records."""

    def __init__(self, s3: Any, bucket: str) -> None:
        self._s3, self._bucket = s3, bucket
        self.begun_before: str | None = None
        """Since when somebody else may be submitting the attempt that is submitted here."""

    def read(self, job_id: str) -> tuple[dict[str, Any], str]:
        """The record, and its version."""
        try:
            found = self._s3.get_object(Bucket=self._bucket, Key=f"jobs/{job_id}/record.json")
        except self._s3.exceptions.ClientError as error:
            if _is_missing(error.response["Error"]):
                raise _NoRecordError(job_id) from error
            raise
        return json.load(found["Body"]), found["ETag"]

    def replace(self, record: dict[str, Any], version: str) -> bool:
        """Write it over that version; False where somebody else wrote since."""
        key, body = f"jobs/{record['job_id']}/record.json", json.dumps(record, indent=1).encode()
        writer = {"writer": uuid.uuid4().hex}
        try:
            self._s3.put_object(Bucket=self._bucket, Key=key, Body=body, IfMatch=version, Metadata=writer)
        except self._s3.exceptions.ClientError as error:
            if error.response["Error"]["Code"] not in _CONFLICTS:
                raise
            # The SDK repeats a request whose answer was lost, and then meets what it wrote itself.
            return bool(self._s3.head_object(Bucket=self._bucket, Key=key)["Metadata"] == writer)
        return True

    def confirm(self, submitted: dict[str, Any]) -> None:
        """Write down that the newest attempt of that record was submitted; whoever looks at the job does so too."""
        number = submitted["attempts"][-1]["number"]
        # Not when the answer came: its machines may have begun before that.
        at = in_seconds(submitted["attempts"][-1].get("handed_over_at") or _now())
        state = {"state": "Submitted", "at": at, "attempt": number, "note": ""}

        def change(record: dict[str, Any]) -> dict[str, Any]:
            *before, newest = record["attempts"]
            attempts = [*before, {**newest, "submitted_at": at}]
            return {**record, "attempts": attempts, "states": [*record["states"], state]}

        self._change(submitted, change)

    def take_back(self, refused: dict[str, Any]) -> None:
        """Write down that the newest attempt of that record isn't being submitted here: who will may change it, if
        nobody else is at it."""
        at = refused["attempts"][-1].get("handed_over_at")

        def change(record: dict[str, Any]) -> dict[str, Any]:
            is_last = record["attempts"][-1].get("handed_over_at") == at
            return handed_over(record, self.begun_before) if is_last else record

        self._change(refused, change)

    def _change(self, written: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Change the record, where its newest attempt still is the one that was written, and not submitted."""
        own = written["attempts"][-1]
        for _ in range(_CONFIRMATIONS):
            record, version = self.read(written["job_id"])
            newest = record["attempts"][-1]
            is_own = all(newest.get(name) == own.get(name) for name in ("number", "claim"))
            if not is_own or newest.get("submitted_at"):
                return
            changed = change(record)
            if changed == record or self.replace(changed, version):
                return


def newest_step(s3: Any, bucket: str, job_id: str) -> int:
    """Of the job's committed checkpoints; 0: there is none."""
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"jobs/{job_id}/checkpoints/step-")
    keys = [item["Key"] for page in pages for item in page.get("Contents", [])]
    found = [re.search(r"/step-(\d+)/COMMITTED$", key) for key in keys]
    return max((int(step[1]) for step in found if step), default=0)


def resume(name: str, places: dict[str, str], client: Any) -> dict[str, Any]:
    """Resume the job whose attempt `name` has ended; what was done, or why nothing was.

    `places`: `data` and `checkpoints` buckets, `broker` function; `client`: makes AWS clients. Raises where another try
    may help.
    """
    job_id = _SUFFIX.sub("", name)
    records = Records(client("s3"), places["data"])
    try:
        record, no = _next_attempt(name, job_id, records, places["checkpoints"], client)
    except _NoRecordError as error:
        # What the broker submits says whose it is: then the record is gone, or looked for in the wrong bucket.
        job = client("sagemaker").describe_training_job(TrainingJobName=name)
        if (job.get("Environment") or {}).get("TRAINYARD_JOB_ID") == job_id:
            raise RuntimeError(f"{name}: trainyard launched it, and its record is not in {places['data']}") from error
        return {"left": "it has no job record: trainyard didn't launch it"}
    if no:
        return {"left": no}
    asked = json.dumps({"job_id": job_id}).encode()
    answer = json.load(client("lambda").invoke(FunctionName=places["broker"], Payload=asked)["Payload"])
    if "submitted" in answer:
        records.confirm(record)
        return dict(answer)
    # Else the function itself failed (its time was over, say), or got no answer: the job may be there.
    if "refused" in answer and not answer.get("may_run"):
        with contextlib.suppress(Exception):  # of the two the broker's answer is the one to tell
            records.take_back(record)
    if answer.get("by") != "rules":
        raise RuntimeError(f"{name}: the broker did not submit it: {json.dumps(answer)}")
    return dict(answer)


def _next_attempt(
    name: str, job_id: str, records: Records, checkpoints: str, client: Any
) -> tuple[dict[str, Any], str]:
    """The record with an attempt to submit, written; or why the job is left alone, in a line."""
    for _ in range(_CONFIRMATIONS):
        record, version = records.read(job_id)
        if record["attempts"][-1]["training_job_name"] != name:
            if not is_ours(record, name):
                return record, "somebody has resumed it"
            # An event may come twice, and this function may have died in between.
            records.begun_before = record["attempts"][-1].get("handed_over_at")
            record = handed_over(record, moment_after(records.begun_before))
            if "claim" not in record["attempts"][-1] or records.replace(record, version):
                return record, ""
            continue
        why = cause(client("sagemaker").describe_training_job(TrainingJobName=name))
        step = newest_step(client("s3"), checkpoints, job_id)
        if no := refusal(record, why, step):
            return record, no
        if why == _NO_CAPACITY:
            record = on_fewer_instances(record)
        record = with_attempt(record, str(why), step, _now())
        if records.replace(record, version):
            return record, ""
    raise RuntimeError(f"{name}: somebody else kept writing its record")


def _client(service: str) -> Any:
    """Of Lambda one that waits for the broker and asks once: a broker asked twice at a time would be in its own way."""
    import boto3
    from botocore.config import Config

    patient = Config(read_timeout=_BROKER_SECONDS, retries={"total_max_attempts": 1})
    return boto3.client(service, config=patient if service == "lambda" else None)


def handler(event: dict[str, Any], context: object) -> dict[str, Any]:
    """`event`: {"job": name of a training job that has failed}. After an error Lambda asks twice more."""
    print(f"job {event['job']}")  # first: an error of AWS's need not name it, and its reader resumes it by hand
    answer = {"job": event["job"], **resume(event["job"], json.loads(os.environ["RESUMER"]), _client)}
    print(json.dumps(answer))
    return answer


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
