"""Families that the parity suite doesn't hold: cut by tensor parallelism as one process computes, built, or refused."""

import errno
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer.models import build
from trainer.models.attention import choose_attention, describe_attention
from trainer.models.build import build_model
from trainer.models.configuration import _changes_anything, check_names, configuration_of
from trainer.models.facts import facts_of
from trainer.strategies import check_supported
from trainer_testing.families import OWN_SIZES, TIED
from trainer_testing.pool import run_pooled
from trainer_testing.strategy_worker import RunRequest, run, worst_relative_error
from trainer_testing.support_table import UNTABLED
from trainer_testing.tiny import VOCAB_SIZE, tiny_job
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from trainyard.errors import InputError
from trainyard.spec.support import DOCUMENT_FAMILIES, MADE_CAUSAL_BY, OTHER_TENSOR_FAMILIES, causal_if

TOLERANCE = 1e-5
STEPS = 3


NEAR, ROUNDED = 1e-7, 1e-6
"""Relative, in float64: of losses and gradient norms, and of each tensor of the weights."""
EXACT = 1e-10
"""Of all of them, where nothing is float32."""
IN_FLOAT32 = frozenset({"gemma2", "gemma3_text", "minicpm3", "olmo2", "olmo3", "qwen3_5_text", "vaultgemma", "youtu"})
"""Whose code computes in float32, whatever it is given, what ranks sum in another order or what comes of such sums:
norms, scores. Their weights are as near as that."""


def model_of(family: str) -> dict[str, Any]:
    """Without dropout, which ranks draw on their own: each has other heads."""
    return {
        **{"model_type": family, "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        **{"max_position_embeddings": 64, "tie_word_embeddings": family in TIED, "pad_token_id": 0},
        **{"attention_dropout": 0.0, "residual_dropout": 0.0, "resid_pdrop": 0.0, "hidden_dropout": 0.0},
        **{"sliding_window": 16} | OWN_SIZES.get(family, {}),
    }


def check_cut(
    families: Sequence[str], folder: Path, layout: dict[str, int], name: str, *, is_wide: bool = False
) -> None:
    """Each in float64, with accumulation, clipping and unequal token counts; packed where documents can be."""
    world_size = math.prod(layout.values())

    def request(family: str, strategy: str, **more: Any) -> RunRequest:
        is_packed = family in DOCUMENT_FAMILIES
        job: dict[str, Any] = {"model": model_of(family), "precision": "fp64"} | more.pop("job", {})
        job |= {} if is_packed else {"document_masks": False}
        return RunRequest(strategy, last_step=STEPS + 1, job=job, is_packed=is_packed, is_wide=is_wide, **more)

    alone = run(1, [request(each, "single", keep_weights=str(folder / each)) for each in families], 600)
    product = {"parallelism": layout}
    cut = run(world_size, [request(each, name, job=product, weights=str(folder / each)) for each in families], 600)
    errors = {family: worst_relative_error(*pair) for family, *pair in zip(families, cut, alone, strict=True)}
    weights = {family: result["weights_error"] for family, result in zip(families, cut, strict=True)}
    near = EXACT if is_wide else NEAR
    assert {family: error for family, error in errors.items() if not error <= near} == {}
    allowed = {family: ROUNDED if family in IN_FLOAT32 and not is_wide else near for family in families}
    assert {family: error for family, error in weights.items() if not error <= allowed[family]} == {}


@pytest.mark.slow
def test_norms_of_all_heads_fused_matrices_and_counted_heads_are_cut_as_one_process_computes(tmp_path: Path) -> None:
    """OLMo 2's norm sums over ranks, of Phi-3's two matrices each has its columns, StableLM's code counts its heads,
    and of Qwen3.5's convolution each rank has its heads' channels."""
    check_cut(("olmo2", "phi3", "qwen3_5_text", "stablelm"), tmp_path, {"tensor": 2}, "tensor2")


@pytest.mark.full
def test_families_with_a_plan_are_cut_as_one_process_computes(tmp_path: Path) -> None:
    check_cut(sorted(OTHER_TENSOR_FAMILIES), tmp_path, {"tensor": 2}, "tensor2")


@pytest.mark.full
def test_what_cut_families_differ_by_is_rounding(tmp_path: Path) -> None:
    """Of what their code computes in float32: without it nothing is left of it."""
    check_cut(sorted(OTHER_TENSOR_FAMILIES), tmp_path, {"tensor": 2}, "tensor2", is_wide=True)


@pytest.mark.slow
def test_adapters_of_a_delta_rule_are_cut_as_one_process_computes(tmp_path: Path) -> None:
    """Beside its fused matrix, by columns and by rows."""
    plain = tiny_job("single", 1, model=model_of("qwen3_5_text"), document_masks=False)
    build_model(plain, vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)
    targets = ["in_proj_qkv", "in_proj_z", "out_proj", "q_proj"]
    job = {"source": str(tmp_path), "document_masks": False}
    tolerances = {"lora": ("fp64", NEAR), "qlora": ("fp32", TOLERANCE)}
    for kind, (precision, tolerance) in tolerances.items():
        asked = job | {"adapter": {"kind": kind, "rank": 4, "targets": targets}, "precision": precision}
        (alone,) = run(1, [RunRequest("single", last_step=STEPS, job=asked)])
        (cut,) = run(2, [RunRequest("tensor2", last_step=STEPS, job=asked | {"parallelism": {"tensor": 2}})])
        assert worst_relative_error(cut, alone) <= tolerance, kind


def test_norms_of_each_heads_own_are_not_cut() -> None:
    model = model_of("stablelm") | {"qk_layernorm": True}
    with pytest.raises(InputError, match=r"^parallelism\.tensor: 2: model\.config\.qk_layernorm is not implemented"):
        check_supported(tiny_job("tensor2", 2, model=model, parallelism={"tensor": 2}), device_type="cpu")


_OTHERS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.full
def test_a_family_that_no_table_names_is_one_process_under_data_parallelism() -> None:
    jobs = [{"model": model | {"model_type": name}, "document_masks": False} for name, model in UNTABLED.items()]
    alone = run(1, [RunRequest("single", last_step=STEPS, job=job) for job in jobs], 600)
    for engine in ("ddp", "fsdp", "zero2", "zero3"):
        results = run(2, [RunRequest(engine, last_step=STEPS, job=job) for job in jobs], 600)
        errors = {name: worst_relative_error(*pair) for name, *pair in zip(UNTABLED, results, alone, strict=True)}
        assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}, engine


