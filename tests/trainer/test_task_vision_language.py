"""A vision-language model: every layout equals one process, masks are exact, and a tiny one learns and resumes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from trainer.data.bad_records import BadRecordError
from trainer.data.chat import ChatTemplate
from trainer.data.tokenizer import ByteTokenizer
from trainer.strategies import check_supported
from trainer.tasks import task_of
from trainer.tasks.vision_language import Conversations, ImageTokens
from trainer_testing.image_shards import captioned, classified, write_shards
from trainer_testing.llava import CLIP_LLAMA, LANGUAGE, SIGLIP_QWEN, resolved, save_source, vlm_job, with_words
from trainer_testing.pool import run_pooled
from trainer_testing.task_worker import TaskRequest, run
from trainer_testing.text_job import rows_of
from transformers import AutoModelForImageTextToText

from trainyard.errors import InputError
from trainyard.planner import resolve
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec

FP64, FP32 = 1e-12, 1e-5
PLAIN_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
PARTS_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {% for part in m['content'] | selectattr('type', 'equalto', 'image') %}"
    "<image>\n{% endfor %}{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}"
    "{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captions")
    write_shards(folder / "train", captioned(40, seed=1))
    write_shards(folder / "validation", captioned(21, seed=2))
    return folder


def worst(result: dict[str, Any], reference: dict[str, Any]) -> float:
    """The largest relative difference of a loss, a gradient norm or a validation's sum."""
    assert result["names"] == reference["names"]
    keys = ("loss", "grad_norm", "validation")
    pairs = [pair for key in keys for pair in zip(result[key], reference[key], strict=True)]
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def compare(
    world_size: int, layouts: tuple[str, ...], shards: Path, folder: Path, *, every_other: bool = False
) -> None:
    """Each layout, model and way to train it against one process; or every other pair of them, with all of each."""
    save_source(folder / "source", shards)
    lora = {"kind": "lora", "rank": 4, "targets": ["q_proj", "v_proj"]}
    models = {
        "clip llama": {"config": CLIP_LLAMA},
        "siglip qwen2": {"config": SIGLIP_QWEN},
        "source": {"source": str(folder / "source")},
        "lora": {"source": str(folder / "source"), "adapter": lora},
    }
    named = []
    for row, layout in enumerate(layouts):
        exact = {} if layout.startswith("zero") else {"precision": "fp64"}
        for column, (name, model) in enumerate(models.items()):
            if every_other and (row + column) % 2:
                continue
            data = {"tokenizer": str(folder / "source")} if "source" in model else {}
            job = vlm_job(shards, model=model, data=data, training=exact | {"steps": 4})
            named.append((name, TaskRequest(layout, job)))
    references: dict[tuple[str, bool], TaskRequest] = {}
    for name, request in named:
        references.setdefault((name, request.layout.startswith("zero")), TaskRequest("single", request.job))
    single = dict(zip(references, run(1, folder, list(references.values())), strict=True))
    for (name, request), result in zip(named, run(world_size, folder, [r for _, r in named]), strict=True):
        is_zero = request.layout.startswith("zero")
        error = worst(result, single[name, is_zero])
        assert error < (FP32 if is_zero else FP64), f"{name} under {request.layout}: {error}"
        assert result["layout"] == request.layout
        if name == "lora":
            assert all("lora_" in weight for weight in result["names"])


@pytest.mark.slow
def test_two_ranks_equal_one_process(shards: Path, tmp_path: Path) -> None:
    compare(2, ("ddp", "fsdp", "zero2", "zero3"), shards, tmp_path, every_other=True)


@pytest.mark.slow
def test_half_precision_and_a_frozen_tower(shards: Path, tmp_path: Path) -> None:
    """What jobs/vlm-llava-7b.yaml asks for: the tower keeps its weights, which bf16 stores in bf16."""
    changes = {"images": {"freeze_vision": True, "decode_threads": 2}}
    half = vlm_job(shards, training={"precision": "bf16", "steps": 4}, **changes)
    exact = vlm_job(shards, training={"steps": 4}, **changes)
    (reference,) = run(1, tmp_path, [TaskRequest("single", exact)])
    for result in run(2, tmp_path, [TaskRequest(layout, half) for layout in ("ddp", "fsdp", "zero2", "zero3")]):
        assert worst(result | {"grad_norm": []}, reference | {"grad_norm": []}) < 0.05, result["layout"]
        assert not any("vision_tower" in name for name in result["names"])


