"""The accuracy benchmark: a source never lends its own constants, and what it prints is what it dumps."""

import csv
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from planner_accuracy import (  # noqa: E402
    TRAIN_FIELDS,
    Score,
    by_kind,
    far_off,
    held_needs,
    megatron_alone,
    megatron_fields,
    report,
    train_scores,
    unscored,
)
from planner_cross_validation import Case, held_out, loss, refit  # noqa: E402
from planner_fit import GUESSES, NOT_FITTED, TimeCase, constants_table, without_each  # noqa: E402
from planner_picking import Measured, picking, taken, told_apart  # noqa: E402

from trainyard.planner.configurations import SAME_SPEED  # noqa: E402
from trainyard.planner.predict import understand  # noqa: E402
from trainyard.planner.time_constants import DEFAULT_CONSTANTS, Constants  # noqa: E402
from trainyard.planner.timing import SPREAD_DENSE, SPREAD_LAUNCH, SPREAD_NEW  # noqa: E402
from trainyard.spec.job import ParallelismSpec  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Slope:
    """One constant to fit."""

    slope: float = 3.0


GRID = {"slope": (1.0, 2.0, 3.0, 4.0)}


def _cases(group: str, slope: float, count: int) -> list[Case[Slope]]:
    return [Case(group, slope * x, lambda constants, x=x: constants.slope * x) for x in range(1, count + 1)]  # type: ignore[misc]


def test_a_source_is_predicted_by_constants_that_never_saw_it() -> None:
    cases = _cases("honest", 2.0, 3) + _cases("another", 2.0, 3) + _cases("odd", 4.0, 50)
    held = held_out(cases, Slope(), GRID)
    assert [one.case for one in held] == cases
    by_group = {one.case.group: one.constants.slope for one in held}
    # The odd source has most rows, and yet can't choose its own constant; every source counts once.
    assert by_group["odd"] == 2.0
    assert [one.predicted for one in held if one.case.group == "odd"][:2] == [2.0, 4.0]


def test_a_fit_does_not_start_from_the_shipped_constants() -> None:
    cases = _cases("one", 2.0, 3)
    assert refit(cases, Slope(99.0), GRID) == refit(cases, Slope(-99.0), GRID) == Slope(2.0)
    assert loss(cases, Slope(2.0)) == 0.0
    assert loss([], Slope()) == float("inf")


def test_a_metric_that_nobody_knows_is_counted_not_fatal() -> None:
    row = dict.fromkeys((*TRAIN_FIELDS, "source"), "") | {"reported_metric": "furlongs_per_s", "value": "3"}
    assert list(train_scores([row], "train_rows")) == []
    assert list(unscored([row, row])) == ["not scored: 2 rows of furlongs_per_s (a metric unknown here)"]


def test_times_are_told_by_kind_and_memory_is_in_neither() -> None:
    kinds = (("dense", "bf16", "H100"), ("moe", "bf16", "H100"), ("dense", "fp8", "H100"), ("dense", "bf16", "B200"))
    rows = [{"family": family, "precision": bits, "gpu": part, "note": ""} for family, bits, part in kinds]
    scores = [Score("train_rows", index, "", "step_time_s", 1.0, 1.0 + index / 10) for index in range(4)]
    scores.append(Score("train_rows", 0, "", "peak_memory_GiB", 1.0, 9.0))
    dense, others = by_kind(scores, rows)
    assert dense.split()[-6:] == ["1", "0", "0.0%", "0.0%", "0.0%", "+0.0%"] and "dense, 16 bits" in dense
    assert others.split()[-6:] == ["3", "0", "20.0%", "30.0%", "30.0%", "+20.0%"]


def test_a_sources_memory_is_told_apart_from_its_times() -> None:
    scores = [
        Score("train_rows", 0, "one", "step_time_s", 1.0, 1.5),
        Score("train_rows", 1, "one", "peak_memory_GB", 1.0, 1.1),
    ]
    by_source = [told.split() for told in report(scores) if " one " in told]
    assert [words[:-6] for words in by_source] == [["train_rows:", "one"], ["train_rows,", "memory:", "one"]]
    assert [words[-4] for words in by_source] == ["50.0%", "10.0%"]


