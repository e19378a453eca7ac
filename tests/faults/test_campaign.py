"""The short part of the fault campaign, and that it can fail; `scripts/fault_campaign` is the long one."""

import contextlib
import json
import os
import random
import re
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import cloud
import evidence
import pytest
import sites
import slurm
from campaign import ENGINES, Campaign, Episode, Report, Row, _judge, _Play, campaign
from evidence import Story, samples
from kinds import KINDS, Deck, Fault, parsed
from slurm_testing.programs import NoSlurm
from trainer_testing.faulty_trainer import Faults


def test_nothing_is_lost_beyond_the_last_commit_and_no_loss_is_wrong(tmp_path: Path) -> None:
    report = campaign(tmp_path, seeds=[3], sites=["one_host"], engines=["fsdp"], faults=2)
    assert report.is_good and len(report.rows) == 2, report.table()


def test_without_recovery_the_campaign_fails(tmp_path: Path) -> None:
    report = campaign(tmp_path, seeds=[1], sites=["one_host"], faults=1, recover=False)
    assert not report.is_good and not any(row.recovered for row in report.rows), report.table()


@pytest.mark.full
def test_every_site_has_an_episode_without_a_problem(tmp_path: Path) -> None:
    report = campaign(tmp_path, seeds=range(1, 6))
    assert report.is_good, report.table()


@pytest.fixture
def with_slurm() -> None:
    if why := slurm.why_no_slurm():
        pytest.skip(f"no Slurm here: {why}")


@pytest.mark.slow
@pytest.mark.usefixtures("with_slurm")
def test_a_job_of_slurms_comes_back_and_learns_what_the_undisturbed_one_learns(tmp_path: Path) -> None:
    report = campaign(
        tmp_path, seeds=[1], sites=["slurm"], engines=["ddp"], named=["requeue", "kill_host@save"], faults=2
    )
    assert report.is_good and len(report.rows) == 2, report.table()


@pytest.mark.slow
@pytest.mark.usefixtures("with_slurm")
def test_without_requeues_and_resumes_the_campaign_fails_on_slurm_too(tmp_path: Path) -> None:
    report = campaign(
        tmp_path, seeds=[1], sites=["slurm"], engines=["ddp"], named=["preempted"], faults=1, recover=False
    )
    assert not report.is_good and not any(row.recovered for row in report.rows), report.table()
    assert any("the job ended" in problem for problem in report.episodes[0].problems), report.table()


def test_where_no_slurm_is_to_be_had_its_site_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_here() -> None:
        raise NoSlurm("this is no Debian")

    monkeypatch.setattr(slurm, "programs", none_here)
    report = campaign(tmp_path, seeds=[1], sites=["slurm"])
    assert not report.episodes and not report.is_good
    assert report.table().splitlines()[-1] == "left out: slurm: this is no Debian"
    both = Campaign(tmp_path, sites=["desk", "slurm"], faults=1)
    assert both._deck.place(ENGINES, 1)[1] == "desk"


def test_a_job_that_slurm_was_to_bring_back_and_a_person_had_to_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "resumed", lambda *_, **__: [])
    site = object.__new__(slurm.SlurmSite)
    site.root = site._folder = tmp_path
    site._job_id, site._resumes, site._recover, site.reasons = "job", 1, True, []
    site._is_to_be_resumed, site._ended = True, "Stopped: scancel took it"
    site.start()
    assert site.reasons == []
    site._ended = "Stopped: a machine was lost"
    site.start()
    assert site.reasons == ["a person had to resume it, as Slurm did not: Stopped: a machine was lost"]


