"""The flow of a save and of a load. See the package for the layout and what is promised."""

import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place
from torch.distributed.checkpoint.storage import WriteResult

from trainer.checkpoint.destination import (
    RETRY_DELAYS_SECONDS,
    DestinationError,
    MissingFileError,
    open_destination,
    sync,
    with_retries,
)
from trainer.checkpoint.group import Group
from trainer.checkpoint.host_copy import HostCopy, SharedPlan
from trainer.checkpoint.manifest import (
    COMMITTED,
    FOLDER,
    MANIFEST,
    Manifest,
    ShardFile,
    combine_extra,
    commit_marker,
    shard_file,
    step_folder,
    step_of,
)
from trainer.checkpoint.restore import CheckpointInfo, Restorer
from trainer.heartbeat import beat
from trainer.rendezvous import PATIENT
from trainer.speech import say
from trainyard.errors import InputError

_LONGEST_UPLOAD = timedelta(hours=2)
"""How long ranks wait behind for the slowest one's upload."""

_BEAT_SECONDS = 1.0

_SPACE_MARGIN_BYTES = 16 << 20
_SPACE_FACTOR = 1.05
"""Shard files are the tensors and a little more; the disk has other users."""


@dataclass
class _Save:
    """One save on its way."""

    step: int
    plan: SavePlan
    extra: dict[str, Any]
    attachments: list[tuple[str, Path, int]]
    """Name at the destination, local file, and how much of it: the file may grow meanwhile."""
    started: float
    results: list[WriteResult] = field(default_factory=list)
    files: list[ShardFile] = field(default_factory=list)


@dataclass(frozen=True)
class _RankPart:
    """What a rank tells the first one about its part of a save."""

    results: list[WriteResult]
    files: list[ShardFile]
    extra: dict[str, Any]
    error: str | None