def measured(job: str, tensor: int, seconds: float, predicted: float, pipeline: int = 1) -> Measured:
    return Measured((job,), ParallelismSpec(tensor=tensor, pipeline=pipeline), seconds, predicted)


def test_a_plan_that_is_picked_is_held_against_the_best_measured_one() -> None:
    found = [
        measured("one", 1, 100.0, 90.0),
        measured("one", 2, 110.0, 80.0),
        measured("two", 1, 50.0, 40.0),
        measured("two", 2, 60.0, 70.0),
        measured("alone", 1, 1.0, 9.0),
    ]
    told = picking(found, "vtrain_single")
    # Of the first job the slower one is picked (10% lost), of the second the faster one; the last has no choice.
    assert "2 jobs: 5.0% slower than the best measured one (median), 5.0% (mean), 10.0% (worst)" in told
    assert told.endswith("at most 3% slower in 50%; by the fastest estimate alone 5.0% (mean)")
    assert picking(found[4:], "vtrain_single") == "vtrain_single: no job with more than one layout"


@pytest.mark.parametrize(("ratio", "tensor"), [(1 + SAME_SPEED / 2, 1), (1 + 2 * SAME_SPEED, 4)])
def test_picking_is_by_the_searchs_own_rule(ratio: float, tensor: int) -> None:
    """The benchmark took the fastest estimate where a search takes the simplest of those it can't tell from it."""
    found = [
        measured("one", 4, 9.0, 1.0),
        measured("one", 2, 8.0, 1.001 * ratio, pipeline=2),
        # Of one layout the micro-batch that is estimated to be faster counts, wherever it stands.
        measured("one", 1, 5.0, 2.0),
        measured("one", 1, 7.0, ratio),
    ]
    assert taken(found) == (found[3] if tensor == 1 else found[0])
    assert taken(found, gain=0.0) == found[0]
    assert "40.0% (mean)" in picking(found, "") if tensor == 1 else "80.0% (mean)" in picking(found, "")


def test_by_how_much_two_estimates_must_differ_to_be_told_apart_is_counted_in_pairs() -> None:
    found = [measured("one", 1, 1.0, 1.0), measured("one", 2, 2.0, 1.005), measured("one", 4, 0.5, 1.055)]
    found += [measured("one", 1, 9.0, 1.0), measured("other", 8, 9.0, 1.0)]
    (told,) = told_apart(found, "rows")
    assert told.endswith("the faster one is known: 50% of 2 (0 to 1%), 0% of 1 (4 to 5%), 0% of 2 (5 to 6%)")
    assert not list(told_apart(found[-2:], "rows"))


def test_a_row_that_is_refused_is_not_within_its_need(tmp_path: Path) -> None:
    """It ended the benchmark in a traceback."""
    name = "finetune_memory.csv"
    told = {"id": "one", "source": "litgpt", "model": "phi-1.5", "params_B": "1.3", "method": "LoRA", "quant": "None"}
    told |= {"gpu": "A100-SXM4", "gpu_mem_GB": "40", "gpus": "1", "seq": "1044", "micro_batch": "1", "note": ""}
    told |= {"global_batch": "128", "precision": "bf16-true", "recompute": "", "trainable_params": "", "outcome": "ok"}
    row = told | {"peak_memory": "0.5", "mem_unit": "GB"}
    with (tmp_path / name).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerows([row, row | {"gpu": "abacus"}])
    (one,) = held_needs(tmp_path)
    assert "50% of 2 peaks within the need" in one


