"""Runbooks that look: each names its own fault and no other's, by the line or the figure that decided."""

import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runbook_testing import evidence_of, record_of, rows_of
from runbook_testing.lines import (
    BELOW_FLOOR_BETWEEN,
    BELOW_FLOOR_INSIDE,
    EFA_REFUSED,
    FAULTS,
    FIRST_HOST_GONE,
    FIRST_HOST_KILLED,
    GOOD_EFA,
    HOST_GONE,
    HOST_KILLED,
    NCCL_REMOTE,
    PARTIAL_EFA,
    QUOTA,
    QUOTA_OF_TENANT,
    SAVE_FAILED,
    TCP_LIBFABRIC,
    TCP_SOCKETS,
    WARNED_BETWEEN,
    WARNED_INSIDE,
    WATCHDOG,
    XID,
    XID_OF_A_PROGRAM,
    measured,
)

from trainyard.launch.checkpoints import Checkpoint
from trainyard.launch.compare import WARM_STEPS
from trainyard.launch.elastic import reviser
from trainyard.launch.record import JobRecord
from trainyard.operate.runbooks import __main__ as command
from trainyard.operate.runbooks.__main__ import parser_of
from trainyard.operate.runbooks.catalog import BY_NAME, RUNBOOKS
from trainyard.operate.runbooks.evidence import Evidence
from trainyard.operate.runbooks.figures import diverged, speed
from trainyard.operate.runbooks.framework import Finding
from trainyard.operate.runbooks.log_lines import XIDS, classify, decisive, transport, xids
from trainyard.operate.runbooks.runbook import Runbook


@pytest.fixture(scope="module")
def record() -> JobRecord:
    return record_of()


DIAGNOSING = [runbook.name for runbook in RUNBOOKS if runbook.diagnose is not None]


def found(name: str, evidence: Evidence) -> list[Finding]:
    diagnose = BY_NAME[name].diagnose
    assert diagnose is not None
    return diagnose(evidence)


def named(evidence: Evidence) -> set[str]:
    """The runbooks that say that their own fault is there."""
    return {name for name in DIAGNOSING if any(one.kind == "fault" for one in found(name, evidence))}


def decided(findings: Sequence[Finding]) -> str:
    return " ".join(line for one in findings if one.kind == "fault" for line in one.decided_by)


@pytest.mark.parametrize("fault", sorted(FAULTS))
@pytest.mark.parametrize("name", DIAGNOSING)
def test_a_runbook_names_its_own_fault_and_no_other(record: JobRecord, fault: str, name: str) -> None:
    lines, owner = FAULTS[fault]
    evidence = evidence_of(record, (*GOOD_EFA[:2], *lines, "algo-1 the end"))
    findings = found(name, evidence)
    assert findings, "a runbook that says nothing leaves its reader with nothing"
    own = [one for one in findings if one.kind == "fault"]
    assert bool(own) == (name == owner), findings
    if own:
        # What decided is a line of the fixture, word for word, with its place.
        assert any(line.strip()[:150] in decided(own) for line in lines), own
        assert own[0].then, "what to do next is a command"


def test_who_else_decides_is_told_with_the_runbook_that_looks_into_it(record: JobRecord) -> None:
    (_, told) = found("job_hung", evidence_of(record, (XID[79], *WATCHDOG)))
    assert (told.kind, told.then[0].split()[0]) == ("neighbour", "scripts/runbooks/bad_node")
    denied = found("nccl_error", evidence_of(record, FAULTS["access denied"][0]))[-1]
    assert (denied.kind, denied.then) == ("neighbour", ("trainyard doctor",))


def test_lines_are_classified_with_the_line_that_decided() -> None:
    for name, (lines, _) in FAULTS.items():
        hits = classify(lines)
        for hit in hits:
            assert hit.line == lines[hit.number - 1].strip(), name
    assert classify(GOOD_EFA) == []
    assert decisive(classify((*WATCHDOG, XID[79]))).name == "xid-79"  # type: ignore[union-attr]
    assert decisive(classify(SAVE_FAILED)) is None, "training goes on: it ends no job"


def test_every_xid_is_read_with_its_bus_and_its_action() -> None:
    actions = {code: XIDS[code].action for code in XID}
    assert actions == {
        48: "reset",
        63: "watch",
        64: "replace",
        74: "replace",
        79: "replace",
        94: "watch",
        95: "reset",
    }
    for code, line in XID.items():
        (seen,) = xids([line])
        assert (seen.code, seen.gpu.removeprefix("GPU ") in line, seen.number) == (code, True, 1)
    (unknown,) = xids(["NVRM: Xid (PCI:0000:19:00): 999, pid=1, name=x, something new"])
    assert "not in this runbook's table" in unknown.known.meaning


def test_a_gpu_that_mends_itself_again_and_again_is_taken_out(record: JobRecord) -> None:
    once, often = evidence_of(record, (XID[63],)), evidence_of(record, (XID[63], XID[63], XID[94]))
    assert "bad_node" not in named(once) and "bad_node" in named(often)
    assert "Xid 63" in found("bad_node", once)[0].words, "seen, and judged as harmless"