def test_a_long_campaign_has_every_kind_with_every_engine_evenly() -> None:
    deck = Deck()
    seen: Counter[tuple[str, str]] = Counter()
    for seed in range(1, 37):
        engine, site = deck.place(ENGINES, 8)
        hand = deck.deal(random.Random(seed), engine=engine, site=site, number=8)
        assert len(hand) == 8 and all(site in fault.kind.sites for fault in hand)
        assert [fault.order["step"] for fault in hand] == sorted(fault.order["step"] for fault in hand)
        for before, fault in zip((None, *hand), hand, strict=False):
            assert fault.moment != "restore" or (before is not None and before.kind.effect == "restarts")
            assert not fault.kind.after or (before is not None and before.kind.name == fault.kind.after)
        seen.update((fault.kind.name, engine) for fault in hand)
    by_kind = {kind.name: [seen[kind.name, engine] for engine in ENGINES] for kind in KINDS}
    assert all(min(counts) >= 1 and sum(counts) >= 5 for counts in by_kind.values()), by_kind
    by_engine = [sum(seen[kind.name, engine] for kind in KINDS) for engine in ENGINES]
    assert max(by_engine) == min(by_engine)


def test_what_an_earlier_campaign_played_is_not_dealt_again_first(tmp_path: Path) -> None:
    names = ("kill", "raise", "slow_rank", "clock_jump@step")
    rows = [Row(1, "ddp", "one_host", name, happened=True, recovered=True) for name in names]
    Report([Episode(rows, commit="abc", problems=[])]).write(tmp_path / "told.json")
    earlier = Report.read(tmp_path / "told.json")
    assert [row.kind for row in earlier.rows] == list(names) and earlier.episodes[0].commit == "abc"
    deck = Campaign(tmp_path, sites=["one_host"], faults=2, earlier=earlier)._deck
    assert deck.place(ENGINES, 2)[0] == "zero3"
    hand = deck.deal(random.Random(1), engine="zero3", site="one_host", number=8)
    assert not {fault.kind.name for fault in hand} & {name.partition("@")[0] for name in names}


def test_faults_can_be_named_and_an_episodes_be_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["kill", "kill_host@restore", "reclaim_again@restore", "s3_timeout@save"]
    hand = Deck().named(random.Random(1), names, engine="ddp")
    assert [fault.name for fault in hand] == names
    assert [fault.order["step"] for fault in hand] == sorted(fault.order["step"] for fault in hand)
    assert parsed("s3_timeout")[1] == "save", "its only moment"
    for wrong, words in (("kil", "no such kind; there are kill, freeze"), ("raise@save", "raise happens at step")):
        with pytest.raises(ValueError, match=words):
            parsed(wrong)

    played = []
    monkeypatch.setattr(
        Campaign, "_played", lambda _, *place: played.append(place) or Episode([Row(*place[:3], place[3][0].name)])
    )
    told = Episode([Row(7, "fsdp", "cloud", name) for name in names])
    made = Campaign(tmp_path, faults=2)
    assert made.run_again(21, told).again == 7
    made.run(22, ["zero3"], named=names[:2])
    (*again, hand, _), (*named, other, _) = played
    assert again == [21, "fsdp", "cloud"] and [fault.name for fault in hand] == names
    assert named[:2] == [22, "zero3"] and [fault.name for fault in other] == names[:2]


def test_two_campaigns_add_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    for seed in (1, 2):
        rows = [Row(seed, "ddp", "desk", "kill", happened=True, recovered=seed == 2)]
        goodput = {"wall_seconds": 10.0, "useful_seconds": 4.0 * seed, "elsewhere": {"first_step": 1.0}}
        # Each began when the file was empty, and knows of nobody else.
        Report([Episode(rows, goodput=goodput, again=1 if seed == 2 else None)], ["partition: no root"]).add_to(path)
    told = Report.read(path)
    assert [episode.rows[0].seed for episode in told.episodes] == [1, 2] and told.left_out == ["partition: no root"]
    assert "goodput of 2 jobs at the desk, 20 s: kept steps 60.0%, first step 10.0%" in told.table()
    assert "seed 1 again, as seed 2: 1 of 1 recovered" in told.table()
    assert [row.seed for row in told.rows] == [1, 2] and [row.seed for row in told.rows_of_last_plays] == [2]
    assert re.search(r"^all +2 +1 .*\nall, by the last play +1 +1 ", told.table(), re.MULTILINE), told.table()


