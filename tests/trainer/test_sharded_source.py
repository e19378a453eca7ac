"""A model read from files in bf16 trains as in one process; and a model that is split is never whole on any rank."""

import json
import logging
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer.models.build import build_model, outline_model
from trainer.models.deferred_weights import source_of
from trainer.strategies import check_supported
from trainer_testing.distributed import run_ranks
from trainer_testing.families import FAMILIES, adapter
from trainer_testing.source_worker import MARK
from trainer_testing.strategy_worker import RunRequest, run, worst_relative_error
from trainer_testing.tiny import VOCAB_SIZE, tiny_job
from transformers import AutoModelForCausalLM

from trainyard.errors import InputError

STEPS = 4
SMALL = {"num_hidden_layers": 4, "num_key_value_heads": 4}
LARGE = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}


def save(folder: Path, family: str, **changes: int) -> Path:
    """A base model of random bf16 weights."""
    model = build_model(tiny_job("single", 1, model=FAMILIES[family] | changes), vocab_size=VOCAB_SIZE)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    families = ("Llama, tied", "Mixtral", "Qwen3-MoE", "DeepSeek-V3")
    return {family: save(folder / family.replace(", ", "-"), family) for family in families}


@pytest.mark.slow
@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_bf16_source_trains_as_in_one_process(is_whole: bool, sources: dict[str, Path]) -> None:
    """The short one has every engine and every family, in every other pair of them."""
    jobs = {family: {"source": str(source)} for family, source in sources.items()}
    one = dict(
        zip(jobs, run(1, [RunRequest("single", last_step=STEPS, job=job) for job in jobs.values()]), strict=True)
    )
    engines: dict[str, dict[str, Any] | None] = dict.fromkeys(("ddp", "fsdp", "zero2", "zero3"))
    split: dict[str, dict[str, Any] | None] = {
        "tensor2": {"tensor": 2},
        "pipeline2": {"pipeline": 2},
        "expert2-fsdp2": {"data_shard": 2, "expert": 2},
    }
    layouts = engines | split
    cases = [
        (family, engine)
        for families, some in (
            (("Llama, tied", "Mixtral", "DeepSeek-V3"), engines),
            (("Mixtral", "Qwen3-MoE", "DeepSeek-V3"), split),
        )
        for row, family in enumerate(families)
        for column, engine in enumerate(some)
        if is_whole or (row + column) % 2 == 0
    ]
    assert {family for family, _ in cases} == set(jobs) and {engine for _, engine in cases} == set(layouts)
    asked = [
        RunRequest(engine, last_step=STEPS, job={**jobs[family], "parallelism": layouts[engine]})
        for family, engine in cases
    ]
    two = run(2, asked)
    errors = {case: worst_relative_error(result, one[case[0]]) for case, result in zip(cases, two, strict=True)}
    assert {case: error for case, error in errors.items() if error > 1e-5} == {}


def test_lora_in_bf16_keeps_the_frozen_weights_as_they_are_stored(sources: dict[str, Path]) -> None:
    job = {"source": str(sources["Llama, tied"]), "adapter": adapter("Llama", "lora")}
    model = build_model(tiny_job("single", 1, precision="bf16", **job), vocab_size=VOCAB_SIZE)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    exact = run(1, [RunRequest("single", last_step=STEPS, job=job)])[0]
    engines = ("ddp", "fsdp", "zero2", "zero3")
    for result in run(2, [RunRequest(name, last_step=STEPS, job=job | {"precision": "bf16"}) for name in engines]):
        assert 0 < worst_relative_error(result, exact) < 0.02, result["strategy"]


Layout = tuple[str, dict[str, Any] | None]
"""Strategy and parallelism."""

LAYOUTS: list[Layout] = [
    ("fsdp", None),
    ("tensor4", {"tensor": 4}),
    ("pipeline4", {"pipeline": 4}),
    ("tensor2-fsdp2", {"tensor": 2, "data_shard": 2}),
]
MOST = 0.9
"""Of the whole model's float32 weights: on one of four ranks, a quarter of them and of both moments is 0.75."""


MIXTURE_LAYOUTS: list[Layout] = [
    ("tensor4", {"tensor": 4}),
    ("expert4-fsdp4", {"data_shard": 4, "expert": 4}),
]
LARGE_MIXTURE = LARGE | {"intermediate_size": 512, "num_local_experts": 8, "num_hidden_layers": 4}
"""Of its weights nine tenths are experts'."""


