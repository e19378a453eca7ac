"""What the flight recorders of ranks that hang say together: who is missing in which collective."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from trainer import heartbeat
from trainer.host.hosts import Judge, ManyHosts, OneHost
from trainer.host.recovery import Ending, Restart, RestartPolicy, cause
from trainer.host.standings import Standing, answer_file, asked, mismatch
from trainer.observe import flight_recorder
from trainer.observe.flight_recorder import flight_record, standing_of, told_when_asked
from trainer.rendezvous import PATIENT
from trainer_testing.distributed import free_port
from trainer_testing.pool import start_pooled

from trainyard.spec.job import RecoverySpec

REDUCE, GATHER = "all_reduce of 8 Float", "all_gather of 4 Float"


def group(ranks: list[int], *calls: str, num_done: int | None = None) -> dict[str, Any]:
    """A rank that has called these, of which all but the last are done."""
    done = max(0, len(calls) - 1) if num_done is None else num_done
    numbered = {str(number): call for number, call in enumerate(calls)}
    return {"ranks": ranks, "last": len(calls) - 1, "calls": numbered, "open": list(range(done, len(calls)))}


def words(**told: dict[str, Any]) -> tuple[str, int | None]:
    found = mismatch({int(name.removeprefix("r")): groups for name, groups in told.items()})
    assert found is not None
    return found.words, found.rank


def test_who_has_not_called_it_is_missing() -> None:
    late = group([0, 1, 2], REDUCE, num_done=1)
    waiting = group([0, 1, 2], REDUCE, GATHER)
    assert words(r0={"dp": waiting}, r1={"dp": late}, r2={"dp": waiting}) == (
        "rank 1 has not called all_gather of 4 Float, number 1 of ranks 0, 1, 2, in which ranks 0, 2 wait",
        1,
    )
    assert words(r0={"dp": waiting}, r1={}, r2={"dp": waiting})[1] == 1, "it never called anything there"


def test_who_waits_in_a_message_is_not_the_cause() -> None:
    # 2 waits for 0 and 1; 0 for a message of 1, which is at something else.
    late, waits = group([0, 1, 2], REDUCE, num_done=1), group([0, 1, 2], REDUCE, GATHER)
    messages = {"ranks": [0, 1], "last": -1, "calls": {}, "open": []}
    for named, told in ((1, {"pp": messages | {"messages": True}}), (0, {"pp": messages})):
        assert words(r0={"dp": late, **told}, r1={"dp": late}, r2={"dp": waits})[1] == named


def test_who_waits_for_nobody_is_the_cause_of_a_chain() -> None:
    # 0 waits for 1 in one group, 1 for 2 in another, and 2 is at something else.
    chain: dict[int, Standing] = {
        0: {"a": group([0, 1], REDUCE)},
        1: {"a": group([0, 1]), "b": group([1, 2], GATHER)},
        2: {"b": group([1, 2])},
    }
    found = mismatch(chain)
    assert found is not None and found.rank == 2 and "number 0 of ranks 1, 2" in found.words


def test_another_collective_or_another_size_is_told_with_who_called_what() -> None:
    said, rank = words(**{f"r{rank}": {"dp": group([0, 1, 2], REDUCE if rank else GATHER)} for rank in range(3)})
    assert said == (
        "collective 0 of ranks 0, 1, 2 is all_gather of 4 Float on rank 0 and all_reduce of 8 Float on ranks 1, 2"
    )
    assert rank == 0
    assert words(r0={"dp": group([0, 1], REDUCE)}, r1={"dp": group([0, 1], GATHER)})[1] is None, "either may be wrong"


def test_a_rank_that_gives_no_answer_is_named_and_a_dead_network_is_told() -> None:
    ranks = [*range(9), 20]
    waiting = {"dp": group(ranks, REDUCE)}
    said, rank = words(r0=waiting, r20=waiting)
    assert said.startswith(
        f"ranks 0, 20 wait in {REDUCE}, number 0 of 10 ranks (0, 1, 2, 3, 4, 5, 6 ... 20); no answer"
    )
    assert rank == 1
    both = {"dp": group([0, 1], REDUCE)}
    said, rank = words(r0=both, r1=both)
    assert said.endswith("number 0 of ranks 0, 1: the network or a device stands still") and rank is None
    assert mismatch({}) is None and mismatch({0: {"dp": group([0], REDUCE, num_done=1)}}) is None


def entry(number: int, name: str = "gloo:all_reduce", **changes: Any) -> dict[str, Any]:
    """As FlightRecorder.hpp writes it."""
    return {
        "process_group": ["1", "dp"], "collective_seq_id": number, "profiling_name": name, "input_sizes": [[2, 3]],
        "input_dtypes": ["Float"], "state": "scheduled", "retired": True, "is_p2p": False, "p2p_seq_id": 0,
    } | changes  # fmt: skip


def test_a_record_is_read_by_group_without_saves_and_messages() -> None:
    entries = [
        entry(1),
        entry(2, "nccl:_reduce_scatter_base", state="completed", retired=False),
        entry(3, "gloo:all_to_all", retired=False),
        entry(4, input_sizes=[[], [7]], input_dtypes=["Long", "Float"], retired=False, state="started"),
        entry(9, process_group=["2", PATIENT], retired=False),
        entry(9, is_p2p=True),
    ]
    alone = entry(1, process_group=["3", "mesh_tp"], retired=False)
    record = {"gloo": {"entries": [*entries, alone]}, "nccl": {}, "groups": {"1": [0, 3], "2": [0, 3], "3": [0]}}
    (standing,) = standing_of(record).values()
    assert standing == {
        "ranks": [0, 3],
        "last": 4,
        "calls": {"1": "all_reduce of 2x3 Float", "2": "reduce_scatter_base of 2x3 Float", "3": "all_to_all",
                  "4": "all_reduce of 1 and 1 more Float/Long"},
        "open": [3, 4],
    }  # fmt: skip


def test_of_messages_sent_together_the_last_entry_tells_whether_they_ended() -> None:
    def told(**last: Any) -> bool:
        sent = [entry(0, "nccl:recv 0<-1", is_p2p=True, p2p_seq_id=number, retired=False) for number in (1, 2)]
        whole = [entry(0, "nccl:coalesced", is_p2p=True, p2p_seq_id=number) | last for number in (1, 2)]
        entries = [sent[0], whole[0] | {"retired": True}, sent[1], whole[1]]
        (standing,) = standing_of({"nccl": {"entries": entries}, "groups": {"1": [0, 3]}}).values()
        assert standing["open"] == [] and standing["last"] == -1
        return standing.get("messages", False)

    assert told(retired=False) and not told() and not told(retired=False, state="completed")


def test_hosts_put_their_ranks_answers_together() -> None:
    waits, late = {"dp": group([0, 1], REDUCE)}, {"dp": group([0, 1])}
    one = Ending(1, "rank 0 on algo-1 hangs", is_hang=True, standings={"0": waits})
    other = Ending(1, "torchrun failed", is_consequence=True, standings={"1": late})
    reason = cause({"algo-1": one, "algo-2": other}).reason
    assert reason.startswith("rank 0 on algo-1 hangs; rank 1 has not called all_reduce of 8 Float, number 0 of ranks")
    assert cause({"algo-1": one, "algo-2": other}).standings == {}, "nobody needs them any more"
    assert cause({"algo-1": Ending(1, "rank 0 on algo-1 hangs", is_hang=True)}).reason == "rank 0 on algo-1 hangs"


def test_a_host_that_sees_a_hang_has_the_others_look_too_and_all_hear_the_same() -> None:
    port = free_port()
    judge = Judge(
        ["algo-1", "algo-2"], "127.0.0.1", port, RestartPolicy(RecoverySpec(max_restarts=1)), arrival_seconds=600
    )
    first, second = (
        ManyHosts(host, "127.0.0.1", port, judge=judge if host == "algo-1" else None, patience_seconds=60)
        for host in ("algo-1", "algo-2")
    )
    waits, late = {"dp": group([0, 1], REDUCE)}, {"dp": group([0, 1])}
    try:
        assert second.tell_of_hang() and not OneHost(RestartPolicy(RecoverySpec())).tell_of_hang()
        until = time.monotonic() + 60
        while first.wants_stop() != "hang":
            assert time.monotonic() < until
            time.sleep(0.01)
        second.tell_of_answers()
        assert not first.have_answered() and not second.have_answered(), "the first one's are missing"
        first.tell_of_answers()
        while not (first.have_answered() and second.have_answered()):
            assert time.monotonic() < until
            time.sleep(0.01)
        ended = {
            first: Ending(1, "rank 0 on algo-1 hangs", is_hang=True, is_consequence=True, standings={"0": waits}),
            second: Ending(1, "rank 1 on algo-2 hangs", is_hang=True, standings={"1": late}),
        }
        with ThreadPoolExecutor(2) as pool:
            orders = list(pool.map(lambda host: host.conclude(ended[host]), ended))
        assert first.wants_stop() is None, "the next start is not stopped"
        assert not first.have_answered() and not second.have_answered()
    finally:
        second.close()
        first.close()
    assert all(isinstance(order, Restart) for order in orders)
    assert {order.failure.reason for order in orders if isinstance(order, Restart)} == {
        f"rank 1 on algo-2 hangs; rank 1 has not called {REDUCE}, number 0 of ranks 0, 1, in which rank 0 waits"
    }


def test_a_rank_answers_from_a_thread_and_who_does_not_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "_LOOK_SECONDS", 0.01)
    monkeypatch.setenv(heartbeat.FILE_VARIABLE, str(tmp_path / "heartbeat-3"))
    monkeypatch.setenv("RANK", "3")
    with told_when_asked():
        assert asked(tmp_path, [3], answer_seconds=60.0)[3]["record"].keys() == flight_record().keys() > set()
    answer_file(tmp_path, 5).write_text("{torn")
    assert asked(tmp_path, [4, 5], answer_seconds=0.0) == {}
    assert asked(tmp_path / "gone", [0], answer_seconds=0.0) == {}, "nobody can be asked, as on a full disk"


def test_nobody_listens_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(heartbeat.FILE_VARIABLE, raising=False)
    with told_when_asked():
        assert "collectives" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("missing", "rank 1 has not called all_reduce of 8 Float, number 2 of ranks 0, 1, in which rank 0 waits"),
        ("other", "collective 2 of ranks 0, 1 is all_reduce of 8 Float on rank 0 and all_gather of 5 Float on rank 1"),
    ],
)
def test_ranks_that_hang_tell_where_they_stand(how: str, expected: str, tmp_path: Path) -> None:
    ranks = start_pooled(2, "trainer_testing.standing_worker", str(tmp_path), how)
    try:
        until = time.monotonic() + 120
        while not all((tmp_path / f"called-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < until and [rank.poll() for rank in ranks] == [None, None]
            time.sleep(0.02)
        answers = asked(tmp_path, range(2), answer_seconds=60.0)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=60)
    found = mismatch({rank: answer["standing"] for rank, answer in answers.items()})
    assert found is not None and found.words == expected, answers
    assert all(answer["record"]["gloo"]["entries"] for answer in answers.values())
