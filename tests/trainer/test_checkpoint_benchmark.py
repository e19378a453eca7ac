"""The checkpoint benchmark's arithmetic: ratios are taken turn by turn, and a missed goal is one."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def turns(*blocked_and_restore: tuple[float, float]) -> list[dict[str, float]]:
    """One a pair."""
    return [{"blocked": blocked, "saved": 2.0, "restore": restore} for blocked, restore in blocked_and_restore]


def judged(monkeypatch: pytest.MonkeyPatch, ours: list[dict[str, float]], *, copy: float = 0.1) -> dict[str, Any]:
    """What the benchmark says of these seconds."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    judge = runpy.run_path(str(BENCHMARKS / "checkpoint.py"))["_judged"]
    seconds = {
        "ours": ours,
        # Twice as slow a machine in the second turn: the ratio doesn't show it.
        "torch.save": turns((1.0, 1.0), (2.0, 2.0), (1.0, 1.0)),
        "dcp": turns((3.0, 1.0), (6.0, 2.0), (3.0, 1.0)),
        "dcp async": turns((0.2, 1.0), (0.4, 2.0), (0.2, 1.0)),
        "copy": turns((copy, 0.0), (2 * copy, 0.0), (copy, 0.0)),
        "disk": turns((1.0, 0.5), (2.0, 1.0), (1.0, 0.5)),
    }
    measured = {"state_mib": 100.0, "seconds": seconds, "has_spare_cores": True}
    result: dict[str, Any] = judge(measured)
    return result


def test_ratios_are_of_one_turn_and_goals_are_judged_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    good = judged(monkeypatch, turns((0.1, 0.5), (0.2, 1.0), (0.1, 0.5)))
    assert good["best_synchronous"] == "torch.save"
    assert (good["blocked_to_best_synchronous"], good["blocked_to_dcp_async"]) == (0.1, 0.5)
    assert (good["restore_speed_to_disk"], good["restore_to_dcp"]) == (1.0, 0.5)
    assert good["disk_mib_per_second"] == {"write": 50, "read": 200}
    assert all(good["goals_met"].values())
    bad = judged(monkeypatch, turns((0.3, 0.6), (0.6, 1.2), (0.3, 0.6)))
    assert list(bad["goals_met"].values()) == [False, False, False, True]
    bound = judged(monkeypatch, turns((0.3, 0.6), (0.6, 1.2), (0.3, 0.6)), copy=0.25)
    assert (bound["blocked_to_copy"], bound["copy_to_best_synchronous"]) == (1.2, 0.25)
    assert list(bound["goals_met"].values()) == [True, False, False, True]
    slow = judged(monkeypatch, turns((0.24, 0.6), (0.48, 1.2), (0.24, 0.6)), copy=0.19)
    assert not next(iter(slow["goals_met"].values())), "a copy that takes less than a fifth excuses nothing"


@pytest.mark.parametrize("num_bytes", [(20 << 20) + 5, 3])
def test_the_disk_is_asked_for_as_many_bytes_as_a_restore_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_bytes: int
) -> None:
    """In whole blocks it read up to a tenth less than what it is held against."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    disk = runpy.run_path(str(BENCHMARKS / "checkpoint.py"))["Disk"](num_bytes)
    disk.save(tmp_path / "disk")
    assert (tmp_path / "disk/rank-0").stat().st_size == num_bytes
    disk.restore(tmp_path / "disk")


def test_training_beside_several_saves_is_held_against_training_between_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two saves of two steps each, in which a step takes two seconds and then four, and one of a second otherwise."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    found = runpy.run_path(str(BENCHMARKS / "checkpoint.py"))
    clock, durations = [0.0], [4.0, 4.0, 2.0, 2.0]
    left: list[float] = []

    class Saving:
        def save(self, folder: Path) -> object:
            left.extend((durations.pop(), durations.pop()))
            return found["Pending"](lambda: None, lambda: not left)

    def step() -> None:
        clock[0] += left.pop() if left else 1.0

    measure = found["_training_speed"]
    monkeypatch.setitem(measure.__globals__, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert measure(Saving(), tmp_path, step, 2) == pytest.approx(1 / 3)
    assert not durations, "both saves were made"


@pytest.mark.parametrize(
    ("s5cmd", "ours", "is_met"),
    [
        ({"seconds": [1.0]}, {"seconds": [1.2]}, True),
        ({"seconds": [1.0]}, {"seconds": [2.0]}, False),
        ({"absent": "not installed"}, {"seconds": [2.0]}, True),
        ({"failed": "refused"}, {"seconds": [2.0]}, False),
        ({"absent": "not installed"}, {"failed": "refused"}, False),
        ({"seconds": [1.0]}, {"failed": "refused"}, False),
    ],
)
def test_a_transfer_that_failed_meets_no_goal(
    monkeypatch: pytest.MonkeyPatch, s5cmd: dict[str, Any], ours: dict[str, Any], is_met: bool
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    bench = runpy.run_path(str(BENCHMARKS / "checkpoint_s3.py"))
    for boto3 in ({"seconds": [3.0]}, {"failed": "refused"}):
        figures = {"boto3": boto3, "s5cmd": s5cmd, "ours": ours}
        whole = {name: {"version": "1", "cpu_seconds": [1.0], **one} for name, one in figures.items()}
        told = bench["summary"]({name: whole[name] if "seconds" in one else one for name, one in figures.items()}, 1024)
        assert bench["meets_goal"](told) == is_met
        assert ("speed_to_boto3" in told["ours"]) == ("seconds" in ours and "seconds" in boto3)


def test_another_client_begins_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    bench = runpy.run_path(str(BENCHMARKS / "checkpoint_s3.py"))
    order: list[str] = []

    def maker(name: str) -> tuple[Any, str]:
        def make() -> Any:
            if name == "absent":
                raise ImportError(name)
            return lambda _: order.append(name)

        return make, "torch"

    figures = bench["_in_turns"]({name: maker(name) for name in ("a", "absent", "b", "c")}, 3)
    assert order == [*"abc", *"abc", *"bca", *"cab"], "one turn each that isn't counted, then the rounds"
    assert [len(figures[name]["seconds"]) for name in "abc"] == [3, 3, 3] and "absent" in figures["absent"]