def test_the_transport_is_the_chosen_one_and_not_what_ranks_met_over() -> None:
    good = transport(GOOD_EFA)
    assert (good.providers, good.num_nics, good.uses_sockets) == (("efa",), 32, False)
    # NET/Socket initializes beside the plugin too; only its choice is a fallback.
    beside = transport(("algo-1 x:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>", *GOOD_EFA))
    assert not beside.uses_sockets
    assert transport(TCP_SOCKETS).uses_sockets
    assert transport(PARTIAL_EFA).num_nics == 4
    assert transport(("no word of it",)).line == ""


def test_one_host_may_use_sockets_and_silence_is_no_proof(record: JobRecord) -> None:
    alone = evidence_of(record, TCP_SOCKETS, num_hosts=1)
    assert found("efa_not_used", alone)[0].kind == "clear"
    assert found("efa_not_used", evidence_of(record, ("nothing",)))[0].kind == "unknown"


def test_a_network_below_its_floor_is_found_where_it_only_warned_too(record: JobRecord) -> None:
    """Inside a host there is no EFA: that is the machine's own affair."""
    for lines, warned, owner in (
        (BELOW_FLOOR_BETWEEN, WARNED_BETWEEN, "efa_not_used"),
        (BELOW_FLOOR_INSIDE, WARNED_INSIDE, "bad_node"),
    ):
        trains = evidence_of(record, warned, state="Training")
        assert named(trains) == {owner}
        assert trains.decisive is None, "the job trains all the same: it explains no end"
        told = found("job_hung", evidence_of(record, lines))[-1]
        assert (told.kind, told.then[0].split()[0]) == ("neighbour", f"scripts/runbooks/{owner}")


STEP = "algo-1 step=900 loss=4.210000 learning_rate=0.0001 grad_norm=1.2000"


@pytest.mark.parametrize(
    ("kind", "other", "refused", "warned", "owner"),
    [
        ("across", "host", BELOW_FLOOR_BETWEEN, WARNED_BETWEEN, "efa_not_used"),
        ("host", "across", BELOW_FLOOR_INSIDE, WARNED_INSIDE, "bad_node"),
    ],
)
def test_a_floor_that_a_later_start_reached_is_no_fault_of_the_job_that_trains(
    record: JobRecord, kind: str, other: str, refused: tuple[str, ...], warned: tuple[str, ...], owner: str
) -> None:
    """A refused start is repeated and measured anew, in the same log: what it said must not stop a healthy job."""

    def told(*lines: str, **more: Any) -> set[str]:
        return named(evidence_of(record, lines, state="Training", **more))

    reached, restarted = measured(kind, 1.5), ({"restart": 1, "reason": refused[-1]},)
    assert told(*refused, reached, STEP) == told(*refused, STEP) == told(*warned, reached, STEP) == set()
    assert told(*refused, reached, STEP, recoveries=restarted) == told(STEP, recoveries=restarted) == set()
    # What came before it, the other network's measurement, one that falls short again, or the steps of a job that was
    # only warned, prove nothing.
    assert told(reached, STEP, *refused) == told(*refused, measured(other, 1.5)) == {owner}
    assert (
        told(*refused, measured(kind, 0.9)) == told(*warned, STEP) == told(*warned, reached, *warned, STEP) == {owner}
    )
    ended = evidence_of(record, (reached, STEP, *refused), failure=refused[-1], recoveries=restarted)
    assert named(ended) == {owner}


def start(host: str = "algo-1", rank: int = 0, hosts: int = 2) -> str:
    """What a host says as it starts its ranks (trainer.host.run)."""
    command = f"-m trainer.torchrun --nnodes {hosts} --node-rank {rank} --nproc-per-node 8"
    return f"{host} entrypoint: {host}: /opt/trainyard/bin/python {command}"


def step(number: int) -> str:
    return STEP.replace("step=900", f"step={number}")


STARTS = (start(), start("algo-2", 1))
PASSED = {name: case for name, case in FAULTS.items() if case[1] and case[1] != "efa_not_used"} | {
    name: FAULTS[name] for name in ("efa refused", "below the floor between hosts")
}


@pytest.mark.parametrize("fault", sorted(PASSED))
def test_what_a_later_start_ran_past_is_no_fault_and_is_told(record: JobRecord, fault: str) -> None:
    """Its consequences aren't either: no other runbook takes them up."""
    lines, owner = PASSED[fault]
    assert owner is not None

    def told(*more: str, **others: Any) -> set[str]:
        return named(evidence_of(record, (*STARTS, step(40), *lines, *more), state="Training", **others))

    assert told() == told(*STARTS) == told(*STARTS, *lines) == {owner}
    assert told(*STARTS, step(30), step(60)) == set()
    first = evidence_of(record, (*STARTS, *lines, *STARTS, step(1)), state="Training")
    assert named(first) == set(), "it ended before its first step"
    # Elsewhere the hosts have other names.
    assert told(start("node-3"), step(60)) == told(start("this machine"), step(60)) == set()
    assert told(*STARTS, step(60), *lines) == {owner}
    over = evidence_of(record, (*STARTS, step(40), *lines, *STARTS, step(60)), state="Training")
    happened = [one for one in found(owner, over) if "a later start ran past it" in one.words]
    assert [one.kind for one in happened] == ["clear"]
    assert any(line.strip()[:150] in happened[0].decided_by[0] for line in lines)


