"""`trainyard emulator environment`: what a shell must know to talk to the emulator as the account's administrator."""

import subprocess

import pytest

from trainyard import emulator
from trainyard.cli.app import run
from trainyard.emulator.info import EmulatorInfo

INFO = EmulatorInfo("http://localhost:4", 4, 4, "123456789012", "us-east-1", "AKIA", "it's; secret")


def test_a_shell_takes_what_it_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(emulator, "find", lambda _: INFO)
    assert run(["emulator", "environment"]) == 0
    said = capsys.readouterr().out
    script = f'{said}\nprintf "%s|%s|%s" "$AWS_ENDPOINT_URL" "$AWS_SECRET_ACCESS_KEY" "$AWS_REGION"'
    shell = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True, env={})
    assert shell.stdout == "http://localhost:4|it's; secret|us-east-1"


def test_without_one_nothing_is_exported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(emulator, "find", lambda _: None)
    assert run(["emulator", "environment"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "not running: trainyard emulator start\n"
