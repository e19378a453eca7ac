"""What a deployment that failed says of itself, from the CLI's output."""

from pathlib import Path

from trainyard.operate.deploy import cdk, failure_reason

STACK, OTHER = "trainyard-atlas-blocked-training", "trainyard-atlas-spotty-training"
EVENTS = [
    f"{STACK} |  1/53 | 1:42:22 PM | CREATE_FAILED | AWS::SNS::Topic | Alarms/Topic (AlarmsTopic3A2) no such key",
    f"{STACK} |  2/53 | 1:42:22 PM | CREATE_FAILED | AWS::EC2::EIP | Egress/Ip (EgressIp1) Resource creation cancelled",
    f"{STACK} |  1/53 | 1:42:22 PM | ROLLBACK_IN_PROGRESS | AWS::CloudFormation::Stack | {STACK} no such key",
    "Failed resources:",
    f"{STACK} | 1:42:22 PM | CREATE_FAILED | AWS::SNS::Topic | Alarms/Topic (AlarmsTopic3A2) no such key",
    f"❌  {STACK} failed to deploy",
    "‣ DeploymentError: Resource updates failed:",
    f"{STACK}/AlarmsTopic3A2  (AWS::SNS::Topic AlarmsTopic3A2)",
    "no such key",
]


def test_the_resource_that_failed_is_named_with_its_reason() -> None:
    """The CLI's last line that looks like an error ends in a colon: the reason is below it."""
    assert failure_reason(EVENTS) == f"{STACK}: AWS::SNS::Topic Alarms/Topic (AlarmsTopic3A2) no such key"


def test_of_many_failures_the_first_are_named_and_the_rest_counted() -> None:
    others = [f"{OTHER} | 1:42:22 PM | UPDATE_FAILED | AWS::KMS::Key | Key{n} (Key{n}) refused" for n in range(3)]
    said = failure_reason([*EVENTS, *others])
    assert said.startswith(f"{STACK}: AWS::SNS::Topic ")
    assert f"{OTHER}: AWS::KMS::Key Key0 (Key0) refused; and 2 more" in said


def test_what_our_own_program_said_goes_before() -> None:
    assert failure_reason([*EVENTS, "trainyard: x.yaml: name: missing"]) == "x.yaml: name: missing"


def test_without_an_event_the_telling_line_is_taken() -> None:
    lines = ["Deploying", "❌  failed: AccessDenied: not authorized to perform sts:AssumeRole", "bye"]
    assert failure_reason(lines) == lines[1]
    assert failure_reason([]) == "it printed nothing"


def test_the_log_holds_each_line_at_once(tmp_path: Path) -> None:
    """Where the CLI stands still, the last line of the log is what it did last."""
    program, log = tmp_path / ".venv/bin/cdk", tmp_path / "cdk.log"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho first\necho second\n")
    program.chmod(0o755)
    seen: list[str] = []
    cdk(tmp_path, ["deploy"], {}, log, lambda line: seen.append(f"{line}: {log.read_text().split()[-1]}"))
    assert seen == ["first: first", "second: second"]
