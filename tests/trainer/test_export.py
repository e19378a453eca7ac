"""`trainyard export` and back: equal weights and logits, shards as told, and far less memory than the model has bytes.

The file is also the program whose memory is measured: `python -m test_export CHECKPOINTS TO [--merge]`.
"""

import errno
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from trainer import export as exports
from trainer.checkpoint.base_model import base_model_digest, weights_digest
from trainer.checkpoint.destination import LocalDestination
from trainer.data.tokenizer import ByteTokenizer, tokenizer_of
from trainer.export import Export, export, main
from trainer.export_scratch import MARK, marked, remove_left, scratch_beside
from trainer.models.build import build_model
from trainer.models.described import describe_model
from trainer_testing.checkpoints import save_checkpoint
from trainer_testing.distributed import TESTS
from trainer_testing.families import FAMILIES, adapter
from trainer_testing.support_table import UNTABLED, save_sources, source_of
from trainer_testing.text_job import run_trainer, write_job
from trainer_testing.tiny import VOCAB_SIZE, tiny_job

from trainyard.children import start
from trainyard.cli import exporting
from trainyard.cli.app import run
from trainyard.cli.exporting import run_export
from trainyard.errors import InputError, JobFailedError
from trainyard.planner import resolve
from trainyard.spec.job import load_job

TOKENS = torch.arange(8)[None]


def saved_model(folder: Path, family: str | dict[str, Any], *, step: int = 3, **settings: Any) -> Any:
    """A model with weights of its own whose checkpoint lies in the folder."""
    job = tiny_job("single", 1, model=FAMILIES[family] if isinstance(family, str) else family, **settings)
    model = build_model(job, vocab_size=VOCAB_SIZE).eval()
    generator = torch.Generator().manual_seed(7)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    tensors |= {f"model.{name}": tensor for name, tensor in model.named_buffers() if name in model.state_dict()}
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.normal_(std=0.1, generator=generator)
    averages = {f"optim.{name.removeprefix('model.')}.average": tensor / 2 for name, tensor in tensors.items()}
    save_checkpoint(folder, tensors | (averages if settings else {}), describe_model(job.spec, model), step=step)
    return model