def test_a_start_that_is_still_on_its_way_to_where_the_last_one_ended_proves_nothing(record: JobRecord) -> None:
    """A job is resumed from before; and a host may print a step after another host's last line."""
    for fault in ("device memory", "xid 79", "watchdog", "diverged"):
        lines, owner = FAULTS[fault]
        on_the_way = evidence_of(record, (*STARTS, step(40), *lines, *STARTS, step(30), step(40)), state="Training")
        raced = evidence_of(record, (*STARTS, step(40), *lines, step(41)), state="Training")
        assert named(on_the_way) == named(raced) == {owner}
        ended = (*STARTS, step(40), *lines, *STARTS, step(60))
        assert named(evidence_of(record, ended, failure=lines[0])) == {owner}, "it ended by it again"
        # The machine's own log is read after the job's, which says nothing of its times.
        kernel = evidence_of(record, (*STARTS, step(40), *STARTS, step(60), *lines), state="Training")
        assert named(kernel) == {owner}


@pytest.mark.parametrize(("warned", "owner"), [(WARNED_BETWEEN, "efa_not_used"), (WARNED_INSIDE, "bad_node")])
def test_a_warning_is_of_the_start_that_gave_it(record: JobRecord, warned: tuple[str, ...], owner: str) -> None:
    """A later one may measure nothing: alone on its host, or told not to."""

    def told(*lines: str) -> set[str]:
        return named(evidence_of(record, lines, state="Training"))

    assert told(*STARTS, *warned, step(40)) == told(*STARTS, *warned, step(40), *STARTS) == {owner}
    assert told(*STARTS, *warned, step(40), *STARTS, step(30)) == set()
    assert told(*STARTS, step(40), *STARTS, *warned, step(30)) == {owner}


def test_the_newest_start_that_tells_of_its_network_decides(record: JobRecord) -> None:
    whole, part = GOOD_EFA[3:6], PARTIAL_EFA
    for worse in (TCP_SOCKETS, TCP_LIBFABRIC, part):

        def told(*lines: str) -> set[str]:
            return named(evidence_of(record, lines, state="Training"))

        assert told(*STARTS, *worse, step(40), *STARTS, *whole, step(30)) == set()
        assert told(*STARTS, *whole, step(40), *STARTS, *worse, step(30)) == {"efa_not_used"}
        # One that tells nothing overtakes nothing, and within a start the worst decides.
        assert told(*STARTS, *worse, step(40), *STARTS, step(60)) == {"efa_not_used"}
        assert told(*STARTS, *worse, *whole, step(40)) == told(*STARTS, *whole, *worse, step(40)) == {"efa_not_used"}
    two = transport((*STARTS, *TCP_LIBFABRIC, step(40), *STARTS, *whole))
    assert (two.providers, two.num_nics, two.uses_sockets) == (("efa",), 32, False)


def test_the_lines_by_which_starts_are_known_are_the_hosts_own() -> None:
    """As its source has them: another wording there would make every start one."""
    source = (Path(__file__).resolve().parents[2] / "training_container/trainer/host/run.py").read_text()
    assert "say(f\"entrypoint: {self._place.host}: {' '.join(self._command(resolved))}\")" in source
    assert '*(sys.executable, "-m", "trainer.torchrun"),\n            *("--nnodes", ' in source
    assert 'str(len(self._place.hosts)), "--node-rank", str(self._place.index)),' in source


def of_files(*logs: tuple[str, ...], files: bool = False) -> tuple[str, ...]:
    """One machine's log after the other's, as Slurm's backend reads them; `files`: as files that a person gives."""
    told = [line.partition(" ")[2] for log in logs for line in log]
    if files:
        return tuple(told)
    names = [f"node-{number}" for number, log in enumerate(logs) for _ in log]
    return tuple(f"{name} {line}" for name, line in zip(names, told, strict=True))


@pytest.mark.parametrize("files", [False, True])
def test_the_network_of_every_machine_counts_where_their_logs_come_one_after_the_other(files: bool) -> None:
    whole, part, tcp = GOOD_EFA[3], PARTIAL_EFA[1], TCP_LIBFABRIC[1]
    first, second = start("node1"), start("node2", 1)

    def seen(here: tuple[str, ...], there: tuple[str, ...]) -> tuple[tuple[str, ...], int | None]:
        found = transport(of_files(here, there, files=files))
        return found.providers, found.num_nics

    assert seen((first, tcp, step(40)), (second, whole)) == (("tcp", "efa"), 32)
    assert seen((first, whole, step(40)), (second, part)) == (("efa",), 4)
    # Of the newest start alone, on both.
    assert seen((first, tcp, step(40), first, whole, step(50)), (second, tcp, second, whole)) == (("efa",), 32)
    assert seen((first, whole, step(40), first, tcp, step(50)), (second, whole, second, whole)) == (("tcp", "efa"), 32)