def test_a_restore_meets_what_follows_on_a_fault_of_an_earlier_start(tmp_path: Path) -> None:
    orders = [{"rank": 0, "kind": "reclaim", "moment": "restore"}, {"rank": 1, "kind": "again", "moment": "restore"}]
    orders.insert(0, {"rank": 0, "kind": "reclaim", "step": 5, "moment": "step"})
    (tmp_path / "faults.json").write_text(json.dumps([{"step": 9, **order} for order in orders]))

    def restore() -> set[str]:
        """Of a start's two ranks, the second one when the first has met its own."""
        ranks = [Faults(tmp_path, rank) for rank in range(2)]
        for rank in ranks:
            rank._at("restore", 0)
        return {path.name for path in tmp_path.glob("done-*")}

    assert restore() == set(), "nothing has happened yet"
    (tmp_path / "done-0").write_text("1.0")
    assert restore() == {"done-0", "done-1"}, "not both in one restore"
    assert restore() == {"done-0", "done-1", "done-2"}


@pytest.mark.parametrize("site", ["one_host", "slurm"])
def test_no_checkpoint_is_spoiled_where_a_full_disk_left_but_one(site: str) -> None:
    deck = Deck((site,))
    hands = [deck.deal(random.Random(seed), engine="ddp", site=site, number=8) for seed in range(60)]
    hit = [(hand, at) for hand in hands for at, fault in enumerate(hand) if fault.kind.name.endswith("disk_full")]
    assert any(at < 6 for _, at in hit)
    assert not any(fault.kind.is_damage for hand, at in hit for fault in hand[at + 1 : at + 3])


def test_kinds_that_a_machine_cannot_show_are_not_dealt() -> None:
    deck = Deck(("two_hosts",), left_out=["partition"])
    hand = deck.deal(random.Random(1), engine="ddp", site="two_hosts", number=40)
    assert "partition" not in {fault.kind.name for fault in hand} and len(hand) == 40


def test_a_resume_from_before_a_commit_is_a_problem_and_from_before_a_spoiled_one_is_none(tmp_path: Path) -> None:
    def told(*lines: str) -> list[str]:
        events = [{"at": float(at), **_event(line)} for at, line in enumerate(lines, start=1)]
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return Story(tmp_path).lost_commits()

    begun = ("start", "step=3 loss=1", "checkpoint step=3 committed", "step=6 loss=1", "checkpoint step=6 committed")
    assert told(*begun, "start", "resumed step=6 uri=x") == []
    assert told(*begun, "start", "resumed step=3 uri=x") == ["step 6 was committed, and step 3 was resumed"]
    assert told(*begun, "start", "step=1 loss=1") == ["step 6 was committed, and step 0 was resumed"]
    # Killed before it had read anything: it says nothing of what it would have resumed.
    assert told(*begun, "start", "start", "resumed step=6 uri=x") == []
    assert told(*begun, "spoiled 6", "start", "resumed step=3 uri=x") == []
    # Spoiled between the commit and its line.
    assert told(*begun[:-1], "spoiled 6", begun[-1], "start", "resumed step=3 uri=x") == []
    again = ("spoiled 6", "start", "resumed step=3 uri=x", "checkpoint step=6 committed", "start")
    assert told(*begun, *again, "resumed step=3 uri=x") == ["step 6 was committed, and step 3 was resumed"]
    assert told(*begun, *again, "resumed step=6 uri=x") == []
    told(*begun, "spoiled 6", "start", "resumed step=3 uri=x")
    restart = Story(tmp_path).restarts_after(5.5)[0]
    assert (restart["resumed"], restart["last_step"]) == (3, 6)
    told(*begun, "spoiled 6", "start", "resumed step=3 uri=x", "start", "resumed step=3 uri=x")
    lost = [start["last_step"] - start["resumed"] for start in Story(tmp_path).restarts_after(5.5)]
    assert lost == [3, 0], "who was told to stop before its first step lost none"


def _event(line: str) -> dict[str, object]:
    if line == "start":
        return {"start": True}
    return {"damaged": int(line.split()[1])} if line.startswith("spoiled") else {"line": line}


