"""The nearest tier: checkpoints on each host's own disk, committed before the destination has them.

A host holds what its own ranks wrote and, with `peer_copy`, what the host before it did. Under a folder named after
the destination lies the destination's own layout (`checkpoints/step-<8 digits>/`), so a host's part is looked at as
any checkpoint is: a marker that belongs to the manifest, files by size and SHA-256. A restore takes a step from here
when the hosts together hold all of it; what a rank needs and its host lacks comes from a host that has it. Beside them
lies the name of the run that wrote them, as the destination has it: who empties that starts anew.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from trainer.checkpoint.destination import DestinationError, LocalDestination, MissingFileError
from trainer.checkpoint.group import Group
from trainer.checkpoint.manifest import (
    COMMITTED,
    FOLDER,
    MANIFEST,
    Manifest,
    ManifestError,
    NewerFormatError,
    ShardFile,
    commit_marker,
    committed_manifest,
    difference,
    parse_manifest,
    step_folder,
    step_of,
)
from trainer.heartbeat import beat
from trainyard.errors import JobFailedError

_RUN = "run"
"""The file that names it."""
_BLOCK_BYTES = 8 << 20
"""Files go from host to host in blocks of this size: what is in memory besides the model."""


@dataclass(frozen=True)
class LocalCheckpoint:
    """A step that the hosts hold together."""

    manifest: Manifest
    content: bytes
    """The manifest's own bytes: what the destination gets."""
    folder: Path
    """On this host."""
    holders: dict[str, list[int]]
    """File -> the ranks whose host has it, whole."""


@dataclass(frozen=True)
class _Held:
    """What one rank's host has of one step."""

    manifest: bytes | None
    files: frozenset[str]
    problem: str | None
    newer: NewerFormatError | None = None
    """Why this trainer can't read it, though nothing is wrong with it."""


