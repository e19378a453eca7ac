"""A fault campaign: jobs of every engine, disturbed at random moments, compared bit for bit with undisturbed ones.

    scripts/fault_campaign --seeds 40 --json results.json

Every seed is an episode: one job of one engine at one site, to which a hand of faults happens, one after the other.
Engine, site and faults are those that were played least; with --json, over all campaigns of that file, which it adds
to. On most episodes processes start as forks of one that has imported everything (`trainer_testing.warm`): their times
to the next step are not counted. Those of --real-starts, every eighth, and all at the desk start as a user's do.
--again plays a seed's faults once more (at other instants), --hand the ones that are named: to find what went wrong.

What must hold of each episode:
- the job is done in the end, however often it had to be started, and within bounds after every fault;
- every start goes on from the newest checkpoint that was told of and was not spoiled since; a rank that was told to
  stop costs one step at most, unless a fault that ends ranks met the same start;
- every step is in metrics.jsonl once, with exactly the loss, gradient norm and tokens of the undisturbed job;
- every step was made of exactly the samples of the undisturbed job's;
- from the first commit on there is a good checkpoint whenever one is looked for (`Guard`);
- no process, partial file, staging copy or multipart upload is left.

The exit code is 0 when all of it held.
"""

import argparse
import contextlib
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / room) for room in ("trainer", "launch")]

from cloud import Cloud
from evidence import Guard, Story, damage, read_jsonl, samples
from kinds import SITES, Deck, Fault, num_steps, parsed
from network import network, why_not
from sites import HostsSite, Site, environment_of
from trainer_testing import warm
from trainer_testing.pool import start_pooled
from trainer_testing.text_job import bits, rows_of, write_job

from trainyard.spec.words import counted

ENGINES = ("ddp", "zero3", "fsdp", "pipeline")
FAULTS_PER_EPISODE = 8
CHECKPOINT_EVERY = 3
GUARD_SECONDS, GUARD_SECONDS_S3 = 0.5, 3.0
"""Between two looks for a good checkpoint."""
REAL_STARTS_EVERY = 8
_EPISODE_SECONDS = 1200.0
_CHECKOUT = Path(__file__).resolve().parents[2]
_MOST_STARTS = 40
_LARGER = ["model.config.hidden_size=256", "model.config.intermediate_size=512"]
"""For S3: shards of several parts."""


@dataclass
class Row:
    """One fault, and what came of it."""

    seed: int
    engine: str
    site: str
    kind: str
    """Of `kinds`, with its moment."""
    happened: bool = False
    """The job met it: a checkpoint was really spoiled, a request really refused."""
    recovered: bool = False
    is_forked: bool = False
    """The job's processes were forks: the seconds below are without their start-up."""
    steps_lost: int | None = None
    """Finished steps that had to be made again; None: nothing was started again."""
    seconds_to_next_step: float | None = None


@dataclass
class Episode:
    """One seed."""

    rows: list[Row]
    num_starts: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    """What did not hold; empty: all of it."""
    said: list[str] = field(default_factory=list)
    """The end of what the job said, where something did not hold."""
    restarts: list[dict[str, Any]] = field(default_factory=list)
    """Rows of recovery.jsonl, of a job without forks: what the seconds to the next step were made of."""
    goodput: dict[str, Any] | None = None
    """As `trainyard status --json` tells it, of a job that has a record (at the desk)."""
    again: int | None = None
    """The seed whose faults were played once more."""
    commit: str = ""
    """Of the code that was disturbed."""
    machine: str = ""


