"""One save's way from host memory to its commit: what the thread behind does while training goes on.

All ranks make the same calls in the same order, over a group that nobody else speaks on.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from trainer.checkpoint.blocks import write_blocks
from trainer.checkpoint.delivery import Attachment, Delivery, Promise, attempted
from trainer.checkpoint.destination import Destination, DestinationError, MissingFileError, sync
from trainer.checkpoint.group import Group
from trainer.checkpoint.host_copy import HostCopy, SharedPlan
from trainer.checkpoint.local_tier import LocalTier
from trainer.checkpoint.manifest import (
    FOLDER,
    PREVIOUS_STEP,
    Manifest,
    ShardFile,
    combine_extra,
    shard_file,
    step_folder,
)
from trainer.checkpoint.restore import Retry
from trainyard.kept_room import FULL


@dataclass
class Save:
    """One save on its way."""

    step: int
    plan: SavePlan
    extra: dict[str, Any]
    attachments: list[Attachment]
    started: float
    """By `time.perf_counter`."""
    previous_step: int | None = None
    """Step of the checkpoint that was committed or loaded before it."""
    passes_tier: bool = False
    """Some host's own disk has no room for it."""
    results: list[WriteResult] = field(default_factory=list)
    files: list[ShardFile] = field(default_factory=list)


@dataclass(frozen=True)
class _RankPart:
    """What a rank tells the first one about its part of a save."""

    results: list[WriteResult]
    files: list[ShardFile]
    extra: dict[str, Any]
    error: str | None


