"""Exports of LLaVAs: transformers reads what was trained and what was frozen, and gives the same logits."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from trainer.checkpoint import Checkpointer
from trainer.checkpoint.base_model import FREEZABLE, FROZEN, base_model_digest
from trainer.export import Export, export
from trainer.models.deferred_weights import fill
from trainer.models.described import describe_model
from trainer.tasks.vision_language import VisionLanguage, num_image_tokens
from trainer_testing.checkpoints import save_checkpoint
from trainer_testing.image_shards import SIZE, captioned, write_shards
from trainer_testing.llava import CLIP_LLAMA, SIGLIP_QWEN, resolved, save_source, vlm_job
from trainer_testing.text_job import run_trainer
from transformers import LlavaForConditionalGeneration, PreTrainedModel

from trainyard.errors import InputError
from trainyard.spec.job import ResolvedJob

WIDER = CLIP_LLAMA | {"vision_config": CLIP_LLAMA["vision_config"] | {"initializer_range": 0.5}}
"""The same model, whose seed makes other weights: as if the library initialized otherwise than it did."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"data_replicate": 2},
    "fsdp": {"data_shard": 2},
    **{f"zero{stage}": {"engine": "deepspeed", "data_replicate": 2, "zero_stage": stage} for stage in range(4)},
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captions")
    write_shards(folder / "train", captioned(40, seed=1))
    save_source(folder / "source", folder)
    return folder


def llava_job(shards: Path, model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A job of four steps without validation."""
    data = {"validation": []} | ({"tokenizer": str(shards / "source")} if "source" in model else {})
    training = {"steps": 4} | sections.pop("training", {})
    job = vlm_job(shards, model=model, data=data, training=training, **sections)
    return job | {"checkpoint": {"every_steps": None, "every_minutes": None}}


def trained(folder: Path, job: dict[str, Any], *, world_size: int = 1) -> ResolvedJob:
    """Trains the job by the command, its output in folder/out."""
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    run_trainer(world_size, path, folder / "out")
    return resolved(job, world_size)


def exported(out: Path, to: Path, **asked: Any) -> PreTrainedModel:
    """The export of what lies in `out`, as transformers reads it."""
    assert export(Export(str(out), to, **asked))["kind"] in ("model", "merged model")
    read, loading = LlavaForConditionalGeneration.from_pretrained(to, dtype=torch.float32, output_loading_info=True)
    assert not any(loading.values()), loading
    assert isinstance(read, PreTrainedModel)
    return read.eval()


def checkpointer(place: Path) -> Checkpointer:
    """One process's."""
    return Checkpointer(
        str(place), rank=0, world_size=1, local_dir=place.parent / "local", keep_last=9, asynchronous=False
    )


def model_of(job: ResolvedJob, out: Path) -> PreTrainedModel:
    """What was trained: the trainer's own model, frozen weights made or read as for training, the rest of `out`."""
    model = VisionLanguage().build_model(job)
    assert isinstance(fill(model, device=torch.device("cpu")), PreTrainedModel)
    weights = {f"model.{name}": weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
    reader = checkpointer(out)
    info = reader.latest()
    assert info is not None
    reader.load(info, weights)
    return model.eval()


@torch.no_grad()
def logits(model: nn.Module, config: Any) -> torch.Tensor:
    """Of an image of random colours and some words."""
    ids = torch.arange(3, 11)[None]
    ids = torch.cat([torch.full((1, num_image_tokens(config)), config.image_token_id), ids], dim=1)
    pixels = torch.randn((1, 3, SIZE, SIZE), generator=torch.Generator().manual_seed(1))
    result: torch.Tensor = model(input_ids=ids, pixel_values=pixels).logits
    return result


def assert_same(read: PreTrainedModel, model: PreTrainedModel) -> None:
    """Every weight bit by bit, and logits but for the order of sums."""
    theirs = dict(read.named_parameters())
    assert theirs.keys() == dict(model.named_parameters()).keys()
    assert [name for name, weight in model.named_parameters() if not torch.equal(theirs[name], weight)] == []
    torch.testing.assert_close(logits(read, model.config), logits(model, model.config))


FROZEN_TOWER = {"images": {"freeze_vision": True, "decode_threads": 2}}


@pytest.mark.parametrize(
    ("config", "sections"),
    [
        (CLIP_LLAMA, {}),
        (CLIP_LLAMA, FROZEN_TOWER),
        pytest.param(SIGLIP_QWEN, {}, marks=pytest.mark.slow),
        pytest.param(
            CLIP_LLAMA | {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
            {},
            marks=pytest.mark.slow,
        ),
        (None, {}),
        (None, FROZEN_TOWER),
    ],
    ids=["new", "new, frozen tower", "new SigLIP and Qwen2", "new, last layer", "source", "source, frozen tower"],
)
def test_an_export_is_the_llava_that_was_trained(
    tmp_path: Path, shards: Path, config: dict[str, Any] | None, sections: dict[str, Any]
) -> None:
    model = {"source": str(shards / "source")} if config is None else {"config": config}
    job = trained(tmp_path, llava_job(shards, model, **sections))
    ours = model_of(job, tmp_path / "out")
    started = fill(VisionLanguage().build_model(job), device=torch.device("cpu"))
    assert not torch.allclose(logits(ours, ours.config), logits(started.eval(), ours.config), atol=1e-3), "it learnt"
    assert_same(exported(tmp_path / "out", tmp_path / "hf"), ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=() if one in ("fsdp", "zero3") else pytest.mark.full) for one in LAYOUTS]
)
def test_any_layout_keeps_what_a_new_model_has_frozen(tmp_path: Path, shards: Path, layout: str) -> None:
    """And goes on from it, whoever saved it, even where the seed would make other weights by then."""
    first, *others = [layout, *(name for name in ("fsdp", "zero3") if name != layout)]
    settings = FROZEN_TOWER | {"parallelism": LAYOUTS[first]}
    job = trained(tmp_path, llava_job(shards, {"config": CLIP_LLAMA}, **settings), world_size=2)
    before = exported(tmp_path / "out", tmp_path / "before")
    assert_same(before, model_of(job, tmp_path / "out"))
    tower = {name: weight for name, weight in before.named_parameters() if FREEZABLE in name}
    for number, other in enumerate(others):
        again = FROZEN_TOWER | {"parallelism": LAYOUTS[other], "training": {"steps": 6 + 2 * number}}
        trained(tmp_path, llava_job(shards, {"config": WIDER}, **again), world_size=2)
        after = dict(exported(tmp_path / "out", tmp_path / other).named_parameters())
        assert [name for name, weight in tower.items() if not torch.equal(after[name], weight)] == [], other
        assert not torch.equal(after["lm_head.weight"], before.get_parameter("lm_head.weight")), "it trained on"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "zero3"])