@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("fault", ["first host gone", "device memory", "nccl error", "efa refused"])
def test_what_another_machine_said_is_over_by_the_steps_of_the_first(
    record: JobRecord, fault: str, files: bool
) -> None:
    spec = record.resolved.spec
    bought = spec.model_copy(update={"compute": spec.compute.model_copy(update={"spot": False})})
    on_demand = record.model_copy(update={"resolved": record.resolved.model_copy(update={"spec": bought})})
    lines, owner = FAULTS[fault][0], FAULTS[fault][1] or "bad_node"
    first, second = start("node1"), start("node2", 1)

    def told(here: tuple[str, ...], there: tuple[str, ...], more: tuple[str, ...] = ()) -> set[str]:
        told = (*of_files(here, there, files=files), *more)
        return named(evidence_of(on_demand, told, state="Training"))

    past = (first, step(40), first, step(30), step(60))
    assert told(past, (second, *lines, second)) == set()
    if not files:  # a machine that has not said its name yet
        assert told((first, step(60)), (*lines, second)) == set(), "before its first start"
    # The newest start's, or that one is on its way yet.
    assert told(past, (second, second, *lines)) == {owner}
    assert told((first, step(40), first, step(30)), (second, *lines, second)) == {owner}
    # It took part in the first and the third: the second went on with one host.
    alone = start("node1", hosts=1)
    grown = (first, step(40), alone, step(60), first, step(80))
    assert told(grown, (second, *lines, second)) == set()
    assert told(grown, (second, second, *lines)) == {owner}
    # The first lines of the first machine are not there any more: nothing is taken for over.
    assert told((first, step(60)), (second, second, *lines)) == {owner}


def test_cards_that_a_later_start_had_are_not_missing(record: JobRecord) -> None:
    assert named(evidence_of(record, (*EFA_REFUSED, STEP), state="Training")) == set()
    assert named(evidence_of(record, (STEP, *EFA_REFUSED))) == {"efa_not_used"}


def test_lines_that_are_missing_are_asked_for_in_a_way_that_the_job_can_go(record: JobRecord) -> None:
    """A job that runs is stopped first, one that has ended is resumed, a completed one can only be run again."""
    asked = {
        state: found("efa_not_used", evidence_of(record, ("nothing",), state=state))[0].then[0]
        for state in ("Training", "Failed", "Completed")
    }
    assert [line.split()[1] for line in asked.values()] == ["stop", "resume", "launch"], asked
    assert all(line.endswith(" --set preflight.nccl_log=true") for line in asked.values())


XID_45 = "NVRM: Xid (PCI:0000:44:00): 45, pid=7062, name=python3, Ch 00000008"
LOST = [HOST_GONE, FIRST_HOST_GONE, (*HOST_GONE, *NCCL_REMOTE, *WATCHDOG), HOST_KILLED, FIRST_HOST_KILLED]


@pytest.mark.parametrize("lines", [*LOST, (*HOST_GONE, XID_45), (XID_OF_A_PROGRAM, *HOST_KILLED, XID[63])])
def test_a_lost_host_is_a_bad_one_unless_spot_capacity_may_have_been_taken(
    record: JobRecord, lines: tuple[str, ...]
) -> None:
    spec = record.resolved.spec
    bought = spec.model_copy(update={"compute": spec.compute.model_copy(update={"spot": False})})
    on_demand = record.model_copy(update={"resolved": record.resolved.model_copy(update={"spec": bought})})
    assert named(evidence_of(on_demand, lines)) == {"bad_node"}
    (told,) = found("bad_node", evidence_of(record, lines))
    assert (told.kind, told.then[0].split()[:2]) == ("unknown", ["trainyard", "status"])
    for one in (record, on_demand):
        (_, other) = found("nccl_error", evidence_of(one, lines))
        assert (other.kind, other.then[0].split()[0]) == ("neighbour", "scripts/runbooks/bad_node")
        assert "bad_node" in named(evidence_of(one, (*lines, XID[79]))), "the kernel's log says what it was"


def test_what_is_asked_of_an_environment_is_asked_of_the_jobs_own(record: JobRecord) -> None:
    """`trainyard doctor` and `trainyard jobs` would else be asked of this machine's, and find all well."""
    where = ("--environment", "production", "--tenant", "acme")
    for name, lines, its in (
        ("nccl_error", FAULTS["access denied"][0], where),
        ("job_hung", FAULTS["image pull"][0], where),
        ("efa_not_used", TCP_SOCKETS, where),
        ("capacity_or_quota_short", QUOTA_OF_TENANT, where),
        # The account's quota may be held by any tenant's jobs.
        ("capacity_or_quota_short", QUOTA, where[:2]),
    ):
        told = found(name, replace(evidence_of(record, lines), where=where))
        asked = [line for one in told for line in one.then if line.startswith(("trainyard doctor", "trainyard jobs"))]
        assert asked and all(tuple(shlex.split(line, comments=True)[2:]) == its for line in asked), told


