"""Which checkpoint is good: newest first, every byte hashed before it is believed, and only needed bytes read.

The ranks of a host tell each other which blocks their tensors touch, and each block is read by one of those that need
it: a world that has many ranks a host so reads what the host needs, not what each rank needs. What others need too they
copy afterwards, out of the page cache where the folder is read in place, else out of files with holes in the host's
scratch folder.

Whoever can make the tensors anew lets them be read straight into (`may_spoil`): one pass, in which every block is
hashed where it will stay. Otherwise nothing is put into a tensor before all of the checkpoint was hashed, which reads
it once more: from the page cache in place, and by way of the scratch folder from S3.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from trainer.checkpoint.destination import (
    Destination,
    DestinationError,
    MissingFileError,
    NoFileError,
    os_errors,
)
from trainer.checkpoint.group import Group
from trainer.checkpoint.manifest import (
    COMMITTED,
    FOLDER,
    MANIFEST,
    PREVIOUS_STEP,
    Manifest,
    ManifestError,
    NewerFormatError,
    ShardFile,
    committed_manifest,
    difference,
    step_folder,
    step_of,
)
from trainer.checkpoint.needs import Needs
from trainer.checkpoint.ranges import Extents, Share, divided, ranges_of, union
from trainer.checkpoint.reading import (
    AlteredError,
    FolderReader,
    Read,
    StepReader,
    Transfer,
    fill_from,
    left_weights,
    mismatch,
    weights_asked_for,
    without_unsaved,
)
from trainer.heartbeat import beat
from trainyard.errors import AwsRefusedError, InputError, JobFailedError
from trainyard.spec.checkpoint_names import LEADS_NOWHERE, misnamed, problem_with_sizes

Retry = Callable[[str, Callable[[], Any]], Any]
"""`retry(what, operation)`: the operation's result, after as many tries as it takes (destination.with_retries)."""

Tensors = Callable[[], Mapping[str, torch.Tensor]]

_NUM_TELLING = 3
"""Tensors by which a rank knows its shard: of one alone it could lie there by chance."""
_LEAST_OF_SHARD = 0.95
"""The rest is its archives' wrapping."""


class SpoiledError(Exception):
    """No checkpoint was whole, and the tensors hold parts of one: they have to be made anew."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint of which everything, or what was asked for, was verified and is readable on this host."""

    step: int
    uri: str
    manifest: Manifest
    folder: Path
    """On this host."""
    is_fetched: bool
    """The folder is a copy that may go once it was read."""
    reader: StepReader | None = field(default=None, compare=False, repr=False)
    """Knows where in its files the tensors lie; None: the folder has them all."""
    started: "Filling | None" = field(default=None, compare=False, repr=False)
    """What is in the tensors already, where they were read straight into."""

    def fill(self, needs: Needs) -> None:
        """Copy what isn't in the tensors yet out of the folder; `needs`: what was started with, if anything was.

        OSError, AlteredError where a file ends early, InputError where a newer trainer wrote its tables.
        """
        if self.reader is None or not self.reader.has_blocks:
            FolderReader(self.folder, self.manifest, needs).fill()
            return
        tables = self.reader.table
        rest = needs.blocks(tables) if self.started is None else self.started.borrowed
        fill_from(self.folder, ranges_of(rest, tables, of_disk=True), tables, needs)


@dataclass(frozen=True)
class Filling:
    """Tensors that have what this rank read itself."""

    needs: Needs
    borrowed: Extents
    """What other ranks of the host read: still to be copied."""


@dataclass(frozen=True)
class OpenStep:
    """A committed checkpoint to read single tensors of, without ranks: an export's."""

    uri: str
    manifest: Manifest
    reader: StepReader
    folder: Path | None
    """Where its files lie, verified, if they have no tables of blocks."""

    @property
    def index(self) -> Metadata:
        """Which tensors there are. AlteredError when it isn't whole."""
        return self.reader.index

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, verified, on CPU. AlteredError, DestinationError, MissingFileError."""
        if self.folder is None:
            return self.reader.tensor(name)
        stored = self.index.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        values = torch.empty(stored.size, dtype=stored.properties.dtype)
        FolderReader(self.folder, self.manifest, Needs(self.index, {name: values})).fill()
        return values


@dataclass(frozen=True)
class Candidate:
    """A step's folder at the destination, before its files were looked at."""

    step: int
    manifest: Manifest | None
    problem: str | None
    """Why it can't be used; None: so far so good."""
    was_committed: bool = True
    """It has a marker: its save had come to its end."""


