"""What AWS Batch starts again by itself of a training queue's jobs (SubmitServiceJob, retryStrategy). Pure.

Batch tells reasons of SageMaker's with a prefix, takes five rules at most, and in each a beginning with an asterisk. A
lack of capacity it retries on its own, without counting (Batch user guide, "Service job retry strategies"). What a job
of a queue is started again for, `job_resumer` leaves alone: Batch gives its training jobs names of its own.
"""

from collections.abc import Mapping
from typing import Any

PREFIX = "Received status from SageMaker: "
MOST_ATTEMPTS = 10
BEGINNINGS = (
    "InternalServerError",
    # The host's own words (trainer.host) of another one that was lost; SageMaker puts AlgorithmError before them.
    "AlgorithmError: host ",
    "AlgorithmError: the first host ",
    # Saved, and asked to be resumed: no words, exit code 75.
    "AlgorithmError: , exit code: 75",
)


def retry_rules(spec: Mapping[str, Any]) -> dict[str, Any]:
    """`retryStrategy` for a job (its spec as JSON): as often as `recovery.max_resumes` says, for what that mends."""
    resumes = int((spec.get("recovery") or {}).get("max_resumes", 0))
    if not resumes:
        return {"attempts": 1}
    rules = [{"action": "RETRY", "onStatusReason": f"{PREFIX}{words}*"} for words in BEGINNINGS]
    return {
        "attempts": min(1 + resumes, MOST_ATTEMPTS),
        "evaluateOnExit": [*rules, {"action": "EXIT", "onStatusReason": "*"}],
    }
