"""The Docker context, training_container/dist: wheels with their hashes, and the Dockerfile's other inputs.

Nothing else of the checkout is in it, so that a change of the docs, the CLI or the stacks changes no image. Our own
wheel holds the trainer and the rooms of trainyard that it may import. All is made with SOURCE_DATE_EPOCH, file modes
set and names sorted: the same sources give the same bytes, and `Context.digest` is theirs.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard import __version__
from trainyard.errors import InputError, JobFailedError

EPOCH = 1767225600
"""SOURCE_DATE_EPOCH where none is given: 2026-01-01, the date of every file that a build makes."""

PIP = "pip==25.3"
"""Installs the wheels while the image is built; it stays in its wheel, and the image has none."""
TORCH = "torch"
OURS = "trainyard-trainer"
SOURCE_ONLY = ("deepspeed",)
"""Published as sources alone; their wheels are made here, hold Python only, and need the build tools of .venv."""
ROOMS = ("__init__.py", "errors.py", "importing.py", "kept_room.py", "spec", "hardware", "planner")
"""What of trainyard the trainer may import (ARCHITECTURE.md)."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU builds, where the configured indexes have none."""
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1))
"""Every glibc up to the one that bases have (docs/image.md), as pip takes tags by name: NCCL's wheels are of 2.18."""
OLD_PLATFORMS = ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64")

_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "trainyard-trainer"
version = "{version}"
description = "trainyard's trainer, as its container holds it."
requires-python = ">=3.11"

[project.scripts]
train = "trainer.container:main"

[tool.setuptools.packages.find]
include = ["trainer*", "trainyard*"]

[tool.setuptools.package-data]
"*" = ["*.csv", "*.json", "*.yaml"]
"""


@dataclass(frozen=True)
class Target:
    """What the wheels are for."""

    accelerator: str
    """`cpu` or `cuda`: which build of torch."""
    python: str
    """The base image's Python, as in `3.12`."""


@dataclass(frozen=True)
class Context:
    """A gathered context."""

    folder: Path
    digest: str
    """SHA-256 over the names and bytes of all that is in it, and of the Dockerfile: the label code-digest."""
    packages_digest: str
    """SHA-256 of the other packages' names and hashes."""


def gather(root: Path, target: Target, *, efa_installer: Path | None = None, epoch: int = EPOCH) -> Context:
    """training_container/dist of the checkout `root`, made anew; wheels that fit already are kept.

    InputError where a pin is no wheel, JobFailedError where pip fails.
    """
    container = root / "training_container"
    folder = container / "dist"
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    pins = [PIP, *locked(container / "requirements.txt", target), *_torch_pin(container, target)]
    fetch_wheels(pins, wheels, target, epoch=epoch)
    for stale in wheels.glob("trainyard_trainer-*.whl"):
        stale.unlink()
    build_wheel(root, wheels, epoch=epoch)
    _write_efa(folder / "efa", efa_installer)
    write_requirements(folder)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.utime(path, (epoch, epoch))
    digest = digest_of([*_files(folder), container / "Dockerfile"], container)
    return Context(folder, digest, f"sha256:{_sha256(folder / 'requirements.txt')}")


