"""The image itself: a base, the context, the one Dockerfile, and an OCI layout out of it, by buildah.

No Docker engine and no daemon: buildah with chroot isolation, its storage under .trainyard/image. `--base local` makes
a base from Debian's archive by mmdebstrap; any other base is a name with its digest. Only build arguments differ.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainyard.errors import InputError, JobFailedError
from trainyard.operate.image import context as contexts
from trainyard.operate.image.context import EPOCH, Context, Target
from trainyard.spec.checkpoint_names import why_not_here

LOCAL = "local"
SUITE = "bookworm"
SUITE_PYTHON = "3.11"
BASE_PACKAGES = ("ca-certificates", "python3", "python3-venv")
NAME = "localhost/trainyard"
PINNED = re.compile(r"^[a-z0-9][a-z0-9._:/-]*@sha256:[0-9a-f]{64}$")

INSTALL = "scripts/setup --with image"
"""Brings buildah and mmdebstrap."""


@dataclass(frozen=True)
class Options:
    """What to build."""

    base: str
    """`local`, or an image by name and digest."""
    accelerator: str
    """`cpu` or `cuda`."""
    python: str
    """The base's Python, as in `3.12`."""
    efa: str
    """`base`, `installer` or `none`."""
    output: Path
    """The OCI layout's folder, written anew: an older layout, an empty folder, or none."""
    work: Path
    """buildah's storage, the local base, the log."""
    efa_installer: Path | None = None
    mirror: str | None = None
    """Debian's archive for the local base; a snapshot's makes it the same for ever."""
    is_fresh: bool = False
    """Without layers of an earlier build."""
    epoch: int = EPOCH


@dataclass(frozen=True)
class Base:
    """The image that ours begins with."""

    reference: str
    """What the Dockerfile is told."""
    name: str
    digest: str


@dataclass
class Tools:
    """buildah and its like, run into one log; JobFailedError says what one of them said last."""

    work: Path
    say: Callable[[str], None]
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        self.log = self.work / "build.log"
        self.log.write_text("")

    def buildah(self, what: str, *arguments: str) -> str:
        """buildah on our own storage; what it printed."""
        storage = ("--root", str(self.work / "store"), "--runroot", str(self.work / "run"))
        return self.run(what, ["buildah", *storage, *arguments], {"BUILDAH_ISOLATION": "chroot"})

    def run(self, what: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
        """The command's stdout; stderr goes to the log."""
        started = time.monotonic()
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
            )
            log.write(done.stdout)
        if done.returncode:
            last = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()][-1]
            raise JobFailedError(
                f"{what or 'base'}: {command[0]} failed (exit {done.returncode}): {last} (log: {self.log})"
            )
        if what:
            self.say(f"{what}: {time.monotonic() - started:.0f} s")
        return done.stdout.decode(errors="replace").strip()


def check_options(options: Options) -> None:
    """InputError where the machine or the options can't build."""
    if options.base != LOCAL and not PINNED.match(options.base):
        raise InputError(
            f"--base {options.base}: must be `local`, or an image pinned by its digest, NAME@sha256:<64 hex digits> "
            "(skopeo inspect docker://NAME:TAG prints it)"
        )
    if not re.fullmatch(r"3\.(1[1-9]|[2-9]\d)", options.python):
        raise InputError(f"--python {options.python}: must be 3.11 or newer, as in 3.12")
    if options.base == LOCAL and options.python != SUITE_PYTHON:
        raise InputError(f"--python {options.python}: the local base is Debian {SUITE}, whose Python is {SUITE_PYTHON}")
    if (options.efa == "installer") != (options.efa_installer is not None):
        raise InputError("--efa installer and --efa-installer FILE go together: the file is what is installed")
    if options.accelerator == "cuda" and options.efa == "none":
        raise InputError("--efa none: an image with CUDA is for jobs over several hosts too, and needs EFA")
    if options.base == LOCAL and options.accelerator == "cuda":
        raise InputError("--accelerator cuda: the local base is Debian alone, without EFA; name a base with CUDA")
    for option, path in (("--output", options.output), ("--work", options.work)):
        if (why := why_not_here(path)) is not None:
            raise InputError(f"{option} {path}: {why}")
    if options.output.exists() and not _may_be_written_anew(options.output):
        raise InputError(
            f"--output {options.output}: is there and no OCI layout, and all in it would be removed; name another"
        )
    tools = ("buildah", "mmdebstrap") if options.base == LOCAL else ("buildah",)
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise InputError(f"building the image needs {' and '.join(missing)}; run: {INSTALL}")
    if os.geteuid() != 0:
        raise InputError(
            "building the image needs root, of its own name space at least: buildah unshare scripts/build_image"
        )