def test_half_precision_and_two_ranks(tmp_path: Path, shards: Path, layout: str) -> None:
    """As jobs/vlm-llava-7b.yaml trains: the frozen tower has the values of its files, not those that bf16 rounds to."""
    sections = FROZEN_TOWER | {"parallelism": LAYOUTS[layout], "training": {"precision": "bf16"}}
    trained(tmp_path, llava_job(shards, {"source": str(shards / "source")}, **sections), world_size=2)
    read = dict(exported(tmp_path / "out", tmp_path / "hf").named_parameters())
    started = dict(LlavaForConditionalGeneration.from_pretrained(shards / "source").named_parameters())
    assert all(torch.equal(read[name], weight) == (FREEZABLE in name) for name, weight in started.items())


def test_the_source_of_what_was_frozen_is_the_one_that_was_trained_upon(tmp_path: Path, shards: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(shards / "source", source)
    trained(tmp_path, llava_job(shards, {"source": str(source)}, **FROZEN_TOWER))
    step = checkpointer(tmp_path / "out").open_step(None)
    assert step is not None and not any(FREEZABLE in name for name in step.index.state_dict_metadata)
    source.rename(tmp_path / "moved")
    other = LlavaForConditionalGeneration.from_pretrained(tmp_path / "moved")
    with torch.no_grad():
        other.model.vision_tower.post_layernorm.weight.add_(1)
    other.save_pretrained(tmp_path / "other")
    for base, told in (
        (None, rf"model\.source {source}: is no model's folder on this machine; give the base model's with --base"),
        (tmp_path / "other", r"--base .*: is not the base that the model was trained upon \(fingerprint"),
    ):
        with pytest.raises(InputError, match=told) as caught:
            export(Export(str(tmp_path / "out"), tmp_path / "hf", base=base))
        assert "\n" not in str(caught.value) and not (tmp_path / "hf").exists()
    exported(tmp_path / "out", tmp_path / "hf", base=tmp_path / "moved")
    assert (tmp_path / "hf/tokenizer.json").is_file()


def test_what_an_earlier_trainer_saved_goes_on_and_is_exported_after_that(tmp_path: Path, shards: Path) -> None:
    """Of new models it saved nothing that was frozen."""
    spec = llava_job(shards, {"config": CLIP_LLAMA}, **FROZEN_TOWER)
    job = trained(tmp_path, spec)
    step = checkpointer(tmp_path / "out").open_step(None)
    assert step is not None
    held = {name: step.tensor(name) for name in step.index.state_dict_metadata}
    frozen = [name for name in held if name.startswith(FROZEN)]
    assert frozen and all(FREEZABLE in name for name in frozen)
    kept = {name: tensor for name, tensor in held.items() if name not in frozen}
    again = checkpointer(tmp_path / "old")
    again.save(4, kept, step.manifest.extra, attachments={})
    again.close()
    with pytest.raises(InputError, match=r"an earlier trainer saved no frozen weights; train a step more") as caught:
        export(Export(str(tmp_path / "old"), tmp_path / "hf"))
    assert "\n" not in str(caught.value)
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "old").rename(tmp_path / "out")
    trained(tmp_path, spec | {"training": spec["training"] | {"steps": 6}})
    assert_same(exported(tmp_path / "out", tmp_path / "hf"), model_of(job, tmp_path / "out"))
    # Half of them is no checkpoint of an earlier trainer.
    save_checkpoint(tmp_path / "half", kept | {frozen[0]: held[frozen[0]]})
    reader = checkpointer(tmp_path / "half")
    with pytest.raises(InputError, match=rf"it holds no {FROZEN}"):
        reader.latest(lambda: {name: torch.empty_like(tensor) for name, tensor in held.items()})


