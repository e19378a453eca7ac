"""Which blocks of shard files somebody needs, divided among the ranks of a host, and the requests that bring them."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainer.checkpoint.blocks import BlockTable

LARGEST_RANGE_BYTES = 16 << 20
"""Of one request: S3's own advice is 8 to 16 MB a request."""
_SMALLEST_RANGE_BYTES = 2 << 20
_NUM_RANGES = 12
"""What a disk reads at the least, some three a reader: while one is hashed, others are read."""
_GAP_SHARE = 0.05
"""What may be read without need, so that what lies close together is one request: a share of the bytes needed."""

Run = tuple[int, int]
"""Blocks of a file, (first, the one after the last)."""
Extents = dict[str, list[Run]]
"""Shard file -> runs of blocks, in order and apart."""
Tables = Callable[[str], BlockTable]
"""The blocks of a shard file."""


@dataclass(frozen=True)
class Range:
    """Bytes [start, end) of a shard file, with the blocks that lie in them."""

    file: str
    start: int
    end: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """What one rank of a host reads, and what it takes from the others."""

    alone: Extents
    """Nobody else on the host needs it."""
    shared: Extents
    """It reads these for the others too."""
    borrowed: Extents
    """It needs these, and another one reads them."""


def divided(needs: Sequence[Extents]) -> list[Share]:
    """Each block that any rank of a host needs is read by one of those that need it; by the rank's place on the host.

    Blocks that the same ranks need are cut into one run a rank, so that all read at once and each in a row.
    """
    found = [Share({}, {}, {}) for _ in needs]
    for file in sorted(set().union(*needs)):
        for turn, (first, end, ranks) in enumerate(_by_ranks([one.get(file, []) for one in needs])):
            if len(ranks) == 1:
                _append(found[ranks[0]].alone, file, first, end)
                continue
            # Whose turn it is goes round: of a run of one block only one gets something to read.
            turns = ranks[turn % len(ranks) :] + ranks[: turn % len(ranks)]
            cuts = [first + (end - first) * number // len(ranks) for number in range(len(ranks) + 1)]
            for rank, (begin, stop) in zip(turns, pairwise(cuts), strict=True):
                _append(found[rank].shared, file, begin, stop)
                for other in ranks:
                    if other != rank:
                        _append(found[other].borrowed, file, begin, stop)
    return found


def _by_ranks(runs: Sequence[Sequence[Run]]) -> Iterator[tuple[int, int, list[int]]]:
    """(first, the one after the last, who needs them) of every run of blocks that the same ranks need, in order."""
    changes: dict[int, list[int]] = {}
    for rank, mine in enumerate(runs):
        for first, end in mine:
            changes.setdefault(first, []).append(rank)
            changes.setdefault(end, []).append(rank)
    ranks: set[int] = set()
    for first, end in pairwise(sorted(changes)):
        for rank in changes[first]:
            ranks ^= {rank}
        if ranks:
            yield first, end, sorted(ranks)


def _append(extents: Extents, file: str, first: int, end: int) -> None:
    if first == end:
        return
    runs = extents.setdefault(file, [])
    if runs and runs[-1][1] == first:
        first = runs.pop()[0]
    runs.append((first, end))


def union(extents: Iterable[Extents]) -> Extents:
    """The blocks that are in any of several."""
    by_file: dict[str, list[Run]] = {}
    for one in extents:
        for file, runs in one.items():
            by_file.setdefault(file, []).extend(runs)
    return {file: list(_merged(sorted(runs))) for file, runs in sorted(by_file.items())}


def _merged(runs: Sequence[Run]) -> Iterator[Run]:
    first, end = runs[0]
    for start, stop in runs[1:]:
        if start > end:
            yield first, end
            first, end = start, stop
        else:
            end = max(end, stop)
    yield first, end


def ranges_of(extents: Extents, tables: Tables, *, of_disk: bool = False) -> list[Range]:
    """What to request so that these blocks are there: few requests, and hardly a byte too many.

    `of_disk`: there, unlike over a network, smaller ones cost little, so that no reader waits for another's last.

    Blocks that lie apart become one request where what is between them is little: in all at most a twentieth of the
    bytes needed, the narrowest gaps first.
    """
    places = {
        file: [(block, *place(block)) for first, end in runs for block in range(first, end)]
        for file, runs, place in ((file, runs, tables(file).place) for file, runs in extents.items())
    }
    num_bytes = sum(end - start for blocks in places.values() for _, start, end in blocks)
    budget = _GAP_SHARE * num_bytes
    gaps = sorted(
        (later[1] - earlier[2], file, later[0])
        for file, blocks in places.items()
        for earlier, later in pairwise(blocks)
        if later[1] > earlier[2]
    )
    bridged = set()
    for gap, file, block in gaps:
        budget -= gap
        if budget < 0:
            break
        bridged.add((file, block))
    most = LARGEST_RANGE_BYTES
    if of_disk:
        most = min(LARGEST_RANGE_BYTES, max(_SMALLEST_RANGE_BYTES, num_bytes // _NUM_RANGES))
    return [one for file, blocks in places.items() for one in _split(file, blocks, bridged, most)]


def _split(
    file: str, blocks: Sequence[tuple[int, int, int]], bridged: Collection[tuple[str, int]], most: int
) -> Iterator[Range]:
    """`blocks`: (number, first byte, the one after the last); `bridged`: those read together with the one before.

    `most`: bytes of a range of more than one block.
    """
    numbers: list[int] = []
    begin = finish = 0
    for block, start, end in blocks:
        apart = start > finish and (file, block) not in bridged
        if numbers and (apart or end - begin > most):
            yield Range(file, begin, finish, tuple(numbers))
            numbers = []
        if not numbers:
            begin = start
        numbers.append(block)
        finish = end
    if numbers:
        yield Range(file, begin, finish, tuple(numbers))