class Saver:
    """Writes this rank's part of a save, and has the first rank commit it."""

    def __init__(
        self,
        destination: Destination,
        delivery: Delivery,
        *,
        group: Group,
        plan: SharedPlan,
        host_copy: HostCopy,
        tier: LocalTier | None,
        staging: Path,
        reads_back: bool,
        retry: Retry,
        report: Callable[[str], None],
    ) -> None:
        """`group`: of the thread that calls this. `staging`: this rank's scratch, where there is no tier and no folder.

        `reads_back`: a save is committed only once what is at the destination was read and compared.
        """
        self._destination, self._delivery = destination, delivery
        self._group, self._plan, self._host_copy = group, plan, host_copy
        self._staging, self._reads_back = staging, reads_back
        self._retry, self._report = retry, report
        self._swept: set[str] = set()
        self._attached_names: set[str] = set()
        self.tier = tier
        """The hosts' own disks; None: there are none, or one is broken."""
        self.last_local_seconds: float | None = None
        """From the call of save() to the commit on the hosts' own disks, of the last save that came so far."""

    def expect(self, names: Iterable[str]) -> None:
        """Files beside the checkpoints that saves will bring along."""
        self._attached_names |= set(names)

    def write_and_commit(self, save: Save) -> str | None:
        """None when the checkpoint is committed, else why not; the same on every rank."""
        error = self._begin_folders(save)
        tier = self._tier_of(save)
        if error is not None:
            return error
        error = attempted(lambda: self._write_own_part(save))
        parts = self._group.gather(_RankPart(save.results, save.files, save.extra, error))
        promise = self._promised(save, parts or [])
        if isinstance(promise, str):
            if tier is not None:
                self._give_up_tier(promise)
            return promise
        if tier is not None:
            self._commit_locally(tier, save, promise)
        return self._send_and_commit(save, promise)

    def send(self, save: Save, promise: Promise) -> str | None:
        """Commit at the destination what is on the hosts' own disks: why that failed, or None."""
        return self._begin_destination(save.step) or self._send_and_commit(save, promise)

    def _begin_folders(self, save: Save) -> str | None:
        """Remove what an earlier attempt left of this step, its promise first: why that failed, or None.

        On the hosts' own disks too, if the save passes them by: what they kept of the step would be taken for it.
        """
        if self.tier is not None:
            self._begin_tier(self.tier, save)
        return self._begin_destination(save.step)

    def _begin_tier(self, tier: LocalTier, save: Save) -> None:
        """A disk that is full is passed by, for this save, and one that is broken from now on."""
        full: list[bool] = []

        def begin() -> None:
            try:
                tier.begin(save.step, only_removes=save.passes_tier)
            except (OSError, DestinationError) as error:
                cause = error if isinstance(error, OSError) else error.__cause__
                full.append(getattr(cause, "errno", None) in FULL)
                raise

        said = self._group.gather_everywhere((attempted(begin), full == [True]))
        error = _first_of([one for one, _ in said])
        if error is None:
            return
        if not all(is_full for one, is_full in said if one is not None):
            self._give_up_tier(error)
            return
        if not save.passes_tier and self._group.rank == 0:
            self._report(f"checkpoint.local_directory: {error}; step {save.step} goes to the destination alone")
        save.passes_tier = True

    def sweep(self, prefixes: Iterable[str]) -> None:
        """Once a start each, before the first upload there (first rank): what a killed run's uploads left goes."""
        unswept = sorted(set(prefixes) - self._swept)
        self._swept |= set(unswept)
        try:
            num_found = self._destination.give_up_unfinished(unswept)
        except (DestinationError, MissingFileError) as error:
            self._report(f"checkpoint unfinished uploads of an earlier run may be left: {error}")
            return
        if num_found:
            self._report(f"checkpoint unfinished uploads of an earlier run removed: {num_found}")

    def _give_up_tier(self, error: str) -> None:
        """A host's own disk is broken (told to all ranks alike): it must not keep saves from the destination."""
        self.tier = None
        if self._group.rank == 0:
            self._report(f"checkpoint.local_directory: {error}; saves go to the destination alone from now on")

    def _begin_destination(self, step: int) -> str | None:
        def clear() -> None:
            self._retry("clearing", lambda: self._delivery.remove(step))
            self.sweep([f"{FOLDER}/", *self._attached_names])

        return self._group.from_first(lambda: attempted(clear))

    def _promised(self, save: Save, parts: list[_RankPart]) -> Promise | str:
        """The manifest of what all ranks wrote, or why there is none; known to the first rank, or to all with a tier.

        The first rank writes DCP's index on the way.
        """
        promise: list[Promise] = []

        def make() -> str | None:
            return attempted(lambda: promise.append(self._make_promise(save, parts)))

        error = self._group.from_first(make)
        if error is not None:
            return error
        if self._tier_of(save) is not None:
            return self._group.from_first(lambda: promise[0])
        return promise[0] if promise else Promise(Manifest(save.step, 0, (), {}, {}), b"", b"")

    def _make_promise(self, save: Save, parts: list[_RankPart]) -> Promise:
        _raise_broken([part.error for part in parts])
        index = self._plan.write_index(self._written_folder(save), [part.results for part in parts])
        files = [file for part in parts for file in part.files] + [shard_file(index)]
        extra, extra_by_rank = combine_extra([part.extra for part in parts])
        extra[PREVIOUS_STEP] = save.previous_step
        manifest = Manifest(save.step, len(parts), tuple(files), extra, extra_by_rank)
        return Promise(manifest, manifest.to_bytes(), index.read_bytes())

    def _commit_locally(self, tier: LocalTier, save: Save, promise: Promise) -> None:
        """Commit on the hosts' own disks; a failure is told, and the destination gets the save all the same."""
        error = attempted(lambda: tier.commit(save.step, promise.content, promise.index))
        error = _first_of(self._group.gather_everywhere(error))
        if error is None:
            self.last_local_seconds = time.perf_counter() - save.started
            error = attempted(lambda: tier.copy_to_peer(self._group, save.step, save.files))
            error = _first_of(self._group.gather_everywhere(error))
            error = error and f"no copy on a peer: {error}"
        if error is not None and self._group.rank == 0:
            self._report(f"checkpoint step={save.step} on the hosts' disks: {error}")

    def _send_and_commit(self, save: Save, promise: Promise) -> str | None:
        """Bring what the ranks wrote to the destination and commit it: why that failed, or None."""
        written_to = self._written_folder(save)
        sent: str | None = None
        if written_to != self._destination.folder(step_folder(save.step)):
            sent = attempted(lambda: self._delivery.upload_files(save.step, save.files, written_to))
        if sent is None and self._reads_back:
            sent = attempted(lambda: self._delivery.read_back(save.step, save.files))
        errors = self._group.gather(sent)

        def commit() -> None:
            _raise_broken(errors or [])
            self._delivery.commit(save.step, promise, save.attachments, written_to)

        return self._group.from_first(lambda: attempted(commit))

    def _tier_of(self, save: Save) -> LocalTier | None:
        """The hosts' own disks, if the save goes there."""
        return None if save.passes_tier else self.tier

    def _written_folder(self, save: Save) -> Path:
        """Where this rank writes its part first: its host's tier, the destination's own folder, or scratch."""
        if (tier := self._tier_of(save)) is not None:
            return tier.folder(save.step)
        return self._destination.folder(step_folder(save.step)) or self._staging

    def _write_own_part(self, save: Save) -> None:
        folder = self._written_folder(save)
        is_durable = folder != self._staging
        save.results, written = self._host_copy.write(save.plan, folder, durable=is_durable)
        shards = _archives_by_file(save.results)
        tables = [write_blocks(folder / name, archives, written[name].values) for name, archives in shards.items()]
        for table in tables if is_durable else ():
            sync(table)
        save.files = [*(written[name].shard_file(name) for name in shards), *map(shard_file, tables)]


def _first_of(errors: Sequence[str | None]) -> str | None:
    """The first rank's error that is one, by rank."""
    return next((f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None), None)


def _raise_broken(errors: Sequence[str | None]) -> None:
    broken = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
    if broken:
        raise DestinationError("; ".join(broken[:3]), permanent=True)


def _archives_by_file(results: Sequence[WriteResult]) -> dict[str, list[tuple[int, int]]]:
    """File -> (start, bytes) of each result in it; a rank with nothing to write has none."""
    found: dict[str, list[tuple[int, int]]] = {}
    for result in results:
        place = result.storage_data
        found.setdefault(str(place.relative_path), []).append((int(place.offset), int(place.length)))
    return dict(sorted(found.items()))