@pytest.mark.parametrize("family", ["Llama, tied", "GPT-2, tied", "Mixtral", "Qwen3-MoE", "DeepSeek-V3"])
def test_from_pretrained_gives_the_same_logits(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    model = saved_model(tmp_path / "job", family)
    written = export(Export(str(tmp_path / "job"), tmp_path / "hf", max_shard_bytes=20_000))
    assert written["step"] == 3 and len(written["files"]) > 1
    read, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    read = read.eval()
    assert type(read) is type(model)
    with torch.no_grad():
        torch.testing.assert_close(read(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=0)
    # Files have a matrix for each expert, as everybody else's do.
    model.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs/model.safetensors")
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(theirs)
    assert (tmp_path / "hf/generation_config.json").is_file()


def test_an_export_is_the_model_and_a_job_starts_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path / "job", "fsdp", steps=4)
    out = tmp_path / "out"
    run_trainer(2, job, out)
    capsys.readouterr()
    assert run(["export", f"{out}/", "--to", str(tmp_path / "hf"), "--max-shard-gib", "0.001", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["step"] == 4 and not list(tmp_path.glob(".*"))
    again = load_job(job, [f"model.source={tmp_path}/hf", "model.config=null", "parallelism=auto"])
    model = build_model(resolve(again, world_size=1), vocab_size=2)
    from trainer.checkpoint import Checkpointer

    expected = {f"model.{name}": torch.zeros_like(value) for name, value in model.state_dict().items()}
    reader = Checkpointer(str(out), rank=0, world_size=1, local_dir=tmp_path / "s", keep_last=9, asynchronous=False)
    info = reader.latest()
    assert info is not None and info.step == 4
    reader.load(info, expected)
    assert all(torch.equal(value, expected[f"model.{name}"]) for name, value in model.state_dict().items())
    # Refused before anything is written over.
    assert run(["export", f"{out}/", "--to", str(tmp_path / "hf")]) == 2
    assert "is not empty; give a new folder" in capsys.readouterr().err
    assert run(["export", f"{out}/", "--to", str(tmp_path / "other"), "--step", "3"]) == 2
    assert "no valid checkpoint of step 3 is there" in capsys.readouterr().err
    assert run(["export", f"{out}/", "--to", str(tmp_path / "other"), "--merge"]) == 2
    assert "holds a whole model, no adapter" in capsys.readouterr().err
    assert not (tmp_path / "other").exists() and not list(tmp_path.glob(".*"))


MINIMAX_M2 = {"model_type": "minimax_m2", "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1} | {
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB_SIZE},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0, "tie_word_embeddings": False},
}
"""Its bias no version of transformers that this trainer runs with holds in float32."""


@pytest.mark.parametrize("family", ["DeepSeek-V3", MINIMAX_M2], ids=["DeepSeek-V3", "MiniMax-M2"])
def test_a_routers_bias_is_exported_in_float32(tmp_path: Path, family: str | dict[str, Any]) -> None:
    """The router's bias decides which experts are chosen: rounded to bfloat16, it would choose others."""
    from transformers import AutoModelForCausalLM

    model = saved_model(tmp_path / "job", family)
    export(Export(str(tmp_path / "job"), tmp_path / "hf", dtype=torch.bfloat16))
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    written = load_file(tmp_path / "hf/model.safetensors")
    (bias,) = [name for name in written if name.endswith("e_score_correction_bias")]
    assert {name for name, values in written.items() if values.dtype != torch.bfloat16} == {bias}
    (given, got) = (
        next(values for name, values in each.named_buffers() if name.endswith("e_score_correction_bias"))
        for each in (model, read)
    )
    assert torch.equal(written[bias], given)
    assert torch.equal(got.float(), given) is isinstance(family, str), "transformers rounds the other's as it reads it"


def test_a_type_without_place_for_a_value_is_refused_by_the_weights_name(tmp_path: Path) -> None:
    job = tiny_job("single", 1, model=FAMILIES["Llama"])
    model = build_model(job, vocab_size=VOCAB_SIZE)
    model.get_parameter("lm_head.weight").data[3, 5] = -70000.0
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    save_checkpoint(tmp_path / "job", tensors, describe_model(job.spec, model))
    with pytest.raises(
        InputError, match=r"^--dtype float16: lm_head\.weight has values up to 70000, and float16 ends at"
    ):
        export(Export(str(tmp_path / "job"), tmp_path / "half", dtype=torch.float16))
    assert not (tmp_path / "half").exists()
    export(Export(str(tmp_path / "job"), tmp_path / "hf", dtype=torch.bfloat16))


def test_types_average_and_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = saved_model(tmp_path / "job", "Llama", optimizer={"average_decay": 0.9})
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_text("{}")
    asked = Export(
        str(tmp_path / "job"),
        tmp_path / "hf",
        average=True,
        dtype=torch.bfloat16,
        tokenizer=str(tmp_path / "tokenizer"),
    )
    assert export(asked)["beside"] == ["tokenizer.json"]
    # Of a job on other machines the paths in its checkpoints are nothing here: its record says where it had them from.
    (tmp_path / "source").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "source" / name).write_text("{}")
    elsewhere = replace(asked, beside=(str(tmp_path / "nothing"), str(tmp_path / "source")))
    found = export(replace(elsewhere, to=tmp_path / "beside", tokenizer=None))["beside"]
    assert found == ["tokenizer.json", "tokenizer_config.json"]
    found = export(replace(elsewhere, to=tmp_path / "stated"))["beside"]
    assert found == ["tokenizer.json"], "what is stated is mixed with nothing"
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for name, parameter in read.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, (model.get_parameter(name) / 2).bfloat16()), name
    saved_model(tmp_path / "plain", "Llama")
    with pytest.raises(InputError, match="--average: the job keeps no average"):
        export(Export(str(tmp_path / "plain"), tmp_path / "other", average=True))
    with pytest.raises(InputError, match="no file of a tokenizer is there"):
        export(Export(str(tmp_path / "plain"), tmp_path / "other", tokenizer=str(tmp_path / "job")))
    with pytest.raises(InputError, match="no valid checkpoint is there"):
        export(Export(str(tmp_path / "nothing"), tmp_path / "other"))


