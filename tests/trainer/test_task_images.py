"""Image classification: every layout equals one process, images are the same everywhere, and a tiny model learns."""

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, PngImagePlugin
from safetensors.torch import load_file, save_file
from trainer.data.bad_records import BadRecordError
from trainer.data.webdataset import ShardIndex
from trainer.export import main as export
from trainer.models.deferred_weights import fill
from trainer.session import Session
from trainer.strategies import check_supported
from trainer.tasks import task_of
from trainer.tasks.batch_norm import BatchNorm
from trainer.tasks.building import ImageData, config_of
from trainer.tasks.image_classification import Classes
from trainer.tasks.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImageTransform,
    Pixels,
    Preprocessing,
    centre_box,
    decoded,
    random_box,
)
from trainer.tasks.samples import SampleStream, SampleTable
from trainer_testing.distributed import finish
from trainer_testing.faulty_trainer import FOLDER_VARIABLE
from trainer_testing.image_shards import (
    COLOURS,
    CONVNEXT,
    RESNET,
    VIT,
    classified,
    image_job,
    picture,
    write_shards,
)
from trainer_testing.pool import run_pooled, start_pooled
from trainer_testing.task_worker import TaskRequest, run
from trainer_testing.text_job import rows_of
from trainer_testing.tiny import tiny_job
from transformers import AutoConfig, AutoModelForImageClassification
from transformers.image_utils import load_image

from trainyard.errors import InputError
from trainyard.planner import resolve
from trainyard.spec.base import parse
from trainyard.spec.job import DataSource, JobSpec

FP64, FP32 = 1e-12, 1e-5
ADAMW = {"optimizer": {"kind": "adamw"}, "learning_rate": 3e-3}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """56 pictures to train on, 21 to validate on: no whole number of batches."""
    folder = tmp_path_factory.mktemp("pictures")
    write_shards(folder / "train", classified(56, seed=1))
    write_shards(folder / "validation", classified(21, seed=2))
    return folder


def worst(result: dict[str, Any], reference: dict[str, Any]) -> float:
    """The largest relative difference of a loss, a gradient norm or a validation's sum."""
    assert result["names"] == reference["names"]
    pairs = [
        pair for key in ("loss", "grad_norm", "validation") for pair in zip(result[key], reference[key], strict=True)
    ]
    return max(abs(ours - theirs) / max(1e-12, abs(theirs)) for ours, theirs in pairs)


def runs(shards: Path, layouts: tuple[str, ...]) -> list[tuple[str, TaskRequest]]:
    """Named runs under each layout, in float64 where the engine has it."""
    found: list[tuple[str, TaskRequest]] = []
    for layout in layouts:
        exact = {} if layout.startswith("zero") else {"precision": "fp64"}
        for name, settings in {"sgd": {}, "adamw": ADAMW}.items():
            if name == "adamw" or exact:  # DeepSpeed takes AdamW alone
                found.append((f"resnet {name}", TaskRequest(layout, image_job(shards, training=settings | exact))))
        for config in (VIT, CONVNEXT):
            job = image_job(shards, model={"config": config}, training=ADAMW | exact | {"steps": 4})
            found.append((str(config["model_type"]), TaskRequest(layout, job)))
    return found


def compare(world_size: int, layouts: tuple[str, ...], shards: Path, cache: Path, *, every_other: bool = False) -> None:
    """Each layout at `world_size` ranks with micro-batches of 4 / ranks against one process with 4; `every_other`: of
    the models, in turn, that every layout and every model is there."""
    named = runs(shards, layouts)
    if every_other:
        models = list(dict.fromkeys(name for name, _ in named))
        named = [
            (name, request) for name, request in named if (models.index(name) + layouts.index(request.layout)) % 2 == 0
        ]
        assert {request.layout for _, request in named} == set(layouts) and {name for name, _ in named} == set(models)
    references: dict[tuple[str, bool], TaskRequest] = {}
    for name, request in named:
        references.setdefault((name, request.layout.startswith("zero")), TaskRequest("single", request.job))
    single = dict(zip(references, run(1, cache, list(references.values())), strict=True))
    results = run(world_size, cache, [request for _, request in named])
    for (name, request), result in zip(named, results, strict=True):
        is_zero = request.layout.startswith("zero")
        error = worst(result, single[name, is_zero])
        assert error < (FP32 if is_zero else FP64), f"{name} under {request.layout}: {error}"
        assert result["layout"] == request.layout


