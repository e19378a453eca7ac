"""Every verb explains itself: an example in its --help, one line and the right code for what is mistyped."""

import subprocess
import sys

import pytest
import typer

from trainyard import __version__
from trainyard.cli.app import app, run

GROUP = typer.main.get_command(app)


def verbs() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, command in GROUP.commands.items():
        inner = getattr(command, "commands", None)
        found += [(name, verb) for verb in inner] if inner else [(name,)]
    return found


@pytest.mark.parametrize("verb", verbs(), ids=" ".join)
def test_help_holds_an_example_that_names_the_verb(verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*verb, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Example: trainyard {' '.join(verb)}" in shown


def test_the_verbs_of_the_contract_are_there() -> None:
    wanted = {"plan", "predict", "launch", "status", "logs", "stop", "resume", "checkpoints", "doctor", "jobs"}
    assert wanted <= {verb[0] for verb in verbs()}


@pytest.mark.parametrize("verb", ["plan", "launch", "status", "stop", "resume", "jobs", "checkpoints", "doctor"])
def test_verbs_that_programs_read_speak_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    run([verb, "--help"])
    assert "--json" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"trainyard {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["lunch"], "Did you mean 'launch'?"),
        (["plan"], "Missing argument 'JOB.yaml'"),
        (["plan", "job.yaml", "--nope"], "No such option"),
        (["launch", "job.yaml", "--backend", "moon"], "'moon'"),
        (["emulator", "start", "--port", "99999999"], "less than or equal to 65535"),
        (["predict"], "--jsonl"),
        (["predict", "--jsonl", "my file"], "on stdin: trainyard predict --jsonl < 'my file'"),
        (["checkpoints", "verfy", "acme-x-20260131120000-1a2b"], "no such verb: verfy; did you mean verify?"),
    ],
    ids=["verb", "argument", "option", "choice", "range", "predict", "predict a file", "verb of checkpoints"],
)
def test_what_is_mistyped_gets_one_line_and_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("trainyard: ") and printed.err.count("\n") == 1
    assert told in printed.err


@pytest.mark.parametrize("group", ["checkpoints", "tenant", "prices", "emulator"])
def test_a_group_without_a_verb_prints_its_help_alone(group: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run([group]) == 0
    printed = capfd.readouterr()
    assert "Usage" in printed.out + printed.err and "trainyard: " not in printed.err


def test_help_loads_nothing_heavy() -> None:
    # What makes a verb slow to start is what it imports; the time itself depends on the machine.
    heavy = {"boto3", "moto", "sagemaker", "torch"}
    loaded = f"import sys, trainyard.cli.app; print(sorted({heavy} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", loaded], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"
