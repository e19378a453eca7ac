"""Further families' experts on different ranks: how they are packed, that each equals one process, checkpoints.

In float64, with accumulation, clipping, unequal sequences and, where a family has one, the routers' auxiliary loss: the
micro-batches are one process's, so that it is the same quantity. Layouts of the families that every axis takes are in
`parity` and test_context_expert.py.
"""

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from trainer.export import Export, export
from trainer.models.adapters import add_adapter
from trainer.models.build import build_model, outline_model, transformer_blocks
from trainer.models.facts import num_experts_of
from trainer.models.packed_experts import BIASES
from trainer.models.quantized import quantize_blocks
from trainer.strategies import check_supported
from trainer.strategies.expert_parallel import expert_modules
from trainer_testing.families import OWN_SIZES, TINY
from trainer_testing.mixtures import MIXTURES, NUM_EXPERTS, mixture
from trainer_testing.strategy_worker import RunRequest, run, worst_relative_error
from trainer_testing.text_job import run_trainer, write_job
from trainer_testing.tiny import VOCAB_SIZE, strategy_name, tiny_job
from transformers import AutoConfig

from trainyard.errors import InputError
from trainyard.spec.job import ParallelismSpec
from trainyard.spec.obstacles import PACKED_EXPERT_FAMILIES, job_obstacles, layout_obstacles
from trainyard.spec.support import (
    EXPERT_FAMILIES,
    EXPERT_TENSOR_FAMILIES,
    ROUTER_FAMILIES,
    TENSOR_FAMILIES,
    UNSPREAD_EXPERTS,
    ModelFacts,
)

LAST, SAVED_AT = 4, 2
TOLERANCE = 1e-7
EXACT = 1e-12
"""Where nothing is float32."""
WEIGHTS = {"beam": 1e-5, "nemotron_h": 1e-6}
"""BEAM's gates and Nemotron-H's state space are float32 in every job, and AdamW shows it more in weights."""

SPREAD: dict[str, int] = {"expert": 2, "data_shard": 2}
COPIED: dict[str, int] = {"expert": 2, "data_shard": 4}
"""Two ranks have copies of each expert, which FSDP shards inside of it."""

CUT: dict[str, int] = {"tensor": 2}
CUT_AND_SPREAD: dict[str, int] = {"tensor": 2, "expert": 2, "data_shard": 2}

QUICK = ("beam", "glm4_moe_lite", "gpt_oss", "qwen3_next")
"""BEAM's layers without rotations are given None for them, which FSDP has to hand on."""
OF_FOUR = ("aria_text", "deepseek_v4", "gemma4_text", "glm4_moe", "gpt_oss", "minimax_m2", "qwen3_5_moe_text")
"""Transposed matrices, hashed tokens, experts beside a dense block, shared ones, biases, and what is usual."""


QUICK_CUT = ("glm4_moe", "gpt_oss", "minimax_m2", "qwen2_moe")
"""Shared experts that transformers' plan has and has not, sinks, a vector with an entry a head, and norms of all
heads."""
CUT_WEIGHTS = 1e-6
"""Sums over tensor ranks round otherwise than one process, and most of these models' norms and routers are in float32:
EXACT is what they are else."""


def request(family: str, layout: dict[str, int], folder: Path, **changes: Any) -> RunRequest:
    """A family's run, that compares its last weights with those of one process."""
    job = {
        "model": mixture(family),
        "document_masks": False,
        "precision": "fp64",
        "steps": LAST,
        "micro_batch_size": 4,
    }
    name = strategy_name(ParallelismSpec.model_validate(layout)) if layout else "single"
    kept = {"weights" if layout else "keep_weights": str(folder / family)}
    return RunRequest(name, last_step=LAST, job=job | {"parallelism": layout}, **kept, **changes)


def check(families: tuple[str, ...], layout: dict[str, int], folder: Path, *, is_wide: bool = False) -> None:
    is_cut = "tensor" in layout
    numbers = EXACT if is_wide else TOLERANCE
    allowed = dict.fromkeys(families, CUT_WEIGHTS if is_cut and not is_wide else numbers)
    allowed |= {} if is_wide else WEIGHTS
    ones = run(1, [request(family, {}, folder, is_wide=is_wide) for family in families])
    world_size = ParallelismSpec.model_validate(layout).world_size
    results = run(world_size, [request(family, layout, folder, is_wide=is_wide) for family in families])
    wrong = {}
    for family, result, one in zip(families, results, ones, strict=True):
        found = worst_relative_error(result, one), result["weights_error"]
        print(f"{family}: {found[0]:.0e}, weights {found[1]:.0e}")
        if not (found[0] < numbers and found[1] < allowed[family]):
            wrong[family] = found
    assert wrong == {}