@dataclass
class Report:
    """A campaign."""

    episodes: list[Episode] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What this machine can't show, and why."""

    @property
    def rows(self) -> list[Row]:
        """The faults that happened."""
        return [row for episode in self.episodes for row in episode.rows if row.happened]

    @property
    def rows_of_last_plays(self) -> list[Row]:
        """The same, without those of jobs whose faults were played once more: the new play counts for the old one."""
        replaced = {episode.again for episode in self.episodes}
        return [row for row in self.rows if row.seed not in replaced]

    @property
    def is_good(self) -> bool:
        """Every fault was recovered from, and nothing else went wrong."""
        return bool(self.rows) and not any(episode.problems for episode in self.episodes)

    def _parts(self) -> list[str]:
        """What restarts in place took of the clock, by part: median and longest, of starts without forks."""
        rows = [row for episode in self.episodes for row in episode.restarts if "load_seconds" in row]
        lines = [f"{counted(len(rows), 'restart')} in place, part by part:"] if rows else []
        for part in (*PARTS, "to_next"):
            name = "seconds_to_next_step" if part == "to_next" else f"{part}_seconds"
            seconds = [row[name] for row in rows if name in row]
            if seconds:
                lines.append(f"  {name:<24}{median(seconds):>8.2f} (<= {max(seconds):.2f})")
        return lines

    def _goodput(self) -> list[str]:
        """Where the jobs' time went, as shares of all of it."""
        told = [episode.goodput for episode in self.episodes if episode.goodput]
        if not told:
            return []
        wall = sum(one["wall_seconds"] for one in told)
        parts = {"kept steps": sum(one["useful_seconds"] for one in told)}
        parts |= {name: sum(one["elsewhere"][name] for one in told) for name in told[0]["elsewhere"]}
        words = ", ".join(f"{name.replace('_', ' ')} {100 * seconds / wall:.1f}%" for name, seconds in parts.items())
        return [f"goodput of {len(told)} jobs at the desk, {wall:.0f} s: {words}"]

    @classmethod
    def read(cls, path: Path) -> "Report":
        """The campaigns of a file; none where there is no such file."""
        if not path.exists():
            return cls()
        content = json.loads(path.read_text(encoding="utf-8"))
        episodes = [Episode(**{**job, "rows": [Row(**row) for row in job["rows"]]}) for job in content["jobs"]]
        return cls(episodes, content["left_out"])

    def write(self, path: Path) -> None:
        """Every job with its faults, and what came of them."""
        content = {"left_out": self.left_out, "jobs": [asdict(episode) for episode in self.episodes]}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def add_to(self, path: Path) -> None:
        """Its newest episode, to a file that another campaign may add to at the same time."""
        folder = os.open(path.absolute().parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            told = Report.read(path)
            told.episodes.append(self.episodes[-1])
            told.left_out += [words for words in self.left_out if words not in told.left_out]
            told.write(path)
        finally:
            os.close(folder)

    def table(self) -> str:
        """For people: a line a kind, then one an engine, one a site, then what did not hold."""
        lines = [f"{'fault':<28}{'faults':>7}{'recovered':>11}{'steps lost':>12}{'seconds to next step':>24}"]
        keys = (("", lambda row: row.kind), ("engine ", lambda row: row.engine), ("site ", lambda row: row.site))
        for title, key in keys:
            for name in sorted({key(row) for row in self.rows}):
                lines.append(_summary(title + name, [row for row in self.rows if key(row) == name]))
        lines.append(_summary("all", self.rows))
        if any(episode.again is not None for episode in self.episodes):
            lines.append(_summary("all, by the last play", self.rows_of_last_plays))
        lines += [f"left out: {words}" for words in self.left_out]
        lines += [*self._parts(), *self._goodput()]
        unmet = [row for episode in self.episodes for row in episode.rows if not row.happened]
        lines += [f"did not happen: {row.kind} (seed {row.seed})" for row in unmet]
        for episode in self.episodes:
            first = episode.rows[0]
            lines += [
                f"PROBLEM seed {first.seed}, {first.engine}, {first.site}: {problem}" for problem in episode.problems
            ]
            if episode.again is not None:
                num_met = sum(row.happened for row in episode.rows)
                num_good = sum(row.recovered for row in episode.rows)
                lines.append(f"seed {episode.again} again, as seed {first.seed}: {num_good} of {num_met} recovered")
        return "\n".join(lines)


PARTS = ("detection", "stop", "backoff", "schedule", "process", "rendezvous", "build", "load", "first_step")


def _summary(name: str, rows: Sequence[Row]) -> str:
    lost = [row.steps_lost for row in rows if row.steps_lost is not None]
    waits = [row.seconds_to_next_step for row in rows if row.seconds_to_next_step is not None and not row.is_forked]
    steps = f"{median(lost):g} (<= {max(lost)})" if lost else "-"
    seconds = f"{median(waits):.1f} (<= {max(waits):.1f})" if waits else "-"
    return f"{name:<28}{len(rows):>7}{sum(row.recovered for row in rows):>11}{steps:>12}{seconds:>24}"


class Campaign:
    """Episodes one after the other, in a folder of their own."""

    def __init__(
        self,
        root: Path,
        *,
        sites: Sequence[str] = SITES,
        recover: bool = True,
        faults: int,
        earlier: Report | None = None,
        real_starts_every: int = REAL_STARTS_EVERY,
    ) -> None:
        """`recover`: whether jobs may start their ranks again; without, a campaign has to fail.

        `earlier`: campaigns that this one adds to. `real_starts_every`: of so many episodes one is without forks.
        """
        self._root = root
        self._real_starts_every = real_starts_every
        self._recover = recover
        self._num_faults = faults
        self._undisturbed: dict[tuple[str, bool, int], tuple[list[Any], dict[int, list[str]]]] = {}
        self._cloud: Cloud | None = None
        self._slurm: Any = None
        self._hosts: warm.HostServer | None = None
        self.report = Report(list(earlier.episodes) if earlier else [])
        self._parted = why_not() if "two_hosts" in sites else ""
        if self._parted:
            self.report.left_out.append(f"partition: {self._parted}")
        self._sites = tuple(sites)
        if "slurm" in sites and (why := _why_no_slurm()):
            self.report.left_out.append(f"slurm: {why}")
            self._sites = tuple(site for site in sites if site != "slurm")
        self._has_disks = os.geteuid() == 0
        if not self._has_disks:
            self.report.left_out.append("disk_full, kill_host_disk_full: a file system of its own needs root")
        left_out = {"partition"} if self._parted else set()
        self._deck = Deck(
            self._sites, left_out=left_out | (set() if self._has_disks else {"disk_full", "kill_host_disk_full"})
        )
        for row in self.report.rows:
            if row.recovered:
                self._deck.note(row.kind, row.engine)

    @property
    def has_sites(self) -> bool:
        """Whether this machine has a site to play at."""
        return bool(self._sites)

    def run(self, seed: int, engines: Sequence[str] = ENGINES, *, named: Sequence[str] = ()) -> Episode:
        """The episode of that seed; `named`: with these faults, in this order."""
        draw = random.Random(seed)
        engine, site_name = self._deck.place(engines, self._num_faults)
        if named:
            hand = self._deck.named(draw, named, engine=engine)
        else:
            hand = self._deck.deal(draw, engine=engine, site=site_name, number=self._num_faults)
        return self._played(seed, engine, site_name, hand, draw)

    def run_again(self, seed: int, told: Episode) -> Episode:
        """The faults of an episode once more, at the same site, under a seed of their own."""
        draw = random.Random(seed)
        first = told.rows[0]
        hand = self._deck.named(draw, [row.kind for row in told.rows], engine=first.engine)
        episode = self._played(seed, first.engine, first.site, hand, draw)
        episode.again = first.seed
        return episode

    def _played(self, seed: int, engine: str, site_name: str, hand: Sequence[Fault], draw: random.Random) -> Episode:
        is_forked = site_name != "desk" and bool(seed % self._real_starts_every)
        started = time.monotonic()
        rows = [Row(seed, engine, site_name, fault.name, is_forked=is_forked) for fault in hand]
        episode = Episode(rows, commit=_commit(), machine=_machine())
        self.report.episodes.append(episode)
        folder = self._root / f"episode-{seed}"
        with self._site(folder, engine, site_name, seed, len(hand), is_forked=is_forked) as site:
            _Play(site, hand, episode, draw, recover=self._recover).run()
            _judge(site, hand, episode, lambda: self._expected(engine, len(hand), is_large=site_name == "cloud"))
            if episode.problems:
                episode.said = [self._shortened(line) for line in site.lines[-60:]]
                episode.problems = [self._shortened(problem) for problem in episode.problems]
            episode.goodput = site.goodput()
            if not is_forked:
                found = [row for path in folder.rglob("recovery.jsonl") for row in read_jsonl(path)]
                # The same row lies beside the checkpoints too.
                restarts = list({json.dumps(row): row for row in found}.values())
                episode.restarts = [
                    {name: self._shortened(value) if isinstance(value, str) else value for name, value in row.items()}
                    for row in restarts
                ]
        episode.seconds = time.monotonic() - started
        return episode

    def _shortened(self, words: str) -> str:
        """Without the folders of this machine: results are read elsewhere."""
        for folder, name in ((_CHECKOUT, "."), (self._root, "scratch"), (Path(tempfile.gettempdir()), "scratch")):
            words = words.replace(f"{folder}/", f"{name}/")
        return words

    def _expected(self, engine: str, num_faults: int, *, is_large: bool) -> tuple[list[Any], dict[int, list[str]]]:
        """Rows and samples of the job to which nothing happens."""
        key = (engine, is_large, num_faults)
        if key not in self._undisturbed:
            folder = self._root / f"undisturbed-{engine}-{num_faults}{'-large' if is_large else ''}"
            job = self._job(engine, num_faults)
            faults = folder / "faults"
            faults.mkdir(parents=True)
            (faults / "faults.json").write_text("[]")
            overrides = [f"checkpoint.every_steps={CHECKPOINT_EVERY}", *(_LARGER if is_large else ())]
            arguments = [part for override in overrides for part in ("--set", override)]
            with _environment(environment_of(faults)):
                ranks = start_pooled(
                    2,
                    "trainer_testing.faulty_trainer",
                    *("--job", str(job), "--output-dir", str(folder / "out"), *arguments),
                )
            said = [rank.communicate(timeout=600)[0] for rank in ranks]
            assert [rank.returncode for rank in ranks] == [0, 0], said[0][-3000:]
            self._undisturbed[key] = bits(rows_of(folder / "out")), samples(faults)
        return self._undisturbed[key]

    def _job(self, engine: str, num_faults: int) -> Path:
        return write_job(self._root / f"job-{engine}-{num_faults}", engine, steps=num_steps(num_faults))

    @contextlib.contextmanager
    def _site(
        self, folder: Path, engine: str, name: str, seed: int, num_faults: int, *, is_forked: bool
    ) -> Iterator[Site]:
        (folder / "faults").mkdir(parents=True)
        overrides = [
            f"checkpoint.every_steps={CHECKPOINT_EVERY}",
            "recovery.hang_seconds=6",
            "recovery.backoff_seconds=0",
            f"recovery.max_restarts={1000 if self._recover else 0}",
        ]
        job = self._job(engine, num_faults)
        with contextlib.ExitStack() as stack:
            site: Site
            if name == "cloud":
                from cloud import CloudSite

                self._cloud = self._cloud or Cloud(self._root / "cloud")
                variables = {warm.VARIABLE: warm.modules_for(engine)} if is_forked else {}
                site = CloudSite(
                    self._cloud, folder, job, [*overrides, *_LARGER], num_hosts=1 + seed % 2, variables=variables
                )
            elif name == "desk":
                from desk import DeskSite

                site = DeskSite(folder, job, overrides, disk=self._has_disks)
            elif name == "slurm":
                from slurm import Slurm, SlurmSite

                self._slurm = self._slurm or Slurm()
                variables = {warm.VARIABLE: warm.modules_for(engine)} if is_forked else {}
                site = SlurmSite(
                    self._slurm,
                    folder,
                    job,
                    overrides,
                    recover=self._recover,
                    disk=self._has_disks,
                    variables=variables,
                )
            else:
                num_hosts = 2 if name == "two_hosts" else 1
                wires = None
                if num_hosts == 2 and not self._parted:
                    wires = stack.enter_context(network(f"{os.getpid() % 10_000}-{seed}", ["algo-1", "algo-2"]))
                site = HostsSite(
                    folder,
                    job,
                    overrides,
                    num_hosts=num_hosts,
                    network=wires,
                    disk=self._has_disks,
                    server=self._host_server() if is_forked else None,
                )
            stack.callback(site.close)
            yield site

    def _host_server(self) -> warm.HostServer:
        if self._hosts is None:
            modules = ",".join(dict.fromkeys((*warm.MODULES, *warm.ENGINE_MODULES.values())))
            with _environment(environment_of(self._root)):
                self._hosts = warm.HostServer(modules)
        return self._hosts

    def close(self) -> None:
        """End what episodes share."""
        if self._hosts is not None:
            self._hosts.close()
        if self._cloud is not None:
            self._cloud.close()
        if self._slurm is not None:
            self._slurm.close()


def _why_no_slurm() -> str:
    from slurm import why_no_slurm

    return why_no_slurm()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Play:
    """One job from its first start to its last, with what happens to it."""

    def __init__(self, site: Site, hand: Sequence[Fault], episode: Episode, draw: random.Random, *, recover: bool):
        self._site = site
        self._hand = hand
        self._episode = episode
        self._draw = draw
        self._recover = recover
        self._folder = site.root / "faults"
        self._acting: list[threading.Thread] = []
        self._begun: set[int] = set()
        self._begun_before: set[int] = set()
        """Those that had begun when the job was last started."""

    def run(self) -> None:
        """Returns when the job is done, or won't be."""
        orders = [fault.order for fault in self._hand]
        (self._folder / "faults.json").write_text(json.dumps(orders))
        guard = Guard(self._site, pause_seconds=GUARD_SECONDS if self._site.s3 is None else GUARD_SECONDS_S3)
        try:
            self._run_to_the_end()
        finally:
            for thread in self._acting:
                thread.join(timeout=120)
            guard.close()
        self._episode.problems += guard.problems

    def _run_to_the_end(self) -> None:
        deadline = time.monotonic() + _EPISODE_SECONDS
        while self._episode.num_starts < _MOST_STARTS:
            self._begun_before = set(self._begun)
            self._site.start()
            self._episode.num_starts += 1
            while (outcome := self._site.outcome()) is None:
                self._look_for_faults()
                if time.monotonic() > deadline:
                    self._episode.problems.append(f"not done after {_EPISODE_SECONDS:.0f} s")
                    return
                time.sleep(0.02)
            for thread in self._acting:
                thread.join(timeout=120)
            if outcome == "done":
                return
            if not self._recover or not self._was_to_end():
                self._episode.problems.append(f"the job ended: {outcome}")
                return
        self._episode.problems.append(f"not done after {_MOST_STARTS} starts")

    def _was_to_end(self) -> bool:
        """Whether a fault of this start is one that a host, or a person, answers by starting the job again."""
        kinds = [self._hand[number].kind for number in self._begun - self._begun_before]
        return any(
            kind.effect == "stops" or (kind.is_outside and kind.effect == "restarts" and not kind.is_damage)
            for kind in kinds
        )

    def _look_for_faults(self) -> None:
        for number, fault in enumerate(self._hand):
            if number in self._begun or not (self._folder / f"done-{number}").exists():
                continue
            self._begun.add(number)
            if fault.kind.is_outside:
                thread = threading.Thread(target=self._act, args=(number, fault), daemon=True)
                thread.start()
                self._acting.append(thread)

    def _act(self, number: int, fault: Fault) -> None:
        try:
            row = self._episode.rows[number]
            if fault.kind.is_damage:
                row.happened = damage(
                    fault.kind.name,
                    self._site.destination,
                    self._site.s3,
                    self._draw,
                    self._folder / "events.jsonl",
                )
            else:
                row.happened = self._site.act(fault.kind.name, self._draw)
        except Exception as error:
            self._episode.problems.append(f"{fault.name} could not be done: {type(error).__name__}: {error}")
        finally:
            (self._folder / f"over-{number}").touch()


def _judge(
    site: Site,
    hand: Sequence[Fault],
    episode: Episode,
    expected: Callable[[], tuple[list[Any], dict[int, list[str]]]],
) -> None:
    """Fill the rows, and find what did not hold. `expected`: rows and samples of the undisturbed job."""
    folder = site.root / "faults"
    story = Story(folder)
    moments = _moments(folder, len(hand))
    for number, (fault, row) in enumerate(zip(hand, episode.rows, strict=True)):
        at = moments.get(number)
        if at is None:
            episode.problems.append(f"{fault.name} never happened")
            continue
        row.happened = row.happened or not fault.kind.is_outside
        _follow(row, fault, story, at)
        is_told_to_stop = fault.kind.effect == "stops" and not _is_met_by_death(hand, moments, story, at)
        if is_told_to_stop and (row.steps_lost or 0) > 1:
            episode.problems.append(f"{fault.name}: {row.steps_lost} steps lost, though it was told to stop")
    episode.problems += story.lost_commits()
    if not episode.problems:
        rows, read = expected()
        if bits(_rows_at(site)) != rows:
            episode.problems.append("the losses are not those of the undisturbed job")
        if samples(folder) != read:
            episode.problems.append("the samples of the steps are not those of the undisturbed job")
        episode.problems += site.leftovers()
        episode.problems += [
            f"{row.kind}: nothing came after it" for row in episode.rows if row.seconds_to_next_step is None
        ]
    for row in episode.rows:
        row.recovered = row.happened and row.seconds_to_next_step is not None and not episode.problems


def _moments(folder: Path, num_faults: int) -> dict[int, float]:
    """When each fault happened, by its place in the hand."""
    done = {number: folder / f"done-{number}" for number in range(num_faults)}
    return {number: float(path.read_text()) for number, path in done.items() if path.exists()}


def _is_met_by_death(hand: Sequence[Fault], moments: dict[int, float], story: Story, at: float) -> bool:
    """Whether the start of that moment had a fault too that ends ranks: they may die before they can save."""
    left = len(story.restarts_after(at))
    return any(
        fault.kind.effect == "restarts" and number in moments and len(story.restarts_after(moments[number])) == left
        for number, fault in enumerate(hand)
    )


def _follow(row: Row, fault: Fault, story: Story, at: float) -> None:
    """What came after a fault of that moment."""
    starts = story.restarts_after(at)
    next_step = story.next_step_after(at)
    if fault.kind.effect != "goes_on":
        # A rank may still tell of a step that it finished while another one died.
        next_step = story.next_step_after(starts[0]["at"]) if starts else None
    if starts and next_step is not None and starts[0]["at"] < next_step:
        begun = next((start for start in starts if start["has_begun"]), starts[0])
        row.steps_lost = max(0, begun["last_step"] - begun["resumed"])
    if next_step is not None:
        row.seconds_to_next_step = next_step - at


def _rows_at(site: Site) -> list[dict[str, Any]]:
    """metrics.jsonl as it lies beside the checkpoints."""
    if site.s3 is None:
        return rows_of(Path(site.destination))
    bucket, _, prefix = site.destination.removeprefix("s3://").partition("/")
    text = site.s3.get_object(Bucket=bucket, Key=f"{prefix}/metrics.jsonl")["Body"].read().decode()
    return [json.loads(line) for line in text.splitlines()]


def campaign(
    root: Path,
    *,
    seeds: Sequence[int],
    sites: Sequence[str] = SITES,
    engines: Sequence[str] = ENGINES,
    faults: int = FAULTS_PER_EPISODE,
    minutes: float | None = None,
    recover: bool = True,
    earlier: Report | None = None,
    real_starts_every: int = REAL_STARTS_EVERY,
    named: Sequence[str] = (),
    again: Sequence[Episode] = (),
    say: Callable[[Report], None] | None = None,
) -> Report:
    """Episodes of these seeds, as many as begin within `minutes`; what was seen. `say`: called after each.

    `named`: the faults of each, in order; `again`: episodes whose faults are played once more, before all others.
    """
    until = None if minutes is None else time.monotonic() + 60 * minutes
    played = Campaign(
        root, sites=sites, recover=recover, faults=faults, earlier=earlier, real_starts_every=real_starts_every
    )
    try:
        for number, seed in enumerate(seeds):
            if not played.has_sites or (until is not None and time.monotonic() > until):
                break
            if number < len(again):
                played.run_again(seed, again[number])
            else:
                played.run(seed, engines, named=named)
            if say is not None:
                say(played.report)
    finally:
        played.close()
    return played.report


def _commit() -> str:
    """Of the checkout, with a + where files of it were changed since, other than results: a campaign changes them."""
    said = [
        subprocess.run(["git", *arguments], cwd=_CHECKOUT, capture_output=True, text=True, check=False).stdout.strip()
        for arguments in (
            ("rev-parse", "--short", "HEAD"),
            ("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"),
        )
    ]
    return said[0] + ("+" if said[1] else "")


def _machine() -> str:
    """Processor and how busy it is."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return f"{os.cpu_count()} cores, {names[0] if names else 'unknown'}, load average {os.getloadavg()[0]:.1f}"


def _hand(text: str) -> list[str]:
    """The faults that a command names."""
    names = [name.strip() for name in text.split(",")]
    try:
        for name in names:
            parsed(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if names[0].endswith("@restore"):
        raise argparse.ArgumentTypeError(f"{names[0]}: a restore follows on a fault; name one before it")
    return names


def _say(episode: Episode) -> None:
    """An episode, while the campaign goes on."""
    first = episode.rows[0]
    faults = ", ".join(f"{row.kind}{'' if row.recovered else ' (!)'}" for row in episode.rows)
    print(f"seed {first.seed} {first.engine} {first.site}: {episode.seconds:.0f} s, {faults}", flush=True)
    for problem in episode.problems:
        print(f"  PROBLEM: {problem}", flush=True)
    for line in episode.said:
        print(f"  | {line}", flush=True)


def main() -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="fault_campaign", description="Disturb jobs at random moments; compare them bit for bit."
    )
    parser.add_argument("--seeds", type=int, default=8, help="how many episodes (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, help="the first episode's (default: 1, or the next of --json's)")
    parser.add_argument("--minutes", type=float, help="begin no episode later than that")
    parser.add_argument("--faults", type=int, default=FAULTS_PER_EPISODE, help="per episode (default: %(default)s)")
    parser.add_argument("--site", action="append", choices=SITES, help="only there; may be given again (default: all)")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="only that; may be given again")
    parser.add_argument("--real-starts", action="store_true", help="no forks: every process starts as a user's does")
    parser.add_argument("--hand", type=_hand, default=[], metavar="KIND[@MOMENT],...", help="exactly these faults")
    parser.add_argument(
        "--again", type=int, action="append", default=[], metavar="SEED", help="play that seed's faults of --json again"
    )
    parser.add_argument("--without-recovery", action="store_true", help="prove that the campaign can fail")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add to this file: every fault, and what came of it")
    options = parser.parse_args()
    if options.without_recovery and options.json:
        parser.error("--without-recovery: what it shows is no result; leave --json away")
    earlier = Report.read(options.json) if options.json else Report()
    next_seed = 1 + max((episode.rows[0].seed for episode in earlier.episodes), default=0)
    first_seed = options.first_seed or next_seed
    by_seed = {episode.rows[0].seed: episode for episode in earlier.episodes}
    if unknown := [seed for seed in options.again if seed not in by_seed]:
        parser.error(f"--again {unknown[0]}: --json has the seeds {', '.join(map(str, by_seed)) or 'of no job'}")
    for kind, _ in map(parsed, options.hand):
        if missing := set(options.site or SITES) - set(kind.sites):
            parser.error(f"--hand {kind.name}: not at {', '.join(sorted(missing))}; give --site {kind.sites[0]}")

    def say(report: Report) -> None:
        _say(report.episodes[-1])
        if options.json:
            report.add_to(options.json)

    for number in (signal.SIGINT, signal.SIGTERM):  # whoever ends it early leaves nothing behind, in the background too
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="fault-campaign-") as folder:
        report = campaign(
            Path(folder),
            seeds=range(first_seed, first_seed + (len(options.again) or options.seeds)),
            sites=options.site or SITES,
            engines=options.engine or ENGINES,
            faults=len(options.hand) or options.faults,
            minutes=options.minutes,
            recover=not options.without_recovery,
            earlier=earlier,
            real_starts_every=1 if options.real_starts else REAL_STARTS_EVERY,
            named=options.hand,
            again=[by_seed[seed] for seed in options.again],
            say=say,
        )
    print(report.table())
    return 0 if Report(report.episodes[len(earlier.episodes) :]).is_good else 1


if __name__ == "__main__":
    sys.exit(main())
