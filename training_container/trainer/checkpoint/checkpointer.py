"""The flow of a save and of a load. See the package for the layout and what is promised."""

import json
import os
import re
import secrets
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from trainer.checkpoint.behind import Behind
from trainer.checkpoint.blocks import BLOCKS_SUFFIX
from trainer.checkpoint.claim import Claim, Claimant
from trainer.checkpoint.delivery import Attachment, Delivery, Promise, attempted, beginning
from trainer.checkpoint.destination import (
    RETRY_DELAYS_SECONDS,
    DestinationError,
    MissingFileError,
    open_destination,
    os_errors,
    with_retries,
)
from trainer.checkpoint.group import Group, Value
from trainer.checkpoint.host_copy import HostCopy, SharedPlan
from trainer.checkpoint.index import INDEX, parse_index
from trainer.checkpoint.local_tier import LocalCheckpoint, LocalTier
from trainer.checkpoint.manifest import (
    FOLDER,
    PREVIOUS_STEP,
    ManifestError,
    step_folder,
)
from trainer.checkpoint.needs import Needs
from trainer.checkpoint.reading import (
    AlteredError,
    left_moments,
    left_weights,
    mismatch,
    moment_kinds,
    weights_asked_for,
    without_unsaved,
)
from trainer.checkpoint.restore import CheckpointInfo, OpenStep, Restorer
from trainer.checkpoint.saving import Save, Saver
from trainer.heartbeat import beat
from trainer.rendezvous import PATIENT
from trainer.speech import say
from trainyard.errors import AwsRefusedError, InputError, JobFailedError
from trainyard.kept_room import FULL
from trainyard.spec.checkpoint_names import LEADS_NOWHERE, broken_link
from trainyard.spec.retention import BestSpec, Retention
from trainyard.spec.words import counted

_LONGEST_UPLOAD = timedelta(hours=2)
"""How long ranks wait behind for the slowest one's upload."""

_BEAT_SECONDS = 1.0
_PATIENT_SAVES = 3
"""A save may take as many times as long as the last one, before who waits for it no longer says that it lives."""

_PROBE = f"{FOLDER}/.probe"
"""Is written where it isn't known whether anything can be."""

_RUN = f"{FOLDER}/run"
"""Is written where the hosts' own disks are used: the run's name. It goes with what is removed to start anew,
by `rm checkpoints/*` too: no dot."""

_SPACE_MARGIN_BYTES = 16 << 20
_SPACE_FACTOR = 1.05
"""Shard files are the tensors and a little more; the disk has other users."""