PLAN = {"step": 1.0, "communication": 0.05}
STRAGGLER = {"rank": 3, "host": "algo-2", "own_seconds": 1.4, "peers_seconds": 0.7}


def observed(of_plan: float | None, *stragglers: dict[str, Any], held_back: float | None = None) -> dict[str, Any]:
    gpu = {"utilization": 0.97, "held_back": held_back, "held_back_rank": 3, "held_back_host": "algo-2"}
    told = {"gpu": None if held_back is None else gpu}
    return {"throughput": {"of_plan": of_plan}, "stragglers": list(stragglers), "leaks": [], **told}


SLOW = {
    "data": rows_of(60, seconds=1.5, data=0.6, observed=observed(0.66)),
    "communication": rows_of(60, seconds=1.5, communication=0.55, observed=observed(0.66)),
    "straggler": rows_of(60, seconds=1.5, communication=0.6, observed=observed(0.66, STRAGGLER)),
    "throttling": [
        *rows_of(40, observed=observed(1.0)),
        *rows_of(40, first_step=41, seconds=1.5, observed=observed(0.66)),
    ],
    "checkpoint": rows_of(60, seconds=1.5, checkpoint=0.5, observed=observed(0.66)),
}


@pytest.mark.parametrize("cause", sorted(SLOW))
def test_what_makes_a_job_slow_is_told_apart(record: JobRecord, cause: str) -> None:
    judged = speed(SLOW[cause], PLAN)
    assert judged is not None and [one.cause for one in judged.slow] == [cause], judged
    assert named(evidence_of(record, (), SLOW[cause], state="Training", planned=PLAN)) == {"job_slow"}


def test_clocks_that_the_driver_says_are_held_back_are_throttling_from_the_first_step_on(record: JobRecord) -> None:
    """Without better times before to compare with; where all keep up, and in a cool GPU's now and then, it is none."""
    for of_plan, share, causes in ((0.66, 0.6, ["throttling"]), (0.97, 0.6, []), (0.66, 0.1, [])):
        judged = speed(rows_of(60, seconds=1.5, observed=observed(of_plan, held_back=share)), PLAN)
        assert judged is not None and [one.cause for one in judged.slow] == causes
    rows = rows_of(60, seconds=1.5, observed=observed(0.66, held_back=0.6))
    evidence = evidence_of(record, (), rows, state="Training", planned=PLAN)
    assert named(evidence) == {"job_slow"}
    assert "60% of the time, by the driver: worst on rank 3, algo-2" in decided(found("job_slow", evidence))
    hot = speed(rows_of(60, seconds=1.5, observed=observed(0.66, STRAGGLER, held_back=0.6)), PLAN)
    assert hot is not None and [one.cause for one in hot.slow] == ["straggler"], "the others wait for it: one cause"
    assert "by the driver" in hot.slow[0].words


def test_clocks_that_are_held_back_on_another_rank_than_the_slow_one_are_a_second_cause() -> None:
    """And they are told by one row: a later one may hold other figures of the GPUs alone."""
    told = observed(0.66, STRAGGLER, held_back=0.6)
    rows = rows_of(60, seconds=1.5, observed=told | {"gpu": told["gpu"] | {"held_back_rank": 7}})
    none = {"utilization": 0.9, "held_back": None, "held_back_rank": None, "held_back_host": None}
    rows[-1]["observed"] = told | {"gpu": none}
    judged = speed(rows, PLAN)
    assert judged is not None and [one.cause for one in judged.slow] == ["straggler", "throttling"]
    assert "by the driver" not in judged.slow[0].words and judged.slow[1].words.endswith("worst on rank 7, algo-2")


def test_without_a_plan_clocks_that_are_held_back_count_where_the_job_is_slower_than_it_was() -> None:
    told = observed(None, held_back=0.6)
    usual = speed(rows_of(60, observed=told), {})
    assert usual is not None and usual.is_below_plan is None and usual.slow == ()
    # A single fast step is no better time.
    once = [*rows_of(53, seconds=1.5, observed=told), *rows_of(1, first_step=54, observed=told)]
    lucky = speed(once, {})
    assert lucky is not None and lucky.slow == ()
    slower = [*rows_of(40, observed=told), *rows_of(40, first_step=41, seconds=1.5, observed=told)]
    judged = speed(slower, {})
    assert judged is not None and [one.cause for one in judged.slow] == ["throttling"]
    assert "by the driver" in judged.slow[0].words