def origins_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The same model, to be read and to be made."""
    source = save(folder, "Llama", **LARGE)
    return {"files": {"source": str(source)}, "configuration": {"model": FAMILIES["Llama"] | LARGE}}


def growth_of_each(num_ranks: int, cases: list[dict[str, Any]], *arguments: str) -> list[dict[str, int]]:
    """What the first of some processes saw; of their own, where nothing that came before is freed meanwhile."""
    worker = "trainer_testing.source_worker"
    output = run_ranks(num_ranks, worker, *arguments, json.dumps(cases), timeout_seconds=900)[0]
    return [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]


def building(strategy: str, layout: dict[str, Any] | None, origin: dict[str, Any]) -> dict[str, Any]:
    return {"strategy": strategy, "job": {**origin, "parallelism": layout, "micro_batch_size": 1}}


def check_one_of_four(layouts: list[Layout], origins: list[dict[str, Any]], small: dict[str, Any]) -> None:
    """Each case after the same of a small model, which is forgotten: it imports, and makes what stays."""
    cases = [(strategy, layout, origin) for strategy, layout in layouts for origin in origins]
    asked = [building(strategy, layout, of) for strategy, layout, origin in cases for of in (small, origin)]
    seen = growth_of_each(1, asked, "--one-of", "4")[1::2]
    shares = [growth["peak"] / (4 * growth["elements"]) for growth in seen]
    assert len(shares) == len(cases)
    # A measurement that sees nothing would say less than half.
    assert [(share, case) for share, case in zip(shares, cases, strict=True) if not 0.5 < share < MOST] == [], shares


@pytest.mark.slow
def test_one_of_four_ranks_never_holds_the_whole_model(tmp_path: Path) -> None:
    check_one_of_four(LAYOUTS, list(origins_of(tmp_path).values()), {"model": FAMILIES["Llama"] | SMALL})


@pytest.mark.full
def test_one_of_four_ranks_reads_its_part_of_packed_experts(tmp_path: Path) -> None:
    small = save(tmp_path / "small", "Mixtral", **SMALL)
    large = save(tmp_path / "large", "Mixtral", **LARGE_MIXTURE)
    check_one_of_four(MIXTURE_LAYOUTS, [{"source": str(large)}], {"source": str(small)})


@pytest.mark.full
def test_no_rank_holds_a_model_that_is_split(tmp_path: Path) -> None:
    origins = origins_of(tmp_path)
    # DeepSpeed has a second copy of its quarter, gradients and buckets.
    buckets = {"zero": {"reduce_bucket_elements": 1_000_000}}
    layouts = [*((strategy, layout, MOST) for strategy, layout in LAYOUTS), ("zero3", buckets, 1.9)]
    cases = [(strategy, layout, origin, most) for origin in origins for strategy, layout, most in layouts]
    asked = [building(strategy, layout, origins[origin]) for strategy, layout, origin, _ in cases]
    # The first runs are forgotten: they import, compile and make what stays.
    small = FAMILIES["Llama"] | SMALL
    warm = [{**case, "job": {**case["job"], "model": small}} for case in asked[len(layouts) :]]
    seen = growth_of_each(4, warm + asked)
    shares = {
        (strategy, origin): (growth["loaded"] / (4 * growth["elements"]), growth["peak"] / (4 * growth["elements"]))
        for (strategy, _, origin, _), growth in zip(cases, seen[len(warm) :], strict=True)
    }
    allowed = {(strategy, origin): most for strategy, _, origin, most in cases}
    assert {case: share for case, share in shares.items() if share[0] > 0.1 or share[1] > allowed[case]} == {}, shares


@pytest.mark.parametrize("family", ["Llama, tied", "Mixtral", "Qwen3-MoE", "DeepSeek-V3"])
def test_every_part_of_a_source_is_what_transformers_has_there(family: str, sources: dict[str, Path]) -> None:
    model = outline_model(tiny_job("single", 1, source=str(sources[family])), vocab_size=VOCAB_SIZE)
    source = source_of(model)
    assert source is not None
    whole = AutoModelForCausalLM.from_pretrained(sources[family], dtype=torch.bfloat16).state_dict()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter.is_meta and parameter.requires_grad
        for size_of_part in (1, 2, 3):  # all, a half, a third: of each dimension, with gaps
            index = tuple(
                torch.randperm(size, generator=generator)[: -(-size // size_of_part)].sort().values
                for size in parameter.shape
            )
            assert torch.equal(source.read(name, index), whole[name][torch.meshgrid(*index, indexing="ij")]), name


def test_a_weight_keeps_the_type_of_its_file_until_it_is_read(tmp_path: Path) -> None:
    source = save(tmp_path, "DeepSeek-V3")
    tensors = load_file(source / "model.safetensors")
    precise = {"model.norm.weight", "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias"}
    for name in precise:
        tensors[name] = torch.rand(tensors[name].shape)  # more digits than bf16 has
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    model = build_model(tiny_job("single", 1, source=str(source)), vocab_size=VOCAB_SIZE)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert all(torch.equal(model.state_dict()[name], tensors[name]) for name in precise)


def test_experts_stored_in_several_types_lose_no_digits(tmp_path: Path) -> None:
    source = save(tmp_path, "Mixtral")
    tensors = load_file(source / "model.safetensors")
    experts = "model.layers.1.block_sparse_moe.experts"
    precise = {name: torch.rand(tensors[name].shape) for name in (f"{experts}.2.w2.weight", f"{experts}.2.w3.weight")}
    save_file(tensors | precise, source / "model.safetensors", metadata={"format": "pt"})
    built = build_model(tiny_job("single", 1, source=str(source)), vocab_size=VOCAB_SIZE).state_dict()
    down, gate_up = (built[f"model.layers.1.mlp.experts.{name}"] for name in ("down_proj", "gate_up_proj"))
    assert torch.equal(down[2], precise[f"{experts}.2.w2.weight"])
    assert torch.equal(gate_up[2].chunk(2)[1], precise[f"{experts}.2.w3.weight"])
    assert torch.equal(down[1], tensors[f"{experts}.1.w2.weight"].float())


def test_what_no_weight_belongs_to_may_lie_in_the_files_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Masks and positions, which older versions of transformers wrote; and a head that predicts further tokens."""
    source = save(tmp_path, "Llama")
    names = ("self_attn.bias", "self_attn.rotary_emb.inv_freq", "self_attn.q_proj.position_ids")
    more = {f"model.layers.0.{name}": torch.ones(3) for name in names} | {"mtp.layers.9.mlp.bias": torch.ones(3)}
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | more, source / "model.safetensors", metadata={"format": "pt"})
    capfd.readouterr()
    built = build_model(tiny_job("single", 1, source=str(source)), vocab_size=VOCAB_SIZE)
    assert all(torch.equal(value, tensors[name].float()) for name, value in built.named_parameters())
    (line,) = filter(None, "".join(capfd.readouterr()).splitlines())
    assert re.search("warning: model.source: .* LlamaForCausalLM has no place for .*self_attn.bias, .*: left out", line)
    monkeypatch.setenv("RANK", "1")
    build_model(tiny_job("single", 1, source=str(source)), vocab_size=VOCAB_SIZE)
    assert not "".join(capfd.readouterr())


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_layers_that_the_configuration_does_not_count_are_refused(tmp_path: Path, prefix: str) -> None:
    """They would be left out, and the first few trained as if they were the model. Without the head's prefix too."""
    source = save(tmp_path, "Llama")
    tensors = load_file(source / "model.safetensors")
    if not prefix:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    build_model(tiny_job("single", 1, source=str(source)), vocab_size=VOCAB_SIZE)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    words = (
        rf"{source}: its files have {prefix}layers\.1, but LlamaForCausalLM has 1 of {prefix}layers by its config.json"
    )
    with pytest.raises(InputError, match=rf"^model\.source: {words}: .*; state as many there") as caught:
        build_model(tiny_job("single", 1, source=str(source)), vocab_size=VOCAB_SIZE)
    assert "\n" not in str(caught.value)


