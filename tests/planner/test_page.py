"""The plan's page: whole by itself, well-formed, with every picture, and no words on top of other words."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trainyard.cli.app import run
from trainyard.planner import plan, search
from trainyard.planner.drawing import CHARACTER_WIDTH, WIDTH, Bar, Picture, Scale, stacked_bars, ticks
from trainyard.planner.money import todays_book
from trainyard.planner.page import _headline, _label, apart, decades, page_of
from trainyard.spec.job import JobSpec

MakeJob = Callable[..., JobSpec]
JOBS = Path(__file__).resolve().parents[2] / "jobs"
NAMES = ("memory of a GPU", "a step's time", "scaling", "dollars against hours")


@pytest.fixture(scope="module")
def page() -> str:
    """Of one job; making it takes a second or two."""
    from trainyard.spec.base import parse

    job = parse(
        JobSpec,
        {
            "name": "a-job",
            "model": {"source": "llama-2-7b"},
            "data": {"train": [{"path": "x", "format": "text"}], "sequence_length": 4096},
            "training": {"steps": 1000, "global_batch_size": 256, "learning_rate": 1e-4},
            "compute": {"backend": "sagemaker", "instance_type": "ml.p5.48xlarge", "instance_count": 2},
        },
        "job",
    )
    book = todays_book()
    found = search(job, instances=["p4d.24xlarge", "p5.48xlarge"], max_nodes=4, book=book)
    return page_of(job, plan(job, book=book), book=book, search=found)


def pictures(page: str) -> dict[str, ElementTree.Element]:
    found = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]
    return {item.attrib["aria-label"]: item for item in found}


def test_the_page_loads_nothing_and_runs_nothing(page: str) -> None:
    assert not re.search(r"https?://|<script|<link|<img|src=|url\(|@import", page)
    assert page.startswith("<!DOCTYPE html>")


def test_every_tag_is_closed(page: str) -> None:
    class Tags(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag != "meta":
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    tags = Tags()
    tags.feed(page)
    assert tags.open == []


def test_all_four_pictures_are_there_with_their_uncertainty(page: str) -> None:
    found = pictures(page)
    assert set(found) == set(NAMES)
    assert found["scaling"].findall("polygon"), "bands"
    for name in ("memory of a GPU", "a step's time"):
        whiskers = [line for line in found[name].findall("line") if line.attrib["stroke"] == "#111"]
        assert len(whiskers) >= 3
    crosses = [line for line in found["dollars against hours"].findall("line") if line.attrib["stroke"] == "#bbb"]
    assert crosses


@pytest.mark.parametrize("name", NAMES)
def test_nothing_leaves_the_picture_and_no_words_lie_on_others(page: str, name: str) -> None:
    picture = pictures(page)[name]
    height = float(picture.attrib["viewBox"].split()[3])
    boxes = []
    for text in picture.findall("text"):
        size, words = float(text.attrib["font-size"]), text.text or ""
        width = len(words) * 0.5 * size
        x = float(text.attrib["x"])
        left = {"start": x, "middle": x - width / 2, "end": x - width}[text.attrib["text-anchor"]]
        top = float(text.attrib["y"]) - 0.75 * size
        assert left >= -1 and left + width <= WIDTH + 1 and top >= -1 and top + size <= height + 1, words
        boxes.append((left, top, left + width, top + size * 0.8, words))
    assert len(boxes) > 5
    for one, other in combinations(boxes, 2):
        apart_across = one[2] <= other[0] or other[2] <= one[0]
        apart_down = one[3] <= other[1] or other[3] <= one[1]
        assert apart_across or apart_down, f"{one[4]!r} lies on {other[4]!r}"


def covered_by(picture: Picture, dots: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those dots that lie under a picture's one text."""
    text = ElementTree.fromstring(picture.svg()).find("text")
    assert text is not None
    width = len(text.text or "") * CHARACTER_WIDTH
    left = float(text.attrib["x"]) - {"start": 0.0, "middle": 0.5, "end": 1.0}[text.attrib["text-anchor"]] * width
    below = float(text.attrib["y"])
    assert left >= 0 and left + width <= WIDTH and 0 < below < 360
    return [(x, y) for x, y in dots if left - 4 < x < left + width + 4 and below - 14 < y < below + 4]


