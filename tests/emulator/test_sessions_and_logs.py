"""How long a role's session may last, and as which resource a log group is judged."""

import datetime

import pytest
from emulator_testing import ACCOUNT, Site, allow, refusal


def test_a_session_ends_when_its_role_says(site: Site, name: str) -> None:
    short, long = site.role(name), site.role(f"{name}-long", MaxSessionDuration=43200)
    assume = site("sts").assume_role

    def asked(arn: str, seconds: int) -> str:
        return refusal(lambda: assume(RoleArn=arn, RoleSessionName="test", DurationSeconds=seconds))

    assert "exceeds the MaxSessionDuration set for this role" in asked(short, 3601)
    assert "exceeds the MaxSessionDuration set for this role" in asked(long, 43201)
    assert asked(short, 3600) == asked(long, 43200) == ""
    ends = assume(RoleArn=long, RoleSessionName="test", DurationSeconds=43200)["Credentials"]["Expiration"]
    assert ends - datetime.datetime.now(datetime.UTC) > datetime.timedelta(hours=11)


def test_a_session_of_a_role_gives_an_hour_of_another(site: Site, name: str) -> None:
    long = site.role(f"{name}-long", MaxSessionDuration=43200)
    caller = site.tenant(name)
    caller.grant("chain", allow("sts:AssumeRole", long))
    sts = caller.client("sts")
    asked = refusal(lambda: sts.assume_role(RoleArn=long, RoleSessionName="test", DurationSeconds=3601))
    assert "1 hour session limit for roles assumed by role chaining" in asked
    assert refusal(lambda: sts.assume_role(RoleArn=long, RoleSessionName="test", DurationSeconds=3600)) == ""


@pytest.mark.parametrize(
    ("end", "may"), [("", False), (":*", True), (":log-stream:", True), (":log-stream:own*", False)]
)
def test_a_log_group_is_judged_as_its_streams_are(site: Site, name: str, end: str, may: bool) -> None:
    """A policy that names the group without `:*` gives no right at it."""
    site("logs").create_log_group(logGroupName=f"/{name}")
    caller = site.tenant(name)
    arn = f"arn:aws:logs:us-east-1:{ACCOUNT}:log-group:/{name}{end}"
    caller.grant("logs", allow(["logs:DescribeLogStreams", "logs:CreateLogStream", "logs:FilterLogEvents"], arn))
    logs = caller.client("logs")
    for ask in (
        lambda: logs.create_log_stream(logGroupName=f"/{name}", logStreamName="own"),
        lambda: logs.describe_log_streams(logGroupName=f"/{name}"),
        lambda: logs.filter_log_events(logGroupName=f"/{name}"),
    ):
        told = refusal(ask)
        assert (told == "") is may, told
        assert may or f"on resource: arn:aws:logs:us-east-1:{ACCOUNT}:log-group:/{name}:log-stream:" in told
