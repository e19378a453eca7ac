"""What an image must be, one function a rule: each yields what is wrong, with the mend.

A rule judges the files that a container sees, the configuration and the history; secrets are looked for in every layer,
since what a later layer deletes can still be pulled. Rules about CUDA, NCCL and EFA don't apply to an image that its
label says is for CPUs: `judge` names them as not applied, so that no green line claims them.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trainyard.operate.image import sbom
from trainyard.operate.image.layout import File, Image, is_searched

TRAINYARD = "/opt/trainyard/bin/train"
BAD_NCCL = ((2, 28, 3), (2, 28, 8))
"""First and last of the releases to be avoided between hosts (docs/image.md)."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    rule: str
    what: str
    mend: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}; {self.mend}"


@dataclass(frozen=True)
class Question:
    """What a rule is asked about."""

    image: Image
    pins: Mapping[str, str]
    """The lock: Python package (lower case, dashes) -> version."""
    bill: Mapping[str, Any] | None
    """The list of packages that lies with the image; None where there is none."""


Rule = Callable[[Question], Iterator[tuple[str, str]]]


def base_is_pinned(question: Question) -> Iterator[tuple[str, str]]:
    """What the image was made from is known by digest."""
    digest = question.image.labels.get("org.opencontainers.image.base.digest", "")
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        yield f"label org.opencontainers.image.base.digest is {digest!r}", "build with a base that is pinned by digest"


def code_is_named(question: Question) -> Iterator[tuple[str, str]]:
    """Which sources are in it can be asked of the image itself."""
    digest = question.image.labels.get("io.trainyard.code-digest", "")
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        yield f"label io.trainyard.code-digest is {digest!r}", "build with scripts/build_image"


def entrypoint_trains(question: Question) -> Iterator[tuple[str, str]]:
    """SageMaker runs `IMAGE train`; the program must be told of SIGTERM, so no shell stands before it."""
    image = question.image
    entrypoint = image.settings.get("Entrypoint") or []
    if entrypoint != [TRAINYARD]:
        yield f"entry point is {entrypoint}", f"ENTRYPOINT must be [{TRAINYARD!r}], in the exec form"
    program = image.files.get(TRAINYARD.lstrip("/"))
    if program is None or program.kind != "file" or not program.mode & 0o111:
        yield f"{TRAINYARD} is no program", "the trainer's wheel brings it: build with scripts/build_image"
    folders = image.environment.get("PATH", "").split(":")
    if str(PurePosixPath(TRAINYARD).parent) not in folders:
        yield f"PATH is {':'.join(folders)!r}", f"it must have {PurePosixPath(TRAINYARD).parent}, where `train` is"


def user_is_there(question: Question) -> Iterator[tuple[str, str]]:
    """The entry point starts as root and becomes this user."""
    user = question.image.settings.get("User") or "root"
    if user not in ("root", "0"):
        yield f"starts as {user}", "SageMaker promises /opt/ml to root alone: start as root, the entry point leaves it"
    accounts = question.image.files.get("etc/passwd")
    text = (accounts.text or b"").decode(errors="replace") if accounts else ""
    if not re.search(r"^trainer:[^:]*:1001:", text, re.MULTILINE):
        yield "has no user trainer with uid 1001", "the Dockerfile's useradd makes it; without it jobs run as root"


def cuda_compat_is_absent(question: Question) -> Iterator[tuple[str, str]]:
    """A second libcuda beside the host driver's."""
    for path in question.image.files:
        if re.search(r"(^|/)cuda[^/]*/compat/.*libcuda\.so", path):
            yield f"ships cuda-compat ({path})", "NCCL has hung with it: remove the folder, as the Dockerfile does"
            return


def nccl_is_good(question: Question) -> Iterator[tuple[str, str]]:
    """One NCCL, and not of the releases to be avoided."""
    found = nccl_versions(question.image)
    if not found:
        yield "has no NCCL (libnccl.so.2.*, nvidia-nccl-cu*, libnccl2)", "torch's CUDA wheels bring it"
    for place, version in sorted(found.items()):
        if BAD_NCCL[0] <= version <= BAD_NCCL[1]:
            bad = "-".join(".".join(map(str, end)) for end in BAD_NCCL)
            yield f"NCCL {'.'.join(map(str, version))} at {place}", f"releases {bad} are to be avoided: take another"
    if len(set(found.values())) > 1:
        told = ", ".join(f"{'.'.join(map(str, version))} at {place}" for place, version in sorted(found.items()))
        yield (
            f"has several NCCLs: {told}",
            "which one is loaded is chance: keep torch's; the Dockerfile removes the base's",
        )