def test_samples_are_those_of_the_last_time_that_a_step_was_made(tmp_path: Path) -> None:
    first = [{"step": 1, "ids": ["a"]}, {"step": 2, "ids": ["wrong"]}, {"step": 2, "ids": ["b"]}]
    (tmp_path / "samples-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in first) + '{"step": 3, "i')
    (tmp_path / "samples-1.jsonl").write_text(json.dumps({"step": 2, "ids": ["c"]}) + "\n")
    assert samples(tmp_path) == {1: ["a"], 2: ["b", "c"]}


def test_damage_that_would_take_the_only_good_checkpoint_does_not_happen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (3, 6):
        (tmp_path / f"{step}").mkdir()
        (tmp_path / f"{step}/COMMITTED").write_text("digest")
    good = [SimpleNamespace(step=step, uri=str(tmp_path / f"{step}"), is_good=True, shards=[]) for step in (3, 6)]
    found = iter([good[:1], good[:1], good])
    told = tmp_path / "events.jsonl"
    monkeypatch.setattr(evidence, "DAMAGE_SECONDS", -1.0)
    monkeypatch.setattr(evidence, "list_checkpoints", lambda *_: next(found))
    assert not evidence.damage("marker_corrupted", str(tmp_path), None, random.Random(1), told)
    assert not told.exists() and (tmp_path / "3/COMMITTED").read_text() == "digest"
    # The second one is waited for.
    monkeypatch.setattr(evidence, "DAMAGE_SECONDS", 60.0)
    assert evidence.damage("marker_corrupted", str(tmp_path), None, random.Random(1), told)
    assert json.loads(told.read_text())["damaged"] == 6
    assert (tmp_path / "6/COMMITTED").read_bytes() != b"digest"


def test_an_s3_fault_that_no_request_met_did_not_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = SimpleNamespace(fault=None, num_disturbed=Counter())
    site = SimpleNamespace(_cloud=SimpleNamespace(proxy=proxy))
    draw = SimpleNamespace(uniform=lambda *_: 0.0)
    monkeypatch.setattr(cloud, "MEETING_SECONDS", -1.0)
    assert not cloud.CloudSite.act(site, "s3_503", draw)
    draw.uniform = lambda *_: proxy.num_disturbed.update(["unavailable"]) or 0.0
    assert cloud.CloudSite.act(site, "s3_503", draw) and proxy.fault is None


@pytest.mark.parametrize(
    ("line", "is_met"),
    [
        ("algo-1 checkpoint step=6 not committed: a disk is too full for it; the one before it is kept", True),
        ("algo-1 checkpoint step=6 committed uri=/x seconds=0.1", False),
    ],
)
def test_a_full_disk_that_no_save_met_did_not_happen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, is_met: bool
) -> None:
    monkeypatch.setattr(sites, "MEETING_SECONDS", -1.0)
    site = object.__new__(sites.HostsSite)
    site.root = site._disk = tmp_path
    site.lines = ["algo-1 checkpoint step=3 not committed: of an earlier fault"]
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults/held-0").touch()

    class Full:
        def write(self, _: bytes) -> None:
            site.lines.append(line)
            raise OSError

    monkeypatch.setattr(Path, "open", lambda *_, **__: contextlib.nullcontext(Full()))
    assert site._fill_disk(0.0) is is_met


def test_a_full_disk_waits_for_a_save_as_long_as_one_may_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "MEETING_SECONDS", -1.0)
    monkeypatch.setattr(sites, "full_disk", lambda _: contextlib.nullcontext())
    looks: list[list[str]] = [[], [], [], ["checkpoint step=6 not committed: a disk is too full for it"]]
    told = iter(looks)
    assert sites.fill_disk(tmp_path, lambda: next(told), 0.0, tmp_path)
    (tmp_path / "held-2").touch()
    told = iter(looks)
    assert not sites.fill_disk(tmp_path, lambda: next(told), 0.0, tmp_path), "the job waits for this, not the reverse"