@pytest.mark.parametrize("place", [(500.0, 200.0), (104.0, 200.0), (945.0, 200.0), (500.0, 34.0), (500.0, 355.0)])
def test_the_chosen_machines_name_lies_on_no_point(place: tuple[float, float]) -> None:
    """Also at the frame's edges, with points on all sides but one."""
    words, (x, y) = "8 x ml.p5.48xlarge", place
    sides = [(x - 30, y - 16), (x + 30, y - 16), (x - 30, y + 16), (x + 30, y + 16), (x + 40, y), (x - 40, y)]
    for free in range(len(sides)):
        dots = [place, *sides[:free], *sides[free + 1 :]]
        picture = Picture(430, "dollars against hours")
        _label(picture, words, x, y, dots)
        assert covered_by(picture, dots) == []


def test_bars_are_as_long_as_their_values() -> None:
    drawn = ElementTree.fromstring(stacked_bars("x", "s", ["a", "b"], [Bar("one", [1.0, 3.0]), Bar("two", [2.0, 2.0])]))
    boxes = [item for item in drawn.findall("rect") if item.find("title") is not None]
    widths = [float(item.attrib["width"]) for item in boxes]
    assert widths[1] == pytest.approx(3 * widths[0], rel=1e-3)
    assert widths[2] == pytest.approx(widths[3], rel=1e-3) == pytest.approx(2 * widths[0], rel=1e-3)
    assert "&lt;b&gt;" in stacked_bars("x", "s", ["<b>"], [Bar("<b>", [1.0])])


def test_scales_ticks_and_labels() -> None:
    assert ticks(10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0) == [0.0]
    assert list(decades(0.2, 4)) == pytest.approx([0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3]), (
        "less than an hour has its marks too"
    )
    assert list(decades(20, 100)) == [20, 30, 50, 70, 100]
    scale = Scale(1, 100, 0, 200, logarithmic=True)
    assert (scale.at(1), scale.at(10), scale.at(100), scale.at(1e6)) == (0, pytest.approx(100), 200, 200)
    assert [place[0] for place in apart([(10, "a", ""), (12, "b", ""), (90, "c", "")])] == [10, 25, 90]


def test_the_headline_says_what_the_terminal_says_of_limits_and_room(job: MakeJob) -> None:
    spec = job(parallelism={"data_replicate": 128}, budget={"max_usd": 1}, training={"global_batch_size": 512})
    found = plan(spec)
    assert found.fits is False and found.affordable is False
    headline = _headline(found)
    assert "It does not fit: " in headline and "Not affordable: " in headline and "of budget.max_usd $1.00" in headline


def test_a_job_here_gets_a_page_of_what_is_known(job: MakeJob) -> None:
    spec = job(
        model={"source": "gpt2"},
        data={"sequence_length": 1024},
        compute={"backend": "local", "instance_type": None, "instance_count": 1},
    )
    book = todays_book()
    text = page_of(spec, plan(spec, book=book), book=book)
    assert "memory of a GPU" in text and "Not known for this job." in text


def test_the_verb_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.html"
    assert run(["plan", str(JOBS / "llama-8b-lora.yaml"), "--html", str(file)]) == 0
    assert set(pictures(file.read_text(encoding="utf-8"))) >= {"memory of a GPU", "a step's time"}
    assert "written" in capsys.readouterr().err
    assert run(["plan", str(JOBS / "llama-8b-lora.yaml"), "--html", str(tmp_path / "no" / "plan.html")]) == 2
    assert "can't be written" in capsys.readouterr().err