@pytest.mark.slow
def test_two_ranks_equal_one_process_with_twice_the_micro_batch(shards: Path, tmp_path: Path) -> None:
    compare(2, ("ddp", "fsdp", "zero1", "zero3"), shards, tmp_path, every_other=True)


@pytest.mark.full
def test_all_layouts_equal_one_process(shards: Path, tmp_path: Path) -> None:
    compare(2, ("ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"), shards, tmp_path)
    compare(4, ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"), shards, tmp_path)


@pytest.mark.slow
def test_local_statistics_differ_and_half_precision_trains(shards: Path, tmp_path: Path) -> None:
    """What `batch_norm: local` gives up is real; its running averages are those of all ranks nevertheless."""
    local = image_job(shards, images={"batch_norm": "local"}, training={"precision": "fp64"})
    bf16 = image_job(shards, training={"precision": "bf16"})
    synchronized = image_job(shards, training={"precision": "fp64"})
    requests = [
        TaskRequest("ddp", local),
        TaskRequest("fsdp", local),
        TaskRequest("ddp", bf16),
        TaskRequest("fsdp", bf16),
    ]
    ddp, fsdp, half, half_sharded = run(2, tmp_path, requests)
    whole, alone = run(1, tmp_path, [TaskRequest("single", synchronized), TaskRequest("single", local)])
    assert worst(ddp, whole) > 1e-3
    assert worst(alone, whole) < FP64  # one process has all statistics either way
    assert worst(fsdp, ddp) < FP64
    for result in (half, half_sharded):
        assert worst({**result, "grad_norm": []}, {**whole, "grad_norm": []}) < 0.2


@pytest.mark.slow
def test_pictures_reach_a_sharded_embedding_in_its_weights_type(shards: Path, tmp_path: Path) -> None:
    """ViT's is a unit of FSDP of its own, and asks the type of a weight that isn't gathered yet."""
    job = image_job(shards, model={"config": VIT}, training=ADAMW | {"steps": 2, "precision": "bf16"})
    ddp, fsdp = run(2, tmp_path, [TaskRequest("ddp", job), TaskRequest("fsdp", job)])
    assert fsdp["loss"] == pytest.approx(ddp["loss"], rel=0.02)


def test_batch_norm_is_torchs_own_on_one_process() -> None:
    torch.manual_seed(1)
    theirs = torch.nn.BatchNorm2d(3).double()
    ours = BatchNorm(torch.nn.BatchNorm2d(3).double(), "synchronized")
    for _ in range(3):
        images = 5 + torch.randn(4, 3, 6, 5, dtype=torch.float64)
        torch.testing.assert_close(ours(images), theirs(images))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    frozen = BatchNorm(theirs, "frozen")
    torch.testing.assert_close(frozen(images), theirs.eval()(images))
    assert torch.equal(frozen.running_mean, theirs.running_mean)
    assert frozen.float()(images.bfloat16()).dtype == torch.bfloat16


def test_a_source_brings_its_averages_and_its_normalization_and_may_get_a_new_head(
    shards: Path, tmp_path: Path
) -> None:
    """Fine-tuning: other classes than the source's, its running averages frozen, its preprocessor's numbers."""
    torch.manual_seed(3)
    source = AutoModelForImageClassification.from_config(AutoConfig.for_model(**RESNET))
    source.resnet.embedder.embedder.normalization.running_mean.fill_(0.5)
    source.save_pretrained(tmp_path / "source")
    stated = {"size": {"shortest_edge": 24}, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "source" / "preprocessor_config.json").write_text(json.dumps(stated))
    images = {"size": None, "num_classes": 7, "batch_norm": "frozen"}
    job = image_job(shards, model={"source": str(tmp_path / "source")}, images=images)
    resolved = resolve(parse(JobSpec, job, "job"), world_size=1)
    task = task_of(resolved)
    model = fill(task.build_model(resolved, None), device=torch.device("cpu"))
    again = fill(task.build_model(resolved, None), device=torch.device("cpu"))
    ours, theirs = model.state_dict(), source.state_dict()
    assert all(torch.equal(ours[name], again.state_dict()[name]) for name in ours)
    body = [name for name in theirs if not name.startswith("classifier")]
    assert all(torch.equal(ours[name], theirs[name]) for name in body)
    assert ours["classifier.1.weight"].shape == (7, 16)

    data = build(job, tmp_path / "cache")
    batch = data.train.next_step()[0]
    data.close()
    assert (batch.pixels.values.shape[-1], batch.pixels.mean, batch.pixels.std) == (
        24,
        (0.1, 0.2, 0.3),
        (0.4, 0.5, 0.6),
    )
    task.loss_sum(model.train(), batch, torch.device("cpu")).backward()
    assert all(torch.equal(model.state_dict()[name], theirs[name]) for name in body)
    same_head = image_job(shards, model={"source": str(tmp_path / "source")})
    resolved = resolve(parse(JobSpec, same_head, "job"), world_size=1)
    kept = fill(task_of(resolved).build_model(resolved, None), device=torch.device("cpu")).state_dict()
    assert all(torch.equal(kept[name], theirs[name]) for name in theirs)


def test_what_a_models_files_say_of_its_images_is_found_wherever_it_stands(shards: Path, tmp_path: Path) -> None:
    """LLaVA's is inside processor_config.json, as transformers 5 writes it; some models take values as they are."""
    spec = parse(JobSpec, image_job(shards, model={"source": str(tmp_path)}, images={"size": None}), "job")
    job = resolve(spec, world_size=1)
    known = Preprocessing.of(job, model_size=None)
    assert (known.size, known.mean, known.resample) == (224, IMAGENET_MEAN, Image.Resampling.BILINEAR)
    stated = {"crop_size": {"height": 24}, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 3}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": stated, "patch_size": 14}))
    known = Preprocessing.of(job, model_size=None)
    assert known == Preprocessing(24, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), Image.Resampling.BICUBIC)
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stated | {"do_normalize": False, "resample": "?"}))
    known = Preprocessing.of(job, model_size=None)
    assert known == Preprocessing(24, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), Image.Resampling.BILINEAR)