def test_a_job_that_keeps_up_is_not_slow_and_one_unlucky_window_is_no_straggler(record: JobRecord) -> None:
    once = [*rows_of(50, observed=observed(0.97)), *rows_of(9, first_step=51), *rows_of(1, first_step=60)]
    once[-1]["observed"] = observed(0.97, STRAGGLER)
    for rows in (rows_of(60, communication=0.3, observed=observed(0.97)), once):
        assert named(evidence_of(record, (), rows, state="Training", planned=PLAN)) == set()
    below = evidence_of(record, (), rows_of(60, observed=observed(0.5)), state="Training", planned=PLAN)
    assert "no phase of the step shows why" in found("job_slow", below)[0].words


@pytest.mark.parametrize(("times", "causes"), [(2, []), (3, ["straggler"])])
def test_a_straggler_is_named_by_half_of_the_last_comparisons(times: int, causes: list[str]) -> None:
    rows = rows_of(60, observed=observed(0.66))  # six comparisons
    for row in rows[-10 * times + 9 :: 10]:
        row["observed"] = observed(0.66, STRAGGLER)
    judged = speed(rows, PLAN)
    assert judged is not None and [one.cause for one in judged.slow] == causes


def test_the_first_steps_of_each_attempt_which_load_and_compile_are_no_measure() -> None:
    loads = rows_of(WARM_STEPS, seconds=30.0)
    again = [{**row, "attempt": 2} for row in [*loads, *rows_of(4, first_step=WARM_STEPS + 1, seconds=2.0)]]
    judged = speed(again, {})
    assert judged is not None and (judged.num_steps, judged.step_seconds) == (4, 2.0)
    both = speed([*loads, *rows_of(6, first_step=WARM_STEPS + 1, seconds=1.0), *again], {})
    assert both is not None and (both.num_steps, both.of_best) == (10, 1.0)
    only = speed(loads, {})
    assert only is not None and only.step_seconds == 30.0, "there is nothing else yet"


def test_steps_whose_parts_were_not_measured_are_no_better_times() -> None:
    unmeasured = [{**row, "breakdown": dict.fromkeys(row["breakdown"], 0.0)} for row in rows_of(40)]
    judged = speed([*unmeasured, *rows_of(30, first_step=41, seconds=1.1)], {})
    assert judged is not None and judged.slow == ()


def test_a_tenants_own_limit_says_which_of_its_jobs_are_slow(record: JobRecord) -> None:
    """What rings is what is explained: the alarm has the tenant's limit too."""
    rows = rows_of(60, seconds=1.2, communication=0.4, observed=observed(0.8))
    for least, names in ((0.85, {"job_slow"}), (0.75, set())):
        told = evidence_of(record, (), rows, state="Training", planned=PLAN, least_of_plan=least)
        assert named(told) == names


def test_data_that_lie_on_lustre_are_the_file_systems_affair(record: JobRecord) -> None:
    lustre = record.model_copy(
        update={"channels": (record.channels[0].model_copy(update={"kind": "fsx", "uri": "fsx://tokens"}),)}
    )
    slow = evidence_of(lustre, (), SLOW["data"], state="Training", planned=PLAN)
    assert named(slow) == {"job_slow", "fsx_full_or_slow"}
    assert "fsx://tokens" in found("fsx_full_or_slow", slow)[0].words


def test_a_job_that_diverged_before_its_first_save_begins_anew(record: JobRecord) -> None:
    """There is nothing to copy then; where one is there, or may be, it goes on from before."""
    gone = [*rows_of(3), *rows_of(1, first_step=4)]
    gone[-1]["loss"] = None
    away = {"checkpoints": "AccessDenied"}
    for kept, missing, copies in (((), {}, False), ((checkpoint(2),), {}, True), ((), away, True)):
        (told, *_) = found("loss_diverged", evidence_of(record, (), gone, checkpoints=kept, missing=missing))
        assert any("checkpoints copy" in line for line in told.then) is copies
        assert ("checkpoint.destination=FOLDER" in told.then[-1]) is copies
        assert told.then[-1].startswith("trainyard launch JOB.yaml --set training.on_anomaly=rollback")


def test_silence_of_a_running_job_is_a_hang_only_beyond_its_limit(record: JobRecord) -> None:
    limit = record.resolved.spec.recovery.hang_seconds
    assert limit is not None
    running = {"state": "Training"}
    assert named(evidence_of(record, (), silent_seconds=limit / 2, **running)) == set()
    assert named(evidence_of(record, (), silent_seconds=limit + 1, **running)) == {"job_hung"}


def test_a_loss_that_climbs_jumps_or_is_no_number_diverged(record: JobRecord) -> None:
    climbs = [*rows_of(40, loss=2.0), *rows_of(20, first_step=41, loss=9.0)]
    gone = [*rows_of(30), *rows_of(1, first_step=31)]
    gone[-1]["loss"] = None
    assert "was 2 about step" in diverged(climbs) and "is 9 at step 60" in diverged(climbs)
    assert diverged(gone) == "loss of step 31 is no number"
    assert named(evidence_of(record, (), gone)) == {"loss_diverged"}
    skipped = [*rows_of(30), {**rows_of(1, first_step=31)[0], "grad_norm": None, "skipped": True}]
    noisy = [row for step in range(60) for row in rows_of(1, first_step=step + 1, loss=2.0 + 0.4 * (step % 3))]
    assert (diverged(skipped), diverged(noisy)) == ("", "")
    negative = [*rows_of(40, loss=-3.0), *rows_of(20, first_step=41, loss=-2.5)]
    assert diverged(negative) == "", "of a loss below zero twice the best is less, and no divergence"


