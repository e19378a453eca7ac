"""What a job has saved: its checkpoints listed, verified against their manifests, pruned and copied. No torch.

The layout is the trainer's (`trainer.checkpoint`): `checkpoints/step-<8 digits>/` holds the shards, `manifest.json`
with their sizes and hashes, and `COMMITTED`, written last, with the manifest's own hash.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainyard.errors import AwsRefusedError, InputError, JobFailedError, TrainyardError
from trainyard.launch.backend import Say, say_nothing
from trainyard.launch.checkpoint_files import FOLDER, RECOVERY_FILE, Files, open_files, sha256
from trainyard.launch.lineage import METRICS, refuse_anothers
from trainyard.spec.checkpoint_names import file_name, misnamed, other_step, problem_with_sizes
from trainyard.spec.retention import Retention
from trainyard.spec.words import counted

_MARKER = "COMMITTED"
"""Written last: a checkpoint without it is torn, and never read."""
_MANIFEST = "manifest.json"
_MANIFEST_VERSION = 1
_REMOVED = "it was removed while it was looked at (its job no longer keeps it, or somebody prunes)"
_ATTEMPTS = "attempts.json"
_BESIDE = (METRICS, _ATTEMPTS, "goodput.jsonl", RECOVERY_FILE, "left_out_batches.jsonl")
"""What a resume at another destination wants to find beside the checkpoints: without the last it would learn from
batches that the job leaves out."""


@dataclass(frozen=True)
class Checkpoint:
    """One saved step, as a look at names, sizes and its manifest tells it."""

    step: int
    uri: str
    num_files: int
    size_bytes: int
    committed: bool
    problem: str = ""
    """Why a resume would pass it over, as far as sizes and manifest tell; empty: nothing is wrong."""
    world_size: int | None = None
    strategy: str | None = None
    shards: tuple[tuple[str, int, str], ...] = field(default=(), repr=False)
    """(name, bytes, SHA-256) as the manifest promises."""
    extra: dict[str, Any] = field(default_factory=dict, repr=False)
    """What the trainer saved beside the tensors."""
    manifest_sha256: str = ""
    """Of the manifest, which has the hashes of all else; empty where it can't be read."""
    is_readable: bool = True
    """False: who looked is refused it, or can't reach it; `problem` says why. It may be whole, and is never removed."""

    @property
    def is_good(self) -> bool:
        """Committed, and nothing wrong to be seen without reading the shards."""
        return self.committed and not self.problem

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        names = ("step", "uri", "num_files", "size_bytes", "committed", "problem", "world_size", "strategy")
        return {**{name: getattr(self, name) for name in names}, "readable": self.is_readable}

    def details(self) -> dict[str, Any]:
        """For `show --json`: with every shard, and where the run stood (not the random numbers' long states)."""
        position = {name: value for name, value in self.extra.items() if name not in ("rng", "model_config")}
        shards = [{"name": name, "bytes": size, "sha256": digest} for name, size, digest in self.shards]
        return {**self.as_json(), "shards": shards, "extra": position}


def list_checkpoints(destination: str, s3: Any) -> list[Checkpoint]:
    """The checkpoints under an s3:// prefix or a folder, oldest step first; one that can't be read hides no other.

    InputError where that is itself in a folder of checkpoints: it is not one without any.
    """
    files = open_files(destination, s3)
    by_step = _by_step(files.sizes(FOLDER))
    if not by_step:
        refuse_inside(files.root, s3)
    return [_look_at(files, step, by_step[step]) for step in sorted(by_step)]


def refuse_inside(root: str, s3: Any) -> None:
    """InputError where it is a folder of checkpoints itself, or of one step: the one that holds it was meant."""
    holder, _, last = re.sub(r"/step-\d+$", "", root).rpartition("/")
    if last != FOLDER or holder == "s3:/":  # a bucket may be called so
        return
    holder = holder or ("/" if root.startswith("/") else ".")
    try:
        steps = _by_step(open_files(holder, s3).sizes(FOLDER))
    except TrainyardError:  # it may not be looked into
        return
    if steps:
        raise InputError(f"{root}: lies in a folder of checkpoints; give the one that holds it: {holder}")


def has_any(destination: str, s3: Any) -> bool | None:
    """Whether a committed checkpoint is there, by names alone; None where that can't be told: of a folder that isn't
    there the disk may not be mounted."""
    if is_gone(destination):
        return None
    try:
        names = open_files(destination, s3).sizes(FOLDER)
    except TrainyardError:
        return None
    steps = _by_step(names).values()
    if any(_MARKER in files for files in steps):
        return True
    return None if any("" in files for files in steps) else False


