"""Mixtures of experts cut over a tensor axis, alone and with an expert axis or stages, equal one process."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from trainer.models.build import build_model
from trainer.models.facts import num_experts_of
from trainer.strategies import check_supported, tensor_parallel
from trainer_testing.families import FAMILIES
from trainer_testing.mixtures import mixture
from trainer_testing.strategy_worker import Result, RunRequest, run, worst_relative_error
from trainer_testing.tiny import VOCAB_SIZE, tiny_job
from transformers import AutoConfig

from trainyard.errors import InputError
from trainyard.spec.job import ParallelismSpec
from trainyard.spec.support import expert_obstacle

TOLERANCE = 1e-5
SAVED_AT, LAST = 2, 4

LAYOUTS: dict[str, dict[str, int]] = {
    "single": {},
    "tensor2": {"tensor": 2},
    "tensor4": {"tensor": 4},
    "tensor2-expert2-fsdp2": {"tensor": 2, "expert": 2, "data_shard": 2},
    "pipeline2-tensor2": {"pipeline": 2, "tensor": 2},
}
CASES: dict[int, list[tuple[str, str]]] = {
    4: [("DeepSeek-V3", "tensor2-expert2-fsdp2")],
    2: [("Qwen3-MoE", "tensor2")],
    1: [("Qwen3-MoE", "single"), ("DeepSeek-V3", "single")],
}
"""World size -> family, strategy."""

MORE = [("Mixtral", "tensor2-expert2-fsdp2"), ("DeepSeek-V2", "tensor4"), ("Qwen3-MoE", "pipeline2-tensor2")]
"""At four ranks."""

SAVED = ("DeepSeek-V3", "tensor2-expert2-fsdp2")
RESUMED: dict[int, list[tuple[str, str]]] = {
    4: [SAVED],
    2: [("DeepSeek-V3", "tensor2")],
    1: [("DeepSeek-V3", "single")],
}
"""What goes on from SAVED's checkpoint."""


def request_of(family: str, strategy: str, **changes: Any) -> RunRequest:
    """A case's run."""
    job = {"model": FAMILIES[family], "parallelism": LAYOUTS[strategy], "steps": LAST}
    return RunRequest(strategy, last_step=LAST, job=job, **changes)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, str, str], Result]:
    """By ("whole" or "resumed", world size, family, strategy)."""
    folder = str(tmp_path_factory.mktemp("experts") / "saved")
    seen: dict[tuple[str, int, str, str], Result] = {}
    for world_size in (4, 2, 1):
        keys, requests = [], []
        for kind, cases in (("whole", CASES), ("resumed", RESUMED)):
            for family, strategy in cases[world_size]:
                changes: dict[str, Any] = {}
                if kind == "resumed":
                    changes = {"load": folder, "first_step": SAVED_AT + 1}
                elif (family, strategy) == SAVED:
                    changes = {"save": folder, "save_after_step": SAVED_AT}
                keys.append((kind, world_size, family, strategy))
                requests.append(request_of(family, strategy, **changes))
        seen |= dict(zip(keys, run(world_size, requests), strict=True))
    return seen


def test_experts_on_tensor_ranks_equal_one_process(results: dict[tuple[str, int, str, str], Result]) -> None:
    errors = {
        (kind, world_size, family, strategy): worst_relative_error(result, results["whole", 1, family, "single"])
        for (kind, world_size, family, strategy), result in results.items()
    }
    print("\n".join(f"{key}: {error:.1e}" for key, error in errors.items()))
    assert len(errors) == sum(len(cases) for table in (CASES, RESUMED) for cases in table.values())
    assert {key: error for key, error in errors.items() if error > TOLERANCE} == {}
    whole, again = results["whole", 4, *SAVED], results["resumed", 4, *SAVED]
    assert again["loss"] == whole["loss"][SAVED_AT:], "bit for bit at the same layout"


@pytest.mark.parametrize("mode", ["selective", pytest.param("full", marks=pytest.mark.slow)])
def test_so_do_those_that_are_computed_again(mode: str) -> None:
    """Their FSDP units lie inside the blocks, and work in another way where these are recomputed."""
    families = ["DeepSeek-V2", "Mixtral", "Qwen3-MoE"]
    again = [
        replace(asked, job=asked.job | {"activation_checkpointing": mode})
        for asked in (request_of(family, "tensor2") for family in families)
    ]
    theirs = run(1, [request_of(family, "single") for family in families])
    errors = [worst_relative_error(*pair) for pair in zip(run(2, again), theirs, strict=True)]
    assert max(errors) <= TOLERANCE, dict(zip(families, errors, strict=True))