def locked(requirements: Path, target: Target) -> list[str]:
    """The lock's pins that hold on the target (`name==version`), torch's own apart."""
    from packaging.requirements import InvalidRequirement, Requirement

    found = []
    for number, line in enumerate(requirements.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            why = str(error).splitlines()[0]
            raise InputError(f"{requirements}:{number}: {text!r}: {why}; run scripts/lock") from None
        if len(requirement.specifier) != 1 or not str(requirement.specifier).startswith("=="):
            raise InputError(f"{requirements}:{number}: {text!r} is not pinned by ==; run scripts/lock")
        if requirement.name != TORCH and (requirement.marker is None or requirement.marker.evaluate(_markers(target))):
            found.append(f"{requirement.name}{requirement.specifier}")
    return found


def _markers(target: Target) -> dict[str, str]:
    return {
        "python_version": target.python,
        "python_full_version": f"{target.python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "extra": "",
    }


def _torch_pin(container: Path, target: Target) -> list[str]:
    text = (container / "requirements.in").read_text(encoding="utf-8")
    found = re.search(r"^torch==(\S+)$", text, re.MULTILINE)
    if found is None:
        raise InputError(f"{container / 'requirements.in'}: has no line torch==VERSION")
    return [f"{TORCH}=={found[1]}" + ("+cpu" if target.accelerator == "cpu" else "")]


_CUDA = re.compile(r"nvidia|cuda|triton")
"""Wheels that come with torch's CUDA build."""


def fetch_wheels(pins: Sequence[str], wheels: Path, target: Target, *, epoch: int) -> None:
    """Exactly the wheels of `pins` in the folder (with torch's CUDA libraries, which it pins itself)."""
    missing = [pin for pin in pins if _wheel_of(pin, wheels, target) is None]
    sources = [pin for pin in missing if pin.split("==")[0] in SOURCE_ONLY]
    torch = [pin for pin in missing if pin.split("==")[0] == TORCH]
    binaries = [pin for pin in missing if pin not in (*sources, *torch)]
    if binaries:
        _pip(["download", "--no-deps", "--dest", str(wheels), *_platform(target), *binaries], epoch=epoch)
    if sources:
        _pip(
            ["wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(wheels), *sources],
            epoch=epoch,
        )
    if torch and target.accelerator == "cuda":
        # An earlier torch's: what this one doesn't ask for would stay among the wheels.
        ours = {_wheel_of(pin, wheels, target) for pin in pins}
        for path in [path for path in wheels.iterdir() if _CUDA.match(path.name) and path not in ours]:
            path.unlink()
        # Its CUDA libraries are pinned by torch itself; what the lock has, the lock decides.
        constraints = wheels.parent / "constraints.txt"
        constraints.write_text("\n".join(pin for pin in pins if not pin.startswith("pip==")) + "\n", encoding="utf-8")
        own = ["--find-links", str(wheels), "--constraint", str(constraints)]
        # `==2.13.0` takes 2.13.0+cpu too, where the folder or a configured index has it; `===` takes no other's build.
        exactly = [pin.replace("==", "===") for pin in torch]
        try:
            _pip(["download", "--dest", str(wheels), *own, *_platform(target), *exactly], epoch=epoch)
        finally:
            constraints.unlink()
    elif torch:
        command = ["download", "--no-deps", "--dest", str(wheels), *_platform(target)]
        try:
            _pip([*command, *torch], epoch=epoch)
        except JobFailedError:
            _pip([*command, "--index-url", CPU_INDEX, *torch], epoch=epoch)
    _drop_others(pins, wheels, target)
    if absent := [pin for pin in pins if _wheel_of(pin, wheels, target) is None]:
        raise JobFailedError(f"{wheels}: pip brought no wheel of {', '.join(absent)}; build with --fresh")


def _drop_others(pins: Sequence[str], wheels: Path, target: Target) -> None:
    """Wheels of an earlier lock or another target would be installed by nobody, and change the digest."""
    wanted = {_wheel_of(pin, wheels, target) for pin in pins}
    for path in wheels.iterdir():
        # CUDA's libraries are no pins of ours: they came with torch, and stay as long as it does.
        is_cuda = target.accelerator == "cuda" and _CUDA.match(path.name)
        if path not in wanted and not is_cuda:
            path.unlink()


def _wheel_of(pin: str, wheels: Path, target: Target) -> Path | None:
    """The pin's wheel for the target, where the folder has it."""
    from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

    name, version = pin.split("==")
    minor = int(target.python.partition(".")[2])
    usable = {f"cp3{minor}", "py3"}
    # The stable ABI of a Python is that of every later one.
    stable = {f"cp3{number}" for number in range(2, minor + 1)}
    for path in sorted(wheels.glob("*.whl")):
        try:
            found, found_version, _, tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        fits = any(tag.interpreter in (stable if tag.abi == "abi3" else usable) for tag in tags)
        if found == canonicalize_name(name) and str(found_version) == version and fits:
            return path
    return None


def _platform(target: Target) -> list[str]:
    """pip's words for the target's wheels, whatever Python and machine download them."""
    words = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", target.python]
    for name in (*PLATFORMS, *OLD_PLATFORMS):
        words += ["--platform", name]
    return words


def _pip(arguments: Sequence[str], *, epoch: int) -> None:
    environment = os.environ | {
        "SOURCE_DATE_EPOCH": str(epoch),
        "PYTHONHASHSEED": "0",
        "DS_BUILD_OPS": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], env=environment, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise JobFailedError(f"pip {arguments[0]}: {' '.join(said[-2:]) or f'exit code {done.returncode}'}")


def build_wheel(root: Path, destination: Path, *, epoch: int) -> Path:
    """Our own wheel, of the trainer and what it may import; the same bytes from the same sources."""
    staging = destination.parent / "staging"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        stage(root, staging)
        (staging / "pyproject.toml").write_text(_PYPROJECT.format(version=__version__), encoding="utf-8")
        for path in sorted(staging.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
            os.utime(path, (epoch, epoch))
        _pip(
            ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(destination), str(staging)],
            epoch=epoch,
        )
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return next(destination.glob("trainyard_trainer-*.whl"))


def stage(root: Path, staging: Path) -> None:
    """The sources of our wheel, copied: modules and their data, no caches."""
    kept = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
    staging.mkdir(parents=True)
    shutil.copytree(root / "training_container/trainer", staging / "trainer", ignore=kept)
    for name in ROOMS:
        source, copy = root / "trainyard" / name, staging / "trainyard" / name
        copy.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=kept)
        else:
            shutil.copyfile(source, copy)


def write_requirements(folder: Path) -> None:
    """trainer.txt for our wheel, requirements.txt for all others but pip's: with hashes, so that no other is taken.

    InputError where a package is there twice.
    """
    from packaging.utils import parse_wheel_filename

    lines: dict[str, str] = {}
    for path in sorted((folder / "wheels").glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(path.name)
        if str(name) in lines:
            raise InputError(f"{folder / 'wheels'}: has two wheels of {name}, {version} is one; build with --fresh")
        lines[str(name)] = f"{name}=={version} --hash=sha256:{_sha256(path)}\n"
    lines.pop("pip", None)
    (folder / "trainer.txt").write_text(lines.pop(OURS, ""), encoding="utf-8")
    (folder / "requirements.txt").write_text("".join(lines.values()), encoding="utf-8")


def _write_efa(folder: Path, installer: Path | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if installer is None:
        (folder / "none").write_text("No EFA installer: the base image has EFA, or needs none.\n", encoding="utf-8")
    elif not installer.is_file():
        raise InputError(f"--efa-installer {installer}: no such file; docs/image.md says where it is published")
    else:
        shutil.copyfile(installer, folder / "aws-efa-installer.tar.gz")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def digest_of(files: Iterable[Path], relative_to: Path) -> str:
    """SHA-256 over names and contents, as `sha256:<hex>`."""
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path.relative_to(relative_to).as_posix()} {_sha256(path)}\n".encode())
    return f"sha256:{total.hexdigest()}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def arguments_of(context: Context, target: Target, base: Mapping[str, str]) -> dict[str, str]:
    """The build arguments that say what is in the image."""
    return {
        "ACCELERATOR": target.accelerator,
        "BASE_NAME": base["name"],
        "BASE_DIGEST": base["digest"],
        "CODE_DIGEST": context.digest,
        "PACKAGES_DIGEST": context.packages_digest,
        "VERSION": __version__,
    }