class Restorer:
    """Finds the newest good checkpoint. All ranks call it together; the ranks of a host share the reading."""

    def __init__(
        self,
        destination: Destination,
        group: Group,
        local_dir: Path,
        retry: Retry,
        report: Callable[[str], None],
    ) -> None:
        self._destination = destination
        self._group = group
        self._local_dir = local_dir
        self._retry = retry
        self._report = report
        # Without a launcher's word on hosts every rank reads all: slower, never wrong.
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0")) if "LOCAL_WORLD_SIZE" in os.environ else 0
        self._local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def newest(
        self, bad_steps: set[int], tensors: Tensors | None = None, *, may_spoil: bool = False
    ) -> CheckpointInfo | None:
        """The newest checkpoint that is as promised; the steps passed over are added to `bad_steps`.

        `tensors`: what the caller wants of it; nothing else is read then. None: every file, whole. `may_spoil`: they
        are read straight into; where not one checkpoint turns out to be whole then, SpoiledError.
        One line is reported for each that is passed over. A destination that can't be reached raises, on every rank: to
        begin anew because the network was down would lose the job's work in silence. InputError when a checkpoint is
        not of these tensors or a newer trainer's, and where several were committed and none is whole any more.
        """
        is_spoiled, candidates = False, []
        for candidate in self._candidates():
            candidates.append(candidate)
            problem, started = candidate.problem, None
            if problem is None:
                assert candidate.manifest is not None
                reader = StepReader(self._destination, candidate.manifest, self._retry)
                if tensors is not None and reader.has_blocks:
                    try:
                        problem, started = self._read_needed(candidate.step, reader, tensors(), straight=may_spoil)
                    finally:
                        reader.end_begun()
                else:
                    problem = self._problem_with_files(candidate)
                if problem is None:
                    return self._info(candidate.step, candidate.manifest, reader, started)
            is_spoiled = is_spoiled or started is not None
            bad_steps.add(candidate.step)
            self._discard(candidate.step)
            self._say(f"checkpoint step={candidate.step} skipped: {problem}; looking for the one before it")
        if candidates:
            self._check_little_is_lost(candidates)
            self._say(f"checkpoint none of {len(candidates)} at {self._destination.uri} is whole: starting anew")
        if is_spoiled:
            raise SpoiledError
        return None

    def _check_little_is_lost(self, candidates: list[Candidate]) -> None:
        """InputError where more was committed than the first interval's work, and none of it can be read.

        How many are left tells nothing: retention and a full disk leave one of a long job, too.
        """
        committed = [candidate for candidate in candidates if candidate.was_committed]
        if not committed or (len(committed) == 1 and _is_the_jobs_first(committed[0])):
            return
        # A folder has no versions: there it is a backup, if anything.
        versions = "an earlier version of" if self._destination.folder("") is None else "a copy of"
        raise InputError(
            f"checkpoint: none of what was committed at {self._destination.uri} (the newest: step"
            f" {committed[0].step}) is whole, and nothing was started anew; look with `trainyard checkpoints verify`"
            f" and bring back {versions} its files; to start anew, launch it as a new job"
        )

    def open(self, step: int | None) -> OpenStep | None:
        """That step's checkpoint, or the newest committed one; None, with a line for each passed over, without one.

        Its tensors are verified as they are read; only those of the first trainers have to be read whole before.
        """
        for candidate in self._looked_at(step):
            problem, manifest = candidate.problem, candidate.manifest
            if problem is None:
                assert manifest is not None
                reader, folder = StepReader(self._destination, manifest, self._retry), None
                if not reader.has_blocks:
                    problem = self._problem_with_files(candidate)
                    folder = self._info(candidate.step, manifest, reader).folder
                if problem is None:
                    return OpenStep(self._uri(candidate.step), manifest, reader, folder)
            self._say(f"checkpoint step={candidate.step} skipped: {problem}")
        return None

    def discard(self, info: CheckpointInfo) -> None:
        """Remove the host's copy, once every rank has read it."""
        if info.is_fetched:
            self._group.wait_for_all()
            self._discard(info.step)

    def _candidates(self) -> Iterator[Candidate]:
        """Newest first, on every rank; the first one looks at each when its turn comes, and few have more than one."""
        found = self._looked_at()
        try:
            while (candidate := self._group.from_first(lambda: next(found, None))) is not None:
                yield candidate
        except DestinationError as error:
            raise self.unreachable(error) from None

    def _looked_at(self, only: int | None = None) -> Iterator[Candidate]:
        names = self._retry("listing", lambda: self._destination.sizes(FOLDER))
        for step in sorted({step for step in map(step_of, names) if step is not None}, reverse=True):
            if only in (None, step):
                yield self._candidate(step, names)

    def _candidate(self, step: int, names: dict[str, int]) -> Candidate:
        folder = step_folder(step)
        if f"{folder}/" in names:
            return Candidate(step, None, f"it {LEADS_NOWHERE}")
        if not any(name.startswith(f"{folder}/") for name in names):
            has_marker = any(step_of(name) == step and name.endswith(f"/{COMMITTED}") for name in names)
            return Candidate(step, None, misnamed(folder), was_committed=has_marker)
        if f"{folder}/{COMMITTED}" not in names:
            problem = f"it has no {COMMITTED} marker (its save was interrupted)"
            return Candidate(step, None, problem, was_committed=False)
        try:
            # In this order: a job that completes its manifest meanwhile writes a marker for both before it.
            content, marker = (self._read(f"{folder}/{name}") for name in (MANIFEST, COMMITTED))
            manifest = committed_manifest(step, content, marker)
        except MissingFileError as error:
            wrong = "is no file" if isinstance(error, NoFileError) else "is missing"
            return Candidate(step, None, f"{MANIFEST} {wrong}")
        except NewerFormatError as error:
            raise error.refusal(self._uri(step)) from None
        except ManifestError as error:
            return Candidate(step, None, str(error))
        there = {name.removeprefix(f"{folder}/"): size for name, size in names.items() if name.startswith(f"{folder}/")}
        return Candidate(step, manifest, problem_with_sizes({f.name: f.num_bytes for f in manifest.files}, there))

    def _read(self, name: str) -> bytes:
        content: bytes = self._retry(f"reading {name}", lambda: self._destination.get_bytes(name))
        return content

    def _problem_with_files(self, candidate: Candidate) -> str | None:
        """Bring this rank's share of the files here and hash it; the first problem of any rank, the same on all."""
        manifest = candidate.manifest
        assert manifest is not None

        def look() -> None:
            for file in manifest.files[self._local_rank :: self._local_world_size]:
                problem = self._problem_with_file(candidate.step, file)
                if problem is not None:
                    raise AlteredError(problem)

        return self._together(candidate.step, look)

    def _read_needed(
        self, step: int, reader: StepReader, tensors: Mapping[str, torch.Tensor], *, straight: bool
    ) -> tuple[str | None, Filling | None]:
        """Read the blocks that the tensors of this host's ranks touch; the first problem of any rank, the same on all.

        What the tensors don't have then is in `_info`'s folder. The second is None as long as no tensor was touched.
        """
        host = self._group.rank - self._local_rank  # ranks of a host are numbered in a row
        needs, own = self._needed(step, reader, tensors, straight=straight)
        said = self._group.gather_everywhere((host, *own))
        for _, _, problem, refused, failure, _ in said:
            if failure is not None:
                raise self.unreachable(failure)
            if refused is not None:
                raise InputError(refused)
            if problem is not None:
                return problem, None
        assert needs is not None
        left = left_weights(reader.index, [asked for *_, asked in said])
        if left is not None:
            raise InputError(f"checkpoint {self._uri(step)}: {left}")
        shares = divided([extents for of_host, extents, *_ in said if of_host == host])
        if not straight:
            shares = [Share({}, union([one.alone, one.shared]), {}) for one in shares]
        share = shares[self._local_rank]
        # Room is looked for before any rank fills it: what one has written would count as lacking to another.
        if not self._is_in_place(step):
            problem = self._together(step, partial(self._make_room, step, reader, union(one.shared for one in shares)))
            if problem is not None:
                return problem, None
        problem = self._together(step, partial(self._read_share, step, reader, share, needs if straight else None))
        return problem, Filling(needs, share.borrowed) if straight else None

    def _together(self, step: int, act: Callable[[], None]) -> str | None:
        """Do what every rank does now: what is wrong with the checkpoint, on any of them."""
        outcomes = self._group.gather_everywhere(_outcome(self._fetched_folder(step), act))
        for _, failed in outcomes:
            if failed is not None:
                raise self.unreachable(failed)
        return next((problem for problem, _ in outcomes if problem is not None), None)

    def _needed(
        self, step: int, reader: StepReader, tensors: Mapping[str, torch.Tensor], *, straight: bool
    ) -> tuple[Needs | None, tuple[Extents, str | None, str | None, DestinationError | None, bytes]]:
        """What this rank needs, and for the others its blocks, or what is wrong with the checkpoint, or why this job
        may not have it, or why it can't be read; and which of its weights this rank asks for.
        """
        try:
            tensors = without_unsaved(reader.index, tensors)
            stranger = mismatch(reader.index, tensors)
            if stranger is not None:
                refused = f"checkpoint {self._uri(step)}: {stranger}"
                return None, ({}, None, refused, None, b"")
            if straight and reader.world_size == self._group.world_size:
                _begin_early(reader, tensors, self._group.rank)
            needs = Needs(reader.index, tensors)
            return needs, (needs.blocks(reader.table), None, None, None, weights_asked_for(reader.index, tensors))
        except InputError as error:
            return None, ({}, None, str(error), None, b"")
        except AlteredError as error:
            return None, ({}, str(error), None, None, b"")
        except MissingFileError as error:
            return None, ({}, str(error), None, None, b"")
        except DestinationError as error:
            return None, ({}, None, None, error, b"")

    def _read_share(self, step: int, reader: StepReader, share: Share, needs: Needs | None) -> None:
        """What this rank reads for the host: verified, put into the tensors if `needs` is given, kept for others."""
        in_place = self._is_in_place(step)
        folder = None if in_place else self._fetched_folder(step)
        parts: list[tuple[Read, Extents, Path | None]] = [
            (reader.read_once_into, share.alone, None),
            (reader.read_into, share.shared, folder),  # the others copy it out of the page cache
        ]
        for read, extents, keep_in in parts:
            Transfer(
                read,
                reader.table,
                verifies=True,
                placements=None if needs is None else needs.placements,
                devices=() if needs is None else needs.devices,
                keep_in=keep_in,
                of_disk=in_place,
            ).run(reader.in_turn(ranges_of(extents, reader.table, of_disk=in_place)))

    def _make_room(self, step: int, reader: StepReader, extents: Extents) -> None:
        """The files with nothing in them yet, if the disk has room for what will be; one rank a host sees to it."""
        if self._local_rank != 0:
            return
        folder = self._fetched_folder(step)
        ranges = ranges_of(extents, reader.table)
        num_bytes = sum(one.end - one.start for one in ranges)
        folder.mkdir(parents=True, exist_ok=True)
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)  # left by a killed run
        for name in extents:
            (folder / name).write_bytes(b"")  # so may these be
        free = shutil.disk_usage(folder).free
        if free < num_bytes:
            needed = f"{free >> 20} MiB free at {folder.parent}, {num_bytes >> 20} MiB needed"
            raise DestinationError(f"no room for {folder.name}: {needed}", permanent=True)

    def _problem_with_file(self, step: int, file: ShardFile) -> str | None:
        in_place = self._destination.folder(step_folder(step))
        if in_place is not None:
            place = in_place / file.name
            found: str | None = self._retry(f"reading {place}", lambda: _difference_there(file, place))
            return found
        path = self._fetched_folder(step) / file.name
        if path.exists() and difference(file, path, beat) is None:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        if free < file.num_bytes:
            raise DestinationError(
                f"no room for {file.name}: {path.parent} has {free >> 20} MiB free, it has {file.num_bytes >> 20} MiB",
                permanent=True,
            )
        # Ranks that don't know of each other may fetch the same file: each under its own name until it is whole.
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        name = f"{step_folder(step)}/{file.name}"
        try:
            self._retry(f"download of {name}", lambda: self._destination.get_file(name, partial))
            partial.replace(path)
        except MissingFileError:
            return f"{file.name} is missing"
        finally:
            partial.unlink(missing_ok=True)
        beat()
        return difference(file, path, beat)

    def _is_in_place(self, step: int) -> bool:
        """Whether the destination's files are read where they are."""
        return self._destination.folder(step_folder(step)) is not None

    def _uri(self, step: int) -> str:
        return f"{self._destination.uri}/{step_folder(step)}"

    def _info(
        self, step: int, manifest: Manifest, reader: StepReader, started: Filling | None = None
    ) -> CheckpointInfo:
        in_place = self._destination.folder(step_folder(step))
        return CheckpointInfo(
            step=step,
            uri=self._uri(step),
            manifest=manifest,
            folder=in_place or self._fetched_folder(step),
            is_fetched=in_place is None,
            reader=reader,
            started=started,
        )

    def _fetched_folder(self, step: int) -> Path:
        return self._local_dir / "fetched" / f"step-{step:08d}"

    def _discard(self, step: int) -> None:
        if self._local_rank == 0:
            shutil.rmtree(self._fetched_folder(step), ignore_errors=True)

    def _say(self, line: str) -> None:
        if self._group.rank == 0:
            self._report(line)

    def unreachable(self, error: DestinationError, *, is_start: bool = True) -> Exception:
        """What to raise when the destination can't be read: one line, with what to do. `is_start`: a job would go on
        from it."""
        advice = "a checkpoint may be there, so nothing was started anew; mend the access or set checkpoint.destination"
        advice = advice if is_start else "it may be whole, so no older one is taken; mend the access, or give --step"
        if self._destination.folder("") is None:
            return AwsRefusedError(f"{error}; {advice}")
        return JobFailedError(f"{error}; {advice}")


