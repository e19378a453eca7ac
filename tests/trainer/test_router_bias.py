"""The bias by which DeepSeek-V3's routers choose: moved as its paper does, or left as it is, alike under every layout.

A token goes to another expert when the bias moves, so that losses say whether two layouts have the same one.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer.losses.head import choices_of, plan_loss
from trainer.models.build import build_model
from trainer.optimizers.router_bias import BUFFER, RouterBias, described, routers_of
from trainer.strategies import check_supported
from trainer_testing.families import FAMILIES
from trainer_testing.mixtures import mixture
from trainer_testing.strategy_worker import Result, RunRequest, run, worst_relative_error
from trainer_testing.support_table import save_sources, source_of
from trainer_testing.tiny import VOCAB_SIZE, global_batch, tiny_job
from transformers import CONFIG_MAPPING

from trainyard.errors import InputError
from trainyard.spec.support import ROUTER_BIAS_FAMILIES

RATE = 0.004
SAVED_AT, LAST = 3, 6
NUM_EXPERTS = 8
MODEL = FAMILIES["DeepSeek-V3"] | {"num_hidden_layers": 4, "n_routed_experts": NUM_EXPERTS, "topk_group": 2}
"""One dense layer and three mixtures, so that a pipeline's stages have different numbers of routers."""
MOVED = {"model": MODEL, "optimizer": {"router_bias_rate": RATE}, "steps": LAST}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {},
    "tensor2": {"tensor": 2},
    "pipeline2": {"pipeline": 2},
    "context2": {"context": 2},
    "expert2-fsdp2": {"expert": 2, "data_shard": 2},
    "zero1": {},
    "zero3": {},
}
"""Two ranks; ZeRO in float32."""
LARGER: dict[str, dict[str, Any]] = {
    "tensor2-expert2-fsdp2": {"tensor": 2, "expert": 2, "data_shard": 2},
    "pipeline2-fsdp2": {"pipeline": 2, "data_shard": 2, "pipeline_schedule": "interleaved_1f1b"},
    "zero2": {},
}
PRECISIONS = {"fp64": 1e-7, "fp32": 1e-5}
WEIGHTS = {"fp64": 1e-6, "fp32": 1e-2}
"""Of weights, in which AdamW shows it more, something is left in fp64 too: transformers' router computes in float32."""


def precision_of(strategy: str) -> str:
    return "fp32" if strategy.startswith("zero") else "fp64"


def request(strategy: str, layout: dict[str, Any], job: dict[str, Any], folder: Path, **more: Any) -> RunRequest:
    """A run that compares its last weights, and buffers, with one process's."""
    precision = precision_of(strategy)
    job = {**job, "precision": precision, "parallelism": layout}
    return RunRequest(strategy, **{"last_step": LAST, **more}, job=job, weights=str(folder / precision))


def references(job: dict[str, Any], folder: Path) -> dict[str, Result]:
    requests = [
        RunRequest("single", last_step=LAST, job=job | {"precision": precision}, keep_weights=str(folder / precision))
        for precision in PRECISIONS
    ]
    return dict(zip(PRECISIONS, run(1, requests), strict=True))


def biases(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: values for name, values in weights.items() if name.endswith(BUFFER)}


def check(requests: list[RunRequest], world_size: int, ones: dict[str, Result]) -> list[Result]:
    results = run(world_size, requests)
    for asked, result in zip(requests, results, strict=True):
        precision = precision_of(asked.strategy)
        assert worst_relative_error(result, ones[precision]) < PRECISIONS[precision], asked
        assert result["weights_error"] < WEIGHTS[precision], asked
    return results


def test_a_step_moves_it_against_the_loads_of_the_whole_batch(tmp_path: Path) -> None:
    job = tiny_job("single", 1, **MOVED)
    model = build_model(job, vocab_size=VOCAB_SIZE)
    loads: dict[str, torch.Tensor] = {}
    for name, router in routers_of(model).items():

        def count(_: Any, __: Any, output: Any, name: str = name) -> None:
            loads[name] = torch.bincount(output[2].flatten(), minlength=NUM_EXPERTS)

        router.register_forward_hook(count)
    model.train()(input_ids=global_batch(1)[0])
    path = tmp_path / "weights"
    # Two micro-batches, each computed twice.
    recomputed = MOVED | {"activation_checkpointing": "full"}
    run(1, [RunRequest("single", last_step=1, job=recomputed, keep_weights=str(path))])
    found = biases(torch.load(path))
    assert set(found) == {f"model.{name}.{BUFFER}" for name in loads} and len(loads) == 3
    for name, load in loads.items():
        mean = load.sum() / NUM_EXPERTS
        assert load.max() > load.min(), "nothing to even out"
        assert torch.equal(found[f"model.{name}.{BUFFER}"], RATE * torch.sign(mean - load)), name