def test_an_image_is_scaled_by_the_models_own_filter() -> None:
    target = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(target, format="PNG")
    kinds = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)
    found = [ImageTransform(8, None, 1.0, kind)(target.getvalue(), seed=1, position=0) for kind in kinds]
    for ours, kind in zip(found, kinds, strict=True):
        assert np.array_equal(ours.permute(1, 2, 0), np.asarray(Image.open(target).resize((8, 8), kind)))
    assert not torch.equal(*found)


@pytest.mark.parametrize("num_classes", [None, 7])
def test_a_source_that_lacks_more_than_the_head_is_refused(
    num_classes: int | None, shards: Path, tmp_path: Path
) -> None:
    lacking = "resnet.encoder.stages.0.layers.0.layer.0.convolution.weight"
    source = AutoModelForImageClassification.from_config(AutoConfig.for_model(**RESNET))
    source.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[lacking]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    job = image_job(shards, model={"source": str(tmp_path)}, images={"num_classes": num_classes})
    resolved = resolve(parse(JobSpec, job, "job"), world_size=1)
    with pytest.raises(InputError, match=f"its files have no {lacking}, which"):
        task_of(resolved).build_model(resolved, None)


def test_crops_depend_on_seed_and_place_alone_and_stay_inside() -> None:
    boxes = [random_box((40, 30), (0.08, 1.0), seed=3, position=position) for position in range(500)]
    shares = [(right - left) * (bottom - top) / 1200 for left, top, right, bottom in boxes]
    assert all(0 <= left < right <= 40 and 0 <= top < bottom <= 30 for left, top, right, bottom in boxes)
    assert all(0.06 < share <= 1 for share in shares)
    assert 0.4 < np.mean(shares) < 0.6, "uniform between 0.08 and 1, but that wide crops don't always fit"
    assert boxes == [random_box((40, 30), (0.08, 1.0), seed=3, position=position) for position in range(500)]
    assert boxes != [random_box((40, 30), (0.08, 1.0), seed=4, position=position) for position in range(500)]
    assert random_box((400, 3), (1.0, 1.0), seed=3, position=0) == (198, 0, 202, 3)  # nothing fits: the centre
    assert centre_box((40, 30), 0.5) == (12.5, 7.5, 27.5, 22.5)

    content = picture("red", random.Random(1))
    transform = ImageTransform(8, (0.3, 0.6), 0.875)
    cut = [transform(content, seed=3, position=position) for position in range(40)]
    assert all(image.shape == (3, 8, 8) and image.dtype == torch.uint8 for image in cut)
    assert torch.equal(cut[7], transform(content, seed=3, position=7))
    assert len({image.numpy().tobytes() for image in cut}) > 30


