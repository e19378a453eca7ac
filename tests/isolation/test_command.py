"""`trainyard isolation` as a person and a program meet it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard.cli.app import run
from trainyard.errors import JobFailedError
from trainyard.isolation import open_site, proof, prove
from trainyard.isolation import templates as templates_module
from trainyard.isolation.templates import synthesize

ROOT = Path(__file__).parents[2]
LOCAL = ROOT / "environments" / "local.yaml"


@pytest.fixture
def synthesized(monkeypatch: pytest.MonkeyPatch, templates: Any, environment_path: Path) -> Path:
    """The environment's file, and its templates at hand: the command's own synthesis is another test's."""
    monkeypatch.setattr(proof, "synthesize", lambda environment, checkout: templates)
    return environment_path


def test_json_holds_the_contract(synthesized: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["isolation", str(synthesized), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["pairs"] == 2
    assert document["requests"] > 10_000
    assert document["allowed_cross_tenant"] == []
    assert document["denied_own"] == document["foreign_wires"] == []
    assert document["holds"] is True


def test_a_synthesis_that_is_killed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, checkout = tmp_path / "left", tmp_path / "checkout"
    left.mkdir()
    checkout.mkdir()
    (checkout / "cdk.json").write_text('{"context": {}}')
    (checkout / "app.py").write_text("import os, tempfile; tempfile.mkdtemp(); os.kill(os.getpid(), 9)\n")
    monkeypatch.setattr("tempfile.tempdir", str(left))
    monkeypatch.setenv("TMPDIR", str(left))
    with pytest.raises(JobFailedError, match="synthesis failed"):
        synthesize(LOCAL, checkout)
    assert list(left.iterdir()) == []


def test_a_home_that_takes_nothing_keeps_no_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rights don't stop root: what a system without them for us says is asked of os.access."""
    asked = []
    for answer, wanted in ((True, {}), (False, {"JSII_RUNTIME_PACKAGE_CACHE": "disabled"})):
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setattr("os.access", lambda place, _, answer=answer: asked.append(place) or answer)
        assert templates_module._package_cache() == wanted
    assert asked == [tmp_path, tmp_path]  # the nearest folder that is there


@pytest.mark.slow
def test_a_limit_that_is_no_whole_number_of_seconds_in_binary_is_the_same_everywhere(tmp_path: Path) -> None:
    """4.35 h x 3600 is 15,659.999...: policy, request and proof round it alike, or the longest legal job looks like a
    second too long."""
    content = yaml.safe_load(LOCAL.read_text())
    for tenant in content["tenants"].values():
        tenant["max_job_hours"] = 4.35
    path = tmp_path / "local.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    assert prove(open_site(path, ROOT)).holds


def test_the_page_says_it_all(synthesized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "isolation.html"
    assert run(["isolation", str(synthesized), "--html", str(page)]) == 0
    text = page.read_text()
    assert '<span class="holds">isolated</span>' in text
    assert "sagemaker:ListTrainingJobs" in text
    assert "local: 2 tenants, 2 pairs, " in capsys.readouterr().out


def test_a_hole_ends_with_1_and_names_it(
    monkeypatch: pytest.MonkeyPatch, templates: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = json.loads(json.dumps(templates))
    (policy,) = (
        item
        for name, item in changed["trainyard-local-acme-foundation"]["Resources"].items()
        if name.startswith("PermissionsAuditor")
    )
    first = policy["Properties"]["PolicyDocument"]["Statement"][0]
    first["Resource"] = "*"
    monkeypatch.setattr(proof, "synthesize", lambda environment, checkout: changed)
    page = tmp_path / "isolation.html"
    assert run(["isolation", str(LOCAL), "--html", str(page)]) == 1
    out = capsys.readouterr().out
    assert "NOT PROVEN" in out
    assert f"statement {first['Sid']}" in out
    assert "not proven isolated" in page.read_text()


BAD: dict[str, tuple[list[str], str]] = {
    "no such file": (["isolation", "nowhere.yaml"], "nowhere.yaml"),
    "no such name": (["isolation", "nowhere"], "no such environment"),
    "no such folder": (["isolation", str(LOCAL), "--html", "/nowhere/at/all.html"], "there is no folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, expected = BAD[case]
    assert run(arguments) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"acme": 0, "acme-labs": 1}, "policies for acme's jobs (acme-*) would match acme-labs's too"),
        ({"acme": 0, "globex": 0}, "two VPCs would overlap"),
    ],
)
def test_a_wrong_environment_is_refused_before_synthesis(
    names: dict[str, int], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _environment(tmp_path, names)
    assert run(["isolation", str(path)]) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert len(err.strip().splitlines()) == 1


def test_what_only_the_app_knows_is_one_line_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The stacks' own checks run in the synthesis; their line comes through with its exit code."""
    path = _environment(tmp_path, {"acme": 0}, kind="ml.p5.5xlarge")
    assert run(["isolation", str(path)]) == 2
    err = capsys.readouterr().err
    assert "unknown instance type" in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_tenants", [3, pytest.param(10, marks=pytest.mark.full)])
def test_any_number_of_tenants_synthesis_included(num_tenants: int, tmp_path: Path) -> None:
    names = {f"team{letter}": index for index, letter in enumerate("abcdefghij"[:num_tenants])}
    path = _environment(tmp_path, names)
    before = os.times()
    result = prove(open_site(path, ROOT))
    seconds = [now - then for now, then in zip(os.times()[:4], before[:4], strict=True)]  # own, and children's
    print(f"{result.requests:,} requests of {result.pairs} pairs: {result.seconds}; CPU seconds: {seconds}")
    assert result.holds
    assert (result.tenants, result.pairs) == (num_tenants, num_tenants * (num_tenants - 1))
    if num_tenants == 10:  # 1,346,000 in 18 s when this was written: CPU seconds, which no busy machine lengthens
        assert result.requests > 700_000
        assert sum(seconds) < 60


def _environment(folder: Path, names: dict[str, int], kind: str = "ml.p5.4xlarge") -> Path:
    content = yaml.safe_load(LOCAL.read_text())
    tenant = content["tenants"]["acme"]
    tenant["queues"]["gpu"]["instance_types"] = [kind]
    content["max_instances"][kind] = 4
    content["tenants"] = {name: {**tenant, "network_index": index} for name, index in names.items()}
    path = folder / "environment.yaml"
    path.write_text(yaml.safe_dump(content))
    return path