MEGATRON = dict.fromkeys(
    (
        *("env", "platform", "suffix", "gpus", "hybrid_pattern", "ffn_hidden", "kv_heads", "kv_channels", "vocab"),
        *("tokenizer", "swiglu", "untied", "vpp_layers", "etp", "sp", "num_experts", "topk", "moe_ffn", "mla", "fsdp"),
        *("dist_opt", "fp8", "recompute", "recompute_modules", "global_batch", "n_iter_points"),
    ),
    "",
) | {
    "family": "gpt", "case": "gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion", "layers": "12", "hidden": "512",
    "heads": "8", "seq": "1024", "tp": "2", "pp": "2", "cp": "1", "ep": "1", "micro_batch": "4", "bf16": "True",
    "dropout": "0.1", "mem_allocated_bytes_last": "487000000", "mem_max_allocated_bytes_final": "4000000000",
}  # fmt: skip


def test_megatrons_rows_are_read_from_configurations_and_names_never_from_results() -> None:
    resumed = MEGATRON | {"case": "gpt3_mcore_te_tp2_pp2_resume_torch_dist", "env": "lts"}
    for row in (MEGATRON, resumed):
        answers = [megatron_fields(row | {"n_iter_points": count}) for count in ("11", "21", "49", "100")]
        answers.append(megatron_fields(row | {"mem_max_allocated_bytes_final": "1", "iteration_time_s_median": "9"}))
        assert all(answer == answers[0] for answer in answers)


def test_with_names_unread_a_case_is_what_its_columns_say() -> None:
    renamed = MEGATRON | {"case": "gpt3_mcore_tp2_pp2_uneven_pipeline_defer_embedding_wgrad", "suffix": "_dracooci"}
    assert megatron_fields(MEGATRON) != megatron_fields(renamed)
    assert megatron_fields(MEGATRON, inferred=False) == megatron_fields(renamed, inferred=False)
    lines = list(megatron_alone([MEGATRON, renamed], "megatron_ci_memory"))
    assert [line.split(":")[1].split("  ")[0].strip() for line in lines] == [
        "mem_allocated_bytes_last, names unread", "mem_max_allocated_bytes_final, names unread",
        "mem_allocated_bytes_last, options stated", "mem_max_allocated_bytes_final, options stated",
    ]  # fmt: skip


def test_who_states_megatrons_options_states_no_layout_that_a_name_alone_tells() -> None:
    uneven = MEGATRON | {"case": "gpt3_mcore_tp2_pp2_uneven_pipeline_defer_embedding_wgrad"}
    columns, told = (megatron_fields(uneven, inferred=False, options=stated) for stated in (False, True))
    assert set(told) - set(columns) >= {"attention", "loss_fusion", "deterministic", "deferred_head"}
    assert "last_stage_layers" in megatron_fields(uneven) and "last_stage_layers" not in told
    assert {key: told[key] for key in columns} == columns


def test_cases_that_are_far_off_are_named_worst_first() -> None:
    rows = [MEGATRON | {"case": case} for case in ("near", "far", "farther")]
    scores = [
        Score("megatron_ci_memory", index, "gpt", "mem_max_allocated_bytes_final", 100.0, predicted)
        for index, predicted in enumerate((114.0, 120.0, 20.0))
    ]
    told = list(far_off(scores, rows, "megatron_ci_memory"))
    assert told[0] == "megatron_ci_memory: 2 values of 2 cases are off by more than 15%"
    assert [line.split()[-1] for line in told[1:]] == ["farther", "far"]
    assert told[1].split()[:2] == ["-80.0%", "peak"]


FINETUNE = (
    "id,source,model,params_B,method,quant,gpu,gpu_mem_GB,gpus,seq,micro_batch,global_batch,precision,recompute,"
    "trainable_params,peak_memory,mem_unit,time_metric,time_value,outcome,note\n"
    "litgpt-1,table A,Llama 2,7,LoRA,None,A100,40,1,1304,1,128,bf16-true,,,21.30,GB,,,ok,\n"
    "litgpt-2,table A,Llama 2,7,LoRA,None,A100,40,1,1304,4,128,bf16-true,,,,GB,,,OOM,\n"
    "canift-1,table B,Qwen2.5-1.5B,1.54,qlora,nf4,A100,16,1,1024,1,1,bf16,checkpointing,,4.0413,GiB,,,ok,\n"
)