def checkpoint(step: int, *, problem: str = "", committed: bool = True) -> Checkpoint:
    return Checkpoint(step, f"s3://acme-checkpoints/step-{step}/", 3, 100, committed, problem)


def test_a_spoiled_checkpoint_and_a_stale_one_are_told_with_what_is_lost(record: JobRecord) -> None:
    altered = "rank-0.bin is altered (its SHA-256 is not the manifest's)"
    spoiled = evidence_of(record, (), rows_of(22), checkpoints=(checkpoint(15), checkpoint(20, problem=altered)))
    (told,) = found("checkpoint_stale_or_corrupt", spoiled)
    assert "goes back to step 15" in told.words and altered in told.decided_by[0]
    assert named(spoiled) == {"checkpoint_stale_or_corrupt"}
    # The record's job saves every 5 steps: 40 since the newest commit are eight intervals.
    late = evidence_of(record, SAVE_FAILED, rows_of(45), state="Training", checkpoints=(checkpoint(5),))
    assert "40 steps" in decided(found("checkpoint_stale_or_corrupt", late))
    assert "not committed" in decided(found("checkpoint_stale_or_corrupt", late))
    on_its_way = checkpoint(25, problem="it has no COMMITTED marker", committed=False)
    good = evidence_of(record, (), rows_of(22), state="Training", checkpoints=(checkpoint(20), on_its_way))
    assert named(good) == set(), "a save on its way is no spoiled checkpoint"
    torn = evidence_of(record, (), rows_of(22), checkpoints=(checkpoint(20), on_its_way))
    assert named(torn) == set(), "the job ended in the middle of its save: nothing that was promised is gone"
    unread = evidence_of(record, (), missing={"checkpoints": "AccessDenied"})
    assert found("checkpoint_stale_or_corrupt", unread)[0].kind == "unknown"


def test_a_checkpoint_that_cant_be_read_is_no_spoiled_one_and_hides_no_other(record: JobRecord) -> None:
    unread = replace(checkpoint(20, problem="AccessDenied"), is_readable=False)
    why = {"checkpoints": "1 of 2 checkpoints can't be read (step 20): AccessDenied"}
    some = evidence_of(record, (), rows_of(22), checkpoints=(checkpoint(15), unread), missing=why)
    (told, *_) = found("checkpoint_stale_or_corrupt", some)
    assert told.kind == "unknown" and "step 20" in told.words
    climbs = [*rows_of(40, loss=2.0), *rows_of(20, first_step=41, loss=9.0)]
    diverging = evidence_of(record, (), climbs, checkpoints=(checkpoint(15), unread), missing=why)
    assert "1 good checkpoint, of step 15 (1 of 2 checkpoints can't be read" in decided(
        found("loss_diverged", diverging)
    )
    altered = checkpoint(15, problem="rank-0.bin is altered")
    spoiled = evidence_of(record, (), rows_of(22), checkpoints=(altered, unread), missing=why)
    (fault, *_) = found("checkpoint_stale_or_corrupt", spoiled)
    assert fault.kind == "fault" and "step 20 can't be read, and may be what a restart goes back to" in fault.words
    assert [line for line in fault.decided_by if "step 20" in line] == [], "nobody knows that it is spoiled"


def test_capacity_and_quota_need_different_people(record: JobRecord) -> None:
    (short,) = found("capacity_or_quota_short", evidence_of(record, (), failure=FAULTS["capacity"][0][0]))
    (limit,) = found("capacity_or_quota_short", evidence_of(record, QUOTA))
    assert "no capacity" in short.words and any("instance_count=1" in line for line in short.then)
    assert "quota" in limit.words and any(line.startswith("aws service-quotas") for line in limit.then)


def test_a_leak_is_told_before_memory_runs_out(record: JobRecord) -> None:
    leak = {"rank": 1, "host": "algo-1", "memory": "host", "bytes_per_step": 2**20}
    rows = rows_of(60, observed={**observed(1.0), "leaks": [leak]})
    assert "grows by 1.000 MiB a step" in decided(
        found("out_of_memory", evidence_of(record, (), rows, state="Training"))
    )


def test_what_needs_less_memory_is_something_that_the_job_can_have(record: JobRecord) -> None:
    """A job of this machine was told to take two machines, and one without a step to compare its plan with them."""
    lines = ("local RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.",)
    there = found("out_of_memory", evidence_of(record, lines))[0].then
    assert there[0].startswith("trainyard compare") and there[-1].endswith("compute.instance_count=4")
    here = record.model_copy(update={"backend": "local"})
    anew = replace(evidence_of(here, lines), rows=())
    then = found("out_of_memory", anew)[0].then
    assert not any("compare" in line or "instance_count" in line for line in then)
    assert any("activation_checkpointing=full" in line for line in then)
    assert then[-1].endswith(f"--set parallelism=auto --processes {record.resolved.world_size // 2}")