def nccl_versions(image: Image) -> dict[str, tuple[int, ...]]:
    """Place -> version of every NCCL that the image has."""
    found = {}
    for path, file in image.files.items():
        named = re.search(r"(?:^|/)libnccl\.so\.(\d+)\.(\d+)\.(\d+)$", path)
        if named and file.kind != "folder":
            found[path] = tuple(map(int, named.groups()))
    for purl, package in sbom.packages(image).items():
        version = re.match(r"(\d+)\.(\d+)\.(\d+)", package["version"])
        if version and re.match(r"nvidia-nccl-cu\d+$|libnccl2$", package["name"]):
            found[purl] = tuple(map(int, version.groups()))
    return found


PLUGIN = "libnccl-net.so"
"""What NCCL asks the loader for."""
LOADER_FOLDERS = ("usr/lib", "usr/lib64", "usr/lib/x86_64-linux-gnu", "lib", "lib64", "lib/x86_64-linux-gnu")
"""Where it looks by itself, of Debian's kind and of Red Hat's. Its cache (/etc/ld.so.conf.d) doesn't help: that has a
library by the name that is inside of it, which newer plugins have another of."""


def efa_is_there(question: Question) -> Iterator[tuple[str, str]]:
    """Jobs over several hosts would crawl over TCP without it."""
    names = {
        "libfabric": r"/libfabric\.so\.\d",
        "EFA's verbs provider": r"/libefa(-rdmav\d+)?\.so",
    }
    for what, pattern in names.items():
        if not any(re.search(pattern, "/" + path) for path in question.image.files):
            yield f"has no {what}", "take a base with EFA, or build with --efa installer"
    told = question.image.environment.get("LD_LIBRARY_PATH", "").split(":")
    places = [*LOADER_FOLDERS, *(folder.strip("/") for folder in told if folder)]
    if not any(f"{place}/{PLUGIN}" in question.image.files for place in places):
        there = sorted(path for path in question.image.files if re.search(r"/libnccl-net\b[^/]*\.so$", path))
        what = f"has no {PLUGIN} (aws-ofi-nccl) where NCCL's loader looks"
        if there:
            yield f"{what}: it has /{there[0]}", f"link it into /{LOADER_FOLDERS[0]}, as the Dockerfile does"
        else:
            yield what, "take a base with EFA, or build with --efa installer"


def network_is_left_alone(question: Question) -> Iterator[tuple[str, str]]:
    """Variables from old advice that a current plugin doesn't want."""
    for name, bad in (("RDMAV_FORK_SAFE", "1"), ("NCCL_PROTO", "simple"), ("FI_PROVIDER", "tcp")):
        if question.image.environment.get(name, "").lower() == bad:
            yield f"sets {name}={bad}", "a current aws-ofi-nccl must not be told so: drop it"


_NAMED_LIKE_SECRETS = re.compile(
    r"(^|/)(\.aws/credentials|\.netrc|\.git-credentials|\.docker/config\.json|\.npmrc|\.pypirc|\.kube/config"
    r"|id_(rsa|dsa|ecdsa|ed25519)|.*\.p12|\.env)$"
)
_LOOKS_SECRET = {
    "an AWS access key": re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{16}\b"),
    "an AWS secret key": re.compile(r"aws_secret_access_key\s*[=:]\s*['\"]?[A-Za-z0-9/+]{40}", re.IGNORECASE),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{30,}\b"),
    "a GitHub token": re.compile(r"\b(ghp|gho|ghs|github_pat)_[A-Za-z0-9_]{30,}\b"),
    "a password in a URL": re.compile(r"\bhttps?://[^/\s:@]+:[^/\s:@$]+@"),
}
_SECRET_VARIABLE = re.compile(r"(password|passwd|secret|token|api_?key|access_?key)$", re.IGNORECASE)


