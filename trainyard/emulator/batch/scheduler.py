"""Whose turn it is in one queue, and who must go for it. Pure: the same questions always get the same answer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Share:
    """A quota share: instances of the queue's one type."""

    guaranteed: int
    borrow_percent: int = 0
    """On top of what is guaranteed; -1: without limit; 0: it doesn't borrow."""
    lends: bool = True

    @property
    def most(self) -> int | None:
        """Instances that it may hold with borrowed ones; None: no limit."""
        return None if self.borrow_percent < 0 else self.guaranteed + self.guaranteed * self.borrow_percent // 100


@dataclass(frozen=True)
class Held:
    """A job that holds instances."""

    job_id: str
    share: str
    count: int
    order: int
    """When it started: the youngest has the highest."""
    stopping: bool = False
    """It was told to stop, and holds them until it has saved."""


@dataclass(frozen=True)
class Wanted:
    """A job that waits; in the order of their submission."""

    job_id: str
    share: str
    count: int


@dataclass(frozen=True)
class Turn:
    """What to do now."""

    start: tuple[str, ...] = ()
    preempt: tuple[str, ...] = ()


@dataclass
class _Queue:
    capacity: int
    shares: Mapping[str, Share]
    held: list[Held]
    used: dict[str, int]
    claimed: int = 0
    """Instances that are on their way back to a share."""
    start: list[str] = field(default_factory=list)
    preempt: list[str] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.capacity - sum(self.used.values())

    def take(self, job: Wanted) -> None:
        self.used[job.share] += job.count
        self.start.append(job.job_id)


def turn(capacity: int, shares: Mapping[str, Share], held: Iterable[Held], waiting: Sequence[Wanted]) -> Turn:
    """Which waiting jobs start and which running ones stop, where `capacity` instances are there in all.

    Within a share the first come is the first served: none is passed by a smaller one. What a share is guaranteed it
    gets, and takes it from borrowers if it must; what is idle after that is borrowed, first come first served too.
    """
    queue = _Queue(capacity, shares, list(held), dict.fromkeys(shares, 0))
    for job in queue.held:
        queue.used[job.share] = queue.used.get(job.share, 0) + job.count
    # Jobs of a share that was deleted, or that could never start, are in nobody's way.
    waiting = [job for job in waiting if job.share in shares]
    left = _give_their_own(queue, waiting)
    _lend(queue, left)
    return Turn(tuple(queue.start), tuple(queue.preempt))


def _give_their_own(queue: _Queue, waiting: Sequence[Wanted]) -> list[Wanted]:
    left, behind = [], set()
    for job in waiting:
        own = queue.used[job.share] + job.count <= queue.shares[job.share].guaranteed
        if job.share in behind or not own:
            behind.add(job.share)
            left.append(job)
        elif job.count <= queue.free - queue.claimed:
            queue.take(job)
        else:
            behind.add(job.share)
            _reclaim(queue, job)
    return left


def _reclaim(queue: _Queue, job: Wanted) -> None:
    """Claim instances for a job that is entitled to them, and stop as many borrowers as that takes."""
    queue.claimed += job.count
    leaving = sum(item.count for item in queue.held if item.stopping or item.job_id in queue.preempt)
    missing = queue.claimed - queue.free - leaving
    for victim in sorted(queue.held, key=lambda item: -item.order):
        if missing <= 0:
            return
        if victim.stopping or victim.job_id in queue.preempt or victim.share == job.share:
            continue
        staying = sum(
            item.count
            for item in queue.held
            if item.share == victim.share and not item.stopping and item.job_id not in queue.preempt
        )
        if victim.share not in queue.shares or staying > queue.shares[victim.share].guaranteed:
            queue.preempt.append(victim.job_id)
            missing -= victim.count


def _lend(queue: _Queue, waiting: Sequence[Wanted]) -> None:
    """What nobody has a right to now, to those that may borrow."""
    behind = set()
    for job in waiting:
        share = queue.shares[job.share]
        wanted = queue.used[job.share] + job.count
        # What others keep for themselves is not idle. The borrower's own part is there for it in any case.
        kept = sum(
            max(0, other.guaranteed - queue.used[name])
            for name, other in queue.shares.items()
            if not other.lends and name != job.share
        )
        fits = share.most is None or wanted <= share.most
        if job.share not in behind and fits and job.count <= queue.free - queue.claimed - kept:
            queue.take(job)
        else:
            behind.add(job.share)