def test_layers_that_predict_further_tokens_may_lie_behind_the_last(tmp_path: Path) -> None:
    """DeepSeek-V3 and GLM-4.5 number them on; transformers knows those of the published sizes by number alone."""
    source = save(tmp_path, "DeepSeek-V3")
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    behind = f"model.layers.{config['num_hidden_layers']}"
    more = {f"{behind}.eh_proj.weight": torch.ones(3), f"{behind}.mlp.gate.weight": torch.ones(3)}
    save_file(tensors | more, source / "model.safetensors", metadata={"format": "pt"})
    for count in (1, 0):
        (source / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": count}))
        job = tiny_job("single", 1, source=str(source))
        if count:
            build_model(job, vocab_size=VOCAB_SIZE)
        else:
            with pytest.raises(InputError, match=rf"its files have {re.escape(behind)}, but"):
                build_model(job, vocab_size=VOCAB_SIZE)


def changed(folder: Path, change: str) -> str:
    """A base model of which something is wrong."""
    source = save(folder, "DeepSeek-V3" if change == "buffer" else "Mixtral")
    tensors = load_file(source / "model.safetensors")
    up = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    if change == "experts":
        tensors = {name: tensor for name, tensor in tensors.items() if ".layers.1.block_sparse_moe.exp" not in name}
    elif change == "expert":
        del tensors[up]
    elif change == "buffer":
        del tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    elif change == "shape":
        tensors["model.norm.weight"] = torch.ones(7)
    elif change == "ragged":
        tensors[up] = tensors[up][:5].clone()
    elif change == "quantized":
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    elif change == "bias":
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
    elif change == "scale":
        tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"] = torch.ones(1)
    elif change == "fp8":
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones((32, 32), dtype=torch.float8_e4m3fn)
    elif change == "adapter":
        (source / "adapter_config.json").write_text("{}")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return str(source)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("experts", "have no model.layers.1.mlp.experts.down_proj, model.layers.1.mlp.experts.gate_up_proj, which"),
        ("expert", r"experts.gate_up_proj is made of matrices that don't fit together in its files, but \(4, 96, 32\)"),
        ("buffer", "have no model.layers.1.mlp.gate.e_score_correction_bias, which"),
        ("shape", r"model.norm.weight is \(7,\) in its files, but \(32,\) by its config.json"),
        ("ragged", r"experts.gate_up_proj is made of matrices that don't fit together in its files, but \(4, 96, 32\)"),
        ("bias", "its files have model.layers.0.self_attn.q_proj.bias, for which MixtralForCausalLM has no place"),
        ("scale", "its files have model.layers.0.self_attn.q_proj.weight_scale_inv, for which MixtralForCausalLM has"),
        ("fp8", "model.layers.0.self_attn.q_proj.weight is stored as float8_e4m3fn; give the model in bf16"),
        ("adapter", r"an adapter lies beside the model's weights \(adapter_config.json\)"),
        ("quantized", "stored quantized .quantization_config: fp8.; give the model in bf16"),
    ],
)
def test_a_source_that_is_not_whole_is_refused(
    change: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers alone would train random weights in their place, or say it in many lines.
    source = changed(tmp_path, change)
    said: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    with pytest.raises(InputError, match=f"^model.source: {source}: .*{words}") as caught:
        build_model(tiny_job("single", 1, source=source), vocab_size=VOCAB_SIZE)
    assert "\n" not in str(caught.value)
    assert [line for line in said if "LOAD REPORT" in line] == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "meta-llama/Llama-3.1-8B",
            "no such folder; .*hf download meta-llama/Llama-3.1-8B --local-dir FOLDER, and give",
        ),
        ("./nothing", "no such folder; .*correct the path"),
        ("s3://bucket/model", "the trainer reads local folders; launch the job"),
        (".", "no config.json there; give a Hugging Face model directory"),
    ],
)
def test_a_source_that_is_no_folder_is_refused_without_asking_anyone(
    source: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **_: asked.append(arguments))
    job = tiny_job("single", 1, source=source)
    for refuse in (lambda: check_supported(job, device_type="cpu"), lambda: build_model(job, vocab_size=VOCAB_SIZE)):
        with pytest.raises(InputError, match=f"^model.source: {source}: {words}") as caught:
            refuse()
        assert "\n" not in str(caught.value)
    assert asked == []


def test_code_that_comes_with_a_model_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object) -> str:
        raise AssertionError("someone at a terminal is asked")

    monkeypatch.setattr("builtins.input", asked)
    config = {"model_type": "mystery", "auto_map": {"AutoConfig": "configuration_mystery.MysteryConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "configuration_mystery.py").write_text("raise AssertionError('run')\n")
    job = tiny_job("single", 1, source=str(tmp_path))
    message = f"^model.source: {tmp_path}: transformers has no model_type mystery"
    for refuse in (lambda: check_supported(job, device_type="cpu"), lambda: build_model(job, vocab_size=VOCAB_SIZE)):
        with pytest.raises(InputError, match=message) as caught:
            refuse()
        assert "\n" not in str(caught.value)


def test_a_source_is_read_without_asking_anyone(sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **_: asked.append(arguments))
    build_model(tiny_job("single", 1, source=str(sources["Mixtral"])), vocab_size=VOCAB_SIZE)
    assert asked == []


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    source = save(tmp_path, "Llama")
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InputError, match="can't be loaded") as caught:
        build_model(tiny_job("single", 1, source=str(source)), vocab_size=VOCAB_SIZE)
    assert "\n" not in str(caught.value)