def test_an_attempts_first_steps_make_no_job_slow(record: JobRecord) -> None:
    """Of a job that ended at its third step the fault was said to be its data, which two steps had waited for."""
    (told, *_) = found("job_slow", evidence_of(record, (), rows_of(3, data=0.4)))
    assert told.kind == "unknown" and "first steps load and compile" in told.words
    (told, *_) = found("job_slow", evidence_of(record, (), rows_of(60, data=0.4)))
    assert told.kind == "fault" and told.words == "slow: data"


def test_what_is_over_is_not_shouted_about(record: JobRecord) -> None:
    for fault, (lines, owner) in FAULTS.items():
        assert owner is None or named(evidence_of(record, lines, state="Completed")) == set(), fault


def test_every_command_that_a_finding_names_is_one_that_exists(record: JobRecord) -> None:
    import typer

    from trainyard.cli.app import app

    verbs = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    root = Path(__file__).resolve().parents[2]
    cases = [evidence_of(record, lines) for lines, _ in FAULTS.values()]
    cases += [evidence_of(record, (), rows, state="Training", planned=PLAN) for rows in SLOW.values()]
    commands = {line for one in cases for name in DIAGNOSING for told in found(name, one) for line in told.then}
    for line in commands:
        for part in line.partition("   #")[0].replace(" && ", ";").split(";"):
            words = shlex.split(part)
            if words[0] == "trainyard":
                assert words[1] in verbs, line
                settings = [word for before, word in itertools.pairwise(words) if before == "--set"]
                if words[1] == "resume" and settings:
                    reviser(settings, None)
            if words[0].startswith("scripts/"):
                assert (root / words[0]).is_file(), line


def test_commands_lead_to_where_the_job_is(record: JobRecord) -> None:
    """At night they are pasted: without its environment a job is looked for on this machine."""
    where = ("--environment", "environments/our own.yaml", "--tenant", "acme")
    cases = [replace(evidence_of(record, lines), where=where) for lines, _ in FAULTS.values()]
    cases += [
        replace(evidence_of(record, (), rows, state="Training", planned=PLAN), where=where) for rows in SLOW.values()
    ]
    lines = {line for one in cases for name in DIAGNOSING for told in found(name, one) for line in told.then}
    lines = {line.partition("   #")[0] for line in lines}
    assert sum(record.job_id in line for line in lines) > 10
    for line in lines:
        for part in re.split(r" && |; ", line):
            assert record.job_id not in part or shlex.join((record.job_id, *where)) in part, line


@pytest.mark.parametrize("runbook", RUNBOOKS, ids=lambda one: one.name)
def test_the_example_of_its_help_is_one_that_it_takes(runbook: Runbook, capsys: pytest.CaptureFixture[str]) -> None:
    script, *arguments = shlex.split(runbook.example_words)
    assert script == f"scripts/runbooks/{runbook.name}"
    assert parser_of(runbook).parse_args(arguments).environment in ("production", "local")
    with pytest.raises(SystemExit) as ended:
        parser_of(runbook).parse_args(["--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0 and f"example: {runbook.example_words}" in told and "3 AWS refused" in told
    assert command.main([runbook.name, "--no-such-option", "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trainyard: ") and line.endswith(f"(see scripts/runbooks/{runbook.name} --help)")


def test_pages_and_scripts_are_there_for_every_runbook() -> None:
    root = Path(__file__).resolve().parents[2]
    index = (root / "docs/runbooks/README.md").read_text()
    for runbook in RUNBOOKS:
        script, page = root / "scripts/runbooks" / runbook.name, root / "docs/runbooks" / f"{runbook.name}.md"
        assert script.stat().st_mode & 0o111 and f"runbooks {runbook.name} " in script.read_text()
        text = page.read_text()
        for heading in ("## When", "## What it looks at", "## What it changes", "## What it can't know"):
            assert heading in text, f"{page}: {heading}"
        assert f"({runbook.name}.md)" in index, f"{runbook.name} is not in the index"
    names = {runbook.name for runbook in RUNBOOKS}
    assert {path.name for path in (root / "scripts/runbooks").iterdir()} == names
    assert {path.stem for path in (root / "docs/runbooks").glob("*.md")} == {*names, "README"}


def test_a_page_that_an_alarm_or_a_document_names_is_there() -> None:
    root = Path(__file__).resolve().parents[2]
    readers = [*(root / "stacks").rglob("*.py"), *(root / "trainyard").rglob("*.py"), *(root / "docs").rglob("*.md")]
    readers += [*(root / "dashboards").iterdir()]
    for path in readers:
        for page in re.findall(r"docs/runbooks/[A-Za-z0-9_-]+\.md", path.read_text(encoding="utf-8")):
            assert (root / page).is_file(), f"{path} names {page}"
