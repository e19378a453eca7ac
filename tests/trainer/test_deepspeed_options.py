"""DeepSpeed's sizes, offload and JSON: what is passed leaves the losses as they are, and what is wrong is one line."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer.strategies import check_supported, deepspeed_settings
from trainer.strategies.nvme_offload import RankFolder
from trainer_testing.families import FAMILIES
from trainer_testing.strategy_worker import RunRequest, run, worst_relative_error
from trainer_testing.tiny import tiny_job

from trainyard.errors import InputError
from trainyard.spec.base import parse
from trainyard.spec.job import ParallelismSpec

STEPS = 4
SMALL = {"reduce_bucket_elements": 3000, "allgather_bucket_elements": 2000, "overlap": False}
SPLIT = SMALL | {"prefetch_elements": 1500, "persistence_threshold_elements": 0, "max_live_elements": 5000}
OFFLOADED = SPLIT | {"offload_parameters": "cpu"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("zero1", {"zero": SMALL, "offload": "cpu"}),
    ("zero2", {"zero": SMALL}),
    ("zero2", {"zero": SMALL | {"overlap": True}, "offload": "cpu"}),
    ("zero3", {"zero": SPLIT, "deepspeed": {"zero_optimization": {"sub_group_size": 4000}}}),
    ("zero3", {"zero": OFFLOADED, "offload": "cpu"}),
    ("zero3", {"zero": OFFLOADED, "offload": "cpu", "deepspeed": {"zero_optimization": {"sub_group_size": 4000}}}),
]


def request(strategy: str, layout: dict[str, Any], **more: Any) -> RunRequest:
    return RunRequest(strategy, **{"last_step": STEPS, **more}, job={"model": FAMILIES["Llama"], "parallelism": layout})


@pytest.mark.slow
def test_sizes_and_offload_change_no_loss(tmp_path: Path) -> None:
    one = run(1, [RunRequest("single", last_step=2 * STEPS, job={"model": FAMILIES["Llama"]})])[0]
    saved = [
        request(name, layout, last_step=2 * STEPS, save=str(tmp_path / str(number)), save_after_step=STEPS)
        for number, (name, layout) in enumerate(CASES)
    ]
    # What is offloaded and cut small is in checkpoints like everything: another engine goes on from it, and it from
    # another's.
    last = len(CASES) - 1
    resumed = [
        request("fsdp", {}, first_step=STEPS + 1, last_step=2 * STEPS, load=str(tmp_path / str(last))),
        request(*CASES[last], first_step=STEPS + 1, last_step=2 * STEPS, load=str(tmp_path / "1")),
    ]
    for case, result in zip([*CASES, "fsdp", "offloaded"], run(2, saved + resumed), strict=True):
        assert worst_relative_error(result, one) < 1e-5, case


def told(layout: dict[str, Any], device_type: str = "cuda", **more: Any) -> dict[str, Any]:
    job = tiny_job("zero3", 2, parallelism=layout, **more)
    return deepspeed_settings.configuration(job, [6, 1000, 30], device_type=device_type)


@pytest.mark.parametrize(
    ("num_ranks", "bucket", "num_trained", "is_whole"),
    [
        (2, "auto", None, False),
        (8, "auto", None, False),
        (16, "auto", None, True),
        (16, 300, None, False),
        (16, 600, None, True),
        (16, 300, 100, True),
    ],
)
def test_gradients_are_reduced_to_their_owners_where_a_bucket_has_few(
    num_ranks: int, bucket: int | str, num_trained: int | None, is_whole: bool
) -> None:
    # Of 1,036 elements; 16 ranks have 65 each, so that 300 lie with 6 of them at most, and 600 with 11.
    layout = {"engine": "deepspeed", "data_replicate": num_ranks, "zero": {"reduce_bucket_elements": bucket}}
    for stage in (1, 2, 3):
        job = tiny_job("zero", num_ranks, parallelism=layout | {"zero_stage": stage}, micro_batch_size=1)
        config = deepspeed_settings.configuration(job, [6, 1000, 30], device_type="cuda", num_trained=num_trained)
        told_it = config["zero_optimization"].get("use_multi_rank_bucket_allreduce")
        assert told_it == (None if stage == 3 else is_whole)


def test_what_deepspeed_is_told() -> None:
    plain = told({})["zero_optimization"]
    assert plain["reduce_bucket_size"] == plain["stage3_prefetch_bucket_size"] == 1036
    assert plain["stage3_max_live_parameters"] == 1_000_000_000
    assert plain["overlap_comm"] is True
    assert told({}, "cpu")["zero_optimization"]["overlap_comm"] is False
    assert "offload_param" not in plain
    assert "offload_optimizer" not in plain
    sized = told({"zero": OFFLOADED, "offload": "cpu"})["zero_optimization"]
    assert (sized["reduce_bucket_size"], sized["allgather_bucket_size"]) == (3000, 2000)
    assert (sized["stage3_prefetch_bucket_size"], sized["stage3_max_live_parameters"]) == (1500, 5000)
    assert sized["stage3_param_persistence_threshold"] == 0
    assert sized["offload_param"] == sized["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    passed = {"zero_optimization": {"sub_group_size": 7, "offload_param": {"pin_memory": False}}, "dump_state": True}
    merged = told({"zero": OFFLOADED, "offload": "cpu", "deepspeed": passed})
    assert merged["dump_state"] is True
    assert merged["zero_optimization"] == sized | {
        "sub_group_size": 7,
        "offload_param": {"device": "cpu", "pin_memory": False},
    }
    assert deepspeed_settings.compute_type(told({}, precision="bf16")) == torch.bfloat16
    assert deepspeed_settings.compute_type(told({})) == torch.float32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gradient_clipping": 1.0}, r"gradient_clipping: trainyard states this itself; set training\.gradient_clip"),
        ({"train_batch_size": 8}, r"set training\.global_batch_size instead"),
        ({"bf16": {"enabled": True}}, r"set training\.precision instead"),
        ({"zero_optimization": {"stage": 2}}, r"zero_optimization\.stage: .* set parallelism\.zero_stage instead"),
        ({"zero_optimization": {"reduce_bucket_size": 2}}, r"set parallelism\.zero\.reduce_bucket_elements instead"),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            r"offload_param\.device: .* set parallelism\.zero\.offload_parameters instead",
        ),
        ({"zero_optimisation": {}}, r"deepspeed\.zero_optimisation: is not passed .* zero_optimization"),
        (
            {"zero_optimization": {"sub_group_sise": 5}},
            r"sub_group_sise: DeepSpeed has nothing of this name.*sub_group",
        ),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, r"zero_quantized_gradients: .* changes what"),
        ({"zero_optimization": {"sub_group_size": "many"}}, r"zero_optimization: sub_group_size: .*\(given: 'many'\)"),
        ({"zero_optimization": {"sub_group_size": -1}}, r"sub_group_size: Input should be greater"),
        (
            {"zero_optimization": {"offload_param": {"pin_memory": True}}},
            r"nothing is offloaded; set parallelism\.zero",
        ),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, r"offload_optimizer: must be a section, is 'cpu'"),
        ({"zero_optimization": {"offload_param": ["cpu"]}}, r"offload_param: must be a section, is \['cpu'\]"),
        ({"zero_optimization": {"offload_param": None}}, r"offload_param: must be a section, is None"),
        ({"aio": 3}, r"deepspeed\.aio: must be a section, is 3"),
        ({"aio": {"block_size": "x"}}, r"aio\.block_size: must be a whole number of at least 1, is 'x'"),
        ({"aio": {"queue_depth": 0}}, r"aio\.queue_depth: must be a whole number of at least 1, is 0"),
        ({"aio": {"single_submit": 1}}, r"aio\.single_submit: must be true or false, is 1"),
        ({"flops_profiler": {"enabled": "x"}}, r"flops_profiler\.enabled: must be true or false, is 'x'"),
        ({"flops_profiler": {"profile_step": True}}, r"profile_step: must be a whole number of at least 1, is True"),
        ({"zero_optimization": 3}, r"must be a section, is 3"),
        ({"comms_logger": {"enable": True}}, r"comms_logger: enable: "),
        ({"flops_profiler": {"enable": True}}, r"flops_profiler: enable is nothing that it has; it has detailed"),
        ({"dump_state": "yes"}, r"dump_state: must be true or false, is 'yes'"),
        ({"steps_per_print": 0}, r"steps_per_print: must be a number of steps, is 0"),
    ],
)
def test_wrong_json_is_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_supported(tiny_job("zero3", 2, parallelism={"deepspeed": given}), device_type="cpu")
    assert "\n" not in str(caught.value)


def test_nvme_without_libaio_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose: False)
    job = tiny_job("zero3", 2, parallelism={"offload": "nvme", "zero": {"nvme_path": "/mnt/nvme"}})
    with pytest.raises(InputError, match="libaio's library and headers") as caught:
        check_supported(job, device_type="cuda")
    assert "\n" not in str(caught.value)


def test_a_disk_that_is_too_small_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, size, message in [
        (tmp_path / "file", 10, "nvme_path: .* can't be made: Not a directory"),
        (tmp_path / "disk", 10**15, r"nvme_path: .* GiB free, and this rank needs 7450580\.6"),
    ]:
        job = tiny_job("zero3", 2, parallelism={"offload": "nvme", "zero": {"nvme_path": str(path)}})
        with pytest.raises(InputError, match=message):
            RankFolder(job, 1, num_elements=size, num_trained=size)


def test_two_runs_of_a_job_never_share_files(tmp_path: Path) -> None:
    job = tiny_job("zero3", 2, parallelism={"offload": "nvme", "zero": {"nvme_path": str(tmp_path)}})
    first = RankFolder(job, 1, num_elements=10, num_trained=10)
    with pytest.raises(InputError, match=r"another run of job .* has its files in"):
        RankFolder(job, 1, num_elements=10, num_trained=10)
    first.remove()
    assert not list(tmp_path.iterdir())
    RankFolder(job, 1, num_elements=10, num_trained=10).remove()


@pytest.mark.full
def test_state_and_weights_on_disk_change_no_loss(tmp_path: Path) -> None:
    """Matrices large enough that DeepSpeed does put them into files (1 MiB a rank and sub-group, and a weight)."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not (AsyncIOBuilder().is_compatible(verbose=False) and shutil.which("c++")):
        pytest.skip("DeepSpeed's async_io needs libaio and a compiler: apt-get install libaio-dev g++")
    AsyncIOBuilder().load(verbose=False)  # compiled here, for minutes, rather than inside of a rank's time limit
    model = FAMILIES["Llama"] | {"hidden_size": 512, "intermediate_size": 1024}
    disk = tmp_path / "disk"
    on_disk = {"zero": {"nvme_path": str(disk)}, "offload": "nvme"}
    small_groups = {"zero_optimization": {"sub_group_size": 10**6}}
    weights: dict[str, Any] = {"zero": {"nvme_path": str(disk), "offload_parameters": "nvme"}, "offload": "nvme"}
    cases = [
        ("zero3", on_disk),
        ("zero3", on_disk | {"deepspeed": small_groups}),
        ("zero3", on_disk | {"deepspeed": {"zero_optimization": {"offload_optimizer": {"pipeline_read": True}}}}),
        ("zero3", weights | {"deepspeed": {"zero_optimization": {"offload_param": {"max_in_cpu": 1}}}}),
        ("zero3", {"offload": "nvme", "zero": weights["zero"] | {"prefetch_elements": 10**7}}),
    ]

    def asked(number: int, **more: Any) -> RunRequest:
        return RunRequest(cases[number][0], job={"model": model, "parallelism": cases[number][1]}, **more)

    one = run(1, [RunRequest("single", last_step=2 * STEPS, job={"model": model})])[0]
    saved = [
        asked(number, last_step=2 * STEPS, save=str(tmp_path / str(number)), save_after_step=STEPS)
        for number in range(len(cases))
    ]
    second_half = {"first_step": STEPS + 1, "last_step": 2 * STEPS}
    resumed = [
        RunRequest("fsdp", job={"model": model}, load=str(tmp_path / "1"), **second_half),
        *(asked(number, load=str(tmp_path / "0"), **second_half) for number in range(len(cases))),
    ]
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run, 2, saved + resumed)
        seen: set[str] = set()
        while not running.done():  # for minutes: what a run has on disk is there for seconds
            with suppress(OSError):  # a folder went while it was looked into
                seen |= {path.parts[-3] for path in disk.rglob("*.swp")}
            time.sleep(0.2)
        results = running.result()
    assert seen == {"optimizer", "float32params"}
    for number, result in enumerate(results):
        assert worst_relative_error(result, one) < 1e-5, number
    assert not list(disk.iterdir())


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"engine": "deepspeed", "zero_stage": 3, "zero": {"prefetch_elements": -1}}, "zero.prefetch_elements"),
        ({"zero": {"overlap": True}}, "zero belongs to engine: deepspeed"),
        ({"deepspeed": {"dump_state": True}}, "deepspeed belongs to engine: deepspeed"),
        (
            {"engine": "deepspeed", "zero_stage": 2, "offload": "cpu", "zero": {"offload_parameters": "cpu"}},
            "zero_stage: 3",
        ),
        ({"engine": "deepspeed", "zero_stage": 3, "zero": {"offload_parameters": "cpu"}}, "needs offload: cpu"),
        ({"engine": "deepspeed", "zero_stage": 3, "offload": "nvme"}, "needs zero.nvme_path"),
        ({"engine": "deepspeed", "zero_stage": 3, "zero": {"nvme_path": "/x"}}, "nvme_path is for offload: nvme"),
    ],
)
def test_fields_that_contradict_are_refused(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(ParallelismSpec, layout, "job")
