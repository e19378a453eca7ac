"""What the CDK's CLI asks of docker while it publishes an image: `scripts/lib/docker VERB ...`, its CDK_DOCKER.

An asset of cdk-assets goes `login`, its own `load`, `tag`, `push` (cdk-assets-lib, private/docker.ts and
private/handlers/container-images.ts). No engine is needed for that: the image lies in an OCI layout, and skopeo pushes
it from there, byte for byte, so that the digest stays. What one verb leaves for the next is in a folder of
`publish.publish`, which alone lets an image be pushed: it is the one that it has judged.

An emulated account has ECR's API and no registry behind it: there the manifest alone is put, by that API.
"""

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.errors import AwsRefusedError, InputError, TrainyardError
from trainyard.launch.aws import aws_errors
from trainyard.operate.image.layout import named

FOLDER = "TRAINYARD_PUBLISHING"
"""The variable that names the folder."""

SECONDS = 4 * 3600
"""For one push: gigabytes over an office's line."""


@dataclass(frozen=True)
class Desk:
    """The folder, which only we can read."""

    folder: Path

    @classmethod
    def given(cls) -> "Desk":
        """The one that we were started with."""
        if not (folder := os.environ.get(FOLDER)):
            raise InputError("scripts/lib/docker is no docker: it pushes what scripts/publish_image ENV publishes")
        return cls(Path(folder))

    def prepare(self, layout: Path, digest: str, *, is_emulated: bool) -> dict[str, str]:
        """Let that image be pushed, and no other; the variables for the CLI."""
        self._write("image", {"layout": str(layout.resolve()), "digest": digest, "is_emulated": is_emulated})
        program = Path(__file__).resolve().parents[3] / "scripts/lib/docker"
        # A file there would make the CLI's own credential helper docker's.
        no_helpers = str(self.folder / "no-credential-helpers")
        return {"CDK_DOCKER": str(program), "CDK_DOCKER_CREDS_FILE": no_helpers, FOLDER: str(self.folder)}

    def login(self, registry: str, user: str, password: str) -> None:
        """Keep ECR's token: in a file of ours, as every user of this machine can list the arguments of programs."""
        secret = base64.b64encode(f"{user}:{password}".encode()).decode()
        self._write("auth", {"auths": {registry: {"auth": secret}}})

    def load(self, digest: str) -> str:
        """What the image is called here; InputError for any but the one that was judged, and is there still."""
        image = self._read("image")
        if {digest, named(Path(image["layout"]))} != {image["digest"]}:
            raise InputError(f"{image['layout']}: is no longer {image['digest']}, which was judged; publish it again")
        return digest

    def tag(self, digest: str, destination: str) -> None:
        """Note where it shall go."""
        self._write("tag", {destination: self.load(digest)})

    def push(self, destination: str) -> None:
        """There, by skopeo or ECR's API."""
        if destination not in self._read("tag"):
            raise InputError(f"{destination}: no image has that tag")
        registry = destination.partition("/")[0]
        if [registry] != (known := list(self._read("auth")["auths"])):
            raise AwsRefusedError(f"ECR's token is for {', '.join(known)}, the repository is in {registry}")
        image = self._read("image")
        layout = Path(image["layout"])
        if image["is_emulated"]:
            put_manifest(layout, image["digest"], destination)
        else:
            push(layout, destination, self.folder / "auth")

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_text(json.dumps(content), encoding="utf-8")

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / name).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise InputError(
                f"{FOLDER} {self.folder}: has no {name!r} yet; publishing goes login, load, tag, push, "
                "and scripts/publish_image ENV begins it"
            ) from None


def push(layout: Path, destination: str, secrets: Path, *options: str) -> None:
    """The layout to a registry by skopeo, which compares each blob with its name. `options`: more of skopeo's."""
    command = ["skopeo", "copy", "--preserve-digests", "--authfile", str(secrets), *options]
    try:
        done = subprocess.run(
            [*command, f"oci:{layout}:built", f"docker://{destination}"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise AwsRefusedError(f"pushing to {destination}: took more than {SECONDS // 3600} hours; repeat it") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        fatal = re.search(r'level=fatal msg="(.*)"$', said[-1])
        raise AwsRefusedError(f"pushing to {destination}: {fatal[1] if fatal else said[-1]}")


def put_manifest(layout: Path, digest: str, destination: str) -> None:
    """The manifest by ECR's API, as the CLI's variables say where that is and who asks."""
    import boto3

    name, _, tag = destination.partition("/")[2].rpartition(":")
    text = (layout / "blobs" / digest.replace(":", "/")).read_text(encoding="utf-8")
    kind = json.loads(text).get("mediaType", "application/vnd.oci.image.manifest.v1+json")
    with aws_errors("putting an image into", f"the repository {name}"):
        boto3.client("ecr").put_image(
            repositoryName=name, imageManifest=text, imageManifestMediaType=kind, imageTag=tag, imageDigest=digest
        )


def main(arguments: list[str]) -> int:
    """0 done; 2 not what this is for; 3 AWS refused."""
    try:
        desk = Desk.given()
        match arguments:
            case ["login", "--username", user, "--password-stdin", registry]:
                desk.login(registry, user, sys.stdin.read())
            case ["load", digest]:
                print(desk.load(digest))
            case ["tag", digest, destination]:
                desk.tag(digest, destination)
            case ["push", destination]:
                desk.push(destination)
            case _:
                verb = " ".join(arguments[:1])
                raise InputError(
                    f"docker {verb}: only login, load, tag and push are there, as an asset's publishing has"
                )
    except TrainyardError as error:
        print(f"trainyard: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
