"""LoRA and QLoRA under every product equal one process, and an adapter goes on under another layout.

Gradients are accumulated and clipped, so that an adapter's uncut half whose gradient stays one rank's own, is summed
twice or counts twice in the norm would show. Each world size runs all its cases in one start.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.distributed.checkpoint import FileSystemReader
from trainer.checkpoint.manifest import step_folder
from trainer.strategies import check_supported
from trainer.strategies.parallel import name_of
from trainer_testing.families import FAMILIES
from trainer_testing.strategy_worker import Result, RunRequest, run, worst_relative_error
from trainer_testing.support_table import save_sources, source_of
from trainer_testing.tiny import tiny_job

from trainyard.errors import InputError
from trainyard.spec.job import ParallelismSpec

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
SAVED_AT, LAST = 2, 4

EVERY_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
ATTENTION = ("q_proj", "o_proj")
TARGETS = {
    "Llama": EVERY_LINEAR,
    "Llama, tied": EVERY_LINEAR[:-1],
    "GPT-2, tied": ("c_attn", "c_fc", "c_proj"),
    "DeepSeek-V3": ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "Mixtral": ATTENTION,
}


class Case(NamedTuple):
    """One run; `layout` as ParallelismSpec's items."""

    family: str
    kind: str
    layout: tuple[tuple[str, Any], ...]


def case(family: str, kind: str, **layout: Any) -> Case:
    return Case(family, kind, tuple(layout.items()))


SAVED = case("Llama", "lora", pipeline=2, tensor=2)
CASES: dict[int, list[Case]] = {
    4: [SAVED, case("Mixtral", "qlora", tensor=2, expert=2, data_shard=2)],
    2: [
        case("Llama", "lora", tensor=2),
        case("DeepSeek-V3", "lora", tensor=2),
        case("Mixtral", "lora", expert=2, data_shard=2),
        case("Llama", "qlora", data_shard=2),
        case("Llama", "qlora", pipeline=2),
        case("GPT-2, tied", "qlora", tensor=2),
    ],
}
MORE: dict[int, list[Case]] = {
    4: [case("Llama, tied", "qlora", tensor=2, data_shard=2), case("Llama, tied", "lora", tensor=2, context=2)],
    2: [
        case("GPT-2, tied", "lora", tensor=2),
        case("Llama, tied", "lora", pipeline=2),
        case("GPT-2, tied", "lora", pipeline=2),
        case("Llama", "qlora", data_replicate=2),
        case("Mixtral", "qlora", tensor=2),
    ],
}
RESUMED: dict[int, list[Case]] = {
    4: [SAVED, case("Llama", "lora", tensor=2, data_shard=2)],
    2: [case("Llama", "lora", data_shard=2), case("Llama", "lora", engine="deepspeed", zero_stage=2, data_replicate=2)],
    1: [case("Llama", "lora")],
}


def strategy_of(asked: Case, world_size: int) -> str:
    layout = dict(asked.layout)
    if layout.get("engine") == "deepspeed":
        return f"zero{layout['zero_stage']}"
    if world_size == 1:
        return "single"
    if len(layout) == 1 and set(layout) <= {"data_shard", "data_replicate"}:
        return "fsdp" if "data_shard" in layout else "ddp"
    return name_of(ParallelismSpec.model_validate(layout))


def request_of(folder: Path, asked: Case, world_size: int, **changes: Any) -> RunRequest:
    """A case's run on the family's base model in `folder`."""
    adapter = {"kind": asked.kind, "rank": 4, "targets": TARGETS[asked.family]}
    source = str(source_of(folder, asked.family))
    job = {"source": source, "adapter": adapter, "parallelism": dict(asked.layout), "steps": LAST}
    return RunRequest(strategy_of(asked, world_size), last_step=LAST, job=job, **changes)