def holds_no_secret(question: Question) -> Iterator[tuple[str, str]]:
    """In variables, labels, history and the files of every layer, deleted ones too."""
    image = question.image
    mend = "take it out, build anew, and change it: whoever pulled the image has it"
    for name, value in image.environment.items():
        if value and _SECRET_VARIABLE.search(name):
            yield f"variable {name} is set", mend
    told = {f"history entry {number}": str(step.get("created_by", "")) for number, step in enumerate(_history(image))}
    told |= {f"variable {name}": value for name, value in image.environment.items()}
    told |= {f"label {name}": str(value) for name, value in image.labels.items()}
    for where, text in told.items():
        yield from ((f"{where} holds {what}", mend) for what in secrets_in(text))
    for file in (file for layer in image.layers for file in layer):
        if file.kind == "file" and file.size and _NAMED_LIKE_SECRETS.search(file.path):
            yield f"layer {file.layer} has /{file.path}", mend
        elif file.text is not None and is_searched(file.path):
            found = secrets_in(file.text.decode(errors="replace"))
            yield from ((f"layer {file.layer}: /{file.path} holds {what}", mend) for what in found)


def secrets_in(text: str) -> list[str]:
    """What in `text` looks like a secret."""
    return [what for what, pattern in _LOOKS_SECRET.items() if pattern.search(text)]


def _history(image: Image) -> list[Mapping[str, Any]]:
    return list(image.config.get("history") or [])


def rights_are_plain(question: Question) -> Iterator[tuple[str, str]]:
    """No program lends its owner's rights, nobody but its owner changes a file, and our code is root's."""
    for file in question.image.files.values():
        if file.kind == "file" and file.mode & 0o6000:
            yield f"/{file.path} is setuid or setgid ({file.mode:o})", "chmod a-s, as the Dockerfile does last"
        if file.kind in ("file", "folder") and file.mode & 0o002 and not _is_scratch(file):
            yield f"/{file.path} is writable for everybody ({file.mode:o})", "chmod o-w"
        if file.path.startswith("opt/trainyard/") and file.user != 0:
            yield f"/{file.path} belongs to uid {file.user}", "a job must not change the code that it runs: chown root"


def _is_scratch(file: File) -> bool:
    return file.kind == "folder" and bool(file.mode & 0o1000)


def packages_are_locked(question: Question) -> Iterator[tuple[str, str]]:
    """The lock's versions are in it. What else is in it (torch and its libraries, the base's own) is not asked."""
    has: dict[str, set[str]] = {}
    for purl, package in sbom.packages(question.image).items():
        if purl.startswith("pkg:pypi/"):
            has.setdefault(purl.removeprefix("pkg:pypi/").split("@")[0], set()).add(package["version"].split("+")[0])
    mend = "build it anew from this checkout, or check it with the checkout that it was built from"
    for name, version in sorted(question.pins.items()):
        if version.split("+")[0] not in has.get(name, set()):
            yield f"{name} is {', '.join(sorted(has.get(name, set()))) or 'missing'}, the lock says {version}", mend


def packages_are_listed(question: Question) -> Iterator[tuple[str, str]]:
    """The list of packages that lies with it is this image's."""
    if question.bill is None:
        yield f"has no {sbom.FILE_NAME} beside it", "scripts/build_image writes it"
    elif dict(question.bill) != sbom.document(question.image):
        yield f"{sbom.FILE_NAME} is not this image's", "scripts/build_image writes it anew"


EVERYWHERE: tuple[Rule, ...] = (
    base_is_pinned,
    code_is_named,
    entrypoint_trains,
    user_is_there,
    network_is_left_alone,
    holds_no_secret,
    rights_are_plain,
    packages_are_locked,
    packages_are_listed,
)
WITH_CUDA: tuple[Rule, ...] = (cuda_compat_is_absent, nccl_is_good, efa_is_there)


@dataclass(frozen=True)
class Verdict:
    """What was found, and what wasn't asked."""

    findings: tuple[Finding, ...]
    held: tuple[str, ...]
    not_applied: tuple[str, ...]


def judge(question: Question) -> Verdict:
    """Every rule that applies to the image."""
    is_cuda = question.image.accelerator == "cuda"
    applied = (*EVERYWHERE, *(WITH_CUDA if is_cuda else ()))
    findings: list[Finding] = []
    held = []
    for rule in applied:
        found = [Finding(name_of(rule), what, mend) for what, mend in rule(question)]
        findings += found
        if not found:
            held.append(name_of(rule))
    return Verdict(tuple(findings), tuple(held), () if is_cuda else tuple(map(name_of, WITH_CUDA)))


def name_of(rule: Rule) -> str:
    """`nccl-is-good` of nccl_is_good."""
    return rule.__name__.replace("_", "-")


def question_of(image: Image, folder: Path, pins: Mapping[str, str]) -> Question:
    """The image of the layout `folder`, with the list that lies there."""
    import json

    try:
        bill = json.loads((folder / sbom.FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        bill = None
    return Question(image, pins, bill if isinstance(bill, dict) else None)