def test_the_tokenizer_of_an_export_is_one_and_the_jobs(tmp_path: Path) -> None:
    """data.tokenizer may be a file of any name, beside another's tokenizer.json, and model.source have a third."""
    saved_model(tmp_path / "job", "Llama")
    for folder, files in {
        "own": ("32k.json", "tokenizer.json", "tokenizer_config.json"),
        "base": ("tokenizer.json", "tokenizer_config.json", "merges.txt", "preprocessor_config.json"),
        "older": ("tokenizer.model",),
    }.items():
        (tmp_path / folder).mkdir()
        for name in files:
            (tmp_path / folder / name).write_text(f"{folder} {name}")

    def exported(tokenizer: str, *beside: str) -> dict[str, str]:
        to = tmp_path / f"{tokenizer.replace('/', '-')}-{len(beside)}"
        asked = Export(str(tmp_path / "job"), to, beside=tuple(str(tmp_path / place) for place in (tokenizer, *beside)))
        return {name: (to / name).read_text() for name in export(asked)["beside"]}

    pictures = {"preprocessor_config.json": "base preprocessor_config.json"}
    own = {"tokenizer.json": "own 32k.json", "tokenizer_config.json": "own tokenizer_config.json"}
    assert exported("own/32k.json", "base") == own | pictures
    assert exported("older", "base") == {"tokenizer.model": "older tokenizer.model"} | pictures
    (tmp_path / "same").mkdir()
    (tmp_path / "same/tokenizer.json").write_text("base tokenizer.json")
    assert set(exported("same", "base")) == {"tokenizer.json", "tokenizer_config.json", "merges.txt", *pictures}


def test_a_chat_template_of_the_jobs_own_goes_along(tmp_path: Path) -> None:
    """Asked by another one's prompts, the model would answer what it was not taught."""
    from transformers import AutoTokenizer

    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    (tmp_path / "base").mkdir()
    words.save(str(tmp_path / "base/tokenizer.json"))
    (tmp_path / "base/tokenizer_config.json").write_text(json.dumps({"chat_template": "theirs"}))
    (tmp_path / "base/chat_template.jinja").write_text("older")
    (tmp_path / "chat.jinja").write_text("ours: {{ messages[0].content }} \u00e9")
    job = tiny_job("single", 1, model=FAMILIES["Llama"])
    data = job.spec.data.model_copy(update={"chat_template": str(tmp_path / "chat.jinja")})
    model = build_model(job, vocab_size=VOCAB_SIZE)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    save_checkpoint(tmp_path / "job", tensors, describe_model(job.spec.model_copy(update={"data": data}), model))
    (tmp_path / "chat.jinja").unlink()  # it was on the job's hosts
    asked = Export(str(tmp_path / "job"), tmp_path / "hf", beside=(str(tmp_path / "base"),))
    assert export(asked)["beside"] == ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    read = AutoTokenizer.from_pretrained(tmp_path / "hf")
    chat = [{"role": "user", "content": "hello"}]
    assert read.apply_chat_template(chat, tokenize=False) == "ours: hello \u00e9"
    stated = replace(asked, to=tmp_path / "stated", tokenizer=str(tmp_path / "base"))
    assert export(stated)["beside"][-1] == "chat_template.jinja"
    read = AutoTokenizer.from_pretrained(tmp_path / "stated")
    assert read.apply_chat_template(chat, tokenize=False) == "ours: hello \u00e9", "from another place, too"


def without_prefix(source: Path) -> None:
    """Names as OpenAI's own files of GPT-2 have them: those of the model without its head."""
    path = source / "model.safetensors"
    save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize("family", ["Llama", "GPT-2, tied", "GPT-2, published", "Mixtral"])