class LocalTier:
    """One job's checkpoints on this host's disk. Every rank has one; all ranks call each method alike."""

    def __init__(
        self, root: Path, destination: str, *, group: Group, peer_copy: bool, report: Callable[[str], None]
    ) -> None:
        """`destination`: its URI, which tells this job's folder from those of others on the same disk."""
        self.root = root.absolute() / hashlib.sha256(destination.encode()).hexdigest()[:16]
        self._files = LocalDestination(self.root)
        self._group = group
        self._report = report
        known = "LOCAL_WORLD_SIZE" in os.environ
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0")) if known else 0
        self._local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._num_hosts = max(1, group.world_size // self._local_world_size)
        self.copies = 2 if peer_copy and self._num_hosts > 1 else 1
        """How many hosts' parts a host holds."""
        self._run: str | None = None
        self._is_anothers = False

    @property
    def is_first_of_host(self) -> bool:
        """Whether this rank does what is done once a host."""
        return self._local_rank == 0

    def folder(self, step: int) -> Path:
        """Where this host's part of a step lies."""
        return self.root / step_folder(step)

    def is_of_another_run(self, run: str | None) -> bool:
        """Whether what this host keeps is of another run than the destination names; then it isn't looked at any more.

        What names none is of a trainer that didn't yet, or of a start that couldn't: that is as good as any.
        """
        own = self._run_kept()
        self._is_anothers = own is not None and own != run
        return self._is_anothers

    def _run_kept(self) -> str | None:
        try:
            return self._files.get_bytes(_RUN).decode(errors="replace").strip()
        except (MissingFileError, DestinationError):
            return None

    def name_run(self, run: str | None) -> None:
        """What the destination calls the run from now on; None: nothing."""
        self._run = run

    # ------------------------------------------------------------------ save

    def begin(self, step: int, *, only_removes: bool = False) -> None:
        """Make room for a step: all but the newest committed one go, promises first. OSError, DestinationError.

        At most two steps are on the disk at any time: the one being written, and the one to fall back on.
        `only_removes`: the step is not written here; the disk may be full to the last byte.
        """
        was_anothers, self._is_anothers = self._is_anothers, False
        if not self.is_first_of_host:
            return
        names = self._files.sizes(FOLDER)
        # A link whose disk is away stays.
        steps = {found for found in map(step_of, (n for n in names if not n.endswith("/"))) if found is not None}
        committed = {found for found in steps if f"{step_folder(found)}/{COMMITTED}" in names and found < step}
        for old in steps - ({max(committed, default=-1)} if not was_anothers else set()):
            self._remove(old)
        if only_removes:
            return
        self.folder(step).mkdir(parents=True, exist_ok=True)  # here it shows whether the disk can be written
        if self._run is not None and self._run != self._run_kept():
            self._files.put_bytes(_RUN, f"{self._run}\n".encode())
        elif self._run is None and was_anothers:
            self._files.delete([_RUN])

    def _remove(self, step: int) -> None:
        self._files.delete([f"{step_folder(step)}/{name}" for name in (COMMITTED, MANIFEST)])
        shutil.rmtree(self.folder(step), ignore_errors=True)

    def clear(self) -> None:
        """Remove all that this host keeps of the job, promises first."""
        if self.is_first_of_host:
            for step in self._steps(0):
                self._remove(step)
            shutil.rmtree(self.root, ignore_errors=True)

    def copy_to_peer(self, behind: Group, step: int, own: Sequence[ShardFile]) -> None:
        """Give this rank's files to the same rank of the next host, and take those of the host before."""
        if self.copies == 1:
            return
        away = self._local_world_size
        to, source = (behind.rank + away) % behind.world_size, (behind.rank - away) % behind.world_size
        offered = behind.gather_everywhere(tuple(own))[source]
        # Every second host sends first: neighbours that both sent would wait for each other.
        problems: list[str | None] = []
        odd = behind.rank // away % 2 == 1
        for sends in (not odd, odd):
            if sends:
                for file in own:
                    _send(behind, self.folder(step) / file.name, file.num_bytes, to)
            else:
                problems = [_received(behind, self.folder(step) / file.name, file, source) for file in offered]
        for problem in filter(None, problems):
            raise DestinationError(f"from rank {source}: {problem}", permanent=True)

    def commit(self, step: int, manifest: bytes, index: bytes) -> None:
        """Promise this host's part of a step; call it when every rank has written. OSError, DestinationError."""
        if self.is_first_of_host:
            folder = step_folder(step)
            self._files.put_bytes(f"{folder}/.metadata", index)
            self._files.put_bytes(f"{folder}/{MANIFEST}", manifest)
            self._files.put_bytes(f"{folder}/{COMMITTED}", commit_marker(step, manifest))

    # ------------------------------------------------------------------ restore

    def newest(self, at_least: int, *, attempt: int | None = None) -> LocalCheckpoint | None:
        """The newest step that the hosts hold whole, from `at_least` on; None with a line for each passed over.

        `attempt`: the start that saved the destination's newest. What an earlier one left here is passed over: the job
        has gone on without it since. InputError, on every rank, where a newer trainer wrote one.
        """
        found = self._group.gather_everywhere(self._steps(at_least))
        for step in sorted(set().union(*found), reverse=True):
            all_held = self._group.gather_everywhere(self._held(step))
            newer = next((held.newer for held in all_held if held.newer is not None), None)
            if newer is not None:
                raise newer.refusal(str(self.folder(step)))
            checkpoint, problem = self._joined(step, all_held)
            if problem is None and checkpoint is not None:
                problem = _left_behind(checkpoint.manifest.attempt, attempt)
            if problem is None and checkpoint is not None:
                problem = self._bring_checked(checkpoint, {".metadata"})
            if problem is None:
                return checkpoint
            self._say(f"checkpoint step={step} on the hosts' disks skipped: {problem}; the destination's is taken")
        return None

    def _steps(self, at_least: int) -> set[int]:
        if self._is_anothers:
            return set()
        try:
            names = self._files.sizes(FOLDER)
        except DestinationError:
            return set()
        steps = {step_of(name) for name in names if name.endswith(f"/{COMMITTED}")}
        return {step for step in steps if step is not None and step >= at_least}

    def _held(self, step: int) -> _Held:
        """This host's part of a step; its ranks share the hashing of it."""
        if self._is_anothers:
            return _Held(None, frozenset(), None)
        try:
            folder = step_folder(step)
            content = self._files.get_bytes(f"{folder}/{MANIFEST}")
            manifest = committed_manifest(step, content, self._files.get_bytes(f"{folder}/{COMMITTED}"))
        except MissingFileError:
            return _Held(None, frozenset(), None)
        except NewerFormatError as error:
            return _Held(None, frozenset(), str(error), error)
        except (ManifestError, DestinationError) as error:
            return _Held(None, frozenset(), str(error))
        held, problem = set(), None
        there = [file for file in manifest.files if os.path.lexists(self.folder(step) / file.name)]
        for file in there[self._local_rank :: self._local_world_size]:
            wrong = _problem_with(file, self.folder(step) / file.name, beat)
            if wrong is None:
                held.add(file.name)
            problem = problem or wrong
        return _Held(content, frozenset(held), problem)

    def _joined(self, step: int, all_held: Sequence[_Held]) -> tuple[LocalCheckpoint | None, str | None]:
        """What the hosts' parts make together, or why they make no checkpoint; the same on every rank."""
        contents = [held.manifest for held in all_held if held.manifest is not None]
        own_problem = next((held.problem for held in all_held if held.problem is not None), None)
        if not contents:
            return None, own_problem or "no host has its manifest"
        # Hosts of different runs may hold different saves of one step: the one that most of them have.
        content = max(sorted(set(contents)), key=contents.count)
        manifest = parse_manifest(content)
        holders: dict[str, list[int]] = {}
        for rank, held in enumerate(all_held):
            for name in held.files if held.manifest == content else ():
                host = rank // self._local_world_size * self._local_world_size
                ranks = range(host, min(host + self._local_world_size, self._group.world_size))
                holders.setdefault(name, []).extend(ranks)
        missing = [file.name for file in manifest.files if file.name not in holders]
        if missing:
            return None, own_problem or f"{missing[0]} is on no host's disk"
        return LocalCheckpoint(manifest, content, self.folder(step), holders), None

    def bring(self, checkpoint: LocalCheckpoint, wanted: Collection[str]) -> None:
        """Get the files `wanted` by this rank onto its host's disk, from hosts that have them; JobFailedError."""
        problem = self._bring_checked(checkpoint, wanted)
        if problem is not None:
            raise JobFailedError(f"checkpoint {checkpoint.folder}: {problem}; start the job again")

    def _bring_checked(self, checkpoint: LocalCheckpoint, wanted: Collection[str]) -> str | None:
        """The first problem of any rank, the same on all."""
        by_rank = self._group.gather_everywhere(frozenset(wanted))
        rank, problem = self._group.rank, None
        for file in checkpoint.manifest.files:
            holders = checkpoint.holders[file.name]
            for receiver in self._receivers(file.name, holders, by_rank):
                # Receivers take turns among the holders, which then send side by side.
                sender = holders[receiver % len(holders)]
                path = checkpoint.folder / file.name
                if rank == sender:
                    _send(self._group, path, file.num_bytes, receiver, beat)
                elif rank == receiver:
                    problem = _received(self._group, path, file, sender, beat) or problem
        problems = self._group.gather_everywhere(problem)
        return next((found for found in problems if found is not None), None)

    def _receivers(self, name: str, holders: Sequence[int], by_rank: Sequence[Collection[str]]) -> list[int]:
        """One rank of each host that lacks the file and has a rank that wants it."""
        hosts = {
            rank // self._local_world_size
            for rank, wanted in enumerate(by_rank)
            if name in wanted and rank not in holders
        }
        return [host * self._local_world_size for host in sorted(hosts)]

    def _say(self, line: str) -> None:
        if self._group.rank == 0:
            self._report(line)


def _left_behind(saved_by: int | None, attempt: int | None) -> str | None:
    """Why the job has left what one start saved, where another one saved the destination's newest."""
    if saved_by is None or attempt is None or saved_by >= attempt:
        return None
    return f"start {saved_by} of the job saved it, and start {attempt} has gone on without it"


def _received(
    group: Group, path: Path, file: ShardFile, source: int, beat: Callable[[], None] | None = None
) -> str | None:
    """Take a file from another host: what is wrong with it, or None. Whatever is, all of it is taken off the wire.

    `beat`: called after each block, by a start; the thread behind must not say that the rank lives.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    blocks, problem = _blocks(file.num_bytes, beat), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as writer:
            for block in blocks:
                group.receive(block, source)
                writer.write(block.numpy().data)
        partial.replace(path)
    except OSError as error:
        problem = f"can't write {path}: {error.strerror or error}"
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    for block in blocks:
        group.receive(block, source)
    return problem or _problem_with(file, path, beat)


def _problem_with(file: ShardFile, path: Path, beat: Callable[[], None] | None) -> str | None:
    """`difference`, also where the disk doesn't answer: other hosts, or the destination, may have the file."""
    try:
        return difference(file, path, beat)
    except OSError as error:
        return f"{file.name} can't be read: {error.strerror or error}"


def _send(group: Group, path: Path, num_bytes: int, to: int, beat: Callable[[], None] | None = None) -> None:
    """Give a file to another host, whatever can be read of it: its hash tells the other side."""
    blocks = _blocks(num_bytes, beat)
    with suppress(OSError), path.open("rb", buffering=0) as reader:
        for block in blocks:
            _fill(reader, block)
            group.send(block, to)
    for block in blocks:
        group.send(block, to)


def _fill(reader: FileIO, block: torch.Tensor) -> None:
    view = block.numpy().data
    try:
        while view and (count := reader.readinto(view)):
            view = view[count:]
    except OSError:
        block.zero_()  # the block must still be sent


def _blocks(num_bytes: int, beat: Callable[[], None] | None) -> Iterator[torch.Tensor]:
    """One buffer, as long each time as the file's next block."""
    buffer = torch.zeros(min(_BLOCK_BYTES, num_bytes), dtype=torch.uint8)
    for start in range(0, num_bytes, _BLOCK_BYTES):
        yield buffer[: min(_BLOCK_BYTES, num_bytes - start)]
        if beat is not None:
            beat()