def test_a_job_that_was_told_to_stop_may_end_though_another_fault_came_after(tmp_path: Path) -> None:
    kinds = {kind.name: kind for kind in KINDS}
    hand = [Fault(kinds[name], "step", {}) for name in ("terminate_rank", "disk_full", "raise")]
    episode = Episode([])
    play = _Play(SimpleNamespace(root=tmp_path), hand, episode, random.Random(1), recover=True)
    play._begun = {0, 1}
    assert play._was_to_end(), "the disk was full when the rank that was told to stop saved"
    play._begun_before, play._begun = {0, 1}, {0, 1, 2}
    assert not play._was_to_end(), "the stop was answered by this start already"


def test_who_dies_before_it_could_save_was_not_disobedient(tmp_path: Path) -> None:
    kinds = {kind.name: kind for kind in KINDS}
    folder = tmp_path / "faults"
    folder.mkdir()
    lines = ("start", *(f"step={step} loss=1" for step in range(1, 10)), "start", "resumed step=6 uri=x")
    events = [{"at": float(at), **_event(line)} for at, line in enumerate((*lines, "step=7 loss=1"), start=1)]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))

    def complaints(second: str, *, at: float) -> list[str]:
        hand = [Fault(kinds[name], "step", {}) for name in ("terminate_rank", second)]
        for number, moment in enumerate((9.5, at)):
            (folder / f"done-{number}").write_text(str(moment))
        episode = Episode([Row(1, "ddp", "one_host", fault.name, happened=True) for fault in hand], problems=["other"])
        _judge(SimpleNamespace(root=tmp_path), hand, episode, lambda: ([], {}))
        return [problem for problem in episode.problems if "told to stop" in problem]

    told = ["terminate_rank: 3 steps lost, though it was told to stop"]
    assert complaints("out_of_host_memory", at=10.5) == []
    assert complaints("out_of_host_memory", at=12.5) == told, "of the next start"
    assert complaints("slow_rank", at=10.5) == told, "nobody dies of it"


@pytest.mark.parametrize("is_met", [True, False])
def test_a_fault_counts_when_the_job_met_it(is_met: bool, tmp_path: Path) -> None:
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults/done-0").write_text("1.0")
    kill = next(kind for kind in KINDS if kind.name == "kill_host")
    hand = [Fault(kill, "step", {})]
    episode = Episode([Row(7, "ddp", "one_host", "kill_host")], problems=["not done"])
    site = SimpleNamespace(root=tmp_path, act=lambda *_: is_met)
    play = _Play(site, hand, episode, random.Random(1), recover=True)
    play._act(0, hand[0])
    _judge(site, hand, episode, lambda: ([], {}))
    report = Report([episode])
    assert len(report.rows) == is_met
    assert ("did not happen: kill_host (seed 7)" in report.table()) == (not is_met)


def test_a_guard_looks_twice_however_long_a_look_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One look, in which all the patience is spent, then one that finds.
    found = iter([None, "checkpoint"])
    monkeypatch.setattr(evidence, "_PATIENCE_SECONDS", -1.0)
    monkeypatch.setattr(evidence, "newest_good", lambda *_: next(found))
    guard = object.__new__(evidence.Guard)
    guard._site = SimpleNamespace(destination=str(tmp_path), s3=None)
    assert guard._look() == "checkpoint"


def test_results_name_no_folder_of_the_machine(tmp_path: Path) -> None:
    root = tmp_path / "fault-campaign-1"
    made, checkout = Campaign(root, sites=["desk"], faults=1), Path(__file__).resolve().parents[2]
    told = f"{checkout}/.venv/bin/python --out {root}/episode-1/x {Path(tempfile.gettempdir())}/slurm-1/c /opt/x"
    assert made._shortened(told) == "./.venv/bin/python --out scratch/episode-1/x scratch/slurm-1/c /opt/x"