def test_half_of_the_images_are_flipped_and_pixels_are_normalized() -> None:
    step = np.zeros((8, 8, 3), dtype=np.uint8)
    step[:, 4:] = 255
    target = io.BytesIO()
    Image.fromarray(step).save(target, format="PNG")
    transform = ImageTransform(8, (1.0, 1.0), 0.875)
    is_flipped = [bool(transform(target.getvalue(), seed=1, position=p)[0, 0, 0] > 128) for p in range(200)]
    assert 70 < sum(is_flipped) < 130
    whole = ImageTransform(8, None, 1.0)(target.getvalue(), seed=1, position=0)
    pixels = Pixels(whole[None], (0.5, 0.0, 0.5), (0.5, 1.0, 0.25)).on(torch.device("cpu"), torch.float32)
    assert pixels[0, :, 0, 0].tolist() == [-1.0, 0.0, -2.0]
    assert pixels[0, :, 0, 7].tolist() == [1.0, 1.0, 2.0]


def test_what_is_no_picture_is_said_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    good = picture("blue", random.Random(1))
    for content in (b"", b"hello", good[: len(good) // 2], good[:8] + b"\xff" * 40):
        with pytest.raises(BadRecordError, match="can't be decoded") as caught:
            decoded(content)
        assert " object at 0x" not in str(caught.value)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(BadRecordError, match="more pixels"):
        decoded(good)


@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_pictures_are_seen_upright_as_transformers_sees_them(
    orientation: int | None, kind: str, tmp_path: Path
) -> None:
    stored = Image.new("RGB", (32, 16), (200, 40, 40))
    stored.paste((40, 40, 200), (16, 0, 32, 8))
    exif = Image.Exif()
    if orientation is not None:
        exif[ExifTags.Base.Orientation] = orientation
    path = tmp_path / "picture"
    stored.save(path, kind, exif=exif)
    expected = load_image(str(path)).convert("RGB")
    found = decoded(path.read_bytes())
    assert np.array_equal(np.asarray(found), np.asarray(expected))
    assert found.size == ((16, 32) if orientation in (5, 6, 7, 8) else (32, 16))


def test_broken_notes_are_no_broken_picture() -> None:
    """As ImageMagick writes EXIF into a PNG, without its numbers."""
    notes, content = PngImagePlugin.PngInfo(), io.BytesIO()
    notes.add_text("Raw profile type exif", "\nexif\n8\nno hex")
    Image.new("RGB", (32, 16), (200, 40, 40)).save(content, "PNG", pnginfo=notes)
    assert decoded(content.getvalue()).size == (32, 16)


def test_greys_of_sixteen_bits_are_scaled_and_not_clipped() -> None:
    """Microscopes and X-rays: by Pillow's own conversion all above 255 of 65,535 is white."""
    wide = (np.arange(64 * 64, dtype=np.uint16) * 16).reshape(64, 64)
    for kind in ("png", "tiff"):
        content = io.BytesIO()
        Image.fromarray(wide).save(content, kind)
        found = np.asarray(decoded(content.getvalue()))
        assert found.shape == (64, 64, 3) and np.array_equal(found[..., 0], wide >> 8)
        assert np.array_equal(found[..., 0], found[..., 2])


def build(job: dict[str, Any], cache: Path, rank: int = 0, size: int = 1) -> Any:
    spec = parse(JobSpec, job | {"parallelism": {"data_replicate": size}}, "job")
    resolved = resolve(spec, world_size=size)
    return task_of(resolved).build_data(resolved, data_parallel_rank=rank, data_parallel_size=size, cache_dir=cache)


def steps(data: Any, count: int) -> list[torch.Tensor]:
    """What `count` steps read: images and labels, flat."""
    read = [data.train.next_step() for _ in range(count)]
    return [torch.cat([b.pixels.values.flatten(), b.labels.to(torch.uint8)]) for batches in read for b in batches]


def test_the_same_images_at_any_number_of_ranks_and_after_a_resume(shards: Path, tmp_path: Path) -> None:
    job = image_job(shards)
    alone = build(job, tmp_path)
    whole = steps(alone, 5)  # 80 of 56: into the second epoch
    ranks = [build(job, tmp_path, rank, 2) for rank in range(2)]
    shares = [steps(data, 5) for data in ranks]
    merged = [share for pair in zip(*shares, strict=True) for share in pair]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(merged, whole, strict=True))

    again = build(job, tmp_path)
    again.train.load_state_dict(ranks[0].train.state_dict() | {"sequences_consumed": 32})
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(steps(again, 3), whole[8:], strict=True))
    with pytest.raises(InputError, match="seed was 5, is 6"):
        build(image_job(shards, training={"seed": 6}), tmp_path).train.load_state_dict(ranks[0].train.state_dict())

    first = [[b.labels.tolist() for b in batches] for batches in alone.validation]
    assert first == [[b.labels.tolist() for b in batches] for batches in alone.validation]
    assert sum(label != -100 for batches in first for labels in batches for label in labels) == 21
    for data in (alone, again, *ranks):
        data.close()