def test_an_adapter_of_a_llava_alone_and_merged(tmp_path: Path, shards: Path) -> None:
    """The source's files have the names that transformers' own save gives them, which are not the modules'."""
    from peft import PeftModel

    source = shards / "source"
    assert "language_model.model.norm.weight" in load_file(source / "model.safetensors")
    lora = {"kind": "lora", "rank": 4, "targets": ["q_proj", "v_proj"]}
    job = resolved(llava_job(shards, {"source": str(source), "adapter": lora}), 1)
    model = fill(VisionLanguage().build_model(job), device=torch.device("cpu")).eval()
    weights = {f"model.{name}": weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
    for weight in weights.values():
        weight.normal_(std=0.3)
    assert isinstance(model, PreTrainedModel)
    described = describe_model(job.spec, model) | {"base": base_model_digest(job)}
    save_checkpoint(tmp_path / "job", weights, described)
    merged = exported(tmp_path / "job", tmp_path / "merged", merge=True)
    export(Export(str(tmp_path / "job"), tmp_path / "adapter"))
    plain = LlavaForConditionalGeneration.from_pretrained(source).eval()
    found, before = logits(merged, plain.config), logits(plain, plain.config)
    theirs = logits(PeftModel.from_pretrained(plain, tmp_path / "adapter").eval(), plain.config)
    assert not torch.allclose(found, before, atol=1e-2)
    for other in (theirs, logits(model, plain.config)):
        torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-5)
    assert load_file(tmp_path / "merged/model.safetensors").keys() == load_file(source / "model.safetensors").keys()


@pytest.mark.slow
def test_a_trained_adapter_of_a_llava_is_merged(tmp_path: Path, shards: Path) -> None:
    lora = {"kind": "lora", "rank": 4, "targets": ["q_proj", "v_proj"]}
    sections = {"parallelism": LAYOUTS["fsdp"], "training": {"learning_rate": 0.05}}
    spec = llava_job(shards, {"source": str(shards / "source"), "adapter": lora}, **sections)
    model = model_of(trained(tmp_path, spec, world_size=2), tmp_path / "out")
    merged = exported(tmp_path / "out", tmp_path / "merged", merge=True)
    torch.testing.assert_close(logits(merged, model.config), logits(model, model.config), rtol=1e-4, atol=1e-5)
    started = LlavaForConditionalGeneration.from_pretrained(shards / "source").eval()
    assert not torch.allclose(logits(merged, model.config), logits(started, model.config), atol=1e-3)
