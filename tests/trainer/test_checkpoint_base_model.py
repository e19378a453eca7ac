"""An adapter's checkpoints hold the adapter alone, and are refused on another base model."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from trainer.checkpoint import base_model
from trainer_testing.text_job import run_trainer, write_job
from transformers import LlamaConfig, LlamaForCausalLM

from trainyard.planner.resolve import resolve
from trainyard.spec.job import ResolvedJob, load_job


def tiny_source(folder: Path, *, seed: int) -> None:
    """A base model that knows few words."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=257, special_tokens=["</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["abc"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')


LORA = ("model.config=null", "model.adapter.kind=lora", "model.adapter.rank=2")


def job_on(source: Path, job: Path) -> ResolvedJob:
    """The job with an adapter on that source."""
    return resolve(load_job(job, [*LORA, f"model.source={source}"]), world_size=1)


def test_any_other_weights_are_told_apart(tmp_path: Path) -> None:
    source, path = tmp_path / "source", write_job(tmp_path, "single")
    tiny_source(source, seed=0)
    for weights in source.glob("*.safetensors"):
        weights.unlink()
    job = job_on(source, path)
    assert base_model.base_model_digest(job) is None, "no weights, nothing to tell"
    (source / "model.safetensors").write_bytes(bytes(8 << 20))
    seen = {base_model.base_model_digest(job)}
    # In the header, in a block that is sampled on the way, and in the last bytes.
    for place in (10, ((8 << 20) - (64 << 10)) * 40 // 63 + 100, (8 << 20) - 1):
        content = bytearray(8 << 20)
        content[place] = 1
        (source / "model.safetensors").write_bytes(content)
        seen.add(base_model.base_model_digest(job))
    (source / "model.safetensors").write_bytes(bytes((8 << 20) + 1))
    seen.add(base_model.base_model_digest(job))
    assert len(seen) == 5 and None not in seen
    (source / "generation_config.json").write_text("{}")
    assert base_model.base_model_digest(job) in seen, "the weights alone tell"
    assert base_model.base_model_digest(resolve(load_job(path), world_size=1)) is None, "no adapter"


def test_a_run_goes_on_upon_its_own_base_and_refuses_another(tmp_path: Path) -> None:
    job = write_job(tmp_path, "single", steps=8)
    settings = [word for value in LORA for word in ("--set", value)]
    for seed in (0, 1):
        tiny_source(tmp_path / f"base{seed}", seed=seed)
    own, other = (("--set", f"model.source={tmp_path}/base{seed}") for seed in (0, 1))
    run_trainer(1, job, tmp_path / "out", *settings, *own, "--set", "training.steps=4")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out/checkpoints").rglob("*")}
    # 2 layers x 2 targets x 2 matrices of 2 x 32 with two moments each, and none of the base's 25,000 weights.
    assert sizes["__0_0.distcp"] < 50_000
    output, _ = run_trainer(1, job, tmp_path / "out", *settings, *other, expected_code=2)
    (line,) = [line for line in output.splitlines() if line.startswith("trainyard: ")]
    assert f"was trained upon other frozen weights than those of model.source: {tmp_path}/base1 (fingerprint " in line
    (tmp_path / "base0").rename(tmp_path / "moved")
    output, _ = run_trainer(1, job, tmp_path / "out", *settings, "--set", f"model.source={tmp_path}/moved")
    assert "resumed step=4" in output
