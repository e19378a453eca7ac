"""Ctrl-C before the verbs are there to answer it, and while a job is handed over."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from trainyard.cli import jobs, main
from trainyard.cli.options import as_given
from trainyard.errors import AwsAwayError
from trainyard.launch.launcher import SubmissionInterruptedError

JOB = "acme-tiny-20260131120000-1a2b"


def interrupted(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt


def test_an_interrupt_outside_of_the_verbs_is_quiet_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainyard.cli.app.run", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["jobs"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == ""


GIVEN = [
    ("local", None, ""),
    ("production", None, " --environment production"),
    ("mine/the production.yaml", "acme", " --environment 'mine/the production.yaml' --tenant acme"),
]


@pytest.fixture(autouse=True)
def nothing_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINYARD_ENVIRONMENT", raising=False)


@pytest.mark.parametrize("where", ["before_now", "follow"])
@pytest.mark.parametrize(("environment", "tenant", "options"), GIVEN)
def test_who_leaves_a_job_that_is_waited_for_is_told_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: str,
    tenant: str | None,
    options: str,
    where: str,
) -> None:
    place = SimpleNamespace(store=None, backend=None)
    monkeypatch.setattr("trainyard.cli.live.before_now", lambda *_: None)
    monkeypatch.setattr(f"trainyard.cli.live.{where}", interrupted)
    monkeypatch.setattr("trainyard.cli.jobs.place_and_id", lambda *_: (place, JOB))
    monkeypatch.setattr("trainyard.launch.watch.stop", lambda *_, **__: SimpleNamespace(state="Stopped", record=None))
    with pytest.raises(KeyboardInterrupt):
        jobs.stop(JOB, environment, tenant, wait=True)
    told = capsys.readouterr().err
    assert told.startswith(f"interrupted: {JOB} goes on") and told.count("\n") == 1
    assert f"`trainyard watch {JOB}{options}`" in told and f"`trainyard stop {JOB}{options}`" in told
    jobs.stop(JOB, environment, tenant)
    assert capsys.readouterr().out == f"{JOB}: Stopped\n  trainyard resume {JOB}{options}\n"


@pytest.mark.parametrize("is_unanswered", [False, True])
@pytest.mark.parametrize(("environment", "tenant", "options"), GIVEN)
def test_who_interrupts_a_submission_or_gets_no_answer_is_told_how_to_end_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: str,
    tenant: str | None,
    options: str,
    is_unanswered: bool,
) -> None:
    end: BaseException = SubmissionInterruptedError(JOB)
    if is_unanswered:
        end = AwsAwayError("no answer")
        end.may_run = JOB

    def handed_over(*_: object, **__: object) -> None:
        raise end

    monkeypatch.setattr("trainyard.cli.jobs._launched", handed_over)
    monkeypatch.setattr("trainyard.cli.jobs.place_and_id", handed_over)
    spec: Any = SimpleNamespace(tracking=None)
    monkeypatch.setattr("trainyard.operate.following.check_tracking", lambda _: None)
    ways: list[Callable[[], object]] = [lambda: jobs.resume(JOB, environment, tenant)]
    if tenant is None:  # a job file names its own
        ways.append(lambda: jobs.launch_job(spec, environment, processes=None, force=False))
    for way in ways:
        with pytest.raises(type(end)):
            way()
        told = capsys.readouterr().err
        assert (f"{JOB} was handed over: it may run" in told) == is_unanswered
        assert f"`trainyard status {JOB}{options}` says" in told
        assert f"`trainyard stop {JOB}{options}`" in told and f"`trainyard resume {JOB}{options}`" in told


def test_a_launch_in_another_environment_says_where_to_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = SimpleNamespace(
        **{"job_id": JOB, "state": "Submitted", "finished": False, "forced": (), "smaller": (), "backend": "slurm"},
        checkpoint_destination="s3://any",
    )
    place = SimpleNamespace(has_resumer=False, has_queue=False)
    monkeypatch.setattr("trainyard.cli.jobs.load_for_backend", lambda *_: None)
    monkeypatch.setattr("trainyard.cli.jobs.launch_job", lambda *_, **__: (place, record))
    jobs.launch(Path("job.yaml"), "production")
    told = capsys.readouterr().out
    assert f"  trainyard logs {JOB} --environment production --follow\n" in told
    assert f"  trainyard status {JOB} --environment production\n" in told


def test_the_default_is_said_where_the_shell_states_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_ENVIRONMENT", "production")
    assert as_given("local") == " --environment local"
    assert as_given("production") == ""