@pytest.mark.full
def test_all_layouts_equal_one_process(shards: Path, tmp_path: Path) -> None:
    compare(2, ("ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"), shards, tmp_path)
    compare(4, ("ddp", "fsdp", "hsdp", "zero1", "zero3"), shards, tmp_path)


@pytest.mark.parametrize("config", [CLIP_LLAMA, SIGLIP_QWEN, CLIP_LLAMA | {"vision_feature_layer": 1}])
def test_what_is_trained_is_what_the_loss_reaches(config: dict[str, Any], shards: Path, tmp_path: Path) -> None:
    from trainer.models.deferred_weights import fill

    job = resolved(vlm_job(shards, model={"config": config}), 1)
    task = task_of(job)
    model = fill(task.build_model(job, None), device=torch.device("cpu"))
    data = task.build_data(job, data_parallel_rank=0, data_parallel_size=1, cache_dir=tmp_path)
    batch = data.train.next_step()[0]
    data.close()
    task.loss_sum(model, batch, torch.device("cpu")).backward()
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert reached == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.zero_grad(set_to_none=True)
    task.probe_loss(model, model, torch.device("cpu")).backward()
    assert reached == {name for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("config", [CLIP_LLAMA, SIGLIP_QWEN])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_bf16_computes_what_no_gradient_reaches_in_the_type_of_what_leads_to_it(
    config: dict[str, Any], is_frozen: bool, shards: Path, tmp_path: Path
) -> None:
    """SigLIP's last norm and head were stored in 16 bits behind layers of 32: torch's CPU kernels take no mixture, nor
    did the picture that is tried before the first step go through."""
    from trainer.models.deferred_weights import fill

    images = {"freeze_vision": is_frozen, "decode_threads": 1}
    job = resolved(vlm_job(shards, model={"config": config}, images=images, training={"precision": "bf16"}), 1)
    task = task_of(job)
    task.check_model(job)
    model = fill(task.build_model(job, None), device=torch.device("cpu"))
    data = task.build_data(job, data_parallel_rank=0, data_parallel_size=1, cache_dir=tmp_path)
    batch = data.train.next_step()[0]
    data.close()
    with torch.autocast("cpu", torch.bfloat16):
        assert float(task.loss_sum(model, batch, torch.device("cpu")).detach()) > 0


def test_the_loss_is_hugging_faces_own(shards: Path, tmp_path: Path) -> None:
    save_source(tmp_path / "source", shards)
    job = resolved(
        vlm_job(shards, model={"source": str(tmp_path / "source")}, data={"tokenizer": str(tmp_path / "source")}), 1
    )
    task = task_of(job)
    data = task.build_data(job, data_parallel_rank=0, data_parallel_size=1, cache_dir=tmp_path)
    batch = data.train.next_step()[0]
    data.close()
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "source", dtype=torch.float32)
    pixels = batch.pixels.on(torch.device("cpu"), torch.float32)
    attention = (
        torch.arange(batch.input_ids.size(1)) < (batch.labels != -100).int().cumsum(1).argmax(1)[:, None] + 1
    ).int()
    loss = theirs(input_ids=batch.input_ids, pixel_values=pixels, attention_mask=attention, labels=batch.labels).loss
    ours = task.loss_sum(theirs, batch, torch.device("cpu")) / batch.num_target_tokens
    torch.testing.assert_close(ours, loss)


def text_of(ids: np.ndarray[Any, Any]) -> str:
    return bytes(int(token) for token in ids if token < 256).decode()