def test_a_merged_adapter_is_the_model_that_was_trained(tmp_path: Path, family: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    family, is_published = family.replace("published", "tied"), "published" in family
    save_sources(tmp_path, [family])
    source = source_of(tmp_path, family)
    if is_published:
        without_prefix(source)
    job = tiny_job("single", 1, source=str(source), adapter=adapter(family, "lora"))
    model = build_model(job, vocab_size=VOCAB_SIZE).eval()
    trained = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}
    for tensor in trained.values():
        tensor.normal_()
    described = describe_model(job.spec, model) | {"base": base_model_digest(job)}
    save_checkpoint(tmp_path / "job", trained, described)
    assert export(Export(str(tmp_path / "job"), tmp_path / "merged", merge=True))["kind"] == "merged model"
    export(Export(str(tmp_path / "job"), tmp_path / "adapter"))
    read, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    plain = AutoModelForCausalLM.from_pretrained(source).eval()
    with torch.no_grad():
        logits = read.eval()(TOKENS).logits
        torch.testing.assert_close(logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(plain(TOKENS).logits, logits, atol=1e-2)
        theirs = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
        torch.testing.assert_close(logits, theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_the_text_part_of_a_model_that_also_sees_is_merged(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    sees = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    text = UNTABLED["qwen3_5_text"] | {"vocab_size": VOCAB_SIZE}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=sees)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "base")
    lora = {"kind": "lora", "rank": 4, "targets": ["q_proj", "in_proj_qkv"]}
    job = tiny_job("single", 1, source=str(tmp_path / "base"), adapter=lora)
    model = build_model(job, vocab_size=VOCAB_SIZE).eval()
    trained = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}
    for tensor in trained.values():
        tensor.normal_(std=0.3)
    save_checkpoint(tmp_path / "job", trained, describe_model(job.spec, model))
    export(Export(str(tmp_path / "job"), tmp_path / "merged", merge=True))
    read, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(loading.values())
    assert json.loads((tmp_path / "merged/config.json").read_text())["model_type"] == "qwen3_5_text", "it sees no more"
    with torch.no_grad():
        torch.testing.assert_close(read.eval()(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-5)


def test_another_base_is_refused_in_one_line(tmp_path: Path) -> None:
    job = saved_adapter(tmp_path)
    model = build_model(tiny_job("single", 1, model=FAMILIES["Llama"]), vocab_size=VOCAB_SIZE)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(tmp_path / "same shapes")
    (tmp_path / "empty").mkdir()
    for base, told in (
        ("same shapes", r"--base .*: is not the base that the adapter was trained upon"),
        ("empty", r"--base .*: is no model's folder on this machine"),
    ):
        with pytest.raises(InputError, match=told):
            export(Export(str(job), tmp_path / "other", merge=True, base=tmp_path / base))
    save_checkpoint(tmp_path / "old", *adapter_tensors(tmp_path))  # from before checkpoints had fingerprints
    save_sources(tmp_path, ["GPT-2"])
    for base, told in (
        (source_of(tmp_path, "GPT-2"), r"--base .*: is a GPT2LMHeadModel, the checkpoint is of a LlamaForCausalLM"),
        (without(tmp_path / "same shapes", "model.norm.weight"), r"--base .*: its files have no model\.norm\.weight"),
    ):
        with pytest.raises(InputError, match=told) as caught:
            export(Export(str(tmp_path / "old"), tmp_path / "other", merge=True, base=base))
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "other").exists()