def test_a_bad_sample_is_counted_named_and_replaced_by_the_next(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = list(classified(24, seed=1))
    samples[3]["png"] = b"torn"
    samples[5]["cls"] = b"17"
    samples[9] = {"png": samples[9]["png"]}
    write_shards(tmp_path / "train", iter(samples))
    job = image_job(tmp_path, data={"validation": [], "max_bad_records": 3, "shuffle": False})
    data = build(job, tmp_path / "cache")
    labels = torch.cat([batch.labels for batch in data.train.next_step()])
    expected = [int(sample.get("cls", b"0")) for sample in samples[:16]]
    for row in (3, 5, 9):
        expected[row] = expected[row + 1]
    assert labels.tolist() == expected
    assert data.train.next_step()[0].num_target_tokens == 4
    (table,) = data.tables
    data.close()
    assert table.bad_rows == {3, 5, 9}
    words = [
        "0000.tar: 0000-00003: the image can't be decoded",
        "its class is 17, the model has 4 (0 to 3)",
        "no class",
    ]
    assert all(word in "; ".join(table.bad.named) for word in words)
    told = [line for line in "".join(capfd.readouterr()).splitlines() if "bad record left out" in line]
    assert len(told) == 3, "once each, as they are met"
    assert all(any(word in line for line in told) for word in words)
    monkeypatch.setenv("RANK", "1")
    build(job, tmp_path / "cache").close()
    assert capfd.readouterr().out == "", "of the first samples, which all ranks look at, the first one tells"
    with pytest.raises(InputError, match=r"data\.train: more bad records than data\.max_bad_records \(2\).*0000-00003"):
        build(image_job(tmp_path, data={"validation": [], "max_bad_records": 2}), tmp_path / "cache")


def test_bad_samples_are_counted_over_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = list(classified(48, seed=1))
    for row in (2, 40, 45):
        samples[row]["cls"] = b"17"
    write_shards(tmp_path / "train", iter(samples))

    def ranks(limit: int) -> list[ImageData]:
        job = image_job(tmp_path, data={"validation": [], "max_bad_records": limit, "shuffle": False})
        return [build(job, tmp_path / "cache", rank, 2) for rank in range(2)]

    sent: list[Any] = []

    def exchanged(found: list[Any], mine: Any, group: Any) -> None:
        found[:] = [
            {one.where: (set(one.bad_rows), one.left_out, list(one.bad.named)) for one in data.tables} for data in group
        ]
        sent.append(mine["data.train"][:2])

    monkeypatch.setattr("torch.distributed.get_world_size", len)
    monkeypatch.setattr("torch.distributed.all_gather_object", exchanged)
    group: Any = ranks(limit=3)
    assert not any(data.has_news for data in group), "both have looked at the first samples, and learnt from none"
    for data in group:
        data.gather(group)
        data.check_limits()
        assert data.describe() == {"bad_records": {"data.train": 1}}, "which is one sample"
    for data in group:
        steps(data, 3)
        data.close()
    assert [data.tables[0].left_out for data in group] == [{2, 40}, {45}]
    assert [data.has_news for data in group] == [True, True]
    for data in group:
        data.gather(group)
        data.check_limits()
        assert not data.has_news and data.describe() == {"bad_records": {"data.train": 3}}
    assert sent == [({2}, set()), ({2}, set()), ({40}, {2, 40}), ({45}, {45})], "what all know is not sent again"
    group = ranks(limit=2)
    for data in group:
        steps(data, 2)  # the third is read ahead
        data.close()
    for data in group:
        data.gather(group)
        data.check_limits()
    group = ranks(limit=2)
    for data in group:
        steps(data, 3)
        data.close()
    for data in group:
        data.gather(group)
        with pytest.raises(InputError, match=r"data\.train: more bad records than data\.max_bad_records \(2\).*-00016"):
            data.check_limits()


@pytest.mark.parametrize("news", [0.0, 2.0])
def test_ranks_bring_together_what_they_left_out_when_one_of_them_has_news(news: float) -> None:
    """By the step's own message, so that all of them do, or none."""
    session: Any = object.__new__(Session)
    done = list[str]()

    def check_limits() -> None:
        done.append("checked")
        raise InputError("too many")

    session._told = SimpleNamespace(upcoming=[], own_loss_sum=1.0, answer=lambda: [1.0, 0.0, news, *[0.0] * 20])
    session._runtime = SimpleNamespace(control_group="all")
    session.stop_flag = SimpleNamespace(beat=lambda step: None, decision=lambda *given: "go on")
    session.data = SimpleNamespace(gather=done.append, check_limits=check_limits)
    session.anomalies = SimpleNamespace(check=lambda *given: None)
    if news:
        with pytest.raises(InputError, match="too many"):
            session.end_step(3, SimpleNamespace(num_targets=1), None)
    else:
        assert session.end_step(3, SimpleNamespace(num_targets=1), None) == (1.0, "go on")
    assert done == (["all", "checked"] if news else [])


def test_classes_may_have_names(tmp_path: Path) -> None:
    write_shards(tmp_path / "train", classified(20, seed=1, names=True))
    (tmp_path / "names.txt").write_text("\ufeff" + "\n".join(COLOURS) + "\n")  # as Windows' editors begin a text
    job = image_job(tmp_path, data={"validation": [], "shuffle": False})
    named = build(image_job(tmp_path, data=job["data"], images={"class_names": str(tmp_path / "names.txt")}), tmp_path)
    labels = torch.cat([batch.labels for batch in named.train.next_step()]).tolist()
    named.close()
    assert labels == [COLOURS.index(sample["cls"].decode()) for sample in list(classified(20, seed=1, names=True))[:16]]
    with pytest.raises(InputError, match=r"its class '.*' is no number"):
        build(job, tmp_path)
    for content, message in (
        ("red\n\ngreen\nblue\ngrey\n", r"names\.txt: line 2 is blank, and a class's number is that of its line"),
        ("red\ngreen\nblue\ngrey\nblack\n", r"names\.txt: has 5 names, and the model tells 4 classes apart"),
        ("red\ngreen\nblue\nred\n\n \n", r"names\.txt: 'red' stands twice"),
        (" \n\n", r"names\.txt: has no name in it: .* or leave class_names out if labels are numbers"),
    ):
        (tmp_path / "names.txt").write_text(content)
        with pytest.raises(InputError, match=message):
            build(image_job(tmp_path, data=job["data"], images={"class_names": str(tmp_path / "names.txt")}), tmp_path)
    bilinear = Image.Resampling.BILINEAR
    known = Classes(
        2, {"cat": 0, "dog": 1, "fish": 2}, Preprocessing(16, IMAGENET_MEAN, IMAGENET_STD, resample=bilinear)
    )
    assert known.label_of({"cls": b"dog"}) == known.label_of({"cls": b"\xef\xbb\xbfdog\r\n"}) == 1
    with pytest.raises(BadRecordError, match=r"class is 2 \('fish' in images.class_names\), the model has 2"):
        known.label_of({"cls": b"fish"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallelism": {"tensor": 2}}, ["parallelism.tensor: 2", "data_replicate, data_shard"]),
        ({"parallelism": {"pipeline": 2}}, ["parallelism.pipeline: 2"]),
        ({"training": {"optimizer": {"kind": "muon"}}}, ["training.optimizer.kind: muon", "sgd or adamw"]),
        ({"training": {"activation_checkpointing": "full"}}, ["activation_checkpointing: full", "set none"]),
        ({"model": {"config": RESNET | {"num_labels": 9}}, "images": {"num_classes": 4}}, ["num_labels is 9"]),
        ({"model": {"config": {"model_type": "resnet"}}}, ["images.num_classes", "how many classes"]),
        ({"model": {"config": {"model_type": "llama", "num_labels": 4}}}, ["llama", "resnet, vit, convnext alone"]),
        ({"model": {"config": VIT}, "images": {"size": 32}}, ["images.size: 32: the model takes 16"]),
        ({"images": {"batch_norm": "frozen"}}, ["frozen uses the averages of model.source"]),
        ({"training": {"on_anomaly": "skip"}}, ["on_anomaly: skip", "batch norm's running statistics; use stop"]),
        (
            {
                "parallelism": {"engine": "deepspeed", "data_replicate": 2, "zero_stage": 1},
                "training": ADAMW | {"precision": "bf16"},
            },
            ["training.precision: bf16", "running averages of resnet", "engine: torch, or fp32"],
        ),
        ({"parallelism": {"engine": "deepspeed", "data_replicate": 2, "zero_stage": 1}}, ["kind: sgd", "deepspeed"]),
        ({"training": {"steps": None, "tokens": 9}}, ["training.tokens", "images have no tokens"]),
        ({"data": {"train": [{"path": "x", "format": "text"}]}}, ["data.train.0.format", "webdataset (given: text)"]),
    ],
)
def test_refusals_are_one_line(changes: dict[str, Any], words: list[str], shards: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        spec = parse(JobSpec, image_job(shards, **changes), "job")
        layout = spec.parallelism
        assert not isinstance(layout, str)
        resolved = resolve(spec, world_size=layout.world_size)
        check_supported(resolved, device_type="cpu")
        build(image_job(shards, **changes), tmp_path)
    assert "\n" not in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(("source", "reason"), [("s3://bucket/x", "the trainer reads"), ("/none", "no such folder")])
def test_a_wrong_source_is_said_once(source: str, reason: str) -> None:
    job = tiny_job("single", 1)
    model = job.spec.model.model_copy(update={"config": None, "source": source})
    wrong = job.model_copy(update={"spec": job.spec.model_copy(update={"model": model})})
    with pytest.raises(InputError, match=f"^model.source: {source}: {reason}"):
        config_of(wrong, ["resnet"])


def test_samples_of_the_next_batch_are_fetched_before_threads_get_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Table(SampleTable):
        def read(self, members: dict[str, bytes], position: int) -> Any:
            return position

        def collate(self, samples: Sequence[Any]) -> Any:
            return list(samples)

    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(ShardIndex, "will_read", lambda index, number: asked.append((len(index), number)))
    for name, count in (("a", 3), ("b", 4)):
        write_shards(tmp_path / name, classified(count, seed=1))
    sources = [DataSource(path=str(tmp_path / name), format="webdataset") for name in "ab"]
    parts: Any = SimpleNamespace(close=lambda: None)
    table = Table(sources, cache_dir=tmp_path / "cache", max_bad_records=0, where="data.train", parts=parts)
    stream = SampleStream(
        table,
        num_threads=1,
        dataset_digest="",
        global_batch_size=4,
        micro_batch_size=2,
        data_parallel_rank=0,
        data_parallel_size=1,
        seed=0,
        shuffle=False,
    )
    assert stream.next_step() == [[0, 1], [2, 3]]
    assert asked == [(3, 0), (3, 1), (3, 2), (4, 0), (4, 1), (4, 2), (4, 3), (3, 0)], "this batch, and the next"
    stream.close()
    validation_rows = np.array([6, -1])
    table.will_read(validation_rows)
    assert asked[8:] == [(4, 3)], "nothing is fetched for an empty sample"


@pytest.mark.slow
def test_a_job_learns_is_stopped_and_resumed_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real command on two ranks: accuracy far above chance, and a stop changes nothing."""
    samples = list(classified(72, seed=1))
    samples[40]["png"] = b"torn"
    write_shards(tmp_path / "train", iter(samples))
    write_shards(tmp_path / "validation", classified(24, seed=2))
    job = image_job(
        tmp_path,
        data={"max_bad_records": 1},
        training={"steps": 24, "validation_every_steps": 8},
        parallelism={"data_replicate": 2},
    )
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(job))

    def train(output: str) -> str:
        arguments = ("--job", str(path), "--output-dir", str(tmp_path / output))
        return run_pooled(2, "trainer", *arguments, timeout_seconds=600)[0]

    lines = train("whole").splitlines()
    whole = rows_of(tmp_path / "whole")
    result = json.loads((tmp_path / "whole" / "result.json").read_text())
    assert result["validation_top1_accuracy"] > 0.7, "four colours: chance is 0.25"
    assert result["validation_top5_accuracy"] == 1.0
    assert result["images"] == 24 * 16
    assert "tokens" not in result
    assert result["bad_records"] == {"data.train": 1}
    assert {row["images"] for row in whole} == {16}
    assert any(line.startswith("validation step=24 loss=") and " top1_accuracy=" in line for line in lines)
    assert any(line.startswith("step=24 loss=") and " images_per_second=" in line for line in lines)

    # The signal comes from inside of step 6: from outside it could come after the last.
    (tmp_path / "faults.json").write_text(json.dumps([{"rank": 1, "step": 6, "kind": "terminate"}]))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    stopped = ("--job", str(path), "--output-dir", str(tmp_path / "stopped"))
    ranks = start_pooled(2, "trainer_testing.faulty_trainer", *stopped)
    assert [code for code, _ in finish(ranks, timeout_seconds=600)] == [75, 75]
    assert len(rows_of(tmp_path / "stopped")) < 24
    assert "resumed step=" in train("stopped")
    resumed = rows_of(tmp_path / "stopped")
    checkpoints, out = tmp_path / "stopped", tmp_path / "exported"
    assert export(["--checkpoints", str(checkpoints), "--to", str(out)]) == 0
    exported = AutoModelForImageClassification.from_pretrained(out)
    averages = exported.resnet.embedder.embedder.normalization
    assert int(averages.num_batches_tracked) == 24 * 4 / 2, "a pass of both ranks counts once"

    keys = ("loss", "grad_norm", "validation_loss", "validation_top1_accuracy", "images")
    assert [[row.get(key) for key in keys] for row in resumed] == [[row.get(key) for key in keys] for row in whole]


@pytest.mark.slow
def test_two_ranks_that_left_out_more_than_may_be_end_the_job_in_one_line(tmp_path: Path) -> None:
    """Each of them has met one bad sample, as many as may be."""
    samples = list(classified(48, seed=1))
    for row in (40, 45):
        samples[row]["cls"] = b"17"
    write_shards(tmp_path / "train", iter(samples))
    data = {"validation": [], "max_bad_records": 1, "shuffle": False}
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(image_job(tmp_path, data=data, parallelism={"data_replicate": 2})))
    ranks = start_pooled(2, "trainer", "--job", str(path), "--output-dir", str(tmp_path / "out"))
    codes, said = zip(*finish(ranks, timeout_seconds=300), strict=True)
    assert codes == (2, 2)
    words = "data.train: more bad records than data.max_bad_records (1) allows"
    assert [line for line in "".join(said).splitlines() if words in line][1:] == []
    assert words in "".join(said)
    assert len(rows_of(tmp_path / "out")) < 6