def test_only_what_the_assistant_says_is_learnt() -> None:
    plain = Conversations(ByteTokenizer(), None)
    ids, learnt = plain.encode({"json": b'{"question": "what?", "answer": "red"}'})
    assert text_of(ids) == "<image>\nwhat?\nred"
    assert (text_of(ids[learnt]), int(ids[-1])) == ("red", 256)
    for mark in (b"", b"\xef\xbb\xbf"):  # a byte order mark is no text
        ids, learnt = plain.encode({"txt": mark + b" a red patch\n"})
        assert (text_of(ids), text_of(ids[learnt])) == ("<image>a red patch", "a red patch")
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]
    member = {"json": json.dumps({"messages": messages}).encode()}
    for source in (PLAIN_TEMPLATE, PARTS_TEMPLATE):
        chats = Conversations(ByteTokenizer(), ChatTemplate(source, special_tokens={}, where="test"))
        ids, learnt = chats.encode(member)
        assert text_of(ids) == "[user] <image>\nwhat?\n[assistant] red\n[user] sure?\n[assistant] yes\n"
        assert text_of(ids[learnt]) == "red\nyes\n"
        ids, learnt = chats.encode({"json": b'{"question": "what?", "answer": "red"}'})
        assert text_of(ids) == "[user] <image>\nwhat?\n[assistant] red\n"
    for broken, reason in (
        ({"json": b"{"}, "json is broken"),
        ({"json": b"[]"}, "must be an object"),
        ({"json": b'{"question": "what?"}'}, "neither messages, nor question and answer"),
        ({"json": b'{"caption": ""}'}, r"its caption .* nothing to learn"),
        ({"txt": b" "}, r"its caption \(caption in its json, or its txt\) is empty"),
        (member, "need a chat template"),
        ({"png": b""}, "no text: no json and no txt"),
    ):
        with pytest.raises(BadRecordError, match=reason):
            plain.encode(broken)


def test_the_mark_becomes_as_many_tokens_as_the_tower_gives(tmp_path: Path) -> None:
    image = ImageTokens(token_id=300, count=3, mark=np.array([7, 8]))
    ids, learnt = image.expanded(np.array([1, 7, 8, 2, 7]), np.array([False, True, True, True, False]))
    assert ids.tolist() == [1, 300, 300, 300, 2, 7]
    assert learnt.tolist() == [False, False, False, False, True, False]
    for other in ([1, 7], [7, 8, 7, 8], [7]):
        with pytest.raises(BadRecordError, match="times <image>"):
            image.expanded(np.array(other), np.zeros(len(other), dtype=bool))
    for other in ([300, 7, 8], [1, 7, 8, 300]):  # the model would count more image tokens than it has features for
        with pytest.raises(BadRecordError, match=r"its text has the token 300, which stands for images"):
            image.expanded(np.array(other), np.zeros(len(other), dtype=bool))


def like_qwens(folder: Path) -> Path:
    """A tokenizer that cuts texts as Qwen2's and Llama 3's do, and like theirs has no token <image>."""
    words = r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["<image> of <image>>\n what>\n is an image"] * 50, trainer)
    joined = tokenizer.encode("at <image>\nis").tokens[-4:]
    assert joined == ["\u0120<", "image", ">\u010a", "is"], "on both sides"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_the_mark_is_found_where_a_tokenizer_joins_it_to_what_lies_beside(tmp_path: Path) -> None:
    colours = list(classified(16, seed=1))
    said = [
        {"question": "is what?", "answer": "an image"},
        {"question": "what of <image>\nis an", "answer": "image"},
        {"caption": "image"},
    ]
    samples = [{"png": one["png"], "json": json.dumps(text).encode()} for text in said for one in colours]
    write_shards(tmp_path / "train", iter(samples))
    folder = like_qwens(tmp_path / "tokenizer")
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    job = vlm_job(tmp_path, data={"tokenizer": str(folder), "validation": [], "shuffle": False})
    resolved = resolve(parse(JobSpec, job, "job"), world_size=1)
    task = task_of(resolved)
    data = task.build_data(resolved, data_parallel_rank=0, data_parallel_size=1, cache_dir=tmp_path / "cache")
    config = task.build_model(resolved).config
    assert config.text_config.vocab_size == plain.get_vocab_size() + 1 == config.image_token_id + 1
    rows = [ids for _ in range(3) for batch in data.train.next_step() for ids in batch.input_ids]
    data.close()
    texts = [tuple(plain.decode(part, skip_special_tokens=False) for part in cut(row.tolist(), config)) for row in rows]
    end = "<|endoftext|>"
    expected = [("", f"\nis what?\nan image{end}"), ("what of ", f"\nis an\nimage{end}"), ("", f"image{end}")]
    assert [(before, after.rstrip("!")) for before, after in texts[::16]] == expected