def adapter_tensors(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Of an adapter on a Llama in the folder, and what its checkpoint says."""
    save_sources(folder, ["Llama"])
    job = tiny_job("single", 1, source=str(source_of(folder, "Llama")), adapter=adapter("Llama", "lora"))
    model = build_model(job, vocab_size=VOCAB_SIZE)
    trained = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}
    return trained, describe_model(job.spec, model)


def saved_adapter(folder: Path) -> Path:
    """The checkpoint of an adapter, with its base's fingerprint."""
    tensors, described = adapter_tensors(folder)
    digest = weights_digest(source_of(folder, "Llama"))
    save_checkpoint(folder / "job", tensors, described | {"base": digest})
    return folder / "job"


def without(folder: Path, name: str) -> Path:
    """The folder, its files without that tensor."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_base_is_merged_as_transformers_reads_it(tmp_path: Path) -> None:
    """Beside its weights there may be the same ones in half precision, or shards of an earlier save."""
    trained, described = adapter_tensors(tmp_path)
    for tensor in trained.values():
        tensor.fill_(0.5)
    save_checkpoint(tmp_path / "job", trained, described)
    base, name, added = source_of(tmp_path, "Llama"), "model.layers.0.self_attn.q_proj.weight", 4 * 0.25 * 8
    assert (described["adapter"]["rank"], described["adapter"]["alpha"]) == (4, 32)

    def merged(number: int) -> torch.Tensor:
        export(Export(str(tmp_path / "job"), tmp_path / f"merged{number}", merge=True, base=base))
        return load_file(tmp_path / f"merged{number}" / "model.safetensors")[name]

    tensors = load_file(base / "model.safetensors")
    save_file({each: tensor.half() for each, tensor in tensors.items()}, base / "model.fp16.safetensors")
    save_file(tensors | {name: tensors[name] * 3}, base / "model-00001-of-00003.safetensors")
    torch.testing.assert_close(merged(0), tensors[name] + added)
    others = {each: tensor for each, tensor in tensors.items() if each != name}
    shards = {"model-00001-of-00002.safetensors": others, "model-00002-of-00002.safetensors": {name: tensors[name] * 2}}
    for file, content in shards.items():
        save_file(content, base / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {each: file for file, content in shards.items() for each in content}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    (base / "model.safetensors").unlink()
    torch.testing.assert_close(merged(1), tensors[name] * 2 + added)
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, base / "model.safetensors")
    with pytest.raises(InputError, match=rf"--base .*: {name} is stored as float8_e4m3fn"):
        merged(2)
    (base / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match=r"--base .*: .*[Hh]eader"):
        merged(2)
    assert not (tmp_path / "merged2").exists()


def test_only_weights_are_read_and_an_altered_one_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved_model(tmp_path / "job", "Llama", optimizer={"average_decay": 0.9})
    read: list[int] = []
    original = LocalDestination.read_into

    def counted(self: LocalDestination, name: str, *, start: int, memory: Any) -> int:
        read.append(original(self, name, start=start, memory=memory))
        return read[-1]

    monkeypatch.setattr(LocalDestination, "read_into", counted)
    export(Export(str(tmp_path / "job"), tmp_path / "hf"))
    assert sum(read) == sum(tensor.nbytes for tensor in model.parameters())
    shard = tmp_path / "job/checkpoints/step-00000003/__0_0.distcp"
    with safe_open(tmp_path / "hf/model.safetensors", framework="pt") as file:
        wanted = file.get_tensor("lm_head.weight").numpy().tobytes()
    content = shard.read_bytes()
    at = content.index(wanted)
    shard.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(JobFailedError, match=r"__0_0\.distcp is altered"):
        export(Export(str(tmp_path / "job"), tmp_path / "other"))
    assert not (tmp_path / "other").exists()
    (tmp_path / "job/checkpoints/step-00000003/COMMITTED").unlink()
    with pytest.raises(InputError, match="no valid checkpoint is there"):
        export(Export(str(tmp_path / "job"), tmp_path / "other"))


@pytest.mark.slow
def test_memory_is_that_of_a_few_tensors(tmp_path: Path) -> None:
    config = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
    job = tiny_job("single", 1, model={"model_type": "llama", **config})
    built = build_model(job, vocab_size=VOCAB_SIZE)
    num_bytes = sum(tensor.nbytes for tensor in built.parameters())
    tensors = {f"model.{name}": tensor.detach() for name, tensor in built.named_parameters()}
    save_checkpoint(tmp_path / "job", tensors, describe_model(job.spec, built))
    command = [sys.executable, "-m", "test_export", str(tmp_path / "job"), str(tmp_path / "hf")]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True, timeout=600)
    grown = int(done.stdout.splitlines()[-1])
    assert (tmp_path / "hf/model.safetensors").stat().st_size > num_bytes > 150 << 20
    assert 0 < grown < num_bytes / 3, f"{grown >> 20} MiB more memory for a model of {num_bytes >> 20} MiB"


@pytest.mark.slow
def test_a_base_model_stays_in_its_files(tmp_path: Path) -> None:
    """Pages of files that are mapped don't count: the system takes them back when it needs them."""
    config = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
    new = build_model(tiny_job("single", 1, model={"model_type": "llama", **config}), vocab_size=VOCAB_SIZE)
    new.save_pretrained(tmp_path / "base")
    job = tiny_job("single", 1, source=str(tmp_path / "base"), adapter=adapter("Llama", "lora"))
    model = build_model(job, vocab_size=VOCAB_SIZE)
    trained = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}
    save_checkpoint(tmp_path / "job", trained, describe_model(job.spec, model))
    command = [sys.executable, "-m", "test_export", str(tmp_path / "job"), str(tmp_path / "hf"), "--merge"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True, timeout=600)
    num_bytes, grown = (tmp_path / "hf/model.safetensors").stat().st_size, int(done.stdout.splitlines()[-1])
    assert num_bytes > 150 << 20
    assert 0 < grown < num_bytes / 6, f"{grown >> 20} MiB more memory for a model of {num_bytes >> 20} MiB"


