"""Ctrl-C before the verbs are there to answer it, and while a job is handed over."""

import pytest

from trainyard.cli import main


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
