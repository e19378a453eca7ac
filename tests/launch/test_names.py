"""Job ids: within SageMaker's limits for every tenant and job name, and recognized when typed."""

import re
from datetime import UTC, datetime

import pytest

from trainyard.errors import InputError
from trainyard.launch import names

NOW = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
SAGEMAKER_NAME = re.compile(r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}$")


def test_job_id_is_tenant_name_time_and_suffix() -> None:
    assert names.new_job_id("acme", "tiny", now=NOW, suffix="1a2b") == "acme-tiny-20260131120000-1a2b"


@pytest.mark.parametrize("tenant", ["ab", "a" * 20])
@pytest.mark.parametrize("name", ["x", "n" * 40, "a" + "-" * 38 + "b"])
def test_every_attempt_fits_sagemakers_pattern(tenant: str, name: str) -> None:
    job_id = names.new_job_id(tenant, name, now=NOW, suffix="1a2b")
    for number in (1, 2, 99):
        attempt = names.attempt_name(job_id, number)
        assert SAGEMAKER_NAME.match(attempt)
        assert attempt.startswith(f"{tenant}-")
        assert names.job_id_of(attempt) == job_id


def test_two_launches_in_one_second_differ() -> None:
    ids = {names.new_job_id("acme", "tiny", now=NOW) for _ in range(20)}
    assert len(ids) > 1


@pytest.mark.parametrize("typed", ["", "../../etc/passwd", "UPPER", "a b", "x" * 64, "-leading"])
def test_what_cannot_be_a_job_id_is_refused(typed: str) -> None:
    with pytest.raises(InputError, match="must look like"):
        names.job_id_of(typed)