@pytest.mark.parametrize(
    ("extra", "names", "told"),
    [
        ({}, ["model.a"], "holds no model_config"),
        ({"model_config": {"model_type": "llama"}}, ["optim.a"], "holds no weights of a model"),
        ({"model_config": {"model_type": "llama"}}, ["model.q_proj.lora_A.default.weight"], "doesn't say of what"),
        ({"model_config": {"model_type": "llama"}}, ["model.a"], "holds no model.embed_tokens.weight"),
        ({"model_config": {"model_type": "unheard-of"}}, ["model.a"], "can't be made with this transformers"),
    ],
)
def test_what_it_cannot_write_is_one_line(tmp_path: Path, extra: dict[str, Any], names: list[str], told: str) -> None:
    save_checkpoint(tmp_path / "job", {name: torch.ones(3) for name in names}, extra)
    with pytest.raises(InputError, match=told):
        export(Export(str(tmp_path / "job"), tmp_path / "hf"))
    assert not (tmp_path / "hf").exists()


def test_a_place_it_cannot_write_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    said = {
        ".": "can't be replaced",
        "../file": "/file: is no folder",
        "../file/a/hf": "/file is no folder; give a new",
    }
    for to, told in said.items():
        with pytest.raises(InputError, match=told):  # nothing is there to be read: it is refused before
            export(Export(str(tmp_path / "job"), Path(to)))
    for to in ("~/hf", "gs://bucket/hf"):
        with pytest.raises(SystemExit):
            main(["--checkpoints", str(tmp_path / "job"), "--to", to])
        assert f"argument --to: {to}: " in capsys.readouterr().err
    assert not any((tmp_path / "here").iterdir())


def test_a_checkpoint_that_may_not_be_read_is_told_as_an_export_and_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "job", {"model.a": torch.ones(3)}, {})
    honest = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.name == "manifest.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return honest(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    told = (
        r"manifest\.json: Permission denied; it may be whole, so no older one is taken; mend the access, or give --st"
    )
    with pytest.raises(JobFailedError, match=told):
        export(Export(str(tmp_path / "job"), tmp_path / "hf"))


