"""Ctrl-C before the verbs are there to answer it, and while a job is handed over."""

from typing import Any

import pytest

from trainyard.cli import jobs, main


def test_an_interrupt_outside_of_the_verbs_is_quiet_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainyard.cli.app.run", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["jobs"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == ""


def test_who_leaves_a_job_that_is_waited_for_is_told_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainyard.cli.live.follow", interrupted)
    place: Any = None
    with pytest.raises(KeyboardInterrupt):
        jobs._follow(place, "acme-tiny-20260131120000-1a2b", quiet=True)
    told = capsys.readouterr().err
    assert told.startswith("interrupted: acme-tiny-20260131120000-1a2b goes on") and told.count("\n") == 1
    assert "trainyard stop acme-tiny-20260131120000-1a2b" in told