def newest_committed(destination: str, s3: Any) -> tuple[int, float | None] | None:
    """Step of the newest checkpoint with a marker, by names alone, and when that was written (epoch; None where it went
    since); None: there is none. TrainyardError where the place can't be looked at."""
    files = open_files(destination, s3)
    committed = [step for step, names in _by_step(files.sizes(FOLDER)).items() if _MARKER in names]
    if not committed:
        return None
    return max(committed), files.written_at(f"{_step_folder(max(committed))}/{_MARKER}")


def is_gone(destination: str) -> bool:
    """Whether it is a folder, and there is none."""
    return not destination.startswith("s3://") and not os.path.isdir(destination)  # noqa: PTH112  # whatever keeps it


def _by_step(names: dict[str, int]) -> dict[int, dict[str, int]]:
    """Step -> name within its folder -> bytes; nothing of one whose folder has another name."""
    found: dict[int, dict[str, int]] = {}
    for path, size in names.items():
        folder, separator, name = path.removeprefix(f"{FOLDER}/").partition("/")
        digits = folder.removeprefix("step-")
        if separator and folder.startswith("step-") and digits.isdecimal():
            own = found.setdefault(int(digits), {})
            if path.startswith(f"{_step_folder(int(digits))}/"):
                own[name] = size
    return found


def _look_at(files: Files, step: int, names: dict[str, int]) -> Checkpoint:
    folder = _step_folder(step)
    seen = Checkpoint(
        step=step,
        uri=f"{files.root}/{folder}/",
        num_files=len(names.keys() - {""}),
        size_bytes=sum(names.values()),
        committed=_MARKER in names,
        problem="" if _MARKER in names else f"it has no {_MARKER} marker (its save was interrupted)",
    )
    hidden = misnamed(folder) if not names else files.why_hidden(folder) if "" in names else ""
    if hidden or not seen.committed:
        return _with(seen, is_readable=False, problem=hidden) if hidden else seen
    try:
        manifest, digest = _manifest(files, step)
        shards = tuple((file_name(s["name"]), int(s["bytes"]), str(s["sha256"])) for s in manifest["shards"])
        extra = dict(manifest["extra"])
        world_size = int(manifest["world_size"])
    except _GoneError as error:
        return _with(seen, committed=False, problem=str(error))
    except _ManifestError as error:
        return _with(seen, problem=str(error))
    except TrainyardError as error:
        return _unreadable(seen, error)
    except (KeyError, TypeError, ValueError, OverflowError) as error:  # JSON as Python reads it has infinity
        return _with(seen, problem=f"{_MANIFEST} can't be read ({type(error).__name__}: {error})")
    return _with(
        seen,
        problem=problem_with_sizes({name: size for name, size, _ in shards}, names) or "",
        world_size=world_size,
        strategy=extra.get("strategy"),
        shards=shards,
        extra=extra,
        manifest_sha256=digest,
    )


def _unreadable(checkpoint: Checkpoint, error: TrainyardError) -> Checkpoint:
    return _with(checkpoint, is_readable=False, problem=str(error))


def refuse_unreadable(destination: str, found: Sequence[Checkpoint]) -> None:
    """AwsRefusedError (of a folder JobFailedError) that names those that can't be read, where there are some."""
    unreadable = [one for one in found if not one.is_readable]
    if unreadable:
        kind = AwsRefusedError if destination.startswith("s3://") else JobFailedError
        steps = ", ".join(str(one.step) for one in unreadable)
        raise kind(
            f"{len(unreadable)} of {counted(len(found), 'checkpoint')} can't be read (step {steps}): "
            f"{unreadable[-1].problem}"
        )


def _with(checkpoint: Checkpoint, **changes: Any) -> Checkpoint:
    return Checkpoint(**{**checkpoint.__dict__, **changes})


class _ManifestError(Exception):
    """A manifest or marker that is torn, altered or too new."""


class _GoneError(Exception):
    """A marker that was listed and is no longer there: a promise is taken back before what it promises goes."""


