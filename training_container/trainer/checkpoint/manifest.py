"""What a committed checkpoint promises: its files, sizes and hashes, and everything that is not a tensor."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainyard.errors import InputError
from trainyard.spec.checkpoint_names import file_name, other_step

FORMAT_VERSION = 1
FOLDER = "checkpoints"
MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
PREVIOUS_STEP = "previous_step"
"""Key of `extra`: the step of the checkpoint that was committed or loaded before this one; null: it is the job's first.
What the first trainers wrote hasn't it."""
ATTEMPT = "attempt"
"""Key of `extra`: which start of the job saved it, counted from 1."""
_HASHED_AT_ONCE_BYTES = 1 << 20


class ManifestError(Exception):
    """A manifest or marker that is torn, altered or unreadable: one line."""


class NewerFormatError(ManifestError):
    """Written by a newer trainer, and nothing is wrong with it: who passed it over would lose what it holds."""

    def refusal(self, uri: str) -> InputError:
        """What to end with: the checkpoint's place, and what to do."""
        return InputError(
            f"checkpoint {uri}: {self}, so a newer one wrote it; nothing was started anew or removed: "
            "launch the job with that image, or a newer one"
        )


@dataclass(frozen=True)
class ShardFile:
    """One file of a checkpoint."""

    name: str
    """Relative to the step's folder."""
    num_bytes: int
    sha256: str
    """Lower-case hex."""


@dataclass(frozen=True)
class Manifest:
    """One checkpoint's promise."""

    step: int
    world_size: int
    """Ranks that wrote it; any number may read it."""
    files: tuple[ShardFile, ...]
    extra: dict[str, Any]
    """JSON of rank 0: data position, RNG, strategy, ..."""
    extra_by_rank: dict[str, dict[str, Any]]
    """Rank -> its top-level keys of `extra` that differ from rank 0's (RNG states)."""

    @property
    def attempt(self) -> int | None:
        """The start that saved it; None where it doesn't say."""
        found = self.extra.get(ATTEMPT)
        return found if isinstance(found, int) else None

    def to_bytes(self) -> bytes:
        """The file's content."""
        content = {
            "version": FORMAT_VERSION,
            "step": self.step,
            "world_size": self.world_size,
            "shards": [{"name": file.name, "bytes": file.num_bytes, "sha256": file.sha256} for file in self.files],
            **self.extra_as_sections(),
        }
        return (json.dumps(content, indent=1) + "\n").encode()

    def extra_as_sections(self) -> dict[str, Any]:
        """`extra` under its own key, and the ranks' deviations where there are any."""
        sections: dict[str, Any] = {"extra": self.extra}
        if self.extra_by_rank:
            sections["extra_by_rank"] = self.extra_by_rank
        return sections

    def extra_of(self, rank: int, world_size: int) -> dict[str, Any]:
        """What `rank` gave when it saved; rank 0's when the number of ranks has changed since."""
        own = self.extra_by_rank.get(str(rank), {}) if world_size == self.world_size else {}
        return self.extra | own

    def completed(self, more: Mapping[str, Any]) -> "Manifest":
        """With `more` in every rank's `extra`."""
        by_rank = {
            rank: kept
            for rank, values in self.extra_by_rank.items()
            if (kept := {key: value for key, value in values.items() if key not in more})
        }
        return replace(self, extra=self.extra | dict(more), extra_by_rank=by_rank)


def combine_extra(by_rank: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Rank 0's values, and per rank only those that differ."""
    first = dict(by_rank[0])
    missing = object()
    differing = {
        str(rank): {key: value for key, value in extra.items() if first.get(key, missing) != value}
        for rank, extra in enumerate(by_rank)
    }
    return first, {rank: values for rank, values in differing.items() if values}


def parse_manifest(content: bytes) -> Manifest:
    """The manifest in `content`; ManifestError where it isn't one, NewerFormatError where it is a newer trainer's."""
    try:
        raw = json.loads(content)
        version = int(raw["version"])
        if version > FORMAT_VERSION:
            raise NewerFormatError(f"{MANIFEST} has version {version}, this trainer reads up to {FORMAT_VERSION}")
        return Manifest(
            step=int(raw["step"]),
            world_size=int(raw["world_size"]),
            files=tuple(ShardFile(file_name(s["name"]), int(s["bytes"]), str(s["sha256"])) for s in raw["shards"]),
            extra=dict(raw["extra"]),
            extra_by_rank={str(rank): dict(own) for rank, own in dict(raw.get("extra_by_rank", {})).items()},
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:  # JSON as Python reads it has infinity
        raise ManifestError(f"{MANIFEST} can't be read ({type(error).__name__}: {error})") from None


def commit_marker(step: int, manifest: bytes, *, replaced: bytes | None = None) -> bytes:
    """Content of COMMITTED: it binds the marker to one manifest, so that a torn or swapped one shows.

    `replaced`: the manifest that is there until the new one is written; either is good meanwhile.
    """
    content = {"step": step, "manifest_sha256": hashlib.sha256(manifest).hexdigest()}
    if replaced is not None:
        content["replaced_sha256"] = hashlib.sha256(replaced).hexdigest()
    return (json.dumps(content) + "\n").encode()


def committed_manifest(step: int, content: bytes, marker: bytes) -> Manifest:
    """The manifest in `content`, of the folder of `step`, if `marker` belongs to it.

    ManifestError where it doesn't, or either is of another step, or none; NewerFormatError as of parse_manifest.
    """
    try:
        said = json.loads(marker)
        promised, marked = (said["manifest_sha256"], said.get("replaced_sha256")), said.get("step")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ManifestError(f"{COMMITTED} is torn") from None
    if hashlib.sha256(content).hexdigest() not in promised:
        raise ManifestError(f"{MANIFEST} is not the one that was committed (SHA-256 differs)")
    manifest = parse_manifest(content)
    if (problem := other_step(step, manifest=manifest.step, marker=marked)) is not None:
        raise ManifestError(problem)
    return manifest


def step_folder(step: int) -> str:
    """Folder of a step's checkpoint, under the destination."""
    return f"{FOLDER}/step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step whose folder the file `name` (under the destination) lies in; None if in no step's."""
    parts = name.split("/")
    if len(parts) < 3 or parts[0] != FOLDER or not parts[1].startswith("step-"):
        return None
    digits = parts[1].removeprefix("step-")
    return int(digits) if digits.isdecimal() else None


def shard_file(path: Path, beat: Callable[[], None] | None = None) -> ShardFile:
    """Size and hash of a file on disk. `beat`: called after each block, by a rank that the others wait for."""
    digest, num_bytes, buffer = hashlib.sha256(), 0, memoryview(bytearray(_HASHED_AT_ONCE_BYTES))
    with path.open("rb", buffering=0) as handle:
        while count := handle.readinto(buffer):
            digest.update(buffer[:count])
            num_bytes += count
            if beat is not None:
                beat()
    return ShardFile(path.name, num_bytes, digest.hexdigest())


def difference(promised: ShardFile, path: Path, beat: Callable[[], None] | None = None) -> str | None:
    """What is wrong with the file at `path`: one phrase, or None. `beat`: as for `shard_file`."""
    if not path.is_file():
        return f"{promised.name} is missing"
    size = path.stat().st_size
    if size != promised.num_bytes:
        return f"{promised.name} has {size} bytes, the manifest says {promised.num_bytes}"
    if shard_file(path, beat).sha256 != promised.sha256:
        return f"{promised.name} is altered (its SHA-256 is not the manifest's)"
    return None
