"""What the ranks lay together: stragglers by their own time, memory that grows, percentiles; without processes."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer.__main__ import expected_of
from trainer.observe.memory_use import FloorHistory, Growth, growth, host_bytes
from trainer.observe.observer import Figures, Observer, largest_tensor, percentile, summary
from trainer.observe.step_clock import PHASES, StepClock
from trainer.observe.stragglers import find_stragglers
from trainer.observe.throughput import Expected, throughput
from trainer.tasks.image_classification import ImageBatch
from trainer.tasks.images import Pixels

from trainyard.planner import resolve
from trainyard.planner.formulas import formulas_of
from trainyard.spec.job import JobSpec, load_job

MIB = 2.0**20


def figures(own_seconds: float, **changes: Any) -> Figures:
    values: dict[str, Any] = {
        "host": "algo-1",
        "group": 0,
        "own_seconds": own_seconds,
        "data_seconds": (0.001, 0.002),
        "copy_seconds": None,
        "peaks": {"host_peak": 100.0},
        "growth": {},
        "network": (100.0, 20.0),
    }
    return Figures(**(values | changes))


def test_the_tensor_whose_copy_is_timed_is_the_largest_one() -> None:
    pixels = Pixels(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    batch = ImageBatch(pixels=pixels, labels=torch.zeros(2, dtype=torch.int64), num_target_tokens=2, num_tokens=2)
    assert largest_tensor(batch) is pixels.values
    assert largest_tensor(SimpleNamespace(num_tokens=2)) is None


@pytest.mark.parametrize(
    ("own_seconds", "groups", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], [0, 0, 0, 0], []),
        ([1.0, 1.1, 1.0, 1.6], [0, 0, 0, 0], [3]),
        ([1.0, 2.0], [0, 0], [1]),
        ([1.0, 2.0], [0, 1], []),
        ([1.0, 1.0, 2.0, 2.0], [0, 0, 1, 1], []),
        ([1.0, 1.0, 2.0, 3.0], [0, 0, 1, 1], [3]),
        ([0.001, 0.004], [0, 0], []),
        ([1.0], [0], []),
    ],
    ids=["equal", "one", "of two", "stages differ", "stages of two", "in a stage", "too short to tell", "alone"],
)
def test_a_straggler_is_slow_among_those_that_do_the_same(
    own_seconds: list[float], groups: list[int], expected: list[int]
) -> None:
    found = find_stragglers(own_seconds, [f"host-{rank}" for rank in range(len(groups))], groups)
    assert [straggler.rank for straggler in found] == expected
    assert all(straggler.host == f"host-{straggler.rank}" for straggler in found)


def test_a_straggler_and_a_leak_are_a_line_each_and_in_the_row(capsys: pytest.CaptureFixture[str]) -> None:
    leaking = {"host": Growth(bytes_per_step=MIB, first_step=100, last_step=400, total_bytes=300 * MIB)}
    late = figures(0.2, host="algo-2", data_seconds=(0.1, 0.3), growth=leaking, network=(300.0, 40.0))
    ranks = [figures(0.1), figures(0.1), late]
    observed = summary(400, ranks)
    assert capsys.readouterr().out.splitlines() == [
        "straggler step=400 rank=2 host=algo-2 own_seconds=0.2000 peers_seconds=0.1000 ratio=2.00",
        "leak step=400 rank=2 host=algo-2 memory=host mib_per_step=1.0000 mib=300.0 since_step=100",
    ]
    assert observed["own_seconds"] == {"median": 0.1, "max": 0.2, "slowest_rank": 2}
    assert [straggler["rank"] for straggler in observed["stragglers"]] == [2]
    assert [(leak["rank"], leak["memory"]) for leak in observed["leaks"]] == [(2, "host")]
    assert observed["data_seconds"] == {"p50": 0.1, "p99": 0.3}
    assert observed["host_to_device_seconds"] is None
    # Both ranks of the first host read the same counters.
    assert observed["network"] == {"sent_bytes_per_second": 200.0, "received_bytes_per_second": 30.0}


def floors(*mebibytes: float) -> list[tuple[int, float]]:
    return [(50 * number, value * MIB) for number, value in enumerate(mebibytes)]


def test_steady_growth_is_a_leak_and_noise_or_one_jump_is_none() -> None:
    found = growth(floors(1000, 1050, 1100, 1150, 1200, 1250))
    assert found is not None
    assert found.bytes_per_step == pytest.approx(MIB)
    assert (found.first_step, found.last_step, found.total_bytes) == (0, 250, 250 * MIB)
    assert growth(floors(1000, 1050, 1100)) is None, "too few windows"
    assert growth(floors(1000, 1400, 1400, 1400, 1400, 1400)) is None, "a cache that filled up"
    assert growth(floors(1000, 1090, 1010, 1080, 1000, 1100)) is None, "up and down"
    assert growth(floors(1000, 1001, 1002, 1003, 1004, 1005)) is None, "too little to matter"
    assert growth(floors(1500, 1400, 1300, 1200, 1100, 1000)) is None


def test_only_what_stays_counts_and_the_warm_up_does_not() -> None:
    history = FloorHistory()
    for window in range(8):
        for step in range(10):
            history.sample((1000 if window else 100) * MIB + step * 500 * MIB)
        history.close_window(10 * window)
    assert history.growth() is None


def test_a_step_that_is_made_again_counts_once() -> None:
    """A job that goes back behind a window (`on_anomaly: rollback`) closes it a second time."""
    history = FloorHistory()
    for step in (0, 50, 100, 150, 200, 250, 300, 200, 250, 300, 350):
        history.sample((1000 + step) * MIB)
        history.close_window(step)
        history.growth()
    found = history.growth()
    assert found is not None
    assert (found.first_step, found.last_step, found.bytes_per_step) == (50, 350, pytest.approx(MIB))


_LEAKING = """
import mmap
import sys