def _begin_early(reader: StepReader, tensors: Mapping[str, torch.Tensor], rank: int) -> None:
    """Where a rank plainly goes on from the shard that it wrote, it is read from now on, while the rest is planned.

    Plainly: the shard has the largest tensors, and is as large as all of them together. So of a shard that others need
    too nothing is read in vain. (DeepSpeed's pieces, `FlatShard`, say the whole tensor's size: nothing begins there.)
    """
    bytes_of = {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for name, tensor in tensors.items()
    }
    largest = sorted(bytes_of, key=lambda name: bytes_of[name])[-_NUM_TELLING:]
    shards = Needs(reader.index, {name: tensors[name] for name in largest}).files
    own = next((shard for shard in shards if shard.startswith(f"__{rank}_")), None)  # DCP's name for it
    if own is not None and len(shards) == 1:
        num_bytes = reader.num_bytes(own)
        if _LEAST_OF_SHARD * num_bytes <= sum(bytes_of.values()) <= num_bytes:
            reader.begin(own)


def _difference_there(file: ShardFile, path: Path) -> str | None:
    """`difference` from what is at the destination. DestinationError: of a disk that doesn't answer nobody knows that
    the checkpoint isn't whole. MissingFileError."""
    with os_errors(f"read {path}"):
        return difference(file, path, beat)


def _is_the_jobs_first(candidate: Candidate) -> bool:
    """Whether its manifest says so; one that can't be read, or is of a trainer that didn't note it, doesn't."""
    return candidate.manifest is not None and candidate.manifest.extra.get(PREVIOUS_STEP, -1) is None


def _outcome(folder: Path, operation: Callable[[], None]) -> tuple[str | None, DestinationError | None]:
    """(what is wrong with the checkpoint, why it can't be read) of what reads it into `folder`: for the other ranks."""
    try:
        operation()
    except (AlteredError, MissingFileError) as error:
        return str(error), None
    except DestinationError as error:
        return None, error
    except OSError as error:
        return None, DestinationError(f"can't write {folder}: {error.strerror or error}", permanent=True)
    return None, None