@pytest.mark.full
def test_more_experts_on_tensor_ranks_equal_one_process() -> None:
    ours = run(4, [request_of(*asked) for asked in MORE])
    theirs = run(1, [request_of(family, "single") for family, _ in MORE])
    errors = [worst_relative_error(*pair) for pair in zip(ours, theirs, strict=True)]
    assert max(errors) <= TOLERANCE, dict(zip(MORE, errors, strict=True))


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({"num_local_experts": 6}, {"tensor": 2, "expert": 2, "data_shard": 2}, r"2 x tensor 2 does not divide .* 6 "),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, {"tensor": 4}, r"num_attention_heads \(6\)"),
        ({"num_hidden_layers": 4}, {"tensor": 2, "pipeline": 2, "pipeline_schedule": "zero_bubble"}, r"zero_bubble"),
    ],
)
def test_what_can_not_be_cut_is_one_line(changes: dict[str, Any], layout: dict[str, Any], message: str) -> None:
    job = tiny_job("any", 4, model=FAMILIES["Mixtral"] | {"hidden_size": 48} | changes, parallelism=layout)
    with pytest.raises(InputError, match=message) as caught:
        check_supported(job, device_type="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "degrees", "message"),
    [
        ("inkling2_text", {"tensor": 2}, r"^parallelism\.tensor: 2 needs .* inkling2_text is not"),
        ("inkling2_text", {"tensor": 2, "data_shard": 4, "expert": 4}, r"^parallelism\.expert: 4 needs .*text is not"),
        ("mixtral", {"tensor": 3}, r"^parallelism\.tensor: 3 does not divide the model's 8 experts"),
    ],
)
def test_a_refusal_names_the_field_that_is_set(model_type: str, degrees: dict[str, int], message: str) -> None:
    num_experts = num_experts_of(AutoConfig.for_model(model_type))
    refusal = expert_obstacle(model_type, num_experts, ParallelismSpec.model_validate(degrees))
    assert refusal is not None
    assert re.search(message, refusal)


_MIXTURES = [name for name in FAMILIES if name in {"Mixtral", "Qwen3-MoE", "DeepSeek-V2", "DeepSeek-V3"}]


@pytest.mark.parametrize("family", _MIXTURES)
def test_all_that_is_beside_experts_is_cut_or_a_router(family: str) -> None:
    model: Any = build_model(tiny_job("single", 1, model=FAMILIES[family]), vocab_size=VOCAB_SIZE)
    tensor_parallel.check_experts(model, 2)


@pytest.mark.parametrize(
    ("model_type", "left_out", "named"),
    [
        ("axk1", (), r"model\.layers\.1\.mlp\.post_mlp_layernorm"),
        ("deepseek_v3", ("gate", "up", "down"), r"model\.layers\.1\.mlp\.shared_experts\.gate_proj"),
        ("deepseek_v3", ("down",), r"model\.layers\.1\.mlp\.shared_experts\.down_proj"),
        ("qwen2_moe", ("gate", "up", "down"), r"model\.layers\.0\.mlp\.shared_expert\.gate_proj"),
    ],
)
def test_what_would_be_counted_once_a_rank_is_refused(
    model_type: str, left_out: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm of what experts give, and shared experts that a plan (of another version) leaves whole, in all or part."""
    known = FAMILIES["DeepSeek-V3"] if model_type == "deepseek_v3" else mixture(model_type, is_balanced=False)
    model: Any = build_model(tiny_job("single", 1, model=known, document_masks=False), vocab_size=VOCAB_SIZE)
    dropped = {
        f"layers.*.mlp.{module}.{part}_proj" for module in ("shared_experts", "shared_expert") for part in left_out
    }
    plan = {name: style for name, style in tensor_parallel.plan_of(model.config).items() if name not in dropped}
    monkeypatch.setattr(tensor_parallel, "plan_of", lambda _: plan)
    axis: Any = SimpleNamespace(size=lambda: 2)  # nothing is cut before
    with pytest.raises(InputError, match=rf"^parallelism\.tensor: 2: {named} of {model_type} is beside") as caught:
        tensor_parallel.apply(model, (), axis, split_sequence=False)
    assert "\n" not in str(caught.value)