def _manifest(files: Files, step: int) -> tuple[dict[str, Any], str]:
    """The step's manifest, and its SHA-256, which is the committed one."""
    folder = _step_folder(step)
    content, marker = files.read(f"{folder}/{_MANIFEST}"), files.read(f"{folder}/{_MARKER}")
    if marker is None:
        raise _GoneError(_REMOVED)
    if content is None:
        raise _ManifestError(f"{_MANIFEST} is missing")
    try:
        said = json.loads(marker)
        # While a resume completes a manifest, the one before it is as good.
        promised, marked = (said["manifest_sha256"], said.get("replaced_sha256")), said.get("step")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _ManifestError(f"{_MARKER} is torn") from None
    digest = hashlib.sha256(content).hexdigest()
    if digest not in promised:
        raise _ManifestError(f"{_MANIFEST} is not the one that was committed (SHA-256 differs)")
    manifest: dict[str, Any] = json.loads(content)
    if int(manifest["version"]) > _MANIFEST_VERSION:
        raise _ManifestError(f"{_MANIFEST} has version {manifest['version']}, this trainyard reads {_MANIFEST_VERSION}")
    if (problem := other_step(step, manifest=int(manifest["step"]), marker=marked)) is not None:
        raise _ManifestError(problem)
    return manifest, digest


def chosen(destination: str, s3: Any, step: int | None) -> Checkpoint:
    """The checkpoint of a step, whatever its state, or the newest good one; InputError lists the steps there are.

    One that can't be read is refused, and so is the newest good one while a newer one that can't be read may be it.
    """
    found = list_checkpoints(destination, s3)
    if step is None:
        good = [checkpoint for checkpoint in found if checkpoint.is_good]
        refuse_unreadable(destination, [one for one in found if not good or one.step >= good[-1].step])
        if not good:
            raise InputError(
                f"{destination}: has no good checkpoint (of {len(found)}); `trainyard checkpoints list` says why"
            )
        return good[-1]
    for checkpoint in found:
        if checkpoint.step == step:
            refuse_unreadable(destination, [checkpoint])
            return checkpoint
    steps = ", ".join(str(checkpoint.step) for checkpoint in found) or "none"
    raise InputError(f"--step {step}: {destination} has no checkpoint of that step (there: {steps})")


