"""scripts/build_image, scripts/check_image and scripts/publish_image: `python -m trainyard.operate.image VERB ...`."""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from trainyard.errors import InputError, JobFailedError, TrainyardError
from trainyard.launch.place import environment_file
from trainyard.launch.session import checkout_root, open_account, state_root
from trainyard.operate.image import build, layout, publish, rules, sbom
from trainyard.operate.image.context import Target, locked
from trainyard.operate.image.layout import Image
from trainyard.spec.platform import load_environment


def main(arguments: list[str] | None = None) -> int:
    """0 done; 1 the build or the check failed; 2 the input was wrong; 3 AWS refused."""
    try:
        options = _parser().parse_args(arguments)
        options.verb(options)
    except TrainyardError as error:
        print(f"trainyard: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainyard.operate.image", description=__doc__)
    verbs = parser.add_subparsers(required=True)
    output = state_root() / "image" / "layout"

    builds = verbs.add_parser("build", prog="scripts/build_image", description="Build the training image.")
    builds.set_defaults(verb=_build)
    builds.add_argument("--base", required=True, metavar="local|NAME@sha256:DIGEST", help="what it is made from")
    builds.add_argument("--accelerator", choices=("cpu", "cuda"), help="which torch (local: cpu, else cuda)")
    builds.add_argument("--python", default="", metavar="3.N", help=f"the base's Python (local: {build.SUITE_PYTHON})")
    builds.add_argument("--efa", choices=("base", "installer", "none"), help="where EFA comes from (cpu: none)")
    builds.add_argument("--efa-installer", type=Path, metavar="FILE", help="aws-efa-installer-VERSION.tar.gz")
    builds.add_argument("--mirror", help="Debian's archive for the local base, or a snapshot of it")
    builds.add_argument("--fresh", action="store_true", help="use nothing of an earlier build")
    builds.add_argument("--output", type=Path, default=output, metavar="DIR", help=f"the OCI layout ({output})")
    builds.add_argument("--work", type=Path, default=state_root() / "image", help="buildah's storage and the log")

    checks = verbs.add_parser("check", prog="scripts/check_image", description="Judge an image by our rules.")
    checks.set_defaults(verb=_check)
    checks.add_argument("layout", nargs="?", type=Path, default=output, metavar="DIR", help=f"an OCI layout ({output})")
    checks.add_argument("--json", action="store_true", help="print the verdict as JSON")

    publishes = verbs.add_parser("publish", prog="scripts/publish_image", description="Push an image, and release it.")
    publishes.set_defaults(verb=_publish)
    publishes.add_argument("environment", metavar="ENV.yaml", help="the environment file, or its name")
    publishes.add_argument("--image", type=Path, default=output, metavar="DIR", help=f"an OCI layout ({output})")
    one = publishes.add_mutually_exclusive_group()
    one.add_argument("--digest", metavar="sha256:...", help="release this one, which is there: a roll-back")
    one.add_argument("--push-only", action="store_true", help="release nothing: a canary does (upgrade_image)")
    publishes.add_argument("--allow-cpu", action="store_true", help="publish an image without CUDA")
    return parser


def _build(given: argparse.Namespace) -> None:
    is_local = given.base == build.LOCAL
    accelerator = given.accelerator or ("cpu" if is_local else "cuda")
    if not is_local and not given.python:
        raise InputError("--python is missing: say which Python the base image has, as in 3.12")
    options = build.Options(
        base=given.base,
        accelerator=accelerator,
        python=given.python or build.SUITE_PYTHON,
        efa=given.efa or ("installer" if given.efa_installer else "none" if accelerator == "cpu" else "base"),
        output=given.output,
        work=given.work,
        efa_installer=given.efa_installer,
        mirror=given.mirror,
        is_fresh=given.fresh,
    )
    digest = build.build(checkout_root(), options, _say)
    image = layout.read(options.output)
    if image.digest != digest:
        raise JobFailedError(f"{options.output}: has {image.digest}, buildah says {digest}; build it again")
    bill = sbom.write(image, options.output)
    _say(f"{bill}: {len(sbom.packages(image))} packages")
    _judge(image, options.output)
    print(digest)


def _check(given: argparse.Namespace) -> None:
    image = layout.read(given.layout)
    if not given.json:
        _judge(image, given.layout)
        return
    verdict = rules.judge(rules.question_of(image, given.layout, pins(image)))
    findings = [{"rule": one.rule, "what": one.what, "mend": one.mend} for one in verdict.findings]
    told = {"image": image.digest, "findings": findings, "held": verdict.held, "not_applied": verdict.not_applied}
    print(json.dumps(told, indent=1))
    if findings:
        raise JobFailedError(_summary(image, len(findings)))


def _publish(given: argparse.Namespace) -> None:
    path = environment_file(given.environment)
    environment = load_environment(path)
    if given.digest:
        account = open_account(environment)
        repository = publish.find_repository(account, environment)
        print(publish.release(account, environment, repository, given.digest, _say))
        return
    image = layout.read(given.image)
    _judge(image, given.image)
    if image.accelerator == "cpu" and not given.allow_cpu and not environment.emulated:
        raise InputError(f"{given.image}: is an image without CUDA, for checks on a laptop; --allow-cpu publishes it")
    log = state_root() / "image" / f"publish-{environment.name}.log"
    if environment.emulated:
        _say("an emulated account has no registry: its ECR gets the manifest, and no layers")
    account = open_account(environment)
    repository = publish.publish(account, environment, path, given.image, image.digest, _say, log)
    if given.push_only:
        print(repository.image(image.digest))
    else:
        print(publish.release(account, environment, repository, image.digest, _say))


def _judge(image: Image, folder: Path) -> None:
    verdict = rules.judge(rules.question_of(image, folder, pins(image)))
    for finding in verdict.findings:
        print(finding, file=sys.stderr)
    if verdict.findings:
        raise JobFailedError(_summary(image, len(verdict.findings)))
    _say(f"{image.digest}: {len(verdict.held)} rules hold" + _not_applied(verdict.not_applied))


def _not_applied(names: tuple[str, ...]) -> str:
    return f"; not applied to an image without CUDA: {', '.join(names)}" if names else ""


def _summary(image: Image, num_findings: int) -> str:
    findings = "finding" if num_findings == 1 else "findings"
    return f"{image.digest}: {num_findings} {findings}; docs/image.md says what the rules are for"


def pins(image: Image) -> Mapping[str, str]:
    """The lock's versions for the image's Python, by plain name."""
    python = next(
        (found[1] for path in image.files if (found := re.match(r"opt/trainyard/lib/python(3\.\d+)/", path))), "3.11"
    )
    target = Target(image.accelerator, python)
    lock = locked(checkout_root() / "training_container" / "requirements.txt", target)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in (pin.split("==") for pin in lock)}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
