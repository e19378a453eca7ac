"""A submission whose answer was lost is no refusal: what counts is whether the job is there, and the one asked for."""

import time
from collections.abc import Callable, Mapping
from typing import Any

LOOKS, LOOK_SECONDS = 3, 2.0
"""After a lost answer: how often the job is looked for, and the pause between; AWS may still be at the request."""
ANSWER_SECONDS, ANSWER_TRIES = 12, 4
"""How long one answer is waited for, and how often it is asked for: a submission and a look that get none end before
the function does (unless its ledger or a new role took long: then it gives no answer itself, which says as much)."""

_DECIDED = (
    ("AlgorithmSpecification", "TrainingImage"),
    ("ResourceConfig", "InstanceType"),
    ("ResourceConfig", "InstanceCount"),
    ("StoppingCondition", "MaxRuntimeInSeconds"),
    ("StoppingCondition", "MaxWaitTimeInSeconds"),
)
"""What of a request a job's record decides, and AWS tells as it was asked. Not what a contract decides: between two
submissions of one attempt the tenant's stacks may have been deployed again."""


class UnknownError(Exception):
    """Whether AWS has taken a job can't be known now; a line for people."""


def answered(
    name: str,
    submit: Callable[[], Any],
    look: Callable[[], dict[str, Any] | None],
    *,
    prepare: Callable[[], None],
    give_up: Callable[[], None],
) -> dict[str, Any] | None:
    """`prepare` and `submit` a job; None where AWS took it, and else what `look` finds: it was taken, the answer lost.

    Raises what failed, after `give_up`; UnknownError, without it, where no answer came and no job is there (it may
    come yet), or nobody answers the look.
    """
    try:
        prepare()
    except Exception:
        give_up()
        raise
    try:
        submit()
    except Exception as error:
        found = _looked_for(name, look, error)
        if found is None:
            give_up()
            raise
        return found
    return None


def _looked_for(name: str, look: Callable[[], dict[str, Any] | None], error: Exception) -> dict[str, Any] | None:
    from botocore.exceptions import BotoCoreError, ClientError

    lost, why = is_lost(error), " ".join(str(error).split())
    for number in range(LOOKS if lost or _was_repeated(error) else 1):
        if number:
            time.sleep(LOOK_SECONDS)
        try:
            found = look()
        except (BotoCoreError, ClientError) as silent:
            blind = " ".join(str(silent).split())
            raise UnknownError(
                f"whether {name} was taken can't be known now: {why}; looking for it: {blind}"
            ) from error
        if found is not None:
            return found
    if lost:
        raise UnknownError(f"whether {name} was taken can't be known now: {why}; it isn't there, and may come yet")
    return None


def _was_repeated(error: Exception) -> bool:
    """Whether the SDK asked more than once: an answer that was lost may be before the one that it tells."""
    response: Any = getattr(error, "response", None) or {}
    return bool(response.get("ResponseMetadata", {}).get("RetryAttempts"))


def is_lost(error: Exception) -> bool:
    """Whether AWS may have done what it was asked for, though this came of it."""
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    if isinstance(error, ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
        # The SDK asks again where no answer came, and is then told that the name is taken: by what it asked for first.
        return status >= 500 or error.response["Error"].get("Code") == "ResourceInUse"
    return isinstance(error, (HTTPClientError, ConnectionError, ResponseParserError, HTTPError))


def difference(job: Mapping[str, Any], request: Mapping[str, Any]) -> str:
    """In which of the things that its record decides a job, as DescribeTrainingJob tells it, is another than `request`
    asks for; empty where it is the same."""
    for group, key in _DECIDED:
        there, asked = (job.get(group) or {}).get(key), request[group].get(key)
        if there is not None and there != asked:
            return f"{key} is {there}, not {'none' if asked is None else asked}"
    spot = job.get("EnableManagedSpotTraining")
    if spot is not None and spot != request["EnableManagedSpotTraining"]:
        return f"it runs {'on' if spot else 'without'} spot capacity"
    reads, asked = _spec_of(job), _spec_of(request)
    # At one place for all of a job's specs it may be the one that is meant: earlier trainyards submitted so.
    if reads is None or reads == asked or reads.rstrip("/").endswith("/spec"):
        return ""
    return f"it reads the spec at {reads}, not {asked}"


def _spec_of(job: Mapping[str, Any]) -> str | None:
    """Where it reads its spec from (trainyard.functions.training_request.JOB_CHANNEL, which imports this)."""
    channels = job.get("InputDataConfig") or []
    sources = [one["DataSource"].get("S3DataSource", {}) for one in channels if one["ChannelName"] == "job"]
    return sources[0].get("S3Uri") if sources else None