def _may_be_written_anew(folder: Path) -> bool:
    """Whether nothing but an OCI layout is lost with it."""
    return folder.is_dir() and ((folder / "oci-layout").is_file() or not any(folder.iterdir()))


def build(root: Path, options: Options, say: Callable[[str], None]) -> str:
    """Build from the checkout `root` into `options.output`; the image's digest."""
    check_options(options)
    tools = Tools(options.work, say)
    target = Target(options.accelerator, options.python)
    started = time.monotonic()
    if options.is_fresh:
        shutil.rmtree(root / "training_container" / "dist", ignore_errors=True)
    context = contexts.gather(root, target, efa_installer=options.efa_installer, epoch=options.epoch)
    say(f"context {context.digest}: {time.monotonic() - started:.0f} s")
    base = local_base(tools, options) if options.base == LOCAL else named_base(options.base)
    container = root / "training_container"
    tools.buildah(
        "image",
        *build_arguments(options, context, target, base),
        "-f",
        str(container / "Dockerfile"),
        str(context.folder),
    )
    shutil.rmtree(options.output, ignore_errors=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    digest_file = options.work / "digest"
    tools.buildah(
        "OCI layout",
        "push",
        "--quiet",
        "--format",
        "oci",
        "--digestfile",
        str(digest_file),
        f"{NAME}:built",
        f"oci:{options.output}:built",
    )
    return digest_file.read_text(encoding="utf-8").strip()


def build_arguments(options: Options, context: Context, target: Target, base: Base) -> list[str]:
    """buildah's words for the build: everything in which two builds of one checkout may differ."""
    given = {
        "BASE_IMAGE": base.reference,
        "EFA": options.efa,
        "PYTHON": f"python{options.python}",
        "SOURCE_DATE_EPOCH": str(options.epoch),
        **contexts.arguments_of(context, target, {"name": base.name, "digest": base.digest}),
    }
    arguments = [word for name, value in sorted(given.items()) for word in ("--build-arg", f"{name}={value}")]
    # A layer of an earlier build is known by its commands, which don't say which installer it was.
    cache = ["--no-cache"] if options.is_fresh or options.efa == "installer" else []
    return [
        *("build", "--quiet", "--isolation", "chroot", "--layers", *cache, "--format", "oci"),
        # Of every file and of the image itself: without it two builds would differ in their dates.
        *("--timestamp", str(options.epoch), "--pull=missing" if base.name != NAME + "-base" else "--pull=never"),
        *(*arguments, "--tag", f"{NAME}:built"),
    ]


def named_base(reference: str) -> Base:
    """A registry's image; the registry is asked for it while the image is built."""
    name, _, digest = reference.partition("@")
    return Base(reference, name, digest)


def local_base(tools: Tools, options: Options) -> Base:
    """Debian from its archive, imported into our storage; made once, until --fresh."""
    name = f"{NAME}-base"
    if not options.is_fresh and tools.buildah("", "images", "--quiet", "--filter", f"reference={name}:{SUITE}"):
        return Base(f"{name}:{SUITE}", name, _digest(tools, name))
    archive = options.work / "base.tar"
    include = f"--include={','.join(BASE_PACKAGES)}"
    mirror = [options.mirror] if options.mirror else []
    tools.run(
        f"Debian {SUITE}",
        ["mmdebstrap", "--variant=minbase", include, SUITE, str(archive), *mirror],
        {"SOURCE_DATE_EPOCH": str(options.epoch)},
    )
    container = tools.buildah("", "from", "--quiet", "scratch")
    try:
        tools.buildah("", "add", "--quiet", container, str(archive), "/")
        tools.buildah("", "config", "--cmd", "/bin/bash", container)
        tools.buildah("base", "commit", "--quiet", "--timestamp", str(options.epoch), container, f"{name}:{SUITE}")
    finally:
        tools.buildah("", "rm", container)
        archive.unlink(missing_ok=True)
    return Base(f"{name}:{SUITE}", name, _digest(tools, name))


def _digest(tools: Tools, name: str) -> str:
    return tools.buildah("", "inspect", "--type", "image", "--format", "{{.FromImageDigest}}", f"{name}:{SUITE}")