import torch
from trainer.observe.memory_use import MemoryUse

MIB = 2**20
file = open(sys.argv[1], "r+b")
file.truncate(8 * 48 * MIB)
view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
sum(view[place] for place in range(0, len(view), 4096))
kept, found, use = [], [], MemoryUse(torch.device("cpu"))
for window in range(8):
    kept.append(torch.ones(12 * MIB))  # 48 MiB, touched; above 32 MiB malloc takes fresh pages
    view.madvise(mmap.MADV_DONTNEED, window * 48 * MIB, 48 * MIB)  # as the kernel does where memory is short
    use.sample()
    peaks = use.close_window(window)
    found += use.news_of_growth().values()
assert found
assert found[0].total_bytes > 32 * MIB
assert peaks["host_peak"] > sum(tensor.nbytes for tensor in kept)
"""


def test_a_real_leak_is_found_while_the_kernel_drops_views_of_files(tmp_path: Path) -> None:
    # A process of its own: what earlier tests left in this one may be given back in between.
    (tmp_path / "views").touch()
    command = [sys.executable, "-c", _LEAKING, str(tmp_path / "views")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_views_of_files_come_and_go_and_are_no_leak() -> None:
    status = "VmRSS:\t  2048 kB\nRssAnon:\t  512 kB\nRssFile:\t  1472 kB\nRssShmem:\t  64 kB\nVmSwap:\t  16 kB\n"
    assert host_bytes(status) == (2 * MIB, 592 * 1024)


def test_percentiles_are_values_that_were_there() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([float(value) for value in range(100)], 99) == 99.0
    assert percentile([7.0], 99) == 7.0


def test_mfu_is_a_share_of_the_peak_in_both_conventions() -> None:
    expected = Expected(
        full_flops_per_token=10e9, causal_flops_per_token=8e9, peak_flops=1e15, planned_step_seconds=0.4
    )
    figures = throughput(tokens=800_000, seconds=2.0, world_size=8, expected=expected, num_steps=4)
    assert figures == {
        "tokens_per_second_per_rank": 50_000.0,
        "of_plan": 0.8,
        "model_tflops_full": 500.0,
        "mfu_full": 0.5,
        "model_tflops_causal": 400.0,
        "mfu_causal": 0.4,
    }
    unknown = throughput(tokens=800_000, seconds=2.0, world_size=8, expected=Expected(), num_steps=4)
    assert unknown == dict.fromkeys(figures, None) | {"tokens_per_second_per_rank": 50_000.0}


def test_a_job_that_pads_is_as_fast_as_its_plan_whose_steps_take_as_long() -> None:
    """The plan's tokens have the padding among them, the trainer's have not."""
    expected = Expected(planned_step_seconds=0.5)
    full, padded = (throughput(tokens, 2.0, 1, expected, num_steps=4) for tokens in (4 * 1024, 4 * 100))
    assert full["of_plan"] == padded["of_plan"] == 1.0
    assert padded["tokens_per_second_per_rank"] == 200.0


def test_the_share_of_the_plan_is_of_the_windows_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(mine: Any, everyone: list[Any], **_: Any) -> None:
        everyone[:] = [mine]

    monkeypatch.setattr("torch.distributed.gather_object", alone)
    runtime: Any = SimpleNamespace(device=torch.device("cpu"), world_size=1, is_first=True, control_group=None, rank=0)
    expected = Expected(planned_step_seconds=0.5)
    observer = Observer(runtime, every_steps=3, last_step=5, group=0, expected=expected)
    phases = dict.fromkeys(PHASES, 0.0)
    took = enumerate((1.0, 1.0, 1.0, 0.5, 0.5), start=1)
    rows = [observer.finish_step(step, seconds, phases, tokens=10) for step, seconds in took]
    assert [bool(row) for row in rows] == [False, False, True, False, True]
    assert [row["observed"]["throughput"]["of_plan"] for row in rows if row] == [0.5, 1.0]
    observer.close()


@pytest.mark.parametrize(
    ("every_steps", "last_step", "told_at"), [(20, 25, [20]), (20, 30, [20, 30]), (5, 12, [5, 10]), (1, 2, [1, 2])]
)
def test_a_few_steps_left_at_the_end_make_nobody_a_straggler(
    every_steps: int, last_step: int, told_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_two(mine: Figures, everyone: list[Any], **_: Any) -> None:
        everyone[:] = [mine, replace(mine, own_seconds=2 * mine.own_seconds)]

    monkeypatch.setattr("torch.distributed.gather_object", of_two)
    runtime: Any = SimpleNamespace(device=torch.device("cpu"), world_size=2, is_first=True, control_group=None, rank=0)
    observer = Observer(runtime, every_steps=every_steps, last_step=last_step, group=0, expected=Expected())
    phases = dict.fromkeys(PHASES, 0.0)
    rows = {step: observer.finish_step(step, 1.0, phases, tokens=10) for step in range(1, last_step + 1)}
    assert [step for step, row in rows.items() if row and row["observed"]["stragglers"]] == told_at
    assert rows[last_step]["observed"]["own_seconds"]["max"] == 2.0, "its figures are told all the same"
    observer.close()


LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def job_of(model: dict[str, Any], **settings: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "figures",
            "model": {"config": model},
            "data": {"train": [{"path": "unused", "format": "text"}], "sequence_length": 8192},
            "training": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "learning_rate": 1e-3} | settings,
            "parallelism": {},
        }
    )


def test_what_is_expected_of_llama_8b_on_an_h100() -> None:
    expected = expected_of(resolve(job_of(LLAMA_8B), world_size=1), "NVIDIA H100 80GB HBM3")
    # The published comparison of both conventions: 57.9 and 51.5 GFLOP a token.
    assert expected.full_flops_per_token == pytest.approx(57.9e9, rel=2e-3)
    assert expected.causal_flops_per_token == pytest.approx(51.5e9, rel=2e-3)
    assert expected.peak_flops == pytest.approx(989e12, rel=1e-3)
    assert expected.planned_bytes is not None
    assert expected.planned_bytes > 16 * 8e9, "float32 weights, gradients and two moments"
    on_cpu = expected_of(resolve(job_of(LLAMA_8B), world_size=1), None)
    assert (on_cpu.peak_flops, on_cpu.planned_bytes) == (None, None)
    assert on_cpu.full_flops_per_token == expected.full_flops_per_token


def test_an_adapters_attention_counts_in_full() -> None:
    """Frozen weights have no gradient of their own; scores have no weights, and theirs are needed below."""
    spec = load_job(Path(__file__).parents[2] / "jobs" / "llama-8b-lora.yaml")
    length = spec.data.sequence_length
    weights, scores = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256, 32 * 4096 * length
    expected = expected_of(resolve(spec, world_size=1), None)
    assert expected.full_flops_per_token == pytest.approx(4 * weights + 12 * scores, rel=1e-3)
    assert expected.causal_flops_per_token == pytest.approx(4 * weights + 6 * scores, rel=1e-3)
    assert formulas_of(spec).flops_per_sample == pytest.approx(length * (4 * weights + 12 * scores), rel=1e-3)


def test_nothing_is_expected_where_there_is_no_formula() -> None:
    spec = job_of({"model_type": "xlnet", "attn_type": "uni"})  # of a type that is not verified for packed documents
    job = resolve(spec.model_copy(update={"data": spec.data.model_copy(update={"packing": False})}), world_size=1)
    assert expected_of(job, None) == Expected()
    assert expected_of(job, "Voodoo 2") == Expected()


def test_phases_are_ranges_for_who_asks() -> None:
    def names(*, show_ranges: bool) -> set[str]:
        clock = StepClock(torch.device("cpu"), world_size=1, show_ranges=show_ranges)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for phase in ("forward", "backward"):
                with clock(phase):
                    torch.ones(2).sum()
        return {event.key for event in profile.key_averages()}

    assert {"trainyard:forward", "trainyard:backward"} <= names(show_ranges=True)
    assert not any(name.startswith("trainyard:") for name in names(show_ranges=False))