def alone(asked: Case) -> Case:
    """The same in one process."""
    return Case(asked.family, asked.kind, ())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, Case], Result]:
    """By ("whole" or "resumed", world size, case)."""
    folder = tmp_path_factory.mktemp("adapters")
    save_sources(folder, TARGETS)
    references = list(dict.fromkeys(alone(asked) for cases in CASES.values() for asked in cases))
    seen: dict[tuple[str, int, Case], Result] = {}
    for world_size, cases in ((4, CASES[4]), (2, CASES[2]), (1, references)):
        keys = [("whole", world_size, asked) for asked in cases]
        saving = {"save": str(folder / "saved"), "save_after_step": SAVED_AT}
        requests = [request_of(folder, asked, world_size, **(saving if asked == SAVED else {})) for asked in cases]
        for asked in RESUMED[world_size]:
            keys.append(("resumed", world_size, asked))
            changes = {"load": str(folder / "saved"), "first_step": SAVED_AT + 1}
            requests.append(request_of(folder, asked, world_size, **changes))
        seen |= dict(zip(keys, run(world_size, requests), strict=True))
    names = FileSystemReader(folder / "saved" / step_folder(SAVED_AT)).read_metadata().state_dict_metadata
    assert all(".lora_A." in name or ".lora_B." in name for name in names if name != "optim.step")
    return seen


def test_an_adapter_in_a_product_equals_one_process(results: dict[tuple[str, int, Case], Result]) -> None:
    errors = {
        asked: worst_relative_error(results["whole", world_size, asked], results["whole", 1, alone(asked)])
        for world_size, cases in CASES.items()
        for asked in cases
    }
    print("\n".join(f"{asked}: {error:.1e}" for asked, error in errors.items()))
    assert {asked: error for asked, error in errors.items() if error > TOLERANCE} == {}


@pytest.mark.full
def test_more_adapters_in_products_equal_one_process(tmp_path: Path) -> None:
    save_sources(tmp_path, TARGETS)
    for world_size, cases in MORE.items():
        ours = run(world_size, [request_of(tmp_path, asked, world_size) for asked in cases])
        theirs = run(1, [request_of(tmp_path, alone(asked), 1) for asked in cases])
        errors = [worst_relative_error(*pair) for pair in zip(ours, theirs, strict=True)]
        assert max(errors) <= TOLERANCE, dict(zip(cases, errors, strict=True))


def test_an_adapter_learns_and_is_clipped(results: dict[tuple[str, int, Case], Result]) -> None:
    lora, qlora = (results["whole", 1, case("Llama", kind)] for kind in ("lora", "qlora"))
    assert lora["loss"][-1] < lora["loss"][0]
    assert min(lora["grad_norm"]) > 0.5
    assert 1e-5 < abs(qlora["loss"][0] / lora["loss"][0] - 1) < 0.01, "4 bits change the base model, and little"


def test_an_adapter_goes_on_under_another_layout(results: dict[tuple[str, int, Case], Result]) -> None:
    whole = results["whole", 1, case("Llama", "lora")]
    resumed = {key[1:]: result for key, result in results.items() if key[0] == "resumed"}
    assert len(resumed) == sum(len(cases) for cases in RESUMED.values())
    errors = {key: worst_relative_error(result, whole) for key, result in resumed.items()}
    assert {key: error for key, error in errors.items() if error > TOLERANCE} == {}
    again, first = results["resumed", 4, SAVED], results["whole", 4, SAVED]
    assert again["loss"] == first["loss"][SAVED_AT:], "bit for bit at the same layout"


@pytest.mark.parametrize(
    ("adapter", "layout", "message"),
    [
        ({"kind": "qlora"}, {"engine": "deepspeed", "zero_stage": 2, "data_replicate": 2}, "qlora is not implemented"),
        ({"targets": ("lm_head",)}, {"pipeline": 2}, r"adapter\.targets: lm_head alone leaves the first pipeline"),
    ],
)
def test_what_an_adapter_can_not_do_is_one_line(
    adapter: dict[str, Any], layout: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_sources(tmp_path, ["Llama"])
    source = str(source_of(tmp_path, "Llama"))
    job = tiny_job("any", 2, source=source, adapter={"kind": "lora"} | adapter, parallelism=layout)
    with pytest.raises(InputError, match=message) as caught:
        check_supported(job, device_type="cpu")
    assert "\n" not in str(caught.value)


def test_experts_get_no_adapter(tmp_path: Path) -> None:
    save_sources(tmp_path, ["Qwen3-MoE"])
    assert "Qwen3-MoE" in FAMILIES
    stated = {"kind": "lora", "targets": ("q_proj", "gate_proj")}
    job = tiny_job("single", 1, source=str(source_of(tmp_path, "Qwen3-MoE")), adapter=stated)
    with pytest.raises(InputError, match=r"targets: gate_proj: in qwen3_moe these are experts too"):
        check_supported(job, device_type="cpu")