def verified(destination: str, s3: Any, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint after every shard was read and hashed: `problem` names the first that is not as promised.

    One that is removed meanwhile is no longer committed then, and not broken.
    """
    if not checkpoint.is_good:
        return checkpoint
    files, folder = open_files(destination, s3), _step_folder(checkpoint.step)
    try:
        for name, _, digest in checkpoint.shards:
            if sha256(files, f"{folder}/{name}") != digest:
                return _with(checkpoint, problem=f"{name} is altered (its SHA-256 is not the manifest's)")
    except TrainyardError:
        if files.read(f"{folder}/{_MARKER}") is not None:
            raise
        return _with(checkpoint, committed=False, problem=_REMOVED)
    return checkpoint


@dataclass(frozen=True)
class Pruning:
    """What a prune removes, and what it keeps."""

    removed: tuple[Checkpoint, ...]
    kept: tuple[Checkpoint, ...]
    freed_bytes: int


def looked_through(destination: str, s3: Any, checkpoint: Checkpoint) -> Checkpoint:
    """`verified`, where one that can't be read is told in its `problem`: it keeps nobody from the others."""
    try:
        return verified(destination, s3, checkpoint)
    except TrainyardError as error:
        return _unreadable(checkpoint, error)


def prune(destination: str, s3: Any, *, rules: Retention, dry_run: bool) -> Pruning:
    """Remove the good checkpoints that `rules` don't keep, and broken ones that are older than the newest good one.

    Nothing is removed before a checkpoint that stays was read and found whole; those that turn out altered don't count
    as kept. A folder newer than the newest good one may be a save on its way, and stays; so does what can't be read.
    JobFailedError where not one is whole.
    """
    found = list_checkpoints(destination, s3)
    good = [checkpoint for checkpoint in found if checkpoint.is_good]
    while good:
        newest = verified(destination, s3, good[-1])
        if newest.is_good:
            break
        good.pop()
    if not good:
        if not found:
            return Pruning((), (), 0)
        refuse_unreadable(destination, found)
        raise JobFailedError(
            f"{destination}: not one of {counted(len(found), 'checkpoint')} is whole, so nothing was removed"
        )
    values = {one.step: rules.value_of(one.extra) for one in good}
    kept_steps = rules.kept(values, {one.step: rules.samples_of(one.extra) for one in good})
    older = [one for one in found if one.step < good[-1].step and one.is_readable]
    expired = [one for one in older if one.step not in kept_steps]
    files, kept_folders = open_files(destination, s3), [_step_folder(one.step) for one in found if one not in expired]
    # A folder that was moved by hand may be what a good step's link leads to.
    removed = tuple(one for one in expired if not files.is_behind(_step_folder(one.step), kept_folders))
    if not dry_run:
        for checkpoint in removed:
            files.delete(_in_order_of_removal(files.sizes(_step_folder(checkpoint.step))))
    kept = tuple(one for one in found if one not in removed)
    return Pruning(removed, kept, sum(checkpoint.size_bytes for checkpoint in removed))


def _in_order_of_removal(names: Iterable[str]) -> list[str]:
    """The promise goes first: a removal that is interrupted leaves a torn checkpoint, not a broken one."""
    first = (_MARKER, _MANIFEST)
    return sorted(names, key=lambda name: first.index(tail) if (tail := name.rsplit("/", 1)[1]) in first else 2)


def copy(
    destination: str, s3: Any, checkpoints: Sequence[Checkpoint], target: str, say: Say = say_nothing
) -> list[str]:
    """Copy checkpoints, and the metrics beside them, to another prefix or folder; the URIs there.

    Each file is read back there and must be what its manifest promises before the marker is written; otherwise, or
    where the target takes no more, what was copied goes again, and JobFailedError says which side is altered, or why.
    A step that is there already, whole, stays as it is; one that is broken there is replaced, once the source was read
    and found whole; InputError, before anything is copied, where another checkpoint of the same step is there, or
    another job's, or a job saves there now. No job begins to meanwhile; where that can't be had (S3, no locks), a file
    there that somebody else writes gives the copy up. What lies beside is of the newest step, and copied with that
    alone. A resume of a job with `checkpoint.destination: <target>` goes on from there. `say` is told what a killed
    copy had left there and was removed.
    """
    source, sink = open_files(destination, s3), open_files(target, s3)
    if sink.is_same(source):
        raise InputError(f"{target}: is where the checkpoints are; give another prefix or folder")
    sink.refuse_file()
    with sink.claimed(say):
        return _copy_all(source, sink, checkpoints, s3)


def _copy_all(source: Files, sink: Files, checkpoints: Sequence[Checkpoint], s3: Any) -> list[str]:
    alone, target = _Alone(sink), sink.root
    there = {one.step: one for one in list_checkpoints(target, s3)}
    # What is there and can't be looked at may be whole, and another's.
    refuse_unreadable(target, [there[one.step] for one in checkpoints if one.step in there])
    for checkpoint in checkpoints:
        if not checkpoint.is_good:
            raise JobFailedError(f"checkpoint of step {checkpoint.step} is not copied: {checkpoint.problem}")
        path = f"{_step_folder(checkpoint.step)}/{_MANIFEST}"
        held = there.get(checkpoint.step)
        if held is not None and held.is_good and sink.read(path) != source.read(path):
            raise InputError(
                f"{target}: holds another checkpoint of step {checkpoint.step}, which stays; give another prefix"
                " or folder"
            )
    refuse_anothers(source, sink, list_checkpoints(source.root, s3), there.values(), target)
    uris = [_copy_one(source, alone, checkpoint, there.get(checkpoint.step), s3) for checkpoint in checkpoints]
    newest_there = max((step for step, held in there.items() if held.is_good), default=-1)
    if max((checkpoint.step for checkpoint in checkpoints), default=-1) >= newest_there:
        for name in _BESIDE:
            content = source.read(name)
            if content is not None:
                sink.write(name, content)
    return uris


class _Alone:
    """A copy's target, and by what another writer shows there."""

    def __init__(self, sink: Files) -> None:
        self.sink = sink
        self._known = sink.marks(FOLDER)
        self._attempts = sink.read(_ATTEMPTS)
        """A job that starts counts itself, before it saves."""
        self._taken: dict[str, str | None] = {}

    def take(self, name: str, source: Files) -> None:
        """Copy a file there."""
        self._taken[name] = None
        self._taken[name] = self.sink.take(name, source)

    def commit(self, step: int, marker: bytes) -> None:
        """Write a step's marker; JobFailedError where somebody else has written anything there meanwhile."""
        self._refuse_others()
        name = f"{_step_folder(step)}/{_MARKER}"
        self._taken[name] = None  # who is interrupted from here on leaves no marker
        mark = self.sink.write_new(name, marker)
        if mark is None:
            del self._taken[name]
            raise self._refusal(name)
        self._taken[name] = mark
        self._refuse_others()
        self._known |= {name: mark for name, mark in self._taken.items() if mark is not None}
        self._taken.clear()

    def clear(self, step: int) -> None:
        """Remove what lies there of a step."""
        folder = _step_folder(step)
        self._remove(self.sink.sizes(folder))
        self.sink.drop_empty(folder)

    def give_up(self, step: int) -> None:
        """Remove what was copied of a step since the last commit, but nothing that somebody else has written over."""
        there = self.sink.marks(_step_folder(step))
        ours = [name for name, mark in self._taken.items() if mark in (None, there.get(name))]
        self._remove(name for name in ours if name in there)
        self.sink.drop_empty(_step_folder(step))

    def _remove(self, names: Iterable[str]) -> None:
        names = _in_order_of_removal(names)
        self.sink.delete(names)
        for name in names:
            self._known.pop(name, None)

    def _refuse_others(self) -> None:
        expected, there = {**self._known, **self._taken}, self.sink.marks(FOLDER)
        # By the step's own files first: they say most.
        for name in sorted(expected.keys() | there.keys(), key=lambda name: (name not in self._taken, name)):
            if expected.get(name) != there.get(name):
                raise self._refusal(name)
        if self.sink.read(_ATTEMPTS) != self._attempts:
            raise self._refusal(_ATTEMPTS)

    def _refusal(self, name: str) -> JobFailedError:
        return JobFailedError(
            f"{self.sink.root}/{name}: somebody else wrote it meanwhile, or removed it, so the copy was given up: see"
            " which job saves there, and copy again after its end, or give another prefix or folder"
        )


def _copy_one(source: Files, alone: _Alone, checkpoint: Checkpoint, held: Checkpoint | None, s3: Any) -> str:
    """The checkpoint's URI at the sink, where `held` is what it has of that step; what failed leaves nothing."""
    if held is not None:
        if held.is_good and verified(alone.sink.root, s3, held).is_good:
            return held.uri
        found = verified(source.root, s3, checkpoint)
        if not found.is_good:
            raise JobFailedError(f"checkpoint of step {checkpoint.step} is not copied: {found.problem}")
    alone.clear(checkpoint.step)
    try:
        _bring(source, alone, checkpoint)
    except BaseException as error:  # Ctrl-C, too
        with contextlib.suppress(TrainyardError):  # what says why is the first error
            alone.give_up(checkpoint.step)
        if isinstance(error, TrainyardError) and _is_removed(source, checkpoint.step):
            raise JobFailedError(
                f"checkpoint of step {checkpoint.step} is not copied: {_REMOVED}; copy again for the newest"
            ) from None
        raise
    return f"{alone.sink.root}/{_step_folder(checkpoint.step)}/"


def _is_removed(source: Files, step: int) -> bool:
    with contextlib.suppress(TrainyardError):
        return source.read(f"{_step_folder(step)}/{_MARKER}") is None
    return False


def _bring(source: Files, alone: _Alone, checkpoint: Checkpoint) -> None:
    """One checkpoint, each file read back at the sink; its marker last."""
    folder = _step_folder(checkpoint.step)
    for name, _, digest in checkpoint.shards:
        path = f"{folder}/{name}"
        alone.take(path, source)
        if sha256(alone.sink, path) != digest:
            raise JobFailedError(_why_altered(source, alone.sink, checkpoint, name, digest))
    alone.take(f"{folder}/{_MANIFEST}", source)
    marker = source.read(f"{folder}/{_MARKER}")
    if marker is None:
        raise JobFailedError(f"checkpoint of step {checkpoint.step} is not copied: {_REMOVED}")
    alone.commit(checkpoint.step, marker)


def _why_altered(source: Files, sink: Files, checkpoint: Checkpoint, name: str, digest: str) -> str:
    if sha256(source, f"{_step_folder(checkpoint.step)}/{name}") != digest:
        return (
            f"checkpoint of step {checkpoint.step} is not copied: {name} is altered (its SHA-256 is not the manifest's)"
        )
    return f"{sink.root}: {name} of step {checkpoint.step} did not arrive as it left; copy it again"


def _step_folder(step: int) -> str:
    return f"{FOLDER}/step-{step:08d}"