def cut(ids: list[int], config: Any) -> tuple[list[int], list[int]]:
    """What lies before and after the image's tokens, up to the padding."""
    first, count = ids.index(config.image_token_id), ids.count(config.image_token_id)
    assert ids[first : first + count] == [config.image_token_id] * count
    rest = ids[first + count :]
    return ids[:first], rest[: rest.index(0) + 1]  # 0 is the end of a document here, and the padding


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"packing": True}}, ["data.packing", "set packing: false"]),
        ({"data": {"sequence_length": 5}}, ["data.sequence_length: 5", "an image alone is 4 tokens"]),
        ({"data": {"sequence_length": 128}}, ["128", "96 positions"]),
        ({"parallelism": {"context": 2}}, ["parallelism.context: 2"]),
        ({"training": {"optimizer": {"kind": "sgd"}}}, ["kind: sgd", "takes adamw"]),
        ({"training": {"activation_checkpointing": "full"}}, ["not verified for task vision_language"]),
        ({"model": {"config": {"model_type": "idefics3"}}}, ["idefics3", "verified for llava alone"]),
        ({"model": {"config": {"model_type": "llava"}}}, ["needs vision_config and text_config"]),
        (
            {"model": {"config": SIGLIP_QWEN | {"vision_feature_select_strategy": "default"}}},
            ["SigLIP tower has no class token"],
        ),
        (
            {"model": {"config": CLIP_LLAMA | {"text_config": LANGUAGE | {"model_type": "gpt2"}}}},
            ["gpt2", "language models llama, qwen2"],
        ),
        ({"model": {"config": CLIP_LLAMA | {"image_token_index": 999}}}, ["image_token_index 999", "258"]),
        ({"images": {"size": 32}}, ["images.size: 32: the model takes 16"]),
        (
            {"model": {"config": with_words(CLIP_LLAMA, 100)}},
            ["vocab_size is 100", "ids go up to 256", "set model.config.text_config.vocab_size to at least 257"],
        ),
    ],
)
def test_refusals_are_one_line(changes: dict[str, Any], words: list[str], shards: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        content = vlm_job(shards, **changes) | {"images": changes.get("images", {})}
        layout = content["parallelism"]
        job = resolved(content, layout.get("context", 1))
        check_supported(job, device_type="cpu")
        task_of(job).build_data(job, data_parallel_rank=0, data_parallel_size=1, cache_dir=tmp_path)
    assert "\n" not in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_sample_that_is_too_long_is_left_out(tmp_path: Path) -> None:
    samples = list(captioned(8, seed=1))
    samples[1]["json"] = json.dumps({"caption": "red " * 40}).encode()
    write_shards(tmp_path / "train", iter(samples))
    job = vlm_job(tmp_path, data={"validation": []}, training={"global_batch_size": 8})
    with pytest.raises(
        InputError, match=r"0000-00001: has 165 tokens, 4 of them its image's; data.sequence_length is 64"
    ):
        task = task_of(resolved(job, 1))
        task.build_data(resolved(job, 1), data_parallel_rank=0, data_parallel_size=1, cache_dir=tmp_path)


def test_a_job_learns_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """The command on two ranks of FSDP: the answers depend on the image, and what is lost is trained again alike."""
    write_shards(tmp_path / "train", captioned(64, seed=1))
    write_shards(tmp_path / "validation", captioned(32, seed=2))
    job = vlm_job(
        tmp_path,
        training={"steps": 30, "validation_every_steps": 10},
        parallelism={"data_shard": 2},
        checkpoint={"every_steps": 12, "keep_last": 9},
    )
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(job))

    def train(output: Path) -> str:
        arguments = ("--job", str(path), "--output-dir", str(output))
        return run_pooled(2, "trainer", *arguments, timeout_seconds=600)[0]

    train(tmp_path / "whole")
    whole = rows_of(tmp_path / "whole")
    assert whole[-1]["validation_loss"] < 0.6 * whole[0]["loss"]
    assert all(row["tokens"] > 0 for row in whole)

    # As a machine finds it that starts when all but the first checkpoint is lost.
    shutil.copytree(tmp_path / "whole", tmp_path / "again", ignore=shutil.ignore_patterns("step-*24", "step-*30"))
    assert "resumed step=12 " in train(tmp_path / "again")
    keys = ("loss", "grad_norm", "validation_loss", "tokens")
    resumed = rows_of(tmp_path / "again")
    assert [row["attempt"] for row in resumed] == [1] * 12 + [2] * 18
    assert [[row.get(key) for key in keys] for row in resumed] == [[row.get(key) for key in keys] for row in whole]