@pytest.mark.parametrize(
    ("families", "layout"),
    [
        pytest.param(QUICK, SPREAD, id="quick"),
        pytest.param(tuple(sorted(MIXTURES)), SPREAD, id="all", marks=pytest.mark.full),
        pytest.param(OF_FOUR, COPIED, id="copies", marks=pytest.mark.full),
        pytest.param(QUICK_CUT, CUT, id="quick, cut"),
        pytest.param(tuple(sorted(EXPERT_TENSOR_FAMILIES)), CUT, id="all, cut", marks=pytest.mark.full),
        pytest.param(tuple(sorted(EXPERT_TENSOR_FAMILIES)), CUT_AND_SPREAD, id="both", marks=pytest.mark.full),
    ],
)
def test_experts_on_ranks_equal_one_process(families: tuple[str, ...], layout: dict[str, int], tmp_path: Path) -> None:
    check(families, layout, tmp_path)


@pytest.mark.parametrize(
    ("families", "layout"),
    [
        pytest.param(("minimax_m2",), CUT, id="quick, cut"),
        pytest.param(tuple(sorted(EXPERT_TENSOR_FAMILIES)), CUT, id="all, cut", marks=pytest.mark.full),
        pytest.param(tuple(WEIGHTS), SPREAD, id="rounded", marks=pytest.mark.full),
    ],
)
def test_what_ranks_differ_by_is_rounding(families: tuple[str, ...], layout: dict[str, int], tmp_path: Path) -> None:
    """Of what these models compute in float32: without it nothing is left of it."""
    check(families, layout, tmp_path, is_wide=True)


def test_every_family_that_is_let_in_is_held_to_one_process() -> None:
    in_parity = {"deepseek_v2", "deepseek_v3", "mixtral", "qwen3_moe"}
    assert MIXTURES.keys() | in_parity == EXPERT_FAMILIES
    assert in_parity == EXPERT_FAMILIES & TENSOR_FAMILIES
    assert MIXTURES.keys() >= EXPERT_TENSOR_FAMILIES
    assert ROUTER_FAMILIES <= EXPERT_FAMILIES and not UNSPREAD_EXPERTS.keys() & EXPERT_FAMILIES


def built(family: str, *, is_balanced: bool = True) -> nn.Module:
    model = mixture(family, is_balanced=is_balanced)
    return build_model(tiny_job("single", 1, model=model, document_masks=False), vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(MIXTURES)]
)
def test_experts_are_known_by_what_they_are(family: str) -> None:
    """No router, shared expert or other module is taken for them, and none of them is passed over."""
    model = built(family)
    config: Any = model.config
    found = expert_modules(model)
    named = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    assert found and found == [module for module in named if [*module.parameters(recurse=False)] and told(module)]
    assert {weight.size(0) for module in found for weight in module.parameters()} == {NUM_EXPERTS}
    assert num_experts_of(config) == NUM_EXPERTS
    has_biases = any(weight.ndim == BIASES for module in found for weight in module.parameters())
    assert has_biases == (family == "gpt_oss")


@pytest.mark.parametrize("family", QUICK)
def test_experts_in_four_bits_are_known_all_the_same(family: str) -> None:
    """Passed over, they would be on every rank, and no number would show it."""
    job = tiny_job("single", 1, model=mixture(family), document_masks=False)
    outline = outline_model(job, vocab_size=VOCAB_SIZE).requires_grad_(False)
    plain = expert_modules(outline)
    quantize_blocks(outline, transformer_blocks(outline))
    stored = expert_modules(outline)
    assert stored == plain and plain
    assert all("codes" in " ".join(dict(module.named_parameters())) for module in stored)


def told(module: nn.Module) -> bool:
    """Whether experts are called with a choice: Inkling's shared ones, packed too, are not."""
    return len(inspect.signature(module.forward).parameters) == 3