_WITH_KEYS = _OTHERS | {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": VOCAB_SIZE}
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
IN_FOUR_BITS: dict[str, dict[str, Any]] = {
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 64},
    "qwen3_next": _ROUTED
    | {"num_experts": 4, "shared_expert_intermediate_size": 64, "linear_num_value_heads": 2, "linear_num_key_heads": 2}
    | {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "gemma3n_text": _TWO_KINDS
    | {"intermediate_size": [64, 64], "activation_sparsity_pattern": [0.0, 0.0], "num_kv_shared_layers": 0}
    | {"hidden_size_per_layer_input": 64, "laurel_rank": 8, "altup_num_inputs": 2},
    "gemma4_text": _TWO_KINDS | {"hidden_size_per_layer_input": 64, "global_head_dim": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": _ROUTED | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
"""Beside those of the support table (DeepSeek among them): what these are built of has no like there."""


@pytest.mark.slow
def test_families_in_four_bits_are_one_process_under_data_parallelism(tmp_path: Path) -> None:
    jobs = []
    for name, own in IN_FOUR_BITS.items():
        model = _WITH_KEYS | {"hidden_size": 64, "intermediate_size": 64} | own | {"model_type": name}
        built = build_model(tiny_job("single", 1, model=model, document_masks=False), vocab_size=VOCAB_SIZE)
        built.save_pretrained(tmp_path / name)
        adapter = {"kind": "qlora", "rank": 4, "targets": ["q_proj", "v_proj"]}
        jobs.append({"source": str(tmp_path / name), "adapter": adapter, "document_masks": False})
    alone = run(1, [RunRequest("single", last_step=STEPS, job=job) for job in jobs], 600)
    for engine in ("ddp", "fsdp"):
        results = run(2, [RunRequest(engine, last_step=STEPS, job=job) for job in jobs], 600)
        errors = {name: worst_relative_error(*pair) for name, *pair in zip(IN_FOUR_BITS, results, alone, strict=True)}
        assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}, engine
    with pytest.raises(InputError, match="qlora is not implemented with engine: deepspeed"):
        check_supported(tiny_job("zero2", 2, **jobs[0]), device_type="cpu")


_BART = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "dropout": 0.0}
UNREACHED: dict[str, Any] = {
    "model": _BART | {"model_type": "bart", "vocab_size": VOCAB_SIZE, "pad_token_id": 0},
    "document_masks": False,
}
"""BART's decoder alone, whose cross attention has no encoder to look at."""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
def test_zero_says_that_decay_pulls_on_weights_without_a_gradient(stage: int, weight_decay: float) -> None:
    """torch leaves them out; DeepSpeed gives each weight of its flat ones a gradient, of zeros."""
    job = UNREACHED | {"optimizer": {"weight_decay": weight_decay}}
    asked = json.dumps([asdict(RunRequest(f"zero{stage}", last_step=2, job=job))])
    said = "".join(run_pooled(2, "trainer_testing.strategy_worker", asked, timeout_seconds=300))
    if weight_decay:
        told = r"warning: zero\d: no gradient reached (\d+) of \d+ weights .*encoder_attn\.k_proj\.weight, \.\.\.\)"
        (count,) = re.findall(told, said)
        assert int(count) == 2 * 4, "four matrices in each of two layers: on their biases and norms nothing pulls"
    else:
        assert "no gradient reached" not in said


def test_weights_that_no_gradient_reaches_do_not_stop_ddp() -> None:
    job = UNREACHED
    (alone,) = run(1, [RunRequest("single", last_step=STEPS, job=job)], 300)
    (cut,) = run(2, [RunRequest("ddp", last_step=STEPS, job=job)], 300)
    assert worst_relative_error(cut, alone) <= TOLERANCE


def test_a_family_whose_weights_come_of_each_other_is_built() -> None:
    job = tiny_job("single", 1, model=_OTHERS | {"model_type": "mamba", "state_size": 4})
    model = build_model(job, vocab_size=VOCAB_SIZE)
    decays = [weight for name, weight in model.named_parameters() if name.endswith("A_log")]
    assert len(decays) == 2
    for weight in decays:
        torch.testing.assert_close(weight.detach().exp(), torch.arange(1.0, 5.0).expand(48, 4))


@pytest.mark.parametrize("family", sorted({"blt", "dots3_note", "gemma3n_text", "gemma4_text"} & {*CONFIG_MAPPING}))
def test_a_family_whose_layers_differ_in_size_is_judged(family: str) -> None:
    """Its configuration has a list where others have a number, or none that may be asked for."""
    job = tiny_job("single", 1, model={"model_type": family, "vocab_size": VOCAB_SIZE}, document_masks=False)
    check_supported(job, device_type="cpu")
    config = configuration_of(job)
    assert config is not None
    choice = choose_attention(job, config, device_type="cpu")
    told = describe_attention(choice, job, config, torch.device("cpu"))
    assert told.startswith("sdpa" if choice.implementation == "sdpa" else "eager"), told
    assert all(isinstance(size, int) for size in (facts_of(job).split_sizes | facts_of(job).row_widths).values())


def test_a_family_with_heads_of_two_sizes_is_trained() -> None:
    sizes = {"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "vocab_size_per_layer_input": VOCAB_SIZE}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 8}
    settings = _OTHERS | sizes | layers | {"model_type": "gemma4_text", "vocab_size": VOCAB_SIZE}
    (seen,) = run(1, [RunRequest("single", last_step=STEPS, job={"model": settings, "document_masks": False})], 300)
    assert seen["loss"][-1] < seen["loss"][0] and all(seen["applied"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "glm4", "num_key_value_heads": 2}, r"no glm4 can be built of it \(Padding_idx must be within"),
        ({"model_type": "phi", "num_attention_heads": 0}, r"no phi can be built of it \(integer division or modulo"),
        (
            {"model_type": "stablelm"},
            r"num_key_value_heads is 32, which must divide num_attention_heads, 4: state both",
        ),
    ],
)
def test_sizes_that_do_not_go_together_are_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"^model\.config.*{message}") as caught:
        build_model(tiny_job("single", 1, model=_OTHERS | config), vocab_size=VOCAB_SIZE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "name", "meant"),
    [
        ("llama", "hidden_sise", "hidden_size"),
        ("gpt2", "n_positons", "n_positions"),
        ("mixtral", "num_local_expert", "num_local_experts"),
        ("llama", "num_hidden_layer", None),
        ("gpt2", "n_layers", None),
        ("llama", "moe_intermediate_size", None),
        ("llama", "tie_encoder_decoder", None),
        ("llama", "num_experts", None),
        ("qwen3", "experts_implementation", None),
    ],
)
def test_a_name_with_a_slip_is_no_field_that_is_passed_over(family: str, name: str, meant: str | None) -> None:
    """Unless the right one is stated too, it is like none, or a field of another family: such are common."""
    sizes = {size: 4 for size in _OTHERS if meant != size}
    job = tiny_job("single", 1, model=sizes | {"model_type": family, name: 4})
    if meant is None:
        check_supported(job, device_type="cpu")
        return
    with pytest.raises(InputError, match=rf"^model\.config\.{name}: .* of {family} .*; did you mean {meant}\?$"):
        check_supported(job, device_type="cpu")