class Checkpointer:
    """Saves and loads one job's checkpoints. Every rank has one; all ranks call each method in the same order."""

    def __init__(
        self,
        destination: str,
        *,
        rank: int,
        world_size: int,
        local_dir: Path,
        keep_last: int,
        asynchronous: bool,
        process_group: dist.ProcessGroup | None = None,
        report: Callable[[str], None] = say,
        retry_delays_seconds: Sequence[float] = RETRY_DELAYS_SECONDS,
    ) -> None:
        """`destination`: a folder (shared by all hosts) or an s3:// prefix. `local_dir`: scratch of this host.

        `process_group`: a CPU (gloo) group of all ranks for what the caller's own thread says. The thread behind has a
        group of its own, made here: collectives of two threads on one group would mix.
        """
        assert keep_last >= 1
        self._destination = open_destination(destination)
        self._local_dir = local_dir.absolute()
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        self._report = report
        self._delays = retry_delays_seconds
        self._own_process_group: dist.ProcessGroup | None = None
        if world_size > 1:
            process_group = process_group or dist.group.WORLD
            self._own_process_group = dist.new_group(backend="gloo", timeout=_LONGEST_UPLOAD, group_desc=PATIENT)
        self._group = Group(process_group, rank, world_size)
        self._behind = Group(self._own_process_group, rank, world_size)
        self._process_group = process_group
        self._plan = SharedPlan(self._group)
        self._host_copy = HostCopy()
        self._restorer = Restorer(self._destination, self._group, self._local_dir, self._retry, report)
        self._staging = self._local_dir / "staging" / f"rank-{rank:05d}"
        shutil.rmtree(self._staging, ignore_errors=True)  # left by a killed run
        self._thread: threading.Thread | None = None
        self._bad_steps: set[int] = set()
        self.last_committed_step: int | None = None
        """Step of the newest checkpoint that this object committed or loaded."""
        self.last_save_seconds: float | None = None
        """From the call of save() to the commit, of the last save that was committed."""
        self.blocked_seconds = 0.0
        """How long the last save() kept the caller, waiting for the save before it included."""
        self.backpressure_seconds = 0.0
        """The part of blocked_seconds that was spent waiting for the save before."""
        self.num_failed_saves = 0
        """Saves that were skipped or not committed."""
        self.last_error: str | None = None
        """Why the last save was not committed; None after a good one."""

    @property
    def uri(self) -> str:
        """The destination, as given."""
        return self._destination.uri

    @property
    def is_saving(self) -> bool:
        """Whether a save is on its way, on this rank."""
        return self._thread is not None and self._thread.is_alive()

    # ------------------------------------------------------------------ save

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        extra: dict[str, Any],
        *,
        attachments: Mapping[str, Path] | None = None,
    ) -> None:
        """Save `tensors` as they are now, as the checkpoint of `step`; returns when they may change again.

        `tensors`: names -> whole tensors (the same on every rank), DTensors, or tensors that describe their shards to
        torch.distributed.checkpoint. `extra`: JSON values, each rank its own. `attachments` (of rank 0): files that are
        copied to the destination's root, as long as they are now. Waits for the save before it. Never raises for the
        destination's sake: see `last_error`.
        """
        started = time.perf_counter()
        self.wait()
        self.backpressure_seconds = time.perf_counter() - started
        if step != self.last_committed_step:
            self._begin(step, tensors, extra, attachments or {}, started)
        self.blocked_seconds = time.perf_counter() - started

    def _begin(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        extra: dict[str, Any],
        attachments: Mapping[str, Path],
        started: float,
    ) -> None:
        items = self._plan.local_items(tensors)
        kept = self._plan.holds(items)
        changed, full = self._group.any(not kept, kept and self._lacks_space(step))
        if changed:
            self._plan.make(tensors, items)
            (full,) = self._group.any(self._lacks_space(step))
        if full:
            # The rank that lacks it has said so.
            self._failed(step, "a disk is too full for it; the one before it is kept")
            return
        self._host_copy.take(self._plan.mine, tensors)
        files = [(name, path, path.stat().st_size) for name, path in attachments.items() if path.is_file()]
        # A copy, and at once: what is no JSON is the caller's mistake, and must not show up as a failed upload.
        extra = json.loads(json.dumps(extra))
        save = _Save(step, self._plan.mine, extra, files, started)
        self._thread = threading.Thread(target=self._finish, args=(save,), name="checkpoint", daemon=True)
        self._thread.start()
        if not self._asynchronous:
            self.wait()

    def _lacks_space(self, step: int) -> bool:
        in_place = self._destination.folder(step_folder(step))
        folder = in_place or self._staging
        # Ranks of one host share its disk; a shared folder is shared by all.
        sharing = self._group.world_size if in_place else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        needed = int(self._plan.num_bytes * _SPACE_FACTOR) * sharing + _SPACE_MARGIN_BYTES
        free = free_bytes(folder)
        if free >= needed:
            return False
        self._report(
            f"checkpoint step={step} needs {needed >> 20} MiB, {folder} has {free >> 20} MiB free: "
            "free space or give another checkpoint.destination"
        )
        return True

    def _finish(self, save: _Save) -> None:
        """Write, hash, upload, commit. In the thread behind when asynchronous."""
        try:
            error = self._write_and_commit(save)
        except Exception as failure:  # a lost peer, or a bug: training decides for itself, a save never ends it
            error = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        shutil.rmtree(self._staging, ignore_errors=True)
        if error is not None:
            self._failed(save.step, error)
            return
        self.last_save_seconds = time.perf_counter() - save.started
        self.last_committed_step = save.step
        self.last_error = None
        self._bad_steps.discard(save.step)
        if self._group.rank == 0:
            self._report(
                f"checkpoint step={save.step} committed uri={self._destination.uri}/{step_folder(save.step)} "
                f"seconds={self.last_save_seconds:.3f}"
            )
            self._prune(save.step)

    def _write_and_commit(self, save: _Save) -> str | None:
        """None when the checkpoint is committed, else why not; the same on every rank."""
        error = self._behind.from_first(lambda: self._attempt(lambda: self._clear(save.step)))
        if error is not None:
            return error
        error = self._attempt(lambda: self._write_own_part(save))
        parts = self._behind.gather(_RankPart(save.results, save.files, save.extra, error))
        return self._behind.from_first(lambda: self._attempt(lambda: self._commit(save, parts or [])))

    @staticmethod
    def _attempt(action: Callable[[], None]) -> str | None:
        """What went wrong, in one line, or None."""
        try:
            action()
        except (DestinationError, MissingFileError) as error:
            return str(error)
        except OSError as error:
            return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        except Exception as error:  # torch's writer wraps what went wrong in kinds of its own
            return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return None

    def _clear(self, step: int) -> None:
        """Remove what an earlier attempt left in the step's folder, its promise first (first rank)."""
        self._retry("clearing", lambda: self._remove(step_folder(step)))

    def _remove(self, folder: str) -> None:
        names = self._destination.sizes(folder)
        for first in (f"{folder}/{COMMITTED}", f"{folder}/{MANIFEST}"):
            if first in names:
                self._destination.delete([first])
                del names[first]
        if names:
            self._destination.delete(names)

    def _write_own_part(self, save: _Save) -> None:
        in_place = self._destination.folder(step_folder(save.step))
        folder = in_place or self._staging
        save.results = self._host_copy.write(save.plan, folder, durable=in_place is not None)
        save.files = [shard_file(folder / name) for name in _file_names(save.results)]
        if in_place is None:
            for file in save.files:
                self._upload(f"{step_folder(save.step)}/{file.name}", folder / file.name)

    def _upload(self, name: str, path: Path) -> None:
        self._retry(f"upload of {name}", lambda: self._destination.put_file(name, path))

    def _commit(self, save: _Save, parts: list[_RankPart]) -> None:
        """The first rank's last act: index, attachments, manifest, a look at what is there, marker."""
        broken = [f"rank {rank}: {part.error}" for rank, part in enumerate(parts) if part.error is not None]
        if broken:
            raise DestinationError("; ".join(broken[:3]), permanent=True)
        folder = step_folder(save.step)
        in_place = self._destination.folder(folder)
        local = in_place or self._staging
        index = self._plan.write_index(local, [part.results for part in parts])
        files = [file for part in parts for file in part.files] + [shard_file(index)]
        if in_place is None:
            self._upload(f"{folder}/{index.name}", index)
        else:
            sync(in_place)
        self._attach(save)
        extra, extra_by_rank = combine_extra([part.extra for part in parts])
        manifest = Manifest(save.step, len(parts), tuple(files), extra, extra_by_rank).to_bytes()
        self._retry("manifest", lambda: self._destination.put_bytes(f"{folder}/{MANIFEST}", manifest))
        self._check_presence(folder, files)
        marker = commit_marker(save.step, manifest)
        self._retry("commit", lambda: self._destination.put_bytes(f"{folder}/{COMMITTED}", marker))

    def _attach(self, save: _Save) -> None:
        for name, path, size in save.attachments:
            if self._is_at_destination(name, path):
                continue
            copy = self._staging / f"attachment-{name}"
            copy.parent.mkdir(parents=True, exist_ok=True)
            _copy_beginning(path, copy, size)
            self._upload(name, copy)

    def _is_at_destination(self, name: str, path: Path) -> bool:
        root = self._destination.folder("")
        return root is not None and (root / name).exists() and (root / name).samefile(path)

    def _check_presence(self, folder: str, files: Sequence[ShardFile]) -> None:
        there = self._retry("check", lambda: self._destination.sizes(folder))
        for file in files:
            size = there.get(f"{folder}/{file.name}")
            if size != file.num_bytes:
                found = "is not there" if size is None else f"has {size} bytes there, {file.num_bytes} were written"
                hint = "; is the folder shared by all hosts?" if self._destination.folder("") is not None else ""
                raise DestinationError(f"{file.name} {found}{hint}", permanent=True)

    def _prune(self, newest: int) -> None:
        """Remove what retention no longer keeps, now that `newest` is committed (first rank)."""
        error = self._attempt(lambda: self._remove_expired(newest))
        if error is not None:
            self._report(f"checkpoint retention failed, will try again after the next save: {error}")

    def _remove_expired(self, newest: int) -> None:
        names = self._destination.sizes(FOLDER)
        older = {step for step in map(step_of, names) if step is not None and step < newest}
        good = {step for step in older if f"{step_folder(step)}/{COMMITTED}" in names} - self._bad_steps
        # `newest` is one of those kept. What is not good is of no use to anyone: an interrupted or a corrupt one.
        kept = set(sorted(good, reverse=True)[: self._keep_last - 1])
        for step in sorted(older - kept):
            self._remove(step_folder(step))
            self._bad_steps.discard(step)

    def _failed(self, step: int, error: str) -> None:
        self.num_failed_saves += 1
        self.last_error = error
        if self._group.rank == 0:
            self._report(f"checkpoint step={step} not committed: {error}; training goes on")

    def _retry(self, what: str, operation: Callable[[], Any]) -> Any:
        return with_retries(operation, what=what, report=self._report, delays_seconds=self._delays)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until no save is on its way; False if one still is after `timeout_seconds` (on this rank)."""
        thread = self._thread
        if thread is not None:
            deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
            while thread.is_alive() and (deadline is None or time.monotonic() < deadline):
                # A long upload is no hang: who waits for it lives, and says so.
                thread.join(_BEAT_SECONDS if deadline is None else min(_BEAT_SECONDS, deadline - time.monotonic()))
                beat()
            if thread.is_alive():
                return False
            self._thread = None
        return True

    def close(self) -> None:
        """Wait for the last save and leave nothing behind on this host."""
        self.wait()
        shutil.rmtree(self._staging, ignore_errors=True)
        if self._own_process_group is not None:
            dist.destroy_process_group(self._own_process_group)
            self._own_process_group = None

    # ------------------------------------------------------------------ load

    def latest(self) -> CheckpointInfo | None:
        """The newest committed checkpoint whose every byte is as promised; None if there is none.

        Each one passed over is a line on stdout. AwsRefusedError or JobFailedError if the destination can't be read.
        """
        self.wait()
        return self._restorer.newest(self._bad_steps)

    def load(self, info: CheckpointInfo, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Read a checkpoint into `tensors`, in place, whatever layout they or it have; the `extra` that was saved.

        A rank of a world of the same size gets its own `extra` back, otherwise rank 0's. InputError if the checkpoint
        doesn't hold these tensors.
        """
        reader = FileSystemReader(info.folder)
        problems = self._group.gather_everywhere(_mismatch(reader, tensors))
        problem = next((found for found in problems if found is not None), None)
        if problem is not None:
            raise InputError(f"checkpoint {info.uri}: {problem}; the job's model is not the one that was saved")
        with warnings.catch_warnings():
            # A world of one is what was asked for; torch warns about it.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_in_place(
                dict(tensors),
                storage_reader=reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._process_group,
                no_dist=self._group.world_size == 1,
            )
        self._restorer.discard(info)
        self.last_committed_step = info.step
        return info.manifest.extra_of(self._group.rank, self._group.world_size)

    # ------------------------------------------------------------------ single files

    def publish_file(self, name: str, path: Path) -> bool:
        """Copy a file to `<destination>/<name>` (call it on one rank); False, with a line on stdout, if that fails."""
        error = self._attempt(lambda: self._upload(name, path))
        if error is not None:
            self._report(f"checkpoint {name} not uploaded: {error}")
        return error is None

    def fetch_file(self, name: str, path: Path) -> bool:
        """Copy `<destination>/<name>` to `path` (call it on one rank); False if there is none.

        AwsRefusedError or JobFailedError if the destination can't be read.
        """
        try:
            self._retry(f"download of {name}", lambda: self._destination.get_file(name, path))
        except MissingFileError:
            return False
        except DestinationError as error:
            raise self._restorer.unreachable(error) from None
        return True


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that `folder` lies on, or would."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _file_names(results: Sequence[WriteResult]) -> list[str]:
    """The files that hold these results: a rank with nothing to write has none."""
    return sorted({str(result.storage_data.relative_path) for result in results})


def _copy_beginning(source: Path, target: Path, num_bytes: int) -> None:
    with source.open("rb") as reader, target.open("wb") as writer:
        left = num_bytes
        while left > 0 and (block := reader.read(min(left, 1 << 20))):
            writer.write(block)
            left -= len(block)


def _mismatch(reader: FileSystemReader, tensors: Mapping[str, torch.Tensor]) -> str | None:
    saved = reader.read_metadata().state_dict_metadata
    missing = [name for name in tensors if name not in saved]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        return f"it holds no {', '.join(missing[:3])}{more}"
    for name, tensor in tensors.items():
        stored = saved[name]
        if isinstance(stored, TensorStorageMetadata) and stored.size != tensor.shape:
            return f"{name} has shape {list(stored.size)} in it and {list(tensor.shape)} in the job"
    return None