def test_the_table_counts_what_was_recovered() -> None:
    good = Row(1, "ddp", "one_host", "kill", happened=True, recovered=True, steps_lost=2, seconds_to_next_step=9.0)
    bad = Row(2, "fsdp", "cloud", "kill", happened=True, seconds_to_next_step=30.0)
    forked = Row(1, "ddp", "one_host", "kill", True, True, is_forked=True, steps_lost=2, seconds_to_next_step=1.0)
    restart = {"detection_seconds": 0.5, "load_seconds": 2.0, "seconds_to_next_step": 9.0}
    unfinished = {"detection_seconds": 99.0}
    wrong = Episode([bad], problems=["the losses are not those of the undisturbed job"])
    report = Report([Episode([good, forked], restarts=[restart, unfinished]), wrong])
    lines = report.table().splitlines()
    assert lines[1].split() == ["kill", "3", "2", "2", "(<=", "2)", "19.5", "(<=", "30.0)"]
    assert [line.split()[:4] for line in lines if line.startswith("site ")] == [
        ["site", "cloud", "1", "0"],
        ["site", "one_host", "2", "2"],
    ]
    assert lines[-1].startswith("PROBLEM seed 2, fsdp, cloud: the losses are not")
    assert "1 restart in place, part by part:" in lines
    parts = [line.split()[:2] for line in lines if line.startswith("  ")]
    assert parts == [["detection_seconds", "0.50"], ["load_seconds", "2.00"], ["seconds_to_next_step", "9.00"]]
    assert not report.is_good


@pytest.mark.full
@pytest.mark.usefixtures("with_slurm")
@pytest.mark.skipif(os.geteuid() != 0, reason="a file system that can be filled needs root")
def test_a_host_that_is_lost_while_the_disk_is_full_is_told_of_and_slurm_requeues(tmp_path: Path) -> None:
    named = ["kill_host_disk_full"]
    report = campaign(tmp_path, seeds=[1], sites=["slurm"], engines=["ddp"], named=named, faults=1)
    assert report.is_good and len(report.rows) == 1, report.table()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a file system that can be filled needs root")
def test_a_full_disk_with_the_log_on_it_too_costs_a_job_of_this_machine_nothing(tmp_path: Path) -> None:
    report = campaign(tmp_path, seeds=[1], sites=["desk"], engines=["ddp"], named=["disk_full"], faults=1)
    assert report.is_good and len(report.rows) == 1, report.table()
    assert report.rows[0].steps_lost is None, "nothing was started again"


def test_a_limit_of_a_job_that_another_fault_has_ended_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    site = object.__new__(slurm.SlurmSite)
    said = "Job has already finished for job 2"

    def refused(*_: str) -> str:
        raise AssertionError(f"scontrol update JobId=2 TimeLimit=3: {said}")

    monkeypatch.setattr(site, "_cluster", SimpleNamespace(command=refused), raising=False)
    monkeypatch.setattr(site, "_job_now", dict[str, str])
    assert not site._let_the_limit_come("2", 1)
    said = "Access denied"
    with pytest.raises(AssertionError, match="Access denied"):
        site._let_the_limit_come("2", 1)


@pytest.mark.parametrize(
    ("now", "state", "is_excused"), [("2", "CANCELLED", True), ("3", "RUNNING", True), ("2", "RUNNING", False)]
)
def test_a_command_for_a_job_that_another_fault_has_ended_is_not_met(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, now: str, state: str, is_excused: bool
) -> None:
    """`now`: the job's number; a person has resumed it where that is another one."""
    site = object.__new__(slurm.SlurmSite)

    def refused(*_: str) -> str:
        raise AssertionError("scancel: error: Kill job error on job id 2: Invalid job id specified")

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/submitted").write_text(f"id={now}\n")
    site._folder, site._job_id = tmp_path, "mine"
    monkeypatch.setattr(site, "_cluster", SimpleNamespace(command=refused), raising=False)
    monkeypatch.setattr(site, "_job_now", lambda: {"JobState": state})
    if is_excused:
        assert not site._told_of("2", "scancel", "--signal=TERM")
    else:
        with pytest.raises(AssertionError, match="Invalid job id"):
            site._told_of("2", "scancel", "--signal=TERM")
