"""Which ranks are slow: every rank's own time a step, compared among ranks that do the same work."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FACTOR = 1.25
"""So much slower than its peers' median is a straggler: healthy GPUs of one kind differ by a few percent."""
LEAST_SECONDS = 0.01
"""And by so much more a step: below it, differences are the operating system's."""
LEAST_STEPS = 10
"""Of fewer steps, as are left at a job's end, the median is that of chance; a job that is observed more often asks for
it."""


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for."""

    rank: int
    host: str
    own_seconds: float
    """Its median time a step without waiting for others."""
    peers_seconds: float
    """The median of the same over its peers."""

    def as_line(self, step: int) -> str:
        """One line for the log."""
        return (
            f"straggler step={step} rank={self.rank} host={self.host} own_seconds={self.own_seconds:.4f}"
            f" peers_seconds={self.peers_seconds:.4f} ratio={self.own_seconds / self.peers_seconds:.2f}"
        )


def find_stragglers(
    own_seconds: Sequence[float], hosts: Sequence[str], groups: Sequence[int], *, factor: float = FACTOR
) -> list[Straggler]:
    """The slow ones, by rank. `groups[r]`: ranks with the same number do the same work (a pipeline's stage)."""
    members: Mapping[int, list[int]] = {group: [] for group in groups}
    for rank, group in enumerate(groups):
        members[group].append(rank)
    found = []
    for rank, (seconds, group) in enumerate(zip(own_seconds, groups, strict=True)):
        peers = [own_seconds[peer] for peer in members[group] if peer != rank]
        # The peers' median without the rank itself: of two ranks, the slow one must not hide in its own median.
        usual = statistics.median(peers) if peers else seconds
        if seconds > factor * usual and seconds - usual > LEAST_SECONDS:
            found.append(Straggler(rank, hosts[rank], seconds, usual))
    return found
