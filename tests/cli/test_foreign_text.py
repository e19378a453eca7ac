"""What somebody else wrote is printed as it is: rich would take brackets in it for styles, and colons for emoji."""

import io
import json
from pathlib import Path

import pytest
import yaml
from launch_testing import job_content
from rich.console import Console, RenderableType
from rich.errors import MarkupError
from rich.markup import render
from rich.status import Status

from trainyard.cli import canarying, output, sweeping
from trainyard.cli.app import run
from trainyard.launch.place import place_of
from trainyard.launch.session import Account
from trainyard.operate.canary import Check, Verdict
from trainyard.operate.quickstart.narrator import Narrator
from trainyard.operate.sweep.standings import Standing, Standings

WORDS = (
    "no tokenizer in [/opt/ml/input/data/train]",
    "[rank0]: ValueError: 3 is not 4",
    "lora.targets=[q_proj,v_proj]",
    "it ended :warning: with 1",
)
each_of_them = pytest.mark.parametrize("words", WORDS)


def printed(what: RenderableType, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    output.console().print(what)
    return capsys.readouterr().out


@each_of_them
def test_rich_would_make_something_else_of_it(words: str) -> None:
    """Else the tests below could not fail."""
    try:
        assert render(words).plain != words
    except MarkupError:
        return


def test_why_a_job_failed_is_told_as_it_was_said(
    tmp_path: Path,
    environment_path: Path,
    deployed: Account,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))
    path, where = tmp_path / "job.yaml", str(environment_path)
    path.write_text(yaml.safe_dump(job_content()), encoding="utf-8")
    assert run(["launch", str(path), "-e", where, "--json"]) == 0
    job_id = json.loads(capsys.readouterr().out)["job_id"]
    store = place_of(job_id, where, "acme").store
    launched = store.read(job_id).record
    for words in WORDS:
        failed = launched.with_state("Failed", note=words).model_copy(update={"forced": (words,)})
        store.replace(store.read(job_id), failed)
        assert run(["status", job_id, "-e", where]) == 0
        assert capsys.readouterr().out.count(words) == 2, f"{words}: as the state's note, and as what was forced"


@each_of_them
def test_settings_and_reasons_of_trials_stand_in_the_table(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    key, equals, value = words.partition("=")
    settings = {key: value} if equals else {}
    one = Standing(1, settings, None, "refused", 0, None, None, None, None, why=words)
    table = sweeping._table(Standings("rates", words, 1, (one,), usd=None, max_cost_usd=None))
    shown = printed(table, capsys)
    assert shown.count(words) == (3 if equals else 2)


@each_of_them
def test_what_a_canary_compared_stands_in_the_table(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    checks = (Check("state", words, "-", "Completed", is_good=False), Check("loss", "1", "1", "1.1", is_good=True))
    shown = printed(canarying._table(Verdict(checks, differs_in=(words,))), capsys)
    assert shown.count(words) == 2 and "FAIL" in shown and "ok" in shown and "[green]" not in shown


@each_of_them
def test_progress_and_warnings_are_told_as_they_are(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = io.StringIO()
    with Status("working", console=Console(file=shown, force_terminal=True, width=200)) as spinner:
        output.teller(spinner)(words)
    assert words in shown.getvalue()
    with output.console(stderr=True).status("working") as spinner:
        output.teller(spinner)(f"warning: {words}")
    assert capsys.readouterr().err == f"warning: {words}\n"


@each_of_them
@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_quickstart_tells_the_cdks_lines_as_they_are(words: str, is_terminal: bool) -> None:
    shown = io.StringIO()
    narrator = Narrator(Console(file=shown, force_terminal=is_terminal, width=200, no_color=True))
    with narrator.phase("deploy", "cdk deploy") as phase:
        phase.update(words)
        phase.note(words)
        phase.summary = words
    assert shown.getvalue().count(words) >= (3 if is_terminal else 2)