@pytest.fixture(scope="module", name="printed")
def run_benchmark(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, str]]]:
    """Its output and its dump on three rows of two sources."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "finetune_memory.csv").write_text(FINETUNE)
    command = [sys.executable, "benchmarks/planner_accuracy.py", "--rows", str(folder), "--dump", str(folder / "dump")]
    done = subprocess.run(
        [*command, "--cross-validate"], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=400
    )
    with (folder / "dump").open(newline="") as file:
        return done.stdout, list(csv.DictReader(file))


def test_every_measured_value_is_dumped_once(printed: tuple[str, list[dict[str, str]]]) -> None:
    _, dump = printed
    assert [(line["row"], line["metric"]) for line in dump] == [
        ("0", "peak_memory"), ("0", "fits"), ("1", "fits"), ("2", "peak_memory"), ("2", "fits"),
    ]  # fmt: skip
    assert [float(line["predicted"]) for line in dump if line["metric"] == "fits"] == [1, 0, 1]


def test_both_tables_are_printed(printed: tuple[str, list[dict[str, str]]]) -> None:
    output, _ = printed
    assert "called fitting but out of memory: 0 of 1; false alarms: 0 of 2" in output
    assert "finetune_memory: 100% of 2 peaks within the need" in output
    table = output[output.index("peak memory, by source") :]
    assert "table A" in table and "table B" in table and "shipped held out" in table


def test_the_page_counts_the_fitted_constants_and_names_those_on_their_bounds_and_those_that_are_not_fitted() -> None:
    names, by_hand = {field.name for field in dataclasses.fields(Constants)}, set(NOT_FITTED)
    assert names - set(GUESSES) == by_hand and not set(GUESSES) - names
    page = (REPOSITORY / "docs" / "planner_accuracy.md").read_text(encoding="utf-8")
    assert f"{len(GUESSES)} constants are fitted" in page and all(f"`{name}`" in page for name in NOT_FITTED)
    for name, (guess, least, most) in GUESSES.items():
        assert least < guess < most and least <= getattr(Constants(), name) <= most, name
        if getattr(Constants(), name) in (least, most):
            assert f"`{name}`" in page, "a constant on its bound is named"
    for factor in (SPREAD_DENSE, SPREAD_NEW, SPREAD_LAUNCH):
        assert f"| {factor:g} |" in page


def test_files_of_one_program_are_left_out_together() -> None:
    """Two sources of V100s, and one that knows of none: who leaves out one of the two must not learn of the other."""
    rows = {"layers": 24, "hidden": 2048, "heads": 16, "seq": 1024, "gpus": 8, "micro_batch": 8, "global_batch": 64}
    old, new = (understand(rows | {"gpu": name, "precision": "fp16"}) for name in ("V100", "A100"))
    together = [TimeCase(name, old, 1.0, left_out_with="both") for name in ("one", "two")]
    apart = [dataclasses.replace(case, left_out_with="") for case in together]
    guess = GUESSES["ceiling_volta"][0]
    for cases, unseen in ((together, True), (apart, False)):
        found = without_each([*cases, TimeCase("three", new, 1.0)])
        assert set(found) == {"one", "two", "three"}
        assert all((found[name].ceiling_volta == pytest.approx(guess)) is unseen for name in ("one", "two"))


def test_the_table_of_constants_says_what_one_source_decides_alone() -> None:
    rows = {"layers": 24, "hidden": 2048, "heads": 16, "seq": 1024, "gpus": 8, "micro_batch": 8, "global_batch": 64}
    asked = {"one": {"gpu": "V100", "precision": "fp16"}, "two": {"gpu": "A100", "precision": "bf16"}}
    cases = [TimeCase(source, understand(rows | fields), 1.0) for source, fields in asked.items()]
    told = {line.split()[0]: line for line in constants_table(cases, DEFAULT_CONSTANTS)}
    assert told["ceiling_volta"].endswith("1  decided by one source: one")
    assert told["ceiling_ampere"].endswith("1  decided by one source: two")
    assert told["half_depth"].endswith(" 2") and told["moe_passes"].endswith(" 0")
    assert told["ceiling_blackwell"].endswith("on its bound, the least")