@pytest.mark.slow
def test_every_layout_moves_it_alike_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    ones = references(MOVED, tmp_path)
    moved = biases(torch.load(tmp_path / "fp64"))
    assert max(float(values.abs().max()) for values in moved.values()) > 1.5 * RATE, "none moved twice the same way"
    (frozen,) = run(1, [RunRequest("single", last_step=LAST, job={"model": MODEL, "precision": "fp64", "steps": LAST})])
    assert worst_relative_error(frozen, ones["fp64"]) > 1e-4, "no token went elsewhere"

    saving = {"save_after_step": SAVED_AT}
    whole = [
        request(name, layout, MOVED, tmp_path, save=str(tmp_path / f"saved-{name}"), **saving)
        for name, layout in LAYOUTS.items()
    ]
    results = check(whole, 2, ones)
    again = [replace(one, load=one.save, save=None, first_step=SAVED_AT + 1) for one in whole]
    for one, before, after in zip(again, results, check(again, 2, ones), strict=True):
        assert after["loss"] == before["loss"][SAVED_AT:], (one.strategy, "bit for bit at the same layout")
    other = replace(again[0], load=str(tmp_path / "saved-expert2-fsdp2"))
    check([other], 2, ones)


@pytest.mark.slow
def test_larger_products_move_it_alike(tmp_path: Path) -> None:
    ones = references(MOVED, tmp_path)
    check([request(name, layout, MOVED, tmp_path) for name, layout in LARGER.items()], 4, ones)


@pytest.mark.slow
def test_without_a_rate_it_stays_what_the_models_files_have(tmp_path: Path) -> None:
    """Then it is the checkpoint's, too: those that go on begin with zeros."""
    save_sources(tmp_path, ["DeepSeek-V3"])
    path = source_of(tmp_path, "DeepSeek-V3") / "model.safetensors"
    tensors = load_file(path)
    given = {name: torch.tensor([0.3, -0.3, -0.1, 0.1]) for name in biases(tensors)}
    save_file(tensors | given, path, metadata={"format": "pt"})
    job = {"source": str(path.parent), "steps": LAST}
    ones = references(job, tmp_path)
    for precision in PRECISIONS:
        kept = biases(torch.load(tmp_path / precision))
        assert {name.removeprefix("model."): values.tolist() for name, values in kept.items()} == {
            name: values.tolist() for name, values in given.items()
        }
    chosen = ("fsdp", "tensor2", "expert2-fsdp2", "zero3")
    whole = [
        request(name, LAYOUTS[name], job, tmp_path, save=str(tmp_path / name), save_after_step=SAVED_AT)
        for name in chosen
    ]
    check(whole, 2, ones)
    anew = {"model": FAMILIES["DeepSeek-V3"], "steps": LAST}
    half = {"first_step": SAVED_AT + 1}
    check([request(name, LAYOUTS[name], anew, tmp_path, load=str(tmp_path / name), **half) for name in chosen], 2, ones)


_SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2} | {
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0},
    **{"max_position_embeddings": 64, "tie_word_embeddings": False, "attention_dropout": 0.0},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