def test_a_checkpoint_that_its_job_removes_meanwhile_is_no_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job with short intervals keeps two; the export of one that is gone ended with `--step takes another`."""
    saved_model(tmp_path / "job", "Llama")
    to_come, honest = [4, 5], exports._write

    def while_it_trains(*given: Any, **options: Any) -> dict[str, Any]:
        if to_come:
            saved_model(tmp_path / "job", "Llama", step=to_come.pop(0))
        return honest(*given, **options)

    monkeypatch.setattr(exports, "_write", while_it_trains)
    assert export(Export(str(tmp_path / "job"), tmp_path / "hf"))["step"] == 5
    assert capsys.readouterr().err.count("its job no longer keeps that checkpoint; the newest is taken\n") == 2
    for later, step in (([6, 7, 8], None), ([9], 8)):
        to_come += later
        with pytest.raises(JobFailedError, match=r"no longer keeps that checkpoint: export again, or a copy"):
            export(Export(str(tmp_path / "job"), tmp_path / "more", step=step))
    assert not (tmp_path / "more").exists()


def test_a_newer_checkpoint_that_was_passed_over_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "checkpoint step=4 skipped: manifest.json is missing"
    said = f"import sys; print('{{\"step\": 3}}'); print('a library warns\\n{told}', file=sys.stderr)"
    monkeypatch.setattr(exporting, "start", lambda _, **options: start([sys.executable, "-c", said], **options))
    assert run_export(str(tmp_path), [], {}) == {"step": 3}
    assert capsys.readouterr().err == f"{told}\n"


@pytest.mark.slow
def test_what_was_learnt_of_bytes_is_read_as_bytes_by_a_job_that_starts_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    job = write_job(tmp_path / "job", "single", steps=1)
    run_trainer(1, job, tmp_path / "out")
    assert run(["export", str(tmp_path / "out"), "--to", str(tmp_path / "hf")]) == 0
    assert "without a tokenizer" not in capsys.readouterr().out
    again = load_job(job, [f"model.source={tmp_path}/hf", "model.config=null"])
    texts = ["", "a b\n\tc  d", "e\u0301\u00e9 \U0001f600 <|endoftext|>\x00\x7f"]
    bytewise, own = ByteTokenizer(), tokenizer_of(again)
    assert (own.eos_id, own.prefix_ids, own.vocab_size) == (bytewise.eos_id, (), bytewise.vocab_size)
    assert [ids.tolist() for ids in own.encode_batch(texts)] == [list(text.encode()) for text in texts]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.eos_token_id == 256 and theirs.decode(theirs(texts[1])["input_ids"]) == texts[1]
    run_trainer(1, job, tmp_path / "next", "--set", f"model.source={tmp_path}/hf", "--set", "model.config=null")


def test_who_interrupts_the_verb_lets_the_export_remove_what_it_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = "import pathlib, signal, sys, time\ndef end(*_):\n    pathlib.Path('tidied').touch()\n    sys.exit(130)\n"
    child += "signal.signal(signal.SIGTERM, end)\npathlib.Path('ready').touch()\ntime.sleep(600)\n"
    monkeypatch.setattr(exporting, "start", lambda _, **options: start([sys.executable, "-c", child], **options))
    monkeypatch.chdir(tmp_path)
    # Whoever runs the tests in a shell's background has it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        wait_for(tmp_path / "ready")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_export(str(tmp_path), [], {})
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert (tmp_path / "tidied").exists()


@pytest.mark.slow
def test_an_export_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    saved_model(tmp_path / "job", "Llama, tied")
    stuck = (
        "import sys, time, trainer.export as own\n"
        "def write(asked, step, folder, **_):\n    (folder / 'half').touch()\n    time.sleep(600)\n"
        "own._write = write\nown.command()\n"
    )
    arguments = ["--checkpoints", str(tmp_path / "job"), "--to", str(tmp_path / "hf")]
    process = subprocess.Popen([sys.executable, "-c", stuck, *arguments], stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path, ".hf-*/export/half")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "")
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


def wait_for(folder: Path, pattern: str = "") -> None:
    """Until it is there, or something of that pattern in it."""
    deadline = time.monotonic() + 300
    while not (list(folder.glob(pattern)) if pattern else folder.exists()):
        assert time.monotonic() < deadline, f"{pattern or folder} did not appear"
        time.sleep(0.02)


def test_what_a_killed_export_left_goes_with_the_next_one_and_nothing_else(tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in (".hf-dead", ".hf-running", ".hf-elsewhere", ".hf-mine", ".other-dead")}
    for name, place in places.items():
        (place / "export").mkdir(parents=True)
        if name != ".hf-mine":
            with marked(place):  # its process ends here
                pass
    (places[".hf-elsewhere"] / MARK).write_text("another-host")
    with marked(places[".hf-running"]), scratch_beside(tmp_path / "hf") as scratch:
        remove_left(tmp_path / "hf")
        assert scratch.exists()
    assert {path.name for path in tmp_path.iterdir()} == set(places) - {".hf-dead"}


def memory(name: str) -> int:
    """VmRSS, VmHWM (its peak) or RssAnon of this process, bytes. Not ru_maxrss, which a child inherits."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) << 10


def anonymous_growth(act: Callable[[], object]) -> int:
    """By how many bytes memory that no file backs grew at most, meanwhile: the system keeps no peak of it."""
    seen, is_done = [memory("RssAnon")], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.002):
            seen.append(memory("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        act()
    finally:
        is_done.set()
        thread.join()
    return max(seen) - seen[0]


if __name__ == "__main__":
    from transformers.models.llama import modeling_llama  # noqa: F401 - what is loaded late is no part of the export

    checkpoints, to, *options = sys.argv[1:]
    if options == ["--merge"]:
        print(anonymous_growth(lambda: export(Export(checkpoints, Path(to), merge=True))))
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is that of imports
        before = memory("VmRSS")
        export(Export(checkpoints, Path(to)))
        print(memory("VmHWM") - before)
