"""What the pages say can be followed: each page is found, each link leads somewhere, each path is there, each command
is taken by what it names, and each setting of an example is one."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import typer
import yaml
from pydantic import BaseModel

from trainyard.cli.app import app
from trainyard.operate.runbooks.__main__ import parser_of
from trainyard.operate.runbooks.catalog import BY_NAME
from trainyard.spec.job import JobSpec
from trainyard.spec.platform import EnvironmentSpec, TenantSpec

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "benchmarks/README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
EXAMPLES = sorted([*ROOT.glob("jobs/*.yaml"), *ROOT.glob("environments/*.yaml")])
ROOMS = "trainyard|stacks|tests|scripts|docs|benchmarks|jobs|environments|training_container|dashboards"
MADE = {"training_container/dist", "jobs/canary.yaml"}
"""What a command makes, and what the reader has of her own."""
NO_PATHS = {"trainyard/job", "trainyard/jobs"}
"""A label of Kubernetes' and a namespace of CloudWatch's."""
VERBS: Any = typer.main.get_command(app)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Where its links into the checkout lead: (file, heading)."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            path, _, heading = link.partition("#")
            yield (page.parent / path).resolve() if path else page, heading


def headings(page: Path) -> set[str]:
    """As GitHub names them in addresses."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def inline(page: Path) -> list[str]:
    """What stands between backticks in its sentences, in one line each."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [" ".join(found.split()) for found in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


def blocks(page: Path, language: str = "") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def lines_to_type(page: Path) -> Iterator[str]:
    """The lines of its blocks, those that go on in the next one joined, without remarks; of a YAML file its remarks."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^#  *(.*)$", text, re.MULTILINE) if page.suffix == ".yaml" else [*blocks(page)]
    found += re.findall(r"^ {4}(?! )(?:.*\\\n)*.*$", text, re.MULTILINE) if page.suffix == ".md" else []
    for block in found:
        for line in block.replace("\\\n", " ").splitlines():
            yield re.split(r"\s+[#|&>]", line.strip())[0]


def test_every_page_is_found_from_the_first() -> None:
    found, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page not in found and page.suffix == ".md":
            found.add(page)
            left += [path for path, _ in links(page)]
    assert [name_of(page) for page in PAGES if page not in found] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_its_links_lead_somewhere(page: Path) -> None:
    for path, heading in links(page):
        assert path.exists(), path
        assert not heading or heading in headings(path), f"{name_of(path)} has no heading #{heading}"


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=name_of)
def test_the_paths_that_it_names_are_there(page: Path) -> None:
    named = set(re.findall(rf"(?<![\w/.:-])((?:{ROOMS})/[\w./-]*\w)", page.read_text(encoding="utf-8")))
    # NAME and the like are the reader's.
    asked = {path for path in named - MADE - NO_PATHS if not re.search(r"(?<![a-z])[A-Z]+(?![a-z.])", path)}
    assert [path for path in sorted(asked) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_it_marks_as_full_has_such_tests(page: Path) -> None:
    for path in re.findall(r"pytest -m full ([\w/.]+)", page.read_text(encoding="utf-8")):
        assert re.search(r"\bmark\.full\b", (ROOT / path).read_text(encoding="utf-8")), path


def verb_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that is meant, and what is given to it."""
    command, rest = VERBS, list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        for alternative in rest[0].split("|"):
            assert alternative in command.commands, f"{words}: no verb {alternative}"
        command = command.commands[rest.pop(0).split("|")[0]]
    return command, rest


def words_of(line: str) -> list[str] | None:
    """A command of ours without `...` and brackets around what may be left out; None of all else."""
    found = re.match(r"(?:\.venv/bin/)?(trainyard|scripts/runbooks/[a-z_]+) (.*)", line)
    if found is None:
        return None
    try:
        words = shlex.split(found[2])
    except ValueError:  # a part of one
        return None
    return [found[1], *(word.strip("[]") for word in words)]


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=name_of)
def test_commands_to_type_are_taken(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for line in lines_to_type(page):
        words = words_of(line)
        if words is None or re.search(r"[\[|]|(?<!--log )\.\.\.", line):  # a part, or one of several
            continue
        if words[0] == "trainyard":
            command, rest = verb_of(words[1:])
            assert command.make_context("verb", rest) is not None, line
        else:
            parser_of(BY_NAME[words[0].rpartition("/")[2]]).parse_args(words[1:])


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=name_of)
def test_options_of_commands_in_its_sentences_are_known(page: Path) -> None:
    lines = inline(page) if page.suffix == ".md" else []
    for words in filter(None, map(words_of, [*lines, *lines_to_type(page)])):
        if words[0] != "trainyard" or words[1] == "VERB":
            continue
        command, rest = verb_of(words[1:])
        known = {"--help", *(name for option in command.params for name in (*option.opts, *option.secondary_opts))}
        assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= known, words


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def fewest(lists: list[list[str]]) -> list[str]:
    return sorted(lists, key=len)[0]


def unknown(model: type[BaseModel], content: dict[str, Any], where: str = "") -> list[str]:
    """The settings in `content` that `model` has none of, by their dotted names."""
    found: list[str] = []
    for name, value in content.items():
        field = model.model_fields.get(name)
        if field is None:
            found.append(f"{where}{name}")
            continue
        inner = models_in(field.annotation)
        is_named = get_origin(field.annotation) is dict
        below = list(value.values()) if is_named and isinstance(value, dict) else value
        for item in below if isinstance(below, list) else [below]:
            if inner and isinstance(item, dict):
                found += fewest([unknown(other, item, f"{where}{name}.") for other in inner])
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_settings_of_its_examples_are_some(page: Path) -> None:
    for block in blocks(page, "yaml"):
        content = yaml.safe_load(block)
        wrong = [unknown(model, content) for model in (JobSpec, EnvironmentSpec, TenantSpec)]
        assert fewest(wrong) == []


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=name_of)
def test_what_it_sets_is_a_setting(page: Path) -> None:
    for name in re.findall(r"--(?:set|over) \"?([a-z_]+(?:\.[a-z_0-9]+)*)=", page.read_text(encoding="utf-8")):
        content: Any = None
        for part in reversed([part for part in name.split(".") if not part.isdigit()]):
            content = {part: content}
        assert unknown(JobSpec, content) == [], name