_GROUPS = {"n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1} | {
    "n_group": 2,
    "topk_group": 1,
}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8} | {
    "num_key_value_heads": 4
}
_INDEXED = _GROUPS | _LATENT | {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
ROUTERS: dict[str, dict[str, Any]] = {
    "axk1": _GROUPS | _LATENT | {"head_dim": 8},
    "deepseek_v32": _INDEXED,
    "dots1": _GROUPS,
    "exaone_moe": _ONE_GROUP | {"num_experts": NUM_EXPERTS, "first_k_dense_replace": 1, "num_shared_experts": 1},
    "glm4_moe": _GROUPS,
    "glm4_moe_lite": _GROUPS | _LATENT,
    "glm_moe_dsa": _INDEXED,
    "hy_v3": {"num_experts": NUM_EXPERTS, "num_shared_experts": 1, "first_k_dense_replace": 1},
    "mimo_v2_flash": _GROUPS
    | _ONE_GROUP
    | {"v_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16}
    | {"swa_v_head_dim": 16, "layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense", "sparse"]},
    "minimax_m2": {"num_local_experts": NUM_EXPERTS},
    "solar_open": _GROUPS,
}
"""Those beside DeepSeek-V3: most have its router, MiniMax-M2's and Hunyuan 3's are handed the bias by their block."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "families",
    [
        pytest.param(("glm4_moe", "minimax_m2"), id="both kinds"),
        pytest.param(tuple(ROUTERS), id="all", marks=pytest.mark.full),
    ],
)
def test_routers_of_other_families_are_moved_alike(families: tuple[str, ...], tmp_path: Path) -> None:
    known = [name for name in families if name in CONFIG_MAPPING]  # an older transformers has not all of them
    models = [_SIZES | ROUTERS[name] | {"model_type": name} for name in known]
    jobs = [{"model": model, "steps": LAST, "document_masks": False} for model in models]
    moved = [job | {"optimizer": {"router_bias_rate": RATE}} for job in jobs]
    files = [str(tmp_path / name) for name in known]
    one = [
        RunRequest("single", last_step=4, job=job, keep_weights=file) for job, file in zip(moved, files, strict=True)
    ]
    ones, frozen = run(1, one), run(1, [RunRequest("single", last_step=4, job=job) for job in jobs])
    for name, file, result, other in zip(known, files, ones, frozen, strict=True):
        found = biases(torch.load(file))
        assert found and all(values.numel() == NUM_EXPERTS for values in found.values()), name
        assert max(float(values.abs().max()) for values in found.values()) > 1.5 * RATE, (
            name,
            "none moved twice alike",
        )
        assert worst_relative_error(other, result) > 1e-5, (name, "no token went elsewhere")
    for engine in ("ddp", "fsdp", "expert2-fsdp2", "zero3"):
        layout = {"parallelism": LAYOUTS[engine]}
        asked = [
            RunRequest(engine, last_step=4, job=job | layout, weights=file)
            for job, file in zip(moved, files, strict=True)
        ]
        for name, result, reference in zip(known, run(2, asked), ones, strict=True):
            assert worst_relative_error(result, reference) < 1e-5, (name, engine)
            assert result["weights_error"] < 1e-2, (name, engine)


def test_every_family_that_is_let_in_is_held_to_one_process() -> None:
    assert {*ROUTERS, "deepseek_v3"} == ROUTER_BIAS_FAMILIES


def test_a_step_that_is_not_applied_moves_nothing_and_counts_for_no_other() -> None:
    model = build_model(tiny_job("single", 1, **MOVED), vocab_size=VOCAB_SIZE).train()
    bias = RouterBias([model], rate=RATE, size=(4, NUM_EXPERTS), device=torch.device("cpu"), world_size=1)
    router = routers_of(model)["model.layers.1.mlp.gate"]

    def chosen(*experts: int) -> None:
        indices = torch.tensor([experts])
        for hook in router._forward_hooks.values():
            hook(router, (), (None, None, indices))

    chosen(0, 0, 0, 0)
    bias.end_step(was_applied=False)
    assert not router.get_buffer(BUFFER).any()
    model.eval()
    chosen(0, 0, 0, 0)
    model.train()
    chosen(1, 1, 2, 3)
    bias.end_step(was_applied=True)
    assert router.get_buffer(BUFFER).tolist() == pytest.approx([RATE, -RATE, *[-RATE] * 2, *[RATE] * 4])
    assert not routers_of(model)["model.layers.2.mlp.gate"].get_buffer(BUFFER).any()


@pytest.mark.parametrize(("rate", "words"), [(None, "stays as it is"), (0.001, "moves by 0.001 a step")])
def test_what_becomes_of_it_is_said(rate: float | None, words: str) -> None:
    for family, is_said in (("DeepSeek-V3", True), ("DeepSeek-V2", False)):
        settings = {"optimizer": {"router_bias_rate": rate}} if is_said else {}
        job = tiny_job("single", 1, model=FAMILIES[family], **settings)
        model = build_model(job, vocab_size=VOCAB_SIZE)
        told = choices_of(model, job, plan_loss(model, job), torch.device("cpu")).get("router")
        assert (told is not None and words in told) if is_said else told is None


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("longcat_flash", _LATENT | {"n_routed_experts": 8, "zero_expert_num": 2, "moe_topk": 2, "num_layers": 2}),
        ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1}),
    ],
    ids=["experts that compute nothing", "a weight, no buffer"],
)
def test_the_start_advises_nothing_that_is_refused(family: str, own: dict[str, Any]) -> None:
    """More families have such a bias, and neither moving it nor an auxiliary loss was tried in all."""
    settings = {name: value for name, value in _SIZES.items() if name != "head_dim"} | own | {"model_type": family}
    job = tiny_job("single", 1, model=settings, document_masks=False)
    model = build_model(job, vocab_size=VOCAB_SIZE)
    told = described(model, job)
    assert told is not None and "stays as it is" in told and "router_bias_rate" not in told, told
    assert told.endswith(f"no way to move it is verified in {family}")
    moved = tiny_job("single", 1, model=settings, document_masks=False, optimizer={"router_bias_rate": RATE})
    with pytest.raises(InputError, match=f"not in {family}"):
        check_supported(moved, device_type="cpu")


def test_beside_the_auxiliary_loss_it_is_not_said_to_be_all_that_balances() -> None:
    """MiniMax-M2 has both."""
    job = tiny_job("single", 1, model=mixture("minimax_m2"), document_masks=False)
    told = described(build_model(job, vocab_size=VOCAB_SIZE), job)
    assert told is not None and told.endswith("the routers' auxiliary loss keeps the experts' loads even")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": FAMILIES["Mixtral"]}, r"router_bias_rate: 0\.004 is for routers .* deepseek_v3, .* not in mixtral"),
        ({"compile": True}, r"router_bias_rate: 0\.004 is not implemented with training\.compile"),
        ({"adapter": {"kind": "lora", "targets": ["o_proj"]}}, r"an adapter leaves the model's routers as they are"),
    ],
)
def test_what_it_can_not_be_had_with_is_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    job = MOVED | changes
    if "adapter" in changes:
        save_sources(tmp_path, ["DeepSeek-V3"])
        job = job | {"source": str(source_of(tmp_path, "DeepSeek-V3"))}
    with pytest.raises(InputError) as caught:
        check_supported(tiny_job("single", 1, **job), device_type="cpu")
    assert re.search(message, str(caught.value)) and "\n" not in str(caught.value)