@pytest.mark.parametrize("family", sorted(UNSPREAD_EXPERTS))
def test_experts_of_another_kind_are_refused_with_the_reason(family: str) -> None:
    model = TINY | OWN_SIZES.get(family, {}) | {"model_type": family}
    known = AutoConfig.for_model(family)
    model = {name: value for name, value in model.items() if name in known.to_dict() or name in known.attribute_map}
    job = tiny_job("refused", 2, model=model | {"model_type": family}, document_masks=False, parallelism=SPREAD)
    expected = rf"^parallelism\.expert: 2: {family}'s experts .*{UNSPREAD_EXPERTS[family]}; set it to 1"
    with pytest.raises(InputError, match=expected) as caught:
        check_supported(job, device_type="cpu")
    assert "\n" not in str(caught.value)
    alone = build_model(
        tiny_job("single", 1, model=model | {"model_type": family}, document_masks=False), vocab_size=VOCAB_SIZE
    )
    assert expert_modules(alone) == [], "or they are passed over without a word"


@pytest.mark.parametrize(
    ("family", "changes", "name"),
    [
        ("qwen2_moe", {"shared_expert_intermediate_size": 45}, r"shared_expert_intermediate_size \(45\)"),
        ("glm4_moe_lite", {"moe_intermediate_size": 25}, r"moe_intermediate_size \(25\)"),
        ("mimo_v2_flash", {"swa_num_key_value_heads": 1}, r"swa_num_key_value_heads \(1\)"),
        ("gpt_oss", {"num_key_value_heads": 1}, r"num_key_value_heads \(1\)"),
        ("qwen3_next", {"linear_num_key_heads": 1}, r"linear_num_key_heads \(1\)"),
    ],
)
def test_what_tensor_ranks_would_not_share_evenly_is_refused(family: str, changes: dict[str, int], name: str) -> None:
    model = mixture(family, is_balanced=False) | changes
    job = tiny_job("refused", 2, model=model, document_masks=False, parallelism=CUT)
    with pytest.raises(InputError, match=rf"^parallelism\.tensor: 2 does not divide the model's {name}"):
        check_supported(job, device_type="cpu")


def test_adapters_go_to_attention_alone_where_a_mixture_is_cut() -> None:
    """What they drop elsewhere, ranks would have to drop alike."""
    for targets, told in ((["q_proj", "o_proj"], []), (["q_proj", "up_proj", "gate_proj"], ["gate_proj, up_proj"])):
        adapter = {"kind": "lora", "rank": 2, "targets": targets}
        job = tiny_job("refused", 2, source="unread", adapter=adapter, document_masks=False, parallelism=CUT)
        facts = ModelFacts(model_type="qwen2_moe", num_experts=NUM_EXPERTS)
        sizes = {"micro_batch_size": 1, "num_micro_batches": 2, "recompute": "none"}
        found = list(layout_obstacles(job.spec, job.parallelism, facts, **sizes))  # type: ignore[arg-type]
        assert [line.split(": ")[1] for line in found] == told, found


@pytest.mark.slow
def test_adapters_of_cut_attention_equal_one_process(tmp_path: Path) -> None:
    families = ("glm4_moe", "gpt_oss")
    asked = []
    for family in families:
        model: Any = built(family, is_balanced=False)
        model.save_pretrained(tmp_path / family)
        adapter = {"kind": "lora", "rank": 2, "targets": ["q_proj", "o_proj"]}
        job = {"source": str(tmp_path / family), "adapter": adapter, "document_masks": False, "precision": "fp64"}
        asked.append(RunRequest("single", last_step=LAST, job=job | {"micro_batch_size": 4}))
    ones = run(1, asked)
    for layout in (SPREAD, CUT):
        name = strategy_name(ParallelismSpec.model_validate(layout))
        results = run(2, [replace(one, strategy=name, job=one.job | {"parallelism": layout}) for one in asked])
        for family, one, result in zip(families, ones, results, strict=True):
            assert worst_relative_error(result, one) < TOLERANCE, (family, layout)


_IN_BLOCKS = ["gate_proj", "up_proj", "down_proj"]
_OUTSIDE = ("o_proj", "out_proj", "dense")


def linear_layers(model: nn.Module) -> set[str]:
    return {path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, nn.Linear)}