def _is_refused(config: dict[str, Any]) -> bool:
    try:
        check_names(config)
    except InputError:
        return True
    return False


OTHERS = ("gpt2", "gemma3", "gemma3_text", "mixtral", "deepseek_v3", "mamba")


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_no_types_field_is_taken_for_a_slip_in_another_type(family: str) -> None:
    """Nor a name with an underscore proposed, and yet a slip is one."""
    every = {name for other in CONFIG_MAPPING.values() for name in getattr(other, "__dataclass_fields__", ())}
    assert len(every) > 1000
    assert not [name for name in sorted(every) if _is_refused({"model_type": family, name: None})]
    own = "num_hidden_layer" if family in ("llama", "mixtral", "mamba") else "initializer_rang"
    assert family == "gemma3" or _is_refused({"model_type": family, own: 2})


@pytest.mark.parametrize(
    ("family", "stated"),
    [
        ("gemma3_text", {"sliding_window_pattern": 3}),
        ("gemma3_text", {"sliding_window_pattern": 6}),
        ("deepseek_v4", {"compress_ratios": [0, 4], "num_hidden_layers": 2}),
        ("deepseek_v4", {"compress_ratios": [128], "num_hidden_layers": 1}),
    ],
)
def test_what_a_type_reads_beside_its_fields_is_no_slip(family: str, stated: dict[str, Any]) -> None:
    """A default too, and without asking all types, of which some other may have it as a field."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    assert _changes_anything(next(iter(stated)), {"model_type": family} | stated)
    check_names({"model_type": family} | stated)


@pytest.mark.parametrize("family", ["mamba", "llama"])
def test_memory_that_is_not_there_is_no_wrong_config(family: str) -> None:
    """More than any address space: of the one that is built whole and of one that is recorded."""
    sizes = {"mamba": {"state_size": 1 << 50}, "llama": {"vocab_size": 1 << 50}}
    job = tiny_job("single", 1, model=_OTHERS | {"model_type": family} | sizes[family])
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        build_model(job, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), torch.OutOfMemoryError),
        (torch.AcceleratorError("an illegal memory access was encountered", 700), torch.AcceleratorError),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), OSError),
        (RuntimeError("size mismatch for lm_head.weight"), InputError),
    ],
)
def test_a_source_is_not_wrong_where_the_machine_fails(
    error: Exception, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(build, "load", fail)
    with pytest.raises(kind) as caught:
        build_model(tiny_job("single", 1, source=str(tmp_path)), vocab_size=VOCAB_SIZE)
    assert type(caught.value) is kind


_SMALL = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SHAPES: dict[str, dict[str, Any]] = {
    "xlm": {"vocab_size": VOCAB_SIZE, "emb_dim": 32, "n_layers": 1, "n_heads": 4, "pad_index": 0},
    "xlnet": {"vocab_size": VOCAB_SIZE, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 32},
    "xmod": _SMALL | {"default_language": "en_XX"},
    "cpmant": _SMALL | {"dim_head": 8, "dim_ff": 64},
}


@pytest.mark.parametrize("family", [*sorted(MADE_CAUSAL_BY), "llama", "gpt2", "opt", "mamba"])
def test_families_that_see_later_tokens_are_known_and_what_makes_them_causal(family: str) -> None:
    """Their loss falls to nothing, and they have learnt to copy."""

    def sees_ahead(**settings: Any) -> bool:
        config = AutoConfig.for_model(family, **_SHAPES.get(family, _SMALL), **settings)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        tokens = torch.randint(1, VOCAB_SIZE, (1, 12))
        others = tokens.clone()
        others[:, 9:] = others[:, 9:] % (VOCAB_SIZE - 1) + 1
        with torch.no_grad():
            changes = model(input_ids=tokens).logits - model(input_ids=others).logits
        found = float(changes[:, :9].abs().max()) > 1e-6
        assert found == (causal_if(family, lambda name: getattr(config, name, None)) is not None)
        return found

    assert sees_ahead() == (family in MADE_CAUSAL_BY)
    if (setting := MADE_CAUSAL_BY.get(family)) is not None:
        assert not sees_ahead(**dict([setting]))