class Checkpointer:
    """Saves and loads one job's checkpoints. Every rank has one; all ranks call each method in the same order."""

    last_committed_step: int | None = None
    """Step of the newest checkpoint that this object committed or loaded."""
    last_save_seconds: float | None = None
    """From the call of save() to the commit, of the last save that was committed."""
    blocked_seconds = 0.0
    """How long the last save() kept the caller, waiting for the save before it included."""
    backpressure_seconds = 0.0
    """The part of blocked_seconds that was spent waiting for the save before."""
    num_failed_saves = 0
    """Saves that were skipped or not committed."""
    last_error: str | None = None
    """Why the last save was not committed; None after a good one."""

    _claim: Claim | None = None
    _own_process_group: dist.ProcessGroup | None = None
    _is_run_named = False
    _from_tier: LocalCheckpoint | None = None
    """What latest() found there, until it is loaded."""
    _met_a_full_disk = False
    """A save of this attempt did, on some rank: of a quota, or of a file system's last inode, no free space tells,
    and most likely the next save would meet it, too."""

    def __init__(
        self,
        destination: str,
        *,
        rank: int,
        world_size: int,
        local_dir: Path,
        keep_last: int,
        asynchronous: bool,
        local_tier: Path | None = None,
        peer_copy: bool = False,
        keep_every_steps: int | None = None,
        keep_best: BestSpec | None = None,
        process_group: dist.ProcessGroup | None = None,
        report: Callable[[str], None] = say,
        retry_delays_seconds: Sequence[float] = RETRY_DELAYS_SECONDS,
        patience_seconds: float | None = None,
    ) -> None:
        """`destination`: a folder (shared by all hosts) or an s3:// prefix. `local_dir`: scratch of this host.

        `local_tier`: a folder on this host's own disk, where a save is committed before it goes to the destination;
        `peer_copy`: the next host's disk gets a copy of this one's part.
        `patience_seconds`: who waits longer than this for a save, and much longer than the last one took, no longer
        says that it lives; None: always.
        `process_group`: a CPU (gloo) group of all ranks for what the caller's own thread says. The thread behind has a
        group of its own, made here: collectives of two threads on one group would mix.
        """
        assert keep_last >= 1
        self._destination = open_destination(destination)
        self._local_dir = local_dir.absolute()
        self._asynchronous = asynchronous
        self._report = report
        self._delays = retry_delays_seconds
        self._patience_seconds = patience_seconds
        self._join_groups(process_group, rank, world_size)
        self._plan = SharedPlan(self._group)
        self._host_copy = HostCopy()
        self._restorer = Restorer(self._destination, self._group, self._local_dir, self._retry, report)
        self._staging = self._local_dir / "staging" / f"rank-{rank:05d}"
        shutil.rmtree(self._staging, ignore_errors=True)  # left by a killed run
        self._copies = ExitStack()
        """Of what a save sends beside the checkpoint."""
        self._worker = Behind("checkpoint")
        self._bad_steps: set[int] = set()
        self._delivery = self._new_delivery(Retention(keep_last, keep_every_steps, keep_best))
        tier = None if local_tier is None else self._tier_at(local_tier, peer_copy=peer_copy)
        # With one alone, it goes as soon as the next is committed: that must be good, not only there.
        self._saver = self._new_saver(tier, reads_back=keep_last == 1)
        self._figures: dict[str, float] = {}
        self.failed_steps: set[int] = set()
        """Of saves that were skipped or not committed, where the step was not saved again."""

    def _join_groups(self, process_group: dist.ProcessGroup | None, rank: int, world_size: int) -> None:
        if world_size > 1:
            process_group = process_group or dist.group.WORLD
            self._own_process_group = dist.new_group(backend="gloo", timeout=_LONGEST_UPLOAD, group_desc=PATIENT)
        self._group = Group(process_group, rank, world_size)
        self._behind = Group(self._own_process_group, rank, world_size)

    def _new_delivery(self, retention: Retention) -> Delivery:
        return Delivery(
            self._destination,
            retention=retention,
            retry=self._retry,
            report=self._report,
            staging=self._staging,
            bad_steps=self._bad_steps,
        )

    def _tier_at(self, folder: Path, *, peer_copy: bool) -> LocalTier:
        return LocalTier(folder, self._destination.uri, group=self._group, peer_copy=peer_copy, report=self._report)

    def _new_saver(self, tier: LocalTier | None, *, reads_back: bool) -> Saver:
        return Saver(
            self._destination,
            self._delivery,
            group=self._behind,
            plan=self._plan,
            host_copy=self._host_copy,
            tier=tier,
            staging=self._staging,
            reads_back=reads_back,
            retry=self._retry,
            report=self._report,
        )

    @property
    def uri(self) -> str:
        """The destination, as given."""
        return self._destination.uri

    def claim(self, claimant: Claimant, *, was_there: bool = False) -> None:
        """Have the destination for this job alone, until close(), and a folder made. Of a bucket nobody can say.

        The first rank does it, and all hear of what it raises: InputError where it can be no folder, and see Claim for
        where somebody else saves there. `was_there`: an earlier start saved there, so that a folder which isn't there
        now is on a disk that isn't mounted, or was moved: InputError; made anew, it would be one without checkpoints.
        """
        folder = self._destination.folder("")
        if folder is None:
            return

        def take() -> None:
            if was_there and not os.path.lexists(folder):
                raise InputError(
                    f"checkpoint.destination {folder}: an earlier start of this job saved there, and it is gone:"
                    f" mount its disk, or bring it back; to begin anew: mkdir -p {shlex.quote(str(folder))}"
                )
            _make_folder(folder)
            self._claim = Claim(folder, claimant=claimant, report=self._report)

        self._group.from_first(take)

    @property
    def is_saving(self) -> bool:
        """Whether a save is on its way, on this rank."""
        return self._worker.is_busy

    @property
    def last_local_seconds(self) -> float | None:
        """From the call of save() to the commit on the hosts' own disks, of the last save that came so far."""
        return self._saver.last_local_seconds

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
        self.failed_steps.discard(step)
        if step != self.last_committed_step:
            self._begin(step, tensors, extra, attachments or {}, started)
        self.blocked_seconds = time.perf_counter() - started
        waits = {"blocked_seconds": self.blocked_seconds, "backpressure_seconds": self.backpressure_seconds}
        self._figures |= {"step": step, **waits}

    def complete(self, step: int, more: Mapping[str, Any]) -> None:
        """Put `more`, JSON values, into the committed checkpoint of `step`: what was known of it only later.

        All ranks call it. Waits for a save on its way. A failure, or a step that isn't committed, is a line on stdout.
        """
        self.wait()
        if self._group.rank == 0:
            error = attempted(lambda: self._delivery.complete(step, json.loads(json.dumps(dict(more)))))
            if error is not None:
                self._report(f"checkpoint step={step} not completed with {', '.join(more)}: {error}")

    def is_anywhere(self, flag: bool) -> bool:
        """Whether any rank says so; all ask at the same time."""
        return self._group.any(flag)[0]

    def take_figures(self) -> dict[str, float]:
        """What the saves cost since the last call, for the metrics; empty where there was none.

        step, blocked_seconds and backpressure_seconds (a part of it) of a save that began; committed_step,
        save_seconds and, with a local tier, local_seconds of one that was committed.
        """
        figures, self._figures = self._figures, {}
        return figures

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
        votes = self._group.ask_any(not kept, kept and self._lacks_space(step) is not None, self._met_a_full_disk)
        if kept:
            self._host_copy.take(self._plan.mine, tensors)  # while the ranks tell each other; in vain at worst
        changed, full, met_a_full_disk = votes()
        if changed:
            self._plan.make(tensors, items)
            (full,) = self._group.any(self._lacks_space(step) is not None)
        passes_tier = False
        if full or met_a_full_disk:
            self._make_room(step)
        if full:
            full, passes_tier = self._is_still_full(step)
        if full:
            # A rank that lacks it has said so.
            before = "none is at its destination" if self.last_committed_step is None else "the one before it is kept"
            self._failed(step, f"a disk is too full for it; {before}")
            return
        if changed:
            self._host_copy.take(self._plan.mine, tensors)
        self._saver.expect(attachments)
        files: list[Attachment] = []
        error = attempted(lambda: files.extend(_with_sizes(attachments)))
        if error is not None:
            self._report(f"checkpoint step={step} is saved without {', '.join(attachments)}: {error}")
        # A copy, and at once: what is no JSON is the caller's mistake, and must not show up as a failed upload.
        extra = json.loads(json.dumps(extra))
        save = Save(step, self._plan.mine, extra, files, started, self.last_committed_step, passes_tier)
        self._start_behind(save, self._saver.write_and_commit)
        if not self._asynchronous:
            self.wait()

    def _start_behind(self, save: Save, work: Callable[[Save], str | None]) -> None:
        self._worker.start(partial(self._finish, save, work))

    def _make_room(self, step: int) -> None:
        """Remove now what would go once `step` is committed; the newest good one stays until then."""
        tier = self._saver.tier
        if tier is not None:
            attempted(lambda: tier.begin(step, only_removes=True))  # if that fails, the save itself will tell
        if self._destination.folder("") is not None:
            self._group.from_first(lambda: self._delivery.prune(step))
        self._group.wait_for_all()

    def _is_still_full(self, step: int) -> tuple[bool, bool]:
        """Whether some host has no room for the save, and, where it has, whether only without some host's own disk."""
        of_tier = self._tier_lacks_space(step)
        (passes_tier,) = self._group.any(of_tier is not None)
        lack = self._lacks_space(step, passes_tier=passes_tier)
        (full,) = self._group.any(lack is not None)
        if of_tier is not None and not full:
            lack = f"{of_tier}; this one goes to the destination alone"
        # Once a host: its ranks lack the same.
        own = None if lack is None else (socket.gethostname(), re.sub(r"\d+", "", lack))  # whatever is free by now
        told = self._group.gather_everywhere(own)
        if lack is not None and own not in told[: self._group.rank]:
            self._report(lack)
        return full, passes_tier

    def _lacks_space(self, step: int, *, passes_tier: bool = False) -> str | None:
        """Which disk is too full for this rank's host to save, in one line; None: none is."""
        in_place, lack = self._destination.folder(step_folder(step)), None
        if in_place is not None:
            lack = self._lacks(step, in_place, self._group.world_size, "destination")
        elif self._saver.tier is None or passes_tier:
            lack = self._lacks(step, self._staging, _ranks_a_host(), "destination")
        return lack or (None if passes_tier else self._tier_lacks_space(step))

    def _tier_lacks_space(self, step: int) -> str | None:
        """As `_lacks_space`, of the hosts' own disks alone."""
        tier = self._saver.tier
        if tier is None:
            return None
        return self._lacks(step, tier.folder(step), _ranks_a_host() * tier.copies, "local_directory")

    def _lacks(self, step: int, folder: Path, sharing: int, field_name: str) -> str | None:
        """Why parts of `sharing` ranks have no room there; None where the disk doesn't answer: the save will tell."""
        needed = int(self._plan.num_bytes * _SPACE_FACTOR) * sharing + _SPACE_MARGIN_BYTES
        try:
            free = free_bytes(folder)
        except OSError:
            return None
        if free >= needed or not _can_be_in(folder.parent):
            return None
        return (
            f"checkpoint step={step} needs {needed >> 20} MiB, {folder} has {free >> 20} MiB free: "
            f"free space or give another checkpoint.{field_name}"
        )

    def _finish(self, save: Save, work: Callable[[Save], str | None]) -> None:
        """Write, hash, upload, commit. In the thread behind when asynchronous."""
        tier = self._saver.tier
        try:
            error = work(save)
        except Exception as failure:  # a lost peer, or a bug: training decides for itself, a save never ends it
            error = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        self._copies.close()
        shutil.rmtree(self._staging, ignore_errors=True)
        if error is not None:
            self._failed(save.step, error)
            # A host's own disk that was given up for it says nothing of the destination.
            self._met_a_full_disk |= tier is self._saver.tier and any(os.strerror(code) in error for code in FULL)
            return
        self.last_save_seconds = time.perf_counter() - save.started
        self.last_committed_step = save.step
        self.last_error = None
        self._bad_steps.discard(save.step)
        committed = {"committed_step": save.step, "save_seconds": self.last_save_seconds}
        if self._saver.tier is not None and not save.passes_tier and self.last_local_seconds is not None:
            committed["local_seconds"] = self.last_local_seconds
        self._figures |= committed
        if self._group.rank == 0:
            self._report(
                f"checkpoint step={save.step} committed uri={self._destination.uri}/{step_folder(save.step)} "
                f"seconds={self.last_save_seconds:.3f} at={datetime.now(UTC).isoformat(timespec='seconds')}"
            )
            self._delivery.prune(save.step)

    def _failed(self, step: int, error: str) -> None:
        self.num_failed_saves += 1
        self.failed_steps.add(step)
        self.last_error = error
        if self._group.rank == 0:
            self._report(f"checkpoint step={step} not committed: {error}; training goes on")

    def _retry(self, what: str, operation: Callable[[], Any]) -> Any:
        return with_retries(operation, what=what, report=self._report, delays_seconds=self._delays)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until no save is on its way; False if one still is after `timeout_seconds` (on this rank)."""
        began, patience = time.monotonic(), self._patience_seconds
        if patience is not None:
            patience = max(patience, _PATIENT_SAVES * (self.last_save_seconds or 0.0))
        deadline = None if timeout_seconds is None else began + timeout_seconds
        while self.is_saving and (deadline is None or time.monotonic() < deadline):
            # A long upload is no hang: who waits for it lives, and says so. One without an end (a disk, a file
            # system that no longer answers) is one, and the host's to end: nothing here can.
            self._worker.wait(_BEAT_SECONDS if deadline is None else min(_BEAT_SECONDS, deadline - time.monotonic()))
            if patience is None or time.monotonic() < began + patience:
                beat()
        return not self.is_saving

    def leave_hosts_disks(self) -> None:
        """The job is done: what its hosts keep of it on their own disks goes, where the destination has its last step.

        All ranks call it after the last save. On machines that stay, each job would leave two checkpoints for good.
        """
        self.wait()
        tier = self._saver.tier
        if tier is None or self.is_anywhere(self.last_error is not None or self.last_committed_step is None):
            return
        if (error := attempted(tier.clear)) is not None:
            self._report(f"checkpoint.local_directory: {tier.root} is left: {error}")

    def close(self) -> None:
        """Wait for the last save, and leave no scratch behind on this host; what its tier keeps stays there."""
        self.wait()
        self._worker.close()
        shutil.rmtree(self._staging, ignore_errors=True)
        if self._claim is not None:
            self._claim.close()
        if self._own_process_group is not None:
            dist.destroy_process_group(self._own_process_group)
            self._own_process_group = None

    # ------------------------------------------------------------------ load

    def latest(
        self, tensors: Callable[[], Mapping[str, torch.Tensor]] | None = None, *, may_spoil: bool = False
    ) -> CheckpointInfo | None:
        """The newest committed checkpoint that is as promised; None if there is none.

        `tensors`: makes what will be loaded, called when there is a checkpoint. Only the bytes that these tensors need
        are read and verified then, each once on this host; without it every byte is. `may_spoil`: they are read
        straight into the tensors, in one pass, and `load` has to be given the same ones; without it no tensor is
        touched before `load`. Each checkpoint passed over is a line on stdout. AwsRefusedError or JobFailedError if the
        destination can't be read, InputError if the checkpoint doesn't hold these tensors, SpoiledError if they are no
        longer what they were and no checkpoint is whole.
        """
        self.wait()
        if self._saver.tier is not None:
            info = self._newest_of_tier(self._saver.tier)
            if info is not None:
                return info
        return self._restorer.newest(self._bad_steps, tensors, may_spoil=may_spoil)

    def _newest_of_tier(self, tier: LocalTier) -> CheckpointInfo | None:
        """The hosts' own checkpoint, where it is whole and the destination has no newer one."""
        try:
            newest, attempt = self._group.from_first(self._newest_and_its_start)
            if not self._is_run_named:
                self._name_run(tier)
        except DestinationError as error:
            raise self._restorer.unreachable(error) from None
        self._from_tier = found = tier.newest(newest, attempt=attempt)
        if found is None:
            return None
        step = found.manifest.step
        return CheckpointInfo(
            step=step, uri=str(found.folder), manifest=found.manifest, folder=found.folder, is_fetched=False
        )

    def _name_run(self, tier: LocalTier) -> None:
        """Have the hosts' own disks keep what is of this run alone: a destination that was emptied begins another.

        Its name is there from the first start on, so that a save which no upload outlived is still the run's.
        DestinationError.
        """
        run = self._group.from_first(self._run_at_destination)
        own_host = socket.gethostname() if tier.is_of_another_run(run) else None
        hosts = sorted({host for host in self._group.gather_everywhere(own_host) if host is not None})
        if hosts and self._group.rank == 0:
            more = f" and {counted(len(hosts) - 3, 'more host')}" if len(hosts) > 3 else ""
            self._report(
                f"checkpoint.local_directory: what {tier.root} keeps on {', '.join(hosts[:3])}{more} is of another run"
                f" than {self.uri} has now: it is left out, and removed by the first save"
            )
        tier.name_run(run or self._group.from_first(self._begin_run))
        self._is_run_named = True

    def _run_at_destination(self) -> str | None:
        def read() -> str | None:
            if not self._destination.has(_RUN):
                return None
            return self._destination.get_bytes(_RUN).decode(errors="replace").strip()

        try:
            run: str | None = self._retry("look for its run", read)
        except MissingFileError:
            return None
        return run

    def _begin_run(self) -> str | None:
        """The new run's name; None where it can't be written: then its saves name none."""
        run = secrets.token_hex(8)
        error = attempted(lambda: self._retry("run", lambda: self._destination.put_bytes(_RUN, f"{run}\n".encode())))
        return run if error is None else None

    def _newest_at_destination(self) -> int:
        return self._delivery.newest()

    def _newest_and_its_start(self) -> tuple[int, int | None]:
        step = self._newest_at_destination()
        return step, self._delivery.attempt_of(step) if step else None

    def open_step(self, step: int | None) -> OpenStep | None:
        """That step's checkpoint, or the newest committed one, to read single tensors of; None if there is none."""
        try:
            return self._restorer.open(step)
        except DestinationError as error:
            raise self._restorer.unreachable(error, is_start=False) from None

    def load(
        self,
        info: CheckpointInfo,
        tensors: Mapping[str, torch.Tensor],
        *,
        attachments: Mapping[str, Path] | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint into `tensors`, in place, whatever layout they or it have; the `extra` that was saved.

        `info`: from `latest`, given the same tensors or none. `attachments`: as for `save`, where only the hosts' disks
        have the checkpoint and it is sent now.
        A rank of a world of the same size gets its own `extra` back, otherwise rank 0's. InputError if the checkpoint
        doesn't hold these tensors.
        """
        needs = self._needs(info, tensors) if info.started is None else info.started.needs
        local, self._from_tier = self._from_tier, None
        if local is not None and local.folder == info.folder and self._saver.tier is not None:
            # A host may have an altered table of a shard that it holds whole, or lacks.
            self._saver.tier.bring(local, needs.files | {file + BLOCKS_SUFFIX for file in needs.files})
        self._together(info, lambda: info.fill(needs))
        left = left_moments(needs.index, self._group.gather_everywhere(moment_kinds(tensors)))
        if left is not None and self._group.rank == 0:
            self._report(f"warning: checkpoint {info.uri}: {left}")
        self._restorer.discard(info)
        # Those that training comes to again have yet to fail.
        self.failed_steps = {step for step in self.failed_steps if step <= info.step}
        if local is None or self._is_committed(info.step):
            self.last_committed_step = info.step
        else:
            self._send_later(local, attachments or {})
        extra = info.manifest.extra_of(self._group.rank, self._group.world_size)
        return {key: value for key, value in extra.items() if key != PREVIOUS_STEP}

    def _needs(self, info: CheckpointInfo, tensors: Mapping[str, torch.Tensor]) -> Needs:
        """What these tensors need of it; InputError, on every rank, where it doesn't hold some rank's."""
        index = self._together(info, lambda: _index_of(info))
        tensors = without_unsaved(index, tensors)
        said = self._group.gather_everywhere((mismatch(index, tensors), weights_asked_for(index, tensors)))
        problem = next((found for found, _ in said if found is not None), None)
        problem = problem or left_weights(index, [asked for _, asked in said])
        if problem is not None:
            raise InputError(f"checkpoint {info.uri}: {problem}")
        return Needs(index, tensors)

    def _together(self, info: CheckpointInfo, read: Callable[[], Value]) -> Value:
        """What `read` gives on this rank; JobFailedError or AwsRefusedError on all of them where one can't read.

        InputError where a newer trainer wrote it.
        """
        failure: Exception | None = None
        found: list[Value] = []
        try:
            found.append(read())
        except InputError as error:
            failure = error
        except DestinationError as error:
            failure = self._restorer.unreachable(error)
        except (OSError, AlteredError, MissingFileError) as error:  # it was whole a moment ago
            said = getattr(error, "strerror", None) or error
            failure = JobFailedError(f"checkpoint {info.uri}: can't be read: {said}")
        failures = [one for one in self._group.gather_everywhere(failure) if one is not None]
        if failures:
            raise failures[0]
        return found[0]

    def _is_committed(self, step: int) -> bool:
        """Whether the destination has it; False if it can't be asked: who sends it then asks again."""
        try:
            return self._group.from_first(self._newest_at_destination) == step
        except DestinationError:
            return False

    def _send_later(self, local: LocalCheckpoint, attachments: Mapping[str, Path]) -> None:
        """Bring to the destination what only the hosts' disks have: the save that a crash cut short, ended behind."""
        manifest = local.manifest
        mine = [file for file in manifest.files if min(local.holders[file.name]) == self._group.rank]
        files: list[Attachment] = []
        error = attempted(lambda: files.extend(self._copied(attachments)))
        if error is not None:
            self._report(f"checkpoint step={manifest.step} is sent without its metrics: {error}")
        save = Save(manifest.step, SavePlan([]), manifest.extra, files, time.perf_counter(), files=mine)
        index: list[bytes] = []

        def send(save: Save) -> str | None:
            if self._behind.from_first(self._newest_at_destination) == save.step:
                return None  # it could not be asked when this was loaded: clearing what is good there would be no help
            read = partial(attempted, lambda: index.append((local.folder / INDEX).read_bytes()))
            error = self._behind.from_first(read)  # who commits it
            return error or self._saver.send(save, Promise(manifest, local.content, b"".join(index)))

        self._start_behind(save, send)

    def _copied(self, attachments: Mapping[str, Path]) -> list[Attachment]:
        """Copies, until the save ends: a start cuts its metrics back to the checkpoint while they are sent."""
        files = []
        self._saver.expect(attachments)
        for name, path, size in _with_sizes(attachments):
            if not self._delivery.is_there(name, path):
                copy = self._copies.enter_context(beginning(path, size, self._staging / f"sent-later-{name}"))
                files.append((name, copy, size))
        return files

    # ------------------------------------------------------------------ single files

    def publish_first(self, name: str, path: Path) -> None:
        """`publish_file`, as a start's first word to the destination.

        InputError or AwsRefusedError where that refuses checkpoints too, which only a person can mend: the job would
        train on and never save. What is full may get room, and what isn't reached may come back: those cost a line, and
        so does a file that is refused alone.
        """
        refusals: list[DestinationError] = []
        self.publish_file(name, path, refusals)
        # A folder's file beside them says nothing of theirs: they may be a link to another disk.
        is_asked = bool(refusals) or self._destination.folder("") is not None
        if is_asked and (error := self._refuses_checkpoints()) is not None:
            what = f"{error}; no checkpoint could be saved: mend the access or set checkpoint.destination"
            raise AwsRefusedError(what) if self._destination.folder("") is None else InputError(what)

    def _refuses_checkpoints(self) -> DestinationError | None:
        """Why the destination lets nobody write where checkpoints go; None: it does, or may later."""
        try:
            self._destination.put_bytes(_PROBE, b"")
        except DestinationError as error:
            return error if error.is_refusal else None
        except MissingFileError as error:  # a file system in which nothing can be made says so
            return DestinationError(str(error), permanent=True)
        attempted(lambda: self._destination.delete([_PROBE]))
        return None

    def publish_file(self, name: str, path: Path, refusals: list[DestinationError] | None = None) -> bool:
        """Copy a file to `<destination>/<name>` (call it on one rank); False, with a line on stdout, if that fails.

        `refusals` gets the error where the destination refused it.
        """

        def upload() -> None:
            try:
                self._delivery.upload(name, path)
            except DestinationError as error:
                if refusals is not None and error.is_refusal:
                    refusals.append(error)
                raise

        self._saver.sweep([name])
        error = attempted(upload)
        if error is not None:
            self._report(f"checkpoint {name} not uploaded: {error}")
        return error is None

    def is_place_of(self, name: str, path: Path) -> bool:
        """Whether `path` is where the destination has, or would have, its file of that name."""
        place = self._destination.folder(name)
        if place is None or place.name != path.name or not (place.parent.is_dir() and path.parent.is_dir()):
            return False
        return place.parent.samefile(path.parent)

    def read_file(self, name: str) -> bytes | None:
        """What `<destination>/<name>`, a small file, holds (call it on one rank); None if there is none.

        AwsRefusedError or JobFailedError if the destination can't be read.
        """
        found: list[bytes] = []
        is_there = self._take(name, lambda: found.append(self._destination.get_bytes(name)))
        return found[-1] if is_there else None

    def fetch_file(self, name: str, path: Path) -> bool:
        """Copy `<destination>/<name>` to `path` (call it on one rank); False if there is none.

        AwsRefusedError or JobFailedError if the destination can't be read.
        """
        return self._take(name, lambda: self._destination.get_file(name, path))

    def _take(self, name: str, take: Callable[[], None]) -> bool:
        try:
            if not self._retry(f"look for {name}", lambda: self._destination.has(name)):
                return False
            self._retry(f"download of {name}", take)
        except MissingFileError:
            return False
        except DestinationError as error:
            raise self._restorer.unreachable(error) from None
        return True


def _index_of(info: CheckpointInfo) -> Metadata:
    """Where the checkpoint's tensors lie: out of the host's own copy, where all of it was verified there."""
    reader = info.reader
    is_here = reader is None or (info.is_fetched and not reader.knows_index and (info.folder / INDEX).is_file())
    if reader is not None and not is_here:
        return reader.index
    try:
        return parse_index((info.folder / INDEX).read_bytes())
    except ManifestError as error:
        raise AlteredError(str(error)) from None


def _with_sizes(attachments: Mapping[str, Path]) -> list[Attachment]:
    """Those that are there. OSError."""
    return [(name, path, path.stat().st_size) for name, path in attachments.items() if path.is_file()]


def _ranks_a_host() -> int:
    """Ranks of one host share its disk; a shared folder is shared by all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _make_folder(folder: Path) -> None:
    """InputError where no folder is, and none can be; a disk that is full, or doesn't answer, may yet take one."""
    try:
        with os_errors(f"make {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
    except (DestinationError, MissingFileError) as error:
        if isinstance(error, DestinationError) and not error.is_refusal:
            return
        link, cause = broken_link(folder), error.__cause__
        why = "it is no folder" if isinstance(cause, FileExistsError) else getattr(cause, "strerror", None) or cause
        why = why if link is None else f"{link} {LEADS_NOWHERE}"
        raise InputError(f"checkpoint.destination {folder}: can't be made: {why}; name another folder") from None


def _can_be_in(folder: Path) -> bool:
    """Whether a step's folder may lie there: of one that can't be made the nearest disk's room says nothing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.errno in FULL
    return True


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that `folder` lies on, or would. OSError."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