def outside_of_blocks(model: nn.Module) -> list[str]:
    """What an adapter can go to in each of these families."""
    named = linear_layers(model)
    config: Any = model.config
    if config.model_type == "nemotron_h":
        named -= {"out_proj"}  # peft (0.21) takes no model of states by it
    return [name for name in _OUTSIDE if name in named] or sorted(named - {"lm_head", *_IN_BLOCKS})[:1]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(MIXTURES)]
)
def test_no_adapter_goes_to_experts(family: str) -> None:
    """Where peft would give them one for a name that they share with dense layers, that is said where the job is
    read."""
    model = built(family)
    targets = [name for name in _IN_BLOCKS if name in linear_layers(model)]
    if not targets or family in PACKED_EXPERT_FAMILIES:
        targets += outside_of_blocks(model)  # which are no experts, whatever the others are
    adapter = {"kind": "lora", "rank": 2, "targets": targets}
    facts = ModelFacts(model_type=family, num_experts=NUM_EXPERTS)
    job = tiny_job("single", 1, source="unread", adapter=adapter, document_masks=False)
    refused = [line for line in job_obstacles(job.spec, facts) if "these are experts too" in line]
    assert job.spec.model.adapter is not None
    if family in PACKED_EXPERT_FAMILIES:
        assert len(refused) == 1
        with pytest.raises(InputError, match=f"^{refused[0]}$"):
            add_adapter(model, job.spec.model.adapter, seed=0)  # type: ignore[arg-type]
    else:
        assert refused == []
        before = expert_modules(model)
        add_adapter(model, job.spec.model.adapter, seed=0)  # type: ignore[arg-type]
        assert expert_modules(model) == before


SAVED = "gpt_oss"
"""Whose experts have biases: what is cut by number at two ranks is cut inside at four."""


@pytest.mark.slow
def test_experts_that_were_saved_go_on_in_another_layout(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    (one,) = run(1, [request(SAVED, {}, tmp_path)])
    begun = request(SAVED, SPREAD, tmp_path, save=folder, save_after_step=SAVED_AT)
    resumed = {"load": folder, "first_step": SAVED_AT + 1}
    whole, again = run(2, [begun, request(SAVED, SPREAD, tmp_path, **resumed)])
    assert again["loss"] == whole["loss"][SAVED_AT:], "bit for bit at the same layout"
    others = run(4, [request(SAVED, COPIED, tmp_path, **resumed)])
    others += run(2, [request(SAVED, {"data_shard": 2}, tmp_path, **resumed)])
    others += run(1, [replace(request(SAVED, {}, tmp_path, **resumed), keep_weights=None)])
    for result in (whole, again, *others):
        assert worst_relative_error(result, one) < TOLERANCE
        assert result.get("weights_error", 0.0) < TOLERANCE


@pytest.mark.parametrize("kind", [None, "lora", "qlora"])
@pytest.mark.parametrize(
    "families",
    [
        pytest.param(("glm4_moe", "gpt_oss"), id="quick"),
        pytest.param(tuple(sorted(MIXTURES)), id="all", marks=pytest.mark.full),
    ],
)
def test_experts_are_read_from_files_by_their_own_rank(
    families: tuple[str, ...], kind: str | None, tmp_path: Path
) -> None:
    """Files have a matrix for each expert, or packed ones, as transformers writes the family's. In 4 bits a rank has
    its own experts' codes."""
    alone, spread = [], []
    for family in families:
        model: Any = built(family)
        model.save_pretrained(tmp_path / family)
        weights = str(tmp_path / f"{family}.pt")
        job = {"source": str(tmp_path / family), "document_masks": False, "precision": "fp64", "micro_batch_size": 4}
        if kind is not None:
            job["adapter"] = {"kind": kind, "rank": 2, "targets": outside_of_blocks(model)}
        alone.append(RunRequest("single", last_step=2, job=job, keep_weights=weights))
        job = job | {"parallelism": SPREAD}
        spread.append(RunRequest("expert2-fsdp2", last_step=2, job=job, weights=weights))
    ones = run(1, alone)
    for family, one, result in zip(families, ones, run(2, spread), strict=True):
        print(f"{family}: {worst_relative_error(result, one):.0e}, weights {result['weights_error']:.0e}")
        assert worst_relative_error(result, one) < TOLERANCE, family
        assert result["weights_error"] < WEIGHTS.get(family, TOLERANCE), family


@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("ernie4_5_moe", "glm4_moe", "granitemoe", "minimax_m2", "qwen3_next")
        ),
    ],
)
def test_a_job_with_spread_experts_is_exported_under_transformers_own_names(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    job = write_job(tmp_path / "job", "fsdp", steps=2)
    stated = json.dumps(mixture(family, is_balanced=False) | {"vocab_size": 260})
    masks = ["--set", "data.document_masks=false", "--set", "data.packing=false"]
    run_trainer(2, job, tmp_path / "out", "--set", f"model.config={stated}", "--set", "parallelism.expert=2", *masks)
    assert export(Export(str(tmp_path / "out"), tmp_path / "hf"))["step"] == 2
    read, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    read.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(values, theirs[name]) for name, values in ours.items())
    assert len(expert_modules(read)) in (1, 2)
